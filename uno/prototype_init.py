"""What discovery starts from: prototypes at clusters of the features, and the prior
of the classes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno import collectives
from uno.clustering import FREE, kmeans, seeded_kmeans, whiten
from uno.config import Config
from uno.data.decode import DecodedBatch, ok_mask
from uno.data.images import batches_of, evenly_spaced, spread
from uno.data.resident import TrainSet
from uno.data.row_blocks import RowBlocks, part
from uno.data.stream import TrainData, decoded_rows
from uno.errors import ConfigError
from uno.heads import unit
from uno.methods import load
from uno.model import UnoModel, features_of

NUM_STARTS = 10
MAX_ROWS = 20_000  # of a kind, that are clustered
# of resident rows that are shared: workers get about as many rows each
MIN_BATCH_ROWS, MAX_BATCHES = 32, 64

Kind = Literal["labeled", "unlabeled"]
KINDS: tuple[Kind, ...] = ("labeled", "unlabeled")
Load = Callable[[Sequence[np.ndarray]], Iterator[tuple[Tensor | RowBlocks, np.ndarray]]]
"""Images of batches of numbers, and bool (n,) which of them could be read, of the
others anything.
"""


class Clustering(NamedTuple):
    """Clusters of N_u unlabeled rows: one for each of K outputs, known ones first in
    the GCD setting.
    """

    assignment: Tensor  # (N_u,) int64
    centers: Tensor  # (K, D), of the unit features of all rows, of length one
    prior: Tensor  # (K,) shares of the unlabeled rows, positive, which sum to one


def clusters_of(
    unlabeled: Tensor,
    labeled: Tensor,
    labels: Tensor,
    num_novel: int,
    setting: str | None,
    seed: int,
) -> Clustering:
    """Cluster features ``unlabeled`` (N_u, D), on the CPU: K = C_l + C_u in the GCD
    ``setting``, by k-means with the rows ``labeled`` (N_l, D) fixed to their classes
    ``labels`` (N_l,), in whitened principal directions; in any other K = C_u by plain
    k-means.

    Directions count, so every row is scaled to length one. In the GCD setting of
    Caltech-24 the K - 1 leading directions give 95% of the rows' classes, features as
    they are 94%, 96 directions 83%. In the NCD setting rows are scaled once more around
    the mean of all: with what all rows share left in, ten starts miss the best optimum
    under one seed in six. A cluster without rows counts as one row in the prior, so
    that its output is not closed for good.
    """
    rest = F.normalize(unlabeled.cpu().float(), dim=1)
    points, labels = (
        torch.cat([F.normalize(labeled.cpu().float(), dim=1), rest]),
        labels.cpu(),
    )
    if setting == "gcd":
        num_clusters = int(labels.max()) + 1 + num_novel
        fixed = torch.cat([labels, torch.full((len(rest),), FREE)])
        white = F.normalize(whiten(points, num_clusters - 1), dim=1)
        assignment = seeded_kmeans(
            white, fixed, num_clusters, NUM_STARTS, seed
        ).assignment
    else:
        num_clusters = num_novel
        centered, points = F.normalize(rest - points.mean(dim=0), dim=1), rest
        assignment = kmeans(centered, num_clusters, NUM_STARTS, seed).assignment
    centers = torch.zeros(num_clusters, points.shape[1]).index_add_(
        0, assignment, points
    )
    assignment = assignment[len(points) - len(rest) :]
    sizes = torch.bincount(assignment, minlength=num_clusters).clamp(min=1).float()
    return Clustering(assignment, F.normalize(centers, dim=1), sizes / sizes.sum())


def shrink_prior(prior: Tensor, found: Tensor, true: Tensor) -> Tensor:
    """Shares (K,) of k-means clusters, drawn toward equal ones as far as k-means may be
    mistaken.

    Known classes tell how far: clusters of their labeled rows, matched with them, have
    shares ``found`` (C,) where ``true`` (C,) are right. Relative to an equal share,
    clusters spread by what classes do and by the error besides, so of their variance v,
    with an error of mean square e, max(0, 1 - e / v) is kept (James and Stein 1961):
    99% of Caltech-24, nothing of CIFAR10 at 96 px.
    """
    spread, error = len(prior) * prior - 1, len(true) * (found - true)
    kept = 1 - error.square().mean() / spread.square().mean().clamp(min=1e-12)
    return (1 + kept.clamp(min=0) * spread) / len(prior)


def known_shares(labeled: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Shares (C_l,) of labeled rows in k-means clusters that match known classes best,
    and in these classes: what :func:`shrink_prior` compares, of features (N_l, D) and
    labels (N_l,).
    """
    num_known = int(labels.max()) + 1
    rows = F.normalize(labeled.cpu().float(), dim=1)
    clusters = kmeans(
        F.normalize(rows - rows.mean(dim=0), dim=1), num_known, NUM_STARTS, seed
    ).assignment
    of_class, of_cluster = (
        F.one_hot(group, num_known).float() for group in (labels.cpu(), clusters)
    )
    match = linear_sum_assignment((of_class.T @ of_cluster).numpy(), maximize=True)[1]
    return of_cluster.mean(dim=0)[torch.from_numpy(match)], of_class.mean(dim=0)


