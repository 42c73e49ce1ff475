"""Training batches from images that stay where they are: read, decode and cut ahead of the training step.

A worker's rows of all steps form one line of references (:mod:`uno.feed`); whoever cuts them, threads here
or Ray Data, hands back 8-bit views in the same order; :class:`StreamBatches` packs them into batches and does
the rest of the augmentation on the device. Everything is a function of (seed, step, rank), so any step can be
the first.

An image that turns out to be unreadable is replaced in its batch by the views of the next readable row of its
kind in the worker's share; it is listed in bad_samples.jsonl, and too many of them end the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uno.augment import augment_crops
from uno.config import Config, ConfigError
from uno.data.bad import BadRows, stand_ins
from uno.data.batches import Plan, augment_generator
from uno.data.splits import Task
from uno.feed import Feed, Part, StreamSet, ahead, cut_here, stream_facts
from uno.predict import decoded
from uno.steps import Batch
from uno.storage import Storage

BATCHES_AHEAD = 2
SYNC_STEPS = 100
EVAL_BYTES = 64 * 2**20  # decoded pixels of an evaluation batch

Decoded = tuple[np.ndarray, Tensor, np.ndarray, dict[int, str]]
"""Rows of the task (b,), images uint8 (b,3,S,S), ok (b,), reason by place: of :func:`uno.predict.decoded`."""


class StreamBatches:
    """``batches(step)`` -> this worker's :class:`Batch`, as :class:`uno.batches.ResidentBatches`.

    Steps in order come from one line of parts that is cut ahead; any other step opens a new one.

    Args:
        config: of the run.
        train: the sets.
        plan: of the phase.
        rank: of the worker.
        world_size: number of workers.
        device: of the batches.
        last: step at which the phase ends; nothing is cut beyond.
    """

    def __init__(
        self,
        config: Config,
        train: StreamSet,
        plan: Plan,
        rank: int,
        world_size: int,
        device: torch.device,
        last: int,
    ) -> None:
        self._config, self._train, self._plan, self._device, self._last = config, train, plan, device, last
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
            self._train.bad.sync(self._device)
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
        for rows, images, ok, reasons in self.decode(lots):
            for place, reason in reasons.items():
                self.bad.add(int(rows[place]), reason)
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
