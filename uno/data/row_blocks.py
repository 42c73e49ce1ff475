"""Rows in host memory that several sets share: pixels of images, or features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from uno.data.mapped import NeighborViews

COPY_BYTES = 64 * 2**20  # bytes that are copied to a device at once


class RowBlocks:
    """A view of N rows of host memory, which is copied only when rows are read.

    It is indexed like a tensor along its first dimension.

    Args:
        blocks: Tensors (n, ...) that hold the rows one after the other: pixels of
            images uint8 (n, 3, S, S), or features. There is at least one.
        place: For each row of the view its number, counted over all blocks, int64 (N,).
            By default the view has each row once, in order.
    """

    def __init__(
        self, blocks: Sequence[Tensor | NeighborViews], place: Tensor | None = None
    ) -> None:
        self._blocks = list(blocks)
        self._ends = torch.tensor([len(block) for block in blocks]).cumsum(0)
        self._place = torch.arange(int(self._ends[-1])) if place is None else place

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

    @property
    def device(self) -> torch.device:
        """The device of the blocks, which is the CPU."""
        return self._blocks[0].device

    def select_rows(self, rows: Tensor | slice) -> RowBlocks:
        """Return a view of some rows without a copy.

        Args:
            rows: Row numbers int64 (n,), a mask bool (N,), or a slice.
        """
        return RowBlocks(self._blocks, self._place[rows])

    def __getitem__(self, rows: Any) -> Tensor:
        """Copy some rows into a tensor.

        Args:
            rows: The rows, as for :meth:`select_rows`; or, if there is a single block,
                a tuple that begins with them and indexes further dimensions.

        Returns:
            A tensor (n, ...).
        """
        rows, *rest = rows if isinstance(rows, tuple) else (rows,)
        place = self._place[rows]
        if len(self._blocks) == 1:
            return self._blocks[0][(place, *rest)]
        assert not rest
        in_order, order = place.sort()
        counts = torch.bincount(
            torch.searchsorted(self._ends, in_order, right=True),
            minlength=len(self._blocks),
        )
        values = torch.empty(
            (len(place), *self.shape[1:]),
            dtype=self._blocks[0].dtype,
            device=self.device,
        )
        start = before = 0
        for block, count, end in zip(
            self._blocks, counts.tolist(), self._ends.tolist(), strict=True
        ):
            own = slice(start, start + count)
            if count:
                values[order[own]] = block[in_order[own] - before]
            start, before = own.stop, end
        return values

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield all rows as tensors of at most ``size`` rows."""
        return (self[i : i + size] for i in range(0, len(self), size))

    def to(self, device: torch.device | str) -> Tensor | RowBlocks:
        """Return all rows as a tensor on ``device``.

        If ``device`` has the type of the blocks' device, which is the CPU, this copies
        nothing and returns the view itself.
        """
        if torch.device(device).type == self.device.type:
            return self
        values = torch.empty(self.shape, dtype=self._blocks[0].dtype, device=device)
        size = max(1, COPY_BYTES // max(1, self[:1].nbytes))
        for i in range(0, len(self), size):
            values[i : i + size].copy_(self[i : i + size])
        return values


class HostRows(RowBlocks):
    """A view of rows that stay in host memory because the device cannot hold them.

    :meth:`to` copies nothing. It sets the device to which rows are copied when they are
    read.
    """

    _target: torch.device | str = "cpu"

    def select_rows(self, rows: Tensor | slice) -> HostRows:
        """Return a view of some rows without a copy, with the same device for reads.

        Args:
            rows: Row numbers int64 (n,), a mask bool (N,), or a slice. A tensor may be
                on any device.
        """
        selected = HostRows(self._blocks, self._place[_on_host(rows)])
        selected._target = self._target
        return selected

    def __getitem__(self, rows: Any) -> Tensor:
        """Copy some rows to the device that :meth:`to` has set, the CPU by default.

        Args:
            rows: The rows as for :meth:`RowBlocks.__getitem__`. Tensors may be on any
                device.

        Returns:
            A tensor (n, ...).
        """
        rows = tuple(map(_on_host, rows)) if isinstance(rows, tuple) else _on_host(rows)
        return super().__getitem__(rows).to(self._target)

    def to(self, device: torch.device | str) -> HostRows:
        """Return a view of the same rows, from which reads copy to ``device``.

        Nothing is copied yet: all rows stay in host memory.
        """
        view = self.select_rows(slice(None))
        view._target = device
        return view


def _on_host(rows: Any) -> Any:
    """Return an index of rows on the CPU.

    A tensor is copied there, and any other index, such as a slice, is returned itself.
    """
    return rows.cpu() if isinstance(rows, Tensor) else rows


def part(images: Tensor | RowBlocks, rows: Tensor | slice) -> Tensor | RowBlocks:
    """Return some rows of a tensor, or a view of some rows of a view.

    Args:
        images: N rows.
        rows: Row numbers int64 (n,), a mask bool (N,), or a slice.
    """
    return images.select_rows(rows) if isinstance(images, RowBlocks) else images[rows]
