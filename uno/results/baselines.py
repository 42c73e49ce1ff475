"""Baselines of a run: clusterings of the features that discovery starts from.

The rows are clustered by k-means and by spectral clustering, and the clusters are
compared with the true classes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from uno.clustering.frozen import SPECTRAL, Clustering, fit_principal_space
from uno.clustering.initialization import (
    cluster_features,
    compute_features_together,
)
from uno.clustering.kmeans import FREE, kmeans
from uno.config import Config
from uno.data.files import Storage
from uno.data.stream import EvalData, TrainData
from uno.distributed import RankTask
from uno.model import UnoModel, build_network
from uno.results import metrics
from uno.runs.run import load_weights_

MAX_BASELINE_ROWS = 50_000  # labeled, and unlabeled, rows for k-means
MAX_GRAPH_ROWS = 20_000  # rows for spectral clustering, which takes 30 s on two cores
NUM_STARTS = 10


class FeatureRows(NamedTuple):
    """Features and true classes of readable rows of an evaluation set, on the CPU.

    Attributes:
        features: Features of the encoder, (N, D).
        truth: Index of the true class of each row, int64 (N,). The indices of known
            classes are smaller than those of novel classes.
    """

    features: Tensor
    truth: Tensor


class Baseline(NamedTuple):
    """One clustering of rows that still has to be computed, and how it is scored.

    Attributes:
        job: A task that one of the ranks runs. Its result, which all ranks get, is the
            cluster of each of the N rows that are scored, int64 (N,).
        score: Takes these clusters (N,), and returns metrics by key. Every rank calls
            it.
    """

    job: RankTask
    score: Callable[[Tensor], dict[str, float]]


def start_model(
    config: Config,
    storage: Storage,
    train: TrainData,
    rows: EvalData,
    device: torch.device,
) -> UnoModel | None:
    """Read the network that discovery started from, in eval mode.

    Args:
        config: The configuration of the run.
        storage: The run directory, which may hold pretrained weights.
        train: The training set, which has the numbers of classes.
        rows: The training rows with their true classes.
        device: The device of the network.

    Returns:
        The network without a novel head, with the weights of
        ``config.model.weights`` or of this run's phases before discovery. None if no
        baseline can be computed: ``rows`` has fewer rows of novel classes than there
        are novel clusters; and either the setting is not "gcd", or there are also fewer
        unlabeled rows than known and novel classes.

    Raises:
        ConfigError: The weights do not fit the encoder, or this run's pretraining had
            another number of known classes.
        StorageError: The weights, or the checkpoint that holds them, cannot be read.
    """
    if not any(_has_enough_rows(config, train, rows)):
        return None
    model = build_network(config, train.num_known, 0, 0)
    load_weights_(model, config, storage)
    return model.to(device).eval()


def _has_enough_rows(
    config: Config, train: TrainData, rows: EvalData
) -> tuple[bool, bool]:
    """Return whether there are enough rows for the novel and for the GCD baselines.

    Args:
        config: The configuration of the run, which has the setting.
        train: The training set, which has the numbers of classes.
        rows: The training rows with their true classes.

    Returns:
        Whether there are at least as many rows of novel classes as novel clusters; and
        whether the setting is "gcd" and there are at least as many unlabeled rows as
        known and novel classes.
    """
    mixed = (
        config.data.setting == "gcd"
        and int(rows.unlabeled.sum()) >= train.num_known + train.num_novel
    )
    return int((rows.truth >= train.num_known).sum()) >= train.num_novel, mixed


def baselines(
    config: Config, model: UnoModel, train: TrainData, rows: EvalData
) -> list[Baseline]:
    """Prepare the baselines of a run: clusterings of rows by their features.

    All workers call this function. Each computes the features of a share of the rows,
    and gets those of all. Only the clusterings are left for later. Of the rows of novel
    classes, and in the GCD setting of the unlabeled and of the labeled rows, a sample
    of at most 50,000 each is used, see :func:`read_features`.

    Args:
        config: The configuration of the run.
        model: The network that discovery started from.
        train: The training set, which has the numbers of classes.
        rows: The training rows with their true classes.

    Returns:
        :func:`novel_baselines` of the rows of novel classes, and in the GCD setting
        also :func:`generalized_baselines`. Each is left out if too few rows could be
        read: fewer rows of novel classes than novel clusters, or fewer unlabeled rows
        than known and novel classes, or no labeled row.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later.
        ConfigError: A file that holds many images, such as a tar shard, cannot be read.
    """
    found, (enough, mixed) = list[Baseline](), _has_enough_rows(config, train, rows)
    if enough:
        novel = read_features(config, model, rows.where(rows.truth >= train.num_known))
        if len(novel.truth) >= train.num_novel:  # some may be unreadable
            found += novel_baselines(config, novel, train.num_novel)
    if mixed:
        unlabeled, labeled = (
            read_features(config, model, rows.where(kind))
            for kind in (rows.unlabeled, ~rows.unlabeled)
        )
        found += generalized_baselines(config, unlabeled, labeled, train)
    return found


def novel_baselines(
    config: Config, rows: FeatureRows, num_novel: int
) -> Iterator[Baseline]:
    """Yield k-means and spectral clustering of the rows of novel classes.

    The rows are clustered by their features. Nothing is computed here: a
    :class:`Baseline` has a job that computes the clusters on one rank, and a function
    that turns the clusters into metrics. Their keys are
    ``baseline/{kmeans|spectral}/novel/{metric}``, with the names in
    :data:`uno.results.metrics.METRICS`. Spectral clustering is left out if there are
    more than ``MAX_GRAPH_ROWS`` (20,000) rows.

    Args:
        config: The configuration of the run, which has the seed.
        rows: The features and true classes of rows of novel classes.
        num_novel: The number of clusters, at most the number of rows.
    """
    features, truth = rows
    jobs: dict[str, Callable[[], Tensor]] = {
        "kmeans": partial(direction_clusters, features, num_novel, config.seed)
    }
    if len(features) <= MAX_GRAPH_ROWS:
        labels = torch.full((len(truth),), FREE)
        jobs["spectral"] = partial(
            spectral_clusters, features, labels, num_novel, False, config.seed
        )
    for name, job in jobs.items():
        yield Baseline(
            RankTask(len(truth), job),
            partial(_score_novel, f"baseline/{name}/novel", truth, num_novel),
        )


def _score_novel(
    path: str, truth: Tensor, num_novel: int, clusters: Tensor
) -> dict[str, float]:
    """Return the metrics of the clusters of novel rows, by key.

    Args:
        path: The prefix of the keys, such as "baseline/kmeans/novel".
        truth: True classes (N,), any integers.
        num_novel: The number of clusters.
        clusters: Clusters (N,) from 0 to ``num_novel`` - 1.

    Returns:
        Every metric of :data:`uno.results.metrics.METRICS`; empty if N is 0.
    """
    return {
        f"{path}/{metric}": value
        for metric, value in score_clusters(truth, clusters, num_novel).items()
    }


def spectral_clusters(
    features: Tensor, labels: Tensor, num_novel: int, gcd: bool, seed: int
) -> Tensor:
    """Cluster rows by spectral clustering of the graph of their nearest neighbors.

    The features of all rows are scaled to length one, centered, projected to their
    leading principal directions (at most 256) and scaled to length one again. The graph
    links each row that is clustered to its 10 nearest neighbors by cosine among these
    rows. k-means clusters the spectral coordinates of the graph, and of 10 starts the
    best counts.

    Args:
        features: Features (N, D) of labeled and unlabeled rows, D numbers each.
        labels: Known classes of the labeled rows, and FREE (-1) for unlabeled ones,
            int64 (N,).
        num_novel: Number of novel clusters.
        gcd: Whether unlabeled rows can belong to known classes. Labeled rows are then
            fixed to their classes; otherwise only unlabeled rows are clustered.
        seed: Seed of k-means.

    Returns:
        Clusters of the unlabeled rows, int64 (N_u,). With C_l for the largest label
        plus 1, C_l + j is the novel cluster j. The numbers from 0 to C_l - 1 are the
        known classes, which only occur if ``gcd``.
    """
    points = F.normalize(fit_principal_space(features)(features), dim=1)
    clustering = Clustering.of(points, labels, num_novel, gcd)
    clusters = clustering.partition(SPECTRAL, num_novel, NUM_STARTS, seed)
    return clusters[labels == FREE]


def score_clusters(
    truth: ArrayLike, clusters: ArrayLike, num_clusters: int
) -> dict[str, float]:
    """Return every metric of a clustering against the true classes.

    Args:
        truth: True classes (N,), any integers.
        clusters: Clusters (N,) from 0 to ``num_clusters`` - 1.
        num_clusters: The number of clusters.

    Returns:
        The metrics by their names in :data:`uno.results.metrics.METRICS`; empty if
        there are no rows.
    """
    classes, class_index = np.unique(np.asarray(truth), return_inverse=True)
    counts = metrics.confusion(
        class_index, np.asarray(clusters), len(classes), num_clusters
    )
    return metrics.cluster_metrics(counts)


def direction_clusters(features: ArrayLike, num_clusters: int, seed: int) -> Tensor:
    """Cluster rows by k-means of the directions of their features.

    Every row is scaled to length one, because UNO's heads compare directions. Rows are
    not centered. The starts are those of k-means++, and the best of 10 counts.

    Args:
        features: Features (N, D), on the CPU.
        num_clusters: The number of clusters K, at most N.
        seed: Seed of the starts.

    Returns:
        Clusters from 0 to K - 1, int64 (N,).
    """
    directions = F.normalize(
        torch.from_numpy(np.asarray(features, dtype=np.float64)), dim=1
    )
    return kmeans(directions, num_clusters, NUM_STARTS, seed).assignment


def generalized_baselines(
    config: Config,
    unlabeled_rows: FeatureRows,
    labeled_rows: FeatureRows,
    train: TrainData,
) -> Iterator[Baseline]:
    """Yield clusterings of the unlabeled rows of a GCD run into all classes.

    In GCD, generalized category discovery, unlabeled rows can belong to known or novel
    classes. The rows are clustered by their features. Nothing is computed here: a
    :class:`Baseline` has a job that computes the clusters on one rank, and a function
    that turns the clusters into metrics. Their keys are
    ``baseline/{kmeans|constrained_kmeans|spectral}/gcd/{all|old|new}``, where old are
    known and new are novel classes. A group without rows has no key.

    "kmeans" clusters the unlabeled rows alone and uses no label; labeled rows only
    count in the mean by which rows are centered. In the other two the labeled rows are
    clustered, too, and are fixed to their classes. Spectral clustering is left out if
    there are more than ``MAX_GRAPH_ROWS`` (20,000) labeled and unlabeled rows. Nothing
    is yielded if there are fewer unlabeled rows than known and novel classes, or no
    labeled rows.

    Args:
        config: The configuration of the run, which has the seed.
        unlabeled_rows: Features and true classes of the readable unlabeled rows.
        labeled_rows: Features and classes of the readable labeled rows.
        train: The training set, which has the numbers of known and novel classes.
    """
    unlabeled, truth = unlabeled_rows
    labeled, labels = labeled_rows
    num_outputs = train.num_known + train.num_novel
    if len(truth) < num_outputs or not len(labels):
        return

    def find(setting: str, num_novel: int) -> Tensor:
        """Cluster the unlabeled rows by k-means.

        Args:
            setting: "gcd" to fix the labeled rows to the known classes, "ncd" to use
                them only for the mean by which the unlabeled rows are centered.
            num_novel: The number of novel clusters. In the setting "ncd" there are no
                others.

        Returns:
            Clusters of the unlabeled rows, int64 (N_u,), numbered from 0. In the
            setting "gcd" the known classes come first.
        """
        return cluster_features(
            unlabeled, labeled, labels, num_novel, setting, config.seed
        ).assignment

    def score_mixed(path: str, clusters: Tensor) -> dict[str, float]:
        """Return the GCD accuracies of clusters as fractions.

        All classes are matched one to one with all clusters.

        Args:
            path: The prefix of the keys, such as "baseline/kmeans/gcd".
            clusters: Clusters of the unlabeled rows, (N_u,).

        Returns:
            The accuracies of all, old (known) and new (novel) rows by key. A group
            without rows has no key.
        """
        num_true = max(num_outputs, int(truth.max()) + 1)
        counts = metrics.confusion(
            truth.numpy(), clusters.numpy(), num_true, num_outputs
        )
        found = metrics.generalized(counts, train.num_known)
        return {f"{path}/{group}": value for group, value in found.items()}

    jobs: dict[str, Callable[[], Tensor]] = {
        "kmeans": partial(find, "ncd", num_outputs),
        "constrained_kmeans": partial(find, "gcd", train.num_novel),
    }
    both = torch.cat([unlabeled, labeled])
    if len(both) <= MAX_GRAPH_ROWS:
        known = torch.cat([torch.full((len(truth),), FREE), labels])
        jobs["spectral"] = partial(
            spectral_clusters, both, known, train.num_novel, True, config.seed
        )
    for name, job in jobs.items():
        yield Baseline(
            RankTask(len(truth), job), partial(score_mixed, f"baseline/{name}/gcd")
        )


def read_features(config: Config, model: UnoModel, rows: EvalData) -> FeatureRows:
    """Compute the features of rows on all workers; each worker reads a share.

    All workers must call this. At most ``MAX_BASELINE_ROWS`` (50,000) rows are used,
    evenly spaced. Of images that are decoded while they are evaluated (streamed), at
    most 20,000 are used, and images that are stored together are chosen together. Rows
    that cannot be read are left out.

    Args:
        config: The configuration of the run, which has the batch size.
        model: The network, in eval mode.
        rows: The rows with their true classes.

    Returns:
        Features, as the encoder computes them, and true classes of the readable rows,
        on the CPU; the same on every worker.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later.
        ConfigError: A file that holds many images, such as a tar shard, cannot be read.
    """
    (chosen,) = rows.choose_rows(MAX_BASELINE_ROWS)
    batches, load = rows.plan_reading([chosen], config.train.eval_batch_size)
    features, ok = compute_features_together(config, model, batches, load)
    truth = rows.truth[torch.from_numpy(chosen)].cpu()[ok]
    return FeatureRows(features.cpu()[ok], truth)
