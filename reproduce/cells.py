"""Run the cells (training runs) of ``uno reproduce`` as processes, here or on Ray.

A table has a cell for each row, data set and seed. A cell waits for the pretraining or
the features that it starts from. The file ``attempts.jsonl`` of the output directory
has a line for each attempt: how it ended, and after how many seconds.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from pipelines import cli
from pipelines.commands import DISCOVER, PRETRAIN
from pipelines.options import parse
from uno.config import Config, dump_yaml
from uno.data.files import Storage
from uno.errors import Interrupted
from uno.runs.journal import read_journal
from uno.session.console import on_stop
from uno.session.embed import fill_cache
from uno.session.pipeline import discover

ATTEMPTS = "attempts.jsonl"
# The driver sets this variable to its process id, because it may be gone before the
# cell has imported torch.
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
    """A job that runs as a process: a cell, a pretraining, or a cache of features.

    Attributes:
        name: The path of its run directory, relative to the output directory.
        config: The configuration of its run.
        label: Its name for people.
        needs: The ``name`` of the job that must succeed before it; None if it needs
            none.
    """

    name: str
    config: Config
    label: str
    needs: str | None = None


class Attempts(NamedTuple):
    """The outcome of all attempts to run one job, from ``attempts.jsonl``.

    Attributes:
        seconds: The seconds of all attempts together.
        code: The exit code of the last attempt.
        reason: The last line that the last attempt wrote; "" if its exit code is 0.
    """

    seconds: float = 0.0
    code: int = 0
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether the last attempt to run the job ended with an error.

        An interrupted job has not failed. Its exit code is 75, 130, or that of SIGTERM,
        SIGINT or SIGKILL.
        """
        return self.code != 0 and self.code not in UNFINISHED


def read_attempts(output: Path) -> dict[str, Attempts]:
    """Return the outcome of every job that ``uno reproduce`` has attempted before.

    A job that was not started, because the job that it needs failed, has an attempt of
    0 seconds with the exit code of that job.

    Args:
        output: The output directory of the command, with ``attempts.jsonl``.

    Returns:
        For each job, by its name: the seconds of all its attempts together, and the
        exit code and the last line of the last attempt.
    """
    found: dict[str, Attempts] = {}
    for entry in read_journal(Storage(str(output)), ATTEMPTS):
        seconds = found.get(entry["job"], Attempts()).seconds + entry["seconds"]
        found[entry["job"]] = Attempts(seconds, entry["code"], entry["reason"])
    return found


def run_local(command: list[str], log: Path, is_stopping: Callable[[], bool]) -> int:
    """Run a command as a process on this machine until it ends.

    The process is told to end when this process ends. For this the command must watch
    the environment variable ``UNO_PARENT``, the id of this process, as
    :func:`end_with_parent` does.

    Args:
        command: The words of the command.
        log: The file to which the output of the process is appended.
        is_stopping: Returns whether the process must save a checkpoint and end. It then
            gets SIGTERM once, and its end is waited for.

    Returns:
        The exit code of the process.
    """
    # In a new session Ctrl-C reaches only the driver, which forwards it.
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, PARENT: str(os.getpid())},
        )
    while process.poll() is None:
        if is_stopping():
            process.terminate()
            process.wait()
        time.sleep(POLL_S)
    return process.returncode


def run_on_ray(
    ray: Any,
    resources: dict[str, float],
    command: list[str],
    log: Path,
    is_stopping: Callable[[], bool],
) -> int:
    """Run a command as a process inside a task of Ray, until it ends.

    If the node of the task is lost, Ray runs the command again on another node, at most
    three times. The command must resume its run.

    Args:
        ray: The module ``ray``, connected to a cluster.
        resources: The resources of the task (``num_cpus``, ``num_gpus``).
        command: The words of the command.
        log: The file to which the output of the process is appended.
        is_stopping: Returns whether the process must save a checkpoint and end. The
            task is told by a file beside the log, because Ray may lose an interrupt.

    Returns:
        The exit code of the process; 75, that of an interruption, if its node was lost
        too often.
    """
    stop = log.with_suffix(".stop")
    stop.unlink(missing_ok=True)
    task = ray.remote(max_retries=3, **resources)(run_local)
    code = task.remote(command, log, stop.exists)
    while not ray.wait([code], timeout=POLL_S)[0]:
        if is_stopping():
            stop.touch()
    stop.unlink(missing_ok=True)
    try:
        return int(ray.get(code))
    except ray.exceptions.RayError:
        return Interrupted.exit_code


RunCommand = Callable[[list[str], Path, Callable[[], bool]], int]
"""Run a command until it ends, and return its exit code, as :func:`run_local` does."""


