"""KCL: KLD-based contrastive loss (Hsu et al., "Learning to cluster in order to
transfer across domains and tasks", ICLR 2018; code L2C).

The outputs of two unlabeled rows should have a small KL divergence where a similarity
network (:mod:`uno.methods.pairs`) calls them similar, one above a margin where it does
not. Known constants, from the authors' code: margin 2, 1e-7 added to probabilities, no
gradient to the distribution that is the target, both orders of a pair.
"""

from functools import partial

import torch
from torch import Tensor

from uno import collectives
from uno.methods import Method, pairs

MARGIN = 2.0


def contrast(
    first: Tensor, second: Tensor, similarity: pairs.PairSimilarity, features: Tensor
) -> Tensor:
    """Of both orders, from the rows' probabilities (B_u, C_u) under two views;
    features (2, B_u, D).
    """
    forth = contrastive_loss(first, second, pairs.similar_pairs(similarity, features))
    back = contrastive_loss(
        second, first, pairs.similar_pairs(similarity, features.flip(0))
    )
    return (forth + back) / 2


def contrastive_loss(probabilities: Tensor, targets: Tensor, similar: Tensor) -> Tensor:
    """Mean over pairs of KL(q_j || p_i) where similar, else max(0, margin - KL(q_j ||
    p_i)).

    p (N, K) of this worker's rows under one view; q (N, K) under the other, gathered
    from all workers, M rows, detached; similar (N, M) bool.
    """
    log_p = (probabilities + 1e-7).log()
    q = collectives.gather_rows(targets.detach(), 0) + 1e-7
    divergence = (q * q.log()).sum(dim=-1) - log_p @ q.T  # (N, M)
    return torch.where(similar, divergence, (MARGIN - divergence).relu()).mean()


METHOD = Method("kcl", partial(pairs.step, contrast), pairs.pair_head)
