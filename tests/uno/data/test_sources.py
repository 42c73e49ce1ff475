"""Every source from real files; every error is one line."""

import hashlib
import os
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import numpy as np
import pytest
from sklearn.datasets import load_digits

from uno.config import DataConfig
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
    assert_refused,
    cifar_files,
    columns_of,
    failure,
    publish_cifar,
    read,
    write_cifar,
    write_hf,
    write_images,
)


def read_two(labeled, unlabeled):
    return read_rows(DataConfig(labeled=str(labeled), unlabeled=str(unlabeled)))


def test_digits_are_real_and_split_80_20_per_class():
    rows, digits = read("digits"), load_digits()
    assert rows.labels.to_pylist() == [str(v) for v in digits.target]
    expected = np.round(digits.images[5] * 255 / 16)
    np.testing.assert_array_equal(rows.images[5], np.stack([expected] * 3, axis=-1))
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


DOWNLOAD = "torchvision.datasets.utils.download_and_extract_archive"


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
    files = cifar_files(name, rows=4, protocol=protocol)
    publish_cifar(monkeypatch, name, files)
    folder = write_cifar(tmp_path, name, files)
    rows = read(f"{name}:{tmp_path}")
    _, *batches = files
    assert rows.ids.to_pylist() == [f"{file}#{i}" for file in batches for i in range(4)]
    assert rows.split.to_pylist() == ["train"] * (len(rows) - 4) + ["test"] * 4
    stored = np.concatenate([pickle.loads(files[file])["data"] for file in batches])
    pixels = stored.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(np.stack(rows.images[:]), pixels)
    assert rows.labels.to_pylist()[3] == rows.class_names[3] == "class 3"
    assert recognize(str(tmp_path)) == recognize(str(folder)) == name
    assert read(folder).fingerprint == rows.fingerprint


@dataclass
class Evil:
    """Creates the folder ``mark`` when it is unpickled."""

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
    path = write_cifar(tmp_path, "cifar10", cifar10) / file
    evil, good = pickle.dumps(Evil(str(tmp_path / "loaded"))), cifar10[file]
    for content in (evil, good + b" ", good[:-1], b"", bytes(len(good))):
        path.write_bytes(content)
        facts = [f"{file} is not the file", "download it again"]
        assert_refused(facts, read, f"cifar10:{tmp_path}")
    assert not (tmp_path / "loaded").exists()
    pickle.loads(evil)
    assert (tmp_path / "loaded").exists()
    path.unlink()
    assert file in failure(read, f"cifar10:{tmp_path}")


def test_cifar_is_checked_against_the_sums_of_its_makers(tmp_path):
    write_cifar(tmp_path, "cifar10", cifar_files("cifar10", rows=2))
    assert "is not the file" in failure(read, f"cifar10:{tmp_path}")


def test_cifar_in_remote_storage_is_read(cifar10, bucket):
    write_cifar(bucket, "cifar10", cifar10)
    assert len(read("cifar10:s3://bucket")) == 12


def test_missing_cifar_and_its_download(tmp_path, monkeypatch, cifar10):
    """The archive is asked for only with ``download``, and a network error is one
    line.
    """
    assert "--data.download" in failure(read, f"cifar10:{tmp_path}")
    asked = []

    def fetch(url, _root, folder, _name, md5):
        asked.append((url.rpartition("/")[2], md5))
        write_cifar(Path(folder), "cifar10", cifar10)

    monkeypatch.setattr(DOWNLOAD, fetch)
    assert len(read(f"cifar10:{tmp_path}/new", download=True)) == 12
    assert asked == [("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a")]
    monkeypatch.setattr(DOWNLOAD, Mock(side_effect=OSError("no\nnetwork")))
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
    assert len(read(f"cifar10:{tmp_path}", download=True)) == 12
    assert Path(archive).exists()


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

    monkeypatch.setattr(DOWNLOAD, fetch)
    with ThreadPoolExecutor(2) as ranks:
        found = [ranks.submit(read, source, download=True) for _ in range(2)]
        assert [len(rank.result()) for rank in found] == [12, 12]
    assert os.listdir(tmp_path) == ["cifar-10-batches-py"]


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["cat/a.png", "dog/b.png"], "folder"),
        (["train/cat/a.png", "train/dog/b.png"], "folder"),
        (["train/n01440764/a.png", "train/n01530575/b.png"], "imagenet"),
        (["data/train-0.parquet"], "parquet"),
        (["train-0.parquet"], "parquet"),
        (["A.TAR"], "tar"),
        (["cat/a.png", "dog/b.png", "original.tar"], "folder"),
    ],
)
def test_a_bare_path_is_recognized_by_content_not_by_name(tmp_path, files, kind):
    """Kills: dispatch by substring (a folder named cifar10 that holds class
    folders).
    """
    folder = tmp_path / "cifar10-parquet-imagenet"
    write_images(folder, files)
    assert recognize(str(folder)) == kind


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("cifar-10:/x", "did you mean cifar10:/x"),
        ("imagnet:/x", "did you mean imagenet:/x"),
        ("qqq:/x", "choose from digits, cifar10:"),
        ("digit", "did you mean 'digits'?"),
        ("cifar10:", "no path"),
        ("folder:", "no path"),
        ("", ""),
        ("/nowhere", "/nowhere"),
        ("parquet:/nowhere", "/nowhere"),
        ("folder:/a\0b", ""),
        ("folder:/\ud800", ""),
        (f"folder:{__file__}", "is not a folder"),
    ],
)
def test_a_source_that_is_none_is_refused(source, fact):
    assert fact in failure(read, source)


