"""MCL: meta classification likelihood (Hsu et al., "Multi-class classification without
multi-class labels", ICLR 2019; code L2C, where it is called CCL).

The novel head maximizes the likelihood of what a similarity network
(:mod:`uno.methods.pairs`) says of every pair of unlabeled rows. Known constant, from
the authors' code: 1e-7 inside the logarithm.
"""

from functools import partial

from torch import Tensor

from uno import collectives
from uno.methods import Method, pairs
from uno.methods.method import pair_likelihood_loss


def likelihood(
    first: Tensor, second: Tensor, similarity: pairs.PairSimilarity, features: Tensor
) -> Tensor:
    """Of the similarities, from the rows' probabilities (B_u, C_u) under two views;
    features (2, B_u, D).
    """
    similar = pairs.similar_pairs(similarity, features)
    return pair_likelihood_loss(
        first, collectives.gather_rows_with_grad(second, 0), similar
    )


METHOD = Method("mcl", partial(pairs.step, likelihood), pairs.pair_head)
