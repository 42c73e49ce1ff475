"""Word the advice for files whose format does not fit a data source.

The module also refuses folders with annotations of objects inside images.
"""

from __future__ import annotations

from collections.abc import Iterable

from uno.data.files import children, join, valid_text
from uno.data.rows import SPLITS
from uno.errors import ConfigError

PHOTOGRAPH = "photographs; save them as JPEG"
VIDEO = "video; take still images"
ARRAY = "an array file; give --data vectors:{path}"
HDF5 = "HDF5; save the matrix with np.save and give --data vectors:FILE.npy"
SPREADSHEET = "a spreadsheet; save it as 'CSV UTF-8'"
PICKLE = (
    "Python objects, which are not opened; save arrays with np.save, tables as Parquet"
)
ANNOTATIONS = (
    "JSON; labels of Label Studio or FiftyOne belong to a source of images:"
    " --data IMAGES --data.labels {path}; otherwise write a table with one line an"
    " image, as CSV with the columns path and label"
)
FIXES = {
    **dict.fromkeys((".heic", ".heif", ".avif", ".dng", ".cr2", ".cr3"), PHOTOGRAPH),
    **dict.fromkeys((".nef", ".arw", ".raf"), PHOTOGRAPH),
    **dict.fromkeys((".mov", ".mp4", ".m4v", ".avi", ".mkv", ".webm", ".3gp"), VIDEO),
    ".npy": ARRAY,
    ".npz": ARRAY,
    ".pt": ARRAY,
    ".pth": ARRAY,
    ".safetensors": (
        "tensors; save the matrix with np.save and give --data vectors:FILE.npy"
    ),
    ".h5ad": "cells of anndata; give --data vectors:{path}",
    **dict.fromkeys((".h5", ".hdf5"), HDF5),
    ".mat": "MATLAB; read it with scipy.io.loadmat and save arrays with np.save",
    **dict.fromkeys((".pkl", ".pickle"), PICKLE),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), SPREADSHEET),
    ".arrow": (
        "Arrow files of datasets.save_to_disk; write them with Dataset.to_parquet"
    ),
    ".feather": "an Arrow table; write it with pyarrow.parquet.write_table",
    ".tfrecord": "TFRecord; write its examples as Parquet or as tar shards",
    **dict.fromkeys(
        (".mdb", ".lmdb"), "LMDB; write its records as Parquet or tar shards"
    ),
    ".rec": "RecordIO; write its records as Parquet or tar shards",
    ".zip": "an archive; unpack it",
    ".rar": "an archive; unpack it",
    ".7z": "an archive; unpack it",
    **dict.fromkeys((".tgz", ".gz", ".bz2", ".xz", ".zst"), "compressed; unpack it"),
    ".json": ANNOTATIONS,
    ".txt": "text; write a table as CSV, with the first line path,label",
}
"""Ending of a file -> what such a file holds and what to do with it.

``{path}`` stands for the path of the file.
"""
COCO_OF_ROBOFLOW = "_annotations.coco.json"
USUAL_BESIDE_IMAGES = (".json", ".npy", ".npz", ".pt", ".pth", ".h5ad", ".gz", ".txt")
"""Endings of files that lie beside images for many reasons."""


def fix_for(path: str) -> str:
    """Return text that says what a file holds, by its ending, and what to do with it.

    The file is not opened.

    Args:
        path: Path or name of the file. Its ending may be in any case of letters.

    Returns:
        Text such as ``video; take still images``. For some endings the advice is a
        command that contains ``path`` as it was given. '' if the ending is not in
        :data:`FIXES`, such as ``.jpg`` or ``.csv``.
    """
    name = path.lower()
    fix = next((fix for suffix, fix in FIXES.items() if name.endswith(suffix)), "")
    return fix.replace("{path}", path)


def meaning_of(suffix: str) -> str:
    """Return what files with an ending hold and what to do with them, for a note.

    The note is on files that are ignored.

    Args:
        suffix: The whole ending with its dot, in lower case.

    Returns:
        Text in parentheses that begins with a space, such as `` (video; take still
        images)``; '' if the ending is not in :data:`FIXES`, or is one that often lies
        beside images (:data:`USUAL_BESIDE_IMAGES`), such as ``.json``.
    """
    fix = "" if suffix in USUAL_BESIDE_IMAGES else FIXES.get(suffix, "")
    return f" ({fix})" if fix else ""


def hint_of_files(names: Iterable[str]) -> str:
    """Return the end of an error line that names one file of another format.

    Args:
        names: Names or paths of files that are there instead of the files that were
            looked for. No file is opened.

    Returns:
        ``; NAME is there: ADVICE`` for the first name, in the given order, whose ending
        is in :data:`FIXES`. NAME is the name as it was given, with escapes for bytes
        that are not UTF-8. ADVICE is the text of :func:`fix_for`: what the file holds
        and what to do with it. The result is '' if there is no such name.
    """
    for name in names:
        if fix := fix_for(name):
            return f"; {valid_text(name)} is there: {fix}"
    return ""


def refuse_annotations(root: str) -> None:
    """Raise an error if a folder has the layout of COCO, YOLO or Pascal VOC.

    Their annotations are boxes around objects, not one class for an image. Only names
    of files and folders are looked at, in the folder itself, in its subfolders train,
    test, val, valid and validation, and in its subfolder annotations. No file is
    opened.

    Args:
        root: Path or URI of the folder.

    Raises:
        ConfigError: ``root`` or a subfolder of a split has a file
            ``_annotations.coco.json``, both folders ``images`` and ``labels``, or both
            folders ``JPEGImages`` and ``Annotations``; or the folder ``annotations`` in
            ``root`` has a file whose name begins with ``instances``. The message names
            the layout, and advises to crop the boxes. Also if a folder cannot be
            listed, or ``root`` is local and does not exist.
    """
    top, _ = children(root)
    kind = ""
    for place in (root, *(join(root, name) for name in top if name in SPLITS)):
        folders, files = children(place)
        if COCO_OF_ROBOFLOW in files:
            kind = "COCO"
        elif {"images", "labels"} <= {*folders}:
            kind = "YOLO"
        elif {"JPEGImages", "Annotations"} <= {*folders}:
            kind = "Pascal VOC"
    if "annotations" in top:
        _, files = children(join(root, "annotations"))
        if any(name.startswith("instances") for name in files):
            kind = "COCO"
    if kind:
        raise ConfigError(
            f"{root} has boxes around objects ({kind}), and classes are discovered for"
            " whole images; crop the boxes, as FiftyOne does: import the folder and"
            " export it as fiftyone.types.ImageClassificationDirectoryTree"
        )
