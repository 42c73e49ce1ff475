"""From the settings somebody gave to the configuration of a run: what is given wins, a
stored run keeps the rest of its values, and of a new one the data decides it.
``discover``, ``tune``, ``reproduce``, ``estimate-classes`` and ``data check`` all ask
here; each line of what was chosen says why.
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
from uno.methods.registry import settings as method_settings
from uno.presets import IMAGE_SIZE, SIZES, preset_values
from uno.runs import CONFIG_FILE, PRETRAIN, directory
from uno.runs.checkpoint import checkpoint_steps
from uno.session.data import read_task
from uno.session.resources import Room, choose, free_memory, row_bytes
from uno.weights import PRETRAINED, PRETRAINED_FILE, fetch_pretrained

Free = Callable[[Config], Room]


class Resolved(NamedTuple):
    """The configuration, what is to be said of it, and the task if it was read as
    the run will have it.
    """

    config: Config
    lines: list[str]
    task: Task | None = None


def resolve(
    config: Config,
    given: Iterable[str],
    overwrite: bool = False,
    free: Free = free_memory,
) -> Resolved:
    """``config``, of which ``given`` keys were set by somebody, as its run will have
    it: loading and setting are no longer ``auto``. A run in its ``output`` keeps its
    values unless ``fresh``; else the data is read. ``free``: the bytes that workers
    have. ConfigError: bad data.
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
    told = config.data.loading != "auto"
    loading, why = choose(
        found, len(task.rows), row_bytes(found), (free_memory if told else free)(found)
    )
    found = with_data(found, loading=loading)
    return Resolved(found, [reason, *lines, f"memory: {why}"], task)


def stored_config(storage: Storage, given: Mapping[str, Any]) -> Config:
    """The configuration of the run in ``storage``, for work on it in this process
    unless the ``given`` dotted keys say otherwise: its workers may have been elsewhere.
    StorageError or ConfigError: no run, a damaged one.
    """
    here = {"compute.num_workers": 0, "compute.device": "auto"}
    stored = flatten(directory.read_config_tree(storage))
    return override(Config(), {**stored, **here, **given, "output": storage.uri})


def with_data(config: Config, **chosen: Any) -> Config:
    """``config`` with fields of its data that this program has chosen: nothing is
    left to check.
    """
    return config.model_copy(update={"data": config.data.model_copy(update=chosen)})


def as_begun(
    config: Config, given: Container[str], stored: Mapping[str, Any]
) -> Config:
    """``config`` as a resumed run: what the flat tree ``stored`` says was chosen for
    it, unless ``given``.
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
    """What is not ``given`` of a new run on ``task``, by dotted key, and why: images
    are as the run took them whose encoder this one starts from, else as they are
    themselves.
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
    """How the run whose encoder ``config`` starts from took images, by dotted key,
    unless ``given``.
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
        whose = [
            name
            for name, layer in layers
            if key in layer and _plain(layer[key]) == value
        ]
        origin = (
            whose[0]
            if whose
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
    return list(value) if isinstance(value, tuple) else value


def with_full_path(config: Config) -> Config:
    """``model.weights`` as workers in other directories open it. ConfigError:
    nothing to start from there.
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
    """The library's own weights as a safetensors file, where a run starts from them:
    those it keeps, or else fetched. An encoder or weights that do not fit are a
    ConfigError here, before any data is read.
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
