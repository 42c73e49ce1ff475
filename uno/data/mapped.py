"""Vectors that need not fit into memory: numbers in a mapped file, views made when
they are read.
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

MAPPED_BYTES = 256 * 2**20  # from which on numbers are in a file
PIECE_ROWS = 2**16
HASHED_ROWS = 2**13  # at once
CACHE_VARIABLE = "UNO_CACHE"


def user_cache() -> str:
    """$UNO_CACHE, or uno in the user's cache directory."""
    user = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "uno")
    return os.environ.get(CACHE_VARIABLE) or user


def new_array(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros float32 ``shape``: in memory, or where they are many in a file of the cache
    directory that nobody else sees and that is gone with the process. StorageError: the
    disk is full.
    """
    size = 4 * math.prod(shape)
    if size < MAPPED_BYTES:
        return np.zeros(shape, np.float32)
    folder = os.path.expanduser(user_cache())
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:  # a URI, or not writable
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
    """:func:`new_array` of ``piece``, of which each call gives some rows."""
    found = new_array(shape)
    for start in range(0, shape[0], PIECE_ROWS):
        own = slice(start, min(start + PIECE_ROWS, shape[0]))
        found[own] = piece(own)
    return found


def equal_rows(values: Tensor) -> list[list[int]]:
    """Groups of rows of ``values`` float32 (N, D) with the same bits, by 64-bit
    hashes of each.
    """
    weights = np.random.default_rng(0).integers(
        2**64, size=values.shape[1], dtype=np.uint64
    )
    keys = np.empty(len(values), np.uint64)
    for start in range(0, len(values), HASHED_ROWS):
        own = slice(start, start + HASHED_ROWS)
        bits = values[own].numpy().view(np.uint32)
        # round numbers end in zeros
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
    """Views float32 (N, 1 + V, D) of ``values`` (N, D), made when they are read: the
    first is the row itself, view v a share ``shares`` (N, V) of the way to row
    ``partners`` int32 (N, V).
    """

    values: Tensor
    partners: Tensor
    shares: Tensor

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, 1 + V, D)."""
        return len(self), 1 + self.partners.shape[1], self.values.shape[1]

    @property
    def ndim(self) -> int:
        """Dimensions of :attr:`shape`."""
        return 3

    @property
    def dtype(self) -> torch.dtype:
        """That of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The host."""
        return self.values.device

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What it is made of, in order."""
        return self.values, self.partners, self.shares

    def __getitem__(self, key: Any) -> Tensor:
        """Of rows all views (n, 1 + V, D), or some of them, as of a tensor; of (rows,
        views), int64 (n,) each, one view of each (n, D). Of (:, 0) and (:, 0:1) nothing
        is copied.
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
