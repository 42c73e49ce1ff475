"""Evaluation (Sec. 4.1): count on every worker, add up, match once.

rows -> `evaluate` -> `Confusions` -> sum over workers -> `protocol_metrics` -> `format_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from uno.results import metrics

PROTOCOLS = ("task_aware", "task_agnostic_official", "task_agnostic_joint", "task_agnostic_strict")


class EvalRows(Protocol):
    """Rows to evaluate, such as :class:`uno.data.resident.EvalSet`."""

    @property
    def images(self) -> Tensor:
        """(N, 3, S, S) uint8, any device."""

    @property
    def truth(self) -> Tensor:
        """(N,) int64 in [0, C_l + C_u), known classes first, or -1: no truth, the row is not counted."""


class ViewLogits(Protocol):
    """What `uno.model.Logits` and `evaluate` agree on; the first view is evaluated."""

    @property
    def known(self) -> Tensor:
        """(V, B, C_l)."""

    @property
    def novel(self) -> Tensor | None:
        """(V, H, B, K), or None without cluster heads (pretraining)."""


# --------------------------------------------------------------------------------------------------- counting
@dataclass
class Confusions:
    """Int64 counts (rows: true class, columns: output) for every protocol; additive over batches and workers.

    `known` (C_l, C_l): known rows over the known outputs. `novel` (H, C_u, K): novel rows over the head's own
    outputs. `joint` (H, C_l + C_u, C_l + K): all rows over both, known first.
    """

    known: Tensor
    novel: Tensor
    joint: Tensor

    @classmethod
    def new(
        cls,
        num_heads: int,
        num_known: int,
        num_true_novel: int,
        num_clusters: int,
        device: torch.device | str = "cpu",
    ) -> Confusions:
        """Zero counts for H heads, C_l known classes, C_u true novel classes and K clusters of a head.

        `num_true_novel` is 0 where nobody knows the novel classes; `num_heads` is 0 where the model has none.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            known=zeros(num_known, num_known),
            novel=zeros(num_heads, num_true_novel, num_clusters),
            joint=zeros(num_heads, num_known + num_true_novel, num_known + num_clusters),
        )

    def update(self, logits_known: Tensor, logits_novel: Tensor | None, truth: Tensor) -> None:
        """Count a batch in place, on the device of the counts, without waiting for it.

        Args:
            logits_known: (B, C_l).
            logits_novel: (H, B, K), on the scale of `logits_known`; None without heads (H = 0).
            truth: (B,) int64 in [0, C_l + C_u), or -1: not counted. More is an index error of the device.

        Raises:
            ValueError: a shape differs from the one announced in `new`.
        """
        num_heads, _, num_clusters = self.novel.shape
        num_known = len(self.known)
        if logits_known.shape != (len(truth), num_known):
            raise ValueError(f"known logits {tuple(logits_known.shape)}, expected {(len(truth), num_known)}")
        known_best, known_output = logits_known.max(dim=-1)  # (B,)
        is_known, is_novel = (truth >= 0) & (truth < num_known), truth >= num_known
        _count_(self.known[None], truth, known_output[None], is_known)

        expected = (num_heads, len(truth), num_clusters) if num_heads else None
        if expected != (None if logits_novel is None else logits_novel.shape):
            found = None if logits_novel is None else tuple(logits_novel.shape)
            raise ValueError(f"novel logits {found}, expected {expected}")
        if logits_novel is None:
            return
        novel_best, novel_output = logits_novel.max(dim=-1)  # (H, B)
        _count_(self.novel, truth - num_known, novel_output, is_novel)
        # argmax over [known, novel] without building it; a tie goes to the known output
        output = torch.where(novel_best > known_best, num_known + novel_output, known_output)
        _count_(self.joint, truth, output, is_known | is_novel)

    def merge(self, other: Confusions) -> Confusions:
        """The counts of both, for disjoint sets of rows of the same shapes on the same device."""
        return Confusions(self.known + other.known, self.novel + other.novel, self.joint + other.joint)

    def all_reduce(self, sum_over_workers: Callable[[Tensor], Tensor]) -> Confusions:
        """The counts of all workers; self stays, though `sum_over_workers` may work in place."""
        parts = (self.known, self.novel, self.joint)
        return Confusions(*(sum_over_workers(counts.clone()) for counts in parts))


