"""UNO itself: the step is :func:`uno.steps.discovery_step`, the heads are those of :mod:`uno.model`."""

from __future__ import annotations

import torch
from torch import Tensor

from uno.config import Config
from uno.data.sets import TrainData
from uno.methods.method import Method
from uno.model import UnoModel
from uno.steps import discovery_step


def start(config: Config, model: UnoModel, train: TrainData) -> dict[str, Tensor]:
    """An empty queue of projections for Sinkhorn, where the run has one."""
    if not config.objective.queue_size:
        return {}
    families = 1 if model.over is None else 2
    outputs = families * config.model.projection_dim  # side by side
    shape = (config.augment.large.num_views, config.model.num_heads, config.objective.queue_size, outputs)
    return {"queue": torch.zeros(shape, device=model.known.weight.device)}


METHOD = Method(discovery_step, start=start)
