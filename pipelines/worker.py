"""Train on Ray: the worker of a rank, and the driver that starts a group of workers."""

import hashlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

import uno.runs.run as training
from pipelines import nodes, ray_data, ray_env, ray_private
from pipelines.features import compute_on_ray
from uno.config import Config, override, to_dict
from uno.data.decode import ok_mask
from uno.data.files import Storage, join, split
from uno.data.memory import keep_pixels
from uno.errors import Interrupted
from uno.results.evaluate import evaluate_run
from uno.runs import PHASES, RAY_FOLDER, STOP_FILE
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.hardware import num_threads
from uno.runs.journal import JournalTail
from uno.runs.lock import ClaimedStorage
from uno.session.backend import STOPPING
from uno.session.console import on_stop, print_line
from uno.session.data import (
    Show,
    config_for_readable_rows,
    leave_out_unreadable,
    load_features,
)
from uno.session.ranks import GroupWorker
from uno.session.resources import on_features, store_bytes
from uno.session.run import Run

TRACES, TRACE = "nccl", "rank_"
GAUGES = {
    "loss": "Training loss.",
    "images_per_s": "Images a second of all ranks.",
    "data_wait": "Share of the time in which a rank waited for streamed data.",
    "step_ms": "Milliseconds of a step.",
    "rank_ms": "Milliseconds of the rank's own part of a step.",
    "rank_ms_min": "The least rank_ms of all ranks.",
    "rank_ms_median": "The median rank_ms of all ranks.",
    "rank_ms_max": "The largest rank_ms of all ranks.",
    "slow_rank": "The rank that others wait for.",
    "images_per_s_per_device": "Images a second of a rank.",
    "grad_norm": "Norm of the gradient.",
    "peak_memory_gb": "Largest memory of the fullest GPU so far, in GB.",
}
MAX_DEATHS = 3

log = logging.getLogger(__name__)


class RayWorker(GroupWorker):
    """One rank of a group of workers of Ray Train.

    Args:
        storage: The directory of the run.
    """

    def __init__(self, storage: Storage) -> None:
        import ray.train
        import ray.train.torch

        context = ray.train.get_context()
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device, self._storage = ray.train.torch.get_device(), storage
        self._gauges = Gauges(split(storage.uri)[1], self.rank)

    def report(self, metrics: dict[str, Any]) -> None:
        """Set Ray's gauges to a line of metrics, and report each epoch to Ray Train."""
        self._gauges.set(metrics)
        if metrics["event"] == "epoch":
            import ray.train

            ray.train.report(metrics)

    def asked_to_stop(self) -> bool:
        """Return whether the driver has written a STOP file into the run directory."""
        return self._storage.exists(STOP_FILE)


class Gauges:
    """Ray's gauges of one rank, which Prometheus and Grafana show as ``ray_uno_...``.

    They have the tags ``run``, ``phase`` and ``rank``. Metrics that all ranks share are
    set by rank 0 only.

    Args:
        run: The name of the run.
        rank: The number of this rank.
    """

    def __init__(self, run: str, rank: int) -> None:
        from ray.util.metrics import Gauge

        self._tags = {"run": run, "rank": str(rank)}
        names = (
            GAUGES
            if rank == 0
            else {name: text for name, text in GAUGES.items() if name.endswith("_ms")}
        )
        tags = ("run", "phase", "rank")
        self._gauges = {
            name: Gauge(f"uno_{name}", text, tag_keys=tags)
            for name, text in names.items()
        }

    def set(self, metrics: Mapping[str, Any]) -> None:
        """Set the gauges to the numbers of a line of metrics.

        Numbers without a gauge are ignored. The line's ``phase`` becomes a tag.
        """
        for name in self._gauges.keys() & metrics.keys():
            self._gauges[name].set(
                metrics[name], {**self._tags, "phase": metrics["phase"]}
            )


