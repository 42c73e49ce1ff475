"""Ids and labels of many rows are Arrow arrays."""

import numpy as np
import pytest

from uno.data import columns, rows
from uno.data.columns import (
    class_codes,
    class_indices,
    fill_labels,
    find_rows,
    join_labels,
    make_ids,
    make_labels,
    make_unlabeled,
    present_classes,
    rename_classes,
)
from uno.data.rows import Rows
from uno.errors import ConfigError

WORDS = ["b", None, "a", "b", None, "c"]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Every column consists of several parts."""
    monkeypatch.setattr(columns, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(rows, "PART_ROWS", 4)


@pytest.mark.parametrize("words", [WORDS, [None] * 3, []])
def test_labels_are_counted_indexed_and_joined(words):
    """Kills: classes that have no row left, a label for rows without one."""
    labels = make_labels(iter(words))
    classes = list(dict.fromkeys(filter(None, words)))
    assert labels.to_pylist() == words and labels.dictionary.to_pylist() == classes
    codes = [-1 if word is None else classes.index(word) for word in words]
    assert class_codes(labels).tolist() == codes
    indices = class_indices(labels, ["c", "a"]).tolist()
    assert indices == [{"c": 0, "a": 1}.get(word, -1) for word in words]
    is_last = np.arange(len(words)) == len(words) - 1
    assert present_classes(labels.filter(is_last)) == {*filter(None, words[-1:])}
    both = join_labels([labels, make_unlabeled(2), make_labels("cb")])
    assert both.to_pylist() == [*words, None, None, "c", "b"]
    renamed = rename_classes(labels, ["x"] * len(classes))
    assert renamed.to_pylist() == [word and "x" for word in words]


def test_a_label_that_is_missing_is_filled():
    """Kills: a label taken for a truth that is given."""
    filled = fill_labels(
        make_labels(["z", "a", "z", None, None, "b"]), make_labels(WORDS)
    )
    assert filled.to_pylist() == ["z", "a", "z", "b", None, "b"]


def test_rows_are_found_by_their_ids():
    ids = make_ids(name for name in "hello")
    assert find_rows(ids, ["o", "x", "h"]) == {"h": 0, "o": 4}
    with pytest.raises(ConfigError, match="id 'l' appears more than once"):
        Rows(ids, [b""] * 5, make_unlabeled(5), np.ones(5, bool), "five")


def test_the_fingerprint_tells_data_sets_apart():
    """Kills: a column that is left out, two values that are joined to one."""
    given = {
        "ids": [f"ä{i}" for i in range(9)],
        "pixels": np.arange(108, dtype=np.uint8).reshape(9, 2, 2, 3),
        "labels": [*"ddd", *WORDS],
        "is_train": np.ones(9, bool),
    }
    changes = [
        {},
        {"ids": ["ä", "0ä1", *given["ids"][2:]]},
        {"ids": ["ä0ä", "1", *given["ids"][2:]]},
        {"labels": [*given["labels"][:-1], None]},
        {"labels": [*given["labels"][:-1], ""]},
        {"is_train": np.arange(9) != 8},
        {"pixels": given["pixels"].reshape(9, 4, 1, 3)},
        {"pixels": given["pixels"] + np.uint8(1)},
    ]

    def fingerprint(ids, pixels, labels, is_train):
        labels = make_labels(labels)
        return Rows(make_ids(ids), pixels, labels, is_train, "nine").fingerprint

    found = [fingerprint(**given | change) for change in changes]
    assert len(set(found)) == len(changes)
    assert fingerprint(**given | {"labels": iter(given["labels"])}) == found[0]
