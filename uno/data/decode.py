"""Decode encoded images from any origin to square uint8 pixels.

The files may be damaged or hostile. The header is read first, and its format and its
numbers of bytes and pixels are checked. Then the pixels are decoded. An image that
cannot be used raises :class:`BadImage`, whatever is wrong with it. Pillow decodes,
about 480 original images of ImageNet a second.
"""

import errno
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import torch
from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError
from torch import Tensor

from uno.config import DataConfig, Range
from uno.data.files import is_transient, open_file, read_bytes
from uno.data.images import Image, Images, InMemory, MissingImage, as_images
from uno.errors import StorageError, UnoError, one_line
from uno.limits import (
    MAX_BMP_PIXELS_PER_BYTE,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_PIXELS_PER_BYTE,
)
from uno.threads import available_cpus, start_pool

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
WHITE_16 = 65535  # the largest value of 16 bits
SAMPLED_VALUES = 2**14  # values that are sampled of an image of more than 8 bits
BRIGHTNESS_SIDE = 64  # side in pixels for which `inspect_image` decodes a JPEG
BATCHES_AHEAD = 2  # batches that are decoded while the model works on another one
PIECE_ROWS = 64  # images that a thread decodes at once
HEADER_BYTES = 2**16  # first bytes of a file, which hold the header of most images
READERS = 4  # threads that read images that are stored together
LOOKERS = 8  # threads that look at images without decoding them into a batch
# error numbers that concern the process or the machine, not the file that is read
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Result = TypeVar("Result")
Interpolation = Literal["bilinear", "bicubic"]
DecodedBatch = tuple[np.ndarray, Tensor, list[str | None]]
"""Row numbers int64 (b,), pixels uint8 (b, 3, S, S), and for each row the reason why it
cannot be used, or None. See :func:`decoded`.
"""


# Pillow warns of damaged metadata and of large pictures, image by image; such images
# are checked here. PyTorch warns of tensors that share Pillow's memory; nobody writes
# to them. The filters are set once, because they belong to the process and not to a
# thread: to remove them would also remove filters that other threads have added.
warnings.filterwarnings("ignore", module=r"PIL\.")
warnings.filterwarnings("ignore", "The given NumPy array is not writable")


class Decoding(NamedTuple):
    """How images become pixels of 8 bits.

    Attributes:
        interpolation: How squares are resized, ``"bilinear"`` or ``"bicubic"``.
        value_range: The stored values (low, high) that become 0 and 255, in gray images
            of more than 8 bits. Values outside become 0 or 255. None for 0 and 65535;
            images of floating-point numbers, or with values outside 0 to 65535, then
            raise a BadImage. It has no effect on images of 8 bits.
    """

    interpolation: Interpolation = "bilinear"
    value_range: Range | None = None

    @classmethod
    def of(cls, config: DataConfig) -> Self:
        """Return how a run decodes its images, from its section ``data``."""
        return cls(config.interpolation, config.value_range)


PLAIN = Decoding()
"""Bilinear resizing, and the range of 16 bits for gray images of more than 8."""


class Header(NamedTuple):
    """What the header of an image says.

    Attributes:
        format: The format as Pillow names it, such as 'JPEG', or 'pixels' for an array.
        width: The width in pixels, before the image is turned upright.
        height: The height in pixels, before the image is turned upright.
    """

    format: str
    width: int
    height: int


class ImageFacts(NamedTuple):
    """What decoding an image shows about it.

    Attributes:
        header: The format and the size.
        brightest: The largest value, 0 to 255 for images of 8 bits after they are
            converted to RGB. For a gray image of more than 8 bits, the largest of
            ``deep_values``, but at least 0.
        deep_values: Stored values of a gray image of more than 8 bits, evenly spaced
            over the image: finite numbers, float64 (n,) with n less than twice
            :data:`SAMPLED_VALUES` (16384). None for images of 8 bits.
        has_pages: Whether it is a TIFF with further pages, which are not used.
    """

    header: Header
    brightest: float
    deep_values: np.ndarray | None = None
    has_pages: bool = False


