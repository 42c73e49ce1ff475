"""The training loop of plain processes, torchrun ranks, Ray workers and Tune trials."""

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
from uno.pace import StepTimer
from uno.profile import Profile
from uno.runs.checkpoint import Checkpoint, load_newest, prune, save_checkpoint
from uno.runs.journal import Journal
from uno.schedule import warmup_cosine
from uno.state import TrainState, load_state_, state_tensors
from uno.steps import Batch, Step
from uno.text import plural

MAX_SKIPPED_STEPS = 3  # steps with non-finite gradients before a roll-back
REPORT_S = 10.0  # seconds after which a step between two lines is reported

log = logging.getLogger(__name__)


class Worker(Protocol):
    """The process that runs the training loop: a plain process or one rank of several.

    Attributes:
        rank: The number of this process, from 0.
        world_size: The number of processes that train together.
        device: The device of this process.
    """

    rank: int
    world_size: int
    device: torch.device

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training: the model, or its DDP wrapper."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Hand a line of metrics to the console, the loggers or Ray.

        All ranks report the end of an epoch equally often.
        """

    def should_stop(self, step: int) -> bool:
        """Return whether to save and end before ``step``, the same on every rank."""


class LocalWorker:
    """A worker that trains in this process alone, without a process group.

    Args:
        device: The device to train on.
        on_report: Takes each line of metrics.

    Attributes:
        stop_requested: Set to True, for example by a signal handler, to stop training
            before the next step.
    """

    rank, world_size, stop_requested = 0, 1, False

    def __init__(
        self,
        device: torch.device,
        on_report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    ) -> None:
        self.device, self.report = device, on_report

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def should_stop(self, step: int) -> bool:
        """Return whether ``stop_requested`` was set."""
        return self.stop_requested


@dataclass(frozen=True)
class Phase:
    """A training phase: its length, its learning rate and its step function.

    Attributes:
        name: "pretext", "pretrain" or "discover".
        config: The settings of the phase.
        steps_per_epoch: The number of steps in an epoch.
        images_per_step: The number of images in a step, over all workers.
        max_steps: The step at which training ends early, None for the whole schedule.
        step: The function that trains on one batch.
    """

    name: str
    config: PhaseConfig
    steps_per_epoch: int
    images_per_step: int
    max_steps: int | None
    step: Step

    @property
    def total_steps(self) -> int:
        """The number of steps in the learning rate schedule."""
        return self.config.epochs * self.steps_per_epoch

    @property
    def warmup_steps(self) -> int:
        """The number of first steps in which the learning rate rises."""
        return round(self.config.warmup_epochs * self.steps_per_epoch)

    @property
    def last_step(self) -> int:
        """The step at which training ends: ``max_steps`` or the end of the schedule."""
        return min(self.total_steps, self.max_steps or self.total_steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of one step."""
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
    """Train a phase from its newest checkpoint to its end.

    A resumed run ends with the same weights as one without interruption. This updates
    the state, writes checkpoints and ``metrics.jsonl``, and reports metrics to the
    worker.

    Args:
        config: The configuration of the run.
        phase: The phase to train.
        state: The state at step 0. It is updated.
        batches: Returns the batch of a step. It must depend on nothing but the step.
        worker: The process that trains.
        storage: The run directory.

    Raises:
        Interrupted: The worker was asked to stop. The state is saved, unless it is not
            finite.
        NumericsError: Losses or weights were not finite again after a roll-back.
        StorageError: A checkpoint cannot be written, or all checkpoints are damaged.
    """
    state.total_steps, state.warmup_steps = (
        max(1, phase.total_steps),
        phase.warmup_steps,
    )
    resumed = resume_(state, storage, phase.name)
    timer = StepTimer(state, batches)
    save_every = config.train.checkpoint_every_epochs * phase.steps_per_epoch
    health, first, last_report, saved_at = (
        Health(state),
        state.step + 1,
        time.monotonic(),
        time.monotonic(),
    )
    state.model.train()
    with ExitStack() as stack:
        stack.enter_context(closing(timer))
        stack.enter_context(kept_memory(worker.device))
        stack.enter_context(_detect_anomalies(config, phase, state))
        traced = config.train.profiled if worker.rank == 0 else range(0)
        profile = stack.enter_context(
            Profile(traced, phase.name, worker.device, storage)
        )
        journal = stack.enter_context(
            Journal(storage if worker.rank == 0 else None, phase.name, state.step)
        )
        save = partial(_save, config, phase, state, worker, storage, journal)
        if not resumed and phase.last_step == 0:
            save()  # later phases start from the checkpoint of this one
        while state.step < phase.last_step:
            if worker.should_stop(state.step):
                if _is_finite(state):
                    save()
                at = f"{phase.name} step {state.step} of {phase.last_step}"
                raise Interrupted(f"stopped at {at}; resume with the same command")
            lr = phase.lr(state.step)
            profile.before(state.step)
            timer.begin()
            phase.step(state, batches(state.step), config, lr)

            at_end = state.step == phase.last_step
            at_epoch_end = at_end or state.step % phase.steps_per_epoch == 0
            to_log = at_epoch_end or state.step % config.train.log_every == 0
            to_save = at_end or state.step % save_every == 0
            if not (to_log or to_save):  # this must not synchronize the device
                # two reports are enough for an estimate of the remaining time
                if state.step == first or time.monotonic() - last_report > REPORT_S:
                    last_report = time.monotonic()
                    worker.report(
                        _describe_position(phase, state.step)
                        | {"event": "step", "every_s": REPORT_S}
                    )
                continue
            if health.is_lost(state):
                _wait_for_writes(journal, state)
                health.roll_back_(state, storage, phase)
                journal.rewind(state.step)
                timer.restart()
                continue
            if at_epoch_end:
                _finish_epoch_(state)
            if to_log:
                metrics, last_report = (
                    _collect_metrics_(phase, state, lr, timer),
                    time.monotonic(),
                )
                if at_epoch_end:
                    metrics["head_losses"] = state.head_losses.tolist()
                if math.isfinite(metrics["loss"]):
                    journal.write(metrics)
                worker.report(metrics | {"rank_ms": timer.rank_ms})
            if to_save or (to_log and _is_checkpoint_due(config, worker, saved_at)):
                save(wait=at_end or storage.is_local)
                saved_at = time.monotonic()


