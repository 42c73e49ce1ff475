"""Tar shards in the layout of WebDataset, and files that only look like them."""

import gzip
import io
import json
import os
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data import files as filesystem
from uno.data import tar
from uno.data.decode import decode_many
from uno.data.rows import ReadOptions
from uno.data.sources import read_rows, recognize
from uno.data.splits import make_task
from uno.data.tar import read_tar
from uno.errors import ConfigError

from .builders import encoded, failure, pixels, write_images


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    archive.addfile(info, io.BytesIO(content))


def write_tar(path, members, format=tarfile.USTAR_FORMAT) -> str:
    """A shard of (name, content), or (name, content, fields of its header)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, content, *fields in members:
            add(archive, name, content, **(fields[0] if fields else {}))
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


def read(source, **more):
    return read_rows(DataConfig(source=str(source), **more))


@pytest.fixture
def both(tmp_path):
    """(folder source, tar source) of the same 30 images of three classes."""
    names = [f"{kind}/{i:02}.png" for kind in ("cat", "dog", "emu") for i in range(10)]
    write_images(tmp_path / "images", names)
    write_shards(tmp_path / "images", tmp_path / "shards")
    return f"folder:{tmp_path / 'images'}", f"tar:{tmp_path / 'shards'}"


def test_the_layout(tmp_path):
    """Kills: a class of another key, a number that is no name, an empty class that is
    one, a member without an image as a row, the last suffix for the whole one, a hidden
    member.
    """
    image = encoded(pixels(0))
    write_tar(
        tmp_path / "x-train-0.tar",
        [
            ("./a/1.JPG", image),
            ("./a/1.cls", b"cat\n"),
            ("a/2.json", b'{"label": 7}'),
            ("a/2.png", image),
            ("a/3.seg.png", image),
            ("a/3.webp", image),
            ("a/3.txt", b"words"),
            ("4.bmp", image),
            ("4.cls", b" "),
            ("4.json", b'{"label": "owl"}'),
            ("5.json", b'{"label": null, "cls": "dog"}'),
            ("5.png", image),
            ("6.cls", b"cat"),
            ("a/._1.jpg", b"finder"),
            ("v1.0/x.y_1.cls", b"v1.0"),
            ("v1.0/x.y_1.png", image),
            ("7.png", image),
            ("7.json", b'{"class": "emu", "size": [1, 2]}'),
        ],
    )
    write_tar(
        tmp_path / "val" / "0.tar", [("1.png", image), ("1.cls", "Łódź".encode())]
    )
    rows = read(f"tar:{tmp_path}")
    keys = [
        f"x-train-0.tar#{key}"
        for key in ("a/1", "a/2", "a/3", "4", "5", "v1.0/x.y_1", "7")
    ]
    assert rows.ids.to_pylist() == ["val/0.tar#1", *keys] or rows.ids.to_pylist() == [
        *keys,
        "val/0.tar#1",
    ]
    assert dict(zip(rows.ids.to_pylist(), rows.labels.to_pylist(), strict=True)) == {
        **dict(zip(keys, ["cat", "7", None, "owl", None, "v1.0", "emu"], strict=True)),
        "val/0.tar#1": "Łódź",
    }
    assert (
        dict(zip(rows.ids.to_pylist(), rows.split.to_pylist(), strict=True))[
            "val/0.tar#1"
        ]
        == "test"
    )
    assert (
        rows.images.read_images(np.arange(8)) == [image] * 8
        and rows.images.paths(np.arange(8)) == [None] * 8
    )
    assert rows.notes == ("ignored 1 member of the tar files: 1 .txt",)
    lost, field = rows.warnings
    assert "1 label without an image" in lost and "'6.cls' in x-train-0.tar" in lost
    assert "1 image left out" in field and "'a/3.seg.png' in x-train-0.tar" in field
    assert read(f"tar:{tmp_path}").fingerprint == rows.fingerprint
    unlabeled = read_rows(DataConfig(source=f"tar:{tmp_path}"), images_only=True)
    assert set(unlabeled.labels.to_pylist()) == {None} and unlabeled.ids == rows.ids


def members_of(keys, image=None):
    """Images and labels of ``keys``, whose class is the text before the last
    underscore.
    """
    image = image or encoded(pixels(0))
    images = [(f"{key}.png", image) for key in keys]
    return images, [(f"{key}.cls", key.rpartition("_")[0].encode()) for key in keys]


def test_a_label_may_be_anywhere_in_the_shard_of_its_image(tmp_path):
    keys = [f"{kind}_{i}" for kind in ("cat", "dog") for i in range(5)]
    images, labels = members_of(keys)
    beside = [member for pair in zip(images, labels, strict=True) for member in pair]
    expected = read(f"tar:{write_tar(tmp_path / 'a.tar', beside)}")
    for members in (
        images + labels,
        labels + images,
        [*beside[:8], *images[4:], *labels[4:]],
    ):
        rows = read(f"tar:{write_tar(tmp_path / 'a.tar', members)}")
        assert (
            rows.ids == expected.ids
            and rows.labels.to_pylist() == expected.labels.to_pylist()
        )
        assert (
            rows.fingerprint == expected.fingerprint
            and not rows.warnings
            and not rows.notes
        )
    more = [("cat_0.json", b'{"label": "other"}')]
    # KEY.cls counts
    for members in (more + beside, beside + more, images + more + labels):
        assert (
            read(f"tar:{write_tar(tmp_path / 'a.tar', members)}").labels.to_pylist()
            == expected.labels.to_pylist()
        )


def test_an_image_that_is_a_field_of_a_row_is_left_out_with_a_warning(tmp_path):
    """It is a row of its own where a label has its name."""
    image = encoded(pixels(0))
    members = [
        ("3.png", image),
        ("3.cls", b"cat"),
        ("3.mask.png", image),
        ("3.edge.png", image),
    ]
    rows = read(f"tar:{write_tar(tmp_path / 'a.tar', members)}")
    assert rows.ids.to_pylist() == ["a.tar#3"] and rows.labels.to_pylist() == ["cat"]
    (line,) = rows.warnings
    assert all(
        word in line
        for word in ("2 images left out", "'3.mask.png'", "first dot", "'3.png'")
    )
    members.append(("3.edge.cls", b"dog"))
    rows = read(f"tar:{write_tar(tmp_path / 'a.tar', members)}")
    assert rows.ids.to_pylist() == [
        "a.tar#3",
        "a.tar#3.edge",
    ] and rows.labels.to_pylist() == ["cat", "dog"]
    assert "1 image left out" in rows.warnings[0]


@pytest.mark.parametrize(
    ("name", "content", "num_warnings"),
    [
        ("lost.cls", b"cat", 1),
        ("lost.json", b'{"label": "cat"}', 1),
        ("1.meta.json", b'{"label": "cat"}', 1),
        ("lost.cls", b"\xff", 1),
        ("lost.cls", b" ", 0),
        ("meta.json", b'{"author": "me"}', 0),
        ("meta.json", b"[1]", 0),
        ("meta.json", b"{", 0),
    ],
)
def test_a_label_without_an_image_is_a_warning(tmp_path, name, content, num_warnings):
    """And a member that is no label is a note."""
    members = [("1.png", encoded(pixels(0))), ("1.cls", b"a"), (name, content)]
    rows = read(f"tar:{write_tar(tmp_path / 'a.tar', members)}")
    assert rows.labels.to_pylist() == ["a"] and len(rows.warnings) == num_warnings
    assert len(rows.notes) == 1 - num_warnings
    for line in rows.warnings:
        assert (
            "1 label without an image" in line
            and repr(name) in line
            and "a.tar" in line
        )


def test_labels_that_could_be_lost_are_said(tmp_path):
    """In another shard than their images, or with a part of their names only."""
    images, labels = members_of(["cat_1", "cat_2"])
    write_tar(tmp_path / "a.tar", images)
    write_tar(tmp_path / "b.tar", [*labels, ("3.png", encoded(pixels(3)))])
    (line,) = read(f"tar:{tmp_path}").warnings
    assert "2 labels without an image" in line and "'cat_1.cls' in b.tar" in line
    assert "in the same shard" in line
    path = write_tar(
        tmp_path / "c.tar", [("7.rgb.png", images[0][1]), ("7.cls", b"cat")]
    )
    line = failure(read, f"tar:{path}")
    assert (
        "c.tar" in line
        and "'7.cls'" in line
        and "'7.rgb.png'" in line
        and "rename" in line
    )
    assert len(read_rows(DataConfig(source=f"tar:{path}"), True)) == 1


@pytest.mark.parametrize(
    "format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_names_of_any_length_and_letters(tmp_path, format):
    """Kills: a long name that is cut, a name that is left over for the next member."""
    long = "k" * (90 if format == tarfile.USTAR_FORMAT else 300)
    names = [f"{long}/{long}.png", "é.png", "plain.png"]
    members = [(name, encoded(pixels(i))) for i, name in enumerate(names)]
    rows = read(f"tar:{write_tar(tmp_path / 'a.tar', members, format)}")
    assert rows.ids.to_pylist() == [f"a.tar#{name[:-4]}" for name in names]
    assert rows.images.read_images(np.array([2, 0])) == [members[2][1], members[0][1]]


def test_patterns(tmp_path):
    """Kills: a shard too few or too many, widths that are lost, a folder's name in
    the place of a file's.
    """
    for i in range(12):
        write_tar(
            tmp_path / "in" / f"shard-{i:03}.tar",
            [("0.png", encoded(pixels(i))), ("0.cls", b"a")],
        )
    for pattern, numbers in (
        ("shard-{000..009}.tar", range(10)),
        ("shard-{003,011}.tar", (3, 11)),
        ("shard-*.tar", range(12)),
        ("shard-01*.tar", (10, 11)),
        ("shard-0{00..01}.tar", (0, 1)),
    ):
        rows = read(f"tar:{tmp_path}/in/{pattern}")
        assert rows.ids.to_pylist() == [f"shard-{i:03}.tar#0" for i in numbers]
    assert "shard-012.tar" in failure(read, f"tar:{tmp_path}/in/shard-{{009..012}}.tar")
    assert "no such file" in failure(read, f"tar:{tmp_path}/in/x*.tar")
    assert "more than 1,000,000 files" in failure(
        read, f"tar:{tmp_path}/{{0..9999}}{{0..9999}}.tar"
    )
    assert "no such file or folder" in failure(read, f"tar:{tmp_path}/none")
    (tmp_path / "empty").mkdir()
    assert "no *.tar files below" in failure(read, f"tar:{tmp_path}/empty")


def test_a_folder_of_shards_is_recognized(tmp_path, both):
    """Kills: an archive beside class folders taken for the data."""
    assert recognize(str(tmp_path / "shards")) == "tar"
    assert recognize(str(tmp_path / "shards" / "train-000.tar")) == "tar"
    write_tar(tmp_path / "images" / "original.tar", [])
    assert recognize(str(tmp_path / "images")) == "folder"


def test_the_rows_of_a_folder(both):
    """Kills: another order, pixels of a neighbor, a split or class that is lost."""
    folder, shards = map(read, both)
    keys = [name.partition("#")[2] for name in shards.ids.to_pylist()]
    assert keys == [name.removesuffix(".png") for name in folder.ids.to_pylist()]
    assert shards.labels.to_pylist() == folder.labels.to_pylist()
    assert shards.split == folder.split
    (a, _), (b, reasons) = (decode_many(rows.images, 8) for rows in (folder, shards))
    assert (a == b).all() and not any(reasons)
    order = np.random.default_rng(0).permutation(30)
    expected = [shards.images[i] for i in order]
    for images in (shards.images, pickle.loads(pickle.dumps(shards.images))):
        assert images.read_images(order) == expected


def test_objects_are_read_in_pieces(both, tmp_path, monkeypatch):
    """From 's3://bucket', served from a folder. Kills: a request for each image, one
    that spans all of a shard, ids that hold the bucket, a pattern of URIs.
    """
    remote = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    monkeypatch.setattr(filesystem, "_connect", lambda host, options: (remote, ""))
    here, there = read(both[1]), read("tar:s3://bucket/shards")
    assert there.ids == here.ids and there.fingerprint == here.fingerprint
    everything, opened = np.arange(30), []
    assert (
        there.images.groups(everything).tolist() == np.repeat(range(5), 7)[:30].tolist()
    )
    assert here.images.groups(everything) is None
    expected, real = here.images.read_images(everything), filesystem.open_file
    monkeypatch.setattr(
        filesystem, "open_file", lambda path: opened.append(path) or real(path)
    )
    assert there.images.read_images(everything) == expected and len(opened) == 5
    monkeypatch.setattr(tar, "SPAN_BYTES", 1000)
    again = read("tar:s3://bucket/shards/train-{000..004}.tar")
    assert again.ids == here.ids and again.images.read_images(everything) == expected
    assert len(np.unique(again.images.groups(everything))) > 5
    assert read("tar:s3://bucket/shards/train-*4.tar").ids.to_pylist() == [
        "train-004.tar#emu/08",
        "train-004.tar#emu/09",
    ]


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Three shards, written long ago, and an empty cache. The folder is an object
    store, too. The list has the paths of the shards that were scanned.
    """
    monkeypatch.setenv("UNO_CACHE", str(tmp_path / "cache"))
    for number in range(3):
        members = [("notes.txt", b"?"), ("lost.cls", b"fox")]
        for i in range(20):
            members.append((f"{i}.png", encoded(pixels(20 * number + i))))
            label = (f"{i}.cls", b"fox") if i % 2 else (f"{i}.json", b'{"label": 7.0}')
            members.append(label)
        path = write_tar(tmp_path / "shards" / f"train-{number}.tar", members)
        os.utime(path, (1e9 + number, 1e9 + number))
    remote = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    monkeypatch.setattr(filesystem, "_connect", lambda host, options: (remote, ""))
    scanned, real = [], filesystem.open_binary
    monkeypatch.setattr(
        filesystem, "open_binary", lambda path: scanned.append(path) or real(path)
    )
    return scanned


