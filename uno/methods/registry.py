"""From a run's configuration to its method and to its network."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uno import methods
from uno.config import VECTORS, Config
from uno.methods import Method

if TYPE_CHECKING:  # it imports torch, which the command line does without
    from uno.model import UnoModel


def load(config: Config) -> Method:
    """The method of a run, with the head that its encoder leaves it."""
    method = methods.load(config.method)
    if config.model.finetune == "none" and method.frozen_head is not None:
        return replace(method, novel_head=method.frozen_head)
    return method


def settings(name: str, preset: str) -> dict[str, Any]:
    """Dotted keys of a run by method ``name`` with a preset: the method, and what its
    authors set differently on the preset's data. UNO's are the presets, of which
    methods with another head leave out what belongs to UNO's: where its prototypes
    start, and what Sinkhorn expects. ConfigError: there is no such method.
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
    """The freshly initialized network of the run's method; ``num_novel`` 0: encoder
    and known head alone.
    """
    from uno.model import build_model

    method = load(config)
    return build_model(
        config.model, num_known, num_novel, seed, method.novel_head, method.adapter
    )


def num_heads(config: Config) -> int:
    """Cluster heads H of the run's method."""
    return config.model.num_heads if load(config).novel_head is None else 1
