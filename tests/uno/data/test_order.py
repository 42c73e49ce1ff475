"""Rows of an epoch are exact for any number of workers, and any step can be the first."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uno.data.plan import UNLABELED, Order, batch_indices, make_plan, make_pretrain_plan, window_indices

COMPOSITIONS = st.sampled_from(["proportional", "paired"])


def orders(plan, world_size, groups):
    return [Order(plan, rank, world_size, *groups, window_rows=7) for rank in range(world_size)]


def epoch_of(plan, world_size, groups, epoch=0, first=0):
    """All rows of an epoch, over all workers: labeled, unlabeled."""
    kinds: tuple[list[int], list[int]] = ([], [])
    for i in range(first, plan.steps_per_epoch):
        for order in orders(plan, world_size, groups):
            for seen, rows in zip(kinds, order.rows(epoch * plan.steps_per_epoch + i), strict=True):
                seen += rows.tolist()
    return kinds


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 40), st.integers(0, 60),
    COMPOSITIONS, st.booleans(), st.integers(0, 2**20),
)  # fmt: skip
def test_rows_of_an_epoch_are_exact(world, b_l, b_u, extra_l, extra_u, composition, windows, seed):
    """Every row as often as the plan says, whatever divides: no row twice in a pass, none dropped but those
    of the last partial batch. Kills: shares that overlap, a worker's tail lost, a cycle that starts early.
    """
    num_l, num_u = 2 * b_l * world + extra_l, 2 * b_u * world + extra_u
    batch = 2 * b_l * world
    try:
        plan = make_plan(seed, composition, batch, num_l, num_u, world)
    except Exception as error:  # sizes that do not divide are refused, and tested elsewhere
        assert "batch_size" in str(error)
        return
    random = np.random.default_rng(seed)
    groups = [np.sort(random.integers(0, 5, n)) for n in (num_l, num_u)] if windows else [None, None]
    for seen, num, size in zip(
        epoch_of(plan, world, groups), (num_l, num_u), (plan.labeled_size, plan.unlabeled_size), strict=True
    ):
        needed = plan.steps_per_epoch * size
        assert len(seen) == needed
        counts = Counter(seen)
        assert set(counts) <= set(range(num))
        full, rest = divmod(needed, num)
        often = [counts[row] for row in range(num)]
        assert sorted(often) == [full] * (num - rest) + [full + 1] * rest
        if composition == "proportional":
            assert max(often) <= 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_by_one_is_the_resident_order(world):
    """Kills: a streamed folder that trains on other rows than the same folder in memory."""
    plan = make_plan(5, "proportional", 12, 50, 49, world)
    for step in (0, 3, plan.steps_per_epoch + 1):
        whole = batch_indices(plan, step)
        shares = [order.rows(step) for order in orders(plan, world, (None, None))]
        for kind in (0, 1):
            assert np.concatenate([share[kind] for share in shares]).tolist() == whole[kind].tolist()


@pytest.mark.parametrize("windows", [False, True])
def test_any_step_can_be_the_first(windows):
    """A new object, asked for the rest of an epoch, continues the old one. Kills: state between steps, an
    order of the second epoch that repeats the first.
    """
    plan = make_pretrain_plan(3, 12, 103, 3)
    groups = [np.arange(103) // 10, np.empty(0, np.int64)] if windows else [None, None]
    whole, _ = epoch_of(plan, 3, groups, epoch=1)
    rest, _ = epoch_of(plan, 3, groups, epoch=1, first=4)
    assert rest == whole[4 * 12 :]
    other, _ = epoch_of(plan, 3, groups, epoch=2)
    assert other != whole and len(set(other)) == len(other)


def test_windows_read_few_row_groups_at_a_time():
    """A window's rows come from its own row groups only, and are mixed. Kills: a permutation of all rows,
    row groups in file order, rows in the order of the file.
    """
    groups = np.repeat(np.arange(40), 5)
    order = window_indices(0, 0, groups, 200, UNLABELED, window_rows=20)
    assert sorted(order.tolist()) == list(range(200))
    windows = [set(groups[order[i : i + 20]].tolist()) for i in range(0, 200, 20)]
    assert all(len(window) == 4 for window in windows) and len(set.union(*windows)) == 40
    assert sum(max(window) - min(window) > 3 for window in windows) >= 8
    assert not (np.diff(groups[order[:20]]) >= 0).all()
    assert (window_indices(0, 1, groups, 200, UNLABELED, 20) != order).any()
    assert (window_indices(1, 0, groups, 200, UNLABELED, 20) != order).any()


def test_a_longer_epoch_cycles():
    """Each cycle is a new permutation."""
    order = window_indices(0, 0, np.zeros(10, np.int64), 25, UNLABELED, 4)
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert (order[:10] != order[10:20]).any() and len(set(order[20:])) == 5
