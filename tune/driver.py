"""Run a hyperparameter search (a sweep) with Ray Tune, for the command ``uno tune``.

All state is in the output directory (:mod:`tune.records`), which the driver has locked.
Ray Tune keeps no state. The same command therefore continues a sweep that was ended at
any moment. Trials with a result are not run again, unfinished ones resume at their
epoch, and early stopping and Optuna are told the earlier results.
"""

import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import yaml

from pipelines import ray_env
from pipelines.features import compute_on_ray
from pipelines.options import Options
from pipelines.tasks import run_tasks, wait_for_task
from tune import AGREEMENT, FOLDS, SCORES, records, report, spaces
from tune.records import FAILED, FINISHED, LOGGED, SETTINGS, PartStorage, Trial
from tune.score import FoldRows, SweepData, Unread, make_folds, sweep_data
from tune.trial import (
    Sweep,
    SweepOptions,
    missing_pretrainings,
    run_pretraining,
    train_trial,
)
from uno.config import (
    Config,
    differing_keys,
    field_traits,
    flatten,
    override,
    to_dict,
)
from uno.data import output
from uno.data.decode import ok_mask
from uno.data.files import Storage, split
from uno.data.sampling import largest_batch
from uno.data.splits import Task, decide_setting
from uno.encoders.build import code_of
from uno.encoders.weights import PRETRAINED, PRETRAINED_FILE, is_file
from uno.errors import ConfigError, Interrupted, NumericsError, StorageError
from uno.method import load
from uno.model import num_heads
from uno.runs import DISCOVER, RAY_FOLDER, directory, lock, run
from uno.runs.hardware import num_threads
from uno.runs.lock import RunLock
from uno.session.configure import leaves_method_open
from uno.session.console import Progress, interrupt_on_signal, on_stop, print_line
from uno.session.data import (
    Compute,
    compute_local,
    leave_out_unreadable,
    load_features,
    load_images,
    read_task,
)
from uno.session.derive import derive_settings, derives_batch, keep_derived
from uno.session.loggers import Loggers, require_loggers
from uno.session.prepare import check_data, starting_weights, with_full_path
from uno.session.resources import (
    FreeMemory,
    check_memory,
    choose_loading,
    free_memory,
)
from uno.text import plural

STOPPING = "stopping; run the same command again to resume the unfinished trials"
# Trials may have a GPU that this process lacks.
HERE = {"compute.device": "auto"}


def sweep_options(options: Options) -> SweepOptions:
    """Return the options of a sweep from a command line of ``uno tune``.

    Args:
        options: The parsed command line.

    Returns:
        The configuration for trials in one process each, the search space, and how
        trials are chosen, scored and stopped. ``--workers`` is the number of trials at
        a time, and the number of trials is 16 by default. Settings that follow from the
        data are still open, as is the number of trials of a grid search.

    Raises:
        ConfigError: ``--trials`` is given for a grid search, or the search space is
            unknown, cannot be read, or has a setting or a value that trials cannot
            have.
    """
    own, config = options.args, options.config
    if own.search == "grid" and own.trials:
        raise ConfigError("--search grid tries all combinations; leave --trials out")
    given = {
        key: value
        for key, value in options.overrides.items()
        if field_traits(key).scope != "place"
    }
    given |= {"preset": config.preset, "recipe": config.recipe}
    # A trial is one process, and workers are trials at a time.
    one_process = override(config, {"compute.num_workers": 0})
    return SweepOptions(
        config=one_process,
        overrides=given,
        space=spaces.load_space(own.space, one_process),
        space_name=own.space,
        trials=own.trials or 16,
        search=own.search,
        score=own.score,
        folds=own.folds,
        hide=own.hide,
        concurrent=config.compute.num_workers or None,
        scheduler=own.scheduler,
        grace_epochs=own.grace_epochs,
    )


