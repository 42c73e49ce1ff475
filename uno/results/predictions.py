"""The table of predictions, ``predictions.parquet``: one row for each input, in order.

Finished partitions of the rows are files in ``_shards/``. The last step joins them. The
same command continues with the missing partitions. The metadata of the schema say what
the table was made from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch
from torch import Tensor

from uno.cpus import available_cpus
from uno.data import output
from uno.data.decode import (
    BATCHES_AHEAD,
    Interpolation,
    decode_many,
    ok_mask,
    prefetch_map,
)
from uno.data.files import Storage
from uno.data.images import Images, path_of
from uno.data.rows import Rows
from uno.errors import ConfigError, StorageError
from uno.results.classes import OutputClass, called, hashes
from uno.results.infer import BATCH_BYTES, NUMBERS, Classifier, Scores

FILE = "predictions.parquet"
SHARDS = "_shards"
SHARD = f"{SHARDS}/{{:06d}}.parquet"
CLAIM = f"{SHARDS}/manifest.json"  # says what the shards are made from
FORMAT = 1
BATCH_ROWS = 2**13  # rows that are read at a time
GROUP_ROWS = 512  # rows of a group; a batch never has rows of two groups
NUM_PARTITIONS = 256  # least number of partitions of a source with enough rows
MAX_GROUPS = 32  # largest number of groups in a partition: 16,384 rows
READERS = 8  # files of partitions that are read ahead
# least number of rows or bytes of a row group
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 2**16, 64 * 2**20
METADATA = b"uno"  # key of the identity in the metadata of the schema

COLUMNS = {
    "id": pa.string(),
    "uri": pa.string(),  # path of the image; null if it is inside a table
    "class_index": pa.int32(),  # null if the status is bad, like all results
    "class_name": pa.string(),
    "kind": pa.string(),  # known, novel, or rejected (of a dropped class)
    **dict.fromkeys(NUMBERS, pa.float32()),
    "status": pa.string(),  # ok or bad
    "reason": pa.string(),  # why the image could not be read
    "model_hash": pa.string(),
}
EMBEDDING = pa.list_(pa.float32())
log = logging.getLogger(__name__)
DIFFERENCES = {
    "model_hash": "of another model",
    "data": "of other data",
    "rows": "of other data",
    "names": "under other class names",
    "routes": "under other decisions on classes",
    "embedding": "with another --embedding",
    "aligned": "without head agreement",
    "format": "of another version",
    "times": "of images as they were before",
    "code": "by other code of model.encoder",
}
"""The facts that identify predictions, and the words for those that differ.

The words complete "the directory holds predictions ...".
"""


class Summary(NamedTuple):
    """The numbers of rows of a finished table, where ``ok + bad = rows``.

    Attributes:
        path: The path of the table.
        rows: The number of rows.
        ok: The number of rows with a prediction.
        bad: The number of rows that could not be read.
    """

    path: str
    rows: int
    ok: int
    bad: int


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


class InputSpec(NamedTuple):
    """The form in which a model takes images.

    Attributes:
        size: The side of the square images in pixels.
        chunk_rows: The number of images to decode at once.
        interpolation: The interpolation of the resizing.
    """

    size: int
    chunk_rows: int
    interpolation: Interpolation

    @classmethod
    def of(cls, model: Classifier, part_rows: int) -> InputSpec:
        """Return the form in which a model takes the images of a partition.

        Args:
            model: The model.
            part_rows: The number of rows of a partition. At most 64 MiB of pixels are
                decoded at once.
        """
        rows = chunk_rows(part_rows, max(1, BATCH_BYTES // (3 * model.size**2)))
        return cls(model.size, rows, model.config.data.interpolation)


class Chunk(NamedTuple):
    """Rows that are decoded at once.

    Attributes:
        first: The number of the first row in the table. The others follow it.
        ids: The ids of the rows.
        images: The images of the rows, not decoded yet.
    """

    first: int
    ids: pa.Array
    images: Images


def predict_rows(
    model: Classifier,
    writer: PredictionWriter,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Classify the rows that are not written yet in this process, and finish the table.

    Args:
        model: The model.
        writer: The writer of the table. It has the rows and the missing partitions.
        threads: The number of threads that decode ahead, by default one for each core.
        on_progress: Called with (number of rows done, number of all rows) after a
            batch.

    Returns:
        The numbers of rows of the finished table.
    """
    how, data = InputSpec.of(model, writer.part_rows), writer.data
    parts = (np.array(writer.rows_of(number)) for number in writer.missing)
    chunks = (
        chunk
        for rows in parts
        for chunk in split_chunks(
            data.ids_of(rows), data.images.take(rows), int(rows[0]), how
        )
    )
    decode = partial(decode_chunk, how=how, threads=threads or available_cpus())
    for facts, pixels in prefetch_map(decode, chunks, 1, BATCHES_AHEAD):
        for results in classify(model, facts, pixels, writer.embedding):
            writer.add(results)
            on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def split_chunks(
    ids: pa.Array, images: Images, first: int, how: InputSpec
) -> Iterator[Chunk]:
    """Divide a partition into chunks.

    Args:
        ids: The ids of its n rows.
        images: The images of its n rows.
        first: The number of its first row in the table.
        how: The form in which the model takes images.

    Yields:
        Chunks of ``how.chunk_rows`` rows; the last one may have fewer.
    """
    start = 0
    for some in images.split(how.chunk_rows):
        yield Chunk(first + start, ids.slice(start, len(some)), some)
        start += len(some)


