"""Hold the rows for training and evaluation in memory, as pixels or as features.

A :class:`TrainSet` holds all that training may see. Only evaluation reads an
:class:`EvalSet`. :mod:`uno.data.stream` has sets with the same methods, for images that
are read when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from uno.augment import augment
from uno.config import Config
from uno.data.images import Images, ImageSubset, evenly_spaced, with_every_class
from uno.data.sampling import PRETEXT, Batch, Order, Plan, augment_generator
from uno.data.splits import Task, train_rows, truth_rows

SPREAD_ROWS = 2**16  # rows from which the spread of each feature is computed
# Limits of the batches of a sample, so that workers get about equally many rows.
MIN_BATCH_ROWS, MAX_BATCHES = 32, 64

COPY_BYTES = 64 * 2**20  # bytes that are copied to a device at once

Read = Callable[[Sequence[np.ndarray]], Iterator[tuple[Tensor, np.ndarray]]]
"""Reads batches of a sample: takes the positions of the rows of each, int64 (b,).

For each batch it yields the images or features of these rows, and bool (b,), which of
them could be read. The values of the others have no meaning.
"""


class RowBlocks:
    """Select rows of blocks in host memory, which are copied only when they are read.

    It is indexed like a tensor of N rows along its first dimension.

    Args:
        blocks: Tensors (n, ...) that hold the rows one after the other: pixels of
            images uint8 (n, 3, S, S), or features. There is at least one.
        place: For each of the N rows its number, counted over all blocks, int64 (N,).
            None for each row of the blocks once, in order.
    """

    def __init__(self, blocks: Sequence[Tensor], place: Tensor | None = None) -> None:
        self._blocks = list(blocks)
        self._ends = torch.tensor([len(block) for block in blocks]).cumsum(0)
        self._place = torch.arange(int(self._ends[-1])) if place is None else place

    def __len__(self) -> int:
        return len(self._place)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that a tensor of all N rows would have, (N, ...)."""
        return len(self), *self._blocks[0].shape[1:]

    @property
    def ndim(self) -> int:
        """The number of dimensions of :attr:`shape`."""
        return self._blocks[0].ndim

    def select_rows(self, rows: Tensor | slice) -> RowBlocks:
        """Return a :class:`RowBlocks` of some of the rows, which shares their values.

        Args:
            rows: Row numbers int64 (n,), a mask bool (N,), or a slice. A tensor may be
                on any device.
        """
        return RowBlocks(self._blocks, self._place[_on_host(rows)])

    def __getitem__(self, rows: Any) -> Tensor:
        """Copy some rows into a tensor.

        Args:
            rows: Row numbers int64 (n,), a mask bool (N,), or a slice; or, if there is
                a single block, a tuple of such rows and indices of further dimensions.
                In a tuple an index tensor (n,) is paired with the rows, as PyTorch
                does it. Tensors may be on any device.

        Returns:
            A tensor (n, ...) in host memory.
        """
        rows, *rest = map(_on_host, rows if isinstance(rows, tuple) else (rows,))
        place = self._place[rows].contiguous()
        if len(self._blocks) == 1:
            return self._blocks[0][(place, *rest)]
        assert not rest
        values = torch.empty((len(place), *self.shape[1:]), dtype=self._blocks[0].dtype)
        block_of = torch.searchsorted(self._ends, place, right=True)
        for number in block_of.unique().tolist():
            block, own = self._blocks[number], block_of == number
            values[own] = block[place[own] - (self._ends[number] - len(block))]
        return values

    def split(self, size: int) -> Iterator[Tensor]:
        """Return an iterator of all rows in order, as tensors of ``size`` rows.

        The last one may have fewer rows. Each is a copy (n, ...) in host memory.
        """
        return (self[i : i + size] for i in range(0, len(self), size))

    def to(self, device: torch.device | str) -> Tensor | RowBlocks:
        """Copy all rows to another device, some at a time.

        Args:
            device: The device.

        Returns:
            A tensor (N, ...) on ``device``. For the CPU it is this object itself, and
            nothing is copied.
        """
        if torch.device(device).type == "cpu":
            return self
        values = torch.empty(self.shape, dtype=self._blocks[0].dtype, device=device)
        size = max(1, COPY_BYTES // max(1, self[:1].nbytes))
        for start in range(0, len(self), size):
            values[start : start + size].copy_(self[start : start + size])
        return values


def _on_host(rows: Any) -> Any:
    """Move an index of rows to the CPU if it is a tensor, else return it unchanged."""
    return rows.cpu() if isinstance(rows, Tensor) else rows


@dataclass(frozen=True, eq=False)
class DecodedImages(ImageSubset):
    """N images together with their decoded pixels or features.

    Attributes:
        values: Pixels uint8 (N, 3, S, S), or features (N, D).
        reasons: For each row the reason why it is unreadable, or None.
    """

    values: RowBlocks
    reasons: Sequence[str | None]

    @classmethod
    def of(
        cls, images: Images, values: RowBlocks, reasons: Sequence[str | None]
    ) -> DecodedImages:
        """Return N images together with their decoded pixels or features.

        ``images`` itself is not changed. Nothing is copied or checked.

        Args:
            images: The images.
            values: Pixels uint8 (N, 3, S, S), or features (N, D).
            reasons: For each row the reason why it is unreadable, or None if it is
                readable.
        """
        return cls(images, np.arange(len(images)), values, reasons)

    def take(self, rows: np.ndarray) -> ImageSubset:
        """Return only some rows int64 (n,), in that order.

        Their pixels or features are not copied: the method ``prepared`` of the result
        returns them.
        """
        return ImageSubset(self, rows)

    def split_rows(self, rows: np.ndarray, size: int) -> Iterator[Images]:
        """Yield some rows in parts, in the order of ``rows``.

        Args:
            rows: Row numbers, int64 (n,).
            size: Number of rows of each part; the last one may have fewer.

        Yields:
            The :class:`ImageSubset` of each part, numbered from 0. Its method
            ``prepared`` returns the pixels or features; its images are read when its
            method ``read_images`` is called.
        """
        return Images.split_rows(self, rows, size)

    def prepared(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]]:
        """Return a copy of the decoded pixels or features of rows, in that order.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            Pixels uint8 (n, 3, S, S) or features (n, D), and for each row the reason
            why it is unreadable, or None. The values of unreadable rows have no
            meaning.
        """
        reasons = [self.reasons[row] for row in rows.tolist()]
        return self.values[torch.tensor(rows)], reasons


