"""A seeded fault injector for tests and drills: ``UNO_FAULTS`` kills, poisons and fills disks on purpose.

Faults are separated by ``;`` and have the form ``KIND:key=value,...``::

    kill-worker:rank=1,step=7                  kill -9 of the training process of rank 1 before that step
    kill-worker:step=5..80,times=3,seed=0      at three steps drawn from the range
    kill-node:step=7                           kill -9 of the raylets of ranks that are not on Ray's head node
    nan:rank=1,step=7                          that batch is not a number, on one rank
    full-disk:checkpoint=2                     the second checkpoint finds no space (local paths only)
    read-only:checkpoint=2                     or a file system that takes no writes
    kill-driver:step=7                         kill -9 of the command itself, once that step is in the journal
    sigterm:step=7                             SIGTERM to it

``phase=pretrain`` aims at the other phase. Every fault strikes once in the life of a run directory: it is
noted in ``faults.jsonl`` there before it strikes, as is every step from which training starts or starts
again, so that :func:`wasted_steps` can tell what it cost. Without the variable nothing here does anything:
:func:`in_training` and :func:`in_driver` return what they are given.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uno.data import files as storage_module
from uno.data.files import Storage
from uno.errors import ConfigError
from uno.steps import Batch

VARIABLE = "UNO_FAULTS"
LOG = "faults.jsonl"
TRAINING = ("kill-worker", "kill-node", "nan")
DISKS = {"full-disk": errno.ENOSPC, "read-only": errno.EROFS}
DRIVER = {"kill-driver": signal.SIGKILL, "sigterm": signal.SIGTERM}
PHASES = ("rotation", "pretrain", "discover")

log = logging.getLogger(__name__)

Batches = Callable[[int], Batch]
Show = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Fault:
    """One fault: ``at`` is a step, or for disks the number of a checkpoint, counted from 1."""

    kind: str
    phase: str
    at: int
    rank: int

    @property
    def name(self) -> str:
        """What it is called in the log."""
        return f"{self.kind} of rank {self.rank} at {self.phase} {self.at}"


def planned(text: str | None = None) -> list[Fault]:
    """The faults of ``text``, by default of the environment.

    Raises:
        ConfigError: it is not of the form described above.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    return [fault for part in text.split(";") if part.strip() for fault in _parse(part.strip())]


def _parse(part: str) -> list[Fault]:
    kind, _, rest = part.partition(":")
    unit = "checkpoint" if kind in DISKS else "step"
    keys = {unit, "phase", "times", "seed"} | ({"rank"} if kind in ("kill-worker", "nan") else set())
    values = {key: value for key, _, value in (pair.partition("=") for pair in rest.split(","))}
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", values.get(unit, ""))
    phase = values.get("phase", "discover")
    numbers = {
        name: values.get(name, default) for name, default in (("rank", "0"), ("times", "1"), ("seed", "0"))
    }
    if kind not in (*TRAINING, *DISKS, *DRIVER):
        raise ConfigError(
            f"{VARIABLE}: unknown fault {kind!r}; use {', '.join((*TRAINING, *DISKS, *DRIVER))}"
        )
    if (
        not found
        or values.keys() - keys
        or phase not in PHASES
        or not all(map(str.isdecimal, numbers.values()))
    ):
        raise ConfigError(
            f"{VARIABLE}: {part!r} is not KIND:key=value,... with {unit}=N or {unit}=N..M and any of "
            f"{', '.join(sorted(keys - {unit}))}"
        )
    first, last = int(found[1]), int(found[2] or found[1])
    rank, times, seed = (int(numbers[name]) for name in ("rank", "times", "seed"))
    if last - first + 1 < times:
        raise ConfigError(f"{VARIABLE}: {part!r}: {times} different numbers do not fit into {first}..{last}")
    drawn = sorted(random.Random(seed).sample(range(first, last + 1), times))
    return [Fault(kind, phase, at, rank) for at in drawn]


