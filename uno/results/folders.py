"""Write predictions for people: as a CSV file, and as copies of the images by class."""

import codecs
import os
import re
from collections.abc import Callable
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
from PIL import Image as Pillow

from uno.data import output
from uno.data.decode import BadImage, read_header
from uno.data.files import Storage, read_bytes, split
from uno.data.images import Image, is_image
from uno.data.rows import Rows
from uno.errors import ConfigError, StorageError, one_line
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

    All columns but the embedding are written, for readable and unreadable rows, below a
    line of their names. A missing value is an empty cell. The file begins with a byte
    order mark, by which Excel recognizes UTF-8. Text that a spreadsheet would take for
    a formula has an apostrophe in front. A file of this name is replaced, and temporary
    files that killed writers of it left are deleted.

    Args:
        storage: The directory above the folder ``predictions``: a run, or the output
            directory of ``uno predict``. The predictions must be complete.
        target: The directory of the file.

    Returns:
        The path or URI of the file.

    Raises:
        StorageError: A file of the predictions is missing or damaged, or the CSV file
            cannot be written.
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
    """Return a column with an apostrophe in front of texts that look like formulas.

    These texts begin with ``=``, ``+``, ``-``, ``@``, a tab or a line end. Nulls stay
    null. A column that is not of strings is returned unchanged.
    """
    if not pa.types.is_string(column.type):
        return column
    return pyarrow.compute.replace_substring_regex(column, FORMULA, r"'\1")


def sort_images(
    storage: Storage, data: Rows, on_progress: Callable[[int, int], None]
) -> str:
    """Copy the images to ``by_class/INDEX-NAME/``, by their predictions.

    INDEX is the index of the predicted class with at least three digits, and NAME is
    its name. Images of dropped classes go to ``by_class/rejected/``. Rows that could
    not be read in the prediction are left out. Encoded images are copied unchanged, and
    images that are arrays of pixels become PNG files.

    A copy is named by the last part of the row's id. If that does not end like an
    image, the suffix of the image's file or format is added. If another copy in the
    folder has the name, also in another case, the row number is put in front. Before
    that, each run of characters other than ASCII letters, digits and ``._-`` in NAME
    and in the name of a file becomes one ``_``, and only the last 80 characters are
    kept, without ``.`` and ``-`` at their beginning.

    ``by_class/made_from.json`` says which predictions the images belong to. A repeated
    call writes the same files. Temporary files that killed processes left in
    ``by_class`` are deleted.

    Args:
        storage: The directory above the folder ``predictions``: a run, or the output
            directory of ``uno predict``. The predictions must be complete. ``by_class``
            is written beside the folder ``predictions``.
        data: The rows that were predicted, in the same order. They must have pictures:
            images, or vectors that name them.
        on_progress: Called after each image as ``on_progress(copied, total)`` with the
            number of copied images and the number of all rows, unreadable ones
            included; and at the end as ``on_progress(total, total)``.

    Returns:
        The path or URI of ``by_class``.

    Raises:
        ConfigError: ``by_class`` holds the images of other predictions, or files
            without ``made_from.json``; a file that holds many images, such as a tar
            shard, cannot be read; the picture of a vector is given by a path, and a
            readable row has none; a picture has too many bytes; or the bytes of a
            picture that is stored inside a table or archive are empty or not of an
            image that :mod:`uno.data.decode` accepts, by their header. The content of
            an image file is not checked.
        StorageError: The file of an image can no longer be read, or is missing; a file
            of the predictions is missing or damaged; or a copy cannot be written.
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
            try:
                content, suffix = _encode(image)
            except BadImage as error:  # vectors may name pictures that are not there
                raise ConfigError(
                    f"the picture of {prediction['id']} cannot be copied: {error};"
                    " correct the column of pictures, or predict without --folders"
                ) from None
            stem = _safe(prediction["id"].rpartition("/")[2])
            has_suffix = is_image(stem) or stem.endswith(suffix)
            stem = stem if has_suffix else _safe(stem + suffix)
            name = f"{FOLDER}/{folder}/{stem}"
            while name.casefold() in used:
                stem = f"{row}-{stem}"
                name = f"{FOLDER}/{folder}/{stem}"
            used.add(name.casefold())
            storage.write(name, content)
            on_progress(len(used), len(data))
        start += len(batch)
    on_progress(len(data), len(data))
    return storage.below(FOLDER)


def _safe(name: str) -> str:
    """Return a name in which only ASCII letters, digits and ``._-`` are left.

    Each run of other characters becomes one ``_``. Only the last 80 characters are
    kept, and then ``.`` and ``-`` at the beginning are removed. If nothing is left, the
    result is ``_``.
    """
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)[-80:].lstrip(".-") or "_"


def _encode(image: Image) -> tuple[bytes, str]:
    """Return the content of an image file, and a suffix for a file without one.

    Args:
        image: The path or URI of an image file, which is read; the bytes of an image
            file; or pixels uint8 (H, W, 3), which are encoded as PNG.

    Returns:
        The encoded image, unchanged if ``image`` is a path, a URI or bytes. The suffix
        is that of the name for a path or URI, the format such as ".jpeg" for bytes, and
        ".png" for pixels.

    Raises:
        StorageError: The image file cannot be read.
        BadImage: The path is empty; the bytes do not begin with the header of an image
            of a known format, or this says that it has too many pixels; or the file or
            the bytes are larger than an image may be.
    """
    if isinstance(image, str):
        if not image:
            raise BadImage("it has no path")
        try:
            content = read_bytes(image, MAX_IMAGE_BYTES)
        except OSError as error:
            why = one_line(error.strerror or error)
            raise StorageError(f"cannot copy {image}: {why}") from None
        if len(content) > MAX_IMAGE_BYTES:
            raise BadImage(f"more than {MAX_IMAGE_BYTES:,} bytes")
        return content, os.path.splitext(split(image)[1])[1]
    if isinstance(image, bytes):
        return image, f".{read_header(image).format.lower()}"
    buffer = BytesIO()
    Pillow.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue(), ".png"