@torch.no_grad()
def init_prototypes_(
    config: Config,
    model: UnoModel,
    train: TrainData,
    extra: dict[str, Tensor],
    keep_known: bool = False,
) -> dict[str, Tensor]:
    """What discovery begins with besides the weights of ``model``: ``extra``, a
    method's, and where the run has one the ``prior`` (C_u,), in the GCD setting (C,),
    that :func:`uno.objective.global_targets` takes.

    With ``model.prototype_init`` kmeans prototypes are moved, in place, to clusters of
    the training rows' features: known ones (unless ``keep_known``) to the means of
    their classes, every cluster head's to the projected means of :func:`clusters_of`,
    every overclustering head's to those of a k-means of its own.
    """
    mixed, num_known, num_novel = (
        config.data.setting == "gcd",
        train.num_known,
        train.num_novel,
    )
    prior = config.objective.class_prior or (
        "kmeans" if mixed and load(config.method).extends else "uniform"
    )
    if prior == "uniform" and mixed:
        extra = extra | {
            "prior": torch.full((num_known + num_novel,), 1 / (num_known + num_novel))
        }
    if prior == "uniform" and config.model.prototype_init == "random":
        return extra
    model.eval()
    labeled, labels, unlabeled = training_features(config, model, train)
    how = unlabeled, labeled, labels, num_novel, config.data.setting, config.seed
    found = Clustering(
        **collectives.compute_on_rank0(
            lambda: clusters_of(*how)._asdict(), model.known.weight.device
        )
    )
    if config.model.prototype_init == "kmeans":
        # a known class is below 0
        cluster = found.assignment - num_known if mixed else found.assignment
        _move_prototypes_(
            model,
            labeled,
            None if keep_known else labels,
            unlabeled,
            cluster,
            config.seed,
        )
    model.train()
    if prior == "uniform":
        return extra
    shares = (
        found.prior
        if mixed
        else shrink_prior(found.prior, *known_shares(labeled, labels, config.seed))
    )
    return extra | {"prior": shares}


def _move_prototypes_(
    model: UnoModel,
    labeled: Tensor,
    labels: Tensor | None,
    unlabeled: Tensor,
    cluster: Tensor,
    seed: int,
) -> None:
    device, num_heads, is_novel = (
        model.known.weight.device,
        model.num_heads,
        cluster >= 0,
    )
    if labels is not None:
        set_to_class_means_(model.known.weight, unit(labeled).to(device), labels)
    projections = _projections_(model, torch.cat([unlabeled, labeled]).to(device))[
        :, : len(unlabeled)
    ]
    for h in range(num_heads):
        set_to_class_means_(model.novel.weight[h], projections[h], cluster)
    if model.over is not None:
        rows, num = unit(unlabeled[is_novel]), model.over.weight.shape[1]
        for h in range(num_heads if len(rows) >= num else 0):
            own = torch.full_like(cluster, -1)
            own[is_novel] = kmeans(rows, num, 1, seed + h).assignment
            set_to_class_means_(model.over.weight[h], projections[num_heads + h], own)


class Sample(NamedTuple):
    """What a model makes of at most ``MAX_ROWS`` training rows of each kind, on the
    CPU.
    """

    labeled: Tensor  # (N_l, D)
    labels: Tensor  # (N_l,)
    unlabeled: Tensor  # (N_u, D)


def training_features(config: Config, model: UnoModel, train: TrainData) -> Sample:
    """:func:`sample_features` of one model."""
    return sample_features(config, [model], train)[0]


