"""What is said and decided while nodes come and go, with a cluster that is made up."""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pipelines import backend, nodes, pack, ray_env, workarounds
from pipelines.nodes import wait_for_resources
from pipelines.predict import map_through_model
from pipelines.tasks import wait_for_task
from reproduce import tables
from uno.config import Config, override
from uno.data.files import Storage
from uno.errors import ConfigError, Interrupted
from uno.results.estimate import Settings
from uno.session import resources
from uno.session.resources import FreeMemory
from uno.session.run import Run


def config_of(**overrides):
    return override(
        Config(),
        {"compute.num_workers": 2, **{f"compute.{k}": v for k, v in overrides.items()}},
    )


@pytest.fixture
def cluster(monkeypatch):
    """``cluster(*resources)``: what a made-up cluster that grows has each second, the
    last of them for good. Returns the placement groups that were asked for, and those
    removed.
    """

    def start(*resources):
        now, left, groups = [0.0], list(resources), []

        def has():
            now[0] += 1
            return left.pop(0) if len(left) > 1 else left[0]

        for name, value in (
            ("cluster_resources", has),
            ("available_resources", lambda: {"CPU": 1.5}),
            ("nodes", lambda: [{"Alive": True}]),
            ("util.placement_group", lambda bundles, **_: groups.append(bundles) or 1),
            ("util.remove_placement_group", groups.append),
        ):
            monkeypatch.setattr(f"ray.{name}", value)
        monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(nodes.time, "sleep", lambda seconds: None)
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        return groups

    return start


def test_nodes_are_waited_for_with_a_line_every_30_s(cluster, capsys):
    """The autoscaler learns what is needed by a placement group."""
    groups = cluster(*[{}] * 40, {"CPU": 4.0, "GPU": 2.0})
    found = wait_for_resources(config_of(device="cuda", wait_minutes=10), lambda: False)
    assert found == {"CPU": 1.0, "GPU": 1.0}
    assert groups == [[{"CPU": 1.0, "GPU": 1.0}] * 2, 1]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("waiting up to 10 minutes for nodes: 2 workers with 1 ")
    assert "the cluster has 0 CPU (1.5 free), 0 GPU" in second


@pytest.mark.parametrize(("address", "num_calls"), [("head:6379", 2), ("local", 0)])
def test_a_wait_for_nodes_ends_by_the_clock(cluster, monkeypatch, address, num_calls):
    """A private cluster, which cannot grow, is not waited for."""
    groups = cluster({"CPU": 4.0})
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match="need 2 GPUs, the cluster has 0"):
        wait_for_resources(config_of(device="cuda", wait_minutes=1), lambda: False)
    assert len(groups) == num_calls


def test_a_wait_for_nodes_ends_by_a_stop(cluster):
    cluster({"CPU": 4.0})
    with pytest.raises(Interrupted, match="resume with the same command"):
        wait_for_resources(config_of(device="cuda"), lambda: True)


def test_predictions_and_features_wait_for_nodes_too(cluster, capsys):
    """Kills: a run that ends after training because idle nodes left while its model
    was aligned.
    """
    cluster({})
    config = config_of(wait_minutes=2)
    found = map_through_model(None, config, iter([]), None, object, (), 512, 192)
    with pytest.raises(ConfigError, match="need more than the cluster's 0"):
        next(found)
    assert "waiting up to 2 minutes for nodes" in capsys.readouterr().out


def estimate(ray, config, monkeypatch):
    estimator = Mock()
    monkeypatch.setattr(backend.ray_env, "connect", lambda **_: nullcontext(ray))
    monkeypatch.setattr(backend, "estimated_set", lambda *_: None)
    monkeypatch.setattr(backend.estimate, "estimate_num_novel", estimator)
    opened = Mock(rows=range(10))
    run = Run(config, Storage("unused"), backend.RayBackend(), opened=opened)
    run.backend.estimate(run, Settings())
    return estimator.call_args.args[4]


def pack_data(ray, config, monkeypatch):
    pack.store_on_ray(
        ray, override(config, {"output": "s3://bucket/packed?region=us-east-1"})
    )


