"""How many novel classes? From the known ones: hide some, and see which k finds them
again.

After DTC (Han et al., ICCV 2019). Some known classes are held out as probes and the
encoder is pretrained on the rest; some probe classes are anchors, whose rows are fixed
to a cluster, the rows of the others are as free as the unlabeled ones: the k at which
clusters fit these validation classes best is the answer. Unlike DTC (why: the record
``estimate-classes-digits``) k is chosen by :func:`class_f1` instead of accuracy and
silhouette, features are whitened, and several class splits and choices of anchors vote
for an interval.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uno.clustering import FREE, VARIANCE, constrained_kmeans, silhouette, whiten
from uno.config import Config, PhaseConfig, config_hash
from uno.data.files import Storage, parse_json
from uno.data.plan import ESTIMATE
from uno.data.resident import TrainSet
from uno.encoder import code_of
from uno.errors import ConfigError
from uno.limits import MAX_STATE_BYTES
from uno.model import features_of
from uno.results.metrics import Counts, cluster_accuracy, confusion
from uno.runs import ESTIMATE_FILE, run
from uno.text import plural
from uno.threads import torch_threads
from uno.train import LocalWorker

FINGERPRINT_ROWS = 1024
MIN_KNOWN = 4  # two classes to pretrain on, two to probe with
FEATURES = "features.safetensors"
CURVES = ("f1", "acc", "cvi")
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)

Scores = dict[tuple[int, int], list[dict[str, Any]]]
"""(split, k) -> what :func:`score_clusters` says of it."""
Results = Iterator[tuple[int, Any]]
Tasks = Callable[[Callable[..., Any], tuple[Any, ...], Sequence[Any]], Results]
"""Runs independent tasks: (position, ``function(*shared, items[position])``) of all
items, in any order.
"""


def run_local(
    function: Callable[..., Any], shared: tuple[Any, ...], items: Sequence[Any]
) -> Results:
    """:data:`Tasks` in this process, one after the other."""
    return ((position, function(*shared, item)) for position, item in enumerate(items))


@dataclass(frozen=True)
class Settings:
    """The procedure's numbers; the defaults are those of the record
    ``estimate-classes-digits``.
    """

    num_splits: int = 3  # class splits, each pretrains an encoder
    # largest k tried; default: the known classes, at least 10
    max_novel: int | None = None
    num_roles: int = 6  # choices of anchors within a split
    anchor_ratio: float = 0.6  # of the probe classes (DTC)
    num_restarts: int = 10  # of k-means (DTC)
    variance: float = VARIANCE  # that the whitened directions explain
    # of the largest cluster, that one which counts exceeds (DTC; ImageNet: .3)
    dtc_ratio: float = 0.01
    quantile: float = 0.2  # of the votes that may lie below, and above, the interval
    max_rows: int = 50_000  # unlabeled, and labeled, rows that are clustered
    silhouette_rows: int = 2_000


class Split(NamedTuple):
    """Known-class indices of one split, each sorted."""

    pretrain: tuple[int, ...]
    probe: tuple[int, ...]


class Features(NamedTuple):
    """Rows to cluster."""

    # (N, D), white; of unit length unless the encoder is frozen
    points: NDArray[np.float32]
    labels: NDArray[np.int64]  # (N,), -1 = unlabeled


@dataclass(frozen=True)
class Estimate:
    """The result, as stored in ``estimate.json``: ``low <= num_novel <= high``, and
    what it rests on.
    """

    num_novel: int
    low: int
    high: int
    suggested: int  # what to train with: one class too many costs less than one too few
    at_limit: bool  # the interval reaches the largest k tried
    ks: list[int]  # that were tried
    # means of f1, acc (fractions) and cvi (silhouette) at each k
    curves: dict[str, list[float]]
    # the plain method's k_acc, k_cvi, k, and of k clusters those that count: its answer
    dtc: dict[str, int]
    # at each ratio r, clusters with more unlabeled rows than r x the largest
    sizes: dict[str, list[float]]
    # class names, and the curves of every choice of anchors
    splits: list[dict[str, Any]]
    settings: dict[str, Any]
    key: str


def require_enough_rows(num_known: int, num_unlabeled: int) -> None:
    """Check that the number of novel classes can be estimated from so many rows.

    Args:
        num_known: Known classes that have a labeled training image.
        num_unlabeled: Unlabeled training images.

    Raises:
        ConfigError: There are too few of either.
    """
    if num_known < MIN_KNOWN:
        needs = f"estimating the number of classes needs at least {MIN_KNOWN}"
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
    """Estimate the number of classes among the unlabeled rows, and store it as
    ``estimate.json``.

    Pretraining and features are kept in ``storage`` under a hash of what they depend
    on: the same command continues after an interruption, and returns at once when it
    has finished. ``train`` is on the host, its ``num_novel`` is not read; ``known`` are
    names by index; ``tasks`` run on ``device``, anywhere, with the same results;
    ``report`` gets a line a split. ConfigError: too few known classes or unlabeled
    rows.
    """
    settings, num_unlabeled = settings or Settings(), len(train.unlabeled_images)
    frozen = config.model.finetune == "none"
    present = sorted(set(train.labels.tolist()))
    require_enough_rows(len(present), num_unlabeled)
    splits = class_splits(present, settings.num_splits, config.seed)
    ks = list(range(_max_novel(settings, train) + 1))
    configs, keys, data, code = (
        [],
        [],
        _fingerprint(train),
        code_of(config.model.encoder),
    )
    for split in splits:  # in the pretraining of which only its classes are known
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
        local_shard = [ks[-1] if frozen else settings.variance, settings.max_rows]
        keys.append(
            _digest(
                config_hash(configs[-1]),
                data,
                split,
                local_shard,
                *([code] if code else []),
            )
        )
    key = _digest(keys, asdict(settings), ks)
    if storage.exists(ESTIMATE_FILE):
        with suppress(ValueError, TypeError, AttributeError):  # damaged: estimated anew
            stored = parse_json(storage.read(ESTIMATE_FILE, MAX_STATE_BYTES))
            if stored.get("key") == key:
                return Estimate(**stored)

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
        if not frozen:
            report(f"pretrained {len(features)} of {len(splits)} splits")
    shared = (
        splits,
        [features[i] for i in range(len(splits))],
        config,
        settings,
        str(device),
    )
    # the long ones first
    items = [(i, k) for k in reversed(ks) for i in range(len(splits))]
    scores = {
        items[position]: found
        for position, found in tasks(score_clusters, shared, items)
    }
    result = _combine(splits, ks, scores, known, settings, key)
    storage.write(ESTIMATE_FILE, json.dumps(asdict(result), indent=1).encode())
    return result


def _combine(
    splits: list[Split],
    ks: list[int],
    scores: Scores,
    known: Sequence[str],
    settings: Settings,
    key: str,
) -> Estimate:
    described: list[dict[str, Any]] = []
    for i, split in enumerate(splits):
        roles = []
        # of a choice of anchors, at every k
        for found in zip(*(scores[i, k] for k in ks), strict=True):
            curves = {name: [one[name] for one in found] for name in CURVES}
            anchors = [known[c] for c in found[0]["anchors"]]
            roles.append(
                {"anchors": anchors, "vote": largest_best(curves["f1"]), **curves}
            )
        names = {
            part: [known[c] for c in classes]
            for part, classes in split._asdict().items()
        }
        described.append({**names, "roles": roles})
    all_roles = [role for split in described for role in split["roles"]]
    means = {
        name: np.mean([role[name] for role in all_roles], axis=0).tolist()
        for name in CURVES
    }
    point = max(1, largest_best(means["f1"]))
    ends = (point, *interval([role["vote"] for role in all_roles], settings.quantile))
    low, high = min(ends), max(ends)
    k_acc, k_cvi = largest_best(means["acc"]), largest_best(means["cvi"])

    # clusters with more unlabeled rows than that share of the most
    def large(k: int, ratio: float) -> float:
        sizes = [
            role["sizes"]
            for i in range(len(splits))
            for role in scores[i, min(k, ks[-1])]
        ]
        return float(np.mean([sum(n > ratio * max(s) for n in s) for s in sizes]))

    clusters = [large(point, ratio) for ratio in RATIOS]
    k = math.ceil((k_acc + k_cvi) / 2)
    dtc = {
        "k_acc": k_acc,
        "k_cvi": k_cvi,
        "k": k,
        "num_novel": round(large(k, settings.dtc_ratio)),
    }
    return Estimate(
        num_novel=point,
        low=low,
        high=high,
        suggested=suggest(point, low, high),
        at_limit=high >= ks[-1],
        ks=ks,
        curves=means,
        dtc=dtc,
        sizes={"ratios": list(RATIOS), "clusters": clusters},
        splits=described,
        settings=asdict(settings),
        key=key,
    )


def interval(votes: Sequence[int], quantile: float) -> tuple[int, int]:
    """(low, high): all but a share ``quantile`` of the votes on either side, rounded
    outwards, at least 1.
    """
    low, high = np.quantile(votes, [quantile, 1 - quantile])
    return max(1, math.floor(low + 1e-9)), max(1, math.ceil(high - 1e-9))


def suggest(num_novel: int, low: int, high: int) -> int:
    """What to train with: ``high``, for a class too few merges two that nobody takes
    apart again; but in an interval wider than twice ``low`` as many as that, or
    ``num_novel``.
    """
    return high if high <= 2 * low else max(num_novel, 2 * low)


def largest_best(curve: Sequence[float]) -> int:
    """The largest k that attains the curve's maximum."""
    return int(np.flatnonzero(np.asarray(curve) >= np.max(curve) - 1e-9)[-1])


