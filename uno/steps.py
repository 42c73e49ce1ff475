"""The state of training, and one training step: forward pass, loss, SGD update."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno.config import Config, PhaseConfig
from uno.data.sampling import Batch as Batch  # imported from here by the methods
from uno.model import Logits, UnoModel

COUNTERS = ("epoch_losses", "head_losses", "window_loss", "skipped")
"""Fields of :class:`TrainState` that are stored in checkpoints under their names."""


@dataclass
class TrainState:
    """The model, the optimizer and the running losses after ``step`` optimizer steps.

    Skipped steps are not counted in any loss. The sums are float64, so that adding
    float32 losses in another order, as a resumed run does, changes no bit of them.

    Attributes:
        model: The model.
        forward: The model, or its DDP wrapper.
        optimizer: The optimizer of the trained parameters, None in a phase without
            epochs.
        device: The device of the model.
        autocast: Whether forward passes use bfloat16.
        epoch_losses: Sum of the cluster loss of each of H heads over this worker's
            steps of the current epoch, and the number of these steps; float64 (H + 1,).
        head_losses: Mean cluster loss of each head over the last finished epoch and all
            workers, float32 (H,); infinite before an epoch has finished.
        window_loss: Sum of the total loss over this worker's steps since the last line
            of metrics, and the number of these steps; float64 (2,).
        skipped: Number of steps of this phase that were skipped because gradients were
            not finite, float32 ().
        step: Number of optimizer steps in this phase, also skipped ones.
        total_steps: Number of steps in the schedule of the phase, set by
            :func:`uno.training.fit`.
        warmup_steps: Number of warm-up steps in that schedule, set by
            :func:`uno.training.fit`.
        extra: Tensors by name that a method keeps from step to step, such as "prior",
            the class prior. They are in checkpoints.
        grad_norm: Norm of all gradients of the last step, (); None before the first
            step. It is not in checkpoints.
        teacher: The pretrained network, for methods that need it; None for others. It
            is not in checkpoints.
    """

    model: UnoModel
    forward: nn.Module
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    autocast: bool
    epoch_losses: Tensor
    head_losses: Tensor
    window_loss: Tensor
    skipped: Tensor
    step: int = 0
    total_steps: int = 1
    warmup_steps: int = 0
    extra: dict[str, Tensor] = field(default_factory=dict)
    grad_norm: Tensor | None = None
    teacher: nn.Module | None = None

    @property
    def best_head(self) -> int:
        """Index of the cluster head with the lowest loss in the last finished epoch.

        The losses are means over the epoch and all workers. The index is 0 before an
        epoch has finished.
        """
        return int(self.head_losses.argmin())

    @property
    def progress(self) -> float:
        """Share of the schedule's steps that are done, 0-1."""
        return self.step / self.total_steps


def new_state(
    model: UnoModel,
    forward: nn.Module,
    phase: PhaseConfig,
    device: torch.device,
    autocast: bool,
    encoder_lr_factor: float = 1.0,
) -> TrainState:
    """Create the state of training at step 0 of a phase, with a new optimizer.

    A phase without epochs has no optimizer: PyTorch imports its compiler when it makes
    one, which takes seconds.

    Args:
        model: The model.
        forward: The model, or its DDP wrapper.
        phase: The settings of the phase: learning rate, momentum and weight decay.
        device: The device of the model.
        autocast: Whether forward passes use bfloat16.
        encoder_lr_factor: Learning rate of the encoder, as a multiple of that of the
            heads.

    Returns:
        The state. Its sums are zero, and ``head_losses`` is infinite for each of the H
        heads. H is 1 for a model without novel heads, as in pretraining.
    """
    optimizer = (
        make_optimizer(model, phase, encoder_lr_factor) if phase.epochs else None
    )
    num_heads = model.num_heads if model.num_novel else 1
    return TrainState(
        model,
        forward,
        optimizer,
        device,
        autocast,
        epoch_losses=torch.zeros(num_heads + 1, dtype=torch.float64, device=device),
        head_losses=torch.full((num_heads,), float("inf"), device=device),
        window_loss=torch.zeros(2, dtype=torch.float64, device=device),
        skipped=torch.zeros((), device=device),
    )


