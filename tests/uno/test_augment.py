import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as pil_functional
from torchvision.transforms.v2 import functional as tv

from uno import augment_color as color
from uno.augment import (
    affine,
    apply,
    augment,
    blur,
    crop_weights,
    draw,
    eval_view,
    normalize,
    resample,
    view,
)
from uno.config import AugmentConfig, ViewConfig
from uno.presets import preset

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
    grey=0.2,
    solarize=0.3,
    equalize=0.3,
    blur=0.5,
    blur_sigma=(0.1, 1.5),
)
NOTHING = ViewConfig(size=32, crop="none", flip=0, jitter=0, grey=0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors on a busy machine: a second thread waits more than it works."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def photos(num: int, side: int = 32, seed: int = 0) -> torch.Tensor:
    """Smooth colourful images with black, white and grey patches, uint8."""
    noise = torch.randn(num, 3, 8, 8, generator=seeded(seed))
    images = (F.interpolate(noise, side, mode="bicubic") * 70 + 128).clamp(0, 255)
    images[:, :, :4, :4], images[:, :, -4:, -4:], images[:, :, :4, -4:] = 0, 255, 90
    return images.round().to(torch.uint8)


def uniform(num: int, low: float, high: float, seed: int = 1) -> torch.Tensor:
    return torch.rand(num, generator=seeded(seed)) * (high - low) + low


def per_row(operation, images: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """A torchvision function applied row by row with Python numbers."""
    columns = [p.tolist() for p in parameters]
    return torch.stack([operation(image, *row) for image, *row in zip(images, *columns, strict=True)])


def check_both_dtypes(
    ours, reference, images: torch.Tensor, *parameters: torch.Tensor, atol: float = 2e-6
) -> None:
    """Equal to the reference on floats, and within a level on average of the reference on uint8 images."""
    floats = images / 255
    result = ours(floats.clone(), *parameters)
    torch.testing.assert_close(result, per_row(reference, floats, *parameters), atol=atol, rtol=0)
    rounded = per_row(reference, images, *parameters).float() / 255
    assert (result - rounded).abs().mean() <= LEVEL
    assert result.min() >= 0 and result.max() <= 1 + 1e-6
    assert (result - floats).abs().mean() > LEVEL  # the case is not the identity


# --- geometry, same parameters as torchvision


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
    """Kills: no antialiasing, not normalised, taps outside the box, half a pixel off, axes swapped."""
    images = photos(len(BOXES), 64)
    box = torch.tensor(BOXES, dtype=torch.float32)
    never = torch.zeros(2, len(BOXES), dtype=torch.bool)
    down, across = crop_weights(box.T[:2], box.T[2:], never, size, 64)
    result = resample(images, down / 255, across)

    def reference(image, top, left, height, width):
        return tv.resized_crop(image, top, left, height, width, [size, size], antialias=True)

    columns = [torch.tensor(c) for c in zip(*BOXES, strict=True)]
    torch.testing.assert_close(result, per_row(reference, images / 255, *columns), atol=2e-5, rtol=0)
    assert (result * 255 - per_row(reference, images, *columns)).abs().max() <= 1.01  # two passes round
    for image, row, ours in zip(images, BOXES, result, strict=True):
        pil = pil_functional.resized_crop(pil_functional.to_pil_image(image), *row, [size, size])
        assert (ours * 255 - pil_functional.pil_to_tensor(pil)).abs().max() <= 1.01
    for row, ours in enumerate(result):
        if min(BOXES[row][2:]) == max(BOXES[row][2:]) <= size:
            plain = tv.resized_crop(images[row] / 255, *BOXES[row], [size, size], antialias=False)
            torch.testing.assert_close(ours, plain, atol=2e-5, rtol=0)


def test_crop_after_padding_copies_pixels():
    """Kills: reflected or replicated border, shift off by one, interpolation in a copy, axes swapped."""
    images = photos(81, 16)
    config = ViewConfig(size=16, crop="pad", crop_padding=4, flip=0, jitter=0, grey=0)
    draws = draw(config, len(images), 16, seeded())
    padded = tv.pad(images, [4, 4, 4, 4])
    places = draws.box[:, :2].long() + 4
    expected = per_row(lambda image, top, left: tv.crop(image, top, left, 16, 16), padded, *places.T)
    torch.testing.assert_close(apply(images, draws, config), expected / 255, atol=1e-7, rtol=0)
    assert places.min() == 0 and places.max() == 8  # both ends of the range occur


@pytest.mark.parametrize("crop", ["none", "pad", "resized", "pad_or_resized"])
def test_flip(crop):
    """Kills: a flip at probability 0, no flip at 1, vertical flip, flip of the box in place of the pixels."""
    images = photos(64)
    off = NOTHING.model_copy(update=dict(crop=crop, flip=0.0, size=20 if crop == "resized" else 32))
    plain, mirrored = (view(images, off.model_copy(update=dict(flip=p)), seeded()) for p in (0.0, 1.0))
    torch.testing.assert_close(mirrored, plain.flip(3), atol=1e-6, rtol=0)
    assert (mirrored - plain).abs().mean() > 0.02
    ramp = torch.arange(32, dtype=torch.uint8).mul(7).add(30).expand(64, 3, 32, 32)
    result = view(ramp, off, seeded(3))
    assert (
        result.diff(dim=3).sum(dim=3)[result.amin(dim=3) > 0] > 0
    ).all()  # brighter to the right, as before


def test_affine_equals_torchvision():
    """Kills: forward map, sign of angle, shear or shift, shift zoomed, corners aligned, border kept."""
    images = photos(40, 16)
    pose = torch.stack(
        [
            uniform(40, -90, 90, 1),
            uniform(40, -30, 30, 2),
            uniform(40, -0.3, 0.3, 3),
            uniform(40, -0.3, 0.3, 4),
            uniform(40, 0.6, 1.6, 5),
        ],
        dim=1,
    )

    def reference(image, angle, shear, x, y, zoom):
        bilinear = pil_functional.InterpolationMode.BILINEAR
        # With fill=0 torchvision would weigh the border's pixels twice.
        return tv.affine(image, angle, [16 * x, 16 * y], zoom, [shear, 0.0], bilinear)

    check_both_dtypes(
        lambda im, *columns: affine(im, torch.stack(columns, dim=1)), reference, images, *pose.T, atol=2e-4
    )


def test_eval_view_is_the_centre():
    """Kills: corner for centre, wrong rounding of an odd margin, statistics swapped or not applied."""
    images = photos(3, 25)
    for size in (10, 24, 25):
        expected = tv.normalize(tv.center_crop(images, [size, size]) / 255, MEAN, STD)
        torch.testing.assert_close(eval_view(images, size, MEAN, STD), expected, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="26 pixels exceeds the stored side of 25"):
        eval_view(images, 26, MEAN, STD)


# --- colour, same parameters as torchvision


@pytest.mark.parametrize(
    ("operation", "reference"),
    [
        (color.BRIGHTNESS, tv.adjust_brightness),
        (color.CONTRAST, tv.adjust_contrast),
        (color.SATURATION, tv.adjust_saturation),
    ],
)
def test_blends_equal_torchvision(operation, reference):
    """Kills: no clamp, mean of channels for luma, contrast about 0.5, batch statistics, factor inverted."""
    images = photos(30)

    def ours(floats, factor):
        return color.blend_(floats, factor, torch.full((30,), operation))

    check_both_dtypes(ours, reference, images, uniform(30, 0, 2))


def test_hue_equals_torchvision():
    """Kills: turn the other way, sixths swapped, no wrap around red, NaN or a colour cast on grey pixels."""
    images = photos(48)
    shift = torch.cat([uniform(44, -0.5, 0.5), torch.tensor([0.5, -0.5, 1 / 3, -1 / 6])])
    check_both_dtypes(color.hue_, tv.adjust_hue, images, shift, atol=1e-5)
    primaries = torch.tensor(
        [[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0], [0.5, 0.5, 0.5]]
    )
    turned = color.hue_(primaries.view(8, 3, 1, 1).clone(), torch.full((8,), 1 / 3)).view(8, 3)
    torch.testing.assert_close(turned, primaries.roll(1, dims=1), atol=1e-6, rtol=0)


def test_grey_solarize_equal_torchvision():
    """Kills: equal channel weights, one channel only, inversion below the threshold, a shared threshold."""
    images = photos(20)
    floats = images / 255
    reference = torch.stack([tv.rgb_to_grayscale(image, num_output_channels=3) for image in floats])
    torch.testing.assert_close(color.grey(floats), reference, atol=1e-6, rtol=0)
    check_both_dtypes(
        color.solarize,
        lambda im, t: tv.solarize(im, t if im.is_floating_point() else 255 * t),
        images,
        uniform(20, 0.2, 0.8),
    )
    exact = torch.tensor([100, 101, 99], dtype=torch.uint8).view(1, 3, 1, 1) / 255
    at_threshold = color.solarize(exact, exact[:, 0, 0, 0])
    assert (at_threshold * 255).round().flatten().tolist() == [155, 154, 99]  # at or above


@pytest.mark.parametrize("side", [8, 18, 32, 40])
def test_equalize_equals_pil_and_torchvision(side):
    """Kills: histogram over all channels or the batch, brightest level counted, no rounding, step 0."""
    images = photos(12, side)
    images[0], images[1, 0], images[2, :, ::2] = 7, 200, 13
    result = color.equalize(images / 255) * 255
    torch.testing.assert_close(
        result, torch.stack([tv.equalize(i) for i in images]).float(), atol=1e-4, rtol=0
    )
    for image, ours in zip(images, result, strict=True):
        pil = pil_functional.equalize(pil_functional.to_pil_image(image))
        assert (ours.round() == pil_functional.pil_to_tensor(pil)).all()
    assert side == 8 or (result - images).abs().mean() > 1
    nearly = color.equalize(images / 255 + 0.3 * LEVEL) * 255  # floats are rounded to the nearest level
    torch.testing.assert_close(nearly[3:], result[3:], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("side", "radius"), [(20, 8), (18, 3), (9, 8)])
def test_blur_equals_torchvision(side, radius):
    """Kills: zero padding, border repeated, a shared sigma, taps not normalised, variance for deviation."""

    def reference(image, sigma):
        return tv.gaussian_blur(image, [2 * radius + 1] * 2, [sigma] * 2)

    check_both_dtypes(lambda im, s: blur(im, s, radius), reference, photos(16, side), uniform(16, 0.4, 2.5))
    sharp = photos(2, side) / 255
    torch.testing.assert_close(blur(sharp, torch.full((2,), 0.1), radius), sharp, atol=1e-6, rtol=0)


def test_jitter_follows_each_rows_order():
    """All 24 orders. Kills: one order for all, reversed order, factors of another row or operation."""
    images = photos(60) / 255
    rows = torch.randperm(60, generator=seeded())[:48]
    factors = torch.stack(
        [
            uniform(48, 0.4, 1.6, 1),
            uniform(48, 0.4, 1.6, 2),
            uniform(48, 0.2, 1.8, 3),
            uniform(48, -0.4, 0.4, 4),
        ],
        dim=1,
    )
    order = torch.arange(48) % 24
    operations = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue]
    expected = images.clone()
    for row, factor, which in zip(rows.tolist(), factors.tolist(), order.tolist(), strict=True):
        for op in color.JITTER_ORDERS[which]:
            expected[row] = operations[op](expected[row], factor[op])
    result = color.jitter_(images.clone(), rows, factors, order)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)
    reverse = color.jitter_(images.clone(), rows, factors, 23 - order)
    assert (reverse - expected).abs().mean() > LEVEL  # the order matters for these factors
    assert len(set(color.JITTER_ORDERS)) == 24


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
            if off == "blends" and op == color.HUE:
                expected[row] = tv.adjust_hue(expected[row], -0.4)  # 0.6 of the circle
            elif off == "hue" and op != color.HUE:
                change = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation][op]
                expected[row] = change(expected[row], 0.6)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def reference_view(image: torch.Tensor, draws, row: int, config: ViewConfig) -> torch.Tensor:
    """One view by torchvision on one float image (3,S,S), from the parameters of a row."""
    size = config.size
    x = tv.resized_crop(image, *draws.box[row].int().tolist(), [size, size], antialias=True)
    if draws.flip[row]:
        x = tv.horizontal_flip(x)
    if draws.affine[row]:
        angle, shear, shift_x, shift_y, zoom = draws.pose[row].tolist()
        bilinear = pil_functional.InterpolationMode.BILINEAR
        x = tv.affine(x, angle, [size * shift_x, size * shift_y], zoom, [shear, 0.0], bilinear)
    if draws.jitter[row]:
        operations = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue]
        for op in color.JITTER_ORDERS[int(draws.order[row])]:
            x = operations[op](x, draws.factors[row, op].item())
    x = tv.rgb_to_grayscale(x, num_output_channels=3) if draws.grey[row] else x
    x = tv.solarize(x, draws.threshold[row].item()) if draws.solarize[row] else x
    x = tv.equalize((255 * x).round().to(torch.uint8)) / 255 if draws.equalize[row] else x
    if draws.blur[row]:
        kernel = 2 * math.ceil(4 * config.blur_sigma[1]) + 1
        x = tv.gaussian_blur(x, [kernel, kernel], [draws.sigma[row].item()] * 2)
    return x


