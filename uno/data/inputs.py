"""Read the images of a prediction, a partition of the rows at a time.

The rows are numbered from 0 to N - 1. Only what is needed to find the images of a row
is kept in memory. A partition is some of the rows in ascending order, and its images
are read in the process that works on it, which may run on another node. So tables and
folders of any size can be predicted. Sources of other kinds are read as for training:
their rows are in memory, and their images are read when they are needed.
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

GROUP_ROWS = 512  # rows of a group; a batch never has rows of two groups
NUM_PARTITIONS = 256  # least number of partitions of a source with enough rows
MAX_GROUPS = 32  # largest number of groups in a partition: 16,384 rows


class Inputs(Protocol):
    """N rows to predict, whose images are read partition by partition.

    Attributes:
        fingerprint: Hash that tells one source from another, such as a hash of names
            and sizes of files.
        times: Hash of the modification times of the source's files. It changes if the
            source is written to.
        source: Object that reads images by row number on any node; it is sent there.
            None if images are sent with each partition.
        first: The first image, or no image, which shows the kind of the images.
        warnings: Lines for the user about images of the source that are left out.
    """

    fingerprint: str
    times: str
    source: Any = None
    first: Images = InMemory([])
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int: ...

    def parts(self, numbers: Iterable[np.ndarray]) -> Iterator[Partition]:
        """Yield the partitions of the rows.

        Args:
            numbers: Row numbers of each partition, int64 (n,). They ascend within a
                partition and from one partition to the next.
        """
        ...

    def read(
        self, part: Partition, sizes: Iterable[int]
    ) -> Iterator[tuple[pa.Array, Images]]:
        """Yield the ids and images of a partition in batches.

        Args:
            part: A partition that :meth:`parts` yielded.
            sizes: Numbers of rows of the batches, in order. Their sum is at most the
                number of rows of the partition.

        Yields:
            For each batch an Arrow array of its ids as text, and its images.
        """
        return split_batches(part, sizes)


Read = Callable[[Partition, Iterable[int]], Iterator[tuple[pa.Array, Images]]]
"""A function with the parameters and result of :meth:`Inputs.read`."""


def partition_rows(num_rows: int) -> int:
    """Return how many rows each partition but the last has.

    Args:
        num_rows: Number of rows of the source.

    Returns:
        A multiple of :data:`GROUP_ROWS`, at most :data:`MAX_GROUPS` times that. It
        grows with ``num_rows`` once there are enough rows for :data:`NUM_PARTITIONS`
        partitions.
    """
    return GROUP_ROWS * min(
        max(num_rows // (GROUP_ROWS * NUM_PARTITIONS), 1), MAX_GROUPS
    )


def batch_sizes(first: int, num_rows: int, batch_rows: int) -> list[int]:
    """Return the sizes of the batches into which consecutive rows are cut.

    A batch has at most ``batch_rows`` rows, and all of its rows are in the same group
    of :data:`GROUP_ROWS` rows.

    Args:
        first: Number of the first row, counted from the start of the source.
        num_rows: Number of rows to cut.
        batch_rows: Largest number of rows of a batch.
    """
    sizes, row, end = list[int](), first, first + num_rows
    while row < end:
        sizes.append(min(batch_rows, GROUP_ROWS - row % GROUP_ROWS, end - row))
        row += sizes[-1]
    return sizes


def chunk_rows(part_rows: int, max_rows: int) -> int:
    """Return how many rows of a partition are decoded at once.

    The number divides the rows of a partition, so that its chunks have equal size.

    Args:
        part_rows: Rows of a partition, as :func:`partition_rows` returns them.
        max_rows: Largest number of rows to return, at least 1.

    Returns:
        If ``max_rows`` is below :data:`GROUP_ROWS`, the largest power of two that is
        not above it. Otherwise the largest multiple of :data:`GROUP_ROWS` that is not
        above it and divides ``part_rows``.
    """
    if max_rows < GROUP_ROWS:
        return int(2 ** (max_rows.bit_length() - 1))
    groups = range(1, max_rows // GROUP_ROWS + 1)
    return GROUP_ROWS * max(
        num for num in groups if part_rows % (num * GROUP_ROWS) == 0
    )


def open_inputs(config: DataConfig) -> Inputs:
    """Open the images that a configuration names for prediction.

    Every row of the source is predicted, with or without a label. Parquet files and
    folders are read while they are predicted; other sources are read here.

    Raises:
        ConfigError: The source cannot be read.
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
    """Yield the ids and images of a partition that contains them, in batches.

    Args:
        part: A partition with ids and images.
        sizes: Numbers of rows of the batches, in order.
    """
    start = 0
    assert part.ids is not None and part.images is not None
    for size in sizes:
        yield (
            part.ids[start : start + size],
            part.images.take(np.arange(start, start + size)),
        )
        start += size


