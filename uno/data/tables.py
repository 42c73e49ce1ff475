"""Read tables of images: Parquet, CSV and JSONL files.

Parquet files have the columns id, image, label and split, or Hugging Face's layout.
A column ``eval_label`` may hold true classes for evaluation, which training never
reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

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
)
from uno.data.image_paths import find_images
from uno.data.images import Images, is_image
from uno.data.labels import encode_column, encode_labels, require_distinct
from uno.data.parquet import (
    FOOTERS,
    PACKED,
    TEXT,
    ParquetImages,
    ParquetShard,
    check_images,
    json_at,
    parquet_files,
    plain_type,
    values_in,
)
from uno.data.rows import DEFAULT_OPTIONS, SPLITS, ReadOptions, Rows, split_of
from uno.data.text_tables import TextTable, read_text_table
from uno.errors import ConfigError, one_line
from uno.limits import MAX_ROWS

IMAGE_COLUMNS = ("image", "img", "path")
LABEL_COLUMNS = ("label", "fine_label", "labels")
TRAINING_COLUMNS = (*LABEL_COLUMNS, "split", "eval_label")
STORE_BYTES = ", or store the bytes of the images in the column"


def read_parquet(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> Rows:
    """Read one Parquet file, or all *.parquet files of a folder.

    Images are in the first of the columns image, img and path that a file has, and
    labels in the first of label, fine_label and labels. The column ``eval_label`` holds
    true classes for evaluation. ``options.columns`` may give other names.

    The split of a row is its value in the column ``split``: train, test, or val, valid
    or validation, which count as test. Null or blank counts as train. In a file without
    this column it follows from the name of the file (train-*, test-*, validation-*) or
    its folder, and is train if these name none. Bytes of images stay in the files until
    they are read. If no file has a column of labels, all rows are unlabeled. A note
    then names a column of the first file that may hold them, or NAME if it is not clear
    which, unless every column there has another use. If the metadata of the files have
    class names for the column of labels (Hugging Face), these replace labels that are
    numbers, and the rows have them as ``class_names``. If they have known classes
    (``uno data pack``), the rows have those of the first such file.

    Args:
        path: Path or URI of the file or folder.
        options: How the source is read. If the column of images holds paths, they are
            relative to ``image_folder``, or to the folder of the source if that is
            None. With ``images_only``, labels, true classes and splits in columns are
            not read, splits follow from the names of the files, there are no class
            names and no note, and a row of a column of paths may have no path.

    Returns:
        The rows, one file after the other. An id is the value of the column ``id``;
        ``row-NUMBER`` if that is null or empty, numbered from 0 over all files; or, in
        a file without such a column, ``FILE#NUMBER``: the path of the file below the
        source, and the number of the row in the file, from 0.

    Raises:
        ConfigError: There is no such file, or there are no rows; the files are damaged,
            are the shards of an unfinished ``uno data pack``, or are in folders of hive
            partitioning for a column that would be read; some files hold bytes of
            images and others paths, files with bytes differ in the name of this column,
            or the files differ in the class names of their metadata (only files with a
            column of labels are compared); the types of a column in different files do
            not fit together, such as text and numbers; two ids are equal, or two class
            names differ only in spelling; image paths are refused, see
            :func:`~uno.data.image_paths.find_images`; or a column or its values cannot
            be used, see :func:`_read_file`. A file may lack a column of labels or ids
            that another one has, unless ``options.columns`` names the column.
    """
    source, (root, files) = f"parquet:{path}", parquet_files(path, options.follow_links)
    refuse_partitions(source, files, options)
    with ThreadPoolExecutor(FOOTERS) as pool:
        parts = list(pool.map(partial(_read_file, options=options), files))
    if len({part.image for part in parts}) > 1:
        raise ConfigError(f"{source}: the files name their image column differently")
    # A file without labels needs no names of classes.
    declared = {
        part.class_names for part in parts if "label" in part.table.column_names
    }
    if len(declared) > 1:
        raise ConfigError(
            f"{source}: the class names in the metadata differ between files"
        )
    class_names = next(iter(declared), ())
    table = join_tables(source, [part.table for part in parts])
    if not len(table):
        raise ConfigError(f"{source}: no rows")
    labels, truth = (
        (
            encode_column(source, table[c], class_names, name=c)
            if c in table.column_names
            else None
        )
        for c in ("label", "eval_label")
    )
    require_distinct(source, labels, truth)
    places = [filesystem.valid_text(file.relative) for file in files]
    tables = [part.table for part in parts]
    starts = np.cumsum([0, *map(len, tables)]).tolist()
    ids = pa.concat_arrays([*map(_make_ids, tables, places, starts)])
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
        shards = [part.shard for part in parts]
        images = ParquetImages(shards, parts[0].image, [file.time for file in files])
    notes: tuple[str, ...] = ()
    if labels is None and not options.images_only:
        notes = note_of_no_label(path, parts[0].shard.schema.names, options.columns)
    return Rows(
        ids,
        images,
        make_unlabeled(len(table)) if labels is None else labels,
        splits_in(source, encode_column(source, table["split"], name="split")),
        source,
        class_names,
        next((part.known for part in parts if part.known), ()),
        notes,
        eval_labels=truth,
    )


def refuse_partitions(
    source: str, files: Iterable[filesystem.FileEntry], options: ReadOptions
) -> None:
    """Refuse Parquet files in a folder COLUMN=VALUE, as hive partitioning has them.

    Args:
        source: Name of the source, for errors.
        files: The files, with paths relative to the folder that is the source.
        options: How the source is read. Nothing is refused if only images are read.

    Raises:
        ConfigError: COLUMN in the name of a folder is label, fine_label, labels, split
            or eval_label, or a column that ``options.columns`` names. Folders of other
            columns are accepted.
    """
    wanted = {*TRAINING_COLUMNS, *options.columns.values()}
    folders = {folder for file in files for folder in file.relative.split("/")[:-1]}
    for folder in () if options.images_only else sorted(folders):
        name, mark, _ = folder.partition("=")
        if mark and name in wanted:
            raise ConfigError(
                f"{source}: the folder {one_line(folder)} is no column {name}; write it"
                " into the files: pyarrow.dataset.dataset(DIR, partitioning='hive')"
                " reads them with it"
            )


def join_tables(source: str, tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate the tables of several files.

    Columns are joined by name. Types of one kind that differ, such as two of numbers,
    become one that holds both.

    Args:
        source: Name of the source, for errors.
        tables: Arrow tables, at least one.

    Returns:
        The rows of all tables in order, with all columns that any table has. A column
        that a table lacks is null in its rows.

    Raises:
        ConfigError: The types of a column do not fit together, such as text and
            numbers.
    """
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise ConfigError(
            f"{source}: the files have different columns: {one_line(error)}"
        ) from None


