"""What discovery starts from: prototypes at clusters of the features, and the prior of the classes."""

from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno.clustering import FREE, kmeans, seeded_kmeans, whiten
from uno.config import Config
from uno.data.decode import decoded, ok_mask
from uno.data.images import evenly_spaced
from uno.data.resident import TrainSet
from uno.data.row_blocks import part
from uno.data.stream import TrainData
from uno.errors import ConfigError
from uno.heads import unit
from uno.methods import load
from uno.model import UnoModel, features_of

NUM_STARTS = 10
MAX_ROWS = 20_000  # of a kind, that are clustered


class Clustering(NamedTuple):
    """Clusters of N_u unlabeled rows: one for each of K outputs, known ones first where the pile is mixed."""

    assignment: Tensor  # (N_u,) int64
    centers: Tensor  # (K, D), of the unit features of all rows, of length one
    prior: Tensor  # (K,) shares of the unlabeled rows, positive, which sum to one


def clusters_of(
    unlabeled: Tensor, labeled: Tensor, labels: Tensor, num_novel: int, setting: str | None, seed: int
) -> Clustering:
    """Cluster features ``unlabeled`` (N_u, D), on the CPU: K = C_l + C_u in a ``mixed`` pile, by k-means with
    the rows ``labeled`` (N_l, D) fixed to their classes ``labels`` (N_l,), in whitened principal directions;
    in any other K = C_u by plain k-means.

    Directions count, so every row is scaled to length one. In the GCD setting of Caltech-24 the K - 1 leading
    directions give 95 % of the rows' classes, features as they are 94 %, 96 directions 83 %. In the NCD
    setting rows are scaled once more around the mean of all: with what all rows share left in, ten starts
    miss the best optimum under one seed in six. A cluster without rows counts as one row in the prior, so
    that its output is not closed for good.
    """
    rest = F.normalize(unlabeled.cpu().float(), dim=1)
    points, labels = torch.cat([F.normalize(labeled.cpu().float(), dim=1), rest]), labels.cpu()
    if setting == "gcd":
        num_clusters = int(labels.max()) + 1 + num_novel
        fixed = torch.cat([labels, torch.full((len(rest),), FREE)])
        white = F.normalize(whiten(points, num_clusters - 1), dim=1)
        assignment = seeded_kmeans(white, fixed, num_clusters, NUM_STARTS, seed).assignment
    else:
        num_clusters = num_novel
        centered, points = F.normalize(rest - points.mean(dim=0), dim=1), rest
        assignment = kmeans(centered, num_clusters, NUM_STARTS, seed).assignment
    centers = torch.zeros(num_clusters, points.shape[1]).index_add_(0, assignment, points)
    assignment = assignment[len(points) - len(rest) :]
    sizes = torch.bincount(assignment, minlength=num_clusters).clamp(min=1).float()
    return Clustering(assignment, F.normalize(centers, dim=1), sizes / sizes.sum())


def shrink_prior(prior: Tensor, found: Tensor, true: Tensor) -> Tensor:
    """Shares (K,) of k-means clusters, drawn towards equal ones as far as k-means may be mistaken.

    Known classes tell how far: clusters of their labeled rows, matched with them, have shares ``found`` (C,)
    where ``true`` (C,) are right. Relative to an equal share, clusters spread by what classes do and by the
    error besides, so of their variance v, with an error of mean square e, max(0, 1 - e / v) is believed
    (James and Stein 1961): 99 % of Caltech-24, nothing of CIFAR10 at 96 px.
    """
    spread, error = len(prior) * prior - 1, len(true) * (found - true)
    kept = 1 - error.square().mean() / spread.square().mean().clamp(min=1e-12)
    return (1 + kept.clamp(min=0) * spread) / len(prior)


