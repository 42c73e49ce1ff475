"""Ids and labels of many rows are Arrow arrays."""

import numpy as np
import pytest

from uno.data import columns, rows
from uno.data.columns import fill_labels, make_ids, make_labels
from uno.data.rows import Rows


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Every column consists of several parts."""
    monkeypatch.setattr(columns, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(rows, "PART_ROWS", 4)


def test_a_label_that_is_missing_is_filled():
    """Kills: a label taken for a truth that is given."""
    truth = make_labels(["z", "a", "z", None, None, "b"])
    labels = make_labels(["b", None, "a", "b", None, "c"])
    assert fill_labels(truth, labels).to_pylist() == ["z", "a", "z", "b", None, "b"]


def test_the_fingerprint_tells_data_sets_apart():
    """Kills: a column that is left out, two values that are joined to one."""
    given = {
        "ids": [f"ä{i}" for i in range(9)],
        "pixels": np.arange(108, dtype=np.uint8).reshape(9, 2, 2, 3),
        "labels": [*"ddd", "b", None, "a", "b", None, "c"],
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
