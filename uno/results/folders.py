"""Predictions without Parquet: ``predictions.csv``, and a copy of every image in its class's folder."""

import json
import re
from collections.abc import Callable
from io import BytesIO

import numpy as np
import pyarrow.csv
from PIL import Image as Pillow

from uno.data.decode import read_header
from uno.data.files import Storage, read_bytes
from uno.data.rows import Image, Rows, fetch
from uno.errors import ConfigError, StorageError
from uno.limits import MAX_IMAGE_BYTES
from uno.results.classes import REJECTED
from uno.results.predictions import COLUMNS, read_columns, read_identity

CSV_FILE = "predictions.csv"
FOLDER = "by_class"
MARK = f"{FOLDER}/made_from.json"
GROUP = 64  # images read at a time


def write_csv(storage: Storage) -> str:
    """``predictions.parquet`` as CSV, without embeddings; returns its path."""
    for name in storage.list():
        if name.startswith(f".{CSV_FILE}."):  # what a killed process was writing
            storage.delete(name)
    with storage.create(CSV_FILE) as stream:
        pyarrow.csv.write_csv(read_columns(storage, [*COLUMNS]), stream)
    return storage.path(CSV_FILE)


def sort_images(storage: Storage, rows: Rows, on_progress: Callable[[int, int], None]) -> str:
    """Copy the images of ``rows`` to ``by_class/INDEX-NAME/``, rejected ones to ``by_class/rejected/``, as
    ``predictions.parquet`` has them; unreadable ones are left out. Names keep letters, digits and ``.-_``.
    Returns the folder's path. The same again goes on. ConfigError: the folder is another's, or of other
    predictions.
    """
    identity = json.dumps(read_identity(storage), sort_keys=True).encode()
    begun = storage.exists(MARK) and storage.read(MARK) == identity
    killed = f".{MARK.rpartition('/')[2]}."  # while it was begun
    if not begun and any(not name.startswith(killed) for name in storage.list(FOLDER)):
        advice = "move it away, or choose another --output"
        raise ConfigError(f"{storage.path(FOLDER)} is not of these predictions; {advice}")
    storage.write(MARK, identity)
    for name in storage.unfinished(FOLDER):
        storage.delete(name)
    table = read_columns(storage, ["class_index", "class_name", "kind"])
    assert table is not None
    names, kinds, used = table["class_name"].to_pylist(), table["kind"].to_pylist(), set[str]()
    index = table["class_index"].fill_null(-1).to_numpy()
    readable = np.flatnonzero(index >= 0)
    for start in range(0, len(readable), GROUP):
        group = readable[start : start + GROUP]
        for row, image in zip(group.tolist(), fetch(rows.images, group), strict=True):
            data, suffix = _encoded(image)
            stem = _safe(rows.ids[row].rpartition("/")[2])
            stem = stem if "." in stem else stem + suffix
            place = REJECTED if kinds[row] == REJECTED else f"{index[row]:03d}-{_safe(names[row])}"
            folder = f"{FOLDER}/{place}"
            name = f"{folder}/{stem}"
            if name.casefold() in used:
                name = f"{folder}/{row}-{stem}"
            used.add(name.casefold())
            storage.write(name, data)
        on_progress(start + len(group), len(readable))
    return storage.path(FOLDER)


def _safe(name: str) -> str:
    """A part of a path that means nothing to any file system or shell."""
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)[-80:].lstrip(".-") or "_"


def _encoded(image: Image) -> tuple[bytes, str]:
    """The content of an image's file, as it is, and the suffix for one without a name."""
    if isinstance(image, str):
        try:
            return read_bytes(image, MAX_IMAGE_BYTES), ""
        except OSError as error:
            raise StorageError(f"cannot copy {image}: {error.strerror}") from None
    if isinstance(image, bytes):
        return image, f".{read_header(image)[0].lower()}"
    buffer = BytesIO()
    Pillow.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue(), ".png"
