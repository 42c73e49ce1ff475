"""Metrics and protocols against hand counts, brute force and scikit-learn."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from uno.results import metrics

few = settings(max_examples=60, deadline=None, derandomize=True)


def matrices(max_side: int, max_count: int = 20) -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(1, max_side), st.integers(1, max_side))
    counts = hnp.arrays(np.int64, shapes, elements=st.integers(0, max_count))
    return counts.filter(lambda matrix: matrix.sum() > 0)


def expand(counts):
    """A confusion matrix back to one (truth, predicted) pair a row."""
    truth, predicted = np.indices(counts.shape)
    return np.repeat(truth.ravel(), counts.ravel()), np.repeat(predicted.ravel(), counts.ravel())


def brute_force_accuracy(counts):
    """Equation ClusterAcc by enumeration: pad to a square, try every permutation."""
    side = max(counts.shape)
    square = np.zeros((side, side), np.int64)
    square[: counts.shape[0], : counts.shape[1]] = counts
    rows = range(side)
    return max(sum(square[i, perm[i]] for i in rows) for perm in permutations(rows)) / counts.sum()


def values(result):
    return {key: pytest.approx(value, abs=1e-12) for key, value in result.items()}


# ------------------------------------------------------------------------------------------------- counting
def test_confusion_by_hand():
    """Kills: transposed matrix, -1 counted as the last class, -1 rows' predictions range-checked."""
    truth, predicted = [0, 0, 1, -1, 1, -1], [2, 0, 1, 1, 1, 99]
    expected = [[1, 0, 1], [0, 2, 0]]
    for make in (np.array, torch.tensor):
        counts = metrics.confusion(make(truth), make(predicted), 2, 3)
        assert counts.dtype == np.int64
        assert counts.tolist() == expected
    assert metrics.confusion([], [], 2, 3).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("truth", "predicted"), [([0, 2], [0, 0]), ([0], [3]), ([-2], [0]), ([0], [-1]), ([0, 1], [0])]
)
def test_confusion_refuses_values_outside_their_range(truth, predicted):
    """Kills: no range check (the value lands in a neighbouring cell), any negative truth ignored."""
    with pytest.raises(ValueError, match=r"values lie outside|one .* vector"):
        metrics.confusion(truth, predicted, 2, 3)


# ------------------------------------------------------------------------------------------ cluster accuracy
@few
@given(matrices(6))
def test_cluster_accuracy_is_the_best_permutation(counts):
    """Kills: minimised for maximised, greedy matching, diagonal, square matrices only, many-to-one."""
    assert metrics.cluster_accuracy(counts) == pytest.approx(brute_force_accuracy(counts), abs=1e-12)


def test_hungarian_by_hand():
    """Kills: greedy matching (takes the 9, gets 9 + 1), matching indexed by output instead of class."""
    counts = np.array([[9, 8], [8, 1]])
    assert metrics.hungarian(counts).tolist() == [1, 0]
    assert metrics.cluster_accuracy(counts) == 16 / 26
    # more classes than clusters: class 0 has no partner; more clusters than classes: cluster 1 has none
    assert metrics.hungarian(np.array([[1, 2], [0, 9], [7, 0]])).tolist() == [-1, 1, 0]
    assert metrics.cluster_accuracy(np.array([[1, 2], [0, 9], [7, 0]])) == 16 / 19
    assert metrics.cluster_accuracy(np.array([[5, 4, 0], [0, 0, 6]])) == 11 / 15
    assert metrics.hungarian(np.zeros((0, 3), np.int64)).tolist() == []


@few
@given(matrices(6), st.randoms(use_true_random=False))
def test_permuted_clusters_change_nothing(counts, random):
    """Kills: metrics that depend on the numbering of clusters (plain accuracy for clustering accuracy)."""
    order = list(range(counts.shape[1]))
    random.shuffle(order)
    assert metrics.cluster_metrics(counts[:, order]) == values(metrics.cluster_metrics(counts))


