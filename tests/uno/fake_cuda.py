"""A device that computes nothing, in the place of a GPU: ``meta``, whose tensors know
shape and place alone.

Steps run on it end to end, as rank 0 of any number of workers. What mixes devices is an
error; where
:attr:`FakeCuda.strict`, so is what makes the host wait for the device: to read a value,
a shape that depends on values, a copy back, a copy that blocks. What only a GPU shows
is in ``test_gpu``: kernels, numbers.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

# documented, in spite of its name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.uno.small_run import SMALL
from uno import distributed
from uno.config import Config
from uno.data.files import Storage
from uno.data.memory import TrainSet
from uno.runs import run
from uno.training import LocalWorker, Phase

DEVICE, CPU = torch.device("meta"), torch.device("cpu")
NUM_CLASSES = 5
aten = torch.ops.aten
READ, COPY, COPY_ = (
    aten._local_scalar_dense.default,
    aten._to_copy.default,
    aten.copy_.default,
)
BY_VALUES = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
TINY = {key: value for key, value in SMALL.items() if key.startswith("model.")} | {
    "model.encoder": "tests.uno.fake_cuda:narrow",
    "model.weights": None,
    "train.batch_size": 32,
    "data.batch_sampling": "balanced",
}


class Waits(AssertionError):
    """The host would wait for the device, or devices are mixed."""


class FakeCuda(TorchDispatchMode):
    """Looks at all that touches ``DEVICE``. Until it is ``strict``, values can be read
    back, made up: from 0 to 1, or classes from 0 to 4; ``reads`` counts how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.strict, self.reads = False, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        host = [a for a in tensors if not a.is_meta]
        if len(host) == len(tensors) and function is not COPY:
            return function(*args, **kwargs)
        # where operations arrive that others consist of
        if torch.is_inference_mode_enabled():
            with self:
                found = function.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if function in (READ, COPY, COPY_):
            to = (
                args[0].device
                if function is COPY_
                else torch.device(kwargs.get("device") or args[0].device)
            )
            if function is READ or (to == CPU and len(host) < len(tensors)):
                return self._read(function, args, kwargs)
            non_blocking = kwargs.get("non_blocking") or (
                function is COPY_ and len(args) > 2 and args[2]
            )
            if self.strict and host and to == DEVICE and not non_blocking:
                raise Waits(f"{function} to the device blocks")
        elif function is aten.lift_fresh.default and self.strict:
            raise Waits("numbers to the device block")
        elif any(a.ndim for a in host):
            raise Waits(f"{function} of tensors on the host and on the device")
        elif function in BY_VALUES and any(
            a is not None and a.dtype == torch.bool for a in args[1]
        ):
            raise Waits(f"{function} by a mask")
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            raise Waits(f"{function}: {error}") from error

    def _read(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.strict:
            raise Waits(f"{function} back to the host")
        self.reads += 1
        source = args[0]
        if function is COPY_:  # what was there
            return source
        if function is READ:
            return torch.zeros((), dtype=source.dtype).item()
        generator = torch.Generator().manual_seed(source.numel())
        classes = (torch.arange(source.numel()) % NUM_CLASSES).view(source.shape)
        values = (
            torch.rand(source.shape, generator=generator)
            if source.is_floating_point()
            else classes
        )
        return values.to(kwargs.get("dtype") or source.dtype)


class StillSGD(SGD):
    """An optimizer whose fused kernel, which needs values, moves nothing."""

    def __init__(self, *settings: Any, fused: bool, **more: Any) -> None:
        super().__init__(*settings, **more)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Check that the sign to skip a step lies where the kernel reads it."""
        found_inf: Tensor = self.found_inf  # type: ignore[attr-defined]
        assert (found_inf.device, found_inf.dtype) == (DEVICE, torch.float32)
        assert found_inf.numel() == 1


@contextmanager
def fake_cuda(world_size: int = 1) -> Iterator[FakeCuda]:
    """Inside, ``DEVICE`` is looked after, and collectives are those of rank 0 of
    that many workers.
    """
    with pytest.MonkeyPatch.context() as patch:
        # which knows no such device
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        patch.setattr(torch.optim, "SGD", StillSGD)
        if world_size > 1:
            patch.setattr(distributed, "in_group", lambda: True)
            for name, value in (("rank", 0), ("world_size", world_size)):
                patch.setattr(dist, f"get_{name}", lambda value=value: value)
            for name in ("all_gather", "all_reduce", "broadcast"):
                patch.setattr(dist, name, lambda *_, **__: None)
            # what is sent as bytes, which nothing here holds
            patch.setattr(
                distributed, "gather_objects", lambda value: [value] * world_size
            )
            patch.setattr(
                distributed, "compute_on_rank0", lambda function, device: function()
            )
        with FakeCuda() as mode:
            yield mode


class FirstWorker(LocalWorker):
    """Rank 0 of several, without what Ray's worker puts around a model: DDP, and
    norms over all workers.
    """

    def __init__(self, world_size: int, device: torch.device = DEVICE) -> None:
        super().__init__(device)
        self.world_size = world_size


def narrow() -> nn.Module:
    """One block where a network has many: (B, 3, S, S) -> (B, 8, S / 2, S / 2)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    )


@cache
def rows_of(*shape: int) -> TrainSet:
    """100 labeled and 100 unlabeled rows, five classes each; (V, D) are features."""
    images = torch.rand(100, *shape, generator=torch.Generator().manual_seed(0))
    images = (images * 256).byte() if len(shape) == 3 else images
    return TrainSet(images, torch.arange(100) % 5, images, 5, 5)


class RealCuda:
    """The same question to a GPU that is there."""

    @property
    def strict(self) -> bool:
        """Whether torch raises where the host would wait."""
        return torch.cuda.get_sync_debug_mode() > 0

    @strict.setter
    def strict(self, wanted: bool) -> None:
        if torch.cuda.is_available():
            with warnings.catch_warnings():  # it is a prototype, it says
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error" if wanted else "default")


def train_steps(
    config: Config,
    phase: str,
    world_size: int,
    steps: Sequence[int] = (0,),
    device: torch.device = DEVICE,
) -> None:
    """These steps of a phase, as :func:`uno.runs.run.run_phase` prepares it; none
    may wait for the device.
    """

    def fit(config: Config, phase: Phase, state: Any, batches: Any, *_: Any) -> None:
        state.total_steps = phase.total_steps
        for step in steps:
            mode.strict, state.step = True, step
            try:
                loss = phase.step(state, batches(step), config, phase.lr(step))
            finally:
                mode.strict = False
            assert (loss.device.type, loss.dtype, loss.shape) == (
                device.type,
                torch.float32,
                (1,),
            )

    side = max(
        config.augment.large.size, config.augment.small.size, config.data.stored_size
    )
    train = (
        rows_of(1 + 4, 8) if config.model.finetune == "none" else rows_of(3, side, side)
    )
    there = fake_cuda(world_size) if device == DEVICE else nullcontext(RealCuda())
    with there as mode, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "fit", fit)
        patch.setattr(run, "load_weights_", lambda *_: True)
        patch.setattr(run, "_load_phase_", lambda *_: True)
        worker, nowhere = FirstWorker(world_size, device), Storage("/nonexistent")
        run.run_phase(config, phase, train.to(device), worker, nowhere)
