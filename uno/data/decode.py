"""Decode encoded images from any origin to square uint8 pixels.

The files may be damaged or hostile. The header is read first, and its format and its
numbers of bytes and pixels are checked. Then the pixels are decoded. An image that
cannot be used raises :class:`BadImage`, whatever is wrong with it. Pillow decodes,
about 480 original images of ImageNet a second.
"""

import errno
import json
import logging
import re
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from io import BufferedReader, BytesIO
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import torch
from PIL import Image as Pillow
from PIL import UnidentifiedImageError
from torch import Tensor

from uno import distributed
from uno.cpus import available_cpus
from uno.data.columns import find_rows
from uno.data.files import (
    Storage,
    is_transient,
    open_file,
    parse_json,
    read_bytes,
    retry_transient,
)
from uno.data.images import Image, Images, InMemory, MissingImage, as_images, name_row
from uno.errors import ConfigError, StorageError, UnoError, one_line
from uno.limits import (
    MAX_BMP_PIXELS_PER_BYTE,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_PIXELS_PER_BYTE,
)
from uno.threads import start_pool

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that are decoded: the first frame or page of an image. Files of any other
format, above all EPS, never reach one of Pillow's decoders.
"""
DRAFT = 4
"""A JPEG is decoded at the scale 1/2, 1/4 or 1/8 if its sides still have at least this
many times the pixels of the final side. From 4000 x 3000 to 224 pixels this is 2.9
times as fast. For ImageNet's original images the results differ by 0.65 of 255 at 32
pixels, and not at all at 224.
"""
JPEGS = ("JPEG", "MPO")  # formats that can be decoded at a smaller scale
ORIENTATION = 0x0112  # the EXIF tag
BITS_PER_SAMPLE = 0x0102  # the TIFF tag
BRIGHTNESS_SIDE = 64  # side in pixels for which a JPEG is decoded by `brightness`
UPRIGHT = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}
BATCHES_AHEAD = 2  # batches that are decoded while the model works on another one
PIECE_ROWS = 64  # images that a thread decodes at once
HEADER_BYTES = 2**16  # bytes that are read at once to find the header of an image
READERS = 4  # threads that read images that are stored together
# the first entries of warnings.filters while images are decoded
IGNORED = (
    ("ignore", None, Warning, re.compile(r"PIL\."), 0),
    # a warning of PyTorch for tensors that share Pillow's memory; nobody writes to them
    (
        "ignore",
        re.compile("The given NumPy array is not writable", re.IGNORECASE),
        Warning,
        None,
        0,
    ),
)
BAD_SAMPLES = "bad_samples.jsonl"
# error numbers that concern the process or the machine, not the file that is read
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

BadSample = dict[str, Any]
"""An entry of :data:`BAD_SAMPLES`: id, reason and, if they are known, uri and line."""
Result = TypeVar("Result")
Interpolation = Literal["bilinear", "bicubic"]
DecodedBatch = tuple[np.ndarray, Tensor, list[str | None]]
"""Row numbers int64 (b,), pixels uint8 (b, 3, S, S), and for each row the reason why it
cannot be used, or None. See :func:`decoded`.
"""

log = logging.getLogger(__name__)


class BadImage(Exception):
    """An image that cannot be used. The message is the reason, in one line."""


def ignore_image_warnings() -> None:
    """Ignore the warnings of :data:`IGNORED` from now on, in the whole process.

    Pillow warns of damaged metadata and of large pictures, image by image. Such images
    are checked here. Warning filters belong to the process and not to a thread, so they
    match only these warnings. They are never removed: that would also remove the
    filters that other threads have added meanwhile.
    """
    if (*warnings.filters[: len(IGNORED)],) != IGNORED:
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        warnings.filterwarnings("ignore", module=r"PIL\.")


def decode(
    image: Image, size: int, interpolation: Interpolation = "bilinear"
) -> np.ndarray:
    """Decode an image to a square.

    The image is turned upright, converted to RGB, cropped to the centered square and
    resized with antialiasing.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).
        size: The side of the result in pixels.
        interpolation: How the square is resized.

    Returns:
        uint8 (3, size, size).

    Raises:
        BadImage: The image cannot be used.
        StorageError: The image's file cannot be read now, but perhaps later.
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
    """Decode a whole image, upright and in RGB.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).
        side: The side of a square in pixels that the image is used for later. A JPEG
            may be decoded at a smaller scale that suffices for it, see :data:`DRAFT`.

    Returns:
        uint8 (H, W, 3) or (H, W, 4), where the fourth channel has no meaning. The array
        must not be written to, because it may share its memory with Pillow or be
        ``image`` itself.

    Raises:
        BadImage: The image cannot be used.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return image
    with _open(image, side) as picture:
        return _pixels(_upright(to_rgb(picture), picture))


def decode_square_and_rgb(
    image: Image, size: int, side: int, interpolation: Interpolation = "bilinear"
) -> tuple[np.ndarray, np.ndarray]:
    """Decode an image to the results of both :func:`decode` and :func:`decode_rgb`.

    The image is read once.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).
        size: The side of the square in pixels, as :func:`decode` takes it.
        side: The side in pixels that :func:`decode_rgb` takes.
        interpolation: How the square is resized.

    Returns:
        The square uint8 (3, size, size) and the pixels uint8 (H, W, 3 or 4), with
        exactly the values that the two functions return. A JPEG is decoded twice if the
        two functions decode it at different scales.

    Raises:
        BadImage: The image cannot be used.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        return decode(image, size, interpolation), decode_rgb(image, side)
    data = _read(image)
    with _open(data, side) as picture:
        if picture.format in JPEGS:
            with _open(data, size) as scaled:
                is_same_scale = scaled.size == picture.size
            if not is_same_scale:
                return decode(data, size, interpolation), decode_rgb(data, side)
        upright = _upright(to_rgb(picture), picture)
        square = np.asarray(_square(upright, size, interpolation))
        return square.transpose(2, 0, 1), _pixels(upright)


