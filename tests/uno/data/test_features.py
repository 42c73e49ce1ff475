"""Features of a frozen encoder against a plain loop, and a cache that nothing makes
lie.
"""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import ImageFile
from torch import nn

from tests.uno.small_run import small_config
from uno.augment import augment, augment_crops, eval_view
from uno.config import override
from uno.crops import Cropper
from uno.data import decode as decode_module
from uno.data import features, mapped
from uno.data.columns import Labels
from uno.data.decode import decode
from uno.data.features import FeatureCache, cached_features, compute_local, feature_job
from uno.data.files import Storage
from uno.data.output import seal
from uno.data.plan import FEATURES, augment_generator
from uno.data.resident import assemble
from uno.data.sources import read_digits, read_rows
from uno.data.splits import make_task
from uno.encoder import build_encoder
from uno.errors import ConfigError, StorageError

from .builders import encoded, pixels

SHARD = 16
HEADS = {
    "model__finetune": "none",
    "augment__small__num_views": 0,
    "augment__num_cached_views": 3,
}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features, "SHARD_ROWS", SHARD)
    monkeypatch.setattr(features, "ROWS_AT_ONCE", 6)


def config_of(**overrides):
    return small_config(**({"data__limit": 20} | HEADS | overrides))


def encoder_of(config, seed=0):
    """With running statistics that are not those of a new network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = build_encoder(config.model)
        for name, buffer in encoder.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return encoder.eval()


def job_of(config=None, images=None):
    """20 training rows and 20 of the test: 2 shards of 16 and one of 8."""
    config = config or config_of()
    rows = read_digits()
    task = make_task(rows, config.data)
    if images is not None:
        task = replace(task, rows=replace(task.rows, images=images))
    return feature_job(config, task, encoder_of(config))


def cache_of(folder, job):
    return FeatureCache(Storage(str(folder)), job)


def computed(job, encoder=None, threads=1, seen=None, folder=None):
    """``compute`` of :func:`cached_features`, which notes in ``seen`` what it is
    asked for.
    """

    def compute(missing):
        if seen is not None:
            seen.append(list(missing))
        found = compute_local(job, encoder or encoder_of(job.config), missing, threads)
        return found if folder is None else cache_of(folder, job).keep(found, missing)

    return compute


def kept(folder, job, seen=None, **options):
    return cached_features(
        cache_of(folder, job),
        job,
        "w",
        computed(job, seen=seen, folder=folder, **options),
    )


def whole_of(job):
    """All of every shard is missing."""
    return dict.fromkeys(range(job.num_shards), 0)


def shards(folder):
    return sorted(folder.glob("features/*/0*.safetensors"))


def test_the_number_of_threads_is_as_before_in_later_threads():
    """Also where the features are not taken to the end."""
    job = job_of()
    for count in (job.num_shards, 1):
        torch.set_num_threads(3)
        shards = compute_local(job, encoder_of(job.config), whole_of(job), threads=2)
        for _ in range(count):
            next(shards)
        shards.close()
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3


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
    encoder, data = encoder_of(config), config.data
    found, reasons = kept(tmp_path, job)
    assert (
        found.shape == (40, 4, 16) and found.dtype == torch.float32 and not any(reasons)
    )
    drawn = features._views(
        override(config, {"augment.num_cached_views": features.VIEWS_AT_ONCE})
    )
    assert 0 < job.task.is_train.sum() < 40 and drawn.large.num_views == 6
    for row in range(40):
        number, position = divmod(row, SHARD)
        square = torch.from_numpy(decode(images[row], side, "bicubic").copy())[None]
        plain = encoder(eval_view(square, 8, data.mean, data.std))
        torch.testing.assert_close(found[row, :1], plain, rtol=1e-5, atol=1e-6)
        where = torch.tensor([position]), SHARD
        if not job.task.is_train[row]:
            assert not found[row, 1:].any()
            continue
        generator = augment_generator(features.SEED, FEATURES, number)
        if crop == "pad":
            expected = augment(square, drawn, generator, data.mean, data.std, *where)
        else:
            cropper = Cropper(features.SEED, FEATURES, SHARD, drawn, side, "bicubic")
            some, _ = cropper.crop(
                np.array([number]), np.array([position]), [images[row]]
            )
            crops = cropper.split(torch.from_numpy(some))
            expected = augment_crops(
                crops, drawn, generator, data.mean, data.std, *where, side
            )
        for v, view in enumerate(expected[:3]):
            torch.testing.assert_close(
                found[row, 1 + v : 2 + v], encoder(view), rtol=1e-4, atol=1e-5
            )
        assert len(torch.unique(found[row], dim=0)) == 4


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_a_training_image_is_read_and_decoded_once(tmp_path, monkeypatch, crop):
    """The square and the crops of the random views are cut from the same pixels."""
    files = []
    for number in range(40):
        path = tmp_path / f"{number}.png"
        path.write_bytes(encoded(pixels(number, 12, 11)))
        files.append(str(path))
    read, opened, loaded = decode_module.read_bytes, [], []
    load = ImageFile.ImageFile.load

    def counted_read(path, max_bytes):
        opened.append(path)
        return read(path, max_bytes)

    def counted_load(self):
        if self.tile:  # pixels that are not decoded yet
            loaded.append(self)
        return load(self)

    monkeypatch.setattr(decode_module, "read_bytes", counted_read)
    monkeypatch.setattr(ImageFile.ImageFile, "load", counted_load)
    job = job_of(config_of(augment__large__crop=crop), files)
    assert 0 < job.task.is_train.sum() < 40
    _, reasons = kept(tmp_path / "cache", job)
    assert not any(reasons)
    assert sorted(opened) == sorted(files) and len(loaded) == 40


def test_an_unreadable_training_image_has_a_reason_and_no_features(tmp_path):
    """Its neighbors in the batch keep theirs."""
    good = [encoded(pixels(number, 12, 11)) for number in range(40)]
    job = job_of(images=good)
    row = int(np.flatnonzero(job.task.is_train)[1])
    bad = job_of(images=[b"" if i == row else image for i, image in enumerate(good)])
    found, reasons = kept(tmp_path / "bad", bad)
    whole, _ = kept(tmp_path / "good", job)
    assert [i for i, reason in enumerate(reasons) if reason] == [row]
    others = torch.arange(40) != row
    assert not found[row].any() and found[others].equal(whole[others])


def test_without_random_views_it_is_the_evaluation_view_alone(tmp_path, monkeypatch):
    """To the bit, read from a cache of any views, and it does not depend on the split.
    Kills: views that nobody reads, an evaluation view that is computed twice.
    """
    job = job_of()
    config = override(job.config, {"discover.epochs": 0, "augment.num_cached_views": 0})
    alone = job_of(config)
    whole, _ = kept(tmp_path, job)
    monkeypatch.setattr(Cropper, "crop", lambda *_: pytest.fail("a random view"))
    seen = []
    for folder in (tmp_path, tmp_path / "alone"):
        found, reasons = kept(folder, alone, seen)
        assert (
            torch.equal(found, whole[:, :1])
            and not any(reasons)
            and len(shards(folder)) == 3
        )
    assert seen == [[0, 1, 2]]
    split = replace(alone.task, is_train=~alone.task.is_train)
    weak = override(config, {"augment.weak": True, "augment.large.jitter": 0.5})
    assert {feature_job(weak, split, encoder_of(weak)).key, alone.key} == {alone.key}
    with pytest.raises(ConfigError, match="at least 2 where discover"):
        override(config, {"discover.epochs": 1})


def with_views(job, num, **values):
    """The job with as many random views."""
    epochs = {} if num else {"discover.epochs": 0}
    return job_of(
        override(job.config, {"augment.num_cached_views": num, **epochs, **values})
    )


@pytest.fixture
def passed(monkeypatch):
    """How many images pass the encoder; the probe of what is stored not counted."""
    seen, encode = list[int](), features._encode
    monkeypatch.setattr(
        features, "_encode", lambda *a: (seen.append(len(a[2])), encode(*a))[1]
    )
    monkeypatch.setattr(features, "_probe", lambda *_: None)
    return seen


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_a_cache_grows_by_the_views_that_it_lacks(tmp_path, passed, crop):
    """To the bits of all at once, also by parts of the groups whose numbers are drawn
    together; fewer are read again. Kills: views that depend on how many there are, a
    pass of one that is there.
    """
    job = job_of(config_of(augment__large__crop=crop, augment__large__jitter=0.5))
    whole, _ = kept(tmp_path / "whole", with_views(job, 8))
    num_train, expected = int(job.task.is_train.sum()), [40]
    expected += [num_train * num for num in (2, 4, 2)]
    for num, count in zip((0, 2, 6, 8), expected, strict=True):
        del passed[:]
        found, reasons = kept(tmp_path / "grown", with_views(job, num))
        assert (
            torch.equal(found, whole[:, : 1 + num])
            and not any(reasons)
            and sum(passed) == count
        )
    del passed[:]
    for num in (8, 7, 3, 2, 0):
        for name in ("grown", "whole"):
            assert torch.equal(
                kept(tmp_path / name, with_views(job, num))[0], whole[:, : 1 + num]
            )
    assert not passed and len(shards(tmp_path / "grown")) == 12


def test_random_views_of_another_kind_or_split_share_the_evaluation_view(
    tmp_path, passed
):
    """Side by side. Kills: views of one that the other reads, an evaluation view
    that is computed twice.
    """
    job, start = job_of(), kept(tmp_path, job_of())[0]
    other = with_views(
        job, 3, **{"augment.large.jitter": 0.9, "augment.large.brightness": 0.9}
    )
    split = replace(job.task, is_train=~job.task.is_train)
    for changed in (other, feature_job(job.config, split, job.encoder)):
        del passed[:]
        found, _ = kept(tmp_path, changed)
        assert sum(passed) == 3 * changed.task.is_train.sum()
        assert torch.equal(found, kept(tmp_path / changed.views, changed)[0])
        assert torch.equal(found[:, 0], start[:, 0]) and not torch.equal(found, start)
    assert torch.equal(kept(tmp_path, job)[0], start) and len(shards(tmp_path)) == 9


def test_a_stopped_extension_goes_on(tmp_path, passed):
    """Kills: views that are computed twice, a shard that counts as whole with its
    first views.
    """
    job = job_of()
    some, more = with_views(job, 2), with_views(job, 6)
    whole, _ = kept(tmp_path / "whole", more)
    kept(tmp_path / "cache", some)

    def stop_after_one(missing):
        yield next(iter(computed(more, folder=tmp_path / "cache")(missing)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_features(cache_of(tmp_path / "cache", more), more, "w", stop_after_one)
    left, progress, seen = cache_of(tmp_path / "cache", more).num_missing(), [], []
    assert left == pytest.approx(24 * 4 / 7)
    del passed[:]
    compute = computed(more, seen=seen, folder=tmp_path / "cache")
    cache = cache_of(tmp_path / "cache", more)
    found, _ = cached_features(
        cache, more, "w", compute, lambda *done: progress.append(done)
    )
    assert (
        torch.equal(found, whole)
        and seen == [[1, 2]]
        and progress == [(16, 40), (32, 40), (40, 40)]
    )
    assert sum(passed) == 4 * job.task.is_train[16:].sum() and cache.num_missing() == 0


@pytest.mark.parametrize("damaged", ["0-3", "3-7"])
def test_of_a_cache_that_grew_what_is_damaged_is_computed_again(
    tmp_path, caplog, damaged
):
    """Kills: later views in the place of those that are missing."""
    job = job_of()
    kept(tmp_path, with_views(job, 2))
    whole, _ = kept(tmp_path, with_views(job, 6))
    path = next(path for path in shards(tmp_path) if path.stem.endswith(damaged))
    flip(path, path)
    found, _ = kept(tmp_path, with_views(job, 6), seen := [])
    assert (
        torch.equal(found, whole) and seen == [[0]] and "1 damaged file" in caplog.text
    )
    assert (
        torch.equal(kept(tmp_path, with_views(job, 6), seen)[0], whole)
        and len(seen) == 1
    )


def test_any_number_of_threads_gives_the_same_bits():
    job = job_of()
    found = [
        dict(computed(job, threads=threads)(whole_of(job))) for threads in (1, 2, 3)
    ]
    bits = [
        [(number, shard.numpy().tobytes()) for number, (shard, _) in one.items()]
        for one in found
    ]
    assert sorted(found[0]) == [0, 1, 2] and bits[0] == bits[1] == bits[2]


def test_training_reads_no_row_of_the_test(tmp_path):
    """Kills: rows of the set shifted against those of the features."""
    job = job_of()
    found, _ = kept(tmp_path, job)
    train = assemble(job.task, found, np.ones(len(found), bool))
    labeled = torch.from_numpy(job.task.is_train & (job.task.labels >= 0))
    unlabeled = torch.from_numpy(job.task.is_train & (job.task.labels < 0))
    assert torch.equal(train.labeled_images[:], found[labeled])
    assert torch.equal(train.unlabeled_images[:], found[unlabeled])
    for images in (train.labeled_images, train.unlabeled_images):
        assert (images[:] != 0).any(dim=2).all()


@pytest.mark.parametrize(
    ("values", "same"),
    [
        (
            {
                "seed": 3,
                "model.num_heads": 5,
                "model.projection_dim": 4,
                "discover.epochs": 9,
            },
            True,
        ),
        (
            {
                "compute.num_workers": 2,
                "compute.threads": 2,
                "train.batch_size": 64,
                "compute.cache": "/x",
            },
            True,
        ),
        (
            {
                "augment.large.num_views": 3,
                "model.prototype_init": "kmeans",
                "objective.class_prior": "kmeans",
            },
            True,
        ),
        ({"data.unlabeled_known_fraction": 0.5}, True),
        ({"augment.num_cached_views": 4}, True),
        ({"model.width": 8}, False),
        ({"augment.large.flip": 0.5}, False),
        ({"augment.large.size": 6}, False),
        ({"data.stored_size": 10}, False),
        ({"data.mean": (0.3, 0.3, 0.4)}, False),
        ({"data.std": (0.3, 0.3, 0.4)}, False),
        ({"data.interpolation": "bicubic"}, False),
        ({"data.limit": 21}, False),
        ({"compute.precision": "bf16"}, False),
    ],
)
def test_the_key_holds_what_features_depend_on_and_nothing_else(values, same):
    job = job_of()
    other = job_of(override(job.config, values))
    assert ((other.key, other.views) == (job.key, job.views)) == same


def test_the_key_changes_with_weights_test_rows_and_pixels():
    job, encoder = job_of(), encoder_of(config_of())
    assert feature_job(job.config, job.task, encoder).key == job.key
    encoder.layer2[0].conv1.weight.data.view(torch.int32)[0, 0, 0, 0] ^= 1
    keys = {job.key, feature_job(job.config, job.task, encoder).key}
    is_train = job.task.is_train.copy()
    is_train[0] ^= True  # as data.validation_fraction does
    other = feature_job(
        job.config, replace(job.task, is_train=is_train), encoder_of(job.config)
    )
    assert other.key == job.key and other.views != job.views
    images = job.task.rows.images.images.items.copy()
    images[job.task.rows.images.index[3], 0, 0, 0] ^= 1
    keys.add(job_of(images=images[job.task.rows.images.index]).key)
    assert len(keys) == 3


def test_hidden_labels_reach_neither_the_features_nor_training(tmp_path):
    """The fingerprint of the rows tells data sets apart, so their files are two; all
    tensors are the same. Kills: views drawn by label, labels written beside the
    features.
    """
    rows, sets, names = read_digits(), [], []
    permuted = np.array(rows.labels)
    novel = np.flatnonzero(permuted >= "5")
    permuted[novel] = np.random.default_rng(0).permutation(permuted[novel])
    config = config_of(data__limit=None)
    chosen = np.arange(0, 1797, 40)
    for labels in (rows.labels, permuted.tolist()):
        task = make_task(
            replace(rows, labels=Labels.of(labels)).take(chosen), config.data
        )
        job = feature_job(config, task, encoder_of(config))
        found, _ = kept(tmp_path, job)
        names.append(
            (
                job.key,
                json.loads(
                    Path(cache_of(tmp_path, job).path, "facts.json").read_text()
                ),
            )
        )
        sets.append(assemble(task, found, np.ones(len(task.rows), bool)))
    assert names[0][0] != names[1][0] and names[0][1] == names[1][1]
    for name, value in vars(sets[0]).items():
        assert np.array_equal(value, getattr(sets[1], name)), name


def flip(first, second):
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)


CONTENT = {"features": torch.ones(16, 4, 16)}
REASONS = {"reasons": json.dumps([None] * 16)}

DAMAGE = {
    "a flipped bit": flip,
    "cut off": lambda first, second: second.write_bytes(second.read_bytes()[:1000]),
    "another shard's content": lambda first, second: second.write_bytes(
        first.read_bytes()
    ),
    "not sealed": lambda first, second: second.write_bytes(
        safetensors.torch.save(CONTENT, REASONS)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_noticed_and_computed_again(tmp_path, caplog, damage):
    """One line. Kills: a sum that vouches for the content but not for its place,
    damage that is fatal.
    """
    job = job_of()
    whole, _ = kept(tmp_path, job)
    first, second, _ = shards(tmp_path)
    before = {path.name: path.read_bytes() for path in shards(tmp_path)}
    DAMAGE[damage](first, second)
    seen = []
    with caplog.at_level(logging.WARNING):
        found, reasons = kept(tmp_path, job, seen)
    assert torch.equal(found, whole) and not any(reasons)
    assert seen == [[1]]
    (line,) = caplog.messages
    assert "damaged" in line and tmp_path.name in line and "\n" not in line
    assert {path.name: path.read_bytes() for path in shards(tmp_path)} == before
    caplog.clear()
    assert (
        torch.equal(kept(tmp_path, job, seen)[0], whole)
        and len(seen) == 1
        and not caplog.messages
    )


@pytest.mark.parametrize(
    "content",
    [
        {"features": torch.ones(16, 4, 8)},
        {"features": torch.ones(8, 4, 16)},
        {"rows": torch.ones(16, 4, 16)},
    ],
)
def test_a_shard_of_another_shape_is_not_taken(tmp_path, caplog, content):
    """Sealed, in its place."""
    job = job_of()
    cache = cache_of(tmp_path, job)
    features.write_shard(
        Storage(str(tmp_path)), job.name(0), seal(job.name(0), content, REASONS)
    )
    assert (
        cache.read()[2] == whole_of(job)
        and "recomputing 1 damaged file in" in caplog.text
        and not shards(tmp_path)
    )


def test_a_file_for_a_full_disk_is_written_once(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left.*--compute\.cache"):
        features.write_shard(Storage(str(tmp_path)), "features/key/0", b"1")
    assert full.call_count == 1


def test_a_cache_that_is_emptied_during_a_write_gets_the_file(tmp_path, monkeypatch):
    real_replace, calls = os.replace, []

    def empty_first(source, target):
        calls.append(target)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / "features")
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", empty_first)
    storage = Storage(str(tmp_path))
    features.write_shard(storage, "features/key/0", b"1")
    assert storage.read("features/key/0") == b"1" and len(calls) == 2


def test_what_is_no_shard_is_left_alone(tmp_path, caplog):
    """The temporary file of a killed process, notes of the user's."""
    job = job_of()
    kept(tmp_path, job)
    folder = Path(cache_of(tmp_path, job).path)
    for name in ("notes.txt", ".000000-abc.safetensors.1234", "000009.safetensors"):
        (folder / name).write_text("x")
    assert (
        cache_of(tmp_path, job).read()[2] == dict.fromkeys(range(3), 4)
        and not caplog.messages
    )
    assert len(list(folder.iterdir())) == 3 + 2 + 3


