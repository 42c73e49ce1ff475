"""Cluster the features of a frozen encoder into known and novel classes.

The pipeline has four steps, and no label of a novel class takes part in it:

1. Features are scaled to length one, centered and projected to their leading principal
   directions. They are whitened by the covariance within the known classes
   (within-class covariance normalization, Hatch et al., Interspeech 2006): directions
   in which images of one known class vary say little about novel classes.
2. Each row is replaced by the mean of itself and its nearest neighbors.
3. k-means finds the clusters. In generalized category discovery the labeled rows are
   fixed to the clusters of their classes.
4. k-means prefers clusters of equal size. Where the known classes differ in size, more
   clusters are made than there are classes, and those that mix most are merged until
   the given number of novel classes is left (:func:`merge_clusters`).

How well the result can be trusted is estimated from how far other clusterings of the
same rows agree with it (:func:`measure_agreement` and :mod:`uno.expectation`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno.clustering.kmeans import FREE, kmeans, principal_components, seeded_kmeans
from uno.clustering.neighbors import (
    compute_mixing,
    count_links,
    find_neighbors,
    mixing_of_cluster,
    smooth_rows,
    spectral_coordinates,
)
from uno.data.images import with_every_class

MAX_DIRECTIONS = 256
MAX_FITTED_ROWS = 10_000  # rows from which the principal directions are computed
SHRINKAGE = 0.1  # share of the mean eigenvalue that is added to the covariance
NUM_STARTS = 10  # of k-means for the result
MAX_EXTRA = 2.0  # at most this many extra clusters for each novel class, before merging
EXTRA_PER_VARIATION = 2.0  # extra clusters for each novel class, per unit of variation
# unlabeled rows, on average, of clusters that are merged later
MIN_ROWS_PER_CLUSTER = 10
MAX_COMPARED_ROWS = 4_000  # unlabeled rows that other clusterings are compared on
NUM_COMPARED_STARTS = 3  # of k-means for each other clustering
NUM_HALVES = 2  # clusterings of a random half of the rows
MAX_SIMILAR_PAIRS = 100  # of novel classes, that are kept for the report
SMALL_FIRST = 1e3  # above every mixing, for clusters that merge first

KMEANS, SMOOTHED, SPECTRAL = "k-means", "smoothed k-means", "spectral clustering"


@dataclass(frozen=True)
class FeatureSpace:
    """An affine map of unit features: ``(unit(z) - mean) @ directions``.

    Attributes:
        mean: Mean (D,) of the unit features.
        directions: Directions (D, P).
    """

    mean: Tensor
    directions: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Map features (N, D) to coordinates in this space, float32 (N, P).

        Each row is scaled to length one first. The mean of the space is then
        subtracted, and the result multiplied by the directions. The coordinates are not
        scaled again.
        """
        return F.normalize(features.float(), dim=1).sub(self.mean) @ self.directions


@dataclass(frozen=True)
class FrozenClusters:
    """Clusters of frozen features.

    Attributes:
        space: The map to the coordinates in which rows are compared with the
            prototypes.
        prototypes: The directions (unit vectors) of the means of C_l known and then C_u
            novel classes, (C_l + C_u, P). A row is zero if its class has no rows, as
            can happen if there are fewer distinct rows than classes.
        agreement: The share of the unlabeled rows on which each of A other clusterings
            agrees with this one, (A,), in the order of :func:`measure_agreement`; empty
            if there were too few rows.
        similar: The at most 100 pairs of novel classes with the most neighbors in each
            other, float64 (n, 3), the most similar first: the indices of both among the
            novel classes, from 0, and their mixing, which is above 0
            (:func:`uno.clustering.neighbors.compute_mixing`).
    """

    space: FeatureSpace
    prototypes: Tensor
    agreement: Tensor
    similar: Tensor


