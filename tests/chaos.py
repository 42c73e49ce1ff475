"""Signals at random moments of every command, then the same command: it ends as the
undisturbed one.

    OMP_NUM_THREADS=1 python -m tests.chaos --moments 30 --seed 0
    OMP_NUM_THREADS=1 python -m tests.chaos --commands predict export --moments 12 --seed 3

A command runs undisturbed, its files are kept. Then, ``--moments`` times from an empty
directory: kill -9, SIGTERM, SIGINT and SIGHUP in turn (the last two to its process
group, as a terminal sends them), and the same command until it ends with 0, at most
three times. Every file must be there and equal, and none more; half a minute later no
process may be left, with Ray a minute and a half: two of its agents report a raylet's
sudden death to a head that is dead, too, and wait 60 s for it. The moment is drawn from
the CPU seconds that the undisturbed command and its children took, so that a busy
machine shifts nothing, from its first file on (one of ten: from the start); where the
command ends before it, another is drawn.

Equal means to the byte, but for what tells of the clock and the machine: seconds and
speeds in JSON and JSON lines, dates, seconds and minutes in reports and tables,
TensorBoard's events, a process's log. Of the checkpoints the newest of each phase is
compared: which older ones are kept depends on where a run stopped.
"""  # noqa: E501

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import ray_env
from tests.pipelines.small import ROOT, SMALL, write_images
from tests.processes import below, running
from tests.tune.tiny import TINY

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RETRIES, LIMIT_S, POLL_S = 3, 600, 0.02
LEFT_S, LEFT_WITH_RAY_S = 30, 90
EARLY = 10  # one of so many moments may lie before the first file
RUN = [
    *SMALL,
    "--data.limit",
    "120",
    "--pretrain.epochs",
    "2",
    "--discover.epochs",
    "2",
]
CELL = [word for word in RUN if word not in ("--preset", "digits")]
UNCOMPARED = re.compile(
    r"(^|/)(tensorboard/|ray/|\.cache/|logs?/)|\.log$|(^|/)attempts\.jsonl$"
)
CLOCK = re.compile(
    r"(_s|_ms|_ms_\w+|data_wait|slow_rank|_per_device|"
    r"seconds|time|started|ended|date|generated|pid|host|peak_bytes)$"
)
TIMES = re.compile(
    rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?( [A-Z]+)?"
    rb"|[\d,.]+ (s|ms|min|h|images/s|minutes|in all)\b( \d+ min)?"
)
# the last column of a table that has them
MINUTES = re.compile(rb"[\d.]+(?=</bdi></td></tr>| \|\n)")
CHECKPOINT = re.compile(r"^(.*checkpoints/\w+)/step_(\d+)\.safetensors$")


class Command(NamedTuple):
    """Words after ``uno``, given the output and the folder of what was made for all;
    a file or a folder.
    """

    words: Callable[[str, Path], list[str]]
    # it works in a copy of a finished run, which is then its output
    copies_run: bool = False
    ray: bool = False


COMMANDS = {
    "data pack": Command(
        lambda out, made: [
            "data",
            "pack",
            "--data",
            f"folder:{made / 'images'}",
            "--shard-mb",
            "1",
            "--compute.threads",
            "1",
            "--output",
            out,
        ]
    ),
    "discover": Command(lambda out, made: ["discover", *RUN, "--output", out]),
    "discover on Ray": Command(
        lambda out, made: ["discover", *RUN, "--workers", "2", "--output", out],
        ray=True,
    ),
    "predict": Command(
        lambda out, made: [
            "predict",
            str(made / "run"),
            "--data",
            "digits",
            "--limit",
            "150",
            "--csv",
            "--folders",
            "--compute.threads",
            "1",
            "--output",
            out,
        ]
    ),
    "estimate": Command(
        lambda out, made: [
            "estimate-classes",
            "--known-classes",
            "first:6",
            "--data.limit",
            "300",
            "--max-steps",
            "2",
            "--model.width",
            "4",
            "--num-splits",
            "2",
            "--max-novel",
            "3",
            "--compute.threads",
            "1",
            "--output",
            out,
        ]
    ),
    "tune": Command(
        lambda out, made: [
            "tune",
            *TINY,
            "--trials",
            "2",
            "--folds",
            "1",
            "--workers",
            "1",
            "--output",
            out,
        ],
        ray=True,
    ),  # side by side, who stops early is a race
    "reproduce": Command(
        lambda out, made: [
            "reproduce",
            "ablation",
            "--seeds",
            "1",
            "--rows",
            "uno",
            "no-concat",
            "--parallel",
            "1",
            *CELL,
            "--output",
            out,
        ]
    ),
    "report": Command(lambda out, made: ["report", out], copies_run=True),
    "export": Command(
        lambda out, made: ["export", out, "--format", "pt2"], copies_run=True
    ),
}


