"""Clusters of the features that discovery starts from: how large its classes are, and where."""

import warnings
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno.config import Config
from uno.constrained_kmeans import FREE, Clusters, constrained_kmeans, lloyd
from uno.data.decode import decoded, readable
from uno.data.images import evenly_spaced
from uno.data.kept import part
from uno.data.resident import TrainSet
from uno.data.stream import StreamSet, TrainData
from uno.errors import ConfigError
from uno.heads import unit
from uno.model import UnoModel, features_of

NUM_STARTS = 10
MAX_ROWS = 20_000  # of a kind, that are clustered


class Clustering(NamedTuple):
    """Clusters of N_u unlabeled rows: one for each of K outputs, known ones first where the pile is mixed."""

    assignment: Tensor  # (N_u,) int64
    centers: Tensor  # (K, D), of the unit features of all rows, of length one
    prior: Tensor  # (K,) shares of the unlabeled rows, positive, which sum to one


def clusters_of(
    unlabeled: Tensor, labeled: Tensor, labels: Tensor, num_novel: int, pile: Literal["novel", "mixed"],
    seed: int,
) -> Clustering:  # fmt: skip
    """Cluster features ``unlabeled`` (N_u, D), on the CPU: K = C_u by k-means in a ``novel`` pile; in a
    ``mixed`` one K = C_l + C_u by k-means with the rows ``labeled`` (N_l, D) fixed to their classes
    ``labels`` (N_l,), after :func:`principal`.

    Directions count, so every row is scaled to length one; in a novel pile once more around the mean of all
    rows. With what all rows share left in, ten starts miss the best optimum of Caltech-24 under one seed in
    six (inertia 289.06 for 288.76); without it all seeds agree to .01 %. A cluster without rows counts as one
    row in the prior, that its output is not closed for good.
    """
    rest = F.normalize(unlabeled.cpu().float(), dim=1)
    points, labels = torch.cat([F.normalize(labeled.cpu().float(), dim=1), rest]), labels.cpu()
    if pile == "novel":
        centered = F.normalize(rest - points.mean(dim=0), dim=1)
        assignment = _kmeans(centered, num_novel, NUM_STARTS, seed).assignment
        sums = torch.zeros(num_novel, rest.shape[1]).index_add_(0, assignment, rest)
        return _clustering(assignment, sums)
    fixed = torch.cat([labels, torch.full((len(rest),), FREE)])
    num_clusters = int(labels.max()) + 1 + num_novel
    assignment = around_known(principal(points, num_clusters - 1), fixed, num_clusters, NUM_STARTS, seed)
    sums = torch.zeros(num_clusters, points.shape[1]).index_add_(0, assignment, points)
    return _clustering(assignment[len(labels) :], sums)


def _clustering(assignment: Tensor, centers: Tensor) -> Clustering:
    sizes = torch.bincount(assignment, minlength=len(centers)).clamp(min=1).float()
    return Clustering(assignment, F.normalize(centers, dim=1), sizes / sizes.sum())


def believed(prior: Tensor, found: Tensor, true: Tensor) -> Tensor:
    """Shares (K,) of k-means clusters, drawn towards equal ones as far as k-means may be mistaken.

    Known classes tell how far: clusters of their labeled rows, matched with them, have shares ``found`` (C,)
    where ``true`` (C,) are right. Relative to an equal share, clusters spread by what classes do and by the
    error besides, so of their variance v, with an error of mean square e, max(0, 1 - e / v) is believed
    (James and Stein 1961). Of Caltech-24 that is 99 %; of CIFAR10 at 96 px, whose known classes k-means takes
    apart no better than to sizes 30 % off, nothing.
    """
    spread, error = len(prior) * prior - 1, len(true) * (found - true)
    kept = 1 - error.square().mean() / spread.square().mean().clamp(min=1e-12)
    return (1 + kept.clamp(min=0) * spread) / len(prior)


