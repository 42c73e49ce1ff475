"""Rows that are only to be predicted: labels are not read, and images in order."""

from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data.images import evenly_spaced
from uno.data.sources import read_rows

from .builders import failure, write_images


def read(source, **options):
    return read_rows(DataConfig(source=str(source), **options), images_only=True)


def all_of(rows, size: int = 3):
    """(id, image) of every row, read in order, ``size`` images at a time."""
    parts = [some.read_images(np.arange(len(some))) for some in rows.images.split(size)]
    assert all(len(part) == size for part in parts[:-1])
    return list(zip(rows.ids.to_pylist(), chain.from_iterable(parts), strict=True))


def write_table(path, num: int, groups: int, **columns) -> None:
    path.parent.mkdir(exist_ok=True)
    images = pa.array([f"{path.name} {i}".encode() for i in range(num)])
    pq.write_table(pa.table({"image": images, **columns}), path, row_group_size=groups)


@pytest.mark.parametrize("given", [False, True])
def test_tables_are_read_where_rows_are_wanted(tmp_path, monkeypatch, given):
    """Kills: rows of another row group or file, ids counted anew in each group, a
    blank id left blank.
    """
    monkeypatch.setattr("uno.data.tables.READ_ROWS", 2)
    for number, num in enumerate((5, 11, 1)):
        names = pa.array([f"{number}-{i}" if i != 4 else None for i in range(num)])
        write_table(
            tmp_path / "in" / f"{number}.parquet",
            num,
            4,
            **({"id": names} if given else {}),
        )
    rows = read(f"parquet:{tmp_path}/in")
    expected = list(
        zip(rows.ids.to_pylist(), map(rows.images.__getitem__, range(17)), strict=True)
    )
    assert (
        expected[6][1] == b"1.parquet 1" and len({name for name, _ in expected}) == 17
    )
    for size in (17, 3, 1):
        assert all_of(rows, size) == expected
    some = evenly_spaced(5, 17)
    assert all_of(rows.take(some), 2) == [expected[i] for i in some]
    assert all_of(rows.take(some[::-1]), 2) == [expected[i] for i in some[::-1]]


def test_paths_in_a_table(tmp_path):
    """Kills: a path outside the folder, one refused where others are."""
    write_images(tmp_path, ["a.png", "sub/b.png"], 0)
    path = tmp_path / "t.parquet"
    paths = ["a.png", "sub/b.png", None, "gone.png"]
    pq.write_table(pa.table({"path": paths, "label": [1.5] * 4}), path)
    full = [str(tmp_path / name) for name in ("a.png", "sub/b.png", "gone.png")]
    rows = read(path)
    assert [image for _, image in all_of(rows)] == [*full[:2], "", full[2]]
    assert rows.images.paths(np.arange(4)) == [*full[:2], None, full[2]]
    for values, words in (
        (["a.png"] * 100 + ["../x.png"], "'../x.png' is outside the folder"),
        (["gone.png"], "none of its 1 images"),
        ([3], "images must be bytes, paths"),
    ):
        pq.write_table(pa.table({"path": values}), path)
        assert words in failure(read, path)


def test_all_images_below_a_folder_are_read(tmp_path):
    """Kills: an order of directories, not of paths."""
    names = ["a-b/x.png", "a.png", "a/b/c.png", "a/x.png", "a0.png", "b/y.png"]
    write_images(tmp_path, [*names, ".hidden/no.png"], 0)
    (tmp_path / "photo.heic").write_bytes(b"x")
    rows = read(tmp_path)
    assert rows.ids.to_pylist() == names
    assert "1 image left out" in rows.warnings[0] and "photo.heic" in rows.warnings[0]
    assert all_of(rows) == [(name, str(tmp_path / name)) for name in names]
    (tmp_path / "empty").mkdir()
    assert "no images below" in failure(read, tmp_path / "empty")
