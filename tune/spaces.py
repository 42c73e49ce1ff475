"""Search spaces as data: which configuration keys are searched, between which bounds,
and why those.

A user's own space is a YAML file of the same form, one entry a key::

    objective.epsilon: {scale: log, low: 0.02, high: 0.2, reason: "sharper or softer targets"}
    model.num_heads: {choices: [2, 4, 8]}
"""  # noqa: E501

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any, Literal, cast

import numpy as np
import pydantic
from pydantic.dataclasses import dataclass

from uno.config import (
    Config,
    describe,
    field_names,
    field_traits,
    flatten,
    load_yaml,
    may_change_on_resume,
    override,
    to_dict,
)
from uno.errors import ConfigError
from uno.methods import load


def frozen(value: Any) -> Any:
    """``value`` with tuples for lists, as a domain holds its choices."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


Bound = Annotated[float | None, pydantic.BeforeValidator(_not_a_bool)]


@dataclass(frozen=True, config=pydantic.ConfigDict(allow_inf_nan=False))
class Domain:
    """Values of one key: ``choices``, or from ``low`` to ``high`` on a ``scale``."""

    key: str
    low: Bound = None
    high: Bound = None
    scale: Literal["linear", "log", "int"] = "linear"
    choices: Annotated[tuple[Any, ...], pydantic.AfterValidator(frozen)] = ()
    reason: str = ""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Domain:
        bounds = [value for value in (self.low, self.high) if value is not None]
        if self.choices and bounds:
            raise ValueError("give either choices, or low and high")
        if self.choices:
            return self
        if len(bounds) < 2:
            raise ValueError("needs choices, or the numbers low and high")
        low, high = bounds
        if low >= high:
            raise ValueError(f"low {low:g} is not below high {high:g}")
        if self.scale == "log" and low <= 0:
            raise ValueError(f"a log scale needs low above 0, got {low:g}")
        if self.scale == "int" and (low % 1 or high % 1):
            raise ValueError(
                f"an int scale needs whole bounds, got {low:g} and {high:g}"
            )
        return self

    @property
    def ends(self) -> tuple[Any, ...]:
        """The bounds, or all choices: every value is valid if these are."""
        bounds = (value for value in (self.low, self.high) if value is not None)
        return self.choices or tuple(
            int(value) if self.scale == "int" else value for value in bounds
        )

    def at(self, share: float) -> Any:
        """The value below which ``share`` in [0, 1) of the domain lies."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        low, high = self.ends
        if self.scale == "int":
            return low + int(share * (high - low + 1))
        scale, back = (math.log, math.exp) if self.scale == "log" else (float, float)
        value = back(scale(low) + share * (scale(high) - scale(low)))
        return float(f"{min(max(value, low), high):.4g}")

    def position(self, value: Any) -> float:
        """Place of a value in its domain, 0 to 1: the inverse of :meth:`at`, clipped
        outside.
        """
        value, ends = frozen(value), self.ends
        if value in ends:
            return ends.index(value) / max(1, len(ends) - 1)
        if not all(isinstance(number, int | float) for number in (value, *ends)):
            return 0.0
        scale = math.log if self.scale == "log" else float
        return float(
            np.interp(
                scale(value), [scale(end) for end in ends], np.linspace(0, 1, len(ends))
            )
        )

    def describe(self) -> str:
        """``0.02 to 0.2 (log)`` or ``2, 4, 8``."""
        return (
            ", ".join(map(str, self.choices))
            or f"{self.low:g} to {self.high:g} ({self.scale})"
        )


Space = tuple[Domain, ...]
MAX_POINTS = 10_000  # of a grid

UNO = (
    "objective.epsilon",
    "objective.temperature",
    "model.num_heads",
    "model.overcluster_factor",
)
MORE = (
    "discover.base_lr",
    "discover.weight_decay",
    "augment.large.crop_scale",
    "objective.sinkhorn_iters",
)
SPACES = {"uno": UNO, "full": (*UNO, *MORE, "augment.large.jitter")}
"""Named spaces: keys, in the order of their draws; the schema has the domain of
each.
"""