def run_sweep(options: SweepOptions) -> None:
    """Run the missing trials of a sweep, and write its results.

    A trial is missing if it has no result yet; a failed one has a result. The directory
    is locked. Its files are ``sweep.yaml``, one folder for each trial, ``sweep.jsonl``,
    ``best.yaml`` and ``sweep.html``; the results are also printed, and sent to loggers.

    Args:
        options: The options of the sweep.

    Raises:
        ConfigError: The options, the data or the directory do not fit each other,
            another command holds the directory, or the cluster is too small.
        NumericsError: No trial has trained all epochs, so that there is no best one.
            The results were written before.
        Interrupted: The sweep was asked to stop. The same command continues it.
        StorageError: A trial could not write its files.
    """
    check_options(options)
    require_loggers(options.config)
    # Trials run in other directories, so paths must be full.
    options = options._replace(config=with_full_path(options.config))
    own_weights = starting_weights(options.config, False)
    asked, (options, task) = options.overrides, open_sweep_data(options)
    config = options.config
    goes_on = Storage(str(config.output)).exists(SETTINGS)
    check_data(override(config, HERE), task, read_images=not goes_on)
    # The folds are checked before an image is decoded, as if all rows can be read.
    plan_folds(options, unread_data(task), asked)
    assert config.output is not None
    storage = Storage(config.output)
    with lock.lock_run(storage, on_wait=print_line) as claim:
        output.delete_temporary_files(claim.storage)
        output.holds_output(claim.storage, SETTINGS, "sweep")
        with interrupt_on_signal(
            "stopped before a trial began; the same command starts again"
        ):
            data = load_data(options, task, own_weights)
        options, folds, num_epochs = plan_folds(options, data, asked)
        open_sweep(options, claim.storage, task.rows.fingerprint, num_epochs)
        directory.begin_images(claim.storage, task.rows)
        if own_weights is not None:
            if not claim.storage.exists(PRETRAINED_FILE):
                claim.storage.write(PRETRAINED_FILE, own_weights)
            # Trials read them there. sweep.yaml keeps what the user asked for, so that
            # a sweep may be moved.
            kept = {"model.weights": storage.below(PRETRAINED_FILE)}
            options = options._replace(config=override(options.config, kept))
        ended = [
            t
            for t in records.read_trials(claim.storage)
            if t.index < options.trials and t.status
        ]
        if len(ended) < options.trials:
            if leaves_method_open(
                config.preset,
                {key: value for key, value in asked.items() if key != "recipe"},
            ):
                print_line(
                    "method: uno; uno discover takes clustering by default, which has"
                    " nothing to search"
                )
            _describe(options, data, folds, num_epochs)
            _run_missing(options, data, folds, num_epochs, claim, ended)
        else:
            print_line(
                f"{storage.uri}: all {len(ended)} trials have a result; nothing is run"
                " again"
            )
        summary = report.write(claim.storage)
        _tell_loggers(options.config, claim, summary)
    if summary.best is None:
        first = next(
            (t.reason for t in summary.trials if t.status == FAILED), "none finished"
        )
        raise NumericsError(
            f"every trial failed, so there is no best.yaml; first reason: {first}"
        )
    print_line(f"\n{report.format_table(summary)}\n\nresults in {storage.uri}")


def plan_folds(
    options: SweepOptions, data: SweepData, asked: Collection[str]
) -> tuple[SweepOptions, list[FoldRows], int]:
    """Return the folds of a sweep, with a batch size that they fill and their epochs.

    Args:
        options: The options of the sweep.
        data: The data that all trials share.
        asked: The dotted keys that the user set. If ``train.batch_size`` is not among
            them and the batch size is derived from the data, it is lowered to one that
            every fold fills, see :func:`with_fitting_batch`.

    Returns:
        The options with that batch size; the discovery problems that each trial solves,
        as row numbers; and the number of epochs of a trial.

    Raises:
        ConfigError: The known classes do not allow the folds, or a fold has fewer rows
            than a batch.
    """
    config = options.config
    folds = make_folds(data, options.score, options.folds, config.seed, options.hide)
    if derives_batch(config, asked):
        options = with_fitting_batch(options, folds)
    return options, folds, check_plans(options, folds)


def unread_data(task: Task) -> SweepData:
    """Return the data of a sweep whose images are read later, by each trial.

    All rows count as readable.

    Args:
        task: All rows of the sweep, with their encoded images and classes.
    """
    rows = task.rows
    return sweep_data(task, Unread(rows.images, rows.ids), np.ones(len(rows), bool))


def report_on(output: str) -> None:
    """Write the report of a sweep with the results so far, and print it.

    Args:
        output: The directory of the sweep, which is locked meanwhile.

    Raises:
        ConfigError: The directory holds no sweep, or another command holds it.
    """
    storage = Storage(output)
    records.read_settings(storage)
    with lock.lock_run(storage, on_wait=print_line) as claim:
        summary = report.write(claim.storage)
    print_line(f"{report.format_table(summary)}\n\nresults in {storage.uri}")


