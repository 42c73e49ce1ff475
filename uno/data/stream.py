"""Training batches from images that stay where they are: read, decode and cut ahead of the training step.

A worker's rows of all steps form one line of references (:class:`Feed`); whoever cuts them, threads here
or Ray Data, hands back 8-bit views in the same order; :class:`StreamBatches` packs them into batches and does
the rest of the augmentation on the device. Everything is a function of (seed, step, rank), so any step can be
the first.

An image that turns out to be unreadable is replaced in its batch by the views of the next readable row of its
kind in the worker's share; it is listed in bad_samples.jsonl, and too many of them end the run.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from uno.augment import augment_crops
from uno.config import Config
from uno.crops import Cuts
from uno.data.decode import BadRows, decoded, readable
from uno.data.files import Storage
from uno.data.plan import Order, Plan, augment_generator
from uno.data.rows import Chosen, Images, base
from uno.data.splits import Task
from uno.data.tables import ParquetImages
from uno.errors import ConfigError
from uno.steps import Batch

BATCHES_AHEAD = 2
SYNC_STEPS = 100
CPU = torch.device("cpu")
EVAL_BYTES = 64 * 2**20  # decoded pixels of an evaluation batch

Decoded = tuple[np.ndarray, Tensor, list[str | None]]
"""Rows of the task (b,), images uint8 (b,3,S,S), why a row has none: of :func:`decoded`."""


class StreamBatches:
    """``batches(step)`` -> this worker's :class:`Batch`, as :class:`uno.data.resident.ResidentBatches`.

    Steps in order come from one line of parts that is cut ahead; any other step opens a new one.

    Args:
        config: of the run.
        train: the sets.
        plan: of the phase.
        rank: of the worker.
        world_size: number of workers.
        last: step at which the phase ends; nothing is cut beyond.
    """

    def __init__(
        self, config: Config, train: StreamSet, plan: Plan, rank: int, world_size: int, last: int
    ) -> None:
        self._config, self._train, self._plan, self._last = config, train, plan, last
        self._device = train.device
        self._place = rank, world_size
        self._stream: Generator[Any, None, None] | None = None
        self._next = -1

    def __call__(self, step: int) -> Batch:
        """The batch of global step ``step``.

        Raises:
            ConfigError: too many unreadable images, or a damaged source.
        """
        config, plan = self._config, self._plan
        if step != self._next or self._stream is None:
            self._open(step)
        assert self._stream is not None
        pixels, rows, bad = next(self._stream)
        self._next = step + 1
        for place, reason in bad.items():
            self._train.bad.add(int(rows[place]), reason)
        if step % SYNC_STEPS == 0 or step % plan.steps_per_epoch == 0:
            self._train.sync()
        num_labeled = self._feed.order.num_labeled
        labels = self._feed.labels(step)
        if bad:
            ok = np.ones(len(rows), dtype=bool)
            ok[list(bad)] = False
            chosen = stand_ins(ok, num_labeled)
            if chosen is None:
                raise ConfigError(
                    f"no readable image of a kind in a batch (step {step}): {next(iter(bad.values()))}"
                )
            pixels = pixels[torch.from_numpy(chosen)]
            labels = labels[torch.from_numpy(chosen[:num_labeled])]
        crops = self._feed.cuts.split(pixels.to(self._device, non_blocking=True))
        generator = augment_generator(config.seed, plan.labeled_stream, step)
        data, places = config.data, torch.from_numpy(self._feed.order.positions)
        num_rows = plan.labeled_size + plan.unlabeled_size
        views = augment_crops(
            crops, config.augment, generator, data.mean, data.std, places, num_rows, data.store_size
        )
        return Batch(views, labels.to(self._device), config.augment.large.num_views)

    def close(self) -> None:
        """Stop cutting ahead."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _open(self, step: int) -> None:
        self.close()
        self._feed = Feed(self._config, self._train, self._plan, *self._place, step, self._last)
        parts = self._train.cut(self._feed)
        packed = pack(self._feed, parts, self._device.type == "cuda")

        def following(_: int) -> Any:
            return next(packed)

        def stream() -> Generator[Any, None, None]:
            try:
                yield from ahead(following, iter(range(step, self._last)), 1, BATCHES_AHEAD)
            finally:
                packed.close()

        self._stream = stream()


def pack(
    feed: Feed, parts: Iterator[Part], pin: bool
) -> Generator[tuple[Tensor, np.ndarray, dict[int, str]], None, None]:
    """Parts -> steps: (pixels uint8 (B/W, row_bytes), rows of the task (B/W,), {place: reason}).

    Args:
        feed: that the parts were cut from.
        parts: of all its rows.
        pin: pixels in page-locked memory, for copies that do not wait.
    """
    size = feed.rows_per_step
    try:
        step, filled, bad = feed.first, 0, {}  # type: int, int, dict[int, str]
        pixels = _empty(size, feed.cuts.row_bytes, pin)
        for part in parts:
            start = 0
            while start < len(part.pixels):
                num = min(size - filled, len(part.pixels) - start)
                pixels.numpy()[filled : filled + num] = part.pixels[start : start + num]
                reasons = enumerate(islice(part.reasons, start, start + num), filled)
                bad |= {place: reason for place, reason in reasons if reason is not None}
                start, filled = start + num, filled + num
                if filled == size:
                    yield pixels, feed.rows(step), bad
                    step, filled, bad = step + 1, 0, {}
                    pixels = _empty(size, feed.cuts.row_bytes, pin)
    finally:
        close = getattr(parts, "close", None)
        if close is not None:
            close()


