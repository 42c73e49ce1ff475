"""Discovery methods and pretext tasks under one protocol each; all the rest of a run is
shared.

All methods share encoder, pretraining, batches and views (of which baselines use two
large ones), SGD, schedule and evaluation. Unless its module says otherwise, a
baseline's novel head is one layer of cosines on the feature over tau, where the papers
have a linear layer with a bias: so known and novel outputs are comparable, and predict,
report and export serve every method.

A method of this package is a module with a ``METHOD`` and its line in :data:`METHODS`;
one of your own is named by ``--method package.module:METHOD``. A pretext task has a
``PRETEXT`` and ``--pretext.task`` alike. Nothing here imports torch: the command line
and the schema ask this module.
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

# the constants of this method are the section ``objective``: it has none of its own
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
"""Name, which is its module's too -> what it is."""
PRETEXTS = {"rotation": "which of four quarter turns (Gidaris et al., ICLR 2018)"}
"""As :data:`METHODS`, of pretext tasks."""


@dataclass(frozen=True)
class Method:
    """A discovery method.

    ``name``: an identifier, also of its section of the configuration. ``step`` is one
    optimizer step, a
    :data:`uno.steps.Step`; ``variant(config)``: another one where the configuration
    asks for it, else None. ``config``: a subclass of :class:`uno.config.Section` with
    the method's own constants, ``--NAME.FIELD``; a step finds them as
    ``config.method_options``. ``settings``: preset -> values of that section, where the
    authors' constants depend on the data.

    ``novel_head(K, D)`` builds the head that reads the feature: (N, D) -> (1, N, K)
    logits, with ``weight`` (1, K, ...); None: UNO's projection heads. ``frozen_head``:
    the head in its place where the encoder is frozen, of a method that would shape it:
    see :class:`uno.methods.method.AdaptedHead`. ``start(config, model, train)`` runs
    once, before the first step, on every worker alike: it may initialize the model in
    place and returns the tensors to keep, by name, in ``state.extra`` and in
    checkpoints. ``adapter(D)``: see
    :class:`uno.model.UnoModel`. ``trains``: False where ``start`` does all on features
    of a frozen encoder, so that by default discovery has no epochs.

    ``gcd``: it serves an unlabeled set that holds known classes, too. ``pretrain``: it
    wants supervised pretraining where no weights are given. ``needs_images``: it reads
    images or ``Batch.rows`` itself, so it cannot stream. ``teacher(config)``: whether
    ``state.teacher`` is to be the frozen network that supervised pretraining left.
    ``extends``: it reads all of ``objective``: the prior, and the terms that are off by
    default (IIC, rKD, the queue).
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
    """A self-supervised task, which trains the encoder on all rows before supervised
    pretraining.

    ``step``, a :data:`uno.steps.Step`, is given the large views of labeled and
    unlabeled rows alike, without labels; it may turn or mask them. ``num_outputs``:
    cosines of the feature, ``known`` of the model's output; that head is dropped
    afterward.
    """

    name: str
    step: Callable[..., Tensor]
    num_outputs: int


_sections: dict[str, Any] = {}  # of methods from elsewhere that were loaded, by name


@cache
def load(name: str) -> Method:
    """The method of :data:`METHODS`, or of ``package.module:METHOD``. ConfigError:
    there is no such.
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
    """The pretext task of :data:`PRETEXTS`, or of ``package.module:PRETEXT``.
    ConfigError: as of a method.
    """
    return _load("pretext.task", name, PRETEXTS, Pretext)


def _load(key: str, name: str, own: Mapping[str, str], kind: type) -> Any:
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
    """The configuration section of a method, name -> model; {}: it has none.
    ConfigError: no such method.
    """
    if method == DEFAULT or (found := load(method)).config is None:
        return {}
    return {found.name: found.config}


def section_model(name: str) -> Any:
    """The model of the section ``name`` of a method; None: no method that is known
    here has it.
    """
    return (
        load(name).config
        if name in METHODS and name != DEFAULT
        else _sections.get(name)
    )


def description(name: str) -> str:
    """What a method is, for a card and a report."""
    return METHODS.get(name, name)
