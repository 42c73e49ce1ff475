"""Rows that Ray Data maps through a model and writes by partitions."""

import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest

from pipelines.predict import WriterPool, map_through_model, threads_of_actor
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


@pytest.mark.parametrize(
    ("node", "each", "given", "threads"),
    [
        ({"CPU": 48.0}, {"CPU": 1.0}, None, 12),
        ({"CPU": 48.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}, None, 24),
        ({"CPU": 48.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}, 3, 3),
        ({"CPU": 2.0}, {"CPU": 2.0}, None, 48),
    ],
)
def test_threads_of_a_model_are_a_share_of_the_cores_of_its_node(
    monkeypatch, node, each, given, threads
):
    """The driver, on which another number of cores may be, decides nothing."""
    ray = Mock()
    ray.get_runtime_context().get_node_id.return_value = "here"
    ray.nodes.return_value = [
        {"NodeID": "other", "Resources": {"CPU": 1.0}},
        {"NodeID": "here", "Resources": node},
    ]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("uno.runs.hardware.available_cpus", lambda: 48)
    settings = {"compute.num_workers": 4, "compute.threads": given}
    assert threads_of_actor(override(Config(), settings), each) == threads
