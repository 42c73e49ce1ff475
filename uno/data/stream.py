"""Training batches from images that are not in memory.

Images are read, decoded and cropped ahead of the training step. The rows that a worker
needs in all steps form one sequence (:class:`CropJob`). They are cropped by threads of
this process or by Ray Data, which return 8-bit views in the same order.
:class:`StreamBatches` packs the views into batches and does the rest of the
augmentation on the device. An unreadable image is replaced by the next readable one of
the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uno.augment import augment_crops
from uno.config import Config
from uno.cpus import available_cpus
from uno.crops import Cropper
from uno.data.decode import (
    BATCHES_AHEAD,
    DecodedBatch,
    Decoding,
    decoded,
    ok_mask,
    prefetch_map,
)
from uno.data.files import Storage
from uno.data.images import Images, InMemory, batches_of
from uno.data.memory import EvalSet, TrainSet
from uno.data.sampling import Batch, Order, Plan, augment_generator
from uno.data.splits import Task, train_rows, truth_rows
from uno.data.unreadable import BadRows
from uno.errors import ConfigError

SYNC_STEPS = 100  # steps after which workers exchange which images are unreadable
EVAL_BYTES = 64 * 2**20  # largest size of the decoded pixels of an evaluation batch
# The largest size of the views of a chunk: small enough that many chunks are cropped
# at the same time. For ImageNet a chunk takes half a second.
CHUNK_BYTES = 16 * 2**20
CHUNK_ROWS = 4096  # largest number of rows of a chunk
# The largest number of rows that a thread crops at once. It is smaller than in Ray
# Data, because a small chunk costs a thread nothing.
THREAD_ROWS = 512
WINDOW_BYTES = 64 * 2**20  # stored bytes of a window, see window_rows
# One Ray task crops two windows. With larger ones, cores would wait for the last task.
MAX_WINDOW_ROWS = CHUNK_ROWS // 2
SIZES_AT_ONCE = 2**16  # rows of which the sizes are added at once
CPU = torch.device("cpu")

Chunk = tuple[np.ndarray, list[str | None]]
"""Cropped views of n consecutive rows of a job.

The views of each row as uint8 (n, row_bytes), and for each row the reason why it is
unreadable, or None.
"""
References = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Consecutive rows of a job, which are to be cropped.

For each row the global step, the position in the global batch, and the row number in
the task: three arrays int64 (n,).
"""


@dataclass(frozen=True, eq=False)
class StreamSet:
    """The training rows of a task with images that are read when they are needed.

    It has the methods of :class:`~uno.data.memory.TrainSet`.

    Attributes:
        images: The images of all N rows of the task.
        labeled: Row numbers of the labeled training rows, int64 (N_l,).
        labels: Index of the known class of each labeled row, int64 (N_l,).
        unlabeled: Row numbers of the unlabeled training rows, int64 (N_u,).
        num_known: C_l, the number of known classes.
        num_novel: C_u, the number of novel classes.
        bad: Collects the rows that prove unreadable.
        crop: Crops the rows of a job in order, in this process or by Ray.
        decode: Decodes batches of row numbers, and yields the rows, images uint8 (b, 3,
            S, S) and the reasons of unreadable ones.
        device: The device of the batches.
    """

    images: Images
    labeled: np.ndarray
    labels: Tensor
    unlabeled: np.ndarray
    num_known: int
    num_novel: int
    bad: BadRows
    crop: Callable[[CropJob], Generator[Chunk, None, None]]
    decode: Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]]
    device: torch.device = CPU

    @property
    def num_unlabeled(self) -> int:
        """N_u, the number of unlabeled training rows."""
        return len(self.unlabeled)

    def to(self, device: torch.device | str) -> StreamSet:
        """Return the same set, of which the batches will be on ``device``.

        The images themselves stay where they are.
        """
        return replace(self, device=torch.device(device))

    def batches(
        self, config: Config, plan: Plan, rank: int, world_size: int, last: int
    ) -> StreamBatches:
        """Return the batches of a phase for one worker.

        Args:
            config: The configuration of the run.
            plan: The sizes of the phase.
            rank: Number of the worker.
            world_size: The number of workers.
            last: The step at which the phase ends. Nothing is cropped for this step or
                later ones.
        """
        return StreamBatches(config, self, plan, rank, world_size, last)

    def sync(self) -> None:
        """Exchange with all workers which images proved unreadable.

        All workers must call this at the same step.

        Raises:
            ConfigError: More images are unreadable than the configuration allows.
        """
        self.bad.sync()


