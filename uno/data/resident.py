"""Sets that are decoded once and kept in memory: what training may see, and what
only evaluation reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from uno.augment import augment
from uno.config import Config
from uno.data.images import with_ready
from uno.data.mapped import NeighborViews
from uno.data.plan import PRETEXT, Batch, Order, Plan, augment_generator
from uno.data.row_blocks import RowBlocks, part
from uno.data.splits import Task, train_rows, truth_rows


@dataclass(frozen=True, eq=False)
class TrainSet:
    """Everything training may see: images uint8 (N,3,S,S), or in their place a frozen
    encoder's features float32 (N,1+V,D), see :mod:`uno.data.features`; ``labels`` int64
    (N_l,) known-class indices. It holds no label of a novel class, not even hidden
    somewhere.
    """

    labeled_images: Tensor | RowBlocks
    labels: Tensor
    unlabeled_images: Tensor | RowBlocks
    num_known: int
    num_novel: int

    @property
    def num_unlabeled(self) -> int:
        """N_u."""
        return len(self.unlabeled_images)

    def to(self, device: torch.device | str) -> TrainSet:
        """The same set on ``device``."""
        names = ("labeled_images", "labels", "unlabeled_images")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def batches(
        self,
        config: Config,
        plan: Plan,
        rank: int = 0,
        world_size: int = 1,
        last: int | None = None,
    ) -> ResidentBatches:
        """The batches of a phase for worker ``rank``; those of a pretext task have
        no labels.
        """
        kind = PretextBatches if plan.labeled_stream == PRETEXT else ResidentBatches
        if self.labeled_images.ndim == 3:
            kind = FeatureBatches
        return kind(config, self, plan, rank, world_size)

    def sync(self) -> None:
        """Do nothing. Streamed sets exchange here which images are unreadable.

        Unreadable images of a set in memory were left out before training.
        """


@dataclass(frozen=True, eq=False)
class EvalSet:
    """Rows ``index`` int64 (N,) of the task with a true class: ``images`` uint8
    (N,3,S,S), or features (N,D); ``truth`` int64 (N,) over known + novel classes,
    ``unlabeled`` bool (N,): training sees no label of it, or not the row. Only
    evaluation reads this.
    """

    images: Tensor | RowBlocks
    truth: Tensor
    index: Tensor
    unlabeled: Tensor

    def where(self, chosen: Tensor) -> EvalSet:
        """The rows of the mask ``chosen`` (N,) bool."""
        rest = self.truth[chosen], self.index[chosen], self.unlabeled[chosen]
        return EvalSet(part(self.images, chosen), *rest)

    def batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images (b,3,S,S), truth (b,)) of this worker's rows ``rank::world_size``,
        every row once.
        """
        own = slice(rank, None, world_size)
        images, truth = (
            part(self.images, own).split(batch_size),
            self.truth[own].split(batch_size),
        )
        return ((some, of) for some, of in zip(images, truth, strict=False) if len(of))


def keep_pixels(
    task: Task, images: Tensor | RowBlocks | NeighborViews, reasons: list[str | None]
) -> Task:
    """``task`` with the result of :func:`~uno.data.decode.decode_many`: what comes
    later decodes nothing; or with cached features: what comes later needs no encoder.
    """
    if images.ndim != 4:
        all_views, images = images, images[:, 0]  # the evaluation view
        if isinstance(all_views, Tensor) and all_views.shape[1] > 1:
            images = images.clone()  # the others may go
    values = images if isinstance(images, RowBlocks) else RowBlocks([images])
    return replace(
        task,
        rows=replace(task.rows, images=with_ready(task.rows.images, values, reasons)),
    )


def assemble(task: Task, images: Tensor | NeighborViews, ok: np.ndarray) -> TrainSet:
    """The training rows of ``task`` with images uint8 (N,3,S,S) that decoded (``ok``
    bool (N,)).
    """
    return train_set(RowBlocks([images]), **train_rows(task, ok))


