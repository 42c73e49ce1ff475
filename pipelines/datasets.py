"""Ray Data: decode every image once on the cluster, then hand the decoded set to the training workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines.blocks import image_columns, images_of, pixel_column
from uno.data.decode import decode_many
from uno.data.resident import EvalSet, TrainSet
from uno.data.splits import Task

ROWS_PER_TASK = 2048  # a task is a process at first, which takes seconds to import torch
ROWS_PER_DECODE = 256  # decoded at once by a task; bounds its memory
ROWS_PER_BATCH = 4096


def decode_task(ray: Any, task: Task, size: int) -> Any:
    """A materialized dataset with one row per image of ``task``: index, label, is_train, image, reason.

    ``image`` is 3 * size * size raw bytes, null where ``reason`` says why it cannot be read. ``label`` is the
    known class or -1: hidden labels are not in here.
    """
    blocks = [_encoded(task, start) for start in range(0, len(task.rows), ROWS_PER_TASK)]
    dataset = ray.data.from_arrow(blocks).map_batches(
        partial(_decode, size=size), batch_format="pyarrow", batch_size=ROWS_PER_DECODE, zero_copy_batch=True
    )
    return dataset.materialize()


def truth_of(ray: Any, task: Task) -> Any:
    """A dataset with the true class of every row, for evaluation only: index, truth, is_train."""
    rows = np.flatnonzero(task.eval_labels >= 0)
    table = {"index": rows, "truth": task.eval_labels[rows], "is_train": task.is_train[rows]}
    return ray.data.from_arrow(pa.table(table))


def reasons_of(dataset: Any, num_rows: int) -> list[str | None]:
    """Why an image of the task has no pixels, None where it has, in row order."""
    reasons: list[str | None] = [None] * num_rows
    columns = dataset.select_columns(["index", "reason"])
    for batch in columns.iter_batches(batch_size=ROWS_PER_BATCH, batch_format="pyarrow"):
        for row, reason in zip(batch["index"].to_pylist(), batch["reason"].to_pylist(), strict=True):
            reasons[row] = reason
    return reasons


def train_set(shard: Any, size: int, num_known: int, num_novel: int) -> tuple[TrainSet, Tensor]:
    """Drain a worker's (unsplit) shard of :func:`decode_task`: the training rows, and all images (N,3,S,S) by
    index.

    The order is that of the row numbers, whatever order the blocks arrive in.
    """
    parts = list(_drain(shard, ("label", "is_train"), size))
    index = np.concatenate([part["index"] for part in parts])
    images = torch.zeros(int(index.max()) + 1, 3, size, size, dtype=torch.uint8)
    labels = np.full(len(images), -1, dtype=np.int64)
    usable = np.zeros(len(images), dtype=bool)
    for part in parts:
        rows = part["index"][part["ok"]]
        images[torch.from_numpy(rows)] = torch.from_numpy(part["image"])
        labels[rows] = part["label"][part["ok"]]
        usable[rows] = part["is_train"][part["ok"]]
    labeled = torch.from_numpy(np.flatnonzero(usable & (labels >= 0)))
    unlabeled = torch.from_numpy(np.flatnonzero(usable & (labels < 0)))
    chosen = TrainSet(
        images[labeled], torch.from_numpy(labels)[labeled], images[unlabeled], num_known, num_novel
    )
    return chosen, images


def eval_sets(shard: Any, images: Tensor, readable: Tensor) -> dict[str, EvalSet]:
    """Drain a shard of :func:`truth_of`: {"train", "test"} -> readable rows with truth, in row order."""
    table = pa.concat_tables(shard.iter_batches(batch_size=None, batch_format="pyarrow")).sort_by("index")
    index, truth = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("index", "truth"))
    is_train = torch.from_numpy(table["is_train"].to_numpy(zero_copy_only=False).copy())
    sets = {}
    for split, member in (("train", is_train), ("test", ~is_train)):
        rows = member & readable[index]
        sets[split] = EvalSet(images[index[rows]], truth[rows], index[rows])
    return sets


def _encoded(task: Task, start: int) -> pa.Table:
    rows = range(start, min(start + ROWS_PER_TASK, len(task.rows)))
    return pa.table(
        {
            "index": pa.array(rows, pa.int64()),
            "label": pa.array(task.labels[start : rows.stop]),
            "is_train": pa.array(task.is_train[start : rows.stop]),
            **image_columns([task.rows.images[i] for i in rows]),
        }
    )


def _decode(batch: pa.Table, size: int) -> pa.Table:
    pixels, reasons = decode_many(images_of(batch), size, threads=1)
    kept = batch.select(["index", "label", "is_train"]).append_column("image", pixel_column(pixels, reasons))
    return kept.append_column("reason", pa.array(reasons, pa.string()))


def _drain(shard: Any, columns: Iterable[str], size: int) -> Iterator[dict[str, np.ndarray]]:
    for batch in shard.iter_batches(batch_size=ROWS_PER_BATCH, batch_format="pyarrow"):
        part = {name: batch[name].to_numpy(zero_copy_only=False) for name in ("index", *columns)}
        part["ok"] = batch["reason"].is_null().to_numpy(zero_copy_only=False)
        joined = b"".join(batch["image"].drop_null().to_pylist())
        part["image"] = np.frombuffer(bytearray(joined), np.uint8).reshape(-1, 3, size, size)
        yield part
