"""Predict the classes of rows, and store them in order as a data set of Parquet files.

The folder ``predictions/`` has one file for each partition of the rows, which appears
when it is complete, and a JSON file that says what the predictions are made from. The
same command continues with the missing partitions. ``pandas.read_parquet`` and
``pyarrow.parquet.read_table`` read the folder as one table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch
from torch import Tensor

from uno.data import output
from uno.data.decode import (
    BATCHES_AHEAD,
    Decoding,
    decode_many,
    ok_mask,
    prefetch_map,
)
from uno.data.files import Storage
from uno.data.images import Images, path_of
from uno.data.rows import Rows
from uno.errors import ConfigError, StorageError
from uno.results.classes import OutputClass, hashes, prediction_labels
from uno.results.infer import NUMBERS, Classifier, Scores, rows_that_fit
from uno.threads import available_cpus

FOLDER = "predictions"
PART = f"{FOLDER}/part-{{:06d}}.parquet"
# what the predictions are made from; readers of Parquet ignore names that begin with _
MARK = f"{FOLDER}/_made_from.json"
FORMAT = 3
BATCH_ROWS = 2**13  # rows that are read at a time
NUM_PARTITIONS = 256  # least number of partitions of a source with enough rows
# rows of a partition; batches, which are powers of two, divide it
MIN_PART_ROWS, MAX_PART_ROWS = 2**9, 2**14
READERS = 8  # files of partitions that are read ahead
METADATA = b"uno"  # key of the identity in the metadata of a file

COLUMNS = {
    "id": pa.string(),
    "uri": pa.string(),  # path of the image; null if it is inside a table
    "label": pa.string(),  # the label with which the run was trained, or null
    "class_index": pa.int32(),  # null if the status is bad, like all results
    "class_name": pa.string(),
    "kind": pa.string(),  # known, novel, or rejected (of a dropped class)
    **dict.fromkeys(NUMBERS, pa.float32()),
    "status": pa.string(),  # ok or bad
    "reason": pa.string(),  # why the image could not be read
    "model_hash": pa.string(),
}
# Parquet files call the numbers of a list "element".
EMBEDDING = pa.list_(pa.field("element", pa.float32()))
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
    """The numbers of rows of complete predictions, where ``ok + bad = rows``.

    Attributes:
        path: The path or URI of the folder ``predictions``.
        rows: The number of rows.
        ok: The number of rows with a prediction.
        bad: The number of rows that could not be read.
    """

    path: str
    rows: int
    ok: int
    bad: int


def partition_rows(num_rows: int) -> int:
    """Return the number of rows that one Parquet file of predictions holds.

    It is the largest power of two with which :data:`NUM_PARTITIONS` (256) files are
    full, but at least :data:`MIN_PART_ROWS` (512) and at most :data:`MAX_PART_ROWS`
    (16,384). So there are fewer than 256 files if there are few rows, and more if there
    are many. The last file may hold fewer rows.

    Args:
        num_rows: The number of all rows.
    """
    power = max(1, num_rows // NUM_PARTITIONS).bit_length() - 1
    return min(max(2**power, MIN_PART_ROWS), MAX_PART_ROWS)


class InputSpec(NamedTuple):
    """The form in which a model takes images.

    Attributes:
        size: The side of the square images in pixels.
        chunk_rows: The number of images to decode at once, the rows of a
            :class:`Chunk`.
        decoding: How the images are resized and scaled to 8 bits.
    """

    size: int
    chunk_rows: int
    decoding: Decoding

    @classmethod
    def of(cls, model: Classifier, part_rows: int) -> InputSpec:
        """Return the form in which a model takes the images of a partition.

        Args:
            model: The model.
            part_rows: The number of rows of a partition, the rows of one Parquet file.

        Returns:
            The form. Its ``chunk_rows`` is ``part_rows``, or the largest power of two
            of images with at most 64 MiB of pixels if that is less, but at least 1.
        """
        rows = min(part_rows, rows_that_fit(model.size))
        return cls(model.size, rows, Decoding.of(model.config.data))


class Chunk(NamedTuple):
    """Rows that follow each other, whose images are decoded at once.

    Attributes:
        first: The number of the first row among all rows to predict.
        names: A table with the id and the label of each row, see
            :meth:`PredictionWriter.names_of`.
        images: The images of the rows, not decoded yet.
    """

    first: int
    names: pa.Table
    images: Images


def predict_rows(
    model: Classifier,
    writer: PredictionWriter,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Classify in this process the rows that a writer still lacks, and write them.

    In the end the predictions are marked as complete. Unreadable images get a row, too,
    with the reason.

    Args:
        model: The model.
        writer: Holds the rows, and writes the Parquet files that are missing.
        threads: The number of threads that decode ahead; None for one for each core
            that this process may use.
        on_progress: Called as ``on_progress(done, total)`` with the number of rows that
            are done and of all rows, after each batch of the model. Rows whose files
            existed before count as done. By default nothing is called.

    Returns:
        The numbers of all, readable and unreadable rows, and the path of the
        predictions.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later; or a file
            of predictions cannot be written.
        ConfigError: A file that holds many images, such as a tar shard, cannot be read.
    """
    how, data = InputSpec.of(model, writer.part_rows), writer.data
    parts = (np.array(writer.rows_of(number)) for number in writer.missing)
    chunks = (
        chunk
        for rows in parts
        for chunk in split_chunks(
            writer.names_of(rows), data.images.take(rows), int(rows[0]), how
        )
    )
    decode = partial(decode_chunk, how=how, threads=threads or available_cpus())
    for facts, pixels in prefetch_map(decode, chunks, 1, BATCHES_AHEAD):
        for results in classify(model, facts, pixels, writer.embedding):
            writer.add(results)
            on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def split_chunks(
    names: pa.Table, images: Images, first: int, how: InputSpec
) -> Iterator[Chunk]:
    """Divide the rows of a partition into chunks, whose images are decoded at once.

    Args:
        names: A table with the id and the label of the n rows of the partition.
        images: The images of these rows.
        first: The number of the partition's first row among all rows.
        how: The form in which the model takes images.

    Yields:
        Chunks of ``how.chunk_rows`` rows; the last one may have fewer.
    """
    start = 0
    for some in images.split(how.chunk_rows):
        yield Chunk(first + start, names.slice(start, len(some)), some)
        start += len(some)


