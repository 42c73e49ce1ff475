"""The driver's decisions about a group of workers, with the group replaced by a function."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from pipelines import ray_env, worker
from uno.config import Config, override
from uno.data.files import Storage
from uno.errors import ConfigError, Interrupted, NumericsError, StorageError
from uno.runs import run
from uno.runs.checkpoint import Checkpoint, save_checkpoint
from uno.runs.lock import claim

RAY = SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0})


@pytest.fixture
def group(tmp_path, monkeypatch):
    """``group(*outcomes)`` runs workers that end in these ways, and counts them; an exception is raised."""
    started = []

    def run_group(*outcomes):
        pending = list(outcomes)

        def fit(loop, *_):
            started.append(loop["token"])
            outcome = pending.pop(0)
            if callable(outcome):
                outcome = outcome(Storage(loop["output"]))
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(worker, "_fit_in_thread", fit)
        config = override(Config(), {"compute.workers": 2})
        with claim(Storage(str(tmp_path)), on_wait=pytest.fail) as mine:
            job = worker.Job(config, None, (), True, mine)
            return worker.run_workers(RAY, job, {}, None, lambda: None)

    run_group.started = started
    return run_group


DEATH = RuntimeError("the actor died unexpectedly")


def test_a_dead_group_is_replaced_with_a_new_token_but_three_in_a_row_are_the_end(group):
    assert group(DEATH, DEATH, {"metrics": {"acc": 1.0}}) == {"acc": 1.0}
    assert len(set(group.started)) == 3
    with pytest.raises(RuntimeError, match="died unexpectedly"):
        group(DEATH, DEATH, DEATH, {"metrics": {}})
    assert len(group.started) == 6


def test_a_new_checkpoint_starts_the_count_anew(group):
    """Spot nodes may go away any number of times in a long run."""

    def death_after(step):
        def end(storage):
            save_checkpoint(storage, run.DISCOVER, Checkpoint(step, {"w": torch.zeros(1)}, {}), "")
            return DEATH

        return end

    outcomes = [end for step in range(1, 5) for end in (death_after(step), DEATH)]
    assert group(*outcomes, {"metrics": {}}) == {}
    assert len(group.started) == 9


@pytest.mark.parametrize("error", [ConfigError("x"), NumericsError("x"), StorageError("x")])
def test_what_the_user_must_act_on_is_not_tried_again(group, error):
    wrapped = RuntimeError("worker group failed")
    wrapped.worker_failures = {0: RuntimeError("Connection closed by peer"), 1: error}
    with pytest.raises(type(error)):
        group(wrapped)
    assert len(group.started) == 1


def test_a_stop_is_handed_on(group):
    with pytest.raises(Interrupted, match="at step 4"):
        group({"interrupted": "stopped at step 4"})


def test_the_cause_is_not_the_lost_peer():
    group = RuntimeError("group")
    group.worker_failures = {0: RuntimeError("Connection closed by peer"), 1: KeyError("real")}
    assert isinstance(worker.cause_of(group), KeyError)
    group.worker_failures = {0: RuntimeError("Connection closed by peer")}
    assert worker.cause_of(group) is group
    group.controller_failure = TimeoutError("no nodes")
    group.worker_failures = {}
    assert isinstance(worker.cause_of(group), TimeoutError)


@pytest.mark.parametrize(
    ("overrides", "cluster", "expected"),
    [
        ({"compute.workers": 2}, {"CPU": 2}, {"CPU": 0.5}),
        ({"compute.workers": 2}, {"CPU": 64}, {"CPU": 1.0}),
        ({"compute.workers": 3, "compute.cpus_per_worker": 1}, {"CPU": 4}, {"CPU": 1}),
        ({"compute.workers": 2}, {"CPU": 8, "GPU": 4}, {"CPU": 1.0, "GPU": 1.0}),
        ({"compute.workers": 2, "compute.device": "cpu"}, {"CPU": 8, "GPU": 4}, {"CPU": 1.0}),
        ({"compute.workers": 8, "compute.gpus_per_worker": 0.5}, {"CPU": 9, "GPU": 4}, {"CPU": 1, "GPU": .5}),
    ],
)  # fmt: skip
def test_resources_leave_a_cpu_to_ray_data(overrides, cluster, expected):
    found = ray_env.worker_resources(override(Config(), overrides), cluster)
    assert found == expected
    assert found["CPU"] * overrides["compute.workers"] + 1 <= cluster["CPU"]


@pytest.mark.parametrize(("overrides", "cluster", "says"), [
    ({"compute.workers": 4, "compute.cpus_per_worker": 1}, {"CPU": 4}, "4 workers of 1 CPUs and one CPU"),
    ({"compute.workers": 2}, {"CPU": 1}, "need more than the cluster's 1"),
    ({"compute.workers": 1}, {}, "need more than the cluster's 0"),
    ({"compute.workers": 4}, {"CPU": 8, "GPU": 2}, "4 workers need 4 GPUs, the cluster has 2"),
    ({"compute.workers": 1, "compute.device": "cuda"}, {"CPU": 8}, "need 1 GPUs, the cluster has 0"),
])  # fmt: skip
def test_too_many_workers_are_one_line(overrides, cluster, says):
    with pytest.raises(ConfigError, match=says):
        ray_env.worker_resources(override(Config(), overrides), cluster)


def test_a_cluster_that_was_there_before_may_grow(monkeypatch, capsys):
    """Kills: a job refused because nodes for it start on demand; a request that outlives its reason."""
    sizes, asked = iter([{}, {"CPU": 1.0}, {"CPU": 3.0, "GPU": 2.0}]), []
    monkeypatch.setattr(worker.ray_env, "POLL_S", 0)
    monkeypatch.setattr(worker, "_ask_autoscaler", asked.append)
    ray = SimpleNamespace(cluster_resources=lambda: next(sizes))
    config = override(Config(), {"compute.workers": 2, "compute.device": "cuda"})
    with pytest.raises(ConfigError, match="one CPU for Ray Data"):
        worker.await_resources(SimpleNamespace(cluster_resources=dict), config, lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    worker.await_resources(ray, config, lambda: False)
    assert asked == [[{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 1.0}], []]
    assert "waiting up to 10 minutes for the cluster to grow" in capsys.readouterr().out
    with pytest.raises(Interrupted):
        worker.await_resources(SimpleNamespace(cluster_resources=dict), config, lambda: True)
    monkeypatch.setattr(worker, "GROWTH_S", 0)
    with pytest.raises(ConfigError):
        worker.await_resources(SimpleNamespace(cluster_resources=dict), config, lambda: False)


@pytest.mark.parametrize(("mode", "says"), [
    (None, "a cluster with tokens wants RAY_AUTH_MODE=token and its token .* is unset"),
    ("disabled", "is disabled"),
    ("token", "is the token here .* the cluster's"),
])  # fmt: skip
def test_a_cluster_that_refuses_is_told_of_tokens(monkeypatch, mode, says):
    """Ray says "Failed to connect". Kills: a line without tokens, a mode that is set on another's cluster."""

    class AuthenticationError(Exception):
        """Of token mode without a token."""

    def refuse(**_):
        assert os.environ.get("RAY_AUTH_MODE") == mode
        raise AuthenticationError("no token was found") if mode else ConnectionError("Failed to connect")

    exceptions = SimpleNamespace(AuthenticationError=AuthenticationError)
    ray = SimpleNamespace(is_initialized=lambda: False, init=refuse, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(
        os, "environ", {"RAY_ADDRESS": "10.0.0.1:6379"} | ({"RAY_AUTH_MODE": mode} if mode else {})
    )
    monkeypatch.setattr(ray_env, "check_address", lambda address: None)
    with pytest.raises(ConfigError, match=says), ray_env.connect():
        pytest.fail("connected")


def test_a_machine_too_busy_for_ray_is_one_line(monkeypatch):
    """Ray raises a plain Exception. Kills: "internal", a node that is left half started, a defect hidden."""

    def fail(**_):
        raise Exception(problems.pop())

    problems, ended = ["a defect", "The current node timed out during startup. This could happen as"], []
    exceptions = SimpleNamespace(AuthenticationError=ArithmeticError)
    ray = SimpleNamespace(is_initialized=lambda: False, init=fail, exceptions=exceptions)
    ray.shutdown = lambda: ended.append(1)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ConfigError, match="too busy"), ray_env.connect():
        pytest.fail("connected")
    assert ended == [1]
    with pytest.raises(Exception, match="a defect"), ray_env.connect():
        pytest.fail("connected")


def test_a_private_cluster_uses_no_token(monkeypatch):
    started = []
    ray = SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None, exceptions=None)
    ray.init = lambda **options: started.append((options["address"], os.environ["RAY_AUTH_MODE"]))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", {})
    with ray_env.connect():
        pass
    assert started == [("local", "disabled")]
