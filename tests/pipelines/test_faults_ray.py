"""Real workers that are killed."""

import pytest

from pipelines import cli
from tests.pipelines.small import (
    LONG,
    assert_as_undisturbed,
    newest_step,
    ray_process_killed,
)
from uno.data.files import Storage

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
]


def test_a_killed_worker_is_replaced(two, tmp_path, caplog):
    """The run ends with the weights of an undisturbed one."""
    run = tmp_path / "run"
    with ray_process_killed(
        "RayTrainWorker", when=lambda: newest_step(Storage(str(run))) > 0
    ):
        assert cli.main(["demo", *LONG, "--output", str(run)]) == 0
    says = "workers died (a worker process or its node was lost); new ones resume"
    assert says in caplog.text
    assert_as_undisturbed(run, two)
