"""What every kind of set offers: training and evaluation ask for batches and need not know where images are.

Kinds: decoded and in memory (:mod:`uno.data.resident`), read while it trains (:mod:`uno.data.stream`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

import torch
from torch import Tensor

from uno.config import Config
from uno.data.plan import Plan
from uno.steps import Batch


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