FOLDER = "tar:s3://bucket/shards"


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
    "source", [FOLDER, f"{FOLDER}/train-{{0..2}}.tar", "tar:{folder}/shards"]
)
def test_a_second_start_scans_no_shard(shards, source, tmp_path):
    """The index has what the scan found: keys, places, labels, notes."""
    source = source.replace("{folder}", str(tmp_path))
    first = read(source)
    assert len(shards) == 3
    again = read(source)
    assert len(shards) == 3 and len(again) == 60 and facts_of(again) == facts_of(first)
    assert ".txt" in str(again.notes) and "lost.cls" in str(again.warnings)


def test_only_a_shard_that_has_changed_is_scanned_again(shards, tmp_path):
    first, changed = read(FOLDER), tmp_path / "shards" / "train-1.tar"
    with tarfile.open(changed, "a") as archive:
        add(archive, "new.png", encoded(pixels(99)))
    os.utime(changed, (1e9 + 50, 1e9 + 50))
    shards.clear()
    again = read(FOLDER)
    assert len(again) == len(first) + 1 and "train-1.tar#new" in again.ids.to_pylist()
    assert [path.rpartition("/")[2] for path in shards] == ["train-1.tar"]
    (tmp_path / "shards" / "train-0.tar").unlink()
    assert len(read(FOLDER)) == len(again) - 20 and len(shards) == 1


