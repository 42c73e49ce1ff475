"""RS: rank statistics (Han et al., "Automatically discovering and learning new visual
categories with ranking statistics", ICLR 2020; code AutoNovel).

Two unlabeled images are of one class if the same k features are their largest. That
pseudo-label of every pair trains the novel head by binary cross-entropy; labeled rows
train the known head; both heads must agree with themselves on two views, with a weight
that rises.

Known constants, from the authors' code: k = 5 of ResNet18's 512 features; pairs are
(view 0, view 1), all B_u^2 of the batch; weight of the mean squared difference 5,
rising over 50 of 200 epochs (CIFAR10), 50 over 150 of 200 (CIFAR100), 10 over 50 of 90
(ImageNet). Here the rise takes the same share of the phase, whatever its length, and k
the same share of the features (:func:`num_top`).

What differs:
- Ranks are those of an augmented view, as the authors', but their views are crops and
  flips alone.
- The whole encoder learns, where theirs is frozen but for the last stage:
  ``--weights RUN --model.finetune last_stage`` freezes it. For their self-supervised
  pretraining see ``--pretext.epochs``.
- Both heads are cosines over tau; the known loss has both views, theirs one; the
  learning rate has one schedule (theirs 0.1, divided by 10 after 170 of 200 epochs);
  their batches have 128 rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from uno import collectives
from uno.config import Config, Section, field
from uno.methods import Method
from uno.methods.method import NovelHead, forward_two_views, pair_likelihood_loss
from uno.schedule import sigmoid_rampup
from uno.state import TrainState
from uno.steps import Batch, labeled_loss, update_

TOP, OF = 5, 512  # k of D features whose ranks are compared
CIFAR100 = {"consistency_weight": 50.0, "rampup": 0.75}
IMAGENET = {"consistency_weight": 10.0, "rampup": 50 / 90}
SETTINGS = {"cifar100_20": CIFAR100, "cifar100_50": CIFAR100, "imagenet": IMAGENET}


class Consistency(Section):
    """The rising weight of the views' agreement, which several methods have;
    defaults: CIFAR10's.
    """

    consistency_weight: float = field(
        5.0, "Weight of the squared difference of an image's two views.", ge=0, le=10**4
    )
    rampup: float = field(
        0.25, "Share of the phase in which that weight rises.", ge=0, le=1
    )


class Constants(Consistency):
    """Of RS, and of RS+."""

    top_k: int | None = field(
        None,
        "Largest features that two images of one class share; default: 5 of every 512.",
        ge=1,
    )


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """Cross-entropy + pairwise cross-entropy + rising consistency. Returns the loss
    as (1,).
    """
    return update_(
        state, loss(state, batch.labels, config, *forward_two_views(state, batch)), lr
    )


def loss(
    state: TrainState,
    labels: Tensor,
    config: Config,
    known: Tensor,
    novel: Tensor,
    features: Tensor,
) -> Tensor:
    """Scalar, of known (2, B, C) and novel (2, B, C_u) cosines and features (2, B,
    D).
    """
    ranked = features[0, len(labels) :].detach()
    top = min(config.method_options.top_k or num_top(ranked.shape[1]), ranked.shape[1])
    similar = same_top_features(ranked, collectives.gather_rows(ranked, 0), top)
    return loss_of_pairs(state, labels, config, known, novel, similar)


def loss_of_pairs(
    state: TrainState,
    labels: Tensor,
    config: Config,
    known: Tensor,
    novel: Tensor,
    similar: Tensor,
) -> Tensor:
    """:func:`loss` where (B_u, B_u of all workers) bool says which pairs of unlabeled
    rows are similar; of any method whose constants are :class:`Consistency`.
    """
    tau, unlabeled = config.objective.temperature, slice(len(labels), None)
    first, second = (novel[:, unlabeled] / tau).softmax(dim=-1)
    weight = config.method_options.consistency_weight * ramp(state, config)
    return (
        labeled_loss(known, labels, tau)
        + pair_likelihood_loss(
            first, collectives.gather_rows_with_grad(second, 0), similar
        )
        + weight * (consistency_loss(known, tau) + consistency_loss(novel, tau))
    )


def num_top(num_features: int) -> int:
    """k for D features: the authors' share of them, 5 of 512, and at least one."""
    return max(1, round(TOP * num_features / OF))


def ramp(state: TrainState, config: Config) -> float:
    """Rises to 1 over the first ``rampup`` of the phase."""
    return sigmoid_rampup(state.progress, config.method_options.rampup)


def consistency_loss(logits: Tensor, temperature: float) -> Tensor:
    """Mean squared difference of the softmax outputs of two views: logits (2, B, K)
    -> scalar.
    """
    return F.mse_loss(*(logits / temperature).softmax(dim=-1))


def same_top_features(features: Tensor, others: Tensor, top: int) -> Tensor:
    """Whether the ``top`` largest features of rows (N, D), (M, D) are one set, in
    any order: (N, M) bool.
    """

    # (N, D), one where the feature is among the largest
    def top_set(rows: Tensor) -> Tensor:
        return torch.zeros_like(rows).scatter_(1, rows.topk(top, dim=1).indices, 1)

    return top_set(features) @ top_set(others).T > top - 0.5


METHOD = Method("rs", step, NovelHead, config=Constants, settings=SETTINGS)
