"""Initialize the prototypes of discovery, and compute the prior of the classes.

Prototypes start at clusters of the features of the training rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno import distributed
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
MAX_ROWS = 20_000  # of each kind that are clustered
# Limits of the batches of rows in memory, so that workers get about equally many rows.
MIN_BATCH_ROWS, MAX_BATCHES = 32, 64

Kind = Literal["labeled", "unlabeled"]
KINDS: tuple[Kind, ...] = ("labeled", "unlabeled")
Load = Callable[[Sequence[np.ndarray]], Iterator[tuple[Tensor | RowBlocks, np.ndarray]]]
"""Reads images: takes the numbers of the n images of each batch, int64 (n,).

For each batch it yields the images, and bool (n,), which of them could be read. The
pixels of the others have no meaning.
"""


class Clustering(NamedTuple):
    """A clustering of N_u unlabeled rows into K clusters, one for each output.

    In the GCD setting K = C and the known outputs come first. In other settings K =
    C_u.
    """

    assignment: Tensor  # int64 (N_u,), the cluster of each unlabeled row
    # (K, D), the mean direction of each cluster's rows; for GCD with the labeled rows
    centers: Tensor
    prior: Tensor  # (K,), positive shares of the unlabeled rows, which sum to one


def clusters_of(
    unlabeled: Tensor,
    labeled: Tensor,
    labels: Tensor,
    num_novel: int,
    setting: str | None,
    seed: int,
) -> Clustering:
    """Cluster the features of the unlabeled rows, on the CPU.

    In the GCD setting there are K = C_l + C_u clusters. They come from k-means on
    whitened principal directions, with the labeled rows fixed to their classes. In
    other settings there are K = C_u clusters, from plain k-means.

    Every row is first scaled to length one, because only directions count. In the GCD
    setting of Caltech-24 the K - 1 leading directions give 95% of the rows their class.
    Features as they are give 94%, and 96 directions give 83%. In other settings rows
    are centered by the mean of all rows and scaled once more. Without this, ten starts
    of k-means miss the best optimum with one seed in six.

    Args:
        unlabeled: Features (N_u, D).
        labeled: Features (N_l, D).
        labels: int64 (N_l,), known classes.
        num_novel: C_u.
        setting: ``gcd`` or another setting.
        seed: The seed of k-means.

    Returns:
        The clusters. A cluster without unlabeled rows counts as one row in the prior,
        so that its output can still get rows later.
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
    """Move the shares of k-means clusters toward equal shares.

    The known classes tell how far k-means can be trusted. The labeled rows are
    clustered, too, and the shares of their clusters are compared with the true shares.
    Shares are taken relative to an equal share, minus one. Their variance v comes from
    the sizes of the classes and from the error of k-means. If that error has the mean
    square e, the part max(0, 1 - e / v) is kept (James and Stein, 1961). That is 99%
    for Caltech-24, and nothing for CIFAR10 at 96 px.

    Args:
        prior: Shares (K,) of the k-means clusters of unlabeled rows, which sum to one.
        found: Shares (C_l,) of labeled rows in the clusters that match the known
            classes.
        true: Shares (C_l,) of labeled rows in the known classes.

    Returns:
        Shares (K,), which sum to one.
    """
    spread, error = len(prior) * prior - 1, len(true) * (found - true)
    kept = 1 - error.square().mean() / spread.square().mean().clamp(min=1e-12)
    return (1 + kept.clamp(min=0) * spread) / len(prior)


