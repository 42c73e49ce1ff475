"""Train and score one trial of a hyperparameter search (a sweep), epoch by epoch.

A trial solves several folds, discovery problems that hide some of the known classes,
and all of these trainings reach an epoch together. So early stopping compares what is
comparable, a trial that was ended resumes where it was, and only one model is in
memory. One more epoch means a larger ``train.max_steps``: each call of ``run_phase``
resumes exactly from the checkpoint of the call before.
"""

import contextlib
import hashlib
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from tune.records import PartStorage, Trial, read_epochs, read_trial, trial_name
from tune.score import Fold, FoldRows, make_folds, measure, open_folds
from tune.spaces import Space
from uno.config import Config, dump_yaml, override
from uno.data.files import Storage
from uno.errors import ConfigError, Interrupted, NumericsError, StorageError, UnoError
from uno.runs import DISCOVER, PRETRAIN, run
from uno.runs.journal import read_journal
from uno.runs.lock import ClaimedStorage
from uno.training import LocalWorker, Worker

DONE = "done.json"  # written last into the directory of a pretraining
MAX_DEATHS = 3

Report = Callable[[dict[str, Any]], None]


class SweepOptions(NamedTuple):
    """The options of a sweep, from the command line of ``uno tune``.

    Attributes:
        config: The configuration whose settings are searched. Trial 0 is this
            configuration.
        overrides: The values that the user set, by dotted key.
        space: The search space.
        space_name: The name of the space, or the path of its file.
        trials: The number of trials.
        search: How values are chosen: ``random``, ``grid`` or ``optuna``.
        score: The name of the score, see :data:`tune.SCORES`: ``folds`` or
            ``agreement``.
        folds: The number of folds of each trial.
        hide: The number of known classes that a fold hides; None for the default, see
            :func:`tune.score.hidden_classes`.
        concurrent: The largest number of trials at a time; None for no limit.
        scheduler: What stops trials early: ``asha`` or ``none``.
        grace_epochs: The number of epochs before ASHA may stop a trial; None for the
            default, see :meth:`grace_period`.
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
    concurrent: int | None
    scheduler: str
    grace_epochs: int | None

    def grace_period(self, num_epochs: int) -> int:
        """Return the number of epochs before ASHA may stop a trial.

        It is ``grace_epochs``; if that is None, a sixth of all epochs, but at least 1.
        It is never more than all epochs.

        Args:
            num_epochs: The number of epochs of a trial.
        """
        return min(self.grace_epochs or max(1, num_epochs // 6), num_epochs)


class Sweep(NamedTuple):
    """The facts about a sweep that the driver passes to every trial.

    Attributes:
        options: The options of the sweep.
        num_epochs: The number of epochs of a trial.
        output: The directory of the sweep, a path or URI.
        token: The token of its lock, with which trials may write.
        resources: The resources of each trial (``CPU``, ``GPU``).
        data: The reference to the :class:`~tune.score.SweepData` in Ray's object store.
    """

    options: SweepOptions
    num_epochs: int
    output: str
    token: str
    resources: dict[str, float]
    data: Any


def run_trial(
    trial: Trial,
    options: SweepOptions,
    folds: list[Fold],
    num_epochs: int,
    worker: Worker,
    storage: ClaimedStorage,
    report: Report,
) -> None:
    """Train and score the epochs that a trial still lacks.

    Each fold is trained for one epoch before the next epoch begins. It starts from the
    weights of the configuration, or else from a pretraining, which is run here if it is
    not shared and finished. A line for each epoch is appended to ``epochs.jsonl`` of
    the trial, and checkpoints are written into a folder for each fold. A trial with all
    epochs is only reported.

    Args:
        trial: The trial, with its hyperparameter values and the results of the epochs
            that it has trained before.
        options: The options of the sweep.
        folds: The discovery problems that the trial solves. It trains one model for
            each of them.
        num_epochs: The number of epochs to train in all, earlier ones included.
        worker: This process, with its device.
        storage: The directory of the sweep, to which the results are appended.
        report: Is called with the results of each epoch by name, such as ``epoch`` and
            ``score``, those of earlier epochs first.

    Raises:
        NumericsError: The score or the loss is not finite.
        ConfigError: A fold has fewer rows than a batch.
    """
    for line in trial.epochs:
        report(line)
    if trial.last_epoch >= num_epochs:
        return
    folder, seconds, runs = trial_name(trial.index), _clock(worker), []
    config = override(options.config, trial.overrides)
    longest = config.train.max_steps or 10**12
    rarely = {
        "train.checkpoint_every_epochs": 10**6,
        "train.checkpoint_every_minutes": None,
        "train.keep_checkpoints": 1,
    }
    for fold in folds:
        fold = fold._replace(train=fold.train.to(worker.device))
        steps = run.plans(config, *fold.rows.sizes, 1)[DISCOVER].steps_per_epoch
        weights = config.model.weights or pretrained_directory(
            config, fold, worker, storage, folder
        )
        own = override(config, {"model.weights": weights, **rarely})
        part = PartStorage(storage, f"{folder}/{fold.rows.name}")
        if PRETRAIN in run.list_phases(own):  # such as for the teacher of rKD
            run.run_phase(own, PRETRAIN, fold.train, worker, part)
        runs.append((own, fold, part, steps))
    seconds()  # a pretraining has its own account
    for epoch in range(trial.last_epoch + 1, num_epochs + 1):
        parts = []
        for own, fold, part, steps in runs:
            until = override(own, {"train.max_steps": min(epoch * steps, longest)})
            state = run.run_phase(until, DISCOVER, fold.train, worker, part)
            parts.append(measure(own, fold, state, options.score))
        line = {"epoch": epoch, **_mean_results(parts), **seconds()}
        for name in ("score", "loss"):
            if not math.isfinite(line[name]):
                raise NumericsError(
                    f"the {name} of epoch {epoch} is not finite: training diverged"
                )
        text = json.dumps(line, allow_nan=False) + "\n"
        storage.append(f"{folder}/epochs.jsonl", text.encode())
        report(line)


def _mean_results(parts: list[dict[str, float]]) -> dict[str, Any]:
    """Return the results of one epoch, as means over all folds.

    Args:
        parts: The results of :func:`~tune.score.measure`, such as ``score`` and
            ``loss``, for each fold.

    Returns:
        The mean of each result by its name, over the folds that have it; ``scores``,
        the list of the score of each fold; and ``rows``, the number of scored rows of
        all folds, which is a sum.
    """
    # A fold without held-out rows of known classes has no accuracy of these.
    names = dict.fromkeys(name for part in parts for name in part)
    line: dict[str, Any] = {
        name: statistics.fmean(part[name] for part in parts if name in part)
        for name in names
    }
    line["scores"] = [part["score"] for part in parts]
    line["rows"] = sum(part["rows"] for part in parts)
    return line


def _clock(worker: Worker) -> Callable[[], dict[str, float]]:
    """Return a stopwatch: a function that returns the seconds since its last call.

    It returns a dict with ``seconds`` of wall time, ``cpu_seconds`` of this process and
    ``gpu_seconds``, which are the wall time on a GPU and 0 on a CPU. The first call
    counts from here.

    Args:
        worker: This process, with its device.
    """
    last = time.perf_counter(), time.process_time()

    def seconds() -> dict[str, float]:
        """Return the wall, CPU and GPU seconds since the last call, by name."""
        nonlocal last
        before, last = last, (time.perf_counter(), time.process_time())
        wall, cpu = last[0] - before[0], last[1] - before[1]
        gpu = wall if worker.device.type == "cuda" else 0.0
        return {
            "seconds": round(wall, 3),
            "cpu_seconds": round(cpu, 3),
            "gpu_seconds": round(gpu, 3),
        }

    return seconds


def pretrain_path(config: Config, fold: FoldRows) -> str:
    """Return the path of a shared pretraining in the directory of the sweep.

    Trials that have the same path here can share the pretraining: their settings of
    pretraining are equal, and the fold hides the same classes.

    Args:
        config: The configuration of the trial.
        fold: The discovery problem, with its hidden classes.
    """
    hidden = hashlib.sha256(json.dumps(fold.hidden).encode()).hexdigest()[:6]
    return f"pretrain/{run.hash_pretraining(config)}-{hidden}"


def pretrained_directory(
    config: Config,
    fold: Fold,
    worker: Worker,
    storage: ClaimedStorage,
    trial_folder: str,
) -> str:
    """Return the directory of the pretraining that a trial starts from.

    It is a finished pretraining that trials share, if there is one for the trial's
    settings and the fold. Otherwise the trial pretrains in its own folder before this
    returns. That is so if Optuna has chosen the settings, or if the shared pretraining
    failed.

    Args:
        config: The configuration of the trial.
        fold: The discovery problem, with its training rows.
        worker: This process, with its device.
        storage: The directory of the sweep.
        trial_folder: The path of the trial's folder in the directory of the sweep.

    Returns:
        The path or URI of the directory.
    """
    path = pretrain_path(config, fold.rows)
    shared = PartStorage(storage, path)
    if shared.exists(DONE):
        return shared.uri
    own = PartStorage(storage, f"{trial_folder}/{path.replace('/', '-')}")
    return pretrain(config, fold, worker, own)


def pretrain(config: Config, fold: Fold, worker: Worker, folder: Storage) -> str:
    """Pretrain on the labeled rows of a fold, or resume, and return the directory.

    Checkpoints and ``config.yaml`` are written into it, and ``done.json`` last.

    Args:
        config: The configuration of a trial.
        fold: The discovery problem, with its training rows.
        worker: This process, with its device.
        folder: The directory of the pretraining, for checkpoints.

    Returns:
        The path or URI of ``folder``.
    """
    seconds = _clock(worker)
    folder.write("config.yaml", dump_yaml(config).encode())
    run.pretrain(config, fold.train, worker, folder)
    folder.write(DONE, json.dumps({"hidden": fold.rows.hidden, **seconds()}).encode())
    return folder.uri


class Pretraining(NamedTuple):
    """A pretraining from which one or more trials start.

    Attributes:
        path: The path of its folder in the directory of the sweep, from
            :func:`pretrain_path`.
        config: The configuration of the first trial that needs it.
        fold: The number of the fold whose labeled rows it trains on.
    """

    path: str
    config: Config
    fold: int


def missing_pretrainings(
    options: SweepOptions,
    folds: Sequence[FoldRows],
    trials: Iterable[Mapping[str, Any]],
    storage: Storage,
) -> list[Pretraining]:
    """Return the pretrainings that trials need and that are not done yet.

    Trials with equal settings of pretraining need the same ones, one for each fold.

    Args:
        options: The options of the sweep.
        folds: The discovery problems that each trial solves.
        trials: The searched values of the trials that will run, by dotted key. Only
            trials whose values are known already are among them.
        storage: The directory of the sweep.

    Returns:
        Each pretraining once. The list is empty if the user gave weights. A fold that
        has fewer rows than a batch of the trial gets none for it, and neither does a
        trial whose values the configuration refuses.
    """
    found: dict[str, Pretraining] = {}
    if options.config.model.weights is not None:
        return []
    for overrides, (number, fold) in product(trials, enumerate(folds)):
        num_labeled, num_unlabeled = fold.sizes
        with contextlib.suppress(ConfigError):  # the trial will fail by it
            config = override(options.config, overrides)
            run.plans(config, num_labeled, num_unlabeled, 1)
            path = pretrain_path(config, fold)
            found.setdefault(path, Pretraining(path, config, number))
    return [job for job in found.values() if not storage.exists(f"{job.path}/{DONE}")]


def run_pretraining(sweep: Sweep, job: Pretraining) -> None:
    """Train one pretraining from which trials of a sweep start, in a task of Ray.

    An error is ignored here. Trials that do not find the pretraining do it themselves,
    and report their own error.

    Args:
        sweep: The facts about the sweep.
        job: The pretraining.
    """
    with contextlib.suppress(Exception):
        storage = ClaimedStorage(sweep.output, sweep.token)
        folder = PartStorage(storage, job.path)
        fold, worker = _read_folds(sweep, folder)[job.fold], _local_worker(sweep)
        fold = fold._replace(train=fold.train.to(worker.device))
        pretrain(job.config, fold, worker, folder)


def train_trial(sample: dict[str, Any], sweep: Sweep) -> None:
    """Train and score a trial: the trainable function that Ray Tune calls.

    The score of each epoch is reported to Ray Tune, also of epochs that were trained
    before. An error is not raised, but written to the trial's ``failure.json``, which
    the driver reads; epoch 0 with the score 0 is then reported to Ray Tune in any case,
    and means no epoch of the trial. The start is recorded by :func:`check_starts`, and
    a trial that has died three times in an epoch fails.

    Args:
        sample: Ray Tune's configuration of the trial: ``{"index": number of the
            trial}``.
        sweep: The facts about the sweep.
    """
    import ray.tune

    index, storage = sample["index"], ClaimedStorage(sweep.output, sweep.token)
    try:
        check_starts(storage, index)
        trial = read_trial(storage, index)
        assert trial is not None
        run_trial(
            trial,
            sweep.options,
            _read_folds(sweep, PartStorage(storage, trial_name(index))),
            sweep.num_epochs,
            _local_worker(sweep),
            storage,
            lambda line: ray.tune.report({k: line[k] for k in ("epoch", "score")}),
        )
    except Exception as error:
        note_failure(storage, index, error)
        # Tune prints a line for a trial without any report
        ray.tune.report({"epoch": 0, "score": 0.0})


def check_starts(storage: ClaimedStorage, index: int) -> None:
    """Record that a trial starts, and refuse a start if it has died too often.

    A line is appended to the trial's ``starts.jsonl``, unless the start is refused. Ray
    Tune starts a trial again whose process died. Starts by an earlier ``uno tune``
    command do not count.

    Args:
        storage: The directory of the sweep, with the token of this command's lock.
        index: The number of the trial.

    Raises:
        Interrupted: The trial was started three times before in the same epoch.
    """
    name = f"{trial_name(index)}/starts.jsonl"
    epochs = len(read_epochs(storage, index))
    start = {"token": storage.token, "epochs": epochs}
    if read_journal(storage, name).count(start) >= MAX_DEATHS:
        raise Interrupted(
            f"its process died {MAX_DEATHS} times in epoch {epochs + 1}; it may be out"
            " of memory"
        )
    storage.append(name, (json.dumps(start) + "\n").encode())


def _local_worker(sweep: Sweep) -> LocalWorker:
    """Return this process as the one that trains a trial or a pretraining.

    It trains on a GPU if a GPU is reserved for each trial of the sweep, and else on the
    CPU.
    """
    return LocalWorker(torch.device("cuda" if "GPU" in sweep.resources else "cpu"))


def note_failure(storage: ClaimedStorage, index: int, error: Exception) -> None:
    """Write an error of a trial to its file ``failure.json``.

    The file has the ``kind`` of the error (its class) and a one-line ``reason`` of at
    most 300 characters. For an error that is no UnoError the reason begins with the
    class, and the file also has the ``traceback``. Nothing is raised if the file cannot
    be written.

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


def _read_folds(sweep: Sweep, folder: Storage) -> list[Fold]:
    """Return the discovery problems of a trial, with the data in Ray's object store.

    This also sets the number of threads of torch in this process: ``compute.threads``,
    or by default the CPUs that are reserved for a trial. Images that are not in memory
    are read later, when they are needed.

    Args:
        sweep: The facts about the sweep, with the reference to its data.
        folder: The directory of the trial or pretraining, used only if images are not
            in memory. Those that training cannot read are listed there. A list from
            before a resume is read now.
    """
    import ray

    options, base = sweep.options, sweep.options.config
    threads = base.compute.threads or max(1, int(sweep.resources["CPU"]))
    torch.set_num_threads(threads)
    data = ray.get(sweep.data)
    rows = make_folds(data, options.score, options.folds, base.seed, options.hide)
    here = override(base, {"compute.threads": threads})
    return open_folds(data.images, rows, here, folder)
