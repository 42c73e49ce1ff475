"""Batches are a pure function of (seed, step), exact for any number of workers; any
step can be the first.
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from uno.data.sampling import (
    Order,
    by_windows,
    make_plan,
    make_pretrain_plan,
)
from uno.errors import ConfigError

from .builders import failure


def batch_sizes(*arguments):
    plan = make_plan(0, *arguments)
    return plan.labeled_size, plan.unlabeled_size


few = settings(max_examples=80, deadline=None, derandomize=True)
counts, workers, seeds = st.integers(1, 60), st.integers(1, 4), st.integers(0, 99)
compositions = st.sampled_from(["proportional", "balanced"])


@st.composite
def plans(draw):
    """(plan, batch_sampling, number of workers, how rows are grouped)."""
    batch_sampling, world, seed = draw(compositions), draw(workers), draw(seeds)
    size, *numbers = draw(st.integers(2, 12)) * world, draw(counts), draw(counts)
    try:
        plan = make_plan(seed, batch_sampling, size, *numbers, world)
    except ConfigError:
        assume(False)
    random = np.random.default_rng(seed)
    groups = tuple(np.sort(random.integers(0, 5, n)) for n in numbers)
    return plan, batch_sampling, world, draw(st.sampled_from([None, groups]))


def epoch(plan, number=0, world=1, groups=None, first=0):
    """All rows of an epoch from step ``first`` on: labeled, unlabeled, worker by
    worker in a step.
    """
    steps = range(plan.steps_per_epoch)[first:]
    orders = [Order(plan, rank, world, groups, window_rows=7) for rank in range(world)]
    before = number * plan.steps_per_epoch
    parts = [order.rows(before + step) for step in steps for order in orders]
    return [np.concatenate(kind) for kind in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("batch_sampling", "size", "labeled", "unlabeled", "expected"),
    [
        ("proportional", 512, 40_000, 10_000, (410, 102)),  # CIFAR100-20: 80/20
        ("proportional", 512, 25_000, 25_000, (256, 256)),  # CIFAR10 and CIFAR100-50
        ("balanced", 512, 1_100_000, 39_000, (256, 256)),  # ImageNet
        ("proportional", 8, 1, 1000, (1, 7)),
        ("proportional", 8, 1000, 1, (7, 1)),
    ],
)
def test_sizes_of_the_published_protocols(
    batch_sampling, size, labeled, unlabeled, expected
):
    """Kills: halves for everything, a share of zero, labeled and unlabeled swapped."""
    assert batch_sizes(batch_sampling, size, labeled, unlabeled) == expected


@few
@given(plans(), st.integers(0, 3))
def test_rows_of_an_epoch_are_exact(drawn, number):
    """Kills: sampling with replacement, shares that overlap, a worker's tail lost."""
    plan, batch_sampling, world, groups = drawn
    sizes = plan.labeled_size, plan.unlabeled_size
    totals = plan.num_labeled, plan.num_unlabeled
    rows_of_kinds = epoch(plan, number, world, groups)
    for rows, size, total in zip(rows_of_kinds, sizes, totals, strict=True):
        full, rest = divmod(plan.steps_per_epoch * size, total)
        often = np.bincount(rows, minlength=total)
        assert sorted(often) == [full] * (total - rest) + [full + 1] * rest
        assert batch_sampling == "balanced" or max(often) <= 1
        passes = [rows[i : i + total] for i in range(0, len(rows) - total + 1, total)]
        # not shuffled across cycles
        assert world > 1 or all(len(set(one)) == total for one in passes)
    steps = [total // size for total, size in zip(totals, sizes, strict=True)]
    assert plan.steps_per_epoch == (max if batch_sampling == "balanced" else min)(steps)


@few
@given(plans(), st.integers(0, 200))
def test_workers_together_hold_the_global_batch(drawn, step):
    """Kills: strided or shuffled shares, a streamed folder that trains on other rows
    than a resident one.
    """
    plan, _, world, _ = drawn
    orders = [Order(plan, rank, world) for rank in range(world)]
    shares = zip(*(order.rows(step) for order in orders), strict=True)
    for whole, parts in zip(Order(plan).rows(step), shares, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        assert len({len(part) for part in parts}) == 1
    positions = np.concatenate([order.positions for order in orders])
    assert sorted(positions) == list(range(plan.labeled_size + plan.unlabeled_size))


@few
@given(counts, counts, st.integers(2, 40), workers, compositions)
def test_sizes_do_not_depend_on_workers_and_errors_name_sizes_that_work(
    labeled, unlabeled, size, workers, batch_sampling
):
    """Kills: rounding B_l to the workers, suggestions that fail themselves."""
    rows = labeled, unlabeled
    try:
        sizes = batch_sizes(batch_sampling, size, *rows, workers)
    except ConfigError as error:
        assert "\n" not in str(error) and f"batch_size {size}: " in str(error)
        valid = str(error).partition("works: ")[2]
        if valid:
            assert batch_sizes(batch_sampling, int(valid), *rows, workers)
        return
    assert sizes == batch_sizes(batch_sampling, size, *rows)
    assert sum(sizes) == size and min(sizes) > 0
    assert all(part % workers == 0 for part in sizes)


@pytest.mark.parametrize(
    "groups", [None, (np.arange(103) // 10, np.empty(0, np.int64))]
)
def test_any_step_can_be_the_first(groups):
    """Kills: state between steps, steps counted per epoch only, one permutation for
    every epoch.
    """
    plan = make_pretrain_plan(3, 12, 103, 3)
    whole, other = epoch(plan, 1, 3, groups)[0], epoch(plan, 2, 3, groups)[0]
    assert epoch(plan, 1, 3, groups, first=4)[0].tolist() == whole[4 * 12 :].tolist()
    assert (other != whole).any() and len(set(other)) == len(other)
    forward, again = Order(plan, 1, 3, groups, 7), Order(plan, 1, 3, groups, 7)
    expected = [forward.rows(step) for step in range(20)]
    for step in reversed(range(20)):
        assert all(map(np.array_equal, again.rows(step), expected[step]))


def test_windows_read_few_row_groups_at_a_time():
    """Kills: a permutation of all rows, row groups in file order, rows in the order
    of the file.
    """
    groups = np.repeat(np.arange(40), 5)
    order = by_windows(groups, 20, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(200))
    windows = [set(groups[order[i : i + 20]].tolist()) for i in range(0, 200, 20)]
    assert all(len(window) == 4 for window in windows)
    assert sum(max(window) - min(window) > 3 for window in windows) >= 8
    assert not (np.diff(groups[order[:20]]) >= 0).all()
    # as runs have read them before
    groups = np.array([3, 3, 0, 0, 0, 7, 7, 5, 5, 5, 5, 9])
    order = by_windows(groups, 4, np.random.default_rng(0))
    assert order.tolist() == [8, 10, 7, 9, 5, 3, 4, 11, 2, 6, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("proportional", 512, 40_000, 10_000, 4),
            "410 labeled + 102 unlabeled images do not divide by 4",
        ),
        (("proportional", 512, 100, 100), "a batch_size that works: 200"),
        (("balanced", 7, 100, 100), "even size"),
        (("balanced", 300, 100, 100), "a batch_size that works: 200"),
        (("proportional", 8, 0, 10), "0 labeled"),
        (("balanced", 8, 10, 0), "0 unlabeled"),
        (("proportional", 2, 1, 1, 2), "use fewer workers"),
    ],
)
def test_size_errors(arguments, text):
    assert text in failure(batch_sizes, *arguments)


@pytest.mark.parametrize(
    ("size", "labeled", "text"),
    [
        (9, 30, "nearest: 8 or 10"),
        (8, 1, "too few labeled images (1) for 2 workers"),
    ],
)
def test_size_errors_of_pretraining(size, labeled, text):
    assert text in failure(make_pretrain_plan, 0, size, labeled, 2)


def test_pretraining_takes_labeled_rows_only():
    plan = make_pretrain_plan(0, 8, 30, 2)
    assert (plan.labeled_size, plan.unlabeled_size, plan.steps_per_epoch) == (8, 0, 3)
    labeled, unlabeled = epoch(plan, 1, 2)
    assert len(set(labeled)) == 24 and len(unlabeled) == 0
    assert make_pretrain_plan(0, 512, 31, 2).labeled_size == 30


def test_each_kind_of_rows_has_an_order_of_its_own_for_each_seed():
    """Kills: a random stream or a seed that is ignored."""
    first, _ = Order(make_pretrain_plan(0, 8, 30)).rows(0)
    others = [first[:4].tolist()]
    for seed in (0, 1):
        plan = make_plan(seed, "proportional", 8, 30, 30)
        others += [rows.tolist() for rows in Order(plan).rows(0)]
    assert len(set(map(tuple, others))) == 5
