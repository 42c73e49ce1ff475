"""A GPU that computes nothing: host tensors are real, those on ``cuda`` know their shape and place alone.

Steps run on it end to end, at any world size. What mixes devices is an error; where :attr:`FakeCuda.strict`,
so is what makes the host wait for the device: to read a value, a shape that depends on values, a copy back, a
copy that blocks. What only a GPU shows: kernels, numbers, memory, speed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import distributed
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, META = torch.device("cuda", 0), torch.device("meta")
aten = torch.ops.aten
READ = aten._local_scalar_dense.default
COPY, COPY_ = aten._to_copy.default, aten.copy_.default
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
HALVED = (
    torch.conv2d, F.linear, torch.baddbmm, torch.matmul, Tensor.matmul, F.scaled_dot_product_attention,
)  # fmt: skip
NUM_CLASSES = 5


class Waits(AssertionError):
    """The host would wait for the device, or devices are mixed."""


class OnCuda(FakeTensorMode):
    """Tensors without values, all on ``cuda``. C++ takes them for tensors on ``meta``, for which autograd has
    a queue without a GPU, and asks for more of that kind.
    """

    def dispatch(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.in_kernel_invocation:
            kwargs = on_cuda(kwargs)
        return super().dispatch(function, types, args, kwargs)


def on_cuda(options: dict[str, Any] | None) -> dict[str, Any]:
    options = options or {}
    return options | {"device": CUDA} if options.get("device") == META else options


class Autocast(TorchFunctionMode):
    """What autocast does to a network; its own looks at the device that C++ sees."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in HALVED and torch.is_autocast_enabled("cuda"):
            floats = [isinstance(a, FakeTensor) and a.is_floating_point() for a in args]
            args = [a.bfloat16() if is_float else a for a, is_float in zip(args, floats, strict=True)]
        return function(*args, **(kwargs or {}))


class FakeCuda(TorchDispatchMode):
    """Sends what touches ``cuda`` to tensors without values, and all else to the CPU as ever. Until it is
    ``strict``, values can be read back, made up: from 0 to 1, or classes from 0 to 4; ``reads`` counts how
    often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = OnCuda(allow_non_fake_inputs=True)
        self.strict, self.reads = False, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = on_cuda(kwargs)
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        host = [a for a in tensors if not isinstance(a, FakeTensor)]
        to = torch.device(kwargs.get("device") or "cpu")
        if len(host) == len(tensors) and to.type == "cpu":
            return function(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # where operations arrive that others consist of
            with self:
                found = function.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if function in (READ, COPY, COPY_):
            stays = args[0].device if function is COPY_ or "device" not in kwargs else to
            if function is READ or stays.type == "cpu":
                return self._read(function, args, kwargs)
            non_blocking = kwargs.get("non_blocking") or (function is COPY_ and len(args) > 2 and args[2])
            if self.strict and host and not non_blocking:
                raise Waits(f"{function} to the device blocks")
        elif any(a.ndim for a in host):
            raise Waits(f"{function} of tensors on the host and on the device")
        elif function in INDEXING and any(a is not None and a.dtype == torch.bool for a in args[1]):
            raise Waits(f"{function} by a mask")
        try:
            with self.fake:
                found = function(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise Waits(f"{function}: {error}") from error
        assert all(a.device == CUDA for a in tree_leaves(found) if isinstance(a, Tensor)), function
        return found

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
        values = torch.rand(source.shape, generator=generator) if source.is_floating_point() else classes
        return values.to(kwargs.get("dtype") or source.dtype)


@contextmanager
def fake_cuda(world_size: int = 1) -> Iterator[FakeCuda]:
    """Inside, ``torch.device("cuda")`` works, as rank 0 of that many workers."""
    mode, make = FakeCuda(), Tensor._make_subclass

    def as_meta(cls: Any, tensor: Tensor, grad: bool = False, **options: Any) -> Tensor:
        return make(cls, tensor, grad, **options | {"dispatch_device": False})

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "_make_subclass", staticmethod(as_meta))
        patch.setattr(torch, "_fused_sgd_", check_sgd)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        # A module that is converted swaps its tensors, which those with weak references refuse.
        patch.setattr(torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new.data))
        patch.setattr(distributed, "_verify_param_shape_across_processes", lambda *_, **__: True)  # values
        if world_size > 1:
            dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        torch._C._ensureCUDADeviceGuardSet()
        torch._C._set_only_lift_cpu_tensors(True)  # a tensor of numbers is made here, then copied
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(mode)
        stack.enter_context(Autocast())
        yield mode


def check_sgd(parameters: Any, grads: Any, momenta: Any, *_: Any, found_inf: Tensor, **__: Any) -> None:
    """The fused kernel has no form without values: what it takes for granted is looked at."""
    assert (found_inf.device, found_inf.dtype, found_inf.numel()) == (CUDA, torch.float32, 1)
    for parameter, *others in zip(parameters, grads, momenta, strict=True):
        for other in others:
            assert (other.device, other.dtype) == (CUDA, parameter.dtype)
            assert (other.shape, _strides(other)) == (parameter.shape, _strides(parameter))


def _strides(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
