"""What is only to be predicted: every row once, in order, in batches that do not
depend on partitions.
"""

import os
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data.files import files_below
from uno.data.images import path_of
from uno.data.inputs import (
    EvenSample,
    ImageFolder,
    batch_sizes,
    chunk_rows,
    open_inputs,
    partition_rows,
)
from uno.data.sources import read_images, read_rows

from .builders import failure, write_images


def all_of(inputs, num_rows: int = 7, sizes: int = 3):
    """(id, image) of every row, read in partitions of ``num_rows``, some at a time."""
    numbers = [
        np.arange(i, min(i + num_rows, len(inputs)))
        for i in range(0, len(inputs), num_rows)
    ]
    found = []
    for rows, part in zip(numbers, inputs.parts(numbers), strict=True):
        chunks = [len(rows[i : i + sizes]) for i in range(0, len(rows), sizes)]
        for ids, images in inputs.read(part, chunks):
            found += zip(
                ids.to_pylist(), images.read_images(np.arange(len(ids))), strict=True
            )
    return found


def write_table(path, num: int, groups: int, **columns) -> None:
    path.parent.mkdir(exist_ok=True)
    images = pa.array([f"{path.name} {i}".encode() for i in range(num)])
    pq.write_table(pa.table({"image": images, **columns}), path, row_group_size=groups)


@pytest.mark.parametrize(
    ("num_rows", "batch_rows"), [(1, 256), (512, 256), (3000, 111), (3000, 512)]
)
def test_batches_do_not_depend_on_partitions(num_rows, batch_rows):
    """Kills: a batch across groups, rows lost at the end."""
    whole = np.cumsum(batch_sizes(0, num_rows, batch_rows))
    assert whole[-1] == num_rows
    assert max(np.diff(whole, prepend=0)) <= batch_rows and {
        *range(512, num_rows, 512)
    } <= {*whole.tolist()}
    for part in (512, 1536):
        ends = [
            start + end
            for start in range(0, num_rows, part)
            for end in np.cumsum(
                batch_sizes(start, min(part, num_rows - start), batch_rows)
            ).tolist()
        ]
        assert ends == whole.tolist()


@pytest.mark.parametrize("num_groups", [1, 5, 6, 32])
@pytest.mark.parametrize("max_rows", [1, 111, 445, 512, 1600, 10**6])
def test_chunks_divide_a_partition_and_hold_whole_batches(num_groups, max_rows):
    """Ray gives a model on a GPU batches of one size only. Kills: a chunk that ends
    inside a batch.
    """
    rows = chunk_rows(512 * num_groups, max_rows)
    assert rows <= max_rows and 512 * num_groups % rows == 0
    assert 2 * rows > min(max_rows, 512)
    batch_rows = min(256, 2 ** (max_rows.bit_length() - 1))
    ends = {*np.cumsum(batch_sizes(0, 512 * num_groups, batch_rows)).tolist()}
    assert {*range(rows, 512 * num_groups + 1, rows)} <= ends


