"""Which rows make batch number ``step``: a pure function of (seed, step), the same for any number of workers.

A batch is B_l labeled rows followed by B_u unlabeled rows, both fixed for the run. An epoch's order is
concatenated permutations, each drawn from its own generator, so a resumed run needs no random state.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from uno.errors import ConfigError

LABELED, UNLABELED, PRETRAIN, AUGMENT, ROTATION = 0, 1, 2, 3, 4
"""Streams of randomness: the second number of a generator's seed."""


@dataclass(frozen=True)
class Plan:
    """Everything that fixes the rows of every batch: set sizes, batch sizes, steps of an epoch."""

    seed: int
    num_labeled: int
    num_unlabeled: int
    labeled_size: int
    """B_l of the global batch."""
    unlabeled_size: int
    """B_u of the global batch; 0 in pretraining."""
    steps_per_epoch: int
    labeled_stream: int = LABELED


def make_plan(
    seed: int, composition: str, batch_size: int, num_labeled: int, num_unlabeled: int, num_workers: int = 1
) -> Plan:
    """The plan of the discovery phase. ``batch_size`` is global, in images. Raises as :func:`batch_sizes`."""
    sizes = batch_sizes(composition, batch_size, num_labeled, num_unlabeled, num_workers)
    steps = steps_per_epoch(composition, *sizes, num_labeled, num_unlabeled)
    return Plan(seed, num_labeled, num_unlabeled, *sizes, steps)


