"""Read folders of images, where tables in the same folder name the classes.

Two layouts are known. Hugging Face's ``imagefolder`` has ``metadata.csv`` or
``metadata.jsonl`` with a column ``file_name``. Roboflow's export has ``_classes.csv``
with a column for each class, which holds 0 or 1. The tables lie in the folder itself or
in the folders of its splits.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from uno.data import files as filesystem
from uno.data.images import is_image
from uno.data.rows import DEFAULT_OPTIONS, SPLITS, ReadOptions, Rows
from uno.data.tables import check_names, note_of_no_label, rows_of_table
from uno.data.text_tables import TextTable, read_text_table
from uno.errors import ConfigError, one_line
from uno.text import plural

ONE_HOT = "_classes.csv"  # table in the layout of Roboflow
TABLES = ("metadata.csv", "metadata.jsonl", ONE_HOT)  # names of the tables


def has_labels(root: str, options: ReadOptions = DEFAULT_OPTIONS) -> bool:
    """Return whether tables in a folder name the classes of its images.

    Tables in ``root`` and in its folders train, test, val, valid and validation count,
    and one table suffices. A file ``_classes.csv`` counts by its name alone. A
    ``metadata.csv`` or ``metadata.jsonl`` is read, and counts if it has both a column
    of image paths and a column of labels; all cells of the columns may be empty.

    Args:
        root: Local folder or URI.
        options: How the source is read. Its ``columns`` may rename the two columns
            ("image" and "label"), which are otherwise called ``file_name`` and
            ``label``.

    Returns:
        True at the first such table, so that later tables are not read; False if there
        is none.

    Raises:
        ConfigError: A folder cannot be listed, or a table that has to be read cannot be
            read.
    """
    names = options.columns
    label = names.get("label", "label")
    for relative in _find_tables(root):
        if relative.endswith(ONE_HOT):
            return True
        columns = read_text_table(filesystem.join(root, *relative.split("/"))).columns
        if names.get("image", "file_name") in columns and label in columns:
            return True
    return False


def read_annotated_folder(root: str, options: ReadOptions = DEFAULT_OPTIONS) -> Rows:
    """Read the images that the tables in a folder name.

    The tables lie in ``root`` and in its folders train, test, val, valid and
    validation. The id of a row is its value in the column ``id``. In a table without
    this column it is the image path as the table spells it, after the folder of the
    table, such as ``train/1.jpg``; an absolute path or a URI stays as it is. The split
    is the value of the row in the column ``split``, else it follows from the folder of
    the table (``test``, ``val``, ``valid`` and ``validation`` are test folders), else
    it is 'train'. The columns ``id``, ``split`` and ``eval_label`` are read of metadata
    tables only.

    Args:
        root: Local folder or URI.
        options: How the source is read. Image paths are relative to the folder of the
            table that has them. If ``image_folder`` is not None, it takes the place of
            ``root``: the paths of a table in ``train`` are then relative to the folder
            ``train`` in ``image_folder``. With ``images_only`` labels and splits are
            not used, and every row is an unlabeled training row.

    Returns:
        The rows of all tables, one table after the other. A missing local file is an
        unreadable image. ``warnings`` say how many images below ``root`` no table
        names, and ``notes`` name the tables. ``eval_labels`` is None if no table has a
        true class for evaluation. A row with an empty id, or with neither a column
        ``id`` nor an image path, is called row-NUMBER, with its number from 0 among the
        rows of all tables.

    Raises:
        ConfigError: There is no such table, a table cannot be read or lacks the column
            of image paths, ``options.columns`` names a column that no metadata table
            has (with ``images_only`` columns of labels and splits may be missing), a
            column such as ``Label`` would be ignored because of its spelling, the
            tables have no rows, an image has several classes in ``_classes.csv``, an
            image path is empty (unless ``images_only``) or leads out of ``root`` or of
            ``image_folder``, a split or label cannot be used (unless ``images_only``),
            two ids are equal, none of the images exists (which is not checked in remote
            storage), a folder cannot be listed, or a link leads out of ``root`` and
            ``options.follow_links`` is False.
    """
    source, names = f"imagefolder:{root}", options.columns
    tables = _find_tables(root)
    if not tables:
        raise ConfigError(
            f"{source}: no {', '.join(TABLES)} there or in its folders train, test and"
            " validation"
        )
    merged: dict[str, list[Any]] = {
        c: [] for c in ("path", "id", "label", "eval_label", "split")
    }
    lines, notes, others = list[int](), list[str](), dict[str, None]()
    for relative in tables:
        path = filesystem.join(root, *relative.split("/"))
        table = read_text_table(path)
        if relative.endswith(ONE_HOT):
            ours = _columns_of_one_hot(path, table)
        else:
            ours = _columns_of_metadata(path, table, names)
            others |= dict.fromkeys(table.columns)
        folder, _, _ = relative.rpartition("/")
        num_rows, split = len(table.lines), SPLITS.get(folder, "train")
        paths = [
            _path_below(folder, str(name)) if name else None for name in ours["path"]
        ]
        missing = [None] * num_rows
        merged["path"] += paths
        merged["id"] += ours.get("id", paths)
        merged["split"] += [given or split for given in ours.get("split", missing)]
        for column in ("label", "eval_label"):
            merged[column] += ours.get(column, missing)
        lines += table.lines
        notes += [f"{relative}: {note}" for note in table.notes]
    notes.append(f"labels are those of {', '.join(tables)}")
    check_names(source, others, options)
    if not any(map(_is_given, merged["label"])):
        notes += note_of_no_label(source, [*others], names)
    if not any(map(_is_given, merged["eval_label"])):
        del merged["eval_label"]
    whole = TextTable(merged, lines, tuple(notes))
    # the columns have our names already
    rows = rows_of_table(source, root, root, whole, replace(options, columns={}))
    return replace(rows, warnings=_warnings_of_left_out(root, rows, options))


def _path_below(folder: str, name: str) -> str:
    """Return an image path of a table relative to the root.

    Args:
        folder: The folder of the table relative to the root, '' for the root itself.
        name: The path in the table. A URI or an absolute path stays what it is.
    """
    return name if filesystem.is_uri(name) else posixpath.join(folder, name)


def _is_given(value: Any) -> bool:
    """Return whether a label of a table is there: not null, and no empty text."""
    return value is not None and value != ""


def _warnings_of_left_out(
    root: str, rows: Rows, options: ReadOptions
) -> tuple[str, ...]:
    """Return a warning if a folder has image files that are in no table.

    All folders below it are searched, too, but hidden files and folders are left out.
    The ending of a file tells whether it is an image.

    Args:
        root: Local folder or URI, below which images are searched for.
        rows: The rows of all tables. The full paths of their images are compared with
            those of the files.
        options: How the source is read. Only ``follow_links`` is used.

    Returns:
        One warning with the number of such images and an example, or an empty tuple if
        there are none.

    Raises:
        ConfigError: A folder below ``root`` cannot be listed, or a link leads out of
            ``root`` and ``options.follow_links`` is False.
    """
    # Tables may spell paths in another way, so full paths are compared.
    named = set(rows.images.paths(np.arange(len(rows))))
    inside = filesystem.resolver(root, options.follow_links)
    listed = filesystem.walk(root, options.follow_links)
    images = (file.relative for file in listed if is_image(file.relative))
    left_out = [relative for relative in images if inside(relative) not in named]
    if not left_out:
        return ()
    example = one_line(repr(filesystem.valid_text(left_out[0])))
    return (
        (
            f"{plural(len(left_out), 'image')} below {root} left out, e.g. {example}:"
            " only images that a table names are read; add a line for each, with an"
            " empty label if it has none"
        ),
    )


def _find_tables(root: str) -> list[str]:
    """List the tables of image classes in a folder and in the folders of its splits.

    Returns:
        Paths relative to ``root``, with '/' as separator, of the files that are called
        metadata.csv, metadata.jsonl or _classes.csv: first files in ``root``, then
        files in its folders test, train, val, valid and validation, in this order. The
        files of a folder are sorted by name.

    Raises:
        ConfigError: A folder cannot be listed.
    """
    folders, files = filesystem.children(root)
    found = [name for name in files if name in TABLES]
    for folder in folders:
        if folder in SPLITS:
            _, files = filesystem.children(filesystem.join(root, folder))
            found += [f"{folder}/{name}" for name in files if name in TABLES]
    return found


def _columns_of_metadata(
    path: str, table: TextTable, names: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Return the columns of a table in the layout of Hugging Face, by standard names.

    Args:
        path: The path of the table, for errors.
        table: The content of the table, with its columns by name.
        names: Standard name of a column, such as "label" -> its name in the table. A
            column that is not listed has its standard name, but the column of image
            paths, "image", is then called ``file_name``.

    Returns:
        Standard name -> the values of all rows: 'path' for the column of image paths,
        and each of 'id', 'label', 'eval_label' and 'split' if the table has such a
        column.

    Raises:
        ConfigError: The table has no column of image paths.
    """
    image = names.get("image", "file_name")
    if image not in table.columns:
        has = one_line(", ".join(table.columns)) or "none"
        raise ConfigError(f"{path}: needs a column {image}; it has {has}")
    theirs = {
        ours: names.get(ours, ours) for ours in ("id", "label", "eval_label", "split")
    }
    columns = {
        ours: table.columns[c] for ours, c in theirs.items() if c in table.columns
    }
    return columns | {"path": table.columns[image]}


