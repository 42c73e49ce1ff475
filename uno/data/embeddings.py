"""Read and write files of vectors, which are used in the place of images.

The vectors are used as the features of a frozen encoder, so nothing is encoded. A
picture or a text of a row is only shown to people.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch
from torch import Tensor

from uno.config import ModelConfig
from uno.data import files as filesystem
from uno.data import tables
from uno.data.array_files import ARRAYS, COLUMNS, VectorFile, new_array, read_array_file
from uno.data.columns import class_codes, make_unlabeled
from uno.data.decode import ok_mask
from uno.data.from_python import class_names, distinct_ids, float_vectors
from uno.data.h5ad import H5AD, read_h5ad
from uno.data.image_paths import find_images
from uno.data.images import Image, Images
from uno.data.labels import encode_column, require_distinct
from uno.data.other_formats import fix_for
from uno.data.parquet import (
    TEXT,
    ParquetImages,
    ParquetShard,
    check_images,
    parquet_files,
    plain_type,
    values_in,
)
from uno.data.rows import DEFAULT_OPTIONS, ReadOptions, Rows
from uno.errors import ConfigError, StorageError, one_line
from uno.limits import MAX_ROWS
from uno.text import plural

METADATA = b"uno.vectors"  # key in the metadata of files that this module writes
MANY_NUMBERS = 8  # more columns of floats than this seem to be one vector
CSV_FIX = "text; save its numbers with np.save(FILE, np.loadtxt(CSV, delimiter=','))"
LIST = pa.large_list(pa.float32())
PIECE_ROWS = 2**16  # rows that are looked at or copied at once


@dataclass(frozen=True, eq=False)
class Vectors(Images):
    """The vectors of N rows, in the place of images.

    Attributes:
        values: float32 (N, V, D), V views of each row, the one for evaluation first.
            Rows without a usable vector have zeros.
        reasons: For each row the reason why it has no usable vector, or None.
        shown: Pictures of the rows, None if the source has none.
        words: Arrow array with a text of each row, None if the source has none.
    """

    values: Tensor
    reasons: Sequence[str | None]
    shown: Images | None = None
    words: Any = None

    @classmethod
    def of(cls, given: Any, what: str = "embeddings") -> Vectors:
        """Make vectors from a copy of the numbers that a caller passes.

        A row is unusable if any of its views has a number that is not finite, or is a
        vector of zeros. It gets a reason, and zeros in all its views.

        Args:
            given: Numbers (N, D), or (N, V, D) with V views of each row: an array, a
                tensor, nested lists or a column, see
                :func:`~uno.data.from_python.float_vectors`.
            what: The name of the argument, for messages.

        Returns:
            Vectors without pictures and texts.

        Raises:
            ConfigError: ``given`` has another type or shape, is empty or is sparse.
        """
        values = float_vectors(given, what).clone()
        reasons: list[str | None] = [None] * len(values)
        clear_unusable_(values, reasons)
        return cls(values, reasons)

    def __len__(self) -> int:
        return len(self.values)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Return the first view of each row, in the place of an image.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            n arrays float32 (D,).
        """
        return list(self.values[torch.from_numpy(rows), 0].numpy())

    def content_keys(self, rows: np.ndarray) -> Iterator[bytes]:
        """Yield the bytes of all views of each row, for the fingerprint of the data.

        Args:
            rows: Row numbers, int64 (n,).
        """
        return (self.values[row].numpy().tobytes() for row in rows.tolist())

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """Return the paths of the pictures of ``rows`` int64 (n,), a list of n entries.

        An entry is an absolute path or a URI. It is None for a row without a picture,
        or with a picture that is no separate file.
        """
        return [None] * len(rows) if self.shown is None else self.shown.paths(rows)

    def vectors(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]]:
        """Return the vectors of some rows, with all views.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            float32 (n, V, D), which are ``values`` themselves if all rows are asked for
            in order; and for each row the reason why it has no usable vector, or None.
        """
        reasons = [self.reasons[row] for row in rows.tolist()]
        if np.array_equal(rows, np.arange(len(self))):
            return self.values, reasons
        return self.values[torch.from_numpy(rows)], reasons

    def prepared(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]]:
        """Return the first view of each row, the one for evaluation.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            float32 (n, D), zeros for a row without a usable vector; and for each row
            the reason why it has none, or None.
        """
        values, reasons = self.vectors(rows)
        return values[:, 0], reasons

    def pictures(self) -> Images | None:
        """Return the pictures that a report shows for the N rows.

        Returns:
            The pictures in the source's column of images or image paths, or None if it
            has no such column.
        """
        return self.shown

    def captions(self, rows: np.ndarray) -> list[str | None]:
        """Return the text that a report shows for each row, None for no text.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            The n values of the source's column ``text``; n times None if it has no such
            column.
        """
        return (
            [None] * len(rows)
            if self.words is None
            else self.words.take(pa.array(rows)).to_pylist()
        )


