"""One worker's rows of all steps as a line of references, and how threads of this process cut them.

Whoever cuts a line, threads here or Ray Data, hands back 8-bit views in the same order. Everything is a
function of (seed, step, rank), so a line can begin at any step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from uno.config import Config
from uno.crops import Cuts
from uno.data.bad import BadRows
from uno.data.batches import Plan
from uno.data.order import Order
from uno.data.parquet import ParquetImages
from uno.data.rows import Chosen, Files, Images, Paths, base
from uno.data.splits import Task

PART_BYTES = 16 * 2**20
"""Views of a part, at most: small enough for many in flight, half a second of cutting for ImageNet."""
PART_ROWS = 4096
HERE_ROWS = 512  # of a part that a thread cuts: what costs Ray a block costs nothing here
WINDOW_BYTES = 64 * 2**20
MAX_WINDOW_ROWS = PART_ROWS // 2
"""Two windows are read and cut by one Ray task: with more rows of small images the cores would wait for the
last one.
"""


class Refs(NamedTuple):
    """Rows to cut, in order: each int64 (n,)."""

    steps: np.ndarray
    positions: np.ndarray  # in the global batch
    rows: np.ndarray  # of the task

    def part(self, start: int, stop: int) -> Refs:
        """The rows from ``start`` to ``stop``."""
        return Refs(*(column[start:stop] for column in self))


class Part(NamedTuple):
    """Cut rows, in order."""

    pixels: np.ndarray  # uint8 (n, row_bytes)
    reasons: Sequence[str | None]  # why a row has no pixels


@dataclass(frozen=True, eq=False)
class StreamSet:
    """What training may see of a task whose images are not loaded; as TrainSet it holds no hidden label.

    ``index`` int64 (N,) is the number in ``images`` of each row of the task; ``labeled`` (N_l,) and
    ``unlabeled`` (N_u,) are training rows of the task; ``labels`` int64 (N_l,) known classes. ``cut`` turns a
    :class:`Feed` into parts, in order.
    """

    images: Images
    index: np.ndarray
    labeled: np.ndarray
    labels: Tensor
    unlabeled: np.ndarray
    num_known: int
    num_novel: int
    bad: BadRows
    cut: Callable[[Feed], Iterator[Part]]

    @property
    def num_labeled(self) -> int:
        """N_l."""
        return len(self.labeled)

    @property
    def num_unlabeled(self) -> int:
        """N_u."""
        return len(self.unlabeled)


def stream_facts(task: Task) -> dict[str, Any]:
    """The fields of a :class:`StreamSet` that do not depend on the process, and the ``ids`` of all rows."""
    images, index = base(task.rows.images, np.arange(len(task.rows)))
    labeled, unlabeled = task.is_train & (task.labels >= 0), task.is_train & (task.labels < 0)
    return {
        "images": Paths.of(images) if isinstance(images, Files) else images,
        "index": index,
        "labeled": np.flatnonzero(labeled),
        "labels": torch.from_numpy(task.labels[labeled]),
        "unlabeled": np.flatnonzero(unlabeled),
        "num_known": task.num_known,
        "num_novel": task.num_novel,
        "ids": pa.array(task.rows.ids, pa.string()),
    }


class Feed:
    """One worker's rows from step ``first`` to before ``last``, as references.

    Args:
        config: recipe, seed and stored side.
        train: the sets.
        plan: of the phase.
        rank: of the worker.
        world_size: number of workers.
        first: step.
        last: step.
    """

    def __init__(
        self, config: Config, train: StreamSet, plan: Plan, rank: int, world_size: int, first: int, last: int
    ) -> None:
        self.images, self.index = train.images, train.index
        self.first, self.last, self._train = first, last, train
        num_rows = plan.labeled_size + plan.unlabeled_size
        self.cuts = Cuts(config.seed, plan.labeled_stream, num_rows, config.augment, config.data.store_size)
        self.part_rows = max(1, min(PART_ROWS, PART_BYTES // self.cuts.row_bytes))
        window, labeled, unlabeled = 1, None, None
        if isinstance(self.images, ParquetImages):
            row_bytes = max(1, int(self.images.group_bytes.sum()) // len(self.images))
            window = max(1, min(MAX_WINDOW_ROWS, WINDOW_BYTES // row_bytes))
            labeled = self.images.groups(self.index[train.labeled])
            unlabeled = self.images.groups(self.index[train.unlabeled])
        self.read_rows = 2 * window  # about a window of each kind
        self.order = Order(plan, rank, world_size, labeled, unlabeled, window)

    @property
    def rows_per_step(self) -> int:
        """Rows of a step on this worker, B/W."""
        return len(self.order.positions)

    def rows(self, step: int) -> np.ndarray:
        """Rows of the task that make a step, int64 (B/W,), labeled ones first."""
        labeled, unlabeled = self.order.rows(step)
        return np.concatenate([self._train.labeled[labeled], self._train.unlabeled[unlabeled]])

    def labels(self, step: int) -> Tensor:
        """Known classes of a step's labeled rows, int64 (B_l/W,)."""
        return self._train.labels[torch.from_numpy(self.order.rows(step)[0].copy())]

    def refs(self, num_rows: int) -> Iterator[Refs]:
        """All rows in order, ``num_rows`` at a time, across the borders of steps; the last may be fewer."""
        per_step = self.rows_per_step
        end = (self.last - self.first) * per_step
        for start in range(0, end, num_rows):
            stop = min(start + num_rows, end)
            steps = range(self.first + start // per_step, self.first - (-stop // per_step))
            whole = Refs(
                np.repeat(np.arange(steps.start, steps.stop), per_step),
                np.tile(self.order.positions, len(steps)),
                np.concatenate([self.rows(step) for step in steps]),
            )
            skip = start - (steps.start - self.first) * per_step
            yield whole.part(skip, skip + stop - start)


def cut_here(threads: int) -> Callable[[Feed], Iterator[Part]]:
    """Cut in ``threads`` threads of this process."""

    def parts(feed: Feed) -> Iterator[Part]:
        def cut(job: tuple[Refs, Any]) -> Part:
            refs, images = job
            return Part(*feed.cuts.cut(refs.steps, refs.positions, images))

        return ahead(cut, _with_images(feed), threads, threads + 1)

    return parts


def _with_images(feed: Feed) -> Iterator[tuple[Refs, Any]]:
    """Parts of the rows, with images; those of Parquet are read in larger lots."""
    size = min(feed.part_rows, HERE_ROWS)
    if not isinstance(feed.images, ParquetImages):
        for refs in feed.refs(size):
            yield refs, Chosen(feed.images, feed.index[refs.rows])
        return
    for lot in feed.refs(feed.read_rows):
        images = feed.images.fetch(feed.index[lot.rows])
        for start in range(0, len(images), size):
            yield lot.part(start, start + size), images[start : start + size]


def ahead(
    function: Callable[[Any], Any], items: Iterator[Any], threads: int, depth: int
) -> Generator[Any, None, None]:
    """``map(function, items)`` in threads, in order, at most ``depth`` results ahead of the consumer."""
    waiting: deque[Future[Any]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="uno-stream")
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
