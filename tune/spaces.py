"""Search spaces as data: which configuration keys are searched, between which bounds, and why those.

A user's own space is a YAML file of the same form, one entry a key::

    objective.epsilon: {scale: log, low: 0.02, high: 0.2, reason: "sharper or softer targets"}
    model.num_heads: {choices: [2, 4, 8]}

Every key and every bound is checked against the configuration's schema before anything starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from uno.config import Config, field_names, flatten, load_yaml, override, to_dict
from uno.errors import ConfigError

SCALES = ("linear", "log", "int")
FIXED = ("preset", "recipe", "seed", "output", "data", "compute", "train.max_steps", "train.log_every")
NOT_SEARCHED = (
    "model.weights", "train.keep_checkpoints", "train.checkpoint_every_epochs", "train.eval_batch_size",
    "discover.epochs",
)  # fmt: skip
"""Keys that name the problem or the machine, or (epochs) what early stopping compares trials by."""


@dataclass(frozen=True)
class Domain:
    """Values of one key: ``choices``, or from ``low`` to ``high`` on a ``scale`` (linear, log, int)."""

    key: str
    low: float | None = None
    high: float | None = None
    scale: str = "linear"
    choices: tuple[Any, ...] = ()
    reason: str = ""

    def at(self, share: float) -> Any:
        """The value below which ``share`` in [0, 1) of the domain lies."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        assert self.low is not None and self.high is not None
        if self.scale == "int":
            return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        if self.scale == "log":
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return float(f"{min(max(value, self.low), self.high):.4g}")

    @property
    def ends(self) -> tuple[Any, ...]:
        """What must be valid for every value to be: the bounds, or all choices."""
        if self.choices:
            return self.choices
        return tuple(int(v) if self.scale == "int" else v for v in (self.low, self.high) if v is not None)

    def describe(self) -> str:
        """``0.02 to 0.2 (log)`` or ``2, 4, 8``."""
        if self.choices:
            return ", ".join(str(choice) for choice in self.choices)
        return f"{self.low:g} to {self.high:g} ({self.scale})"


Space = tuple[Domain, ...]

UNO: Space = (
    Domain(
        "objective.epsilon", 0.01, 0.25, "log",
        reason="paper .05; below .01 targets are one-hot and swap between clusters, above .25 near uniform",
    ),
    Domain(
        "objective.temperature", choices=(0.05, 0.07, 0.1, 0.14, 0.2),
        reason="paper .1; steps of 1.4, not a range: pretraining depends on it and is trained once a value",
    ),
    Domain(
        "model.num_heads", 2, 8, "int",
        reason="paper 4; restarts of the clustering, of which the best is taken; cost grows with them",
    ),
    Domain(
        "model.overcluster_factor", choices=(0, 1, 2, 3, 5, 8),
        reason="paper 3, authors' later 3-10; 0 switches overclustering off",
    ),
)  # fmt: skip

FULL: Space = (
    *UNO,
    Domain(
        "discover.base_lr", 0.02, 0.5, "log", reason="paper .1, authors' later .4; beyond .5 it diverges"
    ),
    Domain("discover.weight_decay", 1e-5, 1e-3, "log", reason="paper 1e-4, authors' later 1.5e-4"),
    Domain(
        "augment.large.crop_scale", choices=((0.3, 1.0), (0.5, 1.0), (0.8, 1.0)),
        reason="paper .8, authors' later .5; where the preset takes no resized crops it is left out",
    ),
    Domain("objective.num_iters", 1, 10, "int", reason="paper 3; beyond 10 Sinkhorn has converged"),
    Domain(
        "augment.large.jitter", choices=(0.0, 0.25, 0.5, 0.8, 1.0),
        reason="strength of the colour augmentation: the share of views it touches (paper .5)",
    ),
)  # fmt: skip

SPACES: dict[str, Space] = {"uno": UNO, "full": FULL}


def load_space(name: str, config: Config) -> Space:
    """A named space, or the one in a YAML file, checked for ``config``.

    Raises:
        ConfigError: no such space or file, an unknown key, a bound the schema refuses, or an empty domain.
    """
    if name in SPACES:
        space = tuple(domain for domain in SPACES[name] if _has_effect(domain.key, config))
    elif name.endswith((".yaml", ".yml")) or os.path.exists(name):
        space = _from_file(name)
    else:
        raise ConfigError(f"unknown space {name!r}; choose {', '.join(SPACES)} or give a .yaml file")
    check_space(space, config)
    return space


