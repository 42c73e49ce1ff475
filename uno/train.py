"""THE training loop, the same without Ray, in a Ray Train worker and in a Tune
trial.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from uno import collectives
from uno.allocator import kept_memory
from uno.config import Config, PhaseConfig, dump_yaml
from uno.data.files import Storage
from uno.errors import Interrupted, NumericsError, StorageError, one_line
from uno.pace import Pace
from uno.profile import Profile
from uno.runs.checkpoint import Checkpoint, load_newest, prune, save_checkpoint
from uno.runs.journal import Journal
from uno.schedule import warmup_cosine
from uno.state import TrainState, load_state_, state_tensors
from uno.steps import Batch, Step
from uno.text import plural

MAX_SKIPPED_STEPS = 3  # non-finite steps tolerated before rolling back
QUIET_S = 10.0  # after which somebody wants to know how far it is

log = logging.getLogger(__name__)


class Worker(Protocol):
    """What the loop needs to know of where it runs: LocalWorker, or a worker of
    ``pipelines`` or ``tune``.
    """

    rank: int
    world_size: int
    device: torch.device

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training: the model itself, or its DDP wrapper."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Hand a line of metrics to whoever watches; those of an epoch on every rank
        equally often.
        """

    def should_stop(self, step: int) -> bool:
        """Whether to save and leave before ``step``; the same answer on every rank."""


class LocalWorker:
    """This process alone: no Ray, no process group, pdb works. A signal handler sets
    ``stop_requested``.
    """

    rank, world_size, stop_requested = 0, 1, False

    def __init__(
        self,
        device: torch.device,
        on_report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    ) -> None:
        self.device, self.report = device, on_report

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def should_stop(self, step: int) -> bool:
        """True once ``stop_requested`` was set."""
        return self.stop_requested


@dataclass(frozen=True)
class Phase:
    """One training phase: how long it is and which step function it repeats."""

    name: str  # pretext | pretrain | discover
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
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return round(self.config.warmup_epochs * self.steps_per_epoch)

    @property
    def last_step(self) -> int:
        """Where training ends: the schedule's end or ``max_steps``."""
        return min(self.total_steps, self.max_steps or self.total_steps)

    def lr(self, step: int) -> float:
        """Learning rate of one step."""
        config = self.config
        return warmup_cosine(
            step, self.total_steps, self.warmup_steps, config.base_lr, config.min_lr
        )


