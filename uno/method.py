"""The interface of discovery methods and of pretext tasks, and their lookup by name.

A method of :mod:`uno.methods` is named by its key in :data:`METHODS`, and your own
method by ``--method package.module:METHOD``. ``--pretext.task`` names a pretext task in
the same way. This module does not import torch, because the command line and the schema
use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from uno.errors import ConfigError
from uno.imports import import_object, is_object_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from uno.config import Config, Section
    from uno.data.stream import TrainData
    from uno.model import UnoModel
    from uno.steps import Batch, Loss, LossFunction, TrainState

# the constants of this method are the section ``objective``, not one of its own name
DEFAULT = "uno"
METHODS = {
    DEFAULT: "unified objective (Fini et al., ICCV 2021)",
    "rs": "rank statistics (Han et al., ICLR 2020)",
    "rs_plus": "rank statistics with incremental learning (Han et al., ICLR 2020)",
    "mcl": "meta classification likelihood (Hsu et al., ICLR 2019)",
    "dtc": "deep transfer clustering (Han et al., ICCV 2019)",
    "kcl": "KLD-based contrastive loss (Hsu et al., ICLR 2018)",
    "ncl": "neighborhood contrastive learning (Zhong et al., CVPR 2021)",
    "openmix": "OpenMix (Zhong et al., CVPR 2021)",
    "jia": "joint representation learning and discovery (Jia et al., ICCV 2021)",
    "simgcd": "SimGCD, self-distillation (Wen et al., ICCV 2023)",
    "pim": "parametric information maximization (Chiaroni et al., ICCV 2023)",
    "clustering": "clusters of a frozen encoder's features, without training",
}
"""What each method is, by its name, which is also the name of its module."""
PRETEXTS = {"rotation": "which of four quarter turns (Gidaris et al., ICLR 2018)"}
"""What each pretext task is, by its name, which is also the name of its module."""


class Method:
    """A discovery method: its loss, its novel head, and how it starts.

    A method is a subclass. An instance without arguments is the ``METHOD`` of its
    module. Only :attr:`name` and :meth:`loss` must be defined.

    Attributes:
        name: An identifier. The section of the method in the configuration has this
            name.
        constants: The constants of the method, a subclass of
            :class:`uno.config.Section`, as options ``--NAME.FIELD``. A loss reads them
            as ``config.method_options``. None if the method has none.
        constants_of_preset: For the name of a preset the constants that the authors use
            on its data, by the names of the fields. Constants that are not in it keep
            their defaults.
        supports_gcd: Whether the method can be used if the unlabeled set also holds
            known classes.
        trains: False if :meth:`initialize` does all the work on features of a frozen
            encoder. Discovery has no epochs by default then.
        needs_memory: Whether the method reads all images or ``Batch.rows`` itself, so
            that it cannot stream.
        has_projection_heads: Whether the novel heads are UNO's cluster heads. Such a
            method uses all of the section ``objective``: the class prior, and the terms
            that are off by default (IIC, rKD, the queue).
    """

    name: str
    constants: type[Section] | None = None
    constants_of_preset: Mapping[str, Mapping[str, Any]] = {}
    supports_gcd = False
    trains = True
    needs_memory = False
    has_projection_heads = False

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor | Loss:
        """Compute the loss of one batch, see :data:`uno.steps.LossFunction`.

        Every subclass must define this; the base class raises NotImplementedError.

        Args:
            state: The state of training. Tensors in ``state.extra`` may be replaced.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss to minimize, a scalar; or a :class:`uno.steps.Loss`, which has this
            scalar and the loss of each of H cluster heads, (H,). A method with several
            cluster heads must return the latter.
        """
        raise NotImplementedError

    def build_head(
        self, num_novel: int, num_features: int, is_frozen: bool
    ) -> nn.Module:
        """Build the novel head, the module that computes the outputs of novel classes.

        The base class returns a :class:`uno.heads.NovelHead`, which computes cosines of
        the feature with a prototype of each class, whether or not the encoder is
        frozen. A method with UNO's projection heads needs no such module.

        Args:
            num_novel: The number of novel classes K.
            num_features: The number of features D that the head takes: those of the
                adapter if the method has one, otherwise those of the encoder.
            is_frozen: Whether the encoder is frozen.

        Returns:
            A module that maps features (N, D) to logits (1, N, K), before the division
            by tau, and has a ``weight`` (1, K, ...).
        """
        from uno.heads import NovelHead

        return NovelHead(num_novel, num_features)

    def build_adapter(self, num_features: int) -> nn.Module | None:
        """Build a module that transforms the encoder's features before all heads.

        The known head takes the transformed features, too. The base class builds no
        module, and returns None.

        Args:
            num_features: The number of features D of the encoder.

        Returns:
            A module that maps features (N, D) to (N, W) and has an attribute ``width``,
            which is W; None if the heads take the features as they are.
        """
        return None

    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Initialize the model in place before the first step, on every worker.

        It is not called if discovery resumes from a checkpoint. The base class changes
        nothing, and returns an empty mapping.

        Args:
            config: The configuration of the run.
            model: The network.
            train: The training data.

        Returns:
            Tensors by name, which are kept in ``state.extra`` and in checkpoints. The
            caller moves them to the device of training, and gives all workers those of
            rank 0.
        """
        return {}

    def needs_teacher(self, config: Config) -> bool:
        """Return whether the loss needs the pretrained network as a teacher.

        ``state.teacher`` is then a frozen network of the encoder and the known head
        after supervised pretraining: that of this run, or of ``model.weights`` if this
        run has none. The loss may, for example, distil its outputs. The base class
        returns False.

        Args:
            config: The configuration of the run.
        """
        return False

    def can_be_recorded(self, config: Config) -> bool:
        """Return whether a training step can be recorded as a CUDA graph.

        It can if the loss launches the same kernels in every step. The base class
        returns False.

        Args:
            config: The configuration of the run.
        """
        return False


