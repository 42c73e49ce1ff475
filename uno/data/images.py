"""Images of any source, asked in one way: how many there are, how to read some, which
are read together, what tells them apart, and what has been made of them. A source is
one class that answers.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch
from torch import Tensor

from uno.data.columns import decimal
from uno.data.files import full_path, is_uri, stat_of, valid_text
from uno.data.row_blocks import RowBlocks

Image = bytes | str | np.ndarray
"""Encoded bytes, a path or URI, or uint8 pixels (H,W,3)."""
# of the classes that evenly spaced rows show: groups that show fewer are sorted
SORTED_SHARE = 0.9
log = logging.getLogger(__name__)
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
)


class MissingImage(bytes):
    """Empty image data of a row that names no readable image.

    Attributes:
        reason: Why there is no image, and what to do.
    """

    reason: str

    def __new__(cls, reason: str) -> Self:
        """Make an empty image with its reason."""
        image = super().__new__(cls)
        image.reason = reason
        return image


class Images(Protocol):
    """N images, left where they are until somebody fetches them. Below is what holds
    where a class does not say otherwise: each is read by itself, and travels to another
    process as it is.
    """

    def __len__(self) -> int: ...

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """The images of ``rows`` int64 (n,), in that order; what is read together is
        read once.
        """
        ...

    def __getitem__(self, row: int) -> Image:
        return self.read_images(np.array([row]))[0]

    def take(self, rows: np.ndarray) -> ImageSubset:
        """Only ``rows`` int64 (n,), in that order; nothing is read or copied."""
        return ImageSubset(self, rows)

    def groups(self, rows: np.ndarray) -> np.ndarray | None:
        """Integers (n,): rows of one number are read together. None: each is read by
        itself.
        """
        return None

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """int64 (n,): stored bytes of each image, -1: not known; a mean where they
        are read together.
        """
        found = self.read_images(rows)
        return np.fromiter(
            (getattr(image, "nbytes", len(image)) for image in found),
            np.int64,
            len(found),
        )

    def content_keys(self, rows: np.ndarray) -> Iterable[bytes] | pa.Array:
        """What the fingerprint of a data set has of each row: its content; or what
        stands for it unread, an Arrow array of large strings of less than 256 bytes.
        """
        return map(content_of, self.read_images(rows))

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Return int64 (n,): when the file that holds each image was last changed.

        In ns since 1970; -1 if that is not known. 0 for images in memory:
        :meth:`content_keys` have all of their content.
        """
        return np.zeros(len(rows), np.int64)

    @property
    def is_remote(self) -> bool:
        """Whether reading the images takes requests to remote storage."""
        return False

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """The path of each image as text, None where it is not a file of its own."""
        return [path_of(image) for image in self.read_images(rows)]

    def lines(self, rows: np.ndarray) -> list[int | None]:
        """Return the line on which each image stands in a table of text, or None."""
        return [None] * len(rows)

    def reader(self) -> Images | None:
        """What reads them on any node from :meth:`numbers`; None: images travel
        themselves.
        """
        return None

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """int64 (n,): what ``rows`` are called by :meth:`reader`."""
        return rows

    def vectors(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]] | None:
        """Features float32 (n, V, D) that came in the place of images, the evaluation
        view first, and why a row has none. None: there are images, which are to be
        encoded.
        """
        return None

    def pictures(self) -> Images | None:
        """What people are shown of each row; None: nothing."""
        return self

    def captions(self, rows: np.ndarray) -> list[str | None]:
        """What stands below the pictures of ``rows``, or in their place."""
        return [None] * len(rows)

    def prepared(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]] | None:
        """What has been made of ``rows`` already, and why a row has none: pixels uint8
        (n,3,S,S), or features (n,D) of the run's frozen encoder. None: they have to be
        decoded.
        """
        return None


class Ready(NamedTuple):
    """What has been made of images: ``values`` of N rows, and why a row has none."""

    values: RowBlocks
    reasons: Sequence[str | None]


def _of_others(name: str) -> Any:
    """A method of :class:`ImageSubset`: what the images it is taken from say of its
    rows.
    """
    return lambda self, rows: getattr(self.images, name)(self.index[rows])


