"""Read labels that people have given: tables, and files of annotation tools.

Every file becomes one mapping from an image to its class. It gives labels to the rows
of a source (``--data.labels``), and names to discovered classes (``uno classes
--from``). An image that people have put into several classes has no label.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa

from uno.data import files as filesystem
from uno.data.columns import (
    class_codes,
    fill_labels,
    find_rows,
    make_labels,
    present_classes,
)
from uno.data.images import is_image
from uno.data.labels import encode_labels, is_missing, require_distinct
from uno.data.rows import Rows
from uno.data.text_tables import read_text_table
from uno.errors import ConfigError, one_line
from uno.limits import MAX_TABLE_BYTES
from uno.text import plural

Answers = Iterator[tuple[str, str]]
"""Pairs of an image, by its id or path, and a class that a person has given to it."""

IMAGE_KEYS = ("image_id", "id", "path", "image", "file_name", "filename")
"""Names of a column of images in a table, the ids that we export first."""
LABEL_KEYS = ("label", "class", "choice")
"""Names of a column of labels in a table, and of Label Studio's choices."""
CONFIRMED = "confirmed"
"""Tag in FiftyOne of a sample or label whose predicted class is right."""
UPLOAD = re.compile(r"(?:https?://[^/]*)?/data/upload/.*/[0-9a-f]{8}-(.*)")
"""Address of a file that a person has uploaded to Label Studio."""
LOCAL_FILE = "/data/local-files/?d="
"""Beginning of the address of a file that Label Studio serves from a disk."""


class GivenLabels(NamedTuple):
    """Labels that people have given to images, as read from a file.

    Attributes:
        classes: The id or path of an image -> its class.
        warnings: A line about images with several classes, if there are any.
    """

    classes: dict[str, str]
    warnings: tuple[str, ...] = ()


def read_label_file(path: str) -> GivenLabels:
    """Read the labels of a table or of a file of an annotation tool.

    - A table (.csv, .tsv, .jsonl) with the columns ``id`` and ``label``, or columns of
      other usual names, as in the CSV file of Label Studio. The column of images is the
      first of image_id, id, path, image, file_name and filename that there is, and that
      of labels the first of label, class and choice. Names in capitals do not count.
    - Label Studio's JSON or JSON-MIN: the submitted annotations.
    - ``samples.json`` of a ``FiftyOneDataset``: labels that differ from the prediction
      or have none, and those with the tag ``confirmed`` on the label or its sample.
    - "CVAT for images" (.xml): tags that a person has added or changed, which are all
      but those with the source ``auto``.

    Args:
        path: Path or URI of the file. Its ending, in upper or lower case, is one of
            .csv, .tsv, .jsonl, .json and .xml.

    Returns:
        The class of each image that the file puts into one class. Images that it puts
        into several different classes are left out, and a warning counts them and names
        the first one.

    Raises:
        ConfigError: The file cannot be read, is larger than ``MAX_TABLE_BYTES`` (1
            GiB), is of another kind, is damaged, lacks a column, has no label of a
            person, or puts every image into several classes; or it is not clear which
            of several groups of choices or fields holds the classes.
    """
    suffix = filesystem.split(path)[1].lower().rpartition(".")[2]
    if suffix in ("csv", "tsv", "jsonl"):
        answers = _answers_of_table(path)
    elif suffix in ("json", "xml"):
        answers = _answers_of_tool(path, suffix)
    else:
        raise ConfigError(
            f"{path}: labels are read from .csv, .tsv and .jsonl tables with id and"
            " label, .json files of Label Studio and FiftyOne, and .xml files of CVAT"
        )
    classes = defaultdict[str, dict[str, None]](dict)
    for image, name in answers:
        classes[image][name] = None
    if not classes:
        raise ConfigError(
            f"{path} has no label of a person; submit annotations in Label Studio, tag"
            f" right labels {CONFIRMED!r} in FiftyOne, or add tags in CVAT"
        )
    several = {image: names for image, names in classes.items() if len(names) > 1}
    warnings: tuple[str, ...] = ()
    if several:
        image, names = next(iter(several.items()))
        example = one_line(f"{image}: {', '.join(names)}")
        warnings = (
            f"{path}: {plural(len(several), 'image')} in several classes, e.g."
            f" {example}: it gives them no label; keep one class of each image",
        )
    clear = {i: next(iter(names)) for i, names in classes.items() if i not in several}
    if not clear:
        raise ConfigError(warnings[0])
    return GivenLabels(clear, warnings)


