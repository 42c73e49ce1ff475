"""Metrics and protocols against hand counts, brute force and scikit-learn."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.linalg import block_diag
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from uno.results import metrics

few = settings(max_examples=60, deadline=None, derandomize=True)


def matrices(max_side: int, max_count: int = 20) -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(1, max_side), st.integers(1, max_side))
    counts = hnp.arrays(np.int64, shapes, elements=st.integers(0, max_count))
    return counts.filter(lambda matrix: matrix.sum() > 0)


def brute_force_accuracy(counts):
    """Equation ClusterAcc by enumeration: pad to a square, try every permutation."""
    side = max(counts.shape)
    square = np.zeros((side, side), np.int64)
    square[: counts.shape[0], : counts.shape[1]] = counts
    orders = permutations(range(side))
    return max(square[range(side), order].sum() for order in orders) / counts.sum()


def values(result):
    return {key: pytest.approx(value, abs=1e-12) for key, value in result.items()}


def test_confusion_by_hand():
    """Kills: transposed matrix, -1 counted as the last class, -1 rows' predictions
    range-checked.
    """
    truth, predicted = [0, 0, 1, -1, 1, -1], [2, 0, 1, 1, 1, 99]
    for make in (np.array, torch.tensor):
        counts = metrics.confusion(make(truth), make(predicted), 2, 3)
        assert counts.dtype == np.int64 and counts.tolist() == [[1, 0, 1], [0, 2, 0]]
    assert metrics.confusion([], [], 2, 3).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("truth", "predicted"),
    [([0, 2], [0, 0]), ([0], [3]), ([-2], [0]), ([0], [-1]), ([0, 1], [0])],
)
def test_confusion_refuses_values_outside_their_range(truth, predicted):
    """Kills: no range check (the value lands in a neighboring cell), any negative
    truth ignored.
    """
    with pytest.raises(ValueError, match=r"values lie outside|one .* vector"):
        metrics.confusion(truth, predicted, 2, 3)


@few
@given(matrices(6), st.randoms(use_true_random=False))
def test_cluster_accuracy_is_the_best_permutation(counts, random):
    """Kills: minimized for maximized, greedy matching, square matrices only,
    many-to-one; metrics that depend on the numbering of clusters (plain accuracy for
    clustering accuracy).
    """
    assert metrics.cluster_accuracy(counts) == pytest.approx(
        brute_force_accuracy(counts), abs=1e-12
    )
    order = list(range(counts.shape[1]))
    random.shuffle(order)
    assert metrics.cluster_metrics(counts[:, order]) == values(
        metrics.cluster_metrics(counts)
    )


@pytest.mark.parametrize(
    ("counts", "matching", "accuracy"),
    [
        ([[9, 8], [8, 1]], [1, 0], 16 / 26),
        ([[1, 2], [0, 9], [7, 0]], [-1, 1, 0], 16 / 19),  # more classes than clusters
        ([[5, 4, 0], [0, 0, 6]], [0, 2], 11 / 15),  # more clusters than classes
    ],
)
def test_hungarian_by_hand(counts, matching, accuracy):
    """Kills: greedy matching (takes the 9, gets 9 + 1), matching indexed by output
    instead of class.
    """
    assert metrics.hungarian(np.array(counts)).tolist() == matching
    assert metrics.cluster_accuracy(np.array(counts)) == accuracy


@pytest.mark.parametrize(
    ("counts", "num_clusters", "chance"),
    [
        # one row each of two classes, two clusters: both on one cluster (1 of 2 right)
        # or apart (2 of 2), evenly
        ([1, 1], 2, 0.75),
        # one class: the share of its largest cluster
        ([2], 2, 0.75),
        ([7, 3], 1, 0.7),
        ([50_000] * 10, 10, 0.1),
    ],
)
def test_chance_accuracy(counts, num_clusters, chance):
    """Kills: chance = 1 / K, one trial, class counts taken as equal."""
    found = metrics.chance_accuracy(counts, num_clusters, num_trials=4000)
    assert found == pytest.approx(chance, abs=0.02)


@few
@given(matrices(6))
@example(np.array([[5]]))
@example(np.array([[5, 0], [0, 0]]))
@example(np.array([[1]]))
@example(np.array([[5, 3]]))
@example(np.array([[5], [3]]))
@example(np.array([[1, 0], [0, 1]]))
@example(np.array([[1, 1]]))
def test_nmi_and_ari_equal_scikit_learn(counts):
    """Kills: geometric / maximum normalization, log of zero, unadjusted Rand index; 0 /
    0 for one class and one cluster, for single rows, for all-singleton partitions.
    """
    rows = [
        np.repeat(index.ravel(), counts.ravel()) for index in np.indices(counts.shape)
    ]
    expected = normalized_mutual_info_score(*rows), adjusted_rand_score(*rows)
    found = metrics.nmi(counts), metrics.ari(counts)
    assert found == pytest.approx(expected, abs=1e-10)


def test_large_counts_do_not_overflow():
    """1.28 M rows make 1e12 pairs, whose products leave int64. Kills: integer pair
    products.
    """
    counts = np.array([[600_000, 40_000], [40_000, 600_000]])
    agree = 600_000 / 640_000
    assert metrics.ari(counts) == pytest.approx((2 * agree - 1) ** 2, abs=1e-5)
    assert metrics.cluster_accuracy(counts) == agree


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 3)])
@pytest.mark.parametrize(
    "metric", [metrics.cluster_accuracy, metrics.purity, metrics.nmi, metrics.ari]
)
def test_no_rows_have_no_metric(shape, metric):
    """Kills: NaN or 0 for an empty matrix."""
    empty = np.zeros(shape, np.int64)
    with pytest.raises(ValueError, match="without rows"):
        metric(empty)
    assert metrics.cluster_metrics(empty) == {}
    assert len(metrics.hungarian(empty)) == shape[0]


# Two known classes (rows 0, 1), two novel (rows 2, 3); outputs: known 0, 1, then
# clusters 2, 3, 4.
KNOWN = np.array([[8, 2], [1, 9]])
NOVEL = np.array([[1, 9, 0], [7, 1, 2]])
JOINT = np.array([[6, 2, 2, 0, 0], [1, 9, 0, 0, 0], [0, 5, 1, 4, 0], [3, 0, 5, 0, 2]])
POOLED = np.array([[5, 1, 4, 0], [3, 5, 0, 2]])
OFFICIAL, MATCHED, STRICT = PROTOCOLS = [
    metrics.task_agnostic_official,
    metrics.task_agnostic_joint,
    metrics.task_agnostic_strict,
]


def task_aware(known, novel):
    return metrics.scores(metrics.task_aware, block_diag(known, novel), len(known))


def accuracies(result):
    groups = ("known", "novel", "all")
    return tuple(round(result[f"{group}/acc"], 12) for group in groups)


def clusterings(result):
    return tuple(result[f"novel/{name}"] for name in ("nmi", "ari", "purity"))


def test_task_aware_by_hand():
    """Kills: known rows matched by Hungarian, novel rows by plain accuracy,
    unweighted mean.
    """
    novel = NOVEL * 3  # 60 rows against 20: the weighted mean is not the plain one
    result = task_aware(KNOWN, novel)
    assert accuracies(result) == (17 / 20, 48 / 60, 65 / 80)
    assert clusterings(result) == (metrics.nmi(novel), metrics.ari(novel), 18 / 20)
    assert task_aware(KNOWN[::-1], novel)["known/acc"] == 3 / 20


@pytest.mark.parametrize(
    ("protocol", "expected", "clusters", "purity"),
    [
        # 2 -> KNOWN 1 (5), 3 -> 2 (5)
        (OFFICIAL, (15 / 20, 10 / 20, 25 / 40), JOINT[2:], 3 + 5 + 5 + 4 + 2),
        # 0 -> 0, 1 -> 1, 2 -> 3, 3 -> 2
        (MATCHED, (15 / 20, 9 / 20, 24 / 40), JOINT[2:], 3 + 5 + 5 + 4 + 2),
        # 2 -> 3 (4), 3 -> 2 (5), of ALL novel rows
        (STRICT, (15 / 20, 9 / 20, 24 / 40), POOLED, 5 + 4 + 2),
    ],
)
def test_task_agnostic_by_hand(protocol, expected, clusters, purity):
    """Kills: official with novel outputs only, separate matchings for joint, the known
    block matched first, strict without the rows predicted as known, blocks exchanged.
    """
    result = metrics.scores(protocol, JOINT, 2)
    assert accuracies(result) == expected
    shared = metrics.nmi(clusters), metrics.ari(clusters)
    assert clusterings(result) == (*shared, purity / 20)


def test_joint_matches_known_classes_too():
    """Kills: known rows taken plainly."""
    # known class 0 sits on cluster 2, novel class 2 on output 0
    swapped = np.array([[1, 9], [8, 2]])
    assert accuracies(metrics.scores(MATCHED, swapped, 1)) == (0.9, 0.8, 0.85)
    assert metrics.scores(OFFICIAL, swapped, 1)["known/acc"] == 0.1


@pytest.mark.parametrize("columns", [[0, 1, 2], [0, 2, 1], [2, 1, 0]])
def test_of_two_joint_matchings_that_with_more_known_rows_is_taken(columns):
    """Kills: shares left to the solver, ties broken for novel rows."""
    # 0 -> 0 and 1 -> 2: 1 + 3; 0 -> 1 and 1 -> 0: 0 + 4
    tied = np.array([[1, 0, 0], [4, 0, 3]])[:, columns]
    assert accuracies(metrics.scores(MATCHED, tied, 1)) == (1, round(3 / 7, 12), 4 / 8)


@few
@given(matrices(5), st.integers(0, 5), st.randoms(use_true_random=False))
def test_protocol_properties(counts, num_known, random):
    """Finite, in range, ordered official >= strict, independent of the numbering of
    clusters; all K and C_u.

    Kills: NaN for a missing group, square matrices only, accuracy above the lenient
    one.
    """
    num_known = min(num_known, *counts.shape)
    order = list(range(num_known, counts.shape[1]))
    random.shuffle(order)
    shuffled = counts[:, [*range(num_known), *order]]
    expected = set()
    if counts[:num_known].sum():
        expected |= {"known/acc"}
    if counts[num_known:].sum():
        expected |= {"novel/acc", *(f"novel/{name}" for name in metrics.METRICS)}
    if {"known/acc", "novel/acc"} <= expected:
        expected |= {"all/acc"}
    results = {each: metrics.scores(each, counts, num_known) for each in PROTOCOLS}
    for protocol, result in results.items():
        assert set(result) == expected
        assert all(-1 <= value <= 1 for value in result.values())  # False for NaN
        assert metrics.scores(protocol, shuffled, num_known) == values(result)
    official, joint, strict = results.values()
    assert official.get("novel/acc", 0) >= strict.get("novel/acc", 0)
    if "all/acc" in expected:
        assert joint["all/acc"] >= strict["all/acc"] - 1e-12
        assert joint["all/acc"] == pytest.approx(brute_force_accuracy(counts))


def test_every_class_counts_once():
    """Five novel classes of 40, 20, 10, 4 and 0 rows. Kills: a mean over rows, a class
    without rows, thirds of rows or rounded down, absorbed rows that make a class
    smaller, another matching than the protocol's.
    """
    joint = np.diag([0, 36, 20, 10, 1, 0])
    joint[1, 2], joint[4, 0] = 4, 3
    strict = metrics.scores(STRICT, joint, 1)
    assert strict["novel/balanced"] == pytest.approx((0.9 + 1 + 1 + 0.25) / 4)
    assert strict["novel/recall_small"] == pytest.approx((0.25 + 1) / 2)
    assert strict["novel/recall_large"] == pytest.approx((0.9 + 1) / 2)
    best = metrics.cluster_metrics(joint[1:, 1:])
    assert best["balanced"] == pytest.approx((0.9 + 1 + 1 + 1) / 4)
    official = metrics.scores(OFFICIAL, joint, 1)
    assert official["novel/recall_small"] == pytest.approx((0.75 + 1) / 2)


def test_generalized_equals_the_best_of_all_matchings():
    """By trying every one. Kills: a matching for each kind of rows, known rows counted
    plainly, a mean of old and new that forgets how many there are, outputs that are not
    matched.
    """
    generator = np.random.default_rng(0)
    for _ in range(10):
        joint = generator.integers(0, 9, (4, 4))
        best = brute_force_accuracy(joint)
        found = metrics.generalized(joint, 2)
        assert found["all"] == pytest.approx(best)
        parts = found["old"] * joint[:2].sum() + found["new"] * joint[2:].sum()
        assert parts == pytest.approx(best * joint.sum())


@pytest.mark.parametrize(
    ("joint", "expected"),
    [
        ([[3, 0], [0, 0]], {"old": 1, "all": 1}),
        ([[0, 0], [0, 0]], {}),
        # A new class that takes a known class's output costs an old one its own: there
        # is one matching.
        ([[2, 1], [5, 0]], {"old": 1 / 3, "new": 1, "all": 6 / 8}),
    ],
)
def test_generalized_by_hand(joint, expected):
    assert metrics.generalized(np.array(joint), 1) == pytest.approx(expected)


def test_rejected_rows_are_wrong_wherever_accuracy_is_counted():
    """Known class 0, novel 1 and 2; outputs: known, a, b, and c, which is dropped.
    Kills: a dropped column that is matched, rejected rows left out, a group without an
    accepted row left out.
    """
    joint = np.array([[6, 0, 0, 4], [0, 3, 1, 6], [0, 0, 5, 5]])
    strict, accepted = (
        metrics.scores(STRICT, joint, 1, [3]),
        metrics.scores(STRICT, joint[:, :3], 1),
    )
    assert accuracies(strict) == pytest.approx((0.6, 0.4, 14 / 30))
    assert strict["novel/purity"] == pytest.approx(0.4)
    assert strict["novel/nmi"] == accepted["novel/nmi"]
    found = metrics.generalized(joint, 1, [3])
    assert found == pytest.approx({"old": 0.6, "new": 0.4, "all": 14 / 30})
    joint[1:, 1:3] = 0  # every novel row is rejected
    none = metrics.scores(STRICT, joint, 1, [3])
    assert (none["novel/acc"], none["all/acc"]) == pytest.approx((0, 6 / 21))
