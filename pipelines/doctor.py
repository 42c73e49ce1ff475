"""Find problems of this machine and of a Ray cluster, for ``uno doctor``."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipelines import ray_env
from uno.data.files import Storage
from uno.errors import RAY, ConfigError, StorageError, one_line
from uno.threads import available_cpus

ANSWER_S = 60.0  # for the answer of a node, which starts a process and imports torch
MOST_CLOCK_S = 2.0  # largest accepted difference of two clocks
REDUCED_BYTES, REDUCE_S = 64 * 2**20, 1.0
PACKAGES = ("uno-discovery", "torch", "torchvision", "ray", "numpy", "pyarrow")
PLUGIN_PATHS = "/opt/amazon/ofi-nccl/lib:/opt/aws-ofi-nccl/lib"
GIB = 2**30
LOW_DISK_BYTES = 5 * GIB
# Ray puts its object store on the disk if /dev/shm is smaller than the store.
LOW_SHM_BYTES = GIB


Facts = Mapping[str, Any]


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

    The cluster is the running one that commands would use, if there is one.

    Yields:
        A finding for each property: its level, ``ok``, ``warning`` or ``error``; a
        text; and advice, or "".
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
    yield from _check_ray()
    yield from _check_space()


def _check_ray() -> Iterator[Finding]:
    """Check whether Ray is installed, and whether the running cluster answers.

    The cluster is that of :func:`pipelines.ray_env.cluster_address`, if there is one.

    Yields:
        Findings, each with its level, a text, and advice or "": a warning if Ray or the
        package for ``ray job submit`` is missing, an error if the cluster does not
        answer, else ``ok``.
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

    The disks are those of the working directory and of Ray's temporary files.

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
    for folder in (os.getcwd(), os.environ.get("RAY_TMPDIR", "/tmp")):
        try:
            free = shutil.disk_usage(folder).free
            text = f"{free / GIB:.0f} GiB free at {folder}"
            low = Finding("warning", text, "free disk space")
            yield low if free < LOW_DISK_BYTES else Finding("ok", text)
        except OSError as error:
            yield Finding("error", f"{folder}: {error.strerror}")


def examine_cluster(place: str | None) -> Iterator[Finding]:
    """Check all nodes of the running Ray cluster that commands use.

    On each node it compares the versions of packages and the clock with those of this
    machine, and the number of GPUs that PyTorch sees with the number that Ray counts.
    It looks for EFA network cards and for NCCL's plugin for them. If at least two nodes
    have GPUs, it measures an all-reduce of about one second over one GPU of each of
    them; if no node has GPUs, over the CPUs of all nodes.

    Args:
        place: A directory, path or URI, that all nodes must see; a file is written
            there and deleted. None checks no directory.

    Yields:
        A finding for each node: its level, ``ok``, ``warning`` or ``error``, and a
        text.

    Raises:
        ConfigError: There is no running cluster.
    """
    if ray_env.cluster_address() is None:
        raise ConfigError("no Ray cluster is named or runs here: RAY_ADDRESS=HOST:6379")
    with ray_env.connect() as ray:
        nodes = {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
        on = {name: _node_task(ray, name) for name in nodes}
        name = f".uno-doctor-{uuid.uuid4().hex[:8]}"
        storage = None if place is None else Storage(place)
        if storage is not None:
            storage.write(name, b"seen")
        try:
            look = partial(node_facts, None if storage is None else storage.uri, name)
            facts = _wait_for_answers(ray, {node: on[node](look, 0) for node in nodes})
        finally:
            if storage is not None:
                storage.delete(name)
        for node, about in facts.items():
            if isinstance(about, dict):
                before, there = (
                    time.time(),
                    _wait_for_answers(ray, {node: on[node](time.time, 0)})[node],
                )
                about["late"] = (
                    there - (before + time.time()) / 2
                    if isinstance(there, float)
                    else 0.0
                )
        speeds = _measure_all_reduce(ray, nodes, on)
    mine = versions()
    for node, about in nodes.items():
        yield line_of(about, facts[node], mine, speeds.get(node))


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
    """Return what can be measured on the node on which this task of Ray runs.

    Args:
        place: The directory that all nodes must see, a path or URI; None checks none.
        name: The name of a file that must be in the directory.

    Returns:
        ``host``, the name of the node; ``versions``, see :func:`versions`; ``sees``,
        whether the file is there (None without a directory); ``gpus``, the list of the
        names of the GPUs that PyTorch sees; ``cuda``, the CUDA version of PyTorch, or
        None; ``efa``, the number of EFA and other network cards with RDMA; and
        ``plugin``, the state of NCCL's network plugin, see :func:`plugin`.
    """
    sees: bool | None = None
    if place is not None:
        try:
            sees = Storage(place).find(name) == b"seen"
        except StorageError:
            sees = False
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "sees": sees,
        "gpus": [
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ],
        "cuda": torch.version.cuda,
        "efa": len(efa_devices()),
        "plugin": plugin(),
    }