def _tell_loggers(config: Config, claim: RunLock, summary: report.Summary) -> None:
    """Send the results of all trials to W&B, MLflow and TensorBoard, as configured.

    Each trial is a run of the sweep's group, and the best one is marked. TensorBoard's
    files are in the folder of the trial. The score of a trial is sent by every command.
    Its epochs are sent again only if the trial has more epochs or other loggers than
    its ``logged.json`` says, which is written at the end. A logger that raises an error
    is switched off with a warning.

    Args:
        config: The configuration of the sweep, which names the loggers.
        claim: The lock of the sweep.
        summary: The trials with their epochs, and the best one.
    """
    for trial in summary.trials:
        storage = PartStorage(claim.storage, records.trial_name(trial.index))
        try:
            own = override(config, trial.overrides)
        except ConfigError:  # values that the configuration refuses; the trial failed
            continue
        with Loggers(own, storage, group=split(claim.storage.uri)[1]) as loggers:
            logged = {"epochs": trial.last_epoch, "loggers": loggers.names}
            if output.read_mapping(storage, LOGGED) != logged:
                for line in trial.epochs:
                    loggers({**line, "phase": "tune", "step": line["epoch"]})
            loggers.results(
                {"best": float(trial is summary.best), "score": trial.score}
            )
        if loggers.names:  # those that raised no error
            logged |= {"loggers": loggers.names}
            storage.write(LOGGED, json.dumps(logged).encode())


def load_data(
    options: SweepOptions, task: Task, own_weights: bytes | None
) -> SweepData:
    """Read or encode the data that all trials share.

    With ``data.loading`` other than ``streaming``, images are decoded into memory, or
    encoded by a frozen encoder. With ``streaming``, each trial reads the images itself.

    Args:
        options: The options of the sweep.
        task: All rows of the sweep, with their encoded images and classes.
        own_weights: The pretrained weights of the encoder as a safetensors file, from
            :func:`~uno.session.prepare.starting_weights`; None if it starts without
            such weights.

    Returns:
        The pixels or features in memory, or the images that trials read; with the
        labels that trials may see. Unreadable images in memory are neither labeled nor
        unlabeled rows, and a line warns of them.

    Raises:
        ConfigError: Too many images cannot be read; or a running cluster that would
            compute features is too small.
    """
    if options.config.data.loading == "streaming":
        return unread_data(task)
    with (
        tempfile.TemporaryDirectory(prefix="uno-tune-") as folder,
        Progress() as show,
        _encoding_place(options) as (config, compute),
    ):
        own = Storage(folder)
        if own_weights is not None:
            own.write(PRETRAINED_FILE, own_weights)
        if config.model.finetune == "none":
            found, reasons = load_features(config, task, own, show, compute=compute)
        else:
            found, reasons = load_images(config, task, own, show)
    leave_out_unreadable(reasons, config, task)
    return sweep_data(task, found.numpy(), ok_mask(reasons))


@contextmanager
def _encoding_place(options: SweepOptions) -> Iterator[tuple[Config, Compute]]:
    """Choose where a frozen encoder computes features, during a ``with`` block.

    If a Ray cluster runs already, its workers compute them, because this machine may be
    a small head. Otherwise this process does, and also if there is no frozen encoder to
    compute with.

    Args:
        options: The options of the sweep.

    Yields:
        The configuration for the computation, with images in memory and the device and
        number of workers of this place, and the function that encodes rows: it
        takes a :class:`~uno.data.features.FeatureJob`, the encoder and row numbers, and
        yields the features in chunks.
    """
    config = override(options.config, {**HERE, "data.loading": "memory"})
    frozen = config.model.finetune == "none" and not config.model.takes_vectors
    if not frozen or ray_env.cluster_address() is None:
        yield config, compute_local
        return
    with ray_env.connect() as ray:
        request = wait_for_task(ray, options.config)
        there = {
            "compute.num_workers": trials_at_once(options, request, ray),
            "compute.device": options.config.compute.device,
        }
        yield override(config, there), partial(compute_on_ray, ray)


