"""What training may see, what only evaluation reads, and batches as a pure function
of (seed, step).
"""

from collections import defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.uno.small_run import small_config, small_sets
from uno.config import DataConfig, override
from uno.data.columns import make_labels
from uno.data.memory import (
    MemoryBatches,
    RowBlocks,
    TrainSet,
    assemble,
    eval_sets,
    keep_pixels,
)
from uno.data.sources import read_digits
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.runs import run

from .builders import load_resident, write_images

DIGITS = DataConfig(known_classes="first:5", stored_size=8)


def test_sets_of_the_digits():
    task, images, ok, _ = load_resident(DIGITS, threads=2)
    train, sets = assemble(task, images, ok), eval_sets(task, images, ok)
    truth = torch.tensor([int(label) for label in task.rows.labels.to_pylist()])
    rows = np.flatnonzero(task.is_train & (task.labels >= 0))
    assert (train.num_known, train.num_novel) == (5, 5)
    assert torch.equal(train.labeled_images[:], images[rows])
    assert torch.equal(train.labels, truth[rows])
    assert len(rows) + train.num_unlabeled == task.is_train.sum()
    for found, member in (
        (sets["train"], task.is_train),
        (sets["test"], ~task.is_train),
    ):
        ((pixels, _),) = found.batches(len(images))
        assert torch.equal(pixels, images[found.index])
        assert torch.equal(found.truth, truth[found.index])
        assert found.index.tolist() == np.flatnonzero(member).tolist()


def contents(train):
    return {
        name: value[:] if isinstance(value, RowBlocks) else value
        for name, value in vars(train).items()
    }


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_hidden_labels_never_reach_training(fraction):
    """The training set is the same whatever the classes of unlabeled rows are."""
    rows = read_digits()
    images = torch.from_numpy(rows.images.items.transpose(0, 3, 1, 2).copy())
    ok = np.ones(len(rows), dtype=bool)
    config = DIGITS.model_copy(update={"unlabeled_known_fraction": fraction})
    task = make_task(rows, config)
    hidden = np.flatnonzero(task.is_train & (task.labels < 0))
    shuffled = np.random.default_rng(0).permutation(hidden)
    truth, names = task.eval_labels.copy(), np.array(rows.labels.to_pylist())
    truth[hidden], names[hidden] = truth[shuffled], names[shuffled]
    other_rows = replace(rows, labels=make_labels(names.tolist()))
    other = replace(task, eval_labels=truth, rows=other_rows)
    assert not np.array_equal(truth, task.eval_labels)
    expected = contents(assemble(task, images, ok))
    for name, value in contents(assemble(other, images, ok)).items():
        assert np.array_equal(value, expected[name]), name
    sets = eval_sets(task, images, ok)
    assert sets["train"].index[sets["train"].unlabeled].tolist() == hidden.tolist()
    assert sets["test"].unlabeled.all()
    num_known = int((task.eval_labels[hidden] < 5).sum())
    assert (num_known > 0) == (fraction > 0)


def test_bad_images_are_left_out_of_every_set(tmp_path):
    write_images(tmp_path, [f"train/{c}/{i}.png" for c in "abc" for i in range(4)])
    write_images(tmp_path, [f"test/{c}/0.png" for c in "abc"])
    for name in ("train/a/1.png", "train/c/2.png"):
        (tmp_path / name).write_bytes(b"broken")
    given = {"source": str(tmp_path), "known_classes": "first:2", "stored_size": 8}
    task, images, ok, bad = load_resident(DataConfig(**given, max_bad_fraction=0.2))
    assert [entry["id"] for entry in bad] == ["train/a/1.png", "train/c/2.png"]
    train, sets = assemble(task, images, ok), eval_sets(task, images, ok)
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1] and train.num_unlabeled == 3
    assert len(sets["train"].truth) == 10 and len(sets["test"].truth) == 3
    line = r"2 of 15 images are unreadable.*train/a/1.png"
    with pytest.raises(ConfigError, match=line):
        load_resident(DataConfig(**given, max_bad_fraction=0.1))


ROWS = torch.arange(7 * 2 * 3).view(7, 2, 3)
PLACE = torch.tensor([4, 0, 6, 5, 1, 3, 2])


@pytest.mark.parametrize("sizes", [[7], [2, 1, 0, 4]])
@pytest.mark.parametrize(
    "rows",
    [
        slice(None),
        slice(1, 6, 2),
        torch.tensor([True, False, True, True, False, False, True]),
        torch.tensor([6, 0, 0, 3]),
        torch.tensor([], dtype=torch.int64),
    ],
)
def test_rows_of_blocks_are_those_of_one_tensor(sizes, rows):
    """Kills: rows by their place in another block, or in the order of the blocks."""
    view, expected = RowBlocks(ROWS.split(sizes), PLACE), ROWS[PLACE]
    assert len(view) == 7 and view.shape == expected.shape and view.ndim == 3
    assert torch.equal(view[rows], expected[rows])
    assert torch.equal(view.select_rows(rows)[:], expected[rows])
    assert torch.equal(torch.cat([*view.split(4)]), expected)
    assert view.to("meta").shape == (7, 2, 3)