def test_whole_view_equals_torchvision_row_by_row():
    """Kills: operations in another order, parameters of another row, an operation on unchosen rows."""
    images = photos(200)
    draws = draw(EVERYTHING, 200, 32, seeded())
    floats = images / 255
    expected = torch.stack([reference_view(x, draws, row, EVERYTHING) for row, x in enumerate(floats)])
    error = (apply(images, draws, EVERYTHING) - expected).abs().flatten(1)
    smooth = ~(draws.equalize | draws.solarize)  # these two turn a rounding error at a step into many levels
    assert 60 < smooth.sum() < 140
    assert error[smooth].max() <= 3e-4
    assert error.mean(dim=1).max() <= LEVEL / 4 and error.mean(dim=1).median() <= 2e-5


# --- distributions


RECIPES = [
    ("cifar10", "paper", "large"),
    ("cifar10", "v2", "large"),
    ("cifar10", "v2", "small"),
    ("imagenet", "v2", "small"),
    ("imagenet", "paper", "large"),
    ("digits", "paper", "large"),
    ("everything", "", ""),
]
NUM_DRAWS = 4000
P_VALUE = 1e-4  # of each of about a hundred tests with fixed seeds


def recipe_draws(name, recipe, kind):
    if name == "everything":
        return EVERYTHING, 32, draw(EVERYTHING, NUM_DRAWS, 32, seeded(5))
    config = preset(name, recipe)
    kind_config = getattr(config.augment, kind)
    side = config.data.store_size
    return kind_config, side, draw(kind_config, NUM_DRAWS, side, seeded(5))


