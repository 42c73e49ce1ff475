"""Whether a set is decoded once and kept in memory (resident), or again in every epoch (streaming)."""

import os
from typing import Literal

import torch

from uno.config import Config
from uno.errors import ConfigError

SHARE = 0.6  # of free memory; the rest is for the model, its activations and the system
ROWS_PER_BLOCK = 2048  # of a resident set on Ray; a task is a process at first, which takes seconds to start
ALONE_BYTES = 870_000_000  # of a run without Ray, to its end
RAY_BYTES = 1_370_000_000  # of this process, and of those that Ray starts in any case
TASK_BYTES = 420_000_000  # of a process that decodes: one for each CPU, gone when training starts
TRAINER_BYTES, WORKER_BYTES = 720_000_000, 750_000_000  # of Ray Train's own processes, and of each worker
STATM = "/proc/self/statm"
MEMINFO = "/proc/meminfo"
CGROUP = "/sys/fs/cgroup"

Ingest = Literal["resident", "streaming"]


def choose(
    config: Config, num_rows: int, row_bytes: int, host_bytes: int, device_bytes: int | None,
    method_needs_images: bool,
) -> tuple[Ingest, str]:  # fmt: skip
    """The way in for ``num_rows`` images, and a sentence that says why. ``row_bytes``: of one in memory,
    decoded or as the features of a frozen encoder; ``host_bytes`` are free on a node, ``device_bytes`` on a
    GPU, which holds one copy.
    """
    needed, peak = num_rows * row_bytes, peak_bytes(config, num_rows, row_bytes)
    room = max(0, host_bytes + own_bytes() - _program_bytes(config, num_rows))
    budget, where = SHARE * room / _num_copies(config), "of the host memory that they leave"
    if device_bytes is not None and SHARE * device_bytes < budget:
        budget, where = SHARE * device_bytes, "of free device memory"
    what = "of features" if config.model.trainable == "heads" else "decoded"
    sizes = f"{_size(needed)} {what}, in memory {_size(peak)} with all programs, "
    sizes += f"budget {_size(budget)} ({SHARE:.0%} {where})"
    method = f"method {config.method}" if method_needs_images else None
    needs = "pretext.epochs" if config.pretext.epochs else method
    told = config.data.ingest
    if needs and told == "streaming":
        raise ConfigError(f"{needs} needs the images in memory; use --data.ingest resident")
    if told != "auto":
        return told, f"{told}, as told ({sizes})"
    if needs:
        return "resident", f"resident, which {needs} needs ({sizes})"
    fits: Ingest = "resident" if needed <= budget else "streaming"
    return fits, f"{fits}, {sizes}"


def peak_bytes(config: Config, num_rows: int, row_bytes: int, cpus: int | None = None) -> int:
    """Memory of a resident run on one machine of so many CPUs (default: as here) when it holds most, without
    what grows with the network and its batches: programs, and the set in this process or in Ray's store. Of
    several machines it is an upper bound, as if all workers were on one.
    """
    return _program_bytes(config, num_rows, cpus) + _num_copies(config) * num_rows * row_bytes


def _program_bytes(config: Config, num_rows: int, cpus: int | None = None) -> int:
    """As ``benchmarks.memory`` measured them on CPUs (x86, Python 3.11, torch 2.15 built for CUDA 13, Ray
    2.60; not on GPUs): Ray's decode first and go, then there are workers.
    """
    workers = config.compute.workers
    tasks = min(cpus or os.cpu_count() or 1, -(-num_rows // ROWS_PER_BLOCK))
    more = max(tasks * TASK_BYTES, TRAINER_BYTES + workers * WORKER_BYTES)
    return RAY_BYTES + more if workers else ALONE_BYTES


def _num_copies(config: Config) -> int:
    """Of the set, on a node: all workers see that of Ray's store; this process also keeps features."""
    return 2 if config.compute.workers and config.model.trainable == "heads" else 1


def own_bytes() -> int:
    """Memory that this process has taken, which is counted as a program's."""
    try:
        with open(STATM, encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0  # not Linux


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