def known_shares(labeled: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Shares (C_l,) of labeled rows in k-means clusters that match known classes best, and in these classes:
    what :func:`shrink_prior` compares, of features (N_l, D) and labels (N_l,).
    """
    num_known = int(labels.max()) + 1
    rows = F.normalize(labeled.cpu().float(), dim=1)
    clusters = kmeans(F.normalize(rows - rows.mean(dim=0), dim=1), num_known, NUM_STARTS, seed).assignment
    of_class, of_cluster = (F.one_hot(group, num_known).float() for group in (labels.cpu(), clusters))
    match = linear_sum_assignment((of_class.T @ of_cluster).numpy(), maximize=True)[1]
    return of_cluster.mean(dim=0)[torch.from_numpy(match)], of_class.mean(dim=0)


@torch.no_grad()
def init_prototypes_(
    config: Config, model: UnoModel, train: TrainData, extra: dict[str, Tensor], keep_known: bool = False
) -> dict[str, Tensor]:
    """What discovery begins with besides the weights of ``model``: ``extra``, a method's, and where the run
    has one the ``prior`` (C_u,) or, for the GCD setting, (C,) that :func:`uno.steps.global_targets` takes.

    With ``model.prototype_init`` kmeans prototypes are moved, in place, to clusters of the training rows'
    features: known ones (unless ``keep_known``) to the means of their classes, every cluster head's to the
    projected means of :func:`clusters_of`, every overclustering head's to those of a k-means of its own.
    """
    mixed, num_known, num_novel = config.data.setting == "gcd", train.num_known, train.num_novel
    prior = config.objective.class_prior or (
        "clusters" if mixed and load(config.method).extends else "uniform"
    )
    if prior == "uniform" and mixed:
        extra = extra | {"prior": torch.full((num_known + num_novel,), 1 / (num_known + num_novel))}
    if prior == "uniform" and config.model.prototype_init == "random":
        return extra
    model.eval()
    labeled, labels, unlabeled = training_features(config, model, train)
    found = clusters_of(unlabeled, labeled, labels, num_novel, config.data.setting, config.seed)
    if config.model.prototype_init == "kmeans":
        cluster = found.assignment - num_known if mixed else found.assignment  # a known class is below 0
        _move_prototypes_(model, labeled, None if keep_known else labels, unlabeled, cluster, config.seed)
    model.train()
    if prior == "uniform":
        return extra
    shares = found.prior if mixed else shrink_prior(found.prior, *known_shares(labeled, labels, config.seed))
    return extra | {"prior": shares}


def _move_prototypes_(
    model: UnoModel, labeled: Tensor, labels: Tensor | None, unlabeled: Tensor, cluster: Tensor, seed: int
) -> None:
    device, num_heads, is_novel = model.known.weight.device, model.num_heads, cluster >= 0
    if labels is not None:
        set_to_class_means_(model.known.weight, unit(labeled).to(device), labels)
    projections = _projections_(model, torch.cat([unlabeled, labeled]).to(device))[:, : len(unlabeled)]
    for h in range(num_heads):
        set_to_class_means_(model.novel.weight[h], projections[h], cluster)
    if model.over is not None:
        rows, num = unit(unlabeled[is_novel]), model.over.weight.shape[1]
        for h in range(num_heads if len(rows) >= num else 0):
            own = torch.full_like(cluster, -1)
            own[is_novel] = kmeans(rows, num, 1, seed + h).assignment
            set_to_class_means_(model.over.weight[h], projections[num_heads + h], own)


def training_features(config: Config, model: UnoModel, train: TrainData) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N_l, D), labels (N_l,) and features (N_u, D) of at most ``MAX_ROWS`` rows of each kind,
    evenly spaced, on the CPU; images that cannot be read are left out.
    """
    unlabeled, _ = _features(config, model, train, evenly_spaced(MAX_ROWS, train.num_unlabeled), "unlabeled")
    return *labeled_features(config, model, train), unlabeled


def labeled_features(config: Config, model: UnoModel, train: TrainData) -> tuple[Tensor, Tensor]:
    """The labeled rows' part of :func:`training_features`."""
    rows = evenly_spaced(MAX_ROWS, len(train.labels))
    features, ok = _features(config, model, train, rows, "labeled")
    return features, train.labels.cpu()[torch.from_numpy(rows)][ok]


def _features(
    config: Config, model: UnoModel, train: TrainData, rows: np.ndarray, kind: Literal["labeled", "unlabeled"]
) -> tuple[Tensor, Tensor]:
    """Features of those ``rows`` int64 (n,) of a kind that can be read, and which these are, bool (n,)."""
    if isinstance(train, TrainSet):
        images = train.labeled_images if kind == "labeled" else train.unlabeled_images
        chosen = part(images, torch.from_numpy(rows).to(images.device))
        return features_of(model, chosen, config).cpu(), torch.ones(len(rows), dtype=torch.bool)
    rows = (train.labeled if kind == "labeled" else train.unlabeled)[rows]
    data, batch = config.data, config.train.eval_batch_size
    batches = np.split(rows, range(batch, len(rows), batch))
    features, ok = list[Tensor](), list[Tensor]()
    how = data.stored_size, config.compute.threads, data.interpolation
    for _, pixels, reasons in decoded(train.images, batches, *how):
        ok.append(torch.from_numpy(ok_mask(reasons)))
        if ok[-1].any():
            features.append(features_of(model, pixels[ok[-1]], config).cpu())
    if not features:
        raise ConfigError(f"no {kind} image can be read")
    return torch.cat(features), torch.cat(ok)


def _projections_(model: UnoModel, features: Tensor) -> Tensor:
    """(N, D) features -> unit projections (H or 2H, N, P); BatchNorm's running statistics become theirs."""
    projector = model.projector
    assert projector is not None
    momentum, projector.bn.momentum = projector.bn.momentum, 1.0
    model.train()
    projections = unit(projector(unit(features) if model.normalize_input else features))
    projector.bn.momentum = momentum
    return projections


def set_to_class_means_(prototypes: Tensor, directions: Tensor, group: Tensor) -> None:
    """Each prototype (K, P) to the mean direction of its ``group`` (N,), in place; one without rows stays."""
    member = F.one_hot(group.clamp(min=0), len(prototypes)) * (group >= 0)[:, None]  # (N, K); -1 is in none
    member = member.to(directions)
    sums = member.T @ directions
    prototypes.copy_(torch.where(member.sum(dim=0)[:, None] > 0, F.normalize(sums, dim=1), prototypes))