def decode_many(
    images: Images | Sequence[Image],
    size: int,
    threads: int | None = None,
    interpolation: Interpolation = "bilinear",
) -> tuple[Tensor, list[str | None]]:
    """Decode N images to squares, in several threads.

    Args:
        images: The images.
        size: The side of the squares in pixels.
        threads: Number of threads; None or 0 for PyTorch's number of threads.
        interpolation: How the squares are resized.

    Returns:
        Pixels uint8 (N, 3, size, size), black for images that cannot be used, and for
        each image the reason why it cannot be used, or None.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later.
    """
    pixels = torch.zeros(len(images), 3, size, size, dtype=torch.uint8)
    out, reasons = pixels.numpy(), [None] * len(images)  # type: np.ndarray, list[str | None]

    def fill(piece: tuple[np.ndarray, Images]) -> None:
        """Decode the images of a piece into the arrays of the enclosing function."""
        rows, some = piece
        for row, image in zip(
            rows.tolist(), some.read_images(np.arange(len(rows))), strict=True
        ):
            try:
                out[row] = decode(image, size, interpolation)
            except BadImage as error:
                reasons[row] = str(error)

    threads = threads or torch.get_num_threads()
    deque(
        prefetch_map(fill, pieces(as_images(images)), threads, 2 * threads),
        maxlen=0,
    )
    return pixels, reasons


