"""Two nodes with addresses, ports and mounts of their own: network namespaces joined by a virtual cable.

As close to a second machine as one machine gets. Where namespaces are not allowed, two nodes on one address.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pipelines.small import LONG, RAY, ROOT, assert_as_undisturbed, wait_for
from tests.pipelines.test_cluster_files import end_processes_of
from uno.runs.faults import VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

HEAD, OTHER = "10.199.77.1", "10.199.77.2"
NAMESPACE, HERE, THERE = "uno-test", "uno-here", "uno-there"  # interface names hold 15 characters


def ip(words: str, check: bool = True) -> bool:
    return subprocess.run(["ip", *words.split()], check=check, capture_output=True).returncode == 0


@contextmanager
def cable() -> Iterator[bool]:
    """Whether the second machine is there."""
    if os.getuid() or shutil.which("ip") is None or not ip(f"netns add {NAMESPACE}", check=False):
        yield False
        return
    try:
        joined = ip(f"link add {HERE} type veth peer name {THERE} netns {NAMESPACE}", check=False)
        if joined:
            ip(f"addr add {HEAD}/24 dev {HERE}")
            ip(f"link set {HERE} up")
            for words in (f"addr add {OTHER}/24 dev {THERE}", f"link set {THERE} up", "link set lo up"):
                ip(f"-n {NAMESPACE} {words}")
        yield joined
    finally:
        ip(f"netns del {NAMESPACE}", check=False)
        ip(f"link del {HERE}", check=False)


@contextmanager
def two_nodes(hidden: Path) -> Iterator[tuple[dict[str, str], bool]]:
    """The environment of a driver on the first machine, and whether there is a second machine, which does not
    see the directory ``hidden``.
    """
    folder = tempfile.mkdtemp(prefix="uno-ray-", dir="/tmp")
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "RAY_ADDRESS": ""}
    start = [RAY, "start", "--block", "--object-store-memory", str(100 * 2**20)]
    processes = []

    def spawn(command: list[str], **more: str) -> None:
        with open(f"{folder}/{len(processes)}.log", "w") as log:
            processes.append(subprocess.Popen(command, env=env | more, stdout=log, stderr=log, cwd=ROOT))

    with cable() as real:
        head, other = (HEAD, OTHER) if real else ("127.0.0.1", "127.0.0.1")
        address = f"{head}:6391"
        try:
            if real:
                env["GLOO_SOCKET_IFNAME"] = HERE
            spawn([*start, "--head", f"--node-ip-address={head}", "--port=6391", "--num-cpus=4",
                   "--dashboard-port=0"])  # fmt: skip
            wait_for(lambda: socket.socket().connect_ex((head, 6391)) == 0)
            join = [*start, f"--address={address}", f"--node-ip-address={other}", "--num-cpus=3"]
            if real:
                words = f"mount -t tmpfs tmpfs {hidden} && exec {' '.join(join)}"
                join = ["ip", "netns", "exec", NAMESPACE, "unshare", "--mount", "sh", "-c", words]
            spawn(join, **({"GLOO_SOCKET_IFNAME": THERE} if real else {}))
            wait_for(lambda: "Ray runtime started" in Path(f"{folder}/1.log").read_text())
            yield env | {"RAY_ADDRESS": address}, real
        finally:
            end_processes_of(processes, address)
    shutil.rmtree(folder, ignore_errors=True)


def train(env: dict[str, str], output: Path) -> subprocess.CompletedProcess:
    """The command on the first machine, with a worker on each."""
    argv = [*LONG, "--workers", "2", "--compute.placement", "SPREAD"]
    return subprocess.run(
        [sys.executable, "-m", "pipelines.discover", *argv, "--output", str(output)],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_one_of_two_nodes_dies(two, tmp_path):
    """kill -9 of the second node's raylet: both workers go on on the first."""
    (tmp_path / "unused").mkdir()
    with two_nodes(tmp_path / "unused") as (env, _):
        done = train({**env, VARIABLE: "kill-node:step=100"}, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "was lost); new ones resume from the newest checkpoint" in done.stderr
    assert_as_undisturbed(tmp_path / "run", two, 1)


def test_storage_that_one_machine_does_not_see(tmp_path):
    """Kills: an epoch trained before anyone notices."""
    with two_nodes(tmp_path) as (env, real):
        if not real:
            pytest.skip("network namespaces need root")
        done = train(env, tmp_path / "run")
    assert done.returncode == 4, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("uno: error: ") and "is not on storage that all nodes share" in last
    assert not (tmp_path / "run" / "checkpoints").exists()