class BadImage(Exception):
    """An image that cannot be used. The message is the reason, in one line."""


def decode(image: Image, size: int, how: Decoding = PLAIN) -> np.ndarray:
    """Decode an image to a square.

    The image is turned upright by its EXIF orientation, converted to RGB with
    transparent pixels on white, cropped to the centered square and resized with
    antialiasing. A gray image of more than 8 bits is scaled to 8 bits before, and its
    transparency is ignored. A large JPEG is decoded at a smaller scale that suffices
    for ``size``, see :data:`DRAFT`. An array is only cropped and resized.

    Args:
        image: Encoded bytes, a path or URI, or RGB pixels uint8 (H, W, 3).
        size: The side of the result in pixels.
        how: How the image is resized and scaled to 8 bits.

    Returns:
        uint8 (3, size, size), channels red, green and blue. The array is read-only.

    Raises:
        BadImage: The image cannot be used: it is missing, empty, damaged or of another
            format than :data:`FORMATS`, has too many bytes or pixels, is a gray image
            whose values need a range, or is an array of another type or shape.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    picture = _load_rgb(image, size, how.value_range)
    return _square(picture, size, how.interpolation)


def decode_rgb(image: Image, side: int, value_range: Range | None = None) -> np.ndarray:
    """Decode a whole image, upright and in RGB.

    Transparent pixels are blended with white, but not in gray images of more than 8
    bits. An array is only checked and returned itself.

    Args:
        image: Encoded bytes, a path or URI, or RGB pixels uint8 (H, W, 3).
        side: The side of a square in pixels that the image is used for later. A JPEG
            may be decoded at a smaller scale that suffices for it, see :data:`DRAFT`.
        value_range: The stored values (low, high) that become 0 and 255, in gray images
            of more than 8 bits. None for 0 and 65535; images of floating-point numbers,
            or with values outside 0 to 65535, then raise a BadImage.

    Returns:
        uint8 (H, W, 3) or (H, W, 4), where the fourth channel has no meaning (it is not
        alpha). H and W are the sides of the upright image at the scale of decoding. The
        array must not be written to, because it may share its memory with Pillow or be
        ``image`` itself.

    Raises:
        BadImage: The image cannot be used: it is missing, empty, damaged or of another
            format than :data:`FORMATS`, has too many bytes or pixels, is a gray image
            whose values need a range, or is an array of another type or shape.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return image
    return _pixels(_load_rgb(image, side, value_range))