@dataclass(frozen=True, eq=False)
class TrainSet:
    """The training rows in memory, with all that training may see.

    It holds no label of a novel class. Images are uint8 (N, 3, S, S). Their place can
    be taken by features float32 (N, 1 + V, D): those of a frozen encoder for one view
    for evaluation and V random views, see :mod:`uno.data.features`; or the embeddings
    of a source that has no images, of which each row has 1 + V views.

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
        """Return a copy of the set with labels and images or features on ``device``.

        A :class:`RowBlocks` becomes a tensor, except on the CPU, where it stays.
        """
        names = ("labeled_images", "labels", "unlabeled_images")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def batches(
        self,
        config: Config,
        plan: Plan,
        rank: int = 0,
        world_size: int = 1,
        last: int = 0,
    ) -> MemoryBatches:
        """Return an object that makes one worker's batch of each step of a phase.

        It is called with a step and returns the batch of this step.

        Args:
            config: The configuration of the run.
            plan: The numbers that fix the rows of every batch of the phase.
            rank: Number of the worker, from 0.
            world_size: The number of workers.
            last: The step at which the phase ends, which is ignored here. Only sets
                that read ahead, which are those of :mod:`uno.data.stream`, need it.
        """
        return MemoryBatches(config, self, plan, rank, world_size)

    def choose_rows(self, num: int) -> list[np.ndarray]:
        """Choose a sample of labeled and of unlabeled rows, evenly spaced.

        Args:
            num: The number of labeled rows, and of unlabeled rows, to choose.

        Returns:
            A list of two arrays int64, ascending: positions among the labeled rows, and
            positions among the unlabeled rows. They are all rows of a kind that has no
            more than ``num``. To the labeled ones the first row is added of each known
            class that would have none, so they can be more than ``num``.
        """
        even = evenly_spaced(num, len(self.labels))
        labeled = with_every_class(even, self.labels.cpu().numpy())
        return [labeled, evenly_spaced(num, self.num_unlabeled)]

    def plan_reading(
        self, chosen: Sequence[np.ndarray], batch_size: int
    ) -> tuple[list[np.ndarray], Read]:
        """Divide a sample of rows into batches, and return how they are read.

        Args:
            chosen: Two arrays int64 that :meth:`choose_rows` returns: positions among
                the labeled rows, and positions among the unlabeled rows.
            batch_size: The largest number of rows of a batch. In a sample of n rows it
                has at most max(32, ceil(n / 64)) rows, too.

        Returns:
            Two values. The first has for each batch the positions of its rows in the
            sample, int64 (b,). In the sample the chosen labeled rows come first, then
            the chosen unlabeled rows. No batch has both. The second is a function. It
            takes such positions of some batches, and yields for each of them the images
            or features of its rows (features with all 1 + V views), on the device of
            the set, and bool (b,), which rows could be read (here all).
        """
        images = self.labeled_images, self.unlabeled_images
        return plan_reading([*zip(images, chosen, strict=True)], batch_size)

    def sync(self) -> None:
        """Do nothing: unreadable images of a set in memory are left out beforehand.

        The method exists because workers exchange unreadable rows in the method of the
        same name of streamed sets.
        """


@dataclass(frozen=True, eq=False)
class EvalRows:
    """N rows with a true class. Only evaluation reads them.

    Attributes:
        truth: Index of the true class among known + novel classes, int64 (N,).
        index: Row number among all rows of the run, int64 (N,).
        unlabeled: Whether training does not see the row's label, bool (N,). This holds
            also for rows that training does not see at all.
    """

    truth: Tensor
    index: Tensor
    unlabeled: Tensor

    def where(self, chosen: Tensor) -> Self:
        """Return a copy of the set with only some of its N rows.

        Attributes of a subclass that hold all rows of the run, such as ``images``, stay
        as they are.

        Args:
            chosen: Whether each row is kept, bool (N,).
        """
        return replace(
            self,
            truth=self.truth[chosen],
            index=self.index[chosen],
            unlabeled=self.unlabeled[chosen],
        )


@dataclass(frozen=True, eq=False)
class EvalSet(EvalRows):
    """N rows with a true class, in memory.

    It also has the attributes ``truth``, ``index`` and ``unlabeled`` of
    :class:`EvalRows`.

    Attributes:
        images: Images uint8 (M, 3, S, S), or features float32 (M, D), of all M rows of
            the run.
    """

    images: RowBlocks

    def batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of one worker as batches, each row once and in order.

        Args:
            batch_size: The largest number of rows in a batch.
            rank: Number of the worker, from 0. It gets the rows ``rank::world_size`` of
                the N rows.
            world_size: The number of workers.

        Yields:
            Images uint8 (b, 3, S, S) or features float32 (b, D), and true classes int64
            (b,), indices among known + novel classes. All are on the CPU. A worker
            without rows gets no batch.
        """
        own = torch.arange(len(self.truth))[rank::world_size]
        for rows in own.split(batch_size):
            if len(rows):
                yield self.images[self.index[rows]], self.truth[rows]

    def choose_rows(self, num: int) -> list[np.ndarray]:
        """Choose a sample of the rows, evenly spaced.

        Args:
            num: The largest number of rows.

        Returns:
            A list of one array, because an evaluation set has one kind of rows, where a
            training set has two: the positions of the chosen rows among the N rows of
            the set, int64, ascending. They are all rows if N is no more than ``num``.
        """
        return [evenly_spaced(num, len(self.truth))]

    def plan_reading(
        self, chosen: Sequence[np.ndarray], batch_size: int
    ) -> tuple[list[np.ndarray], Read]:
        """Divide a sample of rows into batches, and return how they are read.

        Args:
            chosen: A list of one array int64, the positions of the chosen rows, which
                :meth:`choose_rows` returns.
            batch_size: The largest number of rows of a batch. In a sample of n rows it
                has at most max(32, ceil(n / 64)) rows, too.

        Returns:
            Two values. The first has for each batch the positions of its rows in the
            sample, int64 (b,). The second is a function. It takes such positions of
            some batches, and yields for each of them the images or features of its rows
            on the CPU and bool (b,), which rows could be read (here all).
        """
        index = self.index.numpy()
        parts = [(self.images, index[rows]) for rows in chosen]
        return plan_reading(parts, batch_size)


