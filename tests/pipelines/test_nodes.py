"""What is said and decided while nodes come and go, with Ray's head replaced by a
list of nodes.
"""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import Mock, call

import pyarrow as pa
import pytest

from pipelines import backend, nodes, packing, ray_env, ray_private, tables
from pipelines.nodes import (
    DrainWatcher,
    Node,
    StallWarner,
    no_images,
    shortage,
    wait_for_resources,
)
from pipelines.partitions import map_through_model
from tests.conftest import NUM_CPUS
from tests.pipelines.small import wait_for
from tune.driver import concurrency
from uno.config import Config, override
from uno.data.files import Storage
from uno.errors import ConfigError, Interrupted
from uno.results.estimate import Settings
from uno.session import resources
from uno.session.resources import FreeMemory
from uno.session.run import Run

BIG, SMALL = ({"CPU": cpus, "memory": 1e9} for cpus in (4.0, 2.0))


def node(name, total, free=None, leaving=False):
    return Node(name, total, total if free is None else free, leaving)


@pytest.fixture
def cluster(monkeypatch):
    """``cluster((nodes, fits), ...)``: what the head says each second, the last of them
    keep dying, and whether all that is wanted fits; the place that is asked.
    """

    def start(*answers):
        place, now, left = Mock(), [0.0], chain(answers, repeat(answers[-1], 2000))

        def look():
            now[0] += 1
            found, place.fits.return_value = next(left)
            return found

        monkeypatch.setattr(nodes, "read_nodes", look)
        monkeypatch.setattr(nodes, "launches", lambda: [])
        monkeypatch.setattr(nodes, "PlacementProbe", Mock(return_value=place))
        monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
        return place

    return start


def config_of(**overrides):
    return override(
        Config(),
        {"compute.num_workers": 2, **{f"compute.{k}": v for k, v in overrides.items()}},
    )


def test_a_head_that_does_not_answer_has_no_nodes(monkeypatch):
    """Kills: a run that ends because its cluster's head was busy for a moment."""

    class RayError(Exception):
        """Of a request."""

    def fail(client):
        raise RayError

    for name, values in (
        ("ray._private.worker", {"global_worker": SimpleNamespace(gcs_client=None)}),
        ("ray.autoscaler.v2.sdk", {"get_cluster_resource_state": fail}),
        ("ray.core.generated.autoscaler_pb2", {"NodeStatus": None}),
        ("ray.exceptions", {"RayError": RayError}),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**values))
    assert nodes.read_nodes() == []


