"""Write predictions for people: as a CSV file, and as copies of the images by class."""

import codecs
import re
from collections.abc import Callable
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
from PIL import Image as Pillow

from uno.data import output
from uno.data.decode import read_header
from uno.data.files import Storage, read_bytes
from uno.data.images import Image
from uno.data.rows import Rows
from uno.errors import StorageError
from uno.limits import MAX_IMAGE_BYTES
from uno.results.classes import REJECTED
from uno.results.predictions import COLUMNS, read_batches, read_identity

CSV_FILE = "predictions.csv"
FOLDER = "by_class"
FORMULA = r"^([=+\-@\t\r\n])"  # how a formula begins, in Excel and LibreOffice
MARK = f"{FOLDER}/made_from.json"
GROUP = 64  # images that are read at a time


def write_csv(storage: Storage, target: Storage) -> str:
    """Write the predictions as ``predictions.csv`` for spreadsheets.

    All columns but the embedding are written. The file begins with a byte order mark,
    by which Excel recognizes UTF-8. Text that a spreadsheet would take for a formula
    has an apostrophe in front.

    Args:
        storage: The directory with the predictions.
        target: The directory of the file.

    Returns:
        The path of the file.
    """
    output.delete_temporary_files_of(target, CSV_FILE)
    schema = pa.schema(COLUMNS)
    with target.create(CSV_FILE) as stream:
        stream.write(codecs.BOM_UTF8)
        with pyarrow.csv.CSVWriter(stream, schema) as writer:
            for batch in read_batches(storage, [*COLUMNS]):
                columns = [_without_formulas(column) for column in batch.columns]
                writer.write_batch(pa.record_batch(columns, schema=schema))
    return target.below(CSV_FILE)


def _without_formulas(column: pa.Array) -> pa.Array:
    """Put an apostrophe in front of texts that a spreadsheet would take for formulas.

    These begin with ``=``, ``+``, ``-``, ``@``, a tab or a line end. A column of
    another type is returned unchanged.
    """
    if not pa.types.is_string(column.type):
        return column
    return pyarrow.compute.replace_substring_regex(column, FORMULA, r"'\1")


def sort_images(
    storage: Storage, data: Rows, on_progress: Callable[[int, int], None]
) -> str:
    """Copy the images to ``by_class/INDEX-NAME/``, by their predictions.

    Images of dropped classes go to ``by_class/rejected/``. Images that could not be
    read are left out. In the names of folders and files all characters except ASCII
    letters, digits and ``._-`` become ``_``. A repeated call writes the same files.

    Args:
        storage: The directory with the predictions.
        data: The rows that were predicted, in the same order. They must have pictures:
            images, or vectors that name them.
        on_progress: Called as ``on_progress(copied, total)`` with the number of copied
            images and the number of all rows, after each image and at the end.

    Returns:
        The path of ``by_class``.

    Raises:
        ConfigError: ``by_class`` holds the images of other predictions.
        StorageError: An image can no longer be read.
    """
    output.claim_directory(
        storage, MARK, read_identity(storage) or {}, "folder of sorted images"
    )
    output.delete_temporary_files(storage, FOLDER)
    pictures, used, start = data.images.pictures(), set[str](), 0
    assert pictures is not None
    for batch in read_batches(storage, ["id", "class_index", "class_name", "kind"]):
        readable = np.flatnonzero(batch["class_index"].is_valid())
        rows = start + readable
        images = (
            image
            for group in pictures.take(rows).split(GROUP)
            for image in group.read_images(np.arange(len(group)))
        )
        predicted = batch.take(pa.array(readable)).to_pylist()
        for row, prediction, image in zip(rows, predicted, images, strict=True):
            folder = (
                f"{prediction['class_index']:03d}-{_safe(prediction['class_name'])}"
            )
            if prediction["kind"] == REJECTED:
                folder = REJECTED
            content, suffix = _encode(image)
            stem = _safe(prediction["id"].rpartition("/")[2])
            stem = stem if "." in stem else stem + suffix
            name = f"{FOLDER}/{folder}/{stem}"
            if name.casefold() in used:
                name = f"{FOLDER}/{folder}/{row}-{stem}"
            used.add(name.casefold())
            storage.write(name, content)
            on_progress(len(used), len(data))
        start += len(batch)
    on_progress(len(data), len(data))
    return storage.below(FOLDER)


def _safe(name: str) -> str:
    """Return a name in which only ASCII letters, digits and ``._-`` are left.

    Other characters become ``_``. Only the last 80 characters are kept, and the name
    does not begin with ``.`` or ``-``. An empty name becomes ``_``.
    """
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)[-80:].lstrip(".-") or "_"


def _encode(image: Image) -> tuple[bytes, str]:
    """Return the content of an image file, and a suffix for a file without one.

    Args:
        image: The path or URI of an image file, which is read; the bytes of an image
            file; or pixels uint8 (H, W, 3), which are encoded as PNG.

    Raises:
        StorageError: The image file cannot be read.
    """
    if isinstance(image, str):
        try:
            return read_bytes(image, MAX_IMAGE_BYTES), ""
        except OSError as error:
            raise StorageError(f"cannot copy {image}: {error.strerror}") from None
    if isinstance(image, bytes):
        return image, f".{read_header(image).format.lower()}"
    buffer = BytesIO()
    Pillow.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue(), ".png"
