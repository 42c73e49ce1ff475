"""Every source from real files; every error is one line."""

import codecs
import os
import pickle
import subprocess

import numpy as np
import pytest
from sklearn.datasets import load_digits

from uno.config import DataConfig
from uno.data.cifar import CIFAR10, CIFAR100
from uno.data.decode import decode
from uno.data.sources import read_rows, recognise
from uno.errors import ConfigError

from .builders import SHARED, pixels, write_cifar, write_hf, write_images


def read(source, **config):
    return read_rows(DataConfig(source=str(source), **config))


def failure(source, **config):
    with pytest.raises(ConfigError) as caught:
        read(source, **config)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def test_digits_are_real_and_split_80_20_per_class():
    rows = read("digits")
    assert len(rows) == 1797 and len(set(rows.ids)) == 1797
    digits = load_digits()
    assert rows.labels == [str(v) for v in digits.target]
    assert rows.images[5].shape == (8, 8, 3) and rows.images[5].max() == 255
    np.testing.assert_array_equal(rows.images[5][..., 1], np.round(digits.images[5] * 255 / 16))
    for digit in map(str, range(10)):
        split = rows.split[[label == digit for label in rows.labels]]
        assert abs((split == "test").mean() - 0.2) < 0.01


def test_digits_fingerprint_is_stable():
    assert read("digits").fingerprint == read("digits").fingerprint
    assert len(read("digits").fingerprint) == 64


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.prefix)
@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("fortran", [False, True])
def test_cifar_pickles_read_as_torchvision_does(tmp_path, layout, protocol, fortran):
    """Kills: channels read as the last axis of the file, rows and columns swapped, Fortran order ignored."""
    first = write_cifar(tmp_path, layout, protocol=protocol, fortran=fortran)
    rows = read(f"{layout.prefix}:{tmp_path}")
    num_files = len(layout.train) + 1
    assert len(rows) == 20 * num_files and (rows.split == "test").sum() == 20
    np.testing.assert_array_equal(rows.images[3], first[3].reshape(3, 32, 32).transpose(1, 2, 0))
    np.testing.assert_array_equal(decode(rows.images[3], 32), first[3].reshape(3, 32, 32))
    assert rows.labels[7] == "class 7" and rows.class_names[10 % layout.num_classes] in (
        "class 0",
        "class 10",
    )
    assert recognise(str(tmp_path)) == layout.prefix
    assert read(tmp_path / layout.folder).fingerprint == rows.fingerprint


def test_cifar_python_2_pickles(tmp_path):
    """The published files were pickled by Python 2: raw bytes as text, numpy.core module names."""
    write_cifar(tmp_path, CIFAR10, rows=2)
    data = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
    opcodes = b"".join(
        [
            b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
            b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            b"T" + (2 * 3072).to_bytes(4, "little") + data.tobytes() + b"tb",
            b"U\x06labels](K\x01K\x00eu.",
        ]
    )
    (tmp_path / CIFAR10.folder / "test_batch").write_bytes(opcodes)
    rows = read(f"cifar10:{tmp_path}")
    np.testing.assert_array_equal(rows.images[-2].transpose(2, 0, 1).ravel(), data[0])
    assert rows.labels[-2:] == ["class 1", "class 0"]


PWNED = f"/tmp/uno-pwned-{os.getpid()}"


class Evil:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "evil",
    [
        Evil(os.system, f"touch {PWNED}"),
        Evil(eval, "1"),
        Evil(subprocess.Popen, ["true"]),
        Evil(
            np.dtype, "O"
        ),  # the stand-in takes any argument; nothing of numpy runs, the field check refuses it
        Evil(np.ndarray, (2, 3072)),
        Evil(codecs.encode, "x", "rot13"),
        Evil(codecs.encode, b"x", "zip"),
        Evil(getattr, "x", "upper"),
    ],
    ids=["system", "eval", "popen", "dtype", "ndarray", "rot13", "zip", "getattr"],
)
@pytest.mark.parametrize("place", ["data", "labels", "whole"])
def test_malicious_pickle_is_refused(tmp_path, evil, place):
    write_cifar(tmp_path, CIFAR10, rows=2)
    content = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]} | {place: evil}
    file = tmp_path / CIFAR10.folder / "data_batch_2"
    file.write_bytes(pickle.dumps(evil if place == "whole" else content))
    assert str(file) in failure(f"cifar10:{tmp_path}")
    assert not os.path.exists(PWNED)


def test_damaged_cifar_files_are_one_line(tmp_path):
    """Every truncation and flipped byte of a small file: an error or a read, never another exception."""
    write_cifar(tmp_path, CIFAR10, rows=1)
    file = tmp_path / CIFAR10.folder / "data_batch_1"
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [good[: rng.integers(len(good))] for _ in range(40)]
    for place in rng.integers(0, 220, 60):
        damaged.append(good[:place] + bytes([good[place] ^ int(rng.integers(1, 256))]) + good[place + 1 :])
    refused = 0
    for content in damaged:
        file.write_bytes(content)
        try:
            read(f"cifar10:{tmp_path}")
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