def in_training(batches: Batches, phase: str, rank: int, storage: Storage) -> Batches:
    """``batches`` of a training process that meets the faults planned for it; itself where there are none."""
    every = planned()
    if not every:
        return batches
    faults = [fault for fault in every if fault.phase == phase]
    if rank == 0:
        _prepare_disk(storage, [fault for fault in faults if fault.kind in DISKS])
    expected = -1

    def meet(step: int) -> Batch:
        nonlocal expected
        if step != expected and rank == 0:
            _note(storage, {"event": "start", "phase": phase, "step": step})
        expected = step + 1
        batch = batches(step)
        for fault in faults:
            if (
                fault.kind in TRAINING
                and fault.at == step
                and _concerns(fault, rank)
                and _strikes(storage, fault)
            ):
                _strike(fault, batch)
        return batch

    return meet


def in_driver(show: Show, storage: Storage) -> Show:
    """``show`` of a command that meets the faults planned for it; itself where there are none."""
    faults = [fault for fault in planned() if fault.kind in DRIVER]
    if not faults:
        return show

    def meet(metrics: dict[str, Any]) -> None:
        show(metrics)
        for fault in faults:
            reached = metrics["phase"] == fault.phase and metrics["step"] >= fault.at
            if reached and _strikes(storage, fault, metrics["step"]):
                os.kill(os.getpid(), DRIVER[fault.kind])

    return meet


def wasted_steps(storage: Storage) -> list[int]:
    """For every fault that struck: the steps that were trained once more because of it."""
    events = _events(storage)
    wasted = []
    for i, event in enumerate(events):
        if event["event"] == "fault":
            starts = (e for e in events[i + 1 :] if e["event"] == "start" and e["phase"] == event["phase"])
            again = next(starts, None)
            wasted.append(0 if again is None else max(0, event["step"] - again["step"]))
    return wasted


def _concerns(fault: Fault, rank: int) -> bool:
    if fault.kind == "kill-node":
        raylet = _raylet()
        return raylet is not None and "--head" not in raylet
    return fault.rank == rank


def _raylet() -> list[str] | None:
    """The command line of the parent process, if that is Ray's node manager (Linux)."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return None
    return words if words[0].endswith("/raylet") else None


def _strike(fault: Fault, batch: Batch) -> None:
    if fault.kind == "nan":
        for view in batch.views:
            view.fill_(float("nan"))
    else:
        os.kill(os.getppid() if fault.kind == "kill-node" else os.getpid(), signal.SIGKILL)


def _prepare_disk(storage: Storage, faults: list[Fault]) -> None:
    """Make the n-th new checkpoint fail on its first file, through the code that a real disk takes."""
    if not faults or not storage.is_local:
        return
    real, seen = storage_module.create_local, set()

    def create(path: Path) -> Any:
        folder = path.parent
        if folder.name.startswith("step_") and folder.parent.name == faults[0].phase:
            seen.add(folder.name)
            for fault in faults:
                if fault.at == len(seen) and _strikes(storage, fault, int(folder.name.removeprefix("step_"))):
                    storage_module.create_local = real
                    raise OSError(DISKS[fault.kind], os.strerror(DISKS[fault.kind]))
        return real(path)

    storage_module.create_local = create


def _strikes(storage: Storage, fault: Fault, step: int | None = None) -> bool:
    """Whether ``fault`` is still to strike in this run; it is noted, for good."""
    if any(event.get("name") == fault.name for event in _events(storage)):
        return False
    log.warning("%s: %s", VARIABLE, fault.name)
    at = fault.at if step is None else step
    _note(storage, {"event": "fault", "name": fault.name, "phase": fault.phase, "step": at})
    return True


def _events(storage: Storage) -> list[dict[str, Any]]:
    return [json.loads(line) for line in storage.read(LOG).splitlines()] if storage.exists(LOG) else []


def _note(storage: Storage, event: dict[str, Any]) -> None:
    storage.append(LOG, (json.dumps(event) + "\n").encode())