class Result(NamedTuple):
    """What became of a command's moments: ``struck``, out of ``tries``; ``faults``
    are a line each.
    """

    command: str
    cpu_seconds: float
    tries: int
    struck: int
    again: int
    files: int
    faults: list[str]


Process = subprocess.Popen[bytes]


def start(words: list[str], log: Path) -> Process:
    """A command in a process group of its own, as a terminal has it, where no signal
    is ignored (nohup).
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    line = [
        sys.executable,
        "-c",
        "import sys; from pipelines import cli; sys.exit(cli.main())",
        *words,
    ]
    with log.open("ab") as file:
        return subprocess.Popen(
            line,
            cwd=log.parent,
            env=environment,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def spent(
    process: Process, until: Callable[[float], bool] = lambda cpu: False
) -> float:
    """CPU seconds of it and its children, once it has ended or ``until`` holds of them;
    what does not end in time is ended.
    """
    seconds, end = 0.0, time.monotonic() + LIMIT_S
    while process.poll() is None and not until(seconds):
        seconds = max(
            seconds, sum(each.cpu for each in below([process.pid], running()).values())
        )
        time.sleep(POLL_S)
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
    return seconds


def finish(process: Process) -> int:
    """Its exit code; what does not end in time is ended."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(LIMIT_S)
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def left_running(with_ray: bool = False) -> list[str]:
    """Names of the processes that outlive their command for long; they are ended."""
    end, left = (
        time.monotonic() + (LEFT_WITH_RAY_S if with_ray else LEFT_S),
        list[str](),
    )
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        others = {
            pid: each.name for pid, each in below([os.getpid()], running()).items()
        }
        del others[os.getpid()]
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
        and (
            (step := CHECKPOINT.match(name)) is None or int(step[2]) == newest[step[1]]
        )
    }


def _comparable(name: str, data: bytes) -> Any:
    if name.endswith(".jsonl"):
        return [_timeless(json.loads(line)) for line in data.splitlines()]
    if name.endswith(".json"):
        return _timeless(json.loads(data))
    if name.endswith(".parquet"):
        table = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(
            use_threads=False
        )
        clocks = [
            column
            for column in table.column_names
            if column == "minutes" or CLOCK.search(column)
        ]
        return table.drop_columns(clocks) if clocks else data
    if name.endswith((".html", ".md")):
        timed = re.search(rb"minutes(</th></tr>| \|\n)", data)
        return TIMES.sub(
            b"TIME", MINUTES.sub(b"TIME", data) if timed else data
        ).decode()
    return data


def _timeless(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            key: _timeless(value)
            for key, value in tree.items()
            if not CLOCK.search(key)
        }
    return [_timeless(value) for value in tree] if isinstance(tree, list) else tree


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """A word and a name for each."""
    missing = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    left = [f"left over {name}" for name in sorted(found.keys() - expected.keys())]
    other = [
        f"differs {n}"
        for n in sorted(found.keys() & expected.keys())
        if found[n] != expected[n]
    ]
    return missing + left + other


def prepare(made: Path) -> None:
    """What commands work on: a folder of images and a finished run."""
    write_images(made / "images", {"cat": 40, "dog": 40, "emu": 40}, size=64)
    log = made / "prepare.log"
    if code := finish(start(["discover", *RUN, "--output", str(made / "run")], log)):
        raise SystemExit(
            f"the run that others use ended with {code}: {log.read_text()}"
        )