def _make_ids(table: Any, name: str, first: int) -> pa.LargeStringArray:
    """Return the ids of the rows of one file.

    Args:
        table: The Arrow table of the file. If its column ``id`` is null or empty in a
            row, the id is ``row-NUMBER``, with the number of the row in the source. If
            it has no such column, ids are ``NAME#NUMBER``, with the number of the row
            in the file. Both count from 0.
        name: Relative path of the file, which is NAME above.
        first: Number of the file's first row in the source.
    """
    rows = np.arange(len(table))
    if "id" not in table.column_names:
        return joined("#", name, decimal(rows))
    given = table["id"].cast(pa.large_string()).combine_chunks().fill_null("")
    instead = joined("", "row-", decimal(first + rows))
    return pa.compute.if_else(pa.compute.equal(given, ""), instead, given)


class _FileContent(NamedTuple):
    """The content of a Parquet file, but for the bytes of its images.

    Attributes:
        shard: The file.
        table: The columns by standard name: split in any case; id, label and
            eval_label, if the file has them and they are to be read; and image, as
            text, if the images are paths.
        image: The name of the column that holds the bytes of the images, '' if they are
            paths.
        class_names: The names of the classes 0, 1, ... that the metadata of Hugging
            Face have for the column of labels. Empty if they have none, or if no column
            of labels is read.
        known: The known classes that ``uno data pack`` wrote into the metadata, empty
            if there are none.
    """

    shard: ParquetShard
    table: pa.Table
    image: str
    class_names: tuple[str, ...]
    known: tuple[str, ...]