def class_splits(classes: Sequence[int], num_splits: int, seed: int) -> list[Split]:
    """Different splits of the known ``classes``, at most as many as classes. A quarter
    are probes (paper: 20 of 80), at least 4 where 3 remain to pretrain on, else what
    two leave; every class about equally often.
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
    """Choices of anchors among the probe classes: all of them, or ``num_roles``
    random different ones.
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
    """Pretrain on the classes of a split and take the features of all the other rows,
    in the GCD setting of all rows; kept in its folder. ``job``: the split, the
    configuration of its pretraining, the folder's URI. Of a frozen encoder these are
    the first views of ``train``, whitened, of any length.
    """
    split, config, uri = job
    storage, place, pretrain = (
        Storage(uri),
        torch.device(device),
        torch.tensor(split.pretrain),
    )
    if storage.exists(FEATURES):
        return Features(**safetensors.numpy.load(storage.read(FEATURES)))
    with torch_threads(config.compute.threads or 1):
        frozen = config.model.finetune == "none"
        if not frozen:
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
        features = images[:, 0] if frozen else features_of(model, images, config).cpu()
        points = F.normalize(features, dim=1)
        most = len(split.pretrain) + len(split.probe) + _max_novel(settings, train) - 1
        white = (
            whiten(points, most)
            if frozen
            else whiten(points, variance=settings.variance)
        )
        if not frozen:
            white = F.normalize(white, dim=1)
        rest = ~torch.isin(labels, pretrain) | (config.data.setting == "gcd")
        found = Features(white[rest].numpy(), labels[rest].numpy())
    storage.write(FEATURES, safetensors.numpy.save(found._asdict()))
    return found


