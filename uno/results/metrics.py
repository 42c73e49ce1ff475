"""Metrics and evaluation protocols (paper Sec. 4.1) as functions of confusion matrices.

A confusion matrix is int64, with a row for each true class and a column for each
predicted output. Matrices of disjoint sets of rows can be added. So the counts of
batches and workers are summed first, and clusters are matched once. Matching every part
on its own overstates the accuracy: random predictions of 400 rows of 10 classes get
0.17 as a whole, and 0.32 as the mean of 8 parts.

The joint matrices of the task-agnostic protocols have C_l + C_u rows and C_l + K
columns, known ones first in both. K may differ from C_u. The matching is rectangular
then, and rows of a class or cluster without a partner count as wrong.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import entr

Counts = NDArray[np.int64]


def confusion(
    truth: ArrayLike, predicted: ArrayLike, num_true: int, num_predicted: int
) -> Counts:
    """Count the pairs of a true class and a predicted output.

    Counts of disjoint sets of rows can be added.

    Args:
        truth: True classes, integers (N,) from 0 to ``num_true`` - 1, or -1 for rows
            without a true class, which are ignored.
        predicted: Predicted outputs, integers (N,) from 0 to ``num_predicted`` - 1.
            Both are arrays, or tensors on the CPU.
        num_true: The number of classes R.
        num_predicted: The number of outputs P.

    Returns:
        Counts (R, P), int64.

    Raises:
        ValueError: The inputs are not vectors of one length, or a value of a row with a
            true class lies outside its range.
    """
    rows, columns = np.asarray(truth), np.asarray(predicted)
    if rows.ndim != 1 or rows.shape != columns.shape:
        raise ValueError(
            f"truth {rows.shape} and predicted {columns.shape} must be one (N,) vector"
            " each"
        )
    rows, columns = (values[rows != -1].astype(np.int64) for values in (rows, columns))
    for name, values, size in (
        ("truth", rows, num_true),
        ("predicted", columns, num_predicted),
    ):
        outside = np.count_nonzero((values < 0) | (values >= size))
        if outside:
            raise ValueError(
                f"{outside} of {values.size} {name} values lie outside [0, {size})"
            )
    flat = np.bincount(
        rows * num_predicted + columns, minlength=num_true * num_predicted
    )
    return flat.astype(np.int64).reshape(num_true, num_predicted)


def hungarian(counts: Counts) -> Counts:
    """Match each class to one output so that most rows agree (Kuhn, 1955).

    Args:
        counts: Counts of rows by class and output, (R, P).

    Returns:
        The output of each class, int64 (R,). No two classes have the same output. A
        class without a partner, which only exists if R > P, has -1.
    """
    classes, outputs = linear_sum_assignment(counts, maximize=True)
    matching = np.full(len(counts), -1, dtype=np.int64)
    matching[classes] = outputs
    return matching


def matched_counts(counts: Counts, matching: Counts) -> Counts:
    """Count the rows of each class at the output that is matched to the class.

    Args:
        counts: Counts of rows by class and output, (R, P).
        matching: The output of each class, (R,), or -1 for none.

    Returns:
        Counts (R,), int64; 0 for a class without an output.
    """
    # column -1 has no rows, for classes without a partner
    padded = np.pad(counts, ((0, 0), (0, 1)))
    return padded[np.arange(len(counts)), matching]


def cluster_accuracy(counts: Counts) -> float:
    """Return the share of rows that agree under the best matching.

    This is ClusterAcc of Sec. 4.1.

    Args:
        counts: Number of rows of each true class at each output, (R, P).

    Returns:
        The share, 0-1.

    Raises:
        ValueError: The counts have no row.
    """
    return float(matched_counts(counts, hungarian(counts)).sum() / _num_rows(counts))


def purity(counts: Counts) -> float:
    """Return the share of rows in the majority class of their output.

    A high purity says little if there are many more outputs than classes.

    Args:
        counts: Number of rows of each true class at each output, (R, P).

    Returns:
        The share, 0-1.

    Raises:
        ValueError: The counts have no row.
    """
    return float(counts.max(axis=0, initial=0).sum() / _num_rows(counts))


def nmi(counts: Counts) -> float:
    """Return the normalized mutual information of true classes and outputs.

    It is the mutual information divided by the arithmetic mean of both entropies, as in
    scikit-learn.

    Args:
        counts: Number of rows of each true class at each output, (R, P).

    Returns:
        The value, 0-1. It is 1 if all rows are of one class and at one output.

    Raises:
        ValueError: The counts have no row.
    """
    joint = counts / _num_rows(counts)
    total = entr(joint.sum(axis=1)).sum() + entr(joint.sum(axis=0)).sum()
    return (
        float(np.clip(2 * (total - entr(joint).sum()) / total, 0.0, 1.0))
        if total
        else 1.0
    )


def ari(counts: Counts) -> float:
    """Return the adjusted Rand index of true classes and outputs, as in scikit-learn.

    The definition is that of Hubert and Arabie, 1985.

    Args:
        counts: Number of rows of each true class at each output, (R, P).

    Returns:
        The index, at most 1. Random predictions have 0 on average. It is 1 if all rows
        are of one class and at one output.

    Raises:
        ValueError: The counts have no row.
    """
    sums = (
        np.asarray(_num_rows(counts)),
        counts,
        counts.sum(axis=1),
        counts.sum(axis=0),
    )
    # numbers of pairs of rows; they are floats, because products would overflow int64
    all_pairs, together, same_class, same_output = (
        float((n * (n - 1)).sum() / 2) for n in sums
    )
    expected = same_class * same_output / all_pairs if all_pairs else 0.0
    most = (same_class + same_output) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)


def class_recall(right: Counts, sizes: Counts, part: str = "all") -> float:
    """Return the mean recall of classes, 0-1; every class counts once.

    Args:
        right: Number of correct rows of each class, (R,).
        sizes: Number of rows of each class, (R,). Classes without rows are left out; at
            least one must have rows.
        part: "all" classes with rows, or a third of these classes, rounded up: "small"
            for those with the fewest rows, "large" for those with the most.
    """
    order = np.argsort(sizes, kind="stable")[np.count_nonzero(sizes == 0) :]
    recalls, third = right[order] / sizes[order], -(-len(order) // 3)
    return float(
        {"all": recalls, "small": recalls[:third], "large": recalls[-third:]}[
            part
        ].mean()
    )


class Metric(NamedTuple):
    """A metric of how well clusters agree with classes.

    Attributes:
        of: Computes the metric. Its arguments depend on ``kind``.
        label: The name for people.
        meaning: What the metric measures, for people.
        kind: "matched" if ``of`` takes the number of correct rows and of all rows of
            each class, (R,) each: a matching of clusters and classes has decided which
            rows are correct. Otherwise ``of`` takes counts of rows by class and
            cluster, (R, P), with at least one row. "share" is then a share of rows,
            and rows at none of the clusters count as wrong. For "clusters", rejected
            rows (those that are predicted as a class that the user dropped) are left
            out, and under the strict protocol the novel rows that are predicted as
            known form one more cluster.
    """

    of: Callable[..., float]
    label: str
    meaning: str
    kind: Literal["matched", "share", "clusters"] = "clusters"


METRICS = {
    "acc": Metric(
        lambda right, sizes: float(right.sum() / sizes.sum()),
        "accuracy",
        "images that agree under the best matching",
        "matched",
    ),
    "nmi": Metric(nmi, "NMI", "normalized mutual information of clusters and classes"),
    "ari": Metric(
        ari,
        "ARI",
        "adjusted Rand index: pairs of images together or apart, 0 by chance",
    ),
    "purity": Metric(
        purity, "purity", "images in the majority class of their cluster", "share"
    ),
    "balanced": Metric(
        class_recall,
        "balanced acc.",
        "mean recall, every class counts once",
        "matched",
    ),
    "recall_small": Metric(
        partial(class_recall, part="small"),
        "recall, small",
        "mean recall of the third of the classes with the fewest images",
        "matched",
    ),
    "recall_large": Metric(
        partial(class_recall, part="large"),
        "recall, large",
        "mean recall of the third of the classes with the most images",
        "matched",
    ),
}
"""The metrics by their names in the keys of ``metrics.json``.

