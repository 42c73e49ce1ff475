"""Predictions as files that annotation tools import.

A person confirms or corrects the predicted classes there. Label Studio, FiftyOne and
CVAT need not be installed, because the formats of their files are documented.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from uno.data.decode import BadImage, read_header
from uno.data.files import Storage
from uno.errors import ConfigError, StorageError
from uno.results.predictions import read_batches, read_identity

LOCAL_FILES = "/data/local-files/?d="  # how Label Studio serves files of its own disk
FACTS = ("id", "uri", "class_name", "kind", "probability")


def write_annotations(
    storage: Storage, target: Storage, format: str, images: str | None
) -> list[str]:
    """Write the predictions of a run, or of ``uno predict``, for an annotation tool.

    Images that could not be read are left out.

    Args:
        storage: The run, or the output directory of ``uno predict``.
        target: The directory of the files.
        format: A key of :data:`FORMATS`.
        images: The folder or URL of the images as the tool sees it, to which the ids of
            the images are appended. None for the path of each image itself.

    Returns:
        The paths of the written files.

    Raises:
        ConfigError: ``images`` is None, and an image has no file of its own.
        StorageError: The directory has no complete predictions, or they are damaged.
    """
    if read_identity(storage) is None:
        raise StorageError(
            f"{storage.uri} has no complete predictions; run uno predict first"
        )
    files = FORMATS[format](read_predicted(storage), images)
    for name, content in files.items():
        target.write(name, content)
    return [target.below(name) for name in files]


def read_predicted(storage: Storage) -> Iterator[dict[str, Any]]:
    """Yield the readable images of the predictions with the keys :data:`FACTS`."""
    for batch in read_batches(storage, [*FACTS, "status"]):
        yield from (row for row in batch.to_pylist() if row["status"] == "ok")


def locate_image(row: Mapping[str, Any], images: str | None) -> str:
    """Return the path or URL under which a tool finds the image of a row.

    Raises:
        ConfigError: The image is inside a table or an archive, and ``images`` is None.
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
    """Write tasks with predictions, and the labeling configuration for them.

    Local paths become URLs of Label Studio's local files with the document root ``/``.
    Label Studio keeps the ``id`` in the ``data`` of each task that it exports.
    """
    tasks, names = [], set[str]()
    for row in rows:
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
    return {
        "label-studio.json": json.dumps(tasks, indent=1).encode(),
        "label-studio.xml": format_xml(view),
    }


def write_fiftyone(
    rows: Iterable[Mapping[str, Any]], images: str | None
) -> dict[str, bytes]:
    """Write a ``FiftyOneImageClassificationDataset`` that refers to the images.

    ``labels.json`` has the class and its confidence of each image, and ``data.json``
    its path.
    """
    paths, labels = dict[str, str](), dict[str, dict[str, Any]]()
    for index, row in enumerate(rows):
        key = f"{index:08d}"
        paths[key] = locate_image(row, images)
        labels[key] = {
            "label": row["class_name"],
            "confidence": row["probability"],
            # FiftyOne's classifications have an "id" of their own
            "attributes": {"image_id": row["id"], "kind": row["kind"]},
        }
    content = {"classes": None, "labels": labels}
    return {
        "fiftyone/data.json": json.dumps(paths, indent=1).encode(),
        "fiftyone/labels.json": json.dumps(content, indent=1).encode(),
    }


def write_cvat(
    rows: Iterable[Mapping[str, Any]], images: str | None
) -> dict[str, bytes]:
    """Write tags of images as "CVAT for images 1.1".

    CVAT finds an image by its name in the task, which is its id, or the id below
    ``images``.
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


def measure_image(path: str | None) -> dict[str, str]:
    """Return the width and height of an image file, nothing if there is no such file.

    Only the header of the file is read.
    """
    if path is None:
        return {}
    try:
        _, width, height, *_ = read_header(path)
    except (BadImage, StorageError):
        return {}
    return {"width": str(width), "height": str(height)}


def format_xml(root: ElementTree.Element) -> bytes:
    """Return an indented XML document in UTF-8.

    It has no XML declaration, because Label Studio refuses one, and UTF-8 is the
    default of XML.
    """
    ElementTree.indent(root)
    return ElementTree.tostring(root, "unicode").encode() + b"\n"


Write = Callable[[Iterable[Mapping[str, Any]], str | None], dict[str, bytes]]
"""Return the content of files by name, from rows with the keys :data:`FACTS`."""

FORMATS: dict[str, Write] = {
    "label-studio": write_label_studio,
    "fiftyone": write_fiftyone,
    "cvat": write_cvat,
}
