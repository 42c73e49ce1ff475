"""Decoded sets in memory: what training may see (TrainSet) and what only evaluation reads (EvalSet)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from uno.augment import augment
from uno.config import Config, DataConfig
from uno.data.decode import check_bad, decode_many
from uno.data.plan import Plan, augment_generator, batch_indices, worker_share
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.results.evaluate import slices
from uno.steps import Batch


@dataclass(frozen=True, eq=False)
class TrainSet:
    """Everything training may see. It holds no label of a novel class, not even hidden somewhere.

    ``labeled_images`` uint8 (N_l,3,S,S), ``labels`` int64 (N_l,) known-class indices, ``unlabeled_images``
    uint8 (N_u,3,S,S).
    """

    labeled_images: Tensor
    labels: Tensor
    unlabeled_images: Tensor
    num_known: int
    num_novel: int

    @property
    def num_labeled(self) -> int:
        """N_l."""
        return len(self.labels)

    @property
    def num_unlabeled(self) -> int:
        """N_u."""
        return len(self.unlabeled_images)

    def to(self, device: torch.device | str) -> TrainSet:
        """The same set on ``device``."""
        return replace(
            self,
            labeled_images=self.labeled_images.to(device),
            labels=self.labels.to(device),
            unlabeled_images=self.unlabeled_images.to(device),
        )


@dataclass(frozen=True, eq=False)
class EvalSet:
    """Rows with a true class: ``images`` uint8 (N,3,S,S), ``truth`` int64 (N,) over known + novel classes.

    ``index`` int64 (N,) are the row numbers in the task. Only evaluation reads this.
    """

    images: Tensor
    truth: Tensor
    index: Tensor

    def where(self, chosen: Tensor) -> EvalSet:
        """The rows of the mask ``chosen`` (N,) bool."""
        return EvalSet(self.images[chosen], self.truth[chosen], self.index[chosen])

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """(images (b,3,S,S), truth (b,)) of this worker's rows, every row once."""
        return slices(self.images, self.truth, batch_size, rank, world_size)


def load_resident(
    config: DataConfig, threads: int | None = None
) -> tuple[Task, Tensor, np.ndarray, list[dict[str, str]]]:
    """Read, split and decode here: (task, images uint8 (N,3,S,S), ok bool (N,), bad [{"id", "reason"}, ...]).

    Raises:
        ConfigError: as read_rows and make_task, or more bad images than ``max_bad_fraction``.
    """
    task = make_task(read_rows(config), config)
    images, ok, bad = decode_many(task.rows.images, task.rows.ids, config.store_size, threads)
    check_bad(bad, len(task.rows), config.max_bad_fraction)
    return task, images, ok, bad


def assemble(task: Task, images: Tensor, ok: np.ndarray) -> TrainSet:
    """The training rows of ``images`` uint8 (N,3,S,S) that decoded (``ok`` bool (N,))."""
    labeled = _rows(task.is_train & (task.labels >= 0) & ok)
    unlabeled = _rows(task.is_train & (task.labels < 0) & ok)
    labels = torch.from_numpy(task.labels)[labeled]
    return TrainSet(images[labeled], labels, images[unlabeled], len(task.known), task.num_novel)


def eval_sets(task: Task, images: Tensor, ok: np.ndarray) -> dict[str, EvalSet]:
    """{"train", "test"} -> the rows with a true class, known and novel, in row order; possibly none."""
    sets = {}
    for split, member in (("train", task.is_train), ("test", ~task.is_train)):
        index = _rows(member & (task.eval_labels >= 0) & ok)
        sets[split] = EvalSet(images[index], torch.from_numpy(task.eval_labels)[index], index)
    return sets


def _rows(mask: np.ndarray) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask))


class ResidentBatches:
    """``batches(step)`` -> this worker's :class:`Batch`: a pure function of (seed, step, rank).

    Parameters of the views are drawn for the global batch, so a row gets the same views on any number of
    workers.
    """

    def __init__(self, config: Config, train: TrainSet, plan: Plan, rank: int, world_size: int) -> None:
        self._config, self._train, self._plan = config, train, plan
        self._rank, self._world_size = rank, world_size
        size_l, size_u = plan.labeled_size, plan.unlabeled_size
        positions = (np.arange(size_l), size_l + np.arange(size_u))
        self._rows = torch.from_numpy(np.concatenate([self._share(part) for part in positions]))

    def __call__(self, step: int) -> Batch:
        """The batch of global step ``step``."""
        config, train = self._config, self._train
        labeled, unlabeled = (
            torch.from_numpy(self._share(indices).copy()).to(train.labels.device, non_blocking=True)
            for indices in batch_indices(self._plan, step)
        )
        images = torch.cat([train.labeled_images[labeled], train.unlabeled_images[unlabeled]])
        views = _views(config, images, self._plan, step, self._rows)
        return Batch(views, train.labels[labeled], config.augment.large.num_views, unlabeled)

    def _share(self, indices: np.ndarray) -> np.ndarray:
        return worker_share(indices, self._rank, self._world_size)


class RotationBatches:
    """``batches(step)`` of the rotation phase: labeled and unlabeled rows alike, each turned by 0, 90, 180
    and 270 degrees; view k is turned k times. A pure function of (seed, step, rank).
    """

    def __init__(self, config: Config, train: TrainSet, plan: Plan, rank: int, world_size: int) -> None:
        self._config, self._train, self._plan = config, train, plan
        self._rank, self._world_size = rank, world_size

    def __call__(self, step: int) -> Batch:
        """The batch of global step ``step``; it has no labels but the turns."""
        train, num_labeled = self._train, len(self._train.labels)
        indices, _ = batch_indices(self._plan, step)
        own = worker_share(indices, self._rank, self._world_size)
        order = np.argsort(own >= num_labeled, kind="stable")  # labeled rows first, as they are stored apart
        places = worker_share(np.arange(len(indices)), self._rank, self._world_size)[order]
        labeled, unlabeled = (
            torch.from_numpy(rows).to(train.labels.device, non_blocking=True)
            for rows in np.split(own[order], [int((own < num_labeled).sum())])
        )
        images = torch.cat([train.labeled_images[labeled], train.unlabeled_images[unlabeled - num_labeled]])
        views = _views(self._config, images, self._plan, step, torch.from_numpy(places))
        num_large = self._config.augment.large.num_views
        turned = [torch.rot90(views[k % num_large], k, (2, 3)).contiguous() for k in range(4)]
        return Batch(turned, train.labels[:0], 4)


def _views(config: Config, images: Tensor, plan: Plan, step: int, rows: Tensor) -> list[Tensor]:
    """Views of the ``rows`` (B,) int64 of the global batch that ``images`` are."""
    generator = augment_generator(config.seed, plan.labeled_stream, step)
    num_rows = plan.labeled_size + plan.unlabeled_size
    return augment(images, config.augment, generator, config.data.mean, config.data.std, rows, num_rows)
