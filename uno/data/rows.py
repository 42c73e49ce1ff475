"""The table every source becomes: one id, image, label and split per row. Images
stay encoded and lazy.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from uno.data.columns import Column, Ids, Labels
from uno.data.images import Images, as_images
from uno.errors import ConfigError, one_line
from uno.limits import MAX_LABEL_LENGTH, MAX_ROWS
from uno.text import composed, folded

PART_ROWS = 2**16  # that are hashed at once
SPLITS = {
    "train": "train",
    "test": "test",
    "val": "test",
    "valid": "test",
    "validation": "test",
}
"""What sources call their splits -> ours."""


class Partition(NamedTuple):
    """Numbers of its rows int64 (n,), in order; ids and images, unless any node can
    read them.
    """

    rows: np.ndarray
    ids: Any = None
    images: Images | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """N rows with different ids. A row without a label is unlabeled. ``is_train`` bool
    (N,): others test.

    ``class_names``: the order of classes where the source declares one (numeric ids).
    ``known``: the known classes where the source itself says so (ImageNet splits).
    ``notes`` are lines for the user; ``warnings`` are lines about images or labels of
    the source that are left out. ``eval_labels``: true classes for evaluation only,
    where the source has them.
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
        """The rows ``index`` int64 (M,), in that order."""
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
        """Class names in one Unicode normalization: those that differ in nothing else
        are one class. The ``notes`` say so, and which differ in case only.
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
        """'train' or 'test' of every row."""
        return Labels(("test", "train"), self.is_train.view(np.int8))

    @property
    def truth(self) -> Labels:
        """What evaluation takes for each row's true class: ``eval_labels`` where
        given, else the label.
        """
        return (
            self.labels
            if self.eval_labels is None
            else self.eval_labels.or_else(self.labels)
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of ids, labels, splits and content (pixels, bytes; sizes of files and
        of the row groups of Parquet files), 64 hex digits. A moved data set keeps it.
        0.1 s for 60,000 JPEGs of 32 px.
        """
        digest, num = hashlib.sha256(), len(self)
        parts = [
            np.arange(i, min(i + PART_ROWS, num)) for i in range(0, num, PART_ROWS)
        ]
        columns: tuple[Column[Any], ...] = (self.ids, self.labels, self.split)
        for number, column in enumerate(columns):  # as JSON of the three lists
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
    """The values of an Arrow array as one piece of memory."""
    rows = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
    return pa.compute.binary_join(rows, pa.scalar(separator, values.type))[
        0
    ].as_buffer()


def _with_sizes(contents: Any) -> Any:
    """Each text of an Arrow array of large strings, shorter than 256 bytes, after
    its length in 8 bytes.
    """
    sizes = pa.array([i.to_bytes(8, "little") for i in range(256)], pa.large_binary())
    before = sizes.take(pa.compute.binary_length(contents))
    after = contents.cast(pa.large_binary())
    return pa.compute.binary_join_element_wise(
        before, after, pa.scalar(b"", pa.large_binary())
    )


def _alike(names: Iterable[str], key: Callable[[str], str], what: str) -> Iterator[str]:
    """A line for names of classes of one ``key``."""
    found = defaultdict[str, dict[str, None]](dict)
    for name in names:
        found[key(name)][name] = None
    for some in found.values():
        if len(some) > 1:
            yield f"class names {', '.join(map(ascii, some))} differ in {what}"
