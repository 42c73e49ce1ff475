"""The table of predictions: one row for every input, in input order, in
``predictions.parquet``.

Finished partitions wait in ``_shards/``, a file each, for the last step, which joins
them; the same command continues with the missing ones. The schema's metadata says what
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
from uno.data.inputs import Inputs, Read, batch_sizes, chunk_rows, partition_rows
from uno.data.rows import Partition
from uno.errors import ConfigError, StorageError
from uno.results.classes import OutputClass, called, hashes
from uno.results.infer import BATCH_BYTES, NUMBERS, Classifier, Scores

FILE = "predictions.parquet"
SHARDS = "_shards"
SHARD = f"{SHARDS}/{{:06d}}.parquet"
CLAIM = f"{SHARDS}/manifest.json"  # what the shards are made from
FORMAT = 1
BATCH_ROWS = 2**13  # that are read at a time
READERS = 8  # files of partitions that are read ahead
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 2**16, 64 * 2**20  # of the table
METADATA = b"uno"

COLUMNS = {
    "id": pa.string(),
    "uri": pa.string(),  # path of the image; null where it is inside a table
    "class_index": pa.int32(),  # null, as all results, where status is bad
    "class_name": pa.string(),
    "kind": pa.string(),  # known | novel | rejected: fell into a dropped class
    **dict.fromkeys(NUMBERS, pa.float32()),
    "status": pa.string(),  # ok | bad
    "reason": pa.string(),  # why it is bad
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
"""What a table was made from, and what is said of one that was made from something
else.
"""


class Summary(NamedTuple):
    """A finished table: ``ok + bad = rows``."""

    path: str
    rows: int
    ok: int
    bad: int


class InputSpec(NamedTuple):
    """How a model takes images: square, ``size`` pixels a side; ``chunk_rows`` are
    decoded at once.
    """

    size: int
    chunk_rows: int
    interpolation: Interpolation

    @classmethod
    def of(cls, model: Classifier, part_rows: int) -> InputSpec:
        """How ``model`` takes partitions of ``part_rows``: decoded 64 MiB of pixels
        at a time, at most.
        """
        rows = chunk_rows(part_rows, max(1, BATCH_BYTES // (3 * model.size**2)))
        return cls(model.size, rows, model.config.data.interpolation)


class Chunk(NamedTuple):
    """Rows that are decoded at once: numbers from ``first`` on, their ids, their
    images.
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
    """Classify what ``writer`` lacks, here, decoded ahead by ``threads`` (default: one
    a core), and finish; ``on_progress`` gets (rows done, N) after a batch.
    """
    how, missing = InputSpec.of(model, writer.part_rows), writer.missing
    rows = [writer.rows_of(number) for number in missing]
    parts = zip(rows, writer.inputs.parts(map(np.asarray, rows)), strict=True)
    chunks = (
        chunk
        for own, part in parts
        for chunk in read_part(writer.inputs.read, part, own.start, how)
    )
    decode = partial(decode_chunk, how=how, threads=threads or available_cpus())
    for facts, pixels in prefetch_map(decode, chunks, 1, BATCHES_AHEAD):
        for results in classify(model, facts, pixels, writer.embedding):
            writer.add(results)
            on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def read_part(
    read: Read, part: Partition, first: int, how: InputSpec
) -> Iterator[Chunk]:
    """A partition whose first row is ``first``, cut into chunks."""
    whole, rest = divmod(len(part.rows), how.chunk_rows)
    for ids, images in read(part, [how.chunk_rows] * whole + [rest] * (rest > 0)):
        yield Chunk(first, ids, images)
        first += len(ids)


