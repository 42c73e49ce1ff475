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
from uno.session.console import interrupt_on_signal, print_line
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
        """Start a wait for workers, now: the first line about it is due in 30 s.

        This is called again when workers were lost and new ones are waited for.
        """
        self._due: float | None = time.monotonic() + TELL_S

    def end(self) -> None:
        """End the wait, because the workers have begun.

        No line is printed until :meth:`begin` is called again.
        """
        self._due = None

    def tell(self) -> bool:
        """Print what the workers need and what the cluster has, if 30 s have passed.

        The 30 s count from the begin of the wait, or from when the line before was due.
        Nothing is printed between :meth:`end` and the next :meth:`begin`. This returns
        at once.

        Returns:
            Whether the wait goes on, also if nothing was printed: False between
            :meth:`end` and the next :meth:`begin`.
        """
        if self._due is None:
            return False
        if time.monotonic() >= self._due:
            self._due += TELL_S
            print_line(f"waiting for {wanted_and_there(self._workers, self._each)}")
        return True


def wanted_and_there(workers: int, each: Resources) -> str:
    """Return a phrase on the resources that workers need and that the cluster has.

    For example ``2 workers with 1 CPU, 1 GPU each; the cluster has 8 CPU (6 free), 1
    GPU (1 free) on 1 node``.

    Args:
        workers: The number of workers.
        each: The amount of each resource that a worker needs, by its name (``CPU``,
            ``GPU``).
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


def wait_for_resources(config: Config, give_up: Callable[[], bool]) -> Resources:
    """Wait until the cluster is large enough for all workers of a configuration.

    The wait takes at most :func:`startup_timeout_s`. All CPUs and GPUs of the cluster
    count, also those that other work uses now. During the wait a placement group for
    the workers lets Ray's autoscaler start nodes; it is removed at the end. A line is
    printed at the start of a wait and every 30 s.

    Args:
        config: The configuration of the run, with the number of workers, at least 1.
        give_up: Returns whether the user has asked to stop. It is asked at least once.

    Returns:
        The amount of each resource for a worker, by its name (``CPU``, ``GPU``), see
        :func:`pipelines.ray_env.worker_resources`.

    Raises:
        ConfigError: The cluster is still too small after the wait.
        Interrupted: ``give_up`` returned True.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    compute, group, limit_s = config.compute, None, startup_timeout_s(config)
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

    The wait ends as soon as the cluster is large enough for the workers of the
    configuration, or for one worker if ``compute.num_workers`` is 0. It takes at most
    :func:`startup_timeout_s`.

    Args:
        config: The configuration of the run.
        ask: The function, for example one that computes how many trials run at a time.
            It raises ConfigError if the cluster cannot hold a single task or trial.
        give_up: Returns whether the user has asked to stop. It is asked during the
            wait.

    Returns:
        The result of ``ask``, of its first call if that did not fail.

    Raises:
        ConfigError: ``ask`` raised it and there is no wait, or raised it again after
            the wait; or the cluster was still too small when the wait ended.
        Interrupted: ``give_up`` returned True.
    """
    try:
        return ask()
    except ConfigError:
        if startup_timeout_s(config) == 0:
            raise
    one = override(config, {"compute.num_workers": max(1, config.compute.num_workers)})
    wait_for_resources(one, give_up)
    return ask()


def free_memory(config: Config) -> "FreeMemory":
    """Return the free memory in bytes of the machines that a run's workers would use.

    On a running cluster (see :func:`pipelines.ray_env.cluster_address`) this waits for
    nodes for the workers. Then one task for each worker, with the resources of a
    worker, measures the node on which Ray places it. Tasks that have not answered after
    60 s are cancelled.

    Args:
        config: The configuration of the run.

    Returns:
        On a cluster: ``host``, the least free main memory that a task found;
        ``device``, the least free GPU memory that a task found for a worker, None
        without GPUs; ``store``, the size of the smallest object store of all nodes; and
        ``driver``, the free main memory of this machine. If no task answered in time,
        ``host`` and ``device`` are those of this machine, ``driver`` is None, and
        ``store`` is as above.
        Without workers or a running cluster, ``host`` and ``device`` are those of this
        machine, and ``store`` and ``driver`` are None.

    Raises:
        ConfigError: The cluster is too small for the workers and does not grow in time.
    """
    workers, here = config.compute.num_workers, _free_on_node(to_dict(config))
    if not workers or not cluster_address():
        return here
    stopped = "stopped while waiting for nodes; resume with the same command"
    with interrupt_on_signal(stopped), connect() as ray:
        each = wait_for_resources(config, lambda: False)
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
        try:
            found = ray.get(done)
        except ray.exceptions.RayError as error:
            why = " ".join(str(error).split())[-200:]
            raise ConfigError(
                f"a node cannot run this program ({why}); uno doctor --cluster lists"
                " the nodes"
            ) from None
        devices = [each.device for each in found if each.device is not None]
        return room._replace(
            host=min(each.host for each in found),
            device=min(devices, default=None),
            driver=here.host,
        )


def _free_on_node(tree: Mapping[str, Any]) -> "FreeMemory":
    """Return the free memory in bytes of the machine on which this is called.

    It is called in this process, and on other nodes in a task of Ray.

    Args:
        tree: The configuration of the run as a nested dict.

    Returns:
        ``host``, the free main memory; and ``device``, a worker's share of the free GPU
        memory, None if the run would not use a GPU here. The other values are None.
    """
    from uno.session import resources

    return resources.free_memory(Config.model_validate(tree))


def startup_timeout_s(config: Config) -> float:
    """Return how many seconds a command waits for nodes of a cluster when it starts.

    These are ``compute.wait_minutes`` of the configuration, converted to seconds. It is
    0 if the command starts a private cluster on this machine, which cannot grow.

    Args:
        config: The configuration of the run.
    """
    return 60 * config.compute.wait_minutes if cluster_address() else 0.0


def _default_resources(config: Config) -> Resources:
    """Return the resources that a worker asks for before the cluster's size is known.

    Returns:
        ``CPU``: ``compute.cpus_per_worker``, or 1 if that is None. Only if
        ``compute.device`` is ``cuda``, also ``GPU``: ``compute.gpus_per_worker``.
    """
    usual = {"CPU": config.compute.cpus_per_worker or 1.0}
    return usual | (
        {"GPU": config.compute.gpus_per_worker}
        if config.compute.device == "cuda"
        else {}
    )


def check_shares(config: Config, each: Resources | None = None) -> None:
    """Check that several workers that train together do not share GPUs.

    NCCL refuses ranks that share a GPU ("Duplicate GPU"). A single worker, and workers
    without GPUs, are always accepted.

    Args:
        config: The configuration of the run, with the number of workers.
        each: The amount of each resource for a worker, by its name (``CPU``, ``GPU``);
            None for the amounts that the configuration asks for, before the cluster is
            known (GPUs only if ``compute.device`` is ``cuda``).

    Raises:
        ConfigError: There are several workers, each with less than one GPU.
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
    """Return the resources of GPU workers with more CPUs, which decode their images.

    This is meant for runs that stream their images, which is not checked here. A worker
    gets an equal share of the CPUs of its node, a whole number: as many workers share a
    node as its GPUs allow. Of all nodes that have a GPU for a worker the smallest share
    counts. Nothing changes for workers without a GPU, which compute with all cores
    anyway, and if ``compute.cpus_per_worker`` is set.

    Args:
        config: The configuration of the run.
        each: The amount of each resource for a worker, by its name (``CPU``, ``GPU``).

    Returns:
        The amounts by name with the new number of CPUs, which is never smaller than
        before.
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
