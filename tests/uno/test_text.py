"""Words of others, and counts, as they are shown."""

from uno.errors import did_you_mean, printable
from uno.text import plural, visible


def test_what_cannot_be_printed_is_spelled_out():
    assert visible("a\nb\u202ec") == "a\\nb\\u202ec" and visible("é א") == "é א"
    assert len(visible("x" * 400)) == 300 and visible("\u202e" * 4, 4) == "\\u2…"
    assert printable("a\tb\x1b[31m", kept="\t") == "a\tb\\x1b[31m"


def test_counts_and_guesses():
    assert [plural(n, "image") for n in (0, 1, 2000)] == [
        "0 images",
        "1 image",
        "2,000 images",
    ]
    assert plural(2, "class", "classes") == "2 classes"
    assert (
        did_you_mean("ctas", ["cats", "dogs"]) == "; did you mean 'cats'?"
        and did_you_mean("x", []) == ""
    )