def test_without_private_names_nodes_are_those_that_ray_lists(monkeypatch):
    """Kills: a private name that another version of Ray lacks, and a run that ends
    for it.
    """
    import ray
    import ray.train

    for name in ("ray._private.worker", "ray._private.state", "ray.train.v2._internal"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(
        ray,
        "nodes",
        lambda: [
            {"NodeID": "a", "Alive": True, "Resources": BIG},
            {"NodeID": "b", "Alive": False, "Resources": {}},
        ],
    )
    assert ray_private.read_nodes() == [node("a", BIG)]
    assert ray_private.worker_hosts() == set()
    ray_private.propagate("RAY_ADDRESS")
    assert ray_private.first_without_cpu("a")
    monkeypatch.setattr("ray.data.Dataset.map_batches", lambda self, fn: None)
    assert ray_private.first_without_cpu("a") == {}


def test_no_answer_is_no_lack_of_nodes(cluster, monkeypatch, capsys):
    """Kills: "more than the cluster's 0" at the start of a run on a busy machine."""
    monkeypatch.setattr(nodes, "POLL_S", 0)
    cluster(([], None), ([node("a", BIG)], True))
    assert wait_for_resources(config_of(), lambda: False, 0.0) == {"CPU": 1.0}
    assert capsys.readouterr().out == ""


def test_shares_are_those_of_the_nodes_that_stay(cluster):
    """Kills: the shares of the start, of which two fill the node that is left, and
    Ray Data gets nothing.
    """
    place = cluster(([node("a", SMALL), node("b", SMALL)], True))
    assert wait_for_resources(config_of(), lambda: False) == {"CPU": 1.0}
    assert nodes.PlacementProbe.call_args == call("PACK")
    assert place.mock_calls == [
        call.fits([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 0.9}),
        call.release(),
    ]
    for other in ([], [node("b", BIG, leaving=True)]):
        cluster(([node("a", SMALL), *other], True))
        assert wait_for_resources(config_of(), lambda: False) == {"CPU": 0.5}


def test_nodes_are_waited_for_with_a_line_every_30_s(cluster, capsys):
    """Kills: one line and then silence, a line a second, an end while nodes may
    come.
    """
    few, more = (
        ([node("a", SMALL)], False),
        ([node("a", SMALL), node("b", SMALL)], True),
    )
    place = cluster(*[few] * 96, more)
    assert wait_for_resources(config_of(cpus_per_worker=1.0), lambda: False) == {
        "CPU": 1.0
    }
    lines = capsys.readouterr().out.splitlines()
    wanted = (
        "need 2 workers with 1 CPU each, and 1 CPU for Ray Data; available: 2 CPU (2"
        " free) on 1 node"
    )
    # after 0, 30, 60 and 90 of 96 seconds
    assert lines == [f"waiting for nodes: {wanted}"] * 4
    assert place.release.called


def test_a_place_that_others_have_is_waited_for(cluster, capsys):
    """At first without a word: what was taken a moment ago comes back. Kills: workers
    that start into a cluster that is in use, and silence.
    """
    busy, free = (([node("a", BIG, {"CPU": cpus})], cpus > 3) for cpus in (1.5, 4.0))
    cluster(*[busy] * 10, free)
    assert wait_for_resources(config_of(), lambda: False) == {"CPU": 1.0}
    assert capsys.readouterr().out == ""
    cluster(*[busy] * 70, free)
    wait_for_resources(config_of(), lambda: False, 0.0)  # whose cluster does not grow
    assert capsys.readouterr().out.count("available: 4 CPU (1.5 free) on 1 node") == 2


def test_waiting_ends_by_a_stop_and_at_the_start_by_the_clock(
    cluster, capsys, monkeypatch
):
    """Kills: a stop that is not heard, a command that waits for nodes of a cluster
    that cannot grow.
    """
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpus = config_of(device="cuda", wait_minutes=10)
    place = cluster(([node("a", BIG)], False))
    stops = iter([False] * 40 + [True])
    with pytest.raises(Interrupted, match="resume with the same command"):
        wait_for_resources(gpus, lambda: next(stops))
    assert place.fits.call_args == call([{"CPU": 1.0, "GPU": 1.0}] * 2, {"CPU": 0.9})
    assert place.release.called
    assert "0 GPU (0 free) on 1 node" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="need 2 GPUs, the cluster has 0"):
        wait_for_resources(gpus, lambda: False, nodes.startup_timeout_s(gpus))
    assert nodes.startup_timeout_s(gpus) == 0 and capsys.readouterr().out == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="need 2 GPUs, the cluster has 0"):
        wait_for_resources(gpus, lambda: False, nodes.startup_timeout_s(gpus))
    assert (
        capsys.readouterr().out.count(
            "waiting up to 10 minutes for nodes: need 2 workers"
        )
        == 20
    )
    cluster(([node("a", BIG, {"CPU": 1.5})], False))
    with pytest.raises(ConfigError, match=r"available: 4 CPU \(1.5 free\)"):
        wait_for_resources(config_of(), lambda: False, nodes.startup_timeout_s(gpus))


def test_why_nodes_do_not_come_is_said(cluster, capsys, monkeypatch):
    """Kills: a wait whose reason stays in the autoscaler's log."""
    cluster(([node("a", SMALL)], False))
    why = ["1 node starting", "cannot start gpu: InsufficientInstanceCapacity"]
    monkeypatch.setattr(nodes, "launches", lambda: why)
    with pytest.raises(
        ConfigError, match="has 0; 1 node starting; cannot start gpu: Insufficient"
    ):
        wait_for_resources(config_of(device="cuda"), lambda: False, 40.0)
    assert capsys.readouterr().out.count("; ".join(why)) == 2  # after 0 and 30 s


