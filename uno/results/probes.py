"""The tasks of :mod:`uno.results.estimate`: class splits, features of a split, scores of a split and a k."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno.augment import eval_view
from uno.config import Config, PhaseConfig, config_hash
from uno.data.files import Storage
from uno.data.resident import TrainSet
from uno.model import UnoModel
from uno.results.constrained_kmeans import FREE, constrained_kmeans, silhouette
from uno.results.metrics import Counts, cluster_accuracy, confusion
from uno.runs import run
from uno.train import LocalWorker

STREAM = 8  # of the class splits' and starts' randomness; uno.data.plan has 0-2, uno.data.resident 3


@dataclass(frozen=True)
class Settings:
    """The procedure's numbers; the defaults are those of the record ``estimate-classes-digits``."""

    num_splits: int = 3  # class splits, each pretrains an encoder
    max_novel: int | None = None  # largest k tried; default: the known classes, at least 10
    num_roles: int = 6  # choices of anchors within a split
    anchor_ratio: float = 0.6  # of the probe classes (DTC)
    num_restarts: int = 10  # of k-means (DTC)
    variance: float = 0.95  # that the whitened directions explain
    quantile: float = 0.2  # of the votes that may lie below, and above, the interval
    max_rows: int = 50_000  # unlabeled, and labeled, rows that are clustered
    silhouette_rows: int = 2_000


class Split(NamedTuple):
    """Known-class indices of one split, each sorted."""

    pretrain: tuple[int, ...]
    probe: tuple[int, ...]


# --------------------------------------------------------------------------------------------- class splits
def class_splits(classes: Sequence[int], num_splits: int, seed: int) -> list[Split]:
    """Splits of the known ``classes`` into pretraining and probe classes, all different, in random order.

    A quarter of the classes are probes (paper: 20 of 80), at least 4 where 3 are left to pretrain on, else
    what two pretraining classes leave. Their roles go round, so every class is probed about equally often.
    At most as many splits as classes.
    """
    order = np.random.default_rng([seed, STREAM]).permutation(np.array(classes)).tolist()
    total = len(order)
    num_probe = min(max(4, round(total / 4)), total - (2 if total < 7 else 3))
    num_splits = min(num_splits, total)
    splits = []
    for i in range(num_splits):
        start = i * total // num_splits
        turned = order[start:] + order[:start]
        splits.append(Split(tuple(sorted(turned[num_probe:])), tuple(sorted(turned[:num_probe]))))
    return splits


def anchor_choices(split: Split, settings: Settings, seed: int) -> list[tuple[int, ...]]:
    """Choices of anchors among the probe classes: all of them, or ``num_roles`` random different ones."""
    count = len(split.probe)
    anchors = min(max(1, round(settings.anchor_ratio * count)), count - 1)
    if math.comb(count, anchors) <= settings.num_roles:
        return list(itertools.combinations(split.probe, anchors))
    generator = np.random.default_rng([seed, STREAM, *split.probe])
    chosen: list[tuple[int, ...]] = []
    while len(chosen) < settings.num_roles:
        choice = tuple(sorted(generator.choice(split.probe, anchors, replace=False).tolist()))
        if choice not in chosen:
            chosen.append(choice)
    return chosen


# ------------------------------------------------------------------------------------- pretraining, features
class Features(NamedTuple):
    """Rows to cluster: points (N, D) float32 of unit length; labels (N,) int64, -1 = unlabeled."""

    points: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class PretrainJob:
    """What all splits share; crosses process borders."""

    config: Config
    train: TrainSet
    known: tuple[str, ...]
    uri: str
    device: str
    settings: Settings
    fingerprint: str

    @property
    def threads(self) -> int:
        """CPU threads of a task: 1, as sums over more would make results depend on the machine."""
        return self.config.compute.threads or 1

    def split_config(self, split: Split) -> Config:
        """The configuration of the split's pretraining: only its classes are known."""
        names = ",".join(self.known[c] for c in split.pretrain)
        data = self.config.data.model_copy(update={"known_classes": names, "num_novel": None})
        return self.config.model_copy(update={"data": data, "discover": PhaseConfig(), "output": None})

    def split_key(self, split: Split) -> str:
        """Hash of everything the split's features depend on."""
        settings = [self.settings.variance, self.settings.max_rows]
        return digest(config_hash(self.split_config(split)), self.fingerprint, split, settings)


def pretrain_split(job: PretrainJob, split: Split) -> Features:
    """Pretrain on the split's classes and take the features of all the other rows."""
    storage = Storage(f"{job.uri}/pretrain-{job.split_key(split)}")
    name = "features.safetensors"
    if not storage.exists(name):
        with threads(job.threads):
            labels, points = _split_features(job, split, storage)
        tensors = {"points": points.contiguous(), "labels": labels.contiguous()}
        storage.write(name, safetensors.torch.save(tensors))
    stored = safetensors.torch.load(storage.read(name))
    return Features(stored["points"].numpy(), stored["labels"].numpy())