def test_partitions_grow_with_the_rows_up_to_a_limit():
    """Few files of many rows, many tasks of few; whole groups always."""
    sizes = [partition_rows(num) for num in (0, 1, 10**5, 10**6, 10**7, 10**9)]
    assert (
        sizes[:3] == [512] * 3
        and all(a <= b for a, b in pairwise(sizes))
        and sizes[-1] == 16_384
    )
    assert all(size % 512 == 0 for size in sizes) and 10**6 / sizes[3] >= 256


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
    expected = read_rows(DataConfig(source=f"parquet:{tmp_path}/in"))
    expected = list(
        zip(expected.ids, (expected.images[i] for i in range(17)), strict=True)
    )
    inputs = open_inputs(DataConfig(source=f"parquet:{tmp_path}/in"))
    assert len(inputs) == 17
    for num_rows, sizes in ((17, 17), (7, 3), (1, 1), (4, 5)):
        assert all_of(inputs, num_rows, sizes) == expected
    some = EvenSample(inputs, 5)
    assert len(some) == 5 and all_of(some, 2) == [
        expected[i * 17 // 5] for i in range(5)
    ]


def test_the_fingerprint_of_a_table_is_of_its_footers(tmp_path):
    """Kills: one for all tables of equal length, one that a moved table loses."""
    prints = []
    for folder, num in (("a", 6), ("b", 6), ("c", 7)):
        write_table(tmp_path / folder / "0.parquet", num, 3)
        prints.append(
            open_inputs(DataConfig(source=str(tmp_path / folder))).fingerprint
        )
    write_table(tmp_path / "d" / "0.parquet", 6, 3, id=pa.array(list("abcdef")))
    prints.append(open_inputs(DataConfig(source=str(tmp_path / "d"))).fingerprint)
    assert prints[0] == prints[1] and len({*prints}) == 3


def test_paths_in_a_table(tmp_path):
    """Read with the rows they are in. Kills: a path outside the folder, one refused
    where others are.
    """
    write_images(tmp_path, ["a.png", "sub/b.png"], 0)
    paths = ["a.png", "sub/b.png", None, "gone.png"]
    pq.write_table(pa.table({"path": paths}), tmp_path / "t.parquet")
    found = all_of(open_inputs(DataConfig(source=str(tmp_path / "t.parquet"))))
    full = [str(tmp_path / name) for name in ("a.png", "sub/b.png", "gone.png")]
    assert [image for _, image in found] == [*full[:2], "", full[2]]
    assert [path_of(image) for _, image in found] == [*full[:2], None, full[2]]
    pq.write_table(
        pa.table({"path": ["a.png"] * 100 + ["../x.png"]}), tmp_path / "t.parquet"
    )
    inputs = open_inputs(DataConfig(source=str(tmp_path / "t.parquet")))
    assert "'../x.png' is outside the folder" in failure(all_of, inputs)
    for values, words in (
        (["gone.png"], "none of its 1 images"),
        ([3], "images must be bytes, paths"),
    ):
        pq.write_table(pa.table({"path": values}), tmp_path / "t.parquet")
        assert words in failure(
            open_inputs, DataConfig(source=str(tmp_path / "t.parquet"))
        )


def test_a_folder_is_listed_in_order_twice(tmp_path):
    """Kills: an order of directories, not of paths; a whole listing in memory; files
    that came meanwhile.
    """
    names = [
        "a-b/x.png",
        "a.png",
        "a/b/c.png",
        "a/x.png",
        "a0.png",
        "b/y.png",
        "b/z/z.png",
        "c.png",
    ]
    write_images(tmp_path, names, 0)
    (tmp_path / ".hidden").mkdir()
    write_images(tmp_path, [".hidden/no.png"], 0)
    os.symlink(tmp_path / "b", tmp_path / "again")
    found = [file.relative for file in files_below(str(tmp_path))]
    assert found == sorted(found) and [n for n in found if "again" not in n] == [
        n for n in names if not n.startswith("b/")
    ]  # the directory is walked once, under the name that comes first
    os.unlink(tmp_path / "again")
    (tmp_path / "photo.heic").write_bytes(b"x")
    rows, inputs = read_images(str(tmp_path)), ImageFolder(str(tmp_path))
    assert (
        rows.ids == names
        and rows.warnings == inputs.warnings == EvenSample(inputs, 3).warnings
    )
    assert (
        "1 image left out" in inputs.warnings[0]
        and "'photo.heic'" in inputs.warnings[0]
    )
    assert all_of(inputs) == list(
        zip(names, (str(tmp_path / name) for name in names), strict=True)
    )
    assert [name for name, _ in all_of(EvenSample(inputs, 3), 2)] == [
        names[i * 8 // 3] for i in range(3)
    ]
    (tmp_path / "b" / "new.png").write_bytes(b"")
    assert "have changed meanwhile" in failure(all_of, inputs)
    (tmp_path / "empty").mkdir()
    assert "no images below" in failure(ImageFolder, str(tmp_path / "empty"))


def test_directories_are_listed_as_they_are_wanted(tmp_path, monkeypatch):
    """The first file comes before the last directory is listed. Kills: all listed,
    then sorted.
    """
    write_images(tmp_path, [f"{i:03}/a.png" for i in range(60)], 0)
    listed, scandir = [], os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda path: listed.append(path) or scandir(path)
    )
    files = files_below(str(tmp_path))
    assert next(files).relative == "000/a.png" and len(listed) < 30
    assert len(list(files)) == 59 and len(listed) == 61
