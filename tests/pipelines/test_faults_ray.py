"""Real workers that are killed."""

import os
import signal
import threading

import pytest

from pipelines import cli
from tests.pipelines.small import LONG, assert_as_undisturbed, wait_for
from tests.processes import running
from uno.data.files import Storage
from uno.runs.checkpoint import checkpoint_steps

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
]


def test_a_killed_worker_is_replaced(two, tmp_path, caplog):
    """The run ends with the weights of an undisturbed one."""
    run = tmp_path / "run"

    def kill_a_worker() -> None:
        begun = Storage(str(run))
        wait_for(lambda: bool(checkpoint_steps(begun, "discover")))
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
