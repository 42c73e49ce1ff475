"""Encoders keep torchvision's names, so that weights travel in both directions."""

import math
import re
import sys
from unittest.mock import Mock

import pytest
import torch
import torchvision
from torch import nn

from tests.uno.data.builders import failure
from uno.config import Config, ModelConfig, override
from uno.encoders.build import build_encoder, frozen_parts
from uno.encoders.weights import load_encoder_


def encoder_of(name: str, stem: str = "cifar", **options):
    torch.manual_seed(0)
    return build_encoder(ModelConfig(encoder=name, stem=stem, **options))


def layer_shapes(encoder: nn.Module, size: int) -> dict[str, tuple[int, ...]]:
    """What the stages give for two images."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in encoder.named_children():
        if name.startswith("layer"):
            layer.register_forward_hook(
                lambda m, i, o, name=name: shapes.update({name: tuple(o.shape)})
            )
    with torch.inference_mode():
        assert encoder(torch.randn(2, 3, size, size)).shape == (2, encoder.num_features)
    return shapes


@pytest.mark.parametrize(
    ("stem", "first_shape"),
    [
        ("cifar", (64, 3, 3, 3)),
        ("cifar_stride2", (64, 3, 4, 4)),
        ("imagenet", (64, 3, 7, 7)),
    ],
)
@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_keys_are_torchvisions(name, stem, first_shape):
    """Kills: renamed layers, a classifier left in the encoder, the wrong feature
    size.
    """
    with torch.device("meta"):
        theirs = torchvision.models.get_model(name)
        ours = build_encoder(ModelConfig(encoder=name, stem=stem))
    assert ours.num_features == theirs.fc.in_features
    theirs.fc = nn.Identity()
    expected = {key: value.shape for key, value in theirs.state_dict().items()}
    expected["conv1.weight"] = first_shape
    assert {key: value.shape for key, value in ours.state_dict().items()} == expected


@pytest.mark.parametrize(
    ("stem", "convolution"),
    [("imagenet", (7, 2, 3)), ("cifar", (3, 1, 1)), ("cifar_stride2", (4, 2, 1))],
)
def test_weights_load_into_torchvision_and_give_its_features(stem, convolution):
    """A stem for small images has another first convolution (kernel size, stride,
    padding) and no pooling. Kills: a stem, pooling or block order other than
    torchvision's.
    """
    ours = encoder_of("resnet18", stem).eval()
    theirs = torchvision.models.resnet18()
    theirs.conv1 = nn.Conv2d(3, 64, *convolution, bias=False)
    if stem != "imagenet":
        theirs.maxpool = nn.Identity()
    theirs.fc = nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs.eval()(images))


@pytest.mark.parametrize(
    ("name", "stem"),
    [("resnet18", "cifar"), ("resnet18", "imagenet"), ("resnet_small", "cifar")],
)
def test_convolutions_start_kaiming_fan_out(name, stem):
    """Kills: fan-in (differs where channels or strides change), PyTorch's default
    (sqrt(1 / (3 fan_in))).
    """
    layers = [
        layer
        for layer in encoder_of(name, stem, width=32).modules()
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 1000
    ]
    assert len(layers) >= 5
    for layer in layers:
        fan_out = layer.out_channels * math.prod(layer.kernel_size)
        spread = float(layer.weight.detach().std())
        assert spread == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)


@pytest.mark.parametrize(
    ("width", "blocks", "size", "options"),
    [
        (4, 1, 8, {}),
        (16, 1, 8, {}),
        (16, 3, 32, {}),
        (8, 2, 5, {}),
        (8, 1, 32, {"stages": 4, "stem": "cifar_stride2"}),
    ],
)
def test_small_resnet_shapes(width, blocks, size, options):
    """He et al., Sec. 4.2, has 6n + 2 layers with the classifier and without the
    shortcuts.

    Kills: strides in the wrong stage, a fixed input size, num_features other than the
    last stage's.
    """
    encoder = encoder_of("resnet_small", width=width, blocks=blocks, **options).eval()
    stages, halved = options.get("stages", 3), "stem" in options
    sides = [-(-size // 2 ** (i + halved)) for i in range(stages)]
    expected = {
        f"layer{i + 1}": (2, width * 2**i, side, side) for i, side in enumerate(sides)
    }
    assert layer_shapes(encoder, size) == expected
    kernels = [
        layer.kernel_size for layer in encoder.modules() if isinstance(layer, nn.Conv2d)
    ]
    assert kernels.count((3, 3)) == 2 * stages * blocks + (not halved)


@pytest.mark.parametrize("size", [8, 5])
def test_shortcuts_of_few_channels_are_strided_convolutions(size):
    """Against torch's strided convolution in float64, which oneDNN does not compute.

    Kills: the strided gradient of fewer than 8 channels, which AVX2 writes past its
    buffer; another offset.
    """
    encoder = encoder_of("resnet_small", width=4, blocks=1).to(
        memory_format=torch.channels_last
    )
    shortcut = encoder.layer2[0].downsample[:-1]
    strided = nn.Conv2d(4, 8, 1, 2, bias=False).double()
    strided.load_state_dict({"weight": shortcut.state_dict()["0.weight"]})
    images = torch.randn(32, 4, size, size).to(memory_format=torch.channels_last)
    found, expected = shortcut(images), strided(images.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(found)
    found.backward(weights)
    expected.backward(weights.double())
    torch.testing.assert_close(
        shortcut[-1].weight.grad.double(), strided.weight.grad, atol=1e-4, rtol=1e-4
    )


TOYS = "tests.uno.toy_encoders"


def test_an_encoder_with_classifiers_in_its_middle_loses_them(monkeypatch):
    """In training they would be part of what it returns."""
    whole = torchvision.models.googlenet(weights=None, init_weights=False)
    monkeypatch.setattr(torchvision.models, "get_model", Mock(return_value=whole))
    weights = whole.state_dict()
    encoder = encoder_of("torchvision:googlenet").train()
    assert encoder(torch.rand(2, 3, 64, 64)).shape == (2, 1024)
    load_encoder_(encoder, weights, "a file")


@pytest.mark.parametrize(
    ("name", "classifier", "num_features"),
    [
        ("torchvision:mobilenet_v3_small", "classifier.3", 1024),
        ("torchvision:regnet_x_400mf", "fc", 400),
        ("timm:test_vit", "head", 64),
        ("timm:mobilenetv3_small_050", "classifier", 1024),
    ],
)
def test_library_encoders_keep_the_librarys_keys_and_lose_its_classifier(
    name, classifier, num_features
):
    """The width D of a MobileNet is that of its last hidden layer."""
    library, _, what = name.partition(":")
    if library == "timm":
        theirs = pytest.importorskip("timm").create_model(what).eval()
    else:
        theirs = torchvision.models.get_model(what).eval()
    ours = encoder_of(name).eval()
    assert ours.num_features == num_features
    keys = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert keys.unexpected_keys == []
    missing = [f"{classifier}.bias", f"{classifier}.weight"]
    assert sorted(keys.missing_keys) == missing
    theirs.set_submodule(classifier, nn.Identity())
    images = torch.randn(2, 3, *2 * [160 if what == "test_vit" else 64])
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(
    ("what", "num_features", "vectors"),
    [
        ("maps", 5, lambda x: torch.stack([i.flatten(1).mean(dim=1) for i in x])),
        ("tokens", 6, lambda x: sum(x[:, i] for i in range(4)) / 4),
        ("class_token", 6, lambda x: x[:, 0]),
        ("vit", 16, lambda x: x),
    ],
)
def test_callables_give_one_vector_an_image(what, num_features, vectors):
    """Kills: a map that is flattened, the mean over a class token too, a first token
    that is none.
    """
    encoder = encoder_of(f"{TOYS}:{what}").eval()
    assert encoder.num_features == num_features
    raw = []
    encoder.register_forward_hook(lambda m, i, output: raw.append(output), prepend=True)
    found = encoder(torch.randn(2, 3, 8, 8))
    assert found.shape == (2, num_features)
    torch.testing.assert_close(found, vectors(raw[0]))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "resnet19",
            r"^model\.encoder: must be resnet_small, .*:callable \(got 'resnet19'\)$",
        ),
        ("timm:", r"^model\.encoder: must be "),
        (
            "torchvision:resnet19",
            r": torchvision has no 'resnet19'; did you mean torchvision:resnet",
        ),
        ("torchvision:fasterrcnn_resnet50_fpn", r"torchvision has no 'fasterrcnn"),
        (
            "torchvision:squeezenet1_0",
            r"does not end in a linear classifier; choose another$",
        ),
        (
            "timm:test_vitt",
            r"^model\.encoder: timm has no 'test_vitt'; did you mean timm:test_vit\?$",
        ),
        (
            "timm:test_vit.of_mine",
            r"'test_vit\.of_mine'; did you mean timm:test_vit\.r160_in1k\?$",
        ),
        (
            "no_such_package.x:y",
            r"cannot be imported: No module named 'no_such_package'$",
        ),
        (
            f"{TOYS}:no_such",
            r"no_such cannot be imported: module '.*' has no attribute 'no_such'$",
        ),
        (f"{TOYS}:NOT_CALLABLE", r"NOT_CALLABLE cannot be called: it is of type int$"),
        (f"{TOYS}:needs_argument", r"cannot be called without arguments: .* 'width'$"),
        (f"{TOYS}:number", r"must return a torch\.nn\.Module, not a int$"),
        (f"{TOYS}:flat", r"returns \(1,\), not vectors"),
        (f"{TOYS}:pair", r"returns tuple, not vectors"),
    ],
)
def test_encoders_that_are_none_are_one_line(name, line):
    """Kills: a traceback, a line that does not say what is wrong or what is there
    instead.
    """
    if name.startswith("timm:t"):
        pytest.importorskip("timm")
    values = {"model.encoder": name}
    found = failure(lambda: build_encoder(override(Config(), values).model))
    assert re.search(line, found)


def test_without_timm_the_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    line = r"^model\.encoder timm:test_vit needs .*: pip install timm$"
    assert re.search(line, failure(encoder_of, "timm:test_vit"))


def test_a_callable_is_found_in_the_working_directory(tmp_path, monkeypatch):
    """Kills: a search path that keeps the directory, or that puts it before what is
    installed.
    """
    (tmp_path / "my_encoders.py").write_text(
        "import torch\ndef build(): return torch.nn.Conv2d(3, 4, 1)\n"
    )
    (tmp_path / "shutil.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert encoder_of("my_encoders:build").num_features == 4
    assert sys.path == before
    del sys.modules["my_encoders"]


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("resnet_small", ["layer3."]),
        ("resnet18", ["layer4."]),
        ("torchvision:mobilenet_v2", ["features.17.", "features.18."]),
        (f"{TOYS}:vit", ["encoder.layers.encoder_layer_1.", "encoder.ln."]),
        ("timm:test_vit", ["blocks.5.", "norm."]),
        ("timm:test_convnext", ["stages.3.", "head."]),
    ],
)
def test_last_trains_the_last_stage_and_what_follows(name, trained):
    """Kills: a head convolution taken for the last stage, a frozen final norm, a
    class token that learns.
    """
    if name.startswith("timm"):
        pytest.importorskip("timm")
    encoder = encoder_of(name)
    modules, parameters = frozen_parts(encoder, "last")
    for part in modules:
        parameters += encoder.get_submodule(part).parameters()
    frozen = set(map(id, parameters))
    found = [key for key, p in encoder.named_parameters() if id(p) not in frozen]
    keys = [key for key, _ in encoder.named_parameters()]
    assert found == [key for key in keys if key.startswith(tuple(trained))]
    assert all(any(key.startswith(part) for key in found) for part in trained)


def test_last_of_an_encoder_without_stages_is_one_line():
    encoder = encoder_of(f"{TOYS}:maps")
    line = r"^model\.finetune last_stage: .*; use full or none$"
    assert re.search(line, failure(frozen_parts, encoder, "last_stage"))
    assert frozen_parts(encoder, "none") == ([""], [])
