"""The driver's decisions about a group of workers, with the group replaced by a
function.
"""

import os
import socket
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from pipelines import ray_env, train
from pipelines.backend import RayBackend
from tests.pipelines.small import wait_for
from uno.config import Config, override
from uno.data.files import Storage
from uno.errors import ConfigError, Interrupted
from uno.runs.lock import lock_run
from uno.session.run import Run


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """``driver(*messages)`` trains with a group that sends these messages; its last one
    is the result.
    """

    class Script:
        def __init__(self, ray):
            self.to_driver = None

        def received(self):
            return [left.pop(0)] if left and isinstance(left[0], tuple) else []

        def send_token(self, group, token):
            tokens.append((group, token))

    def fit(config, resources, loop):
        wait_for(lambda: not left or not isinstance(left[0], tuple), pause=0.01)
        if not left:
            time.sleep(60)
        return left[0]

    left, tokens, shown, stopped = [], [], [], []
    monkeypatch.setattr(train, "Messages", Script)
    monkeypatch.setattr(train, "fit", fit)
    monkeypatch.setattr(ray_env, "POLL_S", 0.01)

    def run_driver(*messages, stop=False):
        left[:] = messages
        stopped[:] = [1] * stop
        config = override(Config(), {"compute.num_workers": 2})
        with lock_run(Storage(str(tmp_path)), on_wait=pytest.fail) as mine:
            run = Run(config, mine.storage, RayBackend(), lock=mine)
            return train.run_workers(
                run, config, {"CPU": 1.0}, {}, shown.append, lambda: bool(stopped)
            )

    run_driver.tokens, run_driver.shown = tokens, shown
    return run_driver


def test_each_group_gets_a_token_of_its_own_and_its_metrics_are_shown(
    driver, caplog, capsys
):
    found = driver(
        ("begun", "a"),
        ("metrics", {"step": 1}),
        ("lost", "a node was lost"),
        ("begun", "b"),
        ("drained", ""),
        ("begun", "c"),
        ("metrics", {"step": 2}),
        {"metrics": {"acc": 1.0}},
    )
    assert found == {"acc": 1.0} and driver.shown == [{"step": 1}, {"step": 2}]
    groups, tokens = zip(*driver.tokens, strict=True)
    assert groups == ("a", "b", "c") and len(set(tokens)) == 3
    assert "workers died (a node was lost); new ones resume" in caplog.text
    assert "being drained" in capsys.readouterr().out


def test_a_stop_is_handed_on(driver):
    with pytest.raises(Interrupted, match="at step 4"):
        driver(("begun", "a"), {"interrupted": "stopped at step 4"}, stop=True)


def test_a_stop_ends_a_wait_for_nodes(driver):
    with pytest.raises(Interrupted, match="while waiting for nodes"):
        driver(("begun", "a"), ("lost", "a node was lost"), stop=True)


@pytest.mark.parametrize(
    ("overrides", "cluster", "expected"),
    [
        ({"compute.num_workers": 2}, {"CPU": 2}, {"CPU": 0.5}),
        ({"compute.num_workers": 2}, {"CPU": 64}, {"CPU": 1.0}),
        (
            {"compute.num_workers": 3, "compute.cpus_per_worker": 1},
            {"CPU": 4},
            {"CPU": 1},
        ),
        ({"compute.num_workers": 2}, {"CPU": 8, "GPU": 4}, {"CPU": 1.0, "GPU": 1.0}),
        (
            {"compute.num_workers": 2, "compute.device": "cpu"},
            {"CPU": 8, "GPU": 4},
            {"CPU": 1.0},
        ),
        (
            {"compute.num_workers": 8, "compute.gpus_per_worker": 0.5},
            {"CPU": 9, "GPU": 4},
            {"CPU": 1, "GPU": 0.5},
        ),
    ],
)
def test_resources_leave_a_cpu_to_ray_data(overrides, cluster, expected):
    found = ray_env.worker_resources(override(Config(), overrides), cluster)
    assert found == expected
    assert found["CPU"] * overrides["compute.num_workers"] + 1 <= cluster["CPU"]


