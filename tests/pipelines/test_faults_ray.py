"""Faults met by real workers: what the user sees, what it costs, and the same weights in the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipelines import cli, doctor
from tests.pipelines.small import INTERVAL, LONG, assert_same_weights, lines_of
from tests.uno.small_run import wasted_steps
from uno.data.files import Storage
from uno.runs import lock
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.faults import VARIABLE

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")


@pytest.fixture(autouse=True)
def cluster(ray_cluster):
    threads = torch.get_num_threads()
    yield ray_cluster
    torch.set_num_threads(threads)


def assert_as_undisturbed(run: Path, undisturbed: Path, num_faults: int) -> None:
    """The same numbers, every fault struck, and none cost more than a checkpoint interval and a step."""
    wasted = wasted_steps(Storage(str(run)))
    assert len(wasted) == num_faults and max(wasted) <= INTERVAL + 1, wasted
    assert_same_weights(run, undisturbed)
    assert lines_of(run) == lines_of(undisturbed)


def test_a_stop_a_killed_worker_and_a_nan_on_one_rank(two, tmp_path, capsys, caplog, monkeypatch):
    """SIGTERM saves and leaves with 75; the same command goes on; a killed worker is replaced; NaN is rolled
    back on both ranks.
    """
    output = tmp_path / "run"
    argv = ["demo", *LONG, "--output", str(output)]
    monkeypatch.setenv(VARIABLE, "sigterm:step=8;kill-worker:rank=1,step=200;nan:rank=1,step=220")
    assert cli.main(argv) == 75
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].endswith("of 240; resume with the same command")
    assert "stopping: saving a checkpoint first" in captured.out
    stopped_at = checkpoint_steps(Storage(str(output)), "discover")[-1]
    assert 8 <= stopped_at < 200 and not (output / "lock.json").exists()
    assert cli.main(argv) == 0
    assert "workers died (a worker process or its node was lost); new ones resume" in caplog.text
    assert_as_undisturbed(output, two, 3)


@pytest.mark.slow
def test_workers_killed_at_three_random_steps(two, tmp_path, monkeypatch):
    """kill -9 of rank 0 too, which writes the checkpoints."""
    monkeypatch.setenv(
        VARIABLE, "kill-worker:rank=1,step=1..120,times=2,seed=3;kill-worker:rank=0,step=121..239,seed=3"
    )
    output = tmp_path / "run"
    assert cli.main(["demo", *LONG, "--output", str(output)]) == 0
    assert_as_undisturbed(output, two, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full-disk", "read-only"])
def test_a_disk_that_takes_no_checkpoint(two, tmp_path, capsys, monkeypatch, kind):
    """Exit 4 and one line; with space again, the same command goes on from the older checkpoint."""
    monkeypatch.setenv(VARIABLE, f"{kind}:checkpoint=3")
    output = tmp_path / "run"
    argv = ["demo", *LONG, "--output", str(output)]
    assert cli.main(argv) == 4
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith(f"uno: error: cannot write {output}/checkpoints/discover/step_00000018/")
    assert not any("Traceback" in line for line in err)
    assert checkpoint_steps(Storage(str(output)), "discover") == [6, 12]
    assert cli.main(argv) == 0
    assert_as_undisturbed(output, two, 1)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A real disk of that size."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    command = ["mount", "-o", f"remount,{options}", str(folder)]
    subprocess.run(command, check=True)


@pytest.mark.slow
def test_a_disk_that_is_really_full_and_then_really_read_only(two, tmp_path, capsys):
    """Kills: an injector that is kinder than the kernel."""
    argv = ["demo", *LONG, "--output"]
    with small_disk(tmp_path / "disk", "100k") as disk:
        output = disk / "run"
        assert cli.main([*argv, str(output)]) == 4
        assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
        remount(disk, "size=1g,ro")
        assert cli.main([*argv, str(output)]) == 4
        assert "Read-only file system" in capsys.readouterr().err.splitlines()[-1]
        remount(disk, "size=1g,rw")
        assert cli.main([*argv, str(output)]) == 0
        assert_same_weights(output, two)


def driver(output: Path, faults: str) -> subprocess.Popen:
    """The command as a process of its own, on this cluster, which outlives it."""
    import ray

    address = ray.get_runtime_context().gcs_address
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.discover", "--workers", "2", *LONG, "--output", str(output)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "RAY_ADDRESS": address, VARIABLE: faults},
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_driver_and_rays_own_files_emptied(two, tmp_path, capsys, monkeypatch):
    """Its workers may go on for a while on a cluster that outlives it; the same command takes over. What Ray
    Train kept of the killed run (its snapshot) is of no use and of no harm.
    """
    monkeypatch.setattr(lock, "WATCH_S", 4)
    output = tmp_path / "run"
    killed = driver(output, "kill-driver:step=8")
    _, errors = killed.communicate(timeout=120)
    assert killed.returncode == -9, errors.decode()
    bookkeeping = [path for path in (output / "ray").rglob("*") if path.is_file()]
    assert bookkeeping
    for path in bookkeeping:
        path.write_bytes(b"")
    assert cli.guard(doctor.main, [str(output)]) == 0
    said = capsys.readouterr().out
    assert f"process {killed.pid} on" in said and "ray: Ray Train's bookkeeping of a killed command" in said
    assert cli.main(["discover", "--workers", "2", *LONG, "--output", str(output)]) == 0
    assert f"is claimed by process {killed.pid} on" in capsys.readouterr().out
    assert not (output / "ray").exists()
    assert_as_undisturbed(output, two, 1)


@contextmanager
def second_node(cluster, num_cpus: int = 3) -> Iterator[subprocess.Popen]:
    """One more node of the tests' cluster: a raylet of its own."""
    before = len(alive_nodes(cluster))
    node = subprocess.Popen(
        [RAY, "start", "--address", cluster.get_runtime_context().gcs_address, "--block",
         "--num-cpus", str(num_cpus), "--object-store-memory", str(100 * 2**20)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: len(alive_nodes(cluster)) == before + 1)
        yield node
    finally:
        node.terminate()
        node.wait(30)
        wait_for(lambda: len(alive_nodes(cluster)) == before)


def alive_nodes(cluster) -> list[str]:
    return [node["NodeID"] for node in cluster.nodes() if node["Alive"]]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_one_of_two_nodes_is_killed(two, tmp_path, cluster, monkeypatch, caplog):
    """kill -9 of the raylet below rank 1, whose node is then gone with all in it: both workers go on on the
    other node.
    """
    monkeypatch.setenv(VARIABLE, "kill-node:step=100")
    output = tmp_path / "run"
    argv = ["demo", *LONG, "--compute.placement", "SPREAD", "--output", str(output)]
    with second_node(cluster) as node:
        assert cli.main(argv) == 0
        node.wait(30)  # `ray start --block` ends when its raylet does
    assert "was lost); new ones resume from the newest checkpoint" in caplog.text
    assert_as_undisturbed(output, two, 1)
