"""What a run needs of a machine: memory, with the reason for the way in, and time."""

import re

import pytest

from pipelines.ray_env import worker_resources
from tests.uno.small_run import fresh_state, small_config, small_sets
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.presets import preset
from uno.runs import hardware
from uno.session import resources
from uno.session.resources import (
    Room,
    advice,
    check_memory,
    choose,
    crop_rate,
    forecast,
    free_device_bytes,
    free_host_bytes,
    needed_bytes,
    own_bytes,
    peak_bytes,
)

ROW = 3 * 100**2  # bytes of an image


def config(**values):
    return override(
        Config(),
        {"data.stored_size": 100}
        | {k.replace("__", "."): v for k, v in values.items()},
    )


@pytest.fixture
def programs(monkeypatch):
    """Sizes of programs that are easy to add up, on two CPUs; this process has taken
    40 MB.
    """
    for name, value in (
        ("ALONE", 100),
        ("RAY", 200),
        ("TASK", 50),
        ("TRAINER", 30),
        ("WORKER", 60),
    ):
        monkeypatch.setattr(resources, f"{name}_BYTES", value * 10**6)
    monkeypatch.setattr(resources, "own_bytes", lambda: 40 * 10**6)
    monkeypatch.setattr(resources, "available_cpus", lambda: 2)


@pytest.mark.parametrize(
    ("workers", "host", "device", "expected", "words"),
    [
        (
            0,
            1e9,
            None,
            "memory",
            "300 MB decoded; process peak about 400 MB, budget 564 MB",
        ),
        (0, 4e8, None, "streaming", "budget 204 MB (60% of free host memory)"),
        (2, 7e8, None, "streaming", "process peak about 650 MB, budget 234 MB"),
        (2, 9e8, None, "memory", "budget 354 MB (60% of free host memory)"),
        (2, 2e8, None, "streaming", "budget 0 bytes"),
        (0, 1e9, 4e8, "streaming", "budget 240 MB (60% of free device memory)"),
        (2, 1.2e9, 1e12, "memory", "budget 534 MB (60% of free host"),
    ],
)
def test_auto_takes_what_fits(programs, workers, host, device, expected, words):
    """10,000 images of 100 px. Kills: programs forgotten, or counted that run already,
    the larger of two budgets, less than nothing.
    """
    found, reason = choose(
        config(compute__num_workers=workers), 10_000, ROW, Room(host, device)
    )
    assert (
        found == expected
        and reason.startswith(resources.HOW[expected])
        and words in reason
    )
    for told in ("memory", "streaming"):
        found, reason = choose(config(data__loading=told), 10_000, ROW, Room(1))
        assert found == told and reason.startswith(
            f"{resources.HOW[told]}, set by --data.loading"
        )


@pytest.mark.parametrize(
    ("room", "frozen", "expected", "words"),
    [
        (
            Room(10**10, None, 4 * 10**8),
            False,
            "streaming",
            "budget 240 MB (60% of the smallest object store",
        ),
        (
            Room(10**10, None, 10**9),
            False,
            "memory",
            "budget 600 MB (60% of the smallest object store",
        ),
        (
            Room(10**10, None, None, 6 * 10**8),
            False,
            "streaming",
            "budget 264 MB (60% of the driver's memory",
        ),
        (
            Room(10**10, None, None, 9 * 10**8),
            False,
            "memory",
            "budget 444 MB (60% of the driver's memory",
        ),
        (
            Room(10**10, None, 10**9, 9 * 10**8),
            True,
            "streaming",
            "budget 222 MB (60% of the driver's memory",
        ),
        (
            Room(10**10, 10**9, 2 * 10**8, 10**10),
            False,
            "streaming",
            "budget 120 MB (60% of the smallest object",
        ),
    ],
)
def test_all_nodes_hold_the_set(programs, room, frozen, expected, words):
    """Kills: the object store of a node, or the machine that leads a run, left out of
    the budget; features counted once there, which are in this process and in the store.
    """
    own = config(
        compute__num_workers=2, **({"model__finetune": "none"} if frozen else {})
    )
    found, reason = choose(own, 10_000, ROW, room)
    assert found == expected and words in reason


def test_the_peak_is_where_most_is_held(programs):
    """One copy, and what decodes or what trains, whichever is more. Kills: both at
    once, a process for a CPU that has nothing to decode, a copy for each worker,
    features counted once where there are two.
    """

    def of(workers, *facts, **more):
        return peak_bytes(config(compute__num_workers=workers, **more), *facts) // 10**6

    assert of(0, 1000, 10**6) == 100 + 1000 and of(0, 1000, 10**6, 64) == 1100
    # one block: one task
    assert [of(w, 1000, 10**6, 64) - 1000 for w in (1, 2, 3)] == [290, 350, 410]
    assert [of(2, 100_000, 10**4, cpus) - 1000 for cpus in (8, 64)] == [
        200 + 8 * 50,
        200 + 49 * 50,
    ]
    assert of(2, 1000, 10**6, model__finetune="none") == 350 + 2000
    assert of(0, 1000, 10**6, model__finetune="none") == 1100


