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
from uno.results.metrics import scores

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
    return (
        max(square[range(side), order].sum() for order in permutations(range(side)))
        / counts.sum()
    )


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


def test_chance_accuracy():
    """Kills: chance = 1 / K, one trial, a global or unseeded generator, class counts
    taken as equal.
    """
    # one row each of two classes, two clusters: both on one cluster (1 of 2 right) or
    # apart (2 of 2), evenly
    assert metrics.chance_accuracy([1, 1], 2, num_trials=4000) == pytest.approx(
        0.75, abs=0.02
    )
    # one class: the share of its largest cluster; two rows on two clusters give the
    # same .75
    assert metrics.chance_accuracy([2], 2, num_trials=4000) == pytest.approx(
        0.75, abs=0.02
    )
    assert metrics.chance_accuracy([7, 3], 1) == pytest.approx(0.7)
    assert metrics.chance_accuracy([50_000] * 10, 10) == pytest.approx(0.1, abs=0.005)
    np.random.seed(1)
    first = metrics.chance_accuracy([20, 30], 3)
    np.random.seed(2)
    assert (
        metrics.chance_accuracy([20, 30], 3)
        == first
        != metrics.chance_accuracy([20, 30], 3, seed=1)
    )


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
    truth, predicted = (
        np.repeat(index.ravel(), counts.ravel()) for index in np.indices(counts.shape)
    )
    assert metrics.nmi(counts) == pytest.approx(
        normalized_mutual_info_score(truth, predicted), abs=1e-10
    )
    assert metrics.ari(counts) == pytest.approx(
        adjusted_rand_score(truth, predicted), abs=1e-10
    )


def test_large_counts_do_not_overflow():
    """1.28 M rows make 1e12 pairs, whose products leave int64. Kills: integer pair
    products.
    """
    counts = np.array([[600_000, 40_000], [40_000, 600_000]])
    agree = 600_000 / 640_000
    assert metrics.ari(counts) == pytest.approx((2 * agree - 1) ** 2, abs=1e-5)
    assert metrics.cluster_accuracy(counts) == agree


def test_purity_by_hand():
    """Kills: majority of each class (row maxima: 9), one-to-one purity (10)."""
    assert (
        metrics.purity(np.array([[5, 4, 0], [1, 2, 3], [0, 0, 1]])) == (5 + 4 + 3) / 16
    )


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 3)])
def test_no_rows_have_no_metric(shape):
    """Kills: NaN or 0 for an empty matrix."""
    empty = np.zeros(shape, np.int64)
    for metric in (metrics.cluster_accuracy, metrics.purity, metrics.nmi, metrics.ari):
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
    return scores(metrics.task_aware, block_diag(known, novel), len(known))


def accuracies(result):
    return tuple(
        round(result[f"{group}/acc"], 12) for group in ("known", "novel", "all")
    )


def test_task_aware_by_hand():
    """Kills: known rows matched by Hungarian, novel rows by plain accuracy,
    unweighted mean.
    """
    novel = NOVEL * 3  # 60 rows against 20: the weighted mean is not the plain one
    result = task_aware(KNOWN, novel)
    assert accuracies(result) == (17 / 20, 48 / 60, 65 / 80)
    assert result["novel/nmi"] == metrics.nmi(novel) and result[
        "novel/ari"
    ] == metrics.ari(novel)
    assert result["novel/purity"] == (7 + 9 + 2) / 20
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
    result = scores(protocol, JOINT, 2)
    assert accuracies(result) == expected
    assert result["novel/nmi"] == metrics.nmi(clusters) and result[
        "novel/ari"
    ] == metrics.ari(clusters)
    assert result["novel/purity"] == purity / 20


def test_joint_matches_known_classes_too():
    """Of two matchings with 4 of 8 right it takes that with more known rows. Kills:
    known rows taken plainly, shares left to the solver, ties broken for novel rows.
    """
    # known class 0 sits on cluster 2, novel class 2 on output 0
    swapped = np.array([[1, 9], [8, 2]])
    assert accuracies(scores(metrics.task_agnostic_joint, swapped, 1)) == (
        0.9,
        0.8,
        0.85,
    )
    assert scores(metrics.task_agnostic_official, swapped, 1)["known/acc"] == 0.1
    # 0 -> 0 and 1 -> 2: 1 + 3; 0 -> 1 and 1 -> 0: 0 + 4
    tied = np.array([[1, 0, 0], [4, 0, 3]])
    for columns in ([0, 1, 2], [0, 2, 1], [2, 1, 0]):
        assert accuracies(scores(metrics.task_agnostic_joint, tied[:, columns], 1)) == (
            1,
            round(3 / 7, 12),
            4 / 8,
        )


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
    order = [*range(num_known), *order]
    blocks = {"known": counts[:num_known], "novel": counts[num_known:]}
    groups = [name for name, rows in blocks.items() if rows.sum()]
    expected = {f"{name}/acc" for name in groups} | (
        {"all/acc"} if len(groups) == 2 else set()
    )
    expected |= {f"novel/{name}" for name in metrics.METRICS if "novel" in groups}
    official, joint, strict = results = [
        scores(protocol, counts, num_known) for protocol in PROTOCOLS
    ]
    for protocol, result in zip(PROTOCOLS, results, strict=True):
        assert set(result) == expected
        assert all(-1 <= value <= 1 for value in result.values())  # False for NaN
        assert scores(protocol, counts[:, order], num_known) == values(result)
    assert official.get("novel/acc", 0) >= strict.get("novel/acc", 0)
    if len(groups) == 2:
        assert joint["all/acc"] >= strict["all/acc"] - 1e-12
        assert joint["all/acc"] == pytest.approx(brute_force_accuracy(counts))


