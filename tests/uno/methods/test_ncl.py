"""Neighborhood contrast against loops in float64; its memories survive a checkpoint."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.uno.methods import toy
from tests.uno.small_run import fresh_state, small_config
from uno.data.memory import TrainSet
from uno.methods import ncl
from uno.model import build_network


def directions(num: int, seed: int) -> torch.Tensor:
    """Unit vectors (num, 6) in float64, all in one half of space: none is too unlike
    to count.
    """
    rows = torch.randn(
        num, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return F.normalize(rows + 1.5, dim=1)


def log_softmax(cosines: list[float]) -> list[float]:
    powers = [np.exp(c / 0.05) for c in cosines]
    return [np.log(power / sum(powers)) for power in powers]


def naive_class_terms(query, key, memory, classes) -> float:
    """Of labeled rows, one at a time, over the entries that are there."""
    terms = []
    for q, k, label in zip(query, key, toy.LABELS, strict=True):
        there = [j for j in range(len(memory)) if classes[j] >= 0]
        log_p = log_softmax([q @ k, *(q @ memory[j] for j in there)])
        positive = [
            log_p[0],
            *(log_p[1 + i] for i, j in enumerate(there) if classes[j] == label),
        ]
        terms.append(-sum(positive) / len(positive))
    return float(np.mean(terms))


def naive_neighbor_terms(
    query, key, memory, near: int, hard: list[list[float]]
) -> float:
    """Of unlabeled rows, one at a time."""
    terms = []
    for q, k, further in zip(query, key, hard, strict=True):
        cosines = [q @ entry for entry in memory]
        nearest = sorted(range(len(memory)), key=lambda j: -cosines[j])[:near]
        log_p = log_softmax([q @ k, *cosines, *further])
        terms.append(-0.2 * log_p[0] - 0.8 * sum(log_p[1 + j] for j in nearest) / near)
    return float(np.mean(terms))


def naive_hard(query, memory, labeled, chosen, kept: int) -> list[list[float]]:
    """Every mixture is formed, normalized and compared."""
    found = []
    for q, draws in zip(query, chosen, strict=True):
        far = sorted(range(len(memory)), key=lambda j: q @ memory[j])[: len(draws[0])]
        cosines = []
        for draw in draws:
            for j, entry in zip(far, draw, strict=True):
                for a, b in ((1, 2), (2, 1)):
                    mixed = (a * memory[j] + b * labeled[entry]) / 3
                    cosines.append(q @ mixed / np.linalg.norm(mixed))
        found.append(sorted(cosines, reverse=True)[:kept])
    return found


@pytest.mark.parametrize(
    ("step", "total", "novel", "terms"),
    [
        (0, 18, 3, ""),
        (7, 18, 3, ""),
        (8, 1000, 3, "near"),
        (8, 18, 3, "near hard"),
        (8, 18, 5, "near hard"),
    ],
)
@pytest.mark.parametrize("least", [0.95, 0.2])
def test_the_step_equals_the_loop(step, total, novel, terms, least):
    """A memory of 40: 6 neighbors of 3 classes, 4 of 5; 8 or 1 unlike entries, 8
    hardest.

    Kills, each tried: keys of the same view, .8 on the other view, a target that is not
    a mean, neighbors by the smallest cosine, empty entries that count, a class term
    without the other view, terms of unlabeled rows from the start, hard negatives from
    the start, of the nearest entries, not normalized, one mixture, the easiest kept,
    pairs by another view, another cosine than the given one, the oldest rows kept in a
    memory.
    """
    config = small_config(method="ncl", ncl__threshold=least)
    state, logits = fresh_state(config), toy.random_logits(9, 4, novel, 6)
    state.step, state.total_steps = step, total
    memory, labeled, classes = (
        directions(40, 1),
        directions(32, 2),
        torch.arange(32) % 4,
    )
    if step == 0:
        labeled[20:], classes[20:] = 0, -1
    state.extra = {
        "memory": memory,
        "labeled_memory": labeled,
        "labeled_classes": classes,
    }
    logits = logits._replace(
        features=logits.features + 5 * directions(9, 3) / (1 + torch.arange(9)[:, None])
    )
    # a similar pair under this view alone
    logits.features[0, 8] = 2 * logits.features[0, 7] + 0.01
    found = toy.step_on(config, logits, torch.tensor(toy.LABELS), state)

    (first, second), m, known = (
        F.normalize(logits.features, dim=-1).numpy(),
        memory.numpy(),
        labeled.numpy(),
    )
    similar = [[bool(a @ b > least) for b in first[4:]] for a in first[4:]]
    assert np.sum(similar) == 7 if least == 0.95 else 7 < np.sum(similar) < 25
    weight = 5 * toy.ramp(step / total / 0.25)
    expected = toy.naive_pairwise(logits, similar, weight)
    expected += 0.1 * naive_class_terms(first[:4], second[:4], known, classes.tolist())
    if "near" in terms:
        hard = [[]] * 5
        if "hard" in terms:
            shape = 5, 5, 8 if novel == 3 else 1
            draws = torch.randint(
                32, shape, generator=torch.Generator().manual_seed(step)
            )
            hard = naive_hard(first[4:], m, known, draws.tolist(), 8)
        expected += naive_neighbor_terms(
            first[4:], second[4:], m, 40 // novel // 2, hard
        )
    assert found == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(state.extra["memory"], [*first[4:], *m[:-5]])
    np.testing.assert_allclose(state.extra["labeled_memory"], [*first[:4], *known[:-4]])
    assert state.extra["labeled_classes"].tolist() == [
        *toy.LABELS,
        *classes.tolist()[:-4],
    ]


def test_the_other_view_and_the_memories_have_no_gradient():
    """Kills: a key that moves, a memory with a history. Two rows that agree with all
    there is stay.
    """
    query, key = (directions(3, s).requires_grad_() for s in (0, 1))
    ncl.neighbor_loss(query, key.detach(), directions(8, 2), 2, None).backward()
    assert query.grad is not None and query.grad.abs().sum() > 0
    kept = ncl.push_rows(query, directions(2, 4))
    assert kept.shape == (2, 6) and torch.equal(kept, query[:2])
    bad = torch.full((1, 6), float("nan"))
    assert torch.equal(
        ncl.push_rows(bad, directions(2, 4))[0], torch.zeros(6, dtype=torch.float64)
    )


def test_memories_are_no_larger_than_their_sets():
    """Kills: 2,000 entries of 100 rows, ImageNet's size elsewhere, labels of
    unlabeled rows.
    """
    model = build_network(small_config(method="ncl"), 5, 5, 0)
    cases = (40, 30, "digits", (30, 40)), (9000, 5000, "imagenet", (3000, 3000))
    for labeled, unlabeled, preset, sizes in cases:
        config = small_config(method="ncl").model_copy(update={"preset": preset})
        train = TrainSet(
            torch.empty(0), torch.zeros(labeled), torch.empty(unlabeled), 5, 5
        )
        found = ncl.METHOD.initialize(config, model, train)
        assert (len(found["memory"]), len(found["labeled_memory"])) == sizes
        assert found.keys() == {"memory", "labeled_memory", "labeled_classes"}
