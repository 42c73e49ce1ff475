"""How many novel classes? From the known ones: hide some, and see which k finds them again (METHOD.md 8).

After DTC (Han et al., ICCV 2019). Some known classes are held out as probes and the encoder is pretrained on
the rest; some probe classes are anchors, whose rows are fixed to a cluster, the others validation classes,
whose rows are as free as the unlabeled ones. The k at which clusters fit the validation classes best is how
many classes the unlabeled rows hold. What differs from DTC, and why (``benchmarks/estimate.py``):

- The index. DTC averages the k of the best accuracy on validation rows with the k of the best silhouette.
  Accuracy does not see unlabeled rows that share a validation class's cluster, so it favours small k; the
  silhouette favours whatever the features favour. Known and novel classes are disjoint, so an unlabeled row
  in such a cluster is a mistake that we can count: :func:`uno.results.probes.class_f1`. ACC(k) and CVI(k) are
  recorded, too.
- The features. A supervised encoder keeps few directions, those that tell its own classes apart; whitening
  the leading ones gives unseen classes a chance (:func:`uno.results.probes.whiten`).
- Repetition: several class splits, every choice of anchors within each; the spread of their votes is the
  interval.

Only known labels enter. Every (split, k) is a task of its own: see :class:`Tasks`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from uno.config import Config
from uno.data.files import Storage
from uno.data.resident import TrainSet
from uno.errors import ConfigError
from uno.results.probes import (
    ClusterJob,
    Features,
    PretrainJob,
    Settings,
    Split,
    class_splits,
    digest,
    pretrain_split,
    score_clusters,
)

MIN_KNOWN = 4  # two classes to pretrain on, two to probe with
RESULT = "estimate.json"
CURVES = ("f1", "acc", "cvi")
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)


class Tasks(Protocol):
    """Runs independent tasks, here or elsewhere."""

    def __call__(
        self, function: Callable[[Any, Any], Any], shared: Sequence[Any], items: Sequence[tuple[int, Any]]
    ) -> Iterator[tuple[int, Any]]:
        """(position, ``function(shared[s], item)``) of all (s, item) in ``items``, in any order."""


def run_here(
    function: Callable[[Any, Any], Any], shared: Sequence[Any], items: Sequence[tuple[int, Any]]
) -> Iterator[tuple[int, Any]]:
    """:class:`Tasks` in this process, one after the other."""
    for position, (which, item) in enumerate(items):
        yield position, function(shared[which], item)


@dataclass(frozen=True)
class Estimate:
    """The result: ``low <= num_novel <= high``, and what it rests on.

    ``suggested`` is what to train with: one class too many costs less than one too few.
    ``ks`` are the k that were tried; ``curves`` maps f1, acc (fractions) and cvi (silhouette) to their means
    at each k. ``dtc``: the plain method's k_acc, k_cvi and k. ``sizes``: for each ratio r, the mean number of
    clusters at k = num_novel that hold more unlabeled rows than r x the largest. ``splits``: class names,
    and the curves of every choice of anchors. ``at_limit``: the interval reaches the largest k tried.
    """

    num_novel: int
    low: int
    high: int
    suggested: int
    at_limit: bool
    ks: list[int]
    curves: dict[str, list[float]]
    dtc: dict[str, int]
    sizes: dict[str, list[float]]
    splits: list[dict[str, Any]]
    settings: dict[str, Any]
    key: str

    def to_json(self) -> str:
        """As stored in ``estimate.json``."""
        return json.dumps(asdict(self), indent=1)


def estimate_num_novel(
    config: Config,
    train: TrainSet,
    known: Sequence[str],
    storage: Storage,
    device: torch.device | str = "cpu",
    settings: Settings | None = None,
    tasks: Tasks = run_here,
    report: Callable[[str], None] = lambda line: None,
) -> Estimate:
    """Estimate the number of classes among the unlabeled rows, and store it as ``estimate.json``.

    Pretraining and features are kept in ``storage`` under a hash of what they depend on: the same command
    continues after an interruption, and returns at once when it has finished.

    Args:
        config: of the run; only what pretraining needs is read.
        train: images and known labels, on the host; its ``num_novel`` is not read.
        known: names of the known classes, by index.
        storage: where results go.
        device: of the tasks.
        settings: of the procedure.
        tasks: where the tasks run; results do not depend on it.
        report: gets a line now and then.

    Raises:
        ConfigError: too few known classes or unlabeled rows, or as pretraining.
    """
    settings = settings or Settings()
    present = sorted(set(train.labels.tolist()))
    if len(present) < MIN_KNOWN:
        raise ConfigError(
            f"estimating the number of classes needs at least {MIN_KNOWN} known classes with rows, there are "
            f"{len(present)}; give --num-novel"
        )
    num_unlabeled = len(train.unlabeled_images)
    if num_unlabeled < 2:
        raise ConfigError(f"{num_unlabeled} unlabeled rows: there is nothing to estimate")
    splits = class_splits(present, settings.num_splits, config.seed)
    largest = min(settings.max_novel or max(10, len(present)), num_unlabeled, settings.max_rows)
    ks = list(range(largest + 1))
    job = PretrainJob(config, train, tuple(known), storage.uri, str(device), settings, _fingerprint(train))
    key = digest([job.split_key(split) for split in splits], asdict(settings), ks)
    if storage.exists(RESULT):
        with suppress(ValueError, TypeError, AttributeError):  # damaged: estimated anew
            stored = json.loads(storage.read(RESULT))
            if stored.get("key") == key:
                return Estimate(**stored)

    features: dict[int, Features] = {}
    for position, found in tasks(pretrain_split, [job], [(0, split) for split in splits]):
        features[position] = found
        report(f"pretrained {len(features)} of {len(splits)} splits")
    shared = [
        ClusterJob(features[i], split, i, config.seed, str(device), job.threads, settings)
        for i, split in enumerate(splits)
    ]
    items = [(i, k) for k in reversed(ks) for i in range(len(splits))]  # the long ones first
    scores: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for position, found in tasks(score_clusters, shared, items):
        scores[items[position]] = found
    found = _combine(splits, ks, scores, known, settings, key)
    storage.write(RESULT, found.to_json().encode())
    return found


# ------------------------------------------------------------------------------------------------- the answer
def interval(votes: Sequence[int], quantile: float) -> tuple[int, int]:
    """(low, high): all but a share ``quantile`` of the votes on either side, rounded outwards, at least 1."""
    low, high = np.quantile(votes, [quantile, 1 - quantile])
    return max(1, math.floor(low + 1e-9)), max(1, math.ceil(high - 1e-9))


def suggest(num_novel: int, low: int, high: int) -> int:
    """What to train with: ``high``, for a class too few merges two that nobody takes apart again.

    In an interval wider than twice ``low``: as many as that, but not fewer than ``num_novel``.
    """
    return high if high <= 2 * low else max(num_novel, 2 * low)


def largest_best(curve: Sequence[float]) -> int:
    """The largest k that attains the curve's maximum."""
    return int(np.flatnonzero(np.asarray(curve) >= np.max(curve) - 1e-9)[-1])


