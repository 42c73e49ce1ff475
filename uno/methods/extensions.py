"""Terms that later work adds to UNO's objective: IIC, rKD, and a queue for Sinkhorn.

All of them are off by default. They use the cosines of a step: known (V, B, C_l), and
novel (V, H, B, C_u) of the cluster heads, where the first B_l rows are labeled. With
several workers, the mean over workers of each term, and of its gradient, is that of the
global batch.

The teacher of rKD is the pretrained network. If a frozen encoder has weights without a
head for the known classes, it is this encoder with a known head, which learns on
labeled rows for the epochs of pretraining, before discovery.
"""

from itertools import combinations

import torch
from torch import Tensor

from uno.distributed import gather_rows, mean_with_grad
from uno.steps import TrainState


@torch.no_grad()
def past_logits(state: TrainState, directions: Tensor) -> list[Tensor] | None:
    """Compute the cosines of queued rows with prototypes, then queue the new rows.

    The queue is that of SwAV (Caron et al., 2020, App. A), for batches with few rows
    for each cluster. As there, it takes part late: when earlier steps have filled it
    and the warm-up is over. The new rows, those of all workers, are put in at every
    step, but their cosines are not in the result. All workers call this.

    Args:
        state: The state of training. ``state.extra["queue"]`` (V_large, H, Q, P or 2P)
            is replaced. It holds the projections of Q rows by cluster heads and
            overclustering heads side by side, newest first, the same on all workers.
            Each number that is not finite becomes 0.
        directions: Projections of this worker's unlabeled rows at length one, (V_large,
            H or 2H, B_u, P): those of the cluster heads, then of the overclustering
            heads.

    Returns:
        Cosines (V_large, H, Q, K) of the rows that were in the queue before this call
        with the K present prototypes of each head: one tensor for the cluster heads,
        then one for the overclustering heads, which have another K, if any. None as
        long as the queue takes no part.
    """
    queue, heads = (
        state.extra["queue"],
        [h for h in (state.model.novel, state.model.over) if h is not None],
    )
    rows = gather_rows(torch.cat(directions.chunk(len(heads), dim=1), dim=-1), dim=2)
    newest = torch.cat([rows.to(queue.dtype), queue], dim=2)[:, :, : queue.shape[2]]
    # values of a step that was not finite must not stay in the queue
    state.extra["queue"] = newest.nan_to_num(0.0, 0.0, 0.0)
    if state.step < state.warmup_steps or state.step * rows.shape[2] < queue.shape[2]:
        return None
    return [
        head.cosines(own)
        for head, own in zip(heads, queue.chunk(len(heads), dim=-1), strict=True)
    ]


def iic_loss(
    known: Tensor, novel: Tensor, num_labeled: int, temperature: float
) -> Tensor:
    """Return minus the symmetric KL divergence of labeled and unlabeled outputs.

    Minimizing it moves the outputs of both kinds of rows apart. This is the inter-class
    term of Li et al. (CVPR 2023). Outputs are softmaxes over all C classes. The mean is
    over all pairs of a labeled and an unlabeled row of all workers, over both
    directions, views and cluster heads. It is computed without pairs: the mean of
    KL(p || q) is the mean of <p, log p>, here over this worker's rows, minus <mean p,
    mean log q>, over the rows of all workers. All workers call this.

    Args:
        known: Cosines with the known prototypes, (V, B, C_l).
        novel: Cosines with the novel prototypes, (V, H, B, C_u).
        num_labeled: The number of labeled rows, which come first. There must be rows of
            both kinds.
        temperature: The divisor of the cosines.

    Returns:
        A scalar. Its mean over the workers is at most 0.
    """
    joint = (
        torch.cat(
            [known.unsqueeze(1).expand(-1, novel.shape[1], -1, -1), novel], dim=-1
        )
        / temperature
    )
    log_p = joint.log_softmax(dim=-1)  # (V, H, B, C)
    p = log_p.exp()
    inner = (p * log_p).sum(dim=-1)  # (V, H, B), minus the entropies
    labeled, unlabeled = slice(None, num_labeled), slice(num_labeled, None)
    p_l, p_u, log_p_l, log_p_u = (
        mean_with_grad(rows[:, :, part].mean(dim=2))
        for rows in (p, log_p)
        for part in (labeled, unlabeled)
    )  # (V, H, C)
    cross = (p_l * log_p_u + p_u * log_p_l).sum(dim=-1)  # (V, H)
    own = inner[:, :, labeled].mean(dim=2) + inner[:, :, unlabeled].mean(dim=2)
    return -(own - cross).mean() / 2


def iic_view_loss(
    known: Tensor, novel: Tensor, num_labeled: int, temperature: float
) -> Tensor:
    """Return the symmetric KL divergence of the outputs of a row's views, per class.

    This is the intra-class term of Li et al. (CVPR 2023). Labeled rows have a softmax
    over the known outputs, and unlabeled rows over the novel outputs. The mean is over
    both directions, pairs of views, heads and rows. As in the authors' code it is
    divided by the number of classes in the softmax.

    Args:
        known: Cosines with the known prototypes, (V, B, C_l), with V at least 2.
        novel: Cosines with the novel prototypes, (V, H, B, C_u).
        num_labeled: The number of labeled rows, which come first.
        temperature: The divisor of the cosines.

    Returns:
        A scalar, the sum of one term for labeled and one for unlabeled rows.
    """
    total = known.new_zeros(())
    for logits in (known[:, None, :num_labeled], novel[:, :, num_labeled:]):
        log_p = (logits / temperature).log_softmax(dim=-1)
        p = log_p.exp()
        for v, w in combinations(range(len(logits)), 2):
            # KL(v || w) + KL(w || v), element by element
            both = (p[v] - p[w]) * (log_p[v] - log_p[w])
            total = total + both.mean() / 2
    return total / (len(known) * (len(known) - 1) / 2)


def rkd_loss(
    known: Tensor,
    novel: Tensor,
    teacher: Tensor,
    temperature: float,
    distillation_temperature: float,
) -> Tensor:
    """Return the weighted cross-entropy of the known head with a teacher's outputs.

    This is rKD (Gu et al., ICCV 2023) on unlabeled rows. The teacher's softmax over the
    known classes is the target. The weight of a row is the probability of all known
    classes together under the current network, divided by the mean of this probability
    over the rows of all workers, views and heads. The weight has a gradient, as in the
    authors' code. Every softmax has the temperature tau T, and the loss has the factor
    T^2 (Hinton et al., 2015). All workers call this.

    Args:
        known: Cosines of unlabeled rows with the known prototypes, (V, B_u, C_l).
        novel: Cosines with the novel prototypes, (V, H, B_u, C_u).
        teacher: Cosines with the known prototypes of the pretrained network, (V, B_u,
            C_l).
        temperature: tau, the divisor of cosines in training.
        distillation_temperature: T.

    Returns:
        A scalar, the mean over views, heads and rows.
    """
    scale = temperature * distillation_temperature
    cross_entropy = -(
        (teacher / scale).softmax(dim=-1) * (known / scale).log_softmax(dim=-1)
    ).sum(dim=-1)
    log_known = (known / scale).logsumexp(dim=-1).unsqueeze(1)  # (V, 1, B_u)
    # (V, H, B_u)
    known_probability = torch.sigmoid(log_known - (novel / scale).logsumexp(dim=-1))
    weight = known_probability / mean_with_grad(known_probability.mean())
    return distillation_temperature**2 * (weight * cross_entropy.unsqueeze(1)).mean()