def test_a_shard_that_was_just_written_is_not_trusted(shards, tmp_path):
    """It may be written again with the same size in the same tick of the clock."""
    os.utime(tmp_path / "shards" / "train-2.tar")
    read(FOLDER)
    shards.clear()
    read(FOLDER)
    assert [path.rpartition("/")[2] for path in shards] == ["train-2.tar"]


def test_labels_and_no_labels_have_their_own_index(shards):
    expected = facts_of(read(FOLDER))
    without = read_tar("s3://bucket/shards", ReadOptions(images_only=True))
    assert without.labels.null_count == len(without)
    assert facts_of(read(FOLDER)) == expected


def test_a_damaged_index_is_made_again(shards, tmp_path, caplog):
    first = read(FOLDER)
    indexes = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    data, other = indexes[0].read_bytes(), io.BytesIO()
    pq.write_table(pa.table({"shard": [0]}), other)
    holes = data[:200] + bytes(100) + data[300:]
    for damaged in (b"", data[:-100], holes, other.getvalue()):
        indexes[0].write_bytes(damaged)
        assert facts_of(read(FOLDER)) == facts_of(first)
        assert indexes[0].read_bytes() == data
    assert "index" in caplog.text


def test_a_cache_that_takes_no_file_is_named_and_the_shards_are_read(
    shards, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNO_CACHE", str(tmp_path / "file" / "cache"))
    assert len(read(FOLDER)) == 60
    assert "index" in caplog.text and "file" in caplog.text


def test_members_that_are_no_files_are_bad_rows(tmp_path):
    """Nothing outside the shard is ever opened. Kills: a link that is followed, a hole
    that is read as bytes, a member behind them that is lost.
    """
    (tmp_path / "secret.png").write_bytes(encoded(pixels(9)))
    link, image = (
        {"type": tarfile.SYMTYPE, "linkname": "../secret.png"},
        encoded(pixels(0)),
    )
    sparse = {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.size": "99999999"}}
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("1.png", b"", link),
            ("2.png", b"", {**link, "type": tarfile.LNKTYPE}),
            ("3.png", image, sparse),
            ("/etc/4.png", image),
            ("../../5.png", image),
            ("6.png/", b"", {"type": tarfile.DIRTYPE}),
            ("7.png", b"", {"type": tarfile.FIFOTYPE}),
            ("8.png", image),
        ],
        tarfile.PAX_FORMAT,
    )
    rows = read(f"tar:{path}")
    assert [name.partition("#")[2] for name in rows.ids.to_pylist()] == [
        "1",
        "2",
        "3",
        "/etc/4",
        "../../5",
        "7",
        "8",
    ]
    reasons = decode_many(rows.images, 8)[1]
    assert [reason is None for reason in reasons] == [
        False,
        False,
        False,
        True,
        True,
        False,
        True,
    ]
    assert reasons[0] == "no image data"
    assert {file.name for file in tmp_path.iterdir()} == {"a.tar", "secret.png"}


