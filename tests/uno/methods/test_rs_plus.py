"""Incremental learning against loops."""

import numpy as np
import pytest
import torch

from tests.uno.methods import toy
from tests.uno.methods.test_rs import naive_same_top
from tests.uno.small_run import fresh_state, small_config

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_step_equals_the_loop():
    """Kills: pseudo-labels counted from the known outputs, those of the joint head itself, a known loss over
    known outputs only, the increment without its ramp, one view's joint loss.
    """
    config = small_config(method="rs_plus", objective__consistency_weight=2.0, objective__rampup=0.5)
    state, logits = fresh_state(config), toy.random_logits(9, 5, 5, 16)
    state.model.normalize_prototypes_()
    state.step, state.total_steps, labels = 4, 20, [0, 4, 1, 1]
    found = toy.step_on(config, logits, torch.tensor(labels), state)

    prototypes, features = state.model.novel.auxiliary.weight[0].detach().numpy(), logits.features.numpy()
    clusters = torch.from_numpy(features / np.linalg.norm(features, axis=-1, keepdims=True) @ prototypes.T)
    joint = np.concatenate([logits.known.numpy(), logits.novel[:, 0].numpy()], axis=-1)
    pseudo = [5 + int(np.argmax(row)) for row in clusters[0, 4:].numpy()]
    similar = [[naive_same_top(a, b) for b in features[0, 4:]] for a in features[0, 4:]]
    ramp = np.exp(-5 * (1 - 4 / 10) ** 2)
    expected = toy.naive_cross_entropy(joint[:, :4], labels)
    expected += toy.naive_pair_loss(*(toy.probabilities(view[4:]) for view in clusters), similar)
    expected += 0.05 * ramp * toy.naive_cross_entropy(joint[:, 4:], pseudo)
    for head in (torch.from_numpy(joint), clusters):
        expected += 2.0 * ramp * toy.naive_mse(*(toy.probabilities(view) for view in head))
    assert found == pytest.approx(expected, rel=1e-6)


def test_both_heads_are_trained():
    """Kills: a cluster head left out of the optimizer."""
    names = dict(fresh_state(small_config(method="rs_plus")).model.named_parameters())
    assert {"novel.prototypes.weight", "novel.auxiliary.weight"} <= set(names)
