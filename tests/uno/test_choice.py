"""Classes chosen by hidden known ones, on features whose structure is known."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from uno import choice as module
from uno.choice import (
    CANDIDATES,
    LIMITS,
    PLAIN,
    SAFE,
    Choice,
    choose,
    find,
    hidden_draws,
    joined_prototypes,
    joins,
    linked,
    matched,
    mixing_limit,
    strictly_matched,
    whitener,
)
from uno.clustering import FREE
from uno.neighbors import MAX_CELLS, links, mixing, nearest, smoothed, spectral


def features(num_classes=10, rows=24, noise=8.0, seed=0):
    """Classes apart in 16 directions, and in 4 others, which all classes share, noise that is larger: k-means
    follows it, and only labels say that it means nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = torch.arange(num_classes).repeat_interleave(rows)
    centers = 2 * torch.randn(num_classes, 16, generator=generator)
    signal = centers[truth] + 0.6 * torch.randn(len(truth), 16, generator=generator)
    shared = noise * torch.randn(len(truth), 4, generator=generator)
    return torch.cat([signal, shared], dim=1), truth


@pytest.mark.parametrize("gcd", [False, True])
def test_whitening_is_chosen_where_it_helps(gcd):
    """Kills: a choice by the wrong rows, known clusters among the novel outputs, hidden classes whose labels
    whiten, a whitener that enlarges what varies within classes.
    """
    points, truth = features()
    free = (truth >= 6) | (gcd & (torch.arange(len(truth)) % 2 == 0))
    found, space, prototypes = find(points[~free], truth[~free], points[free], 4, gcd, seed=0)
    cosines = space(points[free]) @ prototypes.T
    outputs = cosines.argmax(dim=1) if gcd else 6 + cosines[:, 6:].argmax(dim=1)
    assert float(matched(truth[free], outputs, 10).float().mean()) > 0.9
    assert CANDIDATES[found.candidate].shrinkage is not None
    mean = found.scores.mean(dim=0)
    assert mean[found.candidate] > mean[PLAIN] + 0.2
    expected, low, high = found.expected()
    assert low <= expected <= high and expected == pytest.approx(float(found.new[:, found.candidate].mean()))
    if gcd:  # known prototypes keep their classes
        old = truth[free] < 6
        assert float((outputs == truth[free])[old].float().mean()) > 0.9


def test_the_same_seed_chooses_the_same():
    points, truth = features()
    once, again = (find(points[truth < 6], truth[truth < 6], points[truth >= 6], 4, False, 3) for _ in "ab")
    assert torch.equal(once[2], again[2]) and torch.equal(once[0].scores, again[0].scores)


def test_a_difference_within_the_noise_does_not_decide(monkeypatch):
    """Kills: the largest mean taken as it is, an error that is not that of the paired differences."""
    safe = torch.tensor([0.5, 0.7, 0.9, 0.5])
    scores = safe[:, None].repeat(1, len(CANDIDATES))
    scores[:, 1] += torch.tensor([0.3, -0.1, 0.2, 0.0])  # better by .1, standard error .09
    lines = iter(scores.tolist())
    monkeypatch.setattr(module, "DRAWS", 4)
    monkeypatch.setattr(module, "_scores", lambda *rest: [next(lines)] * 2)
    points, truth = features(4)
    assert choose(points, truth, 2, False, 0).candidate == SAFE
    scores[:, 3] = safe + torch.tensor([0.02, 0.03, 0.02, 0.03])  # less, but always
    lines = iter(scores.tolist())
    assert choose(points, truth, 2, False, 0).candidate == 3


def test_too_few_known_classes_take_the_safe_candidate():
    points, truth = features(3)
    found = choose(points, truth, 2, False, 0)
    assert found.candidate == SAFE and found.expected() is None and len(found.scores) == 0


