"""Somebody else's words, such as names of classes and files, made fit to be shown."""

import difflib
from collections.abc import Iterable


def escaped(text: str, keep: str = "") -> str:
    """``text`` with unprintable characters spelled out (``\\n``), but those in ``keep``."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def visible(name: object, limit: int = 300) -> str:
    """At most ``limit`` characters of ``name``, unprintable ones spelled out; not escaped for HTML."""
    shown = escaped(str(name)[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'cat'?`` where one of the ``known`` words is near; else ""."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def plural(number: int, one: str, many: str = "") -> str:
    """``1 image``, ``2,000 images``; ``many`` where an s is not enough."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
