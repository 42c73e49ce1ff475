"""Vectors that another program made stand in the place of images: frozen features that came from elsewhere.
The source is their cache, and nothing is encoded. A picture or text of a row is only for people.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
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
from uno.data.columns import Labels, Text
from uno.data.decode import ok_mask
from uno.data.features import SEED
from uno.data.from_python import class_names, float_vectors, row_names
from uno.data.images import Image, Images, evenly_spaced
from uno.data.mapped import PIECE_ROWS, NeighborViews
from uno.data.plan import FEATURES, augment_generator
from uno.data.rows import Rows
from uno.data.tables import NO_NAMES, TEXT, ParquetImages
from uno.errors import ConfigError, StorageError, one_line
from uno.limits import MAX_ROWS
from uno.text import plural

NEIGHBORS, NEAR_ROWS, COSINE_ROWS = 5, 20_000, 512  # of a row; among so many; at once
NEAR_PAIRS, LEAST_NEAR_ROWS = 2 * 10**9, 1_000  # compared in all: a minute; among so many at least
METADATA = b"uno.vectors"  # of a file that is ours
ARRAYS, MAX_BYTES = (".npy", ".npz"), 2**36
COLUMNS = ("id", "embedding", "label", "eval_label", "split", "path", "text")
LIST = pa.large_list(pa.float32())


@dataclass(frozen=True, eq=False)
class Vectors(Images):
    """``values`` float32 (N, V, D), V views of each row, zeros where one of the N ``reasons`` says why a row
    has none; ``shown``: pictures of the rows; ``words``: text of each, in an Arrow array.
    """

    values: Tensor
    reasons: Sequence[str | None]
    shown: Images | None = None
    words: Any = None

    @classmethod
    def of(cls, given: Any, what: str = "embeddings") -> Vectors:
        """Of numbers as :func:`~uno.data.from_python.float_vectors` takes them."""
        values = float_vectors(given, what)
        return cls(*checked(values, [None] * len(values)))

    def __len__(self) -> int:
        return len(self.values)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """The first view of each, float32 (D,)."""
        return list(self.values[torch.from_numpy(rows), 0].numpy())

    def content_keys(self, rows: np.ndarray) -> Iterator[bytes]:
        """All views of each."""
        return (self.values[row].numpy().tobytes() for row in rows.tolist())

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """Those of the pictures."""
        return [None] * len(rows) if self.shown is None else self.shown.paths(rows)

    def vectors(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]]:
        """These; of rows in a row without a copy."""
        in_a_row = len(rows) and rows[-1] - rows[0] + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        own = slice(int(rows[0]), int(rows[-1]) + 1) if in_a_row else torch.from_numpy(rows)
        return self.values[own], [self.reasons[row] for row in rows.tolist()]

    def prepared(self, rows: np.ndarray) -> tuple[Tensor, list[str | None]]:
        """The first view of each, (n, D)."""
        values, reasons = self.vectors(rows)
        return values[:, 0], reasons

    def pictures(self) -> Images | None:
        """Of the source."""
        return self.shown

    def captions(self, rows: np.ndarray) -> list[str | None]:
        """The text of each."""
        return [None] * len(rows) if self.words is None else self.words.take(pa.array(rows)).to_pylist()


def checked(values: Tensor, reasons: list[str | None]) -> tuple[Tensor, list[str | None]]:
    """``values`` (N, V, D) with zeros in the place of rows that cannot be used, and the reason of each."""
    for start in range(0, len(values), PIECE_ROWS):
        part = values[start : start + PIECE_ROWS]
        finite = part.isfinite().all(dim=2)
        zeros = finite & (part == 0).all(dim=2)
        for bad, why in ((~finite, "numbers that are not finite"), (zeros, "a vector of zeros")):
            for row in bad.any(dim=1).nonzero()[:, 0].tolist():
                reasons[start + row] = reasons[start + row] or why
    unusable = torch.from_numpy(~ok_mask(reasons))
    if not unusable.any():
        return values, reasons
    bad = unusable[:, None, None]
    usable = mapped.fill(tuple(values.shape), lambda own: values[own].masked_fill(bad[own], 0))
    return torch.from_numpy(usable), reasons


def read_vectors(path: str, names: Mapping[str, str] = NO_NAMES, images_only: bool = False) -> Rows:
    """The *.parquet files of a folder, or one file, with a column ``embedding`` (lists of one length of
    numbers), and where present id, label, eval_label, split, image or path (shown in the report) and text; or
    a .npy or .npz file of numbers (N, D), with those columns in a .csv of the same name. Rows of one id are
    views of it, the first is for evaluation. ``names`` as in :func:`~uno.data.tables.read_parquet`; with
    ``images_only`` labels and splits are not read. Rows without a usable vector are unreadable ones.
    ConfigError: no such file or column, or rows of one id that differ in label or split.
    """
    source = f"vectors:{path}"
    read = _of_arrays if path.endswith(ARRAYS) else _of_parquet
    table, values, why, shown = read(source, path, names)
    num = len(values)
    if not 0 < num <= MAX_ROWS:
        raise ConfigError(f"{source}: {plural(num, 'row')}, not 1 to {MAX_ROWS:,}")
    of_labels = ("label", "eval_label", "split") if images_only else ()
    columns = {name: table[name] for name in table.column_names if name not in of_labels}
    ids = pa.array((f"row-{row}" for row in range(num)), pa.large_string())
    if "id" in columns:
        given = columns["id"].cast(pa.large_string()).combine_chunks()
        ids = pa.compute.if_else(pa.compute.not_equal(given, "").fill_null(False), given, ids)
    coded = ids.dictionary_encode()
    place = coded.indices.to_numpy()
    counts, order = np.bincount(place), np.argsort(place, kind="stable")
    starts = np.cumsum(counts) - counts
    views = order[starts[:, None] + np.arange(counts.max()) % counts[:, None]]  # some repeat theirs
    first = views[:, 0]
    labels, truth, split = (
        tables.labels_in(source, columns[name], ()) if name in columns else Labels.none(num)
        for name in ("label", "eval_label", "split")
    )
    tables.require_distinct(source, labels, truth)
    for what, column in (("label", labels), ("eval_label", truth), ("split", split)):
        if (differ := np.flatnonzero(column.codes != column.codes[first][place])).size:
            raise ConfigError(
                f"{source}: rows of id {one_line(repr(ids[differ[0]].as_py()))} differ in {what}"
            )
    is_train = tables.splits_in(source, split)[first]
    reasons = list[str | None]([None] * len(first))
    for row, reason in why.items():
        reasons[place[row]] = reasons[place[row]] or reason
    if counts.max() == 1:  # all in order
        values = values[:, None]
    else:
        single = values
        values = mapped.fill((*views.shape, values.shape[1]), lambda own: single[views[own]])
    found, reasons = checked(torch.from_numpy(values), reasons)
    if shown is None and "path" in columns:
        root = filesystem.split(path)[0] if filesystem.kind(path) == "file" else path
        shown = tables.files_in(source, root, tables.values_in(columns["path"].cast(pa.string())), True)
    words = (
        columns["text"].cast(pa.string()).combine_chunks().take(pa.array(first))
        if "text" in columns
        else None
    )
    images = Vectors(found, reasons, None if shown is None else shown.take(first), words)
    notes = (f"rows of one id, {counts.max()} at most, are its views",) if counts.max() > 1 else ()
    truths = truth.pick(first) if "eval_label" in columns else None
    return Rows(
        Text(coded.dictionary), images, labels.pick(first), is_train, source, notes=notes, eval_labels=truths
    )


def require_kind(config: ModelConfig, images: Images) -> None:
    """ConfigError: a model takes vectors and these are images, the other way round, or of another length."""
    found = images.vectors(np.arange(0))
    takes = "images" if not config.takes_vectors else f"vectors of {config.encoder.partition(':')[2]} numbers"
    given = "images" if found is None else f"vectors of {found[0].shape[2]} numbers"
    if takes != given:
        raise ConfigError(f"model.encoder {config.encoder} takes {takes}, the data has {given}")


def with_views(values: Tensor, augment: AugmentConfig, ok: np.ndarray) -> Tensor | NeighborViews:
    """(N, V, D) as they are if V > 1; else (N, 1 + ``augment.num_cached_views``, D), made of rows that are
    ``ok`` bool (N,), the same in runs of all seeds.
    """
    if values.shape[1] > 1:
        return values
    generator, rows = augment_generator(SEED, FEATURES, 0), torch.from_numpy(np.flatnonzero(ok))
    how, strength = augment.vector_view, augment.vector_strength
    if how == "neighbors":
        return _neighbor_views(values[:, 0], rows, augment, generator)
    spread = values[rows[evenly_spaced(PIECE_ROWS, len(rows))], 0].std(dim=0)
    found = torch.from_numpy(mapped.new_array((len(values), 1 + augment.num_cached_views, values.shape[2])))
    for own in rows.split(PIECE_ROWS):
        found[own, 0] = points = values[own, 0]
        for view in range(1, found.shape[1]):
            if how == "noise":
                drawn = torch.randn(points.shape, generator=generator)
                found[own, view] = points + strength * spread * drawn
            else:
                found[own, view] = points * (torch.rand(points.shape, generator=generator) >= strength)
    return found


def _neighbor_views(
    values: Tensor, rows: Tensor, augment: AugmentConfig, generator: torch.Generator
) -> NeighborViews:
    """Views of ``values`` (N, D) towards neighbors, of ``rows`` int64 (n,); of other rows themselves."""
    near, num_views = _neighbors(values, rows, generator), augment.num_cached_views
    partners = torch.arange(len(values), dtype=torch.int32)[:, None].repeat(1, num_views)
    shares = torch.zeros(len(values), num_views)
    for view in range(num_views):
        chosen = torch.randint(near.shape[1], (len(rows), 1), generator=generator)
        shares[rows, view] = augment.vector_strength * torch.rand(len(rows), 1, generator=generator)[:, 0]
        partners[rows, view] = near.gather(1, chosen)[:, 0]
    return NeighborViews(values, partners, shares)


def _neighbors(values: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """int32 (n, k): of ``rows`` int64 (n,) of ``values`` (N, D) those with the largest cosines to each, of at
    most :data:`NEAR_ROWS` random ones, fewer where otherwise more than :data:`NEAR_PAIRS` were compared.
    """
    num = len(rows)
    near = rows.int()[:, None].repeat(1, min(NEIGHBORS, max(1, num - 1)))
    at_once = min(NEAR_ROWS, max(NEAR_PAIRS // max(1, num), LEAST_NEAR_ROWS))
    for some in torch.randperm(num, generator=generator).split(at_once):
        unit = torch.nn.functional.normalize(values[rows[some]], dim=1)
        for own in torch.arange(len(some)).split(COSINE_ROWS):
            cosines = unit[own] @ unit.T
            cosines[torch.arange(len(own)), own] = -torch.inf
            found = some[cosines.topk(min(near.shape[1], max(1, len(some) - 1)), dim=1).indices]
            near[some[own], : found.shape[1]] = rows[found].int()
    return near


class GivenVectors(NamedTuple):
    """Embeddings that a caller passes, as they are stored.

    Attributes:
        values: float32 (N, V, D), V views of each row.
        columns: The text of each row (N,), by the name of the column.
    """

    values: Tensor
    columns: dict[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the content, 64 hex digits."""
        found = hashlib.sha256(repr(tuple(self.values.shape)).encode())
        for name, column in self.columns.items():
            text = json.dumps([name, column.to_pylist()])
            found.update(text.encode())
        for part in self.values.split(PIECE_ROWS):
            found.update(part.contiguous().numpy())
        return found.hexdigest()

    def store(self, path: str) -> None:
        """Write a file for :func:`read_vectors`, which appears whole."""
        counts = np.full(len(self.values), self.values.shape[1])
        write_vectors(path, self.values, counts, self.columns)


