"""Which rows of a task training and evaluation see, and what every kind of set offers: batches.

Kinds: decoded and in memory (:mod:`uno.data.resident`), read while it trains (:mod:`uno.data.stream`).
"""

from collections.abc import Iterator
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from uno.config import Config
from uno.data.plan import Plan
from uno.data.splits import Task
from uno.steps import Batch


def train_rows(task: Task, ok: np.ndarray | None = None) -> dict[str, Any]:
    """What training may know of a task: rows of its ``labeled`` and ``unlabeled`` images, int64 each, the
    known ``labels`` of the former, and the numbers of classes. ``ok`` bool (N,): which images have pixels.
    """
    usable = task.is_train if ok is None else task.is_train & ok
    labeled = np.flatnonzero(usable & (task.labels >= 0))
    return {
        "labeled": labeled,
        "labels": torch.from_numpy(task.labels[labeled]),
        "unlabeled": np.flatnonzero(usable & (task.labels < 0)),
        "num_known": len(task.known),
        "num_novel": task.num_novel,
    }


def truth_rows(task: Task, ok: np.ndarray | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """{"train", "test"} -> (rows with a true class, possibly none, that class among known + novel), int64."""
    has_truth = task.eval_labels >= 0 if ok is None else (task.eval_labels >= 0) & ok
    splits = {"train": task.is_train, "test": ~task.is_train}
    index = {split: np.flatnonzero(member & has_truth) for split, member in splits.items()}
    return {
        split: (torch.from_numpy(rows), torch.from_numpy(task.eval_labels[rows]))
        for split, rows in index.items()
    }


class Batches(Protocol):
    """``batches(step)`` -> this worker's batch: a pure function of (seed, step, rank)."""

    def __call__(self, step: int, /) -> Batch:
        """The batch of global step ``step``."""

    def close(self) -> None:
        """Stop whatever prepares batches ahead."""


class TrainData(Protocol):
    """What training may see of a task; no label of a novel class, not even hidden somewhere."""

    @property
    def num_known(self) -> int:
        """C_l."""

    @property
    def num_novel(self) -> int:
        """C_u, classes to discover."""

    @property
    def num_labeled(self) -> int:
        """N_l."""

    @property
    def num_unlabeled(self) -> int:
        """N_u."""

    def to(self, device: torch.device | str) -> Self:
        """The same set, with batches on ``device``."""

    def batches(self, config: Config, plan: Plan, rank: int, world_size: int, last: int) -> Batches:
        """The batches of a phase for worker ``rank``; none is asked for at step ``last`` or beyond."""

    def sync(self) -> None:
        """Tell all workers which images proved unreadable; called by all of them at the same time.

        Raises:
            ConfigError: there are too many.
        """


class EvalData(Protocol):
    """Rows with a true class, which only evaluation reads: ``truth`` int64 (N,), known classes first."""

    @property
    def truth(self) -> Tensor:
        """Int64 (N,) over known + novel classes."""

    def where(self, chosen: Tensor) -> Self:
        """The rows of the mask ``chosen`` (N,) bool."""

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """(images uint8 (b,3,S,S), truth (b,)) of this worker's rows, every row once."""
