"""Metrics and evaluation protocols (Sec. 4.1) as functions of confusion matrices.

A confusion matrix is int64, rows = true classes, columns = predicted outputs. Matrices
of disjoint rows add up, so batches and workers are summed first and matched once: the
Hungarian algorithm per shard inflates (random predictions, 10 classes, 400 rows: .17
whole, .32 as the mean of 8 shards).

Joint matrices of the task-agnostic protocols have C_l + C_u rows and C_l + K columns,
known first in both. K may differ from C_u: the matching is rectangular, rows of a class
or cluster without partner count as wrong.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import entr

Counts = NDArray[np.int64]


def confusion(
    truth: ArrayLike, predicted: ArrayLike, num_true: int, num_predicted: int
) -> Counts:
    """Count (true class, predicted output) pairs: (R, P), additive over disjoint sets
    of rows.

    ``truth`` (N,) integers in [0, R), or -1 for a row without truth, which is ignored;
    ``predicted`` (N,) integers in [0, P). Host memory. ValueError: the shapes differ,
    or a value lies outside its range.
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
    """The output (R,) int64 of each class in the pairing of classes with outputs, each
    at most once, under which most rows of ``counts`` (R, P) agree (Kuhn, 1955); -1: no
    partner, only where R > P.
    """
    classes, outputs = linear_sum_assignment(counts, maximize=True)
    matching = np.full(len(counts), -1, dtype=np.int64)
    matching[classes] = outputs
    return matching


def matched_counts(counts: Counts, matching: Counts) -> Counts:
    """Rows of each class that fall on its matched output: counts (R, P), matching
    (R,) -> (R,) int64.
    """
    # no rows in column -1, for classes without partner
    padded = np.pad(counts, ((0, 0), (0, 1)))
    return padded[np.arange(len(counts)), matching]


# The metrics of counts (R, P); undefined (ValueError) where they count no row.
def cluster_accuracy(counts: Counts) -> float:
    """Share of rows that agree under the best matching, 0-1: ClusterAcc of Sec. 4.1."""
    return float(matched_counts(counts, hungarian(counts)).sum() / _num_rows(counts))


def purity(counts: Counts) -> float:
    """Share of rows in the majority class of their output, 0-1. Many clusters are
    pure for free.
    """
    return float(counts.max(axis=0, initial=0).sum() / _num_rows(counts))


def nmi(counts: Counts) -> float:
    """Mutual information over the arithmetic mean of both entropies, 0-1, as
    scikit-learn's; 1 for two trivial partitions (one class, one output).
    """
    joint = counts / _num_rows(counts)
    total = entr(joint.sum(axis=1)).sum() + entr(joint.sum(axis=0)).sum()
    return (
        float(np.clip(2 * (total - entr(joint).sum()) / total, 0.0, 1.0))
        if total
        else 1.0
    )


def ari(counts: Counts) -> float:
    """Adjusted Rand index, at most 1, expected 0 for random predictions (Hubert and
    Arabie, 1985), as scikit-learn's; 1 for two trivial partitions.
    """
    sums = (
        np.asarray(_num_rows(counts)),
        counts,
        counts.sum(axis=1),
        counts.sum(axis=0),
    )
    # Pairs of rows within groups; floats, as products of two of them overflow int64.
    all_pairs, together, same_class, same_output = (
        float((n * (n - 1)).sum() / 2) for n in sums
    )
    expected = same_class * same_output / all_pairs if all_pairs else 0.0
    most = (same_class + same_output) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)


