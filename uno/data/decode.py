"""Encoded image -> square uint8 pixels, for files nobody vouches for: the header is
read first (format, pixel and byte caps), then the pixels; whatever goes wrong is a
BadImage. Pillow decodes (480 ImageNet originals/s).
"""

import json
import logging
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import BytesIO
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import torch
from PIL import Image as Pillow
from PIL import UnidentifiedImageError
from torch import Tensor

from uno import collectives
from uno.data.columns import Ids
from uno.data.files import Storage, is_transient, parse_json, read_bytes
from uno.data.images import Image, Images, InMemory, MissingImage, as_images, name_row
from uno.errors import ConfigError, StorageError, one_line
from uno.limits import (
    MAX_BMP_PIXELS_PER_BYTE,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_PIXELS_PER_BYTE,
)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""What is decoded (first frame, first page); everything else, EPS above all, never
reaches a decoder.
"""
DRAFT = 4
"""JPEG is decoded at 1/2, 1/4 or 1/8 scale where that leaves at least this many times
the final side: 2.9 times faster from 4000 x 3000 to 224 px; ImageNet originals then
differ by .65 of 255 at 32 px, 0 at 224.
"""
ORIENTATION = 0x0112
BITS_PER_SAMPLE = 0x0102  # a tag of TIFF
BRIGHTNESS_SIDE = 64  # of a JPEG whose brightness is measured, pixels
UPRIGHT = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}
BATCHES_AHEAD = 2  # that are decoded while the model works
PIECE_ROWS = 64  # that a thread decodes
READERS = 4  # threads that read what is read together
BAD_SAMPLES = "bad_samples.jsonl"

BadSample = dict[str, Any]
"""An entry of :data:`BAD_SAMPLES`: id, reason and, if they are known, uri and line."""
Result = TypeVar("Result")
Interpolation = Literal["bilinear", "bicubic"]
DecodedBatch = tuple[np.ndarray, Tensor, list[str | None]]
"""Rows (b,), images uint8 (b,3,S,S), why a row has none: of :func:`decoded`."""

log = logging.getLogger(__name__)


class BadImage(Exception):
    """An image that cannot be used; the message is the reason, one line."""


_lock, _muted, _num_inside = threading.Lock(), ExitStack(), 0


@contextmanager
def suppress_pillow_warnings() -> Iterator[None]:
    """Mute Pillow's warnings while any thread is inside: filters belong to the
    process.
    """
    global _num_inside
    with _lock:
        if _num_inside == 0:
            _muted.enter_context(warnings.catch_warnings(action="ignore"))
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                _muted.close()


@suppress_pillow_warnings()
def decode(
    image: Image, size: int, interpolation: Interpolation = "bilinear"
) -> np.ndarray:
    """``image`` -> uint8 (3,size,size): upright, RGB, center crop, resized
    (antialiased). Raises BadImage.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        if image.shape[:2] != (size, size):
            image = np.asarray(_square(Pillow.fromarray(image), size, interpolation))
        return image.transpose(2, 0, 1)
    with _open(image, size) as picture:
        rgb = to_rgb(picture)
        return np.asarray(
            _square(_upright(rgb, picture), size, interpolation)
        ).transpose(2, 0, 1)


