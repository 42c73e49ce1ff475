"""What own images decide for a run that learns from them alone."""

import pytest

from tests.uno.data.builders import encoded, pixels
from uno.config import override
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.presets import preset
from uno.session.derive import (
    EPOCHS,
    LEAST_EPOCHS,
    MOST_STEPS,
    derive_settings,
    derived_keys,
)


def fitted(folder, *given, name="scratch", num=24, side=120, **overrides):
    """The configuration for two classes of ``num`` images each, one known, and what
    is said of it.
    """
    if not folder.exists():
        for i in range(2 * num):
            path = folder / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(pixels(i, side, side), "PNG"))
    values = {
        "data.source": f"folder:{folder}",
        "data.known_classes": "a",
        "data.setting": "ncd",
    }
    config = override(
        preset(name), values | {k.replace("__", "."): v for k, v in overrides.items()}
    )
    task = make_task(read_rows(config.data), config.data)
    values, lines = derive_settings(config, set(given), task)
    assert not values.keys() & set(given)
    return override(config, values), lines, task


@pytest.mark.parametrize(
    ("side", "encoder", "size", "stem"),
    [
        (300, "resnet18", 128, "imagenet"),
        (97, "resnet18", 96, "imagenet"),
        (80, "resnet18", 64, "cifar"),
        (300, "resnet_small", 64, "cifar"),
        (29, "resnet18", 28, "cifar"),
        (5, "resnet18", 8, "cifar"),
    ],
)
def test_the_size_is_that_of_the_images_up_to_what_is_affordable(
    tmp_path, side, encoder, size, stem
):
    """Kills: 32 px for photographs; 300 px with a stem for small images, which takes
    90 times as long.
    """
    config, lines, _ = fitted(tmp_path / "d", num=2, side=side, model__encoder=encoder)
    assert (config.augment.large.size, config.data.stored_size, config.model.stem) == (
        size,
        size,
        stem,
    )
    assert f"image size: {size} px (images are about {side} px" in lines[0]


def test_batch_and_epochs_follow_the_rows(tmp_path):
    """Kills: one step an epoch, fewer rows than classes need, weeks for a million
    rows.
    """
    config, _, task = fitted(tmp_path / "d", side=8, num=200, data__num_novel=3)
    assert config.train.batch_size == sum(task.sizes) // 8 == 50
    assert {name: getattr(config, name).epochs for name in EPOCHS} == EPOCHS
    assert config.discover.warmup_epochs == EPOCHS["discover"] / 10
    many, _, _ = fitted(tmp_path / "d", side=8, data__num_novel=60)
    # 60 classes x 2.6 unlabeled rows, and as many labeled ones
    assert many.train.batch_size == 312
    config, _, _ = fitted(tmp_path / "d", "pretrain.epochs", pretrain__epochs=7)
    assert (config.pretrain.epochs, config.discover.epochs) == (7, EPOCHS["discover"])


def test_a_large_set_gets_no_more_steps_than_the_papers(tmp_path, monkeypatch):
    monkeypatch.setattr("uno.session.derive.MOST_STEPS", 100)
    config, lines, _ = fitted(tmp_path / "d", side=8, num=200)
    # of 4 and 8 steps
    assert (config.pretrain.epochs, config.discover.epochs) == (25, 12)
    monkeypatch.setattr("uno.session.derive.MOST_STEPS", 1)
    assert fitted(tmp_path / "d")[0].discover.epochs == LEAST_EPOCHS
    assert MOST_STEPS >= 50_000 // 512 * 200 and any(
        "--discover.epochs" in line for line in lines
    )


@pytest.mark.parametrize(("most", "epochs"), [(10_000, 30), (100, 20), (5, 1), (1, 1)])
def test_heads_on_features_take_a_bounded_number_of_steps(
    tmp_path, monkeypatch, most, epochs
):
    """5 steps an epoch. Kills: epochs that do not depend on the rows, none at all, a
    warm-up that is longer than the training, epochs of the user's that are overruled,
    or of a set that is small.
    """
    monkeypatch.setattr("uno.session.derive.MOST_HEAD_STEPS", most)
    options = {"name": "photos", "side": 8, "train__batch_size": 8}
    config, lines, _ = fitted(tmp_path / "d", "train.batch_size", **options)
    assert config.discover.epochs == epochs
    assert config.discover.warmup_epochs == (3 if epochs == 30 else epochs / 10)
    assert bool(lines) == (epochs != 30)
    told = fitted(
        tmp_path / "d",
        "train.batch_size",
        "discover.epochs",
        discover__epochs=20,
        **options,
    )
    assert told[0].discover.epochs == 20 and not told[1]


GIVEN = {
    "augment.large.size": 24,
    "data.stored_size": 20,
    "train.batch_size": 10,
    "pretrain.epochs": 2,
    "discover.epochs": 3,
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # one of the two sizes sets the other
        ({"augment.large.size": 24}, {"data.stored_size": 24}),
        ({"data.stored_size": 20}, {"augment.large.size": 20}),
        ({"train.batch_size": 10}, {}),
        ({"pretrain.epochs": 2}, {}),
        ({"discover.epochs": 3}, {}),
        (GIVEN, {}),
    ],
)
def test_what_is_given_stays(tmp_path, given, expected):
    """Kills: a flag of the user's that is overruled."""
    values = {key.replace(".", "__"): value for key, value in given.items()}
    config, lines, _ = fitted(tmp_path / "d", *given, side=40, num=20, **values)
    assert override(config, given | expected) == config
    assert bool(lines) == (len(given) == 1)


@pytest.mark.parametrize(
    ("name", "source", "has_size", "has_batch"),
    [
        ("cifar10", "folder:d", False, False),
        ("scratch", "cifar10:d", False, False),
        ("digits", "folder:d", False, False),
        ("photos", "folder:d", False, True),
        ("scratch", "folder:d", True, True),
    ],
)
def test_benchmarks_and_encoders_with_weights_keep_their_settings(
    name, source, has_size, has_batch
):
    keys = derived_keys(override(preset(name), {"data.source": source}))
    assert ("data.stored_size" in keys, "train.batch_size" in keys) == (
        has_size,
        has_batch,
    )


def test_an_encoder_of_a_library_brings_its_own_size(tmp_path):
    config, _, _ = fitted(
        tmp_path / "d", side=40, model__encoder="tests.uno.toy_encoders:vit"
    )
    assert config.augment.large.size == 32
