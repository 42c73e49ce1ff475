"""Columns of ids and labels, as Arrow arrays.

A data set has up to 100 million rows, and a Python string for each takes too much
memory. Ids are an Arrow array of large strings. Labels are a dictionary array: the
names of the classes, and for each row the index of its class. The value of a row
without a label is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

ROWS_AT_ONCE = 2**13  # rows that are Python objects at the same time
Item = TypeVar("Item")


def make_ids(names: Iterable[str]) -> pa.LargeStringArray:
    """Return ids as an Arrow array.

    Args:
        names: The ids of N rows, which may come from a generator. They are not checked.

    Returns:
        An array (N,) of large strings.
    """
    parts = [pa.array(some, pa.large_string()) for some in chunks(names)]
    return pa.concat_arrays(parts or [pa.array([], pa.large_string())])


def make_labels(names: Iterable[str | None]) -> pa.DictionaryArray:
    """Return class names as a column of labels.

    Args:
        names: The class of each of N rows, None for a row without a label. They may
            come from a generator.

    Returns:
        A dictionary array (N,) with the classes in the order of their first rows, and
        null for a row without a label.
    """
    return join_labels(
        [
            pa.array(some, pa.large_string()).dictionary_encode()
            for some in chunks(names)
        ]
    )


def make_unlabeled(num_rows: int) -> pa.DictionaryArray:
    """Return a column of labels for ``num_rows`` rows, none of which has a label."""
    return pa.nulls(num_rows, pa.dictionary(pa.int32(), pa.large_string()))


def join_labels(parts: Sequence[pa.DictionaryArray]) -> pa.DictionaryArray:
    """Concatenate columns of labels. Classes of equal name become one class.

    Args:
        parts: Dictionary arrays, each with its own list of class names. Of no parts the
            result has no rows.

    Returns:
        One dictionary array with the rows of all parts in order. Classes are in the
        order in which they first appear in the dictionaries of the parts.
    """
    joined = pa.chunked_array(parts, pa.dictionary(pa.int32(), pa.large_string()))
    return pa.concat_arrays(joined.unify_dictionaries().chunks or [make_unlabeled(0)])


def class_codes(labels: pa.DictionaryArray) -> np.ndarray:
    """Return the index of each row's class in the dictionary of a column of labels.

    Args:
        labels: A dictionary array (N,), not a chunked one.

    Returns:
        int32 (N,), -1 for a row without a label.
    """
    return labels.indices.fill_null(-1).to_numpy()


def class_indices(labels: pa.DictionaryArray, classes: Sequence[str]) -> np.ndarray:
    """Return the index of each row's class in a list of classes.

    Args:
        labels: The labels of N rows.
        classes: Different names of classes.

    Returns:
        int64 (N,), -1 for a row without a label or of a class that is not listed.
    """
    listed = pa.array(classes, labels.dictionary.type)
    index = pa.compute.index_in(labels.dictionary, listed).fill_null(-1).to_numpy()
    return np.append(index, -1).astype(np.int64)[class_codes(labels)]


def present_classes(labels: pa.DictionaryArray) -> set[str]:
    """Return the names of the classes that have at least one row of ``labels``."""
    return {*labels.dictionary.take(labels.indices.unique().drop_null()).to_pylist()}


def rename_classes(
    labels: pa.DictionaryArray, names: Iterable[str | None]
) -> pa.DictionaryArray:
    """Rename classes. Classes that get the same name become one class.

    Args:
        labels: The labels of N rows.
        names: The new name of each class of ``labels.dictionary``, in that order and
            one for each; None if its rows become unlabeled.

    Returns:
        A dictionary array (N,) whose classes are the different new names, in the order
        of ``names``.
    """
    renamed = make_labels(names)
    return pa.DictionaryArray.from_arrays(
        renamed.indices.take(labels.indices), renamed.dictionary
    )


def fill_labels(
    labels: pa.DictionaryArray, others: pa.DictionaryArray
) -> pa.DictionaryArray:
    """Fill in the labels that one column lacks from another column.

    Args:
        labels: The labels of N rows. They are kept.
        others: Labels of the same rows, which are taken for rows without a label.

    Returns:
        A new dictionary array (N,) with the classes of both columns, null for rows that
        have no label in either column.
    """
    both = pa.chunked_array([labels, others]).unify_dictionaries()
    first, second = both.chunks
    return pa.DictionaryArray.from_arrays(
        pa.compute.coalesce(first.indices, second.indices), first.dictionary
    )


def find_rows(ids: pa.LargeStringArray, names: Iterable[str]) -> dict[str, int]:
    """Find the rows that have given ids.

    Args:
        ids: The ids of all rows.
        names: Ids to search for.

    Returns:
        Id -> row number, for each of ``names`` that is the id of a row, in the order of
        the rows. Other names are left out.
    """
    wanted = pa.array(names, pa.large_string())
    is_wanted = pa.compute.is_in(ids, wanted).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(is_wanted)
    return dict(zip(ids.take(rows).to_pylist(), rows.tolist(), strict=True))


def joined(separator: str, *parts: Any) -> Any:
    """Join texts row by row.

    Args:
        separator: Text between two parts.
        *parts: Arrow arrays of n large strings, or a text that is the same for all
            rows.

    Returns:
        An Arrow array of n large strings, null where any part is null. It is a scalar
        if every part is a text.
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
