"""Metrics and evaluation protocols (Sec. 4.1) as functions of confusion matrices.

A confusion matrix is int64, rows = true classes, columns = predicted outputs. Matrices of disjoint rows add
up, so batches and workers are summed first and matched once: the Hungarian algorithm per shard inflates
(random predictions, 10 classes, 400 rows: .17 whole, .32 as the mean of 8 shards).

Joint matrices of the task-agnostic protocols have C_l + C_u rows and C_l + K columns, known first in both.
K, the clusters of a head, may differ from C_u, the true novel classes: the matching is rectangular, and the
rows of a class or a cluster without partner count as wrong.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

Counts = NDArray[np.int64]


# ---------------------------------------------------------------------------------------- from rows to counts
def confusion(truth: ArrayLike, predicted: ArrayLike, num_true: int, num_predicted: int) -> Counts:
    """Count (true class, predicted output) pairs.

    Args:
        truth: (N,) integers in [0, num_true), or -1 for a row without truth, which is ignored. Host memory.
        predicted: (N,) integers in [0, num_predicted); not read where truth is -1. Host memory.
        num_true: number of rows R of the result.
        num_predicted: number of columns P of the result.

    Returns:
        (R, P) int64 counts; additive over disjoint sets of rows.

    Raises:
        ValueError: the shapes differ, or a value lies outside its range.
    """
    rows, columns = np.asarray(truth), np.asarray(predicted)
    if rows.ndim != 1 or rows.shape != columns.shape:
        raise ValueError(f"truth {rows.shape} and predicted {columns.shape} must be one (N,) vector each")
    with_truth = rows != -1
    rows, columns = rows[with_truth].astype(np.int64), columns[with_truth].astype(np.int64)
    for name, values, size in (("truth", rows, num_true), ("predicted", columns, num_predicted)):
        outside = int(np.count_nonzero((values < 0) | (values >= size)))
        if outside:
            raise ValueError(f"{outside} of {values.size} {name} values lie outside [0, {size})")
    flat = np.bincount(rows * num_predicted + columns, minlength=num_true * num_predicted)
    return flat.astype(np.int64).reshape(num_true, num_predicted)


# ------------------------------------------------------------------------------------- from counts to numbers
def hungarian(counts: Counts) -> Counts:
    """Pair classes with outputs, each at most once, so that most rows agree (Kuhn, 1955).

    Args:
        counts: (R, P) confusion matrix, R and P may differ.

    Returns:
        matching (R,) int64: the output of each class, -1 for a class without partner (only where R > P).
    """
    classes, outputs = linear_sum_assignment(counts, maximize=True)
    matching = np.full(counts.shape[0], -1, dtype=np.int64)
    matching[classes] = outputs
    return matching


def matched_counts(counts: Counts, matching: Counts) -> Counts:
    """Rows of each class that fall on its matched output: counts (R, P), matching (R,) -> (R,) int64."""
    matched = np.zeros(counts.shape[0], dtype=np.int64)
    (classes,) = np.nonzero(matching >= 0)
    matched[classes] = counts[classes, matching[classes]]
    return matched


def cluster_accuracy(counts: Counts) -> float:
    """Share of rows that agree under the best matching, 0-1: ClusterAcc of Sec. 4.1.

    Args:
        counts: (R, P) confusion matrix.

    Raises:
        ValueError: the matrix counts no row.
    """
    return float(matched_counts(counts, hungarian(counts)).sum() / _num_rows(counts))


def accuracy(counts: Counts) -> float:
    """Share of rows whose output has the index of their class, 0-1.

    Args:
        counts: (R, P) confusion matrix.

    Raises:
        ValueError: the matrix counts no row.
    """
    return float(np.trace(counts) / _num_rows(counts))


def purity(counts: Counts) -> float:
    """Share of rows in the majority class of their output, 0-1. Many clusters are pure for free.

    Args:
        counts: (R, P) confusion matrix.

    Raises:
        ValueError: the matrix counts no row.
    """
    return float(counts.max(axis=0, initial=0).sum() / _num_rows(counts))


def nmi(counts: Counts) -> float:
    """Mutual information over the arithmetic mean of both entropies, 0-1 (scikit-learn's default).

    Args:
        counts: (R, P) confusion matrix. Two trivial partitions (one class, one output) agree: 1.

    Raises:
        ValueError: the matrix counts no row.
    """
    joint = counts / _num_rows(counts)
    classes, outputs = joint.sum(axis=1), joint.sum(axis=0)
    class_entropy, output_entropy = _entropy(classes), _entropy(outputs)
    if class_entropy + output_entropy == 0:
        return 1.0
    mutual = class_entropy + output_entropy - _entropy(joint)
    return float(np.clip(2 * mutual / (class_entropy + output_entropy), 0.0, 1.0))


def ari(counts: Counts) -> float:
    """Adjusted Rand index, at most 1, expected 0 for random predictions (Hubert and Arabie, 1985).

    Args:
        counts: (R, P) confusion matrix. Two trivial partitions agree: 1.

    Raises:
        ValueError: the matrix counts no row.
    """
    all_pairs = _pairs(np.asarray(_num_rows(counts)))
    together = _pairs(counts)
    same_class, same_output = _pairs(counts.sum(axis=1)), _pairs(counts.sum(axis=0))
    expected = same_class * same_output / all_pairs if all_pairs else 0.0
    most = (same_class + same_output) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)


def chance_accuracy(
    class_counts: ArrayLike, num_clusters: int, num_trials: int = 100, seed: int = 0
) -> float:
    """Expected clustering accuracy of uniformly random predictions, 0-1: the matching lifts it above 1 / K.

    Mean over `num_trials` simulated confusion matrices, each class a multinomial over the clusters. Standard
    error at 100 trials, 10 balanced classes: .0012 for 200 rows, .0002 for 4,000.

    Args:
        class_counts: (R,) rows of each class.
        num_clusters: number of outputs K to choose from.
        num_trials: simulated matrices.
        seed: of the simulation, which uses its own generator.

    Raises:
        ValueError: no rows, or no clusters.
    """
    sizes = np.asarray(class_counts, dtype=np.int64)
    if sizes.sum() == 0 or num_clusters < 1:
        raise ValueError(f"no chance level for {sizes.sum()} rows and {num_clusters} clusters")
    generator = np.random.default_rng(seed)
    uniform = np.full(num_clusters, 1 / num_clusters)
    trials = [cluster_accuracy(generator.multinomial(sizes, uniform)) for _ in range(num_trials)]
    return float(np.mean(trials))


def cluster_metrics(counts: Counts) -> dict[str, float]:
    """`acc` (under the best matching), `nmi`, `ari` and `purity` of counts (R, P); {} without rows."""
    if counts.sum() == 0:
        return {}
    return {"acc": cluster_accuracy(counts), "nmi": nmi(counts), "ari": ari(counts), "purity": purity(counts)}


# -------------------------------------------------------------------------------------------------- protocols
# Each returns `{known|novel|all}/{metric}`. Known and all rows get accuracy only: a known class has a name,
# how well its rows cluster says nothing more. A group without rows has no key; `all`, the sample-weighted
# mean, needs rows of both. NMI, ARI and purity need no matching, so `official` and `joint` share them.
def task_aware(known: Counts, novel: Counts) -> dict[str, float]:
    """Each row is told whether its class is known or novel.

    Args:
        known: (C_l, C_l) known rows, argmax over the known outputs.
        novel: (C_u, K) novel rows, argmax over the head's own novel outputs.
    """
    matched = matched_counts(novel, hungarian(novel))
    return _accuracies(np.trace(known), known.sum(), matched.sum(), novel.sum()) | _novel_partition(novel)


def task_agnostic_official(joint: Counts, num_known: int) -> dict[str, float]:
    """Known rows plainly; novel classes matched to ANY output: lenient, what the authors' release computes.

    Args:
        joint: (C_l + C_u, C_l + K) all rows, argmax over the known and the head's novel outputs.
        num_known: C_l.
    """
    known, novel = joint[:num_known], joint[num_known:]
    matched = matched_counts(novel, hungarian(novel))
    return _accuracies(np.trace(known), known.sum(), matched.sum(), novel.sum()) | _novel_partition(novel)


def task_agnostic_joint(joint: Counts, num_known: int) -> dict[str, float]:
    """One matching of all classes to all outputs; known, novel and all rows are counted under it.

    Known classes are matched too, so accuracy on known rows may differ from the plain one. Of equally good
    matchings the one with most known rows correct counts, so that both shares are functions of the counts.

    Args:
        joint: (C_l + C_u, C_l + K) all rows, argmax over the known and the head's novel outputs.
        num_known: C_l.
    """
    weights = joint * (joint.sum() + 1)
    weights[:num_known] += joint[:num_known]
    matched = matched_counts(joint, hungarian(weights))
    known, novel = joint[:num_known], joint[num_known:]
    correct_known, correct_novel = matched[:num_known].sum(), matched[num_known:].sum()
    return _accuracies(correct_known, known.sum(), correct_novel, novel.sum()) | _novel_partition(novel)


def task_agnostic_strict(joint: Counts, num_known: int) -> dict[str, float]:
    """Known rows plainly; novel classes matched to novel outputs only, a row predicted as known is an error.

    NMI and ARI pool the known outputs into a single one, "not discovered": telling novel classes apart by the
    known class they are mistaken for earns nothing. Purity counts the pooled rows as wrong.

    Args:
        joint: (C_l + C_u, C_l + K) all rows, argmax over the known and the head's novel outputs.
        num_known: C_l.
    """
    known, novel = joint[:num_known], joint[num_known:]
    missed, found = novel[:, :num_known].sum(axis=1, keepdims=True), novel[:, num_known:]
    metrics = _accuracies(
        np.trace(known), known.sum(), matched_counts(found, hungarian(found)).sum(), novel.sum()
    )
    if novel.sum():
        metrics |= _novel_partition(np.concatenate([missed, found], axis=1))
        metrics["novel/purity"] = float(found.max(axis=0, initial=0).sum() / novel.sum())
    return metrics


def _accuracies(
    correct_known: np.integer, num_known: np.integer, correct_novel: np.integer, num_novel: np.integer
) -> dict[str, float]:
    metrics = {}
    if num_known:
        metrics["known/acc"] = float(correct_known / num_known)
    if num_novel:
        metrics["novel/acc"] = float(correct_novel / num_novel)
    if num_known and num_novel:
        metrics["all/acc"] = float((correct_known + correct_novel) / (num_known + num_novel))
    return metrics


def _novel_partition(novel: Counts) -> dict[str, float]:
    if novel.sum() == 0:
        return {}
    return {"novel/nmi": nmi(novel), "novel/ari": ari(novel), "novel/purity": purity(novel)}


def _num_rows(counts: Counts) -> int:
    num_rows = int(counts.sum())
    if num_rows == 0:
        raise ValueError(f"a confusion matrix of shape {counts.shape} without rows has no metric")
    return num_rows


def _entropy(probabilities: NDArray[np.float64]) -> float:
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


def _pairs(sizes: NDArray[np.int64]) -> float:
    """Pairs of rows within groups of the given sizes; a float, as products of two results overflow int64."""
    return float((sizes * (sizes - 1)).sum() / 2)
