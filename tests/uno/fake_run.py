"""Phases of a run on a GPU that computes nothing, as :func:`uno.runs.run.run_phase` prepares them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipelines.worker import RayWorker
from tests.uno.fake_cuda import CUDA, fake_cuda
from tests.uno.small_run import SMALL
from uno.config import Config
from uno.data.files import Storage
from uno.data.resident import TrainSet
from uno.runs import run
from uno.train import Phase

NOWHERE = Storage("/nonexistent")
TINY = {key: value for key, value in SMALL.items() if key.startswith("model.")} | {
    "model.encoder": "tests.uno.fake_run:narrow", "model.weights": None, "train.batch_size": 32,
    "data.composition": "paired",
}  # fmt: skip


def narrow() -> nn.Module:
    """One block where a network has many: (B, 3, S, S) -> (B, 8, S / 2, S / 2)."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())


@cache
def rows_of(*shape: int) -> TrainSet:
    """100 labeled and 100 unlabeled rows, five classes each; (V, D) are features."""
    images = torch.zeros(100, *shape, dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    return TrainSet(images, torch.zeros(100, dtype=torch.int64), images, 5, 5)


class FirstWorker(RayWorker):
    """Rank 0 of several, without Ray."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size, self.device = 0, world_size, CUDA

    def wrap(self, model: nn.Module) -> nn.Module:
        """As on Ray; the others' gradients arrive at once. BatchNorms stay as they are: torch's
        SyncBatchNorm waits for the device in every layer, for shares that have no rows.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.SyncBatchNorm, "convert_sync_batchnorm", lambda model: model)
            wrapped = super().wrap(model)
        if wrapped is not model:
            wrapped.register_comm_hook(None, _arrived)  # type: ignore[operator]
        return wrapped


def _arrived(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer())
    return done


def train_steps(config: Config, phase: str, world_size: int, steps: Sequence[int] = (0,)) -> None:
    """These steps of a phase, none of which may wait for the device."""

    def fit(config: Config, phase: Phase, state: Any, batches: Any, *_: Any) -> None:
        state.total_steps = phase.total_steps
        for step in steps:
            mode.strict, state.step = True, step
            loss = phase.step(state, batches(step), config, phase.lr(step))
            assert loss.device == CUDA and loss.shape == (1,)
            mode.strict = False
            if world_size > 1 and len(steps) > 1:
                state.forward.reducer._rebuild_buckets()  # DDP's own wait, once in a run

    side = max(config.augment.large.size, config.augment.small.size, config.data.store_size)
    train = rows_of(1 + 4, 8) if config.model.trainable == "heads" else rows_of(3, side, side)
    with fake_cuda(world_size) as mode, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "fit", fit)
        for load in ("load_weights_", "_load_phase_"):
            patch.setattr(run, load, lambda *_: True)
        run.run_phase(config, phase, train.to(CUDA), FirstWorker(world_size), NOWHERE)
