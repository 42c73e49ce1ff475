"""The unified objective of UNO: pseudo-labels by Sinkhorn-Knopp, and the training loss.

It follows the paper's Sec. 3.1-3.3 and the appendix "Multi-view aggregation
strategies".
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from uno import distributed
from uno.config import Config, ObjectiveConfig
from uno.model import Logits
from uno.steps import Batch, Loss, TrainState, forward


def sinkhorn(
    logits: Tensor, epsilon: float, num_iters: int, prior: Tensor | None = None
) -> Tensor:
    """Assign rows softly to clusters of equal or given size, by Sinkhorn-Knopp.

    It solves Eq. 4 approximately, starting from ``exp(logits / epsilon)``. Each
    iteration first gives every cluster its mass and then every row mass one. So the
    rows of the result sum to one, while the masses of the clusters hold only
    approximately. With the paper's 3 iterations, from SwAV, that is wanted: full
    convergence hurts small batches. The computation is in the log domain, where ``exp(1
    / 0.05)`` cannot overflow and a cluster without mass causes no division by zero.
    Half precision is raised to float32.

    Args:
        logits: (..., B, K), cosines of B unlabeled rows with K prototypes. Leading
            dimensions, such as views and heads, are independent.
        epsilon: The weight of the entropy H(Y) in Eq. 4.
        num_iters: The number of iterations.
        prior: Positive shares (K,) of the clusters, of which only the proportions
            count; None for equal shares.

    Returns:
        (..., B, K), float32 or float64, non-negative, without gradient. Rows sum to
        one.
    """
    scores = (
        logits.detach().to(torch.promote_types(logits.dtype, torch.float32)) / epsilon
    )
    # Sums over few adjacent clusters would not be vectorized, so the rows come last.
    by_cluster = scores.shape[-1] < scores.shape[-2]
    scores = scores.mT.contiguous() if by_cluster else scores
    over_rows, over_clusters = (-1, -2) if by_cluster else (-2, -1)
    mass = None if prior is None else prior.to(scores.dtype).log()
    mass = mass.unsqueeze(-1) if mass is not None and by_cluster else mass
    for _ in range(num_iters):
        scores = scores.log_softmax(dim=over_rows)  # equal masses of clusters
        scores = scores if mass is None else scores + mass  # or the masses of the prior
        scores = scores.log_softmax(dim=over_clusters)  # every row gets mass one
    return scores.exp().mT if by_cluster else scores.exp()


def pseudo_labels(
    logits: Tensor,
    epsilon: float,
    num_iters: int,
    aggregation: str = "swap",
    hard: bool = False,
    prior: Tensor | None = None,
) -> Tensor:
    """Compute the targets of the unlabeled rows, one for each large view (Eq. 4-5).

    Args:
        logits: (V, H, B, K), cosines of the GLOBAL unlabeled batch for each large view
            and head.
        epsilon: The weight of the entropy H(Y) in Eq. 4.
        num_iters: The number of Sinkhorn-Knopp iterations.
        aggregation: ``swap`` keeps one target per view. ``average_pseudo_labels`` and
            ``average_logits`` give all views the same target, averaged after or before
            Sinkhorn (see the paper's appendix).
        hard: Whether targets are one-hot vectors of the most likely cluster.
        prior: Positive shares (K,) of the clusters, of which only the proportions
            count; None for equal shares.

    Returns:
        (V, H, B, K), float32 or float64, without gradient. Rows sum to one. If all
        views have the same target they share its memory.
    """
    num_views = len(logits)
    if aggregation == "average_logits":
        logits = logits.mean(dim=0, keepdim=True)
    targets = sinkhorn(logits, epsilon, num_iters, prior)
    if aggregation == "average_pseudo_labels":
        targets = targets.mean(dim=0, keepdim=True)
    if hard:
        targets = F.one_hot(targets.argmax(dim=-1), targets.shape[-1]).to(targets.dtype)
    return targets.expand(num_views, -1, -1, -1)


def discovery_loss(
    known: Tensor,
    families: Sequence[Tensor],
    labels: Tensor,
    targets: Sequence[Tensor],
    temperature: float,
    concat: bool = True,
) -> Tensor:
    """Compute UNO's loss for each cluster and overclustering head (Eq. 1-3).

    It is the cross-entropy of the predictions of view w with the targets of view v,
    over all ordered pairs v != w of a large view v and any view w, for labeled and
    unlabeled rows alike. The target of a labeled row is its one-hot label,
    padded with zeros to all outputs. The target of an unlabeled row is its
    pseudo-label, padded likewise (Eq. 2). For a target y that sums to one the
    cross-entropy is ``logsumexp(l / tau) - <y, l / tau>``. So nothing is padded, and no
    logits are concatenated.

    Args:
        known: (V, B, C_l), cosines with the known prototypes, float32 or float64.
            Labeled rows come first.
        families: F tensors (V, H, B, K_f), cosines of the cluster heads, then those of
            the overclustering heads.
        labels: int64 (B_l,), the known classes of the first B_l rows.
        targets: F tensors (V_large, H, B_u, K_f), pseudo-labels of the other rows. Only
            large views have targets. In the GCD setting they are (V_large, H, B_u, C_l
            + K_f), known outputs included. Rows sum to one.
        temperature: tau, the divisor of the cosines.
        concat: Whether one softmax covers known and novel outputs. False is the paper's
            ablation: the softmax of labeled rows covers known outputs, and that of
            unlabeled rows covers novel outputs.

    Returns:
        (F, H), the loss of each head: the mean over ordered pairs and over all B rows.
    """
    num_labeled, num_large, (num_views, num_rows, _) = (
        len(labels),
        len(targets[0]),
        known.shape,
    )
    # Entry [v, w] is 1 if view w is trained with the target of view v.
    pairs = known.new_ones(num_large, num_views).fill_diagonal_(0)
    num_terms = num_large * (num_views - 1) * num_rows
    losses = []
    with torch.autocast(known.device.type, enabled=False):
        known = known / temperature
        log_z_known = known.logsumexp(dim=-1).unsqueeze(1)  # (V, 1, B)
        index = labels.expand(num_views, -1).unsqueeze(-1)
        label_logits = known[:, :num_labeled].gather(2, index).sum(dim=(1, 2))  # (V,)
        for novel, target in zip(families, targets, strict=True):
            novel = novel / temperature
            log_z = novel.logsumexp(dim=-1)  # (V, H, B)
            if concat:
                log_z = torch.logaddexp(log_z_known, log_z)
            else:
                of_labeled = log_z_known.expand_as(log_z)[..., :num_labeled]
                log_z = torch.cat([of_labeled, log_z[..., num_labeled:]], dim=-1)
            among_known, target = target.to(novel.dtype).tensor_split(
                [target.shape[-1] - novel.shape[-1]], -1
            )
            pull = torch.einsum(
                "vw,vhbk,whbk->h", pairs, target, novel[:, :, num_labeled:]
            )
            if among_known.shape[-1]:
                pull = pull + torch.einsum(
                    "vw,vhbk,wbk->h", pairs, among_known, known[:, num_labeled:]
                )
            losses.append(
                pairs.sum(dim=0) @ (log_z.sum(dim=-1) - label_logits.unsqueeze(1))
                - pull
            )
    return torch.stack(losses) / num_terms


def global_targets(
    families: Sequence[Tensor],
    num_large: int,
    num_labeled: int,
    objective: ObjectiveConfig,
    past: Sequence[Tensor] | None = None,
    known: Tensor | None = None,
    prior: Tensor | None = None,
) -> list[Tensor]:
    """Compute pseudo-labels of this worker's unlabeled rows from the global batch.

    The global batch has the rows of all workers. Their logits are gathered by a single
    collective for all views, heads and families, so all workers must call this.

    Args:
        families: F tensors (V, H, B, K_f), cosines of the cluster heads, then those of
            the overclustering heads. B is the number of this worker's rows.
        num_large: The first ``num_large`` views give targets.
        num_labeled: The first ``num_labeled`` rows have labels.
        objective: The settings of Sinkhorn and of the pseudo-labels.
        past: F tensors (V_large, H, Q, K_f), cosines of Q rows of earlier batches,
            which Sinkhorn sees in addition. They get no targets. None if there are no
            such rows.
        known: (V, B, C_l), cosines with the known prototypes. They are used only if
            ``prior`` covers all C outputs, and may be None otherwise.
        prior: The expected shares of the unlabeled rows in the outputs; None for equal
            shares. (C_u,) is for the cluster heads; the overclustering heads then have
            equal shares. (C,) means that unlabeled rows may be of known classes, too
            (GCD). The targets of all heads then cover the known outputs as well, and
            the overclustering heads divide the share of all novel classes equally among
            their clusters.

    Returns:
        The pseudo-labels of this worker's B_u unlabeled rows: F tensors (V_large, H,
        B_u, K_f), or (V_large, H, B_u, C_l + K_f) with a prior over all C outputs. Rows
        sum to one. They have no gradient.
    """
    priors: list[Tensor | None] = [prior, *[None] * (len(families) - 1)]
    if prior is not None and known is not None and len(prior) > families[0].shape[-1]:
        old = prior[: known.shape[-1]]
        families = [
            torch.cat([known.unsqueeze(1).expand(-1, *f.shape[1:3], -1), f], dim=-1)
            for f in families
        ]
        counts = [f.shape[-1] - len(old) for f in families]
        priors = [
            prior,
            *(torch.cat([old, (1 - old.sum()).expand(n) / n]) for n in counts[1:]),
        ]
    unlabeled = [family.detach()[:num_large, :, num_labeled:] for family in families]
    global_rows = distributed.gather_rows(torch.cat(unlabeled, dim=-1), dim=2)
    sizes = [family.shape[-1] for family in families]
    targets = []
    for i, logits in enumerate(global_rows.split(sizes, dim=-1)):
        with_past = logits if past is None else torch.cat([logits, past[i]], dim=2)
        of_all_rows = pseudo_labels(
            with_past,
            objective.epsilon,
            objective.sinkhorn_iters,
            objective.aggregation,
            objective.pseudo_labels == "hard",
            priors[i],
        )
        of_batch = of_all_rows[:, :, : logits.shape[2]]
        targets.append(distributed.local_shard(of_batch, dim=2))
    return targets


def unified_objective(
    state: TrainState,
    batch: Batch,
    config: Config,
    logits: Logits | None = None,
    past: Sequence[Tensor] | None = None,
) -> Loss:
    """Compute the unified objective of one batch (Eq. 1-5).

    The loss is the mean over families and heads (Sec. 3.3). In the GCD setting the
    unlabeled rows choose among all C outputs (UNO+, Vaze et al., CVPR 2022). If
    ``logits`` is None, the prototypes of the model are scaled to length one first, in
    place. All workers call this, because pseudo-labels come from the rows of all
    workers.

    Args:
        state: The state of training, with the model. ``state.extra["prior"]`` is the
            class prior, if the run has one.
        batch: The views of this worker's rows, labeled rows first.
        config: The configuration of the run.
        logits: The outputs of the network for the batch, from
            :func:`uno.steps.forward`. None to compute them here.
        past: Cosines of rows of earlier batches, which Sinkhorn sees in addition, as in
            :func:`global_targets`. None if there are no such rows.

    Returns:
        The total loss of this worker's rows, a scalar with gradient; and the loss of
        each cluster head (H,), without the overclustering heads.
    """
    if logits is None:
        logits = forward(state, batch)
    assert logits.novel is not None
    objective, labels = config.objective, batch.labels
    families = [logits.novel] if logits.over is None else [logits.novel, logits.over]
    targets = global_targets(
        families,
        batch.num_large,
        len(labels),
        objective,
        past,
        logits.known,
        state.extra.get("prior"),
    )
    losses = discovery_loss(
        logits.known, families, labels, targets, objective.temperature, objective.concat
    )  # (families, H)
    return Loss(losses.mean(), losses[0])
