"""The table of predictions: one row for every input, in input order, in one Parquet file.

While it is being made, finished shards of 512 rows wait in ``_shards/``; the same command continues with the
missing ones. The last step joins them into ``predictions.parquet``, whose schema metadata says what it was
made from, and removes the shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from uno.data.decode import readable
from uno.data.files import Storage, full_path, shown
from uno.data.rows import Rows
from uno.errors import ConfigError, StorageError
from uno.results.classes import OutputClass, names_hash, routes_hash

if TYPE_CHECKING:
    from uno.results.infer import Classifier, Scores

FILE = "predictions.parquet"
SHARDS = "_shards"
SHARD_ROWS = 512
FORMAT = 1
METADATA = b"uno"
SCORES = ("probability", "margin", "entropy", "head_agreement", "known_mass")

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("uri", pa.string()),  # path of the image; null where it is inside a table
        ("class_index", pa.int32()),  # null, as all results, where status is bad
        ("class_name", pa.string()),
        ("kind", pa.string()),  # known | novel
        *((name, pa.float32()) for name in SCORES),
        ("status", pa.string()),  # ok | bad
        ("reason", pa.string()),  # why it is bad
        ("model_hash", pa.string()),
    ]
)
EMBEDDING = pa.field("embedding", pa.list_(pa.float32()))


@dataclass(frozen=True)
class Identity:
    """What a table of predictions was made from; equal identities give equal tables."""

    model_hash: str
    names: str  # hash of the class names
    routes: str  # hash of what is merged and dropped
    data: str  # fingerprint of the rows
    rows: int
    embedding: bool
    aligned: bool  # whether head_agreement is there
    format: int = FORMAT


@dataclass(frozen=True)
class Summary:
    """A finished table: ``ok + bad = rows``."""

    path: str
    rows: int
    ok: int
    bad: int


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

    def column(values: Any, kind: pa.DataType) -> pa.Array:
        full = np.zeros(len(index), dtype=kind.to_pandas_dtype())
        if scores is not None:
            full[ok] = values.numpy()
        return pa.array(full, kind, mask=~ok | (np.isnan(full) if full.dtype.kind == "f" else False))

    columns = {
        "row": pa.array(index, pa.int64()),
        "class_index": column(scores and scores.class_index, pa.int32()),
        **{name: column(scores and getattr(scores, name), pa.float32()) for name in SCORES},
        "reason": pa.array(reasons, pa.string()),
    }
    if embedding:
        width = 0 if scores is None else scores.features.shape[1]
        flat = np.zeros(0, np.float32) if scores is None else scores.features.float().numpy().ravel()
        ends = np.concatenate([[0], np.cumsum(np.where(ok, width, 0))]).astype(np.int32)
        columns["embedding"] = pa.ListArray.from_arrays(
            pa.array(ends), pa.array(flat, pa.float32()), mask=pa.array(~ok)
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
        self.embedding = embedding
        self.identity = Identity(
            model.model_hash,
            names_hash(model.classes),
            routes_hash(model.classes),
            rows.fingerprint,
            len(rows),
            embedding,
            model.alignment is not None,
        )
        self._storage, self._rows = storage, rows
        self._names = pa.array([c.name for c in model.classes], pa.string())
        self._kinds = pa.array([c.kind for c in model.classes], pa.string())
        self._parts: dict[int, list[pa.Table]] = {}
        self.complete = False
        self._claim(replace)
        shards = range(0 if self.complete else self._num_shards)
        self._pending = [shard for shard in shards if not self._is_stored(shard)]
        self.num_done = len(rows) - sum(self._size(shard) for shard in self._pending)

    def batches(self, max_rows: int) -> Iterator[np.ndarray]:
        """Row numbers int64 (b,) of the missing rows, b <= ``max_rows``; the same cuts however often the work
        was interrupted, so that results are the same too.
        """
        for shard in list(self._pending):
            start, stop = shard * SHARD_ROWS, shard * SHARD_ROWS + self._size(shard)
            for first in range(start, stop, max_rows):
                yield np.arange(first, min(first + max_rows, stop))

    def add(self, results: pa.Table) -> None:
        """Take a :func:`result_table` of pending rows; a shard is stored as soon as it is whole.

        Raises:
            StorageError: it cannot be written.
        """
        shards = results["row"].to_numpy() // SHARD_ROWS
        for shard in np.unique(shards).tolist():
            parts = self._parts.setdefault(shard, [])
            parts.append(results.filter(pa.array(shards == shard)))
            if sum(map(len, parts)) >= self._size(shard):
                table = pa.concat_tables(self._parts.pop(shard)).sort_by("row")
                first = shard * SHARD_ROWS
                assert table["row"].to_pylist() == list(range(first, first + self._size(shard)))
                self._storage.write(_shard_name(shard), _parquet_bytes(self._complete(table)))
        self.num_done += len(results)

    def finish(self) -> Summary:
        """Join the shards into ``predictions.parquet`` and count.

        Raises:
            StorageError: it cannot be written.
        """
        if not self.complete:
            assert not self._parts
            metadata = {METADATA: json.dumps(asdict(self.identity)).encode()}
            schema = _schema(self.embedding).with_metadata(metadata)
            tables = (_read_shard(self._storage, shard) for shard in range(self._num_shards))
            write_table(self._storage, schema, tables)
            self.complete = True
        self._storage.delete(SHARDS)
        status = read_columns(self._storage, ["status"])["status"]
        bad = pa.compute.sum(pa.compute.equal(status, "bad")).as_py() or 0
        assert len(status) == len(self._rows)
        return Summary(self._storage.path(FILE), len(status), len(status) - bad, bad)

    @property
    def _num_shards(self) -> int:
        return -(-len(self._rows) // SHARD_ROWS)

    def _size(self, shard: int) -> int:
        return min(SHARD_ROWS, len(self._rows) - shard * SHARD_ROWS)

    def _claim(self, replace: bool) -> None:
        """Make the directory ours, or continue there."""
        storage = self._storage
        for name in storage.list():
            if name.startswith(f".{FILE}."):  # what a killed process was joining
                storage.delete(name)
            elif name.endswith(".parquet") and name != FILE:
                raise ConfigError(f"{storage.path(name)} is not ours; choose another --output")
        found = None
        with suppress(StorageError) if replace else nullcontext():
            found = read_identity(storage)
        if found == self.identity:
            self.complete = True
            return
        if found is not None and not replace:
            raise self._refused(found)
        claim = f"{SHARDS}/manifest.json"
        if storage.exists(claim):
            found = _identity(storage.read(claim))
            if found != self.identity and not replace:
                raise self._refused(found)
        elif storage.exists(FILE) and not replace:
            raise ConfigError(f"{storage.path(FILE)} is not ours; choose another --output")
        if found != self.identity or not storage.exists(claim):
            storage.delete(SHARDS)
            storage.write(claim, json.dumps(asdict(self.identity)).encode())

    def _refused(self, found: Identity | None) -> ConfigError:
        words = {
            "model_hash": "of another model", "data": "of other data", "rows": "of other data",
            "names": "under other class names", "routes": "under other decisions on classes",
            "embedding": "with another --embedding", "aligned": "without head agreement",
        }  # fmt: skip
        differing = [] if found is None else [
            text for key, text in words.items() if getattr(found, key) != getattr(self.identity, key)
        ]  # fmt: skip
        what = " ".join(differing[:1]) or "of another version"
        where = self._storage.uri
        return ConfigError(f"{where} holds predictions {what}; choose another --output, or empty it")

    def _is_stored(self, shard: int) -> bool:
        """Whether a whole shard is there; a damaged one is made again."""
        if not self._storage.exists(_shard_name(shard)):
            return False
        try:
            table = _read_shard(self._storage, shard)
        except StorageError:
            return False
        return len(table) == self._size(shard) and table.schema.equals(_schema(self.embedding))

    def _complete(self, table: pa.Table) -> pa.Table:
        """Results (n rows in order) -> rows of the final table."""
        rows = table["row"].to_pylist()
        uris = [self._rows.images[row] if self._has_paths else None for row in rows]
        is_bad = pa.compute.is_valid(table["reason"])
        index = table["class_index"].combine_chunks()
        columns = {
            "id": pa.array([self._rows.ids[row] for row in rows], pa.string()),
            "uri": pa.array([_uri(uri) for uri in uris], pa.string()),
            "class_index": index,
            "class_name": self._names.take(index),
            "kind": self._kinds.take(index),
            **{name: table[name] for name in SCORES},
            "status": pa.compute.if_else(is_bad, "bad", "ok"),
            "reason": table["reason"],
            "model_hash": pa.array([self.identity.model_hash] * len(table), pa.string()),
        }
        if self.embedding:
            columns["embedding"] = table["embedding"]
        return pa.table(columns, schema=_schema(self.embedding))

    @property
    def _has_paths(self) -> bool:
        """Whether any row may be a file: reading pixels or bytes only to find out would be a waste."""
        return not isinstance(self._rows.images, np.ndarray)


# ------------------------------------------------------------------------------------------------- the file
def read_identity(storage: Storage) -> Identity | None:
    """What ``predictions.parquet`` was made from; None where there is none, or it is not one of ours."""
    if not storage.exists(FILE):
        return None
    with _reading(storage) as file:
        return _identity((file.schema_arrow.metadata or {}).get(METADATA, b""))


def read_columns(storage: Storage, columns: Sequence[str]) -> pa.Table:
    """Columns of ``predictions.parquet``. Raises StorageError where it cannot be read."""
    with _reading(storage) as file:
        return file.read(list(columns))


def rename(storage: Storage, classes: Sequence[OutputClass]) -> bool:
    """Put the names of ``classes`` into ``predictions.parquet``; nothing else changes.

    Returns:
        Whether that was enough: False where there is no table, or other classes were merged or dropped when
        it was made.
    """
    found = read_identity(storage)
    if found is None or found.routes != routes_hash(classes):
        return False
    names = pa.array([c.name for c in classes], pa.string())
    with _reading(storage) as file:
        old = file.schema_arrow
        identity = asdict(found) | {"names": names_hash(classes)}
        schema = old.with_metadata({**(old.metadata or {}), METADATA: json.dumps(identity).encode()})
        place = schema.get_field_index("class_name")

        def renamed() -> Iterator[pa.Table]:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                column = names.take(table["class_index"].combine_chunks())
                yield table.set_column(place, schema.field(place), column)

        write_table(storage, schema, renamed())
    return True


def write_table(storage: Storage, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    """Write ``predictions.parquet`` piece by piece; it appears whole (on object stores: when it is closed).

    Raises:
        StorageError: the file system refuses.
    """
    with storage.create(FILE) as stream, pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.cast(schema))


@contextmanager
def _reading(storage: Storage) -> Iterator[pq.ParquetFile]:
    with storage.open(FILE) as source, pq.ParquetFile(source) as file:
        yield file


def _read_shard(storage: Storage, shard: int) -> pa.Table:
    try:
        return pq.read_table(pa.BufferReader(storage.read(_shard_name(shard))))
    except pa.ArrowException as error:
        raise StorageError(f"cannot read {storage.path(_shard_name(shard))}: {error}") from None


def _parquet_bytes(table: pa.Table) -> bytes:
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, compression="zstd")
    return stream.getvalue().to_pybytes()


def _identity(data: bytes) -> Identity | None:
    try:
        return Identity(**json.loads(data))
    except (ValueError, TypeError):
        return None


def _schema(embedding: bool) -> pa.Schema:
    return SCHEMA.append(EMBEDDING) if embedding else SCHEMA


def _shard_name(shard: int) -> str:
    return f"{SHARDS}/{shard:06d}.parquet"


def _uri(image: Any) -> str | None:
    """Local paths absolute, and as valid text; None for bytes and pixels."""
    if not isinstance(image, str):
        return None
    return shown(full_path(image))
