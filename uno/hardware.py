"""What this process runs on, in words, for records and run directories."""

from __future__ import annotations

import os
import platform

import torch


def hardware(cuda: bool | None = None) -> str:
    """The GPU, or the processor and its number of cores.

    Args:
        cuda: whether the GPU does the work; default: where there is one.
    """
    if torch.cuda.is_available() if cuda is None else cuda:
        return str(torch.cuda.get_device_name())
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.machine()
