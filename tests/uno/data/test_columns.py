"""Ids and labels of many rows are sequences of text that take a few bytes a row."""

import hashlib
import json
from itertools import chain

import numpy as np
import pytest

from uno.data import columns, rows
from uno.data.columns import Labels, Numbered, Text, chunks

WORDS = ["b", None, "a", "b", None, "c"]
FILES = Numbered(["x", "none", "y"], np.array([0, 2, 2, 5]))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Text.of(name for name in "hello"), list("hello")),
        (Text.of([]), []),
        (Text.join([Text.of("he"), Text.of([]), Text.of("llo")]), list("hello")),
        (FILES, ["x#0", "x#1", "y#0", "y#1", "y#2"]),
        (Labels.of(WORDS), WORDS),
        (Labels.none(2), [None] * 2),
        (FILES.pick(np.array([4, 0])), ["y#2", "x#0"]),
        (Labels.of(WORDS).pick(np.array([2, 1])), ["a", None]),
    ],
)
def test_a_column_is_the_list_of_its_values(monkeypatch, column, values):
    """Kills: rows of another file, an empty file that takes a number, a class
    shifted by those without.
    """
    monkeypatch.setattr(columns, "ROWS_AT_ONCE", 2)
    assert column == values and list(column) == values and len(column) == len(values)
    assert column != [*values, "more"] and column != [*values[:-1], "other"]
    assert column[1:-1] == values[1:-1] and column[::-2] == values[::-2]
    assert [column[i] for i in range(-len(values), len(values))] == values * 2
    with pytest.raises(IndexError):
        column[len(values)]


def test_labels_are_counted_placed_and_joined():
    """Kills: classes that have no row left, a label taken for a truth that is given."""
    labels = Labels.of(WORDS)
    assert labels.present == {"a", "b", "c"} and labels.pick(
        labels.codes == 0
    ).present == {"b"}
    assert labels.given.tolist() == [word is not None for word in WORDS]
    assert labels.places(["c", "a"]).tolist() == [-1, -1, 1, -1, -1, 0]
    other = Labels.of(["z", "a", "z", None, None, "b"])
    assert other.or_else(labels) == ["z", "a", "z", "b", None, "b"]
    assert labels.codes.dtype == other.or_else(labels).codes.dtype == np.int32


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (Text.of(chain("abcab", "xyz")), "a"),
        (Text.of("abc"), None),
        (FILES, None),
        (Numbered(["x", "y", "x"], np.array([0, 2, 3, 4])), "x#0"),
        (Numbered(["x", "y", "x"], np.array([0, 2, 3, 3])), None),
    ],
)
def test_an_id_that_two_rows_have_is_found(ids, found):
    """Kills: a look at neighbors only, two files of one name."""
    assert ids.repeated() == found


def test_the_fingerprint_is_that_of_lists(monkeypatch):
    """As it always was, or every run and every pack would be another's. Kills:
    pieces joined otherwise.
    """
    monkeypatch.setattr(columns, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(rows, "PART_ROWS", 4)
    ids, names = [f"ä{i}" for i in range(9)], ["dog", None, "cat"] * 3
    pixels, is_train = (
        np.arange(108, dtype=np.uint8).reshape(9, 2, 2, 3),
        np.arange(9) % 4 > 0,
    )
    found = rows.Rows(Text.of(ids), pixels, Labels.of(names), is_train, "nine")
    split = ["train" if train else "test" for train in is_train]
    digest = hashlib.sha256(json.dumps([ids, names, split]).encode())
    for one in pixels:
        content = b"(2, 2, 3)" + one.tobytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    assert found.fingerprint == digest.hexdigest()
    assert found.split == split and found.truth == names
    assert [len(some) for some in chunks(iter(ids))] == [4, 4, 1]
