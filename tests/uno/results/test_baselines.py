"""Clusterings of features, as baselines."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from uno.clustering.kmeans import FREE
from uno.config import Config
from uno.results import baselines
from uno.results.metrics import METRICS


def test_kmeans_of_pixels():
    """Digits 5-9: .887-.890 over 5 seeds. Kills: plain accuracy, one cluster less, no
    l2 normalization, normalization of columns, truth that reaches the clustering.
    """
    pixels, labels = load_digits(return_X_y=True)
    train, _ = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    train = train[labels[train] >= 5]
    pixels, labels = pixels[train], labels[train]
    clusters = baselines.direction_clusters(pixels, 5, seed=0)
    result = baselines.score_clusters(labels, clusters, 5)
    assert result["acc"] == pytest.approx(0.887, abs=0.01)
    assert result["nmi"] == pytest.approx(0.766, abs=0.01)
    assert set(result) == set(METRICS)
    lengths = np.random.default_rng(0).uniform(0.1, 10, (len(pixels), 1))
    scaled = baselines.direction_clusters(pixels * lengths, 5, seed=0)
    assert baselines.score_clusters(labels, scaled, 5) == pytest.approx(result)
    renamed = (labels - 5 + 2) % 5 + 40
    assert baselines.score_clusters(renamed, clusters, 5) == pytest.approx(result)


@pytest.mark.parametrize("gcd", [False, True])
def test_spectral_clusters_are_those_of_the_unlabeled_rows(gcd):
    """Of five separate classes, of which three are known, in a random order. Kills:
    clusters of the labeled rows, or in another order.
    """
    truth = torch.arange(100)[torch.randperm(100)] % 5
    features = 5 * torch.eye(8)[truth] + torch.randn(100, 8) / 4
    known = (truth < 3) & (torch.arange(100) % 2 == 0) & gcd
    labels, num_novel = torch.where(known, truth, FREE), 2 if gcd else 5
    clusters = baselines.spectral_clusters(features, labels, num_novel, gcd, 0)
    assert baselines.score_clusters(truth[~known], clusters, 5)["acc"] == 1
    assert not gcd or torch.equal(
        clusters[truth[~known] < 3], truth[~known & (truth < 3)]
    )


def test_there_is_no_graph_of_many_rows(monkeypatch):
    rows = baselines.FeatureRows(torch.randn(40, 4), torch.arange(40) % 2)
    for limit, number in ((40, 2), (39, 1)):
        monkeypatch.setattr(baselines, "MAX_GRAPH_ROWS", limit)
        assert len(list(baselines.novel_baselines(Config(), rows, 2))) == number
