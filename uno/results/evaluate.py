"""Evaluation (Sec. 4.1): every worker counts its rows, the counts are added up, clusters are matched once.

Beside it the k-means baseline: what the representation gives away without discovery.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from scipy.linalg import block_diag
from torch import Tensor

from uno import collectives
from uno.clustering import VARIANCE, kmeans, whiten
from uno.config import Config
from uno.data.files import Storage
from uno.data.stream import EvalData, TrainData
from uno.model import UnoModel, build_model, features_of, forward
from uno.prototype_init import clusters_of, labeled_features
from uno.results import metrics
from uno.results.classes import OutputClass, parse_classes
from uno.results.infer import outcomes
from uno.results.trust import trust_metrics
from uno.runs.run import load_trained, load_weights_
from uno.train import Worker

PROTOCOLS = ("task_aware", "task_agnostic_official", "task_agnostic_joint", "task_agnostic_strict")
CLASSES_FILE = "model/classes.json"
MAX_PIXEL_SIDE = 16  # k-means on raw pixels is only meaningful, and cheap, for tiny images
BASELINES = {
    "baseline/kmeans/novel/acc": "k-means on frozen features",
    "baseline/kmeans_whitened/novel/acc": "k-means, features whitened",
    "baseline/kmeans_pixels/novel/acc": "k-means on pixels",
}
GCD_BASELINES = {
    "kmeans": "k-means on frozen features",
    "constrained_kmeans": "k-means, labeled rows fixed",
}
LEGEND = """\
avg / best: mean over heads / the head with the lowest training cluster loss
official: novel rows matched to any output    joint: one matching of all rows
strict: novel rows matched to novel outputs only, predicted known = error"""


def evaluate_run(
    config: Config, storage: Storage, train: TrainData, sets: Mapping[str, EvalData], num_true: int,
    worker: Worker,
) -> dict[str, float]:  # fmt: skip
    """All protocols on the rows of both splits ("train", "test"), shared among all workers, the same on each,
    and on rank 0 the k-means baselines and the signs of trust, flat. ``num_true``: classes, known and novel,
    that truth indexes.
    """
    model, best_head = load_trained(config, storage, train.num_known, train.num_novel)
    model, edits = model.to(worker.device), read_edits(storage)
    values: dict[str, float] = {}
    mixed = config.data.pile == "mixed"
    for split, rows in sets.items():
        kinds = [rows.where(rows.unlabeled), rows.where(~rows.unlabeled)] if mixed else [rows]
        share = config.train.eval_batch_size, worker.rank, worker.world_size
        counts = [count(model, config, kind.batches(*share), num_true, edits) for kind in kinds]
        total = [torch.stack(parts).sum(dim=0) for parts in zip(*counts, strict=True)]
        values |= protocol_metrics(Confusions(*total), best_head, split, edits)
        if mixed:
            values |= gcd_metrics(counts[0].joint, train.num_known, best_head, split, edits)
    train.sync()
    if worker.rank == 0:
        novel = sets["train"].where(sets["train"].truth >= train.num_known)
        values |= kmeans_baselines(config, storage, train, novel, worker.device)
        if mixed:
            values |= gcd_baselines(config, storage, train, sets["train"], worker.device)
        num_held_out = int((sets["test"].truth < train.num_known).sum())
        values |= trust_metrics(config, model, best_head, train, values, num_held_out)
    return values


class Edits(NamedTuple):
    """What was merged and dropped, and which clusters of the heads correspond (H, K)."""

    classes: list[OutputClass]
    alignment: Tensor | None

    @property
    def dropped(self) -> list[int]:
        """Outputs whose rows are rejected."""
        return [c.index for c in self.classes if c.into is None]

    @property
    def num_novel(self) -> int:
        """Discovered classes that are left."""
        return sum(c.kind == "novel" and c.into == c.index for c in self.classes)


def read_edits(storage: Storage) -> Edits | None:
    """The edits of a run's model; None where there is none yet, or nothing was merged or dropped."""
    if not storage.exists(CLASSES_FILE):
        return None
    data = storage.read(CLASSES_FILE)
    classes, alignment = parse_classes(data), json.loads(data).get("alignment")
    if all(c.into == c.index for c in classes):
        return None
    return Edits(classes, None if alignment is None else torch.tensor(alignment))