def decode_chunk(
    chunk: Chunk, how: InputSpec, threads: int | None = None
) -> tuple[pa.Table, Tensor]:
    """What is known of n rows: row, id, uri, reason (why it has no pixels); and uint8
    (n, 3, S, S), or their features (n, D), where a run has just computed them.
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
    """What a model says of :func:`decode_chunk`, batch by batch, with ``embedding``
    the features, too.
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
    """``facts`` of the rows of a batch, and the scores of those that are ``ok`` bool
    (b,).
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
    """What makes files of partitions, in any process."""

    classes: list[OutputClass]
    model_hash: str
    embedding: bool

    @property
    def schema(self) -> pa.Schema:
        """That of the table."""
        return pa.schema(COLUMNS | ({"embedding": EMBEDDING} if self.embedding else {}))

    def write(self, storage: Storage, number: int, results: pa.Table) -> None:
        """Store partition ``number``: all its results, in order."""
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
    """Collects what ``model`` says of ``inputs``, with features if ``embedding``, and
    joins it. ConfigError: there are predictions of something else, and not ``replace``,
    or another's Parquet file.
    """

    def __init__(
        self,
        storage: Storage,
        inputs: Inputs,
        model: Classifier,
        embedding: bool,
        replace: bool = False,
    ) -> None:
        self.inputs, self.embedding, self.num_rows = inputs, embedding, len(inputs)
        self.identity = {
            "model_hash": model.model_hash,
            **hashes(model.classes),
            "data": inputs.fingerprint,
            "rows": len(inputs),
            "embedding": embedding,
            "aligned": model.alignment is not None,
            "format": FORMAT,
            "times": inputs.times,
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
        """Numbers of the partitions that are not stored yet."""
        return sorted(self._missing)

    def rows_of(self, number: int) -> range:
        """Of a partition."""
        return range(
            number * self.part_rows, min((number + 1) * self.part_rows, self.num_rows)
        )

    def add(self, results: pa.Table) -> None:
        """Take results of the next rows of a partition, which is stored once it is
        whole.
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
        """Note that another process has stored a partition."""
        self._missing.remove(number)
        self.num_done += len(self.rows_of(number))

    def finish(self) -> Summary:
        """Join the partitions into ``predictions.parquet``, some at a time, and
        count.
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
        """Make the directory ours, or continue there; whether nothing is left to do."""
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
        """Partitions that are there whole; a damaged one is made again."""
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
        with (
            suppress(StorageError),
            _reading(self.storage, SHARD.format(number)) as file,
        ):
            same = file.schema_arrow.equals(self.part_writer.schema)
            return number, same and file.metadata.num_rows == len(self.rows_of(number))
        return number, False

    def _read(self, number: int) -> pa.Table:
        with _reading(self.storage, SHARD.format(number)) as file:
            return file.read()


def read_identity(storage: Storage) -> dict[str, Any] | None:
    """What ``predictions.parquet`` was made from; None where there is none, or it is
    not one of ours.
    """
    if not storage.exists(FILE):
        return None
    with _reading(storage) as file:
        return _identity(
            output.mapping((file.schema_arrow.metadata or {}).get(METADATA, b""))
        )


def read_columns(storage: Storage, names: Sequence[str]) -> pa.Table | None:
    """Columns of ``predictions.parquet``, in input order; None where there is none
    of ours.
    """
    if read_identity(storage) is None:
        return None
    with _reading(storage) as file:
        return file.read(list(names))


def read_batches(storage: Storage, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Columns of ``predictions.parquet``, which is ours, in input order, some rows
    at a time.
    """
    with _reading(storage) as file:
        yield from file.iter_batches(BATCH_ROWS, columns=list(names))


def rename(storage: Storage, classes: Sequence[OutputClass]) -> bool:
    """Put the names of ``classes`` into the table. False: there is none, or other
    classes were merged.
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
    return pa.array([name for name, _ in called(classes)], pa.string())


def _write(
    storage: Storage,
    schema: pa.Schema,
    identity: dict[str, Any],
    tables: Iterator[pa.Table],
) -> None:
    """Write ``predictions.parquet`` piece by piece; it appears whole."""
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
    """Tables joined to what a reader takes at once: a footer lists every row group."""
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
    with storage.open(name) as source, pq.ParquetFile(source) as file:
        yield file


def _identity(found: Any) -> dict[str, Any] | None:
    """What something was made from; None where this version does not understand it."""
    # earlier versions had none
    found = {"times": "", "code": {}, **found} if isinstance(found, dict) else {}
    return found if found.keys() == DIFFERENCES.keys() else None
