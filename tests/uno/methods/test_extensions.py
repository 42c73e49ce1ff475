"""The optional terms against loops over rows, views and classes, and what they do to
a step.
"""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.uno.methods.toy import softmax
from tests.uno.small_run import (
    batches_of,
    fresh_state,
    small_config,
    step_of,
)
from tests.uno.test_objective import problem
from uno.errors import ConfigError
from uno.methods.extensions import iic_loss, iic_view_loss, past_logits, rkd_loss
from uno.methods.uno import Uno
from uno.model import build_network
from uno.objective import global_targets, sinkhorn

TAU = 0.1
SHAPE = {
    "num_views": 3,
    "num_labeled": 3,
    "num_unlabeled": 4,
    "num_known": 4,
    "num_clusters": 3,
    "num_heads": 2,
}


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)))


def test_iic_equals_the_loop_over_pairs():
    """Kills: KL in one direction, pairs of one kind, own-head softmaxes, the sign, a
    sum over heads.
    """
    known, novel, _ = problem(**SHAPE)
    terms = []
    for v, h in product(range(3), range(2)):
        rows = torch.cat([known[v], novel[v, h]], dim=-1).numpy() / TAU
        outputs = list(map(softmax, rows))
        terms += [(kl(a, b) + kl(b, a)) / 2 for a in outputs[:3] for b in outputs[3:]]
    found = iic_loss(known, novel, 3, TAU)
    assert float(found) == pytest.approx(-np.mean(terms), rel=1e-9)
    equal = torch.zeros(2, 4, 3), torch.zeros(2, 1, 4, 2)
    assert float(iic_loss(*equal, 2, TAU)) == pytest.approx(0, abs=1e-6)


def test_iic_of_views_equals_the_loop():
    """Kills: the full softmax, unordered pairs counted twice, no division by the
    classes, heads summed.
    """
    known, novel, _ = problem(**SHAPE)
    labeled, unlabeled = [], []
    pairs = (0, 1), (0, 2), (1, 2)
    for views, b in product(pairs, range(3)):
        p, q = (softmax(known[view, b].numpy() / TAU) for view in views)
        labeled.append((kl(p, q) + kl(q, p)) / 2 / 4)
    for views, h, b in product(pairs, range(2), range(3, 7)):
        p, q = (softmax(novel[view, h, b].numpy() / TAU) for view in views)
        unlabeled.append((kl(p, q) + kl(q, p)) / 2 / 3)
    expected = np.mean(labeled) + np.mean(unlabeled)
    assert float(iic_view_loss(known, novel, 3, TAU)) == pytest.approx(
        expected, rel=1e-9
    )
    same = known[:1].expand(3, -1, -1), novel[:1].expand(3, -1, -1, -1)
    assert float(iic_view_loss(*same, 3, TAU)) == pytest.approx(0, abs=1e-12)


def test_rkd_equals_the_loop():
    """Kills: a softmax over all outputs for the student, T without its square, T in
    place of tau T, a weight that is not relative to the mean, teacher and student
    exchanged.
    """
    known, novel, _ = problem(**SHAPE)
    teacher = problem(**SHAPE, seed=1)[0]
    rows, masses = [], []
    for v, h, b in product(range(3), range(2), range(7)):
        student = softmax(known[v, b].numpy() / TAU / 4)
        taught = softmax(teacher[v, b].numpy() / TAU / 4)
        everything = torch.cat([known[v, b], novel[v, h, b]]).numpy() / TAU / 4
        masses.append(softmax(everything)[:4].sum())
        rows.append(-sum(taught * np.log(student)))
    expected = 16 * np.mean(np.array(masses) / np.mean(masses) * rows)
    assert float(rkd_loss(known, novel, teacher, TAU, 4)) == pytest.approx(
        expected, rel=1e-9
    )


