"""Make training and evaluation batches of images that are not kept in memory.

Images are read, decoded and cropped ahead of the training step. The rows that a worker
needs in all steps form one sequence (:class:`CropJob`). They are cropped by threads of
this process or by Ray Data, which return 8-bit views in the same order.
:class:`StreamBatches` packs the views into batches and does the rest of the
augmentation on the device. In a training batch an unreadable image is replaced by
another readable one, labeled or unlabeled as it is itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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
from uno.data.images import Images, InMemory, batches_of, spread
from uno.data.memory import EvalRows, EvalSet, Read, TrainSet
from uno.data.sampling import Batch, Order, Plan, augment_generator
from uno.data.splits import Task, train_rows, truth_rows
from uno.data.unreadable import BadRows
from uno.errors import ConfigError
from uno.threads import available_cpus

SYNC_STEPS = 100  # steps after which workers exchange which images are unreadable
EVAL_BYTES = 64 * 2**20  # largest size of the decoded pixels of an evaluation batch
MAX_SAMPLE_ROWS = 20_000  # rows of each kind that are decoded for a sample
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
class StreamedImages:
    """The images of all N rows of a run, which are decoded when they are needed.

    Attributes:
        images: The images as the source stores them.
        side: S, the side of decoded images in pixels.
        decode: Takes batches of row numbers int64 (b,), and yields for each batch its
            row numbers, its images uint8 (b, 3, S, S), and for each row the reason why
            it is unreadable, or None.
        bad: The record of the rows that prove unreadable. The batches of
            :class:`StreamBatches` and of :class:`StreamedEvalSet` add rows to it;
            ``decode`` and :meth:`plan_reading` do not.
    """

    images: Images
    side: int
    decode: Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]]
    bad: BadRows

    @classmethod
    def of(cls, config: Config, images: Images, bad: BadRows) -> StreamedImages:
        """Return images that threads of this process decode.

        Args:
            config: The configuration, which gives the side of decoded images, the
                interpolation, the range of values of images of more than 8 bits, and
                the number of threads, by default the number of cores that this process
                may use.
            images: The images of all rows of the task.
            bad: The record of unreadable rows, which is only kept here: batches of
                training and evaluation add rows to it, and decoding does not.
        """
        side, threads = config.data.stored_size, config.compute.threads
        how = Decoding.of(config.data)
        decode = partial(decoded, images, size=side, threads=threads, how=how)
        return cls(images, side, decode, bad)

    def plan_reading(
        self, kinds: Sequence[np.ndarray], batch_size: int
    ) -> tuple[list[np.ndarray], Read]:
        """Divide a sample of rows into batches, and return how they are decoded.

        Args:
            kinds: Row numbers of each kind of rows, such as labeled and unlabeled ones,
                int64. The sample has the rows of all kinds, one kind after the other.
            batch_size: The largest number of rows of a batch. Batches have fewer rows
                if their pixels would take more than :data:`EVAL_BYTES` (64 MiB), or so
                that images that are stored in one group stay in one batch.

        Returns:
            Two values. The first has for each batch the positions of its rows in the
            sample, int64 (b,). The second is a function. It takes such positions of
            some batches, and yields for each of them the decoded images of its rows,
            uint8 (b, 3, S, S), and bool (b,), which rows could be read. The images of
            the others are black, and these rows are not added to the list of
            unreadable images. Nothing is read before its result is iterated over, which
            raises a ConfigError if a file with many images cannot be read, and a
            StorageError if an image's file cannot be read now, but perhaps later. All
            rows of a batch are of one kind, except if images are stored in groups: the
            batches then have all rows in the order of their row numbers, so that rows
            of one group are read one after the other.
        """
        numbers = np.concatenate(kinds)
        positions = np.arange(len(numbers))
        parts = np.split(positions, np.cumsum([len(rows) for rows in kinds])[:-1])
        if self.images.groups(positions[:0]) is not None:
            parts = [np.argsort(numbers, kind="stable")]
        size = decoded_rows(batch_size, self.side)
        batches = [
            part[batch]
            for part in parts
            for batch in batches_of(self.images, numbers[part], size)
        ]

        def read(
            batches: Sequence[np.ndarray],
        ) -> Iterator[tuple[Tensor, np.ndarray]]:
            """Yield the pixels of each batch, and which of its rows are readable.

            Unreadable rows are not added to the list of unreadable images.

            Args:
                batches: Positions of the rows of each batch in the sample, int64 (b,).

            Yields:
                Pixels uint8 (b, 3, S, S), black for unreadable rows, and bool (b,).
            """
            for _, pixels, reasons in self.decode(numbers[batch] for batch in batches):
                yield pixels, ok_mask(reasons)

        return batches, read


@dataclass(frozen=True, eq=False)
class StreamSet:
    """The training rows of a task with images that are read when they are needed.

    It has the methods of :class:`~uno.data.memory.TrainSet`.

    Attributes:
        source: The images of all N rows of the task, and the record of unreadable rows.
        labeled: Row numbers of the labeled training rows, int64 (N_l,).
        labels: Index of the known class of each labeled row, int64 (N_l,).
        unlabeled: Row numbers of the unlabeled training rows, int64 (N_u,).
        num_known: C_l, the number of known classes.
        num_novel: C_u, the number of novel classes.
        crop: Takes a :class:`CropJob` and yields the cropped views of its rows in
            order, some rows at a time (:data:`Chunk`), from this process or from Ray.
        device: The device of the batches.
    """

    source: StreamedImages
    labeled: np.ndarray
    labels: Tensor
    unlabeled: np.ndarray
    num_known: int
    num_novel: int
    crop: Callable[[CropJob], Generator[Chunk, None, None]]
    device: torch.device = CPU

    @property
    def num_unlabeled(self) -> int:
        """N_u, the number of unlabeled training rows."""
        return len(self.unlabeled)

    def to(self, device: torch.device | str) -> StreamSet:
        """Return a copy of this set with another device for its batches.

        The images and labels that the set holds stay where they are.

        Args:
            device: The device to which batches are copied.
        """
        return replace(self, device=torch.device(device))

    def batches(
        self, config: Config, plan: Plan, rank: int, world_size: int, last: int
    ) -> StreamBatches:
        """Return a callable that gives one worker its part of the batch of each step.

        Nothing is read before it is called the first time.

        Args:
            config: The configuration of the run.
            plan: The numbers that fix the rows of every batch of the phase, which is
                pretraining or discovery.
            rank: Number of the worker, from 0.
            world_size: The number of workers.
            last: The step at which the phase ends. Nothing is cropped for this step or
                later ones, so these have no batch.
        """
        return StreamBatches(config, self, plan, rank, world_size, last)

    def choose_rows(self, num: int) -> list[np.ndarray]:
        """Choose a sample of labeled and of unlabeled rows that takes little reading.

        The rows are evenly spaced. Images that are stored together are chosen together
        instead, unless they are sorted by class, see :func:`~uno.data.images.spread`.
        No image is read here.

        Args:
            num: The largest number of rows of each kind; a larger number than
                :data:`MAX_SAMPLE_ROWS` (20,000) counts as this one. There may be more
                labeled rows: one row is added of each known class that would have none.
                There may be fewer rows if images are stored together.

        Returns:
            A list of two arrays int64, ascending: positions among the labeled rows, and
            positions among the unlabeled rows. They are all rows of a kind that has no
            more than the largest number.
        """
        kinds, labels = [self.labeled, self.unlabeled], self.labels.numpy()
        return spread(self.source.images, kinds, min(num, MAX_SAMPLE_ROWS), labels)

    def plan_reading(
        self, chosen: Sequence[np.ndarray], batch_size: int
    ) -> tuple[list[np.ndarray], Read]:
        """Divide a sample of rows into batches, and return how they are decoded.

        Args:
            chosen: Two arrays int64 that :meth:`choose_rows` returns: positions among
                the labeled rows, and positions among the unlabeled rows.
            batch_size: The largest number of rows of a batch. Batches have fewer rows
                if their pixels would take more than :data:`EVAL_BYTES` (64 MiB), or so
                that images that are stored in one group stay in one batch.

        Returns:
            Two values. The first has for each batch the positions of its rows in the
            sample, in which the labeled rows come first, int64 (b,). If images are
            stored in groups, a batch can have labeled and unlabeled rows, in the order
            of their row numbers. The second is a function. It takes such positions of
            some batches, and yields for each of them the decoded images of its rows,
            uint8 (b, 3, S, S), on the CPU, and bool (b,), which rows could be read. The
            images of the others are black, and these rows are not added to the list of
            unreadable images. Iterating raises a ConfigError if a file with many images
            cannot be read, and a StorageError if an image's file cannot be read now,
            but perhaps later.
        """
        kinds = [self.labeled[chosen[0]], self.unlabeled[chosen[1]]]
        return self.source.plan_reading(kinds, batch_size)

    def sync(self) -> None:
        """Exchange with all workers which images proved unreadable.

        All workers must call this at the same step. If any worker has recorded new ones
        since the last call, rank 0 writes the list of all to ``bad_samples.jsonl`` in
        the run directory. Otherwise nothing is written or checked.

        Raises:
            ConfigError: There are new ones, and a larger share of all rows of the run
                is unreadable than ``data.max_bad_fraction`` allows. The list is written
                before.
            StorageError: Rank 0 cannot write the list.
        """
        self.source.bad.sync()


def streaming_set(config: Config, task: Task, storage: Storage) -> StreamSet:
    """Make the training set of a run whose images are decoded in threads when needed.

    No image is read here. The device of its batches is the CPU.

    Args:
        config: The configuration of the run.
        task: All rows of the run, their classes, and which rows are for training.
        storage: The run directory, where unreadable images are listed. The list of an
            earlier start of the run is read, so that its images stay in the list and
            count towards ``data.max_bad_fraction``. They are tried again all the same.
            A damaged list counts as empty.

    Raises:
        StorageError: The list of an earlier start exists, and its file cannot be read.
    """
    rows = task.rows
    bad = BadRows(rows.ids, rows.images, config.data.max_bad_fraction, storage)
    source = StreamedImages.of(config, rows.images, bad)
    return stream_here(config, source, **train_rows(task))


def stream_here(config: Config, source: StreamedImages, **rows: Any) -> StreamSet:
    """Make a training set whose rows are cropped by threads of this process.

    The device of its batches is the CPU. Nothing is read here.

    Args:
        config: The configuration of the run. It gives the number of threads, by default
            the number of cores that this process may use.
        source: The images of all rows of the run, and the record of unreadable rows.
        **rows: The fields that :func:`~uno.data.splits.train_rows` returns:
            ``labeled`` and ``unlabeled`` (row numbers), ``labels`` (of labeled rows),
            ``num_known`` and ``num_novel`` (numbers of classes).
    """
    threads = config.compute.threads or available_cpus()
    return StreamSet(source, **rows, crop=partial(crop_local, threads=threads))


class StreamBatches:
    """The batches of a phase from images that are not in memory, for one worker.

    Calling an object with the number of a step returns the
    :class:`~uno.data.sampling.Batch` of this step: views of this worker's labeled and
    unlabeled rows, and the labels. The first call starts to crop the rows of
    this and the following steps ahead. A call with another step than the next one
    starts anew from there.

    Args:
        config: The configuration of the run.
        train: The training set.
        plan: The numbers that fix the rows of every batch of the phase.
        rank: Number of the worker, from 0.
        world_size: The number of workers, which divides the numbers of labeled and of
            unlabeled rows in a global batch.
        last: The step at which the phase ends. This step and later ones have no batch.

    Attributes:
        waited_s: Seconds that calls have waited for cropped views, so far.
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
        """Return this worker's part of the batch of a step.

        Rows that prove unreadable are recorded, and replaced by readable rows of their
        kind, labeled or unlabeled, in this worker's part of the batch, see
        :func:`replacement_rows`. A replaced labeled row has the label of the row that
        takes its place. In the steps that are divisible by :data:`SYNC_STEPS` (100),
        and in the first step of each epoch, the workers exchange which rows are
        unreadable, so all of them must call this with the same step.

        Args:
            step: Number of the step in the phase, from 0 and less than ``last``.

        Returns:
            The batch on the device of the training set: ``views``, one tensor float32
            (b_l + b_u, 3, S_v, S_v) for each view, large views first, normalized, with
            the b_l labeled rows of this worker before its b_u unlabeled rows;
            ``labels``, the known class of each labeled row, int64 (b_l,); and
            ``num_large``, the number of large views. Its ``rows`` are None.

        Raises:
            ConfigError: This worker's part has labeled images and all of these are
                unreadable, or so for unlabeled images; more images are unreadable than
                the configuration allows, which is checked when workers exchange them,
                if there are new ones; or a file that holds many images cannot be read.
            StorageError: An image's file cannot be read now, but perhaps later; or the
                list of unreadable images cannot be written.
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
            train.source.bad.add(int(rows[position]), reason)
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
        generator = augment_generator(config.seed, plan.stream, step)
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
        """Stop the threads or tasks that crop images ahead of the training step.

        A later call of this object for any step starts them again.
        """
        self._running.close()
        self._next = -1

    def _start(self, step: int) -> None:
        """Start to crop the rows of this worker ahead, from a step on.

        What is being cropped for other steps is stopped and dropped.

        Args:
            step: The first step whose rows are cropped.
        """
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
    """Join cropped views of rows to batches of equal size.

    Rows keep their order. Rows at the end that do not fill a batch are dropped.

    Args:
        chunks: The views of all rows in order, some rows at a time, uint8 (n,
            row_bytes), each with the reasons of its rows (None for a readable one).
        num_rows: The number of rows in a batch.
        row_bytes: Bytes of all views of a row.
        pin: Whether batches are in page-locked memory, from which they are copied to a
            GPU asynchronously.

    Yields:
        The views of a batch, a new tensor uint8 (num_rows, row_bytes) on the CPU, in
        which an unreadable row has what its chunk has; and the reason for each
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
    readable row of its kind, labeled or unlabeled. If no readable row of its kind
    follows, it is replaced by the first readable one of its kind.

    Args:
        ok: Whether each row is readable, bool (B,).
        num_labeled: The number of labeled rows, which come first.

    Returns:
        The position of the row to take for each position, int64 (B,). None if one kind
        has rows and all of them are unreadable.
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
        plan: The numbers that fix the rows of every batch of the phase.
        rank: Number of the worker, from 0.
        world_size: W, the number of workers, which divides the numbers of labeled and
            of unlabeled rows in a global batch.
        first: The first step.
        last: The step after the last one.

    Attributes:
        images: The images of all rows of the run.
        first: The first step.
        last: The step after the last one.
        cropper: The :class:`~uno.crops.Cropper` that cuts the views of the rows.
        row_bytes: Bytes of all views of a row, as uint8 pixels.
        chunk_rows: The largest number of rows to crop at once: so many that their views
            take at most :data:`CHUNK_BYTES` (16 MiB), at least 1 and at most
            :data:`CHUNK_ROWS` (4096).
        fetch_rows: The number of rows to read at once, if the images are stored in
            groups: about one window of labeled and one of unlabeled rows, see
            :func:`window_rows`. None if each image is read by itself.
        order: The :class:`~uno.data.sampling.Order` in which this worker reads rows.
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
        self.images = train.source.images
        self.first, self.last, self._train = first, last, train
        self._steps_per_epoch = plan.steps_per_epoch
        num_rows, data = plan.labeled_size + plan.unlabeled_size, config.data
        how = config.augment, data.stored_size, Decoding.of(data)
        self.cropper = Cropper(config.seed, plan.stream, num_rows, *how)
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
        """Return the row numbers of this worker's part of a batch, labeled ones first.

        Args:
            step: Number of the step in the phase, from 0.

        Returns:
            Numbers among all rows of the run, int64 (B / W,) for W workers.
        """
        labeled, unlabeled = self.order.rows(step)
        return np.concatenate(
            [self._train.labeled[labeled], self._train.unlabeled[unlabeled]]
        )

    def epochs(self, num_rows: int) -> Iterator[Iterator[References]]:
        """Yield the rows of this worker in the order in which it needs them, by epoch.

        No image is read.

        Args:
            num_rows: The number of rows at a time. They can be of several steps, and
                the last ones of an epoch can be fewer.

        Yields:
            For each epoch, or the part of it that is in the range of steps, an iterator
            over some rows at a time: the steps that need them, their positions in the
            global batch, and their row numbers, see :data:`References`.
        """
        first = self.first
        while first < self.last:
            last = min(
                self.last, (first // self._steps_per_epoch + 1) * self._steps_per_epoch
            )
            yield self._references(num_rows, first, last)
            first = last

    def _references(self, num_rows: int, first: int, last: int) -> Iterator[References]:
        """Yield this worker's rows of a range of steps, some at a time.

        Args:
            num_rows: The number of rows at a time. They can be of several steps, and
                the last ones can be fewer.
            first: The first step.
            last: The step after the last one.

        Yields:
            Global steps, positions in the global batch, and row numbers among all rows
            of the run: three arrays int64 (n,).
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

    It is :data:`WINDOW_BYTES` (64 MiB) divided by the mean stored size of an image, at
    least 1 and at most :data:`MAX_WINDOW_ROWS` (2048), see
    :func:`~uno.data.sampling.by_windows`. The sizes are those that the method ``sizes``
    of the images returns. For images in groups it reads no image.

    Args:
        images: All images of the run, at least one.
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
        job: The rows, and how they are cropped.
        threads: The number of threads.

    Yields:
        Some rows at a time, in order: their views uint8 (n, row_bytes), and for each
        row the reason why it is unreadable, or None. The views of an unreadable row are
        black.

    Raises:
        ConfigError: A file that holds many images, such as a tar shard, cannot be read.
        StorageError: An image's file cannot be read now, but perhaps later.
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
    """Yield the rows of a job with their images, some rows at a time.

    Images that are stored in groups are read here, in the thread that consumes this, so
    that the rows of a group are read together. Other images are read when they are
    cropped.

    Args:
        job: The rows that one worker needs in a range of steps.

    Yields:
        For n rows the global steps int64 (n,), the positions in the global batches
        int64 (n,), and the :class:`~uno.data.images.Images` of these rows, numbered
        from 0. n is at most ``job.chunk_rows``, and at most 512 (:data:`THREAD_ROWS`).

    Raises:
        ConfigError: A file that holds images in groups cannot be read.
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
class StreamedEvalSet(EvalRows):
    """N rows with a true class, decoded when they are evaluated.

    It has the methods of :class:`~uno.data.memory.EvalSet`, and the attributes
    ``truth``, ``index`` and ``unlabeled`` of :class:`~uno.data.memory.EvalRows`.

    Attributes:
        source: The images of all rows of the run, and the record of unreadable rows.
    """

    source: StreamedImages

    def batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the readable rows of one worker as batches, each once and in order.

        Unreadable rows are left out. They are added to ``bad`` of the attribute
        ``source``, which collects the unreadable rows of the run. A batch without a
        readable row is not yielded.

        Args:
            batch_size: The largest number of rows in a batch. Batches have fewer rows
                if their pixels would take more than :data:`EVAL_BYTES` (64 MiB), or so
                that images that are stored in one group stay in one batch.
            rank: Number of the worker, from 0. It gets a contiguous share of the rows.
            world_size: The number of workers.

        Yields:
            Images uint8 (b, 3, S, S) on the CPU, and true classes int64 (b,), indices
            among the known and novel classes. Every row of this set has a true class.

        Raises:
            ConfigError: A file that holds many images cannot be read.
            StorageError: An image's file cannot be read now, but perhaps later.
        """
        own, truth = (
            rows.tensor_split(world_size)[rank] for rows in (self.index, self.truth)
        )
        index, source = own.numpy(), self.source
        size = decoded_rows(batch_size, source.side)
        batches = batches_of(source.images, index, size)
        found = source.decode(index[batch] for batch in batches)
        for batch, (rows, images, reasons) in zip(batches, found, strict=True):
            ok = ok_mask(reasons)
            for i in np.flatnonzero(~ok).tolist():
                source.bad.add(int(rows[i]), str(reasons[i]))
            if ok.any():
                yield (
                    (images if ok.all() else images[torch.from_numpy(ok)]),
                    truth[torch.from_numpy(batch[ok])],
                )

    def choose_rows(self, num: int) -> list[np.ndarray]:
        """Choose a sample of the rows that takes little reading.

        The rows are evenly spaced. Images that are stored together are chosen together
        instead, see :func:`~uno.data.images.spread`. No image is read here.

        Args:
            num: The largest number of rows. At most :data:`MAX_SAMPLE_ROWS` (20,000)
                are chosen, and there may be fewer if images are stored together.

        Returns:
            A list of one array int64, because there is one kind of rows: the positions
            of the chosen rows in :attr:`index`, ascending.
        """
        rows, num = [self.index.numpy()], min(num, MAX_SAMPLE_ROWS)
        return spread(self.source.images, rows, num)

    def plan_reading(
        self, chosen: Sequence[np.ndarray], batch_size: int
    ) -> tuple[list[np.ndarray], Read]:
        """Divide a sample of rows into batches, and return how they are decoded.

        Args:
            chosen: A list of one array int64, the positions of the chosen rows in
                :attr:`index`, which :meth:`choose_rows` returns.
            batch_size: The largest number of rows of a batch. Batches have fewer rows
                if their pixels would take more than :data:`EVAL_BYTES` (64 MiB), or so
                that images that are stored in one group stay in one batch.

        Returns:
            Two values. The first has for each batch the positions of its rows in the
            sample, int64 (b,). The second is a function. It takes such positions of
            some batches, and yields for each of them the decoded images of its rows,
            uint8 (b, 3, S, S), on the CPU, and bool (b,), which rows could be read. The
            images of the others are black, and these rows are not added to the list of
            unreadable images. Iterating raises a ConfigError if a file with many images
            cannot be read, and a StorageError if an image's file cannot be read now,
            but perhaps later.
        """
        index = self.index.numpy()
        return self.source.plan_reading([index[rows] for rows in chosen], batch_size)


def decoded_rows(batch_size: int, side: int) -> int:
    """Return the number of images to decode at once for evaluation.

    Args:
        batch_size: The largest number of images.
        side: The side of the decoded images in pixels.

    Returns:
        ``batch_size``; or as many images as have at most :data:`EVAL_BYTES` (64 MiB) of
        pixels, if that is less, but at least 1.
    """
    return max(1, min(batch_size, EVAL_BYTES // (3 * side**2)))


def streaming_eval_sets(
    task: Task, source: StreamedImages
) -> dict[str, StreamedEvalSet]:
    """Make the evaluation sets of a run whose images are decoded when needed.

    Args:
        task: All rows of the run.
        source: The images of these rows.

    Returns:
        The sets of the splits "train" and "test", by these names. Each has the rows of
        the split that have a true class, labeled or not. A set can be empty.
    """
    return {
        split: StreamedEvalSet(truth, index, unlabeled, source)
        for split, (index, truth, unlabeled) in truth_rows(task).items()
    }


TrainData = TrainSet | StreamSet
EvalData = EvalSet | StreamedEvalSet
