"""Nodes that come and go: a place for a group of workers, waited for; nodes that are told to leave; what the
end of a group means. Ray's head knows all of it and is asked in one request.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pipelines.ray_env import ADDRESS, POLL_S, TASK_CPUS, connect, worker_resources
from uno.config import Config, to_dict
from uno.data.files import is_transient
from uno.errors import ConfigError, Interrupted, UnoError, one_line
from uno.session.console import say

TELL_S = 30.0  # between two lines on what is waited for
GROWTH_S = 600.0  # nodes of a cloud take minutes to start
ASK_S = 60.0  # for what is free on the nodes of workers
LOOK_S = 2.0  # between two looks for nodes that leave

Resources = dict[str, float]

LOST = {
    "RayActorError", "NodeDiedError", "WorkerCrashedError", "OutOfMemoryError", "ObjectLostError",
    "ActorUnschedulableError", "ActorPlacementGroupRemoved", "WorkerHealthCheckFailedError",
    "WorkerHealthCheckTimeoutError", "WorkerGroupStartupFailedError", "WorkerGroupError",
}  # fmt: skip
"""Classes of Ray 2.60: a worker or its node is gone. (A test compares these names with Ray's.)"""
NO_PLACE = "WorkerGroupStartupTimeoutError"
LEFT = "PreemptionError"
NEVER = "InsufficientClusterResourcesError"

log = logging.getLogger(__name__)


class Node(NamedTuple):
    """A node as Ray's head knows it."""

    id: str
    total: Resources
    free: Resources
    leaving: bool  # it takes no more work


def look() -> list[Node]:
    """All nodes that are alive; none where the head is too busy to answer."""
    from ray._private.worker import global_worker
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    from ray.core.generated.autoscaler_pb2 import NodeStatus
    from ray.exceptions import RayError

    try:
        states = get_cluster_resource_state(global_worker.gcs_client).node_states
    except RayError:
        return []
    return [
        Node(node.node_id.hex(), dict(node.total_resources), dict(node.available_resources),
             node.status == NodeStatus.DRAINING)
        for node in states
        if node.status != NodeStatus.DEAD
    ]  # fmt: skip


def total(nodes: Sequence[Node]) -> Resources:
    """What the nodes that stay have together."""
    return dict(sum((Counter(node.total) for node in nodes if not node.leaving), Counter[str]()))


class Place:
    """A placement group that takes, for a moment, what a group of workers and a task of Ray Data will take.
    While it waits, Ray's autoscaler starts nodes for it.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy, self._bundles, self._group = strategy, list[Resources](), None

    def fits(self, bundles: list[Resources]) -> bool:
        """Whether there is room for all of them; asked for a second at most."""
        from ray.util import placement_group

        if bundles != self._bundles:
            self.release()
            self._bundles, self._group = bundles, placement_group(bundles, strategy=self._strategy)
        return bool(self._group.wait(1))  # type: ignore[attr-defined]

    def release(self) -> None:
        """Give it back."""
        from ray.util import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        self._bundles, self._group = [], None


def await_place(config: Config, give_up: Callable[[], bool], limit_s: float = float("inf")) -> Resources:
    """Resources of each worker, once all workers and a task of Ray Data fit into the cluster as it is now. A
    line every 30 s says what is wanted and what is there. ConfigError: nothing came within ``limit_s``.
    """
    start, place, workers = time.monotonic(), Place(config.compute.placement), config.compute.workers
    due: float | None = None
    try:
        while True:
            nodes = look()
            if give_up():
                raise Interrupted("stopped while waiting for nodes; resume with the same command")
            if not nodes:  # no answer, which says nothing of the cluster
                time.sleep(POLL_S)
                continue
            try:
                resources, problem = worker_resources(config, total(nodes)), None
            except ConfigError as error:
                resources, problem = _usual(config), error
            if place.fits([resources] * workers + [{"CPU": TASK_CPUS}]) and problem is None:
                return resources
            line = shortage(resources, workers, nodes)
            limit = limit_s if problem else max(limit_s, GROWTH_S)  # what others have, they give back
            if (spent := time.monotonic() - start) >= limit:
                raise problem or ConfigError(line)
            if due is None:
                due = 0.0 if problem else TELL_S
            if spent >= due:
                most = f" up to {limit / 60:g} minutes" if limit < float("inf") else ""
                say(f"waiting{most} for nodes: {line}")
                due = TELL_S * (spent // TELL_S + 1)
    finally:
        place.release()


def free_memory(config: Config) -> tuple[int, int | None]:
    """Bytes that are free for a run's workers on the host and on a GPU, None without: the least that a task
    in the place of each finds on its node. Of a cluster that has no place for them yet nothing is known:
    then, and without ``RAY_ADDRESS``, what is free here.
    """
    workers = config.compute.workers
    if workers and ADDRESS in os.environ:
        with connect() as ray, suppress(ConfigError):
            each = worker_resources(config, ray.cluster_resources())
            options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0)}
            ask = ray.remote(scheduling_strategy="SPREAD", **options)(_free)
            pending = [ask.remote(to_dict(config)) for _ in range(workers)]
            done, waiting = ray.wait(pending, num_returns=workers, timeout=ASK_S)
            for task in waiting:
                ray.cancel(task)
            if done:
                hosts, devices = zip(*ray.get(done), strict=True)
                return min(hosts), min((free for free in devices if free is not None), default=None)
    return _free(to_dict(config))


def _free(tree: Mapping[str, Any]) -> tuple[int, int | None]:
    """On the node of a worker."""
    from uno.session import resources  # imported here: tasks that decode import this module, too

    return resources.free_memory(Config.model_validate(tree))


def growth_s() -> float:
    """How long nodes are waited for at the start: a cluster that this command started does not grow."""
    return GROWTH_S if ADDRESS in os.environ else 0.0


def _usual(config: Config) -> Resources:
    """What is asked for a worker where the cluster is too small to tell its share."""
    usual = {"CPU": config.compute.cpus_per_worker or 1.0}
    return usual | ({"GPU": config.compute.gpus_per_worker} if config.compute.device == "cuda" else {})


def shortage(each: Resources, workers: int, nodes: Sequence[Node]) -> str:
    """What is wanted and what is there, for the user."""
    staying = [node for node in nodes if not node.leaving]
    free = sum((Counter(node.free) for node in staying), Counter[str]())
    has, leaving = total(nodes), len(nodes) - len(staying)
    there = ", ".join(f"{has.get(name, 0):g} {name} ({free[name]:g} free)" for name in each)
    gone = f", {leaving} more told to leave" if leaving else ""
    one = ", ".join(f"{value:g} {name}" for name, value in each.items())
    wanted = f"{workers} worker{'s' * (workers > 1)} of {one} and one CPU for Ray Data"
    return f"wanted are {wanted}; there are {there} on {len(staying)} node{'s' * (len(staying) != 1)}{gone}"


class Notices:
    """Whether a node that a worker of ours is on was told to leave (``ray drain-node``)."""

    def __init__(self, hosts: Callable[[], set[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._hosts, self._clock, self._looked, self.given = hosts, clock, clock(), False

    def new(self) -> bool:
        """True once: a node leaves since the last look; looks every few seconds."""
        if self.given or self._clock() - self._looked < LOOK_S:
            return False
        self._looked = self._clock()
        leaving = {node.id for node in look() if node.leaving}
        self.given = bool(leaving) and bool(leaving & self._hosts())
        return self.given


def hosts(ray: Any) -> set[str]:
    """Ids of the nodes that this job's workers run on."""
    from ray._private.state import actors

    job = ray.get_runtime_context().get_job_id()
    alive = actors(job_id=ray.JobID(bytes.fromhex(job)), actor_state_name="ALIVE").values()
    return {actor["Address"]["NodeID"] for actor in alive if actor["ActorClassName"] == "RayTrainWorker"}


class Loss(NamedTuple):
    """How a group of workers ended that another one follows."""

    line: str
    last: Exception | None
    """What to raise if this goes on without a new checkpoint; None: it may happen any number of times."""


def loss_of(error: Exception) -> Loss:
    """What the end of a group by ``error`` means. Raises what no other group would do better."""
    failure = cause_of(error)
    names = {kind.__name__ for kind in type(failure).__mro__}
    if isinstance(failure, UnoError) and is_transient(str(failure)):
        return Loss(f"workers stopped ({failure})", failure)
    if isinstance(failure, UnoError) or not isinstance(failure, Exception):
        raise failure from None
    if NEVER in names:
        raise ConfigError(f"the cluster can never hold the workers: {one_line(failure)}") from None
    if NO_PLACE in names:
        return Loss("workers found no place: others took it", None)
    if LEFT in names or any(map(_was_announced, _failures(error).values())):
        return Loss("workers died (their node left, as it was told to)", None)
    own = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]  # of the many lines that Ray says
    if names & LOST:
        text = f"workers died again and again before a new checkpoint ({own}): is their memory enough?"
        return Loss("workers died (a worker process or its node was lost)", Interrupted(text))
    return Loss(f"workers died ({own})", failure)