def decode_chunk(
    chunk: Chunk, how: InputSpec, threads: int | None = None
) -> tuple[pa.Table, Tensor]:
    """Decode the images of a chunk.

    Args:
        chunk: The chunk, with n rows.
        how: The form in which the model takes images.
        threads: The number of threads, by default one for each core.

    Returns:
        A table with the columns row, id, uri and reason (why the image could not be
        read, or null), and the pixels uint8 (n, 3, S, S). If a run has just computed
        the features of its frozen encoder, they stand in the place of the pixels, (n,
        D).
    """
    rows = np.arange(len(chunk.ids))
    ready = chunk.images.prepared(rows)
    if ready is not None:
        (pixels, reasons), places = ready, chunk.images.paths(rows)
    else:
        found = chunk.images.read_images(rows)
        pixels, reasons = decode_many(found, how.size, threads, how.interpolation)
        places = [path_of(image) for image in found]
    text = {
        "id": chunk.ids,
        "uri": pa.array(places, pa.string()),
        "reason": pa.array(reasons, pa.string()),
    }
    return pa.table({"row": chunk.first + rows, **text}), pixels


def classify(
    model: Classifier, facts: pa.Table, pixels: Tensor, embedding: bool
) -> Iterator[pa.Table]:
    """Classify a decoded chunk, batch by batch.

    Args:
        model: The model.
        facts: The table of :func:`decode_chunk`.
        pixels: The pixels or features of the rows.
        embedding: Whether to add the features as the column "embedding".

    Yields:
        The table of a batch with the scores, see :func:`result_table`.
    """
    ok, start = ok_mask(facts["reason"].to_pylist()), 0
    for size in batch_sizes(facts["row"][0].as_py(), len(facts), model.batch_rows):
        own = slice(start, start + size)
        fine = torch.from_numpy(ok[own])
        scores = model.score(pixels[own][fine]) if fine.any() else None
        yield result_table(facts[own], ok[own], scores, embedding)
        start += size


def result_table(
    facts: pa.Table, ok: np.ndarray, scores: Scores | None, embedding: bool
) -> pa.Table:
    """Add the scores of a batch to the table of its rows.

    Args:
        facts: The rows of the batch, b of them.
        ok: Which rows could be read, bool (b,).
        scores: The scores of the readable rows in order; None if there are none.
        embedding: Whether to add the features as the column "embedding".

    Returns:
        The table with the columns class_index and :data:`~uno.results.infer.NUMBERS`.
        They are null for rows that could not be read, and where a number is NaN.
    """
    for name in ("class_index", *NUMBERS):
        values = np.zeros(len(ok), np.int32 if name == "class_index" else np.float32)
        values[ok] = 0 if scores is None else getattr(scores, name).numpy()
        facts = facts.append_column(name, pa.array(values, mask=~ok | np.isnan(values)))
    if embedding:
        features = (
            np.empty((0, 0), np.float32) if scores is None else scores.features.numpy()
        )
        starts = np.concatenate([[0], ok.cumsum()]) * features.shape[1]
        starts = pa.array(starts.astype(np.int32), mask=np.append(~ok, False))
        facts = facts.append_column(
            "embedding",
            pa.ListArray.from_arrays(starts, pa.array(features.ravel(), pa.float32())),
        )
    return facts


