"""Choose the rows of each training batch as a function of the seed and the step.

A global batch is B_l labeled rows followed by B_u unlabeled rows, and both numbers are
fixed for a phase. The order of an epoch consists of permutations that are drawn from
generators of their own, so that a resumed run needs no stored random state. A batch has
the same rows for any number of workers, unless rows are read in the groups in which
they are stored, see :class:`Order`.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from uno.errors import ConfigError
from uno.text import plural

# The seed of cached random views of features. It is not the seed of the run, so that
# runs of all seeds share the views.
VIEW_SEED = 0
# A stream is the second number of a generator's seed. Each use of randomness has a
# stream of its own, so that no two uses draw the same numbers. FEATURES follows AUGMENT
# as the third number, so that it may equal REPORT_SAMPLE.
LABELED, UNLABELED, PRETRAIN, AUGMENT, PRETEXT, FEATURES = range(6)
REPORT_SAMPLE = 5  # the rows that the report scores
REPORT_MAP = 6  # the rows that the maps of the report show
ESTIMATE = 8  # random choices in estimating the number of classes
# Generators of the following streams do not depend on the seed of the run, so that runs
# of all seeds have the same rows: the stream is the first number of their seed.
UNLABEL = 9  # the rows of known classes that lose their label
HELD_OUT = 10  # the training rows that become test rows
TUNE_FOLDS = 11  # the known classes that a trial of a sweep hides


class Batch(NamedTuple):
    """The views of one worker's B rows of a training batch, on the training device.

    The first B_l = ``len(labels)`` rows are labeled, the others are unlabeled. A
    pretext task uses no labels: its batches have B_l = 0, whatever their rows are.

    Attributes:
        views: V tensors, large views first: normalized pixels (B, 3, S_v, S_v), where
            the side S_v can differ between large and small views, or features (B, D).
        labels: Index of the known class of each labeled row, int64 (B_l,).
        num_large: The number of large views among V.
        rows: Number of each unlabeled row among the unlabeled rows of the training set,
            int64 (B_u,). None in batches of a pretext task and of streamed images.
    """

    views: list[Tensor]
    labels: Tensor
    num_large: int
    rows: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """The numbers that fix the rows of every global batch of a phase.

    If rows are read in the groups in which they are stored, the rows of a batch depend
    on the groups and on the number of workers, too, see :class:`Order`.

    Attributes:
        seed: Seed of the run.
        num_labeled: N_l, the number of labeled training rows. For a pretext task, the
            number of all training rows.
        num_unlabeled: N_u, the number of unlabeled training rows; 0 in pretraining and
            in a pretext task.
        labeled_size: B_l, the number of labeled rows in a global batch.
        unlabeled_size: B_u, the number of unlabeled rows in a global batch.
        steps_per_epoch: The number of batches in an epoch.
        stream: The random stream that orders the labeled rows and draws the
            views. It distinguishes the phases.
    """

    seed: int
    num_labeled: int
    num_unlabeled: int
    labeled_size: int
    unlabeled_size: int
    steps_per_epoch: int
    stream: int = LABELED


def make_plan(
    seed: int,
    batch_sampling: str,
    batch_size: int,
    num_labeled: int,
    num_unlabeled: int,
    num_workers: int = 1,
) -> Plan:
    """Return the numbers that fix the rows of every batch of the discovery phase.

    Args:
        seed: Seed of the run.
        batch_sampling: "proportional" makes B_l : B_u as close to N_l : N_u as
            possible, with at least one row of each, and an epoch has every row at most
            once. "balanced" makes B_l = B_u. An epoch then has the rows of the larger
            set at most once, and rows of the smaller set are repeated as far as needed.
        batch_size: Size of the global batch, B_l + B_u.
        num_labeled: N_l, the number of labeled training rows.
        num_unlabeled: N_u, the number of unlabeled training rows.
        num_workers: The number of workers, where 0 counts as 1. It must divide both B_l
            and B_u.

    Returns:
        The plan, with the sizes B_l and B_u, the number of batches in an epoch, and
        :data:`LABELED` as the random stream that orders the labeled rows and draws
        their views. Rows that do not fill a batch are left out of an epoch.

    Raises:
        ConfigError: There are no labeled or no unlabeled rows. Or the batch size does
            not work, because it is odd and batches are balanced, the rows do not fill
            one batch, or the number of workers does not divide both B_l and B_u. For
            such a batch size the message names the nearest smaller size that works. If
            there is none, it advises to use fewer workers or a larger size.
    """
    if num_labeled < 1 or num_unlabeled < 1:
        found = f"found {num_labeled} labeled, {num_unlabeled} unlabeled"
        raise ConfigError(f"discovery needs labeled and unlabeled images; {found}")
    sizes_of = partial(
        _divide_batch, batch_sampling, num_labeled, num_unlabeled, max(1, num_workers)
    )
    sizes = sizes_of(batch_size)
    if not isinstance(sizes, str):
        return Plan(seed, num_labeled, num_unlabeled, *sizes)
    smaller = largest_batch(
        batch_sampling, batch_size - 1, num_labeled, num_unlabeled, num_workers
    )
    fix = (
        "use fewer workers or a larger batch_size"
        if isinstance(sizes_of(smaller), str)
        else f"a batch_size that works: {smaller}"
    )
    raise ConfigError(f"batch_size {batch_size}: {sizes}; {fix}")


def largest_batch(
    batch_sampling: str,
    most: int,
    num_labeled: int,
    num_unlabeled: int,
    num_workers: int,
) -> int:
    """Return the largest batch size, up to a limit, that :func:`make_plan` accepts.

    Args:
        batch_sampling: "proportional" or "balanced".
        most: The largest batch size to consider.
        num_labeled: N_l, the number of labeled training rows, at least 1.
        num_unlabeled: N_u, the number of unlabeled training rows, at least 1.
        num_workers: The number of workers, where 0 counts as 1.

    Returns:
        The size of the global batch, B_l + B_u; ``most`` if no size is accepted.
    """
    sizes_of = partial(
        _divide_batch, batch_sampling, num_labeled, num_unlabeled, max(1, num_workers)
    )
    from_largest = range(min(most, 2 * (num_labeled + num_unlabeled)), 1, -1)
    return next(
        (size for size in from_largest if not isinstance(sizes_of(size), str)), most
    )


def _divide_batch(
    batch_sampling: str,
    num_labeled: int,
    num_unlabeled: int,
    workers: int,
    batch_size: int,
) -> tuple[int, int, int] | str:
    """Divide a batch size into B_l labeled and B_u unlabeled rows.

    Args:
        batch_sampling: "proportional" (B_l : B_u as close to N_l : N_u as possible,
            with at least one row of each) or "balanced" (B_l = B_u).
        num_labeled: N_l, the number of labeled training rows.
        num_unlabeled: N_u, the number of unlabeled training rows.
        workers: The number of workers, at least 1.
        batch_size: Size of the global batch, at least 1. A size of 1 never works.

    Returns:
        B_l, B_u and the number of steps of an epoch. If the batch size does not work,
        the reason as text: it is odd and balanced, an epoch has no whole batch, or the
        number of workers does not divide both B_l and B_u.
    """
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
    """Return the numbers that fix the batches of pretraining or of a pretext task.

    These phases have one kind of rows, all of which count as labeled ones in the
    result: its ``num_unlabeled`` and ``unlabeled_size`` are 0. If there are fewer rows
    than the batch size, the batch size becomes the largest multiple of the number of
    workers that the rows fill. Rows that do not fill a batch are left out of an epoch.

    Args:
        seed: Seed of the run.
        batch_size: Size of the global batch.
        num_labeled: The number of rows to train on: the labeled rows for pretraining,
            all training rows for a pretext task.
        num_workers: The number of workers, where 0 counts as 1. It must divide the
            batch size.
        stream: The random stream of the phase, :data:`PRETRAIN` or :data:`PRETEXT`.

    Raises:
        ConfigError: The number of workers does not divide the batch size, or there are
            fewer rows than workers.
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
        what = "training images" if stream == PRETEXT else "labeled images"
        raise ConfigError(f"too few {what} ({num_labeled}) for {workers} workers")
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
    """Return the order of the rows of one kind in an epoch.

    The order consists of permutations of all rows, as many as are needed. The last one
    is cut off where the epoch ends. Each is drawn from a new generator, whose seed is
    ``seed``, ``stream``, ``epoch`` and the number of the permutation.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        num_rows: N, the number of rows of this kind.
        rows_needed: The number of rows in the epoch. If it is larger than N, rows are
            repeated.
        stream: The number of the random stream of this kind of rows.
        groups: For each row the group in which it is stored, integers (N,) from 0.
            :func:`by_windows` then draws the permutations. None for plain permutations.
        window_rows: If there are groups, about how many rows are shuffled together. It
            has no effect without groups.

    Returns:
        Numbers from 0 to N - 1 among the rows of this kind, int64 (rows_needed,).
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
    """Return a random order of rows in which rows of a group are close to each other.

    It serves to read rows that are stored in groups, one window after the other: the
    groups are put into a random order and divided into windows. A group with n rows
    before it in this order belongs to window n // ``window_rows``, so that groups are
    never divided, and a window can have more or fewer rows than ``window_rows``. The
    rows of a window are shuffled.

    Args:
        groups: The group of each row, integers (N,) from 0.
        window_rows: About the number of rows of a window. A window with a larger group
            has more.
        random: Generator of the permutation. It is advanced.

    Returns:
        Each row number from 0 to N - 1 once, int64 (N,), the rows of the first window
        first.
    """
    counts = np.bincount(groups)
    present = np.flatnonzero(counts)
    sequence = present[random.permutation(len(present))]
    # the window of each group follows from the number of rows before the group
    window = np.empty(len(counts), np.int64)
    window[sequence] = (np.cumsum(counts[sequence]) - counts[sequence]) // window_rows
    return np.lexsort((random.random(len(groups)), window[groups]))


def augment_generator(seed: int, stream: int, step: int) -> torch.Generator:
    """Return the random generator that draws the views of one global batch.

    Args:
        seed: Seed of the run.
        stream: The number that keeps the random numbers of a phase apart from
            those of other phases, such as ``Plan.stream``.
        step: Number of the batch in the phase, from 0.

    Returns:
        A new generator on the CPU, which depends on the three numbers only.
    """
    seeds = np.random.SeedSequence([seed, AUGMENT, stream, step])
    return torch.Generator().manual_seed(int(seeds.generate_state(1, np.uint64)[0]))


class Order:
    """The order in which one worker reads the rows of a phase.

    The worker has a contiguous share of the labeled and of the unlabeled rows of every
    global batch, whose rows then do not depend on the number of workers. If rows are
    stored in groups, it has a contiguous share of every epoch instead, so that only
    this worker reads most of the groups in its share. Which rows share a batch then
    depends on the number of workers.

    Args:
        plan: The seed and the sizes of the phase.
        rank: Number of the worker, from 0.
        world_size: W, the number of workers, which divides B_l and B_u.
        groups: The group in which each labeled and each unlabeled row is stored,
            integers (N_l,) and (N_u,) from 0; None if rows are read one by one.
        window_rows: If there are groups, about how many rows are shuffled together, see
            :func:`by_windows`.

    Attributes:
        positions: Positions of this worker's rows in every global batch, labeled ones
            first: int64 (B / W,).
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

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that this worker reads in one step.

        The rows of the four epochs that were used last are cached.

        Args:
            step: Number of the step in the phase, from 0.

        Returns:
            Positions among the labeled training rows, int64 (B_l / W,), and positions
            among the unlabeled training rows, int64 (B_u / W,), for W workers. In the
            plan of a pretext task all training rows count as labeled.
        """
        epoch, i = divmod(step, self._plan.steps_per_epoch)
        labeled, unlabeled = self._epoch(epoch)
        return labeled[i], unlabeled[i]

    def _rows_of_epoch(self, epoch: int) -> list[np.ndarray]:
        """Return the rows that this worker reads in each step of an epoch.

        Args:
            epoch: Number of the epoch in the phase, from 0.

        Returns:
            Positions among the labeled training rows, int64 (steps, B_l / W), and
            positions among the unlabeled training rows, int64 (steps, B_u / W), for W
            workers.
        """
        plan, steps, workers = self._plan, self._plan.steps_per_epoch, self._world_size
        labeled, unlabeled = self._groups or (None, None)
        kinds = (
            (plan.num_labeled, steps * plan.labeled_size, plan.stream, labeled),
            (plan.num_unlabeled, steps * plan.unlabeled_size, UNLABELED, unlabeled),
        )
        orders = (
            epoch_indices(plan.seed, epoch, *kind, self._window_rows) for kind in kinds
        )
        shape, axis = ((steps, workers, -1), 1)
        if self._groups is not None:
            shape, axis = ((workers, steps, -1), 0)
        # copies, because a view would keep the rows of all workers in memory
        return [order.reshape(shape).take(self._rank, axis) for order in orders]