def _count_(counts: Tensor, truth: Tensor, output: Tensor, counted: Tensor) -> None:
    """Add rows to (H, R, P) counts in place: truth (B,), output (H, B), counted (B,) bool.

    Rows that are not counted add zero to class 0 instead of being selected away: a selection would have to
    wait for the device to learn its size, as would bincount.
    """
    num_heads, num_classes, num_outputs = counts.shape
    if num_classes == 0:
        return
    cells = torch.where(counted, truth, 0) * num_outputs + output  # (H, B)
    ones = counted.to(counts.dtype).expand(num_heads, -1)
    counts.view(num_heads, -1).scatter_add_(1, cells, ones)


def evaluate(
    predict_logits: Callable[[Tensor], ViewLogits],
    eval_set: EvalRows,
    batch_size: int,
    confusions: Confusions,
    rank: int = 0,
    world_size: int = 1,
) -> Confusions:
    """Count this worker's rows `rank::world_size`, each exactly once, into `confusions`, and return it.

    No row is repeated to make shares or batches equal, so workers may run a different number of batches:
    `predict_logits` must not communicate. Give it the bare model in eval mode, not its DDP wrapper.

    Args:
        predict_logits: (b, 3, S, S) uint8 images on the device of `confusions`, 0 < b <= batch_size ->
            logits, `known` (V, b, C_l) and `novel` (V, H, b, K) or None; view 0 counts. Applies the
            evaluation transform.
        eval_set: (N, 3, S, S) uint8 images and (N,) truth, the same on every worker.
        batch_size: rows of a batch of this worker.
        confusions: counts to add to; sum them over workers afterwards (`Confusions.all_reduce`).
        rank: of this worker.
        world_size: number of workers.

    Raises:
        ValueError: images and truth differ in length, or the logits do not fit `confusions`.
    """
    if len(eval_set.images) != len(eval_set.truth):
        raise ValueError(f"{len(eval_set.images)} images but {len(eval_set.truth)} truth values")
    batches = slices(eval_set.images, eval_set.truth, batch_size, rank, world_size)
    return count(predict_logits, batches, confusions)


@torch.inference_mode()
def count(
    predict_logits: Callable[[Tensor], ViewLogits],
    batches: Iterable[tuple[Tensor, Tensor]],
    confusions: Confusions,
) -> Confusions:
    """:func:`evaluate` of batches that come one after another: images (b, 3, S, S) uint8 and truth (b,)."""
    device = confusions.known.device
    for images, truth in batches:
        logits = predict_logits(images.to(device, non_blocking=True))
        novel = None if logits.novel is None else logits.novel[0]
        confusions.update(logits.known[0], novel, truth.to(device, non_blocking=True))
    return confusions


