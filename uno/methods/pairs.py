"""A network that says whether two images are of one class, learned from the labeled
rows: KCL and MCL use it.

Hsu et al. train it first, on its own network, and freeze it; then unlabeled rows alone
train. Here it is trained in the same run, on the detached features of the network that
is being trained, from the pairs of labeled rows of each batch: one network instead of
two, it follows the features where they go, and the known head stays. On the
digits, the authors' order was no better than this one.

Its form is that of the authors' code, a hidden layer of 4 D units on both features side
by side (at most the 2,048 of their 512 features: every pair of a batch passes through
it), without its BatchNorm; features are normalized to length one. All pairs of a batch
count alike, so it is taken for granted that novel classes are about as many as known
ones; a pair is similar where its probability exceeds 1/2. The three terms of a step
weigh one each, and pairs are of (view 0, view 1), where the authors have one view: both
are our choice.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from uno import collectives
from uno.config import Config
from uno.heads import unit
from uno.methods.method import NovelHead, forward_two_views
from uno.state import TrainState
from uno.steps import Batch, labeled_loss, update_

MOST_HIDDEN = 2048
# hidden values of pairs, which backward computes again: in a cache, not in memory
MOST_AT_ONCE = 2**21


class PairSimilarity(nn.Module):
    """Logit of "one class" for every pair of two sets of features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        num_hidden = min(4 * num_features, MOST_HIDDEN)
        self.left = nn.Linear(num_features, num_hidden)
        self.right = nn.Linear(num_features, num_hidden, bias=False)
        self.output = nn.Linear(num_hidden, 1)

    def forward(self, features: Tensor, others: Tensor) -> Tensor:
        """(N, D) and (M, D) -> (N, M); a linear layer on both side by side is a sum
        of two.
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
        """Hidden parts of both sides, (n, hidden) and (M, hidden), -> (n, M)."""
        return self.output((left[:, None] + right[None]).relu_()).squeeze(-1)


PairTerm = Callable[[Tensor, Tensor, PairSimilarity, Tensor], Tensor]


def pair_head(num_novel: int, num_features: int) -> nn.Module:
    """The novel head, and the similarity network as its auxiliary part."""
    return NovelHead(num_novel, num_features, PairSimilarity(num_features))


def step(
    term: PairTerm, state: TrainState, batch: Batch, config: Config, lr: float
) -> Tensor:
    """Cross-entropy of labeled rows + that of their pairs + ``term`` of unlabeled
    pairs. Returns (1,).
    """
    num_labeled, tau = len(batch.labels), config.objective.temperature
    known, novel, features = forward_two_views(state, batch)
    similarity, (first, second) = (
        state.model.novel.auxiliary,
        (novel[:, num_labeled:] / tau).softmax(dim=-1),
    )
    loss = (
        labeled_loss(known, batch.labels, tau)
        + similarity_loss(similarity, features[:, :num_labeled], batch.labels)
        + term(first, second, similarity, features[:, num_labeled:])
    )
    return update_(state, loss, lr)


def similarity_loss(
    similarity: PairSimilarity, features: Tensor, labels: Tensor
) -> Tensor:
    """Binary cross-entropy over pairs of labeled rows, view 0 of ours, view 1 of all
    workers', detached.
    """
    others, other_labels = (
        collectives.gather_rows(t, 0) for t in (features[1].detach(), labels)
    )
    same = (labels[:, None] == other_labels[None]).float()
    return F.binary_cross_entropy_with_logits(
        similarity(features[0].detach(), others), same
    )


@torch.no_grad()
def similar_pairs(similarity: PairSimilarity, features: Tensor) -> Tensor:
    """Which pairs of unlabeled rows it calls similar: (2, B_u, D) -> (B_u, B_u of
    all workers) bool.
    """
    return similarity(features[0], collectives.gather_rows(features[1], 0)) > 0