def make_optimizer(
    model: UnoModel, phase: PhaseConfig, encoder_lr_factor: float
) -> torch.optim.Optimizer:
    """Create the SGD optimizer of the paper, for the parameters that are not frozen.

    The momentum buffers are zeros. The fused kernel skips steps with gradients that are
    not finite without synchronizing the device. Checkpoints hold all tensors that the
    optimizer keeps for a parameter, so another optimizer needs a change in this
    function alone.

    Args:
        model: The model.
        phase: The settings of the phase: learning rate, momentum and weight decay.
        encoder_lr_factor: Learning rate of the encoder, as a multiple of that of the
            heads.

    Returns:
        The optimizer. Each parameter group has the key "factor", by which
        :func:`take_step` multiplies the learning rate. The encoder has a group of its
        own only if its factor is not 1 and it is not frozen.
    """
    trained = trained_parameters(model)
    encoder = [p for name, p in trained.items() if name.startswith("encoder.")]
    others = [p for name, p in trained.items() if not name.startswith("encoder.")]
    groups: list[dict[str, Any]] = [{"params": list(trained.values()), "factor": 1.0}]
    if encoder_lr_factor != 1 and encoder:
        groups = [
            {"params": encoder, "factor": encoder_lr_factor},
            {"params": others, "factor": 1.0},
        ]
    optimizer = torch.optim.SGD(
        groups,
        phase.base_lr,
        phase.momentum,
        weight_decay=phase.weight_decay,
        fused=True,
    )
    for parameter in trained.values():
        # The fused kernel would create the buffers in the first step, and leave them
        # uninitialized if it skips that step.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model that are not frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def state_tensors(state: TrainState) -> dict[str, Tensor]:
    """Return all tensors of a state that a checkpoint must hold, by name.

    A run that resumes from them continues bit for bit. The names begin with "model/"
    (weights and buffers), "optimizer/" or "extra/" (tensors that the method keeps), or
    are those in :data:`COUNTERS` (running losses and skipped steps). The number of the
    step, ``grad_norm`` and the teacher are not among them. The tensors are not copied.
    """
    tensors = {
        f"model/{name}": tensor for name, tensor in state.model.state_dict().items()
    }
    for name, kept in _optimizer_tensors(state).items():
        tensors |= {f"optimizer/{name}/{key}": tensor for key, tensor in kept.items()}
    tensors |= {f"extra/{name}": tensor for name, tensor in state.extra.items()}
    return tensors | {name: getattr(state, name) for name in COUNTERS}


