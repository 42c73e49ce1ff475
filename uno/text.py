"""Somebody else's words, such as names of classes and files, made fit to be shown."""

from uno.errors import printable


def visible(name: object, limit: int = 300) -> str:
    """At most ``limit`` characters of ``name``, unprintable ones spelled out; not escaped for HTML."""
    shown = printable(str(name)[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"