@pytest.mark.parametrize(("name", "recipe", "kind"), RECIPES)
def test_parameters_follow_the_recipe(name, recipe, kind):
    """Kills: wrong range or centre, ranges swapped, a parameter shared by rows or tied to another."""
    config, _, draws = recipe_draws(name, recipe, kind)
    c = config
    ranges = [
        (draws.factors[:, 0], 1 - c.brightness, 1 + c.brightness),
        (draws.factors[:, 1], 1 - c.contrast, 1 + c.contrast),
        (draws.factors[:, 2], 1 - c.saturation, 1 + c.saturation),
        (draws.factors[:, 3], -c.hue, c.hue),
        (draws.threshold, 0, 1),
        (draws.sigma, *c.blur_sigma),
        (draws.pose[:, 0], -c.affine_degrees, c.affine_degrees),
        (draws.pose[:, 1], -c.affine_shear, c.affine_shear),
        (draws.pose[:, 4], *c.affine_scale),
        (draws.pose[:, 2], -c.affine_translate, c.affine_translate),
        (draws.pose[:, 3], -c.affine_translate, c.affine_translate),
    ]
    varying = []
    for values, low, high in ranges:
        if low == high:
            assert (values == low).all()
            continue
        assert stats.kstest(values.double().numpy(), "uniform", (low, high - low)).pvalue > P_VALUE
        varying.append(values)
    coins = [
        getattr(draws, key).float()
        for key in ("flip", "affine", "jitter", "grey", "solarize", "equalize", "blur")
    ]
    varying += [coin for coin in coins if 0 < coin.mean() < 1] + [draws.order.float()]
    correlation = torch.corrcoef(torch.stack(varying)) - torch.eye(len(varying))
    assert correlation.abs().max() < 5 / math.sqrt(NUM_DRAWS)
    assert stats.chisquare(torch.bincount(draws.order, minlength=24).numpy()).pvalue > P_VALUE


