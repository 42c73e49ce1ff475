"""Initialize the prototypes of discovery by k-means, and compute the class prior.

Prototypes start at clusters of the features of the training rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno import distributed
from uno.clustering.kmeans import FREE, kmeans, seeded_kmeans, whiten
from uno.config import Config
from uno.data.memory import Read
from uno.data.stream import TrainData
from uno.errors import ConfigError
from uno.heads import unit
from uno.method import load
from uno.model import UnoModel, features_of

NUM_STARTS = 10
MAX_ROWS = 20_000  # of each kind that are clustered


class FeatureClusters(NamedTuple):
    """A clustering of N_u unlabeled rows into K clusters, one for each output.

    In the GCD setting, in which unlabeled rows may belong to known classes, K is the
    number C of all classes and the known ones come first. In other settings K is the
    number C_u of novel classes.

    Attributes:
        assignment: The cluster of each unlabeled row, int64 (N_u,).
        centers: The mean direction of each cluster's rows, (K, D). In the GCD setting
            the labeled rows count, too.
        prior: The share of the unlabeled rows in each cluster, (K,). Shares are
            positive and sum to one.
    """

    assignment: Tensor
    centers: Tensor
    prior: Tensor


def cluster_features(
    unlabeled: Tensor,
    labeled: Tensor,
    labels: Tensor,
    num_novel: int,
    setting: str | None,
    seed: int,
) -> FeatureClusters:
    """Cluster the features of unlabeled rows by k-means, on the CPU.

    In the GCD setting there are K = C_l + C_u clusters. They come from k-means of all
    rows along the K - 1 leading whitened principal directions, in which rows are scaled
    to length one again, with the labeled rows fixed to their classes. In other settings
    there are K = C_u clusters, from plain k-means of the unlabeled rows. The best of
    ``NUM_STARTS`` (10) starts counts.

    Every row is first scaled to length one, because only directions count. In the GCD
    setting of Caltech-24 the K - 1 leading directions give 95% of the rows their class.
    Features as they are give 94%, and 96 directions give 83%. In other settings rows
    are centered by the mean of all rows, labeled ones included, and scaled once more.
    Without this, ten starts of k-means miss the best optimum with one seed in six.

    Args:
        unlabeled: Features of unlabeled rows, (N_u, D). Outside the GCD setting N_u is
            at least C_u.
        labeled: Features of labeled rows, (N_l, D).
        labels: The known classes of the labeled rows, int64 (N_l,), 0 to C_l - 1.
        num_novel: The number of novel classes C_u.
        setting: ``gcd`` if unlabeled rows may belong to known classes, otherwise
            another text or None.
        seed: The seed of k-means.

    Returns:
        The cluster of each unlabeled row, 0 to K - 1; the mean direction of each
        cluster's rows, which is the unit mean of the features after only the first
        scaling, and zeros without rows; and the shares of unlabeled rows in the
        clusters as class prior. In the GCD setting the known classes come first, and
        labeled rows count in the mean directions. A cluster without unlabeled rows
        counts as one row in the prior, so that its output can still get rows later. All
        tensors are on the CPU.
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
    return FeatureClusters(assignment, F.normalize(centers, dim=1), sizes / sizes.sum())


def shrink_prior(prior: Tensor, found: Tensor, true: Tensor) -> Tensor:
    """Move the shares of rows in k-means clusters toward equal shares, as class prior.

    The known classes tell how far the sizes of k-means clusters can be trusted: the
    labeled rows were clustered, too (:func:`compare_known_shares`), and the shares of
    rows in their clusters are compared with those in their classes. All shares are
    taken relative to an equal share, minus one. The mean square v of ``prior`` comes
    from the sizes of the classes and from the error of k-means. The error ``found`` -
    ``true`` has the mean square e. The part max(0, 1 - e / v) of each deviation from an
    equal share is kept (James and Stein, 1961). That is 99% for Caltech-24, and nothing
    for CIFAR10 at 96 px.

    Args:
        prior: The share of unlabeled rows in each of K k-means clusters, (K,). They sum
            to one.
        found: The share of labeled rows in the k-means cluster that matches each known
            class, (C_l,).
        true: The share of labeled rows in each known class, (C_l,).

    Returns:
        The shares (K,) after the move, which sum to one.
    """
    spread, error = len(prior) * prior - 1, len(true) * (found - true)
    kept = 1 - error.square().mean() / spread.square().mean().clamp(min=1e-12)
    return (1 + kept.clamp(min=0) * spread) / len(prior)


