"""A run from its data to a trained model: pretrain, discover; the same on every worker."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor, nn

from uno import collectives, methods
from uno.config import (
    Config,
    PhaseConfig,
    config_hash,
    differing_keys,
    dump_yaml,
    field_names,
    flatten,
    override,
    to_dict,
)
from uno.data.files import Storage
from uno.data.plan import ROTATION as ROTATION_STREAM
from uno.data.plan import Plan, make_plan, make_pretrain_plan
from uno.data.sets import TrainData
from uno.errors import ConfigError, StorageError
from uno.model import UnoModel, build_model
from uno.runs import lock
from uno.runs.checkpoint import FORMAT_VERSION, checkpoint_steps, load_newest
from uno.runs.hardware import environment, prepare_compiler
from uno.state import TrainState, new_state
from uno.steps import pretrain_step, rotation_step
from uno.train import Phase, Worker, fit

ROTATION, PRETRAIN, DISCOVER = "rotation", "pretrain", "discover"
PHASES = (ROTATION, PRETRAIN, DISCOVER)  # each has a section of its name in the configuration
PRETRAIN_IGNORES = (
    "discover", "method", "model.num_heads", "model.overcluster_factor", "model.hidden_dim",
    "model.projection_dim", "model.mlp_input", "model.weights", "objective.epsilon", "objective.num_iters",
    "objective.aggregation", "objective.concat", "objective.pseudo_labels", "data.composition",
    "data.num_novel", "objective.iic_weight", "objective.iic_view_weight", "objective.rkd_weight",
    "objective.rkd_temperature", "objective.queue_size", "objective.consistency_weight", "objective.rampup",
)  # fmt: skip
"""What pretraining does not depend on (a test proves it); ``objective.temperature`` it does."""


def plans(config: Config, num_labeled: int, num_unlabeled: int, num_workers: int) -> dict[str, Plan]:
    """Batch plans of the phases; rotation's only where the run has it.

    Raises:
        ConfigError: batch sizes the workers do not divide, or sets too small for a batch.
    """
    size, workers = config.train.batch_size, max(1, num_workers)
    found = {}
    if config.rotation.epochs:
        rows = num_labeled + num_unlabeled
        found[ROTATION] = make_pretrain_plan(config.seed, size, rows, workers, ROTATION_STREAM)
    return found | {
        PRETRAIN: make_pretrain_plan(config.seed, size, num_labeled, workers),
        DISCOVER: make_plan(config.seed, config.data.composition, size, num_labeled, num_unlabeled, workers),
    }


def pretrain(config: Config, train: TrainData, worker: Worker, storage: Storage) -> TrainState:
    """Supervised pretraining of encoder and known head (paper Sec. 4.1); resumes or returns at once if
    finished. Where the run has rotation epochs, they come first.
    """
    model = build_model(config.model, train.num_known, 0, config.seed)
    if config.rotation.epochs:
        model.encoder.load_state_dict(rotate(config, train, worker, storage).model.encoder.state_dict())
    return _fit(config, PRETRAIN, model, train, worker, storage)


def pretrain_hash(config: Config) -> str:
    """Equal for configurations that lead to the same pretraining (12 hex digits)."""
    defaults = flatten(to_dict(Config()))
    ignored = [k for k in field_names() if any(k == i or k.startswith(f"{i}.") for i in PRETRAIN_IGNORES)]
    return config_hash(override(config, {key: defaults[key] for key in ignored}))


def rotate(config: Config, train: TrainData, worker: Worker, storage: Storage) -> TrainState:
    """Self-supervised pretraining of the encoder on all training rows: tell quarter turns apart.

    What KCL to RS+ start from in their papers' better rows (Gidaris et al. 2018; 200 epochs, batches of 128,
    rate 0.1, weight decay 5e-4 in AutoNovel's code). Those then freeze the encoder but for its last stage;
    here it goes on learning.
    """
    model = build_model(config.model, 4, 0, config.seed)
    return _fit(config, ROTATION, model, train, worker, storage)


def discover(config: Config, train: TrainData, worker: Worker, storage: Storage) -> TrainState:
    """The discovery phase, from the encoder and known prototypes of :func:`pretrain` (or
    ``config.model.weights``).
    """
    model = methods.build_network(config, train.num_known, train.num_novel, config.seed + 1)
    teacher = None
    if not load_weights_(model, config, storage) and config.objective.rkd_weight:
        raise ConfigError("objective.rkd_weight needs weights of a pretraining on the same known classes")
    if config.objective.rkd_weight:
        model.normalize_prototypes_()
        teacher = copy.deepcopy(nn.Sequential(model.encoder, model.known)).eval().requires_grad_(False)
    return _fit(config, DISCOVER, model, train, worker, storage, teacher)


def _fit(
    config: Config,
    name: str,
    model: UnoModel,
    train: TrainData,
    worker: Worker,
    storage: Storage,
    teacher: nn.Module | None = None,
) -> TrainState:
    plan = plans(config, train.num_labeled, train.num_unlabeled, worker.world_size)[name]
    settings: PhaseConfig = getattr(config, name)
    method = methods.load(config)
    step = {ROTATION: rotation_step, PRETRAIN: pretrain_step, DISCOVER: method.step}[name]
    phase = Phase(
        name,
        settings,
        plan.steps_per_epoch,
        plan.labeled_size + plan.unlabeled_size,
        config.train.max_steps,
        step,
    )
    model = model.to(worker.device).to(memory_format=torch.channels_last)
    cuda = worker.device.type == "cuda"
    autocast = config.compute.precision == "bf16" or (config.compute.precision == "auto" and cuda)
    extra: dict[str, Tensor] = {}
    if name == DISCOVER and method.start is not None and not checkpoint_steps(storage, name):
        extra = method.start(config, model, train)
    if config.compute.compile:
        prepare_compiler()
        model.encoder.compile()
    state = new_state(model, worker.wrap(model), settings, worker.device, autocast)
    state.extra = {key: collectives.from_first(tensor) for key, tensor in extra.items()}
    state.teacher = None if teacher is None else teacher.to(worker.device)
    with closing(train.batches(config, plan, worker.rank, worker.world_size, phase.last_step)) as batches:
        fit(config, phase, state, batches, worker, storage)
    train.sync()
    return state


def load_weights_(model: UnoModel, config: Config, storage: Storage) -> bool:
    """Carry encoder (and known prototypes) over: from ``config.model.weights`` or this run's pretraining.

    Returns:
        Whether the known prototypes were carried over.

    Raises:
        ConfigError: the weights do not fit this encoder.
        StorageError: there are no weights, or they cannot be read.
    """
    source = config.model.weights
    if source is not None and source.endswith(".safetensors"):
        folder, _, name = source.rpartition("/")
        data = Storage(folder or ".").read(name)
        try:
            tensors = safetensors.torch.load(data)
        except (SafetensorError, ValueError) as error:
            raise StorageError(f"model.weights: {source} is not a safetensors file: {error}") from None
        encoder = {k: v for k, v in tensors.items() if not k.startswith("fc.")}
        _load_encoder_(model, encoder, source)
        return False
    place = storage if source is None else Storage(source)
    checkpoint = load_newest(place, PRETRAIN)
    if checkpoint is None:
        raise StorageError(f"no pretraining checkpoint in {place.uri}")
    weights = _strip(checkpoint.tensors, "model/")
    _load_encoder_(model, _strip(weights, "encoder."), place.uri)
    if weights["known.weight"].shape == model.known.weight.shape:
        model.known.load_state_dict({"weight": weights["known.weight"]})
        return True
    if source is None:
        raise ConfigError("the pretrained known head has another number of classes than the data")
    return False


def _load_encoder_(model: UnoModel, tensors: dict[str, Tensor], source: str) -> None:
    try:
        model.encoder.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(f"model.weights: {source} does not fit the encoder: {reason}") from None


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def load_trained(config: Config, storage: Storage, num_known: int, num_novel: int) -> tuple[UnoModel, int]:
    """The discovered model of a run, ready to predict, and the index of its best head.

    Raises:
        StorageError: the run has no valid discovery checkpoint.
    """
    checkpoint = load_newest(storage, DISCOVER)
    if checkpoint is None:
        raise StorageError(f"no discovery checkpoint in {storage.uri}: run uno discover first")
    model = methods.build_network(config, num_known, num_novel, 0)
    model.load_state_dict(_strip(checkpoint.tensors, "model/"))
    model.normalize_prototypes_()
    return model.eval(), int(checkpoint.tensors["head_losses"].argmin())


def open_run(config: Config, storage: Storage, fingerprint: str) -> None:
    """Claim a run directory: write ``config.yaml`` and ``environment.json``, or check that they match.

    Raises:
        ConfigError: the directory holds a run of another configuration, data set or format (with the
            differing keys).
    """
    if not storage.exists("config.yaml"):
        others = {name for name in storage.list() if not lock.ours(name)}
        if others - {"environment.json"}:  # alone, it is what a kill between two writes leaves
            raise ConfigError(f"{storage.uri} is not empty and holds no run; choose another --output")
        storage.write("environment.json", json.dumps(environment(fingerprint), indent=1).encode())
        storage.write("config.yaml", dump_yaml(config).encode())
        return
    stored = read_config_tree(storage)
    keys = differing_keys(stored, config)
    if keys:
        raise ConfigError(
            f"{storage.uri} holds a run with other settings: {', '.join(keys[:6])}"
            f"{' ...' if len(keys) > 6 else ''}; use those, --fresh, or another --output"
        )
    known = _read_environment(storage)
    if known.get("format_version") != FORMAT_VERSION:
        raise ConfigError(
            f"{storage.uri} has format version {known.get('format_version')}, not {FORMAT_VERSION}"
        )
    if known.get("data_fingerprint") != fingerprint:
        raise ConfigError(f"{storage.uri} was trained on other data (fingerprint differs); use --fresh")


def _read_environment(storage: Storage) -> dict[str, Any]:
    try:
        return dict(json.loads(storage.read("environment.json")))
    except (ValueError, TypeError):
        raise ConfigError(f"{storage.path('environment.json')} is damaged") from None


def read_config_tree(storage: Storage) -> dict[str, Any]:
    """The stored ``config.yaml`` of a run as a nested dict.

    Raises:
        ConfigError: there is none or it is damaged.
    """
    if not storage.exists("config.yaml"):
        raise ConfigError(f"{storage.uri} is not a run directory: it has no config.yaml")
    try:
        tree = yaml.safe_load(storage.read("config.yaml"))
    except (yaml.YAMLError, ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(f"{storage.path('config.yaml')} is damaged")
    return tree