def test_weights_scale_their_terms_in_the_step():
    """Kills: a term that is not added, added twice, or of labeled rows; a teacher
    that sees other views.
    """
    batch = batches_of(small_config())(0)

    def loss(**overrides):
        config = small_config(
            **{f"objective__{name}": value for name, value in overrides.items()}
        )
        state = fresh_state(config)
        other = state.teacher = build_network(config, 5, 0, 3).eval()
        with torch.no_grad():
            logits = fresh_state(config).model(batch.views)
            taught = other([view[len(batch.labels) :] for view in batch.views]).known
        return float(step_of(config)(state, batch, config, 0.0)), logits, taught

    plain, logits, taught = loss()
    rows = len(batch.labels)
    terms = {
        "iic_weight": iic_loss(logits.known, logits.novel, rows, TAU),
        "iic_view_weight": iic_view_loss(logits.known, logits.novel, rows, TAU),
        "rkd_weight": rkd_loss(
            logits.known[:, rows:], logits.novel[:, :, rows:], taught, TAU, 4
        ),
    }
    for name, term in terms.items():
        assert abs(float(term)) > 1e-3
        assert loss(**{name: 0.5})[0] == pytest.approx(
            plain + 0.5 * float(term), rel=1e-4
        ), name
    assert loss(rkd_weight=1.0, rkd_temperature=1.0)[0] != pytest.approx(
        loss(rkd_weight=1.0)[0], rel=1e-3
    )


def test_a_subclass_of_uno_adds_a_term_of_its_own():
    """Kills: a term that replaces the extensions, or counts for the best head."""

    class Mine(Uno):
        name = "mine"

        def terms(self, state, batch, logits, config):
            yield from super().terms(state, batch, logits, config)
            yield 0.5 * logits.novel.square().mean()

    config = small_config(objective__iic_weight=0.5)
    batch, state = batches_of(config)(0), fresh_state(config)
    plain, found = (method.loss(state, batch, config) for method in (Uno(), Mine()))
    with torch.no_grad():
        term = 0.5 * float(state.model(batch.views).novel.square().mean())
    expected = plain.total.item() + term
    assert found.total.item() == pytest.approx(expected, rel=1e-5)
    assert term > 1e-3 and torch.equal(found.of_heads, plain.of_heads)


@pytest.mark.parametrize(
    "name", ["iic_weight", "iic_view_weight", "rkd_weight", "queue_size"]
)
def test_other_methods_refuse_them(name):
    """Kills: an option that silently does nothing."""
    with pytest.raises(ConfigError, match=f"objective.{name} does not go with"):
        small_config(method="rs", **{f"objective__{name}": 1})


@pytest.mark.parametrize("overcluster_factor", [0, 2])
@pytest.mark.parametrize(("warmup_steps", "first"), [(0, 2), (3, 3)])
def test_the_queue_takes_part_when_it_is_full_and_warm_up_is_over(
    warmup_steps, first, overcluster_factor
):
    """Kills: zeros of an unfilled queue in Sinkhorn, a start among random features,
    cosines with prototypes of the past, the oldest rows kept, targets of queued rows
    handed out, the batch's rows behind.
    """
    config = small_config(
        objective__queue_size=10, model__overcluster_factor=overcluster_factor
    )
    state = fresh_state(config)
    state.warmup_steps, past = warmup_steps, []
    heads = [head for head in (state.model.novel, state.model.over) if head is not None]
    for state.step in range(5):
        for head in heads:
            head.weight.data = F.normalize(torch.randn(head.weight.shape), dim=-1)
        # 2 labeled rows, 6 unlabeled
        own = [F.normalize(torch.randn(2, 2, 8, 8), dim=-1) for _ in heads]
        families = [head.cosines(rows) for head, rows in zip(heads, own, strict=True)]
        rows = torch.cat(own, dim=1)[:, :, 2:]
        targets = global_targets(
            families, 2, 2, config.objective, past_logits(state, rows)
        )
        own = [rows[:, :, 2:] for rows in own]
        for i, (head, target) in enumerate(zip(heads, targets, strict=True)):
            seen = torch.cat([own[i], *(rows[i] for rows in past)], dim=2)[:, :, :16]
            logits = head.cosines(seen if state.step >= first else own[i]).detach()
            torch.testing.assert_close(target, sinkhorn(logits, 0.05, 3)[:, :, :6])
        past.insert(0, own)
        torch.testing.assert_close(
            state.extra["queue"][:, :, :6], torch.cat(own, dim=-1)
        )
    assert state.extra["queue"].shape == (2, 2, 10, 8 * len(heads))
    # a bad batch does not stay in the queue
    state = fresh_state(small_config(objective__queue_size=4))
    assert past_logits(state, torch.full((2, 4, 6, 8), float("nan"))) is None
    assert torch.equal(state.extra["queue"], torch.zeros(2, 2, 4, 16))
