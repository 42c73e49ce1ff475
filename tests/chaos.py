"""Kill a part of a run at random moments: it ends as an undisturbed run does.

    OMP_NUM_THREADS=1 python -m tests.chaos --kill worker node driver --moments 20

The run trains two workers on a Ray cluster of two nodes on this machine. SIGKILL ends a
worker, the raylet of a node, or the command itself, which is then started again. Each
kill prints a line with its moment. The exit code is 1 if a run did not end with code 0,
or if its weights, journal or metrics differ from those of the undisturbed run.
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

RUN = ["pipelines", "discover", *LONG, "--workers", "2"]
SPREAD = ["--compute.placement-strategy", "SPREAD"]
CPUS = 2  # of each node: a run goes on after the loss of one
LIMIT_S = 900.0  # a run that takes longer is ended, which is a fault


def kill_worker(nodes: Raylets, command: Command) -> None:
    """Kill a training worker, the next one that starts if none runs at the moment."""
    workers: list[int] = []
    while command.code is None and not workers:
        workers = nodes.processes_of("ray::RayTrainWorker")
        time.sleep(0.1)
    for pid in workers[:1]:
        os.kill(pid, signal.SIGKILL)


def kill_node(nodes: Raylets, command: Command) -> None:
    """Kill the raylet of a node, which another node replaces."""
    nodes.lose()
    nodes.join(CPUS)


def kill_driver(nodes: Raylets, command: Command) -> None:
    """Kill the command."""
    command.kill()


KILLS: dict[str, Callable[[Raylets, Command], None]] = {
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


def disturb(kind: str, moment: float, nodes: Raylets, folder: Path) -> Command:
    """Kill a part of a run in ``folder`` after ``moment`` seconds, and finish the run.

    Returns:
        The command that has ended last: the same once more if the driver was killed.
    """
    folder.mkdir()
    command = start_run(nodes, folder)
    time.sleep(moment)
    if command.code is not None:
        print(f"the run has ended before {moment:.1f} s: draw another --seed")
    KILLS[kind](nodes, command)
    if command.end(LIMIT_S) != 0 and kind == "driver":
        command = start_run(nodes, folder)
        command.end(LIMIT_S)
    return command


def main() -> int:
    """Kill, compare and print; return 1 if a run is not as the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kill", nargs="+", choices=KILLS, default=[*KILLS])
    parser.add_argument("--moments", type=int, default=1, help="of each kind of kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # the cluster ends with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chance, faults = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as name, head(CPUS) as nodes:
        nodes.join(CPUS)
        undisturbed = Path(name, "undisturbed")
        undisturbed.mkdir()
        start = time.monotonic()
        command = start_run(nodes, undisturbed)
        assert command.end(LIMIT_S) == 0, command.lines[-1:]
        seconds = time.monotonic() - start
        for kind in options.kill:
            for number in range(options.moments):
                moment = chance.uniform(0, 0.9 * seconds)
                folder = Path(name, f"{kind}-{number}")
                command = disturb(kind, moment, nodes, folder)
                faults.append(find_fault(command, folder, undisturbed))
                end = faults[-1] or "same weights"
                print(f"{kind} killed after {moment:.1f} s: {end}", flush=True)
    num_faults = sum(map(bool, faults))
    print(f"{len(faults)} kills of a run of {seconds:.0f} s, {num_faults} faults")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
