"""Define the interface to the images of any data source.

The module has the implementations for images in memory and in files. Images stay
encoded where they are stored until they are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
from torch import Tensor

from uno.data.columns import decimal
from uno.data.files import full_path, is_uri, stat_of, valid_text

Image = bytes | str | np.ndarray
"""Encoded bytes, a path or URI, or pixels uint8 (H, W, 3)."""
# Rows that are stored together count as sorted by class if a sample of whole groups has
# less than this share of the classes of a sample of single rows.
SORTED_SHARE = 0.9
EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".jfif",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".dcm",
)


class MissingImage(bytes):
    """Empty bytes in the place of the image of a row that has no image data.

    Args:
        reason: Why there is no image, and what to do.

    Attributes:
        reason: Why there is no image, and what to do. Decoding the image raises a
            :class:`~uno.data.decode.BadImage` with this text.
    """

    reason: str

    def __new__(cls, reason: str) -> Self:
        """Make an empty image with its reason."""
        image = super().__new__(cls)
        image.reason = reason
        return image


class Images(Protocol):
    """N images that are read by row number.

    The methods have defaults for images that are read one by one, and that are sent to
    another process themselves. Only ``__len__`` and :meth:`read_images` have none.
    """

    def __len__(self) -> int: ...

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Return the images of some rows, in that order.

        Images that are stored together, such as in a row group, are read once.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            n images: encoded bytes, a path or URI, or RGB pixels uint8 (H, W, 3). For
            an image in a file of its own the path is returned, and the file is not
            read, so a missing or unreadable file is noticed when it is decoded. A row
            without an image gives empty bytes or the path '', which decoding refuses. A
            source of embeddings returns an array float32 (D,) for each row, the
            embedding of its first view.

        Raises:
            ConfigError: A file that holds many images, such as a Parquet file or a tar
                shard, cannot be read.
        """
        ...

    def __getitem__(self, row: int) -> Image:
        return self.read_images(np.array([row]))[0]

    def take(self, rows: np.ndarray) -> ImageSubset:
        """Return only the images of some rows, in that order, numbered from 0.

        No image is read or copied.

        Args:
            rows: Row numbers, int64 (n,).
        """
        return ImageSubset(self, rows)

    def split(self, size: int) -> Iterator[Images]:
        """Yield all images in parts, one after the other.

        All images can be read in this way with little memory, however many there are,
        if each part is dropped before the next one is taken.

        Args:
            size: Number of images of each part; the last one may have fewer.

        Yields:
            :class:`Images` of consecutive rows, numbered from 0 in each part.
        """
        return self.split_rows(np.arange(len(self)), size)

    def split_rows(self, rows: np.ndarray, size: int) -> Iterator[Images]:
        """Yield the images of some rows in parts, in the order of ``rows``.

        Args:
            rows: Row numbers, int64 (n,).
            size: Number of images of each part; the last one may have fewer.

        Yields:
            :class:`Images` of the rows of each part, numbered from 0. By default they
            are read when :meth:`read_images` of the part is called. A source that
            stores images together may read them when the part is yielded.
        """
        for start in range(0, len(rows), size):
            yield self.take(rows[start : start + size])

    def groups(self, rows: np.ndarray) -> np.ndarray | None:
        """Return which rows are stored together.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            Integers (n,), one for each row: rows with equal numbers are stored in one
            group and are read together, for example the rows of a Parquet row group.
            None, the default, if each image counts as read by itself.
        """
        return None

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the stored size of each image in bytes.

        By default :meth:`read_images` is called to measure the images. A local file is
        then looked up, but not read. A URI is not looked up.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            int64 (n,): the bytes of the file, of the encoded image, or of the array of
            pixels; for an embedding the bytes of its first view. -1 for a missing file,
            and if a size is not known, which by default holds for every URI. For images
            in Parquet files it is about the mean compressed size in the row group.
        """
        images = self.read_images(rows)
        sizes = [
            stat_of(image)[0]
            if isinstance(image, str)
            else getattr(image, "nbytes", len(image))
            for image in images
        ]
        return np.array(sizes, np.int64)

    def content_keys(self, rows: np.ndarray) -> Iterable[bytes] | pa.Array:
        """Return what the fingerprint of a data set contains for each image.

        By default this is what :meth:`sizes` returns, as decimal text. A source of
        files does not use their paths, so that it keeps its fingerprint if it is moved.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            An Arrow array of n large strings. For images or embeddings in memory
            instead an iterable of n ``bytes``: the shape and the pixels of an image,
            its encoded bytes, its path if the item in memory is a path, or the numbers
            of all views of an embedding.
        """
        return decimal(self.sizes(rows))

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Return when the file that holds each image was last changed.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            int64 (n,), ns since 1970. 0, the default, for images in memory, for
            embeddings and for missing local files; -1 if the time is not known. Changes
            of images in memory and of embeddings are seen in :meth:`content_keys`.
        """
        return np.zeros(len(rows), np.int64)

    @property
    def is_remote(self) -> bool:
        """Whether reading any of the images takes requests to remote storage.

        By default this is False.
        """
        return False

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """Return the path of each image as text, or None if it is not a separate file.

        By default :meth:`read_images` is called for this, which reads images that are
        not in files of their own, and :func:`path_of` is called on the results. A
        source of embeddings returns the paths of the pictures of its rows.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            For each row the absolute path or the URI, or None. It is valid text: bytes
            of a path that are not UTF-8 are backslash escapes.
        """
        return [path_of(image) for image in self.read_images(rows)]

    def reader(self) -> Images | None:
        """Return a small object that reads the same images in another process.

        It can be pickled and sent to any node that reaches the same storage. It reads
        rows by the numbers that :meth:`numbers` returns.

        Returns:
            Images of the whole source. None, the default, if there is no such object,
            so that the images of the rows must be sent, see :func:`to_columns`.
        """
        return None

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Return the row numbers under which :meth:`reader` has some of these images.

        Args:
            rows: Row numbers in these images, int64 (n,).

        Returns:
            Row numbers in the images of :meth:`reader`, int64 (n,): by default ``rows``
            unchanged.
        """
        return rows

    def vectors(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]] | None:
        """Return the embeddings of rows, for a source that has no images to encode.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            Embeddings float32 (n, V, D) of V views, the evaluation view first, and for
            each row the reason why it has no valid embedding, or None. A row without a
            valid embedding has zeros. A single None, the default, for a source of
            images.
        """
        return None

    def pictures(self) -> Images | None:
        """Return the images that a report shows for the rows.

        Returns:
            Images of the same N rows: by default this object itself. None if a source
            of embeddings has no pictures of its rows.
        """
        return self

    def captions(self, rows: np.ndarray) -> list[str | None]:
        """Return the text that a report shows below the picture of each row.

        If a source has no pictures at all, a report shows this text in their place.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            n entries, None for a row without a text. By default no row has one.
        """
        return [None] * len(rows)

    def prepared(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]] | None:
        """Return decoded pixels or features of rows that are already in memory.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            Two values: decoded pixels uint8 (n, 3, S, S), features (n, D) of the run's
            frozen encoder, or the first view (n, D) of the embeddings of a source; and
            for each row the reason why it is unreadable, or None. S is the side of the
            decoded squares. A single None, the default, if none of these are in memory.
        """
        return None


def _delegate_method(name: str) -> Any:
    """Make a method of :class:`ImageSubset` that calls the method of its base images.

    Args:
        name: Name of a method of :class:`Images` that takes row numbers int64 (n,).

    Returns:
        A method with the argument ``rows``, row numbers of the subset. It translates
        them to those of the base images, and returns what their method returns.
    """
    return lambda self, rows: getattr(self.images, name)(self.index[rows])


@dataclass(frozen=True, eq=False)
class ImageSubset(Images):
    """Some rows of other images.

    Attributes:
        images: The base images that rows are chosen from.
        index: Row number in ``images`` of each chosen row, int64 (N,).
    """

    images: Images
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Return the images of some rows of the subset, in that order.

        Args:
            rows: Row numbers in the subset, int64 (n,).

        Returns:
            n images as the base images return them: encoded bytes, a path or URI, or
            pixels uint8 (H, W, 3); or an array float32 (D,) from a source of
            embeddings. For an image in a file of its own the path is returned, and the
            file is not read.

        Raises:
            ConfigError: A file that holds many images, such as a Parquet file or a tar
                shard, cannot be read.
        """
        return self.images.read_images(self.index[rows])

    def take(self, rows: np.ndarray) -> ImageSubset:
        """Return only the images of some rows, as another subset of the base images.

        Args:
            rows: Row numbers in this subset, int64 (n,). The images are in this order.
        """
        return ImageSubset(self.images, self.index[rows])

    def split_rows(self, rows: np.ndarray, size: int) -> Iterator[Images]:
        """Yield the images of some rows of the subset in parts, in their order.

        Args:
            rows: Row numbers in the subset, int64 (n,).
            size: Number of images of each part; the last one may have fewer.

        Yields:
            :class:`Images` of the rows of each part, numbered from 0, as the base
            images divide them. Images that are stored together may be read when the
            part is yielded, others when ``read_images`` of the part is called.
        """
        return self.images.split_rows(self.index[rows], size)

    groups = _delegate_method("groups")
    sizes = _delegate_method("sizes")
    content_keys = _delegate_method("content_keys")
    times = _delegate_method("times")
    paths = _delegate_method("paths")
    numbers = _delegate_method("numbers")
    vectors = _delegate_method("vectors")
    captions = _delegate_method("captions")
    prepared = _delegate_method("prepared")

    @property
    def is_remote(self) -> bool:
        """Whether any of the base images is remote, also one that is not chosen."""
        return self.images.is_remote

    def reader(self) -> Images | None:
        """Return an object that reads all base images in another process.

        Its row numbers are those that ``numbers`` returns, not those of the subset.
        None if there is no such object, so that the images themselves must be sent.
        """
        return self.images.reader()

    def pictures(self) -> Images | None:
        """Return the images that a report shows for the chosen rows.

        Returns:
            Images of these rows in their order, or None if the source has no images to
            show.
        """
        pictures = self.images.pictures()
        return None if pictures is None else pictures.take(self.index)