def _read_file(file: filesystem.FileEntry, options: ReadOptions) -> _FileContent:
    """Read one Parquet file, but for the bytes of its images.

    Args:
        file: The file.
        options: How the source is read. With ``images_only`` labels, true classes,
            class names and the column of splits are not read.

    Returns:
        The file; a table with the columns id, label, split and eval_label, as far as
        the file has them, and image if the images are paths; the name of the column
        that holds the bytes of the images, '' if they are paths; and the class names
        and the known classes of the metadata, each empty if it has none. Labels are in
        the column that the user names, else in the first of label, fine_label and
        labels. Without a column of splits, split is made from the name of the file. A
        column struct<bytes, path> without any bytes counts as paths.

    Raises:
        ConfigError: The file cannot be read, is damaged or has more than ``MAX_ROWS``
            rows; the column of images or one that the user names is missing (see
            :func:`check_names` for exceptions); the column of images cannot hold images
            by its type, or the column of ids or splits cannot be cast to text; two
            columns have the same name; the name of a column is almost a standard one,
            see :func:`check_names`; or the class names of the metadata are not a list
            of different names. The types of label and eval_label are not checked.
    """
    path, own, shard = file.path, options.columns, ParquetShard(file.path)
    schema, num = shard.schema, shard.metadata.num_rows
    check_names(path, schema.names, options)
    image = _image_column(path, own, schema.names)
    if num > MAX_ROWS:
        raise ConfigError(f"{path} has {num:,} rows, more than {MAX_ROWS:,}")
    kind = schema.field(image).type
    check_images(path, kind)
    names = {ours: own.get(ours, ours) for ours in ("id", "split", "eval_label")}
    label = next((c for c in LABEL_COLUMNS if c in schema.names), "")
    names["label"] = own.get("label", label)
    if options.images_only:
        names = {"id": names["id"]}
    is_text, only_paths = plain_type(kind) in TEXT, shard.holds_only_paths(image)
    if is_text or only_paths:
        names["image"] = image
    table = read_named_columns(shard, file.relative, names)
    if is_text or only_paths:
        column = table["image"]
        if only_paths:
            column = pa.compute.struct_field(column, "path")
        place = table.schema.get_field_index("image")
        table = table.set_column(place, "image", column.cast(plain_type(column.type)))
    metadata = schema.metadata or {}
    known = json_at(metadata.get(PACKED.encode(), ""), "known")
    declared = json_at(
        metadata.get(b"huggingface", ""),
        *("info", "features", names.get("label", ""), "names"),
    )
    if declared is not None and (
        not isinstance(declared, list) or len(set(map(str, declared))) < len(declared)
    ):
        raise ConfigError(
            f"{path}: the class names in its metadata are not a list of different names"
        )
    return _FileContent(
        shard,
        table,
        "" if is_text or only_paths else image,
        tuple(filesystem.valid_text(str(name)) for name in declared or ()),
        tuple(map(str, known)) if isinstance(known, list) else (),
    )


def read_named_columns(
    shard: ParquetShard, relative: str, names: Mapping[str, str]
) -> pa.Table:
    """Read columns of a Parquet file, and give them their standard names.

    Args:
        shard: The file.
        relative: Its path below the source, which names the split of its rows if no
            column of splits is read, see :func:`~uno.data.rows.split_of`.
        names: Standard name of a column to read, such as "label" -> its name in the
            file. A column that the file lacks is left out.

    Returns:
        The columns that were found, by standard name, and in any case "split". Ids,
        splits, paths and the column "text" are cast to text; other columns have the
        types that :meth:`ParquetShard.read` gives them.

    Raises:
        ConfigError: The file is damaged or cannot be read; a column that becomes "id",
            "split", "path" or "text" cannot be cast to text; or any two columns of the
            file have the same name.
    """
    wanted, present = {*names.values()}, shard.schema.names
    if len(set(present)) < len(present):
        raise ConfigError(f"{shard.path}: two columns have one name")
    found = shard.read([name for name in present if name in wanted])
    columns = {ours: found[c] for ours, c in names.items() if c in found.column_names}
    with shard.errors():
        for ours in {"id", "split", "path", "text"}.intersection(columns):
            columns[ours] = columns[ours].cast(pa.string())
    if "split" not in columns:
        split = pa.repeat(split_of(relative), shard.metadata.num_rows)
        columns["split"] = pa.chunked_array([split])
    return pa.table(columns)


def _image_column(path: str, own: Mapping[str, str], columns: Sequence[str]) -> str:
    """Return the name of the column of images.

    It is the one that the user names, else the first of image, img and path that the
    file has.

    Args:
        path: The file, as error messages name it.
        own: Standard name of a column, such as "label" -> its name in the file.
        columns: The names of all columns of the file.

    Raises:
        ConfigError: The user names no column of images, and no column is called image,
            img or path. Whether the file has the column that the user names is not
            checked here.
    """
    image = own.get("image") or next((c for c in IMAGE_COLUMNS if c in columns), None)
    if image is None:
        raise ConfigError(f"{path}: {need_of_images(columns, IMAGE_COLUMNS)}")
    return image


