"""PIM: parametric information maximization (Chiaroni et al., "Parametric information
maximization for generalized category discovery", ICCV 2023; code
ThalesGroup/pim-generalized-category-discovery).

A linear classifier without bias on features that nobody trains, s = softmax(25 W z),
from semi-supervised k-means centers: lambda times the mean entropy of s of unlabeled
rows, less the entropy of the mean of s over all rows, plus the cross-entropy of labeled
rows. lambda decides how far classes may differ in size: it is the one under which the
same objective without labels, from plain k-means centers, puts labeled rows right most
often (best matching).

Known constants, from the authors' code: 25; Adam, rate .001, decay .01; all rows in
each of 1,000 steps; lambda from .1 to 1 in steps of .05. Everything happens before the
first step, as theirs, in one view.

What differs:
- Five values of lambda, of theirs: .1, .25, .5, .75, 1. Features and centers have
  length one.
- Centers are :func:`uno.prototype_init.clusters_of`'s: in whitened directions, the best
  of 10 starts (theirs 100 starts of the features as they are).
- In the NCD setting unlabeled rows are known to be new: the cross-entropy of that is
  added.
- Of more than 20,000 rows of a kind, as many are used. Steps, if some are asked for,
  continue on batches of views by SGD, with cosines over tau.
- Rows of W differ in length. That is kept: with one coordinate more, zero in features,
  all rows have one length, and every image its class; but the probabilities of
  ``uno predict`` are at tau, softer than s.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno import collectives
from uno.clustering import kmeans
from uno.collectives import mean_with_grad
from uno.config import Config, Section, field
from uno.frozen import matched
from uno.heads import unit
from uno.methods import Method
from uno.methods.method import (
    NovelHead,
    cluster_centers,
    forward_two_views,
    frozen_sample,
    set_prototypes_,
)
from uno.model import UnoModel
from uno.prototype_init import NUM_STARTS, Sample
from uno.state import TrainState
from uno.steps import Batch, labeled_loss, update_

SCALE = 25.0
RATE, DECAY, STEPS = 1e-3, 1e-2, 1000  # of Adam
WEIGHTS = (0.1, 0.25, 0.5, 0.75, 1.0)  # lambda


class Constants(Section):
    """Of PIM."""

    weight: float | None = field(
        None,
        "Weight lambda of the entropy of a row's classes; default: chosen on labeled"
        " rows.",
        ge=0,
        le=10,
    )
    steps: int = field(
        STEPS, "Steps of Adam on all rows, for each value of lambda.", ge=1, le=100_000
    )


class Fit(NamedTuple):
    """A classifier: the class of a unit feature z is the largest of ``weights`` @ z."""

    weights: Tensor  # (C_l + C_u, D)
    weight: float  # lambda


class Adapter(nn.Module):
    """Unit features, and a zero: (N, D) -> (N, ``width``), D + 1."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.width = num_features + 1

    def forward(self, features: Tensor) -> Tensor:
        """(N, D) -> (N, D + 1)."""
        return F.pad(unit(features), (0, 1))


