"""What is said and decided while nodes come and go, with Ray's head replaced by a list of nodes."""

import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from pipelines import nodes
from pipelines.nodes import Node, Notices, Waits, await_place, no_images, shortage
from tests.conftest import NUM_CPUS
from tests.pipelines.small import wait_for
from uno.config import Config, override
from uno.errors import ConfigError, Interrupted
from uno.session import resources

BIG, SMALL = ({"CPU": cpus, "memory": 1e9} for cpus in (4.0, 2.0))


def node(name, total, free=None, leaving=False):
    return Node(name, total, total if free is None else free, leaving)


@pytest.fixture
def cluster(monkeypatch):
    """``cluster(states)``: each second the nodes are the next of these; who waits, and what was asked for."""

    def start(*states):
        asked, now, left, current = [], [0.0], list(states), []

        class Place:
            def __init__(self, strategy):
                asked.append(strategy)

            def fits(self, bundles):
                asked.append(bundles)
                now[0] += 1
                assert now[0] < 2000
                room = [node.free.get("CPU", 0) for node in current]
                for bundle in sorted(bundles, key=lambda bundle: -bundle["CPU"]):
                    at = next((i for i, cpus in enumerate(room) if cpus >= bundle["CPU"]), None)
                    if at is None:
                        return False
                    room[at] -= bundle["CPU"]
                return True

            def release(self):
                asked.append("released")

        def look():
            current[:] = left.pop(0) if len(left) > 1 else left[0]
            return list(current)

        monkeypatch.setattr(nodes, "Place", Place)
        monkeypatch.setattr(nodes, "look", look)
        monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
        return asked

    return start


def config_of(**overrides):
    return override(Config(), {"compute.workers": 2, **{f"compute.{k}": v for k, v in overrides.items()}})


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
    assert nodes.look() == []


def test_no_answer_is_no_lack_of_nodes(cluster, monkeypatch, capsys):
    """Kills: "more than the cluster's 0" at the start of a run on a busy machine."""
    monkeypatch.setattr(nodes, "POLL_S", 0)
    cluster([], [node("a", BIG)])
    assert await_place(config_of(), lambda: False, 0.0) == {"CPU": 1.0}
    assert capsys.readouterr().out == ""


def test_shares_are_those_of_the_nodes_that_stay(cluster):
    """Kills: the shares of the start, of which two fill the node that is left, and Ray Data gets nothing."""
    asked = cluster([node("a", SMALL), node("b", SMALL)])
    assert await_place(config_of(), lambda: False) == {"CPU": 1.0}
    assert asked == ["PACK", [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 0.9}], "released"]
    cluster([node("a", SMALL)])
    assert await_place(config_of(), lambda: False) == {"CPU": 0.5}
    cluster([node("a", SMALL), node("b", BIG, leaving=True)])
    assert await_place(config_of(), lambda: False) == {"CPU": 0.5}


def test_nodes_are_waited_for_with_a_line_every_30_s(cluster, capsys):
    """Kills: one line and then silence, a line a second, an end while nodes may come."""
    few, more = [node("a", SMALL)], [node("a", SMALL), node("b", SMALL)]
    asked = cluster(few, *[few] * 95, more)
    assert await_place(config_of(cpus_per_worker=1.0), lambda: False) == {"CPU": 1.0}
    lines = capsys.readouterr().out.splitlines()
    wanted = "wanted are 2 workers of 1 CPU and one CPU for Ray Data; there are 2 CPU (2 free) on 1 node"
    assert lines == [f"waiting for nodes: {wanted}"] * 4  # after 0, 30, 60 and 90 of 96 seconds
    assert asked[-1] == "released"


def test_a_place_that_others_have_is_waited_for(cluster, capsys):
    """At first without a word: what was taken a moment ago comes back. Kills: workers that start into a
    cluster that is in use, and silence.
    """
    busy, free = ([node("a", BIG, {"CPU": cpus})] for cpus in (1.5, 4.0))
    cluster(busy, *[busy] * 9, free)
    assert await_place(config_of(), lambda: False) == {"CPU": 1.0}
    assert capsys.readouterr().out == ""
    cluster(busy, *[busy] * 69, free)
    await_place(config_of(), lambda: False, 0.0)  # whose cluster does not grow
    assert capsys.readouterr().out.count("there are 4 CPU (1.5 free) on 1 node") == 2


