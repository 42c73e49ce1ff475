"""The table every source becomes: one id, image, label and split per row. Images stay encoded and lazy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from uno.data.columns import ROWS_AT_ONCE, Ids, Labels
from uno.data.files import full_path
from uno.data.kept import Kept
from uno.errors import ConfigError, one_line
from uno.limits import MAX_LABEL_LENGTH, MAX_ROWS

Image = bytes | str | np.ndarray
"""Encoded bytes, a path or URI, or uint8 pixels (H,W,3)."""
Images = Any
"""What has a length and an Image for each row number: a list, an array (N,H,W,3), or a class below. A method
``facts(rows)``, where it has one, tells the content of rows apart without reading it."""
SPLITS = {"train": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}
"""What sources call their splits -> ours."""


@dataclass(frozen=True, eq=False)
class Files:
    """Paths and URIs as bytes in one Arrow column, which processes share; sizes int64 (N,), -1: not known."""

    column: Any
    sizes: np.ndarray

    @classmethod
    def of(cls, paths: Sequence[str], sizes: Sequence[int]) -> Files:
        """Local paths become absolute; '' stays, a file that is not there."""
        full = [os.fsencode(path and full_path(path)) for path in paths]
        return cls(pa.array(full, pa.large_binary()), np.array(sizes, dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Files]) -> Files:
        """One after the other."""
        return cls(pa.concat_arrays([p.column for p in parts]), np.concatenate([p.sizes for p in parts]))

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> str:
        return os.fsdecode(self.column[int(row)].as_py())

    def facts(self, rows: np.ndarray) -> Iterator[bytes]:
        """Sizes: a moved data set is the same one."""
        return (str(size).encode() for size in self.sizes[rows].tolist())


@dataclass(frozen=True, eq=False)
class Encoded:
    """A binary Arrow column; a row becomes Python bytes when read. ``paths`` serves rows without bytes."""

    column: Any
    paths: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> bytes | str:
        row = int(row)
        return self.paths[row] if row in self.paths else self.column[row].as_py() or b""


@dataclass(frozen=True, eq=False)
class Chosen:
    """Some rows of other images, in the order of ``index`` int64 (N,); nothing is copied."""

    images: Images
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Image:
        return self.images[int(self.index[row])]


def fetch(images: Images, rows: np.ndarray) -> list[Image]:
    """The images of ``rows`` int64 (n,), in that order; of Parquet files every row group is read once."""
    many = getattr(images, "fetch", None)
    return list(many(rows) if many else map(images.__getitem__, rows.tolist()))


def base(images: Images, rows: np.ndarray) -> tuple[Images, np.ndarray]:
    """The images that ``rows`` int64 (n,) are chosen from in the end, and their row numbers there."""
    while isinstance(images, Chosen):
        rows, images = images.index[rows], images.images
    return images, rows


@dataclass(frozen=True, eq=False)
class Decoded:
    """Decoded images, uint8 ``pixels`` (N,3,S,S); one with a reason against it is as it was in ``source``."""

    source: Images
    pixels: Kept
    reasons: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> Image:
        if self.reasons[row] is not None:
            return self.source[row]
        return self.pixels.row(row).numpy().transpose(1, 2, 0)

    def facts(self, rows: np.ndarray) -> Iterator[bytes]:
        """Those of the source: decoding does not make another data set of it."""
        return _contents(self.source, rows)


@dataclass(frozen=True, eq=False)
class Featured:
    """Images as in ``source``, whose ``features`` (N,D) under the run's frozen encoder are known, but of one
    with a reason against it.
    """

    source: Images
    features: Any
    reasons: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, row: int) -> Image:
        return self.source[row]

    def facts(self, rows: np.ndarray) -> Iterator[bytes]:
        """Those of the source."""
        return _contents(self.source, rows)


class Part(NamedTuple):
    """A partition: numbers of its rows int64 (n,), in order; their ids and images, which travel with it, or
    none, where any node can read them.
    """

    rows: np.ndarray
    ids: Any = None
    images: Images | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """N rows with different ids. A row without a label is unlabeled. ``is_train`` bool (N,): others test.

    ``class_names``: the order of classes where the source declares one (numeric ids). ``known``: the known
    classes where the source itself says so (ImageNet splits). ``notes`` are lines for the user.
    ``eval_labels``: true classes for evaluation only, where the source has them.
    """

    ids: Ids
    images: Images
    labels: Labels
    is_train: np.ndarray
    source: str
    class_names: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    eval_labels: Labels | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.images) == len(self.labels) == len(self.is_train)
        if (name := self.ids.repeated()) is not None:
            raise ConfigError(
                f"{self.source}: id {one_line(repr(name))} appears more than once; ids must be unique"
            )
        if len(self) > MAX_ROWS:
            raise ConfigError(f"{self.source}: {len(self):,} rows, more than {MAX_ROWS:,}")
        names = (*self.labels.classes, *(self.eval_labels.classes if self.eval_labels else ()))
        long = max(names, key=len, default="")
        if len(long) > MAX_LABEL_LENGTH:
            text = f"a class's name has {len(long):,} characters, more than {MAX_LABEL_LENGTH}: {long[:40]!r}"
            raise ConfigError(f"{self.source}: {text}")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: np.ndarray) -> Rows:
        """The rows ``index`` int64 (M,), in that order."""
        truth = None if self.eval_labels is None else self.eval_labels.pick(index)
        return replace(
            self, ids=self.ids.pick(index), images=Chosen(self.images, index), eval_labels=truth,
            labels=self.labels.pick(index), is_train=self.is_train[index],
        )  # fmt: skip

    @property
    def split(self) -> Labels:
        """'train' or 'test' of every row."""
        return Labels(("test", "train"), self.is_train.view(np.int8))

    @property
    def truth(self) -> Labels:
        """What evaluation takes for each row's true class: ``eval_labels`` where given, else the label."""
        return self.labels if self.eval_labels is None else self.eval_labels.or_else(self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of ids, labels, splits and content (pixels, bytes; sizes of files and of the row groups of
        Parquet files), 64 hex digits. A moved data set keeps it. 0.1 s for 60,000 JPEGs of 32 px.
        """
        digest = hashlib.sha256()
        parts = [range(i, min(i + ROWS_AT_ONCE, len(self))) for i in range(0, len(self), ROWS_AT_ONCE)]
        columns: tuple[Sequence[str | None], ...] = (self.ids, self.labels, self.split)
        for number, column in enumerate(columns):  # as JSON of the three lists
            digest.update(b", [" if number else b"[[")
            for part in parts:
                text = json.dumps(column[part.start : part.stop])[1:-1]
                digest.update(f"{', ' if part.start else ''}{text}".encode())
            digest.update(b"]")
        digest.update(b"]")
        for part in parts:
            for content in _contents(self.images, np.array(part)):
                digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()


def _contents(images: Images, rows: np.ndarray) -> Iterator[bytes]:
    images, index = base(images, rows)
    facts = getattr(images, "facts", None)
    return facts(index) if facts else (content_of(images[i]) for i in index.tolist())


def content_of(image: Image) -> bytes:
    """What tells images apart: pixels and their shape, bytes, or a path."""
    if isinstance(image, np.ndarray):
        return str(image.shape).encode() + image.tobytes()
    return os.fsencode(image)
