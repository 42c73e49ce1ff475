"""Somebody else's words, such as names of classes and files, made fit to be shown."""

import unicodedata

from uno.errors import printable


def visible(name: object, limit: int = 300) -> str:
    """At most ``limit`` characters of ``name``, unprintable ones spelled out; not
    escaped for HTML.
    """
    shown = printable(str(name)[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def composed(name: str) -> str:
    """Equal for names that look the same: Mac and Linux spell é differently."""
    return unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    """Equal for names that people, or file systems, take for one: by Unicode
    normalization and case.
    """
    return composed(composed(name).casefold())


def plural(number: float, one: str, many: str = "") -> str:
    """``1 image``, ``2,000 images``; ``many`` where an s is not enough."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
