"""Training batches from images that stay where they are: read, decode and crop ahead of
the training step.

A worker's rows of all steps form one sequence (:class:`CropJob`). Whoever crops them,
threads here or Ray Data, hands back 8-bit views in the same order;
:class:`StreamBatches` packs them into batches and does the rest of the augmentation on
the device. In the place of an unreadable image stands the next readable one.
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
    BadRows,
    DecodedBatch,
    decoded,
    ok_mask,
    prefetch_map,
)
from uno.data.files import Storage
from uno.data.images import Images, InMemory, batches_of
from uno.data.plan import Batch, Order, Plan, augment_generator
from uno.data.resident import EvalSet, TrainSet
from uno.data.splits import Task, train_rows, truth_rows
from uno.errors import ConfigError

SYNC_STEPS = 100
EVAL_BYTES = 64 * 2**20  # decoded pixels of an evaluation batch
# of views, at most: many in flight, half a second of cropping for ImageNet
CHUNK_BYTES = 16 * 2**20
CHUNK_ROWS = 4096
# of a chunk that a thread crops: what costs Ray a block costs nothing here
THREAD_ROWS = 512
WINDOW_BYTES = 64 * 2**20
# one Ray task crops two windows: with more, cores would wait for the last
MAX_WINDOW_ROWS = CHUNK_ROWS // 2
SIZES_AT_ONCE = 2**16  # rows
CPU = torch.device("cpu")

Chunk = tuple[np.ndarray, list[str | None]]
"""Rows that have been cropped, in order: views uint8 (n, row_bytes), why a row has
none.
"""
References = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows to crop, in order, each int64 (n,): step, position in the global batch, row
of the task.
"""