def decode_square_and_rgb(
    image: Image, size: int, side: int, how: Decoding = PLAIN
) -> tuple[np.ndarray, np.ndarray]:
    """Decode an image to the results of both :func:`decode` and :func:`decode_rgb`.

    The image is read once.

    Args:
        image: Encoded bytes, a path or URI, or RGB pixels uint8 (H, W, 3).
        size: The side of the square that is returned, in pixels.
        side: The side in pixels of the square that the whole image is used for later.
            A JPEG may be decoded at a smaller scale that suffices for it.
        how: How the image is resized and scaled to 8 bits.

    Returns:
        The square uint8 (3, size, size); and the whole upright image in RGB, uint8 (H,
        W, 3), or (H, W, 4) with a fourth channel that means nothing (it is not alpha).
        H and W are its sides at the scale of decoding. Both have exactly the values
        that the two functions return, and must not be written to. A JPEG is decoded
        twice if the two functions decode it at different scales.

    Raises:
        BadImage: The image cannot be used.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        return decode(image, size, how), decode_rgb(image, side)
    data = read_encoded(image)
    picture = _open(data, side)
    if picture.format in JPEGS and _open(data, size).size != picture.size:
        return decode(data, size, how), decode_rgb(data, side)
    rgb = _turn_to_rgb(picture, how.value_range)
    return _square(rgb, size, how.interpolation), _pixels(rgb)


def decode_many(
    images: Images | Sequence[Image],
    size: int,
    threads: int | None = None,
    how: Decoding = PLAIN,
) -> tuple[Tensor, list[str | None]]:
    """Decode N images to squares, in several threads, as :func:`decode` does.

    Args:
        images: The images: encoded bytes, paths or URIs, or pixels uint8 (H, W, 3).
        size: The side of the squares in pixels.
        threads: Number of threads; None or 0 for PyTorch's number of threads.
        how: How the images are resized and scaled to 8 bits. The default
            :data:`PLAIN` resizes bilinearly, and takes 0 to 65535 as the range of gray
            images of more than 8 bits.

    Returns:
        Pixels uint8 (N, 3, size, size), black for images that cannot be used, and for
        each image the reason why it cannot be used, or None.

    Raises:
        ConfigError: A file that holds many images cannot be read.
        StorageError: An image's file cannot be read now, but perhaps later.
    """
    pixels = torch.zeros(len(images), 3, size, size, dtype=torch.uint8)
    out, reasons = pixels.numpy(), [None] * len(images)  # type: np.ndarray, list[str | None]

    def fill(piece: tuple[np.ndarray, Images]) -> None:
        """Decode some of the images into the pixels and reasons that are returned.

        Args:
            piece: Row numbers int64 (n,), and the images of these rows.
        """
        rows, some = piece
        for row, image in zip(
            rows.tolist(), some.read_images(np.arange(len(rows))), strict=True
        ):
            try:
                out[row] = decode(image, size, how)
            except BadImage as error:
                reasons[row] = str(error)

    threads = threads or torch.get_num_threads()
    deque(
        prefetch_map(fill, pieces(as_images(images)), threads, 2 * threads),
        maxlen=0,
    )
    return pixels, reasons


def pieces(images: Images) -> Iterator[tuple[np.ndarray, Images]]:
    """Divide images into pieces, each of which a thread decodes at once.

    If images are stored together, such as in a row group, the images of each group are
    read once, by threads that are ahead of the consumer. Other images are not read: the
    consumer reads each piece by ``read_images``.

    Args:
        images: The images of all rows.

    Yields:
        Row numbers int64 (n,) and the images of these rows, with n at most
        :data:`PIECE_ROWS`. The images are numbered from 0 in each piece. Rows that are
        stored together come one after the other, so the order of all rows may differ
        from that of ``images``. Every row comes once.

    Raises:
        ConfigError: A file that holds many images cannot be read.
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
    how: Decoding = PLAIN,
) -> Iterator[DecodedBatch]:
    """Decode batches of rows in the background, two batches ahead of the consumer.

    Batches that the images have already in memory (:meth:`Images.prepared`) are
    returned as they are, which may be features (b, D) instead of pixels.

    Args:
        images: The images of all rows.
        batches: Row numbers of each batch, int64 (b,).
        size: The side of the decoded squares in pixels.
        threads: Number of decoding threads; None or 0 for the number of cores that this
            process may use.
        how: How the images are resized and scaled to 8 bits.

    Yields:
        For each batch, in order, the row numbers int64 (b,), the pixels uint8 (b, 3,
        size, size), and for each row the reason why it cannot be used, or None. The
        decoded pixels of a row that cannot be used are black.

    Raises:
        ConfigError: A file that holds many images cannot be read.
        StorageError: An image's file cannot be read now, but perhaps later.
    """
    source = as_images(images)

    def decode_batch(rows: np.ndarray) -> DecodedBatch:
        """Return row numbers, pixels and reasons of one batch, decoded if needed."""
        ready = source.prepared(rows)
        if ready is None:
            ready = decode_many(
                source.take(rows), size, threads or available_cpus(), how
            )
        return rows, *ready

    return prefetch_map(decode_batch, batches, 1, BATCHES_AHEAD)