class Confusions(NamedTuple):
    """Int64 counts (rows: true class, columns: output); additive over batches and workers."""

    known: Tensor  # (H, C_l, C_l) known rows over the known outputs; the same of all heads, but for merges
    novel: Tensor  # (H, C_u, K) novel rows over the head's own outputs
    joint: Tensor  # (H, C_l + C_u, C_l + K) all rows over both, known first

    @classmethod
    def zeros(
        cls, num_heads: int, num_known: int, num_true_novel: int, num_clusters: int,
        device: torch.device | str = "cpu",
    ) -> Confusions:  # fmt: skip
        """``num_true_novel`` C_u is 0 where nobody knows them."""
        all_true, all_outputs = num_known + num_true_novel, num_known + num_clusters
        shapes = ((num_known, num_known), (num_true_novel, num_clusters), (all_true, all_outputs))
        return cls(*(torch.zeros(num_heads, *s, dtype=torch.int64, device=device) for s in shapes))

    def add_(self, known: Tensor, novel: Tensor, truth: Tensor) -> None:
        """Count a batch in place, without waiting for the device: ``known`` (B, C_l), or (H, B, C_l), and
        ``novel`` (H, B, K) on one scale, ``truth`` (B,) int64 in [0, C_l + C_u), or -1: not counted.
        """
        num_known = self.known.shape[-1]
        known_best, known_output = known.max(dim=-1)  # (B,)
        novel_best, novel_output = novel.max(dim=-1)  # (H, B)
        # argmax over [known, novel] without building it; a tie goes to the known output
        output = torch.where(novel_best > known_best, num_known + novel_output, known_output)
        is_novel = truth >= num_known
        _add_(self.known, truth, known_output.expand(novel_output.shape), (truth >= 0) & ~is_novel)
        _add_(self.novel, truth - num_known, novel_output, is_novel)
        _add_(self.joint, truth, output, truth >= 0)


def _add_(counts: Tensor, truth: Tensor, output: Tensor, counted: Tensor) -> None:
    """Add rows to (H, R, P) counts in place: truth (B,), output (H, B), counted (B,) bool. Others add zero to
    class 0: a selection, or bincount, would wait for the device to learn its size.
    """
    if counts.shape[1]:
        cells = torch.where(counted, truth, 0) * counts.shape[2] + output  # (H, B)
        counts.flatten(1).scatter_add_(1, cells, counted.to(counts.dtype).expand(len(counts), -1))


def count(
    model: UnoModel, config: Config, batches: Iterable[tuple[Tensor, Tensor]], num_true: int,
    edits: Edits | None = None,
) -> Confusions:  # fmt: skip
    """The counts of all workers, each of which brings its own ``batches``, however many: images uint8
    (b, 3, S, S) and truth (b,) in [0, ``num_true``) or -1. ``model`` in eval mode, not its DDP wrapper. With
    ``edits`` outputs are those of the predictions.
    """
    device, num_novel = model.known.weight.device, num_true - model.num_known
    counts = Confusions.zeros(model.num_heads, model.num_known, num_novel, model.num_novel, device)
    for images, truth in batches:
        logits = forward(model, images, config)
        assert logits.novel is not None
        known, novel = logits.known[0], logits.novel[0]
        if edits is not None:
            found = outcomes(known, novel, config.objective.temperature, *edits)  # (H, b, C)
            known, novel = found[..., : model.num_known], found[..., model.num_known :]
        counts.add_(known, novel, truth.to(device, non_blocking=True))
    return Confusions(*map(collectives.sum_, counts))


def protocol_metrics(
    confusions: Confusions, best_head: int, split: str, edits: Edits | None = None
) -> dict[str, float]:
    """Every metric of one split as flat paths, fractions 0-1 (ARI may be negative).

    `{split}/{known|novel|all}/{protocol of PROTOCOLS}/{acc|nmi|ari|purity}/{avg|best}`, of known and all rows
    `acc` only, and `{split}/novel/task_aware/chance/acc`, that of random predictions; absent where no row has
    truth. ``confusions``: summed over workers; ``best_head``: by TRAINING cluster loss, never by accuracy.
    Rows that ``edits`` reject are wrong, and left out of NMI and ARI; `{split}/{known|novel}/rejected` is
    their share under the best head.
    """
    known, novel, joint = (counts.cpu().numpy() for counts in confusions)
    num_known, dropped = known.shape[-1], edits.dropped if edits else []
    agnostic = (metrics.task_agnostic_official, metrics.task_agnostic_joint, metrics.task_agnostic_strict)
    aware = [block_diag(*blocks) for blocks in zip(known, novel, strict=True)]
    heads = {"task_aware": [metrics.with_rejected(_task_aware, head, num_known, dropped) for head in aware]}
    for name, protocol in zip(PROTOCOLS[1:], agnostic, strict=True):
        heads[name] = [metrics.with_rejected(protocol, head, num_known, dropped) for head in joint]
    result: dict[str, float] = {}
    for name, per_head in heads.items():
        for key, best in per_head[best_head].items():
            rows, metric = key.split("/")
            path = f"{split}/{rows}/{name}/{metric}"
            result |= {f"{path}/avg": float(np.mean([head[key] for head in per_head])), f"{path}/best": best}
    if novel.any():
        num_clusters = novel.shape[2] if edits is None else edits.num_novel
        chance = metrics.chance_accuracy(novel[0].sum(axis=1), num_clusters)
        result[f"{split}/novel/task_aware/chance/acc"] = chance
    of_best = joint[best_head]
    for name, counts in (("known", of_best[:num_known]), ("novel", of_best[num_known:])):
        if dropped and counts.any():
            result[f"{split}/{name}/rejected"] = float(counts[:, dropped].sum() / counts.sum())
    return result


