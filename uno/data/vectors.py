"""Read vectors that another program made, to use them in the place of images.

The vectors are used as the features of a frozen encoder, so nothing is encoded. A
picture or a text of a row is only shown to people.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch
from torch import Tensor

from uno.config import AugmentConfig, ModelConfig
from uno.data import files as filesystem
from uno.data import mapped, tables
from uno.data.columns import class_codes, make_unlabeled
from uno.data.decode import ok_mask
from uno.data.from_python import class_names, distinct_ids, float_vectors
from uno.data.image_paths import DEFAULT_RULES, PathRules, find_images
from uno.data.images import Image, Images, evenly_spaced
from uno.data.labels import encode_column, require_distinct
from uno.data.mapped import PIECE_ROWS, NeighborViews
from uno.data.other_formats import fix_for
from uno.data.plan import FEATURES, VIEW_SEED, augment_generator
from uno.data.rows import Rows
from uno.data.tables import NO_NAMES, TEXT, ParquetImages
from uno.data.text_tables import read_csv
from uno.errors import ConfigError, StorageError, one_line
from uno.limits import MAX_NPZ_BYTES, MAX_ROWS
from uno.text import plural

# The number of neighbors of a row, the largest number of rows among which they are
# searched, and the number of rows that are compared with all of these at once.
NEIGHBORS, NEAR_ROWS, COSINE_ROWS = 5, 20_000, 512
# The largest number of pairs of rows that are compared, which takes a minute; and the
# number of rows among which neighbors are searched even if that makes more pairs.
NEAR_PAIRS, LEAST_NEAR_ROWS = 2 * 10**9, 1_000
METADATA = b"uno.vectors"  # key in the metadata of files that this module writes
ARRAYS = (".npy", ".npz")
# Errors that np.load raises for damaged files, and for files that it cannot read.
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    EOFError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
MANY_NUMBERS = 8  # more columns of floats than this seem to be one vector
CSV_FIX = "text; save its numbers with np.save(FILE, np.loadtxt(CSV, delimiter=','))"
COLUMNS = ("id", "embedding", "label", "eval_label", "split", "path", "text")
LIST = pa.large_list(pa.float32())


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
        """Make vectors of numbers that a caller passes.

        Args:
            given: Numbers as :func:`~uno.data.from_python.float_vectors` takes them.
            what: The name of the argument, for messages.

        Raises:
            ConfigError: These are no such numbers.
        """
        values = float_vectors(given, what)
        return cls(*checked(values, [None] * len(values)))

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
        """Yield the bytes of all views of each row, for the fingerprint."""
        return (self.values[row].numpy().tobytes() for row in rows.tolist())

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """Return the path of each row's picture, None for a row without picture."""
        return [None] * len(rows) if self.shown is None else self.shown.paths(rows)

    def vectors(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]]:
        """Return the vectors of ``rows``, int64 (n,).

        Returns:
            float32 (n, V, D), which shares its memory with ``values`` if the rows are
            consecutive; and the reasons of rows without a usable vector.
        """
        in_a_row = (
            len(rows)
            and rows[-1] - rows[0] + 1 == len(rows)
            and bool((np.diff(rows) == 1).all())
        )
        own = (
            slice(int(rows[0]), int(rows[-1]) + 1)
            if in_a_row
            else torch.from_numpy(rows)
        )
        return self.values[own], [self.reasons[row] for row in rows.tolist()]

    def prepared(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]]:
        """Return the first view of each row, the one for evaluation.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            float32 (n, D); and for each row the reason why it has no usable vector, or
            None.
        """
        values, reasons = self.vectors(rows)
        return values[:, 0], reasons

    def pictures(self) -> Images | None:
        """Return the pictures that a report shows for the rows, or None."""
        return self.shown

    def captions(self, rows: np.ndarray) -> list[str | None]:
        """Return the text that a report shows for each row, None for no text."""
        return (
            [None] * len(rows)
            if self.words is None
            else self.words.take(pa.array(rows)).to_pylist()
        )


