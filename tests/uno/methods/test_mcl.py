"""MCL, its similarity network and KCL against loops over pairs."""

from itertools import product

import numpy as np
import pytest
import torch

from tests.uno.methods import toy
from tests.uno.small_run import fresh_state, small_config
from uno.methods import kcl, pairs


def naive_logit(network: pairs.PairSimilarity, a: np.ndarray, b: np.ndarray) -> float:
    """One pair through the weights, by hand."""
    left, right = a / np.linalg.norm(a), b / np.linalg.norm(b)
    weights = {
        name: p.detach().double().numpy() for name, p in network.named_parameters()
    }
    hidden = (
        weights["left.weight"] @ left
        + weights["left.bias"]
        + weights["right.weight"] @ right
    )
    return float(
        weights["output.weight"][0] @ np.maximum(hidden, 0) + weights["output.bias"][0]
    )


def test_similarity_equals_the_loop():
    """Kills: features of the same view on both sides, a softplus of the wrong sign,
    pairs of one row.
    """
    network, features = pairs.PairSimilarity(6), torch.randn(2, 5, 6)
    labels = torch.tensor([0, 1, 0, 2, 2])
    terms = []
    for i, j in product(range(5), range(5)):
        logit = naive_logit(network, features[0, i].numpy(), features[1, j].numpy())
        sign = 1 if labels[i] == labels[j] else -1
        terms.append(np.log1p(np.exp(-sign * logit)))
        assert bool(pairs.similar_pairs(network, features)[i, j]) == (logit > 0)
    found = pairs.similarity_loss(network, features, labels).detach()
    assert float(found) == pytest.approx(np.mean(terms), rel=1e-5)


def test_pairs_in_parts_are_the_same_pairs(monkeypatch):
    """Logits and gradients. Kills: a part left out, parts in another order, a side
    that is cut off.
    """
    network, found = pairs.PairSimilarity(6), []
    features = torch.randn(2, 7, 6, requires_grad=True)
    # all at once; three rows of the left side at a time
    for most in (10**6, 3 * 7 * 24):
        monkeypatch.setattr(pairs, "MOST_AT_ONCE", most)
        logits = network(*features)
        weighted = (logits * torch.arange(49.0).view(7, 7)).sum()
        moved = [features, *network.parameters()]
        found.append([logits, *torch.autograd.grad(weighted, moved)])
    torch.testing.assert_close(*found)


def test_the_step_of_mcl_equals_the_loop():
    """Kills: similarities of labeled rows used for unlabeled ones, a term missing,
    one view's pairs.
    """
    config = small_config(method="mcl")
    state, logits = fresh_state(config), toy.random_logits(9, 4, 5, 16)
    labels = torch.tensor([0, 3, 1, 1])
    network, (first, second) = state.model.novel.auxiliary, logits.features.numpy()
    similar = [[naive_logit(network, a, b) > 0 for b in second[4:]] for a in first[4:]]
    expected = toy.naive_cross_entropy(logits.known[:, :4].numpy(), labels.tolist())
    expected += float(
        pairs.similarity_loss(network, logits.features[:, :4], labels).detach()
    )
    expected += toy.naive_pair_loss(
        *(toy.probabilities(logits.novel[v, 0, 4:]) for v in (0, 1)), similar
    )
    assert toy.step_on(config, logits, labels, state) == pytest.approx(
        expected, rel=1e-5
    )


def test_the_similarity_network_learns_without_moving_the_encoder():
    """Kills: features that are not detached, a network that is not trained."""
    state = fresh_state(small_config(method="mcl"))
    features = torch.randn(2, 8, 16, requires_grad=True)
    pairs.similarity_loss(
        state.model.novel.auxiliary, features, torch.arange(8) % 2
    ).backward()
    assert (
        features.grad is None
        and state.model.novel.auxiliary.output.weight.grad.abs().sum() > 0
    )


def naive_contrast(p: np.ndarray, q: np.ndarray, similar: list[list[bool]]) -> float:
    terms = []
    for i, j in product(range(len(p)), range(len(q))):
        kl = sum((q[j] + 1e-7) * np.log((q[j] + 1e-7) / (p[i] + 1e-7)))
        terms.append(kl if similar[i][j] else max(0.0, 2.0 - kl))
    return float(np.mean(terms))


def test_the_target_of_kcl_has_no_gradient():
    """Kills: a moved target."""
    p, q = (torch.full((2, 3), 1 / 3, requires_grad=True) for _ in range(2))
    kcl.contrastive_loss(p, q, torch.ones(2, 2) > 0).backward()
    assert p.grad is not None and q.grad is None


def test_the_step_of_kcl_equals_the_loop():
    """Kills: one order of the pairs only, similarities of the other order, a term
    missing.
    """
    config = small_config(method="kcl")
    state, logits = fresh_state(config), toy.random_logits(9, 4, 5, 16)
    labels = torch.tensor([0, 3, 1, 1])
    network, features = state.model.novel.auxiliary, logits.features[:, 4:].numpy()
    first, second = (toy.probabilities(logits.novel[v, 0, 4:]) for v in (0, 1))
    expected = toy.naive_cross_entropy(logits.known[:, :4].numpy(), labels.tolist())
    expected += float(
        pairs.similarity_loss(network, logits.features[:, :4], labels).detach()
    )
    for p, q, own, others in (
        (first, second, *features),
        (second, first, *features[::-1]),
    ):
        similar = [[naive_logit(network, a, b) > 0 for b in others] for a in own]
        expected += naive_contrast(p, q, similar) / 2
    assert toy.step_on(config, logits, labels, state) == pytest.approx(
        expected, rel=1e-5
    )
