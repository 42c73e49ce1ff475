"""Complete the settings of the user to the configuration of a run.

A value that the user has set is kept. A stored run keeps its other values, and for a
new run they are derived from the data. ``discover``, ``tune``, ``reproduce``,
``estimate-classes`` and ``data check`` all call this module.
"""

import json
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import safetensors.torch

from uno import weights
from uno.config import OWN_ENCODERS, Config, flatten, override, to_dict
from uno.data.defaults import OF_ENCODER, from_images, keys_from_images
from uno.data.files import Storage, full_path, normalize_path, split
from uno.data.splits import Task, decide_setting
from uno.data.vectors import require_kind
from uno.errors import ConfigError
from uno.methods import default_settings as method_settings
from uno.presets import IMAGE_SIZE, SIZES, preset_values
from uno.runs import CONFIG_FILE, PRETRAIN, directory
from uno.runs.checkpoint import checkpoint_steps
from uno.session.data import read_task
from uno.session.resources import FreeMemory, choose, free_memory, row_bytes
from uno.weights import PRETRAINED, PRETRAINED_FILE, fetch_pretrained

MeasureMemory = Callable[[Config], FreeMemory]


class Resolved(NamedTuple):
    """A completed configuration.

    Attributes:
        config: The configuration.
        lines: Lines for the console: each value that was chosen, with the reason.
        task: The rows of the run, None if they were not read.
    """

    config: Config
    lines: list[str]
    task: Task | None = None


def resolve(
    config: Config,
    given: Iterable[str],
    overwrite: bool = False,
    free: MeasureMemory = free_memory,
) -> Resolved:
    """Complete the configuration of a run.

    A run that the output directory holds keeps its values, and the data is not read.
    For a new run the data is read, and decides the values that the user has not set.
    ``data.loading`` and ``data.setting`` are not "auto" any more afterwards.

    Args:
        config: The configuration before the data is read.
        given: The dotted keys that the user has set.
        overwrite: Whether a run in the same directory is started over.
        free: Returns the free memory for the processes that train.

    Raises:
        ConfigError: The data cannot be read, or does not fit the settings.
    """
    given = {*given, *(SIZES if IMAGE_SIZE in given else ())}
    if (
        config.output is not None
        and not overwrite
        and (storage := Storage(config.output)).exists(CONFIG_FILE)
    ):
        began = as_begun(config, given, flatten(directory.read_config_tree(storage)))
        return Resolved(
            began, [decide_setting(began, [], config.data.setting == "auto")[1]]
        )
    task = read_task(config.data)
    setting, reason = decide_setting(config, task.rows.known)
    values, lines = from_data(config, given, task, setting)
    found = with_data(override(config, values) if values else config, setting=setting)
    is_set = config.data.loading != "auto"
    loading, why = choose(
        found,
        len(task.rows),
        row_bytes(found),
        (free_memory if is_set else free)(found),
    )
    found = with_data(found, loading=loading)
    return Resolved(found, [reason, *lines, f"memory: {why}"], task)


def stored_config(storage: Storage, given: Mapping[str, Any]) -> Config:
    """Return the configuration of a stored run, to work on it on this machine.

    The workers and the device of its training are replaced by this process, because
    they may have been on another machine.

    Args:
        storage: The run directory.
        given: Dotted keys that replace stored values.

    Raises:
        ConfigError: The directory holds no run, or its configuration is damaged.
        StorageError: The directory cannot be read.
    """
    here = {"compute.num_workers": 0, "compute.device": "auto"}
    stored = flatten(directory.read_config_tree(storage))
    return override(Config(), {**stored, **here, **given, "output": storage.uri})


def with_data(config: Config, **chosen: Any) -> Config:
    """Return the configuration with other values in its section ``data``.

    The values are not validated, so they must come from this program.
    """
    return config.model_copy(update={"data": config.data.model_copy(update=chosen)})


def as_begun(
    config: Config, given: Container[str], stored: Mapping[str, Any]
) -> Config:
    """Return the configuration with the values that were derived when a run began.

    Args:
        config: The configuration of the command that resumes the run.
        given: The dotted keys that the user has set. They are not replaced.
        stored: The stored configuration of the run, by dotted key.
    """
    keys = [
        key
        for key in (*keys_from_images(config), "data.validation_fraction")
        if key not in given
    ]
    keys += [
        f"data.{name}"
        for name in ("setting", "loading")
        if getattr(config.data, name) == "auto"
    ]
    return override(config, {key: stored[key] for key in keys if key in stored})


def from_data(
    config: Config, given: Container[str], task: Task, setting: str
) -> tuple[dict[str, Any], list[str]]:
    """Derive from the data the settings of a new run that the user has not set.

    If the run starts from the encoder of another run, images are resized and normalized
    as in that run. Otherwise this depends on the images.

    Args:
        config: The configuration before the data is read.
        given: The dotted keys that the user has set.
        task: The rows of the run.
        setting: The final value of ``data.setting``.

    Returns:
        The derived values by dotted key, and lines that say why.

    Raises:
        ConfigError: The encoder takes images and the source has vectors, or the
            reverse.
    """
    values, lines = from_images(config, task, given, setting)
    require_kind(
        (override(config, values) if values else config).model, task.rows.images
    )
    learned = images_of_weights(config, given) if keys_from_images(config) else {}
    if not learned:
        return values, lines
    source = config.model.weights
    size = learned.get(SIZES[0], config.augment.large.size)
    return learned | values, [
        f"image size: {size} px; image size, mean and std: taken from {source}",
        *lines,
    ]


