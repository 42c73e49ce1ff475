"""The unified objective, from Sinkhorn to the step that minimizes it (paper Sec.
3.1-3.3, appendix "Multi-view aggregation strategies").
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from uno import collectives
from uno.config import Config, ObjectiveConfig
from uno.state import TrainState
from uno.steps import Batch, forward, update_


def sinkhorn(
    logits: Tensor, epsilon: float, num_iters: int, prior: Tensor | None = None
) -> Tensor:
    """Soft assignment of rows to equally used clusters: Sinkhorn-Knopp on
    ``exp(logits / epsilon)``; or to clusters used in proportion to ``prior`` (K,),
    which is positive.

    Each iteration first gives every cluster its mass, then every row mass one, so rows
    of the result sum to one while the cluster marginals hold only approximately: at 3
    iterations (the paper's, from SwAV) that is wanted, converging hurts small batches.
    Works in the log domain, where ``exp(1 / 0.05)`` cannot overflow and a starved
    cluster cannot divide by zero; half precision is raised to float32.

    (..., B, K) cosines of B unlabeled rows to K prototypes, batched over views and
    heads -> (..., B, K) non-negative, rows summing to one, without gradient.
    ``epsilon`` weighs the entropy H(Y) in Eq. 4.
    """
    scores = (
        logits.detach().to(torch.promote_types(logits.dtype, torch.float32)) / epsilon
    )
    # sums over 5 clusters in a row would not vectorize
    by_cluster = scores.shape[-1] < scores.shape[-2]
    scores = scores.mT.contiguous() if by_cluster else scores
    over_rows, over_clusters = (-1, -2) if by_cluster else (-2, -1)
    mass = None if prior is None else prior.to(scores.dtype).log()
    mass = mass.unsqueeze(-1) if mass is not None and by_cluster else mass
    for _ in range(num_iters):
        scores = scores.log_softmax(dim=over_rows)  # every cluster gets the same mass
        scores = scores if mass is None else scores + mass  # or its own
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
    """Targets of the unlabeled rows, one per large view (Eq. 4-5; appendix for the two
    averages).

    (V, H, B, K) cosines of the GLOBAL unlabeled batch under each large view and head ->
    the same shape, rows summing to one, without gradient. ``epsilon``, ``num_iters``,
    ``prior`` (K,) are Sinkhorn's. ``aggregation``: ``swap`` keeps one target per view;
    ``average_pseudo_labels`` and ``average_logits`` give every view the same one,
    averaged after or before Sinkhorn. ``hard``: one-hot vectors of the argmax.
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
    """Cross-entropy of view w against the target of view v, for all ordered pairs v !=
    w (Eq. 1-3).

    Labeled rows come first. Their target is the zero-padded one-hot label, that of
    unlabeled rows the zero-padded pseudo-label (Eq. 2). A target y that sums to one has
    the cross-entropy ``logsumexp(l / tau) - <y, l / tau>``, so nothing is padded and no
    logits are concatenated.

    Cosines, float32 or float64, of B rows: ``known`` (V, B, C_l), ``families`` F times
    (V, H, B, K_f), cluster heads, then overclustering heads. ``labels`` (B_l,) are
    known-class indices of the first B_l rows, ``targets`` F times (V_large, H, B_u,
    K_f) the others' pseudo-labels; small views have none. In the GCD setting they are
    (V_large, H, B_u, C_l + K_f), also over known outputs, and sum to one. ``concat``:
    one softmax over known and novel outputs; False is the paper's ablation:
    cross-entropy of labeled rows over known outputs, of unlabeled rows over novel
    outputs.

    Returns (F, H), the loss of each head: the mean over ordered pairs and over all B
    rows.
    """
    num_labeled, num_large, (num_views, num_rows, _) = (
        len(labels),
        len(targets[0]),
        known.shape,
    )
    # [v, w]: the target of v teaches w
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
    """Pseudo-labels of this worker's unlabeled rows, computed over the GLOBAL unlabeled
    batch.

    One collective serves all views, heads and families: their logits travel side by
    side. Families (V, H, B, K) of which the first ``num_large`` views give targets and
    the first ``num_labeled`` rows have labels -> (V_large, H, B_u, K) each. ``past``:
    per family (V_large, H, Q, K) logits of rows of earlier batches that Sinkhorn sees
    besides.

    ``prior``: shares of unlabeled rows that outputs may expect. (C_u,): those of a
    cluster head. (C,): rows may be of known classes, too, and choose by ``known`` (V,
    B, C_l) as well: targets are (V_large, H, B_u, C_l + K). The clusters of an
    overclustering head share alike in what novel classes have.
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
    own = [family.detach()[:num_large, :, num_labeled:] for family in families]
    global_rows = collectives.gather_rows(torch.cat(own, dim=-1), dim=2)
    targets = []
    for i, logits in enumerate(
        global_rows.split([family.shape[-1] for family in families], dim=-1)
    ):
        seen = logits if past is None else torch.cat([logits, past[i]], dim=2)
        o, hard = objective, objective.pseudo_labels == "hard"
        found = pseudo_labels(
            seen, o.epsilon, o.sinkhorn_iters, o.aggregation, hard, priors[i]
        )
        targets.append(collectives.local_shard(found[:, :, : logits.shape[2]], dim=2))
    return targets


def discovery_step(
    state: TrainState, batch: Batch, config: Config, lr: float
) -> Tensor:
    """Unified step on labeled and unlabeled rows (Eq. 1-5, Sec. 3.3): mean over
    families and heads. In the GCD setting unlabeled rows choose among all C outputs
    (UNO+: Vaze et al., CVPR 2022).
    """
    logits, objective = forward(state, batch), config.objective
    assert logits.novel is not None
    families = [logits.novel] if logits.over is None else [logits.novel, logits.over]
    rows = batch.num_large, len(batch.labels)
    targets = global_targets(
        families, *rows, objective, known=logits.known, prior=state.extra.get("prior")
    )
    losses = discovery_loss(
        logits.known,
        families,
        batch.labels,
        targets,
        objective.temperature,
        objective.concat,
    )  # (families, H)
    return update_(state, losses.mean(), lr, losses[0])
