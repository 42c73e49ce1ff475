"""What the records rest on: equal work on both sides of a comparison, counts and
fits that are right.
"""

import numpy as np
import pytest
import torch

from benchmarks.growth import parts
from benchmarks.held_out import hold_out
from benchmarks.nodes import together
from benchmarks.objective import make_methods
from benchmarks.quantities import count_operators, exponents, peak_bytes
from benchmarks.tasks import draws, make_task, strictly_matched
from benchmarks.workers import efficiency
from tests.uno.small_run import small_sets
from uno.clustering import FREE


@pytest.mark.slow
def test_the_looped_objective_is_the_same_objective():
    """``make_methods`` compares the losses before it returns. Kills: a rival that
    does less or other work.
    """
    methods = make_methods("cifar10", 16, "cpu")
    assert {name.split()[0] for name in methods} == {"ours", "looped"} and len(
        methods
    ) == 8
    for name in ("ours all", "looped all"):
        methods[name]()


def test_operators_are_counted_once():
    """A sum is one operator, not its allocation and fill; views are none."""
    tensor = torch.ones(4, 4)
    assert count_operators(lambda: tensor.T[2:].unsqueeze(0)) == 0
    assert count_operators(lambda: (tensor + 1).mul_(2).sum()) == 3


def test_what_ranks_do_together_lasts_from_the_last_that_comes():
    """Of two ranks. Kills: who waits for the other, another kind, a vote that a lost
    group did not finish and that is paired with one of the next.
    """
    vote = [(0, "vote", 0.0, 5.0), (1, "vote", 4.0, 5.5), (0, "vote", 6.0, 9.0)]
    later = [
        (1, "barrier", 6.5, 7.0),
        (0, "vote", 10.0, 12.0),
        (1, "vote", 11.0, 11.75),
    ]
    assert together([*later, *vote], "vote", 2) == [1.5, 1.0]
    assert together(later, "barrier", 1) == [0.5]


def test_peak_bytes_is_what_lives_at_once():
    """Kills: the sum of all allocations, the memory left at the end."""

    def method():
        for _ in range(3):
            torch.empty(1000, 1000)

    assert peak_bytes(method) == 4_000_000


def test_strict_matching_leaves_known_clusters_to_known_classes():
    truth = torch.tensor([0] * 5 + [1] * 8 + [2] * 2)
    outputs = torch.tensor([0] * 4 + [1] + [2] * 5 + [0] * 3 + [1] * 2)
    right = strictly_matched(truth, outputs, num_known=1)
    # cluster 2 is matched with class 1, cluster 1 with class 2; novel rows in cluster 0
    # and the known row in a novel cluster are wrong
    assert (
        right.tolist() == [True] * 4 + [False] + [True] * 5 + [False] * 3 + [True] * 2
    )


def test_tasks_hide_the_labels_of_novel_classes_and_half_of_the_known_rows():
    names = np.repeat([f"class-{i:02d}" for i in range(12)], 10)
    features = torch.arange(120.0)[:, None]
    few = [task for task in draws("set", names, None) if task[0] == "few"]
    assert len(few) == 20
    assert {(num_known, len(classes)) for _, _, classes, num_known, _ in few} == {
        (5, 10),
        (8, 12),
        (3, 6),
        (2, 4),
    }
    _, number, classes, num_known, _ = few[0]
    for setting, labeled in (("ncd", 10), ("gcd", 5)):
        task = make_task(features, names, classes, num_known, setting, number)
        assert task.labels[task.truth >= num_known].eq(FREE).all()
        assert (
            task.labels[task.labels != FREE].bincount().tolist()
            == [labeled] * num_known
        )


def test_exponents():
    assert exponents([1, 2, 4], [3, 6, 12]) == {"all": 1.0, "top": 1.0}
    assert exponents([1, 2, 4], [1, 1, 4]) == {"all": 1.0, "top": 2.0}


@pytest.mark.parametrize("step_ms", [10.0, pytest.param(40.0, marks=pytest.mark.slow)])
def test_the_model_of_scaling_loses_with_more_gpus(step_ms):
    """Kills: an efficiency above one, collectives that cost nothing."""
    found = [efficiency(gpus, step_ms)["efficiency"] for gpus in (8, 64, 512)]
    assert 1 > found[0] > found[1] > found[2] > 0


def test_parts_of_the_growth_curves_run():
    for method in parts(
        batch=16, heads=1, overclustering=2, clusters=3, device="cpu"
    ).values():
        method()


def test_held_out_classes_are_known_ones():
    """Kills: a novel row among them, a held-out row that stays labeled, classes in
    another order.
    """
    train, _ = small_sets()
    found, truth = hold_out(train, 4)  # known: 4 and 0; held out: 1, 2, 3
    assert torch.equal(
        found.labels,
        torch.tensor([0, 1])[(train.labels[train.labels % 4 == 0] == 0).long()],
    )
    assert torch.equal(
        found.unlabeled_images, train.labeled_images[train.labels % 4 != 0]
    )
    assert torch.equal(truth, train.labels[train.labels % 4 != 0] - 1)
    assert (found.num_known, found.num_novel, len(found.labels) + len(truth)) == (
        2,
        3,
        len(train.labels),
    )