def check_options(options: SweepOptions) -> None:
    """Check that the options of a sweep do not contradict each other.

    Args:
        options: The options of the sweep.

    Raises:
        ConfigError: The score is ``agreement`` between heads, and a trial could have
            only one head; the score is ``folds``, which hides known classes, and the
            given weights may be trained on these (all weights except for those of a
            frozen encoder from a file or a library); the method or the number of
            epochs leaves nothing to train; or Optuna is asked for and not installed.
    """
    heads = next((d.ends for d in options.space if d.key == "model.num_heads"), ())
    if options.score == AGREEMENT and min((*heads, num_heads(options.config))) < 2:
        needs = (
            "every trial needs two or more, and baselines have one (model.num_heads)"
        )
        raise ConfigError(f"--score agreement compares heads: {needs}")
    model = options.config.model
    # The weights of a frozen encoder from a file count as trained on other images.
    foreign = model.finetune == "none" and (
        model.weights == PRETRAINED or is_file(model.weights)
    )
    if model.weights is not None and options.score == FOLDS and not foreign:
        why = (
            "--score folds pretrains anew: --weights may be trained on the classes that"
            " a fold hides"
        )
        raise ConfigError(f"{why}; use --score agreement, or leave --weights out")
    if options.config.discover.epochs < 1:
        if not (method := load(options.config.method)).trains:
            why = f"method {method.name} trains nothing, so no setting can be searched"
            raise ConfigError(f"{why}; use --method uno")
        raise ConfigError(
            "discover.epochs must be at least 1: trials are compared by their epochs"
        )
    if options.search == "optuna" and find_spec("optuna") is None:
        raise ConfigError("--search optuna needs: pip install optuna")


def check_plans(options: SweepOptions, folds: list[FoldRows]) -> int:
    """Check that every fold fills a batch, and return the number of epochs of a trial.

    Args:
        options: The options of the sweep.
        folds: The discovery problems that each trial solves, as row numbers.

    Returns:
        The largest number of discovery epochs over all folds, at least 1:
        ``discover.epochs``, or fewer if ``train.max_steps`` ends all folds earlier. The
        last epoch may then be incomplete.

    Raises:
        ConfigError: A fold has fewer rows than a batch.
    """
    config, epochs = options.config, 1
    for fold in folds:
        try:
            plan = run.plans(config, *fold.sizes, 1)[DISCOVER]
        except ConfigError as error:
            where = (
                f"{fold.name} of {fold.sizes[0]} labeled and {fold.sizes[1]} hidden"
                " images"
            )
            raise ConfigError(f"{where}: {error}") from None
        steps = min(
            config.train.max_steps or 10**12,
            config.discover.epochs * plan.steps_per_epoch,
        )
        epochs = max(epochs, math.ceil(steps / plan.steps_per_epoch))
    return epochs


def open_sweep(
    options: SweepOptions, storage: Storage, fingerprint: str, num_epochs: int
) -> None:
    """Write ``sweep.yaml`` for a new sweep, or check the settings of one that exists.

    Args:
        options: The options of the sweep.
        storage: The directory of the sweep.
        fingerprint: A hash that identifies the rows of the data.
        num_epochs: The number of epochs of a trial.

    Raises:
        ConfigError: The directory holds a sweep with other settings or data. The number
            of trials may differ, and settings that may change when a run resumes.
    """
    settings = {
        "score": options.score,
        "search": options.search,
        "space_name": options.space_name,
        "folds": options.folds if options.score == FOLDS else None,
        "hide": options.hide,
        "grace_epochs": (
            None if options.scheduler == "none" else options.grace_period(num_epochs)
        ),
        "scheduler": options.scheduler,
        "epochs": num_epochs,
        "data_fingerprint": fingerprint,
        "space": spaces.to_tree(options.space),
        "given": options.overrides,
        "config": to_dict(options.config),
    }
    if code := code_of(options.config.model.encoder):
        settings["encoder_code"] = code["code"]
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=110)
    if not output.holds_output(storage, SETTINGS, "sweep"):
        return storage.write(SETTINGS, text.encode())
    old, new = records.read_settings(storage), yaml.safe_load(text)
    different = [
        key
        for key in new
        if key not in ("config", "given") and old.get(key) != new[key]
    ]
    stored = old.get("config")
    if different := different + differing_keys(
        stored if isinstance(stored, dict) else {}, options.config
    ):
        raise output.other_settings_error(
            storage.uri, "a sweep", different, "use those, or another --output"
        )


