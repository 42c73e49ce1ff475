"""Folders of images: layouts, splits, links, odd names."""

import os

import pytest

from uno.config import DataConfig
from uno.data.sources import imagenet_wnids, read_folder, read_imagenet, read_rows, read_two_folders
from uno.errors import ConfigError

from .builders import write_images


def failure(function, *args):
    with pytest.raises(ConfigError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_class_subfolders(tmp_path):
    write_images(tmp_path, ["dog/b.jpg", "dog/deep/er/a.png", "cat/c.PNG", "10/x.png"])
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "cat" / ".hidden.png").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    rows = read_folder(str(tmp_path))
    assert rows.ids == ["10/x.png", "cat/c.PNG", "dog/b.jpg", "dog/deep/er/a.png"]
    assert rows.labels == ["10", "cat", "dog", "dog"]
    assert set(rows.split) == {"train"}
    assert rows.images[1] == str(tmp_path / "cat/c.PNG")


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_train_and_test_folders(tmp_path, name):
    write_images(tmp_path, ["train/dog/a.png", "train/cat/b.png", f"{name}/dog/a.png", "extra/x.png"])
    rows = read_folder(str(tmp_path))
    assert rows.ids == sorted(["train/cat/b.png", "train/dog/a.png", f"{name}/dog/a.png"])
    assert [rows.labels[rows.ids.index(f"{name}/dog/a.png")], (rows.split == "test").sum()] == ["dog", 1]
    assert "1 images outside" in rows.notes[0]


def test_a_class_may_be_called_train(tmp_path):
    """Kills: taking any folder named train for a split."""
    write_images(tmp_path, ["train/a.png", "bus/b.png", "car/c.png"])
    assert read_folder(str(tmp_path)).labels == ["bus", "car", "train"]


def test_loose_images_are_unlabeled(tmp_path):
    write_images(tmp_path, ["cat/a.png", "x.png", "y.png"])
    rows = read_folder(str(tmp_path))
    assert rows.labels == ["cat", None, None] and "2 images" in rows.notes[0]
    write_images(tmp_path / "flat", ["1.png", "2.png"])
    assert read_folder(str(tmp_path / "flat")).labels == [None, None]


def test_two_folders(tmp_path):
    write_images(tmp_path / "known", ["cat/a.png", "dog/a.png"])
    write_images(tmp_path / "new", ["cat/a.png", "x.png", "a/b/c.png"])
    config = DataConfig(labeled=str(tmp_path / "known"), unlabeled=str(tmp_path / "new"))
    rows = read_rows(config)
    assert rows.labels == ["cat", "dog", None, None, None] and set(rows.split) == {"train"}
    assert rows.ids[2] == "unlabeled/a/b/c.png"
    assert rows.images[1].endswith("known/dog/a.png") and rows.images[3].endswith("new/cat/a.png")


def test_two_folders_refuse_overlap_and_loose_images(tmp_path):
    write_images(tmp_path, ["known/cat/a.png", "loose/a.png", "loose/cat/b.png"])
    assert "overlap" in failure(read_two_folders, str(tmp_path / "known"), str(tmp_path))
    assert "overlap" in failure(read_two_folders, str(tmp_path / "known"), str(tmp_path / "known"))
    assert "no class subfolder" in failure(read_two_folders, str(tmp_path / "loose"), str(tmp_path / "known"))
    (tmp_path / "void").mkdir()
    assert "no images" in failure(read_two_folders, str(tmp_path / "known"), str(tmp_path / "void"))


def test_empty_folders(tmp_path):
    assert "no images below" in failure(read_folder, str(tmp_path))
    write_images(tmp_path, ["cat/a.png"])
    (tmp_path / "dog").mkdir()
    assert f"class folder {tmp_path}/dog holds no images" in failure(read_folder, str(tmp_path))
    assert "is not a folder" in failure(read_folder, str(tmp_path / "cat" / "a.png"))


def test_links_stay_inside(tmp_path):
    """Kills: following links anywhere, endless walks through a link to a parent."""
    write_images(tmp_path / "outside", ["secret.png"])
    write_images(tmp_path / "data", ["cat/a.png"])
    os.symlink(tmp_path / "data" / "cat", tmp_path / "data" / "kitten")
    os.symlink(tmp_path / "data" / "cat" / "a.png", tmp_path / "data" / "cat" / "again.png")
    os.symlink(tmp_path / "data", tmp_path / "entry")
    rows = read_folder(str(tmp_path / "entry"))
    assert "cat/again.png" in rows.ids and len(rows) == 4
    os.symlink(tmp_path / "outside" / "secret.png", tmp_path / "data" / "cat" / "b.png")
    assert "leads outside" in failure(read_folder, str(tmp_path / "data"))
    os.unlink(tmp_path / "data" / "cat" / "b.png")
    os.symlink(tmp_path / "data", tmp_path / "data" / "loop")
    assert "leads outside" in failure(read_folder, str(tmp_path / "data"))


def test_names_that_are_not_utf8(tmp_path):
    write_images(tmp_path, ["cat/a.png"])
    os.rename(tmp_path / "cat" / "a.png", os.path.join(os.fsencode(tmp_path), b"cat", b"\xff.png"))
    rows = read_folder(str(tmp_path))
    assert rows.ids == ["cat/\\udcff.png"] or rows.ids == ["cat/\\xff.png"]
    assert rows.ids[0].encode() and len(rows.fingerprint) == 64
    with open(rows.images[0], "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_imagenet_split(tmp_path):
    """Kills: held-out classes of other splits kept as known, novel = all 118."""
    held_out, a, b = (imagenet_wnids(name) for name in ("held_out_118", "novel_30_A", "novel_30_B"))
    assert (len(held_out), len(a), len(b)) == (118, 30, 30) and set(a) | set(b) <= set(held_out)
    only_b = next(w for w in b if w not in a)
    write_images(tmp_path, [f"train/{w}/x.JPEG" for w in ("n01440764", a[0], only_b)])
    write_images(tmp_path, [f"val/{w}/y.JPEG" for w in ("n01440764", a[0], only_b)])
    rows = read_imagenet(str(tmp_path), "A", True)
    assert rows.known == ("n01440764",) and set(rows.labels) == {"n01440764", a[0]}
    assert rows.notes == ("1 held-out classes that are not in split A are left out",)
    assert (rows.split == "test").sum() == 2
    assert set(read_imagenet(str(tmp_path), "B", True).labels) == {"n01440764", only_b} | ({a[0]} & set(b))
    everything = read_imagenet(str(tmp_path), "A", False)
    assert len(everything) == 6 and everything.known == ()


def test_imagenet_errors(tmp_path):
    write_images(tmp_path / "a", ["n01440764/x.png"])
    assert "no folder train" in failure(read_imagenet, str(tmp_path / "a"), "A", True)
    write_images(tmp_path / "b", ["train/cat/x.png"])
    assert "wnid" in failure(read_imagenet, str(tmp_path / "b"), "A", True)
    write_images(tmp_path / "c", ["train/n01440764/x.png", "val/ILSVRC2012_val_00000001.JPEG"])
    assert "not in a wnid subfolder" in failure(read_imagenet, str(tmp_path / "c"), "A", True)
    write_images(tmp_path / "d", ["train/n01440764/x.png"])
    assert "novel wnid of split C" in failure(read_imagenet, str(tmp_path / "d"), "C", True)
