"""What the steps of all methods share, and the supervised step (paper Sec. 4.1)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.config import Config
from uno.data.plan import Batch as Batch  # methods take it from here
from uno.model import Logits
from uno.state import TrainState

Step = Callable[[TrainState, Batch, Config, float], Tensor]
"""Trains on one batch at a learning rate and returns the loss (1,), without
synchronizing the device.
"""


def pretrain_step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """Supervised step on labeled rows."""
    known = forward(state, batch).known
    return update_(
        state, labeled_loss(known, batch.labels, config.objective.temperature), lr
    )


def labeled_loss(known: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of the known head's cosines over tau (paper Sec. 4.1
    "Pretraining"), a scalar.

    Mean over views and labeled rows: ``known`` (V, B, C), at least float32; ``labels``
    (B_l,) of the first B_l rows, the others do not count.
    """
    logits = known[:, : len(labels)].flatten(0, 1) / temperature
    return F.cross_entropy(logits, labels.repeat(len(known)))


def forward(state: TrainState, batch: Batch) -> Logits:
    """Normalize the prototypes, then one pass over all views, under autocast where
    the run has it.
    """
    state.model.normalize_prototypes_()
    with torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast):
        return state.forward(batch.views)


def update_(
    state: TrainState, loss: Tensor, lr: float, head_losses: Tensor | None = None
) -> Tensor:
    """Backward and SGD -> the loss (1,), detached. ``head_losses`` (H,), or the loss,
    tell the best head.

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