def streaming_set(config: Config, task: Task, storage: Storage) -> StreamSet:
    """Return the training rows of a task, cropped by threads of this process.

    Args:
        config: The configuration of the run.
        task: The task.
        storage: The run directory, where unreadable images are listed.
    """
    facts = stream_facts(task)
    bad = BadRows(
        facts.pop("ids"), task.rows.images, config.data.max_bad_fraction, storage
    )
    return stream_here(config, bad, **facts)


def stream_here(config: Config, bad: BadRows, images: Images, **rows: Any) -> StreamSet:
    """Return a set of training rows, cropped by threads of this process.

    Args:
        config: The configuration of the run.
        bad: Collects the rows that prove unreadable.
        images: The images of all rows of the task.
        **rows: The fields that :func:`~uno.data.splits.train_rows` returns.
    """
    crop = partial(crop_local, threads=config.compute.threads or available_cpus())
    return StreamSet(
        images, **rows, bad=bad, crop=crop, decode=decode_here(config, images)
    )


def decode_here(
    config: Config, images: Images
) -> Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]]:
    """Return a function that decodes batches of rows by threads of this process.

    Args:
        config: The configuration, which gives the size of images, how they are decoded,
            and the number of threads.
        images: The images of all rows of the task.

    Returns:
        A function from batches of row numbers, int64 (b,), to the decoded batches of
        :func:`~uno.data.decode.decoded`.
    """
    size, threads, how = (
        config.data.stored_size,
        config.compute.threads,
        Decoding.of(config.data),
    )
    return partial(decoded, images, size=size, threads=threads, how=how)


def stream_facts(task: Task) -> dict[str, Any]:
    """Return the fields of a :class:`StreamSet` that do not depend on the process.

    Returns:
        The result of :func:`~uno.data.splits.train_rows`, with ``images`` and ``ids``
        of all rows of the task. A set has no field ``ids``.
    """
    return {"images": task.rows.images, "ids": task.rows.ids, **train_rows(task)}


class StreamBatches:
    """The batches of a phase from images that are not in memory, for one worker.

    Calling an object with a step returns the batch of this step, as
    :class:`~uno.data.memory.MemoryBatches`. The first call starts to crop the rows
    of this and the following steps ahead. A call with another step than the next one
    starts anew from there.

    Args:
        config: The configuration of the run.
        train: The training set.
        plan: The sizes of the phase.
        rank: Number of the worker.
        world_size: The number of workers.
        last: The step at which the phase ends.

    Attributes:
        waited_s: Seconds that calls have waited for views, so far.
    """

    def __init__(
        self,
        config: Config,
        train: StreamSet,
        plan: Plan,
        rank: int,
        world_size: int,
        last: int,
    ) -> None:
        self._config, self._train, self._plan, self._last = config, train, plan, last
        self._job_from = partial(
            CropJob, config, train, plan, rank, world_size, last=last
        )
        self._running = ExitStack()
        self._packed: Iterator[tuple[Tensor, dict[int, str]]] = iter(())
        self._next = -1
        self.waited_s = 0.0
        """Seconds that calls have waited for views, so far."""

    def __call__(self, step: int) -> Batch:
        """Return this worker's part of the batch of a global step, from 0.

        Rows that prove unreadable are added to ``bad`` of the set, and replaced. Every
        :data:`SYNC_STEPS` steps and at the start of an epoch, the workers exchange
        them.

        Raises:
            ConfigError: All labeled or all unlabeled images of the batch are
                unreadable, more images are unreadable than the configuration allows, or
                a source is damaged.
        """
        config, train, plan = self._config, self._train, self._plan
        if step != self._next:
            self._start(step)
        before = time.perf_counter()
        pixels, bad = next(self._packed)
        self.waited_s += time.perf_counter() - before
        self._next = step + 1
        rows, labels = (
            self._job.rows(step),
            train.labels[torch.from_numpy(self._job.order.rows(step)[0])],
        )
        for position, reason in bad.items():
            train.bad.add(int(rows[position]), reason)
        if step % SYNC_STEPS == 0 or step % plan.steps_per_epoch == 0:
            train.sync()
        if bad:
            chosen = replacement_rows(
                ~np.isin(np.arange(len(rows)), list(bad)), len(labels)
            )
            if chosen is None:
                why = next(iter(bad.values()))
                raise ConfigError(
                    f"no readable image of a kind in a batch (step {step}): {why}"
                )
            pixels, labels = (
                pixels[torch.from_numpy(chosen)],
                labels[torch.from_numpy(chosen[: len(labels)])],
            )
        crops = self._job.cropper.split(pixels.to(train.device, non_blocking=True))
        generator = augment_generator(config.seed, plan.labeled_stream, step)
        data, size = config.data, plan.labeled_size + plan.unlabeled_size
        where = (
            data.mean,
            data.std,
            torch.from_numpy(self._job.order.positions),
            size,
            data.stored_size,
        )
        views = augment_crops(crops, config.augment, generator, *where)
        labels = labels.to(train.device, non_blocking=True)
        return Batch(views, labels, config.augment.large.num_views)

    def close(self) -> None:
        """Stop the threads or tasks that crop images ahead of the training step."""
        self._running.close()
        self._next = -1

    def _start(self, step: int) -> None:
        """Start to crop the rows of ``step`` and the following steps ahead."""
        self.close()
        self._job = job = self._job_from(first=step)
        chunks = self._running.enter_context(closing(self._train.crop(job)))
        pin = self._train.device.type == "cuda"
        packed = self._running.enter_context(
            closing(pack(chunks, job.rows_per_step, job.row_bytes, pin))
        )
        in_order = prefetch_map(
            lambda _: next(packed), range(step, self._last), 1, BATCHES_AHEAD
        )
        self._packed = self._running.enter_context(closing(in_order))