@dataclass(frozen=True, eq=False)
class ImageSubset(Images):
    """Rows ``index`` int64 (N,) of other images, maybe with what has been made of
    them.
    """

    images: Images
    index: np.ndarray
    ready: Ready | None = None

    def __len__(self) -> int:
        return len(self.index)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Those of the others, as all that follows."""
        return self.images.read_images(self.index[rows])

    def __getitem__(self, row: int) -> Image:
        return self.images[int(self.index[row])]

    def take(self, rows: np.ndarray) -> ImageSubset:
        """Never a choice of a choice."""
        ready = self.ready
        if ready is not None:
            reasons = [
                ready.reasons[row] for row in np.arange(len(self))[rows].tolist()
            ]
            ready = Ready(ready.values.select_rows(torch.tensor(rows)), reasons)
        return ImageSubset(self.images, self.index[rows], ready)

    groups, sizes, content_keys, times, paths, lines, numbers, vectors, captions = map(
        _of_others,
        (
            "groups",
            "sizes",
            "content_keys",
            "times",
            "paths",
            "lines",
            "numbers",
            "vectors",
            "captions",
        ),
    )

    @property
    def is_remote(self) -> bool:
        """Whether the images that the rows are taken from are remote."""
        return self.images.is_remote

    def reader(self) -> Images | None:
        """That of the others."""
        return self.images.reader()

    def pictures(self) -> Images | None:
        """As of the others."""
        found = self.images.pictures()
        return None if found is None else found.take(self.index)

    def prepared(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]] | None:
        """Of what is ready, or as of the others."""
        if self.ready is None:
            return self.images.prepared(self.index[rows])
        return self.ready.values[torch.tensor(rows)], [
            self.ready.reasons[row] for row in rows.tolist()
        ]


@dataclass(frozen=True, eq=False)
class InMemory(Images):
    """A list of images, or an array uint8 (N,H,W,3)."""

    items: Sequence[Any] | np.ndarray

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which may run in another directory."""
        if isinstance(self.items, np.ndarray):
            return InMemory, (self.items,)
        return InMemory, (
            [full_path(i) if isinstance(i, str) and i else i for i in self.items],
        )

    def __len__(self) -> int:
        return len(self.items)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """They are here."""
        return [self.items[row] for row in rows.tolist()]

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Those of the files among the items."""
        found = np.zeros(len(rows), np.int64)
        if not isinstance(self.items, np.ndarray):
            for place, item in enumerate(self.read_images(rows)):
                found[place] = stat_of(item)[1] if isinstance(item, str) else 0
        return found

    @property
    def is_remote(self) -> bool:
        """Whether any image is given as a URI."""
        if isinstance(self.items, np.ndarray):
            return False
        return any(isinstance(item, str) and is_uri(item) for item in self.items)


@dataclass(frozen=True, eq=False)
class Files(Images):
    """Paths and URIs as bytes in one Arrow column, which processes share; ``stats``
    int64 (N, 2): size and time of the last change in ns, -1: not known.

    ``line_numbers`` int64 (N,): the line of each file in a table of text.
    """

    column: Any
    stats: np.ndarray
    line_numbers: np.ndarray | None = None

    @classmethod
    def of(cls, paths: Sequence[str], stats: Iterable[Sequence[int]]) -> Files:
        """Local paths become absolute; '' stays, a file that is not there."""
        full = [os.fsencode(path and full_path(path)) for path in paths]
        return cls(
            pa.array(full, pa.large_binary()),
            np.array([*stats], np.int64).reshape(-1, 2),
        )

    @classmethod
    def join(cls, parts: Sequence[Files]) -> Files:
        """One after the other."""
        return cls(
            pa.concat_arrays([p.column for p in parts]),
            np.concatenate([p.stats for p in parts]),
        )

    def __len__(self) -> int:
        return len(self.column)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Paths: whoever decodes a file reads it."""
        return [
            os.fsdecode(path) for path in self.column.take(pa.array(rows)).to_pylist()
        ]

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Those of the files."""
        return self.stats[rows, 0]

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Those of the files."""
        return self.stats[rows, 1]

    def content_keys(self, rows: np.ndarray) -> pa.Array:
        """Sizes: a moved data set is the same one."""
        return decimal(self.sizes(rows))

    @property
    def is_remote(self) -> bool:
        """Whether any file is given as a URI."""
        found = pa.compute.match_substring(self.column, b"://")
        return bool(pa.compute.any(found).as_py())

    def lines(self, rows: np.ndarray) -> list[int | None]:
        """Return the line of each file in a table of text, or None."""
        return (
            super().lines(rows)
            if self.line_numbers is None
            else self.line_numbers[rows].tolist()
        )


def as_images(images: Images | Sequence[Any] | np.ndarray) -> Images:
    """A list, or an array uint8 (N,H,W,3), as :class:`InMemory`; images as they are."""
    return InMemory(images) if isinstance(images, Sequence | np.ndarray) else images


def with_ready(
    images: Images, values: RowBlocks, reasons: Sequence[str | None]
) -> Images:
    """``images`` with what has been made of all N: pixels uint8 (N,3,S,S) or
    features (N,D).
    """
    return replace(images.take(np.arange(len(images))), ready=Ready(values, reasons))


def is_image(name: str) -> bool:
    """Whether a file's name ends as that of an image."""
    return name.lower().endswith(EXTENSIONS)


