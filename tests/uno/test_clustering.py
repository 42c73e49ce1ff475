"""Constrained k-means against a plain double-precision loop, and on degenerate
input; whitening.
"""

import numpy as np
import pytest
import torch

from uno.clustering.kmeans import (
    FREE,
    constrained_kmeans,
    draw_initial_centers,
    lloyd,
    whiten,
)


def blobs(num_blobs, rows, seed=0, noise=0.25, dims=5):
    generator = np.random.default_rng(seed)
    centers = generator.standard_normal((num_blobs, dims))
    truth = np.repeat(np.arange(num_blobs), rows)
    points = centers[truth] + noise * generator.standard_normal((len(truth), dims))
    return torch.from_numpy(points), torch.from_numpy(truth)


def naive(points, fixed, centers):
    """Lloyd in float64, one row and one cluster at a time; fixed rows count in their
    cluster's mean.
    """
    points, old = points.double().numpy(), None
    centers = centers.double().numpy().copy()
    while True:
        nearest = [np.argmin([((p - c) ** 2).sum() for c in centers]) for p in points]
        assignment = np.where(fixed == FREE, nearest, fixed).tolist()
        if assignment == old:
            return assignment, centers, ((points - centers[assignment]) ** 2).sum()
        for k in set(assignment):
            rows = [p for p, a in zip(points, assignment, strict=True) if a == k]
            centers[k] = np.mean(rows, axis=0)
        old = assignment


@pytest.mark.parametrize("anchors", [0, 2])
def test_equals_a_naive_loop(anchors, monkeypatch):
    """In pieces of a few rows, with and without anchors. Kills: anchors that move,
    fixed rows left out of their mean, free rows kept out of fixed clusters, stopping
    one step early, inertia of the free rows only, a wrong mean.
    """
    monkeypatch.setattr("uno.clustering.kmeans.MAX_CELLS", 300)
    points, _ = blobs(6, 20, noise=0.8)
    fixed = torch.full((120,), FREE)
    if anchors:
        # the last one is far from its cluster
        fixed[:10], fixed[20:32], fixed[119] = 0, 1, 1
    for draws in torch.rand(4, 7 - anchors, generator=torch.Generator().manual_seed(3)):
        starts = draw_initial_centers(points, fixed, draws)
        assert starts.shape == (7, 5)
        assignment, centers, cost = naive(points, fixed, starts)
        for dtype in (torch.float32, torch.float64):
            found = lloyd(points.to(dtype), fixed, starts.to(dtype))
            assert found.assignment.tolist() == assignment
            assert np.allclose(found.centers.numpy(), centers, atol=1e-5)
            assert found.inertia == pytest.approx(cost, rel=1e-5)


def test_restarts_choose_the_lowest_inertia_and_the_seed_decides():
    """20 blobs: single starts merge two. Kills: first or worst restart, seed
    ignored, uniform seeding.
    """
    points, _ = blobs(20, 12, noise=0.05)
    free = torch.full((240,), FREE)
    many = [constrained_kmeans(points, free, 20, 10, seed=s) for s in range(3)]
    one = [constrained_kmeans(points, free, 20, 1, seed=s) for s in range(6)]
    assert max(m.inertia for m in many) < np.median([o.inertia for o in one])
    again = constrained_kmeans(points, free, 20, 10, seed=1)
    assert torch.equal(again.assignment, many[1].assignment)
    assert len({tuple(o.assignment.tolist()) for o in one}) > 1


def test_starts_are_anchor_means_then_spread_out():
    """Kills: free centers drawn from anchors, or where a center already is (uniform
    draws take it often).
    """
    points = torch.cat(
        [torch.zeros(50, 2), torch.tensor([[9.0, 0.0], [0.0, 9.0]])]
    ).double()
    fixed = torch.full((52,), FREE)
    fixed[:5] = 0
    for draws in torch.rand(8, 2, generator=torch.Generator().manual_seed(0)):
        anchored, *spread = draw_initial_centers(points, fixed, draws).tolist()
        assert anchored == [0, 0] and sorted(spread) == [[0, 9], [9, 0]]


def test_empty_clusters_are_filled_with_far_rows():
    """Three starts on one row, two far away; and a farthest row that is an anchor.

    Kills: NaN centers, an empty cluster left, one row for two clusters, re-seeding with
    an anchor.
    """
    points, _ = blobs(5, 10, noise=0.1)
    starts = torch.cat(
        [
            points[:1],
            points[:1],
            points[:1],
            torch.full((2, 5), 1e3, dtype=torch.float64),
        ]
    )
    found = lloyd(points, torch.full((50,), FREE), starts)
    assert found.assignment.unique().numel() == 5
    assert found.centers.isfinite().all() and np.isfinite(found.inertia)
    points = torch.tensor([[0.0], [0.1], [0.3], [0.7], [9.0]])
    fixed = torch.tensor([FREE, FREE, FREE, FREE, 0])
    found = lloyd(points, fixed, torch.tensor([[0.0], [-1e3]]), max_iters=1)
    assert found.assignment.tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_duplicates_leave_surplus_clusters_empty(dtype):
    """Three distinct rows or one. Kills: NaN, an endless loop, sums that depend on
    empty clusters.
    """
    three = torch.tensor([[0.1, 0.7], [0.7, 0.3], [0.9, 0.9]], dtype=dtype)
    fixed = torch.full((30,), FREE)
    fixed[0] = 0
    for points in (three.repeat(10, 1), three[:1].repeat(30, 1)):
        found = constrained_kmeans(points, fixed, 6, 3, seed=0)
        assert found.assignment.unique().numel() == len(points.unique(dim=0))
        assert found.inertia < 1e-9
        assert found.centers.isfinite().all()


def test_there_may_be_no_free_center():
    """Only anchors' clusters. Kills: k-means++ without candidates."""
    points, truth = blobs(2, 10)
    some = torch.where(torch.arange(20) % 2 == 0, truth, FREE)
    for fixed in (some, truth):
        found = constrained_kmeans(points, fixed, 2, 3, seed=0)
        assert torch.equal(found.assignment, truth)


def test_whitening():
    """Kills: no centering, variances left as they were, all directions kept, the
    last ones for the first.
    """
    generator = torch.Generator().manual_seed(0)
    points = (
        torch.randn(4000, 5, generator=generator)
        * torch.tensor([0.1, 4.0, 2.0, 8.0, 0.1])
        + 30
    )
    white = whiten(points, variance=0.97)
    # 64 + 16 of 84 explain .952
    assert white.shape == (4000, 3) and white.dtype == torch.float32
    assert torch.allclose(white.T @ white / 4000, torch.eye(3), atol=1e-4)
    assert torch.corrcoef(torch.stack([white[:, 0], points[:, 3]]))[0, 1].abs() > 0.99
    assert whiten(points, variance=0.95).shape[1] == 2 and whiten(points).shape[1] == 5
    assert torch.equal(whiten(points, 2), white[:, :2])
    assert torch.equal(whiten(torch.ones(6, 4), 3), torch.zeros(6, 1))