def decode_chunk(chunk: Chunk, how: InputSpec, threads: int) -> tuple[pa.Table, Tensor]:
    """Decode the images of a chunk of rows.

    Args:
        chunk: The chunk, with n rows.
        how: The form in which the model takes images.
        threads: The number of threads.

    Returns:
        A table with the columns row (its number), id, label, uri and reason (why the
        image could not be read, or null), and the pixels uint8 (n, 3, S, S). The row is
        numbered among all rows to predict. The uri is the path or URI of the image (of
        the row's picture, if the source holds embeddings), null if it is no file of its
        own. Features (n, D) stand in the place of the pixels if the source holds
        embeddings, or if a run has just computed the features of its frozen encoder.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later.
        ConfigError: A file that holds many images, such as a tar shard, cannot be read.
    """
    rows = np.arange(len(chunk.names))
    ready = chunk.images.prepared(rows)
    if ready is not None:
        (pixels, reasons), places = ready, chunk.images.paths(rows)
    else:
        found = chunk.images.read_images(rows)
        pixels, reasons = decode_many(found, how.size, threads, how.decoding)
        places = [path_of(image) for image in found]
    facts = {
        "row": chunk.first + rows,
        "id": chunk.names["id"],
        "label": chunk.names["label"],
        "uri": pa.array(places, pa.string()),
        "reason": pa.array(reasons, pa.string()),
    }
    return pa.table(facts), pixels


def classify(
    model: Classifier, facts: pa.Table, pixels: Tensor, embedding: bool
) -> Iterator[pa.Table]:
    """Classify the rows of a decoded chunk, batch by batch.

    Args:
        model: The model.
        facts: The table of the n rows from :func:`decode_chunk`, with the columns row,
            id, label, uri and reason.
        pixels: The pixels of these rows, uint8 (n, 3, S, S) with sides of S pixels, or
            their D features, (n, D).
        embedding: Whether to add the features as the column "embedding".

    Yields:
        The table of each batch of at most ``model.batch_rows`` rows with its scores,
        see :func:`result_table`. Unreadable rows are in it, with nulls.
    """
    ok = ok_mask(facts["reason"].to_pylist())
    for start in range(0, len(facts), model.batch_rows):
        batch = slice(start, start + model.batch_rows)
        readable = torch.from_numpy(ok[batch])
        scores = model.score(pixels[batch][readable]) if readable.any() else None
        yield result_table(facts[batch], ok[batch], scores, embedding)


