"""Names and numbers fit for the page: whatever a class or a file is called, it is shown and stays inert."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from uno.config import Config, flatten, to_dict
from uno.errors import ConfigError
from uno.presets import preset

MAX_NAME = 300
"""Characters of a name that reach the page; the visual cut is the style sheet's."""


def visible(name: str, limit: int = MAX_NAME) -> str:
    """``name`` with everything unprintable spelled out (a line break is ``\\n``, RTL override ``\\u202e``).

    Markup is not touched: the templates escape it.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name[: limit + 1])
    return shown if len(name) <= limit else f"{shown[: limit - 1]}…"


def short(name: str, limit: int) -> str:
    """:func:`visible`, cut to ``limit`` characters: for labels inside drawings, where no style sheet cuts."""
    shown = visible(name)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def percent(fraction: float | None) -> str:
    """A fraction as percent with one decimal; a dash where there is none."""
    return "–" if fraction is None or fraction != fraction else f"{100 * fraction:.1f}"  # noqa: RUF001


def duration(seconds: float) -> str:
    """Seconds as ``48 s``, ``12 min`` or ``3 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def command_line(config: Config) -> str:
    """A short ``uno discover`` that leads to ``config``: its preset and every field that differs from it."""
    words = ["uno", "discover", "--preset", config.preset, "--recipe", config.recipe]
    try:
        base: Mapping[str, Any] = flatten(to_dict(preset(config.preset, config.recipe)))
    except ConfigError:  # a preset of another version
        base = {}
    for key, value in flatten(to_dict(config)).items():
        own_data = key == "data.source" and config.data.labeled is None
        if key in ("preset", "recipe", "output") or (base.get(key, ...) == value and not own_data):
            continue
        if key == "data.source" and config.data.labeled is not None:
            continue
        words += _flag(key.replace("_", "-"), value)
    return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        section, _, leaf = name.rpartition(".")
        return [f"--{name}" if value else f"--{section}.no-{leaf}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *(str(v) for v in values)]
