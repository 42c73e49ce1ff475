"""The driver's decisions about a group of workers, with the group replaced by a
function.
"""

import json
import mmap
import os
import socket
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipelines import nodes, ray_env, worker
from pipelines.backend import RayBackend
from tests.uno.small_run import small_config
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.row_blocks import RowBlocks
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError, Interrupted, NumericsError, StorageError, UnoError
from uno.runs import STOP_FILE, run
from uno.runs.checkpoint import Checkpoint, save_checkpoint
from uno.runs.lock import lock_run
from uno.session.run import Run


@pytest.fixture
def group(tmp_path, monkeypatch):
    """``group(*outcomes)`` runs workers that end in these ways, and counts them; an
    exception is raised.
    """
    started, shares = [], iter([{"CPU": 1.0}, {"CPU": 0.5}, *[{"CPU": 0.25}] * 20])

    def run_group(*outcomes, polls=(), stops=()):
        pending, stopped = list(outcomes), []

        def fit(loop, resources, config, storage, on_poll):
            started.append((loop["token"], loop["worker_cpus"], resources))
            for act in polls:
                act(on_poll, Storage(loop["output"]))
            outcome = pending.pop(0)
            stopped.extend(stops)
            if callable(outcome):
                outcome = outcome(Storage(loop["output"]))
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        def wait_for_resources(config, give_up):
            if give_up():
                raise Interrupted("stopped while waiting for nodes")
            return next(shares)

        monkeypatch.setattr(worker, "_fit_in_thread", fit)
        monkeypatch.setattr(worker.nodes, "wait_for_resources", wait_for_resources)
        config = override(Config(), {"compute.num_workers": 2})
        with lock_run(Storage(str(tmp_path)), on_wait=pytest.fail) as mine:
            run = Run(config, mine.storage, RayBackend(), lock=mine)
            return worker.run_workers(
                run, config, {}, lambda: None, lambda: bool(stopped)
            )

    run_group.started = started
    return run_group


DEATH = RuntimeError("the actor died unexpectedly")


def raised(name, *bases, **attributes):
    """An exception of a class with the name of one of Ray's."""
    error = type(name, bases or (Exception,), {})(f"{name} of Ray\nwith more lines")
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


NO_PLACE = raised(
    "ControllerError", controller_failure=raised("WorkerGroupStartupTimeoutError")
)
DIED = raised("ActorDiedError", type("RayActorError", (Exception,), {}))
LOST = raised(
    "WorkerGroupError", worker_failures={1: raised("WorkerHealthCheckFailedError")}
)
LEFT = raised("PreemptionError")
ANNOUNCED = raised(
    "WorkerGroupError",
    worker_failures={
        0: RuntimeError("Connection closed by peer"),
        1: raised(
            "WorkerHealthCheckFailedError",
            health_check_failure=raised("ActorDiedError", preempted=True),
        ),
    },
)
SLOW = raised(
    "WorkerGroupError",
    worker_failures={
        0: StorageError("cannot write s3://b/x: AWS Error SLOW_DOWN"),
        1: RuntimeError("Connection closed"),
    },
)


def test_a_dead_group_is_replaced_but_three_in_a_row_are_the_end(group):
    """And with the shares of the cluster as it is then. Kills: those of the start,
    which leave no CPU.
    """
    assert group(DEATH, DEATH, {"metrics": {"acc": 1.0}}) == {"acc": 1.0}
    tokens, shares, resources = zip(*group.started, strict=True)
    assert len(set(tokens)) == 3
    assert shares == (1.0, 0.5, 0.25) and resources == tuple(
        {"CPU": share} for share in shares
    )
    with pytest.raises(RuntimeError, match="died unexpectedly"):
        group(DEATH, DEATH, DEATH, {"metrics": {}})
    assert len(group.started) == 6


@pytest.mark.parametrize(
    "end", [NO_PLACE, LEFT, ANNOUNCED], ids=["no place", "left", "announced"]
)
def test_what_is_nobodys_fault_may_happen_any_number_of_times(group, end, caplog):
    """Kills: a start-up timeout or a preemption that counts as a death."""
    assert group(*[end] * 7, {"metrics": {}}) == {}
    assert (
        len(group.started) == 8 and "resume from the newest checkpoint" in caplog.text
    )
    assert group(end, end, DEATH, end, DEATH, {"metrics": {}}) == {}


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        (
            DIED,
            75,
            (
                "keep dying before a new checkpoint .ActorDiedError: ActorDiedError of"
                " Ray.; they may be out of memory"
            ),
        ),
        (LOST, 75, "WorkerHealthCheckFailedError"),
        (SLOW, 4, "SLOW_DOWN"),
    ],
    ids=["died", "lost", "slow"],
)
def test_what_goes_on_without_a_checkpoint_ends_as_one_line_of_ours(
    group, end, code, says
):
    """Kills: "internal" for a lost node."""
    assert group(end, end, {"metrics": {}}) == {}
    with pytest.raises(UnoError, match=says) as caught:
        group(end, end, end)
    assert caught.value.exit_code == code and "\n" not in str(caught.value)
    never = raised(
        "ControllerError",
        controller_failure=raised("InsufficientClusterResourcesError"),
    )
    with pytest.raises(ConfigError, match="can never hold the workers"):
        group(never)


