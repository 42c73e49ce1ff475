"""Features of a frozen encoder against a plain loop, and what a cache encodes again."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from tests.uno.small_run import frozen_encoder, small_config
from uno.augment import augment, augment_crops, eval_view
from uno.config import override
from uno.crops import Cropper
from uno.data import features
from uno.data import files as filesystem
from uno.data.columns import find_rows
from uno.data.decode import Decoding, decode
from uno.data.embeddings import read_vectors
from uno.data.features import FeatureCache, cached_features, compute_local, feature_job
from uno.data.files import Storage
from uno.data.images import Files
from uno.data.sampling import FEATURES, VIEW_SEED, augment_generator
from uno.data.sources import read_digits, read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError, StorageError

from .builders import encoded, pixels

CHUNK = 16
HEADS = {
    "model__finetune": "none",
    "augment__small__num_views": 0,
    "augment__num_cached_views": 3,
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A file for each chunk of 16 rows."""
    monkeypatch.setattr(features, "CHUNK_ROWS", CHUNK)
    monkeypatch.setattr(features, "ROWS_AT_ONCE", 6)
    monkeypatch.setattr(features, "PART_SECONDS", -1.0)


def config_of(**overrides):
    return small_config(**({"data__limit": 20} | HEADS | overrides))


def job_of(config=None, images=None):
    """20 training rows and 20 of the test: 2 chunks of 16 and one of 8."""
    config = config or config_of()
    task = make_task(read_digits(), config.data)
    if images is not None:
        task = replace(task, rows=replace(task.rows, images=images))
    return feature_job(config, task, frozen_encoder(config))


def rows_of(job, rows):
    """Return the job with some of its rows."""
    task, rows = job.task, np.asarray(rows)
    columns = ("labels", "eval_labels", "is_train")
    some = {name: getattr(task, name)[rows] for name in columns}
    return job._replace(task=replace(task, rows=task.rows.take(rows), **some))


def cache_of(folder, job):
    return FeatureCache(Storage(str(folder)), job)


def computed(job, encoder=None, threads=1, seen=None):
    """Return a ``compute`` for :func:`cached_features` that notes rows in ``seen``."""

    def compute(rows):
        if seen is not None:
            seen.append(rows.tolist())
        return compute_local(job, encoder or frozen_encoder(job.config), rows, threads)

    return compute


def kept(folder, job, seen=None, **options):
    """Return the features of a job by a cache, and the reasons of unreadable rows."""
    return cached_features(cache_of(folder, job), computed(job, seen=seen, **options))


def parts(folder):
    """Files of features, in the order in which they were written."""
    found = folder.glob("features/*/*.parquet")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


@torch.no_grad()
@pytest.mark.parametrize(("crop", "side"), [("pad", 8), ("resized", 10)])
def test_features_equal_a_loop_over_rows_and_views(tmp_path, crop, side):
    """Stored squares may be larger than the views, images are. Kills: views of another
    row's numbers, numbers that depend on the share of training rows, an evaluation view
    that is not the center, views of test rows, mean and std forgotten.
    """
    config = config_of(
        augment__large__crop=crop,
        augment__large__crop_scale=[0.3, 0.9],
        data__stored_size=side,
    )
    more = {
        "augment.large.jitter": 0.5,
        "augment.large.flip": 0.5,
        "data.interpolation": "bicubic",
    }
    config = override(config, more)
    images = [pixels(i, 12, 11) for i in range(40)]
    job = job_of(config, images)
    encoder, data = frozen_encoder(config), config.data
    found, reasons = kept(tmp_path, job)
    assert (
        found.shape == (40, 4, 16) and found.dtype == torch.float32 and not any(reasons)
    )
    drawn = config.augment.model_copy(
        update={"large": config.augment.large.model_copy(update={"num_views": 3})}
    )
    assert 0 < job.task.is_train.sum() < 40
    for row in range(40):
        stored = decode(images[row], side, Decoding("bicubic"))
        square = torch.from_numpy(stored.copy())[None]
        plain = encoder(eval_view(square, 8, data.mean, data.std))
        torch.testing.assert_close(found[row, :1], plain, rtol=1e-5, atol=1e-6)
        where = torch.tensor([0]), 1
        if not job.task.is_train[row]:
            assert not found[row, 1:].any()
            continue
        (number,) = features.view_seeds([str(job.task.rows.ids[row])]).tolist()
        generator = augment_generator(VIEW_SEED, FEATURES, number)
        if crop == "pad":
            expected = augment(square, drawn, generator, data.mean, data.std, *where)
        else:
            cropper = Cropper(VIEW_SEED, FEATURES, 1, drawn, side, Decoding("bicubic"))
            some, _ = cropper.crop(np.array([number]), np.array([0]), [images[row]])
            crops = cropper.split(torch.from_numpy(some))
            expected = augment_crops(
                crops, drawn, generator, data.mean, data.std, *where, side
            )
        for v, view in enumerate(expected):
            torch.testing.assert_close(
                found[row, 1 + v : 2 + v], encoder(view), rtol=1e-4, atol=1e-5
            )
        assert len(torch.unique(found[row], dim=0)) == 4