def pieces(images: Images) -> Iterator[tuple[np.ndarray, Images]]:
    """Divide images into pieces that a thread decodes at once.

    If images are stored together, such as in a row group, the images of each group are
    read once, by threads that are ahead of the consumer.

    Yields:
        Row numbers int64 (n,) and the images of these rows, with n at most
        :data:`PIECE_ROWS`. Rows that are stored together come one after the other, so
        the order of all rows may differ from that of ``images``.
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
    """Decode batches of rows in the background, ahead of the consumer.

    Batches that the images have already in memory (:meth:`Images.prepared`) are
    returned as they are, which may be features instead of pixels.

    Args:
        images: The images of all rows.
        batches: Row numbers of each batch, int64 (b,).
        size: The side of the decoded squares in pixels.
        threads: Number of decoding threads; None for the number of cores that this
            process may use.
        interpolation: How the squares are resized.

    Yields:
        For each batch the row numbers, the pixels uint8 (b, 3, size, size), and for
        each row the reason why it cannot be used, or None.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later.
    """
    source = as_images(images)

    def decode_batch(rows: np.ndarray) -> DecodedBatch:
        """Return the rows of a batch with their pixels and reasons."""
        ready = source.prepared(rows)
        if ready is None:
            ready = decode_many(
                source.take(rows), size, threads or available_cpus(), interpolation
            )
        return rows, *ready

    return prefetch_map(decode_batch, batches, 1, BATCHES_AHEAD)


def prefetch_map(
    function: Callable[[Any], Result], items: Iterable[Any], threads: int, depth: int
) -> Generator[Result, None, None]:
    """Apply a function to items in threads, ahead of the consumer.

    Each thread computes with one thread of PyTorch. Otherwise sixteen threads that
    resize images would start sixteen threads each, and wait for each other.

    Args:
        function: The function.
        items: Its arguments, which are taken one by one as threads need them.
        threads: Number of threads.
        depth: Largest number of results that are computed or waiting when the consumer
            takes one.

    Yields:
        The results, in the order of ``items``. An error of ``function`` is raised in
        place of its result.
    """
    waiting: deque[Future[Result]] = deque()
    pool = start_pool(threads, "uno-ahead")
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
    """Return which rows have no reason why they cannot be read.

    Args:
        reasons: For each of N rows the reason, or None, as :func:`decode_many` returns
            them.

    Returns:
        bool (N,).
    """
    return np.array([reason is None for reason in reasons], dtype=bool)


def check_bad(
    ids: pa.LargeStringArray,
    reasons: Sequence[str | None] | Mapping[int, str],
    max_fraction: float,
    storage: Storage | None = None,
    images: Images | None = None,
) -> list[BadSample]:
    """List the unreadable images of a data set, and stop if there are too many.

    Args:
        ids: The ids of N rows, an Arrow array.
        reasons: The reasons of the images that cannot be read, by row number; or one
            entry for each of the N rows, which is None if the image can be read.
        max_fraction: The largest share of the N rows that may be unreadable, 0 to 1.
        storage: The directory to which rank 0 writes the list as :data:`BAD_SAMPLES`,
            if it is not empty; None to write no file.
        images: The images of the N rows, from which their paths and lines are taken;
            None to list neither.

    Returns:
        One entry for each unreadable image, in the order of rows: id, reason and, if
        they are known, uri (the path of the file) and line (in the table that names the
        image).

    Raises:
        ConfigError: More than ``max_fraction`` of the rows are unreadable. The list is
            written before.
        StorageError: The list cannot be written.
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
    if bad and storage is not None and distributed.rank_and_world()[0] == 0:
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
    """Return how messages name an entry of :data:`BAD_SAMPLES`: its id, path and line.

    See :func:`~uno.data.images.name_row` for the form.
    """
    path, line = entry.get("uri"), entry.get("line")
    return name_row(
        str(entry.get("id", "")),
        path if isinstance(path, str) else None,
        line if isinstance(line, int) else None,
    )