def test_every_class_counts_once():
    """Five novel classes of 40, 20, 10, 4 and 0 rows. Kills: a mean over rows, a class
    without rows, thirds of rows or rounded down, absorbed rows that make a class
    smaller, another matching than the protocol's.
    """
    joint = np.zeros((6, 6), np.int64)
    joint[1, 1], joint[1, 2], joint[2, 2], joint[3, 3], joint[4, 0], joint[4, 4] = (
        36,
        4,
        20,
        10,
        3,
        1,
    )
    strict = scores(metrics.task_agnostic_strict, joint, 1)
    assert strict["novel/balanced"] == pytest.approx((0.9 + 1 + 1 + 0.25) / 4)
    assert strict["novel/recall_small"] == pytest.approx((0.25 + 1) / 2)
    assert strict["novel/recall_large"] == pytest.approx((0.9 + 1) / 2)
    best = metrics.cluster_metrics(joint[1:, 1:])
    assert best["balanced"] == pytest.approx((0.9 + 1 + 1 + 1) / 4)
    official = scores(metrics.task_agnostic_official, joint, 1)
    assert official["novel/recall_small"] == pytest.approx((0.75 + 1) / 2)


def test_a_new_metric_is_one_entry(monkeypatch):
    def worst_recall(right, sizes):
        return float((right / sizes).min())

    metric = metrics.Metric(worst_recall, "worst", "recall", "matched")
    monkeypatch.setitem(metrics.METRICS, "worst", metric)
    joint = np.array([[9, 0, 0], [4, 1, 0], [0, 0, 5]])
    assert scores(metrics.task_agnostic_strict, joint, 1)["novel/worst"] == 0.2
    assert scores(metrics.task_agnostic_official, joint, 1)["novel/worst"] == 0.8


def test_generalized_equals_the_best_of_all_matchings():
    """By trying every one. Kills: a matching for each kind of rows, known rows counted
    plainly, a mean of old and new that forgets how many there are, outputs that are not
    matched.
    """
    generator = np.random.default_rng(0)
    for _ in range(10):
        joint = generator.integers(0, 9, (4, 4))
        totals = [
            sum(joint[c, o] for c, o in enumerate(order))
            for order in permutations(range(4))
        ]
        found = metrics.generalized(joint, 2)
        assert found["all"] == pytest.approx(max(totals) / joint.sum())
        parts = found["old"] * joint[:2].sum() + found["new"] * joint[2:].sum()
        assert parts == pytest.approx(max(totals))
    assert (
        metrics.generalized(np.diag([3, 0]), 1) == {"old": 1, "all": 1}
        and metrics.generalized(joint * 0, 2) == {}
    )
    # A new class that takes a known class's output costs an old one its own: there is
    # one matching.
    assert metrics.generalized(np.array([[2, 1], [5, 0]]), 1) == pytest.approx(
        {"old": 1 / 3, "new": 1, "all": 6 / 8}
    )


def test_rejected_rows_are_wrong_wherever_accuracy_is_counted():
    """Known class 0, novel 1 and 2; outputs: known, a, b, and c, which is dropped.
    Kills: a dropped column that is matched, rejected rows left out, a group without an
    accepted row left out.
    """
    joint = np.array([[6, 0, 0, 4], [0, 3, 1, 6], [0, 0, 5, 5]])
    strict = scores(metrics.task_agnostic_strict, joint, 1, [3])
    assert (strict["known/acc"], strict["novel/acc"]) == pytest.approx((0.6, 0.4))
    assert strict["all/acc"] == pytest.approx(14 / 30) and strict[
        "novel/purity"
    ] == pytest.approx(0.4)
    assert (
        strict["novel/nmi"]
        == scores(metrics.task_agnostic_strict, joint[:, :3], 1)["novel/nmi"]
    )
    found = metrics.generalized(joint, 1, [3])
    assert (found["old"], found["new"], found["all"]) == pytest.approx(
        (0.6, 0.4, 14 / 30)
    )
    joint[1:, 1:3] = 0  # every novel row is rejected
    none = scores(metrics.task_agnostic_strict, joint, 1, [3])
    assert (none["novel/acc"], none["all/acc"]) == pytest.approx((0, 6 / 21))
    assert scores(metrics.task_agnostic_strict, joint, 1, []) == scores(
        metrics.task_agnostic_strict, joint, 1
    )
