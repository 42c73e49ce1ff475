"""The discovery method SimGCD (Wen et al., ICCV 2023; code CVMI-Lab/SimGCD).

The paper is "Parametric classification for generalized category discovery: a baseline
study". There is one classifier of cosines over all C classes. Every row learns from the
prediction of its other view, sharpened by a temperature that falls (self-distillation,
without a second network). The entropy of the mean prediction keeps all classes in use.
Labeled rows learn their class. A projection of the features is contrasted, without
labels (InfoNCE) and with them (SupCon):

    (1 - w) (distillation + epsilon (log C - entropy) + InfoNCE)
    + w (cross-entropy + SupCon).

Known constants, from the authors' code: w is 0.35; epsilon is 1 for CIFAR10, 4 for
CIFAR100, 1 for ImageNet-100 (CUB 2, Cars, Aircraft and Herbarium 1); the target's
temperature falls from 0.07 to 0.04 over the first 30 of 200 epochs, and the
prediction's is 0.1 (here tau); the temperatures of contrast are 1 and 0.07; the
projection has widths 2048, 2048 and 256 with GELU.

What differs:
- In the NCD setting the targets of unlabeled rows are zero at known outputs, as in UNO.
- ``--simgcd.entropy-rows unlabeled`` is ours. The authors pull the whole batch toward
  equal classes, which is wrong if labeled rows decide how often a known class is in it.
  With this option only unlabeled rows count, and in the NCD setting only novel outputs.
- A frozen encoder has nothing that contrast could train, so contrast is left out there.
  Prototypes then start at class means and clusters of the features, as in PIM. The
  authors' start at random, and their encoder moves.
- Prototypes have length one. Theirs start at 0.58 under weight normalization: their
  rate of 0.1 is 0.3 here (``--discover.base-lr``). Weight decay applies to all
  parameters (theirs excludes biases). The encoder learns as ``--model.finetune`` says
  (theirs: the last block, ``last_stage``). Warm-up and batches are those of the preset.
"""

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from uno import distributed
from uno.config import Config, Section, field
from uno.data.stream import TrainData
from uno.distributed import mean_with_grad
from uno.heads import NovelHead, unit
from uno.method import Method
from uno.methods.common import (
    cluster_centers,
    feature_contrast_loss,
    forward_two_views,
    frozen_sample,
    set_prototypes_,
)
from uno.model import UnoModel
from uno.steps import Batch, TrainState, labeled_loss

HIDDEN, PROJECTION = 2048, 256
CONTRAST, SUPERVISED_CONTRAST = 1.0, 0.07  # temperatures of both contrastive terms
SETTINGS = {name: {"epsilon": 4.0} for name in ("cifar100_20", "cifar100_50")}


class Constants(Section):
    """Constants of SimGCD."""

    epsilon: float = field(
        1.0, "Weight of the entropy of the mean prediction.", ge=0, le=100
    )
    entropy_rows: Literal["all", "unlabeled"] = field(
        "all", "Rows whose mean prediction that is."
    )
    labeled_weight: float = field(
        0.35,
        "Weight w of the terms with labels; the other terms have 1 - w.",
        ge=0,
        le=1,
    )
    first_temperature: float = field(
        0.07, "Temperature of the targets at the first step.", gt=0, le=10
    )
    rampup: float = field(
        30 / 200, "Share of the phase in which the targets sharpen.", ge=0, le=1
    )
    last_temperature: float = field(
        0.04, "Temperature of the targets after that share.", gt=0, le=10
    )