def reproduce(ray, config, monkeypatch):
    monkeypatch.setattr(tables.ray_env, "connect", lambda: nullcontext(ray))
    own = SimpleNamespace(runner="ray", parallel=None)
    compute = config.compute.model_copy(update={"num_workers": 0})
    with tables.cell_runner(SimpleNamespace(compute=compute, args=own)) as (
        run,
        number,
    ):
        return run.args[1]["num_gpus"], number


def tune(ray, config, monkeypatch):
    return wait_for_task(ray, config)


@pytest.mark.parametrize(
    ("command", "device", "found"),
    [
        (estimate, "auto", "cuda"),
        (estimate, "cuda", "cuda"),
        (pack_data, "cuda", None),
        (reproduce, "cuda", (1.0, 2)),
        (reproduce, "auto", (1.0, 2)),
        (tune, "cuda", {"num_cpus": 1, "num_gpus": 1.0}),
    ],
)
def test_the_first_task_of_a_command_waits_for_its_node(
    monkeypatch, command, device, found
):
    """On a cluster that has a head without CPUs when it is asked, and two GPUs a while
    later. Kills: "the cluster has 0", cells on CPUs whose device is cuda, a wait of a
    private cluster, which does not grow.
    """
    wait = Mock()
    monkeypatch.setattr(nodes, "wait_for_resources", wait)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    ray = Mock()
    ray.cluster_resources.side_effect = [{}, {"CPU": 4.0, "GPU": 2.0}, {}]
    assert command(ray, config_of(device=device), monkeypatch) == found
    ((config, _),) = (call.args for call in wait.call_args_list)
    assert config.compute.wait_minutes == 30
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ConfigError, match=r"the cluster has 0|the cluster.s 0"):
        command(ray, config_of(device="cuda"), monkeypatch)


def test_images_that_this_machine_cannot_hold_are_refused(monkeypatch):
    """Workers get the images of an estimate from this process."""
    config = override(config_of(), {"data.stored_size": 10})
    monkeypatch.setattr(resources, "free_host_bytes", lambda: 6 * 10**5)
    backend.check_driver_memory(config, 1000)
    with pytest.raises(ConfigError, match="1,001 images need"):
        backend.check_driver_memory(config, 1001)


@pytest.mark.parametrize(
    ("overrides", "nodes_of", "cpus"),
    [
        ({}, [{"CPU": 96.0, "GPU": 8.0}, {"CPU": 4.0}], 12),
        ({}, [{"CPU": 96.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}], 8),
        ({"gpus_per_worker": 2}, [{"CPU": 96.0, "GPU": 8.0}], 24),
        ({"cpus_per_worker": 3}, [{"CPU": 96.0, "GPU": 8.0}], 3),
    ],
)
def test_workers_that_stream_reserve_the_cpus_that_decode(
    monkeypatch, overrides, nodes_of, cpus
):
    alive = [{"Alive": True, "Resources": resources} for resources in nodes_of]
    monkeypatch.setattr("ray.nodes", lambda: alive)
    compute = config_of(**overrides).compute
    each = {"CPU": compute.cpus_per_worker or 1.0, "GPU": compute.gpus_per_worker}
    found = nodes.with_decoding(config_of(**overrides), each)
    assert found == {**each, "CPU": cpus}
    assert nodes.with_decoding(config_of(**overrides), {"CPU": 0.5}) == {"CPU": 0.5}


def test_shards_that_must_be_here_need_a_cpu_here():
    """Kills: a command that waits for ever, on a head whose CPUs Ray may not have."""
    ray = Mock(**{"get_runtime_context.return_value.get_node_id.return_value": "a"})
    ray.nodes.return_value = [
        {"NodeID": "a", "Resources": {}},
        {"NodeID": "b", "Resources": {"CPU": 4.0}},
    ]
    config = override(config_of(), {"output": "packed"})
    line = "--output packed is local, where Ray has no CPUs"
    with pytest.raises(ConfigError, match=line):
        pack.store_on_ray(ray, config)
    ray.nodes.return_value[0]["Resources"] = {"CPU": 1.0}
    assert pack.store_on_ray(ray, config)


