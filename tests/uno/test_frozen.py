"""Clusters of frozen features, on features whose structure is known."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from uno.clustering.frozen import (
    KMEANS,
    SMOOTHED,
    Clustering,
    discover_clusters,
    find_correct_rows,
    fit_whitening,
    measure_agreement,
    merge_clusters,
)
from uno.clustering.kmeans import FREE
from uno.clustering.neighbors import (
    compute_mixing,
    count_links,
    find_neighbors,
    mixing_of_cluster,
    smooth_rows,
    spectral_coordinates,
)


def features(sizes=(24,) * 10, noise=8.0, seed=0):
    """Classes that are apart in 16 directions, and larger noise in 4 other directions.

    k-means follows the noise; only the labels of known classes say that it means
    nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centers = 2 * torch.randn(len(sizes), 16, generator=generator)
    signal = centers[truth] + 0.6 * torch.randn(len(truth), 16, generator=generator)
    shared = noise * torch.randn(len(truth), 4, generator=generator)
    return torch.cat([signal, shared], dim=1), truth


def solve(points, truth, num_known, num_novel, gcd, seed=0):
    """Return the result, and the outputs and classes of the unlabeled rows."""
    free = (truth >= num_known) | (gcd & (torch.arange(len(truth)) % 2 == 0))
    result = discover_clusters(
        points[~free], truth[~free], points[free], num_novel, gcd, seed
    )
    cosines = result.space(points[free]) @ result.prototypes.T
    if not gcd:
        cosines[:, :num_known] = -torch.inf
    return result, cosines.argmax(dim=1), truth[free]


def accuracy(truth, outputs):
    num_classes = int(max(truth.max(), outputs.max())) + 1
    return float(find_correct_rows(truth, outputs, num_classes).float().mean())


@pytest.mark.parametrize("gcd", [False, True])
def test_labels_of_known_classes_show_which_directions_mean_nothing(gcd):
    result, outputs, truth = solve(*features(), num_known=6, num_novel=4, gcd=gcd)
    assert accuracy(truth, outputs) > 0.9
    known = truth < 6
    assert not known.any() or (outputs == truth)[known].float().mean() > 0.9
    assert result.agreement.shape == (8,)
    assert float(result.agreement[:3].max()) < 0.9  # features as they are
    assert float(result.agreement[5:].min()) > 0.9  # the pipeline itself


@pytest.mark.parametrize("gcd", [False, True])
@pytest.mark.parametrize(("num_known", "num_novel"), [(1, 7), (2, 4), (6, 1)])
@pytest.mark.parametrize("sizes", [[24] * 10, [60, 12, 50, 9, 70, 30, 8, 55, 40, 9]])
def test_as_many_novel_classes_as_asked_for(gcd, num_known, num_novel, sizes):
    """Whatever the true number is, and however much class sizes differ."""
    points, truth = features(sizes=sizes)
    result, outputs, _ = solve(points, truth, num_known, num_novel, gcd)
    assert len(outputs[outputs >= num_known].unique()) == num_novel
    assert result.prototypes.shape[0] == num_known + num_novel
    lengths = result.prototypes.norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_large_classes_are_not_divided_where_sizes_differ():
    """Two classes of 300 rows beside three of 12: k-means divides the large ones."""
    sizes = [200, 20, 30, 150, 300, 12, 300, 12, 12]
    points, truth = features(sizes=sizes, noise=1.0, seed=4)
    _, outputs, novel = solve(points, truth, 4, 5, gcd=False)
    merged = accuracy(novel, outputs)
    unit = normalize(points[truth >= 4], dim=1)
    clustering = Clustering.of(unit, torch.full((len(unit),), FREE), 5, False)
    plain = accuracy(novel, clustering.partition(KMEANS, 5, 10, 0))
    assert merged > 0.95 and merged > plain


@pytest.mark.parametrize("num_known", [0, 6])
def test_each_merge_is_the_best_of_all_pairs(num_known):
    """As if the mixing of all pairs were computed again after each merge."""
    points = normalize(torch.randn(240, 6), dim=1)
    clusters = torch.randint(0, 24, (240,))
    neighbors, zeros = find_neighbors(points), torch.zeros(24, 24)

    def counts(of_row):
        return count_links(neighbors, of_row, 24), of_row.bincount(minlength=24)

    expected = clusters.clone()
    for num_merges in range(1, 18):
        values = compute_mixing(*counts(expected)).triu(1)
        values[:, :num_known] = -1
        gone = expected.bincount(minlength=24) == 0
        values[gone], values[:, gone] = -1, -1
        first, second = divmod(int(values.argmax()), 24)
        expected[expected == second] = first
        found = merge_clusters(*counts(clusters), zeros, num_known, num_merges)
        assert torch.equal(found[clusters], expected.unique(return_inverse=True)[1])


def test_empty_clusters_are_merged_first_and_known_ones_without_rows_take_nothing():
    """As in the setting ncd, where known clusters hold none of the clustered rows."""
    links = torch.diag(torch.tensor([0, 50, 50, 0, 50]))
    sizes = torch.tensor([0, 5, 5, 0, 5])
    used = torch.tensor([1, 2, 4])
    once, twice = (
        merge_clusters(links, sizes, torch.ones(5, 5), 1, num)[used] for num in (1, 2)
    )
    assert len(once.unique()) == 3 and len(twice.unique()) == 2
    assert (once > 0).all() and (twice > 0).all()


