"""The one mutable object of training."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from uno.config import PhaseConfig
from uno.model import UnoModel

COUNTERS = ("epoch_losses", "head_losses", "window_loss", "skipped")


@dataclass
class TrainState:
    """Model, optimizer and the running head losses after ``step`` optimizer steps.

    ``epoch_losses`` (H + 1,) sums the cluster loss of each head over this worker's
    current epoch, and counts its steps; ``head_losses`` (H,) is the mean over the last
    finished epoch and all workers; ``window_loss`` (2,) the sum and count of the total
    loss since the last line of metrics. Skipped steps enter none of them. The sums are
    float64: adding float32 numbers in another order, as a resumed run does, changes no
    bit of them.
    """

    model: UnoModel
    forward: nn.Module  # the model, or its DDP wrapper
    optimizer: torch.optim.Optimizer
    device: torch.device
    autocast: bool
    epoch_losses: Tensor
    head_losses: Tensor
    window_loss: Tensor
    skipped: Tensor  # () steps skipped for non-finite gradients
    step: int = 0
    # of the phase's schedule and its warm-up; set by uno.train.fit
    total_steps: int = 1
    warmup_steps: int = 0
    # what a method keeps from step to step
    extra: dict[str, Tensor] = field(default_factory=dict)
    # () of all gradients of the last step; not in checkpoints
    grad_norm: Tensor | None = None
    # the pretrained network, of methods that ask for it; not in checkpoints
    teacher: nn.Module | None = None

    @property
    def best_head(self) -> int:
        """Index of the head with the lowest training cluster loss over the last
        finished epoch.
        """
        return int(self.head_losses.argmin())

    @property
    def progress(self) -> float:
        """Share of the phase that is done, 0-1."""
        return self.step / self.total_steps


def new_state(
    model: UnoModel,
    forward: nn.Module,
    phase: PhaseConfig,
    device: torch.device,
    autocast: bool,
    encoder_lr_factor: float = 1.0,
) -> TrainState:
    """State at step 0, with SGD as in the paper, over what is trained; the encoder's
    rate is ``encoder_lr_factor`` times that of the rest. The fused kernel skips
    non-finite steps without waiting. Another optimizer is named here alone, with all
    that it keeps of a parameter: checkpoints hold that, whatever it is.
    """
    trained, num_heads = (
        trained_parameters(model),
        model.num_heads if model.num_novel else 1,
    )
    groups: list[dict[str, Any]] = [{"params": list(trained.values()), "factor": 1.0}]
    if encoder_lr_factor != 1:
        encoder = {
            name: p for name, p in trained.items() if name.startswith("encoder.")
        }
        rest = [p for name, p in trained.items() if name not in encoder]
        slow = (
            [{"params": list(encoder.values()), "factor": encoder_lr_factor}]
            if encoder
            else []
        )
        groups = [*slow, {"params": rest, "factor": 1.0}]
    optimizer = torch.optim.SGD(
        groups,
        phase.base_lr,
        phase.momentum,
        weight_decay=phase.weight_decay,
        fused=True,
    )
    for parameter in trained.values():
        # Where the very first step is skipped, the fused kernel leaves buffers it makes
        # itself uninitialized.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
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


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def state_tensors(state: TrainState) -> dict[str, Tensor]:
    """All tensors needed to continue bit for bit, by name."""
    tensors = {
        f"model/{name}": tensor for name, tensor in state.model.state_dict().items()
    }
    for name, parameter in trained_parameters(state.model).items():
        kept = state.optimizer.state[parameter]
        tensors |= {f"optimizer/{name}/{key}": tensor for key, tensor in kept.items()}
    tensors |= {f"extra/{name}": tensor for name, tensor in state.extra.items()}
    return tensors | {name: getattr(state, name) for name in COUNTERS}


def load_state_(state: TrainState, tensors: dict[str, Tensor], step: int) -> None:
    """Put stored tensors back, in place; the inverse of :func:`state_tensors`."""
    state.model.load_state_dict(with_prefix(tensors, "model/"))
    for name, parameter in trained_parameters(state.model).items():
        for key, tensor in state.optimizer.state[parameter].items():
            tensor.copy_(tensors[f"optimizer/{name}/{key}"])
    for name in COUNTERS:
        getattr(state, name).copy_(tensors[name])
    extra = with_prefix(tensors, "extra/")
    state.extra = {
        name: tensor.to(state.device, copy=True) for name, tensor in extra.items()
    }
    state.step = step


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, under the rest of their names."""
    return {
        name.removeprefix(prefix): t
        for name, t in tensors.items()
        if name.startswith(prefix)
    }
