"""The one mutable object of training."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from uno.config import PhaseConfig
from uno.model import UnoModel


@dataclass
class TrainState:
    """Model, optimizer and the running head losses after ``step`` optimizer steps.

    ``epoch_losses`` (H + 1,) sums the cluster loss of each head over the current epoch on this worker, and
    counts its steps; ``head_losses`` (H,) is the mean over the last finished epoch and all workers: the best
    head is its minimum. ``line_loss`` (2,) is the sum and count of the total loss since the last line of
    metrics. Steps skipped for non-finite gradients enter none of them. The sums are float64: adding float32
    numbers in another order, as a resumed run does, changes no bit of them.
    """

    model: UnoModel
    forward: nn.Module  # the model, or its DDP wrapper
    optimizer: torch.optim.Optimizer
    epoch_losses: Tensor
    head_losses: Tensor
    line_loss: Tensor
    autocast: bool = False
    step: int = 0
    total_steps: int = 1  # of the phase's schedule, its warm-up and an epoch; set by uno.train.fit
    warmup_steps: int = 0
    steps_per_epoch: int = 1
    extra: dict[str, Tensor] = field(default_factory=dict)  # what a method keeps from step to step
    teacher: UnoModel | None = None  # frozen, not in the checkpoint
    skipped: Tensor = field(default_factory=lambda: torch.zeros(()))  # steps skipped for non-finite gradients

    @property
    def best_head(self) -> int:
        """Index of the head with the lowest training cluster loss over the last finished epoch."""
        return int(self.head_losses.argmin())

    @property
    def progress(self) -> float:
        """Share of the phase that is done, 0-1."""
        return self.step / self.total_steps

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.epoch_losses.device


def new_state(
    model: UnoModel, forward: nn.Module, phase: PhaseConfig, device: torch.device, autocast: bool
) -> TrainState:
    """State at step 0, with SGD as in the paper; the fused kernel skips steps flagged non-finite without a
    sync.
    """
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=phase.base_lr,
        momentum=phase.momentum,
        weight_decay=phase.weight_decay,
        fused=True,
    )
    for parameter in model.parameters():
        # Where the very first step is skipped, the fused kernel leaves buffers it makes itself uninitialised.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    num_heads = model.num_heads if model.num_novel else 1
    return TrainState(
        model,
        forward,
        optimizer,
        epoch_losses=torch.zeros(num_heads + 1, dtype=torch.float64, device=device),
        head_losses=torch.full((num_heads,), float("inf"), device=device),
        line_loss=torch.zeros(2, dtype=torch.float64, device=device),
        autocast=autocast,
        skipped=torch.zeros((), device=device),
    )


COUNTERS = ("epoch_losses", "head_losses", "line_loss", "skipped")


def state_tensors(state: TrainState) -> dict[str, Tensor]:
    """All tensors needed to continue bit for bit, by name."""
    tensors = {f"model/{name}": tensor for name, tensor in state.model.state_dict().items()}
    for name, parameter in state.model.named_parameters():
        tensors[f"optimizer/{name}"] = state.optimizer.state[parameter]["momentum_buffer"]
    tensors |= {f"extra/{name}": tensor for name, tensor in state.extra.items()}
    return tensors | {name: getattr(state, name) for name in COUNTERS}


def load_state_(state: TrainState, tensors: dict[str, Tensor], step: int) -> None:
    """Put stored tensors back, in place; the inverse of :func:`state_tensors`."""
    model = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    state.model.load_state_dict(model)
    for name, parameter in state.model.named_parameters():
        state.optimizer.state[parameter]["momentum_buffer"].copy_(tensors[f"optimizer/{name}"])
    for name in COUNTERS:
        getattr(state, name).copy_(tensors[name])
    extra = {k.removeprefix("extra/"): v for k, v in tensors.items() if k.startswith("extra/")}
    state.extra = {name: tensor.to(state.device, copy=True) for name, tensor in extra.items()}
    state.step = step
