"""Discovery methods and pretext tasks, and how they are found by name.

All methods share the encoder, pretraining, batches, views, SGD, schedule and
evaluation. Baselines use two large views. Unless its module says otherwise, the novel
head of a baseline is one layer of cosines on the feature, divided by tau, where the
papers have a linear layer with a bias. So known and novel outputs are comparable, and
predict, report and export serve every method.

A method of this package is a module with a ``METHOD`` and its line in :data:`METHODS`.
Your own method is named by ``--method package.module:METHOD``. A pretext task has a
``PRETEXT``, and ``--pretext.task`` names it in the same way. Nothing here imports
torch, because the command line and the schema use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from uno.errors import ConfigError
from uno.imports import import_object, is_object_name

if TYPE_CHECKING:
    from torch import Tensor, nn

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


@dataclass(frozen=True)
class Method:
    """A discovery method.

    Attributes:
        name: An identifier. The section of the method in the configuration has this
            name.
        step: Trains on one batch, see :data:`uno.steps.Step`.
        novel_head: Builds the novel head from (K, D). The head maps features (N, D) to
            logits (1, N, K) and has a ``weight`` (1, K, ...). None for the projection
            heads of UNO.
        start: Called as ``start(config, model, train)`` before the first step, on every
            worker. It may initialize the model in place. It returns tensors by name,
            which are kept in ``state.extra`` and in checkpoints.
        config: The constants of the method, a subclass of :class:`uno.config.Section`,
            as options ``--NAME.FIELD``. A step reads them as ``config.method_options``.
            None if the method has none.
        settings: By preset the values of that section, if the authors' constants depend
            on the data.
        frozen_head: Builds the novel head in the place of ``novel_head`` if the encoder
            is frozen and the method would train it, see
            :class:`uno.methods.method.AdaptedHead`.
        adapter: Builds from D a module that maps the features before the heads, see
            :class:`uno.model.UnoModel`.
        trains: False if ``start`` does all the work on features of a frozen encoder.
            Discovery has no epochs by default then.
        gcd: Whether the method can be used if the unlabeled set also holds known
            classes.
        pretrain: Whether the method needs supervised pretraining if no weights are
            given.
        needs_images: Whether the method reads images or ``Batch.rows`` itself, so that
            it cannot stream.
        teacher: Given the configuration, whether ``state.teacher`` must be a frozen
            copy of the network after supervised pretraining.
        extends: Whether the method uses all of the section ``objective``: the class
            prior, and the terms that are off by default (IIC, rKD, the queue).
        variant: Given the configuration, a step to use instead of ``step``, or None.
    """

    name: str
    step: Callable[..., Tensor]
    novel_head: Callable[[int, int], nn.Module] | None = None
    start: Callable[..., dict[str, Tensor]] | None = None
    config: Any = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    frozen_head: Callable[[int, int], nn.Module] | None = None
    adapter: Callable[[int], nn.Module] | None = None
    trains: bool = True
    gcd: bool = False
    pretrain: bool = True
    needs_images: bool = False
    teacher: Callable[[Any], bool] = lambda config: False
    extends: bool = False
    variant: Callable[[Any], Callable[..., Tensor] | None] = lambda config: None


@dataclass(frozen=True)
class Pretext:
    """A self-supervised task that trains the encoder before supervised pretraining.

    Attributes:
        name: The name of the task.
        step: Trains on one batch, see :data:`uno.steps.Step`. The batch has the large
            views of labeled and unlabeled rows, without labels. The step may change the
            views.
        num_outputs: The number of known outputs that the model has for the task, as
            cosines of the feature. This head is dropped afterward.
    """

    name: str
    step: Callable[..., Tensor]
    num_outputs: int


# sections of loaded methods outside this package, by name
_sections: dict[str, Any] = {}


@cache
def load(name: str) -> Method:
    """Return the method of a name.

    Args:
        name: A key of :data:`METHODS`, or ``package.module:METHOD``, which is imported.

    Raises:
        ConfigError: There is no such method, or its own name is taken or no identifier.
    """
    found = _load("method", name, METHODS, Method)
    if name not in METHODS:
        if not found.name.isidentifier() or found.name in METHODS:
            raise ConfigError(
                f"method {name}: its name {found.name!r} is taken, or is no identifier"
            )
        _sections[found.name] = found.config
    return found


@cache
def load_pretext(name: str) -> Pretext:
    """Return the pretext task of a name.

    Args:
        name: A key of :data:`PRETEXTS`, or ``package.module:PRETEXT``, which is
            imported.

    Raises:
        ConfigError: There is no such task.
    """
    return _load("pretext.task", name, PRETEXTS, Pretext)


def _load(key: str, name: str, own: Mapping[str, str], kind: type) -> Any:
    """Return the object that a name of the package or an import path stands for.

    Args:
        key: The key of the configuration, for messages.
        name: A name of ``own``, or an import path.
        own: The names of the package.
        kind: The type that the object must have, :class:`Method` or :class:`Pretext`.

    Raises:
        ConfigError: There is no such object, or it has another type.
    """
    what = kind.__name__.upper()
    if name in own:
        return getattr(import_module(f"uno.methods.{name}"), what)
    if not is_object_name(name):
        raise ConfigError(
            f"{key} must be one of {', '.join(own)}, or package.module:{what}, got"
            f" {name!r}"
        )
    if not isinstance(found := import_object(key, name), kind):
        raise ConfigError(
            f"{key} {name} is of type {type(found).__name__}, not"
            f" uno.methods.{kind.__name__}"
        )
    return found


def section(method: str) -> dict[str, Any]:
    """Return the section that a method adds to the configuration.

    Args:
        method: The name of a method.

    Returns:
        The pydantic schema of the section, by the name of the section; empty if the
        method has no section.

    Raises:
        ConfigError: There is no such method.
    """
    if method == DEFAULT or (found := load(method)).config is None:
        return {}
    return {found.name: found.config}


def section_model(name: str) -> Any:
    """Return the schema of a configuration section that a method has added.

    Args:
        name: The name of the section, which is also the name of the method.

    Returns:
        The pydantic schema; None if no method of this package and no loaded method of
        the user has a section of this name.
    """
    return (
        load(name).config
        if name in METHODS and name != DEFAULT
        else _sections.get(name)
    )


def description(name: str) -> str:
    """Return what a method is: "rank statistics (Han et al., ICLR 2020)".

    For a method that is not part of this package it is the name.
    """
    return METHODS.get(name, name)
