"""Runs as processes of their own: a queue of jobs, on this machine or in Ray actors.

A job is ``uno pretrain`` or ``uno discover`` with a configuration file, in a directory below one output
directory. How each attempt ended, and after how many seconds, stands in ``attempts.jsonl`` there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipelines import cli
from pipelines.console import on_stop
from uno.config import Config, dump_yaml
from uno.data.files import Storage
from uno.errors import Interrupted, NumericsError

ATTEMPTS = "attempts.jsonl"
PARENT = "UNO_PARENT"  # set by the driver: its process may be gone before this one has imported torch
POLL_S = 0.1
MAX_REASON = 300
UNFINISHED = (Interrupted.exit_code, 130, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL, 137, 143)


@dataclass(frozen=True)
class Job:
    """A run: ``name`` is its directory, ``needs`` that of the one it starts from, ``label`` is for people."""

    name: str
    config: Config
    label: str
    needs: str | None = None


class Ended(NamedTuple):
    """How a process ended."""

    job: Job
    code: int
    seconds: float


@dataclass
class History:
    """What ``attempts.jsonl`` says of a job: seconds of all attempts, exit code and reason of the last."""

    seconds: float = 0.0
    code: int = 0
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether the last attempt ended with an error, rather than being interrupted."""
        return self.code != 0 and self.code not in UNFINISHED

    @property
    def hopeless(self) -> bool:
        """Whether the same command would fail again: training diverged."""
        return self.code == NumericsError.exit_code


def read_history(output: Path) -> dict[str, History]:
    """Every job of ``output`` that was started, by name. A line that a kill cut short is left out."""
    found: dict[str, History] = {}
    path = output / ATTEMPTS
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            job = found.setdefault(entry["job"], History())
            job.seconds += entry["seconds"]
            job.code, job.reason = entry["code"], entry["reason"]
        except (ValueError, KeyError, TypeError):
            continue
    return found


class Runner(Protocol):
    """Where processes run."""

    capacity: int

    def start(self, job: Job, command: list[str], log: Path) -> None:
        """Start a process; its output is appended to ``log``."""

    def wait(self) -> Ended | None:
        """The next process that has ended, or None after a moment."""

    def stop(self) -> None:
        """Ask all processes to save and end."""


class ProcessRunner:
    """Processes of this machine, ``capacity`` at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._running: list[tuple[Job, subprocess.Popen[bytes], float]] = []

    def start(self, job: Job, command: list[str], log: Path) -> None:
        """As Runner."""
        self._running.append((job, _spawn(command, log), time.monotonic()))

    def wait(self) -> Ended | None:
        """As Runner."""
        for entry in self._running:
            job, process, since = entry
            code = process.poll()
            if code is not None:
                self._running.remove(entry)
                return Ended(job, code, time.monotonic() - since)
        time.sleep(POLL_S)
        return None

    def stop(self) -> None:
        """As Runner."""
        for _, process, _ in self._running:
            process.terminate()


class RayRunner:
    """Ray actors on a cluster whose nodes share the output directory, as many as its resources hold.

    Actors, since a task can only be cancelled, and Ray's interrupt may get lost on its way.

    Args:
        ray: the connected module.
        request: ``num_cpus`` and ``num_gpus`` of a process.
        capacity: processes at a time.
    """

    def __init__(self, ray: Any, request: dict[str, float], capacity: int) -> None:
        self.capacity, self._ray = capacity, ray
        self._actor = ray.remote(max_concurrency=2, **request)(_Cell)
        self._running: dict[Any, tuple[Job, Any]] = {}

    def start(self, job: Job, command: list[str], log: Path) -> None:
        """As Runner."""
        cell = self._actor.remote()
        self._running[cell.run.remote(command, str(log))] = job, cell

    def wait(self) -> Ended | None:
        """As Runner. A process whose node is lost counts as interrupted."""
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=1.0)
        if not done:
            return None
        job, _ = self._running.pop(done[0])
        try:
            code, seconds = self._ray.get(done[0])
        except self._ray.exceptions.RayError:
            return Ended(job, Interrupted.exit_code, 0.0)
        return Ended(job, code, seconds)

    def stop(self) -> None:
        """As Runner."""
        for _, cell in self._running.values():
            cell.stop.remote()


class _Cell:
    """A process on whatever node Ray chose; its two methods run side by side."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def run(self, command: list[str], log: str) -> tuple[int, float]:
        since = time.monotonic()
        process = _spawn(command, Path(log))
        while process.poll() is None:
            if self._stopping.wait(POLL_S):
                process.terminate()
                process.wait()
        return process.returncode, time.monotonic() - since

    def stop(self) -> None:
        self._stopping.set()


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:  # a session of its own: Ctrl-C reaches the driver, which forwards it
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, PARENT: str(os.getpid())},
        )


