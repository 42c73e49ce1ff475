"""Tar shards in the layout of WebDataset, and files that only look like them."""

import gzip
import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.s3 import BUCKET, make_bucket, store
from uno.data import files as filesystem
from uno.data import tar, tar_index
from uno.data.decode import decode_many
from uno.data.files import Storage

from .builders import (
    assert_refused,
    encoded,
    failure,
    pixels,
    read,
    read_task,
    write_images,
)

IMAGE = encoded(pixels(0))
LINK = {"type": tarfile.SYMTYPE, "linkname": "../secret.png"}


def write_tar(path, members, format=tarfile.USTAR_FORMAT) -> str:
    """A shard of (name, content), or (name, content, fields of its header)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, content, *fields in members:
            info = tarfile.TarInfo(name)
            for key, value in {"size": len(content), **dict(*fields)}.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def write_shards(folder, root, size: int = 7, split: str = "train") -> None:
    """The images below ``folder`` in shards below ``root``: the class in KEY.cls."""
    files = sorted(
        folder.rglob("*.png"), key=lambda file: str(file.relative_to(folder))
    )
    for start in range(0, len(files), size):
        members = []
        for file in files[start : start + size]:
            key = str(file.relative_to(folder).with_suffix(""))
            members += [
                (f"{key}.cls", file.parent.name.encode()),
                (f"{key}.png", file.read_bytes()),
            ]
        write_tar(root / f"{split}-{start // size:03}.tar", members)


def read_shards(source, **options):
    return read(f"tar:{source}", **options)


def read_members(folder, members):
    """Write one shard and read it."""
    return read_shards(write_tar(folder / "a.tar", members))


@pytest.fixture
def both(tmp_path):
    """A folder of 30 images of three classes, and the folder of their shards."""
    names = [f"{kind}/{i:02}.png" for kind in ("cat", "dog", "emu") for i in range(10)]
    write_images(tmp_path / "images", names)
    write_shards(tmp_path / "images", tmp_path / "shards")
    return tmp_path / "images", tmp_path / "shards"


def test_the_layout(tmp_path):
    """Kills: a class of another key, a number that is no name, an empty class that is
    one, a member without an image as a row, the last suffix for the whole one, a hidden
    member.
    """
    train = [
        ("./a/1.JPG", IMAGE),
        ("./a/1.cls", b"cat\n"),
        ("a/2.json", b'{"label": 7}'),
        ("a/2.png", IMAGE),
        ("a/3.webp", IMAGE),
        ("a/3.txt", b"words"),
        ("4.bmp", IMAGE),
        ("4.cls", b" "),
        ("4.json", b'{"label": "owl"}'),
        ("5.json", b'{"label": null, "cls": "dog"}'),
        ("5.png", IMAGE),
        ("a/._1.jpg", b"finder"),
        ("v1.0/x.y_1.cls", b"v1.0"),
        ("v1.0/x.y_1.png", IMAGE),
        ("7.png", IMAGE),
        ("7.json", b'{"class": "emu", "size": [1, 2]}'),
    ]
    write_tar(tmp_path / "x-train-0.tar", train)
    write_tar(
        tmp_path / "val" / "0.tar", [("1.png", IMAGE), ("1.cls", "Łódź".encode())]
    )
    rows = read_shards(tmp_path)
    columns = (rows.labels.to_pylist(), rows.split.to_pylist())
    assert dict(zip(rows.ids.to_pylist(), zip(*columns, strict=True), strict=True)) == {
        "x-train-0.tar#a/1": ("cat", "train"),
        "x-train-0.tar#a/2": ("7", "train"),
        "x-train-0.tar#a/3": (None, "train"),
        "x-train-0.tar#4": ("owl", "train"),
        "x-train-0.tar#5": (None, "train"),
        "x-train-0.tar#v1.0/x.y_1": ("v1.0", "train"),
        "x-train-0.tar#7": ("emu", "train"),
        "val/0.tar#1": ("Łódź", "test"),
    }
    assert rows.images.read_images(np.arange(8)) == [IMAGE] * 8
    notes = ("ignored 1 member of the tar files: 1 .txt",)
    assert (rows.notes, rows.warnings) == (notes, ())


CATS = [(f"cat_{i}.png", IMAGE) for i in range(3)]
CAT_LABELS = [(f"cat_{i}.cls", b"cat") for i in range(3)]
OTHER = [("cat_0.json", b'{"label": "other"}')]
BOXES = [("cat_0.json", json.dumps({"boxes": [0] * 10**6}).encode())]


@pytest.mark.parametrize(
    "members",
    [
        CATS + CAT_LABELS,
        CAT_LABELS + CATS,
        CATS[:1] + CAT_LABELS + CATS[1:],
        OTHER + CATS + CAT_LABELS,
        CATS + CAT_LABELS + OTHER,
        CATS + OTHER + CAT_LABELS,
        CAT_LABELS + BOXES + CATS,
    ],
)
def test_a_label_may_be_anywhere_in_the_shard_of_its_image(tmp_path, members):
    """And KEY.cls counts, wherever there is a KEY.json, which is not read after it."""
    expected = read_members(tmp_path, CATS + CAT_LABELS)
    rows = read_members(tmp_path, members)
    assert (rows.ids, rows.fingerprint) == (expected.ids, expected.fingerprint)
    assert rows.labels.to_pylist() == ["cat"] * 3
    assert not rows.warnings


def test_an_image_that_is_a_field_of_a_row_is_left_out_with_a_warning(tmp_path):
    """It is a row of its own where a label has its name."""
    members = [("3.png", IMAGE), ("3.cls", b"cat")]
    members += [("3.mask.png", IMAGE), ("3.edge.png", IMAGE)]
    rows = read_members(tmp_path, members)
    assert rows.ids.to_pylist() == ["a.tar#3"]
    (line,) = rows.warnings
    assert "2 images left out, e.g. '3.mask.png' in a.tar" in line
    rows = read_members(tmp_path, [*members, ("3.edge.cls", b"dog")])
    assert rows.ids.to_pylist() == ["a.tar#3", "a.tar#3.edge"]
    assert rows.labels.to_pylist() == ["cat", "dog"]
    assert "1 image left out" in rows.warnings[0]


@pytest.mark.parametrize(
    ("name", "content", "is_label"),
    [
        ("lost.cls", b"cat", True),
        ("lost.json", b'{"label": "cat"}', True),
        ("1.meta.json", b'{"label": "cat"}', True),
        ("lost.cls", b"\xff", True),
        ("lost.cls", b" ", False),
        ("meta.json", b'{"author": "me"}', False),
        ("meta.json", b"[1]", False),
        ("meta.json", b"{", False),
    ],
)
def test_a_label_without_an_image_is_a_warning(tmp_path, name, content, is_label):
    """And a member that is no label is a note."""
    members = [("1.png", IMAGE), ("1.cls", b"a"), (name, content)]
    rows = read_members(tmp_path, members)
    assert rows.labels.to_pylist() == ["a"]
    lost = f"1 label without an image, e.g. {name!r} in a.tar"
    assert [lost in line for line in rows.warnings] == [True] * is_label
    assert len(rows.notes) == (not is_label)


def test_a_label_in_another_shard_than_its_image_is_a_warning(tmp_path):
    write_tar(tmp_path / "a.tar", CATS)
    write_tar(tmp_path / "b.tar", [*CAT_LABELS, ("3.png", IMAGE)])
    (line,) = read_shards(tmp_path).warnings
    assert "3 labels without an image, e.g. 'cat_0.cls' in b.tar" in line


@pytest.mark.parametrize(
    "format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_names_of_any_length_and_letters(tmp_path, format):
    """Kills: a long name that is cut, a name that is left over for the next member."""
    long = "k" * (90 if format == tarfile.USTAR_FORMAT else 300)
    keys = [f"{long}/{long}", "é", "plain"]
    members = [(f"{key}.png", encoded(pixels(i))) for i, key in enumerate(keys)]
    rows = read_shards(write_tar(tmp_path / "a.tar", members, format))
    assert rows.ids.to_pylist() == [f"a.tar#{key}" for key in keys]
    assert rows.images.read_images(np.array([2, 0])) == [members[2][1], members[0][1]]


@pytest.fixture
def twelve(tmp_path):
    """A folder with shard-000.tar to shard-011.tar of one row each."""
    for i in range(12):
        write_tar(tmp_path / f"shard-{i:03}.tar", [("0.png", IMAGE)])
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("shard-{000..009}.tar", range(10)),
        ("shard-{003,011}.tar", (3, 11)),
        ("shard-*.tar", range(12)),
        ("shard-01*.tar", (10, 11)),
        ("shard-0{00..01}.tar", (0, 1)),
    ],
)
def test_patterns(twelve, pattern, numbers):
    """Kills: a shard too few or too many, widths that are lost, a folder's name in
    the place of a file's.
    """
    rows = read_shards(twelve / pattern)
    assert rows.ids.to_pylist() == [f"shard-{i:03}.tar#0" for i in numbers]


def test_a_pattern_looks_into_its_own_folder_only(tmp_path):
    """Kills: a link elsewhere that ends the command, brackets as a pattern."""
    write_tar(tmp_path / "in" / "data[1]-0.tar", [("0.png", IMAGE)])
    (tmp_path / "in" / "other").mkdir()
    (tmp_path / "in" / "other" / "link").symlink_to(tmp_path)
    rows = read_shards(tmp_path / "in" / "data[1]-*.tar")
    assert rows.ids.to_pylist() == ["data[1]-0.tar#0"]


def test_labels_that_differ_only_in_spelling_are_refused(tmp_path):
    labels = [b'{"label": "cat"}', b'{"label": "cat "}']
    members = [(f"{i}.json", label) for i, label in enumerate(labels)]
    members += [(f"{i}.png", IMAGE) for i in range(2)]
    assert "differ only in spelling" in failure(read_members, tmp_path, members)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shard-{009..012}.tar", "shard-012.tar"),
        ("x*.tar", "no such file"),
        ("{0..9999}{0..9999}.tar", "more than 1,000,000 files"),
        ("none", "no such file or folder"),
        ("empty", "no *.tar files below"),
        ("packed", "b.tar.gz is compressed"),
    ],
)
def test_what_names_no_shard_is_refused(twelve, name, words):
    (twelve / "empty").mkdir()
    (twelve / "packed").mkdir()
    (twelve / "packed" / "b.tar.gz").touch()
    assert words in failure(read_shards, twelve / name)


def test_the_rows_of_a_folder(both):
    """Kills: another order, pixels of a neighbor, a split or class that is lost."""
    folder, shards = read(f"folder:{both[0]}"), read_shards(both[1])
    keys = [name.partition("#")[2] for name in shards.ids.to_pylist()]
    assert keys == [name.removesuffix(".png") for name in folder.ids.to_pylist()]
    assert shards.labels.to_pylist() == folder.labels.to_pylist()
    assert shards.split == folder.split
    decoded, reasons = decode_many(shards.images, 8)
    assert (decoded == decode_many(folder.images, 8)[0]).all()
    assert not any(reasons)
    order = np.random.default_rng(0).permutation(30)
    expected = [shards.images[i] for i in order]
    for images in (shards.images, pickle.loads(pickle.dumps(shards.images))):
        assert images.read_images(order) == expected


def test_objects_are_read_in_pieces(both, bucket, monkeypatch):
    """From 's3://bucket', served from a folder. Kills: a request for each image, one
    that spans all of a shard, ids that hold the bucket, a pattern of URIs.
    """
    here, there = read_shards(both[1]), read_shards("s3://bucket/shards")
    assert (there.ids, there.fingerprint) == (here.ids, here.fingerprint)
    everything = np.arange(30)
    assert there.images.groups(everything).tolist() == [i // 7 for i in range(30)]
    assert here.images.groups(everything) is None
    expected = here.images.read_images(everything)
    open_file = Mock(wraps=filesystem.open_file)
    monkeypatch.setattr(filesystem, "open_file", open_file)
    assert there.images.read_images(everything) == expected
    assert open_file.call_count == 5
    monkeypatch.setattr(tar, "SPAN_BYTES", 1000)
    again = read_shards("s3://bucket/shards/train-{000..004}.tar")
    assert again.ids == here.ids
    assert again.images.read_images(everything) == expected
    assert len(np.unique(again.images.groups(everything))) > 5
    assert len(read_shards("s3://bucket/shards/train-*4.tar")) == 2


@pytest.fixture
def scanned(monkeypatch, bucket):
    """Names of shards that were scanned since it was cleared. There are three in a
    folder, written long ago, and an empty cache.
    """
    monkeypatch.setenv("UNO_CACHE", str(bucket / "cache"))
    for number in range(3):
        members = [("notes.txt", b"?"), ("lost.cls", b"fox")]
        for i in range(20):
            members.append((f"{i}.png", encoded(pixels(20 * number + i))))
            label = (f"{i}.cls", b"fox") if i % 2 else (f"{i}.json", b'{"label": 7.0}')
            members.append(label)
        path = write_tar(bucket / "shards" / f"train-{number}.tar", members)
        os.utime(path, (1e9 + number, 1e9 + number))
    names, real = [], filesystem.open_binary

    def open_binary(path):
        names.append(path.rpartition("/")[2])
        return real(path)

    monkeypatch.setattr(filesystem, "open_binary", open_binary)
    return names


FOLDER = "s3://bucket/shards"


def facts_of(rows):
    everything = np.arange(len(rows))
    return (
        rows.ids.take(everything),
        rows.labels.take(everything),
        rows.fingerprint,
        rows.notes,
        rows.warnings,
        rows.images.read_images(everything),
    )


@pytest.mark.parametrize(
    "source", [FOLDER, f"{FOLDER}/train-{{0..2}}.tar", "{folder}/shards"]
)
def test_a_second_start_scans_no_shard(scanned, source, tmp_path):
    """The index has what the scan found: keys, places, labels, notes."""
    source = source.replace("{folder}", str(tmp_path))
    first, num_scanned = read_shards(source), len(scanned)
    again = read_shards(source)
    assert len(scanned) == num_scanned == 3
    assert facts_of(again) == facts_of(first)
    assert "3 .txt" in str(again.notes)
    assert "lost.cls" in str(again.warnings)


@pytest.mark.slow
def test_a_second_start_on_s3_gets_no_byte_of_a_shard(monkeypatch, tmp_path):
    """The server's own log says what was asked for."""
    monkeypatch.setenv("UNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tar_index, "SETTLED_NS", 0)
    shard = write_tar(tmp_path / "a.tar", one())
    with store(0) as (variables, log):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        make_bucket()
        Storage(f"s3://{BUCKET}/shards").write("a.tar", Path(shard).read_bytes())
        requests = []
        for _ in range(2):
            log.write_text("")
            read_shards(f"s3://{BUCKET}/shards")
            lines = log.read_text().splitlines()
            requests.append([line for line in lines if line.startswith("GET")])
    first, second = ([r for r in some if r.endswith("a.tar")] for some in requests)
    assert first and not second


def test_only_a_shard_that_has_changed_is_scanned_again(scanned, tmp_path):
    """One that was just written is not trusted either: it may be written again with the
    same size in the same tick of the clock.
    """
    read_shards(FOLDER)
    write_tar(tmp_path / "shards" / "train-1.tar", [("new.png", IMAGE)])
    for _ in range(2):
        scanned.clear()
        again = read_shards(FOLDER)
        assert scanned == ["train-1.tar"]
    assert again.ids.to_pylist()[20] == "train-1.tar#new"
    (tmp_path / "shards" / "train-0.tar").unlink()
    assert len(read_shards(FOLDER)) == 21


def test_labels_and_no_labels_have_their_own_index(scanned):
    expected = facts_of(read_shards(FOLDER))
    without = read_shards(FOLDER, images_only=True)
    assert without.labels.null_count == len(without) == 60
    assert facts_of(read_shards(FOLDER)) == expected


def test_a_damaged_index_is_made_again(scanned, tmp_path, caplog):
    expected, other = facts_of(read_shards(FOLDER)), io.BytesIO()
    index = next(path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    data = index.read_bytes()
    pq.write_table(pa.table({"shard": [0]}), other)
    holes = data[:200] + bytes(100) + data[300:]
    for damaged in (b"", data[:-100], holes, other.getvalue()):
        index.write_bytes(damaged)
        assert facts_of(read_shards(FOLDER)) == expected
        assert index.read_bytes() == data
    assert "index" in caplog.text


def test_a_cache_that_takes_no_file_is_named_and_the_shards_are_read(
    scanned, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNO_CACHE", str(tmp_path / "file" / "cache"))
    assert len(read_shards(FOLDER)) == 60
    assert "index" in caplog.text
    assert f"{tmp_path}/file" in caplog.text


def test_members_that_are_no_files_are_bad_rows(tmp_path):
    """Nothing outside the shard is ever opened. Kills: a link that is followed, a hole
    that is read as bytes, a member behind them that is lost.
    """
    (tmp_path / "secret.png").write_bytes(encoded(pixels(9)))
    sparse = {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.size": "99999999"}}
    members = [
        ("1.png", b"", LINK),
        ("2.png", b"", LINK | {"type": tarfile.LNKTYPE}),
        ("3.png", IMAGE, sparse),
        ("/etc/4.png", IMAGE),
        ("../../5.png", IMAGE),
        ("6.png/", b"", {"type": tarfile.DIRTYPE}),
        ("7.png", b"", {"type": tarfile.FIFOTYPE}),
        ("8.png", IMAGE),
    ]
    rows = read_shards(write_tar(tmp_path / "a.tar", members, tarfile.PAX_FORMAT))
    reasons = decode_many(rows.images, 8)[1]
    assert dict(zip(rows.ids.to_pylist(), reasons, strict=True)) == {
        "a.tar#1": "no image data",
        "a.tar#2": "no image data",
        "a.tar#3": "no image data",
        "a.tar#/etc/4": None,
        "a.tar#../../5": None,
        "a.tar#7": "no image data",
        "a.tar#8": None,
    }
    assert {file.name for file in tmp_path.iterdir()} == {"a.tar", "secret.png"}


def test_cut_off_anywhere(tmp_path):
    """One line, or a row that is listed as bad. Kills: a read beyond the end, a
    whole image lost.
    """
    images = [encoded(pixels(i, 20, 20)) for i in range(3)]
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{i}.png", image) for i, image in enumerate(images)])
    whole = path.read_bytes()
    for size in range(0, 3 * 2048 + 600, 123):
        path.write_bytes(whole[:size])
        if size < 512:
            assert "is not a tar file" in failure(read_shards, path)
            continue
        rows = read_shards(path)
        *before, last = rows.images.read_images(np.arange(len(rows)))
        *complete, cut = images[: len(rows)]
        assert (before, last) == (complete, cut[: len(last)])
        is_noted = rows.notes == ("a.tar is truncated: it ends inside a member",)
        assert last == cut or is_noted


def one(*members):
    """Return an image '1.png' and more members."""
    return [("1.png", IMAGE), *members]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (one(("1.json", b"{")), "'1.json' is not JSON"),
        (one(("1.json", b"[" * 100_000)), "'1.json' is not JSON"),
        (one(("1.json", b"[1]")), "must be an object, not list"),
        (one(("1.json", b'{"label": 1.5}')), "a.tar#1: label 1.5 is not a whole"),
        (one(("1.cls", b"\xff")), "'1.cls' is not UTF-8 text"),
        (one(("1.cls", b"x" * 400)), "a class's name has 400 characters"),
        (one(("1.cls", b"x" * 2**21)), "has 2,097,152 bytes, more than 1,048,576"),
        (one(("1.cls", b"", LINK)), "is a link"),
        ([("1.rgb.png", IMAGE), ("1.cls", b"cat")], "'1.rgb.png'"),
    ],
)
def test_a_label_that_is_refused_is_one_line(tmp_path, members, words):
    """And means nothing where labels are not read."""
    assert words in failure(read_members, tmp_path, members)
    assert len(read_shards(tmp_path / "a.tar", images_only=True)) == 1


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (one(("2.png", b"x"), ("1.png", b"x")), "two images of one key"),
        (one(("1.jpg", b"x")), "two images of one key, '1.png' and '1.jpg'"),
        ([("readme.md", b"x")], "no members KEY.jpg"),
        ([("k" * 2**21 + ".png", b"x")], "more than 1,048,576"),
    ],
)
def test_members_that_are_refused_are_one_line(tmp_path, members, words):
    path = write_tar(tmp_path / "a.tar", members, tarfile.GNU_FORMAT)
    assert words in failure(read_shards, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (gzip.compress, "is compressed (gzip); images are read at their places"),
        (lambda data: np.random.default_rng(0).bytes(5000), "is not a tar file"),
        (lambda data: data[:1024] + b"x" * 1024, "no header at byte"),
    ],
    ids=["gzip", "noise", "damaged"],
)
def test_files_that_are_no_tar(tmp_path, damage, words):
    """Kills: gzip that is unpacked in memory, noise that is a traceback."""
    path = tmp_path / "a.tar"
    write_tar(path, one())
    path.write_bytes(damage(path.read_bytes()))
    assert words in failure(read_shards, path)


def test_a_shard_that_is_gone_when_images_are_read_is_one_line(tmp_path):
    rows = read_members(tmp_path, one())
    (tmp_path / "a.tar").unlink()
    assert "cannot read" in failure(rows.images.read_images, np.arange(1))


@pytest.mark.parametrize("source", ["tar:a.tar", "parquet:."])
def test_images_of_a_relative_path_are_read_in_another_directory(
    tmp_path, tmp_path_factory, monkeypatch, source
):
    write_tar(tmp_path / "a.tar", one())
    pq.write_table(pa.table({"image": [IMAGE]}), tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    travelled = pickle.dumps(read(source).images.reader())
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert pickle.loads(travelled).read_images(np.arange(1)) == [IMAGE]


def test_a_shard_whose_folders_are_the_classes_is_refused_with_a_way_out(tmp_path):
    members = [("cat/1.png", IMAGE), ("dog/2.png", IMAGE)]
    facts = ["no image has a label", "KEY.cls", "--labeled"]
    assert_refused(facts, read_task, write_tar(tmp_path / "t.tar", members))
