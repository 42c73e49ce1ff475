"""What does a row cost, in bytes and seconds, before anything is trained on it?

    python -m benchmarks.metadata --rows 1000000

prints one JSON row for each number of rows: synthetic metadata of Parquet files (row
groups of 512 images, 100 classes, one label in five hidden), no image. ``driver`` is
what one process does, but for the preflight check, which reads images; ``setup`` what
one of ``--ranks`` does in a process of its own before its first batch of a stream,
``later`` what it does then. Microseconds a row of each part; ``bytes_a_row``: the most
memory beyond what the process had before them all, what all ranks of a node share
included.
"""

import argparse
import gc
import json
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.measure import environment
from uno.config import Config, override
from uno.data.columns import Labels, Numbered
from uno.data.decode import BadRows
from uno.data.files import Storage
from uno.data.images import spread
from uno.data.rows import Rows
from uno.data.splits import Task, make_task, truth_rows
from uno.data.stream import (
    CropJob,
    StreamedEvalSet,
    StreamSet,
    crop_local,
    stream_facts,
)
from uno.data.tables import ParquetImages
from uno.presets import preset
from uno.runs import run

GROUP_ROWS, FILE_ROWS, NUM_CLASSES, IMAGE_BYTES = 512, 2**16, 100, 110_000


class Unread(ParquetImages):
    """The row groups of ``num`` images, without their files."""

    def __init__(self, num: int) -> None:
        starts = [*range(0, num, GROUP_ROWS), num]
        self.root, self.column, self._has_paths = "/nowhere", "image", False
        self._files = [(f"{i}.parquet", 0) for i in range(len(starts) - 1)]
        self._groups = [(i, 0) for i in range(len(starts) - 1)]
        self._starts = np.array(starts)
        self._bytes, self._times = (
            np.diff(starts) * IMAGE_BYTES,
            np.zeros(len(starts) - 1, np.int64),
        )


def config_of(ranks: int) -> Config:
    """Streaming, the first 80 classes known."""
    options: dict[str, Any] = {
        "data.known_classes": f"first:{NUM_CLASSES * 4 // 5}",
        "data.loading": "streaming",
        "data.stored_size": 8,
        "augment.large.size": 8,
        "augment.small.num_views": 0,
        "train.batch_size": 640,
        "compute.num_workers": ranks,
    }
    return override(preset("imagenet"), options)