class BadRows:
    """The rows of a task whose images could not be read during training.

    Each worker adds the rows that it could not read. After :meth:`sync` every worker
    has those of all workers. The rows that the run had listed in :data:`BAD_SAMPLES`
    before it was resumed are included.

    Args:
        ids: The ids of the N rows of the task, an Arrow array.
        images: The images of the N rows.
        max_fraction: The largest share of the N rows that may be unreadable, 0 to 1.
        storage: The run directory, in which the rows are listed.
    """

    def __init__(
        self,
        ids: pa.LargeStringArray,
        images: Images,
        max_fraction: float,
        storage: Storage,
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
        """Record that a row cannot be read.

        Args:
            row: Its number in the task.
            reason: Why it cannot be read. A reason that was recorded before is kept.
        """
        self._reasons.setdefault(row, reason)

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that are recorded, ascending."""
        return sorted(self._reasons)

    def sync(self, device: torch.device) -> None:
        """Exchange the recorded rows among all workers, and list them in a file.

        All workers must call this at the same time. A worker that learns of a row from
        another one decodes the image itself to get the reason, since only row numbers
        are exchanged. Nothing is written if no worker has a new row.

        Args:
            device: The device over which workers communicate. With several workers the
                calling process waits for it.

        Raises:
            ConfigError: More rows are unreadable than ``max_fraction`` allows.
        """
        device = device if distributed.in_group() else torch.device("cpu")
        new = list(self._reasons)[self._synced :]
        most = int(
            distributed.gather_rows(torch.tensor([len(new)], device=device), 0).max()
        )
        if not most:
            return
        told = torch.tensor([*new, *[-1] * (most - len(new))], device=device)
        for row in distributed.gather_rows(told, 0).unique().tolist():
            # Another worker found this row; the reason is found again by decoding it.
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
        """Read the rows and reasons that the run had listed before it was resumed.

        A damaged list counts as empty, and a warning is logged.

        Returns:
            Reasons by row number.
        """
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
            {row: reasons[name] for name, row in find_rows(self._ids, reasons).items()}
            if reasons
            else {}
        )


def read_header(image: Image) -> tuple[str, int, int]:
    """Read the format and size of an image without decoding its pixels.

    Only the parts of a file that hold the header are read: the first 64 KiB, and for a
    TIFF also its directory. Pillow needs the whole file only for WEBP.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).

    Returns:
        The format as Pillow names it, such as 'JPEG', or 'pixels' for an array; the
        width and the height in pixels, before the image is turned upright.

    Raises:
        BadImage: The header cannot be read, or is beyond the limits.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return "pixels", image.shape[1], image.shape[0]
    if isinstance(image, str):
        return _read_file_header(image)
    data = _read(image)
    with _open_file(BytesIO(data), len(data)) as picture:
        return str(picture.format), *picture.size


@retry_transient
def _read_file_header(path: str) -> tuple[str, int, int]:
    """Read the format, width and height of an image file, see :func:`read_header`."""
    with ExitStack() as opened:
        with _reader_errors(path):
            file = opened.enter_context(open_file(path))
            size = file.size()
            buffered = opened.enter_context(_SizedReader(file, size))
        with _open_file(buffered, size, path) as picture:
            return str(picture.format), *picture.size


class _SizedReader(BufferedReader):
    """A file whose reads never ask for more bytes than the file has left.

    A read allocates the requested bytes before it reads anything. A hostile header can
    request gigabytes.

    Args:
        file: The file, open for reading.
        size: The size of the file in bytes.
    """

    def __init__(self, file: Any, size: int) -> None:
        super().__init__(file, HEADER_BYTES)
        self._size = size

    def read(self, num: int | None = -1, /) -> bytes:
        """Read ``num`` bytes, or all that are left if these are fewer or num is -1."""
        left = max(0, self._size - self.tell())
        return super().read(left if num is None or num < 0 else min(num, left))


