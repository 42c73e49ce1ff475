"""The training loop: schedule, checkpoints, roll-back, metrics and timing.

Plain processes, torchrun ranks, Ray workers and Tune trials all run :func:`fit`.
"""

import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn

from uno import distributed
from uno.config import Config, PhaseConfig, dump_yaml
from uno.data.files import Storage
from uno.errors import Interrupted, NumericsError, StorageError, one_line
from uno.runs.checkpoint import (
    Checkpoint,
    load_newest,
    prune_checkpoints,
    save_checkpoint,
)
from uno.runs.journal import Journal
from uno.steps import Batch, Step, TrainState, load_state_, state_tensors
from uno.text import plural

MAX_SKIPPED_STEPS = 3  # steps with non-finite gradients before a roll-back
REPORT_S = 10.0  # seconds after which a step between two lines is reported
SLOW_RANK = 1.3  # a rank that needs more than this times the median is named

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
        """Return the module to call in training: ``model``, or its DDP wrapper.

        It is the wrapper if several processes train together.

        Args:
            model: The model, on the device of this process.
        """

    def report(self, metrics: dict[str, Any]) -> None:
        """Hand metrics of the training to the console, the loggers or Ray.

        :func:`fit` calls this on every rank, for two kinds of lines. Lines with "loss"
        come from all ranks at the same steps. Lines without it only say how far
        training has got: a rank reports one after its first step, and whenever its own
        clock shows ten seconds without a line. So an implementation must not wait for
        other ranks in these.

        Args:
            metrics: Values by name. "phase", "step" and "event" are always there.
                "event" is "epoch" at the end of a full epoch and "step" otherwise.
        """

    def should_stop(self, step: int) -> bool:
        """Return whether training must stop now, with the same answer on every rank.

        Training then saves a checkpoint and ends.

        Args:
            step: The number of steps that are done.
        """


