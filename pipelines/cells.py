"""Runs as processes of their own, on this machine or in tasks of Ray, each after the
one it starts from; the output's ``attempts.jsonl`` notes how each attempt ended, and
after how many seconds.
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
from pipelines.options import parse
from uno.config import Config, dump_yaml
from uno.data.files import Storage
from uno.errors import Interrupted
from uno.runs.journal import read_journal
from uno.session.console import on_stop
from uno.session.pipeline import discover

ATTEMPTS = "attempts.jsonl"
# set by the driver: its process may be gone before this one has imported torch
PARENT = "UNO_PARENT"
POLL_S = 0.1
UNFINISHED = (
    Interrupted.exit_code,
    130,
    -signal.SIGTERM,
    -signal.SIGINT,
    -signal.SIGKILL,
    137,
    143,
)


class CellProcess(NamedTuple):
    """A run: ``name`` is its directory, ``needs`` that of the one it starts from,
    ``label`` is for people.
    """

    name: str
    config: Config
    label: str
    needs: str | None = None


class Attempts(NamedTuple):
    """A job in ``attempts.jsonl``: seconds of all attempts, exit code and reason of
    the last.
    """

    seconds: float = 0.0
    code: int = 0
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Return whether the last attempt ended with an error, rather than being
        interrupted.
        """
        return self.code != 0 and self.code not in UNFINISHED


def read_attempts(output: Path) -> dict[str, Attempts]:
    """Every job of ``output`` that was started, by name."""
    found: dict[str, Attempts] = {}
    for entry in read_journal(Storage(str(output)), ATTEMPTS):
        seconds = found.get(entry["job"], Attempts()).seconds + entry["seconds"]
        found[entry["job"]] = Attempts(seconds, entry["code"], entry["reason"])
    return found


def start_local(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A process of this machine; it ends with the driver."""
    # a session of its own: Ctrl-C reaches the driver, which forwards it
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, PARENT: str(os.getpid())},
        )


class RayProcess:
    """A process on whatever node has free ``resources``, with the methods of a
    ``Popen``.
    """

    def __init__(
        self, ray: Any, resources: dict[str, float], command: list[str], log: Path
    ) -> None:
        self._ray, self._stop = ray, log.with_suffix(".stop")
        self._stop.unlink(missing_ok=True)
        self._code = ray.remote(max_retries=0, **resources)(_run).remote(
            command, log, self._stop
        )

    def poll(self) -> int | None:
        """Exit code, None while it runs; one whose node is lost counts as
        interrupted.
        """
        if not self._ray.wait([self._code], timeout=0)[0]:
            return None
        self._stop.unlink(missing_ok=True)
        try:
            return int(self._ray.get(self._code))
        except self._ray.exceptions.RayError:
            return Interrupted.exit_code

    def terminate(self) -> None:
        """Ask it to save and end, by a file in the shared output: an interrupt of
        Ray's may get lost.
        """
        self._stop.touch()


def _run(command: list[str], log: Path, stop: Path) -> int:
    """The task: runs a command to its end, or until the file ``stop`` is there."""
    process = start_local(command, log)
    while process.poll() is None:
        if stop.exists():
            process.terminate()
            process.wait()
        time.sleep(POLL_S)
    return process.returncode


Process = subprocess.Popen[bytes] | RayProcess
# starts a command whose output is appended to a file
Start = Callable[[list[str], Path], Process]


def run_jobs(
    jobs: Sequence[CellProcess], output: Path, start: Start, capacity: int
) -> Iterator[tuple[CellProcess, Attempts]]:
    """Run all jobs in ``output``, ``capacity`` at a time; yields every one that ended,
    with its attempt. One that needs a failed one fails with it. After SIGTERM or
    SIGINT: Interrupted, with all saved and ended.
    """
    stopping, running = threading.Event(), list[tuple[CellProcess, Process, float]]()
    waiting, ahead = list(jobs), {job.name for job in jobs}
    with on_stop(stopping.set):
        while (waiting or running) and not stopping.is_set():
            ready = [job for job in waiting if job.needs not in ahead]
            for job in ready[: capacity - len(running)]:
                waiting.remove(job)
                running.append((job, start(*_command(output, job)), time.monotonic()))
            ended = list(_ended(output, running))
            for job, attempt in ended:
                yield job, attempt
                if attempt.code == 0:
                    ahead.discard(job.name)
                    continue
                first = "features" if job.name.startswith("features") else "pretraining"
                for lost in [other for other in waiting if other.needs == job.name]:
                    waiting.remove(lost)
                    same = Attempts(0.0, attempt.code, f"{first}: {attempt.reason}")
                    note(Storage(str(output)), lost.name, same)
                    yield lost, same
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


def _command(output: Path, job: CellProcess) -> tuple[list[str], Path]:
    """Write the configuration of a job; return the command that runs it, and its
    log.
    """
    run = output / job.name
    Storage(str(run.parent)).write(f"{run.name}.yaml", dump_yaml(job.config).encode())
    command = [
        sys.executable,
        "-m",
        "pipelines.cells",
        run.parent.name,
        "--config",
        f"{run}.yaml",
    ]
    return [*command, "--output", str(run)], Path(f"{run}.log")


def _ended(
    output: Path, running: list[tuple[CellProcess, Process, float]]
) -> Iterator[tuple[CellProcess, Attempts]]:
    """Take those that have ended out of ``running``, note and yield them."""
    for job, process, since in list(running):
        if (code := process.poll()) is not None:
            running.remove((job, process, since))
            reason = last_line(Path(f"{output / job.name}.log")) if code else ""
            attempt = Attempts(time.monotonic() - since, code, reason)
            note(Storage(str(output)), job.name, attempt)
            yield job, attempt


def note(output: Storage, name: str, attempt: Attempts) -> None:
    """A line of ``attempts.jsonl``."""
    entry = {"job": name, **attempt._asdict(), "seconds": round(attempt.seconds, 2)}
    output.append(ATTEMPTS, (json.dumps(entry) + "\n").encode())


def last_line(log: Path) -> str:
    """The last line a process wrote, without our prefix."""
    lines = (
        log.read_text("utf-8", errors="replace").strip().splitlines()
        if log.exists()
        else []
    )
    line = (
        lines[-1].removeprefix("uno: ").removeprefix("error: ")
        if lines
        else "it left no message"
    )
    return line if len(line) <= 300 else f"{line[:299]}…"


def main(argv: Sequence[str]) -> int:
    """``python -m pipelines.cells pretrain|features|cells --config FILE --output DIR``:
    one job.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    kind, *rest = argv
    if kind == "features":
        return fill_cache(parse(rest, DISCOVER).config)
    if kind == "pretrain":
        options = parse(rest, PRETRAIN)
        discover(options.config, options.overrides, last="pretrain")
    else:
        options = parse(rest, DISCOVER)
        discover(options.config, options.overrides, report=False)
    return 0


def end_with_parent() -> None:
    """Save and end when the driver was killed: nobody would note the result."""
    while os.environ.get(PARENT, "") in ("", str(os.getppid())):
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(cli.run(main))