def fit(
    sample: Sample,
    num_novel: int,
    setting: str | None,
    seed: int,
    weight: float | None = None,
    steps: int = STEPS,
) -> Fit:
    """PIM on features, on their device. ``setting`` gcd: unlabeled rows are of any
    class, else of new ones; ``weight``: lambda, None: chosen on labeled rows.
    """
    labels, num_known = sample.labels, int(sample.labels.max()) + 1
    rows = unit(torch.cat([sample.labeled, sample.unlabeled])).float()
    barred = 0 if setting == "gcd" else num_known
    if weight is None:
        plain = kmeans(rows.cpu(), num_known + num_novel, NUM_STARTS, seed).centers.to(
            rows
        )
        found = [
            descend(plain, rows, labels, each, steps, supervised=False)
            for each in WEIGHTS
        ]
        right = [accuracy(rows[: len(labels)] @ each.T, labels) for each in found]
        weight = WEIGHTS[right.index(max(right))]
    centers = cluster_centers(
        Sample(*(t.cpu() for t in sample)), num_novel, setting, seed
    ).to(rows)
    return Fit(descend(centers, rows, labels, weight, steps, barred=barred), weight)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of rows (N, C) that are right under the best matching of outputs and
    ``labels`` (N,).
    """
    return float(
        matched(labels.cpu(), logits.argmax(dim=1).cpu(), logits.shape[1])
        .float()
        .mean()
    )


def descend(
    weights: Tensor,
    rows: Tensor,
    labels: Tensor,
    weight: float,
    steps: int,
    supervised: bool = True,
    barred: int = 0,
) -> Tensor:
    """``weights`` (C, D) after ``steps`` of Adam on :func:`objective` of unit
    ``rows`` (N, D).
    """
    leaf = weights.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], RATE, weight_decay=DECAY)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = SCALE * (rows @ leaf.T)[None]
        # all rows are here, on one rank
        loss = objective(logits, labels, weight, supervised, barred, lambda mean: mean)
        loss.backward()
        optimizer.step()
    return leaf.detach()


def objective(
    logits: Tensor,
    labels: Tensor,
    weight: float | Tensor,
    supervised: bool = True,
    barred: int = 0,
    mean_of_ranks: Callable[[Tensor], Tensor] = mean_with_grad,
) -> Tensor:
    """Information that is to be maximized, negative, and the cross-entropy of what is
    known: a scalar.

    ``logits`` (V, B, C) of which the first B_l rows have ``labels`` (B_l,);
    ``supervised``: these count. The others are of none of the first ``barred`` classes.
    ``mean_of_ranks`` averages the mean probabilities over the ranks' rows.
    """
    log_p = logits.log_softmax(dim=-1)
    p, free = log_p.exp(), slice(len(labels), None)
    uncertainty = -(p * log_p)[:, free].sum(dim=-1).mean()
    mean = mean_of_ranks(p.mean(dim=(0, 1))).clamp(min=1e-12)
    loss = weight * uncertainty - torch.special.entr(mean).sum()
    if supervised:
        loss = loss + labeled_loss(logits, labels, 1.0)
    return loss - log_p[:, free, barred:].logsumexp(dim=-1).mean() if barred else loss


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """:func:`objective` of two views of a batch. Returns the loss as (1,)."""
    known, novel, _ = forward_two_views(state, batch)
    logits = torch.cat([known, novel], dim=-1) / config.objective.temperature
    barred = 0 if config.data.setting == "gcd" else known.shape[-1]
    loss = objective(logits, batch.labels, state.extra["weight"], barred=barred)
    return update_(state, loss, lr)


def start(config: Config, model: UnoModel, train: Any) -> dict[str, Tensor]:
    """Fit, and move all prototypes. Returns lambda. ConfigError: too few rows."""
    constants, device = config.method_options, model.known.weight.device
    sample = Sample(*(t.to(device) for t in frozen_sample(config, model, train)))

    def compute() -> dict[str, Tensor]:
        found = fit(
            sample,
            train.num_novel,
            config.data.setting,
            config.seed,
            constants.weight,
            constants.steps,
        )
        return {"rows": found.weights, "weight": torch.tensor(found.weight)}

    found = collectives.compute_on_rank0(compute, device)
    set_prototypes_(model, of_one_length(found["rows"]))
    return {"weight": found["weight"]}


def of_one_length(weights: Tensor) -> Tensor:
    """(C, D) -> unit rows (C, D + 1) whose products with (z, 0) are those of
    ``weights`` with z, all divided by the length of the longest (Bachrach et al.,
    RecSys 2014).
    """
    squared = weights.square().sum(dim=1, keepdim=True)
    return (
        torch.cat([weights, (squared.max() - squared).sqrt()], dim=1)
        / squared.max().sqrt()
    )


METHOD = Method(
    "pim", step, NovelHead, start, Constants, adapter=Adapter, trains=False, gcd=True
)