def class_recall(right: Counts, sizes: Counts, part: str = "all") -> float:
    """Mean recall of classes, each counted once, 0-1: ``right`` and ``sizes`` (R,)
    rows, those without rows left out. ``part`` "small" or "large": of the third of
    them, rounded up, with the fewest or most rows.
    """
    order = np.argsort(sizes, kind="stable")[np.count_nonzero(sizes == 0) :]
    recalls, third = right[order] / sizes[order], -(-len(order) // 3)
    return float(
        {"all": recalls, "small": recalls[:third], "large": recalls[-third:]}[
            part
        ].mean()
    )


def _best_recall(part: str, counts: Counts) -> float:
    return class_recall(
        matched_counts(counts, hungarian(counts)), counts.sum(axis=1), part
    )


class Metric(NamedTuple):
    """A number that says how well clusters fit classes; ``of`` counts (R, P), at
    least one row.
    """

    of: Callable[[Counts], float]
    label: str
    meaning: str
    is_share: bool = False
    """Of rows: those on no cluster count as wrong. Without it rejected rows are left
    out, and novel rows that are taken for known ones are one cluster more.
    """


PARTS = {"balanced": "all", "recall_small": "small", "recall_large": "large"}
METRICS = {
    "acc": Metric(
        cluster_accuracy,
        "accuracy",
        "images that agree under the best matching",
        is_share=True,
    ),
    "nmi": Metric(nmi, "NMI", "normalized mutual information of clusters and classes"),
    "ari": Metric(
        ari,
        "ARI",
        "adjusted Rand index: pairs of images together or apart, 0 by chance",
    ),
    "purity": Metric(
        purity, "purity", "images in the majority class of their cluster", is_share=True
    ),
    "balanced": Metric(
        partial(_best_recall, "all"),
        "balanced acc.",
        "mean recall, every class counts once",
    ),
    "recall_small": Metric(
        partial(_best_recall, "small"),
        "recall, small",
        "mean recall of the third of the classes with the fewest images",
    ),
    "recall_large": Metric(
        partial(_best_recall, "large"),
        "recall, large",
        "mean recall of the third of the classes with the most images",
    ),
}
"""By their names in the paths of ``metrics.json``. Console, model card and report
show every entry.
"""


def cluster_metrics(counts: Counts) -> dict[str, float]:
    """All :data:`METRICS` of counts (R, P); {} without rows."""
    return (
        {name: metric.of(counts) for name, metric in METRICS.items()}
        if counts.sum()
        else {}
    )


def chance_accuracy(
    class_counts: ArrayLike, num_clusters: int, num_trials: int = 100, seed: int = 0
) -> float:
    """Expected clustering accuracy of uniformly random predictions, 0-1: the matching
    lifts it above 1 / K.

    ``class_counts`` (R,): rows of each class, one row at least; K = ``num_clusters``.
    Mean of ``num_trials`` simulations; its standard error with 10 balanced classes:
    .0012 for 200 rows, .0002 for 4,000.
    """
    generator = np.random.default_rng(seed)
    uniform, sizes = (
        np.full(num_clusters, 1 / num_clusters),
        np.asarray(class_counts, dtype=np.int64),
    )
    trials = generator.multinomial(sizes, uniform, (num_trials, len(sizes)))
    return float(np.mean([cluster_accuracy(counts) for counts in trials]))


class Matched(NamedTuple):
    """What a protocol makes of joint counts: how many known rows are right, how many of
    each novel class (C_u,), and the novel rows (C_u, P) over their ``clusters``;
    ``others`` (C_u,) are on none of these.
    """

    known: int
    novel: Counts
    clusters: Counts
    others: Counts | None = None


# The protocols of joint counts (C_l + C_u, C_l + K), by argmax over the known and the
# head's novel outputs.
def task_aware(joint: Counts, num_known: int) -> Matched:
    """Of each row it is given whether its class is known or novel: of ``joint`` the
    known rows over the known outputs and the novel rows over the head's own outputs,
    argmax over these alone.
    """
    known, novel = joint[:num_known, :num_known], joint[num_known:, num_known:]
    return Matched(np.trace(known), matched_counts(novel, hungarian(novel)), novel)


def task_agnostic_official(joint: Counts, num_known: int) -> Matched:
    """Known rows plainly; novel classes matched to ANY output: lenient, as the
    authors' release computes.
    """
    novel = joint[num_known:]
    return Matched(
        np.trace(joint[:num_known]), matched_counts(novel, hungarian(novel)), novel
    )


def task_agnostic_joint(joint: Counts, num_known: int) -> Matched:
    """One matching of all classes to all outputs; known, novel and all rows are counted
    under it. Known classes are matched too, so accuracy on known rows may differ from
    the plain one.
    """
    matched = matched_counts(joint, joint_matching(joint, num_known))
    return Matched(matched[:num_known].sum(), matched[num_known:], joint[num_known:])


def task_agnostic_strict(joint: Counts, num_known: int) -> Matched:
    """Known rows plainly; novel classes matched to novel outputs only, a row predicted
    as known is an error.

    NMI and ARI pool the known outputs into a single one, "not discovered": telling
    novel classes apart by the known class they are mistaken for earns nothing.
    """
    found, absorbed = (
        joint[num_known:, num_known:],
        joint[num_known:, :num_known].sum(axis=1),
    )
    right = matched_counts(found, hungarian(found))
    return Matched(np.trace(joint[:num_known]), right, found, absorbed)


def joint_matching(joint: Counts, num_known: int) -> Counts:
    """:func:`hungarian` of all classes and outputs; of equally good matchings the one
    with most known rows right, so that the shares of known and of novel rows are
    functions of the counts.
    """
    weights = joint * (joint.sum() + 1)
    weights[:num_known] += joint[:num_known]
    return hungarian(weights)


class Protocol(NamedTuple):
    """A way of counting, for people."""

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
"""By their names in the paths of ``metrics.json``."""


def scores(
    protocol: Callable[[Counts, int], Matched],
    joint: Counts,
    num_known: int,
    dropped: Sequence[int] = (),
) -> dict[str, float]:
    """`{known|novel|all}/acc` and every other `novel/{metric}` of joint counts under
    ``protocol``.

    A known class has a name, how well its rows cluster says nothing more: known and all
    rows get accuracy only. A group without rows has no key; `all`, the sample-weighted
    mean, needs rows of both. Rows in the columns ``dropped`` are rejected: shares of
    rows count them as wrong, NMI and ARI leave them out.
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
        result |= {
            f"novel/{name}": _of_novel(metric, found, num_new)
            for name, metric in METRICS.items()
        }
        # of all rows, under the protocol's own matching:
        sizes = joint[num_known:].sum(axis=1)
        result["novel/acc"] = float(found.novel.sum() / num_new)
        result |= {
            f"novel/{name}": class_recall(found.novel, sizes, part)
            for name, part in PARTS.items()
        }
    if num_old and num_new:
        result["all/acc"] = float(
            (found.known + found.novel.sum()) / (num_old + num_new)
        )
    return result


def _of_novel(metric: Metric, found: Matched, num_rows: int) -> float:
    """A metric of ``num_rows`` novel rows; 0 where all of them are rejected."""
    counts = found.clusters
    if not metric.is_share and found.others is not None:
        counts = np.concatenate([found.others[:, None], counts], axis=1)
    if not counts.any():
        return 0.0
    return (
        float(metric.of(counts) * counts.sum() / num_rows)
        if metric.is_share
        else metric.of(counts)
    )


def generalized(
    joint: Counts, num_known: int, dropped: Sequence[int] = ()
) -> dict[str, float]:
    """`all`, `old` and `new`: accuracy on unlabeled rows of known and novel classes
    under one matching of all classes to all outputs (generalized category discovery:
    Vaze et al., CVPR 2022), but ``dropped`` ones.
    """
    found = scores(task_agnostic_joint, joint, num_known, dropped)
    names = {"known/acc": "old", "novel/acc": "new", "all/acc": "all"}
    result = {name: found[key] for key, name in names.items() if key in found}
    if len(result) == 1:  # rows of one kind
        result["all"] = next(iter(result.values()))
    return result


def _num_rows(counts: Counts) -> int:
    num_rows = int(counts.sum())
    if num_rows == 0:
        raise ValueError(
            f"a confusion matrix of shape {counts.shape} without rows has no metric"
        )
    return num_rows