@dataclass(frozen=True, eq=False)
class StreamSet:
    """As TrainSet, of images that are not loaded: those of all N rows of the task.
    ``labeled`` int64 (N_l,) and ``unlabeled`` (N_u,) are numbers of its training rows.
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
        """N_u."""
        return len(self.unlabeled)

    def to(self, device: torch.device | str) -> StreamSet:
        """The same set, with batches on ``device``."""
        return replace(self, device=torch.device(device))

    def batches(
        self, config: Config, plan: Plan, rank: int, world_size: int, last: int
    ) -> StreamBatches:
        """The batches of a phase for worker ``rank``; nothing is cropped beyond step
        ``last``.
        """
        return StreamBatches(config, self, plan, rank, world_size, last)

    def sync(self) -> None:
        """Tell all workers which images proved unreadable."""
        self.bad.sync(self.device)


def streaming_set(config: Config, task: Task, storage: Storage) -> StreamSet:
    """The training rows of ``task``, cropped by threads of this process."""
    facts = stream_facts(task)
    bad = BadRows(
        facts.pop("ids"), task.rows.images, config.data.max_bad_fraction, storage
    )
    return stream_here(config, bad, **facts)


def stream_here(config: Config, bad: BadRows, images: Images, **rows: Any) -> StreamSet:
    """Rows of :func:`~uno.data.splits.train_rows` of ``images``, cropped by threads
    of this process.
    """
    crop = partial(crop_local, threads=config.compute.threads or available_cpus())
    return StreamSet(
        images, **rows, bad=bad, crop=crop, decode=decode_here(config, images)
    )


def decode_here(
    config: Config, images: Images
) -> Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]]:
    """What decodes batches of rows, by threads of this process."""
    size, threads, how = (
        config.data.stored_size,
        config.compute.threads,
        config.data.interpolation,
    )
    return partial(decoded, images, size=size, threads=threads, interpolation=how)


def stream_facts(task: Task) -> dict[str, Any]:
    """The fields of a :class:`StreamSet` that do not depend on the process, and the
    ``ids`` of all rows.
    """
    return {"images": task.rows.images, "ids": task.rows.ids, **train_rows(task)}


class StreamBatches:
    """As ResidentBatches; steps in order come from one sequence cropped ahead, any
    other starts a new one.
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
        """For what is cropped ahead, so far."""

    def __call__(self, step: int) -> Batch:
        """The batch of global step ``step``; ConfigError: too many unreadable
        images, or a damaged source.
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
        """Stop cropping ahead."""
        self._running.close()
        self._next = -1

    def _start(self, step: int) -> None:
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
    """Chunks -> batches: uint8 (num_rows, row_bytes), page-locked if ``pin``, and
    why rows have no pixels.
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
    """int64 (B,): which row takes each place of a batch: itself if ``ok`` bool (B,),
    else the next one of its kind that is (the first ``num_labeled`` are one kind),
    going round. None where a kind has none.
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
    """The rows that one worker needs from step ``first`` to before ``last``, in
    order, and their cropper.
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
        how = config.augment, data.stored_size, data.interpolation
        self.cropper = Cropper(config.seed, plan.labeled_stream, num_rows, *how)
        self.row_bytes = self.cropper.row_bytes
        self.chunk_rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // self.row_bytes))
        labeled, unlabeled = (
            self.images.groups(rows) for rows in (train.labeled, train.unlabeled)
        )
        groups = None if labeled is None or unlabeled is None else (labeled, unlabeled)
        window = 1 if groups is None else window_rows(self.images)
        self.fetch_rows = None if groups is None else 2 * window
        """What to read at once: about a window of each kind; None: as few rows as
        one likes.
        """
        self.order = Order(plan, rank, world_size, groups, window)
        self.rows_per_step = len(self.order.positions)

    def rows(self, step: int) -> np.ndarray:
        """Rows of the task that make a step, int64 (B/W,), labeled ones first."""
        labeled, unlabeled = self.order.rows(step)
        return np.concatenate(
            [self._train.labeled[labeled], self._train.unlabeled[unlabeled]]
        )

    def epochs(self, num_rows: int) -> Iterator[Iterator[References]]:
        """Of each epoch all rows in order, ``num_rows`` at a time across steps; the
        last may be fewer.
        """
        first = self.first
        while first < self.last:
            last = min(
                self.last, (first // self._steps_per_epoch + 1) * self._steps_per_epoch
            )
            yield self._references(num_rows, first, last)
            first = last

    def _references(self, num_rows: int, first: int, last: int) -> Iterator[References]:
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
    """Rows that are mixed at once: they come from groups that are read together."""
    num, parts = len(images), range(0, len(images), SIZES_AT_ONCE)
    total = sum(
        int(images.sizes(np.arange(i, min(i + SIZES_AT_ONCE, num))).sum())
        for i in parts
    )
    row_bytes = max(1, total // num)
    return max(1, min(MAX_WINDOW_ROWS, WINDOW_BYTES // row_bytes))


def crop_local(job: CropJob, threads: int) -> Generator[Chunk, None, None]:
    """Crop in ``threads`` threads of this process."""

    def crop(item: tuple[np.ndarray, np.ndarray, Images]) -> Chunk:
        steps, positions, images = item
        return job.cropper.crop(
            steps, positions, images.read_images(np.arange(len(images)))
        )

    return prefetch_map(crop, _with_images(job), threads, threads + 1)


def _with_images(job: CropJob) -> Iterator[tuple[np.ndarray, np.ndarray, Images]]:
    """(steps, positions, images) of a chunk each; what is read together is fetched
    here, ahead.
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
    """An EvalSet of images that are decoded when they are evaluated; ``bad`` notes
    unreadable ones.
    """

    truth: Tensor
    index: Tensor
    unlabeled: Tensor
    images: Images
    side: int
    decode: Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]]
    bad: BadRows

    def where(self, chosen: Tensor) -> StreamedEvalSet:
        """The rows of the mask ``chosen`` (N,) bool."""
        truth, index, unlabeled = (
            rows[chosen] for rows in (self.truth, self.index, self.unlabeled)
        )
        return replace(self, truth=truth, index=index, unlabeled=unlabeled)

    def batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images uint8 (b,3,S,S), truth (b,)) of this worker's contiguous share,
        every row once.
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
    """Of a batch that is decoded for the model alone."""
    return max(1, min(batch_size, EVAL_BYTES // (3 * side**2)))


def streaming_eval_sets(
    config: Config, task: Task, bad: BadRows
) -> dict[str, StreamedEvalSet]:
    """{"train", "test"} -> the rows of ``task`` with a true class, decoded by
    threads of this process.
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
