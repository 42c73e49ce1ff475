"""What other tools load computes what the model computes, in a process that knows
nothing of this project.
"""

import importlib.util
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.uno.models import tiny_model
from tests.uno.small_run import HERE, small_config, small_sets
from tests.uno.test_encoder import TOYS
from uno.data.files import Storage
from uno.errors import ConfigError, NumericsError
from uno.results import export as exporting
from uno.results.classes import OutputClass
from uno.results.export import export, model_card
from uno.results.infer import load_classifier, save_model
from uno.runs import run

FOREIGN = """
import json, sys
import numpy as np, torch
facts = {"classes.json": "", "value_range": ""}
program = torch.export.load("model.pt2", extra_files=facts).module()
names = [entry["name"] for entry in json.loads(facts["classes.json"])]
assert json.loads(facts["value_range"]) == [0, 4095]
with torch.inference_mode():
    for name in ("one", "many"):
        images = torch.from_numpy(np.load(f"{name}.npy"))
        np.save(f"{name}.out.npy", program(images).numpy())
assert not {"uno", "pipelines"} & set(sys.modules) and len(names) == 10
"""


@pytest.mark.ray  # several processes
@pytest.mark.slow
def test_pt2_computes_the_same_without_this_project(tmp_path):
    """Kills: another head, no center crop, no normalization, no temperature, a fixed
    batch, merges lost.
    """
    model = tiny_model(
        tmp_path / "run",
        augment__large__size=6,
        data__mean=(0.1, 0.2, 0.3),
        data__value_range=(0, 4095),
    )
    model.classes[7:9] = [
        OutputClass(7, "a", "novel", 2),
        OutputClass(8, "b", "novel", None),
    ]
    (tmp_path / "model.pt2").write_bytes(export(model, "pt2"))
    batches = {
        "one": torch.randint(0, 256, (1, 3, 8, 8)),
        "many": torch.randint(0, 256, (37, 3, 8, 8)),
    }
    for name, images in batches.items():
        np.save(tmp_path / f"{name}.npy", images.to(torch.uint8).numpy())
    subprocess.run(
        [sys.executable, "-c", FOREIGN], check=True, cwd=tmp_path, timeout=800
    )
    for name, images in batches.items():
        expected = model.score(images.to(torch.uint8)).probabilities
        np.testing.assert_allclose(
            np.load(tmp_path / f"{name}.out.npy"), expected, rtol=0, atol=1e-5
        )


@pytest.mark.release
@pytest.mark.parametrize("method", ["dtc", "mcl", "clustering", "simgcd", "pim"])
def test_baselines_are_exported_too(tmp_path, method):
    """Cosines, distances, the default's chosen space; the export compares itself with
    the model. Kills: prototypes in place of centers, a similarity network that is
    handed out, features as they are.
    """
    model, facts = tiny_model(tmp_path / "run", method=method), {"classes.json": ""}
    model.classes[5] = OutputClass(5, "</script> 😀", "novel", 5)
    if method == "clustering":
        model.module.adapter.mean.fill_(0.1)
    program = torch.export.load(
        io.BytesIO(export(model, "pt2")), extra_files=facts
    ).module()
    assert json.loads(facts["classes.json"])[5]["name"] == "</script> 😀"
    assert program(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape == (2, 10)
    assert not [name for name, _ in program.named_parameters() if "auxiliary" in name]


@pytest.mark.slow
def test_what_computes_something_else_is_not_handed_out(tmp_path, monkeypatch):
    one_head = exporting._one_head
    monkeypatch.setattr(
        exporting, "_one_head", lambda model, head: one_head(model, head - 1)
    )
    with pytest.raises(NumericsError, match=r"\A.*differs from the model.*\Z"):
        export(tiny_model(tmp_path), "pt2")


def test_an_unknown_format_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="choose from encoder, pt2, onnx"):
        export(tiny_model(tmp_path), "tflite")