def test_without_random_views_it_is_the_evaluation_view_alone(tmp_path, monkeypatch):
    """The features are the same bits, and do not depend on the split."""
    job = job_of()
    whole, _ = kept(tmp_path, job)
    config = override(job.config, {"discover.epochs": 0, "augment.num_cached_views": 0})
    alone = job_of(config)
    monkeypatch.setattr(Cropper, "crop", lambda *_: pytest.fail("a random view"))
    found, _ = kept(tmp_path, alone)
    assert torch.equal(found, whole[:, :1])
    turned, seen = replace(alone.task, is_train=~alone.task.is_train), []
    again, _ = kept(tmp_path, alone._replace(task=turned), seen)
    assert torch.equal(again, found) and not seen
    weak = override(config, {"augment.weak": True, "augment.large.jitter": 0.5})
    assert job_of(weak).folder == alone.folder


@pytest.fixture
def passed(monkeypatch):
    """How many images pass the encoder, call by call."""
    seen, encode = list[int](), features._encode
    monkeypatch.setattr(
        features, "_encode", lambda *a: (seen.append(len(a[2])), encode(*a))[1]
    )
    return seen


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_an_image_that_is_added_is_the_only_one_to_be_encoded(tmp_path, passed, crop):
    """Wherever it stands, and to the bits of all at once. Rows that go, or come in
    another order, cost nothing. Kills: features that depend on the place of a row.
    """
    job = job_of(config_of(augment__large__crop=crop, augment__large__jitter=0.5))
    whole, _ = kept(tmp_path / "whole", job)
    (row,) = np.flatnonzero(job.task.is_train)[3:4]
    kept(tmp_path / "cache", rows_of(job, np.delete(np.arange(40), row)))
    del passed[:]
    seen = []
    found, _ = kept(tmp_path / "cache", job, seen)
    assert seen == [[row]] and passed == [1, 3]  # evaluation view, random views
    assert torch.equal(found, whole)
    some = np.random.default_rng(0).permutation(40)[:30]
    found, _ = kept(tmp_path / "cache", rows_of(job, some), seen)
    assert torch.equal(found, whole[some]) and len(seen) == 1


def test_a_row_that_moves_to_the_training_set_gets_its_views(tmp_path):
    job, seen = job_of(), []
    kept(tmp_path, job)
    is_train = job.task.is_train.copy()
    (row,) = np.flatnonzero(~is_train)[:1]
    is_train[row] = True
    other = job._replace(task=replace(job.task, is_train=is_train))
    found, _ = kept(tmp_path, other, seen)
    assert seen == [[row]] and found[row].any(dim=1).all()
    assert torch.equal(found, kept(tmp_path / "anew", other)[0])


def test_features_do_not_depend_on_the_rows_beside_them():
    """The features of a real encoder have the same bits."""
    sizes = {"data__stored_size": 32, "augment__large__size": 32}
    job = job_of(config_of(model__encoder="resnet18", **sizes))
    (chunk,) = computed(job)(np.arange(13))
    order = np.array([9, 2, 12])
    (some,) = computed(job)(order)
    assert torch.equal(some.features, chunk.features[order])