def test_launches_are_those_of_the_autoscaler(monkeypatch):
    def launch(**fields):
        return SimpleNamespace(ray_node_type_name="gpu", **fields)

    failed = [launch(details="no capacity"), launch(details="no capacity")]
    status = SimpleNamespace(
        pending_launches=[launch(count=2)], pending_nodes=[1], failed_launches=failed
    )
    monkeypatch.setattr(
        "ray.autoscaler.v2.sdk.get_cluster_status", lambda address: status
    )
    monkeypatch.setattr(
        "ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379")
    )
    assert ray_private.launches() == [
        "3 nodes starting",
        "cannot start gpu: no capacity",
    ]
    monkeypatch.delattr("ray.autoscaler.v2.sdk.get_cluster_status")
    assert ray_private.launches() == []


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [
        ("PACK", [[{"GPU": 1}, {"GPU": 1}, {"CPU": 0.9}]]),
        ("SPREAD", [[{"GPU": 1}, {"GPU": 1}, {"CPU": 0.9}]]),
        ("STRICT_PACK", [[{"GPU": 1}, {"GPU": 1}], [{"CPU": 0.9}]]),
        ("STRICT_SPREAD", [[{"GPU": 1}, {"GPU": 1}], [{"CPU": 0.9}]]),
    ],
)
def test_a_strict_strategy_is_one_of_the_workers(monkeypatch, strategy, groups):
    """Kills: as many nodes as workers, and a wait for one more."""
    asked, removed = [], []

    def placement_group(bundles, strategy):
        asked.append((bundles, strategy))
        return SimpleNamespace(wait=lambda seconds: True)

    monkeypatch.setattr("ray.util.placement_group", placement_group)
    monkeypatch.setattr("ray.util.remove_placement_group", removed.append)
    place = nodes.PlacementProbe(strategy)
    for _ in range(2):
        assert place.fits([{"GPU": 1}] * 2, {"CPU": 0.9})
    assert asked == [(bundles, strategy) for bundles in groups]
    place.release()
    assert len(removed) == len(groups)


def test_predictions_and_features_wait_for_nodes_too(monkeypatch):
    """Kills: a run that ends after training because idle nodes left while its model
    was aligned.
    """

    def wait_for_resources(config, give_up, limit_s):
        raise ConfigError(f"no room within {limit_s:g} s")

    monkeypatch.setattr(nodes, "wait_for_resources", wait_for_resources)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    found = map_through_model(
        None, config_of(wait_minutes=2), iter([]), None, object, (), 512, 192
    )
    with pytest.raises(ConfigError, match="no room within 120 s"):
        next(found)


def estimate(ray, config, monkeypatch):
    found = []
    monkeypatch.setattr(backend.ray_env, "connect", lambda **_: nullcontext(ray))
    monkeypatch.setattr(backend, "estimated_set", lambda *_: None)
    monkeypatch.setattr(
        backend.estimate,
        "estimate_num_novel",
        lambda *facts, **_: found.append(facts[4]),
    )
    run = Run(config, Storage("unused"), backend.RayBackend(), opened=Mock())
    run.backend.estimate(run, Settings())
    return found


def pack(ray, config, monkeypatch):
    packing.store_on_ray(
        ray, override(config, {"output": "s3://bucket/packed?region=us-east-1"})
    )


def reproduce(ray, config, monkeypatch):
    monkeypatch.setattr(tables.ray_env, "connect", lambda: nullcontext(ray))
    own = SimpleNamespace(runner="ray", parallel=None)
    compute = config.compute.model_copy(update={"num_workers": 0})
    with tables._runner(SimpleNamespace(compute=compute, args=own)) as (start, number):
        return start.args[1]["num_gpus"], number


def tune(ray, config, monkeypatch):
    options = SimpleNamespace(config=config, concurrent=None, trials=9)
    return nodes.once_one_fits(
        config, lambda: concurrency(options, ray.cluster_resources())
    )


