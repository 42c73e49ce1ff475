"""Ray Data decodes and crops what this process does, in order; a run is one however
it gets images.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipelines import cli, ray_data
from pipelines.ray_data import Cropping, in_order, make_dataset
from tests.pipelines.small import (
    SMALL,
    assert_same_weights,
    refused,
    write_images,
)
from tests.uno.data.builders import encoded
from tests.uno.data.test_tar import write_shards
from tests.uno.small_run import small_config
from uno.config import override
from uno.data import stream
from uno.data.decode import Decoding, decode_many
from uno.data.files import Storage
from uno.data.images import InMemory, from_columns
from uno.data.memory import assemble, eval_sets
from uno.data.pack import pack, store_local
from uno.data.sources import read_digits, read_rows
from uno.data.splits import make_task, train_rows
from uno.data.stream import CropJob, crop_local, streaming_set
from uno.errors import ConfigError
from uno.presets import preset
from uno.runs import run
from uno.session import resources
from uno.session.resources import FreeMemory

BROKEN = (3, 8, 14)
CONFIG = override(
    preset("scratch"),
    {
        "data.known_classes": "cat,dog",
        "data.loading": "streaming",
        "data.stored_size": 8,
        "data.batch_sampling": "balanced",
        "train.batch_size": 12,
        "augment.large.size": 8,
        "augment.large.crop": "resized",
        "augment.small.num_views": 1,
        "augment.small.size": 6,
    },
)


def folder_of(tmp_path):
    """Three classes, some images broken, one with a name that is no UTF-8."""
    counts = {"cat": 20, "dog": 20, "emu": 30}
    folder = write_images(tmp_path / "images", counts, size=11)
    for i in BROKEN:
        (folder / "dog" / f"{i}.png").write_text("not an image")
    os.rename(folder / "cat" / "5.png", folder / "cat" / os.fsdecode(b"caf\xe9.png"))
    return folder


def cropper(ray, task, tmp_path, processes=1):
    """The training set of a task, and a function that crops its images on Ray."""
    train = streaming_set(CONFIG, task, Storage(str(tmp_path / "run")))
    source = ray.put(train.source.images)
    return train, ray_data.crop_on_ray(ray, source, Cropping(processes, 2**26))


def task_of(source):
    data = override(CONFIG, {"data.source": source}).data
    return make_task(read_rows(data), data)


def mixed_task(tmp_path):
    """A relative path, the bytes of a file, some truncated and some empty, and pixels
    of different sizes, in turn.
    """
    generator, folder = np.random.default_rng(0), folder_of(tmp_path)
    os.chdir(tmp_path)
    task = task_of(f"folder:{folder.name}")
    images = [os.path.relpath(task.rows.images[i]) for i in range(len(task.rows))]
    images[1::3] = [Path(path).read_bytes() for path in images[1::3]]
    images[2::3] = [
        generator.integers(0, 256, (6 + i % 5, 8, 3), dtype=np.uint8)
        for i in range(len(images[2::3]))
    ]
    images[4], images[40] = images[4][:60], b""
    return replace(task, rows=replace(task.rows, images=images))


def parquet_task(tmp_path):
    """Row groups of a few images."""
    rows = task_of(f"folder:{folder_of(tmp_path)}").rows
    labeled = np.array([label != "emu" for label in rows.labels.to_pylist()])
    pack(rows, labeled, Storage(str(tmp_path / "out")), 4000, store_local(1))
    return task_of(f"parquet:{tmp_path / 'out'}")


def tar_task(tmp_path):
    """Shards of a few images, each read at its place."""
    write_shards(folder_of(tmp_path), tmp_path / "shards")
    return task_of(f"tar:{tmp_path / 'shards'}")


def job_of(train, rank=0, world_size=1, first=0, last=8):
    plan = run.plans(CONFIG, len(train.labels), train.num_unlabeled, world_size)[
        run.DISCOVER
    ]
    return CropJob(CONFIG, train, plan, rank, world_size, first, last)


def joined(chunks):
    pixels, reasons = zip(*chunks, strict=True)
    return np.concatenate(pixels), [reason for some in reasons for reason in some]


@pytest.mark.ray
@pytest.mark.parametrize(
    "make",
    [
        mixed_task,
        pytest.param(parquet_task, marks=pytest.mark.release),
        pytest.param(tar_task, marks=pytest.mark.release),
    ],
)
def test_ray_data_equals_this_process(ray_cluster, tmp_path, monkeypatch, make):
    """Bit for bit: a resident set; the crops of both of two workers, over several
    executions, blocks and chunks of a block, from the beginning and from the middle of
    an epoch; the rows of an evaluation. Kills: blocks in the order of completion, an
    execution that is lost, chunks out of step.
    """
    for module, name, value in (
        (resources, "ROWS_PER_BLOCK", 8),
        (ray_data, "ROWS_PER_DECODE", 3),
        (ray_data, "EXECUTION_BLOCKS", 1),
        (stream, "CHUNK_ROWS", 5),
        (stream, "MAX_WINDOW_ROWS", 8),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.chdir(tmp_path)
    task = make(tmp_path)
    images, reasons = decode_many(task.rows.images, 8)
    assert any(reasons) == (make != parquet_task)
    for few, num_blocks in ((100, 1), (0, 2)):  # here, and in tasks
        monkeypatch.setattr(ray_data, "FEW_ROWS", few)
        found, why = ray_data.decode_task(ray_cluster, task, 8)
        assert len(found) >= num_blocks and why == reasons
        kept = ray_data.pixels_of(ray_cluster.get(found), 8)
        assert torch.equal(kept[:], images)
        assert torch.equal(kept[[3, 0]], images[[3, 0]])

    train, crop = cropper(ray_cluster, task, tmp_path)
    for rank, first in ((0, 0), (1, 3)):
        chunks = list(crop(job_of(train, rank, 2, first)))
        assert len(chunks) >= (8 - first) * 6 / 5  # they leave a task one by one
        pixels, why = joined(chunks)
        whole, all_reasons = joined(crop_local(job_of(train, rank, 2), 1))
        assert np.array_equal(pixels, whole[first * 6 : 8 * 6])
        assert why == all_reasons[first * 6 :]

    rows, source = np.arange(len(task.rows)), ray_cluster.put(train.source.images)
    decode = ray_data.decode_on_ray(ray_cluster, source, 8, Cropping(1, 2**26))
    found, pixels, why = zip(
        *decode(rows[start : start + 9] for start in rows[::9]), strict=True
    )
    assert np.concatenate(found).tolist() == rows.tolist()
    assert torch.equal(torch.cat(pixels), images)
    assert [reason for some in why for reason in some] == reasons


@pytest.mark.ray
@pytest.mark.release
def test_a_wait_without_progress_is_no_error(ray_cluster, monkeypatch):
    """As for a node that is replaced, for which Ray Data allows half an hour."""
    context = ray_cluster.data.DataContext.get_current()
    monkeypatch.setattr(context, "execution_no_progress_timeout_s", 1)

    def wait(block):
        time.sleep(3)
        return block

    blocks = make_dataset([pa.table({"row": [1]})])
    found = in_order(blocks.map_batches(wait, batch_format="pyarrow"))
    assert [table["row"].to_pylist() for table in found] == [[1]]


@pytest.mark.ray
@pytest.mark.slow
def test_a_damaged_page_is_one_line(ray_cluster, tmp_path):
    """Not the traceback of a Ray task."""
    train, crop = cropper(ray_cluster, parquet_task(tmp_path), tmp_path)
    for path in (tmp_path / "out").glob("train-*.parquet"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot read row group.*CRC") as caught:
        joined(crop(job_of(train)))
    assert "\n" not in str(caught.value)


@pytest.mark.ray
@pytest.mark.slow
def test_an_execution_needs_no_cpu_that_is_free(ray_cluster, tmp_path):
    """All are held, as by the executions of other ranks, which end when this one has
    given its images. Kills: two streamed runs on a cluster, or more processes than fit,
    that wait for each other for ever.
    """
    from ray.util import placement_group, remove_placement_group

    train, crop = cropper(ray_cluster, mixed_task(tmp_path), tmp_path, processes=4)
    alive = [node for node in ray_cluster.nodes() if node["Alive"]]
    cpus = [node["Resources"].get("CPU", 0) for node in alive]
    held = placement_group([{"CPU": num} for num in cpus if num])
    assert held.wait(60)
    try:
        pixels, _ = joined(crop(job_of(train)))
    finally:
        remove_placement_group(held)
    expected, _ = joined(crop_local(job_of(train), 1))
    assert np.array_equal(pixels, expected)


@pytest.mark.ray
@pytest.mark.release
def test_bad_images_of_a_streaming_run_are_listed_once(ray_cluster, tmp_path):
    """And with or without Ray it is one run."""
    options = {
        "--preset": "scratch",
        "--data": f"folder:{folder_of(tmp_path)}",
        "--known-classes": "cat,dog",
        "--limit": "70",
        "--batch-size": "12",
        "--data.stored-size": "8",
        "--data.max-bad-fraction": "0.1",
        "--data.loading": "streaming",
        "--augment.large.size": "8",
        "--model.encoder": "resnet_small",
    }
    argv = [
        "discover",
        *SMALL[2:],
        *(word for pair in options.items() for word in pair),
    ]
    for workers in ("0", "1"):
        output = str(tmp_path / workers)
        assert cli.main([*argv, "--workers", workers, "--output", output]) == 0
    assert_same_weights(tmp_path / "1", tmp_path / "0")
    listed = (tmp_path / "1" / "bad_samples.jsonl").read_text().splitlines()
    bad = [json.loads(line)["id"] for line in listed]
    assert sorted(bad) == sorted(f"dog/{i}.png" for i in BROKEN)


def test_a_path_that_is_not_utf8_travels(tmp_path, monkeypatch):
    """As a full path, whatever directory a task runs in. Kills: names as text."""
    monkeypatch.chdir(tmp_path)
    images = InMemory([os.fsdecode(b"caf\xe9.png"), "s3://bucket/b.png"])
    found = from_columns(ray_data.image_block(images, np.arange(2)), None)
    assert found == [os.fsdecode(bytes(tmp_path) + b"/caf\xe9.png"), images[1]]


@pytest.mark.parametrize("make", [parquet_task, tar_task])
def test_rows_of_shards_travel_as_numbers(tmp_path, make):
    """Kills: a whole set of bytes put into the object store."""
    images = make(tmp_path).rows.images
    block = ray_data.image_block(images, np.array([3, 60, 7]))
    assert block.column_names == ["row", "number"]
    assert block["row"].to_pylist() == [3, 60, 7]
    found = ray_data.decode_block(block, 8, images.reader())
    expected, _ = decode_many([images[i] for i in (3, 60, 7)], 8, 1)
    pixels = ray_data.bytes_of(found["pixels"], 192)
    assert np.array_equal(pixels, expected.flatten(1))


@pytest.mark.parametrize("loading", ["streaming", "memory"])
def test_what_workers_get_holds_no_hidden_label(tmp_path, loading):
    """The rows that all workers read are bit-identical whatever the hidden labels
    are; the truth is not.
    """
    task, config = mixed_task(tmp_path), override(CONFIG, {"data.loading": loading})
    removed = task.eval_labels.copy()
    removed[(task.labels < 0) & task.is_train] = -1
    store, reasons = SimpleNamespace(put=lambda value: value), [None] * len(task.rows)
    given, other = (
        ray_data.shared(store, config, replace(task, eval_labels=truth), reasons)
        for truth in (task.eval_labels, removed)
    )
    assert given["rows"].keys() == train_rows(task).keys()
    for name, values in given["rows"].items():
        assert np.array_equal(values, other["rows"][name]), name
    assert len(given["truth"]["train"][0]) > len(other["truth"]["train"][0])


@pytest.mark.parametrize(
    ("cpus_here", "reserved", "neighbors", "processes"),
    [(2.0, 0.5, 1, 1), (8.0, 1.0, 2, 3), (8.0, 8.0, 1, 7), (1.0, 1.0, 2, 1)],
)
def test_a_rank_crops_on_its_own_node_with_its_share_of_the_cpus(
    cpus_here, reserved, neighbors, processes
):
    ray = Mock()
    ray.get_runtime_context().get_node_id.return_value = "own"
    ray.cluster_resources.return_value = {"object_store_memory": 1e9}
    ray.nodes.return_value = [
        {"NodeID": "other", "Resources": {"CPU": 64.0}},
        {"NodeID": "own", "Resources": {"CPU": cpus_here}},
    ]
    found = ray_data.cropping_of(ray, 4, reserved, neighbors)
    assert found == (processes, pytest.approx(1e8))


def test_executions_follow_each_other_in_order(monkeypatch):
    """The blocks of the next one are stored while one is read, and it starts when that
    has ended: its processes would wait for CPUs otherwise. Kills: rows that are lost at
    the borders.
    """
    stored, running = [], []

    def execute(tables):
        stored.append(tables[0]["x"][0].as_py())
        return results(tables)

    def results(tables):
        assert running == []
        running.append(tables)
        yield from tables
        running.clear()

    monkeypatch.setattr(ray_data, "EXECUTION_BYTES", 4 * 8)  # four rows
    tables = [pa.table({"x": [i]}) for i in range(10)]
    found = ray_data.in_executions(execute, ray_data.grouped(tables))
    first = next(found)
    # its thread comes when it comes; the timeout of the test is the limit
    while len(stored) < 2:
        pass
    assert pa.concat_tables([first, *found])["x"].to_pylist() == [*range(10)]
    assert stored == [0, 4, 8]


def test_an_execution_has_whole_epochs(monkeypatch):
    """Kills: processes that are started for a few blocks; an epoch in two; more images
    in memory than an execution may have; an execution of nothing.
    """
    monkeypatch.setattr(ray_data, "EXECUTION_BLOCKS", 3)
    monkeypatch.setattr(ray_data, "EXECUTION_BYTES", 40)
    parts = lambda *sizes: (pa.table({"x": range(n)}) for n in sizes)  # noqa: E731
    rows = lambda groups: [[len(block) for block in one] for one in groups]  # noqa: E731
    epochs = [parts(2, 2), parts(1, 1, 1), parts(5, 5, 5, 5), parts(7), parts()]
    assert rows(ray_data.whole_epochs(epochs)) == [[2, 2, 1, 1, 1], [5, 5, 5, 5], [7]]
    assert rows(ray_data.grouped(parts(3, 3, 3, 9, 1, 1))) == [[3, 3], [3, 9], [1, 1]]
    assert rows(ray_data.whole_epochs([])) == rows(ray_data.grouped([])) == []


def test_a_run_goes_on_as_it_began(tmp_path, capsys, monkeypatch):
    """auto decides once; another choice for the same run is refused with the key."""
    free = [FreeMemory(1000)]
    monkeypatch.setattr(resources, "free_memory", lambda config: free[-1])
    argv = ["pretrain", *SMALL, "--workers", "0", "--max-steps", "2"]
    argv += ["--output", str(tmp_path / "run")]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "memory: streamed (76.8 kB decoded; budget 600 bytes" in said
    assert "loading: streaming" in (tmp_path / "run" / "config.yaml").read_text()
    free.append(FreeMemory(10**12))
    assert cli.main(argv) == 0
    line = refused(capsys, 2, *argv, "--data.loading", "memory")
    assert "other settings: data.loading" in line
    assert cli.main([*argv, "--overwrite"]) == 0
    assert "budget 600 GB" in capsys.readouterr().out


def test_features_reach_workers(monkeypatch):
    """Kills: features of other rows, and truth of the random views."""
    fake = SimpleNamespace(put=lambda value: value, get=lambda value: value)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace())
    features = torch.rand(400, 3, 6, generator=torch.Generator().manual_seed(0))
    config = small_config(
        model__finetune="none",
        augment__small__num_views=0,
        data__loading="memory",
        data__limit=None,
    )
    task = make_task(read_digits().take(np.arange(400)), config.data)
    loop = ray_data.shared(fake, config, task, [None] * 400, features)
    train, truth = ray_data.worker_sets(config, loop, Storage("."))
    expected = assemble(task, features, np.ones(400, bool))
    assert torch.equal(train.labeled_images[:], expected.labeled_images[:])
    assert torch.equal(train.unlabeled_images[:], expected.unlabeled_images[:])
    for split, own in eval_sets(task, features, np.ones(400, bool)).items():
        found = truth()[split]
        assert torch.equal(found.images[found.index], own.images[own.index])


def test_a_task_decodes_gray_images_by_the_range_of_the_run():
    values = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    block = ray_data.image_block(InMemory([encoded(values)]), np.arange(1))
    how = Decoding(value_range=(1000, 3000))
    found = ray_data.decode_block(block, 8, None, how)["pixels"]
    gray = (values.clip(1000, 3000).astype(int) - 1000) * 255 // 2000
    expected = np.tile(gray.ravel(), 3)  # three equal channels
    assert np.array_equal(ray_data.bytes_of(found, 3 * 8 * 8)[0], expected)