def test_mixing_is_links_relative_to_a_random_division():
    points = normalize(torch.randn(4_000, 3), dim=1)
    neighbors = find_neighbors(points)
    halves = torch.randint(0, 2, (4_000,))
    third = torch.randint(0, 3, (4_000,)).clamp(max=1)
    for clusters in (halves, third):
        links = count_links(neighbors, clusters, 2)
        found = compute_mixing(links, clusters.bincount())
        assert float(found[0, 1]) == pytest.approx(1, abs=0.03)
        assert found.diagonal().tolist() == [0, 0] and torch.equal(found, found.T)
        assert torch.equal(found[1], mixing_of_cluster(links, clusters.bincount(), 1))
    hemispheres = (points[:, 0] > 0).long()
    links = count_links(neighbors, hemispheres, 2)
    assert float(compute_mixing(links, hemispheres.bincount())[0, 1]) < 0.15


def test_agreement_is_low_where_nothing_is_to_be_found():
    rows = torch.randn(400, 16)
    labels = torch.cat([torch.arange(100) % 4, torch.full((300,), FREE)])
    clusters = torch.cat([labels[:100], 4 + torch.arange(300) % 5])
    clustering = Clustering.of(normalize(rows, dim=1), labels, 5, False)
    shares = measure_agreement(clustering, rows, clusters, 0)
    assert shares.shape == (8,) and float(shares.max()) < 0.4


def test_agreement_is_measured_on_a_sample_of_many_rows(monkeypatch):
    """A sample of the rows agrees about as much as all of them."""
    task = *features(sizes=[60] * 8), 4, 4, False
    whole = solve(*task)[0].agreement
    monkeypatch.setattr("uno.clustering.frozen.MAX_COMPARED_ROWS", 60)
    sample = solve(*task)[0].agreement
    assert not torch.equal(whole, sample)
    assert float((sample - whole).abs().mean()) < 0.1


def test_a_class_of_one_row_is_in_the_sample(monkeypatch):
    """The last known class, too, by which the classes are counted."""
    points, truth = features(sizes=[60] * 8)
    truth[180:240] = 0
    truth[181] = 3
    monkeypatch.setattr("uno.clustering.frozen.MAX_COMPARED_ROWS", 60)
    assert solve(points, truth, 4, 4, False)[0].agreement.shape == (8,)


def test_too_few_rows_have_no_agreement():
    points, truth = features(sizes=[10, 10, 4, 4])
    result, outputs, _ = solve(points, truth, 2, 2, gcd=True)
    assert len(outputs[outputs >= 2].unique()) == 2 and result.agreement.shape == (8,)
    result, *_ = solve(points[:25], truth[:25], 2, 4, gcd=False)
    assert len(result.agreement) == 0


def test_a_whitener_is_the_inverse_root_of_the_shrunk_covariance():
    points, truth = features([200, 150, 250])
    means = torch.stack([points[truth == c].double().mean(dim=0) for c in range(3)])
    residuals = points.double() - means[truth]
    within = residuals.T @ residuals / len(residuals)
    eye = torch.eye(len(within), dtype=torch.float64)
    shrunk = within + 0.1 * within.trace() / len(within) * eye
    white = fit_whitening(points, truth).double()
    torch.testing.assert_close(white @ shrunk @ white, eye, atol=1e-4, rtol=0)


def test_neighbors_are_found_in_blocks(monkeypatch):
    points = normalize(torch.randn(50, 5), dim=1)
    similarity = (points @ points.T).fill_diagonal_(-2)
    expected = similarity.topk(3, dim=1).indices
    assert torch.equal(find_neighbors(points, 3), expected)
    monkeypatch.setattr("uno.clustering.neighbors.MAX_CELLS", 50 * 7)
    assert torch.equal(find_neighbors(points, 3), expected)
    assert find_neighbors(points[:2], 3).tolist() == [[1], [0]]


def test_a_smoothed_row_is_the_mean_of_its_neighbors_and_itself():
    points = normalize(torch.randn(50, 5), dim=1)
    neighbors = find_neighbors(points)
    total = points + points[neighbors].sum(dim=1)
    torch.testing.assert_close(smooth_rows(points, neighbors), normalize(total, dim=1))


@pytest.mark.parametrize("dense", [0, 400])
def test_spectral_coordinates_tell_rings_apart(dense, monkeypatch):
    """Two rings, which no center tells apart, have two directions as coordinates."""
    monkeypatch.setattr("uno.clustering.neighbors.MAX_DENSE", dense)
    angle = torch.arange(120) * (2 * math.pi / 120)
    ring = torch.stack([angle.cos(), angle.sin()], dim=1)
    rings = [torch.cat([ring, z * torch.ones(120, 1)], 1) for z in (0.0, 0.5)]
    neighbors = find_neighbors(normalize(torch.cat(rings), dim=1))
    found = spectral_coordinates(neighbors, 2)
    same = (found @ found.T).abs()
    assert float(same[:120, :120].min()) > 0.99 and float(same[:120, 120:].max()) < 0.05
    assert torch.equal(found, spectral_coordinates(neighbors, 2))


def test_labeled_rows_stay_in_their_classes_in_gcd():
    points, truth = features(noise=1.0)
    free = (truth >= 6) | (torch.arange(len(truth)) % 2 == 0)
    labels = truth.masked_fill(free, FREE)
    clustering = Clustering.of(normalize(points, dim=1), labels, 4, True)
    for clusters in (clustering.partition(SMOOTHED, 4, 3, 0), clustering.run(0)):
        assert torch.equal(clusters[~free], truth[~free])
