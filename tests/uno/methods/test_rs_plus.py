"""Incremental learning against loops."""

import numpy as np
import pytest
import torch

from tests.uno.methods.test_rs import naive_same_top
from tests.uno.methods.toy import (
    TAU,
    losses,
    method_config,
    method_state,
    naive_cross_entropy,
    naive_mse,
    naive_pair_loss,
    probabilities,
    random_logits,
    step_on,
)  # fmt: skip
from uno.methods import rs_plus

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_step_equals_the_loop():
    """Kills: pseudo-labels counted from the known outputs, those of the joint head itself, a known loss over
    known outputs only, the increment without its ramp, one view's joint loss.
    """
    config = method_config("rs_plus", objective__consistency_weight=2.0, objective__rampup=0.5)
    state, logits = method_state(config), random_logits(9, 5, 5, 16)
    state.model.normalize_prototypes_()
    state.step, state.total_steps = 4, 20
    labels = torch.tensor([0, 4, 1, 1])
    found = step_on(rs_plus.step, logits, labels, config.objective, state)

    prototypes = state.model.novel.auxiliary.weight[0].detach().numpy()
    features = logits.features.numpy()
    unit = features / np.linalg.norm(features, axis=-1, keepdims=True)
    clusters = torch.from_numpy(unit @ prototypes.T)
    joint = np.concatenate([logits.known.numpy(), logits.novel[:, 0].numpy()], axis=-1)
    pseudo = [5 + int(np.argmax(row)) for row in clusters[0, 4:].numpy()]
    similar = np.array([[naive_same_top(a, b, 5) for b in features[0, 4:]] for a in features[0, 4:]])
    ramp = np.exp(-5 * (1 - 4 / 10) ** 2)
    expected = (
        naive_cross_entropy(np.concatenate([joint[0, :4], joint[1, :4]]) / TAU, labels.tolist() * 2)
        + naive_pair_loss(probabilities(clusters[0, 4:]), probabilities(clusters[1, 4:]), similar)
        + 0.05 * ramp * naive_cross_entropy(np.concatenate([joint[0, 4:], joint[1, 4:]]) / TAU, pseudo * 2)
    )
    for head in (torch.from_numpy(joint), clusters):
        expected += 2.0 * ramp * naive_mse(probabilities(head[0]), probabilities(head[1]))
    assert found == pytest.approx(expected, rel=1e-6)


def test_steps_lower_the_loss_and_train_both_heads():
    """Kills: a cluster head left out of the optimizer or never used."""
    config = method_config("rs_plus", objective__rampup=0.0)
    found = losses(config, 15)
    assert found[-1] < 0.8 * found[0]
    names = dict(method_state(config).model.named_parameters())
    assert {"novel.prototypes.weight", "novel.auxiliary.weight"} <= set(names)
