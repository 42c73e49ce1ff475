"""Read Parquet files: their footers, their columns and the images that they hold."""

from __future__ import annotations

import posixpath
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset
import pyarrow.parquet

from uno.data import files as filesystem
from uno.data.columns import ROWS_AT_ONCE
from uno.data.image_paths import ImagePaths
from uno.data.images import Image, Images, InMemory, MissingImage
from uno.data.other_formats import hint_of_files
from uno.data.rows import DEFAULT_OPTIONS, SPLITS, ReadOptions
from uno.errors import ConfigError, one_line
from uno.limits import MAX_TABLE_BYTES
from uno.text import plural

# The file that uno.data.pack writes beside its shards, and its key in their metadata.
PACKING, PACKED = "pack.json", "uno"
FOOTERS = 16  # the number of footers that are read at once
VERIFIED = pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
# Rows of a row group that are read at a time for predictions, and the size in bytes of
# the buffer for that.
READ_ROWS, READ_BYTES = 512, 2**20
RECENT_GROUPS = 2  # row groups that are kept in memory after a part of them was read
REQUEST_BYTES = 64 * 2**20  # the most bytes of a remote file that are read in one piece
WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # an int64 without leading zeros
VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Arrow's newer types of text and bytes -> the types that they are cast to."""
TEXT, BINARY = (pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())


def values_in(column: Any) -> Iterator[Any]:
    """Yield the values of an Arrow column as Python objects.

    Only ``ROWS_AT_ONCE`` of them are converted at a time, to save memory.
    """
    starts = range(0, len(column), ROWS_AT_ONCE)
    return chain.from_iterable(
        column.slice(start, ROWS_AT_ONCE).to_pylist() for start in starts
    )


def parquet_files(
    path: str, follow_links: bool = False
) -> tuple[str, list[filesystem.FileEntry]]:
    """Find the Parquet files of a source.

    Args:
        path: Path or URI of a Parquet file, or of a folder.
        follow_links: Whether links may lead out of the folder.

    Returns:
        The folder that holds them all; and the files, with paths relative to it.

    Raises:
        ConfigError: There are no Parquet files, or the folder is an unfinished pack.
    """
    if filesystem.kind(path) == "file":
        root, name = filesystem.split(path)
        file = filesystem.FileEntry(name, path, *filesystem.stat_of(path))
        return root, filesystem.with_remote_facts([file])
    found = list(filesystem.walk(path, follow_links))
    files = [f for f in found if f.relative.endswith(".parquet")]
    packs = (
        filesystem.read_text(f.path, MAX_TABLE_BYTES)
        for f in found
        if f.relative == PACKING
    )
    if any(json_at(pack, "finished") is False for pack in packs):
        raise ConfigError(
            f"parquet:{path} is an unfinished pack; run the same uno data pack command"
            " again"
        )
    if not files:
        raise ConfigError(
            f"no *.parquet files below {path}{hint_of_files(f.relative for f in found)}"
        )
    return path, files


