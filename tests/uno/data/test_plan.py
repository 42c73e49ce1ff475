"""Batches as a pure function of (seed, step), the same for any number of workers."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from uno.data.plan import (
    LABELED,
    PRETRAIN,
    UNLABELED,
    Plan,
    batch_indices,
    batch_sizes,
    epoch_indices,
    make_plan,
    make_pretrain_plan,
    steps_per_epoch,
    worker_share,
)
from uno.errors import ConfigError

few = settings(max_examples=80, deadline=None, derandomize=True)
counts = st.integers(1, 60)


@st.composite
def plans(draw, composition):
    labeled, unlabeled, size = draw(counts), draw(counts), draw(st.integers(2, 40))
    try:
        return make_plan(draw(st.integers(0, 9)), composition, size, labeled, unlabeled)
    except ConfigError:
        assume(False)


def epoch(plan, number):
    steps = range(number * plan.steps_per_epoch, (number + 1) * plan.steps_per_epoch)
    return [np.concatenate(part) for part in zip(*(batch_indices(plan, s) for s in steps), strict=True)]


@pytest.mark.parametrize(
    ("composition", "size", "labeled", "unlabeled", "expected"),
    [
        ("proportional", 512, 40_000, 10_000, (410, 102)),  # CIFAR100-20: 80/20
        ("proportional", 512, 25_000, 25_000, (256, 256)),  # CIFAR10 and CIFAR100-50
        ("paired", 512, 1_100_000, 39_000, (256, 256)),  # ImageNet
        ("proportional", 8, 1, 1000, (1, 7)),
        ("proportional", 8, 1000, 1, (7, 1)),
    ],
)
def test_sizes_of_the_published_protocols(composition, size, labeled, unlabeled, expected):
    """Kills: halves for everything, a share of zero, labeled and unlabeled swapped."""
    assert batch_sizes(composition, size, labeled, unlabeled) == expected


@few
@given(plans("proportional"), st.integers(0, 3))
def test_proportional_epochs_hold_every_row_at_most_once(plan, number):
    """Kills: sampling with replacement, a tail that wraps round, one order for both sets."""
    labeled, unlabeled = epoch(plan, number)
    assert len(set(labeled)) == len(labeled) == plan.steps_per_epoch * plan.labeled_size <= plan.num_labeled
    assert len(set(unlabeled)) == len(unlabeled) == plan.steps_per_epoch * plan.unlabeled_size
    assert set(labeled) <= set(range(plan.num_labeled)) and set(unlabeled) <= set(range(plan.num_unlabeled))
    left = (plan.num_labeled - len(labeled), plan.num_unlabeled - len(unlabeled))
    assert left[0] < plan.labeled_size or left[1] < plan.unlabeled_size  # only a partial batch is dropped


@few
@given(plans("paired"), st.integers(0, 3))
def test_paired_epochs_cycle_the_shorter_set_evenly(plan, number):
    """Kills: the shorter set drawn with replacement, cut at its own length, or shuffled across its cycles."""
    for rows, total in zip(epoch(plan, number), (plan.num_labeled, plan.num_unlabeled), strict=True):
        times = np.bincount(rows, minlength=total)
        assert len(times) == total
        assert set(times) <= {len(rows) // total, -(-len(rows) // total)}
        for start in range(0, len(rows) - total + 1, total):
            assert len(set(rows[start : start + total])) == total
    assert plan.labeled_size == plan.unlabeled_size
    assert plan.steps_per_epoch == max(plan.num_labeled, plan.num_unlabeled) // plan.labeled_size


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@few
@given(plans("proportional"), st.integers(0, 200))
def test_workers_together_hold_the_global_batch(workers, plan, step):
    """Kills: strided or shuffled shares whose union is right but whose order is not, rows held twice."""
    for indices in batch_indices(plan, step):
        if len(indices) % workers == 0:
            shares = [worker_share(indices, rank, workers) for rank in range(workers)]
            assert len({len(share) for share in shares}) == 1
            np.testing.assert_array_equal(np.concatenate(shares), indices)


@few
@given(
    counts,
    counts,
    st.integers(2, 40),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["proportional", "paired"]),
)
def test_sizes_do_not_depend_on_workers_and_errors_name_sizes_that_work(
    labeled, unlabeled, size, workers, composition
):
    """Kills: rounding B_l to the workers, suggestions that fail themselves."""
    try:
        sizes = batch_sizes(composition, size, labeled, unlabeled, workers)
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message and f"batch_size {size}: " in message
        if "nearest" in message:
            nearest = [int(w) for w in message.split("works: ")[1].split(" or ")]
            assert all(batch_sizes(composition, b, labeled, unlabeled, workers) for b in nearest)
        return
    assert sizes == batch_sizes(composition, size, labeled, unlabeled)
    assert sum(sizes) == size and all(part % workers == 0 and part > 0 for part in sizes)
    assert steps_per_epoch(composition, *sizes, labeled, unlabeled) >= 1


def test_order_is_a_pure_function_of_seed_and_epoch():
    """Kills: a generator carried over epochs, one permutation for every epoch, seed or stream ignored."""
    arguments = {"seed": 3, "epoch": 2, "num_rows": 50, "rows_needed": 50, "stream": LABELED}
    base = epoch_indices(**arguments)
    epoch_indices(9, 9, 50, 500, UNLABELED)
    np.testing.assert_array_equal(base, epoch_indices(**arguments))
    for change in ({"seed": 4}, {"epoch": 3}, {"stream": UNLABELED}, {"stream": PRETRAIN}):
        assert (base != epoch_indices(**(arguments | change))).any()
    twice = epoch_indices(**(arguments | {"rows_needed": 100}))
    np.testing.assert_array_equal(twice[:50], base)
    assert (twice[50:] != base).any() and base.dtype == np.int64
    assert epoch_indices(0, 0, 5, 0, 0).tolist() == []


def test_batches_in_any_order_are_the_same():
    """A resumed run asks for step 7 first. Kills: state in the cache, steps counted per epoch only."""
    plan = make_plan(1, "proportional", 8, 20, 30)
    forward = [batch_indices(plan, step) for step in range(30)]
    for step in reversed(range(30)):
        again = batch_indices(Plan(**vars(plan)), step)
        assert all((a == b).all() for a, b in zip(again, forward[step], strict=True))
    assert not forward[0][0].flags.writeable
    assert (forward[0][0] != forward[plan.steps_per_epoch][0]).any()


def test_workers_must_divide_both_parts():
    with pytest.raises(
        ConfigError, match=r"410 labeled \+ 102 unlabeled rows do not divide by 4 workers"
    ) as caught:
        batch_sizes("proportional", 512, 40_000, 10_000, 4)
    for size in str(caught.value).split("works: ")[1].split(" or "):
        assert all(part % 4 == 0 for part in batch_sizes("proportional", int(size), 40_000, 10_000, 4))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("proportional", 512, 100, 100), "nearest batch_size that works: 200"),
        (("paired", 7, 100, 100), "even size"),
        (("paired", 300, 100, 100), "nearest batch_size that works: 200"),
        (("proportional", 8, 0, 10), "0 labeled"),
        (("paired", 8, 10, 0), "0 unlabeled"),
        (("proportional", 2, 1, 1, 2), "use fewer workers"),
    ],
)
def test_size_errors(arguments, text):
    with pytest.raises(ConfigError) as caught:
        batch_sizes(*arguments)
    assert text in str(caught.value)


def test_pretraining_takes_labeled_rows_only():
    plan = make_pretrain_plan(0, 8, 30, 2)
    assert (plan.labeled_size, plan.unlabeled_size, plan.steps_per_epoch) == (8, 0, 3)
    labeled, unlabeled = epoch(plan, 1)
    assert len(set(labeled)) == 24 and len(unlabeled) == 0
    assert make_pretrain_plan(0, 512, 31, 2).labeled_size == 30
    discovery = make_plan(0, "proportional", 8, 30, 30)
    assert (batch_indices(plan, 0)[0][:4] != batch_indices(discovery, 0)[0][:4]).any()
    with pytest.raises(ConfigError, match="nearest: 8 or 10"):
        make_pretrain_plan(0, 9, 30, 2)
    with pytest.raises(ConfigError, match="1 labeled rows are too few for 2 workers"):
        make_pretrain_plan(0, 8, 1, 2)
