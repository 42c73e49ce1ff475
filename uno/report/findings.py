"""What a sample says of the discovered classes: their sizes, how sure and how alike
they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from uno.data.splits import Task
from uno.report.sample import Sample
from uno.results.classes import Suggestion

# likeness of classes that may be one; of digits found to 99 percent it is .29 at most
SIMILAR = 0.5
NUM_NEAREST = 3


@dataclass(frozen=True, eq=False)
class Cluster:
    """One output of the best head and the unlabeled training rows it takes: median
    ``confidence``, mean ``agreement``, ``majority`` (true class, share), and the known
    and the discovered classes that it is most like, as (output, likeness), the most
    similar first.
    """

    output: int
    name: str
    count: int
    confidence: float
    agreement: float
    majority: tuple[str, float] | None
    like_known: list[tuple[int, float]]
    like_novel: list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class SampleSummary:
    """What a sample says of the discovered classes; numbers over the unlabeled rows,
    NaN without any.

    ``truth`` (M,): index into known + true novel names or -1; ``agreement`` (M,): share
    of heads that put a row into its class; ``pairs`` (H,H): share of rows that two
    heads put into the same; ``unsure``: below one half; ``absorbed``: taken for known
    classes; ``likeness`` (C,C) of all outputs, as
    :func:`similar_by_cosine` has it.
    """

    truth: NDArray[np.int64]
    unlabeled: NDArray[np.bool_]
    agreement: NDArray[np.float64]
    pairs: NDArray[np.float64]
    clusters: list[Cluster]
    num_unlabeled: int
    mean_agreement: float
    median_confidence: float
    unsure: float
    absorbed: float
    likeness: NDArray[np.float32]


def summarize(task: Task, sample: Sample) -> SampleSummary:
    """Summarize ``sample``."""
    rows, output, num_known = sample.index, sample.output, task.num_known
    unlabeled = task.is_train[rows] & (task.labels[rows] < 0)
    truth, true_names = task.eval_labels[rows], [*task.known, *task.novel]
    agreement = (sample.votes == output[:, None]).mean(axis=1)
    features, member = (
        torch.from_numpy(sample.features),
        torch.from_numpy(sample.member(task)),
    )
    likeness = class_similarity(features, member, len(sample.classes)).numpy()
    clusters = []
    for k in (k for k in sample.kept if k >= num_known):
        mine = unlabeled & (output == k)
        counts = np.bincount(truth[mine & (truth >= 0)], minlength=1)
        majority = (
            (true_names[counts.argmax()], float(counts.max() / counts.sum()))
            if counts.any()
            else None
        )
        like_known, like_novel = (
            nearest(likeness[k, :num_known]),
            nearest(likeness[k, num_known:], num_known),
        )
        sure, agreed = (
            _over(np.median, sample.confidence[mine]),
            _over(np.mean, agreement[mine]),
        )
        name, count = sample.names[k], int(mine.sum())
        clusters.append(
            Cluster(k, name, count, sure, agreed, majority, like_known, like_novel)
        )
    votes, confidence = sample.votes[unlabeled], sample.confidence[unlabeled]
    pairs = (votes[:, :, None] == votes[:, None, :]).sum(axis=0) / max(1, len(votes))
    return SampleSummary(
        truth,
        unlabeled,
        agreement,
        pairs,
        clusters,
        len(votes),
        _over(np.mean, agreement[unlabeled]),
        _over(np.median, confidence),
        _over(np.mean, confidence < 0.5),
        _over(np.mean, output[unlabeled] < num_known),
        likeness,
    )


def _over(statistic: Callable[..., Any], values: NDArray[Any]) -> float:
    return float(statistic(values)) if len(values) else math.nan


def class_similarity(features: Tensor, member: Tensor, num_classes: int) -> Tensor:
    """How alike classes are, (C, C), by ``features`` (N, D) of rows that ``member``
    int64 (N,) puts into them: cosines of their mean directions as seen from the middle
    of all classes. 1: the same; 0 or less: no more alike than any two; -inf: itself, or
    a class without rows.
    """
    groups = F.one_hot(member, num_classes).float()  # (N, C)
    used = groups.any(dim=0)
    means = F.normalize(groups.T @ F.normalize(features.float(), dim=-1), dim=-1)
    centered = F.normalize(means - means[used].mean(dim=0), dim=-1)
    cosines = (centered @ centered.T).fill_diagonal_(-torch.inf)
    return cosines.where(used[:, None] & used, -torch.inf)


def nearest(likeness: NDArray[np.float32], start: int = 0) -> list[tuple[int, float]]:
    """(output, likeness) of the most similar few; ``likeness`` (C',) is of the
    outputs from ``start`` on.
    """
    order = np.argsort(-likeness, kind="stable")[:NUM_NEAREST]
    return [
        (start + int(i), float(likeness[i])) for i in order if np.isfinite(likeness[i])
    ]


def suggestions(sample: Sample, findings: SampleSummary) -> dict[int, Suggestion]:
    """What every discovered class looks like, to somebody who has to name it."""
    found = {}
    for c in findings.clusters:
        known, novel = (
            tuple((sample.names[output], value) for output, value in like)
            for like in (c.like_known, c.like_novel)
        )
        found[c.output] = Suggestion(c.count, findings.num_unlabeled, known, novel)
    return found
