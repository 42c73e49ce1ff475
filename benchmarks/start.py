"""How long ``uno discover`` takes to start on a folder of JPEG files.

    python -m benchmarks.start --folder /tmp/jpegs --images 50000 --repeats 3

The folder is filled with small random images of ten classes if it does not exist. Each
repeat measures three starts: a new run until its first step, a run that resumes until
it says where, and the same command on the finished run until its end. A row of JSON has
the medians in seconds, and the megabytes that the process has read.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import PIL.Image

from benchmarks.measure import environment

SMALL = [
    "--workers",
    "0",
    "--known-classes",
    "first:5",
    "--preset",
    "cifar10",
    "--recipe",
    "cpu",
    "--max-steps",
    "2",
    "--model.width",
    "4",
    "--model.hidden-dim",
    "64",
    "--model.num-heads",
    "1",
    "--report-to",
    "jsonl",
    "--data.validation-fraction",
    "0",
    "--train.log-every",
    "1",
]


def write_images(folder: Path, num: int) -> None:
    """Write ``num`` JPEG files of 32 pixels into ten folders of classes."""
    generator = np.random.default_rng(0)
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
    for number in range(num):
        pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        path = folder / str(number % 10) / f"{number:06}.jpg"
        PIL.Image.fromarray(pixels).save(path, quality=85)


def measure_start(argv: list[str], until: str) -> tuple[float, float]:
    """Run ``uno discover ARGV...`` to its end, and measure a part of it.

    Args:
        argv: The options of the command.
        until: The beginning of the line that ends the measured part.

    Returns:
        The seconds until that line was printed, and the megabytes that the process had
        read then.
    """
    code = "import sys; from pipelines.cli import main; sys.exit(main())"
    start, found = time.perf_counter(), None
    with subprocess.Popen(
        [sys.executable, "-c", code, "discover", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found is None and line.startswith(until):
                seconds = time.perf_counter() - start
                facts = Path(f"/proc/{process.pid}/io").read_text().split()
                found = seconds, int(facts[facts.index("rchar:") + 1]) / 1e6
    if process.returncode or found is None:
        sys.exit(f"the command failed, or has no line {until!r}:\n{''.join(lines)}")
    return found


def main() -> None:
    """Print one row of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=3)
    own = parser.parse_args()
    if not own.folder.exists():
        write_images(own.folder, own.images)
    measured: dict[str, list[tuple[float, float]]] = {}
    for _ in range(own.repeats):
        with tempfile.TemporaryDirectory() as output:
            argv = ["--data", f"folder:{own.folder}", *SMALL, "--output", output]
            for case, until in (
                ("new run, to its first step", "pretrain  epoch"),
                ("resumed run, to where it resumes", "resuming at"),
                ("finished run, to its end", "results in"),
            ):
                measured.setdefault(case, []).append(measure_start(argv, until))
                if case.startswith("new"):  # as if it had been killed before its end
                    Path(output, "metrics.json").unlink()
    row = {
        case: {
            "seconds": round(statistics.median(s for s, _ in values), 2),
            "read_mb": round(statistics.median(mb for _, mb in values), 1),
        }
        for case, values in measured.items()
    }
    num_images = sum(len(files) for *_, files in os.walk(own.folder))
    print(json.dumps({"images": num_images, **row, **environment()}))


if __name__ == "__main__":
    main()