def _pixels(picture: Pillow.Image) -> np.ndarray:
    """Return the pixels of an RGB picture.

    Returns:
        uint8 (H, W, 4) that shares the picture's memory and must not be written to; or
        a copy uint8 (H, W, 3), if Pillow cannot share the memory as one piece.
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
    """Turn the pixels ``rgb`` of ``picture`` as its EXIF orientation says.

    Pixels are turned before they are resized, because rounding depends on the order.
    The orientation is read after the pixels, because in a PNG it may stand behind them.
    Pixels with broken metadata are returned as they are.
    """
    try:
        with _decoder_errors():
            orientation = int(picture.getexif().get(ORIENTATION, 1))
    except BadImage:  # broken metadata of any kind does not make the pixels bad
        return rgb
    return rgb.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else rgb


def _square(
    picture: Pillow.Image, size: int, interpolation: Interpolation
) -> Pillow.Image:
    """Crop the centered square of a picture and resize it to ``size`` pixels a side."""
    if picture.size == (size, size):
        return picture
    side = min(picture.size)
    left, top = ((length - side) / 2 for length in picture.size)
    box = (left, top, left + side, top + side)
    how = Pillow.Resampling[interpolation.upper()]
    return picture.resize((size, size), how, box=box)


def to_rgb(picture: Pillow.Image) -> Pillow.Image:
    """Convert a picture of any mode to RGB.

    Transparent pixels are blended with white. Gray values of more than 8 bits are
    scaled to 8 bits.

    Raises:
        BadImage: The pixels cannot be decoded, are floating-point numbers, or are
            integers below 0 or above 65535.
    """
    if picture.mode.startswith("I;16") or picture.mode == "I":
        with _decoder_errors():
            stored = np.asarray(picture)
        values = stored.astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise BadImage("32-bit pixels beyond 0-65535; convert the image to 8 bits")
        values = np.minimum(values * 255 // largest_sample(picture), 255)
        return Pillow.fromarray(values.astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise BadImage(
            "floating-point pixels have no fixed range; convert the image to 8 bits"
        )
    with _decoder_errors():
        if (
            picture.mode in ("RGBA", "LA", "PA", "La", "RGBa")
            or "transparency" in picture.info
        ):
            rgba = picture.convert("RGBA")
            white = Pillow.new("RGBA", rgba.size, "white")
            return Pillow.alpha_composite(white, rgba).convert("RGB")
        picture.load()
        return picture if picture.mode == "RGB" else picture.convert("RGB")


def largest_sample(picture: Pillow.Image) -> int:
    """Return the stored value of white in a grayscale picture of more than 8 bits.

    In a TIFF with n bits a sample it is 2^n - 1, but at most 65535; otherwise it is
    65535. The TIFF tag MaxSampleValue is not used: by the TIFF specification it must
    not change how an image looks, and it differs between images.

    Raises:
        BadImage: The number of bits is not a positive integer.
    """
    if picture.format != "TIFF":
        return 65535
    with _decoder_errors():
        bits = getattr(picture, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))[0]
    if not isinstance(bits, int) or bits < 1:
        raise BadImage("a TIFF without a valid number of bits per sample")
    return int(2 ** min(bits, 16) - 1)


def brightness(image: Image) -> tuple[int, int, int]:
    """Measure how bright an image is.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).

    Returns:
        The largest channel value after decoding (0 to 255), the largest stored value,
        and the stored value of white (255, or that of :func:`largest_sample` if the
        image has more than 8 bits).

    Raises:
        BadImage: The image cannot be decoded.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return int(image.max()), int(image.max()), 255
    with _open(image, BRIGHTNESS_SIDE) as picture:
        stored, white = None, 255
        if picture.mode.startswith("I"):
            with _decoder_errors():
                values = np.asarray(picture)
            stored, white = int(values.max()), largest_sample(picture)
        largest = int(np.asarray(to_rgb(picture)).max())
        return largest, largest if stored is None else stored, white


@contextmanager
def _open(image: bytes | str, side: int | None = None) -> Iterator[Pillow.Image]:
    """Open an image and check its header.

    Args:
        image: Encoded bytes, or the path or URI of a file.
        side: The side in pixels that is needed. A JPEG may then be decoded at a smaller
            scale, see :data:`DRAFT`. None for full scale.

    Yields:
        The picture, whose pixels are not decoded yet.

    Raises:
        BadImage: The image cannot be read, or its header is refused.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    data = _read(image)
    with _open_file(BytesIO(data), len(data)) as picture:
        if side is not None and picture.format in JPEGS:
            with _decoder_errors():
                picture.draft(picture.mode, (DRAFT * side, DRAFT * side))
        yield picture


def _read(image: bytes | str) -> bytes:
    """Return the bytes of an encoded image or of a file, at most MAX_IMAGE_BYTES + 1.

    Raises:
        BadImage: There is no image, or the file cannot be read.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, MissingImage):
        raise BadImage(image.reason)
    if not isinstance(image, str):
        return bytes(image or b"")  # None: a null in a table
    with _reader_errors(image):
        return read_bytes(image, MAX_IMAGE_BYTES)


