"""Every number of the presets against the tables they come from, written out again here by hand."""

import pytest

from uno.config import Config, config_hash, flatten, to_dict
from uno.errors import ConfigError
from uno.presets import PRESETS, preset

CIFAR = ("cifar10", "cifar100_20", "cifar100_50")
PUBLISHED = (*CIFAR, "imagenet")

# Fini et al. 2021, Sec. 4.1 "Implementation Details", except lines marked [release]: the authors' first code.
PAPER = {
    "train.batch_size": 512,
    "pretrain.epochs": 200, "discover.epochs": 200,
    "pretrain.base_lr": 0.1, "discover.base_lr": 0.1,
    "pretrain.min_lr": 0.001, "discover.min_lr": 0.001,
    "pretrain.weight_decay": 1e-4, "discover.weight_decay": 1e-4,
    "pretrain.momentum": 0.9, "discover.momentum": 0.9,  # [release]
    "pretrain.warmup_epochs": 10, "discover.warmup_epochs": 10,  # [release]
    "model.encoder": "resnet18",
    "model.num_heads": 4, "model.overcluster_factor": 3,
    "model.hidden_dim": 2048, "model.projection_dim": 256,
    "model.mlp_input": "normalized",  # METHOD.md Sec. 5: the paper's heads read z / |z|
    "objective.temperature": 0.1, "objective.epsilon": 0.05, "objective.num_iters": 3,
    "objective.aggregation": "swap", "objective.concat": True, "objective.pseudo_labels": "soft",
    "augment.large.num_views": 2, "augment.small.num_views": 0, "augment.weak": False,
}  # fmt: skip

# The authors' improved recipe; source: METHOD.md Sec. 5, column `v2`. Pretraining keeps 0.1 and 1e-4.
V2 = PAPER | {
    "discover.base_lr": 0.4, "discover.weight_decay": 1.5e-4, "discover.epochs": 500,
    "model.mlp_input": "raw",
    "augment.large.num_views": 2, "augment.small.num_views": 2,
}  # fmt: skip
V2_IMAGENET = V2 | {
    "discover.base_lr": 0.2, "pretrain.epochs": 100, "discover.epochs": 60,
    "pretrain.warmup_epochs": 5, "discover.warmup_epochs": 5,
}  # fmt: skip
V2_OVERCLUSTER = {"cifar10": 10, "cifar100_20": 5, "cifar100_50": 3, "imagenet": 4}

# Views; source: METHOD.md Sec. 5, "Augmentation" (magnitudes are the release's).
WEAK_COLOR = {"jitter": 0.5, "brightness": 0.3, "contrast": 0.3, "saturation": 0.15, "hue": 0.1}
STRONG_COLOR = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
NONE = {"solarize": 0.0, "equalize": 0.0, "blur": 0.0, "affine": 0.0}
BLUR = {"blur": 0.2, "blur_sigma": (0.1, 2.0)}
CIFAR_LARGE = {"size": 32, "crop": "pad_or_resized", "crop_padding": 4, "flip": 0.5}
VIEWS = {
    ("cifar", "paper", "large"): NONE | CIFAR_LARGE | WEAK_COLOR | {"crop_scale": (0.8, 1.0), "grey": 0.1},
    ("cifar", "v2", "large"): NONE | CIFAR_LARGE | STRONG_COLOR | {
        "crop_scale": (0.5, 1.0), "jitter": 0.6, "grey": 0.0, "solarize": 0.1, "equalize": 0.1},
    ("cifar", "v2", "small"): NONE | STRONG_COLOR | {
        "size": 18, "crop": "resized", "crop_scale": (0.3, 0.8), "flip": 0.5, "jitter": 0.8, "grey": 0.0,
        "solarize": 0.2, "equalize": 0.2},
    ("imagenet", "paper", "large"): NONE | WEAK_COLOR | BLUR | {
        "size": 224, "crop": "resized", "crop_scale": (0.5, 1.0), "flip": 0.5, "grey": 0.1},
    ("imagenet", "v2", "large"): NONE | STRONG_COLOR | BLUR | {
        "size": 224, "crop": "resized", "crop_scale": (0.5, 1.0), "flip": 0.5, "jitter": 0.5, "grey": 0.2},
    ("imagenet", "v2", "small"): NONE | STRONG_COLOR | BLUR | {
        "size": 96, "crop": "resized", "crop_scale": (0.08, 0.5), "flip": 0.5, "jitter": 0.8, "grey": 0.2,
        "blur": 0.5},
}  # fmt: skip


