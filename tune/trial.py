"""One trial: every fold of the objective with every seed, all in step, one epoch after the other.

It runs ``uno.runs.run.run_phase``, as ``uno discover`` does. An epoch at a time is
``train.max_steps`` moving on: each call resumes bit for bit from the checkpoint of the call before. So all
folds reach an epoch together, early stopping compares what is comparable, a killed trial goes on where it
was, and no model but one is in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from tune.records import PartStorage, read_epochs, trial_name
from tune.score import Fold, measure
from uno import collectives
from uno.config import Config, dump_yaml, override
from uno.errors import NumericsError
from uno.runs import DISCOVER, PRETRAIN, run
from uno.runs.lock import ClaimedStorage
from uno.train import Worker

LEASE_S = 60.0  # a trial that pretrains and has not renewed its lease for so long is dead
RENEW_S = 5.0
WAIT_S = 0.3

Report = Callable[[dict[str, Any]], None]


class Gate:
    """Who may train a shared pretraining: one owner at a time for each key. An actor of the sweep."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[str, float]] = {}

    def acquire(self, key: str, owner: str) -> bool:
        """Take or renew the lease on ``key``; False while another, living owner has it."""
        holder, since = self._leases.get(key, (owner, 0.0))
        if holder != owner and time.monotonic() - since < LEASE_S:
            return False
        self._leases[key] = (owner, time.monotonic())
        return True

    def release(self, key: str, owner: str) -> None:
        """Give the lease back."""
        if self._leases.get(key, ("", 0.0))[0] == owner:
            del self._leases[key]


class Keys(Protocol):
    """A :class:`Gate`, here or behind an actor handle."""

    def acquire(self, key: str, owner: str) -> bool:
        """As Gate."""

    def release(self, key: str, owner: str) -> None:
        """As Gate."""