def fit(
    config: Config,
    phase: Phase,
    state: TrainState,
    batches: Callable[[int], Batch],
    worker: Worker,
    storage: Storage,
) -> None:
    """Train from the newest checkpoint of ``phase`` to its end, in place.

    ``batches(step)`` must be a pure function of the step: that makes a resumed run
    equal to an uninterrupted one. Interrupted: a stop was requested; the state is
    saved, unless it is non-finite. NumericsError: non-finite steps persisted after
    rolling back once. StorageError: a checkpoint cannot be written, or none of those
    present verifies.
    """
    state.total_steps, state.warmup_steps = (
        max(1, phase.total_steps),
        phase.warmup_steps,
    )
    resumed = resume_(state, storage, phase.name)
    pace = Pace(state, batches)
    save_every = config.train.checkpoint_every_epochs * phase.steps_per_epoch
    health, first, last_report, saved_at = (
        Health(state),
        state.step + 1,
        time.monotonic(),
        time.monotonic(),
    )
    state.model.train()
    with ExitStack() as until:
        until.enter_context(closing(pace))
        until.enter_context(kept_memory(worker.device))
        until.enter_context(_anomalies(config, phase, state))
        traced = config.train.profiled if worker.rank == 0 else range(0)
        profile = until.enter_context(
            Profile(traced, phase.name, worker.device, storage)
        )
        journal = until.enter_context(
            Journal(storage if worker.rank == 0 else None, phase.name, state.step)
        )
        save = partial(_save, config, phase, state, worker, storage, journal)
        if not resumed and phase.last_step == 0:
            save()  # a phase without steps ends as it began
        while state.step < phase.last_step:
            if worker.should_stop(state.step):
                if _finite(state):
                    save()
                at = f"{phase.name} step {state.step} of {phase.last_step}"
                raise Interrupted(f"stopped at {at}; resume with the same command")
            lr = phase.lr(state.step)
            profile.before(state.step)
            pace.begin()
            phase.step(state, batches(state.step), config, lr)

            at_end = state.step == phase.last_step
            at_epoch_end = at_end or state.step % phase.steps_per_epoch == 0
            to_log = at_epoch_end or state.step % config.train.log_every == 0
            to_save = at_end or state.step % save_every == 0
            if not (to_log or to_save):  # nothing here waits for the device
                # two of them give an ETA
                if state.step == first or time.monotonic() - last_report > QUIET_S:
                    last_report = time.monotonic()
                    worker.report(
                        _position(phase, state.step)
                        | {"event": "step", "every_s": QUIET_S}
                    )
                continue
            if health.is_lost(state):
                _settle(journal, state)
                health.roll_back_(state, storage, phase)
                journal.rewind(state.step)
                pace.restart()
                continue
            if at_epoch_end:
                _finish_epoch_(state)
            if to_log:
                metrics, last_report = (
                    _collect_metrics_(phase, state, lr, pace),
                    time.monotonic(),
                )
                if at_epoch_end:
                    metrics["head_losses"] = state.head_losses.tolist()
                if math.isfinite(metrics["loss"]):
                    journal.write(metrics)
                worker.report(metrics | {"rank_ms": pace.rank_ms})
            if to_save or (to_log and _is_due(config, worker, saved_at)):
                save(wait=at_end or storage.is_local)
                saved_at = time.monotonic()


@contextmanager
def _anomalies(config: Config, phase: Phase, state: TrainState) -> Iterator[None]:
    """With ``compute.detect_anomaly``, NumericsError: a backward pass met a NaN."""
    try:
        with torch.autograd.set_detect_anomaly(config.compute.detect_anomaly):
            yield
    except RuntimeError as error:
        if not config.compute.detect_anomaly or "returned nan values" not in str(error):
            raise
        raise NumericsError(
            f"{phase.name} step {state.step}: {one_line(error)}"
        ) from None


class Health:
    """Whether training is still sound: single non-finite steps, which are skipped, are
    tolerated; a series of them, or non-finite weights, end in one roll-back to the
    newest checkpoint.
    """

    def __init__(self, state: TrainState) -> None:
        # at the last look; when a series of them began
        self._skipped = self._tolerated = int(state.skipped)
        self._rolled_back = False

    def is_lost(self, state: TrainState) -> bool:
        """Whether to roll back, on all ranks alike; this waits for the device."""
        before, self._skipped = self._skipped, int(state.skipped)
        if self._skipped == before:
            self._tolerated = before
        else:
            skipped = plural(self._skipped - before, "non-finite step")
            log.warning("skipped %s before step %d", skipped, state.step)
        return not _finite(state) or self._skipped - self._tolerated > MAX_SKIPPED_STEPS

    def roll_back_(self, state: TrainState, storage: Storage, phase: Phase) -> None:
        """Load the newest checkpoint. NumericsError: there is none, or it was loaded
        for this before.
        """
        at = f"{phase.name} step {state.step}"
        if self._rolled_back or not resume_(state, storage, phase.name):
            advice = f"lower {phase.name}.base_lr or check the data's values"
            raise NumericsError(f"non-finite loss at {at}; {advice}")
        log.warning("non-finite loss at %s; rolled back to step %d", at, state.step)
        self._skipped = self._tolerated = int(state.skipped)
        self._rolled_back = True