class ParquetImages(Images):
    """The images of a column in Parquet files, read when a row is needed.

    A row group is read as a whole. The object keeps the footers of its files, and the
    row groups that were last read in part. A pickled copy reads them again.

    Args:
        root: Folder that image paths in the column are relative to.
        files: Path or URI of each file.
        column: Name of the column: bytes or struct<bytes, path>.
        stats: Size in bytes and time of the last change in ns of each file, -1 where
            they are not known. A known size saves a request.
        options: How the source is read.
        opened: The files, if their footers are already read.
    """

    def __init__(
        self,
        root: str,
        files: Sequence[str],
        column: str,
        stats: Sequence[Sequence[int]],
        options: ReadOptions = DEFAULT_OPTIONS,
        opened: Sequence[OpenedParquet] | None = None,
    ) -> None:
        """Read the footers of the files, unless they are given."""
        self.root, self.column, self._options = root, column, options
        self._files = [(file, stat[0]) for file, stat in zip(files, stats, strict=True)]
        if opened is None:
            with ThreadPoolExecutor(FOOTERS) as pool:
                opened = list(pool.map(lambda file: OpenedParquet(*file), self._files))
        self._start_caches(opened)
        groups = [
            (at, file, g)
            for at, file in enumerate(opened)
            for g in range(file.metadata.num_row_groups)
        ]
        self._groups = [(at, g) for at, _, g in groups]
        self._starts = np.cumsum(
            [0, *(file.metadata.row_group(g).num_rows for _, file, g in groups)]
        )
        self._bytes = np.array(
            [file.column_bytes(g, [column]) for _, file, g in groups], np.int64
        )
        num_groups = [file.metadata.num_row_groups for file in opened]
        self._times = np.repeat([stat[1] for stat in stats], num_groups).astype(
            np.int64
        )
        without_bytes = [file.rows_without_bytes(column) for file in opened]
        self._names_files = any(least for least, _ in without_bytes)
        self._may_name_files = any(most for _, most in without_bytes)

    def _start_caches(self, opened: Sequence[OpenedParquet | None]) -> None:
        """Set the footers of the files, and start with no row group in memory.

        Args:
            opened: Each file with its footer, None if the footer is still to be read.
        """
        self._opened, self._lock = [*opened], threading.Lock()
        self._recent = OrderedDict[int, Future[Any]]()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: no footers and no images."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_opened", "_lock", "_recent")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled copy, which reads the footers of its files when needed."""
        self.__dict__.update(state)
        self._start_caches([None] * len(self._files))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Return the images of ``rows``, int64 (n,), in that order.

        Every row group is read once. If only some of its rows are needed, the row group
        is kept for the next call.
        """
        groups, found = self.groups(rows), [b""] * len(rows)  # type: np.ndarray, list[Image]
        inside = ImagePaths(self.root, self._options).find
        for group in map(int, np.unique(groups)):
            at, first = np.flatnonzero(groups == group), int(self._starts[group])
            if len(at) == self._starts[group + 1] - first:
                column = self._read_group(group)
            else:
                column = self._recent_group(group)
            images = _images_in(column.take(pa.array(rows[at] - first)), inside)
            for i, image in zip(at.tolist(), images, strict=True):
                found[i] = image
        return found

    def _read_group(self, group: int) -> Any:
        """Read the image column of a row group.

        Args:
            group: Number of the row group, counted over all files.

        Returns:
            An Arrow array.
        """
        file, number = self._find_group(group)
        return file.read([self.column], number)[self.column].combine_chunks()

    def _find_group(self, group: int) -> tuple[OpenedParquet, int]:
        """Return the file of a row group, and the number of the row group in it.

        Args:
            group: Number of the row group, counted over all files.
        """
        at, number = self._groups[group]
        file = self._opened[at]
        if file is None:  # two threads may read the same footer, which does no harm
            file = self._opened[at] = OpenedParquet(*self._files[at])
        return file, number

    def split_rows(self, rows: np.ndarray, size: int) -> Iterator[Images]:
        """Yield the images of some rows in parts.

        A row group is read a few hundred rows at a time if ``rows`` ascend, so that
        it may be larger than the memory.

        Args:
            rows: Row numbers, int64 (n,).
            size: Number of images of each part but the last.
        """
        if (np.diff(rows) < 0).any():
            yield from super().split_rows(rows, size)
            return
        images, inside = list[Image](), ImagePaths(self.root, self._options).find
        for column in self._scan(rows):
            images += _images_in(column, inside)
            while len(images) >= size:
                yield InMemory(images[:size])
                del images[:size]
        if images:
            yield InMemory(images)

    def _scan(self, rows: np.ndarray) -> Iterator[Any]:
        """Yield the image column of some rows, a few hundred rows at a time.

        Args:
            rows: Row numbers in ascending order, int64 (n,).
        """
        groups = self.groups(rows)
        for group in np.unique(groups).tolist():
            file, number = self._find_group(group)
            wanted, start = rows[groups == group] - self._starts[group], 0
            for batch in file.batches([self.column], number):
                inside = (wanted >= start) & (wanted < start + len(batch))
                if inside.any():
                    yield batch[self.column].take(pa.array(wanted[inside] - start))
                start += len(batch)
                if start > wanted[-1]:
                    break

    def _recent_group(self, group: int) -> Any:
        """Return the image column of a row group and keep it for the next calls.

        Threads that want the same row group wait for one read. Reads of different row
        groups run at the same time: the lock is not held during a read. The
        :data:`RECENT_GROUPS` row groups that were used last are kept.

        Args:
            group: Number of the row group, counted over all files.

        Returns:
            An Arrow array.
        """
        with self._lock:
            future = self._recent.get(group)
            is_reader = future is None
            if future is None:
                future = self._recent[group] = Future()
            self._recent.move_to_end(group)
            while len(self._recent) > RECENT_GROUPS:
                self._recent.popitem(last=False)
        if is_reader:
            try:
                future.set_result(self._read_group(group))
            except BaseException as error:
                with self._lock:
                    if self._recent.get(group) is future:
                        del self._recent[group]  # the next call tries again
                future.set_exception(error)
        return future.result()

    def groups(self, rows: np.ndarray) -> np.ndarray:
        """Return the row group that each row is stored in.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            Numbers of row groups, counted over all files, int32 (n,).
        """
        found = np.searchsorted(self._starts, rows, side="right").astype(np.int32)
        found -= 1
        return found

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the approximate size of each image in bytes.

        The stored bytes of the column in a row group are divided evenly among its rows,
        so that the sizes of all its rows add up to them.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            int64 (n,).
        """
        groups = self.groups(rows)
        number, total, num = (
            rows - self._starts[groups],
            self._bytes[groups],
            np.diff(self._starts)[groups],
        )
        return (number + 1) * total // num - number * total // num

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Return when the file of each image was last changed.

        If the statistics of the files say that rows have a path in place of bytes, the
        time is that of the Parquet file or of the image file, whichever is later.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            ns since 1970, int64 (n,).
        """
        times = self._times[self.groups(rows)]
        if not self._names_files:
            return times
        parts = self.split_rows(rows, READ_ROWS)
        of_files = [part.times(np.arange(len(part))) for part in parts]
        return np.maximum(times, np.concatenate([times[:0], *of_files]))

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """Return the path of each image, None if the column holds its bytes.

        Nothing is read if no row has a path in place of bytes.

        Args:
            rows: Row numbers, int64 (n,).
        """
        return super().paths(rows) if self._may_name_files else [None] * len(rows)

    @property
    def is_remote(self) -> bool:
        """Whether the Parquet files are in remote storage."""
        return any(filesystem.is_uri(path) for path, _ in self._files)

    def reader(self) -> ParquetImages:
        """Return this object, because any node can read the files."""
        return self


