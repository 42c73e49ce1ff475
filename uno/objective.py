"""The unified objective (paper Sec. 3.1-3.2, appendix "Multi-view aggregation strategies")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    known: Tensor,
    families: Sequence[Tensor],
    labels: Tensor,
    targets: Sequence[Tensor],
    temperature: float,
    concat: bool = True,
) -> Tensor:
    """Cross-entropy of view w against the target of view v, for all ordered pairs v != w (Eq. 1-3).

    Labeled rows come first. Their target is the zero-padded one-hot label, that of unlabeled rows the
    zero-padded pseudo-label (Eq. 2). Because targets sum to one, the cross-entropy is ``logsumexp(l / tau) -
    <y, l / tau>``: the padded targets and the concatenated logits are never formed, and the known logits are
    reduced once for all heads. The gradient is the closed form ``softmax(l / tau) - y``.

    Args:
        known: (V, B, C_l) cosines of the known head.
        families: F tensors (V, H, B, K_f), cosines of H heads each: cluster heads, overclustering heads.
        labels: (B_l,) known-class indices of the first B_l rows.
        targets: F tensors (V_large, H, B_u, K_f), pseudo-labels of the remaining rows; small views (V_large
            and up) have none.
        temperature: softmax temperature tau.
        concat: one softmax over known and novel outputs; False is the paper's ablation: cross-entropy of
            labeled rows over known outputs, of unlabeled rows over novel outputs.

    Returns:
        (F, H) loss per head: the mean over ordered pairs and over all B rows.
    """
    with torch.autocast(known.device.type, enabled=False):
        return _DiscoveryLoss.apply(
            _at_least_float32(known), labels, targets, temperature, concat, *map(_at_least_float32, families)
        )


class _DiscoveryLoss(torch.autograd.Function):
    """:func:`discovery_loss` and its gradient, in half of the operators that autograd launches for it."""

    @staticmethod
    def forward(
        ctx: Any,
        known: Tensor,
        labels: Tensor,
        targets: Sequence[Tensor],
        temperature: float,
        concat: bool,
        *families: Tensor,
    ) -> Tensor:
        num_labeled, (num_views, num_rows, _) = len(labels), known.shape
        unlabeled = slice(num_labeled, None)
        pairs = known.new_ones(len(targets[0]), num_views).fill_diagonal_(0)  # [v, w]: target v teaches w
        taught_by = pairs.sum(dim=0)  # (V,)
        known, *novel = (_by_cluster(logits, temperature) for logits in (known, *families))
        log_p, log_z_known = _log_softmax(known)
        log_z = torch.cat([_log_softmax(logits)[1] for logits in novel], dim=1)  # (V, F * H, B)
        if concat:
            log_z = torch.logaddexp(log_z_known.unsqueeze(1), log_z)
        else:
            log_z[..., :num_labeled] = log_z_known[:, None, :num_labeled]
        taught = [_sum_of_targets(pairs, target) for target in targets]
        agreement = torch.stack(
            [(t * n[..., unlabeled]).sum(dim=(0, 2, 3)) for t, n in zip(taught, novel, strict=True)]
        )  # (F, H)
        index = labels.expand(num_views, 1, -1)
        label_logits = known[..., :num_labeled].gather(1, index).sum(dim=(1, 2))  # (V,)
        ctx.scale = 1 / ((len(targets[0]) * num_views - len(targets[0])) * num_rows)
        ctx.temperature, ctx.concat = temperature, concat
        ctx.save_for_backward(log_p, log_z_known, log_z, index, taught_by, *taught, *novel)
        total = taught_by @ (log_z.sum(dim=2) - label_logits.unsqueeze(1))
        return total.view_as(agreement).sub_(agreement).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_p, log_z_known, log_z, index, taught_by, *rest = ctx.saved_tensors
        num_families, num_labeled = len(grad), index.shape[2]
        taught, novel = rest[:num_families], rest[num_families:]
        weight = grad * (ctx.scale / ctx.temperature)  # (F, H)
        by_view = (taught_by[:, None] * weight.view(1, -1)).unsqueeze(2)  # (V, F * H, 1)

        share = (log_z_known.unsqueeze(1) - log_z).exp_()  # of the known outputs in each head's softmax
        if not ctx.concat:
            share[..., num_labeled:] = 0
        known_grad = log_p.exp().mul_((share * by_view).sum(dim=1, keepdim=True))
        pull = -by_view.sum(dim=1, keepdim=True)
        known_grad[..., :num_labeled].scatter_add_(1, index, pull.expand(index.shape))

        novel_grads = []
        parts = zip(novel, log_z.chunk(num_families, 1), by_view.chunk(num_families, 1), strict=True)
        for f, (logits, own_log_z, own_weight) in enumerate(parts):
            own = (logits - own_log_z.unsqueeze(2)).exp_().mul_(own_weight.unsqueeze(3))
            if not ctx.concat:
                own[..., :num_labeled] = 0
            own[..., num_labeled:].addcmul_(taught[f], weight[f, :, None, None], value=-1)
            novel_grads.append(own.mT)
        return known_grad.mT, None, None, None, None, *novel_grads


def _by_cluster(logits: Tensor, temperature: float) -> Tensor:
    """(..., B, K) -> (..., K, B) over tau, in the faster order of memory.

    Few clusters move apart, because a softmax over 5 numbers in a row would not vectorise; many stay in a
    row, because one over 3,000 rows of memory misses every cache.
    """
    scaled = logits.mT / temperature
    return scaled.contiguous() if scaled.shape[-2] < scaled.shape[-1] else scaled


def _log_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K, B) -> its log-softmax over K and its logsumexp (..., B)."""
    log_p = logits.log_softmax(dim=-2) if logits.is_contiguous() else logits.mT.log_softmax(dim=-1).mT
    return log_p, logits[..., 0, :] - log_p[..., 0, :]


def _sum_of_targets(pairs: Tensor, targets: Tensor) -> Tensor:
    """(V_large, V) and (V_large, H, B_u, K) -> (V, H, K, B_u): what each view is taught by all others."""
    targets = targets.to(pairs.dtype)
    if targets.is_contiguous():
        return (pairs.T @ targets.flatten(1)).unflatten(1, targets.shape[1:]).mT
    return (pairs.T @ targets.mT.flatten(1)).unflatten(1, targets.mT.shape[1:])


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