class RemoteGate:
    """The gate actor of a sweep as a :class:`Keys`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def acquire(self, key: str, owner: str) -> bool:
        """As Gate."""
        import ray

        return bool(ray.get(self._actor.acquire.remote(key, owner)))

    def release(self, key: str, owner: str) -> None:
        """As Gate."""
        import ray

        ray.get(self._actor.release.remote(key, owner))


@dataclass(frozen=True, eq=False)
class Unit:
    """One fold with one seed."""

    name: str
    fold: Fold
    config: Config
    storage: PartStorage


def run_trial(
    index: int,
    configs: list[Config],
    folds: list[Fold],
    score: str,
    num_epochs: int,
    worker: Worker,
    storage: ClaimedStorage,
    gate: Keys,
    report: Report,
) -> None:
    """Train and score, reporting a dict for every epoch, those of an earlier, killed attempt first.

    Args:
        index: of the trial.
        configs: one for each seed.
        folds: of the objective.
        score: its name.
        num_epochs: of the discovery phase that have steps to take.
        worker: this process, or a rank of a worker group.
        storage: the sweep's directory.
        gate: guards the shared pretrainings.
        report: called on every rank after each epoch.

    Raises:
        UnoError: as :func:`uno.runs.run.run_phase`; a score that is not finite is a NumericsError.
    """
    past = read_epochs(storage, index)
    collectives.barrier(worker.device)  # nobody appends before all have read
    for line in past:
        report(line)
    if len(past) >= num_epochs:
        return
    clock = _Clock(worker)
    units = [_unit(index, config, fold, worker, storage, gate) for config in configs for fold in folds]
    clock.lap()  # pretraining is accounted for where it is trained
    for epoch in range(len(past) + 1, num_epochs + 1):
        parts = [_advance(unit, epoch, score, worker) for unit in units]
        line = {"epoch": epoch, **_combined(parts, len(folds)), **clock.lap()}
        broken = [name for name in ("score", "loss") if not math.isfinite(line[name])]
        if broken:
            raise NumericsError(f"the {broken[0]} of epoch {epoch} is not finite: training diverged")
        if worker.rank == 0:
            place = PartStorage(storage, trial_name(index))
            place.append("epochs.jsonl", (json.dumps(line, allow_nan=False) + "\n").encode())
        report(line)


def _unit(
    index: int,
    config: Config,
    fold: Fold,
    worker: Worker,
    storage: ClaimedStorage,
    gate: Keys,
) -> Unit:
    fold = replace(fold, train=fold.train.to(worker.device))
    weights = config.model.weights or shared_pretraining(config, fold, worker, storage, gate)
    name = f"{fold.name}-seed{config.seed}"
    settings = {"model.weights": weights, "train.checkpoint_every_epochs": 10**6, "train.keep_checkpoints": 1}
    return Unit(name, fold, override(config, settings), PartStorage(storage, f"{trial_name(index)}/{name}"))


def _advance(unit: Unit, epoch: int, score: str, worker: Worker) -> dict[str, float]:
    """Train one unit to the end of ``epoch`` and measure it."""
    train = unit.fold.train
    plan = run.plans(unit.config, len(train.labels), len(train.unlabeled_images), worker.world_size)[DISCOVER]
    last_step = min(epoch * plan.steps_per_epoch, unit.config.train.max_steps or 10**12)
    config = override(unit.config, {"train.max_steps": last_step})
    state = run.run_phase(config, DISCOVER, train, worker, unit.storage)
    return measure(config, unit.fold, state, score, worker.rank, worker.world_size)


def _combined(parts: list[dict[str, float]], num_folds: int) -> dict[str, Any]:
    """Means over folds and seeds; ``spread`` is the deviation over seeds, each a mean of folds."""
    means = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
    seeds = [
        statistics.fmean(part["score"] for part in parts[start : start + num_folds])
        for start in range(0, len(parts), num_folds)
    ]
    spread = {"spread": statistics.stdev(seeds)} if len(seeds) > 1 else {}
    rows = sum(part["rows"] for part in parts[:num_folds]) if "rows" in parts[0] else 0
    return {**means, **spread, "scores": [part["score"] for part in parts], "rows": rows}


# ------------------------------------------------------------------------------------------------ pretraining
def pretrain_key(config: Config, fold: Fold) -> str:
    """Equal for trials that can share a pretraining: hash of all it depends on."""
    hidden = hashlib.sha256(json.dumps(fold.hidden).encode()).hexdigest()[:6]
    return f"{run.pretrain_hash(config)}-{hidden}"


def shared_pretraining(
    config: Config, fold: Fold, worker: Worker, storage: ClaimedStorage, gate: Keys
) -> str:
    """Directory of the pretraining of ``config`` on ``fold``; trained unless there or on its way."""
    key, owner = pretrain_key(config, fold), uuid.uuid4().hex
    place = PartStorage(storage, f"pretrain/{key}")
    while True:
        mine = worker.rank == 0 and not place.exists("done.json") and gate.acquire(key, owner)
        done = worker.rank == 0 and not mine and place.exists("done.json")
        votes = collectives.sum_(torch.tensor([float(mine), float(done)], device=worker.device)).tolist()
        if votes[1]:
            return place.uri
        if votes[0]:
            break
        time.sleep(WAIT_S)
    clock = _Clock(worker)
    with _renewed(gate, key, owner) if worker.rank == 0 else contextlib.nullcontext():
        if worker.rank == 0 and not place.exists("done.json"):
            place.append("starts.log", f"{owner}\n".encode())
            place.write("config.yaml", dump_yaml(config).encode())
        run.run_phase(config, PRETRAIN, fold.train, worker, place)
        if worker.rank == 0:
            place.write("done.json", json.dumps({"hidden": fold.hidden, **clock.lap()}).encode())
    return place.uri


@contextlib.contextmanager
def _renewed(gate: Keys, key: str, owner: str) -> Iterator[None]:
    """Renew a lease from a thread while it is in use."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            gate.acquire(key, owner)

    thread = threading.Thread(target=renew, name="uno-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        gate.release(key, owner)


class _Clock:
    """Seconds since the last look: wall, and CPU and GPU over all workers, all as busy as this one."""

    def __init__(self, worker: Worker) -> None:
        self._workers, self._gpu = worker.world_size, worker.device.type == "cuda"
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> dict[str, float]:
        now_wall, now_cpu = time.perf_counter(), time.process_time()
        wall, cpu = now_wall - self._wall, (now_cpu - self._cpu) * self._workers
        self._wall, self._cpu = now_wall, now_cpu
        gpu = wall * self._workers if self._gpu else 0.0
        return {"seconds": round(wall, 3), "cpu_seconds": round(cpu, 3), "gpu_seconds": round(gpu, 3)}
