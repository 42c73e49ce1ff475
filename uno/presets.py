"""Presets: named settings that differ from the defaults of the schema.

The defaults are the paper's settings for CIFAR10. Comments name the source of a value:

- [paper]: Fini et al., ICCV 2021, Sec. 4.1 "Implementation Details" and Tab. 1;
- [release]: the authors' first public code, where the paper gives no number (momentum,
  warm-up, magnitudes);
- [v2]: the authors' improved recipe, published with their code after the paper.

Some differences from the authors' code are not due to a preset. Both were run side by
side in float64:

- Learning rate: The first release adds the losses of the two head families. Here and in
  v2 they are averaged. At the same learning rate the recipe ``paper`` therefore takes
  half the release's gradient. (The release's README uses batches of 256.) Without
  overclustering the weight of the cluster heads rises from 1/2 to 1 here, and stays 1
  there.
- BatchNorm: The release runs the encoder and the projector once for each view. Here
  views of one size share a pass of the encoder, and all views share a pass of the
  projector, which small crops need (record ``2026-11-23_views-digits``).
- The learning rate is a function of the step here, and of the epoch there. The std of
  CIFAR10 is that of the pixels here, and the mean of the std of each image in the
  release. v2 pretrains there with batches of 256.
- Views of ImageNet in memory are cut from stored squares of 256 px. Streamed images are
  cut from whole images, as in the authors' code. The authors of rKD have no
  overclustering heads on CIFAR (``--model.overcluster-factor 0``).

Precedence: defaults < preset < data < YAML < command line < Tune sample.
"""

from collections.abc import Mapping
from typing import Any

from uno.config import VECTORS, Config, override
from uno.errors import ConfigError, did_you_mean

Values = dict[str, Any]
"""Settings by dotted key."""


def _views(kind: str, **values: Any) -> Values:
    """Return settings of one kind of views by their dotted keys.

    For example ``_views("large", flip=0.0)`` is ``{"augment.large.flip": 0.0}``.

    Args:
        kind: ``large`` or ``small``.
        **values: Values of the fields of :class:`uno.config.ViewConfig`.
    """
    return {f"augment.{kind}.{key}": value for key, value in values.items()}


CIFAR100: Values = {
    "data.source": "cifar100:data",
    "data.mean": (0.5071, 0.4865, 0.4409),
    "data.std": (0.2673, 0.2564, 0.2762),
}

