"""The table of predictions: one row for every input, in input order, in one Parquet file.

While it is being made, finished shards of 512 rows wait in ``_shards/``; the same command continues with the
missing ones. The last step joins them into ``predictions.parquet``, whose schema metadata says what it was
made from, and removes the shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from uno.data.decode import readable
from uno.data.files import Storage, full_path, shown
from uno.data.rows import Decoded, Rows
from uno.errors import ConfigError, StorageError
from uno.results.classes import OutputClass, names_hash, routes_hash
from uno.results.infer import NUMBERS, Classifier, Decode, Scores, score_rows

FILE = "predictions.parquet"
SHARDS = "_shards"
CLAIM = f"{SHARDS}/manifest.json"  # what the shards are made from
SHARD_ROWS = 512
FORMAT = 1
METADATA = b"uno"

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("uri", pa.string()),  # path of the image; null where it is inside a table
        ("class_index", pa.int32()),  # null, as all results, where status is bad
        ("class_name", pa.string()),
        ("kind", pa.string()),  # known | novel
        *((name, pa.float32()) for name in NUMBERS),
        ("status", pa.string()),  # ok | bad
        ("reason", pa.string()),  # why it is bad
        ("model_hash", pa.string()),
    ]
)
EMBEDDING = pa.field("embedding", pa.list_(pa.float32()))

DIFFERENCES = {
    "model_hash": "of another model", "data": "of other data", "rows": "of other data",
    "names": "under other class names", "routes": "under other decisions on classes",
    "embedding": "with another --embedding", "aligned": "without head agreement",
    "format": "of another version",
}  # fmt: skip
"""What a table was made from, and what is said of one that was made from something else."""


class Summary(NamedTuple):
    """A finished table: ``ok + bad = rows``."""

    path: str
    rows: int
    ok: int
    bad: int


def predict_rows(
    model: Classifier,
    decode: Decode,
    writer: PredictionWriter,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Classify all rows that ``writer`` still lacks, here, and finish the table.

    Memory is that of a few batches and one shard, however many rows there are.

    Args:
        model: what classifies.
        decode: gives the pixels of the writer's rows.
        writer: says what is missing and whether embeddings are wanted.
        on_progress: called after every batch with (rows done, N).
    """
    for index, reasons, scores in score_rows(model, decode, writer.batches(model.batch_rows)):
        writer.add(result_table(index, reasons, scores, writer.embedding))
        on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def result_table(
    index: np.ndarray, reasons: Sequence[str | None], scores: Scores | None, embedding: bool
) -> pa.Table:
    """Results of b rows for :meth:`PredictionWriter.add`.

    Args:
        index: (b,) row numbers.
        reasons: why a row could not be read, None where it could (b).
        scores: of those that could be read, in order; None where none could.
        embedding: whether to keep the features.
    """
    ok = readable(reasons)
    numbers = np.full((len(index), len(NUMBERS)), np.nan, dtype=np.float32)
    classes, features = np.zeros(len(index), dtype=np.int32), np.zeros((0, 0), dtype=np.float32)
    if scores is not None:
        classes[ok], features = scores.class_index.numpy(), scores.features.numpy()
        numbers[ok] = np.stack([getattr(scores, name).numpy() for name in NUMBERS], axis=1)
    columns = {
        "row": pa.array(index, pa.int64()),
        "class_index": pa.array(classes, mask=~ok),
        **{name: pa.array(numbers[:, i], from_pandas=True) for i, name in enumerate(NUMBERS)},
        "reason": pa.array(reasons, pa.string()),
    }
    if embedding:
        ends = np.concatenate([[0], np.cumsum(ok * features.shape[1])]).astype(np.int32)
        columns["embedding"] = pa.ListArray.from_arrays(
            pa.array(ends), pa.array(features.ravel()), mask=pa.array(~ok)
        )
    return pa.table(columns)


