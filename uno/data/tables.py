"""Tables: Parquet (Hugging Face's layout, or columns id, image, label, split), CSV and JSONL.

A column ``eval_label`` may hold true classes for evaluation; training never reads it.
"""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from uno.data import files as filesystem
from uno.data.parquet import ParquetImages
from uno.data.rows import Encoded, Files, Images, Rows
from uno.errors import ConfigError

IMAGE_COLUMNS = ("image", "img", "path")
LABEL_COLUMNS = ("label", "fine_label", "labels")
SPLITS = {"train": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}
TRAINING_COLUMNS = (*LABEL_COLUMNS, "split", "eval_label")
MAX_TABLE_BYTES = 2**30
PACKING = "pack.json"
PACKED = "uno"
"""What ``uno.data.pack`` leaves: a file beside its shards, and a key of their metadata."""


def read_parquet(path: str, images_only: bool = False, lazy: bool = False) -> Rows:
    """All *.parquet files of a folder, or one file; images stay in the Arrow column.

    The split is column ``split``, else the file name (train-*, test-*, validation-*) or folder, else train.
    With ``images_only`` nothing but images and ids is read: rows to predict need no label and no split. With
    ``lazy`` images in the files stay there until they are wanted.

    Raises:
        ConfigError: no or unreadable files, missing columns, or values of the wrong type.
    """
    if filesystem.kind(path) == "file":
        root, name = filesystem.split(path)
        files = [(name, path)]
    else:
        root = path
        found = filesystem.walk(path)
        files = [(f.relative, f.path) for f in found if f.relative.endswith(".parquet")]
        _check_complete(path, [f.path for f in found if f.relative == PACKING])
    if not files:
        raise ConfigError(f"no *.parquet files below {path}")
    source = f"parquet:{path}"
    tables: list[pa.Table] = []
    all_names: set[tuple[str, ...]] = set()
    kept: set[str | None] = set()  # the image column that was left in the files
    known: tuple[str, ...] = ()
    for name, file in files:
        table, schema, own_names, left = _read_file(name, file, images_only, lazy)
        tables.append(table)
        all_names.add(tuple(own_names))
        kept.add(left)
        known = known or _known_classes(schema)
    if len(kept) > 1:
        raise ConfigError(f"{source}: the files name their image column differently")
    if len(all_names) > 1:
        raise ConfigError(f"{source}: the class names in the metadata differ between files")
    names = list(all_names.pop())
    try:
        table = pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise ConfigError(f"{source}: the files have different columns: {_one_line(error)}") from None
    if not len(table):
        raise ConfigError(f"{source}: no rows")
    labels = _labels(source, table["label"], names)
    return Rows(
        ids=[f"row-{i}" if value is None else str(value) for i, value in enumerate(table["id"].to_pylist())],
        images=ParquetImages(root, [file for _, file in files], column)
        if (column := kept.pop()) is not None
        else _images(source, root, table, images_only),
        labels=labels,
        split=_splits(source, table["split"].to_pylist()),
        source=source,
        class_names=tuple(names),
        known=known,
        eval_labels=_labels(source, table["eval_label"], names)
        if "eval_label" in table.column_names
        else None,
    )


def read_table(path: str, images_only: bool = False) -> Rows:
    """A .csv or .jsonl file with columns path (or image), and where present id, label, split and eval_label.

    Paths are relative to the file and stay in its folder. An empty label is none. With ``images_only`` as in
    :func:`read_parquet`; a row without a path is then an unreadable image.

    Raises:
        ConfigError: unreadable, missing columns, or a path that leaves the folder.
    """
    root, name = filesystem.split(path)
    columns = _read_jsonl(path) if name.lower().endswith(".jsonl") else _read_csv(path)
    source = f"table:{path}"
    if images_only:
        columns = {name: column for name, column in columns.items() if name not in TRAINING_COLUMNS}
    image = next((name for name in ("path", "image") if name in columns), None)
    if image is None:
        raise ConfigError(f"{source}: needs a column path or image; it has {', '.join(columns) or 'none'}")
    num = len(columns[image])
    if not num:
        raise ConfigError(f"{source}: no rows")
    missing = [None] * num
    ids = columns.get("id", missing)
    labels, truth = ([_name(source, v) for v in columns.get(c, missing)] for c in ("label", "eval_label"))
    return Rows(
        ids=[f"row-{i}" if given in (None, "") else str(given) for i, given in enumerate(ids)],
        images=_files(source, root, columns[image], images_only),
        labels=labels,
        split=_splits(source, columns.get("split", missing)),
        source=source,
        eval_labels=truth if "eval_label" in columns else None,
    )


