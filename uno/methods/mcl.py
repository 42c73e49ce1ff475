"""MCL: meta classification likelihood (Hsu et al., "Multi-class classification without multi-class labels",
ICLR 2019; code L2C, where it is called CCL).

The novel head maximises the likelihood of what a similarity network (:mod:`uno.methods.pairs`) says of every
pair of unlabeled rows; labeled rows train the known head. Known constant, from the authors' code: 1e-7 inside
the logarithm. That the three terms weigh one each is our choice: in the paper they are trained one after the
other. Pairs are (view 0, view 1) where the authors have one view.
"""

from torch import Tensor

from uno import collectives
from uno.config import ObjectiveConfig
from uno.methods.method import Method, forward_two_views, novel_probabilities, pair_likelihood_loss
from uno.methods.pairs import pair_head, similar_pairs, similarity_loss
from uno.objective import labeled_loss
from uno.state import TrainState
from uno.steps import Batch, update_


def step(state: TrainState, batch: Batch, objective: ObjectiveConfig, lr: float) -> Tensor:
    """Cross-entropy of labeled rows + that of their pairs + likelihood of unlabeled pairs. Returns (1,)."""
    num_labeled, tau = len(batch.labels), objective.temperature
    logits = forward_two_views(state, batch)
    assert logits.features is not None
    similarity = state.model.novel.auxiliary
    first, second = novel_probabilities(logits, num_labeled, tau)
    loss = (
        labeled_loss(logits.known, batch.labels, tau)
        + similarity_loss(similarity, logits.features[:, :num_labeled], batch.labels)
        + pair_likelihood_loss(
            first,
            collectives.gather_rows_with_grad(second, 0),
            similar_pairs(similarity, logits.features[:, num_labeled:]),
        )
    )
    return update_(state, loss, lr)


METHOD = Method(step, pair_head)
