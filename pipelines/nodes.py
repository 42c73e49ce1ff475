"""Wait for the nodes of a Ray cluster, and interpret what happens to them.

Nodes of a cluster can come and go. This module waits until a group of workers fits into
the cluster, notices nodes that are being drained, and decides what the end of a group
of workers means. The state of the nodes is read from Ray's head by one request.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipelines.ray_env import (
    POLL_S,
    TASK_CPUS,
    cluster_address,
    connect,
    worker_resources,
)
from pipelines.ray_private import Node, Resources, launches, read_nodes
from uno.config import Config, override, to_dict
from uno.data.files import is_transient
from uno.errors import ConfigError, Interrupted, UnoError, one_line
from uno.session.console import print_line
from uno.text import plural

if TYPE_CHECKING:  # tasks that decode import this module without that one
    from uno.session.resources import FreeMemory

TELL_S = 30.0  # seconds between two lines about a wait
ASK_S = 60.0  # seconds to wait for the free memory of the workers' nodes
LOOK_S = 2.0  # seconds between two checks for nodes that are drained

LOST = {
    "RayActorError",
    "NodeDiedError",
    "WorkerCrashedError",
    "OutOfMemoryError",
    "ObjectLostError",
    "ActorUnschedulableError",
    "ActorPlacementGroupRemoved",
    "WorkerHealthCheckFailedError",
    "WorkerHealthCheckTimeoutError",
    "WorkerGroupStartupFailedError",
    "WorkerGroupError",
}
"""Names of errors of Ray 2.60 which mean that a worker or its node is lost.

A test compares these names with those in Ray.
"""
NO_PLACE = "WorkerGroupStartupTimeoutError"
LEFT = "PreemptionError"
NEVER = "InsufficientClusterResourcesError"

log = logging.getLogger(__name__)
T = TypeVar("T")


def total(nodes: Sequence[Node]) -> Resources:
    """Return the sum of the resources of all nodes that are not being drained."""
    return dict(
        sum((Counter(node.total) for node in nodes if not node.leaving), Counter[str]())
    )


class PlacementProbe:
    """A test whether the cluster can place workers and a task of Ray Data now.

    It makes placement groups with their resources for a moment. While these wait, Ray's
    autoscaler starts nodes for them.

    Args:
        strategy: The placement strategy of Ray for the workers, such as ``PACK``.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy, self._bundles, self._groups = (
            strategy,
            list[Resources](),
            list[Any](),
        )

    def fits(self, workers: list[Resources], task: Resources) -> bool:
        """Return whether the cluster can place all workers and the task.

        It waits for at most about two seconds. The placement groups are kept until
        :meth:`release`, or until other resources are asked for.

        Args:
            workers: The resources of each worker.
            task: The resources of a task of Ray Data. With a strict placement strategy
                it may be on any node; with another one it is placed together with the
                workers.
        """
        from ray.util import placement_group

        if [*workers, task] != self._bundles:
            self.release()
            self._bundles = [*workers, task]
            strict = self._strategy.startswith("STRICT")
            parts = [workers, [task]] if strict else [self._bundles]
            self._groups = [
                placement_group(bundles, strategy=self._strategy) for bundles in parts
            ]
        return all(group.wait(1) for group in self._groups)

    def release(self) -> None:
        """Remove the placement groups."""
        from ray.util import remove_placement_group

        for group in self._groups:
            remove_placement_group(group)
        self._bundles, self._groups = [], []


