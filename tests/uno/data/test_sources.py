"""Every source from real files; every error is one line."""

import codecs
import hashlib
import os
import pickle
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import numpy as np
import pytest
from sklearn.datasets import load_digits

from uno.config import DataConfig
from uno.data.cifar import CIFAR10, CIFAR100
from uno.data.decode import decode
from uno.data.inputs import open_inputs
from uno.data.rows import Rows
from uno.data.sources import (
    imagenet_wnids,
    read_folder,
    read_images,
    read_rows,
    read_two_folders,
    recognize,
)
from uno.data.splits import make_task, parse_known_classes
from uno.errors import ConfigError

from .builders import SHARED, failure, write_cifar, write_hf, write_images


def read(source, **config):
    return read_rows(DataConfig(source=str(source), **config))


def read_two(labeled, unlabeled):
    return read_rows(DataConfig(labeled=str(labeled), unlabeled=str(unlabeled)))


def test_digits_are_real_and_split_80_20_per_class():
    rows, digits = read("digits"), load_digits()
    assert len(rows) == len(set(rows.ids)) == 1797 and len(rows.fingerprint) == 64
    assert rows.labels == [str(v) for v in digits.target]
    assert rows.images[5].shape == (8, 8, 3) and rows.images[5].max() == 255
    np.testing.assert_array_equal(
        rows.images[5][..., 1], np.round(digits.images[5] * 255 / 16)
    )
    for digit in map(str, range(10)):
        assert abs(rows.is_train[rows.labels.places([digit]) == 0].mean() - 0.8) < 0.01


def test_fingerprint_follows_content_not_place(tmp_path):
    """Kills: fingerprints of paths, of names only, or of labels only."""
    a, b = tmp_path / "a", tmp_path / "b"
    for place in (a, b):
        write_images(place, ["cat/1.png", "dog/2.png"])
    before = read(a).fingerprint
    assert read(b).fingerprint == before
    (b / "dog" / "2.png").write_bytes(b"longer or shorter")
    (a / "dog").rename(a / "wolf")
    assert before not in (read(a).fingerprint, read(b).fingerprint)
    digits = read("digits")
    changed = digits.images.items.copy()
    changed[7, 0, 0, 0] ^= 1
    other = Rows(digits.ids, changed, digits.labels, digits.is_train, "digits")
    assert (
        digits.take(np.arange(1797)).fingerprint
        == digits.fingerprint
        != other.fingerprint
    )
    assert digits.take(np.arange(1796)).fingerprint != digits.fingerprint


@pytest.mark.parametrize(
    "layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.prefix
)
@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("fortran", [False, True])
def test_cifar_pickles_read_as_torchvision_does(tmp_path, layout, protocol, fortran):
    """Kills: channels read as the last axis of the file, rows and columns swapped,
    Fortran order ignored.
    """
    first = write_cifar(tmp_path, layout, protocol=protocol, fortran=fortran)
    rows = read(f"{layout.prefix}:{tmp_path}")
    assert len(rows) == 20 * (len(layout.train) + 1) and (~rows.is_train).sum() == 20
    np.testing.assert_array_equal(
        rows.images[3], first[3].reshape(3, 32, 32).transpose(1, 2, 0)
    )
    np.testing.assert_array_equal(
        decode(rows.images[3], 32), first[3].reshape(3, 32, 32)
    )
    assert rows.labels[7] == "class 7" and rows.class_names[2] == "class 2"
    assert recognize(str(tmp_path)) == layout.prefix
    assert read(tmp_path / layout.folder).fingerprint == rows.fingerprint


def test_cifar_python_2_pickles(tmp_path):
    """The published files were pickled by Python 2: raw bytes as text, numpy.core
    module names.
    """
    write_cifar(tmp_path, CIFAR10, rows=2)
    data = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
    (tmp_path / CIFAR10.folder / "test_batch").write_bytes(
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T"
        + (2 * 3072).to_bytes(4, "little")
        + data.tobytes()
        + b"tbU\x06labels](K\x01K\x00eu."
    )
    rows = read(f"cifar10:{tmp_path}")
    np.testing.assert_array_equal(rows.images[-2].transpose(2, 0, 1).ravel(), data[0])
    assert rows.labels[-2:] == ["class 1", "class 0"]