@pytest.mark.parametrize(
    ("command", "device", "found"),
    [
        (estimate, "auto", ["cuda"]),
        (estimate, "cuda", ["cuda"]),
        (pack, "cuda", None),
        (reproduce, "cuda", (1.0, 2)),
        (reproduce, "auto", (1.0, 2)),
        (tune, "cuda", (1, {"CPU": 1.0, "GPU": 1.0})),
    ],
)
def test_the_first_task_of_a_command_waits_for_its_node(
    monkeypatch, command, device, found
):
    """On a cluster that has a head without CPUs when it is asked, and two GPUs a while
    later. Kills: "the cluster has 0", cells on CPUs whose device is cuda, a wait of a
    private cluster, which does not grow.
    """
    answers, waited = [{}, {"CPU": 4.0, "GPU": 2.0}], []
    ray = Mock(cluster_resources=lambda: answers.pop(0))
    monkeypatch.setattr(
        nodes, "wait_for_resources", lambda *facts: waited.append(facts[2])
    )
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert command(ray, config_of(device=device), monkeypatch) == found and waited == [
        1800
    ]
    monkeypatch.setenv("RAY_ADDRESS", "local")
    answers[:] = [{}]
    with pytest.raises(
        ConfigError, match=r"too few GPUs|the cluster has 0|the cluster.s 0"
    ):
        command(ray, config_of(device="cuda"), monkeypatch)


def test_shards_that_must_be_here_need_a_cpu_here():
    """Kills: a command that waits for ever, on a head whose CPUs Ray may not have."""
    ray = Mock(**{"get_runtime_context.return_value.get_node_id.return_value": "a"})
    ray.nodes.return_value = [
        {"NodeID": "a", "Resources": {}},
        {"NodeID": "b", "Resources": {"CPU": 4.0}},
    ]
    config = override(config_of(), {"output": "packed"})
    with pytest.raises(
        ConfigError, match="--output packed is local, where Ray has no CPUs"
    ):
        packing.store_on_ray(ray, config)
    ray.nodes.return_value[0]["Resources"] = {"CPU": 1.0}
    assert packing.store_on_ray(ray, config)


def test_features_are_not_waited_for_after_a_stop(monkeypatch):
    """Kills: a Ctrl-C that is heard after half an hour."""
    monkeypatch.setattr(nodes, "read_nodes", list)
    monkeypatch.setattr(nodes, "PlacementProbe", Mock())
    found = map_through_model(
        None, config_of(), iter([]), None, object, (), 512, 192, give_up=lambda: True
    )
    with pytest.raises(Interrupted, match="while waiting for nodes"):
        next(found)


def test_workers_of_one_run_do_not_share_a_gpu():
    """NCCL ends with "Duplicate GPU detected", after three groups. Predictions may
    share one.
    """
    halves = config_of(gpus_per_worker=0.5)
    nodes.check_shares(halves, {"CPU": 1.0})
    nodes.check_shares(
        override(halves, {"compute.num_workers": 1}), {"CPU": 1.0, "GPU": 0.5}
    )
    with pytest.raises(
        ConfigError, match="NCCL accepts one per GPU: use --gpus-per-worker 1"
    ):
        nodes.check_shares(halves, {"CPU": 1.0, "GPU": 0.5})
    with pytest.raises(ConfigError, match="NCCL"):
        nodes.check_shares(override(halves, {"compute.device": "cuda"}))


def test_what_is_there_is_said_without_the_nodes_that_leave():
    found = shortage(
        {"CPU": 1.0, "GPU": 1.0},
        1,
        [node("a", BIG, {"CPU": 0.1}), node("b", BIG, leaving=True)],
    )
    there = (
        "available: 4 CPU (0.1 free), 0 GPU (0 free) on 1 node, 1 more node being"
        " drained"
    )
    assert (
        found
        == f"need 1 worker with 1 CPU, 1 GPU each, and 1 CPU for Ray Data; {there}"
    )


