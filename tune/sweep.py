"""A sweep from its options to its tables: ``uno tune``, or ``python -m tune.sweep`` for ``ray job submit``.

All state is in the output directory (``tune.records``), in plain files, written by a driver that holds its
claim. Ray Tune schedules and stops trials; it is not asked to remember anything, so the same command
continues a sweep that was killed anywhere: trials with a result are not run again, an unfinished one goes on
at the epoch it had reached, and early stopping and Optuna are told what happened before.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PositiveInt

from pipelines import cli, ray_env
from pipelines.console import on_stop, say, say_left_out
from pipelines.jobs import prepare
from pipelines.options import PRINT_CONFIG, Argument, Command, switch
from pipelines.options import parse as parse_line
from pipelines.worker import use_gpu, worker_resources
from tune import records, report, spaces
from tune.records import FAILED, FINISHED, RAY_FOLDER, SETTINGS, Trial
from tune.score import AGREEMENT, FOLDS, SCORES, Fold, SweepData, make_folds, sweep_data
from tune.spaces import Space
from uno.config import Config, about, differing_keys, dump_yaml, override, to_dict
from uno.data.decode import check_bad, decode_many, readable
from uno.data.files import Storage
from uno.errors import ConfigError, Interrupted, NumericsError, StorageError
from uno.methods import num_heads
from uno.runs import DISCOVER, lock, run
from uno.runs.lock import Claim

POLL_S = 0.5
STOPPING = "stopping: unfinished trials go on where they are with the same command"
CPU_OF_A_WAITING_TRIAL = 0.01


TUNE = Command(
    "tune",
    {
        **PRINT_CONFIG,
        "--space": Argument(f"{', '.join(spaces.SPACES)}, or a YAML file.", str, "uno"),
        "--trials": Argument("Configurations to try.", PositiveInt, 16),
        "--search": Argument("How they are chosen.", Literal["random", "optuna"], "random"),
        "--score": Argument(
            "What trials are compared by: folds (known classes hidden in turn), loss, agreement; oracle uses "
            "the true labels and is for research only.",
            Literal[*SCORES],
            FOLDS,
        ),
        "--folds": Argument("Sets of hidden classes in each trial.", PositiveInt, 2),
        "--hide": Argument("Classes a fold hides; default: the novel share of all classes.", int | None),
        "--seeds": Argument("Runs of each configuration; the score is their mean.", PositiveInt, 1),
        "--concurrent": Argument("Trials at a time; default: all the cluster holds.", PositiveInt | None),
        "--grace-epochs": Argument(
            "Epochs before a trial may be stopped; default: a sixth.", PositiveInt | None
        ),
        "--reduction": Argument("At each rung one of so many goes on.", Annotated[int, Field(ge=2)], 3),
        "--no-stopping": switch("Run every trial to its last epoch."),
    },
    output="runs/tune-{preset}-seed{seed}",
    text="""
