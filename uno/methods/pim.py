"""The discovery method PIM: parametric information maximization.

The paper is "Parametric information maximization for generalized category discovery"
(Chiaroni et al., ICCV 2023), and the code
ThalesGroup/pim-generalized-category-discovery. A linear classifier without bias, s =
softmax(25 W z), is trained on features z that are not trained. It starts from the
centers of semi-supervised k-means. The loss is lambda times the mean entropy of s of
unlabeled rows, minus the entropy of the mean of s over all rows, plus the cross-entropy
of labeled rows. lambda decides how much classes may differ in size. The chosen lambda
is the one under which the same objective without labels, from the centers of plain
k-means, puts most labeled rows right (best matching).

Known constants, from the authors' code: 25; Adam with rate 0.001 and decay 0.01; all
rows in each of 1,000 steps; lambda from 0.1 to 1 in steps of 0.05. As in that code,
everything happens before the first step, in one view.

What differs:
- There are five values of lambda: 0.1, 0.25, 0.5, 0.75 and 1. Features and centers have
  length one.
- Centers are those of :func:`uno.clustering.initialization.cluster_features`: in
  whitened directions, the best of 10 starts. The authors have 100 starts of the
  features as they are.
- In the NCD setting unlabeled rows are known to be of novel classes. The cross-entropy
  of that is added.
- If there are more than 20,000 rows of a kind, 20,000 are used. If steps are asked for,
  they continue on batches of views by SGD, with cosines over tau.
- The rows of W differ in length. That is kept: with one more coordinate, which is zero
  in features, all rows have one length, and every image its class. But the
  probabilities of ``uno predict`` have the temperature tau, so they are softer than s.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno import distributed
from uno.clustering.frozen import find_correct_rows
from uno.clustering.initialization import NUM_STARTS, Sample
from uno.clustering.kmeans import kmeans
from uno.config import Config, Section, field
from uno.data.stream import TrainData
from uno.distributed import mean_with_grad
from uno.heads import unit
from uno.method import Method
from uno.methods.common import (
    cluster_centers,
    forward_two_views,
    frozen_sample,
    set_prototypes_,
)
from uno.model import UnoModel
from uno.steps import Batch, TrainState, labeled_loss

SCALE = 25.0
RATE, DECAY, STEPS = 1e-3, 1e-2, 1000  # settings of Adam
WEIGHTS = (0.1, 0.25, 0.5, 0.75, 1.0)  # values of lambda that are tried


class Constants(Section):
    """Constants of PIM."""

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


class LinearClassifier(NamedTuple):
    """A fitted linear classifier.

    The class of a unit feature z is the index of the largest of ``weights`` @ z.

    Attributes:
        weights: A row for each class, (C_l + C_u, D), known classes first.
        weight: The weight lambda of the entropy of unlabeled rows in the fit.
    """

    weights: Tensor
    weight: float


class PaddingAdapter(nn.Module):
    """A module that scales features to length one and adds a coordinate of zero.

    Attributes:
        width: The number of its outputs, D + 1.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.width = num_features + 1

    def forward(self, features: Tensor) -> Tensor:
        """Scale features to length one, and append a coordinate of zero.

        In this coordinate the prototypes hold what they lack to length one, see
        :func:`pad_to_one_length`. As it is zero here, it changes no product.

        Args:
            features: Features of the encoder, (N, D).

        Returns:
            Features (N, D + 1), at least float32.
        """
        return F.pad(unit(features), (0, 1))


