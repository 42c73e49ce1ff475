"""Every source from real files; every error is one line."""

import hashlib
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import numpy as np
import pytest
from sklearn.datasets import load_digits

from uno.config import DataConfig
from uno.data import files as filesystem
from uno.data.cifar import LAYOUTS
from uno.data.columns import present_classes
from uno.data.decode import decode
from uno.data.sources import (
    imagenet_wnids,
    read_rows,
    recognize,
)
from uno.data.splits import make_task, parse_known_classes

from .builders import (
    CIFAR,
    cifar_files,
    failure,
    publish_cifar,
    write_cifar,
    write_hf,
    write_images,
)


def read(source, **config):
    return read_rows(DataConfig(source=str(source), **config))


def read_two(labeled, unlabeled):
    return read_rows(DataConfig(labeled=str(labeled), unlabeled=str(unlabeled)))


def test_digits_are_real_and_split_80_20_per_class():
    rows, digits = read("digits"), load_digits()
    assert rows.labels.to_pylist() == [str(v) for v in digits.target]
    assert rows.images[5].shape == (8, 8, 3) and rows.images[5].max() == 255
    expected = np.round(digits.images[5] * 255 / 16)
    np.testing.assert_array_equal(rows.images[5][..., 1], expected)
    for digit in range(10):
        assert abs(rows.is_train[digits.target == digit].mean() - 0.8) < 0.01


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


