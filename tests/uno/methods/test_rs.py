"""Rank statistics, and its incremental form RS+, against loops over pairs."""

import numpy as np
import pytest
import torch

from tests.uno.methods import toy
from tests.uno.small_run import fresh_state, small_config
from uno.methods import rs


def naive_same_top(a: np.ndarray, b: np.ndarray, top: int = 5) -> bool:
    first, second = (
        set(sorted(range(len(row)), key=lambda d: -row[d])[:top]) for row in (a, b)
    )
    return first == second


def test_k_is_the_authors_share_of_the_features():
    """Kills: 5 of 64, none of 16, another k than the published one for ResNet18."""
    assert [rs.num_top(d) for d in (16, 64, 150, 512, 1280, 2048)] == [
        1,
        1,
        1,
        5,
        12,
        20,
    ]


@pytest.mark.parametrize("step", [0, 3, 40])
def test_the_step_of_rs_equals_the_loop(step):
    """Kills: unlabeled rows in the known loss, features of the other view, one view's
    pairs, a weight that does not rise or rises beyond the end, consistency of unlabeled
    rows only, another k than the given one.
    """
    more = {"rs__rampup": 0.5, "rs__top_k": 2}
    config = small_config(method="rs", rs__consistency_weight=7.0, **more)
    state, logits = fresh_state(config), toy.random_logits(9, 4, 3, 6)
    state.step, state.total_steps = step, 20
    found = toy.step_on(config, logits, torch.tensor(toy.LABELS), state)
    features = logits.features[0, 4:].numpy()
    similar = [[naive_same_top(a, b, 2) for b in features] for a in features]
    expected = toy.naive_pairwise(logits, similar, 7.0 * toy.ramp(step / 10))
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_step_of_rs_plus_equals_the_loop():
    """Kills: pseudo-labels counted from the known outputs, those of the joint head
    itself, a known loss over known outputs only, the increment without its ramp, one
    view's joint loss.
    """
    config = small_config(
        method="rs_plus", rs_plus__consistency_weight=2.0, rs_plus__rampup=0.5
    )
    state, logits = fresh_state(config), toy.random_logits(9, 5, 5, 16)
    state.model.normalize_prototypes_()
    state.step, state.total_steps, labels = 4, 20, [0, 4, 1, 1]
    found = toy.step_on(config, logits, torch.tensor(labels), state)

    prototypes, features = (
        state.model.novel.auxiliary.weight[0].detach().numpy(),
        logits.features.numpy(),
    )
    clusters = torch.from_numpy(
        features / np.linalg.norm(features, axis=-1, keepdims=True) @ prototypes.T
    )
    joint = np.concatenate([logits.known.numpy(), logits.novel[:, 0].numpy()], axis=-1)
    pseudo = [5 + int(np.argmax(row)) for row in clusters[0, 4:].numpy()]
    # of 16
    similar = [
        [naive_same_top(a, b, 1) for b in features[0, 4:]] for a in features[0, 4:]
    ]
    ramp = toy.ramp(4 / 10)
    expected = toy.naive_cross_entropy(joint[:, :4], labels)
    expected += toy.naive_pair_loss(
        *(toy.probabilities(view[4:]) for view in clusters), similar
    )
    expected += 0.05 * ramp * toy.naive_cross_entropy(joint[:, 4:], pseudo)
    for head in (torch.from_numpy(joint), clusters):
        expected += (
            2.0 * ramp * toy.naive_mse(*(toy.probabilities(view) for view in head))
        )
    assert found == pytest.approx(expected, rel=1e-6)
    names = dict(state.model.named_parameters())  # both heads are trained
    assert {"novel.prototypes.weight", "novel.auxiliary.weight"} <= set(names)
