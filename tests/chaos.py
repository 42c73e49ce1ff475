"""Signals at random moments of every command, then the same command: it ends as the undisturbed one.

    OMP_NUM_THREADS=1 python -m tests.chaos --moments 30 --seed 0           # make chaos
    OMP_NUM_THREADS=1 python -m tests.chaos --commands predict export --moments 12 --seed 3

A command runs undisturbed, its files are kept. Then, ``--moments`` times from an empty directory: kill -9,
SIGTERM, SIGINT and SIGHUP in turn (the last two to its process group, as a terminal sends them), and the same
command until it ends with 0, at most three times. Every file must be there and equal, and none more; half a
minute later no process may be left, with Ray a minute and a half: two of its agents report a raylet's sudden
death to a head that is dead, too, and wait 60 s for it. The moment is drawn from the CPU seconds that the
undisturbed command and its children took, so that a busy machine shifts nothing; where the command ends
before it, another is drawn.

One of ten tries is a process of its own, start-up and all. The others are forked from this one, which has
imported everything and started no thread; there a lock is watched for 2 s instead of 10, and the runs of
``reproduce`` are forked, too.

Equal means to the byte, but for what tells of the clock and the machine: seconds and speeds in JSON and JSON
lines, dates, seconds and minutes in reports and tables, TensorBoard's events, a process's log. Of the
checkpoints the newest of each phase is compared: which older ones are kept depends on where a run stopped.
"""

import argparse
import atexit
import ctypes
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import cells, cli, ray_env, tables
from tests.pipelines.small import ROOT, SMALL, write_images
from tests.tune.tiny import TINY
from uno.runs import lock

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RETRIES, LIMIT_S, POLL_S = 3, 600, 0.02
LEFT_S, LEFT_WITH_RAY_S = 30, 90
FRESH = 10  # one of so many tries is a process of its own
PRELOADED = (
    "pipelines.commands", "pipelines.jobs", "uno.session.job", "sklearn.cluster",
    "sklearn.datasets", "sklearn.manifold", "sklearn.metrics", "pandas", "torch._dynamo", "torch.export",
    "uno.data.pack", "uno.report", "uno.results.export",
)  # fmt: skip
RAY = ("ray", "ray.data", "ray.train", "ray.train.torch", "ray.tune", "tune.driver")
RUN = [*SMALL, "--data.limit", "120", "--pretrain.epochs", "2", "--discover.epochs", "2"]
CELL = [word for word in RUN if word not in ("--preset", "digits")]
UNCOMPARED = re.compile(r"(^|/)(tensorboard/|ray/|\.cache/|logs?/)|\.log$|(^|/)attempts\.jsonl$")
CLOCK = re.compile(r"(_s|seconds|_per_s|time|started|ended|date|generated|pid|host|peak_bytes)$")
TIMES = re.compile(
    rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?( [A-Z]+)?"
    rb"|[\d,.]+ (s|ms|min|h|images/s|minutes|in all)\b( \d+ min)?"
)
MINUTES = re.compile(rb"[\d.]+(?=</bdi></td></tr>| \|\n)")  # the last column of a table that has them
CHECKPOINT = re.compile(r"^(.*checkpoints/\w+)/step_(\d+)/")


class Command(NamedTuple):
    """Words after ``uno``, given the output and the folder of what was made for all; a file or a folder."""

    words: Callable[[str, Path], list[str]]
    copies_run: bool = False  # it works in a copy of a finished run, which is then its output
    ray: bool = False
    children: bool = False  # whose CPU seconds count, too


