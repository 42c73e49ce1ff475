"""k-means with some rows fixed to their cluster (DTC, Han et al., ICCV 2019; METHOD.md Sec. 8).

Restarts run side by side as the leading dimension R. Randomness comes from a seeded generator on the host and
sums are matrix products, so the same device gives the same clusters again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FREE = -1  # in ``fixed``: the row goes to its nearest centre
MAX_CELLS = 2**24  # distances held at a time: 64 MB in float32


class Clusters(NamedTuple):
    """Clusters of N rows, or of R restarts of them."""

    assignment: Tensor  # (N,) or (R, N) int64
    centers: Tensor  # (K, D) or (R, K, D), in the points' type
    inertia: Tensor  # () or (R,): sum of squared distances of all rows to their centres


def constrained_kmeans(
    points: Tensor, fixed: Tensor, num_clusters: int, num_restarts: int, seed: int
) -> Clusters:
    """The best of ``num_restarts`` runs by inertia.

    Args:
        points: (N, D) finite floats.
        fixed: (N,) int64, on the points' device: the cluster a row must be in, or FREE. The fixed clusters
            are 0 .. F - 1, every one with at least one row.
        num_clusters: K, from F to F + the number of free rows. A cluster is empty in the result, never NaN,
            only where the free rows have too few distinct values to fill it.
        num_restarts: R.
        seed: of the starts; equal seeds give equal clusters on the same device.
    """
    generator = torch.Generator().manual_seed(seed)
    runs = lloyd(points, fixed, initial_centers(points, fixed, num_clusters, num_restarts, generator))
    best = int(runs.inertia.argmin())
    return Clusters(*(values[best] for values in runs))


def initial_centers(
    points: Tensor, fixed: Tensor, num_clusters: int, num_restarts: int, generator: torch.Generator
) -> Tensor:
    """(R, K, D) starts: means of the fixed rows first, then free rows drawn with probability proportional to
    the squared distance to the nearest centre so far (k-means++, Arthur and Vassilvitskii, 2007).

    The ``generator``, on the host, draws R numbers for each free centre, whatever the points are.
    """
    num_fixed = int(fixed.max()) + 1
    candidates = points[fixed == FREE]
    centers = points.new_zeros(num_restarts, num_clusters, points.shape[1])
    centers[:, :num_fixed] = _means(points, fixed[None], centers[:1, :num_fixed])
    nearest = points.new_full((num_restarts, len(candidates)), torch.inf)
    for c in range(num_clusters):
        if c >= num_fixed:
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
    """Lloyd's iteration from ``centers`` (R, K, D) until no row moves, all R restarts at once.

    A cluster that runs empty is re-seeded with the free row farthest from its own centre, each with another
    row; a row that is alone in its cluster, or on its centre (up to rounding), is not taken. Ties go to the
    lower index. Centres are the means of their rows; an empty cluster keeps its last centre.
    """
    free = fixed == FREE
    rounding = 8 * torch.finfo(points.dtype).eps * float(points.square().sum(dim=1).max())
    assignment = torch.full((len(centers), len(points)), FREE, device=points.device)
    for _ in range(max_iters):
        moved, distance = _nearest(points, centers)
        moved = torch.where(free, moved, fixed)
        for own, far in zip(moved, torch.where(free, distance, -1.0), strict=True):
            _fill_empty_(own, far, centers.shape[1], rounding)
        done = torch.equal(moved, assignment)
        assignment = moved
        centers = _means(points, assignment, centers)
        if done:
            break
    inertia = torch.stack([(points - c[a]).square().sum() for a, c in zip(assignment, centers, strict=True)])
    return Clusters(assignment, centers, inertia)


def _fill_empty_(assignment: Tensor, distance: Tensor, num_clusters: int, rounding: float) -> None:
    """Move far rows into the empty clusters of one restart, in place: two (N,) tensors."""
    sizes = torch.bincount(assignment, minlength=num_clusters).tolist()
    empty = [c for c, size in enumerate(sizes) if size == 0]
    if not empty:
        return
    for row in distance.argsort(descending=True, stable=True).tolist():
        if not empty or float(distance[row]) <= rounding:
            return
        own = int(assignment[row])
        if sizes[own] > 1:
            sizes[own] -= 1
            assignment[row] = empty.pop(0)


def _nearest(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Index of and squared distance to each row's nearest centre: two (R, N) tensors."""
    rows = max(1, MAX_CELLS // (centers.shape[0] * centers.shape[1]))
    found = [_squared(chunk, centers).min(dim=2) for chunk in points.split(rows)]
    return torch.cat([f.indices for f in found], dim=1), torch.cat([f.values for f in found], dim=1)


def _squared(points: Tensor, centers: Tensor) -> Tensor:
    """Squared distances (N, D), (R, K, D) -> (R, N, K), not below 0."""
    cross = points @ centers.transpose(1, 2)
    norms = points.square().sum(dim=1)[:, None] + centers.square().sum(dim=2)[:, None, :]
    return (norms - 2 * cross).clamp_(min=0)


def _means(points: Tensor, assignment: Tensor, centers: Tensor) -> Tensor:
    """Means (R, K, D) of the rows assigned (R, N) to 0 .. K - 1; an empty cluster keeps its centre."""
    sums, counts = torch.zeros_like(centers), centers.new_zeros(*centers.shape[:2], 1)
    clusters = torch.arange(centers.shape[1], device=points.device)[:, None]
    rows = max(1, MAX_CELLS // max(1, centers.shape[1]))
    for r in range(len(centers)):
        for chunk, own in zip(points.split(rows), assignment[r].split(rows), strict=True):
            member = (own == clusters).to(points.dtype)  # (K, rows): a product is deterministic on CUDA, too
            sums[r] += member @ chunk
            counts[r] += member.sum(dim=1, keepdim=True)
    return torch.where(counts > 0, sums / counts.clamp(min=1), centers)


def silhouette(points: Tensor, assignment: Tensor, max_rows: int, seed: int) -> float:
    """Mean silhouette (Rousseeuw, 1987), in [-1, 1], of at most ``max_rows`` rows drawn with ``seed``.

    ``points`` (N, D), ``assignment`` (N,) int64 on their device. A row that is alone in its cluster counts 0,
    as does everything where there is one cluster only.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(points), generator=generator)[:max_rows].sort().values.to(points.device)
    points, clusters = points[chosen], assignment[chosen].cpu().numpy()
    if not 1 < len(set(clusters.tolist())) < len(clusters):
        return 0.0
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(distances.cpu().numpy(), clusters, metric="precomputed"))