def check_space(space: Space, config: Config) -> None:
    """Raise ConfigError for a key or value that no run could have."""
    if not space:
        raise ConfigError("the search space is empty: it names no key")
    known = field_names()
    for domain in space:
        if domain.key not in known:
            override(config, {domain.key: None})  # raises, and names the nearest key
            raise ConfigError(f"{domain.key!r} is a section, not a key")
        if domain.key in NOT_SEARCHED or any(
            domain.key == f or domain.key.startswith(f"{f}.") for f in FIXED
        ):
            raise ConfigError(f"{domain.key} cannot be searched: it is the same for all trials of a sweep")
        _check_domain(domain)
        for value in (*domain.ends, domain.at(0.37)):  # between the ends: a whole number needs scale int
            override(config, {domain.key: value})


def _check_domain(domain: Domain) -> None:
    if domain.choices:
        if domain.low is not None or domain.high is not None:
            raise ConfigError(f"{domain.key}: give either choices, or low and high")
        return
    for name, value in (("low", domain.low), ("high", domain.high)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{domain.key}: needs choices, or the numbers low and high ({name} is {value!r})"
            )
    assert domain.low is not None and domain.high is not None
    if domain.low >= domain.high:
        raise ConfigError(f"{domain.key}: low {domain.low:g} is not below high {domain.high:g}")
    if domain.scale == "log" and domain.low <= 0:
        raise ConfigError(f"{domain.key}: a log scale needs low above 0, got {domain.low:g}")
    if domain.scale == "int" and any(value != int(value) for value in (domain.low, domain.high)):
        raise ConfigError(f"{domain.key}: an int scale needs whole bounds, got {domain.describe()}")


def _has_effect(key: str, config: Config) -> bool:
    """Whether a key of a named space changes anything: some presets switch whole operations off."""
    if key in ("model.num_heads", "model.overcluster_factor") and config.method != "uno":
        return False
    if key == "augment.large.crop_scale":
        return "resized" in config.augment.large.crop and not config.augment.weak
    return not (key == "augment.large.jitter" and config.augment.weak)


def _from_file(path: str) -> Space:
    """Entries of a YAML file: ``load_yaml`` has flattened ``key: {low: 1}`` to ``key.low: 1``."""
    entries: dict[str, dict[str, Any]] = {}
    for name, value in load_yaml(path).items():
        key, _, setting = name.rpartition(".")
        if setting not in ("low", "high", "scale", "choices", "reason"):
            raise ConfigError(f"{path}: {name}: expected KEY: {{low, high, scale, choices, reason}}")
        entries.setdefault(key, {})[setting] = value
    domains = []
    for key, entry in entries.items():
        scale, choices = entry.get("scale", "linear"), entry.get("choices", ())
        if scale not in SCALES:
            raise ConfigError(f"{path}: {key}: scale must be {', '.join(SCALES)}, got {scale!r}")
        if not isinstance(choices, list | tuple) or ("choices" in entry and not choices):
            raise ConfigError(f"{path}: {key}: choices must be a list of values, got {choices!r}")
        settings = entry | {name: _number(entry[name]) for name in ("low", "high") if name in entry}
        settings |= {
            "choices": tuple(_frozen(c) for c in choices),
            "reason": str(entry.get("reason", "")),
        }
        domains.append(Domain(key, **settings))
    return tuple(domains)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------- sampling
def draw(space: Space, seed: int, index: int) -> dict[str, Any]:
    """The overrides of random trial ``index``: a function of (space, seed, index) and of nothing else."""
    shares = np.random.default_rng([seed, index]).random(len(space))
    return {domain.key: domain.at(float(share)) for domain, share in zip(space, shares, strict=True)}


def current(space: Space, config: Config) -> dict[str, Any]:
    """The values that ``config`` itself has for the searched keys: trial 0 of every sweep."""
    flat = flatten(to_dict(config))
    return {domain.key: _frozen(flat[domain.key]) for domain in space}


def to_tree(space: Space) -> dict[str, dict[str, Any]]:
    """The space as plain data for YAML and JSON; :func:`from_tree` reads it back."""
    names = [field.name for field in fields(Domain) if field.name != "key"]
    return {
        domain.key: {
            name: _plain(getattr(domain, name)) for name in names if getattr(domain, name) not in ((), None)
        }
        for domain in space
    }


def from_tree(tree: Mapping[str, Mapping[str, Any]]) -> Space:
    """Inverse of :func:`to_tree`."""
    return tuple(
        Domain(key, **{**entry, "choices": tuple(_frozen(c) for c in entry.get("choices", ()))})
        for key, entry in tree.items()
    )


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
