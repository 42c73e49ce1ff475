"""UNO: novel class discovery with a unified objective (Fini et al., ICCV 2021).

Dimensions used in every docstring:

    V views    H heads    B rows of a batch (B_l labeled, then B_u unlabeled)
    N rows of a set    K clusters of a head    C all outputs (C_l known, C_u novel)
    D features    S image side

The paper is the outline:

    Sec. 3.1  Unified objective              uno.objective, uno.model
    Sec. 3.2  Multi-view and pseudo-labeling uno.augment, uno.objective
    Sec. 3.3  Multi-head, overclustering     uno.heads
    Sec. 4.1  Experimental setup             uno.presets, uno.steps,
                                             uno.training
    Sec. 4.1  Metrics and protocol           uno.results.metrics, uno.results.evaluate
    Sec. 4.2-4.4, appendix: tables, figures  reproduce

:mod:`uno.methods` holds other methods of the literature, and terms that others added to
UNO's objective. A trained model predicts with
``uno.load("runs/demo").predict(images)``. ``uno.discover(data="digits")`` does a whole
run (:mod:`uno.session.api`).
"""

from typing import Any

__all__ = [
    "Model",
    "NovelClassDiscovery",
    "Prediction",
    "Predictions",
    "discover",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, and return it (PEP 562).

    So ``import uno`` alone imports neither torch nor scikit-learn. Python calls this at
    every use of such a name as an attribute of the module.

    Args:
        name: The name of an attribute that the module does not have.

    Returns:
        The class or function, for a name in ``__all__``.

    Raises:
        AttributeError: ``name`` is not in ``__all__``.
    """
    if name == "NovelClassDiscovery":  # needs no run directory and nothing of runs
        from uno.estimator import NovelClassDiscovery

        return NovelClassDiscovery
    if name in __all__:
        from uno.session import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