@pytest.mark.slow
def test_onnx_computes_the_same_or_says_what_is_missing(tmp_path):
    model = tiny_model(tmp_path)
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        with pytest.raises(
            ConfigError, match="pip install onnx onnxscript onnxruntime"
        ):
            export(model, "onnx")
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(
        export(model, "onnx"), providers=["CPUExecutionProvider"]
    )
    images = torch.randint(0, 256, (11, 3, 8, 8)).to(torch.uint8)
    found = session.run(None, {"images": images.numpy()})[0]
    np.testing.assert_allclose(
        found, model.score(images).probabilities, rtol=0, atol=1e-5
    )


METRICS = {
    "train/novel/task_aware/acc/best": 0.9312,
    "train/novel/task_aware/acc/avg": 0.1,
    "test/known/task_aware/acc/best": 0.5,
    "test/known/task_aware/acc/avg": 0.1,
}


@pytest.mark.slow
def test_the_model_card_says_how_to_load_and_that_works(tmp_path, monkeypatch):
    """Its Python is executed, next to the files it speaks of."""
    model = tiny_model(tmp_path / "run")
    facts = {"Data": "digits, fingerprint abc\n# injected"}
    card = model_card(model, facts, METRICS)
    assert "fingerprint abc # injected" in card
    assert "| Task-aware | 93.1 | 50.0 |" in card
    assert "Nothing: the data has no labels" in model_card(model, {}, {})
    folder = tmp_path / "run" / "model"
    (folder / "model.pt2").write_bytes(export(model, "pt2"))
    monkeypatch.chdir(folder)
    images = torch.randint(0, 256, (2, 3, model.size, model.size)).to(torch.uint8)
    code = card.split("```python\n")[1].split("```")[0].replace('"RUN"', '"."')
    pixels = "images.permute(0, 2, 3, 1).numpy()"
    space = {"images": images}
    exec(compile(code.replace('["image.jpg"]', pixels), "card", "exec"), space)
    assert space["probabilities"].shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"model__encoder": "resnet18", "model__weights": "pretrained"},
            "- Weights: torchvision ",
        ),
        (
            {"model__encoder": "torchvision:vit_h_14", "model__weights": "pretrained"},
            "license https",
        ),
        (
            {"model__weights": "/home/me/mine.safetensors"},
            "mine.safetensors (pretraining data unknown)",
        ),
        ({}, "- Weights: trained in this run from random initialization."),
        (
            {"model__encoder": f"{TOYS}:vit"},
            "- Weights: trained in this run from the weights of the callable.",
        ),
        ({"data__value_range": (0, 4095)}, "0 becomes 0 and 4095 becomes 255"),
    ],
)
def test_the_model_card_names_weights_and_the_range_of_values(tmp_path, options, line):
    """Kills: a path of this machine in the card, weights without a word of their
    data.
    """
    model = tiny_model(tmp_path)
    object.__setattr__(model, "config", small_config(**options))
    assert line in model_card(model, {}, {}) and "/home/me" not in model_card(
        model, {}, {}
    )


@pytest.mark.release
@pytest.mark.parametrize("finetune", ["last_stage", "full"])
@pytest.mark.parametrize("what", ["vit", "timm_vit"])
def test_a_vision_transformer_trains_exports_and_predicts(tmp_path, what, finetune):
    """Kills: an encoder that is built but not trained, a program for one batch size,
    a hook that is lost.
    """
    if what == "timm_vit":
        pytest.importorskip("timm")
    encoder, storage = f"{TOYS}:{what}", Storage(str(tmp_path))
    config = small_config(
        model__encoder=encoder, model__finetune=finetune, train__max_steps=2
    )
    run.run_phase(config, run.PRETRAIN, small_sets()[0], HERE, storage)
    run.run_phase(config, run.DISCOVER, small_sets()[0], HERE, storage)
    save_model(config, storage, *run.load_trained(config, storage, 5, 5), list("01234"))
    model = load_classifier(storage)
    images = small_sets()[0].labeled_images[:9]
    assert export(model, "encoder")
    program = torch.export.load(io.BytesIO(export(model, "pt2"))).module()
    torch.testing.assert_close(
        program(images), model.score(images).probabilities, rtol=0, atol=1e-5
    )