def test_matching_per_shard_inflates_and_merged_counts_do_not():
    """Random predictions, 10 classes, 400 rows: .17 whole, .32 as the mean over 8 shards (METHOD.md 6).

    Kills: Hungarian per shard or per batch, averaged.
    """
    generator = np.random.default_rng(0)
    whole, sharded = [], []
    for _ in range(50):
        truth, predicted = generator.permutation(np.repeat(np.arange(10), 40)), generator.integers(0, 10, 400)
        parts = [metrics.confusion(truth[r::8], predicted[r::8], 10, 10) for r in range(8)]
        counts = metrics.confusion(truth, predicted, 10, 10)
        assert (sum(parts) == counts).all()
        whole.append(metrics.cluster_accuracy(counts))
        sharded.append(np.mean([metrics.cluster_accuracy(part) for part in parts]))
    assert np.mean(whole) == pytest.approx(0.17, abs=0.01)
    assert np.mean(sharded) == pytest.approx(0.32, abs=0.01)
    assert metrics.chance_accuracy([40] * 10, 10) == pytest.approx(np.mean(whole), abs=0.004)


def test_chance_accuracy():
    """Kills: chance = 1 / K, one trial, a global or unseeded generator, class counts taken as equal."""
    # one row each of two classes, two clusters: both on one cluster (1 of 2 right) or apart (2 of 2), evenly
    assert metrics.chance_accuracy([1, 1], 2, num_trials=4000) == pytest.approx(0.75, abs=0.02)
    # one class: the share of its largest cluster; two rows on two clusters give the same .75
    assert metrics.chance_accuracy([2], 2, num_trials=4000) == pytest.approx(0.75, abs=0.02)
    assert metrics.chance_accuracy([7, 3], 1) == pytest.approx(0.7)
    assert metrics.chance_accuracy([50_000] * 10, 10) == pytest.approx(0.1, abs=0.005)
    np.random.seed(1)
    first = metrics.chance_accuracy([20, 30], 3)
    np.random.seed(2)
    assert metrics.chance_accuracy([20, 30], 3) == first != metrics.chance_accuracy([20, 30], 3, seed=1)


# ------------------------------------------------------------------------------------------ partition metrics
def assert_equal_scikit_learn(counts):
    truth, predicted = expand(counts)
    assert metrics.nmi(counts) == pytest.approx(normalized_mutual_info_score(truth, predicted), abs=1e-10)
    assert metrics.ari(counts) == pytest.approx(adjusted_rand_score(truth, predicted), abs=1e-10)


@few
@given(matrices(6))
def test_nmi_and_ari_equal_scikit_learn(counts):
    """Kills: geometric / maximum normalisation, log of zero, unadjusted Rand index."""
    assert_equal_scikit_learn(counts)


@pytest.mark.parametrize(
    "counts", [[[5]], [[5, 0], [0, 0]], [[1]], [[5, 3]], [[5], [3]], [[1, 0], [0, 1]], [[1, 1]]]
)
def test_trivial_partitions_equal_scikit_learn(counts):
    """Kills: 0 / 0 for one class and one cluster, for single rows, for all-singleton partitions."""
    assert_equal_scikit_learn(np.array(counts))


def test_large_counts_do_not_overflow():
    """1.28 M rows make 1e12 pairs, whose products leave int64. Kills: integer pair products."""
    counts = np.array([[600_000, 40_000], [40_000, 600_000]])
    agree = 600_000 / 640_000
    assert metrics.ari(counts) == pytest.approx((2 * agree - 1) ** 2, abs=1e-5)
    assert metrics.cluster_accuracy(counts) == agree


def test_purity_by_hand():
    """Kills: majority of each class (row maxima: 9), one-to-one purity (10)."""
    assert metrics.purity(np.array([[5, 4, 0], [1, 2, 3], [0, 0, 1]])) == (5 + 4 + 3) / 16


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 3)])
def test_no_rows_have_no_metric(shape):
    """Kills: NaN or 0 for an empty matrix."""
    empty = np.zeros(shape, np.int64)
    for metric in (metrics.cluster_accuracy, metrics.purity, metrics.nmi, metrics.ari):
        with pytest.raises(ValueError, match="without rows"):
            metric(empty)
    assert metrics.cluster_metrics(empty) == {}


