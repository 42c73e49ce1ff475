"""A read of many rows is a few calls of Arrow and NumPy: no Python loop over rows."""

import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data.columns import find_rows, make_ids
from uno.data.images import Files
from uno.data.rows import Rows
from uno.data.splits import make_task
from uno.data.tables import read_parquet

MANY = 60_000


def lines_of(function):
    """How often lines of Python were run, of each function; a comprehension runs its
    line for each value.
    """
    found = Counter()

    def trace(frame, event, argument):
        if event == "line":
            found[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return found


def listed(num_rows, folder):
    """Rows of files with ids, some of which are chosen, hashed and looked for."""
    ids = make_ids(f"{i}.png" for i in range(num_rows))
    images = Files.of([], ())
    images = Files(ids.cast("large_binary"), np.ones((num_rows, 2), np.int64))
    codes = (np.arange(num_rows) % 5).astype(np.int32)

    def work():
        rows = Rows(
            ids,
            images,
            pa.DictionaryArray.from_arrays(
                codes, pa.array(list("abcde"), "large_string")
            ),
            np.ones(num_rows, bool),
            "listed",
        )
        task = make_task(
            rows,
            DataConfig(known_classes="first:3"),
        )
        some = task.rows.take(np.arange(0, num_rows, 2))
        assert some.fingerprint != rows.fingerprint and find_rows(
            ids, ["7.png", "none"]
        ) == {"7.png": 7}

    return work


def read(num_rows, folder):
    """A Parquet file with ids, of which some are missing."""
    ids = pa.array([None if i % 7 == 0 else f"{i}" for i in range(num_rows)])
    columns = {
        "id": ids,
        "image": [b"x"] * num_rows,
        "label": [str(i % 3) for i in range(num_rows)],
    }
    pq.write_table(
        pa.table(columns), folder / f"{num_rows}.parquet", row_group_size=num_rows // 4
    )

    def work():
        rows = read_parquet(str(folder / f"{num_rows}.parquet"))
        assert (
            rows.ids.to_pylist()[:2] == ["row-0", "1"] and len(rows.fingerprint) == 64
        )

    return work


@pytest.mark.parametrize("work", [listed, read])
def test_no_loop_over_rows(tmp_path, work):
    """Three times the rows, as many lines of Python. Kills: a loop or a comprehension
    over rows.
    """
    few, many = (lines_of(work(num, tmp_path)) for num in (MANY // 3, MANY))
    assert not {
        name: (few[name], num)
        for name, num in many.items()
        if num > few[name] + MANY // 100
    }
    # what is counted sees one
    assert max(lines_of(lambda: [f"{i}" for i in range(MANY)]).values()) >= MANY
