"""How many copies of its decoded images does a resident run hold, and how many does ``data.ingest`` count?

    python -m benchmarks.memory --output DIR                       # 0, 1 and 2 workers, into DIR/result.json
    python -m benchmarks.memory --output DIR --repository CHECKOUT --version before

A run of `uno discover` with its evaluation, predictions and report is watched from outside: every .1 s the
proportional set sizes (PSS, of /proc) of its process and all below it are added up, in which memory that
processes share, as Ray's object store, counts once. Two sizes of the set tell what grows with it: copies =
(peak of the large one - peak of the small one) / (decoded bytes of the large one - those of the small one).
Images are PNG of a few hundred bytes, so that nothing but decoded pixels is large.
"""

import argparse
import glob
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.measure import environment
from uno.config import Config, override
from uno.data.ingest import num_copies

SIDE, NUM_CLASSES, SAMPLE_S = 128, 10, 0.1
OPTIONS = {
    "preset": "custom", "known-classes": "first:5", "num-novel": "5", "batch-size": "128",
    "data.store-size": str(SIDE), "augment.large.size": "16", "augment.large.crop": "resized",
    "model.encoder": "resnet_small", "model.width": "8", "model.num-heads": "1", "train.max-steps": "3",
    "data.ingest": "resident", "data.hold-out": "0.1",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000, 9_000])
    parser.add_argument("--repository", default=str(Path(__file__).parents[1]), help="whose `uno` is run")
    parser.add_argument("--version", default="now", help="what to call it")
    parser.add_argument("--output", required=True, help="directory of result.json, to which runs are added")
    options = parser.parse_args()
    file = Path(options.output) / "result.json"
    found = json.loads(file.read_text()) if file.exists() else {"runs": []}
    for workers in options.workers:
        for num_rows in options.rows:
            with tempfile.TemporaryDirectory() as folder:
                one = run(Path(folder), num_rows, workers, options.repository)
            found["runs"].append({"version": options.version, "workers": workers, **one})
            found = {
                "question": "copies of the decoded images in a resident run",
                "command": "python -m benchmarks.memory --output DIR", **environment(),
                "counted": {str(w): counted(w) for w in (0, 1, 2)},
                "copies": copies(found["runs"]), "runs": found["runs"],
            }  # fmt: skip
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["copies"], indent=1))


def counted(workers: int) -> int:
    """Copies that ``data.ingest`` auto takes for granted."""
    return num_copies(override(Config(), {"compute.workers": workers}))


def copies(runs: list[dict[str, Any]]) -> dict[str, float]:
    """By version and number of workers, from the runs of the fewest and of the most rows."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(runs, key=lambda one: one["rows"]):
        groups.setdefault(f"{one['version']}, {one['workers']} workers", []).append(one)
    return {
        name: round((some[-1]["peak_mb"] - some[0]["peak_mb"]) / grown, 2)
        for name, some in groups.items()
        if (grown := some[-1]["decoded_mb"] - some[0]["decoded_mb"])
    }


def run(folder: Path, num_rows: int, workers: int, repository: str) -> dict[str, float]:
    """One run of `uno discover`, watched."""
    write_set(folder / "set", num_rows)
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    words += ["--data", f"parquet:{folder}/set", "--workers", str(workers), "--output", str(folder / "run")]
    command = [sys.executable, "-m", "pipelines.discover", *words]
    environ = {**os.environ, "PYTHONPATH": repository, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=repository, env=environ, stdout=sys.stderr)
    peak = watched(process)
    if process.returncode:
        raise SystemExit(f"the run failed with code {process.returncode}")
    return {"rows": num_rows, "decoded_mb": round(num_rows * 3 * SIDE**2 / 1e6), "peak_mb": round(peak / 1e6)}


def watched(process: subprocess.Popen) -> int:
    """The largest sum of PSS over the process and all below it, in bytes, until it ends."""
    peak, ended = 0, threading.Event()
    waiter = threading.Thread(target=lambda: (process.wait(), ended.set()))
    waiter.start()
    while not ended.wait(SAMPLE_S):
        peak = max(peak, sum(map(pss, family(process.pid))))
    waiter.join()
    return peak


def family(top: int) -> list[int]:
    """Numbers of a process and of all below it."""
    below: dict[int, list[int]] = {}
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with suppress(OSError):
            fields = Path(stat).read_text().rpartition(")")[2].split()
            below.setdefault(int(fields[1]), []).append(int(stat.split("/")[2]))
    found = [top]
    for number in found:
        found += below.get(number, [])
    return found


def pss(number: int) -> int:
    """Of one process, in bytes; 0 once it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{number}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def write_set(folder: Path, num_rows: int) -> None:
    """Rows of ten classes in Parquet, images of one colour and a lighter corner."""
    folder.mkdir(parents=True)
    labels = np.arange(num_rows) % NUM_CLASSES
    random, encoded = np.random.default_rng(0), []
    for c in range(NUM_CLASSES):
        pixels = np.full((SIDE, SIDE, 3), 20 * c, np.uint8)
        pixels[: SIDE // 2, : SIDE // 2] = random.integers(0, 255, 3)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    names = [f"class {c}" for c in labels]
    pq.write_table(pa.table({"image": [encoded[c] for c in labels], "label": names}), folder / "rows.parquet")


if __name__ == "__main__":
    main()
