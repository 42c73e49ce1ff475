"""What clusterings make of the pretrained encoder's features: all that the representation gives away without
discovery.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from uno import collectives
from uno.choice import SMOOTHED, SPECTRAL, partition_of, principal_space
from uno.clustering import FREE, VARIANCE, kmeans, whiten
from uno.config import Config
from uno.data.files import Storage
from uno.data.images import batches_of, evenly_spaced, spread
from uno.data.stream import EvalData, StreamedEvalSet, TrainData, decoded_rows
from uno.model import UnoModel, build_model, features_of
from uno.prototype_init import MAX_ROWS, Sample, clusters_of, features_by_all, streamed
from uno.results import metrics
from uno.runs.run import load_weights_

MAX_BASELINE_ROWS = 50_000  # of a kind, that k-means clusters; of streamed rows MAX_ROWS
MAX_GRAPH_ROWS = 20_000  # which take 20-30 s on two cores; of more no graph is a baseline
MAX_PIXEL_SIDE = 16  # k-means on raw pixels is only meaningful, and cheap, for tiny images
NUM_STARTS = 10


class Rows(NamedTuple):
    """Rows of an evaluation set that can be read, on the CPU."""

    features: Tensor  # (N, D)
    truth: Tensor  # (N,)
    pixels: Tensor | None = None  # (N, 3 S S) where the images are tiny


class Looked(NamedTuple):
    """What the baselines cluster of the training rows; None: too few have truth."""

    novel: Rows | None
    setting: tuple[Rows, Rows] | None  # of a mixed one the unlabeled and the labeled rows


def start_model(
    config: Config, storage: Storage, train: TrainData, rows: EvalData, device: torch.device
) -> UnoModel | None:
    """The network that discovery started from, in eval mode; None: too few ``rows`` have truth."""
    if not any(_enough(config, train, rows)):
        return None
    model = build_model(config.model, train.num_known, 0, 0)
    load_weights_(model, config, storage)
    return model.to(device).eval()


def look(config: Config, model: UnoModel, train: TrainData, rows: EvalData) -> Looked:
    """The training ``rows`` through ``model``. All workers ask: of streamed rows each reads a share."""
    enough, mixed = _enough(config, train, rows)
    novel = read(config, model, rows.where(rows.truth >= train.num_known)) if enough else None
    if not mixed:
        return Looked(novel, None)
    kinds = rows.unlabeled, ~rows.unlabeled
    return Looked(
        novel, (read(config, model, rows.where(kinds[0])), read(config, model, rows.where(kinds[1])))
    )


def _enough(config: Config, train: TrainData, rows: EvalData) -> tuple[bool, bool]:
    """Whether as many novel rows as clusters have truth; of the GCD setting also the unlabeled ones."""
    mixed = config.data.setting == "gcd" and int(rows.unlabeled.sum()) >= train.num_known + train.num_novel
    return int((rows.truth >= train.num_known).sum()) >= train.num_novel, mixed


def baselines(config: Config, rows: Looked, sample: Sample, train: TrainData) -> dict[str, float]:
    """:func:`novel_baselines` of the training rows of novel classes, and of the GCD setting
    :func:`generalized_baselines`; ``sample``: of the same network.
    """
    values: dict[str, float] = {}
    if rows.novel is not None and len(rows.novel.truth) >= train.num_novel:  # some may be unreadable
        values |= novel_baselines(config, rows.novel, sample.labeled, train.num_novel)
    if rows.setting is not None:
        values |= generalized_baselines(config, *rows.setting, train)
    return values


def novel_baselines(config: Config, rows: Rows, labeled: Tensor, num_novel: int) -> dict[str, float]:
    """k-means on the features of novel ``rows``, on these whitened, and for tiny images on their pixels, and
    :func:`graph_clusters`:
    ``baseline/{kmeans|kmeans_whitened|kmeans_pixels|kmeans_smoothed|spectral}/novel/{metric}``.

    Whitened is what ``uno estimate-classes`` clusters: unit features of labeled and novel rows along the
    principal directions that explain 95% of their variance. What known classes were taught to be alike in is
    then no longer most of every distance.
    """
    both = F.normalize(torch.cat([labeled, rows.features]), dim=1)
    points = {
        "kmeans": rows.features,
        "kmeans_pixels": rows.pixels,
        "kmeans_whitened": whiten(both, variance=VARIANCE)[-len(rows.truth) :],
    }
    values: dict[str, float] = {}
    for name, features in points.items():
        if features is not None:
            found = kmeans_baseline(features, rows.truth, num_novel, config.seed)
            values |= {f"baseline/{name}/novel/{metric}": value for metric, value in found.items()}
    free = torch.full((len(rows.truth),), FREE)
    for name, clusters in graph_clusters(rows.features, free, num_novel, False, config.seed).items():
        found = score(rows.truth, clusters, num_novel)
        values |= {f"baseline/{name}/novel/{metric}": value for metric, value in found.items()}
    return values


def graph_clusters(features: Tensor, labels: Tensor, num: int, gcd: bool, seed: int) -> dict[str, Tensor]:
    """Clusters (N_u,) of the unlabeled rows of features (N, D) from their nearest neighbors: k-means of the
    means of rows and neighbors, and spectral clustering, as :func:`uno.choice.partition_of` makes them; {}
    for more than ``MAX_GRAPH_ROWS``.
    """
    if len(features) > MAX_GRAPH_ROWS:
        return {}
    rows = F.normalize(principal_space(features)(features), dim=1)
    kinds = {"kmeans_smoothed": SMOOTHED, "spectral": SPECTRAL}
    return {
        name: partition_of(rows, labels, num, gcd, kind, NUM_STARTS, seed) for name, kind in kinds.items()
    }


def score(truth: ArrayLike, clusters: ArrayLike, num_clusters: int) -> dict[str, float]:
    """Every metric of clusters (N,) against ``truth`` (N,), any class ids."""
    classes, class_index = np.unique(np.asarray(truth), return_inverse=True)
    counts = metrics.confusion(class_index, np.asarray(clusters), len(classes), num_clusters)
    return metrics.cluster_metrics(counts)


def kmeans_baseline(features: ArrayLike, truth: ArrayLike, num_clusters: int, seed: int) -> dict[str, float]:
    """Cluster features (N, D) with k-means (k-means++, best of 10 starts) and score them as a head is scored:
    every metric against ``truth`` (N,), any class ids; N >= ``num_clusters``.

    Every row is scaled to length one, as UNO's heads compare directions (on the pixels of digits 5-9 accuracy
    is .887-.890, without it .890-.894); no centering, no PCA.
    """
    directions = F.normalize(torch.from_numpy(np.asarray(features, dtype=np.float64)), dim=1)
    return score(truth, kmeans(directions, num_clusters, NUM_STARTS, seed).assignment, num_clusters)


def generalized_baselines(
    config: Config, unlabeled_rows: Rows, labeled_rows: Rows, train: TrainData
) -> dict[str, float]:
    """`baseline/{kmeans|constrained_kmeans|kmeans_smoothed|spectral}/gcd/{all|old|new}`: C clusters of the
    GCD setting, without and with the labeled rows fixed to their classes (so in :func:`graph_clusters`),
    scored as its heads are; {} where fewer unlabeled rows than there are outputs can be read.
    """
    unlabeled, truth, _ = unlabeled_rows
    labeled, labels, _ = labeled_rows
    num_outputs = train.num_known + train.num_novel
    if len(truth) < num_outputs or not len(labels):
        return {}
    kinds = {"kmeans": ("ncd", num_outputs), "constrained_kmeans": ("gcd", train.num_novel)}
    outputs = {
        name: clusters_of(unlabeled, labeled, labels, num_novel, setting, config.seed).assignment
        for name, (setting, num_novel) in kinds.items()
    }
    both, known = torch.cat([unlabeled, labeled]), torch.cat([torch.full((len(truth),), FREE), labels])
    outputs |= graph_clusters(both, known, num_outputs, True, config.seed)
    values: dict[str, float] = {}
    for name, clusters in outputs.items():
        num_true = max(num_outputs, int(truth.max()) + 1)
        counts = metrics.confusion(truth.numpy(), clusters.numpy(), num_true, num_outputs)
        found = metrics.generalized(counts, train.num_known)
        values |= {f"baseline/{name}/gcd/{group}": value for group, value in found.items()}
    return values


def read(config: Config, model: UnoModel, rows: EvalData) -> Rows:
    """What of ``rows`` can be read, for rank 0: at most ``MAX_BASELINE_ROWS``, evenly spaced; of streamed
    ones ``MAX_ROWS``, by all workers.
    """
    if isinstance(rows, StreamedEvalSet):
        (chosen,), size = spread(rows.images, [rows.index.numpy()], MAX_ROWS), config.train.eval_batch_size
        numbers, classes = rows.index.numpy()[chosen], rows.truth[torch.from_numpy(chosen)]
        batches = batches_of(rows.images, numbers, decoded_rows(size, rows.side))
        load = partial(streamed, rows.decode, numbers)
        (features,), ok = features_by_all(config, [model], batches, load)
        tiny = rows.side <= MAX_PIXEL_SIDE and collectives.rank_and_world()[0] == 0
        seen = [images[torch.from_numpy(good)].flatten(1) for images, good in load(batches)] if tiny else []
        return Rows(features[ok].cpu(), classes[ok], torch.cat(seen).float() if seen else None)
    if collectives.rank_and_world()[0] > 0:  # who has no use for them
        return Rows(torch.empty(0, 0), torch.empty(0, dtype=torch.int64))
    rows = rows.where(torch.from_numpy(evenly_spaced(MAX_BASELINE_ROWS, len(rows.truth))))
    parts, truth, pixels = [torch.empty(0, 0)], [torch.empty(0, dtype=torch.int64)], list[Tensor]()
    for images, classes in rows.batches(config.train.eval_batch_size):
        parts.append(features_of(model, images, config).cpu())
        truth.append(classes.cpu())
        if images.ndim == 4 and images.shape[-1] <= MAX_PIXEL_SIDE:
            pixels.append(images.flatten(1).float().cpu())
    together = torch.cat(parts[1:] or parts), torch.cat(truth)
    return Rows(*together, torch.cat(pixels) if pixels else None)
