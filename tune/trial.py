"""Run one trial: train all folds with all seeds together, one epoch after the other.

An epoch more means a larger ``train.max_steps``. Each call of ``run_phase`` resumes
exactly from the checkpoint of the call before. All folds therefore reach an epoch
together, early stopping compares what is comparable, a trial that was ended resumes
where it was, and only one model is in memory.
"""

import contextlib
import hashlib
import json
import logging
import math
import statistics
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import Any, NamedTuple

import torch

from pipelines import nodes
from pipelines import worker as ray_worker
from tune.records import PartStorage, Trial, read_trial, trial_name
from tune.score import Fold, make_folds, measure, open_folds
from tune.spaces import Space
from uno import distributed
from uno.config import Config, dump_yaml, override
from uno.data.files import join
from uno.errors import Interrupted, NumericsError, StorageError, UnoError
from uno.runs import DISCOVER, RAY_FOLDER, run
from uno.runs.lock import ClaimedStorage
from uno.training import LocalWorker, Worker

log = logging.getLogger(__name__)
# a trial that pretrains and has not renewed its lease for so long is dead
LEASE_S = 60.0
RENEW_S = 5.0
WAIT_S = 0.3

Report = Callable[[dict[str, Any]], None]
Lease = Callable[[str, str, float], bool]  # see Leases.lease


class SweepOptions(NamedTuple):
    """The options of a sweep.

    Attributes:
        config: The configuration that is searched around.
        overrides: The values that the user set, by dotted key.
        space: The search space.
        space_name: The name or the file of the space.
        trials: The number of trials.
        search: ``random``, ``grid``, ``optuna`` or ``package.module:factory``.
        score: ``folds``, ``loss``, ``agreement`` or ``oracle``.
        folds: The number of folds of each trial.
        hide: The number of classes that a fold hides; None for the default.
        seeds: The number of runs of each configuration.
        concurrent: The largest number of trials at a time; None for no limit.
        asha: ``grace_epochs`` and ``reduction`` of ASHA, or None.
        median: ``grace_epochs`` of the median rule, or None.
    """

    config: Config
    overrides: dict[str, Any]
    space: Space
    space_name: str
    trials: int
    search: str
    score: str
    folds: int
    hide: int | None
    seeds: int
    concurrent: int | None
    asha: dict[str, int] | None
    median: dict[str, int] | None = None


class Sweep(NamedTuple):
    """What the driver tells every trial.

    Attributes:
        options: The options of the sweep.
        num_epochs: The number of epochs of a trial.
        output: The directory of the sweep.
        token: The token of its lock, with which trials write.
        resources: The resources of each training process.
        data: The reference to the :class:`~tune.score.SweepData` in Ray's object store.
        leases: The actor of the :class:`Leases`.
    """

    options: SweepOptions
    num_epochs: int
    output: str
    token: str
    resources: dict[str, float]
    data: Any
    leases: Any


