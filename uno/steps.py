"""One optimizer step of each phase: image views -> loss -> update (paper Sec. 3, Sec. 4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from uno import collectives
from uno.config import ObjectiveConfig
from uno.model import Logits
from uno.objective import discovery_loss, pretraining_loss, pseudo_labels
from uno.regularizers import iic_loss, iic_view_loss, rkd_loss
from uno.state import TrainState


class Batch(NamedTuple):
    """V views of B rows on the training device; the first ``len(labels)`` rows are labeled."""

    views: list[Tensor]  # V tensors (B, 3, S_v, S_v), large views first
    labels: Tensor  # (B_l,) known-class indices
    num_large: int
    rows: Tensor | None = None  # (B_u,) which unlabeled rows of the set these are


def pretrain_step(state: TrainState, batch: Batch, objective: ObjectiveConfig, lr: float) -> Tensor:
    """Supervised step on labeled rows. Returns the loss as (1,), without synchronising the device."""
    logits = forward(state, batch)
    loss = pretraining_loss(logits.known, batch.labels, objective.temperature)
    update_(state, loss, loss.unsqueeze(0), lr)
    return loss.detach().unsqueeze(0)


def rotation_step(state: TrainState, batch: Batch, objective: ObjectiveConfig, lr: float) -> Tensor:
    """Self-supervised step: by how many quarter turns was a view turned? View k was by k.

    Gidaris et al. 2018; the four outputs are cosines over tau, as those of every known head here. Returns
    the loss as (1,).
    """
    known = forward(state, batch).known  # (4, B, 4)
    turns = torch.arange(len(known), device=known.device).repeat_interleave(known.shape[1])
    loss = F.cross_entropy(known.flatten(0, 1) / objective.temperature, turns)
    update_(state, loss, loss.unsqueeze(0), lr)
    return loss.detach().unsqueeze(0)


def discovery_step(state: TrainState, batch: Batch, objective: ObjectiveConfig, lr: float) -> Tensor:
    """Unified step on labeled and unlabeled rows (Eq. 1-5, Sec. 3.3).

    Returns:
        (1,) loss of this worker's rows: mean of the two families' mean over heads; no device synchronisation.
    """
    logits = forward(state, batch)
    assert logits.novel is not None
    families = [logits.novel] if logits.over is None else [logits.novel, logits.over]
    targets = global_targets(
        families, batch.num_large, len(batch.labels), objective, state, logits.directions
    )
    losses = discovery_loss(
        logits.known, families, batch.labels, targets, objective.temperature, objective.concat
    )  # (families, H)
    loss = losses.mean()
    for term in _optional_terms(state, batch, logits, objective):
        loss = loss + term
    update_(state, loss, losses[0], lr)
    return loss.detach().unsqueeze(0)


def _optional_terms(
    state: TrainState, batch: Batch, logits: Logits, objective: ObjectiveConfig
) -> Iterator[Tensor]:
    """What ``objective`` adds to UNO's loss, weighted; nothing by default."""
    assert logits.novel is not None
    known, novel, num_labeled, tau = logits.known, logits.novel, len(batch.labels), objective.temperature
    if objective.iic_weight:
        yield objective.iic_weight * iic_loss(known, novel, num_labeled, tau)
    if objective.iic_view_weight:
        yield objective.iic_view_weight * iic_view_loss(known, novel, num_labeled, tau)
    if objective.rkd_weight:
        assert state.teacher is not None
        large, rows = slice(batch.num_large), slice(num_labeled, None)
        with torch.no_grad(), torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast):
            teacher = state.teacher([view[rows] for view in batch.views[large]]).known
        yield objective.rkd_weight * rkd_loss(
            known[large, rows], novel[large, :, rows], teacher, tau, objective.rkd_temperature
        )


