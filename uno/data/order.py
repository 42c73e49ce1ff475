"""Which rows a worker streams at a step: a pure function of (seed, step, rank), whatever came before.

Images that can be read one by one come in the order of a resident set. Parquet files are read by row group:
there every epoch permutes the row groups, lays them side by side in windows and permutes the rows of each
window; a worker takes a contiguous part of that order, so it reads each window about once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from uno.data.batches import UNLABELED, Plan, batch_indices, worker_share


class Order:
    """Rows of each step for worker ``rank`` of ``world_size``.

    Args:
        plan: sizes and seed.
        rank: of the worker.
        world_size: number of workers.
        labeled_groups: int64 (N_l,) row group of each labeled row; None where rows are read one by one.
        unlabeled_groups: int64 (N_u,) likewise.
        window_rows: rows of whole row groups that are mixed, at least.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        world_size: int,
        labeled_groups: np.ndarray | None = None,
        unlabeled_groups: np.ndarray | None = None,
        window_rows: int = 1,
    ) -> None:
        self.plan, self._rank, self._world_size = plan, rank, world_size
        self._groups, self._window_rows = (labeled_groups, unlabeled_groups), window_rows
        self._windows = lru_cache(maxsize=4)(self._window_order)
        size_l, size_u = plan.labeled_size, plan.unlabeled_size
        parts = (np.arange(size_l), size_l + np.arange(size_u))
        self.positions = np.concatenate([worker_share(part, rank, world_size) for part in parts])
        """int64 (B/W,): places of this worker's rows in every global batch, labeled ones first."""
        self.num_labeled, self.num_unlabeled = size_l // world_size, size_u // world_size

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(labeled int64 (B_l/W,), unlabeled int64 (B_u/W,)), each counted from 0 in its set."""
        labeled, unlabeled = self._groups
        if labeled is None or unlabeled is None:
            parts = batch_indices(self.plan, step)
            return tuple(worker_share(part, self._rank, self._world_size) for part in parts)  # type: ignore[return-value]
        epoch, i = divmod(step, self.plan.steps_per_epoch)
        own = slice(i * self.num_labeled, (i + 1) * self.num_labeled)
        other = slice(i * self.num_unlabeled, (i + 1) * self.num_unlabeled)
        return self._windows(True, epoch)[own], self._windows(False, epoch)[other]

    def _window_order(self, of_labeled: bool, epoch: int) -> np.ndarray:
        plan, steps = self.plan, self.plan.steps_per_epoch
        groups = self._groups[0 if of_labeled else 1]
        assert groups is not None
        stream = plan.labeled_stream if of_labeled else UNLABELED
        size = plan.labeled_size if of_labeled else plan.unlabeled_size
        order = window_indices(plan.seed, epoch, groups, steps * size, stream, self._window_rows)
        return worker_share(order, self._rank, self._world_size)


def window_indices(
    seed: int, epoch: int, groups: np.ndarray, rows_needed: int, stream: int, window_rows: int
) -> np.ndarray:
    """int64 (rows_needed,): permutations of the rows, one per cycle, that read row groups window by window.

    Args:
        seed: of the run.
        epoch: number of the epoch.
        groups: int64 (N,) row group of each row.
        rows_needed: how many; more than N cycle.
        stream: of the randomness.
        window_rows: rows of whole row groups that are mixed, at least.
    """
    cycles = range(-(-rows_needed // len(groups))) if rows_needed else ()
    parts = [np.empty(0, np.int64)]
    _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    for cycle in cycles:
        random = np.random.default_rng([seed, stream, epoch, cycle])
        sequence = random.permutation(len(counts))
        first = np.empty(len(counts), np.int64)  # rows before each group, in this sequence
        first[sequence] = np.cumsum(counts[sequence]) - counts[sequence]
        window = first[group] // window_rows
        parts.append(np.lexsort((random.random(len(groups)), window)))
    return np.concatenate(parts)[:rows_needed]
