"""Cluster rows (N, D) with k-means, and find the directions that separate clusters.

:func:`kmeans` calls scikit-learn. :func:`constrained_kmeans` and :func:`seeded_kmeans`
keep some rows in a given cluster, as DTC does (Han et al., ICCV 2019). They use a
seeded generator on the host and sums as matrix products, so that the same device gives
the same clusters again. :func:`constrained_kmeans` draws the free centers one by one,
and :func:`seeded_kmeans` starts from k-means clusters of the free rows.
"""

import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

FREE = -1  # value in ``fixed`` for a row that goes to its nearest center
# Whitened features keep this share of the variance if the number of clusters is
# unknown.
VARIANCE = 0.95
MAX_CELLS = 2**24  # distances held at a time: 64 MB in float32


class Clusters(NamedTuple):
    """A partition of N rows into K clusters.

    Attributes:
        assignment: The cluster of each row, int64 (N,), 0 to K - 1.
        centers: The centers of the clusters, (K, D), in the type of the points.
        inertia: The sum of the squared distances of all rows to their centers.
    """

    assignment: Tensor
    centers: Tensor
    inertia: float


def kmeans(points: Tensor, num_clusters: int, num_starts: int, seed: int) -> Clusters:
    """Cluster rows by plain k-means with k-means++ starts, on the CPU.

    Args:
        points: (N, D), on the CPU, N >= ``num_clusters``.
        num_clusters: K, the number of clusters.
        num_starts: The number of runs. The run with the smallest inertia (the sum of
            squared distances to the centers) is returned.
        seed: The seed of the starts.

    Returns:
        The cluster of each row, the centers, and the inertia. With fewer distinct rows
        than K some clusters are empty; the warning of scikit-learn is suppressed.
    """
    # The import takes 2 s, which every worker would spend.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # scikit-learn warns if there are fewer distinct rows than clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = KMeans(num_clusters, n_init=num_starts, random_state=seed).fit(
            points.numpy()
        )
    assignment = torch.from_numpy(fitted.labels_).long()
    centers = torch.from_numpy(fitted.cluster_centers_).to(points.dtype)
    return Clusters(assignment, centers, float(fitted.inertia_))


