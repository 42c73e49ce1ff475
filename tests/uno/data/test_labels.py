"""One rule for labels, whatever source they come from, and columns of many rows."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data import columns, rows
from uno.data.columns import fill_labels, make_ids, make_labels
from uno.data.labels import encode_column, encode_labels
from uno.data.rows import Rows
from uno.data.sources import read_rows

from .builders import encoded, failure, pixels

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1, 10], ["0", "1", "10"]),
        ([0.0, 1.0, NAN, None], ["0", "1", None, None]),
        ([0, 1.0, "2", "3.0"], ["0", "1", "2", "3"]),
        ([-1, 5, -2.0], [None, "5", None]),
        (["0.0", "1.0", ""], ["0", "1", None]),
        (["-1", "-1.0", "-0.0", "3."], [None, None, "0", "3"]),
        (["007", "012"], ["007", "012"]),
        (["1.0", "1.5", "cat"], ["1.0", "1.5", "cat"]),
        (["cat", " ", ""], ["cat", None, None]),
        ([True, False, None], ["True", "False", None]),
        ([True, "1.0"], ["True", "1.0"]),
        ([Decimal("2.00"), Decimal("NaN")], ["2", None]),
        (
            [np.float32(2), np.int8(-1), np.str_("x"), np.bool_(True)],
            ["2", None, "x", "True"],
        ),
        ([], []),
    ],
)
def test_labels_of_any_type_have_one_rule(values, expected):
    assert encode_labels("source", values).to_pylist() == expected


@pytest.mark.parametrize(
    ("values", "row", "shown"),
    [
        ([0, 1.5], 1, "1.5"),
        (["0", "2", "1.5"], 2, "'1.5'"),
        ([float("inf")], 0, "inf"),
        (["a", [1]], 1, "[1]"),
        (["a", (1, [2])], 1, "(1, [2])"),
        (["a", {"b": 1}], 1, "{'b': 1}"),
        ([np.ones(2)], 0, "[1., 1.]"),
        ([b"x"], 0, "b'x'"),
    ],
)
def test_other_labels_are_refused_with_their_row(values, row, shown):
    line = failure(encode_labels, "source", values)
    assert line.startswith("source: ") and f"row {row}: " in line and shown in line
    assert "whole number" in line
    if "1.5" in shown or shown == "inf":
        assert 'df["label"].astype("Int64")' in line


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([0.0, NAN, 1.0, None]), ["0", None, "1", None]),
        (pa.array([0.0, 1.0], pa.float16()), ["0", "1"]),
        (pa.array([1, None, -1], pa.int8()), ["1", None, None]),
        (pa.array([1, None]).cast(pa.decimal128(38, 2)), ["1", None]),
        (pa.array(["1.0", None, "2"]).dictionary_encode(), ["1", None, "2"]),
        (pa.array([2.0, None]).dictionary_encode(), ["2", None]),
        (pa.array([True, None]), ["True", None]),
        (pa.nulls(2), [None, None]),
    ],
)
def test_arrow_columns_follow_the_rule(column, expected):
    assert encode_column("source", pa.chunked_array([column])).to_pylist() == expected


@pytest.mark.parametrize(
    "column", [pa.array([[1]]), pa.array([b"x"]), pa.array([1], pa.date32())]
)
def test_an_arrow_column_of_another_type_is_refused(column):
    line = failure(encode_column, "source", pa.chunked_array([column]))
    assert "names or numbers" in line and str(column.type) in line and "cast" in line


def test_numbers_are_places_among_declared_names():
    names = ("zebra", "ant")
    assert encode_labels("source", [0, 1.0, None, -1], names).to_pylist() == [
        "zebra",
        "ant",
        None,
        None,
    ]
    assert "label 2 has no name among the 2" in failure(
        encode_labels, "source", [0, 2], names
    )


def test_files_of_one_source_may_have_integers_or_floats(tmp_path):
    """Only the file with a gap has floats."""
    for name, labels in (("a", [1, 2]), ("b", [2.0, None])):
        table = pa.table({"image": [encoded(pixels(0))] * 2, "label": labels})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    assert read_rows(DataConfig(source=f"parquet:{tmp_path}")).labels.to_pylist() == [
        "1",
        "2",
        "2",
        None,
    ]


@pytest.fixture
def small_parts(monkeypatch):
    """Every column consists of several parts."""
    monkeypatch.setattr(columns, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(rows, "PART_ROWS", 4)


def test_a_label_that_is_missing_is_filled(small_parts):
    """Kills: a label taken for a truth that is given."""
    truth = make_labels(["z", "a", "z", None, None, "b"])
    labels = make_labels(["b", None, "a", "b", None, "c"])
    assert fill_labels(truth, labels).to_pylist() == ["z", "a", "z", "b", None, "b"]


def test_the_fingerprint_tells_data_sets_apart(small_parts):
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
