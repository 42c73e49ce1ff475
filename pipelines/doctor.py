"""Find problems of this machine and of a Ray cluster, for ``uno doctor``."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from pipelines import ray_env
from pipelines.workarounds import NODE
from uno.data.files import Storage
from uno.errors import RAY, ConfigError, StorageError
from uno.threads import available_cpus

ANSWER_S = 60.0  # for the answers of nodes, which start a process and import torch
PACKAGES = ("uno-discovery", "torch", "torchvision", "numpy", "pyarrow", "ray")
GIB = 2**30
LOW_DISK_BYTES = 5 * GIB
# Ray puts its object store on the disk if /dev/shm is smaller than the store.
LOW_SHM_BYTES = GIB


class Finding(NamedTuple):
    """One line of ``uno doctor``, about one property of a machine or one node.

    Attributes:
        level: ``ok``, ``warning`` or ``error``.
        text: What was found.
        remedy: The advice to the user, or "".
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

    The cluster is the running one that commands would use, if there is one. Whether it
    accepts a connection is checked, but not its nodes.

    Yields:
        A finding for each property: its level, ``ok``, ``warning`` or ``error``; a
        text; and advice, or "". A machine without a GPU is ``ok``.
    """
    yield Finding("ok", ", ".join(f"{name} {v}" for name, v in versions().items()))
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
    yield from _check_ray()
    yield from _check_space()


def _check_ray() -> Iterator[Finding]:
    """Check whether Ray is installed, and whether the running cluster answers.

    The cluster is that of :func:`pipelines.ray_env.cluster_address`, if there is one.

    Yields:
        Findings, each with its level, a text, and advice or "". One warning and nothing
        else if Ray is not installed. A warning if the package for ``ray job submit`` is
        missing. Then ``ok`` if there is no running cluster or if it accepts a
        connection, and an error if it does not.
    """
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


def _check_space() -> Iterator[Finding]:
    """Check the size of shared memory, and the free space on the disks of a run.

    The disks are those of the working directory and of Ray's temporary files
    (``RAY_TMPDIR``, by default the system's folder for temporary files).

    Yields:
        A finding for shared memory (``/dev/shm``), if there is any: a warning below 1
        GiB. A finding for each disk: a warning if less than 5 GiB are free, an error if
        that is unknown.
    """
    if os.path.isdir("/dev/shm"):
        total = shutil.disk_usage("/dev/shm").total
        text, remedy = f"/dev/shm has {total / GIB:.1f} GiB", "docker: --shm-size=8g"
        low = Finding(
            "warning", text, f"Ray's object store falls back to disk; {remedy}"
        )
        yield low if total < LOW_SHM_BYTES else Finding("ok", text)
    rays_folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    for folder in (os.curdir, rays_folder):
        try:
            folder = os.path.abspath(folder)
            free = shutil.disk_usage(folder).free
            text = f"{free / GIB:.0f} GiB free at {folder}"
            low = Finding("warning", text, "free disk space")
            yield low if free < LOW_DISK_BYTES else Finding("ok", text)
        except OSError as error:
            yield Finding("error", f"{folder}: {error.strerror}")


def examine_cluster(place: str | None) -> Iterator[Finding]:
    """Check all nodes of the running Ray cluster that commands use.

    On each node the versions of packages are compared with those of this machine, and
    the number of GPUs that PyTorch sees with the number that Ray counts. A node that
    does not answer within 60 s gets an error.

    Args:
        place: A directory, path or URI, that all nodes must see; a file is written
            there and deleted. None checks no directory.

    Yields:
        A finding for each node that is alive, after all have answered: its level,
        ``ok`` or ``error``, and a text.

    Raises:
        ConfigError: There is no running cluster, or it cannot be reached.
        StorageError: This machine cannot write the file.
    """
    if ray_env.cluster_address() is None:
        raise ConfigError("no Ray cluster is named or runs here: RAY_ADDRESS=HOST:6379")
    storage = None if place is None else Storage(place)
    uri = None if storage is None else storage.uri
    name = f".uno-doctor-{uuid.uuid4().hex[:8]}"
    with ray_env.connect() as ray:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        look = ray.remote(num_cpus=0, max_retries=0)(node_facts)
        if storage is not None:
            storage.write(name, b"seen")
        try:
            tasks = [
                look.options(label_selector={NODE: node["NodeID"]}).remote(uri, name)
                for node in nodes
            ]
            ray.wait(tasks, num_returns=len(tasks), timeout=ANSWER_S)
            answers = [_answer_of(ray, task) for task in tasks]
        finally:
            if storage is not None:
                storage.delete(name)
    mine = versions()
    for node, answer in zip(nodes, answers, strict=True):
        yield finding_of_node(node, answer, mine)


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages that must agree on all nodes.

    Returns:
        The versions by name, such as ``Python``, ``torch`` and ``ray``. Packages that
        are not installed are left out.
    """
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def node_facts(place: str | None, name: str) -> dict[str, Any]:
    """Return facts about the node on which this task of Ray runs.

    Args:
        place: The directory that all nodes must see, a path or URI; None checks none.
        name: The name of a file in the directory that must hold the text ``seen``.

    Returns:
        ``host``, the host name; ``versions``, of Python and packages by name;
        ``sees``, whether the file is there with this text (None without a directory;
        False also if the directory cannot be read); ``gpus``, the list of the
        names of the GPUs that PyTorch sees; and ``cuda``, the CUDA version of PyTorch,
        or None.
    """
    sees: bool | None = None
    if place is not None:
        try:
            sees = Storage(place).find(name) == b"seen"
        except StorageError:
            sees = False
    devices = range(torch.cuda.device_count())
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "sees": sees,
        "gpus": [torch.cuda.get_device_name(i) for i in devices],
        "cuda": torch.version.cuda,
    }


