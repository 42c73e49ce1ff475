"""Features and predictions by a runtime of the encoder: what the cache says of them,
and who goes on.
"""

import json

import numpy as np
import pytest
import safetensors.torch
import torch

import uno
from tests.uno.models import tiny_model, write_model
from tests.uno.small_run import small_config
from tests.uno.test_runtime import encoder_of, fake, installed
from uno import runtime
from uno.config import Config, override
from uno.data import features
from uno.data.files import Storage
from uno.data.sources import read_digits
from uno.data.splits import make_task
from uno.errors import Interrupted
from uno.results.infer import at_speed
from uno.runtime import BUILD, Runtime
from uno.session.data import load_features

SHARD, ROWS = 16, 20


@pytest.fixture
def batches(monkeypatch):
    """Sizes of the batches of an ``onnx`` that rounds otherwise than PyTorch."""
    seen = list[int]()
    installed(monkeypatch, "onnx")
    monkeypatch.setitem(BUILD, "onnx", fake(lambda values: values * (1 + 1e-5), seen))
    monkeypatch.setattr(features, "SHARD_ROWS", SHARD)
    return seen


def config_of(folder, name="auto"):
    safetensors.torch.save_file(
        encoder_of().state_dict(), folder / "weights.safetensors"
    )
    heads = {
        "model__finetune": "none",
        "augment__small__num_views": 0,
        "augment__num_cached_views": 2,
    }
    where = {
        "model__weights": str(folder / "weights.safetensors"),
        "compute__cache": str(folder / "cache"),
    }
    return small_config(
        data__limit=ROWS,
        compute__encoder_runtime=name,
        compute__threads=2,
        **heads,
        **where,
    )


def load(config, stop=False):
    task = make_task(read_digits(), config.data)
    found, reasons = load_features(
        config, task, Storage(config.compute.cache), lambda metrics: None, lambda: stop
    )
    assert not any(reasons)
    return found


def plan_in(folder):
    (path,) = folder.glob("cache/features/*/runtime.json")
    return json.loads(path.read_text())


def test_features_by_a_runtime_are_those_of_pytorch_and_serve_it(
    tmp_path, batches, capsys, monkeypatch
):
    """Kills: random views that pass the encoder itself, a runtime that is not named, a
    cache that PyTorch does not believe, or computes again.
    """
    plain = load(config_of(tmp_path, "torch"))
    (tmp_path / "cache").rename(tmp_path / "plain")
    assert not batches and "onnx" not in capsys.readouterr().out
    found = load(config_of(tmp_path, "onnx"))
    torch.testing.assert_close(found, plain * (1 + 1e-5), rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, plain) and sum(batches) >= 2 * ROWS + 2 * ROWS
    plan = plan_in(tmp_path)
    assert (
        plan["runtime"] == "onnx"
        and f"by onnx, {plan['batch_size']} at once" in capsys.readouterr().out
    )
    monkeypatch.setattr(
        features, "compute_shard", lambda *_: pytest.fail("features are there")
    )
    assert torch.equal(load(config_of(tmp_path, "torch")), found)


def test_a_killed_job_goes_on_as_it_began(tmp_path, batches, capsys, monkeypatch):
    """With the same runtime and batches, however few rows are left, so with the same
    bits; another one that is asked for is used, and a line says that both are there.
    Kills: a plan that is measured anew, features of two runtimes side by side without a
    word.
    """
    monkeypatch.setattr(Runtime, "_seconds", lambda self, program, images, size: -size)
    with pytest.raises(Interrupted):
        load(config_of(tmp_path, "onnx"), stop=True)
    monkeypatch.setattr(Runtime, "_seconds", lambda self, program, images, size: size)
    load(config_of(tmp_path))
    said = capsys.readouterr().out
    assert "by onnx, 16 at once (16 cached)" in said and "rounds" not in said
    assert plan_in(tmp_path) == {"runtime": "onnx", "batch_size": 16, "bf16": False}
    for path in sorted(tmp_path.glob("cache/features/*/0*.safetensors"))[1:]:
        path.unlink()
    del batches[:]
    load(config_of(tmp_path, "torch"))
    assert (
        "are by onnx; torch computes the missing ones and rounds differently"
        in capsys.readouterr().out
    )
    assert not batches and plan_in(tmp_path)["runtime"] == "torch"


def test_a_cache_that_grows_says_what_it_has(tmp_path, batches, capsys, monkeypatch):
    """A few evaluation views by PyTorch do not decide what computes all others, random
    views that are there do. Kills: an extension that is as slow as its beginning, views
    of two runtimes.
    """
    monkeypatch.setattr(Runtime, "_seconds", lambda self, program, images, size: size)
    monkeypatch.setattr("uno.runtime.MIN_PIXELS", (2 * ROWS + 1) * 64)
    config = override(config_of(tmp_path), {"data.validation_fraction": 0.0})
    alone = load(
        override(config, {"augment.num_cached_views": 0, "discover.epochs": 0})
    )
    assert not batches and plan_in(tmp_path)["runtime"] == "torch"
    capsys.readouterr()
    two = load(config)
    said = capsys.readouterr().out
    assert (
        f"features: {2 * ROWS} images, evaluation view and 0 of 2 views cached, through"
        in said
    )
    assert "are by torch; onnx computes the missing ones" in said and batches
    monkeypatch.setattr("uno.runtime.MIN_PIXELS", 10**9)
    four = load(override(config, {"augment.num_cached_views": 4}))
    said = capsys.readouterr().out
    assert (
        "evaluation view and 2 of 4 views cached, through" in said
        and "by onnx, 4 at once" in said
    )
    assert torch.equal(two[:, :1], alone) and torch.equal(four[:, :3], two)


def test_predictions_by_a_runtime_are_those_of_pytorch(tmp_path, batches, monkeypatch):
    """And the model is left as it was. Kills: an encoder that stays another module,
    whose weights then have other names; a runtime for a few images; Python's
    predictions without it.
    """
    model = tiny_model(tmp_path / "tiny")
    images, names = read_digits().images.items[:40], [*model.module.state_dict()]
    pixels = torch.from_numpy(
        np.stack([features.decode_many([i], 8, 1, "bilinear")[0][0] for i in images])
    )
    plain = model.score(pixels)
    config = override(Config(), {"compute.encoder_runtime": "onnx"})
    with at_speed(model, config, len(pixels), 2):
        fast = model.score(pixels)
    assert batches and [*model.module.state_dict()] == names
    torch.testing.assert_close(
        fast.probabilities, plain.probabilities, rtol=1e-4, atol=1e-6
    )
    assert not torch.equal(fast.features, plain.features)
    write_model(tmp_path / "run")
    loaded = uno.load(tmp_path / "run")
    del batches[:]
    before = loaded.predict(list(images))
    assert not batches
    monkeypatch.setattr(runtime, "MIN_PIXELS", 40 * 64)
    monkeypatch.setattr(
        Runtime, "_seconds", lambda self, program, images, size: -len(batches)
    )
    again = loaded.predict(list(images))
    assert batches
    np.testing.assert_allclose(
        again.probabilities, before.probabilities, rtol=1e-4, atol=1e-6
    )
