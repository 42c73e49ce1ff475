"""Crops cut on the CPU: torchvision's, from an image that is decoded once."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2

from tests.uno.data.builders import encoded
from uno import crops
from uno.augment import (
    BOX_NUMBERS,
    augment,
    augment_crops,
    resized_boxes,
    sample_uniforms,
)
from uno.config import AugmentConfig, ViewConfig
from uno.crops import Cropper, crop_
from uno.data.decode import Decoding
from uno.data.sampling import augment_generator

PLAIN = dict(flip=0.0, jitter=0.0, grayscale=0.0)
RESIZED = ViewConfig(size=24, crop="resized", crop_scale=(0.3, 1.0), **PLAIN)
STATS = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture with structure at the scale of real ones."""
    noise = np.random.default_rng(seed).integers(
        0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8
    )
    return np.asarray(
        Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
    )


def cropper(**augment_fields) -> Cropper:
    return Cropper(7, 0, 6, AugmentConfig(**augment_fields), 16)


@pytest.mark.parametrize(
    "box", [(10, 20, 60, 90), (0, 0, 120, 160), (5, 7, 9, 14), (30, 30, 24, 24)]
)
def test_crops_are_torchvisions(box):
    """On average within 1 of 255. Kills: rows for columns, no antialiasing, a crop
    taken after resizing.
    """
    pixels = torch.from_numpy(smooth(120, 160).copy())
    view = torch.empty(3, 24, 24, dtype=torch.uint8)
    crop_(view, pixels, box)
    expected = v2.functional.resized_crop(
        pixels.permute(2, 0, 1).float(), *box, [24, 24], antialias=True
    )
    assert (view.float() - expected).abs().mean() < 0.5
    picture = Image.fromarray(pixels.numpy())
    pillow = np.asarray(v2.functional.resized_crop(picture, *box, [24, 24]), np.float32)
    assert np.abs(view.permute(1, 2, 0).numpy() - pillow).mean() < 1


def test_boxes_of_any_shape_are_inside_and_uniform():
    """Area and ratio in their ranges, position uniform. Kills: height and width
    exchanged.
    """
    numbers = sample_uniforms(2000, 1, torch.Generator().manual_seed(2))[
        :, 0, :BOX_NUMBERS
    ].numpy()
    top, left, height, width = resized_boxes((0.3, 0.8), numbers, 300, 400).T
    area, ratio = height * width / 120_000, width / height
    limits = (
        (top, 0, 300 - height),
        (left, 0, 400 - width),
        (area, 0.295, 0.81),
        (ratio, 0.74, 1.35),
    )
    for values, low, high in limits:
        assert ((values >= low) & (values <= high)).all()
    assert (
        0.5 < area.mean() < 0.57
        and abs((top / np.maximum(300 - height, 1)).mean() - 0.5) < 0.03
    )


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(10, 100, (0, 43, 10, 13)), (100, 9, (44, 0, 12, 9))],
)
def test_extreme_shapes_take_the_middle(height, width, expected):
    """torchvision's fallback: no box of that area fits."""
    numbers = sample_uniforms(1, 1, torch.Generator().manual_seed(0))[
        0, :, :BOX_NUMBERS
    ].numpy()
    assert resized_boxes((0.99, 1.0), numbers, height, width).tolist() == [
        list(expected)
    ]


def test_an_image_is_decoded_once_and_turned_upright(monkeypatch):
    """EXIF orientation 6 equals the picture turned before. Kills: a second decode
    per view, EXIF ignored.
    """
    decode_rgb = Mock(wraps=crops.decode_rgb)
    monkeypatch.setattr(crops, "decode_rgb", decode_rgb)
    small = RESIZED.model_copy(update={"num_views": 3, "size": 9})
    plain, first = cropper(large=RESIZED, small=small), np.zeros(1, int)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    turned = encoded(np.rot90(smooth(40, 64), 1), "JPEG", quality=95, exif=exif)
    pixels, reasons = plain.crop(first, first, [turned])
    assert reasons == [None]
    decode_rgb.assert_called_once()
    upright, _ = plain.crop(first, first, [smooth(40, 64)])
    assert np.abs(pixels.astype(int) - upright).mean() < 6  # JPEG's own loss
    shapes = [part.shape for part in plain.split(torch.from_numpy(pixels))]
    assert shapes == [(1, 2, 3, 24, 24), (1, 3, 3, 9, 9)]