def test_a_view_of_rows_is_no_copy():
    """Kills: a set that holds its own images, so that memory holds them twice."""
    rows = ROWS.clone()
    some = RowBlocks([rows]).select_rows(slice(2, None))
    some = some.select_rows(torch.tensor([0, 3]))
    rows += 100
    assert torch.equal(some[:], rows[[2, 5]])
    assert torch.equal(some[torch.tensor([1]), torch.tensor([0])], rows[5:6, 0])


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
    return MemoryBatches(config, train, plan, rank, world_size)


def same(first, second):
    return torch.equal(first.labels, second.labels) and all(
        map(torch.equal, first.views, second.views)
    )


def test_batches_are_a_pure_function_of_the_step():
    """No generator is carried on, and the global one is neither used nor changed."""
    source = batches()
    torch.manual_seed(3)
    before, forward = torch.random.get_rng_state(), [source(step) for step in range(5)]
    assert torch.equal(torch.random.get_rng_state(), before)
    sides = [view.shape[-1] for view in forward[0].views]
    assert sides == [8, 8, 6] and not torch.equal(*forward[0].views[:2])
    again = batches()
    assert all(same(again(step), forward[step]) for step in reversed(range(5)))
    assert not any(same(forward[0], other) for other in forward[1:])
    assert not same(batches(CONFIG.model_copy(update={"seed": 1}))(0), forward[0])


def test_labels_belong_to_their_images():
    """Without augmentation a row is an image of the set."""
    plain = {"augment__large__affine": 0.0, "augment__large__jitter": 0.0}
    config = small_config(**plain, train__batch_size=24, augment__weak=True)
    train, batch = small_sets()[0], batches(config)(1)
    mean, std = (
        torch.tensor(values).view(3, 1, 1)
        for values in (config.data.mean, config.data.std)
    )
    pixels = ((batch.views[0] * std + mean) * 255).round().to(torch.uint8)
    for image, label in zip(pixels[:12], batch.labels, strict=True):
        is_same = (train.labeled_images[:] == image).flatten(1).all(dim=1)
        assert label in train.labels[is_same]
    for image in pixels[12:]:
        assert (train.unlabeled_images[:] == image).flatten(1).all(dim=1).any()
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
    """The evaluation view is one of them. Other steps and seeds have other views."""
    source, views_of_row = feature_batches(), defaultdict(set)
    counts = np.zeros(1 + VIEWS)
    for step in range(20):  # 4 epochs and a half
        batch = source(step)
        assert batch.num_large == len(batch.views) == 3
        found = torch.stack(batch.views)[:, :, 0].long()
        rows, views = found % 1000, found // 1000
        assert (rows == rows[0]).all() and torch.equal(rows[0, 12:] - 100, batch.rows)
        assert torch.equal(batch.labels, rows[0, :12] % 5)
        for row, some in zip(rows[0].tolist(), views.T.tolist(), strict=True):
            assert len(set(some)) == 3
            views_of_row[row].add(tuple(some))
        counts += np.bincount(views.flatten(), minlength=1 + VIEWS)
    assert sum(len(some) > 1 for some in views_of_row.values()) > 150
    assert counts.min() > 0.8 * counts.mean()
    assert same(feature_batches()(7), source(7))
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
        ((views, _),) = found.batches(len(features))
        assert torch.equal(views, found.index[:, None].float())
    images = keep_pixels(task, features, [None] * 1797).rows.images
    assert torch.equal(images.prepared(np.arange(1797))[0], features[:, 0])
    assert torch.equal(
        images.take(np.array([7, 3])).prepared(np.array([1]))[0], features[3:4, 0]
    )
    assert np.array_equal(images[3], task.rows.images[3])


def noisy_batches(config=HEADS, rank=0, world_size=1):
    """Of vectors with one view each: 1000 times the number of their row."""
    rows = 1000 * torch.arange(200.0)[:, None, None].expand(-1, 1, 4)
    train = TrainSet(rows[:100], torch.arange(100) % 5, rows[100:], 5, 5)
    plan = run.plans(config, 100, 100, world_size)[run.DISCOVER]
    return train.batches(config, plan, rank, world_size)


def test_vectors_with_one_view_get_noise():
    """Each view has other noise, in proportion to the spread of the vectors."""
    config = override(HEADS, {"augment.vector_noise": 0.001})
    batch = noisy_batches(config)(2)
    views, spread = torch.stack(batch.views), 1000 * np.arange(200).std()
    noise = views - (views / 1000).round() * 1000
    assert views.shape == (3, 24, 4) and len(noise.unique()) > 200
    assert noise.std() == pytest.approx(0.001 * spread, rel=0.15)
    rows = (views[0, :, 0] / 1000).round().long()
    assert torch.equal(batch.labels, rows[:12] % 5)
    assert torch.equal(rows[12:] - 100, batch.rows)
    assert same(noisy_batches(config)(2), batch)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "make",
    [
        batches,
        partial(batches, phase=run.PRETRAIN),
        feature_batches,
        noisy_batches,
    ],
)
def test_shares_of_the_workers_are_the_global_batch(make, world_size):
    """Kills: the same views on every worker, views drawn by the place in a worker's
    share, rows shared out across the two kinds.
    """
    whole = make()(2)
    shares = [make(rank=rank, world_size=world_size)(2) for rank in range(world_size)]
    assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)
    split = len(shares[0].labels)
    for v, view in enumerate(whole.views):
        parts = [share.views[v][:split] for share in shares]
        parts += [share.views[v][split:] for share in shares]
        assert torch.equal(torch.cat(parts), view)