@pytest.mark.parametrize(("known", "novel", "size"), [(4, 9, 2), (9, 3, 3), (50, 50, 25), (8, 1, 2)])
def test_every_class_is_hidden_before_one_is_again(known, novel, size):
    """Kills: more than half hidden, classes that are never hidden, one that is hidden twice in a draw."""
    draws = hidden_draws(known, novel, 0)
    assert len(draws) == module.DRAWS and {len(set(draw)) for draw in draws} == {size}
    first = [c for draw in draws[: known // size] for c in draw]
    assert len(first) == len(set(first)) == known // size * size
    assert hidden_draws(3, 2, 0) == []


def test_the_interval_is_that_of_other_classes():
    """Kills: a normal quantile, draws taken for independent ones, an interval beyond 0 or 1."""
    new = torch.tensor([[0.47], [0.5], [0.53]])
    mean, low, high = Choice(0, new, new, 3).expected()
    half = 2.91999 * math.sqrt(0.03**2 * 4 / 3 + 0.01 * 0.5 * 0.5)
    assert (mean, low, high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-5)
    assert Choice(0, new + 0.45, new + 0.45, 3).expected()[2] == 1


def test_a_whitener_is_the_inverse_root():
    """Kills: covariance of all rows instead of within classes, shrinkage of another scale."""
    points, truth = features(3, rows=200)
    rest = points.double() - torch.stack([points[truth == c].double().mean(dim=0) for c in range(3)])[truth]
    within = rest.T @ rest / len(rest)
    shrunk = within + 0.1 * within.trace() / len(within) * torch.eye(len(within), dtype=torch.float64)
    white = whitener(points, truth, 0.1).double()
    torch.testing.assert_close(white @ shrunk @ white, torch.eye(20, dtype=torch.float64), atol=1e-4, rtol=0)
    assert torch.equal(whitener(points, truth, None), torch.eye(20))


def test_neighbors_are_found_in_blocks(monkeypatch):
    """Kills: a row as its own neighbor in a later block, a last block that is lost."""
    points = normalize(torch.randn(50, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    similarity = (points @ points.T).fill_diagonal_(-2)
    whole = nearest(points, 3)
    assert torch.equal(whole, similarity.topk(3, dim=1).indices)
    monkeypatch.setattr("uno.neighbors.MAX_CELLS", 50 * 7)
    assert MAX_CELLS > 50 * 7 and torch.equal(nearest(points, 3), whole)
    assert nearest(points[:2], 3).tolist() == [[1], [0]]
    total = points + points[nearest(points)].sum(dim=1)
    torch.testing.assert_close(smoothed(points), normalize(total, dim=1))


@pytest.mark.parametrize("dense", [0, 400])
def test_spectral_coordinates_tell_rings_apart(dense, monkeypatch):
    """Two rings, which no center tells apart: their rows' coordinates are two directions. Kills: another
    result of the same rows.
    """
    monkeypatch.setattr("uno.neighbors.MAX_DENSE", dense)
    angle = torch.arange(120) * (2 * math.pi / 120)
    ring = torch.stack([angle.cos(), angle.sin()], dim=1)
    points = normalize(torch.cat([torch.cat([ring, z * torch.ones(120, 1)], 1) for z in (0.0, 0.5)]), dim=1)
    found = spectral(points, 2)
    same = (found @ found.T).abs()
    assert float(same[:120, :120].min()) > 0.99 and float(same[:120, 120:].max()) < 0.05
    assert torch.equal(found, spectral(points, 2))


def test_a_free_row_is_never_of_a_hidden_class_by_its_label():
    """Kills: a hidden class among the known ones of a draw, in either pile; rows that keep their labels."""
    points, truth = features(6)
    for gcd in (False, True):
        for rows, seen, true in module._hidden(points, truth, hidden_draws(6, 3, 0), gcd):
            hidden = true >= 3
            assert (seen[hidden] == FREE).all() and (seen[seen != FREE] == true[seen != FREE]).all()
            assert len(rows) == len(true) and (not gcd or (seen[~hidden] == FREE).any())
    once = torch.tensor([0, 24, 48, 72, 96, 120])  # a row of each class: none of them loses its label
    draws = hidden_draws(6, 3, 0)
    assert len(list(module._hidden(points[once], truth[once], draws, True))) == len(draws)


def test_links_between_clusters_are_counted_and_weighed():
    """By hand. Kills: links counted in one direction, shares of another base, a cluster of one row that
    mixes, a cluster that mixes with itself.
    """
    generator = torch.Generator().manual_seed(0)
    points, clusters = torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)
    points, counts = normalize(points, dim=1), torch.zeros(4, 4, dtype=torch.int64)
    for row, neighbors in enumerate(nearest(points).tolist()):
        for other in neighbors:
            counts[clusters[row], clusters[other]] += 1
    assert torch.equal(links(points, clusters, 4), counts) and not torch.equal(counts, counts.T)
    counts = torch.tensor([[5, 1, 0], [1, 5, 0], [0, 0, 0]])
    shares = mixing(counts, torch.tensor([3, 3, 0]))
    # of the 6 links of either one, half would go to the other: 2 are found, 6 expected
    assert float(shares[0, 1]) == float(shares[1, 0]) == pytest.approx(2 / 6)
    assert float(shares.sum()) == pytest.approx(4 / 6)
    uneven = mixing(torch.tensor([[70, 10], [12, 8]]), torch.tensor([8, 2]))
    assert float(uneven[0, 1]) == pytest.approx((10 + 12) / (80 * 2 / 10 + 20 * 8 / 10))
    assert not mixing(torch.tensor([[70, 10], [10, 0]]), torch.tensor([8, 1])).any()


def become(*given):
    *_, (_, found) = joins(*given)
    return found


def test_clusters_are_joined_while_they_mix():
    """Kills: known clusters joined, shares that are not counted again, a pair under its later number."""
    counts = torch.tensor([[80, 40, 0, 0, 0], [40, 80, 0, 0, 0], [0, 0, 60, 30, 12], [0, 0, 30, 60, 0],
                           [0, 0, 12, 0, 60]])  # fmt: skip
    sizes = torch.tensor([10, 10, 10, 10, 10])
    before = counts.clone()
    assert become(counts, sizes, 2, 0.5).tolist() == [0, 1, 2, 2, 4]
    both = torch.tensor([[180, 12], [12, 60]])
    share = float(mixing(both, torch.tensor([20, 10]))[0, 1])
    assert share == pytest.approx(24 / (192 / 3 + 72 * 2 / 3))
    assert become(counts, sizes, 2, share + 1e-6).tolist() == [0, 1, 2, 2, 4]
    assert become(counts, sizes, 2, share - 1e-6).tolist() == [0, 1, 2, 2, 2]
    assert become(counts, sizes, 1, 0.5).tolist() == [0, 0, 2, 2, 4]  # a new one joins a known one
    assert become(counts, sizes, 2, math.inf).tolist() == [0, 1, 2, 3, 4]
    shares = [most for most, _ in joins(counts, sizes, 2)]
    assert shares[0] == math.inf and shares[1] == pytest.approx(2 / 3) and shares[2] == share
    assert torch.equal(counts, before)


def test_known_outputs_are_matched_with_no_new_class():
    """By hand. Kills: a new class that is found on a known output, a known class on a new one."""
    truth, found = torch.tensor([0, 0, 1, 2, 2, 2, 3, 3]), torch.tensor([0, 3, 2, 3, 3, 1, 1, 1])
    assert strictly_matched(truth, found, 2).tolist() == [True, False, False, True, True, False, False, False]
    assert matched(truth, found, 4).tolist() == [True, False, True, True, True, False, True, True]
    assert not strictly_matched(truth[6:], found[6:], 2).any()


def test_labeled_rows_are_neighbors_in_gcd_alone():
    """Kills: rows of known classes among the neighbors of new ones where the pile holds none of them."""
    points, truth = features(4)
    rows, seen = normalize(points, dim=1), truth.masked_fill(truth >= 2, FREE)
    for gcd, sizes in ((False, [0, 0, 24, 24]), (True, [24] * 4)):
        counts, found = linked(rows, seen, truth, 4, gcd)
        assert found.tolist() == sizes and counts.sum(dim=1).tolist() == [10 * size for size in sizes]


@pytest.mark.parametrize("gcd", [False, True])
@pytest.mark.parametrize("asked", [4, 6, 8])
def test_too_many_new_classes_leave_outputs_empty(gcd, asked):
    """Four new classes are found whatever number is asked for, in GCD sometimes one in two parts. Kills: no
    limit, classes joined at their own number, rows of joined clusters lost, prototypes of empty outputs that
    take rows.
    """
    points, truth = features(12, rows=30)
    free = (truth >= 8) | (gcd & (torch.arange(len(truth)) % 2 == 0))
    _, space, found = find(points[~free], truth[~free], points[free], asked, gcd, seed=0)
    left = int(found[8:].any(dim=1).sum())
    assert left == 4 or (gcd and asked > 4 and left == 5)
    assert found[:8].any(dim=1).all()
    cosines = space(points[free]) @ found.T
    outputs = cosines.argmax(dim=1) if gcd else 8 + cosines[:, 8:].argmax(dim=1)
    assert float(matched(truth[free], outputs, 8 + asked).float().mean()) > 0.93


def test_classes_that_mix_as_parts_do_are_not_joined():
    """Kills: a limit where known classes overlap, or where none can be hidden."""
    points, truth = features(10, noise=0.1)
    rows = module.principal_space(points)(points)
    safe = CANDIDATES[SAFE]
    assert 0 < mixing_limit(rows, truth, 4, False, safe, 0)[0] < 1
    alike = normalize(torch.randn(240, 20, generator=torch.Generator().manual_seed(1)), dim=1)
    assert mixing_limit(alike, truth, 4, False, safe, 0)[0] == math.inf
    assert mixing_limit(rows[truth < 3], truth[truth < 3], 2, False, safe, 0)[0] == math.inf


def test_half_of_the_new_clusters_are_left():
    """Rows that nothing divides: all clusters mix. Kills: new classes that all become one, a half that is
    rounded down, known clusters among those that are left.
    """
    rows = normalize(torch.randn(240, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    labels = (torch.arange(240) // 20).masked_fill(torch.arange(240) >= 120, FREE)
    for gcd in (False, True):
        for asked, left in ((1, 1), (2, 2), (3, 2), (5, 3), (8, 4)):
            found = joined_prototypes(rows, labels, asked, gcd, CANDIDATES[SAFE], 0.01, 0)[1]
            assert int(found[6:].any(dim=1).sum()) == left and found[:6].any(dim=1).all()


def scores_of(right, many):
    """Accuracies with limits .02, .04 and .06, as given, and with others, 0.5; (accuracy, balanced) each."""
    found = []
    for values in (right, many):
        steps = torch.tensor([[*values[0], 0.5], [*values[1], 0.5]])
        per_limit = steps.repeat_interleave(torch.tensor([1, 1, 1, len(LIMITS) - 3]), dim=1).T
        found.append(torch.cat([per_limit, per_limit[:, :1]], dim=1).tolist())
    return found


@pytest.mark.parametrize(
    ("right", "many", "limit"),
    [
        (([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), ([0.6, 0.9, 0.8], [0.6, 0.9, 0.8]), 0.04),
        (([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), ([0.9, 0.9, 0.8], [0.9, 0.9, 0.8]), 0.035),  # with care
        (([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), ([0.9, 0.8, 0.9], [0.9, 0.8, 0.9]), 0.06),
        (([0.5, 0.4, 0.5], [0.5, 0.4, 0.5]), ([0.6, 0.9, 0.8], [0.6, 0.9, 0.8]), 0.06),  # the right number
        (([0.5, 0.6, 0.5], [0.5, 0.4, 0.5]), ([0.6, 0.9, 0.8], [0.6, 0.9, 0.8]), 0.04),  # by both accuracies
        (([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), ([0.9, 0.9, 0.9], [0.1, 0.1, 0.1]), math.inf),
        (([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), math.inf),
    ],
)
def test_the_limit_is_what_hidden_classes_gain_by(monkeypatch, right, many, limit):
    """Kills: a limit by one kind of accuracy, one that costs the right number or joins more than it must."""
    points, truth = features(10)
    right, many = scores_of(right, many)
    asked = {4: right, 6: many}
    monkeypatch.setattr(module, "_joined_scores", lambda rows, labels, truth, num, *more: asked[num])
    found, new = mixing_limit(points, truth, 4, False, CANDIDATES[SAFE], 0)
    assert found == pytest.approx(limit)
    where = -1 if limit == math.inf else {0.035: 1}.get(limit, round(50 * limit) - 1)
    assert new.tolist() == [right[where][2]] * len(hidden_draws(10, 4, 0))


def test_a_gain_that_draws_do_not_agree_on_joins_nothing(monkeypatch):
    """Kills: a limit by the mean alone."""
    points, truth = features(10)
    draws = iter(range(100))

    def scores(*given):
        gain = 0.4 if next(draws) % 12 < 2 else 0  # both of the first draw
        return [[0.5 + gain] * 3] * (len(LIMITS) - 1) + [[0.5] * 3]

    monkeypatch.setattr(module, "_joined_scores", scores)
    assert mixing_limit(points, truth, 4, False, CANDIDATES[SAFE], 0)[0] == math.inf
