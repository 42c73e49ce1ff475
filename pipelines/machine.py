"""Find problems of this machine and name remedies, for ``uno doctor``."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pipelines import ray_env
from uno.cpus import available_cpus
from uno.errors import RAY, ConfigError

GIB = 2**30
LOW_DISK_BYTES = 5 * GIB
# Ray puts its object store on the disk if /dev/shm is smaller than the store.
LOW_SHM_BYTES = GIB


class Finding(NamedTuple):
    """One line of ``uno doctor``.

    Attributes:
        level: ``ok``, ``warning`` or ``error``.
        text: What was found.
        remedy: What to do about it, or "".
    """

    level: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.text}" + (
            f"; {self.remedy}" if self.remedy else ""
        )


def machine() -> Iterator[Finding]:
    """Check versions, devices, disk, shared memory and the Ray cluster of this machine.

    Yields:
        The findings.
    """
    names = ["uno-discovery", "torch", "torchvision", "numpy", "pyarrow"]
    names += ["ray"] if importlib.util.find_spec("ray") else []
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    yield Finding("ok", f"Python {platform.python_version()}, {', '.join(versions)}")
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        yield Finding("ok", f"{name}: {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    if not torch.cuda.is_available():
        build = torch.version.cuda
        why = (
            f"built for CUDA {build}, but no device or driver"
            if build
            else "built without CUDA"
        )
        yield Finding(
            "ok",
            f"no CUDA device (PyTorch is {why}); training runs on"
            f" {available_cpus()} CPU cores",
        )
    yield from _ray()
    yield from _space()


def _ray() -> Iterator[Finding]:
    """Check whether Ray is installed, and whether the cluster that is named answers."""
    if importlib.util.find_spec("ray") is None:
        yield Finding(
            "warning", "Ray is not installed: --workers 0 only", f"pip install {RAY}"
        )
        return
    if importlib.util.find_spec("aiohttp_cors") is None:
        yield Finding("warning", "no ray job submit", "pip install 'ray[default]'")
    address = ray_env.cluster_address()
    if address is None:
        yield Finding(
            "ok",
            "no Ray cluster (RAY_ADDRESS is unset): --workers N starts one on this"
            " machine",
        )
        return
    try:
        ray_env.check_address(address)
        mode = os.environ.get("RAY_AUTH_MODE", "disabled")
        yield Finding(
            "ok", f"the Ray cluster at {address} answers; RAY_AUTH_MODE is {mode}"
        )
    except ConfigError as error:
        yield Finding("error", str(error))


def _space() -> Iterator[Finding]:
    """Check the size of shared memory, and the free space on the disks of a run.

    The disks are those of the working directory and of Ray's temporary files.
    """
    if os.path.isdir("/dev/shm"):
        total = shutil.disk_usage("/dev/shm").total
        text, remedy = f"/dev/shm has {total / GIB:.1f} GiB", "docker: --shm-size=8g"
        low = Finding(
            "warning", text, f"Ray's object store falls back to disk; {remedy}"
        )
        yield low if total < LOW_SHM_BYTES else Finding("ok", text)
    for folder in (os.getcwd(), os.environ.get("RAY_TMPDIR", "/tmp")):
        try:
            free = shutil.disk_usage(folder).free
            text = f"{free / GIB:.0f} GiB free at {folder}"
            low = Finding("warning", text, "free disk space")
            yield low if free < LOW_DISK_BYTES else Finding("ok", text)
        except OSError as error:
            yield Finding("error", f"{folder}: {error.strerror}")
