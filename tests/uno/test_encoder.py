"""Encoders keep torchvision's names, so that weights travel in both directions."""

import math

import pytest
import torch
import torchvision
from torch import nn

from uno.config import ModelConfig
from uno.encoder import build_encoder


def encoder_of(name: str, stem: str = "small", **options):
    torch.manual_seed(0)
    return build_encoder(ModelConfig(encoder=name, stem=stem, **options))


def layer_shapes(encoder: nn.Module, size: int) -> dict[str, tuple[int, ...]]:
    """What the stages give for two images."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in encoder.named_children():
        if name.startswith("layer"):
            layer.register_forward_hook(lambda m, i, o, name=name: shapes.update({name: tuple(o.shape)}))
    with torch.inference_mode():
        assert encoder(torch.randn(2, 3, size, size)).shape == (2, encoder.num_features)
    return shapes


@pytest.mark.parametrize("stem", ["small", "imagenet"])
@pytest.mark.parametrize(("name", "num_features"), [("resnet18", 512), ("resnet34", 512), ("resnet50", 2048)])
def test_keys_are_torchvisions(name, num_features, stem):
    """Kills: renamed layers, a classifier left in the encoder, the wrong feature size."""
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)()
        ours = build_encoder(ModelConfig(encoder=name, stem=stem))
    expected = {key: value.shape for key, value in theirs.state_dict().items() if not key.startswith("fc.")}
    found = {key: value.shape for key, value in ours.state_dict().items()}
    if stem == "small":
        assert found["conv1.weight"] == (64, 3, 3, 3)
        found["conv1.weight"] = expected["conv1.weight"]
    assert found == expected
    assert ours.num_features == num_features


def test_weights_load_into_torchvision_and_give_its_features():
    """Kills: a stem, pooling or block order other than torchvision's, a small stem that reduces."""
    ours = encoder_of("resnet18", "imagenet").eval()
    theirs = torchvision.models.resnet18()
    missing = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert sorted(missing.missing_keys) == ["fc.bias", "fc.weight"]
    assert missing.unexpected_keys == []
    theirs.fc = nn.Identity()
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs.eval()(images))
    for stem, first, last in (("small", 32, 4), ("imagenet", 8, 1)):
        shapes = layer_shapes(encoder_of("resnet18", stem).eval(), 32)
        assert [shapes[name][-1] for name in ("layer1", "layer4")] == [first, last]


@pytest.mark.parametrize(
    ("name", "stem"), [("resnet18", "small"), ("resnet18", "imagenet"), ("resnet_small", "small")]
)
def test_convolutions_start_kaiming_fan_out(name, stem):
    """Kills: fan-in (differs where channels or strides change), PyTorch's default (sqrt(1 / (3 fan_in)))."""
    encoder = encoder_of(name, stem, width=32)
    checked = 0
    for layer in encoder.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 1000:
            fan_out = layer.out_channels * layer.kernel_size[0] * layer.kernel_size[1]
            assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize(("width", "blocks", "size"), [(4, 1, 8), (16, 1, 8), (16, 3, 32), (8, 2, 5)])
def test_small_resnet_shapes(width, blocks, size):
    """He et al., Sec. 4.2, has 6n + 2 layers with the classifier and without the shortcuts.

    Kills: strides in the wrong stage, a fixed input size, num_features other than 4 widths.
    """
    encoder = encoder_of("resnet_small", width=width, blocks=blocks).eval()
    half, quarter = -(-size // 2), -(-size // 4)
    assert layer_shapes(encoder, size) == {
        "layer1": (2, width, size, size),
        "layer2": (2, 2 * width, half, half),
        "layer3": (2, 4 * width, quarter, quarter),
    }
    assert encoder.num_features == 4 * width
    kernels = [layer.kernel_size for layer in encoder.modules() if isinstance(layer, nn.Conv2d)]
    assert kernels.count((3, 3)) == 6 * blocks + 1
