"""Images by reference: what a row is, what is read for it, and what is remembered."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.data import tables as module
from uno.data.rows import Rows
from uno.data.tables import ParquetImages, read_parquet
from uno.errors import ConfigError

from .builders import encoded, hf_table, pixels, write_hf, write_images


@pytest.fixture
def files(tmp_path):
    """Two files of 10 and 7 rows in row groups of 4; two rows without bytes, one of them with a path."""
    write_images(tmp_path, ["a/x.png"], first_seed=50)
    images = [{"bytes": encoded(pixels(i)), "path": None} for i in range(17)]
    images[5], images[12] = {"bytes": None, "path": "a/x.png"}, {"bytes": None, "path": None}
    for name, part in (("one", slice(0, 10)), ("two", slice(10, 17))):
        num = len(images[part])
        pq.write_table(
            hf_table(images[part], [0] * num, ["c"]), tmp_path / f"{name}.parquet", row_group_size=4
        )
    return tmp_path


def test_rows_are_what_they_are_when_all_is_read(files):
    """By one, by many in any order, after a journey to another process."""
    eager, lazy = (read_parquet(str(files), lazy=lazy) for lazy in (False, True))
    assert isinstance(lazy.images, ParquetImages) and len(lazy.images) == 17
    for name in ("ids", "labels", "class_names"):
        assert getattr(eager, name) == getattr(lazy, name)
    expected = [eager.images[i] for i in range(17)]
    assert [lazy.images[i] for i in range(17)] == expected and expected[12] == b""
    order = np.random.default_rng(0).permutation(17)
    for images in (lazy.images, pickle.loads(pickle.dumps(lazy.images))):
        assert images.fetch(order) == [expected[i] for i in order]
    assert isinstance(expected[5], str) and expected[5].endswith("a/x.png")


def test_a_row_group_is_read_once(files, monkeypatch):
    """Kills: a read per row, a cache without a limit, bytes that travel with the references."""
    read, real = [], ParquetImages._read
    monkeypatch.setattr(ParquetImages, "_read", lambda self, g: read.append(g) or real(self, g))
    images = read_parquet(str(files), lazy=True).images
    assert images.groups(np.arange(17)).tolist() == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 4 + [4] * 3
    images.fetch(np.array([16, 0, 3, 15, 1]))
    assert read == [0, 4]
    read.clear()
    for row in range(17):
        images[row]
    assert read == [0, 1, 2, 3, 4] and images._recent.cache_info().currsize == module.GROUPS_KEPT
    assert len(pickle.dumps(images)) < 2000


def test_the_fingerprint_sees_another_file(files):
    """Without reading images: their row group's size and place."""
    before = read_parquet(str(files), lazy=True).fingerprint
    assert read_parquet(str(files), lazy=True).fingerprint == before
    table = pq.read_table(files / "two.parquet")
    changed = table.set_column(
        0, "img", pa.array([{"bytes": b"another", "path": None}] * 7, table["img"].type)
    )
    pq.write_table(changed, files / "two.parquet", row_group_size=4)
    module._footer.cache_clear()
    assert read_parquet(str(files), lazy=True).fingerprint != before


def test_paths_and_differing_columns(tmp_path):
    """A column of paths is small and read at once; files that disagree are refused."""
    write_images(tmp_path, ["a.png"])
    pq.write_table(pa.table({"path": ["a.png"], "label": ["x"]}), tmp_path / "paths.parquet")
    assert not isinstance(read_parquet(str(tmp_path), lazy=True).images, ParquetImages)
    pq.write_table(pa.table({"img": [encoded(pixels(0))], "label": ["x"]}), tmp_path / "bytes.parquet")
    with pytest.raises(ConfigError, match="name their image column differently"):
        read_parquet(str(tmp_path), lazy=True)


def test_a_file_that_is_gone_is_one_line(tmp_path):
    write_hf(tmp_path, ["x"])
    rows: Rows = read_parquet(str(tmp_path), lazy=True)
    for path in tmp_path.glob("*.parquet"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read row group 0 of .*parquet"):
        rows.images[0]