def make_pretrain_plan(
    seed: int, batch_size: int, num_labeled: int, num_workers: int = 1, stream: int = PRETRAIN
) -> Plan:
    """The plan of pretraining: one kind of rows only. A set smaller than a batch is one batch.

    Raises:
        ConfigError: batch_size not divisible by the workers, or fewer labeled rows than workers.
    """
    workers = max(1, num_workers)
    if batch_size % workers:
        below, above = batch_size // workers * workers, (batch_size // workers + 1) * workers
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(f"batch_size {batch_size} does not divide by {workers} workers; nearest: {nearest}")
    size = min(batch_size, num_labeled // workers * workers)
    if size == 0:
        raise ConfigError(f"{num_labeled} labeled rows are too few for {workers} workers")
    return Plan(seed, num_labeled, 0, size, 0, num_labeled // size, stream)


def batch_sizes(
    composition: str, batch_size: int, num_labeled: int, num_unlabeled: int, num_workers: int = 1
) -> tuple[int, int]:
    """(B_l, B_u) of the global batch, fixed for the run.

    ``proportional``: B_l : B_u nearest to N_l : N_u, at least one each. ``paired``: half and half. The
    workers do not change the sizes; they must divide both.

    Raises:
        ConfigError: an empty set, an odd paired batch, a batch larger than an epoch, or sizes that do not
            divide by the workers (with the nearest batch sizes that work).
    """
    if num_labeled < 1 or num_unlabeled < 1:
        raise ConfigError(
            f"discovery needs both kinds: {num_labeled} labeled, {num_unlabeled} unlabeled rows"
        )
    reason = _objection(composition, batch_size, num_labeled, num_unlabeled, max(1, num_workers))
    if reason is None:
        return _shares(composition, batch_size, num_labeled, num_unlabeled)
    valid = _nearest_valid(composition, batch_size, num_labeled, num_unlabeled, max(1, num_workers))
    fix = f"nearest batch_size that works: {' or '.join(map(str, valid))}" if valid else "use fewer workers"
    raise ConfigError(f"batch_size {batch_size}: {reason}; {fix}")


def steps_per_epoch(
    composition: str, labeled_size: int, unlabeled_size: int, num_labeled: int, num_unlabeled: int
) -> int:
    """Full batches of an epoch; the rows that do not fill a batch are left out of that epoch.

    ``proportional``: every row at most once. ``paired``: the longer set once, the shorter cycles.
    """
    steps = (num_labeled // labeled_size, num_unlabeled // unlabeled_size)
    return max(steps) if composition == "paired" else min(steps)


def epoch_indices(seed: int, epoch: int, num_rows: int, rows_needed: int, stream: int) -> np.ndarray:
    """int64 (rows_needed,): fresh permutations of ``num_rows``, one per cycle, concatenated and cut."""
    cycles = range(-(-rows_needed // num_rows)) if rows_needed else ()
    permutations = [np.random.default_rng([seed, stream, epoch, c]).permutation(num_rows) for c in cycles]
    return np.concatenate([np.empty(0, np.int64), *permutations])[:rows_needed]


def window_indices(
    seed: int, epoch: int, groups: np.ndarray, rows_needed: int, stream: int, window_rows: int
) -> np.ndarray:
    """As :func:`epoch_indices`, of rows in row groups ``groups`` int64 (N,) that are read by windows: each of
    whole row groups, ``window_rows`` at least, whose rows are mixed.
    """
    cycles = range(-(-rows_needed // len(groups))) if rows_needed else ()
    permutations = [np.empty(0, np.int64)]
    _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    for cycle in cycles:
        random = np.random.default_rng([seed, stream, epoch, cycle])
        sequence = random.permutation(len(counts))
        first = np.empty(len(counts), np.int64)  # rows before each group, in this sequence
        first[sequence] = np.cumsum(counts[sequence]) - counts[sequence]
        permutations.append(np.lexsort((random.random(len(groups)), first[group] // window_rows)))
    return np.concatenate(permutations)[:rows_needed]


def batch_indices(plan: Plan, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of global batch ``step`` (over all epochs): labeled int64 (B_l,), unlabeled int64 (B_u,).

    They index the labeled and the unlabeled set of a TrainSet, each from 0.
    """
    epoch, i = divmod(step, plan.steps_per_epoch)
    labeled, unlabeled = _epoch(plan, epoch)
    size_l, size_u = plan.labeled_size, plan.unlabeled_size
    return labeled[i * size_l : (i + 1) * size_l], unlabeled[i * size_u : (i + 1) * size_u]


def worker_share(indices: np.ndarray, rank: int, num_workers: int) -> np.ndarray:
    """The contiguous share (B/W,) of worker ``rank``; ``num_workers`` divides the length."""
    share = len(indices) // num_workers
    assert share * num_workers == len(indices), (len(indices), num_workers)
    return indices[rank * share : (rank + 1) * share]


def augment_generator(seed: int, labeled_stream: int, step: int) -> torch.Generator:
    """What the views of global batch ``step`` of a phase are drawn with."""
    seeds = np.random.SeedSequence([seed, AUGMENT, labeled_stream, step])
    return torch.Generator().manual_seed(int(seeds.generate_state(1, np.uint64)[0]))


@lru_cache(maxsize=4)
def _epoch(plan: Plan, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    steps = plan.steps_per_epoch
    needed_l, needed_u = steps * plan.labeled_size, steps * plan.unlabeled_size
    labeled = epoch_indices(plan.seed, epoch, plan.num_labeled, needed_l, plan.labeled_stream)
    unlabeled = epoch_indices(plan.seed, epoch, plan.num_unlabeled, needed_u, UNLABELED)
    labeled.flags.writeable = unlabeled.flags.writeable = False  # shared by the cache
    return labeled, unlabeled


def _shares(composition: str, batch_size: int, num_labeled: int, num_unlabeled: int) -> tuple[int, int]:
    if composition == "paired":
        return batch_size // 2, batch_size - batch_size // 2
    labeled = round(batch_size * num_labeled / (num_labeled + num_unlabeled))
    labeled = min(max(labeled, 1), batch_size - 1)
    return labeled, batch_size - labeled


def _objection(
    composition: str, batch_size: int, num_labeled: int, num_unlabeled: int, workers: int
) -> str | None:
    """Why this batch size does not work, or None."""
    if composition == "paired" and batch_size % 2:
        return "paired batches need an even size"
    sizes = _shares(composition, batch_size, num_labeled, num_unlabeled)
    if min(sizes) < 1 or steps_per_epoch(composition, *sizes, num_labeled, num_unlabeled) < 1:
        return (
            f"an epoch of {num_labeled} labeled and {num_unlabeled} unlabeled rows does not fill one batch "
            f"of {sizes[0]} + {sizes[1]}"
        )
    if any(size % workers for size in sizes):
        return f"{sizes[0]} labeled + {sizes[1]} unlabeled rows do not divide by {workers} workers"
    return None


def _nearest_valid(
    composition: str, batch_size: int, num_labeled: int, num_unlabeled: int, workers: int
) -> list[int]:
    """The nearest valid batch size below and above, as far as they exist."""
    most = min(2 * (num_labeled + num_unlabeled), batch_size + 100_000)
    found = []
    for sizes in (range(min(batch_size - 1, most), 1, -1), range(batch_size + 1, most + 1)):
        valid = (b for b in sizes if _objection(composition, b, num_labeled, num_unlabeled, workers) is None)
        nearest: int | None = next(valid, None)
        if nearest is not None:
            found.append(nearest)
    return found


class Order:
    """Rows of each step for worker ``rank`` of ``world_size``.

    Images in row groups, ``labeled_groups`` int64 (N_l,) and ``unlabeled_groups`` (N_u,), are read in windows
    of ``window_rows`` at least; others one by one.
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
        self._plan, self._rank, self._world_size = plan, rank, world_size
        self._groups, self._window_rows = (labeled_groups, unlabeled_groups), window_rows
        self._windows = lru_cache(maxsize=4)(self._window_order)
        size_l, size_u = plan.labeled_size, plan.unlabeled_size
        self.positions = np.concatenate(
            [self._share(np.arange(size_l)), size_l + self._share(np.arange(size_u))]
        )
        """int64 (B/W,): places of this worker's rows in every global batch, labeled ones first."""

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(labeled int64 (B_l/W,), unlabeled int64 (B_u/W,)), each counted from 0 in its set."""
        if self._groups[0] is None:
            labeled, unlabeled = batch_indices(self._plan, step)
            return self._share(labeled), self._share(unlabeled)
        epoch, i = divmod(step, self._plan.steps_per_epoch)
        (labeled, size_l), (unlabeled, size_u) = self._windows(0, epoch), self._windows(1, epoch)
        return labeled[i * size_l : (i + 1) * size_l], unlabeled[i * size_u : (i + 1) * size_u]

    def _share(self, indices: np.ndarray) -> np.ndarray:
        return worker_share(indices, self._rank, self._world_size)

    def _window_order(self, kind: int, epoch: int) -> tuple[np.ndarray, int]:
        """This worker's labeled (``kind`` 0) or unlabeled (1) rows of an epoch, and how many make a step."""
        plan, groups = self._plan, self._groups[kind]
        assert groups is not None
        stream, size = ((plan.labeled_stream, plan.labeled_size), (UNLABELED, plan.unlabeled_size))[kind]
        needed = plan.steps_per_epoch * size
        order = window_indices(plan.seed, epoch, groups, needed, stream, self._window_rows)
        return self._share(order), size // self._world_size