def compare_known_shares(
    labeled: Tensor, labels: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Cluster labeled rows by k-means, and return the sizes of clusters and classes.

    k-means does not use the labels, and makes as many clusters as there are classes.
    The rows are first scaled to length one, centered and scaled again. The Hungarian
    algorithm then matches clusters with classes, so that most rows agree.

    Args:
        labeled: Features of labeled rows, (N_l, D).
        labels: The known classes of the rows, int64 (N_l,).
        seed: The seed of k-means.

    Returns:
        Two tensors (C_l,) with a share of rows, 0 to 1, for each known class. The first
        has the share in the cluster that is matched one to one with the class, the
        second the share in the class itself.
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
    """Initialize the prototypes of a model in place, and compute the class prior.

    With ``model.prototype_init kmeans`` prototypes are moved to clusters of the
    features of a sample of the training rows. Known prototypes go to the means of the
    labeled rows of their classes, unless ``keep_known``. The prototypes of each cluster
    head go to the means of the projections of the unlabeled rows in each novel cluster
    of :func:`cluster_features`, and those of each overclustering head to the same means
    for a finer k-means, of its own, of the features of the unlabeled rows in all novel
    clusters. If these rows are fewer than the prototypes of an overclustering head, all
    overclustering heads keep their prototypes. Rows are scaled to length one before a
    mean is taken, and so is the mean; a prototype without rows stays. The running
    statistics of the projector's BatchNorm then change, too, and the model is left in
    training mode. With ``model.prototype_init random`` the model is not changed, and no
    features are computed if the class prior is uniform. All workers call this; rank 0
    makes the novel clusters.

    Args:
        config: The configuration of the run.
        model: The model, whose prototypes are changed.
        train: The training data.
        extra: Tensors by name that the method keeps in ``TrainState.extra``. They are
            part of the result.
        keep_known: Whether the known prototypes stay as they are.

    Returns:
        The tensors of ``extra``, and "prior", the class prior: the expected shares of
        unlabeled rows in the novel classes (C_u,), or in the GCD setting in all classes
        (C,). The prior is that of ``objective.class_prior``; if that is None, it is
        "kmeans" in the GCD setting for methods with UNO's projection heads, and
        "uniform" otherwise. A prior of k-means has the shares of the clusters. Outside
        the GCD setting :func:`shrink_prior` moves them toward equal shares. A uniform
        prior has equal shares in the GCD setting; outside it there is no "prior" then,
        and the result is ``extra`` itself. ``extra`` is not changed.

    Raises:
        ConfigError: Features are needed, and no labeled or no unlabeled image of the
            sample can be read.
    """
    is_gcd = config.data.setting == "gcd"
    num_known, num_novel = train.num_known, train.num_novel
    has_projection_heads = load(config.method).has_projection_heads
    default_prior = "kmeans" if is_gcd and has_projection_heads else "uniform"
    prior = config.objective.class_prior or default_prior
    if prior == "uniform" and is_gcd:
        num_classes = num_known + num_novel
        extra = extra | {"prior": torch.full((num_classes,), 1 / num_classes)}
    if prior == "uniform" and config.model.prototype_init == "random":
        return extra
    labeled, labels, unlabeled = training_features(config, model, train)

    def compute() -> dict[str, Tensor]:
        """Cluster the sampled features of the training rows.

        Only rank 0 calls this. :func:`cluster_features` does the work.

        Returns:
            The fields of :class:`FeatureClusters` by name.
        """
        setting, seed = config.data.setting, config.seed
        clustering = cluster_features(
            unlabeled, labeled, labels, num_novel, setting, seed
        )
        return clustering._asdict()

    device = model.known.weight.device
    clustering = FeatureClusters(**distributed.compute_on_rank0(compute, device))
    if config.model.prototype_init == "kmeans":
        # A row of a known class gets a negative number.
        first_novel = num_known if is_gcd else 0
        _move_prototypes_(
            model,
            labeled,
            None if keep_known else labels,
            unlabeled,
            clustering.assignment - first_novel,
            config.seed,
        )
    if prior == "uniform":
        return extra
    shares = clustering.prior
    if not is_gcd:
        shares = shrink_prior(
            shares, *compare_known_shares(labeled, labels, config.seed)
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

    The known prototypes become means of features, and those of the cluster and
    overclustering heads means of projections. The rows of a mean are scaled to length
    one first, and so is the mean. A prototype without rows stays. The model is left in
    training mode.

    Args:
        model: The model, which is changed, including the running statistics of the
            projector's BatchNorm. They become those of all given rows.
        labeled: Features of labeled rows, (N_l, D).
        labels: The known classes of these rows, int64 (N_l,); None keeps the known
            prototypes as they are.
        unlabeled: Features of unlabeled rows, (N_u, D).
        cluster: int64 (N_u,), the novel cluster of each unlabeled row; negative for
            rows of known classes.
        seed: The seed of the k-means of the overclustering heads. It clusters the
            features of the unlabeled rows of novel clusters, once for each head. If
            these rows are fewer than the prototypes of a head, the overclustering heads
            stay as they are.
    """
    device, num_heads = model.known.weight.device, model.num_heads
    is_novel = cluster >= 0
    if labels is not None:
        set_to_class_means_(model.known.weight, unit(labeled).to(device), labels)
    projections = _projections_(model, torch.cat([unlabeled, labeled]).to(device))
    projections = projections[:, : len(unlabeled)]
    for h in range(num_heads):
        set_to_class_means_(model.novel.weight[h], projections[h], cluster)
    if model.over is None:
        return
    rows, num_clusters = unit(unlabeled[is_novel]), model.over.weight.shape[1]
    if len(rows) < num_clusters:
        return
    for h in range(num_heads):
        fine_cluster = torch.full_like(cluster, -1)
        fine_cluster[is_novel] = kmeans(rows, num_clusters, 1, seed + h).assignment
        set_to_class_means_(
            model.over.weight[h], projections[num_heads + h], fine_cluster
        )


class Sample(NamedTuple):
    """Features of a sample of the training rows, a vector of D numbers for each row.

    :func:`training_features` makes it, on the CPU, of at most ``MAX_ROWS`` labeled and
    ``MAX_ROWS`` unlabeled rows, and one labeled row of each class that would have none.

    Attributes:
        labeled: Features of the labeled rows, (N_l, D).
        labels: The known classes of these rows, int64 (N_l,).
        unlabeled: Features of the unlabeled rows, (N_u, D).
    """

    labeled: Tensor
    labels: Tensor
    unlabeled: Tensor


def training_features(
    config: Config, model: UnoModel, train: TrainData, with_unlabeled: bool = True
) -> Sample:
    """Compute the encoder's features of a sample of the training rows.

    The rows are evenly spaced; all rows of a kind are taken if it has no more than
    ``MAX_ROWS``. Of streamed images that are stored together, such as in a row group,
    whole groups are taken, unless the groups are sorted by class
    (:func:`uno.data.images.spread`). One labeled row is added of each class that would
    have none. Images that cannot be read are left out. All workers call this, and each
    computes a part.

    Args:
        config: The configuration of the run.
        model: The model. It is in eval mode meanwhile, and has its former mode
            afterwards.
        train: The training data.
        with_unlabeled: Whether the sample has unlabeled rows.

    Returns:
        Features of the labeled rows, at most ``MAX_ROWS`` and the added ones; their
        classes; and features of at most ``MAX_ROWS`` unlabeled rows, (0, D) without
        ``with_unlabeled``. They are equal on all workers, and on the CPU.

    Raises:
        ConfigError: The sample has labeled images and none of them can be read, or
            unlabeled ones and none of them.
    """
    labeled_rows, unlabeled_rows = train.choose_rows(MAX_ROWS)
    if not with_unlabeled:
        unlabeled_rows = unlabeled_rows[:0]
    num_labeled, size = len(labeled_rows), config.train.eval_batch_size
    batches, read = train.plan_reading([labeled_rows, unlabeled_rows], size)
    was_training = model.training
    features, is_ok = compute_features_together(config, model.eval(), batches, read)
    model.train(was_training)
    is_labeled_ok, is_unlabeled_ok = is_ok[:num_labeled], is_ok[num_labeled:]
    for kind, ok in (("labeled", is_labeled_ok), ("unlabeled", is_unlabeled_ok)):
        if len(ok) and not ok.any():
            raise ConfigError(f"no {kind} image can be read")
    features = features.cpu()
    return Sample(
        labeled=features[:num_labeled][is_labeled_ok],
        labels=train.labels.cpu()[torch.from_numpy(labeled_rows)][is_labeled_ok],
        unlabeled=features[num_labeled:][is_unlabeled_ok],
    )


def compute_features_together(
    config: Config, model: UnoModel, batches: Sequence[np.ndarray], read: Read
) -> tuple[Tensor, Tensor]:
    """Compute the features of n images, on all workers together.

    Every worker calls this with the same arguments, and computes a part of the batches.

    Args:
        config: The configuration of the run, which says how images are normalized.
        model: The model, in eval mode.
        batches: For each batch the numbers of its images, int64 (b,). All batches
            together have each number from 0 to n - 1 once.
        read: Takes some of the batches. For each it yields the images uint8 (b, 3, S,
            S), their features (b, D) or cached features (b, 1 + V, D), of which the
            first are used; and which of them could be read, bool (b,).

    Returns:
        Two values, equal on all workers. The first has the features of all images,
        float32 (n, D), on the model's device. The second is a mask, bool (n,) on the
        CPU, of the images that could be read. The features of the others are zeros.
    """
    rank, world_size = distributed.rank_and_world()
    sizes = np.array([len(batch) for batch in batches], dtype=np.int64)
    num_images, device = int(sizes.sum()), model.known.weight.device
    width = int(model.encoder.num_features)  # type: ignore[arg-type]
    features = torch.zeros(num_images, width, device=device)
    is_ok = torch.zeros(num_images, device=device)
    # contiguous batches for each worker, with about equally many images
    middle = sizes.cumsum() - sizes / 2
    rank_of_batch = middle * world_size // max(1, num_images)
    mine = [batches[i] for i in np.flatnonzero(rank_of_batch == rank).tolist()]
    for batch, (images, good) in zip(mine, read(mine), strict=True):
        rows = torch.from_numpy(batch[good]).to(device)
        if len(rows):
            is_ok[rows] = 1
            images = images if good.all() else images[torch.from_numpy(good)]
            features[rows] = features_of(model, images, config)
    distributed.all_reduce_sum_(features)
    return features, distributed.all_reduce_sum_(is_ok).cpu() > 0


def _projections_(model: UnoModel, features: Tensor) -> Tensor:
    """Compute the projections of features by all heads, scaled to length one.

    The running statistics of the projector's BatchNorm become those of these features,
    and the model is left in training mode.

    Args:
        model: A model with projection heads. It is changed.
        features: Features of the encoder, (N, D).

    Returns:
        Projections by H cluster heads, then by H overclustering heads if there are any,
        (H or 2H, N, P).
    """
    projector = model.projector
    assert projector is not None
    momentum, projector.bn.momentum = projector.bn.momentum, 1.0
    model.train()
    projections = unit(projector(unit(features) if model.normalize_input else features))
    projector.bn.momentum = momentum
    return projections


def set_to_class_means_(prototypes: Tensor, directions: Tensor, group: Tensor) -> None:
    """Set each prototype to the mean of its rows, scaled to length one, in place.

    Args:
        prototypes: Prototypes of classes or clusters, (K, P). A prototype without rows
            is not changed.
        directions: Rows of length one, (N, P).
        group: The prototype 0 .. K - 1 to whose mean each row belongs, int64 (N,); a
            negative number for none.
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