def slices(
    images: Tensor, truth: Tensor, batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """A worker's rows ``rank::world_size`` in batches."""
    images, truth = images[rank::world_size], truth[rank::world_size]
    for start in range(0, len(truth), batch_size):
        yield images[start : start + batch_size], truth[start : start + batch_size]


# -------------------------------------------------------------------------------------------------- protocols
def protocol_metrics(confusions: Confusions, best_head: int, split: str) -> dict[str, float]:
    """Every metric of one split as flat paths, fractions 0-1 (ARI may be negative).

    Keys: `{split}/{known|novel|all}/{protocol}/{acc|nmi|ari|purity}/{avg|best}` with the protocols of
    `PROTOCOLS`, and `{split}/novel/task_aware/chance/acc`, the clustering accuracy of random predictions.
    Known and all rows have `acc` only. A key is absent where no row has truth; without heads only
    `known/task_aware` remains.

    Args:
        confusions: counts of ALL rows of the split, that is summed over workers.
        best_head: index of the head with the lowest TRAINING cluster loss, never chosen by accuracy.
        split: `train` or `test`.

    Raises:
        ValueError: `best_head` is not a head.
    """
    parts = (confusions.known, confusions.novel, confusions.joint)
    known, novel, joint = (counts.cpu().numpy() for counts in parts)
    num_known, num_heads = len(known), len(novel)
    if not 0 <= best_head < max(num_heads, 1):
        raise ValueError(f"best_head {best_head} of {num_heads} heads")
    if num_heads == 0:
        return _avg_and_best([metrics.task_aware(known, np.zeros((0, 0), np.int64))], 0, split, "task_aware")
    agnostic = (metrics.task_agnostic_official, metrics.task_agnostic_joint, metrics.task_agnostic_strict)
    aware = [metrics.task_aware(known, head) for head in novel]
    result = _avg_and_best(aware, best_head, split, "task_aware")
    for name, protocol in zip(PROTOCOLS[1:], agnostic, strict=True):
        result |= _avg_and_best([protocol(head, num_known) for head in joint], best_head, split, name)
    class_counts = novel[0].sum(axis=1)
    if class_counts.sum():
        chance = metrics.chance_accuracy(class_counts, novel.shape[2])
        result[f"{split}/novel/task_aware/chance/acc"] = chance
    return result


def _avg_and_best(
    per_head: list[dict[str, float]], best_head: int, split: str, protocol: str
) -> dict[str, float]:
    result = {}
    for key, best in per_head[best_head].items():
        rows, metric = key.split("/")
        path = f"{split}/{rows}/{protocol}/{metric}"
        result[f"{path}/avg"] = float(np.mean([head[key] for head in per_head]))
        result[f"{path}/best"] = best
    return result


# ------------------------------------------------------------------------------------------------------ table
_BASELINES = {
    "baseline/kmeans/novel/acc": "k-means on frozen features",
    "baseline/kmeans_pixels/novel/acc": "k-means on pixels",
}
_LEGEND = """\
avg / best: mean over heads / the head with the lowest training cluster loss
official: novel rows matched to any output    joint: one matching of all rows
strict: novel rows matched to novel outputs only, predicted known = error"""


def format_table(values: Mapping[str, float]) -> str:
    """The console table of accuracies, percent with one decimal, at most 80 columns; absent values are blank.

    Args:
        values: flat metric paths, fractions 0-1, as `protocol_metrics` returns them for `train` and `test`;
            chance levels and k-means baselines (`baseline/kmeans/novel/acc`) get a line where present.
    """
    splits = [split for split in ("train", "test") if any(key.startswith(f"{split}/") for key in values)]
    groups = ("known", "novel", "all")

    def cell(key: str) -> str:
        return f"{100 * values[key]:7.1f}" if key in values else " " * 7

    def line(name: str, cells: list[str]) -> str:
        return f"{name:<32}" + "".join(f" |{cell}" for cell in cells)

    lines = [
        line("", [f"{split:^21}" for split in splits]),
        line("accuracy, %", ["".join(f"{group:>7}" for group in groups)] * len(splits)),
    ]
    lines.append("-" * len(lines[-1]))
    for protocol in PROTOCOLS:
        for which in ("avg", "best"):
            keys = [[f"{split}/{group}/{protocol}/acc/{which}" for group in groups] for split in splits]
            if any(key in values for row in keys for key in row):
                lines.append(line(f"{protocol:<24}{which}", ["".join(map(cell, row)) for row in keys]))
    chance = [f"{split}/novel/task_aware/chance/acc" for split in splits]
    if any(key in values for key in chance):
        lines.append(line("chance (random predictions)", [f"{'':7}{cell(key)}{'':7}" for key in chance]))
    lines += [f"{name:<32}  {'':7}{cell(key)}  novel" for key, name in _BASELINES.items() if key in values]
    return "\n".join(text.rstrip() for text in [*lines, *_LEGEND.splitlines()])