def _read_file(
    name: str, path: str, images_only: bool, lazy: bool
) -> tuple[pa.Table, pa.Schema, list[str], str | None]:
    """One Parquet file as columns id, image, label, split; its schema; the class names of that ([]: none);
    and the name of its image column if that was not read, because it holds bytes and ``lazy`` was asked for.
    """
    try:
        with (
            filesystem.open_input(path) as file,
            pa.parquet.ParquetFile(file, page_checksum_verification=True) as parquet,
        ):
            schema = parquet.schema_arrow
            image = next((c for c in IMAGE_COLUMNS if c in schema.names), None)
            label = None if images_only else next((c for c in LABEL_COLUMNS if c in schema.names), None)
            if image is None:
                present = ", ".join(schema.names)[:300]
                raise ConfigError(f"{path}: needs a column {' or '.join(IMAGE_COLUMNS)}; it has {present}")
            lazy = lazy and not _is_text(schema.field(image).type)
            wanted = ("id",) if images_only else (label, "id", "split", "eval_label")
            wanted = wanted if lazy else (image, *wanted)
            table = parquet.read([c for c in wanted if c in schema.names])
            num = parquet.metadata.num_rows
            given = {c: table[c].cast(pa.string()) for c in ("id", "split") if c in table.column_names}
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"cannot read Parquet file {path}: {_one_line(error)}") from None
    data = {
        "id": pa.array([f"{name}#{i}" for i in range(num)], pa.string()),
        "image": pa.nulls(num) if lazy else table[image],
        "label": table[label] if label else pa.nulls(num, pa.string()),
        "split": pa.array([_split_of(name)] * num, pa.string()),
    }
    given |= {c: table[c] for c in ("eval_label",) if c in table.column_names}
    return pa.table(data | given), schema, _class_names(path, schema, label), image if lazy else None


def _check_complete(path: str, packing: Sequence[str]) -> None:
    """Raise ConfigError where ``uno data pack`` has not finished."""
    for file in packing:
        try:
            finished = json.loads(_text(file))["finished"]
        except (ValueError, KeyError, TypeError):
            continue  # somebody else's file
        if finished is False:
            raise ConfigError(f"parquet:{path} is half a pack; run the same uno data pack again to finish it")


def _known_classes(schema: pa.Schema) -> tuple[str, ...]:
    """The known classes that a packed source declared."""
    try:
        known = json.loads((schema.metadata or {})[PACKED.encode()])["known"]
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(map(str, known)) if isinstance(known, list) else ()


def _class_names(path: str, schema: pa.Schema, label: str | None) -> list[str]:
    """Names of a ClassLabel column as Hugging Face stores them, [] where there are none."""
    if label is None or b"huggingface" not in (schema.metadata or {}):
        return []
    try:
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]
        names = feature.get("names", [])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # metadata of another kind: the labels then speak for themselves
    if (
        not isinstance(names, list)
        or any(not isinstance(n, str) for n in names)
        or len({*names}) < len(names)
    ):
        raise ConfigError(f"{path}: the class names in its metadata are not a list of different names")
    return names


def _split_of(name: str) -> str:
    """train-00000-of-00004.parquet, train/0000.parquet -> 'train'; unknown names are training rows."""
    folder, base = posixpath.split(name)
    words = [base.removesuffix(".parquet").split("-")[0], posixpath.basename(folder)]
    return next((SPLITS[w] for w in words if w in SPLITS), "train")