def disturb(name: str, moments: int, seed: int, made: Path) -> Result:
    """A command undisturbed, then ``moments`` times disturbed."""
    command, chance, faults = (
        COMMANDS[name],
        random.Random(f"{name} {seed}"),
        list[str](),
    )
    work = made / name.replace(" ", "-")
    work.mkdir()
    out, log, tries, struck, again = work / "out", work / "log.txt", 0, 0, 0

    def begin() -> Process:
        """The command from an empty directory."""
        shutil.rmtree(out, ignore_errors=True)
        log.unlink(missing_ok=True)
        if command.copies_run:
            shutil.copytree(made / "run", out)
        return start(command.words(str(out), made), log)

    def changed() -> int:
        return out.stat().st_mtime_ns if out.exists() else 0

    def fault(*lines: str) -> None:
        faults.extend(lines)
        print(*(f"{name}: {line}" for line in lines), sep="\n", file=sys.stderr)
        text = log.read_text(errors="replace")
        print(
            text[max(0, text.find("Traceback") - 500) :][:3000],
            file=sys.stderr,
            flush=True,
        )

    process, before = begin(), changed()
    first = spent(process, lambda _: changed() != before)
    seconds = max(first, spent(process))
    if process.poll():
        fault(f"undisturbed it ends with {process.poll()}")
        return Result(name, seconds, 0, 0, 0, 0, faults)
    expected = files_of(out)
    while struck < moments and tries < 2 * moments:
        number = SIGNALS[(tries + seed) % len(SIGNALS)]
        at, tries = chance.uniform(first if tries % EARLY else 0, seconds), tries + 1
        process = begin()
        spent(process, lambda cpu, at=at: cpu >= at)
        if process.poll() is None:
            send = os.killpg if number in (signal.SIGINT, signal.SIGHUP) else os.kill
            send(process.pid, number)
            struck += 1
        codes = [finish(process)]
        while len(codes) <= RETRIES and (codes[-1] or len(codes) == 1):
            codes.append(finish(start(command.words(str(out), made), log)))
        again += len(codes) - 2
        what = f"{number.name} at {at:.2f} s: codes {codes}"
        found = [f"{what}: {line}" for line in differences(files_of(out), expected)]
        if word := re.search("Traceback|internal: .*", log.read_text(errors="replace")):
            found.append(f"{what}: {word[0]}")
        if left := left_running(command.ray):
            found.append(f"{what}: still running: {', '.join(left)}")
        if codes[-1]:
            found.insert(0, what)
        if found:
            fault(*found)
    return Result(name, round(seconds, 2), tries, struck, again, len(expected), faults)


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line; 1 where a file differs or a command does not
    end with 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS)
    )
    parser.add_argument("--moments", type=int, default=30, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    args, results = parser.parse_args(argv), []
    settle()
    with tempfile.TemporaryDirectory(prefix="uno-chaos-") as folder:
        made = Path(folder)
        os.environ.update(
            ray_env.ENVIRONMENT | {ray_env.AUTH_MODE: "disabled", "RAY_TMPDIR": folder}
        )
        prepare(made)
        print(
            "| command | CPU, s | tries | struck | again | files | faults"
            " |\n|---|---|---|---|---|---|---|"
        )
        for name in args.commands:
            found = disturb(name, args.moments, args.seed, made)
            results.append(found)
            print(
                "|",
                " | ".join(map(str, [*found[:-1], len(found.faults)])),
                "|",
                flush=True,
            )
    words = " ".join(
        ["python -m tests.chaos", *(sys.argv[1:] if argv is None else argv)]
    )
    print(
        json.dumps(
            {
                "command": words,
                "seed": args.seed,
                "commands": [r._asdict() for r in results],
            }
        )
    )
    return int(any(found.faults for found in results))


def settle() -> None:
    """What outlives its command becomes our child, and no signal is ignored (nohup)."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
