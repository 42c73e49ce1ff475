"""The rows of a data set: one id, image, label and split for each row.

Every source is read into :class:`Rows`. Images stay encoded, and are read when they are
needed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from uno.data.columns import Column, Ids, Labels
from uno.data.images import Images, as_images
from uno.errors import ConfigError, one_line
from uno.limits import MAX_LABEL_LENGTH, MAX_ROWS
from uno.text import composed, folded

PART_ROWS = 2**16  # rows that are hashed at once
SPLITS = {
    "train": "train",
    "test": "test",
    "val": "test",
    "valid": "test",
    "validation": "test",
}
"""What sources call a split -> "train" or "test"."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The N rows of a data set.

    Making an object raises ConfigError if two ids are equal, if there are more than
    ``MAX_ROWS`` rows, or if the name of a class is longer than ``MAX_LABEL_LENGTH``.

    Attributes:
        ids: The ids, all different.
        images: The images. A list of images, or an array uint8 (N, H, W, 3), is
            wrapped.
        labels: The class of each row. A row without a label is unlabeled.
        is_train: Whether each row is a training row, bool (N,). Other rows are test
            rows.
        source: Name of the source in messages, such as ``folder:photos``.
        class_names: The classes in their order, if the source declares one. Empty
            otherwise.
        known: The known classes, if the source itself declares them, as the splits of
            ImageNet do. Empty otherwise.
        notes: Lines for the user about how the source was read.
        eval_labels: The true class of each row, which only evaluation reads. None if
            the source has no such column.
        warnings: Lines for the user about images or labels that are left out.
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
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Wrap plain images, and check ids, number of rows and class names.

        Raises:
            ConfigError: Two ids are equal, there are more than ``MAX_ROWS`` rows, or
                the name of a class is longer than ``MAX_LABEL_LENGTH``.
        """
        object.__setattr__(self, "images", as_images(self.images))
        assert (
            len(self.ids) == len(self.images) == len(self.labels) == len(self.is_train)
        )
        if (name := self.ids.repeated()) is not None:
            raise ConfigError(
                f"{self.source}: id {one_line(repr(name))} appears more than once; ids"
                " must be unique"
            )
        if len(self) > MAX_ROWS:
            raise ConfigError(
                f"{self.source}: {len(self):,} rows, more than {MAX_ROWS:,}"
            )
        names = (
            *self.labels.classes,
            *(self.eval_labels.classes if self.eval_labels else ()),
        )
        long = max(names, key=len, default="")
        if len(long) > MAX_LABEL_LENGTH:
            text = (
                f"a class's name has {len(long):,} characters, more than"
                f" {MAX_LABEL_LENGTH}: {long[:40]!r}"
            )
            raise ConfigError(f"{self.source}: {text}")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: np.ndarray) -> Rows:
        """Return a data set of only some rows.

        Args:
            index: Row numbers, int64 (M,). The rows are in this order.
        """
        truth = None if self.eval_labels is None else self.eval_labels.pick(index)
        return replace(
            self,
            ids=self.ids.pick(index),
            images=self.images.take(index),
            eval_labels=truth,
            labels=self.labels.pick(index),
            is_train=self.is_train[index],
        )

    def with_composed_names(self) -> Rows:
        """Return the rows with class names in one Unicode normalization (NFC).

        Classes with names that differ in the normalization only become one class. The
        notes of the result name them. They also name classes that differ in upper and
        lower case only, which stay different classes.
        """
        labels = [some for some in (self.labels, self.eval_labels) if some is not None]
        names = dict.fromkeys(
            chain(*(some.classes for some in labels), self.class_names, self.known)
        )
        notes = (*_alike(names, composed, "normalization only: they are one class"),)
        notes += (
            *_alike(map(composed, names), folded, "case only: they stay two classes"),
        )
        if not notes and all(name == composed(name) for name in names):
            return self
        first, *second = (some.renamed(map(composed, some.classes)) for some in labels)
        declared = (
            tuple(dict.fromkeys(map(composed, some)))
            for some in (self.class_names, self.known)
        )
        class_names, known = declared
        return replace(
            self,
            labels=first,
            eval_labels=second[0] if second else None,
            class_names=class_names,
            known=known,
            notes=self.notes + notes,
        )

    @property
    def split(self) -> Labels:
        """The split of each row as a column of N labels, "train" or "test"."""
        return Labels(("test", "train"), self.is_train.view(np.int8))

    @property
    def truth(self) -> Labels:
        """The true class of each row for evaluation.

        It is the value of ``eval_labels`` if there is one, else the label.
        """
        return (
            self.labels
            if self.eval_labels is None
            else self.eval_labels.or_else(self.labels)
        )

    def ids_of(self, rows: np.ndarray) -> pa.Array:
        """Return the ids of some rows int64 (n,), in that order."""
        return pa.array(self.ids.take(rows), pa.string())

    @property
    def times_hash(self) -> str:
        """A SHA-256 of the times of all images, which changes if one is written to."""
        times = self.images.times(np.arange(len(self)))
        return hashlib.sha256(times.tobytes()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 that identifies the data set, 64 hex digits.

        It covers ids, labels, splits and what :meth:`Images.content_keys` returns:
        pixels and bytes of images in memory, but only the sizes of files and of row
        groups of Parquet files. So a data set that was moved keeps its fingerprint. For
        60,000 JPEG files it takes 0.1 s.
        """
        digest, num = hashlib.sha256(), len(self)
        parts = [
            np.arange(i, min(i + PART_ROWS, num)) for i in range(0, num, PART_ROWS)
        ]
        columns: tuple[Column[Any], ...] = (self.ids, self.labels, self.split)
        for number, column in enumerate(columns):  # hashes the JSON of three lists
            digest.update(b", [" if number else b"[[")
            for i, part in enumerate(parts):
                digest.update(b", " if i else b"")
                digest.update(_together(column.json(part), ", "))
            digest.update(b"]")
        digest.update(b"]")
        for part in parts:
            contents = self.images.content_keys(part)
            if isinstance(contents, pa.Array):
                digest.update(_together(_with_sizes(contents), b""))
                continue
            for content in contents:
                digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()


def _together(values: Any, separator: str | bytes) -> Any:
    """Join the values of an Arrow array of text or bytes into one buffer.

    Args:
        values: The Arrow array.
        separator: Stands between two values.
    """
    rows = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
    return pa.compute.binary_join(rows, pa.scalar(separator, values.type))[
        0
    ].as_buffer()


def _with_sizes(contents: Any) -> Any:
    """Prepend its length to each text of an Arrow array.

    Args:
        contents: Arrow array of large strings of less than 256 bytes each.

    Returns:
        An Arrow array of large binaries: 8 bytes of the length (little endian), and the
        text.
    """
    sizes = pa.array([i.to_bytes(8, "little") for i in range(256)], pa.large_binary())
    before = sizes.take(pa.compute.binary_length(contents))
    after = contents.cast(pa.large_binary())
    return pa.compute.binary_join_element_wise(
        before, after, pa.scalar(b"", pa.large_binary())
    )


def _alike(names: Iterable[str], key: Callable[[str], str], what: str) -> Iterator[str]:
    """Yield a line for each group of different class names that have the same key.

    Args:
        names: Names of classes.
        key: Returns the key of a name.
        what: What the names of a group differ in, the end of the line.
    """
    found = defaultdict[str, dict[str, None]](dict)
    for name in names:
        found[key(name)][name] = None
    for some in found.values():
        if len(some) > 1:
            yield f"class names {', '.join(map(ascii, some))} differ in {what}"
