"""The estimate of the number of classes on synthetic features, and each of its parts
by hand.
"""

import itertools
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from sklearn.preprocessing import normalize

from uno.config import override
from uno.data.files import Storage
from uno.data.memory import TrainSet
from uno.errors import ConfigError, StorageError
from uno.presets import preset
from uno.results import estimate as estimating
from uno.runs import ESTIMATE_FILE
from uno.session.estimation import format_estimate

QUICK = estimating.Settings(num_splits=2, max_novel=7, num_restarts=4)
MIXED = override(preset("digits"), {"data.setting": "gcd"})


def synthetic(num_classes, rows=20, noise=0.25, dims=12, seed=0):
    """(classes' centers + noise, class of each row): unit vectors around well
    separated directions.
    """
    generator = np.random.default_rng(seed)
    centers = np.linalg.qr(generator.standard_normal((dims, dims)))[0][:num_classes]
    truth = np.repeat(np.arange(num_classes), rows)
    noise = noise * generator.standard_normal((len(truth), dims)) / dims**0.5
    points = centers[truth] + noise
    return normalize(points).astype(np.float32), truth


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
            return enumerate(
                [estimating.Features(points[rest], labels[rest]) for rest in rests]
            )

        return estimating.estimate_num_novel(
            config,
            train,
            list("abcdef"),
            Storage(str(tmp_path)),
            "cpu",
            settings,
            tasks,
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
    before, best, after = np.split(found.curves["f1"], [num_novel, num_novel + 1])
    assert max(before) <= best > max(0.99, *after)
    assert len(found.splits) == 2
    for split in found.splits:
        assert sorted(split["pretrain"] + split["probe"]) == list("abcdef")
        assert [len(role["f1"]) for role in split["roles"]] == [8] * 6
    stored = json.loads((tmp_path / ESTIMATE_FILE).read_text())
    assert stored == json.loads(json.dumps(asdict(found)))


@pytest.mark.slow
@pytest.mark.parametrize("num_novel", [3, 1])
def test_unlabeled_rows_of_known_classes_are_not_counted_as_novel(estimate, num_novel):
    """Half of each of 6 known classes is in the pile. Kills: the classes of pretraining
    left out of the clusters that are fixed, or fixed without a cluster of their own.
    """
    found = estimate(*synthetic(6 + num_novel, rows=24), QUICK, MIXED)
    assert found.low == found.num_novel == num_novel <= found.high
    assert max(found.curves["f1"]) > found.curves["f1"][0] + 0.01


@pytest.mark.parametrize(
    ("setting", "counts"),
    [("ncd", [12, 0, 0, 4, 4, 4, 4]), ("gcd", [12, 4, 4, 4, 4, 4, 4])],
)
def test_features_of_a_mixed_pile_are_those_of_all_rows(tmp_path, setting, counts):
    """Kills: rows of the classes of pretraining left out, whose unlabeled ones
    nobody would then claim.
    """
    short = {"train.batch_size": 10, "train.max_steps": 1, "model.width": 4}
    config = override(preset("digits"), short | {"data.setting": setting})
    settings = replace(QUICK, num_splits=1, max_novel=1, num_roles=1)
    item = estimating.Split((0, 1), (2, 3, 4, 5)), config, str(tmp_path)
    found = estimating.pretrain_split(train_set(), settings, "cpu", item)
    assert np.bincount(found.labels + 1).tolist() == counts
    (tmp_path / estimating.FEATURES).write_bytes(b"damaged")
    with pytest.raises(StorageError, match="is damaged"):
        estimating.pretrain_split(train_set(), settings, "cpu", item)


def test_only_another_estimate_is_computed(estimate):
    """Kills: a key without data, seed or settings; recomputation of what is there."""
    data, config, train = synthetic(8), preset("digits"), train_set()
    settings = replace(QUICK, max_novel=2, num_roles=1)
    first = estimate(*data, settings, config, train)
    assert len(estimate.calls) == 2 and first.at_limit
    assert "--max-novel 4" in format_estimate(first)
    # where, and what follows pretraining, does not matter
    moved = config.model_copy(
        update={"output": "elsewhere", "discover": config.pretrain}
    )
    for same in (config, moved):
        assert estimate(*data, settings, same, train) == first and not estimate.calls
    images = train.unlabeled_images.flip(0)
    for change in (
        (settings, config.model_copy(update={"seed": 1}), train),
        (settings, MIXED, train),
        (settings, config, replace(train, labels=train.labels.flip(0))),
        (settings, config, replace(train, unlabeled_images=images)),
        (replace(settings, num_restarts=2), config, train),
        (replace(settings, max_novel=1), config, train),
    ):
        assert estimate(*data, *change).key != first.key and len(estimate.calls) == 2


def test_numbers_beyond_the_calibration_have_a_warning():
    found = estimating.Estimate(8, 6, 12, 8, False, [8], {"probability": [1.0]}, {}, "")
    assert "calibrated on 2 to 10" in format_estimate(found)
    assert "calibrated" not in format_estimate(replace(found, high=9))


def test_one_unlabeled_image_is_refused(storage):
    train = train_set(unlabeled=1)
    with pytest.raises(ConfigError, match="1 unlabeled image"):
        estimating.estimate_num_novel(preset("digits"), train, list("abcdef"), storage)


@pytest.mark.parametrize(
    ("known", "probes"), [(4, 2), (5, 3), (6, 4), (7, 4), (8, 4), (80, 20)]
)
def test_class_splits(known, probes):
    """Kills: equal splits, a class in both parts, probes that are always the same
    classes.
    """
    classes = list(range(10, 10 + known))
    splits = estimating.class_splits(classes, 3, seed=0)
    assert len(set(splits)) == 3 == len({split.probe for split in splits})
    for split in splits:
        assert len(split.probe) == probes and len(split.pretrain) >= 2
        assert sorted(split.pretrain + split.probe) == classes
    probed = np.bincount([c for split in splits for c in split.probe])[10:]
    assert probed.max() - probed.min() <= 2
    assert estimating.class_splits(classes, 3, seed=1) != splits
    assert len(estimating.class_splits(range(4), 9, seed=0)) == 4


def test_anchor_choices():
    """Kills: validation classes missing, one choice repeated, all of 125,970 choices
    tried.
    """

    def choices(num_probes):
        split = estimating.Split((0,), tuple(range(1, num_probes + 1)))
        return estimating.anchor_choices(split, estimating.Settings(), 0)

    assert choices(4) == list(itertools.combinations((1, 2, 3, 4), 2))
    assert choices(2) == [(1,), (2,)]
    many = choices(20)
    assert len(many) == len(set(many)) == 6 and {len(choice) for choice in many} == {12}
    assert many == choices(20)


def test_scores_of_one_k():
    """Separated blobs: at the true k everything fits. Kills: unlabeled rows scored,
    anchors scored, clusters numbered as classes (accuracy without matching).
    """
    points, truth = synthetic(6)  # probes 0-3, unlabeled 4 and 5
    features = [estimating.Features(points, np.where(truth < 4, truth, -1))]
    shared = (
        [estimating.Split((), (0, 1, 2, 3))],
        features,
        preset("digits"),
        estimating.Settings(num_roles=6),
    )
    right, again, none = (
        estimating.score_num_novel(*shared, "cpu", (0, k)) for k in (2, 2, 0)
    )
    assert right == again == [1.0] * 6
    assert max(none) < 0.95


@pytest.mark.parametrize(
    ("votes", "ends"),
    [
        ([1, 3, 3, 3, 3, 3, 3, 3, 3, 9], (3, 3)),
        ([2, 2, 2, 3, 3, 3, 3, 4, 4, 4], (2, 4)),
        ([2, 3, 4, 5], (2, 5)),
        ([0, 0, 0], (1, 1)),
    ],
)
def test_interval(votes, ends):
    """Kills: rounding inwards, minimum and maximum for quantiles, 0 classes."""
    assert estimating.interval(votes, 0.2) == ends


@pytest.mark.parametrize(
    ("estimated", "suggested"),
    [((3, 2, 4), 4), ((3, 3, 3), 3), ((3, 2, 7), 4), ((6, 2, 7), 6)],
)
def test_a_suggestion_is_at_most_twice_low(estimated, suggested):
    assert estimating.suggest(*estimated) == suggested


def test_ties_go_to_the_larger_number():
    assert estimating.largest_best([0.1, 0.5, 0.2, 0.5, 0.4]) == 3
