"""Wait until a Ray cluster can hold the workers, and measure the memory of its nodes.

Nodes of a cluster can come and go. Ray Train and Ray Data wait for a place themselves.
This module waits at the start of a command until the cluster is large enough, and tells
the user what a wait is for.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.ray_env import (
    POLL_S,
    TASK_CPUS,
    cluster_address,
    connect,
    worker_resources,
)
from uno.config import Config, override, to_dict
from uno.errors import ConfigError, Interrupted
from uno.session.console import print_line
from uno.text import plural

if TYPE_CHECKING:  # tasks that decode import this module without that one
    from uno.session.resources import FreeMemory

TELL_S = 30.0  # seconds between two lines about a wait
ASK_S = 60.0  # seconds to wait for the free memory of the workers' nodes

Resources = dict[str, float]

log = logging.getLogger(__name__)
T = TypeVar("T")


class WaitLines:
    """Prints a line every 30 s while workers have no place, or have not begun.

    A wait has begun when this is made.

    Args:
        config: The configuration, with the number of workers.
        each: The resources of each worker.
    """

    def __init__(self, config: Config, each: Resources) -> None:
        self._workers, self._each = config.compute.num_workers, each
        self.begin()

    def begin(self) -> None:
        """Begin to wait."""
        self._due: float | None = time.monotonic() + TELL_S

    def end(self) -> None:
        """End the wait, because the workers have begun."""
        self._due = None

    def tell(self) -> bool:
        """Print a line if it is due, and return whether the wait goes on."""
        if self._due is None:
            return False
        if time.monotonic() >= self._due:
            self._due += TELL_S
            print_line(f"waiting for {wanted_and_there(self._workers, self._each)}")
        return True


def wanted_and_there(workers: int, each: Resources) -> str:
    """Return a phrase on the resources that workers need and those that are there.

    Args:
        workers: The number of workers.
        each: The resources of each worker.
    """
    import ray

    has, free = ray.cluster_resources(), ray.available_resources()
    one = ", ".join(f"{value:g} {name}" for name, value in each.items())
    there = ", ".join(
        f"{has.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in each
    )
    nodes = sum(node["Alive"] for node in ray.nodes())
    return (
        f"{plural(workers, 'worker')} with {one} each; the cluster has {there} on"
        f" {plural(nodes, 'node')}"
    )


def wait_for_resources(
    config: Config, give_up: Callable[[], bool], limit_s: float = 0.0
) -> Resources:
    """Wait until the cluster is large enough for all workers.

    Meanwhile a placement group lets Ray's autoscaler start nodes for them.

    Args:
        config: The configuration of the run.
        give_up: Returns whether the user has asked to stop.
        limit_s: The longest wait in seconds.

    Returns:
        The resources of each worker.

    Raises:
        ConfigError: The cluster is too small for too long.
        Interrupted: ``give_up`` returned True.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    compute, group = config.compute, None
    start, usual = time.monotonic(), _usual(config)
    lines = WaitLines(config, usual)
    try:
        while True:
            if give_up():
                raise Interrupted(
                    "stopped while waiting for nodes; resume with the same command"
                )
            try:
                return worker_resources(config, ray.cluster_resources())
            except ConfigError:
                if time.monotonic() - start >= limit_s:
                    raise
            if group is None:
                print_line(
                    f"waiting up to {limit_s / 60:g} minutes for nodes:"
                    f" {wanted_and_there(compute.num_workers, usual)}"
                )
                group = placement_group(
                    [usual] * compute.num_workers, strategy=compute.placement_strategy
                )
            lines.tell()
            time.sleep(POLL_S)
    finally:
        if group is not None:
            remove_placement_group(group)


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

    On a cluster, nodes for the workers are waited for. A task in the place of each
    worker then measures its node for at most 60 s.

    Args:
        config: The configuration of the run.

    Returns:
        The smallest main memory and GPU memory that the tasks found, the smallest
        object store of all nodes, and the main memory of this machine as ``driver``.
        Without workers or a cluster, or if no task could begin because other work takes
        all nodes, main memory and GPU memory are those of this machine, and ``driver``
        is None.

    Raises:
        ConfigError: The cluster is too small for the workers and does not grow in
            time.
    """
    workers, here = config.compute.num_workers, _free(to_dict(config))
    if not workers or not cluster_address():
        return here
    with connect() as ray:
        each = wait_for_resources(config, lambda: False, startup_timeout_s(config))
        stores = [
            node["Resources"].get("object_store_memory")
            for node in ray.nodes()
            if node["Alive"]
        ]
        room = here._replace(
            store=min((int(store) for store in stores if store), default=None)
        )
        options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0)}
        ask = ray.remote(scheduling_strategy="SPREAD", **options)(_free)
        pending = [ask.remote(to_dict(config)) for _ in range(workers)]
        done, waiting = ray.wait(pending, num_returns=workers, timeout=ASK_S)
        for task in waiting:
            ray.cancel(task)
        if not done:
            return room
        found = ray.get(done)
        devices = [each.device for each in found if each.device is not None]
        return room._replace(
            host=min(each.host for each in found),
            device=min(devices, default=None),
            driver=here.host,
        )


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
    import ray

    free = ray.available_resources().get("CPU", 0.0)
    return (
        f"no images for {waited:.0f} s: each further process of Ray Data needs"
        f" {TASK_CPUS:g} CPU, the cluster has {free:g} free"
    )