def known_shares(labeled: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Shares (C_l,) of labeled rows in k-means clusters that match known classes best, and in these classes:
    what :func:`believed` compares, of features (N_l, D) and labels (N_l,).
    """
    num_known = int(labels.max()) + 1
    rows = F.normalize(labeled.cpu().float(), dim=1)
    clusters = _kmeans(F.normalize(rows - rows.mean(dim=0), dim=1), num_known, NUM_STARTS, seed).assignment
    of_class, of_cluster = (F.one_hot(group, num_known).float() for group in (labels.cpu(), clusters))
    match = linear_sum_assignment((of_class.T @ of_cluster).numpy(), maximize=True)[1]
    return of_cluster.mean(dim=0)[torch.from_numpy(match)], of_class.mean(dim=0)


def principal(points: Tensor, num_directions: int) -> Tensor:
    """(N, D) -> (N, at most ``num_directions``) float32 of length one: the leading principal directions, each
    at unit variance.

    The centres of K clusters span K - 1 directions, and the leading principal ones are the best guess of them
    (Ding and He, ICML 2004). Of Caltech-24, half of each of 16 known classes unlabeled, constrained k-means
    then finds 95 % of the rows' classes, of the features as they are 94 %, with 96 directions 83 %.
    """
    centered = points.double() - points.double().mean(dim=0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(points))
    kept = values > 1e-9 * values[-1].clamp(min=1e-30)
    values, vectors = values[kept][-num_directions:], vectors[:, kept][:, -num_directions:]
    return F.normalize(centered @ vectors / values.sqrt(), dim=1).float()


def around_known(points: Tensor, fixed: Tensor, num_clusters: int, num_starts: int, seed: int) -> Tensor:
    """As :func:`~uno.constrained_kmeans.constrained_kmeans`, the assignment (N,), but started from where the
    free rows are: their own k-means clusters, of which those that match known classes best give way to them.

    Free centres drawn one by one instead end in worse optima: of the features as they are, in the example
    above, 84 % for 94 %.
    """
    free, num_known = points[fixed == FREE], int(fixed.max()) + 1
    if len(free) < num_clusters or points.shape[1] == 0:
        return constrained_kmeans(points, fixed, num_clusters, num_starts, seed).assignment
    means = torch.stack([points[fixed == c].mean(dim=0) for c in range(num_known)])
    best: Clusters | None = None
    for start in range(num_starts):
        centers = _kmeans(free, num_clusters, 1, seed + start).centers
        taken = linear_sum_assignment(torch.cdist(means, centers).numpy())[1]
        others = torch.from_numpy(np.setdiff1d(np.arange(num_clusters), taken))
        found = lloyd(points, fixed, torch.cat([means, centers[others]]))
        best = found if best is None or found.inertia < best.inertia else best
    assert best is not None
    return best.assignment


def _kmeans(points: Tensor, num_clusters: int, num_starts: int, seed: int) -> Clusters:
    """Plain k-means of (N, D), the best of ``num_starts``."""
    from sklearn.cluster import KMeans  # 2 s of CPU time
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different rows than clusters
        found = KMeans(num_clusters, n_init=num_starts, random_state=seed).fit(points.numpy())
    assignment, centers = torch.from_numpy(found.labels_).long(), torch.from_numpy(found.cluster_centers_)
    return Clusters(assignment, centers.to(points.dtype), float(found.inertia_))


@torch.no_grad()
def start_(
    config: Config, model: UnoModel, train: TrainData, extra: dict[str, Tensor], keep_known: bool = False
) -> dict[str, Tensor]:
    """What discovery begins with besides the weights of ``model``: ``extra``, a method's, and where the run
    has one the ``prior`` (C_u,) or, for a mixed pile, (C,) that :func:`uno.steps.global_targets` takes.

    With ``model.start`` kmeans prototypes are moved, in place, to clusters of the training rows' features:
    known ones (unless ``keep_known``) to the means of their classes, every cluster head's to the projected
    means of :func:`clusters_of`, every overclustering head's to those of a k-means of its own.
    """
    mixed, num_known, num_novel = config.data.pile == "mixed", train.num_known, train.num_novel
    prior = config.objective.prior or ("clusters" if mixed and config.method == "uno" else "uniform")
    if prior == "uniform" and mixed:
        extra = extra | {"prior": torch.full((num_known + num_novel,), 1 / (num_known + num_novel))}
    if prior == "uniform" and config.model.start == "random":
        return extra
    model.eval()
    labeled, labels, unlabeled = training_features(config, model, train)
    found = clusters_of(unlabeled, labeled, labels, num_novel, "mixed" if mixed else "novel", config.seed)
    if config.model.start == "kmeans":
        cluster = found.assignment - num_known if mixed else found.assignment  # a known class is below 0
        _move_prototypes_(model, labeled, None if keep_known else labels, unlabeled, cluster, config.seed)
    model.train()
    if prior == "uniform":
        return extra
    shares = found.prior if mixed else believed(found.prior, *known_shares(labeled, labels, config.seed))
    return extra | {"prior": shares}


def _move_prototypes_(
    model: UnoModel, labeled: Tensor, labels: Tensor | None, unlabeled: Tensor, cluster: Tensor, seed: int
) -> None:
    device, num_heads, is_novel = model.known.weight.device, model.num_heads, cluster >= 0
    if labels is not None:
        at_means_(model.known.weight, unit(labeled).to(device), labels)
    projections = _projections_(model, torch.cat([unlabeled, labeled]).to(device))[:, : len(unlabeled)]
    for h in range(num_heads):
        at_means_(model.novel.weight[h], projections[h], cluster)
    if model.over is not None:
        rows, num = unit(unlabeled[is_novel]), model.over.weight.shape[1]
        for h in range(num_heads if len(rows) >= num else 0):
            own = torch.full_like(cluster, -1)
            own[is_novel] = _kmeans(rows, num, 1, seed + h).assignment
            at_means_(model.over.weight[h], projections[num_heads + h], own)


def training_features(config: Config, model: UnoModel, train: TrainData) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N_l, D), labels (N_l,) and features (N_u, D) of at most ``MAX_ROWS`` rows of each kind,
    evenly spaced, on the CPU; images that cannot be read are left out.
    """
    unlabeled = _evenly(train.num_unlabeled)
    if isinstance(train, TrainSet):
        images = train.unlabeled_images
        rest = features_of(model, part(images, unlabeled.to(images.device)), config).cpu()
    else:
        rest, _ = _streamed(config, model, train, train.unlabeled[unlabeled.numpy()])
    return *labeled_features(config, model, train), rest


def labeled_features(config: Config, model: UnoModel, train: TrainData) -> tuple[Tensor, Tensor]:
    """The labeled rows' part of :func:`training_features`."""
    labeled = _evenly(len(train.labels))
    if isinstance(train, TrainSet):
        images, rows = train.labeled_images, labeled.to(train.labels.device)
        return features_of(model, part(images, rows), config).cpu(), train.labels[rows].cpu()
    known, ok = _streamed(config, model, train, train.labeled[labeled.numpy()])
    return known, train.labels[labeled][ok].cpu()


def _streamed(config: Config, model: UnoModel, train: StreamSet, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Features, on the CPU, of those ``rows`` int64 (n,) that can be read, and which these are, bool (n,)."""
    data, batch = config.data, config.train.eval_batch_size
    batches = np.split(rows, range(batch, len(rows), batch))
    features, ok = list[Tensor](), list[Tensor]()
    how = data.store_size, config.compute.threads, data.interpolation
    for _, pixels, reasons in decoded(train.images, batches, *how):
        ok.append(torch.from_numpy(readable(reasons)))
        if ok[-1].any():
            features.append(features_of(model, pixels[ok[-1]], config).cpu())
    if not features:
        raise ConfigError("objective.prior clusters: no image of a kind can be read")
    return torch.cat(features), torch.cat(ok)


def _evenly(num_rows: int) -> Tensor:
    """At most ``MAX_ROWS`` row numbers, evenly spaced."""
    return torch.from_numpy(evenly_spaced(MAX_ROWS, num_rows))


def _projections_(model: UnoModel, features: Tensor) -> Tensor:
    """(N, D) features -> unit projections (H or 2H, N, P); BatchNorm's running statistics become theirs."""
    projector = model.projector
    assert projector is not None
    momentum, projector.bn.momentum = projector.bn.momentum, 1.0
    model.train()
    projections = unit(projector(unit(features) if model.normalize_input else features))
    projector.bn.momentum = momentum
    return projections


def at_means_(prototypes: Tensor, directions: Tensor, group: Tensor) -> None:
    """Each prototype (K, P) to the mean direction of its ``group`` (N,), in place; one without rows stays."""
    member = F.one_hot(group.clamp(min=0), len(prototypes)) * (group >= 0)[:, None]  # (N, K); -1 is in none
    member = member.to(directions)
    sums = member.T @ directions
    prototypes.copy_(torch.where(member.sum(dim=0)[:, None] > 0, F.normalize(sums, dim=1), prototypes))