def _task_aware(joint: metrics.Counts, num_known: int) -> dict[str, float]:
    return metrics.task_aware(joint[:num_known, :num_known], joint[num_known:, num_known:])


def gcd_metrics(
    joint: Tensor, num_known: int, best_head: int, split: str, edits: Edits | None = None
) -> dict[str, float]:
    """`{split}/unlabeled/gcd/{all|old|new}/{avg|best}` of a mixed pile; {} where no row has truth. ``joint``
    (H, C_l + C_u, C_l + K): the unlabeled rows of :class:`Confusions`.
    """
    dropped = [] if edits is None else edits.dropped
    heads = [metrics.generalized(head, num_known, dropped) for head in joint.cpu().numpy()]
    result: dict[str, float] = {}
    for name, best in heads[best_head].items():
        path = f"{split}/unlabeled/gcd/{name}"
        result |= {f"{path}/avg": float(np.mean([head[name] for head in heads])), f"{path}/best": best}
    return result


def gcd_baselines(
    config: Config, storage: Storage, train: TrainData, rows: EvalData, device: torch.device
) -> dict[str, float]:
    """Clusters of the pretrained features of a mixed pile, scored as its heads are:
    `baseline/{kmeans|constrained_kmeans}/gcd/{all|old|new}`, k-means with C clusters, without and with the
    labeled rows fixed to their classes; {} where fewer unlabeled rows than outputs have truth.
    """
    if int(rows.unlabeled.sum()) < train.num_known + train.num_novel:
        return {}
    model = _pretrained(config, storage, train, device)
    kinds = (rows.where(rows.unlabeled), rows.where(~rows.unlabeled))
    (unlabeled, truth), (labeled, labels) = (_features(model, config, kind) for kind in kinds)
    num_known, num_outputs = train.num_known, train.num_known + train.num_novel
    if len(truth) < num_outputs or not len(labels):
        return {}
    found = {
        "kmeans": clusters_of(unlabeled, labeled, labels, num_outputs, "novel", config.seed),
        "constrained_kmeans": clusters_of(unlabeled, labeled, labels, train.num_novel, "mixed", config.seed),
    }
    values: dict[str, float] = {}
    for name, clusters in found.items():
        num_true = max(num_outputs, int(truth.max()) + 1)
        counts = metrics.confusion(truth.numpy(), clusters.assignment.numpy(), num_true, num_outputs)
        scores = metrics.generalized(counts, num_known)
        values |= {f"baseline/{name}/gcd/{kind}": value for kind, value in scores.items()}
    return values


def _pretrained(config: Config, storage: Storage, train: TrainData, device: torch.device) -> UnoModel:
    """The network that discovery started from, to take features of."""
    model = build_model(config.model, train.num_known, 0, 0)
    load_weights_(model, config, storage)
    return model.to(device).eval()


def _features(model: UnoModel, config: Config, rows: EvalData) -> tuple[Tensor, Tensor]:
    """Features (N, D) and truth (N,) of the rows that can be read, on the CPU."""
    features, truth = [torch.empty(0, 0)], [torch.empty(0, dtype=torch.int64)]
    for images, classes in rows.batches(config.train.eval_batch_size):
        features.append(features_of(model, images, config).cpu())
        truth.append(classes.cpu())
    return torch.cat(features[1:] or features), torch.cat(truth)


