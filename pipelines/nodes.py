"""Wait until a Ray cluster can hold the workers, and measure the memory of its nodes.

Nodes of a cluster can come and go. Ray Train and Ray Data wait for a place themselves.
This module waits at the start of a command until the cluster is large enough, and tells
the user what a wait is for.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.ray_env import (
    POLL_S,
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

T = TypeVar("T")


class WaitLines:
    """Prints a line every 30 s while workers wait for nodes of a cluster.

    The wait begins when this object is made.

    Args:
        config: The configuration, with the number of workers.
        each: The resources of each worker (``CPU``, ``GPU``).
    """

    def __init__(self, config: Config, each: Resources) -> None:
        self._workers, self._each = config.compute.num_workers, each
        self.begin()

    def begin(self) -> None:
        """Begin to wait: the next line about missing workers is due in 30 s."""
        self._due: float | None = time.monotonic() + TELL_S

    def end(self) -> None:
        """End the wait, because the workers have begun; no further line is printed."""
        self._due = None

    def tell(self) -> bool:
        """Print a line about the missing workers if one is due.

        Returns:
            Whether the wait still goes on.
        """
        if self._due is None:
            return False
        if time.monotonic() >= self._due:
            self._due += TELL_S
            print_line(f"waiting for {wanted_and_there(self._workers, self._each)}")
        return True


def wanted_and_there(workers: int, each: Resources) -> str:
    """Return a phrase on the resources that workers need and that the cluster has.

    Args:
        workers: The number of workers.
        each: The resources of each worker (``CPU``, ``GPU``).
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
    """Wait until the cluster is large enough for all workers of a configuration.

    Meanwhile a placement group lets Ray's autoscaler start nodes for them.

    Args:
        config: The configuration of the run.
        give_up: Returns whether the user has asked to stop.
        limit_s: The longest wait in seconds.

    Returns:
        The resources of each worker (``CPU``, ``GPU``).

    Raises:
        ConfigError: The cluster is still too small after ``limit_s`` seconds.
        Interrupted: ``give_up`` returned True.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    compute, group = config.compute, None
    start, usual = time.monotonic(), _default_resources(config)
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
    """Call a function, and again after a wait if the cluster is too small at first.

    Args:
        config: The configuration of the run.
        ask: The function, for example one that computes how many trials run at a time.
            It raises ConfigError if the cluster cannot hold a single task or trial.
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
    """Return the memory in bytes that is free for a run's workers.

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
        ConfigError: The cluster is too small for the workers and does not grow in time.
    """
    workers, here = config.compute.num_workers, _free_on_node(to_dict(config))
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
        ask = ray.remote(scheduling_strategy="SPREAD", **options)(_free_on_node)
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


def _free_on_node(tree: Mapping[str, Any]) -> "FreeMemory":
    """Return the free memory of this node, in a task of Ray.

    Args:
        tree: The configuration of the run as a plain dict.
    """
    from uno.session import resources

    return resources.free_memory(Config.model_validate(tree))


def startup_timeout_s(config: Config) -> float:
    """Return how many seconds a command waits for nodes of a cluster when it starts.

    It is 0 if the command starts a private cluster on this machine, which cannot grow.
    """
    return 60 * config.compute.wait_minutes if cluster_address() else 0.0


def _default_resources(config: Config) -> Resources:
    """Return the resources that a worker asks for before the cluster's size is known.

    Returns:
        The number of ``CPU``, and of ``GPU`` if the configuration sets the device
        ``cuda``.
    """
    usual = {"CPU": config.compute.cpus_per_worker or 1.0}
    return usual | (
        {"GPU": config.compute.gpus_per_worker}
        if config.compute.device == "cuda"
        else {}
    )


def check_shares(config: Config, each: Resources | None = None) -> None:
    """Check that workers that train together have at least one whole GPU each.

    NCCL refuses ranks that share a GPU ("Duplicate GPU").

    Args:
        config: The configuration of the run.
        each: The resources of a worker; None for those that the configuration asks for,
            before the cluster is known.

    Raises:
        ConfigError: There are several workers, and they would share a GPU.
    """
    workers, share = (
        config.compute.num_workers,
        (each or _default_resources(config)).get("GPU", 1),
    )
    if workers > 1 and share < 1:
        raise ConfigError(
            f"{plural(workers, 'worker')} of {share:g} GPUs would share GPUs; NCCL"
            " accepts one per GPU: use --gpus-per-worker 1, or --workers 1"
        )


def with_decoding(config: Config, each: Resources) -> Resources:
    """Add CPUs for decoding to the resources of GPU workers that stream their images.

    A worker gets an equal share of the CPUs of its node; the smallest share of all
    nodes counts. ``compute.cpus_per_worker`` has priority. Workers without a GPU
    already compute with all cores, and get nothing more.

    Args:
        config: The configuration of the run.
        each: The resources of each worker (``CPU``, ``GPU``).

    Returns:
        The resources of each worker.
    """
    import ray

    if "GPU" not in each or config.compute.cpus_per_worker:
        return each
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shares = [
        has.get("CPU", 0.0) // (has["GPU"] // each["GPU"])
        for has in nodes
        if has.get("GPU", 0.0) >= each["GPU"]
    ]
    return {**each, "CPU": max(each["CPU"], min(shares, default=0.0))}