def wait_for_resources(
    config: Config, give_up: Callable[[], bool], limit_s: float = float("inf")
) -> Resources:
    """Wait until all workers and a task of Ray Data fit into the cluster.

    A line every 30 s says what is needed and what is there.

    Args:
        config: The configuration of the run.
        give_up: Returns whether the user has asked to stop.
        limit_s: The longest wait in seconds. If the cluster is large enough and only
            the work of others is in the way, the wait is at least
            ``compute.wait_minutes``.

    Returns:
        The resources of each worker.

    Raises:
        ConfigError: There was no place in time.
        Interrupted: ``give_up`` returned True.
    """
    start, place, workers = (
        time.monotonic(),
        PlacementProbe(config.compute.placement_strategy),
        config.compute.num_workers,
    )
    due: float | None = None
    try:
        while True:
            nodes = read_nodes()
            if give_up():
                raise Interrupted(
                    "stopped while waiting for nodes; resume with the same command"
                )
            if not nodes:  # the head did not answer
                time.sleep(POLL_S)
                continue
            try:
                resources, problem = worker_resources(config, total(nodes)), None
            except ConfigError as error:
                resources, problem = _usual(config), error
            if (
                place.fits([resources] * workers, {"CPU": TASK_CPUS})
                and problem is None
            ):
                return resources
            line = shortage(resources, workers, nodes)
            # Resources that others use become free again.
            limit = (
                limit_s if problem else max(limit_s, 60 * config.compute.wait_minutes)
            )
            if (spent := time.monotonic() - start) >= limit:
                raise ConfigError("; ".join([str(problem or line), *launches()]))
            if due is None:
                due = 0.0 if problem else TELL_S
            if spent >= due:
                most = f" up to {limit / 60:g} minutes" if limit < float("inf") else ""
                print_line("; ".join([f"waiting{most} for nodes: {line}", *launches()]))
                due = TELL_S * (spent // TELL_S + 1)
    finally:
        place.release()


def once_one_fits(
    config: Config, ask: Callable[[], T], give_up: Callable[[], bool] = lambda: False
) -> T:
    """Call a function again after a wait, if the cluster is still too small for it.

    Args:
        config: The configuration of the run.
        ask: The function. It raises ConfigError if the cluster cannot hold a single
            task or trial.
        give_up: Returns whether the user has asked to stop.

    Returns:
        The result of ``ask``. If the first call failed, it is called again once the
        cluster has a place for the workers of the configuration, or for one worker if
        it has none.

    Raises:
        ConfigError: ``ask`` raised it, and the cluster cannot grow; or there was no
            place in time.
        Interrupted: ``give_up`` returned True.
    """
    try:
        return ask()
    except ConfigError:
        if (limit := startup_timeout_s(config)) == 0:
            raise
    one = override(config, {"compute.num_workers": max(1, config.compute.num_workers)})
    wait_for_resources(one, give_up, limit)
    return ask()


def free_memory(config: Config) -> "FreeMemory":
    """Return the memory that is free for a run's workers.

    A task in the place of each worker measures its node for at most 60 s.

    Args:
        config: The configuration of the run.

    Returns:
        The smallest main memory and GPU memory that the tasks found, the smallest
        object store of all nodes, and the main memory of this machine as ``driver``.
        Without workers or a cluster, or if the cluster has no place for workers yet,
        main memory and GPU memory are those of this machine, and ``driver`` is None.
    """
    workers, here = config.compute.num_workers, _free(to_dict(config))
    if not workers or not cluster_address():
        return here
    with connect() as ray:
        stores = [
            node["Resources"].get("object_store_memory")
            for node in ray.nodes()
            if node["Alive"]
        ]
        room = here._replace(
            store=min((int(store) for store in stores if store), default=None)
        )
        with suppress(ConfigError):
            each = worker_resources(config, ray.cluster_resources())
            options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0)}
            ask = ray.remote(scheduling_strategy="SPREAD", **options)(_free)
            pending = [ask.remote(to_dict(config)) for _ in range(workers)]
            done, waiting = ray.wait(pending, num_returns=workers, timeout=ASK_S)
            for task in waiting:
                ray.cancel(task)
            if done:
                found = ray.get(done)
                devices = [each.device for each in found if each.device is not None]
                host, device = (
                    min(each.host for each in found),
                    min(devices, default=None),
                )
                return room._replace(host=host, device=device, driver=here.host)
    return room


def _free(tree: Mapping[str, Any]) -> "FreeMemory":
    """Return the free memory of this node, for a configuration that is a plain dict."""
    from uno.session import resources

    return resources.free_memory(Config.model_validate(tree))


def startup_timeout_s(config: Config) -> float:
    """Return how many seconds to wait for nodes at the start of a command.

    It is 0 if this command starts its own cluster, because that does not grow.
    """
    return 60 * config.compute.wait_minutes if cluster_address() else 0.0


def _usual(config: Config) -> Resources:
    """Return the resources of a worker for a cluster whose size is not known."""
    usual = {"CPU": config.compute.cpus_per_worker or 1.0}
    return usual | (
        {"GPU": config.compute.gpus_per_worker}
        if config.compute.device == "cuda"
        else {}
    )


def shortage(each: Resources, workers: int, nodes: Sequence[Node]) -> str:
    """Return a phrase on the resources that are needed and those that are there.

    Args:
        each: The resources of each worker.
        workers: The number of workers.
        nodes: The nodes of the cluster.
    """
    staying = [node for node in nodes if not node.leaving]
    free = sum((Counter(node.free) for node in staying), Counter[str]())
    has, leaving = total(nodes), len(nodes) - len(staying)
    there = ", ".join(
        f"{has.get(name, 0):g} {name} ({free[name]:g} free)" for name in each
    )
    gone = f", {plural(leaving, 'more node')} being drained" if leaving else ""
    one = ", ".join(f"{value:g} {name}" for name, value in each.items())
    wanted = f"{plural(workers, 'worker')} with {one} each, and 1 CPU for Ray Data"
    return f"need {wanted}; available: {there} on {plural(len(staying), 'node')}{gone}"


def check_shares(config: Config, each: Resources | None = None) -> None:
    """Check that workers that train together do not share a GPU.

    NCCL refuses that ("Duplicate GPU").

    Args:
        config: The configuration of the run.
        each: The resources of a worker; by default those that are known before the
            cluster is.

    Raises:
        ConfigError: They would share a GPU.
    """
    workers, share = config.compute.num_workers, (each or _usual(config)).get("GPU", 1)
    if workers > 1 and share < 1:
        raise ConfigError(
            f"{plural(workers, 'worker')} of {share:g} GPUs would share GPUs; NCCL"
            " accepts one per GPU: use --gpus-per-worker 1, or --workers 1"
        )