def test_cut_off_anywhere(tmp_path):
    """One line, or a row that is listed as bad. Kills: a read beyond the end, a
    whole image lost.
    """
    images = [encoded(pixels(i, 20, 20)) for i in range(3)]
    path = write_tar(
        tmp_path / "a.tar", [(f"{i}.png", image) for i, image in enumerate(images)]
    )
    whole = (tmp_path / "a.tar").read_bytes()
    for size in range(0, 3 * 2048 + 600, 123):
        (tmp_path / "a.tar").write_bytes(whole[:size])
        if size < 512:
            assert "is not a tar file" in failure(read, f"tar:{path}")
            continue
        rows = read(f"tar:{path}")
        *before, last = rows.images.read_images(np.arange(len(rows)))
        number = len(before)
        assert before == images[:number] and images[number].startswith(last)
        if last != images[number]:
            assert rows.notes == ("a.tar is truncated: it ends inside a member",)


@pytest.mark.parametrize(
    ("name", "members", "words"),
    [
        (
            "twice",
            [("1.png", b"x"), ("2.png", b"x"), ("1.png", b"x")],
            "two images of one key",
        ),
        (
            "two",
            [("1.png", b"x"), ("1.jpg", b"x")],
            "two images of one key, '1.png' and '1.jpg'",
        ),
        ("json", [("1.png", b"x"), ("1.json", b"{")], "'1.json' is not JSON"),
        ("deep", [("1.png", b"x"), ("1.json", b"[" * 100_000)], "'1.json' is not JSON"),
        ("list", [("1.png", b"x"), ("1.json", b"[1]")], "must be an object, not list"),
        (
            "real",
            [("1.png", b"x"), ("1.json", b'{"label": 1.5}')],
            "a.tar#1: label 1.5 is not a whole number",
        ),
        ("text", [("1.png", b"x"), ("1.cls", b"\xff")], "'1.cls' is not UTF-8 text"),
        (
            "long",
            [("1.png", b"x"), ("1.cls", b"x" * 400)],
            "a class's name has 400 characters",
        ),
        (
            "huge",
            [("1.png", b"x"), ("1.cls", b"x" * 2**21)],
            "has 2,097,152 bytes, more than 1,048,576",
        ),
        (
            "link",
            [
                ("1.png", b"x"),
                ("1.cls", b"", {"type": tarfile.SYMTYPE, "linkname": "x"}),
            ],
            "is a link",
        ),
        ("none", [("readme.md", b"x")], "no members KEY.jpg"),
        ("header", [("k" * 2**21 + ".png", b"x")], "more than 1,048,576"),
    ],
)
def test_what_is_refused_is_one_line(tmp_path, name, members, words):
    path = write_tar(tmp_path / "a.tar", members, tarfile.GNU_FORMAT)
    assert words in failure(read, f"tar:{path}")
    # labels mean nothing there
    if name in ("json", "deep", "list", "real", "text", "long", "huge", "link"):
        assert len(read_rows(DataConfig(source=f"tar:{path}"), True)) == 1


