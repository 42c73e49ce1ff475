"""What a user may give as ``package.module:callable``, tiny."""

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer


def vit() -> nn.Module:
    """torchvision's vision transformer of two blocks, for 8 px."""
    encoder = VisionTransformer(8, 4, 2, 2, hidden_dim=16, mlp_dim=32, dropout=0.1)
    encoder.heads = nn.Identity()
    encoder.mean, encoder.std, encoder.interpolation = (
        (0.3, 0.3, 0.3),
        (0.4, 0.4, 0.4),
        "bicubic",
    )
    return encoder


def timm_vit() -> nn.Module:
    """timm's, which averages its tokens."""
    from timm.models import VisionTransformer as TimmVisionTransformer

    return TimmVisionTransformer(
        8, 4, num_classes=0, global_pool="avg", embed_dim=16, depth=2, num_heads=2
    )


def maps() -> nn.Module:
    """(B, 3, S, S) -> (B, 5, S, S)."""
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1))


class Tokens(nn.Module):
    """(B, 3, S, S) -> (B, T, 6) of which the first is a class token, if any."""

    def __init__(self, has_class_token: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.cls_token = (
            nn.Parameter(torch.full((1, 1, 6), 7.0)) if has_class_token else None
        )

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, T, 6)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = (
            [] if self.cls_token is None else [self.cls_token.expand(len(images), 1, 6)]
        )
        return torch.cat([*first, tokens], dim=1)


def tokens() -> nn.Module:
    """Without a class token."""
    return Tokens(False)


def class_token() -> nn.Module:
    """With one."""
    return Tokens(True)


def flat() -> nn.Module:
    """One number too few: (B,)."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 1, 1), nn.Flatten(0))


def pair() -> nn.Module:
    """No tensor at all, but a maximum and its index."""
    return nn.MaxPool2d(2, return_indices=True)


def needs_argument(width: int) -> nn.Module:
    """Cannot be called as it is."""
    return nn.Linear(width, width)


def number() -> int:
    """No module."""
    return 3


NOT_CALLABLE = 3
