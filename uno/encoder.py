"""Encoders: torchvision's ResNets with either stem, and the small ResNet for tiny images.

State-dict keys are torchvision's (without ``fc``), so that trained encoders load anywhere. torchvision is
imported where a network is built: it takes 2 s, which processes that only decode need not pay.
"""

import torch
from torch import Tensor, nn

from uno.config import ModelConfig


class SmallResNet(nn.Module):
    """ResNet for tiny images (He et al. 2016, Sec. 4.2): 3x3 stem, three stages of widths w, 2w, 4w = D.

    Where the width changes the shortcut is torchvision's 1x1 convolution, not zero padding.
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, blocks, stride=1)
        self.layer2 = _stage(width, 2 * width, blocks, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, blocks, stride=2)
        self.num_features = 4 * width
        _init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, D)."""
        x = torch.relu(self.bn1(self.conv1(images)))
        return self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3))


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    from torchvision.models.resnet import BasicBlock

    shortcut = None
    if stride != 1 or inputs != outputs:
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
    first = BasicBlock(inputs, outputs, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs) for _ in range(blocks - 1)))


def _init_convolutions(module: nn.Module) -> None:
    """Kaiming normal, fan-out, for all convolutions (the authors' choice for low-resolution stems)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def build_encoder(config: ModelConfig) -> nn.Module:
    """Encoder module (B, 3, S, S) -> (B, D) with attribute ``num_features`` = D."""
    if config.encoder == "resnet_small":
        return SmallResNet(config.width, config.blocks)
    from torchvision.models import resnet

    encoder = getattr(resnet, config.encoder)()
    encoder.num_features = encoder.fc.in_features  # D
    encoder.fc = nn.Identity()
    if config.stem == "small":
        encoder.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        encoder.maxpool = nn.Identity()
        _init_convolutions(encoder)
    return encoder