def cause_of(error: BaseException) -> BaseException:
    """The exception that explains a failed fit: the user's error first, a lost peer last."""
    failures = list(_failures(error).values())
    own = [f for f in failures if isinstance(f, UnoError)]
    others = [f for f in failures if not (isinstance(f, RuntimeError) and "connection" in str(f).lower())]
    return next(iter(own + others), getattr(error, "controller_failure", None) or error)


def _failures(error: BaseException) -> Mapping[int, BaseException]:
    return dict(getattr(error, "worker_failures", {}))


def _was_announced(failure: BaseException) -> bool:
    """Whether a worker died because its node was drained."""
    return bool(getattr(getattr(failure, "health_check_failure", failure), "preempted", False))


class Waits:
    """A line every 30 s while somebody is inside a ``with`` of it: images are waited for."""

    def __init__(self, tell: Callable[[float], str] | None = None, every_s: float = TELL_S) -> None:
        self._tell, self._every_s, self._since = tell or no_images, every_s, float("inf")
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="uno-waits", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = float("inf")

    def close(self) -> None:
        """No more lines."""
        self._over.set()

    def _watch(self) -> None:
        told = 0
        while not self._over.wait(self._every_s / 30):
            waited = time.monotonic() - self._since
            if waited < self._every_s:
                told = 0
            elif waited >= (told + 1) * self._every_s:
                told = int(waited / self._every_s)
                log.warning(self._tell(waited))


def no_images(waited: float) -> str:
    """What Ray Data lacks, for the user."""
    most = max((node.free.get("CPU", 0.0) for node in look() if not node.leaving), default=0.0)
    has = f"no node has more than {most:g} free" if most < TASK_CPUS else f"a node has {most:g} free"
    return f"no images for {waited:.0f} s: a task of Ray Data takes {TASK_CPUS:g} CPU, {has}"
