"""Estimate the number of novel classes among unlabeled rows, from the known classes.

The features of a frozen encoder are clustered as they are
(:mod:`uno.clustering.num_classes`). A network that is trained on the images would know
the classes that :mod:`uno.clustering.num_classes` hides, and its features are not those
of the calibration. So a network is pretrained without them, by a procedure that follows
DTC (Han et al., ICCV 2019). Some known classes are held out as probe classes, and the
encoder is pretrained on the rest. Some probe classes are anchors: their rows are fixed
to one cluster each. The rows of the other probe classes, the validation classes, are as
free as the unlabeled rows. The estimate is the number k of novel clusters at which the
clusters fit the validation classes best.

It differs from DTC in three ways. k is chosen by the F1 score
(:func:`uno.clustering.num_classes.class_f1`) instead of accuracy and silhouette.
Features are whitened. Several splits of the classes and several choices of anchors vote
for an interval.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from uno.clustering import num_classes
from uno.clustering.kmeans import FREE, VARIANCE, constrained_kmeans, whiten
from uno.config import Config, PhaseConfig, config_hash
from uno.data.files import Storage, parse_json
from uno.data.memory import TrainSet
from uno.data.sampling import ESTIMATE
from uno.encoders.build import code_of
from uno.errors import ConfigError, StorageError, one_line
from uno.limits import MAX_STATE_BYTES
from uno.model import features_of
from uno.results.metrics import confusion
from uno.runs import ESTIMATE_FILE, run
from uno.text import plural
from uno.threads import torch_threads
from uno.training import LocalWorker

FINGERPRINT_ROWS = 1024
MIN_KNOWN = 4  # known classes: two to pretrain on and two probe classes
FEATURES = "features.safetensors"

Scores = dict[tuple[int, int], list[float]]
"""The results of :func:`score_num_novel`, by split index and k."""
Results = Iterator[tuple[int, Any]]
Tasks = Callable[[Callable[..., Any], tuple[Any, ...], Sequence[Any]], Results]
"""Run independent tasks: (function, shared arguments, items) -> results.