class PartWriter(NamedTuple):
    """Writes the files of partitions, in any process.

    Attributes:
        classes: The output classes of the model.
        model_hash: The hash of the model.
        embedding: Whether the table has the column "embedding".
    """

    classes: list[OutputClass]
    model_hash: str
    embedding: bool

    @property
    def schema(self) -> pa.Schema:
        """The schema of the table of predictions, with "embedding" if asked for."""
        return pa.schema(COLUMNS | ({"embedding": EMBEDDING} if self.embedding else {}))

    def write(self, storage: Storage, number: int, results: pa.Table) -> None:
        """Write the file of a partition, ``_shards/NUMBER.parquet``.

        The columns class_name, kind, status and model_hash are added.

        Args:
            storage: The directory of the predictions.
            number: The number of the partition.
            results: All its rows in order, with the columns of :func:`result_table`.
        """
        index = results["class_index"].combine_chunks()
        columns = {
            **{name: results[name] for name in results.column_names},
            "class_name": _names(self.classes).take(index),
            "kind": (
                pa.array([kind for _, kind in called(self.classes)], pa.string()).take(
                    index
                )
            ),
            "status": pa.compute.if_else(
                pa.compute.is_valid(results["reason"]), "bad", "ok"
            ),
            "model_hash": pa.repeat(self.model_hash, len(results)),
        }
        schema = self.schema
        with storage.create(SHARD.format(number)) as stream:
            table = pa.table(
                {name: columns[name] for name in schema.names}, schema=schema
            )
            pq.write_table(table, stream, compression="zstd")


