"""Packed shards hold the same rows, survive a kill, and say when they are damaged or
incomplete.
"""

import json
import os
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

FEW = {"data.known_classes": "cat,dog"}


def config_of(source, **more):
    return override(Config(), {"data.source": source, **more}).data


def images(folder, broken=False):
    """Three classes in train/ and test/, 40 PNG files."""
    for split, num in (("train", 10), ("test", 3)):
        write_images(
            folder,
            [f"{split}/{c}/{i}.png" for c in ("cat", "dog", "emu") for i in range(num)],
            num,
        )
    write_images(folder, ["train/cat/10.png"], 99)
    if broken:
        (folder / "train" / "dog" / "3.png").write_bytes(b"no")
    return f"folder:{folder}"


def packed(source, output, shard_bytes=1000, **more):
    config = config_of(source, **more)
    rows = read_rows(config)
    labeled = labeled_rows(rows, config) & rows.is_train
    return pack(rows, labeled, Storage(str(output)), shard_bytes, store_local(2))


def by_id(task):
    """What a task says of each id, pixels included."""
    pixels, reasons = decode_many(task.rows.images, 8, 1)
    assert ok_mask(reasons).all()
    raw = [one.tobytes() for one in pixels.numpy()]
    columns = (
        task.labels.tolist(),
        task.eval_labels.tolist(),
        task.is_train.tolist(),
        raw,
    )
    return dict(zip(task.rows.ids.to_pylist(), zip(*columns, strict=True), strict=True))


@pytest.mark.parametrize(
    "source", [pytest.param("digits", marks=pytest.mark.release), "folder"]
)
def test_round_trip(tmp_path, source):
    """The same task: ids, labels, truth, split, pixels. Kills: labels of another
    row, lost class order.
    """
    more = {"data.known_classes": "first:5"} if source == "digits" else FEW
    source = source if source == "digits" else images(tmp_path / "images")
    done = packed(source, tmp_path / "out", **more)
    assert done.rows == done.packed and done.bad == 0 and done.shards > 2
    before = make_task(read_rows(config_of(source, **more)), config_of(source, **more))
    config = config_of(f"parquet:{tmp_path}/out", **more)
    after = make_task(read_rows(config), config)
    assert (after.known, after.novel, after.num_novel) == (
        before.known,
        before.novel,
        before.num_novel,
    )
    assert by_id(after) == by_id(before)
    assert after.rows.ids != before.rows.ids  # shuffled


def test_the_shards_stream_well(tmp_path, monkeypatch):
    """Names, sizes, checksums; no row group holds labeled and unlabeled rows;
    encoded bytes are untouched.
    """
    monkeypatch.setattr(module, "GROUP_ROWS", 4)
    source = images(tmp_path / "images")
    packed(source, tmp_path / "out", **FEW)
    assert list((tmp_path / "out").glob("test-00000-of-*.parquet"))
    kinds = set()
    for path in (tmp_path / "out").glob("train-*.parquet"):
        parquet = pq.ParquetFile(path)
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            kind, *others = {
                label in ("cat", "dog") for label in table["label"].to_pylist()
            }
            kinds.add(kind)
            assert len(table) <= 4 and not others
            for name, image in zip(
                table["id"].to_pylist(), table["image"].to_pylist(), strict=True
            ):
                assert (tmp_path / "images" / name).read_bytes() == image
    assert kinds == {True, False}


def test_a_damaged_page_is_one_line(tmp_path):
    """One flipped bit in an image. Kills: checksums not written, or not verified."""
    packed("digits", tmp_path / "out", shard_bytes=10**9)
    path = tmp_path / "out" / "train-00000-of-00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    rows = read_rows(config_of(f"parquet:{tmp_path}/out"))
    assert re.search(
        r"cannot read row group \d+ of .*CRC",
        failure(rows.images.read_images, np.arange(len(rows))),
    )


def test_a_pack_with_a_bad_image_and_one_that_was_killed(tmp_path, monkeypatch):
    """Finished shards are kept, an unfinished pack is refused, half a file goes. Kills:
    duplicates, lost bad rows, a directory that is blocked by what a kill left of its
    first file.
    """
    source = images(tmp_path / "images", broken=True)
    done = packed(source, tmp_path / "whole", **FEW)
    assert done.packed + done.bad == done.rows and done.bad == 1
    entry = json.loads((tmp_path / "whole" / "bad_samples.jsonl").read_text())
    assert entry["id"] == "train/dog/3.png" and "not a readable" in entry["reason"]
    rows = read_rows(config_of(f"parquet:{tmp_path}/whole"))
    assert len(rows) == done.packed and "train/dog/3.png" not in rows.ids.to_pylist()
    real, written = Storage.write, []

    def dying(self, name, data):
        if name.endswith(".parquet"):
            written.append(name)
            if len(written) == 3:
                raise KeyboardInterrupt
        real(self, name, data)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".pack.json.0a1b2c3d").write_text("{")
    monkeypatch.setattr(Storage, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        packed(source, tmp_path / "out", **FEW)
    monkeypatch.setattr(Storage, "write", real)
    assert "an unfinished pack" in failure(
        read_rows, config_of(f"parquet:{tmp_path}/out")
    )
    times = {
        path.name: path.stat().st_mtime_ns
        for path in (tmp_path / "out").glob("*.parquet")
    }
    assert len(times) == 2
    (tmp_path / "out" / ".bad_samples.jsonl.0a1b2c3d").write_text("{")
    packed(source, tmp_path / "out", **FEW)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        os.listdir(tmp_path / "whole")
    )
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), (
            path.name
        )
    assert all(
        (tmp_path / "out" / name).stat().st_mtime_ns == time
        for name, time in times.items()
    )


