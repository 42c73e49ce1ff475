"""How long does discovery take on very many vectors, in how much memory, and how well
does it find classes?

    python -m benchmarks.large --rows 1000000 --output /tmp/large

writes vectors of ``--dims`` numbers as one Parquet file, piece by piece, and runs
``uno discover`` on it in a process of its own: 100 known classes, whose rows have
labels, and 50 novel ones. Classes are Gaussians around random directions; their sizes
fall as 1 / rank ^ 0.5. Prints one JSON row: seconds, seconds of CPU time, ``peak_mib``,
the largest resident memory of that process (pages of the mapped file count; Ray's
processes do not), the accuracy of the run and that of k-means.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import environment

KNOWN, NOVEL = 100, 50
PIECE_ROWS = 50_000
NOISE = 3.0  # length of what a row has besides the direction of its class, of length 1
POLL_S = 0.2
KEYS = (
    "train/novel/task_aware/acc/avg",
    "baseline/kmeans/novel/acc",
    "train/known/task_aware/acc/avg",
)


def write_vectors(path: Path, num_rows: int, dims: int, seed: int = 0) -> None:
    """Rows in random order; those of known classes have a label, those of novel ones
    ``eval_label`` alone.
    """
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((KNOWN + NOVEL, dims), np.float32)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    share = 1 / np.arange(1, KNOWN + NOVEL + 1) ** 0.5
    share = rng.permutation(share / share.sum())
    schema = pa.schema(
        {
            "id": pa.string(),
            "embedding": pa.list_(pa.float32(), dims),
            "label": pa.string(),
            "eval_label": pa.string(),
        }
    )
    names = pa.array([f"class-{i:03}" for i in range(KNOWN + NOVEL)])
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for start in range(0, num_rows, PIECE_ROWS):
            num = min(PIECE_ROWS, num_rows - start)
            label = rng.choice(KNOWN + NOVEL, num, p=share)
            noise = rng.standard_normal((num, dims), np.float32) * (NOISE / dims**0.5)
            values = pa.array((means[label] + noise).ravel())
            columns = {
                "id": pa.array([f"row-{i:09}" for i in range(start, start + num)]),
                "embedding": pa.FixedSizeListArray.from_arrays(values, dims),
                "label": names.take(
                    pa.array(np.where(label < KNOWN, label, 0), mask=label >= KNOWN)
                ),
                "eval_label": names.take(pa.array(label)),
            }
            writer.write_table(
                pa.table(columns, schema=schema), row_group_size=PIECE_ROWS
            )


def measured(command: list[str], log: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak memory in MiB of a command, which writes to
    ``log``.
    """
    start, peak, before = time.monotonic(), 0.0, os.times()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, resident_mib(process.pid))
            time.sleep(POLL_S)
    if process.returncode:
        sys.exit(f"{' '.join(command)}:\n{log.read_text()}")
    now = os.times()
    cpu = (
        now.children_user
        + now.children_system
        - before.children_user
        - before.children_system
    )
    return time.monotonic() - start, cpu, peak


def resident_mib(pid: int) -> float:
    """The largest memory that a process has had, in MiB; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max(
        (int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")),
        default=0.0,
    )


def row(args: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Of one run."""
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    data, run = (
        folder / f"vectors-{args.rows}.parquet",
        folder / f"run-{args.rows}-{workers}",
    )
    if not data.exists():
        write_vectors(data, args.rows, args.dims)
    command = [
        sys.executable,
        "-m",
        "pipelines",
        "discover",
        "--data",
        f"vectors:{data}",
        "--setting",
        "ncd",
        "--num-novel",
        str(NOVEL),
        "--workers",
        str(workers),
        "--output",
        str(run),
        "--overwrite",
        *args.options,
    ]
    seconds, cpu, peak = measured(command, folder / f"run-{args.rows}-{workers}.txt")
    metrics = json.loads((run / "metrics.json").read_text())
    return {
        "benchmark": "large",
        "rows": args.rows,
        "dims": args.dims,
        "workers": workers,
        "options": args.options,
        "file_mib": round(data.stat().st_size / 2**20),
        "seconds": round(seconds, 1),
        "cpu_s": round(cpu, 1),
        "peak_mib": round(peak),
        **{key: round(metrics[key], 4) for key in KEYS if key in metrics},
        **environment(),
    }


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--output", required=True, help="a directory for vectors and runs"
    )
    parser.add_argument("options", nargs="*", help="more options of uno discover")
    args = parser.parse_args()
    for workers in args.workers:
        print(json.dumps(row(args, workers)), flush=True)


if __name__ == "__main__":
    main()
