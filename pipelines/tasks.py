"""Run functions in tasks of Ray, a limited number of tasks at a time."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipelines import nodes, ray_env
from uno.config import Config, override
from uno.errors import Interrupted, one_line


def wait_for_task(
    ray: Any, config: Config, give_up: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Return the resources of a task, after a wait if the cluster is too small for one.

    All CPUs and GPUs of the cluster count, also those that other work uses now. A
    cluster for one task is large enough to begin. The wait takes at most
    ``compute.wait_minutes``; a private cluster of this command is not waited for.

    Args:
        ray: The module ``ray``, connected to a cluster.
        config: The configuration of the run.
        give_up: Returns whether the user has asked to stop. It is asked during the
            wait.

    Returns:
        ``num_cpus`` and ``num_gpus``, see :func:`pipelines.ray_env.task_request`.

    Raises:
        ConfigError: The cluster is still too small for a task after the wait.
        Interrupted: ``give_up`` returned True during the wait.
    """
    return nodes.once_one_fits(
        override(config, {"compute.num_workers": 1}),
        lambda: ray_env.task_request(config, ray.cluster_resources()),
        give_up,
    )


def run_tasks(
    ray: Any,
    workers: int,
    request: dict[str, Any],
    function: Callable[..., Any],
    shared: tuple[Any, ...],
    items: Iterable[Any],
    give_up: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Any]]:
    """Run one task of Ray for each item, a limited number at a time.

    An item is taken when its task starts, so that few items are in memory. Tasks that
    still run when the caller stops iterating, or after an error, are killed.

    Args:
        ray: The module ``ray``, connected to a cluster.
        workers: The largest number of tasks at once.
        request: The options of a task for Ray, such as ``num_cpus`` and ``num_gpus``.
        function: Is called in each task as ``function(*shared, item)``.
        shared: Arguments that all tasks have in common. They are sent to each node
            once.
        items: The items, one for each task.
        give_up: Returns whether to stop. Then running tasks are cancelled, no further
            ones are started, and nothing more is yielded.

    Yields:
        The position of an item in ``items`` and the result of its task, in the order in
        which tasks end.

    Raises:
        Exception: The error that the function raised, as it is.
        Interrupted: Ray lost a task and could not run it again, for example because its
            process is killed every time.
    """
    stored = ray.put(shared)
    remote = ray.remote(**request)(lambda shared, item: function(*shared, item))
    waiting, pending = enumerate(items), dict[Any, int]()
    try:
        while not give_up():
            while len(pending) < workers and (following := next(waiting, None)):
                position, item = following
                pending[remote.remote(stored, item)] = position
            if not pending:
                return
            done, _ = ray.wait(list(pending), timeout=ray_env.POLL_S)
            if not done or give_up():
                continue
            try:
                value = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                raise Interrupted(
                    f"tasks keep dying ({one_line(error)}); they may be out of memory"
                ) from None
            yield pending.pop(done[0]), value
    finally:
        for task in pending:
            ray.cancel(task, force=True)
