"""What training may see, what only evaluation reads, and batches as a pure function
of (seed, step).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.uno.small_run import small_config, small_sets
from uno.config import DataConfig
from uno.data.columns import make_labels
from uno.data.resident import (
    FeatureBatches,
    ResidentBatches,
    TrainSet,
    assemble,
    eval_sets,
    keep_pixels,
    train_set,
)
from uno.data.row_blocks import RowBlocks
from uno.data.sources import read_digits
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.runs import run

from .builders import load_resident, write_images

DIGITS = DataConfig(known_classes="first:5", stored_size=8)


def test_sets_of_the_digits():
    task, images, ok, bad = load_resident(DIGITS, threads=2)
    assert (
        images.shape == (1797, 3, 8, 8)
        and images.dtype == torch.uint8
        and ok.all()
        and not bad
    )
    train, sets = assemble(task, images, ok), eval_sets(task, images, ok)
    rows = np.flatnonzero(task.is_train & (task.labels >= 0))
    assert (train.num_known, train.num_novel) == (5, 5) and torch.equal(
        train.labeled_images[:], images[rows]
    )
    assert train.labels.tolist() == [int(task.rows.labels.to_pylist()[i]) for i in rows]
    assert (
        len(train.labels) + len(train.unlabeled_images)
        == task.is_train.sum()
        == len(sets["train"].truth)
    )
    for found in sets.values():
        assert torch.equal(found.images[:], images[found.index])
        assert found.truth.tolist() == [
            int(task.rows.labels.to_pylist()[i]) for i in found.index
        ]
    assert set(sets["test"].index.tolist()) == set(np.flatnonzero(~task.is_train))


def contents(train):
    return {
        name: value[:] if isinstance(value, RowBlocks) else value
        for name, value in vars(train).items()
    }


def test_hidden_labels_never_reach_training():
    """Kills: hidden labels in ``labels``, unlabeled rows sorted or filtered by
    class.
    """
    rows = read_digits()
    permuted, sets = np.array(rows.labels.to_pylist()), []
    novel = np.flatnonzero(permuted >= "5")
    permuted[novel] = np.random.default_rng(0).permutation(permuted[novel])
    for labels in (rows.labels.to_pylist(), permuted.tolist()):
        task = make_task(replace(rows, labels=make_labels(labels)), DIGITS)
        images = torch.from_numpy(rows.images.items.transpose(0, 3, 1, 2).copy())
        ok = np.ones(len(rows), dtype=bool)
        sets.append(
            (assemble(task, images, ok), eval_sets(task, images, ok)["train"].truth)
        )
    (a, truth_a), (b, truth_b) = sets
    assert not torch.equal(truth_a, truth_b)
    assert contents(a).keys() == contents(b).keys()
    for name, value in contents(a).items():
        assert np.array_equal(value, contents(b)[name]), name
    assert set(a.labels.tolist()) == set(range(5))


def test_hidden_labels_of_a_mixed_pile_never_reach_training():
    """Known rows without a label and novel ones change their truth. Kills: truth in the
    training set, known rows of a pile told from novel ones, ``unlabeled`` told by the
    class.
    """
    rows = read_digits()
    images = torch.from_numpy(rows.images.items.transpose(0, 3, 1, 2).copy())
    task = make_task(rows, DIGITS.model_copy(update={"unlabeled_known_fraction": 0.5}))
    hidden = np.flatnonzero(task.is_train & (task.labels < 0))
    permuted = task.eval_labels.copy()
    permuted[hidden] = np.random.default_rng(0).permutation(permuted[hidden])
    ok = np.ones(len(rows), dtype=bool)
    a, b = (
        assemble(replace(task, eval_labels=truth), images, ok)
        for truth in (task.eval_labels, permuted)
    )
    assert all(
        np.array_equal(value, contents(b)[name]) for name, value in contents(a).items()
    )
    sets = eval_sets(task, images, ok)
    assert torch.equal(
        sets["train"].index[sets["train"].unlabeled], torch.from_numpy(hidden)
    )
    assert sets["test"].unlabeled.all() and len(a.unlabeled_images) == len(hidden)
    old = sets["train"].truth[sets["train"].unlabeled] < 5
    assert 300 < int(old.sum()) < 400  # half of 720 known training rows


def test_bad_images_are_left_out_of_every_set(tmp_path):
    write_images(tmp_path, [f"train/{c}/{i}.png" for c in "abc" for i in range(4)])
    write_images(tmp_path, [f"test/{c}/0.png" for c in "abc"])
    for name in ("train/a/1.png", "train/c/2.png"):
        (tmp_path / name).write_bytes(b"broken")
    config = DataConfig(
        source=str(tmp_path),
        known_classes="first:2",
        stored_size=8,
        max_bad_fraction=0.2,
    )
    task, images, ok, bad = load_resident(config)
    assert [entry["id"] for entry in bad] == ["train/a/1.png", "train/c/2.png"]
    train, sets = assemble(task, images, ok), eval_sets(task, images, ok)
    assert (
        train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
        and len(train.unlabeled_images) == 3
    )
    assert len(sets["train"].truth) == 10 and len(sets["test"].truth) == 3
    assert (train.labeled_images[:].flatten(1).sum(1) > 0).all()
    with pytest.raises(
        ConfigError, match=r"2 of 15 images are unreadable.*train/a/1.png"
    ):
        load_resident(config.model_copy(update={"max_bad_fraction": 0.1}))


def test_rows_without_truth_are_not_evaluated(tmp_path):
    write_images(tmp_path, ["known/a/1.png", "known/b/2.png", "new/3.png", "new/4.png"])
    folders = {"labeled": f"{tmp_path}/known", "unlabeled": f"{tmp_path}/new"}
    task, images, ok, _ = load_resident(
        DataConfig(**folders, num_novel=2, stored_size=8)
    )
    sets = eval_sets(task, images, ok)
    assert sets["train"].index.tolist() == [0, 1] and len(sets["test"].truth) == 0
    assert assemble(task, images, ok).unlabeled_images.shape == (2, 3, 8, 8)


def test_rows_that_are_read_only_are_taken_silently():
    """Ray's object store hands out read-only arrays. Kills: torch's warning on every
    worker's console.
    """
    rows = np.arange(3)
    rows.flags.writeable = False
    images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(-1, 3, 4, 4)
    found = train_set(
        RowBlocks([images]), rows, torch.zeros(3, dtype=torch.int64), rows, 1, 1
    )
    assert found.labeled_images[:][:, 0, 0, 0].tolist() == [0, 1, 2]


CONFIG = small_config(
    train__batch_size=24,
    augment__small__num_views=1,
    augment__small__size=6,
    augment__small__crop="resized",
)


def batches(config=CONFIG, phase=run.DISCOVER, rank=0, world_size=1):
    train = small_sets()[0]
    plan = run.plans(
        config, len(train.labels), len(train.unlabeled_images), world_size
    )[phase]
    return ResidentBatches(config, train, plan, rank, world_size)


def same(first, second):
    return torch.equal(first.labels, second.labels) and all(
        map(torch.equal, first.views, second.views)
    )


def test_batches_are_a_pure_function_of_the_step():
    """Kills: a generator carried from step to step, the global generator used or
    changed.
    """
    source = batches()
    torch.manual_seed(3)
    before, forward = torch.random.get_rng_state(), [source(step) for step in range(5)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [view.shape for view in forward[0].views] == [
        (24, 3, 8, 8),
        (24, 3, 8, 8),
        (24, 3, 6, 6),
    ]
    assert not torch.equal(forward[0].views[0], forward[0].views[1])
    again = batches()
    assert all(same(again(step), forward[step]) for step in reversed(range(5)))
    assert not any(same(forward[0], other) for other in forward[1:])
    assert not same(batches(CONFIG.model_copy(update={"seed": 1}))(0), forward[0])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("phase", [run.PRETRAIN, run.DISCOVER])
def test_shares_of_the_workers_are_the_global_batch(phase, world_size):
    """Kills: the same views on every worker, views drawn per rank, rows shared out
    across the two kinds.
    """
    whole = batches(phase=phase)(2)
    shares = [
        batches(phase=phase, rank=rank, world_size=world_size)(2)
        for rank in range(world_size)
    ]
    assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)
    num_labeled, share_labeled = len(whole.labels), len(shares[0].labels)
    assert num_labeled == (24 if phase == run.PRETRAIN else 12)
    for v, view in enumerate(whole.views):
        labeled = torch.cat([share.views[v][:share_labeled] for share in shares])
        unlabeled = torch.cat([share.views[v][share_labeled:] for share in shares])
        assert torch.equal(torch.cat([labeled, unlabeled]), view)


def test_labels_belong_to_their_images():
    """Without augmentation a row is an image of the set. Kills: labels and images
    indexed apart.
    """
    config = small_config(
        augment__large__affine=0.0,
        augment__large__jitter=0.0,
        train__batch_size=24,
        augment__weak=True,
    )
    train = small_sets()[0]
    batch = batches(config)(1)
    mean, std = (
        torch.tensor(values).view(3, 1, 1)
        for values in (config.data.mean, config.data.std)
    )
    pixels = ((batch.views[0] * std + mean) * 255).round().to(torch.uint8)
    for image, label in zip(pixels[:12], batch.labels, strict=True):
        assert (
            label
            in train.labels[(train.labeled_images[:] == image).flatten(1).all(dim=1)]
        )
    assert all(
        (train.unlabeled_images[:] == image).flatten(1).all(dim=1).any()
        for image in pixels[12:]
    )
    assert torch.equal(batch.views[0], batch.views[1])  # nothing random is left


VIEWS = 5
HEADS = small_config(
    model__finetune="none",
    augment__small__num_views=0,
    augment__num_cached_views=VIEWS,
    augment__large__num_views=3,
    train__batch_size=24,
)


def feature_batches(config=HEADS, rank=0, world_size=1):
    """Of features that are the numbers of their row and view, labeled rows first;
    view 0 is evaluation's.
    """
    rows = torch.arange(200.0)[:, None] + 1000 * torch.arange(1.0 + VIEWS)
    labels = torch.arange(100) % 5
    train = TrainSet(rows[:100, :, None], labels, rows[100:, :, None], 5, 5)
    plan = run.plans(config, 100, 100, world_size)[run.DISCOVER]
    return train.batches(config, plan, rank, world_size)


def test_a_step_takes_different_cached_views_of_a_row():
    """Others in another epoch, and of another seed. Kills: the evaluation view left
    out, a view twice in a step, the first views always, views of another row, labels of
    another row.
    """
    source, seen = feature_batches(), {}
    assert isinstance(source, FeatureBatches)
    for step in range(20):  # 4 epochs and a half
        batch = source(step)
        assert batch.num_large == len(batch.views) == 3
        found = torch.stack(batch.views)[:, :, 0].long()
        rows, views = found % 1000, found // 1000
        assert (rows == rows[0]).all() and 0 <= views.min() <= views.max() <= VIEWS
        assert all(len(set(column)) == 3 for column in views.T.tolist())
        assert (rows[0, :12] < 100).all() and torch.equal(
            rows[0, 12:] - 100, batch.rows
        )
        assert torch.equal(batch.labels, rows[0, :12] % 5)
        for row, column in zip(rows[0].tolist(), views.T.tolist(), strict=True):
            seen.setdefault(row, []).append(tuple(column))
    assert sum(len(set(some)) > 1 for some in seen.values()) > 150
    counts = np.bincount(
        [view for some in seen.values() for each in some for view in each]
    )
    assert len(counts) == 1 + VIEWS and counts.min() > 0.8 * counts.mean()
    again = feature_batches()
    assert all(same(again(step), source(step)) for step in (7, 3))
    assert not same(feature_batches(HEADS.model_copy(update={"seed": 1}))(3), source(3))


def test_evaluation_reads_the_evaluation_view_of_cached_features():
    """And so does what comes after it. Kills: a random view, which training has
    seen.
    """
    task = make_task(read_digits(), DIGITS)
    features = (
        torch.arange(1797.0)[:, None, None] + 1000 * torch.arange(1.0 + VIEWS)[:, None]
    )
    sets = eval_sets(task, features, np.ones(1797, dtype=bool))
    for found in sets.values():
        assert torch.equal(found.images[:], found.index[:, None].float())
    images = keep_pixels(task, features, [None] * 1797).rows.images
    assert torch.equal(images.prepared(np.arange(1797))[0], features[:, 0])
    assert torch.equal(
        images.take(np.array([7, 3])).prepared(np.array([1]))[0], features[3:4, 0]
    )
    assert np.array_equal(images[3], task.rows.images[3])


@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_of_a_batch_of_features_are_the_whole(world_size):
    """Kills: views drawn by the place in a worker's share."""
    whole = feature_batches()(2)
    shares = [
        feature_batches(rank=rank, world_size=world_size)(2)
        for rank in range(world_size)
    ]
    assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)
    for v, view in enumerate(whole.views):
        split = len(shares[0].labels)
        parts = [share.views[v][:split] for share in shares] + [
            share.views[v][split:] for share in shares
        ]
        assert torch.equal(torch.cat(parts), view)