@pytest.mark.parametrize(("name", "recipe", "kind"), RECIPES)
def test_probabilities_follow_the_recipe(name, recipe, kind):
    """Kills: an operation always, never or with another's probability."""
    config, _, draws = recipe_draws(name, recipe, kind)
    for key in ("flip", "affine", "jitter", "grey", "solarize", "equalize", "blur"):
        hits, probability = int(getattr(draws, key).sum()), getattr(config, key)
        if probability in (0, 1):
            assert hits == probability * NUM_DRAWS
        else:
            assert stats.binomtest(hits, NUM_DRAWS, probability).pvalue > P_VALUE


@pytest.mark.parametrize(
    ("scale", "side"), [((0.8, 1.0), 32), ((0.3, 0.8), 32), ((0.08, 0.5), 256), ((1.0, 1.0), 32)]
)
def test_boxes_follow_torchvision(scale, side):
    """Kills: side for area, ratio not log-uniform or inverted, always a corner, first attempt always kept."""
    config = ViewConfig(size=16, crop="resized", crop_scale=scale)
    box = draw(config, NUM_DRAWS, side, seeded(2)).box
    image = torch.zeros(3, side, side)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = np.array(
            [RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(NUM_DRAWS)]
        )
    assert (box == box.round()).all() and (box[:, :2] >= 0).all() and (box[:, :2] + box[:, 2:] <= side).all()

    def facts(boxes: np.ndarray) -> list[np.ndarray]:
        top, left, height, width = boxes.astype(float).T
        return [top, left, height, width, height * width, height / width, top - left, 2 * top + height]

    for ours, theirs in zip(facts(box.numpy()), facts(reference), strict=True):
        assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > P_VALUE


