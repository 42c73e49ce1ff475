"""Images that stay in their Parquet files until somebody wants them: references instead of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from uno.data import files as filesystem
from uno.errors import ConfigError

GROUPS_KEPT = 4  # row groups in memory for access row by row


class ParquetImages:
    """The image column of Parquet files. A row becomes bytes (or a path) when it is read.

    A row group is read as a whole: rows in order, or many at once with :meth:`fetch`, are cheap; single rows
    are not. Page checksums are verified where the files have them.

    Args:
        root: folder that paths are relative to.
        files: full paths or URIs.
        column: the image column, bytes or struct<bytes, path>.
    """

    def __init__(self, root: str, files: Sequence[str], column: str) -> None:
        self.root, self.files, self.column = root, list(files), column
        facts = [_footer(file) for file in self.files]
        groups = [(i, g, m.row_group(g)) for i, m in enumerate(facts) for g in range(m.num_row_groups)]
        self._place = [(i, g) for i, g, _ in groups]  # of each row group: file, number in the file
        self._starts = np.cumsum([0, *(group.num_rows for *_, group in groups)])
        self.group_bytes = np.array([_bytes(group, column) for *_, group in groups], dtype=np.int64)
        self._forget()

    def __len__(self) -> int:
        """Number of images."""
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> bytes | str:
        """The bytes of a row, or its path."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._value(self._read(group), int(row - self._starts[group]))

    def groups(self, rows: np.ndarray) -> np.ndarray:
        """int64 (n,): the row group of each of ``rows``, numbered over all files."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def fetch(self, rows: np.ndarray) -> list[bytes | str]:
        """The images of ``rows`` int64 (n,), in that order; every row group they are in is read once.

        Raises:
            ConfigError: a damaged or missing file.
        """
        groups = self.groups(rows)
        found: list[Any] = [None] * len(rows)
        for group in np.unique(groups).tolist():
            column = self._read_group(group)
            for i in np.flatnonzero(groups == group).tolist():
                found[i] = self._value(column, int(rows[i] - self._starts[group]))
        return found

    def facts(self, rows: Sequence[int]) -> Iterator[bytes]:
        """What tells the content of rows apart without reading it: row group, its bytes, place in it."""
        groups = self.groups(np.asarray(rows))
        for row, group in zip(rows, groups.tolist(), strict=True):
            yield f"{row - self._starts[group]} of {self.group_bytes[group]}".encode()

    def _read(self, group: int) -> Any:
        with self._lock:
            if group not in self._kept:
                self._kept[group] = self._read_group(group)
                if len(self._kept) > GROUPS_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(group)
            return self._kept[group]

    def _read_group(self, group: int) -> Any:
        i, number = self._place[group]
        try:
            with filesystem.open_input(self.files[i]) as file:
                options = {"metadata": _footer(self.files[i]), "page_checksum_verification": True}
                with pa.parquet.ParquetFile(file, **options) as parquet:
                    return parquet.read_row_group(number, [self.column])[self.column].combine_chunks()
        except (OSError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"cannot read row group {number} of {self.files[i]}: {reason}") from None

    def _value(self, column: Any, place: int) -> bytes | str:
        value = column[place].as_py()
        if isinstance(value, dict):
            path = value.get("path")
            value = value["bytes"] or (filesystem.inside(self.root, path) if path else None)
        return value or b""

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """References only: what has been read stays here."""
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With nothing read yet."""
        vars(self).update(state)
        self._forget()


@lru_cache(maxsize=1024)
def _footer(path: str) -> Any:
    try:
        with filesystem.open_input(path) as file:
            return pa.parquet.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"cannot read Parquet file {path}: {reason}") from None


def _bytes(group: Any, column: str) -> int:
    """Compressed bytes of a column, with its children, in a row group."""
    parts = (group.column(i) for i in range(group.num_columns))
    return sum(p.total_compressed_size for p in parts if p.path_in_schema.split(".")[0] == column)
