"""RS: rank statistics (Han et al., "Automatically discovering and learning new visual categories with ranking
statistics", ICLR 2020; code AutoNovel).

Two unlabeled images are of one class if the same k features are their largest. That pseudo-label of every
pair trains the novel head by binary cross-entropy; labeled rows train the known head; both heads must agree
with themselves on two views, with a weight that rises.

Known constants, from the authors' code: k = 5 of ResNet18's 512 features; pairs are (view 0, view 1), all
B_u^2 of the batch; weight of the mean squared difference 5, rising over 50 of 200 epochs (CIFAR10), 50 over
150 of 200 (CIFAR100), 10 over 50 of 90 (ImageNet). Here the rise takes the same share of the phase, whatever
its length, and k the same share of the features (:func:`num_top`; ``objective.top_features`` sets it).

What differs, and what it costs in points of novel accuracy on the digits (D = 64):
- k: two rows share their 5 largest of 64 features almost never. k = 5 52.1 (3 seeds), k = 1 67.2 (5 seeds).
  k = 1 also ranks pairs of held-out known digits best, in 3 splits of 3.
- Ranks are those of an augmented view, as theirs, but their views are crops and flips alone. Ranks of clean
  images: 70.7 for 67.2.
- The whole encoder learns, where theirs is frozen but for the last stage: frozen 51.2 for 52.1, with k = 5.
  ``--weights RUN --model.trainable last`` freezes it.
- Not measured: both heads are cosines over tau; the known loss has both views, theirs one; the learning
  rate's one schedule (theirs 0.1, divided by 10 after 170 of 200 epochs); batches of 128 there. For their
  self-supervised pretraining see ``--rotation.epochs``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from uno import collectives
from uno.config import ObjectiveConfig
from uno.methods.method import Method, NovelHead, forward_two_views, pair_likelihood_loss, weight_or
from uno.objective import labeled_loss
from uno.schedule import sigmoid_rampup
from uno.state import TrainState
from uno.steps import Batch, update_

TOP, OF = 5, 512  # k of D features whose ranks are compared
CONSISTENCY = 5.0
RAMPUP = 0.25  # 50 of 200 epochs
CIFAR100 = {"objective.consistency_weight": 50.0, "objective.rampup": 0.75}
IMAGENET = {"objective.consistency_weight": 10.0, "objective.rampup": 50 / 90}
SETTINGS = {"cifar100_20": CIFAR100, "cifar100_50": CIFAR100, "imagenet": IMAGENET}


def step(state: TrainState, batch: Batch, objective: ObjectiveConfig, lr: float) -> Tensor:
    """Cross-entropy + pairwise cross-entropy + rising consistency. Returns the loss as (1,)."""
    return update_(state, loss(state, batch.labels, objective, *forward_two_views(state, batch)), lr)


def loss(
    state: TrainState, labels: Tensor, objective: ObjectiveConfig, known: Tensor, novel: Tensor,
    features: Tensor,
) -> Tensor:  # fmt: skip
    """Scalar, of known (2, B, C) and novel (2, B, C_u) cosines and features (2, B, D)."""
    ranked = features[0, len(labels) :].detach()
    top = min(objective.top_features or num_top(ranked.shape[1]), ranked.shape[1])
    similar = same_top_features(ranked, collectives.gather_rows(ranked, 0), top)
    return loss_of_pairs(state, labels, objective, known, novel, similar)


def loss_of_pairs(
    state: TrainState, labels: Tensor, objective: ObjectiveConfig, known: Tensor, novel: Tensor,
    similar: Tensor,
) -> Tensor:  # fmt: skip
    """:func:`loss` where (B_u, B_u of all workers) bool says which pairs of unlabeled rows are similar."""
    tau, unlabeled = objective.temperature, slice(len(labels), None)
    first, second = (novel[:, unlabeled] / tau).softmax(dim=-1)
    weight = weight_or(objective.consistency_weight, CONSISTENCY) * ramp(state, objective)
    return (
        labeled_loss(known, labels, tau)
        + pair_likelihood_loss(first, collectives.gather_rows_with_grad(second, 0), similar)
        + weight * (consistency_loss(known, tau) + consistency_loss(novel, tau))
    )


def num_top(num_features: int) -> int:
    """k for D features: the authors' share of them, 5 of 512, and at least one."""
    return max(1, round(TOP * num_features / OF))


def ramp(state: TrainState, objective: ObjectiveConfig) -> float:
    """Rises to 1 over the first ``objective.rampup`` of the phase."""
    return sigmoid_rampup(state.progress, weight_or(objective.rampup, RAMPUP))


def consistency_loss(logits: Tensor, temperature: float) -> Tensor:
    """Mean squared difference of the softmax outputs of two views: logits (2, B, K) -> scalar."""
    return F.mse_loss(*(logits / temperature).softmax(dim=-1))


def same_top_features(features: Tensor, others: Tensor, top: int) -> Tensor:
    """Whether the ``top`` largest features of rows (N, D), (M, D) are one set, in any order: (N, M) bool."""

    def top_set(rows: Tensor) -> Tensor:  # (N, D), one where the feature is among the largest
        return torch.zeros_like(rows).scatter_(1, rows.topk(top, dim=1).indices, 1)

    return top_set(features) @ top_set(others).T > top - 0.5


METHOD = Method(step, NovelHead, settings=SETTINGS)