def kmeans_baselines(
    config: Config, storage: Storage, train: TrainData, novel: EvalData, device: torch.device
) -> dict[str, float]:
    """k-means on the pretrained features of the ``novel`` training rows, on these whitened, and for tiny
    images on their pixels: ``baseline/{kmeans|kmeans_whitened|kmeans_pixels}/novel/{acc|nmi|ari|purity}``; {}
    with fewer rows than clusters.

    Whitened is what ``uno estimate-classes`` clusters: unit features of labeled and novel rows along the
    principal directions that explain 95 % of their variance (:func:`uno.clustering.whiten`). What known
    classes were taught to be alike in is then no longer most of every distance.
    """
    if len(novel.truth) < train.num_novel:
        return {}
    model = _pretrained(config, storage, train, device)
    parts: dict[str, list[Tensor]] = {"kmeans": [], "kmeans_pixels": []}
    classes: list[int] = []
    for images, truth in novel.batches(config.train.eval_batch_size):
        classes += truth.tolist()
        parts["kmeans"].append(features_of(model, images, config).cpu())
        if images.ndim == 4 and images.shape[-1] <= MAX_PIXEL_SIDE:
            parts["kmeans_pixels"].append(images.flatten(1).float().cpu())
    if len(classes) < train.num_novel:  # of streamed rows some may be unreadable
        return {}
    own = torch.cat(parts["kmeans"])
    both = F.normalize(torch.cat([labeled_features(config, model, train)[0], own]), dim=1)
    parts["kmeans_whitened"] = [whiten(both, variance=VARIANCE)[-len(own) :]]
    values: dict[str, float] = {}
    for name, tensors in parts.items():
        found = kmeans_baseline(torch.cat(tensors), classes, train.num_novel, config.seed) if tensors else {}
        values |= {f"baseline/{name}/novel/{metric}": value for metric, value in found.items()}
    return values


def kmeans_baseline(features: ArrayLike, truth: ArrayLike, num_clusters: int, seed: int) -> dict[str, float]:
    """Cluster features (N, D) with k-means (k-means++, best of 10 starts) and score them as a head is scored:
    `acc`, `nmi`, `ari`, `purity` against ``truth`` (N,), any class ids; N >= ``num_clusters``.

    Every row is scaled to length one, as UNO's heads compare directions (on the pixels of digits 5-9 accuracy
    is .887-.890, without it .890-.894); no centring, no PCA.
    """
    directions = F.normalize(torch.from_numpy(np.asarray(features, dtype=np.float64)), dim=1)
    clusters = kmeans(directions, num_clusters, 10, seed).assignment.numpy()
    classes, class_index = np.unique(np.asarray(truth), return_inverse=True)
    return metrics.cluster_metrics(metrics.confusion(class_index, clusters, len(classes), num_clusters))


def format_table(values: Mapping[str, float]) -> str:
    """What `evaluate_run` returns as a table of accuracies in percent, at most 80 columns."""
    splits = [split for split in ("train", "test") if any(key.startswith(f"{split}/") for key in values)]
    groups = ("known", "novel", "all")

    def line(name: str, cells: list[str]) -> str:
        return f"{name:<32}" + "".join(f" |{cell}" for cell in cells)

    def percent(key: str) -> str:
        return f"{100 * values[key]:7.1f}" if key in values else " " * 7

    def row(name: str, path: str) -> list[str]:
        cells = ["".join(percent(f"{split}/{group}/{path}") for group in groups) for split in splits]
        return [line(name, cells)] if "".join(cells).strip() else []

    def generalized(name: str, path: str, which: str = "") -> list[str]:
        """All, Old and New, of every split or of a baseline's training rows."""
        ends = [f"{group}{which}" for group in ("all", "old", "new")]
        cells = ["".join(percent(f"{split}/{path}/{end}") for end in ends) for split in splits]
        if not which:
            cells = ["".join(percent(f"{path}/{end}") for end in ends)]
        return [line(name, cells)] if "".join(cells).strip() else []

    head = line("accuracy, %", ["".join(f"{group:>7}" for group in groups)] * len(splits))
    titles = {"train": "training rows", "test": "rows not trained on"}
    lines = [line("", [f"{titles[split]:^21}" for split in splits]), head, "-" * len(head)]
    for protocol in PROTOCOLS:
        for which in ("avg", "best"):
            lines += row(f"{protocol:<24}{which}", f"{protocol}/acc/{which}")
    lines += row("chance (random predictions)", "task_aware/chance/acc")
    for key, name in BASELINES.items():
        if key in values:
            lines.append(f"{name:<32}  {'':7}{percent(key)}  novel")
    found = generalized("one matching            avg", "unlabeled/gcd", "/avg")
    found += generalized("one matching            best", "unlabeled/gcd", "/best")
    for name, text in GCD_BASELINES.items():
        found += generalized(text, f"baseline/{name}/gcd")
    if found:
        columns = ["".join(f"{group:>7}" for group in ("All", "Old", "New"))] * len(splits)
        lines += ["-" * len(head), line("unlabeled rows, %", columns), *found]
    return "\n".join(text.rstrip() for text in [*lines, *LEGEND.splitlines()])
