"""Parameters are drawn as the recipes say."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import RandomResizedCrop

from tests.uno.pictures import EVERYTHING, seeded
from uno.augment import draw
from uno.config import ViewConfig
from uno.presets import preset

pytestmark = pytest.mark.usefixtures("one_thread")


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