def result_table(
    facts: pa.Table, ok: np.ndarray, scores: Scores | None, embedding: bool
) -> pa.Table:
    """Return the table of the rows of a batch with the scores as further columns.

    Args:
        facts: The table of the b rows, with the columns row, id, label, uri and reason
            of :func:`decode_chunk`.
        ok: Which rows could be read, bool (b,).
        scores: The scores of the readable rows in order; None if no row could be read.
        embedding: Whether to add the features as the column "embedding".

    Returns:
        The table with the additional columns class_index (int32) and
        :data:`~uno.results.infer.NUMBERS`: probability, margin, entropy, head_agreement
        and known_probability (float32). With ``embedding`` also the column embedding, a
        list of float32 in each row. The additional columns are null for rows that could
        not be read. A score is null also where it is NaN, as head_agreement is if it is
        not known which clusters of different heads are the same class.
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
    """Writes the Parquet files of partitions of the predictions, in any process.

    Attributes:
        classes: The output classes of the model.
        identity: What the predictions are made from, such as the hashes of the model
            and of the data, with the keys of :data:`DIFFERENCES`. It is stored in the
            metadata of each file.
    """

    classes: list[OutputClass]
    identity: dict[str, Any]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the files, with the identity as JSON in its metadata.

        It has :data:`COLUMNS`, and the column "embedding" if the identity says so.
        """
        columns = COLUMNS | (
            {"embedding": EMBEDDING} if self.identity["embedding"] else {}
        )
        return pa.schema(columns, {METADATA: json.dumps(self.identity).encode()})

    def write(self, storage: Storage, number: int, results: pa.Table) -> None:
        """Write the Parquet file of a partition, or replace it.

        The columns class_name, kind, status and model_hash are added, and row is left
        out. The status is "bad" if the row has a reason, otherwise "ok".

        Args:
            storage: The directory above the folder ``predictions``.
            number: The number of the partition, from 0.
            results: All rows of the partition in order, with the columns of
                :func:`result_table`. Further columns are ignored.

        Raises:
            StorageError: The file cannot be written.
        """
        index = results["class_index"].combine_chunks()
        names, kinds = (
            pa.array(labels, pa.string())
            for labels in zip(*prediction_labels(self.classes), strict=True)
        )
        bad = pa.compute.is_valid(results["reason"])
        columns = {
            **{name: results[name] for name in results.column_names},
            "class_name": names.take(index),
            "kind": kinds.take(index),
            "status": pa.compute.if_else(bad, "bad", "ok"),
            "model_hash": pa.repeat(self.identity["model_hash"], len(results)),
        }
        schema = self.schema
        table = pa.table({name: columns[name] for name in schema.names}, schema=schema)
        with storage.create(PART.format(number)) as stream:
            pq.write_table(table, stream, compression="zstd")