@dataclass(frozen=True, eq=False)
class InMemory(Images):
    """A list of images, or an array uint8 (N, H, W, 3).

    Attributes:
        items: The images. An item of a list may be encoded bytes, a path or URI, or
            pixels uint8 (H, W, 3).
    """

    items: Sequence[Any] | np.ndarray

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with absolute paths, for processes that run in another directory.

        URIs, and all items that are no paths, stay as they are.
        """
        if isinstance(self.items, np.ndarray):
            return InMemory, (self.items,)
        return InMemory, (
            [full_path(i) if isinstance(i, str) and i else i for i in self.items],
        )

    def __len__(self) -> int:
        return len(self.items)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Return the items of some rows int64 (n,), in that order, as they are.

        A path is returned for an image in a file, which is not read.
        """
        return [self.items[row] for row in rows.tolist()]

    def content_keys(self, rows: np.ndarray) -> Iterable[bytes]:
        """Return an iterator of bytes that identify each item of some rows int64 (n,).

        They are the encoded bytes, the path, or the shape and the pixels of an array.
        """
        return map(content_of, self.read_images(rows))

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Return when each item that is a file was last changed.

        The files are looked up now.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            int64 (n,), ns since 1970; 0 for an item that is no file or a missing one,
            and -1 for a URI.
        """
        if isinstance(self.items, np.ndarray):
            return np.zeros(len(rows), np.int64)
        items = self.read_images(rows)
        times = [stat_of(item)[1] if isinstance(item, str) else 0 for item in items]
        return np.array(times, np.int64)

    @property
    def is_remote(self) -> bool:
        """Whether any item is the URI of a file, so that reading takes a request."""
        if isinstance(self.items, np.ndarray):
            return False
        return any(isinstance(item, str) and is_uri(item) for item in self.items)


@dataclass(frozen=True, eq=False)
class Files(Images):
    """N images in files of their own.

    Attributes:
        column: The absolute path or the URI of each file as bytes, and b'' for a row
            without a file: an Arrow array (N,).
        stats: Size in bytes and modification time in ns since 1970 of each file, -1 if
            not known: int64 (N, 2). A missing file has the size -1 and the time 0.
    """

    column: Any
    stats: np.ndarray

    @classmethod
    def of(cls, paths: Sequence[str], stats: Iterable[Sequence[int]]) -> Files:
        """Make images from the paths of files. Local paths become absolute.

        No file is looked up.

        Args:
            paths: N paths and URIs; '' for a row without a file.
            stats: Size in bytes and modification time in ns since 1970 of each file, -1
                if not known. A missing file has the size -1 and the time 0.
        """
        full = [os.fsencode(path and full_path(path)) for path in paths]
        return cls(
            pa.array(full, pa.large_binary()),
            np.array([*stats], np.int64).reshape(-1, 2),
        )

    @classmethod
    def join(cls, parts: Sequence[Files]) -> Files:
        """Concatenate the files of one or more objects, in order."""
        return cls(
            pa.concat_arrays([p.column for p in parts]),
            np.concatenate([p.stats for p in parts]),
        )

    def __len__(self) -> int:
        return len(self.column)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Return the paths of some rows int64 (n,), '' for a row without a file.

        A path is absolute or a URI. Bytes of it that are not UTF-8 are surrogate
        escapes. The files are read when they are decoded. A missing file is noticed
        then.
        """
        return [
            os.fsdecode(path) for path in self.column.take(pa.array(rows)).to_pylist()
        ]

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the size of each file in bytes, from the attribute ``stats``.

        No file is looked up now.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            int64 (n,), -1 for a size that is not known and for a missing file.
        """
        return self.stats[rows, 0]

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Return when each file was last changed, from the attribute ``stats``.

        No file is looked up now.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            int64 (n,), ns since 1970; -1 if that is not known, 0 for a missing file.
        """
        return self.stats[rows, 1]

    @property
    def is_remote(self) -> bool:
        """Whether any file is given as a URI."""
        has_scheme = pa.compute.match_substring(self.column, b"://")
        return bool(pa.compute.any(has_scheme).as_py())


