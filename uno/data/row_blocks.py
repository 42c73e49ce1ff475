"""Rows in host memory that several sets share: pixels of images, or features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

COPY_BYTES = 64 * 2**20  # bytes that are copied to a device at once


class RowBlocks:
    """Select rows of blocks in host memory, which are copied only when they are read.

    It is indexed like a tensor of N rows along its first dimension.

    Args:
        blocks: Tensors (n, ...) that hold the rows one after the other: pixels of
            images uint8 (n, 3, S, S), or features. There is at least one.
        place: For each of the N rows its number, counted over all blocks, int64 (N,).
            By default each row of the blocks once, in order.
        stays_on_host: Whether :meth:`to` copies nothing, because a device cannot hold
            all rows. Rows are then copied to the device when they are read.
        target: The device to which rows are copied when they are read.
    """

    def __init__(
        self,
        blocks: Sequence[Tensor],
        place: Tensor | None = None,
        stays_on_host: bool = False,
        target: torch.device | str = "cpu",
    ) -> None:
        self._blocks = list(blocks)
        self._ends = torch.tensor([len(block) for block in blocks]).cumsum(0)
        self._place = torch.arange(int(self._ends[-1])) if place is None else place
        self._stays_on_host, self._target = stays_on_host, target

    def __len__(self) -> int:
        return len(self._place)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that a tensor of all N rows would have, (N, ...)."""
        return len(self), *self._blocks[0].shape[1:]

    @property
    def ndim(self) -> int:
        """The number of dimensions of :attr:`shape`."""
        return self._blocks[0].ndim

    def select_rows(self, rows: Tensor | slice) -> RowBlocks:
        """Return some of the rows, without a copy.

        Args:
            rows: Row numbers int64 (n,), a mask bool (N,), or a slice.
        """
        place = self._place[_on_host(rows)]
        return RowBlocks(self._blocks, place, self._stays_on_host, self._target)

    def __getitem__(self, rows: Any) -> Tensor:
        """Copy some rows into a tensor.

        Args:
            rows: The rows, as for :meth:`select_rows`; or, if there is a single block,
                a tuple that begins with them and indexes further dimensions. Tensors
                may be on any device.

        Returns:
            A tensor (n, ...).
        """
        rows, *rest = map(_on_host, rows if isinstance(rows, tuple) else (rows,))
        place = self._place[rows].contiguous()
        if len(self._blocks) == 1:
            return self._blocks[0][(place, *rest)].to(self._target)
        assert not rest
        values = torch.empty((len(place), *self.shape[1:]), dtype=self._blocks[0].dtype)
        block_of = torch.searchsorted(self._ends, place, right=True)
        for number in block_of.unique().tolist():
            block, own = self._blocks[number], block_of == number
            values[own] = block[place[own] - (self._ends[number] - len(block))]
        return values.to(self._target)

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield all rows as tensors of at most ``size`` rows."""
        return (self[i : i + size] for i in range(0, len(self), size))

    def to(self, device: torch.device | str) -> Tensor | RowBlocks:
        """Return all rows as a tensor on ``device``, unless they stay on the host.

        For the CPU, nothing is copied.
        """
        if self._stays_on_host or torch.device(device).type == "cpu":
            return RowBlocks(self._blocks, self._place, self._stays_on_host, device)
        values = torch.empty(self.shape, dtype=self._blocks[0].dtype, device=device)
        size = max(1, COPY_BYTES // max(1, self[:1].nbytes))
        for start in range(0, len(self), size):
            values[start : start + size].copy_(self[start : start + size])
        return values


def _on_host(rows: Any) -> Any:
    """Move an index of rows to the CPU if it is a tensor, else return it unchanged."""
    return rows.cpu() if isinstance(rows, Tensor) else rows
