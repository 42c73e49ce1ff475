"""Use the parts of Ray that are not documented.

Their names may change with any version. Each function says what happens without its
name. The rest of this package imports Ray's public API only.
"""

import inspect
import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

NODE = "ray.io/node-id"  # the label of each node with its id
# The fallback if the requested node has left: any node.
ELSEWHERE = [{"label_selector": dict[str, str]()}]
GONE = (ImportError, AttributeError, TypeError)  # raised by a name that has moved

Resources = dict[str, float]


class Node(NamedTuple):
    """A node as Ray's head knows it.

    Attributes:
        id: Its id, in hexadecimal digits.
        total: All its resources.
        free: Its free resources.
        leaving: Whether it is being drained, and takes no more work.
    """

    id: str
    total: Resources
    free: Resources
    leaving: bool  # it is being drained


def read_nodes() -> list[Node]:
    """Return all living nodes, by one request to Ray's head.

    The result is empty if the head is too busy to answer. Without the private names no
    node is known to leave, and all resources count as free.
    """
    from ray.exceptions import RayError

    try:
        from ray._private.worker import global_worker
        from ray.autoscaler.v2.sdk import get_cluster_resource_state
        from ray.core.generated.autoscaler_pb2 import NodeStatus

        states = get_cluster_resource_state(global_worker.gcs_client).node_states
        return [
            Node(
                state.node_id.hex(),
                dict(state.total_resources),
                dict(state.available_resources),
                state.status == NodeStatus.DRAINING,
            )
            for state in states
            if state.status != NodeStatus.DEAD
        ]
    except RayError:
        return []
    except GONE:
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]
        return [
            Node(node["NodeID"], node["Resources"], node["Resources"], False)
            for node in alive
        ]


def launches() -> list[str]:
    """Return phrases on nodes that Ray's autoscaler is starting or cannot start.

    The result is empty for a cluster without an autoscaler, and without the private
    names.
    """
    from ray.exceptions import RayError

    with suppress(RayError, *GONE):
        import ray
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        starting = sum(launch.count for launch in status.pending_launches) + len(
            status.pending_nodes
        )
        failed = {
            f"{each.ray_node_type_name}: {each.details}"
            for each in status.failed_launches
        }
        found = [f"cannot start {text}" for text in sorted(failed)]
        return (
            [f"{starting} node{'s' * (starting != 1)} starting", *found]
            if starting
            else found
        )
    return []


def worker_hosts() -> set[str]:
    """Return the ids of the nodes on which the training workers of this job run.

    Without the private names the result is empty, and a drained node is noticed only
    when its workers die.
    """
    with suppress(*GONE):
        import ray
        from ray._private.state import actors

        job = ray.get_runtime_context().get_job_id()
        alive = actors(
            job_id=ray.JobID(bytes.fromhex(job)), actor_state_name="ALIVE"
        ).values()
        return {
            actor["Address"]["NodeID"]
            for actor in alive
            if actor["ActorClassName"] == "RayTrainWorker"
        }
    return set()


def quiet_reports() -> None:
    """Stop Ray Train from logging every report of a worker.

    The logger is named after a file, and LoggingConfig does not reach it. Without the
    private name there are more lines.
    """
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    with suppress(*GONE):
        import ray.train.v2._internal.execution.context as context

        context.logger.setLevel(logging.WARNING)


def quiet_pools() -> None:
    """Suppress an error line that Ray's core prints for each pool of Ray Data.

    Each process that starts a pool prints it, because the actors of the pool may
    restart with arguments that are in Ray's store (ray-project/ray#53727). This must be
    called before connecting. Without the private name the line is seen.
    """

    def leave_out(printed: dict[str, Any]) -> None:
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


def dataset_of(blocks: list[Any]) -> Any:
    """Return Arrow tables as a dataset of Ray Data, with one block for each table.

    The name is meant for Ray's tests. Without it a task counts the rows of each block.
    That task waits for a CPU, and takes longer than storing the row numbers.
    """
    import ray

    try:
        return ray.data.from_blocks(blocks)
    except GONE:
        return ray.data.from_arrow(blocks)


def first_without_cpu(own: str) -> dict[str, Any]:
    """Return a ``map_batches`` argument: the first process of a pool takes no CPU.

    That process runs on the node ``own``, or elsewhere if the node has left. Ray 2.64
    drops the argument. Without it the result is empty, and processes that find no free
    CPU wait for those of other executions.
    """
    import ray

    first = iter(
        [{"num_cpus": 0, "label_selector": {NODE: own}, "fallback_strategy": ELSEWHERE}]
    )
    name = "ray_remote_args_fn"
    has = name in inspect.signature(ray.data.Dataset.map_batches).parameters
    return {name: lambda: next(first, {})} if has else {}


def propagate(variable: str) -> None:
    """Let Ray Train's own helpers inherit an environment variable.

    Without the private name they look for the cluster among the processes of the
    machine.
    """
    with suppress(*GONE):
        from ray.train.v2._internal import constants

        constants.ENV_VARS_TO_PROPAGATE.add(variable)


def current_cluster() -> str | None:
    """Return the ``host:port`` of the cluster that ``ray start`` started here.

    It is read from the file in which Ray's own commands find it; None without one.
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


def job_variables() -> set[str]:
    """Return the names of the environment variables of a submitted job.

    Ray refuses a driver that sets one of them again. The result is empty outside a job.
    """
    with suppress(ValueError, *GONE):
        job: Any = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        return set((job.get("runtime_env") or {}).get("env_vars") or {})
    return set()
