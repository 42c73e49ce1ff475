"""Measure the speed of training steps, and the waits for data and for slow ranks."""

import time
from statistics import median
from typing import Any

import torch

from uno import collectives
from uno.state import TrainState

SLOW_RANK = 1.3  # a rank that needs more than this times the median is named


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
        rank_ms: Milliseconds in a step until the end of this rank's forward pass, as of
            the last :meth:`collect`.
    """

    def __init__(self, state: TrainState, batches: object) -> None:
        self._state, self._batches = state, batches
        self._step_start: float | None = None
        self.rank_ms = 0.0
        self._hook = state.forward.register_forward_hook(self._end_own_work)
        self.restart()

    def restart(self) -> None:
        """Forget the measurements so far, and measure the steps from here on."""
        self._window_start, self._window_step, self._own_s = (
            time.perf_counter(),
            self._state.step,
            0.0,
        )
        self._waited = self._waited_s()

    def begin(self) -> None:
        """Note that a step begins. Its batch is read next."""
        self._step_start = time.perf_counter()

    def collect(self, images_per_step: int) -> dict[str, float]:
        """Return what all ranks measured since the last call, and restart.

        All ranks must call this, because it gathers their times.

        Args:
            images_per_step: The number of images in a step, over all workers.

        Returns:
            Values by name. "images_per_s" is images per second over all ranks, and
            "step_ms" milliseconds per step. With several ranks,
            "images_per_s_per_device" is images per second and rank. "rank_ms_min",
            "rank_ms_median" and "rank_ms_max" are milliseconds from the begin of a
            step to the end of a rank's forward pass. "slow_rank" is the slowest rank,
            if it needs more than 1.3 times the median. "data_wait", only for streamed
            data, is the largest share of the time in which a rank waited for data,
            0-1.
            "peak_memory_gb", only on GPUs, is the largest memory of a GPU so far, in
            GB. "grad_norm" is the norm of the gradient of the last step, if it is
            finite.
        """
        seconds, num = (
            time.perf_counter() - self._window_start,
            self._state.step - self._window_step,
        )
        device, cuda = self._state.device, self._state.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if cuda else 0
        mine = [
            self._own_s / num,
            (self._waited_s() - self._waited) / seconds,
            peak / 1e9,
        ]
        ranks = collectives.gather_rows(
            torch.tensor([mine], dtype=torch.float64, device=device), 0
        )
        own, wait, memory = ranks.T.tolist()
        self.rank_ms = 1000 * mine[0]
        values = {
            "images_per_s": num * images_per_step / seconds,
            "step_ms": 1000 * seconds / num,
        }
        if len(own) > 1:
            values["images_per_s_per_device"] = values["images_per_s"] / len(own)
            of_ranks = {"min": min(own), "median": median(own), "max": max(own)}
            values |= {
                f"rank_ms_{name}": 1000 * value for name, value in of_ranks.items()
            }
            if max(own) > SLOW_RANK * median(own):
                values["slow_rank"] = own.index(max(own))
        if hasattr(self._batches, "waited_s"):
            values["data_wait"] = max(wait)
        if cuda:
            values["peak_memory_gb"] = max(memory)
        norm = self._state.grad_norm
        if norm is not None and norm.isfinite():
            values["grad_norm"] = float(norm)
        self.restart()
        return values

    def close(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    def _waited_s(self) -> float:
        """Return the seconds that this rank has waited for streamed data so far."""
        return float(getattr(self._batches, "waited_s", 0.0))

    def _end_own_work(self, *_: Any) -> None:
        """Count the time since the step began, after its first forward pass only."""
        if self._step_start is not None:
            self._own_s += time.perf_counter() - self._step_start
            self._step_start = None
