"""``ray job submit`` against a running head: logs, exit codes, stop, and the same
submission again.
"""

import json
import subprocess
import sys

import pytest

from tests.pipelines.small import (
    INTERVAL,
    LONG,
    RAY,
    ROOT,
    assert_as_undisturbed,
    newest_step,
    wait_for,
)
from uno.data.files import Storage
from uno.runs import lock

pytestmark = pytest.mark.ray


@pytest.fixture
def client(ray_cluster):
    from ray._private.worker import get_dashboard_url
    from ray.job_submission import JobSubmissionClient

    address = f"http://{get_dashboard_url()}"
    client = JobSubmissionClient(address)
    client.url = address
    wait_for(lambda: takes_jobs(client))
    return client


def takes_jobs(client) -> bool:
    """The head's agent starts after its dashboard."""
    try:
        return bool(client.submit_job(entrypoint="true"))
    except RuntimeError as error:
        assert "No available agent" in str(error), error
        return False


RUNTIME_ENV = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}


@pytest.mark.release
def test_a_bad_configuration_fails_with_its_reason(client, tmp_path):
    """One line in the logs, the code in the status; ray's own exit code is 1 for
    every failure.
    """
    words = [
        *(RAY, "job", "submit", "--address", client.url, "--working-dir", str(ROOT)),
        *("--submission-id", "uno-bad"),
        *("--runtime-env-json", json.dumps(RUNTIME_ENV)),
        *("--", sys.executable, "-m", "pipelines", "discover", *LONG),
        *("--workers", "2", "--output", str(tmp_path / "run"), "--batch-size", "33"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    logs = client.get_job_logs("uno-bad")
    last = logs.splitlines()[-1]
    assert last.startswith("uno: error: ") and last in done.stdout
    assert "Traceback" not in logs
    assert client.get_job_status("uno-bad") == "FAILED"
    assert "exit code 2" in client.get_job_info("uno-bad").message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_stopped_job_is_resumed_by_the_same_submission(two, client, tmp_path):
    """`ray job stop` after some checkpoints, then to the end: equal weights. Jobs whose
    driver is killed are among the commands that ``tests.chaos`` kills.
    """
    storage = Storage(str(tmp_path / "run"))
    options = [*LONG, "--workers", "2", "--output", storage.root]
    words = [sys.executable, "-m", "pipelines", "discover", *options]

    def submit() -> str:
        env = {**RUNTIME_ENV, "working_dir": str(ROOT)}
        return client.submit_job(entrypoint=" ".join(words), runtime_env=env)

    def end(job: str) -> tuple[str, list[str]]:
        wait_for(lambda: has_ended(client, job))
        return client.get_job_status(job), client.get_job_logs(job).splitlines()

    job = submit()
    wait_for(lambda: newest_step(storage) >= 2 * INTERVAL or has_ended(client, job))
    client.stop_job(job)
    status, logs = end(job)
    assert status == "STOPPED" and "resume with the same command" in logs[-1]
    assert newest_step(storage) < 240 and not storage.exists(lock.LOCK_FILE)

    status, logs = end(submit())
    assert status == "SUCCEEDED" and not storage.exists("ray"), logs
    assert any(f"results in {storage.root}" in line for line in logs)
    assert [line for line in logs if "WARNING" in line or "Traceback" in line] == []
    assert_as_undisturbed(tmp_path / "run", two)


def has_ended(client, job: str) -> bool:
    return client.get_job_status(job).is_terminal()