def constrained_kmeans(
    points: Tensor, fixed: Tensor, num_clusters: int, num_restarts: int, seed: int
) -> Clusters:
    """Cluster rows by k-means where some rows must stay in a given cluster.

    The centers of the given clusters start at the means of their rows, and the others
    by k-means++ (:func:`draw_initial_centers`). Then :func:`lloyd` runs.

    Args:
        points: (N, D), finite floats, on any device.
        fixed: int64 (N,), on the same device: the cluster in which a row must stay, or
            ``FREE`` (-1). The given clusters are 0 .. F - 1, and each has a row. F may
            be 0.
        num_clusters: K, from F to F plus the number of free rows.
        num_restarts: The number of runs. The run with the smallest inertia (the sum of
            squared distances to the centers) is returned.
        seed: The seed of the random numbers by which centers start.

    Returns:
        The cluster of each row, the centers, and the inertia of all rows. The given
        clusters come first; free rows can be in any cluster. A cluster can be empty
        only if free rows equal each other or a center, up to rounding. No center is
        NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = num_clusters - int(fixed.max()) - 1, num_restarts
    draws = torch.rand(shape, generator=generator, dtype=torch.float64)
    starts = (draw_initial_centers(points, fixed, column) for column in draws.T)
    runs = (lloyd(points, fixed, centers) for centers in starts)
    return min(runs, key=lambda run: run.inertia)


def seeded_kmeans(
    points: Tensor, fixed: Tensor, num_clusters: int, num_starts: int, seed: int
) -> Clusters:
    """Cluster rows by k-means where some rows must stay in a given cluster.

    In contrast to :func:`constrained_kmeans`, it starts from clusters of the free rows.
    Each run clusters the free rows alone into K clusters. The centers that match the
    means of the F fixed clusters best, one for each, are then replaced by these means.
    From these centers :func:`lloyd` clusters all rows. For Caltech-24 with half of each
    of 16 known classes unlabeled, 94% of the rows get their class. Centers that are
    drawn one by one end in worse optima, with 84%.

    Args:
        points: (N, D), finite floats, on the CPU.
        fixed: int64 (N,): the cluster in which a row must stay, or ``FREE`` (-1). The
            given clusters are 0 .. F - 1, and each has a row.
        num_clusters: K, from F to F plus the number of free rows. With fewer free rows
            than K, :func:`constrained_kmeans` does the work.
        num_starts: The number of runs. The run with the smallest inertia (the sum of
            squared distances to the centers) is returned.
        seed: The seed of the first start. The next starts have the next numbers.

    Returns:
        The cluster of each row, the centers, and the inertia of all rows. The given
        clusters come first; free rows can be in any cluster.
    """
    free, num_known = points[fixed == FREE], int(fixed.max()) + 1
    if len(free) < num_clusters:
        return constrained_kmeans(points, fixed, num_clusters, num_starts, seed)
    means = _cluster_means(points, fixed, points.new_zeros(num_known, points.shape[1]))
    runs = list[Clusters]()
    for start in range(num_starts):
        centers = kmeans(free, num_clusters, 1, seed + start).centers
        taken = linear_sum_assignment(torch.cdist(means, centers).numpy())[1]
        others = np.setdiff1d(np.arange(num_clusters), taken)
        runs.append(lloyd(points, fixed, torch.cat([means, centers[others]])))
    return min(runs, key=lambda run: run.inertia)


def draw_initial_centers(points: Tensor, fixed: Tensor, draws: Tensor) -> Tensor:
    """Choose initial centers of k-means by k-means++ (Arthur and Vassilvitskii, 2007).

    The first F centers are the means of the clusters that fixed rows belong to. The
    others are free rows. Each is drawn with a probability proportional to its squared
    distance to the nearest center so far. All free rows are equally likely if there is
    no center yet, or if each lies on a center.

    Args:
        points: (N, D).
        fixed: int64 (N,): the cluster 0 .. F - 1 in which a row must stay, or ``FREE``
            (-1).
        draws: (K - F,) uniform random numbers in 0-1, one for each center to draw.

    Returns:
        The centers (K, D).
    """
    candidates = points[fixed == FREE]
    centers = _cluster_means(
        points, fixed, points.new_zeros(int(fixed.max()) + 1, points.shape[1])
    )
    nearest = F.pad(
        _squared_distances(candidates, centers), (0, 1), value=torch.inf
    ).amin(dim=1)
    for draw in draws.tolist():
        # Without any center yet, or with every row on a center, all rows are equally
        # likely.
        even = not nearest.isfinite().all() or nearest.sum() <= 0
        cumulative = (
            (torch.ones_like(nearest) if even else nearest).double().cumsum(dim=0)
        )
        row = torch.searchsorted(cumulative, draw * cumulative[-1:], right=True)
        chosen = candidates[row.clamp(max=len(candidates) - 1)]
        centers = torch.cat([centers, chosen])
        nearest = torch.minimum(nearest, _squared_distances(candidates, chosen)[:, 0])
    return centers


def lloyd(
    points: Tensor, fixed: Tensor, centers: Tensor, max_iters: int = 100
) -> Clusters:
    """Run Lloyd's iteration of k-means from given centers until no row moves.

    It ends after ``max_iters`` iterations in any case. A row whose nearest centers tie
    goes to the lower index. A cluster that runs empty gets the free row that is
    farthest from its nearest center, among the rows that are neither alone in their
    cluster nor, up to rounding, on that center. If there is no such row, the cluster
    keeps its last center.

    Args:
        points: (N, D).
        fixed: int64 (N,): the cluster in which a row must stay, or ``FREE`` (-1) for a
            row that goes to its nearest center.
        centers: (K, D), the initial centers.
        max_iters: The largest number of iterations.

    Returns:
        The cluster of each row, the final centers, and the inertia.
    """
    free = fixed == FREE
    largest = float(points.square().sum(dim=1).max())
    rounding = 8 * torch.finfo(points.dtype).eps * largest
    assignment = fixed
    block_rows = MAX_CELLS // len(centers)
    for _ in range(max_iters):
        blocks = [
            _squared_distances(b, centers).min(dim=1) for b in points.split(block_rows)
        ]
        nearest = torch.where(free, torch.cat([b.indices for b in blocks]), fixed)
        distance = torch.where(free, torch.cat([b.values for b in blocks]), -1.0)
        _fill_empty_(nearest, distance, len(centers), rounding)
        is_done = torch.equal(nearest, assignment)
        assignment = nearest
        centers = _cluster_means(points, assignment, centers)
        if is_done:
            break
    inertia = float((points - centers[assignment]).square().sum())
    return Clusters(assignment, centers, inertia)


def _fill_empty_(
    assignment: Tensor, distance: Tensor, num_clusters: int, rounding: float
) -> None:
    """Move the rows that are farthest from their centers into empty clusters, in place.

    Each empty cluster gets one row. A row that is alone in its cluster stays, so some
    clusters may remain empty.

    Args:
        assignment: int64 (N,), the cluster of each row, which is changed.
        distance: (N,), the squared distance of each row to its center; -1 for rows that
            must not move. It is not changed.
        num_clusters: K.
        rounding: A row at a squared distance of at most this counts as lying on its
            center, and stays.
    """
    sizes = torch.bincount(assignment, minlength=num_clusters).tolist()
    empty = [c for c, size in enumerate(sizes) if size == 0]
    for row in distance.argsort(descending=True, stable=True).tolist() if empty else []:
        if not empty or float(distance[row]) <= rounding:
            return
        cluster = int(assignment[row])
        if sizes[cluster] > 1:
            sizes[cluster] -= 1
            assignment[row] = empty.pop(0)


def _squared_distances(points: Tensor, centers: Tensor) -> Tensor:
    """Return the squared distance (N, K) of each point (N, D) to each center (K, D).

    Distances that rounding makes negative become 0.
    """
    norms = points.square().sum(dim=1)[:, None] + centers.square().sum(dim=1)
    return (norms - 2 * points @ centers.T).clamp_(min=0)


def _cluster_means(points: Tensor, assignment: Tensor, centers: Tensor) -> Tensor:
    """Return the mean of the rows of each cluster.

    Args:
        points: (N, D).
        assignment: int64 (N,), the cluster 0 .. K - 1 of each row. Rows with another
            value are left out.
        centers: (K, D), the centers so far, which empty clusters keep.

    Returns:
        (K, D).
    """
    sums, counts = torch.zeros_like(centers), centers.new_zeros(len(centers), 1)
    clusters = torch.arange(len(centers), device=points.device)[:, None]
    block_rows = MAX_CELLS // max(1, len(centers))
    blocks = zip(points.split(block_rows), assignment.split(block_rows), strict=True)
    for rows, cluster_of_row in blocks:
        # (K, rows). Unlike index_add_, a matrix product is deterministic on CUDA.
        member = (cluster_of_row == clusters).to(points.dtype)
        sums += member @ rows
        counts += member.sum(dim=1, keepdim=True)
    return torch.where(counts > 0, sums / counts.clamp(min=1), centers)


def principal_components(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the principal component analysis (PCA) of points.

    Args:
        points: (N, D).

    Returns:
        Three float64 tensors: the centered points (N, D); the variances (D,) along the
        principal directions, in falling order, with the divisor N; and the directions,
        which are the columns of (D, D), in the same order.
    """
    centered = points.double() - points.double().mean(dim=0)
    variances, directions = torch.linalg.eigh(centered.T @ centered / len(points))
    return centered, variances.flip(0).clamp(min=0), directions.flip(1)


def whiten(
    points: Tensor, num_directions: int | None = None, variance: float = 1.0
) -> Tensor:
    """Return coordinates along the leading principal directions, each at unit variance.

    The centers of K clusters span K - 1 directions, and the leading principal
    directions are the best guess of these (Ding and He, ICML 2004).

    Args:
        points: (N, D).
        num_directions: The largest number of directions; None or 0 for no limit.
        variance: The share of the total variance to explain, 0 to 1. No more directions
            are kept than that takes. The default sets no limit.

    Returns:
        The coordinates, float32 (N, P), where P is the number of directions that are
        kept; or one column of zeros if the total variance is at most 1e-12, as it is
        for equal rows. Directions with at most 1e-9 of the largest variance are never
        kept.
    """
    centered, variances, directions = principal_components(points)
    if float(variances.sum()) <= 1e-12:
        return torch.zeros(len(points), 1, device=points.device)
    explained = variances.cumsum(0) / variances.sum()
    num_explaining = int((explained < variance - 1e-12).sum()) + 1
    num_usable = int((variances > 1e-9 * variances[0]).sum())
    count = min(num_explaining, num_usable, num_directions or num_usable)
    return (centered @ directions[:, :count] / variances[:count].sqrt()).float()
