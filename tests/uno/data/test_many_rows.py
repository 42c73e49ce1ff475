"""A read of many rows is a few calls of Arrow and NumPy: no Python loop over rows."""

import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from uno.config import DataConfig
from uno.data.columns import find_rows
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


def read(num_rows, folder):
    """Return a function that reads a Parquet file with ids, of which some are missing,
    chooses rows and makes their task.
    """
    columns = {
        "id": pa.array([None if i % 7 == 0 else f"{i}" for i in range(num_rows)]),
        "image": [b"x"] * num_rows,
        "label": [str(i % 3) for i in range(num_rows)],
    }
    path = str(folder / f"{num_rows}.parquet")
    pq.write_table(pa.table(columns), path, row_group_size=num_rows // 4)

    def work():
        rows = read_parquet(path)
        task = make_task(rows, DataConfig(known_classes="first:2"))
        some = task.rows.take(np.arange(0, num_rows, 2))
        assert some.fingerprint != rows.fingerprint
        assert find_rows(rows.ids, ["8", "none"]) == {"8": 8}

    return work


def test_no_loop_over_rows(tmp_path):
    """Three times the rows, as many lines of Python. Kills: a loop or a comprehension
    over rows.
    """
    few, many = (lines_of(read(num, tmp_path)) for num in (MANY // 3, MANY))
    assert not {
        name: (few[name], num)
        for name, num in many.items()
        if num > few[name] + MANY // 100
    }
    # what is counted sees one
    assert max(lines_of(lambda: [f"{i}" for i in range(MANY)]).values()) >= MANY
