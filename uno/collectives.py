"""The only torch.distributed in ``uno``. On one process every function is the identity."""

from __future__ import annotations

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


def own_rows(tensor: Tensor, dim: int) -> Tensor:
    """This worker's share of rows gathered by :func:`gather_rows`."""
    rank, size = world()
    return tensor if size == 1 else tensor.chunk(size, dim=dim)[rank]


def sum_(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over workers, in place."""
    if world()[1] > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier(device: torch.device) -> None:
    """Wait for all workers."""
    if world()[1] > 1:
        float(sum_(torch.zeros(1, device=device)))
