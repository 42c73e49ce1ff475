"""What a run would need, before it takes any of it."""

import pytest

from pipelines import demand
from pipelines.demand import check_demand, needed_bytes
from tests.uno.small_run import fresh_state, small_config, small_sets
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.runs import hardware


@pytest.fixture(scope="module")
def task():
    config = small_config().data
    return make_task(read_rows(config), config)


def test_the_estimate_is_that_of_the_network_and_its_views(task):
    """Kills: parts that do not grow with what they depend on, weights counted as activations."""
    config = small_config()
    found = needed_bytes(config, task)
    network = fresh_state(config, train=small_sets()[0]).model
    assert found["network"] == 12 * sum(p.numel() for p in network.parameters()) and found["queue"] == 0
    twice = needed_bytes(small_config(train__batch_size=64), task)
    assert 1.9 < twice["a step's activations"] / found["a step's activations"] < 2.1
    assert twice["network"] == found["network"]
    views, heads, directions = 2, 2, 2 * 8  # of both families
    queue = needed_bytes(small_config(objective__queue_size=1000), task)["queue"]
    assert queue == 4 * views * heads * 1000 * (2 * directions + 5 + 10)
    half = needed_bytes(small_config(compute__workers=2), task)["a step's activations"]
    assert half == pytest.approx(found["a step's activations"] / 2, rel=0.05)
    large = needed_bytes(small_config(augment__large__size=256), task)["a step's activations"]
    assert large > 200 * found["a step's activations"]
    assert needed_bytes(config, task, free=1)["network"] <= found["network"]  # without a network
    assert needed_bytes(small_config(model__encoder="tests.uno.toy_encoders:flat"), task) == {}


def test_more_than_there_is_is_refused_and_elsewhere_nothing_is_known(task, monkeypatch):
    config = small_config()
    needed = sum(needed_bytes(config, task).values())
    for free, workers in ((needed, 0), (2 * needed, 2)):
        monkeypatch.setattr(demand, "free_host_bytes", lambda free=free: free)
        check_demand(small_config(compute__workers=workers), task)
    monkeypatch.setattr(demand, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"this run needs at least .* GB are free; lower --batch-size"):
        check_demand(config, task)
    with pytest.raises(ConfigError, match="in each of 2 workers"):
        check_demand(small_config(compute__workers=2), task)
    images = len(task.rows) * 3 * 1000**2  # which two workers share
    kept = {"data__ingest": "resident", "data__store_size": 1000, "compute__workers": 2}
    monkeypatch.setattr(demand, "free_host_bytes", lambda: images + 2 * needed)
    check_demand(small_config(**kept), task)
    monkeypatch.setattr(demand, "free_host_bytes", lambda: images)
    with pytest.raises(
        ConfigError, match=r"\(400 images 1\.2 GB\), 1\.2 GB are free; use --data\.ingest str"
    ):
        check_demand(small_config(**kept), task)
    check_demand(small_config(data__ingest="streaming", data__store_size=1000), task)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_demand(small_config(compute__workers=2), task)


def test_threads(monkeypatch):
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 20)
    assert hardware.num_threads(small_config()) == 20 and hardware.num_threads(small_config(), 8) == 2
    assert hardware.num_threads(small_config(compute__threads=80)) == 80
    with pytest.raises(ConfigError, match=r"compute\.threads is 81, more than 80 for 20 cores"):
        hardware.num_threads(small_config(compute__threads=81))
