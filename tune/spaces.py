"""Define hyperparameter search spaces: which settings are searched, and their values.

A user's own space is a YAML file with one entry for each setting, by its dotted key::

    objective.epsilon: {scale: log, low: 0.02, high: 0.2, reason: "softer targets"}
    model.num_heads: {choices: [2, 4, 8]}
"""

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
from uno.method import load


def frozen(value: Any) -> Any:
    """Return a value with each list in it, also a nested one, replaced by a tuple.

    The choices of a searched setting are kept in this form, so that values can be
    compared.
    """
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def _not_a_bool(value: Any) -> Any:
    """Return a bound of a range unchanged; raise ValueError if it is a bool."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


Bound = Annotated[float | None, pydantic.BeforeValidator(_not_a_bool)]


@dataclass(frozen=True, config=pydantic.ConfigDict(allow_inf_nan=False))
class Domain:
    """The values that one searched setting may take: a list of choices, or a range.

    Attributes:
        key: The dotted key of the setting, such as ``objective.epsilon``.
        low: The lower bound of a range; None with choices.
        high: The upper bound of a range, which is included; None with choices.
        scale: How a range is searched: ``linear``, ``log`` (uniformly in the
            logarithm), or ``int`` (whole numbers only).
        choices: The choices, in an order in which neighbors are alike; empty for a
            range.
        reason: Why these values are searched, a note for the reader of the space.
    """

    key: str
    low: Bound = None
    high: Bound = None
    scale: Literal["linear", "log", "int"] = "linear"
    choices: Annotated[tuple[Any, ...], pydantic.AfterValidator(frozen)] = ()
    reason: str = ""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Domain:
        """Check that the domain has either choices, or a range that its scale allows.

        Raises:
            ValueError: Both or neither are given, the lower bound is not below the
                upper one, a ``log`` range does not begin above 0, or the bounds of an
                ``int`` range are no whole numbers.
        """
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
        """The two bounds of the range, or all choices.

        A setting of the configuration that accepts these values accepts every value of
        the domain, unless the setting takes whole numbers only and the scale is not
        ``int``.
        """
        bounds = (value for value in (self.low, self.high) if value is not None)
        return self.choices or tuple(
            int(value) if self.scale == "int" else value for value in bounds
        )

    def at(self, share: float) -> Any:
        """Return the value at a relative position in the domain.

        Positions are equally spaced on the domain's scale. For example, ``at(0.5)`` is
        the middle choice, the arithmetic mean of the bounds, or on a log scale their
        geometric mean. Values of a range are rounded to 4 significant digits; those of
        an ``int`` range are whole numbers of any size.

        Args:
            share: The position, in [0, 1). A random number gives a random value.
        """
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        low, high = self.ends
        if self.scale == "int":
            return low + int(share * (high - low + 1))
        scale, back = (math.log, math.exp) if self.scale == "log" else (float, float)
        value = back(scale(low) + share * (scale(high) - scale(low)))
        return float(f"{min(max(value, low), high):.4g}")

    def position(self, value: Any) -> float:
        """Return the relative position of a value in the domain, from 0 to 1.

        The first choice or the lower bound has 0, the last choice or the upper bound
        has 1. Choices between are equally spaced, and numbers of a range are placed on
        the domain's scale. A number outside has the position of the nearest end. A
        number that is none of the choices lies between its neighbors, if all choices
        are numbers. Any other value has 0.
        """
        value, ends = frozen(value), self.ends
        if value in ends:
            return ends.index(value) / max(1, len(ends) - 1)
        if not all(isinstance(number, int | float) for number in (value, *ends)):
            return 0.0
        scale = math.log if self.scale == "log" and not self.choices else float
        value = min(max(value, min(ends)), max(ends))
        places = sorted(zip(ends, np.linspace(0, 1, len(ends)), strict=True))
        return float(
            np.interp(
                scale(value),
                [scale(end) for end, _ in places],
                [place for _, place in places],
            )
        )

    def describe(self) -> str:
        """Return the domain as text for users: ``0.02 to 0.2 (log)`` or ``2, 4, 8``."""
        return (
            ", ".join(map(str, self.choices))
            or f"{self.low:g} to {self.high:g} ({self.scale})"
        )


Space = tuple[Domain, ...]
MAX_POINTS = 10_000  # largest number of combinations of a grid

UNO = (
    "objective.epsilon",
    "objective.temperature",
    "model.num_heads",
    "model.overcluster_factor",
)
SPACES = {
    "uno": UNO,
    "full": (
        *UNO,
        "discover.base_lr",
        "discover.weight_decay",
        "augment.large.crop_scale",
        "objective.sinkhorn_iters",
        "augment.large.jitter",
    ),
}
"""The keys of each named space, in the order in which their values are drawn.