class PredictionWriter:
    """Collects the predictions of all rows, and writes them as Parquet files.

    Each file holds the rows of one partition. If the directory holds some files of the
    same predictions, only the missing ones are written. Making an object marks the
    folder ``predictions`` as that of these predictions, and deletes the files in it
    that do not belong to them. If the folder is already marked as holding all of these
    predictions, and all their files are there and whole, only temporary files are
    deleted.

    Args:
        storage: The directory above the folder ``predictions``: a run directory or an
            output directory.
        data: The N rows to predict.
        model: The model. It is not called here. Only its classes, its hash, the hashes
            of its code and whether its heads are aligned are used.
        embedding: Whether the table has a column with the features.
        labels: The label of each row with which the run was trained, or null; an Arrow
            array of strings (N,). None if no row has a label, as for rows that are not
            those of the run.
        replace: Whether other predictions may be replaced: those that differ in any
            fact of :data:`DIFFERENCES`, such as the model, the data, the names of the
            classes or ``embedding``. Otherwise they are an error. Predictions that
            differ in nothing but the modification times of the images are replaced in
            any case.

    Attributes:
        complete: Whether the folder is marked as holding the predictions of all rows.
            :meth:`finish` does so.
        num_done: The number of rows that are written, or collected in memory.

    Raises:
        ConfigError: The directory holds predictions of another model, other data and
            the like and not ``replace``, or a folder ``predictions`` that ``uno
            predict`` did not write.
        StorageError: The directory cannot be read or written.
    """

    def __init__(
        self,
        storage: Storage,
        data: Rows,
        model: Classifier,
        embedding: bool,
        labels: pa.Array | None = None,
        replace: bool = False,
    ) -> None:
        self.data, self.embedding, self.num_rows = data, embedding, len(data)
        self._labels = pa.nulls(len(data), pa.string()) if labels is None else labels
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
        self.part_writer = PartWriter(model.classes, self.identity)
        self.part_rows = partition_rows(self.num_rows)
        self.storage, self._parts = storage, dict[int, list[pa.Table]]()
        self._num_parts = -(-self.num_rows // self.part_rows)
        was_complete, stored = self._claim(replace), self._find_stored()
        self._missing = {*range(self._num_parts)} - stored
        self.complete = was_complete and not self._missing
        if was_complete and self._missing:  # a file was deleted or damaged since
            _write_mark(storage, self.identity, self.part_rows, "incomplete")
        if not self.complete:
            self._delete_others(stored)
        self.num_done = self.num_rows - sum(
            len(self.rows_of(number)) for number in self._missing
        )

    @property
    def missing(self) -> list[int]:
        """The numbers of the partitions without a complete file, in ascending order.

        Partitions are numbered from 0.
        """
        return sorted(self._missing)

    def names_of(self, rows: np.ndarray) -> pa.Table:
        """Return the id and the label of some rows, as a table with these two columns.

        Args:
            rows: Row numbers, int64 (n,).
        """
        return pa.table(
            {"id": self.data.ids_of(rows), "label": self._labels.take(pa.array(rows))}
        )

    def rows_of(self, number: int) -> range:
        """Return the numbers of the rows of a partition, among all rows.

        Args:
            number: The number of the partition, from 0.
        """
        return range(
            number * self.part_rows, min((number + 1) * self.part_rows, self.num_rows)
        )

    def add(self, results: pa.Table) -> None:
        """Add the predictions of the next rows of a partition.

        They count as done. The file of the partition is written as soon as all its rows
        are there; until then they are kept in memory.

        Args:
            results: A table as :func:`result_table` returns it, with rows of one
                partition. The rows of a partition are added in order.

        Raises:
            StorageError: The file cannot be written.
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
        """Note that another process has written the file of a missing partition.

        Nothing is checked or written. Its rows count as done.

        Args:
            number: The number of the partition.
        """
        self._missing.remove(number)
        self.num_done += len(self.rows_of(number))

    def finish(self) -> Summary:
        """Mark the predictions as complete. All partitions must be written.

        The files are read again to count the unreadable rows.

        Returns:
            The numbers of all, readable and unreadable rows, and the path of the
            predictions.

        Raises:
            StorageError: A file of predictions is missing or damaged, or the mark
                cannot be written.
        """
        assert not self._parts and not self._missing
        if not self.complete:
            _write_mark(self.storage, self.identity, self.part_rows, "complete")
            self.complete = True
        bad = sum(
            len(batch) - batch["reason"].null_count
            for batch in read_batches(self.storage, ["reason"])
        )
        path = self.storage.below(FOLDER)
        return Summary(path, self.num_rows, self.num_rows - bad, bad)

    def _claim(self, replace: bool) -> bool:
        """Mark the folder as that of these predictions, or continue in it.

        Temporary files of killed processes are deleted. Unless the mark already names
        these predictions, it is written, with the state "incomplete". If only the
        modification times of images differ, this is done even without ``replace``, and
        a warning is logged: all rows are predicted again.

        Args:
            replace: Whether predictions of another model, other data and the like may
                be replaced.

        Returns:
            Whether the mark already said that the folder holds all of these
            predictions. The files are not checked.

        Raises:
            ConfigError: The folder holds predictions of another model, other data and
                the like and not ``replace``, or files that ``uno predict`` did not
                write.
        """
        storage = self.storage
        is_claimed = output.holds_output(storage, MARK, "set of predictions")
        output.delete_temporary_files(storage, FOLDER)
        mark = _read_mark(storage)
        if mark is not None and mark.made_from == self.identity:
            return mark.state == "complete"
        differences = [
            key
            for key in DIFFERENCES
            if mark is None or mark.made_from[key] != self.identity[key]
        ]
        if is_claimed and differences == ["times"]:
            log.warning(
                "images were written to since they were predicted: all are predicted"
                " again"
            )
        elif is_claimed and not replace:
            what = DIFFERENCES["format" if mark is None else differences[0]]
            raise ConfigError(
                f"{storage.below(FOLDER)} holds predictions {what}; choose another"
                " --output, or empty it"
            )
        # other partitions are told by their metadata, and deleted by _delete_others
        _write_mark(storage, self.identity, self.part_rows, "incomplete")
        return False

    def _find_stored(self) -> set[int]:
        """Find the partitions whose files are whole and belong to these predictions.

        Returns:
            The numbers of the partitions that were found.
        """
        numbers = {PART.format(number): number for number in range(self._num_parts)}
        names = [f"{FOLDER}/{name}" for name in self.storage.list(FOLDER)]
        there = [name for name in names if name in numbers]
        checked = prefetch_map(self._is_whole, there, READERS, READERS)
        whole = {name for name, is_whole in checked if is_whole}
        return {numbers[name] for name in whole}

    def _delete_others(self, stored: Collection[int]) -> None:
        """Delete the files in the folder that are no part of these predictions.

        Args:
            stored: The numbers of the partitions that are kept.
        """
        kept = {MARK, *(PART.format(number) for number in stored)}
        for name in self.storage.list(FOLDER):
            if f"{FOLDER}/{name}" not in kept:
                self.storage.delete(f"{FOLDER}/{name}")

    def _is_whole(self, name: str) -> tuple[str, bool]:
        """Check whether the file of a partition belongs to these predictions.

        Args:
            name: The path of the file below ``storage``, such as
                ``predictions/part-000000.parquet``.

        Returns:
            The name; and whether the file is readable, is made from the same model,
            data and so on, and has the right number of rows.
        """
        number = int(name.removesuffix(".parquet").rpartition("-")[2])
        with suppress(StorageError), _reading(self.storage, number) as file:
            schema = self.part_writer.schema
            same = file.schema_arrow.equals(schema, check_metadata=True)
            return name, same and file.metadata.num_rows == len(self.rows_of(number))
        return name, False


def read_identity(storage: Storage) -> dict[str, Any] | None:
    """Read what complete predictions were made from, such as the model and the data.

    Args:
        storage: The directory above the folder ``predictions``: a run, or the output
            directory of ``uno predict``.

    Returns:
        Hashes and other facts with the keys of :data:`DIFFERENCES`; None if there are
        no complete predictions, another version has written them, or the JSON file is
        damaged.

    Raises:
        StorageError: The JSON file cannot be read, or is too large.
    """
    mark = _read_mark(storage)
    if mark is None or mark.state != "complete" or mark.made_from["format"] != FORMAT:
        return None
    return mark.made_from


def read_columns(storage: Storage, names: Sequence[str]) -> pa.Table | None:
    """Read columns of complete predictions, in the order of the predicted rows.

    Args:
        storage: The directory above the folder ``predictions``: a run, or the output
            directory of ``uno predict``.
        names: The names of the columns: keys of :data:`COLUMNS` such as "class_name",
            or "embedding" if the predictions have it.

    Returns:
        A table with these columns and a row for each predicted or unreadable row; None
        if there are no complete predictions.

    Raises:
        StorageError: A file is missing or damaged.
    """
    if read_identity(storage) is None:
        return None
    columns = {**COLUMNS, "embedding": EMBEDDING}
    schema = pa.schema({name: columns[name] for name in names})
    return pa.Table.from_batches(read_batches(storage, names), schema)


def read_batches(storage: Storage, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read columns of complete predictions in batches, in the order of the rows.

    The caller makes sure that the predictions are complete.

    Args:
        storage: The directory above the folder ``predictions``: a run, or the output
            directory of ``uno predict``.
        names: The names of the columns: keys of :data:`COLUMNS` such as "class_name",
            or "embedding" if the predictions have it.

    Yields:
        Batches of at most ``BATCH_ROWS`` rows, with the columns ``names``.

    Raises:
        StorageError: A file is missing or damaged.
    """
    mark = _read_mark(storage)
    assert mark is not None
    for number in range(mark.num_parts):
        with _reading(storage, number) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=list(names)):
                yield batch.replace_schema_metadata(None)