def with_label_file(rows: Rows, path: str) -> Rows:
    """Replace labels of a data set by the labels that a file gives to its images.

    Rows that the file does not name, or for which it names several classes, keep their
    labels. The class of the file need not be a class of the data set. Labels that are
    numbers are read by the rule of all sources, see
    :func:`~uno.data.labels.encode_labels`: ``0.0`` is the class ``0``, and a negative
    number is no label, so that the row keeps the label that it has.

    Args:
        rows: The rows of a source.
        path: Path or URI of the file, a table or a file of an annotation tool, see
            :func:`read_label_file`.

    Returns:
        A copy of the rows with the labels of the file, with a note that counts the
        images that were found, and with warnings about images in several classes and
        about images that :func:`match_images` does not find. ``eval_labels`` and
        ``class_names`` stay as they are.

    Raises:
        ConfigError: :func:`read_label_file` refuses the file; no image to which it
            gives one class is found by :func:`match_images`; all labels of these images
            are numbers, and one is a fraction; or a class has a name longer than
            ``MAX_LABEL_LENGTH``, or one that differs from another class of the labels
            or ``eval_labels`` only by spaces around it or as ``1`` and ``1.0`` do.
            Names that differ in capitals are different classes.
    """
    given = read_label_file(path)
    numbers = np.arange(len(rows))
    found = match_images(given.classes, rows.ids, lambda: rows.images.paths(numbers))
    warnings = (*rows.warnings, *given.warnings)
    missing = [image for image in given.classes if image not in found]
    if missing:
        what = (
            f"{path}: {plural(len(missing), 'label')} of images that match no row of"
            f" {rows.source}, several rows, or a row that has a label of this file,"
            f" e.g. {one_line(repr(missing[0]))}"
        )
        if not found:
            example = one_line(repr(rows.ids[0].as_py()))
            raise ConfigError(f"{what}; ids there are such as {example}")
        warnings = (*warnings, f"{what}: they are left out")
    images = [*found]
    names = encode_labels(
        path, [given.classes[image] for image in images], name_row=images.__getitem__
    )
    codes = np.full(len(rows), -1, np.int32)
    codes[[*found.values()]] = class_codes(names)
    indices = pa.array(codes, mask=codes < 0)
    labels = fill_labels(
        pa.DictionaryArray.from_arrays(indices, names.dictionary), rows.labels
    )
    used = make_labels(sorted(present_classes(labels)))
    require_distinct(path, used, rows.eval_labels)
    note = f"{plural(len(found), 'label')} from {path}"
    return replace(
        rows,
        labels=labels,
        warnings=warnings,
        notes=(*rows.notes, note),
    )


def match_images(
    images: Iterable[str],
    ids: pa.LargeStringArray,
    paths: Callable[[], Sequence[str | None]],
) -> dict[str, int]:
    """Find the rows of the images that a file names.

    A name that is the id of a row means this row. Any other name may be a path that is
    relative to any folder, so it is compared with the ids and paths of all rows from
    their ends, by whole names of folders and files. It means a row if the id or path of
    the row ends with the name, or if the name ends with the id or path of the row. The
    image is not found if this holds for no row, for several rows, or for a row that
    another image of the file means already. In this comparison slashes at the beginning
    of names, ids and paths are ignored, and the file name in an id or path may also be
    written as Label Studio writes it, see :func:`_name_of_upload`.

    Args:
        images: The names of images in the file, which are ids or paths.
        ids: The ids of all rows.
        paths: Returns the paths of all rows, None for a row without a path. It is
            called only if an image is not named by its id.

    Returns:
        Name of each image that was found, as in the file -> its row number. No row is
        given to two names.
    """
    images = list(images)
    found = find_rows(ids, images)
    missing = [image for image in images if image not in found]
    if not missing:
        return found
    rows_of_name = defaultdict[str, list[tuple[str, int]]](list)
    for row, names in enumerate(zip(ids.to_pylist(), paths(), strict=True)):
        for name in filter(None, names):
            folder, slash, file = name.lstrip("/").rpartition("/")
            for shown in {file, _name_of_upload(file)}:
                rows_of_name[shown].append((f"/{folder}{slash}{shown}", row))
    taken = {*found.values()}
    for image in missing:
        wanted = f"/{image.lstrip('/')}"
        rows = {
            row
            for name, row in rows_of_name[wanted.rpartition("/")[2]]
            if name.endswith(wanted) or wanted.endswith(name)
        }
        if len(rows) == 1 and not rows <= taken:
            found[image] = rows.pop()
            taken.add(found[image])
    return found


