"""The driver's decisions about a group of workers, with the group replaced by a
function.
"""

import os
import socket
import sys
import threading
from unittest.mock import Mock

import pytest
import torch

from pipelines import ray_env, train, workarounds
from pipelines.backend import RayBackend
from pipelines.predict import threads_of_actor
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
    left, shown, stopped, ended = [], [], [], threading.Event()

    def received():
        return [left.pop(0)] if left and isinstance(left[0], tuple) else []

    def fit(config, resources, loop):
        wait_for(lambda: not left or not isinstance(left[0], tuple), pause=0.01)
        if not left:
            ended.wait(60)
            raise Interrupted("the controller of Ray Train was lost")
        return left[0]

    messages = Mock(received=received)
    monkeypatch.setattr(train, "Messages", lambda ray: messages)
    monkeypatch.setattr(train, "fit", fit)
    monkeypatch.setattr(workarounds, "end_controllers", ended.set)
    monkeypatch.setattr(ray_env, "POLL_S", 0.01)

    def run_driver(*given, stop=False):
        left[:] = given
        stopped[:] = [1] * stop
        config = override(Config(), {"compute.num_workers": 2})
        with lock_run(Storage(str(tmp_path)), on_wait=pytest.fail) as mine:
            run = Run(config, mine.storage, RayBackend(), lock=mine)
            return train.run_workers(
                run, config, {"CPU": 1.0}, {}, shown.append, lambda: bool(stopped)
            )

    run_driver.send_token, run_driver.shown = messages.send_token, shown
    run_driver.ended = ended
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
    sent = [call.args for call in driver.send_token.call_args_list]
    groups, tokens = zip(*sent, strict=True)
    assert groups == ("a", "b", "c") and len(set(tokens)) == 3
    assert "workers died (a node was lost); new ones resume" in caplog.text
    assert "being drained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"interrupted": "stopped at step 4"}, "at step 4"),
        (("lost", "a node was lost"), "while waiting for nodes"),
    ],
)
def test_a_stop_is_handed_on(driver, answer, says):
    """Kills: a thread that still waits for Ray when the connection is closed."""
    with pytest.raises(Interrupted, match=says):
        driver(("begun", "a"), answer, stop=True)
    assert driver.ended.is_set() == isinstance(answer, tuple)


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


class AuthenticationError(Exception):
    """Ray's error in token mode without a token."""


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray that is not connected, without an address or a token."""
    ray = Mock(is_initialized=lambda: False)
    ray.exceptions.AuthenticationError = AuthenticationError
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", {})
    return ray


@pytest.mark.parametrize(
    ("mode", "error", "says"),
    [
        (
            {},
            ConnectionError("Failed to connect"),
            "a cluster with tokens needs RAY_AUTH_MODE=token and its token .* is unset",
        ),
        (
            {"RAY_AUTH_MODE": "disabled"},
            AuthenticationError("no token was found"),
            "is disabled",
        ),
        (
            {"RAY_AUTH_MODE": "token"},
            AuthenticationError("no token was found"),
            "check that ~/.ray/auth_token holds the token of the cluster",
        ),
    ],
)
def test_a_cluster_that_refuses_is_told_of_tokens(ray, monkeypatch, mode, error, says):
    """Ray says "Failed to connect". Kills: a line without tokens, a mode that is set
    on another's cluster.
    """

    def refuse(**_):
        assert os.environ.items() >= mode.items()
        assert len(mode) == ("RAY_AUTH_MODE" in os.environ)
        raise error

    ray.init = refuse
    os.environ.update(mode, RAY_ADDRESS="10.0.0.1:6379")
    monkeypatch.setattr(ray_env, "check_address", lambda address: None)
    with pytest.raises(ConfigError, match=says), ray_env.connect():
        pytest.fail("connected")


JOINED = {"RAY_ADDRESS": "10.0.0.1:6379"}
BUSY = Exception("The current node timed out during startup. This")


@pytest.mark.parametrize(
    ("environ", "problem", "error", "says"),
    [
        (JOINED, RuntimeError("Version mismatch: 3.11.9"), ConfigError, "mismatch"),
        (JOINED, ValueError("Invalid address format"), ConfigError, "Invalid address"),
        ({}, BUSY, ConfigError, "too busy"),
        ({}, Exception("a defect"), Exception, "a defect"),
    ],
)
def test_a_cluster_that_does_not_start_is_one_line(
    ray, monkeypatch, environ, problem, error, says
):
    """On a busy machine Ray raises a plain Exception. Kills: "internal", a node that
    is left half started, a defect hidden.
    """
    os.environ.update(environ)
    monkeypatch.setattr(ray_env, "check_address", lambda address: None)
    ray.init.side_effect = problem
    with pytest.raises(error, match=says), ray_env.connect():
        pytest.fail("connected")
    assert ray.shutdown.called == (error is ConfigError)


@pytest.mark.parametrize("given", [None, "local", "10.0.0.1:6379"])
def test_a_head_that_ray_start_has_started_is_found(monkeypatch, tmp_path, given):
    """As Ray's own commands find it. Kills: a second cluster beside it, one that is
    gone, a private one that nobody can ask for any more.
    """
    environ = {"RAY_TMPDIR": str(tmp_path)} | ({"RAY_ADDRESS": given} if given else {})
    monkeypatch.setattr(os, "environ", environ)
    given_or_none = None if given == "local" else given
    assert ray_env.cluster_address() == given_or_none
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert ray_env.cluster_address() == (given_or_none if given else address)
    assert ray_env.cluster_address() == given_or_none


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


@pytest.mark.parametrize(
    ("node", "each", "given", "threads"),
    [
        ({"CPU": 48.0}, {"CPU": 1.0}, None, 12),
        ({"CPU": 48.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}, None, 24),
        ({"CPU": 48.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}, 3, 3),
        ({"CPU": 2.0}, {"CPU": 2.0}, None, 48),
    ],
)
def test_threads_of_a_model_are_a_share_of_the_cores_of_its_node(
    ray, monkeypatch, node, each, given, threads
):
    """In an actor of Ray Data. The driver, on which another number of cores may be,
    decides nothing.
    """
    ray.get_runtime_context().get_node_id.return_value = "here"
    ray.nodes.return_value = [
        {"NodeID": "other", "Resources": {"CPU": 1.0}},
        {"NodeID": "here", "Resources": node},
    ]
    monkeypatch.setattr("uno.runs.hardware.available_cpus", lambda: 48)
    settings = {"compute.num_workers": 4, "compute.threads": given}
    assert threads_of_actor(override(Config(), settings), each) == threads
