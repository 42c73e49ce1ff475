"""The k-means baseline: what the representation gives away without discovery (METHOD.md, Sec. 6)."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from uno.config import Config
from uno.data.files import Storage
from uno.data.stream import EvalData, TrainData
from uno.model import build_model
from uno.results.forward import features_of
from uno.results.metrics import cluster_metrics, confusion
from uno.runs.run import load_weights_

MAX_PIXEL_SIDE = 16  # k-means on raw pixels is only meaningful, and cheap, for tiny images


def kmeans_baselines(
    config: Config, storage: Storage, train: TrainData, novel: EvalData, device: torch.device
) -> dict[str, float]:
    """k-means on the pretrained features of the ``novel`` training rows and, for tiny images, on their
    pixels: ``baseline/{kmeans|kmeans_pixels}/novel/{acc|nmi|ari|purity}``; {} with fewer rows than clusters.
    """
    if len(novel.truth) < train.num_novel:
        return {}
    model = build_model(config.model, train.num_known, 0, 0)
    load_weights_(model, config, storage)
    model = model.to(device).eval()
    parts: dict[str, list[Tensor]] = {"kmeans": [], "kmeans_pixels": [], "truth": []}
    for images, truth in novel.batches(config.train.eval_batch_size):
        parts["kmeans"].append(features_of(model, images, config).cpu())
        parts["truth"].append(truth)
        if images.shape[-1] <= MAX_PIXEL_SIDE:
            parts["kmeans_pixels"].append(images.flatten(1).float().cpu())
    points = {name: torch.cat(tensors).numpy() for name, tensors in parts.items() if tensors}
    classes = points.pop("truth", np.empty(0))
    if len(classes) < train.num_novel:  # of streamed rows some may be unreadable
        return {}
    return {
        f"baseline/{name}/novel/{metric}": value
        for name, data in points.items()
        for metric, value in kmeans_baseline(data, classes, train.num_novel, config.seed).items()
    }


def kmeans_baseline(features: ArrayLike, truth: ArrayLike, num_clusters: int, seed: int) -> dict[str, float]:
    """Cluster l2-normalised features with k-means (k-means++, best of 10 starts), scored as a head is scored.

    Normalisation: every row to length one, as UNO's heads compare directions; no centring, no PCA. Rows of
    zeros stay. For frozen encoder features and for flattened pixels alike. On the pixels of scikit-learn's
    digits 5-9 (716 rows of a stratified 80 % split, 5 seeds) accuracy is .887-.890; without the normalisation
    it would be .890-.894.

    Args:
        features: (N, D) floats of the novel rows, host memory.
        truth: (N,) integers, any values as class ids.
        num_clusters: K, at most N.
        seed: of the starts.

    Returns:
        `acc`, `nmi`, `ari`, `purity` as in `cluster_metrics`.
    """
    points = np.asarray(features, dtype=np.float64)
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    directions = points / np.where(norms > 0, norms, 1)
    from sklearn.cluster import KMeans  # 2 s of CPU time, which every worker would pay

    clusters = KMeans(num_clusters, n_init=10, random_state=seed).fit_predict(directions)
    classes, class_index = np.unique(np.asarray(truth), return_inverse=True)
    return cluster_metrics(confusion(class_index, clusters, len(classes), num_clusters))
