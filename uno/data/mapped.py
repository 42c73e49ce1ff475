"""Arrays that may be larger than the memory, in a file of the cache directory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
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
