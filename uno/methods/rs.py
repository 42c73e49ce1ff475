"""The discovery method RS: rank statistics (Han et al., ICLR 2020; code AutoNovel).

The paper is "Automatically discovering and learning new visual categories with ranking
statistics". Two unlabeled images are of one class if the same k features are their
largest. This pseudo-label of every pair trains the novel head by binary cross-entropy.
Labeled rows train the known head. Both heads must give equal outputs for two views,
with a weight that rises.

Known constants, from the authors' code: k is 5 of the 512 features of ResNet18; pairs
are (view 0, view 1), all B_u^2 of the batch; the weight of the mean squared difference
is 5, rising over 50 of 200 epochs (CIFAR10), 50 over 150 of 200 (CIFAR100), 10 over 50
of 90 (ImageNet). Here the rise takes the same share of the phase, whatever its length,
and k is the same share of the features (:func:`num_top`).

What differs:
- Ranks are those of an augmented view, as in the authors' code, but their views are
  crops and flips alone.
- The whole encoder learns. Theirs is frozen except for the last stage, as here with
  ``--weights RUN`` and ``--model.finetune last_stage``. For their self-supervised
  pretraining see ``--pretext.epochs``.
- Both heads are cosines over tau. The known loss has both views, theirs has one. The
  learning rate has one schedule (theirs is 0.1, divided by 10 after 170 of 200 epochs).
  Their batches have 128 rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from uno import distributed
from uno.config import Config, Section, field
from uno.heads import NovelHead
from uno.method import Method
from uno.methods.common import (
    forward_two_views,
    pair_likelihood_loss,
    sigmoid_rampup,
)
from uno.steps import Batch, TrainState, labeled_loss

TOP, OF = 5, 512  # the 5 largest of 512 features are compared
CIFAR100 = {"consistency_weight": 50.0, "rampup": 0.75}
IMAGENET = {"consistency_weight": 10.0, "rampup": 50 / 90}
SETTINGS = {"cifar100_20": CIFAR100, "cifar100_50": CIFAR100, "imagenet": IMAGENET}


class Consistency(Section):
    """Constants of the consistency of two views, whose weight rises.

    Several methods have them. The defaults are those of CIFAR10.
    """

    consistency_weight: float = field(
        5.0, "Weight of the squared difference of an image's two views.", ge=0, le=10**4
    )
    rampup: float = field(
        0.25, "Share of the phase in which that weight rises.", ge=0, le=1
    )


class Constants(Consistency):
    """Constants of RS, and of RS+."""

    top_k: int | None = field(
        None,
        "Largest features that two images of one class share; default: 5 of every 512.",
        ge=1,
    )


class CosineConstants(Consistency):
    """Constants of methods in which a cosine of features decides about pairs."""

    threshold: float = field(
        0.95, "Cosine above which two images count as of one class.", ge=-1, le=1
    )


class ContrastMethod(Method):
    """A method that learns from pairs as RS does, and contrasts features.

    A frozen encoder has nothing that contrast could train, so the novel head then has a
    linear layer that takes the place of the encoder's last stage.
    """

    def build_head(
        self, num_novel: int, num_features: int, is_frozen: bool
    ) -> NovelHead:
        """Build the novel head, with a linear layer if the encoder is frozen.

        The layer, from D to D features, is the identity at first.

        Args:
            num_novel: The number of novel classes K.
            num_features: The number of features D.
            is_frozen: Whether the encoder is frozen.
        """
        return NovelHead(num_novel, num_features, has_layer=is_frozen)


class Rs(Method):
    """RS, rank statistics: pairs are similar if the same features are their largest.

    The novel head learns from these pairs of unlabeled rows, and the known head from
    labeled rows. Both heads must give equal outputs for two views.
    """

    name = "rs"
    constants = Constants
    constants_of_preset = SETTINGS

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the loss of RS for a batch.

        It is the cross-entropy of labeled rows, plus the pairwise loss of unlabeled
        rows, which are similar if the same features are their largest, plus the
        consistency of two views with a rising weight: :func:`rank_loss`. The prototypes
        of the model are scaled to length one first, in place. All workers call this.

        Args:
            state: The state of training, with the model.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        outputs = forward_two_views(state, batch)
        return rank_loss(state, batch.labels, config, *outputs)


def rank_loss(
    state: TrainState,
    labels: Tensor,
    config: Config,
    known: Tensor,
    novel: Tensor,
    features: Tensor,
) -> Tensor:
    """Compute the loss of RS, in which similar rows have the same largest features.

    Two unlabeled rows are similar if the same k features are the largest of both, in
    any order. k is the constant ``top_k`` of the method, or by default 5 of every 512
    features (:func:`num_top`), and at most D. The whole loss is :func:`loss_of_pairs`.
    All workers call this.

    Args:
        state: The state of training, which has the progress of the phase.
        labels: Classes of the labeled rows, int64 (B_l,).
        config: The configuration of the run, with the method's constants.
        known: Cosines of the head that learns from labels in two views, (2, B, C),
            labeled rows first. It is the known head, or the joint head of RS+.
        novel: Cosines of the head that learns from pairs, (2, B, C_u).
        features: Features (2, B, D). View 0 of this worker's unlabeled rows is compared
            with view 0 of the unlabeled rows of all workers, without gradient.

    Returns:
        The loss, a scalar.
    """
    ranked = features[0, len(labels) :].detach()
    top = min(config.method_options.top_k or num_top(ranked.shape[1]), ranked.shape[1])
    similar = have_same_top_features(ranked, distributed.gather_rows(ranked, 0), top)
    return loss_of_pairs(state, labels, config, known, novel, similar)


def loss_of_pairs(
    state: TrainState,
    labels: Tensor,
    config: Config,
    known: Tensor,
    novel: Tensor,
    similar: Tensor,
) -> Tensor:
    """Compute the loss of methods that learn from similar pairs of unlabeled rows.

    It is the cross-entropy of labeled rows; plus the binary cross-entropy of pairs of
    unlabeled rows, the first in view 0 and the second in view 1; plus, with a rising
    weight, the sum over both heads of :func:`consistency_loss`, the mean squared
    difference of the softmax outputs for two views, of all rows. That weight is the
    constant ``consistency_weight`` times a factor that rises to 1 within the first
    share ``rampup`` of the phase, see :func:`uno.methods.common.sigmoid_rampup`. All
    workers call this.

    Args:
        state: The state of training, which has the progress of the phase.
        labels: Classes of the labeled rows, int64 (B_l,).
        config: The configuration of the run. The constants of its method must be a
            :class:`Consistency`.
        known: Cosines of the head that learns from labels in two views, (2, B, C),
            labeled rows first. It is the known head, or the joint head of RS+.
        novel: Cosines of the head that learns from pairs, (2, B, C_u).
        similar: Which pairs of this worker's B_u unlabeled rows and the M unlabeled
            rows of all workers are similar, bool (B_u, M).

    Returns:
        The loss, a scalar.
    """
    tau, unlabeled = config.objective.temperature, slice(len(labels), None)
    first, second = (novel[:, unlabeled] / tau).softmax(dim=-1)
    constants = config.method_options
    ramp = sigmoid_rampup(state.progress, constants.rampup)
    weight = constants.consistency_weight * ramp
    return (
        labeled_loss(known, labels, tau)
        + pair_likelihood_loss(
            first, distributed.gather_rows_with_grad(second, 0), similar
        )
        + weight * (consistency_loss(known, tau) + consistency_loss(novel, tau))
    )


def num_top(num_features: int) -> int:
    """Return the number of largest features that RS compares, for a number of features.

    It is the authors' share of the features, 5 of 512, rounded, but at least 1.
    """
    return max(1, round(TOP * num_features / OF))


def consistency_loss(logits: Tensor, temperature: float) -> Tensor:
    """Return the mean squared difference of the softmax outputs of two views.

    Args:
        logits: Cosines of two views, (2, B, K).
        temperature: The divisor of the cosines.

    Returns:
        A scalar, the mean over rows and outputs.
    """
    return F.mse_loss(*(logits / temperature).softmax(dim=-1))


def have_same_top_features(features: Tensor, others: Tensor, top: int) -> Tensor:
    """Return for which pairs of rows the same features are the largest, in any order.

    Args:
        features: Features of the first row of each pair, (N, D).
        others: Features of the second row of each pair, (M, D).
        top: How many of the largest features are compared, 1 to D.

    Returns:
        A mask, bool (N, M): True if all ``top`` features are the same.
    """

    def top_set(rows: Tensor) -> Tensor:
        """Return 1 at the ``top`` largest features of each row, and 0 elsewhere."""
        return torch.zeros_like(rows).scatter_(1, rows.topk(top, dim=1).indices, 1)

    return top_set(features) @ top_set(others).T > top - 0.5


METHOD = Rs()