class SimGcd(Method):
    """SimGCD: one classifier of cosines over all classes, by self-distillation.

    Every row learns from the sharpened prediction of its other view, and labeled rows
    also learn their class. Contrastive terms on a projection of the features are added,
    unless the encoder is frozen.
    """

    name = "simgcd"
    constants = Constants
    constants_of_preset = SETTINGS
    supports_gcd = True

    def build_head(
        self, num_novel: int, num_features: int, is_frozen: bool
    ) -> NovelHead:
        """Build the novel head, with the projection MLP as auxiliary module.

        The contrastive terms use the projection. With a frozen encoder there are none,
        and so there is no projection.

        Args:
            num_novel: The number of novel classes.
            num_features: The number of features.
            is_frozen: Whether the encoder is frozen.
        """
        projection = None if is_frozen else build_projection(num_features)
        return NovelHead(num_novel, num_features, projection)

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the loss of SimGCD for a batch.

        It is (1 - w) times the terms without labels plus w times the terms with labels;
        w is ``labeled_weight``. Without labels are self-distillation, ``epsilon`` times
        how far the mean prediction is from equal classes (:func:`compute_imbalance`, of
        all rows or of unlabeled rows as ``entropy_rows`` says), and a contrastive term
        of all rows. With labels are the cross-entropy and a contrastive term of labeled
        rows. The contrastive terms are left out if the encoder is frozen. Unless the
        setting is "gcd", the targets of unlabeled rows are zero at known outputs, and
        with ``entropy_rows`` "unlabeled" the mean prediction is over novel outputs
        alone. The prototypes of the model are scaled to length one first, in place. All
        workers call this.

        Args:
            state: The state of training, with the model.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        constants: Constants = config.method_options
        labels, tau = batch.labels, config.objective.temperature
        known, novel, features = forward_two_views(state, batch)
        joint = torch.cat([known, novel], dim=-1)  # (2, B, C) cosines
        num_masked = 0 if config.data.setting == "gcd" else known.shape[-1]
        sharp = target_temperature(state.progress, constants)
        unsupervised = distillation_loss(joint, len(labels), num_masked, tau, sharp)
        averaged = joint
        if constants.entropy_rows == "unlabeled":
            averaged = joint[:, len(labels) :, num_masked:]
        unsupervised = unsupervised + constants.epsilon * compute_imbalance(
            averaged / tau
        )
        supervised = labeled_loss(joint, labels, tau)
        if (project := state.model.novel.auxiliary) is not None:
            rows = unit(project(features.to(project[0].weight.dtype)))
            unsupervised = unsupervised + feature_contrast_loss(
                rows, labels[:0], CONTRAST
            )
            supervised = supervised + feature_contrast_loss(
                rows[:, : len(labels)], labels, SUPERVISED_CONTRAST
            )
        weight = constants.labeled_weight
        return (1 - weight) * unsupervised + weight * supervised

    @torch.no_grad()
    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Set prototypes to means of classes and clusters, if the encoder is frozen.

        They are those of :func:`uno.methods.common.cluster_centers`, of a sample of the
        training rows. With any other encoder this changes nothing. All workers call
        this; rank 0 clusters.

        Args:
            config: The configuration of the run.
            model: The network. Its known and novel prototypes are changed.
            train: The training data.

        Returns:
            An empty mapping: the method keeps no tensors.

        Raises:
            ConfigError: The encoder is frozen, and the sample of training rows has
                fewer unlabeled rows than there are novel classes; or no labeled or no
                unlabeled image of the sample, or no labeled image of one of the known
                classes, can be read.
        """
        if config.model.finetune != "none":
            return {}
        sample, num_novel = frozen_sample(config, model, train), train.num_novel

        def compute() -> dict[str, Tensor]:
            """Return "centers": means of known classes, then of novel clusters."""
            setting = config.data.setting
            return {"centers": cluster_centers(sample, num_novel, setting, config.seed)}

        start = distributed.compute_on_rank0(compute, model.known.weight.device)
        set_prototypes_(model, start["centers"])
        return {}


def build_projection(num_features: int) -> nn.Sequential:
    """Build the projection for the contrastive terms: an MLP of three layers with GELU.

    Both hidden layers have 2,048 units, and the last layer has 256 outputs. Weights are
    drawn from a normal distribution with the standard deviation 0.02, truncated at -2
    and 2, and biases are zero.

    Args:
        num_features: The number of features that the MLP takes.
    """
    widths = (num_features, HIDDEN, HIDDEN, PROJECTION)
    first, second, last = layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    for layer in layers:
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)


def target_temperature(progress: float, constants: Constants) -> float:
    """Return the softmax temperature of the targets of self-distillation.

    It changes linearly from ``first_temperature`` to ``last_temperature`` over the
    share ``rampup`` of the phase, and stays there.

    Args:
        progress: The share of the phase that is done, 0-1.
        constants: The constants of the method.
    """
    share = 1.0 if progress >= constants.rampup else progress / constants.rampup
    return constants.first_temperature + share * (
        constants.last_temperature - constants.first_temperature
    )


def distillation_loss(
    joint: Tensor, num_labeled: int, num_masked: int, tau: float, sharp: float
) -> Tensor:
    """Return the cross-entropy of each view's prediction with that of the other view.

    The softmax of the other view at the temperature ``sharp`` is the target, without
    gradient.

    Args:
        joint: Cosines of two views with all prototypes, (2, B, C). Known classes and
            labeled rows come first.
        num_labeled: The number of labeled rows.
        num_masked: The targets of unlabeled rows are zero at the first ``num_masked``
            outputs. 0 masks none.
        tau: The temperature of the predictions.
        sharp: The temperature of the targets.

    Returns:
        A scalar, the mean over views and rows.
    """
    targets = joint.detach() / sharp
    targets[:, num_labeled:, :num_masked] = -torch.inf
    return (
        -(targets.softmax(dim=-1).flip(0) * (joint / tau).log_softmax(dim=-1))
        .sum(dim=-1)
        .mean()
    )


def compute_imbalance(logits: Tensor) -> Tensor:
    """Return log K minus the entropy of the mean prediction.

    It says how far the mean prediction is from equally frequent classes: 0 if they are.
    All workers call this.

    Args:
        logits: Logits of this worker's rows, (V, B, K). The mean of the softmax is over
            views and the rows of all workers.

    Returns:
        A scalar from 0 to log K, in nats.
    """
    mean = mean_with_grad(logits.softmax(dim=-1).mean(dim=(0, 1)))
    return math.log(len(mean)) - torch.special.entr(mean).sum()


METHOD = SimGcd()
