"""``train.profile``: what some steps spend their time on, on rank 0."""

import os
import tempfile
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from uno.data.files import Storage

FOLDER = "profile"
TOP = 5


class Profile:
    """Traces ``steps`` of a phase: ``profile/PHASE.json`` for Perfetto, ``PHASE.txt``
    with the operators that took most time, and on CUDA
    ``PHASE.pickle``, a snapshot for pytorch.org/memory_viz. Outside these steps it
    costs nothing.
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
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._running is not None:
            self._stop(kind is None)

    def before(self, step: int) -> None:
        """Tell it which step comes next."""
        if self._running is not None and step not in self._steps:
            self._stop(True)
        elif self._running is None and step in self._steps:
            if self._cuda:
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._first, self._running = step, profile(activities=self._activities)
            self._running.start()
        self._last = step

    def _stop(self, write: bool) -> None:
        found, self._running = self._running, None
        found.stop()
        with tempfile.TemporaryDirectory() as folder:
            if write:
                found.export_chrome_trace(os.path.join(folder, f"{self._phase}.json"))
                with open(
                    os.path.join(folder, f"{self._phase}.txt"), "w", encoding="utf-8"
                ) as file:
                    file.write(self._top(found))
            if self._cuda:
                if write:
                    torch.cuda.memory._dump_snapshot(
                        os.path.join(folder, f"{self._phase}.pickle")
                    )
                torch.cuda.memory._record_memory_history(enabled=None)
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), "rb") as file:
                    self._storage.write(f"{FOLDER}/{name}", file.read())

    def _top(self, found: Any) -> str:
        kind = "device" if self._cuda else "cpu"
        times = {
            e.key: getattr(e, f"self_{kind}_time_total") for e in found.key_averages()
        }
        total = sum(times.values()) or 1
        top = sorted(times, key=lambda name: -times[name])[:TOP]
        shares = ", ".join(f"{name} {times[name] / total:.0%}" for name in top)
        return (
            f"{self._phase} steps {self._first}-{self._last}: of the {kind}'s time"
            f" {shares}"
        )
