"""The discovery method OpenMix (Zhong et al., CVPR 2021; arXiv 2004.05551).

The paper is "OpenMix: reviving known knowledge for discovering novel visual categories
in an open world". Labeled rows have a cross-entropy. Unlabeled rows have a pairwise
one, and pairs are similar above a cosine of their features. In addition the network
learns mixed images, over all C classes at once. Each labeled image is mixed with a
smaller share of a random unlabeled one. Its target is mixed in the same way, from the
label [y, 0] and the novel head's probabilities of the other image, [0, p]. Each
unlabeled image is mixed with a smaller share of another one, too, if its own class is
clear: such reliable anchors teach the others. The squared error of the joint softmax
with these targets has a weight that rises.

No code was published. From the paper, at second hand: the cosine 0.95; the share of the
labeled image max(l, 1 - l) with l from a Beta distribution; anchors above a probability
of 0.9; the rise; and the start by clustering. The other constants are not known to us,
so they are ours (record ``2026-11-22_methods-three``): Beta(1, 1); weight 1; squares
are summed over classes, and their mean is over rows; the rise takes a quarter of the
phase, as the consistency of RS, which is kept; the mixed image and the targets are
those of view 0; the partner of an anchor is any unlabeled row. Partners come from the
batch of all workers, whose images are gathered for this. A generator of the step draws
them. On cached features the features are mixed, not pixels, as in manifold mixup (Verma
et al., ICML 2019).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uno import distributed
from uno.clustering.initialization import cluster_features, training_features
from uno.config import Config
from uno.data.stream import TrainData
from uno.method import Method
from uno.methods import rs
from uno.methods.common import sigmoid_rampup, similar_by_cosine
from uno.model import UnoModel
from uno.steps import Batch, TrainState, forward

ANCHOR = 0.9  # probability from which an unlabeled row is an anchor
BETA = 1.0
WEIGHT = 1.0


class OpenMix(Method):
    """OpenMix: learn from pairs of unlabeled rows and from mixed images.

    Each labeled image, and each unlabeled one with a clear class, is mixed with another
    unlabeled image. Its target is mixed in the same way.
    """

    name = "openmix"
    constants = rs.CosineConstants
    constants_of_preset = rs.SETTINGS

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the pairwise loss of a batch, plus a squared error of mixed images.

        The pairwise loss is :func:`uno.methods.rs.loss_of_pairs`, where two unlabeled
        rows are similar if the cosine of their features in view 0 exceeds
        ``openmix.threshold``. View 0 of each row, pixels or cached features, is mixed
        with view 0 of an unlabeled row of any worker, see :func:`draw_mixtures`. The
        squared error of the probabilities of all C classes for this mixture with the
        targets of :func:`mixed_targets` is summed over classes. The targets come from
        the labels and from view 0, without gradient. The mean is over all rows, but the
        error of an unlabeled row counts as 0 unless one of its novel classes has a
        probability above 0.9. The weight of this error rises to 1 within the first
        share ``rampup`` of the phase, see :func:`uno.methods.common.sigmoid_rampup`.
        The prototypes of the model are scaled to length one first, in place. All
        workers call this.

        Args:
            state: The state of training, with the model.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        num_labeled, tau = len(batch.labels), config.objective.temperature
        clean = batch.views[0]
        partner, share = (
            drawn.to(state.device, non_blocking=True)
            for drawn in draw_mixtures(state.step, num_labeled, len(clean))
        )
        weights = share.to(clean.dtype).view(-1, *[1] * (clean.ndim - 1))
        unlabeled = distributed.gather_rows(clean[num_labeled:], 0)
        mixed = weights * clean + (1 - weights) * unlabeled[partner]
        logits = forward(
            state, batch._replace(views=[*batch.views[:2], mixed], num_large=3)
        )
        assert logits.novel is not None
        known, novel = logits.known, logits.novel[:, 0]
        similar = similar_by_cosine(
            logits.features[0, num_labeled:], config.method_options.threshold
        )
        pair_loss = rs.loss_of_pairs(
            state, batch.labels, config, known[:2], novel[:2], similar
        )
        joint = (torch.cat([known[2], novel[2]], dim=-1) / tau).softmax(dim=-1)
        own = (novel[0, num_labeled:].detach() / tau).softmax(dim=-1)
        targets, counts = mixed_targets(
            batch.labels, own, partner, share, known.shape[-1]
        )
        # the mean is over all rows, also over those that do not count
        mixed_loss = ((joint - targets).square().sum(dim=1) * counts).mean()
        ramp = sigmoid_rampup(state.progress, config.method_options.rampup)
        return pair_loss + WEIGHT * ramp * mixed_loss

    @torch.no_grad()
    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Set the novel prototypes to the centers of k-means clusters.

        The features of a sample of the unlabeled rows are divided into as many clusters
        as there are novel classes, see
        :func:`uno.clustering.initialization.cluster_features`. The center of a cluster
        is the mean of its rows, where rows and mean are scaled to length one. All
        workers call this; rank 0 clusters.

        Args:
            config: The configuration of the run.
            model: The network. Its novel prototypes are changed.
            train: The training data.

        Returns:
            An empty mapping: the method keeps no tensors.

        Raises:
            ConfigError: No labeled or no unlabeled image can be read.
        """
        labeled, labels, unlabeled = training_features(config, model, train)

        def compute() -> dict[str, Tensor]:
            """Return "centers", those of the k-means clusters of unlabeled rows."""
            clusters = cluster_features(
                unlabeled, labeled, labels, train.num_novel, "ncd", config.seed
            )
            return {"centers": clusters.centers}

        start = distributed.compute_on_rank0(compute, model.novel.weight.device)
        model.novel.weight.copy_(start["centers"][None])
        return {}


