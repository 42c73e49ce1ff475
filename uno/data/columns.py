"""What sources say of N rows in words, in a few bytes a row: ids as text in one piece
of memory, or made when they are wanted; classes as numbers. As a sequence each is what
it says of every row.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute

ROWS_AT_ONCE = 2**13  # that become objects of Python
PLAIN = r"^[ !#-\[\]-~]*$"  # text that is its own JSON
Item = TypeVar("Item")


class Column(Sequence[Item], ABC):
    """N values, read by their rows."""

    @abstractmethod
    def take(self, rows: np.ndarray) -> list[Item]:
        """The values of ``rows`` (n,)."""

    def json(self, rows: np.ndarray) -> Any:
        """The values of ``rows`` (n,) as JSON, an Arrow array of large strings."""
        return pa.array(map(json.dumps, self.take(rows)), pa.large_string())

    @overload
    def __getitem__(self, row: int) -> Item: ...
    @overload
    def __getitem__(self, row: slice) -> list[Item]: ...
    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.take(np.arange(*row.indices(len(self))))
        return self.take(np.array([range(len(self))[row]]))[0]

    def __iter__(self) -> Iterator[Item]:
        for start in range(0, len(self), ROWS_AT_ONCE):
            yield from self[start : start + ROWS_AT_ONCE]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(map(lambda a, b: a == b, self, other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Text(Column[str]):
    """Ids in an Arrow array of large strings: their text and 8 bytes a row."""

    array: Any

    @classmethod
    def of(cls, names: Iterable[str]) -> Text:
        """Of any number of names."""
        parts = [pa.array(some, pa.large_string()) for some in chunks(names)]
        return cls(pa.concat_arrays(parts or [pa.array([], pa.large_string())]))

    @classmethod
    def join(cls, parts: Sequence[Text]) -> Text:
        """One after the other."""
        return cls(pa.concat_arrays([part.array for part in parts]))

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: np.ndarray) -> list[str]:
        """The values of ``rows`` (n,)."""
        return list(self.array.take(pa.array(rows)).to_pylist())

    def json(self, rows: np.ndarray) -> Any:
        """Text without special characters stays as it is, between quotes."""
        values = self.array.take(pa.array(rows))
        if not pa.compute.all(
            pa.compute.match_substring_regex(values, PLAIN), min_count=0
        ).as_py():
            return super().json(rows)
        return joined("", '"', values, '"')

    def repeated(self) -> str | None:
        """The first that an earlier row has, too. Memory: 8 bytes a row, and their
        text once more.
        """
        order = pa.compute.array_sort_indices(self.array)
        values = self.array.take(order)
        same = pa.compute.equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
        if not same.any():
            return None
        pairs = np.flatnonzero(same)
        later = np.maximum(order.to_numpy()[pairs], order.to_numpy()[pairs + 1])
        return str(self.array[int(later.min())].as_py())

    def pick(self, rows: np.ndarray) -> Text:
        """Those of ``rows`` (n,)."""
        return Text(self.array.take(pa.array(rows)))

    def find(self, names: Iterable[str]) -> dict[str, int]:
        """Those of ``names`` that a row has, and the row."""
        wanted = pa.array(names, pa.large_string())
        rows = np.flatnonzero(
            pa.compute.is_in(self.array, wanted).to_numpy(zero_copy_only=False)
        )
        return dict(zip(self.take(rows), rows.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Numbered(Column[str]):
    """``FILE#NUMBER``: the rows of ``files``, those of file f from row ``starts[f]``
    on; int64 (F + 1,).
    """

    files: Sequence[str]
    starts: np.ndarray

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: np.ndarray) -> list[str]:
        """The values of ``rows`` (n,)."""
        return list(self._joined(self.files, rows).to_pylist())

    def json(self, rows: np.ndarray) -> Any:
        """Each file's name is escaped once."""
        return joined(
            "",
            '"',
            self._joined([json.dumps(file)[1:-1] for file in self.files], rows),
            '"',
        )

    def pick(self, rows: np.ndarray) -> Text:
        """Those of ``rows`` (n,)."""
        return Text(self._joined(self.files, rows))

    def find(self, names: Iterable[str]) -> dict[str, int]:
        """Those of ``names`` that a row has, and the row."""
        place, found = {file: i for i, file in enumerate(self.files)}, dict[str, int]()
        for name in names:
            file, _, number = name.rpartition("#")
            at = place.get(file, -1)
            if (
                at >= 0
                and number.isdigit()
                and int(number) < self.starts[at + 1] - self.starts[at]
            ):
                found[name] = int(self.starts[at]) + int(number)
        return found

    def _joined(self, files: Sequence[str], rows: np.ndarray) -> Any:
        own = np.searchsorted(self.starts, rows, side="right") - 1
        texts = pa.array(files, pa.large_string()).take(pa.array(own))
        return joined("#", texts, decimal(rows - self.starts[own]))

    def repeated(self) -> str | None:
        """Return an id that two rows have in common, or None if all ids differ.

        Rows of one file always differ, since their ids have different numbers.
        """
        full = [
            file
            for file, num in zip(self.files, np.diff(self.starts), strict=True)
            if num
        ]
        return (
            None
            if len(set(full)) == len(full)
            else self.pick(np.arange(len(self))).repeated()
        )