def checked(
    values: Tensor, reasons: list[str | None]
) -> tuple[Tensor, list[str | None]]:
    """Find rows that cannot be used, and set their vectors to zeros.

    A row cannot be used if it has a reason already, or if any of its views has numbers
    that are not finite, or is a vector of zeros.

    Args:
        values: float32 (N, V, D). It is not changed.
        reasons: For each row the reason why it has no usable vector, or None. Reasons
            that are found are added to this list.

    Returns:
        ``values``, or a copy with zeros if rows cannot be used; and ``reasons``.
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
    unusable = torch.from_numpy(~ok_mask(reasons))
    if not unusable.any():
        return values, reasons
    bad = unusable[:, None, None]
    usable = mapped.fill(
        tuple(values.shape), lambda own: values[own].masked_fill(bad[own], 0)
    )
    return torch.from_numpy(usable), reasons


def read_vectors(
    path: str,
    names: Mapping[str, str] = NO_NAMES,
    images_only: bool = False,
    rules: PathRules = DEFAULT_RULES,
) -> Rows:
    """Read vectors with their ids, labels and pictures.

    Parquet files have a column ``embedding`` with lists of D numbers. They may also
    have id, label, eval_label, split, text, and image or path, which the report shows.
    A .npy or .npz file holds numbers (N, D). It may have the same columns beside it: in
    a .csv file of the same name, or as other arrays of the .npz file.

    Rows with the same id become one row with several views. The first is the one for
    evaluation. A row with fewer views than others repeats its own. A row without a
    usable vector is an unreadable one.

    Args:
        path: Path or URI of a .parquet, .npy or .npz file, or a folder of Parquet
            files.
        names: Standard name of a column, such as "label" -> its name in the source.
        images_only: Whether the rows are only to be predicted, so that labels and
            splits are not read.
        rules: How the column ``path`` is read.

    Raises:
        ConfigError: There is no such file or column, a file is damaged, or rows with
            the same id differ in label or split.
    """
    source = f"vectors:{path}"
    read = _of_arrays if path.endswith(ARRAYS) else _of_parquet
    if filesystem.kind(path) == "file" and not path.endswith((".parquet", *ARRAYS)):
        fix = CSV_FIX if path.lower().endswith(".csv") else fix_for(path)
        what = f"; this is {fix}" if fix else ""
        raise ConfigError(f"{path}: vectors: reads .parquet, .npy and .npz{what}")
    table, values, why, shown, present = read(source, path, names, rules)
    num = len(values)
    if not 0 < num <= MAX_ROWS:
        raise ConfigError(f"{source}: {plural(num, 'row')}, not 1 to {MAX_ROWS:,}")
    of_labels = ("label", "eval_label", "split") if images_only else ()
    columns = {
        name: table[name] for name in table.column_names if name not in of_labels
    }
    ids = pa.array((f"row-{row}" for row in range(num)), pa.large_string())
    if "id" in columns:
        given = columns["id"].cast(pa.large_string()).combine_chunks()
        ids = pa.compute.if_else(
            pa.compute.not_equal(given, "").fill_null(False), given, ids
        )
    coded = ids.dictionary_encode()
    place = coded.indices.to_numpy()
    counts, order = np.bincount(place), np.argsort(place, kind="stable")
    starts = np.cumsum(counts) - counts
    # a row with fewer views than others repeats its own
    views = order[starts[:, None] + np.arange(counts.max()) % counts[:, None]]
    first = views[:, 0]
    labels, truth, split = (
        encode_column(source, columns[name]) if name in columns else make_unlabeled(num)
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
    for row, reason in why.items():
        reasons[place[row]] = reasons[place[row]] or reason
    if counts.max() == 1:  # each row has one view, and the rows are in order
        values = values[:, None]
    else:
        single = values
        values = mapped.fill(
            (*views.shape, values.shape[1]), lambda own: single[views[own]]
        )
    found, reasons = checked(torch.from_numpy(values), reasons)
    if shown is None and "path" in columns:
        root = filesystem.split(path)[0] if filesystem.kind(path) == "file" else path
        paths = tables.values_in(columns["path"].cast(pa.string()))
        shown = find_images(source, root, paths, True, rules)
    words = (
        columns["text"].cast(pa.string()).combine_chunks().take(pa.array(first))
        if "text" in columns
        else None
    )
    images = Vectors(
        found, reasons, None if shown is None else shown.take(first), words
    )
    notes: tuple[str, ...] = ()
    if counts.max() > 1:
        notes = (f"rows of one id, {counts.max()} at most, are its views",)
    if "label" not in table.column_names and not images_only:
        notes += tables.note_of_no_label(path, present, names)
        if path.endswith(ARRAYS) and not present:
            notes += (
                (
                    f"no labels: write them to {path[:-4]}.csv, column label, one row a"
                    " vector"
                ),
            )
    truths = truth.take(first) if "eval_label" in columns else None
    return Rows(
        coded.dictionary,
        images,
        labels.take(first),
        is_train,
        source,
        notes=notes,
        eval_labels=truths,
    )


def require_kind(config: ModelConfig, images: Images) -> None:
    """Check that a model takes this kind of data.

    Args:
        config: The section ``model`` of the configuration.
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


