"""Two nodes, of which one dies, is told to leave, or does not see the run directory."""

from collections.abc import Iterator

import pytest

from tests.pipelines.raylets import Command, Raylets, head
from tests.pipelines.small import (
    INTERVAL,
    LONG,
    assert_as_undisturbed,
    newest_step,
    wait_for,
)
from uno.data.files import Storage

pytestmark = [pytest.mark.ray, pytest.mark.release, pytest.mark.timeout(600)]

SPREAD = [
    "pipelines",
    "discover",
    *LONG,
    "--workers",
    "2",
    "--compute.placement_strategy",
    "SPREAD",
]
WAITS = "waiting for 2 workers with 1.5 CPU each"


@pytest.fixture
def nodes() -> Iterator[Raylets]:
    """A head of 2 CPUs."""
    with head(2) as raylets:
        yield raylets


def test_nodes_die_come_and_are_told_to_leave(two, nodes, tmp_path):
    """A directory that the second node does not see is refused before a step is
    trained. Then its raylet is killed, and the first has no room for both workers:
    another one comes, is told to leave, and the run, which waits again, is stopped. The
    same command with room on the first node outlives the kill of a third.
    """
    storage = Storage(str(tmp_path / "run"))
    argv = [*SPREAD, "--data.loading", "streaming", "--output", storage.root]
    narrow = [*argv, "--compute.cpus-per-worker", "1.5"]

    unused = tmp_path / "unused"
    unused.mkdir()
    nodes.join(2, unused)
    if nodes.real:  # network namespaces need root
        command = Command(
            [*SPREAD, "--output", str(unused / "run")], nodes.env, tmp_path / "unseen"
        )
        assert command.end() == 4, command.lines
        last = command.lines[-1]
        assert (
            last.startswith("uno: error: ")
            and "is not on storage that all nodes share" in last
        )
        assert not (unused / "run" / "checkpoints").exists()

    command = Command(narrow, nodes.env, tmp_path / "log")
    wait_for(lambda: command.says("") and newest_step(storage) > 0)
    nodes.lose()
    wait_for(lambda: command.says(WAITS))
    assert command.says("workers died (a worker process or its node was lost)")
    deaths = 1
    # where the notice comes while processes of the group start, these may die of it
    for _ in range(3):
        nodes.join(2)
        tell_to_leave = nodes.notice(90)
        before = newest_step(storage)
        wait_for(
            lambda before=before: (
                newest_step(storage) > before or command.code is not None
            )
        )
        waited = command.count(WAITS)
        tell_to_leave()
        wait_for(
            lambda waited=waited: (
                command.count(WAITS) > waited or command.code is not None
            )
        )
        if command.says("a node is being drained"):
            break
        deaths += 1
    assert (
        command.says("a node is being drained")
        and command.count("workers died") == deaths
    )
    saved = newest_step(storage)
    command.stop()
    assert command.end() == 75 and command.says("resume with the same command"), (
        command.lines
    )

    nodes.join(2)
    again = Command(argv, nodes.env, tmp_path / "again")
    wait_for(lambda: again.says("") and newest_step(storage) > saved + 4 * INTERVAL)
    nodes.lose()
    assert again.end() == 0, again.lines
    assert again.says("was lost); new ones resume from the newest checkpoint")
    assert again.says(f"resuming at discover step {saved}")
    assert_as_undisturbed(tmp_path / "run", two)
    # streamed and resident
    results = [(run / "metrics.json").read_text() for run in (tmp_path / "run", two)]
    assert results[0] == results[1] and "baseline/kmeans/novel/acc" in results[0]
