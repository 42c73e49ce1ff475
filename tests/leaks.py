"""What commands leave behind in a process that goes on, and on the machine: nothing.

    OMP_NUM_THREADS=1 python -m tests.leaks --times 50

Each command runs ``--times`` times in this process, after once that imports what it
needs; then threads, open files, child processes, entries of /dev/shm and of the
temporary directory are counted again. Sweeps share the Ray of one process, which keeps
idle processes for tasks to come: of it, actors and placement groups count. Then each
runs as a process of its own, to success, to an error and to Ctrl-C.
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from pipelines import ray_env
from tests import chaos
from tests.agreement import command
from tests.pipelines.small import SMALL, write_images
from tests.processes import below, running
from tests.tune.tiny import TINY
from uno.config import Config, override
from uno.encoders.build import build_encoder

RUN = [*SMALL, "--data.limit", "60", "--pretrain.epochs", "1", "--discover.epochs", "1"]
ONE = ["--compute.threads", "1"]
# where things are made, how often it has run
COMMANDS: dict[str, Callable[[Path, int], list[Any]]] = {
    "data check": lambda made, _: [
        "data",
        "check",
        "--data",
        made / "images",
        "--known-classes",
        "first:2",
    ],
    "data pack": lambda made, i: [
        "data",
        "pack",
        "--data",
        made / "images",
        "--output",
        made / f"pack{i}",
    ],
    "discover": lambda made, i: ["discover", *RUN, "--output", made / f"run{i}"],
    "evaluate": lambda made, _: ["evaluate", made / "run"],
    "predict": lambda made, i: [
        "predict",
        made / "run",
        "--data",
        made / "images",
        "--csv",
        "--folders",
        *ONE,
        "--output",
        made / f"out{i}",
    ],
    "classes": lambda made, i: ["classes", made / "run", "--rename", f"5=class {i}"],
    "report": lambda made, _: ["report", made / "run"],
    "export": lambda made, i: [
        "export",
        made / "run",
        "--format",
        ("pt2", "encoder")[i % 2],
    ],
    "estimate": lambda made, i: [
        "estimate-classes",
        *RUN,
        "--known-classes",
        "first:6",
        "--max-steps",
        "2",
        "--num-splits",
        "1",
        "--max-novel",
        "2",
        "--output",
        made / f"estimate{i}",
    ],
    "reproduce": lambda made, i: [
        "reproduce",
        "ablation",
        "--seeds",
        "1",
        "--rows",
        "uno",
        "--parallel",
        "1",
        *chaos.CELL,
        "--data.limit",
        "60",
        "--output",
        made / f"cells{i}",
    ],
    "embed": lambda made, i: [
        "embed",
        "--data",
        made / "images",
        "--model.encoder",
        "resnet_small",
        "--model.width",
        "4",
        "--weights",
        made / "encoder.safetensors",
        "--image-size",
        "8",
        "--views",
        "1",
        *ONE,
        "--compute.cache",
        made / f"cache{i}",
        "--output",
        made / f"vectors{i}.parquet",
    ],
    "tune": lambda made, i: [
        "tune",
        *TINY,
        "--trials",
        "1",
        "--folds",
        "1",
        "--workers",
        "1",
        "--output",
        made / f"sweep{i}",
    ],
    "doctor": lambda made, _: ["doctor"],
    "refused": lambda made, i: [
        "predict",
        made / "run",
        "--data",
        "folder:/nothing",
        "--output",
        "o",
    ],
}
ON_RAY = ("tune",)
RAY_PROCESSES = ("raylet", "gcs_server")
# until an actor that was killed holds nothing, on a machine with other work
RELEASED_S = 60.0
STRUCK_S = 3.0  # CPU seconds until Ctrl-C where no folder says that the work has begun
Counts = dict[str, int]


def counts(temporary: Path, held_before: int = 0) -> Counts:
    """Of this process and of the machine, once Ray holds no more than
    ``held_before``, or after a while.
    """
    found = running()
    children = below([os.getpid()], found)
    of_ray = below(
        [pid for pid, each in children.items() if each.name in RAY_PROCESSES], found
    )
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "processes": len(children.keys() - of_ray.keys()) - 1,
        "held": _held_on_ray(held_before),
        "shm": len(list(Path("/dev/shm").iterdir())),
        "temporary": len(list(temporary.iterdir())),
    }


def _held_on_ray(most: float) -> int:
    """Actors and placement groups that hold resources, once at most ``most`` do, or
    after a while.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 0
    from ray.util import state

    end = time.monotonic() + RELEASED_S
    while True:
        # not Ray's own
        actors = [
            each for each in state.list_actors(detail=True) if each.required_resources
        ]
        held = sum(
            each.state not in ("DEAD", "REMOVED")
            for each in [*actors, *state.list_placement_groups()]
        )
        if held <= most or time.monotonic() > end:
            return held
        time.sleep(chaos.POLL_S)


