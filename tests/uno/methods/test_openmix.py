"""OpenMix against loops in float64: images, targets, anchors, and the loss of a
step.
"""

import numpy as np
import pytest
import torch

from tests.uno.methods import toy
from tests.uno.small_run import (
    fresh_state,
    small_config,
    small_sets,
    step_of,
)
from uno import distributed
from uno.clustering.initialization import training_features
from uno.methods import openmix
from uno.model import Logits
from uno.steps import Batch

CONFIG = small_config(method="openmix")


@pytest.mark.parametrize(
    ("step", "least"), [(0, 0.95), (3, 0.95), (40, 0.95), (3, 0.0)]
)
def test_the_step_equals_the_loop(step, least):
    """Kills, each tried: the larger share to the unlabeled image, targets by other
    shares than images, the prediction of the mixed image as its target, a known place
    for the novel part, all unlabeled rows as anchors, none, cross-entropy, a mean over
    those that count alone, a weight that does not rise, pairs of mixed images, the
    consistency over three views, another cosine than the given one.
    """
    config = small_config(method="openmix", openmix__threshold=least)
    state, generator = fresh_state(config), torch.Generator().manual_seed(3)
    state.step, state.total_steps = step, 20
    two, third = (toy.random_logits(10, 4, 3, 6, seed) for seed in (0, 1))
    # anchors: every second row
    two.novel[0, 0, 4::2] = torch.tensor([0.9, -0.2, 0.1], dtype=torch.float64)
    known, novel, features = (
        torch.cat([getattr(two, name), getattr(third, name)[:1]])
        for name in ("known", "novel", "features")
    )
    features[0, 9] = 2 * features[0, 8] + 0.01  # a similar pair under this view alone
    logits = Logits(known, novel, None, features)
    views, seen = (
        list(torch.rand(2, 10, 3, 2, 2, generator=generator, dtype=torch.float64)),
        [],
    )
    leaf = torch.zeros((), dtype=torch.float64, requires_grad=True)
    state.forward = lambda given: (
        seen.extend(given)
        or logits._replace(known=logits.known + leaf, novel=logits.novel + leaf)
    )
    found = float(
        step_of(config)(state, Batch(views, torch.tensor(toy.LABELS), 2), config, 0.0)
    )

    partner, share = (part.tolist() for part in openmix.draw_mixtures(step, 4, 10))
    assert (
        min(share) >= 0.5
        and len(set(share)) == 10
        and {*partner} <= {*range(6)}
        and len({*partner}) > 2
    )
    novel_probabilities = toy.probabilities(logits.novel[0, 0])
    errors = []
    for i in range(10):
        other = 4 + partner[i]
        mixed = share[i] * views[0][i] + (1 - share[i]) * views[0][other]
        torch.testing.assert_close(seen[2][i], mixed)
        target = [0.0] * 7
        if i < 4:
            target[toy.LABELS[i]] += share[i]
        for k in range(3):
            target[4 + k] += (1 - share[i]) * novel_probabilities[other][k]
            target[4 + k] += share[i] * novel_probabilities[i][k] if i >= 4 else 0
        joint = toy.softmax(
            np.concatenate([logits.known[2, i], logits.novel[2, 0, i]]) / toy.TAU
        )
        counts = i < 4 or max(novel_probabilities[i]) > 0.9
        errors.append(
            sum((p - t) ** 2 for p, t in zip(joint, target, strict=True))
            if counts
            else 0.0
        )
    directions = [row / np.linalg.norm(row) for row in logits.features[0, 4:].numpy()]
    similar = [[bool(a @ b > least) for b in directions] for a in directions]
    assert np.sum(similar) == 8 if least == 0.95 else 8 < np.sum(similar) < 36
    ramp = toy.ramp(step / 5)
    expected = toy.naive_pairwise(logits, similar, 5 * ramp)
    expected += openmix.WEIGHT * ramp * np.mean(errors)
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_row_has_the_same_partner_on_any_number_of_workers(monkeypatch):
    """Kills: draws of a worker's own, partners of its own rows alone."""
    whole = openmix.draw_mixtures(5, 8, 20)
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank_and_world", lambda rank=rank: (rank, 2))
        parts.append(openmix.draw_mixtures(5, 4, 10))
    for one, first, second in zip(whole, *parts, strict=True):
        torch.testing.assert_close(
            torch.cat([first[:4], second[:4], first[4:], second[4:]]), one
        )


def test_it_starts_at_clusters_of_the_features():
    """Kills: random prototypes, centers of the known rows."""
    state = fresh_state(CONFIG)
    features = training_features(CONFIG, state.model.eval(), small_sets()[0])[2]
    rows = torch.nn.functional.normalize(features, dim=1)
    near, random = (
        (rows @ found.model.novel.weight[0].detach().T).amax(dim=1).mean()
        for found in (state, fresh_state(small_config(method="rs")))
    )
    assert near > random + 0.1