def images_of_weights(config: Config, given: Container[str]) -> dict[str, Any]:
    """Return the settings of images of the run that ``model.weights`` names.

    Args:
        config: The configuration of the new run.
        given: The dotted keys that the user has set. They are left out.

    Returns:
        Image size, mean, standard deviation and the like by dotted key. Empty if the
        weights are not those of a run.
    """
    source = config.model.weights
    if source in (None, PRETRAINED) or weights.is_file(source):
        return {}
    stored = flatten(directory.read_config_tree(Storage(str(source))))
    return {
        key: stored[key] for key in OF_ENCODER if key in stored and key not in given
    }


def explained(
    config: Config, file: Mapping[str, Any], line: Mapping[str, Any], overwrite: bool
) -> list[str]:
    """Return the configuration of a run as YAML, with the origin of each value.

    Each line is a dotted key, its value, and its origin in a comment, such as "preset
    digits", "file", "command line" or "data". ``--config`` reads such a file.

    Args:
        config: The configuration before the data is read.
        file: The settings from YAML files.
        line: The settings from the command line.
        overwrite: Whether a run in the output directory is started over.
    """
    given = {**file, **line}
    found = (
        config
        if config.data.num_novel == "auto"
        else resolve(config, given, overwrite).config
    )
    begun = (
        not overwrite
        and config.output is not None
        and Storage(config.output).exists(CONFIG_FILE)
    )
    layers: list[tuple[str, Mapping[str, Any]]] = [
        (
            "default",
            flatten(to_dict(Config(method=config.method))) | {"output": config.output},
        ),
        (f"preset {config.preset}", preset_values(config.preset)),
        (f"recipe {config.recipe}", preset_values(config.preset, config.recipe)),
        (f"method {config.method}", method_settings(config.method, config.preset)),
    ]
    values, before, lines = (
        flatten(to_dict(found)),
        flatten(to_dict(config)),
        list[str](),
    )
    for key, value in values.items():
        layers_with_value = [
            name
            for name, layer in layers
            if key in layer and _plain(layer[key]) == value
        ]
        origin = (
            layers_with_value[0]
            if layers_with_value
            else "data"
            if config.model.encoder in OWN_ENCODERS
            else "encoder"
        )
        if value != before[key]:
            origin = f"the run in {config.output}" if begun else "data"
        for name, keys in (("file", file), ("command line", line)):
            if key in keys or (IMAGE_SIZE in keys and key in SIZES):
                origin = name
        lines.append(f"{f'{key}: {json.dumps(value)}':<60}  # {origin}")
    return lines


def _plain(value: Any) -> Any:
    """Return a value as JSON and YAML have it: a tuple becomes a list."""
    return list(value) if isinstance(value, tuple) else value


def with_full_path(config: Config) -> Config:
    """Return the configuration with ``model.weights`` as an absolute path or URI.

    Workers in other directories can open it then.

    Raises:
        ConfigError: There is neither a file of weights nor a pretrained run at this
            path.
    """
    if config.model.weights in (None, PRETRAINED):
        return config
    source = full_path(normalize_path(config.model.weights))
    folder, name = split(source)
    if weights.is_file(source):
        if not Storage(folder).exists(name):
            raise ConfigError(f"model.weights: no such file {source}")
    elif not checkpoint_steps(Storage(source), PRETRAIN):
        raise ConfigError(
            f"model.weights: {source} is neither a {', '.join(weights.SUFFIXES)} file"
            " nor a pretrained run"
        )
    return override(config, {"model.weights": source})


def starting_weights(config: Config, overwrite: bool) -> bytes | None:
    """Return the pretrained weights that a new run stores in its directory.

    The weights are read from the run directory if they are there, otherwise fetched. An
    encoder and weights that do not fit are refused here, before any data is read.

    Args:
        config: The configuration before the data is read.
        overwrite: Whether a run in the same directory is started over.

    Returns:
        The content of a safetensors file, or None unless the run starts from pretrained
        weights of a library.

    Raises:
        ConfigError: The encoder cannot be built, has no such weights, or is frozen
            without weights.
    """
    source, own, tensors = config.model.weights, None, None
    if config.model.finetune == "none" and source is None:
        raise ConfigError(
            "model.finetune none needs pretrained weights: pass --weights FILE or"
            " --weights pretrained"
        )
    if config.model.takes_vectors:
        return fetch_pretrained(config.model.encoder)
    if source == PRETRAINED:
        storage = Storage(config.output) if config.output and not overwrite else None
        if storage is not None and storage.exists(PRETRAINED_FILE):
            return storage.read(PRETRAINED_FILE)
        own = fetch_pretrained(config.model.encoder)
        tensors = safetensors.torch.load(own)
    elif source is not None and weights.is_file(source):
        tensors = weights.read_weights(source)
    if tensors is not None or config.model.encoder not in OWN_ENCODERS:
        weights.check_encoder(config, tensors)
    return own
