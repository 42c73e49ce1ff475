"""Training and evaluation sets that are decoded once and kept in memory.

A :class:`TrainSet` holds all that training may see. Only evaluation reads an
:class:`EvalSet`.
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
    """The training rows in memory, with all that training may see.

    It holds no label of a novel class. Images are uint8 (N, 3, S, S). Their place can
    be taken by features float32 (N, 1 + V, D) of a frozen encoder: one view for
    evaluation and V random views, see :mod:`uno.data.features`.

    Attributes:
        labeled_images: Images or features of the N_l labeled rows.
        labels: Index of the known class of each labeled row, int64 (N_l,).
        unlabeled_images: Images or features of the N_u unlabeled rows.
        num_known: C_l, the number of known classes.
        num_novel: C_u, the number of novel classes.
    """

    labeled_images: Tensor | RowBlocks
    labels: Tensor
    unlabeled_images: Tensor | RowBlocks
    num_known: int
    num_novel: int

    @property
    def num_unlabeled(self) -> int:
        """N_u, the number of unlabeled training rows."""
        return len(self.unlabeled_images)

    def to(self, device: torch.device | str) -> TrainSet:
        """Return the same set with all of its tensors on ``device``."""
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
        """Return the batches of a phase for one worker.

        Args:
            config: The configuration of the run.
            plan: The sizes of the phase.
            rank: Number of the worker.
            world_size: The number of workers.
            last: Unused. Streamed sets need the step at which the phase ends.

        Returns:
            Batches of features if the set holds features; else batches without labels
            for a pretext task; else batches of images.
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
    """N rows with a true class, in memory. Only evaluation reads them.

    Attributes:
        images: Images uint8 (N, 3, S, S), or features float32 (N, D).
        truth: Index of the true class among known + novel classes, int64 (N,).
        index: Row number in the task, int64 (N,).
        unlabeled: Whether training does not see the row's label, bool (N,). This holds
            also for rows that training does not see at all.
    """

    images: Tensor | RowBlocks
    truth: Tensor
    index: Tensor
    unlabeled: Tensor

    def where(self, chosen: Tensor) -> EvalSet:
        """Return the set of only some of its N rows.

        Args:
            chosen: Whether each row is kept, bool (N,).
        """
        rest = self.truth[chosen], self.index[chosen], self.unlabeled[chosen]
        return EvalSet(part(self.images, chosen), *rest)

    def batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of one worker as batches, each row once.

        Args:
            batch_size: The largest number of rows in a batch.
            rank: Number of the worker. It gets the rows ``rank::world_size``.
            world_size: The number of workers.

        Yields:
            Images (b, 3, S, S) or features (b, D), and true classes int64 (b,).
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
    """Return the task together with its decoded images or its features.

    Later code then takes these values and neither decodes nor encodes the images again.

    Args:
        task: A task of N rows.
        images: Pixels uint8 (N, 3, S, S); or features (N, 1 + V, D), of which the first
            view is kept, the one for evaluation.
        reasons: For each row the reason why it is unreadable, or None.
    """
    if images.ndim != 4:
        all_views, images = images, images[:, 0]  # the view for evaluation
        if isinstance(all_views, Tensor) and all_views.shape[1] > 1:
            images = images.clone()  # so that the other views can be freed
    values = images if isinstance(images, RowBlocks) else RowBlocks([images])
    return replace(
        task,
        rows=replace(task.rows, images=with_ready(task.rows.images, values, reasons)),
    )