def _split_features(job: PretrainJob, split: Split, storage: Storage) -> tuple[Tensor, Tensor]:
    train, config = job.train, job.split_config(split)
    index = {c: i for i, c in enumerate(split.pretrain)}
    own = torch.isin(train.labels, torch.tensor(split.pretrain))
    labels = torch.tensor([index[c] for c in train.labels[own].tolist()])
    part = TrainSet(train.labeled_images[own], labels, train.unlabeled_images, len(split.pretrain), 1)
    device = torch.device(job.device)
    state = run.pretrain(config, part.to(device), LocalWorker(device), storage)

    labeled = _sample_rows(train.labels, job.settings.max_rows, config.seed)
    everyone = torch.zeros(len(train.unlabeled_images), dtype=torch.int64)
    unlabeled = _sample_rows(everyone, job.settings.max_rows, config.seed)
    images = torch.cat([train.labeled_images[labeled], train.unlabeled_images[unlabeled]])
    labels = torch.cat([train.labels[labeled], torch.full((len(unlabeled),), FREE)])
    points = whiten(_encode(state.model, images, config, device), job.settings.variance)
    rest = ~torch.isin(labels, torch.tensor(split.pretrain))
    return labels[rest], points[rest]


def _encode(model: UnoModel, images: Tensor, config: Config, device: torch.device) -> Tensor:
    """(N, 3, S, S) uint8 -> (N, D) float32 l2-normalised encoder features, on the host."""
    size = min(config.augment.large.size, images.shape[-1])
    model.eval()
    with torch.inference_mode():
        parts = [
            model.features(eval_view(part.to(device), size, config.data.mean, config.data.std)).float().cpu()
            for part in images.split(config.train.eval_batch_size)
        ]
        return F.normalize(torch.cat(parts), dim=1).clone()


def _sample_rows(labels: Tensor, max_rows: int, seed: int) -> Tensor:
    """Sorted row numbers, at most ``max_rows``, every class capped alike. labels: (N,) int64."""
    classes = labels.unique().tolist()
    cap = max(1, max_rows // max(1, len(classes)))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    kept = [order[labels[order] == c][:cap] for c in classes]
    return torch.cat([torch.empty(0, dtype=torch.int64), *kept]).sort().values


def whiten(features: Tensor, variance: float) -> Tensor:
    """Leading principal directions at unit variance, rows at unit length: (N, D) -> (N, D') float32.

    D' is the smallest number of directions that explain ``variance`` (0-1) of the variance. On the digits
    (3 pretraining classes, 8 other tasks than the record's) this lifts the adjusted Rand index of the
    clusters from .40 to .67. Features without any variance give (N, 1) zeros.
    """
    centered = features.double() - features.double().mean(dim=0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / max(1, len(features) - 1))
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    if float(values.sum()) <= 1e-12:
        return torch.zeros(len(features), 1)
    explained = values.cumsum(0) / values.sum()
    count = int((explained < variance - 1e-12).sum()) + 1
    points = centered @ vectors[:, :count] / values[:count].sqrt()
    return F.normalize(points, dim=1).float()


# ------------------------------------------------------------------------------------------- one split, one k
@dataclass(frozen=True)
class ClusterJob:
    """What all k of a split share; crosses process borders."""

    features: Features
    split: Split
    index: int
    seed: int
    device: str
    threads: int
    settings: Settings


def score_clusters(job: ClusterJob, k: int) -> list[dict[str, Any]]:
    """Cluster with k novel classes for every choice of anchors: f1, acc, cvi and unlabeled cluster sizes."""
    device, settings = torch.device(job.device), job.settings
    points = torch.tensor(job.features.points, device=device)
    labels = torch.tensor(job.features.labels)
    num_clusters = k + len(job.split.probe)
    results = []
    with threads(job.threads):
        for role, anchors in enumerate(anchor_choices(job.split, settings, job.seed)):
            validation = [c for c in job.split.probe if c not in anchors]
            fixed, truth = _positions(labels, anchors), _positions(labels, validation)
            numbers = np.random.SeedSequence([job.seed, STREAM, job.index, role, k])
            seed = int(numbers.generate_state(1)[0])
            clusters = constrained_kmeans(
                points, fixed.to(device), num_clusters, settings.num_restarts, seed
            ).assignment
            free = (fixed == FREE).to(device)
            cvi = silhouette(points[free], clusters[free], settings.silhouette_rows, seed)
            found = clusters.cpu().numpy()
            table = confusion(truth.numpy(), found, len(validation), num_clusters)
            unlabeled = np.bincount(found[(labels == FREE).numpy()], minlength=num_clusters)
            results.append(
                {
                    "anchors": anchors,
                    "f1": class_f1(table, np.bincount(found, minlength=num_clusters)),
                    "acc": cluster_accuracy(table),
                    "cvi": cvi,
                    "sizes": sorted(unlabeled.tolist(), reverse=True),
                }
            )
    return results


def _positions(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """(N,) int64: each label's place in ``classes``, or FREE."""
    places = torch.full_like(labels, FREE)
    for i, c in enumerate(classes):
        places[labels == c] = i
    return places


def class_f1(table: Counts, totals: Counts) -> float:
    """How well clusters fit the validation classes: the mean F1 of each class with its own cluster, 0-1.

    Classes and clusters are paired so that the sum is largest. Too few clusters cost precision, because rows
    of other, also of unlabeled, classes join; too many cost recall.

    Args:
        table: (C, K) validation rows of each class in each cluster; C <= K.
        totals: (K,) rows of any kind in each cluster.
    """
    sizes = table.sum(axis=1, keepdims=True) + totals[None]
    f1 = 2 * table / np.maximum(sizes, 1)
    rows, columns = linear_sum_assignment(f1, maximize=True)
    return float(f1[rows, columns].mean())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """``count`` CPU threads for torch, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def digest(*parts: Any) -> str:
    """Hash of anything JSON holds, 12 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
