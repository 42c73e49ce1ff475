"""Parametric information maximization against loops in float64, and on features
whose classes are known.
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tests.uno.methods import toy
from tests.uno.methods.test_all_methods import config_of, feature_set
from tests.uno.small_run import fresh_state, small_config, train_both
from uno.clustering.initialization import Sample, cluster_features
from uno.config import override
from uno.data.files import Storage
from uno.method import default_settings
from uno.methods import pim


def naive_objective(logits, weight, supervised, num_masked):
    """(V, B, C)."""
    p = {
        (v, i): toy.softmax(row)
        for v, view in enumerate(logits)
        for i, row in enumerate(view)
    }
    free = [row for (_, i), row in p.items() if i >= len(toy.LABELS)]
    entropy = np.mean([-sum(a * np.log(a) for a in row) for row in free])
    mean = np.mean(list(p.values()), axis=0)
    loss = weight * entropy + sum(m * np.log(m) for m in mean)
    if supervised:
        loss += np.mean(
            [
                -np.log(row[toy.LABELS[i]])
                for (_, i), row in p.items()
                if i < len(toy.LABELS)
            ]
        )
    return loss + (
        np.mean([-np.log(sum(row[num_masked:])) for row in free]) if num_masked else 0
    )


@pytest.mark.parametrize(
    ("supervised", "num_masked"), [(True, 0), (False, 0), (True, 4)]
)
def test_the_objective_equals_the_loop(supervised, num_masked):
    """Kills: the entropy of labeled rows, too, the mean over unlabeled rows alone,
    lambda on the other term, labels in the search of lambda, unlabeled rows of known
    classes where all are new.
    """
    logits = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    found = pim.pim_objective(
        logits, torch.tensor(toy.LABELS), 0.3, supervised, num_masked
    )
    expected = naive_objective(logits.detach().numpy(), 0.3, supervised, num_masked)
    assert float(found.detach()) == pytest.approx(expected, rel=1e-9)
    own = (torch.tensor(toy.LABELS), 0.3, supervised, num_masked)
    assert torch.autograd.gradcheck(lambda x: pim.pim_objective(x, *own), (logits,))


def test_the_step_is_the_objective_of_two_views():
    """Kills: known outputs left out, another temperature, rows that are masked in
    the GCD setting.
    """
    for setting, num_masked in (("ncd", 5), ("gcd", 0)):
        config = small_config(
            method="pim", pim__weight=0.4, pim__steps=1, data__setting=setting
        )
        state, logits = fresh_state(config), toy.random_logits(9, 5, 5, 16)
        joint = (
            np.concatenate([logits.known.numpy(), logits.novel[:, 0].numpy()], axis=-1)
            / toy.TAU
        )
        found = toy.step_on(config, logits, torch.tensor(toy.LABELS), state)
        assert found == pytest.approx(
            naive_objective(joint, 0.4, True, num_masked), rel=1e-6
        )


def test_descent_is_adams_on_all_rows():
    """Three steps by hand. Kills: decay beside the gradient (AdamW), another rate, a
    factor other than 25.
    """
    rows, weights = (
        normalize(torch.randn(9, 4).double(), dim=1),
        torch.randn(6, 4).double(),
    )
    found = pim.minimize_objective(weights, rows, torch.tensor(toy.LABELS), 0.3, 3)
    first = second = torch.zeros_like(weights)
    for n in (1, 2, 3):
        leaf = weights.clone().requires_grad_()
        pim.pim_objective(
            25 * (rows @ leaf.T)[None], torch.tensor(toy.LABELS), 0.3
        ).backward()
        gradient = leaf.grad + 0.01 * weights
        first, second = (
            0.9 * first + 0.1 * gradient,
            0.999 * second + 0.001 * gradient**2,
        )
        weights = weights - 0.001 * first / (1 - 0.9**n) / (
            (second / (1 - 0.999**n)).sqrt() + 1e-8
        )
    torch.testing.assert_close(found, weights)


def test_lambda_is_the_best_on_labeled_rows(monkeypatch):
    """Kills: the smallest or last value, labels in the search, centers that know
    labels, one that is given searched all the same, the search's weights as the result.
    """
    train, asked = feature_set(), []
    sample = Sample(
        train.labeled_images[:, 0], train.labels, train.unlabeled_images[:, 0]
    )

    def minimize_objective(
        weights, rows, labels, weight, steps, supervised=True, num_masked=0
    ):
        asked.append((weight, supervised, num_masked))
        # others find nothing
        return weights if weight in (0.5, 0.75) else weights.roll(1, 1)

    monkeypatch.setattr(pim, "minimize_objective", minimize_objective)
    found = pim.fit_classifier(sample, 5, "ncd", 0)
    assert found.weight == 0.5 and asked == [
        *((w, False, 0) for w in pim.WEIGHTS),
        (0.5, True, 5),
    ]
    means = [
        normalize(sample.labeled, dim=1)[sample.labels == c].mean(dim=0)
        for c in range(5)
    ]
    torch.testing.assert_close(found.weights[:5], normalize(torch.stack(means), dim=1))
    expected = cluster_features(sample.unlabeled, *sample[:2], 5, "ncd", 0).centers
    torch.testing.assert_close(found.weights[5:], expected)
    asked.clear()
    assert pim.fit_classifier(
        sample, 5, "gcd", 0, weight=0.9
    ).weight == 0.9 and asked == [(0.9, True, 0)]


def test_rows_of_different_length_are_kept_as_cosines():
    """Kills: prototypes that are scaled to length one, which moves rows between
    classes.
    """
    weights, z = (
        torch.randn(6, 5).double() * torch.rand(6, 1),
        normalize(torch.randn(99, 5).double(), dim=1),
    )
    long = pim.pad_to_one_length(weights)
    torch.testing.assert_close(long.norm(dim=1), torch.ones(6).double())
    cosines = pim.PaddingAdapter(5)(7 * z).double() @ long.T
    torch.testing.assert_close(
        cosines * weights.norm(dim=1).max(), z @ weights.T, rtol=1e-5, atol=1e-6
    )
    assert not torch.equal(
        (z @ normalize(weights, dim=1).T).argmax(dim=1), cosines.argmax(dim=1)
    )


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
def test_the_run_has_the_fits_classes(setting):
    """Kills: known and novel rows exchanged, a lambda that is lost, an adapter that
    moves features.
    """
    config, train = (
        config_of(method="pim", pim__steps=20, data__setting=setting),
        feature_set(),
    )
    state = fresh_state(config, train=train)
    sample = Sample(
        train.labeled_images[:, 0], train.labels, train.unlabeled_images[:, 0]
    )
    found = pim.fit_classifier(sample, 5, setting, config.seed, steps=20)
    assert float(state.extra["weight"]) == pytest.approx(found.weight)
    for rows in (train.labeled_images[:, 0], train.unlabeled_images[:, 0]):
        heads = state.model.eval().heads(rows)
        joint = torch.cat([heads.known[0], heads.novel[0, 0]], dim=1).argmax(dim=1)
        assert torch.equal(
            joint, (normalize(rows, dim=1) @ found.weights.T).argmax(dim=1)
        )


def test_a_run_pretrains_and_then_takes_no_step(tmp_path):
    """Kills: a known head of one coordinate more that is refused after pretraining."""
    config = small_config(method="pim", pim__steps=2, pretrain__epochs=1)
    config = override(config, default_settings("pim", "digits"))
    assert config.discover.epochs == 0
    state = train_both(config, Storage(str(tmp_path)))
    assert state.step == 0 and state.model.known.weight.shape == (5, 17)