PWNED = f"/tmp/uno-pwned-{os.getpid()}"


@dataclass
class Evil:
    call: tuple

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("place", ["data", "labels", "whole"])
@pytest.mark.parametrize(
    "call",
    [
        (os.system, f"touch {PWNED}"),
        (eval, "1"),
        (subprocess.Popen, ["true"]),
        # the stand-in takes any argument; no numpy runs, the field check refuses it
        (np.dtype, "O"),
        (np.ndarray, (2, 3072)),
        (getattr, "x", "upper"),
        (codecs.encode, "x", "rot13"),
        (codecs.encode, b"x", "zip"),
    ],
)
def test_malicious_pickle_is_refused(tmp_path, call, place):
    evil = Evil(call)
    write_cifar(tmp_path, CIFAR10, rows=2)
    content = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]} | {place: evil}
    file = tmp_path / CIFAR10.folder / "data_batch_2"
    file.write_bytes(pickle.dumps(evil if place == "whole" else content))
    assert str(file) in failure(read, f"cifar10:{tmp_path}")
    assert not os.path.exists(PWNED)


def test_damaged_cifar_files_are_one_line(tmp_path):
    """Every truncation and flipped byte of a small file: an error or a read, never
    another exception.
    """
    write_cifar(tmp_path, CIFAR10, rows=1)
    file = tmp_path / CIFAR10.folder / "data_batch_1"
    good, random, refused = file.read_bytes(), np.random.default_rng(0), 0
    damaged = [good[: random.integers(len(good))] for _ in range(40)]
    for place in random.integers(0, 220, 60):
        damaged.append(
            good[:place]
            + bytes([good[place] ^ int(random.integers(1, 256))])
            + good[place + 1 :]
        )
    for content in damaged:
        file.write_bytes(content)
        refused += failure(read, f"cifar10:{tmp_path}", may_pass=True) is not None
    assert refused > 50


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"labels": [0, 10]}, "0 to 9"),
        ({"labels": [0, -1]}, "0 to 9"),
        ({"labels": [0, 1, 2]}, "uint8 (3, 3072)"),
        ({"data": np.zeros((2, 3072), np.float32)}, "must be uint8"),
        ({"data": [1]}, "no field 'data'"),
    ],
)
def test_cifar_labels_and_shapes_are_checked(tmp_path, wrong, text):
    write_cifar(tmp_path, CIFAR10, rows=2)
    good = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}
    (tmp_path / CIFAR10.folder / "test_batch").write_bytes(pickle.dumps(good | wrong))
    assert text in failure(read, f"cifar10:{tmp_path}")


def test_missing_cifar_and_its_download(tmp_path, monkeypatch):
    """The archive is asked for only with ``download``, and a network error is one
    line.
    """
    assert "--data.download" in failure(read, f"cifar10:{tmp_path}")
    assert "no such file or folder" in failure(read, f"cifar100:{tmp_path}/nothing")
    fetch = Mock(
        side_effect=lambda _url, _root, folder, *_: write_cifar(
            Path(folder), CIFAR10, rows=2
        )
    )
    download = "torchvision.datasets.utils.download_and_extract_archive"
    monkeypatch.setattr(download, fetch)
    assert len(read(f"cifar10:{tmp_path}/new", download=True)) == 12
    url, *_, md5 = fetch.call_args.args
    assert (
        url.endswith("/cifar-10-python.tar.gz")
        and md5 == "c58f30108f718f92721af3b95e74349a"
    )
    monkeypatch.setattr(download, Mock(side_effect=OSError("no\nnetwork")))
    assert "no network" in failure(read, f"cifar10:{tmp_path}/other", download=True)