def open_sweep_data(options: SweepOptions) -> tuple[SweepOptions, Task]:
    """Derive the settings that the user left open, from the data of the sweep.

    A new sweep derives them from a sample of its images (such as the image size), and
    they count as given by the user, so that ``best.yaml`` has them. With the score
    ``agreement`` so does a ``data.setting`` of "auto"; the folds of the score ``folds``
    have no known class among their unlabeled rows, and need none. A sweep that exists
    keeps the settings that it has stored. Whether images are kept in memory is decided
    here, too, and a grid search gets its number of trials: the number of combinations,
    plus 1 for the given configuration. For a new sweep, lines about these decisions are
    printed. Nothing is written.

    Args:
        options: The options of the command line.

    Returns:
        The options with all settings, and all rows of the sweep with their classes. No
        image is in memory.

    Raises:
        ConfigError: A setting or the data is refused, or memory is too small.
    """
    storage = Storage(str(options.config.output))
    config, given, began = options.config, options.overrides, None
    if storage.exists(SETTINGS):
        began = records.read_settings(storage).get("config")
        stored = flatten(began) if isinstance(began, dict) else {}
        config = keep_derived(config, given, stored)
    task = read_task(override(config, {"data.loading": "streaming"}).data)
    if began is None:
        if options.score == AGREEMENT:
            # the rows to discover are those of the run, so the run's rule decides
            setting, reason = decide_setting(config, task.rows.known)
            config = override(config, {"data.setting": setting})
            given = given | {"data.setting": setting}
            print_line(reason)
        values, lines = derive_settings(config, given, task)
        config, given = override(config, values), values | given
        for line in (*lines, *(f"warning: {line}" for line in task.rows.warnings)):
            print_line(line)
    memory = free_memory(config)
    num_folds = options.folds if options.score == FOLDS else 1
    # This process and Ray's object store hold one copy of the images each, and a GPU
    # holds one copy for each fold.
    device = None if memory.device is None else memory.device // num_folds
    share = FreeMemory(memory.host // 2, device)
    loading, why = choose_loading(config, len(task.rows), share)
    if began is None:
        print_line(f"memory: {why}")
    config = override(config, {"data.loading": loading})
    here = override(config, HERE)
    num_threads(here)  # refuses too many threads
    check_memory(here, task)
    options = options._replace(config=config, overrides=given)
    if options.search == "grid":
        points = spaces.grid(options.space, spaces.current(options.space, config))
        options = options._replace(trials=1 + len(points))
    return options, task


def with_fitting_batch(options: SweepOptions, folds: list[FoldRows]) -> SweepOptions:
    """Return the options with a batch size that every fold of the sweep can fill.

    A fold has fewer rows than the whole data set, so its batches may have to be
    smaller. A fold that cannot fill a batch of any size does not change the batch size,
    and is refused by :func:`check_plans`.

    Args:
        options: The options of the sweep.
        folds: The discovery problems that each trial solves, as row numbers.

    Returns:
        The options with the largest such batch size that is not above the present one.
        It counts as set by the user.
    """
    config = options.config
    rules = config.data.batch_sampling, config.train.batch_size
    largest = min(largest_batch(*rules, *fold.sizes, 1) for fold in folds)
    batch = {"train.batch_size": largest}
    return options._replace(
        config=override(config, batch), overrides=options.overrides | batch
    )


def _describe(
    options: SweepOptions, data: SweepData, folds: list[FoldRows], num_epochs: int
) -> None:
    """Print the number of trials, the space and the score of a sweep.

    For the score ``folds`` the folds are printed, too.

    Args:
        options: The options of the sweep.
        data: The data that all trials share.
        folds: The discovery problems that each trial solves.
        num_epochs: The number of epochs of a trial.
    """
    trials, epochs = plural(options.trials, "trial"), plural(num_epochs, "epoch")
    print_line(f"{trials} of up to {epochs} over the space {options.space_name}:")
    for domain in options.space:
        print_line(f"  {domain.key:<28}{domain.describe()}")
    print_line(f"score: {SCORES[options.score]}")
    if options.score == FOLDS:
        hidden = f"{len(folds[0].hidden)} of {data.num_known} known classes hidden"
        print_line(
            f"{len(folds)} folds: {hidden};"
            f" {plural(int(data.unlabeled.sum()), 'unlabeled image')} not used"
        )


def trials_at_once(options: SweepOptions, request: dict[str, float], ray: Any) -> int:
    """Return how many trials run at a time on the cluster as it is now.

    They are limited by the CPUs and GPUs of the whole cluster, whether in use or not,
    by the user's limit, and by the number of trials of the sweep.

    Args:
        options: The options of the sweep, with the number of trials and the largest
            number at a time.
        request: The resources of a trial, ``num_cpus`` and ``num_gpus``.
        ray: The module ``ray``, connected to a cluster.
    """
    cluster = ray.cluster_resources()
    amounts = {"CPU": request["num_cpus"], "GPU": request["num_gpus"]}
    fits = min(int(cluster[name] / n + 1e-9) for name, n in amounts.items() if n)
    return min(fits, options.concurrent or fits, options.trials)


def _run_missing(
    options: SweepOptions,
    data: SweepData,
    folds: list[FoldRows],
    num_epochs: int,
    claim: RunLock,
    ended: list[Trial],
) -> None:
    """Run the trials that have no result yet with Ray Tune.

    The pretrainings that these trials need are run before, as far as the values of the
    trials are known. A line is printed for each pretraining and trial that ends. Errors
    of a trial are recorded as its result, and not raised.

    Args:
        options: The options of the sweep.
        data: The data that all trials share.
        folds: The discovery problems that each trial solves, as row numbers.
        num_epochs: The number of epochs of a trial.
        claim: The lock of the sweep.
        ended: The trials that have a result. New ones are appended.

    Raises:
        ConfigError: The cluster had no place for a trial in time.
        Interrupted: The sweep was asked to stop, or a pretraining kept dying.
        StorageError: A trial could not write its files.
    """
    storage, config, stopping = claim.storage, options.config, threading.Event()
    print_line(
        "starting Ray" + (f"; {plural(len(ended), 'result')} already" if ended else "")
    )
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    # The new output engine prints boxes at any verbosity.
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    with on_stop(stopping.set, STOPPING), ray_env.connect() as ray:
        from ray import tune

        from tune import search

        # Errors of trials are in the table, so Ray need not log them.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        request = wait_for_task(ray, config, stopping.is_set)
        places = trials_at_once(options, request, ray)
        print_line(f"{plural(places, 'trial')} at a time")
        each = {"CPU": request["num_cpus"]}
        if request["num_gpus"]:
            each["GPU"] = request["num_gpus"]
        start = time.monotonic()

        def on_end(trial: Trial) -> None:
            """Count a trial that has ended, and print how it ended."""
            ended.append(trial)
            print_line(
                f"{len(ended)}/{options.trials}  {_format_end(trial)} "
                f" ({time.monotonic() - start:.0f} s)"
            )

        searcher = search.SweepSearcher(
            storage, options, num_epochs, on_end, stopping.is_set
        )
        sweep = Sweep(
            options, num_epochs, storage.uri, storage.token, each, ray.put(data)
        )
        jobs = missing_pretrainings(options, folds, searcher.values_drawn(), storage)
        pretrained = run_tasks(
            ray, places, request, run_pretraining, (sweep,), jobs, stopping.is_set
        )
        for done, _ in enumerate(pretrained, start=1):
            print_line(f"pretraining {done}/{len(jobs)} that trials share is done")
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(train_trial, sweep=sweep), each),
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                max_concurrent_trials=options.concurrent,
                scheduler=search.scheduler(options, num_epochs, ended),
                num_samples=len(searcher.missing),
                # A new process takes seconds to import torch.
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
                verbose=0,
                storage_path=storage.below(RAY_FOLDER),
                stop=search.Interruption(stopping.is_set),
                # A process that dies goes on at its newest checkpoint, unless it dies
                # again and again in one epoch; what it raises itself is noted.
                failure_config=tune.FailureConfig(max_failures=100, fail_fast=False),
            ),
        )
        if not stopping.is_set():
            ray_env.in_thread(tuner.fit)
        if (reason := searcher.storage_error) is not None:
            raise StorageError(
                f"the storage failed in a trial: {reason}; the same command continues"
            )
        lost = options.trials - len(ended)
        if lost and not stopping.is_set():
            raise StorageError(
                f"{plural(lost, 'trial')} ended without a result; see that"
                f" {storage.uri} is on storage that all nodes share; the same command"
                " continues"
            )
    storage.delete(RAY_FOLDER)
    if stopping.is_set():
        raise Interrupted("stopped; the same command continues the sweep")


def _format_end(trial: Trial) -> str:
    """Return a line for the console on how a trial ended and which values it had.

    For example ``trial 3 finished: score 0.8123  [epsilon 0.05, num_heads 4]``. Other
    trials have ``stopped after epoch 2: score 0.7031``, or ``failed:`` and the reason.
    """
    how = (
        "finished"
        if trial.status == FINISHED
        else f"stopped after epoch {trial.last_epoch}"
    )
    what = (
        f"{how}: score {trial.score:.4f}"
        if trial.status != FAILED
        else f"failed: {trial.reason}"
    )
    values = ", ".join(
        f"{key.rpartition('.')[2]} {value}" for key, value in trial.overrides.items()
    )
    return f"trial {trial.index} {what}  [{values}]"
