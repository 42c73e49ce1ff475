"""Read tables of images: Parquet, CSV and JSONL files.

Parquet files have the columns id, image, label and split, or Hugging Face's layout.
A column ``eval_label`` may hold true classes for evaluation, which training never
reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from uno.data import files as filesystem
from uno.data.columns import (
    class_codes,
    decimal,
    joined,
    make_ids,
    make_labels,
    make_unlabeled,
    present_classes,
)
from uno.data.image_paths import find_images
from uno.data.images import Images, is_image
from uno.data.labels import encode_column, encode_labels, require_distinct
from uno.data.parquet import (
    FOOTERS,
    PACKED,
    TEXT,
    OpenedParquet,
    ParquetImages,
    check_images,
    is_training,
    json_at,
    parquet_files,
    partition_columns,
    plain_type,
    values_in,
)
from uno.data.rows import DEFAULT_OPTIONS, SPLITS, ReadOptions, Rows
from uno.data.text_tables import TextTable, read_text_table
from uno.errors import ConfigError, one_line
from uno.limits import MAX_ROWS

IMAGE_COLUMNS = ("image", "img", "path")
LABEL_COLUMNS = ("label", "fine_label", "labels")
TRAINING_COLUMNS = (*LABEL_COLUMNS, "split", "eval_label")
Names = tuple[str, ...]
STORE_BYTES = ", or store the bytes of the images in the column"


def read_parquet(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> Rows:
    """Read one Parquet file, or all *.parquet files of a folder.

    The split of a row is its value in the column ``split``; else it follows from the
    name of the file (train-*, test-*, validation-*) or its folder; else it is train.
    Folders called NAME=VALUE are columns, as Spark and pandas write them, see
    :func:`partition_columns`. Bytes of images stay in the files until they are read.

    Args:
        path: Path or URI of the file or folder.
        options: How the source is read.

    Raises:
        ConfigError: There is no such file; the files are damaged, not a whole pack, or
            do not have the same columns; or a column cannot be used.
    """
    source, (root, files) = f"parquet:{path}", parquet_files(path, options.follow_links)
    with ThreadPoolExecutor(FOOTERS) as pool:
        folders = partition_columns(files)
        parts = list(
            pool.map(
                lambda file, of: _read_file(file, of, options),
                files,
                folders,
            )
        )
    tables, class_names, known, left, opened = zip(*parts, strict=True)
    if len(set(left)) > 1:
        raise ConfigError(f"{source}: the files name their image column differently")
    if len(set(class_names)) > 1:
        raise ConfigError(
            f"{source}: the class names in the metadata differ between files"
        )
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise ConfigError(
            f"{source}: the files have different columns: {one_line(error)}"
        ) from None
    if not len(table):
        raise ConfigError(f"{source}: no rows")
    labels, truth = (
        (
            encode_column(source, table[c], class_names[0])
            if c in table.column_names
            else None
        )
        for c in ("label", "eval_label")
    )
    require_distinct(source, labels, truth)
    places, starts = (
        [filesystem.valid_text(f.relative) for f in files],
        np.cumsum([0, *map(len, tables)]),
    )
    ids = pa.concat_arrays([*map(_make_ids, tables, places, starts.tolist())])
    images: Images
    if "image" in table.column_names:
        images = find_images(
            source,
            root,
            values_in(table["image"]),
            options,
            may_lack=options.images_only,
            otherwise=STORE_BYTES,
        )
    else:
        images = ParquetImages(
            root,
            [f.path for f in files],
            left[0],
            [f[2:4] for f in files],
            options,
            opened,
        )
    is_train, known = table["is_train"].to_numpy(), next(filter(None, known), ())
    present = opened[0].schema.names
    is_noted = labels is None and not options.images_only
    notes = note_of_no_label(path, present, options.columns) if is_noted else ()
    labels = make_unlabeled(len(table)) if labels is None else labels
    return Rows(
        ids,
        images,
        labels,
        is_train,
        source,
        class_names[0],
        known,
        notes,
        eval_labels=truth,
    )


def _make_ids(table: Any, name: str, first: int) -> pa.LargeStringArray:
    """Return the ids of the rows of one file.

    Args:
        table: The Arrow table of the file. Its column ``id`` may lack values or be
            missing. Ids are then ``row-NUMBER``, or ``NAME#NUMBER`` if there is no
            column.
        name: Relative path of the file.
        first: Number of its first row in the source.
    """
    rows = np.arange(len(table))
    if "id" not in table.column_names:
        return joined("#", name, decimal(rows))
    given = table["id"].cast(pa.large_string()).combine_chunks().fill_null("")
    instead = joined("", "row-", decimal(first + rows))
    return pa.compute.if_else(pa.compute.equal(given, ""), instead, given)


def _read_file(
    file: filesystem.FileEntry,
    folders: Mapping[str, str | int | None],
    options: ReadOptions,
) -> tuple[Any, Names, Names, str, OpenedParquet]:
    """Read one Parquet file, but for the bytes of its images.

    Args:
        file: The file.
        folders: Column name -> value, by :func:`partition_columns`.
        options: How the source is read.

    Returns:
        An Arrow table with the column is_train; with id, label and eval_label, if the
        file or its folders have them; and with image, if the images are paths. The
        class names and the known classes of the metadata, empty if it has none. The
        name of the image column, if it holds bytes and was not read; else ''. The
        opened file.

    Raises:
        ConfigError: The file is damaged, or a column is missing or of a wrong type.
    """
    name, path, own = file.relative, file.path, options.columns
    parquet = OpenedParquet(path, file.size)
    schema, num = parquet.schema, parquet.metadata.num_rows
    present = present_columns(schema, own, folders)
    check_names(path, present, options)
    image = _image_column(path, own, schema.names)
    label = own.get("label") or next((c for c in LABEL_COLUMNS if c in present), None)
    if num > MAX_ROWS:
        raise ConfigError(f"{path} has {num:,} rows, more than {MAX_ROWS:,}")
    check_images(path, schema.field(image).type)
    only_paths = 0 < num == parquet.rows_without_bytes(image)[0]
    left = "" if plain_type(schema.field(image).type) in TEXT or only_paths else image
    theirs = {name: own.get(name, name) for name in ("id", "split", "eval_label")}
    theirs |= {"label": label or "", "image": image}
    if options.images_only:
        theirs = {ours: theirs[ours] for ours in ("id", "image")}
    wanted = {*theirs.values()} - {image}
    table = parquet.read(
        [c for c in schema.names if c in wanted or (c == image and not left)]
    )
    columns = {ours: table[c] for ours, c in theirs.items() if c in table.column_names}
    if not options.images_only:
        columns |= columns_of_folders(path, theirs, folders, columns, num)
    if only_paths:
        columns["image"] = pa.compute.struct_field(columns["image"], "path")
    elif not left:
        columns["image"] = columns["image"].cast(plain_type(columns["image"].type))
    with parquet.errors():
        columns |= {
            name: columns[name].cast(pa.string())
            for name in ("id", "split")
            if name in columns
        }
    given = columns.pop("split", None)
    is_train = (
        np.full(num, is_training(name))
        if given is None
        else splits_in(path, encode_column(path, given))
    )
    found = pa.table({**columns, "is_train": is_train})
    metadata = schema.metadata or {}
    known = json_at(metadata.get(PACKED.encode(), ""), "known")
    known = tuple(map(str, known)) if isinstance(known, list) else ()
    names = json_at(
        metadata.get(b"huggingface", ""), "info", "features", label or "", "names"
    )
    if names is not None and (
        not isinstance(names, list) or len(set(map(str, names))) < len(names)
    ):
        raise ConfigError(
            f"{path}: the class names in its metadata are not a list of different names"
        )
    return (
        found,
        tuple(filesystem.valid_text(str(name)) for name in names or ()),
        known,
        left,
        parquet,
    )


def present_columns(
    schema: Any, own: Mapping[str, str], folders: Mapping[str, str | int | None]
) -> list[str]:
    """List the columns of a Parquet file and of its folders, by their own names.

    A folder called NAME=VALUE counts as a column. Each name is listed once.

    Args:
        schema: The Arrow schema of the file.
        own: Standard name of a column, such as "label" -> its name in the file.
        folders: Column name -> value, by :func:`partition_columns`. A folder whose name
            is that of the column of ids or of images is left out.
    """
    of_rows = [own[ours] for ours in own if ours not in TRAINING_COLUMNS]
    names = [*schema.names, *(name for name in folders if name not in of_rows)]
    return [*dict.fromkeys(names)]


def columns_of_folders(
    path: str,
    theirs: Mapping[str, str],
    folders: Mapping[str, str | int | None],
    columns: Mapping[str, Any],
    num_rows: int,
) -> dict[str, Any]:
    """Return the columns label, eval_label and split that a file's folders stand for.

    Args:
        path: The file, as error messages name it.
        theirs: Standard name of a column -> its name in the source.
        folders: Column name -> value, by :func:`partition_columns`.
        columns: The columns of the file itself, by their standard names.
        num_rows: The number of rows of the file.

    Returns:
        Standard column name -> Arrow column with the folder's value in every row.
        Columns that the file itself has are not among them.

    Raises:
        ConfigError: The file has the column as well, with another value.
    """
    found = {}
    for ours in ("label", "eval_label", "split"):
        name = theirs.get(ours, ours)
        if name not in folders:
            continue
        if ours not in columns:
            column = pa.repeat(pa.scalar(folders[name]), num_rows)
            found[ours] = pa.chunked_array([column])
            continue
        (expected,) = encode_labels(path, [folders[name]]).to_pylist()
        held = encode_column(path, columns[ours])
        values = {*present_classes(held), *((None,) if held.null_count else ())}
        if differing := sorted(map(repr, values - {expected})):
            raise ConfigError(
                f"{path}: its folder says {name}={expected}, a row of its column {name}"
                f" {one_line(differing[0])}; rename the folder or drop the column"
            )
    return found


def _image_column(path: str, own: Mapping[str, str], columns: Sequence[str]) -> str:
    """Return the name of the column of images.

    Args:
        path: The file, as error messages name it.
        own: Standard name of a column, such as "label" -> its name in the file.
        columns: The names of all columns.

    Raises:
        ConfigError: There is no such column, or two columns have the same name.
    """
    image = own.get("image") or next((c for c in IMAGE_COLUMNS if c in columns), None)
    if image is None:
        raise ConfigError(f"{path}: {need_of_images(columns, IMAGE_COLUMNS)}")
    if len(set(columns)) < len(columns):
        raise ConfigError(f"{path}: two columns have one name")
    return image


def check_names(path: str, columns: Iterable[str], options: ReadOptions) -> None:
    """Check that the columns that the user names are there.

    Args:
        path: The file, as error messages name it.
        columns: The names of all columns.
        options: How the source is read. Columns of labels and splits may be missing if
            only images are read.

    Raises:
        ConfigError: A named column is missing; or a column is called almost as label,
            split or eval_label, for example ``Label``, and would be ignored.
    """
    present, names = list(columns), options.columns
    for ours, theirs in names.items():
        if theirs not in present and not (
            options.images_only and ours in TRAINING_COLUMNS
        ):
            has = one_line(", ".join(present)) or "none"
            raise ConfigError(
                f"{path}: --data.columns {ours}={theirs}: no such column; it has {has}"
            )
    read = {*names, *present} | (
        {"label"} if {*LABEL_COLUMNS}.intersection(present) else set()
    )
    for theirs in () if options.images_only else {*present}.difference(names.values()):
        ours = theirs.strip().lower()
        if ours in ("label", "split", "eval_label") and ours not in read:
            raise ConfigError(
                f"{path}: column {theirs!r} is not {ours}: rename it, leave it out, or"
                f" give --data.columns {ours}={theirs}"
            )


def read_table(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> Rows:
    """Read a .csv or .jsonl file with one image a row.

    The columns are path (or image) and, where present, id, label, split and eval_label.
    An empty label is none.

    Args:
        path: Local path or URI of the table.
        options: How the source is read.

    Raises:
        ConfigError: The file is no such table, or its images are not there.
    """
    root, _ = filesystem.split(path)
    table = read_text_table(path)
    return rows_of_table(f"table:{path}", path, root, table, options)


def rows_of_table(
    source: str,
    path: str,
    root: str,
    table: TextTable,
    options: ReadOptions,
) -> Rows:
    """Make the rows of a data set from the content of a CSV or JSONL table.

    Args:
        source: Name of the source, for errors.
        path: Path of the table, for errors.
        root: Folder or URI that image paths are relative to.
        table: The content of the table.
        options: How the source is read.

    Raises:
        ConfigError: The table lacks columns, or its images are not there.
    """
    columns, names = table.columns, options.columns
    check_names(path, columns, options)
    theirs = [name for name in columns if name]
    columns = columns | {
        ours: columns[other] for ours, other in names.items() if other in columns
    }
    if options.images_only:
        columns = {
            name: c for name, c in columns.items() if name not in TRAINING_COLUMNS
        }
    image = next((c for c in ("path", "image") if c in columns), None)
    image = "image" if names.get("image") else image
    if image is None:
        raise ConfigError(f"{source}: {need_of_images(theirs, ('path', 'image'))}")
    if not columns[image]:
        raise ConfigError(f"{source}: no rows")
    missing = [None] * len(columns[image])
    labels, truth = (
        encode_labels(source, columns.get(c, missing)) for c in ("label", "eval_label")
    )
    require_distinct(source, labels, truth)
    ids = make_ids(
        f"row-{i}" if value in (None, "") else str(value)
        for i, value in enumerate(columns.get("id", missing))
    )
    splits = (
        None if value in (None, "") else str(value)
        for value in columns.get("split", missing)
    )
    is_train = splits_in(source, make_labels(splits))
    images = find_images(
        source,
        root,
        columns[image],
        options,
        may_lack=options.images_only,
        lines=table.lines,
    )
    notes = table.notes
    if "label" not in columns and not options.images_only:
        notes += note_of_no_label(path, theirs, names)
    return Rows(
        ids,
        images,
        labels,
        is_train,
        source,
        notes=notes,
        eval_labels=truth if "eval_label" in columns else None,
    )


LIKELY_IMAGES = re.compile(
    r"(image|img|photo|picture|sample)?["
    r" _-]?(id|name|path|uri|url|ref|file|s)?|source-ref"
    r"|file[ _-]?(name|path)?|image[ _-]?file[ _-]?(name|path)?",
    re.IGNORECASE,
)
"""Names that other programs give to a column of image paths."""
LIKELY_LABELS = re.compile(
    r"(class|category|cat|target|species|breed|kind|type|tag|y|diagnosis|annotation|choice"
    r"|(class|category|label)[ _-]?(name|id|s)?|cell[ _-]?types?"
    r"|labels?|text|answer|genus|variety)",
    re.IGNORECASE,
)
"""Names that other programs give to a column of classes."""


def need_of_images(columns: Sequence[str], ours: Sequence[str]) -> str:
    """Return the end of the error line of a table without a column of images.

    Args:
        columns: The names of the columns that it has.
        ours: The names that a column of images may have.
    """
    likely = next(
        (name for name in columns if name and LIKELY_IMAGES.fullmatch(name)), "NAME"
    )
    has = one_line(", ".join(columns)) or "none"
    text = (
        f"needs a column {' or '.join(ours)}, or --data.columns image={likely}; it has"
        f" {has}"
    )
    if len(columns) == 1 and len(columns[0].split(",")) > 1:
        text += "; each line is one value in quotes: remove the quotes around the lines"
    if any(is_image(name) for name in columns):
        text += "; the first line must name the columns, as path,label"
    return text


def note_of_no_label(
    path: str, columns: Sequence[str], names: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a note on a table that has no column of labels.

    Args:
        path: The table.
        columns: The names of the columns that it has.
        names: Standard name of a column, such as "label" -> its name in the table.

    Returns:
        One line that suggests a column, nothing if no column can be the labels.
    """
    ours = {"path", "image", "img", "id", "split", "eval_label", "text", "embedding"}
    others = [
        name for name in columns if name not in ours and name not in names.values()
    ]
    if not others:
        return ()
    likely = next((name for name in others if LIKELY_LABELS.fullmatch(name)), None)
    likely = likely or (others[0] if len(others) == 1 else "NAME")
    has = one_line(", ".join(columns))
    return (f"{path}: no column label; it has {has}: --data.columns label={likely}",)


def splits_in(source: str, given: pa.DictionaryArray) -> np.ndarray:
    """Return which rows are for training, by the split that each names.

    Args:
        source: The source, as the error message names it.
        given: The split that each of N rows names, a dictionary array (N,). A row that
            names none is for training.

    Returns:
        bool (N,).

    Raises:
        ConfigError: A split is not one of :data:`~uno.data.rows.SPLITS`, in any case of
            letters.
    """
    names = given.dictionary.to_pylist()
    splits = [SPLITS.get(name.lower()) for name in names]
    if None in splits:
        wrong = one_line(repr(names[splits.index(None)]))
        raise ConfigError(
            f"{source}: split must be train, test or validation, not {wrong}"
        )
    is_train = np.array([*(split == "train" for split in splits), True])
    return is_train[class_codes(given)]
