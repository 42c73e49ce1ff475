"""Two nodes with addresses, ports and mounts of their own: network namespaces joined by a virtual cable.

As close to a second machine as one machine gets. Needs root; skipped where namespaces are not allowed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pipelines.small import INTERVAL, LONG, assert_same_weights
from tests.pipelines.test_cluster_files import end_processes_of
from tests.uno.small_run import wasted_steps
from uno.data.files import Storage
from uno.runs.faults import VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")
HEAD, OTHER = "10.199.77.1", "10.199.77.2"
ADDRESS = f"{HEAD}:6391"
NAMESPACE, HERE, THERE = "uno-test", "uno-here", "uno-there"  # interface names hold 15 characters


def ip(words: str, check: bool = True) -> bool:
    return subprocess.run(["ip", *words.split()], check=check, capture_output=True).returncode == 0


@contextmanager
def cable() -> Iterator[list[str]]:
    """The command that runs another on the second machine."""
    if os.getuid() or shutil.which("ip") is None or not ip(f"netns add {NAMESPACE}", check=False):
        pytest.skip("network namespaces need root")
    try:
        if not ip(f"link add {HERE} type veth peer name {THERE} netns {NAMESPACE}", check=False):
            pytest.skip("no virtual network devices here")
        ip(f"addr add {HEAD}/24 dev {HERE}")
        ip(f"link set {HERE} up")
        for words in (f"addr add {OTHER}/24 dev {THERE}", f"link set {THERE} up", "link set lo up"):
            ip(f"-n {NAMESPACE} {words}")
        yield ["ip", "netns", "exec", NAMESPACE]
    finally:
        ip(f"netns del {NAMESPACE}", check=False)
        ip(f"link del {HERE}", check=False)


@contextmanager
def two_machines(hidden: Path | None = None) -> Iterator[dict[str, str]]:
    """The environment of a driver on the first machine; the second does not see the directory ``hidden``."""
    folder = tempfile.mkdtemp(prefix="uno-ray-", dir="/tmp")
    env = {
        **os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "GLOO_SOCKET_IFNAME": HERE,
        "RAY_ADDRESS": "",
    }  # fmt: skip
    start = [RAY, "start", "--block", "--object-store-memory", str(100 * 2**20)]
    processes = []

    def spawn(command: list[str], **more: str) -> None:
        with open(f"{folder}/{len(processes)}.log", "w") as log:
            processes.append(subprocess.Popen(command, env=env | more, stdout=log, stderr=log, cwd=ROOT))

    with cable() as there:
        try:
            spawn([*start, "--head", f"--node-ip-address={HEAD}", "--port=6391", "--num-cpus=4",
                   "--dashboard-port=0"])  # fmt: skip
            wait_until(lambda: socket.socket().connect_ex((HEAD, 6391)) == 0)
            join = [*start, f"--address={ADDRESS}", f"--node-ip-address={OTHER}", "--num-cpus=3"]
            if hidden is not None:
                words = f"mount -t tmpfs tmpfs {hidden} && exec {' '.join(join)}"
                join = ["unshare", "--mount", "sh", "-c", words]
            spawn([*there, *join], GLOO_SOCKET_IFNAME=THERE)
            wait_until(lambda: "Ray runtime started" in Path(f"{folder}/1.log").read_text())
            yield env | {"RAY_ADDRESS": ADDRESS}
        finally:
            end_processes_of(processes, ADDRESS)
    shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def train(env: dict[str, str], output: Path) -> subprocess.CompletedProcess:
    """The command on the first machine, with a worker on each."""
    argv = [*LONG, "--workers", "2", "--compute.placement", "SPREAD"]
    return subprocess.run(
        [sys.executable, "-m", "pipelines.discover", *argv, "--output", str(output)],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_a_run_on_two_machines_of_which_one_dies(two, tmp_path):
    """kill -9 of the second machine's raylet: both workers go on on the first."""
    with two_machines() as env:
        done = train({**env, VARIABLE: "kill-node:step=100"}, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (wasted,) = wasted_steps(Storage(str(tmp_path / "run")))
    assert wasted <= INTERVAL + 1
    assert_same_weights(tmp_path / "run", two)


def test_storage_that_one_machine_does_not_see(tmp_path):
    """Kills: an epoch trained before anyone notices."""
    with two_machines(hidden=tmp_path) as env:
        done = train(env, tmp_path / "run")
    assert done.returncode == 4, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("uno: error: ") and "is not on storage that all nodes share" in last
    assert not (tmp_path / "run" / "checkpoints").exists()
