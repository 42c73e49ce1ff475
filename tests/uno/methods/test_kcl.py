"""The contrastive loss against a loop over pairs."""

import numpy as np
import pytest
import torch

from tests.uno.methods.test_mcl import naive_logit
from tests.uno.methods.toy import (
    TAU,
    losses,
    method_config,
    method_state,
    naive_cross_entropy,
    probabilities,
    random_logits,
    step_on,
)
from uno.methods import kcl
from uno.methods.pairs import similarity_loss

pytestmark = pytest.mark.usefixtures("one_thread")


def naive_contrast(p: np.ndarray, q: np.ndarray, similar: list[list[bool]]) -> float:
    terms = []
    for i in range(len(p)):
        for j in range(len(q)):
            kl = sum((b + 1e-7) * np.log((b + 1e-7) / (a + 1e-7)) for a, b in zip(p[i], q[j], strict=True))
            terms.append(kl if similar[i][j] else max(0.0, 2.0 - kl))
    return float(np.mean(terms))


def test_contrastive_loss_equals_the_loop():
    """Kills: KL of the other direction, a margin for similar pairs, a hinge that is left out."""
    p, q = (torch.randn(n, 3, dtype=torch.float64).mul(3).softmax(dim=1) for n in (4, 6))
    similar = torch.rand(4, 6) > 0.5
    expected = naive_contrast(p.numpy(), q.numpy(), similar.tolist())
    assert float(kcl.contrastive_loss(p, q, similar)) == pytest.approx(expected, rel=1e-9)


def test_contrastive_loss_of_known_cases():
    """Equal and similar: 0. Equal and different: the margin. Far apart and different: 0."""
    sure, pairs = torch.eye(3, dtype=torch.float64), torch.eye(3) > 0
    assert float(kcl.contrastive_loss(sure, sure, pairs)) == pytest.approx(0, abs=1e-5)
    even = torch.full((2, 4), 0.25, dtype=torch.float64)
    assert float(kcl.contrastive_loss(even, even, torch.zeros(2, 2) > 0)) == pytest.approx(2)


def test_the_target_has_no_gradient():
    """Kills: both distributions moved by one term."""
    p, q = (torch.full((2, 3), 1 / 3, requires_grad=True) for _ in range(2))
    kcl.contrastive_loss(p, q, torch.ones(2, 2) > 0).backward()
    assert p.grad is not None and q.grad is None


def test_the_step_equals_the_loop():
    """Kills: one order of the pairs only, similarities of the other order, a term missing."""
    config = method_config("kcl")
    state, logits = method_state(config), random_logits(9, 4, 5, 16)
    labels, network = torch.tensor([0, 3, 1, 1]), state.model.novel.auxiliary
    features, known = logits.features.numpy(), logits.known.numpy()
    first, second = (probabilities(logits.novel[v, 0, 4:]) for v in (0, 1))
    contrast = 0.0
    for p, q, a, b in ((first, second, *features), (second, first, *features[::-1])):
        similar = [[naive_logit(network, a[i], b[j]) > 0 for j in range(4, 9)] for i in range(4, 9)]
        contrast += naive_contrast(p, q, similar) / 2
    expected = naive_cross_entropy(np.concatenate([known[0, :4], known[1, :4]]) / TAU, labels.tolist() * 2)
    expected += float(similarity_loss(network, logits.features[:, :4], labels).detach()) + contrast
    found = step_on(kcl.step, logits, labels, config.objective, state)
    assert found == pytest.approx(expected, rel=1e-5)


def test_steps_lower_the_loss():
    """Kills: a sign, a loss without gradient."""
    found = losses(method_config("kcl"), 20)
    assert found[-1] < 0.8 * found[0]