class PredictionWriter:
    """Collects the predictions of all rows, and writes ``predictions.parquet``.

    It continues with the missing partitions of the same predictions.

    Args:
        storage: The directory of the predictions.
        data: The rows to predict.
        model: The model.
        embedding: Whether the table has a column with the features.
        replace: Whether predictions of something else may be replaced.

    Attributes:
        complete: Whether the table is finished.
        num_done: The number of rows whose partitions are written or collected.

    Raises:
        ConfigError: The directory holds predictions of something else and not
            ``replace``, or a Parquet file that ``uno predict`` did not write.
    """

    def __init__(
        self,
        storage: Storage,
        data: Rows,
        model: Classifier,
        embedding: bool,
        replace: bool = False,
    ) -> None:
        self.data, self.embedding, self.num_rows = data, embedding, len(data)
        self.identity = {
            "model_hash": model.model_hash,
            **hashes(model.classes),
            "data": data.fingerprint,
            "rows": len(data),
            "embedding": embedding,
            "aligned": model.alignment is not None,
            "format": FORMAT,
            "times": data.times_hash,
            "code": model.code,
        }
        self.part_writer = PartWriter(model.classes, model.model_hash, embedding)
        self.part_rows = partition_rows(self.num_rows)
        self.storage, self._parts = storage, dict[int, list[pa.Table]]()
        self._num_parts = -(-self.num_rows // self.part_rows)
        self.complete = self._claim(replace)
        self._missing = (
            set() if self.complete else {*range(self._num_parts)} - self._stored()
        )
        self.num_done = self.num_rows - sum(
            len(self.rows_of(number)) for number in self._missing
        )

    @property
    def missing(self) -> list[int]:
        """The numbers of the partitions that are not written yet, ascending."""
        return sorted(self._missing)

    def rows_of(self, number: int) -> range:
        """Return the numbers of the rows that a partition has in the table.

        Args:
            number: The number of the partition, from 0.
        """
        return range(
            number * self.part_rows, min((number + 1) * self.part_rows, self.num_rows)
        )

    def add(self, results: pa.Table) -> None:
        """Add the results of the next rows of a partition.

        The partition is written as soon as all its rows are there.

        Args:
            results: A table as :func:`result_table` returns it.
        """
        number = results["row"][0].as_py() // self.part_rows
        parts = self._parts.setdefault(number, [])
        parts.append(results)
        self.num_done += len(results)
        if sum(map(len, parts)) >= len(self.rows_of(number)):
            table = pa.concat_tables(self._parts.pop(number))
            assert np.array_equal(table["row"], self.rows_of(number))
            self.part_writer.write(self.storage, number, table)
            self._missing.discard(number)

    def stored(self, number: int) -> None:
        """Note that another process has written a partition.

        Its rows count as done.

        Args:
            number: The number of the partition.
        """
        self._missing.remove(number)
        self.num_done += len(self.rows_of(number))

    def finish(self) -> Summary:
        """Join the partitions into ``predictions.parquet``, and delete their files.

        All partitions must be written. Few of them are in memory at once.

        Returns:
            The numbers of rows of the table.
        """
        if not self.complete:
            assert not self._parts and not self._missing
            parts = prefetch_map(self._read, range(self._num_parts), READERS, READERS)
            _write(
                self.storage, self.part_writer.schema, self.identity, _row_groups(parts)
            )
            self.complete = True
        self.storage.delete(SHARDS)
        with _reading(self.storage) as file:
            reasons = file.iter_batches(columns=["reason"])
            bad = sum(len(batch) - batch["reason"].null_count for batch in reasons)
        return Summary(
            self.storage.below(FILE), self.num_rows, self.num_rows - bad, bad
        )

    def _claim(self, replace: bool) -> bool:
        """Mark the directory as that of these predictions, or continue in it.

        If only the modification times of images differ, all rows are predicted again,
        with a warning. Partitions of other predictions are deleted.

        Returns:
            Whether the table is finished.

        Raises:
            ConfigError: The directory holds predictions of something else and not
                ``replace``, or a Parquet file that ``uno predict`` did not write.
        """
        storage, finished = self.storage, None
        output.sweep_file(storage, FILE)
        foreign = [
            name
            for name in storage.list()
            if name.endswith(".parquet") and name != FILE
        ]
        with suppress(StorageError) if replace else nullcontext():
            finished = read_identity(storage)
        begun = output.find_mapping(storage, CLAIM) or {}
        before = finished or _identity(begun.get("made_from"))
        if before is not None and {
            k for k, v in before.items() if v != self.identity[k]
        } == {"times"}:
            log.warning(
                "images were written to since they were predicted: all are predicted"
                " again"
            )
            replace = True
        if not foreign and finished == self.identity:
            return True
        claim = {"made_from": self.identity, "part_rows": self.part_rows}
        claimed = storage.exists(CLAIM)
        if not replace and finished is None and not claimed and storage.exists(FILE):
            foreign.append(FILE)
        if foreign:
            advice = "choose another --output"
            raise ConfigError(
                f"{storage.path(foreign[0])} was not written by uno predict; {advice}"
            )
        if begun == claim:
            return False
        if not replace and (finished is not None or claimed):
            found = before or self.identity
            differences = (
                text
                for key, text in DIFFERENCES.items()
                if found[key] != self.identity[key]
            )
            what = next(differences, DIFFERENCES["format"])
            raise ConfigError(
                f"{storage.uri} holds predictions {what}; choose another --output, or"
                " empty it"
            )
        storage.delete(SHARDS)
        storage.write(CLAIM, json.dumps(claim).encode())
        return False

    def _stored(self) -> set[int]:
        """Return the numbers of the partitions that have an undamaged file."""
        names = {
            SHARD.format(number).rpartition("/")[2]: number
            for number in range(self._num_parts)
        }
        there = [names[name] for name in self.storage.list(SHARDS) if name in names]
        return {
            number
            for number, whole in prefetch_map(self._is_whole, there, READERS, READERS)
            if whole
        }

    def _is_whole(self, number: int) -> tuple[int, bool]:
        """Return whether the file of a partition is readable and complete.

        Returns:
            The number of the partition, and whether its file has the right schema and
            the right number of rows.
        """
        with (
            suppress(StorageError),
            _reading(self.storage, SHARD.format(number)) as file,
        ):
            same = file.schema_arrow.equals(self.part_writer.schema)
            return number, same and file.metadata.num_rows == len(self.rows_of(number))
        return number, False

    def _read(self, number: int) -> pa.Table:
        """Read the file of a partition as a table."""
        with _reading(self.storage, SHARD.format(number)) as file:
            return file.read()


def read_identity(storage: Storage) -> dict[str, Any] | None:
    """Read what ``predictions.parquet`` was made from.

    Returns:
        The facts with the keys of :data:`DIFFERENCES`; None if there is no table, or
        this version did not write it.

    Raises:
        StorageError: The file is damaged.
    """
    if not storage.exists(FILE):
        return None
    with _reading(storage) as file:
        return _identity(
            output.mapping((file.schema_arrow.metadata or {}).get(METADATA, b""))
        )


def read_columns(storage: Storage, names: Sequence[str]) -> pa.Table | None:
    """Read columns of ``predictions.parquet``, in the order of the inputs.

    Args:
        storage: The directory of the predictions.
        names: The names of the columns.

    Returns:
        The columns; None if there is no table, or this version did not write it.
    """
    if read_identity(storage) is None:
        return None
    with _reading(storage) as file:
        return file.read(list(names))


def read_batches(storage: Storage, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read columns of ``predictions.parquet`` in batches, in the order of the inputs.

    Args:
        storage: The directory of the predictions.
        names: The names of the columns.

    Yields:
        Batches of at most ``BATCH_ROWS`` rows.
    """
    with _reading(storage) as file:
        yield from file.iter_batches(BATCH_ROWS, columns=list(names))


def rename(storage: Storage, classes: Sequence[OutputClass]) -> bool:
    """Write the present names of the classes into ``predictions.parquet``.

    Args:
        storage: The directory of the predictions.
        classes: The classes with their present names.

    Returns:
        Whether this was done. Nothing is done if there is no table, or if ``classes``
        are merged or dropped in another way than in the table.
    """
    found = read_identity(storage)
    if found is None or found["routes"] != hashes(classes)["routes"]:
        return False
    names = _names(classes)
    with _reading(storage) as file:
        column = file.schema_arrow.get_field_index("class_name")
        groups = (file.read_row_group(group) for group in range(file.num_row_groups))
        renamed = (
            g.set_column(column, "class_name", names.take(g["class_index"]))
            for g in groups
        )
        _write(storage, file.schema_arrow, found | hashes(classes), renamed)
    return True


def _names(classes: Sequence[OutputClass]) -> pa.Array:
    """Return the name that predictions give to each class, as a string array."""
    return pa.array([name for name, _ in called(classes)], pa.string())


def _write(
    storage: Storage,
    schema: pa.Schema,
    identity: dict[str, Any],
    tables: Iterator[pa.Table],
) -> None:
    """Write ``predictions.parquet``, which only appears when it is complete.

    Args:
        storage: The directory of the predictions.
        schema: The schema of the table.
        identity: What the table is made from. It is stored in the metadata.
        tables: The parts of the table in order. Each is cast to the schema.
    """
    schema = schema.with_metadata(
        {**(schema.metadata or {}), METADATA: json.dumps(identity).encode()}
    )
    with (
        storage.create(FILE) as stream,
        pq.ParquetWriter(stream, schema, compression="zstd") as writer,
    ):
        for table in tables:
            writer.write_table(table.cast(schema))


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join consecutive tables to row groups of at least 65,536 rows or 64 MiB.

    The footer of a Parquet file lists every row group, so there should be few. The last
    row group may be smaller.
    """
    waiting = list[pa.Table]()
    for table in tables:
        waiting.append(table)
        if (
            sum(map(len, waiting)) >= ROW_GROUP_ROWS
            or sum(t.nbytes for t in waiting) >= ROW_GROUP_BYTES
        ):
            yield pa.concat_tables(waiting).combine_chunks()
            waiting.clear()
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


@contextmanager
def _reading(storage: Storage, name: str = FILE) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file in the directory of the predictions, for the block.

    Args:
        storage: The directory of the predictions.
        name: The name of the file, by default ``predictions.parquet``.
    """
    with storage.open(name) as source, pq.ParquetFile(source) as file:
        yield file


def _identity(found: Any) -> dict[str, Any] | None:
    """Return the stored identity of predictions, or None if it has other keys.

    Args:
        found: The stored value of any type. A mapping may lack "times" and "code".
    """
    # some tables were written without these keys
    found = {"times": "", "code": {}, **found} if isinstance(found, dict) else {}
    return found if found.keys() == DIFFERENCES.keys() else None