def discover_clusters(
    labeled: Tensor,
    labels: Tensor,
    unlabeled: Tensor,
    num_novel: int,
    gcd: bool,
    seed: int,
) -> FrozenClusters:
    """Cluster features into known and novel classes, on the CPU, by all four steps.

    They are: whiten the rows within the known classes, average each with its nearest
    neighbors, cluster by k-means, and merge clusters if the known classes differ in
    size.

    Args:
        labeled: Features (N_l, D) of labeled rows. All tensors must be on the CPU.
        labels: The known classes of these rows, int64 (N_l,), 0 to C_l - 1. Each class
            has a row.
        unlabeled: Features (N_u, D) of unlabeled rows. N_u must be above C_u, or above
            C_l + C_u if ``gcd``.
        num_novel: Number of novel classes C_u. The result has exactly as many.
        gcd: Whether unlabeled rows can belong to known classes.
        seed: Seed of k-means, and of the random halves that two of the other
            clusterings see.

    Returns:
        The map to the whitened coordinates; the prototypes of all classes in them,
        which are unit means of rows that are whitened and scaled to length one, but not
        averaged with their neighbors; the share of unlabeled rows on which each of
        eight other clusterings agrees with this one, empty if there are too few rows,
        see :func:`measure_agreement`; and the pairs of novel classes that have the most
        nearest neighbors in each other, which may be parts of one class.
    """
    features = torch.cat([labeled, unlabeled])
    principal = fit_principal_space(features)
    rows = principal(features)
    known = F.pad(labels, (0, len(unlabeled)), value=FREE)
    white = fit_whitening(rows[: len(labels)], labels)
    clustering = Clustering.of(F.normalize(rows @ white, dim=1), known, num_novel, gcd)
    clusters = clustering.run(seed)
    return FrozenClusters(
        FeatureSpace(principal.mean, principal.directions @ white),
        cluster_means(clustering.points, clusters, clustering.num_classes),
        measure_agreement(clustering, rows, clusters, seed),
        clustering.similar_pairs(clusters),
    )


