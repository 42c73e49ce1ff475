"""Self-distillation, entropy and contrast against loops in float64."""

import itertools

import numpy as np
import pytest
import torch

from tests.uno.methods import toy
from tests.uno.methods.test_all_methods import config_of, feature_set
from tests.uno.small_run import fresh_state, small_config
from uno.methods import simgcd

LABELS = [0, 3, 1, 1]


def softmax(row, tau):
    powers = np.exp((row - max(row)) / tau)
    return powers / powers.sum()


def naive_contrast(rows, labels, tau):
    """Rows (2, B, P): every row and view against all others."""
    places = [(v, i) for v in (0, 1) for i in range(rows.shape[1])]
    unit = {place: rows[place] / np.linalg.norm(rows[place]) for place in places}
    terms = []
    for v, i in places:
        powers = {p: np.exp(unit[v, i] @ unit[p] / tau) for p in places if p != (v, i)}
        mates = [
            p
            for p in powers
            if p[1] == i or (i < len(labels) and labels[p[1] : p[1] + 1] == [labels[i]])
        ]
        shares = [powers[p] / sum(powers.values()) for p in mates]
        terms.append(-np.mean(np.log(shares)))
    return np.mean(terms)


def naive_loss(logits, h, gcd, rows, epsilon, weight, sharp):
    joint = np.concatenate([logits.known.numpy(), logits.novel[:, 0].numpy()], axis=-1)
    num_known, num = logits.known.shape[-1], joint.shape[1]
    distilled = []
    for v, i in itertools.product((0, 1), range(num)):
        q, target = softmax(joint[v, i], toy.TAU), joint[1 - v, i].copy()
        if not gcd and i >= len(LABELS):
            target[:num_known] = -np.inf
        p = softmax(target, sharp)
        distilled.append(
            -sum(a * np.log(b) for a, b in zip(p, q, strict=True) if a > 0)
        )
    seen = (
        joint if rows == "all" else joint[:, len(LABELS) :, 0 if gcd else num_known :]
    )
    mean = np.mean([softmax(row, toy.TAU) for view in seen for row in view], axis=0)
    reg = np.log(len(mean)) + sum(m * np.log(m) for m in mean)
    unsupervised = np.mean(distilled) + epsilon * reg
    supervised = toy.naive_cross_entropy(joint[:, : len(LABELS)], LABELS)
    if h is not None:
        unsupervised += naive_contrast(h, [], 1.0)
        supervised += naive_contrast(h[:, : len(LABELS)], LABELS, 0.07)
    return (1 - weight) * unsupervised + weight * supervised


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("setting", ["ncd", "gcd"])
@pytest.mark.parametrize("rows", ["all", "unlabeled"])
def test_the_step_equals_the_loop(setting, rows, frozen):
    """Kills: a view that teaches itself, targets of unlabeled rows at known outputs,
    labels over known outputs alone, the entropy of each row for that of the mean, one
    weight for another, contrast on frozen features.
    """
    more = {
        "method": "simgcd",
        "data__setting": setting,
        "simgcd__entropy_rows": rows,
        "simgcd__epsilon": 1.7,
        "simgcd__labeled_weight": 0.3,
    }
    if frozen:
        config = config_of(**more)
        state = fresh_state(config, train=feature_set())
    else:
        config = small_config(**more)
        state = fresh_state(config, dtype=torch.float64)
    logits, project = toy.random_logits(9, 5, 5, 16), state.model.novel.auxiliary
    assert (project is None) == frozen
    state.step, state.total_steps = 3, 40  # half of 30 of 200
    h = None if frozen else project(logits.features).detach().numpy()
    expected = naive_loss(logits, h, setting == "gcd", rows, 1.7, 0.3, sharp=0.055)
    found = toy.step_on(config, logits, torch.tensor(LABELS), state)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("constants", "share", "expected"),
    [
        *(({}, share, 0.04) for share in (0.15, 0.6, 1)),
        ({}, 0, 0.07),
        ({}, 0.075, 0.055),
        ({"rampup": 0}, 0, 0.04),
    ],
)
def test_targets_sharpen_over_a_share_of_the_phase(constants, share, expected):
    """The authors' 30 of 200 epochs, both ends hit. Kills: an end beyond, a division
    by zero.
    """
    found = simgcd.target_temperature(share, simgcd.Constants(**constants))
    assert found == pytest.approx(expected)


def test_no_gradient_passes_targets():
    """It is softmax minus target, over tau. Kills: a target that moves, as of a
    siamese network.
    """
    joint = (torch.rand(2, 6, 5, dtype=torch.float64) * 2 - 1).requires_grad_()
    simgcd.distillation_loss(joint, 2, 3, 0.1, 0.05).backward()
    targets = joint.detach() / 0.05
    targets[:, 2:, :3] = -torch.inf
    difference = (joint.detach() / 0.1).softmax(-1) - targets.softmax(-1).flip(0)
    torch.testing.assert_close(joint.grad, difference / 0.1 / 12)
    swapped = simgcd.distillation_loss(joint.flip(0), 2, 3, 0.1, 0.05)
    torch.testing.assert_close(
        swapped, simgcd.distillation_loss(joint, 2, 3, 0.1, 0.05)
    )
