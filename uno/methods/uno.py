"""The method UNO itself (Fini et al., ICCV 2021), with the heads of :mod:`uno.model`.

The loss is :func:`uno.objective.unified_objective`. If the objective asks for terms of
later work, those of :mod:`uno.methods.extensions` are added. A method that adds a term
of its own is a subclass of :class:`Uno` with another ``name`` and :meth:`Uno.terms`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from uno.config import EXTENSIONS, Config
from uno.data.stream import TrainData
from uno.method import Method
from uno.methods.extensions import iic_loss, iic_view_loss, past_logits, rkd_loss
from uno.model import Logits, UnoModel
from uno.objective import unified_objective
from uno.steps import Batch, Loss, TrainState, forward


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
        """Compute UNO's unified objective of a batch, and add :meth:`terms`.

        If ``state.extra`` has a "queue", Sinkhorn assigns the unlabeled rows of the
        batch together with the rows of earlier batches in the queue, as soon as
        :func:`uno.methods.extensions.past_logits` returns these. The prototypes of the
        model are scaled to length one first, in place. All workers call this.

        Args:
            state: The state of training, with the model. The queue is updated.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The total loss, and the loss of each cluster head without the added terms,
            (H,).
        """
        logits, past = forward(state, batch), None
        if "queue" in state.extra:
            assert logits.directions is not None
            unlabeled = logits.directions[: batch.num_large, :, len(batch.labels) :]
            past = past_logits(state, unlabeled)
        total, of_heads = unified_objective(state, batch, config, logits, past)
        terms = list(self.terms(state, batch, logits, config))
        return Loss(torch.stack([total, *terms]).sum() if terms else total, of_heads)

    def terms(
        self, state: TrainState, batch: Batch, logits: Logits, config: Config
    ) -> Iterator[Tensor]:
        """Yield the terms to add to the unified objective, each times its weight.

        They are the extensions that the configuration switches on:
        :func:`~uno.methods.extensions.iic_loss` and
        :func:`~uno.methods.extensions.iic_view_loss` for all views, and
        :func:`~uno.methods.extensions.rkd_loss` for the unlabeled rows in the large
        views. For the last, the teacher's outputs are computed here, without gradient.

        A subclass adds a term by ``yield from super().terms(...)`` and a further
        ``yield``. A statistic of the rows of all workers is averaged by
        :func:`uno.distributed.mean_with_grad`. If the term launches other kernels in
        some steps, :meth:`can_be_recorded` must return False.

        Args:
            state: The state of training, with the teacher if rKD has a weight.
            batch: The views of this worker's rows, labeled rows first.
            logits: The outputs of the network for the batch. Cosines are not yet
                divided by the temperature.
            config: The configuration of the run.

        Yields:
            The weighted terms, scalars with gradient.
        """
        assert logits.novel is not None
        objective, num_labeled = config.objective, len(batch.labels)
        known, novel, tau = logits.known, logits.novel, objective.temperature
        if weight := objective.iic_weight:
            yield weight * iic_loss(known, novel, num_labeled, tau)
        if weight := objective.iic_view_weight:
            yield weight * iic_view_loss(known, novel, num_labeled, tau)
        if weight := objective.rkd_weight:
            assert state.teacher is not None
            large, rows = slice(batch.num_large), slice(num_labeled, None)
            with (
                torch.no_grad(),
                torch.autocast(
                    state.device.type, torch.bfloat16, enabled=state.autocast
                ),
            ):
                views = [view[rows] for view in batch.views[large]]
                teacher = state.teacher(views).known
            known, novel = known[large, rows], novel[large, :, rows]
            yield weight * rkd_loss(
                known, novel, teacher, tau, objective.rkd_temperature
            )

    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Create an empty queue of projections for Sinkhorn, if the run has one.

        The queue keeps the projections of Q = ``objective.queue_size`` unlabeled rows
        of earlier batches, for each of V_large = ``augment.large.num_views`` views and
        H = ``model.num_heads`` heads. A projection has P = ``model.projection_dim``
        numbers. The queue is on the device of the model.

        Args:
            config: The configuration of the run.
            model: The network, which is not changed.
            train: The training data, which are not used.

        Returns:
            "queue", zeros (V_large, H, Q, P); or (V_large, H, Q, 2P) with
            overclustering heads, whose projections stand beside those of the cluster
            heads. The mapping is empty if Q is 0.
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

        It can if no extension of the objective (:data:`uno.config.EXTENSIONS`) is
        switched on, that is, if all their settings are 0.
        """
        return not any(getattr(config.objective, name) for name in EXTENSIONS)


METHOD = Uno()
