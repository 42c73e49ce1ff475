"""The method UNO itself (Fini et al., ICCV 2021), with the heads of :mod:`uno.model`.

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
    """UNO: one cross-entropy for labels and pseudo-labels, with optional extensions.

    Sinkhorn-Knopp makes the pseudo-labels of unlabeled rows from their cosines with the
    prototypes. The extensions, which the configuration switches on, are the terms IIC
    and rKD and the queue of earlier rows (:data:`uno.config.EXTENSIONS`).
    """

    name = "uno"
    supports_gcd = True
    has_projection_heads = True

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Loss:
        """Compute UNO's unified objective of a batch, with extensions if switched on.

        Args:
            state: The state of training, with the model.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The total loss, and the loss of each cluster head, (H,).
        """
        if _has_extensions(config):
            return extensions.extended_objective(state, batch, config)
        return unified_objective(state, batch, config)

    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Create an empty queue of projections for Sinkhorn, if the run has one.

        The size Q of the queue in rows is ``objective.queue_size``. It is on the device
        of the model.

        Args:
            config: The configuration of the run.
            model: The network, which is not changed.
            train: The training data, which are not used.

        Returns:
            "queue", zeros (V_large, H, Q, P), or (V_large, H, Q, 2P) with
            overclustering heads. The mapping is empty if Q is 0.
        """
        size, num_families = config.objective.queue_size, 1 if model.over is None else 2
        if not size:
            return {}
        width = num_families * config.model.projection_dim
        shape = (config.augment.large.num_views, config.model.num_heads, size, width)
        return {"queue": torch.zeros(shape, device=model.known.weight.device)}

    def needs_teacher(self, config: Config) -> bool:
        """Return whether ``objective.rkd_weight`` is above 0.

        The loss then distils the outputs of the pretrained network, the teacher, for
        known classes (rKD).
        """
        return config.objective.rkd_weight > 0

    def can_be_recorded(self, config: Config) -> bool:
        """Return whether a training step can be recorded as a CUDA graph.

        It can if no extension of the objective is switched on.
        """
        return not _has_extensions(config)


def _has_extensions(config: Config) -> bool:
    """Return whether any addition to UNO is switched on, that is, its setting is not 0.

    These are the two terms of IIC (invariant information clustering), class-relation
    knowledge distillation (rKD), and the queue of earlier projections for Sinkhorn.
    """
    return any(getattr(config.objective, name) for name in EXTENSIONS)


METHOD = Uno()