class LocalWorker:
    """A worker that trains in this process alone, without a process group.

    Args:
        device: The device to train on.
        on_report: Takes each line of metrics, values by name. By default nothing is
            called.

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
        """Return the model itself, because there is only one process."""
        return model

    def should_stop(self, step: int) -> bool:
        """Return whether training must stop now: whether ``stop_requested`` was set.

        Args:
            step: The number of steps that are done, which does not matter here.
        """
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
        step: Trains on one batch, such as :func:`uno.steps.take_step`.
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
        """The number of first steps in which the learning rate rises, rounded."""
        return round(self.config.warmup_epochs * self.steps_per_epoch)

    @property
    def last_step(self) -> int:
        """The number of steps after which training ends.

        It is ``max_steps`` or the length of the schedule, whichever is smaller.
        """
        return min(self.total_steps, self.max_steps or self.total_steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of one step of the phase: warm-up, then cosine.

        Args:
            step: The number of the step, from 0.
        """
        config = self.config
        return warmup_cosine(
            step, self.total_steps, self.warmup_steps, config.base_lr, config.min_lr
        )

    def describe_position(self, step: int) -> dict[str, Any]:
        """Return the position of a step in the phase, as part of a line of metrics.

        Args:
            step: The number of steps that are done.

        Returns:
            "phase", the name of the phase; "step", the number of steps that are done;
            "total_steps", the number after which training ends (:attr:`last_step`); and
            "epoch" and "epochs", these two numbers in epochs, rounded up.
        """
        return {
            "phase": self.name,
            "step": step,
            "total_steps": self.last_step,
            "epoch": -(-step // self.steps_per_epoch),
            "epochs": -(-self.last_step // self.steps_per_epoch),
        }


def warmup_cosine(
    step: int, total_steps: int, warmup_steps: int, base_lr: float, min_lr: float
) -> float:
    """Return the learning rate of an optimizer step (paper Sec. 4.1).

    It rises linearly from ``min_lr`` at step 0 to ``base_lr`` at step ``warmup_steps``,
    then falls along half a cosine to ``min_lr`` at step ``total_steps`` - 1, where it
    stays. If no more than one step is left after the warm-up, the rate is ``base_lr``
    at step ``warmup_steps``, and ``min_lr`` from the next step on.

    Args:
        step: The number of the step, from 0.
        total_steps: The number of steps of the phase.
        warmup_steps: The number of warm-up steps. It may be 0, and exceed
            ``total_steps``.
        base_lr: The highest learning rate.
        min_lr: The learning rate at the start of a warm-up and at the end.
    """
    if step < warmup_steps:
        return min_lr + (base_lr - min_lr) * step / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return min_lr + (base_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


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
    the state and leaves the model in training mode. Rank 0 writes ``metrics.jsonl`` and
    checkpoints, the last one at the end, and deletes old ones. Every rank reports
    metrics to the worker. If weights are not finite, or too many steps had gradients
    that are not, training goes back to the newest checkpoint, once. Both are checked
    where a line of metrics or a checkpoint is due. Of a phase without steps only a
    checkpoint of the initial state is written, unless it has one. Errors of ``batches``
    and of the step function are raised as they are.

    Args:
        config: The configuration of the run.
        phase: The phase to train.
        state: The state at step 0. It is updated.
        batches: Returns the batch of a step, which is given by its number from 0. The
            batch must depend on nothing but the step.
        worker: The process that trains.
        storage: The run directory.

    Raises:
        Interrupted: The worker was asked to stop. The state is saved, unless it is not
            finite.
        NumericsError: Losses or weights were not finite again after a roll-back, or
            before there was a checkpoint to roll back to.
        StorageError: A checkpoint or the metrics cannot be written, the newest valid
            checkpoint does not fit the model, or there are checkpoints and all are
            damaged.
    """
    state.total_steps = max(1, phase.total_steps)
    state.warmup_steps = phase.warmup_steps
    resumed = resume_(state, storage, phase.name)
    first_step = state.step + 1
    save_every = config.train.checkpoint_every_epochs * phase.steps_per_epoch
    health, timer = Health(state), StepTimer(state, batches)
    last_report = saved_at = time.monotonic()
    state.model.train()
    with ExitStack() as stack:
        stack.callback(timer.close)
        stack.enter_context(keep_freed_memory(worker.device))
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
            timer.begin_step()
            phase.step(state, batches(state.step), config, lr)

            at_end = state.step == phase.last_step
            at_epoch_end = at_end or state.step % phase.steps_per_epoch == 0
            to_log = at_epoch_end or state.step % config.train.log_every == 0
            to_save = at_end or state.step % save_every == 0
            if not (to_log or to_save):  # this must not synchronize the device
                # two reports are enough for an estimate of the remaining time
                is_late = time.monotonic() - last_report > REPORT_S
                if is_late or state.step == first_step:
                    last_report = time.monotonic()
                    worker.report(
                        phase.describe_position(state.step)
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
                metrics = _collect_metrics_(phase, state, lr, timer)
                last_report = time.monotonic()
                if at_epoch_end:
                    metrics["head_losses"] = state.head_losses.tolist()
                if math.isfinite(metrics["loss"]):
                    journal.write(metrics)
                worker.report(metrics | {"rank_ms": timer.rank_ms})
            if to_save or (to_log and _is_checkpoint_due(config, worker, saved_at)):
                save(wait=at_end or storage.is_local)
                saved_at = time.monotonic()


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
        """Return whether training must be rolled back to the newest checkpoint.

        It must if the model has a weight or running statistic that is not finite, or if
        more than :data:`MAX_SKIPPED_STEPS` steps were skipped since the last call that
        saw no new one. A step is skipped if a gradient is not finite.

        All ranks must call this, and get the same answer. This synchronizes the device.
        A warning is logged if steps were skipped since the last call.

        Args:
            state: The state of training, which is not changed.
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
        """Return training to the newest checkpoint, at most once for this object.

        A warning is logged, and the counts of skipped steps begin anew.

        Args:
            state: The state of training, into which the checkpoint is loaded.
            storage: The run directory.
            phase: The phase that is trained.

        Raises:
            NumericsError: There is no checkpoint, or this object has rolled back
                training before.
            StorageError: The newest valid checkpoint does not fit the model, or there
                are checkpoints and all are damaged.
        """
        at = f"{phase.name} step {state.step}"
        if self._rolled_back or not resume_(state, storage, phase.name):
            advice = f"lower {phase.name}.base_lr or check the data's values"
            raise NumericsError(f"non-finite loss at {at}; {advice}")
        log.warning("non-finite loss at %s; rolled back to step %d", at, state.step)
        self._num_skipped = self._num_tolerated = int(state.skipped)
        self._rolled_back = True


def resume_(state: TrainState, storage: Storage, phase: str) -> bool:
    """Load the newest valid checkpoint of a phase into ``state``, if there is one.

    A warning is logged for each newer checkpoint that is damaged.

    Args:
        state: The state of training. It is updated.
        storage: The run directory.
        phase: The name of the phase: "pretext", "pretrain" or "discover".

    Returns:
        Whether a checkpoint was loaded. If not, the state is not changed.

    Raises:
        StorageError: The newest valid checkpoint does not fit the model, after which
            the state may be loaded in part; the phase has checkpoints and all are
            damaged or cannot be read; or they cannot be listed.
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


def _save(
    config: Config,
    phase: Phase,
    state: TrainState,
    worker: Worker,
    storage: Storage,
    journal: Journal,
    wait: bool = True,
) -> None:
    """Write a checkpoint of the state, unless a valid one of this step exists.

    All ranks must call this. The state is not changed. Rank 0 copies the tensors, and
    writes the file in the thread of the journal. It then deletes old checkpoints of the
    phase, so that the newest ``train.keep_checkpoints`` up to this step stay, this one
    included. If an earlier checkpoint is still being written, rank 0 first waits until
    that is done. The sums in ``epoch_losses`` and ``window_loss`` are stored as their
    means over the ranks.

    Args:
        config: The configuration of the run.
        phase: The phase that is trained.
        state: The state to save.
        worker: This process.
        storage: The run directory.
        journal: The writer of ``metrics.jsonl``, in the thread of which the file is
            written.
        wait: Whether all ranks wait until the file is written and old ones are deleted.

    Raises:
        StorageError: An earlier file could not be written; or, if ``wait``, this file
            cannot be written. Without ``wait`` the next call of the journal raises the
            error of this file. Only rank 0 raises these errors.
    """
    tensors = state_tensors(state)
    for name in ("epoch_losses", "window_loss"):
        total = distributed.all_reduce_sum_(tensors[name].clone())
        tensors[name] = total / worker.world_size
    if worker.rank == 0:
        journal.flush()  # so that at most one copy of a checkpoint is in memory
        checkpoint = Checkpoint(state.step, tensors, dump_yaml(config))
        # The checkpoint is written after the lines of its steps, because a run that
        # resumes from it does not write these lines again.
        save_checkpoint(storage, phase.name, checkpoint, journal.enqueue)
        num_kept = config.train.keep_checkpoints
        journal.enqueue(
            partial(prune_checkpoints, storage, phase.name, state.step, num_kept)
        )
    if wait:
        _wait_for_writes(journal, state)


def _wait_for_writes(journal: Journal, state: TrainState) -> None:
    """Wait on all ranks until rank 0 has written its lines of metrics and checkpoints.

    No rank can then read checkpoints while one is still being written. All ranks must
    call this.

    Args:
        journal: The writer of ``metrics.jsonl`` and of checkpoints, on rank 0.
        state: The state of training, which has the device of this rank.

    Raises:
        StorageError: A line or a checkpoint could not be written; on rank 0 alone.
    """
    journal.flush()
    distributed.barrier(state.device)


def _is_checkpoint_due(config: Config, worker: Worker, saved_at: float) -> bool:
    """Return whether the last checkpoint is old enough for another one.

    The limit is ``train.checkpoint_every_minutes``; without it the answer is False. The
    clock of rank 0 decides, and all ranks, which must all call this, get the same
    answer.

    Args:
        config: The configuration of the run.
        worker: This process.
        saved_at: The time of the last checkpoint, by ``time.monotonic()``; before the
            first one the time at which training began.
    """
    minutes = config.train.checkpoint_every_minutes
    if minutes is None:
        return False
    is_old = worker.rank == 0 and time.monotonic() - saved_at >= 60 * minutes
    vote = torch.tensor([float(is_old)], device=worker.device)
    return bool(distributed.all_reduce_sum_(vote))


def _is_finite(state: TrainState) -> bool:
    """Return whether the weights and running statistics of the model are finite.

    These are all floating-point tensors of its state dict. All ranks must call this.
    They get the same answer: False if any rank has a value that is not finite.
    """
    tensors = [t for t in state.model.state_dict().values() if t.is_floating_point()]
    finite = torch.stack([t.isfinite().all() for t in tensors]).all()
    return not bool(distributed.all_reduce_sum_((~finite).float().reshape(1)))


def _finish_epoch_(state: TrainState) -> None:
    """Compute the mean loss of each cluster head over the epoch and all workers.

    :func:`fit` calls this at the end of an epoch, and where the phase ends within an
    epoch. The mean is over the steps of the epoch that were not skipped because of
    gradients that are not finite. The means are stored in ``state.head_losses``, in
    place; they are not changed if all steps were skipped. The sums and the number of
    steps in ``state.epoch_losses`` become zero. All ranks must call this.
    """
    *_, count = sums = distributed.all_reduce_sum_(state.epoch_losses)
    means = torch.where(count > 0, sums[:-1] / count, state.head_losses)
    state.head_losses.copy_(means)
    state.epoch_losses.zero_()


def _collect_metrics_(
    phase: Phase, state: TrainState, lr: float, timer: "StepTimer"
) -> dict[str, Any]:
    """Return a line of metrics on the steps since the last line, over all workers.

    The sum of losses in ``state.window_loss`` and the times in ``timer`` begin anew.
    All ranks must call this. The device is synchronized.

    Args:
        phase: The phase that is trained.
        state: The state of training.
        lr: The learning rate of the last step.
        timer: The times of the steps.

    Returns:
        Values by name. "loss" is the mean of the total loss over the steps that were
        not skipped because of gradients that are not finite; NaN if all were skipped.
        "event" is "epoch" at the end of a full epoch and "step" otherwise. "grad_norm"
        is the norm of the gradient of the last step; it is left out if it is not
        finite. "lr" is the learning rate, and "skipped_steps" the number of skipped
        steps of the phase so far.
        :meth:`Phase.describe_position` has the names of the position, and
        :meth:`StepTimer.collect` those of the times.
    """
    total, count = distributed.all_reduce_sum_(state.window_loss.clone()).tolist()
    state.window_loss.zero_()
    metrics = {
        **phase.describe_position(state.step),
        "event": "epoch" if state.step % phase.steps_per_epoch == 0 else "step",
        "loss": total / count if count else math.nan,
        "lr": lr,
        **timer.collect(phase.images_per_step),
        "skipped_steps": int(state.skipped),
    }
    if state.grad_norm is not None and state.grad_norm.isfinite():
        metrics["grad_norm"] = float(state.grad_norm)
    return metrics


class StepTimer:
    """Measure the time of training steps, without synchronizing the device.

    A rank works until the end of its first forward pass in a step. After that it waits
    for the other ranks. On GPUs only the launches of kernels are measured, so the times
    show slow data and a slow host, but not slow kernels.

    Args:
        state: The state of training. A hook is added to its module.
        batches: The source of the batches. The attribute ``waited_s`` of streamed data
            is the time in seconds that was spent waiting for data.

    Attributes:
        rank_ms: Milliseconds from the begin of a step to the end of this rank's first
            forward pass in it, the mean of the steps between the last two calls of
            :meth:`collect`; 0 before the first call. A step that is replayed from a
            CUDA graph counts as 0.
        close: Removes the hook from the module.
    """

    def __init__(self, state: TrainState, batches: object) -> None:
        self._state, self._batches = state, batches
        self._step_start: float | None = None
        self.rank_ms = 0.0
        self.close = state.forward.register_forward_hook(self._end_own_work).remove
        self.restart()

    def restart(self) -> None:
        """Forget the times measured so far, and measure the steps from here on."""
        self._window_start, self._window_step = time.perf_counter(), self._state.step
        self._own_s, self._waited_before = 0.0, self._waited_s()

    def begin_step(self) -> None:
        """Note the time at which a training step begins, before its batch is read."""
        self._step_start = time.perf_counter()

    def collect(self, images_per_step: int) -> dict[str, float]:
        """Return times and throughput of the steps since the last call, and restart.

        All ranks must call this, because it gathers their times. At least one step must
        have been done since the last call, or since :meth:`restart`. This rank's own
        time is stored in ``rank_ms``.

        Args:
            images_per_step: The number of images in a step, over all workers.

        Returns:
            Values by name. "images_per_s" is images per second over all ranks, and
            "step_ms" milliseconds per step. The following values are only there with
            several ranks: "images_per_s_per_device" is images per second and rank;
            "rank_ms_min", "rank_ms_median" and "rank_ms_max" are milliseconds from the
            begin of a step to the end of a rank's forward pass; and "slow_rank" is the
            number of the slowest rank, if it needs more than 1.3 times the median. Two
            values do not depend on the number of ranks: "data_wait", only for streamed
            data, is the largest share of the time in which a rank waited for data, 0-1;
            and "peak_memory_gb", only on GPUs, is the most memory in GB (10**9 bytes)
            that PyTorch has had in use on one of the GPUs so far.
        """
        device = self._state.device
        seconds = time.perf_counter() - self._window_start
        num_steps = self._state.step - self._window_step
        on_cuda = device.type == "cuda"
        peak_bytes = torch.cuda.max_memory_allocated(device) if on_cuda else 0
        waited_s = self._waited_s() - self._waited_before
        mine = [1000 * self._own_s / num_steps, waited_s / seconds, peak_bytes / 1e9]
        of_ranks = distributed.gather_rows(
            torch.tensor([mine], dtype=torch.float64, device=device), 0
        )
        rank_ms, data_wait, memory_gb = of_ranks.T.tolist()
        values = {
            "images_per_s": num_steps * images_per_step / seconds,
            "step_ms": 1000 * seconds / num_steps,
        }
        if len(rank_ms) > 1:
            values |= {
                "images_per_s_per_device": values["images_per_s"] / len(rank_ms),
                "rank_ms_min": min(rank_ms),
                "rank_ms_median": median(rank_ms),
                "rank_ms_max": max(rank_ms),
            }
            if max(rank_ms) > SLOW_RANK * median(rank_ms):
                values["slow_rank"] = rank_ms.index(max(rank_ms))
        if hasattr(self._batches, "waited_s"):
            values["data_wait"] = max(data_wait)
        if on_cuda:
            values["peak_memory_gb"] = max(memory_gb)
        self.rank_ms = mine[0]
        self.restart()
        return values

    def _waited_s(self) -> float:
        """Return the seconds that this rank has waited for streamed data so far.

        They are 0 if the data is not streamed.
        """
        return float(getattr(self._batches, "waited_s", 0.0))

    def _end_own_work(self, *_: Any) -> None:
        """Add the time since the step began to this rank's working time.

        This is a forward hook of the module. Only the first forward pass in a step
        counts, because afterwards the rank waits for the other ranks.
        """
        if self._step_start is not None:
            self._own_s += time.perf_counter() - self._step_start
            self._step_start = None


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Keep freed memory in the process during a ``with`` block of training on the CPU.

    glibc maps every block of more than 32 MiB anew and unmaps it when it is freed. The
    activations of a convolutional network are such blocks, and the kernel has to clear
    their pages in every step, which takes up to a third of its time. Inside the block
    all memory comes from the heap, which does not shrink. At the end the free memory
    goes back to the kernel, and the thresholds become the highest that glibc itself
    would choose. This has an effect only if ``device`` is a CPU and the C library is
    glibc.
    """
    libc = ctypes.CDLL(None)
    if device.type != "cpu" or not hasattr(libc, "malloc_trim"):  # macOS, musl
        yield
        return
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # parameters of mallopt(3)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, -1)  # never
    try:
        yield
    finally:
        libc.mallopt(mmap_max, 65_536)  # glibc's default
        libc.mallopt(mmap_threshold, 32 * 2**20)  # glibc itself raises it up to this
        libc.mallopt(trim_threshold, 64 * 2**20)
        libc.malloc_trim(0)