def test_a_stopped_job_goes_on(tmp_path):
    """Only what is missing is computed, and progress counts what is there."""
    job, seen, progress = job_of(), [], []

    def stop_after_two(numbers):
        for count, found in enumerate(computed(job, folder=tmp_path)(numbers)):
            if count == 1:
                raise KeyboardInterrupt
            yield found

    cache = cache_of(tmp_path, job)
    with pytest.raises(KeyboardInterrupt):
        cached_features(cache, job, "w", stop_after_two)
    assert len(shards(tmp_path)) == 2
    found, _ = cached_features(
        cache,
        job,
        "w",
        computed(job, seen=seen, folder=tmp_path),
        lambda *done: progress.append(done),
    )
    assert seen == [[2]] and progress == [(32, 40), (40, 40)]
    assert torch.equal(found, kept(tmp_path / "another", job)[0])


def test_two_at_once_do_no_harm(tmp_path, caplog):
    job, found = job_of(), []
    encoder = encoder_of(job.config)

    def run():
        found.append(kept(tmp_path, job, encoder=encoder)[0])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(*found) and len(shards(tmp_path)) == 3
    assert torch.equal(kept(tmp_path, job)[0], found[0]) and not caplog.messages


def test_a_cache_that_is_removed_while_it_is_written_costs_nothing(
    tmp_path, monkeypatch
):
    job, whole, replaced, ours = (
        job_of(),
        kept(tmp_path / "whole", job_of())[0],
        [],
        tmp_path / "cache",
    )

    def replace_(source, target):
        replaced.append(target)
        # facts.json and a shard, whose second writing succeeds
        if len(replaced) in (1, 5):
            shutil.rmtree(ours)
        os_replace(source, target)

    os_replace = os.replace
    monkeypatch.setattr(os, "replace", replace_)
    assert torch.equal(kept(ours, job)[0], whole) and len(replaced) == 7