def _optimizer_tensors(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that the optimizer keeps, such as momentum buffers.

    Returns:
        By the name of each parameter that is not frozen, a mapping of tensors by the
        optimizer's names, such as "momentum_buffer"; empty without an optimizer. The
        tensors are not copied.
    """
    if state.optimizer is None:
        return {}
    return {
        name: state.optimizer.state[parameter]
        for name, parameter in trained_parameters(state.model).items()
    }


def load_state_(state: TrainState, tensors: dict[str, Tensor], step: int) -> None:
    """Load the tensors of a checkpoint into the state of training, in place.

    The values of the model, the optimizer and the :data:`COUNTERS` are copied into the
    tensors that the state has. ``state.extra`` becomes a new dict with a copy, on the
    device of the state, of every tensor whose name begins with "extra/", by the rest of
    its name. Names and shapes of these are not checked. ``state.step`` becomes
    ``step``. Everything else in the state stays, and other names in ``tensors`` are
    ignored. After an error the state may be loaded in part.

    Args:
        state: The state of a model of the same shape. It is updated.
        tensors: The tensors of the checkpoint, by the names of :func:`state_tensors`.
        step: The number of optimizer steps before the checkpoint.

    Raises:
        KeyError: A tensor of the optimizer or of :data:`COUNTERS` is missing.
        RuntimeError: A tensor of the model is missing, unknown or of another shape; or
            a tensor of the optimizer or of :data:`COUNTERS` cannot be broadcast to the
            shape of the one in the state.
    """
    state.model.load_state_dict(with_prefix(tensors, "model/"))
    for name, kept in _optimizer_tensors(state).items():
        for key, tensor in kept.items():
            tensor.copy_(tensors[f"optimizer/{name}/{key}"])
    for name in COUNTERS:
        getattr(state, name).copy_(tensors[name])
    extra = with_prefix(tensors, "extra/")
    state.extra = {
        name: tensor.to(state.device, copy=True) for name, tensor in extra.items()
    }
    state.step = step


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Select the tensors whose names begin with a prefix, and remove the prefix.

    Args:
        tensors: Tensors by name.
        prefix: The beginning of the names to select, such as "model/"; '' for all.
    """
    return {
        name.removeprefix(prefix): t
        for name, t in tensors.items()
        if name.startswith(prefix)
    }


class Loss(NamedTuple):
    """The loss of a batch for a model with several cluster heads.

    Attributes:
        total: The loss to minimize, a scalar.
        of_heads: The loss of each head, (H,). The head with the lowest mean over an
            epoch is the best head.
    """

    total: Tensor
    of_heads: Tensor


LossFunction = Callable[[TrainState, Batch, Config], "Tensor | Loss"]
"""Compute the loss of a batch: (state, batch, configuration) -> loss.

The loss is a scalar, or a :class:`Loss` if the model has several cluster heads. The
function calls :func:`forward` once, does not synchronize the device, and may replace
tensors in ``state.extra``. It draws no number from a global generator.
"""


Step = Callable[[TrainState, Batch, Config, float], Tensor]
"""Train on one batch: (state, batch, configuration, learning rate) -> loss (1,).

The state is updated, see :func:`take_step`.
"""


def take_step(
    loss_function: LossFunction,
    state: TrainState,
    batch: Batch,
    config: Config,
    lr: float,
) -> Tensor:
    """Take one SGD step on the loss of a batch, and count the loss in ``state``.

    Gradients are averaged over all workers, so that a NaN on one rank makes all ranks
    skip the step: the optimizer changes neither weights nor momentum, the sums of
    losses stay, and ``state.skipped`` rises by one. (The loss function has then already
    scaled the prototypes, and updated running statistics and ``state.extra``.)
    ``state.step`` rises in any case, and ``state.grad_norm`` becomes the L2 norm of all
    gradients together. The gradients of the parameters stay until the next step. The
    device is not synchronized.

    Args:
        loss_function: Computes the loss. If it returns a scalar instead of a
            :class:`Loss`, the scalar also counts as the loss of a single head.
        state: The state of training. It is updated.
        batch: The batch.
        config: The configuration of the run.
        lr: The learning rate, which is multiplied by the factor of each parameter
            group.

    Returns:
        The total loss of this worker's rows (1,), detached, also if the step was
        skipped.
    """
    loss = loss_function(state, batch, config)
    if not isinstance(loss, Loss):
        loss = Loss(loss, loss.unsqueeze(0))
    assert state.optimizer is not None
    state.optimizer.zero_grad(set_to_none=True)
    loss.total.backward()
    grads = [p.grad for p in state.model.parameters() if p.grad is not None]
    state.grad_norm = torch.nn.utils.get_total_norm(grads)
    broken = (~torch.isfinite(state.grad_norm)).float()
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group["factor"]
    # The fused kernel reads this attribute: 1 skips the step.
    state.optimizer.found_inf = broken  # type: ignore[attr-defined]
    state.optimizer.step()
    state.skipped += broken
    total, heads = loss.total.detach().unsqueeze(0), loss.of_heads.detach()
    one, skip = total.new_ones(1), broken > 0
    state.epoch_losses += torch.where(skip, 0.0, torch.cat([heads, one]))
    state.window_loss += torch.where(skip, 0.0, torch.cat([total, one]))
    state.step += 1
    return total


def forward(state: TrainState, batch: Batch) -> Logits:
    """Compute the logits of all views of a batch, for training.

    The prototypes of the model are scaled to length one first, in place. The forward
    pass uses bfloat16 if ``state.autocast``.

    Args:
        state: The state of training, with the model.
        batch: The batch of V views.

    Returns:
        The outputs of all heads for all views and rows, which are cosines with
        prototypes, the features, and the projections, as
        :meth:`uno.model.UnoModel.forward` returns them.
    """
    state.model.normalize_prototypes_()
    with torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast):
        return state.forward(batch.views)


def pretrain_loss(state: TrainState, batch: Batch, config: Config) -> Tensor:
    """Compute the loss of supervised pretraining (paper Sec. 4.1 "Pretraining").

    The prototypes of the model are scaled to length one first, in place.

    Args:
        state: The state of training.
        batch: The batch, whose rows are all labeled.
        config: The configuration of the run.

    Returns:
        The cross-entropy of the known head, a scalar: the mean over all views and rows.
    """
    known = forward(state, batch).known
    return labeled_loss(known, batch.labels, config.objective.temperature)


def labeled_loss(known: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Compute the cross-entropy of the known head on the labeled rows.

    Args:
        known: Cosines of V views of B rows with C known prototypes, (V, B, C), at least
            float32.
        labels: Classes of the first B_l rows, int64 (B_l,). The other rows are ignored.
        temperature: The divisor tau of the cosines.

    Returns:
        The mean over views and labeled rows, a scalar; NaN if there is no labeled row.
    """
    logits = known[:, : len(labels)].flatten(0, 1) / temperature
    return F.cross_entropy(logits, labels.repeat(len(known)))