def test_a_cifar_archive_that_is_there_is_unpacked(tmp_path, monkeypatch):
    """By torchvision's own function. Kills: another download, an archive that is
    taken from the user.
    """
    write_cifar(tmp_path / "made", CIFAR10, rows=2)
    archive = shutil.make_archive(
        str(tmp_path / "cifar-10-python"), "gztar", tmp_path / "made"
    )
    monkeypatch.setattr("torchvision.datasets.CIFAR10.url", "file:///nowhere")
    monkeypatch.setattr(
        "torchvision.datasets.CIFAR10.tgz_md5",
        hashlib.md5(Path(archive).read_bytes()).hexdigest(),
    )
    assert (
        len(read(f"cifar10:{tmp_path}", download=True)) == 12 and Path(archive).exists()
    )


def test_two_processes_download_cifar_at_once(tmp_path, monkeypatch):
    """As the ranks of a node do. Kills: a folder that is found while it is unpacked,
    two that unpack into one another, an error of the second, what it has unpacked left
    behind.
    """
    both, source = Barrier(2, timeout=60), f"cifar10:{tmp_path}"

    def fetch(_url, _root, folder, *_):
        both.wait()
        write_cifar(Path(folder), CIFAR10, rows=2)
        both.wait()
        assert "no folder cifar-10-batches-py there" in failure(read, source)
        both.wait()

    monkeypatch.setattr(
        "torchvision.datasets.utils.download_and_extract_archive", fetch
    )
    with ThreadPoolExecutor(2) as ranks:
        found = [ranks.submit(read, source, download=True) for _ in range(2)]
        assert [len(rank.result()) for rank in found] == [12, 12]
    assert os.listdir(tmp_path) == [CIFAR10.folder]


def test_a_bare_path_is_recognized_by_content_not_by_name(tmp_path):
    """Kills: dispatch by substring (a folder named cifar10 that holds class
    folders).
    """
    write_images(tmp_path / "cifar10-parquet-imagenet", ["cat/a.png", "dog/b.png"])
    write_hf(tmp_path / "folder" / "data", ["a", "b"])
    write_images(tmp_path / "x", ["train/n01440764/a.png", "train/n01530575/b.png"])
    write_images(tmp_path / "y", ["train/cat/a.png", "train/dog/b.png"])
    for name, kind in (
        ("cifar10-parquet-imagenet", "folder"),
        ("folder", "parquet"),
        ("x", "imagenet"),
    ):
        assert recognize(str(tmp_path / name)) == kind
    assert (
        recognize(str(tmp_path / "y")) == "folder"
        and recognize(f"{tmp_path}/folder/data") == "parquet"
    )
    assert (
        len(read(tmp_path / "folder" / "data" / "train-00000-of-00001.parquet")) == 12
    )
    for layout in (CIFAR10, CIFAR100):
        write_cifar(tmp_path / "z", layout, rows=1)
    assert "cifar10:" in failure(read, tmp_path / "z")
    (tmp_path / "data.txt").write_text("x")
    assert "must end in .parquet, .csv, .tsv, .jsonl or .tar" in failure(
        read, tmp_path / "data.txt"
    )


def test_unknown_prefix_suggests_the_nearest(tmp_path):
    assert "did you mean cifar10:/x" in failure(read, "cifar-10:/x")
    assert "did you mean imagenet:/x" in failure(read, "imagnet:/x")
    assert "choose from digits, cifar10:" in failure(read, "qqq:/x")
    assert "did you mean 'digits'?" in failure(read, "digit")
    write_images(tmp_path / "odd:name", ["cat/a.png"])
    assert len(read(tmp_path / "odd:name")) == 1
    for source in (
        "",
        "folder:",
        "imagenet:",
        "/nowhere",
        "parquet:/nowhere",
        "folder:/a\0b",
        "folder:/\ud800",
    ):
        failure(read, source)