# [v2]; pretraining keeps 0.1 and 1e-4.
V2: Values = {
    "recipe": "v2",
    "model.mlp_input": "raw",
    "discover.base_lr": 0.4,
    "discover.weight_decay": 1.5e-4,
    "discover.epochs": 500,
}
V2_COLOR: Values = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2}
CIFAR_V2: Values = {
    **V2,
    **_views(
        "large",
        **V2_COLOR,
        crop_scale=(0.5, 1.0),
        jitter=0.6,
        grayscale=0.0,
        solarize=0.1,
        equalize=0.1,
    ),
    **_views(
        "small",
        **V2_COLOR,
        num_views=2,
        jitter=0.8,
        grayscale=0.0,
        solarize=0.2,
        equalize=0.2,
    ),
}
IMAGENET: Values = {  # views [release]; the rest as for CIFAR [paper]
    "data.source": "imagenet:data",
    "data.stored_size": 256,
    "data.batch_sampling": "balanced",
    "data.mean": (0.485, 0.456, 0.406),
    "data.std": (0.229, 0.224, 0.225),
    **_views("large", size=224, crop="resized", crop_scale=(0.5, 1.0), blur=0.2),
    **_views("small", size=96),
    "model.stem": "imagenet",
    "train.checkpoint_every_epochs": 1,
}
IMAGENET_V2: Values = {
    **V2,
    **_views("large", **V2_COLOR, grayscale=0.2),
    **_views(
        "small",
        **V2_COLOR,
        num_views=2,
        crop_scale=(0.08, 0.5),
        jitter=0.8,
        grayscale=0.2,
        blur=0.5,
    ),
    "model.overcluster_factor": 4,
    "pretrain.epochs": 100,
    "discover.epochs": 60,
    "discover.base_lr": 0.2,
    "pretrain.warmup_epochs": 5,
    "discover.warmup_epochs": 5,
}
# One's own photographs, few epochs on the features of a frozen encoder that somebody
# else has trained. Ours: docs/results/photos.md says how the values were chosen. 224
# px, and mean and std of torchvision's encoders; others bring their own
# (uno.encoders.weights).
PHOTOS: Values = {
    "data.stored_size": 256,
    "data.mean": (0.485, 0.456, 0.406),
    "data.std": (0.229, 0.224, 0.225),
    "data.validation_fraction": 0.1,
    **_views(
        "large",
        size=224,
        crop="resized",
        crop_scale=(0.4, 1.0),
        jitter=0.0,
        grayscale=0.0,
    ),
    "model.encoder": "torchvision:efficientnet_b0",
    "model.weights": "pretrained",
    "model.finetune": "none",
    "model.prototype_init": "kmeans",
    "objective.class_prior": "kmeans",
    "model.hidden_dim": 256,
    "model.projection_dim": 128,
    "train.batch_size": 512,
    "train.eval_batch_size": 128,
    "discover.base_lr": 0.06,
    "discover.epochs": 30,
    "discover.warmup_epochs": 3,
}
FROZEN_PRESETS = ("photos", VECTORS)
"""Presets that train heads on features of a frozen encoder."""
PRECOMPUTED: Values = {**PHOTOS, "model.encoder": VECTORS}
DIGIT_VIEW = dict(
    crop="none",
    flip=0.0,
    affine=1.0,
    affine_degrees=15.0,
    affine_translate=0.12,
    affine_shear=10.0,
    affine_scale=(0.85, 1.15),
    jitter=0.8,
    brightness=0.4,
    contrast=0.4,
    saturation=0.0,
    hue=0.0,
    grayscale=0.0,
    size=8,
)
DIGITS: Values = {
    **_views("large", **DIGIT_VIEW),
    **_views("small", **DIGIT_VIEW),
    "data.source": "digits",
    "data.known_classes": "first:5",
    "data.stored_size": 8,
    "data.mean": (0.3053, 0.3053, 0.3053),
    "data.std": (0.3761, 0.3761, 0.3761),
    "model.encoder": "resnet_small",
    "model.hidden_dim": 512,
    "model.projection_dim": 128,
    "train.batch_size": 128,
    "pretrain.epochs": 30,
    "pretrain.warmup_epochs": 3,
    "discover.epochs": 60,
    "discover.warmup_epochs": 5,
}


# CIFAR10 in an hour of a CPU core. Ours: chosen by docs/results/cpu-recipe.md.
CIFAR_CPU: Values = {
    "recipe": "cpu",
    "model.encoder": "resnet_small",
    "model.width": 24,
    "model.stages": 4,
    "model.stem": "cifar_stride2",
    "model.hidden_dim": 512,
    "model.projection_dim": 128,
    "train.batch_size": 256,
    "train.checkpoint_every_epochs": 1,
    "pretrain.epochs": 8,
    "pretrain.warmup_epochs": 1,
    "pretrain.base_lr": 0.4,
    "pretrain.weight_decay": 5e-4,
    "discover.epochs": 12,
    "discover.warmup_epochs": 0.5,
    "discover.base_lr": 0.4,
    "discover.weight_decay": 1.5e-4,
}


# the paper's values (Tab. 1), and what v2 changes in them
PRESETS: dict[str, tuple[Values, Values]] = {
    # scikit-learn's 1,797 real 8x8 digits: 0-4 known, 5-9 novel. Not in the paper:
    # sizes, rates, epochs and the affine views are ours; tau, iterations and m are the
    # paper's. Digits must not be flipped.
    "digits": (DIGITS, {"recipe": "v2", "model.mlp_input": "raw"}),
    "cifar10": (
        {"data.source": "cifar10:data", "data.known_classes": "first:5"},
        {**CIFAR_V2, "model.overcluster_factor": 10},
    ),
    "cifar100_20": (
        {**CIFAR100, "data.known_classes": "first:80"},
        {**CIFAR_V2, "model.overcluster_factor": 5},
    ),
    "cifar100_50": ({**CIFAR100, "data.known_classes": "first:50"}, CIFAR_V2),
    # Batches pair one labeled with one unlabeled image and cycle the shorter set
    # [release].
    "imagenet": (IMAGENET, IMAGENET_V2),
    "photos": (PHOTOS, {"recipe": "v2", "model.mlp_input": "raw"}),
    VECTORS: (PRECOMPUTED, {"recipe": "v2", "model.mlp_input": "raw"}),
    # Of one's own images uno.session.derive decides size, stem, batch and epochs.
    "scratch": ({}, CIFAR_V2),
}
CPU: dict[str, Values] = {"cifar10": CIFAR_CPU}
"""The settings of the recipe ``cpu`` that differ from the paper's, by preset."""