def prefetch_map(
    function: Callable[[Any], Result], items: Iterable[Any], threads: int, depth: int
) -> Generator[Result, None, None]:
    """Apply a function to items in threads, ahead of the consumer.

    When the consumer closes the generator, or an error ends it, items that no thread
    has begun are dropped, and the threads are waited for. Each thread computes with one
    thread of PyTorch. Otherwise sixteen threads that resize images would start sixteen
    threads each, and wait for each other.

    Args:
        function: The function.
        items: Its arguments. They are taken in the thread of the consumer: up to
            ``depth`` + 1 when it asks for the first result, then one for each result.
        threads: Number of threads.
        depth: Largest number of further items that are computed, waiting or done while
            the consumer uses a result.

    Yields:
        The results, in the order of ``items``. An error of ``function`` is raised in
        place of its result, and ends the generator.
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


def map_images(
    images: Images, rows: np.ndarray, look: Callable[[Image], Result]
) -> Iterator[tuple[int, Result | BadImage]]:
    """Call ``look`` on the images of some rows, in 8 threads.

    Images that are stored together, such as in a tar shard, are read together.

    Args:
        images: The images of all rows.
        rows: Row numbers, int64 (n,).
        look: A function of an image, which may raise a BadImage.

    Yields:
        For each of ``rows`` its number and what ``look`` returned, or the BadImage that
        it raised. The rows may come in another order.

    Raises:
        ConfigError: A file that holds many images cannot be read. Other errors of
            ``look`` than a BadImage are raised, too.
    """

    def try_look(image: Image) -> Result | BadImage:
        """Call ``look`` on an image, and return the BadImage if it raises one."""
        try:
            return look(image)
        except BadImage as error:
            return error

    with ThreadPoolExecutor(LOOKERS, thread_name_prefix="uno-look") as pool:
        for numbers, some in pieces(images.take(rows)):
            content = some.read_images(np.arange(len(some)))
            found = pool.map(try_look, content)
            yield from zip(rows[numbers].tolist(), found, strict=True)


def ok_mask(reasons: Sequence[str | None]) -> np.ndarray:
    """Return which rows can be read, given the reasons of the others.

    Args:
        reasons: For each of N rows the reason why it cannot be read, or None.

    Returns:
        bool (N,), True for None.
    """
    return np.array([reason is None for reason in reasons], dtype=bool)


def read_header(image: Image) -> Header:
    """Read the format and size of an image without decoding its pixels.

    Only the first 64 KiB of a file are read, and the whole file if they do not give a
    valid header. That is so for larger WEBP files, and for some TIFF files.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).

    Returns:
        The format as Pillow names it ('pixels' for an array), and the width and height
        in pixels as they are stored, before the image is turned upright.

    Raises:
        BadImage: The image is missing or empty, the file or its header cannot be read,
            the format is none of :data:`FORMATS`, or the number of bytes, of pixels or
            of pixels per byte is beyond its limit; or an array does not hold pixels
            uint8 (H, W, 3).
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return Header("pixels", image.shape[1], image.shape[0])
    if isinstance(image, str):
        with _reader_errors(image), open_file(image) as file:
            size = file.size()
            first = file.read(min(size, HEADER_BYTES))
        with suppress(BadImage):
            return _header_of(_open(first, num_bytes=size))
    return _header_of(_open(read_encoded(image)))


def _header_of(picture: Pillow.Image) -> Header:
    """Return the format and the size of a picture that has been opened."""
    return Header(str(picture.format), *picture.size)


