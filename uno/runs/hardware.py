"""Choose the device, threads and compiler of this process, and describe hardware."""

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

from uno.config import Config
from uno.errors import ConfigError
from uno.runs import NUMERICS
from uno.runs.checkpoint import FORMAT_VERSION
from uno.threads import available_cpus


def describe_hardware(cuda: bool | None = None) -> str:
    """Return the name of the GPU, or of the processor with its number of cores.

    Args:
        cuda: True for the GPU, which PyTorch must see, False for the processor, None
            for the GPU if PyTorch sees one. With several GPUs it is PyTorch's current
            one.

    Returns:
        Text such as "NVIDIA H100 80GB HBM3", or "AMD EPYC 7763, 16 cores" with the
        number of cores that this process may use. The type of the machine, such as
        "x86_64", stands for a processor whose name is not known. Hyperthreads count as
        cores.
    """
    if torch.cuda.is_available() if cuda is None else cuda:
        return str(torch.cuda.get_device_name())
    return f"{_processor_field()}, {available_cpus()} cores"


def local_device(config: Config) -> torch.device:
    """Return the device on which this process computes, "cuda" or "cpu".

    If workers train (``compute.num_workers`` is not 0), only their nodes need GPUs:
    this process then uses the CPU if it has no GPU, whatever device was asked for.

    Args:
        config: The configuration. ``compute.device`` is "cpu", "cuda" or "auto", which
            is the GPU if PyTorch sees one, otherwise the CPU.

    Raises:
        ConfigError: ``compute.num_workers`` is 0, ``compute.device`` is "cuda", and
            PyTorch finds no CUDA device.
    """
    wanted, cuda = config.compute.device, torch.cuda.is_available()
    if wanted == "cuda" and not cuda and config.compute.num_workers == 0:
        raise ConfigError(
            "compute.device is cuda but PyTorch finds no CUDA device; use --device cpu"
        )
    return torch.device("cuda" if wanted != "cpu" and cuda else "cpu")


def num_threads(config: Config, share: int = 1) -> int:
    """Return ``compute.threads``, or by default a share of the cores of this process.

    Nothing is set here: the result is the number of CPU threads to use.

    Args:
        config: The configuration.
        share: The number of processes among which the cores are divided, rounded down
            but at least one core each. It has no effect on ``compute.threads``.

    Raises:
        ConfigError: ``compute.threads`` is more than 64 and more than 4 times the
            number of cores. OpenMP would fail, after it took gigabytes for stacks.
    """
    cores = available_cpus()
    threads, most = config.compute.threads or max(1, cores // share), max(64, 4 * cores)
    if threads > most:
        raise ConfigError(
            f"compute.threads is {threads}, more than {most} for {cores} cores"
        )
    return threads


def describe_environment(fingerprint: str) -> dict[str, Any]:
    """Return the content of ``environment.json``: how and where a run was started.

    Args:
        fingerprint: The hash of the data.

    Returns:
        JSON values by name: ``format_version`` of checkpoints; ``numerics``, the number
        of the last change that alters results; ``command``, the command line;
        ``data_fingerprint``; ``python``, its version; ``platform``, the operating
        system and machine as text; ``processor``, its name and the number of cores that
        this process may use; ``versions``, those of uno-discovery, torch, torchvision,
        numpy and ray, as far as they are installed; and ``gpus``, the names of the GPUs
        that PyTorch sees in this process.
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
        "processor": describe_hardware(cuda=False),
        "versions": versions,
        "gpus": [
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ],
    }


def prepare_compiler() -> None:
    """Prepare ``torch.compile``: check that it has a compiler, and choose its cache.

    This sets the environment variable ``TORCHINDUCTOR_CACHE_DIR`` to a subfolder of its
    value, or of ``torchinductor_UID`` in the directory for temporary files if it is not
    set. The subfolder is named by a hash of the vector instructions of this processor.
    A further call changes nothing. Torch 2.15 finds cached code by the graph alone, and
    code for another processor's vectors computes NaN without an error.

    Raises:
        ConfigError: There is no C++ compiler: neither the program that the environment
            variable CXX names, nor ``g++`` or ``clang++`` is found.
    """
    if not any(
        shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name
    ):
        raise ConfigError(
            "compiling an encoder needs a C++ compiler (g++, clang++ or CXX) on every"
            " node"
        )
    vectors = f"{torch.backends.cpu.get_cpu_capability()} {_processor_field('flags')}"
    folder = os.environ.get(
        "TORCHINDUCTOR_CACHE_DIR",
        f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
    )
    name = "vectors-" + hashlib.sha256(vectors.encode()).hexdigest()[:12]
    if os.path.basename(folder) != name:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, name)


def _processor_field(field: str = "model name") -> str:
    """Return a field of the first processor in ``/proc/cpuinfo``.

    Without such a file or field, return the type of the machine, such as "x86_64".

    Args:
        field: The beginning of its line, such as "model name" (the name of the
            processor) or "flags" (its features).
    """
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(field):
                return line.partition(":")[2].strip()
    return platform.machine()
