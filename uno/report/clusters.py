"""What the discovered classes are like: sizes, confidence, agreement of heads, true classes, look-alikes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from uno.data.splits import Task
from uno.report.predictions import Predictions
from uno.results.metrics import confusion, hungarian


@dataclass(frozen=True, eq=False)
class Cluster:
    """One output of the best head and the rows it takes.

    Counts, confidence and agreement are over the unlabeled training rows. ``majority`` is (true class, share)
    where rows have truth; ``closest_known`` the known class with the highest mean cosine; ``twin`` (output,
    cosine) the discovered class with the most similar prototype.
    """

    output: int
    name: str
    count: int
    share: float
    confidence: float | None
    agreement: float | None
    majority: tuple[str, float] | None
    closest_known: str | None
    twin: tuple[int, float] | None


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything the page says about predictions.

    ``output``, ``confidence`` (M,): of the best head, over known and novel outputs. ``agreement`` (M,): share
    of the other heads that put a row with the same class, None with one head. ``pairs`` (H,H): share of
    unlabeled rows two heads agree on. ``truth`` (M,): index into known + true novel names, -1 unknown.
    ``unlabeled``, ``test`` (M,) bool.
    """

    output: NDArray[np.int64]
    confidence: NDArray[np.float32]
    agreement: NDArray[np.float64] | None
    pairs: NDArray[np.float64]
    truth: NDArray[np.int64]
    unlabeled: NDArray[np.bool_]
    test: NDArray[np.bool_]
    clusters: list[Cluster]

    @property
    def absorbed(self) -> float:
        """Share of the unlabeled training rows that the model takes for known classes; 0 without rows."""
        num_known = self.clusters[0].output if self.clusters else 0
        mine = self.output[self.unlabeled]
        return float((mine < num_known).mean()) if len(mine) else 0.0


def find(task: Task, predictions: Predictions, names: Sequence[str]) -> Findings:
    """Summarise ``predictions``; ``names`` are those of all outputs, known first."""
    num_known, best = predictions.num_known, predictions.best_head
    output, confidence = predictions.outputs(best), predictions.confidence()
    rows = predictions.index
    unlabeled = task.is_train[rows] & (task.labels[rows] < 0)
    truth = task.eval_labels[rows]
    aligned = _aligned(predictions, unlabeled)
    pairs = _pairwise(aligned[unlabeled])
    others = [head for head in range(predictions.num_heads) if head != best]
    agreement = (aligned[:, others] == aligned[:, [best]]).mean(axis=1) if others else None
    num_novel = predictions.novel.shape[2]
    true_names = [*task.known, *task.novel]
    clusters = []
    for k in range(num_novel):
        mine = np.flatnonzero(unlabeled & (output == num_known + k))
        clusters.append(
            Cluster(
                num_known + k,
                names[num_known + k],
                len(mine),
                len(mine) / max(1, int(unlabeled.sum())),
                float(np.median(confidence[mine])) if len(mine) else None,
                float(agreement[mine].mean()) if agreement is not None and len(mine) else None,
                _majority(truth[mine], true_names),
                names[int(predictions.known[mine].mean(axis=0).argmax())] if len(mine) else None,
                _twin(predictions.similarity, k, num_known),
            )
        )
    return Findings(output, confidence, agreement, pairs, truth, unlabeled, ~task.is_train[rows], clusters)


def _aligned(predictions: Predictions, unlabeled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(M,H) outputs of every head in the best head's numbering: clusters matched on the unlabeled rows."""
    num_known, num_novel = predictions.num_known, predictions.novel.shape[2]
    reference = predictions.outputs(predictions.best_head)
    columns = []
    for head in range(predictions.num_heads):
        own = predictions.outputs(head)
        both = unlabeled & (reference >= num_known) & (own >= num_known)
        counts = confusion(own[both] - num_known, reference[both] - num_known, num_novel, num_novel)
        renumbered = np.concatenate([np.arange(num_known), num_known + hungarian(counts)])
        columns.append(own if head == predictions.best_head else renumbered[own])
    return np.stack(columns, axis=1)


def _pairwise(aligned: NDArray[np.int64]) -> NDArray[np.float64]:
    if not len(aligned):
        return np.full((aligned.shape[1],) * 2, np.nan)
    return (aligned[:, :, None] == aligned[:, None, :]).mean(axis=0)


def _majority(truth: NDArray[np.int64], names: Sequence[str]) -> tuple[str, float] | None:
    known = truth[truth >= 0]
    if not len(known):
        return None
    counts = np.bincount(known)
    return names[int(counts.argmax())], float(counts.max() / len(known))


def _twin(similarity: NDArray[np.float32], k: int, num_known: int) -> tuple[int, float] | None:
    if len(similarity) < 2:
        return None
    row = similarity[k].copy()
    row[k] = -np.inf
    return num_known + int(row.argmax()), float(row.max())