def test_cifar_labels_and_shapes_are_checked(tmp_path):
    write_cifar(tmp_path, CIFAR10, rows=2)
    file = tmp_path / CIFAR10.folder / "test_batch"
    good = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}
    for wrong, text in (
        ({"labels": [0, 10]}, "0 to 9"),
        ({"labels": [0, -1]}, "0 to 9"),
        ({"labels": [0, 1, 2]}, "uint8 (3, 3072)"),
        ({"data": np.zeros((2, 3072), np.float32)}, "must be uint8"),
        ({"data": [1]}, "no field 'data'"),
    ):
        file.write_bytes(pickle.dumps(good | wrong))
        assert text in failure(f"cifar10:{tmp_path}")


def test_missing_cifar_says_how_to_get_it(tmp_path):
    assert "--data.download" in failure(f"cifar10:{tmp_path}")
    assert "no such file or folder" in failure(f"cifar100:{tmp_path}/nothing")


def test_download_goes_through_torchvision(tmp_path, monkeypatch):
    """The archive is asked for only with ``download``, and a network error is one line."""
    calls = []

    def fetch(url, root, filename, md5):
        calls.append((url, filename, md5))
        write_cifar(tmp_path / "new", CIFAR10, rows=2)

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", fetch)
    assert len(read(f"cifar10:{tmp_path}/new", download=True)) == 12
    assert calls == [("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "cifar-10-python.tar.gz",
                      "c58f30108f718f92721af3b95e74349a")]  # fmt: skip

    def offline(url, root, filename, md5):
        raise OSError("no\nnetwork")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", offline)
    assert "no network" in failure(f"cifar10:{tmp_path}/other", download=True)


def test_a_bare_path_is_recognised_by_content_not_by_name(tmp_path):
    """Kills: dispatch by substring (a folder named cifar10 that holds class folders)."""
    write_images(tmp_path / "cifar10-parquet-imagenet", ["cat/a.png", "dog/b.png"])
    assert recognise(str(tmp_path / "cifar10-parquet-imagenet")) == "folder"
    write_hf(tmp_path / "folder" / "data", ["a", "b"])
    assert recognise(str(tmp_path / "folder")) == "parquet"
    assert recognise(str(tmp_path / "folder" / "data")) == "parquet"
    assert len(read(tmp_path / "folder" / "data" / "train-00000-of-00001.parquet")) == 12
    write_images(tmp_path / "x", ["train/n01440764/a.png", "train/n01530575/b.png"])
    assert recognise(str(tmp_path / "x")) == "imagenet"
    write_images(tmp_path / "y", ["train/cat/a.png", "train/dog/b.png"])
    assert recognise(str(tmp_path / "y")) == "folder"
    for layout in (CIFAR10, CIFAR100):
        write_cifar(tmp_path / "z", layout, rows=1)
    assert "cifar10:" in failure(tmp_path / "z")


def test_unknown_prefix_suggests_the_nearest(tmp_path):
    assert "did you mean cifar10:/x" in failure("cifar-10:/x")
    assert "did you mean imagenet:/x" in failure("imagnet:/x")
    assert "known are digits, cifar10:" in failure("qqq:/x")
    assert "did you mean 'digits'?" in failure("digit")
    (tmp_path / "odd:name").mkdir()
    write_images(tmp_path / "odd:name", ["cat/a.png"])
    assert len(read(tmp_path / "odd:name")) == 1


@pytest.mark.parametrize(
    "source", ["", "folder:", "imagenet:", "/nowhere", "parquet:/nowhere", "folder:/a\0b"]
)
def test_missing_paths(source):
    failure(source)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "data.txt").write_text("x")
    assert ".parquet, .csv or .jsonl" in failure(tmp_path / "data.txt")


def test_fingerprint_follows_content_not_place(tmp_path):
    """Kills: fingerprints of paths, of names only, or of labels only."""
    for place in ("a", "b"):
        write_images(tmp_path / place, ["cat/1.png", "dog/2.png"])
    a, b = read(tmp_path / "a"), read(tmp_path / "b")
    assert a.fingerprint == b.fingerprint
    (tmp_path / "b" / "dog" / "2.png").write_bytes(b"longer or shorter")
    assert read(tmp_path / "b").fingerprint != a.fingerprint
    (tmp_path / "a" / "dog").rename(tmp_path / "a" / "wolf")
    assert read(tmp_path / "a").fingerprint != a.fingerprint
    digits = read("digits")
    changed = digits.images.copy()
    changed[7, 0, 0, 0] ^= 1
    assert (
        type(digits)(digits.ids, changed, digits.labels, digits.split, "digits").fingerprint
        != digits.fingerprint
    )
    taken = digits.take(np.arange(1797))
    assert taken.fingerprint == digits.fingerprint
    assert digits.take(np.arange(1796)).fingerprint != digits.fingerprint


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_shared_cifar10_jpeg():
    rows = read(SHARED / "cifar10-jpeg")
    assert len(rows) == 60_000 and (rows.split == "test").sum() == 10_000
    assert rows.class_names[:2] == ("airplane", "automobile")
    assert decode(rows.images[59_999], 32).shape == (3, 32, 32)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_shared_imagenet():
    rows = read(f"imagenet:{SHARED}/imagenet-fullsize")
    assert "6 held-out classes" in rows.notes[0] and len(rows) == 94
    assert len(read(SHARED / "imagenet-sample", known_classes="first:5")) == 250


def test_images_are_read_lazily(tmp_path):
    write_images(tmp_path, ["cat/1.png"])
    rows = read(tmp_path)
    (tmp_path / "cat" / "1.png").write_bytes(b"")
    assert isinstance(rows.images[0], str)
    assert pixels(0).dtype == np.uint8