@pytest.mark.parametrize(
    ("overrides", "cluster", "says"),
    [
        (
            {"compute.num_workers": 4, "compute.cpus_per_worker": 1},
            {"CPU": 4},
            "4 workers of 1 CPUs and one CPU",
        ),
        ({"compute.num_workers": 2}, {"CPU": 1}, "need more than the cluster's 1"),
        ({"compute.num_workers": 1}, {}, "need more than the cluster's 0"),
        (
            {"compute.num_workers": 4},
            {"CPU": 8, "GPU": 2},
            "4 workers need 4 GPUs, the cluster has 2",
        ),
        (
            {"compute.num_workers": 1, "compute.device": "cuda"},
            {"CPU": 8},
            "need 1 GPUs, the cluster has 0",
        ),
    ],
)
def test_too_many_workers_are_one_line(overrides, cluster, says):
    with pytest.raises(ConfigError, match=says):
        ray_env.worker_resources(override(Config(), overrides), cluster)


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (
            None,
            "a cluster with tokens needs RAY_AUTH_MODE=token and its token .* is unset",
        ),
        ("disabled", "is disabled"),
        ("token", "check that ~/.ray/auth_token holds the token of the cluster"),
    ],
)
def test_a_cluster_that_refuses_is_told_of_tokens(monkeypatch, mode, says):
    """Ray says "Failed to connect". Kills: a line without tokens, a mode that is set
    on another's cluster.
    """

    class AuthenticationError(Exception):
        """Of token mode without a token."""

    def refuse(**_):
        assert os.environ.get("RAY_AUTH_MODE") == mode
        raise (
            AuthenticationError("no token was found")
            if mode
            else ConnectionError("Failed to connect")
        )

    exceptions = SimpleNamespace(AuthenticationError=AuthenticationError)
    ray = SimpleNamespace(
        is_initialized=lambda: False, init=refuse, exceptions=exceptions
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(
        os,
        "environ",
        {"RAY_ADDRESS": "10.0.0.1:6379"} | ({"RAY_AUTH_MODE": mode} if mode else {}),
    )
    monkeypatch.setattr(ray_env, "check_address", lambda address: None)
    with pytest.raises(ConfigError, match=says), ray_env.connect():
        pytest.fail("connected")


def test_a_machine_too_busy_for_ray_is_one_line(monkeypatch):
    """Ray raises a plain Exception. Kills: "internal", a node that is left half
    started, a defect hidden.
    """

    def fail(**_):
        raise Exception(problems.pop())

    problems, ended = (
        ["a defect", "The current node timed out during startup. This could happen as"],
        [],
    )
    exceptions = SimpleNamespace(AuthenticationError=ArithmeticError)
    ray = SimpleNamespace(
        is_initialized=lambda: False, init=fail, exceptions=exceptions
    )
    ray.shutdown = lambda: ended.append(1)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ConfigError, match="too busy"), ray_env.connect():
        pytest.fail("connected")
    assert ended == [1]
    with pytest.raises(Exception, match="a defect"), ray_env.connect():
        pytest.fail("connected")


def test_a_head_that_ray_start_has_started_is_found(monkeypatch, tmp_path):
    """As Ray's own commands find it. Kills: a second cluster beside it, one that is
    gone, a private one that nobody can ask for any more.
    """
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        for given, expected in (
            ("", address),
            ("local", None),
            ("10.0.0.1:6379", "10.0.0.1:6379"),
        ):
            monkeypatch.setattr(
                os, "environ", {"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": given}
            )
            assert ray_env.cluster_address() == expected
    monkeypatch.setattr(os, "environ", {"RAY_TMPDIR": str(tmp_path)})
    assert ray_env.cluster_address() is None
    monkeypatch.setattr(os, "environ", {"RAY_TMPDIR": str(tmp_path / "none")})
    assert ray_env.cluster_address() is None


@pytest.mark.parametrize(
    ("device", "loading", "threads", "expected"),
    [
        ("cuda", "streaming", None, 1),
        ("cuda", "memory", None, 4),
        ("cpu", "streaming", None, 4),
        ("cuda", "streaming", 3, 3),
    ],
)
def test_threads_of_a_rank_leave_cores_to_ray_data(
    monkeypatch, device, loading, threads, expected
):
    """Kills: eight ranks with all cores beside tasks that decode; a rank on the CPU
    with one thread.
    """
    monkeypatch.setattr("uno.runs.hardware.available_cpus", lambda: 8)
    config = override(Config(), {"data.loading": loading, "compute.threads": threads})
    assert train.rank_threads(config, torch.device(device), 2) == expected
