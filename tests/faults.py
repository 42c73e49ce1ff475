"""Faults on purpose, for tests and drills: ``UNO_FAULTS`` kills, poisons and fills
disks.

Faults are separated by ``;`` and have the form ``KIND:key=value,...``::

    kill-worker:rank=1,step=7                  kill -9 of the training process of rank 1 before that step
    kill-worker:step=5..80,times=3,seed=0      at three steps drawn from the range
    kill-node:step=7                           kill -9 of the raylets of ranks that are not on Ray's head node
    nan:rank=1,step=7                          that batch is not a number, on one rank
    full-disk:checkpoint=2                     the second checkpoint finds no space
    read-only:checkpoint=2                     or a file system that takes no writes
    timeout:checkpoint=2                       or one that does not answer in time
    kill-driver:step=7                         kill -9 of the command itself, once that step is in the journal
    sigterm:step=7                             SIGTERM to it

``phase=pretrain`` aims at the other phase. Every fault strikes once in the life of a
run directory, whose ``faults.jsonl`` notes it before it strikes, and every step from
which training starts or starts again. A command gets here through
:mod:`uno.runs.hooks`.
"""  # noqa: E501

import errno
import json
import logging
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from uno.data.files import Storage
from uno.errors import ConfigError, StorageError
from uno.runs import DISCOVER, PHASES
from uno.runs.hooks import VARIABLE
from uno.runs.journal import read_journal
from uno.steps import Batch

FAULTS_FILE = "faults.jsonl"
RANKED = ("kill-worker", "nan")
DISKS = {
    "full-disk": errno.ENOSPC,
    "read-only": errno.EROFS,
    "timeout": errno.ETIMEDOUT,
}
DRIVER = {"kill-driver": signal.SIGKILL, "sigterm": signal.SIGTERM}
KINDS = (*RANKED, "kill-node", *DISKS, *DRIVER)

log = logging.getLogger(__name__)


class Fault(NamedTuple):
    """One fault: ``at`` is a step, or for disks the number of a checkpoint, counted
    from 1.
    """

    kind: str
    phase: str
    at: int
    rank: int

    @property
    def name(self) -> str:
        """What it is called in the log."""
        return f"{self.kind} of rank {self.rank} at {self.phase} {self.at}"


def planned(text: str | None = None) -> list[Fault]:
    """The faults of ``text``, by default of the environment. ConfigError: it is not
    of the form above.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    return [
        fault
        for part in text.split(";")
        if part.strip()
        for fault in _parse(part.strip())
    ]


def _parse(part: str) -> list[Fault]:
    kind, _, rest = part.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"{VARIABLE}: unknown fault {kind!r}; use {', '.join(KINDS)}")
    unit = "checkpoint" if kind in DISKS else "step"
    optional = {"phase": DISCOVER, "times": "1", "seed": "0"} | (
        {"rank": "0"} if kind in RANKED else {}
    )
    given = dict(pair.partition("=")[::2] for pair in rest.split(","))
    values = {"rank": "0", **optional, **given}
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", given.get(unit, ""))
    numbers = [values[name] for name in ("rank", "times", "seed")]
    known = given.keys() <= {unit, *optional} and values["phase"] in PHASES
    if not (found and known and all(map(str.isdecimal, numbers))):
        form = (
            f"KIND:key=value,... with {unit}=N or {unit}=N..M and any of"
            f" {', '.join(sorted(optional))}"
        )
        raise ConfigError(f"{VARIABLE}: {part!r} is not {form}")
    rank, times, seed = map(int, numbers)
    steps = range(int(found[1]), int(found[2] or found[1]) + 1)
    if len(steps) < times:
        raise ConfigError(
            f"{VARIABLE}: {part!r}: {unit}={given[unit]} has no {times} different"
            " numbers"
        )
    return [
        Fault(kind, values["phase"], at, rank)
        for at in sorted(random.Random(seed).sample(steps, times))
    ]


def announced(lines: list[str]) -> list[str]:
    """``lines`` and a warning for each fault that is planned."""
    return lines + [f"warning: {VARIABLE} is set: {fault.name}" for fault in planned()]


def in_training(
    batches: Callable[[int], Batch], phase: str, rank: int, storage: Storage
) -> Callable[[int], Batch]:
    """``batches`` of a training process that meets the faults planned for it."""
    faults = [fault for fault in planned() if fault.phase == phase]
    if rank == 0:
        _prepare_disk(storage, [fault for fault in faults if fault.kind in DISKS])
    expected = -1

    def meet(step: int) -> Batch:
        nonlocal expected
        if step != expected and rank == 0:
            _note(storage, {"event": "start", "phase": phase, "step": step})
        expected, batch = step + 1, batches(step)
        for fault in faults:
            if (
                fault.at == step
                and _concerns(fault, rank)
                and _strikes(storage, fault, step)
            ):
                if fault.kind == "nan":
                    for view in batch.views:
                        view.fill_(float("nan"))
                else:
                    os.kill(
                        os.getppid() if fault.kind == "kill-node" else os.getpid(),
                        signal.SIGKILL,
                    )
        return batch

    return meet


def in_driver(
    show: Callable[[dict[str, Any]], None], storage: Storage
) -> Callable[[dict[str, Any]], None]:
    """``show`` of a command that meets the faults planned for it."""
    faults = [fault for fault in planned() if fault.kind in DRIVER]

    def meet(metrics: dict[str, Any]) -> None:
        show(metrics)
        for fault in faults:
            reached = metrics["phase"] == fault.phase and metrics["step"] >= fault.at
            if reached and _strikes(storage, fault, metrics["step"]):
                os.kill(os.getpid(), DRIVER[fault.kind])

    return meet


def _concerns(fault: Fault, rank: int) -> bool:
    if fault.kind != "kill-node":
        return fault.kind in RANKED and fault.rank == rank
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    words = parent.read_text().split("\0") if parent.exists() else [""]
    # a node manager of Ray, not the head's
    return words[0].endswith("/raylet") and "--head" not in words


def _prepare_disk(storage: Storage, faults: list[Fault]) -> None:
    """From now on, ``storage`` refuses the checkpoint that a fault names, once."""
    write, seen = storage.write, set()

    def failing(name: str, data: bytes) -> None:
        folder, _, step = name.removesuffix(".safetensors").rpartition("/step_")
        for fault in faults:
            if folder == f"checkpoints/{fault.phase}":
                seen.add(step)
                if len(seen) == fault.at and _strikes(storage, fault, int(step)):
                    raise StorageError(
                        f"cannot write {storage.path(name)}:"
                        f" {os.strerror(DISKS[fault.kind])}"
                    )
        write(name, data)

    if faults:
        storage.write = failing  # type: ignore[method-assign]


def _strikes(storage: Storage, fault: Fault, step: int) -> bool:
    """Whether ``fault`` is still to strike in this run; it is noted, for good."""
    if any(event.get("name") == fault.name for event in read_events(storage)):
        return False
    log.warning("%s: %s", VARIABLE, fault.name)
    _note(
        storage,
        {"event": "fault", "name": fault.name, "phase": fault.phase, "step": step},
    )
    return True


def read_events(storage: Storage) -> list[dict[str, Any]]:
    """Starts and faults, with phase and step."""
    return read_journal(storage, FAULTS_FILE)


def _note(storage: Storage, event: dict[str, Any]) -> None:
    storage.append(FAULTS_FILE, (json.dumps(event) + "\n").encode())
