"""Replay a training step as one CUDA graph.

A step of ResNet18 on 32 x 32 pixels launches about 800 kernels. The host needs longer
to launch them than the GPU to compute them. A CUDA graph records the launches once and
repeats all of them with a single call. A graph repeats the same kernels on the same
memory, so everything that changes from step to step is copied into tensors that stay
where they are: the views, the labels and the learning rate. The views themselves are
made outside the graph, since the number of images that an operation of the
augmentation works on is another one in every step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uno.config import Config
from uno.errors import ConfigError
from uno.objective import discovery_step
from uno.state import TrainState
from uno.steps import Batch, Step, pretrain_step

EAGER_STEPS = 3
"""Steps before the recording: libraries choose their kernels, compilers compile."""

Record = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Records what a function launches, without computing it, and returns a function that
launches the same again.
"""


def record_cuda_graph(function: Callable[[], Any]) -> Callable[[], Any]:
    """Record the kernels that ``function`` launches; return what replays them."""
    torch.cuda.empty_cache()  # the graph has memory of its own
    graph = torch.cuda.CUDAGraph()
    # other threads may copy or allocate meanwhile: they prepare batches
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph.replay


@dataclass
class Recording:
    """A step that can be replayed, and the tensors that it reads and writes."""

    replay: Callable[[], Any]
    batch: Batch
    lr: Tensor  # () float32
    loss: Tensor  # (1,)


class CapturedStep:
    """A training step that computes the same as ``step``, from a recording.

    The first steps run as they are, so nothing is computed twice. A batch of another
    shape than the recorded one runs as it is, too. After a roll-back to a checkpoint
    the step is recorded anew, since the checkpoint's tensors lie elsewhere.

    Attributes:
        step: The step that is recorded. It must not wait for the device, and depend on
            the step's number by the learning rate alone.
    """

    def __init__(self, step: Step, record: Record = record_cuda_graph) -> None:
        """Prepare to record ``step`` by ``record``."""
        self.step = step
        self._record = record
        self._recording: Recording | None = None
        self._num_eager = 0
        self._extra: dict[str, Tensor] | None = None

    def __call__(
        self, state: TrainState, batch: Batch, config: Config, lr: float
    ) -> Tensor:
        """Train on one batch; see :data:`uno.steps.Step`."""
        if self._extra is not state.extra:
            self._recording, self._num_eager = None, 0
            self._extra = state.extra
        if self._num_eager < EAGER_STEPS:
            self._num_eager += 1
            return _beside(state.device, lambda: self.step(state, batch, config, lr))
        if self._recording is None:
            self._recording = self._make_recording(state, batch, config)
        recording = self._recording
        pairs = list(zip(_tensors(recording.batch), _tensors(batch), strict=True))
        if any(kept.shape != new.shape for kept, new in pairs):
            return self.step(state, batch, config, lr)
        for kept, new in pairs:
            kept.copy_(new, non_blocking=True)
        recording.lr.fill_(lr)
        next_step = state.step + 1
        recording.replay()
        state.step = next_step  # the host's part of a step is not replayed
        return recording.loss

    def _make_recording(
        self, state: TrainState, batch: Batch, config: Config
    ) -> Recording:
        """Record the step with a copy of ``batch`` and a rate that is a tensor."""
        views = [view.clone() for view in batch.views]
        kept = Batch(views, batch.labels.clone(), batch.num_large)
        lr: Any = torch.zeros((), dtype=torch.float32, device=state.device)
        loss = torch.zeros(1, device=state.device)
        state.optimizer.zero_grad(set_to_none=True)  # gradients belong to the graph
        number = state.step

        def run() -> None:
            loss.copy_(self.step(state, kept, config, lr))

        replay = self._record(run)
        state.step = number
        return Recording(replay, kept, lr, loss)


def captured(config: Config, step: Step, device: torch.device, workers: int) -> Step:
    """Return ``step``, recorded as a CUDA graph where the configuration asks for it.

    Raises:
        ConfigError: There is no GPU, there are several workers, or the step depends on
            its number by more than the learning rate.
    """
    if not config.compute.cuda_graph:
        return step
    if step not in (pretrain_step, discovery_step):
        raise ConfigError(
            "compute.cuda_graph records pretraining and UNO's own step, not that of"
            f" method {config.method} with these options; leave it out"
        )
    if device.type != "cuda":
        raise ConfigError("compute.cuda_graph needs a GPU; leave it out")
    if workers > 1:
        raise ConfigError(
            f"compute.cuda_graph works with one worker, not {workers}; leave it out"
        )
    return CapturedStep(step)


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch that a step reads."""
    return [*batch.views, batch.labels]


def _beside(device: torch.device, function: Callable[[], Tensor]) -> Tensor:
    """Call ``function`` in a stream of its own, as PyTorch asks for what precedes a
    recording.
    """
    if device.type != "cuda":
        return function()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        found = function()
    torch.cuda.current_stream(device).wait_stream(stream)
    return found