def test_a_cache_that_cannot_be_written_is_one_line_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    job, seen = job_of(), []
    with pytest.raises(StorageError) as error:
        kept(tmp_path / "file" / "cache", job, seen)
    assert (
        "--compute.cache" in str(error.value)
        and "\n" not in str(error.value)
        and not seen
    )


def test_images_that_cannot_be_read_keep_their_reason_until_they_can(tmp_path):
    """Kills: features of a black square, a reason lost in the cache, one that is
    believed for ever.
    """
    images = [pixels(i) for i in range(40)]
    broken = {3: b"broken", 17: np.zeros((4, 4), np.uint8)}
    job, seen = (
        job_of(images=[broken.get(i, image) for i, image in enumerate(images)]),
        [],
    )
    for _ in range(2):
        found, reasons = kept(tmp_path, job, seen)
        assert [i for i, reason in enumerate(reasons) if reason] == [3, 17]
        assert (
            "not a readable" in reasons[3] and "pixels are uint8 (4, 4)" in reasons[17]
        )
        assert not found[[3, 17]].any() and found.flatten(1).any(dim=1).sum() == 38
    assert seen == [[0, 1, 2]]
    task = replace(job.task, rows=replace(job.task.rows, images=images))
    again, reasons = kept(tmp_path, job._replace(task=task), seen)
    assert (
        not any(reasons) and again[[3, 17], 0].any(dim=1).all() and seen[1:] == [[0, 1]]
    )
    assert len(shards(tmp_path)) == 3
    assert (
        torch.equal(kept(tmp_path, job._replace(task=task), seen)[0], again)
        and len(seen) == 2
    )


