"""The estimate of the number of classes on synthetic features, and each of its parts
by hand.
"""

import itertools
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from uno.config import override
from uno.data.files import Storage
from uno.data.memory import TrainSet
from uno.errors import ConfigError
from uno.presets import preset
from uno.results import estimate as estimating
from uno.results.estimate import (
    Estimate,
    Features,
    Settings,
    Split,
    anchor_choices,
    interval,
)
from uno.runs import ESTIMATE_FILE
from uno.session.estimation import format_estimate

QUICK = Settings(num_splits=2, max_novel=7, num_restarts=4)


def synthetic(num_classes, rows=20, noise=0.25, dims=12, seed=0):
    """(classes' centers + noise, class of each row): unit vectors around well
    separated directions.
    """
    generator = np.random.default_rng(seed)
    centers = np.linalg.qr(generator.standard_normal((dims, dims)))[0][:num_classes]
    truth = np.repeat(np.arange(num_classes), rows)
    points = (
        centers[truth]
        + noise * generator.standard_normal((len(truth), dims)) / dims**0.5
    )
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(
        np.float32
    ), truth


def train_set(num_known=6, rows=4, unlabeled=12):
    images = torch.randint(0, 256, (num_known * rows, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(num_known).repeat_interleave(rows)
    more = torch.randint(0, 256, (unlabeled, 3, 8, 8), dtype=torch.uint8)
    return TrainSet(images, labels, more, num_known, 1)


@pytest.fixture
def estimate(tmp_path):
    """``estimate(points, truth, ...)`` of 6 known classes, whose "pretraining" hands
    out ``points``.
    """

    def run(points, truth, settings, config=preset("digits"), train=train_set()):  # noqa: B008
        run.calls = []

        def tasks(function, shared, items):
            run.calls.append(function)
            if function is not estimating.pretrain_split:
                return estimating.run_local(function, shared, items)
            # then every second row of a known class has no label
            mixed = config.data.setting == "gcd"
            hidden = np.arange(len(truth)) % 2 == 1 if mixed else False
            labels = np.where((truth < 6) & ~hidden, truth, -1)
            rests = [~np.isin(labels, split.pretrain) | mixed for split, *_ in items]
            return enumerate([Features(points[rest], labels[rest]) for rest in rests])

        storage, known = Storage(str(tmp_path)), list("abcdef")
        return estimating.estimate_num_novel(
            config, train, known, storage, "cpu", settings, tasks
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("num_novel", [1, 2, 4])
def test_finds_the_number_of_separated_classes(estimate, tmp_path, num_novel):
    """6 known and 1, 2 or 4 novel blobs. Only the upper end may be larger: one cluster
    too many that splits an unlabeled class costs nothing, and ties go to the larger k.

    Kills: k off by the anchors or probes, clusters of the known classes counted, votes
    of one split only.
    """
    data = synthetic(6 + num_novel)
    found = estimate(*data, QUICK)
    assert found.low == found.num_novel == num_novel <= found.high
    assert num_novel <= found.suggested <= 2 * num_novel
    assert found.ks == list(range(8)) and found.at_limit == (found.high == 7)
    curve = found.curves["f1"]
    assert (
        max(curve[:num_novel]) <= curve[num_novel] > max(0.99, *curve[num_novel + 1 :])
    )
    assert len(found.splits) == 2
    for split in found.splits:
        assert sorted(split["pretrain"] + split["probe"]) == list("abcdef")
        assert [len(role["f1"]) for role in split["roles"]] == [8] * 6
    assert json.loads((tmp_path / ESTIMATE_FILE).read_text()) == json.loads(
        json.dumps(asdict(found))
    )
    again = estimate(*data, replace(QUICK, max_novel=1))
    assert again.ks[-1] == 1 and again.key != found.key


@pytest.mark.slow
@pytest.mark.parametrize("num_novel", [3, 1])
def test_unlabeled_rows_of_known_classes_are_not_counted_as_novel(estimate, num_novel):
    """Half of each of 6 known classes is in the pile. Kills: the classes of pretraining
    left out of the clusters that are fixed, or fixed without a cluster of their own.
    """
    config = override(preset("digits"), {"data.setting": "gcd"})
    found = estimate(*synthetic(6 + num_novel, rows=24), QUICK, config)
    assert found.low == found.num_novel == num_novel <= found.high
    assert max(found.curves["f1"]) > found.curves["f1"][0] + 0.01
    settings, data = replace(QUICK, max_novel=1), synthetic(6 + num_novel, rows=24)
    assert estimate(*data, settings).key != estimate(*data, settings, config).key


def test_features_of_a_mixed_pile_are_those_of_all_rows(tmp_path, monkeypatch):
    """Kills: rows of the classes of pretraining left out, whose unlabeled ones
    nobody would then claim.
    """
    train, settings, counts = (
        train_set(),
        replace(QUICK, num_splits=1, max_novel=1, num_roles=1),
        [],
    )
    for setting in ("ncd", "gcd"):
        config = override(
            preset("digits"),
            {
                "data.setting": setting,
                "train.batch_size": 10,
                "train.max_steps": 1,
                "model.width": 4,
            },
        )
        split = Split((0, 1), (2, 3, 4, 5))
        found = estimating.pretrain_split(
            train, settings, "cpu", (split, config, str(tmp_path / setting))
        )
        counts.append(np.bincount(found.labels + 1).tolist())
    assert counts == [[12, 0, 0, 4, 4, 4, 4], [12, 4, 4, 4, 4, 4, 4]]


def test_a_finished_estimate_is_returned_and_another_seed_is_not(estimate):
    """Kills: a key without data, seed or settings; recomputation of what is there."""
    data, config, train = synthetic(8), preset("digits"), train_set()
    settings = replace(QUICK, max_novel=2, num_roles=1)
    first = estimate(*data, settings, config, train)
    assert len(estimate.calls) == 2 and first.at_limit
    assert (
        f"repeat uno estimate-classes with --max-novel {2 * first.ks[-1]}"
        in format_estimate(first)
    )
    moved = config.model_copy(
        update={"output": "elsewhere", "discover": config.pretrain}
    )
    for same in (config, moved):  # where, and what follows pretraining, does not matter
        assert estimate(*data, settings, same, train) == first and not estimate.calls
    for change in (
        (settings, config.model_copy(update={"seed": 1}), train),
        (settings, config, replace(train, labels=train.labels.flip(0))),
        (
            settings,
            config,
            replace(train, unlabeled_images=train.unlabeled_images.flip(0)),
        ),
        (replace(settings, num_restarts=2), config, train),
    ):
        assert estimate(*data, *change).key != first.key and len(estimate.calls) == 2


def test_numbers_beyond_the_calibration_have_a_warning():
    found = Estimate(8, 6, 12, 8, False, [8], {"probability": [1.0]}, {}, "")
    assert "calibrated on 2 to 10" in format_estimate(found)
    assert "calibrated" not in format_estimate(replace(found, high=9))


def test_too_little_to_go_by(tmp_path):
    storage = Storage(str(tmp_path))
    with pytest.raises(
        ConfigError, match="at least 4 known classes with images, found 3"
    ):
        estimating.estimate_num_novel(
            preset("digits"), train_set(3), list("abc"), storage
        )
    with pytest.raises(ConfigError, match="1 unlabeled image"):
        estimating.estimate_num_novel(
            preset("digits"), train_set(unlabeled=1), list("abcdef"), storage
        )


@pytest.mark.parametrize(
    ("known", "probes"), [(4, 2), (5, 3), (6, 4), (7, 4), (8, 4), (80, 20)]
)
def test_class_splits(known, probes):
    """Kills: equal splits, a class in both parts, probes that are always the same
    classes.
    """
    splits = estimating.class_splits(range(10, 10 + known), 3, seed=0)
    assert len(set(splits)) == 3 == len({split.probe for split in splits})
    for split in splits:
        assert len(split.probe) == probes and len(split.pretrain) >= 2
        assert sorted(split.pretrain + split.probe) == list(range(10, 10 + known))
    probed = np.bincount([c for split in splits for c in split.probe])[10:]
    assert probed.max() - probed.min() <= 2
    assert estimating.class_splits(range(10, 10 + known), 3, seed=1) != splits
    assert len(estimating.class_splits(range(4), 9, seed=0)) == 4


def test_anchor_choices():
    """Kills: validation classes missing, one choice repeated, all of 125,970 choices
    tried.
    """
    settings = Settings()
    pairs = list(itertools.combinations((1, 2, 3, 4), 2))
    assert anchor_choices(Split((0,), (1, 2, 3, 4)), settings, 0) == pairs
    assert anchor_choices(Split((0,), (1, 2)), settings, 0) == [(1,), (2,)]
    split = Split((0,), tuple(range(1, 21)))
    many = anchor_choices(split, settings, 0)
    assert len(many) == len(set(many)) == 6 and {len(choice) for choice in many} == {12}
    assert many == anchor_choices(split, settings, 0)


def test_scores_of_one_k():
    """Separated blobs: at the true k everything fits. Kills: unlabeled rows scored,
    anchors scored, clusters numbered as classes (accuracy without matching).
    """
    points, truth = synthetic(6)  # probes 0-3, unlabeled 4 and 5
    labels = np.where(truth < 4, truth, -1)
    split, settings = Split((), (0, 1, 2, 3)), Settings(num_roles=6)

    def scores(k):
        features = [Features(points, labels)]
        return estimating.score_num_novel(
            [split], features, preset("digits"), settings, "cpu", (0, k)
        )

    right = scores(2)
    assert right == [1.0] * 6
    assert max(scores(0)) < 0.95
    assert scores(2) == right


def test_interval_and_suggestion():
    """Kills: rounding inwards, minimum and maximum for quantiles, 0 classes, a
    suggestion above twice low.
    """
    assert interval([1, 3, 3, 3, 3, 3, 3, 3, 3, 9], 0.2) == (3, 3)
    assert interval([2, 2, 2, 3, 3, 3, 3, 4, 4, 4], 0.2) == (2, 4)
    assert interval([2, 3, 4, 5], 0.2) == (2, 5) and interval([0, 0, 0], 0.2) == (1, 1)
    assert [
        estimating.suggest(*given)
        for given in ((3, 2, 4), (3, 3, 3), (3, 2, 7), (6, 2, 7))
    ] == [
        4,
        3,
        4,
        6,
    ]
    assert (
        estimating.largest_best([0.1, 0.5, 0.2, 0.5, 0.4]) == 3
        and estimating.largest_best([1.0]) == 0
    )
