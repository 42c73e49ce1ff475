"""What do a million rows cost ``uno predict``, ``uno data pack`` and features of a
frozen encoder: seconds, and memory of the driver?

    python -m benchmarks.inference predict --rows 1000000 --workers 2

prints one JSON row. The rows are random PNGs of 8 x 8 pixels, made here and written as
Parquet (``--file-rows`` a file, groups of 1,000, a label, no id); the model is that of
the digits with random weights, each command a process of its own. ``peak_mib`` is the
largest resident memory of that process, not of Ray's; ``steady_rows_per_s`` is between
the first and the last tenth of the partitions. ``table`` is a hash of all that is in
the result: of a pack ids, labels and images, and ``same_rows`` says that they are those
of the source; of features their files. ``--kill`` kills it, -9, when half of the
partitions are there, and repeats the command: what was kept, and whether the whole
table is that of a command that nobody killed. ``--cores`` confines it to so many cores.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import environment
from uno.config import dump_yaml, override
from uno.data.files import Storage
from uno.model import build_model
from uno.presets import preset
from uno.results.infer import save_model

SIDE, GROUP_ROWS = 8, 1000
POLL_S = 0.05


def png(pixels: np.ndarray) -> bytes:
    """(S, S, 3) uint8 as PNG; 20 times as fast as Pillow."""
    side = len(pixels)
    lines = np.concatenate(
        [np.zeros((side, 1), np.uint8), pixels.reshape(side, -1)], axis=1
    )
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"IDAT", zlib.compress(lines.tobytes(), 0)),
        (b"IEND", b""),
    )
    body = (
        struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d))
        for n, d in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def write_rows(folder: Path, num_rows: int, file_rows: int) -> None:
    """Files of random images; a row in two has a label."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, num_rows, file_rows)):
        num = min(file_rows, num_rows - start)
        with pq.ParquetWriter(folder / f"train-{number:05d}.parquet", SCHEMA) as writer:
            for first in range(0, num, GROUP_ROWS):
                size = min(GROUP_ROWS, num - first)
                pixels = rng.integers(0, 256, (size, SIDE, SIDE, 3), dtype=np.uint8)
                label = [
                    str(i % 10) if i % 2 else None
                    for i in rng.integers(0, 10, size).tolist()
                ]
                images = pa.array([png(one) for one in pixels], pa.binary())
                writer.write_table(
                    pa.table({"image": images, "label": label}, schema=SCHEMA)
                )


SCHEMA = pa.schema({"image": pa.binary(), "label": pa.string()})


def write_run(folder: Path) -> None:
    """An untrained model of the digits as a run directory."""
    config = override(preset("digits"), {"data.source": "digits"})
    storage = Storage(str(folder))
    save_model(
        config,
        storage,
        build_model(config.model, 5, 5, seed=0),
        0,
        [str(i) for i in range(5)],
    )
    storage.write("config.yaml", dump_yaml(config).encode())


def run(
    command: list[str],
    cores: int,
    parts: Path,
    pattern: str,
    kill_at: int | None = None,
) -> dict[str, Any]:
    """A command: seconds, peak memory, when its partitions came; killed when
    ``kill_at`` are there.
    """
    start, seen, peak = time.monotonic(), list[tuple[float, int]](), 0
    mine = sorted(os.sched_getaffinity(0))[:cores]
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        preexec_fn=lambda: os.sched_setaffinity(0, mine),
        env=os.environ | {"OMP_NUM_THREADS": str(cores)},
        stdout=sys.stderr,
    )
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = max(
            peak,
            *(int(line.split()[1]) for line in lines if line.startswith("VmHWM")),
            0,
        )
        num = len(list(parts.glob(pattern)))
        if not seen or num > seen[-1][1]:
            seen.append((time.monotonic() - start, num))
        if kill_at is not None and num >= kill_at:
            process.send_signal(signal.SIGKILL)
            process.wait()
            break
        time.sleep(POLL_S)
    done = time.monotonic() - start
    if process.returncode not in (0, -signal.SIGKILL):
        sys.exit(process.returncode)
    last = seen[-1][1] if seen else 0
    inner = [(at, num) for at, num in seen if 0.1 * last <= num <= 0.9 * last]
    rate = (
        (inner[-1][1] - inner[0][1]) / (inner[-1][0] - inner[0][0])
        if len(inner) > 1
        else float("nan")
    )
    return {
        "seconds": round(done, 1),
        "peak_mib": round(peak / 1024, 1),
        "parts_per_s": rate,
        "parts": last,
    }


def digest(path: Path) -> tuple[int, str]:
    """Rows of a table of predictions, and a hash of their ids and classes."""
    found, num = hashlib.sha256(), 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["id", "class_index", "status"]):
            num += len(batch)
            found.update(
                "".join(
                    map(str, zip(*batch.to_pydict().values(), strict=True))
                ).encode()
            )
    return num, found.hexdigest()[:16]