# -------------------------------------------------------------------------------------------------- protocols
# Two known classes (rows 0, 1), two novel (rows 2, 3); outputs: known 0, 1, then clusters 2, 3, 4.
KNOWN = np.array([[8, 2], [1, 9]])
NOVEL = np.array([[1, 9, 0], [7, 1, 2]])
JOINT = np.array([[6, 2, 2, 0, 0], [1, 9, 0, 0, 0], [0, 5, 1, 4, 0], [3, 0, 5, 0, 2]])


def accuracies(result):
    return {key: value for key, value in result.items() if key.endswith("acc")}


def test_task_aware_by_hand():
    """Kills: known rows matched by Hungarian, novel rows by plain accuracy, unweighted mean."""
    novel = NOVEL * 3  # 60 rows against 20: the weighted mean is not the plain one
    result = metrics.task_aware(KNOWN, novel)
    assert accuracies(result) == values({"known/acc": 17 / 20, "novel/acc": 48 / 60, "all/acc": 65 / 80})
    assert result["novel/nmi"] == metrics.nmi(novel)
    assert result["novel/ari"] == metrics.ari(novel)
    assert result["novel/purity"] == (7 + 9 + 2) / 20
    assert metrics.task_aware(KNOWN[::-1], novel)["known/acc"] == 3 / 20


def test_official_by_hand():
    """Novel class 0 takes KNOWN output 1 (5 rows), class 1 takes cluster 2 (5 rows).

    Kills: novel outputs only (strict), one matching of all rows (joint), matching against the wrong block.
    """
    result = metrics.task_agnostic_official(JOINT, 2)
    assert accuracies(result) == values({"known/acc": 15 / 20, "novel/acc": 10 / 20, "all/acc": 25 / 40})
    assert result["novel/nmi"] == metrics.nmi(JOINT[2:])
    assert result["novel/purity"] == (3 + 5 + 5 + 4 + 2) / 20


def test_joint_by_hand():
    """One matching: 0 -> 0 (6), 1 -> 1 (9), 2 -> 3 (4), 3 -> 2 (5): 24 of 40.

    Kills: separate matchings for known and novel rows, the known block matched first.
    """
    result = metrics.task_agnostic_joint(JOINT, 2)
    assert accuracies(result) == values({"known/acc": 15 / 20, "novel/acc": 9 / 20, "all/acc": 24 / 40})
    # known class 0 sits on cluster 2 and novel class 2 on output 0: joint follows, plain accuracy does not
    swapped = np.array([[1, 9], [8, 2]])
    assert accuracies(metrics.task_agnostic_joint(swapped, 1)) == values(
        {"known/acc": 0.9, "novel/acc": 0.8, "all/acc": 0.85}
    )
    assert accuracies(metrics.task_agnostic_official(swapped, 1))["known/acc"] == 0.1


def test_joint_breaks_ties_for_known_rows():
    """Two matchings get 4 of 8 right. Kills: shares left to the solver, ties broken for novel rows."""
    tied = np.array([[1, 0, 0], [4, 0, 3]])  # 0 -> 0 and 1 -> 2: 1 + 3; 0 -> 1 and 1 -> 0: 0 + 4
    for columns in ([0, 1, 2], [0, 2, 1], [2, 1, 0]):
        result = metrics.task_agnostic_joint(tied[:, columns], 1)
        assert accuracies(result) == values({"known/acc": 1, "novel/acc": 3 / 7, "all/acc": 4 / 8})


def test_strict_by_hand():
    """Novel class 0 -> cluster 3 (4 rows), class 1 -> cluster 2 (5 rows), of ALL 20 novel rows.

    Kills: rows predicted as known left out of the denominator, known outputs matched, blocks exchanged.
    """
    result = metrics.task_agnostic_strict(JOINT, 2)
    assert accuracies(result) == values({"known/acc": 15 / 20, "novel/acc": 9 / 20, "all/acc": 24 / 40})
    pooled = np.array([[5, 1, 4, 0], [3, 5, 0, 2]])
    assert result["novel/nmi"] == metrics.nmi(pooled)
    assert result["novel/ari"] == metrics.ari(pooled)
    assert result["novel/purity"] == (5 + 4 + 2) / 20