def global_targets(
    families: list[Tensor],
    num_large: int,
    num_labeled: int,
    objective: ObjectiveConfig,
    state: TrainState | None = None,
    directions: Tensor | None = None,
) -> list[Tensor]:
    """Pseudo-labels of this worker's unlabeled rows, computed over the GLOBAL unlabeled batch.

    One collective serves all views, heads and families: their logits travel side by side.

    Args:
        families: (V, H, B, K) logits of the cluster heads and, if any, (V, H, B, mK) of the overclustering
            heads.
        num_large: views that give targets, the first ones.
        num_labeled: B_l, rows before the unlabeled ones.
        objective: epsilon, iterations, aggregation, soft or hard.
        state: holds the queue of past projections, if the run has one; the batch's enter it.
        directions: (V, H or 2H, B, P) projections of length one, for the queue.

    Returns:
        Per family (V_large, H, B_u, K).
    """
    parts, queued = families, state is not None and "queue" in state.extra
    if queued:
        assert directions is not None
        parts = [*families, *directions.split(families[0].shape[1], dim=1)]
    widths = [part.shape[-1] for part in parts]
    unlabeled = [part.detach()[:num_large, :, num_labeled:] for part in parts]
    gathered = collectives.gather_rows(
        torch.cat(unlabeled, dim=-1) if len(parts) > 1 else unlabeled[0], dim=2
    )
    seen = list(gathered.split(widths, dim=-1))
    if queued:
        assert state is not None
        seen = with_queue(state, seen[: len(families)], seen[len(families) :])
    return [
        collectives.own_rows(
            pseudo_labels(
                logits,
                objective.epsilon,
                objective.num_iters,
                objective.aggregation,
                objective.pseudo_labels == "hard",
            )[:, :, : gathered.shape[2]],
            dim=2,
        )
        for logits in seen
    ]


@torch.no_grad()
def with_queue(state: TrainState, logits: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """The batch's logits, and those of past rows under today's prototypes; the batch's rows enter the queue.

    After SwAV (Caron et al. 2020, App. A), for batches with few rows per cluster. Like theirs the queue takes
    part late: once it is full and the warm-up is over. All workers hold the same.

    Args:
        state: ``state.extra["queue"]`` (V_large, H, Q, P or 2P) directions of both families, newest first.
        logits: per family (V_large, H, B_u, K) of all workers.
        directions: per family (V_large, H, B_u, P).

    Returns:
        Per family (V_large, H, B_u or B_u + Q, K), the batch first.
    """
    queue, rows = state.extra["queue"], torch.cat(directions, dim=-1)
    both = torch.cat([rows.to(queue.dtype), queue], dim=2)[:, :, : queue.shape[2]]
    state.extra["queue"] = both.nan_to_num(0.0, 0.0, 0.0)  # a bad step must not stay
    if state.step < state.warmup_steps or state.step * rows.shape[2] < queue.shape[2]:
        return logits
    heads = [head for head in (state.model.novel, state.model.over) if head is not None]
    past = [head.cosines(own) for head, own in zip(heads, queue.chunk(len(logits), dim=-1), strict=True)]
    return [torch.cat(parts, dim=2) for parts in zip(logits, past, strict=True)]


def forward(state: TrainState, batch: Batch) -> Logits:
    """Normalise the prototypes, then one pass over all views, under autocast where the run has it."""
    state.model.normalize_prototypes_()
    with torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast):
        return state.forward(batch.views)


def update_(state: TrainState, loss: Tensor, head_losses: Tensor, lr: float) -> None:
    """Backward and SGD. Gradients are averaged over workers, so all see, and skip, a NaN on one rank."""
    state.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    grads = [p.grad for p in state.model.parameters() if p.grad is not None]
    broken = (~torch.isfinite(torch.nn.utils.get_total_norm(grads))).float()
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.optimizer.found_inf = broken  # type: ignore[attr-defined]  # read by the fused kernel: 1 skips the step
    state.optimizer.step()
    state.skipped += broken
    one, skip = loss.new_ones(1), broken > 0
    state.epoch_losses += torch.where(skip, 0.0, torch.cat([head_losses.detach(), one]))
    state.line_loss += torch.where(skip, 0.0, torch.cat([loss.detach().unsqueeze(0), one]))
    state.step += 1
