"""RS: rank statistics (Han et al., "Automatically discovering and learning new visual categories with ranking
statistics", ICLR 2020; code AutoNovel).

Two unlabeled images are of one class if the same k features are their largest. That pseudo-label of every
pair trains the novel head by binary cross-entropy; labeled rows train the known head; both heads must agree
with themselves on two views, with a weight that rises.

Known constants, from the authors' code: k = 5; pairs are (view 0, view 1), all B_u^2 of the batch; weight of
the mean squared difference 5, rising over 50 of 200 epochs (CIFAR10), 50 over 150 of 200 (CIFAR100), 10 over
50 of 90 (ImageNet). Here the rise takes the same share of the phase, whatever its length. Not carried over:
steps of the learning rate (0.1, divided by 10 after 170 of 200 epochs), batches of 128, and the frozen first
three stages of the encoder. The authors' known-class loss uses one view, ours both. For their self-supervised
pretraining see ``--rotation.epochs``.
"""

import torch
from torch import Tensor

from uno import collectives
from uno.config import ObjectiveConfig
from uno.methods.method import (
    Method,
    NovelHead,
    consistency_loss,
    forward_two_views,
    novel_probabilities,
    pair_likelihood_loss,
    weight_or,
)
from uno.objective import labeled_loss
from uno.schedule import sigmoid_rampup
from uno.state import TrainState
from uno.steps import Batch, update_

TOP = 5  # k, features whose ranks are compared
CONSISTENCY = 5.0
RAMPUP = 0.25  # 50 of 200 epochs
SETTINGS = {
    preset: {"objective.consistency_weight": weight, "objective.rampup": share}
    for preset, weight, share in (
        ("cifar100_20", 50.0, 0.75), ("cifar100_50", 50.0, 0.75), ("imagenet", 10.0, 50 / 90),
    )
}  # fmt: skip


def step(state: TrainState, batch: Batch, objective: ObjectiveConfig, lr: float) -> Tensor:
    """Cross-entropy + pairwise cross-entropy + rising consistency. Returns the loss as (1,)."""
    num_labeled, tau = len(batch.labels), objective.temperature
    logits = forward_two_views(state, batch)
    assert logits.novel is not None and logits.features is not None
    first, second = novel_probabilities(logits, num_labeled, tau)
    features = logits.features[0, num_labeled:].detach()
    similar = same_top_features(features, collectives.gather_rows(features, 0), TOP)
    consistency = consistency_loss(logits.known, tau) + consistency_loss(logits.novel[:, 0], tau)
    loss = (
        labeled_loss(logits.known, batch.labels, tau)
        + pair_likelihood_loss(first, collectives.gather_rows_with_grad(second, 0), similar)
        + consistency_weight(state, objective) * consistency
    )
    return update_(state, loss, lr)


def consistency_weight(state: TrainState, objective: ObjectiveConfig) -> float:
    """Of this step."""
    return weight_or(objective.consistency_weight, CONSISTENCY) * ramp(state, objective)


def ramp(state: TrainState, objective: ObjectiveConfig) -> float:
    """Rises to 1 over the first ``objective.rampup`` of the phase."""
    return sigmoid_rampup(state.progress, weight_or(objective.rampup, RAMPUP))


def same_top_features(features: Tensor, others: Tensor, top: int) -> Tensor:
    """Whether the ``top`` largest features of two rows are the same set, in any order.

    Args:
        features: (N, D).
        others: (M, D).
        top: k, at most D.

    Returns:
        (N, M) bool.
    """

    def top_set(rows: Tensor) -> Tensor:  # (N, D), one where the feature is among the largest
        return torch.zeros_like(rows).scatter_(1, rows.topk(top, dim=1).indices, 1)

    return top_set(features) @ top_set(others).T > top - 0.5


METHOD = Method(step, NovelHead, settings=SETTINGS)