def fit_principal_space(features: Tensor) -> FeatureSpace:
    """Fit the map of features to their leading principal directions.

    At most ``MAX_FITTED_ROWS`` (10,000) evenly spaced rows are used for the fit.

    Args:
        features: Features (N, D), whose rows need not have length one.

    Returns:
        The map to coordinates (N, P), where P is the smaller of ``MAX_DIRECTIONS``
        (256) and D. It scales its input to length one, subtracts the mean of the rows
        of the fit and projects; it does not whiten.
    """
    step = -(-len(features) // MAX_FITTED_ROWS)
    rows = F.normalize(features[::step].float(), dim=1)
    directions = principal_components(rows)[2][:, :MAX_DIRECTIONS].float()
    return FeatureSpace(rows.mean(dim=0), directions)


def fit_whitening(rows: Tensor, labels: Tensor) -> Tensor:
    """Fit the matrix that whitens rows by the covariance within the known classes.

    Rows times this matrix have about the same variance in all directions within a
    class.

    Args:
        rows: Labeled rows (N, P).
        labels: The known classes of the rows, int64 (N,).

    Returns:
        A symmetric matrix, float32 (P, P): the inverse square root of the within-class
        covariance, to whose diagonal ``SHRINKAGE`` (0.1) times its mean eigenvalue was
        added.
    """
    member = F.one_hot(labels).double()
    rows = rows.double()
    means = member.T @ rows / member.sum(dim=0).clamp(min=1)[:, None]
    residuals = rows - means[labels]
    values, vectors = torch.linalg.eigh(residuals.T @ residuals / len(rows))
    values = values.clamp(min=0)
    scale = (values + SHRINKAGE * values.mean().clamp(min=1e-12)).rsqrt()
    return ((vectors * scale) @ vectors.T).float()


def size_variation(labels: Tensor) -> float:
    """Return the coefficient of variation of the sizes of the known classes.

    It is the standard deviation of their numbers of rows, divided by the mean: 0 for
    classes of equal size.

    Args:
        labels: Known classes int64 (N,), or ``FREE`` (-1) for unlabeled rows, which do
            not count.
    """
    sizes = labels[labels != FREE].bincount().double()
    return float(sizes.std(correction=0) / sizes.mean())


@dataclass(frozen=True)
class Clustering:
    """Labeled and unlabeled rows to cluster, with the neighbors that all steps share.

    Attributes:
        points: The rows, scaled to length one, (N, P).
        labels: The known class of each row int64 (N,), or ``FREE`` (-1) for unlabeled
            rows.
        num_novel: Number of novel classes C_u.
        gcd: Whether unlabeled rows can belong to known classes.
        clustered: Mask (N,) of the rows that are clustered: all rows in generalized
            category discovery, otherwise the unlabeled rows.
        neighbors: The k nearest neighbors of each clustered row among the n clustered
            rows, as their indices, int64 (n, k).
    """

    points: Tensor
    labels: Tensor
    num_novel: int
    gcd: bool
    clustered: Tensor
    neighbors: Tensor

    @classmethod
    def of(
        cls, points: Tensor, labels: Tensor, num_novel: int, gcd: bool
    ) -> "Clustering":
        """Prepare rows to be clustered, and find their nearest neighbors by cosine.

        At most 10 neighbors of each row are searched among the rows that are to be
        clustered. Nothing is clustered yet.

        Args:
            points: The labeled and unlabeled rows, scaled to length one, (N, P).
            labels: The known class of each row int64 (N,), or ``FREE`` (-1) for
                unlabeled rows.
            num_novel: Number of novel classes.
            gcd: Whether unlabeled rows can belong to known classes. If so, all rows are
                clustered, otherwise the unlabeled ones alone.
        """
        clustered = (labels == FREE) | gcd
        neighbors = find_neighbors(points[clustered])
        return cls(points, labels, num_novel, gcd, clustered, neighbors)

    @property
    def num_known(self) -> int:
        """Number of known classes C_l."""
        return int(self.labels.max()) + 1

    @property
    def num_classes(self) -> int:
        """Number of known and novel classes together, C_l + C_u."""
        return self.num_known + self.num_novel

    def partition(
        self, kind: str, num_novel: int, num_starts: int, seed: int
    ) -> Tensor:
        """Cluster the rows by k-means, without merging clusters afterwards.

        In generalized category discovery all rows are clustered, with the labeled rows
        fixed to their classes; otherwise the unlabeled rows alone.

        Args:
            kind: What k-means clusters: ``KMEANS`` ("k-means") the rows, ``SMOOTHED``
                ("smoothed k-means") the means of rows and their nearest neighbors,
                ``SPECTRAL`` ("spectral clustering") the spectral coordinates of the
                rows in the neighbor graph. These are as many as the clusters of
                k-means: ``num_novel``, and the C_l known ones if ``gcd``.
            num_novel: Number of novel clusters to find, which may differ from that of
                this object.
            num_starts: Number of starts of k-means, of which the best counts.
            seed: Seed of k-means.

        Returns:
            The cluster of each row, int64 (N,). The first C_l clusters are the known
            classes: they hold the labeled rows, and unlabeled rows only if ``gcd``. The
            novel clusters follow.
        """
        rows, labels = self.points[self.clustered], self.labels[self.clustered]
        num_clusters = num_novel + (self.num_known if self.gcd else 0)
        if kind == SMOOTHED:
            rows = smooth_rows(rows, self.neighbors)
        elif kind == SPECTRAL:
            rows = spectral_coordinates(self.neighbors, num_clusters)
        clusters = self.labels.clone()
        if self.gcd:
            result = seeded_kmeans(rows, labels, num_clusters, num_starts, seed)
            clusters[:] = result.assignment
        else:
            result = kmeans(rows, num_clusters, num_starts, seed)
            clusters[self.clustered] = self.num_known + result.assignment
        return clusters

    def run(self, seed: int, num_starts: int = NUM_STARTS) -> Tensor:
        """Cluster the rows by the whole pipeline: smoothing, k-means and merging.

        The number of novel clusters before merging grows with the variation of the
        known classes' sizes, up to three times ``num_novel``. It exceeds ``num_novel``
        only as far as there are on average ``MIN_ROWS_PER_CLUSTER`` (10) unlabeled rows
        for each of these clusters. Merging then leaves ``num_novel`` novel clusters.

        Args:
            seed: Seed of k-means.
            num_starts: Number of starts of k-means, of which the best counts.

        Returns:
            The cluster of each row, int64 (N,), 0 to C_l + C_u - 1: the known classes
            first, then the novel clusters.
        """
        extra = min(MAX_EXTRA, EXTRA_PER_VARIATION * size_variation(self.labels))
        num_free = int((self.labels == FREE).sum())
        most = max(self.num_novel, num_free // MIN_ROWS_PER_CLUSTER)
        num_start = min(round((1 + extra) * self.num_novel), most)
        clusters = self.partition(SMOOTHED, num_start, num_starts, seed)
        return self.merged(clusters, num_start - self.num_novel)

    def merged(self, clusters: Tensor, num_merges: int) -> Tensor:
        """Merge clusters pair by pair: first those without rows, then by their mixing.

        The mixing of two clusters is how many nearest neighbors their rows have in each
        other, relative to a random division of these rows
        (:func:`uno.clustering.neighbors.compute_mixing`). The pair that mixes most
        merges first. A novel cluster without rows has no mixing. It merges before all
        others, into a cluster with rows and a lower number. Two clusters of known
        classes are never merged, see :func:`merge_clusters`. In generalized category
        discovery a novel cluster can merge into a known class, otherwise only into
        another novel cluster.

        Args:
            clusters: The cluster of each row, int64 (N,). There are ``num_merges`` more
                clusters than known and novel classes.
            num_merges: Number of merges.

        Returns:
            The cluster of each row after all merges, int64 (N,), 0 to C_l + C_u - 1. It
            is ``clusters`` itself if ``num_merges`` is 0; otherwise ``clusters`` is not
            changed.
        """
        if not num_merges:
            return clusters
        num_clusters = self.num_classes + num_merges
        links, sizes = self.links_and_sizes(clusters, num_clusters)
        means = cluster_means(self.points, clusters, num_clusters)
        return merge_clusters(
            links, sizes, means @ means.T, self.num_known, num_merges
        )[clusters]

    def links_and_sizes(
        self, clusters: Tensor, num_clusters: int
    ) -> tuple[Tensor, Tensor]:
        """Count the nearest neighbors between clusters, and the rows of each cluster.

        In generalized category discovery all rows count, otherwise the unlabeled ones.

        Args:
            clusters: The cluster of each row, int64 (N,), 0 to K - 1.
            num_clusters: Number of clusters K.

        Returns:
            Two int64 tensors. The first, (K, K), has at (a, b) how many nearest
            neighbors of the rows of cluster a are in cluster b. The second has the
            number of rows of each cluster, (K,).
        """
        clusters = clusters[self.clustered]
        sizes = clusters.bincount(minlength=num_clusters)
        return count_links(self.neighbors, clusters, num_clusters), sizes

    def subset(self, chosen: Tensor) -> "Clustering":
        """Return the same task for a part of the rows, with neighbors among these.

        The neighbors are searched anew. The result is this object itself if all rows
        are chosen.

        Args:
            chosen: Indices of the rows to keep, int64 (n,), in ascending order.
        """
        if len(chosen) == len(self.labels):
            return self
        return Clustering.of(
            self.points[chosen], self.labels[chosen], self.num_novel, self.gcd
        )

    def similar_pairs(self, clusters: Tensor) -> Tensor:
        """Return the pairs of novel clusters that mix most, by nearest neighbors.

        Such pairs may be parts of one class. Nothing is merged.

        Args:
            clusters: The cluster of each row, int64 (N,), 0 to C_l + C_u - 1, the known
                classes first.

        Returns:
            float64 (n, 3), at most ``MAX_SIMILAR_PAIRS`` (100) pairs, the most similar
            first: the indices of both among the novel clusters, and their mixing, which
            is above 0. The mixing is the number of nearest neighbors that they have in
            each other, divided by the number expected if the rows of both were divided
            at random.
        """
        mixed = compute_mixing(*self.links_and_sizes(clusters, self.num_classes))[
            self.num_known :, self.num_known :
        ].triu(1)
        order = mixed.flatten().argsort(descending=True)[:MAX_SIMILAR_PAIRS]
        first, second = order // self.num_novel, order % self.num_novel
        pairs = torch.stack([first, second, mixed[first, second]], dim=1)
        return pairs[pairs[:, 2] > 0]


class Merge(NamedTuple):
    """A merge of two clusters.

    Attributes:
        first: The cluster that remains, with the rows of both. It has the lower number.
        second: The other cluster, whose number is not used again.
        closeness: The mixing of the two, plus 1e-6 times the cosine of the means that
            the clusters of these numbers had before any merge.
        num_rows: Number of rows of the smaller of the two, before they merge.
    """

    first: int
    second: int
    closeness: float
    num_rows: int


def merge_pairs(
    links: Tensor, sizes: Tensor, cosines: Tensor, can_merge: Tensor, min_rows: float
) -> Iterator[Merge]:
    """Merge two clusters again and again, those that mix most first.

    The mixing of two clusters is the number of nearest neighbors that they have in each
    other, relative to a random division of their rows, see
    :func:`uno.clustering.neighbors.compute_mixing`. It is computed anew for a merged
    cluster. To break ties, 1e-6 times the cosine of the clusters' means is added, which
    orders the pairs with a mixing of 0. Pairs of which one cluster has less than
    ``min_rows`` rows merge before all others.

    Args:
        links: At (a, b) the number of nearest neighbors of the rows of cluster a that
            are in cluster b, (K, K), of :func:`uno.clustering.neighbors.count_links`.
        sizes: Number of rows of each cluster, (K,).
        cosines: Cosines of the clusters' means, (K, K). Merges do not update them.
        can_merge: At (a, b) with a < b whether cluster b may merge into cluster a, bool
            (K, K). Other entries do not count.
        min_rows: Number of rows from which on clusters merge in the order of their
            mixing.

    Yields:
        The merges, until no pair is left that may merge. A merged cluster keeps the
        number and the permissions of the first one. The arguments are not changed.
    """
    links, sizes = links.clone(), sizes.clone()
    tie_breaker = 1e-6 * cosines.double()
    is_small = sizes < min_rows
    priority = compute_mixing(links, sizes) + tie_breaker
    priority += SMALL_FIRST * (is_small[:, None] | is_small)
    priority[~can_merge.triu(1)] = -torch.inf
    while True:
        first, second = divmod(int(priority.argmax()), len(sizes))
        if priority[first, second] == -torch.inf:
            return
        closeness = mixing_of_cluster(links, sizes, first) + tie_breaker[first]
        num_rows = int(min(sizes[first], sizes[second]))
        yield Merge(first, second, float(closeness[second]), num_rows)
        for sums in (links, links.T, sizes):
            sums[first] += sums[second]
            sums[second] = 0
        priority[second] = priority[:, second] = -torch.inf
        closeness = mixing_of_cluster(links, sizes, first) + tie_breaker[first]
        closeness += SMALL_FIRST * ((sizes < min_rows) | (sizes[first] < min_rows))
        for pairs in (priority[first], priority[:, first]):
            pairs.copy_(closeness.where(pairs > -torch.inf, -torch.inf))


def merge_clusters(
    links: Tensor, sizes: Tensor, cosines: Tensor, num_known: int, num_merges: int
) -> Tensor:
    """Merge ``num_merges`` pairs of clusters, those that mix most first.

    The order is that of :func:`merge_pairs`, with empty clusters first. A novel cluster
    merges into a known or a novel one of a lower number that has rows. Two known
    clusters never merge.

    Args:
        links: Numbers of nearest neighbors between clusters, (K, K), as in
            :func:`merge_pairs`.
        sizes: Number of rows of each cluster, (K,).
        cosines: Cosines of the clusters' means, (K, K).
        num_known: Number of clusters of known classes, which come first.
        num_merges: Number of merges, less than the number of novel clusters.

    Returns:
        For each of the K clusters the cluster that contains it at the end, int64 (K,).
        A merged pair takes the place of the cluster with the lower number. The
        remaining clusters are numbered from 0 in the same order, without a gap. The
        arguments are not changed.
    """
    target = torch.arange(len(sizes))
    can_merge = (sizes > 0)[:, None] & (target >= num_known)
    merges = merge_pairs(links, sizes, cosines, can_merge, min_rows=1)
    for merge in islice(merges, num_merges):
        target[target == merge.second] = merge.first
    return target.unique(return_inverse=True)[1]


def cluster_means(rows: Tensor, clusters: Tensor, num_clusters: int) -> Tensor:
    """Return the mean of the rows of each cluster, scaled to length one.

    Args:
        rows: Rows (N, P).
        clusters: The cluster of each row, int64 (N,), 0 to K - 1.
        num_clusters: Number of clusters K.

    Returns:
        (K, P). It is zero for an empty cluster.
    """
    sums = torch.zeros(num_clusters, rows.shape[1]).index_add_(0, clusters, rows)
    return F.normalize(sums, dim=1)


def find_correct_rows(truth: Tensor, clusters: Tensor, num_classes: int) -> Tensor:
    """Return which rows are in the cluster that is matched with their true class.

    Clusters are matched one to one with classes by the Hungarian algorithm, so that as
    many rows as possible are correct.

    Args:
        truth: The true class of each row, int64 (N,), 0 to ``num_classes`` - 1.
        clusters: The cluster of each row, int64 (N,), 0 to ``num_classes`` - 1.
        num_classes: Number of classes, which is also that of clusters.

    Returns:
        Mask, bool (N,).
    """
    pairs = truth * num_classes + clusters
    counts = torch.bincount(pairs, minlength=num_classes**2)
    counts = counts.unflatten(0, (num_classes, num_classes))
    class_of_cluster = linear_sum_assignment(counts.T.numpy(), maximize=True)[1]
    return torch.from_numpy(class_of_cluster)[clusters] == truth


def measure_agreement(
    clustering: Clustering, rows: Tensor, clusters: Tensor, seed: int
) -> Tensor:
    """Measure how far other clusterings of the same rows agree with given clusters.

    There are A = 8 other clusterings, in this order. The first three are of the rows
    before whitening, scaled to length one: k-means; smoothed k-means, which is k-means
    of the means of each row and its nearest neighbors; and spectral clustering of the
    neighbor graph. The next two are k-means and spectral clustering of the whitened
    rows. The sixth is :meth:`Clustering.run` (smoothed k-means, into more clusters that
    are merged if the known classes differ in size) with another seed. Each of the last
    two is the same on the labeled rows and a random half of the unlabeled rows, drawn
    independently, after which all unlabeled rows go to the mean with the largest
    cosine, see :func:`cluster_without_half`. In generalized category discovery all of
    them keep the labeled rows in the clusters of their classes.

    At most ``MAX_COMPARED_ROWS`` (4,000) labeled and as many unlabeled rows, evenly
    spaced, are clustered, and one labeled row of each known class that would have none.
    The given and the other clusters are compared on the unlabeled ones of these rows.

    Args:
        clustering: The rows, whitened within the known classes, with their labels.
        rows: The same rows before whitening, (N, P).
        clusters: The clusters to compare with: the cluster of each row, int64 (N,), 0
            to C_l + C_u - 1.
        seed: Seed of k-means and of the random halves.

    Returns:
        For each of the A other clusterings the share of the compared unlabeled rows on
        which it agrees, 0 to 1, under the best one-to-one matching of clusters; float64
        (A,). The result is empty if the compared unlabeled rows are fewer than 2 (C_l +
        C_u + 1): a half of them would not be more than the classes.
    """
    chosen = _sample(clustering.labels, MAX_COMPARED_ROWS)
    whitened, clusters = clustering.subset(chosen), clusters[chosen]
    labels, num_novel = whitened.labels, whitened.num_novel
    free = labels == FREE
    if int(free.sum()) < 2 * (whitened.num_classes + 1):
        return torch.empty(0)
    plain = Clustering.of(
        F.normalize(rows[chosen], dim=1), labels, num_novel, whitened.gcd
    )
    starts = NUM_COMPARED_STARTS
    others = [
        plain.partition(kind, num_novel, starts, seed)
        for kind in (KMEANS, SMOOTHED, SPECTRAL)
    ]
    others += [
        whitened.partition(kind, num_novel, starts, seed) for kind in (KMEANS, SPECTRAL)
    ]
    others.append(whitened.run(seed + 1, starts))
    others += [
        cluster_without_half(whitened, seed + half) for half in range(NUM_HALVES)
    ]
    num_classes = whitened.num_classes
    shares = [
        find_correct_rows(clusters[free], other[free], num_classes).double().mean()
        for other in others
    ]
    return torch.stack(shares)


def cluster_without_half(clustering: Clustering, seed: int) -> Tensor:
    """Cluster without a random half of the unlabeled rows, then assign all of them.

    All labeled rows are kept. :meth:`Clustering.run` clusters them with the other half,
    which has one row less if the number of unlabeled rows is odd.
    Afterwards every unlabeled row of both halves is assigned to the cluster whose mean
    has the largest cosine with it. If unlabeled rows cannot belong to known classes,
    the clusters of these are excluded.

    Args:
        clustering: The labeled and unlabeled rows to cluster.
        seed: The seed of the half and of k-means.

    Returns:
        The cluster int64 (N,) of each row. A labeled row has its class.
    """
    labels, points = clustering.labels, clustering.points
    free = (labels == FREE).nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    half = free[torch.randperm(len(free), generator=generator)[: len(free) // 2]]
    part = clustering.subset(
        torch.cat([(labels != FREE).nonzero().flatten(), half]).sort().values
    )
    clusters = part.run(seed, NUM_COMPARED_STARTS)
    cosines = points @ cluster_means(part.points, clusters, part.num_classes).T
    if not clustering.gcd:
        cosines[:, : clustering.num_known] = -torch.inf
    return torch.where(labels == FREE, cosines.argmax(dim=1), labels)


def _sample(labels: Tensor, max_rows: int) -> Tensor:
    """Choose evenly spaced labeled rows, and evenly spaced unlabeled rows.

    A row is added of each known class that would have none.

    Args:
        labels: The known class of each row int64 (N,), or ``FREE`` (-1) for unlabeled
            rows.
        max_rows: The largest number of evenly spaced rows of each of the two kinds.

    Returns:
        The indices of the chosen rows, int64 (n,), in ascending order.
    """
    kinds = ((labels != FREE).nonzero().flatten(), (labels == FREE).nonzero().flatten())
    spaced = [rows[:: -(-len(rows) // max_rows)] for rows in kinds]
    chosen = torch.cat(spaced).sort().values
    return torch.from_numpy(with_every_class(chosen.numpy(), labels.numpy()))