def test_views_do_not_depend_on_who_cuts_them_or_when():
    """Rows of two steps in any grouping. Kills: numbers drawn per call, per chunk or
    globally.
    """
    some = cropper(large=RESIZED)
    images = [smooth(30 + i, 50, seed=i) for i in range(6)]
    steps, places = np.array([4, 4, 4, 5, 5, 5]), np.array([0, 2, 5, 0, 2, 5])
    whole, _ = some.crop(steps, places, images)
    for part in (slice(0, 2), slice(2, 5), slice(5, 6)):
        found, _ = some.crop(steps[part], places[part], images[part])
        assert (found == whole[part]).all()
    again, _ = some.crop(steps[3:], places[3:], images[:3])
    assert not (again == whole[:3]).all(axis=1).any()  # another step, other crops


def test_a_bad_image_has_a_reason_and_black_views():
    images = [
        smooth(20, 20),
        b"no image",
        encoded(smooth(40, 40), "JPEG")[:300],
        "/nowhere/x.jpg",
    ]
    pixels, reasons = cropper(large=RESIZED).crop(
        np.zeros(4, int), np.arange(4), images
    )
    assert reasons[0] is None and pixels[0].any() and not pixels[1:].any()
    assert (
        "not a readable" in reasons[1] and reasons[2] and "No such file" in reasons[3]
    )


@pytest.mark.parametrize("crop", ["none", "pad", "pad_or_resized"])
def test_crops_of_the_stored_square_give_the_resident_views(crop):
    """Everything but ``resized`` starts from the square that a resident set would hold;
    the difference is the rounding to 8 bits. Kills: numbers of another row, flips or
    colors drawn apart from the crops.
    """
    kind = ViewConfig(
        size=16 if crop == "none" else 12,
        crop=crop,
        crop_padding=2,
        crop_scale=(0.5, 1.0),
        jitter=0.7,
        grayscale=0.3,
        blur=0.3,
    )
    config = AugmentConfig(large=kind, small=kind.model_copy(update={"num_views": 1}))
    rows = torch.tensor([1, 3, 4])
    images = [smooth(16, 16, seed=i) for i in rows.tolist()]
    stored = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    expected = augment(stored, config, augment_generator(7, 0, 2), *STATS, rows, 6)
    some = Cropper(7, 0, 6, config, 16)
    pixels, _ = some.crop(np.full(3, 2), rows.numpy(), images)
    parts = some.split(torch.from_numpy(pixels))
    found = augment_crops(
        parts, config, augment_generator(7, 0, 2), *STATS, rows, 6, 16
    )
    assert [view.shape for view in found] == [view.shape for view in expected]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < (0.002 if crop == "none" else 0.03)
        assert (a - b).abs().mean() < 0.003


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_crops_follow_the_interpolation(mode):
    view = torch.zeros(3, 9, 9, dtype=torch.uint8)
    image = torch.from_numpy(smooth(30, 40).copy())
    crop_(view, image, (2, 3, 14, 14), mode)
    part = image[2:16, 3:17].permute(2, 0, 1)[None]
    expected = F.interpolate(part, size=(9, 9), mode=mode, antialias=True)[0]
    assert torch.equal(view, expected)


@pytest.mark.parametrize("crop", ["resized", "pad"])
def test_views_follow_the_interpolation(crop):
    """Kills: crops of the whole image, or of the stored square, that stay bilinear."""
    config = AugmentConfig(large=ViewConfig(size=16, crop=crop))
    row = np.zeros(1, int), np.zeros(1, int), [smooth(30, 40)]
    (bilinear, _), (bicubic, _) = (
        Cropper(7, 0, 6, config, 16, Decoding(mode)).crop(*row)
        for mode in ("bilinear", "bicubic")
    )
    assert not np.array_equal(bilinear, bicubic)