def test_padded_boxes_are_uniform_and_chosen_half_of_the_time():
    """Kills: an end of the range missing, the axes tied, no padding subtracted, one kind of crop."""
    config = ViewConfig(size=32, crop="pad_or_resized", crop_padding=4, crop_scale=(0.3, 0.8))
    box = draw(config, NUM_DRAWS, 32, seeded(4)).box
    padded = (box[:, 2:] == 32).all(dim=1)
    assert stats.binomtest(int(padded.sum()), NUM_DRAWS, 0.5).pvalue > P_VALUE
    places = (box[padded, 0] + 4) * 9 + box[padded, 1] + 4
    counts = torch.bincount(places.long(), minlength=81)
    assert len(counts) == 81 and stats.chisquare(counts.numpy()).pvalue > P_VALUE


# --- the batch


def test_unchosen_rows_are_untouched_and_chosen_rows_change():
    """Kills: an operation on all rows, on none, or results written to other rows."""
    images = photos(300)
    floats = images / 255
    settings = dict(
        affine=dict(affine_degrees=30.0),
        jitter=dict(brightness=0.5, contrast=0.5, saturation=0.5, hue=0.3),
        grey={},
        solarize={},
        equalize={},
        blur=dict(blur_sigma=(1.0, 2.0)),
    )
    for key, values in settings.items():
        config = NOTHING.model_copy(update={key: 0.3, **values})
        draws = draw(config, 300, 32, seeded(7))
        chosen = getattr(draws, key)
        assert 60 < chosen.sum() < 120
        change = (apply(images, draws, config) - floats).abs().amax(dim=(1, 2, 3))
        assert (change[~chosen] == 0).all(), key
        assert (change[chosen] > LEVEL).float().mean() > 0.95, key


