"""The only torch.distributed in ``uno``. On one process every function is the identity."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, world size); (0, 1) outside a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_rows(tensor: Tensor, dim: int) -> Tensor:
    """Concatenate the workers' tensors of equal shape along ``dim``, in rank order, in one collective."""
    _, size = world()
    if size == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=dim)


def gather_rows_with_grad(tensor: Tensor, dim: int) -> Tensor:
    """As :func:`gather_rows`; backward adds up what every worker's loss has to say about a row.

    A loss that is a mean over (own rows x all rows), averaged over workers, so has the gradient of the mean
    over all pairs.
    """
    return tensor if world()[1] == 1 else _GatherRows.apply(tensor, dim)


def mean_with_grad(tensor: Tensor) -> Tensor:
    """Mean of the workers' tensors, with gradient as :func:`gather_rows_with_grad`."""
    return tensor if world()[1] == 1 else gather_rows_with_grad(tensor.unsqueeze(0), 0).mean(dim=0)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gather_rows(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_rows(sum_(grad.contiguous()), ctx.dim), None


def own_rows(tensor: Tensor, dim: int) -> Tensor:
    """This worker's share of rows gathered by :func:`gather_rows`."""
    rank, size = world()
    return tensor if size == 1 else tensor.chunk(size, dim=dim)[rank]


def sum_(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over workers, in place."""
    if world()[1] > 1:
        dist.all_reduce(tensor)
    return tensor


def from_first(tensor: Tensor) -> Tensor:
    """Rank 0's tensor, on every worker."""
    return sum_(tensor if world()[0] == 0 else torch.zeros_like(tensor))


def barrier(device: torch.device) -> None:
    """Wait for all workers."""
    if world()[1] > 1:
        float(sum_(torch.zeros(1, device=device)))