def values(name: str, recipe: str) -> dict:
    config = preset(name, recipe)
    flat = flatten(config.model_dump())
    return flat | {"recipe": config.recipe}


@pytest.mark.parametrize("recipe", ["paper", "v2"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_the_published_ones(name, recipe):
    """Kills: an old value left behind, v2's rate used for pretraining, ImageNet run with CIFAR's v2."""
    expected = PAPER if recipe == "paper" else (V2_IMAGENET if name == "imagenet" else V2)
    if recipe == "v2":
        expected = expected | {"model.overcluster_factor": V2_OVERCLUSTER[name]}
    got = values(name, recipe)
    assert {key: got[key] for key in expected} == expected


@pytest.mark.parametrize("recipe", ["paper", "v2"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_views_are_the_published_ones(name, recipe):
    family = "imagenet" if name == "imagenet" else "cifar"
    got = values(name, recipe)
    for kind in ("large", "small") if recipe == "v2" else ("large",):
        expected = VIEWS[family, recipe, kind]
        assert {key: got[f"augment.{kind}.{key}"] for key in expected} == expected, kind


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_differ_exactly_where_the_tables_do(name):
    """Presets never mix silently: a key in which the recipes differ is in a table above."""
    paper, v2 = values(name, "paper"), values(name, "v2")
    differing = {key for key in paper if paper[key] != v2[key]}
    allowed = {"recipe", *PAPER, *(key for key in paper if key.startswith("augment."))}
    assert differing <= allowed
    assert {"recipe", "discover.base_lr", "discover.weight_decay", "model.mlp_input"} <= differing


@pytest.mark.parametrize("name", CIFAR)
def test_cifar_never_takes_imagenet_or_digit_values(name):
    for recipe in ("paper", "v2"):
        got = values(name, recipe)
        assert (got["model.stem"], got["data.store_size"]) == ("small", 32)
        assert got["data.composition"] == "proportional"
        assert got["augment.large.affine"] == got["augment.small.affine"] == 0
        assert got["augment.large.blur"] == got["augment.small.blur"] == 0


def test_known_classes_are_those_of_table_1():
    known = {"cifar10": "first:5", "cifar100_20": "first:80", "cifar100_50": "first:50", "digits": "first:5"}
    assert {name: preset(name).data.known_classes for name in known} == known
    assert preset("imagenet").data.known_classes is None  # the split files decide
    assert preset("custom").data.known_classes is None  # a row without a label is unlabeled


def test_imagenet_pairs_one_to_one_and_evaluates_at_256():
    config = preset("imagenet")
    assert (config.data.composition, config.data.store_size, config.model.stem) == ("paired", 256, "imagenet")


@pytest.mark.parametrize("recipe", ["paper", "v2"])
def test_digits_are_never_mirrored(recipe):
    views = preset("digits", recipe).augment
    assert views.large.flip == views.small.flip == 0
    assert views.large.crop == "none"
    assert views.large.equalize == views.large.solarize == 0


@pytest.mark.parametrize("recipe", ["paper", "v2"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_and_recipe_is_valid_and_says_what_it_is(name, recipe):
    config = preset(name, recipe)
    assert (config.preset, config.recipe) == (name, recipe)
    assert Config.model_validate(to_dict(config)) == config
    assert "Command: ``uno d" in (PRESETS[name].__doc__ or "")


def test_presets_are_all_different():
    hashes = [config_hash(preset(name, recipe)) for name in PRESETS for recipe in ("paper", "v2")]
    assert len(set(hashes)) == len(hashes)


def test_schema_defaults_are_the_custom_preset():
    """A default changed in the schema alone would change what ``--data folder:X`` trains."""
    assert preset("custom") == Config()


def test_unknown_names_are_one_line_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"^unknown preset 'cifr10'; did you mean 'cifar10'\?$"):
        preset("cifr10")
    with pytest.raises(ConfigError, match=r"^unknown preset 'zzz'; choose from digits, "):
        preset("zzz")
    with pytest.raises(ConfigError, match=r"^unknown recipe 'v3'; choose paper or v2$"):
        preset("digits", "v3")
