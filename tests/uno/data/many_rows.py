"""Measure the memory that the metadata of a row takes before training.

    python -m tests.uno.data.many_rows 1000000 4000000

prints one line of JSON for each number of rows: the bytes for each row of the driver
and of one of 64 ranks. The rows are synthetic: row groups of 512 images, 100 classes,
one label in five hidden, and no image is read. The bytes are the peak beyond what the
process had before.
"""

import gc
import json
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from uno.config import Config, override
from uno.data.columns import decimal, joined
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

GROUP_ROWS, NUM_CLASSES, IMAGE_BYTES = 512, 100, 110_000


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
    ids = joined("#", "train/000000.parquet", decimal(np.arange(num)))
    codes = (np.arange(num) * 7919 // 31 % NUM_CLASSES).astype(np.int32)
    classes = pa.array([f"{i:03}" for i in range(NUM_CLASSES)], pa.large_string())
    labels = pa.DictionaryArray.from_arrays(codes, classes)
    return Rows(ids, Unread(num), labels, np.arange(num) % 50 != 49, "parquet:nowhere")


class Meter:
    """Measure the peak memory of this process since the meter was made."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        gc.collect()
        self._before = _memory(reset=True)

    def bytes_a_row(self) -> float:
        """Return the bytes for each row beyond what the process had before."""
        return (_memory() - self._before) / self._num_rows


def _memory(reset: bool = False) -> int:
    """Return the peak memory of this process in bytes since the last ``reset``."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    text = Path("/proc/self/status").read_text()
    return next(
        1024 * int(line.split()[1])
        for line in text.splitlines()
        if line.startswith("VmHWM")
    )


def prepare(num_rows: int, ranks: int) -> Task:
    """Do what the driver does, from a source's columns to what all ranks get."""
    config = config_of(ranks)
    rows = rows_of(num_rows)
    task = make_task(rows, config.data)
    assert rows.fingerprint
    run.plans(config, *task.sizes, ranks)
    truth_rows(task)
    spread(rows.images, [np.flatnonzero(task.labels < 0)], 20_000)
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


def train_on_rank(num_rows: int, ranks: int, folder: Path) -> float:
    """Do what rank 1 does until its first batch, and after it.

    Returns:
        The bytes for each row that the rank takes until its first batch.
    """
    config, meter = config_of(ranks), Meter(num_rows)
    facts = load(folder / "facts")
    images, storage = facts["images"], Storage(str(folder / "run"))
    bad = BadRows(facts.pop("ids"), images, 0.01, storage)
    decode = lambda batches: (  # noqa: E731
        (b, torch.zeros(len(b), 3, 8, 8), [None] * len(b)) for b in batches
    )
    train = StreamSet(
        **facts, bad=bad, crop=lambda job: crop_local(job, 1), decode=decode
    )
    plan = run.plans(config, len(train.labels), train.num_unlabeled, ranks)[
        run.DISCOVER
    ]
    job = CropJob(config, train, plan, 1, ranks, 0, 2 * plan.steps_per_epoch)
    next(next(job.epochs(job.chunk_rows)))
    taken = meter.bytes_a_row()
    bad.add(3, "unreadable")
    bad.sync(torch.device("cpu"))
    index, classes, free = load(folder / "truth")["train"]
    held = StreamedEvalSet(classes, index, free, images, 8, decode, bad)
    next(held.batches(256, 1, ranks))
    return taken


def store_parts(task: Task, folder: Path) -> None:
    """Write what ranks get of a task below ``folder``."""
    for part, facts in (("facts", stream_facts(task)), ("truth", truth_rows(task))):
        (folder / part).mkdir()
        store(facts, folder / part)


def measured(num_rows: int, ranks: int) -> dict[str, float]:
    """Return the bytes for each row of the driver and of a rank."""
    meter = Meter(num_rows)
    task = prepare(num_rows, ranks)
    taken = meter.bytes_a_row()
    with (
        TemporaryDirectory() as name,
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        store_parts(task, Path(name))
        rank = pool.submit(train_on_rank, num_rows, ranks, Path(name)).result()
    return {"rows": num_rows, "driver": taken, "rank": rank}


if __name__ == "__main__":
    for words in sys.argv[1:]:
        print(json.dumps(measured(int(words), 64)))