def test_a_folder_with_a_colon_in_its_name_is_read(tmp_path):
    write_images(tmp_path / "odd:name", ["cat/a.png"])
    assert len(read(tmp_path / "odd:name")) == 1


def test_a_folder_of_both_cifars_is_refused(tmp_path):
    for name in CIFAR:
        write_cifar(tmp_path, name, cifar_files(name, rows=1))
    assert "cifar10:" in failure(read, tmp_path)


@pytest.mark.parametrize(
    ("labels", "others", "note"),
    [
        (
            {
                "10/x.png": "10",
                "cat/c.PNG": "cat",
                "dog/b.jpg": "dog",
                "dog/deep/er/a.png": "dog",
            },
            ["cat/.hidden.png", ".git/a.png", "cat/notes.txt"],
            "1 .txt",
        ),
        ({"bus/b.png": "bus", "car/c.png": "car", "train/a.png": "train"}, [], ""),
        ({"cat/a.png": "cat", "x.png": None, "y.png": None}, [], "2 images"),
        ({"1.png": None, "2.png": None}, [], ""),
    ],
    ids=["other files", "a class called train", "loose images", "no class"],
)
def test_subfolders_are_classes(tmp_path, labels, others, note):
    """Images stay where they are, as paths."""
    write_images(tmp_path, [*labels, *others])
    rows = read(tmp_path)
    assert columns_of(rows, "ids", "labels", "split") == {
        "ids": [*labels],
        "labels": [*labels.values()],
        "split": ["train"] * len(labels),
    }
    assert rows.images[1] == f"{tmp_path}/{rows.ids[1]}"
    assert note in "".join(rows.notes)


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_train_and_test_folders(tmp_path, name):
    images = {
        ("train/cat/b.png", "train", "cat"),
        ("train/dog/a.png", "train", "dog"),
        (f"{name}/dog/a.png", "test", "dog"),
    }
    write_images(tmp_path, [*(path for path, *_ in images), "x.png", "notes/a.txt"])
    rows = read(tmp_path)
    columns = columns_of(rows, "ids", "split", "labels").values()
    assert set(zip(*columns, strict=True)) == images
    assert "1 image outside" in rows.warnings[0]
    assert "'x.png'" in rows.warnings[0]


@pytest.mark.parametrize(("flag", "unlabeled"), [("--data", []), ("--labeled", [None])])
def test_a_class_folder_that_is_called_like_a_split_is_not_guessed(
    tmp_path, flag, unlabeled
):
    """Kills: half of the labeled images left out with a note, advice that leads to
    the next error.
    """
    folder, new = tmp_path / "a", tmp_path / "new"
    names = ["train/steam/a.png", "test/x/b.png", "bus/b.png", "car/c.png"]
    write_images(folder, names)
    write_images(new, ["n.png"])
    read_it = read if flag == "--data" else partial(read_two, unlabeled=new)
    choices = [f"{flag} classes:{folder}", f"{flag} splits:{folder}"]
    assert_refused(["images in bus, car", *choices], read_it, folder)
    rows = read_it(f"classes:{folder}")
    assert rows.labels.to_pylist() == ["bus", "car", "test", "train", *unlabeled]
    assert not rows.warnings
    rows = read_it(f"splits:{folder}")
    assert rows.labels.to_pylist() == ["x", "steam", *unlabeled]
    assert "2 images outside" in rows.warnings[0]
    assert len(read(f"classes:{folder}", images_only=True)) == 4


def test_names_that_look_the_same_are_one_class(tmp_path):
    """As Mac and Linux spell them. Names in another case are another class."""
    mac, linux = "cafe\u0301", "caf\u00e9"
    write_images(tmp_path, [f"{mac}/a.png", f"{linux}/b.png", "Dog/c.png", "dog/d.png"])
    rows = read(tmp_path)
    assert rows.labels.to_pylist() == ["Dog", linux, linux, "dog"]
    assert len(rows.labels.dictionary) == 3
    (note,) = rows.notes
    assert r"'cafe\u0301', 'caf\xe9' differ in Unicode normalization only" in note
    known = parse_known_classes(f"{mac},dog", [*present_classes(rows.labels)])
    assert known == {linux, "dog"}
    (tmp_path / "t.csv").write_text(
        f"path,label,eval_label\nDog/c.png,{mac},\ndog/d.png,,{linux}\n"
    )
    table = read(tmp_path / "t.csv")
    assert table.truth.to_pylist() == [linux, linux]
    assert len(make_task(table, DataConfig(num_novel=1)).known) == 1


