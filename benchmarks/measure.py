"""What the benchmarks share: methods that take turns, medians, and a row that says
where it was measured.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision

from uno.runs import NUMERICS
from uno.runs.hardware import describe_hardware


def take_turns(
    methods: Mapping[Any, Callable[[], Any]],
    repeats: int,
    device: str = "cpu",
    clock: str = "wall",
) -> dict[Any, list[float]]:
    """Seconds of every method, ``repeats`` times, taking turns (A B A B) after one
    warm-up turn.

    ``clock`` "cpu" counts this process's processor time, which other processes on the
    machine disturb less.
    """
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    seconds: dict[Any, list[float]] = {name: [] for name in methods}
    for turn in range(repeats + 1):
        for name, method in methods.items():
            _wait(device)
            start = now()
            method()
            _wait(device)
            if turn:
                seconds[name].append(now() - start)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median seconds per method."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def spread(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Half the range between the quartiles, relative to the median."""
    result = {}
    for name, values in seconds.items():
        low, middle, high = (
            statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        )
        result[name] = round((high - low) / 2 / middle, 3)
    return result


def environment(device: str = "cpu", runs: Iterable[Path] = ()) -> dict[str, Any]:
    """Hardware, versions, and the numerics of this code, or of the oldest of ``runs``,
    which may have been finished before.
    """
    made_with = [
        json.loads((run / "environment.json").read_text()).get("numerics", 0)
        for run in runs
    ]
    return {
        "numerics": min(made_with, default=NUMERICS),
        "hardware": describe_hardware(device.startswith("cuda")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
