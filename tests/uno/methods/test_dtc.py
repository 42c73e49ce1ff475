"""Deep transfer clustering against loops; its memory of every row survives a
checkpoint.
"""

import copy

import numpy as np
import pytest
import torch

from tests.uno.small_run import (
    batches_of,
    fresh_state,
    small_config,
    small_sets,
    step_of,
)
from uno.methods import dtc
from uno.model import features_of


def naive_q(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    rows = [
        [
            1 / (1 + sum((a - b) ** 2 for a, b in zip(p, c, strict=True)))
            for c in centers
        ]
        for p in points
    ]
    return np.array([[similarity / sum(row) for similarity in row] for row in rows])


def naive_p(q: np.ndarray) -> np.ndarray:
    sums = [sum(row[k] for row in q) for k in range(q.shape[1])]
    rows = [[row[k] ** 2 / sums[k] for k in range(q.shape[1])] for row in q]
    return np.array([[value / sum(row) for value in row] for row in rows])


def test_q_and_p_equal_the_loops():
    """Kills: a Gaussian for Student's t, distances that are not squared, p without
    the clusters' sizes.
    """
    head = dtc.DistanceHead(3, 6).double().requires_grad_(False)
    features = torch.randn(7, 6, dtype=torch.float64)
    reduced = features @ head.reduce.weight.T + head.reduce.bias
    expected = naive_q(reduced.numpy(), head.weight[0].numpy())
    found = head(features)[0].softmax(dim=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(dtc.sharpen(found), naive_p(expected), rtol=1e-9)


def test_the_start_is_pca_and_k_means():
    """Kills: components of uncentered features, the smallest ones, centers of other
    points.
    """
    config = small_config(method="dtc")
    state = fresh_state(config)
    head = state.model.novel
    features = (
        features_of(state.model.eval(), small_sets()[0].unlabeled_images, config)
        .double()
        .numpy()
    )
    centered = features - features.mean(axis=0)
    points = head.reduce(torch.from_numpy(features).float()).detach().double().numpy()
    variances = np.linalg.svd(centered, compute_uv=False)[:5] ** 2
    np.testing.assert_allclose((points**2).sum(axis=0), variances, rtol=1e-3)
    nearest = naive_q(points, head.weight[0].detach().double().numpy()).argmax(axis=1)
    for k in range(5):  # a k-means center is the mean of the points nearest to it
        np.testing.assert_allclose(
            head.weight[0, k].detach(), points[nearest == k].mean(axis=0), atol=1e-4
        )
    torch.testing.assert_close(
        state.extra["targets"], dtc.sharpen(state.extra["probabilities"])
    )


@pytest.mark.parametrize("step", [0, 5, 6, 7, 9])
def test_the_step_equals_the_loop(step):
    """66 steps: warm-up 6, targets anew every 3. Kills: targets of other rows, q of the
    second view, labeled rows in the loss or in BatchNorm's statistics.
    """
    config = small_config(method="dtc", dtc__consistency_weight=3.0)
    state, batch = fresh_state(config), batches_of(config)(1)
    state.step, state.total_steps = step, 66
    generator = torch.Generator().manual_seed(1)
    state.extra["probabilities"] = torch.rand(100, 5, generator=generator).softmax(
        dim=1
    )
    memory, targets = (
        state.extra["probabilities"].double().numpy(),
        state.extra["targets"].double().numpy(),
    )
    if step in (6, 9):
        targets = naive_p(memory)
    with torch.no_grad():
        logits = copy.deepcopy(state.model)(
            [view[len(batch.labels) :] for view in batch.views[:2]]
        )
    q = np.exp(logits.novel[:, 0].double().numpy())
    q = q / q.sum(axis=-1, keepdims=True)
    p = targets[batch.rows.numpy()]
    expected = np.mean(p * (np.log(p) - np.log(q[0])))
    if step >= 6:
        ramp = np.exp(-5 * (1 - (step - 6) / 3) ** 2)
        expected += 3.0 * ramp * np.mean((q[0] - q[1]) ** 2)
    assert float(step_of(config)(state, batch, config, 0.0)) == pytest.approx(
        expected, rel=1e-4
    )
    kept = state.extra["probabilities"].double().numpy()
    np.testing.assert_allclose(kept[batch.rows.numpy()], q[0], rtol=1e-4)
    others = np.setdiff1d(np.arange(100), batch.rows.numpy())
    np.testing.assert_array_equal(kept[others], memory[others])
    assert not state.model.known.weight.grad.any()
    # a bad step leaves the memory alone: no NaN becomes a target epochs later
    memory = torch.full((4, 2), 0.5)
    dtc.store_probabilities_(
        memory, torch.tensor([2, 0]), torch.tensor([[float("nan")] * 2, [0.9, 0.1]])
    )
    torch.testing.assert_close(
        memory, torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    )