def as_images(images: Images | Sequence[Any] | np.ndarray) -> Images:
    """Wrap a list of images or an array uint8 (N, H, W, 3) as :class:`InMemory`.

    An item of a list may be encoded bytes, a path or URI, or pixels uint8 (H, W, 3).
    Nothing is checked or copied. An object that is :class:`Images` already is returned
    unchanged.
    """
    return InMemory(images) if isinstance(images, Sequence | np.ndarray) else images


def is_image(name: str) -> bool:
    """Return whether a file name or path ends like an image, such as .jpg or .PNG.

    The endings are .jpg, .jpeg, .jfif, .png, .webp, .bmp, .gif, .tif, .tiff and .dcm,
    in upper or lower case. No file is opened.
    """
    return name.lower().endswith(EXTENSIONS)


def evenly_spaced(num: int, total: int) -> np.ndarray:
    """Return evenly spaced row numbers, of which the first is 0.

    Args:
        num: How many row numbers to return at most.
        total: Number of rows.

    Returns:
        Different row numbers in ascending order, int64 (n,) with n = min(num, total):
        ``i * total // n`` for i from 0 to n - 1. They are all rows if num >= total.
    """
    num = min(num, total)
    return np.arange(num) * total // max(num, 1)


def with_every_class(chosen: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Add to a sample of rows the first row of each class that it lacks.

    Args:
        chosen: The rows of the sample, int64 (n,), ascending.
        labels: The class of each of all N rows, int64 (N,). Each different number is a
            class.

    Returns:
        The rows of the larger sample, int64, ascending.
    """
    classes, first = np.unique(labels, return_index=True)
    return np.union1d(chosen, first[~np.isin(classes, labels[chosen])])


def spread(
    images: Images,
    kinds: Sequence[np.ndarray],
    num: int,
    labels: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Choose a sample of rows that takes little reading. No image is read here.

    Rows that are read by themselves, or are in memory, are chosen evenly spaced: of
    each kind ``num``, or all if it has fewer. Of images that are stored together, whole
    groups are chosen evenly spaced, the same ones for all kinds of rows as far as they
    suffice; of a kind with more than ``num`` rows in them, evenly spaced ones are kept.
    If the groups are sorted by class, so that a few of them show few classes, single
    rows of all kinds are chosen evenly spaced after all. This is so if ``labels`` are
    given, and the rows of the first kind that were chosen by groups have less than 90 %
    (:data:`SORTED_SHARE`) of the number of classes of evenly spaced rows.

    Args:
        images: The images of all rows.
        kinds: Row numbers of each kind of rows, such as labeled and unlabeled ones:
            int64 (n,) each.
        num: Largest number of rows of each kind to choose. With ``labels`` the first
            kind may get more, see below.
        labels: Classes of the first kind's rows, int64 (n,). None if they are not
            known; groups are then not checked for being sorted by class, and a class
            may have no row in the sample.

    Returns:
        For each kind the positions of the chosen rows in its row numbers, ascending,
        int64. If a kind has no more than ``num`` rows, they are all. Of images that are
        stored together, they may be fewer than ``num``. If ``labels`` are given, the
        first row of each class that would have none is added to those of the first
        kind.
    """
    found = even = [evenly_spaced(num, len(rows)) for rows in kinds]
    none = np.arange(0)
    if images.groups(none) is not None and images.prepared(none) is None:
        found = _whole_groups(images, kinds, num)
    if labels is not None:
        in_groups, in_even = (len(np.unique(labels[rows[0]])) for rows in (found, even))
        if in_groups < SORTED_SHARE * in_even:
            found = even
        found[0] = with_every_class(found[0], labels)
    return found


def _whole_groups(
    images: Images, kinds: Sequence[np.ndarray], num: int
) -> list[np.ndarray]:
    """Choose positions of at most ``num`` rows of each kind, by whole groups.

    A kind of no more than ``num`` rows is chosen whole. For another kind with n rows,
    the share num / n of the groups that hold rows of it is chosen, evenly spaced. All
    kinds choose first among the same groups: of all groups the largest share of any
    kind, evenly spaced, where a kind that is chosen whole has the share 1. If too few
    of these groups hold rows of a kind, other groups of this kind are added. If its
    rows in the chosen groups are more than ``num``, evenly spaced ones of them are
    kept.

    Args:
        images: The images of all rows, which are stored in groups.
        kinds: Row numbers of each kind of rows, int64 (n,) each.
        num: Largest number of rows of each kind to choose.

    Returns:
        For each kind the positions of the chosen rows in its row numbers, ascending,
        int64. They may be fewer than ``num``.
    """
    groups = [cast(np.ndarray, images.groups(rows)) for rows in kinds]
    numbers = np.unique(np.concatenate(groups))
    shares = [num / max(num, len(rows)) for rows in kinds]
    common = numbers[evenly_spaced(math.ceil(max(shares) * len(numbers)), len(numbers))]
    found = []
    for rows, own, share in zip(kinds, groups, shares, strict=True):
        if share == 1:
            found.append(evenly_spaced(num, len(rows)))
            continue
        stored = np.unique(own)
        wanted = math.ceil(share * len(stored))
        shared, others = np.intersect1d(stored, common), np.setdiff1d(stored, common)
        chosen = np.union1d(
            shared[evenly_spaced(wanted, len(shared))],
            others[evenly_spaced(max(0, wanted - len(shared)), len(others))],
        )
        inside = np.flatnonzero(np.isin(own, chosen))
        found.append(inside[evenly_spaced(num, len(inside))])
    return found


def batches_of(images: Images, rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Divide rows into batches for reading.

    Args:
        images: The images of all rows.
        rows: Row numbers, int64 (n,).
        size: Largest number of rows of a batch.

    Returns:
        Positions in ``rows`` of each batch, int64: consecutive ones, and over all
        batches each position once. Consecutive rows that are stored together are in one
        batch, unless they are more than ``size``, so a batch may be smaller. Rows that
        are not stored in groups are divided into batches of ``size`` and a rest. No
        batch if there are no rows.
    """
    groups, start, cuts = images.groups(rows), 0, list[int]()
    ends = np.arange(0) if groups is None else np.flatnonzero(np.diff(groups)) + 1
    while len(rows) - start > size:
        last = int(np.searchsorted(ends, start + size, side="right")) - 1
        cut = int(ends[last]) if last >= 0 else 0
        start = cut if cut > start else start + size
        cuts.append(start)
    return np.split(np.arange(len(rows)), cuts) if len(rows) else []


def content_of(image: Image) -> bytes:
    """Return bytes that identify an image.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).

    Returns:
        The shape and the pixels of an array, the encoded bytes, or the path as bytes.
        The file of a path is not read.
    """
    if isinstance(image, np.ndarray):
        return str(image.shape).encode() + image.tobytes()
    return os.fsencode(image)


def path_of(image: Image) -> str | None:
    """Return the full path of an image in a file as valid text.

    Bytes of the path that are not UTF-8 become backslash escapes.

    Args:
        image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).

    Returns:
        The absolute path or the URI; None if the image is not in a file, or the path is
        ''.
    """
    return valid_text(full_path(image)) if isinstance(image, str) and image else None


def name_row(name: str, path: str | None) -> str:
    """Return the text by which messages name a row.

    Args:
        name: The id of the row.
        path: The path of its image; None if it is not in a file.

    Returns:
        The id, followed by the path in parentheses if it is not None. The path is left
        out if it ends with '/' and the id, or with '/' and the id without its first
        folder (the rows of two folders have ids such as 'labeled/cat/1.jpg').
    """
    _, has_folder, tail = name.partition("/")
    endings = (f"/{name}", f"/{tail}") if has_folder else (f"/{name}",)
    return name if path is None or path.endswith(endings) else f"{name} ({path})"


def to_columns(images: Images, rows: np.ndarray) -> dict[str, Any]:
    """Convert images to Arrow columns, to send them to another process.

    Args:
        images: The images of all rows.
        rows: Row numbers to send, int64 (n,).

    Returns:
        Arrow arrays of n values by name. If :meth:`Images.reader` returns an object,
        which reads the images in the other process, the only column 'number' has row
        numbers for it, and nothing is read here. Otherwise :meth:`Images.read_images`
        is called, 'image' has bytes, and 'shape' says what they are: the shape of
        pixels uint8, an empty list for a full path or URI (which need not be valid
        UTF-8), or null for an encoded image. The file of a path is not read.

    Raises:
        ConfigError: A file that holds many images cannot be read.
    """
    if images.reader() is not None:
        return {"number": pa.array(images.numbers(rows))}
    data, shapes = list[bytes](), list[list[int] | None]()
    for image in images.read_images(rows):
        if isinstance(image, np.ndarray):
            data.append(image.tobytes())
            shapes.append(list(image.shape))
        elif isinstance(image, str):
            data.append(os.fsencode(image and full_path(image)))
            shapes.append([])
        else:
            data.append(image)
            shapes.append(None)
    return {
        "image": pa.array(data, pa.large_binary()),
        "shape": pa.array(shapes, pa.list_(pa.int32())),
    }


def from_columns(block: pa.Table, reader: Images | None) -> list[Image]:
    """Return the images that :func:`to_columns` sent.

    Args:
        block: A table with the columns that :func:`to_columns` returns: 'number', or
            'image' and 'shape'.
        reader: The result of :meth:`Images.reader` of the images that were sent. It is
            None if the images themselves were sent, in 'image' and 'shape'.

    Returns:
        The images in the order of the table: encoded bytes, full paths or URIs, or
        pixels uint8 (H, W, 3). Without a ``reader`` arrays of pixels cannot be written
        to. With a ``reader`` its ``read_images`` is called now.

    Raises:
        ConfigError: The ``reader`` cannot read a file that holds many images.
    """
    if reader is not None:
        return reader.read_images(block["number"].to_numpy())
    images = list[Image]()
    for data, shape in zip(
        block["image"].to_pylist(), block["shape"].to_pylist(), strict=True
    ):
        if shape is None:
            images.append(data)
        elif shape:
            images.append(np.frombuffer(data, np.uint8).reshape(shape))
        else:
            images.append(os.fsdecode(data))
    return images