def fit_classifier(
    sample: Sample,
    num_novel: int,
    setting: str | None,
    seed: int,
    weight: float | None = None,
    steps: int = STEPS,
) -> LinearClassifier:
    """Fit the linear classifier of PIM to features, on their device.

    The fit starts from the means of known classes and the centers of novel clusters,
    see :func:`uno.methods.common.cluster_centers`. Features are scaled to length one.

    Args:
        sample: Features (N, D) of labeled and of unlabeled rows, and the known classes
            of the labeled ones.
        num_novel: The number of novel classes C_u.
        setting: With "gcd" unlabeled rows may be of any class. With "ncd" or None they
            are of novel classes only.
        seed: The seed of k-means.
        weight: The weight lambda of the entropy of unlabeled rows. If it is None, a fit
            without labels from the centers of plain k-means of all rows is made for
            each value in ``WEIGHTS`` (0.1, 0.25, 0.5, 0.75 and 1). The value whose fit
            puts most labeled rows right, under the best one-to-one matching of clusters
            and classes, is taken for the final fit; of equally good values, the
            smallest.
        steps: The number of steps of Adam, for each fit.

    Returns:
        The weights of the classifier, and the lambda that was used.
    """
    labels, num_known = sample.labels, int(sample.labels.max()) + 1
    rows = unit(torch.cat([sample.labeled, sample.unlabeled])).float()
    num_masked = 0 if setting == "gcd" else num_known
    if weight is None:
        num_classes = num_known + num_novel
        plain = kmeans(rows.cpu(), num_classes, NUM_STARTS, seed).centers.to(rows)
        accuracies = list[float]()
        for candidate in WEIGHTS:
            fitted = minimize_objective(
                plain, rows, labels, candidate, steps, supervised=False
            )
            accuracies.append(matched_accuracy(rows[: len(labels)] @ fitted.T, labels))
        weight = WEIGHTS[accuracies.index(max(accuracies))]
    centers = cluster_centers(
        Sample(*(t.cpu() for t in sample)), num_novel, setting, seed
    ).to(rows)
    return LinearClassifier(
        minimize_objective(centers, rows, labels, weight, steps, num_masked=num_masked),
        weight,
    )


