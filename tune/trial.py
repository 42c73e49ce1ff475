"""One trial: every fold with every seed, all in step, one epoch after the other.

An epoch at a time is ``train.max_steps`` moving on: each call of ``run_phase`` resumes
bit for bit from the checkpoint of the call before. So all folds reach an epoch
together, early stopping compares what is comparable, a killed trial resumes where it
was, and no model but one is in memory.
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
from uno import collectives
from uno.config import Config, dump_yaml, override
from uno.data.files import join
from uno.errors import Interrupted, NumericsError, StorageError, UnoError
from uno.runs import DISCOVER, RAY_FOLDER, run
from uno.runs.lock import ClaimedStorage
from uno.train import LocalWorker, Worker

log = logging.getLogger(__name__)
# a trial that pretrains and has not renewed its lease for so long is dead
LEASE_S = 60.0
RENEW_S = 5.0
WAIT_S = 0.3

Report = Callable[[dict[str, Any]], None]
Lease = Callable[[str, str, float], bool]  # see Leases.lease


class SweepOptions(NamedTuple):
    """What ``uno tune`` was asked to do; ``overrides`` are the keys that the user
    set himself.
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
    """What the driver tells every trial; ``data`` and ``leases`` are an object and
    an actor in Ray.
    """

    options: SweepOptions
    num_epochs: int
    output: str
    token: str
    resources: dict[str, float]
    data: Any
    leases: Any


class Leases:
    """Who may train a shared pretraining: an actor of the sweep."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, float]] = {}

    def lease(self, key: str, owner: str, seconds: float) -> bool:
        """Take or renew ``key`` for so long, or with 0 give it back; False while
        another owner has it.
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
    """Train and score, calling ``report`` on every rank with a dict for every epoch,
    those of an earlier, killed attempt first; ``lease`` guards the shared pretrainings.
    NumericsError for a score not finite.
    """
    # nobody appends before all have read the trial's epochs
    collectives.barrier(worker.device)
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
    """Over folds and seeds; ``spread`` is the deviation over seeds, each a mean of
    folds.
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
    """Tells the seconds since it was last asked: wall, and CPU and GPU of all
    workers, as busy as this.
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
    """Equal for trials that can share a pretraining."""
    hidden = hashlib.sha256(json.dumps(fold.hidden).encode()).hexdigest()[:6]
    return f"{run.pretrain_hash(config)}-{hidden}"


def shared_pretraining(
    config: Config, fold: Fold, worker: Worker, storage: ClaimedStorage, lease: Lease
) -> str:
    """Directory of the pretraining of ``config`` on ``fold``; trained unless there
    or on its way.
    """
    key, owner, first = pretrain_key(config, fold), uuid.uuid4().hex, worker.rank == 0
    folder = PartStorage(storage, f"pretrain/{key}")
    while True:
        mine = first and lease(key, owner, LEASE_S)
        # asked last: whoever leased before has ended
        done = first and folder.exists("done.json")
        votes = collectives.all_reduce_sum_(
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
    """Renew a lease from a thread while it is in use."""
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
    """What Tune runs for the trial ``sample["index"]``. A failure is noted for the
    driver, which marks it.
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
    """Leave ``failure.json``: one line for the table, and the traceback where it is
    not one of our errors.
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
    """:func:`run_trial` of what the driver shares; ``report`` is Ray's, of Tune or
    of Train.
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
    """A Ray Train run inside the trial; the trial itself only waits and needs next to
    no CPU. A group that dies is started again, where its newest checkpoint is, up to
    three times; one without a place always.
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
    """A rank that reports scores only, and ends when its trial is stopped."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Losses stay in the journal."""

    def should_stop(self, step: int) -> bool:
        """Never: Tune kills the workers of a stopped trial."""
        return False


def _train_loop(loop: dict[str, Any]) -> None:
    """What every worker of a trial runs: ``train_loop_per_worker``."""
    import ray.train

    ray_worker.quiet_ray_train()
    sweep: Sweep = loop["sweep"]
    storage = ClaimedStorage(sweep.output, sweep.token)
    storage.check()
    _run_shared(loop["index"], sweep, _TrialWorker(storage), storage, ray.train.report)
