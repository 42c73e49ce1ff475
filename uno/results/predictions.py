"""The table of predictions: one row for every input, in input order, in ``predictions.parquet``.

Finished shards of 512 rows wait in ``_shards/`` for the last step, which joins them; the same command goes on
with the missing ones. The schema's metadata says what the table was made from.
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
from uno.data.files import Storage, full_path, parse_json, shown
from uno.data.rows import Decoded, Rows
from uno.errors import ConfigError, StorageError
from uno.results.classes import OutputClass, hashes
from uno.results.infer import NUMBERS, Classifier, Decode, Scores, score_rows

FILE = "predictions.parquet"
SHARDS = "_shards"
SHARD = f"{SHARDS}/{{:06d}}.parquet"
CLAIM = f"{SHARDS}/manifest.json"  # what the shards are made from
SHARD_ROWS = 512
FORMAT = 1
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
    model: Classifier, decode: Decode, writer: PredictionWriter,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:  # fmt: skip
    """Classify what ``writer`` lacks, here, and finish; ``on_progress`` gets (rows done, N) after a batch."""
    for index, reasons, scores in score_rows(model, decode, writer.batches(model.batch_rows)):
        writer.add(result_table(index, reasons, scores, writer.embedding))
        on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def result_table(
    index: np.ndarray, reasons: Sequence[str | None], scores: Scores | None, embedding: bool
) -> pa.Table:
    """What :func:`score_rows` says of the rows ``index`` (b,), with ``embedding`` their features, too."""
    ok = readable(reasons)
    columns = {"row": pa.array(index, pa.int64()), "reason": pa.array(reasons, pa.string())}
    for name in ("class_index", *NUMBERS):
        values = np.zeros(len(index), np.int32 if name == "class_index" else np.float32)
        values[ok] = 0 if scores is None else getattr(scores, name).numpy()
        columns[name] = pa.array(values, mask=~ok | np.isnan(values))
    if embedding:
        features = iter([] if scores is None else scores.features.numpy())
        columns["embedding"] = pa.array([next(features) if fine else None for fine in ok], EMBEDDING)
    return pa.table(columns)


class PredictionWriter:
    """Collects results of ``model`` for ``rows``, with features if ``embedding``, and joins them.
    ConfigError: there are predictions of something else, and not ``replace``, or another's Parquet file.
    """

    def __init__(
        self, storage: Storage, rows: Rows, model: Classifier, embedding: bool, replace: bool = False
    ) -> None:
        self.rows, self.embedding, self.num_rows = rows, embedding, len(rows)
        self.identity = {
            "model_hash": model.model_hash, **hashes(model.classes), "data": rows.fingerprint,
            "rows": len(rows), "embedding": embedding, "aligned": model.alignment is not None,
            "format": FORMAT,
        }  # fmt: skip
        self._storage, self._classes = storage, model.classes
        self._schema = pa.schema(COLUMNS | ({"embedding": EMBEDDING} if embedding else {}))
        self._parts: dict[int, list[pa.Table]] = {}
        self._num_shards = -(-len(rows) // SHARD_ROWS)
        self.complete = self._claim(replace)
        shards = range(0 if self.complete else self._num_shards)
        self._pending = [shard for shard in shards if not self._is_stored(shard)]
        self.num_done = len(rows) - sum(len(self._rows_of(shard)) for shard in self._pending)

    def batches(self, max_rows: int) -> Iterator[np.ndarray]:
        """Row numbers int64 (b,) of missing rows, b <= ``max_rows``, cut alike after any interruption."""
        for shard in list(self._pending):
            rows = np.array(self._rows_of(shard))
            yield from (rows[start : start + max_rows] for start in range(0, len(rows), max_rows))

    def add(self, results: pa.Table) -> None:
        """Take the :func:`result_table` of one of :meth:`batches`; a shard is stored once it is whole."""
        shard = results["row"][0].as_py() // SHARD_ROWS
        parts = self._parts.setdefault(shard, [])
        parts.append(results)
        if sum(map(len, parts)) >= len(self._rows_of(shard)):
            table = pa.concat_tables(self._parts.pop(shard)).sort_by("row")
            assert table["row"].to_pylist() == list(self._rows_of(shard))
            with self._storage.create(SHARD.format(shard)) as stream:
                pq.write_table(self._complete(table), stream, compression="zstd")
        self.num_done += len(results)

    def finish(self) -> Summary:
        """Join the shards into ``predictions.parquet`` and count."""
        if not self.complete:
            assert not self._parts
            tables = (self._read(shard) for shard in range(self._num_shards))
            _write(self._storage, self._schema, self.identity, tables)
            self.complete = True
        self._storage.delete(SHARDS)
        with _reading(self._storage) as file:
            status = file.read(["status"])["status"].to_pylist()
        return Summary(self._storage.path(FILE), self.num_rows, status.count("ok"), status.count("bad"))

    def _rows_of(self, shard: int) -> range:
        return range(shard * SHARD_ROWS, min((shard + 1) * SHARD_ROWS, self.num_rows))

    def _claim(self, replace: bool) -> bool:
        """Make the directory ours, or continue there; whether nothing is left to do."""
        storage, finished = self._storage, None
        names = storage.list()
        for name in names:
            if name.startswith(f".{FILE}."):  # what a killed process was joining
                storage.delete(name)
        foreign = [name for name in names if name.endswith(".parquet") and name != FILE]
        with suppress(StorageError) if replace else nullcontext():
            finished = read_identity(storage)
        if not foreign and finished == self.identity:
            return True
        claimed = storage.exists(CLAIM)
        started = _identity(storage.read(CLAIM)) if claimed else None
        if not replace and finished is None and not claimed and storage.exists(FILE):
            foreign.append(FILE)
        if foreign:
            raise ConfigError(f"{storage.path(foreign[0])} is not ours; choose another --output")
        if not replace and (finished is not None or (claimed and started != self.identity)):
            found = finished or started or self.identity | {"format": None}
            what = next(text for key, text in DIFFERENCES.items() if found[key] != self.identity[key])
            raise ConfigError(f"{storage.uri} holds predictions {what}; choose another --output, or empty it")
        if started != self.identity:
            storage.delete(SHARDS)
            storage.write(CLAIM, json.dumps(self.identity).encode())
        return False

    def _is_stored(self, shard: int) -> bool:
        """Whether a whole shard is there; a damaged one is made again."""
        with suppress(StorageError):
            table = self._read(shard)
            return len(table) == len(self._rows_of(shard)) and table.schema.equals(self._schema)
        return False

    def _read(self, shard: int) -> pa.Table:
        with _reading(self._storage, SHARD.format(shard)) as file:
            return file.read()

    def _complete(self, table: pa.Table) -> pa.Table:
        """Results of the rows of a shard -> rows of the final table."""
        rows = table["row"].to_pylist()
        images = self.rows.images.source if isinstance(self.rows.images, Decoded) else self.rows.images
        found = [None if isinstance(images, np.ndarray) else images[row] for row in rows]
        uris = [shown(full_path(image)) if isinstance(image, str) else None for image in found]
        index = table["class_index"]
        columns = {
            **{name: table[name] for name in table.column_names},
            "id": pa.array([self.rows.ids[row] for row in rows], pa.string()),
            "uri": pa.array(uris, pa.string()),
            "class_name": _names(self._classes).take(index),
            "kind": pa.array([c.called[1] for c in self._classes], pa.string()).take(index),
            "status": pa.compute.if_else(pa.compute.is_valid(table["reason"]), "bad", "ok"),
            "model_hash": pa.array([self.identity["model_hash"]] * len(table), pa.string()),
        }
        return pa.table({name: columns[name] for name in self._schema.names}, schema=self._schema)


def read_identity(storage: Storage) -> dict[str, Any] | None:
    """What ``predictions.parquet`` was made from; None where there is none, or it is not one of ours."""
    if not storage.exists(FILE):
        return None
    with _reading(storage) as file:
        return _identity((file.schema_arrow.metadata or {}).get(METADATA, b""))


def read_columns(storage: Storage, names: Sequence[str]) -> pa.Table | None:
    """Columns of ``predictions.parquet``, in input order; None where there is none of ours."""
    if read_identity(storage) is None:
        return None
    with _reading(storage) as file:
        return file.read(list(names))


def rename(storage: Storage, classes: Sequence[OutputClass]) -> bool:
    """Put the names of ``classes`` into the table. False: there is none, or other classes were merged."""
    found = read_identity(storage)
    if found is None or found["routes"] != hashes(classes)["routes"]:
        return False
    names = _names(classes)
    with _reading(storage) as file:
        column = file.schema_arrow.get_field_index("class_name")
        groups = (file.read_row_group(group) for group in range(file.num_row_groups))
        renamed = (g.set_column(column, "class_name", names.take(g["class_index"])) for g in groups)
        _write(storage, file.schema_arrow, found | hashes(classes), renamed)
    return True


def _names(classes: Sequence[OutputClass]) -> pa.Array:
    return pa.array([c.called[0] for c in classes], pa.string())


def _write(storage: Storage, schema: pa.Schema, identity: dict[str, Any], tables: Iterator[pa.Table]) -> None:
    """Write ``predictions.parquet`` piece by piece; it appears whole."""
    schema = schema.with_metadata({**(schema.metadata or {}), METADATA: json.dumps(identity).encode()})
    with storage.create(FILE) as stream, pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.cast(schema))


@contextmanager
def _reading(storage: Storage, name: str = FILE) -> Iterator[pq.ParquetFile]:
    with storage.open(name) as source, pq.ParquetFile(source) as file:
        yield file


def _identity(data: bytes) -> dict[str, Any] | None:
    """None where ``data`` is not an identity of this format."""
    with suppress(ValueError):
        found = parse_json(data)
        return found if isinstance(found, dict) and found.keys() == DIFFERENCES.keys() else None
    return None