def given_vectors(embeddings: Any, labels: Any = None, ids: Any = None) -> GivenVectors:
    """Return embeddings, labels and ids as they are stored.

    Args:
        embeddings: Numbers as :func:`~uno.data.from_python.float_vectors` takes them.
        labels: The class of each row (N,), or a missing value, or None.
        ids: The id of each row (N,); by default rows are numbered.

    Raises:
        ConfigError: The numbers of rows differ, or a value is none of these.
    """
    values = float_vectors(embeddings, "embeddings")
    num, columns = len(values), dict[str, list[Any]]()
    columns["id"] = [f"row-{row}" for row in range(num)] if ids is None else row_names(ids)
    if labels is not None:
        columns["label"] = class_names(labels)
    for name, column in columns.items():
        if len(column) != num:
            raise ConfigError(f"{len(column):,} {name}s for {num:,} embeddings; give one for each row")
    text = {name: pa.array(column, pa.string()) for name, column in columns.items()}
    return GivenVectors(values, text)


def write_vectors(path: str, values: Tensor, counts: np.ndarray, columns: Mapping[str, Any]) -> None:
    """The first ``counts`` int64 (N,) of the V views of ``values`` float32 (N, V, D), a row each, with Arrow
    ``columns`` (N,) beside them, as one Parquet file that appears whole.
    """
    folder, name = filesystem.split(path)
    rows = np.repeat(np.arange(len(values)), counts)
    chosen = values[torch.arange(values.shape[1]) < torch.from_numpy(counts)[:, None]]
    lists = pa.FixedSizeListArray.from_arrays(pa.array(chosen.flatten().numpy()), values.shape[2])
    table = pa.table(
        {name: column.take(pa.array(rows)) for name, column in columns.items()} | {"embedding": lists}
    )
    table = table.replace_schema_metadata({METADATA: b"1"})
    with filesystem.Storage(folder or ".").create(name) as stream:
        pq.write_table(table, stream, compression="zstd", write_page_checksum=True)