def _answers_of_table(path: str) -> Answers:
    """Yield images and their labels from a table with one image a row.

    The columns are the first ones of :data:`IMAGE_KEYS` and of :data:`LABEL_KEYS` that
    the table has. A row without an image or without a label is left out.

    Args:
        path: Path or URI of the table: JSON lines if it ends with .jsonl, else CSV.

    Yields:
        Pairs of the id or path of an image, and its label. Addresses of images are
        converted by :func:`_name_of_address`. A label that is a number or boolean
        becomes its text, and white space at the ends of a label's cell is removed. An
        image with several labels in its cell, as a JSON list or as Label Studio writes
        them, gives one pair for each, see :func:`_classes_of`.

    Raises:
        ConfigError: The table cannot be read, has no column of images or no column of
            labels, or a label in JSON lines is an object whose ``choices`` are missing
            or are not a list.
    """
    columns = read_text_table(path).columns
    image = next((name for name in IMAGE_KEYS if name in columns), None)
    label = next((name for name in LABEL_KEYS if name in columns), None)
    if image is None or label is None:
        has = one_line(", ".join(columns)) or "none"
        raise ConfigError(f"{path}: needs the columns id and label; it has {has}")
    for name, value in zip(columns[image], columns[label], strict=True):
        if not is_missing(name) and not is_missing(value):
            choices = value.get("choices") if isinstance(value, Mapping) else []
            if not isinstance(choices, list):
                raise ConfigError(
                    f"{path}: the {label} of {one_line(name)} is no name of a class:"
                    f" {one_line(value)}"
                )
            is_plain = not isinstance(value, Mapping | list)
            for chosen in _classes_of(str(value).strip() if is_plain else value):
                yield _name_of_address(str(name)), chosen


