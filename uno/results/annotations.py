"""Predictions as files that annotation tools import.

A person confirms or corrects the predicted classes there. Label Studio, FiftyOne and
CVAT need not be installed, because the formats of their files are documented. Only
``.h5ad`` needs the package anndata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from uno.data.decode import BadImage, read_header
from uno.data.files import Storage
from uno.errors import ConfigError, StorageError
from uno.results.folders import write_csv
from uno.results.predictions import read_batches

LOCAL_FILES = "/data/local-files/?d="  # how Label Studio serves files of its own disk
FACTS = ("id", "uri", "class_name", "kind", "probability", "margin", "head_agreement")


def write_annotations(storage: Storage, format: str, images: str | None) -> list[str]:
    """Write the predictions of a run, or of ``uno predict``, for an annotation tool.

    Images that could not be read are left out.

    Args:
        storage: The directory with ``predictions.parquet``, where the files are
            written.
        format: A key of :data:`FORMATS`.
        images: The folder or URL of the images as the tool sees it, to which the ids of
            the images are appended. None for the path of each image itself.

    Returns:
        The paths of the written files.

    Raises:
        ConfigError: A package is missing, or ``images`` is None and an image has no
            file of its own.
        StorageError: The directory has no predictions.
    """
    names = FORMATS[format](storage, images)
    return [storage.below(name) for name in names]


def read_predicted(storage: Storage) -> Iterator[dict[str, Any]]:
    """Yield the readable images of ``predictions.parquet`` with the keys ``FACTS``."""
    for batch in read_batches(storage, [*FACTS, "status"]):
        yield from (row for row in batch.to_pylist() if row["status"] == "ok")


def locate_image(row: Mapping[str, Any], images: str | None) -> str:
    """Return the path or URL under which a tool finds the image of a row.

    Raises:
        ConfigError: The image is inside a table or an archive, and ``images`` is None.
    """
    if images is not None:
        return f"{images.rstrip('/')}/{row['id']}"
    if row["uri"] is None:
        raise ConfigError(
            f"image {row['id']} has no file of its own; name the folder or URL of the"
            " images by --images"
        )
    return str(row["uri"])


def write_label_studio(storage: Storage, images: str | None) -> list[str]:
    """Write tasks with predictions, and the labeling configuration for them.

    Local paths become URLs of Label Studio's local files with the document root ``/``.
    Label Studio keeps the ``id`` in the ``data`` of each task that it exports.
    """
    tasks, names = [], set[str]()
    for row in read_predicted(storage):
        image = locate_image(row, images)
        if image.startswith("/"):
            image = LOCAL_FILES + quote(image[1:])
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
        data = {"image": image, "id": row["id"], "kind": row["kind"]}
        tasks.append({"data": data, "predictions": [prediction]})
    view = ElementTree.Element("View")
    ElementTree.SubElement(view, "Image", name="image", value="$image")
    choices = ElementTree.SubElement(
        view, "Choices", name="class", toName="image", choice="single"
    )
    for name in sorted(names):
        ElementTree.SubElement(choices, "Choice", value=name)
    storage.write("label-studio.json", json.dumps(tasks, indent=1).encode())
    storage.write("label-studio.xml", format_xml(view))
    return ["label-studio.json", "label-studio.xml"]


def write_fiftyone(storage: Storage, images: str | None) -> list[str]:
    """Write a ``FiftyOneImageClassificationDataset`` that refers to the images.

    ``labels.json`` has the class and its confidence of each image, and ``data.json``
    its path.
    """
    paths, labels = dict[str, str](), dict[str, dict[str, Any]]()
    for index, row in enumerate(read_predicted(storage)):
        key = f"{index:08d}"
        paths[key] = locate_image(row, images)
        labels[key] = {
            "label": row["class_name"],
            "confidence": row["probability"],
            "attributes": {name: row[name] for name in ("id", "kind", "margin")},
        }
    storage.write("fiftyone/data.json", json.dumps(paths, indent=1).encode())
    content = {"classes": None, "labels": labels}
    storage.write("fiftyone/labels.json", json.dumps(content, indent=1).encode())
    return ["fiftyone"]


def write_cvat(storage: Storage, images: str | None) -> list[str]:
    """Write tags of images as "CVAT for images 1.1".

    CVAT finds an image by its name in the task, which is its id, or the id below
    ``images``.
    """
    root = ElementTree.Element("annotations")
    ElementTree.SubElement(root, "version").text = "1.1"
    meta = ElementTree.SubElement(root, "meta")
    job = ElementTree.SubElement(ElementTree.SubElement(meta, "task"), "labels")
    names = set[str]()
    for index, row in enumerate(read_predicted(storage)):
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
    storage.write("cvat.xml", format_xml(root))
    return ["cvat.xml"]


def write_spreadsheet(storage: Storage, images: str | None) -> list[str]:
    """Write ``predictions.csv``, as ``uno predict --csv`` does."""
    if images is not None:
        raise ConfigError("--images is for formats that refer to images, not for csv")
    write_csv(storage)
    return ["predictions.csv"]


def measure_image(path: str | None) -> dict[str, str]:
    """Return the width and height of an image file, nothing if there is no such file.

    Only the header of the file is read.
    """
    if path is None:
        return {}
    try:
        _, width, height = read_header(path)
    except (BadImage, StorageError):
        return {}
    return {"width": str(width), "height": str(height)}


def format_xml(root: ElementTree.Element) -> bytes:
    """Return an indented XML document in UTF-8."""
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return text + b"\n"


FORMATS: dict[str, Callable[[Storage, str | None], list[str]]] = {
    "label-studio": write_label_studio,
    "fiftyone": write_fiftyone,
    "cvat": write_cvat,
    "csv": write_spreadsheet,
}
