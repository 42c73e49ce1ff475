"""Runs as processes of their own, on this machine or in Ray actors, each after the one it starts from; the
output's ``attempts.jsonl`` notes how each attempt ended, and after how many seconds.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines import cli
from pipelines.commands import DISCOVER, PRETRAIN
from pipelines.features import fill_cache
from pipelines.jobs import OnRay
from pipelines.options import parse
from uno.config import Config, dump_yaml
from uno.data.files import Storage
from uno.errors import Interrupted
from uno.runs.journal import read_journal
from uno.session.console import on_stop
from uno.session.job import discover

ATTEMPTS = "attempts.jsonl"
PARENT = "UNO_PARENT"  # set by the driver: its process may be gone before this one has imported torch
POLL_S = 0.1
UNFINISHED = (Interrupted.exit_code, 130, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL, 137, 143)


class Job(NamedTuple):
    """A run: ``name`` is its directory, ``needs`` that of the one it starts from, ``label`` is for people."""

    name: str
    config: Config
    label: str
    needs: str | None = None


class Attempts(NamedTuple):
    """What ``attempts.jsonl`` says of a job: seconds of all attempts, exit code and reason of the last."""

    seconds: float = 0.0
    code: int = 0
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether the last attempt ended with an error, rather than being interrupted."""
        return self.code != 0 and self.code not in UNFINISHED


def read_attempts(output: Path) -> dict[str, Attempts]:
    """Every job of ``output`` that was started, by name."""
    found: dict[str, Attempts] = {}
    for entry in read_journal(Storage(str(output)), ATTEMPTS):
        seconds = found.get(entry["job"], Attempts()).seconds + entry["seconds"]
        found[entry["job"]] = Attempts(seconds, entry["code"], entry["reason"])
    return found


def start_here(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A process of this machine; it ends with the driver."""
    with log.open("ab") as file:  # a session of its own: Ctrl-C reaches the driver, which forwards it
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, PARENT: str(os.getpid())},
        )  # fmt: skip


class RayProcess:
    """A process on whatever node has room for its ``resources``, with the methods of a ``Popen``. It runs in
    an actor: a task can only be cancelled, and Ray's interrupt may get lost on its way.
    """

    def __init__(self, ray: Any, resources: dict[str, float], command: list[str], log: Path) -> None:
        self._ray = ray
        self._actor = ray.remote(max_concurrency=2, **resources)(_Actor).remote()
        self._code = self._actor.run.remote(command, str(log))

    def poll(self) -> int | None:
        """Exit code, None while it runs; one whose node is lost counts as interrupted."""
        if not self._ray.wait([self._code], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._code))
        except self._ray.exceptions.RayError:
            return Interrupted.exit_code

    def terminate(self) -> None:
        """Ask it to save and end."""
        self._actor.stop.remote()


class _Actor:
    """Its two methods run side by side."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def run(self, command: list[str], log: str) -> int:
        process = start_here(command, Path(log))
        while process.poll() is None:
            if self._stopping.wait(POLL_S):
                process.terminate()
                process.wait()
        return process.returncode

    def stop(self) -> None:
        self._stopping.set()


Process = subprocess.Popen[bytes] | RayProcess
Start = Callable[[list[str], Path], Process]  # starts a command whose output is appended to a file


def run_jobs(
    jobs: Sequence[Job], output: Path, start: Start, capacity: int
) -> Iterator[tuple[Job, Attempts]]:
    """Run all jobs in ``output``, ``capacity`` at a time; yields every one that ended, with its attempt. One
    that needs a failed one fails with it. After SIGTERM or SIGINT: Interrupted, with all saved and ended.
    """
    stopping, running = threading.Event(), list[tuple[Job, Process, float]]()
    waiting, ahead = list(jobs), {job.name for job in jobs}
    with on_stop(stopping.set):
        while (waiting or running) and not stopping.is_set():
            ready = [job for job in waiting if job.needs not in ahead]
            for job in ready[: capacity - len(running)]:
                waiting.remove(job)
                running.append((job, start(*_command(output, job)), time.monotonic()))
            ended = _ended(output, running)
            for job, attempt in ended:
                yield job, attempt
                if attempt.code == 0:
                    ahead.discard(job.name)
                    continue
                first = "features" if job.name.startswith("features") else "pretraining"
                for lost in [other for other in waiting if other.needs == job.name]:
                    waiting.remove(lost)
                    yield _noted(output, lost, Attempts(0.0, attempt.code, f"{first}: {attempt.reason}"))
            if not ended:
                stopping.wait(POLL_S)
        if not stopping.is_set():
            return
        for _, process, _ in running:
            process.terminate()
        while running:
            yield from _ended(output, running)
            time.sleep(POLL_S)
    raise Interrupted("stopped; resume with the same command")


def _command(output: Path, job: Job) -> tuple[list[str], Path]:
    """What runs a job, and its log; the configuration is written."""
    run = output / job.name
    Storage(str(run.parent)).write(f"{run.name}.yaml", dump_yaml(job.config).encode())
    command = [sys.executable, "-m", "pipelines.cells", run.parent.name, "--config", f"{run}.yaml"]
    return [*command, "--output", str(run)], Path(f"{run}.log")


def _ended(output: Path, running: list[tuple[Job, Process, float]]) -> list[tuple[Job, Attempts]]:
    """Those that have ended, noted and no longer ``running``."""
    ended = []
    for job, process, since in list(running):
        if (code := process.poll()) is not None:
            running.remove((job, process, since))
            reason = last_line(Path(f"{output / job.name}.log")) if code else ""
            ended.append(_noted(output, job, Attempts(time.monotonic() - since, code, reason)))
    return ended


def _noted(output: Path, job: Job, attempt: Attempts) -> tuple[Job, Attempts]:
    note(Storage(str(output)), job.name, attempt)
    return job, attempt


def note(output: Storage, name: str, attempt: Attempts) -> None:
    """A line of ``attempts.jsonl``."""
    entry = {"job": name, **attempt._asdict(), "seconds": round(attempt.seconds, 2)}
    output.append(ATTEMPTS, (json.dumps(entry) + "\n").encode())


def last_line(log: Path) -> str:
    """The last line a process wrote, without our prefix."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    line = lines[-1].removeprefix("uno: ").removeprefix("error: ") if lines else "it left no message"
    return line if len(line) <= 300 else f"{line[:299]}…"


def main(argv: Sequence[str]) -> int:
    """``python -m pipelines.cells pretrain|features|cells --config FILE --output DIR``: one job."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    kind, *rest = argv
    if kind == "features":
        return fill_cache(parse(rest, DISCOVER).config)
    if kind == "pretrain":
        options = parse(rest, PRETRAIN)
        discover(options.config, options.given, phases=("pretrain",), elsewhere=OnRay())
    else:
        options = parse(rest, DISCOVER)
        discover(options.config, options.given, report=False, elsewhere=OnRay())
    return 0


def end_with_parent() -> None:
    """Save and end when the driver was killed: nobody would note the result."""
    while os.environ.get(PARENT, "") in ("", str(os.getppid())):
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    cli.run(main)