@pytest.fixture
def pair(tmp_path):
    """A folder with 'known' of two classes, 'new' with images in any folders, 'loose'
    with an image beside a class, and 'void' without an image.
    """
    names = ["known/cat/a.png", "known/dog/a.png", "loose/a.png", "loose/cat/b.png"]
    write_images(tmp_path, [*names, "new/cat/a.png", "new/x.png", "new/a/b/c.png"])
    (tmp_path / "void").mkdir()
    return tmp_path


def test_two_folders(pair):
    rows = read_two(pair / "known", pair / "new")
    assert columns_of(rows, "labels", "split") == {
        "labels": ["cat", "dog", None, None, None],
        "split": ["train"] * 5,
    }
    assert str(rows.ids[2]) == "unlabeled/a/b/c.png"
    assert rows.images[3] == str(pair / "new/cat/a.png")


@pytest.mark.parametrize(
    ("labeled", "unlabeled", "fact"),
    [
        ("known", "", "overlap"),
        ("known", "known", "overlap"),
        ("loose", "known", "no class subfolder"),
        ("known", "void", "no images"),
    ],
)
def test_two_folders_that_are_refused(pair, labeled, unlabeled, fact):
    assert fact in failure(read_two, pair / labeled, pair / unlabeled)


def test_links_stay_inside(tmp_path):
    """Kills: following links anywhere, endless walks through a link to a parent."""
    write_images(tmp_path, ["secret.png", "data/cat/a.png"])
    data = tmp_path / "data"
    os.symlink(data / "cat", data / "kitten")
    os.symlink(data / "cat" / "a.png", data / "cat" / "again.png")
    os.symlink(data, tmp_path / "entry")
    ids = read(tmp_path / "entry").ids.to_pylist()
    assert ids == [
        "cat/a.png",
        "cat/again.png",
        "kitten/a.png",
        "kitten/again.png",
    ]
    for target, link, says in (
        ("secret.png", "cat/b.png", "points outside"),
        ("data", "loop", "class folder .*/loop holds no images"),
    ):
        os.symlink(tmp_path / target, data / link)
        assert re.search(says, failure(read, data))
        os.unlink(data / link)


@pytest.mark.parametrize("loading", ["memory", "streaming"])
def test_names_that_are_not_utf8(tmp_path, loading):
    """Of files, classes, tables and the root itself; ids and labels are text."""
    root = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    write_images(Path(root), [os.fsdecode(b"c\xff/\xff.png")])
    rows = read(root)
    assert columns_of(rows, "ids", "labels") == {
        "ids": ["c\\xff/\\xff.png"],
        "labels": ["c\\xff"],
    }
    assert decode(rows.images[0], 8).shape == (3, 8, 8)
    write_hf(tmp_path / "made", ["x"], train=1)
    test = tmp_path / "made" / "test-00000-of-00001.parquet"
    test.rename(test.with_name(os.fsdecode(b"test-\xff.parquet")))
    folder = (tmp_path / "made").rename(f"{root}-tables")
    tables = read(f"parquet:{folder}", loading=loading)
    assert str(tables.ids[0]) == "test-\\xff.parquet#0"
    assert tables.split.to_pylist()[0] == "test"
    assert decode(tables.images[0], 8).shape == (3, 8, 8)


def test_imagenet_split(tmp_path):
    """Kills: held-out classes of other splits kept as known, novel = all 118."""
    held_out, a, b = (
        {*imagenet_wnids(name)} for name in ("held_out_118", "novel_30_A", "novel_30_B")
    )
    assert (len(held_out), len(a), len(b), len((a | b) - held_out)) == (118, 30, 30, 0)
    first, second = min(a - b), min(b - a)
    for place in ("train/{}/x.JPEG", "val/{}/y.JPEG"):
        write_images(tmp_path, map(place.format, ("n01440764", first, second)))
    for split, novel in (("A", first), ("B", second)):
        rows = read(f"imagenet:{tmp_path}", imagenet_split=split)
        assert rows.known == ("n01440764",)
        assert set(rows.labels.to_pylist()) == {"n01440764", novel}
        assert rows.notes == (f"ignored 1 held-out class not in split {split}",)
        assert sorted(rows.split.to_pylist()) == ["test", "test", "train", "train"]
    everything = read(f"imagenet:{tmp_path}", known_classes="first:1")
    assert (len(everything), everything.known) == (6, ())


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
    write_images(tmp_path, ["known/cat/IMG.HEIC", "new/a.heic", "new/b.mov"])
    write_images(tmp_path, ["new/c.txt", "new/README", "new/.DS_Store"])
    folders = tmp_path / "known", tmp_path / "new"
    rows = read_two(*folders)
    (note,), (first, second) = rows.notes, rows.warnings
    for line, fact in (
        (first, "known, e.g. 'cat/IMG.HEIC'"),
        (first, "save them as JPEG"),
        (second, "new, e.g. 'a.heic'"),
        (note, "ignored 3 files below "),
        (note, "1 without a suffix"),
        (note, "1 .mov (video; take still images)"),
    ):
        assert fact in line
    (tmp_path / "new" / "3.jpg").unlink()
    assert_refused(["no images below", "save them as JPEG"], read_two, *folders)