def small(config: AugmentConfig, size: int) -> AugmentConfig:
    """The same recipe at a size the CPU does quickly."""
    return config.model_copy(update={"large": config.large.model_copy(update={"size": size})})


BATCHES = {
    "cifar-paper": (preset("cifar10").augment, 32),
    "cifar-v2": (preset("cifar100_20", "v2").augment, 32),
    "digits": (preset("digits").augment, 8),
    "imagenet-v2": (small(preset("imagenet", "v2").augment, 38), 43),
    "everything": (
        AugmentConfig(large=EVERYTHING, small=EVERYTHING.model_copy(update=dict(size=11, num_views=3))),
        32,
    ),
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", list(BATCHES))
def test_a_workers_rows_equal_the_whole_batch(name, num_threads):
    """Kills: drawing for the worker's rows only, statistics over the batch, views of an image drawn apart."""
    torch.set_num_threads(num_threads)
    config, side = BATCHES[name]
    images = photos(48, side)
    whole = augment(images, config, seeded(9), MEAN, STD)
    single = [slice(i, i + 1) for i in (0, 31, 47)]
    for rows in [slice(0, 24), slice(24, 48), slice(5, 12), *single, torch.tensor([40, 3, 17, 8, 21])]:
        generator = seeded(9)
        part = augment(images[rows], config, generator, MEAN, STD, rows=rows, num_rows=48)
        for ours, all_rows in zip(part, whole, strict=True):
            assert torch.equal(ours, all_rows[rows])
        expected_state = seeded(9)
        augment(images, config, expected_state, MEAN, STD)
        assert torch.equal(generator.get_state(), expected_state.get_state())


@pytest.mark.parametrize(
    ("name", "recipe", "sizes"),
    [
        ("digits", "paper", [8, 8]),
        ("cifar10", "paper", [32, 32]),
        ("cifar10", "v2", [32, 32, 18, 18]),
        ("cifar100_50", "v2", [32, 32, 18, 18]),
        ("imagenet", "paper", [224, 224]),
        ("imagenet", "v2", [224, 224, 96, 96]),
    ],
)
def test_views_of_the_presets(name, recipe, sizes):
    """Kills: small before large, a missing view, views not normalised, not contiguous or all equal."""
    config = preset(name, recipe)
    images = photos(4, config.data.store_size)
    views = augment(images, config.augment, seeded(), config.data.mean, config.data.std)
    assert [tuple(v.shape) for v in views] == [(4, 3, size, size) for size in sizes]
    for v in views:
        assert v.dtype == torch.float32 and v.is_contiguous()
        std, mean = (torch.tensor(s).view(3, 1, 1) for s in (config.data.std, config.data.mean))
        pixels = v * std + mean
        assert pixels.min() >= -1e-5 and pixels.max() <= 1 + 1e-5 and 0.2 < pixels.mean() < 0.8
    assert all((a != b).any() for i, a in enumerate(views) for b in views[:i] if a.shape == b.shape)


def test_views_are_the_rows_of_apply():
    """Kills: views of different images mixed, view 0 and 1 exchanged between images."""
    config = AugmentConfig(large=EVERYTHING.model_copy(update=dict(num_views=3)))
    images = photos(10)
    views = augment(images, config, seeded(2), (0, 0, 0), (1, 1, 1))
    flat = apply(images, draw(config.large, 30, 32, seeded(2)), config.large)
    torch.testing.assert_close(torch.stack(views, dim=1).flatten(0, 1), flat, atol=0, rtol=0)
    one = view(images[:1].expand(30, -1, -1, -1), config.large, seeded(2))
    assert torch.equal(one[:3], flat[:3])


def test_only_the_generator_decides():
    """Kills: global randomness, a generator that does not advance, input changed in place."""
    config, _ = BATCHES["everything"]
    images = photos(16)
    kept = images.clone()
    generator = seeded(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = augment(images, config, generator, MEAN, STD)
        assert torch.equal(torch.get_rng_state(), before)
    again = augment(images, config, seeded(1), MEAN, STD)
    later = augment(images, config, generator, MEAN, STD)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all((a != b).any() for a, b in zip(first, later, strict=True))
    assert torch.equal(images, kept)


def test_weak_keeps_the_crops_and_drops_the_colours():
    """Kills: weak ignored, weak without flip or crop, other crops than strong, digits without affine map."""
    for name in ("cifar-v2", "digits", "everything"):
        config, side = BATCHES[name]
        images = photos(100, side)
        weak = augment(images, config.model_copy(update=dict(weak=True)), seeded(3), (0, 0, 0), (1, 1, 1))
        off = dict(jitter=0.0, grey=0.0, solarize=0.0, equalize=0.0, blur=0.0)
        kinds = {k: getattr(config, k).model_copy(update=off) for k in ("large", "small")}
        expected = augment(images, config.model_copy(update=kinds), seeded(3), (0, 0, 0), (1, 1, 1))
        assert all(torch.equal(a, b) for a, b in zip(weak, expected, strict=True))
        strong = augment(images, config, seeded(3), (0, 0, 0), (1, 1, 1))
        same = [(a == b).flatten(1).all(dim=1).float().mean() for a, b in zip(weak, strong, strict=True)]
        assert all(
            0.02 < s < 0.75 for s in same
        )  # rows that got no colour operation keep the very same pixels
        grey = torch.full((50, 3, side, side), 100, dtype=torch.uint8)
        colourless = augment(grey, config.model_copy(update=dict(weak=True)), seeded(), (0, 0, 0), (1, 1, 1))
        assert all(v.max() <= 100.01 / 255 for v in colourless)  # brightness would exceed it
        if config.large.size == side:
            assert (weak[0] - images / 255).abs().amax(dim=(1, 2, 3)).gt(LEVEL).float().mean() > 0.9


def test_autocast_does_not_reach_the_pixels():
    """Kills: interpolation in bfloat16 when the caller's step runs under autocast."""
    config, _ = BATCHES["everything"]
    images = photos(16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = augment(images, config, seeded(), MEAN, STD)
    outside = augment(images, config, seeded(), MEAN, STD)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_normalize_equals_torchvision():
    """Kills: mean and std swapped, statistics along another axis."""
    images = photos(4) / 255
    torch.testing.assert_close(
        normalize(images, MEAN, STD), tv.normalize(images, MEAN, STD), atol=1e-6, rtol=0
    )


def test_wrong_input_is_named():
    """Kills: floats scaled twice, grey or oblong images, a mismatch of rows, a crop beyond the padding."""
    config = AugmentConfig(large=NOTHING)
    images = photos(4)
    wrong = [images / 255, images[:, :1], images[..., :-1], images[:0]]
    for bad in wrong:
        with pytest.raises(ValueError, match="images must be uint8"):
            augment(bad, config, seeded(), MEAN, STD)
    with pytest.raises(ValueError, match="selects 3 of 8 rows but there are 4 images"):
        augment(images, config, seeded(), MEAN, STD, rows=slice(5, 8), num_rows=8)
    with pytest.raises(ValueError, match="8 rows but there are 4 images"):
        augment(images, config, seeded(), MEAN, STD, num_rows=8)
    with pytest.raises(ValueError, match="crop pad of 41 pixels exceeds the stored side 32 with padding 4"):
        view(images, NOTHING.model_copy(update=dict(crop="pad", size=41)), seeded())