def with_views(
    values: Tensor, augment: AugmentConfig, ok: np.ndarray
) -> Tensor | NeighborViews:
    """Return vectors together with views for training, if they have only one view.

    The views are random, but the same in runs of all seeds. ``augment.vector_view``
    says how they are made: "noise" adds noise, "dropout" sets some numbers to zero, and
    "neighbors" moves a row towards one of its nearest neighbors.

    Args:
        values: float32 (N, V, D).
        augment: The section ``augment`` of the configuration.
        ok: Whether each row has a usable vector, bool (N,). Views of other rows mean
            nothing.

    Returns:
        (N, 1 + ``augment.num_cached_views``, D) with the vectors themselves as the
        first view. ``values`` itself if V > 1 or ``augment.num_cached_views`` is 0.
    """
    if values.shape[1] > 1 or not augment.num_cached_views:
        return values
    generator, rows = (
        augment_generator(VIEW_SEED, FEATURES, 0),
        torch.from_numpy(np.flatnonzero(ok)),
    )
    how, strength = augment.vector_view, augment.vector_strength
    if how == "neighbors":
        return _neighbor_views(values[:, 0], rows, augment, generator)
    spread = values[rows[evenly_spaced(PIECE_ROWS, len(rows))], 0].std(dim=0)
    found = torch.from_numpy(
        mapped.new_array((len(values), 1 + augment.num_cached_views, values.shape[2]))
    )
    for own in rows.split(PIECE_ROWS):
        found[own, 0] = points = values[own, 0]
        for view in range(1, found.shape[1]):
            if how == "noise":
                drawn = torch.randn(points.shape, generator=generator)
                found[own, view] = points + strength * spread * drawn
            else:
                found[own, view] = points * (
                    torch.rand(points.shape, generator=generator) >= strength
                )
    return found


def _neighbor_views(
    values: Tensor, rows: Tensor, augment: AugmentConfig, generator: torch.Generator
) -> NeighborViews:
    """Return views that move rows towards their nearest neighbors.

    For each view, a random one of the neighbors is drawn, and a random share of the
    way, at most ``augment.vector_strength``.

    Args:
        values: float32 (N, D).
        rows: Numbers of the usable rows, int64 (n,). Views of other rows are the rows
            themselves.
        augment: The section ``augment`` of the configuration.
        generator: Draws the views.
    """
    near, num_views = _neighbors(values, rows, generator), augment.num_cached_views
    partners = torch.arange(len(values), dtype=torch.int32)[:, None].repeat(
        1, num_views
    )
    shares = torch.zeros(len(values), num_views)
    for view in range(num_views):
        chosen = torch.randint(near.shape[1], (len(rows), 1), generator=generator)
        shares[rows, view] = (
            augment.vector_strength
            * torch.rand(len(rows), 1, generator=generator)[:, 0]
        )
        partners[rows, view] = near.gather(1, chosen)[:, 0]
    return NeighborViews(values, partners, shares)