def test_free_memory_is_the_containers(tmp_path, monkeypatch):
    """The smaller of what the kernel and the container leave. Kills: a machine's
    memory for a container's.
    """
    assert 2**20 < free_host_bytes() < 2**50
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(resources, "MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(resources, "CGROUP", str(tmp_path))
    assert free_host_bytes() == 5_120_000
    (tmp_path / "memory.current").write_text("1000000\n")
    for limit, expected in (("3000000\n", 2_000_000), ("max\n", 5_120_000)):
        (tmp_path / "memory.max").write_text(limit)
        assert free_host_bytes() == expected
    assert free_device_bytes(override(Config(), {"compute.device": "cpu"})) is None


def test_own_memory(monkeypatch):
    """Kills: pages for bytes, all that is mapped. (Torch alone takes 200 MB.)"""
    assert 50e6 < own_bytes() < 50e9
    monkeypatch.setattr(resources, "STATM", "/no/such")
    assert own_bytes() == 0


@pytest.mark.parametrize("values", [{"method": "dtc"}, {"pretext__epochs": 1}])
def test_what_needs_the_images_keeps_them(values):
    """Kills: a set that does not fit streamed into a method that looks rows up."""
    found, reason = choose(config(**values), 10_000, ROW, Room(1))
    assert found == "memory" and "needs" in reason
    with pytest.raises(ConfigError, match="loading memory"):
        choose(config(data__loading="streaming", **values), 10_000, ROW, Room(1))


@pytest.fixture(scope="module")
def task():
    config = small_config().data
    return make_task(read_rows(config), config)


def test_the_estimate_is_that_of_the_network_and_its_views(task):
    """Kills: parts that do not grow with what they depend on, weights counted as
    activations.
    """
    config = small_config()
    found = needed_bytes(config, task)
    network = fresh_state(config, train=small_sets()[0]).model
    assert (
        found["network"] == 12 * sum(p.numel() for p in network.parameters())
        and found["queue"] == 0
    )
    twice = needed_bytes(small_config(train__batch_size=64), task)
    assert 1.9 < twice["a step's activations"] / found["a step's activations"] < 2.1
    assert twice["network"] == found["network"]
    views, heads, directions = 2, 2, 2 * 8  # of both families
    queue = needed_bytes(small_config(objective__queue_size=1000), task)["queue"]
    assert queue == 4 * views * heads * 1000 * (2 * directions + 5 + 10)
    half = needed_bytes(small_config(compute__num_workers=2), task)[
        "a step's activations"
    ]
    assert half == pytest.approx(found["a step's activations"] / 2, rel=0.05)
    large = needed_bytes(small_config(augment__large__size=256), task)[
        "a step's activations"
    ]
    assert large > 200 * found["a step's activations"]
    # without a network
    assert needed_bytes(config, task, free=1)["network"] <= found["network"]
    assert (
        needed_bytes(small_config(model__encoder="tests.uno.toy_encoders:flat"), task)
        == {}
    )


def test_more_than_there_is_is_refused_and_elsewhere_nothing_is_known(
    task, monkeypatch
):
    config = small_config()
    needed = sum(needed_bytes(config, task).values())
    for free, workers in ((needed, 0), (2 * needed, 2)):
        monkeypatch.setattr(resources, "free_host_bytes", lambda free=free: free)
        check_memory(small_config(compute__num_workers=workers), task)
    monkeypatch.setattr(resources, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(
        ConfigError, match=r"this run needs at least .* GB are free; lower --batch-size"
    ):
        check_memory(config, task)
    with pytest.raises(ConfigError, match="in each of 2 workers"):
        check_memory(small_config(compute__num_workers=2), task)
    images = len(task.rows) * 3 * 1000**2  # which two workers share
    kept = {
        "data__loading": "memory",
        "data__stored_size": 1000,
        "compute__num_workers": 2,
    }
    monkeypatch.setattr(resources, "free_host_bytes", lambda: images + 2 * needed)
    check_memory(small_config(**kept), task)
    monkeypatch.setattr(resources, "free_host_bytes", lambda: images)
    with pytest.raises(
        ConfigError,
        match=r"\(400 images 1\.2 GB\), 1\.2 GB are free; use --data\.loading str",
    ):
        check_memory(small_config(**kept), task)
    check_memory(small_config(data__loading="streaming", data__stored_size=1000), task)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_memory(small_config(compute__num_workers=2), task)


def test_threads(monkeypatch):
    monkeypatch.setattr(hardware, "available_cpus", lambda: 20)
    assert (
        hardware.num_threads(small_config()) == 20
        and hardware.num_threads(small_config(), 8) == 2
    )
    assert hardware.num_threads(small_config(compute__threads=80)) == 80
    with pytest.raises(
        ConfigError, match=r"compute\.threads is 81, more than 80 for 20 cores"
    ):
        hardware.num_threads(small_config(compute__threads=81))


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """The load of the machine, none but where a test says so."""
    found = [0.0]
    monkeypatch.setattr("os.getloadavg", lambda: (found[0], 0.0, 0.0))
    return found


def lines(tmp_path, phases=("pretrain", "discover"), **overrides):
    config = small_config(**overrides)
    task = make_task(read_rows(config.data), config.data)
    return list(forecast(config, task, Storage(str(tmp_path)), phases))


def test_a_run_says_what_it_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr("uno.session.resources._step", lambda *args: 0.0)
    assert lines(tmp_path) == [
        (
            "model: resnet_small, fully trained, 8 px; weights: trained in this run"
            " from random initialization"
        ),
        "training: preset digits, 3 epochs of pretrain, 3 epochs of discover",
    ]


def test_without_weights_it_says_how_to_get_some_and_how_long_it_takes(
    tmp_path, monkeypatch
):
    """The time follows the number of steps. Kills: a time of one phase, of one step,
    of a finished run.
    """
    monkeypatch.setattr("uno.session.resources._step", lambda *args: 2.0)
    monkeypatch.setattr("uno.session.resources.is_custom_data", lambda given: True)
    found = lines(tmp_path)
    assert (
        found[2].startswith("hint: ")
        and "--weights pretrained (torchvision:efficientnet_b0" in found[2]
    )
    assert found[3].startswith(
        "time: about 54 s (pretrain 18 s, discover 36 s), from a timed batch; then "
    )
    assert lines(tmp_path, ("discover",), discover__epochs=3000)[3].startswith(
        "time: about 10.0 h (discover"
    )


def test_a_busy_machine_is_named(tmp_path, monkeypatch, load):
    """Kills: a warning below one program a core, or without a time that it is about."""
    monkeypatch.setattr("uno.session.resources._step", lambda *args: 2.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    load[0] = 2.0
    assert not lines(tmp_path)[-1].startswith("warning")
    load[0] = 2.06
    assert lines(tmp_path)[-1].startswith(
        "warning: other programs use the CPU (load 2.1 on 2 cores)"
    )


def test_a_driver_that_lacks_the_workers_gpus_times_nothing(tmp_path, monkeypatch):
    """Often so on a GPU cluster. Kills: a run that ends before it begins; another
    machine's time.
    """
    monkeypatch.setattr("uno.session.resources._step", lambda *args: 2.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert len(lines(tmp_path, compute__num_workers=2)) == 3
    assert len(lines(tmp_path, compute__num_workers=2, compute__device="cuda")) == 2
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert len(lines(tmp_path, compute__num_workers=2)) == 2


@pytest.mark.parametrize("finetune", ["full", "last_stage"])
def test_a_step_is_timed_with_gradient(finetune, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "uno.session.resources._minutes", lambda seconds: f"{seconds:.9f}"
    )
    found = lines(
        tmp_path, ("discover",), model__finetune=finetune, discover__epochs=100_000
    )[-1]
    assert re.match(
        r"time: about \d+\.\d+ \(discover \d+\.\d+\), from a timed batch; then ", found
    )


CLUSTER = {"CPU": 296.0, "GPU": 32.0}


@pytest.mark.parametrize(
    ("overrides", "cluster", "rate", "says"),
    [
        ({}, CLUSTER, None, ["512 images are 16 for each of 32 GPUs"]),
        ({"train.batch_size": 2048}, CLUSTER, None, []),
        ({"compute.device": "cpu"}, CLUSTER, None, []),
        (
            {"train.batch_size": 2048},
            CLUSTER,
            100.0,
            ["warning: 8.25 cores .* 825 images/s .* H100"],
        ),
        (
            {"train.batch_size": 2048},
            CLUSTER,
            294.0,
            ["^8.25 cores for each GPU .* 2,426 images/s"],
        ),
        ({"compute.device": "cpu"}, CLUSTER, 1.0, ["^8.25 cores for each worker"]),
    ],
)
def test_what_would_keep_gpus_waiting(overrides, cluster, rate, says):
    """Kills: rows of the batch for those of a GPU, cores that workers use, CPUs
    warned of.
    """
    config = override(preset("imagenet"), {"compute.num_workers": 32, **overrides})
    each = worker_resources(config, cluster)
    found = list(advice(config, cluster["CPU"], each, rate))
    assert len(found) == len(says) and all(
        re.search(*pair) for pair in zip(says, found, strict=True)
    ), found


def test_the_rate_of_cropping_is_that_of_one_core(monkeypatch):
    """By a clock of one second a look. Kills: a rate of the first image, or of all
    its views.
    """
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    config = small_config()
    assert crop_rate(config, make_task(read_rows(config.data), config.data)) == 16
