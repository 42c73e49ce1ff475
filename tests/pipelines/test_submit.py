"""``ray job submit`` against a running head: logs, exit codes, stop, kill, and the
same submission again.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.pipelines.small import (
    INTERVAL,
    LONG,
    RAY,
    ROOT,
    assert_as_undisturbed,
    wait_for,
)
from tests.processes import running
from uno.data.files import Storage
from uno.runs import lock
from uno.runs.checkpoint import checkpoint_steps

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
    words = [RAY, "job", "submit", "--address", client.url, "--working-dir", str(ROOT)]
    words += [
        "--submission-id",
        "uno-bad",
        "--runtime-env-json",
        json.dumps(RUNTIME_ENV),
        "--",
    ]
    words += [
        sys.executable,
        "-m",
        "pipelines",
        "discover",
        *LONG,
        "--batch-size",
        "33",
        "--workers",
        "2",
    ]
    words += ["--output", str(tmp_path / "run")]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 1
    logs = client.get_job_logs("uno-bad")
    assert logs.splitlines()[-1].startswith("uno: error: ") and "Traceback" not in logs
    assert logs.splitlines()[-1] in done.stdout
    assert client.get_job_status("uno-bad") == "FAILED"
    assert "exit code 2" in client.get_job_info("uno-bad").message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_killed_and_a_stopped_job_are_resumed_by_the_same_submission(
    two, client, tmp_path
):
    """kill -9 of the driver while its workers go on, then `ray job stop`, then to
    the end: equal weights.
    """
    storage = Storage(str(tmp_path / "run"))
    words = [
        sys.executable,
        "-m",
        "pipelines",
        "discover",
        *LONG,
        "--workers",
        "2",
        "--output",
        storage.root,
    ]
    env = {**RUNTIME_ENV, "working_dir": str(ROOT)}

    def submit() -> str:
        return client.submit_job(entrypoint=" ".join(words), runtime_env=env)

    def ended(job: str) -> tuple[str, list[str]]:
        wait_for(lambda: has_ended(client, job))
        return client.get_job_status(job), client.get_job_logs(job).splitlines()

    first = submit()
    wait_for(
        lambda: bool(checkpoint_steps(storage, "discover")) or has_ended(client, first)
    )
    for pid in processes_with(*words[1:]):
        os.kill(pid, signal.SIGKILL)
    assert ended(first)[0] == "FAILED"
    killed_at = checkpoint_steps(storage, "discover")[-1]
    assert killed_at < 240
    bookkeeping = [
        path for path in (tmp_path / "run" / "ray").rglob("*") if path.is_file()
    ]
    assert bookkeeping
    # Ray Train's snapshot of the killed run is of no use and of no harm
    for path in bookkeeping:
        path.write_bytes(b"")

    stopped, goal = submit(), killed_at + 2 * INTERVAL
    wait_for(
        lambda: (
            checkpoint_steps(storage, "discover")[-1] >= goal
            or has_ended(client, stopped)
        )
    )
    client.stop_job(stopped)
    status, logs = ended(stopped)
    assert status == "STOPPED" and "resume with the same command" in logs[-1]
    assert checkpoint_steps(storage, "discover")[-1] < 240 and not storage.exists(
        lock.LOCK_FILE
    )

    status, logs = ended(submit())
    assert status == "SUCCEEDED", logs
    assert any(
        f"results in {storage.root}" in line for line in logs
    ) and not storage.exists("ray")
    assert [line for line in logs if "WARNING" in line or "Traceback" in line] == []
    assert_as_undisturbed(tmp_path / "run", two)


def processes_with(*words: str) -> list[int]:
    """Return the processes whose command line ends with these words."""
    return [
        pid
        for pid, process in running().items()
        if process.words[-len(words) - 1 : -1] == list(words)
    ]


def has_ended(client, job: str) -> bool:
    return client.get_job_status(job).is_terminal()
