"""The score sees known labels only: hidden classes, held-out rows, and no truth of
the novel ones.
"""

import numpy as np
import pytest
import torch

from tests.tune.tiny import claimed, folds_of, run_tiny, tiny_data, tiny_options
from tune import AGREEMENT, FOLDS
from tune.score import (
    _assign_clusters,
    _head_agreement,
    combined,
    hidden_classes,
)
from uno.errors import ConfigError
from uno.model import build_network, forward


def shuffled_truth(labels: np.ndarray) -> np.ndarray:
    """The true labels of novel rows (5 and up) permuted; those of known rows as they
    are.
    """
    novel = np.flatnonzero(labels >= 5)
    labels[novel] = np.random.default_rng(1).permutation(labels[novel])
    return labels


@pytest.mark.parametrize(
    ("known", "novel", "folds"), [(5, 5, 2), (10, 5, 3), (80, 20, 5), (7, 3, 7)]
)
def test_folds_hide_all_known_classes_about_equally_often(known, novel, folds):
    """Kills: folds drawn independently, which may hide one class always and another
    never.
    """
    hidden = hidden_classes(known, novel, folds, seed=0)
    counts = np.bincount(np.concatenate(hidden), minlength=known)
    assert counts.max() - counts.min() <= 1
    assert len(set(hidden)) == folds
    assert all(len(set(h)) == len(h) == len(hidden[0]) for h in hidden)


def test_hidden_classes_depend_on_the_seed_alone():
    drawn = hidden_classes(10, 5, 2, seed=0)
    assert drawn == hidden_classes(10, 5, 2, seed=0) != hidden_classes(10, 5, 2, seed=1)


@pytest.mark.parametrize(
    ("known", "novel", "hide", "expected"),
    [
        (80, 20, None, 16),
        (5, 5, None, 3),
        (3, 1, None, 2),
        (3, 100, None, 2),
        (5, 5, 4, 4),
    ],
)
def test_a_fold_hides_the_share_of_classes_that_is_novel(known, novel, hide, expected):
    """At least two classes, and one stays known."""
    assert len(hidden_classes(known, novel, 1, 0, hide)[0]) == expected


@pytest.mark.parametrize(
    "known, folds, hide", [(2, 1, None), (5, 6, None), (5, 2, 5), (5, 2, 1), (4, 3, 2)]
)
def test_impossible_folds_are_config_errors(known, folds, hide):
    with pytest.raises(ConfigError):
        hidden_classes(known, 5, folds, 0, hide)


def test_a_fold_is_made_of_labeled_rows_alone(tmp_path):
    """Kills: unlabeled or test rows in a fold, held-out rows trained on, classes
    numbered wrongly.
    """
    config = tiny_options(tmp_path).config
    data = tiny_data(config)
    for fold in folds_of(data, config):
        visible = [c for c in range(5) if c not in fold.rows.hidden]
        rows = fold.scored.index.numpy()
        assert (data.labels[rows] >= 0).all() and not data.unlabeled[rows].any()
        assert (
            np.array([*visible, *fold.rows.hidden])[fold.scored.truth]
            == data.labels[rows]
        ).all()
        hidden = np.isin(data.labels, fold.rows.hidden)
        assert len(fold.train.unlabeled_images) == hidden.sum()
        held_out = np.setdiff1d(rows, np.flatnonzero(hidden))
        assert (
            len(held_out) + len(fold.train.labels)
            == ((data.labels >= 0) & ~hidden).sum()
        )
        assert set(fold.train.labels.tolist()) == set(range(len(visible)))
        trained = {image.numpy().tobytes() for image in fold.train.labeled_images}
        assert trained.isdisjoint(data.images[row].tobytes() for row in held_out)


@pytest.mark.parametrize(
    "score", [FOLDS, pytest.param(AGREEMENT, marks=pytest.mark.slow)]
)
def test_the_true_novel_labels_change_no_score(tmp_path, score):
    """THE property of the sweep. Kills any path from ``eval_labels`` to a score."""
    options = tiny_options(tmp_path, "--score", score, "--folds", "1")
    found = []
    for relabel in (None, shuffled_truth, lambda labels: labels * 0 - 1):
        data = tiny_data(options.config, relabel)
        with claimed(tmp_path / str(len(found))) as storage:
            found.append(run_tiny(options, data, storage))
    true, *others = found
    assert len(true) == 2 and others == [true, true]


def test_scores_of_an_epoch(tmp_path):
    """Kills: the score of one fold in the place of the mean, rows of one fold."""
    options = tiny_options(tmp_path)
    data = tiny_data(options.config)
    with claimed(tmp_path / "sweep") as storage:
        line = run_tiny(options, data, storage)[0]
    folds = folds_of(data, options.config)
    assert len(line["scores"]) == 2
    assert line["score"] == pytest.approx(np.mean(line["scores"]))
    assert line["rows"] == sum(len(fold.scored.truth) for fold in folds)


PARTS = {
    "loss": 1.5,
    "known_avg": 1.0,
    "novel_avg": 0.5,
    "known_best": 0.2,
    "agreement": 0.3,
}


@pytest.mark.parametrize(
    ("parts", "score", "expected"),
    [
        (PARTS, FOLDS, 2 / 3),
        (PARTS | {"novel_avg": 0.0}, FOLDS, 0),
        ({"known_avg": 0, "novel_avg": 0}, FOLDS, 0),
        ({"novel_avg": 0.5}, FOLDS, 0.5),
        (PARTS, AGREEMENT, 0.3),
    ],
)
def test_one_number_of_the_parts(parts, score, expected):
    """The harmonic mean of known and novel accuracy, or the agreement of heads."""
    assert combined(parts, score) == pytest.approx(expected)


A, B, KNOWN = 0, 1, -1


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([[A, A, B, B], [B, B, A, A]], 1),
        ([[A, A, B, B], [B, A, A, A]], 3 / 4),
        ([[A, A, KNOWN, KNOWN], [B, B, KNOWN, KNOWN]], 1),
        ([[A, A, B, KNOWN], [B, B, KNOWN, KNOWN]], 2 / 3),
        ([[KNOWN, A], [A, KNOWN]], 0),
        ([[KNOWN, KNOWN], [KNOWN, KNOWN]], 0),
    ],
)
def test_heads_agree_on_what_they_find_new(heads, expected):
    """Kills: a sweep that prefers heads which find only known classes."""
    assert _head_agreement(np.array(heads), 2) == pytest.approx(expected)


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
def test_known_classes_compete_with_the_clusters_in_gcd(tmp_path, setting):
    options = tiny_options(tmp_path, "--data.setting", setting)
    data = tiny_data(options.config)
    model = build_network(options.config, data.num_known, data.num_novel, 0).eval()
    images = torch.from_numpy(data.images[:50])
    clusters = _assign_clusters(model, images, options.config)
    logits = forward(model, images, options.config)
    outputs = torch.cat(
        [logits.known[0].expand(len(clusters), -1, -1), logits.novel[0]], 2
    )
    is_known = outputs.argmax(dim=2) < data.num_known
    assert is_known.any() and not is_known.all()
    expected = logits.novel[0].argmax(dim=2)
    if setting == "gcd":
        expected[is_known] = -1
    assert clusters.equal(expected)