class Leases:
    """An actor of the sweep that decides who may train a shared pretraining."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, float]] = {}

    def lease(self, key: str, owner: str, seconds: float) -> bool:
        """Take, renew or give back a lease.

        Args:
            key: What is leased.
            owner: Who asks.
            seconds: The length of the lease; 0 gives it back.

        Returns:
            False if another owner has the lease, else True.
        """
        holder, until = self._held.get(key, (owner, 0.0))
        if holder != owner and time.monotonic() < until:
            return False
        self._held[key] = owner, time.monotonic() + seconds
        return True


def run_trial(
    trial: Trial,
    options: SweepOptions,
    folds: list[Fold],
    num_epochs: int,
    worker: Worker,
    storage: ClaimedStorage,
    lease: Lease,
    report: Report,
) -> None:
    """Train and score a trial. All ranks call this.

    Args:
        trial: The trial, with the epochs that it has trained before.
        options: The options of the sweep.
        folds: The problems to solve.
        num_epochs: The number of epochs to train in all.
        worker: The process that trains.
        storage: The directory of the sweep.
        lease: Takes and renews leases of shared pretrainings, see :meth:`Leases.lease`.
        report: Is called on every rank with the results of each epoch, earlier ones
            first.

    Raises:
        NumericsError: The score or the loss is not finite.
    """
    # nobody appends before all have read the trial's epochs
    distributed.barrier(worker.device)
    for line in trial.epochs:
        report(line)
    if trial.last_epoch >= num_epochs:
        return
    folder, seconds, runs = trial_name(trial.index), _clock(worker), []
    seeds = range(options.config.seed, options.config.seed + options.seeds)
    configs = [
        override(options.config, {**trial.overrides, "seed": seed}) for seed in seeds
    ]
    folds = [fold._replace(train=fold.train.to(worker.device)) for fold in folds]
    for config, fold in product(configs, folds):
        sizes = len(fold.train.labels), fold.train.num_unlabeled
        steps = run.plans(config, *sizes, worker.world_size)[DISCOVER].steps_per_epoch
        weights = config.model.weights or shared_pretraining(
            config, fold, worker, storage, lease
        )
        rarely = {
            "train.checkpoint_every_epochs": 10**6,
            "train.checkpoint_every_minutes": None,
            "train.keep_checkpoints": 1,
        }
        part = PartStorage(storage, f"{folder}/{fold.name}-seed{config.seed}")
        runs.append(
            (override(config, {"model.weights": weights, **rarely}), fold, part, steps)
        )
    seconds()  # pretraining is accounted for where it is trained
    for epoch in range(trial.last_epoch + 1, num_epochs + 1):
        parts = []
        for config, fold, part, steps in runs:
            last = {
                "train.max_steps": min(epoch * steps, config.train.max_steps or 10**12)
            }
            state = run.run_phase(
                override(config, last), DISCOVER, fold.train, worker, part
            )
            parts.append(measure(config, fold, state, options.score, worker))
        line = {"epoch": epoch, **_means(parts, len(folds)), **seconds()}
        for name in ("score", "loss"):
            if not math.isfinite(line[name]):
                raise NumericsError(
                    f"the {name} of epoch {epoch} is not finite: training diverged"
                )
        if worker.rank == 0:
            storage.append(
                f"{folder}/epochs.jsonl",
                (json.dumps(line, allow_nan=False) + "\n").encode(),
            )
        report(line)


def _means(parts: list[dict[str, float]], num_folds: int) -> dict[str, Any]:
    """Return the mean results of one epoch over folds and seeds.

    Args:
        parts: The results of :func:`~tune.score.measure`, for each seed those of all
            folds.
        num_folds: The number of folds.

    Returns:
        The mean of each result; ``scores``, all scores; ``rows``, the sum over folds;
        and with several seeds ``spread``, the standard deviation over seeds of the mean
        of folds.
    """
    scores = [part["score"] for part in parts]
    line: dict[str, Any] = {
        name: statistics.fmean(part[name] for part in parts) for name in parts[0]
    }
    seeds = [
        statistics.fmean(scores[i : i + num_folds])
        for i in range(0, len(scores), num_folds)
    ]
    if len(seeds) > 1:
        line["spread"] = statistics.stdev(seeds)
    return {
        **line,
        "scores": scores,
        "rows": sum(part.get("rows", 0) for part in parts[:num_folds]),
    }


def _clock(worker: Worker) -> Callable[[], dict[str, float]]:
    """Return a function that tells the seconds since its last call.

    It returns ``seconds`` of wall time, and ``cpu_seconds`` and ``gpu_seconds`` of all
    workers. These assume that the other workers are as busy as this one.
    """
    last = time.perf_counter(), time.process_time()

    def seconds() -> dict[str, float]:
        nonlocal last
        before, last = last, (time.perf_counter(), time.process_time())
        wall, cpu = last[0] - before[0], (last[1] - before[1]) * worker.world_size
        gpu = wall * worker.world_size if worker.device.type == "cuda" else 0.0
        return {
            "seconds": round(wall, 3),
            "cpu_seconds": round(cpu, 3),
            "gpu_seconds": round(gpu, 3),
        }

    return seconds


def pretrain_key(config: Config, fold: Fold) -> str:
    """Return a key of the pretraining of a trial on a fold.

    It is equal for trials that can share the pretraining: those with equal settings of
    pretraining and equal hidden classes.

    Args:
        config: The configuration of the trial.
        fold: The problem.
    """
    hidden = hashlib.sha256(json.dumps(fold.hidden).encode()).hexdigest()[:6]
    return f"{run.pretrain_hash(config)}-{hidden}"


def shared_pretraining(
    config: Config, fold: Fold, worker: Worker, storage: ClaimedStorage, lease: Lease
) -> str:
    """Return the directory of a pretraining, after training it if necessary.

    One trial trains it under a lease, and the others wait. All ranks call this.

    Args:
        config: The configuration of the trial.
        fold: The problem.
        worker: The process that trains.
        storage: The directory of the sweep.
        lease: As for :func:`run_trial`.
    """
    key, owner, first = pretrain_key(config, fold), uuid.uuid4().hex, worker.rank == 0
    folder = PartStorage(storage, f"pretrain/{key}")
    while True:
        mine = first and lease(key, owner, LEASE_S)
        # asked last: whoever leased before has ended
        done = first and folder.exists("done.json")
        votes = distributed.all_reduce_sum_(
            torch.tensor([float(mine), float(done)], device=worker.device)
        ).tolist()
        if votes[1]:
            return folder.uri
        if votes[0]:
            break
        time.sleep(WAIT_S)
    seconds = _clock(worker)
    with _renewed(lease, key, owner) if first else contextlib.nullcontext():
        if first:
            folder.append("starts.log", f"{owner}\n".encode())
            folder.write("config.yaml", dump_yaml(config).encode())
        run.pretrain(config, fold.train, worker, folder)
        if first:
            folder.write(
                "done.json", json.dumps({"hidden": fold.hidden, **seconds()}).encode()
            )
    return folder.uri


@contextlib.contextmanager
def _renewed(lease: Lease, key: str, owner: str) -> Iterator[None]:
    """Renew a lease from a thread during a ``with`` block, and then give it back.

    Args:
        lease: As for :func:`run_trial`.
        key: What is leased.
        owner: Who holds the lease.
    """
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            lease(key, owner, LEASE_S)

    (thread := threading.Thread(target=renew, name="uno-lease", daemon=True)).start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        lease(key, owner, 0)


def train_trial(sample: dict[str, Any], sweep: Sweep) -> None:
    """Run a trial, as Ray Tune's trainable.

    A failure is written to the trial's directory, and the driver records it.

    Args:
        sample: ``{"index": ...}``, the number of the trial.
        sweep: What the driver tells every trial.
    """
    import ray.tune

    ray_worker.quiet_exit()
    index, storage = sample["index"], ClaimedStorage(sweep.output, sweep.token)
    try:
        if sweep.options.config.compute.num_workers:
            _start_workers(index, sweep)
        else:
            worker = LocalWorker(
                torch.device("cuda" if "GPU" in sweep.resources else "cpu")
            )
            _run_shared(index, sweep, worker, storage, ray.tune.report)
    except Exception as error:
        note_failure(storage, index, error)
        # Tune prints a line for a trial without any report
        ray.tune.report({"epoch": 0, "score": 0.0})


def note_failure(storage: ClaimedStorage, index: int, error: Exception) -> None:
    """Write ``failure.json`` of a trial.

    It has the ``kind`` of the error, a one-line ``reason``, and for an error of another
    program the ``traceback``.

    Args:
        storage: The directory of the sweep.
        index: The number of the trial.
        error: The error.
    """
    name, reason = type(error).__name__, " ".join(str(error).split())
    failure = {"kind": name, "reason": reason[:300]}
    if not isinstance(error, UnoError):
        failure["reason"] = f"{name}: {reason}"[:300]
        failure["traceback"] = "".join(traceback.format_exception(error))[-8000:]
    with contextlib.suppress(StorageError):
        storage.write(
            f"{trial_name(index)}/failure.json", json.dumps(failure, indent=1).encode()
        )


def _run_shared(
    index: int, sweep: Sweep, worker: Worker, storage: ClaimedStorage, report: Report
) -> None:
    """Run a trial on this process with the data that the driver shares.

    Args:
        index: The number of the trial.
        sweep: What the driver tells every trial.
        worker: The process that trains.
        storage: The directory of the sweep.
        report: Ray's function to report results, that of Tune or of Train.
    """
    import ray

    def lease(*request: Any) -> bool:
        return bool(ray.get(sweep.leases.lease.remote(*request)))

    options, base, trial = (
        sweep.options,
        sweep.options.config,
        read_trial(storage, index),
    )
    assert trial is not None
    threads = base.compute.threads or max(1, int(sweep.resources["CPU"]))
    torch.set_num_threads(threads)
    data = ray.get(sweep.data)
    rows = make_folds(data, options.score, options.folds, base.seed, options.hide)
    here, own = (
        override(base, {"compute.threads": threads}),
        PartStorage(storage, trial_name(index)),
    )
    run_trial(
        trial,
        options,
        open_folds(data.images, rows, here, own),
        sweep.num_epochs,
        worker,
        storage,
        lease,
        lambda line: report({"epoch": line["epoch"], "score": line["score"]}),
    )


def _start_workers(index: int, sweep: Sweep) -> None:
    """Run a trial on a group of workers of Ray Train.

    The trial itself only waits, and needs almost no CPU. A group that dies is started
    again and resumes from its newest checkpoint. A group that found no place, or whose
    node was drained, is started again any number of times.

    Args:
        index: The number of the trial.
        sweep: What the driver tells every trial.

    Raises:
        Interrupted: Three groups died.
    """
    import ray.tune
    from ray.tune.integration.ray_train import TuneReportCallback

    workers, name = (
        sweep.options.config.compute.num_workers,
        f"train-{ray.tune.get_context().get_trial_id()}",
    )
    scaling, folder = (
        ray_worker.scaling(workers, sweep.resources),
        join(sweep.output, RAY_FOLDER),
    )
    loop = {"index": index, "sweep": sweep}
    deaths = 0
    for attempt in count():
        settings = ray_worker.run_config(
            folder, f"{name}-{attempt}", [TuneReportCallback()]
        )
        try:
            return ray_worker.fit(_train_loop, loop, scaling, settings, timeout_s=1800)
        except Exception as error:
            # raises what no other group would do better
            loss = nodes.classify_failure(error)
            log.warning("trial %d: %s", index, loss.line)
            deaths += loss.last is not None
        if deaths == ray_worker.MAX_DEATHS:
            raise Interrupted("its workers keep dying; they may be out of memory")


class _TrialWorker(ray_worker.RayWorker):
    """A rank of a trial, which reports scores only."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Report nothing, because losses are only written to the trial's files."""

    def should_stop(self, step: int) -> bool:
        """Return False, because Ray Tune ends the workers of a stopped trial."""
        return False


def _train_loop(loop: dict[str, Any]) -> None:
    """Run a trial on every worker: Ray Train's ``train_loop_per_worker``.

    Args:
        loop: ``index``, the number of the trial, and ``sweep``, a :class:`Sweep`.
    """
    import ray.train

    ray_worker.quiet_ray_train()
    sweep: Sweep = loop["sweep"]
    storage = ClaimedStorage(sweep.output, sweep.token)
    storage.check()
    _run_shared(loop["index"], sweep, _TrialWorker(storage), storage, ray.train.report)
