"""Two nodes of which one dies, is told to leave, or does not see the run directory."""

import pytest

from tests.pipelines.raylets import Command, two_nodes
from tests.pipelines.small import LONG, assert_as_undisturbed, wait_for
from uno.data.files import Storage
from uno.runs import DISCOVER, faults
from uno.runs.checkpoint import checkpoint_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SPREAD = ["pipelines.discover", *LONG, "--workers", "2", "--compute.placement", "SPREAD"]
LEAVES_NO_ROOM = ["--compute.cpus-per-worker", "1"]  # of two CPUs


@pytest.fixture
def unused(tmp_path):
    (tmp_path / "unused").mkdir()
    return tmp_path / "unused"


def test_one_of_two_nodes_dies(two, tmp_path, unused):
    """kill -9 of the second node's raylet in a streamed run: both workers go on on the first. Kills: workers
    that keep the share of before, which leaves Ray Data no CPU there.
    """
    with two_nodes(unused, (2, 2)) as nodes:
        argv = [*SPREAD, "--data.ingest", "streaming", "--output", str(tmp_path / "run")]
        command = Command(argv, {**nodes.env, faults.VARIABLE: "kill-node:step=100"}, tmp_path / "log")
        assert command.end() == 0, command.lines
    assert command.says("was lost); new ones resume from the newest checkpoint")
    assert_as_undisturbed(tmp_path / "run", two, 1)


def test_a_node_dies_and_another_one_comes(two, tmp_path, unused):
    """The first has no room for both workers. Kills: an end while nodes may come, workers without a share."""
    with two_nodes(unused, (2, 2)) as nodes:
        argv = [*SPREAD, *LEAVES_NO_ROOM, "--output", str(tmp_path / "run")]
        command = Command(argv, {**nodes.env, faults.VARIABLE: "kill-node:step=100"}, tmp_path / "log")
        wait_for(lambda: command.says("waiting for nodes: wanted are 2 workers of 1 CPU"))
        nodes.join(2)
        assert command.end() == 0, command.lines
    assert_as_undisturbed(tmp_path / "run", two, 1)


def test_a_node_is_told_to_leave_and_a_waiting_run_is_stopped(two, tmp_path, unused):
    """It saves there and then, and trains no step twice; the same command goes on when there is a node."""
    storage = Storage(str(tmp_path / "run"))
    argv = [*SPREAD, *LEAVES_NO_ROOM, "--data.ingest", "streaming", "--output", storage.root]
    with two_nodes(unused, (2, 2)) as nodes:
        env = {**nodes.env, faults.VARIABLE: "nan:step=9999"}  # only to have the starts noted
        command = Command(argv, env, tmp_path / "log")
        wait_for(lambda: (checkpoint_steps(storage, DISCOVER) or [0])[-1] >= 6 or command.code is not None)
        nodes.tell_to_leave(90)
        wait_for(lambda: command.says("waiting for nodes: wanted are 2 workers of 1 CPU"))
        assert command.says("a node was told to leave") and not command.says("workers died")
        reached = checkpoint_steps(storage, DISCOVER)[-1]
        command.stop()
        assert command.end() == 75 and command.says("resume with the same command"), command.lines
        nodes.join(2)
        again = Command(argv, env, tmp_path / "again")
        assert again.end() == 0, again.lines
    starts = [event["step"] for event in faults.read_events(storage) if event["phase"] == DISCOVER]
    assert starts == [0, reached]
    assert_as_undisturbed(tmp_path / "run", two, 0)


def test_storage_that_one_machine_does_not_see(tmp_path):
    """Kills: an epoch trained before anyone notices."""
    with two_nodes(tmp_path) as nodes:
        if not nodes.real:
            pytest.skip("network namespaces need root")
        command = Command([*SPREAD, "--output", str(tmp_path / "run")], nodes.env, tmp_path / "log")
        assert command.end() == 4, command.lines
    last = command.lines[-1]
    assert last.startswith("uno: error: ") and "is not on storage that all nodes share" in last
    assert not (tmp_path / "run" / "checkpoints").exists()
