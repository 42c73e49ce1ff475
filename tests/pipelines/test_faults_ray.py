"""Real workers that are killed, and a disk that fills up under a run on Ray."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from pipelines import cli
from tests.pipelines.small import LONG, assert_as_undisturbed, wait_for
from tests.processes import running
from uno.data.files import Storage
from uno.runs.checkpoint import checkpoint_steps

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_a_killed_worker_is_replaced(two, tmp_path, caplog):
    """The run ends with the weights of an undisturbed one."""
    run = tmp_path / "run"

    def kill_a_worker() -> None:
        begun = Storage(str(run))
        wait_for(lambda: bool(checkpoint_steps(begun, "discover")), seconds=600)
        workers = [
            pid
            for pid, process in running().items()
            if "RayTrainWorker" in process.words[0]
        ]
        os.kill(workers[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    assert cli.main(["demo", *LONG, "--output", str(run)]) == 0
    killer.join()
    assert (
        "workers died (a worker process or its node was lost); new ones resume"
        in caplog.text
    )
    assert_as_undisturbed(run, two)


@pytest.mark.release
def test_a_full_disk(two, tmp_path, capsys):
    """Exit 4 and one line; with room again the same command goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() or not mount(disk, "size=100k", "-t", "tmpfs", "tmpfs"):
        pytest.skip("only root may mount a small file system")
    command = ["demo", *LONG, "--output", str(disk / "run")]
    try:
        assert cli.main(command) == 4
        err = capsys.readouterr().err
        assert re.search(
            r"error: cannot write .*No space left on device", err.splitlines()[-1]
        )
        assert "Traceback" not in err
        assert mount(disk, "remount,size=1g,rw")
        assert cli.main(command) == 0
        assert_as_undisturbed(disk / "run", two)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def mount(folder: Path, options: str, *what: str) -> bool:
    """Mount a file system; return whether it worked: a container may forbid it."""
    command = ["mount", "-o", options, *what, str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0
