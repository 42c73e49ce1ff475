"""MCL: meta classification likelihood (Hsu et al., ICLR 2019; code L2C, there CCL).

The paper is "Multi-class classification without multi-class labels". A similarity
network (:mod:`uno.methods.pairs`) decides for every pair of unlabeled rows whether they
are similar, and the novel head maximizes the likelihood of these decisions. Known
constant, from the authors' code: 1e-7 inside the logarithm.
"""

from functools import partial

from torch import Tensor

from uno import collectives
from uno.methods import Method, pairs
from uno.methods.method import pair_likelihood_loss


def likelihood(
    first: Tensor, second: Tensor, similarity: pairs.PairSimilarity, features: Tensor
) -> Tensor:
    """Return the negative log-likelihood of the similarities of unlabeled rows.

    Args:
        first: Cluster probabilities of this worker's unlabeled rows in view 0, (B_u,
            C_u).
        second: The same in view 1.
        similarity: The similarity network, which decides which rows are similar.
        features: Features of these rows in both views, (2, B_u, D).

    Returns:
        A scalar, the mean over pairs with the unlabeled rows of all workers.
    """
    similar = pairs.similar_pairs(similarity, features)
    return pair_likelihood_loss(
        first, collectives.gather_rows_with_grad(second, 0), similar
    )


METHOD = Method("mcl", partial(pairs.step, likelihood), pairs.pair_head)
