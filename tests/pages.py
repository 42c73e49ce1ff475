"""README and the pages below ``docs/``, as tests read them."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
OF_LIBRARIES = ("docs/guides/cells.md",)
"""Pages whose examples need libraries of other formats, in `make test-formats`."""
EXCERPTS = ("docs/contributing/add-a-method.md",)
"""Pages whose Python is an excerpt of a file."""
FENCE = re.compile(r"^(<!-- executed -->\n)?```(\w*)\n(.*?)^```", re.M | re.S)


@cache
def page(name: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / name).read_text()


def section(name: str, title: str) -> str:
    """What is below a heading of a page, up to the next heading of its level or
    above; never nothing.
    """
    outside = re.sub(
        r"^```.*?^```",
        lambda found: re.sub(r"^#", "\0", found[0], flags=re.M),
        page(name),
        flags=re.M | re.S,
    )
    (found,) = re.finditer(rf"^(#+) {re.escape(title)}$", outside, re.M)
    rest = re.split(
        rf"^#{{1,{len(found[1])}}} ", outside[found.end() :], maxsplit=1, flags=re.M
    )[0]
    assert rest.strip(), f"{name}: nothing below {title!r}"
    return rest.replace("\0", "#")


def blocks(text: str, language: str = r"[\w{}-]*") -> list[str]:
    """The fenced code blocks of a text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands(text: str) -> list[list[str]]:
    """Return the words of the ``uno ...`` lines of all code blocks."""
    lines = "\n".join(blocks(text)).replace("\\\n", " ").splitlines()
    return [
        shlex.split(line, comments=True) for line in lines if line.startswith("uno ")
    ]


def run_examples(name: str) -> int:
    """Run a page's Python and the commands that are marked, in order, in the present
    directory. Returns how many there are.
    """
    from pipelines import cli

    names: dict[str, Any] = {}
    ran = 0
    for mark, language, text in FENCE.findall(page(name)):
        if language == "python" and name not in EXCERPTS:
            exec(compile(text, name, "exec"), names)
            ran += 1
        elif mark:
            for _, *words in commands(f"```\n{text}```"):
                quick = ["--compute.threads", "1", "--batch-size", "16"]
                quick = quick if words[0] == "discover" else []
                assert cli.main([*words, *quick]) == 0, words
                ran += 1
    return ran
