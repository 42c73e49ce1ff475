"""A run's directory: who may use it, what is wrong with it, and the repairs that cannot lose anything."""

import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import yaml

from uno.config import Config, differing_keys, dump_yaml, override
from uno.data.files import Storage
from uno.errors import ConfigError, StorageError, UnoError
from uno.runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    PHASES,
    RAY_FOLDER,
    RESULTS_FILE,
    STOP_FILE,
    lock,
)
from uno.runs.checkpoint import FORMAT_VERSION, checkpoint_steps, delete_checkpoint, read_checkpoints
from uno.runs.hardware import environment
from uno.runs.journal import read_journal

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # what uno.data.files writes before it renames
LEFTOVERS = {
    RAY_FOLDER: "Ray Train's bookkeeping of a killed command",
    STOP_FILE: "the request of a stopped command",
}


def is_run(storage: Storage) -> bool:
    """Whether the directory holds a run; False where it is empty, or a kill came before ``config.yaml``.

    Raises:
        ConfigError: it holds something else.
    """
    if storage.exists(CONFIG_FILE):
        return True
    if any(name != ENVIRONMENT_FILE and not lock.ours(name) for name in storage.list()):
        raise ConfigError(
            f"{storage.uri} is not empty and holds no run (no {CONFIG_FILE}); nothing there is touched, "
            "choose another --output"
        )
    return False


def open_run(config: Config, storage: Storage, fingerprint: str) -> None:
    """Make the directory a run's: write ``config.yaml`` and ``environment.json``, or check that they match.

    Raises:
        ConfigError: it holds something else, or a run of another configuration (the differing keys are
            named), data set or format.
    """
    if not is_run(storage):
        storage.write(ENVIRONMENT_FILE, json.dumps(environment(fingerprint), indent=1).encode())
        storage.write(CONFIG_FILE, dump_yaml(config).encode())
        return
    keys = differing_keys(read_config_tree(storage), config)
    if keys:
        raise ConfigError(
            f"{storage.uri} holds a run with other settings: {', '.join(keys[:6])}"
            f"{' ...' if len(keys) > 6 else ''}; use those, --fresh, or another --output"
        )
    known = _read_environment(storage)
    if known.get("format_version") != FORMAT_VERSION:
        raise ConfigError(
            f"{storage.uri} has format version {known.get('format_version')}, not {FORMAT_VERSION}"
        )
    if known.get("data_fingerprint") != fingerprint:
        raise ConfigError(f"{storage.uri} was trained on other data (fingerprint differs); use --fresh")


def clear(storage: Storage) -> None:
    """Empty a run directory except for its lock; ``config.yaml`` goes last, so that a rest is still a run."""
    for name in sorted(storage.list(), key=lambda name: name == CONFIG_FILE):
        if not lock.ours(name):
            storage.delete(name)


