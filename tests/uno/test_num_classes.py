"""The number of classes of frozen features, on synthetic classes and by hand."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from uno.clustering.kmeans import FREE
from uno.clustering.num_classes import (
    Model,
    class_f1,
    estimate_num_classes,
    find_signs,
    hidden_classes,
    rows_to_count,
    shortest_interval,
)


def classes(num_classes, rows=60, dims=24, noise=0.5, seed=0):
    """Rows around orthogonal directions: (rows, class of each row)."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.linalg.qr(torch.randn(dims, dims, generator=generator))[0]
    truth = torch.arange(num_classes).repeat_interleave(rows)
    spread = torch.randn(len(truth), dims, generator=generator) / dims**0.5
    return centers[truth] + noise * spread, truth


def task(num_known, num_novel, gcd=False, **changes):
    """Return labeled rows, their labels and unlabeled rows of separate classes."""
    return divide(*classes(num_known + num_novel, **changes), num_known, gcd)


def divide(rows, truth, num_known, gcd):
    """Return labeled rows, their labels and unlabeled rows."""
    is_labeled = truth < num_known
    if gcd:
        is_labeled &= torch.arange(len(truth)) % 2 == 0
    return rows[is_labeled], truth[is_labeled], rows[~is_labeled]


@pytest.mark.parametrize("gcd", [False, True])
@pytest.mark.parametrize(("num_known", "num_novel"), [(4, 2), (3, 3), (5, 6)])
def test_separate_classes_are_counted(num_known, num_novel, gcd):
    found = estimate_num_classes(*task(num_known, num_novel, gcd), gcd, seed=0)
    assert found.low <= num_novel <= found.high
    assert found.num_novel == num_novel
    assert sum(found.probabilities) == pytest.approx(1)


@pytest.mark.parametrize("num_labeled", [30, 6])
def test_unlabeled_rows_of_known_classes_are_left_out(num_labeled):
    """Also where few rows of a known class have labels."""
    rows, truth = classes(7)
    has_label = (truth < 4) & (torch.arange(len(truth)) % 60 < num_labeled)
    is_counted = rows_to_count(rows, torch.where(has_label, truth, FREE))
    assert is_counted[has_label].all()
    assert is_counted[truth >= 4].float().mean() > 0.95
    assert is_counted[(truth < 4) & ~has_label].float().mean() < 0.1


def test_nothing_is_left_out_if_nothing_would_be_left():
    rows, truth = classes(4)
    has_label = torch.arange(len(truth)) % 2 == 0
    assert rows_to_count(rows, torch.where(has_label, truth, FREE)).all()


def test_a_few_outliers_are_no_class():
    labeled, labels, unlabeled = task(4, 3)
    outliers = torch.eye(24)[[22, 23, 23]] * 2
    found = estimate_num_classes(
        labeled, labels, torch.cat([unlabeled, outliers]), gcd=False, seed=0
    )
    assert found.num_novel == 3


@pytest.mark.parametrize("gcd", [False, True])
def test_the_digits_as_pixels_have_their_number_in_the_interval(gcd):
    rows, truth = map(torch.tensor, load_digits(return_X_y=True))
    found = estimate_num_classes(*divide(rows.float(), truth, 5, gcd), gcd, seed=0)
    assert found.low <= 5 <= found.high <= 8


def test_one_known_class_and_few_rows_give_an_estimate():
    labeled, labels, unlabeled = task(1, 2)
    found = estimate_num_classes(labeled, labels, unlabeled[::12], gcd=False, seed=0)
    assert 2 <= found.low <= found.num_novel <= found.high


def test_known_classes_of_one_row_beside_a_large_one(monkeypatch):
    """The rows that are left may not all be of hidden classes."""
    monkeypatch.setattr("uno.clustering.num_classes.MAX_ROWS", 60)
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 2] + [3] * 300)
    labeled = torch.randn(303, 8, generator=generator)
    unlabeled = torch.randn(120, 8, generator=generator)
    for seed in range(6):
        found = estimate_num_classes(labeled, labels, unlabeled, False, seed)
        assert found.num_novel >= 2


def test_the_largest_number_is_a_limit():
    found = estimate_num_classes(*task(4, 6), gcd=False, seed=0, max_novel=3)
    assert len(found.probabilities) == 2
    assert found.high == 3


def test_the_number_of_known_classes_and_their_labels_are_no_sign():
    """Names of classes in another order: the same signs, if the same are hidden."""
    labeled, labels, unlabeled = task(2, 3)
    first = find_signs(labeled, labels, unlabeled, gcd=False, seed=0)
    again = find_signs(labeled, 1 - labels, unlabeled, gcd=False, seed=0)
    assert first == pytest.approx(again, abs=1e-5)


def test_every_fold_hides_other_classes_and_leaves_some():
    for num_known in range(2, 15):
        folds = hidden_classes(num_known, seed=0)
        hidden = [c for fold in folds for c in fold]
        assert len(hidden) == len(set(hidden))
        assert all(0 < len(fold) < num_known for fold in folds)


@pytest.mark.parametrize(
    ("probabilities", "level", "expected"),
    [
        ([0.3, 0.1, 0.1, 0.3, 0.2], 0.4, (5, 6)),
        ([0.05, 0.9, 0.05], 0.9, (3, 3)),
        ([1.0], 0.9, (2, 2)),
    ],
)
def test_the_interval_is_the_shortest_and_then_the_most_probable(
    probabilities, level, expected
):
    assert shortest_interval(np.array(probabilities), level) == expected


def test_probabilities_follow_from_the_odds_to_stop():
    """With even odds: a half, a quarter, and what is left."""
    found = Model([0.0], 0.0, 0.7)(np.zeros((3, 1)))
    assert found.probabilities == pytest.approx([0.5, 0.25, 0.25])
    assert (found.low, found.num_novel, found.high) == (2, 2, 3)


def test_a_sign_that_jumps_at_the_true_number_shows_it():
    """Another sign is noise and has the weight 0."""
    random, model = np.random.default_rng(0), Model([6.0, 0.0], -9.0, 0.9)
    found = []
    for number in random.integers(2, 10, 200).tolist():
        jumps = 3 * (np.arange(2, 14) >= number) + random.normal(0, 0.5, 12)
        signs = np.column_stack([jumps, random.normal(0, 1, 12)])
        found.append((model(signs), number))
    assert np.mean([e.low <= number <= e.high for e, number in found]) > 0.9
    assert np.mean([e.num_novel == number for e, number in found]) > 0.9


@pytest.mark.parametrize(
    ("table", "totals", "expected"),
    [
        ([[10, 0, 0], [0, 10, 0]], [10, 10, 30], 1),
        ([[10, 0], [0, 10]], [40, 10], (20 / 50 + 1) / 2),
        ([[5, 5, 0]], [5, 5, 9], 10 / 15),
        ([[6, 5], [6, 0]], [12, 5], (10 / 16 + 12 / 18) / 2),
    ],
)
def test_class_f1_by_hand(table, totals, expected):
    """Kills: accuracy for F1 (unlabeled rows that join cost nothing), greedy
    pairing, plain counts.
    """
    assert class_f1(np.array(table), np.array(totals)) == pytest.approx(expected)
