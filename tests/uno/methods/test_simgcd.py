"""Self-distillation, entropy and contrast against loops in float64."""

import itertools

import numpy as np
import pytest
import torch

from tests.uno.methods import toy
from tests.uno.methods.test_all_methods import config_of, feature_set
from tests.uno.small_run import fresh_state, small_config
from uno.methods import simgcd


def naive_loss(logits, h, gcd, rows, epsilon, weight, sharp):
    joint = np.concatenate([logits.known.numpy(), logits.novel[:, 0].numpy()], axis=-1)
    num_known, num = logits.known.shape[-1], joint.shape[1]
    distilled = []
    for v, i in itertools.product((0, 1), range(num)):
        q, target = toy.softmax(joint[v, i] / toy.TAU), joint[1 - v, i].copy()
        if not gcd and i >= len(toy.LABELS):
            target[:num_known] = -np.inf
        p = toy.softmax(target / sharp)
        distilled.append(
            -sum(a * np.log(b) for a, b in zip(p, q, strict=True) if a > 0)
        )
    seen = (
        joint
        if rows == "all"
        else joint[:, len(toy.LABELS) :, 0 if gcd else num_known :]
    )
    mean = np.mean(
        [toy.softmax(row / toy.TAU) for view in seen for row in view], axis=0
    )
    reg = np.log(len(mean)) + sum(m * np.log(m) for m in mean)
    unsupervised = np.mean(distilled) + epsilon * reg
    supervised = toy.naive_cross_entropy(joint[:, : len(toy.LABELS)], toy.LABELS)
    if h is not None:
        unsupervised += toy.naive_contrast(h, [], 1.0)
        supervised += toy.naive_contrast(h[:, : len(toy.LABELS)], toy.LABELS, 0.07)
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
    found = toy.step_on(config, logits, torch.tensor(toy.LABELS), state)
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