def test_a_node_that_leaves_is_noticed_once_and_only_where_workers_are(monkeypatch):
    """Kills: a request at every poll, a checkpoint for a node of another run, two of
    them for one notice.
    """
    now, looks, found, hosts = [0.0], [], [node("a", BIG)], {"a"}

    def look():
        looks.append(now[0])
        return found

    monkeypatch.setattr(nodes, "read_nodes", look)
    monkeypatch.setattr(nodes, "LOOK_S", 5)
    notices = DrainWatcher(lambda: hosts, lambda: now[0])
    for now[0] in range(1, 11):
        assert not notices.new()
    assert looks == [5, 10]
    found[:] = [node("a", BIG), node("b", BIG, leaving=True)]
    now[0] = 15
    assert not notices.new() and not notices.given
    found[:] = [node("a", BIG, leaving=True)]
    now[0] = 19
    assert not notices.new()
    now[0] = 20
    assert notices.new() and notices.given
    now[0] = 30
    assert not notices.new() and notices.given


def test_images_that_do_not_come_are_said_for_as_long_as_they_do_not_come(
    monkeypatch, caplog
):
    """Kills: silence while Ray Data has no CPU, lines while a step computes, before
    a wait and after.
    """
    monkeypatch.setattr(
        nodes,
        "read_nodes",
        lambda: [node("a", BIG, {"CPU": 0.2}), node("b", BIG, leaving=True)],
    )
    wanted = "no images for 31 s: each further process of Ray Data needs 0.9 CPU, "
    assert no_images(31) == f"{wanted}but no node has more than 0.2 free"
    monkeypatch.setattr(nodes, "read_nodes", lambda: [node("a", BIG)])
    assert no_images(60).endswith("needs 0.9 CPU, a node has 4 free")
    waits, told = StallWarner(lambda waited: f"waited {waited:.2f}", every_s=0.03), []
    time.sleep(0.1)
    assert not caplog.records
    with waits:
        wait_for(lambda: len(caplog.records) >= 3, pause=0.01)
    told = [float(record.getMessage().split()[1]) for record in caplog.records]
    assert all(second >= (i + 1) * 0.03 for i, second in enumerate(told))
    time.sleep(0.1)
    caplog.clear()
    time.sleep(0.1)
    assert not caplog.records
    waits.close()


@pytest.mark.parametrize(
    ("answers", "cpus", "expected"),
    [
        ([FreeMemory(9e9, 8e9), FreeMemory(5e9, 8e10)], 4, (5e9, 8e9, 3e8, 1e9)),
        ([FreeMemory(9e9), FreeMemory(8e9)], 4, (8e9, None, 3e8, 1e9)),
        ([FreeMemory(9e9, 8e9), "late"], 4, (9e9, 8e9, 3e8, 1e9)),
        (["late", "late"], 4, (1e9, None, 3e8, None)),
        ([], 1, (1e9, None, 3e8, None)),
    ],
)
def test_memory_is_that_of_the_nodes_of_the_workers(
    monkeypatch, answers, cpus, expected
):
    """Asked with what a worker takes. Kills: the head's own memory, which has no GPU,
    for the workers'; the most of any node; waiting for a node that does not come; the
    store of a node that is gone.
    """

    def wait(tasks, num_returns, timeout):
        assert num_returns == 2 and timeout
        return [task for task in tasks if task != "late"], [
            task for task in tasks if task == "late"
        ]

    ray = Mock(wait=wait, get=list)
    ray.remote.return_value.return_value.remote.side_effect = answers
    ray.cluster_resources.return_value = {"CPU": cpus, "GPU": 2}
    stores = (9e8, True), (3e8, True), (1e8, False)
    ray.nodes.return_value = [
        {"Resources": {"object_store_memory": n}, "Alive": alive} for n, alive in stores
    ]
    ask = ray.remote.return_value.return_value.remote
    monkeypatch.setattr(nodes, "connect", lambda: nullcontext(ray))
    monkeypatch.setattr(resources, "free_host_bytes", lambda: int(1e9))
    monkeypatch.setattr(resources, "free_device_bytes", lambda config: None)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    config = override(Config(), {"compute.num_workers": 2})
    assert nodes.free_memory(config) == expected
    assert ray.cancel.call_args_list == [call("late")] * answers.count(
        "late"
    ) and ask.call_count == len(answers)
    for options, asked in zip(
        ray.remote.call_args_list, ask.call_args_list, strict=False
    ):
        assert (options.kwargs["num_cpus"], options.kwargs["num_gpus"]) == (1, 1)
        assert asked.args[0]["compute"]["num_workers"] == 2
    ask.reset_mock()
    assert (
        nodes.free_memory(override(config, {"compute.num_workers": 0}))
        == FreeMemory(1e9)
        and not ask.called
    )
    monkeypatch.delenv("RAY_ADDRESS")
    assert nodes.free_memory(config) == FreeMemory(1e9) and not ask.called


