"""Which rows make batch number ``step``: a pure function of (seed, step), the same for
any number of workers.

A batch is B_l labeled rows followed by B_u unlabeled rows, both fixed for the run. An
epoch's order is concatenated permutations, each drawn from its own generator, so a
resumed run needs no random state.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from uno.errors import ConfigError
from uno.text import plural

# Streams of randomness: the second number of a generator's seed, one for each use of
# it.
# of the random views of features: not the run's, so that runs of all seeds share them
VIEW_SEED = 0
# FEATURES only after AUGMENT, for views
LABELED, UNLABELED, PRETRAIN, AUGMENT, PRETEXT, FEATURES = range(6)
VIEW_SEED = (
    0  # of views of features: not the run's, so that runs of all seeds share them
)
REPORT_SAMPLE = 5  # rows that the report scores
REPORT_MAP = 6  # rows that its maps show
ESTIMATE = 8  # class splits, anchors and starts of the number of classes
# The first number of these two is the stream, so that all seeds of a run have the same
# rows.
UNLABEL = 9  # rows of known classes that lose their label
HELD_OUT = 10  # test rows
TUNE_FOLDS = 11  # known classes that a trial of a sweep hides

SORTED_AT_ONCE = 2**18  # rows, of whole windows


class Batch(NamedTuple):
    """V views of B rows on the training device; the first ``len(labels)`` rows are
    labeled.
    """

    views: list[Tensor]  # V tensors (B, 3, S_v, S_v), large views first
    labels: Tensor  # (B_l,) known-class indices
    num_large: int
    rows: Tensor | None = None  # (B_u,) which unlabeled rows of the set these are


@dataclass(frozen=True)
class Plan:
    """Everything that fixes the rows of every batch: set sizes, B_l and B_u of the
    global batch, steps.
    """

    seed: int
    num_labeled: int
    num_unlabeled: int
    labeled_size: int
    unlabeled_size: int
    steps_per_epoch: int
    labeled_stream: int = LABELED


def make_plan(
    seed: int,
    batch_sampling: str,
    batch_size: int,
    num_labeled: int,
    num_unlabeled: int,
    num_workers: int = 1,
) -> Plan:
    """The plan of the discovery phase; the workers must divide B_l and B_u of the
    global ``batch_size``.

    ``proportional``: B_l : B_u nearest to N_l : N_u, at least one each; an epoch has
    every row at most once. ``paired``: half and half; the longer set once, the shorter
    cycles. Rows that do not fill a batch are left out of that epoch. A size that does
    not work is a ConfigError with the nearest ones that do.
    """
    if num_labeled < 1 or num_unlabeled < 1:
        found = f"found {num_labeled} labeled, {num_unlabeled} unlabeled"
        raise ConfigError(f"discovery needs labeled and unlabeled images; {found}")
    sizes_of = partial(
        _sizes, batch_sampling, num_labeled, num_unlabeled, max(1, num_workers)
    )
    sizes = sizes_of(batch_size)
    if not isinstance(sizes, str):
        return Plan(seed, num_labeled, num_unlabeled, *sizes)
    most = min(2 * (num_labeled + num_unlabeled), batch_size + 100_000)
    sides = range(min(batch_size - 1, most), 1, -1), range(batch_size + 1, most + 1)
    nearest = [
        next((str(b) for b in side if not isinstance(sizes_of(b), str)), "")
        for side in sides
    ]
    valid = " or ".join(filter(None, nearest))
    fix = f"nearest batch_size that works: {valid}" if valid else "use fewer workers"
    raise ConfigError(f"batch_size {batch_size}: {sizes}; {fix}")


def largest_batch(
    batch_sampling: str,
    most: int,
    num_labeled: int,
    num_unlabeled: int,
    num_workers: int,
) -> int:
    """The largest batch size, at most ``most``, that :func:`make_plan` takes;
    ``most`` if none.
    """
    sizes_of = partial(
        _sizes, batch_sampling, num_labeled, num_unlabeled, max(1, num_workers)
    )
    from_largest = range(min(most, 2 * (num_labeled + num_unlabeled)), 1, -1)
    return next(
        (size for size in from_largest if not isinstance(sizes_of(size), str)), most
    )


def _sizes(
    batch_sampling: str,
    num_labeled: int,
    num_unlabeled: int,
    workers: int,
    batch_size: int,
) -> tuple[int, int, int] | str:
    """B_l, B_u and the steps of an epoch, or why this batch size does not work."""
    if batch_sampling == "balanced" and batch_size % 2:
        return "balanced batches need an even size"
    parts = (1, 1) if batch_sampling == "balanced" else (num_labeled, num_unlabeled)
    labeled = min(max(round(batch_size * parts[0] / sum(parts)), 1), batch_size - 1)
    unlabeled = batch_size - labeled
    longest = max if batch_sampling == "balanced" else min
    steps = (
        longest(num_labeled // labeled, num_unlabeled // unlabeled) if labeled else 0
    )
    if steps < 1:
        rows = f"{num_labeled} labeled and {num_unlabeled} unlabeled images"
        return f"an epoch of {rows} does not fill one batch of {labeled} + {unlabeled}"
    if labeled % workers or unlabeled % workers:
        return (
            f"{labeled} labeled + {plural(unlabeled, 'unlabeled image')} do not divide"
            f" by {workers} workers"
        )
    return labeled, unlabeled, steps


def make_pretrain_plan(
    seed: int,
    batch_size: int,
    num_labeled: int,
    num_workers: int = 1,
    stream: int = PRETRAIN,
) -> Plan:
    """The plan of pretraining: one kind of rows only. A set smaller than a batch is
    one batch.
    """
    workers = max(1, num_workers)
    if batch_size % workers:
        below = batch_size // workers * workers
        nearest = f"{below} or {below + workers}" if below else f"{workers}"
        raise ConfigError(
            f"batch_size {batch_size} does not divide by {workers} workers; nearest:"
            f" {nearest}"
        )
    size = min(batch_size, num_labeled // workers * workers)
    if size == 0:
        raise ConfigError(
            f"too few labeled images ({num_labeled}) for {workers} workers"
        )
    return Plan(seed, num_labeled, 0, size, 0, num_labeled // size, stream)


def epoch_indices(
    seed: int,
    epoch: int,
    num_rows: int,
    rows_needed: int,
    stream: int,
    groups: np.ndarray | None = None,
    window_rows: int = 1,
) -> np.ndarray:
    """int64 (rows_needed,): fresh permutations of ``num_rows``, of row ``groups`` by
    :func:`by_windows`.
    """
    order = np.empty(rows_needed, np.int64)
    for cycle, start in enumerate(range(0, rows_needed, max(1, num_rows))):
        random = np.random.default_rng([seed, stream, epoch, cycle])
        whole = (
            random.permutation(num_rows)
            if groups is None
            else by_windows(groups, window_rows, random)
        )
        order[start : start + num_rows] = whole[: rows_needed - start]
    return order


def by_windows(
    groups: np.ndarray, window_rows: int, random: np.random.Generator
) -> np.ndarray:
    """A permutation of the rows in ``groups`` int64 (N,) that is read by windows: each
    of whole row groups, ``window_rows`` at least, whose rows are mixed.
    """
    counts = np.bincount(groups)
    present = np.flatnonzero(counts)
    sequence = present[random.permutation(len(present))]
    # of each group: by the rows before it, in this sequence
    window = np.empty(len(counts), np.int32)
    window[sequence] = (np.cumsum(counts[sequence]) - counts[sequence]) // window_rows
    if len(sequence) and window[sequence[-1]] < 2**16:
        window = window.astype(np.uint16)  # which NumPy sorts by digits
    own = window[groups]
    order, sizes = np.argsort(own, kind="stable"), np.bincount(own)
    return _sort_inside_(order, sizes[sizes > 0], random.random(len(groups)))


def _sort_inside_(
    order: np.ndarray, sizes: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """``order`` int64 (N,), where rows of a window are together, ``sizes`` says how
    many: each window sorted in place by the ``draws`` (N,) of its rows, 0-1. As
    ``np.lexsort`` of both, in a third of its time.
    """
    ends, first = np.cumsum(sizes), 0
    while first < len(sizes):
        begin = ends[first] - sizes[first]
        last = max(
            first + 1, int(np.searchsorted(ends, begin + SORTED_AT_ONCE, side="right"))
        )
        num, rows = sizes[first:last, None], order[begin : ends[last - 1]]
        inside = np.arange(num.max()) < num  # (windows, rows of the largest)
        keys = np.full(inside.shape, 2.0)
        keys[inside] = draws[rows]
        starts = ends[first:last, None] - num - begin
        rows[:] = rows[(np.argsort(keys, axis=1, kind="stable") + starts)[inside]]
        first = last
    return order


def augment_generator(seed: int, labeled_stream: int, step: int) -> torch.Generator:
    """What the views of global batch ``step`` of a phase are drawn with."""
    seeds = np.random.SeedSequence([seed, AUGMENT, labeled_stream, step])
    return torch.Generator().manual_seed(int(seeds.generate_state(1, np.uint64)[0]))


class Order:
    """Rows of each step for worker ``rank`` of ``world_size``: its contiguous share of
    every global batch, or of every epoch where images in row ``groups``, int64 (N_l,)
    and (N_u,), are read in windows.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int = 0,
        world_size: int = 1,
        groups: tuple[np.ndarray, np.ndarray] | None = None,
        window_rows: int = 1,
    ) -> None:
        self._plan, self._rank, self._world_size = plan, rank, world_size
        self._groups, self._window_rows = groups, window_rows
        self._epoch = lru_cache(maxsize=4)(self._rows_of_epoch)
        labeled, unlabeled = (
            np.arange(size).reshape(world_size, -1)[rank]
            for size in (plan.labeled_size, plan.unlabeled_size)
        )
        self.positions = np.concatenate([labeled, plan.labeled_size + unlabeled])
        """int64 (B/W,): places of this worker's rows in every global batch, labeled
        ones first.
        """

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(labeled int64 (B_l/W,), unlabeled int64 (B_u/W,)), each counted from 0 in
        its set.
        """
        epoch, i = divmod(step, self._plan.steps_per_epoch)
        labeled, unlabeled = self._epoch(epoch)
        return labeled[i], unlabeled[i]

    def _rows_of_epoch(self, epoch: int) -> list[np.ndarray]:
        """This worker's labeled (steps, B_l/W) and unlabeled (steps, B_u/W) rows."""
        plan, steps, workers = self._plan, self._plan.steps_per_epoch, self._world_size
        labeled, unlabeled = self._groups or (None, None)
        kinds = (
            (plan.num_labeled, steps * plan.labeled_size, plan.labeled_stream, labeled),
            (plan.num_unlabeled, steps * plan.unlabeled_size, UNLABELED, unlabeled),
        )
        orders = (
            epoch_indices(plan.seed, epoch, *kind, self._window_rows) for kind in kinds
        )
        # copies: an epoch that is kept keeps no other worker's rows
        if self._groups is None:
            return [
                order.reshape(steps, workers, -1)[:, self._rank].copy()
                for order in orders
            ]
        return [
            order.reshape(workers, steps, -1)[self._rank].copy() for order in orders
        ]