class OpenedParquet:
    """A Parquet file with its footer in memory.

    Checksums of pages are verified. If the size of a remote file is known, its footer
    is read with one request, and so is the column of a row group.

    Args:
        path: Path or URI of the file.
        size: Its size in bytes, -1 if not known.

    Attributes:
        path: Path or URI of the file.
        metadata: The footer, a ``pyarrow.parquet.FileMetaData``.
        schema: The Arrow schema.

    Raises:
        ConfigError: The file cannot be read, is no Parquet file, or its footer
            contradicts itself.
    """

    def __init__(self, path: str, size: int) -> None:
        """Read the footer of the file, and check that its row counts agree."""
        self.path = path
        with self.errors():
            files, inner = filesystem.locate(path)
            if filesystem.is_uri(path):
                format = pyarrow.dataset.ParquetFileFormat(
                    default_fragment_scan_options=VERIFIED
                )
                known = None if size < 0 else size
                self._fragment = format.make_fragment(
                    inner, filesystem=files, file_size=known
                )
                self.metadata, self.schema = (
                    self._fragment.metadata,
                    self._fragment.physical_schema,
                )
            else:  # the name of a local file need not be valid text
                with self._open() as file:
                    self.metadata, self.schema = file.metadata, file.schema_arrow
        groups = [
            self.metadata.row_group(g).num_rows
            for g in range(self.metadata.num_row_groups)
        ]
        num = self.metadata.num_rows
        if sum(groups) != num or min(groups, default=0) < 0:
            raise ConfigError(
                f"{path}: its row groups have {plural(sum(groups), 'row')}, {num:,} by"
                " its footer"
            )

    def read(self, columns: Sequence[str], group: int | None = None) -> Any:
        """Read some columns.

        Args:
            columns: Names of the columns.
            group: Number of the row group to read, None for the whole file.

        Returns:
            An Arrow table. It is validated, so its text is UTF-8.

        Raises:
            ConfigError: The file is damaged or cannot be read.
        """
        with self.errors("Parquet file" if group is None else f"row group {group} of"):
            if filesystem.is_uri(self.path):
                wanted = (
                    self._fragment
                    if group is None
                    else self._fragment.subset(row_group_ids=[group])
                )
                table = wanted.to_table(columns=columns, use_threads=False)
            else:
                with self._open(self.metadata) as file:
                    table = (
                        file.read(columns)
                        if group is None
                        else file.read_row_group(group, columns)
                    )
            table.validate(full=True)
            table = without_views(table)
        if table.num_columns:
            self._require_rows(len(table), group)
        return table

    def _require_rows(self, num: int, group: int | None) -> None:
        """Check the number of rows that were read.

        Args:
            num: The number of rows.
            group: The row group that they were read from, None for the whole file.

        Raises:
            ConfigError: The footer says another number.
        """
        counted = (
            self.metadata.num_rows
            if group is None
            else self.metadata.row_group(group).num_rows
        )
        if num != counted:
            raise ConfigError(
                f"{self.path}: its columns have {plural(num, 'row')}, {counted:,} by"
                " its footer"
            )

    def column_bytes(self, group: int, columns: Sequence[str]) -> int:
        """Return the stored size of some columns in a row group, in bytes.

        Args:
            group: Number of the row group.
            columns: Names of the columns.
        """
        row_group = self.metadata.row_group(group)
        chunks = (row_group.column(i) for i in range(row_group.num_columns))
        with self.errors(f"row group {group} of"):
            own = (c for c in chunks if c.path_in_schema.split(".")[0] in columns)
            return sum(c.total_compressed_size for c in own)

    def rows_without_bytes(self, column: str) -> tuple[int, int]:
        """Return how many rows have no bytes, by the statistics of the file.

        Args:
            column: Name of a column struct<bytes, path>. Both numbers are 0 for a
                column of another type.

        Returns:
            The least and the largest number of such rows. They differ if the file has
            no statistics.
        """
        least = most = 0
        with self.errors():
            for number in range(self.metadata.num_row_groups):
                group = self.metadata.row_group(number)
                for chunk in map(group.column, range(group.num_columns)):
                    if chunk.path_in_schema == f"{column}.bytes":
                        found = chunk.statistics
                        is_known = found is not None and found.has_null_count
                        least += found.null_count if is_known else 0
                        most += found.null_count if is_known else group.num_rows
        return least, most

    def batches(self, columns: Sequence[str], group: int) -> Iterator[Any]:
        """Yield some columns of a row group, at most :data:`READ_ROWS` rows at a time.

        A remote row group of at most :data:`REQUEST_BYTES` is read in one piece. A
        larger one and a local one are read page by page, to save memory.

        Args:
            columns: Names of the columns.
            group: Number of the row group in the file.

        Yields:
            Arrow record batches.

        Raises:
            ConfigError: The file is damaged or cannot be read.
        """
        if (
            filesystem.is_uri(self.path)
            and self.column_bytes(group, columns) <= REQUEST_BYTES
        ):
            yield from self.read(columns, group).to_batches(READ_ROWS)
            return
        num = 0
        with (
            self.errors(f"row group {group} of"),
            self._open(self.metadata, READ_BYTES) as file,
        ):
            for batch in file.iter_batches(READ_ROWS, [group], columns):
                batch.validate(full=True)
                num += len(batch)
                yield without_views(batch)
        self._require_rows(num, group)

    @contextmanager
    def _open(self, metadata: Any = None, buffer: int = 0) -> Iterator[Any]:
        """Open the file as a ``pyarrow.parquet.ParquetFile`` for a ``with`` block.

        Args:
            metadata: The footer, if it is already read.
            buffer: Size in bytes of the buffer for reads, 0 for none.
        """
        options = {
            "metadata": metadata,
            "page_checksum_verification": True,
            "buffer_size": buffer,
        }
        with (
            filesystem.open_file(self.path) as file,
            pa.parquet.ParquetFile(file, **options) as parquet,
        ):
            yield parquet

    def errors(self, what: str = "Parquet file") -> AbstractContextManager[None]:
        """Return a context in which errors of reading become ConfigErrors.

        Args:
            what: What is read, for the error message.
        """
        return filesystem.reading(f"{what} {self.path}")


