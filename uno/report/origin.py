"""Where a run comes from: what was run, on what, for how long, and the commands that repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from uno.config import Config, flatten, to_dict
from uno.data.splits import Task
from uno.errors import ConfigError
from uno.methods import METHODS, num_heads
from uno.presets import preset
from uno.report.facts import Facts, is_number
from uno.report.page import duration


def what_was_run(
    config: Config, facts: Facts, task: Task | None, best_head: int | None, uri: str
) -> list[tuple[str, str]]:
    """Label and value pairs: where, data, versions, hardware, time."""
    env, data, workers = facts.environment, config.data, config.compute.workers
    num_labeled = int((task.labels >= 0).sum()) if task else config.train.batch_size
    lines: dict[str, Any] = {
        "Run directory": uri,
        "Command": env.get("command"),
        "Preset, recipe, seed": f"{config.preset}, {config.recipe}, {config.seed}",
        "Data": data.source if data.labeled is None else f"{data.labeled} + {data.unlabeled}",
    }
    if task is not None:
        num_train = int(task.is_train.sum())
        lines["Rows"] = (
            f"{num_labeled:,} labeled, {num_train - num_labeled:,} unlabeled, "
            f"{len(task.rows) - num_train:,} test"
        )
        lines["Classes"] = f"{task.num_known} known, {task.num_novel} to discover"
    lines["Data fingerprint"] = env.get("data_fingerprint", "not recorded")
    lines["Model"] = f"{config.model.encoder}, {data.store_size} px, {num_heads(config)} heads"
    lines["Method"] = f"{config.method}: {METHODS[config.method]}"
    if best_head is not None:
        lines["Best head"] = f"{best_head + 1} (lowest training cluster loss)"
    if isinstance(env.get("versions"), dict):
        versions = {"Python": env.get("python", "?"), **env["versions"]}
        lines["Versions"] = ", ".join(f"{name} {value}" for name, value in versions.items())
    if env:
        gpus = ", ".join(map(str, env.get("gpus") or ["no GPU"]))
        lines["Hardware"] = f"{gpus}; {env.get('platform', '?')}"
    lines["Workers"] = f"{workers} with Ray" if workers else "this process, without Ray"
    for phase, name in (("rotation", "Rotation"), ("pretrain", "Pretraining"), ("discover", "Discovery")):
        if entries := facts.entries(phase):
            size = (
                min(config.train.batch_size, num_labeled) if phase == "pretrain" else config.train.batch_size
            )
            lines[f"{name} time"] = (
                f"{duration(training_seconds(entries, size))} for {entries[-1].get('step', 0):,} steps, "
                f"{entries[-1].get('epoch', 0):,} epochs"
            )
    return [(label, str(value)) for label, value in lines.items() if value is not None]


def training_seconds(entries: Sequence[dict[str, Any]], images_per_step: int) -> float:
    """Wall time that the lines of a phase account for, from their images/s; evaluation is not in it."""
    seconds, before = 0.0, 0
    for entry in entries:
        step, speed = entry.get("step", 0), entry.get("images_per_s", 0)
        if is_number(step) and is_number(speed) and speed and step > before:
            seconds += (step - before) * images_per_step / speed
            before = step
    return seconds


def commands(config: Config, uri: str) -> list[tuple[str, str]]:
    """How to run it again: from the stored settings, and from a preset and what differs; how to draw it."""
    stored = shlex.quote(f"{uri}/config.yaml")
    return [
        ("Again, from the stored settings", f"uno discover --config {stored} --output NEW_DIRECTORY"),
        (
            "Again, from the preset and what differs from it",
            f"{command_line(config)} --output NEW_DIRECTORY",
        ),
        ("This page", f"uno report {shlex.quote(uri)}"),
    ]


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
