"""Rows that are only to be predicted: labels are not read, and images in order."""

from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.data.images import evenly_spaced

from . import builders
from .builders import write_images

read = partial(builders.read, images_only=True)


def all_of(rows, size: int = 3):
    """(id, image) of every row, read in order, ``size`` images at a time."""
    parts = [some.read_images(np.arange(len(some))) for some in rows.images.split(size)]
    assert all(len(part) == size for part in parts[:-1])
    return list(zip(rows.ids.to_pylist(), chain.from_iterable(parts), strict=True))


@pytest.mark.parametrize("has_ids", [False, True])
def test_tables_are_read_where_rows_are_wanted(tmp_path, monkeypatch, has_ids):
    """Kills: rows of another row group or file, ids counted anew in each group, a
    blank id left blank.
    """
    monkeypatch.setattr("uno.data.parquet.READ_ROWS", 2)
    for number, num in enumerate((5, 11, 1)):
        columns = {"image": [f"{number}.parquet {i}".encode() for i in range(num)]}
        if has_ids:
            columns["id"] = [f"{number}-{i}" if i != 4 else None for i in range(num)]
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=4)
    rows = read(f"parquet:{tmp_path}")
    images = [rows.images[i] for i in range(17)]
    expected = list(zip(rows.ids.to_pylist(), images, strict=True))
    assert images[6] == b"1.parquet 1" and len(set(rows.ids.to_pylist())) == 17
    for size in (17, 3, 1):
        assert all_of(rows, size) == expected
    some = evenly_spaced(5, 17)
    for chosen in (some, some[::-1]):
        assert all_of(rows.take(chosen), 2) == [expected[i] for i in chosen]


def test_paths_in_a_table(tmp_path):
    """Kills: a path outside the folder, one refused where others are."""
    write_images(tmp_path, ["a.png", "sub/b.png"], 0)
    names = ["a.png", "sub/b.png", None, "gone.png"]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"path": names, "label": [1.5] * 4}), path)
    paths = [name and str(tmp_path / name) for name in names]
    rows = read(path)
    assert [image for _, image in all_of(rows)] == [path or "" for path in paths]
    assert rows.images.paths(np.arange(4)) == paths


def test_all_images_below_a_folder_are_read(tmp_path):
    """Kills: an order of directories, not of paths."""
    names = ["a-b/x.png", "a.png", "a/b/c.png", "a/x.png", "a0.png", "b/y.png"]
    write_images(tmp_path, [*names, ".hidden/no.png"], 0)
    rows = read(tmp_path)
    assert all_of(rows) == [(name, str(tmp_path / name)) for name in names]
