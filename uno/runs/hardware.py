"""What this process runs on, in words, for records and run directories."""

import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import sys
import tempfile
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from uno.config import Config
from uno.cpus import available_cpus
from uno.errors import ConfigError
from uno.runs import NUMERICS
from uno.runs.checkpoint import FORMAT_VERSION
from uno.runtime import Plan, Runtime


def hardware(cuda: bool | None = None) -> str:
    """The GPU, if it does the work (by default where there is one), or the processor
    and its cores.
    """
    if torch.cuda.is_available() if cuda is None else cuda:
        return str(torch.cuda.get_device_name())
    return f"{_processor()}, {available_cpus()} cores"


def local_device(config: Config) -> torch.device:
    """The device of this process. Where workers train, their nodes have the GPUs and
    this one may have none: then it is the CPU. ConfigError: the process trains itself,
    CUDA was asked for and is not there.
    """
    wanted, cuda = config.compute.device, torch.cuda.is_available()
    if wanted == "cuda" and not cuda and config.compute.num_workers == 0:
        raise ConfigError(
            "compute.device is cuda but PyTorch finds no CUDA device; use --device cpu"
        )
    return torch.device("cuda" if wanted != "cpu" and cuda else "cpu")


def num_threads(config: Config, share: int = 1) -> int:
    """Return ``compute.threads``, or the cores of this process divided by ``share``.

    Raises:
        ConfigError: The number is so large that OpenMP gives up, after it took
            gigabytes for stacks.
    """
    cores = available_cpus()
    threads, most = config.compute.threads or max(1, cores // share), max(64, 4 * cores)
    if threads > most:
        raise ConfigError(
            f"compute.threads is {threads}, more than {most} for {cores} cores"
        )
    return threads


def environment(fingerprint: str) -> dict[str, Any]:
    """Command, versions, hardware and the data's fingerprint, for
    ``environment.json``.
    """
    versions = {}
    for name in ("uno-discovery", "torch", "torchvision", "numpy", "ray"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "format_version": FORMAT_VERSION,
        "numerics": NUMERICS,
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "data_fingerprint": fingerprint,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": hardware(cuda=False),
        "versions": versions,
        "gpus": [
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ],
    }


def at_speed(encoder: nn.Module, plan: Plan, threads: int) -> Runtime:
    """``encoder`` on the CPU as ``plan`` says. ConfigError: it is to be compiled,
    and nothing compiles.
    """
    if plan.runtime == "compile":
        prepare_compiler()
    return Runtime(encoder, plan, threads)


def prepare_compiler() -> None:
    """Before ``torch.compile``: a compiler (or ConfigError), and a cache for this
    processor: torch 2.15 finds cached code by the graph alone; that for another
    processor's vectors computes NaN without a word.
    """
    if not any(
        shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name
    ):
        raise ConfigError(
            "compiling an encoder needs a C++ compiler (g++, clang++ or CXX) on every"
            " node"
        )
    vectors = f"{torch.backends.cpu.get_cpu_capability()} {_processor('flags')}"
    folder = os.environ.get(
        "TORCHINDUCTOR_CACHE_DIR",
        f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
    )
    name = "vectors-" + hashlib.sha256(vectors.encode()).hexdigest()[:12]
    if os.path.basename(folder) != name:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, name)


def _processor(field: str = "model name") -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(field):
                return line.partition(":")[2].strip()
    return platform.machine()
