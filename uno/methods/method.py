"""The parts that several methods share."""

from typing import Any

import torch
from torch import Tensor, nn

from uno import collectives
from uno.config import Config
from uno.errors import ConfigError
from uno.heads import Prototypes, unit
from uno.model import UnoModel
from uno.prototype_init import (
    Sample,
    clusters_of,
    set_to_class_means_,
    training_features,
)
from uno.state import TrainState
from uno.steps import Batch, forward


class NovelHead(nn.Module):
    """Cosines of the feature to K prototypes, and a module that only the method's
    step calls, if any.
    """

    def __init__(
        self, num_novel: int, num_features: int, auxiliary: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.prototypes = Prototypes(1, num_novel, num_features)
        self.auxiliary = auxiliary

    @property
    def weight(self) -> Tensor:
        """(1, K, D)."""
        return self.prototypes.weight

    def forward(self, features: Tensor) -> Tensor:
        """(N, D) features -> (1, N, K) cosines."""
        return self.prototypes(features)


class AdaptedHead(NovelHead):
    """A linear layer on the feature, the identity at first, and cosines of its output
    to K prototypes.

    In the place of the encoder's last stage, which methods that shape features train
    (NCL's authors, like RS's, freeze the stages before it): the one layer that learns
    where only features are at hand.
    """

    def __init__(self, num_novel: int, num_features: int) -> None:
        super().__init__(num_novel, num_features)
        self.layer = nn.Linear(num_features, num_features)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """(N, D) features -> (1, N, K) cosines."""
        return self.prototypes(self.layer(features))


def learned_features(model: UnoModel, features: Tensor) -> Tensor:
    """Features (..., D) as the method shapes them: the encoder's own, or an
    :class:`AdaptedHead`'s.
    """
    head = model.novel
    return head.layer(features) if isinstance(head, AdaptedHead) else features


def forward_two_views(state: TrainState, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Known cosines (2, B, C_l), novel ones (2, B, C_u), features (2, B, D) of the
    first two large views.
    """
    logits = forward(state, batch._replace(views=batch.views[:2], num_large=2))
    assert logits.novel is not None and logits.features is not None
    return logits.known, logits.novel[:, 0], logits.features


def pair_likelihood_loss(
    probabilities: Tensor, others: Tensor, similar: Tensor
) -> Tensor:
    """Binary cross-entropy of "both rows are in one cluster", P = <p_i, q_j>; the mean
    over all pairs.

    p (N, K) of this worker's rows under one view, q (M, K) of all workers' under the
    other; ``similar`` (N, M) bool. Han et al. 2020, Eq. 2; Hsu et al. 2019, Eq. 1; 1e-7
    is the authors' in both.
    """
    together = probabilities @ others.T
    return -torch.where(similar, together + 1e-7, 1 - together + 1e-7).log().mean()


def similar_by_cosine(features: Tensor, threshold: float) -> Tensor:
    """Which unlabeled rows (N, D) have a cosine above ``threshold``: (N, M) bool, M
    of all workers.
    """
    directions = unit(features.detach())
    return directions @ collectives.gather_rows(directions, 0).T > threshold


def contrast_loss(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """-log of the softmax over all other rows and views, at the positives: their mean,
    a row's and a view's.

    Unit features (2, B, D), the first B_l rows of the classes ``labels`` (B_l,):
    positives of a labeled row are both views of its class (Khosla et al. 2020, L_out),
    of another its other view (InfoNCE). A scalar, of this worker's rows against those
    of all workers.
    """
    rank, world_size = collectives.rank_and_world()
    num_rows = features.shape[1]
    place = rank * num_rows + torch.arange(num_rows, device=labels.device)
    ids = torch.cat([labels, -1 - place[len(labels) :]])  # a class, or a row of its own
    all_ids = collectives.gather_rows(ids, 0).repeat(2)
    # (2 W B, D)
    everyone = collectives.gather_rows_with_grad(features, 1).flatten(0, 1)
    logits = features.flatten(0, 1) @ everyone.T / temperature
    own = torch.cat([place, place + num_rows * world_size])[:, None]
    itself = own == torch.arange(len(everyone), device=labels.device)
    log_p = logits.masked_fill(itself, -torch.inf).log_softmax(dim=1)
    positive = (ids.repeat(2)[:, None] == all_ids) & ~itself
    return -(torch.where(positive, log_p, 0.0).sum(dim=1) / positive.sum(dim=1)).mean()


def frozen_sample(config: Config, model: UnoModel, train: Any) -> Sample:
    """Features that a method starts from. ConfigError: fewer unlabeled rows than new
    classes.
    """
    model.eval()
    sample = training_features(config, model, train)
    model.train()
    if (found := len(sample.unlabeled)) < train.num_novel:
        need = f"as many unlabeled rows as new classes ({train.num_novel}), not {found}"
        raise ConfigError(f"method {config.method} needs {need}")
    return sample


@torch.no_grad()
def set_prototypes_(model: UnoModel, prototypes: Tensor) -> None:
    """Set the known prototypes of ``model``, and those of its one novel head, to rows
    (C_l + C_u, D).
    """
    known, novel = prototypes.split([model.num_known, model.num_novel])
    model.known.weight.copy_(known)
    model.novel.weight[0].copy_(novel)


def cluster_centers(
    sample: Sample, num_novel: int, setting: str | None, seed: int
) -> Tensor:
    """Centers (C_l + C_u, D) of length one, on the CPU: the means of the known classes,
    then of the clusters of :func:`uno.prototype_init.clusters_of` that are new.
    """
    labeled, labels, unlabeled = sample
    centers = clusters_of(unlabeled, labeled, labels, num_novel, setting, seed).centers
    known = torch.zeros(int(labels.max()) + 1, centers.shape[1])
    set_to_class_means_(known, unit(labeled).float(), labels)
    return torch.cat([known, centers[-num_novel:]])