class PredictionWriter:
    """Collects results in any order, stores whole shards, joins them.

    Args:
        storage: directory for ``predictions.parquet``.
        rows: N rows to predict.
        model: whose results these are.
        embedding: whether rows carry the features.
        replace: whether predictions of something else are overwritten instead of refused.

    Raises:
        ConfigError: the directory holds predictions of another model or other data, or another Parquet file.
    """

    def __init__(
        self, storage: Storage, rows: Rows, model: Classifier, embedding: bool, replace: bool = False
    ) -> None:
        self.rows, self.embedding, self.num_rows = rows, embedding, len(rows)
        self.identity = {
            "model_hash": model.model_hash,
            "names": names_hash(model.classes),
            "routes": routes_hash(model.classes),
            "data": rows.fingerprint,
            "rows": len(rows),
            "embedding": embedding,
            "aligned": model.alignment is not None,
            "format": FORMAT,
        }
        self._storage, self._classes = storage, model.classes
        self._schema = SCHEMA.append(EMBEDDING) if embedding else SCHEMA
        self._parts: dict[int, list[pa.Table]] = {}
        self._num_shards = -(-len(rows) // SHARD_ROWS)
        self.complete = self._claim(replace)
        shards = range(0 if self.complete else self._num_shards)
        self._pending = [shard for shard in shards if not self._is_stored(shard)]
        self.num_done = len(rows) - sum(len(self._rows_of(shard)) for shard in self._pending)

    def batches(self, max_rows: int) -> Iterator[np.ndarray]:
        """Row numbers int64 (b,) of the missing rows, b <= ``max_rows``; cut alike however often the work was
        interrupted, so that results are the same too.
        """
        for shard in list(self._pending):
            rows = np.array(self._rows_of(shard))
            yield from (rows[start : start + max_rows] for start in range(0, len(rows), max_rows))

    def add(self, results: pa.Table) -> None:
        """Take a :func:`result_table` of pending rows; a shard is stored as soon as it is whole.

        Raises:
            StorageError: it cannot be written.
        """
        shards = results["row"].to_numpy() // SHARD_ROWS
        for shard in np.unique(shards).tolist():
            parts = self._parts.setdefault(shard, [])
            parts.append(results.filter(pa.array(shards == shard)))
            if sum(map(len, parts)) >= len(self._rows_of(shard)):
                table = pa.concat_tables(self._parts.pop(shard)).sort_by("row")
                assert table["row"].to_pylist() == list(self._rows_of(shard))
                with self._storage.create(_shard_name(shard)) as stream:
                    pq.write_table(self._complete(table), stream, compression="zstd")
        self.num_done += len(results)

    def finish(self) -> Summary:
        """Join the shards into ``predictions.parquet`` and count.

        Raises:
            StorageError: it cannot be written.
        """
        storage = self._storage
        if not self.complete:
            assert not self._parts
            tables = (self._read(shard) for shard in range(self._num_shards))
            _write(storage, _described(self._schema, self.identity), tables)
            self.complete = True
        storage.delete(SHARDS)
        with _reading(storage) as file:
            status = file.read(["status"])["status"].to_pylist()
        assert len(status) == self.num_rows
        return Summary(storage.path(FILE), len(status), status.count("ok"), status.count("bad"))

    def _rows_of(self, shard: int) -> range:
        return range(shard * SHARD_ROWS, min((shard + 1) * SHARD_ROWS, self.num_rows))

    def _claim(self, replace: bool) -> bool:
        """Make the directory ours, or continue there; whether nothing is left to do."""
        storage = self._storage
        for name in storage.list():
            if name.startswith(f".{FILE}."):  # what a killed process was joining
                storage.delete(name)
            elif name.endswith(".parquet") and name != FILE:
                raise ConfigError(f"{storage.path(name)} is not ours; choose another --output")
        finished, started = None, None
        with suppress(StorageError) if replace else nullcontext():
            finished = read_identity(storage)
        if finished == self.identity:
            return True
        claimed = storage.exists(CLAIM)
        if claimed:
            started = _identity(storage.read(CLAIM))
        if not replace:
            if finished is not None or (claimed and started != self.identity):
                raise self._refused(finished or started or self.identity | {"format": None})
            if storage.exists(FILE) and not claimed:
                raise ConfigError(f"{storage.path(FILE)} is not ours; choose another --output")
        if started != self.identity:
            storage.delete(SHARDS)
            storage.write(CLAIM, json.dumps(self.identity).encode())
        return False

    def _refused(self, found: dict[str, Any]) -> ConfigError:
        differing = (text for key, text in DIFFERENCES.items() if found.get(key) != self.identity[key])
        where = self._storage.uri
        return ConfigError(
            f"{where} holds predictions {next(differing)}; choose another --output, or empty it"
        )

    def _is_stored(self, shard: int) -> bool:
        """Whether a whole shard is there; a damaged one is made again."""
        try:
            table = self._read(shard)
        except StorageError:
            return False
        return len(table) == len(self._rows_of(shard)) and table.schema.equals(self._schema)

    def _read(self, shard: int) -> pa.Table:
        with _reading(self._storage, _shard_name(shard)) as file:
            return file.read()

    def _complete(self, table: pa.Table) -> pa.Table:
        """Results of the rows of a shard -> rows of the final table."""
        rows = table["row"].to_pylist()
        images = self.rows.images.source if isinstance(self.rows.images, Decoded) else self.rows.images
        has_paths = not isinstance(images, np.ndarray)  # no need to read pixels to find out
        uris = [_uri(images[row]) if has_paths else None for row in rows]
        index = table["class_index"].combine_chunks()
        columns = {
            **{name: table[name] for name in table.column_names},
            "id": pa.array([self.rows.ids[row] for row in rows], pa.string()),
            "uri": pa.array(uris, pa.string()),
            "class_name": pa.array([c.name for c in self._classes], pa.string()).take(index),
            "kind": pa.array([c.kind for c in self._classes], pa.string()).take(index),
            "status": pa.compute.if_else(pa.compute.is_valid(table["reason"]), "bad", "ok"),
            "model_hash": pa.array([self.identity["model_hash"]] * len(table), pa.string()),
        }
        return pa.table({name: columns[name] for name in self._schema.names}, schema=self._schema)


# ------------------------------------------------------------------------------------------------- the file
def read_identity(storage: Storage) -> dict[str, Any] | None:
    """What ``predictions.parquet`` was made from; None where there is none, or it is not one of ours."""
    if not storage.exists(FILE):
        return None
    with _reading(storage) as file:
        return _identity((file.schema_arrow.metadata or {}).get(METADATA, b""))


def rename(storage: Storage, classes: Sequence[OutputClass]) -> bool:
    """Put the names of ``classes`` into ``predictions.parquet``; nothing else changes.

    Returns:
        Whether that was enough: False where there is no table, or other classes were merged or dropped when
        it was made.
    """
    found = read_identity(storage)
    if found is None or found["routes"] != routes_hash(classes):
        return False
    names = pa.array([c.name for c in classes], pa.string())
    with _reading(storage) as file:
        schema = _described(file.schema_arrow, found | {"names": names_hash(classes)})
        column = schema.get_field_index("class_name")
        groups = (file.read_row_group(group) for group in range(file.num_row_groups))
        renamed = (
            group.set_column(column, schema.field(column), names.take(group["class_index"].combine_chunks()))
            for group in groups
        )
        _write(storage, schema, renamed)
    return True


def _described(schema: pa.Schema, identity: dict[str, Any]) -> pa.Schema:
    return schema.with_metadata({**(schema.metadata or {}), METADATA: json.dumps(identity).encode()})


def _write(storage: Storage, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    """Write ``predictions.parquet`` piece by piece; it appears whole."""
    with storage.create(FILE) as stream, pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.cast(schema))


@contextmanager
def _reading(storage: Storage, name: str = FILE) -> Iterator[pq.ParquetFile]:
    with storage.open(name) as source, pq.ParquetFile(source) as file:
        yield file


def _identity(data: bytes) -> dict[str, Any] | None:
    """None where ``data`` is not an identity of this format."""
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() == DIFFERENCES.keys() else None


def _shard_name(shard: int) -> str:
    return f"{SHARDS}/{shard:06d}.parquet"


def _uri(image: Any) -> str | None:
    """Local paths absolute, and as valid text; None for bytes and pixels."""
    return shown(full_path(image)) if isinstance(image, str) else None
