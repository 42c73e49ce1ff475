import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.uno.reference import scale_matrix
from uno.objective import sinkhorn


def cosines(num_rows: int, num_clusters: int, seed: int = 0) -> torch.Tensor:
    return (
        torch.rand(
            num_rows, num_clusters, generator=torch.Generator().manual_seed(seed)
        )
        * 2
        - 1
    )


def check_against_reference(
    logits: torch.Tensor, epsilon: float, num_iters: int = 3
) -> None:
    expected = scale_matrix(logits.double().numpy(), epsilon, num_iters)
    single = sinkhorn(logits, epsilon, num_iters).double().numpy()
    double = sinkhorn(logits.double(), epsilon, num_iters).numpy()
    np.testing.assert_allclose(double, expected, atol=1e-5)
    np.testing.assert_allclose(single, expected, atol=1e-5 if epsilon >= 0.01 else 1e-3)
    if logits.numel():
        np.testing.assert_allclose(single.sum(axis=1), 1, atol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(0, 24),
    num_clusters=st.integers(1, 12),
    log_epsilon=st.floats(-4, 1),
    num_iters=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_equals_matrix_scaling(num_rows, num_clusters, log_epsilon, num_iters, seed):
    """Kills: softmax for Sinkhorn, rows normalized before clusters, one iteration more
    or less, epsilon inverted.
    """
    check_against_reference(
        cosines(num_rows, num_clusters, seed), 10**log_epsilon, num_iters
    )


@pytest.mark.parametrize("num_clusters", [1, 2, 1000])
@pytest.mark.parametrize(
    "rows", ["0", "1", "2", "K-1", "K", pytest.param("10K", marks=pytest.mark.release)]
)
def test_shapes(num_clusters, rows):
    """Kills: failures for B in {0, 1, 2, K-1, K, 10K} and K in {1, 2, 1000}."""
    k = num_clusters
    num_rows = {"0": 0, "1": 1, "2": 2, "K-1": k - 1, "K": k, "10K": 10 * k}[rows]
    assert torch.isfinite(sinkhorn(cosines(num_rows, k), 0.05, 3)).all()
    # the reference is a loop
    check_against_reference(cosines(min(num_rows, 40), k), 0.05)


@pytest.mark.parametrize("epsilon", [1e-4, 1e-3, 0.01, 0.05, 1.0, 10.0])
@pytest.mark.parametrize(
    "case", ["constant", "saturated", "starved", "one_hot", "negative"]
)
def test_degenerate_logits(case, epsilon):
    """Kills: exp before subtracting (overflow), dividing by a starved cluster (NaN
    at epsilon <= .01).
    """
    logits = cosines(20, 5)
    logits = {
        "constant": torch.full((20, 5), 0.7),
        "saturated": torch.ones(20, 5),
        "negative": -logits.abs(),
        "starved": logits.index_fill(1, torch.tensor([3]), -1.0),
        "one_hot": torch.eye(5).repeat(4, 1) * 2 - 1,
    }[case]
    check_against_reference(logits, epsilon)


def test_half_precision_is_raised_to_float32():
    """Kills: exp(logits / eps) in half precision, which overflows as soon as a
    cosine passes .554.
    """
    for dtype in (torch.float16, torch.bfloat16):
        logits = cosines(32, 5).to(dtype)
        result = sinkhorn(logits, 0.05, 3)
        assert result.dtype == torch.float32 and torch.equal(
            result, sinkhorn(logits.float(), 0.05, 3)
        )


def prior_of(num_clusters: int, seed: int = 0) -> torch.Tensor:
    draws = (
        torch.rand(num_clusters, generator=torch.Generator().manual_seed(seed)) + 0.05
    )
    return draws / draws.sum()


@pytest.mark.parametrize(
    ("num_rows", "num_clusters"), [(24, 5), (4, 9), (7, 7), (1, 1)]
)
def test_a_prior_gives_clusters_their_own_mass(num_rows, num_clusters):
    """Against matrix scaling, in both memory layouts, batched. Kills: the prior added
    after the rows, before the clusters, once instead of in every iteration, along the
    rows; its logarithm forgotten.
    """
    logits, prior = (
        cosines(2 * num_rows, num_clusters).view(2, num_rows, -1),
        prior_of(num_clusters),
    )
    found = sinkhorn(logits, 0.05, 3, prior)
    for own, one in zip(logits, found, strict=True):
        expected = scale_matrix(own.double().numpy(), 0.05, 3, prior.double().numpy())
        np.testing.assert_allclose(one.numpy(), expected, atol=1e-5)
