"""Replay a training step as one CUDA graph.

A step of ResNet18 on 32 x 32 pixels launches about 800 kernels. The host needs longer
to launch them than the GPU to compute them. A CUDA graph records the launches once and
repeats all of them with a single call. A graph repeats the same kernels on the same
memory. Therefore all values that change from step to step are copied into tensors with
a fixed address: the views, the labels and the learning rate. The augmentation that
makes the views is not part of the graph, because the number of images in each of its
operations changes from step to step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uno.config import Config
from uno.errors import ConfigError
from uno.steps import Batch, Step, TrainState

EAGER_STEPS = 3
"""Steps before the recording, in which libraries choose kernels or compile them."""

Record = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Record the kernels that a function launches, without computing them.

The recorder takes the function, and returns another function that launches the same
kernels again.
"""


def record_cuda_graph(function: Callable[[], Any]) -> Callable[[], Any]:
    """Record the kernels that ``function`` launches as a CUDA graph.

    The kernels are not computed during the recording. Before it, the GPU memory that
    PyTorch caches without using it is released.

    Args:
        function: Launches kernels on the GPU. It is called once.

    Returns:
        A function that launches the recorded kernels again.
    """
    torch.cuda.empty_cache()  # the graph uses separate memory
    graph = torch.cuda.CUDAGraph()
    # only this thread is checked: other threads copy and allocate to prepare batches
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph.replay


@dataclass
class Recording:
    """A recorded training step, and the tensors that it reads and writes.

    Attributes:
        replay: Launches the step again.
        batch: The batch that the step reads. Each new batch is copied into its tensors.
        lr: The learning rate that the step reads, float32 ().
        loss: The loss that the step writes, float32 (1,).
    """

    replay: Callable[[], Any]
    batch: Batch
    lr: Tensor
    loss: Tensor


class CapturedStep:
    """A training step that is recorded once and then replayed.

    It computes the same as the step itself. The steps that PyTorch needs before a
    recording, in which libraries choose their kernels, are the first steps of training,
    so no batch is computed twice. For a batch of another shape than the recorded one
    the step itself is called. After a roll-back to a checkpoint the step is recorded
    again, because the tensors in ``state.extra`` then have other addresses.

    Attributes:
        step: The step that is recorded. It must not synchronize the device, and only
            the learning rate may depend on the number of the step.
    """

    def __init__(self, step: Step, record: Record = record_cuda_graph) -> None:
        """Prepare to record a training step.

        Args:
            step: The training step to record. It must not synchronize the device, and
                only the learning rate may depend on the number of the step.
            record: Takes a function that launches kernels, and returns a function that
                launches the same kernels again.
        """
        self.step = step
        self._record = record
        self._recording: Recording | None = None
        self._num_eager = 0
        self._extra: dict[str, Tensor] | None = None

    def __call__(
        self, state: TrainState, batch: Batch, config: Config, lr: float
    ) -> Tensor:
        """Take one training step on a batch, by replaying the recorded kernels.

        The first three calls (:data:`EAGER_STEPS`) run the step without a recording.
        The fourth call records the step and replays it, and later calls replay it. A
        batch with other shapes than the recorded one runs the step without the
        recording. If ``state.extra`` is another dict than in the last call, all of this
        begins anew.

        Args:
            state: The state of training: model, optimizer and counters. It is updated,
                and ``state.step`` rises by one.
            batch: The batch to train on. For a replay its views and labels are copied
                into the tensors of the recording.
            config: The configuration of the run. A replay does not read it.
            lr: The learning rate of this step.

        Returns:
            The loss, (1,), detached. After a replay it is the float32 tensor that the
            next replay overwrites.
        """
        if self._extra is not state.extra:
            self._recording, self._num_eager = None, 0
            self._extra = state.extra
        if self._num_eager < EAGER_STEPS:
            self._num_eager += 1
            return _in_separate_stream(
                state.device, lambda: self.step(state, batch, config, lr)
            )
        if self._recording is None:
            self._recording = self._make_recording(state, batch, config)
        recording = self._recording
        pairs = list(zip(_tensors_of(recording.batch), _tensors_of(batch), strict=True))
        if any(kept.shape != new.shape for kept, new in pairs):
            return self.step(state, batch, config, lr)
        for kept, new in pairs:
            kept.copy_(new, non_blocking=True)
        recording.lr.fill_(lr)
        next_step = state.step + 1
        recording.replay()
        state.step = next_step  # the replay does not run this assignment of the step
        return recording.loss

    def _make_recording(
        self, state: TrainState, batch: Batch, config: Config
    ) -> Recording:
        """Record one training step that reads its batch and learning rate from tensors.

        The gradients of the parameters are set to None before.

        Args:
            state: The state of training. Its weights and its step number are not
                changed. Its ``grad_norm`` becomes a tensor that each replay overwrites,
                and the learning rates of its optimizer become tensors.
            batch: A batch of the right shapes. The recording reads a copy of it.
            config: The configuration of the run.

        Returns:
            The recording, with the tensors of the batch, the learning rate and the
            loss. The learning rate and the loss are 0 at first.
        """
        views = [view.clone() for view in batch.views]
        kept = Batch(views, batch.labels.clone(), batch.num_large)
        lr: Any = torch.zeros((), dtype=torch.float32, device=state.device)
        loss = torch.zeros(1, device=state.device)
        assert state.optimizer is not None
        state.optimizer.zero_grad(
            set_to_none=True
        )  # the graph allocates the gradients in its memory
        number = state.step

        def run() -> None:
            """Take one training step, and store its loss in ``loss``."""
            loss.copy_(self.step(state, kept, config, lr))

        replay = self._record(run)
        state.step = number
        return Recording(replay, kept, lr, loss)


def check_cuda_graph(
    config: Config, can_be_recorded: bool, device: torch.device, num_workers: int
) -> None:
    """Check that a run can use the option ``compute.cuda_graph``.

    Args:
        config: The configuration of the run.
        can_be_recorded: Whether every training step launches the same kernels: True for
            pretraining, and for discovery the answer of
            :meth:`uno.method.Method.can_be_recorded`.
        device: The device on which the worker trains.
        num_workers: The number of processes that train together.

    Raises:
        ConfigError: The device is not a GPU, there are several workers, or the kernels
            differ from step to step.
    """
    if not can_be_recorded:
        raise ConfigError(
            "compute.cuda_graph records pretraining and UNO's own step, not that of"
            f" method {config.method} with these options; leave it out"
        )
    if device.type != "cuda":
        raise ConfigError("compute.cuda_graph needs a GPU; leave it out")
    if num_workers > 1:
        raise ConfigError(
            f"compute.cuda_graph works with one worker, not {num_workers}; leave it out"
        )


def _tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that a step reads: its views and its labels."""
    return [*batch.views, batch.labels]


def _in_separate_stream(device: torch.device, function: Callable[[], Tensor]) -> Tensor:
    """Return the result of ``function``, computed in a separate CUDA stream.

    That stream starts after the work of the current stream, which then waits for it.
    PyTorch requires this for the training steps before a CUDA graph is recorded. On
    another device than a GPU the function is just called.

    Args:
        device: The device on which the function computes.
        function: The function, without arguments.
    """
    if device.type != "cuda":
        return function()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        result = function()
    torch.cuda.current_stream(device).wait_stream(stream)
    return result