def test_the_names_of_rays_errors_are_rays():
    """Kills: a class that Ray 2.60 calls otherwise, so that its loss would be a
    defect of ours.
    """
    source = "".join(
        Path(find_spec("ray").submodule_search_locations[0], name).read_text()
        for name in (
            "exceptions.py",
            "train/v2/_internal/exceptions.py",
            "train/v2/api/exceptions.py",
        )
    )
    for name in (*nodes.LOST, nodes.NO_PLACE, nodes.LEFT, nodes.NEVER):
        assert f"class {name}(" in source
    assert "self.preempted" in source or "def preempted" in source


def test_a_node_that_leaves_is_left_and_a_user_who_stops_is_obeyed(
    group, monkeypatch, capsys
):
    """Kills: a preemption that ends the command, a STOP file that the next group finds,
    a stop taken for a preemption.
    """
    told, files = [], []

    class Notices:
        def __init__(self, hosts):
            self.given = False

        def new(self):
            self.given = told.pop(0) if told else False
            return self.given

    def poll(on_poll, storage):
        files.append(storage.exists(STOP_FILE))
        on_poll()
        files.append(storage.exists(STOP_FILE))

    monkeypatch.setattr(worker.nodes, "DrainWatcher", Notices)
    told[:] = [True, False]
    assert group({"interrupted": "step 4"}, {"metrics": {}}, polls=[poll]) == {}
    assert (
        files == [False, True, False, False]
        and "being drained" in capsys.readouterr().out
    )
    with pytest.raises(Interrupted, match="step 5"):
        group({"interrupted": "step 5"}, polls=[poll])
    told[:] = [True]
    with pytest.raises(Interrupted, match="step 6"):
        group({"interrupted": "step 6"}, polls=[poll], stops=[1])
    with pytest.raises(Interrupted, match="while waiting"):
        group(LOST, polls=[poll], stops=[1])


def test_a_cluster_that_has_lost_its_gpus_is_no_cluster_without_gpus(
    group, monkeypatch
):
    """Kills: a run that goes on on the head's CPU."""
    group(DEATH, {"metrics": {}})
    devices, found = [], iter([{"CPU": 1.0, "GPU": 1.0}] * 2)

    def wait_for_resources(config, give_up):
        devices.append(config.compute.device)
        return next(found)

    real = worker.run_workers

    def with_gpus(*arguments):
        monkeypatch.setattr(worker.nodes, "wait_for_resources", wait_for_resources)
        return real(*arguments)

    monkeypatch.setattr(worker, "run_workers", with_gpus)
    group(DEATH, {"metrics": {}})
    assert devices == ["auto", "cuda"]


def test_a_new_checkpoint_starts_the_count_anew(group):
    """Spot nodes may go away any number of times in a long run."""

    def death_after(step):
        def end(storage):
            save_checkpoint(
                storage, run.DISCOVER, Checkpoint(step, {"w": torch.zeros(1)}, "")
            )
            return DEATH

        return end

    outcomes = [end for step in range(1, 5) for end in (death_after(step), DEATH)]
    assert group(*outcomes, {"metrics": {}}) == {}
    assert len(group.started) == 9


@pytest.mark.parametrize(
    "error", [ConfigError("x"), NumericsError("x"), StorageError("x")]
)
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
    group.worker_failures = {
        0: RuntimeError("Connection closed by peer"),
        1: KeyError("real"),
    }
    assert isinstance(nodes.cause_of(group), KeyError)
    group.worker_failures = {0: RuntimeError("Connection closed by peer")}
    assert nodes.cause_of(group) is group
    group.controller_failure = TimeoutError("no nodes")
    group.worker_failures = {}
    assert isinstance(nodes.cause_of(group), TimeoutError)


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


@pytest.mark.parametrize(
    "job",
    [{}, {"PYTHONPATH": "/x"}, {"RAY_DATA_LOG_LEVEL": "INFO", "PYTHONWARNINGS": "x"}],
)
def test_variables_that_a_job_has_set_are_not_set_again(monkeypatch, job):
    """Ray refuses that, whatever the values. Kills: "internal" for a job that wants
    to see Ray Data's log.
    """
    from ray.runtime_env.runtime_env import _merge_runtime_env

    environ = {"RAY_ADDRESS": "10.0.0.1:6379"}
    if job:
        environ |= job | {
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(
                {"runtime_env": {"env_vars": job}}
            )
        }
    asked = []
    ray = SimpleNamespace(
        is_initialized=lambda: False, shutdown=lambda: None, exceptions=None
    )
    ray.init = lambda **options: asked.append(options["runtime_env"])
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(ray_env, "check_address", lambda address: None)
    with ray_env.connect():
        pass
    merged = _merge_runtime_env({"env_vars": job}, asked[0])
    assert merged is not None and merged["env_vars"].keys() == {
        *job,
        *ray_env.ENVIRONMENT,
    }


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