@contextmanager
def _detect_anomalies(
    config: Config, phase: Phase, state: TrainState
) -> Iterator[None]:
    """Turn on PyTorch's anomaly detection inside the block, if the configuration asks.

    Raises:
        NumericsError: ``compute.detect_anomaly`` is set, and a backward pass met a NaN.
    """
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
    """Decide whether training must be rolled back to the newest checkpoint.

    A step with gradients that are not finite is skipped. A few skipped steps are
    tolerated. A roll-back is needed if weights are not finite, or if more than
    :data:`MAX_SKIPPED_STEPS` steps were skipped since the last check that found no
    newly skipped step. A second roll-back is refused.

    Args:
        state: The state at the beginning of training.
    """

    def __init__(self, state: TrainState) -> None:
        # the numbers of skipped steps at the last check, and at the last check that
        # found no newly skipped step
        self._num_skipped = self._num_tolerated = int(state.skipped)
        self._rolled_back = False

    def is_lost(self, state: TrainState) -> bool:
        """Return whether to roll back, with the same answer on all ranks.

        This synchronizes the device. A warning is logged if steps were skipped since
        the last call.
        """
        before, self._num_skipped = self._num_skipped, int(state.skipped)
        if self._num_skipped == before:
            self._num_tolerated = before
        else:
            skipped = plural(self._num_skipped - before, "non-finite step")
            log.warning("skipped %s before step %d", skipped, state.step)
        return (
            not _is_finite(state)
            or self._num_skipped - self._num_tolerated > MAX_SKIPPED_STEPS
        )

    def roll_back_(self, state: TrainState, storage: Storage, phase: Phase) -> None:
        """Load the newest checkpoint into ``state``, at most once in a phase.

        Raises:
            NumericsError: There is no checkpoint, or the phase was rolled back before.
        """
        at = f"{phase.name} step {state.step}"
        if self._rolled_back or not resume_(state, storage, phase.name):
            advice = f"lower {phase.name}.base_lr or check the data's values"
            raise NumericsError(f"non-finite loss at {at}; {advice}")
        log.warning("non-finite loss at %s; rolled back to step %d", at, state.step)
        self._num_skipped = self._num_tolerated = int(state.skipped)
        self._rolled_back = True


