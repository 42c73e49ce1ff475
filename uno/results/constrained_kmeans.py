"""k-means with some rows fixed to their cluster (DTC, Han et al., ICCV 2019; METHOD.md Sec. 8).

Restarts run side by side as the leading dimension R. Every result is a function of the arguments: randomness
comes from a seeded generator on the host, sums are matrix products, so the same device gives the same
clusters again. Nothing here needs more than :data:`MAX_CELLS` distances at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FREE = -1
"""In ``fixed``: the row goes to its nearest centre."""
MAX_CELLS = 2**24  # distances held at a time: 64 MB in float32


class Clusters(NamedTuple):
    """Clusters of N rows, or of R restarts of them."""

    assignment: Tensor  # (N,) or (R, N) int64
    centers: Tensor  # (K, D) or (R, K, D), in the points' type
    inertia: Tensor  # () or (R,): sum of squared distances of all rows to their centres


def constrained_kmeans(
    points: Tensor, fixed: Tensor, num_clusters: int, num_restarts: int, seed: int, max_iters: int = 100
) -> Clusters:
    """The best of ``num_restarts`` runs by inertia: centres of fixed classes start at their rows' mean, the
    others by k-means++.

    Args:
        points: (N, D) finite floats.
        fixed: (N,) int64, on the points' device: the cluster a row must be in, or FREE. The fixed clusters
            are 0 .. F - 1, every one with at least one row.
        num_clusters: K >= F. A cluster is empty in the result, never NaN, only where the free rows have too
            few distinct values to fill it.
        num_restarts: R.
        seed: of the starts; equal seeds give equal clusters on the same device.
        max_iters: bound on Lloyd iterations.

    Raises:
        ValueError: shapes disagree, points are not finite, a fixed cluster has no row, or K is not within
            F and F + the number of free rows.
    """
    _check(points, fixed, num_clusters)
    generator = torch.Generator().manual_seed(seed)
    centers = initial_centers(points, fixed, num_clusters, num_restarts, generator)
    runs = lloyd(points, fixed, centers, max_iters)
    best = int(runs.inertia.argmin())
    return Clusters(runs.assignment[best], runs.centers[best], runs.inertia[best])


def initial_centers(
    points: Tensor, fixed: Tensor, num_clusters: int, num_restarts: int, generator: torch.Generator
) -> Tensor:
    """(R, K, D) starts: means of the fixed rows first, then free rows drawn with probability proportional to
    the squared distance to the nearest centre so far (k-means++, Arthur and Vassilvitskii, 2007).

    Args:
        points: (N, D).
        fixed: (N,) int64 cluster or FREE.
        num_clusters: K.
        num_restarts: R.
        generator: on the host; R numbers are drawn for each free centre, whatever the points are.
    """
    num_fixed = int(fixed.max()) + 1 if len(fixed) else 0
    candidates = points[fixed == FREE]
    centers = points.new_zeros(num_restarts, num_clusters, points.shape[1])
    centers[:, :num_fixed] = _means(points, fixed, num_fixed)
    nearest = points.new_full((num_restarts, len(candidates)), torch.inf)
    for c in range(num_fixed):
        nearest = torch.minimum(nearest, _squared(candidates, centers[:1, c : c + 1])[..., 0])
    for c in range(num_fixed, num_clusters):
        # Without any centre yet, or with every row on a centre, all rows are equally likely.
        even = ~nearest.isfinite().all(dim=1) | (nearest.sum(dim=1) <= 0)
        weights = torch.where(even[:, None], torch.ones_like(nearest), nearest).double()
        cumulative = weights.cumsum(dim=1)
        draws = torch.rand(num_restarts, 1, generator=generator, dtype=torch.float64)
        targets = draws.to(points.device) * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=len(candidates) - 1)
        centers[:, c] = candidates[chosen]
        nearest = torch.minimum(nearest, _squared(candidates, centers[:, c : c + 1])[..., 0])
    return centers


def lloyd(points: Tensor, fixed: Tensor, centers: Tensor, max_iters: int = 100) -> Clusters:
    """Lloyd's iteration from given ``centers`` (R, K, D) until no row moves, all restarts at once.

    A cluster that runs empty is re-seeded with the free row farthest from its own centre, each with another
    row; a row that is alone in its cluster, or on its centre (up to rounding), is not taken. Ties go to the
    lower index.

    Args:
        points: (N, D).
        fixed: (N,) int64 cluster or FREE.
        centers: (R, K, D) starts, finite.
        max_iters: bound on iterations.

    Returns:
        Clusters of R restarts; centres are the means of their rows (an empty cluster keeps its last centre).
    """
    anchored = fixed != FREE
    rounding = 8 * torch.finfo(points.dtype).eps * float(points.square().sum(dim=1).max())
    assignment = torch.full((len(centers), len(points)), FREE, device=points.device)
    for _ in range(max_iters):
        moved, distance = _nearest(points, centers)
        moved = torch.where(anchored, fixed, moved)
        _fill_empty_(moved, distance, anchored, centers.shape[1], rounding)
        done = torch.equal(moved, assignment)
        assignment = moved
        centers = _update(points, assignment, centers)
        if done:
            break
    residual = torch.stack([(points - c[a]).square().sum() for a, c in zip(assignment, centers, strict=True)])
    return Clusters(assignment, centers, residual)


def _fill_empty_(
    assignment: Tensor, distance: Tensor, anchored: Tensor, num_clusters: int, rounding: float
) -> None:
    """Move far rows into empty clusters, in place. assignment, distance: (R, N); anchored: (N,)."""
    counts = _counts(assignment, num_clusters)
    for r in (counts == 0).any(dim=1).nonzero()[:, 0].tolist():
        far = torch.where(anchored, -1.0, distance[r]).sort(descending=True, stable=True)
        sizes = counts[r].tolist()
        empty = [c for c, size in enumerate(sizes) if size == 0]
        for value, row in zip(far.values.tolist(), far.indices.tolist(), strict=True):
            if not empty or value <= rounding:
                break
            own = int(assignment[r, row])
            if sizes[own] > 1:
                sizes[own] -= 1
                assignment[r, row] = empty.pop(0)


def _nearest(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Index of and squared distance to each row's nearest centre: two (R, N) tensors."""
    rows = max(1, MAX_CELLS // (centers.shape[0] * centers.shape[1]))
    parts = [_squared(chunk, centers).min(dim=2) for chunk in points.split(rows)]
    return torch.cat([p.indices for p in parts], dim=1), torch.cat([p.values for p in parts], dim=1)


def _squared(points: Tensor, centers: Tensor) -> Tensor:
    """Squared distances (N, D), (R, K, D) -> (R, N, K), not below 0."""
    cross = points @ centers.transpose(1, 2)
    norms = points.square().sum(dim=1)[:, None] + centers.square().sum(dim=2)[:, None, :]
    return (norms - 2 * cross).clamp_(min=0)


def _counts(assignment: Tensor, num_clusters: int) -> Tensor:
    """(R, N) -> rows of each cluster (R, K) int64."""
    counts = torch.zeros(len(assignment), num_clusters, dtype=torch.int64, device=assignment.device)
    return counts.scatter_add_(1, assignment, torch.ones_like(assignment))


def _update(points: Tensor, assignment: Tensor, centers: Tensor) -> Tensor:
    """Means of the clusters' rows (R, K, D); an empty cluster keeps its centre."""
    num_clusters = centers.shape[1]
    means = torch.stack([_means(points, a, num_clusters) for a in assignment])
    return torch.where((_counts(assignment, num_clusters) > 0)[..., None], means, centers)


def _means(points: Tensor, assignment: Tensor, num_clusters: int) -> Tensor:
    """Means (K, D) of the rows assigned to 0 .. K - 1; rows assigned to FREE do not count."""
    sums = points.new_zeros(num_clusters, points.shape[1])
    counts = points.new_zeros(num_clusters, 1)
    clusters = torch.arange(num_clusters, device=points.device)[:, None]
    rows = max(1, MAX_CELLS // max(1, num_clusters))
    for chunk, own in zip(points.split(rows), assignment.split(rows), strict=True):
        member = (own == clusters).to(points.dtype)  # (K, rows): a product is deterministic on CUDA, too
        sums += member @ chunk
        counts += member.sum(dim=1, keepdim=True)
    return sums / counts.clamp(min=1)


def _check(points: Tensor, fixed: Tensor, num_clusters: int) -> None:
    if points.ndim != 2 or fixed.shape != points.shape[:1]:
        raise ValueError(f"points {tuple(points.shape)} and fixed {tuple(fixed.shape)} must be (N, D), (N,)")
    if not bool(points.isfinite().all()):
        raise ValueError("points must be finite")
    classes = sorted(set(fixed.tolist()) - {FREE})
    if classes != list(range(len(classes))):
        raise ValueError(f"fixed clusters must be 0 .. F - 1, each with rows, got {classes[:8]}")
    num_free = int((fixed == FREE).sum())
    if not max(1, len(classes)) <= num_clusters <= len(classes) + num_free:
        raise ValueError(
            f"{num_clusters} clusters do not suit {len(classes)} fixed ones and {num_free} free rows"
        )


def silhouette(points: Tensor, assignment: Tensor, max_rows: int, seed: int) -> float:
    """Mean silhouette (Rousseeuw, 1987) of at most ``max_rows`` rows drawn with ``seed``, in [-1, 1].

    Equals scikit-learn's ``silhouette_score`` where N <= max_rows. Time and memory are bounded by max_rows
    squared; a row that is alone in its cluster counts 0, as does everything where there is one cluster only.

    Args:
        points: (N, D).
        assignment: (N,) int64 clusters, on the points' device.
        max_rows: of the sample.
        seed: of the sample.
    """
    if len(points) > max_rows:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(points), generator=generator)[:max_rows].sort().values
        points, assignment = points[chosen.to(points.device)], assignment[chosen.to(points.device)]
    clusters, own = assignment.unique(return_inverse=True)
    if len(clusters) < 2:
        return 0.0
    member = F.one_hot(own, len(clusters)).to(points.dtype)  # (N, K)
    counts = member.sum(dim=0)
    total = points.new_zeros((), dtype=torch.float64)
    rows = max(1, MAX_CELLS // len(points))
    for chunk, mine in zip(points.split(rows), own.split(rows), strict=True):
        distances = torch.cdist(chunk, points, compute_mode="donot_use_mm_for_euclid_dist")
        sums = distances @ member  # (rows, K)
        inside = sums.gather(1, mine[:, None])[:, 0] / (counts[mine] - 1).clamp(min=1)
        outside = (sums / counts).scatter(1, mine[:, None], torch.inf).min(dim=1).values
        largest = torch.maximum(inside, outside)
        values = torch.where((counts[mine] > 1) & (largest > 0), (outside - inside) / largest, 0.0)
        total += values.double().sum()
    return float(total / len(points))