def test_workers_on_gpus_have_more_than_none_of_one():
    config = override(config_of(gpus_per_worker=0), {"compute.device": "cuda"})
    with pytest.raises(ConfigError, match="--gpus-per-worker above 0"):
        ray_env.use_gpu(config, {"GPU": 4})


def test_workers_of_one_run_do_not_share_a_gpu():
    """NCCL ends with "Duplicate GPU detected", after three groups. Predictions may
    share one.
    """
    halves, each = config_of(gpus_per_worker=0.5), {"CPU": 1.0, "GPU": 0.5}
    nodes.check_shares(halves, {"CPU": 1.0})
    nodes.check_shares(override(halves, {"compute.num_workers": 1}), each)
    on_gpus = override(halves, {"compute.device": "cuda"})
    for config, resources_of_one in ((halves, each), (on_gpus, None)):
        with pytest.raises(ConfigError, match=r"NCCL .*: use --gpus-per-worker 1"):
            nodes.check_shares(config, resources_of_one)


@pytest.mark.parametrize(
    ("answers", "late", "expected"),
    [
        ([FreeMemory(9e9, 8e9), FreeMemory(5e9, 8e10)], [], (5e9, 8e9, 3e8, 1e9)),
        ([FreeMemory(9e9), FreeMemory(8e9)], [], (8e9, None, 3e8, 1e9)),
        ([FreeMemory(9e9, 8e9)], ["late"], (9e9, 8e9, 3e8, 1e9)),
        ([], ["late", "late"], (1e9, None, 3e8, None)),
    ],
)
def test_memory_is_that_of_the_nodes_of_the_workers(
    monkeypatch, answers, late, expected
):
    """Nodes are waited for, where a cluster has none yet; a task takes what a worker
    takes. The least memory counts, of all nodes that answer.
    """
    ray = Mock(get=list)
    ray.wait.return_value = answers, late
    stores = (9e8, True), (3e8, True), (1e8, False)
    ray.nodes.return_value = [
        {"Resources": {"object_store_memory": n}, "Alive": alive} for n, alive in stores
    ]
    monkeypatch.setattr(nodes, "connect", lambda: nullcontext(ray))
    each = {"CPU": 1.0, "GPU": 1.0}
    monkeypatch.setattr(nodes, "wait_for_resources", lambda *_: each)
    monkeypatch.setattr(resources, "free_host_bytes", lambda: int(1e9))
    monkeypatch.setattr(resources, "free_device_bytes", lambda config: None)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert nodes.free_memory(config_of()) == expected
    assert [call.args for call in ray.cancel.call_args_list] == [(x,) for x in late]
    assert ray.wait.call_args.kwargs["timeout"]
    assert nodes.free_memory(config_of(num_workers=0)) == FreeMemory(1e9)
    monkeypatch.delenv("RAY_ADDRESS")
    assert nodes.free_memory(config_of()) == FreeMemory(1e9)


@pytest.mark.parametrize(("share", "num_bytes"), [(0.25, 250), (1, 1000), (2, 1000)])
def test_a_worker_counts_its_share_of_a_gpu(monkeypatch, share, num_bytes):
    """Kills: two workers on one GPU that each count the whole."""
    monkeypatch.setattr(resources, "free_device_bytes", lambda config: 1000)
    config = override(Config(), {"compute.gpus_per_worker": share})
    assert nodes.free_memory(config).device == num_bytes


@pytest.mark.ray
def test_ray_answers_a_worker_and_us(ray_cluster, monkeypatch):
    """Kills: a name of Ray's internals that is not Ray's, a place that stays taken."""
    monkeypatch.setattr(workarounds, "GONE", ())  # no fall-back
    workarounds.start_shared_actors()
    found = ray_cluster.util.list_named_actors(all_namespaces=True)
    names = {actor["name"] for actor in found}
    assert {"AutoscalingCoordinator", "ActorLocationTracker"} <= names
    with workarounds.cluster_of_helpers():
        assert os.environ["RAY_ADDRESS"]
    assert wait_for_resources(config_of(), lambda: False)["CPU"] == 1.0
