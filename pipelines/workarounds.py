"""Work around limits of Ray by parts of Ray that are not documented.

Their names may change with any version. Each function says what happens without its
name. The rest of this package imports Ray's public API only.
"""

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NODE = "ray.io/node-id"  # the label of each node with its id
GONE = (ImportError, AttributeError, TypeError)  # raised by a name that has moved


def quiet_pools() -> None:
    """Suppress an error line that Ray's core prints for each actor pool of Ray Data.

    Each process that starts a pool prints it, because the actors of the pool may
    restart with arguments that are in Ray's store (ray-project/ray#53727). This must be
    called before connecting. If Ray has renamed what this uses, the line is printed.
    """

    def leave_out(printed: dict[str, Any]) -> None:
        """Remove the error line, in place, from lines that a worker has printed."""
        printed["lines"] = [
            line for line in printed["lines"] if "ray/issues/53727" not in line
        ]

    with suppress(*GONE):
        from ray._private.ray_logging import (
            global_worker_stdstream_dispatcher as dispatcher,
        )

        dispatcher.remove_handler(leave_out.__name__)
        # The handler that prints comes after this one.
        dispatcher.handlers.insert(0, (leave_out.__name__, leave_out))


@contextmanager
def cluster_of_helpers() -> Iterator[None]:
    """Set ``RAY_ADDRESS`` to the connected cluster in the block, for Ray Train.

    Ray Train starts a helper process, which releases the CPUs of workers whose
    controller died. Without the variable the helper looks for the cluster among the
    processes of this machine, and fails if a second cluster runs here. Ray passes the
    variable on to the helper only if a private set of Ray Train has its name, so the
    name is added to that set, and stays there. At the end of the block the variable has
    its former value again, or is unset as before.
    """
    import ray

    with suppress(*GONE):
        from ray.train.v2._internal import constants

        constants.ENV_VARS_TO_PROPAGATE.add("RAY_ADDRESS")
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


def start_shared_actors() -> None:
    """Start Ray Data's detached actors on this node, unless the cluster has them.

    Ray Data has a coordinator and a tracker of actors for all executions of a cluster,
    and binds each to the node of the process that needs it first. Where that is a
    training worker, the loss of its node ends all executions of that moment, and all
    later ones, with an ActorUnschedulableError, also those of other jobs
    (ray-project/ray#62260). Therefore the driver, whose node is usually the head, calls
    this before it starts workers that stream. If Ray has renamed what this uses, the
    first worker that streams decides.
    """
    with suppress(*GONE):
        from ray.data._internal.cluster_autoscaler import (
            default_autoscaling_coordinator as coordinator,
        )

        coordinator.get_or_create_autoscaling_coordinator()
    with suppress(*GONE):
        from ray.data._internal.execution import node_trackers

        node_trackers.get_or_create_actor_location_tracker()


def end_controllers() -> None:
    """Kill the controllers of Ray Train that this process has started.

    The thread that waits for one, in :func:`pipelines.train.fit`, then gets an error
    and ends. Ray Train gives nobody the handle of its controller, so it is searched for
    among all objects of this process. If Ray has renamed the class, nothing is killed.
    """
    import ray

    for each in gc.get_objects():
        if type(each) is ray.actor.ActorHandle and "TrainController" in repr(each):
            ray.kill(each)


def current_cluster() -> str | None:
    """Return the address of the Ray cluster that ``ray start`` started on this machine.

    The cluster may have ended since: no connection is tried.

    Returns:
        ``host:port``, read from the file in which Ray's own commands find the address;
        None if there is no such file, or it is empty.
    """
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    with suppress(OSError):
        return (
            Path(folder, "ray", "ray_current_cluster")
            .read_text(encoding="utf-8")
            .strip()
            or None
        )
    return None
