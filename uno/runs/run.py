"""A run from its data to a trained model: pretrain, discover; the same on every worker."""

import copy
from contextlib import closing

import torch
from torch import Tensor, nn

from uno import collectives
from uno.config import Config, PhaseConfig, about, config_hash, flatten, override, to_dict
from uno.data.files import Storage
from uno.data.plan import ROTATION as ROTATION_STREAM
from uno.data.plan import Plan, make_plan, make_pretrain_plan
from uno.data.stream import TrainData
from uno.errors import ConfigError, StorageError
from uno.methods import registry
from uno.model import UnoModel, build_model
from uno.prototype_init import start_
from uno.runs import DISCOVER, PRETRAIN, ROTATION
from uno.runs.checkpoint import checkpoint_steps, load_checkpoint, load_newest
from uno.runs.hardware import prepare_compiler
from uno.state import TrainState, new_state, with_prefix
from uno.steps import pretrain_step, rotation_step
from uno.train import Phase, Worker, fit
from uno.weights import PRETRAINED, is_file, load_encoder_, read_weights


def plans(config: Config, num_labeled: int, num_unlabeled: int, num_workers: int) -> dict[str, Plan]:
    """Batch plans of the phases; rotation's only where the run has it. ConfigError: sizes that do not fit."""
    seed, size, workers = config.seed, config.train.batch_size, max(1, num_workers)
    found = {
        PRETRAIN: make_pretrain_plan(seed, size, num_labeled, workers),
        DISCOVER: make_plan(seed, config.data.composition, size, num_labeled, num_unlabeled, workers),
    }
    if config.rotation.epochs:
        rows = num_labeled + num_unlabeled
        found = {ROTATION: make_pretrain_plan(seed, size, rows, workers, ROTATION_STREAM), **found}
    return found


def pretrain_hash(config: Config) -> str:
    """Equal for configurations that lead to the same pretraining (12 hex digits)."""
    defaults = flatten(to_dict(Config()))
    return config_hash(override(config, {k: v for k, v in defaults.items() if about(k).scope == "discover"}))


def run_phase(config: Config, name: str, train: TrainData, worker: Worker, storage: Storage) -> TrainState:
    """Train one phase of a run, from its newest checkpoint; returns at once where it is finished.

    Rotation: tell quarter turns of all training rows apart (Gidaris et al. 2018), what KCL to RS+ start from;
    their papers then freeze most of the encoder, it learns here. Pretraining: encoder and known head
    on labeled rows (paper Sec. 4.1), of large views alone, also where discovery has small ones [v2].
    Discovery: from those, or from ``config.model.weights``.
    """
    plan = plans(config, len(train.labels), train.num_unlabeled, worker.world_size)[name]
    settings: PhaseConfig = getattr(config, name)
    method = registry.load(config)
    step = {ROTATION: rotation_step, PRETRAIN: pretrain_step, DISCOVER: method.step}[name]
    batch_rows = plan.labeled_size + plan.unlabeled_size
    phase = Phase(name, settings, plan.steps_per_epoch, batch_rows, config.train.max_steps, step)
    model, teacher, known_too = _new_network(config, name, train, worker, storage)
    model = model.to(worker.device).to(memory_format=torch.channels_last)
    cuda = worker.device.type == "cuda"
    autocast = config.compute.precision == "bf16" or (config.compute.precision == "auto" and cuda)
    extra: dict[str, Tensor] = {}
    if name == DISCOVER and not checkpoint_steps(storage, name):
        extra = method.start(config, model, train) if method.start is not None else {}
        extra = start_(config, model, train, extra, known_too)
    if config.compute.compile:
        prepare_compiler()
        model.encoder.compile()
    forward, encoder_lr = worker.wrap(model), config.model.encoder_lr
    state = new_state(model, forward, settings, worker.device, autocast, encoder_lr)
    state.extra = {key: collectives.from_first(t.to(worker.device)) for key, t in extra.items()}
    state.teacher = None if teacher is None else teacher.to(worker.device)
    views = config if name == DISCOVER else override(config, {"augment.small.num_views": 0})
    with closing(train.batches(views, plan, worker.rank, worker.world_size, phase.last_step)) as batches:
        fit(config, phase, state, batches, worker, storage)
    train.sync()
    return state