# The kinds of sources that have presets.
BENCHMARKS = ("digits", "cifar10", "cifar100", "imagenet")


def is_custom_data(given: Mapping[str, Any]) -> bool:
    """Return whether the data is the user's own, and not one of the benchmarks.

    The benchmarks are the digits, CIFAR10, CIFAR100 and ImageNet. The data is the
    user's own if ``data.labeled`` is set, or if the text of ``data.source`` before its
    first colon (all of it if there is none) is none of "digits", "cifar10", "cifar100"
    and "imagenet". So a path without a prefix is the user's own, unless it is spelled
    exactly as one of these names. Without both keys the data is the digits.

    Args:
        given: Settings by dotted key. Only these two keys are read.
    """
    kind = str(given.get("data.source", "digits")).partition(":")[0]
    return given.get("data.labeled") is not None or kind not in BENCHMARKS


IMAGE_SIZE = "image_size"
"""The key of the side of images in pixels, see :func:`scale_sizes`."""
SIZES = ("augment.large.size", "data.stored_size", "augment.small.size")


def scale_sizes(config: Config, size: Any) -> Values:
    """Scale the settings of a preset that are lengths in pixels to another image size.

    The lengths keep the proportions that they have in ``config``, rounded. But small
    views have at least 4 pixels, stored images 4 to 1024, and paddings at most 256.

    Args:
        config: The configuration of the preset, which stays as it is.
        size: The new side of large views in pixels, a whole number or its text.

    Returns:
        The sizes of large views (``size`` itself), small views and stored images, and
        the crop paddings of large and small views, by dotted key.

    Raises:
        ConfigError: The size is no whole number from 4 to 1024.
    """
    large, small = config.augment.large, config.augment.small
    size = override(config, {SIZES[0]: size}).augment.large.size
    scale = size / large.size
    return {
        "augment.large.size": size,
        "augment.small.size": max(4, round(small.size * scale)),
        "data.stored_size": max(4, min(round(config.data.stored_size * scale), 1024)),
        "augment.large.crop_padding": min(round(large.crop_padding * scale), 256),
        "augment.small.crop_padding": min(round(small.crop_padding * scale), 256),
    }


def preset(name: str, recipe: str = "paper") -> Config:
    """Return the configuration of a preset and a recipe.

    Args:
        name: The preset, a key of ``PRESETS``. A dash counts as an underscore.
        recipe: ``paper`` for the paper's settings, ``v2`` for the authors' later ones,
            or for some presets ``cpu`` for settings that suit one CPU core.

    Raises:
        ConfigError: There is no such preset, or it has no such recipe.
    """
    return override(Config(), merge_layers(preset_layers(name, recipe)))


def merge_layers(layers: Mapping[str, Values]) -> Values:
    """Merge layers of settings into one; the value of a later layer wins.

    Args:
        layers: Values by dotted key, by the name of the layer, such as "preset digits".
            The names are not used.

    Returns:
        Values by dotted key.
    """
    return {key: value for layer in layers.values() for key, value in layer.items()}


def preset_layers(name: str, recipe: str = "paper") -> dict[str, Values]:
    """Return the settings of a preset and of a recipe that changes it.

    Args:
        name: The preset. A dash counts as an underscore: ``cifar100-20``.
        recipe: ``paper`` for the paper's settings, ``v2`` for the authors' later ones,
            or for some presets ``cpu`` for settings that suit one CPU core.

    Returns:
        Two layers of settings, under the names "preset NAME" and "recipe NAME", in this
        order. Each has values by dotted key. The first one also has the name itself,
        with underscores, under the key "preset". The second one is empty for ``paper``.

    Raises:
        ConfigError: There is no such preset, or it has no such recipe.
    """
    name = name.replace("-", "_")
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS, "choose from " + ", ".join(PRESETS))
        raise ConfigError(f"unknown preset {name!r}{hint}")
    paper, v2 = PRESETS[name]
    recipes = {"paper": {}, "v2": v2, **({"cpu": CPU[name]} if name in CPU else {})}
    if recipe not in recipes:
        raise ConfigError(
            f"{name} has no recipe {recipe!r}; choose from {', '.join(recipes)}"
        )
    return {
        f"preset {name}": {"preset": name} | paper,
        f"recipe {recipe}": recipes[recipe],
    }
