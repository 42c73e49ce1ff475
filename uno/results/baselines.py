"""What clusterings make of the pretrained encoder's features: all that the
representation gives away without discovery.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from uno.clustering import FREE, VARIANCE, kmeans, whiten
from uno.collectives import Job
from uno.config import Config
from uno.data.files import Storage
from uno.data.images import batches_of, evenly_spaced, spread
from uno.data.row_blocks import RowBlocks, part
from uno.data.stream import EvalData, StreamedEvalSet, TrainData, decoded_rows
from uno.frozen import SMOOTHED, SPECTRAL, Clustering, principal_space
from uno.model import UnoModel, build_model
from uno.prototype_init import (
    MAX_ROWS,
    Load,
    Sample,
    clusters_of,
    features_by_all,
    resident_batch_rows,
    streamed,
)
from uno.results import metrics
from uno.runs.run import load_weights_

# of a kind, that k-means clusters; of streamed rows MAX_ROWS
MAX_BASELINE_ROWS = 50_000
# which take 20-30 s on two cores; of more no graph is a baseline
MAX_GRAPH_ROWS = 20_000
# k-means on raw pixels is only meaningful, and cheap, for tiny images
MAX_PIXEL_SIDE = 16
NUM_STARTS = 10


class Rows(NamedTuple):
    """Rows of an evaluation set that can be read, on the CPU."""

    features: Tensor  # (N, D)
    truth: Tensor  # (N,)
    # reads (N, 3 S S) where the images are tiny
    pixels: Callable[[], Tensor] | None = None


class Baseline(NamedTuple):
    """A clustering that a rank makes, and the metrics that all ranks compute of it."""

    job: Job
    score: Callable[[Tensor], dict[str, float]]


def start_model(
    config: Config,
    storage: Storage,
    train: TrainData,
    rows: EvalData,
    device: torch.device,
) -> UnoModel | None:
    """The network that discovery started from, in eval mode; None: too few ``rows``
    have truth.
    """
    if not any(_enough(config, train, rows)):
        return None
    model = build_model(config.model, train.num_known, 0, 0)
    load_weights_(model, config, storage)
    return model.to(device).eval()


def _enough(config: Config, train: TrainData, rows: EvalData) -> tuple[bool, bool]:
    """Whether as many novel rows as clusters have truth; of the GCD setting also the
    unlabeled ones.
    """
    mixed = (
        config.data.setting == "gcd"
        and int(rows.unlabeled.sum()) >= train.num_known + train.num_novel
    )
    return int((rows.truth >= train.num_known).sum()) >= train.num_novel, mixed


def baselines(
    config: Config, model: UnoModel, sample: Sample, train: TrainData, rows: EvalData
) -> list[Baseline]:
    """:func:`novel_baselines` of the training ``rows`` of novel classes, and of the GCD
    setting
    :func:`generalized_baselines`, by ``model``, whose ``sample`` it is. All workers
      ask, each reads a share.
    """
    found, (enough, mixed) = list[Baseline](), _enough(config, train, rows)
    if enough:
        novel = read(config, model, rows.where(rows.truth >= train.num_known))
        if len(novel.truth) >= train.num_novel:  # some may be unreadable
            found += novel_baselines(config, novel, sample.labeled, train.num_novel)
    if mixed:
        unlabeled, labeled = (
            read(config, model, rows.where(kind))
            for kind in (rows.unlabeled, ~rows.unlabeled)
        )
        found += generalized_baselines(config, unlabeled, labeled, train)
    return found


def novel_baselines(
    config: Config, rows: Rows, labeled: Tensor, num_novel: int
) -> Iterator[Baseline]:
    """k-means on the features of novel ``rows``, on these whitened, and for tiny images
    on their pixels, and
    :func:`graph_clusters`:
    ``baseline/{kmeans|kmeans_whitened|kmeans_pixels|kmeans_smoothed|spectral}/novel/{metric}``.

    Whitened is what ``uno estimate-classes`` clusters: unit features of labeled and
    novel rows along the principal directions that explain 95% of their variance. What
    known classes were taught to be alike in is then no longer most of every distance.
    """
    num = len(rows.truth)

    def whitened() -> Tensor:
        both = F.normalize(torch.cat([labeled, rows.features]), dim=1)
        return whiten(both, variance=VARIANCE)[-num:]

    points = {
        "kmeans": lambda: rows.features,
        "kmeans_pixels": rows.pixels,
        "kmeans_whitened": whitened,
    }
    jobs: dict[str, Callable[[], Tensor]] = {
        name: partial(direction_clusters, find, num_novel, config.seed)
        for name, find in points.items()
        if find is not None
    }
    jobs |= graph_clusters(
        rows.features, torch.full((num,), FREE), num_novel, False, config.seed
    )
    for name, job in jobs.items():
        yield Baseline(
            Job(num, job),
            partial(_score_novel, f"baseline/{name}/novel", rows.truth, num_novel),
        )


def _score_novel(
    path: str, truth: Tensor, num_novel: int, clusters: Tensor
) -> dict[str, float]:
    return {
        f"{path}/{metric}": value
        for metric, value in score(truth, clusters, num_novel).items()
    }


def graph_clusters(
    features: Tensor, labels: Tensor, num_novel: int, gcd: bool, seed: int
) -> dict[str, Callable[[], Tensor]]:
    """Return clusterings that use the nearest neighbors of the rows.

    Args:
        features: Features (N, D).
        labels: Their known classes (N,), or FREE.
        num_novel: Number of novel clusters.
        gcd: Whether unlabeled rows can belong to known classes.
        seed: Seed of k-means.

    Returns:
        ``kmeans_smoothed``: k-means of the means of rows and their neighbors, and
        ``spectral``: spectral clustering. Each computes clusters (N_u,) of the
        unlabeled rows when it is called. Empty for more than ``MAX_GRAPH_ROWS`` rows.
    """
    if len(features) > MAX_GRAPH_ROWS:
        return {}

    @cache  # one rank may compute both
    def clustering() -> Clustering:
        points = F.normalize(principal_space(features)(features), dim=1)
        return Clustering.of(points, labels, num_novel, gcd)

    def find(kind: str) -> Tensor:
        clusters = clustering().partition(kind, num_novel, NUM_STARTS, seed)
        return clusters[labels == FREE]

    return {
        "kmeans_smoothed": partial(find, SMOOTHED),
        "spectral": partial(find, SPECTRAL),
    }


def score(truth: ArrayLike, clusters: ArrayLike, num_clusters: int) -> dict[str, float]:
    """Every metric of clusters (N,) against ``truth`` (N,), any class ids."""
    classes, class_index = np.unique(np.asarray(truth), return_inverse=True)
    counts = metrics.confusion(
        class_index, np.asarray(clusters), len(classes), num_clusters
    )
    return metrics.cluster_metrics(counts)


def direction_clusters(
    find: Callable[[], ArrayLike], num_clusters: int, seed: int
) -> Tensor:
    """Clusters (N,) of the rows (N, D) that ``find`` returns, by k-means (k-means++,
    best of 10 starts).

    Every row is scaled to length one, as UNO's heads compare directions (on the pixels
    of digits 5-9 accuracy is .887-.890, without it .890-.894); no centering, no PCA.
    """
    directions = F.normalize(
        torch.from_numpy(np.asarray(find(), dtype=np.float64)), dim=1
    )
    return kmeans(directions, num_clusters, NUM_STARTS, seed).assignment


def generalized_baselines(
    config: Config, unlabeled_rows: Rows, labeled_rows: Rows, train: TrainData
) -> Iterator[Baseline]:
    """`baseline/{kmeans|constrained_kmeans|kmeans_smoothed|spectral}/gcd/{all|old|new}`:
    C clusters of the GCD setting, without and with the labeled rows fixed to their
    classes (so in :func:`graph_clusters`), scored as its heads are; none where fewer
    unlabeled rows than there are outputs can be read.
    """
    unlabeled, truth, _ = unlabeled_rows
    labeled, labels, _ = labeled_rows
    num_outputs = train.num_known + train.num_novel
    if len(truth) < num_outputs or not len(labels):
        return

    def find(setting: str, num_novel: int) -> Tensor:
        return clusters_of(
            unlabeled, labeled, labels, num_novel, setting, config.seed
        ).assignment

    def score_mixed(path: str, clusters: Tensor) -> dict[str, float]:
        num_true = max(num_outputs, int(truth.max()) + 1)
        counts = metrics.confusion(
            truth.numpy(), clusters.numpy(), num_true, num_outputs
        )
        found = metrics.generalized(counts, train.num_known)
        return {f"{path}/{group}": value for group, value in found.items()}

    both, known = (
        torch.cat([unlabeled, labeled]),
        torch.cat([torch.full((len(truth),), FREE), labels]),
    )
    jobs: dict[str, Callable[[], Tensor]] = {
        "kmeans": partial(find, "ncd", num_outputs),
        "constrained_kmeans": partial(find, "gcd", train.num_novel),
        **graph_clusters(both, known, train.num_novel, True, config.seed),
    }
    for name, job in jobs.items():
        yield Baseline(
            Job(len(truth), job), partial(score_mixed, f"baseline/{name}/gcd")
        )


def read(config: Config, model: UnoModel, rows: EvalData) -> Rows:
    """What of ``rows`` can be read, on every worker, each of which reads a share: at
    most ``MAX_BASELINE_ROWS``, evenly spaced; of streamed ones ``MAX_ROWS``.
    """
    size = config.train.eval_batch_size
    if isinstance(rows, StreamedEvalSet):
        (chosen,) = spread(rows.images, [rows.index.numpy()], MAX_ROWS)
        numbers, tiny = rows.index.numpy()[chosen], rows.side <= MAX_PIXEL_SIDE
        batches = batches_of(rows.images, numbers, decoded_rows(size, rows.side))
        load: Load = partial(streamed, rows.decode, numbers)
    else:
        chosen = evenly_spaced(MAX_BASELINE_ROWS, len(rows.truth))
        images = part(rows.images, torch.from_numpy(chosen))
        tiny = images.ndim == 4 and images.shape[-1] <= MAX_PIXEL_SIDE
        size = resident_batch_rows(config, len(chosen))
        batches = np.split(np.arange(len(chosen)), range(size, len(chosen), size))
        load = partial(_resident, images)
    (features,), ok = features_by_all(config, [model], batches, load)
    truth = rows.truth[torch.from_numpy(chosen)].cpu()[ok]
    return Rows(
        features.cpu()[ok], truth, partial(_pixels, load, batches) if tiny else None
    )


def _resident(
    images: Tensor | RowBlocks, batches: Sequence[np.ndarray]
) -> Iterator[tuple[Tensor | RowBlocks, np.ndarray]]:
    for batch in batches:
        yield part(images, torch.from_numpy(batch)), np.ones(len(batch), dtype=bool)


def _pixels(load: Load, batches: Sequence[np.ndarray]) -> Tensor:
    found = [
        images[torch.from_numpy(good)].flatten(1) for images, good in load(batches)
    ]
    return torch.cat(found).float().cpu()
