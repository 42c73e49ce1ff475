"""What decides about a run on many nodes, where there is one: Ray's own coordinator and
scheduler, ranks that are not there.
"""

import json

import pytest

from benchmarks import simulated


@pytest.mark.ray
def test_what_ray_data_gives_a_rank_on_many_nodes():
    """Of 64 CPUs of which 8 train, each of 8 executions gets none where a rank's share
    is seven: a pool of fixed size does not need them. Kills: a part of the object store
    that it would not give, executions that ask the autoscaler for nodes.
    """
    found = simulated.coordinator(8)
    assert found["cpus_by_ray_data"] == 0 and found["share_of_cpus"] == 7
    # Ray takes half of the store
    assert found["store_mib_asked"] <= 0.5 * found["store_mib_by_ray_data"]
    assert found["asked_of_autoscaler"] == {json.dumps(simulated.TRAIN): 8}


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "workers", "started"),
    [
        ("rayjob.yaml", 4, {"gpu": 4}),
        ("cluster.yaml", 4, {"gpu_spot": 1}),
        ("cluster-p5.yaml", 32, {"gpu": 4}),
    ],
)
def test_no_node_is_started_for_data(name, workers, started):
    """Where processes are as many as the ranks' CPUs. Kills: a share of more CPUs than
    there are, types that Ray fills with other nodes than a run needs.
    """
    found = simulated.autoscaler(name, workers)
    assert (
        found["started"] == started
        and found["processes"] > workers
        and found["more_for_processes"] == {}
    )
    # which could grow: what is looked at does see such tasks
    if name == "cluster.yaml":
        assert found["more_for_all_tasks_at_once"] == {"gpu_spot": 3}


@pytest.mark.slow
def test_collectives_do_not_grow_with_ranks():
    """Bytes and calls of rank 0. Kills: a collective for each rank, or of the whole
    batch's rows by each.
    """
    few, many = (simulated.ranks(num, 2) for num in (8, 64))
    assert few["calls"] == many["calls"] and few["bytes"] == many["bytes"]
    assert (
        few["calls"]["all_gather of logits"] == 1
        and few["bytes"]["all_gather of logits"] == 640
    )