def decode_rgb(image: Image, side: int) -> np.ndarray:
    """``image`` -> uint8 (H,W,3 or 4), not to be written to: upright, RGB, whole, a
    JPEG maybe at a smaller scale (:data:`DRAFT`). A fourth channel means nothing. Call
    it inside :func:`suppress_pillow_warnings`. Raises BadImage.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return image
    with _open(image, side) as picture:
        return _pixels(_upright(to_rgb(picture), picture))


def decode_many(
    images: Images | Sequence[Image],
    size: int,
    threads: int | None = None,
    interpolation: Interpolation = "bilinear",
) -> tuple[Tensor, list[str | None]]:
    """N images -> (uint8 (N,3,size,size), bad ones black; why an image has no
    pixels, None where it has).
    """
    pixels = torch.zeros(len(images), 3, size, size, dtype=torch.uint8)
    out, reasons = pixels.numpy(), [None] * len(images)  # type: np.ndarray, list[str | None]

    def fill(piece: tuple[np.ndarray, Images]) -> None:
        rows, some = piece
        for row, image in zip(
            rows.tolist(), some.read_images(np.arange(len(rows))), strict=True
        ):
            try:
                out[row] = decode(image, size, interpolation)
            except BadImage as error:
                reasons[row] = str(error)

    threads = threads or torch.get_num_threads()
    with suppress_pillow_warnings():
        deque(
            prefetch_map(fill, pieces(as_images(images)), threads, 2 * threads),
            maxlen=0,
        )
    return pixels, reasons


def pieces(images: Images) -> Iterator[tuple[np.ndarray, Images]]:
    """Numbers and images of :data:`PIECE_ROWS` rows at a time; what is read together
    is read once, ahead.
    """
    rows = np.arange(len(images))
    groups = images.groups(rows)
    if groups is None:
        for start in range(0, len(rows), PIECE_ROWS):
            own = rows[start : start + PIECE_ROWS]
            yield own, images.take(own)
        return
    order = np.argsort(groups, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    for part, found in prefetch_map(
        lambda part: (part, images.read_images(part)), parts, READERS, READERS
    ):
        for start in range(0, len(part), PIECE_ROWS):
            end = start + PIECE_ROWS
            yield part[start:end], InMemory(found[start:end])


def decoded(
    images: Images | Sequence[Image],
    batches: Iterable[np.ndarray],
    size: int,
    threads: int | None = None,
    interpolation: Interpolation = "bilinear",
) -> Iterator[DecodedBatch]:
    """Batches of row numbers, decoded ahead by ``threads`` (default: all cores)
    unless prepared already.
    """

    source = as_images(images)

    def decode_batch(rows: np.ndarray) -> DecodedBatch:
        ready = source.prepared(rows)
        if ready is None:
            ready = decode_many(
                source.take(rows), size, threads or os.cpu_count(), interpolation
            )
        return rows, *ready

    return prefetch_map(decode_batch, batches, 1, BATCHES_AHEAD)


def prefetch_map(
    function: Callable[[Any], Result], items: Iterable[Any], threads: int, depth: int
) -> Generator[Result, None, None]:
    """``map(function, items)`` in threads, in order, at most ``depth`` results ahead
    of the consumer.
    """
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="uno-ahead")
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def ok_mask(reasons: Sequence[str | None]) -> np.ndarray:
    """bool (N,): which images have pixels, from the reasons of :func:`decode_many`."""
    return np.array([reason is None for reason in reasons], dtype=bool)


def check_bad(
    ids: Sequence[str],
    reasons: Sequence[str | None] | Mapping[int, str],
    max_fraction: float,
    storage: Storage | None = None,
    images: Images | None = None,
) -> list[BadSample]:
    """List the unreadable images of a data set.

    Args: ids: The ids of N rows. reasons: Why images cannot be read, by row; or one
        entry for each of N rows, None
            if the image can be read.
        max_fraction: The largest share of N that may be unreadable.
        storage: Where rank 0 lists them as :data:`BAD_SAMPLES`; None for nowhere.
        images: The images of the N rows, which know paths and lines.

    Returns:
        One entry for each unreadable image: id, reason and, if they are known, uri (the
        path of the file) and line (in the table that names the image).

    Raises:
        ConfigError: More than ``max_fraction`` are unreadable.
    """
    if not isinstance(reasons, Mapping):
        reasons = {row: why for row, why in enumerate(reasons) if why is not None}
    rows = sorted(reasons)
    bad = [{"id": str(ids[row]), "reason": reasons[row]} for row in rows]  # type: list[BadSample]
    if images is not None:
        numbers = np.array(rows, np.int64)
        places = zip(bad, images.paths(numbers), images.lines(numbers), strict=True)
        for entry, path, line in places:
            entry |= ({"uri": path} if path else {}) | (
                {} if line is None else {"line": line}
            )
    if bad and storage is not None and collectives.rank_and_world()[0] == 0:
        storage.write(
            BAD_SAMPLES, "".join(json.dumps(entry) + "\n" for entry in bad).encode()
        )
    if len(bad) > max_fraction * len(ids):
        text = (
            f"{len(bad)} of {len(ids)} images are unreadable, more than"
            " data.max_bad_fraction "
        )
        text += (
            f"{max_fraction:g} allows; the first is {name_bad(bad[0])}:"
            f" {bad[0]['reason']}"
        )
        where = (
            f"; all are in {storage.below(BAD_SAMPLES)}" if storage is not None else ""
        )
        raise ConfigError(text + where)
    return bad


def name_bad(entry: Mapping[str, Any]) -> str:
    """Return what people are told about an entry of :data:`BAD_SAMPLES`: its id and
    place.
    """
    path, line = entry.get("uri"), entry.get("line")
    return name_row(
        str(entry.get("id", "")),
        path if isinstance(path, str) else None,
        line if isinstance(line, int) else None,
    )


class BadRows:
    """The rows of a task that this worker, and after :meth:`sync` all workers, could
    not read in training.
    """

    def __init__(
        self, ids: Ids, images: Images, max_fraction: float, storage: Storage
    ) -> None:
        self._ids, self._images, self._max_fraction, self._storage = (
            ids,
            images,
            max_fraction,
            storage,
        )
        self._reasons = self._listed()
        self._synced = len(self._reasons)

    def add(self, row: int, reason: str) -> None:
        """Note that ``row`` of the task cannot be read."""
        self._reasons.setdefault(row, reason)

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def rows(self) -> list[int]:
        """Their numbers, in order."""
        return sorted(self._reasons)

    def sync(self, device: torch.device) -> None:
        """Tell each other, all workers at the same time, and list the rows as
        :func:`check_bad`. Of several workers the host waits for ``device``.
        """
        device = device if collectives.in_group() else torch.device("cpu")
        new = list(self._reasons)[self._synced :]
        most = int(
            collectives.gather_rows(torch.tensor([len(new)], device=device), 0).max()
        )
        if not most:
            return
        told = torch.tensor([*new, *[-1] * (most - len(new))], device=device)
        for row in collectives.gather_rows(told, 0).unique().tolist():
            # another worker's: no need to send text around
            if row >= 0 and row not in self._reasons:
                _, (reason,) = decode_many([self._images[row]], 1, 1)
                self._reasons[row] = (
                    reason or "was readable at first, but not when read again"
                )
        self._synced = len(self._reasons)
        check_bad(
            self._ids, self._reasons, self._max_fraction, self._storage, self._images
        )

    def _listed(self) -> dict[int, str]:
        """What the run has listed before it was resumed."""
        reasons = {}
        try:
            if self._storage.exists(BAD_SAMPLES):
                entries = map(parse_json, self._storage.read(BAD_SAMPLES).splitlines())
                reasons = {str(entry["id"]): str(entry["reason"]) for entry in entries}
        except (ValueError, TypeError, KeyError):
            log.warning(
                "%s is damaged and is rewritten", self._storage.below(BAD_SAMPLES)
            )
        return (
            {row: reasons[name] for name, row in self._ids.find(reasons).items()}
            if reasons
            else {}
        )


def read_header(image: Image) -> tuple[str, int, int]:
    """(format or 'pixels', width, height) without decoding pixels. Raises BadImage
    as :func:`decode`.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return "pixels", image.shape[1], image.shape[0]
    with suppress_pillow_warnings(), _open(image) as picture:
        return str(picture.format), *picture.size