@dataclass(frozen=True)
class Pretext:
    """A self-supervised task that trains the encoder before supervised pretraining.

    Attributes:
        name: The name of the task.
        loss: Computes the loss of one batch, see :data:`uno.steps.LossFunction`. The
            batch has the large views of labeled and unlabeled rows, without labels.
        num_outputs: The number of known outputs that the model has for the task, as
            cosines of the feature. This head is dropped afterward.
    """

    name: str
    loss: LossFunction
    num_outputs: int


# loaded methods outside this package, by their attribute ``name``
_own_methods: dict[str, Method] = {}


@cache
def load(name: str) -> Method:
    """Return the discovery method that a name stands for, and cache it.

    The module of the method is imported. :func:`section_model` then knows the section
    of a method outside this package.

    Args:
        name: A key of :data:`METHODS`, such as "rs", or ``package.module:METHOD``.

    Raises:
        ConfigError: The name has neither form; or the object that it names cannot be
            imported, is no :class:`Method`, or has a ``name`` that is no identifier, is
            a key of :data:`METHODS` or is that of another method which was loaded.
    """
    method: Method = _load("method", name, METHODS, Method)
    if name not in METHODS:
        own_name = getattr(method, "name", "")
        if not own_name.isidentifier() or own_name in METHODS:
            raise ConfigError(
                f"method {name}: its name {own_name!r} is taken, or is no identifier"
            )
        if _own_methods.setdefault(own_name, method) is not method:
            raise ConfigError(
                f"method {name}: another method in use has its name {own_name!r};"
                " give each method a name of its own"
            )
    return method


@cache
def load_pretext(name: str) -> Pretext:
    """Return the self-supervised pretext task that a name stands for, and cache it.

    Args:
        name: A key of :data:`PRETEXTS`, such as "rotation", or
            ``package.module:PRETEXT``. In both cases its module is imported.

    Raises:
        ConfigError: The name has neither form, or the object that it names cannot be
            imported or is no :class:`Pretext`.
    """
    task: Pretext = _load("pretext.task", name, PRETEXTS, Pretext)
    return task


