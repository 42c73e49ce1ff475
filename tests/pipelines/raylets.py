"""Two nodes with addresses, ports and mounts of their own: network namespaces joined by
a virtual cable.

As close to a second machine as one machine gets. Where namespaces are not allowed, two
nodes on one address.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.pipelines.small import RAY, ROOT, wait_for
from tests.pipelines.test_cluster_files import end_processes_of
from tests.processes import below, running

HEAD, OTHER = "10.199.77.1", "10.199.77.2"
# interface names hold 15 characters
NAMESPACE, HERE, THERE = "uno-test", "uno-here", "uno-there"
DASHBOARD, AGENT = 8269, 8270  # a node whose agent finds its port taken takes no jobs
TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
STORE_BYTES = 100 * 2**20
NODE_SECONDS = 300.0  # until a node has joined, on a busy machine
DRAIN = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
client = GcsClient(address=sys.argv[1])
sys.stdin.readline()
deadline = int(1000 * (time.time() + float(sys.argv[2])))
nodes = client.get_all_node_info().items()
others = [found for found, node in nodes if not node.is_head_node and node.state == node.ALIVE]
for found in others:
    reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    accepted, why = client.drain_node(found.hex(), reason, "spot", deadline)
    assert accepted, why
assert others
"""  # noqa: E501


def ip(words: str, check: bool = True) -> bool:
    return (
        subprocess.run(
            ["ip", *words.split()], check=check, capture_output=True
        ).returncode
        == 0
    )


@contextmanager
def cable() -> Iterator[bool]:
    """Whether the second machine is there."""
    if (
        os.getuid()
        or shutil.which("ip") is None
        or not ip(f"netns add {NAMESPACE}", check=False)
    ):
        yield False
        return
    try:
        joined = ip(
            f"link add {HERE} type veth peer name {THERE} netns {NAMESPACE}",
            check=False,
        )
        if joined:
            ip(f"addr add {HEAD}/24 dev {HERE}")
            ip(f"link set {HERE} up")
            for words in (
                f"addr add {OTHER}/24 dev {THERE}",
                f"link set {THERE} up",
                "link set lo up",
            ):
                ip(f"-n {NAMESPACE} {words}")
        yield joined
    finally:
        ip(f"netns del {NAMESPACE}", check=False)
        ip(f"link del {HERE}", check=False)


