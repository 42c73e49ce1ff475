"""Faults met by real workers: what the user sees, what it costs, and the same
weights in the end.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from pipelines import cli
from tests.pipelines.small import LONG, assert_as_undisturbed
from uno.runs.hooks import VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_a_killed_worker_and_a_nan_on_one_rank(two, tmp_path, caplog, monkeypatch):
    """Rank 0, which writes the checkpoints, is killed and replaced; NaN is rolled back
    on both ranks. (For `ray job stop`: test_submit.) Kills: an injector that is kinder
    than the kernel, a log that is lost with its worker.
    """
    monkeypatch.setenv(VARIABLE, "kill-worker:rank=0,step=80..120;nan:rank=1,step=220")
    assert cli.main(["demo", *LONG, "--output", str(tmp_path / "run")]) == 0
    assert (
        "workers died (a worker process or its node was lost); new ones resume"
        in caplog.text
    )
    assert_as_undisturbed(tmp_path / "run", two, 2)
    for rank in (0, 1):
        text = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert (
            text.count(f"rank {rank} of 2, process") == 2
            and "rolled back to step" in text
        )
        assert "  discover  epoch 40/40  step 240/240" in text.replace(
            " discover", "  discover"
        )


@pytest.mark.slow
def test_a_full_disk_and_slow_storage(two, tmp_path, capsys, monkeypatch):
    """Exit 4 and one line; with room again the same command goes on, and on after
    storage that does not answer in time. Kills: a timeout that ends a run.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    real = os.getuid() == 0 and mount(disk, "size=100k", "-t", "tmpfs", "tmpfs")
    stages = (
        (
            "size=100k",
            "full-disk:checkpoint=3",
            4,
            r"error: cannot write .*No space left on device",
        ),
        ("size=1g,rw", "timeout:checkpoint=3", 0, ""),
    )
    try:
        for size, faults, code, reason in stages:
            assert not real or mount(disk, f"remount,{size}")
            monkeypatch.setenv(VARIABLE, "" if real and code else faults)
            assert cli.main(["demo", *LONG, "--output", str(disk / "run")]) == code
            err = capsys.readouterr().err
            assert (
                re.search(reason, (err.splitlines() or [""])[-1])
                and "Traceback" not in err
            )
        assert_as_undisturbed(disk / "run", two, 1 if real else 2)
    finally:
        if real:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def mount(folder: Path, options: str, *what: str) -> bool:
    """Whether it worked; a container may forbid it to root."""
    command = ["mount", "-o", options, *what, str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0
