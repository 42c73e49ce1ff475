"""Faults met by real workers: what the user sees, what it costs, and the same weights in the end."""

import os
import subprocess
from pathlib import Path

import pytest

from pipelines import cli
from tests.pipelines.small import LONG, assert_as_undisturbed
from uno.data.files import Storage
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.faults import VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


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
def test_a_full_disk_a_read_only_one_and_killed_workers(two, tmp_path, capsys, monkeypatch):
    """Exit 4 and one line each time; with room again the same command goes on, and on after kills at random
    steps, of rank 0 too, which writes the checkpoints. Kills: an injector that is kinder than the kernel.
    """
    disk, kills = tmp_path / "disk", "kill-worker:step=60..120;kill-worker:rank=1,step=121..239,seed=3"
    disk.mkdir()
    real = os.getuid() == 0 and mount(disk, "size=100k", "-t", "tmpfs", "tmpfs")
    stages = (
        ("size=100k", "full-disk:checkpoint=3", 4, "No space left on device"),
        ("size=1g,ro", "read-only:checkpoint=3", 4, "Read-only file system"),
        ("size=1g,rw", kills, 0, ""),
    )
    try:
        for size, faults, code, reason in stages:
            assert not real or mount(disk, f"remount,{size}")
            monkeypatch.setenv(VARIABLE, "" if real and code else faults)
            assert cli.main(["demo", *LONG, "--output", str(disk / "run")]) == code
            err = capsys.readouterr().err
            last = err.splitlines()[-1:]
            assert not code or ("error: cannot write" in last[0] and reason in last[0])
            assert "Traceback" not in err
        assert_as_undisturbed(disk / "run", two, 2 if real else 4)
    finally:
        if real:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def mount(folder: Path, options: str, *what: str) -> bool:
    """Whether it worked; a container may forbid it to root."""
    command = ["mount", "-o", options, *what, str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0
