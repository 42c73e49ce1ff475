"""Summarize predictions by discovered class: size, confidence and similar classes."""

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


@dataclass(frozen=True, eq=False)
class Cluster:
    """A discovered class, summarized by the sampled unlabeled training rows in it.

    Attributes:
        output: The index of the class among the model's outputs, known classes first.
        name: The name of the class.
        count: Number of rows.
        confidence: Median probability that the model gives this class on the rows, 0 to
            1; NaN without rows.
        agreement: Mean share of the cluster heads that assign a row to this class, 0 to
            1; NaN without rows.
        majority: The name of the most frequent true class of the rows, and its share of
            the rows that have a true class; None if no row has one.
        like_known: The output of the most similar known class, and the cosine of both
            (:func:`class_similarity`); None if this class has no sampled rows, or no
            known class has any. Here test rows count, and labeled rows by their label.
        like_novel: The same of the most similar other discovered class, which may be
            one that the user dropped.
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
class SampleSummary:
    """A summary of a model's predictions for a sample of M rows.

    Means, medians and shares are over the unlabeled training rows of the sample, and
    NaN if there are none. Only ``agreement`` has a share for each of the M rows.

    Attributes:
        truth: True class (M,) as an index into the known and then the novel classes, or
            -1.
        unlabeled: Mask (M,) of the unlabeled training rows.
        agreement: For each row the share of the cluster heads that assign it to the
            class of the best head, (M,).
        head_agreement: For each of H heads the mean share of the other heads that
            assign a row to the same output as this one; NaN for a single head.
        clusters: The discovered classes that are neither merged nor dropped.
        num_unlabeled: Number of unlabeled training rows.
        mean_agreement: Mean of ``agreement``.
        median_confidence: Median probability of the rows' outputs.
        unsure: Share of the rows whose probability is below one half.
        absorbed: Share of the rows that are assigned to known classes.
    """

    truth: NDArray[np.int64]
    unlabeled: NDArray[np.bool_]
    agreement: NDArray[np.float64]
    head_agreement: list[float]
    clusters: list[Cluster]
    num_unlabeled: int
    mean_agreement: float
    median_confidence: float
    unsure: float
    absorbed: float


def summarize(task: Task, sample: Sample) -> SampleSummary:
    """Summarize a model's predictions for sampled rows, as a whole and by class.

    The summary has the sizes of the discovered classes that the user neither merged nor
    dropped, the confidence of the model, and the agreement of its cluster heads, all
    over the sampled unlabeled training rows; and the most similar classes of each
    discovered class, by :func:`class_similarity` of all sampled rows, where a row has
    its label as class or else its prediction. A statistic of no rows is NaN.

    Args:
        task: The rows of the run, with labels and true classes.
        sample: The sampled rows, with the predictions of all heads.
    """
    rows, output, num_known = sample.index, sample.output, task.num_known
    unlabeled = task.is_train[rows] & (task.labels[rows] < 0)
    truth = task.eval_labels[rows]
    agreement = (sample.votes == output[:, None]).mean(axis=1)
    similarity = class_similarity(
        torch.from_numpy(sample.features),
        torch.from_numpy(sample.classes_of_rows(task)),
        len(sample.classes),
    ).numpy()
    clusters = []
    for k in sample.kept:
        if k < num_known:
            continue
        members = unlabeled & (output == k)
        clusters.append(
            Cluster(
                output=k,
                name=sample.names[k],
                count=int(members.sum()),
                confidence=_statistic(np.median, sample.confidence[members]),
                agreement=_statistic(np.mean, agreement[members]),
                majority=_majority(truth[members], [*task.known, *task.novel]),
                like_known=nearest(similarity[k, :num_known]),
                like_novel=nearest(similarity[k, num_known:], num_known),
            )
        )
    votes, confidence = sample.votes[unlabeled], sample.confidence[unlabeled]
    return SampleSummary(
        truth=truth,
        unlabeled=unlabeled,
        agreement=agreement,
        head_agreement=[
            _statistic(np.mean, np.delete(votes, head, 1) == votes[:, head, None])
            for head in range(sample.num_heads)
        ],
        clusters=clusters,
        num_unlabeled=len(votes),
        mean_agreement=_statistic(np.mean, agreement[unlabeled]),
        median_confidence=_statistic(np.median, confidence),
        unsure=_statistic(np.mean, confidence < 0.5),
        absorbed=_statistic(np.mean, output[unlabeled] < num_known),
    )


def _majority(truth: NDArray[np.int64], names: list[str]) -> tuple[str, float] | None:
    """Return the most frequent true class of some rows, and its share.

    Of several classes that are as frequent, it is the one with the lowest index.

    Args:
        truth: True classes of the rows, int64 (n,), as indices into ``names``; -1 for
            rows without a true class.
        names: Names of the classes.

    Returns:
        The name, and its share of the rows that have a true class, 0 to 1; None if no
        row has one.
    """
    counts = np.bincount(truth[truth >= 0], minlength=1)
    if not counts.any():
        return None
    return names[counts.argmax()], float(counts.max() / counts.sum())


def _statistic(statistic: Callable[..., Any], values: NDArray[Any]) -> float:
    """Return a statistic of values, or NaN if there are no values.

    Args:
        statistic: A function of an array, such as ``np.mean``.
        values: The values.
    """
    return float(statistic(values)) if values.size else math.nan


def class_similarity(features: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Measure how similar classes are, by the cosine of their centered means.

    Args:
        features: Features (N, D).
        classes: Class int64 (N,) of each row, 0 to C - 1.
        num_classes: Number of classes C.

    Returns:
        Cosines (C, C) of the class means. Features and class means are scaled to length
        one, and then the mean of the means of all classes with rows is subtracted,
        before the cosines are taken. 1 means the same direction from the common mean,
        -1 the opposite one. Of different classes they are about -1 / (C - 1) on
        average, so a pair above 0 is more similar than usual. The diagonal, and the
        rows and columns of classes without rows, are minus infinity.
    """
    member = F.one_hot(classes, num_classes).float()  # (N, C)
    has_rows = member.any(dim=0)
    means = F.normalize(member.T @ F.normalize(features.float(), dim=-1), dim=-1)
    centered = F.normalize(means - means[has_rows].mean(dim=0), dim=-1)
    cosines = (centered @ centered.T).fill_diagonal_(-torch.inf)
    return cosines.where(has_rows[:, None] & has_rows, -torch.inf)


def nearest(
    similarity: NDArray[np.float32], first_output: int = 0
) -> tuple[int, float] | None:
    """Return which of some classes is the most similar one to a given class.

    Args:
        similarity: The similarity of the given class to each of some consecutive
            classes; minus infinity for a class to leave out.
        first_output: The index of the first of these classes among the model's outputs.

    Returns:
        The index of the most similar class among the model's outputs, and its
        similarity; None if there is no class, or all are left out.
    """
    if not np.isfinite(similarity).any():
        return None
    best = int(similarity.argmax())
    return first_output + best, float(similarity[best])
