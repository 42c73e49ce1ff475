"""Encoded image -> square uint8 pixels, for files nobody vouches for.

The header is read first (format, pixel and byte caps), then the pixels; whatever goes wrong is a BadImage.

Pillow decodes. On one core: 8,000 images/s of CIFAR10-JPEG, 480/s of ImageNet originals (500 px), 50-75/s
of 12 megapixels; torchcodec 0.17: 20,000, 430 and 15/s. Pillow is enough.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image as Pillow
from PIL import UnidentifiedImageError
from torch import Tensor

from uno.data.files import read_bytes
from uno.data.rows import Chosen, Image, Images
from uno.errors import ConfigError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""What is decoded (first frame, first page); everything else, EPS above all, never reaches a decoder."""
MAX_BYTES = 128 * 2**20
MAX_PIXELS = 100_000_000
DRAFT = 4
"""JPEG is decoded at 1/2, 1/4 or 1/8 scale where that leaves at least this many times the final side.

4000 x 3000 to 224 px: 2.9 times faster, pixels differ by .09 of 255 on average (smooth images). ImageNet
originals (500 px) differ by .65 on average at 32 px, .02 at 64 px, 0 at 224 px.
"""
ORIENTATION = 0x0112
UPRIGHT = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT, 3: Pillow.Transpose.ROTATE_180, 4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE, 6: Pillow.Transpose.ROTATE_270, 7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}  # fmt: skip


class BadImage(Exception):
    """An image that cannot be used; the message is the reason, one line."""


@dataclass(frozen=True)
class Header:
    """What an image says of itself: ``format`` (JPEG, ..., or 'pixels'), width and height in pixels."""

    format: str
    width: int
    height: int


def decode(image: Image, size: int) -> np.ndarray:
    """``image`` -> uint8 (3,size,size): upright, RGB, shorter side resized to ``size``, centre crop.

    Resizing is antialiased bilinear; an image of size x size is returned unchanged. Transparent pixels become
    white, 16-bit grey is scaled to 8 bits.

    Raises:
        BadImage: missing, too large, not an image, of a refused format, truncated, or corrupt.
    """
    with quiet():
        return _decode(image, size)


def decode_rgb(image: Image, side: int) -> np.ndarray:
    """``image`` -> uint8 (H,W,3 or 4): upright, RGB, whole. Call it inside :func:`quiet`. Raises BadImage.

    A JPEG may come at 1/2, 1/4 or 1/8 scale where that leaves 4 * ``side`` pixels (see :data:`DRAFT`). A
    fourth channel means nothing: it is Pillow's own memory, not copied, which saves a tenth of the time.
    The array is not to be written to.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return image
    with _open(image) as picture:
        if picture.format in ("JPEG", "MPO"):
            picture.draft(picture.mode, (DRAFT * side, DRAFT * side))
        rgb, orientation = to_rgb(picture), _orientation(picture)
        return _pixels(rgb.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else rgb)


def decode_many(
    images: Images, ids: Sequence[str], size: int, threads: int | None = None
) -> tuple[Tensor, np.ndarray, list[dict[str, str]]]:
    """All N images -> (uint8 (N,3,size,size), ok bool (N,), [{"id", "reason"}, ...]); bad rows are black.

    ``threads`` decode at once (default: as many as torch uses); Pillow releases the GIL.
    """
    num = len(images)
    pixels = torch.zeros(num, 3, size, size, dtype=torch.uint8)
    out, ok = pixels.numpy(), np.ones(num, dtype=bool)

    def fill(rows: range) -> list[dict[str, str]]:
        bad = []
        for i in rows:
            try:
                out[i] = _decode(images[i], size)
            except BadImage as error:
                ok[i] = False
                bad.append({"id": ids[i], "reason": str(error)})
        return bad

    parts = [range(start, min(start + 64, num)) for start in range(0, num, 64)]
    with quiet(), ThreadPoolExecutor(threads or torch.get_num_threads()) as pool:
        bad = [entry for part in pool.map(fill, parts) for entry in part]
    return pixels, ok, bad


def check_bad(bad: Sequence[dict[str, str]], total: int, max_fraction: float) -> None:
    """Stop when more than ``max_fraction`` of ``total`` images are bad.

    Raises:
        ConfigError: with the count and the first reason.
    """
    if len(bad) > max_fraction * total:
        first = bad[0]
        raise ConfigError(
            f"{len(bad)} of {total} images are unreadable, more than data.max_bad_fraction {max_fraction:g} "
            f"allows; the first is {first['id']}: {first['reason']}"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Mute Pillow's warnings: size is checked here, broken metadata and odd palettes do no harm.

    Filters belong to the process: they are muted while any thread is inside.
    """
    with _muted.lock:
        if _muted.threads == 0:
            _muted.filters = warnings.catch_warnings()
            _muted.filters.__enter__()
            warnings.simplefilter("ignore")
        _muted.threads += 1
    try:
        yield
    finally:
        with _muted.lock:
            _muted.threads -= 1
            if _muted.threads == 0:
                _muted.filters.__exit__(None, None, None)


class _Muted:
    """How many threads are inside :func:`quiet`, and the filters to restore when the last one leaves."""

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0
        self.filters: Any = None


_muted = _Muted()