def _images_in(column: Any, inside: Callable[[str], str | None]) -> list[Image]:
    """Return the images of an Arrow column: bytes, or else paths.

    Args:
        column: Arrow array of bytes, text or struct<bytes, path>.
        inside: Returns the full path of a relative one, None if it is no file that may
            be read.

    Returns:
        Bytes or the full path of each row. A row without either has an empty image; in
        a column of structs the image also says why.
    """
    column = column.cast(plain_type(column.type))
    if column.type in BINARY:
        return [value or b"" for value in column.to_pylist()]
    if column.type in TEXT:
        return [(path and inside(path)) or "" for path in column.to_pylist()]
    values = pa.compute.struct_field(column, "bytes").to_pylist()
    paths = (
        pa.compute.struct_field(column, "path").to_pylist()
        if "path" in column.type.names
        else values
    )
    return [
        value or (path and inside(path)) or MissingImage(_without_image(path))
        for value, path in zip(values, paths, strict=True)
    ]


def _without_image(path: str | bytes | None) -> str:
    """Return the reason why a row has no image, and what to do, for messages.

    Args:
        path: The path of the row in a column struct<bytes, path>, if it has one.
    """
    fix = "embed the bytes of the image, or delete the row"
    if not path:
        return f"no image data: it has neither bytes nor a path; {fix}"
    name = path.decode(errors="replace") if isinstance(path, bytes) else path
    where = f"its path {one_line(name)[:200]} is no file in the data folder"
    return f"no image data: it has no bytes, and {where}; {fix}"


