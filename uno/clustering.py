"""Clusters of rows (N, D), and the directions that tell them apart.

:func:`kmeans` is scikit-learn's. The other two hold some rows in their cluster (as DTC
does, Han et al., ICCV 2019), with a seeded generator on the host and sums as matrix
products, so the same device gives the same clusters again: :func:`constrained_kmeans`
draws the free centers one by one, :func:`seeded_kmeans` starts them from the free rows'
own clusters.
"""

import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

FREE = -1  # in ``fixed``: the row goes to its nearest center
# share of it that whitened features keep where nobody knows how many clusters there are
VARIANCE = 0.95
MAX_CELLS = 2**24  # distances held at a time: 64 MB in float32


class Clusters(NamedTuple):
    """Clusters of N rows."""

    assignment: Tensor  # (N,) int64
    centers: Tensor  # (K, D), in the points' type
    inertia: float  # sum of squared distances of all rows to their centers


def kmeans(points: Tensor, num_clusters: int, num_starts: int, seed: int) -> Clusters:
    """Plain k-means of ``points`` (N, D), on the CPU: k-means++, the best of
    ``num_starts``.
    """
    from sklearn.cluster import KMeans  # 2 s of CPU time, which every worker would pay
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # fewer different rows than clusters
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = KMeans(num_clusters, n_init=num_starts, random_state=seed).fit(
            points.numpy()
        )
    assignment, centers = (
        torch.from_numpy(found.labels_).long(),
        torch.from_numpy(found.cluster_centers_),
    )
    return Clusters(assignment, centers.to(points.dtype), float(found.inertia_))


def constrained_kmeans(
    points: Tensor, fixed: Tensor, num_clusters: int, num_restarts: int, seed: int
) -> Clusters:
    """The best by inertia of ``num_restarts`` runs on ``points`` (N, D), finite floats.

    ``fixed`` (N,) int64, on their device: the cluster, of 0 .. F - 1, each with a row,
    that a row must be in, or FREE. ``num_clusters`` K, from F to F + the free rows; one
    is empty, never NaN, only where the free rows have too few distinct values.
    """
    generator, num_free = (
        torch.Generator().manual_seed(seed),
        num_clusters - int(fixed.max()) - 1,
    )
    draws = torch.rand(
        num_free, num_restarts, generator=generator, dtype=torch.float64
    ).T
    runs = (lloyd(points, fixed, initial_centers(points, fixed, own)) for own in draws)
    return min(runs, key=lambda run: run.inertia)


def seeded_kmeans(
    points: Tensor, fixed: Tensor, num_clusters: int, num_starts: int, seed: int
) -> Clusters:
    """As :func:`constrained_kmeans`, on the CPU, but started from where the free rows
    are: their own k-means clusters, of which those that match known classes best give
    way to them.

    Of Caltech-24, half of each of 16 known classes unlabeled, it finds 94% of the rows'
    classes; centers that are drawn one by one end in worse optima, 84%.
    """
    free, num_known = points[fixed == FREE], int(fixed.max()) + 1
    if len(free) < num_clusters:
        return constrained_kmeans(points, fixed, num_clusters, num_starts, seed)
    means = _means(points, fixed, points.new_zeros(num_known, points.shape[1]))
    runs = list[Clusters]()
    for start in range(num_starts):
        centers = kmeans(free, num_clusters, 1, seed + start).centers
        taken = linear_sum_assignment(torch.cdist(means, centers).numpy())[1]
        others = np.setdiff1d(np.arange(num_clusters), taken)
        runs.append(lloyd(points, fixed, torch.cat([means, centers[others]])))
    return min(runs, key=lambda run: run.inertia)


def initial_centers(points: Tensor, fixed: Tensor, draws: Tensor) -> Tensor:
    """(K, D) starts: means of the fixed rows, then free rows drawn by the squared
    distance to the nearest center so far (k-means++, Arthur and Vassilvitskii, 2007),
    each by one of the uniform ``draws`` (K - F,).
    """
    candidates = points[fixed == FREE]
    centers = _means(
        points, fixed, points.new_zeros(int(fixed.max()) + 1, points.shape[1])
    )
    nearest = F.pad(_squared(candidates, centers), (0, 1), value=torch.inf).amin(dim=1)
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
        nearest = torch.minimum(nearest, _squared(candidates, chosen)[:, 0])
    return centers


