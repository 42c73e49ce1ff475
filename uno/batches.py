"""From the resident set to training batches: index, augment, on the device (paper Sec. 3.2, views)."""

from __future__ import annotations

import numpy as np
import torch

from uno.augment import augment
from uno.config import Config
from uno.data.batches import Plan, augment_generator, batch_indices, worker_share
from uno.data.resident import TrainSet
from uno.steps import Batch


class ResidentBatches:
    """``batches(step)`` -> this worker's :class:`Batch`: a pure function of (seed, step, rank).

    Parameters of the views are drawn for the global batch, so a row gets the same views on any number of
    workers.
    """

    def __init__(self, config: Config, train: TrainSet, plan: Plan, rank: int, world_size: int) -> None:
        self._config, self._train, self._plan = config, train, plan
        self._rank, self._world_size = rank, world_size
        size_l, size_u = plan.labeled_size, plan.unlabeled_size
        positions = (np.arange(size_l), size_l + np.arange(size_u))
        self._rows = torch.from_numpy(np.concatenate([self._share(part) for part in positions]))

    def __call__(self, step: int) -> Batch:
        """The batch of global step ``step``."""
        config, train = self._config, self._train
        labeled, unlabeled = (
            torch.from_numpy(self._share(indices).copy()).to(train.labels.device, non_blocking=True)
            for indices in batch_indices(self._plan, step)
        )
        images = torch.cat([train.labeled_images[labeled], train.unlabeled_images[unlabeled]])
        generator = augment_generator(config.seed, self._plan.labeled_stream, step)
        num_rows = self._plan.labeled_size + self._plan.unlabeled_size
        views = augment(
            images, config.augment, generator, config.data.mean, config.data.std, self._rows, num_rows
        )
        return Batch(views, train.labels[labeled], config.augment.large.num_views)

    def _share(self, indices: np.ndarray) -> np.ndarray:
        return worker_share(indices, self._rank, self._world_size)
