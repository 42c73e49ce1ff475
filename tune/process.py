"""The processes of a trial: a Ray Tune function that trains by itself, or starts Ray Train workers."""

from __future__ import annotations

import json
import os
import traceback
from contextlib import suppress
from typing import Any

import torch

from tune.records import RAY_FOLDER, read_json, trial_name
from tune.score import SweepData, make_folds
from tune.trial import RemoteGate, run_trial
from uno.config import Config, override
from uno.errors import StorageError, UnoError
from uno.runs.lock import ClaimedStorage
from uno.train import LocalWorker, Worker


def trial(sample: dict[str, Any], sweep: dict[str, Any]) -> None:
    """What Tune runs for each trial. A failure is noted for the driver, which marks the trial.

    Args:
        sample: ``index`` of the trial.
        sweep: plain values of the sweep (see ``tune.sweep``), the data's object reference and the gate actor.
    """
    index = sample["index"]
    storage = ClaimedStorage(sweep["output"], sweep["token"])
    try:
        if sweep["workers"]:
            _start_workers(index, sweep)
        else:
            _run_here(index, sweep, storage)
    except Exception as error:
        import ray.tune

        note_failure(storage, index, error)
        ray.tune.report({"epoch": 0, "score": 0.0})  # Tune prints a line for a trial without any report


def note_failure(storage: ClaimedStorage, index: int, error: Exception) -> None:
    """Leave ``failure.json``: one line for the table, and the traceback where it is not one of our errors."""
    text = " ".join(str(error).split())
    reason = text if isinstance(error, UnoError) else f"{type(error).__name__}: {text}"
    failure = {"kind": type(error).__name__, "reason": reason[:300]}
    if not isinstance(error, UnoError):
        failure["traceback"] = "".join(traceback.format_exception(error))[-8000:]
    with suppress(StorageError):
        storage.write(f"{trial_name(index)}/failure.json", json.dumps(failure, indent=1).encode())


def trial_configs(base: Config, overrides: dict[str, Any], seeds: int) -> list[Config]:
    """The configuration of a trial, once for each seed: base.seed, base.seed + 1, ..."""
    return [override(base, {**overrides, "seed": base.seed + i}) for i in range(seeds)]


def _run_here(index: int, sweep: dict[str, Any], storage: ClaimedStorage) -> None:
    import ray
    import ray.tune

    torch.set_num_threads(sweep["threads"])
    device = torch.device("cuda" if sweep["gpu"] else "cpu")
    worker, gate = LocalWorker(device), RemoteGate(sweep["gate"])

    def report(line: dict[str, Any]) -> None:
        ray.tune.report({"epoch": line["epoch"], "score": line["score"]})

    _run(index, sweep, ray.get(sweep["data"]), worker, storage, gate, report)


def _run(
    index: int,
    sweep: dict[str, Any],
    data: SweepData,
    worker: Worker,
    storage: ClaimedStorage,
    gate: RemoteGate,
    report: Any,
) -> None:
    base = override(Config(), sweep["config"])
    overrides = read_json(storage, f"{trial_name(index)}/trial.json")["overrides"]
    folds = make_folds(data, sweep["score"], sweep["folds"], base.seed, sweep["hide"])
    configs = trial_configs(base, overrides, sweep["seeds"])
    run_trial(index, configs, folds, sweep["score"], sweep["num_epochs"], worker, storage, gate, report)


def _start_workers(index: int, sweep: dict[str, Any]) -> None:
    """A Ray Train run inside the trial; the trial itself only waits and needs next to no CPU."""
    import ray
    import ray.train
    import ray.train.torch
    import ray.tune
    from ray.tune.integration.ray_train import TuneReportCallback

    from pipelines.worker import cause_of

    _name_the_cluster(ray)
    trainer = ray.train.torch.TorchTrainer(
        _train_loop,
        train_loop_config={"index": index, "sweep": sweep},
        scaling_config=ray.train.ScalingConfig(
            num_workers=sweep["workers"], use_gpu=sweep["gpu"], resources_per_worker=sweep["resources"]
        ),
        torch_config=ray.train.torch.TorchConfig(timeout_s=1800),
        run_config=ray.train.RunConfig(
            name=f"train-{ray.tune.get_context().get_trial_id()}",
            storage_path=f"{sweep['output']}/{RAY_FOLDER}",
            callbacks=[TuneReportCallback()],
            failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=3),
            logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        cause = cause_of(error)
        raise cause if isinstance(cause, Exception) else error from None


def _name_the_cluster(ray: Any) -> None:
    """Tell the processes of this trial their cluster's address.

    When Tune stops a trial, a helper of Ray Train gives its workers' CPUs back. It looks for the cluster by
    the processes of this machine and fails where a second cluster runs: each trial then keeps its CPUs, and
    the sweep soon waits for ever.
    """
    from ray.train.v2._internal import constants

    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    constants.ENV_VARS_TO_PROPAGATE.add("RAY_ADDRESS")


def _train_loop(loop: dict[str, Any]) -> None:
    """What every worker of a trial runs: ``train_loop_per_worker``."""
    import ray
    import ray.train

    from pipelines.worker import RayWorker, quiet_ray_train

    class TrialWorker(RayWorker):
        """A rank that reports scores only, and ends when its trial is stopped."""

        def report(self, metrics: dict[str, Any]) -> None:
            """Losses stay in the journal."""

        def should_stop(self, step: int) -> bool:
            """Never: Tune kills the workers of a stopped trial."""
            return False

    quiet_ray_train()
    index, sweep = loop["index"], loop["sweep"]
    torch.set_num_threads(sweep["threads"])
    storage = ClaimedStorage(sweep["output"], sweep["token"])
    storage.check()
    worker = TrialWorker(storage)

    def report(line: dict[str, Any]) -> None:
        ray.train.report({"epoch": line["epoch"], "score": line["score"]})

    _run(index, sweep, ray.get(sweep["data"]), worker, storage, RemoteGate(sweep["gate"]), report)