def _answer_of(ray: Any, task: Any) -> dict[str, Any] | str:
    """Return the result of a task of :func:`node_facts`, or why there is none.

    A task that has not ended is cancelled. The reason is a text of one line.
    """
    try:
        return dict(ray.get(task, timeout=0))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(task, force=True)
        return f"no answer in {ANSWER_S:g} s"
    except ray.exceptions.RayError as error:
        return " ".join(str(error).split())[-200:]  # the cause is at the end


def finding_of_node(
    node: Mapping[str, Any], facts: Mapping[str, Any] | str, mine: Mapping[str, str]
) -> Finding:
    """Return the finding about one node of a cluster.

    Its level is ``error`` if the node did not answer, has another version of a package
    or lacks it, sees fewer GPUs than Ray counts, or does not see the directory.
    Otherwise it is ``ok``. The text lists all problems, then the CPUs and GPUs.

    Args:
        node: The node, an entry of ``ray.nodes()``.
        facts: The result of :func:`node_facts`, or the reason why the node did not
            answer.
        mine: The versions on this machine, by package.
    """
    has = node["Resources"]
    is_head = "node:__internal_head__" in has
    name = f"{node['NodeManagerAddress']}{' (head)' if is_head else ''}"
    if isinstance(facts, str):
        return Finding("error", f"{name}: {facts}", "use the same image on all nodes")
    gpus, problems = facts["gpus"], list[str]()
    for package, version in mine.items():
        if (other := facts["versions"].get(package, "none")) != version:
            problems.append(f"{package} {other}, here {version}")
    if (count := has.get("GPU", 0)) > len(gpus):
        problems.append(
            f"Ray counts {count:g} GPUs, PyTorch sees {len(gpus)} (CUDA"
            f" {facts['cuda']})"
        )
    if facts["sees"] is False:
        problems.append("does not see the directory")
    shown = f"{len(gpus)} x {gpus[0]}, CUDA {facts['cuda']}" if gpus else "no GPU"
    parts = [*problems, f"{has.get('CPU', 0):g} CPUs, {shown}"]
    if facts["sees"]:
        parts.append("sees the directory")
    level = "error" if problems else "ok"
    return Finding(level, f"{name} {facts['host']}: {'; '.join(parts)}")
