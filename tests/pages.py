"""README and the pages below ``docs/``, as tests read them."""

import re
import shlex
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


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


def commands(text: str, mark: str = "") -> list[list[str]]:
    """The ``uno ...`` lines of all blocks that hold ``mark``, without comments,
    continued lines joined.
    """
    lines = (
        "\n".join(block for block in blocks(text) if mark in block)
        .replace("\\\n", " ")
        .splitlines()
    )
    return [
        shlex.split(line, comments=True) for line in lines if line.startswith("uno ")
    ]


def table(name: str, start: str) -> list[list[str]]:
    """The cells of a page's table whose first line starts with ``start``: its
    titles, then its rows.
    """
    (found,) = re.findall(rf"^{re.escape(start)}.*\n(?:\|.*\n?)*", page(name), re.M)
    head, _, *rows = found.splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head, *rows)]