def efa_devices(folder: str = "/sys/class/infiniband") -> list[str]:
    """Return the names of this machine's network cards with RDMA, such as EFA of AWS.

    NCCL can use these without the kernel.

    Args:
        folder: The directory in which Linux lists such cards. Without it the list is
            empty.
    """
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def plugin(paths: str | None = None) -> str:
    """Return the state of NCCL's network plugin (``libnccl-net*.so``) on this machine.

    Args:
        paths: Folders to search, with colons between; None for those of
            ``LD_LIBRARY_PATH`` and the usual folders.

    Returns:
        ``none`` if there is no plugin, ``ok`` if all libraries that the first one found
        needs are there, or a phrase that names those that it lacks.
    """
    paths = paths or f"{os.environ.get('LD_LIBRARY_PATH', '')}:{PLUGIN_PATHS}"
    found = [
        file
        for folder in paths.split(":")
        if folder
        for file in Path(folder).glob("libnccl-net*.so")
    ]
    if not found:
        return "none"
    told = subprocess.run(
        ["ldd", str(found[0])], capture_output=True, text=True, check=False
    ).stdout
    lacking = [line.split()[0] for line in told.splitlines() if "not found" in line]
    return f"{found[0]} lacks {', '.join(lacking)}" if lacking else "ok"


def line_of(
    node: Facts, facts: Facts | str, mine: Mapping[str, str], speed: float | str | None
) -> Finding:
    """Return the finding about one node of a cluster.

    It is an error if the node did not answer, has another version of a package, sees
    fewer GPUs than Ray counts, or does not see the directory. Otherwise it is a warning
    if its clock differs by more than 2 s, NCCL's network plugin is broken or is missing
    although there are EFA cards, or the all-reduce failed.

    Args:
        node: The node, an entry of ``ray.nodes()``.
        facts: The result of :func:`node_facts`, with ``late``, the difference in
            seconds between the node's clock and that of this machine; or the reason why
            the node did not answer.
        mine: The versions on this machine, by package.
        speed: The bandwidth of the all-reduce in bytes a second, or the reason why
            there is none; None if it was not measured.
    """
    has = node["Resources"]
    name = node["NodeManagerAddress"] + (
        " (head)" if "node:__internal_head__" in has else ""
    )
    if isinstance(facts, str):
        return Finding("error", f"{name}: {facts}", "use the same image on all nodes")
    wrong, doubtful = list[str](), list[str]()
    for package, version in mine.items():
        if (other := facts["versions"].get(package, "none")) != version:
            wrong.append(f"{package} {other}, here {version}")
    if (count := has.get("GPU", 0)) > len(facts["gpus"]):
        wrong.append(
            f"Ray counts {count:g} GPUs, PyTorch sees {len(facts['gpus'])} (CUDA"
            f" {facts['cuda']})"
        )
    if facts["sees"] is False:
        wrong.append("does not see the directory")
    if abs(facts["late"]) > MOST_CLOCK_S:
        doubtful.append(f"its clock is {facts['late']:+.1f} s off")
    if facts["plugin"] not in ("ok", "none"):
        doubtful.append(facts["plugin"])
    elif facts["efa"] and facts["plugin"] == "none":
        doubtful.append(
            f"{facts['efa']} EFA cards and no libnccl-net.so: NCCL uses sockets"
        )
    gpus = (
        f"{len(facts['gpus'])} x {facts['gpus'][0]}, CUDA {facts['cuda']}"
        if facts["gpus"]
        else "no GPU"
    )
    said = [
        f"{has.get('CPU', 0):g} CPUs, {gpus}",
        *([f"{facts['efa']} EFA cards"] if facts["efa"] else []),
    ]
    said += ["sees the directory"] if facts["sees"] else []
    if isinstance(speed, float):
        said.append(f"all-reduce {speed / 1e9:.2g} GB/s")
    elif speed is not None:
        doubtful.append(f"no all-reduce: {speed}")
    level = "error" if wrong else "warning" if doubtful else "ok"
    return Finding(
        level, f"{name} {facts['host']}: {'; '.join([*wrong, *doubtful, *said])}"
    )


