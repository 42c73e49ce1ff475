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
from uno.text import plural


def forward_two_views(state: TrainState, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the outputs of the model for the first two large views of a batch.

    The prototypes are scaled to length one first, in place.

    Args:
        state: The state of training, with the model, which has one novel head.
        batch: The batch with at least two large views. Other views are not used.

    Returns:
        Three tensors: cosines with the prototypes of the known classes (2, B, C_l);
        logits of the novel head (2, B, C_u), before the division by tau; and features
        of the encoder, before the adapter, (2, B, D). Of a batch of cached features
        these are the given ones.
    """
    logits = forward(state, batch._replace(views=batch.views[:2], num_large=2))
    assert logits.novel is not None
    return logits.known, logits.novel[:, 0], logits.features


def pair_likelihood_loss(
    probabilities: Tensor, others: Tensor, similar: Tensor
) -> Tensor:
    """Return the binary cross-entropy, over pairs of rows, of being in one cluster.

    The probability of being in one cluster is <p_i, q_j> (Han et al., 2020, Eq. 2;
    Hsu et al., 2019, Eq. 1). 1e-7 is added inside the logarithm, as in both authors'
    code.

    Args:
        probabilities: Cluster probabilities p of this worker's rows in one view, (N,
            K).
        others: Cluster probabilities q of all workers' rows in the other view, (M, K).
        similar: Whether the rows of each pair should be in one cluster, bool (N, M).

    Returns:
        A scalar, the mean over all N M pairs.
    """
    together = probabilities @ others.T
    return -torch.where(similar, together + 1e-7, 1 - together + 1e-7).log().mean()


def sigmoid_rampup(progress: float, rampup: float) -> float:
    """Return the weight of a loss during a sigmoid ramp-up (Laine & Aila, 2017).

    Args:
        progress: The share of the phase that is done, 0-1.
        rampup: The share of the phase that the ramp takes, 0-1.

    Returns:
        ``exp(-5 (1 - t)^2)`` with t = ``progress / rampup``, from 0.0067 to 1. It is 1
        when ``progress`` has reached ``rampup``.
    """
    t = progress / rampup if progress < rampup and rampup else 1.0
    return math.exp(-5 * (1 - t) ** 2)


def similar_by_cosine(features: Tensor, threshold: float) -> Tensor:
    """Return which pairs of rows have features with a cosine above a threshold.

    The first row of a pair is one of this worker, and the second one of any worker,
    which may be the first row itself. All workers call this.

    Args:
        features: Features (N, D) of this worker's unlabeled rows, of any length. They
            get no gradient.
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

    A sample is one view of one row. Its loss is the mean, over its positives, of minus
    the log of a softmax over all other samples of all workers. The positives of a
    labeled row's sample are all other samples of its class (Khosla et al., 2020,
    L_out). The only positive of any other sample is the other view of its row
    (InfoNCE). All workers call this, and gradients reach the features of all of them.

    Args:
        features: Unit features of this worker's rows, (2, B, D).
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

    All workers call this.

    Args:
        config: The configuration of the run.
        model: The network, with the frozen encoder. It is in eval mode meanwhile.
        train: The training set, a :class:`~uno.data.memory.TrainSet` or one that is
            streamed. It has ``num_novel``, the number of novel classes.

    Returns:
        The features (N_l, D) of a sample of labeled rows, their known classes, int64
        (N_l,), and the features (N_u, D) of a sample of unlabeled rows, on the CPU.
        :func:`training_features` draws them, at most about 20,000 of each kind.

    Raises:
        ConfigError: The sample has fewer unlabeled rows than there are novel classes,
            no labeled or no unlabeled image can be read, or some known class has no
            readable image in the sample.
    """
    sample = training_features(config, model, train)
    require_every_class(config, sample, train.num_known)
    if len(sample.unlabeled) < train.num_novel:
        raise ConfigError(
            f"method {config.method} needs as many unlabeled rows as new classes"
            f" ({train.num_novel}), not {len(sample.unlabeled)}"
        )
    return sample


def require_every_class(config: Config, sample: Sample, num_known: int) -> None:
    """Check that a sample has a labeled row of every known class.

    A sample is drawn with a row of each class, but images can be unreadable.

    Args:
        config: The configuration of the run.
        sample: Features and labels of the readable rows.
        num_known: The number of known classes C_l.

    Raises:
        ConfigError: A class has no row.
    """
    lost = num_known - len(sample.labels.unique())
    if lost:
        raise ConfigError(
            f"method {config.method} needs a readable labeled image of every known"
            f" class; {plural(lost, 'class', 'classes')} had none in a sample; run uno"
            " data check, and repair or remove unreadable images"
        )


@torch.no_grad()
def set_prototypes_(model: UnoModel, prototypes: Tensor) -> None:
    """Set the prototypes of all known and novel classes of a model, in place.

    Args:
        model: A network with one novel head, which is changed.
        prototypes: A row for each class, (C_l + C_u, D), known classes first, where D
            is the number of features that the heads take. They are copied as they are,
            not scaled.
    """
    known, novel = prototypes.split([model.num_known, model.num_novel])
    model.known.weight.copy_(known)
    model.novel.weight[0].copy_(novel)


def cluster_centers(
    sample: Sample, num_novel: int, setting: str | None, seed: int
) -> Tensor:
    """Compute initial prototypes: means of known classes, and centers of clusters.

    Args:
        sample: Features (N, D) of labeled and of unlabeled rows, and the known classes
            of the labeled ones, on the CPU.
        num_novel: The number of novel classes C_u.
        setting: "gcd" if unlabeled rows may belong to known classes, otherwise another
            text or None.
        seed: The seed of k-means.

    Returns:
        Directions, float32 (C_l + C_u, D) on the CPU: the means of the labeled rows of
        each known class, then the means of the unlabeled rows of each novel cluster of
        :func:`uno.clustering.initialization.cluster_features`. Rows are scaled to
        length one before a mean is taken, and the mean is then scaled to length one,
        too. It is zeros if there is no row.
    """
    labeled, labels, unlabeled = sample
    centers = cluster_features(
        unlabeled, labeled, labels, num_novel, setting, seed
    ).centers
    known = torch.zeros(int(labels.max()) + 1, centers.shape[1])
    set_to_class_means_(known, unit(labeled).float(), labels)
    return torch.cat([known, centers[-num_novel:]])
