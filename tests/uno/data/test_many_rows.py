"""What is said of many rows is arrays: no loop of Python over rows, and few bytes a
row.
"""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipelines.small import ROOT
from tests.uno.data import many_rows
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


def set_up(num_rows, folder):
    """On the driver and on a rank."""
    folder.mkdir()
    many_rows.store_parts(many_rows.prepare(num_rows, 64), folder)
    many_rows.train_on_rank(num_rows, 64, folder)


def listed(num_rows):
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
            many_rows.config_of(1).data.model_copy(update={"known_classes": "first:3"}),
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


@pytest.mark.parametrize("work", ["set_up", "listed", "read"])
def test_no_loop_over_rows(tmp_path, work):
    """Three times the rows, as many lines of Python. Kills: a loop or a comprehension
    over rows anywhere in the set-up of a run, on the driver or a rank.
    """
    if work == "set_up":
        run = lambda num: lambda: set_up(num, tmp_path / str(num))  # noqa: E731
        set_up(1000, tmp_path / "warm")
    else:
        run = {"listed": listed, "read": lambda num: read(num, tmp_path)}[work]
    few, many = (lines_of(run(num)) for num in (MANY // 3, MANY))
    assert not {
        name: (few[name], num)
        for name, num in many.items()
        if num > few[name] + MANY // 100
    }
    # what is counted sees one
    assert max(lines_of(lambda: [f"{i}" for i in range(MANY)]).values()) >= MANY


@pytest.mark.release
def test_bytes_a_row():
    """Of rows beyond the first million. Kills: another array of 8 bytes a row on a
    rank.
    """
    few, many = 10**6, 4 * 10**6
    command = [sys.executable, "-m", "tests.uno.data.many_rows", str(few), str(many)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    # Measured: 40 and 30. Peaks of memory differ by 1 to 2 bytes a row from run to run.
    for part, most in (("rank", 44), ("driver", 80)):
        first, second = (one[part] * one["rows"] for one in found)
        assert (second - first) / (many - few) < most, part
