"""What the steps between two lines of metrics waited for: the data, or the slowest
rank.
"""

import time
from statistics import median
from typing import Any

import torch

from uno import collectives
from uno.state import TrainState

SLOW = 1.3  # times the median: a rank that is named


class Pace:
    """Counts seconds of the host, and never waits for the device. A rank's own part of
    a step ends with its first forward pass: later it waits for the other ranks. (On
    GPUs these are launches: what shows there is slow data and a slow host.)
    """

    def __init__(self, state: TrainState, batches: object) -> None:
        self._state, self._batches = state, batches
        self._begun: float | None = None
        self.rank_ms = 0.0  # this rank's own part of a step, in the last line
        self._hook = state.forward.register_forward_hook(self._forwarded)
        self.restart()

    def restart(self) -> None:
        """From here on the next line is counted."""
        self._start, self._first, self._own = time.perf_counter(), self._state.step, 0.0
        self._waited = self._waited_s()

    def begin(self) -> None:
        """A step begins: the next thing is its batch."""
        self._begun = time.perf_counter()

    def line(self, images_per_step: int) -> dict[str, float]:
        """Of the steps since the last line, over all ranks, by one collective: images
        and milliseconds, the share 0-1 of the time in which a rank waited for data (the
        most of all ranks; only of streamed data), the gradient's norm in the last step,
        and the largest memory of a device so far, in GB.
        """
        seconds, num = time.perf_counter() - self._start, self._state.step - self._first
        device, cuda = self._state.device, self._state.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if cuda else 0
        mine = [
            self._own / num,
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
            if max(own) > SLOW * median(own):
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
        """Leave the model as it was."""
        self._hook.remove()

    def _waited_s(self) -> float:
        return float(getattr(self._batches, "waited_s", 0.0))

    def _forwarded(self, *_: Any) -> None:
        if self._begun is not None:
            self._own += time.perf_counter() - self._begun
            self._begun = None
