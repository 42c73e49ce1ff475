"""What k-means makes of the pretrained encoder's features: all that the representation gives away without
discovery.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from uno.clustering import VARIANCE, kmeans, whiten
from uno.config import Config
from uno.data.files import Storage
from uno.data.stream import EvalData, TrainData
from uno.model import UnoModel, build_model, features_of
from uno.prototype_init import clusters_of, labeled_features
from uno.results import metrics
from uno.runs.run import load_weights_

MAX_PIXEL_SIDE = 16  # k-means on raw pixels is only meaningful, and cheap, for tiny images
NUM_STARTS = 10


class Rows(NamedTuple):
    """Rows of an evaluation set that can be read, on the CPU."""

    features: Tensor  # (N, D)
    truth: Tensor  # (N,)
    pixels: Tensor | None  # (N, 3 S S) where the images are tiny


def baselines(
    config: Config, storage: Storage, train: TrainData, rows: EvalData, device: torch.device
) -> dict[str, float]:
    """The baselines of the training ``rows``: :func:`novel_baselines` of those of novel classes, and of a
    mixed pile :func:`generalized_baselines`; {} where fewer rows than clusters have truth.
    """
    mixed, novel = config.data.setting == "gcd", rows.where(rows.truth >= train.num_known)
    enough = len(novel.truth) >= train.num_novel
    mixed = mixed and int(rows.unlabeled.sum()) >= train.num_known + train.num_novel
    if not enough and not mixed:
        return {}
    model = build_model(config.model, train.num_known, 0, 0)  # what discovery started from
    load_weights_(model, config, storage)
    model = model.to(device).eval()
    values = novel_baselines(config, model, train, novel) if enough else {}
    if mixed:
        values |= generalized_baselines(config, model, train, rows)
    return values


def novel_baselines(config: Config, model: UnoModel, train: TrainData, novel: EvalData) -> dict[str, float]:
    """k-means on the features of the ``novel`` rows, on these whitened, and for tiny images on their pixels:
    ``baseline/{kmeans|kmeans_whitened|kmeans_pixels}/novel/{metric}``.

    Whitened is what ``uno estimate-classes`` clusters: unit features of labeled and novel rows along the
    principal directions that explain 95 % of their variance. What known classes were taught to be alike in is
    then no longer most of every distance.
    """
    rows = read(config, model, novel)
    if len(rows.truth) < train.num_novel:  # of streamed rows some may be unreadable
        return {}
    both = F.normalize(torch.cat([labeled_features(config, model, train)[0], rows.features]), dim=1)
    points = {
        "kmeans": rows.features,
        "kmeans_pixels": rows.pixels,
        "kmeans_whitened": whiten(both, variance=VARIANCE)[-len(rows.truth) :],
    }
    values: dict[str, float] = {}
    for name, features in points.items():
        if features is not None:
            found = kmeans_baseline(features, rows.truth, train.num_novel, config.seed)
            values |= {f"baseline/{name}/novel/{metric}": value for metric, value in found.items()}
    return values


def kmeans_baseline(features: ArrayLike, truth: ArrayLike, num_clusters: int, seed: int) -> dict[str, float]:
    """Cluster features (N, D) with k-means (k-means++, best of 10 starts) and score them as a head is scored:
    every metric against ``truth`` (N,), any class ids; N >= ``num_clusters``.

    Every row is scaled to length one, as UNO's heads compare directions (on the pixels of digits 5-9 accuracy
    is .887-.890, without it .890-.894); no centring, no PCA.
    """
    directions = F.normalize(torch.from_numpy(np.asarray(features, dtype=np.float64)), dim=1)
    clusters = kmeans(directions, num_clusters, NUM_STARTS, seed).assignment.numpy()
    classes, class_index = np.unique(np.asarray(truth), return_inverse=True)
    return metrics.cluster_metrics(metrics.confusion(class_index, clusters, len(classes), num_clusters))


def generalized_baselines(
    config: Config, model: UnoModel, train: TrainData, rows: EvalData
) -> dict[str, float]:
    """`baseline/{kmeans|constrained_kmeans}/gcd/{all|old|new}`: C clusters of the GCD setting, without and
    with the labeled rows fixed to their classes, scored as its heads are; {} where fewer unlabeled rows than
    there are outputs can be read.
    """
    unlabeled, truth, _ = read(config, model, rows.where(rows.unlabeled))
    labeled, labels, _ = read(config, model, rows.where(~rows.unlabeled))
    num_outputs = train.num_known + train.num_novel
    if len(truth) < num_outputs or not len(labels):
        return {}
    kinds = {"kmeans": ("ncd", num_outputs), "constrained_kmeans": ("gcd", train.num_novel)}
    values: dict[str, float] = {}
    for name, (setting, num_novel) in kinds.items():
        clusters = clusters_of(unlabeled, labeled, labels, num_novel, setting, config.seed).assignment
        num_true = max(num_outputs, int(truth.max()) + 1)
        counts = metrics.confusion(truth.numpy(), clusters.numpy(), num_true, num_outputs)
        found = metrics.generalized(counts, train.num_known)
        values |= {f"baseline/{name}/gcd/{group}": value for group, value in found.items()}
    return values


def read(config: Config, model: UnoModel, rows: EvalData) -> Rows:
    """What of ``rows`` can be read."""
    features, truth, pixels = [torch.empty(0, 0)], [torch.empty(0, dtype=torch.int64)], list[Tensor]()
    for images, classes in rows.batches(config.train.eval_batch_size):
        features.append(features_of(model, images, config).cpu())
        truth.append(classes.cpu())
        if images.ndim == 4 and images.shape[-1] <= MAX_PIXEL_SIDE:
            pixels.append(images.flatten(1).float().cpu())
    together = torch.cat(features[1:] or features), torch.cat(truth)
    return Rows(*together, torch.cat(pixels) if pixels else None)
