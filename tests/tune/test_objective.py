"""The objective sees known labels only: hidden classes, held-out rows, and no truth of the novel ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tune.tiny import claimed, run_tiny, tiny_data, tiny_options
from tune import objective
from tune.objective import AGREEMENT, FOLDS, LOSS, ORACLE, harmonic_mean, hidden_classes, problems
from uno.errors import ConfigError


def shuffled_truth(labels: np.ndarray) -> np.ndarray:
    """The true labels of novel rows (5 and up) permuted; those of known rows as they are."""
    novel = np.flatnonzero(labels >= 5)
    labels[novel] = np.random.default_rng(1).permutation(labels[novel])
    return labels


# ---------------------------------------------------------------------------------------------------- folds
def test_folds_hide_all_known_classes_about_equally_often():
    """Kills: folds drawn independently, which may hide one class always and another never."""
    for known, novel, folds in ((5, 5, 2), (10, 5, 3), (80, 20, 5), (7, 3, 7)):
        hidden = hidden_classes(known, novel, folds, seed=0)
        counts = np.bincount(np.concatenate(hidden), minlength=known)
        assert counts.max() - counts.min() <= 1
        assert len(set(hidden)) == folds
        assert all(len(set(h)) == len(h) == len(hidden[0]) for h in hidden)


def test_a_fold_hides_the_share_of_classes_that_is_novel():
    assert len(hidden_classes(80, 20, 1, 0)[0]) == 16
    assert len(hidden_classes(5, 5, 1, 0)[0]) == 3
    assert len(hidden_classes(3, 1, 1, 0)[0]) == 2  # at least two
    assert len(hidden_classes(3, 100, 1, 0)[0]) == 2  # one stays known
    assert len(hidden_classes(5, 5, 1, 0, hide=4)[0]) == 4
    assert hidden_classes(10, 5, 2, 0) == hidden_classes(10, 5, 2, 0)
    assert hidden_classes(10, 5, 2, 0) != hidden_classes(10, 5, 2, 1)


@pytest.mark.parametrize(
    ("known", "folds", "hide"), [(2, 1, None), (5, 6, None), (5, 2, 5), (5, 2, 1), (4, 3, 2)]
)
def test_impossible_folds_are_config_errors(known, folds, hide):
    with pytest.raises(ConfigError):
        hidden_classes(known, 5, folds, 0, hide)


def test_a_fold_is_made_of_labeled_rows_alone(tmp_path):
    """Kills: unlabeled or test rows in a fold, held-out rows trained on, classes numbered wrongly."""
    options = tiny_options(tmp_path)
    data = tiny_data(options.config)
    for problem in problems(data, FOLDS, 2, 0):
        visible = [c for c in range(5) if c not in problem.hidden]
        rows = problem.scored.index.numpy()
        assert (data.labels[rows] >= 0).all()
        assert not data.unlabeled[rows].any()
        names = np.array([*visible, *problem.hidden])
        assert (names[problem.scored.truth.numpy()] == data.labels[rows]).all()
        hidden = np.isin(data.labels, problem.hidden)
        assert len(problem.train.unlabeled_images) == hidden.sum()
        held_out = np.setdiff1d(rows, np.flatnonzero(hidden))
        assert len(held_out) + len(problem.train.labels) == ((data.labels >= 0) & ~hidden).sum()
        assert set(problem.train.labels.tolist()) == set(range(len(visible)))
        trained = {image.numpy().tobytes() for image in problem.train.labeled_images}
        assert trained.isdisjoint(data.images[row].tobytes() for row in held_out)


# --------------------------------------------------------------------------------------------- no novel truth
@pytest.mark.parametrize("score", [FOLDS, LOSS, AGREEMENT])
def test_permuting_the_true_novel_labels_changes_no_score(tmp_path, score):
    """THE property of the sweep. Kills any path from ``eval_labels`` to a score."""
    options = tiny_options(tmp_path, "--score", score, "--folds", "1")
    found = []
    for name, relabel in (
        ("true", None),
        ("permuted", shuffled_truth),
        ("gone", lambda labels: labels * 0 - 1),
    ):
        with claimed(tmp_path / name) as storage:
            found.append(run_tiny(options, tiny_data(options.config, score, relabel), storage))
    assert len(found[0]) == 2
    assert found[0] == found[1] == found[2]


def test_the_oracle_does_depend_on_them(tmp_path):
    """The control of the test above: the same permutation moves the oracle's score."""
    options = tiny_options(tmp_path, "--score", ORACLE)
    found = []
    for name, relabel in (("true", None), ("permuted", shuffled_truth)):
        with claimed(tmp_path / name) as storage:
            found.append(run_tiny(options, tiny_data(options.config, ORACLE, relabel), storage))
    assert found[0][-1]["novel_best"] > found[1][-1]["novel_best"]
    assert found[0][-1]["loss"] == found[1][-1]["loss"]


def test_only_the_oracle_gets_the_truth(tmp_path):
    options = tiny_options(tmp_path)
    for score in (FOLDS, LOSS, AGREEMENT):
        assert tiny_data(options.config, score).oracle is None
    assert tiny_data(options.config, ORACLE).oracle is not None
    with pytest.raises(ConfigError, match="oracle"):
        tiny_data(options.config, ORACLE, lambda labels: np.where(labels >= 5, -1, labels))


# ----------------------------------------------------------------------------------------------------- scores
def test_scores_of_an_epoch(tmp_path):
    options = tiny_options(tmp_path, "--seeds", "2")
    with claimed(tmp_path / "sweep") as storage:
        lines = run_tiny(options, tiny_data(options.config), storage)
    for line in lines:
        assert len(line["scores"]) == 4  # 2 folds, 2 seeds
        assert line["score"] == pytest.approx(np.mean(line["scores"]))
        seeds = np.array(line["scores"]).reshape(2, 2).mean(axis=1)
        assert line["spread"] == pytest.approx(np.std(seeds, ddof=1))
        assert 0 <= line["score"] <= 1
    assert lines[0]["scores"] != lines[1]["scores"]


def test_harmonic_mean():
    assert harmonic_mean(1.0, 0.5) == pytest.approx(2 / 3)
    assert harmonic_mean(0.9, 0.0) == harmonic_mean(0.0, 0.0) == 0


def test_loss_is_maximised_as_its_negative():
    parts = {"loss": 1.0, "known_avg": 1.0, "novel_avg": 0.5, "known_best": 0.2, "novel_best": 0.2}
    assert objective._score(parts, FOLDS) == pytest.approx(2 / 3)
    assert objective._score({"loss": 1.5}, LOSS) == -1.5
    assert objective._score({"loss": 1.5, "agreement": 0.3}, AGREEMENT) == 0.3


def test_agreement_needs_two_heads():
    objective.check_score(AGREEMENT, (2, 8))
    with pytest.raises(ConfigError, match="num_heads"):
        objective.check_score(AGREEMENT, (1, 8))
    with pytest.raises(ConfigError, match="folds"):
        objective.check_score("truth", (4,))