The other options make the configuration that is searched around, as for uno discover. Trial 0 is that
configuration as it is. The same command again continues a sweep that was stopped or killed; a larger
--trials adds trials. `uno discover --config DIR/best.yaml` runs the winner.
""",
)


@dataclass(frozen=True)
class SweepOptions:
    """What ``uno tune`` was asked to do; ``given`` are the configuration keys the user set himself."""

    config: Config
    given: dict[str, Any]
    space: Space
    space_name: str = "uno"
    trials: int = 16
    search: str = "random"
    score: str = FOLDS
    folds: int = 2
    hide: int | None = None
    seeds: int = 1
    concurrent: int | None = None
    asha: dict[str, int] | None = None


def main(argv: Sequence[str]) -> int:
    """Run or continue a sweep; returns the exit code."""
    sweep, print_config = parse(argv)
    if print_config:
        print(dump_yaml(sweep.config), end="")
        return 0
    return run_sweep(sweep)


def parse(argv: Sequence[str]) -> tuple[SweepOptions, bool]:
    """Options of ``uno tune ARGV...``, and whether only the configuration is to be printed.

    Raises:
        ConfigError: an unknown option, a value out of range, or a space that does not fit the schema.
        SystemExit: after ``--help``.
    """
    parsed = parse_line(argv, TUNE)
    own, config = parsed.own, parsed.config
    grace = own.grace_epochs or max(1, config.discover.epochs // 6)
    asha = None if own.no_stopping else {"grace_epochs": grace, "reduction": own.reduction}
    given = {key: value for key, value in parsed.given.items() if about(key).scope != "place"}
    given |= {"preset": config.preset, "recipe": config.recipe}
    sweep = SweepOptions(
        config, given, spaces.load_space(own.space, config), own.space, own.trials, own.search, own.score,
        own.folds, own.hide, own.seeds, own.concurrent, asha,
    )  # fmt: skip
    return sweep, own.print_config


def run_sweep(options: SweepOptions) -> int:
    """Run what is missing of a sweep and write its tables. Returns 0.

    Raises:
        ConfigError: anything a trial would stumble over, before the first one starts.
        Interrupted: after SIGTERM or SIGINT; the same command continues.
        NumericsError: every trial failed.
        StorageError: the output directory cannot be written.
    """
    config = options.config
    check_options(options)
    # Trials may find a GPU that this process lacks.
    task = prepare(override(config, {"compute.workers": 0, "compute.device": "auto"}))
    images, reasons = decode_many(task.rows.images, config.data.store_size)
    say_left_out(check_bad(task.rows.ids, reasons, config.data.max_bad_fraction))
    data = sweep_data(task, images, readable(reasons), options.score)
    folds = make_folds(data, options.score, options.folds, config.seed, options.hide)
    num_epochs = check_plans(options, folds)
    assert config.output is not None
    storage = Storage(config.output)
    with lock.claim(storage, on_wait=say) as claim:
        open_sweep(options, claim.storage, task.rows.fingerprint, num_epochs)
        trials = [t for t in records.read_trials(claim.storage) if t.index < options.trials and t.status]
        if len(trials) < options.trials:
            _describe(options, data, folds, num_epochs)
            _run_missing(options, data, num_epochs, claim, len(trials))
        else:
            say(f"{storage.uri}: all {len(trials)} trials have a result; nothing is run again")
        summary = report.write(claim.storage)
    best = records.best_trial(summary.trials)
    if best is None:
        first = next((t.reason for t in summary.trials if t.status == FAILED), "none finished")
        raise NumericsError(
            f"no trial finished without failing, so there is no best.yaml; first reason: {first}"
        )
    say("")
    say(report.format_table(summary))
    say("")
    say(f"results in {storage.uri}")
    return 0


# ------------------------------------------------------------------------------------------------- preflight
def check_options(options: SweepOptions) -> None:
    """Raise ConfigError for numbers out of range and combinations that mean nothing."""
    for name in ("trials", "folds", "seeds", "concurrent"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    spaces.check_space(options.space, options.config)
    heads = next((d.ends for d in options.space if d.key == "model.num_heads"), ())
    if options.score == AGREEMENT and min(*heads, num_heads(options.config)) < 2:
        raise ConfigError(
            "--score agreement compares heads: every trial needs two or more, and baselines have one "
            "(model.num_heads)"
        )
    if options.config.model.weights is not None and options.score == FOLDS:
        raise ConfigError(
            "--score folds pretrains anew for each fold: --weights may have been trained on the classes it "
            "hides; use --score agreement, or leave --weights out"
        )
    if options.config.discover.epochs < 1:
        raise ConfigError("discover.epochs must be at least 1: trials are compared by their epochs")


def check_plans(options: SweepOptions, folds: list[Fold]) -> int:
    """Number of epochs of a trial that have steps to take.

    Raises:
        ConfigError: a problem is too small for the batch size.
    """
    config, epochs = options.config, 1
    for fold in folds:
        train = fold.train
        sizes = len(train.labels), len(train.unlabeled_images)
        try:
            plan = run.plans(config, *sizes, config.compute.workers)[DISCOVER]
        except ConfigError as error:
            raise ConfigError(
                f"{fold.name} of {sizes[0]} labeled and {sizes[1]} hidden rows: {error}"
            ) from None
        steps = min(config.train.max_steps or 10**12, config.discover.epochs * plan.steps_per_epoch)
        epochs = max(epochs, math.ceil(steps / plan.steps_per_epoch))
    return epochs


def settings_of(options: SweepOptions, fingerprint: str, num_epochs: int) -> dict[str, Any]:
    """``sweep.yaml``: all that a continuation must share, and ``given`` for ``best.yaml``."""
    return {
        "score": options.score,
        "search": options.search,
        "space_name": options.space_name,
        "folds": options.folds if options.score == FOLDS else None,
        "hide": options.hide,
        "seeds": options.seeds,
        "asha": options.asha,
        "epochs": num_epochs,
        "data_fingerprint": fingerprint,
        "space": spaces.to_tree(options.space),
        "given": options.given,
        "config": to_dict(options.config),
    }


def open_sweep(options: SweepOptions, storage: Storage, fingerprint: str, num_epochs: int) -> None:
    """Write ``sweep.yaml``, or check that it matches.

    Raises:
        ConfigError: the directory holds something else, or a sweep with other settings (named).
    """
    new = settings_of(options, fingerprint, num_epochs)
    if not storage.exists(SETTINGS):
        if {name for name in storage.list() if not lock.ours(name)}:
            raise ConfigError(f"{storage.uri} is not empty and holds no sweep; choose another --output")
        storage.write(
            SETTINGS, yaml.safe_dump(new, sort_keys=False, default_flow_style=None, width=110).encode()
        )
        return
    old = records.read_settings(storage)
    different = [key for key in new if key not in ("config", "given") and old.get(key) != _plain(new[key])]
    stored = old.get("config")
    different += differing_keys(stored if isinstance(stored, dict) else {}, options.config)
    if different:
        raise ConfigError(
            f"{storage.uri} holds a sweep with other settings: {', '.join(different[:6])}"
            f"{' ...' if len(different) > 6 else ''}; use those, or another --output"
        )


def _plain(value: Any) -> Any:
    return yaml.safe_load(yaml.safe_dump(value))


def _describe(options: SweepOptions, data: SweepData, folds: list[Fold], num_epochs: int) -> None:
    say(f"{options.trials} trials of up to {num_epochs} epochs over the space {options.space_name}:")
    for domain in options.space:
        say(f"  {domain.key:<28}{domain.describe()}")
    say(f"score: {SCORES[options.score]}")
    if options.score == FOLDS:
        say(
            f"{len(folds)} folds: {len(folds[0].hidden)} of {data.num_known} known classes hidden; "
            f"{int(data.unlabeled.sum())} unlabeled rows take no part"
        )


# ---------------------------------------------------------------------------------------------------- running
def concurrency(options: SweepOptions, cluster: dict[str, float]) -> tuple[int, dict[str, float]]:
    """(trials at a time, resources of the process that trains or of each worker).

    Raises:
        ConfigError: the cluster cannot hold one trial.
    """
    config, workers = options.config, options.config.compute.workers
    if workers:
        resources = worker_resources(config, cluster)
        needed = {name: workers * amount for name, amount in resources.items()}
        needed["CPU"] += CPU_OF_A_WAITING_TRIAL
    else:
        resources = {"CPU": config.compute.cpus_per_worker or min(1.0, cluster.get("CPU", 1.0))}
        if use_gpu(config, cluster):
            resources["GPU"] = config.compute.gpus_per_worker
        needed = resources
    fits = min(int(cluster.get(name, 0) / amount + 1e-9) for name, amount in needed.items())
    if fits < 1:
        needs = " and ".join(f"{amount:g} {name}s" for name, amount in needed.items())
        has = " and ".join(f"{cluster.get(name, 0):g} {name}s" for name in needed)
        raise ConfigError(f"a trial needs {needs}, the cluster has {has}; lower --compute.cpus-per-worker")
    return min(fits, options.concurrent or fits, options.trials), resources


def _run_missing(
    options: SweepOptions, data: SweepData, num_epochs: int, claim: Claim, num_done: int
) -> None:
    """Ray Tune over the trials without a result, ``num_done`` of them having one."""
    stopping = threading.Event()
    say(f"starting Ray{f'; {num_done} trials have a result already' if num_done else ''}")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new engine prints boxes whatever the verbosity
    with on_stop(stopping.set, STOPPING), ray_env.connect() as ray:
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # errors of trials are in the table
        number, resources = concurrency(options, ray.cluster_resources())
        say(f"{number} trial{'s' if number > 1 else ''} at a time, {resources['CPU']:g} CPUs each process")
        _tune(ray, options, data, num_epochs, claim, number, resources, stopping)
    claim.storage.delete(RAY_FOLDER)
    if stopping.is_set():
        raise Interrupted("stopped; the same command continues the sweep")


def _tune(
    ray: Any,
    options: SweepOptions,
    data: SweepData,
    num_epochs: int,
    claim: Claim,
    number: int,
    resources: dict[str, float],
    stopping: threading.Event,
) -> None:
    from ray import tune

    from tune import process
    from tune.search import Interruption, OptunaSampler, Plan, RandomSampler, scheduler
    from tune.trial import Gate

    storage, config = claim.storage, options.config
    sampler: Any = {"random": RandomSampler, "optuna": OptunaSampler}[options.search](
        options.space, config.seed
    )
    trials = [t for t in records.read_trials(storage) if t.index < options.trials]
    clock, num_ended = time.monotonic(), sum(t.status is not None for t in trials)

    def on_end(trial: Trial) -> None:
        nonlocal num_ended
        num_ended += 1
        say(f"{num_ended}/{options.trials}  {_line(trial)}  ({time.monotonic() - clock:.0f} s)")

    first = spaces.current(options.space, config)
    plan = Plan(storage, sampler, first, options.trials, num_epochs, on_end, stopping.is_set)
    sweep = {
        "output": storage.uri,
        "token": storage.token,
        "config": to_dict(config),
        "score": options.score,
        "folds": options.folds,
        "hide": options.hide,
        "seeds": options.seeds,
        "num_epochs": num_epochs,
        "workers": config.compute.workers,
        "gpu": "GPU" in resources,
        "resources": resources,
        "threads": config.compute.threads or max(1, int(resources["CPU"])),
        "data": ray.put(data),
        "gate": ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Gate).remote(),
    }
    here = {"CPU": CPU_OF_A_WAITING_TRIAL} if config.compute.workers else resources
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(process.trial, sweep=sweep), here),
        tune_config=tune.TuneConfig(
            search_alg=plan,
            scheduler=scheduler(options.asha, num_epochs, [t for t in trials if t.status]),
            num_samples=plan.num_missing,
            max_concurrent_trials=number,
            reuse_actors=not config.compute.workers,  # a process takes seconds to import torch
        ),
        run_config=tune.RunConfig(
            name=f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            storage_path=f"{storage.uri}/{RAY_FOLDER}",
            verbose=0,
            stop=Interruption(stopping.is_set),
            failure_config=tune.FailureConfig(max_failures=0, fail_fast=False),
        ),
    )
    _in_thread(tuner.fit)
    if plan.storage_error is not None:
        raise StorageError(f"a trial could not write: {plan.storage_error}; the same command continues")


def _line(trial: Trial) -> str:
    values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in trial.overrides.items())
    if trial.status == FAILED:
        return f"trial {trial.index} failed: {trial.reason}  [{values}]"
    how = "finished" if trial.status == FINISHED else f"stopped after epoch {trial.last_epoch}"
    return f"trial {trial.index} {how}: score {trial.score:.4f}  [{values}]"


def _in_thread(fit: Callable[[], Any]) -> None:
    """``Tuner.fit()`` off the main thread, where Ray leaves signal handlers alone."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            fit()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="ray-tune", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
    if errors:
        raise errors[0]


if __name__ == "__main__":
    cli.run(main)