def partition_columns(
    files: Sequence[filesystem.FileEntry],
) -> list[dict[str, str | int | None]]:
    """Return the columns that the folders of each file stand for, by hive partitioning.

    A folder ``split=test`` stands for a column ``split`` with the value ``test`` in
    every row below it. Values are unquoted (``a%20b``), and
    ``__HIVE_DEFAULT_PARTITION__`` is null. The values of a column become int if all
    files have whole numbers there.

    Args:
        files: The files, with paths relative to the folder that is the source.

    Returns:
        Column name -> value, for each file.

    Raises:
        ConfigError: Two folders of one path have the same name, or are not UTF-8.
    """
    found = [_hive_values(filesystem.valid_text(file.relative)) for file in files]
    for name in {name for values in found for name in values}:
        texts = [values[name] for values in found if name in values]
        if all(text is None or WHOLE.fullmatch(str(text)) for text in texts):
            for values in found:
                if (text := values.get(name)) is not None:
                    values[name] = int(text)
    return found


def _hive_values(relative: str) -> dict[str, str | int | None]:
    """Return the name and value of each folder NAME=VALUE in a file's path.

    Raises:
        ConfigError: Two folders have the same name, or one cannot be parsed.
    """
    folder = posixpath.dirname(relative)
    pairs = [part for part in folder.split("/") if part.find("=") > 0]
    if not pairs:
        return {}
    names = [unquote(pair.partition("=")[0]) for pair in pairs]
    if len(set(names)) < len(names):
        raise ConfigError(f"{relative}: two of its folders name one column; rename one")
    with filesystem.reading(relative):
        columns = pa.schema([(name, pa.string()) for name in names])
        expression = pyarrow.dataset.HivePartitioning(columns).parse(
            "/".join([*pairs, ""])
        )
        return dict(pyarrow.dataset.get_partition_keys(expression))


def is_training(name: str) -> bool:
    """Return whether the rows of a file are for training, by its name.

    Args:
        name: Relative path, such as train-0-of-4.parquet or test/0000.parquet.

    Returns:
        False if the first word of the file's name, or else the name of its folder,
        names test or validation.
    """
    words = [
        posixpath.basename(name).removesuffix(".parquet").split("-")[0],
        *name.split("/")[-2:-1],
    ]
    return next((SPLITS[word] for word in words if word in SPLITS), "train") == "train"


def json_at(text: str | bytes, *names: str) -> Any:
    """Return a value inside a JSON document.

    Args:
        text: The JSON text.
        *names: The keys that lead to the value, from the outermost object on.

    Returns:
        The value, None if there is none or the text is no JSON.
    """
    try:
        value = filesystem.parse_json(text)
        for name in names:
            value = value[name]
        return value
    except (ValueError, KeyError, TypeError):
        return None


def plain_type(kind: Any) -> Any:
    """Return the Arrow type that a column has without dictionary encoding and views.

    Args:
        kind: An Arrow type. For a dictionary, the type of its values is used. A view of
            text or bytes becomes large text or bytes.
    """
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return VIEWS.get(kind, kind)


def without_views(table: Any) -> Any:
    """Cast the columns of an Arrow table or batch that have a view type.

    View types are Arrow's newer types of text and bytes, see :data:`VIEWS`. Other
    columns stay as they are.
    """
    for i, field in enumerate(table.schema):
        if field.type in VIEWS:
            kind = VIEWS[field.type]
            table = table.set_column(
                i, pa.field(field.name, kind), table.column(i).cast(kind)
            )
    return table


def check_images(source: str, kind: Any) -> None:
    """Check that a column can hold images.

    Args:
        source: The source, as the error message names it.
        kind: The Arrow type of the column.

    Raises:
        ConfigError: The type is neither bytes nor text nor a struct with bytes.
    """
    kind = plain_type(kind)
    fields = (
        {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    )
    if kind not in (*TEXT, *BINARY) and fields.get("bytes") not in BINARY:
        fix = (
            "; store each image encoded, as PNG or JPEG"
            if pa.types.is_list(kind)
            else ""
        )
        raise ConfigError(
            f"{source}: images must be bytes, paths or struct<bytes, path>, not"
            f" {kind}{fix}"
        )
