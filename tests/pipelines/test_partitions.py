"""Rows that Ray Data maps through a model and writes by partitions."""

import time
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.partitions import WriterPool, map_through_model
from uno.config import Config, override
from uno.data.files import Storage


def decode(block: pa.Table) -> pa.Table:
    return block


class Identity:
    def __init__(self, device: str, threads: int) -> None:
        pass

    def __call__(self, block: pa.Table) -> pa.Table:
        return block


def write_with_another(storage: Storage, number: int, results: pa.Table) -> None:
    """Write a partition as soon as two partitions are being written."""
    storage.write(f"begun-{number}", b"")
    end = time.monotonic() + 60
    while len([name for name in storage.list() if name.startswith("begun")]) < 2:
        assert time.monotonic() < end, "no other partition is written at the same time"
        time.sleep(0.1)
    storage.write(f"part-{number}", str(results["row"].to_pylist()).encode())


@pytest.mark.ray
def test_partitions_are_written_by_several_processes(ray_cluster, tmp_path: Path):
    workers = 2
    config = override(Config(), {"compute.num_workers": workers})
    blocks = [pa.table({"row": range(i, min(i + 8, 21))}) for i in (0, 8, 16)]
    pool = WriterPool(Storage(str(tmp_path)), write_with_another, 8)
    shared = ray_cluster, config, iter(blocks), decode, Identity, (), 4, 8
    numbers = [t["number"].to_pylist() for t in map_through_model(*shared, pool)]
    assert [number for some in numbers for number in some] == [0, 1, 2]
    for number in range(3):
        rows = list(range(8 * number, min(8 * number + 8, 21)))
        assert (tmp_path / f"part-{number}").read_text() == str(rows)
