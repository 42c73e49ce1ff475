"""Features and predictions by a runtime of the encoder."""

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.uno.models import tiny_model
from tests.uno.small_run import frozen_encoder, small_config
from tests.uno.test_runtime import install_fake
from uno.config import Config, override
from uno.data import features
from uno.data.files import Storage
from uno.data.sources import read_digits
from uno.data.splits import make_task
from uno.results.infer import accelerated_encoder
from uno.session.data import load_features

CHUNK, ROWS = 16, 20


@pytest.fixture
def openvino(monkeypatch):
    """Return the program of an OpenVINO that rounds in its own way."""
    monkeypatch.setattr(features, "CHUNK_ROWS", CHUNK)
    return install_fake(monkeypatch, lambda values: values * (1 + 1e-5))


def config_of(folder, name="torch"):
    weights = folder / "weights.safetensors"
    safetensors.torch.save_file(frozen_encoder(small_config()).state_dict(), weights)
    return small_config(
        data__limit=ROWS,
        compute__encoder_runtime=name,
        compute__threads=2,
        compute__cache=str(folder / "cache"),
        model__finetune="none",
        model__weights=str(weights),
        augment__small__num_views=0,
        augment__num_cached_views=2,
    )


def load(config):
    task = make_task(read_digits(), config.data)
    found, reasons = load_features(
        config, task, Storage(config.compute.cache), lambda metrics: None, lambda: False
    )
    assert not any(reasons)
    return found


def test_each_runtime_has_features_of_its_own(tmp_path, openvino, capsys, monkeypatch):
    """The features that PyTorch computed serve PyTorch alone, so that a run does not
    depend on those before it.
    """
    plain = load(config_of(tmp_path))
    openvino.assert_not_called()
    assert "openvino" not in capsys.readouterr().out
    found = load(config_of(tmp_path, "openvino"))
    torch.testing.assert_close(found, plain * (1 + 1e-5), rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, plain)
    images = sum(len(call.args[0]) for call in openvino.call_args_list)
    assert images >= 2 * ROWS + 2 * ROWS
    assert "by openvino" in capsys.readouterr().out
    monkeypatch.setattr(
        features, "encode_chunk", lambda *_: pytest.fail("features are there")
    )
    assert torch.equal(load(config_of(tmp_path)), plain)
    assert torch.equal(load(config_of(tmp_path, "openvino")), found)


def test_predictions_by_a_runtime_are_those_of_pytorch(tmp_path, openvino):
    """And the model is left as it was."""
    model = tiny_model(tmp_path / "tiny")
    images, names = read_digits().images.items[:40], [*model.module.state_dict()]
    pixels = torch.from_numpy(
        np.stack([features.decode_many([i], 8, 1)[0][0] for i in images])
    )
    plain = model.score(pixels)
    config = override(Config(), {"compute.encoder_runtime": "openvino"})
    with accelerated_encoder(model, config, 2):
        fast = model.score(pixels)
    openvino.assert_called()
    assert [*model.module.state_dict()] == names
    torch.testing.assert_close(
        fast.probabilities, plain.probabilities, rtol=1e-4, atol=1e-6
    )
    assert not torch.equal(fast.features, plain.features)
