"""Write predictions as files that other tools import, and count labels given there.

In an annotation tool a person confirms or corrects the predicted classes, and
:mod:`uno.data.label_files` reads them back. None of the tools needs to be installed,
because the formats of their files are documented.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.compute

from uno.data.decode import BadImage, read_header
from uno.data.files import Storage
from uno.data.h5ad import format_h5ad
from uno.data.label_files import LOCAL_FILE, match_images
from uno.errors import ConfigError, StorageError, one_line
from uno.results.folders import CSV_FILE, write_csv
from uno.results.predictions import COLUMNS, read_batches, read_columns, read_identity

FACTS = ("id", "uri", "class_name", "kind", "probability")
log = logging.getLogger(__name__)

CELLS_FILE = "predictions.h5ad"
EMBEDDING = "X_uno"  # array of obsm in CELLS_FILE


def export_predictions(
    storage: Storage, target: Storage, format: str, images: str | None
) -> list[str]:
    """Write the predictions of a run, or of ``uno predict``, for another tool.

    Annotation tools get only images that could be read, and tables all rows. Files that
    exist are replaced.

    Args:
        storage: The run, or the output directory of ``uno predict``.
        target: The directory of the files.
        format: A key of :data:`TABLES`, "csv" or "h5ad", or a key of
            :data:`ANNOTATIONS`, "label-studio", "fiftyone" or "cvat".
        images: The folder or URL of the images as the tool sees it, to which the ids of
            the images are appended. None for the path or URI of each image itself (for
            "cvat", its id). Tables ignore it.

    Returns:
        The paths or URIs of the written files.

    Raises:
        ConfigError: ``images`` is None, an image has no file of its own, and the format
            is "label-studio" or "fiftyone". Nothing is written then.
        StorageError: The directory has no complete predictions, they are damaged, or a
            file cannot be written.
        ModuleNotFoundError: The format is "h5ad", and h5py is not installed.
    """
    if read_identity(storage) is None:
        raise StorageError(
            f"{storage.uri} has no complete predictions; run uno predict first"
        )
    if format in TABLES:
        _, write_table = TABLES[format]
        return [write_table(storage, target)]
    files = ANNOTATIONS[format](read_predicted(storage), images)
    for name, content in files.items():
        target.write(name, content)
    return [target.below(name) for name in files]


def read_predicted(storage: Storage) -> Iterator[dict[str, Any]]:
    """Yield the images of complete predictions that could be read, in row order.

    The caller makes sure that the predictions are complete.

    Args:
        storage: The directory above the folder ``predictions``: a run, or the output
            directory of ``uno predict``.

    Yields:
        For each image its "id", "uri" (its path or URI, None if it has no file of its
        own), predicted "class_name", "kind" ("known", "novel", or "rejected" if the
        user dropped the predicted class), the "probability" of that class (0-1), and
        "status", which is "ok". The "class_name" of a rejected image is not that of the
        dropped class, but "rejected" (with a number if another class has this name).

    Raises:
        StorageError: A file is missing or damaged.
    """
    for batch in read_batches(storage, [*FACTS, "status"]):
        yield from (row for row in batch.to_pylist() if row["status"] == "ok")


def locate_image(row: Mapping[str, Any], images: str | None) -> str:
    """Return the path or URL under which a tool finds the image of a row.

    Args:
        row: A row of the predictions, with its "id" and "uri" (path or URI, or None).
        images: The folder or URL of the images as the tool sees it. The result is this
            text without slashes at its end, a slash, and the id of the row. If the text
            is a URL (it contains "://"), the id is percent-encoded, except for slashes.
            None for the "uri" of the row.

    Raises:
        ConfigError: The row has no "uri", because its image has no file of its own, and
            ``images`` is None.
    """
    if images is not None:
        name = quote(row["id"]) if "://" in images else row["id"]
        return f"{images.rstrip('/')}/{name}"
    if row["uri"] is None:
        raise ConfigError(
            f"image {row['id']} has no file of its own; name the folder or URL of the"
            " images by --images"
        )
    return str(row["uri"])


def write_label_studio(
    rows: Iterable[Mapping[str, Any]], images: str | None
) -> dict[str, bytes]:
    """Format tasks with predictions for Label Studio, and their labeling configuration.

    No file is written. Absolute local paths become URLs of Label Studio's local files
    with the document root ``/``.

    Args:
        rows: The images, with the keys of :func:`read_predicted`: "id", "uri",
            "class_name", "kind" and "probability".
        images: The folder or URL of the images as the tool sees it, to which the ids
            are appended. None for the "uri" of each row.

    Returns:
        The contents of two files, by name. ``label-studio.json`` has a task for each
        image. The ``data`` of a task are the address of the image, its id
        ("image_id") and its kind; its prediction is the class, with the probability
        as score. Label Studio exports the ``data`` with the labels, so a label can be
        assigned to the row by the id. ``label-studio.xml`` is the labeling
        configuration, with a single choice among all class names of the rows.

    Raises:
        ConfigError: ``images`` is None, and a row has no "uri".
    """
    tasks, names = [], set[str]()
    for row in rows:
        image = locate_image(row, images)
        if image.startswith("/"):
            image = LOCAL_FILE + quote(image[1:])
        names.add(row["class_name"])
        choice = {
            "from_name": "class",
            "to_name": "image",
            "type": "choices",
            "value": {"choices": [row["class_name"]]},
        }
        prediction = {
            "model_version": "uno",
            "score": row["probability"],
            "result": [choice],
        }
        # JSON-MIN has the number of the task as "id"
        data = {"image": image, "image_id": row["id"], "kind": row["kind"]}
        tasks.append({"data": data, "predictions": [prediction]})
    view = ElementTree.Element("View")
    ElementTree.SubElement(view, "Image", name="image", value="$image")
    choices = ElementTree.SubElement(
        view, "Choices", name="class", toName="image", choice="single"
    )
    for name in sorted(names):
        ElementTree.SubElement(choices, "Choice", value=name)
    return {
        "label-studio.json": json.dumps(tasks, indent=1).encode(),
        "label-studio.xml": format_xml(view),
    }


def write_fiftyone(
    rows: Iterable[Mapping[str, Any]], images: str | None
) -> dict[str, bytes]:
    """Format a ``FiftyOneImageClassificationDataset`` that refers to the images.

    No file is written.

    Args:
        rows: The images, with the keys of :func:`read_predicted`: "id", "uri",
            "class_name", "kind" and "probability".
        images: The folder or URL of the images as the tool sees it, to which the ids
            are appended. None for the "uri" of each row.

    Returns:
        The contents of two files, by name. In both the key of an image is its position
        in ``rows``, with eight digits. ``fiftyone/data.json`` has the path of each
        image. ``fiftyone/labels.json`` has its predicted class as label, the
        probability as confidence, and as attributes the id ("image_id"), the kind, and
        the class once more ("predicted"), by which a label that a person changes is
        recognized later.

    Raises:
        ConfigError: ``images`` is None, and a row has no "uri".
    """
    paths, labels = dict[str, str](), dict[str, dict[str, Any]]()
    for index, row in enumerate(rows):
        key = f"{index:08d}"
        paths[key] = locate_image(row, images)
        labels[key] = {
            "label": row["class_name"],
            "confidence": row["probability"],
            # FiftyOne's classifications have an "id" of their own
            "attributes": {
                "image_id": row["id"],
                "kind": row["kind"],
                "predicted": row["class_name"],  # by which a changed label is found
            },
        }
    content = {"classes": None, "labels": labels}
    return {
        "fiftyone/data.json": json.dumps(paths, indent=1).encode(),
        "fiftyone/labels.json": json.dumps(content, indent=1).encode(),
    }


def write_cvat(
    rows: Iterable[Mapping[str, Any]], images: str | None
) -> dict[str, bytes]:
    """Format predicted classes as tags of images, as "CVAT for images 1.1".

    A tag has the class as label, the source "auto", by which it differs from the tags
    of people, and the attributes probability and kind. CVAT finds an image by its name
    in the task. No file is written, but the header of each image file is read.

    Args:
        rows: The images, with the keys of :func:`read_predicted`: "id", "uri",
            "class_name", "kind" and "probability". The size of an image is read from
            the file at "uri", and left out if that is None or cannot be read.
        images: The folder to which the id of an image is appended for its name. None if
            the name is the id.

    Returns:
        The content of ``cvat.xml``, by name. It also lists the class names of the rows
        as labels.
    """
    root = ElementTree.Element("annotations")
    ElementTree.SubElement(root, "version").text = "1.1"
    meta = ElementTree.SubElement(root, "meta")
    job = ElementTree.SubElement(ElementTree.SubElement(meta, "task"), "labels")
    names = set[str]()
    for index, row in enumerate(rows):
        name = row["id"] if images is None else locate_image(row, images)
        size = measure_image(row["uri"])
        image = ElementTree.SubElement(
            root, "image", {"id": str(index), "name": name, **size}
        )
        tag = ElementTree.SubElement(
            image, "tag", label=row["class_name"], source="auto"
        )
        for fact in ("probability", "kind"):
            value = ElementTree.SubElement(tag, "attribute", name=fact)
            value.text = str(row[fact])
        names.add(row["class_name"])
    for name in sorted(names):
        label = ElementTree.SubElement(job, "label")
        ElementTree.SubElement(label, "name").text = name
        ElementTree.SubElement(label, "type").text = "tag"
    return {"cvat.xml": format_xml(root)}


def write_cells(storage: Storage, target: Storage) -> str:
    """Write the predictions as ``predictions.h5ad``, which anndata reads.

    The ids of the rows are the names of the cells. The other columns of the predictions
    except class_index and uri are columns of ``obs``, under the same names; class_name,
    kind and the scores are missing where a row could not be read. The embeddings, which
    are the encoder's features, are in ``obsm["X_uno"]`` as float32 (N, D) if ``uno
    predict --embedding`` has written them, with NaN for rows that could not be read. A
    file of this name is replaced.

    Args:
        storage: The directory above the folder ``predictions``: a run, or the output
            directory of ``uno predict``. The predictions must be complete.
        target: The directory of the file.

    Returns:
        The path or URI of the file.

    Raises:
        StorageError: A file of the predictions is missing or damaged, or the .h5ad file
            cannot be written.
        ModuleNotFoundError: h5py is not installed.
    """
    names = [name for name in COLUMNS if name not in ("class_index", "uri")]
    has_embedding = (read_identity(storage) or {})["embedding"]
    table = read_columns(storage, [*names, *(["embedding"] if has_embedding else [])])
    assert table is not None
    columns = {name: table[name].combine_chunks() for name in names}
    ids, arrays = columns.pop("id").to_pylist(), dict[str, np.ndarray]()
    if has_embedding:
        vectors = table["embedding"].combine_chunks()
        is_there = vectors.is_valid().to_numpy(zero_copy_only=False)
        numbers = pa.compute.list_flatten(vectors).to_numpy()
        width = len(numbers) // max(1, is_there.sum())
        arrays[EMBEDDING] = np.full((len(ids), width), np.nan, np.float32)
        arrays[EMBEDDING][is_there] = numbers.reshape(is_there.sum(), width)
    target.write(CELLS_FILE, format_h5ad(ids, columns, arrays))
    return target.below(CELLS_FILE)


def count_labels(
    storage: Storage, labels: Mapping[str, str]
) -> dict[int, Counter[str]]:
    """Count the labels that people gave to the images of the predictions of a run.

    Left out are images with which the run was trained as labeled ones, images that
    could not be read, and names that do not match exactly one image, see
    :func:`~uno.data.label_files.match_images`.

    Args:
        storage: The run.
        labels: The id or path of an image -> its class.

    Returns:
        Index of a predicted class -> label -> the number of images. Images of a class
        that was merged before the prediction count for its target. A dropped class
        counts the images that were rejected because of it. A class without images that
        count is left out, so the result can be empty.

    Raises:
        ConfigError: No label is of an image of the predictions.
        StorageError: The run has no complete predictions, or they are damaged.
    """
    table = read_columns(storage, ["id", "uri", "label", "class_index"])
    if table is None:
        raise StorageError(
            f"{storage.uri} has no complete predictions; run uno predict first"
        )
    ids = table["id"].cast(pa.large_string()).combine_chunks()
    found = match_images(labels, ids, table["uri"].to_pylist)
    if not found:
        raise ConfigError(
            f"no label is of an image in the predictions of {storage.uri}; the labels"
            f" are of images such as {one_line(repr(next(iter(labels))))}"
        )
    counts = defaultdict[int, Counter[str]](Counter)
    for image, row in found.items():
        index = table["class_index"][row].as_py()
        if index is not None and not table["label"][row].is_valid:
            counts[index][labels[image]] += 1
    return counts


def measure_image(path: str | None) -> dict[str, str]:
    """Return the width and height of an image file.

    The beginning of the file is read, and the whole file if that does not hold the
    header. Nothing is decoded.

    Args:
        path: The path or URI of the file; None for an image without a file.

    Returns:
        "width" and "height" in pixels, as text, before an EXIF orientation is applied.
        Empty for None, and if the file cannot be read or is no image that
        :mod:`uno.data.decode` accepts, by its header.
    """
    if path is None:
        return {}
    try:
        _, width, height, *_ = read_header(path)
    except (BadImage, StorageError):
        return {}
    return {"width": str(width), "height": str(height)}


def format_xml(root: ElementTree.Element) -> bytes:
    """Return an indented XML document in UTF-8 with a line break at the end.

    The tree of ``root`` is indented in place. The document has no XML declaration,
    because Label Studio refuses one, and UTF-8 is the default of XML.
    """
    ElementTree.indent(root)
    return ElementTree.tostring(root, "unicode").encode() + b"\n"


Write = Callable[[Iterable[Mapping[str, Any]], str | None], dict[str, bytes]]
"""Return the content of files by name, from rows with the keys :data:`FACTS`."""

ANNOTATIONS: dict[str, Write] = {
    "label-studio": write_label_studio,
    "fiftyone": write_fiftyone,
    "cvat": write_cvat,
}

TABLES: dict[str, tuple[str, Callable[[Storage, Storage], str]]] = {
    "csv": (CSV_FILE, write_csv),
    "h5ad": (CELLS_FILE, write_cells),
}
"""The name of a file, and a function that writes it.

The function writes all predictions of the first directory to this file of the second.
"""


def update_tables(storage: Storage) -> list[str]:
    """Write ``predictions.csv`` and ``predictions.h5ad`` of a run again if they exist.

    If h5py is not installed, ``predictions.h5ad`` stays as it is, and a warning is
    logged.

    Args:
        storage: The run, whose predictions have changed and are complete. The files are
            in the run directory.

    Returns:
        The names of the files that existed and were replaced.

    Raises:
        StorageError: A file of the predictions is missing or damaged, or a table cannot
            be written.
    """
    updated = list[str]()
    for name, write in TABLES.values():
        if storage.exists(name):
            try:
                write(storage, storage)
                updated.append(name)
            except ModuleNotFoundError as error:
                log.warning(
                    "%s was not updated and still has the previous classes: %s",
                    storage.below(name),
                    one_line(error),
                )
    return updated
