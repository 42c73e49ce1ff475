"""Profile training steps on rank 0, for ``train.profile``."""

import os
import tempfile
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from uno.data.files import Storage

FOLDER = "profile"
NUM_OPERATORS = 5


class Profile:
    """Profile some steps of a phase, and write the result into the run directory.

    The files are ``profile/PHASE.json``, a trace for Perfetto; ``profile/PHASE.txt``,
    the operators that took most time; and on CUDA ``profile/PHASE.pickle``, a snapshot
    of the memory for pytorch.org/memory_viz. Other steps are not slowed down.

    Args:
        steps: The steps to profile.
        phase: The name of the phase.
        device: The device of the worker.
        storage: The run directory.
    """

    def __init__(
        self, steps: range, phase: str, device: torch.device, storage: Storage
    ) -> None:
        self._steps, self._phase, self._storage = steps, phase, storage
        self._cuda = device.type == "cuda"
        self._running: Any = None
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda
        self._first = self._last = 0

    def __enter__(self) -> "Profile":
        """Return this profile."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """End the profile, and write it unless the block has raised an exception."""
        if self._running is not None:
            self._stop(kind is None)

    def before(self, step: int) -> None:
        """Begin or end the profile before a step.

        Args:
            step: The number of steps that were taken before.
        """
        if self._running is not None and step not in self._steps:
            self._stop(True)
        elif self._running is None and step in self._steps:
            if self._cuda:
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._first, self._running = step, profile(activities=self._activities)
            self._running.start()
        self._last = step

    def _stop(self, write: bool) -> None:
        """End the profile, and write its files if ``write`` is True."""
        profiler, self._running = self._running, None
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            if write:
                profiler.export_chrome_trace(
                    os.path.join(folder, f"{self._phase}.json")
                )
                with open(
                    os.path.join(folder, f"{self._phase}.txt"), "w", encoding="utf-8"
                ) as file:
                    file.write(self._summarize(profiler))
            if self._cuda:
                if write:
                    torch.cuda.memory._dump_snapshot(
                        os.path.join(folder, f"{self._phase}.pickle")
                    )
                torch.cuda.memory._record_memory_history(enabled=None)
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), "rb") as file:
                    self._storage.write(f"{FOLDER}/{name}", file.read())

    def _summarize(self, profiler: Any) -> str:
        """Return a line with the operators that took most time, and their shares."""
        kind = "device" if self._cuda else "cpu"
        times = {
            e.key: getattr(e, f"self_{kind}_time_total")
            for e in profiler.key_averages()
        }
        total = sum(times.values()) or 1
        top = sorted(times, key=lambda name: -times[name])[:NUM_OPERATORS]
        shares = ", ".join(f"{name} {times[name] / total:.0%}" for name in top)
        return (
            f"{self._phase} steps {self._first}-{self._last}: of the {kind}'s time"
            f" {shares}"
        )