def rows_of(num: int) -> Rows:
    """``num`` rows whose classes take turns by row groups; one in 50 is a test row."""
    starts = np.array([*range(0, num, FILE_ROWS), num])
    ids = Numbered([f"train/{i:06}.parquet" for i in range(len(starts) - 1)], starts)
    codes = (np.arange(num) * 7919 // 31 % NUM_CLASSES).astype(np.int32)
    labels = Labels(tuple(f"{i:03}" for i in range(NUM_CLASSES)), codes)
    return Rows(ids, Unread(num), labels, np.arange(num) % 50 != 49, "parquet:nowhere")


class Meter:
    """Parts of the work: seconds a row of each, and bytes a row of all beyond what
    there was.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self._parts = num_rows, dict[str, float]()
        gc.collect()
        self._before = _memory(reset=True)

    def __call__(self, name: str, part: Callable[[], Any]) -> Any:
        """What ``part`` returns, measured under ``name``."""
        begin = time.perf_counter()
        found = part()
        self._parts[name] = round(
            1e6 * (time.perf_counter() - begin) / self._num_rows, 4
        )
        return found

    def result(self) -> dict[str, Any]:
        """Of all parts so far."""
        most = _memory() - self._before
        total = round(sum(self._parts.values()), 4)
        return {
            "bytes_a_row": round(most / self._num_rows, 2),
            "microseconds_a_row": total,
            "parts": self._parts,
        }


def _memory(reset: bool = False) -> int:
    """The most that this process has held in memory since the last ``reset``."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    text = Path("/proc/self/status").read_text()
    return next(
        1024 * int(line.split()[1])
        for line in text.splitlines()
        if line.startswith("VmHWM")
    )


def driver(
    num_rows: int, ranks: int, meter: Callable[[str, Callable[[], Any]], Any]
) -> Task:
    """From a source's columns to what all ranks get."""
    config = config_of(ranks)
    rows = meter("rows", lambda: rows_of(num_rows))
    task: Task = meter("task", lambda: make_task(rows, config.data))
    meter("fingerprint", lambda: rows.fingerprint)
    meter("plans", lambda: run.plans(config, *task.sizes, ranks))
    meter("truth", lambda: truth_rows(task))
    meter(
        "sample", lambda: spread(rows.images, [np.flatnonzero(task.labels < 0)], 20_000)
    )
    return task


def store(facts: Any, folder: Path) -> None:
    """As in an object store: arrays apart, which ranks read where they are."""
    buffers: list[pickle.PickleBuffer] = []
    (folder / "facts").write_bytes(
        pickle.dumps(facts, protocol=5, buffer_callback=buffers.append)
    )
    for number, buffer in enumerate(buffers):
        (folder / f"{number:03}.buffer").write_bytes(buffer.raw())


def load(folder: Path) -> dict[str, Any]:
    """What :func:`store` has stored, mapped into memory."""
    arrays = [
        np.memmap(path, np.uint8, "r") for path in sorted(folder.glob("*.buffer"))
    ]
    return dict(pickle.loads((folder / "facts").read_bytes(), buffers=arrays))


def rank(num_rows: int, ranks: int, folder: Path) -> dict[str, Any]:
    """What rank 1 does before its first batch, and after it."""
    config, meter = config_of(ranks), Meter(num_rows)
    facts = meter("facts", lambda: load(folder / "facts"))
    images, storage = facts["images"], Storage(str(folder / "run"))
    bad = meter("bad_rows", lambda: BadRows(facts.pop("ids"), images, 0.01, storage))
    decode = lambda batches: (  # noqa: E731
        (b, torch.zeros(len(b), 3, 8, 8), [None] * len(b)) for b in batches
    )
    train = StreamSet(
        **facts, bad=bad, crop=lambda job: crop_local(job, 1), decode=decode
    )
    plan = run.plans(config, len(train.labels), train.num_unlabeled, ranks)[
        run.DISCOVER
    ]
    job = meter(
        "job",
        lambda: CropJob(config, train, plan, 1, ranks, 0, 2 * plan.steps_per_epoch),
    )
    meter("epoch", lambda: next(next(job.epochs(job.chunk_rows))))
    setup, meter = meter.result(), Meter(num_rows)
    meter(
        "bad_image", lambda: (bad.add(3, "unreadable"), bad.sync(torch.device("cpu")))
    )
    index, classes, free = meter("truth", lambda: load(folder / "truth"))["train"]
    held = StreamedEvalSet(classes, index, free, images, 8, decode, bad)
    meter("evaluation", lambda: next(held.batches(256, 1, ranks)))
    return {"setup": setup, "later": meter.result()}


def measured(num_rows: int, ranks: int) -> dict[str, Any]:
    """The parts at one number of rows."""
    meter = Meter(num_rows)
    task = driver(num_rows, ranks, meter)
    lead = meter.result()
    with (
        TemporaryDirectory() as name,
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        folder = Path(name)
        for what, facts in (("facts", stream_facts(task)), ("truth", truth_rows(task))):
            (folder / what).mkdir()
            store(facts, folder / what)
        own = pool.submit(rank, num_rows, ranks, folder).result()
    return {"rows": num_rows, "ranks": ranks, "driver": lead, **own}


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6])
    parser.add_argument("--ranks", type=int, default=64)
    args = parser.parse_args()
    for num_rows in args.rows:
        print(
            json.dumps(
                {
                    "benchmark": "metadata",
                    **measured(num_rows, args.ranks),
                    **environment(),
                }
            )
        )


if __name__ == "__main__":
    main()