def read_header(image: Image) -> Header:
    """Format and size without decoding pixels. Raises BadImage as :func:`decode`."""
    if isinstance(image, np.ndarray):
        _check_array(image)
        return Header("pixels", image.shape[1], image.shape[0])
    with quiet(), _open(image) as picture:
        return Header(str(picture.format), *picture.size)


def _decode(image: Image, size: int) -> np.ndarray:
    if isinstance(image, np.ndarray):
        _check_array(image)
        if image.shape[:2] != (size, size):
            image = np.asarray(_square(Pillow.fromarray(image), size))
        return image.transpose(2, 0, 1)
    with _open(image) as picture:
        if picture.format in ("JPEG", "MPO"):
            picture.draft(picture.mode, (DRAFT * size, DRAFT * size))
        square = _square(to_rgb(picture), size)
        orientation = _orientation(picture)  # later: of a PNG it reads the pixels, and forgives errors
        if orientation in UPRIGHT:  # a centred square commutes with turns and flips, so turn the small one
            square = square.transpose(UPRIGHT[orientation])
        return np.asarray(square).transpose(2, 0, 1)


def _pixels(picture: Pillow.Image) -> np.ndarray:
    """An RGB picture's memory (H,W,4), or a copy (H,W,3) where it lies in pieces or Pillow is older."""
    try:
        values = pa.array(picture).values
    except (ValueError, TypeError, pa.ArrowException):
        return np.asarray(picture).copy()
    width, height = picture.size
    pixels = np.frombuffer(values.buffers()[1], np.uint8)[values.offset :][: 4 * width * height]
    return pixels.reshape(height, width, 4)


def _square(picture: Pillow.Image, size: int) -> Pillow.Image:
    width, height = picture.size
    side = min(width, height)
    if width == height == size:
        return picture
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return picture.resize((size, size), Pillow.Resampling.BILINEAR, box=box)


def to_rgb(picture: Pillow.Image) -> Pillow.Image:
    """Any mode -> RGB; transparent pixels become white, 16-bit grey is scaled to 8 bits.

    Raises:
        BadImage: pixels without a known range.
    """
    if picture.mode.startswith("I;16") or picture.mode == "I":
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise BadImage("32-bit pixels beyond 0-65535; convert the image to 8 bits")
        return Pillow.fromarray((values // 257).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise BadImage("floating-point pixels have no fixed range; convert the image to 8 bits")
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    picture.load()
    return picture if picture.mode == "RGB" else picture.convert("RGB")


@contextmanager
def _open(image: bytes | str) -> Iterator[Pillow.Image]:
    """The picture with its header checked; every error inside, of Pillow or the disk, is a BadImage."""
    try:
        data = read_bytes(image, MAX_BYTES) if isinstance(image, str) else bytes(image)
        if not data:
            raise BadImage("no image data")
        if len(data) > MAX_BYTES:
            raise BadImage(f"larger than {MAX_BYTES} bytes")
        with Pillow.open(BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise BadImage(f"{width} x {height} pixels, more than {MAX_PIXELS}")
            if not width or not height:
                raise BadImage(f"{width} x {height} pixels")
            yield picture
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"not a readable {', '.join(FORMATS)} image") from None
    except Pillow.DecompressionBombError:
        raise BadImage(f"more than {MAX_PIXELS} pixels") from None
    except OSError as error:
        raise BadImage(_one_line(error.strerror or error)) from None
    except Exception as error:
        # Pillow's parsers raise whatever a broken file leads to: SyntaxError, struct.error, IndexError, ...
        raise BadImage(f"{type(error).__name__}: {_one_line(error)}") from None


def _orientation(picture: Pillow.Image) -> int:
    try:
        return int(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # broken metadata of any kind does not make the pixels bad
        return 1


def _check_array(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise BadImage(f"pixels are {image.dtype} {image.shape}, not uint8 (H, W, 3)")


def _one_line(message: Any) -> str:
    return " ".join(str(message).split())[:200]


BATCHES_AHEAD = 2  # decoded while the model works


def decoded(
    images: Images, batches: Iterable[np.ndarray], size: int, threads: int | None = None
) -> Iterator[tuple[np.ndarray, Tensor, np.ndarray, dict[int, str]]]:
    """Decode batches of row numbers ahead of whoever works on them.

    Yields:
        (row numbers (b,), images uint8 (b, 3, size, size), ok bool (b,), reason by position in the batch).
    """
    num_threads = threads or os.cpu_count() or 1

    def decode(index: np.ndarray) -> tuple[np.ndarray, Tensor, np.ndarray, dict[int, str]]:
        names = [str(position) for position in range(len(index))]
        pixels, ok, bad = decode_many(Chosen(images, index), names, size, num_threads)
        return index, pixels, ok, {int(entry["id"]): entry["reason"] for entry in bad}

    waiting: list[Future[tuple[np.ndarray, Tensor, np.ndarray, dict[int, str]]]] = []
    pool = ThreadPoolExecutor(1, thread_name_prefix="uno-decode")
    try:
        for index in batches:
            waiting.append(pool.submit(decode, index))
            if len(waiting) > BATCHES_AHEAD:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    finally:
        pool.shutdown(cancel_futures=True)