def _describe_position(phase: Phase, step: int) -> dict[str, Any]:
    """Return the name, step and epoch of a phase, as part of a line of metrics."""
    return {
        "phase": phase.name,
        "step": step,
        "total_steps": phase.last_step,
        "epoch": -(-step // phase.steps_per_epoch),
        "epochs": -(-phase.last_step // phase.steps_per_epoch),
    }


def _collect_metrics_(
    phase: Phase, state: TrainState, lr: float, timer: StepTimer
) -> dict[str, Any]:
    """Return a line of metrics on the steps since the last line, over all workers.

    The window of the loss in ``state`` and the times in ``timer`` begin anew.

    Returns:
        Values by name. "loss" is the mean over the steps, NaN if all were skipped.
        "event" is "epoch" at the end of an epoch and "step" otherwise.
    """
    total, count = collectives.all_reduce_sum_(state.window_loss.clone()).tolist()
    state.window_loss.zero_()
    return {
        **_describe_position(phase, state.step),
        "event": "epoch" if state.step % phase.steps_per_epoch == 0 else "step",
        "loss": total / count if count else math.nan,
        "lr": lr,
        **timer.collect(phase.images_per_step),
        "skipped_steps": int(state.skipped),
    }


def resume_(state: TrainState, storage: Storage, phase: str) -> bool:
    """Load the newest valid checkpoint of a phase into ``state``.

    Returns:
        Whether the phase has a checkpoint.

    Raises:
        StorageError: The checkpoint does not fit the model, or all are damaged.
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


def _is_checkpoint_due(config: Config, worker: Worker, saved_at: float) -> bool:
    """Return whether it is time for a checkpoint, by the clock of rank 0.

    All ranks get the same answer. ``train.checkpoint_every_minutes`` decides.

    Args:
        config: The configuration of the run.
        worker: This worker.
        saved_at: The time of the last checkpoint, by ``time.monotonic()``.
    """
    minutes = config.train.checkpoint_every_minutes
    if minutes is None:
        return False
    is_old = worker.rank == 0 and time.monotonic() - saved_at >= 60 * minutes
    return bool(
        collectives.all_reduce_sum_(torch.tensor([float(is_old)], device=worker.device))
    )


def _finish_epoch_(state: TrainState) -> None:
    """Compute the mean loss of each head over the epoch and all workers.

    The means are stored in ``state.head_losses``, which is not changed if all steps
    were skipped. The sums in ``state.epoch_losses`` become zero.
    """
    *_, count = sums = collectives.all_reduce_sum_(state.epoch_losses)
    state.head_losses.copy_(
        torch.where(count > 0, sums[:-1] / count, state.head_losses)
    )
    state.epoch_losses.zero_()


def _is_finite(state: TrainState) -> bool:
    """Return whether all weights and running statistics are finite, on all ranks."""
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
    """Save a checkpoint of the state, which does not change the state.

    All ranks must call this. Rank 0 writes the file in the thread of the journal, and
    deletes old checkpoints. A second checkpoint waits for the first.

    Args:
        config: The configuration of the run.
        phase: The phase that is trained.
        state: The state to save.
        worker: This worker.
        storage: The run directory.
        journal: The journal of the run, whose thread writes the file.
        wait: Whether all ranks wait until the file is written.
    """
    tensors = state_tensors(state)
    for name in ("epoch_losses", "window_loss"):
        tensors[name] = (
            collectives.all_reduce_sum_(tensors[name].clone()) / worker.world_size
        )
    if worker.rank == 0:
        journal.flush()  # so that at most one copy of a checkpoint is in memory
        checkpoint = Checkpoint(state.step, tensors, dump_yaml(config))
        # The checkpoint is written after the lines of its steps, because a run that
        # resumes from it does not write these lines again.
        save_checkpoint(storage, phase.name, checkpoint, journal.enqueue)
        journal.enqueue(
            partial(
                prune, storage, phase.name, state.step, config.train.keep_checkpoints
            )
        )
    if wait:
        _wait_for_writes(journal, state)


def _wait_for_writes(journal: Journal, state: TrainState) -> None:
    """Wait on all ranks until rank 0 has written all files.

    No rank can then read checkpoints while one is still being written.
    """
    journal.flush()
    collectives.barrier(state.device)
