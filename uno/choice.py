"""Classes of frozen features by the clustering that finds known classes best when they are hidden.

A candidate is a space and a partition. Spaces: unit features around their mean in the leading principal
directions, as they are or whitened by the covariance within the known classes (within-class covariance
normalization, Hatch et al., Interspeech 2006): what varies among images of one known class says little about
new ones. Partitions: k-means of the rows, of the means of rows and their nearest neighbors, or of spectral
coordinates of the neighbor graph. Known classes are hidden in turn, every candidate is scored by the rows of
the hidden ones, and no label of a new class takes part. So small are the differences that few hidden classes
show nothing: another candidate than :data:`SAFE` must beat it by more than :data:`ERRORS` standard errors.

If more new classes are asked for than there are, clusters divide classes; if their sizes differ much, those
of large ones do even at the right number. New clusters that mix, as rows of one are neighbors of rows of the
other, are joined, and outputs stay empty: from that mixing on which finds hidden known classes best, down to
half of the number, as it is learned from few classes.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from scipy.special import stdtrit
from torch import Tensor

from uno.clustering import FREE, kmeans, principal_components, seeded_kmeans
from uno.neighbors import links, mixing, smoothed, spectral

MAX_DIRECTIONS = 256
MAX_FITTED = 10_000  # rows that principal directions are computed from
MAX_HIDDEN_ROWS = 3_000  # of a draw, in training and hidden
MIN_KNOWN = 4  # classes; of fewer none can be hidden
DRAWS = 6
STARTS, DRAW_STARTS = 10, 3  # of k-means: of the result, and of a draw
SHRINKAGE = 0.1
ERRORS = 2.0  # as draws share their classes, one is exceeded too often
LEVEL = 0.95  # of Student's t to either side: nine tenths
TOO_MANY = 1.5  # times the hidden classes are asked for as well
LIMITS = (*(i / 50 for i in range(1, 50)), math.inf)  # of the mixing of clusters that are not joined
FEWEST = 0.5  # of the new clusters that are asked for, and two, are left
CARE = 0.75  # how far to the highest of limits that are as good
ROUNDING = 1e-9  # between accuracies that are the same
OTHERS = 0.01  # of m (1 - m), the variance that draws from the same known classes do not show


class Candidate(NamedTuple):
    """How rows become clusters; ``shrinkage`` of the covariance within classes, None: no whitening."""

    partition: str
    shrinkage: float | None

    def __str__(self) -> str:
        space = "features as they are" if self.shrinkage is None else "features whitened within known classes"
        return f"{self.partition} of {space}"


KMEANS, SMOOTHED, SPECTRAL = "k-means", "smoothed k-means", "spectral clustering"
CANDIDATES = tuple(
    Candidate(partition, shrinkage)
    for partition in (SMOOTHED, KMEANS, SPECTRAL)
    for shrinkage in (SHRINKAGE, None)
)
SAFE = 0
"""The best mean over hidden known classes of five sets: docs/results/choice.md."""
PLAIN = CANDIDATES.index(Candidate(KMEANS, None))


class Choice(NamedTuple):
    """What hidden known classes say, of D draws; without any, ``candidate`` is :data:`SAFE`."""

    candidate: int
    scores: Tensor  # (D, candidates) share of unlabeled rows that are right
    new: Tensor  # (D, candidates) share of the hidden classes' rows
    num_hidden: int  # classes of a draw
    joined: Tensor = torch.zeros(0)  # (D,) or none: as ``new`` of the candidate, where clusters are joined

    def expected(self) -> tuple[float, float, float] | None:
        """Accuracy on new classes, mean m and interval of nine tenths for other classes; 0-1. Its width held
        nine tenths where known classes played new ones: docs/results/choice.md.
        """
        own = self.joined if len(self.joined) else self.new[:, self.candidate]
        if len(own) < 2:
            return None
        mean, num = float(own.mean()), len(own)
        variance = float(own.var()) * (1 + 1 / num) + OTHERS * mean * (1 - mean)
        half = float(stdtrit(num - 1, LEVEL)) * math.sqrt(variance)
        return mean, max(0.0, mean - half), min(1.0, mean + half)


class Space(NamedTuple):
    """``unit(z) -> (unit(z) - mean) @ directions``, (N, D) -> (N, P)."""

    mean: Tensor  # (D,)
    directions: Tensor  # (D, P)

    def __call__(self, features: Tensor) -> Tensor:
        """The coordinates of features."""
        return F.normalize(features.float(), dim=1).sub(self.mean) @ self.directions


def principal_space(features: Tensor) -> Space:
    """The leading principal directions of the unit features (N, D)."""
    rows = F.normalize(features[:: -(-len(features) // MAX_FITTED)].float(), dim=1)
    directions = principal_components(rows)[2][:, :MAX_DIRECTIONS].float()
    return Space(rows.mean(dim=0), directions)


def whitener(rows: Tensor, labels: Tensor, shrinkage: float | None) -> Tensor:
    """(P, P): the inverse root of the covariance within classes of rows (N, P), ``labels`` (N,), plus
    ``shrinkage`` times its mean eigenvalue; the identity for None.
    """
    if shrinkage is None:
        return torch.eye(rows.shape[1])
    member = F.one_hot(labels).double()
    rows = rows.double()
    rest = rows - (member.T @ rows / member.sum(dim=0).clamp(min=1)[:, None])[labels]
    values, vectors = torch.linalg.eigh(rest.T @ rest / len(rest))
    values = values.clamp(min=0)
    scale = (values + shrinkage * values.mean().clamp(min=1e-12)).rsqrt()
    return ((vectors * scale) @ vectors.T).float()


def partition_of(
    rows: Tensor, labels: Tensor, num_clusters: int, gcd: bool, kind: str, starts: int, seed: int
) -> Tensor:
    """Clusters int64 (N_u,) of the unlabeled rows: unit ``rows`` (N, P) with ``labels`` (N,), or FREE. In a
    ``gcd`` set of K = C_l + C_u, and labeled rows stay in their class; else of K = C_u.
    """
    free = labels == FREE
    rows = rows if gcd else rows[free]
    if kind == SMOOTHED:
        rows = smoothed(rows)
    elif kind == SPECTRAL:
        rows = spectral(rows, num_clusters)
    if not gcd:
        return kmeans(rows, num_clusters, starts, seed).assignment
    return seeded_kmeans(rows, labels, num_clusters, starts, seed).assignment[free]


def means(rows: Tensor, clusters: Tensor, num: int) -> Tensor:
    """Directions (K, P) of the means of clusters (N,) of rows (N, P); zero where one is empty."""
    return F.normalize(torch.zeros(num, rows.shape[1]).index_add_(0, clusters, rows), dim=1)


def clusters_by(
    rows: Tensor, labels: Tensor, num_novel: int, gcd: bool, candidate: Candidate, starts: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows (N, P) in the principal space, ``labels`` (N,) or FREE: the whitener (P, P), unit rows in its
    space, and their clusters (N,), of which known ones come first and hold the labeled rows.
    """
    labeled, num_known = labels != FREE, int(labels.max()) + 1
    white = whitener(rows[labeled], labels[labeled], candidate.shrinkage)
    rows = F.normalize(rows @ white, dim=1)
    num, first = (num_known + num_novel, 0) if gcd else (num_novel, num_known)
    found = labels.clone()
    found[~labeled] = first + partition_of(rows, labels, num, gcd, candidate.partition, starts, seed)
    return white, rows, found


