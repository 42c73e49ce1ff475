"""Metrics and evaluation protocols (Sec. 4.1) as functions of confusion matrices.

A confusion matrix is int64, rows = true classes, columns = predicted outputs. Matrices of disjoint rows add
up, so batches and workers are summed first and matched once: the Hungarian algorithm per shard inflates
(random predictions, 10 classes, 400 rows: .17 whole, .32 as the mean of 8 shards).

Joint matrices of the task-agnostic protocols have C_l + C_u rows and C_l + K columns, known first in both. K
may differ from C_u: the matching is rectangular, rows of a class or cluster without partner count as wrong.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import entr

Counts = NDArray[np.int64]


def confusion(truth: ArrayLike, predicted: ArrayLike, num_true: int, num_predicted: int) -> Counts:
    """Count (true class, predicted output) pairs: (R, P), additive over disjoint sets of rows.

    ``truth`` (N,) integers in [0, R), or -1 for a row without truth, which is ignored; ``predicted`` (N,)
    integers in [0, P). Host memory. ValueError: the shapes differ, or a value lies outside its range.
    """
    rows, columns = np.asarray(truth), np.asarray(predicted)
    if rows.ndim != 1 or rows.shape != columns.shape:
        raise ValueError(f"truth {rows.shape} and predicted {columns.shape} must be one (N,) vector each")
    rows, columns = (values[rows != -1].astype(np.int64) for values in (rows, columns))
    for name, values, size in (("truth", rows, num_true), ("predicted", columns, num_predicted)):
        outside = np.count_nonzero((values < 0) | (values >= size))
        if outside:
            raise ValueError(f"{outside} of {values.size} {name} values lie outside [0, {size})")
    flat = np.bincount(rows * num_predicted + columns, minlength=num_true * num_predicted)
    return flat.astype(np.int64).reshape(num_true, num_predicted)


def hungarian(counts: Counts) -> Counts:
    """The output (R,) int64 of each class in the pairing of classes with outputs, each at most once, under
    which most rows of ``counts`` (R, P) agree (Kuhn, 1955); -1: no partner, only where R > P.
    """
    classes, outputs = linear_sum_assignment(counts, maximize=True)
    matching = np.full(len(counts), -1, dtype=np.int64)
    matching[classes] = outputs
    return matching


def matched_counts(counts: Counts, matching: Counts) -> Counts:
    """Rows of each class that fall on its matched output: counts (R, P), matching (R,) -> (R,) int64."""
    padded = np.pad(counts, ((0, 0), (0, 1)))  # no rows in column -1, for classes without partner
    return padded[np.arange(len(counts)), matching]


# The metrics of counts (R, P); undefined (ValueError) where they count no row.
def cluster_accuracy(counts: Counts) -> float:
    """Share of rows that agree under the best matching, 0-1: ClusterAcc of Sec. 4.1."""
    return float(matched_counts(counts, hungarian(counts)).sum() / _num_rows(counts))


def purity(counts: Counts) -> float:
    """Share of rows in the majority class of their output, 0-1. Many clusters are pure for free."""
    return float(counts.max(axis=0, initial=0).sum() / _num_rows(counts))


def nmi(counts: Counts) -> float:
    """Mutual information over the arithmetic mean of both entropies, 0-1, as scikit-learn's; 1 for two
    trivial partitions (one class, one output).
    """
    joint = counts / _num_rows(counts)
    total = entr(joint.sum(axis=1)).sum() + entr(joint.sum(axis=0)).sum()
    return float(np.clip(2 * (total - entr(joint).sum()) / total, 0.0, 1.0)) if total else 1.0


def ari(counts: Counts) -> float:
    """Adjusted Rand index, at most 1, expected 0 for random predictions (Hubert and Arabie, 1985), as
    scikit-learn's; 1 for two trivial partitions.
    """
    sums = (np.asarray(_num_rows(counts)), counts, counts.sum(axis=1), counts.sum(axis=0))
    # Pairs of rows within groups; floats, as products of two of them overflow int64.
    all_pairs, together, same_class, same_output = (float((n * (n - 1)).sum() / 2) for n in sums)
    expected = same_class * same_output / all_pairs if all_pairs else 0.0
    most = (same_class + same_output) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)


def cluster_metrics(counts: Counts) -> dict[str, float]:
    """`acc` (under the best matching), `nmi`, `ari` and `purity`; {} without rows."""
    named = {"acc": cluster_accuracy, "nmi": nmi, "ari": ari, "purity": purity}
    return {name: metric(counts) for name, metric in named.items()} if counts.sum() else {}


def chance_accuracy(
    class_counts: ArrayLike, num_clusters: int, num_trials: int = 100, seed: int = 0
) -> float:
    """Expected clustering accuracy of uniformly random predictions, 0-1: the matching lifts it above 1 / K.

    ``class_counts`` (R,): rows of each class, one row at least; K = ``num_clusters``. Mean of ``num_trials``
    simulations; its standard error with 10 balanced classes: .0012 for 200 rows, .0002 for 4,000.
    """
    generator = np.random.default_rng(seed)
    uniform, sizes = np.full(num_clusters, 1 / num_clusters), np.asarray(class_counts, dtype=np.int64)
    trials = generator.multinomial(sizes, uniform, (num_trials, len(sizes)))
    return float(np.mean([cluster_accuracy(counts) for counts in trials]))


# The protocols return `{known|novel|all}/{metric}`. Known and all rows get accuracy only: a known class has a
# name, how well its rows cluster says nothing more. A group without rows has no key; `all`, the
# sample-weighted mean, needs rows of both. `joint`: argmax over the known and the head's novel outputs.
def task_aware(known: Counts, novel: Counts) -> dict[str, float]:
    """Each row is told whether its class is known or novel: ``known`` (C_l, C_l) are the known rows over the
    known outputs, ``novel`` (C_u, K) the novel rows over the head's own novel outputs.
    """
    return _result(known, novel, np.trace(known), matched_counts(novel, hungarian(novel)).sum())


def task_agnostic_official(joint: Counts, num_known: int) -> dict[str, float]:
    """Known rows plainly; novel classes matched to ANY output: lenient, as the authors' release computes."""
    return task_aware(joint[:num_known], joint[num_known:])