def inspect_image(image: Image) -> ImageFacts:
    """Decode an image, and return its format, size and brightness.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).

    Returns:
        The header with format and size, the largest value, a sample of the stored
        values of a gray image of more than 8 bits, and whether a TIFF has further
        pages. The largest value is that of the sample, but at least 0, in a gray image
        of more than 8 bits; otherwise that of the RGB pixels, 0 to 255, with
        transparent pixels on white. Of a JPEG these may be decoded at a smaller scale.

    Raises:
        BadImage: The image cannot be decoded, or an array does not hold pixels uint8
            (H, W, 3). Unlike in :func:`decode`, a gray image with floating-point
            values, or with values outside 0 to 65,535, raises none here.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        return ImageFacts(read_header(image), int(image.max()))
    data = read_encoded(image)
    picture = _open(data)
    header = _header_of(picture)
    has_pages = bool(getattr(getattr(picture, "tag_v2", None), "next", 0))
    if not _is_deep(picture):
        brightest = int(decode_rgb(data, BRIGHTNESS_SIDE)[..., :3].max())
        return ImageFacts(header, brightest, has_pages=has_pages)
    with _decoder_errors():
        stored = np.asarray(picture).ravel()
    some = stored[:: max(1, len(stored) // SAMPLED_VALUES)].astype(np.float64)
    deep_values = some[np.isfinite(some)]
    return ImageFacts(header, deep_values.max(initial=0), deep_values, has_pages)


def _is_deep(picture: Pillow.Image) -> bool:
    """Return whether a picture is gray with more than 8 bits (mode "I...", "F")."""
    return picture.mode.startswith(("I", "F"))


def _pixels(picture: Pillow.Image) -> np.ndarray:
    """Return the pixels of an RGB picture as an array, if possible without a copy.

    Returns:
        uint8 (H, W, 4) that shares the picture's memory and must not be written to. Its
        fourth channel is padding of Pillow without a meaning, not alpha. Or a copy
        uint8 (H, W, 3), if Pillow cannot share the memory as one piece.
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