def prototypes(
    rows: Tensor, labels: Tensor, num_novel: int, gcd: bool, candidate: Candidate, starts: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The whitener (P, P) of :func:`clusters_by` and prototypes (C_l + C_u, P), known ones first."""
    white, rows, found = clusters_by(rows, labels, num_novel, gcd, candidate, starts, seed)
    return white, means(rows, found, int(labels.max()) + 1 + num_novel)


def find(
    labeled: Tensor, labels: Tensor, unlabeled: Tensor, num_novel: int, gcd: bool, seed: int
) -> tuple[Choice, Space, Tensor]:
    """What is chosen for features (N_l, D) with ``labels`` (N_l,) and (N_u, D), on the CPU, the space of the
    choice and its prototypes (C_l + C_u, P), zero where clusters were joined.
    """
    features = torch.cat([labeled, unlabeled])
    space = principal_space(features)
    rows, known = space(features), F.pad(labels, (0, len(unlabeled)), value=FREE)
    choice, limit = decided(rows[: len(labels)], labels, num_novel, gcd, seed)
    white, found = joined_prototypes(rows, known, num_novel, gcd, CANDIDATES[choice.candidate], limit, seed)
    return choice, Space(space.mean, space.directions @ white), found


def decided(rows: Tensor, labels: Tensor, num_novel: int, gcd: bool, seed: int) -> tuple[Choice, float]:
    """What hidden ones of the known classes (N_l,) of rows (N_l, P) say: the candidate by :func:`choose`, and
    how much its new clusters may mix.
    """
    choice = choose(rows, labels, num_novel, gcd, seed)
    limit, new = mixing_limit(rows, labels, num_novel, gcd, CANDIDATES[choice.candidate], seed)
    return choice if limit == math.inf else choice._replace(joined=new), limit


def joined_prototypes(
    rows: Tensor, labels: Tensor, num_novel: int, gcd: bool, candidate: Candidate, limit: float, seed: int
) -> tuple[Tensor, Tensor]:
    """:func:`prototypes` of the result: of clusters that mix more than ``limit`` one is left, and of the new
    ones not fewer than :data:`FEWEST`.
    """
    num_known = int(labels.max()) + 1
    white, rows, found = clusters_by(rows, labels, num_novel, gcd, candidate, STARTS, seed)
    num = num_known + num_novel
    if limit < math.inf:
        most = num_novel - max(min(num_novel, 2), math.ceil(FEWEST * num_novel))
        made = joins(*linked(rows, labels, found, num, gcd), num_known, limit)
        *_, becomes = islice(made, most + 1)
        found = becomes[1][found]
    return white, means(rows, found, num)


def linked(rows: Tensor, labels: Tensor, found: Tensor, num: int, gcd: bool) -> tuple[Tensor, Tensor]:
    """Links (K, K) and sizes (K,) of clusters ``found`` (N,); labeled rows count in a ``gcd`` set alone."""
    own = (labels == FREE) | gcd
    return links(rows[own], found[own], num), found[own].bincount(minlength=num)


def joins(counts: Tensor, sizes: Tensor, num_known: int, limit: float = 0) -> Iterator[tuple[float, Tensor]]:
    """What every one of K clusters is, (K,): at first itself, then after each join, with how much the two
    mixed. Of those that mix most, by links ``counts`` (K, K) and ``sizes`` (K,), the later one, which is new,
    joins the other, as long as they mix more than ``limit``.
    """
    counts, sizes, becomes = counts.clone(), sizes.clone(), torch.arange(len(sizes))
    yield math.inf, becomes
    while True:
        pairs = mixing(counts, sizes).triu(1)
        pairs[:, :num_known] = 0
        first, second = divmod(int(pairs.argmax()), len(sizes))
        if (most := float(pairs[first, second])) <= limit:
            return
        becomes = becomes.masked_fill(becomes == second, first)
        for sums in (counts, counts.T, sizes):
            sums[first] += sums[second]
            sums[second] = 0
        yield most, becomes


def mixing_limit(
    rows: Tensor, labels: Tensor, num_novel: int, gcd: bool, candidate: Candidate, seed: int
) -> tuple[float, Tensor]:
    """How much new clusters may mix, by hidden ones of the known classes (N_l,) of rows (N_l, P) in the
    principal space, and what is right of the hidden classes' rows in D draws with it, (D,). Of
    :data:`LIMITS` the one with the best accuracy and balanced accuracy, in the mean of draws with as many new
    clusters as there are and with :data:`TOO_MANY` times as many; of several that are as good rather a high
    one, as a class that is lost is worse than one in two parts. Where their number is right the mean may not
    be lower than without, and all in all it is higher by more than :data:`ERRORS` standard errors; else inf.
    """
    found = list[Tensor]()
    for own, seen, truth in _hidden(rows, labels, hidden_draws(int(labels.max()) + 1, num_novel, seed), gcd):
        num_known = int(seen.max()) + 1
        num_new = int(truth.max()) + 1 - num_known
        asked = num_new, round(TOO_MANY * num_new)
        if int((seen == FREE).sum()) > num_known + max(asked):
            scores = [_joined_scores(own, seen, truth, num, gcd, candidate, seed) for num in asked]
            found.append(torch.tensor(scores, dtype=torch.float64))
    if len(found) < 2:
        return math.inf, torch.empty(0)
    made = torch.stack(found)  # (D, right or too many, limits, accuracy: all, balanced, new)
    gain = made[..., :2].mean(dim=3) - made[:, :, -1:, :2].mean(dim=3)
    mean, error = gain.mean(dim=(0, 1)), gain.mean(dim=1).std(dim=0) / math.sqrt(len(gain))
    sure = (gain[:, 0].mean(dim=0) > -ROUNDING) & (mean > ERRORS * error + ROUNDING)
    if not sure.any():
        return math.inf, made[:, 0, -1, 2]
    is_best = (sure & (mean > mean[sure].max() - ROUNDING)).tolist()
    first = last = len(LIMITS) - 1 - is_best[::-1].index(True)
    while is_best[first - 1]:
        first -= 1
    return CARE * LIMITS[last] + (1 - CARE) * LIMITS[first], made[:, 0, last, 2]


def _joined_scores(
    rows: Tensor, labels: Tensor, truth: Tensor, num_new: int, gcd: bool, candidate: Candidate, seed: int
) -> list[list[float]]:
    """With each of :data:`LIMITS`, where ``num_new`` clusters are asked for: by strict matching the share of
    unlabeled rows that is right and the mean recall of hidden classes; by one matching the share of their
    rows.
    """
    free, num_known, total = labels == FREE, int(labels.max()) + 1, int(truth.max()) + 1
    num = num_known + num_new
    _, unit, found = clusters_by(rows, labels, num_new, gcd, candidate, DRAW_STARTS, seed)
    steps = list(joins(*linked(unit, labels, found, num, gcd), num_known))
    truth, found = truth[free], found[free]
    sizes, scores = truth.bincount(minlength=total), dict[int, list[float]]()
    lowest = np.minimum.accumulate([most for most, _ in steps])
    taken = [max(1, int((lowest > limit).sum())) for limit in LIMITS]
    for number in {*taken}:
        outputs = steps[number - 1][1][found]
        right = strictly_matched(truth, outputs, num_known).double()
        recall = torch.zeros(total).double().index_add_(0, truth, right) / sizes.clamp(min=1)
        new = matched(truth, outputs, max(num, total))[truth >= num_known].double()
        scores[number] = [float(values.mean()) for values in (right, recall[num_known:], new)]
    return [scores[number] for number in taken]


def hidden_draws(num_known: int, num_novel: int, seed: int) -> list[list[int]]:
    """Classes to hide, as many as there are new ones but at most half: every class before one is hidden
    again. None of fewer than ``MIN_KNOWN`` classes.
    """
    size, random = max(2, min(num_novel, num_known // 2)), np.random.default_rng(seed)
    draws = list[list[int]]()
    while num_known >= MIN_KNOWN and len(draws) < DRAWS:
        order = random.permutation(num_known).tolist()
        draws += [sorted(order[i : i + size]) for i in range(0, num_known - size + 1, size)]
    return draws[:DRAWS]


def choose(rows: Tensor, labels: Tensor, num_novel: int, gcd: bool, seed: int) -> Choice:
    """The candidate for rows (N_l, P) of known classes (N_l,) in the principal space, by hidden ones; where
    the setting is ``gcd`` half of the rows of the other classes are among the unlabeled rows, too.
    """
    num_known = int(labels.max()) + 1
    draws = hidden_draws(num_known, num_novel, seed)
    scores = [_scores(*draw, gcd, seed) for draw in _hidden(rows, labels, draws, gcd)]
    num_hidden = len(draws[0]) if draws else 0
    shape = (-1, len(CANDIDATES))
    right, new = (torch.tensor([one[part] for one in scores]).reshape(shape) for part in (0, 1))
    return decide(right, new, num_hidden)


def decide(right: Tensor, new: Tensor, num_hidden: int) -> Choice:
    """The candidate by ``right``, (D, candidates), with what :class:`Choice` keeps."""
    gain = right - right[:, SAFE : SAFE + 1]
    if len(gain) < 2:
        return Choice(SAFE, right, new, num_hidden)
    error = gain.std(dim=0) / math.sqrt(len(gain))
    sure = torch.where(gain.mean(dim=0) > ERRORS * error, gain.mean(dim=0), 0)
    return Choice(int(sure.argmax()) if float(sure.max()) > 0 else SAFE, right, new, num_hidden)


def _hidden(
    rows: Tensor, labels: Tensor, draws: list[list[int]], gcd: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each draw rows, what is known of them (or FREE) and their classes, hidden ones last."""
    for hidden in draws:
        is_hidden = torch.isin(labels, torch.tensor(hidden))
        order = [c for c in range(int(labels.max()) + 1) if c not in hidden] + hidden
        truth = torch.tensor(order).argsort()[labels]
        chosen = torch.arange(len(rows))[:: -(-len(rows) // MAX_HIDDEN_ROWS)]
        free = is_hidden[chosen]
        if gcd:
            member = F.one_hot(labels[chosen])  # every second row of a class: the first keeps its label
            free = free | ((member.cumsum(dim=0) * member).sum(dim=1) % 2 == 0)
        seen = truth[chosen].masked_fill(free, FREE)
        if len(seen[seen != FREE].unique()) == len(order) - len(hidden):
            yield rows[chosen], seen, truth[chosen]


def _scores(
    rows: Tensor, labels: Tensor, truth: Tensor, gcd: bool, seed: int
) -> tuple[list[float], list[float]]:
    """Of every candidate the share of unlabeled rows, and of rows of hidden classes, that is right."""
    free, num_known, num = labels == FREE, int(labels.max()) + 1, int(truth.max()) + 1
    hidden, truth = truth[free] >= num_known, truth[free]
    scores, new = list[float](), list[float]()
    for candidate in CANDIDATES:
        white, found = prototypes(rows, labels, num - num_known, gcd, candidate, DRAW_STARTS, seed)
        cosines = (rows[free] @ white) @ found.T
        if not gcd:
            cosines[:, :num_known] = -torch.inf
        right = matched(truth, cosines.argmax(dim=1), num)
        scores.append(float(right.float().mean()))
        new.append(float(right[hidden].float().mean()))
    return scores, new


def matched(truth: Tensor, found: Tensor, num: int) -> Tensor:
    """Which rows are right, bool (N,), under the best matching of ``num`` classes and clusters, (N,) each."""
    counts = torch.bincount(truth * num + found, minlength=num * num).unflatten(0, (num, num))
    classes = linear_sum_assignment(counts.T.numpy(), maximize=True)[1]
    return torch.from_numpy(classes)[found] == truth


def strictly_matched(truth: Tensor, found: Tensor, num_known: int) -> Tensor:
    """Which rows are right, bool (N,), where known clusters stand for known classes, and only new ones are
    matched, with new classes: else a class that is lost among known ones would count as found.
    """
    right, new = (truth == found) & (truth < num_known), (truth >= num_known) & (found >= num_known)
    if new.any():
        truth, found = truth[new] - num_known, found[new] - num_known
        right[new] = matched(truth, found, 1 + int(max(truth.max(), found.max())))
    return right