COMMANDS = {
    "data pack": Command(lambda out, made: ["data", "pack", "--data", f"folder:{made / 'images'}",
        "--shard-mb", "1", "--compute.threads", "1", "--output", out]),
    "discover": Command(lambda out, made: ["discover", *RUN, "--output", out]),
    "discover on Ray": Command(lambda out, made: ["discover", *RUN, "--workers", "2", "--output", out],
        ray=True, children=True),
    "predict": Command(lambda out, made: ["predict", str(made / "run"), "--data", "digits", "--limit", "150",
        "--csv", "--folders", "--compute.threads", "1", "--output", out]),
    "estimate": Command(lambda out, made: ["estimate-classes", "--known-classes", "first:6", "--data.limit",
        "300", "--max-steps", "2", "--model.width", "4", "--num-splits", "2", "--max-novel", "3",
        "--compute.threads", "1", "--output", out]),
    "tune": Command(lambda out, made: ["tune", *TINY, "--trials", "2", "--folds", "1", "--concurrent", "1",
        "--output", out], ray=True, children=True),  # side by side, who stops early is a race
    "reproduce": Command(lambda out, made: ["reproduce", "ablation", "--seeds", "1", "--rows", "uno",
        "no-concat", "--parallel", "1", *CELL, "--output", out], children=True),
    "report": Command(lambda out, made: ["report", out], copies_run=True),
    "export": Command(lambda out, made: ["export", out, "--format", "pt2"], copies_run=True),
}  # fmt: skip


class Result(NamedTuple):
    """What became of a command's moments: ``struck``, out of ``tries``; ``faults`` are a line each."""

    command: str
    cpu_seconds: float
    tries: int
    struck: int
    fresh: int
    again: int
    files: int
    faults: list[str]


class Forked:
    """``work()`` in a fork of this process and a session of its own, with what we need of ``Popen``."""

    def __init__(self, work: Callable[[], int], log: Path) -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _live(work, log)

    def poll(self) -> int | None:
        """Its exit code, minus a signal's number; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        """As of ``Popen``."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


Process = Forked | subprocess.Popen[bytes]