def _position(phase: Phase, step: int) -> dict[str, Any]:
    """Where a phase is, as a line of metrics says it."""
    return {
        "phase": phase.name,
        "step": step,
        "total_steps": phase.last_step,
        "epoch": -(-step // phase.steps_per_epoch),
        "epochs": -(-phase.last_step // phase.steps_per_epoch),
    }


def _collect_metrics_(
    phase: Phase, state: TrainState, lr: float, pace: Pace
) -> dict[str, Any]:
    """Metrics of the steps since the last line; ``loss`` is their mean, NaN where
    every step was skipped.
    """
    total, count = collectives.all_reduce_sum_(state.window_loss.clone()).tolist()
    state.window_loss.zero_()
    return {
        **_position(phase, state.step),
        "event": "epoch" if state.step % phase.steps_per_epoch == 0 else "step",
        "loss": total / count if count else math.nan,
        "lr": lr,
        **pace.line(phase.images_per_step),
        "skipped_steps": int(state.skipped),
    }


def resume_(state: TrainState, storage: Storage, phase: str) -> bool:
    """Load the newest valid checkpoint of a phase, in place; False where there is
    none.
    """
    checkpoint = load_newest(storage, phase)
    if checkpoint is not None:
        try:
            load_state_(state, checkpoint.tensors, checkpoint.step)
        except (KeyError, RuntimeError) as error:
            raise StorageError(
                f"the {phase} checkpoint does not fit this model: {one_line(error)}"
            ) from None
    return checkpoint is not None


def _is_due(config: Config, worker: Worker, saved_at: float) -> bool:
    """Whether the last checkpoint is too old, by rank 0's clock."""
    minutes = config.train.checkpoint_every_minutes
    if minutes is None:
        return False
    is_old = worker.rank == 0 and time.monotonic() - saved_at >= 60 * minutes
    return bool(
        collectives.all_reduce_sum_(torch.tensor([float(is_old)], device=worker.device))
    )


def _finish_epoch_(state: TrainState) -> None:
    """Move the epoch's mean head losses over all workers to ``head_losses`` and
    start counting anew.
    """
    *_, count = sums = collectives.all_reduce_sum_(state.epoch_losses)
    state.head_losses.copy_(
        torch.where(count > 0, sums[:-1] / count, state.head_losses)
    )
    state.epoch_losses.zero_()


def _finite(state: TrainState) -> bool:
    """Whether weights and running statistics are finite, on all ranks alike."""
    tensors = [t for t in state.model.state_dict().values() if t.is_floating_point()]
    finite = torch.stack([t.isfinite().all() for t in tensors]).all()
    return not bool(collectives.all_reduce_sum_((~finite).float().reshape(1)))


def _save(
    config: Config,
    phase: Phase,
    state: TrainState,
    worker: Worker,
    storage: Storage,
    journal: Journal,
    wait: bool = True,
) -> None:
    """Store the state as it is: nothing in it changes, so an extra checkpoint never
    changes the run. Without ``wait`` training continues while rank 0 writes it; of two
    checkpoints the second waits for the first.
    """
    tensors = state_tensors(state)
    for name in ("epoch_losses", "window_loss"):
        tensors[name] = (
            collectives.all_reduce_sum_(tensors[name].clone()) / worker.world_size
        )
    if worker.rank == 0:
        journal.flush()  # one checkpoint at a time is in memory
        checkpoint = Checkpoint(state.step, tensors, dump_yaml(config))
        # After its lines: a run that resumes from here drops later ones, and writes
        # none of these again.
        save_checkpoint(storage, phase.name, checkpoint, journal.enqueue)
        journal.enqueue(
            partial(
                prune, storage, phase.name, state.step, config.train.keep_checkpoints
            )
        )
    if wait:
        _settle(journal, state)


def _settle(journal: Journal, state: TrainState) -> None:
    """Return on all ranks when rank 0 has written all: nobody looks for a checkpoint
    that it still writes.
    """
    journal.flush()
    collectives.barrier(state.device)
