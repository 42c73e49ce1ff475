"""What the user names -> Rows: ``digits``, ``cifar10:DIR``, ``folder:DIR``, or a path and its content."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable

import numpy as np

from uno.config import DataConfig
from uno.data import files as filesystem
from uno.data.cifar import CIFAR10, CIFAR100, read_cifar
from uno.data.folders import is_wnid, read_folder, read_imagenet, read_images, read_two_folders
from uno.data.rows import Rows
from uno.data.tables import read_parquet, read_table
from uno.errors import ConfigError

Reader = Callable[[str, DataConfig], Rows]

READERS: dict[str, Reader] = {
    "cifar10": lambda path, config: read_cifar(CIFAR10, path, config.download),
    "cifar100": lambda path, config: read_cifar(CIFAR100, path, config.download),
    "imagenet": lambda path, config: read_imagenet(path, config.imagenet_split, config.known_classes is None),
    "folder": lambda path, config: read_folder(path),
    "parquet": lambda path, config: read_parquet(path, lazy=config.ingest == "streaming"),
    "table": lambda path, config: read_table(path),
}
INPUT_READERS: dict[str, Reader] = READERS | {
    "imagenet": lambda path, config: read_images(path),
    "folder": lambda path, config: read_images(path),
    "parquet": lambda path, config: read_parquet(path, images_only=True),
    "table": lambda path, config: read_table(path, images_only=True),
}
"""How to read what is only to be predicted: labels, class folders and splits mean nothing there."""


def read_rows(config: DataConfig) -> Rows:
    """The rows of ``config.source``, or of the two folders ``labeled`` and ``unlabeled`` where given.

    Raises:
        ConfigError: anything wrong with the source, in one line that names the path or field.
    """
    return _read(config, READERS)


def read_inputs(config: DataConfig) -> Rows:
    """The rows of a source to predict: every image of a folder, every row of a table, labeled or not.

    Raises:
        ConfigError: the source is missing or cannot be read.
    """
    return _read(config, INPUT_READERS)


def _read(config: DataConfig, readers: dict[str, Reader]) -> Rows:
    if config.labeled is not None and config.unlabeled is not None:
        return read_two_folders(filesystem.normal(config.labeled), filesystem.normal(config.unlabeled))
    source = config.source.strip()
    if source == "digits":
        return read_digits()
    prefix, path = _split_prefix(source)
    path = filesystem.normal(path)
    if filesystem.kind(path) == "missing" and not (config.download and prefix in ("cifar10", "cifar100")):
        raise ConfigError(f"data source {source!r}: no such file or folder {path!r}{_hint(source)}")
    return readers[prefix or recognise(path)](path, config)


def recognise(path: str) -> str:
    """Name of the reader for an existing file or folder, by its content.

    Raises:
        ConfigError: nothing known, or more than one data set.
    """
    if filesystem.kind(path) == "file":
        suffix = os.path.splitext(filesystem.split(path)[1])[1].lower()
        names = {".parquet": "parquet", ".csv": "table", ".jsonl": "table"}
        if suffix not in names:
            raise ConfigError(f"{path}: a file source must end in .parquet, .csv or .jsonl")
        return names[suffix]
    folders, files = filesystem.children(path)
    cifar = [c.prefix for c in (CIFAR10, CIFAR100) if c.folder in folders or set(c.files) <= set(files)]
    if len(cifar) > 1:
        raise ConfigError(f"{path} holds CIFAR10 and CIFAR100; say which: cifar10:{path} or cifar100:{path}")
    if cifar:
        return cifar[0]
    if any(name.endswith(".parquet") for name in files):
        return "parquet"
    train = filesystem.children(filesystem.join(path, "train"))[0] if "train" in folders else []
    if train and all(is_wnid(name) for name in train):
        return "imagenet"
    if not train and any(f.relative.endswith(".parquet") for f in filesystem.walk(path)):
        return "parquet"
    return "folder"


def read_digits() -> Rows:
    """scikit-learn's 1,797 handwritten digits as uint8 (8,8,3); every fifth of a class is a test row."""
    from sklearn.datasets import load_digits  # imported here: it takes a second

    digits = load_digits()
    grey = np.round(digits.images * 255 / 16).astype(np.uint8)
    split = np.full(len(grey), "train")
    for value in range(10):
        split[np.flatnonzero(digits.target == value)[4::5]] = "test"
    return Rows(
        ids=[f"digits-{i:04d}" for i in range(len(grey))],
        images=np.repeat(grey[..., None], 3, axis=3),
        labels=[str(value) for value in digits.target],
        split=split,
        source="digits",
    )


def _split_prefix(source: str) -> tuple[str | None, str]:
    match = re.match(r"([A-Za-z][\w-]*):(?!//)(.*)", source, re.DOTALL)
    if not match or os.path.exists(source):
        return None, source
    prefix, path = match.groups()
    if prefix not in READERS:
        near = difflib.get_close_matches(prefix.lower(), READERS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}:{path}?" if near else f"known are digits, {':, '.join(READERS)}:"
        raise ConfigError(f"unknown data source {prefix + ':'!r}; {hint}")
    return prefix, path


def _hint(source: str) -> str:
    near = difflib.get_close_matches(source.lower(), ["digits", *READERS], n=1, cutoff=0.6)
    return f"; did you mean {near[0] + ('' if near[0] == 'digits' else ':DIR')!r}?" if near else ""