def _load_rgb(image: Image, side: int, value_range: Range | None) -> Pillow.Image:
    """Decode an image to a picture in RGB that is upright.

    Transparent pixels are blended with white, but not in gray images of more than 8
    bits. An array is only checked and wrapped.

    Args:
        image: Encoded bytes, a path or URI, or RGB pixels uint8 (H, W, 3).
        side: The side in pixels of the square that is needed of the image. A JPEG may
            be decoded at a smaller scale that suffices for it.
        value_range: The stored values (low, high) that become 0 and 255, in gray images
            of more than 8 bits; None for 0 and 65535. Images of floating-point numbers,
            or with values outside 0 to 65535, then raise a BadImage.

    Raises:
        BadImage: The image cannot be used.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, np.ndarray):
        _check_array(image)
        return Pillow.fromarray(image)
    return _turn_to_rgb(_open(read_encoded(image), side), value_range)


def _turn_to_rgb(picture: Pillow.Image, value_range: Range | None) -> Pillow.Image:
    """Decode a picture, turn it as its EXIF orientation says, and convert it to RGB.

    Transparent pixels are blended with white, but not in gray pictures of more than 8
    bits. Pixels are turned before they are resized, because rounding depends on the
    order. The orientation is read after the pixels, because in a PNG it may stand
    behind them. A picture whose orientation cannot be read is not turned.

    Args:
        picture: An opened picture. It is decoded and turned in place, and returned
            itself if it is then in RGB and has no transparent color.
        value_range: The stored values (low, high) that become 0 and 255, in gray
            pictures of more than 8 bits. Values outside become 0 or 255. None for 0 and
            65535. Pictures of 8 bits are not scaled.

    Raises:
        BadImage: The pixels cannot be decoded. Or the picture is gray with more than 8
            bits, there is no range, and its values are floating-point numbers, or
            integers below 0 or above 65535.
    """
    with _decoder_errors():
        picture.load()
    with suppress(BadImage), _decoder_errors():
        ImageOps.exif_transpose(picture, in_place=True)
    return to_rgb(picture, value_range)


def _square(
    picture: Pillow.Image, size: int, interpolation: Interpolation
) -> np.ndarray:
    """Crop the centered square of an RGB picture and resize it with antialiasing.

    A picture that has the final size already is not resized.

    Args:
        picture: The picture, which is not changed.
        size: The side of the result in pixels.
        interpolation: The filter of the resizing, "bilinear" or "bicubic".

    Returns:
        uint8 (3, size, size), read-only.
    """
    if picture.size != (size, size):
        side = min(picture.size)
        left, top = ((length - side) / 2 for length in picture.size)
        box = (left, top, left + side, top + side)
        how = Pillow.Resampling[interpolation.upper()]
        picture = picture.resize((size, size), how, box=box)
    return np.asarray(picture).transpose(2, 0, 1)


def to_rgb(picture: Pillow.Image, value_range: Range | None = None) -> Pillow.Image:
    """Convert a picture of any mode to RGB.

    Transparent pixels are blended with white, but not in gray pictures of more than 8
    bits.

    Args:
        picture: The picture. It is returned itself if it is in RGB already and has no
            transparent color. Its pixels are decoded if they are not yet.
        value_range: The stored values (low, high) that become 0 and 255, in gray
            pictures of more than 8 bits. Values between them are scaled linearly, and
            values outside become 0 or 255. None for 0 and 65535. Pictures of 8 bits are
            not scaled.

    Raises:
        BadImage: The pixels cannot be decoded. Or the picture is gray with more than 8
            bits, there is no range, and its values are floating-point numbers, or
            integers below 0 or above 65535.
    """
    if _is_deep(picture):
        return _to_8_bits(picture, value_range).convert("RGB")
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


def _to_8_bits(picture: Pillow.Image, value_range: Range | None) -> Pillow.Image:
    """Scale the gray values of a picture of more than 8 bits to 0-255.

    Values within the range are scaled linearly and rounded down, values outside become
    0 or 255, and NaN becomes 0. The result is a new picture of Pillow's mode "L".

    Args:
        picture: The picture, in one of Pillow's modes "I", "I;16" (in any byte order)
            or "F".
        value_range: The stored values (low, high) that become 0 and 255; None for 0 and
            65535.

    Raises:
        BadImage: The pixels cannot be decoded. Or there is no range, and they are
            floating-point numbers, or integers below 0 or above 65535.
    """
    with _decoder_errors():
        stored = np.asarray(picture)
    low, high = value_range or (0.0, WHITE_16)
    if value_range is None:
        fix = "set --data.value-range LOW HIGH"
        if picture.mode == "F":
            raise BadImage(f"floating-point pixels have no fixed range; {fix}")
        if stored.min() < low or stored.max() > high:
            raise BadImage(f"32-bit pixels beyond 0-{WHITE_16}; {fix}")
    values = np.clip(np.nan_to_num(stored.astype(np.float64), nan=low), low, high)
    return Pillow.fromarray(((values - low) * 255 / (high - low)).astype(np.uint8))


def _open(
    data: bytes, side: int | None = None, num_bytes: int | None = None
) -> Pillow.Image:
    """Open an image and check its header.

    Args:
        data: Encoded bytes.
        side: The side in pixels that is needed. A JPEG may then be decoded at a smaller
            scale, see :data:`DRAFT`. None for full scale.
        num_bytes: The size of the whole image in bytes, if ``data`` are only its first
            bytes. None if ``data`` are the whole image.

    Returns:
        The picture (a ``PIL.Image.Image``), whose pixels are not decoded yet.

    Raises:
        BadImage: There are no bytes, the format is none of :data:`FORMATS`, the header
            is damaged, or the number of bytes, of pixels or of pixels per byte is
            beyond its limit.
    """
    num_bytes = len(data) if num_bytes is None else num_bytes
    if not 0 < num_bytes <= MAX_IMAGE_BYTES:
        text = f"larger than {MAX_IMAGE_BYTES} bytes" if num_bytes else "no image data"
        raise BadImage(text)
    if data[128:132] == b"DICM":
        raise BadImage(
            "a DICOM image; convert it to a 16-bit PNG, for example with dcmj2pnm +on2"
        )
    with _decoder_errors():
        picture = Pillow.open(BytesIO(data), formats=FORMATS)
    width, height = picture.size
    most = max(10**6, MAX_PIXELS_PER_BYTE * num_bytes)
    if picture.format == "BMP":
        most = MAX_BMP_PIXELS_PER_BYTE * num_bytes
    if not 0 < width * height <= MAX_IMAGE_PIXELS:
        raise BadImage(f"{width} x {height} pixels, not 1 to {MAX_IMAGE_PIXELS}")
    if width * height > most:
        raise BadImage(f"{width} x {height} pixels in {num_bytes} bytes")
    if side is not None and picture.format in JPEGS:
        with _decoder_errors():
            picture.draft(picture.mode, (DRAFT * side, DRAFT * side))
    return picture


def read_encoded(image: bytes | str) -> bytes:
    """Return the bytes of an encoded image, or read those of an image file.

    A file that is too large gives its first MAX_IMAGE_BYTES + 1 bytes.

    Args:
        image: Encoded bytes, or the path or URI of a file.

    Raises:
        BadImage: ``image`` is a :class:`~uno.data.images.MissingImage`, which stands
            for a row without an image, or the file cannot be read. Bytes that are empty
            are returned as they are.
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    if isinstance(image, MissingImage):
        raise BadImage(image.reason)
    if not isinstance(image, str):
        return bytes(image or b"")  # None: a null in a table
    with _reader_errors(image):
        return read_bytes(image, MAX_IMAGE_BYTES)


