"""Keep ids and labels in compact columns.

A data set has up to 100 million rows, and a Python string for each takes too much
memory. Ids are kept as Arrow text, or are made from file names and numbers when they
are read. Labels are kept as numbers. Each column is a sequence of its values.
"""

from __future__ import annotations

import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute

ROWS_AT_ONCE = 2**13  # rows that are Python objects at the same time
PLAIN = r"^[ !#-\[\]-~]*$"  # matches text in which JSON escapes no character
Item = TypeVar("Item")


class Column(Sequence[Item], ABC):
    """A read-only sequence of N values that are read by row number.

    An index or a slice gives one value or a list of values. Two columns are equal if
    their values are.
    """

    @abstractmethod
    def take(self, rows: np.ndarray) -> list[Item]:
        """Return the values of some rows, in that order.

        Args:
            rows: Row numbers, int64 (n,).
        """

    def json(self, rows: np.ndarray) -> Any:
        """Return the values of some rows as JSON.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            An Arrow array of n large strings.
        """
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
        return len(self) == len(other) and all(map(operator.eq, self, other))


@dataclass(frozen=True, eq=False)
class Text(Column[str]):
    """A column of ids in an Arrow array of large strings.

    Attributes:
        array: The ids. They take 8 bytes a row besides their text.
    """

    array: Any

    @classmethod
    def of(cls, names: Iterable[str]) -> Text:
        """Make a column of names, which may come from a generator."""
        parts = [pa.array(some, pa.large_string()) for some in chunks(names)]
        return cls(pa.concat_arrays(parts or [pa.array([], pa.large_string())]))

    @classmethod
    def join(cls, parts: Sequence[Text]) -> Text:
        """Concatenate columns."""
        return cls(pa.concat_arrays([part.array for part in parts]))

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: np.ndarray) -> list[str]:
        """Return the ids of some rows int64 (n,), in that order."""
        return list(self.array.take(pa.array(rows)).to_pylist())

    def json(self, rows: np.ndarray) -> Any:
        """Return the ids of some rows as JSON.

        Text without special characters is only put between quotes, which is fast.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            An Arrow array of n large strings.
        """
        values = self.array.take(pa.array(rows))
        if not pa.compute.all(
            pa.compute.match_substring_regex(values, PLAIN), min_count=0
        ).as_py():
            return super().json(rows)
        return joined("", '"', values, '"')

    def repeated(self) -> str | None:
        """Return the first id that an earlier row also has, or None if all ids differ.

        The ids are sorted, which takes memory for 8 bytes a row and for their text once
        more.
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
        """Return the column of only some rows int64 (n,), in that order."""
        return Text(self.array.take(pa.array(rows)))

    def find(self, names: Iterable[str]) -> dict[str, int]:
        """Find the rows that have given ids.

        Args:
            names: Texts to search for.

        Returns:
            The row number of each of ``names`` that is the id of a row.
        """
        wanted = pa.array(names, pa.large_string())
        rows = np.flatnonzero(
            pa.compute.is_in(self.array, wanted).to_numpy(zero_copy_only=False)
        )
        return dict(zip(self.take(rows), rows.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Numbered(Column[str]):
    """A column of ids ``FILE#NUMBER`` for rows in files.

    NUMBER counts the rows of a file from 0. The ids are made when they are read.

    Attributes:
        files: Names of F files.
        starts: Row number of the first row of each file, and at the end N: int64 (F +
            1,).
    """

    files: Sequence[str]
    starts: np.ndarray

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: np.ndarray) -> list[str]:
        """Return the ids of some rows int64 (n,), in that order."""
        return list(self._joined(self.files, rows).to_pylist())

    def json(self, rows: np.ndarray) -> Any:
        """Return the ids of some rows as JSON.

        The name of each file is escaped once, and not for each row.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            An Arrow array of n large strings.
        """
        return joined(
            "",
            '"',
            self._joined([json.dumps(file)[1:-1] for file in self.files], rows),
            '"',
        )

    def pick(self, rows: np.ndarray) -> Text:
        """Return the column of only some rows int64 (n,), in that order."""
        return Text(self._joined(self.files, rows))

    def find(self, names: Iterable[str]) -> dict[str, int]:
        """Find the rows that have given ids.

        Args:
            names: Texts to search for.

        Returns:
            The row number of each of ``names`` that is the id of a row.
        """
        index_of_file = {file: i for i, file in enumerate(self.files)}
        sizes = np.diff(self.starts)
        row_of_name = dict[str, int]()
        for name in names:
            file, _, number = name.rpartition("#")
            index = index_of_file.get(file)
            if index is None or not number.isdigit() or int(number) >= sizes[index]:
                continue
            row_of_name[name] = int(self.starts[index]) + int(number)
        return row_of_name

    def _joined(self, files: Sequence[str], rows: np.ndarray) -> Any:
        """Return the ids of some rows, with given names of the files.

        Args:
            files: F names to use in place of :attr:`files`.
            rows: Row numbers, int64 (n,).

        Returns:
            An Arrow array of n large strings.
        """
        file_of_row = np.searchsorted(self.starts, rows, side="right") - 1
        names = pa.array(files, pa.large_string()).take(pa.array(file_of_row))
        return joined("#", names, decimal(rows - self.starts[file_of_row]))

    def repeated(self) -> str | None:
        """Return an id that two rows have in common, or None if all ids differ.

        Rows of one file always differ, because their ids have different numbers. So the
        ids are compared only if two files have the same name.
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
"""The ids of the rows of a data set."""