def plan_reading(
    parts: Sequence[tuple[Tensor | RowBlocks, np.ndarray]], batch_size: int
) -> tuple[list[np.ndarray], Read]:
    """Divide rows in memory into batches, and return how they are read.

    In a sample of n rows a batch has at most max(32, ceil(n / 64)) rows, and at most
    ``batch_size``, so that a small sample has batches for several workers. The batches
    do not depend on the number of workers that share them.

    Args:
        parts: Pairs of images or features, and the numbers of the chosen rows in them,
            int64 (n,). The sample has the chosen rows of all parts, one part after the
            other.
        batch_size: The largest number of rows of a batch.

    Returns:
        Two values. The first has for each batch the positions of its rows in the
        sample, int64 (b,), consecutive and all in one part. The second is a function.
        It takes such positions of some batches, and yields for each of them the images
        or features of its rows, on the device of their part, and bool (b,), which rows
        could be read (here all). It reads each batch when it yields it.
    """
    ends = np.cumsum([len(rows) for _, rows in parts])
    size = min(batch_size, max(MIN_BATCH_ROWS, -(-int(ends[-1]) // MAX_BATCHES)))
    batches = [
        np.arange(start, min(start + size, end))
        for end, (_, rows) in zip(ends.tolist(), parts, strict=True)
        for start in range(end - len(rows), end, size)
    ]

    def read(
        batches: Sequence[np.ndarray],
    ) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Yield the images or features of each batch, and bool (b,), which is all True.

        They are on the device of their part, which is the CPU for a :class:`RowBlocks`.
        Features have all views that the part has.

        Args:
            batches: Positions of the rows of each batch in the sample, int64 (b,). All
                rows of a batch are in the same part.
        """
        for batch in batches:
            part = int(np.searchsorted(ends, batch[0], side="right"))
            images, rows = parts[part]
            own = torch.from_numpy(rows[batch - (ends[part] - len(rows))])
            if isinstance(images, Tensor):  # rows of blocks are read on the host
                own = own.to(images.device)
            yield images[own], np.ones(len(batch), dtype=bool)

    return batches, read


def keep_pixels(
    task: Task, images: Tensor | RowBlocks, reasons: list[str | None]
) -> Task:
    """Keep the decoded images or the features of all rows in memory.

    Code that finds these values, by the method ``prepared`` of the images, neither
    decodes the images again nor passes them through the frozen encoder again. ``task``
    itself is not changed.

    Args:
        task: All N rows of the run.
        images: Pixels uint8 (N, 3, S, S); or features (N, 1 + V, D) of an evaluation
            view and V other views, of which only the first is kept. A
            :class:`RowBlocks` has pixels, or features (N, D), and is kept as it is.
        reasons: For each row the reason why it is unreadable, or None.

    Returns:
        A copy of the task whose images are :class:`DecodedImages` with these values.
        The values are not copied, but for the first of several views.
    """
    if isinstance(images, Tensor):
        if images.ndim == 3:
            views, images = images, images[:, 0]
            # a copy, so that the memory of the random views can be freed
            images = images.clone() if views.shape[1] > 1 else images
        images = RowBlocks([images])
    kept = DecodedImages.of(task.rows.images, images, reasons)
    return replace(task, rows=task.rows.with_images(kept))


def assemble(task: Task, images: Tensor, ok: np.ndarray) -> TrainSet:
    """Make the training set in memory from the pixels or features of all rows.

    Args:
        task: All N rows of the run, training and test rows.
        images: Pixels uint8 (N, 3, S, S) of squares of side S; or features float32 (N,
            1 + V, D), D for each view: the evaluation view first, then V other views.
        ok: Whether each row is readable, bool (N,). Other rows are left out.

    Returns:
        The training rows of the task that are readable, labeled and unlabeled ones each
        in ascending order, with the index of the known class of each labeled row, and
        the numbers of known and novel classes. Test rows are not in it. ``images`` are
        not copied.
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
    """Make a training set of chosen rows, given what training may know of them.

    The arguments but ``images`` are those that :func:`~uno.data.splits.train_rows`
    returns.

    Args:
        images: Images or features of all N rows.
        labeled: Row numbers of the labeled training rows, int64 (N_l,).
        labels: Index of the known class of each labeled row, int64 (N_l,).
        unlabeled: Row numbers of the unlabeled training rows, int64 (N_u,).
        num_known: C_l, the number of known classes.
        num_novel: C_u, the number of novel classes.

    Returns:
        The set. Its images are :class:`RowBlocks` that share the values of ``images``,
        and its labels are ``labels`` themselves.
    """
    known, rest = (
        images.select_rows(torch.tensor(rows)) for rows in (labeled, unlabeled)
    )  # torch.tensor copies, because arrays that come from Ray are read-only
    return TrainSet(known, labels, rest, num_known, num_novel)


def eval_sets(task: Task, images: Tensor, ok: np.ndarray) -> dict[str, EvalSet]:
    """Make the evaluation sets in memory from the pixels or features of all rows.

    Args:
        task: All N rows of the run.
        images: Pixels uint8 (N, 3, S, S), or features float32 (N, 1 + V, D) of an
            evaluation view and V other views. Only the first view is evaluated.
        ok: Whether each row is readable, bool (N,). Other rows are left out.

    Returns:
        The sets of the splits "train" and "test", by these names. Each has the readable
        rows of the split that have a true class, labeled or not, in ascending order:
        true classes, row numbers, whether training does not see the label, and the
        images or features. A set can be empty.
    """
    values = RowBlocks([images if images.ndim == 4 else images[:, 0]])
    return {
        split: EvalSet(truth, rows, unlabeled, values)
        for split, (rows, truth, unlabeled) in truth_rows(task, ok).items()
    }


class MemoryBatches:
    """The batches of a phase from a set in memory, for one worker.

    Calling an object with a step returns the batch of this step. For the same arguments
    the batch of a step is always the same, in whatever order steps are asked for. The
    views of a row are the same for any number of workers. They are augmented images,
    cached views of features, or features with noise if there are fewer cached views
    (the evaluation view is one of them) than ``augment.large.num_views``.

    Args:
        config: The configuration of the run.
        train: The training set.
        plan: The numbers that fix the rows of every batch of the phase.
        rank: Number of the worker, from 0.
        world_size: The number of workers, which divides the numbers of labeled and of
            unlabeled rows in a global batch.
    """

    def __init__(
        self, config: Config, train: TrainSet, plan: Plan, rank: int, world_size: int
    ) -> None:
        self._config, self._train, self._plan = config, train, plan
        self._order = Order(plan, rank, world_size)
        images = train.labeled_images
        if images.ndim == 4:
            self._make_views = self._augment_images
        elif images.shape[1] >= config.augment.large.num_views:
            self._make_views = self._choose_cached_views
        else:
            self._make_views = self._add_noise
            self._spread = spread_of_features(train)

    def __call__(self, step: int) -> Batch:
        """Return views of this worker's rows in one step, on the device of the set.

        Args:
            step: Number of the step in the phase, from 0.

        Returns:
            A batch of this worker's b_l labeled rows, followed by its b_u unlabeled
            rows: ``views``, V tensors of all these rows, large views first: augmented
            and normalized pixels float32 (b_l + b_u, 3, S_v, S_v) of side S_v, or
            features (b_l + b_u, D); ``labels``, the known class of each labeled row,
            int64 (b_l,); ``num_large``, the number of large views; and ``rows``, the
            numbers of the unlabeled rows among the unlabeled training rows, int64
            (b_u,). A pretext task trains on all rows alike: ``labels`` is then empty,
            and ``rows`` None.
        """
        labels, positions = self._train.labels, self._order.positions
        labeled, unlabeled = self._order.rows(step)
        is_pretext = self._plan.stream == PRETEXT
        if is_pretext:  # one order of all rows; the unlabeled ones follow the labeled
            is_unlabeled = labeled >= len(labels)
            positions = positions[np.argsort(is_unlabeled, kind="stable")]
            unlabeled = labeled[is_unlabeled] - len(labels)
            labeled = labeled[~is_unlabeled]
        known, rest = (
            torch.from_numpy(rows).to(labels.device, non_blocking=True)
            for rows in (labeled, unlabeled)
        )
        generator = augment_generator(self._config.seed, self._plan.stream, step)
        views = self._make_views(known, rest, torch.from_numpy(positions), generator)
        num_large = self._config.augment.large.num_views
        if is_pretext:
            return Batch(views, labels[:0], num_large)
        return Batch(views, labels[known], num_large, rest)

    def close(self) -> None:
        """Do nothing. Batches of a set in memory are not prepared ahead."""

    def _augment_images(
        self,
        labeled: Tensor,
        unlabeled: Tensor,
        positions: Tensor,
        generator: torch.Generator,
    ) -> list[Tensor]:
        """Make augmented views of images.

        Args:
            labeled: Numbers among the labeled rows, int64 (b_l,).
            unlabeled: Numbers among the unlabeled rows, int64 (b_u,).
            positions: Positions of these rows in the global batch, labeled ones first:
                int64 (b_l + b_u,).
            generator: Draws the views of the global batch.

        Returns:
            V tensors float32 (b_l + b_u, 3, S_v, S_v), large views first, normalized by
            ``data.mean`` and ``data.std``. S_v is the side of the view, which can
            be another one for large than for small views. The rows are in the order of
            ``labeled``, then ``unlabeled``.
        """
        train, data = self._train, self._config.data
        return augment(
            torch.cat(
                [train.labeled_images[labeled], train.unlabeled_images[unlabeled]]
            ),
            self._config.augment,
            generator,
            data.mean,
            data.std,
            positions,
            self._plan.labeled_size + self._plan.unlabeled_size,
        )

    def _choose_cached_views(
        self,
        labeled: Tensor,
        unlabeled: Tensor,
        positions: Tensor,
        generator: torch.Generator,
    ) -> list[Tensor]:
        """Draw some of the cached views of each row, without repetition.

        Each row has 1 + V cached views: the evaluation view and V others. These are
        ``augment.num_cached_views`` random views, or the further views that a source of
        vectors has. The evaluation view can be drawn like the others, because accuracy
        is lower if the heads never train on the view that they are evaluated on.

        Args:
            labeled: Numbers among the labeled rows, int64 (b_l,).
            unlabeled: Numbers among the unlabeled rows, int64 (b_u,).
            positions: Positions of these rows in the global batch, labeled ones first:
                int64 (b_l + b_u,).
            generator: Draws the views of the global batch.

        Returns:
            ``augment.large.num_views`` tensors (b_l + b_u, D) of features, in the order
            of ``labeled``, then ``unlabeled``. The views of a row have different
            numbers. They can be equal in a source of vectors, where a row with fewer
            views than others repeats its own.
        """
        train, plan = self._train, self._plan
        num_rows = plan.labeled_size + plan.unlabeled_size
        draws = torch.rand(num_rows, train.labeled_images.shape[1], generator=generator)
        order = draws.argsort(dim=1)[positions].to(labeled.device, non_blocking=True)
        known, rest = order.split([len(labeled), len(unlabeled)])
        return [
            torch.cat(
                [
                    train.labeled_images[labeled, known[:, view]],
                    train.unlabeled_images[unlabeled, rest[:, view]],
                ]
            )
            for view in range(self._config.augment.large.num_views)
        ]

    def _add_noise(
        self,
        labeled: Tensor,
        unlabeled: Tensor,
        positions: Tensor,
        generator: torch.Generator,
    ) -> list[Tensor]:
        """Make views of features by adding noise to the evaluation view of each row.

        This is done where there are fewer cached views than a step takes. The noise is
        normal and drawn anew for each view. Its standard deviation in each of the D
        features is ``augment.vector_noise`` times that of this feature over a sample of
        the training rows, see :func:`spread_of_features`.

        Args:
            labeled: Numbers among the labeled rows, int64 (b_l,).
            unlabeled: Numbers among the unlabeled rows, int64 (b_u,).
            positions: Positions of these rows in the global batch, labeled ones first:
                int64 (b_l + b_u,).
            generator: Draws the noise of the global batch.

        Returns:
            ``augment.large.num_views`` tensors (b_l + b_u, D), in the order of
            ``labeled``, then ``unlabeled``.
        """
        train, plan, settings = self._train, self._plan, self._config.augment
        plain = torch.cat(
            [train.labeled_images[labeled, 0], train.unlabeled_images[unlabeled, 0]]
        )
        size = plan.labeled_size + plan.unlabeled_size, plain.shape[1]
        draws = (
            torch.randn(size, generator=generator)[positions].to(plain.device)
            for _ in range(settings.large.num_views)
        )
        deviation = settings.vector_noise * self._spread
        return [plain + deviation * draw for draw in draws]


def spread_of_features(train: TrainSet) -> Tensor:
    """Return the standard deviation of each feature over a sample of the rows.

    The sample has at most 65,536 (:data:`SPREAD_ROWS`) labeled rows and at most as many
    unlabeled rows, evenly spaced in their kind. The deviation is computed over both
    kinds together. The sum of squares is divided by the number of rows, not by one
    less. The noise that is added to embeddings as an augmentation is a multiple of the
    result.

    Args:
        train: A training set of features (N, 1 + V, D). Of its views only the first,
            for evaluation, is used.

    Returns:
        float32 (D,), on the device of the set.
    """
    sample = [
        images[torch.from_numpy(evenly_spaced(SPREAD_ROWS, len(images))), 0]
        for images in (train.labeled_images, train.unlabeled_images)
    ]
    return torch.cat(sample).std(dim=0, correction=0)
