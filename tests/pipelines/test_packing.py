"""Shards on Ray: what a task gets and what it stores."""

import numpy as np
import pytest

from pipelines import cli, commands
from pipelines.pack import write_shard
from tests.uno.data.builders import write_images
from uno.data.columns import make_ids, make_labels
from uno.data.files import Storage
from uno.data.images import Files, InMemory, to_columns
from uno.data.pack import ShardRows, store_shard
from uno.data.rows import Rows


def test_a_task_stores_what_this_process_stores(tmp_path):
    """Through the columns that travel. Kills: row groups joined, labels shifted, a bad
    row without its reason, pixels that lost their shape, truth where there is none,
    images of the first rows.
    """
    names = [f"{i}.png" for i in range(6)]
    write_images(tmp_path, names)
    (tmp_path / "3.png").write_bytes(b"no image")
    files = Files.of([str(tmp_path / name) for name in names], [(-1, -1)] * 6)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 6, 3), dtype=np.uint8)
    labels, truth = ("b", None, "a", "b", None, "a"), ("c", None, None, "d", None, None)
    for images, classes, true, num_bad in (
        (files, ("b", "a"), None, 1),
        (InMemory(pixels), (), truth, 0),
    ):
        given = None if true is None else make_labels(true)
        facts = make_ids(names), images, make_labels(labels), np.arange(6) != 2
        rows = Rows(*facts, "six", classes, ("b",), eval_labels=given)
        shard = ShardRows(
            "train-00000-of-00001.parquet", np.array([2, 3]), np.array([5, 0, 3, 1, 2])
        )
        here, there = Storage(str(tmp_path / "a")), tmp_path / "b"
        expected = store_shard(here, rows, shard, images.read_images(shard.rows), 2)
        item = shard, to_columns(images, shard.rows)
        assert write_shard(str(there), rows, images.reader(), item) == expected
        assert [row["id"] for row in expected.bad] == ["3.png"] * num_bad
        assert (there / shard.name).read_bytes() == here.read(shard.name)


@pytest.mark.ray
@pytest.mark.slow
def test_ray_packs_the_same_shards(tmp_path, ray_cluster, capsys):
    """``uno data pack`` of folders with a damaged image and of the digits. Kills:
    shards of other rows, lost reasons, a file more or less.
    """
    write_images(
        tmp_path / "in", [f"{kind}/{i}.png" for kind in "ab" for i in range(20)]
    )
    (tmp_path / "in" / "a" / "3.png").write_bytes(b"no image")
    for source, name in ((str(tmp_path / "in"), "files"), ("digits", "pixels")):
        for place, more in (("here", []), ("ray", ["--workers", "2"])):
            words = [
                "pack",
                "--data",
                source,
                "--output",
                str(tmp_path / name / place),
                *more,
            ]
            assert cli.run_guarded(commands.data, words) == 0
        here, there = (
            Storage(str(tmp_path / name / place)) for place in ("here", "ray")
        )
        assert here.list() == there.list() and len(here.list()) > 1
        assert all(here.read(file) == there.read(file) for file in here.list())
    assert "40 images, 39 packed, 1 bad" in capsys.readouterr().out