@dataclass(frozen=True, eq=False)
class Labels(Column[str | None]):
    """A column with the class of each row.

    Attributes:
        classes: Names of classes, some of which may have no row.
        codes: Index of each row's class in ``classes``, -1 for a row without a label:
            int32 (N,).
    """

    classes: Sequence[str]
    codes: np.ndarray

    @classmethod
    def of(cls, names: Iterable[str | None]) -> Labels:
        """Make a column of class names.

        Args:
            names: The class of each row, or None for a row without a label.

        Returns:
            A column with the classes in the order of their first rows.
        """
        index: dict[str, int] = {}
        codes = (
            -1 if name is None else index.setdefault(name, len(index)) for name in names
        )
        # The generator fills the index, so the array is made before the classes.
        all_codes = np.fromiter(codes, np.int32)
        return cls(tuple(index), all_codes)

    @classmethod
    def none(cls, num_rows: int) -> Labels:
        """Make a column of ``num_rows`` rows without labels."""
        return cls((), np.full(num_rows, -1, np.int32))

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: np.ndarray) -> list[str | None]:
        """Return the class names of some rows int64 (n,), in that order.

        The value is None for a row without a label.
        """
        return [
            None if code < 0 else self.classes[code]
            for code in self.codes[rows].tolist()
        ]

    def json(self, rows: np.ndarray) -> Any:
        """Return the class names of some rows as JSON.

        A row without a label is ``null``. The name of each class is escaped once, and
        not for each row.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            An Arrow array of n large strings.
        """
        texts = pa.array([*map(json.dumps, self.classes), "null"], pa.large_string())
        return texts.take(pa.array(self.codes[rows] % len(texts)))

    def pick(self, rows: np.ndarray) -> Labels:
        """Return the column of only some rows.

        Args:
            rows: Row numbers int64 (n,) in the order of the result, or a mask bool
                (N,).
        """
        return Labels(self.classes, self.codes[rows])

    @property
    def given(self) -> np.ndarray:
        """Whether each row has a label, bool (N,)."""
        return self.codes >= 0

    @property
    def present(self) -> set[str]:
        """The names of the classes that have at least one row."""
        return {
            self.classes[code] for code in np.unique(self.codes).tolist() if code >= 0
        }

    def places(self, classes: Sequence[str]) -> np.ndarray:
        """Return the index of each row's class in another list of classes.

        Args:
            classes: Names of classes.

        Returns:
            int64 (N,), with -1 for a row without a label or of a class that is not
            listed.
        """
        place = {name: i for i, name in enumerate(classes)}
        return np.array(
            [*(place.get(name, -1) for name in self.classes), -1], np.int64
        )[self.codes]

    def renamed(self, names: Iterable[str]) -> Labels:
        """Rename the classes. Classes that get the same name become one class.

        Args:
            names: The new name of each of ``classes``, in their order.

        Returns:
            A column with the classes in the order in which their new names first occur
            in ``names``.
        """
        merged = Labels.of(names)
        return Labels(merged.classes, np.append(merged.codes, np.int32(-1))[self.codes])

    def or_else(self, other: Labels) -> Labels:
        """Return these labels, and the labels of ``other`` for rows without one here.

        Args:
            other: Labels of the same N rows.

        Returns:
            A column with the classes of both, of which a name may occur twice.
        """
        theirs = np.where(other.given, other.codes + len(self.classes), -1)
        return Labels(
            (*self.classes, *other.classes), np.where(self.given, self.codes, theirs)
        )


def joined(separator: str, *parts: Any) -> Any:
    """Join texts row by row.

    Args:
        separator: Text between two parts.
        *parts: Arrow arrays of n large strings, or a text that is the same for all
            rows.

    Returns:
        An Arrow array of n large strings.
    """
    texts = [
        pa.scalar(part, pa.large_string()) if isinstance(part, str) else part
        for part in parts
    ]
    return pa.compute.binary_join_element_wise(
        *texts, pa.scalar(separator, pa.large_string())
    )


def decimal(numbers: np.ndarray) -> Any:
    """Return integers (n,) as decimal text, in an Arrow array of large strings."""
    return pa.array(numbers).cast(pa.large_string())


def chunks(values: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield ``values`` as lists of at most :data:`ROWS_AT_ONCE` values, in order."""
    rest = iter(values)
    while some := list(islice(rest, ROWS_AT_ONCE)):
        yield some