def train_set(
    images: RowBlocks,
    labeled: np.ndarray,
    labels: Tensor,
    unlabeled: np.ndarray,
    num_known: int,
    num_novel: int,
) -> TrainSet:
    """:func:`assemble` from :func:`~uno.data.splits.train_rows`, where the task
    itself is not at hand.
    """
    known, rest = (
        images.select_rows(torch.tensor(rows)) for rows in (labeled, unlabeled)
    )  # Ray's arrays are read-only
    return TrainSet(known, labels, rest, num_known, num_novel)


def eval_sets(
    task: Task, images: Tensor | NeighborViews, ok: np.ndarray
) -> dict[str, EvalSet]:
    """{"train", "test"} -> the rows with a true class, known and novel, in row
    order; possibly none.
    """
    found = truth_rows(task, ok).items()
    # of features the evaluation view
    pixels = RowBlocks([images if images.ndim == 4 else images[:, 0]])
    return {
        split: EvalSet(pixels.select_rows(own), truth, own, free)
        for split, (own, truth, free) in found
    }


class ResidentBatches:
    """``batches(step)`` -> :class:`Batch`, by (seed, step, rank): the same views on
    any number of workers.
    """

    def __init__(
        self, config: Config, train: TrainSet, plan: Plan, rank: int, world_size: int
    ) -> None:
        self._config, self._train, self._plan = config, train, plan
        self._order = Order(plan, rank, world_size)

    def __call__(self, step: int) -> Batch:
        """The batch of global step ``step``."""
        labeled, unlabeled = map(self._on_device, self._order.rows(step))
        views = self._views(labeled, unlabeled, step, self._order.positions)
        return Batch(
            views,
            self._train.labels[labeled],
            self._config.augment.large.num_views,
            unlabeled,
        )

    def close(self) -> None:
        """Nothing is prepared ahead."""

    def _on_device(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(self._train.labels.device, non_blocking=True)

    def _views(
        self, labeled: Tensor, unlabeled: Tensor, step: int, positions: np.ndarray
    ) -> list[Tensor]:
        """Views of these rows of the set, which are at ``positions`` (B,) of the
        global batch.
        """
        config, plan, train = self._config, self._plan, self._train
        images = torch.cat(
            [train.labeled_images[labeled], train.unlabeled_images[unlabeled]]
        )
        generator = augment_generator(config.seed, plan.labeled_stream, step)
        rows, num_rows = (
            torch.from_numpy(positions),
            plan.labeled_size + plan.unlabeled_size,
        )
        return augment(
            images,
            config.augment,
            generator,
            config.data.mean,
            config.data.std,
            rows,
            num_rows,
        )


class FeatureBatches(ResidentBatches):
    """Batches of features: each row's views are some of its cached ones, others in
    every epoch.

    The evaluation view is one of them: heads that never meet what they will be asked
    about end lower.
    """

    def _views(
        self, labeled: Tensor, unlabeled: Tensor, step: int, positions: np.ndarray
    ) -> list[Tensor]:
        """V times (B, D)."""
        config, plan, train = self._config, self._plan, self._train
        generator = augment_generator(config.seed, plan.labeled_stream, step)
        size = plan.labeled_size + plan.unlabeled_size, train.labeled_images.shape[1]
        order = torch.rand(size, generator=generator).argsort(dim=1)[
            torch.from_numpy(positions)
        ]
        known, rest = order.to(labeled.device, non_blocking=True).split(
            [len(labeled), len(unlabeled)]
        )
        return [
            torch.cat(
                [
                    train.labeled_images[labeled, known[:, v]],
                    train.unlabeled_images[unlabeled, rest[:, v]],
                ]
            )
            for v in range(config.augment.large.num_views)
        ]


class PretextBatches(ResidentBatches):
    """Batches of a pretext task: labeled and unlabeled rows alike."""

    def __call__(self, step: int) -> Batch:
        """The batch of global step ``step``; it has no labels."""
        train, (rows, _) = self._train, self._order.rows(step)
        is_unlabeled = rows >= len(train.labels)  # which are stored apart
        labeled, unlabeled = rows[~is_unlabeled], rows[is_unlabeled] - len(train.labels)
        positions = self._order.positions[np.argsort(is_unlabeled, kind="stable")]
        views = self._views(
            self._on_device(labeled), self._on_device(unlabeled), step, positions
        )
        return Batch(views, train.labels[:0], self._config.augment.large.num_views)