class RowInputs(Inputs):
    """Rows of a source that has been read, with all their ids in memory.

    Args:
        rows: The rows.
    """

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
        """Yield partitions with ids and images. The images are not read or copied here.

        Args:
            numbers: Row numbers of each partition, int64 (n,), ascending.
        """
        for rows in numbers:
            ids = pa.array(self.rows.ids.take(rows), pa.string())
            yield Partition(rows, ids, self.rows.images.take(rows))


class ImageFolder(Inputs):
    """Every image below a folder, whatever the names of its subfolders are.

    The folder is listed twice: once to count the images, and again while they are
    predicted. The paths of only one partition are in memory, so the folder may have any
    size.

    Args:
        root: Local folder or URI.
        follow_links: Whether a link may lead out of a local folder.

    Raises:
        ConfigError: There is no image below the folder, or it cannot be listed.
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
            read_images(root, follow_links)  # raises an error that says what is there
        self.fingerprint, self.times = digest.hexdigest(), times.hexdigest()
        self.warnings = unread.warnings(root)

    def __len__(self) -> int:
        return self._num

    def parts(self, numbers: Iterable[np.ndarray]) -> Iterator[Partition]:
        """Yield partitions with ids and images. The images are not read here.

        The ids are the paths below the folder. A partition is left out if the second
        listing ends before its last row.

        Args:
            numbers: Row numbers of each partition, int64 (n,). They ascend within a
                partition and from one partition to the next.

        Raises:
            ConfigError: After the last partition, if names or sizes of images are not
                those of the first listing.
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
        """Yield the image files below the folder, in the order of their paths.

        Args:
            digest: Hash object that is updated with the size and path of each image.
            unread: Counts images in a format that is not read; None to ignore them.
        """
        for found in files_below(self._root, self._follow_links):
            if is_image(found.relative):
                digest.update(
                    f"{found.size} {found.relative}\0".encode(errors="surrogateescape")
                )
                yield found
            elif unread is not None:
                unread.count(found.relative)


class EvenSample(Inputs):
    """Evenly spaced rows of other inputs, with the fingerprint of all of their rows.

    Args:
        inputs: The inputs to sample from.
        num: Number of rows of the sample, at most that of ``inputs``.
    """

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
        """Yield partitions of the sampled rows.

        The row numbers of a partition are those of all rows, not those of the sample.

        Args:
            numbers: Row numbers in the sample of each partition, int64 (n,). They
                ascend within a partition and from one partition to the next.
        """
        return self._inputs.parts(
            rows * len(self._inputs) // self._num for rows in numbers
        )

    def read(
        self, part: Partition, sizes: Iterable[int]
    ) -> Iterator[tuple[pa.Array, Images]]:
        """Yield the ids and images of a partition in batches.

        Args:
            part: A partition that :meth:`parts` yielded.
            sizes: Numbers of rows of the batches, in order.
        """
        return self._inputs.read(part, sizes)