def lloyd(
    points: Tensor, fixed: Tensor, centers: Tensor, max_iters: int = 100
) -> Clusters:
    """Lloyd's iteration from ``centers`` (K, D) until no row moves; ties go to the
    lower index.

    Each cluster that runs empty gets the free row farthest from its center, unless that
    is alone in its cluster or, up to rounding, on its center; else it keeps its last
    center.
    """
    free = fixed == FREE
    rounding = (
        8 * torch.finfo(points.dtype).eps * float(points.square().sum(dim=1).max())
    )
    assignment = fixed
    rows = MAX_CELLS // len(centers)
    for _ in range(max_iters):
        found = [_squared(part, centers).min(dim=1) for part in points.split(rows)]
        moved = torch.where(free, torch.cat([f.indices for f in found]), fixed)
        distance = torch.where(free, torch.cat([f.values for f in found]), -1.0)
        _fill_empty_(moved, distance, len(centers), rounding)
        done, assignment = torch.equal(moved, assignment), moved
        centers = _means(points, assignment, centers)
        if done:
            break
    return Clusters(
        assignment, centers, float((points - centers[assignment]).square().sum())
    )


def _fill_empty_(
    assignment: Tensor, distance: Tensor, num_clusters: int, rounding: float
) -> None:
    """Move far rows into the empty clusters, in place: two (N,) tensors."""
    sizes = torch.bincount(assignment, minlength=num_clusters).tolist()
    empty = [c for c, size in enumerate(sizes) if size == 0]
    for row in distance.argsort(descending=True, stable=True).tolist() if empty else []:
        if not empty or float(distance[row]) <= rounding:
            return
        own = int(assignment[row])
        if sizes[own] > 1:
            sizes[own] -= 1
            assignment[row] = empty.pop(0)


def _squared(points: Tensor, centers: Tensor) -> Tensor:
    """Squared distances (N, D), (K, D) -> (N, K), not below 0."""
    norms = points.square().sum(dim=1)[:, None] + centers.square().sum(dim=1)
    return (norms - 2 * points @ centers.T).clamp_(min=0)


def _means(points: Tensor, assignment: Tensor, centers: Tensor) -> Tensor:
    """Means (K, D) of the rows assigned (N,) to 0 .. K - 1; an empty cluster keeps
    its center.
    """
    sums, counts = torch.zeros_like(centers), centers.new_zeros(len(centers), 1)
    clusters = torch.arange(len(centers), device=points.device)[:, None]
    rows = MAX_CELLS // max(1, len(centers))
    for part, own in zip(points.split(rows), assignment.split(rows), strict=True):
        # (K, rows): a product is deterministic on CUDA, too
        member = (own == clusters).to(points.dtype)
        sums += member @ part
        counts += member.sum(dim=1, keepdim=True)
    return torch.where(counts > 0, sums / counts.clamp(min=1), centers)


def silhouette(points: Tensor, assignment: Tensor, max_rows: int, seed: int) -> float:
    """Mean silhouette (Rousseeuw, 1987), in [-1, 1], of at most ``max_rows`` rows (N,
    D) drawn with ``seed``, in clusters (N,) int64. A row that is alone in its cluster
    counts 0, as does all with one cluster only.
    """
    from sklearn.metrics import silhouette_score

    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    chosen = order[:max_rows].sort().values.to(points.device)
    clusters = assignment[chosen].cpu().numpy()
    several = 1 < len(set(clusters.tolist())) < len(clusters)
    return (
        float(silhouette_score(points[chosen].cpu().numpy(), clusters))
        if several
        else 0.0
    )


def principal_components(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float64 the centered ``points`` (N, D), their falling variances (D,) along the
    principal directions, and these directions, the columns of (D, D).
    """
    centered = points.double() - points.double().mean(dim=0)
    variances, directions = torch.linalg.eigh(centered.T @ centered / len(points))
    return centered, variances.flip(0).clamp(min=0), directions.flip(1)


def whiten(
    points: Tensor, num_directions: int | None = None, variance: float = 1.0
) -> Tensor:
    """(N, D) -> (N, D') float32: coordinates along the leading principal directions,
    each at unit variance.

    D' is at most ``num_directions``, and no more than explain the share ``variance`` of
    all variance. The centers of K clusters span K - 1 directions, and the leading
    principal ones are the best guess of them (Ding and He, ICML 2004). One column of
    zeros where all rows are equal.
    """
    centered, variances, directions = principal_components(points)
    if float(variances.sum()) <= 1e-12:
        return torch.zeros(len(points), 1, device=points.device)
    explaining = (
        int((variances.cumsum(0) / variances.sum() < variance - 1e-12).sum()) + 1
    )
    usable = int((variances > 1e-9 * variances[0]).sum())
    count = min(explaining, usable, num_directions or usable)
    return (centered @ directions[:, :count] / variances[:count].sqrt()).float()