def known_shares(labeled: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Compare the sizes of k-means clusters of labeled rows with those of classes.

    Args:
        labeled: Features (N_l, D).
        labels: int64 (N_l,), known classes.
        seed: The seed of k-means.

    Returns:
        Two tensors (C_l,), as :func:`shrink_prior` takes them: the share of rows in the
        cluster that matches each known class best, and in the class itself.
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
    """Initialize the prototypes of a model, and return the extra tensors of discovery.

    With ``model.prototype_init kmeans`` prototypes are moved in place to clusters of
    the training rows' features. Known prototypes go to the means of their classes. The
    prototypes of each cluster head go to the projected means of :func:`clusters_of`,
    and those of each overclustering head to the means of a k-means of its own. All
    workers call this.

    Args:
        config: The configuration of the run.
        model: The model.
        train: The training data.
        extra: The extra tensors of the method, which are kept.
        keep_known: Whether the known prototypes stay as they are.

    Returns:
        ``extra``, and a ``prior`` for :func:`uno.objective.global_targets` if the run
        has one: shares (C_u,), or (C,) in the GCD setting.
    """
    mixed, num_known, num_novel = (
        config.data.setting == "gcd",
        train.num_known,
        train.num_novel,
    )
    prior = config.objective.class_prior or (
        "kmeans" if mixed and load(config.method).has_projection_heads else "uniform"
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
        **distributed.compute_on_rank0(
            lambda: clusters_of(*how)._asdict(), model.known.weight.device
        )
    )
    if config.model.prototype_init == "kmeans":
        # A row of a known class gets a negative number.
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
    """Move the prototypes of all heads to means of features, in place.

    Args:
        model: The model, which is changed, including the running statistics of the
            projector's BatchNorm.
        labeled: Features (N_l, D).
        labels: int64 (N_l,), known classes; None keeps the known prototypes.
        unlabeled: Features (N_u, D).
        cluster: int64 (N_u,), the novel cluster of each unlabeled row; negative for
            rows of known classes.
        seed: The seed of the k-means of the overclustering heads. It clusters the
            unlabeled rows of novel clusters. If there are fewer of them than prototypes
            of a head, these heads stay as they are.
    """
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
    """Features of a sample of the training rows, on the CPU.

    It has at most ``MAX_ROWS`` labeled and as many unlabeled rows.
    """

    labeled: Tensor  # (N_l, D)
    labels: Tensor  # (N_l,)
    unlabeled: Tensor  # (N_u, D)


def training_features(config: Config, model: UnoModel, train: TrainData) -> Sample:
    """Compute the features of a sample of the training rows by one model.

    The model is in eval mode meanwhile. See :func:`sample_features`.
    """
    was_training = model.training
    model.eval()
    sample = sample_features(config, [model], train)[0]
    model.train(was_training)
    return sample


def sample_features(
    config: Config,
    models: Sequence[UnoModel],
    train: TrainData,
    kinds: Sequence[Kind] = KINDS,
) -> list[Sample]:
    """Compute the features of a sample of the training rows, by several models.

    The rows are evenly spaced, see :func:`~uno.data.images.spread`. Images that cannot
    be read are left out. All workers call this, and each computes a part.

    Args:
        config: The configuration of the run.
        models: The models, in eval mode.
        train: The training data.
        kinds: ``("labeled", "unlabeled")``, or ``("labeled",)`` for no unlabeled rows.

    Returns:
        One sample for each model, equal on all workers.

    Raises:
        ConfigError: No image of a kind can be read.
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
        # labeled and unlabeled rows apart, as in memory
        pieces = [order[:num], order[num:]]
        # A group of rows in a file has both kinds.
        if train.images.groups(order[:0]) is not None:
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
    """Return the number of rows of a batch, if ``num_rows`` rows are in memory.

    It does not depend on the number of workers.
    """
    return min(
        config.train.eval_batch_size, max(MIN_BATCH_ROWS, -(-num_rows // MAX_BATCHES))
    )


def features_by_all(
    config: Config,
    models: Sequence[UnoModel],
    batches: Sequence[np.ndarray],
    load: Load,
) -> tuple[list[Tensor], Tensor]:
    """Compute features of images 0 to n - 1 by all workers together.

    Every worker calls this with the same arguments, and computes a part of the batches.

    Args:
        config: The configuration of the run.
        models: The models, in eval mode.
        batches: The numbers of the images of each batch. Together they are 0 to n - 1.
        load: Reads the images of batches, see :data:`Load`.

    Returns:
        The features (n, D) by each model, on its device, and bool (n,) on the CPU,
        which images could be read. The features of the others are zeros.
    """
    (rank, world), num, device = (
        distributed.rank_and_world(),
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
        distributed.all_reduce_sum_(features) for features in found
    ], distributed.all_reduce_sum_(ok).cpu() > 0


def _resident(
    train: TrainSet, rows: Sequence[np.ndarray], batches: Sequence[np.ndarray]
) -> Iterator[tuple[Tensor | RowBlocks, np.ndarray]]:
    """Yield the images of batches of rows in memory, as :data:`Load` does.

    Args:
        train: The training data, in memory.
        rows: The numbers of the chosen labeled rows, and of the chosen unlabeled rows.
        batches: For each batch positions in ``rows``, labeled ones first. A batch holds
            rows of one kind.
    """
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
    """Yield the images of batches that are decoded now, as :data:`Load` does.

    Args:
        decode: Decodes batches of row numbers of a source.
        numbers: int64 (n,), the row number in the source of each image.
        batches: For each batch positions in ``numbers``.
    """
    for _, pixels, reasons in decode(numbers[batch] for batch in batches):
        yield pixels, ok_mask(reasons)


def _projections_(model: UnoModel, features: Tensor) -> Tensor:
    """Compute the projections of features, at length one.

    The running statistics of the projector's BatchNorm become those of these features,
    and the model is left in training mode.

    Args:
        model: A model with projection heads.
        features: (N, D).

    Returns:
        (H or 2H, N, P): those of the cluster heads, then of the overclustering heads.
    """
    projector = model.projector
    assert projector is not None
    momentum, projector.bn.momentum = projector.bn.momentum, 1.0
    model.train()
    projections = unit(projector(unit(features) if model.normalize_input else features))
    projector.bn.momentum = momentum
    return projections


def set_to_class_means_(prototypes: Tensor, directions: Tensor, group: Tensor) -> None:
    """Set each prototype to the mean direction of its group of rows, in place.

    Args:
        prototypes: (K, P). A prototype without rows stays.
        directions: (N, P), rows of length one.
        group: int64 (N,), the prototype 0 .. K - 1 of each row; -1 for none.
    """
    # (N, K); a row with -1 is in no group.
    member = F.one_hot(group.clamp(min=0), len(prototypes)) * (group >= 0)[:, None]
    member = member.to(directions)
    sums = member.T @ directions
    prototypes.copy_(
        torch.where(
            member.sum(dim=0)[:, None] > 0, F.normalize(sums, dim=1), prototypes
        )
    )