def _new_network(
    config: Config, name: str, train: TrainData, worker: Worker, storage: Storage
) -> tuple[UnoModel, nn.Module | None, bool]:
    """What a phase starts from at its step 0, the frozen teacher that discovery may have, and whether the
    known prototypes have learnt.
    """
    if name != DISCOVER:
        model = build_model(config.model, 4 if name == ROTATION else train.num_known, 0, config.seed)
        if config.model.trainable == "heads":  # a teacher of rKD: the known head alone learns
            load_weights_(model, config, storage)
        if name == PRETRAIN and config.rotation.epochs:
            rotated = run_phase(config, ROTATION, train, worker, storage).model
            model.encoder.load_state_dict(rotated.encoder.state_dict())
        return model, None, False
    model = registry.build_network(config, train.num_known, train.num_novel, config.seed + 1)
    known_too = load_weights_(model, config, storage)
    if not config.objective.rkd_weight:
        return model, None, known_too
    teacher = model
    if config.model.trainable == "heads":
        teacher = run_phase(config, PRETRAIN, train, worker, storage).model
    elif not known_too:
        raise ConfigError("objective.rkd_weight needs weights of a pretraining on the same known classes")
    teacher.normalize_prototypes_()
    return model, copy.deepcopy(Teacher(teacher)).eval().requires_grad_(False), known_too


class Teacher(nn.Module):
    """The encoder and the known head of a network: images, or their features (B, D) -> cosines (B, C_l)."""

    def __init__(self, model: UnoModel) -> None:
        super().__init__()
        self.encoder, self.known = model.encoder, model.known

    def forward(self, views: Tensor) -> Tensor:
        """As :class:`~uno.model.UnoModel` takes them."""
        return self.known(views if views.ndim == 2 else self.encoder(views))


def frozen_encoder(config: Config, storage: Storage) -> nn.Module:
    """The encoder that a run with ``model.trainable`` heads starts from and ends with, in eval mode."""
    model = build_model(config.model, 1, 0, config.seed)
    load_weights_(model, config, storage)
    return model.encoder.eval().to(memory_format=torch.channels_last)


def load_weights_(model: UnoModel, config: Config, storage: Storage) -> bool:
    """Carry the encoder over from ``config.model.weights`` or this run's pretraining; returns whether the
    known prototypes came along: not of a file, nor of another number of classes.
    """
    source = config.model.weights
    if source is not None and (source == PRETRAINED or is_file(source)):
        load_encoder_(model.encoder, read_weights(source, storage), source)
        return False
    place = storage if source is None else Storage(source)
    checkpoint = load_newest(place, PRETRAIN)
    if checkpoint is None:
        raise StorageError(f"no pretraining checkpoint in {place.uri}")
    weights = with_prefix(checkpoint.tensors, "model/")
    load_encoder_(model.encoder, with_prefix(weights, "encoder."), place.uri)
    if weights["known.weight"].shape == model.known.weight.shape:
        model.known.load_state_dict({"weight": weights["known.weight"]})
        return True
    if source is None:
        raise ConfigError("the pretrained known head has another number of classes than the data")
    return False


def load_trained(
    config: Config, storage: Storage, num_known: int, num_novel: int, step: int | None = None
) -> tuple[UnoModel, int]:
    """The discovered model of a run (as it was at ``step``), ready to predict, and its best head's index."""
    checkpoint = load_newest(storage, DISCOVER) if step is None else load_checkpoint(storage, DISCOVER, step)
    if checkpoint is None:
        raise StorageError(f"no discovery checkpoint in {storage.uri}: run uno discover first")
    model = registry.build_network(config, num_known, num_novel, 0)
    model.load_state_dict(with_prefix(checkpoint.tensors, "model/"))
    model.normalize_prototypes_()
    return model.eval(), int(checkpoint.tensors["head_losses"].argmin())
