"""Images that are kept in memory once, however many sets are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from uno.data.mapped import NeighborViews

COPY_BYTES = 64 * 2**20  # that are on the way to a device at once


class RowBlocks:
    """Rows, uint8 (N,3,S,S) or the features that stand for them, in the ``blocks``
    (n,...) that hold them on the host: to take some rows is their first copy. ``place``
    int64 (N,) counts rows over all blocks; default: each once, in order.
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
        """(N, ...)."""
        return len(self), *self._blocks[0].shape[1:]

    @property
    def ndim(self) -> int:
        """Dimensions of :attr:`shape`."""
        return self._blocks[0].ndim

    @property
    def device(self) -> torch.device:
        """The host."""
        return self._blocks[0].device

    def select_rows(self, rows: Tensor | slice) -> RowBlocks:
        """These rows, int64 (n,), bool (N,) or a slice; nothing is copied."""
        return RowBlocks(self._blocks, self._place[rows])

    def __getitem__(self, rows: Any) -> Tensor:
        """A tensor of these rows, as :meth:`select_rows`; of a tuple, what else it
        says of each row.
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
        found = torch.empty(
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
                found[order[own]] = block[in_order[own] - before]
            start, before = own.stop, end
        return found

    def split(self, size: int) -> Iterator[Tensor]:
        """All rows, ``size`` at a time."""
        return (self[i : i + size] for i in range(0, len(self), size))

    def to(self, device: torch.device | str) -> Tensor | RowBlocks:
        """Itself on the host; elsewhere a tensor of these rows."""
        if torch.device(device).type == self.device.type:
            return self
        found = torch.empty(self.shape, dtype=self._blocks[0].dtype, device=device)
        size = max(1, COPY_BYTES // max(1, self[:1].nbytes))
        for i in range(0, len(self), size):
            found[i : i + size].copy_(self[i : i + size])
        return found


class HostRows(RowBlocks):
    """Rows that stay on the host, as no device holds all: :meth:`to` says where
    chosen ones go.
    """

    _target: torch.device | str = "cpu"

    def select_rows(self, rows: Tensor | slice) -> HostRows:
        """As of others."""
        found = HostRows(self._blocks, self._place[_on_host(rows)])
        found._target = self._target
        return found

    def __getitem__(self, rows: Any) -> Tensor:
        """As of others, of rows counted on any device."""
        rows = tuple(map(_on_host, rows)) if isinstance(rows, tuple) else _on_host(rows)
        return super().__getitem__(rows).to(self._target)

    def to(self, device: torch.device | str) -> HostRows:
        """The same rows for ``device``; nothing is copied."""
        found = self.select_rows(slice(None))
        found._target = device
        return found


def _on_host(rows: Any) -> Any:
    return rows.cpu() if isinstance(rows, Tensor) else rows


def part(images: Tensor | RowBlocks, rows: Tensor | slice) -> Tensor | RowBlocks:
    """Rows of either."""
    return images.select_rows(rows) if isinstance(images, RowBlocks) else images[rows]
