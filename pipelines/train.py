"""Train a run with Ray Train: the function of each worker, and the trainer around it.

Ray Train places the workers, starts a new group after a death, and waits for nodes; the
rules of :mod:`pipelines.failures` end a run that no other group could continue. The
driver learns what happens by :class:`Messages`.
"""

import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import uno.runs.run as training
from pipelines import nodes, ray_data, ray_env, workarounds
from pipelines.features import compute_on_ray
from uno.config import Config, override, to_dict
from uno.data.decode import Decoding, ok_mask
from uno.data.files import Storage, join
from uno.data.memory import keep_pixels
from uno.distributed import GroupWorker
from uno.errors import Interrupted, one_line
from uno.results.evaluate import evaluate_run
from uno.runs import RAY_FOLDER, STOP_FILE
from uno.runs.hardware import num_threads
from uno.runs.lock import ClaimedStorage
from uno.session.backend import STOPPING
from uno.session.console import on_stop, print_line
from uno.session.data import (
    Show,
    config_for_readable_rows,
    leave_out_unreadable,
    load_features,
)
from uno.session.resources import store_bytes, trains_on_features
from uno.session.run import Run

COLLECTIVE_S = 600  # longest wait of a collective for the other ranks
# Looking for a notice of preemption is a barrier of all ranks, which takes 3 ms.
PREEMPTION_STEPS = 50

log = logging.getLogger(__name__)


class Messages:
    """Queues for messages between the driver and a group of training workers.

    Rank 0 sends ``("begun", id)`` when a group begins, ``("metrics", line)``, and
    ``("drained", "")`` before it leaves a node. Ray Train's controller sends ``("lost",
    reason)``. For each group that begins, the driver sends its id with a new token of
    the lock of the run, so that workers of the group before can write no more.

    Args:
        ray: The module ``ray``, connected to a cluster.

    Attributes:
        to_driver: The queue of messages for the driver.
    """

    def __init__(self, ray: Any) -> None:
        from ray.util.queue import Queue

        here = {
            "num_cpus": 0,
            "label_selector": {workarounds.NODE: ray_data.own_node(ray)},
        }
        self.to_driver, self._to_rank_0 = Queue(0, here), Queue(0, here)

    def received(self) -> list[tuple[str, Any]]:
        """Return all messages that have come to the driver since the last call.

        They are taken from the queue, in their order. This does not wait for any.

        Returns:
            Pairs of a kind and a content: ``("begun", group id)``, when a group of
            workers begins; ``("metrics", metrics by name)``; ``("drained", "")``, when
            a group leaves a node that is being drained; or ``("lost", reason)``, when
            Ray Train replaces a group.
        """
        return list(self.to_driver.get_nowait_batch(self.to_driver.qsize()))

    def send_token(self, group: str, token: str) -> None:
        """Send a token of the run's lock from the driver to rank 0 of a group.

        :meth:`begin` waits for it there.

        Args:
            group: The id of the group, from its message ``begun``.
            token: The token with which the group may write to the run directory.
        """
        self._to_rank_0.put((group, token))

    def begin(self) -> str:
        """Tell the driver that a group of workers begins, and wait for its lock token.

        Only rank 0 calls this. The driver replaces the lock's token for each group, so
        that workers of the group before can write no more.

        Returns:
            The token with which the group may write to the run directory.
        """
        group = uuid.uuid4().hex
        self.to_driver.put(("begun", group))
        while True:
            answered, token = self._to_rank_0.get()
            if answered == group:  # else the token of a group that died while it waited
                return str(token)