def matched_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the accuracy of outputs under their best one-to-one matching to classes.

    Args:
        logits: Logits (N, C). The largest one decides the output of a row.
        labels: Classes of the rows, int64 (N,).

    Returns:
        The share of rows that are correct, 0-1.
    """
    outputs = logits.argmax(dim=1).cpu()
    return float(
        find_correct_rows(labels.cpu(), outputs, logits.shape[1]).float().mean()
    )


def minimize_objective(
    weights: Tensor,
    rows: Tensor,
    labels: Tensor,
    weight: float,
    steps: int,
    supervised: bool = True,
    num_masked: int = 0,
) -> Tensor:
    """Fit the weights of a linear classifier to PIM's objective, by Adam on all rows.

    The logits are 25 times the products of rows and weights, see :func:`pim_objective`.
    Each step has all rows. The learning rate is 0.001 and the weight decay 0.01.

    Args:
        weights: The initial weights, (C, D), which are not changed.
        rows: Unit features, (N, D), those of labeled rows first.
        labels: Classes of the labeled rows, int64 (N_l,).
        weight: The weight lambda of the mean entropy of unlabeled rows.
        steps: The number of steps.
        supervised: Whether the cross-entropy of labeled rows is part of the objective.
        num_masked: If it is not 0, unlabeled rows belong to none of the first
            ``num_masked`` classes, and the objective has a term that says so, see
            :func:`pim_objective`.

    Returns:
        The final weights, (C, D).
    """
    leaf = weights.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], RATE, weight_decay=DECAY)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = SCALE * (rows @ leaf.T)[None]
        # one rank has all rows, so there is nothing to average
        loss = pim_objective(
            logits, labels, weight, supervised, num_masked, lambda mean: mean
        )
        loss.backward()
        optimizer.step()
    return leaf.detach()


def pim_objective(
    logits: Tensor,
    labels: Tensor,
    weight: float | Tensor,
    supervised: bool = True,
    num_masked: int = 0,
    mean_of_ranks: Callable[[Tensor], Tensor] = mean_with_grad,
) -> Tensor:
    """Compute the objective of PIM: negative mutual information, plus cross-entropy.

    The negative mutual information is lambda times the mean entropy of the class
    probabilities of unlabeled rows, minus the entropy of the mean probabilities of all
    rows. All entropies are in nats.

    Args:
        logits: Logits of V views, (V, B, C), after the division by the temperature,
            with labeled rows and known classes first.
        labels: Classes of the labeled rows, int64 (B_l,).
        weight: The weight lambda.
        supervised: Whether the cross-entropy of labeled rows is added.
        num_masked: If it is not 0, unlabeled rows belong to none of the first
            ``num_masked`` classes, and the mean of minus the log of the probability of
            this is added.
        mean_of_ranks: Averages the mean probabilities (C,) over the workers. All other
            means are over this worker's rows.

    Returns:
        A scalar, to be minimized.
    """
    log_p = logits.log_softmax(dim=-1)
    p, free = log_p.exp(), slice(len(labels), None)
    uncertainty = -(p * log_p)[:, free].sum(dim=-1).mean()
    mean = mean_of_ranks(p.mean(dim=(0, 1))).clamp(min=1e-12)
    loss = weight * uncertainty - torch.special.entr(mean).sum()
    if supervised:
        loss = loss + labeled_loss(logits, labels, 1.0)
    return (
        loss - log_p[:, free, num_masked:].logsumexp(dim=-1).mean()
        if num_masked
        else loss
    )


class Pim(Method):
    """PIM: a linear classifier of fixed features with the most mutual information.

    It is fitted to all rows before the first step, with the cross-entropy of labeled
    rows, and becomes the prototypes of the model.
    """

    name = "pim"
    constants = Constants
    supports_gcd = True
    trains = False

    def build_adapter(self, num_features: int) -> PaddingAdapter:
        """Build the module that scales features to length one, and appends a zero.

        In the appended coordinate a prototype has what it lacks to length one, see
        :func:`pad_to_one_length`.

        Args:
            num_features: The number of features of the encoder.
        """
        return PaddingAdapter(num_features)

    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Fit the linear classifier of PIM, and set the model's prototypes to it.

        It is fitted to the features of a sample of the training rows, see
        :func:`fit_classifier`. The prototypes are its weights, divided by one number
        and with one more coordinate, so that all have length one, see
        :func:`pad_to_one_length`. All workers call this; rank 0 fits.

        Args:
            config: The configuration of the run, with the method's constants.
            model: The network. Its known and novel prototypes are changed.
            train: The training data.

        Returns:
            "weight", the weight lambda of the entropy of unlabeled rows, a scalar: the
            constant ``weight``, or the value that was chosen on labeled rows if it is
            None.

        Raises:
            ConfigError: The sample has fewer unlabeled rows than there are novel
                classes; or no labeled or no unlabeled image of it, or no labeled image
                of one of the known classes, can be read.
        """
        constants, device = config.method_options, model.known.weight.device
        sample = Sample(*(t.to(device) for t in frozen_sample(config, model, train)))

        def compute() -> dict[str, Tensor]:
            """Return the classifier's weights as "rows", and lambda as "weight"."""
            classifier = fit_classifier(
                sample,
                train.num_novel,
                config.data.setting,
                config.seed,
                constants.weight,
                constants.steps,
            )
            weight = torch.tensor(classifier.weight)
            return {"rows": classifier.weights, "weight": weight}

        start = distributed.compute_on_rank0(compute, device)
        set_prototypes_(model, pad_to_one_length(start["rows"]))
        return {"weight": start["weight"]}

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute PIM's objective on two views of a batch.

        It is the negative mutual information of rows and classes plus the cross-entropy
        of labeled rows, see :func:`pim_objective`. Unless the setting is "gcd", the
        mean of minus the log of the probability that an unlabeled row is of a novel
        class is added. Logits are cosines over tau. Training continues the fit with it
        by SGD, if discovery has epochs. The prototypes of the model are scaled to
        length one first, in place. All workers call this.

        Args:
            state: The state of training, with the model and, as
                ``state.extra["weight"]``, the weight lambda.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        known, novel, _ = forward_two_views(state, batch)
        logits = torch.cat([known, novel], dim=-1) / config.objective.temperature
        num_masked = 0 if config.data.setting == "gcd" else known.shape[-1]
        return pim_objective(
            logits, batch.labels, state.extra["weight"], num_masked=num_masked
        )


def pad_to_one_length(weights: Tensor) -> Tensor:
    """Turn the weights of a linear classifier into rows of length one.

    Each row is divided by the length of the longest row, and then gets one more
    coordinate, so that its length is one (Bachrach et al., RecSys 2014). For a feature
    z the products of (z, 0) with the new rows are those of z with ``weights``, divided
    by that length. So the class of z stays the same.

    Args:
        weights: A row for each class, (C, D).

    Returns:
        Unit rows (C, D + 1).
    """
    squared = weights.square().sum(dim=1, keepdim=True)
    return (
        torch.cat([weights, (squared.max() - squared).sqrt()], dim=1)
        / squared.max().sqrt()
    )


METHOD = Pim()
