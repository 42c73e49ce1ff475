"""One concept, one word: retired names, metaphors and British spellings stay out of what a user reads."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from pipelines import cli
from tests.pages import PAGES, page

ROOT = Path(__file__).parent.parent

KEYS = [
    "data.pile",
    "data.hold_out",
    "data.unlabel_known",
    "data.ingest",
    "data.composition",
    "data.store_size",
    "model.trainable",
    "model.encoder_lr",
    "model.start",
    "objective.prior",
    "objective.num_iters",
    "objective.top_features",
    "objective.min_cosine",
    "objective.interval",
    "objective.warmup",
    "augment.cached_views",
    "compute.workers",
    "compute.placement",
]
"""Of configurations until version 0.1; a flag has the same words with hyphens."""
VALUES = ["trainable=heads", "trainable=last", "pile=mixed", "pile=novel", "ingest=resident"]
METAPHORS = [
    r"\bpiles?\b", r"\bas told\b", r"\bas given\b", r"\bas it began\b", r"\bhurt\b", r"\bbelieved\b",
    r"(?-i:\brooms?\b)", r"\bwhichever\b", r"\bway in\b", r"\bday after\b",
    r"\bwhat survives\b", r"\bgo(es)? on\b",
    r"\bin the words of\b", r"\b(is|are|was) told\b",
]  # fmt: skip
BRITISH = [
    "colour\\w*",
    "centre\\w*",
    "centred",
    "neighbour\\w*",
    "behaviour\\w*",
    "learnt",
    "licence\\w*",
    "grey\\w*",
    "favour\\w*",
    "\\w*(?:normal|recogn|initial|minim|maxim|summar|vector|organ|general|synchron)is(?:e[sd]?|ing|ation)",
    "labell(?:ed|ing)",
    "modell(?:ed|ing)",
    "catalogue",
]
KEPT = ("trust/neighbours/agreement",)  # a metric's name in files and records of earlier runs

RETIRED = re.compile("|".join([
    *(rf"(?<![\w.]){re.escape(key)}(?![\w-])" for key in KEYS),
    *(rf"--{re.escape(key.replace('_', '-'))}(?![\w-])" for key in KEYS),
    *(rf"\b{re.escape(pair).replace('=', '[ =]')}\b" for pair in VALUES), *METAPHORS,
    *(rf"\b(?:{word})\b" for word in BRITISH),
]), re.I)  # fmt: skip
PERCENT = re.compile(r"(?<=[\d}]) %(?![\w({])")
NOUNS = "images classes rows files epochs steps workers nodes cells trials shards warnings errors"
UNCOUNTED = re.compile(
    r"(?<!of )(?<!than )(?<!all )(?<!its )(?<!the )(?<!and )(?<!for )(?<!by )"
    r"\{(?![A-Z_]+[:}]|few|kind|flag|self._phase)[^{}\"]*\} "
    rf"(?:(?:un)?labeled |known |novel |hidden )?(?:{NOUNS.replace(' ', '|')})\b(?!/s|, more than)"
)
"""Of an f-string: a number and a noun that is not from :func:`uno.text.plural`."""

# Where the values of old names are understood, or named to a user who writes them.
OLD_SPELLINGS = ("uno/config.py", "uno/session/settings.py")


@cache
def texts(path: Path) -> list[tuple[int, str]]:
    """(line, text) of a file: of Python the strings, of f-strings the source; of all else the lines. White
    space is one blank, and what is :data:`KEPT` is left out.
    """
    source = path.read_text()
    if path.suffix != ".py":
        lines = enumerate(source.splitlines(), 1)
        found = [(line, re.sub(r"\{%.*?%\}", "", text)) for line, text in lines]
    else:
        nodes = list(ast.walk(ast.parse(source)))
        formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for node in formatted for part in ast.walk(node) if part is not node}
        own = [node for node in nodes if id(node) not in inside]
        found = [
            (n.lineno, ast.get_source_segment(source, n) or "") for n in own if isinstance(n, ast.JoinedStr)
        ]
        found += [
            (n.lineno, n.value) for n in own if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
    for kept in KEPT:
        found = [(line, text.replace(kept, "")) for line, text in found]
    return [(line, " ".join(text.split())) for line, text in found]


def files() -> list[Path]:
    code = [p for folder in ("uno", "pipelines", "tune", "examples") for p in (ROOT / folder).rglob("*")]
    code = [p for p in code if p.suffix in (".py", ".html", ".jinja", ".js", ".yaml", ".sh")]
    pages = [p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts]
    return [*code, *pages, *ROOT.glob("*.md")]


def found(
    pattern: re.Pattern[str], suffixes=(".py", ".html", ".jinja", ".js", ".yaml", ".sh", ".md"), but=()
):
    for path in files():
        if path.suffix in suffixes and not str(path.relative_to(ROOT)).startswith(tuple(but)):
            for line, text in texts(path):
                if match := pattern.search(text):
                    near = text[max(0, match.start() - 50) :][:150]
                    yield f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: {near}"


def test_the_patterns_find_what_they_are_for():
    """Kills: a pattern that matches nothing."""
    for text in ("data.pile", "--hold-out x", "--data.hold-out .1", "as told", "the piles", "Grey", "centred",
                 "normalised", "labelled", "model.trainable heads", "neighbouring", "goes on"):  # fmt: skip
        assert RETIRED.search(text.replace("--hold-out x", "--data.hold-out x")), text
    assert PERCENT.search("95 % of") and PERCENT.search("{x:.0f} %") and not PERCENT.search("{i % 3} 95% of")
    assert UNCOUNTED.search('f"{n:,} unlabeled images"') and not UNCOUNTED.search('f"{n:,} of them"')


@pytest.mark.parametrize("name", cli.SENTENCES)
def test_help_has_no_retired_words(name, capsys):
    """As printed. Kills: a word that a flag's text gets from a table."""
    cli.main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert not RETIRED.search(text) and not PERCENT.search(text)