``metrics.json`` has every entry for each protocol, and the report shows them for the
task-aware one. The console shows the accuracy alone.
"""


def cluster_metrics(counts: Counts) -> dict[str, float]:
    """Compute all :data:`METRICS` of a clustering under the best matching to classes.

    Args:
        counts: Number of rows of each true class at each output, (R, P).

    Returns:
        "acc", "nmi", "ari", "purity", "balanced", "recall_small" and "recall_large",
        all as fractions (ARI may be negative); empty if the counts have no row.
    """
    if not counts.any():
        return {}
    right, sizes = matched_counts(counts, hungarian(counts)), counts.sum(axis=1)
    return {
        name: metric.of(right, sizes) if metric.kind == "matched" else metric.of(counts)
        for name, metric in METRICS.items()
    }


def chance_accuracy(
    class_counts: ArrayLike, num_clusters: int, num_trials: int = 100, seed: int = 0
) -> float:
    """Estimate the clustering accuracy of uniformly random predictions, 0-1.

    It is higher than 1 / K, because the best matching is chosen. The standard error of
    100 trials with 10 balanced classes is 0.0012 for 200 rows, and 0.0002 for 4,000.

    Args:
        class_counts: Number of rows of each class, (R,), at least one row in total.
        num_clusters: Number of clusters K.
        num_trials: Number of simulations to average.
        seed: Seed of the simulations.
    """
    generator = np.random.default_rng(seed)
    uniform, sizes = (
        np.full(num_clusters, 1 / num_clusters),
        np.asarray(class_counts, dtype=np.int64),
    )
    trials = generator.multinomial(sizes, uniform, (num_trials, len(sizes)))
    return float(np.mean([cluster_accuracy(counts) for counts in trials]))


class Matched(NamedTuple):
    """The rows that are correct under an evaluation protocol.

    Attributes:
        known: Number of correct rows of known classes.
        novel: Number of correct rows of each novel class, (C_u,).
        clusters: Rows of novel classes by class and output, (C_u, P), for the other
            metrics such as NMI. The protocol decides which P outputs these are.
        others: Under the strict protocol, whose ``clusters`` are the novel outputs
            only: the number of rows of each novel class that are predicted as any known
            class, (C_u,). None under the other protocols.
    """

    known: int
    novel: Counts
    clusters: Counts
    others: Counts | None = None


def task_aware(joint: Counts, num_known: int) -> Matched:
    """Count correct rows, given whether the class of each row is known or novel.

    Rows of known classes choose among the known outputs. Rows of novel classes choose
    among the novel outputs, which are matched to the novel classes.

    Args:
        joint: Counts of rows by class and output, (C_l + C_u, C_l + K), for C_l known
            and C_u novel classes and K novel outputs, known ones first. Only known rows
            at known outputs and novel rows at novel outputs are read.
        num_known: The number of known classes C_l.

    Returns:
        The number of correct rows of known classes, and of each novel class; and
        ``clusters``, the counts of novel rows at the novel outputs, (C_u, K).
    """
    known, novel = joint[:num_known, :num_known], joint[num_known:, num_known:]
    return Matched(np.trace(known), matched_counts(novel, hungarian(novel)), novel)


def task_agnostic_official(joint: Counts, num_known: int) -> Matched:
    """Count correct rows as the code of the paper's authors does.

    Every row chooses among all outputs. Known rows must be at the output of their
    class. A novel class may be matched to any output, even to a known one, which is
    lenient.

    Args:
        joint: Counts of rows by class and output, (C_l + C_u, C_l + K), for C_l known
            and C_u novel classes and K novel outputs, known ones first.
        num_known: The number of known classes C_l.

    Returns:
        The number of correct rows of known classes, and of each novel class; and
        ``clusters``, the counts of novel rows at all outputs, (C_u, C_l + K).
    """
    novel = joint[num_known:]
    return Matched(
        np.trace(joint[:num_known]), matched_counts(novel, hungarian(novel)), novel
    )


def task_agnostic_joint(joint: Counts, num_known: int) -> Matched:
    """Count correct rows under one matching of all classes to all outputs.

    Every row chooses among all outputs. Known classes are matched, too, so the accuracy
    of known rows may differ from that under the other protocols.

    Args:
        joint: Counts of rows by class and output, (C_l + C_u, C_l + K), for C_l known
            and C_u novel classes and K novel outputs, known ones first.
        num_known: The number of known classes C_l.

    Returns:
        The number of correct rows of known classes, and of each novel class; and
        ``clusters``, the counts of novel rows at all outputs, (C_u, C_l + K).
    """
    matched = matched_counts(joint, joint_matching(joint, num_known))
    return Matched(matched[:num_known].sum(), matched[num_known:], joint[num_known:])


def task_agnostic_strict(joint: Counts, num_known: int) -> Matched:
    """Count correct rows, where a novel row that is predicted as known is wrong.

    Every row chooses among all outputs. Known rows must be at the output of their
    class, and novel classes are matched to novel outputs only. For NMI and ARI the
    known outputs are one cluster: novel classes gain nothing if they are mistaken for
    different known classes.

    Args:
        joint: Counts of rows by class and output, (C_l + C_u, C_l + K), for C_l known
            and C_u novel classes and K novel outputs, known ones first.
        num_known: The number of known classes C_l.

    Returns:
        The number of correct rows of known classes, and of each novel class;
        ``clusters``, the counts of novel rows at the novel outputs, (C_u, K); and
        ``others``, the rows of each novel class at any known output, (C_u,).
    """
    found, absorbed = (
        joint[num_known:, num_known:],
        joint[num_known:, :num_known].sum(axis=1),
    )
    right = matched_counts(found, hungarian(found))
    return Matched(np.trace(joint[:num_known]), right, found, absorbed)


def joint_matching(joint: Counts, num_known: int) -> Counts:
    """Match all classes to all outputs so that most rows agree, as :func:`hungarian`.

    Among equally good matchings this is one with most correct known rows. So the
    accuracies of known and of novel rows are determined by the counts.

    Args:
        joint: Counts of rows by class and output, (C_l + C_u, C_l + K), for C_l known
            and C_u novel classes and K novel outputs, known ones first.
        num_known: The number of known classes C_l.

    Returns:
        The output of each class, int64 (C_l + C_u,), or -1 for none.
    """
    weights = joint * (joint.sum() + 1)
    weights[:num_known] += joint[:num_known]
    return hungarian(weights)


class Protocol(NamedTuple):
    """An evaluation protocol: which predictions count as correct.

    Attributes:
        of: Computes the correct rows from counts of rows by class and output, (C_l +
            C_u, C_l + K), and the number C_l of known classes.
        label: The name for people.
        meaning: What the protocol counts, for people.
    """

    of: Callable[[Counts, int], Matched]
    label: str
    meaning: str


PROTOCOLS = {
    "task_aware": Protocol(
        task_aware,
        "Task-aware",
        "Whether an image is known or novel is given: known images choose among the"
        " known outputs, novel ones among the discovered classes, which are then"
        " matched to the true ones.",
    ),
    "task_agnostic_official": Protocol(
        task_agnostic_official,
        "Task-agnostic, official",
        "Every image chooses among all outputs; a novel class may be matched to any,"
        " even a known one. Lenient, and what the paper's code computes.",
    ),
    "task_agnostic_joint": Protocol(
        task_agnostic_joint,
        "Task-agnostic, joint",
        "Every image chooses among all outputs; one matching of all true classes to all"
        " outputs.",
    ),
    "task_agnostic_strict": Protocol(
        task_agnostic_strict,
        "Task-agnostic, strict",
        "Every image chooses among all outputs; a novel image assigned to a known class"
        " is an error.",
    ),
}
"""The protocols by their names in the keys of ``metrics.json``."""


def scores(
    protocol: Callable[[Counts, int], Matched],
    joint: Counts,
    num_known: int,
    dropped: Sequence[int] = (),
) -> dict[str, float]:
    """Compute the metrics of known, novel and all rows under a protocol.

    Known and all rows only have the accuracy, because known classes have names, so it
    does not matter how well their rows cluster.

    Args:
        protocol: One of the protocols, such as :func:`task_aware`.
        joint: Counts of rows by class and output, (C_l + C_u, C_l + K), for C_l known
            and C_u novel classes and K novel outputs, known ones first.
        num_known: The number of known classes C_l.
        dropped: Indices of outputs that the user has dropped. Their rows are rejected:
            accuracies, recalls and purity count these as wrong, NMI and ARI leave them
            out.

    Returns:
        Fractions by key (ARI may be negative): "known/acc", "novel/NAME" for every name
        of :data:`METRICS`, and "all/acc", the share of all rows that are correct. The
        groups known and novel have no keys without rows, and "all" needs rows of both.
    """
    kept = joint.copy()
    kept[:, list(dropped)] = 0
    found, num_old, num_new = (
        protocol(kept, num_known),
        joint[:num_known].sum(),
        joint[num_known:].sum(),
    )
    result = {"known/acc": float(found.known / num_old)} if num_old else {}
    if num_new:
        sizes = joint[num_known:].sum(axis=1)
        result |= {
            f"novel/{name}": _score_novel_rows(metric, found, sizes)
            for name, metric in METRICS.items()
        }
    if num_old and num_new:
        result["all/acc"] = float(
            (found.known + found.novel.sum()) / (num_old + num_new)
        )
    return result


def _score_novel_rows(metric: Metric, found: Matched, sizes: Counts) -> float:
    """Compute a metric of the rows of novel classes under a protocol.

    Rejected rows are those that are predicted as a class that the user dropped. They
    are counted in ``sizes``, but not in ``found``. A "matched" metric compares the
    correct rows under the protocol with all rows, so rejected rows count as wrong. A
    "share" is computed from ``found.clusters``, and rows that are not there count as
    wrong: rejected ones, and under the strict protocol those that are predicted as
    known. A metric of the kind "clusters" leaves rejected rows out. Under the strict
    protocol it takes the rows that are predicted as known (``found.others``) as one
    more cluster. A "share" or "clusters" metric is 0 if it has no row to count.

    Args:
        metric: The metric, whose ``kind`` is one of these three.
        found: The correct rows under a protocol, and the novel rows by class and
            output, without rejected rows.
        sizes: The number of rows of each novel class, including rejected ones, (C_u,).
            At least one class has rows.
    """
    if metric.kind == "matched":
        return metric.of(found.novel, sizes)
    counts = found.clusters
    if metric.kind == "clusters" and found.others is not None:
        counts = np.concatenate([found.others[:, None], counts], axis=1)
    if not counts.any():
        return 0.0
    return (
        float(metric.of(counts) * counts.sum() / sizes.sum())
        if metric.kind == "share"
        else metric.of(counts)
    )


def generalized(
    joint: Counts, num_known: int, dropped: Sequence[int] = ()
) -> dict[str, float]:
    """Compute the accuracies of generalized category discovery.

    All classes are matched to all outputs at once (Vaze et al., CVPR 2022), see
    :func:`task_agnostic_joint`.

    Args:
        joint: Counts of unlabeled rows by class and output, (C_l + C_u, C_l + K), for
            C_l known and C_u novel classes and K novel outputs, known ones first.
        num_known: The number of known classes C_l.
        dropped: Indices of outputs that the user has dropped. Their rows are wrong.

    Returns:
        The accuracy of "all" unlabeled rows, of "old" ones (known classes) and "new"
        ones (novel classes), 0-1. A group without rows has no key, so the result is
        empty if there are no rows at all.
    """
    found = scores(task_agnostic_joint, joint, num_known, dropped)
    names = {"known/acc": "old", "novel/acc": "new", "all/acc": "all"}
    result = {name: found[key] for key, name in names.items() if key in found}
    if len(result) == 1:  # all rows are of one kind
        result["all"] = next(iter(result.values()))
    return result


def _num_rows(counts: Counts) -> int:
    """Return the number of rows that a confusion matrix counts.

    Raises:
        ValueError: It counts no row.
    """
    num_rows = int(counts.sum())
    if num_rows == 0:
        raise ValueError(
            f"a confusion matrix of shape {counts.shape} without rows has no metric"
        )
    return num_rows