def check_names(path: str, columns: Iterable[str], options: ReadOptions) -> None:
    """Check that the columns that the user names exist, and that no other is missed.

    Args:
        path: The file, as error messages name it.
        columns: The names of all columns.
        options: How the source is read. ``columns`` are the columns that the user
            names. With ``images_only`` those that he names for label, split and
            eval_label may be missing.

    Raises:
        ConfigError: A named column is missing. Or a column that the user does not name
            differs from label, split or eval_label only in case or in white space
            around it, for example ``Label``, and would be ignored, because no column
            has exactly this name (for label also fine_label or labels) and the user
            names none for it; this is not checked with ``images_only``.
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
    """Read a .csv, .tsv or .jsonl file with one image a row.

    The columns are path (or image) and, where present, id, label, split and eval_label.
    If there are both, path is read, unless the user names a column of images. A path is
    relative to ``options.image_folder``, or to the folder of the table if that is None.
    A row without an id is called row-NUMBER, from 0. A row with an empty label is
    unlabeled; for other values see :func:`~uno.data.labels.encode_labels`. The split is
    train or test in any case of letters; val, valid and validation count as test. It is
    train if the value is empty or there is no such column. The column eval_label holds
    true classes, which only evaluation reads.

    Args:
        path: Local path or URI of the table.
        options: How the source is read. Its ``columns`` give the names in the table
            that differ from those above. With ``images_only`` labels, true classes and
            splits are not read, so that every row is an unlabeled training row, and a
            row may have no path.

    Returns:
        The rows in the order of the table. A local image file that does not exist is an
        unreadable image. Notes say which separator other than the comma was found, and
        that there is no column of labels (not with ``images_only``).

    Raises:
        ConfigError: The file cannot be read as a table, lacks the column of images or
            one that ``options.columns`` names, or has no rows; a label, split or path
            cannot be used; two ids are equal, or two class names differ only in
            spelling; a row has no path (without ``images_only``); a column has almost
            the name label, split or eval_label (see :func:`check_names`); or rows have
            paths, but none of these files exists (which is not checked in remote
            storage).
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

    :func:`read_table` describes the columns. Local image files are looked up, but not
    opened.

    Args:
        source: Name of the source, which the rows keep, and which errors name.
        path: Path of the table, for errors and for the note that it has no labels.
        root: Folder or URI of the table. Image paths are relative to it, unless
            ``options.image_folder`` names another folder.
        table: The content of the table. Errors about image paths name its lines.
        options: How the source is read. With ``images_only`` labels, true classes and
            splits are not used, and a row may have no path.

    Returns:
        The rows in the order of the table, with the notes of the table and, if it has
        no column of labels, a note that suggests one of its other columns. There is no
        such note with ``images_only``, or if every column is used for something else,
        such as path or id. ``eval_labels`` is None without a column eval_label.

    Raises:
        ConfigError: The table lacks the column of images or one that
            ``options.columns`` names (with ``images_only`` those for label, split and
            eval_label may be missing), or has no rows; a label, split or path cannot be
            used; two ids are equal, or two class names differ only in spelling; a row
            has no path (without ``images_only``); a column has almost the name label,
            split or eval_label (see :func:`check_names`); or rows have paths, but none
            of these files exists (which is not checked in remote storage).
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
    """Return what a table without a column of images needs, for an error message.

    Args:
        columns: The names of the columns that the table has.
        ours: The names that a column of images may have.

    Returns:
        The text that follows "TABLE: " in the message, such as "needs a column path or
        image, or --data.columns image=file; it has file, label". The column that is
        suggested is the first with a usual name for images, else the placeholder NAME.
        Advice is added if each line seems to be one value in quotes (the only column
        has a comma in its name), or if the first line seems to be a row instead of the
        names of columns (one of these ends like an image file).
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

    The caller has found that there is none; it is not checked here.

    Args:
        path: The table.
        columns: The names of the columns that it has.
        names: The columns that the user names: standard name of a column, such as
            "image" -> its name in the table.

    Returns:
        A tuple of one line that suggests a column, of those that are not used for
        something else: the first one with a usual name for labels, such as "class";
        else the only one; else the placeholder NAME. An empty tuple if all columns are
        used for something else: ``names`` has the column, or its name is path, image,
        img, id, split, eval_label, text or embedding.
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
        bool (N,), False for test rows. Validation counts as test.

    Raises:
        ConfigError: A split in the dictionary of ``given`` is none of train, test, val,
            valid and validation, in any case of letters.
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