def _labels(source: str, column: Any, names: list[str]) -> list[str | None]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    values = column.to_pylist()
    if pa.types.is_integer(column.type):
        largest = max((v for v in values if v is not None), default=0)
        if names and largest >= len(names):
            raise ConfigError(f"{source}: label {largest} has no name among the {len(names)} of the metadata")
        return [None if v is None or v < 0 else names[v] if names else str(v) for v in values]
    if _is_text(column.type) or pa.types.is_null(column.type):
        return [v or None for v in values]
    raise ConfigError(f"{source}: column label must hold names or numbers, not {column.type}")


def _splits(source: str, values: Sequence[Any]) -> np.ndarray:
    splits = [SPLITS.get(str(v).lower()) if v not in (None, "") else "train" for v in values]
    if None in splits:
        wrong = values[splits.index(None)]
        raise ConfigError(f"{source}: split must be train, test or validation, not {wrong!r}")
    return np.array(splits)


def _images(source: str, root: str, table: pa.Table, images_only: bool) -> Images:
    """The image column: bytes where there are bytes, else files below ``root``."""
    column = table["image"]
    if _is_text(column.type):
        return _files(source, root, column.to_pylist(), images_only)
    if _is_binary(column.type):
        return Encoded(column, {})
    fields = {f.name for f in column.type} if pa.types.is_struct(column.type) else set()
    content = pa.compute.struct_field(column, "bytes") if "bytes" in fields else None
    if content is None or not _is_binary(content.type):
        raise ConfigError(f"{source}: images must be bytes, paths or struct<bytes, path>, not {column.type}")
    empty = np.flatnonzero(pa.compute.is_null(content).to_numpy(zero_copy_only=False))
    if not len(empty) or "path" not in fields:
        return Encoded(content, {})
    paths = pa.compute.struct_field(column, "path").take(pa.array(empty)).to_pylist()
    named = [(int(i), path) for i, path in zip(empty, paths, strict=True) if path]
    files = _files(source, root, [path for _, path in named], images_only)
    return Encoded(content, {i: files[j] for j, (i, _) in enumerate(named)})


def _files(source: str, root: str, relatives: Sequence[Any], may_lack: bool) -> Files:
    paths = []
    for i, relative in enumerate(relatives):
        if may_lack and not relative:
            paths.append("")  # no file has this name
            continue
        if not isinstance(relative, str) or not relative:
            raise ConfigError(f"{source}: row {i} has no image path")
        path = filesystem.inside(root, relative)
        if path is None:
            raise ConfigError(
                f"{source}: row {i}: path {relative!r} leaves the folder {root}; move the image there"
            )
        paths.append(path)
    sizes = np.array([filesystem.size_of(path) for path in paths], dtype=np.int64)
    if len(sizes) and not filesystem.is_uri(root) and (sizes < 0).all():
        raise ConfigError(f"{source}: none of its {len(paths)} images is below {root}, e.g. {relatives[0]!r}")
    return Files(paths, sizes)


def _read_csv(path: str) -> dict[str, list[Any]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), restval=None)
    try:
        fields = list(reader.fieldnames or [])
        records = list(reader)
    except csv.Error as error:
        raise ConfigError(f"{path} is not CSV: {error}") from None
    if any(None in record for record in records):
        row = next(i for i, record in enumerate(records) if None in record)
        raise ConfigError(f"{path}: row {row} has more values than the {len(fields)} columns")
    return {name: [record[name] for record in records] for name in fields}


def _read_jsonl(path: str) -> dict[str, list[Any]]:
    records = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} line {number} is not JSON: {_one_line(error)}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{path} line {number} must be an object, not {type(record).__name__}")
        records.append(record)
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def _text(path: str) -> str:
    try:
        data = filesystem.read_bytes(path, MAX_TABLE_BYTES)
        if len(data) > MAX_TABLE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_TABLE_BYTES} bytes; use Parquet")
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {_one_line(error)}") from None


def _name(source: str, label: Any) -> str | None:
    if label in (None, ""):
        return None
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise ConfigError(f"{source}: label {label!r} is neither a name nor a whole number")
    return str(label)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
