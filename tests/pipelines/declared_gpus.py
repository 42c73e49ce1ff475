"""GPUs of which there are none: Ray counts them, and the CPU computes."""

from collections.abc import Callable
from typing import Any

import torch

from tests.pipelines.small import ROOT

HOOK = "tests.pipelines.declared_gpus.compute_on_the_cpu"
SETUP = {"worker_process_setup_hook": HOOK, "env_vars": {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}}


def compute_on_the_cpu() -> None:
    """In every process of a worker: what goes to a GPU stays on the CPU, and NCCL is gloo."""
    from ray.air._internal.device_manager import CUDATorchDeviceManager

    CUDATorchDeviceManager.get_devices = lambda self: [torch.device("cpu")]

    def on_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
            return move(self, *args, **{k: "cpu" if _is_cuda(v) else v for k, v in kwargs.items()})

        return to

    for kind in (torch.nn.Module, torch.Tensor):
        kind.to = on_cpu(kind.to)  # type: ignore[method-assign]
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **kwargs: start("gloo", **kwargs)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == "cuda"
