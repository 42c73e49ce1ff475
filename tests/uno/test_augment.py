"""Views of a whole batch, and the parameters they are drawn with."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as tv

from tests.uno.pictures import (
    EVERYTHING,
    LEVEL,
    MEAN,
    NOTHING,
    STD,
    draw,
    photos,
    seeded,
    view,
)
from uno.augment import augment, eval_view
from uno.config import AugmentConfig, ViewConfig
from uno.presets import preset

COINS = ("flip", "affine", "jitter", "grayscale", "solarize", "equalize", "blur")
PLAIN = ((0, 0, 0), (1, 1, 1))  # statistics that leave 0-1
IMAGENET = preset("imagenet", "v2").augment  # at a size that the CPU does quickly
SMALL_IMAGENET = IMAGENET.model_copy(
    update={"large": IMAGENET.large.model_copy(update={"size": 38})}
)
SMALL = EVERYTHING.model_copy(update=dict(size=11, num_views=3))
BATCHES = {
    "cifar-paper": (preset("cifar10").augment, 32),
    "cifar-v2": (preset("cifar100_20", "v2").augment, 32),
    "digits": (preset("digits").augment, 8),
    "imagenet-v2": (SMALL_IMAGENET, 43),
    "everything": (AugmentConfig(large=EVERYTHING, small=SMALL), 32),
}


@pytest.mark.parametrize("name", list(BATCHES))
def test_a_workers_rows_equal_the_whole_batch(name):
    """Kills: drawing for the worker's rows only, statistics over the batch, views of
    an image drawn apart.
    """
    torch.set_num_threads(2)
    config, side = BATCHES[name]
    images, whole_state = photos(24, side), seeded(9)
    whole = augment(images, config, whole_state, MEAN, STD)
    single = [slice(i, i + 1) for i in (0, 15, 23)]
    for rows in [
        slice(0, 12),
        slice(12, 24),
        slice(5, 9),
        *single,
        torch.tensor([20, 3, 17, 8, 21]),
    ]:
        generator = seeded(9)
        part = augment(
            images[rows], config, generator, MEAN, STD, rows=rows, num_rows=24
        )
        # Of 11 pixels: MKL rounds by where a matrix begins in a cache line.
        atol = 1e-6 / min(STD) if name == "everything" else 0
        for ours, all_rows in zip(part, whole, strict=True):
            torch.testing.assert_close(ours, all_rows[rows], atol=atol, rtol=0)
        assert torch.equal(generator.get_state(), whole_state.get_state())


def test_only_the_generator_decides():
    """Kills: global randomness, a generator that does not advance, input changed in
    place, interpolation in bfloat16 when the caller's step runs under autocast.
    """
    config, _ = BATCHES["everything"]
    images = photos(16)
    kept = images.clone()
    generator = seeded(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = augment(images, config, generator, MEAN, STD)
        assert torch.equal(torch.get_rng_state(), before)
    with torch.autocast("cpu", torch.bfloat16):
        again = augment(images, config, seeded(1), MEAN, STD)
    later = augment(images, config, generator, MEAN, STD)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all((a != b).any() for a, b in zip(first, later, strict=True))
    assert torch.equal(images, kept)


def test_weak_keeps_the_crops_and_drops_the_colors():
    """Kills: weak ignored, weak without flip or crop, other crops than strong,
    digits without affine map.
    """
    off = dict(jitter=0.0, grayscale=0.0, solarize=0.0, equalize=0.0, blur=0.0)
    for name in ("cifar-v2", "digits", "everything"):
        config, side = BATCHES[name]
        images = photos(100, side)
        kinds = {
            k: getattr(config, k).model_copy(update=off) for k in ("large", "small")
        }
        configs = (
            config.model_copy(update=dict(weak=True)),
            config.model_copy(update=kinds),
            config,
        )
        weak, expected, strong = (
            augment(images, each, seeded(3), *PLAIN) for each in configs
        )
        assert all(torch.equal(a, b) for a, b in zip(weak, expected, strict=True))
        same = [
            (a == b).flatten(1).all(dim=1).float().mean()
            for a, b in zip(weak, strong, strict=True)
        ]
        # rows without a color operation keep the very same pixels
        assert all(0.02 < s < 0.75 for s in same)
        if config.large.size == side:
            assert (weak[0] - images / 255).abs().amax(dim=(1, 2, 3)).gt(
                LEVEL
            ).float().mean() > 0.9


def test_eval_view_is_the_center():
    """Kills: corner for center, wrong rounding of an odd margin, statistics swapped
    or not applied.
    """
    images = photos(3, 25)
    for size in (10, 24, 25):
        expected = tv.normalize(tv.center_crop(images, [size, size]) / 255, MEAN, STD)
        torch.testing.assert_close(
            eval_view(images, size, MEAN, STD), expected, atol=1e-6, rtol=0
        )
    with pytest.raises(ValueError, match="26 pixels exceeds the stored side of 25"):
        eval_view(images, 26, MEAN, STD)


def test_wrong_input_is_named():
    """Kills: floats scaled twice, gray or oblong images, a mismatch of rows, a crop
    beyond the padding.
    """
    config = AugmentConfig(large=NOTHING)
    images = photos(4)
    for bad in (images / 255, images[:, :1], images[..., :-1], images[:0]):
        with pytest.raises(ValueError, match="images must be uint8"):
            augment(bad, config, seeded(), MEAN, STD)
    with pytest.raises(ValueError, match="selects 3 of 8 rows but got 4"):
        augment(images, config, seeded(), MEAN, STD, rows=slice(5, 8), num_rows=8)
    with pytest.raises(ValueError, match="8 rows but got 4"):
        augment(images, config, seeded(), MEAN, STD, num_rows=8)
    with pytest.raises(
        ValueError,
        match="crop pad of 41 pixels exceeds the stored side 32 with padding 4",
    ):
        view(images, NOTHING.model_copy(update=dict(crop="pad", size=41)))


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


@pytest.mark.parametrize(("name", "recipe", "kind"), RECIPES)
def test_parameters_and_probabilities_follow_the_recipe(name, recipe, kind):
    """Kills: wrong range or center, ranges swapped, a parameter shared by rows or tied
    to another; an operation always, never or with another's probability.
    """
    config = None if name == "everything" else preset(name, recipe)
    c = EVERYTHING if config is None else getattr(config.augment, kind)
    draws = draw(c, NUM_DRAWS, 32 if config is None else config.data.stored_size, 5)
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
        assert (
            stats.kstest(values.double().numpy(), "uniform", (low, high - low)).pvalue
            > P_VALUE
        )
        varying.append(values)
    coins = {key: getattr(draws, key) for key in COINS}
    varying += [
        draws.order.float(),
        *(c.float() for c in coins.values() if 0 < c.float().mean() < 1),
    ]
    correlation = torch.corrcoef(torch.stack(varying)) - torch.eye(len(varying))
    assert correlation.abs().max() < 5 / math.sqrt(NUM_DRAWS)
    assert (
        stats.chisquare(torch.bincount(draws.order, minlength=24).numpy()).pvalue
        > P_VALUE
    )
    for key, coin in coins.items():
        hits, probability = int(coin.sum()), getattr(c, key)
        if probability in (0, 1):
            assert hits == probability * NUM_DRAWS
        else:
            assert stats.binomtest(hits, NUM_DRAWS, probability).pvalue > P_VALUE


SCALES = [((0.3, 0.8), 32), ((0.08, 0.5), 256), ((1.0, 1.0), 32)]


@pytest.mark.parametrize(
    ("scale", "side"),
    [*SCALES, pytest.param((0.8, 1.0), 32, marks=pytest.mark.release)],
)
def test_boxes_follow_torchvision(scale, side):
    """Kills: side for area, ratio not log-uniform or inverted, always a corner,
    first attempt always kept.
    """
    config = ViewConfig(size=16, crop="resized", crop_scale=scale)
    box = draw(config, NUM_DRAWS, side, 2).box
    image = torch.zeros(3, side, side)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = np.array(
            [
                RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3])
                for _ in range(NUM_DRAWS)
            ]
        )
    assert (
        (box == box.round()).all()
        and (box[:, :2] >= 0).all()
        and (box[:, :2] + box[:, 2:] <= side).all()
    )

    def facts(boxes: np.ndarray) -> list[np.ndarray]:
        top, left, height, width = boxes.astype(float).T
        return [
            top,
            left,
            height,
            width,
            height * width,
            height / width,
            top - left,
            2 * top + height,
        ]

    for ours, theirs in zip(facts(box.numpy()), facts(reference), strict=True):
        assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > P_VALUE


def test_padded_boxes_are_uniform_and_chosen_half_of_the_time():
    """Kills: an end of the range missing, the axes tied, no padding subtracted, one
    kind of crop.
    """
    config = ViewConfig(
        size=32, crop="pad_or_resized", crop_padding=4, crop_scale=(0.3, 0.8)
    )
    box = draw(config, NUM_DRAWS, 32, 4).box
    padded = (box[:, 2:] == 32).all(dim=1)
    assert stats.binomtest(int(padded.sum()), NUM_DRAWS, 0.5).pvalue > P_VALUE
    places = (box[padded, 0] + 4) * 9 + box[padded, 1] + 4
    counts = torch.bincount(places.long(), minlength=81)
    assert len(counts) == 81 and stats.chisquare(counts.numpy()).pvalue > P_VALUE