def evenly_spaced(num: int, total: int) -> np.ndarray:
    """int64 (min(num, total),): that many row numbers of ``total``, evenly spaced."""
    num = min(num, total)
    return np.arange(num) * total // max(num, 1)


def spread(
    images: Images,
    kinds: Sequence[np.ndarray],
    num: int,
    labels: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Which at most ``num`` of each kind's rows, int64 (n,) each, to look at: evenly
    spaced ones, or where images are read together all rows of evenly spaced groups, the
    same for all kinds as far as they suffice. ``labels`` (n,) of the first kind's rows:
    where groups are sorted by class, of which a few show a few classes, single rows
    after all.
    """
    even = [evenly_spaced(num, len(rows)) for rows in kinds]
    if images.groups(np.arange(0)) is None or images.prepared(np.arange(0)) is not None:
        return even
    found = _whole_groups(images, kinds, num)
    if labels is not None:
        shown, (all_shown, first) = (
            np.unique(labels[found[0]]),
            np.unique(labels[even[0]], return_index=True),
        )
        if len(shown) < SORTED_SHARE * len(all_shown):
            log.warning(
                "images are sorted by class: for each that is looked at, all stored"
                " with it are read"
            )
            return even
        lacking = first[~np.isin(all_shown, shown)]
        if len(lacking) <= (1 - SORTED_SHARE) * len(all_shown):  # rare ones
            found[0] = np.union1d(found[0], even[0][lacking])
    return found


def _whole_groups(
    images: Images, kinds: Sequence[np.ndarray], num: int
) -> list[np.ndarray]:
    groups = [cast(np.ndarray, images.groups(rows)) for rows in kinds]
    numbers = np.unique(np.concatenate(groups))
    shares = [num / max(num, len(rows)) for rows in kinds]
    most = numbers[evenly_spaced(math.ceil(max(shares) * len(numbers)), len(numbers))]
    found = []
    for rows, own, share in zip(kinds, groups, shares, strict=True):
        if share == 1:
            found.append(evenly_spaced(num, len(rows)))
            continue
        chosen = most[evenly_spaced(math.ceil(share * len(numbers)), len(most))]
        inside = np.flatnonzero(np.isin(own, chosen))
        found.append(inside[evenly_spaced(num, len(inside))])
    return found


def batches_of(images: Images, rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Positions in ``rows`` int64 (n,), at most ``size`` at a time; a group that
    fits is in one batch.
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
    """What tells images apart: pixels and their shape, bytes, or a path."""
    if isinstance(image, np.ndarray):
        return str(image.shape).encode() + image.tobytes()
    return os.fsencode(image)


def path_of(image: Image) -> str | None:
    """The path of an image that is a file, as text."""
    return valid_text(full_path(image)) if isinstance(image, str) and image else None


def row_names(ids: Sequence[str], images: Images, rows: Sequence[int]) -> list[str]:
    """Return what people are told about rows: the id, and the file if the id does not
    name it.

    Args:
        ids: The ids of N rows.
        images: The images of the N rows.
        rows: Numbers of the rows to name.

    Returns:
        For each of ``rows`` a text such as 'row-7' or 'row-7 (/photos/a.jpg, line 9)'.
    """
    numbers = np.array(rows, np.int64)
    names = [str(ids[row]) for row in rows]
    places = zip(names, images.paths(numbers), images.lines(numbers), strict=True)
    return [name_row(name, path, line) for name, path, line in places]


def name_row(name: str, path: str | None, line: int | None) -> str:
    """Return an id with the path and line of its image, unless the path ends with
    the id.
    """
    if path is not None and line is None:
        # ids of two folders begin with labeled/ or unlabeled/
        tail = name.partition("/")[2]
        if path.endswith(f"/{name}") or (tail and path.endswith(f"/{tail}")):
            return name
    place = [path] if path else []
    place += [f"line {line}"] if line is not None else []
    return f"{name} ({', '.join(place)})" if place else name


def to_columns(images: Images, rows: np.ndarray) -> dict[str, Any]:
    """How ``rows`` int64 (n,) travel to another process: numbers for
    :meth:`Images.reader`; else bytes, whose ``shape`` is that of pixels, empty for a
    full path (which need not be text), null for an encoded image.
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
    """The images of :func:`to_columns`, in another process."""
    if reader is not None:
        return reader.read_images(block["number"].to_numpy())
    found = list[Image]()
    for data, shape in zip(
        block["image"].to_pylist(), block["shape"].to_pylist(), strict=True
    ):
        if shape is None:
            found.append(data)
        else:
            found.append(
                np.frombuffer(data, np.uint8).reshape(shape)
                if shape
                else os.fsdecode(data)
            )
    return found