def _answers_of_tool(path: str, suffix: str) -> Answers:
    """Read images and their labels from a .json or .xml file of an annotation tool.

    The whole file is read and checked before this returns.

    Args:
        path: Path or URI of the file.
        suffix: "json" for Label Studio and FiftyOne, "xml" for CVAT.

    Returns:
        An iterator of pairs: the id or path of an image, and a label that a person
        gave.

    Raises:
        ConfigError: The file cannot be read, is larger than ``MAX_TABLE_BYTES`` (1
            GiB), is damaged, is an XML file with a document type, is of another tool,
            has a task of Label Studio that names no image, or does not say which of
            several groups of choices or fields holds the classes.
    """
    text = filesystem.read_text(path, MAX_TABLE_BYTES)
    try:
        if suffix == "xml":
            if "<!DOCTYPE" in text:  # its entities could fill the memory
                raise ValueError("a document type is not allowed")
            return iter([*_answers_of_cvat(ElementTree.fromstring(text))])
        content = filesystem.parse_json(text)
        if isinstance(content, list):
            return iter([*_answers_of_label_studio(content)])
        if isinstance(content, dict) and "samples" in content:
            return iter([*_answers_of_fiftyone(content["samples"])])
    except (ValueError, ElementTree.ParseError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from None
    except (KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__} {one_line(error)}"
        raise ConfigError(f"{path} is damaged or of another tool: {detail}") from None
    fix = "export FiftyOne's dataset as fiftyone.types.FiftyOneDataset"
    raise ConfigError(f"{path} is of no tool that is known; {fix}")


def _answers_of_label_studio(tasks: Sequence[Mapping[str, Any]]) -> Answers:
    """Yield images and their labels from Label Studio's JSON or JSON-MIN.

    Annotations that were cancelled (skipped tasks), predictions, and results that are
    no choices are left out. JSON-MIN, in which a task has no key ``data``, has data and
    choices side by side, so its choices must have one of the names label, class and
    choice (:data:`LABEL_KEYS`); a task without them gives no pair.

    Args:
        tasks: The content of the file, one object for each image.

    Yields:
        Pairs of the id or path of an image, and a label that a person chose. Several
        annotations of a task, or several classes that are chosen in one group, give
        several pairs.

    Raises:
        ValueError: A task names no image, or it is not clear which of several groups of
            choices are the classes.
        KeyError, TypeError or AttributeError: The content has another structure.
    """
    for task in tasks:
        if "data" not in task:
            image = _image_of_task(task)
            choices = {name: task[name] for name in LABEL_KEYS if name in task}
            yield from _answers_of_choices(image, choices)
            continue
        image = _image_of_task(task["data"])
        for annotation in task["annotations"]:
            choices = {
                result["from_name"]: result["value"]["choices"]
                for result in annotation["result"]
                if result["type"] == "choices" and not annotation.get("was_cancelled")
            }
            yield from _answers_of_choices(image, choices)


def _answers_of_choices(image: str, choices: Mapping[str, Any]) -> Answers:
    """Yield the classes that a person has chosen for one image in Label Studio.

    Args:
        image: The id or path of the image.
        choices: Name of a group of choices -> what was chosen, see :func:`_classes_of`.
            The group with the first of the names label, class and choice
            (:data:`LABEL_KEYS`) is used, or else the only group. Other groups are
            ignored.

    Yields:
        Pairs of ``image`` and a class; nothing if there is no group.

    Raises:
        ValueError: There are several groups, and none has a name of :data:`LABEL_KEYS`.
        KeyError or TypeError: What was chosen is neither a text, a list nor an object
            with ``choices``.
    """
    if not choices:
        return
    usual = [name for name in LABEL_KEYS if name in choices]
    if not usual and len(choices) > 1:
        raise ValueError(
            f"{image} has the choices {', '.join(choices)}; call those of the class"
            " 'class'"
        )
    chosen = choices[(usual or [*choices])[0]]
    for name in _classes_of(chosen):
        yield image, name


def _classes_of(chosen: Any) -> list[str]:
    """Return the classes of one choice, in each form in which Label Studio writes it.

    Args:
        chosen: A class, which is any text, or a list of classes, which may be empty.
            Several classes are ``{"choices": [...]}`` in JSON-MIN, and the text of that
            in a table. A text that begins with ``{"choices":`` but is no JSON, or whose
            ``choices`` are no list, is the name of one class. Classes in a list that
            are not text become text.

    Returns:
        The names of the classes, in their order.

    Raises:
        KeyError or TypeError: ``chosen`` is something else, such as a number.
    """
    if isinstance(chosen, str) and chosen.startswith('{"choices":'):
        with suppress(ValueError):  # a class of this name
            content = filesystem.parse_json(chosen)
            chosen = content if isinstance(content["choices"], list) else chosen
    if isinstance(chosen, Mapping):
        chosen = chosen["choices"]
    return [chosen] if isinstance(chosen, str) else [str(name) for name in chosen]


def _image_of_task(data: Mapping[str, Any]) -> str:
    """Return the id or path of the image of a task in Label Studio.

    It is the value of ``image_id``, as text. Without this key it is the path of an
    image file, as :func:`_name_of_address` returns it: the value of ``image`` if that
    is one, or else the first value that is one.

    Args:
        data: The data of the task by name.

    Raises:
        ValueError: The data has no ``image_id`` and no value that is the path or
            address of an image file, by its ending, see
            :func:`~uno.data.images.is_image`.
    """
    if "image_id" in data:
        return str(data["image_id"])
    for value in (data.get("image"), *data.values()):
        if isinstance(value, str) and is_image(image := _name_of_address(value)):
            return image
    raise ValueError(f"a task has no image: {', '.join(data)}")


def _name_of_upload(name: str) -> str:
    """Return the name that Label Studio gives to a file when a person uploads it.

    White space at the ends is removed, and spaces inside become underscores. Then all
    characters but letters and digits of any script, underscores, hyphens and dots are
    removed. The random prefix that Label Studio puts before this name is not added.

    Args:
        name: The name of the file, without folders.
    """
    return re.sub(r"[^-\w.]", "", name.strip().replace(" ", "_"))


def _name_of_address(address: str) -> str:
    """Return the path of an image in the address by which Label Studio shows it.

    Of an uploaded file, whose address is ``/data/upload/.../PREFIX-NAME`` with or
    without a host and with a prefix of 8 hex digits, this is ``NAME``. Of a file that
    Label Studio serves from a disk, at an address with ``/data/local-files/?d=PATH``,
    it is ``PATH`` with one leading slash. Of another URL or URI it is the path, without
    the host and without what follows '?' or '#'. Percent-encoded characters are decoded
    in all three. Other texts, such as ids and paths, are returned as they are.
    """
    if (upload := UPLOAD.fullmatch(address)) is not None:
        return unquote(upload[1])
    if LOCAL_FILE in address:
        return "/" + unquote(address.partition(LOCAL_FILE)[2]).lstrip("/")
    if "://" in address:
        return unquote(re.sub(r"^[^:]*://[^/?#]*|[?#].*", "", address, flags=re.DOTALL))
    return address


def _answers_of_fiftyone(samples: Sequence[Mapping[str, Any]]) -> Answers:
    """Yield images and the labels that a person has given to them in FiftyOne.

    These are labels that differ from the prediction that we exported, labels without
    such a prediction, and labels that have the tag ``confirmed`` (:data:`CONFIRMED`),
    or whose sample has it. The exported prediction is the entry ``predicted`` of a
    label. The label of a sample is its field ``ground_truth`` of the type
    ``Classification``, or else its only field of this type. Samples without a label are
    left out.

    Args:
        samples: The samples in ``samples.json``, one object for each image.

    Yields:
        Pairs of an image and its label. The image is named by the ``image_id`` of its
        label, the id of its row, which our export writes, or else by the ``filepath``
        of the sample.

    Raises:
        ValueError: A sample has several fields of FiftyOne's type ``Classification``,
            and none of them is called ``ground_truth``.
        KeyError, TypeError or AttributeError: The content has another structure.
    """
    for sample in samples:
        fields = {
            name: value
            for name, value in sample.items()
            if isinstance(value, dict) and value.get("_cls") == "Classification"
        }
        if len(fields) > 1 and "ground_truth" not in fields:
            raise ValueError(
                f"samples have the fields {', '.join(fields)}; call the one of the"
                " classes ground_truth"
            )
        if not fields:
            continue
        found = fields.get("ground_truth") or next(iter(fields.values()))
        tags = [*sample.get("tags", ()), *found.get("tags", ())]
        if found.get("label") and (
            CONFIRMED in tags or found["label"] != found.get("predicted")
        ):
            yield str(found.get("image_id") or sample["filepath"]), found["label"]


def _answers_of_cvat(root: ElementTree.Element) -> Answers:
    """Yield images and the tags that a person has added or changed in CVAT.

    CVAT marks imported predictions with the source ``auto``, until they are changed.
    All tags with another source, or with none, are yielded.

    Args:
        root: The root of the XML file.

    Yields:
        Pairs of the name of an image, and the label of a tag. An image with several
        tags gives one pair for each.

    Raises:
        KeyError: A tag that is to be yielded has no label, or its image has no name.
    """
    for image in root.iter("image"):
        for tag in image.iter("tag"):
            if tag.get("source") != "auto":
                yield image.attrib["name"], tag.attrib["label"]