@contextmanager
def _decoder_errors() -> Iterator[None]:
    """Turn what Pillow raises in the ``with`` block into a BadImage.

    Damaged bytes lead Pillow's parsers to errors of almost any type. Therefore only
    calls of Pillow belong inside the ``with`` block, and no code of this project. A
    MemoryError is passed on, since it says nothing about the file, and so is an error
    of this project (:class:`~uno.errors.UnoError`), by which a signal stops the run.

    Raises:
        BadImage: Pillow cannot read the image.
    """
    try:
        yield
    except (MemoryError, UnoError):  # UnoError: a signal that interrupts the run
        raise
    except UnidentifiedImageError:
        raise BadImage(f"not a readable {', '.join(FORMATS)} image") from None
    except Exception as error:
        raise _bad_image(error) from None


@contextmanager
def _reader_errors(path: str) -> Iterator[None]:
    """Turn errors of reading a file in the ``with`` block into a BadImage.

    Only an OSError, ValueError or ArrowException is turned. If it says nothing about
    the file, it becomes a StorageError instead, because a later attempt may succeed.

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
        if getattr(error, "errno", None) in EXHAUSTED or is_transient(error):
            raise StorageError(f"cannot read {path}: {one_line(error)}") from None
        raise _bad_image(error) from None


def _bad_image(error: Exception) -> BadImage:
    """Return the BadImage for an error of reading or decoding an image.

    Its message has the text of the error on one line, at most 200 characters of it. The
    class of the error stands before it, unless the error is an OSError. Of an OSError
    with an error number the text is only the reason, such as "Permission denied".
    """
    if isinstance(error, OSError):
        return BadImage(one_line(error.strerror or error)[:200])
    return BadImage(f"{type(error).__name__}: {one_line(error)[:200]}")


def _check_array(image: np.ndarray) -> None:
    """Raise a BadImage unless an array holds pixels uint8 (H, W, 3), H and W not 0."""
    if (
        image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] != 3
        or not image.size
    ):
        raise BadImage(f"pixels are {image.dtype} {image.shape}, not uint8 (H, W, 3)")