def test_a_worker_counts_its_share_of_a_gpu(monkeypatch):
    """Kills: two workers on one GPU that each count the whole."""
    monkeypatch.setattr(resources, "free_device_bytes", lambda config: 1000)
    for share, expected in ((0.25, 250), (1, 1000), (2, 1000)):
        config = override(Config(), {"compute.gpus_per_worker": share})
        assert nodes.free_memory(config).device == expected


@pytest.mark.ray
def test_a_pool_of_ray_data_prints_no_line_of_ray_itself(monkeypatch):
    """Kills: an error line of each rank at its first images; a line of its own that
    is lost with it.
    """
    from ray._private.ray_logging import (
        global_worker_stdstream_dispatcher as dispatcher,
    )

    seen = []
    monkeypatch.setattr(ray_private, "GONE", ())  # no fall-back
    monkeypatch.setattr(
        dispatcher,
        "handlers",
        [("prints", lambda printed: seen.extend(printed["lines"]))],
    )
    for _ in range(2):
        ray_private.quiet_pools()
    assert len(dispatcher.handlers) == 2
    noise = (
        "E 1 core_worker.cc:2465: Actor 'MapWorker' ... See"
        " https://github.com/ray-project/ray/issues/53727"
    )
    dispatcher.emit({"lines": ["a line", noise, "another"]})
    assert seen == ["a line", "another"]


@pytest.mark.ray
def test_ray_answers_a_worker_and_us(ray_cluster, monkeypatch):
    """Kills: a name of Ray's internals that is not Ray's, a place that stays taken."""
    monkeypatch.setattr(ray_private, "GONE", ())  # no fall-back
    ray_private.quiet_reports()
    ray_private.propagate("RAY_ADDRESS")
    assert ray_private.launches() == []
    assert ray_private.dataset_of([pa.table({"x": [1, 2]})] * 2).num_blocks() == 2
    line = ray_cluster.get(ray_cluster.remote(no_images).remote(31))
    assert line.startswith(
        "no images for 31 s: each further process of Ray Data needs 0.9 CPU, "
    )
    (found,) = nodes.read_nodes()
    assert (
        found.total["CPU"] == NUM_CPUS
        and not found.leaving
        and ray_private.worker_hosts() == set()
    )
    place = nodes.PlacementProbe("PACK")
    data = {"CPU": 0.9}
    assert place.fits([{"CPU": 1.0}], data) and not place.fits(
        [{"CPU": NUM_CPUS + 1.0}], data
    )
    place.release()
    assert wait_for_resources(config_of(), lambda: False)["CPU"] == 1.0
    wait_for(lambda: nodes.read_nodes()[0].free["CPU"] == NUM_CPUS)


@pytest.mark.ray
@pytest.mark.release
def test_ray_data_starts_no_node():
    """Its own thresholds, under our environment. Kills: a GPU node for tasks that only
    have to wait, names that Ray does not read.
    """
    code = (
        "from ray.data._internal.cluster_autoscaler import RateBasedClusterAutoscaler"
        " as scaler\n"
    )
    code += (
        "print(min(vars(scaler.DEFAULT_CLUSTER_SCALING_UP_UTIL_THRESHOLD).values()))"
    )
    env = os.environ | ray_env.ENVIRONMENT
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.stdout.strip() == "1000000000.0", told.stderr
