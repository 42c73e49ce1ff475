"""What benchmarks need besides seconds: limits of the device, counts of operators, and
sizes of data sets.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import medians, take_turns

CLASSES = {  # known and novel classes, labeled and unlabeled training rows
    "digits": (5, 5, 723, 719),
    "cifar10": (5, 5, 25_000, 25_000),
    "cifar100_20": (80, 20, 40_000, 10_000),
    "cifar100_50": (50, 50, 25_000, 25_000),
    # rows rounded; its batches are half and half
    "imagenet": (882, 30, 1_129_000, 38_000),
}
NO_WORK = {  # views, allocations and questions to the dispatcher
    "alias",
    "as_strided",
    "as_strided_",
    "chunk",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "expand_as",
    "flatten",
    "is_nonzero",
    "lift_fresh",
    "mT",
    "narrow",
    "new_empty",
    "new_empty_strided",
    "numpy_T",
    "permute",
    "promote_types",
    "real",
    "reshape",
    "_reshape_alias",
    "resize_",
    "resolve_conj",
    "resolve_neg",
    "result_type",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "to",
    "transpose",
    "unbind",
    "unflatten",
    "_unsafe_view",
    "unsqueeze",
    "view",
    "view_as",
}


def limits(
    device: str, dtype: torch.dtype, clock: str = "wall", repeats: int = 5
) -> dict[str, float]:
    """What the device can do, now: the largest of some matrix products, and copying
    memory.

    Returns: ``matmul_tflops`` in ``dtype`` and ``copy_gb_per_s``, bytes read plus bytes
        written.
    """
    methods, flops = {}, {}
    for side in (2048, 8192) if device.startswith("cuda") else (1024, 2048):
        left, right = (
            torch.randn(side, side, device=device).to(dtype) for _ in range(2)
        )
        methods[str(side)] = lambda left=left, right=right: left @ right
        flops[str(side)] = 2 * side**3
    source = torch.ones(
        2**30 if device.startswith("cuda") else 2**27, dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    methods["copy"] = lambda: target.copy_(source)
    middle = medians(take_turns(methods, repeats, device, clock))
    return {
        "matmul_tflops": round(
            max(flops[side] / middle[side] for side in flops) / 1e12, 3
        ),
        "copy_gb_per_s": round(2 * source.numel() / middle["copy"] / 1e9, 1),
    }


def count_operators(function: Callable[[], Any], device: str = "cpu") -> int:
    """Operators that touch elements in one call of ``function``: innermost ones of the
    profiler's trace on the CPU, without views and allocations; launched kernels on
    CUDA.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    function()
    with torch.profiler.profile(activities=activities) as trace:
        function()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    if device.startswith("cuda"):
        return sum(
            event.device_type == torch.autograd.DeviceType.CUDA
            for event in trace.events()
        )
    return sum(_works(event) for event in trace.events())


def _works(event: Any) -> bool:
    """Whether a profiler event is an operator that touches elements itself, not
    through other operators.
    """
    named = (
        event.name.startswith("aten::")
        and event.name.removeprefix("aten::") not in NO_WORK
    )
    return named and not any(_works_inside(child) for child in event.cpu_children)


def _works_inside(event: Any) -> bool:
    return _works(event) or any(_works_inside(child) for child in event.cpu_children)
