"""UNO itself (Fini et al., ICCV 2021), with the heads of :mod:`uno.model`.

The loss is :func:`uno.objective.unified_objective`. If the objective asks for terms of
later work, it is that of :mod:`uno.methods.extensions`.
"""

import torch
from torch import Tensor

from uno.config import EXTENSIONS, Config
from uno.data.stream import TrainData
from uno.methods import Method, extensions
from uno.model import UnoModel
from uno.objective import unified_objective
from uno.steps import Batch, Loss, TrainState


class Uno(Method):
    """UNO, with the extensions that the configuration switches on."""

    name = "uno"
    supports_gcd = True
    has_projection_heads = True

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Loss:
        """Compute the unified objective, see :meth:`uno.methods.Method.loss`."""
        if _has_extensions(config):
            return extensions.extended_objective(state, batch, config)
        return unified_objective(state, batch, config)

    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Create an empty queue of projections for Sinkhorn, if the run has one.

        The size Q of the queue is ``objective.queue_size``.

        Returns:
            "queue", zeros (V_large, H, Q, P), or (V_large, H, Q, 2P) with
            overclustering heads; empty if Q is 0.
        """
        size, num_families = config.objective.queue_size, 1 if model.over is None else 2
        if not size:
            return {}
        width = num_families * config.model.projection_dim
        shape = (config.augment.large.num_views, config.model.num_heads, size, width)
        return {"queue": torch.zeros(shape, device=model.known.weight.device)}

    def needs_teacher(self, config: Config) -> bool:
        """Return whether rKD has a weight."""
        return config.objective.rkd_weight > 0

    def can_be_recorded(self, config: Config) -> bool:
        """Return whether no extension is switched on."""
        return not _has_extensions(config)


def _has_extensions(config: Config) -> bool:
    """Return whether the objective has terms or a queue of later work."""
    return any(getattr(config.objective, name) for name in EXTENSIONS)


METHOD = Uno()