def _live(work: Callable[[], int], log: Path) -> NoReturn:
    """The life of a fork, which begins as a new process does."""
    code = 1
    try:
        os.setsid()
        file, null = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((null, file, file)):
            os.dup2(source, target)
        sys.stdout, sys.stderr = (open(fd, "w", 1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        _heed_signals()
        code = work()
    except BaseException:
        traceback.print_exc()
    with suppress(BaseException):
        sys.stdout.flush()
    os._exit(code)


def run(words: list[str]) -> int:
    """``uno WORDS`` to its very end, in a fork."""
    sys.argv = ["uno", *words]
    lock.WATCH_S, lock.RENEW_S = 2.0, 0.25
    tables.start_here = _start_cell
    code = cli.main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def _start_cell(command: list[str], log: Path) -> Forked:
    """:func:`pipelines.cells.start_here` without a new Python."""
    driver = str(os.getpid())

    def work() -> int:
        os.environ[cells.PARENT], sys.argv = driver, ["cells.py", *command[3:]]
        return cli.guard(cells.main, command[3:])

    return Forked(work, log)


def start(words: list[str], log: Path, fresh: bool) -> Process:
    """A command in a process group of its own, as a terminal has it; ``fresh``: a Python of its own."""
    if not fresh:
        return Forked(partial(run, words), log)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    code = "import sys; sys.argv[0] = 'uno'; from pipelines import cli; sys.exit(cli.main())"
    line = [sys.executable, "-c", code, *words]
    with log.open("ab") as file:
        return subprocess.Popen(line, cwd=log.parent, env=environment, stdout=file, stderr=file,
            stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip


def _stat(pid: int) -> tuple[int, float, str]:
    """Parent, CPU seconds (of ended children, too) and name of a process that runs; else an OSError."""
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")
    fields = rest.split()
    if fields[0] == "Z":
        raise ProcessLookupError
    return int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), name


def descendants(pid: int) -> dict[int, tuple[int, float, str]]:
    """Every process below ``pid`` and it itself."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            found[int(path.name)] = _stat(int(path.name))
    below = {pid}
    while more := {each for each, (parent, *_) in found.items() if parent in below} - below:
        below |= more
    return {each: found[each] for each in below if each in found}


def spent(process: Process, children: bool, until: float = float("inf")) -> float:
    """Its CPU seconds once it has ended or they are ``until``; what does not end in time is ended."""
    seconds, end = 0.0, time.monotonic() + LIMIT_S
    while process.poll() is None and seconds < until:
        with suppress(OSError):
            all_of = descendants(process.pid).values() if children else [_stat(process.pid)]
            seconds = max(seconds, sum(cpu for _, cpu, _ in all_of))
        time.sleep(5 * POLL_S if children else POLL_S)
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
    return seconds


def finish(process: Process) -> int:
    """Its exit code."""
    end = time.monotonic() + LIMIT_S
    while (code := process.poll()) is None:
        time.sleep(POLL_S)
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
    return code


def left_running(with_ray: bool = False) -> list[str]:
    """Names of the processes that outlive their command for long; they are ended."""
    end, left = time.monotonic() + (LEFT_WITH_RAY_S if with_ray else LEFT_S), list[str]()
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        others = {pid: name for pid, (*_, name) in descendants(os.getpid()).items() if pid != os.getpid()}
        if not others:
            return left
        if time.monotonic() > end:
            left = left or sorted(others.values())
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def files_of(root: Path) -> dict[str, Any]:
    """What a command left, by relative path, in the form that is compared."""
    if root.is_file():
        return {root.name: _comparable(root.name, root.read_bytes())}
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    found = {str(path.relative_to(root)): path for path in paths}
    newest: dict[str, int] = {}
    for name in found:
        if step := CHECKPOINT.match(name):
            newest[step[1]] = max(newest.get(step[1], 0), int(step[2]))
    return {
        name: _comparable(name, path.read_bytes())
        for name, path in found.items()
        if not UNCOMPARED.search(name)
        and ((step := CHECKPOINT.match(name)) is None or int(step[2]) == newest[step[1]])
    }


def _comparable(name: str, data: bytes) -> Any:
    if name.endswith(".jsonl"):
        return [_timeless(json.loads(line)) for line in data.splitlines()]
    if name.endswith("manifest.json") and b"sha256" in data and b"state.json" in data:
        return sorted(json.loads(data))  # the state's sizes and sums follow its seconds
    if name.endswith(".json"):
        return _timeless(json.loads(data))
    if name.endswith(".parquet"):
        table = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(use_threads=False)
        clocks = [column for column in table.column_names if column == "minutes" or CLOCK.search(column)]
        return table.drop_columns(clocks) if clocks else data
    if name.endswith((".html", ".md")):
        timed = re.search(rb"minutes(</th></tr>| \|\n)", data)
        return TIMES.sub(b"TIME", MINUTES.sub(b"TIME", data) if timed else data).decode()
    return data


def _timeless(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _timeless(value) for key, value in tree.items() if not CLOCK.search(key)}
    return [_timeless(value) for value in tree] if isinstance(tree, list) else tree


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """A word and a name for each."""
    missing = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    left = [f"left over {name}" for name in sorted(found.keys() - expected.keys())]
    other = [f"differs {n}" for n in sorted(found.keys() & expected.keys()) if found[n] != expected[n]]
    return missing + left + other


def prepare(made: Path) -> None:
    """What commands work on: a folder of images and a finished run."""
    write_images(made / "images", {"cat": 40, "dog": 40, "emu": 40}, size=64)
    log = made / "prepare.log"
    if code := finish(start(["discover", *RUN, "--output", str(made / "run")], log, False)):
        raise SystemExit(f"the run that others use ended with {code}: {log.read_text()}")


def disturb(name: str, moments: int, seed: int, made: Path) -> Result:
    """A command undisturbed, then ``moments`` times disturbed."""
    command, chance = COMMANDS[name], random.Random(f"{name} {seed}")
    work = made / name.replace(" ", "-")
    work.mkdir()
    out, log, faults, tries, struck, fresh, again = work / "out", work / "log.txt", list[str](), 0, 0, 0, 0

    def begin(alone: bool) -> Process:
        """The command from an empty directory."""
        shutil.rmtree(out, ignore_errors=True)
        log.unlink(missing_ok=True)
        if command.copies_run:
            shutil.copytree(made / "run", out)
        return start(command.words(str(out), made), log, alone)

    def fault(*lines: str) -> None:
        faults.extend(lines)
        print(*(f"{name}: {line}" for line in lines), sep="\n", file=sys.stderr)
        text = log.read_text(errors="replace")
        print(text[max(0, text.find("Traceback") - 500) :][:3000], file=sys.stderr, flush=True)

    seconds, expected = dict[bool, float](), dict[str, Any]()
    for alone in (False, True)[: 2 if moments >= FRESH else 1]:
        process = begin(alone)
        seconds[alone] = spent(process, command.children)
        if process.poll():
            fault(f"undisturbed it ends with {process.poll()}")
            return Result(name, seconds[False], 0, 0, 0, 0, 0, faults)
        if expected and (lines := differences(files_of(out), expected)):
            fault(*(f"in a process of its own: {line}" for line in lines))
        expected = expected or files_of(out)
    while struck < moments and tries < 2 * moments:
        number = SIGNALS[(tries + seed) % len(SIGNALS)]
        alone = True in seconds and tries % FRESH == FRESH - 1
        at, tries = chance.uniform(0, seconds[alone]), tries + 1
        process = begin(alone)
        spent(process, command.children, at)
        if process.poll() is None:
            send = os.killpg if number in (signal.SIGINT, signal.SIGHUP) else os.kill
            send(process.pid, number)
            struck, fresh = struck + 1, fresh + alone
        codes = [finish(process)]
        while len(codes) <= RETRIES and (codes[-1] or len(codes) == 1):
            codes.append(finish(start(command.words(str(out), made), log, alone)))
        again += len(codes) - 2
        what = f"{number.name} at {at:.2f} s{' alone' * alone}: codes {codes}"
        if codes[-1]:
            fault(what)
        if lines := differences(files_of(out), expected):
            fault(*(f"{what}: {line}" for line in lines))
        if found := re.search("Traceback|internal: .*", log.read_text(errors="replace")):
            fault(f"{what}: {found[0]}")
        if left := left_running(command.ray):
            fault(f"{what}: still running: {', '.join(left)}")
    return Result(name, round(seconds[False], 2), tries, struck, fresh, again, len(expected), faults)


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line; 1 where a file differs or a command does not end with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--moments", type=int, default=30, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    args, results = parser.parse_args(argv), []
    on_ray = any(COMMANDS[name].ray for name in args.commands)
    made = Path(tempfile.mkdtemp(prefix="uno-chaos-"))
    if on_ray:  # its settings are read when it is imported, and its sessions are many
        os.environ.update(ray_env.ENVIRONMENT | {ray_env.AUTH_MODE: "disabled", "RAY_TMPDIR": str(made)})
    for module in (*PRELOADED, *(RAY if on_ray else ())):
        importlib.import_module(module)
    settle()
    try:
        prepare(made)
        print("| command | CPU, s | tries | struck | of them alone | again | files | faults |")
        print("|---|---|---|---|---|---|---|---|")
        for name in args.commands:
            found = disturb(name, args.moments, args.seed, made)
            results.append(found)
            print("|", " | ".join(map(str, [*found[:-1], len(found.faults)])), "|", flush=True)
    finally:
        shutil.rmtree(made)
    words = " ".join(["python -m tests.chaos", *(sys.argv[1:] if argv is None else argv)])
    print(json.dumps({"command": words, "seed": args.seed, "commands": [r._asdict() for r in results]}))
    return int(any(found.faults for found in results))


def settle() -> None:
    """What outlives its command becomes our child, no signal is ignored (nohup), and no thread runs."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    _heed_signals()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len([name for name in names if name != "jemalloc_bg_thd"]) > 1:  # which jemalloc knows to fork
        raise SystemExit(f"threads are running, so nothing can be forked: {names}")


def _heed_signals() -> None:
    """As a new process in the foreground of a terminal."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