def test_absorbed_novel_classes_tell_official_from_strict():
    """10 of 20 novel classes, 100 rows each, fall entirely on known outputs; of the others 82 rows are right.

    official: (1000 + 820) / 2000 = .91; strict: 820 / 2000 = .41; joint: the known classes (200 rows each)
    keep their outputs, so absorbed classes gain nothing: .41. Kills: any two of the protocols exchanged.
    """
    joint = np.zeros((30, 30), np.int64)
    joint[:10, :10] = 200 * np.eye(10, dtype=np.int64)
    joint[10:20, :10] = 100 * np.eye(10, dtype=np.int64)
    joint[20:, 20:] = 82 * np.eye(10, dtype=np.int64) + 18 * np.roll(np.eye(10, dtype=np.int64), 1, axis=1)
    assert metrics.task_agnostic_official(joint, 10)["novel/acc"] == 0.91
    strict, matched = metrics.task_agnostic_strict(joint, 10), metrics.task_agnostic_joint(joint, 10)
    assert strict["novel/acc"] == matched["novel/acc"] == 0.41
    assert strict["known/acc"] == matched["known/acc"] == 1
    assert strict["all/acc"] == (2000 + 820) / 4000
    # pooling: the ten absorbed classes are one heap to `strict`, ten clusters to `official`
    assert strict["novel/nmi"] < metrics.task_agnostic_official(joint, 10)["novel/nmi"] - 0.2


PROTOCOLS = [metrics.task_agnostic_official, metrics.task_agnostic_joint, metrics.task_agnostic_strict]


@few
@given(matrices(5), st.integers(0, 5), st.randoms(use_true_random=False))
def test_protocol_properties(counts, num_known, random):
    """Finite, in range, ordered official >= strict, independent of the numbering of clusters; all K and C_u.

    Kills: NaN for a missing group, square matrices only, accuracy above the lenient one.
    """
    num_known = min(num_known, *counts.shape)
    order = list(range(num_known, counts.shape[1]))
    random.shuffle(order)
    order = [*range(num_known), *order]
    blocks = {"known": counts[:num_known], "novel": counts[num_known:]}
    groups = [name for name, rows in blocks.items() if rows.sum()]
    for protocol in PROTOCOLS:
        result = protocol(counts, num_known)
        expected = {f"{name}/acc" for name in groups} | ({"all/acc"} if len(groups) == 2 else set())
        expected |= {f"novel/{name}" for name in ("nmi", "ari", "purity") if "novel" in groups}
        assert set(result) == expected
        assert all(-1 <= value <= 1 for value in result.values())  # False for NaN
        assert protocol(counts[:, order], num_known) == values(result)
    official, joint, strict = (protocol(counts, num_known) for protocol in PROTOCOLS)
    assert official.get("novel/acc", 0) >= strict.get("novel/acc", 0)
    if len(groups) == 2:
        assert joint["all/acc"] >= strict["all/acc"] - 1e-12
        assert joint["all/acc"] == pytest.approx(brute_force_accuracy(counts))


def test_missing_groups_have_no_keys():
    """Kills: 0 or NaN where no row has truth, `all` formed from one group."""
    empty = np.zeros((2, 2), np.int64)
    assert metrics.task_aware(KNOWN, empty) == {"known/acc": 17 / 20}
    assert metrics.task_aware(KNOWN, np.zeros((0, 3), np.int64)) == {"known/acc": 17 / 20}
    assert set(metrics.task_aware(empty, NOVEL)) == {"novel/acc", "novel/nmi", "novel/ari", "novel/purity"}
    for protocol in PROTOCOLS:
        assert set(protocol(JOINT[:2], 2)) == {"known/acc"}
        assert protocol(np.zeros_like(JOINT), 2) == {}