class DrainWatcher:
    """Watches for a node with one of our workers that is being drained.

    A node is drained by ``ray drain-node`` or by an autoscaler, which then removes it.

    Args:
        hosts: Returns the ids of the nodes on which the workers are.
        clock: Seconds that never go back.

    Attributes:
        given: Whether such a node was reported.
    """

    def __init__(
        self, hosts: Callable[[], set[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hosts, self._clock, self._looked, self.given = (
            hosts,
            clock,
            clock(),
            False,
        )

    def new(self) -> bool:
        """Tell whether a node of the workers is being drained, and report it only once.

        The cluster is asked at most once in ``LOOK_S`` seconds. In between, and after
        True was returned, the answer is False.
        """
        if self.given or self._clock() - self._looked < LOOK_S:
            return False
        self._looked = self._clock()
        leaving = {node.id for node in read_nodes() if node.leaving}
        self.given = bool(leaving) and bool(leaving & self._hosts())
        return self.given


class WorkerFailure(NamedTuple):
    """The failure of a group of workers after which a new group is started.

    Attributes:
        line: What happened, for the user.
        last: The error to raise if this happens again and again without a new
            checkpoint; None if it may happen any number of times.
    """

    line: str
    last: Exception | None
    """What to raise if this recurs without a new checkpoint; None: it may happen any
    number of times.
    """


def classify_failure(error: Exception) -> WorkerFailure:
    """Decide what the end of a group of workers means.

    Args:
        error: The error that Ray Train raised.

    Returns:
        The failure, if a new group may do better.

    Raises:
        Exception: The cause of ``error``, if a new group would fail in the same way: an
            error for the user, or a ConfigError if the cluster can never hold the
            workers.
    """
    failure = cause_of(error)
    names = {kind.__name__ for kind in type(failure).__mro__}
    if isinstance(failure, UnoError) and is_transient(str(failure)):
        return WorkerFailure(f"workers stopped ({failure})", failure)
    if isinstance(failure, UnoError) or not isinstance(failure, Exception):
        raise failure from None
    if NEVER in names:
        raise ConfigError(
            f"the cluster can never hold the workers: {one_line(failure)}"
        ) from None
    if NO_PLACE in names:
        return WorkerFailure(
            "the workers could not be scheduled: another job took the resources", None
        )
    looks = (
        getattr(lost, "health_check_failure", lost)
        for lost in _failures(error).values()
    )
    if LEFT in names or any(getattr(look, "preempted", False) for look in looks):
        return WorkerFailure("workers stopped: their node was drained", None)
    # Ray's error has many lines, and the first one is enough.
    own = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
    if names & LOST:
        text = (
            f"workers keep dying before a new checkpoint ({own}); they may be out of"
            " memory"
        )
        return WorkerFailure(
            "workers died (a worker process or its node was lost)", Interrupted(text)
        )
    return WorkerFailure(f"workers died ({own})", failure)


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that explains a failed fit.

    Errors of this program come first, then other errors of workers except lost
    connections to other ranks, then the error of Ray's controller.
    """
    failures = list(_failures(error).values())
    own = [f for f in failures if isinstance(f, UnoError)]
    others = [
        f
        for f in failures
        if not (isinstance(f, RuntimeError) and "connection" in str(f).lower())
    ]
    return next(iter(own + others), getattr(error, "controller_failure", None) or error)


def _failures(error: BaseException) -> Mapping[int, BaseException]:
    """Return the exceptions of the workers by rank; {} if Ray has none."""
    return dict(getattr(error, "worker_failures", {}))


class StallWarner:
    """A context manager that warns every 30 s while its ``with`` block is not left.

    The block waits for images. It may be entered many times, one after the other.

    Args:
        tell: Returns the warning for a wait of some seconds; by default
            :func:`no_images`.
        every_s: Seconds between two warnings.
    """

    def __init__(
        self, tell: Callable[[float], str] | None = None, every_s: float = TELL_S
    ) -> None:
        self._tell, self._every_s, self._since = (
            tell or no_images,
            every_s,
            float("inf"),
        )
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="uno-waits", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = float("inf")

    def close(self) -> None:
        """End the thread that warns."""
        self._over.set()

    def _watch(self) -> None:
        """Log a warning after each interval of a wait, until :meth:`close`."""
        told = 0
        while not self._over.wait(self._every_s / 30):
            waited = time.monotonic() - self._since
            if waited < self._every_s:
                told = 0
            elif waited >= (told + 1) * self._every_s:
                told = int(waited / self._every_s)
                log.warning(self._tell(waited))


def no_images(waited: float) -> str:
    """Return a line on the CPUs that Ray Data may lack.

    Args:
        waited: Seconds of the wait so far.
    """
    most = max(
        (node.free.get("CPU", 0.0) for node in read_nodes() if not node.leaving),
        default=0.0,
    )
    has = (
        f"but no node has more than {most:g} free"
        if most < TASK_CPUS
        else f"a node has {most:g} free"
    )
    return (
        f"no images for {waited:.0f} s: each further process of Ray Data needs"
        f" {TASK_CPUS:g} CPU, {has}"
    )