def _open_file(file: Any, num_bytes: int, path: str = "") -> Pillow.Image:
    """Open an image file of a known size and check its header.

    Args:
        file: The content, as a file that can be read in any order.
        num_bytes: The size of the content.
        path: The path of the file if Pillow itself reads it from storage; '' if the
            content is in memory.

    Returns:
        The picture, whose pixels are not decoded yet.

    Raises:
        BadImage: The format is none of :data:`FORMATS`, the header is damaged, or the
            numbers of bytes or pixels are beyond the limits.
        StorageError: The file at ``path`` cannot be read now, but perhaps later.
    """
    if not 0 < num_bytes <= MAX_IMAGE_BYTES:
        text = f"larger than {MAX_IMAGE_BYTES} bytes" if num_bytes else "no image data"
        raise BadImage(text)
    ignore_image_warnings()
    with _decoder_errors(path):
        picture = Pillow.open(file, formats=FORMATS)
        width, height = picture.size
    if not 0 < width * height <= MAX_IMAGE_PIXELS:
        raise BadImage(f"{width} x {height} pixels, not 1 to {MAX_IMAGE_PIXELS}")
    most = max(10**6, MAX_PIXELS_PER_BYTE * num_bytes)
    if picture.format == "BMP":
        most = MAX_BMP_PIXELS_PER_BYTE * num_bytes
    if width * height > most:
        raise BadImage(f"{width} x {height} pixels in {num_bytes} bytes")
    return picture


@contextmanager
def _decoder_errors(path: str = "") -> Iterator[None]:
    """Turn what Pillow raises for a broken or hostile file into a BadImage.

    Damaged bytes lead Pillow's parsers to errors of almost any type. Therefore only
    calls of Pillow belong inside the ``with`` block, and no code of this project. A
    MemoryError is passed on, since it says nothing about the file.

    Args:
        path: The file that Pillow itself reads; '' if its bytes are in memory.

    Raises:
        BadImage: Pillow cannot read the image.
        StorageError: The file at ``path`` cannot be read now, but perhaps later.
    """
    try:
        yield
    except (MemoryError, UnoError):  # UnoError: a signal that interrupts the run
        raise
    except UnidentifiedImageError:
        raise BadImage(f"not a readable {', '.join(FORMATS)} image") from None
    except OSError as error:
        _raise_if_later(error, path)
        raise BadImage(one_line(error.strerror or error)[:200]) from None
    except Exception as error:
        raise BadImage(f"{type(error).__name__}: {one_line(error)[:200]}") from None


@contextmanager
def _reader_errors(path: str) -> Iterator[None]:
    """Turn errors of reading a file in the ``with`` block into a BadImage.

    An error that says nothing about the file becomes a StorageError instead, because a
    later attempt may read the same file.

    Args:
        path: The file that is read.

    Raises:
        BadImage: The file cannot be read.
        StorageError: The storage may answer later, or this process has no more memory
            or open files.
    """
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        _raise_if_later(error, path)
        if isinstance(error, OSError):
            raise BadImage(one_line(error.strerror or error)[:200]) from None
        raise BadImage(f"{type(error).__name__}: {one_line(error)[:200]}") from None


def _raise_if_later(error: Exception, path: str) -> None:
    """Raise a StorageError if a later read of the file at ``path`` may succeed.

    Nothing is raised if ``path`` is ''.
    """
    is_exhausted = getattr(error, "errno", None) in EXHAUSTED
    if path and (is_exhausted or is_transient(error)):
        raise StorageError(f"cannot read {path}: {one_line(error)}") from None


def _check_array(image: np.ndarray) -> None:
    """Raise a BadImage unless an array holds pixels uint8 (H, W, 3)."""
    if (
        image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] != 3
        or not image.size
    ):
        raise BadImage(f"pixels are {image.dtype} {image.shape}, not uint8 (H, W, 3)")