def reduce_for_a_second(
    rank: int, world: int, master: str, port: int, gpu: bool
) -> float:
    """Measure the bandwidth of an all-reduce of 64 MiB for about one second.

    All processes of the group call this.

    Args:
        rank: The number of this process in the group, from 0.
        world: The number n of processes.
        master: The address of rank 0.
        port: The port of rank 0.
        gpu: Whether to use NCCL on the first GPU, and not gloo on the CPU.

    Returns:
        Bytes a second that each process sends, and receives: 2 (n - 1) / n of the 64
        MiB for each all-reduce.
    """
    import torch.distributed as dist

    device = torch.device("cuda" if gpu else "cpu")
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"tcp://{master}:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=ANSWER_S),
    )
    try:
        tensor, spent, rounds = torch.zeros(REDUCED_BYTES // 4, device=device), 0.0, 0
        dist.all_reduce(tensor)  # opens the connections
        start = time.monotonic()
        while spent < REDUCE_S:
            dist.all_reduce(tensor)
            rounds += 1
            clock = torch.tensor([time.monotonic() - start], device=device)
            dist.broadcast(clock, 0)  # all ranks stop after the same round
            spent = float(clock)
        return rounds * REDUCED_BYTES * 2 * (world - 1) / world / spent
    finally:
        dist.destroy_process_group()


def own_address() -> tuple[str, int]:
    """Return the IP address of this node, and a port that is free on it."""
    import ray

    with socket.create_server(("", 0)) as free:
        return str(ray.util.get_node_ip_address()), free.getsockname()[1]


def _measure_all_reduce(
    ray: Any, nodes: Mapping[str, Facts], on: Mapping[str, Any]
) -> dict[str, float | str]:
    """Measure an all-reduce over all nodes, or over those with a GPU if there are any.

    Args:
        ray: The module ``ray``, connected to a cluster.
        nodes: The nodes of the cluster, entries of ``ray.nodes()``, by id.
        on: For each node, by id, the function of :func:`_node_task` that starts a task
            on it.

    Returns:
        For each node that took part, by id, the bandwidth in bytes a second, or the
        reason why there is none. The result is empty if only one node could take part.
    """
    gpus = [
        node for node, about in nodes.items() if about["Resources"].get("GPU", 0) >= 1
    ]
    members = gpus if gpus else list(nodes)
    if len(members) < 2:
        return {}
    try:
        master, port = ray.get(on[members[0]](own_address, 0), timeout=ANSWER_S)
    except Exception as error:
        return dict.fromkeys(members, one_line(error)[:200])
    jobs = {
        node: on[node](
            partial(reduce_for_a_second, rank, len(members), master, port, bool(gpus)),
            bool(gpus),
        )
        for rank, node in enumerate(members)
    }
    return _wait_for_answers(ray, jobs)


def _node_task(ray: Any, node: str) -> Callable[[Callable[[], Any], float], Any]:
    """Return a function that starts a task on one node of the cluster.

    Args:
        ray: The module ``ray``, connected to a cluster.
        node: Ray's id of the node.

    Returns:
        A function. It takes a function without arguments and a number of GPUs, and
        returns the reference to the result.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)

    def start(function: Callable[[], Any], gpus: float) -> Any:
        """Start a task on the node, and return the reference to its result.

        Args:
            function: Runs in the task.
            gpus: The number of GPUs that the task reserves.
        """
        options = {
            "num_cpus": 0,
            "num_gpus": gpus,
            "scheduling_strategy": there,
            "max_retries": 0,
        }
        return ray.remote(**options)(lambda: function()).remote()

    return start


def _wait_for_answers(ray: Any, tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Wait up to 60 s for tasks on nodes, and return their results.

    Args:
        ray: The module ``ray``, connected to a cluster.
        tasks: The reference to the result of each task, by the id of its node.

    Returns:
        The results by node. For a task that failed, or that took longer and was
        cancelled, it is the reason, one line of text.
    """
    end, found = time.monotonic() + ANSWER_S, dict[str, Any]()
    for node, task in tasks.items():
        try:
            found[node] = ray.get(task, timeout=max(0.0, end - time.monotonic()))
        except Exception as error:
            ray.cancel(task, force=True)
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            found[node] = (
                f"no answer in {ANSWER_S:g} s" if late else one_line(error)[-200:]
            )
    return found
