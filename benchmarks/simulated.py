"""What does a cluster of 64 nodes do, of which two cores can run the parts that decide?

    python -m benchmarks.simulated coordinator autoscaler ranks

prints one JSON row for each part. ``coordinator``: Ray Data's own coordinator on nodes
that are not there: how long its calls take, what each rank's execution gets, and what
it asks of the autoscaler. ``autoscaler``: which nodes of the shipped files Ray's own
scheduler starts for a run, and then for the processes of its ranks' executions, and for
a thousand tasks more. ``ranks``: a discovery step as rank 0 of 64 and 512, whose
collectives are counted and answered by nobody (PyTorch's fake process group). No
network, GPU or second node is in any of it.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.measure import environment
from benchmarks.workers import counted_step, network
from pipelines.ray_data import execution_limits, pool_size
from pipelines.ray_env import TASK_CPUS

ROOT = Path(__file__).parents[1]
GIB = 2**30
TRAIN = {"CPU": 1.0, "GPU": 1.0}  # of a worker


def nodes_of(num: int, cpus: float = 8.0, gpus: float = 1.0) -> list[dict[str, Any]]:
    """``num`` equal nodes as ``ray.nodes()`` lists them, and a head without CPUs."""
    own = {
        "CPU": cpus,
        "GPU": gpus,
        "memory": 32.0 * GIB,
        "object_store_memory": 8.0 * GIB,
    }
    head = {"node:__internal_head__": 1.0, "object_store_memory": 2.0 * GIB}
    found = [
        {"NodeID": f"{i:04}", "Alive": True, "Resources": own, "Labels": {}}
        for i in range(num)
    ]
    return [*found, {"NodeID": "head", "Alive": True, "Resources": head, "Labels": {}}]


def coordinator(num_nodes: int = 64) -> dict[str, Any]:
    """Every node has a worker of Ray Train, and an execution of Ray Data belongs to
    each rank.
    """
    from ray.data._internal.cluster_autoscaler import (
        default_autoscaling_coordinator as ray_coordinator,
    )
    from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import (
        STANDARD_RESOURCE_TYPES,
    )

    asked: list[list[dict[str, float]]] = []
    actor = ray_coordinator._AutoscalingCoordinatorActor(
        get_cluster_nodes=lambda: nodes_of(num_nodes),
        send_resources_request=lambda bundles, label_selectors=None: asked.append(
            list(bundles)
        ),
    )
    actor.request_resources("train", [TRAIN] * num_nodes, expire_after_s=1e6)
    begin = time.perf_counter()
    names = [f"data-{i}" for i in range(num_nodes)]
    for name in names:
        actor.request_resources(
            name, [], expire_after_s=1e6, request_remaining=STANDARD_RESOURCE_TYPES
        )
    registering = time.perf_counter() - begin
    ticks = []
    for _ in range(5):
        begin = time.perf_counter()
        actor._tick()
        ticks.append(time.perf_counter() - begin)
    shares = [actor.get_reserved_resources(name) for name in names]
    total = {
        key: sum(node.get(key, 0.0) for node in shares[0].values())
        for key in ("CPU", "object_store_memory")
    }
    cluster = {"CPU": 8.0 * num_nodes, "object_store_memory": 8.0 * GIB * num_nodes}
    cpus, store = execution_limits(cluster, num_nodes, TRAIN["CPU"])
    return {
        "nodes": num_nodes,
        "requesters": len(names) + 1,
        "register_ms": round(1e3 * registering / len(names), 3),
        "tick_ms": round(1e3 * statistics.median(ticks), 3),
        "cpus_by_ray_data": total["CPU"],
        "share_of_cpus": cpus,
        "store_mib_by_ray_data": round(total["object_store_memory"] / 2**20),
        "store_mib_asked": round(store / 2**20),
        "asked_of_autoscaler": dict(
            Counter(json.dumps(bundle) for bundle in asked[-1])
        ),
    }


def node_types(name: str) -> tuple[dict[str, dict[str, Any]], int]:
    """What a shipped file's worker types have, how many there may be of each, and of
    all.
    """
    documents = list(yaml.safe_load_all((ROOT / name).read_text()))
    if name.startswith("cluster"):
        types = {
            key: kind
            for key, kind in documents[0]["available_node_types"].items()
            if kind["max_workers"]
        }
        return types, documents[0]["max_workers"]
    groups = next(d for d in documents if d["kind"] == "RayJob")["spec"][
        "rayClusterSpec"
    ]["workerGroupSpecs"]
    types = {}
    for group in groups:
        requests = group["template"]["spec"]["containers"][0]["resources"]["requests"]
        own = {"CPU": float(requests["cpu"]), "GPU": float(requests["nvidia.com/gpu"])}
        types[group["groupName"]] = {
            "resources": own,
            "min_workers": group["minReplicas"],
            "max_workers": group["maxReplicas"],
        }
    return types, sum(kind["max_workers"] for kind in types.values())


def launches(
    name: str,
    running: Iterable[tuple[str, dict[str, float]]],
    tasks: list[dict[str, float]],
    gang: list[dict[str, float]],
    constraint: list[dict[str, float]],
) -> dict[str, int]:
    """Nodes that Ray's scheduler starts: on ``running`` nodes (type, what is free) for
    waiting ``tasks``, a placement group ``gang``, and what Ray Data or Train have asked
    for as a ``constraint`` on the cluster.
    """
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.schema import AutoscalerInstance
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated.autoscaler_pb2 import (
        ClusterResourceConstraint,
        GangResourceRequest,
        NodeState,
        NodeStatus,
    )
    from ray.core.generated.instance_manager_pb2 import Instance

    types, most = node_types(name)
    configs = {
        key: NodeTypeConfig(
            key,
            kind["min_workers"],
            kind["max_workers"],
            resources=kind["resources"],
            priority=kind.get("priority", 0),
        )
        for key, kind in types.items()
    }
    instances = []
    for number, (key, free) in enumerate(running):
        node = NodeState(
            ray_node_type_name=key,
            total_resources=types[key]["resources"],
            available_resources=free,
            status=NodeStatus.RUNNING,
            node_id=f"{number:04}".encode(),
        )
        own = Instance(
            instance_id=f"{number}",
            instance_type=key,
            status=Instance.InstanceStatus.RAY_RUNNING,
        )
        instances.append(
            AutoscalerInstance(
                im_instance=own, ray_node=node, cloud_instance_id=f"{number}"
            )
        )
    make = ResourceRequestUtil.make
    constraints = [
        ClusterResourceConstraint(
            resource_requests=ResourceRequestUtil.group_by_count(
                [*map(make, constraint)]
            )
        )
    ]
    reply = ResourceDemandScheduler(None).schedule(
        SchedulingRequest(
            node_type_configs=configs,
            max_num_nodes=most,
            disable_launch_config_check=True,
            resource_requests=ResourceRequestUtil.group_by_count([*map(make, tasks)]),
            gang_resource_requests=[GangResourceRequest(requests=[*map(make, gang)])]
            if gang
            else [],
            cluster_resource_constraints=constraints if constraint else [],
            current_instances=instances,
        )
    )
    return {launch.instance_type: launch.count for launch in reply.to_launch}


def autoscaler(name: str, workers: int) -> dict[str, Any]:
    """The nodes that a run starts with, and those that its ranks' processes start
    once it has them.
    """
    types, _ = node_types(name)
    wanted = [TRAIN] * workers
    begin = launches(name, [], [{"CPU": TASK_CPUS}], wanted, [])
    nodes, left = [], workers
    for key, count in begin.items():
        for _ in range(count):
            own = dict(types[key]["resources"])
            here = min(left, int(own["GPU"]))
            left -= here
            nodes.append((key, {"CPU": own["CPU"] - here, "GPU": own["GPU"] - here}))
    cluster = {"CPU": sum(types[key]["resources"]["CPU"] for key, _ in nodes)}
    cpus, _ = execution_limits(cluster, workers, TRAIN["CPU"])
    at_once = pool_size(cpus)
    busy, unplaced = [(key, dict(free)) for key, free in nodes], 0
    for _ in range(workers * (at_once - 1)):  # the first of a rank takes no CPU
        place = next((free for _, free in busy if free["CPU"] >= TASK_CPUS), None)
        if place is None:
            unplaced += 1
        else:
            place["CPU"] -= TASK_CPUS
    waiting = [{"CPU": TASK_CPUS}] * unplaced
    every = [{"CPU": TASK_CPUS}] * 1000  # of an execution without a bound
    return {
        "file": name,
        "workers": workers,
        "started": begin,
        "processes": workers * at_once,
        "waiting": unplaced,
        "more_for_processes": launches(name, busy, waiting, [], wanted),
        "more_for_all_tasks_at_once": launches(name, busy, every, [], wanted),
    }


def ranks(world_size: int, rows_per_rank: int = 16) -> dict[str, Any]:
    """A discovery step of the CIFAR10 recipe as rank 0 of ``world_size``: collectives,
    the bytes that rank 0 brings to each, and the memory of the gathered rows.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    batch = rows_per_rank * world_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    with ExitStack() as until:
        until.callback(dist.destroy_process_group)
        found = counted_step(0, world_size, batch, 8, _answered)
    sizes = network(batch)
    return {
        "ranks": world_size,
        "rows_per_rank": rows_per_rank,
        "calls": found["calls"],
        "bytes": found["bytes"],
        "gathered_bytes": sizes["logit_bytes"],
        "gradient_bytes": sizes["gradient_bytes"],
    }


def _answered(group: Any, bucket: Any) -> Any:
    """Gradients as they are; nobody else has any."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = ["coordinator", "autoscaler", "ranks"]
    parser.add_argument("parts", nargs="+", choices=parts)
    torch.set_num_threads(1)
    for part in parser.parse_args().parts:
        if part == "coordinator":
            rows = [coordinator(num) for num in (4, 16, 64)]
        elif part == "autoscaler":
            rows = [autoscaler(name, 4) for name in ("rayjob.yaml", "cluster.yaml")]
            rows.append(autoscaler("cluster-p5.yaml", 32))
        else:
            rows = [ranks(num) for num in (64, 512)]
        print(
            json.dumps({"benchmark": "simulated", part: rows, **environment()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
