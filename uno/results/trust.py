"""Can a run be believed where nobody has named a new class? Three signs that need no such label.

Known classes: the share right, among all outputs, of labeled rows that training did not see. k-means: the
share of unlabeled rows on which the best head and k-means of the same features agree. Neighbours: how many of
an unlabeled row's nearest in features are in its class, 0 as by chance. A run that fails may have either of
them, and heads that agree: the score is the first times the smaller of the others, which over the runs of
benchmarks/records/2026-11-22_trust ranks as the true accuracy does, and is about as large.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.config import Config
from uno.data.images import evenly_spaced
from uno.data.stream import TrainData
from uno.model import UnoModel
from uno.prototype_init import Sample, clusters_of
from uno.results import metrics

MAX_ROWS = 4_000  # unlabeled ones that are looked at
NEIGHBOURS = 10
BELIEVED, DOUBTED = 0.75, 0.5  # scores from which on a run is trustworthy, doubtful
MIN_HELD_OUT = 20  # rows; of fewer the share right says little
HELD_OUT, HELD_OUT_ROWS = "trust/held_out/acc", "trust/held_out/rows"
KMEANS, NEAR, SCORE = "trust/kmeans/agreement", "trust/neighbours/agreement", "trust/score"
TRAINING = "train/known/task_agnostic_strict/acc/best"

Word = Literal["trustworthy", "doubtful", "not trustworthy"]


class Verdict(NamedTuple):
    """Whether to believe a run, and why: two lines, of which the first is about held-out rows."""

    word: Word
    reasons: tuple[str, str]

    def __str__(self) -> str:
        return f"{self.word}: {self.reasons[0]}\n{self.reasons[1]}"


def verdict(values: Mapping[str, float]) -> Verdict | None:
    """What the metrics of a run say; None where they hold no signs, as with too few unlabeled rows."""
    if KMEANS not in values:
        return None
    word, first = _on_known(values)
    kmeans, near = (f"{100 * values[key]:.0f} %" for key in (KMEANS, NEAR))
    if word == "trustworthy":
        advice = "supposing the right number of new classes"
    elif values.get(HELD_OUT, 1.0) < min(values[KMEANS], values[NEAR]):
        advice = "not even the known classes are told apart: pretrained weights or more pixels may help"
    else:
        advice = "the features hold no such classes: another number of classes or longer training may help"
    return Verdict(word, (first, f"k-means agrees on {kmeans} of the pile, {near} of neighbours; {advice}"))


def _on_known(values: Mapping[str, float]) -> tuple[Word, str]:
    """The verdict, and what is right of labeled rows."""
    signs = min(values[KMEANS], values[NEAR])
    if HELD_OUT not in values:
        text = "no labeled image was held out: nothing says what is right of unseen ones"
        text += f" (training rows: {100 * values[TRAINING]:.1f} %)" if TRAINING in values else ""
        return "not trustworthy" if signs < DOUBTED else "doubtful", text
    rows, score = round(values[HELD_OUT_ROWS]), values[SCORE]
    text = f"{100 * values[HELD_OUT]:.1f} % of {rows:,} held-out labeled images are right"
    if score < DOUBTED:
        return "not trustworthy", text
    if rows < MIN_HELD_OUT:
        return "doubtful", f"{text}, but so few say little"
    return "trustworthy" if score >= BELIEVED else "doubtful", text


@torch.no_grad()
def trust_metrics(
    config: Config, model: UnoModel, best_head: int, sample: Sample, train: TrainData,
    values: Mapping[str, float], num_held_out: int,
) -> dict[str, float]:  # fmt: skip
    """The signs and the score of a trained ``model``, in eval mode, by features of a ``sample``, fractions
    0-1 but for a number of rows: `trust/{kmeans|neighbours}/agreement`, and where ``num_held_out`` labeled
    rows were not seen in training `trust/held_out/{acc|rows}` and `trust/score`; {} with fewer unlabeled rows
    than outputs. ``values``: the run's metrics so far.
    """
    labeled, labels, unlabeled = sample
    unlabeled = unlabeled[torch.from_numpy(evenly_spaced(MAX_ROWS, len(unlabeled)))]
    if len(unlabeled) < train.num_novel + (train.num_known if config.data.setting == "gcd" else 0):
        return {}
    outputs = _outputs(model, unlabeled, best_head)
    clusters = clusters_of(
        unlabeled, labeled, labels, train.num_novel, config.data.setting, config.seed
    ).assignment
    num = train.num_known + train.num_novel
    counts = metrics.confusion(outputs.numpy(), clusters.numpy(), num, num)
    found = {KMEANS: metrics.cluster_accuracy(counts), NEAR: neighbour_agreement(unlabeled, outputs)}
    right = values.get("test/known/task_agnostic_strict/acc/best")
    if right is not None:
        score = right * min(found.values())
        found |= {HELD_OUT: right, HELD_OUT_ROWS: float(num_held_out), SCORE: score}
    return found


def neighbour_agreement(features: Tensor, outputs: Tensor) -> float:
    """Share of the 10 nearest rows, by the angle around the mean, that have a row's output, 0-1: 0 is what
    they would have by chance, or less. ``features`` (N, D), N >= 2, ``outputs`` (N,) int64.
    """
    directions = F.normalize(features.float(), dim=1)
    directions = F.normalize(directions - directions.mean(dim=0), dim=1)
    similarity = (directions @ directions.T).fill_diagonal_(-torch.inf)
    nearest = similarity.topk(min(NEIGHBOURS, len(features) - 1), dim=1).indices
    same = float((outputs[nearest] == outputs[:, None]).float().mean())
    chance = float((outputs.bincount().float() / len(outputs)).square().sum())
    return max(0.0, (same - chance) / (1 - chance)) if chance < 1 else 0.0


def _outputs(model: UnoModel, features: Tensor, head: int) -> Tensor:
    """(N, D) -> the output (N,) int64 of each row, known ones first, on the CPU."""
    logits = model.heads(features.to(model.known.weight.device))
    assert logits.novel is not None
    return torch.cat([logits.known[0], logits.novel[0, head]], dim=1).argmax(dim=1).cpu()