def in_process(
    name: str, times: int, made: Path, temporary: Path
) -> tuple[Counts, Counts]:
    """Counts after the first of that command and after ``times`` more."""
    found = list[Counts]()
    with ray_env.connect(workers=1) if name in ON_RAY else nullcontext():
        before = _held_on_ray(math.inf)  # by others, where a lane shares its cluster
        for number in range(times + 1):
            with suppress(AssertionError) if name == "refused" else nullcontext():
                command(*COMMANDS[name](made, number))
            if number in (0, times):
                found.append(counts(temporary, before))
    return found[0], found[1]


ENDS = ("success", "error", "Ctrl-C")


def on_its_own(
    name: str, end: str, made: Path, temporary: Path
) -> tuple[int, list[str]]:
    """Exit code of a command in a process of its own, and what is there that was not
    before it.
    """

    def there() -> set[str]:  # Ray keeps the logs of its sessions in a folder "ray"
        folders = (Path("/dev/shm"), temporary)
        return {
            str(path)
            for folder in folders
            for path in folder.iterdir()
            if path.name != "ray"
        }

    words = [*map(str, COMMANDS[name](made, 10**6 + ENDS.index(end)))]
    before, output = (
        there(),
        Path(words[words.index("--output") + 1]) if "--output" in words else None,
    )
    if end == "error":  # that the data, the run or the output is not what it should be
        there_is_none = str(made / ("images" if name == "data check" else "run"))
        words = [
            str(made / "nothing") if word == there_is_none else word for word in words
        ]
        if output is not None:
            output.write_text("mine")
    process = chaos.start(words, made / "log.txt")
    if end == "Ctrl-C":
        folder = output if output is not None and not output.suffix else None
        chaos.spent(process, lambda cpu: folder.exists() if folder else cpu > STRUCK_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    code = chaos.finish(process)
    left = chaos.left_running(name in ON_RAY)
    return code, [f"process {each}" for each in left] + sorted(there() - before)


def prepare(made: Path) -> Path:
    """A run and images to work on in ``made``, and a temporary directory for all;
    returns that.
    """
    temporary = made / "temporary"
    temporary.mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    write_images(made / "images", {"cat": 8, "dog": 8, "emu": 8})
    command("discover", *RUN, "--output", made / "run")
    encoder = build_encoder(
        override(Config(), {"model.encoder": "resnet_small", "model.width": 4}).model
    )
    safetensors.torch.save_file(encoder.state_dict(), made / "encoder.safetensors")
    return temporary


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line; 1 where something is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument(
        "--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS)
    )
    parser.add_argument(
        "--ends", action="store_true", help="also in processes of their own"
    )
    args, results, left = parser.parse_args(argv), dict[str, Any](), 0
    chaos.settle()
    with tempfile.TemporaryDirectory(prefix="uno-leaks-") as folder:
        made = Path(folder)
        temporary = prepare(made)
        for name in args.commands if args.times else ():
            first, last = in_process(name, args.times, made, temporary)
            left += any(last[what] > first[what] for what in first)
            results[name] = {"first": first, "last": last}
            pairs = (f"{first[what]} → {last[what]}" for what in first)
            print(f"| {name} | {args.times} | {' | '.join(pairs)} |", flush=True)
        for name in args.commands if args.ends else ():
            for end in ENDS:
                code, found = on_its_own(name, end, made, temporary)
                left += bool(found)
                results[f"{name}, {end}"] = {"code": code, "left": found}
                print(
                    f"| {name}, {end} | code {code} |"
                    f" {', '.join(found) or 'nothing'} |",
                    flush=True,
                )
        tempfile.tempdir = None
    words = " ".join(
        ["python -m tests.leaks", *(sys.argv[1:] if argv is None else argv)]
    )
    print(json.dumps({"command": words, "results": results}))
    return int(left > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