def _columns_of_one_hot(path: str, table: TextTable) -> dict[str, list[Any]]:
    """Convert a table with a column of 0 and 1 for each class to paths and labels.

    Args:
        path: The path of the table, for errors.
        table: The content of the table, in the layout of Roboflow: the column
            ``filename`` has image paths, and every other column is a class.

    Returns:
        'path' and 'label' -> a list with a value for each row. The label of an image
        is the name of the column with a 1, and None if no column has a 1. Cells with
        any other value than 1, such as 1.0, count as 0. Spaces around a 1 are ignored.

    Raises:
        ConfigError: The table has no column ``filename``, or a row has a 1 in several
            columns.
    """
    if "filename" not in table.columns:
        has = one_line(", ".join(table.columns)) or "none"
        raise ConfigError(f"{path}: needs a column filename; it has {has}")
    classes = [name for name in table.columns if name != "filename"]
    labels = list[str | None]()
    for row, line in enumerate(table.lines):
        members = [c for c in classes if str(table.columns[c][row]).strip() == "1"]
        if len(members) > 1:
            raise ConfigError(
                f"{path} line {line}: the image has the classes"
                f" {one_line(', '.join(members))}; classes are discovered for images of"
                " one class: keep one 1 a line"
            )
        labels.append(members[0] if members else None)
    return {"path": table.columns["filename"], "label": labels}
