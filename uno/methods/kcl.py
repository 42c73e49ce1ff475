"""KCL: KLD-based contrastive loss (Hsu et al., "Learning to cluster in order to transfer across domains and
tasks", ICLR 2018; code L2C).

The outputs of two unlabeled rows should have a small KL divergence where a similarity network
(:mod:`uno.methods.pairs`) calls them similar, one above a margin where it does not. Known constants, from the
authors' code: margin 2, 1e-7 added to probabilities, no gradient to the distribution that is the target, both
orders of a pair. That the three terms weigh one each is our choice: in the paper they are trained one after
the other. Pairs are (view 0, view 1) where the authors have one view.
"""

import torch
from torch import Tensor

from uno import collectives
from uno.config import ObjectiveConfig
from uno.methods.method import Method, forward_two_views, novel_probabilities
from uno.methods.pairs import pair_head, similar_pairs, similarity_loss
from uno.objective import labeled_loss
from uno.state import TrainState
from uno.steps import Batch, update_

MARGIN = 2.0


def step(state: TrainState, batch: Batch, objective: ObjectiveConfig, lr: float) -> Tensor:
    """Cross-entropy of labeled rows + that of their pairs + contrast of unlabeled pairs. Returns (1,)."""
    num_labeled, tau = len(batch.labels), objective.temperature
    logits = forward_two_views(state, batch)
    assert logits.features is not None
    similarity, features = state.model.novel.auxiliary, logits.features[:, num_labeled:]
    first, second = novel_probabilities(logits, num_labeled, tau)
    contrast = contrastive_loss(first, second, similar_pairs(similarity, features))
    contrast = contrast + contrastive_loss(second, first, similar_pairs(similarity, features.flip(0)))
    loss = (
        labeled_loss(logits.known, batch.labels, tau)
        + similarity_loss(similarity, logits.features[:, :num_labeled], batch.labels)
        + contrast / 2
    )
    return update_(state, loss, lr)


def contrastive_loss(probabilities: Tensor, targets: Tensor, similar: Tensor) -> Tensor:
    """Mean over pairs of KL(q_j || p_i) where similar, else max(0, margin - KL(q_j || p_i)).

    Args:
        probabilities: p (N, K) of this worker's rows under one view.
        targets: q (N, K) of the same rows under the other view; gathered from all workers, M rows, detached.
        similar: (N, M) bool.

    Returns:
        Scalar.
    """
    log_p = (probabilities + 1e-7).log()
    q = collectives.gather_rows(targets.detach(), 0) + 1e-7
    divergence = (q * q.log()).sum(dim=-1) - log_p @ q.T  # (N, M)
    return torch.where(similar, divergence, (MARGIN - divergence).relu()).mean()


METHOD = Method(step, pair_head)