def _pixels(picture: Pillow.Image) -> np.ndarray:
    """An RGB picture's memory (H,W,4), or a copy (H,W,3) where it lies in pieces or
    Pillow is older.
    """
    try:
        values = pa.array(picture).values
    except (ValueError, TypeError, pa.ArrowException):
        return np.asarray(picture).copy()
    width, height = picture.size
    pixels = np.frombuffer(values.buffers()[1], np.uint8)[values.offset :][
        : 4 * width * height
    ]
    return pixels.reshape(height, width, 4)


def _upright(rgb: Pillow.Image, picture: Pillow.Image) -> Pillow.Image:
    """The pixels of ``picture``, turned as its EXIF says: before anything is resized,
    as rounding depends on the order. Of a PNG the orientation stands behind the pixels.
    """
    try:
        orientation = int(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # broken metadata of any kind does not make the pixels bad
        return rgb
    return rgb.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else rgb


def _square(
    picture: Pillow.Image, size: int, interpolation: Interpolation
) -> Pillow.Image:
    """The centered square, resized."""
    if picture.size == (size, size):
        return picture
    side = min(picture.size)
    left, top = ((length - side) / 2 for length in picture.size)
    box = (left, top, left + side, top + side)
    how = Pillow.Resampling[interpolation.upper()]
    return picture.resize((size, size), how, box=box)


def to_rgb(picture: Pillow.Image) -> Pillow.Image:
    """Any mode -> RGB; transparent pixels become white, 9 to 16-bit gray is scaled
    to 8 bits.
    """
    if picture.mode.startswith("I;16") or picture.mode == "I":
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise BadImage("32-bit pixels beyond 0-65535; convert the image to 8 bits")
        values = np.minimum(values * 255 // largest_sample(picture), 255)
        return Pillow.fromarray(values.astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise BadImage(
            "floating-point pixels have no fixed range; convert the image to 8 bits"
        )
    if (
        picture.mode in ("RGBA", "LA", "PA", "La", "RGBa")
        or "transparency" in picture.info
    ):
        rgba = picture.convert("RGBA")
        return Pillow.alpha_composite(
            Pillow.new("RGBA", rgba.size, "white"), rgba
        ).convert("RGB")
    picture.load()
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def largest_sample(picture: Pillow.Image) -> int:
    """Return the value of white in a picture of more than 8 bits: 65535 for 16 bits.

    A TIFF says how many bits a sample has. Its tag MaxSampleValue is not used: by the
    TIFF specification it must not change how an image looks, and it differs between
    images.
    """
    if picture.format != "TIFF":
        return 65535
    bits = getattr(picture, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))
    return int(2 ** min(bits[0], 16) - 1)


def brightness(image: Image) -> tuple[int, int, int]:
    """Measure how bright an image is.

    Args:
        image: Encoded bytes, a path or pixels.

    Returns: Its largest channel value after decoding (0 to 255), its largest stored
        value, and the stored value of white (255, or 65535 for 16 bits).

    Raises:
        BadImage: The image cannot be decoded.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return int(image.max()), int(image.max()), 255
    with suppress_pillow_warnings(), _open(image, BRIGHTNESS_SIDE) as picture:
        stored, white = None, 255
        if picture.mode.startswith("I"):
            stored, white = int(np.asarray(picture).max()), largest_sample(picture)
        largest = int(np.asarray(to_rgb(picture)).max())
        return largest, largest if stored is None else stored, white


@contextmanager
def _open(image: bytes | str, side: int | None = None) -> Iterator[Pillow.Image]:
    """The picture with its header checked, a JPEG at the scale for ``side``; errors
    inside are BadImages.
    """
    try:
        data = (
            read_bytes(image, MAX_IMAGE_BYTES)
            if isinstance(image, str)
            else bytes(image)
        )
        if isinstance(image, MissingImage):
            raise BadImage(image.reason)
        if not 0 < len(data) <= MAX_IMAGE_BYTES:
            raise BadImage(
                f"larger than {MAX_IMAGE_BYTES} bytes" if data else "no image data"
            )
        with Pillow.open(BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if not 0 < width * height <= MAX_IMAGE_PIXELS:
                raise BadImage(
                    f"{width} x {height} pixels, not 1 to {MAX_IMAGE_PIXELS}"
                )
            most = max(10**6, MAX_PIXELS_PER_BYTE * len(data))
            if width * height > (
                MAX_BMP_PIXELS_PER_BYTE * len(data) if picture.format == "BMP" else most
            ):
                raise BadImage(f"{width} x {height} pixels in {len(data)} bytes")
            if side is not None and picture.format in ("JPEG", "MPO"):
                picture.draft(picture.mode, (DRAFT * side, DRAFT * side))
            yield picture
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"not a readable {', '.join(FORMATS)} image") from None
    except OSError as error:
        if isinstance(image, str) and is_transient(error):
            raise StorageError(f"cannot read {image}: {one_line(error)}") from None
        raise BadImage(one_line(error.strerror or error)[:200]) from None
    except Exception as error:  # whatever a broken file leads Pillow's parsers to
        raise BadImage(f"{type(error).__name__}: {one_line(error)[:200]}") from None


def _check_array(image: np.ndarray) -> None:
    if (
        image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] != 3
        or not image.size
    ):
        raise BadImage(f"pixels are {image.dtype} {image.shape}, not uint8 (H, W, 3)")
