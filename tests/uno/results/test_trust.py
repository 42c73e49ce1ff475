"""Signs of trust, and what they are taken for."""

from types import SimpleNamespace

import pytest
import torch

from tests.uno.small_run import small_config, small_sets
from uno.clustering.initialization import training_features
from uno.data.features import oddity
from uno.model import build_network
from uno.results import trust


def signs(held=0.95, rows=40, kmeans=0.9, near=0.85):
    found = {trust.KMEANS: kmeans, trust.NEAR: near}
    if rows:
        found[trust.HELD_OUT] = held
        found[trust.HELD_OUT_ROWS] = float(rows)
        found[trust.SCORE] = held * min(kmeans, near)
    return found


SEEN = {trust.LARGEST: 0.5}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"trust/features/zero": 1.0}, "the features of all images are zero"),
        (
            {"trust/features/constant": 1.0, trust.LARGEST: 1.0},
            (
                "the features of all images are the same, and 100% of the unlabeled"
                " images are in one class"
            ),
        ),
        ({"trust/features/huge": 1.0}, "the features are larger than 1e+06"),
        ({trust.LARGEST: 0.995}, "100% of the unlabeled images are in one class"),
        ({}, None),
    ],
)
def test_a_verdict_says_what_makes_a_run_worthless(given, text):
    """Whatever its signs are. Kills: a pile in one class that is called trustworthy."""
    found = trust.verdict(signs() | SEEN | given)
    assert found.word == ("trustworthy" if text is None else "not trustworthy")
    assert text is None or found.reasons[1].startswith(text + ": another encoder")


def test_features_that_tell_no_images_apart_have_a_word():
    normal = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    odd = [normal * 0, normal * 0 + 3.7, normal * 1e30, normal * 1e-3, normal + 100]
    assert list(map(oddity, odd)) == ["zero", "constant", "huge", "", ""]


@pytest.mark.parametrize(
    ("given", "word", "first", "second"),
    [
        (
            {},
            "trustworthy",
            "95.0% of 40 held-out",
            "assuming the number of classes is right",
        ),
        (
            {"held": 0.43},
            "not trustworthy",
            "43.0% of 40 held-out",
            "known classes are not separated either",
        ),
        (
            {"kmeans": 0.5},
            "not trustworthy",
            "95.0% of 40",
            "try another number of them or longer training",
        ),
        (
            {"near": 0.7},
            "doubtful",
            "95.0% of 40",
            "the features do not separate these classes",
        ),
        (
            {"held": 0.8},
            "doubtful",
            "80.0% of 40",
            "known classes are not separated either",
        ),
        (
            {"rows": 19},
            "doubtful",
            "too few for a verdict",
            "k-means agrees on 90% of the unlabeled",
        ),
        (
            {"rows": 19},
            "doubtful",
            "raise --data.validation-fraction",
            "assuming the number of classes is right",
        ),
        (
            {"rows": 19, "held": 0.5},
            "not trustworthy",
            "50.0% of 19",
            "nearest neighbors on 85%",
        ),
        ({"rows": 0}, "doubtful", "no labeled image was held out", ""),
        (
            {"rows": 0, "kmeans": 0.4},
            "not trustworthy",
            "no labeled image was held out",
            "",
        ),
    ],
)
def test_every_sign_must_hold(given, word, first, second):
    """Kills: heads or training rows that are believed, thresholds exchanged, few
    rows that decide.
    """
    found = trust.verdict(signs(**given))
    assert found.word == word
    assert first in found.reasons[0] and second in found.reasons[1]
    assert str(found).startswith(f"{word}: ") and str(found).count("\n") == 1


def checkpoint(agreement=(0.9,) * 8, counts=(200, 5, 5), similar=()):
    """What the method ``clustering`` leaves in a checkpoint."""
    return {
        "extra/agreement": torch.tensor(agreement, dtype=torch.float64),
        "extra/counts": torch.tensor(counts),
        "extra/similar": torch.tensor(similar, dtype=torch.float64).reshape(-1, 3),
    }


@pytest.mark.parametrize(
    ("setting", "counted"),
    [
        ("ncd", "accuracy on images of new classes"),
        ("gcd", "accuracy on all unlabeled images"),
    ],
)
def test_the_expected_accuracy_says_what_it_counts(setting, counted):
    values = trust.clustering_metrics(checkpoint(), setting, "vectors")
    first, *rest = trust.verdict(signs() | values).reasons
    assert first.startswith(f"expected {counted}: ")
    assert "if there are 5 new classes" in first
    assert any("known output" in line for line in rest) == (setting == "gcd")
    key = f"trust/expected/{setting}"
    assert values[f"{key}/low"] < values[f"{key}/acc"] < values[f"{key}/high"]


@pytest.mark.parametrize(
    ("share", "word"),
    [
        (0.2, "not trustworthy"),
        (0.5, "not trustworthy"),
        (0.7, "doubtful"),
        (0.85, "doubtful"),
        (0.99, "trustworthy"),
    ],
)
@pytest.mark.parametrize(
    "others", [{}, {"kmeans": 0.3, "near": 0.2}, {"rows": 0}, {"held": 0.2}], ids=str
)
def test_the_verdict_is_the_expected_accuracy_in_a_word(share, word, others):
    """The other signs, good or bad, do not contradict it."""
    values = trust.clustering_metrics(checkpoint([share] * 8), "ncd", "vectors")
    assert trust.verdict(signs(**others) | values).word == word


