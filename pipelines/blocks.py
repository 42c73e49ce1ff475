"""Images in Arrow blocks, as they travel to the tasks that decode them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from uno.data.files import full_path
from uno.data.rows import Image


def image_columns(images: Sequence[Image]) -> dict[str, Any]:
    """Images as they are: paths as bytes (a path need not be text), encoded, or pixels with a shape."""
    pixels = [image if isinstance(image, np.ndarray) else None for image in images]
    paths = [os.fsencode(full_path(image)) if isinstance(image, str) else None for image in images]
    data = [image.tobytes() if isinstance(image, np.ndarray) else image for image in images]
    return {
        "path": pa.array(paths, pa.large_binary()),
        "data": pa.array([d if isinstance(d, bytes) else None for d in data], pa.large_binary()),
        "shape": pa.array([None if p is None else list(p.shape) for p in pixels], pa.list_(pa.int32())),
    }


def images_of(block: pa.Table) -> list[Image]:
    """The inverse of :func:`image_columns`."""
    images: list[Image] = []
    columns = (block[name].to_pylist() for name in ("path", "data", "shape"))
    for path, data, shape in zip(*columns, strict=True):
        if shape is not None:
            images.append(np.frombuffer(data, np.uint8).reshape(shape))
        else:
            images.append(data if path is None else os.fsdecode(path))
    return images


def pixel_column(pixels: Tensor, reasons: Sequence[str | None]) -> pa.Array:
    """Decoded images uint8 (n,3,S,S) as raw bytes, null where there is a reason against it."""
    rows = zip(pixels.numpy(), reasons, strict=True)
    return pa.array([row.tobytes() if reason is None else None for row, reason in rows], pa.large_binary())
