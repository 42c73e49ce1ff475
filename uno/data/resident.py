"""Decoded sets in memory: what training may see (TrainSet) and what only evaluation reads (EvalSet)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from uno.config import DataConfig
from uno.data.decode import check_bad, decode_many
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.evaluate import slices


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