def task_agnostic_joint(joint: Counts, num_known: int) -> dict[str, float]:
    """One matching of all classes to all outputs; known, novel and all rows are counted under it.

    Known classes are matched too, so accuracy on known rows may differ from the plain one. Of equally good
    matchings the one with most known rows correct counts, so that both shares are functions of the counts.
    """
    weights = joint * (joint.sum() + 1)
    weights[:num_known] += joint[:num_known]
    matched = matched_counts(joint, hungarian(weights))
    return _result(joint[:num_known], joint[num_known:], matched[:num_known].sum(), matched[num_known:].sum())


def generalized(joint: Counts, num_known: int, dropped: Sequence[int] = ()) -> dict[str, float]:
    """`all`, `old` and `new`: accuracy on unlabeled rows of known and novel classes under one matching of all
    classes to all outputs (generalized category discovery: Vaze et al., CVPR 2022), but ``dropped`` ones.
    """
    found = with_rejected(task_agnostic_joint, joint, num_known, dropped)
    names = {"known/acc": "old", "novel/acc": "new", "all/acc": "all"}
    result = {name: found[key] for key, name in names.items() if key in found}
    if len(result) == 1:  # rows of one kind
        result["all"] = next(iter(result.values()))
    return result


def with_rejected(
    protocol: Callable[[Counts, int], dict[str, float]], joint: Counts, num_known: int, dropped: Sequence[int]
) -> dict[str, float]:
    """What a task-agnostic ``protocol`` says where rows in the columns ``dropped`` are rejected: accuracy and
    purity count them as wrong, NMI and ARI leave them out.
    """
    result = protocol(joint, num_known)
    if not dropped:
        return result
    given, num_old = joint.copy(), joint[:num_known].sum()
    given[:, [*dropped]] = 0
    found = dict.fromkeys(result, 0.0) | protocol(given, num_known)
    for group, kept, total in (
        ("known", given[:num_known].sum(), num_old),
        ("novel", given[num_known:].sum(), joint.sum() - num_old),
    ):
        for key in (f"{group}/acc", f"{group}/purity"):
            if key in found:
                found[key] *= float(kept / total)
    if "all/acc" in found:
        right = found["known/acc"] * num_old + found["novel/acc"] * (joint.sum() - num_old)
        found["all/acc"] = float(right / joint.sum())
    return found


def task_agnostic_strict(joint: Counts, num_known: int) -> dict[str, float]:
    """Known rows plainly; novel classes matched to novel outputs only, a row predicted as known is an error.

    NMI and ARI pool the known outputs into a single one, "not discovered": telling novel classes apart by the
    known class they are mistaken for earns nothing. Purity counts the pooled rows as wrong.
    """
    known, novel, found = joint[:num_known], joint[num_known:], joint[num_known:, num_known:]
    pooled = np.concatenate([novel[:, :num_known].sum(axis=1, keepdims=True), found], axis=1)
    result = _result(known, pooled, np.trace(known), matched_counts(found, hungarian(found)).sum())
    if novel.sum():
        result["novel/purity"] = float(found.max(axis=0, initial=0).sum() / novel.sum())
    return result


def _result(
    known: Counts, novel: Counts, correct_known: np.integer, correct_novel: np.integer
) -> dict[str, float]:
    num_known, num_novel = known.sum(), novel.sum()
    result = {"known/acc": float(correct_known / num_known)} if num_known else {}
    if num_novel:
        result["novel/acc"] = float(correct_novel / num_novel)
        result |= {"novel/nmi": nmi(novel), "novel/ari": ari(novel), "novel/purity": purity(novel)}
    if num_known and num_novel:
        result["all/acc"] = float((correct_known + correct_novel) / (num_known + num_novel))
    return result


def _num_rows(counts: Counts) -> int:
    num_rows = int(counts.sum())
    if num_rows == 0:
        raise ValueError(f"a confusion matrix of shape {counts.shape} without rows has no metric")
    return num_rows