class RayWorker(GroupWorker):
    """One rank of a group of workers of Ray Train, as the training loop sees it.

    Args:
        storage: The directory of the run.
        messages: The messages to the driver.

    Attributes:
        preempted: Whether the group ends because one of its nodes is being drained.
    """

    def __init__(self, storage: Storage, messages: Messages) -> None:
        import ray.train
        import ray.train.torch

        context = ray.train.get_context()
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device, self._storage = ray.train.torch.get_device(), storage
        self._messages, self.preempted = messages, False

    def report(self, metrics: dict[str, Any]) -> None:
        """Send a line of training metrics to the driver, from rank 0.

        Args:
            metrics: The metrics by name, with ``phase``.
        """
        if self.rank == 0:
            self._messages.to_driver.put(("metrics", metrics))

    def should_stop(self, step: int) -> bool:
        """Return whether to stop before a training step, the same on all ranks.

        All ranks must call this before the same steps. A group stops if the user has
        asked for it, or if one of its nodes is being drained. The second is looked for
        every 50 steps; the attribute ``preempted`` is then set, and rank 0 tells the
        driver. On GPUs a request of the user is looked for every tenth step.

        Args:
            step: The number of steps that are done.
        """
        import ray.train

        if step % PREEMPTION_STEPS == 0 and ray.train.get_preemption_info() is not None:
            self.preempted = True
            if self.rank == 0:
                self._messages.to_driver.put(("drained", ""))
        return self.preempted or super().should_stop(step)

    def asked_to_stop(self) -> bool:
        """Return whether the driver has asked to stop, by a file in the run directory.

        The file is named ``STOP``, and is not deleted here.

        Raises:
            StorageError: The run directory cannot be read.
        """
        return self._storage.exists(STOP_FILE)