def contents(folder: Path, ids: bool) -> tuple[int, str]:
    """Rows of the Parquet files of a folder, and a hash of their ids (or, without,
    FILE#NUMBER), labels and images, in whatever order.
    """
    total = num = 0
    for path in sorted(folder.glob("t*.parquet")):
        with pq.ParquetFile(path) as file:
            start, columns = num, ["image", "label", *(["id"] if ids else [])]
            for batch in file.iter_batches(columns=columns):
                names = (
                    batch["id"].to_pylist()
                    if ids
                    else [f"{path.name}#{num - start + i}" for i in range(len(batch))]
                )
                for name, label, image in zip(
                    names,
                    batch["label"].to_pylist(),
                    batch["image"].to_pylist(),
                    strict=True,
                ):
                    total += int.from_bytes(
                        hashlib.blake2b(f"{name} {label} ".encode() + image).digest()[
                            :8
                        ],
                        "big",
                    )
                num += len(batch)
    return num, f"{total % 2**64:016x}"


def fill(options: argparse.Namespace) -> int:
    """The process that is measured: what the cache lacks of the features of all
    rows.
    """
    from pipelines.features import fill_cache

    changes = {
        "data.source": f"parquet:{data_of(options)}",
        "data.known_classes": "1,3",
        "data.num_novel": 5,
        "model.finetune": "none",
        "model.weights": str(options.folder / "encoder.safetensors"),
        "augment.small.num_views": 0,
        "augment.num_cached_views": 3,
        "compute.num_workers": options.workers,
        "compute.cache": str(options.folder / "out"),
        "output": str(options.folder / "out" / "run"),
    }
    return fill_cache(override(preset("digits"), changes))


def data_of(options: argparse.Namespace) -> Path:
    """Where the rows are."""
    return Path(options.folder) / f"rows-{options.rows}-{options.file_rows}"


def main() -> int:
    """Measure and print one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["predict", "pack", "features", "fill"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--file-rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--kill", action="store_true")
    parser.add_argument(
        "--folder", type=Path, help="keeps data and run, for the next measurement"
    )
    options = parser.parse_args()
    if options.what == "fill":
        return fill(options)
    kept, options.folder = (
        options.folder,
        options.folder or Path(tempfile.mkdtemp(prefix="uno-bench-")),
    )
    try:
        print(json.dumps(measure(options, options.folder)))
    finally:
        if kept is None:
            shutil.rmtree(options.folder, ignore_errors=True)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One command, or with ``--kill`` two and one that nobody kills."""
    data, out = data_of(options), folder / "out"
    if not data.exists():
        write_rows(data, options.rows, options.file_rows)
    if not (folder / "run").exists():
        write_run(folder / "run")
        shutil.copy(
            folder / "run" / "model" / "encoder.safetensors",
            folder / "encoder.safetensors",
        )
    shutil.rmtree(out, ignore_errors=True)
    workers = ["--workers", str(options.workers)]
    source = ["--data", f"parquet:{data}", "--output", str(out), *workers]
    if options.what == "predict":
        command, pattern = (
            ["pipelines", "predict", str(folder / "run"), *source],
            "_shards/*.parquet",
        )
    elif options.what == "pack":
        known = ["--known-classes", "1,3", "--shard-mb", "1"]
        command, pattern = ["pipelines", "data", "pack", *source, *known], "t*.parquet"
    else:
        sizes = [
            "--rows",
            str(options.rows),
            "--file-rows",
            str(options.file_rows),
            "--folder",
            str(folder),
        ]
        command, pattern = (
            ["benchmarks.inference", "fill", *sizes, *workers],
            "features/*/*.parquet",
        )
    row: dict[str, Any] = {
        "question": f"seconds and memory of the driver of uno {options.what}",
        "command": f"python -m benchmarks.inference {' '.join(sys.argv[1:])}".strip(),
        **environment(),
        "load_average": round(os.getloadavg()[0], 1),
    }

    def table() -> tuple[int, str]:
        if options.what == "predict":
            return digest(out / "predictions.parquet")
        if options.what == "pack":
            return contents(out, True)
        # which hold hashes of what is in them
        names = sorted(path.name for path in out.glob(pattern))
        return options.rows, hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]

    found = run(command, options.cores, out, pattern)
    rate = found.pop("parts_per_s") * options.rows / max(found["parts"], 1)
    row |= {
        "rows": options.rows,
        "workers": options.workers,
        "cores": options.cores,
        **found,
    }
    row |= {
        "rows_per_s": round(options.rows / found["seconds"]),
        "steady_rows_per_s": round(rate) if rate == rate else None,
    }
    row["rows_out"], row["table"] = table()
    if options.what == "pack":
        row["same_rows"] = contents(data, False) == (row["rows_out"], row["table"])
    if options.kill:
        shutil.rmtree(out)
        killed = run(command, options.cores, out, pattern, kill_at=found["parts"] // 2)
        kept = {path: path.stat().st_mtime_ns for path in out.glob(pattern)}
        again = run(command, options.cores, out, pattern)
        there = [
            path.exists() and path.stat().st_mtime_ns == at for path, at in kept.items()
        ]
        row["killed"] = {
            "seconds": killed["seconds"],
            "parts_kept": len(kept),
            "seconds_after": again["seconds"],
            "rows_a_part": round(options.rows / found["parts"]),
            "parts_untouched": sum(there),
            "same_table": table() == (row["rows_out"], row["table"]),
        }
        if options.what == "predict":
            row["killed"].pop("parts_untouched")  # joined, they go
    return row


if __name__ == "__main__":
    sys.exit(main())
