"""Features of a frozen encoder against a plain loop, and what a cache encodes again."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock, patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from tests.uno.small_run import frozen_encoder, small_config
from uno.augment import augment_crops, eval_view
from uno.config import override
from uno.crops import Cropper
from uno.data import features
from uno.data.decode import Decoding, decode
from uno.data.features import FeatureCache, cached_features, compute_local, feature_job
from uno.data.files import Storage
from uno.data.images import Files
from uno.data.sampling import FEATURES, VIEW_SEED, augment_generator
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError, StorageError

from .builders import encoded, pixels, write_images

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
    task = make_task(read_rows(config.data), config.data)
    if images is not None:
        task = replace(task, rows=replace(task.rows, images=images))
    return feature_job(config, task, frozen_encoder(config))


def rows_of(job, rows):
    """Return the job with some of its rows."""
    task, rows = job.task, np.asarray(rows)
    columns = ("labels", "eval_labels", "is_train")
    some = {name: getattr(task, name)[rows] for name in columns}
    return job._replace(task=replace(task, rows=task.rows.take(rows), **some))


class Encoded(NamedTuple):
    """The features of a job by a cache, the reasons of unreadable rows, and the rows
    that were encoded now.
    """

    features: torch.Tensor
    reasons: list[str | None]
    encoded_now: list[int]


def encode(folder, job, encoder=None, threads=1):
    encoder, encoded_now = encoder or frozen_encoder(job.config), []

    def compute(rows):
        encoded_now.extend(rows.tolist())
        return compute_local(job, encoder, rows, threads)

    cache = FeatureCache(Storage(str(folder)), job)
    return Encoded(*cached_features(cache, compute), encoded_now)


def parts(folder):
    """Files of features, in the order in which they were written."""
    found = folder.glob("features/*/*.parquet")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def expected_views(config, row_id, image):
    """Return three random views of an image, by the functions that training uses."""
    (number,) = features.view_seeds([row_id]).tolist()
    generator = augment_generator(VIEW_SEED, FEATURES, number)
    data, drawn = config.data, override(config, {"augment.large.num_views": 3}).augment
    cropper = Cropper(
        VIEW_SEED, FEATURES, 1, drawn, data.stored_size, Decoding("bicubic")
    )
    crops, _ = cropper.crop(np.array([number]), np.array([0]), [image])
    return augment_crops(
        cropper.split(torch.from_numpy(crops)),
        drawn,
        generator,
        data.mean,
        data.std,
        torch.tensor([0]),
        1,
        data.stored_size,
    )


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
        augment__large__jitter=0.5,
        augment__large__flip=0.5,
        data__stored_size=side,
        data__interpolation="bicubic",
    )
    images = [pixels(i, 12, 11) for i in range(40)]
    job = job_of(config, images)
    encoder = frozen_encoder(config)
    found, reasons, _ = encode(tmp_path, job)
    assert (found.shape, found.dtype) == ((40, 4, 16), torch.float32)
    assert not any(reasons)
    assert 0 < job.task.is_train.sum() < 40
    for row, image in enumerate(images):
        square = torch.from_numpy(decode(image, side, Decoding("bicubic")).copy())
        plain = eval_view(square[None], 8, config.data.mean, config.data.std)
        views = [encoder(plain)]
        if job.task.is_train[row]:
            random = expected_views(config, str(job.task.rows.ids[row]), image)
            views += [encoder(view) for view in random]
            assert len(torch.unique(found[row], dim=0)) == 4
        expected = torch.zeros(4, 16)
        expected[: len(views)] = torch.cat(views)
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


def test_without_random_views_it_is_the_evaluation_view_alone(tmp_path):
    """The features are the same bits, and do not depend on the split."""
    job = job_of()
    whole = encode(tmp_path, job).features
    config = override(job.config, {"discover.epochs": 0, "augment.num_cached_views": 0})
    alone = job_of(config)
    assert torch.equal(encode(tmp_path, alone).features, whole[:, :1])
    turned = replace(alone.task, is_train=~alone.task.is_train)
    assert encode(tmp_path, alone._replace(task=turned)).encoded_now == []
    weak = override(config, {"augment.weak": True, "augment.large.jitter": 0.5})
    assert job_of(weak).folder == alone.folder


def test_an_encoder_may_have_no_weights(tmp_path):
    pixels_alone = torch.nn.Flatten().eval()
    pixels_alone.num_features = 3 * 8 * 8
    job = feature_job(job_of().config, job_of().task, pixels_alone)
    found = encode(tmp_path, job, pixels_alone).features
    assert found.shape == (40, 4, 3 * 8 * 8) and found.any()


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_an_image_that_is_added_is_the_only_one_to_be_encoded(tmp_path, crop):
    """Wherever it stands, and to the bits of all at once by many threads. Rows that
    go, or come in another order, cost nothing, and a row that moves to the training
    set gets its views. Kills: features that depend on the place of a row.
    """
    job = job_of(config_of(augment__large__crop=crop, augment__large__jitter=0.5))
    whole = encode(tmp_path / "whole", job, threads=3).features
    (row,) = np.flatnonzero(job.task.is_train)[3:4]
    encode(tmp_path / "cache", rows_of(job, np.delete(np.arange(40), row)))
    found = encode(tmp_path / "cache", job)
    assert found.encoded_now == [row]
    assert torch.equal(found.features, whole)
    some = np.random.default_rng(0).permutation(40)[:30]
    found = encode(tmp_path / "cache", rows_of(job, some))
    assert found.encoded_now == []
    assert torch.equal(found.features, whole[some])
    (moved,) = np.flatnonzero(~job.task.is_train)[:1]
    job.task.is_train[moved] = True
    found = encode(tmp_path / "cache", job)
    assert found.encoded_now == [moved]
    assert torch.equal(found.features, encode(tmp_path / "anew", job).features)


def test_features_do_not_depend_on_the_rows_beside_them():
    """The features of a real encoder have the same bits."""
    sizes = {"data__stored_size": 32, "augment__large__size": 32}
    job = job_of(config_of(model__encoder="resnet18", **sizes))
    encoder, some = frozen_encoder(job.config), np.array([9, 2, 12])
    (chunk,) = compute_local(job, encoder, np.arange(13), threads=1)
    (alone,) = compute_local(job, encoder, some, threads=1)
    assert torch.equal(alone.features, chunk.features[some])


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


def test_the_cache_changes_with_weights_versions_and_code(monkeypatch):
    job, encoder = job_of(), frozen_encoder(config_of())
    assert feature_job(job.config, job.task, encoder).folder == job.folder
    encoder.layer2[0].conv1.weight.data.view(torch.int32)[0, 0, 0, 0] ^= 1
    folders = {job.folder, feature_job(job.config, job.task, encoder).folder}
    monkeypatch.setattr(features, "version", lambda name: "0.1")
    folders.add(job_of().folder)
    monkeypatch.setattr(features, "code_of", lambda *_: {"code": {"mine": "0f"}})
    assert len(folders | {job_of().folder}) == 4


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def narrow(path):
    """Give the vectors of a file half their length."""
    table = pq.read_table(path)
    half = pa.array([[0.0] * 8] * len(table), pa.list_(pa.float32(), 8))
    place = table.column_names.index("embedding")
    pq.write_table(table.set_column(place, "embedding", half), path)


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
    job = job_of()
    whole = encode(tmp_path, job)
    _, second, _ = parts(tmp_path)
    DAMAGE[damage](second)
    again = encode(tmp_path, job)
    assert torch.equal(again.features, whole.features)
    assert again.encoded_now == [*range(16, 32)]
    (line,) = caplog.messages
    assert re.fullmatch(rf".*{tmp_path.name}/{job.folder}/{second.name}.*", line)
    assert second not in parts(tmp_path)
    assert encode(tmp_path, job).encoded_now == []


def test_a_file_that_cannot_be_reached_for_a_moment_is_kept(tmp_path):
    job = job_of()
    encode(tmp_path, job)
    before = parts(tmp_path)
    error = OSError("AWS Error SLOW_DOWN: please reduce your request rate")
    with (
        patch.object(features.pq, "ParquetFile", side_effect=error),
        pytest.raises(StorageError, match="SLOW_DOWN"),
    ):
        encode(tmp_path, job)
    assert parts(tmp_path) == before


def test_a_cache_that_cannot_be_written_is_one_line_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    job, compute = job_of(), Mock()
    with pytest.raises(StorageError, match=r"^[^\n]*--compute\.cache[^\n]*$"):
        cached_features(
            FeatureCache(Storage(str(tmp_path / "file" / "cache")), job), compute
        )
    compute.assert_not_called()


def test_files_are_written_by_size_or_time(tmp_path, monkeypatch):
    """Kills: a file for each chunk of a million rows."""
    monkeypatch.setattr(features, "PART_SECONDS", 1e9)
    job = job_of()
    encode(tmp_path / "one", job)
    monkeypatch.setattr(features, "PART_BYTES", 4 * 30 * 4 * 16)  # of 30 rows
    whole = encode(tmp_path / "two", job)
    assert [len(parts(tmp_path / name)) for name in ("one", "two")] == [1, 2]
    assert torch.equal(encode(tmp_path / "two", job).features, whole.features)


def test_a_stopped_job_goes_on(tmp_path, monkeypatch):
    """Only what is missing is encoded, to the same bits; progress counts the rest."""
    monkeypatch.setattr(features, "PART_SECONDS", 1e9)
    job, progress = job_of(), []
    encoder = frozen_encoder(job.config)

    def stop_after_two(rows):
        yield from islice(compute_local(job, encoder, rows, 1), 2)
        raise KeyboardInterrupt

    cache = FeatureCache(Storage(str(tmp_path / "stopped")), job)
    with pytest.raises(KeyboardInterrupt):
        cached_features(cache, stop_after_two)
    found, _ = cached_features(
        cache,
        lambda rows: compute_local(job, encoder, rows, 1),
        lambda *done: progress.append(done),
    )
    assert progress == [(32, 40), (40, 40)]
    assert torch.equal(found, encode(tmp_path / "another", job).features)


def test_images_that_cannot_be_read_or_have_changed_are_encoded_again(tmp_path):
    """Their neighbors in the batch keep their features."""
    good = [encoded(pixels(i)) for i in range(40)]
    images = [*good]
    images[3], images[17] = b"broken", np.zeros((4, 4), np.uint8)
    whole = encode(tmp_path / "good", job_of(images=good)).features
    expected = whole.clone()
    expected[[3, 17]] = 0
    encode(tmp_path, job_of(images=images))
    found = encode(tmp_path, job_of(images=images))
    assert [i for i, reason in enumerate(found.reasons) if reason] == [3, 17]
    assert torch.equal(found.features, expected)
    repaired = encode(tmp_path, job_of(images=good))
    assert torch.equal(repaired.features, whole)
    assert not any(repaired.reasons)
    assert found.encoded_now == repaired.encoded_now == [3, 17]
    good[5] = encoded(pixels(99))
    changed = encode(tmp_path, job_of(images=good))
    assert changed.encoded_now == [5]
    assert not torch.equal(changed.features[5], whole[5])


def test_an_encoder_that_gives_nan_is_refused(tmp_path):
    job = job_of()
    encoder = frozen_encoder(job.config)
    nn.init.constant_(encoder.conv1.weight, float("nan"))
    with pytest.raises(ConfigError, match=r"^model\.encoder resnet_small .*non-finite"):
        encode(tmp_path, job, encoder)
    assert not parts(tmp_path)


@pytest.mark.parametrize(
    ("variables", "option", "expected"),
    [
        ({}, "", "/home/me/.cache/uno"),
        ({"XDG_CACHE_HOME": "/x"}, "", "/x/uno"),
        ({"XDG_CACHE_HOME": "/x", "UNO_CACHE": "/c"}, "", "/c"),
        ({"UNO_CACHE": "/c"}, "~/mine", "/home/me/mine"),
        ({"UNO_CACHE": "/c"}, "s3://b/c", "s3://b/c"),
    ],
)
def test_where_features_are_kept(monkeypatch, variables, option, expected):
    """The option says it, then the variable, then the user's cache directory."""
    monkeypatch.delenv("UNO_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    config = config_of(**({"compute__cache": option} if option else {}))
    assert features.cache_directory(config) == expected


def compute_in_child(folder, slow):
    """What the processes of the next test run: chunks, and after the first one a pause
    without end if ``slow``.
    """
    features.CHUNK_ROWS, features.PART_SECONDS = CHUNK, -1.0
    job = job_of()

    def compute(rows):
        for chunk in compute_local(job, frozen_encoder(job.config), rows, 1):
            yield chunk
            if slow:
                signal.pause()

    cached_features(FeatureCache(Storage(folder), job), compute)


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

    child = start(slow=True)
    while not parts(tmp_path) and child.poll() is None:
        time.sleep(0.1)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    job = job_of()
    assert len(FeatureCache(Storage(str(tmp_path)), job).read()[1]) == 24
    assert [child.wait() for child in (start(False), start(False))] == [0, 0]
    found = encode(tmp_path, job)
    assert found.encoded_now == []
    assert torch.equal(found.features, encode(tmp_path / "anew", job).features)


def folder_job(folder):
    """40 images of a folder, half of them without a label."""
    return job_of(
        config_of(
            data__source=f"folder:{folder}", data__known_classes="a,b", data__limit=None
        )
    )


def write_bitmaps(folder, numbers, first_seed=0):
    """Write BMP files, which all have the same size."""
    for number in numbers:
        path = folder / "abcd"[number // 10] / f"{number:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels(first_seed + number), "BMP"))


def test_a_file_that_is_overwritten_or_added_is_the_only_one_to_be_encoded(tmp_path):
    """Of the same size. Files that were moved, or copied with their times, keep their
    features. Kills: sizes that stand for content.
    """
    data, cache = tmp_path / "data", tmp_path / "cache"
    write_bitmaps(data, range(39))
    encode(cache, folder_job(data))
    shutil.copytree(data, tmp_path / "copied")
    data.rename(tmp_path / "moved")
    for name in ("copied", "moved"):
        assert encode(cache, folder_job(tmp_path / name)).encoded_now == []
    write_bitmaps(tmp_path / "moved", [5], first_seed=100)
    write_bitmaps(tmp_path / "moved", [39])
    job = folder_job(tmp_path / "moved")
    found = encode(cache, job)
    assert found.encoded_now == [5, 39]
    assert torch.equal(found.features, encode(tmp_path / "anew", job).features)


def test_remote_files_that_are_named_one_by_one_are_looked_up(bucket):
    """An object that was overwritten is encoded again."""
    write_images(bucket, ["a.png", "b.png"])
    images = Files.of(["s3://bucket/a.png", "s3://bucket/b.png"], [(-1, -1)] * 2)
    before = features.image_versions(images, np.arange(2))
    os.utime(bucket / "b.png", (1e9, 1e9))
    after = features.image_versions(images, np.arange(2))
    assert after[0] == before[0]
    assert after[1] != before[1]
