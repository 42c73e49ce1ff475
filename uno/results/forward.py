"""The one forward pass over rows: whoever looks at rows without training on them asks here."""

import torch
from torch import Tensor

from uno.augment import eval_view
from uno.config import Config
from uno.model import Logits, UnoModel


@torch.inference_mode()
def forward(model: UnoModel, images: Tensor, config: Config) -> Logits:
    """What ``model``, in eval mode, says of images uint8 (B, 3, S, S) under the evaluation view: V = 1.

    Images may be on any device; the result is on the model's.
    """
    assert not model.training
    side = min(config.augment.large.size, images.shape[-1])
    images = images.to(model.known.weight.device, non_blocking=True)
    return model([eval_view(images, side, config.data.mean, config.data.std)])


def features_of(model: UnoModel, images: Tensor, config: Config) -> Tensor:
    """Pooled features z (N, D) float32, on the model's device, of images uint8 (N, 3, S, S), N >= 1."""
    parts = []
    for part in images.split(config.train.eval_batch_size):
        features = forward(model, part, config).features
        assert features is not None
        parts.append(features[0].float())
    return torch.cat(parts)