def test_percent_has_one_spelling():
    """96%. Kills: a space before the sign, in code, pages or documents."""
    lines = list(found(PERCENT))
    assert not lines, "\n".join(lines)


def test_counts_are_plural_where_they_are():
    """Kills: "1 images": a number and a noun in an f-string that :func:`uno.text.plural` has not joined."""
    lines = list(found(UNCOUNTED, {".py"}))
    assert not lines, "\n".join(lines)


def test_retired_words_are_gone():
    """Kills: an old key, flag, metaphor or British spelling in a message, docstring, page or document.
    Results quote commands of their day.
    """
    lines = list(found(RETIRED, but=(*OLD_SPELLINGS, "CHANGELOG.md", "docs/results/")))
    assert not lines, "\n".join(lines)


PROSE = re.compile("|".join([
    r"\bas (?:told|given|said|it began)\b",  # 1. who decided, and by which flag
    r"\b(?:says|tells?|learns|learnt|wants|asks|stands?|wins|believes)\b",  # 5. software is no person
    r"\b(?:ours|theirs|somebody|one's own)\b",  # 6. the party has a name
    r",? too[.;:]", r"\band others too\b",  # 7. "also", before the verb
    r"\?(?=\s|$)",  # 8. no question
    r"\bthe rest\b", r"\bwhichever\b",  # 9. the noun
    r"(?<![\w.`])\.\d", r"\d %",  # 10. a leading zero; 96%
]), re.I)  # fmt: skip
"""The rules for sentences of documents that a pattern can see."""
NOT_WRITTEN = (
    "docs/results/",
    "docs/LICENSES.md",
    *(f"docs/reference/{n}.md" for n in ("cli", "config", "python", "methods")),
)
"""Pages that are made from records, packages and code."""


def sentences(text: str) -> list[str]:
    """The prose of a page: no code, no link targets; a paragraph, a list entry or a table cell each."""
    text = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`", text))
    return [
        " ".join(part.split())
        for part in re.split(r"\n\s*\n|\n(?=[-*#|] ?|\d\. )|(?<=\|)", text)
        if part.strip()
    ]


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith(NOT_WRITTEN)])
def test_pages_follow_the_rules_for_sentences(name):
    """Kills: software that says, tells or learns, ", too", "theirs", questions, bare decimals on a page."""
    hits = [f"{match[0]!r}: {text[max(0, match.start() - 60) :][:120]}"
            for text in sentences(page(name)) for match in PROSE.finditer(text)]  # fmt: skip
    assert not hits, "\n".join(hits)


def test_the_rules_find_what_they_are_for():
    """Kills: a pattern that matches nothing, code and quotations that count as sentences."""
    for text in (
        "set as told",
        "the run says so",
        "a model that learns",
        "as theirs",
        "it is fast, too.",
        "Is it?",
        "gain .7",
        "the rest",
    ):
        assert PROSE.search(text), text
    assert sentences("A `?` is\nhere.\n\n```\nis it?\n```\n- b [c](d?e)") == ["A ` is here.", "- b [c]"]


FIELDS = re.compile(r"\{\{.*?\}\}|\{[^{}]*\}|<[^<>]*(?:>|$)|[\"']%[^\"']*[\"']")
"""Of templates and f-strings, what is no word of a message."""


def docstrings(path: Path) -> set[str]:
    """Those of a Python file, and the strings that stand below a name, as in :func:`texts`."""
    tree = ast.parse(path.read_text()) if path.suffix == ".py" else ast.Module([], [])
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {
        " ".join(v.value.split()) for v in alone if isinstance(v, ast.Constant) and isinstance(v.value, str)
    }


@pytest.mark.parametrize("folder", ["uno", "pipelines", "tune"])
def test_messages_help_and_report_follow_the_rules_for_sentences(folder):
    """Strings that a user can read, without their fields, tags and styles. Kills: the same as on a page."""
    found = list[str]()
    for path in (
        p for p in files() if p.is_relative_to(ROOT / folder) and p.suffix in (".py", ".html", ".jinja")
    ):
        hidden = docstrings(path)
        for line, text in texts(path):
            if " " in text and text not in hidden and not re.search(r"\.\d+\w*;|\\", text):
                said = " ".join(FIELDS.sub("{}", text).split())
                if match := PROSE.search(said):
                    found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: {said[:100]}")
    assert found == []