def pack(
    chunks: Iterator[Chunk], num_rows: int, row_bytes: int, pin: bool
) -> Generator[tuple[Tensor, dict[int, str]], None, None]:
    """Pack chunks of views into batches.

    Args:
        chunks: The views of all rows in order.
        num_rows: The number of rows in a batch.
        row_bytes: Bytes of all views of a row.
        pin: Whether batches are in page-locked memory, from which they are copied to a
            GPU asynchronously.

    Yields:
        The views of a batch, uint8 (num_rows, row_bytes); and the reason for each
        unreadable row, by its position in the batch.
    """
    filled = 0
    for found, reasons in chunks:
        while len(found):
            if filled == 0:
                pixels = torch.empty(
                    num_rows, row_bytes, dtype=torch.uint8, pin_memory=pin
                )
                bad: dict[int, str] = {}
            num = min(num_rows - filled, len(found))
            pixels.numpy()[filled : filled + num] = found[:num]
            bad |= {
                position: why
                for position, why in enumerate(reasons[:num], filled)
                if why is not None
            }
            found, reasons, filled = found[num:], reasons[num:], filled + num
            if filled == num_rows:
                yield pixels, bad
                filled = 0


def replacement_rows(ok: np.ndarray, num_labeled: int) -> np.ndarray | None:
    """Choose a readable row for each position of a batch.

    A readable row stays at its position. An unreadable one is replaced by the next
    readable row of its kind, labeled or unlabeled, and after the last row by the first
    one.

    Args:
        ok: Whether each row is readable, bool (B,).
        num_labeled: The number of labeled rows, which come first.

    Returns:
        The position of the row to take for each position, int64 (B,). None if rows of a
        kind are all unreadable.
    """
    chosen = np.arange(len(ok))
    for kind in (slice(num_labeled), slice(num_labeled, None)):
        good, bad = chosen[kind][ok[kind]], chosen[kind][~ok[kind]]
        if len(bad) and not len(good):
            return None
        if len(bad):
            chosen[bad] = good[np.searchsorted(good, bad) % len(good)]
    return chosen


