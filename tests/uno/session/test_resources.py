"""Memory or streaming, and what cannot fit."""

import pytest
import torch

from tests.uno.small_run import small_config
from uno.config import Config, override
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.model import build_network
from uno.runs import hardware
from uno.session import resources

# an image of 100 pixels has 30 kB, so the 10,000 images of the tests have 300 MB


def config(**values):
    values = {key.replace("__", "."): value for key, value in values.items()}
    return override(Config(), {"data.stored_size": 100} | values)


@pytest.mark.parametrize(
    ("values", "room", "expected", "limit"),
    [
        ({}, resources.FreeMemory(510e6), "memory", "host memory"),
        ({}, resources.FreeMemory(490e6), "streaming", "host memory"),
        ({}, resources.FreeMemory(1e9, device=490e6), "streaming", "device memory"),
        (
            {"compute__num_workers": 2},
            resources.FreeMemory(5e9),
            "memory",
            "host memory",
        ),
        (
            {"compute__num_workers": 2},
            resources.FreeMemory(3.9e9),
            "streaming",
            "host memory",
        ),
        (
            {"compute__num_workers": 2},
            resources.FreeMemory(1e9),
            "streaming",
            "host memory",
        ),
        (
            {"compute__num_workers": 2},
            resources.FreeMemory(1e10, store=4e8),
            "streaming",
            "object store",
        ),
        (
            {"compute__num_workers": 2},
            resources.FreeMemory(1e10, driver=490e6),
            "streaming",
            "driver's memory",
        ),
        (
            {"compute__num_workers": 2, "model__finetune": "none"},
            # 7 views of 512 numbers are 143 MB, twice
            resources.FreeMemory(1e10, driver=450e6),
            "streaming",
            "driver's memory",
        ),
    ],
)
def test_auto_keeps_what_fits_into_the_tightest_limit(values, room, expected, limit):
    loading, reason = resources.choose_loading(config(**values), 10_000, room)
    assert loading == expected
    assert reason.startswith(resources.HOW[expected]) and limit in reason


@pytest.mark.parametrize("wish", ["memory", "streaming"])
def test_the_user_is_right(wish):
    loading, reason = resources.choose_loading(
        config(data__loading=wish), 10_000, resources.FreeMemory(1)
    )
    assert loading == wish and "--data.loading" in reason


@pytest.mark.parametrize("values", [{"method": "dtc"}, {"pretext__epochs": 1}])
def test_a_method_that_needs_the_images_keeps_them(values):
    loading, reason = resources.choose_loading(
        config(**values), 10_000, resources.FreeMemory(1)
    )
    assert loading == "memory" and "needs" in reason
    with pytest.raises(ConfigError, match="loading memory"):
        resources.choose_loading(
            config(data__loading="streaming", **values), 10_000, resources.FreeMemory(1)
        )


def test_free_memory_is_the_containers(tmp_path, monkeypatch):
    """It is the smaller of what the kernel and the container leave."""
    assert 2**20 < resources.free_host_bytes() < 2**50
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(resources, "MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(resources, "CGROUP", str(tmp_path))
    assert resources.free_host_bytes() == 5_120_000
    (tmp_path / "memory.current").write_text("1000000\n")
    for limit, expected in (("3000000\n", 2_000_000), ("max\n", 5_120_000)):
        (tmp_path / "memory.max").write_text(limit)
        assert resources.free_host_bytes() == expected
    assert (
        resources.free_device_bytes(override(Config(), {"compute.device": "cpu"}))
        is None
    )


@pytest.fixture(scope="module")
def task():
    config = small_config().data
    return make_task(read_rows(config), config)


def test_the_estimate_grows_with_the_network_and_the_batch(task):
    found = resources.estimate_training_bytes(small_config(), task)
    network = build_network(small_config(), 5, 5, 0)
    assert found["network"] == 12 * sum(p.numel() for p in network.parameters())
    twice = resources.estimate_training_bytes(small_config(train__batch_size=64), task)
    assert twice == found | {"activations": 2 * found["activations"]}
    two = resources.estimate_training_bytes(small_config(compute__num_workers=2), task)
    assert two["network"] == 2 * found["network"]
    assert two["activations"] == found["activations"]


def test_the_activations_are_those_that_the_backward_pass_keeps(task):
    """The estimate is close to what autograd saves."""
    config = small_config(augment__large__size=32, model__width=32)
    encoder = build_network(config, 5, 5, 0).encoder
    weights = {weight.untyped_storage()._cdata for weight in encoder.parameters()}
    saved = {}

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in weights:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder(torch.zeros(1, 3, 32, 32))
    kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    found = resources.estimate_activation_bytes(encoder.to("meta"), 32)
    assert found == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize(
    "values",
    [
        {"model__finetune": "none", "data__loading": "streaming"},
        {"model__encoder": "tests.uno.toy_encoders:maps"},
    ],
)
def test_a_frozen_encoder_keeps_no_activations_and_own_code_is_not_run(task, values):
    assert (
        resources.estimate_training_bytes(small_config(**values), task)["activations"]
        == 0
    )


@pytest.mark.parametrize(
    ("values", "images", "message"),
    [
        ({}, 0, "lower --batch-size"),
        (
            {"data__loading": "memory", "data__stored_size": 1000},
            400 * 3 * 1000**2,
            r"400 images 1\.2 GB.* streaming",
        ),
    ],
)
def test_what_cannot_fit_is_refused(task, monkeypatch, values, images, message):
    config = small_config(**values)
    needed = (
        sum(resources.estimate_training_bytes(small_config(), task).values()) + images
    )
    free_bytes = iter([needed, needed - 1])
    monkeypatch.setattr(resources, "free_host_bytes", lambda: next(free_bytes))
    resources.check_memory(config, task)
    with pytest.raises(ConfigError, match=message):
        resources.check_memory(config, task)


def test_nothing_is_known_of_the_machines_of_a_cluster(task, monkeypatch):
    monkeypatch.setattr(resources, "free_host_bytes", lambda: 1)
    config = small_config(compute__num_workers=2)
    with pytest.raises(ConfigError, match="needs at least"):
        resources.check_memory(config, task)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    resources.check_memory(config, task)


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
