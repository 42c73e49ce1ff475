"""SimGCD (Wen et al., "Parametric classification for generalized category discovery: a
baseline study", ICCV 2023; code CVMI-Lab/SimGCD).

One classifier of cosines over all C classes. Every row learns from its other view's
prediction, sharpened by a temperature that falls (self-distillation, without a second
network); the entropy of the mean prediction keeps all classes in use; labeled rows
learn their class; a projection of the features is contrasted, without labels (InfoNCE)
and with them (SupCon):

    (1 - w) (distillation + epsilon (log C - entropy) + InfoNCE) + w (cross-entropy + SupCon).

Known constants, from the authors' code: w = .35; epsilon CIFAR10 1, CIFAR100 4,
ImageNet-100 1 (CUB 2, Cars, Aircraft and Herbarium 1); the target's temperature .07 to
.04 over the first 30 of 200 epochs, the prediction's .1 (here tau); temperatures of
contrast 1 and .07; projection 2048, 2048, 256 with GELU.

What differs:
- In the NCD setting targets of unlabeled rows have no mass at known outputs, as UNO's.
- ``--simgcd.entropy-rows unlabeled`` is ours: the authors pull the whole batch toward
  equal classes, which is wrong where labeled rows decide how often a known class is in
  it. Of unlabeled rows, and in the NCD setting among novel outputs alone.
- A frozen encoder has nothing that contrast could train, so it is left out there; and
  prototypes start at class means and clusters of the features, as PIM's, where the
  authors' are random and their encoder moves.
- Prototypes have length one, theirs start at .58 under weight normalization: their rate
  of .1 is .3 here (``--discover.base-lr``). Weight decay is of all parameters (theirs
  spares biases); the encoder learns as ``--model.finetune`` says (theirs: the last
  block, ``last_stage``); warm-up and batches are the preset's.
"""  # noqa: E501

import math
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uno import collectives
from uno.collectives import mean_with_grad
from uno.config import Config, Section, field
from uno.heads import unit
from uno.methods import Method
from uno.methods.method import (
    NovelHead,
    cluster_centers,
    contrast_loss,
    forward_two_views,
    frozen_sample,
    set_prototypes_,
)
from uno.model import UnoModel
from uno.state import TrainState
from uno.steps import Batch, labeled_loss, update_

HIDDEN, PROJECTION = 2048, 256
CONTRAST, SUPERVISED_CONTRAST = 1.0, 0.07  # temperatures
SETTINGS = {name: {"epsilon": 4.0} for name in ("cifar100_20", "cifar100_50")}


class Constants(Section):
    """Of SimGCD."""

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


def head(num_novel: int, num_features: int) -> nn.Module:
    """The novel prototypes, and the projection that is contrasted as the auxiliary
    part.
    """
    widths = (num_features, HIDDEN, HIDDEN, PROJECTION)
    layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    for layer in layers:
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
    first, second, last = layers
    return NovelHead(
        num_novel,
        num_features,
        nn.Sequential(first, nn.GELU(), second, nn.GELU(), last),
    )


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """Self-distillation, entropy, labels and contrast. Returns the loss as (1,)."""
    constants: Constants = config.method_options
    labels, weight, tau = (
        batch.labels,
        constants.labeled_weight,
        config.objective.temperature,
    )
    known, novel, features = forward_two_views(state, batch)
    joint = torch.cat([known, novel], dim=-1)  # (2, B, C) cosines
    barred = 0 if config.data.setting == "gcd" else known.shape[-1]
    unsupervised = distillation_loss(
        joint, len(labels), barred, tau, temperature(state.progress, constants)
    )
    rows = (
        joint if constants.entropy_rows == "all" else joint[:, len(labels) :, barred:]
    )
    unsupervised = unsupervised + constants.epsilon * imbalance(rows / tau)
    supervised = labeled_loss(joint, labels, tau)
    if (project := state.model.novel.auxiliary) is not None:
        projections = unit(project(features.to(project[0].weight.dtype)))
        unsupervised = unsupervised + contrast_loss(projections, labels[:0], CONTRAST)
        labeled = projections[:, : len(labels)]
        supervised = supervised + contrast_loss(labeled, labels, SUPERVISED_CONTRAST)
    return update_(state, (1 - weight) * unsupervised + weight * supervised, lr)


def temperature(progress: float, constants: Constants) -> float:
    """Of the targets, from ``first_temperature`` to ``last_temperature`` in a line
    over ``rampup``.
    """
    share = 1.0 if progress >= constants.rampup else progress / constants.rampup
    return constants.first_temperature + share * (
        constants.last_temperature - constants.first_temperature
    )


def distillation_loss(
    joint: Tensor, num_labeled: int, barred: int, tau: float, sharp: float
) -> Tensor:
    """Cross-entropy of each view's prediction at ``tau`` with the other's at ``sharp``,
    without its gradient.

    Cosines (2, B, C); targets of rows from ``num_labeled`` on have nothing at the first
    ``barred`` outputs. A scalar, the mean over views and rows.
    """
    targets = joint.detach() / sharp
    targets[:, num_labeled:, :barred] = -torch.inf
    return (
        -(targets.softmax(dim=-1).flip(0) * (joint / tau).log_softmax(dim=-1))
        .sum(dim=-1)
        .mean()
    )


def imbalance(logits: Tensor) -> Tensor:
    """log K - the entropy of the mean softmax over views and the rows of all
    workers: (V, B, K) -> scalar.
    """
    mean = mean_with_grad(logits.softmax(dim=-1).mean(dim=(0, 1)))
    return math.log(len(mean)) - torch.special.entr(mean).sum()


@torch.no_grad()
def start(config: Config, model: UnoModel, train: Any) -> dict[str, Tensor]:
    """Of a frozen encoder all prototypes to class means and clusters. ConfigError:
    too few rows.
    """
    if config.model.finetune == "none":
        sample = frozen_sample(config, model, train)
        how = sample, train.num_novel, config.data.setting, config.seed
        found = collectives.compute_on_rank0(
            lambda: {"centers": cluster_centers(*how)}, model.known.weight.device
        )
        set_prototypes_(model, found["centers"])
    return {}


METHOD = Method(
    "simgcd", step, head, start, Constants, SETTINGS, frozen_head=NovelHead, gcd=True
)