def test_files_that_are_no_tar(tmp_path):
    """Kills: gzip that is unpacked in memory, noise that is a traceback."""
    path = tmp_path / "a.tar"
    good = write_tar(tmp_path / "good.tar", [("1.png", encoded(pixels(0)))])
    data = (tmp_path / "good.tar").read_bytes()
    for content, words in (
        (gzip.compress(data), "is compressed (gzip); images are read at their places"),
        (
            np.random.default_rng(0).bytes(5000),
            "is not a tar file",
        ),
        (data[:1024] + b"x" * 1024, "no header at byte"),
    ):
        path.write_bytes(content)
        assert words in failure(read, f"tar:{path}")
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "b.tar.gz").write_bytes(gzip.compress(data))
    assert "b.tar.gz is compressed" in failure(read, f"tar:{tmp_path / 'gz'}")
    rows = read(f"tar:{good}")
    (tmp_path / "good.tar").unlink()
    assert "cannot read" in failure(rows.images.read_images, np.arange(1))


def test_json_may_be_large_where_it_is_not_wanted(tmp_path):
    """Kills: a label that is read although there is a KEY.cls before it."""
    more = json.dumps({"boxes": [0] * 10**6}).encode()
    path = write_tar(
        tmp_path / "a.tar",
        [("1.cls", b"cat"), ("1.json", more), ("1.png", encoded(pixels(0)))],
    )
    assert read(f"tar:{path}").labels.to_pylist() == ["cat"]


def test_a_shard_whose_folders_are_the_classes_is_refused_with_a_way_out(tmp_path):
    names = ["known/cat/1.png", "known/dog/2.png", "new/3.png"]
    members = [(name, encoded(pixels(i))) for i, name in enumerate(names)]
    config = DataConfig(source=write_tar(tmp_path / "t.tar", members), num_novel=1)
    with pytest.raises(ConfigError) as refused:
        make_task(read_rows(config), config)
    for fact in ("no image has a label", "KEY.cls", "--labeled"):
        assert fact in str(refused.value)
