"""Maps of the data: PCA, then t-SNE, of features and logits (paper Fig. 4 and the appendix's figure)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from uno.report.predictions import Predictions

MAX_POINTS = 1_500  # three maps take 14 s on one core; 2,000 points take 20 s
PCA_DIMENSIONS = 50
MIN_POINTS = 10
EXTENT = 1000
"""Coordinates are integers in [0, EXTENT]."""


@dataclass(frozen=True, eq=False)
class Map:
    """One drawing: ``xy`` int (P,2) for the rows ``Maps.points``; ``method`` is how it was made."""

    title: str
    caption: str
    method: str
    xy: NDArray[np.int64]


def choose_points(num_rows: int, seed: int, limit: int = MAX_POINTS) -> NDArray[np.int64]:
    """At most ``limit`` of ``num_rows`` positions, ascending, uniformly drawn."""
    chosen = np.random.default_rng([seed, 6]).permutation(num_rows)[:limit]
    return np.sort(chosen)


def draw_maps(predictions: Predictions, points: NDArray[np.int64], seed: int) -> list[Map]:
    """Maps of ``points`` (P,) of the predicted rows; none where there are too few rows."""
    if len(points) < MIN_POINTS:
        return []
    num_heads = predictions.num_heads
    novel = predictions.novel[points].reshape(len(points), -1)
    spaces = [
        (
            "Shared feature space",
            f"Encoder output, {predictions.features.shape[1]} dimensions.",
            predictions.features[points],
        ),
        (
            "Cluster-head logits",
            f"Known logits and those of all {num_heads} cluster heads, side by side.",
            np.concatenate([predictions.known[points], novel], axis=1),
        ),
    ]
    if predictions.over.size:
        over = predictions.over[points].reshape(len(points), -1)
        caption = f"All {num_heads} overclustering heads, {predictions.over.shape[2]} clusters each."
        spaces.append(("Overclustering-head logits", caption, over))
    with threadpool_limits(1):  # more threads spin: 4-10 times slower where the cores are shared
        drawn = [project(data, seed) for _, _, data in spaces]
    return [Map(title, caption, *how) for (title, caption, _), how in zip(spaces, drawn, strict=True)]


def project(data: NDArray[np.float32], seed: int) -> tuple[str, NDArray[np.int64]]:
    """(P,D) -> how, and (P,2) integers in [0, EXTENT]."""
    data = np.nan_to_num(data.astype(np.float64))
    spread = data.std()
    if spread < 1e-12 or min(data.shape) < 2:
        return "all points coincide", np.full((len(data), 2), EXTENT // 2)
    dimensions = min(PCA_DIMENSIONS, *data.shape)
    reduced = PCA(dimensions, svd_solver="full", random_state=seed).fit_transform(data / spread)
    perplexity = min(30.0, (len(data) - 1) / 3)
    xy = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(reduced.astype(np.float32))
    low, high = xy.min(axis=0), xy.max(axis=0)
    scale = (EXTENT - 40) / max(1e-9, float((high - low).max()))
    middle = (low + high) / 2
    placed = np.rint((xy - middle) * scale + EXTENT / 2).astype(np.int64)
    return f"PCA to {dimensions} dimensions, then t-SNE (perplexity {perplexity:.0f})", placed
