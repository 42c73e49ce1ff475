"""``uno tune``: the entry point's name; the command is :mod:`tune.sweep`."""

from __future__ import annotations

from tune.sweep import main as main
