"""From the resident set to training batches: index, augment, on the device (paper Sec. 3.2, views)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
        views = _views(config, images, self._plan, step, self._rows)
        return Batch(views, train.labels[labeled], config.augment.large.num_views, unlabeled)

    def _share(self, indices: np.ndarray) -> np.ndarray:
        return worker_share(indices, self._rank, self._world_size)


class RotationBatches:
    """``batches(step)`` of the rotation phase: labeled and unlabeled rows alike, each turned by 0, 90, 180
    and 270 degrees; view k is turned k times. A pure function of (seed, step, rank).
    """

    def __init__(self, config: Config, train: TrainSet, plan: Plan, rank: int, world_size: int) -> None:
        self._config, self._train, self._plan = config, train, plan
        self._rank, self._world_size = rank, world_size

    def __call__(self, step: int) -> Batch:
        """The batch of global step ``step``; it has no labels but the turns."""
        train, num_labeled = self._train, len(self._train.labels)
        indices, _ = batch_indices(self._plan, step)
        own = worker_share(indices, self._rank, self._world_size)
        order = np.argsort(own >= num_labeled, kind="stable")  # labeled rows first, as they are stored apart
        places = worker_share(np.arange(len(indices)), self._rank, self._world_size)[order]
        labeled, unlabeled = (
            torch.from_numpy(rows).to(train.labels.device, non_blocking=True)
            for rows in np.split(own[order], [int((own < num_labeled).sum())])
        )
        images = torch.cat([train.labeled_images[labeled], train.unlabeled_images[unlabeled - num_labeled]])
        views = _views(self._config, images, self._plan, step, torch.from_numpy(places))
        num_large = self._config.augment.large.num_views
        turned = [torch.rot90(views[k % num_large], k, (2, 3)).contiguous() for k in range(4)]
        return Batch(turned, train.labels[:0], 4)


def _views(config: Config, images: Tensor, plan: Plan, step: int, rows: Tensor) -> list[Tensor]:
    """Views of the ``rows`` (B,) int64 of the global batch that ``images`` are."""
    generator = augment_generator(config.seed, plan.labeled_stream, step)
    num_rows = plan.labeled_size + plan.unlabeled_size
    return augment(images, config.augment, generator, config.data.mean, config.data.std, rows, num_rows)
