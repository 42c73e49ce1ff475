"""Packed shards hold the same rows, survive a kill, and say when they are damaged or
incomplete.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from uno.config import Config, override
from uno.data import decode
from uno.data import pack as module
from uno.data.decode import decode_many, ok_mask
from uno.data.files import Storage
from uno.data.pack import pack, store_local
from uno.data.sources import read_rows
from uno.data.splits import labeled_rows, make_task
from uno.errors import StorageError

from .builders import encoded, failure, hf_table, pixels, write_images

KNOWN = {"data.known_classes": "cat,dog"}


@pytest.fixture
def source(tmp_path):
    """A folder of three classes in train/ and test/, 40 PNG files."""
    names = [f"train/{c}/{i}.png" for c in ("cat", "dog", "emu") for i in range(10)]
    names += [f"test/{c}/{i}.png" for c in ("cat", "dog", "emu") for i in range(3)]
    write_images(tmp_path / "images", [*names, "train/cat/10.png"])
    return f"folder:{tmp_path}/images"


def config_of(source, **more):
    return override(Config(), {"data.source": source, **more}).data


def read_packed(folder, **more):
    return read_rows(config_of(f"parquet:{folder}", **more))


def packed(source, output, shard_bytes=1000, **more):
    config = config_of(source, **more)
    rows = read_rows(config)
    labeled = labeled_rows(rows, config) & rows.is_train
    return pack(rows, labeled, Storage(str(output)), shard_bytes, store_local(2))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def by_id(task):
    """What a task says of each id, pixels included."""
    pixels, reasons = decode_many(task.rows.images, 8, 1)
    assert ok_mask(reasons).all()
    raw = [one.tobytes() for one in pixels.numpy()]
    labels = task.labels.tolist(), task.eval_labels.tolist(), task.is_train.tolist()
    facts = zip(*labels, raw, strict=True)
    return dict(zip(task.rows.ids.to_pylist(), facts, strict=True))


@pytest.mark.parametrize(
    "kind", [pytest.param("digits", marks=pytest.mark.release), "folder"]
)
def test_round_trip(tmp_path, source, kind):
    """The same task: ids, labels, truth, split, pixels. Kills: labels of another
    row, lost class order.
    """
    given, more = source, KNOWN
    if kind == "digits":
        given, more = "digits", {"data.known_classes": "first:5"}
    done = packed(given, tmp_path / "out", **more)
    assert done.rows == done.packed and done.bad == 0 and done.shards > 2
    before, after = (
        make_task(read_rows(config_of(rows, **more)), config_of(rows, **more))
        for rows in (given, f"parquet:{tmp_path}/out")
    )
    assert (after.known, after.novel) == (before.known, before.novel)
    assert by_id(after) == by_id(before)
    assert after.rows.ids != before.rows.ids  # shuffled


def test_the_shards_stream_well(tmp_path, source, monkeypatch):
    """No row group holds labeled and unlabeled rows; encoded bytes are untouched."""
    monkeypatch.setattr(module, "GROUP_ROWS", 4)
    packed(source, tmp_path / "out", **KNOWN)
    assert list((tmp_path / "out").glob("test-00000-of-*.parquet"))
    for path in (tmp_path / "out").glob("train-*.parquet"):
        parquet = pq.ParquetFile(path)
        for number in range(parquet.num_row_groups):
            rows = parquet.read_row_group(number).to_pylist()
            assert len(rows) <= 4
            assert len({row["label"] in ("cat", "dog") for row in rows}) == 1
            for row in rows:
                path_of_image = tmp_path / "images" / row["id"]
                assert row["image"] == path_of_image.read_bytes()


def test_a_damaged_page_is_one_line(tmp_path):
    """One flipped bit in an image. Kills: checksums not written, or not verified."""
    packed("digits", tmp_path / "out", shard_bytes=10**9)
    path = tmp_path / "out" / "train-00000-of-00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    images = read_packed(tmp_path / "out").images
    line = failure(images.read_images, np.arange(len(images)))
    assert re.search(r"cannot read row group \d+ of .*CRC", line)


def test_a_pack_with_a_bad_image_and_one_that_was_killed(tmp_path, source, monkeypatch):
    """Finished shards are kept, an unfinished pack is refused, half a file goes, and so
    is a pack whose repair is killed. Kills: duplicates, lost bad rows, two plans in one
    pack, a directory that is blocked by what a kill left of its first file.
    """
    whole, out = tmp_path / "whole", tmp_path / "out"
    (tmp_path / "images/train/dog/3.png").write_bytes(b"no")
    done = packed(source, whole, **KNOWN)
    assert (done.rows, done.packed, done.bad) == (40, 39, 1)
    entry = json.loads((whole / "bad_samples.jsonl").read_text())
    assert entry["id"] == "train/dog/3.png" and "not a readable" in entry["reason"]
    assert "train/dog/3.png" not in read_packed(whole).ids.to_pylist()
    write = Storage.write

    def write_until_killed(self, name, data):
        if name.endswith(".parquet") and len(list(out.glob("*.parquet"))) >= 2:
            raise KeyboardInterrupt
        write(self, name, data)

    out.mkdir()
    (out / ".pack.json.0a1b2c3d").write_text("{")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Storage, "write", write_until_killed)
        packed(source, out, **KNOWN)
    assert "an unfinished pack" in failure(read_packed, out)
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert len(times) == 2
    (out / ".bad_samples.jsonl.0a1b2c3d").write_text("{")
    other = {"data.known_classes": "cat"}
    assert "other data or options" in failure(packed, source, out, **other)
    packed(source, out, **KNOWN)
    assert contents(out) == contents(whole)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    shard = next(iter(times))
    shard.write_bytes(shard.read_bytes()[:-100])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Storage, "write", write_until_killed)
        packed(source, out, **KNOWN)
    assert "an unfinished pack" in failure(read_packed, out)
    packed(source, out, **KNOWN)
    assert contents(out) == contents(whole)


def test_an_image_that_storage_refuses_for_a_moment_is_not_left_out(
    tmp_path, source, monkeypatch
):
    read, refusals = decode.read_bytes, [OSError("AWS Error SLOW_DOWN")]

    def read_bytes(path, max_bytes):
        if path.endswith("dog/3.png") and refusals:
            raise refusals.pop()
        return read(path, max_bytes)

    monkeypatch.setattr(decode, "read_bytes", read_bytes)
    with pytest.raises(StorageError, match="SLOW_DOWN"):
        packed(source, tmp_path / "out")
    assert packed(source, tmp_path / "out").packed == 40


def test_a_pack_of_a_table_keeps_its_classes_and_truth(tmp_path):
    """``eval_label`` may name classes beyond those of ``label``. Kills: truth lost
    without a word, declared classes lost.
    """
    pictures = [{"bytes": encoded(pixels(i)), "path": None} for i in range(6)]
    table = hf_table(pictures, [0, 1, 0, None, None, None], ["cat", "dog"], "image")
    truth = ["cat", "dog", "cat", "fox", "owl", "fox"]
    pq.write_table(table.append_column("eval_label", [truth]), tmp_path / "t.parquet")
    config = config_of(f"parquet:{tmp_path}/t.parquet", **{"data.loading": "streaming"})
    rows = replace(read_rows(config), known=("dog", "cat"))
    output = Storage(str(tmp_path / "out"))
    pack(rows, labeled_rows(rows, config), output, 2000, store_local(1))
    again = read_packed(tmp_path / "out")
    assert again.known == ("dog", "cat")
    assert sorted(again.ids.to_pylist()) == sorted(rows.ids.to_pylist())
    assert sorted(again.eval_labels.to_pylist()) == sorted(truth)
    assert sorted(filter(None, again.labels.to_pylist())) == ["cat", "cat", "dog"]


def test_a_pack_keeps_labels_that_the_metadata_does_not_name(tmp_path):
    """A file of labels may name new classes."""
    pictures = [{"bytes": encoded(pixels(i)), "path": None} for i in range(4)]
    table = hf_table(pictures, [0, 1, 0, None], ["dog", "cat"], "image")
    ids = ["a", "b", "c", "d"]
    pq.write_table(table.append_column("id", [ids]), tmp_path / "t.parquet")
    (tmp_path / "labels.csv").write_text("id,label\na,owl\nd,emu\n")
    source = f"parquet:{tmp_path}/t.parquet"
    packed(source, tmp_path / "out", **{"data.labels": f"{tmp_path}/labels.csv"})
    again = read_packed(tmp_path / "out")
    assert again.class_names == ("dog", "cat", "emu", "owl")
    found = zip(again.ids.to_pylist(), again.labels.to_pylist(), strict=True)
    assert dict(found) == {"a": "owl", "b": "cat", "c": "dog", "d": "emu"}


def test_a_pack_of_other_true_classes_is_another_pack(source, tmp_path):
    rows = read_rows(config_of(source))
    labeled, output = np.zeros(len(rows), bool), Storage(str(tmp_path / "out"))
    pack(rows, labeled, output, 1000, store_local(1))
    for change in ({"eval_labels": rows.labels}, {"known": ("cat",)}):
        other = replace(rows, **change)
        line = failure(pack, other, labeled, output, 1000, store_local(1))
        assert "labels_sha256" in line and "another pack" in line
