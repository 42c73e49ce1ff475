"""Every operation against torchvision's with the same parameters."""

import math

import pytest
import torch
from torchvision.transforms import functional as pil_functional
from torchvision.transforms.v2 import functional as tv

from tests.uno.pictures import (
    EVERYTHING,
    LEVEL,
    check_both_dtypes,
    draw,
    per_row,
    photos,
    uniform,
)
from uno import augment as color
from uno.augment import affine, apply, blur, crop_weights, resample
from uno.config import ViewConfig

ADJUST = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue]
BOXES = [
    (0, 0, 64, 64),
    (3, 10, 40, 31),
    (20, 5, 17, 44),
    (50, 60, 4, 3),
    (0, 33, 64, 20),
    (7, 7, 24, 24),
    (63, 0, 1, 64),
]


@pytest.mark.parametrize("size", [8, 24, 64, 90])
def test_resized_crop_equals_torchvision(size):
    """Kills: no antialiasing, not normalized, taps outside the box, half a pixel
    off, axes swapped.
    """
    images = photos(len(BOXES), 64)
    box = torch.tensor(BOXES, dtype=torch.float32)
    never = torch.zeros(2, len(BOXES), dtype=torch.bool)
    down, across = crop_weights(box.T[:2], box.T[2:], never, size, 64)
    result = resample(images, down / 255, across)

    def reference(image, top, left, height, width):
        return tv.resized_crop(
            image, top, left, height, width, [size, size], antialias=True
        )

    columns = [torch.tensor(c) for c in zip(*BOXES, strict=True)]
    torch.testing.assert_close(
        result, per_row(reference, images / 255, *columns), atol=2e-5, rtol=0
    )
    # two passes round
    assert (result * 255 - per_row(reference, images, *columns)).abs().max() <= 1.01
    for image, row, ours in zip(images, BOXES, result, strict=True):
        pil = pil_functional.resized_crop(
            pil_functional.to_pil_image(image), *row, [size, size]
        )
        assert (ours * 255 - pil_functional.pil_to_tensor(pil)).abs().max() <= 1.01
    for row, ours in enumerate(result):
        if min(BOXES[row][2:]) == max(BOXES[row][2:]) <= size:
            plain = tv.resized_crop(
                images[row] / 255, *BOXES[row], [size, size], antialias=False
            )
            torch.testing.assert_close(ours, plain, atol=2e-5, rtol=0)


def test_crop_after_padding_copies_pixels():
    """Kills: reflected or replicated border, shift off by one, interpolation in a
    copy, axes swapped.
    """
    images = photos(81, 16)
    config = ViewConfig(
        size=16, crop="pad", crop_padding=4, flip=0, jitter=0, grayscale=0
    )
    draws = draw(config, len(images), 16)
    padded = tv.pad(images, [4, 4, 4, 4])
    places = draws.box[:, :2].long() + 4
    expected = per_row(
        lambda image, top, left: tv.crop(image, top, left, 16, 16), padded, *places.T
    )
    torch.testing.assert_close(
        apply(images, draws, config), expected / 255, atol=1e-7, rtol=0
    )
    assert places.min() == 0 and places.max() == 8  # both ends of the range occur


def test_affine_equals_torchvision():
    """Kills: forward map, sign of angle, shear or shift, shift zoomed, corners
    aligned, border kept.
    """
    images = photos(40, 16)
    ranges = ((-90, 90), (-30, 30), (-0.3, 0.3), (-0.3, 0.3), (0.6, 1.6))
    pose = torch.stack(
        [uniform(40, *limits, seed) for seed, limits in enumerate(ranges, 1)], dim=1
    )

    def reference(image, angle, shear, x, y, zoom):
        bilinear = pil_functional.InterpolationMode.BILINEAR
        # With fill=0 torchvision would weigh the border's pixels twice.
        return tv.affine(image, angle, [16 * x, 16 * y], zoom, [shear, 0.0], bilinear)

    check_both_dtypes(
        lambda im, *columns: affine(im, torch.stack(columns, dim=1)),
        reference,
        images,
        *pose.T,
        atol=2e-4,
    )


@pytest.mark.parametrize(
    "operation", [color.BRIGHTNESS, color.CONTRAST, color.SATURATION]
)
def test_blends_equal_torchvision(operation):
    """Kills: no clamp, mean of channels for luma, contrast about 0.5, batch
    statistics, factor inverted.
    """

    def ours(floats, factor):
        return color.blend_(floats, factor, torch.full((30,), operation))

    check_both_dtypes(ours, ADJUST[operation], photos(30), uniform(30, 0, 2))


def test_hue_equals_torchvision():
    """Kills: turn the other way, sixths swapped, no wrap around red, NaN or a color
    cast on gray pixels.
    """
    images = photos(48)
    shift = torch.cat(
        [uniform(44, -0.5, 0.5), torch.tensor([0.5, -0.5, 1 / 3, -1 / 6])]
    )
    check_both_dtypes(color.hue_, tv.adjust_hue, images, shift, atol=1e-5)
    primaries = torch.tensor(
        [
            [1.0, 0, 0],
            [0, 1, 0],
            [0, 0, 1],
            [1, 1, 0],
            [0, 1, 1],
            [1, 0, 1],
            [0, 0, 0],
            [0.5, 0.5, 0.5],
        ]
    )
    turned = color.hue_(
        primaries.view(8, 3, 1, 1).clone(), torch.full((8,), 1 / 3)
    ).view(8, 3)
    torch.testing.assert_close(turned, primaries.roll(1, dims=1), atol=1e-6, rtol=0)