def test_class_subfolders(tmp_path):
    """Images stay where they are, as paths."""
    write_images(tmp_path, ["dog/b.jpg", "dog/deep/er/a.png", "cat/c.PNG", "10/x.png"])
    for name in ("cat/notes.txt", "cat/.hidden.png"):
        (tmp_path / name).write_text("not an image")
    (tmp_path / ".git").mkdir()
    rows = read(tmp_path)
    assert rows.ids == ["10/x.png", "cat/c.PNG", "dog/b.jpg", "dog/deep/er/a.png"]
    assert rows.labels == ["10", "cat", "dog", "dog"] and set(rows.split) == {"train"}
    assert rows.images[1] == str(tmp_path / "cat/c.PNG")


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_train_and_test_folders(tmp_path, name):
    write_images(
        tmp_path, ["train/dog/a.png", "train/cat/b.png", f"{name}/dog/a.png", "x.png"]
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("no image")
    rows = read(tmp_path)
    assert rows.ids == sorted(
        ["train/cat/b.png", "train/dog/a.png", f"{name}/dog/a.png"]
    )
    assert sorted(zip(rows.split, rows.labels, strict=True))[0] == ("test", "dog")
    assert "1 image outside" in rows.warnings[0] and "'x.png'" in rows.warnings[0]


def test_a_class_folder_that_is_called_like_a_split_is_not_guessed(tmp_path):
    """Kills: half of the labeled images left out with a note, advice that leads to
    the next error.
    """
    write_images(
        tmp_path / "a", ["train/steam/a.png", "test/x/b.png", "bus/b.png", "car/c.png"]
    )
    write_images(tmp_path / "new", ["n.png"])
    both = (
        "images in bus, car: if train is a class, too, give {0}"
        f" classes:{tmp_path}/a; if it is a split "
    )
    both += f"and these are to be left out, {{0}} splits:{tmp_path}/a"
    assert both.format("--data") in failure(read, tmp_path / "a")
    assert both.format("--labeled") in failure(
        read_two, tmp_path / "a", tmp_path / "new"
    )
    for read_as, labels in (
        (lambda kind: read(f"{kind}:{tmp_path}/a"), ["bus", "car", "test", "train"]),
        (
            lambda kind: read_two(f"{kind}:{tmp_path}/a", tmp_path / "new"),
            ["bus", "car", "test", "train", None],
        ),
    ):
        assert read_as("classes").labels == labels and not read_as("classes").warnings
        split = read_as("splits")
        assert [*split.labels[:2]] == [
            "x",
            "steam",
        ] and "2 images outside" in split.warnings[0]
    assert len(open_inputs(DataConfig(source=f"classes:{tmp_path}/a"))) == 4


def test_names_that_look_the_same_are_one_class(tmp_path):
    """As Mac and Linux spell them; case makes two classes. Kills: two classes, two
    silent ones.
    """
    mac, linux = "cafe\u0301", "caf\u00e9"
    write_images(
        tmp_path / "a", [f"{mac}/a.png", f"{linux}/b.png", "Dog/c.png", "dog/d.png"]
    )
    rows = read(tmp_path / "a")
    assert rows.labels == ["Dog", linux, linux, "dog"] and len(rows.labels.classes) == 3
    assert rows.notes == (
        (
            r"class names 'cafe\u0301', 'caf\xe9' differ in normalization only: they"
            r" are one class"
        ),
        "class names 'Dog', 'dog' differ in case only: they stay two classes",
    )
    assert parse_known_classes(f"{mac},dog", [*rows.labels.present]) == {linux, "dog"}
    (tmp_path / "a" / "t.csv").write_text(
        f"path,label,eval_label\nDog/c.png,{mac},\ndog/d.png,,{linux}\n"
    )
    table = read(tmp_path / "a" / "t.csv")
    assert [*table.truth] == [linux, linux] and len(
        make_task(table, DataConfig(num_novel=1)).known
    ) == 1


def test_odd_folders(tmp_path):
    """A class may be called train; loose images are unlabeled; a class without
    images is an error.
    """
    write_images(tmp_path / "a", ["train/a.png", "bus/b.png", "car/c.png"])
    assert read(tmp_path / "a").labels == ["bus", "car", "train"]
    write_images(tmp_path / "b", ["cat/a.png", "x.png", "y.png"])
    assert (
        read(tmp_path / "b").labels == ["cat", None, None]
        and "2 images" in read(tmp_path / "b").notes[0]
    )
    write_images(tmp_path / "c", ["1.png", "2.png"])
    assert read(tmp_path / "c").labels == [None, None]
    (tmp_path / "d" / "dog").mkdir(parents=True)
    assert "no images below" in failure(read, tmp_path / "d")
    write_images(tmp_path / "d", ["cat/a.png"])
    assert f"class folder {tmp_path}/d/dog holds no images" in failure(
        read, tmp_path / "d"
    )
    assert "is not a folder" in failure(read, f"folder:{tmp_path}/d/cat/a.png")


def test_two_folders(tmp_path):
    write_images(
        tmp_path,
        ["known/cat/a.png", "known/dog/a.png", "loose/a.png", "loose/cat/b.png"],
    )
    write_images(tmp_path, ["new/cat/a.png", "new/x.png", "new/a/b/c.png"])
    rows = read_two(tmp_path / "known", tmp_path / "new")
    assert rows.labels == ["cat", "dog", None, None, None] and set(rows.split) == {
        "train"
    }
    assert rows.ids[2] == "unlabeled/a/b/c.png"
    assert rows.images[1].endswith("known/dog/a.png") and rows.images[3].endswith(
        "new/cat/a.png"
    )
    assert "overlap" in failure(read_two, tmp_path / "known", tmp_path)
    assert "overlap" in failure(read_two, tmp_path / "known", tmp_path / "known")
    assert "no class subfolder" in failure(
        read_two, tmp_path / "loose", tmp_path / "known"
    )
    (tmp_path / "void").mkdir()
    assert "no images" in failure(read_two, tmp_path / "known", tmp_path / "void")


def test_links_stay_inside(tmp_path):
    """Kills: following links anywhere, endless walks through a link to a parent."""
    write_images(tmp_path / "outside", ["secret.png"])
    write_images(tmp_path / "data", ["cat/a.png"])
    os.symlink(tmp_path / "data" / "cat", tmp_path / "data" / "kitten")
    os.symlink(
        tmp_path / "data" / "cat" / "a.png", tmp_path / "data" / "cat" / "again.png"
    )
    os.symlink(tmp_path / "data", tmp_path / "entry")
    rows = read(tmp_path / "entry")
    assert "cat/again.png" in rows.ids and len(rows) == 4
    for target, link in (("outside/secret.png", "cat/b.png"), ("data", "loop")):
        os.symlink(tmp_path / target, tmp_path / "data" / link)
        assert "points outside" in failure(read, tmp_path / "data")
        os.unlink(tmp_path / "data" / link)


def test_names_that_are_not_utf8(tmp_path):
    """Of files, classes, tables and the root itself; ids and labels are text."""
    root = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    write_images(tmp_path / "in", ["cat/a.png"])
    write_hf(tmp_path / "in" / "tables", ["x"])
    os.rename(tmp_path / "in", root)
    for folder, name, new in (
        ("cat", "a.png", b"\xff.png"),
        ("", "cat", b"c\xff"),
        ("tables", "test-00000-of-00001.parquet", b"test-\xff.parquet"),
    ):
        os.rename(
            os.path.join(root, folder, name),
            os.path.join(os.fsencode(root), folder.encode(), new),
        )
    os.rename(os.path.join(root, "tables"), root + "-tables")
    rows = read(root)
    assert (
        rows.ids == ["c\\xff/\\xff.png"]
        and rows.labels == ["c\\xff"]
        and rows.fingerprint
    )
    tables = [
        read(f"parquet:{root}-tables", loading=loading)
        for loading in ("memory", "streaming")
    ]
    assert {(rows.ids[0], rows.split[0]) for rows in tables} == {
        ("test-\\xff.parquet#0", "test")
    }
    assert all(decode(some.images[0], 8).shape == (3, 8, 8) for some in (rows, *tables))


def test_imagenet_split(tmp_path):
    """Kills: held-out classes of other splits kept as known, novel = all 118."""
    held_out, a, b = (
        imagenet_wnids(name) for name in ("held_out_118", "novel_30_A", "novel_30_B")
    )
    assert (len(held_out), len(a), len(b)) == (118, 30, 30) and set(a) | set(b) <= set(
        held_out
    )
    only_b = next(w for w in b if w not in a)
    for place in ("train/{}/x.JPEG", "val/{}/y.JPEG"):
        write_images(tmp_path, map(place.format, ("n01440764", a[0], only_b)))
    rows = read(f"imagenet:{tmp_path}", imagenet_split="A")
    assert rows.known == ("n01440764",) and set(rows.labels) == {"n01440764", a[0]}
    assert rows.notes == ("ignored 1 held-out class not in split A",)
    assert (~rows.is_train).sum() == 2
    other = read(f"imagenet:{tmp_path}", imagenet_split="B")
    assert set(other.labels) == {"n01440764", only_b} | ({a[0]} & set(b))
    everything = read(f"imagenet:{tmp_path}", known_classes="first:1")
    assert len(everything) == 6 and everything.known == ()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (["n01440764/x.png"], "no folder train"),
        (["train/cat/x.png"], "wnid"),
        (
            ["train/n01440764/x.png", "val/ILSVRC2012_val_00000001.JPEG"],
            "not in a wnid subfolder",
        ),
        (["train/n01440764/x.png"], "novel wnid of split C"),
    ],
)
def test_imagenet_errors(tmp_path, files, text):
    write_images(tmp_path, files)
    assert text in failure(read, f"imagenet:{tmp_path}", imagenet_split="C")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_shared_data():
    rows = read(SHARED / "cifar10-jpeg")
    assert len(rows) == 60_000 and (~rows.is_train).sum() == 10_000
    assert rows.class_names[:2] == ("airplane", "automobile")
    assert decode(rows.images[59_999], 32).shape == (3, 32, 32)
    rows = read(f"imagenet:{SHARED}/imagenet-fullsize")
    assert "6 held-out classes" in rows.notes[0] and len(rows) == 94


