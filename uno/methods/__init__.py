"""Discovery methods under one protocol: an objective and its heads; all the rest is shared.

Every method has the same encoder, the same supervised pretraining of encoder and cosine known head, the same
batches and views (of which baselines use two large ones), the same SGD and schedule, the same evaluation.
Unless its module says otherwise, a baseline's novel head is one layer of cosines on the feature, divided by
the temperature tau as everywhere here; the papers have a linear layer with a bias. So known and novel outputs
are comparable, and predict, report and export serve every method.

A new method is a module of this package with a ``METHOD`` (:class:`uno.methods.method.Method`) and its line
in :data:`METHODS`. Methods are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uno.config import Config
    from uno.methods.method import Method
    from uno.model import UnoModel

METHODS = {
    "uno": "unified objective (Fini et al., ICCV 2021)",
    "rs": "rank statistics (Han et al., ICLR 2020)",
    "rs_plus": "rank statistics with incremental learning (Han et al., ICLR 2020)",
    "mcl": "meta classification likelihood (Hsu et al., ICLR 2019)",
    "dtc": "deep transfer clustering (Han et al., ICCV 2019)",
    "kcl": "KLD-based contrastive loss (Hsu et al., ICLR 2018)",
}
"""Name, which is its module's too -> what it is."""


def load(config: Config) -> Method:
    """The method of a run; UNO with options of later work is the method of :mod:`uno.methods.extensions`."""
    options = config.objective
    extended = options.iic_weight or options.iic_view_weight or options.rkd_weight or options.queue_size
    return _method("extensions" if config.method == "uno" and extended else config.method)


def _method(module: str) -> Method:
    method: Method = import_module(f"uno.methods.{module}").METHOD
    return method


def settings(name: str, preset: str) -> dict[str, Any]:
    """Dotted keys that a method's authors set differently on a preset's data; UNO's are the presets."""
    return {} if name == "uno" or name not in METHODS else dict(_method(name).settings.get(preset, {}))


def build_network(config: Config, num_known: int, num_novel: int, seed: int) -> UnoModel:
    """The freshly initialised network of the run's method; ``num_novel`` 0: encoder and known head alone."""
    from uno.model import build_model

    return build_model(config.model, num_known, num_novel, seed, load(config).novel_head)


def num_heads(config: Config) -> int:
    """Cluster heads H of the run's method."""
    return config.model.num_heads if load(config).novel_head is None else 1
