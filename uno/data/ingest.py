"""Whether a set is decoded once and kept in memory (resident), or again in every epoch (streaming)."""

import os
from typing import Literal

import torch

from uno.config import Config
from uno.errors import ConfigError

SHARE = 0.6  # of free memory; the rest is for the model, its activations and the system
MEMINFO = "/proc/meminfo"
CGROUP = "/sys/fs/cgroup"

Ingest = Literal["resident", "streaming"]


def choose(
    config: Config, num_rows: int, row_bytes: int, host_bytes: int, device_bytes: int | None,
    method_needs_images: bool,
) -> tuple[Ingest, str]:  # fmt: skip
    """The way in for ``num_rows`` images, and a sentence that says why. ``row_bytes``: of one in memory,
    decoded or as the features of a frozen encoder; ``host_bytes`` are free on a node, ``device_bytes`` on a
    GPU, where either holds :func:`num_copies` or one.
    """
    needed, copies = num_rows * row_bytes, num_copies(config)
    budget = SHARE * host_bytes / copies
    where = f"of free host memory, {copies} copies" if copies > 1 else "of free host memory"
    if device_bytes is not None and SHARE * device_bytes < budget:
        budget, where = SHARE * device_bytes, "of free device memory"
    what = "of features" if config.model.trainable == "heads" else "decoded"
    sizes = f"{_size(needed)} {what}, budget {_size(budget)} ({SHARE:.0%} {where})"
    method = f"method {config.method}" if method_needs_images else None
    needs = "rotation.epochs" if config.rotation.epochs else method
    told = config.data.ingest
    if needs and told == "streaming":
        raise ConfigError(f"{needs} needs the images in memory; use --data.ingest resident")
    if told != "auto":
        return told, f"{told}, as told ({sizes})"
    if needs:
        return "resident", f"resident, which {needs} needs ({sizes})"
    fits: Ingest = "resident" if needed <= budget else "streaming"
    return fits, f"{fits}, {sizes}"


def num_copies(config: Config) -> int:
    """Of the decoded set on a node, by how sets are made: one here; on Ray that which its workers share, and
    while they are made what tasks bring, or at the end that of this process. ``benchmarks.memory`` measures.
    """
    return 2 if config.compute.workers else 1


def free_host_bytes() -> int:
    """Memory that this process could still take, as the kernel and the container say."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open(MEMINFO, encoding="ascii") as file:
            found = [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
        free = min([free, *found])
    except (OSError, ValueError):
        pass  # not Linux: all of the memory
    try:
        with open(f"{CGROUP}/memory.max", encoding="ascii") as limit:
            most = limit.read().strip()
        with open(f"{CGROUP}/memory.current", encoding="ascii") as used:
            return free if most == "max" else max(0, min(free, int(most) - int(used.read())))
    except (OSError, ValueError):
        return free  # no container, or one that does not say


def free_device_bytes(config: Config) -> int | None:
    """Free memory of the GPU that this process would take; None where it takes none."""
    if config.compute.device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info()[0])


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