def draw_mixtures(step: int, num_labeled: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Draw for each image of a batch which unlabeled image it is mixed with, and how.

    The draw depends on the step alone. An image of the global batch has the same
    partner and share for any number of workers.

    Args:
        step: The number of the step, the seed of the draw.
        num_labeled: The number of labeled rows of this worker.
        num_rows: The number of all rows B of this worker.

    Returns:
        Two tensors on the CPU, labeled rows first. The first has the partner of each
        row: an index among the unlabeled rows of the global batch, int64 (B,), which
        can be that of the row itself; all are equally likely. The second has the weight
        of the row itself in the mixture, float64 (B,), 0.5-1: max(l, 1 - l), where l is
        drawn from Beta(1, 1). The partner has the rest.
    """
    rank, world_size = distributed.rank_and_world()
    random = np.random.default_rng(step)
    partners, shares = list[Tensor](), list[Tensor]()
    num_unlabeled = (num_rows - num_labeled) * world_size
    for size in (num_labeled, num_rows - num_labeled):
        total = size * world_size
        partner = torch.from_numpy(random.integers(num_unlabeled, size=total))
        share = torch.from_numpy(random.beta(BETA, BETA, total))
        partners.append(partner.chunk(world_size)[rank])
        shares.append(share.chunk(world_size)[rank])
    share = torch.cat(shares)
    return torch.cat(partners), torch.maximum(share, 1 - share)


def mixed_targets(
    labels: Tensor, own: Tensor, partner: Tensor, share: Tensor, num_known: int
) -> tuple[Tensor, Tensor]:
    """Compute the targets of images that are mixed with unlabeled ones.

    The target of a row is ``share`` times its own target plus 1 - ``share`` times the
    target of its partner. The target of a labeled row is its label, and the target of
    an unlabeled row is the novel head's probabilities, which are zero at known classes.
    All workers call this.

    Args:
        labels: Classes of the labeled rows, int64 (B_l,).
        own: The novel head's probabilities of this worker's unlabeled rows, (B_u, C_u).
        partner: The row that is mixed into each row, an index among the unlabeled rows
            of the global batch, int64 (B,).
        share: The weight of the row itself in the mixture, (B,), 0-1.
        num_known: The number of known classes.

    Returns:
        Two tensors. The first has the targets (B, C), labeled rows first. The second is
        a mask of the rows that count in the loss, bool (B,): all labeled rows, and
        unlabeled rows that have a novel class with a probability above 0.9.
    """
    of_labeled = F.one_hot(labels, num_known + own.shape[1]).to(own.dtype)
    own_targets = torch.cat([of_labeled, F.pad(own, (num_known, 0))])
    partner_targets = F.pad(distributed.gather_rows(own, 0)[partner], (num_known, 0))
    share = share.to(own.dtype)[:, None]
    is_labeled = torch.ones_like(labels, dtype=torch.bool)
    counts = torch.cat([is_labeled, own.amax(dim=1) > ANCHOR])
    return share * own_targets + (1 - share) * partner_targets, counts


METHOD = OpenMix()