@dataclass
class Queue:
    """Runs ``jobs`` in ``output``, each after the one it needs; ``on_end`` gets every end with its reason."""

    output: Path
    runner: Runner
    on_end: Callable[[Ended, str], None]
    stopping: bool = field(default=False, init=False)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs; one that needs a failed one fails with it.

        Raises:
            Interrupted: after SIGTERM or SIGINT, with all processes saved and ended.
        """
        waiting, running = list(jobs), 0
        ahead = {job.name for job in jobs}
        with on_stop(self._stop):
            while running or (waiting and not self.stopping):
                while running < self.runner.capacity and not self.stopping:
                    job = next((j for j in waiting if j.needs not in ahead), None)
                    if job is None:
                        break
                    waiting.remove(job)
                    self._start(job)
                    running += 1
                ended = self.runner.wait() if running else None
                if ended is None:
                    continue
                running -= 1
                reason = self._note(ended)
                if ended.code == 0:
                    ahead.discard(ended.job.name)
                elif not self.stopping:
                    waiting = self._give_up(ended, reason, waiting)
        if self.stopping:
            raise Interrupted("stopped; resume with the same command")

    def _start(self, job: Job) -> None:
        place = self.output / job.name
        storage = Storage(str(place.parent))
        storage.write(f"{place.name}.yaml", dump_yaml(job.config).encode())
        command = [sys.executable, "-m", "pipelines.cells", place.parent.name, "--config", f"{place}.yaml"]
        self.runner.start(job, [*command, "--output", str(place)], Path(f"{place}.log"))

    def _note(self, ended: Ended) -> str:
        """Add a line to ``attempts.jsonl``, and say why a process failed."""
        reason = "" if ended.code == 0 else last_line(Path(f"{self.output / ended.job.name}.log"))
        entry = {
            "job": ended.job.name, "seconds": round(ended.seconds, 2), "code": ended.code, "reason": reason
        }  # fmt: skip
        Storage(str(self.output)).append(ATTEMPTS, (json.dumps(entry) + "\n").encode())
        self.on_end(ended, reason)
        return reason

    def _give_up(self, ended: Ended, reason: str, waiting: list[Job]) -> list[Job]:
        """The jobs that do not need the one that ended; the others are noted as failed with it."""
        for job in [job for job in waiting if job.needs == ended.job.name]:
            entry = {"job": job.name, "seconds": 0.0, "code": ended.code, "reason": f"pretraining: {reason}"}
            Storage(str(self.output)).append(ATTEMPTS, (json.dumps(entry) + "\n").encode())
            self.on_end(Ended(job, ended.code, 0.0), entry["reason"])  # type: ignore[arg-type]
        return [job for job in waiting if job.needs != ended.job.name]

    def _stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.runner.stop()


def last_line(log: Path) -> str:
    """The last line a process wrote, without our prefix."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    line = lines[-1].removeprefix("uno: ").removeprefix("error: ") if lines else "it left no message"
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 1]}…"


# --------------------------------------------------------------------------------------------- in the process
def main(argv: Sequence[str]) -> int:
    """``python -m pipelines.cells pretrain|cells --config FILE --output DIR``: one job."""
    from pipelines.jobs import run_job
    from pipelines.options import parse

    threading.Thread(target=end_with_parent, daemon=True).start()
    kind, *rest = argv
    if kind == "pretrain":
        return run_job(parse(rest, "pretrain"), ("pretrain",), evaluate=False)
    return run_job(parse(rest, "discover"), ("pretrain", "discover"), evaluate=True, report=False)


def end_with_parent() -> None:
    """Save and end when the driver was killed: nobody would note the result."""
    while os.environ.get(PARENT, "") in ("", str(os.getppid())):
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    cli.run(main)