def _max_novel(settings: Settings, train: TrainSet) -> int:
    """The largest k that is tried."""
    num_known, num_unlabeled = len(train.labels.unique()), train.num_unlabeled
    return min(
        settings.max_novel or max(10, num_known), num_unlabeled, settings.max_rows
    )


def _sample_rows(labels: Tensor, max_rows: int, seed: int) -> Tensor:
    """Sorted row numbers, at most ``max_rows``, every class capped alike. labels:
    (N,) int64.
    """
    classes = labels.unique().tolist()
    cap = max(1, max_rows // len(classes))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.cat([order[labels[order] == c][:cap] for c in classes]).sort().values


def score_clusters(
    splits: Sequence[Split],
    features: Sequence[Features],
    config: Config,
    settings: Settings,
    device: str,
    item: tuple[int, int],
) -> list[dict[str, Any]]:
    """Cluster split i with k novel classes, ``item`` = (i, k): the scores of every
    choice of anchors. In the GCD setting the classes of pretraining are anchors, too,
    with rows among the unlabeled ones.

    A frozen encoder's features are clustered, at each k, in as many directions as the
    centers of all classes span: in those that explain 95% of Caltech-24's 1,280
    features noise hides the classes (k = 16, the limit; in these 9, between 8 and 12,
    of true 8).
    """
    index, k = item
    split, labels = splits[index], torch.tensor(features[index].labels)
    points = torch.tensor(features[index].points, device=device)
    if config.model.finetune == "none":
        num_directions = len(split.pretrain) + len(split.probe) + k - 1
        points = F.normalize(points[:, :num_directions], dim=1)
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
            free, found = fixed == FREE, clusters.cpu().numpy()
            table = confusion(
                _positions(labels, validation), found, len(validation), num_clusters
            )
            unlabeled = np.bincount(
                found[(labels == FREE).numpy()], minlength=num_clusters
            )
            f1 = class_f1(table, np.bincount(found, minlength=num_clusters))
            cvi = silhouette(
                points[free], clusters[free], settings.silhouette_rows, seed
            )
            more = {
                "acc": cluster_accuracy(table),
                "sizes": sorted(unlabeled.tolist(), reverse=True),
            }
            results.append({"anchors": anchors, "f1": f1, "cvi": cvi, **more})
    return results


def _positions(labels: Tensor, classes: Sequence[int]) -> NDArray[np.int64]:
    """(N,) int64: each label's position in ``classes``, or FREE."""
    position = {c: i for i, c in enumerate(classes)}
    return np.array(
        [position.get(label, FREE) for label in labels.tolist()], dtype=np.int64
    )


def class_f1(table: Counts, totals: Counts) -> float:
    """How well clusters fit the validation classes: the mean F1 of each class with its
    own cluster, 0-1.

    ``table`` (C, K), C <= K: validation rows of each class in each cluster; ``totals``
    (K,): all rows. Too few clusters cost precision, as rows of other, also unlabeled,
    classes join; too many cost recall.
    """
    f1 = 2 * table / np.maximum(table.sum(axis=1, keepdims=True) + totals, 1)
    return float(f1[linear_sum_assignment(f1, maximize=True)].mean())


def _digest(*parts: Any) -> str:
    """Hash of anything JSON holds, 12 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _fingerprint(train: TrainSet) -> str:
    """Of what training may see: images and known labels, and nothing else."""
    total = hashlib.sha256()
    for rows in (train.labels, train.labeled_images, train.unlabeled_images):
        total.update(str(tuple(rows.shape)).encode())
        for part in rows.split(FINGERPRINT_ROWS):
            total.update(part.contiguous().numpy().data)
    return total.hexdigest()
