"""What the benchmarks share: methods that take turns, medians, the limits of a device,
and a row that says where it was measured.
"""

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision

from uno.runs import NUMERICS
from uno.runs.hardware import describe_hardware

CLASSES = {  # known and novel classes, labeled and unlabeled training rows
    "digits": (5, 5, 723, 719),
    "cifar10": (5, 5, 25_000, 25_000),
    "cifar100_20": (80, 20, 40_000, 10_000),
    "cifar100_50": (50, 50, 25_000, 25_000),
    # rows rounded; its batches are half and half
    "imagenet": (882, 30, 1_129_000, 38_000),
}


def add_timing_options(
    parser: argparse.ArgumentParser, batch: int, repeats: int, threads: int
) -> None:
    """Add the options of a benchmark whose methods take turns, with these defaults."""
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu on a busy machine"
    )


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
            wait(device)
            start = now()
            method()
            wait(device)
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


def limits(
    device: str, dtype: torch.dtype, clock: str = "wall", repeats: int = 5
) -> dict[str, float]:
    """What the device can do, now: the largest of some matrix products, and copying
    memory.

    Returns: ``matmul_tflops`` in ``dtype`` and ``copy_gb_per_s``, bytes read plus bytes
        written.
    """
    methods, flops = {}, {}
    for side in (2048, 8192) if device.startswith("cuda") else (1024, 2048):
        left, right = (
            torch.randn(side, side, device=device).to(dtype) for _ in range(2)
        )
        methods[str(side)] = lambda left=left, right=right: left @ right
        flops[str(side)] = 2 * side**3
    source = torch.ones(
        2**30 if device.startswith("cuda") else 2**27, dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    methods["copy"] = lambda: target.copy_(source)
    middle = medians(take_turns(methods, repeats, device, clock))
    return {
        "matmul_tflops": round(
            max(flops[side] / middle[side] for side in flops) / 1e12, 3
        ),
        "copy_gb_per_s": round(2 * source.numel() / middle["copy"] / 1e9, 1),
    }


def environment(device: str = "cpu") -> dict[str, Any]:
    """Hardware, versions, and the numerics of this code."""
    return {
        "numerics": NUMERICS,
        "hardware": describe_hardware(device.startswith("cuda")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


def wait(device: str | torch.device) -> None:
    """Wait until the device has computed everything."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def append_rows(
    table: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Append rows to a table of comma-separated values, with its head if it is new."""
    is_new = not table.exists()
    with table.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
