"""Reading a page as a browser's parser does, as far as the tests need it."""

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "img", "input", "br", "hr"}
FETCHING = (
    "src",
    "href",
    "srcset",
    "data",
    "poster",
    "action",
    "background",
    "xlink:href",
    "style",
)


class Page(HTMLParser):
    """Tags, attributes, texts and scripts of an HTML page; ``unclosed`` is empty for
    a well-nested one.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.shown: list[tuple[str, str, str]] = []  # tag, metric key, text
        self.exact: dict[str, str] = {}
        self.scripts: list[str] = []
        self.text = ""
        self.unclosed: list[str] = []
        self._open: tuple[str, dict[str, str]] = ("", {})
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = (tag, {name: value or "" for name, value in attrs})
        self.tags.append(self._open)
        self.scripts += [""] * (tag == "script")
        if tag not in VOID:
            self.unclosed.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag, f"{tag} closes nothing"
        self._open = ("", {})

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"the page has a comment: {data}")

    def handle_data(self, data: str) -> None:
        if self.unclosed and self.unclosed[-1] == "script":
            self.scripts[-1] += data
        elif self.unclosed and self.unclosed[-1] != "style":
            self.text += data
            tag, attrs = self._open
            if "data-key" in attrs:
                self.shown.append((tag, attrs["data-key"], data.strip()))
            elif "data-exact" in attrs:
                self.exact[attrs["data-exact"]] = data.strip()

    def data(self) -> Any:
        """What the page hands to its script."""
        return json.loads(self.scripts[0])

    def ids(self) -> set[str]:
        """All ids."""
        return {attrs["id"] for _, attrs in self.tags if "id" in attrs}


def requests(page: Page) -> list[str]:
    """Values of attributes that would make a browser fetch something."""
    values = [
        (tag, *item)
        for tag, attrs in page.tags
        if tag != "path"
        for item in attrs.items()
    ]
    inert = ("data:image/", "data:,", "#")
    return [
        f"{tag} {name}={value[:80]}"
        for tag, name, value in values
        if name in FETCHING
        and not value.startswith(inert)
        and (name != "style" or "url" in value)
    ]