class Raylets:
    """Nodes that run; ``env`` is that of a driver on the first machine, ``real``:
    there is a second one.
    """

    def __init__(self, folder: str, real: bool) -> None:
        self._folder, self.real = folder, real
        self._processes: list[subprocess.Popen] = []
        self.host = HEAD if real else "127.0.0.1"
        self.address = f"{self.host}:6391"
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": folder,
            "RAY_ADDRESS": "",
        }
        self.env |= {name: os.environ[name] for name in TOKENS if name in os.environ}
        # a dead node is known after 5 s instead of 15
        self.env |= {"RAY_health_check_period_ms": "1000"}
        if real:
            self.env["GLOO_SOCKET_IFNAME"] = HERE

    def start(self, cpus: int, takes_jobs: bool) -> None:
        """The head, with a dashboard, a dozen processes, where it ``takes_jobs``."""
        place = [
            "--head",
            f"--node-ip-address={self.host}",
            "--port=6391",
            "--num-gpus=0",
            # another cluster of this machine may have the usual port
            f"--dashboard-port={DASHBOARD}",
            f"--dashboard-agent-listen-port={AGENT}",
            f"--include-dashboard={str(takes_jobs).lower()}",
        ]
        self._spawn(place, cpus)
        wait_for(lambda: socket.socket().connect_ex((self.host, 6391)) == 0)
        self.env["RAY_ADDRESS"] = self.address

    def join(self, cpus: int, hidden: Path | None = None, gpus: int = 0) -> None:
        """One more node; on the second machine, which does not see the directory
        ``hidden``, or the first.
        """
        there = self.real and hidden is not None
        where = [
            f"--address={self.address}",
            f"--node-ip-address={OTHER if there else self.host}",
        ]
        where.append(f"--num-gpus={gpus}")
        self._spawn(where, cpus, hidden if there else None)
        log = Path(f"{self._folder}/{len(self._processes) - 1}.log")
        wait_for(lambda: "Ray runtime started" in log.read_text(), NODE_SECONDS)

    def lose(self) -> None:
        """SIGKILL to the raylet of the node that joined last; returns once its
        `ray start` has ended.
        """
        (raylet,) = self.processes_of("raylet", last := self._processes[-1])
        os.kill(raylet, signal.SIGKILL)
        wait_for(lambda: last.poll() is not None)

    def processes_of(self, name: str, *nodes: subprocess.Popen) -> list[int]:
        """Those of ``nodes``, or of all, whose command begins with a path to, or as,
        ``name``.
        """
        found = below([node.pid for node in nodes or self._processes], running())
        return [
            pid
            for pid, each in found.items()
            if each.words[0].split("/")[-1].startswith(name)
        ]

    def notice(self, seconds: float) -> Callable[[], None]:
        """Tells every node but the head to leave when called, as `ray drain-node` does
        at a spot market's notice; its process, which takes seconds to start, is there
        already.
        """
        command = [sys.executable, "-c", DRAIN, self.address, str(seconds)]
        process = subprocess.Popen(
            command, env=self.env, stdin=subprocess.PIPE, text=True
        )

        def tell() -> None:
            process.communicate("\n")
            assert process.returncode == 0

        return tell

    def end(self) -> None:
        """All of them."""
        end_processes_of(self._processes, self.address)

    def _spawn(self, words: list[str], cpus: int, hidden: Path | None = None) -> None:
        limits = [f"--object-store-memory={STORE_BYTES}", f"--num-cpus={cpus}"]
        command = [RAY, "start", "--block", *limits, *words]
        more = {}
        if hidden is not None:
            line = f"mount -t tmpfs tmpfs {hidden} && exec {' '.join(command)}"
            command = [
                "ip",
                "netns",
                "exec",
                NAMESPACE,
                "unshare",
                "--mount",
                "sh",
                "-c",
                line,
            ]
            more = {"GLOO_SOCKET_IFNAME": THERE}
        with open(f"{self._folder}/{len(self._processes)}.log", "w") as log:
            started = subprocess.Popen(
                command, env=self.env | more, stdout=log, stderr=log, cwd=ROOT
            )
        self._processes.append(started)


@contextmanager
def head(cpus: int, takes_jobs: bool = False) -> Iterator[Raylets]:
    """A head; what joins it ends with it."""
    folder = tempfile.mkdtemp(prefix="uno-ray-", dir="/tmp")
    with cable() as real:
        raylets = Raylets(folder, real)
        try:
            raylets.start(cpus, takes_jobs)
            yield raylets
        finally:
            raylets.end()
    shutil.rmtree(folder, ignore_errors=True)


class Command:
    """A command on the first machine; ``lines`` are what it has said, on both
    streams, ``code`` its end.
    """

    def __init__(
        self, argv: list[str], env: dict[str, str], log: Path, code: Path = ROOT
    ) -> None:
        self._log = log
        with open(log, "w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *argv],
                env=env,
                cwd=code,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def says(self, text: str) -> bool:
        """Whether it has; an error where it has ended without."""
        found = any(text in line for line in self.lines)
        assert found or self.code is None, self._log.read_text()
        return found

    def count(self, text: str) -> int:
        """How many lines say it."""
        return sum(text in line for line in self.lines)

    def stop(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def end(self, seconds: float = 200) -> int:
        """Its exit code; it is killed if that takes longer."""
        limit = time.monotonic() + seconds
        while self.code is None and time.monotonic() < limit:
            time.sleep(0.1)
        if self.code is None:
            self._process.kill()
        return self._process.wait()
