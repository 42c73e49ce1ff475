"""Ray Data cuts what threads cut, in the same order, and a streamed run is one run however it is executed."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipelines import cli, inference, streaming
from tests.pipelines.small import SMALL, assert_same_weights, lines_of, write_images
from uno.config import Config, override
from uno.data.decode import decode_many
from uno.data.files import Storage
from uno.data.pack import pack
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.data.stream import Feed, cut_here, streaming_set
from uno.data.tables import ParquetImages
from uno.errors import ConfigError
from uno.presets import preset
from uno.runs import run

BROKEN = (3, 8, 14)
STREAMING = [*SMALL, "--data.ingest", "streaming"]


def feed_of(config, train, rank=0, world_size=1, first=0, last=4):
    plan = run.plans(config, train.num_labeled, train.num_unlabeled, world_size)[run.DISCOVER]
    return Feed(config, train, plan, rank, world_size, first, last)


def joined(parts):
    """All pixels and reasons of a line."""
    parts = list(parts)
    return np.concatenate([part.pixels for part in parts]), [text for part in parts for text in part.reasons]


def folder_source(tmp_path):
    """Three classes, some images broken."""
    folder = write_images(tmp_path / "images", {"cat": 20, "dog": 20, "emu": 30}, size=11)
    for i in BROKEN:
        (folder / "dog" / f"{i}.png").write_text("not an image")
    return f"folder:{folder}"


def packed_source(tmp_path):
    rows = read_rows(override(Config(), {"data.source": folder_source(tmp_path)}).data)
    pack(rows, np.array([label != "emu" for label in rows.labels]), Storage(str(tmp_path / "out")), 4000, 1)
    return f"parquet:{tmp_path / 'out'}"


def config_of(source):
    values = {
        "data.source": source, "data.known_classes": "cat,dog", "data.ingest": "streaming",
        "data.store_size": 8, "data.composition": "paired", "train.batch_size": 12,
        "augment.large.size": 8, "augment.large.crop": "resized",
        "augment.small.num_views": 1, "augment.small.size": 6,
    }  # fmt: skip
    return override(preset("custom"), values)


@pytest.mark.ray
@pytest.mark.parametrize("make", [lambda _: "digits", folder_source, packed_source])
def test_ray_cuts_what_threads_cut(ray_cluster, tmp_path, monkeypatch, make):
    """Bit for bit, over several spans, blocks and parts of a block, for paths, arrays and Parquet, on both of
    two workers, from the beginning and from the middle of an epoch.
    Kills: blocks in the order of completion, a span that is lost, parts cut out of step.
    """
    monkeypatch.setattr("uno.data.stream.PART_ROWS", 5)
    monkeypatch.setattr("uno.data.stream.MAX_WINDOW_ROWS", 8)
    monkeypatch.setattr(streaming, "MIN_SPAN_PARTS", 8)
    monkeypatch.setattr(streaming, "SPAN_PARTS_PER_CPU", 0)
    config = config_of(make(tmp_path))
    if config.data.source == "digits":
        config = override(config, {"data.known_classes": "first:5", "data.limit": 100})
    task = make_task(read_rows(config.data), config.data)
    train = streaming_set(config, task, Storage(str(tmp_path / "run")))
    assert isinstance(train.images, ParquetImages) == config.data.source.startswith("parquet")
    cut = streaming.cut_on_ray(ray_cluster, 2, 0.5)
    seen = []
    for rank in (0, 1):
        feed = feed_of(config, train, rank, 2, last=12)
        parts = list(cut(feed))
        assert len(parts) >= 12 * 6 / 5  # they leave a task one by one
        pixels, reasons = joined(parts)
        expected, why = joined(cut_here(1)(feed))
        assert (pixels == expected).all() and reasons == why and len(pixels) == 12 * 6
        rest, why = joined(cut(feed_of(config, train, rank, 2, first=7, last=12)))
        assert (rest == expected[7 * 6 :]).all() and why == reasons[7 * 6 :]
        seen += reasons
    assert any(seen) == config.data.source.startswith("folder")

    index = np.arange(len(task.rows))
    decode = streaming.decode_on_ray(ray_cluster, train.images, train.index, 8, 2, 0.5)
    lots = list(decode(index[start : start + 9] for start in range(0, len(index), 9)))
    assert np.concatenate([rows for rows, *_ in lots]).tolist() == index.tolist()
    images, reasons = decode_many(task.rows.images, 8, 1)
    assert torch.equal(torch.cat([part for _, part, _ in lots]), images)
    assert [why for *_, part in lots for why in part] == reasons


@pytest.mark.ray
def test_a_damaged_page_is_one_line(ray_cluster, tmp_path):
    """Not the traceback of a Ray task."""
    config = config_of(packed_source(tmp_path))
    train = streaming_set(
        config, make_task(read_rows(config.data), config.data), Storage(str(tmp_path / "run"))
    )
    for path in (tmp_path / "out").glob("train-*.parquet"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with pytest.raises(ConfigError, match="cannot read row group") as caught:
        joined(streaming.cut_on_ray(ray_cluster, 1, 1)(feed_of(config, train, last=6)))
    assert "CRC" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.ray
def test_two_streaming_workers_equal_two_resident_ones(ray_cluster, tmp_path, capsys):
    """Losses, weights and results of a whole run, bit for bit, and no block was spilled."""
    from ray._private.internal_api import memory_summary

    for ingest in ("resident", "streaming"):
        output = str(tmp_path / ingest)
        argv = ["discover", *SMALL, "--workers", "2", "--data.ingest", ingest, "--output", output]
        assert cli.main(argv) == 0
    capsys.readouterr()
    assert lines_of(tmp_path / "streaming") == lines_of(tmp_path / "resident")
    assert_same_weights(tmp_path / "streaming", tmp_path / "resident")
    results = [
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("streaming", "resident")
    ]
    assert results[0] == results[1] and "baseline/kmeans/novel/acc" in results[0]
    address = ray_cluster.get_runtime_context().gcs_address
    assert "Spilled" not in memory_summary(address, stats_only=True)


@pytest.mark.ray
@pytest.mark.slow
def test_a_stopped_streaming_run_goes_on_on_ray(ray_cluster, tmp_path, capsys):
    """From the middle of an epoch, from Parquet; bad rows listed once. Kills: a line that restarts."""
    source = folder_source(tmp_path)
    argv = [
        "discover", *STREAMING[2:], "--preset", "custom", "--data", source, "--known-classes", "cat,dog",
        "--data.store-size", "8", "--augment.large.size", "8", "--batch-size", "12", "--workers", "1",
        "--model.encoder", "resnet_small", "--data.max-bad-fraction", "0.1",
    ]  # fmt: skip
    argv.remove("200")
    argv.remove("--limit")
    assert cli.main([*argv, "--output", str(tmp_path / "whole")]) == 0
    assert cli.main([*argv, "--output", str(tmp_path / "whole0"), "--workers", "0"]) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "whole0")
    bad = [json.loads(x) for x in (tmp_path / "whole" / "bad_samples.jsonl").read_text().splitlines()]
    assert sorted(entry["id"] for entry in bad) == sorted(f"dog/{i}.png" for i in BROKEN)


def test_spans_keep_order_and_overlap():
    """The next span starts while the one before it is read; nothing is lost at the borders."""
    started = []

    def execute(tables):
        started.append(tables[0]["x"][0].as_py())
        yield from tables

    tables = (pa.table({"x": [i]}) for i in range(10))
    results = streaming.in_spans(execute, tables, 4)
    found = [table["x"][0].as_py() for table in itertools.islice(results, 3)]
    while len(started) < 2:  # its thread comes when it comes; the timeout of the test is the limit
        pass
    found += [table["x"][0].as_py() for table in results]
    assert found == list(range(10)) and started == [0, 4, 8]


def test_spans_are_bounded_by_rows():
    """Whatever a block holds: what a span turns into must fit into the object store."""
    tables = (pa.table({"x": range(num)}) for num in (3, 3, 3, 9, 1, 1))
    assert [[len(t) for t in span] for span in streaming._spans(tables, 5)] == [[3, 3], [3, 9], [1, 1]]


def test_pixels_of_one_piece_are_not_copied():
    pixels = np.arange(24, dtype=np.uint8).reshape(6, 4)
    table = streaming._pixel_table(pixels, [None] * 6)
    found = streaming._bytes_of(table["pixels"], 4)
    assert np.shares_memory(found, pixels) and (found == pixels).all()
    assert (streaming._bytes_of(table.slice(2, 3)["pixels"], 4) == pixels[2:5]).all()
    pieces = pa.concat_tables([table.slice(4), table.slice(1, 2)])
    assert (streaming._bytes_of(pieces["pixels"], 4) == pixels[[4, 5, 1, 2]]).all()


def test_rows_of_parquet_travel_as_numbers(tmp_path):
    """To the tasks that decode for predictions. Kills: a whole set of bytes put into the object store."""
    rows = make_task(read_rows(config := config_of(packed_source(tmp_path)).data), config).rows
    index = np.array([3, 60, 7])
    block = inference._block(rows, index)
    assert block.column_names == ["row", "number"]
    found = inference._decode(block, 8, rows.images)
    images, _ = decode_many([rows.images[i] for i in index], 8, 1)
    assert found["image"].to_pylist() == [image.numpy().tobytes() for image in images]


def test_a_run_goes_on_as_it_began(tmp_path, capsys, monkeypatch):
    """auto decides once; another choice for the same run is refused with the key."""
    output = tmp_path / "run"
    argv = ["pretrain", *SMALL, "--workers", "0", "--output", str(output), "--max-steps", "2"]
    monkeypatch.setattr("pipelines.ingest.free_host_bytes", lambda: 1000)
    assert cli.main(argv) == 0
    assert "data: streaming, 76.8 kB decoded, budget 600 bytes (60% of free" in capsys.readouterr().out
    assert "ingest: streaming" in (output / "config.yaml").read_text()
    monkeypatch.setattr("pipelines.ingest.free_host_bytes", lambda: 10**12)
    assert cli.main(argv) == 0
    assert cli.main([*argv, "--data.ingest", "resident"]) == 2
    err = capsys.readouterr().err
    assert "other settings: data.ingest" in err and err.count("\n") == 1
    assert cli.main([*argv, "--fresh"]) == 0
    assert "data: resident, 76.8 kB decoded, budget 600 GB" in capsys.readouterr().out


def test_a_streamed_run_of_parquet(tmp_path, capsys, monkeypatch):
    """Packed digits, end to end without Ray: results, predictions, report; images are never loaded whole."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "pack", "--data", "digits", "--limit", "200", "--output", "out"]) == 0
    assert "400 rows, 400 packed, 0 bad, 2 shards: out" in capsys.readouterr().out
    monkeypatch.setattr("uno.data.tables._images", pytest.fail)
    words = ["--data", "parquet:out", "--known-classes", "first:5", "--output", "run"]
    assert cli.main(["discover", *STREAMING, *words]) == 0
    assert "test/novel/task_agnostic_strict/acc/avg" in json.loads(
        (tmp_path / "run/metrics.json").read_text()
    )
    assert (tmp_path / "run/report.html").exists() and (tmp_path / "run/predictions.parquet").exists()
    assert cli.main(["evaluate", "run"]) == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["data", "pack", "--data", "digits"], "needs --output DIR"),
        (
            ["data", "pack", "--data", "digits", "--output", "x", "--shard-mb", "0"],
            "--shard-mb must be at least 1",
        ),
        (["data", "pack", "--data", "digits", "--output", "x", "--shard-mb", "a"], "--shard-mb"),
        (["data", "unpack"], "unknown action 'unpack'"),
    ],
)
def test_pack_refuses(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
    assert not (tmp_path / "x").exists()
