"""How much memory does a resident run take, and how much does
:func:`uno.session.resources.peak_bytes` count?

    python -m benchmarks.memory --output DIR          # 0, 1 and 2 workers, three sizes, into DIR/result.json
    python -m benchmarks.memory --output DIR --workers 2 --rows 2000 --cpus 8     # as Ray on so many CPUs
    python -m benchmarks.memory --output DIR --repository CHECKOUT --version before

A run of `uno discover` with its evaluation, predictions and report is watched from
outside: every .1 s what its process and all below it hold is added up: their anonymous
memory, and that of files in /dev/shm, which is Ray's object store, once, mapped or not.
Pages of other files, which the kernel takes back, are left out. Of two sizes of the
set, copies = (peak of the large one - peak of the small one) / (the same of decoded
bytes). Images are PNG of a few hundred bytes, so that nothing but decoded pixels is
large; the network is tiny.
"""  # noqa: E501

import argparse
import glob
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.measure import environment
from uno.config import Config, override
from uno.session.resources import peak_bytes

SIDE, NUM_CLASSES, SAMPLE_S = 128, 10, 0.1
OPTIONS = {
    "preset": "scratch",
    "known-classes": "first:5",
    "num-novel": "5",
    "batch-size": "128",
    "data.stored-size": str(SIDE),
    "augment.large.size": "16",
    "augment.large.crop": "resized",
    "model.encoder": "resnet_small",
    "model.width": "8",
    "model.num-heads": "1",
    "train.max-steps": "3",
    "data.loading": "memory",
    "data.validation-fraction": "0.1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000, 10_000, 30_000])
    parser.add_argument(
        "--cpus", type=int, help="that Ray takes this machine for having"
    )
    parser.add_argument(
        "--repository",
        default=str(Path(__file__).parents[1]),
        help="whose `uno` is run",
    )
    parser.add_argument("--version", default="now", help="what to call it")
    parser.add_argument(
        "--output",
        required=True,
        help="directory of result.json, to which runs are added",
    )
    options = parser.parse_args()
    file = Path(options.output) / "result.json"
    found = json.loads(file.read_text()) if file.exists() else {"runs": []}
    for workers in options.workers:
        for num_rows in options.rows:
            with tempfile.TemporaryDirectory() as folder:
                one = run(
                    Path(folder), num_rows, workers, options.cpus, options.repository
                )
            found["runs"].append({"version": options.version, **one})
            print(json.dumps(found["runs"][-1]), flush=True)
            found = {
                "question": "memory of a resident run at its peak",
                "command": "python -m benchmarks.memory --output DIR",
                **environment(),
                "copies": copies(found["runs"]),
                "runs": found["runs"],
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["copies"], indent=1))


def copies(runs: list[dict[str, Any]]) -> dict[str, float]:
    """By version and number of workers, from the runs of the fewest and of the most
    rows.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(runs, key=lambda one: one["rows"]):
        cpus = f", {one['cpus']} CPUs" if one.get("cpus") else ""
        groups.setdefault(
            f"{one['version']}, {one['workers']} workers{cpus}", []
        ).append(one)
    return {
        name: round((some[-1]["peak_mb"] - some[0]["peak_mb"]) / grown, 2)
        for name, some in groups.items()
        if (grown := some[-1]["decoded_mb"] - some[0]["decoded_mb"])
    }


def run(
    folder: Path, num_rows: int, workers: int, cpus: int | None, repository: str
) -> dict[str, Any]:
    """One run of `uno discover`, watched: MB measured, MB estimated, and the ratio
    of the two.
    """
    write_set(folder / "set", num_rows)
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    words += [
        "--data",
        f"parquet:{folder}/set",
        "--workers",
        str(workers),
        "--output",
        str(folder / "run"),
    ]
    command = [sys.executable, "-m", "pipelines", "discover", *words]
    environ = {**os.environ, "PYTHONPATH": repository, "OMP_NUM_THREADS": "1"}
    if cpus:
        environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": cpus})
    process = subprocess.Popen(command, cwd=repository, env=environ, stdout=sys.stderr)
    parts = watched(process)
    peak = sum(parts.values())
    if process.returncode:
        raise SystemExit(f"the run failed with code {process.returncode}")
    config = override(Config(), {"compute.num_workers": workers})
    estimate = peak_bytes(config, num_rows, 3 * SIDE**2, cpus)
    return {
        "workers": workers,
        "cpus": cpus,
        "rows": num_rows,
        "decoded_mb": round(num_rows * 3 * SIDE**2 / 1e6),
        "peak_mb": round(peak / 1e6),
        "estimate_mb": round(estimate / 1e6),
        "measured_to_estimate": round(peak / estimate, 3),
        "parts_mb": {
            name: round(size / 1e6) for name, size in parts.most_common() if size > 1e7
        },
    }


def watched(process: subprocess.Popen) -> Counter[str]:
    """The most that the process and all below it hold at once, as :func:`held`,
    until it ends.
    """
    peak, ended = Counter[str](), threading.Event()
    waiter = threading.Thread(target=lambda: (process.wait(), ended.set()))
    waiter.start()
    while not ended.wait(SAMPLE_S):
        peak = max(peak, held(family(process.pid)), key=Counter.total)
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


def held(numbers: list[int]) -> Counter[str]:
    """Anonymous memory of these processes by name, and of files in memory that they
    have open, in bytes.
    """
    sizes, files = Counter[str](), dict[int, int]()
    for process in (Path(f"/proc/{number}") for number in numbers):
        with suppress(OSError):  # it has ended
            found = re.search(
                r"^Pss_Anon: *(\d+) kB", (process / "smaps_rollup").read_text(), re.M
            )
            title = (process / "cmdline").read_text().partition("\0")[0]
            name = title.rpartition("/")[2].partition(" ")[0]
            name = "the command" if process.name == str(numbers[0]) else name
            sizes[name] += 1024 * int(found[1]) if found else 0
            for file in (process / "fd").iterdir():
                if os.readlink(file).startswith("/dev/shm/"):
                    status = file.stat()
                    files[status.st_ino] = 512 * status.st_blocks
    sizes["files in memory"] = sum(files.values())
    return sizes


def write_set(folder: Path, num_rows: int) -> None:
    """Rows of ten classes in Parquet, images of one color and a lighter corner."""
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
    pq.write_table(
        pa.table({"image": [encoded[c] for c in labels], "label": names}),
        folder / "rows.parquet",
    )


if __name__ == "__main__":
    main()