def test_gray_solarize_equal_torchvision():
    """Kills: equal channel weights, one channel only, inversion below the threshold,
    a shared threshold.
    """
    images = photos(20)
    floats = images / 255
    reference = torch.stack(
        [tv.rgb_to_grayscale(image, num_output_channels=3) for image in floats]
    )
    torch.testing.assert_close(color.grayscale(floats), reference, atol=1e-6, rtol=0)

    def solarized(image, threshold):
        return tv.solarize(
            image, threshold if image.is_floating_point() else 255 * threshold
        )

    check_both_dtypes(color.solarize, solarized, images, uniform(20, 0.2, 0.8))
    exact = torch.tensor([100, 101, 99], dtype=torch.uint8).view(1, 3, 1, 1) / 255
    at_threshold = color.solarize(exact, exact[:, 0, 0, 0])
    # at or above
    assert (at_threshold * 255).round().flatten().tolist() == [155, 154, 99]


@pytest.mark.parametrize("side", [8, 18, 32, 40])
def test_equalize_equals_pil_and_torchvision(side):
    """Kills: histogram over all channels or the batch, brightest level counted, no
    rounding, step 0.
    """
    images = photos(12, side)
    images[0], images[1, 0], images[2, :, ::2] = 7, 200, 13
    result = color.equalize(images / 255) * 255
    expected = torch.stack([tv.equalize(i) for i in images]).float()
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
    for image, ours in zip(images, result, strict=True):
        pil = pil_functional.equalize(pil_functional.to_pil_image(image))
        assert (ours.round() == pil_functional.pil_to_tensor(pil)).all()
    assert side == 8 or (result - images).abs().mean() > 1
    # floats are rounded to the nearest level
    nearly = color.equalize(images / 255 + 0.3 * LEVEL) * 255
    torch.testing.assert_close(nearly[3:], result[3:], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("side", "radius"), [(20, 8), (18, 3), (9, 8)])
def test_blur_equals_torchvision(side, radius):
    """Kills: zero padding, border repeated, a shared sigma, taps not normalized,
    variance for deviation.
    """

    def reference(image, sigma):
        return tv.gaussian_blur(image, [2 * radius + 1] * 2, [sigma] * 2)

    check_both_dtypes(
        lambda im, s: blur(im, s, radius),
        reference,
        photos(16, side),
        uniform(16, 0.4, 2.5),
    )
    sharp = photos(2, side) / 255
    torch.testing.assert_close(
        blur(sharp, torch.full((2,), 0.1), radius), sharp, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("off", ["blends", "hue"])
def test_jitter_without_hue_or_blends(off):
    """Kills: the skipped half of the work also skips the other half."""
    images = photos(24) / 255
    factors = torch.full((24, 4), 0.6)
    factors[:, slice(3) if off == "blends" else 3] = 1.0 if off == "blends" else 0.0
    result = color.jitter_(images.clone(), torch.arange(24), factors, torch.arange(24))
    expected = images.clone()
    for row in range(24):
        for op in color.JITTER_ORDERS[row]:
            # a hue shift of 0.6 of the circle is one of -0.4
            if (op == color.HUE) == (off == "blends"):
                expected[row] = ADJUST[op](
                    expected[row], -0.4 if op == color.HUE else 0.6
                )
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def reference_view(
    image: torch.Tensor, draws, row: int, config: ViewConfig
) -> torch.Tensor:
    """One view by torchvision on one float image (3,S,S), from the parameters of a
    row.
    """
    size = config.size
    x = tv.resized_crop(
        image, *draws.box[row].int().tolist(), [size, size], antialias=True
    )
    if draws.flip[row]:
        x = tv.horizontal_flip(x)
    if draws.affine[row]:
        angle, shear, shift_x, shift_y, zoom = draws.pose[row].tolist()
        bilinear = pil_functional.InterpolationMode.BILINEAR
        x = tv.affine(
            x, angle, [size * shift_x, size * shift_y], zoom, [shear, 0.0], bilinear
        )
    if draws.jitter[row]:
        for op in color.JITTER_ORDERS[int(draws.order[row])]:
            x = ADJUST[op](x, draws.factors[row, op].item())
    x = tv.rgb_to_grayscale(x, num_output_channels=3) if draws.grayscale[row] else x
    x = tv.solarize(x, draws.threshold[row].item()) if draws.solarize[row] else x
    x = (
        tv.equalize((255 * x).round().to(torch.uint8)) / 255
        if draws.equalize[row]
        else x
    )
    if draws.blur[row]:
        kernel = 2 * math.ceil(4 * config.blur_sigma[1]) + 1
        x = tv.gaussian_blur(x, [kernel, kernel], [draws.sigma[row].item()] * 2)
    return x


def test_whole_view_equals_torchvision_row_by_row():
    """With all 24 orders of the jitter. Kills: operations in another order, one order
    for all rows, parameters of another row, an operation on unchosen rows.
    """
    assert len(set(color.JITTER_ORDERS)) == 24
    images = photos(200)
    draws = draw(EVERYTHING, 200, 32)
    floats = images / 255
    expected = torch.stack(
        [reference_view(x, draws, row, EVERYTHING) for row, x in enumerate(floats)]
    )
    error = (apply(images, draws, EVERYTHING) - expected).abs().flatten(1)
    # these two turn a rounding error at a step into many levels
    smooth = ~(draws.equalize | draws.solarize)
    assert 60 < smooth.sum() < 140
    assert error[smooth].max() <= 3e-4
    assert error.mean(dim=1).max() <= LEVEL / 4 and error.mean(dim=1).median() <= 2e-5