def computed_all(job):
    shards = [
        shard
        for _, shard in compute_local(job, encoder_of(job.config), whole_of(job), 1)
    ]
    return torch.cat([part for part, _ in shards]), [
        why for _, part in shards for why in part
    ]


def test_an_encoder_that_gives_nan_is_refused(tmp_path):
    job = job_of()
    encoder = encoder_of(job.config)
    nn.init.constant_(encoder.conv1.weight, float("nan"))
    with pytest.raises(
        ConfigError, match=r"^model\.encoder resnet_small returns non-finite numbers$"
    ):
        kept(tmp_path, job, encoder=encoder)
    assert not shards(tmp_path)


def test_where_features_are_kept(tmp_path, monkeypatch):
    """The option, then the variable, then the user's cache directory."""
    monkeypatch.setenv("HOME", "/home/me")
    for name in (mapped.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    where = [features.cache_directory(config_of())]
    for name in ("XDG_CACHE_HOME", mapped.CACHE_VARIABLE):
        monkeypatch.setenv(name, f"/{name}")
        where.append(features.cache_directory(config_of()))
    where += [
        features.cache_directory(config_of(compute__cache=path))
        for path in ("~/c", "s3://b/c")
    ]
    assert where == [
        "/home/me/.cache/uno",
        "/XDG_CACHE_HOME/uno",
        "/UNO_CACHE",
        "/home/me/c",
        "s3://b/c",
    ]


def compute_in_child(folder, slow):
    """What the processes of the next test run."""
    features.SHARD_ROWS, features.ROWS_AT_ONCE = SHARD, 6
    job = job_of()

    def compute(numbers):
        for number, data in computed(job, folder=folder)(numbers):
            yield number, data
            if slow:
                signal.pause()

    cached_features(cache_of(folder, job), job, "w", compute)


@pytest.mark.slow
def test_a_killed_process_and_two_at_once(tmp_path):
    """SIGKILL after the first of three shards; two processes compute the others."""
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
        if shards(tmp_path) or child.poll() is not None:
            break
        threading.Event().wait(0.1)
    assert len(shards(tmp_path)) == 1
    child.kill()
    assert child.wait() == -signal.SIGKILL
    (first,) = shards(tmp_path)
    before = first.stat().st_mtime_ns
    assert [child.wait() for child in (start(False), start(False))] == [0, 0]
    assert len(shards(tmp_path)) == 3 and first.stat().st_mtime_ns == before
    job, seen = job_of(), []
    found, _ = kept(tmp_path, job, seen)
    assert not seen and torch.equal(found, computed_all(job)[0])


ENCODER = """
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_features = nn.Conv2d(3, 16, 3), 16
    def forward(self, images):
        return self.layer(images).relu().mean(dim=(2, 3)) * {factor}
"""


def test_the_key_changes_with_the_code_of_a_callable(tmp_path, monkeypatch):
    """Same weights, another ``forward``, in the module of the callable or that of
    its layers.
    """
    monkeypatch.chdir(tmp_path)
    config, keys = config_of(model__encoder="mine_factory:build"), []
    Path("mine_factory.py").write_text(
        "from mine_layers import Mine\ndef build(): return Mine()\n"
    )
    for factor in (1, 1, 2):
        Path("mine_layers.py").write_text(ENCODER.format(factor=factor))
        for name in ("mine_factory", "mine_layers"):
            sys.modules.pop(name, None)
        task = make_task(read_digits(), config.data)
        keys.append(feature_job(config, task, encoder_of(config)).key)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(("precision", "noise"), [("auto", 1e-5), ("bf16", 5e-3)])
def test_features_that_the_encoder_does_not_give_any_more_are_computed_again(
    tmp_path, caplog, monkeypatch, precision, noise
):
    """Code behind the key's back. Kills: a cache that is believed, a difference that is
    not said, noise of another batch, or of another program for bfloat16, that is taken
    for one.
    """
    job, seen = job_of(override(config_of(), {"compute.precision": precision})), []
    whole, _ = kept(tmp_path, job)
    encoder, forward = type(job.encoder), type(job.encoder).forward
    monkeypatch.setattr(
        encoder, "forward", lambda self, images: forward(self, images) * (1 + noise)
    )
    assert (
        torch.equal(kept(tmp_path, job, seen)[0], whole)
        and not seen
        and not caplog.messages
    )
    monkeypatch.setattr(
        encoder, "forward", lambda self, images: forward(self, images.flip(2))
    )
    found, _ = kept(tmp_path, job, seen)
    (line,) = caplog.messages
    assert (
        seen == [[0, 1, 2]]
        and "resnet_small now gives others" in line
        and "\n" not in line
    )
    assert not torch.equal(found, whole) and torch.equal(
        kept(tmp_path, job, seen)[0], found
    )
    assert len(seen) == 1


def folder_job(folder):
    """40 images of a folder, half of them without a label: BMP files, all of one
    size.
    """
    config = config_of(
        data__source=f"folder:{folder}", data__known_classes="a,b", data__limit=None
    )
    rows = read_rows(config.data)
    return feature_job(config, make_task(rows, config.data), encoder_of(config))


def write_bitmaps(folder, numbers, first_seed=0):
    for number in numbers:
        path = folder / "abcd"[number // 10] / f"{number:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels(first_seed + number), "BMP"))


@pytest.mark.parametrize("keeps_time", [False, True])
def test_features_of_images_that_were_overwritten_are_computed_again(
    tmp_path, caplog, keeps_time
):
    """Of the same name and size. Kills: sizes that stand for content, times that
    anybody can set.
    """
    data, cache, seen = tmp_path / "data", tmp_path / "cache", []
    write_bitmaps(data, range(40))
    whole, _ = kept(cache, folder_job(data))
    times = {path: path.stat().st_mtime_ns for path in data.rglob("*.bmp")}
    write_bitmaps(data, range(0, 16, 2), 100)
    for path, time in times.items() if keeps_time else ():
        os.utime(path, ns=(time, time))
    job = folder_job(data)
    found, _ = kept(cache, job, seen)
    (line,) = caplog.messages
    assert "images written to" in line and (seen == [[0]] or keeps_time)
    assert torch.equal(found, kept(tmp_path / "anew", job)[0]) and not torch.equal(
        found, whole
    )
    assert torch.equal(kept(cache, folder_job(data), seen)[0], found) and len(seen) == 1


@pytest.mark.parametrize("num_views", [0, 2, 6])
def test_a_cache_does_not_grow_from_images_that_were_overwritten(
    tmp_path, caplog, num_views
):
    """And what other jobs stored of them is gone too. Kills: views of one image beside
    another's, a snapshot of one job that vouches for what another has stored.
    """
    data, cache, seen = tmp_path / "data", tmp_path / "cache", []

    def job(num):
        config = override(
            folder_job(data).config,
            {"augment.num_cached_views": num, "discover.epochs": 0},
        )
        return feature_job(
            config, make_task(read_rows(config.data), config.data), encoder_of(config)
        )

    write_bitmaps(data, range(40))
    for num in (0, 2, 6):
        kept(cache, job(num))
    write_bitmaps(data, range(0, 16, 2), 100)
    for num in (num_views, 8, 0, 2, 6):
        assert torch.equal(
            kept(cache, job(num), seen)[0], kept(tmp_path / f"anew{num}", job(num))[0]
        )
    assert seen[:2] == [[0], [0, 1, 2]] and len(seen) == 2 and len(caplog.messages) == 1


def test_features_of_images_that_were_moved_copied_or_touched_are_kept(
    tmp_path, caplog
):
    """Kills: times that make another data set."""
    data, cache, seen = tmp_path / "data", tmp_path / "cache", []
    write_bitmaps(data, range(40))
    whole, _ = kept(cache, folder_job(data))
    for path in data.rglob("*.bmp"):
        path.touch()
    shutil.copytree(data, tmp_path / "copied")
    data.rename(tmp_path / "moved")
    for name in ("copied", "moved"):
        assert torch.equal(kept(cache, folder_job(tmp_path / name), seen)[0], whole)
    assert not seen and not caplog.messages


def test_files_that_are_not_there_do_not_make_a_cache_stale(tmp_path):
    """Of a table. Kills: shards that are computed at every start."""
    write_bitmaps(tmp_path, range(40))
    names = "".join(
        f"{'abcd'[i // 10]}/{i:02}.bmp,{'ab'[i // 10] if i < 20 else ''}\n"
        for i in range(40)
    )
    (tmp_path / "rows.csv").write_text(f"path,label\n{names}")
    (tmp_path / "c" / "25.bmp").unlink()
    config, seen = (
        config_of(data__source=str(tmp_path / "rows.csv"), data__known_classes=None),
        [],
    )
    config = override(config, {"data.num_novel": 2, "data.limit": None})
    for _ in range(2):
        job = feature_job(
            config, make_task(read_rows(config.data), config.data), encoder_of(config)
        )
        kept(tmp_path / "cache", job, seen)
    assert seen == [[0, 1, 2]]


def test_features_without_a_snapshot_are_computed_again(tmp_path, caplog):
    job, seen = job_of(), []
    kept(tmp_path, job)
    Path(cache_of(tmp_path, job).path, "images.safetensors").unlink()
    kept(tmp_path, job, seen)
    assert seen == [[0, 1, 2]] and "there is no snapshot of their images" in caplog.text