def test_an_image_that_storage_refuses_for_a_moment_is_not_left_out(
    tmp_path, monkeypatch
):
    source, output = images(tmp_path / "images"), tmp_path / "packed"
    read, refusals = decode.read_bytes, [OSError("AWS Error SLOW_DOWN")]

    def read_bytes(path, max_bytes):
        if path.endswith("dog/3.png") and refusals:
            raise refusals.pop()
        return read(path, max_bytes)

    monkeypatch.setattr(decode, "read_bytes", read_bytes)
    with pytest.raises(StorageError, match="SLOW_DOWN"):
        packed(source, output)
    assert packed(source, output).packed == 40


def test_truth_keeps_names_that_no_label_has(tmp_path):
    """``eval_label`` may name classes beyond those of ``label``. Kills: truth lost
    without a word.
    """
    pictures = [{"bytes": encoded(pixels(i)), "path": None} for i in range(6)]
    table = hf_table(pictures, [0, 1, 0, None, None, None], ["cat", "dog"], "image")
    truth = ["cat", "dog", "cat", "fox", "owl", "fox"]
    (tmp_path / "in").mkdir()
    pq.write_table(
        table.append_column("eval_label", [truth]), tmp_path / "in" / "train.parquet"
    )
    packed(f"parquet:{tmp_path}/in", tmp_path / "out")
    rows = read_rows(config_of(f"parquet:{tmp_path}/out"))
    assert sorted(rows.eval_labels.to_pylist()) == sorted(truth)
    assert sorted(filter(None, rows.labels.to_pylist())) == ["cat", "cat", "dog"]


def test_a_pack_of_other_true_classes_is_another_pack(tmp_path):
    rows = read_rows(config_of(images(tmp_path / "images")))
    labeled, output = np.zeros(len(rows), bool), Storage(str(tmp_path / "out"))
    pack(rows, labeled, output, 1000, store_local(1))
    for change in ({"eval_labels": rows.labels}, {"known": ("cat",)}):
        other = replace(rows, **change)
        line = failure(pack, other, labeled, output, 1000, store_local(1))
        assert "labels_sha256" in line and "another pack" in line


def test_a_pack_that_is_repaired_is_not_read_meanwhile(tmp_path):
    packed("digits", tmp_path / "out", shard_bytes=10**5)
    victim = next((tmp_path / "out").glob("train-00000-*.parquet"))
    content = victim.read_bytes()
    victim.write_bytes(content[:-100])

    def stop(output, rows, shards):
        raise KeyboardInterrupt

    rows = read_rows(config_of("digits"))
    labeled = labeled_rows(rows, config_of("digits")) & rows.is_train
    with pytest.raises(KeyboardInterrupt):
        pack(rows, labeled, Storage(str(tmp_path / "out")), 10**5, stop)
    assert "an unfinished pack" in failure(
        read_rows, config_of(f"parquet:{tmp_path}/out")
    )
    packed("digits", tmp_path / "out", shard_bytes=10**5)
    assert victim.read_bytes() == content


def test_other_directories_are_refused(tmp_path):
    """Kills: two plans in one pack, rows twice and lost."""
    (tmp_path / "mine" / "notes").mkdir(parents=True)
    assert "is not empty" in failure(packed, "digits", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]
    source, out = images(tmp_path / "images"), tmp_path / "out"
    packed(source, out, **FEW)
    assert "holds another pack" in failure(packed, "digits", out)
    assert "other data or options" in failure(
        packed, source, out, **{"data.known_classes": "cat"}
    )
    shard = next(out.glob("*.parquet"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    packed(source, out, **FEW)
    assert shard.read_bytes() == whole


def test_a_pack_can_be_packed_again(tmp_path):
    """From Parquet, by reference, known classes of the source and all. Kills:
    declared classes lost.
    """
    source = images(tmp_path / "images")
    packed(source, tmp_path / "one", **FEW)
    config = config_of(f"parquet:{tmp_path}/one", **{"data.loading": "streaming"})
    rows = read_rows(config)
    object.__setattr__(rows, "known", ("cat", "dog"))
    pack(
        rows,
        labeled_rows(rows, config),
        Storage(str(tmp_path / "two")),
        2000,
        store_local(1),
    )
    again = read_rows(config_of(f"parquet:{tmp_path}/two"))
    assert again.known == ("cat", "dog") and sorted(again.ids.to_pylist()) == sorted(
        rows.ids.to_pylist()
    )
    assert make_task(again, config_of("x")).known == ["cat", "dog"]
