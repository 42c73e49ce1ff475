"""Losses, schedules and initializations that several discovery methods share."""

import math
from typing import Any

import torch
from torch import Tensor

from uno import distributed
from uno.clustering.initialization import (
    Sample,
    cluster_features,
    set_to_class_means_,
    training_features,
)
from uno.config import Config
from uno.errors import ConfigError
from uno.heads import unit
from uno.model import UnoModel
from uno.steps import Batch, TrainState, forward


def forward_two_views(state: TrainState, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the outputs of the model for the first two large views of a batch.

    Args:
        state: The state of training, with the model.
        batch: The batch with at least two large views.

    Returns:
        Three tensors: cosines with the prototypes of the known classes (2, B, C_l);
        outputs of the novel head (2, B, C_u); and features of the encoder (2, B, D).
    """
    logits = forward(state, batch._replace(views=batch.views[:2], num_large=2))
    assert logits.novel is not None and logits.features is not None
    return logits.known, logits.novel[:, 0], logits.features


def pair_likelihood_loss(
    probabilities: Tensor, others: Tensor, similar: Tensor
) -> Tensor:
    """Return the binary cross-entropy, over pairs of rows, of being in one cluster.

    The probability of this is the inner product <p_i, q_j> (Han et al., 2020, Eq. 2;
    Hsu et al., 2019, Eq. 1). 1e-7 is added inside the logarithm, as in both authors'
    code.

    Args:
        probabilities: Cluster probabilities p of this worker's rows in one view, (N,
            K).
        others: Cluster probabilities q of all workers' rows in the other view, (M, K).
        similar: Whether the rows of each pair should be in one cluster, bool (N, M).

    Returns:
        A scalar, the mean over all pairs.
    """
    together = probabilities @ others.T
    return -torch.where(similar, together + 1e-7, 1 - together + 1e-7).log().mean()


def sigmoid_rampup(progress: float, rampup: float) -> float:
    """Return the weight of a loss during a sigmoid ramp-up (Laine & Aila, 2017).

    Args:
        progress: The share of the phase that is done, 0-1.
        rampup: The share of the phase that the ramp takes.

    Returns:
        ``exp(-5 (1 - t)^2)`` with t = ``progress / rampup``, at most 1. That is from
        0.0067 to 1.
    """
    t = 1.0 if progress >= rampup else progress / rampup
    return math.exp(-5 * (1 - t) ** 2)


def similar_by_cosine(features: Tensor, threshold: float) -> Tensor:
    """Return which pairs of rows have features with a cosine above a threshold.

    Args:
        features: Features (N, D) of this worker's unlabeled rows.
        threshold: The cosine above which a pair is similar, -1 to 1.

    Returns:
        A mask, bool (N, M), for the M unlabeled rows of all workers.
    """
    directions = unit(features.detach())
    return directions @ distributed.gather_rows(directions, 0).T > threshold


def feature_contrast_loss(
    features: Tensor, labels: Tensor, temperature: float
) -> Tensor:
    """Return the contrastive loss of features in two views (InfoNCE and SupCon).

    For each row and view it is the mean, over its positives, of minus the log of a
    softmax over all other rows and views. The positives of a labeled row are both views
    of all rows of its class (Khosla et al., 2020, L_out). The positive of any other row
    is its other view (InfoNCE).

    Args:
        features: Unit features of this worker's rows, (2, B, D). They are compared with
            those of all workers.
        labels: Classes of the first B_l rows, int64 (B_l,). It may be empty.
        temperature: The divisor of the inner products.

    Returns:
        A scalar, the mean over this worker's rows and views.
    """
    rank, world_size = distributed.rank_and_world()
    num_rows = features.shape[1]
    place = rank * num_rows + torch.arange(num_rows, device=labels.device)
    # rows without a class have negative ids of their own
    ids = torch.cat([labels, -1 - place[len(labels) :]])
    all_ids = distributed.gather_rows(ids, 0).repeat(2)
    # (2 W B, D)
    everyone = distributed.gather_rows_with_grad(features, 1).flatten(0, 1)
    logits = features.flatten(0, 1) @ everyone.T / temperature
    own = torch.cat([place, place + num_rows * world_size])[:, None]
    itself = own == torch.arange(len(everyone), device=labels.device)
    log_p = logits.masked_fill(itself, -torch.inf).log_softmax(dim=1)
    positive = (ids.repeat(2)[:, None] == all_ids) & ~itself
    return -(torch.where(positive, log_p, 0.0).sum(dim=1) / positive.sum(dim=1)).mean()


def frozen_sample(config: Config, model: UnoModel, train: Any) -> Sample:
    """Compute a frozen encoder's features of training rows, to initialize a method.

    Args:
        config: The configuration of the run.
        model: The network, with the frozen encoder.
        train: The training set, a :class:`~uno.data.memory.TrainSet` or one that is
            streamed. It has ``num_novel``, the number of novel classes.

    Returns:
        Features and labels of a sample of labeled rows, and features of a sample of
        unlabeled rows, of the size that :func:`training_features` chooses.

    Raises:
        ConfigError: There are fewer unlabeled rows than novel classes.
    """
    sample = training_features(config, model, train)
    if len(sample.unlabeled) < train.num_novel:
        raise ConfigError(
            f"method {config.method} needs as many unlabeled rows as new classes"
            f" ({train.num_novel}), not {len(sample.unlabeled)}"
        )
    return sample


@torch.no_grad()
def set_prototypes_(model: UnoModel, prototypes: Tensor) -> None:
    """Set the prototypes of all known and novel classes of a model, in place.

    Args:
        model: A network with one novel head, which is changed.
        prototypes: A row for each class, (C_l + C_u, D), known classes first.
    """
    known, novel = prototypes.split([model.num_known, model.num_novel])
    model.known.weight.copy_(known)
    model.novel.weight[0].copy_(novel)


def cluster_centers(
    sample: Sample, num_novel: int, setting: str | None, seed: int
) -> Tensor:
    """Compute initial prototypes: means of known classes, and centers of clusters.

    Args:
        sample: Features of labeled and unlabeled rows.
        num_novel: The number of novel classes C_u.
        setting: "gcd" if unlabeled rows may belong to known classes, otherwise another
            text or None.
        seed: The seed of k-means.

    Returns:
        Rows of length one, (C_l + C_u, D): the means of the known classes, then the
        centers of the novel clusters of
        :func:`uno.clustering.initialization.cluster_features`.
    """
    labeled, labels, unlabeled = sample
    centers = cluster_features(
        unlabeled, labeled, labels, num_novel, setting, seed
    ).centers
    known = torch.zeros(int(labels.max()) + 1, centers.shape[1])
    set_to_class_means_(known, unit(labeled).float(), labels)
    return torch.cat([known, centers[-num_novel:]])
