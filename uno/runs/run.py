"""Train the phases of a run: pretext task, pretraining and discovery.

All functions do the same on every worker.
"""

from contextlib import closing
from functools import partial

import torch
from torch import Tensor, nn

from uno import distributed
from uno.captured import CapturedStep, check_cuda_graph
from uno.clustering.initialization import init_prototypes_
from uno.config import (
    Config,
    PhaseConfig,
    config_hash,
    field_traits,
    flatten,
    override,
    to_dict,
)
from uno.data.files import Storage
from uno.data.sampling import PRETEXT as PRETEXT_STREAM
from uno.data.sampling import Plan, make_plan, make_pretrain_plan
from uno.data.stream import TrainData
from uno.encoders.weights import PRETRAINED, is_file, load_encoder_, read_weights
from uno.errors import ConfigError, StorageError
from uno.method import load, load_pretext
from uno.model import UnoModel, build_network
from uno.runs import DISCOVER, PRETEXT, PRETRAIN
from uno.runs.checkpoint import checkpoint_steps, load_newest
from uno.runs.hardware import prepare_compiler
from uno.steps import (
    Batch,
    Step,
    TrainState,
    new_state,
    pretrain_loss,
    take_step,
    with_prefix,
)
from uno.training import Phase, Worker, fit


def list_phases(config: Config, last: str = DISCOVER) -> tuple[str, ...]:
    """Return the names of the phases of a run, in order.

    With ``model.weights`` there is neither a pretext task nor pretraining. Otherwise
    the pretext task runs if it has epochs, and then pretraining, which is in the list
    even if it has no epochs. There is one exception: a method with a teacher (a frozen
    network whose outputs it imitates) and ``model.finetune`` "none" is pretrained also
    with ``model.weights``.

    Args:
        config: The configuration of the run.
        last: The last phase, "pretrain" or "discover".

    Returns:
        Some of "pretext", "pretrain" and "discover". It is empty for ``last``
        "pretrain" if nothing is pretrained.
    """
    method, scratch = load(config.method), config.model.weights is None
    # pretraining then trains the teacher, a known head on the frozen encoder's features
    trains_teacher = method.needs_teacher(config) and config.model.finetune == "none"
    wanted = {
        PRETEXT: scratch and config.pretext.epochs > 0,
        PRETRAIN: scratch or trains_teacher,
        DISCOVER: last == DISCOVER,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def plan_phase(
    config: Config, name: str, num_labeled: int, num_unlabeled: int, num_workers: int
) -> Plan:
    """Return the batch plan of one phase, which fixes the rows of every batch.

    The pretext task uses labeled and unlabeled rows as one kind, pretraining only the
    labeled ones, and discovery both kinds.

    Args:
        config: The configuration of the run.
        name: The phase, "pretext", "pretrain" or "discover".
        num_labeled: The number of labeled training rows.
        num_unlabeled: The number of unlabeled training rows.
        num_workers: The number of workers, 0 for this process alone.

    Returns:
        The plan: the seed, the numbers of labeled and unlabeled rows in the set and in
        a global batch, the number of steps per epoch, and the random stream of the
        phase. In the pretext task and in pretraining all rows count as labeled ones,
        and the global batch is smaller than ``train.batch_size`` if there are fewer
        rows.

    Raises:
        ConfigError: The batch size does not fit the numbers of rows or workers, or
            there are too few rows.
    """
    seed, size, workers = config.seed, config.train.batch_size, max(1, num_workers)
    if name == PRETEXT:
        num_rows = num_labeled + num_unlabeled
        return make_pretrain_plan(seed, size, num_rows, workers, PRETEXT_STREAM)
    if name == PRETRAIN:
        return make_pretrain_plan(seed, size, num_labeled, workers)
    sampling = config.data.batch_sampling
    return make_plan(seed, sampling, size, num_labeled, num_unlabeled, workers)


def plans(
    config: Config, num_labeled: int, num_unlabeled: int, num_workers: int
) -> dict[str, Plan]:
    """Return the batch plans of all phases that have epochs, by phase name.

    A batch plan fixes the rows of every batch. A phase without epochs reads no batch,
    so no batch size is wrong for it. The result has no phase that :func:`list_phases`
    leaves out, such as pretraining if ``model.weights`` replaces it.

    Args:
        config: The configuration of the run.
        num_labeled: The number of labeled training rows.
        num_unlabeled: The number of unlabeled training rows.
        num_workers: The number of workers, 0 for this process alone.

    Raises:
        ConfigError: The batch size does not fit the numbers of rows or workers, or
            there are too few rows.
    """
    names = [*list_phases(config, PRETRAIN), DISCOVER]
    sizes = num_labeled, num_unlabeled, num_workers
    return {
        name: plan_phase(config, name, *sizes)
        for name in names
        if getattr(config, name).epochs
    }


def pretraining_config(config: Config) -> Config:
    """Return a copy of a configuration with all settings of discovery at defaults.

    Configurations that differ only in settings of discovery lead to the same one, and
    can share one pretrained network.

    Which fields are settings of discovery, the schema says (scope "discover"). Among
    them are ``method``, whose section is dropped, and ``model.weights``.

    Args:
        config: The configuration of a run. It is not changed.

    Raises:
        ConfigError: The other settings do not go together with these defaults, such as
            ``augment.num_cached_views`` 0 with ``model.finetune`` "none".
    """
    defaults = flatten(to_dict(Config()))
    return override(
        config,
        {k: v for k, v in defaults.items() if field_traits(k).scope == "discover"},
    )


def hash_pretraining(config: Config) -> str:
    """Return a hash of the settings that pretraining depends on, 12 hex digits.

    Settings of discovery, of logging and of the place of execution do not change it.

    Args:
        config: The configuration of a run.

    Raises:
        ConfigError: The other settings do not go together with the defaults of
            discovery, see :func:`pretraining_config`.
    """
    return config_hash(pretraining_config(config))


def run_phase(
    config: Config, name: str, train: TrainData, worker: Worker, storage: Storage
) -> TrainState:
    """Train one phase of a run from its newest checkpoint to its end.

    If the phase is finished, no step is taken, and its last state is returned. A phase
    without epochs takes no step, and writes one checkpoint of its initial state. Rank 0
    writes checkpoints, ``metrics.jsonl`` and the list of unreadable images. Metrics are
    also reported to the worker. With several workers all of them call this function.
    The phases are:

    - "pretext": The encoder learns the self-supervised task ``pretext.task`` on all
      training rows, without labels.
    - "pretrain": The encoder and the known head learn labeled rows (paper Sec. 4.1 of
      UNO, Fini et al., ICCV 2021). As in the pretext task, only large views are used,
      even if discovery uses small ones, too.
    - "discover": All heads are trained (paper Sec. 3), starting from the earlier phase
      or from ``model.weights``. If the phase has no checkpoint yet, prototypes and the
      class prior may first be computed from features of the training rows.

    Args:
        config: The configuration of the run.
        name: The name of the phase: "pretext", "pretrain" or "discover".
        train: The training rows, on the device of the worker.
        worker: The process that trains: a local process or one rank of several.
        storage: The run directory, which holds the checkpoints.

    Returns:
        The state at the end of the phase, with the model in training mode.

    Raises:
        ConfigError: The batch size, the weights or an option of ``compute`` does not
            fit, or too many images are unreadable.
        StorageError: Weights or an image cannot be read now, the phase that this one
            starts from has no valid checkpoint, this phase has checkpoints and all are
            damaged or the newest valid one does not fit the model, or a file of the run
            cannot be written.
        NumericsError: Losses or weights were not finite again after a roll-back, or
            before there was a checkpoint to roll back to.
        Interrupted: The worker was asked to stop. A checkpoint is saved, unless the
            state is not finite.
    """
    settings: PhaseConfig = getattr(config, name)
    sizes = len(train.labels), train.num_unlabeled, worker.world_size
    plan = plan_phase(config, name, *sizes) if settings.epochs else None
    phase = Phase(
        name,
        settings,
        steps_per_epoch=plan.steps_per_epoch if plan else 1,
        images_per_step=plan.labeled_size + plan.unlabeled_size if plan else 0,
        max_steps=config.train.max_steps,
        step=_make_step(config, name, worker),
    )
    model, has_known = _build_initial_network(config, name, train, storage)
    model = model.to(worker.device).to(memory_format=torch.channels_last)
    cuda = worker.device.type == "cuda"
    autocast = config.compute.precision == "bf16" or (
        config.compute.precision == "auto" and cuda
    )
    extra: dict[str, Tensor] = {}
    if name == DISCOVER and not checkpoint_steps(storage, name):
        extra = load(config.method).initialize(config, model, train)
        extra = init_prototypes_(config, model, train, extra, has_known)
    if config.compute.compile:
        prepare_compiler()
        # compile once for each size of views: one program for all sizes is slower
        model.encoder.compile(dynamic=False)
    forward, encoder_lr_factor = worker.wrap(model), config.model.encoder_lr_factor
    state = new_state(
        model, forward, settings, worker.device, autocast, encoder_lr_factor
    )
    state.extra = {
        key: distributed.broadcast_from_rank0(t.to(worker.device))
        for key, t in extra.items()
    }
    if name == DISCOVER and load(config.method).needs_teacher(config):
        state.teacher = _load_teacher(config, train, storage).to(worker.device)
    views = (
        config if name == DISCOVER else override(config, {"augment.small.num_views": 0})
    )
    if plan is None:
        fit(config, phase, state, _no_batch, worker, storage)
    else:
        ranks = worker.rank, worker.world_size
        with closing(train.batches(views, plan, *ranks, phase.last_step)) as batches:
            fit(config, phase, state, batches, worker, storage)
    train.sync()
    return state


def _no_batch(step: int) -> Batch:
    """Stand in for the batches of a phase without steps, which needs none.

    Raises:
        AssertionError: Always, because a batch is asked for.
    """
    raise AssertionError(f"a phase without steps asks for the batch of step {step}")


def pretrain(
    config: Config, train: TrainData, worker: Worker, storage: Storage
) -> TrainState:
    """Run the supervised pretraining, after the pretext task if that has epochs.

    Both run even if the configuration names weights to start from. A finished phase is
    not repeated, and an interrupted one resumes. Checkpoints and metrics are written as
    :func:`run_phase` says.

    Args:
        config: The configuration of the run.
        train: The training rows, on the device of the worker.
        worker: The process that trains.
        storage: The run directory, which holds the checkpoints.

    Returns:
        The state at the end of pretraining. Its ``model`` is the network.

    Raises:
        UnoError: One of the errors of :func:`run_phase`, for the same reasons. It is
            Interrupted if the worker was asked to stop.
    """
    if config.pretext.epochs:
        run_phase(config, PRETEXT, train, worker, storage)
    return run_phase(config, PRETRAIN, train, worker, storage)


def _make_step(config: Config, phase: str, worker: Worker) -> Step:
    """Return the function that takes one optimizer step of a phase on one batch.

    With ``compute.cuda_graph`` it records the step as a CUDA graph and repeats that,
    except in the pretext task, which ignores the setting.

    Args:
        config: The configuration of the run.
        phase: The phase, "pretext", "pretrain" or "discover".
        worker: The process that trains.

    Returns:
        A function of state, batch, configuration and learning rate. It updates the
        state and returns the loss (1,).

    Raises:
        ConfigError: ``compute.cuda_graph`` is set, and the step cannot be recorded: the
            device is no GPU, there are several workers, or the method does not allow
            it.
    """
    if phase == PRETEXT:
        return partial(take_step, load_pretext(config.pretext.task).loss)
    method = load(config.method)
    loss = pretrain_loss if phase == PRETRAIN else method.loss
    step = partial(take_step, loss)
    if config.compute.cuda_graph:
        can_be_recorded = phase == PRETRAIN or method.can_be_recorded(config)
        check_cuda_graph(config, can_be_recorded, worker.device, worker.world_size)
        return CapturedStep(step)
    return step


def _build_initial_network(
    config: Config, phase: str, train: TrainData, storage: Storage
) -> tuple[UnoModel, bool]:
    """Build the network with which a phase starts, and load its first weights.

    - The pretext task starts from random weights.
    - Pretraining starts from the weights of :func:`load_weights_` if ``model.finetune``
      is "none", else from the pretext task if that has epochs, else from random
      weights. Its network has no novel heads.
    - Discovery starts from the weights of :func:`load_weights_`, and its novel heads
      from random weights. If the method needs a teacher and known prototypes were
      loaded, all prototypes are scaled to length one.

    Args:
        config: The configuration of the run.
        phase: The phase, "pretext", "pretrain" or "discover".
        train: The training rows, which have the numbers of classes.
        storage: The run directory, with the checkpoints of earlier phases.

    Returns:
        The network at step 0 on the CPU; and whether the prototypes of its known
        classes come from an earlier pretraining, which only discovery can have.

    Raises:
        ConfigError: The weights do not fit.
        StorageError: Weights or the checkpoint of an earlier phase cannot be read.
    """
    if phase == PRETEXT:
        num_outputs = load_pretext(config.pretext.task).num_outputs
        return build_network(config, num_outputs, 0, config.seed), False
    if phase == PRETRAIN:
        model = build_network(config, train.num_known, 0, config.seed)
        if config.model.finetune == "none":
            load_weights_(model, config, storage)
        elif config.pretext.epochs:
            _load_phase_(model, storage, PRETEXT)
        return model, False
    model = build_network(config, train.num_known, train.num_novel, config.seed + 1)
    has_known = load_weights_(model, config, storage)
    if has_known and load(config.method).needs_teacher(config):
        # the teacher's prototypes are normalized, and the student starts from them
        model.normalize_prototypes_()
    return model, has_known


def _load_teacher(config: Config, train: TrainData, storage: Storage) -> UnoModel:
    """Load the network of supervised pretraining as a frozen teacher.

    It comes from this run's pretraining if there is one, else from ``model.weights``.

    Args:
        config: The configuration of the run.
        train: The training rows, which have the number of known classes.
        storage: The run directory.

    Returns:
        A network of the encoder and the known head on the CPU, in eval mode, without
        gradients, and with normalized prototypes.

    Raises:
        ConfigError: There was no pretraining on the same number of known classes, or
            the weights do not fit the encoder.
        StorageError: The pretraining has no valid checkpoint, or ``model.weights``
            cannot be read.
    """
    model = build_network(config, train.num_known, 0, config.seed)
    if PRETRAIN in list_phases(config):
        has_known = _load_phase_(model, storage, PRETRAIN)
    else:
        has_known = load_weights_(model, config, storage)
    if not has_known:
        why = "needs weights of a pretraining on the same known classes"
        raise ConfigError(
            f"the teacher of method {config.method} (objective.rkd_weight) {why}"
        )
    model.normalize_prototypes_()
    return model.eval().requires_grad_(False)


def frozen_encoder(config: Config, storage: Storage) -> nn.Module:
    """Build the encoder of a run with ``model.finetune none``, and load its weights.

    Args:
        config: The configuration of the run.
        storage: The run directory. If ``model.weights`` is "pretrained", it holds the
            weights. ``model.weights`` must not be None.

    Returns:
        The encoder on the CPU, in eval mode and in the memory format channels_last. Its
        weights are the same before and after training.

    Raises:
        ConfigError: The weights do not fit.
        StorageError: The weights cannot be read.
    """
    model = build_network(config, 1, 0, config.seed)
    load_weights_(model, config, storage)
    return model.encoder.eval().to(memory_format=torch.channels_last)


def load_weights_(model: UnoModel, config: Config, storage: Storage) -> bool:
    """Load into a new network the weights with which a phase starts.

    The source is the setting ``config.model.weights`` if it is given: "pretrained" for
    the weights that the run directory holds, a file of encoder weights, or the
    directory of another run, whose pretraining is loaded. Otherwise it is the phase of
    this run before discovery. If the run has no such phase, the network is not changed.

    Args:
        model: The network. Its encoder is changed, and its known head if the source has
            prototypes of the same shape.
        config: The configuration of the run.
        storage: The run directory.

    Returns:
        Whether trained known prototypes were loaded. A file of weights and a pretext
        task have none, and prototypes of another shape are not loaded.

    Raises:
        ConfigError: The weights do not fit the encoder; or this run's pretraining had
            prototypes of another shape, and the network has no adapter, which would
            explain it.
        StorageError: The source cannot be read, or has no valid checkpoint.
    """
    source = config.model.weights
    if source is not None and (source == PRETRAINED or is_file(source)):
        load_encoder_(model.encoder, read_weights(source, storage), source)
        return False
    if source is not None:
        return _load_phase_(model, Storage(source), PRETRAIN)
    before = [name for name in list_phases(config) if name != DISCOVER]
    if not before:
        return False
    has_known = _load_phase_(model, storage, before[-1])
    if not has_known and before[-1] == PRETRAIN and model.adapter is None:
        raise ConfigError(
            "the pretrained known head has another number of classes than the data"
        )
    return has_known


def _load_phase_(model: UnoModel, storage: Storage, phase: str) -> bool:
    """Load the encoder and, if they fit, the known prototypes of an earlier phase.

    They come from the newest valid checkpoint of that phase, whether or not it was
    trained to its end.

    Args:
        model: The network that is changed.
        storage: The directory of the run that has trained the phase.
        phase: "pretext" or "pretrain".

    Returns:
        Whether known prototypes were loaded. Only pretraining has them, and their shape
        (classes and width) must be that of the network.

    Raises:
        ConfigError: The weights do not fit the encoder.
        StorageError: The phase has no valid checkpoint.
    """
    checkpoint = load_newest(storage, phase)
    if checkpoint is None:
        raise StorageError(
            f"no {'pretraining' if phase == PRETRAIN else phase} checkpoint in"
            f" {storage.uri}"
        )
    weights = with_prefix(checkpoint.tensors, "model/")
    load_encoder_(model.encoder, with_prefix(weights, "encoder."), storage.uri)
    prototypes = weights["known.weight"]
    if phase != PRETRAIN or prototypes.shape != model.known.weight.shape:
        return False
    model.known.load_state_dict({"weight": prototypes})
    return True


def load_trained(
    config: Config, storage: Storage, num_known: int, num_novel: int
) -> tuple[UnoModel, int]:
    """Load the model of a run from its newest checkpoint of discovery, in eval mode.

    Args:
        config: The configuration of the run.
        storage: The run directory.
        num_known: The number of known classes.
        num_novel: The number of novel classes.

    Returns:
        The model on the CPU with normalized prototypes, and the index of its best head:
        the cluster head with the lowest mean loss in the last finished epoch, or 0 if
        no epoch has finished.

    Raises:
        StorageError: There is no valid checkpoint.
        RuntimeError: The checkpoint is that of another network, for example for other
            numbers of classes.
    """
    checkpoint = load_newest(storage, DISCOVER)
    if checkpoint is None:
        raise StorageError(
            f"no discovery checkpoint in {storage.uri}: run uno discover first"
        )
    model = build_network(config, num_known, num_novel, 0)
    model.load_state_dict(with_prefix(checkpoint.tensors, "model/"))
    model.normalize_prototypes_()
    return model.eval(), int(checkpoint.tensors["head_losses"].argmin())
