"""Everything of Ray that Ray does not document: names that may change with any version,
each with what happens where it is gone. The rest of this package imports Ray's public
API only.
"""

import inspect
import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

NODE = "ray.io/node-id"  # the label that each node has
# where a node leaves that was asked for
ELSEWHERE = [{"label_selector": dict[str, str]()}]
GONE = (ImportError, AttributeError, TypeError)  # what a name that has moved raises

Resources = dict[str, float]


class Node(NamedTuple):
    """A node as Ray's head knows it."""

    id: str
    total: Resources
    free: Resources
    leaving: bool  # it takes no more work


def read_nodes() -> list[Node]:
    """All nodes that are alive, by one request to the head; none where it is too busy
    to answer. Without the private names: nothing is known to leave, and everything
    counts as free.
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
    """What Ray's autoscaler says of nodes that it starts or cannot start, a phrase
    each. Without the private names, and for clusters without an autoscaler, nothing.
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
    """Ids of the nodes that this job's training workers run on. Without the private
    names none: a node that is drained is noticed when its workers die.
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
    """Ray Train logs every report through a logger named after a file, which
    LoggingConfig does not reach. Without the private name there are more lines.
    """
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    with suppress(*GONE):
        import ray.train.v2._internal.execution.context as context

        context.logger.setLevel(logging.WARNING)


def quiet_pools() -> None:
    """Before connecting: Ray's core prints an error line in each process that starts a
    pool of Ray Data, as its actors restart with arguments that are in Ray's store
    (ray-project/ray#53727). Without the private name a line of each rank is seen.
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
        # the one that prints is behind it
        dispatcher.handlers.insert(0, (leave_out.__name__, leave_out))


def dataset_of(blocks: list[Any]) -> Any:
    """Arrow tables as a dataset of Ray Data, a block each. Without the name, which is
    mostly for Ray's tests, a task counts the rows of each block: it waits for a CPU,
    and takes longer than to store row numbers.
    """
    import ray

    try:
        return ray.data.from_blocks(blocks)
    except GONE:
        return ray.data.from_arrow(blocks)


def first_without_cpu(own: str) -> dict[str, Any]:
    """An argument of ``map_batches``: the first process of a pool takes no CPU, on the
    node ``own``. Without the argument, which Ray 2.64 drops, processes that find no
    free CPU wait for those of other executions.
    """
    import ray

    first = iter(
        [{"num_cpus": 0, "label_selector": {NODE: own}, "fallback_strategy": ELSEWHERE}]
    )
    name = "ray_remote_args_fn"
    has = name in inspect.signature(ray.data.Dataset.map_batches).parameters
    return {name: lambda: next(first, {})} if has else {}


def propagate(variable: str) -> None:
    """Ray Train's own helpers inherit this environment variable. Without the private
    name they look for the cluster among the processes of the machine.
    """
    with suppress(*GONE):
        from ray.train.v2._internal import constants

        constants.ENV_VARS_TO_PROPAGATE.add(variable)


def current_cluster() -> str | None:
    """The ``host:port`` that ``ray start`` noted on this machine, where Ray's own
    commands find it.
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
    """Environment variables of a submitted job: Ray refuses a driver that sets one
    of them again.
    """
    with suppress(ValueError, *GONE):
        job: Any = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        return set((job.get("runtime_env") or {}).get("env_vars") or {})
    return set()