def test_any_number_of_threads_gives_the_same_bits(tmp_path):
    one, three = (
        kept(tmp_path / str(threads), job_of(), threads=threads)[0]
        for threads in (1, 3)
    )
    assert torch.equal(one, three)


@pytest.mark.parametrize(
    ("values", "same"),
    [
        (
            {
                "seed": 3,
                "model.num_heads": 5,
                "discover.epochs": 9,
                "compute.threads": 2,
                "train.batch_size": 64,
                "augment.large.num_views": 3,
                "data.unlabeled_known_fraction": 0.5,
                "data.limit": 21,
            },
            True,
        ),
        *(
            ({key: value}, False)
            for key, value in {
                "augment.num_cached_views": 4,
                "model.width": 8,
                "augment.large.flip": 0.5,
                "augment.large.size": 6,
                "data.stored_size": 10,
                "data.mean": (0.3, 0.3, 0.4),
                "data.std": (0.3, 0.3, 0.4),
                "data.interpolation": "bicubic",
                "compute.precision": "bf16",
            }.items()
        ),
    ],
)
def test_the_cache_holds_what_features_depend_on_and_nothing_else(values, same):
    job = job_of()
    assert (job_of(override(job.config, values)).folder == job.folder) == same


def test_the_cache_changes_with_weights_and_versions(monkeypatch):
    job, encoder = job_of(), frozen_encoder(config_of())
    assert feature_job(job.config, job.task, encoder).folder == job.folder
    encoder.layer2[0].conv1.weight.data.view(torch.int32)[0, 0, 0, 0] ^= 1
    folders = {job.folder, feature_job(job.config, job.task, encoder).folder}
    monkeypatch.setattr(features, "version", lambda name: "0.1")
    assert len(folders | {job_of().folder}) == 3


