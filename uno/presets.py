"""Named settings. Values come from three places, kept apart in the comments:

- [paper]: Fini et al., ICCV 2021, Sec. 4.1 "Implementation Details" and Tab. 1;
- [release]: the authors' first public code, where the paper gives no number (momentum, warm-up, magnitudes);
- [v2]: the authors' improved recipe, published with their code after the paper.

Precedence: defaults < preset < YAML < command line < Tune sample.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from uno.config import Config, override
from uno.errors import ConfigError

CIFAR10_STATS = {"data.mean": (0.4914, 0.4822, 0.4465), "data.std": (0.2470, 0.2435, 0.2616)}
CIFAR100_STATS = {"data.mean": (0.5071, 0.4865, 0.4409), "data.std": (0.2673, 0.2564, 0.2762)}
IMAGENET_STATS = {"data.mean": (0.485, 0.456, 0.406), "data.std": (0.229, 0.224, 0.225)}


def _views(prefix: str, **values: Any) -> dict[str, Any]:
    return {f"augment.{prefix}.{key}": value for key, value in values.items()}


# [paper]: batch, rates, decay, heads, m, tau, eps, iterations, layer sizes, 2 views.
# [release]: momentum, warm-up.
PAPER: dict[str, Any] = {
    "recipe": "paper",
    "train.batch_size": 512,
    "pretrain.base_lr": 0.1, "pretrain.min_lr": 0.001, "pretrain.weight_decay": 1e-4,
    "pretrain.momentum": 0.9, "pretrain.warmup_epochs": 10, "pretrain.epochs": 200,
    "discover.base_lr": 0.1, "discover.min_lr": 0.001, "discover.weight_decay": 1e-4,
    "discover.momentum": 0.9, "discover.warmup_epochs": 10, "discover.epochs": 200,
    "model.num_heads": 4, "model.overcluster_factor": 3,
    "model.hidden_dim": 2048, "model.projection_dim": 256,
    "model.mlp_input": "normalized",
    "objective.temperature": 0.1, "objective.epsilon": 0.05, "objective.num_iters": 3,
}  # fmt: skip

# [v2]: what differs from PAPER; pretraining keeps 0.1 and 1e-4.
V2: dict[str, Any] = {
    "recipe": "v2",
    "discover.base_lr": 0.4, "discover.weight_decay": 1.5e-4, "discover.epochs": 500,
    "model.mlp_input": "raw",
}  # fmt: skip

# [release]: magnitudes; [paper] names the operations.
CIFAR_PAPER_VIEWS: dict[str, Any] = {
    **_views("large", num_views=2, size=32, crop="pad_or_resized", crop_padding=4, crop_scale=(0.8, 1.0),
             flip=0.5, jitter=0.5, brightness=0.3, contrast=0.3, saturation=0.15, hue=0.1, grey=0.1,
             solarize=0.0, equalize=0.0, blur=0.0),
    **_views("small", num_views=0),
}  # fmt: skip
CIFAR_V2_VIEWS: dict[str, Any] = {  # [v2]
    **_views("large", num_views=2, size=32, crop="pad_or_resized", crop_padding=4, crop_scale=(0.5, 1.0),
             flip=0.5, jitter=0.6, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grey=0.0,
             solarize=0.1, equalize=0.1, blur=0.0),
    **_views("small", num_views=2, size=18, crop="resized", crop_scale=(0.3, 0.8), flip=0.5, jitter=0.8,
             brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grey=0.0, solarize=0.2, equalize=0.2,
             blur=0.0),
}  # fmt: skip
IMAGENET_PAPER_VIEWS: dict[str, Any] = {  # [release]
    **_views("large", num_views=2, size=224, crop="resized", crop_scale=(0.5, 1.0), flip=0.5, jitter=0.5,
             brightness=0.3, contrast=0.3, saturation=0.15, hue=0.1, grey=0.1, blur=0.2,
             blur_sigma=(0.1, 2.0), solarize=0.0, equalize=0.0),
    **_views("small", num_views=0, size=96),
}  # fmt: skip
IMAGENET_V2_VIEWS: dict[str, Any] = {  # [v2]
    **_views("large", num_views=2, size=224, crop="resized", crop_scale=(0.5, 1.0), flip=0.5, jitter=0.5,
             brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grey=0.2, blur=0.2, blur_sigma=(0.1, 2.0),
             solarize=0.0, equalize=0.0),
    **_views("small", num_views=2, size=96, crop="resized", crop_scale=(0.08, 0.5), flip=0.5, jitter=0.8,
             brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grey=0.2, blur=0.5, blur_sigma=(0.1, 2.0),
             solarize=0.0, equalize=0.0),
}  # fmt: skip


def _cifar(recipe: str, overcluster_v2: int, stats: Mapping[str, Any], known: int | None) -> dict[str, Any]:
    values = {
        **PAPER, **CIFAR_PAPER_VIEWS, **stats,
        "model.encoder": "resnet18", "model.stem": "small", "data.store_size": 32,
        "data.known_classes": known and f"first:{known}", "data.composition": "proportional",
    }  # fmt: skip
    if recipe == "v2":
        values |= {**V2, **CIFAR_V2_VIEWS, "model.overcluster_factor": overcluster_v2}
    return values


def custom(recipe: str = "paper") -> dict[str, Any]:
    """Your own images: the paper's CIFAR10 settings (32 px, ResNet18) without CIFAR10's known classes.

    Command: ``uno discover --data folder:DIR --num-novel 7``. With ``paper`` these are the schema's defaults.
    Photographs may need more pixels: ``--data.store-size``, ``--augment.large.size`` and ``--model.stem``.
    """
    return _cifar(recipe, 3, CIFAR10_STATS, known=None)


def cifar10(recipe: str = "paper") -> dict[str, Any]:
    """CIFAR10, 5 known and 5 novel classes (paper Tab. 1).

    Command: ``uno discover --preset cifar10 --data cifar10:DIR --device cuda``. Published: novel
    task-aware train accuracy 96.1 (paper), 93.3-93.6 (v2).
    """
    return _cifar(recipe, 10, CIFAR10_STATS, known=5) | {"data.source": "cifar10:data"}


def cifar100_20(recipe: str = "paper") -> dict[str, Any]:
    """CIFAR100, 80 known and 20 novel classes (paper Tab. 1).

    Command: ``uno discover --preset cifar100_20 --data cifar100:DIR --device cuda``. Published: 84.5 average
    and 85.0 best head (paper), 90.5 (v2).
    """
    return _cifar(recipe, 5, CIFAR100_STATS, known=80) | {"data.source": "cifar100:data"}


def cifar100_50(recipe: str = "paper") -> dict[str, Any]:
    """CIFAR100, 50 known and 50 novel classes (paper Tab. 1).

    Command: ``uno discover --preset cifar100_50 --data cifar100:DIR --device cuda``. Published: 52.8 average
    and 52.9 best head (paper), 60.8-62.3 (v2).
    """
    return _cifar(recipe, 3, CIFAR100_STATS, known=50) | {"data.source": "cifar100:data"}


def imagenet(recipe: str = "paper") -> dict[str, Any]:
    """ImageNet, 882 known classes and one of three 30-class novel subsets (paper Tab. 1).

    Command: ``uno discover --preset imagenet --data imagenet:DIR --data.imagenet-split A --workers 8``.
    Published: 89.2 average and 90.6 best head (paper), 90.7 (v2). Batches pair one labeled with one unlabeled
    image and cycle the shorter set [release].
    """
    values = {
        **PAPER, **IMAGENET_PAPER_VIEWS, **IMAGENET_STATS,
        "model.encoder": "resnet18", "model.stem": "imagenet", "data.store_size": 256,
        "data.composition": "paired", "data.source": "imagenet:data", "train.checkpoint_every_epochs": 1,
    }  # fmt: skip
    if recipe == "v2":
        values |= {
            **V2, **IMAGENET_V2_VIEWS, "model.overcluster_factor": 4,
            "pretrain.epochs": 100, "discover.epochs": 60, "discover.base_lr": 0.2,
            "pretrain.warmup_epochs": 5, "discover.warmup_epochs": 5,
        }  # fmt: skip
    return values


def digits(recipe: str = "paper") -> dict[str, Any]:
    """scikit-learn's 1,797 real 8x8 handwritten digits: 0-4 known, 5-9 novel. No download.

    Command: ``uno demo`` or ``uno discover --preset digits``. Not in the paper: sizes, rates, epochs and the
    affine views are ours; tau, iterations and m are the paper's. Digits must not be flipped. Its two recipes
    differ only in where the projection heads read the feature.
    """
    view = dict(crop="none", flip=0.0, affine=1.0, affine_degrees=15.0, affine_translate=0.12,
                affine_shear=10.0, affine_scale=(0.85, 1.15), jitter=0.8, brightness=0.4,
                contrast=0.4, saturation=0.0, hue=0.0, grey=0.0,
                solarize=0.0, equalize=0.0, blur=0.0, size=8)  # fmt: skip
    values = {
        **PAPER, **_views("large", num_views=2, **view), **_views("small", **view | {"num_views": 0}),
        "data.source": "digits", "data.known_classes": "first:5", "data.store_size": 8,
        "data.mean": (0.3053, 0.3053, 0.3053), "data.std": (0.3761, 0.3761, 0.3761),
        "model.encoder": "resnet_small", "model.width": 16, "model.blocks": 1,
        "model.hidden_dim": 512, "model.projection_dim": 128,
        "train.batch_size": 128, "train.log_every": 50,
        "pretrain.epochs": 30, "pretrain.warmup_epochs": 3,
        "discover.epochs": 60, "discover.warmup_epochs": 5,
    }  # fmt: skip
    return values | ({"recipe": "v2", "model.mlp_input": "raw"} if recipe == "v2" else {})


PRESETS: dict[str, Callable[[str], dict[str, Any]]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100_20": cifar100_20,
    "cifar100_50": cifar100_50,
    "imagenet": imagenet,
    "custom": custom,
}


def preset(name: str, recipe: str = "paper") -> Config:
    """The configuration of a named preset.

    Raises:
        ConfigError: no preset of that name, or a recipe other than ``paper`` and ``v2``.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose from " + ", ".join(PRESETS)
        raise ConfigError(f"unknown preset {name!r}; {hint}")
    if recipe not in ("paper", "v2"):
        raise ConfigError(f"unknown recipe {recipe!r}; choose paper or v2")
    return override(Config(), {"preset": name, **PRESETS[name](recipe)})
