"""Read Parquet files: their footers, their columns and the images that they hold."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from uno.data import files as filesystem
from uno.data.columns import ROWS_AT_ONCE
from uno.data.images import Image, Images, InMemory, MissingImage
from uno.data.other_formats import hint_of_files
from uno.errors import ConfigError, one_line
from uno.limits import MAX_TABLE_BYTES
from uno.text import plural

# The file that uno.data.pack writes beside its shards, and its key in their metadata.
PACKING, PACKED = "pack.json", "uno"
FOOTERS = 16  # the number of footers that are read at once
READ_ROWS = 512  # rows of a row group that are read at a time for predictions
READ_BYTES = {False: 2**20, True: 2**23}
"""Whether a file is remote -> the number of bytes that are read at once for that."""
LARGE_GROUP_BYTES = 2**30  # a row group of images that may not fit into one Arrow array
RECENT_GROUPS = 2  # row groups that are kept in memory after a part of them was read
VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Arrow's newer types of text and bytes -> the types that they are cast to."""
TEXT, BINARY = (pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())


def values_in(column: Any) -> Iterator[Any]:
    """Yield the values of an Arrow column as Python objects, None for a null.

    Only ``ROWS_AT_ONCE`` (8192) of them are converted at a time, to save memory.

    Args:
        column: An Arrow array or chunked array of any type.
    """
    starts = range(0, len(column), ROWS_AT_ONCE)
    return chain.from_iterable(
        column.slice(start, ROWS_AT_ONCE).to_pylist() for start in starts
    )


