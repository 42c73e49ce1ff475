"""Estimate how many novel classes the features of a frozen encoder hold.

Many small clusters are merged again and again, those that mix most first
(:func:`uno.clustering.neighbors.compute_mixing`). Parts of one class mix much and
different classes mix little, but how much differs between data sets. The known classes
tell it: some are hidden, their rows are clustered with the unlabeled rows, and their
parts and their borders are found again. In generalized category discovery, unlabeled
rows that probably have known classes are left out first (:func:`rows_to_count`).

For each number K of novel classes, signs compare the merge before K and the merge after
K with what the hidden classes have shown (:func:`signs_of`). A logistic model turns
the signs into the probability that there are no more than K classes if there are at
least K. The probabilities of all numbers follow, and from these the estimate and its
interval. The model was fitted on tasks of data sets whose classes are known, and is
stored with its source in ``num_classes.json`` (written by ``python -m
benchmarks.numbers fit``), with the level of the intervals in each setting. Neither the
number of the known classes nor their sizes are signs, because they say nothing about
how many classes are new. There are at least two novel classes: one class leaves nothing
to cluster.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno.clustering.frozen import (
    SMOOTHED,
    Clustering,
    FrozenClusters,
    Merge,
    cluster_means,
    fit_principal_space,
    fit_whitening,
    merge_pairs,
)
from uno.clustering.kmeans import FREE, kmeans
from uno.clustering.neighbors import (
    count_links,
    find_neighbors,
    mixing_of_cluster,
    smooth_rows,
)
from uno.data.images import with_every_class

CALIBRATION_FILE = "num_classes.json"
MIN_KNOWN = 2  # known classes: one is hidden, and one remains to whiten by
MIN_NOVEL = 2  # the smallest number of novel classes
MAX_ROWS = 2_000  # labeled rows, and unlabeled rows, that are clustered
MAX_CLUSTERS = 150  # clusters before merging
MIN_ROWS_PER_CLUSTER = 10  # on average, before merging
SMALLEST_SHARE = 0.25  # a class has this share of the rows of the smallest known class
ENOUGH_SHARE = 0.02  # a cluster with this share of the unlabeled rows can be a class
NUM_FOLDS = 2  # sets of known classes that are hidden
MAX_HIDDEN = 5  # known classes that are hidden at a time
MIN_NEIGHBORS, MAX_NEIGHBORS = 10, 100  # of a row that may have a known class
NUM_LABELED = 5  # labeled ones among the neighbors of a labeled row, on average
NEAR_SHARE = 0.5  # of these, from which on an unlabeled row counts as known
MIN_ROWS = 20  # unlabeled rows that are left at least
NUM_HEIGHTS = 3  # mixings between two merges at which hidden classes are compared
FLOOR, CEILING = 0.01, 3.0  # mixings below and above count as these
# logarithm of a mixing between that of parts of one class and that of classes, where
# hidden classes show none: about the mean of the tasks of benchmarks/numbers.py
TYPICAL_REFERENCE = -2.2


@dataclass(frozen=True)
class NumClasses:
    """How probable each number of novel classes is.

    Attributes:
        probabilities: The probability (K,) of 2, 3, ... novel classes.
        num_novel: The estimated number of novel classes, the median of this
            distribution.
        low: The smallest number in the shortest interval that holds at least the
            probability ``level`` of the :class:`Model`.
        high: The largest number in this interval.
    """

    probabilities: Sequence[float]
    num_novel: int
    low: int
    high: int


@dataclass(frozen=True)
class Model:
    """A logistic model of "there are no more classes".

    Attributes:
        weights: The weight (S,) of each sign of :func:`signs_of`.
        intercept: The log-odds where all signs are 0.
        level: Least probability of the interval, above 0.5: then it holds the median.
    """

    weights: Sequence[float]
    intercept: float
    level: float

    def __call__(self, signs: NDArray[np.float64]) -> NumClasses:
        """Compute the probabilities of 2, 3, ... novel classes from their signs.

        The model gives for each number the probability that there are no more classes
        if there are at least so many. The largest number gets the rest.

        Args:
            signs: The S signs of each of the K numbers 2 to K + 1, (K, S), of
                :func:`signs_of`.

        Returns:
            The probabilities, which sum to 1, their median, and the shortest interval
            that holds at least the probability ``level``.
        """
        logits = signs @ np.array(self.weights) + self.intercept
        stop = 1 / (1 + np.exp(-logits))
        stop[-1] = 1.0
        probabilities = stop * np.append(1.0, np.cumprod(1 - stop)[:-1])
        low, high = shortest_interval(probabilities, self.level)
        median = MIN_NOVEL + int(np.searchsorted(probabilities.cumsum(), 0.5))
        return NumClasses(probabilities.tolist(), median, low, high)


def estimate_num_classes(
    labeled: Tensor,
    labels: Tensor,
    unlabeled: Tensor,
    gcd: bool,
    seed: int,
    max_novel: int | None = None,
) -> NumClasses:
    """Estimate the number of novel classes among unlabeled rows, on the CPU.

    The unlabeled rows are divided into many small clusters. These are merged pair by
    pair: first clusters with too few rows for a class, then the pair with the highest
    mixing. The mixing of two clusters is how many nearest neighbors their rows have in
    each other, divided by the number that is expected if the rows of both were divided
    at random (:func:`uno.clustering.neighbors.compute_mixing`). It is high for parts of
    one class and low for different classes. Known classes, whose labels are hidden for
    this, show how high and how low. A stored logistic model turns the mixing at each
    merge, and how well the hidden classes are found again at this mixing, into the
    probability of each number of classes. At most ``MAX_ROWS`` (2,000) unlabeled rows
    are used. Of more labeled rows than that, as many evenly spaced ones are used, and a
    row of each class that would have none, see :func:`find_signs`.

    Args:
        labeled: Features (N_l, D) of labeled rows.
        labels: Their classes int64 (N_l,), 0 to C_l - 1; each class has a row. With
            fewer than ``MIN_KNOWN`` (2) classes none is hidden. A stored typical value
            then takes the place of the mixing that separates parts of one hidden class
            from different classes. It is also taken if the hidden classes have too few
            rows to show a mixing. Otherwise two disjoint sets of classes, each half of
            them but at most 5, are hidden in turn.
        unlabeled: Features (N_u, D) of at least two rows.
        gcd: Whether unlabeled rows can belong to known classes. If so, unlabeled rows
            that probably do are left out first, unless fewer than 20 would remain.
        seed: Seed of k-means and of the choice of hidden classes.
        max_novel: The largest number that is considered is at most this, which is at
            least 2; None for no such limit. Without it, the largest number is the
            number of clusters that are left when all small clusters with too few rows
            for a class have been merged, but at least 2. It is at most ``MAX_CLUSTERS``
            (150).

    Returns:
        The estimated number (the median), its interval, and the probability of each
        number from 2 to the largest one that is considered.
    """
    signs = find_signs(labeled, labels, unlabeled, gcd, seed)
    if max_novel is not None:
        signs = signs[: max(1, max_novel - MIN_NOVEL + 1)]
    return stored_model(gcd)(signs)


def pairs_of_one_class(
    result: FrozenClusters,
    labeled: Tensor,
    labels: Tensor,
    unlabeled: Tensor,
    gcd: bool,
    seed: int,
) -> Tensor:
    """Return the pairs of novel classes that may be parts of one class each.

    The number of novel classes is estimated by :func:`estimate_num_classes`, unless
    ``result.similar`` is empty.

    Args:
        result: The clusters of the same rows, from
            :func:`uno.clustering.frozen.discover_clusters`. ``result.similar`` has the
            pairs of novel classes with the most nearest neighbors in each other.
        labeled: Features (N_l, D) of labeled rows.
        labels: Their classes int64 (N_l,), 0 to C_l - 1; each class has a row.
        unlabeled: Features (N_u, D) of at least two rows.
        gcd: Whether unlabeled rows can belong to known classes.
        seed: Seed of :func:`estimate_num_classes`.

    Returns:
        The first rows of ``result.similar``, float64 (n, 3), each with the indices of
        two classes among the novel ones and their mixing, the most similar first. If
        ``result`` has m novel classes more than are estimated, they are the first m, or
        all if there are fewer. There are none if it has not more.
    """
    if not len(result.similar):
        return result.similar
    found = estimate_num_classes(labeled, labels, unlabeled, gcd, seed)
    num_novel = len(result.prototypes) - len(labels.bincount())
    return result.similar[: max(0, num_novel - found.num_novel)]


def find_signs(
    labeled: Tensor, labels: Tensor, unlabeled: Tensor, gcd: bool, seed: int
) -> NDArray[np.float64]:
    """Compute the inputs of the logistic model, for each number of novel classes.

    Small clusters of the unlabeled rows are merged, and known classes whose labels are
    hidden are found again, for comparison. Merges of a cluster with too few rows for a
    class do not count. At most ``MAX_ROWS`` (2,000) labeled and as many unlabeled rows
    are used, evenly spaced, the labeled ones in the order of their classes, and a row
    of each class that would have none. With ``gcd``, those of the unlabeled rows that
    probably have known classes are then left out (:func:`rows_to_count`).

    A cluster has enough rows for a class if it has at least 3, and at least the smaller
    of two numbers. One is 2% of the unlabeled rows that are left. The other is a
    quarter of all rows of the smallest known class, times the share of the unlabeled
    rows that are evenly spaced out of all N_u, which is 1 up to 2,000.

    Args:
        labeled: Features (N_l, D) of labeled rows.
        labels: Their classes int64 (N_l,), 0 to C_l - 1; each class has a row.
        unlabeled: Features (N_u, D) of at least two rows.
        gcd: Whether unlabeled rows can belong to known classes.
        seed: Seed of k-means and of the choice of hidden classes.

    Returns:
        The S = 3 numbers (K, S) that :func:`signs_of` computes for each of the K
        numbers 2, 3, ... of novel classes.
    """
    class_sizes = labels.bincount()
    share = min(1.0, MAX_ROWS / len(unlabeled))
    by_class = labels.argsort(stable=True)
    even = _spread(torch.arange(len(labels)), MAX_ROWS)
    every = with_every_class(even.numpy(), labels[by_class].numpy())
    chosen = by_class[torch.from_numpy(every)]
    labels, unlabeled = labels[chosen], _spread(unlabeled, MAX_ROWS)
    features = torch.cat([labeled[chosen], unlabeled])
    rows = fit_principal_space(features)(features)
    known = F.pad(labels, (0, len(unlabeled)), value=FREE)
    if gcd:
        counted = rows_to_count(rows, known)
        rows, known = rows[counted], known[counted]
    num_unlabeled = int((known == FREE).sum())
    min_rows = max(
        3.0,
        min(
            SMALLEST_SHARE * share * int(class_sizes.min()),
            ENOUGH_SHARE * num_unlabeled,
        ),
    )
    clustering, clusters = small_clusters(rows, known, seed)
    merges = [
        merge
        for merge in merge_all(clustering, clusters, min_rows)
        if merge.num_rows >= min_rows
    ]
    heights = _log_mixing([merge.closeness for merge in reversed(merges)])
    hidden = [
        find_hidden(rows, known, classes, seed, min_rows)
        for classes in hidden_classes(len(class_sizes), seed)
    ]
    parts = [mixed for found in hidden for mixed in found.parts]
    borders = [mixed for found in hidden for mixed in found.borders]
    levels = [float(np.mean(_log_mixing(mixed))) for mixed in (parts, borders) if mixed]
    reference = float(np.mean(levels)) if levels else TYPICAL_REFERENCE
    return signs_of(heights, reference, [(found.heights, found.f1) for found in hidden])


def signs_of(
    heights: NDArray[np.float64],
    reference: float,
    hidden: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> NDArray[np.float64]:
    """Compute three signs whether there are K novel classes, for each number K.

    They are the inputs of the logistic model of "there are no more classes". A mixing
    says how much two clusters overlap, see
    :func:`~uno.clustering.neighbors.compute_mixing`.

    Args:
        heights: Logarithms of the mixing at which 2, 3, ..., K novel clusters become
            one less, (K - 1,).
        reference: Logarithm of the mixing between that of parts of one hidden class and
            that of different classes.
        hidden: For each set of hidden classes the logarithms of the mixing of the
            merges in their order (m,), and the mean F1 of these classes before the
            first and after each merge (m + 1,).

    Returns:
        Signs (max(1, K - 1), 3) of the numbers 2 to K: how far the logarithm of the
        mixing of the merge that leaves the number of classes is above the reference,
        where for the number K the largest mixing counts; the same of the next merge,
        which leaves one class less; and the mean F1 of hidden classes at mixings
        between the two, minus its largest value, averaged over the sets. The third sign
        is 0 without hidden classes. Without any merge there is one row, of the number
        2.
    """
    last = heights if len(heights) else np.log([FLOOR])
    following = np.append(last[1:], max(last))
    shares = (np.arange(NUM_HEIGHTS) + 1) / (NUM_HEIGHTS + 1)
    between = last[:, None] + shares * (following - last)[:, None]
    curves = []
    for merged_at, f1 in hidden:
        reached = np.minimum.accumulate(merged_at)
        num_merges = (reached >= between[..., None]).sum(axis=-1)
        curves.append(f1[num_merges].mean(axis=1) - f1.max())
    found_again = np.mean(curves, axis=0) if curves else np.zeros(len(last))
    return np.stack([following - reference, last - reference, found_again], axis=1)


def rows_to_count(rows: Tensor, labels: Tensor) -> Tensor:
    """Tell which rows are left if unlabeled rows of known classes are left out.

    Such a row has about as many labeled neighbors as a labeled row has, and a row of a
    novel class has few. Unlabeled rows are left out that have at least ``NEAR_SHARE``
    (half) as many labeled neighbors as labeled rows have on average. Neighbors are the
    nearest rows by cosine. They are so many that a labeled row has about
    ``NUM_LABELED`` (5) labeled ones among them, but at least ``MIN_NEIGHBORS`` (10) and
    at most ``MAX_NEIGHBORS`` (100): if few rows of a known class have labels, the
    nearest neighbors of an unlabeled row say little.

    Args:
        rows: Rows (N, P), not whitened: whitening pulls labeled rows together.
        labels: Their classes int64 (N,), or FREE (-1) for a row without a label. At
            least one row has a label.

    Returns:
        A mask, bool (N,), true for the rows that are kept, which include all labeled
        rows. It is true for all rows if fewer than ``MIN_ROWS`` (20) unlabeled ones
        would be left.
    """
    is_known = labels != FREE
    neighbors = find_neighbors(F.normalize(rows, dim=1), MAX_NEIGHBORS)
    has_label = is_known[neighbors].double()
    share = float(has_label[is_known, :MIN_NEIGHBORS].mean())
    num = max(
        MIN_NEIGHBORS, round(NUM_LABELED / max(share, NUM_LABELED / MAX_NEIGHBORS))
    )
    shares = has_label[:, :num].mean(dim=1)
    is_counted = is_known | (shares < NEAR_SHARE * shares[is_known].mean())
    if int((is_counted & ~is_known).sum()) < MIN_ROWS:
        return torch.ones_like(is_known)
    return is_counted


def small_clusters(
    rows: Tensor, labels: Tensor, seed: int
) -> tuple[Clustering, Tensor]:
    """Divide the unlabeled rows into more clusters than there are classes.

    There is one cluster for ``MIN_ROWS_PER_CLUSTER`` (10) unlabeled rows, but at least
    6, at most ``MAX_CLUSTERS`` (150), and never more than one for two rows, except that
    there is at least one. The clusters are those of smoothed k-means of rows that are
    whitened within the known classes and scaled to length one.

    Args:
        rows: Rows (N, P), not yet whitened.
        labels: Their classes int64 (N,), or FREE (-1) for a row without a label. At
            least one row has a label.
        seed: Seed of k-means.

    Returns:
        A :class:`~uno.clustering.frozen.Clustering` of the whitened rows, whose
        ``num_novel`` is the number of small clusters; and the cluster int64 (N,) of
        each row: its class for a labeled row, and numbers after the known classes for
        unlabeled rows.
    """
    is_known = labels != FREE
    white = rows @ fit_whitening(rows[is_known], labels[is_known])
    num_free = int((~is_known).sum())
    num = min(max(num_free // MIN_ROWS_PER_CLUSTER, 6), MAX_CLUSTERS, num_free // 2)
    clustering = Clustering.of(F.normalize(white, dim=1), labels, max(1, num), False)
    return clustering, clustering.partition(SMOOTHED, max(1, num), 1, seed)


def merge_all(
    clustering: Clustering, clusters: Tensor, min_rows: float
) -> Iterator[Merge]:
    """Merge clusters of unlabeled rows until one is left, those that mix most first.

    Two clusters mix if their rows have many nearest neighbors in each other. Clusters
    of less than ``min_rows`` rows merge before all others, so that a few outliers do
    not count as a class.

    Args:
        clustering: The rows, of which only unlabeled ones take part, as in the result
            of :func:`small_clusters`.
        clusters: Their clusters int64 (N,), known ones first.
        min_rows: The smallest number of rows with which a cluster can be a class.

    Returns:
        An iterator of the merges, see :func:`uno.clustering.frozen.merge_pairs`.
        ``clusters`` is not changed.
    """
    links, sizes = clustering.links_and_sizes(clusters, clustering.num_classes)
    means = cluster_means(clustering.points, clusters, len(sizes))
    takes_part = sizes > 0
    can_merge = takes_part[:, None] & takes_part
    return merge_pairs(links, sizes, means @ means.T, can_merge, min_rows)


def hidden_classes(num_known: int, seed: int) -> list[list[int]]:
    """Draw sets of known classes to hide.

    A set has half of the known classes, rounded down, but at most ``MAX_HIDDEN`` (5).
    There are ``NUM_FOLDS`` (2) sets, which have no common class.

    Args:
        num_known: Number of known classes.
        seed: Seed of the draw.

    Returns:
        The sets, as class numbers from 0; no set if fewer than ``MIN_KNOWN`` (2)
        classes are known.
    """
    if num_known < MIN_KNOWN:
        return []
    order = np.random.default_rng(seed).permutation(num_known).tolist()
    size = min(num_known // 2, MAX_HIDDEN)
    return [order[fold * size : (fold + 1) * size] for fold in range(NUM_FOLDS)]


class Hidden(NamedTuple):
    """What known classes have shown whose labels were hidden.

    A mixing says how many nearest neighbors two clusters have in each other, see
    :func:`uno.clustering.neighbors.compute_mixing`.

    Attributes:
        parts: The mixing of the two halves of each hidden class that has enough rows.
        borders: For each hidden class that had such a merge, the mixing at the last
            merge of a cluster mostly of this class with one that is not.
        heights: Logarithms of the mixing of the merges, (m,).
        f1: Mean F1 of the hidden classes, 0 to 1, before the first and after each
            merge (m + 1,).
    """

    parts: list[float]
    borders: list[float]
    heights: NDArray[np.float64]
    f1: NDArray[np.float64]


def find_hidden(
    rows: Tensor,
    labels: Tensor,
    classes: Sequence[int],
    seed: int,
    min_rows: float,
) -> Hidden:
    """Hide the labels of some known classes, and find the classes again.

    The rows are whitened by the other known classes. The rows of the hidden classes and
    those without a label are together divided into many small clusters, which are
    merged one pair after the other, those that mix most first (:func:`merge_all`). Each
    merge is compared with the hidden classes. The mixing of two clusters says how many
    nearest neighbors they have in each other, see
    :func:`uno.clustering.neighbors.compute_mixing`.

    Args:
        rows: Rows (N, P), not yet whitened.
        labels: Their classes int64 (N,), or :data:`FREE` for a row without a label.
        classes: The classes to hide, not all of the known ones.
        seed: Seed of k-means.
        min_rows: The smallest number of rows with which a cluster can be a class.

    Returns:
        Four values. ``parts``: how much the two halves mix into which k-means divides
        each hidden class; a class with fewer than six rows, or fewer than three in a
        half, is left out. ``borders``: for each hidden class the mixing at the last
        merge of a cluster of which more than half of the rows are of this class with
        one of which they are not; merges of a cluster below ``min_rows`` do not count,
        and a class without such a merge is left out. ``heights``: the logarithm of the
        mixing of every merge, after it is clipped to the range from ``FLOOR`` (0.01) to
        ``CEILING`` (3); a merge of a cluster below ``min_rows`` counts as ``CEILING``.
        ``f1``: the mean F1
        of the hidden classes, see :func:`class_f1`, before the first and after every
        merge.
    """
    is_hidden = torch.isin(labels, torch.tensor(classes))
    others = labels.masked_fill(is_hidden, FREE)
    names, renamed = others[others != FREE].unique(return_inverse=True)
    rest = others.clone()
    rest[others != FREE] = renamed
    clustering, clusters = small_clusters(rows, rest, seed)
    num_clusters = len(names) + clustering.num_novel
    total = clusters[rest == FREE].bincount(minlength=num_clusters).numpy().copy()
    table = np.stack(
        [clusters[labels == c].bincount(minlength=num_clusters) for c in classes]
    )
    borders: dict[int, float] = {}
    heights, f1 = list[float](), [class_f1(table, total)]
    for first, second, mixed, num_rows in merge_all(clustering, clusters, min_rows):
        is_real = num_rows >= min_rows
        owns = 2 * table[:, [first, second]] > total[[first, second]]
        if is_real:
            borders |= {int(c): mixed for c in np.flatnonzero(owns.sum(axis=1) == 1)}
        for counts in (table.T, total):
            counts[first] += counts[second]
            counts[second] = 0
        heights.append(mixed if is_real else CEILING)
        f1.append(class_f1(table, total))
    smoothed = smooth_rows(
        clustering.points[clustering.clustered], clustering.neighbors
    )
    parts = [_halves_mixing(clustering, smoothed, labels == c, seed) for c in classes]
    return Hidden(
        [mixed for mixed in parts if mixed is not None],
        list(borders.values()),
        _log_mixing(heights),
        np.array(f1),
    )


def class_f1(table: NDArray[np.int64], totals: NDArray[np.int64]) -> float:
    """Return the mean F1 score of classes that are matched with clusters, 0-1.

    The F1 score of a class and a cluster is twice the number of their common rows,
    divided by the sum of the rows of the class and of the cluster. Each class is
    matched to one cluster so that the mean is largest. Too few clusters cost precision,
    because rows of other classes join. Too many clusters cost recall.

    Args:
        table: Number of rows of each class in each cluster, (C, K). With C above K only
            K classes are matched, and the mean is theirs.
        totals: Number of all rows in each cluster, (K,).
    """
    f1 = 2 * table / np.maximum(table.sum(axis=1, keepdims=True) + totals, 1)
    return float(f1[linear_sum_assignment(f1, maximize=True)].mean())


def shortest_interval(
    probabilities: NDArray[np.float64], level: float
) -> tuple[int, int]:
    """Return the shortest interval of numbers of classes that has a given probability.

    Args:
        probabilities: The probability (K,) of 2, 3, ... classes, of sum 1.
        level: The least probability of the interval, below 1.

    Returns:
        The smallest and the largest number of classes in the interval. Of several
        intervals of the same length, the most probable one is returned.
    """
    below = np.append(0.0, probabilities.cumsum())
    stops = np.searchsorted(below, below[:-1] + level - 1e-9)
    found = [
        (stop - start, below[start] - below[stop], start)
        for start, stop in enumerate(stops.tolist())
        if stop <= len(probabilities)
    ]
    length, _, start = min(found)
    return MIN_NOVEL + start, MIN_NOVEL + start + length - 1


@cache
def calibration() -> dict[str, Any]:
    """Read the stored calibration of the estimate, once in a process.

    Returns:
        ``source``: the command that wrote it; ``sets``: the names of the data sets on
        which the model was fitted; ``num_tasks``: the number of tasks that were made of
        them, each with a known number of novel classes; ``num_novel``: the smallest and
        the largest true number of these tasks;
        ``weights`` and ``intercept`` of the :class:`Model`; ``levels``: for "ncd" and
        for "gcd" the level at which the intervals hold at least 85 % of these tasks.
    """
    text = files("uno.clustering").joinpath(CALIBRATION_FILE).read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def stored_model(gcd: bool) -> Model:
    """Return the stored logistic model of the number of novel classes for a setting.

    The model turns the signs of :func:`signs_of` into the probability of each number of
    novel classes. Its weights and its intercept are the same in both settings.

    Args:
        gcd: Whether unlabeled rows can belong to known classes. It decides only the
            level, the least probability of the interval of the number.
    """
    found = calibration()
    level = found["levels"]["gcd" if gcd else "ncd"]
    return Model(found["weights"], found["intercept"], level)


def _spread(rows: Tensor, max_rows: int) -> Tensor:
    """Return at most ``max_rows`` evenly spaced rows, in their order."""
    if len(rows) <= max_rows:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, max_rows).long()]


def _log_mixing(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the logarithms of mixings, which say how much two clusters overlap.

    Mixings are first clipped to the range from ``FLOOR`` (0.01) to ``CEILING`` (3). See
    :func:`~uno.clustering.neighbors.compute_mixing`.
    """
    return np.log(np.clip(np.asarray(values, dtype=np.float64), FLOOR, CEILING))


def _halves_mixing(
    clustering: Clustering, smoothed: Tensor, members: Tensor, seed: int
) -> float | None:
    """Divide a class in two by k-means of smoothed rows; return the halves' mixing.

    Args:
        clustering: The rows, with the neighbors of those that are clustered.
        smoothed: The mean of each clustered row and its nearest neighbors, (n, P).
        members: Mask (N,) of the rows of the class. Those that are not clustered are
            ignored.
        seed: Seed of k-means.

    Returns:
        The mixing; None if the class has fewer than six clustered rows, or a half has
        fewer than three.
    """
    taking_part = members[clustering.clustered]
    if int(taking_part.sum()) < 6:
        return None
    groups = torch.zeros(len(smoothed), dtype=torch.int64)
    groups[taking_part] = 1 + kmeans(smoothed[taking_part], 2, 3, seed).assignment
    sizes = groups.bincount(minlength=3)
    if int(sizes[1:].min()) < 3:
        return None
    links = count_links(clustering.neighbors, groups, 3)
    return float(mixing_of_cluster(links, sizes, 1)[2])
