"""The discovery method MCL: meta classification likelihood (Hsu et al., ICLR 2019).

The paper is "Multi-class classification without multi-class labels", and the code L2C,
where the method is named CCL. A similarity network (:mod:`uno.methods.pairs`) decides
for every pair of unlabeled rows whether they are similar, and the novel head maximizes
the likelihood of these decisions. Known constant, from the authors' code: 1e-7 inside
the logarithm.
"""

from torch import Tensor

from uno import distributed
from uno.methods import pairs
from uno.methods.common import pair_likelihood_loss


class Mcl(pairs.PairMethod):
    """MCL: maximize the likelihood of a similarity network's decisions on pairs.

    The network learns from labeled rows whether two rows are of one class. The pairs
    whose likelihood counts are those of unlabeled rows.
    """

    name = "mcl"

    def pair_loss(
        self,
        first: Tensor,
        second: Tensor,
        similarity: pairs.PairSimilarity,
        features: Tensor,
    ) -> Tensor:
        """Compute the loss of MCL for pairs of unlabeled rows.

        It is the negative log-likelihood of the similarity network's decisions on pairs
        of a row in view 0 and a row in view 1, see
        :func:`uno.methods.common.pair_likelihood_loss`. Both views get a gradient, and
        the network gets none. All workers call this.

        Args:
            first: Cluster probabilities of this worker's unlabeled rows in view 0,
                (B_u, C_u).
            second: The same in view 1.
            similarity: The network that decides which rows are similar.
            features: Features of these rows in both views, (2, B_u, D).

        Returns:
            A scalar, the mean over pairs with the unlabeled rows of all workers.
        """
        similar = pairs.similar_pairs(similarity, features)
        others = distributed.gather_rows_with_grad(second, 0)
        return pair_likelihood_loss(first, others, similar)


METHOD = Mcl()
