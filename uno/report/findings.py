"""What a sample says of the discovered classes: their sizes, how sure and how alike they are."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from uno.data.splits import Task
from uno.report.sample import Sample
from uno.results.classes import alike


@dataclass(frozen=True, eq=False)
class Cluster:
    """One output of the best head and the unlabeled training rows it takes: median ``confidence``, mean
    ``agreement``, ``majority`` (true class, share), and the known and the discovered class that it is most
    like, as (output, likeness).
    """

    output: int
    name: str
    count: int
    confidence: float
    agreement: float
    majority: tuple[str, float] | None
    like_known: tuple[int, float] | None
    like_novel: tuple[int, float] | None


@dataclass(frozen=True, eq=False)
class Findings:
    """What a sample says of the discovered classes; numbers over the unlabeled rows, NaN without any.

    ``truth`` (M,): index into known + true novel names or -1; ``agreement`` (M,): share of heads that put a
    row into its class; ``pairs`` (H,H): share of rows that two heads put into the same; ``unsure``: below one
    half; ``absorbed``: taken for known classes; ``likeness`` (C,C) of all outputs, as :func:`alike` has it.
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


def find(task: Task, sample: Sample) -> Findings:
    """Summarise ``sample``."""
    rows, output, num_known = sample.index, sample.output, task.num_known
    unlabeled = task.is_train[rows] & (task.labels[rows] < 0)
    truth, true_names = task.eval_labels[rows], [*task.known, *task.novel]
    agreement = (sample.votes == output[:, None]).mean(axis=1)
    features, member = torch.from_numpy(sample.features), torch.from_numpy(sample.member(task))
    likeness = alike(features, member, len(sample.classes)).numpy()
    clusters = []
    for k in (k for k in sample.kept if k >= num_known):
        mine = unlabeled & (output == k)
        counts = np.bincount(truth[mine & (truth >= 0)], minlength=1)
        majority = (true_names[counts.argmax()], float(counts.max() / counts.sum())) if counts.any() else None
        like_known = _most_like(likeness[k, :num_known], 0)
        like_novel = _most_like(likeness[k, num_known:], num_known)
        sure, agreed = _over(np.median, sample.confidence[mine]), _over(np.mean, agreement[mine])
        name, count = sample.names[k], int(mine.sum())
        clusters.append(Cluster(k, name, count, sure, agreed, majority, like_known, like_novel))
    votes, confidence = sample.votes[unlabeled], sample.confidence[unlabeled]
    pairs = (votes[:, :, None] == votes[:, None, :]).sum(axis=0) / max(1, len(votes))
    return Findings(
        truth, unlabeled, agreement, pairs, clusters, len(votes), _over(np.mean, agreement[unlabeled]),
        _over(np.median, confidence), _over(np.mean, confidence < 0.5),
        _over(np.mean, output[unlabeled] < num_known), likeness,
    )  # fmt: skip


def _most_like(likeness: NDArray[np.float32], start: int) -> tuple[int, float] | None:
    best = int(likeness.argmax())
    return (start + best, float(likeness[best])) if np.isfinite(likeness[best]) else None


def _over(statistic: Callable[..., Any], values: NDArray[Any]) -> float:
    return float(statistic(values)) if len(values) else math.nan
