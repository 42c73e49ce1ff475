"""Two nodes of which one dies, is told to leave, or does not see the run directory."""

from collections.abc import Iterator

import pytest

from tests.pipelines.raylets import Command, Raylets, head
from tests.pipelines.small import LONG, assert_as_undisturbed, wait_for
from uno.data.files import Storage
from uno.runs import DISCOVER, faults
from uno.runs.checkpoint import checkpoint_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SPREAD = ["pipelines.discover", *LONG, "--workers", "2", "--compute.placement", "SPREAD"]
WAITS = "waiting for nodes: wanted are 2 workers of 1 CPU"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Raylets]:
    """A head of 2 CPUs; each test brings a second node, which is gone at its end."""
    with head(2) as raylets:
        yield raylets


@pytest.fixture
def unused(tmp_path):
    (tmp_path / "unused").mkdir()
    return tmp_path / "unused"


def test_storage_that_one_machine_does_not_see_and_a_node_that_dies(two, nodes, tmp_path, unused):
    """Storage: said before a step is trained. kill -9 of the second node's raylet in a streamed run: both
    workers go on on the first. Kills: an epoch trained before anyone notices; workers that keep the share of
    before, which leaves Ray Data no CPU there.
    """
    nodes.join(2, unused)
    if nodes.real:  # network namespaces need root
        command = Command([*SPREAD, "--output", str(unused / "run")], nodes.env, tmp_path / "unseen")
        assert command.end() == 4, command.lines
        last = command.lines[-1]
        assert last.startswith("uno: error: ") and "is not on storage that all nodes share" in last
        assert not (unused / "run" / "checkpoints").exists()
    argv = [*SPREAD, "--data.ingest", "streaming", "--output", str(tmp_path / "run")]
    command = Command(argv, {**nodes.env, faults.VARIABLE: "kill-node:step=100"}, tmp_path / "log")
    assert command.end() == 0, command.lines
    assert command.says("was lost); new ones resume from the newest checkpoint")
    assert_as_undisturbed(tmp_path / "run", two, 1)
    results = [(run / "metrics.json").read_text() for run in (tmp_path / "run", two)]  # streamed and resident
    assert results[0] == results[1] and "baseline/kmeans/novel/acc" in results[0]


def test_nodes_die_come_and_are_told_to_leave(two, nodes, tmp_path, unused):
    """The first node has no room for both workers. The second dies, another one comes, is told to leave, and
    the run, which then waits, is stopped and finished by the same command. Kills: an end while nodes
    may come, workers without a share, steps trained twice after a notice.
    """
    storage = Storage(str(tmp_path / "run"))
    argv = [*SPREAD, "--compute.cpus-per-worker", "1", "--output", storage.root]
    env = {faults.VARIABLE: "kill-node:step=2"}

    def starts():
        events = faults.read_events(storage)
        return [event["step"] for event in events if (event["event"], event["phase"]) == ("start", DISCOVER)]

    nodes.join(2, unused)
    command = Command(argv, env | nodes.env, tmp_path / "log")
    wait_for(lambda: command.says(WAITS))
    assert command.says("workers died (a worker process or its node was lost)")
    nodes.join(2)
    wait_for(lambda: len(starts()) == 2 or command.code is not None)
    waited = command.count(WAITS)
    nodes.tell_to_leave(90)
    wait_for(lambda: command.count(WAITS) > waited or command.code is not None)
    assert command.says("a node was told to leave") and command.count("workers died") == 1
    reached = checkpoint_steps(storage, DISCOVER)[-1]
    command.stop()
    assert command.end() == 75 and command.says("resume with the same command"), command.lines
    nodes.join(2)
    again = Command(argv, env | nodes.env, tmp_path / "again")
    assert again.end() == 0, again.lines
    assert len(starts()) == 3 and starts()[0] == 0 and starts()[-1] == reached
    assert_as_undisturbed(tmp_path / "run", two, 1)
