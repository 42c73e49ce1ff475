"""THE training loop, the same without Ray, in a Ray Train worker and in a Tune trial."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from uno import collectives
from uno.checkpoint import Checkpoint, load_newest, save_checkpoint
from uno.config import Config, ObjectiveConfig, PhaseConfig, dump_yaml
from uno.errors import Interrupted, NumericsError
from uno.journal import Journal
from uno.schedule import warmup_cosine
from uno.state import TrainState, load_state_, state_tensors
from uno.steps import Batch
from uno.storage import Storage

MAX_SKIPPED_STEPS = 3  # non-finite steps tolerated between two looks at the counter before rolling back

log = logging.getLogger(__name__)

Step = Callable[[TrainState, Batch, ObjectiveConfig, float], Tensor]


class Worker(Protocol):
    """What the loop needs to know of where it runs; implemented by LocalWorker and
    pipelines.worker.RayWorker.
    """

    rank: int
    world_size: int
    device: torch.device

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training: the model itself, or its DDP wrapper."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Hand a line of metrics to whoever watches; called on every rank equally often."""

    def should_stop(self, step: int) -> bool:
        """Whether to save and leave before ``step``; the same answer on every rank."""


class LocalWorker:
    """This process alone: no Ray, no process group, pdb works."""

    rank, world_size = 0, 1

    def __init__(
        self, device: torch.device, on_report: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.device = device
        self.stop_requested = False
        self._on_report = on_report

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def report(self, metrics: dict[str, Any]) -> None:
        """Pass the metrics on to ``on_report``."""
        if self._on_report is not None:
            self._on_report(metrics)

    def should_stop(self, step: int) -> bool:
        """True once ``stop_requested`` was set, by a signal handler."""
        return self.stop_requested


@dataclass(frozen=True)
class Phase:
    """One training phase: how long it is and which step function it repeats."""

    name: str  # pretrain | discover
    config: PhaseConfig
    steps_per_epoch: int
    images_per_step: int  # over all workers
    max_steps: int | None
    step: Step

    @property
    def total_steps(self) -> int:
        """Length of the schedule."""
        return self.config.epochs * self.steps_per_epoch

    @property
    def last_step(self) -> int:
        """Where training ends: the schedule's end or ``max_steps``."""
        return min(self.total_steps, self.max_steps or self.total_steps)

    def lr(self, step: int) -> float:
        """Learning rate of one step."""
        warmup_steps = round(self.config.warmup_epochs * self.steps_per_epoch)
        return warmup_cosine(step, self.total_steps, warmup_steps, self.config.base_lr, self.config.min_lr)


def fit(
    config: Config,
    phase: Phase,
    state: TrainState,
    batches: Callable[[int], Batch],
    worker: Worker,
    storage: Storage,
) -> None:
    """Train from the newest checkpoint of ``phase`` to its end, in place.

    ``batches(step)`` must be a pure function of the step: that makes a resumed run equal to an uninterrupted
    one.

    Raises:
        Interrupted: a stop was requested; the state is saved.
        NumericsError: non-finite steps persisted after rolling back to the last checkpoint once.
        StorageError: a checkpoint could not be written or none of those present verifies.
    """
    save_every = config.train.checkpoint_every_epochs * phase.steps_per_epoch
    resume_(state, storage, phase.name)
    journal = Journal(storage, phase.name, state.step) if worker.rank == 0 else None
    clock = _Clock(state.step)
    rolled_back = False
    skipped = int(state.skipped)
    loss_sum = torch.zeros(1, device=state.device)
    state.model.train()
    while state.step < phase.last_step:
        if worker.should_stop(state.step):
            _save(config, phase, state, worker, storage)
            raise Interrupted(
                f"stopped at {phase.name} step {state.step} of {phase.last_step}; "
                "resume with the same command"
            )
        lr = phase.lr(state.step)
        loss_sum += phase.step(state, batches(state.step), config.objective, lr)

        at_epoch_end = state.step % phase.steps_per_epoch == 0
        at_end = state.step == phase.last_step
        to_save = at_end or state.step % save_every == 0
        if not (at_epoch_end or to_save or state.step % config.train.log_every == 0):
            continue
        if at_epoch_end or at_end:
            _finish_epoch_(state, phase)
        if not _healthy(state, skipped):
            at = f"{phase.name} step {state.step}"
            if rolled_back or not resume_(state, storage, phase.name):
                raise NumericsError(
                    f"non-finite loss at {at}; lower {phase.name}.base_lr or check the data's values"
                )
            log.warning("non-finite loss at %s; rolled back to step %d", at, state.step)
            rolled_back, skipped = True, int(state.skipped)
            clock = _Clock(state.step)
            loss_sum.zero_()
            continue
        if at_epoch_end or at_end or state.step % config.train.log_every == 0:
            steps, seconds = clock.lap(state.step)
            mean_loss = float(collectives.sum_(loss_sum)) / (steps * worker.world_size)
            loss_sum.zero_()
            metrics: dict[str, Any] = {
                "phase": phase.name,
                "event": "epoch" if at_epoch_end else "step",
                "step": state.step,
                "total_steps": phase.last_step,
                "epoch": -(-state.step // phase.steps_per_epoch),
                "epochs": -(-phase.last_step // phase.steps_per_epoch),
                "loss": mean_loss,
                "lr": lr,
                "images_per_s": steps * phase.images_per_step / seconds,
                "skipped_steps": int(state.skipped),
            }
            if at_epoch_end or at_end:
                metrics["head_losses"] = state.head_losses.tolist()
            if journal is not None:
                journal.write(metrics)
            worker.report(metrics)
        if to_save:
            _save(config, phase, state, worker, storage)
    if journal is not None:
        journal.close()


def resume_(state: TrainState, storage: Storage, phase: str) -> bool:
    """Load the newest valid checkpoint of a phase, in place; False where there is none."""
    checkpoint = load_newest(storage, phase)
    if checkpoint is not None:
        load_state_(state, checkpoint.tensors, checkpoint.step)
    return checkpoint is not None


def _finish_epoch_(state: TrainState, phase: Phase) -> None:
    """Move the epoch's head losses, reduced over workers, to ``head_losses`` and start counting anew."""
    steps = state.step - (state.step - 1) // phase.steps_per_epoch * phase.steps_per_epoch
    _, workers = collectives.world()
    state.head_losses.copy_(collectives.sum_(state.epoch_losses) / (steps * workers))
    state.epoch_losses.zero_()


def _healthy(state: TrainState, skipped_before: int) -> bool:
    """Few skipped steps and finite buffers; the same answer on all ranks, because gradients are averaged."""
    skipped = int(state.skipped)
    if skipped > skipped_before:
        log.warning("skipped %d non-finite steps before step %d", skipped - skipped_before, state.step)
    finite = torch.stack([b.isfinite().all() for b in state.model.buffers() if b.is_floating_point()]).all()
    broken = collectives.sum_((~finite).float().reshape(1))
    return skipped - skipped_before <= MAX_SKIPPED_STEPS and not bool(broken)


def _save(config: Config, phase: Phase, state: TrainState, worker: Worker, storage: Storage) -> None:
    """Store the state as it is: nothing in it changes, so an extra checkpoint never changes the run."""
    tensors = state_tensors(state)
    tensors["epoch_losses"] = collectives.sum_(state.epoch_losses.clone()) / worker.world_size
    if worker.rank == 0:
        checkpoint = Checkpoint(state.step, tensors, {"phase": phase.name})
        save_checkpoint(storage, phase.name, checkpoint, dump_yaml(config), config.train.keep_checkpoints)


class _Clock:
    """Wall time between log lines."""

    def __init__(self, step: int) -> None:
        self._step, self._time = step, time.perf_counter()

    def lap(self, step: int) -> tuple[int, float]:
        """(steps, seconds) since the last lap."""
        now = time.perf_counter()
        lap = (step - self._step, now - self._time)
        self._step, self._time = step, now
        return lap