def _combine(
    splits: list[Split],
    ks: list[int],
    scores: dict[tuple[int, int], list[dict[str, Any]]],
    known: Sequence[str],
    settings: Settings,
    key: str,
) -> Estimate:
    described: list[dict[str, Any]] = []
    votes: list[int] = []
    for i, split in enumerate(splits):
        roles = []
        for role, first in enumerate(scores[i, ks[0]]):
            one = {name: [scores[i, k][role][name] for k in ks] for name in CURVES}
            votes.append(largest_best(one["f1"]))
            roles.append({"anchors": [known[c] for c in first["anchors"]], "vote": votes[-1], **one})
        names = {"pretrain": [known[c] for c in split.pretrain], "probe": [known[c] for c in split.probe]}
        described.append({**names, "roles": roles})
    all_roles = [role for split in described for role in split["roles"]]
    curves = {name: np.mean([role[name] for role in all_roles], axis=0).tolist() for name in CURVES}
    point = max(1, largest_best(curves["f1"]))
    low, high = interval(votes, settings.quantile)
    low, high = min(low, point), max(high, point)
    k_acc, k_cvi = largest_best(curves["acc"]), largest_best(curves["cvi"])
    at_point = [role["sizes"] for i in range(len(splits)) for role in scores[i, min(point, ks[-1])]]
    counts = [float(np.mean([sum(n > r * max(s) for n in s) for s in at_point])) for r in RATIOS]
    return Estimate(
        point, low, high, suggest(point, low, high), high >= ks[-1], ks, curves,
        {"k_acc": k_acc, "k_cvi": k_cvi, "k": math.ceil((k_acc + k_cvi) / 2)},
        {"ratios": list(RATIOS), "clusters": counts}, described, asdict(settings), key,
    )  # fmt: skip


def _fingerprint(train: TrainSet) -> str:
    """Of what training may see: images and known labels, and nothing else."""
    total = hashlib.sha256()
    for tensor in (train.labels, train.labeled_images, train.unlabeled_images):
        total.update(str(tuple(tensor.shape)).encode())
        total.update(tensor.contiguous().numpy().data)
    return total.hexdigest()