def test_an_image_in_memory_that_changes_is_the_only_one_to_be_encoded(tmp_path):
    images, seen = [pixels(i) for i in range(40)], []
    whole, _ = kept(tmp_path, job_of(images=images))
    images[3] = pixels(99)
    found, _ = kept(tmp_path, job_of(images=images), seen)
    assert seen == [[3]] and not torch.equal(found[3], whole[3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def narrow(path):
    """Give the vectors of a file half their length."""
    table = pq.read_table(path)
    values = pa.array(np.zeros(len(table) * 8, np.float32))
    column = pa.FixedSizeListArray.from_arrays(values, 8)
    number = table.column_names.index("embedding")
    pq.write_table(table.set_column(number, "embedding", column), path)


DAMAGE = {
    "a flipped bit": flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "no features": lambda path: pq.write_table(pa.table({"id": ["a"]}), path),
    "of another width": narrow,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_noticed_and_computed_again(tmp_path, caplog, damage):
    """One line. Kills: damage that is fatal, or that is believed."""
    job, seen = job_of(), []
    whole, _ = kept(tmp_path, job)
    _, second, _ = parts(tmp_path)
    DAMAGE[damage](second)
    found, reasons = kept(tmp_path, job, seen)
    assert torch.equal(found, whole) and not any(reasons)
    assert seen == [list(range(16, 32))]
    (line,) = caplog.messages
    assert second.name in line and tmp_path.name in line and "\n" not in line
    assert len(parts(tmp_path)) == 3 and not second.exists()
    assert torch.equal(kept(tmp_path, job, seen)[0], whole) and len(seen) == 1


def test_a_full_disk_is_one_line_that_names_the_option(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(StorageError, match=r"No space left.*--compute\.cache"):
        kept(tmp_path, job_of())


def test_files_are_written_by_size_or_time(tmp_path, monkeypatch):
    """Kills: a file for each chunk of a million rows."""
    monkeypatch.setattr(features, "PART_SECONDS", 1e9)
    job = job_of()
    whole, _ = kept(tmp_path / "one", job)
    monkeypatch.setattr(features, "PART_BYTES", 4 * 30 * 4 * 16)  # of 30 rows
    found, _ = kept(tmp_path / "two", job)
    assert [len(parts(tmp_path / name)) for name in ("one", "two")] == [1, 2]
    assert torch.equal(found, whole)
    assert torch.equal(kept(tmp_path / "two", job)[0], whole)


def test_a_stopped_job_goes_on(tmp_path, monkeypatch):
    """Only what is missing is encoded, to the same bits; progress counts the rest."""
    monkeypatch.setattr(features, "PART_SECONDS", 1e9)
    job, seen, progress = job_of(), [], []

    def stop_after_two(rows):
        yield from islice(computed(job)(rows), 2)
        raise KeyboardInterrupt

    cache = cache_of(tmp_path, job)
    with pytest.raises(KeyboardInterrupt):
        cached_features(cache, stop_after_two)
    compute = computed(job, seen=seen)
    found, _ = cached_features(cache, compute, lambda *done: progress.append(done))
    assert seen == [list(range(32, 40))] and progress == [(32, 40), (40, 40)]
    assert torch.equal(found, kept(tmp_path / "another", job)[0])


def test_a_cache_that_cannot_be_written_is_one_line_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    seen = []
    with pytest.raises(StorageError, match=r"^[^\n]*--compute\.cache[^\n]*$"):
        kept(tmp_path / "file" / "cache", job_of(), seen)
    assert not seen


def test_images_that_cannot_be_read_are_tried_again(tmp_path):
    """Their neighbors in the batch keep their features."""
    good = [encoded(pixels(i)) for i in range(40)]
    images = [*good]
    images[3], images[17] = b"broken", np.zeros((4, 4), np.uint8)
    job, seen = job_of(images=images), []
    whole, _ = kept(tmp_path / "good", job_of(images=good))
    for _ in range(2):
        found, reasons = kept(tmp_path, job, seen)
        assert [i for i, reason in enumerate(reasons) if reason] == [3, 17]
        others = np.delete(np.arange(40), [3, 17])
        assert not found[[3, 17]].any() and torch.equal(found[others], whole[others])
    found, reasons = kept(tmp_path, job_of(images=good), seen)
    assert torch.equal(found, whole) and not any(reasons)
    assert seen[1:] == [[3, 17]] * 2


def test_files_have_the_format_of_vectors(tmp_path):
    """``vectors:`` reads the views of each row."""
    job = job_of()
    whole, _ = kept(tmp_path, job)
    rows = read_vectors(cache_of(tmp_path, job).path)
    place = find_rows(rows.ids, job.task.rows.ids[:40].to_pylist())
    own = [place[str(job.task.rows.ids[row])] for row in range(40)]
    values, reasons = rows.images.vectors(np.array(own))
    train = torch.from_numpy(job.task.is_train)
    assert torch.equal(values[train], whole[train]) and not any(reasons)
    assert torch.equal(values[:, 0], whole[:, 0])


def test_an_encoder_that_gives_nan_is_refused(tmp_path):
    job = job_of()
    encoder = frozen_encoder(job.config)
    nn.init.constant_(encoder.conv1.weight, float("nan"))
    with pytest.raises(
        ConfigError, match=r"^model\.encoder resnet_small returns non-finite numbers$"
    ):
        kept(tmp_path, job, encoder=encoder)
    assert not parts(tmp_path)


def test_where_features_are_kept(monkeypatch):
    """The option says it, then the variable, then the user's cache directory."""
    monkeypatch.setenv("HOME", "/home/me")
    for name in (filesystem.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert features.cache_directory(config_of()) == "/home/me/.cache/uno"
    for name, expected in (("XDG_CACHE_HOME", "/x/uno"), ("UNO_CACHE", "/x")):
        monkeypatch.setenv(name, "/x")
        assert features.cache_directory(config_of()) == expected
    for given, expected in (("~/c", "/home/me/c"), ("s3://b/c", "s3://b/c")):
        config = config_of(compute__cache=given)
        assert features.cache_directory(config) == expected


def compute_in_child(folder, slow):
    """What the processes of the next test run."""
    features.CHUNK_ROWS, features.ROWS_AT_ONCE, features.PART_SECONDS = CHUNK, 6, -1.0
    job = job_of()

    def compute(rows):
        for count, chunk in enumerate(computed(job)(rows)):
            if slow and count:
                signal.pause()
            yield chunk

    cached_features(cache_of(folder, job), compute)


@pytest.mark.slow
def test_a_killed_process_and_two_at_once(tmp_path):
    """SIGKILL after the first of three chunks; two processes encode the others."""
    root = Path(__file__).parents[3]

    def start(slow):
        code = (
            "from tests.uno.data.test_features import *;"
            f" compute_in_child({str(tmp_path)!r}, {slow})"
        )
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment)

    child = start(True)
    for _ in range(1200):
        if parts(tmp_path) or child.poll() is not None:
            break
        threading.Event().wait(0.1)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    job, seen = job_of(), []
    assert len(cache_of(tmp_path, job).read()[1]) == 24
    assert [child.wait() for child in (start(False), start(False))] == [0, 0]
    found, _ = kept(tmp_path, job, seen)
    assert not seen and torch.equal(found, kept(tmp_path / "anew", job)[0])


ENCODER = """
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_features = nn.Conv2d(3, 16, 3), 16
    def forward(self, images):
        return self.layer(images).relu().mean(dim=(2, 3)) * {factor}
"""


def test_the_cache_changes_with_the_code_of_a_callable(tmp_path, monkeypatch):
    """Same weights, another ``forward``, in the module of the callable or that of
    its layers.
    """
    monkeypatch.chdir(tmp_path)
    config, folders = config_of(model__encoder="mine_factory:build"), []
    Path("mine_factory.py").write_text(
        "from mine_layers import Mine\ndef build(): return Mine()\n"
    )
    for factor in (1, 1, 2):
        Path("mine_layers.py").write_text(ENCODER.format(factor=factor))
        for name in ("mine_factory", "mine_layers"):
            sys.modules.pop(name, None)
        task = make_task(read_digits(), config.data)
        folders.append(feature_job(config, task, frozen_encoder(config)).folder)
    assert folders[0] == folders[1] != folders[2]


def folder_job(folder):
    """40 images of a folder, half of them without a label: BMP files, all of one
    size.
    """
    config = config_of(
        data__source=f"folder:{folder}", data__known_classes="a,b", data__limit=None
    )
    rows = read_rows(config.data)
    return feature_job(config, make_task(rows, config.data), frozen_encoder(config))


def write_bitmaps(folder, numbers, first_seed=0):
    for number in numbers:
        path = folder / "abcd"[number // 10] / f"{number:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels(first_seed + number), "BMP"))


def test_a_file_that_is_overwritten_or_added_is_the_only_one_to_be_encoded(tmp_path):
    """Of the same size. Kills: sizes that stand for content."""
    data, cache, seen = tmp_path / "data", tmp_path / "cache", []
    write_bitmaps(data, range(39))
    whole, _ = kept(cache, folder_job(data))
    write_bitmaps(data, [5], 100)
    write_bitmaps(data, [39])
    job = folder_job(data)
    found, _ = kept(cache, job, seen)
    assert seen == [[5, 39]]
    assert torch.equal(found, kept(tmp_path / "anew", job)[0])
    assert not torch.equal(found[5], whole[5]) and torch.equal(found[6:39], whole[6:])
    kept(cache, folder_job(data), seen)
    assert len(seen) == 1


def test_features_of_images_that_were_moved_are_kept(tmp_path):
    """Also of a copy with its times."""
    data, cache, seen = tmp_path / "data", tmp_path / "cache", []
    write_bitmaps(data, range(40))
    whole, _ = kept(cache, folder_job(data))
    shutil.copytree(data, tmp_path / "copied")
    data.rename(tmp_path / "moved")
    for name in ("copied", "moved"):
        assert torch.equal(kept(cache, folder_job(tmp_path / name), seen)[0], whole)
    assert not seen


def test_remote_files_that_are_named_one_by_one_are_looked_up(tmp_path, monkeypatch):
    """An object that was overwritten is encoded again."""
    store = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    monkeypatch.setattr(filesystem, "_connect", lambda host, options: (store, ""))
    names = [f"{number}.png" for number in range(3)]
    for name in names:
        (tmp_path / name).write_bytes(encoded(pixels(0)))
    images = Files.of([f"s3://bucket/{name}" for name in names], [(-1, -1)] * 3)
    before = features.image_versions(images, np.arange(3)).to_pylist()
    os.utime(tmp_path / names[1], (1e9, 1e9))
    after = features.image_versions(images, np.arange(3)).to_pylist()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
