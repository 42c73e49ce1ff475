"""The parts that training steps share, and the supervised step (paper Sec. 4.1)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.config import Config
from uno.data.plan import Batch as Batch  # imported from here by the methods
from uno.model import Logits
from uno.state import TrainState

Step = Callable[[TrainState, Batch, Config, float], Tensor]
"""Train on one batch: (state, batch, configuration, learning rate) -> loss (1,).

The state is updated. The device is not synchronized.
"""


def pretrain_step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """Train the encoder and the known head on the labeled rows of one batch.

    Args:
        state: The state of training. It is updated.
        batch: The batch.
        config: The configuration of the run.
        lr: The learning rate.

    Returns:
        The cross-entropy loss (1,), detached.
    """
    known = forward(state, batch).known
    return update_(
        state, labeled_loss(known, batch.labels, config.objective.temperature), lr
    )


def labeled_loss(known: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Compute the cross-entropy of the known head (paper Sec. 4.1 "Pretraining").

    Args:
        known: Cosines of V views of B rows with C known prototypes, (V, B, C), at least
            float32.
        labels: Classes of the first B_l rows, int64 (B_l,). The other rows are ignored.
        temperature: The divisor tau of the cosines.

    Returns:
        The mean over views and labeled rows, a scalar.
    """
    logits = known[:, : len(labels)].flatten(0, 1) / temperature
    return F.cross_entropy(logits, labels.repeat(len(known)))


def forward(state: TrainState, batch: Batch) -> Logits:
    """Normalize the prototypes of the model, then compute the logits of all views.

    The forward pass uses bfloat16 if ``state.autocast``.
    """
    state.model.normalize_prototypes_()
    with torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast):
        return state.forward(batch.views)


def update_(
    state: TrainState, loss: Tensor, lr: float, head_losses: Tensor | None = None
) -> Tensor:
    """Take one SGD step on a loss, and add it to the running losses of ``state``.

    Gradients are averaged over all workers, so that a NaN on one rank makes all ranks
    skip the step. The device is not synchronized.

    Args:
        state: The state of training. It is updated.
        loss: The loss, a scalar.
        lr: The learning rate.
        head_losses: The loss of each of H heads (H,), by which the best head is chosen;
            by default ``loss`` for a single head.

    Returns:
        The loss (1,), detached.
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