def load_space(name: str, config: Config) -> Space:
    """A named space, or the one in a YAML file; ConfigError if it names a key or
    value no run could have.
    """
    if name in SPACES:
        entries = {
            key: (key, field_traits(key).search)
            for key in SPACES[name]
            if _has_effect(key, config)
        }
    elif name.endswith((".yaml", ".yml")) or os.path.exists(name):
        entries = {
            key: (f"{name}: {key}", entry) for key, entry in _from_file(name).items()
        }
    else:
        raise ConfigError(
            f"unknown space {name!r}; choose {', '.join(SPACES)} or give a .yaml file"
        )
    if not entries:
        raise ConfigError("the search space is empty: it names no key")
    space, known = [], field_names(config.method)
    for key, (where, entry) in entries.items():
        try:
            domain = Domain(key, **cast(dict[str, Any], entry))
        except pydantic.ValidationError as error:
            raise ConfigError(describe(error, where)) from None
        if key not in known:
            override(config, {key: None})  # raises, and names the nearest key
            raise ConfigError(f"{key!r} is a section, not a key")
        # Trials share the problem, the machine, and what early stopping compares by.
        if (
            not field_traits(key).search
            or may_change_on_resume(key)
            or key == "discover.epochs"
        ):
            raise ConfigError(
                f"{key} cannot be searched: it is the same for all trials of a sweep"
            )
        # between the ends: a whole number needs scale int
        values = (*domain.ends, domain.at(0.37))
        changed = [override(config, {key: value}) for value in values]
        if config.model.finetune == "none" and _other_features(key, config, changed):
            if name in SPACES:
                continue
            why = "features are computed once for all trials, and would change"
            raise ConfigError(
                f"{key} cannot be searched with model.finetune none: {why}"
            )
        space.append(domain)
    return tuple(space)


def _has_effect(key: str, config: Config) -> bool:
    """Return whether a key of a named space changes anything: some presets switch
    operations off.
    """
    if key in ("model.num_heads", "model.overcluster_factor"):
        return load(config.method).novel_head is None
    if key == "augment.large.crop_scale" and "resized" not in config.augment.large.crop:
        return False
    return not (key.startswith("augment.large.") and config.augment.weak)


def _other_features(key: str, config: Config, changed: list[Config]) -> bool:
    """Return whether a key's values give a frozen encoder other features, or
    unfreeze it.
    """
    # imported here: a plain command line needs no torch
    from uno.data.features import settings

    if key.startswith("model."):
        return field_traits(key).scope == "pretrain"
    return any(settings(one) != settings(config) for one in changed)


def _from_file(path: str) -> dict[str, dict[str, Any]]:
    """Entries of a YAML file: ``load_yaml`` has flattened ``key: {low: 1}`` to
    ``key.low: 1``.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name, value in load_yaml(path).items():
        key, _, setting = name.rpartition(".")
        if setting not in ("low", "high", "scale", "choices", "reason"):
            raise ConfigError(
                f"{path}: {name}: expected KEY: {{low, high, scale, choices, reason}}"
            )
        entries.setdefault(key, {})[setting] = value
    return entries


def draw(space: Space, seed: int, index: int) -> dict[str, Any]:
    """The overrides of random trial ``index``: a function of (space, seed, index)
    and of nothing else.
    """
    shares = np.random.default_rng([seed, index]).random(len(space)).tolist()
    return {
        domain.key: domain.at(share)
        for domain, share in zip(space, shares, strict=True)
    }


def grid(space: Space, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All combinations of the values of ``space``, the last key's first, without that
    of ``given``. ConfigError: a range, or more than 10,000 combinations.
    """
    values = {
        d.key: (
            d.choices or (range(d.ends[0], d.ends[1] + 1) if d.scale == "int" else ())
        )
        for d in space
    }
    if endless := next((key for key, each in values.items() if not each), None):
        what = "--search grid needs choices, or low and high of scale int"
        raise ConfigError(f"{endless}: {what}; write them to a --space FILE.yaml")
    if (count := math.prod(map(len, values.values()))) > MAX_POINTS:
        raise ConfigError(
            f"--search grid: the space has {count:,} combinations, more than"
            f" {MAX_POINTS:,}"
        )
    points = (
        dict(zip(values, point, strict=True)) for point in product(*values.values())
    )
    return [point for point in points if point != given]


def current(space: Space, config: Config) -> dict[str, Any]:
    """The values that ``config`` itself has for the searched keys: trial 0 of every
    sweep.
    """
    flat = flatten(to_dict(config))
    return {domain.key: frozen(flat[domain.key]) for domain in space}


def to_tree(space: Space) -> dict[str, dict[str, Any]]:
    """The space as plain data for YAML and JSON; :func:`from_tree` reads it back."""
    trees = (
        pydantic.TypeAdapter(Domain).dump_python(domain, mode="json")
        for domain in space
    )
    return {
        tree.pop("key"): {k: v for k, v in tree.items() if v not in ([], None)}
        for tree in trees
    }


def from_tree(tree: Mapping[str, Mapping[str, Any]]) -> Space:
    """Inverse of :func:`to_tree`."""
    return tuple(Domain(key, **entry) for key, entry in tree.items())
