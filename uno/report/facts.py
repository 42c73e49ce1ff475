"""What the directory of a run says."""

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from uno import runs
from uno.config import Config, flatten, override, to_dict
from uno.data.decode import BAD_SAMPLES, name_bad
from uno.data.files import Storage, parse_json
from uno.errors import ConfigError, StorageError
from uno.methods.registry import settings
from uno.presets import preset
from uno.report.charts import Chart, Series, line_chart
from uno.report.page import duration
from uno.runs.journal import read_journal
from uno.text import plural


@dataclass(frozen=True)
class RunData:
    """A run directory's contents; ``bad`` are (id, reason) of images, ``unreadable``
    names damaged files.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    journal: list[dict[str, Any]] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    config_yaml: str = ""
    estimate: dict[str, Any] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    def entries(self, phase: str) -> list[dict[str, Any]]:
        """The journal's lines of a phase."""
        return [entry for entry in self.journal if entry.get("phase") == phase]

    @property
    def has_trained(self) -> bool:
        """Whether any phase took a step."""
        return any(entry.get("step", 0) for entry in self.journal)

    def head_losses(self) -> list[list[float]]:
        """Per epoch of the discovery phase, the cluster loss of every head."""
        losses = [entry.get("head_losses") for entry in self.entries("discover")]
        rows = [
            row for row in losses if isinstance(row, list) and all(map(is_number, row))
        ]
        return [row for row in rows if len(row) == len(rows[-1])]


def read_facts(storage: Storage, metrics: Mapping[str, float] | None = None) -> RunData:
    """Read what is there, ``metrics`` unless they are given."""
    unreadable: list[str] = []

    def read(name: str, nothing: Any) -> Any:
        """What a file holds (lines, a mapping or text, as ``nothing``); ``nothing``
        where that fails.
        """
        found: Any = None
        with suppress(StorageError, ValueError):
            if isinstance(nothing, list):
                found = read_journal(storage, name)
            else:
                text = (
                    storage.read(name).decode(errors="replace")
                    if storage.exists(name)
                    else ""
                )
                found = parse_json(text or "{}") if isinstance(nothing, dict) else text
        if isinstance(found, type(nothing)):
            return found
        unreadable.append(name)
        return nothing

    results = read(runs.RESULTS_FILE, {}) if metrics is None else metrics
    return RunData(
        {key: float(value) for key, value in results.items() if is_number(value)},
        read(runs.ENVIRONMENT_FILE, {}),
        read(runs.METRICS_FILE, []),
        [
            (name_bad(entry), str(entry.get("reason", "")))
            for entry in read(BAD_SAMPLES, [])
        ],
        read(runs.CONFIG_FILE, ""),
        read(runs.ESTIMATE_FILE, {}),
        tuple(unreadable),
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a JSON file is a finite number."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def curves(facts: RunData) -> list[Chart]:
    """Loss and learning rate of every phase there was, and the loss of every head."""
    drawn = []
    for phase, title in runs.PHASES.items():
        for key, name in (("loss", "loss"), ("lr", "learning rate")):
            pairs = [
                (entry.get("step"), entry.get(key)) for entry in facts.entries(phase)
            ]
            series = Series(
                name, [(x, y) for x, y in pairs if is_number(x) and is_number(y)]
            )
            drawn.append(line_chart(f"{title}: {name}", "step", [series]))
    heads = enumerate(zip(*facts.head_losses(), strict=True), 1)
    series_of_heads = [
        Series(f"head {head}", list(enumerate(losses, 1))) for head, losses in heads
    ]
    drawn.append(line_chart("Cluster loss of each head", "epoch", series_of_heads))
    return [chart for chart in drawn if chart is not None]


def estimate_chart(facts: RunData) -> Chart | None:
    """The curves of ``uno estimate-classes`` over k, where the run has them."""
    ks, stored = facts.estimate.get("ks"), facts.estimate.get("curves")
    if not isinstance(ks, list) or not isinstance(stored, dict):
        return None
    series = [
        Series(label, list(zip(ks, stored[key], strict=False)))
        for key, label in (
            ("f1", "pair F1"),
            ("acc", "accuracy"),
            ("cvi", "silhouette"),
        )
        if isinstance(stored.get(key), list)
        and all(isinstance(v, int | float) for v in [*ks, *stored[key]])
    ]
    return line_chart(
        "How well k clusters find held-out known classes", "k, novel classes", series
    )


def times(facts: RunData) -> list[tuple[str, str]]:
    """Return how long each phase trained, as label and text.

    A phase that took no steps has no lines of metrics, and is left out.
    """
    found = []
    for phase, title in runs.PHASES.items():
        if entries := facts.entries(phase):
            took, last = duration(training_seconds(entries)), entries[-1]
            how_far = (
                f"{plural(last.get('step', 0), 'step')},"
                f" {plural(last.get('epoch', 0), 'epoch')}"
            )
            found.append((f"{title} time", f"{took} for {how_far}"))
    return found


def training_seconds(entries: Sequence[dict[str, Any]]) -> float:
    """Sum the wall time of the steps of a phase, without evaluation.

    Args:
        entries: The lines of metrics of the phase. ``step_ms`` is the mean time of the
            steps since the line before, in milliseconds.

    Returns:
        Seconds.
    """
    seconds, before = 0.0, 0.0
    for entry in entries:
        step, step_ms = entry.get("step", 0), entry.get("step_ms", 0)
        if is_number(step) and is_number(step_ms) and step > before:
            seconds += (step - before) * step_ms / 1000
            before = step
    return seconds


def command_line(config: Config) -> str:
    """A short ``uno discover`` that leads to ``config``: its preset and every field
    that differs from it.
    """
    words = ["uno", "discover", "--preset", config.preset, "--recipe", config.recipe]
    base: Mapping[str, Any] = {}
    with suppress(ConfigError):  # a preset of another version
        start = preset(config.preset, config.recipe)
        base = flatten(to_dict(override(start, settings(config.method, config.preset))))
        base["method"] = start.method
    # then there is no source to name; else it always is
    folders = config.data.labeled is not None
    for key, value in flatten(to_dict(config)).items():
        if key in ("preset", "recipe", "output") or (key == "data.source" and folders):
            continue
        if base.get(key, ...) != value or key in (
            "data.source",
            "data.validation_fraction",
        ):
            section, dot, leaf = key.replace("_", "-").rpartition(".")
            if isinstance(value, bool):
                words.append(
                    f"--{section}.{leaf}" if value else f"--{section}.no-{leaf}"
                )
            else:
                words += [
                    f"--{section}{dot}{leaf}",
                    *map(str, value if isinstance(value, list) else [value]),
                ]
    return shlex.join(words)