def read_config_tree(storage: Storage) -> dict[str, Any]:
    """The stored ``config.yaml`` of a run as a nested dict.

    Raises:
        ConfigError: there is none or it is damaged.
    """
    if not storage.exists(CONFIG_FILE):
        raise ConfigError(f"{storage.uri} is not a run directory: it has no {CONFIG_FILE}")
    try:
        tree = yaml.safe_load(storage.read(CONFIG_FILE))
    except (yaml.YAMLError, ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(f"{storage.path(CONFIG_FILE)} is damaged")
    return tree


def read_results(storage: Storage) -> dict[str, float] | None:
    """``metrics.json``; None where there is none or it is damaged."""
    try:
        values = json.loads(storage.read(RESULTS_FILE)) if storage.exists(RESULTS_FILE) else None
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _read_environment(storage: Storage) -> dict[str, Any]:
    try:
        return dict(json.loads(storage.read(ENVIRONMENT_FILE)))
    except (ValueError, TypeError):
        raise ConfigError(f"{storage.path(ENVIRONMENT_FILE)} is damaged") from None


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
    for phase in PHASES:
        _, damaged = read_checkpoints(storage, phase, every=thorough)
        for step, problem in damaged.items():
            delete_checkpoint(storage, phase, step)
            lines.append(f"removed the damaged checkpoint of {phase} step {step} ({problem})")
    for name in _leftovers(storage):
        with suppress(StorageError):  # a process that outlives its command may still be writing there
            storage.delete(name)
    return lines


def _leftovers(storage: Storage) -> list[str]:
    """Names of what killed commands left: temporary files (on local disks), Ray's folder, a STOP file."""
    names = [name for name in LEFTOVERS if storage.exists(name)]
    if storage.is_local:
        for folder, _, files in os.walk(storage.root):
            below = os.path.relpath(folder, storage.root)
            left = [name for name in files if TEMPORARY.fullmatch(name) and not lock.ours(name)]
            names += [os.path.normpath(f"{below}/{name}") for name in left]
    return [name for name in names if not name.startswith(f"{RAY_FOLDER}/")]


# ---------------------------------------------------------------------------------------------- the diagnosis
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

    Takes :data:`uno.runs.lock.WATCH_S` where a lock file has to be watched.

    Raises:
        ConfigError: the directory holds no run.
        StorageError: it cannot be read.
    """
    parts = (_of_config, _of_environment, _of_checkpoints, _of_journal, _of_results, _of_lock, _of_leftovers)
    return [finding for part in parts for finding in part(storage)]


def _of_config(storage: Storage) -> Iterator[Finding]:
    try:
        override(Config(), read_config_tree(storage))
        yield Finding("ok", f"{CONFIG_FILE} is complete")
    except ConfigError as error:
        if not storage.exists(CONFIG_FILE):
            raise
        yield Finding("error", str(error), "copy the one of a checkpoint (checkpoints/*/*/config.yaml) there")


def _of_environment(storage: Storage) -> Iterator[Finding]:
    try:
        known = _read_environment(storage)
        versions = dict(known.get("versions", {}))
    except (UnoError, ValueError, TypeError):
        text = f"{ENVIRONMENT_FILE} is missing or damaged"
        yield Finding("error", text, "the run cannot prove its data: --fresh")
        return
    if known.get("format_version") != FORMAT_VERSION:
        text = f"format version {known.get('format_version')}, not {FORMAT_VERSION}"
        yield Finding("error", text, "--fresh")
        return
    changed = []
    for name in ("torch", "torchvision", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            now = importlib.metadata.version(name)
            if versions.get(name, now) != now:
                changed.append(f"{name} {versions[name]} is {now} now")
    if changed:
        yield Finding("warning", ", ".join(changed), "it resumes, but not to the bit")
    else:
        yield Finding("ok", f"{ENVIRONMENT_FILE} names the versions installed here")


def _of_checkpoints(storage: Storage) -> Iterator[Finding]:
    for phase in PHASES:
        try:
            _, damaged = read_checkpoints(storage, phase, every=True)
        except StorageError as error:
            yield Finding("error", str(error))
            continue
        good = [str(step) for step in checkpoint_steps(storage, phase) if step not in damaged]
        steps = f"checkpoints of step {', '.join(good)} verify" if good else "no checkpoint yet"
        yield Finding("ok", f"{phase}: {steps}")
        for step, problem in damaged.items():
            text = f"{phase} step {step}: {problem}"
            yield Finding("warning", text, "an older one is used; --repair removes it")


def _of_journal(storage: Storage) -> Iterator[Finding]:
    found = len(read_journal(storage))
    damaged = len(storage.read(METRICS_FILE).splitlines()) - found if storage.exists(METRICS_FILE) else 0
    if damaged:
        yield Finding("warning", f"{METRICS_FILE}: {damaged} unreadable lines", "the next start drops them")
    else:
        yield Finding("ok", f"{METRICS_FILE}: {found} lines")


def _of_results(storage: Storage) -> Iterator[Finding]:
    if not storage.exists(RESULTS_FILE):
        yield Finding("ok", "not finished: the same command goes on")
    elif read_results(storage) is None:
        remedy = "the same command, or uno evaluate, writes it again"
        yield Finding("warning", f"{RESULTS_FILE} is damaged", remedy)
    else:
        yield Finding("ok", "finished: the same command shows the results")


def _of_lock(storage: Storage) -> Iterator[Finding]:
    found = lock.holder(storage)
    if found is None:
        yield Finding("ok", "no command is at work here")
    elif found[1]:
        yield Finding("ok", f"{found[0]} is at work here")
    else:
        yield Finding("warning", f"{found[0]} held the directory and is gone", "the next command takes over")


def _of_leftovers(storage: Storage) -> Iterator[Finding]:
    for name in _leftovers(storage):
        text = f"{name}: {LEFTOVERS.get(name, 'an unfinished write')}"
        yield Finding("warning", text, "the next start removes it")
