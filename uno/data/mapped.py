"""Vectors that may be larger than the memory.

Large arrays are kept in a memory-mapped file of the cache directory, and views of
vectors are computed when they are read.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uno.data.files import reserve_space
from uno.errors import StorageError

MAPPED_BYTES = 256 * 2**20  # arrays of this size or more are kept in a file
PIECE_ROWS = 2**16  # rows that are computed at once
HASHED_ROWS = 2**13  # rows that are hashed at once
CACHE_VARIABLE = "UNO_CACHE"


def user_cache() -> str:
    """Return the cache directory of the user, a path or URI.

    It is the environment variable ``UNO_CACHE`` if that is set, else ``uno`` in
    ``XDG_CACHE_HOME`` or in ``~/.cache``. A ``~`` is not expanded.
    """
    user = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "uno")
    return os.environ.get(CACHE_VARIABLE) or user


def new_array(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of zeros, which is in memory or in a file.

    An array of :data:`MAPPED_BYTES` or more is mapped to a file of the cache directory,
    or of the directory for temporary files if the cache cannot be used. The file has no
    name and disappears with the process.

    Args:
        shape: The shape of the array.

    Returns:
        An array float32 of this shape.

    Raises:
        StorageError: The file cannot be made, for example because the disk is full.
    """
    size = 4 * math.prod(shape)
    if size < MAPPED_BYTES:
        return np.zeros(shape, np.float32)
    folder = os.path.expanduser(user_cache())
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:  # the cache directory is a URI, or it is not writable
        folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            reserve_space(file, size)
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as error:
        raise StorageError(
            f"cannot store {size / 1e9:.1f} GB of vectors in {folder}: {error}"
        ) from None


def fill(shape: tuple[int, ...], piece: Callable[[slice], Any]) -> np.ndarray:
    """Make an array by :func:`new_array` and fill it piece by piece.

    Args:
        shape: The shape of the array.
        piece: Returns the values of a slice of rows, (n, *shape[1:]). It is called for
            at most :data:`PIECE_ROWS` rows at once.

    Returns:
        An array float32 of this shape.

    Raises:
        StorageError: The array cannot be stored on the disk.
    """
    found = new_array(shape)
    for start in range(0, shape[0], PIECE_ROWS):
        own = slice(start, min(start + PIECE_ROWS, shape[0]))
        found[own] = piece(own)
    return found


def equal_rows(values: Tensor) -> list[list[int]]:
    """Return groups of rows that have the same bits.

    Rows are compared by a hash of 64 bits each.

    Args:
        values: float32 (N, D).

    Returns:
        The row numbers of each group of two or more equal rows, in ascending order.
    """
    weights = np.random.default_rng(0).integers(
        2**64, size=values.shape[1], dtype=np.uint64
    )
    keys = np.empty(len(values), np.uint64)
    for start in range(0, len(values), HASHED_ROWS):
        own = slice(start, start + HASHED_ROWS)
        bits = values[own].numpy().view(np.uint32)
        # the low bits of round numbers are zeros, so the high bits are mixed in
        keys[own] = (bits ^ bits >> 16).astype(np.uint64) @ weights
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[:1]]))
    counts = np.diff(starts, append=len(keys))
    several = counts > 1
    return [
        order[start : start + count].tolist()
        for start, count in zip(starts[several], counts[several], strict=True)
    ]


@dataclass(frozen=True, eq=False)
class NeighborViews:
    """Views of vectors towards their neighbors, computed when they are read.

    This is read like a tensor float32 (N, 1 + V, D). View 0 of a row is the row itself.
    View v is a point between the row and one of its neighbors, by linear interpolation.

    Attributes:
        values: The N vectors, float32 (N, D).
        partners: The row number of the neighbor for each of the V views, int32 (N, V).
        shares: The position of each view between the row, 0, and the neighbor, 1:
            float32 (N, V).
    """

    values: Tensor
    partners: Tensor
    shares: Tensor

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of all views as of one tensor, (N, 1 + V, D).

        N is the number of vectors, V the number of views towards neighbors, and D the
        length of a vector.
        """
        return len(self), 1 + self.partners.shape[1], self.values.shape[1]

    @property
    def ndim(self) -> int:
        """The number of dimensions of :attr:`shape`, which is 3."""
        return 3

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers, float32."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the vectors, which is the CPU."""
        return self.values.device

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that define the views: ``values``, ``partners`` and ``shares``.

        They are the vectors (N, D), the neighbor of each view (N, V) and its position
        between vector and neighbor (N, V).
        """
        return self.values, self.partners, self.shares

    def __getitem__(self, key: Any) -> Tensor:
        """Compute views of some rows.

        Args:
            key: One of

                - ``rows``, an index of rows as of a tensor: all views (n, 1 + V, D)
                - ``(rows, v)`` with a number v: view v of each row, (n, D)
                - ``(rows, slice)``: some of the views of each row, (n, k, D)
                - ``(rows, views)``, both int64 (n,): one view of each row, (n, D)

        Returns:
            A tensor. For the keys ``(:, 0)`` and ``(:, 0:1)`` it shares the memory of
            ``values``.
        """
        rows, *views = key if isinstance(key, tuple) else (key,)
        if not views:
            own, partners, shares = (
                self.values[rows],
                self.partners[rows].long(),
                self.shares[rows],
            )
            moved = [
                own.lerp(self.values[p], s[:, None])
                for p, s in zip(partners.T, shares.T, strict=True)
            ]
            return torch.stack([own, *moved], dim=1)
        view = views[0]
        if not isinstance(view, Tensor):
            if view == 0:
                return self.values[rows]
            return (
                self.values[rows, None] if view == slice(0, 1) else self[rows][:, view]
            )
        before = (view - 1).clamp(min=0)
        partners = torch.where(view > 0, self.partners[rows, before].long(), rows)
        shares = torch.where(view > 0, self.shares[rows, before], 0)
        return self.values[rows].lerp(self.values[partners], shares[:, None])