def test_a_private_cluster_uses_no_token(monkeypatch):
    started = []
    ray = SimpleNamespace(
        is_initialized=lambda: False, shutdown=lambda: None, exceptions=None
    )
    ray.init = lambda **options: started.append(
        (options["address"], os.environ["RAY_AUTH_MODE"], options)
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", {})
    for keep_idle in (True, False):
        with ray_env.connect(keep_idle=keep_idle):
            pass
    assert [facts[:2] for facts in started] == [("local", "disabled")] * 2
    assert [options.get("_system_config") for *_, options in started] == [
        None,
        {"num_workers_soft_limit": 0},
    ]


@pytest.mark.parametrize("loading", ["memory", "streaming"])
def test_images_stay_in_rays_store_as_long_as_they_are_used(
    tmp_path, monkeypatch, loading
):
    """Kills: a store that is gone, or another's, while rows are predicted; a copy of
    it; a cluster that idles where nothing is in it; processes that decoded and stay, or
    that crop and go.
    """
    events, kept = [], RowBlocks([torch.zeros(400, 3, 8, 8, dtype=torch.uint8)])

    @contextmanager
    def connect(store, workers, keep_idle):
        yield SimpleNamespace(cluster_resources=dict, get=lambda images: images)
        events.append(("closed", keep_idle))

    monkeypatch.setattr(worker.ray_env, "connect", connect)
    monkeypatch.setattr(worker.ray_env, "worker_resources", lambda *_: {"CPU": 1.0})
    monkeypatch.setattr(worker.nodes, "wait_for_resources", lambda *_: None)
    monkeypatch.setattr(worker, "run_workers", lambda *_: {})
    facts = {
        "decode_task": (None, [None] * 400),
        "shared": {"images": []},
        "pixels_of": kept,
    }
    for name, found in facts.items():
        monkeypatch.setattr(worker.ray_data, name, lambda *_, found=found: found)
    config = small_config(compute__num_workers=2, data__loading=loading)
    task = make_task(read_rows(config.data), config.data)
    run = Run(config, Storage(str(tmp_path)), RayBackend(), task)
    with run.locked():
        worker.run_on_ray(run, lambda metrics: None)
        streams = loading == "streaming"
        assert events == ([("closed", True)] if streams else [])
        found = run.task
        assert found is task if streams else found.rows.images.ready.values is kept
    assert events == [("closed", streams)]


def test_the_last_collectives_of_a_hang_are_in_the_run(tmp_path, monkeypatch):
    """Kills: traces on a disk that is gone with its node, a directory that NCCL does
    not make, a user's own variable overruled, names that torch does not read.
    """
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    here, there = Storage(str(tmp_path / "run")), Storage("mock:///run")
    monkeypatch.setattr(worker.tempfile, "gettempdir", lambda: str(tmp_path))
    for storage in (here, there):
        place = Path(worker.flight_recorder(storage)["TORCH_FR_DUMP_TEMP_FILE"])
        worker.collect_traces(storage)
        place.with_name(place.name + "1").write_bytes(b"trace")
        worker.collect_traces(storage)
    assert (tmp_path / "run/nccl/rank_1").read_bytes() == b"trace"
    (name,) = there.list("nccl")
    assert (
        name.startswith("rank_1-")
        and there.read(f"nccl/{name}") == b"trace"
        and not place.exists()
    )
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "5")
    assert "TORCH_FR_BUFFER_SIZE" not in worker.flight_recorder(here)
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if library.exists():
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code,
        ):
            assert all(
                code.find(name.encode()) > 0 for name in worker.flight_recorder(there)
            )


@pytest.mark.parametrize(
    ("device", "loading", "threads", "expected"),
    [
        ("cuda", "streaming", None, 2),
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
    assert worker.rank_threads(config, torch.device(device), 2, 2.5) == expected


def test_the_numbers_of_a_rank_are_rays_metrics(monkeypatch):
    """Kills: a number of all ranks that Grafana adds up, gauges without the run and the
    rank, lines that have no number taken for zeros.
    """
    import ray.util.metrics

    seen = []

    class Gauge:
        def __init__(self, name, text, tag_keys):
            self.name, self.keys = name, tag_keys

        def set(self, value, tags):
            seen.append((self.name, value, *(tags[key] for key in self.keys)))

    monkeypatch.setattr(ray.util.metrics, "Gauge", Gauge)
    line = {"phase": "discover", "lr": 0.1} | dict.fromkeys(worker.GAUGES, 0.5)
    for rank in (0, 1):
        worker.Gauges("a-run", rank).set(line)
        worker.Gauges("a-run", rank).set({"phase": "discover", "step": 7})
    expected = [
        (f"uno_{name}", 0.5, "a-run", "discover", "0") for name in worker.GAUGES
    ]
    own = [
        (name, 0.5, "a-run", "discover", "1") for name in ("uno_step_ms", "uno_rank_ms")
    ]
    assert sorted(seen) == sorted(expected + own)
    assert worker.GAUGES.keys() >= {
        "data_wait",
        "rank_ms_median",
        "slow_rank",
        "grad_norm",
        "peak_memory_gb",
    }