def clear_unusable_(values: Tensor, reasons: list[str | None]) -> None:
    """Find rows that cannot be used, and set their vectors to zeros, in place.

    A row cannot be used if it has a reason already, or if any of its views has a number
    that is not finite, or is a vector of zeros. All its views are then set to zeros.

    Args:
        values: The vectors of V views of N rows, float32 (N, V, D). It is changed.
        reasons: For each row the reason why it has no usable vector, or None. In this
            list the reasons that are found replace None.
    """
    for start in range(0, len(values), PIECE_ROWS):
        part = values[start : start + PIECE_ROWS]
        finite = part.isfinite().all(dim=2)
        zeros = finite & (part == 0).all(dim=2)
        for bad, why in (
            (~finite, "numbers that are not finite"),
            (zeros, "a vector of zeros"),
        ):
            for row in bad.any(dim=1).nonzero()[:, 0].tolist():
                reasons[start + row] = reasons[start + row] or why
    unusable = np.flatnonzero(~ok_mask(reasons))
    values[torch.from_numpy(unusable)] = 0


def read_vectors(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> Rows:
    """Read vectors with their ids, labels and pictures.

    Parquet files have a column ``embedding`` with lists of D numbers. They may also
    have the columns id, label, eval_label, split, text, and image or path: the report
    shows the text, and the picture by its bytes or path. A .npy, .npz, .pt or .pth file
    holds numbers (R, D), which are R vectors. The same columns may be beside them: in a
    .csv file of the same name, or as other arrays of the .npz, .pt or .pth file. An
    .h5ad file has its vectors in ``obsm`` or ``X`` and the columns in ``obs``. In files
    other than Parquet a column of images holds paths. A row with an empty split is a
    training row. In a Parquet file without a column ``split``, the name of the file or
    of its folder decides, see :func:`~uno.data.rows.split_of`. In other files without
    it all rows are training rows.

    Vectors with the same id become one row with several views, at the place of the
    first one, from which the text and the picture of the row are taken. The first view
    is the one for evaluation. A row with fewer views than others repeats its own. A
    vector without an id is a row called row-NUMBER, numbered from 0 among all vectors,
    also where a column of ids has a gap; only if an .h5ad file has no column of ids,
    the id is the name of the cell. A row is unreadable if any of its vectors has
    another length than the most frequent one, has a number that is not finite, or is
    all zeros.

    Args:
        path: Path or URI of a .parquet, .npy, .npz, .pt, .pth or .h5ad file, or a
            folder of Parquet files.
        options: How the source is read. Its ``columns`` may give other names of the
            columns. Image paths are relative to ``image_folder``, or to the folder of
            the source if that is None. With ``images_only`` labels and splits are not
            used, and every row is an unlabeled training row.

    Returns:
        The rows, with a :class:`Vectors` as their images. The vectors are in memory, or
        mapped from a local .npy file of float32 or from a file without a name. The .npy
        file is never changed.

    Raises:
        ConfigError: There is no such file or column, a column such as ``Label`` would
            be ignored because of its spelling, the file has another ending or is
            damaged, it does not say which of several arrays the vectors are, it has no
            vectors or more than ``MAX_ROWS``, a label, split or image path cannot be
            used, none of the pictures that paths name exists (which is not checked in
            remote storage), vectors with the same id differ in label, eval_label or
            split, or a link leads out of a folder of Parquet files and
            ``options.follow_links`` is False.
        StorageError: A file for a large array of vectors cannot be made, for example
            because the disk is full.
        ModuleNotFoundError: The file is an .h5ad file, and h5py is not installed.
    """
    source = f"vectors:{path}"
    if path.endswith((*ARRAYS, H5AD)):
        read = read_h5ad if path.endswith(H5AD) else read_array_file
        content = read(path, options)
    elif filesystem.kind(path) == "file" and not path.endswith(".parquet"):
        fix = CSV_FIX if path.lower().endswith(".csv") else fix_for(path)
        what = f"; this is {fix}" if fix else ""
        kinds = ", ".join((".parquet", H5AD, *ARRAYS))
        raise ConfigError(f"{path}: vectors: reads {kinds}{what}")
    else:
        content = _read_parquet(source, path, options)
    values, num = content.values, len(content.values)
    if not 0 < num <= MAX_ROWS:
        raise ConfigError(f"{source}: {plural(num, 'row')}, not 1 to {MAX_ROWS:,}")
    unused = ("label", "eval_label", "split") if options.images_only else ()
    used = {name: c for name, c in content.columns.items() if name not in unused}
    columns = dict(zip(used, pa.table(used).columns, strict=True))
    ids = _make_ids(columns.get("id"), num)
    coded = ids.dictionary_encode()
    place = coded.indices.to_numpy()
    views = _group_views(place)
    first, num_views = views[:, 0], views.shape[1]
    labels, truth, split = (
        encode_column(source, columns[name], name=name)
        if name in columns
        else make_unlabeled(num)
        for name in ("label", "eval_label", "split")
    )
    require_distinct(source, labels, truth)
    for what, column in (("label", labels), ("eval_label", truth), ("split", split)):
        codes = class_codes(column)
        if (differ := np.flatnonzero(codes != codes[first][place])).size:
            raise ConfigError(
                f"{source}: rows of id {one_line(repr(ids[differ[0]].as_py()))} differ"
                f" in {what}"
            )
    is_train = tables.splits_in(source, split)[first]
    reasons = list[str | None]([None] * len(first))
    for row, reason in content.reasons.items():
        reasons[place[row]] = reasons[place[row]] or reason
    if num_views == 1:  # the rows are in order
        values = values[:, None]
    else:
        values = new_array((*views.shape, values.shape[1]))
        for start in range(0, len(views), PIECE_ROWS):
            own = slice(start, start + PIECE_ROWS)
            values[own] = content.values[views[own]]
    found = torch.from_numpy(values)
    clear_unusable_(found, reasons)
    pictures = content.pictures
    if pictures is None and "path" in columns:
        root = filesystem.split(path)[0] if filesystem.kind(path) == "file" else path
        paths = values_in(columns["path"].cast(pa.string()))
        pictures = find_images(source, root, paths, options, may_lack=True)
    shown = None if pictures is None else pictures.take(first)
    words = None
    if "text" in columns:
        words = columns["text"].cast(pa.string()).combine_chunks().take(pa.array(first))
    notes = content.notes
    if num_views > 1:
        notes += (f"rows of one id, {num_views} at most, are its views",)
    if "label" not in content.columns and not options.images_only:
        notes += tables.note_of_no_label(path, content.names, options.columns)
        if path.endswith(ARRAYS) and not content.names:
            beside = f"{os.path.splitext(path)[0]}.csv"
            fix = f"write them to {beside}, column label, one row a vector"
            notes = (*notes, f"no labels: {fix}")
    return Rows(
        coded.dictionary,
        Vectors(found, reasons, shown, words),
        labels.take(first),
        is_train,
        source,
        notes=notes,
        eval_labels=truth.take(first) if "eval_label" in columns else None,
    )


def _make_ids(given: Any, num_rows: int) -> pa.Array:
    """Return the id of each row as text.

    Args:
        given: Arrow column of ids, or None if there are none. A row without an id (no
            column, a null or an empty text) gets "row-NUMBER", from 0.
        num_rows: The number of rows.

    Returns:
        An array (num_rows,) of large strings. The ids need not be different.
    """
    ids = pa.array((f"row-{row}" for row in range(num_rows)), pa.large_string())
    if given is None:
        return ids
    given = given.cast(pa.large_string()).combine_chunks()
    is_given = pa.compute.not_equal(given, "").fill_null(False)
    return pa.compute.if_else(is_given, given, ids)


def _group_views(place: np.ndarray) -> np.ndarray:
    """Return which vectors are the views of each id.

    Args:
        place: The number of the id of each vector, int (R,), from 0 to N - 1. Each
            number occurs.

    Returns:
        For each id the numbers of its vectors in ascending order, int64 (N, V). V is
        the largest number of views of an id. An id with fewer views repeats its own
        from the first on.
    """
    counts, order = np.bincount(place), np.argsort(place, kind="stable")
    starts = np.cumsum(counts) - counts
    return order[starts[:, None] + np.arange(counts.max()) % counts[:, None]]


def require_kind(config: ModelConfig, images: Images) -> None:
    """Check that the encoder of a model takes what a source holds.

    The encoder and the source must both have images, or vectors of the same length. The
    encoder "vectors:D" takes vectors of D numbers. "vectors" without a length is
    refused for every source.

    Args:
        config: The section ``model`` of the configuration, with the final encoder.
        images: The images or vectors.

    Raises:
        ConfigError: The model takes vectors and these are images, or the other way
            round, or the vectors have another length.
    """
    found = images.vectors(np.arange(0))
    takes = (
        "images"
        if not config.takes_vectors
        else f"vectors of {config.encoder.partition(':')[2]} numbers"
    )
    given = "images" if found is None else f"vectors of {found[0].shape[2]} numbers"
    if takes != given:
        raise ConfigError(
            f"model.encoder {config.encoder} takes {takes}, the data has {given}"
        )


class GivenVectors(NamedTuple):
    """Embeddings that a caller passes, in the form in which they are stored.

    Attributes:
        values: float32 (N, V, D), V views of each row.
        columns: Name of a column -> Arrow array of text (N,): ``id``, and ``label`` if
            the caller passes labels, with null for an unlabeled row.
    """

    values: Tensor
    columns: dict[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the numbers, their shape and the columns, 64 hex digits."""
        found = hashlib.sha256(repr(tuple(self.values.shape)).encode())
        for name, column in self.columns.items():
            text = json.dumps([name, column.to_pylist()])
            found.update(text.encode())
        for part in self.values.split(PIECE_ROWS):
            found.update(part.contiguous().numpy())
        return found.hexdigest()

    def store(self, path: str) -> None:
        """Write the vectors and columns to a Parquet file, by an atomic write.

        Each view is a row of the file. :func:`read_vectors` reads the file.

        Args:
            path: Path or URI of the file, which is replaced if it exists.

        Raises:
            StorageError: The file cannot be written.
        """
        counts = np.full(len(self.values), self.values.shape[1])
        write_vectors(path, self.values, counts, self.columns)


def given_vectors(embeddings: Any, labels: Any = None, ids: Any = None) -> GivenVectors:
    """Check embeddings, labels and ids that a caller passes.

    Args:
        embeddings: Numbers (N, D), or (N, V, D) with V views of each row: an array, a
            tensor, nested lists or a column, see
            :func:`~uno.data.from_python.float_vectors`.
        labels: The class of each row (N,), a name, whole number or boolean. A missing
            value, a blank text or a negative number stands for an unlabeled row. None
            for no labels at all.
        ids: The id of each row (N,), all different; None for "row-0", "row-1", ...

    Returns:
        The vectors float32 (N, V, D), which may share their memory with ``embeddings``,
        and the columns of ids and labels as text, in the form in which they are stored.

    Raises:
        ConfigError: The numbers of rows differ, an argument has another type or shape,
            a label is a fraction, an id is missing, or two ids are equal. Vectors that
            are not finite or are zeros are accepted here; :func:`read_vectors` marks
            them as unreadable.
    """
    values = float_vectors(embeddings, "embeddings")
    num, columns = len(values), dict[str, list[Any]]()
    columns["id"] = (
        [f"row-{row}" for row in range(num)] if ids is None else distinct_ids(ids)
    )
    if labels is not None:
        columns["label"] = class_names(labels)
    for name, column in columns.items():
        if len(column) != num:
            raise ConfigError(
                f"{len(column):,} {name}s for {num:,} embeddings; give one for each row"
            )
    text = {name: pa.array(column, pa.string()) for name, column in columns.items()}
    return GivenVectors(values, text)


def write_vectors(
    path: str, values: Tensor, counts: np.ndarray, columns: Mapping[str, Any]
) -> None:
    """Write vectors as one Parquet file, by an atomic write.

    The vectors are in the column ``embedding``, as lists of D numbers. The metadata of
    the file has a mark by which :func:`is_vectors` knows it.

    Args:
        path: Path or URI of the file, which is replaced if it exists. Missing folders
            are created.
        values: float32 (N, V, D), V views of N rows.
        counts: int64 (N,), how many views of each row are written, 0 to V: the first
            ones. Each view is a row of the file. Its number, from 0 for each of the N
            rows, is in the column ``view``.
        columns: Column name -> Arrow array (N,), the other columns of the file. The
            value of a row is written for each of its views.

    Raises:
        StorageError: The file cannot be written.
    """
    folder, name = filesystem.split(path)
    rows = np.repeat(np.arange(len(values)), counts)
    view = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = values[torch.arange(values.shape[1]) < torch.from_numpy(counts)[:, None]]
    lists = pa.FixedSizeListArray.from_arrays(
        pa.array(chosen.flatten().numpy()), values.shape[2]
    )
    table = pa.table(
        {name: column.take(pa.array(rows)) for name, column in columns.items()}
        | {"view": pa.array(view, pa.int32()), "embedding": lists}
    )
    table = table.replace_schema_metadata({METADATA: b"1"})
    with filesystem.Storage(folder).create(name) as stream:
        pq.write_table(
            table,
            stream,
            compression="zstd",
            use_dictionary=[*columns],  # not for the numbers, which seldom repeat
            write_page_checksum=True,
        )


def is_vectors(path: str) -> bool:
    """Return whether a file is one that :func:`write_vectors` has written.

    Args:
        path: Path or URI of a Parquet file.

    Returns:
        Whether the metadata of the file say so. False also if there is no such file, it
        cannot be read, or it is no Parquet file.
    """
    folder, name = filesystem.split(path)
    try:
        with filesystem.Storage(folder).open(name) as file:
            return METADATA in (pq.read_schema(file).metadata or {})
    except (StorageError, pa.ArrowException):
        return False


def _read_parquet(source: str, path: str, options: ReadOptions) -> VectorFile:
    """Read the vectors of one Parquet file, or of all *.parquet files of a folder.

    If a column holds the bytes of images, these are the pictures of the rows. A column
    of image paths is returned as the column ``path``.

    Args:
        source: The source, as error messages name it.
        path: Path or URI of the file or folder.
        options: How the source is read.

    Returns:
        The vectors of all files, one file after the other, with the reasons of the rows
        whose list has another length than the most frequent one; the standard columns
        (id, label, eval_label, split, path and text) that are there, of which "split"
        follows from the name of a file or its folder where the file has no such column;
        and the names of all columns of the last file. There are no notes.

    Raises:
        ConfigError: There is no file, or the files are an unfinished ``uno data pack``;
            a file is damaged, has no column of vectors, lacks a column that ``options``
            names, or has a column such as ``Label`` that would be ignored because of
            its spelling; the types of a column do not fit together in several files; a
            column of images holds something else, or only some of the files have bytes
            of images; the folder of a file stands for a column of labels or splits or
            one that ``options`` names (LABEL=VALUE, not checked with ``images_only``);
            there are no rows, or an empty or missing list is the most frequent one; or
            a folder cannot be listed, or a link leads out of it and
            ``options.follow_links`` is False.
        StorageError: A file for a large array of vectors cannot be made, for example
            because the disk is full.
    """
    names = options.columns
    _, files = parquet_files(path, options.follow_links)
    tables.refuse_partitions(source, files, options)
    image, vector = (names.get(ours, ours) for ours in ("image", "embedding"))
    parts, shards, with_images = list[pa.Table](), list[ParquetShard](), list[str]()
    for file in files:
        shard = ParquetShard(file.path)
        schema = shard.schema
        tables.check_names(file.path, schema.names, options)
        theirs = {ours: names.get(ours, ours) for ours in COLUMNS}
        del theirs["embedding"]
        if image in schema.names:
            kind = schema.field(image).type
            check_images(file.path, kind)
            if plain_type(kind) in TEXT:
                theirs["path"] = image
            else:
                with_images.append(file.path)
        if vector not in schema.names:
            has = one_line(", ".join(schema.names))
            needs = "needs a column embedding, or --data.columns embedding=NAME"
            if sum(map(pa.types.is_floating, schema.types)) > MANY_NUMBERS:
                needs += (
                    ", one list a row (or save a column a number with np.save as"
                    " FILE.npy)"
                )
            raise ConfigError(f"{file.path}: {needs}; it has {has}")
        _check_lists(file.path, schema.field(vector).type)
        shards.append(shard)
        parts.append(tables.read_named_columns(shard, file.relative, theirs))
    table = tables.join_tables(source, parts)
    shown = None
    if with_images:
        if len(with_images) < len(files):
            raise ConfigError(
                f"{source}: {len(with_images)} of {len(files)} files have a column"
                f" {image} of pictures, e.g. {with_images[0]}; write it to all files or"
                " to none"
            )
        shown = ParquetImages(shards, image, [file.time for file in files])
    values, reasons = _read_matrix(source, shards, vector)
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return VectorFile(values, columns, schema.names, reasons=reasons, pictures=shown)


def _read_lists(shards: Sequence[ParquetShard], column: str) -> Iterator[Any]:
    """Yield the lists of a column, cast to float32, some rows at a time.

    Args:
        shards: The Parquet files, which are read in this order.
        column: Name of the column.

    Yields:
        Arrow arrays of large lists of float32, in the order of the rows. A row without
        a list is null.

    Raises:
        ConfigError: A file is damaged or cannot be read.
    """
    for shard in shards:
        for group in range(shard.metadata.num_row_groups):
            for batch in shard.batches(column, group):
                yield batch.column(0).cast(LIST, safe=False)


def _check_lists(source: str, kind: Any) -> None:
    """Check that a column holds lists of numbers.

    Args:
        source: The file, as the error message names it.
        kind: The Arrow type of the column.

    Raises:
        ConfigError: It is no list, or no list of numbers.
    """
    is_list = (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
    )
    if not is_list or not (
        pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
    ):
        fix = (
            "; parse the text, as df['embedding'].map(json.loads) does"
            if kind in TEXT
            else ""
        )
        raise ConfigError(
            f"{source}: column embedding must hold lists of numbers, not {kind}{fix}"
        )


def _read_matrix(
    source: str, shards: Sequence[ParquetShard], column: str
) -> tuple[np.ndarray, dict[int, str]]:
    """Read a column of lists of numbers from several files as one matrix.

    D is the most frequent length of a list, the shortest one of several. A missing list
    has the length 0. The column is read twice: first the lengths, then the numbers.

    Args:
        source: The source, as the error message names it.
        shards: The files.
        column: The name of the column.

    Returns:
        float32 (R, D), with zeros for lists of another length, and NaN for a missing
        number, in memory or, if it is large, in a mapped file; and row number -> reason
        for each row with a list of another length.

    Raises:
        ConfigError: There are no rows, an empty or missing list is the most frequent
            one, or a file cannot be read.
        StorageError: The disk has no space for the matrix.
    """
    lengths = [np.zeros(0, np.int64)]
    for batch in _read_lists(shards, column):
        lengths.append(pa.compute.list_value_length(batch).fill_null(0).to_numpy())
    length = np.concatenate(lengths)
    width = int(np.bincount(length).argmax()) if len(length) else 0
    if width == 0:
        raise ConfigError(f"{source}: most rows have no vector")
    values, fits, start = new_array((len(length), width)), length == width, 0
    for batch in _read_lists(shards, column):
        own = fits[start : start + len(batch)]
        numbers = pa.compute.list_flatten(batch.filter(pa.array(own)))
        values[start : start + len(batch)][own] = numbers.to_numpy(
            zero_copy_only=False
        ).reshape(-1, width)
        start += len(batch)
    wrong = {
        row: f"{length[row]} numbers, not {width}"
        for row in np.flatnonzero(~fits).tolist()
    }
    return values, wrong


def equal_rows(values: Tensor) -> list[list[int]]:
    """Return groups of rows that have the same bits.

    Rows are compared only by a hash of 64 bits each.

    Args:
        values: float32 (N, D).

    Returns:
        The row numbers of each group of two or more equal rows, in ascending order. The
        groups are in the order of their first rows.
    """
    hashes = (hash(row.tobytes()) for row in values.numpy())
    keys = np.fromiter(hashes, np.int64, len(values))
    order = np.argsort(keys, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)
    return sorted(group.tolist() for group in groups if len(group) > 1)