Ids = Text | Numbered
"""What rows are called."""


@dataclass(frozen=True, eq=False)
class Labels(Column[str | None]):
    """Class of each row: its place among ``classes`` (some may have no row), -1:
    none, int32 (N,).
    """

    classes: Sequence[str]
    codes: np.ndarray

    @classmethod
    def of(cls, names: Iterable[str | None]) -> Labels:
        """Classes in order of their first rows."""
        index: dict[str, int] = {}
        codes = (
            -1 if name is None else index.setdefault(name, len(index)) for name in names
        )
        found = np.fromiter(codes, np.int32)
        return cls(tuple(index), found)

    @classmethod
    def none(cls, num_rows: int) -> Labels:
        """Of rows that have none."""
        return cls((), np.full(num_rows, -1, np.int32))

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: np.ndarray) -> list[str | None]:
        """The values of ``rows`` (n,)."""
        return [
            None if code < 0 else self.classes[code]
            for code in self.codes[rows].tolist()
        ]

    def json(self, rows: np.ndarray) -> Any:
        """Each class is escaped once."""
        texts = pa.array([*map(json.dumps, self.classes), "null"], pa.large_string())
        return texts.take(pa.array(self.codes[rows] % len(texts)))

    def pick(self, rows: np.ndarray) -> Labels:
        """Those of ``rows``: numbers (n,), or bool (N,)."""
        return Labels(self.classes, self.codes[rows])

    @property
    def given(self) -> np.ndarray:
        """bool (N,): which rows have one."""
        return self.codes >= 0

    @property
    def present(self) -> set[str]:
        """The classes that have rows."""
        return {
            self.classes[code] for code in np.unique(self.codes).tolist() if code >= 0
        }

    def places(self, classes: Sequence[str]) -> np.ndarray:
        """int64 (N,): place of each label among other ``classes``, -1 where it is
        none of them.
        """
        place = {name: i for i, name in enumerate(classes)}
        return np.array(
            [*(place.get(name, -1) for name in self.classes), -1], np.int64
        )[self.codes]

    def renamed(self, names: Iterable[str]) -> Labels:
        """With other ``names`` for the classes; those of one name become one class."""
        merged = Labels.of(names)
        return Labels(merged.classes, np.append(merged.codes, np.int32(-1))[self.codes])

    def or_else(self, other: Labels) -> Labels:
        """These, where there are none ``other``'s."""
        theirs = np.where(other.given, other.codes + len(self.classes), -1)
        return Labels(
            (*self.classes, *other.classes), np.where(self.given, self.codes, theirs)
        )


def joined(separator: str, *parts: Any) -> Any:
    """Arrow arrays of large strings, or text that is the same for all rows, one
    after the other.
    """
    texts = [
        pa.scalar(part, pa.large_string()) if isinstance(part, str) else part
        for part in parts
    ]
    return pa.compute.binary_join_element_wise(
        *texts, pa.scalar(separator, pa.large_string())
    )


def decimal(numbers: np.ndarray) -> Any:
    """Whole ``numbers`` (n,) as text, an Arrow array of large strings."""
    return pa.array(numbers).cast(pa.large_string())


def chunks(values: Iterable[Item]) -> Iterator[list[Item]]:
    """``values``, some at a time."""
    rest = iter(values)
    while some := list(islice(rest, ROWS_AT_ONCE)):
        yield some
