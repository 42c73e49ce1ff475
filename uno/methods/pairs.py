"""The similarity network of KCL and MCL, which is learned from labeled rows.

It decides whether two images are of one class. Hsu et al. train it first, with its own
encoder, and freeze it. Then only unlabeled rows train. Here it is trained in the same
run, from the pairs of labeled rows of each batch, on the detached features of the
network that is being trained. So there is one network instead of two, the similarity
follows the features as they change, and the known head stays. On the digits, the
authors' order was no better than this one.

Its form is that of the authors' code: a hidden layer of 4 D units on both features side
by side (at most 2,048, which are those of their 512 features, because every pair of a
batch passes through it). It has no BatchNorm, and features are normalized to length
one. All pairs of a batch have the same weight, so novel classes are assumed to be about
as many as known ones. A pair is similar if its probability exceeds 1/2. The three terms
of a step have the weight 1 each, and pairs are of (view 0, view 1), where the authors
have one view. Both are our choice.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from uno import distributed
from uno.config import Config
from uno.heads import NovelHead, unit
from uno.method import Method
from uno.methods.common import forward_two_views
from uno.steps import Batch, TrainState, labeled_loss

MOST_HIDDEN = 2048
# hidden values that are computed at once, so that they fit into a cache
MOST_AT_ONCE = 2**21


class PairSimilarity(nn.Module):
    """A network that decides for pairs of features whether both are of one class.

    It maps two sets of features to a logit for every pair. It has one hidden layer with
    ReLU on both features side by side, of 4 D units, at most 2,048.

    Args:
        num_features: The number of features D.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        num_hidden = min(4 * num_features, MOST_HIDDEN)
        self.left = nn.Linear(num_features, num_hidden)
        self.right = nn.Linear(num_features, num_hidden, bias=False)
        self.output = nn.Linear(num_hidden, 1)

    def forward(self, features: Tensor, others: Tensor) -> Tensor:
        """Compute for each pair of rows the logit that both are of one class.

        Features are scaled to length one first. The linear layer on two features side
        by side is computed as the sum of two layers. If there are many pairs, hidden
        values are computed again in the backward pass, to save memory.

        Args:
            features: Features of the first row of each pair, (N, D).
            others: Features of the second row of each pair, (M, D).

        Returns:
            Logits (N, M), positive if the network takes a pair for one class.
        """
        left, right = (
            self.left(unit(features.float())),
            self.right(unit(others.float())),
        )
        parts = left.split(max(1, MOST_AT_ONCE // max(1, right.numel())))
        if len(parts) == 1:
            return self._logits(left, right)
        part_of = partial(
            checkpoint, self._logits, use_reentrant=False, preserve_rng_state=False
        )
        return torch.cat([part_of(part, right) for part in parts])

    def _logits(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute the logits of pairs of rows from both parts of the hidden layer.

        Args:
            left: The linear layer's output for the first rows of pairs, (n, hidden).
            right: The linear layer's output for the second rows, (M, hidden).

        Returns:
            Logits (n, M). They are the output layer on the ReLU of the sum of both
            parts.
        """
        return self.output((left[:, None] + right[None]).relu_()).squeeze(-1)


class PairMethod(Method):
    """A method whose unlabeled rows learn from the pairs that a network calls similar.

    The loss is the sum of the cross-entropy of labeled rows, the loss of the similarity
    network, and :meth:`pair_loss`.
    """

    def build_head(
        self, num_novel: int, num_features: int, is_frozen: bool
    ) -> NovelHead:
        """Build the novel head, with a :class:`PairSimilarity` as auxiliary module.

        The auxiliary module is trained with the head, but only the loss calls it.

        Args:
            num_novel: The number of novel classes.
            num_features: The number of features.
            is_frozen: Whether the encoder is frozen, which does not matter here.
        """
        return NovelHead(num_novel, num_features, PairSimilarity(num_features))

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the sum of three losses of a batch.

        They are the cross-entropy of labeled rows in the known head; the binary
        cross-entropy of the similarity network on pairs of labeled rows, which trains
        this network alone; and :meth:`pair_loss` of pairs of unlabeled rows, for which
        the network only decides which rows are similar. The prototypes of the model are
        scaled to length one first, in place. All workers call this.

        Args:
            state: The state of training, with the model.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        num_labeled, tau = len(batch.labels), config.objective.temperature
        known, novel, features = forward_two_views(state, batch)
        similarity = state.model.novel.auxiliary
        first, second = (novel[:, num_labeled:] / tau).softmax(dim=-1)
        return (
            labeled_loss(known, batch.labels, tau)
            + similarity_loss(similarity, features[:, :num_labeled], batch.labels)
            + self.pair_loss(first, second, similarity, features[:, num_labeled:])
        )

    def pair_loss(
        self,
        first: Tensor,
        second: Tensor,
        similarity: PairSimilarity,
        features: Tensor,
    ) -> Tensor:
        """Compute the loss of pairs of unlabeled rows.

        A subclass must define this; this class raises NotImplementedError.

        Args:
            first: Cluster probabilities of this worker's unlabeled rows in view 0,
                (B_u, C_u).
            second: The same in view 1.
            similarity: The similarity network, which decides which rows are similar.
            features: Features of these rows in both views, (2, B_u, D).

        Returns:
            A scalar, the mean over pairs with the unlabeled rows of all workers.
        """
        raise NotImplementedError


def similarity_loss(
    similarity: PairSimilarity, features: Tensor, labels: Tensor
) -> Tensor:
    """Return the binary cross-entropy of the similarity network on labeled rows.

    A pair consists of view 0 of a row of this worker and view 1 of a row of any worker.
    The target is 1 if both rows have the same label. All workers call this.

    Args:
        similarity: The similarity network.
        features: Features of this worker's labeled rows in both views, (2, B_l, D).
            They get no gradient.
        labels: Classes of these rows, int64 (B_l,).

    Returns:
        A scalar, the mean over pairs.
    """
    others, other_labels = (
        distributed.gather_rows(t, 0) for t in (features[1].detach(), labels)
    )
    same = (labels[:, None] == other_labels[None]).float()
    return F.binary_cross_entropy_with_logits(
        similarity(features[0].detach(), others), same
    )


@torch.no_grad()
def similar_pairs(similarity: PairSimilarity, features: Tensor) -> Tensor:
    """Return which pairs of unlabeled rows are of one class by the similarity network.

    All workers call this. There is no gradient.

    Args:
        similarity: The similarity network.
        features: Features of this worker's unlabeled rows in both views, (2, B_u, D).

    Returns:
        A mask, bool (B_u, M), for view 0 of this worker's rows and view 1 of the M
        unlabeled rows of all workers: True if the probability exceeds 1/2.
    """
    return similarity(features[0], distributed.gather_rows(features[1], 0)) > 0
