"""Meta classification likelihood and its similarity network against loops over pairs."""

import numpy as np
import pytest
import torch

from tests.uno.methods import toy
from tests.uno.small_run import fresh_state, small_config
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
    config = small_config(method="mcl")
    state, logits = fresh_state(config), toy.random_logits(9, 4, 5, 16)
    labels = torch.tensor([0, 3, 1, 1])
    network, (first, second) = state.model.novel.auxiliary, logits.features.numpy()
    similar = [[naive_logit(network, a, b) > 0 for b in second[4:]] for a in first[4:]]
    expected = toy.naive_cross_entropy(logits.known[:, :4].numpy(), labels.tolist())
    expected += float(similarity_loss(network, logits.features[:, :4], labels).detach())
    expected += toy.naive_pair_loss(*(toy.probabilities(logits.novel[v, 0, 4:]) for v in (0, 1)), similar)
    assert toy.step_on(config, logits, labels, state) == pytest.approx(expected, rel=1e-5)


def test_the_similarity_network_learns_without_moving_the_encoder():
    """Kills: features that are not detached, a network that is not trained."""
    state = fresh_state(small_config(method="mcl"))
    features = torch.randn(2, 8, 16, requires_grad=True)
    similarity_loss(state.model.novel.auxiliary, features, torch.arange(8) % 2).backward()
    assert features.grad is None and state.model.novel.auxiliary.output.weight.grad.abs().sum() > 0