Yields (position, ``function(*shared, items[position])``) for every item, in any order.
"""


def run_local(
    function: Callable[..., Any], shared: tuple[Any, ...], items: Sequence[Any]
) -> Results:
    """Call a function for several items in this process, one after the other.

    It is one of the ways to run independent tasks, see :data:`Tasks`. An item is
    computed when its result is asked for. An error of the function appears then.

    Args:
        function: Called as ``function(*shared, item)``.
        shared: The arguments that all calls have in common.
        items: One item for each call.

    Returns:
        An iterator of (position of the item, result).
    """
    return ((position, function(*shared, item)) for position, item in enumerate(items))


@dataclass(frozen=True)
class Settings:
    """The settings of the estimate of the number of novel classes.

    Some known classes, the probe classes, are held out of pretraining, and their rows
    are clustered with the unlabeled ones. The rows of some probe classes, the anchors,
    are fixed to one cluster each. For a frozen encoder only ``max_novel`` is read.

    Attributes:
        num_splits: Number of splits of the known classes into probe classes and others,
            but at most one for each class. An encoder is pretrained for each.
        max_novel: Largest number of novel classes that is tried; None for the number of
            known classes, at least 10. Numbers above that of the unlabeled rows or
            ``max_rows`` are not tried. For a frozen encoder it is only a limit, and
            None sets none.
        num_roles: Largest number of choices of anchors in a split.
        anchor_ratio: Share of the probe classes that are anchors (as in DTC).
        num_restarts: Number of starts of k-means (as in DTC).
        variance: Share of the variance that the whitened directions explain.
        quantile: Each choice of anchors votes for a number of classes. This is the
            share of the votes that may lie below the interval, and above it.
        max_rows: Largest number of unlabeled rows, and of labeled rows, to cluster.
    """

    num_splits: int = 3
    max_novel: int | None = None
    num_roles: int = 6
    anchor_ratio: float = 0.6
    num_restarts: int = 10
    variance: float = VARIANCE
    quantile: float = 0.2
    max_rows: int = 50_000


class Split(NamedTuple):
    """A split of the known classes for one pretraining, as sorted class indices.

    Attributes:
        pretrain: The classes with which the encoder is pretrained.
        probe: The classes that are held out of pretraining, to judge clusterings by
            them.
    """

    pretrain: tuple[int, ...]
    probe: tuple[int, ...]


class Features(NamedTuple):
    """The features of the rows that are clustered for one split of the known classes.

    Attributes:
        points: Whitened features of length one, (N, D).
        labels: Known classes (N,), -1 for unlabeled rows.
    """

    points: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """The estimated number of novel classes, as stored in ``estimate.json``.

    Attributes:
        num_novel: The estimate, with ``low <= num_novel <= high``.
        low: Lower end of the interval.
        high: Upper end of the interval.
        suggested: Number of classes to train with, see :func:`suggest`. For a frozen
            encoder it is ``num_novel``.
        at_limit: Whether the interval reaches the largest k that was tried. For a
            frozen encoder, whether it reaches the setting ``max_novel``; False without
            it.
        ks: The numbers of novel classes that were tried.
        curves: Of a frozen encoder "probability", the probability of each k. Otherwise
            "f1", the mean F1 score over all splits and choices of anchors at each k.
        settings: The :class:`Settings`, as a mapping. For a frozen encoder it has only
            ``max_novel``.
        key: Hash of everything that the estimate depends on.
        splits: For each split the names of its classes in "pretrain" and "probe", see
            :class:`Split`; and in "roles" for each choice of anchors their names
            ("anchors"), the best k by this choice ("vote"), and the F1 score at each k
            ("f1"). It is empty for a frozen encoder.
    """

    num_novel: int
    low: int
    high: int
    suggested: int
    at_limit: bool
    ks: list[int]
    curves: dict[str, list[float]]
    settings: dict[str, Any]
    key: str
    splits: list[dict[str, Any]] = field(default_factory=list)


def require_enough_rows(num_known: int, num_unlabeled: int, frozen: bool) -> None:
    """Check that there are enough rows to estimate the number of novel classes.

    Args:
        num_known: Number of known classes that have a labeled training image.
        num_unlabeled: Number of unlabeled training images.
        frozen: Whether the encoder is frozen.

    Raises:
        ConfigError: There are fewer than 4 known classes (2 with a frozen encoder), or
            fewer than 2 unlabeled images.
    """
    least = num_classes.MIN_KNOWN if frozen else MIN_KNOWN
    if num_known < least:
        needs = f"estimating the number of classes needs at least {least}"
        text = f"{needs} known classes with images, found {num_known}"
        raise ConfigError(f"{text}; pass --num-novel")
    if num_unlabeled < 2:
        found = plural(num_unlabeled, "unlabeled image")
        raise ConfigError(f"{found}: nothing to estimate; add unlabeled images")


def estimate_num_novel(
    config: Config,
    train: TrainSet,
    known: Sequence[str],
    storage: Storage,
    device: torch.device | str = "cpu",
    settings: Settings | None = None,
    tasks: Tasks = run_local,
    report: Callable[[str], None] = lambda line: None,
) -> Estimate:
    """Estimate the number of novel classes among unlabeled rows, and store it.

    The estimate is ``estimate.json`` in ``storage``. Unless the encoder is frozen,
    checkpoints of pretrained encoders and features are stored there, too, in folders
    ``pretrain-HASH`` with a hash of what they depend on. The same call continues after
    an interruption, and returns the stored estimate at once if it is finished.

    Args:
        config: The configuration of the run. If ``model.finetune`` is "none", the
            features of the frozen encoder are clustered, and nothing is pretrained.
        train: The training rows, on the host: images, or features if the encoder is
            frozen. Its ``num_novel`` is not read.
        known: The names of the known classes, by index.
        storage: The directory of the run, locked by this command.
        device: The device of pretraining and clustering. The features of a frozen
            encoder are clustered on the CPU.
        settings: The settings of the estimate; None for the defaults of
            :class:`Settings`.
        tasks: Runs pretraining and clustering as ``tasks(function, shared, items)``,
            see :data:`Tasks`; by default :func:`run_local`, in this process. The
            results do not depend on where. It is not used for a frozen encoder.
        report: Called with a line of text after each split whose features are there,
            computed now or stored before; not for a frozen encoder. By default nothing
            is reported.

    Returns:
        The estimate with its interval, as stored in ``estimate.json``.

    Raises:
        ConfigError: There are too few known classes or unlabeled rows, see
            :func:`require_enough_rows`.
        StorageError: A stored file cannot be read or written.
        UnoError: A pretraining raises one of the errors of
            :func:`uno.runs.run.run_phase`.
    """
    settings, num_unlabeled = settings or Settings(), len(train.unlabeled_images)
    frozen = config.model.finetune == "none"
    present = sorted(set(train.labels.tolist()))
    require_enough_rows(len(present), num_unlabeled, frozen)
    if frozen:
        return estimate_frozen(config, train, storage, settings)
    splits = class_splits(present, settings.num_splits, config.seed)
    ks = list(range(_max_novel(settings, train) + 1))
    configs, keys, data, code = (
        [],
        [],
        _fingerprint(train),
        code_of(config.model.encoder),
    )
    # only the classes for pretraining are known in the pretraining of a split
    for split in splits:
        only = {
            "known_classes": ",".join(known[c] for c in split.pretrain),
            "num_novel": None,
        }
        own = {
            "data": config.data.model_copy(update=only),
            "discover": PhaseConfig(),
            "output": None,
        }
        configs.append(config.model_copy(update=own))
        used = [settings.variance, settings.max_rows]
        keys.append(
            _digest(
                config_hash(configs[-1]),
                data,
                split,
                used,
                *([code] if code else []),
            )
        )
    key = _digest(keys, asdict(settings), ks)
    if (stored := read_estimate(storage, key)) is not None:
        return stored

    jobs = list(
        zip(
            splits,
            configs,
            (storage.below(f"pretrain-{key}") for key in keys),
            strict=True,
        )
    )
    features: dict[int, Features] = {}
    for index, found in tasks(pretrain_split, (train, settings, str(device)), jobs):
        features[index] = found
        report(f"pretrained {len(features)} of {len(splits)} splits")
    shared = (
        splits,
        [features[i] for i in range(len(splits))],
        config,
        settings,
        str(device),
    )
    # the longest tasks come first
    items = [(i, k) for k in reversed(ks) for i in range(len(splits))]
    scores = {
        items[position]: found
        for position, found in tasks(score_num_novel, shared, items)
    }
    result = _combine(splits, ks, scores, known, settings, config.seed, key)
    storage.write(ESTIMATE_FILE, json.dumps(asdict(result), indent=1).encode())
    return result


def estimate_frozen(
    config: Config, train: TrainSet, storage: Storage, settings: Settings
) -> Estimate:
    """Estimate the number of novel classes among the features of a frozen encoder.

    Args:
        config: The configuration of the run, whose setting and seed are used.
        train: The training rows, with features float32 (N, V, D). The first view is
            used.
        storage: The directory with ``estimate.json``. If the file holds an estimate
            from the same data, settings and calibration, that is returned; otherwise
            the file is written or replaced.
        settings: Its ``max_novel`` is the largest number that is considered, where a
            number below 2 counts as 2. None for no limit other than the one of
            :func:`uno.clustering.num_classes.estimate_num_classes`. Nothing else is
            read.

    Returns:
        The estimate with its interval.

    Raises:
        StorageError: The file cannot be read or written.
    """
    gcd, most = config.data.setting == "gcd", settings.max_novel
    fitted = num_classes.calibration()
    key = _digest(_fingerprint(train), gcd, config.seed, most, fitted)
    if (stored := read_estimate(storage, key)) is not None:
        return stored
    found = num_classes.estimate_num_classes(
        train.labeled_images[:, 0],
        train.labels.unique(return_inverse=True)[1],
        train.unlabeled_images[:, 0],
        gcd,
        config.seed,
        most,
    )
    result = Estimate(
        num_novel=found.num_novel,
        low=found.low,
        high=found.high,
        suggested=found.num_novel,
        at_limit=most is not None and found.high >= most,
        ks=[num_classes.MIN_NOVEL + i for i in range(len(found.probabilities))],
        curves={"probability": list(found.probabilities)},
        settings={"max_novel": most},
        key=key,
    )
    storage.write(ESTIMATE_FILE, json.dumps(asdict(result), indent=1).encode())
    return result


def read_estimate(storage: Storage, key: str) -> Estimate | None:
    """Read the stored estimate of the number of novel classes.

    Args:
        storage: The directory with ``estimate.json``.
        key: The hash of everything that the estimate depends on.

    Returns:
        The estimate; None if it is missing, damaged or has another key.

    Raises:
        StorageError: The file cannot be read, or has more than ``MAX_STATE_BYTES``.
    """
    if storage.exists(ESTIMATE_FILE):
        with suppress(ValueError, TypeError, AttributeError):
            stored = parse_json(storage.read(ESTIMATE_FILE, MAX_STATE_BYTES))
            if stored.get("key") == key:
                return Estimate(**stored)
    return None


def _combine(
    splits: list[Split],
    ks: list[int],
    scores: Scores,
    known: Sequence[str],
    settings: Settings,
    seed: int,
    key: str,
) -> Estimate:
    """Combine the scores of all splits and numbers of clusters into the estimate.

    The estimate is the k with the largest F1 score, averaged over the choices of
    anchors of all splits. It is the largest such k, but at least 1. Each choice of
    anchors votes for its own best k, and the interval comes from the votes, extended to
    hold the estimate. Anchors are held-out known classes whose rows are fixed to
    clusters. Nothing is written.

    Args:
        splits: The splits of the known classes.
        ks: The numbers of novel classes that were tried, ascending from 0.
        scores: The F1 scores for each split index and k, one for each choice of
            anchors, see :func:`score_num_novel`.
        known: The names of the known classes, by index.
        settings: The settings of the estimate.
        seed: The seed of :func:`anchor_choices`.
        key: The hash of everything that the estimate depends on, a field of the result.
    """
    described, all_roles = list[dict[str, Any]](), list[dict[str, Any]]()
    for i, split in enumerate(splits):
        curves = np.transpose([scores[i, k] for k in ks]).tolist()
        choices = anchor_choices(split, settings, seed)
        roles = [
            {
                "anchors": [known[c] for c in anchors],
                "vote": largest_best(curve),
                "f1": curve,
            }
            for anchors, curve in zip(choices, curves, strict=True)
        ]
        names = {
            part: [known[c] for c in classes]
            for part, classes in split._asdict().items()
        }
        described.append({**names, "roles": roles})
        all_roles += roles
    mean = np.mean([role["f1"] for role in all_roles], axis=0).tolist()
    point = max(1, largest_best(mean))
    ends = (point, *interval([role["vote"] for role in all_roles], settings.quantile))
    low, high = min(ends), max(ends)
    return Estimate(
        num_novel=point,
        low=low,
        high=high,
        suggested=suggest(point, low, high),
        at_limit=high >= ks[-1],
        ks=ks,
        curves={"f1": mean},
        splits=described,
        settings=asdict(settings),
        key=key,
    )


def interval(votes: Sequence[int], quantile: float) -> tuple[int, int]:
    """Return the interval of votes that leaves out a share of them on either side.

    Args:
        votes: Numbers of novel classes, one vote each.
        quantile: The share of the votes that may lie below the interval, and above it,
            0-0.5.

    Returns:
        The lower and the upper end, rounded outwards, at least 1.
    """
    low, high = np.quantile(votes, [quantile, 1 - quantile])
    return max(1, math.floor(low + 1e-9)), max(1, math.ceil(high - 1e-9))


def suggest(num_novel: int, low: int, high: int) -> int:
    """Return the number of novel classes to train with, from the estimated interval.

    One class too few costs more than one too many, because it merges two classes that
    nobody separates again. So this is ``high``. If ``high`` exceeds twice ``low``, it
    is the larger of ``num_novel`` and twice ``low``.

    Args:
        num_novel: The estimated number of novel classes.
        low: Lower end of its interval.
        high: Upper end of its interval.
    """
    return high if high <= 2 * low else max(num_novel, 2 * low)


def largest_best(curve: Sequence[float]) -> int:
    """Return the largest index at which a curve attains its maximum, within 1e-9.

    The index is the number k of novel classes, because the curves begin at k = 0.
    """
    return int(np.flatnonzero(np.asarray(curve) >= np.max(curve) - 1e-9)[-1])


def class_splits(classes: Sequence[int], num_splits: int, seed: int) -> list[Split]:
    """Draw different splits of the known classes into pretraining and probe classes.

    Probe classes are held out of pretraining. Of 7 or more classes, a rounded quarter
    are probe classes (DTC has 20 of 80), but at least 4, and at least 3 remain to
    pretrain on. Of 4 to 6 classes, 2 remain to pretrain on, and all others are probe
    classes. Every class is a probe class about equally often: of 80 classes and 3
    splits, in one split or in none.

    Args:
        classes: The indices of the known classes, at least 4.
        num_splits: The number of splits to draw. If it exceeds the number of classes,
            there are as many splits as classes.
        seed: The seed of the random order of the classes, by which they are divided.

    Returns:
        The splits, which are all different.
    """
    order = (
        np.random.default_rng([seed, ESTIMATE]).permutation(np.array(classes)).tolist()
    )
    total = len(order)
    num_probe = min(max(4, round(total / 4)), total - (2 if total < 7 else 3))
    num_splits = min(num_splits, total)
    turned = [
        np.roll(order, -(i * total // num_splits)).tolist() for i in range(num_splits)
    ]
    return [
        Split(tuple(sorted(t[num_probe:])), tuple(sorted(t[:num_probe])))
        for t in turned
    ]


def anchor_choices(
    split: Split, settings: Settings, seed: int
) -> list[tuple[int, ...]]:
    """Return different choices of the probe classes that are anchors.

    Probe classes are known classes that were held out of pretraining. The rows of an
    anchor are fixed to one cluster. The other probe classes of a choice validate the
    clusters.

    Args:
        split: The split with the probe classes.
        settings: Decides the number of choices and the share of anchors.
        seed: The seed of random choices.

    Returns:
        The class indices of the anchors of each choice, ascending: all possible choices
        if there are at most ``num_roles``, otherwise ``num_roles`` random ones. In each
        at least one probe class is an anchor, and at least one is not. Equal arguments
        give equal choices.
    """
    count = len(split.probe)
    anchors = min(max(1, round(settings.anchor_ratio * count)), count - 1)
    if math.comb(count, anchors) <= settings.num_roles:
        return list(itertools.combinations(split.probe, anchors))
    generator = np.random.default_rng([seed, ESTIMATE, *split.probe])
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < settings.num_roles:
        chosen[
            tuple(
                sorted(generator.choice(split.probe, anchors, replace=False).tolist())
            )
        ] = None
    return list(chosen)


def pretrain_split(
    train: TrainSet, settings: Settings, device: str, job: tuple[Split, Config, str]
) -> Features:
    """Pretrain an encoder on some of the known classes, and compute features with it.

    The pretext task runs before pretraining if it has epochs. The features belong to
    the rows that pretraining has no labels for: unlabeled rows and rows of probe
    classes, the known classes that are held out. In the GCD setting they belong to all
    rows. They are stored as ``features.safetensors`` in the folder of the split, next
    to the checkpoints of the pretraining. If they are there already, they are read, and
    nothing is pretrained.

    Args:
        train: The training rows, on the host.
        settings: The settings of the estimate.
        device: The device of pretraining, on which the features are computed, too.
        job: The split of the known classes, the configuration of its pretraining, and
            the path or URI of its folder.

    Returns:
        The whitened features, of length one, and the known classes as indices of the
        run, -1 for unlabeled rows. They come from a random sample: ``max_rows`` divided
        by the number of known classes (rounded down, at least 1) is the limit of each
        known class, and ``max_rows`` that of the unlabeled rows. The whitening is that
        of the whole sample, before rows of other classes are left out.

    Raises:
        StorageError: The file of the features cannot be read or written, or is damaged.
        UnoError: The pretraining raises one of the errors of
            :func:`uno.runs.run.run_phase`.
    """
    split, config, uri = job
    storage, place, pretrain = (
        Storage(uri),
        torch.device(device),
        torch.tensor(split.pretrain),
    )
    if storage.exists(FEATURES):
        try:
            return Features(**safetensors.numpy.load(storage.read(FEATURES)))
        except (SafetensorError, TypeError) as error:
            raise StorageError(
                f"{storage.path(FEATURES)} is damaged ({one_line(error)}); delete it,"
                " and it is computed again"
            ) from None
    with torch_threads(config.compute.threads or 1):
        own = torch.isin(train.labels, pretrain)
        labels = torch.tensor(_positions(train.labels[own], split.pretrain))
        part = TrainSet(
            train.labeled_images[own],
            labels,
            train.unlabeled_images,
            len(pretrain),
            1,
        )
        model = run.pretrain(
            config, part.to(place), LocalWorker(place), storage
        ).model.eval()

        free = torch.full((len(train.unlabeled_images),), FREE)
        labeled = _sample_rows(train.labels, settings.max_rows, config.seed)
        unlabeled = _sample_rows(free, settings.max_rows, config.seed)
        images = torch.cat(
            [train.labeled_images[labeled], train.unlabeled_images[unlabeled]]
        )
        labels = torch.cat([train.labels[labeled], free[unlabeled]])
        points = F.normalize(features_of(model, images, config).cpu(), dim=1)
        white = F.normalize(whiten(points, variance=settings.variance), dim=1)
        rest = ~torch.isin(labels, pretrain) | (config.data.setting == "gcd")
        found = Features(white[rest].numpy(), labels[rest].numpy())
    storage.write(FEATURES, safetensors.numpy.save(found._asdict()))
    return found


def _max_novel(settings: Settings, train: TrainSet) -> int:
    """Return the largest number of novel classes to try, without a frozen encoder.

    It is the setting ``max_novel``. Without this setting it is the number of known
    classes, or 10 if there are fewer. In either case it is never larger than the number
    of unlabeled rows or ``max_rows``.
    """
    num_known, num_unlabeled = len(train.labels.unique()), train.num_unlabeled
    return min(
        settings.max_novel or max(10, num_known), num_unlabeled, settings.max_rows
    )


def _sample_rows(labels: Tensor, max_rows: int, seed: int) -> Tensor:
    """Draw different rows at random, with the same limit for every class.

    Args:
        labels: Class of each row, int64 (N,). Unlabeled rows all have the same value,
            and count as one class.
        max_rows: The limit of a class is this number divided by the number of classes,
            rounded down, but at least 1.
        seed: The seed of the draw.

    Returns:
        Sorted row numbers, int64.
    """
    classes = labels.unique().tolist()
    cap = max(1, max_rows // len(classes))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.cat([order[labels[order] == c][:cap] for c in classes]).sort().values


def score_num_novel(
    splits: Sequence[Split],
    features: Sequence[Features],
    config: Config,
    settings: Settings,
    device: str,
    item: tuple[int, int],
) -> list[float]:
    """Cluster the rows of a split with k novel classes, for every choice of anchors.

    Anchors are probe classes of the split (classes without labels in pretraining) whose
    rows are fixed to one cluster each. The other probe classes are validation classes.
    There are k clusters more than probe classes. In the GCD setting the classes of
    pretraining have clusters, too: they are additional anchors, because some unlabeled
    rows belong to them.

    Args:
        splits: The splits of the known classes.
        features: The features of each split.
        config: The configuration of the run.
        settings: The settings of the estimate.
        device: The device of k-means.
        item: The index of the split, and k.

    Returns:
        For each choice of anchors, in the order of :func:`anchor_choices`, the mean F1
        score of the validation classes, 0-1, see
        :func:`uno.clustering.num_classes.class_f1`.
    """
    index, k = item
    split, labels = splits[index], torch.tensor(features[index].labels)
    points = torch.tensor(features[index].points, device=device)
    more_anchors = split.pretrain if config.data.setting == "gcd" else ()
    num_clusters, results = k + len(split.probe) + len(more_anchors), []
    with torch_threads(config.compute.threads or 1):
        for role, anchors in enumerate(anchor_choices(split, settings, config.seed)):
            validation = [c for c in split.probe if c not in anchors]
            fixed = torch.tensor(
                _positions(labels, (*anchors, *more_anchors)), device=device
            )
            seed = int(
                np.random.SeedSequence(
                    [config.seed, ESTIMATE, index, role, k]
                ).generate_state(1)[0]
            )
            clusters = constrained_kmeans(
                points, fixed, num_clusters, settings.num_restarts, seed
            ).assignment
            found = clusters.cpu().numpy()
            table = confusion(
                _positions(labels, validation), found, len(validation), num_clusters
            )
            results.append(
                num_classes.class_f1(table, np.bincount(found, minlength=num_clusters))
            )
    return results


def _positions(labels: Tensor, classes: Sequence[int]) -> NDArray[np.int64]:
    """Return the position of each label in ``classes``, int64 (N,), or FREE (-1).

    Args:
        labels: Class indices (N,), FREE for unlabeled rows.
        classes: Class indices. A label that is not among them gets FREE.
    """
    position = {c: i for i, c in enumerate(classes)}
    return np.array(
        [position.get(label, FREE) for label in labels.tolist()], dtype=np.int64
    )


def _digest(*parts: Any) -> str:
    """Return a hash of values that JSON can hold, as 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _fingerprint(train: TrainSet) -> str:
    """Return a hash of the images and labels of the training rows, 64 hex digits.

    The images may be features. The estimate depends on nothing else of the data.
    """
    total = hashlib.sha256()
    for rows in (train.labels, train.labeled_images, train.unlabeled_images):
        total.update(str(tuple(rows.shape)).encode())
        for part in rows.split(FINGERPRINT_ROWS):
            total.update(part.contiguous().numpy().data)
    return total.hexdigest()
