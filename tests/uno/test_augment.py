"""Views of a whole batch."""

import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from tests.uno.pictures import EVERYTHING, LEVEL, MEAN, NOTHING, STD, photos, seeded
from uno.augment import (
    apply,
    augment,
    draw,
    normalize,
    view,
)
from uno.config import AugmentConfig
from uno.presets import preset

pytestmark = pytest.mark.usefixtures("one_thread")


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
            if name == "everything":  # of 11 pixels: MKL rounds by where a matrix begins in a cache line
                torch.testing.assert_close(ours, all_rows[rows], atol=1e-6 / min(STD), rtol=0)
            else:
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
