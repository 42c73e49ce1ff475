"""From a run's configuration to its method, imported when it is used, and to its network."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from uno.config import Config
from uno.errors import ConfigError
from uno.methods import METHODS

if TYPE_CHECKING:  # both import torch, which the command line does without
    from uno.methods.method import Method
    from uno.model import UnoModel


def load(config: Config) -> Method:
    """The method of a run; UNO with options of later work is the method of :mod:`uno.methods.extensions`.

    ConfigError: it trains the encoder, which the run has frozen.
    """
    o = config.objective
    extended = o.iic_weight or o.iic_view_weight or o.rkd_weight or o.queue_size
    method: Method = _method("extensions" if config.method == "uno" and extended else config.method)
    if method.trains_encoder and config.model.trainable == "heads":
        text = f"method {config.method} trains the encoder, which model.trainable heads has frozen"
        raise ConfigError(f"{text}; use --model.trainable last or all")
    return method


def _method(module: str) -> Any:
    return import_module(f"uno.methods.{module}").METHOD


def settings(name: str, preset: str) -> dict[str, Any]:
    """Dotted keys that a method's authors set differently on a preset's data; UNO's are the presets."""
    if name == "uno" or name not in METHODS:  # a plain command line imports no method, and so no torch
        return {}
    return dict(_method(name).settings.get(preset, {}))


def build_network(config: Config, num_known: int, num_novel: int, seed: int) -> UnoModel:
    """The freshly initialised network of the run's method; ``num_novel`` 0: encoder and known head alone."""
    from uno.model import build_model

    return build_model(config.model, num_known, num_novel, seed, load(config).novel_head)


def num_heads(config: Config) -> int:
    """Cluster heads H of the run's method."""
    return config.model.num_heads if load(config).novel_head is None else 1
