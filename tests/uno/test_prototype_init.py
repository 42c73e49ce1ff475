"""Clusters that discovery starts from, against data whose classes are known."""

import copy
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import normalize

from tests.uno.data.builders import encoded
from tests.uno.small_run import small_config, small_sets
from uno.clustering.initialization import (
    cluster_features,
    compare_known_shares,
    init_prototypes_,
    shrink_prior,
    training_features,
)
from uno.config import override
from uno.data.memory import TrainSet
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.data.stream import streaming_set
from uno.model import build_network
from uno.results.metrics import cluster_accuracy, confusion, purity

SIZES = [30, 30, 30, 30, 12, 40, 20, 8]  # of which the first four classes are known


def blobs(seed=0, dims=40, noise=0.35, sizes=SIZES, num_known=4):
    """Features, true classes, which rows are labeled: half of each known class.
    Noise hides in all dims.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    centers = torch.randn(len(sizes), dims, generator=generator)
    points = (
        centers[truth] + noise * torch.randn(len(truth), dims, generator=generator) + 2
    )
    half = (torch.arange(len(truth)) % 2 == 0) & (truth < num_known)
    return points, truth, half


def test_a_mixed_pile_falls_into_its_classes():
    """Kills: known outputs counted after novel ones, labeled rows not fixed, shares of
    labeled rows in the prior, centers of the whitened points.
    """
    points, truth, labeled = blobs()
    start = cluster_features(
        points[~labeled], points[labeled], truth[labeled], 4, "gcd", seed=0
    )
    true = truth[~labeled]
    assert torch.equal(start.assignment[true < 4], true[true < 4])
    pairs = torch.stack([true, start.assignment]).unique(dim=1)
    assert pairs.shape == (2, 8)  # each class is one cluster
    shares = torch.bincount(start.assignment, minlength=8) / len(true)
    torch.testing.assert_close(start.prior, shares)
    assert shares.min() < 0.06 < 0.25 < shares.max()
    unit = normalize(points, dim=1)
    means = torch.stack([unit[truth == c].mean(dim=0) for c in range(4)])
    expected = normalize(means, dim=1)
    torch.testing.assert_close(start.centers[:4], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(start.centers.norm(dim=1), torch.ones(8))


def test_a_novel_pile_has_novel_clusters_alone():
    """Kills: known clusters in the prior of the NCD setting, centers of another
    order than the assignment.
    """
    points, truth, _ = blobs()
    rest = truth >= 4
    start = cluster_features(
        points[rest], points[~rest], truth[~rest], 4, "ncd", seed=0
    )
    assert start.prior.sort().values.tolist() == pytest.approx(
        sorted(n / 80 for n in SIZES[4:])
    )
    unit = normalize(points[rest], dim=1)
    assert torch.equal((unit @ start.centers.T).argmax(dim=1), start.assignment)


def test_few_or_equal_rows_are_clustered_too():
    """Fewer unlabeled rows than outputs, rows without a difference. Kills: k-means of
    fewer rows than clusters, NaN, an output whose prior is zero.
    """
    points, truth, labeled = blobs()
    for rows in (points[~labeled][:5], torch.ones(20, 40)):
        start = cluster_features(
            rows, points[labeled], truth[labeled], 4, "gcd", seed=0
        )
        assert len(start.assignment) == len(rows) and start.prior.shape == (8,)
        assert start.prior.min() > 0 and start.centers.isfinite().all()
        assert float(start.prior.sum()) == pytest.approx(1)


def test_features_of_streamed_rows_are_those_of_resident_ones(storage, monkeypatch):
    """In several batches, of a part of the rows. Kills: labels of other rows, training
    rows of another order, an encoder in training mode.
    """
    monkeypatch.setattr("uno.clustering.initialization.MAX_ROWS", 60)
    config = small_config(train__eval_batch_size=16)
    task = make_task(read_rows(config.data), config.data)
    streamed = streaming_set(config, task, storage)
    streamed = replace(streamed, crop=lambda job: pytest.fail("cropped"))
    model = build_network(config, 5, 0, 0).eval()
    found = training_features(config, model, streamed)
    expected = training_features(config, model, small_sets()[0])
    assert [len(part) for part in expected] == [60, 60, 60]
    torch.testing.assert_close([*found], [*expected], atol=1e-5, rtol=1e-5)


def test_sorted_classes_are_all_looked_at(tmp_path, storage, monkeypatch):
    """800 streamed digits in row groups of 40. Kills: a few classes of many, because a
    row group has one.
    """
    digits, labels = load_digits(return_X_y=True)
    rows = np.argsort(labels[:800], kind="stable")
    images = [encoded((16 * digits[i]).astype("u1").reshape(8, 8)) for i in rows]
    table = pa.table({"image": pa.array(images, pa.binary()), "label": labels[rows]})
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=40)
    source = {
        "data.source": f"parquet:{tmp_path}",
        "data.known_classes": "first:5",
        "data.limit": None,
    }
    config = override(small_config(), {**source, "data.loading": "streaming"})
    task = make_task(read_rows(config.data), config.data)
    monkeypatch.setattr("uno.clustering.initialization.MAX_ROWS", 20)
    train = streaming_set(config, task, storage)
    found = training_features(config, build_network(config, 5, 0, 0).eval(), train)
    assert min(found.labels.bincount(minlength=5).tolist()) >= 3


def test_a_prior_of_novel_clusters_is_beside_what_the_method_keeps():
    """In the setting ncd a run has one only if it asks for it."""
    config = small_config(data__setting="ncd", objective__class_prior="kmeans")
    model = build_network(config, 5, 5, 0)
    queue = {"queue": torch.zeros(3)}
    found = init_prototypes_(config, model, small_sets()[0], queue)
    assert found.keys() == {"queue", "prior"}
    assert found["prior"].shape == (5,)


def test_sizes_of_clusters_are_believed_as_far_as_known_ones_are_right():
    """Kills: the error not relative to an equal share (all but one number of classes),
    its root, its sign or a share below 0 of the spread; the spread of the known classes
    in place of the clusters'.
    """
    prior, true = torch.tensor([0.4, 0.2, 0.2, 0.2]), torch.tensor([0.75, 0.25])
    torch.testing.assert_close(shrink_prior(prior, true, true), prior)
    torch.testing.assert_close(
        shrink_prior(prior, true.flip(0), true), torch.full((4,), 0.25)
    )
    # spread .6, -.2, -.2, -.2: variance .12; error of +-.1 of .5: .2 ** 2 = .04; a
    # third is not believed
    half = shrink_prior(prior, true + torch.tensor([0.1, -0.1]), true)
    torch.testing.assert_close(half, torch.tensor([0.35, 0.65 / 3, 0.65 / 3, 0.65 / 3]))
    equal = torch.full((4,), 0.25)
    torch.testing.assert_close(shrink_prior(equal, true, true), equal)


def test_shares_of_known_classes_and_of_the_clusters_that_match_them():
    """Kills: clusters that are not matched, shares in another order than the
    classes'.
    """
    sizes = [40, 10, 25]
    points, truth, _ = blobs(dims=20, noise=0.1, sizes=sizes, num_known=3)
    found, true = compare_known_shares(points, truth, seed=0)
    torch.testing.assert_close(true, torch.tensor(sizes) / 75)
    torch.testing.assert_close(found, true)
    labels = truth.clone()
    labels[:8] = 1  # eight rows of class 0 that look like it: 32 rows of 40
    found, true = compare_known_shares(points, labels, seed=0)
    torch.testing.assert_close(true, torch.tensor([32, 18, 25]) / 75)
    torch.testing.assert_close(found, torch.tensor(sizes) / 75)


@pytest.mark.parametrize("kind", ["ncd", "gcd"])
def test_prototypes_start_at_the_clusters_of_the_features(kind):
    """On clusters that leave no doubt every head's argmax is the clustering before the
    first step, and the known head's the label. Kills: prototypes at random, of other
    projections, statistics of BatchNorm that evaluation does not have, known rows among
    the novel clusters.
    """
    config = small_config(
        model__prototype_init="kmeans", data__setting=kind, model__overcluster_factor=2
    )
    model = build_network(config, 5, 5, 1)
    width = model.known.weight.shape[1]
    labels = torch.arange(5).repeat(12)
    truth = torch.arange(5 if kind == "ncd" else 0, 10).repeat_interleave(30)
    labeled, unlabeled = (
        4 * torch.eye(width)[classes] + torch.randn(len(classes), width) / 5
        for classes in (labels, truth)
    )
    views = [rows[:, None].expand(-1, 4, -1) for rows in (labeled, unlabeled)]
    train = TrainSet(views[0], labels, views[1], 5, 5)
    kept = copy.deepcopy(model)
    extra = init_prototypes_(config, model, train, {})
    assert model.training and ("prior" in extra) == (kind == "gcd")
    logits, novel = model.eval()([unlabeled]), truth >= 5
    for head in logits.novel[0]:
        pairs = confusion(truth[novel] - 5, head[novel].argmax(dim=1), 5, 5)
        assert cluster_accuracy(pairs) > 0.95  # at random .4 to .8
    assert torch.equal(model([labeled]).known[0].argmax(dim=1), labels)
    over = logits.over[0][0][novel].argmax(dim=1)  # an overcluster is of one class
    assert purity(confusion(truth[novel] - 5, over, 5, 10)) > 0.95
    before = kept.known.weight.clone()
    init_prototypes_(config, kept, train, {}, keep_known=True)
    assert torch.equal(kept.known.weight, before)
