"""What training may see, what only evaluation reads, and batches as a pure function
of (seed, step).
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.uno.small_run import small_config, small_sets
from uno.config import DataConfig, override
from uno.data.columns import make_labels
from uno.data.memory import (
    RowBlocks,
    TrainSet,
    assemble,
    eval_sets,
    keep_pixels,
)
from uno.data.sources import read_digits
from uno.data.splits import make_task
from uno.runs import run

from .builders import load_resident

DIGITS = DataConfig(known_classes="first:5", stored_size=8)


def test_sets_hold_the_readable_rows_of_the_digits():
    task, images, _, _ = load_resident(DIGITS, threads=2)
    ok = np.arange(len(images)) % 10 > 0  # the others could not be read
    train, sets = assemble(task, images, ok), eval_sets(task, images, ok)
    truth = torch.tensor([int(label) for label in task.rows.labels.to_pylist()])
    labeled, unlabeled = task.is_train & (task.labels >= 0) & ok, task.labels < 0
    assert (train.num_known, train.num_novel) == (5, 5)
    assert torch.equal(train.labeled_images[:], images[labeled])
    assert torch.equal(train.labels, truth[labeled])
    assert torch.equal(
        train.unlabeled_images[:], images[task.is_train & unlabeled & ok]
    )
    for name, member in (("train", task.is_train), ("test", ~task.is_train)):
        ((pixels, labels),) = sets[name].batches(len(images))
        expected = np.flatnonzero(member & ok)
        assert sets[name].index.tolist() == expected.tolist()
        assert torch.equal(pixels, images[expected])
        assert torch.equal(labels, truth[expected])


def test_a_sample_of_labeled_rows_has_every_class():
    task, images, _, _ = load_resident(DIGITS, threads=2)
    train = assemble(task, images, np.ones(len(images), bool))
    labeled, unlabeled = train.choose_rows(3)
    assert {*train.labels[labeled].tolist()} == {*range(5)} and len(unlabeled) == 3


def contents(train):
    return {
        name: value[:] if isinstance(value, RowBlocks) else value
        for name, value in vars(train).items()
    }


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_hidden_labels_never_reach_training(fraction):
    """The training set is the same whatever the classes of unlabeled rows are."""
    config = DIGITS.model_copy(update={"unlabeled_known_fraction": fraction})
    task, images, ok, _ = load_resident(config)
    hidden = np.flatnonzero(task.is_train & (task.labels < 0))
    shuffled = np.random.default_rng(0).permutation(hidden)
    truth, names = task.eval_labels.copy(), np.array(task.rows.labels.to_pylist())
    truth[hidden], names[hidden] = truth[shuffled], names[shuffled]
    other_rows = replace(task.rows, labels=make_labels(names.tolist()))
    other = replace(task, eval_labels=truth, rows=other_rows)
    assert not np.array_equal(truth, task.eval_labels)
    expected = contents(assemble(task, images, ok))
    for name, value in contents(assemble(other, images, ok)).items():
        assert np.array_equal(value, expected[name]), name
    sets = eval_sets(task, images, ok)
    assert sets["train"].index[sets["train"].unlabeled].tolist() == hidden.tolist()
    assert sets["test"].unlabeled.all()
    assert (task.eval_labels[hidden] < 5).any() == (fraction > 0)


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


VIEWS = 5
ROW_LABELS = torch.arange(100) % 5
HEADS = small_config(
    model__finetune="none",
    augment__small__num_views=0,
    augment__num_cached_views=VIEWS,
    augment__large__num_views=3,
    train__batch_size=24,
)


def viewed_rows():
    """Features that are the numbers of their row and view, labeled rows first; view 0
    is evaluation's.
    """
    rows = torch.arange(200.0)[:, None] + 1000 * torch.arange(1.0 + VIEWS)
    return TrainSet(rows[:100, :, None], ROW_LABELS, rows[100:, :, None], 5, 5)


def vectors():
    """Vectors with one view each: 1000 times the number of their row."""
    rows = 1000 * torch.arange(200.0)[:, None, None].expand(-1, 1, 4)
    return TrainSet(rows[:100], ROW_LABELS, rows[100:], 5, 5)


def batches(config=CONFIG, train=None, phase=run.DISCOVER, rank=0, world_size=1):
    train = train or small_sets()[0]
    plan = run.plans(config, len(train.labels), train.num_unlabeled, world_size)[phase]
    return train.batches(config, plan, rank, world_size)


def same(first, second):
    return torch.equal(first.labels, second.labels) and all(
        map(torch.equal, first.views, second.views)
    )


def with_seed_1(config):
    return config.model_copy(update={"seed": 1})


def test_batches_are_a_pure_function_of_the_step():
    """No generator is carried on, and the global one is not used."""
    source = batches()
    first, second = source(0), source(1)
    torch.manual_seed(3)
    assert same(source(0), first) and not same(second, first)
    assert not same(batches(with_seed_1(CONFIG))(0), first)
    assert [view.shape[-1] for view in first.views] == [8, 8, 6]
    assert not torch.equal(first.views[0], first.views[1])


def test_labels_belong_to_their_images():
    """Without augmentation a row is an image of the set."""
    plain = {"augment__large__affine": 0.0, "augment__large__jitter": 0.0}
    config = small_config(**plain, train__batch_size=24, augment__weak=True)
    train, batch = small_sets()[0], batches(config)(1)
    assert torch.equal(batch.views[0], batch.views[1])  # nothing random is left
    mean, std = torch.tensor([config.data.mean, config.data.std])[:, :, None, None]
    pixels = ((batch.views[0] * std + mean) * 255).round().to(torch.uint8)
    stored = torch.cat([train.labeled_images[:], train.unlabeled_images[:]])
    row, number = (pixels[:, None] == stored).flatten(2).all(dim=2).nonzero().T
    assert row.tolist() == list(range(24))  # each is one image
    assert torch.equal(train.labels[number[:12]], batch.labels)
    assert (number[12:] >= len(train.labels)).all()


def test_a_step_takes_different_cached_views_of_a_row():
    """The evaluation view is one of them. Other steps and seeds have other views."""
    source, chosen = batches(HEADS, viewed_rows()), set()
    for step in range(20):  # 4 epochs and a half
        batch = source(step)
        assert batch.num_large == 3
        found = torch.stack(batch.views)[:, :, 0].long()
        rows, views = found[0] % 1000, found // 1000
        assert torch.equal(found - 1000 * views, rows.expand(3, 24))  # of one row each
        assert torch.equal(batch.labels, rows[:12] % 5)
        assert torch.equal(batch.rows, rows[12:] - 100)
        chosen.update(zip(rows.tolist(), *views.tolist(), strict=True))
    assert len(chosen) > 200 + 150  # most of the 200 rows have other views later
    assert all(len({*views}) == 3 for _, *views in chosen)
    counts = np.bincount([view for _, *views in chosen for view in views])
    assert len(counts) == 1 + VIEWS and counts.min() > 0.8 * counts.mean()
    assert not same(batches(with_seed_1(HEADS), viewed_rows())(3), source(3))


def test_evaluation_reads_the_evaluation_view_of_cached_features():
    """And so does what comes after it. Kills: a random view, which training has
    seen.
    """
    task = make_task(read_digits(), DIGITS)
    features = (
        torch.arange(1797.0)[:, None, None] + 1000 * torch.arange(1.0 + VIEWS)[:, None]
    )
    for found in eval_sets(task, features, np.ones(1797, dtype=bool)).values():
        ((views, _),) = found.batches(len(features))
        assert torch.equal(views, found.index[:, None].float())
    images = keep_pixels(task, features, [None] * 1797).rows.images
    assert torch.equal(images.prepared(np.arange(1797))[0], features[:, 0])
    some = images.take(np.array([7, 3])).prepared(np.array([1]))[0]
    assert torch.equal(some, features[3:4, 0])
    assert np.array_equal(images[3], task.rows.images[3])


@pytest.mark.parametrize("num", [0, 1, 3])
def test_an_evaluation_set_may_have_fewer_rows_than_workers(num):
    task = make_task(read_digits(), DIGITS)
    found = eval_sets(task, torch.zeros(1797, 1, 2), np.arange(1797) < num)
    for one in found.values():
        shares = [one.batches(8, rank, 5) for rank in range(5)]
        labels = [labels for share in shares for _, labels in share]
        assert sorted(torch.cat([torch.arange(0), *labels])) == sorted(one.truth)


def test_vectors_with_one_view_get_noise():
    """Each view has other noise, in proportion to the spread of the vectors."""
    config = override(HEADS, {"augment.vector_noise": 0.001})
    batch = batches(config, vectors())(2)
    views, spread = torch.stack(batch.views), 1000 * np.arange(200).std()
    noise = views - (views / 1000).round() * 1000
    assert views.shape == (3, 24, 4) and len(noise.unique()) > 200
    assert noise.std() == pytest.approx(0.001 * spread, rel=0.15)
    rows = (views[0, :, 0] / 1000).round().long()
    assert torch.equal(batch.labels, rows[:12] % 5)
    assert torch.equal(rows[12:] - 100, batch.rows)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "make",
    [
        batches,
        partial(batches, phase=run.PRETRAIN),
        partial(batches, HEADS, viewed_rows()),
        partial(batches, HEADS, vectors()),
    ],
    ids=["images", "images of pretraining", "views", "vectors"],
)
def test_shares_of_the_workers_are_the_global_batch(make, world_size):
    """Kills: the same views on every worker, views drawn by the place in a worker's
    share, rows shared out across the two kinds.
    """
    whole = make()(2)
    shares = [make(rank=rank, world_size=world_size)(2) for rank in range(world_size)]
    assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)
    split = len(shares[0].labels)
    views_of_shares = zip(*(share.views for share in shares), strict=True)
    for view, parts in zip(whole.views, views_of_shares, strict=True):
        ordered = [p[:split] for p in parts] + [p[split:] for p in parts]
        assert torch.equal(torch.cat(ordered), view)
