"""Signals at random moments of every command, then the same command: it ends as the undisturbed one.

    python -m tests.chaos --moments 30 --seed 0                       # make chaos
    python -m tests.chaos --commands predict export --moments 3

A command runs undisturbed first; its files and its duration are kept. Then, ``--moments`` times from an empty
directory: kill -9, SIGTERM, SIGINT and SIGHUP in turn, at a moment drawn from that duration, and the same
command until it ends with 0, at most three times. Every file must be there and equal, and none more.

Equal means to the byte, but for what tells of the clock and the machine: seconds and speeds in JSON and JSON
lines, the report's date and durations, TensorBoard's events, a process's log. Of the checkpoints the newest
of each phase is compared: which older ones are kept depends on where a run was stopped.
"""

import argparse
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
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from tests.pipelines.small import ROOT, SMALL, write_images
from tests.tune.tiny import TINY

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RETRIES, LIMIT_S = 3, 600
MINUTE = [word for word in SMALL if word not in ("--preset", "digits")]
UNCOMPARED = re.compile(r"(^|/)(tensorboard/|ray/|\.cache/|logs?/)|\.log$|(^|/)attempts\.jsonl$")
CLOCK = re.compile(r"(_s|seconds|_per_s|time|started|ended|date|generated|pid|host|peak_bytes)$")
TIMES = re.compile(
    rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?( [A-Z]+)?|[\d,.]+ (s|ms|min|h|images/s)\b( \d+ min)?"
)
CHECKPOINT = re.compile(r"^(.*checkpoints/\w+)/step_(\d+)/")


class Command(NamedTuple):
    """Words after ``uno``, given the output and the folder of what was made for all; a file or a folder."""

    words: Callable[[str, Path], list[str]]
    copies_run: bool = False  # it works in a copy of a finished run, which is then its output


COMMANDS = {
    "data pack": Command(lambda out, made: ["data", "pack", "--data", f"folder:{made / 'images'}",
        "--shard-mb", "1", "--compute.threads", "1", "--output", out]),
    "discover": Command(lambda out, made: ["discover", *SMALL, "--output", out]),
    "discover on Ray": Command(lambda out, made: ["discover", *SMALL, "--workers", "2", "--output", out]),
    "predict": Command(lambda out, made: ["predict", str(made / "run"), "--data", "digits", "--csv",
        "--folders", "--compute.threads", "1", "--output", out]),
    "estimate": Command(lambda out, made: ["estimate-classes", "--known-classes", "first:6", "--max-steps",
        "2", "--model.width", "4", "--num-splits", "2", "--max-novel", "3", "--compute.threads", "1",
        "--output", out]),
    "tune": Command(lambda out, made: ["tune", *TINY, "--trials", "2", "--folds", "1", "--output", out]),
    "reproduce": Command(lambda out, made: ["reproduce", "ablation", "--seeds", "1", "--rows", "uno",
        "no-concat", *MINUTE, "--output", out]),
    "report": Command(lambda out, made: ["report", out], copies_run=True),
    "export": Command(lambda out, made: ["export", out, "--format", "pt2"], copies_run=True),
}  # fmt: skip


class Result(NamedTuple):
    """What became of a command's moments; ``faults`` are a line each."""

    command: str
    seconds: float
    moments: int
    struck: int
    again: int
    files: int
    faults: list[str]


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A command in a process group of its own, as a terminal has it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", "import sys; from pipelines import cli; sys.exit(cli.main())", *words]
    with log.open("ab") as file:
        return subprocess.Popen(line, cwd=log.parent, env=environment, stdout=file, stderr=file,
            stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip


def finish(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; what does not end in time is ended."""
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


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
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            return pq.read_table(file.name)
    if name.endswith((".html", ".md")):
        return re.sub(r"data:image/\w+;base64,", "", TIMES.sub(b"TIME", data).decode())
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
    process = start(["discover", *SMALL, "--output", str(made / "run")], made / "prepare.log")
    if code := finish(process):
        raise SystemExit(f"the run that others use ended with {code}: {made / 'prepare.log'}")


def disturb(name: str, moments: int, seed: int, made: Path) -> Result:
    """A command undisturbed, then ``moments`` times disturbed."""
    command, chance = COMMANDS[name], random.Random(f"{name} {seed}")
    work = made / name.replace(" ", "-")
    work.mkdir()
    out, log, struck, again, faults = work / "out", work / "log.txt", 0, 0, list[str]()

    def fresh() -> None:
        if out.is_dir():
            shutil.rmtree(out)
        out.unlink(missing_ok=True)
        if command.copies_run:
            shutil.copytree(made / "run", out)

    fresh()
    begin = time.monotonic()
    if code := finish(start(command.words(str(out), made), log)):
        return Result(name, 0.0, 0, 0, 0, 0, [f"undisturbed it ends with {code}, see {log}"])
    seconds, expected = time.monotonic() - begin, files_of(out)
    for moment in range(moments):
        number, at = SIGNALS[moment % len(SIGNALS)], chance.uniform(0, seconds)
        fresh()
        process = start(command.words(str(out), made), log)
        try:
            process.wait(at)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            struck += 1
        codes = [finish(process)]
        while len(codes) <= RETRIES and (codes[-1] or len(codes) == 1):
            codes.append(finish(start(command.words(str(out), made), log)))
        again += len(codes) - 2
        what = f"{number.name} at {at:.1f} s: codes {codes}"
        if codes[-1]:
            faults.append(f"{what}, see {log}")
        faults += [f"{what}: {found}" for found in differences(files_of(out), expected)]
        if "Traceback" in log.read_text(errors="replace"):
            faults.append(f"{what}: a traceback, see {log}")
            log.unlink()
    return Result(name, round(seconds, 1), moments, struck, again, len(expected), faults)


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line; 1 where a file differs or a command does not end with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--moments", type=int, default=30, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    args, results = parser.parse_args(argv), []
    with tempfile.TemporaryDirectory(prefix="uno-chaos-") as folder:
        made = Path(folder)
        prepare(made)
        print("| command | undisturbed, s | moments | struck | commands again | files compared | faults |")
        print("|---|---|---|---|---|---|---|")
        for name in args.commands:
            found = disturb(name, args.moments, args.seed, made)
            results.append(found)
            print("|", " | ".join(map(str, [*found[:-1], len(found.faults)])), "|", flush=True)
            for line in found.faults:
                print(f"{name}: {line}", file=sys.stderr)
                if "see " in line and Path(line.rpartition("see ")[2]).exists():
                    print(Path(line.rpartition("see ")[2]).read_text()[-2000:], file=sys.stderr)
    words = " ".join(["python -m tests.chaos", *(sys.argv[1:] if argv is None else argv)])
    print(json.dumps({"command": words, "seed": args.seed, "commands": [r._asdict() for r in results]}))
    return int(any(found.faults for found in results))


if __name__ == "__main__":
    sys.exit(main())
