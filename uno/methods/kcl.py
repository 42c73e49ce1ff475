"""The discovery method KCL: KLD-based contrastive loss (Hsu et al., ICLR 2018).

The paper is "Learning to cluster in order to transfer across domains and tasks", and
the code L2C. The outputs of two unlabeled rows should have a small KL divergence if a
similarity network (:mod:`uno.methods.pairs`) calls them similar, and one above a margin
if it does not.

Known constants, from the authors' code: the margin is 2, 1e-7 is added to
probabilities, the distribution that is the target has no gradient, and both orders of a
pair count.
"""

import torch
from torch import Tensor

from uno import distributed
from uno.methods import pairs

MARGIN = 2.0


class Kcl(pairs.PairMethod):
    """KCL: a contrastive loss of pairs that a similarity network decides on.

    The outputs of two unlabeled rows should have a small KL divergence if the network
    calls them similar, and one above a margin if it does not.
    """

    name = "kcl"

    def pair_loss(
        self,
        first: Tensor,
        second: Tensor,
        similarity: pairs.PairSimilarity,
        features: Tensor,
    ) -> Tensor:
        """Compute the contrastive loss of KCL for pairs of unlabeled rows.

        The loss of a pair is that of :func:`contrastive_loss`: the KL divergence of
        both rows if they are similar, and otherwise what it lacks to the margin 2. All
        workers call this.

        Args:
            first: Cluster probabilities of this worker's unlabeled rows in view 0,
                (B_u, C_u).
            second: The same in view 1.
            similarity: The network that decides which rows are similar.
            features: Features of these rows in both views, (2, B_u, D).

        Returns:
            A scalar, the mean over pairs with the unlabeled rows of all workers, and
            over both orders of the two views. In each order the network decides anew
            which rows are similar, and the view that comes second is the target,
            without gradient. So each view gets a gradient in one of the two orders.
        """
        similar = pairs.similar_pairs(similarity, features)
        similar_back = pairs.similar_pairs(similarity, features.flip(0))
        forth = contrastive_loss(first, second, similar)
        back = contrastive_loss(second, first, similar_back)
        return (forth + back) / 2


def contrastive_loss(probabilities: Tensor, targets: Tensor, similar: Tensor) -> Tensor:
    """Return the contrastive loss of pairs, with a margin on the KL divergence.

    The loss of a similar pair (i, j) of rows is KL(q_j || p_i), and that of any other
    pair is max(0, 2 - KL(q_j || p_i)). 1e-7 is added to all probabilities.

    Args:
        probabilities: Cluster probabilities p of this worker's rows in one view, (N,
            K).
        targets: Cluster probabilities q of this worker's rows in the other view. Those
            of all workers are gathered, M rows, without gradient.
        similar: Which pairs are similar, bool (N, M).

    Returns:
        A scalar, the mean loss of all N M pairs.
    """
    log_p = (probabilities + 1e-7).log()
    q = distributed.gather_rows(targets.detach(), 0) + 1e-7
    divergence = (q * q.log()).sum(dim=-1) - log_p @ q.T  # (N, M)
    return torch.where(similar, divergence, (MARGIN - divergence).relu()).mean()


METHOD = Kcl()