def rename(storage: Storage, classes: list[OutputClass]) -> bool:
    """Write new names of the classes into stored predictions.

    All Parquet files are rewritten with the names, and the hash of the names in the
    JSON file is replaced. The predictions do not count as complete while their files
    are changed. After an interruption the same call rewrites all files again.

    Args:
        storage: The directory above the folder ``predictions``, such as a run.
        classes: All output classes of the model, with their new names.

    Returns:
        Whether this was done. Nothing is done if there are no predictions, if not all
        rows are predicted, or if ``classes`` are merged or dropped in another way than
        in the predictions.

    Raises:
        StorageError: A file is missing or damaged, or cannot be written.
    """
    mark = _read_mark(storage)
    if mark is None or mark.state == "incomplete":
        return False
    if mark.made_from["routes"] != hashes(classes)["routes"]:
        return False
    identity = mark.made_from | hashes(classes)
    writer = PartWriter(classes, identity)
    _write_mark(storage, identity, mark.part_rows, "renaming")
    for number in range(mark.num_parts):
        with _reading(storage, number) as file:
            table = file.read()
        writer.write(storage, number, table)
    _write_mark(storage, identity, mark.part_rows, "complete")
    return True


class Mark(NamedTuple):
    """What a folder of predictions holds, as stored in its JSON file.

    Attributes:
        made_from: What the predictions are made from, such as the hashes of the model
            and of the data, with the keys of :data:`DIFFERENCES`.
        part_rows: The number of rows of a partition, the rows of one Parquet file.
        state: "complete", "incomplete", or "renaming" while names of classes are
            changed.
    """

    made_from: dict[str, Any]
    part_rows: int
    state: str

    @property
    def num_parts(self) -> int:
        """The number of partitions, and so of Parquet files."""
        return -(-int(self.made_from["rows"]) // self.part_rows)


def _read_mark(storage: Storage) -> Mark | None:
    """Read the JSON file that says what a folder of predictions holds.

    Args:
        storage: The directory above the folder ``predictions``.

    Returns:
        The content; None if there is no such file, it is damaged, or its facts have
        other keys, as those of another version may have.

    Raises:
        StorageError: The file cannot be read, or is too large.
    """
    found = output.read_mapping(storage, MARK) or {}
    made_from, part_rows = found.get("made_from"), found.get("part_rows")
    is_ours = isinstance(made_from, dict) and made_from.keys() == DIFFERENCES.keys()
    if not is_ours or not isinstance(part_rows, int) or part_rows < 1:
        return None
    return Mark(dict(made_from or {}), part_rows, str(found.get("state")))


def _write_mark(
    storage: Storage, made_from: dict[str, Any], part_rows: int, state: str
) -> None:
    """Write or replace the JSON file that says what a folder of predictions holds.

    Args:
        storage: The directory above the folder ``predictions``.
        made_from: What the predictions are made from, with the keys of
            :data:`DIFFERENCES`.
        part_rows: The number of rows of a partition, the rows of one Parquet file.
        state: "complete"; "incomplete"; or "renaming" while the names of classes in the
            files are being changed.
    """
    mark = {"made_from": made_from, "part_rows": part_rows, "state": state}
    storage.write(MARK, json.dumps(mark, indent=1).encode())


@contextmanager
def _reading(storage: Storage, number: int) -> Iterator[pq.ParquetFile]:
    """Open the Parquet file of a partition until the ``with`` block ends.

    Args:
        storage: The output directory, or the directory of a run; the file is in its
            folder ``predictions``.
        number: The number of the partition, from 0.

    Raises:
        StorageError: The file is missing or damaged, also if that shows in the block.
    """
    with (
        storage.open(PART.format(number)) as source,
        pq.ParquetFile(source) as file,
    ):
        yield file
