"""What is wrong with a run directory, what to do about it, and the repairs that cannot lose anything."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from contextlib import suppress
from typing import Any, NamedTuple

from uno.config import Config, override
from uno.data.files import Storage
from uno.errors import ConfigError, StorageError
from uno.runs import lock, run
from uno.runs.checkpoint import FORMAT_VERSION, checkpoint_problem, checkpoint_steps, delete_checkpoint
from uno.runs.journal import METRICS, damaged_lines, read_journal

RESULTS = "metrics.json"  # written last: the mark of a finished run
STOP_FILE = "STOP"  # asks the workers to save and leave
RAY_FOLDER = "ray"  # Ray Train's own bookkeeping; a resumed run never reads it
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # what uno.data.files writes before it renames


class Finding(NamedTuple):
    """One line of a diagnosis. ``level`` is ok, warning or error; an error keeps the run from resuming."""

    level: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        """``warning  what it is; what to do``."""
        return f"{self.level:8} {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def examine(storage: Storage) -> list[Finding]:
    """All that can be told of a run directory without its data; nothing is changed.

    Takes :data:`uno.runs.lock.PATIENCE_S` where a lock file has to be watched.

    Raises:
        ConfigError: the directory holds no run.
        StorageError: it cannot be read.
    """
    return [
        *_of_config(storage),
        *_of_environment(storage),
        *(finding for phase in run.PHASES for finding in _of_checkpoints(storage, phase)),
        *_of_journal(storage),
        *_of_results(storage),
        *_of_lock(storage),
        *_of_leftovers(storage),
    ]


def heal(storage: Storage, thorough: bool = False) -> list[str]:
    """Remove what is provably of no use; every command that trains does so when it starts. The caller holds
    the directory's claim.

    That is: files a killed writer left, Ray's bookkeeping, a STOP file, and damaged checkpoints where an
    older one verifies (``thorough``: all that are damaged, not only those newer than the newest valid one).

    Returns:
        A line for everything that was removed and had a meaning once.

    Raises:
        StorageError: a phase has checkpoints and none verifies; nothing of it is removed.
    """
    lines = []
    for phase in run.PHASES:
        damaged = _damaged(storage, phase, only_newer=not thorough)
        for step, problem in damaged.items():
            delete_checkpoint(storage, phase, step)
            lines.append(f"removed the damaged checkpoint of {phase} step {step} ({problem})")
    for name in leftovers(storage):
        with suppress(StorageError):  # a process that outlives its command may still be writing there
            storage.delete(name)
    return lines


def leftovers(storage: Storage) -> list[str]:
    """Names of what killed commands left: temporary files (on local disks), Ray's folder, a STOP file."""
    names = [name for name in (RAY_FOLDER, STOP_FILE) if storage.exists(name)]
    if storage.is_local:
        for folder, _, files in os.walk(storage.root):
            below = os.path.relpath(folder, storage.root)
            left = [name for name in files if TEMPORARY.fullmatch(name) and not lock.ours(name)]
            names += [os.path.normpath(f"{below}/{name}") for name in left]
    return [name for name in names if not name.startswith(f"{RAY_FOLDER}/")]


def _damaged(storage: Storage, phase: str, only_newer: bool) -> dict[int, str]:
    damaged: dict[int, str] = {}
    steps = checkpoint_steps(storage, phase)
    valid = False
    for step in reversed(steps):
        problem = checkpoint_problem(storage, phase, step)
        if problem is not None:
            damaged[step] = problem
        else:
            valid = True
            if only_newer:
                break
    if steps and not valid:
        raise StorageError(
            f"none of the {len(steps)} checkpoints in {storage.path('checkpoints/' + phase)} verifies "
            f"({damaged[steps[-1]]}); use --fresh to start over"
        )
    return damaged


def _of_config(storage: Storage) -> list[Finding]:
    try:
        override(Config(), run.read_config_tree(storage))
    except ConfigError as error:
        if not storage.exists("config.yaml"):
            raise
        return [
            Finding("error", str(error), "copy the one of a checkpoint (checkpoints/*/*/config.yaml) there")
        ]
    return [Finding("ok", "config.yaml is complete")]


def _of_environment(storage: Storage) -> list[Finding]:
    try:
        known: dict[str, Any] = dict(json.loads(storage.read("environment.json")))
        versions = dict(known.get("versions", {}))
    except (StorageError, ValueError, TypeError):
        return [
            Finding(
                "error", "environment.json is missing or damaged", "the run cannot prove its data: --fresh"
            )
        ]
    if known.get("format_version") != FORMAT_VERSION:
        return [
            Finding("error", f"format version {known.get('format_version')}, not {FORMAT_VERSION}", "--fresh")
        ]
    changed = []
    for name in ("torch", "torchvision", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            now = importlib.metadata.version(name)
            if versions.get(name, now) != now:
                changed.append(f"{name} {versions[name]} is {now} now")
    if changed:
        return [Finding("warning", ", ".join(changed), "it resumes, but not to the bit")]
    return [Finding("ok", "environment.json names the versions installed here")]


def _of_checkpoints(storage: Storage, phase: str) -> list[Finding]:
    steps = checkpoint_steps(storage, phase)
    try:
        damaged = _damaged(storage, phase, only_newer=False)
    except StorageError as error:
        return [Finding("error", str(error))]
    findings = [
        Finding("warning", f"{phase} step {step}: {problem}", "an older one is used; --repair removes it")
        for step, problem in damaged.items()
    ]
    good = [str(step) for step in steps if step not in damaged]
    text = f"{phase}: checkpoints of step {', '.join(good)} verify" if good else f"{phase}: no checkpoint yet"
    return [Finding("ok", text), *findings]


def _of_journal(storage: Storage) -> list[Finding]:
    damaged = damaged_lines(storage)
    if damaged:
        return [Finding("warning", f"{METRICS}: {damaged} unreadable lines", "the next start drops them")]
    return [Finding("ok", f"{METRICS}: {len(read_journal(storage))} lines")]


def _of_results(storage: Storage) -> list[Finding]:
    if not storage.exists(RESULTS):
        return [Finding("ok", "not finished: the same command goes on")]
    if read_results(storage) is None:
        return [
            Finding("warning", f"{RESULTS} is damaged", "the same command, or uno evaluate, writes it again")
        ]
    return [Finding("ok", "finished: the same command shows the results")]


def read_results(storage: Storage) -> dict[str, float] | None:
    """``metrics.json``; None where there is none or it is damaged."""
    try:
        values = json.loads(storage.read(RESULTS)) if storage.exists(RESULTS) else None
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _of_lock(storage: Storage) -> list[Finding]:
    holder = lock.holder(storage)
    if holder is None:
        return [Finding("ok", "no command is at work here")]
    who, alive = holder
    if alive:
        return [Finding("ok", f"{who} is at work here")]
    return [Finding("warning", f"{who} held the directory and is gone", "the next command takes over")]


def _of_leftovers(storage: Storage) -> list[Finding]:
    meaning = {
        RAY_FOLDER: "Ray Train's bookkeeping of a killed command",
        STOP_FILE: "the request of a stopped command",
    }
    return [
        Finding("warning", f"{name}: {meaning.get(name, 'an unfinished write')}", "the next start removes it")
        for name in leftovers(storage)
    ]
