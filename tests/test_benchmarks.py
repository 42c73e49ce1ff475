"""What the records rest on: equal work on both sides of a comparison, counts and fits that are right."""

import pytest
import torch

from benchmarks.growth import parts
from benchmarks.held_out import hold_out
from benchmarks.nodes import together
from benchmarks.objective import make_methods
from benchmarks.quantities import count_operators, exponents, peak_bytes
from benchmarks.sets import scores
from benchmarks.workers import efficiency
from tests.uno.small_run import small_sets


@pytest.mark.slow
def test_the_looped_objective_is_the_same_objective():
    """``make_methods`` compares the losses before it returns. Kills: a rival that does less or other work."""
    methods = make_methods("cifar10", 16, "cpu")
    assert {name.split()[0] for name in methods} == {"ours", "looped"} and len(methods) == 8
    for name in ("ours all", "looped all"):
        methods[name]()


def test_operators_are_counted_once():
    """A sum is one operator, not its allocation and fill; views are none."""
    tensor = torch.ones(4, 4)
    assert count_operators(lambda: tensor.T[2:].unsqueeze(0)) == 0
    assert count_operators(lambda: (tensor + 1).mul_(2).sum()) == 3


def test_what_ranks_do_together_lasts_from_the_last_that_comes():
    """Of two ranks. Kills: who waits for the other, another kind, a vote that a lost group did not finish and
    that is paired with one of the next.
    """
    vote = [(0, "vote", 0.0, 5.0), (1, "vote", 4.0, 5.5), (0, "vote", 6.0, 9.0)]
    later = [(1, "barrier", 6.5, 7.0), (0, "vote", 10.0, 12.0), (1, "vote", 11.0, 11.75)]
    assert together([*later, *vote], "vote", 2) == [1.5, 1.0]
    assert together(later, "barrier", 1) == [0.5]


def test_peak_bytes_is_what_lives_at_once():
    """Kills: the sum of all allocations, the memory left at the end."""

    def method():
        for _ in range(3):
            torch.empty(1000, 1000)

    assert peak_bytes(method) == 4_000_000


def test_a_wrong_number_of_classes_is_scored_under_one_matching():
    """Known class 0, novel 1 and 2 of 8 and 2 rows; three outputs. Kills: old rows among the new, an output
    for two classes, absorbed rows of known classes, a mean over rows for one over classes.
    """
    truth = torch.tensor([0] * 5 + [1] * 8 + [2] * 2)
    outputs = torch.tensor([0] * 4 + [1] + [1] * 5 + [3] + [0] * 2 + [1] * 2)
    found = scores(truth, outputs, 1, (3, 4))
    assert (found["all"], found["new"], found["old"]) == (0.6, 0.5, 0.8)
    assert (found["absorbed"], found["recall_small"], found["recall_large"]) == (0.2, 0.0, 0.625)
    assert found["balanced"] == 0.3125
    assert scores(truth, outputs.clamp(max=1), 1, (3, 2))["recall_small"] == 0


def test_exponents():
    assert exponents([1, 2, 4], [3, 6, 12]) == {"all": 1.0, "top": 1.0}
    assert exponents([1, 2, 4], [1, 1, 4]) == {"all": 1.0, "top": 2.0}


@pytest.mark.parametrize("step_ms", [10.0, pytest.param(40.0, marks=pytest.mark.slow)])
def test_the_model_of_scaling_loses_with_more_gpus(step_ms):
    """Kills: an efficiency above one, collectives that cost nothing."""
    found = [efficiency(gpus, step_ms)["efficiency"] for gpus in (8, 64, 512)]
    assert 1 > found[0] > found[1] > found[2] > 0


def test_parts_of_the_growth_curves_run():
    for method in parts(batch=16, heads=1, overclustering=2, clusters=3, device="cpu").values():
        method()


def test_held_out_classes_are_known_ones():
    """Kills: a novel row among them, a held-out row that stays labeled, classes in another order."""
    train, _ = small_sets()
    found, truth = hold_out(train, 4)  # known: 4 and 0; held out: 1, 2, 3
    assert torch.equal(found.labels, torch.tensor([0, 1])[(train.labels[train.labels % 4 == 0] == 0).long()])
    assert torch.equal(found.unlabeled_images, train.labeled_images[train.labels % 4 != 0])
    assert torch.equal(truth, train.labels[train.labels % 4 != 0] - 1)
    assert (found.num_known, found.num_novel, len(found.labels) + len(truth)) == (2, 3, len(train.labels))
