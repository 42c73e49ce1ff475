"""Pictures, settings and comparisons that tests of the augmentation share."""

import torch
import torch.nn.functional as F

from uno.augment import AugmentParams, apply, sample_uniforms, to_params
from uno.config import ViewConfig

LEVEL = 1 / 255
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
EVERYTHING = ViewConfig(
    size=24,
    crop="resized",
    crop_scale=(0.3, 1.0),
    flip=0.5,
    affine=0.5,
    affine_degrees=20,
    affine_translate=0.1,
    affine_scale=(0.8, 1.2),
    affine_shear=10,
    jitter=0.8,
    brightness=0.4,
    contrast=0.5,
    saturation=0.6,
    hue=0.3,
    grayscale=0.2,
    solarize=0.3,
    equalize=0.3,
    blur=0.5,
    blur_sigma=(0.1, 1.5),
)
NOTHING = ViewConfig(size=32, crop="none", flip=0, jitter=0, grayscale=0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(num: int, side: int = 32, seed: int = 0) -> torch.Tensor:
    """Smooth colorful images with black, white and gray patches, uint8."""
    noise = torch.randn(num, 3, 8, 8, generator=seeded(seed))
    images = (F.interpolate(noise, side, mode="bicubic") * 70 + 128).clamp(0, 255)
    images[:, :, :4, :4], images[:, :, -4:, -4:], images[:, :, :4, -4:] = 0, 255, 90
    return images.round().to(torch.uint8)


def draw(config: ViewConfig, num_rows: int, side: int, seed: int = 0) -> AugmentParams:
    """Parameters of one view of each of ``num_rows`` images."""
    return to_params(config, sample_uniforms(num_rows, 1, seeded(seed)), side)


def view(images: torch.Tensor, config: ViewConfig, seed: int = 0) -> torch.Tensor:
    """One view of each image."""
    return apply(images, draw(config, len(images), images.shape[-1], seed), config)


def uniform(num: int, low: float, high: float, seed: int = 1) -> torch.Tensor:
    return torch.rand(num, generator=seeded(seed)) * (high - low) + low


def per_row(operation, images: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """A torchvision function applied row by row with Python numbers."""
    columns = [p.tolist() for p in parameters]
    return torch.stack(
        [operation(image, *row) for image, *row in zip(images, *columns, strict=True)]
    )


def check_both_dtypes(
    ours, reference, images, *parameters: torch.Tensor, atol: float = 2e-6
) -> None:
    """Equal to the reference on floats, and within a level on average of the
    reference on uint8 images.
    """
    floats = images / 255
    result = ours(floats.clone(), *parameters)
    torch.testing.assert_close(
        result, per_row(reference, floats, *parameters), atol=atol, rtol=0
    )
    rounded = per_row(reference, images, *parameters).float() / 255
    # not the identity
    assert (result - rounded).abs().mean() <= LEVEL < (result - floats).abs().mean()
    assert result.min() >= 0 and result.max() <= 1 + 1e-6