def assemble(task: Task, images: Tensor | NeighborViews, ok: np.ndarray) -> TrainSet:
    """Return the training rows of a task as a set in memory.

    Args:
        task: A task of N rows.
        images: Pixels uint8 (N, 3, S, S), or features float32 (N, 1 + V, D).
        ok: Whether each row is readable, bool (N,). Other rows are left out.
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
    """Return a training set of chosen rows, without the task that they come from.

    The arguments but ``images`` are those that :func:`~uno.data.splits.train_rows`
    returns.

    Args:
        images: Images or features of all N rows.
        labeled: Row numbers of the labeled training rows, int64 (N_l,).
        labels: Index of the known class of each labeled row, int64 (N_l,).
        unlabeled: Row numbers of the unlabeled training rows, int64 (N_u,).
        num_known: C_l, the number of known classes.
        num_novel: C_u, the number of novel classes.
    """
    known, rest = (
        images.select_rows(torch.tensor(rows)) for rows in (labeled, unlabeled)
    )  # torch.tensor copies, because arrays that come from Ray are read-only
    return TrainSet(known, labels, rest, num_known, num_novel)


def eval_sets(
    task: Task, images: Tensor | NeighborViews, ok: np.ndarray
) -> dict[str, EvalSet]:
    """Return the rows of a task that have a true class, as sets in memory.

    Args:
        task: A task of N rows.
        images: Pixels uint8 (N, 3, S, S), or features float32 (N, 1 + V, D), of which
            the first view is evaluated.
        ok: Whether each row is readable, bool (N,). Other rows are left out.

    Returns:
        The sets of "train" and "test", with rows in ascending order. A set can be
        empty.
    """
    found = truth_rows(task, ok).items()
    # the first view of features is the one for evaluation
    pixels = RowBlocks([images if images.ndim == 4 else images[:, 0]])
    return {
        split: EvalSet(pixels.select_rows(own), truth, own, free)
        for split, (own, truth, free) in found
    }


class ResidentBatches:
    """The batches of a phase from a set in memory, for one worker.

    Calling an object with a step returns the batch of this step. The batch depends on
    the seed of the run, the step and the rank only. The views of a row are the same for
    any number of workers.

    Args:
        config: The configuration of the run.
        train: The training set.
        plan: The sizes of the phase.
        rank: Number of the worker.
        world_size: The number of workers.
    """

    def __init__(
        self, config: Config, train: TrainSet, plan: Plan, rank: int, world_size: int
    ) -> None:
        self._config, self._train, self._plan = config, train, plan
        self._order = Order(plan, rank, world_size)

    def __call__(self, step: int) -> Batch:
        """Return augmented views of this worker's rows in one step, on the device.

        Args:
            step: Global step, from 0.
        """
        labeled, unlabeled = map(self._on_device, self._order.rows(step))
        views = self._views(labeled, unlabeled, step, self._order.positions)
        return Batch(
            views,
            self._train.labels[labeled],
            self._config.augment.large.num_views,
            unlabeled,
        )

    def close(self) -> None:
        """Do nothing. Batches of a set in memory are not prepared ahead."""

    def _on_device(self, rows: np.ndarray) -> Tensor:
        """Copy row numbers, int64 (n,), to a tensor on the device of the set."""
        return torch.from_numpy(rows).to(self._train.labels.device, non_blocking=True)

    def _views(
        self, labeled: Tensor, unlabeled: Tensor, step: int, positions: np.ndarray
    ) -> list[Tensor]:
        """Return augmented views of some rows.

        Args:
            labeled: Numbers among the labeled rows, int64 (b_l,).
            unlabeled: Numbers among the unlabeled rows, int64 (b_u,).
            step: Global step, which seeds the augmentation.
            positions: Positions of these rows in the global batch, labeled ones first:
                int64 (b_l + b_u,).

        Returns:
            V tensors (b_l + b_u, 3, S_v, S_v), large views first.
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
    """The batches of a phase from cached features, for one worker.

    The views of a row are drawn anew in each step from its 1 + V cached views, without
    repetition. The evaluation view is one of them, because accuracy is lower if the
    heads never train on the view that they are evaluated on.
    """

    def _views(
        self, labeled: Tensor, unlabeled: Tensor, step: int, positions: np.ndarray
    ) -> list[Tensor]:
        """Return some of the cached views of each row, drawn at random for this step.

        Args:
            labeled: Numbers among the labeled rows, int64 (b_l,).
            unlabeled: Numbers among the unlabeled rows, int64 (b_u,).
            step: Global step, which seeds the draw.
            positions: Positions of these rows in the global batch, labeled ones first:
                int64 (b_l + b_u,).

        Returns:
            ``augment.large.num_views`` tensors (b_l + b_u, D) of features. The views of
            a row are different ones.
        """
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
    """The batches of a pretext task, which uses labeled and unlabeled rows alike.

    Row numbers below N_l are labeled rows, and the following ones are unlabeled.
    """

    def __call__(self, step: int) -> Batch:
        """Return augmented views of this worker's rows in one step, without labels.

        Args:
            step: Global step, from 0.
        """
        train, (rows, _) = self._train, self._order.rows(step)
        # labeled and unlabeled rows are stored in different tensors
        is_unlabeled = rows >= len(train.labels)
        labeled, unlabeled = rows[~is_unlabeled], rows[is_unlabeled] - len(train.labels)
        positions = self._order.positions[np.argsort(is_unlabeled, kind="stable")]
        views = self._views(
            self._on_device(labeled), self._on_device(unlabeled), step, positions
        )
        return Batch(views, train.labels[:0], self._config.augment.large.num_views)
