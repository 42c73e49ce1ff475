"""GPUs of which there are none: Ray counts them, and the CPU computes."""

from collections.abc import Callable
from typing import Any

import torch

from tests.pipelines.small import ROOT

HOOK = "tests.pipelines.declared_gpus.compute_on_the_cpu"
SETUP = {
    "worker_process_setup_hook": HOOK,
    "env_vars": {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
}
FACTORIES = (
    "tensor",
    "as_tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "eye",
    "rand",
    "randn",
)


def compute_on_the_cpu() -> None:
    """In every process of a worker: what is on a GPU, or goes there, is on the CPU,
    and NCCL is gloo.
    """
    from ray.air._internal.device_manager import CUDATorchDeviceManager

    from uno.training import LocalWorker

    CUDATorchDeviceManager.get_devices = lambda self: [torch.device("cpu")]

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(
                torch.device("cpu") if _is_cuda(value) else value for value in args
            )
            return function(
                *args, **{k: "cpu" if _is_cuda(v) else v for k, v in kwargs.items()}
            )

        return call

    for kind, names in (
        (torch.nn.Module, ("to",)),
        (torch.Tensor, ("to",)),
        (torch, FACTORIES),
    ):
        for name in names:
            setattr(kind, name, on_cpu(getattr(kind, name)))
    LocalWorker.__init__ = on_cpu(LocalWorker.__init__)  # type: ignore[method-assign]
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **kwargs: start(
        "gloo", **kwargs
    )


def _is_cuda(value: Any) -> bool:
    return (
        isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    )