def run_jobs(
    jobs: Sequence[CellProcess], output: Path, run: RunCommand, capacity: int
) -> Iterator[tuple[CellProcess, Attempts]]:
    """Run jobs as processes, each after the job that it needs has succeeded.

    Every attempt is recorded in ``attempts.jsonl``.

    Args:
        jobs: The jobs: pretrainings, feature caches and cells (training runs). A job
            comes after the job that it needs.
        output: The output directory. The configuration and the log of each job are
            written there, too.
        run: Runs the command of a job in the calling thread.
        capacity: The largest number of processes at once.

    Yields:
        Every job that ended, with the seconds, exit code and last line of this attempt.
        If a job ends with an exit code other than 0, the jobs that need it are not
        started, and are yielded with the same exit code.

    Raises:
        Interrupted: This process got SIGTERM, SIGINT or SIGHUP. All running jobs were
            asked to save and end, have ended, and were yielded.
    """
    stopping = threading.Event()
    attempts = dict[str, Future[Attempts | None]]()
    with on_stop(stopping.set), ThreadPoolExecutor(capacity) as pool:
        for job in jobs:
            needed = attempts.get(job.needs or "")
            attempts[job.name] = pool.submit(
                _run_job, job, output, run, needed, stopping
            )
        job_of = {attempts[job.name]: job for job in jobs}
        try:
            for ended in as_completed(job_of):
                job, attempt = job_of[ended], ended.result()
                if attempt is not None:
                    note(Storage(str(output)), job.name, attempt)
                    yield job, attempt
            is_stopped = stopping.is_set()
        finally:
            stopping.set()
    if is_stopped:
        raise Interrupted("stopped; resume with the same command")


def _run_job(
    job: CellProcess,
    output: Path,
    run: RunCommand,
    needed: Future[Attempts | None] | None,
    stopping: threading.Event,
) -> Attempts | None:
    """Run one job, after the job that it needs has ended.

    Args:
        job: The job.
        output: The output directory.
        run: Runs the command of the job.
        needed: The attempt of the job that this job needs; None if it needs none.
        stopping: Set if no further job may start, and running jobs must end.

    Returns:
        The seconds, exit code and last line of this attempt. If the needed job failed,
        the job is not started, and has the same exit code. None if the job was not
        started because the command is stopping.
    """
    first = None if needed is None else needed.result()
    if first is not None and first.code:
        what = "features" if str(job.needs).startswith("features") else "pretraining"
        return Attempts(0.0, first.code, f"{what}: {first.reason}")
    if stopping.is_set():
        return None
    since = time.monotonic()
    command, log = cell_command(output, job)
    code = run(command, log, stopping.is_set)
    return Attempts(time.monotonic() - since, code, last_line(log) if code else "")


def cell_command(output: Path, job: CellProcess) -> tuple[list[str], Path]:
    """Write the configuration file of a job, and return the command that runs the job.

    Args:
        output: The output directory.
        job: The job. Its name is ``KIND/NAME``, the path of its run directory in the
            output directory. The configuration is written to ``KIND/NAME.yaml``.

    Returns:
        The words of the command, ``python -m reproduce.cells KIND --config FILE
        --output DIR``; and the path of its log file, ``KIND/NAME.log``.
    """
    run = output / job.name
    Storage(str(run.parent)).write(f"{run.name}.yaml", dump_yaml(job.config).encode())
    command = [
        sys.executable,
        "-m",
        "reproduce.cells",
        run.parent.name,
        "--config",
        f"{run}.yaml",
    ]
    return [*command, "--output", str(run)], Path(f"{run}.log")


def note(output: Storage, name: str, attempt: Attempts) -> None:
    """Append one attempt to run a job to ``attempts.jsonl``.

    Args:
        output: The output directory.
        name: The name of the job.
        attempt: The seconds, exit code and last line of this attempt.
    """
    entry = {"job": name, **attempt._asdict(), "seconds": round(attempt.seconds, 2)}
    output.append(ATTEMPTS, (json.dumps(entry) + "\n").encode())


def last_line(log: Path) -> str:
    """Return the last line of a log, without the prefix ``uno: error:``.

    It has at most 300 characters. A missing or empty log gives ``it left no message``.
    """
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
    """Run one job of ``uno reproduce`` in this process, and return the exit code 0.

    A thread sends SIGTERM to this process when the process that started it is gone.

    Args:
        argv: ``KIND --config FILE --output DIR``. The kind ``features`` fills the cache
            of a frozen encoder's features, ``pretrain`` trains the encoder and the
            known head, and ``cells`` trains and evaluates a whole run, without
            predictions and report.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    kind, *rest = argv
    if kind == "features":
        fill_cache(parse(rest, DISCOVER).config)
    elif kind == "pretrain":
        options = parse(rest, PRETRAIN)
        discover(options.config, options.overrides, last="pretrain")
    else:
        options = parse(rest, DISCOVER)
        discover(options.config, options.overrides, predict=False, report=False)
    return 0


def end_with_parent() -> None:
    """Wait until the process that started this one is gone, then ask this one to end.

    This process gets SIGTERM, so that it saves a checkpoint first. Without the driver
    no process would record the result. The environment variable ``UNO_PARENT`` holds
    the driver's process id. If it is not set, this waits forever.
    """
    while os.environ.get(PARENT, "") in ("", str(os.getppid())):
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(cli.run(main))