def sample_features(
    config: Config,
    models: Sequence[UnoModel],
    train: TrainData,
    kinds: Sequence[Kind] = KINDS,
) -> list[Sample]:
    """Of each of ``models``: features of rows that are evenly spaced, by
    :func:`~uno.data.images.spread`; images that cannot be read are left out. All
    workers ask, and each reads a share. ConfigError: no image of a kind can be read.
    """
    if isinstance(train, TrainSet):
        rows = [
            evenly_spaced(MAX_ROWS, num)
            for num in (len(train.labels), train.num_unlabeled)
        ]
    else:
        both, labels = [train.labeled, train.unlabeled], train.labels.numpy()
        rows = spread(train.images, both, MAX_ROWS, labels)
    rows = [rows[0], rows[1][:0]] if len(kinds) == 1 else rows
    num, size = len(rows[0]), config.train.eval_batch_size
    if isinstance(train, TrainSet):
        size = resident_batch_rows(config, num + len(rows[1]))
        starts = [*range(0, num, size), *range(num, num + len(rows[1]), size)]
        batches = np.split(np.arange(num + len(rows[1])), starts[1:])
        load: Load = partial(_resident, train, rows)
    else:
        numbers = np.concatenate(
            [own[chosen] for own, chosen in zip(both, rows, strict=True)]
        )
        order, size = (
            np.arange(len(numbers)),
            decoded_rows(size, config.data.stored_size),
        )
        pieces = [order[:num], order[num:]]  # as resident ones
        if train.images.groups(order[:0]) is not None:  # a group has both kinds
            pieces = [np.argsort(numbers, kind="stable")]
        batches = [
            own[batch]
            for own in pieces
            for batch in batches_of(train.images, numbers[own], size)
        ]
        load = partial(streamed, train.decode, numbers)
    found, ok = features_by_all(config, models, batches, load)
    for kind, own in zip(kinds, (ok[:num], ok[num:]), strict=False):
        if len(own) and not own.any():
            raise ConfigError(f"no {kind} image can be read")
    true = train.labels.cpu()[torch.from_numpy(rows[0])][ok[:num]]
    return [
        Sample(each[:num][ok[:num]], true, each[num:][ok[num:]])
        for each in (one.cpu() for one in found)
    ]


def resident_batch_rows(config: Config, num_rows: int) -> int:
    """Of a batch of ``num_rows`` rows in memory, however many workers share them."""
    return min(
        config.train.eval_batch_size, max(MIN_BATCH_ROWS, -(-num_rows // MAX_BATCHES))
    )


def features_by_all(
    config: Config,
    models: Sequence[UnoModel],
    batches: Sequence[np.ndarray],
    load: Load,
) -> tuple[list[Tensor], Tensor]:
    """Features (n, D) of each model of images 0 to n - 1, of which ``load`` reads some
    of ``batches``, and bool (n,) which it could read, of others zeros. All workers ask,
    and each reads a share.
    """
    (rank, world), num, device = (
        collectives.rank_and_world(),
        sum(map(len, batches)),
        models[0].known.weight.device,
    )
    widths = [int(model.encoder.num_features) for model in models]  # type: ignore[arg-type]
    found = [torch.zeros(num, width, device=device) for width in widths]
    ok, sizes = (
        torch.zeros(num, device=device),
        np.array([len(batch) for batch in batches], dtype=np.int64),
    )
    middle = sizes.cumsum() - sizes / 2
    mine = [
        batches[i]
        for i in np.flatnonzero(middle * world // max(1, num) == rank).tolist()
    ]
    for batch, (images, good) in zip(mine, load(mine), strict=True):
        rows = torch.from_numpy(batch[good]).to(device)
        if len(rows):
            ok[rows] = 1
            images = images if good.all() else images[torch.from_numpy(good)]
            for model, features in zip(models, found, strict=True):
                features[rows] = features_of(model, images, config)
    return [
        collectives.all_reduce_sum_(features) for features in found
    ], collectives.all_reduce_sum_(ok).cpu() > 0


def _resident(
    train: TrainSet, rows: Sequence[np.ndarray], batches: Sequence[np.ndarray]
) -> Iterator[tuple[Tensor | RowBlocks, np.ndarray]]:
    num = len(rows[0])
    for batch in batches:
        images = train.labeled_images if batch[0] < num else train.unlabeled_images
        chosen = torch.from_numpy(np.concatenate(rows)[batch]).to(images.device)
        yield part(images, chosen), np.ones(len(batch), dtype=bool)


def streamed(
    decode: Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]],
    numbers: np.ndarray,
    batches: Sequence[np.ndarray],
) -> Iterator[tuple[Tensor | RowBlocks, np.ndarray]]:
    """:data:`Load` of images that are row ``numbers`` (n,) of a source."""
    for _, pixels, reasons in decode(numbers[batch] for batch in batches):
        yield pixels, ok_mask(reasons)


def _projections_(model: UnoModel, features: Tensor) -> Tensor:
    """(N, D) features -> unit projections (H or 2H, N, P); BatchNorm's running
    statistics become theirs.
    """
    projector = model.projector
    assert projector is not None
    momentum, projector.bn.momentum = projector.bn.momentum, 1.0
    model.train()
    projections = unit(projector(unit(features) if model.normalize_input else features))
    projector.bn.momentum = momentum
    return projections


def set_to_class_means_(prototypes: Tensor, directions: Tensor, group: Tensor) -> None:
    """Each prototype (K, P) to the mean direction of its ``group`` (N,), in place;
    one without rows stays.
    """
    # (N, K); -1 is in none
    member = F.one_hot(group.clamp(min=0), len(prototypes)) * (group >= 0)[:, None]
    member = member.to(directions)
    sums = member.T @ directions
    prototypes.copy_(
        torch.where(
            member.sum(dim=0)[:, None] > 0, F.normalize(sums, dim=1), prototypes
        )
    )