def is_vectors(path: str) -> bool:
    """Whether a file is one of :func:`write_vectors`."""
    folder, name = filesystem.split(path)
    try:
        with filesystem.Storage(folder or ".").open(name) as file:
            return METADATA in (pq.read_schema(file).metadata or {})
    except (StorageError, pa.ArrowException):
        return False


Read = tuple[pa.Table, np.ndarray, dict[int, str], Images | None]
"""Our columns of R rows, their numbers float32 (R, D), why rows of zeros have none, and pictures of rows."""


def _of_parquet(source: str, path: str, names: Mapping[str, str]) -> Read:
    """The rows of one file or of all in a folder; the pictures are those of their column of bytes."""
    root, files = tables.parquet_files(path)
    parts, pictures, lists = list[pa.Table](), set[str](), list[tuple[Any, str]]()
    for file in files:
        parquet = tables.open_parquet(file.path, file.size, anew=True)
        schema = parquet.schema
        tables.check_names(file.path, names, schema.names)
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
            raise ConfigError(f"{file.path}: {needs}; it has {has}")
        vector = theirs.pop("embedding")
        _check_lists(file.path, schema.field(vector).type)
        lists.append((parquet, vector))
        found = parquet.read(list({c for c in theirs.values() if c in schema.names}))
        columns = {ours: found[c] for ours, c in theirs.items() if c in schema.names}
        split = "train" if tables.is_training(file.relative) else "test"
        columns.setdefault("split", pa.chunked_array([pa.repeat(split, parquet.metadata.num_rows)]))
        parts.append(pa.table(columns))
    try:
        table = pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowException as error:
        raise ConfigError(f"{source}: the files have different columns: {one_line(error)}") from None
    if len(pictures) > 1:
        raise ConfigError(f"{source}: the files name their image column differently")
    shown = (
        ParquetImages(root, [f.path for f in files], pictures.pop(), [f[2:4] for f in files])
        if pictures
        else None
    )
    return table, *_matrix(source, lists), shown


