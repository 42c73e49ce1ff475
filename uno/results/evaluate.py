"""Compute the metrics of a trained run (paper Sec. 4.1).

Every worker counts its rows by true class and output, the counts are added up, and
clusters are matched to classes once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import block_diag
from torch import Tensor

from uno import distributed
from uno.clustering.initialization import training_features
from uno.config import Config
from uno.data.files import Storage
from uno.data.stream import EvalData, TrainData
from uno.distributed import RankTask
from uno.model import UnoModel, forward
from uno.results import metrics
from uno.results.baselines import baselines, start_model
from uno.results.classes import ModelClasses, OutputClass
from uno.results.infer import (
    ALIGNMENT_FILE,
    align_features,
    class_probabilities,
)
from uno.results.trust import (
    cluster_unlabeled,
    clustering_metrics,
    subsample_unlabeled,
    trust_metrics,
)
from uno.runs import DISCOVER
from uno.runs.checkpoint import load_newest
from uno.runs.run import load_trained
from uno.training import Worker

CLASSES_FILE = "model/classes.json"


def evaluate_run(
    config: Config,
    storage: Storage,
    train: TrainData,
    sets: Mapping[str, EvalData],
    num_true: int,
    worker: Worker,
    trained: tuple[UnoModel, int] | None = None,
) -> dict[str, float]:
    """Evaluate a trained run, and return its metrics by key.

    The metrics are those of all protocols on both splits, the baselines, and the
    measures of :mod:`uno.results.trust`, which need labels of known classes alone. All
    workers call this function, each evaluates a share of the rows, and all get the same
    metrics. If classes were merged or dropped (``model/classes.json``), the protocols
    score predictions after the merges, where a row that is predicted as a dropped class
    is wrong. The agreements of :mod:`uno.results.trust` are without merges and drops.
    The baselines cluster features of the network that discovery started from, and use
    no output of the trained model. If no class was merged or dropped, and there is an
    unlabeled training row, rank 0 writes ``alignment.json`` for
    :func:`~uno.results.infer.save_model`: which clusters of different heads are the
    same class. Streamed images of ``sets`` that turn out to be unreadable are added to
    ``bad_samples.jsonl`` in the run directory.

    Args:
        config: The configuration of the run.
        storage: The run directory, with the trained checkpoint.
        train: The rows that training may see, on the device of the worker.
        sets: The rows with their true classes, by split: "train" and "test".
        num_true: The number of known and novel classes that the true classes index.
        worker: The process that evaluates: a local process or one rank of several.
        trained: The trained model in eval mode, and the index of its best head, the one
            with the lowest training loss. The model is moved to the worker's device.
            None loads both from the newest checkpoint of discovery.

    Returns:
        The metrics, such as ``test/novel/task_aware/acc/best``. Accuracies and most
        others are fractions 0-1, see :func:`protocol_metrics`, :func:`gcd_metrics` (in
        the GCD setting alone), :func:`~uno.results.baselines.baselines`,
        :func:`~uno.results.trust.trust_metrics` and, for the method ``clustering``,
        :func:`~uno.results.trust.clustering_metrics`.

    Raises:
        StorageError: ``trained`` is None, and there is no valid checkpoint; the weights
            that discovery started from cannot be read; ``model/classes.json`` is
            damaged; an image's file cannot be read now; or a file cannot be written.
        ConfigError: There are labeled or unlabeled training images, and none of them
            can be read; new unreadable images are found, and they are then more than
            the configuration allows; a file that holds many images cannot be read; or
            the weights that discovery started from do not fit, as those of a
            pretraining with another number of known classes.
    """
    model, best_head = trained or load_trained(
        config, storage, train.num_known, train.num_novel
    )
    model, edits = model.to(worker.device), read_edits(storage)
    values: dict[str, float] = {}
    mixed = config.data.setting == "gcd"
    for split, rows in sets.items():
        if mixed:  # unlabeled rows are kind 0, and labeled rows are kind 1
            rows = replace(rows, truth=rows.truth + num_true * ~rows.unlabeled)
        batches = rows.batches(
            config.train.eval_batch_size, worker.rank, worker.world_size
        )
        counts = count_outputs(model, config, batches, num_true, edits, 1 + mixed)
        total = [torch.stack(parts).sum(dim=0) for parts in zip(*counts, strict=True)]
        values |= protocol_metrics(Confusions(*total), best_head, split, edits)
        if mixed:
            values |= gcd_metrics(
                counts[0].joint, train.num_known, best_head, split, edits
            )
    train.sync()
    start = start_model(config, storage, train, sets["train"], worker.device)
    features = training_features(config, model, train)
    compared = [] if start is None else baselines(config, start, train, sets["train"])
    alignment_jobs, trust_jobs = list[RankTask](), list[RankTask]()
    if edits is None and len(features.unlabeled):
        align = partial(align_features, model, config, best_head, features.unlabeled)
        num_clusters = model.num_heads * model.num_novel
        alignment_jobs = [RankTask(num_clusters, lambda: align().flatten())]
    sample = subsample_unlabeled(config, features, train)
    if sample is not None:
        cluster = partial(cluster_unlabeled, config, sample, train.num_novel)
        trust_jobs = [RankTask(len(sample.unlabeled), cluster)]
    baseline_jobs = [baseline.job for baseline in compared]
    results = distributed.run_tasks(
        [*alignment_jobs, *baseline_jobs, *trust_jobs], worker.device
    )
    if alignment_jobs and worker.rank == 0:
        alignment = results[0].view(model.num_heads, model.num_novel)
        facts = {"best_head": best_head, "alignment": alignment.tolist()}
        storage.write(ALIGNMENT_FILE, json.dumps(facts).encode())
    first = len(alignment_jobs)
    for baseline, clusters in zip(compared, results[first:], strict=False):
        values |= baseline.score(clusters)
    if sample is not None:
        num_held_out = int((sets["test"].truth < train.num_known).sum())
        values |= trust_metrics(
            model, best_head, sample.unlabeled, results[-1], values, num_held_out
        )
    if config.method == "clustering":
        checkpoint = load_newest(storage, DISCOVER)
        if checkpoint is not None:
            setting, encoder = str(config.data.setting), config.model.encoder
            values |= clustering_metrics(checkpoint.tensors, setting, encoder)
    return values


class Edits(NamedTuple):
    """The merged and dropped classes of a model, and the alignment of its heads.

    A user merges and drops discovered classes, see :mod:`uno.results.classes`.

    Attributes:
        classes: The output classes.
        alignment: Which clusters of different heads are the same class: for each of H
            heads and each of K clusters of the best head (the one with the lowest
            training loss) the corresponding cluster, int64 (H, K); None if it is not
            known.
    """

    classes: list[OutputClass]
    alignment: Tensor | None

    @property
    def dropped(self) -> list[int]:
        """The indices of the classes that the user dropped.

        Rows that are predicted as one of these are rejected: they get no class, and
        count as wrong in accuracies.
        """
        return [c.index for c in self.classes if c.into is None]

    @property
    def num_novel(self) -> int:
        """The number of discovered classes that remain in predictions.

        Classes that were dropped, or merged into another class, are not counted. A
        class that others were merged into is counted.
        """
        return sum(c.kind == "novel" and c.into == c.index for c in self.classes)


def read_edits(storage: Storage) -> Edits | None:
    """Read the merged and dropped classes of a run's model.

    Args:
        storage: The run directory.

    Returns:
        The output classes, and the alignment of the heads; None if there is no
        ``model/classes.json`` yet, or no class was merged or dropped.

    Raises:
        StorageError: ``model/classes.json`` is damaged or cannot be read.
    """
    if not storage.exists(CLASSES_FILE):
        return None
    stored = ModelClasses.parse(storage.read(CLASSES_FILE))
    if all(c.into == c.index for c in stored.classes):
        return None
    alignment = None if stored.alignment is None else torch.tensor(stored.alignment)
    return Edits(stored.classes, alignment)


class Confusions(NamedTuple):
    """Counts of (true class, output) pairs for each of H heads, int64.

    There are C_l known classes, C_u true novel classes, and K novel outputs (clusters)
    of each head. Counts of different batches and workers can be added.

    Attributes:
        known: Known rows over the known outputs, (H, C_l, C_l). All heads have the same
            counts, unless classes were merged.
        novel: Novel rows over the novel outputs of the head, (H, C_u, K).
        joint: All rows over all outputs, known first, (H, C_l + C_u, C_l + K).
    """

    known: Tensor
    novel: Tensor
    joint: Tensor

    @classmethod
    def zeros(
        cls,
        num_heads: int,
        num_known: int,
        num_true_novel: int,
        num_clusters: int,
        device: torch.device | str = "cpu",
    ) -> Confusions:
        """Create (true class, output) counts of zero for H heads.

        Args:
            num_heads: The number of heads H.
            num_known: The number of known classes C_l.
            num_true_novel: The number of true novel classes C_u; 0 if they are not
                known.
            num_clusters: The number of novel outputs K.
            device: The device of the counts.
        """
        all_true, all_outputs = num_known + num_true_novel, num_known + num_clusters
        shapes = (
            (num_known, num_known),
            (num_true_novel, num_clusters),
            (all_true, all_outputs),
        )
        return cls(
            *(
                torch.zeros(num_heads, *s, dtype=torch.int64, device=device)
                for s in shapes
            )
        )

    def add_(self, known: Tensor, novel: Tensor, truth: Tensor) -> None:
        """Add a batch to the (true class, output) counts in place.

        Each row is counted at the output with its largest score: among the known
        outputs for a known row in ``known``, among the novel outputs for a novel row in
        ``novel``, and among all outputs in ``joint``, where a tie goes to the known
        output. The device is not synchronized.

        Args:
            known: Scores of B rows for the known outputs, (B, C_l), or for each head
                (H, B, C_l). Cosines or probabilities serve.
            novel: Scores of the novel outputs of each head on the same scale, (H, B,
                K).
            truth: True classes, int64 (B,) from 0 to C_l + C_u - 1, or -1 for rows that
                are not counted.
        """
        num_known = self.known.shape[-1]
        known_best, known_output = known.max(dim=-1)  # (B,)
        novel_best, novel_output = novel.max(dim=-1)  # (H, B)
        # this is the argmax over [known, novel] without a copy of both; a tie goes to
        # the known output
        output = torch.where(
            novel_best > known_best, num_known + novel_output, known_output
        )
        is_novel = truth >= num_known
        _add_(
            self.known,
            truth,
            known_output.expand(novel_output.shape),
            (truth >= 0) & ~is_novel,
        )
        _add_(self.novel, truth - num_known, novel_output, is_novel)
        _add_(self.joint, truth, output, truth >= 0)


def _add_(counts: Tensor, truth: Tensor, output: Tensor, counted: Tensor) -> None:
    """Add rows to counts in place, without synchronizing the device.

    Rows that are not counted add zero to class 0. Selecting rows, or ``bincount``,
    would wait for the device to learn the number of rows. Nothing is done if R is 0.

    Args:
        counts: Counts (H, R, P) of (true class, output) pairs.
        truth: True classes (B,), from 0 to R - 1 for counted rows.
        output: Outputs (H, B) from 0 to P - 1.
        counted: Which rows count, bool (B,).
    """
    if counts.shape[1]:
        cells = torch.where(counted, truth, 0) * counts.shape[2] + output  # (H, B)
        counts.flatten(1).scatter_add_(
            1, cells, counted.to(counts.dtype).expand(len(counts), -1)
        )


def count_outputs(
    model: UnoModel,
    config: Config,
    batches: Iterable[tuple[Tensor, Tensor]],
    num_true: int,
    edits: Edits | None = None,
    num_kinds: int = 1,
) -> list[Confusions]:
    """Count the rows of all workers by true class and output of a model.

    Every worker calls this function with its own batches, of any number.

    Args:
        model: The model in eval mode, not its DDP wrapper.
        config: The configuration of the run.
        batches: Images uint8 (b, 3, S, S) with sides of S pixels, or features of a
            frozen encoder (b, D); and a code for each row, int64 (b,). The code is -1
            for rows that are not counted, or t + k * ``num_true`` for the true class t
            and the kind of row k.
        num_true: The number of known and novel classes.
        edits: The merged and dropped classes, so that the outputs are those of the
            predictions. None if no class was merged or dropped: the outputs are then
            those of the network.
        num_kinds: The number of kinds of rows that are counted separately, such as 2
            for unlabeled (k = 0) and labeled rows (k = 1).

    Returns:
        For each kind, in order, the counts of its rows for each head, see
        :class:`Confusions`. They are summed over all workers, the same on every worker,
        and on the model's device.
    """
    device, num_novel = model.known.weight.device, num_true - model.num_known
    sizes = model.num_heads, model.num_known, num_novel, model.num_novel
    counts = [Confusions.zeros(*sizes, device) for _ in range(num_kinds)]
    for images, truth in batches:
        logits = forward(model, images, config)
        assert logits.novel is not None
        known, novel = logits.known[0], logits.novel[0]
        if edits is not None:
            temperature = config.objective.temperature
            # (H, b, C)
            joint = class_probabilities(known, novel, temperature, *edits)
            known, novel = joint[..., : model.num_known], joint[..., model.num_known :]
        truth = truth.to(device, non_blocking=True)
        for kind, own in enumerate(counts):
            of_kind = truth.div(num_true, rounding_mode="floor") == kind
            own.add_(known, novel, torch.where(of_kind, truth % num_true, -1))
    return [Confusions(*map(distributed.all_reduce_sum_, own)) for own in counts]


def protocol_metrics(
    confusions: Confusions, best_head: int, split: str, edits: Edits | None = None
) -> dict[str, float]:
    """Compute every metric of one split, as fractions by key (ARI may be negative).

    The keys are ``{split}/{known|novel|all}/{protocol}/{metric}/{avg|best}``, with the
    protocols of :data:`~uno.results.metrics.PROTOCOLS` and the metrics of
    :data:`~uno.results.metrics.METRICS`. "avg" is the mean over the heads, and "best"
    the value of ``best_head``. Known and all rows only have the metric "acc". The
    groups "known" and "novel" have no keys without counted rows, and "all" needs
    counted rows of both. ``{split}/novel/task_aware/chance/acc`` is the accuracy of
    random predictions. It is absent if no novel row is counted, or no cluster is left
    after merges and drops.

    Args:
        confusions: The counts, summed over workers.
        best_head: The index of the head with the lowest cluster loss in training. It is
            never chosen by accuracy.
        split: The first part of the keys, "train" or "test".
        edits: The merged and dropped classes, None if there are none. Rows of dropped
            outputs are rejected: they count as wrong, and NMI and ARI leave them out.
            If classes were dropped, ``{split}/{known|novel}/rejected`` is the share of
            a group's rows that the best head rejects when all outputs compete; a group
            without rows has no such key.
    """
    known, novel, joint = (counts.cpu().numpy() for counts in confusions)
    num_known, dropped = known.shape[-1], edits.dropped if edits else []
    aware = [block_diag(*blocks) for blocks in zip(known, novel, strict=True)]
    result: dict[str, float] = {}
    for name, protocol in metrics.PROTOCOLS.items():
        counts = aware if name == "task_aware" else joint
        heads = [
            metrics.scores(protocol.of, head, num_known, dropped) for head in counts
        ]
        for key in heads[best_head]:
            group, metric = key.split("/")
            result |= _average_and_best(
                heads, key, f"{split}/{group}/{name}/{metric}", best_head
            )
    num_clusters = novel.shape[2] if edits is None else edits.num_novel
    if novel.any() and num_clusters:
        chance = metrics.chance_accuracy(novel[0].sum(axis=1), num_clusters)
        result[f"{split}/novel/task_aware/chance/acc"] = chance
    of_best = joint[best_head]
    for group, rows in (("known", of_best[:num_known]), ("novel", of_best[num_known:])):
        if dropped and rows.any():
            result[f"{split}/{group}/rejected"] = float(
                rows[:, dropped].sum() / rows.sum()
            )
    return result


def gcd_metrics(
    joint: Tensor,
    num_known: int,
    best_head: int,
    split: str,
    edits: Edits | None = None,
) -> dict[str, float]:
    """Compute the accuracies of the unlabeled rows in the GCD setting.

    Args:
        joint: For each of H heads the counts of unlabeled rows by true class and
            output, int64 (H, C_l + C_u, C_l + K), for C_l known and C_u novel classes
            and K novel outputs, known ones first: ``joint`` of :class:`Confusions`.
        num_known: The number of known classes C_l.
        best_head: The index of the head with the lowest cluster loss in training.
        split: The first part of the keys, "train" or "test".
        edits: The merged and dropped classes, None if there are none. Rows of dropped
            outputs count as wrong.

    Returns:
        ``{split}/unlabeled/gcd/{all|old|new}/{avg|best}`` as fractions, where old are
        known and new are novel classes, avg is the mean over the heads, and best the
        best head. One matching of all classes to all outputs decides which rows are
        correct. A group without rows has no keys.
    """
    dropped = [] if edits is None else edits.dropped
    heads = [
        metrics.generalized(head, num_known, dropped) for head in joint.cpu().numpy()
    ]
    result: dict[str, float] = {}
    for name in heads[best_head]:
        result |= _average_and_best(
            heads, name, f"{split}/unlabeled/gcd/{name}", best_head
        )
    return result


def _average_and_best(
    heads: list[dict[str, float]], key: str, path: str, best_head: int
) -> dict[str, float]:
    """Return one metric as the mean over the heads, and as the value of the best head.

    Args:
        heads: The metrics of each head, by name.
        key: The name of the metric.
        path: The prefix of the returned keys, which end with "/avg" and "/best".
        best_head: The index of the best head.
    """
    values = [head[key] for head in heads]
    return {f"{path}/avg": float(np.mean(values)), f"{path}/best": values[best_head]}