def test_waiting_ends_by_a_stop_and_at_the_start_by_the_clock(cluster, capsys, monkeypatch):
    """Kills: a stop that is not heard, a command that waits for nodes of a cluster that cannot grow."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpus = config_of(device="cuda")
    asked = cluster([node("a", BIG)])
    stops = iter([False] * 40 + [True])
    with pytest.raises(Interrupted, match="resume with the same command"):
        await_place(gpus, lambda: next(stops))
    assert asked[1] == [{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 0.9}] and asked[-1] == "released"
    assert "0 GPU (0 free) on 1 node" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="need 2 GPUs, the cluster has 0"):
        await_place(gpus, lambda: False, nodes.growth_s())
    assert nodes.growth_s() == 0 and capsys.readouterr().out == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="need 2 GPUs, the cluster has 0"):
        await_place(gpus, lambda: False, nodes.growth_s())
    assert capsys.readouterr().out.count("waiting up to 10 minutes for nodes: wanted are 2 workers") == 20
    cluster([node("a", BIG, {"CPU": 1.5})])
    with pytest.raises(ConfigError, match=r"there are 4 CPU \(1.5 free\)"):
        await_place(config_of(), lambda: False, nodes.growth_s())


def test_what_is_there_is_said_without_the_nodes_that_leave():
    found = shortage(
        {"CPU": 1.0, "GPU": 1.0}, 1, [node("a", BIG, {"CPU": 0.1}), node("b", BIG, leaving=True)]
    )
    there = "there are 4 CPU (0.1 free), 0 GPU (0 free) on 1 node, 1 more told to leave"
    assert found == f"wanted are 1 worker of 1 CPU, 1 GPU and one CPU for Ray Data; {there}"


def test_a_node_that_leaves_is_noticed_once_and_only_where_workers_are(monkeypatch):
    """Kills: a request at every poll, a checkpoint for a node of another run, two of them for one notice."""
    now, looks, found, hosts = [0.0], [], [node("a", BIG)], {"a"}

    def look():
        looks.append(now[0])
        return found

    monkeypatch.setattr(nodes, "look", look)
    monkeypatch.setattr(nodes, "LOOK_S", 5)
    notices = Notices(lambda: hosts, lambda: now[0])
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


def test_images_that_do_not_come_are_said_for_as_long_as_they_do_not_come(monkeypatch, caplog):
    """Kills: silence while Ray Data has no CPU, lines while a step computes, before a wait and after."""
    monkeypatch.setattr(nodes, "look", lambda: [node("a", BIG, {"CPU": 0.2}), node("b", BIG, leaving=True)])
    assert (
        no_images(31)
        == "no images for 31 s: a task of Ray Data takes 0.9 CPU, no node has more than 0.2 free"
    )
    monkeypatch.setattr(nodes, "look", lambda: [node("a", BIG)])
    assert no_images(60).endswith("takes 0.9 CPU, a node has 4 free")
    waits, told = Waits(lambda waited: f"waited {waited:.2f}", every_s=0.03), []
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


@pytest.mark.parametrize(("answers", "cpus", "expected"), [
    ([(9e9, 8e9), (5e9, 8e10)], 4, (5e9, 8e9)),
    ([(9e9, None), (8e9, None)], 4, (8e9, None)),
    ([(9e9, 8e9), "late"], 4, (9e9, 8e9)),
    (["late", "late"], 4, (1e9, None)),
    ([], 1, (1e9, None)),
])  # fmt: skip
def test_memory_is_that_of_the_nodes_of_the_workers(monkeypatch, answers, cpus, expected):
    """Asked with what a worker takes. Kills: the head's own memory, which has no GPU, for the workers'; the
    most of any node; waiting for a node that does not come.
    """
    asked, cancelled, left = [], [], list(answers)

    def remote(**options):
        def make(function):
            return SimpleNamespace(remote=lambda tree: asked.append((options, tree)) or left.pop(0))

        return make

    def wait(pending, num_returns, timeout):
        assert num_returns == 2 and timeout
        return [a for a in pending if a != "late"], [a for a in pending if a == "late"]

    ray = SimpleNamespace(
        remote=remote, wait=wait, get=lambda done: done, cancel=cancelled.append,
        cluster_resources=lambda: {"CPU": cpus, "GPU": 2},
    )  # fmt: skip
    monkeypatch.setattr(nodes, "connect", lambda: nullcontext(ray))
    monkeypatch.setattr(resources, "free_host_bytes", lambda: int(1e9))
    monkeypatch.setattr(resources, "free_device_bytes", lambda config: None)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    config = override(Config(), {"compute.workers": 2})
    assert nodes.free_memory(config) == expected
    assert len(asked) == len(answers) and cancelled == [a for a in answers if a == "late"]
    for options, tree in asked:
        assert (options["num_cpus"], options["num_gpus"]) == (1, 1) and tree["compute"]["workers"] == 2
    asked.clear()
    assert nodes.free_memory(override(config, {"compute.workers": 0})) == (1e9, None) and not asked
    monkeypatch.delenv("RAY_ADDRESS")
    assert nodes.free_memory(config) == (1e9, None) and not asked


def test_a_worker_counts_its_share_of_a_gpu(monkeypatch):
    """Kills: two workers on one GPU that each count the whole."""
    monkeypatch.setattr(resources, "free_device_bytes", lambda config: 1000)
    for share, expected in ((0.25, 250), (1, 1000), (2, 1000)):
        config = override(Config(), {"compute.gpus_per_worker": share})
        assert nodes.free_memory(config)[1] == expected


@pytest.mark.ray
def test_ray_answers_a_worker_and_us(ray_cluster):
    """Kills: a name of Ray's internals that is not Ray's, a place that stays taken."""
    line = ray_cluster.get(ray_cluster.remote(no_images).remote(31))
    assert line.startswith("no images for 31 s: a task of Ray Data takes 0.9 CPU, ")
    (found,) = nodes.look()
    assert found.total["CPU"] == NUM_CPUS and not found.leaving and nodes.hosts(ray_cluster) == set()
    place = nodes.Place("PACK")
    assert place.fits([{"CPU": 1.0}]) and not place.fits([{"CPU": NUM_CPUS + 1.0}])
    place.release()
    assert await_place(config_of(), lambda: False)["CPU"] == 1.0
    wait_for(lambda: nodes.look()[0].free["CPU"] == NUM_CPUS)
