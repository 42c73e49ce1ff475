"""cluster.yaml and its relatives, as Ray would read them, without a cloud."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress

import pytest
import yaml

from tests.pipelines.small import RAY, ROOT, SMALL, free_port, wait_for
from tests.processes import below, running

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("name", ["cluster.yaml", "deploy/cluster-p5.yaml"])
def test_the_cluster_files_fit_rays_schema(name):
    """As ``ray up`` would read them; Ray's own check does not compare the worker
    counts.
    """
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((ROOT / name).read_text())
    validate_config(config)
    prepared = prepare_config(config)
    validate_config(prepared)
    types = prepared["available_node_types"]
    head = types[prepared["head_node_type"]]
    assert head["resources"] == {"CPU": 0} and head.get("max_workers", 0) == 0
    assert all(kind["min_workers"] <= kind["max_workers"] for kind in types.values())
    assert (
        sum(kind["max_workers"] for kind in types.values())
        >= prepared["max_workers"]
        > 0
    )
    assert prepared["setup_commands"] == []  # not Ray's, which install a nightly build
    assert any(
        "--dashboard-host=127.0.0.1" in command
        for command in prepared["head_start_ray_commands"]
    )


def test_a_log_that_grows_changes_no_package(tmp_path):
    """Kills: a .rayignore that Ray does not read, or that leaves code out."""
    from ray._private.runtime_env.packaging import get_uri_for_directory

    shutil.copy(ROOT / ".rayignore", tmp_path)
    code, found = tmp_path / "code.py", []
    code.write_text("")
    for size, growing in enumerate(
        ("train.log", "nohup.out", "runs2/a/metrics.jsonl", "packed/0.parquet")
    ):
        (tmp_path / growing).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / growing).write_text("x" * size)
        found.append(get_uri_for_directory(str(tmp_path), include_gitignore=True))
    code.write_text("pass")
    assert (
        len({*found}) == 1
        and get_uri_for_directory(str(tmp_path), include_gitignore=True) not in found
    )


@pytest.mark.release
@pytest.mark.timeout(300)
def test_the_fake_cluster_grows_for_a_job(tmp_path):
    """The head has no CPU: the command waits, the autoscaler starts nodes, two
    workers train.
    """
    address = f"127.0.0.1:{free_port()}"
    text = (ROOT / "deploy/cluster-fake.yaml").read_text()
    assert "gcs_address: 127.0.0.1:6399" in text
    (tmp_path / "cluster.yaml").write_text(text.replace("127.0.0.1:6399", address))
    own = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": f"/tmp/uno-{os.getpid()}",
    }
    env = os.environ | own
    head = subprocess.Popen(
        [
            RAY,
            "start",
            "--head",
            "--num-cpus=0",
            "--node-ip-address=127.0.0.1",
            "--include-dashboard=false",
            "--block",
            f"--port={address.rpartition(':')[2]}",
            f"--autoscaling-config={tmp_path / 'cluster.yaml'}",
        ],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(
            lambda: (
                not socket.socket().connect_ex(
                    ("127.0.0.1", int(address.rpartition(":")[2]))
                )
            ),
            60,
        )
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pipelines",
                "pretrain",
                *SMALL,
                "--workers",
                "2",
                "--max-steps",
                "3",
                "--output",
                str(tmp_path / "run"),
            ],
            env={**env, "RAY_ADDRESS": address},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert "for nodes: 2 workers with" in done.stdout
        assert f"finished: {tmp_path / 'run'}" in done.stdout
    finally:
        end_processes_of([head], address)
        shutil.rmtree(env["RAY_TMPDIR"], ignore_errors=True)


def end_processes_of(started: list[subprocess.Popen], address: str) -> None:
    """Every Ray process of the cluster at that address, whose nodes are ``started``,
    and of no other one; an orphaned agent would hold its port for minutes, and the next
    cluster here would take no jobs.
    """
    port = address.rpartition(":")[2]
    marks = {
        f"--gcs-address={address}",
        f"--gcs_server_port={port}",
        f"--gcs_address={address}",
    }
    found = running()
    ours = {
        pid
        for pid, process in found.items()
        if marks & set(process.words) and pid != os.getpid()
    }
    for pid in below(ours | {process.pid for process in started}, found):
        with suppress(OSError):
            os.kill(pid, 9)
    for process in started:
        process.wait(30)
