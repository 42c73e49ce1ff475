"""One optimizer step of each phase: image views -> loss -> update (paper Sec. 3, Sec. 4.1)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uno import collectives
from uno.config import Config, ObjectiveConfig
from uno.data.plan import Batch as Batch  # methods take it from here
from uno.model import Logits
from uno.objective import discovery_loss, labeled_loss, pseudo_labels
from uno.state import TrainState

Step = Callable[[TrainState, Batch, Config, float], Tensor]
"""Trains on one batch at a learning rate and returns the loss (1,), without synchronizing the device."""


def pretrain_step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """Supervised step on labeled rows."""
    known = forward(state, batch).known
    return update_(state, labeled_loss(known, batch.labels, config.objective.temperature), lr)


def discovery_step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """Unified step on labeled and unlabeled rows (Eq. 1-5, Sec. 3.3): mean over families and heads. In mixed
    piles unlabeled rows choose among all C outputs (UNO+: Vaze et al., CVPR 2022).
    """
    logits, objective = forward(state, batch), config.objective
    assert logits.novel is not None
    families = [logits.novel] if logits.over is None else [logits.novel, logits.over]
    rows = batch.num_large, len(batch.labels)
    targets = global_targets(families, *rows, objective, known=logits.known, prior=state.extra.get("prior"))
    losses = discovery_loss(
        logits.known, families, batch.labels, targets, objective.temperature, objective.concat
    )  # (families, H)
    return update_(state, losses.mean(), lr, losses[0])


def forward(state: TrainState, batch: Batch) -> Logits:
    """Normalize the prototypes, then one pass over all views, under autocast where the run has it."""
    state.model.normalize_prototypes_()
    with torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast):
        return state.forward(batch.views)


def global_targets(
    families: Sequence[Tensor], num_large: int, num_labeled: int, objective: ObjectiveConfig,
    past: Sequence[Tensor] | None = None, known: Tensor | None = None, prior: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Pseudo-labels of this worker's unlabeled rows, computed over the GLOBAL unlabeled batch.

    One collective serves all views, heads and families: their logits travel side by side. Families (V, H, B,
    K) of which the first ``num_large`` views give targets and the first ``num_labeled`` rows have labels ->
    (V_large, H, B_u, K) each. ``past``: per family (V_large, H, Q, K) logits of rows of earlier batches that
    Sinkhorn sees besides.

    ``prior``: shares of unlabeled rows that outputs may expect. (C_u,): those of a cluster head. (C,): rows
    may be of known classes, too, and choose by ``known`` (V, B, C_l) as well: targets are (V_large, H, B_u,
    C_l + K). The clusters of an overclustering head share alike in what novel classes have.
    """
    priors: list[Tensor | None] = [prior, *[None] * (len(families) - 1)]
    if prior is not None and known is not None and len(prior) > families[0].shape[-1]:
        old = prior[: known.shape[-1]]
        families = [
            torch.cat([known.unsqueeze(1).expand(-1, *f.shape[1:3], -1), f], dim=-1) for f in families
        ]
        counts = [f.shape[-1] - len(old) for f in families]
        priors = [prior, *(torch.cat([old, (1 - old.sum()).expand(n) / n]) for n in counts[1:])]
    own = [family.detach()[:num_large, :, num_labeled:] for family in families]
    global_rows = collectives.gather_rows(torch.cat(own, dim=-1), dim=2)
    targets = []
    for i, logits in enumerate(global_rows.split([family.shape[-1] for family in families], dim=-1)):
        seen = logits if past is None else torch.cat([logits, past[i]], dim=2)
        o, hard = objective, objective.pseudo_labels == "hard"
        found = pseudo_labels(seen, o.epsilon, o.sinkhorn_iters, o.aggregation, hard, priors[i])
        targets.append(collectives.local_shard(found[:, :, : logits.shape[2]], dim=2))
    return targets


def update_(state: TrainState, loss: Tensor, lr: float, head_losses: Tensor | None = None) -> Tensor:
    """Backward and SGD -> the loss (1,), detached. ``head_losses`` (H,), or the loss, tell the best head.

    Gradients are averaged over workers, so all see, and skip, a NaN on one rank.
    """
    state.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    grads = [p.grad for p in state.model.parameters() if p.grad is not None]
    state.grad_norm = torch.nn.utils.get_total_norm(grads)
    broken = (~torch.isfinite(state.grad_norm)).float()
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group["factor"]
    state.optimizer.found_inf = broken  # type: ignore[attr-defined]  # read by the fused kernel: 1 skips the step
    state.optimizer.step()
    state.skipped += broken
    total, one, skip = loss.detach().unsqueeze(0), loss.new_ones(1), broken > 0
    heads = total if head_losses is None else head_losses.detach()
    state.epoch_losses += torch.where(skip, 0.0, torch.cat([heads, one]))
    state.window_loss += torch.where(skip, 0.0, torch.cat([total, one]))
    state.step += 1
    return total
