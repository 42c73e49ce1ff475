"""The unified objective (paper Sec. 3.1-3.2, appendix "Multi-view aggregation strategies")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.sinkhorn import sinkhorn


def pseudo_labels(
    logits: Tensor, epsilon: float, num_iters: int, aggregation: str = "swap", hard: bool = False
) -> Tensor:
    """Targets of the unlabeled rows, one per large view (Eq. 4-5; appendix for the two averages).

    Args:
        logits: (V, H, B, K) cosines of the GLOBAL unlabeled batch under each large view and head.
        epsilon: Sinkhorn's entropy weight.
        num_iters: Sinkhorn's iterations.
        aggregation: ``swap`` keeps one target per view; ``average_pseudo_labels`` and ``average_logits`` give
            every view the same target, averaged after or before Sinkhorn.
        hard: replace the soft targets by one-hot vectors of their argmax.

    Returns:
        (V, H, B, K), rows summing to one, without gradient.
    """
    if aggregation == "average_logits":
        targets = sinkhorn(_at_least_float32(logits).mean(dim=0, keepdim=True), epsilon, num_iters)
    elif aggregation == "average_pseudo_labels":
        targets = sinkhorn(logits, epsilon, num_iters).mean(dim=0, keepdim=True)
    else:
        targets = sinkhorn(logits, epsilon, num_iters)
    if hard:
        targets = F.one_hot(targets.argmax(dim=-1), targets.shape[-1]).to(targets.dtype)
    return targets.expand(len(logits), -1, -1, -1)


def discovery_loss(
    known: Tensor, novel: Tensor, labels: Tensor, targets: Tensor, temperature: float, concat: bool = True
) -> Tensor:
    """Cross-entropy of view w against the target of view v, for all ordered pairs v != w (Eq. 1-3).

    Labeled rows come first. Their target is the zero-padded one-hot label, that of unlabeled rows the
    zero-padded pseudo-label (Eq. 2). Because targets sum to one, the cross-entropy is ``logsumexp(l / tau) -
    <y, l / tau>``: the padded targets and the concatenated logits are never formed, and the known logits are
    reduced once for all heads.

    Args:
        known: (V, B, C_l) cosines of the known head.
        novel: (V, H, B, K) cosines of H heads of one family.
        labels: (B_l,) known-class indices of the first B_l rows.
        targets: (V_large, H, B_u, K) pseudo-labels of the remaining rows; small views (V_large and up) have
            none.
        temperature: softmax temperature tau.
        concat: one softmax over known and novel outputs; False is the paper's ablation: cross-entropy of
            labeled rows over known outputs, of unlabeled rows over novel outputs.

    Returns:
        (H,) loss per head: the mean over ordered pairs and over all B rows.
    """
    known, novel = _at_least_float32(known) / temperature, _at_least_float32(novel) / temperature
    num_labeled, num_rows, num_views, num_targets = len(labels), known.shape[1], len(known), len(targets)
    log_z_known = known.logsumexp(dim=-1).unsqueeze(1)  # (V, 1, B)
    log_z_novel = novel.logsumexp(dim=-1)  # (V, H, B)
    if concat:
        log_z = torch.logaddexp(log_z_known, log_z_novel).sum(dim=2)  # (V, H)
    else:
        log_z = log_z_known[:, :, :num_labeled].sum(dim=2) + log_z_novel[:, :, num_labeled:].sum(dim=2)
    label_logits = known[:, :num_labeled].gather(2, labels.expand(num_views, -1).unsqueeze(2)).sum(dim=(1, 2))
    pairs = known.new_ones(num_targets, num_views).fill_diagonal_(0)  # [v, w]: target v teaches view w
    taught = torch.einsum("vw,vhbk->whbk", pairs, targets.to(novel.dtype))  # the sum of a view's targets
    agreement = (taught * novel[:, :, num_labeled:]).sum(dim=(0, 2, 3))  # (H,)
    return (pairs.sum(dim=0) @ (log_z - label_logits.unsqueeze(1)) - agreement) / (pairs.sum() * num_rows)


def pretraining_loss(known: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of the known head's cosines over tau (paper Sec. 4.1 "Pretraining").

    Args:
        known: (V, B, C_l) cosines of every view.
        labels: (B,) known-class indices.
        temperature: softmax temperature tau.

    Returns:
        Scalar: the mean over views and rows.
    """
    return F.cross_entropy(_at_least_float32(known).flatten(0, 1) / temperature, labels.repeat(len(known)))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
