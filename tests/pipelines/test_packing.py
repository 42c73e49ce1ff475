"""Shards on Ray: what a task gets and what it stores."""

import numpy as np

from pipelines.packing import shard_block, write_shard
from tests.uno.data.builders import write_images
from uno.data.files import Storage
from uno.data.pack import ShardRows, ShardWriter
from uno.data.rows import Files


def test_a_task_stores_what_this_process_stores(tmp_path):
    """Through the block that travels. Kills: row groups joined, labels shifted, a bad row without its reason,
    pixels that lost their shape, truth where there is none.
    """
    names = [f"{i}.png" for i in range(5)]
    write_images(tmp_path, names)
    (tmp_path / "3.png").write_bytes(b"no image")
    files = Files.of([str(tmp_path / name) for name in names], [-1] * 5)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    labels, truth = ["b", None, "a", "b", None], [None, "c", None, None, "d"]
    for images, classes, true, num_bad in ((files, ("b", "a"), None, 1), (pixels, (), truth, 0)):
        shard = ShardRows("train-00000-of-00001.parquet", [2, 3], names, images, labels, ["train"] * 5, true)
        writer, here, there = ShardWriter(classes, ("b",)), Storage(str(tmp_path / "a")), tmp_path / "b"
        expected = writer.write(here, shard, 2)
        found = write_shard(shard_block(shard), str(there), writer, None, true is not None).to_pylist()
        assert found == [{"name": shard.name, "rows": 5, "bad": expected.bad}]
        assert [row["id"] for row in expected.bad] == ["3.png"] * num_bad
        assert (there / shard.name).read_bytes() == here.read(shard.name)
