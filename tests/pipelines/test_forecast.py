"""What a run says before it starts."""

import re

import pytest

from pipelines.forecast import advice, crop_rate, forecast
from tests.uno.small_run import small_config
from uno.config import override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.presets import preset


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
    monkeypatch.setattr("pipelines.forecast._step", lambda *args: 0.0)
    what, encoder, *rest = lines(tmp_path)
    assert what == (
        "run: preset digits, 3 epochs of pretrain, 3 epochs of discover, encoder and heads learn, 8 px"
    )
    assert encoder == "encoder: resnet_small, weights trained here, from random ones" and not rest


def test_without_weights_it_says_how_to_get_some_and_how_long_it_takes(tmp_path, monkeypatch):
    """The time follows the number of steps. Kills: a time of one phase, of one step, of a finished run."""
    monkeypatch.setattr("pipelines.forecast._step", lambda *args: 2.0)
    monkeypatch.setattr("pipelines.forecast.own_images", lambda given: True)
    found = lines(tmp_path)
    assert "--weights pretrained fetches those of torchvision:efficientnet_b0" in found[2]
    assert found[3] == "time: about 54 s here (pretrain 18 s, discover 36 s), from a timed batch"
    assert lines(tmp_path, ("discover",), discover__epochs=3000)[3].startswith("time: about 10.0 h here")


def test_a_busy_machine_is_named(tmp_path, monkeypatch, load):
    """Kills: a warning below one program a core, or without a time that it is about."""
    monkeypatch.setattr("pipelines.forecast._step", lambda *args: 2.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    load[0] = 2.0
    assert not lines(tmp_path)[-1].startswith("warning")
    load[0] = 2.06
    assert lines(tmp_path)[-1].startswith("warning: other programs are at work (load 2.1 on 2 cores)")


def test_a_driver_that_lacks_the_workers_gpus_times_nothing(tmp_path, monkeypatch):
    """Often so on a GPU cluster. Kills: a run that ends before it begins; another machine's time."""
    monkeypatch.setattr("pipelines.forecast._step", lambda *args: 2.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert len(lines(tmp_path, compute__workers=2)) == 3
    assert len(lines(tmp_path, compute__workers=2, compute__device="cuda")) == 2
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert len(lines(tmp_path, compute__workers=2)) == 2


@pytest.mark.parametrize("trainable", ["all", "last"])
def test_a_step_is_timed_with_gradient(trainable, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.forecast._minutes", lambda seconds: f"{seconds:.9f}")
    found = lines(tmp_path, ("discover",), model__trainable=trainable, discover__epochs=100_000)[-1]
    assert re.match(r"time: about \d+\.\d+ here \(discover \d+\.\d+\), from a timed batch$", found)


CLUSTER = {"CPU": 296.0, "GPU": 32.0}


@pytest.mark.parametrize(("overrides", "cluster", "rate", "says"), [
    ({}, CLUSTER, None, ["512 rows are 16 for each of 32 GPUs"]),
    ({"train.batch_size": 2048}, CLUSTER, None, []),
    ({"compute.device": "cpu"}, CLUSTER, None, []),
    ({"train.batch_size": 2048}, CLUSTER, 100.0, ["warning: 8.25 cores .* 825 images/s .* H100"]),
    ({"train.batch_size": 2048}, CLUSTER, 294.0, ["^8.25 cores for each GPU .* 2,426 images/s"]),
    ({"compute.device": "cpu"}, CLUSTER, 1.0, ["^8.25 cores for each worker"]),
])  # fmt: skip
def test_what_would_keep_gpus_waiting(overrides, cluster, rate, says):
    """Kills: rows of the batch for those of a GPU, cores that workers use, CPUs warned of."""
    config = override(preset("imagenet"), {"compute.workers": 32, **overrides})
    found = list(advice(config, cluster, rate))
    assert len(found) == len(says) and all(re.search(*pair) for pair in zip(says, found, strict=True)), found


def test_the_rate_of_cropping_is_that_of_one_core(monkeypatch):
    """By a clock of one second a look. Kills: a rate of the first image, or of all its views."""
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    config = small_config()
    assert crop_rate(config, make_task(read_rows(config.data), config.data)) == 16