def _load(key: str, name: str, own: Mapping[str, str], kind: type) -> Any:
    """Import the method or pretext task that a name stands for, and return it.

    For a key of ``own`` this is the object ``METHOD`` or ``PRETEXT`` of the module of
    that name in this package.

    Args:
        key: The key of the configuration that has the name, for error messages.
        name: A key of ``own``, or the import path ``package.module:NAME``.
        own: The methods or pretext tasks of this package: descriptions by name.
        kind: The type that the object must have, :class:`Method` or :class:`Pretext`.

    Raises:
        ConfigError: The name is neither a key of ``own`` nor an import path, or the
            object at the import path cannot be imported or has another type.
    """
    attribute = kind.__name__.upper()
    if name in own:
        return getattr(import_module(f"uno.methods.{name}"), attribute)
    if not is_object_name(name):
        raise ConfigError(
            f"{key} must be one of {', '.join(own)}, or package.module:{attribute}, got"
            f" {name!r}"
        )
    imported = import_object(key, name)
    if not isinstance(imported, kind):
        raise ConfigError(
            f"{key} {name} is of type {type(imported).__name__}, not an instance of"
            f" uno.method.{kind.__name__}"
        )
    return imported


def section(method: str) -> dict[str, type[Section]]:
    """Return the section that a method adds to the configuration.

    The method is imported, unless it is UNO.

    Args:
        method: A key of :data:`METHODS`, or ``package.module:METHOD``.

    Returns:
        A mapping with one entry: the name of the section, which is the attribute
        ``name`` of the method, and the pydantic schema. It is empty for a method
        without constants, and for UNO, whose constants are the section ``objective``.

    Raises:
        ConfigError: The method cannot be loaded, see :func:`load`.
    """
    # a plain command line imports no method, and so no torch
    if method == DEFAULT or (constants := load(method).constants) is None:
        return {}
    return {load(method).name: constants}


def section_model(name: str) -> type[Section] | None:
    """Return the schema of a configuration section that a method adds.

    A method of this package other than UNO is imported for this. A method of the user
    must have been loaded by :func:`load`.

    Args:
        name: The name of the section, which is the attribute ``name`` of the method.

    Returns:
        The pydantic schema; None if no method of this package and no loaded method of
        the user has a section of this name.
    """
    if name in METHODS:
        return section(name).get(name)
    return getattr(_own_methods.get(name), "constants", None)


def default_settings(method: str, preset: str) -> dict[str, Any]:
    """Return the settings that choosing a method adds to a preset, by dotted key.

    They are the name of the method under "method", and the values that
    :attr:`Method.constants_of_preset` has for the preset, if any; other constants keep
    their defaults. With the presets "photos" and "vectors", a method without UNO's
    projection heads also resets what belongs to them: "model.prototype_init" to
    "random" and "objective.class_prior" to None. A method that does not train gets 0
    epochs of discovery ("discover.epochs") and 0 cached views
    ("augment.num_cached_views").

    Args:
        method: A key of :data:`METHODS`, or ``package.module:METHOD``.
        preset: The name of the preset, such as "cifar10".

    Returns:
        Values by key, such as "dtc.warmup". For UNO the result is empty, because the
        presets are made for it.

    Raises:
        ConfigError: The method cannot be loaded, see :func:`load`.
    """
    if method == DEFAULT:
        return {}
    loaded = load(method)
    settings: dict[str, Any] = {"method": method}
    if preset in ("photos", "vectors") and not loaded.has_projection_heads:
        settings |= {"model.prototype_init": "random", "objective.class_prior": None}
    if not loaded.trains:
        settings |= {"discover.epochs": 0, "augment.num_cached_views": 0}
    constants = loaded.constants_of_preset.get(preset, {})
    return settings | {f"{loaded.name}.{key}": v for key, v in constants.items()}


def description(name: str) -> str:
    """Return the description of a method: "rank statistics (Han et al., ICLR 2020)".

    For a method that is not part of this package, this is ``name`` itself.

    Args:
        name: A key of :data:`METHODS`, such as "rs", or ``package.module:METHOD``.
    """
    return METHODS.get(name, name)