@pytest.mark.parametrize(
    ("encoder", "counts", "facts"),
    [
        ("timm:tf_efficientnet_lite0", (200, 5, 5), None),
        ("vectors:50", (200, 5, 5), None),
        (
            "torchvision:resnet18",
            (10**6, 5, 400),
            ["1,000,000 unlabeled images", "400 novel classes", "another encoder"],
        ),
    ],
)
def test_a_task_outside_the_calibration_is_called_less_certain(encoder, counts, facts):
    values = trust.clustering_metrics(checkpoint(counts=counts), "ncd", encoder)
    reasons = trust.verdict(signs() | values).reasons
    lines = [line for line in reasons if "less certain" in line]
    assert len(lines) == (facts is not None)
    for line in lines:
        assert [fact for fact in facts if fact not in line] == []
        assert "known classes" not in line


def test_pairs_of_classes_that_look_like_one_are_advice():
    values = checkpoint(similar=[[1, 4, 0.9]])
    values = trust.clustering_metrics(values, "ncd", "vectors")
    last = trust.verdict(signs() | values).reasons[-1]
    assert "novel-2 and novel-5" in last and "uno classes" in last


@pytest.mark.parametrize(
    "tensors", [checkpoint([]), {"model/known.weight": torch.zeros(1)}]
)
def test_without_agreements_nothing_is_expected(tensors):
    """Too few rows to cluster a half of them, or another method."""
    values = trust.clustering_metrics(tensors, "ncd", "vectors")
    assert not any(key.startswith("trust/expected") for key in values)
    assert trust.verdict(signs() | values).word == "trustworthy"


def test_training_rows_are_called_that_and_old_runs_have_no_verdict():
    found = trust.verdict(signs(rows=0) | {trust.TRAINING: 1.0})
    assert "(training images: 100.0%)" in found.reasons[0]
    assert trust.verdict({trust.TRAINING: 1.0}) is None


def test_neighbors_agree_above_chance():
    """Two classes on either side of what all rows share: 1, though near rows of both
    are nearer than far ones of one. Kills: lengths that count, what all rows share left
    in, no correction for chance, a row that is its own neighbor.
    """
    group = torch.arange(24) % 2
    side = torch.linspace(0.2, 1, 12).repeat_interleave(2) * (1 - 2 * group)
    points = torch.stack([torch.full((24,), 5.0), side, torch.zeros(24)], dim=1)
    assert trust.neighbor_agreement(points * (torch.rand(24, 1) + 0.5), group) == 1
    many = torch.randn(400, 8)
    assert trust.neighbor_agreement(many, torch.randint(0, 2, (400,))) < 0.1
    # nobody has its output but a row itself
    assert trust.neighbor_agreement(many, torch.arange(400)) == 0
    # one class tells nothing
    assert trust.neighbor_agreement(many, torch.zeros(400, dtype=torch.int64)) == 0


def test_signs_of_a_model_on_the_digits(monkeypatch):
    """An untrained network and one whose outputs are the clusters of its features.
    Kills: another head than the best, known outputs left out, a matching of rows to
    themselves, more rows than the limit.
    """
    config, (train, _) = small_config(data__setting="ncd"), small_sets()
    model = build_network(config, 5, 5, 0).eval()
    values = {"test/known/task_agnostic_strict/acc/best": 0.5}
    sample = training_features(config, model, train)
    shown = trust.subsample_unlabeled(config, sample, train)
    clusters = trust.cluster_unlabeled(config, shown, 5)
    found = trust.trust_metrics(model, 0, shown.unlabeled, clusters, values, 30)
    assert found[trust.HELD_OUT] == 0.5 and found[trust.HELD_OUT_ROWS] == 30
    assert found[trust.SCORE] == 0.5 * min(found[trust.KMEANS], found[trust.NEAR])

    def cluster_features(unlabeled, labeled, labels, num_novel, setting, seed):
        assert (len(unlabeled), len(labeled), len(labels)) == (60, 100, 100)
        assert (num_novel, setting) == (5, "ncd")
        outputs = trust._outputs(model, unlabeled, 1)
        return SimpleNamespace(assignment=(outputs + 3) % 10)

    monkeypatch.setattr(trust, "cluster_features", cluster_features)
    monkeypatch.setattr(trust, "MAX_ROWS", 60)
    shown = trust.subsample_unlabeled(config, sample, train)
    clusters = trust.cluster_unlabeled(config, shown, 5)
    own, other = (
        trust.trust_metrics(model, head, shown.unlabeled, clusters, {}, 0)
        for head in (1, 0)
    )
    assert own[trust.KMEANS] == 1 > other[trust.KMEANS]
    assert own.keys() == {trust.KMEANS, trust.NEAR, trust.LARGEST}
    few = sample._replace(unlabeled=sample.unlabeled[:4])
    assert trust.subsample_unlabeled(config, few, train) is None