def _empty(num_rows: int, row_bytes: int, pin: bool) -> Tensor:
    return torch.empty(num_rows, row_bytes, dtype=torch.uint8, pin_memory=pin)


def stand_ins(ok: np.ndarray, num_labeled: int) -> np.ndarray | None:
    """Which row takes each place of a batch: itself, or the next readable one of its kind, going round.

    Args:
        ok: bool (B,), labeled rows first.
        num_labeled: B_l.

    Returns:
        int64 (B,), or None where a kind has no readable row at all.
    """
    chosen = np.arange(len(ok))
    for start, stop in ((0, num_labeled), (num_labeled, len(ok))):
        good = np.flatnonzero(ok[start:stop]) + start
        bad = np.flatnonzero(~ok[start:stop]) + start
        if len(bad) and not len(good):
            return None
        if len(bad):
            chosen[bad] = good[np.searchsorted(good, bad) % len(good)]
    return chosen


@dataclass(frozen=True, eq=False)
class StreamedEvalSet:
    """:class:`~uno.data.resident.EvalSet` of images that are decoded when they are evaluated.

    Unreadable images are noted in ``bad`` and left out.
    """

    truth: Tensor
    index: Tensor
    side: int
    decode: Callable[[Iterable[np.ndarray]], Iterator[Decoded]]
    bad: BadRows

    def where(self, chosen: Tensor) -> StreamedEvalSet:
        """The rows of the mask ``chosen`` (N,) bool."""
        return replace(self, truth=self.truth[chosen], index=self.index[chosen])

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """(images uint8 (b,3,S,S), truth (b,)) of this worker's contiguous share, every row once."""
        size = max(1, min(batch_size, EVAL_BYTES // (3 * self.side**2)))
        own = np.array_split(self.index.numpy(), world_size)[rank]
        truth_of = dict(zip(self.index.tolist(), self.truth.tolist(), strict=True))
        lots = (own[start : start + size] for start in range(0, len(own), size))
        for rows, images, reasons in self.decode(lots):
            for row, reason in zip(rows.tolist(), reasons, strict=True):
                if reason is not None:
                    self.bad.add(row, reason)
            ok = readable(reasons)
            truth = torch.tensor([truth_of[row] for row in rows[ok].tolist()], dtype=torch.int64)
            if len(truth):
                yield (images if ok.all() else images[torch.from_numpy(ok)]), truth


def streamed_eval_sets(
    is_train: np.ndarray,
    eval_labels: np.ndarray,
    side: int,
    decode: Callable[[Iterable[np.ndarray]], Iterator[Decoded]],
    bad: BadRows,
) -> dict[str, StreamedEvalSet]:
    """{"train", "test"} -> the rows with a true class, in row order; possibly none."""
    sets = {}
    for split, member in (("train", is_train), ("test", ~is_train)):
        index = np.flatnonzero(member & (eval_labels >= 0))
        truth = torch.from_numpy(eval_labels[index])
        sets[split] = StreamedEvalSet(truth, torch.from_numpy(index), side, decode, bad)
    return sets


def streaming_set(config: Config, task: Task, storage: Storage) -> StreamSet:
    """The training rows of ``task``, cut by threads of this process."""
    facts = stream_facts(task)
    bad = BadRows(facts.pop("ids"), task.rows.images, config.data.max_bad_fraction, storage)
    return StreamSet(**facts, bad=bad, cut=cut_here(config.compute.threads or os.cpu_count() or 1))


def streaming_eval_sets(config: Config, task: Task, bad: BadRows) -> dict[str, StreamedEvalSet]:
    """The rows of ``task`` with a true class, decoded by threads of this process."""
    side, images = config.data.store_size, task.rows.images

    def decode(lots: Iterable[np.ndarray]) -> Iterator[Decoded]:
        return decoded(images, lots, side, config.compute.threads)

    return streamed_eval_sets(task.is_train, task.eval_labels, side, decode, bad)


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
    device: torch.device = CPU

    @property
    def num_labeled(self) -> int:
        """N_l."""
        return len(self.labeled)

    @property
    def num_unlabeled(self) -> int:
        """N_u."""
        return len(self.unlabeled)

    def to(self, device: torch.device | str) -> StreamSet:
        """The same set, with batches on ``device``."""
        return replace(self, device=torch.device(device))

    def batches(self, config: Config, plan: Plan, rank: int, world_size: int, last: int) -> StreamBatches:
        """The batches of a phase for worker ``rank``; nothing is cut beyond step ``last``."""
        return StreamBatches(config, self, plan, rank, world_size, last)

    def sync(self) -> None:
        """Tell all workers which images proved unreadable, see :meth:`~uno.data.bad.BadRows.sync`."""
        self.bad.sync(self.device)


def stream_facts(task: Task) -> dict[str, Any]:
    """The fields of a :class:`StreamSet` that do not depend on the process, and the ``ids`` of all rows."""
    images, index = base(task.rows.images, np.arange(len(task.rows)))
    labeled, unlabeled = task.is_train & (task.labels >= 0), task.is_train & (task.labels < 0)
    return {
        "images": images,
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