The domain of a key is declared in the schema, see
:class:`uno.config.FieldTraits`.
"""


def load_space(name: str, config: Config) -> Space:
    """Return a search space by its name, or read it from a YAML file.

    Settings of a named space that have no effect with this configuration, or would
    change the features of a frozen encoder, are left out.

    Args:
        name: A name of ``SPACES`` ("uno" or "full"), or the path of a YAML file.
        config: The configuration whose settings are searched.

    Returns:
        One domain for each searched setting: its key, and its choices or range.

    Raises:
        ConfigError: The name is unknown, the space has no setting, the file cannot be
            read, or it has a key that does not exist or must be the same for all
            trials, a domain that is not valid, a value that the configuration refuses,
            or a setting that would change the features of a frozen encoder.
    """
    if name in SPACES:
        entries = {
            key: (key, field_traits(key).search)
            for key in SPACES[name]
            if _has_effect(key, config)
        }
    elif name.endswith((".yaml", ".yml")) or os.path.exists(name):
        entries = {
            key: (f"{name}: {key}", entry) for key, entry in _read_entries(name).items()
        }
    else:
        raise ConfigError(
            f"unknown space {name!r}; choose {', '.join(SPACES)} or give a .yaml file"
        )
    if not entries:
        raise ConfigError(f"{name}: the search space is empty: it names no key")
    space, known = [], field_names(config.method)
    for key, (where, entry) in entries.items():
        try:
            domain = Domain(key, **cast(dict[str, Any], entry))
        except pydantic.ValidationError as error:
            raise ConfigError(describe(error, where)) from None
        if key not in known:
            override(config, {key: None})  # raises an error that names a similar key
            raise ConfigError(f"{key!r} is a section, not a key")
        # All trials have the same problem, machine and number of epochs.
        if (
            not field_traits(key).search
            or may_change_on_resume(key)
            or key == "discover.epochs"
        ):
            raise ConfigError(
                f"{key} cannot be searched: it is the same for all trials of a sweep"
            )
        # A value between the ends shows that a field of whole numbers needs scale int.
        values = domain.ends
        if not domain.choices and domain.scale != "int":
            low, high = domain.ends
            values = (low, high, low + (high - low) / math.e)
        changed = [override(config, {key: value}) for value in values]
        if config.model.finetune == "none" and _changes_features(key, config, changed):
            if name in SPACES:
                continue
            why = "features are computed once for all trials, and would change"
            raise ConfigError(
                f"{key} cannot be searched with model.finetune none: {why}"
            )
        space.append(domain)
    return tuple(space)


def _has_effect(key: str, config: Config) -> bool:
    """Return whether changing a setting changes the training of a configuration.

    The number of heads and the overclustering factor have no effect for a method
    without projection heads. The crop scale has none if the preset does not crop and
    resize large views, and no setting of large views has any with weak augmentation.

    Args:
        key: The dotted key of a setting in a named space.
        config: The configuration.
    """
    if key in ("model.num_heads", "model.overcluster_factor"):
        return load(config.method).has_projection_heads
    if key == "augment.large.crop_scale" and "resized" not in config.augment.large.crop:
        return False
    return not (key.startswith("augment.large.") and config.augment.weak)


def _changes_features(key: str, config: Config, changed: list[Config]) -> bool:
    """Return whether values of a setting would change the features of a frozen encoder.

    All trials share these features, so such a setting cannot be searched. For a setting
    of the section ``model`` the answer is True if it belongs to pretraining, such as a
    setting that changes or unfreezes the encoder.

    Args:
        key: The dotted key of the setting.
        config: The configuration that the user gave, with a frozen encoder.
        changed: The configuration with each of some values of the setting in turn.
    """
    # imported here: a plain command line needs no torch
    from uno.data.features import settings

    if key.startswith("model."):
        return field_traits(key).scope == "pretrain"
    return any(settings(one) != settings(config) for one in changed)


def _read_entries(path: str) -> dict[str, dict[str, Any]]:
    """Read a search space from a YAML file, without checking the values.

    :func:`~uno.config.load_yaml` flattens ``key: {low: 1}`` to ``key.low: 1``, which is
    undone here.

    Args:
        path: The path of the file.

    Returns:
        For each dotted key the fields of its :class:`Domain`, some of ``low``,
        ``high``, ``scale``, ``choices`` and ``reason``.

    Raises:
        ConfigError: The file cannot be read, or an entry has another field.
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
    """Draw a random value for each searched setting, for one trial of a random search.

    The result depends on the arguments only.

    Args:
        space: The search space.
        seed: The seed of the search.
        index: The number of the trial.

    Returns:
        The values by dotted key.
    """
    shares = np.random.default_rng([seed, index]).random(len(space)).tolist()
    return {
        domain.key: domain.at(share)
        for domain, share in zip(space, shares, strict=True)
    }


def grid(space: Space, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all combinations of values in a search space, without the one given.

    Args:
        space: The search space.
        given: The values by dotted key that trial 0 has, those of the user's
            configuration. This combination is left out, if it is one of the grid.

    Returns:
        The combinations, each with its values by dotted key. The value of the last key
        changes fastest.

    Raises:
        ConfigError: A key has infinitely many values, or there are more than 10,000
            combinations.
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
    """Return the values that a configuration has for the searched settings.

    These are the values of trial 0 of every hyperparameter search.

    Args:
        space: The search space.
        config: The configuration.

    Returns:
        The values by dotted key, with tuples in the place of lists.
    """
    flat = flatten(to_dict(config))
    return {domain.key: frozen(flat[domain.key]) for domain in space}


def to_tree(space: Space) -> dict[str, dict[str, Any]]:
    """Return a search space as plain data for YAML and JSON.

    Args:
        space: The search space.

    Returns:
        For each dotted key the fields of its :class:`Domain` that are set, such as
        ``low``, ``high`` and ``scale``.
    """
    trees = (
        pydantic.TypeAdapter(Domain).dump_python(domain, mode="json")
        for domain in space
    )
    return {
        tree.pop("key"): {k: v for k, v in tree.items() if v not in ([], None)}
        for tree in trees
    }


def from_tree(tree: Mapping[str, Mapping[str, Any]]) -> Space:
    """Return the search space that :func:`to_tree` has turned into plain data.

    Args:
        tree: For each dotted key the fields of its :class:`Domain` that are set, such
            as ``low``, ``high`` and ``scale``.

    Returns:
        One domain for each searched setting.
    """
    return tuple(Domain(key, **entry) for key, entry in tree.items())