def test_what_is_no_image_is_named(tmp_path):
    """Kills: half of a telephone's photographs left out without a word."""
    write_images(tmp_path, ["known/cat/1.png", "known/dog/2.png", "new/3.jpg"])
    for name in (
        "known/cat/IMG.HEIC",
        "new/a.heic",
        "new/b.mov",
        "new/c.txt",
        "new/README",
        "new/.DS_Store",
    ):
        (tmp_path / name).write_bytes(b"x")
    rows = read_two_folders(str(tmp_path / "known"), str(tmp_path / "new"))
    assert len(rows) == 3
    first, second = rows.warnings
    assert "known, e.g. 'cat/IMG.HEIC'" in first and "save them as JPEG" in first
    assert "new, e.g. 'a.heic'" in second
    (note,) = rows.notes
    assert (
        note.startswith("ignored 3 files below ")
        and "1 .mov (video; take still images)" in note
    )
    assert "1 .txt" in note and "1 without a suffix" in note and "DS_S" not in note
    assert read_folder(str(tmp_path / "known")).warnings == rows.warnings[:1]
    (tmp_path / "new" / "3.jpg").unlink()
    with pytest.raises(
        ConfigError, match=r"no images below .*save them as JPEG.*; ignored 3 files"
    ):
        read_images(str(tmp_path / "new"))