class CropJob:
    """The rows that one worker needs in a range of steps, and how they are cropped.

    Args:
        config: The configuration of the run.
        train: The training set.
        plan: The sizes of the phase.
        rank: Number of the worker.
        world_size: W, the number of workers.
        first: The first step.
        last: The step after the last one.

    Attributes:
        images: The images of all rows of the task.
        first: The first step.
        last: The step after the last one.
        cropper: Crops the rows.
        row_bytes: Bytes of all views of a row.
        chunk_rows: The number of rows that are cropped at once.
        fetch_rows: The number of rows to read at once, if the images are stored in
            groups: about one window of labeled and one of unlabeled rows. None if each
            image is read by itself.
        order: The order of the rows.
        rows_per_step: The number of this worker's rows in a batch, B / W.
    """

    def __init__(
        self,
        config: Config,
        train: StreamSet,
        plan: Plan,
        rank: int,
        world_size: int,
        first: int,
        last: int,
    ) -> None:
        self.images = train.images
        self.first, self.last, self._train = first, last, train
        self._steps_per_epoch = plan.steps_per_epoch
        num_rows, data = plan.labeled_size + plan.unlabeled_size, config.data
        how = config.augment, data.stored_size, Decoding.of(data)
        self.cropper = Cropper(config.seed, plan.labeled_stream, num_rows, *how)
        self.row_bytes = self.cropper.row_bytes
        self.chunk_rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // self.row_bytes))
        labeled, unlabeled = (
            self.images.groups(rows) for rows in (train.labeled, train.unlabeled)
        )
        groups = None if labeled is None or unlabeled is None else (labeled, unlabeled)
        window = 1 if groups is None else window_rows(self.images)
        self.fetch_rows = None if groups is None else 2 * window
        """The number of rows to read at once, None if each image is read by itself."""
        self.order = Order(plan, rank, world_size, groups, window)
        self.rows_per_step = len(self.order.positions)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the task that make a step, labeled ones first.

        Args:
            step: Global step, from 0.

        Returns:
            Row numbers, int64 (B / W,).
        """
        labeled, unlabeled = self.order.rows(step)
        return np.concatenate(
            [self._train.labeled[labeled], self._train.unlabeled[unlabeled]]
        )

    def epochs(self, num_rows: int) -> Iterator[Iterator[References]]:
        """Yield the references of all rows, for each epoch.

        Args:
            num_rows: The number of rows at a time. They can be of several steps, and
                the last ones of an epoch can be fewer.

        Yields:
            An iterator over the references of one epoch, or of the part of it that is
            in the range of steps.
        """
        first = self.first
        while first < self.last:
            last = min(
                self.last, (first // self._steps_per_epoch + 1) * self._steps_per_epoch
            )
            yield self._references(num_rows, first, last)
            first = last

    def _references(self, num_rows: int, first: int, last: int) -> Iterator[References]:
        """Yield the rows of a range of steps, some at a time.

        Args:
            num_rows: The number of rows at a time. The last ones can be fewer.
            first: The first step.
            last: The step after the last one.

        Yields:
            Global steps, positions in the global batch, and row numbers of the task:
            three arrays int64 (n,).
        """
        per_step, end = self.rows_per_step, (last - first) * self.rows_per_step
        for start in range(0, end, num_rows):
            step, position = np.divmod(
                np.arange(start, min(start + num_rows, end)), per_step
            )
            rows = np.stack(
                [self.rows(first + i) for i in range(step[0], step[-1] + 1)]
            )
            yield (
                first + step,
                self.order.positions[position],
                rows[step - step[0], position],
            )


def window_rows(images: Images) -> int:
    """Return how many rows are shuffled together if images are stored in groups.

    It is about :data:`WINDOW_BYTES` divided by the mean stored size of an image, at
    least 1 and at most :data:`MAX_WINDOW_ROWS`, see
    :func:`~uno.data.sampling.by_windows`.
    """
    num, parts = len(images), range(0, len(images), SIZES_AT_ONCE)
    total = sum(
        int(images.sizes(np.arange(i, min(i + SIZES_AT_ONCE, num))).sum())
        for i in parts
    )
    row_bytes = max(1, total // num)
    return max(1, min(MAX_WINDOW_ROWS, WINDOW_BYTES // row_bytes))


def crop_local(job: CropJob, threads: int) -> Generator[Chunk, None, None]:
    """Crop the rows of a job in threads of this process, ahead of the consumer.

    Args:
        job: The rows.
        threads: The number of threads.

    Yields:
        The views of all rows in order, in chunks.
    """

    def crop(item: tuple[np.ndarray, np.ndarray, Images]) -> Chunk:
        """Read, decode and crop some rows.

        Args:
            item: Global steps int64 (n,), positions in the global batches int64 (n,),
                and the n images.

        Returns:
            Views uint8 (n, row_bytes), and for each row the reason why it is
            unreadable, or None.
        """
        steps, positions, images = item
        return job.cropper.crop(
            steps, positions, images.read_images(np.arange(len(images)))
        )

    return prefetch_map(crop, _with_images(job), threads, threads + 1)


def _with_images(job: CropJob) -> Iterator[tuple[np.ndarray, np.ndarray, Images]]:
    """Yield the rows of a job in chunks, with their images.

    Images that are stored in groups are read here, in the thread that consumes this, so
    that each group is read once. Other images are read when they are cropped.

    Yields:
        For n rows the global steps int64 (n,), the positions in the global batches
        int64 (n,), and the images.
    """
    size = min(job.chunk_rows, THREAD_ROWS)
    for steps, positions, rows in chain.from_iterable(
        job.epochs(job.fetch_rows or size)
    ):
        images = job.images.take(rows)
        found = (
            images
            if job.fetch_rows is None
            else InMemory(images.read_images(np.arange(len(rows))))
        )
        for start in range(0, len(rows), size):
            own = np.arange(start, min(start + size, len(rows)))
            yield steps[own], positions[own], found.take(own)


@dataclass(frozen=True, eq=False)
class StreamedEvalSet:
    """N rows with a true class, decoded when they are evaluated.

    Only evaluation reads them.

    Attributes:
        truth: Index of the true class among known + novel classes, int64 (N,).
        index: Row number in the task, int64 (N,).
        unlabeled: Whether training does not see the row's label, bool (N,).
        images: The images of all rows of the task.
        side: S, the side of decoded images in pixels.
        decode: Decodes batches of row numbers, see :class:`StreamSet`.
        bad: Collects the rows that prove unreadable.
    """

    truth: Tensor
    index: Tensor
    unlabeled: Tensor
    images: Images
    side: int
    decode: Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]]
    bad: BadRows

    def where(self, chosen: Tensor) -> StreamedEvalSet:
        """Return the set of only some of its N rows.

        Args:
            chosen: Whether each row is kept, bool (N,).
        """
        truth, index, unlabeled = (
            rows[chosen] for rows in (self.truth, self.index, self.unlabeled)
        )
        return replace(self, truth=truth, index=index, unlabeled=unlabeled)

    def batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of one worker as batches, each row once.

        Unreadable rows are left out and added to ``bad``.

        Args:
            batch_size: The largest number of rows in a batch.
            rank: Number of the worker. It gets a contiguous share of the rows.
            world_size: The number of workers.

        Yields:
            Images uint8 (b, 3, S, S), and true classes int64 (b,).
        """
        own, truth = (
            rows.tensor_split(world_size)[rank] for rows in (self.index, self.truth)
        )
        index = own.numpy()
        batches = batches_of(self.images, index, decoded_rows(batch_size, self.side))
        found = self.decode(index[batch] for batch in batches)
        for batch, (rows, images, reasons) in zip(batches, found, strict=True):
            ok = ok_mask(reasons)
            for i in np.flatnonzero(~ok).tolist():
                self.bad.add(int(rows[i]), str(reasons[i]))
            if ok.any():
                yield (
                    (images if ok.all() else images[torch.from_numpy(ok)]),
                    truth[torch.from_numpy(batch[ok])],
                )


def decoded_rows(batch_size: int, side: int) -> int:
    """Return the number of images to decode at once for evaluation.

    Args:
        batch_size: The largest number.
        side: The side of the decoded images in pixels.

    Returns:
        ``batch_size``, or fewer if its pixels had more than :data:`EVAL_BYTES`.
    """
    return max(1, min(batch_size, EVAL_BYTES // (3 * side**2)))


def streaming_eval_sets(
    config: Config, task: Task, bad: BadRows
) -> dict[str, StreamedEvalSet]:
    """Return the rows of a task with a true class, decoded by threads of this process.

    Args:
        config: The configuration of the run.
        task: The task.
        bad: Collects the rows that prove unreadable.

    Returns:
        The sets of "train" and "test". A set can be empty.
    """
    how = (
        task.rows.images,
        config.data.stored_size,
        decode_here(config, task.rows.images),
        bad,
    )
    found = truth_rows(task).items()
    return {
        split: StreamedEvalSet(truth, index, unlabeled, *how)
        for split, (index, truth, unlabeled) in found
    }


TrainData = TrainSet | StreamSet
EvalData = EvalSet | StreamedEvalSet
