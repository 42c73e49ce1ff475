"""Kill a part of a run at random moments: it ends as an undisturbed run does.

    OMP_NUM_THREADS=1 python -m tests.chaos --kill worker node driver --moments 20

The run trains two workers on a Ray cluster of two nodes on this machine. SIGKILL ends a
worker, the raylet of a node, or the command itself. A run is killed again and again
until it ends between two kills; further runs follow until there were enough kills. A
command that ends with code 75, or that was killed, is started again, as a scheduler
would. Each run prints a line with its moments. The exit code is 1 if a run did not end
with code 0, or if its weights, journal or metrics differ from those of the undisturbed
run.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.pipelines.raylets import Command, Raylets, head
from tests.pipelines.small import LONG, assert_as_undisturbed
from uno.errors import Interrupted

RUN = ["pipelines", "discover", *LONG, "--workers", "2"]
SPREAD = ["--compute.placement-strategy", "SPREAD"]
CPUS = 2  # of each node: a run goes on after the loss of one
LIMIT_S = 900.0  # a run that takes longer is ended, which is a fault


def kill_worker(nodes: Raylets, command: Command) -> bool:
    """Kill a training worker, the next one that starts if none runs at the moment.

    Returns:
        Whether one was killed. None is if the command ends before another one starts.
    """
    workers: list[int] = []
    while command.code is None and not workers:
        workers = nodes.processes_of("ray::RayTrainWorker")
        time.sleep(0.1)
    try:
        for pid in workers[:1]:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return False
    return bool(workers)


def kill_node(nodes: Raylets, command: Command) -> bool:
    """Kill the raylet of a node, which another node replaces, and return True."""
    nodes.lose()
    nodes.join(CPUS)
    return True


def kill_driver(nodes: Raylets, command: Command) -> bool:
    """Kill the command, and return whether it had not ended before."""
    command.kill()
    return command.end() == -signal.SIGKILL


KILLS: dict[str, Callable[[Raylets, Command], bool]] = {
    "worker": kill_worker,
    "node": kill_node,
    "driver": kill_driver,
}


def start_run(nodes: Raylets, folder: Path) -> Command:
    words = [*RUN, *SPREAD, "--output", str(folder / "run")]
    return Command(words, nodes.env, folder / "log.txt")


def find_fault(command: Command, folder: Path, undisturbed: Path) -> str:
    """Return what is wrong with a run, "" if nothing is."""
    if command.code != 0:
        return f"exit code {command.code}: {command.lines[-1:]}"
    try:
        assert_as_undisturbed(folder / "run", undisturbed / "run")
        found, expected = (
            (each / "run" / "metrics.json").read_text()
            for each in (folder, undisturbed)
        )
        assert found == expected, "metrics.json"
    except AssertionError as error:
        return f"differs from the undisturbed run: {str(error)[:300]}"
    return ""


def disturb(
    kind: str,
    num_kills: int,
    mean: float,
    chance: random.Random,
    nodes: Raylets,
    folder: Path,
) -> tuple[Command, list[float]]:
    """Train a run in ``folder`` to its end, and kill a part of it on the way.

    Args:
        kind: What is killed, a key of ``KILLS``.
        num_kills: The largest number of kills.
        mean: Mean seconds from the start, or from one kill, to the next kill.
        chance: Draws these seconds, uniformly from 0 to twice the mean.
        nodes: The cluster.
        folder: A folder that does not exist yet.

    Returns:
        The command that has ended last, and the seconds before each kill.
    """
    folder.mkdir()
    moments: list[float] = []
    for _ in range(2 * num_kills + 1):
        command = start_run(nodes, folder)
        while command.code is None and len(moments) < num_kills:
            moment = chance.uniform(0, 2 * mean)
            wait_for_end(command, moment)
            if command.code is None and KILLS[kind](nodes, command):
                moments.append(moment)
        was_killed = command.end(LIMIT_S) == -signal.SIGKILL and kind == "driver"
        if command.code != Interrupted.exit_code and not was_killed:
            break
    return command, moments


def wait_for_end(command: Command, seconds: float) -> None:
    """Return when the command has ended, or after ``seconds``."""
    end = time.monotonic() + seconds
    while command.code is None and time.monotonic() < end:
        time.sleep(0.05)


def main() -> int:
    """Kill, compare and print; return 1 if a run is not as the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kill", nargs="+", choices=KILLS, default=[*KILLS])
    parser.add_argument("--moments", type=int, default=1, help="of each kind of kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # the cluster ends with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chance, num_runs, num_faults = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as name, head(CPUS) as nodes:
        nodes.join(CPUS)
        undisturbed = Path(name, "undisturbed")
        undisturbed.mkdir()
        start = time.monotonic()
        command = start_run(nodes, undisturbed)
        assert command.end(LIMIT_S) == 0, command.lines[-1:]
        seconds = time.monotonic() - start
        print(f"the undisturbed run took {seconds:.0f} s", flush=True)
        for kind in options.kill:
            num_left = options.moments
            while num_left > 0:
                num_runs += 1
                folder = Path(name, f"{num_runs}")
                command, moments = disturb(
                    kind, num_left, seconds / 2, chance, nodes, folder
                )
                num_left -= len(moments)
                fault = find_fault(command, folder, undisturbed)
                num_faults += bool(fault)
                after = ", ".join(f"{moment:.1f} s" for moment in moments)
                what = f"killed after {after}" if moments else "not killed in time"
                print(f"{kind} {what}: {fault or 'same weights'}", flush=True)
    print(f"{num_runs} runs, {num_faults} faults")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