def train_loop(loop: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate a run, on every worker: Ray Train's ``train_loop_per_worker``.

    Rank 0 first gets a token of the run's lock from the driver, with which all ranks
    can write checkpoints. The number of threads of torch is set.

    Args:
        loop: Values by name: ``config``, the configuration as a nested dict;
            ``output``, the run directory; ``phases``, the names of the phases to train;
            ``evaluate``, whether to evaluate after them; ``worker_cpus``, the CPUs of a
            worker; ``messages``, the :class:`Messages` to and from the driver; and the
            references to the data from :func:`pipelines.ray_data.shared`.

    Returns:
        ``{"metrics": metrics by name}``, which are empty without ``evaluate``; or
        ``{"interrupted": reason}`` if the user has asked to stop and a checkpoint is
        saved.

    Raises:
        Preempted: A node is being drained. A checkpoint is saved.
        StorageError: This node does not see the run directory, or another command or a
            later group has taken its lock.
    """
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    from pipelines.failures import Preempted

    config, messages = Config.model_validate(loop["config"]), loop["messages"]
    context = ray.train.get_context()
    token = messages.begin() if context.get_world_rank() == 0 else None
    storage = ClaimedStorage(loop["output"], broadcast_from_rank_zero(token))
    storage.check()  # on every rank, because all nodes must see the run directory
    worker = RayWorker(storage, messages)
    neighbors = context.get_local_world_size()
    torch.set_num_threads(rank_threads(config, worker.device, neighbors))
    train, truth = ray_data.worker_sets(config, loop, storage)
    train = train.to(worker.device)
    try:
        for phase in loop["phases"]:
            training.run_phase(config, phase, train, worker, storage)
    except Interrupted as stop:
        if worker.preempted:
            raise Preempted(str(stop)) from None
        return {"interrupted": str(stop)}
    if not loop["evaluate"]:
        return {"metrics": {}}
    num_true = loop["num_true"]
    return {"metrics": evaluate_run(config, storage, train, truth(), num_true, worker)}


def rank_threads(config: Config, device: torch.device, neighbors: int) -> int:
    """Return the number of threads of torch in a rank.

    It is ``compute.threads`` if that is set. Otherwise it is 1 if a GPU computes and
    images are streamed, because the processes that decode need the cores. Otherwise it
    is the rank's equal share of the cores of its node.

    Args:
        config: The configuration of the run.
        device: The device of the rank.
        neighbors: The number of ranks on this node, with this one.
    """
    threads = num_threads(config, neighbors)
    decodes = config.data.loading == "streaming" and device.type == "cuda"
    return 1 if decodes and not config.compute.threads else threads


def run_on_ray(run: Run, show: Show) -> dict[str, float]:
    """Train and evaluate a run on Ray: Ray Data decodes, and Ray Train trains.

    If the run is evaluated and its images are not streamed, ``run.task`` keeps the
    decoded images, or the features of a frozen encoder, for the report and the
    predictions.

    If images are streamed, or features take their place, this process disconnects from
    Ray before it returns. Otherwise the decoded images are in Ray's object store, and
    this process stays connected until ``run.cleanup`` is closed.

    Args:
        run: The run, inside ``run.locked()``, so that no other command writes into its
            directory. ``run.phases`` are trained from their newest checkpoints.
        show: Takes each line of training metrics, values by name, which rank 0 sends.

    Returns:
        The metrics of the evaluation by name; empty if ``run.evaluate`` is False.

    Raises:
        ConfigError: The cluster has no place for the workers, or too many images cannot
            be read.
        Interrupted: The user has asked to stop, or workers keep dying.
        UnoError: A worker raised it for the user to act on.
        Exception: Another error of the workers' code occurred three times in a row
            without a new checkpoint.
    """
    config, task, storage = run.config, run.task, run.storage
    stopping = threading.Event()

    def stop() -> None:
        """Ask all ranks to save a checkpoint and end, by a STOP file."""
        stopping.set()
        storage.write(STOP_FILE, b"")

    streams, side = config.data.loading == "streaming", config.data.stored_size
    store = store_bytes(config, len(task.rows))
    with on_stop(stop, STOPPING if run.phases else None), ExitStack() as own:
        connected = ray_env.connect(
            store, config.compute.num_workers, keep_idle=streams
        )
        until = own if streams or trains_on_features(config) else run.cleanup
        ray = until.enter_context(connected)
        resources = nodes.wait_for_resources(config, stopping.is_set)
        nodes.check_shares(config, resources)
        if streams:
            workarounds.start_shared_actors()
            resources = nodes.with_decoding(config, resources)
        images, reasons, found = None, None, None
        if trains_on_features(config):
            compute = partial(compute_on_ray, ray, give_up=stopping.is_set)
            how = show, stopping.is_set, compute
            found, reasons = load_features(config, task, storage, *how)
            leave_out_unreadable(reasons, config, task, storage)
        elif not streams:
            images, reasons = ray_data.decode_task(
                ray, task, side, Decoding.of(config.data)
            )
            leave_out_unreadable(reasons, config, task, storage)
        if stopping.is_set():
            raise Interrupted("stopped before training began")
        if run.phases:
            ok = None if reasons is None else ok_mask(reasons)
            config = config_for_readable_rows(config, task, ok, run.batch_is_derived)
        facts = ray_data.shared(ray, config, task, reasons, found, images)
        values = run_workers(run, config, resources, facts, show, stopping.is_set)
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
    resources: nodes.Resources,
    facts: dict[str, Any],
    show: Show,
    give_up: Callable[[], bool],
) -> dict[str, float]:
    """Train and evaluate a run on a group of Ray workers.

    If workers die or a node is drained, Ray Train starts a new group as soon as the
    cluster can place it, and the group resumes from the newest checkpoint. The user is
    told by a line. A STOP file of an earlier command is deleted first, and Ray Train's
    own folder in the run directory when the workers have ended without an error.

    Args:
        run: The run, inside ``run.locked()``, because ``run.lock`` is used: each group
            gets a new token of it.
        config: The configuration of the run, with a batch size that fits the rows that
            can be read.
        resources: The amount of each resource of a worker, by its name (``CPU``,
            ``GPU``).
        facts: The references to the data in the object store, from
            :func:`pipelines.ray_data.shared`.
        show: Takes each line of training metrics, values by name.
        give_up: Returns whether the user has asked to stop. It is asked while workers
            wait for nodes and when they have ended; at other times the workers see the
            STOP file.

    Returns:
        The metrics of the evaluation by name; empty if ``run.evaluate`` is False.

    Raises:
        Interrupted: The workers have saved a checkpoint and ended, because the user has
            asked to stop; or ``give_up`` returned True while they waited for nodes; or
            workers keep dying.
        UnoError: A worker raised it for the user to act on.
        Exception: Another error of the workers' code occurred three times in a row
            without a new checkpoint.
    """
    import ray

    assert run.lock is not None
    lock, storage = run.lock, run.storage
    storage.delete(STOP_FILE)  # it asked an earlier group to stop
    messages = Messages(ray)
    device = "cuda" if "GPU" in resources else "cpu"
    loop = facts | {
        "config": to_dict(override(config, {"compute.device": device})),
        "output": storage.uri,
        "phases": list(run.phases),
        "evaluate": run.evaluate,
        "worker_cpus": resources["CPU"],
        "messages": messages,
    }
    waits = nodes.WaitLines(config, resources)

    def poll() -> None:
        """Handle all messages that have come from the workers and from Ray Train.

        Raises:
            Interrupted: The user has asked to stop while the workers wait for nodes.
        """
        for kind, content in messages.received():
            if kind == "metrics":
                show(content)
            elif kind == "begun":
                messages.send_token(content, lock.replace_token())
                waits.end()
            elif kind == "lost":
                log.warning(
                    "workers died (%s); new ones resume from the newest checkpoint",
                    content,
                )
                waits.begin()
            elif kind == "drained":
                print_line(
                    "a node is being drained: saving a checkpoint, then continuing on"
                    " another node"
                )
                waits.begin()
        if waits.tell() and give_up():
            raise Interrupted(
                "stopped while waiting for nodes; resume with the same command"
            )

    outcome = ray_env.in_thread(
        partial(fit, config, resources, loop), poll, workarounds.end_controllers
    )
    storage.delete(RAY_FOLDER)
    if "interrupted" in outcome:
        raise Interrupted(outcome["interrupted"])
    if give_up():  # after the last step, or during the evaluation
        again = "stopped before the run was finished; resume with the same command"
        raise Interrupted(again if run.phases else "stopped; nothing was changed")
    return outcome["metrics"]


def fit(
    config: Config, resources: nodes.Resources, loop: dict[str, Any]
) -> dict[str, Any]:
    """Run groups of workers with Ray's ``TorchTrainer``, and return the outcome.

    A group that failed is replaced, unless
    :class:`~pipelines.failures.EndWhenHopeless` ends the run. Ray Train writes its own
    files into a folder of the run directory. This returns when the run has ended.

    Args:
        config: The configuration, with the number of workers and their placement
            strategy.
        resources: The amount of each resource of a worker, by its name (``CPU``,
            ``GPU``). Workers use GPUs if ``GPU`` is among the names.
        loop: The argument of :func:`train_loop`, which each worker runs.

    Returns:
        The dict that :func:`train_loop` returns on rank 0: ``metrics`` or
        ``interrupted``.

    Raises:
        Exception: The error with which ``EndWhenHopeless`` ended the run.
        Interrupted: Ray Train's controller was lost.
    """
    import ray.train
    import ray.train.torch
    from ray.util.annotations import RayDeprecationWarning

    from pipelines.failures import EndWhenHopeless, saved_steps

    output, messages = loop["output"], loop["messages"].to_driver
    with warnings.catch_warnings():  # of Ray's own code
        warnings.simplefilter("ignore", RayDeprecationWarning)
        trainer = ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config=loop,
            scaling_config=ray.train.ScalingConfig(
                num_workers=config.compute.num_workers,
                use_gpu="GPU" in resources,
                resources_per_worker=resources,
                placement_strategy=config.compute.placement_strategy,
            ),
            run_config=ray.train.RunConfig(
                name=f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
                storage_path=join(output, RAY_FOLDER),
                callbacks=[EndWhenHopeless(partial(saved_steps, output), messages)],
                failure_config=ray.train.FailureConfig(max_failures=-1),
                logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
            ),
            torch_config=ray.train.torch.TorchConfig(timeout_s=COLLECTIVE_S),
        )
    try:
        with workarounds.cluster_of_helpers():
            return dict(trainer.fit().return_value)
    except ray.train.ControllerError as error:
        raise error.controller_failure from None
    except ray.exceptions.RayActorError as error:
        raise Interrupted(
            f"the controller of Ray Train was lost ({one_line(error)}); resume with the"
            " same command"
        ) from None
