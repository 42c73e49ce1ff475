"""Signs of trust, and what they are taken for."""

import pytest
import torch

from tests.uno.small_run import small_config, small_sets
from uno.model import build_model
from uno.prototype_init import training_features
from uno.results import trust
from uno.results.trust import neighbour_agreement, trust_metrics, verdict


def signs(held=0.95, rows=40, kmeans=0.9, near=0.85):
    found = {trust.KMEANS: kmeans, trust.NEAR: near}
    if rows:
        score = held * min(kmeans, near)
        found |= {trust.HELD_OUT: held, trust.HELD_OUT_ROWS: float(rows), trust.SCORE: score}
    return found


@pytest.mark.parametrize(("given", "word", "first", "second"), [
    ({}, "trustworthy", "95.0 % of 40 held-out", "supposing the right number"),
    ({"held": 0.43}, "not trustworthy", "43.0 % of 40 held-out", "not even the known classes"),
    ({"kmeans": 0.5}, "not trustworthy", "95.0 % of 40", "the features hold no such classes"),
    ({"near": 0.7}, "doubtful", "95.0 % of 40", "the features hold no such classes"),
    ({"held": 0.8}, "doubtful", "80.0 % of 40", "not even the known classes"),
    ({"rows": 19}, "doubtful", "so few say little", "k-means agrees on 90 % of the pile"),
    ({"rows": 19, "held": 0.5}, "not trustworthy", "50.0 % of 19", "85 % of neighbours"),
    ({"rows": 0}, "doubtful", "no labeled image was held out", ""),
    ({"rows": 0, "kmeans": 0.4}, "not trustworthy", "no labeled image was held out", ""),
])  # fmt: skip
def test_every_sign_must_hold(given, word, first, second):
    """Kills: heads or training rows that are believed, thresholds exchanged, few rows that decide."""
    found = verdict(signs(**given))
    assert found.word == word and first in found.reasons[0] and second in found.reasons[1]
    assert str(found).startswith(f"{word}: ") and str(found).count("\n") == 1


def test_training_rows_are_called_that_and_old_runs_have_no_verdict():
    assert "(training rows: 100.0 %)" in verdict(signs(rows=0) | {trust.TRAINING: 1.0}).reasons[0]
    assert verdict({trust.TRAINING: 1.0}) is None


def test_neighbours_agree_above_chance():
    """Two classes on either side of what all rows share: 1, though near rows of both are nearer than far ones
    of one. Kills: lengths that count, what all rows share left in, no correction for chance, a row that is
    its own neighbour.
    """
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(24) % 2
    points = torch.zeros(24, 3)
    points[:, 0], points[:, 1] = 5, torch.linspace(0.2, 1, 12).repeat_interleave(2) * (1 - 2 * group)
    assert neighbour_agreement(points * (torch.rand(24, 1, generator=generator) + 0.5), group) == 1
    many = torch.randn(400, 8, generator=generator)
    assert neighbour_agreement(many, torch.randint(0, 2, (400,), generator=generator)) < 0.1
    assert neighbour_agreement(many, torch.arange(400)) == 0  # nobody has its output but a row itself
    assert neighbour_agreement(many, torch.zeros(400, dtype=torch.int64)) == 0  # one class tells nothing


def test_signs_of_a_model_on_the_digits(monkeypatch):
    """An untrained network and one whose outputs are the clusters of its features. Kills: another head than
    the best, known outputs left out, a matching of rows to themselves, more rows than the limit.
    """
    config, (train, _) = small_config(data__setting="ncd"), small_sets()
    model = build_model(config.model, 5, 5, 0).eval()
    values = {"test/known/task_agnostic_strict/acc/best": 0.5}
    sample = training_features(config, model, train)
    found = trust_metrics(config, model, 0, sample, train, values, 30)
    assert found[trust.HELD_OUT] == 0.5 and found[trust.HELD_OUT_ROWS] == 30
    assert found[trust.SCORE] == 0.5 * min(found[trust.KMEANS], found[trust.NEAR])
    seen = []

    def clusters(unlabeled, labeled, labels, num_novel, setting, seed):
        seen.append((len(unlabeled), len(labeled), len(labels), num_novel, setting))
        outputs = trust._outputs(model, unlabeled, 1)
        return type("Found", (), {"assignment": (outputs + 3) % 10})

    monkeypatch.setattr(trust, "clusters_of", clusters)
    monkeypatch.setattr(trust, "MAX_ROWS", 60)
    own, other = (trust_metrics(config, model, head, sample, train, {}, 0) for head in (1, 0))
    assert own[trust.KMEANS] == 1 > other[trust.KMEANS] and set(own) == {trust.KMEANS, trust.NEAR}
    assert seen == [(60, 100, 100, 5, "ncd")] * 2
    few = sample._replace(unlabeled=sample.unlabeled[:4])
    assert trust_metrics(config, model, 0, few, train, values, 30) == {}
