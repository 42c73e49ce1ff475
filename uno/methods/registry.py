"""The method and the network of a run, from its configuration."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uno import methods
from uno.config import VECTORS, Config
from uno.methods import Method

if TYPE_CHECKING:  # it imports torch, which the command line does without
    from uno.model import UnoModel


def load(config: Config) -> Method:
    """Return the method of a run, with the novel head that fits its encoder.

    If the encoder is frozen (``model.finetune`` is "none") and the method has a
    ``frozen_head``, this is the method's ``novel_head``.

    Raises:
        ConfigError: There is no such method.
    """
    method = methods.load(config.method)
    if config.model.finetune == "none" and method.frozen_head is not None:
        return replace(method, novel_head=method.frozen_head)
    return method


def settings(name: str, preset: str) -> dict[str, Any]:
    """Return the settings that a method brings along under a preset, by dotted key.

    They are the name of the method, and the constants that its authors use on the data
    of the preset. For UNO there are none, because the presets are made for it. With the
    presets "photos" and "vectors", a method with a novel head of its own turns off what
    belongs to UNO's head: where its prototypes start, and the class prior. A method
    that does not train gets 0 epochs of discovery and no cached views.

    Args:
        name: The name of the method.
        preset: The name of the preset.

    Returns:
        Values by key, such as "dtc.warmup".

    Raises:
        ConfigError: There is no such method.
    """
    # a plain command line imports no method, and so no torch
    if name == methods.DEFAULT:
        return {}
    method = methods.load(name)
    values: dict[str, Any] = {"method": name}
    if preset in ("photos", VECTORS) and method.novel_head is not None:
        values |= {"model.prototype_init": "random", "objective.class_prior": None}
    if not method.trains:
        values |= {"discover.epochs": 0, "augment.num_cached_views": 0}
    return values | {
        f"{method.name}.{key}": v for key, v in method.settings.get(preset, {}).items()
    }


def build_network(
    config: Config, num_known: int, num_novel: int, seed: int
) -> "UnoModel":
    """Build the freshly initialized network of the run's method.

    Args:
        config: The configuration of the run.
        num_known: The number of known classes.
        num_novel: The number of novel classes; 0 for the encoder and the known head
            alone.
        seed: The seed of the weights.
    """
    from uno.model import build_model

    method = load(config)
    return build_model(
        config.model, num_known, num_novel, seed, method.novel_head, method.adapter
    )


def num_heads(config: Config) -> int:
    """Return the number of cluster heads of the run's method.

    It is ``model.num_heads`` for UNO's projection heads, and 1 for a method that has a
    novel head of its own.
    """
    return config.model.num_heads if load(config).novel_head is None else 1
