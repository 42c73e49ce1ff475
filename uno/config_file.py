"""Configurations as YAML: what a user's file may hold, and the form that runs and checkpoints keep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from uno.config import Config, flatten, to_dict
from uno.errors import ConfigError

MAX_CONFIG_BYTES = 1_000_000
MAX_CONFIG_DEPTH = 20


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Overrides from a YAML file; nested mappings and dotted keys both work.

    Raises:
        ConfigError: missing file, larger than 1 MB, not YAML, not a mapping, or with aliases or deep nesting.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"cannot read config file {path}: {getattr(error, 'strerror', error)}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"config file {path} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        text = data.decode()
        refuse_yaml_bombs(text)
        tree = yaml.safe_load(text) or {}
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: not UTF-8, month 13, an integer of 5000 digits
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"config file {path} must hold a mapping of keys, not a {type(tree).__name__}")
    return flatten(tree)


def refuse_yaml_bombs(text: str) -> None:
    """Raise ValueError for what takes YAML without bound: aliases grow 2^n-fold, 20 kB of ``[`` take 35 s."""
    depth = 0
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("YAML aliases (*name) are not accepted; write the values out")
        if depth > MAX_CONFIG_DEPTH:
            raise ValueError(f"nested deeper than {MAX_CONFIG_DEPTH} levels")


def dump_yaml(config: Config) -> str:
    """The resolved configuration as YAML, loadable by :func:`load_yaml`."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, width=110)
