"""cluster.yaml and its relatives, as Ray would read them, without a cloud."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.pipelines.small import RAY, ROOT, SMALL, wait_for

pytestmark = pytest.mark.ray


def test_the_cluster_file_fits_rays_schema():
    """As ``ray up`` would read it, without a cloud; Ray's own check does not compare the worker counts."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    validate_config(config)
    prepared = prepare_config(config)
    validate_config(prepared)
    types = prepared["available_node_types"]
    head = types[prepared["head_node_type"]]
    assert head["resources"] == {"CPU": 0} and head.get("max_workers", 0) == 0
    assert all(kind["min_workers"] <= kind["max_workers"] for kind in types.values())
    assert sum(kind["max_workers"] for kind in types.values()) >= prepared["max_workers"] > 0
    markets = [kind["node_config"].get("InstanceMarketOptions", {}) for kind in types.values()]
    assert any(market.get("MarketType") == "spot" for market in markets)
    commands = [*prepared["setup_commands"], *prepared["head_start_ray_commands"]]
    assert not any("nightly" in command or "dev0" in command for command in commands)
    assert any("--dashboard-host=127.0.0.1" in command for command in commands)


def test_the_kubernetes_manifest_has_the_keys_of_its_api():
    """KubeRay's ray.io/v1 types and the names that its objects must share; no Kubernetes is needed."""
    import ray

    claim, job = yaml.safe_load_all((ROOT / "rayjob.yaml").read_text())
    assert (claim["kind"], job["apiVersion"], job["kind"]) == ("PersistentVolumeClaim", "ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    fields = "entrypoint runtimeEnvYAML shutdownAfterJobFinishes ttlSecondsAfterFinished backoffLimit"
    assert spec.keys() <= {*fields.split(), "rayClusterSpec"}
    assert "--output /" in spec["entrypoint"] and "--device cuda" in spec["entrypoint"]
    assert int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 30
    fields = "rayVersion enableInTreeAutoscaling autoscalerOptions authOptions headGroupSpec workerGroupSpecs"
    assert cluster.keys() <= {*fields.split()}
    assert cluster["enableInTreeAutoscaling"] and cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"runs": "/runs", "shm": "/dev/shm"} and mounts.keys() == volumes.keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_fake_cluster_grows_for_a_job(tmp_path):
    """The head has no CPU: the command waits, the autoscaler starts nodes, two workers train."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    text = (ROOT / "cluster-fake.yaml").read_text()
    assert "gcs_address: 127.0.0.1:6399" in text
    (tmp_path / "cluster.yaml").write_text(text.replace("127.0.0.1:6399", address))
    own = {"RAY_FAKE_CLUSTER": "1", "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": f"/tmp/uno-{os.getpid()}"}
    env = os.environ | own
    head = subprocess.Popen(
        [RAY, "start", "--head", "--num-cpus=0", "--node-ip-address=127.0.0.1", "--dashboard-port=0",
         "--block", f"--port={address.rpartition(':')[2]}",
         f"--autoscaling-config={tmp_path / 'cluster.yaml'}"],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))), 60)
        done = subprocess.run(
            [sys.executable, "-m", "pipelines.pretrain", *SMALL, "--workers", "2", "--max-steps", "3",
             "--output", str(tmp_path / "run")],
            env={**env, "RAY_ADDRESS": address}, cwd=ROOT, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "waiting up to 10 minutes for the cluster to grow" in done.stdout
        assert f"finished: {tmp_path / 'run'}" in done.stdout
    finally:
        end_processes_of([head], address)
        shutil.rmtree(env["RAY_TMPDIR"], ignore_errors=True)


def end_processes_of(started: list[subprocess.Popen], address: str) -> None:
    """Every Ray process of the cluster at that address, whose nodes are ``started``, and of no other one; an
    orphaned agent would hold its port for minutes, and the next cluster here would take no jobs.
    """
    port = address.rpartition(":")[2]
    marks = (f"--gcs-address={address}", f"--gcs_server_port={port}", f"--gcs_address={address}")
    words, parents = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    ours = {pid for pid, own in words.items() if any(word in marks for word in own)}
    ours |= {process.pid for process in started}
    while more := {pid for pid, parent in parents.items() if parent in ours and pid not in ours}:
        ours |= more
    for pid in ours:
        with suppress(OSError):
            os.kill(pid, 9)
    for process in started:
        process.wait(30)