@pytest.fixture
def cifar10(monkeypatch):
    """Small files of CIFAR10, two rows each, that count as the published ones."""
    files = cifar_files("cifar10", rows=2)
    publish_cifar(monkeypatch, "cifar10", files)
    return files


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_cifar_keeps_files_rows_classes_and_channels_in_order(
    tmp_path, monkeypatch, name, protocol
):
    """Kills: channels read as the last axis of the file, rows and columns swapped,
    files in another order.
    """
    files = cifar_files(name, protocol=protocol)
    publish_cifar(monkeypatch, name, files)
    folder = write_cifar(tmp_path, name, files)
    rows = read(f"{name}:{tmp_path}")
    _, *batches = files
    assert rows.ids.to_pylist() == [
        f"{file}#{i}" for file in batches for i in range(20)
    ]
    assert not rows.is_train[-20:].any() and rows.is_train[:-20].all()
    for number, file in enumerate(batches):
        stored = pickle.loads(files[file])["data"].reshape(-1, 3, 32, 32)
        read_back = np.stack(rows.images[20 * number : 20 * number + 20])
        np.testing.assert_array_equal(read_back, stored.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(decode(rows.images[-1], 32), stored[-1])
    assert rows.labels.to_pylist()[7] == "class 7" and rows.class_names[2] == "class 2"
    assert recognize(str(tmp_path)) == recognize(str(folder)) == name
    assert read(folder).fingerprint == rows.fingerprint


@dataclass
class Evil:
    """Creates the file ``mark`` when it is unpickled."""

    mark: str

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("file", ["batches.meta", "data_batch_2", "test_batch"])
def test_a_cifar_file_that_is_not_the_published_one_is_never_loaded(
    tmp_path, cifar10, file
):
    """Kills: a check after the load, files that are not checked, a check of only the
    split that is read first.
    """
    folder, mark = write_cifar(tmp_path, "cifar10", cifar10), tmp_path / "loaded"
    evil = pickle.dumps(Evil(str(mark)))
    good = cifar10[file]
    for content in (evil, good + b" ", good[:-1], b"", bytes(len(good))):
        (folder / file).write_bytes(content)
        error = failure(read, f"cifar10:{tmp_path}")
        assert f"{file} is not the file" in error and "download it again" in error
        assert not mark.exists()
    pickle.loads(evil)
    assert mark.exists()
    (folder / file).unlink()
    assert file in failure(read, f"cifar10:{tmp_path}")


def test_cifar_is_checked_against_the_sums_of_its_makers(tmp_path):
    write_cifar(tmp_path, "cifar10", cifar_files("cifar10", rows=2))
    assert "is not the file" in failure(read, f"cifar10:{tmp_path}")


def test_cifar_in_remote_storage_is_read(cifar10):
    storage, folder = filesystem.locate("mock:///cifar/cifar-10-batches-py")
    storage.create_dir(folder)
    for file, data in cifar10.items():
        with storage.open_output_stream(f"{folder}/{file}") as stream:
            stream.write(data)
    assert len(read("cifar10:mock:///cifar")) == 12


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_recognized_by_the_names_that_torchvision_knows(name):
    layout, published = LAYOUTS[name], CIFAR[name]
    assert (layout.folder, layout.meta) == (
        published.base_folder,
        published.meta["filename"],
    )
    assert layout.images == published.train_list[0][0]


def test_missing_cifar_and_its_download(tmp_path, monkeypatch, cifar10):
    """The archive is asked for only with ``download``, and a network error is one
    line.
    """
    assert "--data.download" in failure(read, f"cifar10:{tmp_path}")
    assert "no such file or folder" in failure(read, f"cifar100:{tmp_path}/nothing")
    fetch = Mock(
        side_effect=lambda _url, _root, folder, *_: write_cifar(
            Path(folder), "cifar10", cifar10
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


def test_a_cifar_archive_that_is_there_is_unpacked(tmp_path, monkeypatch, cifar10):
    """By torchvision's own function. Kills: another download, an archive that is
    taken from the user.
    """
    write_cifar(tmp_path / "made", "cifar10", cifar10)
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


def test_two_processes_download_cifar_at_once(tmp_path, monkeypatch, cifar10):
    """As the ranks of a node do. Kills: a folder that is found while it is unpacked,
    two that unpack into one another, an error of the second, what it has unpacked left
    behind.
    """
    both, source = Barrier(2, timeout=60), f"cifar10:{tmp_path}"

    def fetch(_url, _root, folder, *_):
        both.wait()
        write_cifar(Path(folder), "cifar10", cifar10)
        both.wait()
        assert "no folder cifar-10-batches-py there" in failure(read, source)
        both.wait()

    monkeypatch.setattr(
        "torchvision.datasets.utils.download_and_extract_archive", fetch
    )
    with ThreadPoolExecutor(2) as ranks:
        found = [ranks.submit(read, source, download=True) for _ in range(2)]
        assert [len(rank.result()) for rank in found] == [12, 12]
    assert os.listdir(tmp_path) == ["cifar-10-batches-py"]


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
    for name in ("cifar10", "cifar100"):
        write_cifar(tmp_path / "z", name, cifar_files(name, rows=1))
    assert "cifar10:" in failure(read, tmp_path / "z")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "A.TAR").write_bytes(b"")
    assert recognize(str(tmp_path / "shards")) == "tar"
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
    # the digits have no path, either
    assert "no path" in failure(read_rows, DataConfig(source="cifar10:", download=True))


def test_class_subfolders(tmp_path):
    """Images stay where they are, as paths."""
    write_images(tmp_path, ["dog/b.jpg", "dog/deep/er/a.png", "cat/c.PNG", "10/x.png"])
    for name in ("cat/notes.txt", "cat/.hidden.png"):
        (tmp_path / name).write_text("not an image")
    (tmp_path / ".git").mkdir()
    rows = read(tmp_path)
    assert rows.ids.to_pylist() == [
        "10/x.png",
        "cat/c.PNG",
        "dog/b.jpg",
        "dog/deep/er/a.png",
    ]
    assert rows.labels.to_pylist() == ["10", "cat", "dog", "dog"] and set(
        rows.split.to_pylist()
    ) == {"train"}
    assert rows.images[1] == str(tmp_path / "cat/c.PNG")


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_train_and_test_folders(tmp_path, name):
    write_images(
        tmp_path, ["train/dog/a.png", "train/cat/b.png", f"{name}/dog/a.png", "x.png"]
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("no image")
    rows = read(tmp_path)
    assert rows.ids.to_pylist() == sorted(
        ["train/cat/b.png", "train/dog/a.png", f"{name}/dog/a.png"]
    )
    assert sorted(zip(rows.split.to_pylist(), rows.labels.to_pylist(), strict=True))[
        0
    ] == ("test", "dog")
    assert "1 image outside" in rows.warnings[0] and "'x.png'" in rows.warnings[0]


def test_a_class_folder_that_is_called_like_a_split_is_not_guessed(tmp_path):
    """Kills: half of the labeled images left out with a note, advice that leads to
    the next error.
    """
    write_images(
        tmp_path / "a", ["train/steam/a.png", "test/x/b.png", "bus/b.png", "car/c.png"]
    )
    write_images(tmp_path / "new", ["n.png"])
    for flag, line in (
        ("--data", failure(read, tmp_path / "a")),
        ("--labeled", failure(read_two, tmp_path / "a", tmp_path / "new")),
    ):
        assert "images in bus, car" in line
        assert f"{flag} classes:{tmp_path}/a" in line
        assert f"{flag} splits:{tmp_path}/a" in line
    for read_as, more in (
        (lambda kind: read(f"{kind}:{tmp_path}/a"), []),
        (lambda kind: read_two(f"{kind}:{tmp_path}/a", tmp_path / "new"), [None]),
    ):
        rows = read_as("classes")
        assert rows.labels.to_pylist() == ["bus", "car", "test", "train", *more]
        assert not rows.warnings
        rows = read_as("splits")
        assert rows.labels.to_pylist() == ["x", "steam", *more]
        assert "2 images outside" in rows.warnings[0]
    assert len(read_rows(DataConfig(source=f"classes:{tmp_path}/a"), True)) == 4


def test_names_that_look_the_same_are_one_class(tmp_path):
    """As Mac and Linux spell them. Names in another case are another class."""
    mac, linux = "cafe\u0301", "caf\u00e9"
    write_images(
        tmp_path / "a", [f"{mac}/a.png", f"{linux}/b.png", "Dog/c.png", "dog/d.png"]
    )
    rows = read(tmp_path / "a")
    assert (
        rows.labels.to_pylist() == ["Dog", linux, linux, "dog"]
        and len(rows.labels.dictionary) == 3
    )
    assert rows.notes == (
        r"class names 'cafe\u0301', 'caf\xe9' differ in Unicode normalization only:"
        r" they are one class",
    )
    assert parse_known_classes(f"{mac},dog", [*present_classes(rows.labels)]) == {
        linux,
        "dog",
    }
    (tmp_path / "a" / "t.csv").write_text(
        f"path,label,eval_label\nDog/c.png,{mac},\ndog/d.png,,{linux}\n"
    )
    table = read(tmp_path / "a" / "t.csv")
    assert (
        table.truth.to_pylist() == [linux, linux]
        and len(make_task(table, DataConfig(num_novel=1)).known) == 1
    )


def test_odd_folders(tmp_path):
    """A class may be called train; loose images are unlabeled; a class without
    images is an error.
    """
    write_images(tmp_path / "a", ["train/a.png", "bus/b.png", "car/c.png"])
    assert read(tmp_path / "a").labels.to_pylist() == ["bus", "car", "train"]
    write_images(tmp_path / "b", ["cat/a.png", "x.png", "y.png"])
    assert (
        read(tmp_path / "b").labels.to_pylist() == ["cat", None, None]
        and "2 images" in read(tmp_path / "b").notes[0]
    )
    write_images(tmp_path / "c", ["1.png", "2.png"])
    assert read(tmp_path / "c").labels.to_pylist() == [None, None]
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
    assert rows.labels.to_pylist() == ["cat", "dog", None, None, None] and set(
        rows.split.to_pylist()
    ) == {"train"}
    assert str(rows.ids[2]) == "unlabeled/a/b/c.png"
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
    assert "cat/again.png" in rows.ids.to_pylist() and len(rows) == 4
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
        rows.ids.to_pylist() == ["c\\xff/\\xff.png"]
        and rows.labels.to_pylist() == ["c\\xff"]
        and rows.fingerprint
    )
    tables = [
        read(f"parquet:{root}-tables", loading=loading)
        for loading in ("memory", "streaming")
    ]
    assert {(str(rows.ids[0]), rows.split.to_pylist()[0]) for rows in tables} == {
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
    assert rows.known == ("n01440764",) and set(rows.labels.to_pylist()) == {
        "n01440764",
        a[0],
    }
    assert rows.notes == ("ignored 1 held-out class not in split A",)
    assert (~rows.is_train).sum() == 2
    other = read(f"imagenet:{tmp_path}", imagenet_split="B")
    assert set(other.labels.to_pylist()) == {"n01440764", only_b} | ({a[0]} & set(b))
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
    rows = read_two(tmp_path / "known", tmp_path / "new")
    first, second = rows.warnings
    assert "known, e.g. 'cat/IMG.HEIC'" in first and "save them as JPEG" in first
    assert "new, e.g. 'a.heic'" in second
    (note,) = rows.notes
    assert "ignored 3 files below " in note and "1 without a suffix" in note
    assert "1 .mov (video; take still images)" in note
    (tmp_path / "new" / "3.jpg").unlink()
    line = failure(read_two, tmp_path / "known", tmp_path / "new")
    assert "no images below" in line and "save them as JPEG" in line