def _neighbors(values: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Find the nearest neighbors of rows, by cosine similarity.

    The rows are divided at random into parts, and neighbors are searched in the part of
    a row only. A part has at most :data:`NEAR_ROWS` rows. It has fewer, but not fewer
    than :data:`LEAST_NEAR_ROWS`, if otherwise more than :data:`NEAR_PAIRS` pairs were
    compared. The last part has the rows that are left.

    Args:
        values: float32 (N, D).
        rows: Row numbers, int64 (n,).
        generator: Draws the parts.

    Returns:
        Row numbers of k = max(1, min(:data:`NEIGHBORS`, n - 1)) neighbors of each row,
        nearest first: int32 (n, k). If the part of a row has fewer rows, the row itself
        takes the remaining places.
    """
    num = len(rows)
    near = rows.int()[:, None].repeat(1, min(NEIGHBORS, max(1, num - 1)))
    at_once = min(NEAR_ROWS, max(NEAR_PAIRS // max(1, num), LEAST_NEAR_ROWS))
    for some in torch.randperm(num, generator=generator).split(at_once):
        unit = torch.nn.functional.normalize(values[rows[some]], dim=1)
        for own in torch.arange(len(some)).split(COSINE_ROWS):
            cosines = unit[own] @ unit.T
            cosines[torch.arange(len(own)), own] = -torch.inf
            found = some[
                cosines.topk(min(near.shape[1], max(1, len(some) - 1)), dim=1).indices
            ]
            near[some[own], : found.shape[1]] = rows[found].int()
    return near


class GivenVectors(NamedTuple):
    """Embeddings that a caller passes, in the form in which they are stored.

    Attributes:
        values: float32 (N, V, D), V views of each row.
        columns: Name of a column -> Arrow array of text (N,): ``id``, and ``label`` if
            the caller passes labels.
    """

    values: Tensor
    columns: dict[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the numbers and columns, 64 hex digits."""
        found = hashlib.sha256(repr(tuple(self.values.shape)).encode())
        for name, column in self.columns.items():
            text = json.dumps([name, column.to_pylist()])
            found.update(text.encode())
        for part in self.values.split(PIECE_ROWS):
            found.update(part.contiguous().numpy())
        return found.hexdigest()

    def store(self, path: str) -> None:
        """Write a file for :func:`read_vectors`, by an atomic write.

        Args:
            path: Path or URI of the file.
        """
        counts = np.full(len(self.values), self.values.shape[1])
        write_vectors(path, self.values, counts, self.columns)


def given_vectors(embeddings: Any, labels: Any = None, ids: Any = None) -> GivenVectors:
    """Check embeddings, labels and ids that a caller passes.

    Args:
        embeddings: Numbers as :func:`~uno.data.from_python.float_vectors` takes them.
        labels: The class of each row (N,), or a missing value, or None.
        ids: The id of each row (N,); by default rows are numbered.

    Returns:
        The vectors and columns in the form in which they are stored.

    Raises:
        ConfigError: The numbers of rows differ, or an argument has another type or
            shape.
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

    Args:
        path: Path or URI of the file.
        values: float32 (N, V, D), V views of N rows.
        counts: int64 (N,), how many of the V views of each row are written. Each view
            is a row of the file. Its number is in the column ``view``.
        columns: Column name -> Arrow array (N,), the other columns of the file.
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
    with filesystem.Storage(folder or ".").create(name) as stream:
        pq.write_table(
            table,
            stream,
            compression="zstd",
            use_dictionary=[*columns],  # not for the numbers, which seldom repeat
            write_page_checksum=True,
        )


def is_vectors(path: str) -> bool:
    """Return whether a file is one that :func:`write_vectors` has written.

    The result is False if there is no such file, or it cannot be read.
    """
    folder, name = filesystem.split(path)
    try:
        with filesystem.Storage(folder or ".").open(name) as file:
            return METADATA in (pq.read_schema(file).metadata or {})
    except (StorageError, pa.ArrowException):
        return False


Read = tuple[pa.Table, np.ndarray, dict[int, str], Images | None, list[str]]
"""The content of a source with R rows.

The standard columns as an Arrow table; the numbers, float32 (R, D); row number ->
reason, for rows of zeros that have no vector; the pictures of the rows, or None; and
the names of all columns that the source has.
"""


def _of_parquet(
    source: str, path: str, names: Mapping[str, str], rules: PathRules
) -> Read:
    """Read one Parquet file, or all files of a folder.

    If a column holds the bytes of images, these are the pictures of the rows. A column
    of image paths is returned as the column ``path``.

    Args:
        source: The source, as error messages name it.
        path: Path or URI of the file or folder.
        names: Standard name of a column, such as "label" -> its name in the files.
        rules: How image paths are read.

    Raises:
        ConfigError: A file has no column of vectors, or the files do not have the same
            columns.
    """
    root, files = tables.parquet_files(path, rules.follow_links)
    parts, pictures, lists = list[pa.Table](), set[str](), list[tuple[Any, str]]()
    for file, folders in zip(files, tables.partition_columns(files), strict=True):
        parquet = tables.open_parquet(file.path, file.size)
        schema = parquet.schema
        tables.check_names(
            file.path, names, tables.present_columns(schema, names, folders)
        )
        theirs = {ours: names.get(ours, ours) for ours in COLUMNS}
        image = names.get("image", "image")
        if image in schema.names:
            if schema.field(image).type in TEXT:
                theirs["path"] = image
            else:
                tables.check_images(file.path, schema.field(image).type)
                pictures.add(image)
        if theirs["embedding"] not in schema.names:
            has = one_line(", ".join(schema.names))
            needs = "needs a column embedding, or --data.columns embedding=NAME"
            if sum(map(pa.types.is_floating, schema.types)) > MANY_NUMBERS:
                needs += (
                    ", one list a row (or save a column a number with np.save as"
                    " FILE.npy)"
                )
            raise ConfigError(f"{file.path}: {needs}; it has {has}")
        vector = theirs.pop("embedding")
        _check_lists(file.path, schema.field(vector).type)
        lists.append((parquet, vector))
        found = parquet.read(list({c for c in theirs.values() if c in schema.names}))
        columns = {ours: found[c] for ours, c in theirs.items() if c in schema.names}
        num = parquet.metadata.num_rows
        columns |= tables.columns_of_folders(file.path, theirs, folders, columns, num)
        split = "train" if tables.is_training(file.relative) else "test"
        columns.setdefault("split", pa.chunked_array([pa.repeat(split, num)]))
        parts.append(pa.table(columns))
    try:
        table = pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowException as error:
        raise ConfigError(
            f"{source}: the files have different columns: {one_line(error)}"
        ) from None
    if len(pictures) > 1:
        raise ConfigError(f"{source}: the files name their image column differently")
    shown = (
        ParquetImages(
            root,
            [f.path for f in files],
            pictures.pop(),
            [f[2:4] for f in files],
            rules,
            [parquet for parquet, _ in lists],
        )
        if pictures
        else None
    )
    return table, *_matrix(source, lists), shown, list(schema.names)


def _of_arrays(
    source: str, path: str, names: Mapping[str, str], rules: PathRules
) -> Read:
    """Read the numbers of a .npy or .npz file, and the columns beside them.

    The columns are other arrays of the .npz file, and those of a .csv file of the same
    name, if there is one.

    Args:
        source: Unused, see :func:`_of_parquet`.
        path: Path or URI of the file.
        names: Standard name of a column, such as "label" -> its name there.
        rules: Unused, see :func:`_of_parquet`.

    Raises:
        ConfigError: The file cannot be read or does not hold numbers (N, D); or the
            .csv file has another number of rows, or a column that the .npz file has,
            too.
    """
    values, columns, present = _load_arrays(path, names)
    if values.ndim != 2:
        raise ConfigError(f"{path} must hold numbers (N, D), not {values.shape}")
    float_vectors(values[:1], path)
    if values.dtype != np.float32:
        values = mapped.fill(values.shape, values.__getitem__)
    beside = f"{path[:-4]}.csv"
    if filesystem.kind(beside) == "file":
        given = read_csv(beside).columns
        present += given
        in_csv = _columns_of_csv(beside, given, len(values), path, names, columns)
        if (both := sorted(in_csv.keys() & columns.keys())) and both:
            raise ConfigError(
                f"{path} and {beside} both hold {both[0]}; remove one of them"
            )
        columns |= in_csv
    return pa.table(columns), values, {}, None, present


def _load_arrays(
    path: str, names: Mapping[str, str]
) -> tuple[np.ndarray, dict[str, Any], list[str]]:
    """Read a .npy or .npz file. A local .npy file stays on the disk and is mapped.

    Args:
        path: Path or URI of the file.
        names: Standard name of a column, such as "label" -> its name there.

    Returns:
        The embeddings, of any shape; the standard columns (N,) as Arrow arrays; and the
        names of all arrays but the embeddings.

    Raises:
        ConfigError: The file cannot be read, is too large, or it is not clear which of
            its arrays are the embeddings.
    """
    try:
        if path.endswith(".npy") and os.path.isfile(path):
            # the array stays in the file, which is mapped
            loaded = np.load(path, mmap_mode="c", allow_pickle=False)
            return loaded, {}, []
        with filesystem.open_binary(path) as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded, {}, []
            _require_small(path, loaded.zip)
            arrays = {name: loaded[name] for name in loaded.files}
    except ConfigError:
        raise
    except UNREADABLE as error:
        reason = one_line(error)
        # NumPy's message advises to allow Python objects, which is not safe
        if "pickle" in reason or "bject" in reason:
            reason = (
                "it is damaged, or holds Python objects, which are not opened; save a"
                " list "
            )
            reason += "of vectors with np.stack, and names with .astype(str)"
        if isinstance(error, zipfile.BadZipFile | zlib.error):
            reason += "; the file is damaged, save it again with np.savez"
        raise ConfigError(f"{path} holds no array that can be read: {reason}") from None
    name = _name_of_embeddings(path, arrays, names)
    columns = dict[str, Any]()
    for ours in (*COLUMNS, "image"):
        theirs = names.get(ours, ours)
        if theirs not in arrays or theirs == name or ours == "embedding":
            continue
        if arrays[theirs].shape != arrays[name].shape[:1]:
            raise ConfigError(
                f"{path}: array {theirs} has the shape {arrays[theirs].shape}, not "
                f"{arrays[name].shape[:1]} as the rows of {name}"
            )
        column = arrays[theirs]
        column = column.astype(str) if column.dtype.kind == "S" else column
        columns["path" if ours == "image" else ours] = pa.array(column)
    return arrays[name], columns, [other for other in arrays if other != name]


def _require_small(path: str, archive: zipfile.ZipFile) -> None:
    """Refuse a .npz file that takes too much memory.

    Args:
        path: Path of the file, for the error message.
        archive: The opened file.

    Raises:
        ConfigError: Its arrays have more than ``MAX_NPZ_BYTES`` bytes.
    """
    num_bytes = sum(member.file_size for member in archive.infolist())
    if num_bytes > MAX_NPZ_BYTES:
        raise ConfigError(
            f"{path}: its arrays have {num_bytes:,} bytes, more than {MAX_NPZ_BYTES:,}"
            " that are read into memory; save the embeddings as a .npy file with"
            " np.save, and the labels as a .csv file of the same name"
        )


def _name_of_embeddings(
    path: str, arrays: Mapping[str, np.ndarray], names: Mapping[str, str]
) -> str:
    """Return the name of the array of a .npz file that holds the embeddings.

    It is the array that ``names`` names, or that is called 'embedding'. Otherwise it is
    the only array, or the only matrix among several.

    Raises:
        ConfigError: There is no such array, or there are several.
    """
    wanted = names.get("embedding", "embedding")
    if wanted in arrays:
        return wanted
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    candidates = matrices if len(arrays) > 1 else [*arrays]
    if "embedding" not in names and len(candidates) == 1:
        return candidates[0]
    shapes = [f"{name} {array.shape}" for name, array in arrays.items()]
    has = one_line(", ".join(shapes)) or "nothing"
    raise ConfigError(
        f"{path} holds {has}; say which array the embeddings are: "
        f"--data.columns embedding={matrices[0] if matrices else 'NAME'}"
    )


def _columns_of_csv(
    beside: str,
    given: Mapping[str, list[Any]],
    num_rows: int,
    path: str,
    names: Mapping[str, str],
    inside: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the standard columns of the .csv file beside an array file.

    Args:
        beside: Path of the .csv file.
        given: The columns of the .csv file.
        num_rows: The number of rows of the array file.
        path: The array file, for the error message.
        names: Standard name of a column, such as "label" -> its name there.
        inside: The standard columns that are in the array file, which need not be in
            the .csv file.

    Returns:
        Standard column name -> Arrow array of text (num_rows,).

    Raises:
        ConfigError: The .csv file has another number of rows, or lacks a column that
            ``names`` names.
    """
    wanted = {
        ours: theirs
        for ours, theirs in names.items()
        if ours != "embedding" and ("path" if ours == "image" else ours) not in inside
    }
    tables.check_names(beside, wanted, given)
    theirs = {ours: names.get(ours, ours) for ours in COLUMNS}
    columns = {
        ours: pa.array(given[c], pa.string())
        for ours, c in theirs.items()
        if c in given
    }
    if names.get("image", "image") in given:
        columns["path"] = pa.array(given[names.get("image", "image")], pa.string())
    if (num_lines := len(next(iter(given.values()), []))) != num_rows:
        fix = (
            '; an empty line is no row: write "" for no label'
            if len(given) == 1
            else ""
        )
        raise ConfigError(
            f"{beside} has {plural(num_lines, 'row')}, {path} has {num_rows:,}{fix}"
        )
    return columns


def _lists(file: Any, column: str) -> Iterator[Any]:
    """Yield the lists of a column, cast to float32, some rows at a time.

    Args:
        file: An opened Parquet file.
        column: Name of the column.
    """
    for group in range(file.metadata.num_row_groups):
        for batch in file.batches([column], group):
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


def _matrix(
    source: str, columns: Sequence[tuple[Any, str]]
) -> tuple[np.ndarray, dict[int, str]]:
    """Read columns of lists as one matrix.

    D is the length that most lists have. The columns are read twice: first the lengths,
    then the numbers.

    Args:
        source: The source, as the error message names it.
        columns: An opened Parquet file and the name of its column, for each file.

    Returns:
        float32 (R, D), with zeros for lists of another length; and for each of these
        rows the reason.

    Raises:
        ConfigError: Most rows have no list.
    """
    lengths = [np.zeros(0, np.int64)]
    for batch in chain.from_iterable(starmap(_lists, columns)):
        lengths.append(pa.compute.list_value_length(batch).fill_null(0).to_numpy())
    length = np.concatenate(lengths)
    width = int(np.bincount(length).argmax()) if len(length) else 0
    if width == 0:
        raise ConfigError(f"{source}: most rows have no vector")
    values, fits, start = mapped.new_array((len(length), width)), length == width, 0
    for batch in chain.from_iterable(starmap(_lists, columns)):
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