def parquet_files(
    path: str, follow_links: bool = False
) -> tuple[str, list[filesystem.FileEntry]]:
    """Find the Parquet files of a source.

    Names decide, and no Parquet file is opened. In a folder, ``pack.json`` directly in
    it is read, if it is there.

    Args:
        path: Path or URI of a Parquet file, whatever its ending, or of a folder. In a
            folder, the files with the ending ``.parquet`` (in lower case) at any depth
            are found, except hidden ones.
        follow_links: Whether links may lead out of the folder.

    Returns:
        The folder that holds them all: ``path``, or for a single file the folder that
        the file is in; and the files in the order of their paths. Each has its path
        relative to that folder, the path or URI with which it can be opened (a local
        one may be relative to the current directory), its size in bytes and its
        modification time in ns since 1970. Size and time are looked up for remote
        files, too; a time that the storage does not tell is -1.

    Raises:
        ConfigError: ``path`` is missing, is a folder without Parquet files, or is an
            unfinished pack: ``pack.json`` directly in it has ``finished`` false. Also
            if a folder or ``pack.json`` cannot be read, the storage cannot be reached,
            a link leads out of the folder and ``follow_links`` is False, or there are
            more than MAX_ROWS (100 million) files of any kind.
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
            f"no *.parquet files below {path}{hint_of_files(f.path for f in found)}"
        )
    return path, files


class ParquetImages(Images):
    """The images of a column in Parquet files, read when a row is needed.

    :meth:`read_images` reads row groups as a whole, and keeps in memory the column of
    the two of which it last needed only some rows. :meth:`split_rows` can read them in
    smaller pieces. A pickled copy begins without row groups in memory.

    Args:
        shards: The files, whose footers are read if they were not read before.
        column: Name of the column: bytes or struct<bytes, path>. Its values may be
            dictionary encoded.
        times: When each file was last changed, ns since 1970, -1 where it is not known.

    Raises:
        ConfigError: The footer of a file is damaged or cannot be read.
    """

    def __init__(
        self, shards: Sequence[ParquetShard], column: str, times: Sequence[int]
    ) -> None:
        self.shards, self.column = shards, column
        self._groups = [
            (shard, number)
            for shard in shards
            for number in range(shard.metadata.num_row_groups)
        ]
        rows = [shard.metadata.row_group(g).num_rows for shard, g in self._groups]
        self._starts = np.cumsum([0, *rows])
        stored = [shard.column_bytes(g, column) for shard, g in self._groups]
        self._bytes = np.array(stored, np.int64)
        num_groups = [shard.metadata.num_row_groups for shard in shards]
        self._times = np.repeat(np.array(times, np.int64), num_groups)
        self._forget_groups()

    def _forget_groups(self) -> None:
        """Set up a new lock and an empty cache of row groups.

        This is done when the object is made, and when it is unpickled.
        """
        self._lock = threading.Lock()
        self._recent = OrderedDict[int, Future[Any]]()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: all attributes but the lock and the row groups.

        Row groups that are kept in memory are not pickled.
        """
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_lock", "_recent")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled copy, with a new lock and no row groups in memory."""
        self.__dict__.update(state)
        self._forget_groups()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Return the images of some rows, in that order, as encoded bytes.

        Every row group is read at most once in a call. If only some of its rows are
        needed, it is kept for later calls, or taken from memory if an earlier call kept
        it; the two such row groups that were used last are kept. A row group from
        which as many rows are asked for as it has, repeated ones counted again, is read
        from its file in any case, and not kept.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            n images as encoded bytes, empty for a row without bytes. In a column
            struct<bytes, path> such an image is a
            :class:`~uno.data.images.MissingImage`: empty bytes with an attribute
            ``reason``, a text that says why there is no image.

        Raises:
            ConfigError: A file is damaged or cannot be read.
        """
        groups, found = self.groups(rows), [b""] * len(rows)  # type: np.ndarray, list[Image]
        for group in map(int, np.unique(groups)):
            at, first = np.flatnonzero(groups == group), int(self._starts[group])
            if len(at) == self._starts[group + 1] - first:
                column = self._read_group(group)
            else:
                column = self._recent_group(group)
            images = _images_in(column.take(pa.array(rows[at] - first)))
            for i, image in zip(at.tolist(), images, strict=True):
                found[i] = image
        return found

    def _read_group(self, group: int) -> Any:
        """Read the image column of a row group from its file, without the cache.

        Args:
            group: Number of the row group, counted over all files.

        Returns:
            An Arrow array of bytes or struct<bytes, path>. It has the column's type,
            which may be dictionary encoded. For a large row group it is a plain type
            with offsets of 64 bits instead.

        Raises:
            ConfigError: The file is damaged or cannot be read.
        """
        shard, number = self._groups[group]
        size = shard.column_bytes(number, self.column, uncompressed=True)
        if size < LARGE_GROUP_BYTES:
            return shard.read([self.column], number)[self.column].combine_chunks()
        parts = [batch.column(0) for batch in shard.batches(self.column, number)]
        kind = _with_long_offsets(plain_type(parts[0].type))
        return pa.concat_arrays([part.cast(kind) for part in parts])

    def split_rows(self, rows: np.ndarray, size: int) -> Iterator[Images]:
        """Yield the images of some rows in parts, in the order of ``rows``.

        If ``rows`` ascend (equal numbers are allowed), row groups are read 512 rows
        (:data:`READ_ROWS`) at a time, so that they may be larger than the memory. The
        images of a part are then in memory when the part is yielded. Otherwise they are
        read when the method ``read_images`` of the part is called.

        Args:
            rows: Row numbers, int64 (n,).
            size: Number of images of each part; the last one may have fewer.

        Yields:
            :class:`~uno.data.images.Images` of each part, numbered from 0 in it.

        Raises:
            ConfigError: A file is damaged or cannot be read.
        """
        if (np.diff(rows) < 0).any():
            yield from super().split_rows(rows, size)
            return
        images = list[Image]()
        for column in self._scan(rows):
            images += _images_in(column)
            while len(images) >= size:
                yield InMemory(images[:size])
                del images[:size]
        if images:
            yield InMemory(images)

    def _scan(self, rows: np.ndarray) -> Iterator[Any]:
        """Yield the image column of some rows, in their order and in several pieces.

        A piece has the wanted rows among at most 512 consecutive rows of a row group,
        which are read together. There is no piece where no row is wanted. A row group
        is read only up to the 512 rows that hold its last wanted one.

        Args:
            rows: Row numbers in ascending order, int64 (n,).

        Yields:
            Arrow arrays of the column's type: bytes or struct<bytes, path>, which may
            be dictionary encoded.

        Raises:
            ConfigError: A file is damaged or cannot be read.
        """
        groups = self.groups(rows)
        for group in np.unique(groups).tolist():
            shard, number = self._groups[group]
            wanted, start = rows[groups == group] - self._starts[group], 0
            for batch in shard.batches(self.column, number):
                inside = (wanted >= start) & (wanted < start + len(batch))
                if inside.any():
                    yield batch[self.column].take(pa.array(wanted[inside] - start))
                start += len(batch)
                if start > wanted[-1]:
                    break

    def _recent_group(self, group: int) -> Any:
        """Return the image column of a row group, from memory or from its file.

        A column that is read is kept in memory for the next calls. Threads that want
        the same row group wait for one read, and all get its error if it fails. Reads
        of different row groups run at the same time: the lock is not held during a
        read. The two row groups (:data:`RECENT_GROUPS`) that were used last are kept.
        After a read that failed nothing is kept, so the next call tries again.

        Args:
            group: Number of the row group, counted over all files.

        Returns:
            An Arrow array of the column's type: bytes or struct<bytes, path>, which may
            be dictionary encoded.

        Raises:
            ConfigError: The file is damaged or cannot be read.
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
        """Return the approximate stored size of each image in bytes.

        The compressed bytes of the column in a row group, by the footer, are divided
        evenly among its rows, so that the sizes of all its rows add up to them. No
        image is read.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            int64 (n,), the mean size in the row group, rounded down or up.
        """
        groups = self.groups(rows)
        number, total, num = (
            rows - self._starts[groups],
            self._bytes[groups],
            np.diff(self._starts)[groups],
        )
        return (number + 1) * total // num - number * total // num

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Return when the Parquet file of each image was last changed.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            ns since 1970, int64 (n,); -1 for a file of unknown time. They are the times
            that were given when this object was made.
        """
        return self._times[self.groups(rows)]

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """Return None for each of ``rows``, because no image is a file of its own."""
        return [None] * len(rows)

    @property
    def is_remote(self) -> bool:
        """Whether any of the Parquet files is in remote storage (its path is a URI)."""
        return any(filesystem.is_uri(shard.path) for shard in self.shards)

    def reader(self) -> ParquetImages:
        """Return the object that another process reads these images with: this one.

        It can be pickled. The copy reads the files by their paths, so they must be
        there on the node of that process, too.
        """
        return self


class ParquetShard:
    """A Parquet file. Its footer is read once, when it is first needed.

    Checksums of pages are verified. A pickled copy reads the footer again.

    Args:
        path: Path or URI of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle makes a copy from: the class and the file's absolute path.

        The footer is not pickled. A URI stays as it is. The path is absolute because
        the copy may be in a process that runs in another directory.
        """
        return ParquetShard, (filesystem.full_path(self.path),)

    @cached_property
    def metadata(self) -> Any:
        """The footer of the file, a ``pyarrow.parquet.FileMetaData``.

        It is read from the file at the first use and kept.

        Raises:
            ConfigError: The file cannot be read or is no Parquet file; or the numbers
                of rows of its row groups do not add up to the file's, or one is below
                0.
        """
        with self.errors(), self._open() as file:
            found = file.metadata
        groups = [found.row_group(g).num_rows for g in range(found.num_row_groups)]
        if sum(groups) != found.num_rows or min(groups, default=0) < 0:
            raise ConfigError(
                f"{self.path}: its row groups have {plural(sum(groups), 'row')},"
                f" {found.num_rows:,} by its footer"
            )
        return found

    @cached_property
    def schema(self) -> Any:
        """The Arrow schema of the file, by its footer, which is read at the first use.

        Columns of Arrow's dictionary and view types have these types here, although
        :meth:`read` casts view types. The schema is cached.

        Raises:
            ConfigError: The file cannot be read, is no Parquet file, or has a damaged
                footer.
        """
        with self.errors():
            return self.metadata.schema.to_arrow_schema()

    def read(self, columns: Sequence[str], group: int | None = None) -> Any:
        """Read some columns.

        Args:
            columns: Names of the columns. A name that the file lacks is ignored.
            group: Number of the row group in the file; None for the whole file.

        Returns:
            An Arrow table. It is validated, so its text is UTF-8. Columns of view types
            are cast by :func:`without_views`.

        Raises:
            ConfigError: The file is damaged or cannot be read, or its columns have
                another number of rows than its footer says.
        """
        with (
            self.errors("Parquet file" if group is None else f"row group {group} of"),
            self._open(metadata=self.metadata, pre_buffer=True) as file,
        ):
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

    def column_bytes(self, group: int, column: str, uncompressed: bool = False) -> int:
        """Return the stored size of a column in a row group, in bytes.

        The footer tells it. The fields of a struct are added up.

        Args:
            group: Number of the row group in the file.
            column: Name of the column. The size is 0 for a name that the file lacks.
            uncompressed: Whether the size is that before compression.

        Raises:
            ConfigError: The footer is damaged or cannot be read.
        """
        row_group = self.metadata.row_group(group)
        chunks = (row_group.column(i) for i in range(row_group.num_columns))
        with self.errors(f"row group {group} of"):
            own = (c for c in chunks if f"{c.path_in_schema}.".startswith(f"{column}."))
            return sum(
                c.total_uncompressed_size if uncompressed else c.total_compressed_size
                for c in own
            )

    def holds_only_paths(self, column: str) -> bool:
        """Return whether ``bytes`` is null in all rows of a column of images.

        The number of nulls in the statistics of the file's footer tells it; no column
        is read. The result is False if a row group has no such statistics, and for a
        file without rows.

        Args:
            column: Name of a column struct<bytes, path>. The result is False for a
                column without one of these fields, and for a name that the file lacks.

        Raises:
            ConfigError: The footer is damaged or cannot be read.
        """
        num_nulls, has_path = 0, False
        with self.errors():
            for number in range(self.metadata.num_row_groups):
                group = self.metadata.row_group(number)
                for chunk in map(group.column, range(group.num_columns)):
                    has_path |= chunk.path_in_schema == f"{column}.path"
                    if chunk.path_in_schema == f"{column}.bytes":
                        found = chunk.statistics
                        is_known = found is not None and found.has_null_count
                        num_nulls += found.null_count if is_known else 0
        return has_path and 0 < num_nulls == self.metadata.num_rows

    def batches(self, column: str, group: int) -> Iterator[Any]:
        """Yield a column of a row group in batches of at most 512 rows.

        It is read in small pieces, so that the row group may be larger than the memory.
        The number of rows is compared with the footer after the last batch.

        Args:
            column: Name of the column.
            group: Number of the row group in the file.

        Yields:
            Arrow record batches with this one column, validated and with view types
            cast by :func:`without_views`.

        Raises:
            ConfigError: The file is damaged or cannot be read, or the row group has
                another number of rows than the footer says.
        """
        num, size = 0, READ_BYTES[filesystem.is_uri(self.path)]
        with (
            self.errors(f"row group {group} of"),
            self._open(metadata=self.metadata, buffer_size=size) as file,
        ):
            for batch in file.iter_batches(READ_ROWS, [group], [column]):
                batch.validate(full=True)
                num += len(batch)
                yield without_views(batch)
        self._require_rows(num, group)

    @contextmanager
    def _open(self, **options: Any) -> Iterator[Any]:
        """Open the file as a ``pyarrow.parquet.ParquetFile`` for a ``with`` block.

        Checksums of pages are verified. Errors are those of pyarrow and of the storage,
        which :meth:`errors` turns into a ConfigError.

        Args:
            **options: Further arguments of ``ParquetFile``.
        """
        with (
            filesystem.open_file(self.path) as file,
            pa.parquet.ParquetFile(
                file, page_checksum_verification=True, **options
            ) as parquet,
        ):
            yield parquet

    def errors(self, what: str = "Parquet file") -> AbstractContextManager[None]:
        """Return a context manager that turns errors of reading into a ConfigError.

        They are OSError, UnicodeError and ArrowException, and the message is ``cannot
        read WHAT PATH: REASON``.

        Args:
            what: What is read, for the error message.
        """
        return filesystem.reading(f"{what} {self.path}")


def _images_in(column: Any) -> list[Image]:
    """Return the encoded images of an Arrow column.

    Args:
        column: Arrow array of bytes or struct<bytes, path>, which may be dictionary
            encoded.

    Returns:
        The bytes of each row. A null or empty value gives empty bytes; in a column of
        structs these are a :class:`~uno.data.images.MissingImage`, whose attribute
        ``reason`` says why there is no image. Files that a path names are not read.
    """
    column = column.cast(plain_type(column.type))
    if column.type in BINARY:
        return [value or b"" for value in column.to_pylist()]
    rows = (row or {} for row in column.to_pylist())
    return [
        row.get("bytes") or MissingImage(_without_bytes(row.get("path")))
        for row in rows
    ]


def _without_bytes(path: str | None) -> str:
    """Return the reason why a row has no image, and what to do, for messages.

    Args:
        path: The path of the row in a column struct<bytes, path>, of which the text has
            the first 200 characters; None or '' if the row has no path, either.
    """
    has = f"only the path {one_line(path)[:200]}" if path else "and no path"
    return (
        f"no image data: it has no bytes, {has}; embed the bytes of the image, or"
        " delete the row"
    )


def json_at(text: str | bytes, *names: str) -> Any:
    """Return a value inside a JSON document.

    Args:
        text: The JSON text.
        *names: The keys that lead to the value, from the outermost object on.

    Returns:
        The value, as Python's ``json`` returns it; the whole document without keys.
        None if a key is missing, a value on the way is no object, or the text is no
        JSON or is nested too deeply. A value null is None, too.
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
        kind: An Arrow type. For a dictionary, the type of its values is used. Then
            string_view becomes large_string, and binary_view becomes large_binary.
            Other types are returned as they are, and types inside a struct or a list
            are not changed.
    """
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return VIEWS.get(kind, kind)


def _with_long_offsets(kind: Any) -> Any:
    """Return the Arrow type of a column of images with offsets of 64 bits.

    An array with offsets of 32 bits cannot hold more than 2 GiB.

    Args:
        kind: A type of bytes, or struct<bytes, path>.
    """
    if not pa.types.is_struct(kind):
        return pa.large_binary()
    long = {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}
    return pa.struct([(f.name, long.get(f.type, f.type)) for f in kind])


def without_views(table: Any) -> Any:
    """Cast columns of Arrow's view types to the types that most tools read.

    A column of type ``string_view`` becomes ``large_string``, and ``binary_view``
    becomes ``large_binary``. Other columns stay as they are, also structs and lists of
    such types. ``table`` itself is not changed.

    Args:
        table: A ``pyarrow.Table`` or ``pyarrow.RecordBatch``.

    Returns:
        A table or batch with the same columns and rows.
    """
    for i, field in enumerate(table.schema):
        if field.type in VIEWS:
            kind = VIEWS[field.type]
            table = table.set_column(
                i, pa.field(field.name, kind), table.column(i).cast(kind)
            )
    return table


def check_images(source: str, kind: Any) -> None:
    """Raise an error if the Arrow type of a column cannot hold images.

    No value is looked at.

    Args:
        source: The source, as the error message names it.
        kind: The Arrow type of the column. A dictionary counts as the type of its
            values, and a view type as its plain type.

    Raises:
        ConfigError: The type is neither binary or large_binary (the images), nor string
            or large_string (their paths), nor a struct with a field ``bytes`` of type
            binary or large_binary.
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
