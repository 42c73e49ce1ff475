"""k-means with some rows fixed to their cluster (DTC, Han et al., ICCV 2019; METHOD.md Sec. 8): a seeded
generator on the host, and sums as matrix products, so the same device gives the same clusters again.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FREE = -1  # in ``fixed``: the row goes to its nearest centre
MAX_CELLS = 2**24  # distances held at a time: 64 MB in float32


class Clusters(NamedTuple):
    """Clusters of N rows."""

    assignment: Tensor  # (N,) int64
    centers: Tensor  # (K, D), in the points' type
    inertia: float  # sum of squared distances of all rows to their centres


def constrained_kmeans(
    points: Tensor, fixed: Tensor, num_clusters: int, num_restarts: int, seed: int
) -> Clusters:
    """The best by inertia of ``num_restarts`` runs on ``points`` (N, D), finite floats.

    ``fixed`` (N,) int64, on their device: the cluster, of 0 .. F - 1, each with a row, that a row must be in,
    or FREE. ``num_clusters`` K, from F to F + the free rows; one is empty, never NaN, only where the free
    rows have too few distinct values.
    """
    generator, num_free = torch.Generator().manual_seed(seed), num_clusters - int(fixed.max()) - 1
    draws = torch.rand(num_free, num_restarts, generator=generator, dtype=torch.float64).T
    runs = (lloyd(points, fixed, initial_centers(points, fixed, own)) for own in draws)
    return min(runs, key=lambda run: run.inertia)


def initial_centers(points: Tensor, fixed: Tensor, draws: Tensor) -> Tensor:
    """(K, D) starts: means of the fixed rows, then free rows drawn by the squared distance to the nearest
    centre so far (k-means++, Arthur and Vassilvitskii, 2007), each by one of the uniform ``draws`` (K - F,).
    """
    candidates = points[fixed == FREE]
    centers = _means(points, fixed, points.new_zeros(int(fixed.max()) + 1, points.shape[1]))
    nearest = F.pad(_squared(candidates, centers), (0, 1), value=torch.inf).amin(dim=1)
    for draw in draws.tolist():
        # Without any centre yet, or with every row on a centre, all rows are equally likely.
        even = not nearest.isfinite().all() or nearest.sum() <= 0
        cumulative = (torch.ones_like(nearest) if even else nearest).double().cumsum(dim=0)
        row = torch.searchsorted(cumulative, draw * cumulative[-1:], right=True)
        chosen = candidates[row.clamp(max=len(candidates) - 1)]
        centers = torch.cat([centers, chosen])
        nearest = torch.minimum(nearest, _squared(candidates, chosen)[:, 0])
    return centers


def lloyd(points: Tensor, fixed: Tensor, centers: Tensor, max_iters: int = 100) -> Clusters:
    """Lloyd's iteration from ``centers`` (K, D) until no row moves; ties go to the lower index.

    Each cluster that runs empty gets the free row farthest from its centre, unless that is alone in its
    cluster or, up to rounding, on its centre; else it keeps its last centre.
    """
    free = fixed == FREE
    rounding = 8 * torch.finfo(points.dtype).eps * float(points.square().sum(dim=1).max())
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
    return Clusters(assignment, centers, float((points - centers[assignment]).square().sum()))


def _fill_empty_(assignment: Tensor, distance: Tensor, num_clusters: int, rounding: float) -> None:
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
    """Means (K, D) of the rows assigned (N,) to 0 .. K - 1; an empty cluster keeps its centre."""
    sums, counts = torch.zeros_like(centers), centers.new_zeros(len(centers), 1)
    clusters = torch.arange(len(centers), device=points.device)[:, None]
    rows = MAX_CELLS // max(1, len(centers))
    for part, own in zip(points.split(rows), assignment.split(rows), strict=True):
        member = (own == clusters).to(points.dtype)  # (K, rows): a product is deterministic on CUDA, too
        sums += member @ part
        counts += member.sum(dim=1, keepdim=True)
    return torch.where(counts > 0, sums / counts.clamp(min=1), centers)


def silhouette(points: Tensor, assignment: Tensor, max_rows: int, seed: int) -> float:
    """Mean silhouette (Rousseeuw, 1987), in [-1, 1], of at most ``max_rows`` rows (N, D) drawn with ``seed``,
    in clusters (N,) int64. A row that is alone in its cluster counts 0, as does all with one cluster only.
    """
    from sklearn.metrics import silhouette_score

    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    chosen = order[:max_rows].sort().values.to(points.device)
    clusters = assignment[chosen].cpu().numpy()
    several = 1 < len(set(clusters.tolist())) < len(clusters)
    return float(silhouette_score(points[chosen].cpu().numpy(), clusters)) if several else 0.0
