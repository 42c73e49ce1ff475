"""Meta classification likelihood and its similarity network against loops over pairs."""

import numpy as np
import pytest
import torch

from tests.uno.methods.toy import (
    TAU,
    losses,
    method_config,
    method_state,
    naive_cross_entropy,
    naive_pair_loss,
    probabilities,
    random_logits,
    step_on,
)  # fmt: skip
from uno.methods import mcl
from uno.methods.pairs import PairSimilarity, similar_pairs, similarity_loss

pytestmark = pytest.mark.usefixtures("one_thread")


def naive_logit(network: PairSimilarity, a: np.ndarray, b: np.ndarray) -> float:
    """One pair through the weights, by hand."""
    left, right = a / np.linalg.norm(a), b / np.linalg.norm(b)
    weights = {name: p.detach().double().numpy() for name, p in network.named_parameters()}
    hidden = weights["left.weight"] @ left + weights["left.bias"] + weights["right.weight"] @ right
    return float(weights["output.weight"][0] @ np.maximum(hidden, 0) + weights["output.bias"][0])


def test_similarity_equals_the_loop():
    """Kills: features of the same view on both sides, a softplus of the wrong sign, pairs of one row."""
    network, features = PairSimilarity(6), torch.randn(2, 5, 6)
    labels = torch.tensor([0, 1, 0, 2, 2])
    terms = []
    for i in range(5):
        for j in range(5):
            logit = naive_logit(network, features[0, i].numpy(), features[1, j].numpy())
            sign = 1 if labels[i] == labels[j] else -1
            terms.append(np.log1p(np.exp(-sign * logit)))
            assert bool(similar_pairs(network, features)[i, j]) == (logit > 0)
    found = similarity_loss(network, features, labels).detach()
    assert float(found) == pytest.approx(np.mean(terms), rel=1e-5)


def test_the_step_equals_the_loop():
    """Kills: similarities of labeled rows used for unlabeled ones, a term missing, one view's pairs."""
    config = method_config("mcl")
    state, logits = method_state(config), random_logits(9, 4, 5, 16)
    labels = torch.tensor([0, 3, 1, 1])
    network = state.model.novel.auxiliary
    features = logits.features.numpy()
    similar = [
        [naive_logit(network, features[0, i], features[1, j]) > 0 for j in range(4, 9)] for i in range(4, 9)
    ]
    known = logits.known.numpy()
    expected = naive_cross_entropy(np.concatenate([known[0, :4], known[1, :4]]) / TAU, labels.tolist() * 2)
    expected += float(similarity_loss(network, logits.features[:, :4], labels).detach())
    first, second = (probabilities(logits.novel[v, 0, 4:]) for v in (0, 1))
    expected += naive_pair_loss(first, second, np.array(similar))
    found = step_on(mcl.step, logits, labels, config.objective, state)
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_similarity_network_learns_without_moving_the_encoder():
    """Kills: features that are not detached, a network that is not trained."""
    state = method_state(method_config("mcl"))
    features = torch.randn(2, 8, 16, requires_grad=True)
    similarity_loss(state.model.novel.auxiliary, features, torch.arange(8) % 2).backward()
    assert features.grad is None and state.model.novel.auxiliary.output.weight.grad.abs().sum() > 0


def test_steps_lower_the_loss():
    """Kills: a sign, a loss without gradient."""
    found = losses(method_config("mcl"), 20)
    assert found[-1] < 0.8 * found[0]
