"""What is only to be predicted: N rows in order, of which nothing is kept but how to
find them. A partition of them is read where it is worked on, in this process or on any
node, some rows at a time.

Tables and folders of any size are read so; what a run was trained on is in memory
anyway.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from uno.config import DataConfig
from uno.data.files import FileEntry, files_below, valid_text
from uno.data.image_paths import PathRules
from uno.data.images import Files, Images, InMemory, is_image
from uno.data.rows import Partition, Rows
from uno.data.sources import UnreadImages, locate_source, read_images, read_rows
from uno.data.tables import ParquetTable
from uno.errors import ConfigError

GROUP_ROWS = 512  # batches end where a group does, however many groups a partition has
NUM_PARTITIONS = 256  # that there are at least, where there are enough rows
MAX_GROUPS = 32  # of a partition: 16,384 rows


class Inputs(Protocol):
    """N rows to predict. ``fingerprint`` tells one source from another, ``times``
    whether it was written to since; ``source`` leads any node from row numbers to
    images, None where these are in the parts; ``first`` shows their kind; ``warnings``
    say which images are left out.
    """

    fingerprint: str
    times: str
    source: Any = None
    first: Images = InMemory([])
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int: ...

    def parts(self, numbers: Iterable[np.ndarray]) -> Iterator[Partition]:
        """The partitions with the row ``numbers`` (n,), which grow from one to the
        next.
        """
        ...

    def read(
        self, part: Partition, sizes: Iterable[int]
    ) -> Iterator[tuple[pa.Array, Images]]:
        """Ids and images of a part, ``sizes`` rows at a time."""
        return split_batches(part, sizes)


Read = Callable[[Partition, Iterable[int]], Iterator[tuple[pa.Array, Images]]]
"""What :meth:`Inputs.read` is."""


def partition_rows(num_rows: int) -> int:
    """Of all partitions of ``num_rows`` but the last: whole groups, more of them the
    more rows there are.
    """
    return GROUP_ROWS * min(
        max(num_rows // (GROUP_ROWS * NUM_PARTITIONS), 1), MAX_GROUPS
    )


def batch_sizes(first: int, num_rows: int, batch_rows: int) -> list[int]:
    """How rows from ``first`` on are cut into batches: at most ``batch_rows``, and
    never across groups.
    """
    sizes, row, end = list[int](), first, first + num_rows
    while row < end:
        sizes.append(min(batch_rows, GROUP_ROWS - row % GROUP_ROWS, end - row))
        row += sizes[-1]
    return sizes


def chunk_rows(part_rows: int, max_rows: int) -> int:
    """Rows that are decoded at once, at most ``max_rows``: groups that divide a
    partition, else a power of two. They divide ``part_rows`` and hold whole batches of
    a power of two.
    """
    if max_rows < GROUP_ROWS:
        return int(2 ** (max_rows.bit_length() - 1))
    groups = range(1, max_rows // GROUP_ROWS + 1)
    return GROUP_ROWS * max(
        num for num in groups if part_rows % (num * GROUP_ROWS) == 0
    )


def open_inputs(config: DataConfig) -> Inputs:
    """Every image of a folder, every row of a table, labeled or not. ConfigError: it
    cannot be read.
    """
    kind, path = (
        ("folders", "") if config.labeled is not None else locate_source(config)
    )
    if kind == "parquet":
        return ParquetTable(path, config.named_columns, PathRules.of(config))
    if kind in ("folder", "classes", "splits", "imagenet"):
        return ImageFolder(path, config.follow_links)
    return RowInputs(read_rows(config, images_only=True))


def split_batches(
    part: Partition, sizes: Iterable[int]
) -> Iterator[tuple[pa.Array, Images]]:
    """A part whose images are in it, ``sizes`` rows at a time."""
    start = 0
    assert part.ids is not None and part.images is not None
    for size in sizes:
        yield (
            part.ids[start : start + size],
            part.images.take(np.arange(start, start + size)),
        )
        start += size


class RowInputs(Inputs):
    """Rows in memory."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.fingerprint, self.source = (
            rows,
            rows.fingerprint,
            rows.images.reader(),
        )
        self.times = hashlib.sha256(
            rows.images.times(np.arange(len(rows))).tobytes()
        ).hexdigest()
        self.first = rows.images.take(np.arange(min(len(rows), 1)))
        self.warnings = rows.warnings

    def __len__(self) -> int:
        return len(self.rows)

    def parts(self, numbers: Iterable[np.ndarray]) -> Iterator[Partition]:
        """As of :class:`Inputs`; images are not copied."""
        for rows in numbers:
            ids = pa.array(self.rows.ids.take(rows), pa.string())
            yield Partition(rows, ids, self.rows.images.take(rows))


class ImageFolder(Inputs):
    """Every image below ``root``; names of folders mean nothing. It is listed once to
    count, and again, in step with the work, for the paths: of a folder of any size the
    next partition is in memory.
    """

    def __init__(self, root: str, follow_links: bool = False) -> None:
        self._follow_links = follow_links
        self._root, self._num, digest, times = (
            root,
            0,
            hashlib.sha256(),
            hashlib.sha256(),
        )
        unread = UnreadImages()
        for found in self._listed(digest, unread):
            self._num += 1
            times.update(found.time.to_bytes(8, "little", signed=True))
        if not self._num:
            read_images(root, follow_links)  # which says what is there instead
        self.fingerprint, self.times = digest.hexdigest(), times.hexdigest()
        self.warnings = unread.warnings(root)

    def __len__(self) -> int:
        return self._num

    def parts(self, numbers: Iterable[np.ndarray]) -> Iterator[Partition]:
        """As of :class:`Inputs`. ConfigError, at the end: files came, went or
        changed.
        """
        digest = hashlib.sha256()
        listed, at = self._listed(digest), 0
        for rows in numbers:
            own = list[FileEntry]()
            for row in rows.tolist():
                own += islice(listed, row - at, row - at + 1)
                at = row + 1
            if len(own) == len(rows):
                ids = pa.array([valid_text(f.relative) for f in own], pa.string())
                yield Partition(
                    rows, ids, Files.of([f.path for f in own], [f[2:4] for f in own])
                )
        deque(listed, maxlen=0)
        if digest.hexdigest() != self.fingerprint:
            raise ConfigError(
                f"images below {self._root} have changed meanwhile; repeat it with a"
                " new --output"
            )

    def _listed(
        self, digest: Any, unread: UnreadImages | None = None
    ) -> Iterator[FileEntry]:
        for found in files_below(self._root, self._follow_links):
            if is_image(found.relative):
                digest.update(
                    f"{found.size} {found.relative}\0".encode(errors="surrogateescape")
                )
                yield found
            elif unread is not None:
                unread.count(found.relative)


class EvenSample(Inputs):
    """``num`` rows of others, evenly spaced, under the fingerprint of all."""

    def __init__(self, inputs: Inputs, num: int) -> None:
        self._inputs, self._num = inputs, num
        self.fingerprint, self.source, self.first = (
            inputs.fingerprint,
            inputs.source,
            inputs.first,
        )
        self.times, self.warnings = inputs.times, inputs.warnings

    def __len__(self) -> int:
        return self._num

    def parts(self, numbers: Iterable[np.ndarray]) -> Iterator[Partition]:
        """As of :class:`Inputs`."""
        return self._inputs.parts(
            rows * len(self._inputs) // self._num for rows in numbers
        )

    def read(
        self, part: Partition, sizes: Iterable[int]
    ) -> Iterator[tuple[pa.Array, Images]]:
        """As of :class:`Inputs`."""
        return self._inputs.read(part, sizes)
