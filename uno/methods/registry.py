"""From a run's configuration to its method, imported when it is used, and to its network."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from uno.config import Config
from uno.methods import METHODS

if TYPE_CHECKING:  # both import torch, which the command line does without
    from uno.methods.method import Method
    from uno.model import UnoModel


def load(config: Config) -> Method:
    """The method of a run, with the head that its encoder leaves it; UNO with options of later work is the
    method of :mod:`uno.methods.extensions`.
    """
    o = config.objective
    extended = o.iic_weight or o.iic_view_weight or o.rkd_weight or o.queue_size
    method: Method = _method("extensions" if config.method == "uno" and extended else config.method)
    if config.model.trainable == "heads" and method.frozen_head is not None:
        return replace(method, novel_head=method.frozen_head)
    return method


def _method(module: str) -> Any:
    return import_module(f"uno.methods.{module}").METHOD


def settings(name: str, preset: str) -> dict[str, Any]:
    """Dotted keys that a method's authors set differently on a preset's data; UNO's are the presets, of
    which others leave out what is UNO's own: where its prototypes start, and what Sinkhorn expects.
    """
    if name == "uno" or name not in METHODS:  # a plain command line imports no method, and so no torch
        return {}
    own = {"model.start": "random", "objective.prior": None} if preset == "photos" else {}
    return {**own, **_method(name).settings.get(preset, {})}


def build_network(config: Config, num_known: int, num_novel: int, seed: int) -> UnoModel:
    """The freshly initialised network of the run's method; ``num_novel`` 0: encoder and known head alone."""
    from uno.model import build_model

    return build_model(config.model, num_known, num_novel, seed, load(config).novel_head)


def num_heads(config: Config) -> int:
    """Cluster heads H of the run's method."""
    return config.model.num_heads if load(config).novel_head is None else 1
