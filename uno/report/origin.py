"""Where a run comes from: how long it took, and the commands that repeat it."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from uno.config import Config, flatten, to_dict
from uno.data.splits import Task
from uno.errors import ConfigError
from uno.presets import preset
from uno.report.facts import Facts, is_number
from uno.report.page import duration


def times(config: Config, facts: Facts, task: Task | None) -> list[tuple[str, str]]:
    """What each phase took, as label and text."""
    found = []
    for phase, name in (("rotation", "Rotation"), ("pretrain", "Pretraining"), ("discover", "Discovery")):
        if entries := facts.entries(phase):
            size = config.train.batch_size
            if phase == "pretrain" and task is not None:  # a set smaller than a batch is one batch
                size = min(size, int((task.labels >= 0).sum()))
            steps, epochs = entries[-1].get("step", 0), entries[-1].get("epoch", 0)
            took = duration(training_seconds(entries, size))
            found.append((f"{name} time", f"{took} for {steps:,} steps, {epochs:,} epochs"))
    return found


def training_seconds(entries: Sequence[dict[str, Any]], images_per_step: int) -> float:
    """Wall time that the lines of a phase account for, from their images/s; evaluation is not in it."""
    seconds, before = 0.0, 0
    for entry in entries:
        step, speed = entry.get("step", 0), entry.get("images_per_s", 0)
        if is_number(step) and is_number(speed) and speed and step > before:
            seconds += (step - before) * images_per_step / speed
            before = step
    return seconds


def command_line(config: Config) -> str:
    """A short ``uno discover`` that leads to ``config``: its preset and every field that differs from it."""
    words = ["uno", "discover", "--preset", config.preset, "--recipe", config.recipe]
    try:
        base: Mapping[str, Any] = flatten(to_dict(preset(config.preset, config.recipe)))
    except ConfigError:  # a preset of another version
        base = {}
    folders = config.data.labeled is not None  # then there is no source to name; else it always is
    for key, value in flatten(to_dict(config)).items():
        if key in ("preset", "recipe", "output") or (key == "data.source" and folders):
            continue
        if base.get(key, ...) != value or key == "data.source":
            section, _, leaf = key.replace("_", "-").rpartition(".")
            if isinstance(value, bool):
                words.append(f"--{section}.{leaf}" if value else f"--{section}.no-{leaf}")
            else:
                name = f"{section}.{leaf}" if section else leaf
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)
