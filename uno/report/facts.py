"""What the run directory itself tells: settings, metrics, curves, bad samples. Every file may be missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from uno.data.files import Storage
from uno.data.splits import Task
from uno.errors import StorageError
from uno.runs.journal import read_journal

PHASES = ("pretrain", "discover")


@dataclass(frozen=True)
class Facts:
    """The contents of a run directory; empty where a file is missing or damaged (``unreadable`` names it)."""

    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    journal: list[dict[str, Any]] = field(default_factory=list)
    bad: list[dict[str, str]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    config_yaml: str = ""
    estimate: dict[str, Any] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    def entries(self, phase: str) -> list[dict[str, Any]]:
        """The journal's lines of a phase."""
        return [entry for entry in self.journal if entry.get("phase") == phase]

    def last(self, phase: str) -> dict[str, Any]:
        """The newest line of a phase, {} without any."""
        return (self.entries(phase) or [{}])[-1]

    def head_losses(self) -> list[list[float]]:
        """Per epoch of the discovery phase, the cluster loss of every head."""
        losses = [entry.get("head_losses") for entry in self.entries("discover")]
        rows = [row for row in losses if isinstance(row, list) and all(map(_is_number, row))]
        return [row for row in rows if len(row) == len(rows[-1])]


def read_facts(storage: Storage) -> Facts:
    """Read what is there."""
    unreadable: list[str] = []

    def read(name: str) -> str:
        try:
            return storage.read(name).decode(errors="replace") if storage.exists(name) else ""
        except StorageError:
            unreadable.append(name)
            return ""

    def parse(name: str) -> dict[str, Any]:
        text = read(name)
        try:
            value = json.loads(text) if text else {}
        except ValueError:
            value = None
        if not isinstance(value, dict):
            unreadable.append(name)
            return {}
        return value

    metrics = parse("metrics.json")
    classes = parse("model/classes.json").get("classes", [])
    return Facts(
        {key: float(value) for key, value in metrics.items() if _is_number(value)},
        parse("environment.json"),
        [entry for entry in read_journal(storage) if isinstance(entry, dict)],
        [entry for line in read("bad_samples.jsonl").splitlines() if (entry := _bad(line)) is not None],
        {entry["index"]: entry["name"] for entry in classes if _is_class(entry)},
        read("config.yaml"),
        parse("estimate.json"),
        tuple(unreadable),
    )


def output_names(task: Task, facts: Facts) -> list[str]:
    """Names of all outputs, known first; discovered ones from ``model/classes.json``, or ``novel-1``."""
    default = [*task.known, *(f"novel-{i + 1}" for i in range(task.num_novel))]
    return [name if i < len(task.known) else str(facts.names.get(i, name)) for i, name in enumerate(default)]


def training_seconds(entries: Sequence[dict[str, Any]], images_per_step: int) -> float:
    """Wall time that the lines of a phase account for, from their images/s; evaluation is not in it."""
    seconds, before = 0.0, 0
    for entry in entries:
        step, speed = entry.get("step", 0), entry.get("images_per_s", 0)
        if _is_number(step) and _is_number(speed) and speed and step > before:
            seconds += (step - before) * images_per_step / speed
            before = step
    return seconds


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_class(entry: Any) -> bool:
    return (
        isinstance(entry, dict) and isinstance(entry.get("index"), int) and isinstance(entry.get("name"), str)
    )


def _bad(line: str) -> dict[str, str] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    return {"id": str(entry.get("id", "")), "reason": str(entry.get("reason", ""))}
