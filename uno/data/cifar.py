"""Read CIFAR10 and CIFAR100 as their makers publish them, with torchvision.

The files are pickles, and loading a pickle can run code. A file is loaded only if its
MD5 checksum is the one that torchvision lists for it.
"""

import hashlib
import os
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from uno.data import files as filesystem
from uno.data.columns import make_ids
from uno.data.images import InMemory
from uno.data.rows import ReadOptions, Rows
from uno.errors import ConfigError, one_line
from uno.limits import MAX_CIFAR_BYTES


class Layout(NamedTuple):
    """Names by which an unpacked archive is recognized without torchvision.

    Attributes:
        folder: Folder that the archive unpacks to.
        meta: File in it with the class names.
        images: First file in it with training images.
    """

    folder: str
    meta: str
    images: str


LAYOUTS = {
    "cifar10": Layout("cifar-10-batches-py", "batches.meta", "data_batch_1"),
    "cifar100": Layout("cifar-100-python", "meta", "train"),
}


def recognize_cifar(folders: list[str], files: list[str]) -> list[str]:
    """Return which of CIFAR10 and CIFAR100 a folder seems to hold, by names alone.

    It holds a data set if the folder of the unpacked archive is in it, or if it is that
    folder: then it has the file of class names and the first file of images.

    Args:
        folders: Names of the folders directly in the folder.
        files: Names of the files directly in the folder.

    Returns:
        A list of 'cifar10', 'cifar100', both or none. No file is opened.
    """
    return [
        name
        for name, layout in LAYOUTS.items()
        if layout.folder in folders or {layout.meta, layout.images} <= set(files)
    ]


def read_cifar(path: str, options: ReadOptions, *, name: str) -> Rows:
    """Read CIFAR10 or CIFAR100.

    The rows are in the order of torchvision's lists of files, training files first.
    Their ids are ``FILE#NUMBER``, such as ``test_batch#17``, where the rows of each
    file are numbered from 0.

    Args:
        path: Folder or URI of the unpacked archive, or of the folder that contains it.
        options: How the source is read. Only ``download`` is used: it allows to
            download and unpack the archive into ``path``, a local folder, if the folder
            of the unpacked archive is missing.
        name: 'cifar10' or 'cifar100'.

    Returns:
        Rows with RGB images uint8 (N, 32, 32, 3) in memory, a label for each row (the
        fine label of CIFAR100), and the classes in the order of their numbers. The
        published training set are training rows, and the test set are test rows.

    Raises:
        ConfigError: The data set is missing, cannot be read or downloaded, or one of
            its files is not the published one.
    """
    train, test = _read_published(
        name, _find_archive_folder(name, path, options.download)
    )
    ids = list[str]()
    for split, published in ((train, train.train_list), (test, test.test_list)):
        # the published files of a split have equally many rows
        num_rows = len(split) // len(published)
        ids += [f"{file}#{row}" for file, _ in published for row in range(num_rows)]
    images = np.ascontiguousarray(np.concatenate([train.data, test.data]))
    codes = np.array([*train.targets, *test.targets], np.int32)
    return Rows(
        make_ids(ids),
        InMemory(images),
        pa.DictionaryArray.from_arrays(
            codes, pa.array(train.classes, pa.large_string())
        ),
        np.arange(len(images)) < len(train),
        f"{name}:{path}",
        tuple(train.classes),
    )


def _torchvision_class(name: str) -> Any:
    """Return torchvision's data set class, which lists its files and their checksums.

    Nothing is read or downloaded.

    Args:
        name: "cifar10" or "cifar100".
    """
    from torchvision import datasets  # slow to import

    return {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]


def _read_published(name: str, root: str) -> list[Any]:
    """Read training and test set of CIFAR, if all files are those of the makers.

    The checked bytes are copied to a private folder that torchvision reads. So nobody
    can change a file after its check, and ``root`` may be in remote storage.

    Args:
        name: 'cifar10' or 'cifar100'.
        root: Folder or URI of the unpacked archive.

    Returns:
        Two data sets of torchvision, for training and for test. Their images are in
        memory, and the private folder is deleted.

    Raises:
        ConfigError: A file cannot be read or copied, or is not the published one.
    """
    published = _torchvision_class(name)
    meta = published.meta["filename"], published.meta["md5"]
    with TemporaryDirectory(prefix="uno-") as private:
        copies = Path(private, published.base_folder)
        copies.mkdir()
        for file, md5 in (meta, *published.train_list, *published.test_list):
            path = filesystem.join(root, file)
            data = filesystem.read_whole(path, MAX_CIFAR_BYTES)
            if hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
                raise ConfigError(
                    f"{path} is not the file that its makers publish; remove its folder"
                    " and download it again (--data.download)"
                )
            with filesystem.wrap_errors(ConfigError, f"copy {path} to {gettempdir()}"):
                (copies / file).write_bytes(data)
        with warnings.catch_warnings():
            # the files store a flag as a number, which numpy deprecates
            warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
            return [published(private, train=train) for train in (True, False)]


def _find_archive_folder(name: str, path: str, download: bool) -> str:
    """Return the folder of the unpacked archive, downloaded if that is allowed.

    It is ``path`` itself if that has the file of class names, else the folder of the
    archive in ``path``.

    Args:
        name: 'cifar10' or 'cifar100'.
        path: Folder or URI of the unpacked archive, or of the folder that contains it.
        download: Whether to download the archive if the folder is missing.

    Raises:
        ConfigError: The folder is missing, and may not be downloaded or cannot be,
            because the download fails or ``path`` is a URI; or the storage cannot be
            reached.
    """
    layout = LAYOUTS[name]
    if filesystem.kind(filesystem.join(path, layout.meta)) == "file":
        return path
    root = filesystem.join(path, layout.folder)
    if filesystem.kind(root) == "missing" and download:
        _download(name, path)
    if filesystem.kind(root) == "missing":
        fix = "unpack the archive, or allow the download with --data.download"
        raise ConfigError(f"{name}:{path}: no folder {layout.folder} there; {fix}")
    return root


def _download(name: str, path: str) -> None:
    """Download an archive, check its checksum and unpack it below ``path``.

    An archive in ``path`` with the right checksum is not downloaded again. The archive
    is unpacked in a temporary folder in ``path``; the unpacked folder is then moved
    into ``path``, and a downloaded archive is deleted. If another process has unpacked
    the archive meanwhile, that folder is kept.

    Args:
        name: 'cifar10' or 'cifar100'.
        path: Local folder, which is created if it is missing.

    Raises:
        ConfigError: ``path`` is a URI, or the archive cannot be downloaded or unpacked.
    """
    from torchvision.datasets.utils import check_integrity, download_and_extract_archive

    if filesystem.is_uri(path):
        raise ConfigError(f"{name}:{path}: the download needs a local folder")
    published = _torchvision_class(name)
    archive, md5 = published.filename, published.tgz_md5
    root = os.path.join(path, published.base_folder)
    try:
        os.makedirs(path, exist_ok=True)
        with TemporaryDirectory(prefix=".uno-", dir=path) as own:
            is_there = check_integrity(os.path.join(path, archive), md5)
            download_and_extract_archive(
                published.url, path if is_there else own, own, archive, md5
            )
            try:
                os.rename(os.path.join(own, published.base_folder), root)
            except OSError:
                if filesystem.kind(root) == "missing":
                    raise
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"cannot download {published.url} to {path}: {one_line(error)}"
        ) from None