def _of_arrays(source: str, path: str, names: Mapping[str, str]) -> Read:
    """Numbers of a .npy or .npz file, and the columns of the .csv beside it, if there is one."""
    try:
        if path.endswith(".npy") and os.path.isfile(path):
            found = np.load(path, mmap_mode="c", allow_pickle=False)  # as it is in the file
        else:
            found = np.load(io.BytesIO(filesystem.read_bytes(path, MAX_BYTES)), allow_pickle=False)
        if not isinstance(found, np.ndarray):
            name = names.get("embedding", "embedding" if "embedding" in found.files else found.files[0])
            found = found[name]
    except (OSError, ValueError, KeyError, IndexError, EOFError) as error:
        raise ConfigError(f"{path} holds no array that can be read: {one_line(error)}") from None
    if found.ndim != 2:
        raise ConfigError(f"{path} must hold numbers (N, D), not {found.shape}")
    float_vectors(found[:1], path)
    values = found if found.dtype == np.float32 else mapped.fill(found.shape, found.__getitem__)
    beside, columns = f"{path[:-4]}.csv", dict[str, Any]()
    if filesystem.kind(beside) == "file":
        given = tables.read_csv(beside)
        tables.check_names(beside, {k: v for k, v in names.items() if k != "embedding"}, given)
        theirs = {ours: names.get(ours, ours) for ours in COLUMNS}
        columns = {ours: pa.array(given[c], pa.string()) for ours, c in theirs.items() if c in given}
        if names.get("image", "image") in given:
            columns["path"] = pa.array(given[names.get("image", "image")], pa.string())
        if (other := len(next(iter(given.values()), []))) != len(values):
            raise ConfigError(f"{beside} has {plural(other, 'row')}, {path} has {len(values):,}")
    return pa.table(columns), values, {}, None


def _lists(file: Any, column: str) -> Iterator[Any]:
    """A column of an opened Parquet file as lists of float32, some rows at a time."""
    for group in range(file.metadata.num_row_groups):
        for batch in file.batches([column], group):
            yield batch.column(0).cast(LIST, safe=False)


def _check_lists(source: str, kind: Any) -> None:
    """ConfigError: a column of this type does not hold lists of numbers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
        raise ConfigError(f"{source}: column embedding must hold lists of numbers, not {kind}")


def _matrix(source: str, columns: Sequence[tuple[Any, str]]) -> tuple[np.ndarray, dict[int, str]]:
    """Lists, of which most have D numbers -> float32 (R, D), and why rows of zeros have none."""
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
        values[start : start + len(batch)][own] = numbers.to_numpy(zero_copy_only=False).reshape(-1, width)
        start += len(batch)
    wrong = {row: f"{length[row]} numbers, not {width}" for row in np.flatnonzero(~fits).tolist()}
    return values, wrong