def train_loop(loop: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate a run, on every worker: Ray Train's ``train_loop_per_worker``.

    Args:
        loop: Plain values: ``config``, ``output``, ``token`` of the lock, ``phases``,
            ``evaluate``, ``worker_cpus``, and the result of
            :func:`pipelines.ray_data.shared`.

    Returns:
        ``{"metrics": ...}``, which is empty without ``evaluate``; or ``{"interrupted":
        reason}``.
    """
    import ray.train

    quiet_ray_train()
    config = Config.model_validate(loop["config"])
    storage = ClaimedStorage(loop["output"], loop["token"])
    storage.check()  # on every rank, because all nodes must see the run directory
    worker, neighbors = (
        RayWorker(storage),
        ray.train.get_context().get_local_world_size(),
    )
    torch.set_num_threads(
        rank_threads(config, worker.device, neighbors, loop["worker_cpus"])
    )
    if worker.device.type == "cuda" and ray.train.get_context().get_local_rank() == 0:
        collect_traces(storage)
    return _train_rank(config, loop, worker, storage)


def _train_rank(
    config: Config, loop: dict[str, Any], worker: RayWorker, storage: ClaimedStorage
) -> dict[str, Any]:
    """Train and evaluate a run on this rank.

    Args:
        config: The configuration of the run.
        loop: The argument of :func:`train_loop`.
        worker: This rank.
        storage: The directory of the run.

    Returns:
        The result of :func:`train_loop`.
    """
    train, truth = ray_data.worker_sets(config, loop, storage)
    train = train.to(worker.device)
    try:
        for phase in loop["phases"]:
            training.run_phase(config, phase, train, worker, storage)
    except Interrupted as stop:
        return {"interrupted": str(stop)}
    if not loop["evaluate"]:
        return {"metrics": {}}
    return {
        "metrics": evaluate_run(
            config, storage, train, truth(), loop["num_true"], worker
        )
    }


def rank_threads(
    config: Config, device: torch.device, neighbors: int, cpus: float
) -> int:
    """Return the number of threads of torch in a rank.

    It is the rank's share of the cores of its node. If a GPU computes and the tasks of
    Ray Data need the other cores, it is at most the CPUs of the worker.
    ``compute.threads`` has priority.

    Args:
        config: The configuration of the run.
        device: The device of the rank.
        neighbors: The number of ranks on this node.
        cpus: The CPUs of a worker.
    """
    threads = num_threads(config, neighbors)
    beside = (
        config.data.loading == "streaming"
        and device.type == "cuda"
        and not config.compute.threads
    )
    return min(threads, max(1, int(cpus))) if beside else threads


def quiet_ray_train() -> None:
    """Suppress lines that Ray Train prints for each report and at a worker's end."""
    quiet_exit()
    ray_private.quiet_reports()


def quiet_exit() -> None:
    """End this process even if Ray's SystemExit is raised where Python ignores it.

    Ray ends a process by SIGTERM, whose handler raises SystemExit. In a callback of the
    garbage collector Python would print that and go on. In this case the process sends
    SIGTERM to itself a moment later.
    """

    def hook(ignored: Any) -> None:
        if ignored.exc_type is SystemExit:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            sys.__unraisablehook__(ignored)

    sys.unraisablehook = hook


def run_on_ray(run: Run, show: Show) -> dict[str, float]:
    """Train and evaluate a run on Ray: Ray Data decodes, and Ray Train trains.

    The rows of the run then have the images that were decoded for an evaluation. These
    are in the object store of Ray, to which this process stays connected until
    ``run.cleanup`` is closed.

    Args:
        run: The locked run.
        show: Takes each line of metrics, which this process reads in
            ``metrics.jsonl``.

    Returns:
        The metrics of rank 0, empty unless ``run.evaluate``.
    """
    config, task, storage = run.config, run.task, run.storage
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        storage.write(STOP_FILE, b"")

    streams, side = config.data.loading == "streaming", config.data.stored_size
    store = store_bytes(config, len(task.rows))
    with on_stop(stop, STOPPING), ExitStack() as own:
        connected = ray_env.connect(
            store, config.compute.num_workers, keep_idle=streams
        )
        until = own if streams or on_features(config) else run.cleanup
        ray = until.enter_context(connected)
        nodes.check_shares(
            config,
            nodes.wait_for_resources(
                config, stopping.is_set, nodes.startup_timeout_s(config)
            ),
        )
        images, reasons, found = None, None, None
        if on_features(config):
            compute = partial(compute_on_ray, ray, give_up=stopping.is_set)
            how = show, stopping.is_set, compute
            found, reasons = load_features(config, task, storage, *how)
            leave_out_unreadable(reasons, config, task, storage)
        elif not streams:
            images, reasons = ray_data.decode_task(
                ray, task, side, config.data.interpolation
            )
            leave_out_unreadable(reasons, config, task, storage)
        if stopping.is_set():
            raise Interrupted("stopped before training began")
        if run.phases:
            ok = None if reasons is None else ok_mask(reasons)
            config = config_for_readable_rows(config, task, ok, run.batch_is_derived)
        journal = JournalTail(storage)

        def poll() -> None:
            for metrics in journal.new_entries():
                show(metrics)

        facts = ray_data.shared(ray, config, task, reasons, found, images)
        values = run_workers(run, config, facts, poll, stopping.is_set)
        # The report and the predictions use these images, too.
        if reasons is not None and run.evaluate:
            kept = (
                ray_data.pixels_of(ray.get(facts["images"]), side)
                if found is None
                else found
            )
            run.opened = keep_pixels(task, kept, reasons)
        return values


def run_workers(
    run: Run,
    config: Config,
    facts: dict[str, Any],
    on_poll: Callable[[], None],
    give_up: Callable[[], bool],
) -> dict[str, float]:
    """Train and evaluate a run on a group of Ray workers.

    If a group dies, a new one is started as soon as the cluster can place it. It
    resumes from the newest checkpoint. After three deaths in a row without a new
    checkpoint the error is raised. If a node is drained, its group saves and a new one
    follows. That does not count as a death.

    Args:
        run: The locked run.
        config: Its configuration, for the rows that can be read.
        facts: What :func:`pipelines.ray_data.shared` has put into the object store.
        on_poll: Is called again and again while the workers train.
        give_up: Returns whether the user has asked to stop.

    Returns:
        The metrics of rank 0.

    Raises:
        Interrupted: The group was asked to stop, or ``give_up`` returned True during a
            wait for nodes.
        UnoError: A worker raised it for the user to act on.
    """
    assert run.lock is not None
    lock, storage = run.lock, run.storage
    loop = facts | {
        "config": to_dict(config),
        "output": storage.uri,
        "phases": list(run.phases),
        "evaluate": run.evaluate,
    }
    saved, deaths = _saved_steps(storage), 0
    while True:
        storage.delete(STOP_FILE)  # it asked the last group to stop
        resources = nodes.wait_for_resources(config, give_up)
        # Later groups need the same device, even if the cluster has lost its GPUs
        # meanwhile.
        config = override(
            config, {"compute.device": "cuda" if "GPU" in resources else "cpu"}
        )
        loop["worker_cpus"] = resources["CPU"]
        # A worker of the last group that still runs can then write nothing.
        loop["token"] = lock.replace_token()
        notices = nodes.DrainWatcher(ray_private.worker_hosts)

        def poll(notices: nodes.DrainWatcher = notices) -> None:
            on_poll()
            if notices.new():
                print_line(
                    "a node is being drained: saving a checkpoint, then continuing on"
                    " another node"
                )
                storage.write(STOP_FILE, b"")

        try:
            outcome = _fit_in_thread(loop, resources, config, storage, poll)
        except Exception as error:
            loss = nodes.classify_failure(error)
            before, saved = saved, _saved_steps(storage)
            deaths = (0 if saved > before else deaths) + (loss.last is not None)
            if loss.last is not None and deaths == MAX_DEATHS:
                raise loss.last from None
            log.warning("%s; new ones resume from the newest checkpoint", loss.line)
            continue
        if "interrupted" not in outcome or give_up() or not notices.given:
            break
    storage.delete(RAY_FOLDER)
    if "interrupted" in outcome:
        raise Interrupted(outcome["interrupted"])
    return outcome["metrics"]


def _saved_steps(storage: Storage) -> int:
    """Return the sum of the newest checkpoints' steps of all phases.

    It grows with every checkpoint.
    """
    return sum(max(checkpoint_steps(storage, phase), default=0) for phase in PHASES)


def _fit_in_thread(
    loop: dict[str, Any],
    resources: dict[str, float],
    config: Config,
    storage: Storage,
    on_poll: Callable[[], None],
) -> dict[str, Any]:
    """Fit a group of workers in a thread, and poll in this one.

    Args:
        loop: The argument of :func:`train_loop`.
        resources: The resources of each worker.
        config: The configuration of the run.
        storage: The directory of the run.
        on_poll: Is called every half second.

    Returns:
        The result of :func:`train_loop` on rank 0.
    """
    compute, name = (
        config.compute,
        f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
    )
    variables = flight_recorder(storage) if "GPU" in resources else None
    # Ray must not start a group again: run_workers does, with the resources that the
    # cluster has then.
    settings = run_config(join(loop["output"], RAY_FOLDER), name, (), 0, 0, variables)
    body = partial(
        fit,
        train_loop,
        loop,
        scaling(compute.num_workers, resources, compute.placement_strategy),
        settings,
    )
    return ray_env.in_thread(body, on_poll).return_value


def scaling(
    num_workers: int, resources: dict[str, float], placement: str = "PACK"
) -> Any:
    """Return the ScalingConfig of Ray Train for a group of workers.

    Args:
        num_workers: The number of workers.
        resources: The resources of each worker.
        placement: The placement strategy.
    """
    import ray.train

    return ray.train.ScalingConfig(
        num_workers=num_workers,
        use_gpu="GPU" in resources,
        resources_per_worker=resources,
        placement_strategy=placement,
    )


def run_config(
    folder: str,
    name: str,
    callbacks: Sequence[Any] = (),
    startups: int = 9,
    preemptions: int = -1,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Return a RunConfig of Ray Train that logs nothing.

    A group that dies is not started again by Ray.

    Args:
        folder: The directory of Ray's own files, which are in ``folder/name``.
        name: The name of the run for Ray.
        callbacks: The callbacks of Ray Train.
        startups: How often a group that finds no place is tried again.
        preemptions: How often a group whose nodes leave is started again; -1 means
            always.
        variables: Environment variables of the workers.
    """
    import ray.train

    return ray.train.RunConfig(
        name=name,
        storage_path=folder,
        callbacks=list(callbacks),
        failure_config=ray.train.FailureConfig(
            max_failures=0,
            controller_failure_limit=startups,
            max_preemption_failures=preemptions,
        ),
        logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
        worker_runtime_env={"env_vars": dict(variables)} if variables else None,
    )


def flight_recorder(storage: Storage) -> dict[str, str]:
    """Return environment variables that make NCCL write traces after a timeout.

    The last collectives of each rank are written to ``nccl/rank_N`` of the run. For a
    run on an object store they stay on each node until the next group collects them.
    Variables that are set already are left out.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": os.path.join(traces_of(storage), TRACE),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def traces_of(storage: Storage) -> str:
    """Return the directory on a node for NCCL's traces.

    It is ``nccl`` in the directory of a local run, and for a run on an object store a
    temporary directory with a name made from the run's URI.
    """
    if storage.is_local:
        return storage.path(TRACES)
    name = hashlib.sha256(storage.uri.encode()).hexdigest()[:12]
    return os.path.join(tempfile.gettempdir(), f"uno-nccl-{name}")


def collect_traces(storage: Storage) -> None:
    """Make the directory for NCCL's traces on a node.

    For a run on an object store, traces of the last group are moved there.
    """
    folder = Path(traces_of(storage))
    folder.mkdir(parents=True, exist_ok=True)
    for file in () if storage.is_local else sorted(folder.glob(f"{TRACE}*")):
        storage.write(f"{TRACES}/{file.name}-{socket.gethostname()}", file.read_bytes())
        file.unlink()


def fit(
    train_loop: Callable[[dict[str, Any]], Any],
    loop: dict[str, Any],
    scaling: Any,
    settings: Any,
    timeout_s: int = 600,
) -> Any:
    """Fit a ``TorchTrainer``, and return Ray's result.

    Args:
        train_loop: What each worker runs.
        loop: The argument of ``train_loop``.
        scaling: The result of :func:`scaling`.
        settings: The result of :func:`run_config`.
        timeout_s: The timeout in seconds of collectives.
    """
    import ray.train
    import ray.train.torch

    trainer = ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config=loop,
        scaling_config=scaling,
        run_config=settings,
        torch_config=ray.train.torch.TorchConfig(timeout_s=timeout_s),
    )
    # A helper of Ray Train gives the CPUs of workers back whose controller died. It
    # looks for the cluster by the processes of this machine and fails where a second
    # cluster runs, so it is told the address.
    ray_private.propagate(ray_env.ADDRESS)
    before = os.environ.get(ray_env.ADDRESS)
    os.environ[ray_env.ADDRESS] = ray.get_runtime_context().gcs_address
    try:
        return trainer.fit()
    finally:
        os.environ.pop(ray_env.ADDRESS)
        if before is not None:
            os.environ[ray_env.ADDRESS] = before
