"""What a trial is scored by. Nobody has the true labels of the novel classes, so nobody
may tune on them.

``folds`` (default): a fold hides some known classes, discovers them from the others,
and is scored by the harmonic mean (Xian et al., CVPR 2017) of ``strict`` clustering
accuracy of the hidden rows and plain accuracy of held-out rows of the classes that
stayed known; the hidden ones alone count where classes are too small to hold a row out.
Accuracies are means over heads: the best head's is noisier and saturates on a fold's
easier problem (chosen on the digits, by true labels, on 8 configurations). Unlabeled
and test rows take no part.

``loss`` and ``agreement`` run the real problem: the cluster loss of the best head
(comparable only where neither temperature nor the number of clusters is searched), and
the agreement of all pairs of heads on the unlabeled rows. ``oracle`` scores by the true
labels, and everything it writes says so.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipelines.ray_data import shared_tensor
from tune import AGREEMENT, FOLDS, LOSS, ORACLE
from uno.config import Config
from uno.data.columns import Ids
from uno.data.decode import BadRows, ok_mask
from uno.data.files import Storage
from uno.data.images import Images, batches_of
from uno.data.mapped import NeighborViews
from uno.data.plan import TUNE_FOLDS
from uno.data.resident import EvalSet, train_set
from uno.data.row_blocks import HostRows, RowBlocks
from uno.data.splits import Task
from uno.data.stream import (
    EvalData,
    StreamedEvalSet,
    StreamSet,
    TrainData,
    decode_here,
    decoded_rows,
    stream_here,
)
from uno.errors import ConfigError
from uno.model import UnoModel, forward
from uno.results.evaluate import count, protocol_metrics
from uno.results.metrics import cluster_accuracy, confusion
from uno.state import TrainState
from uno.text import plural
from uno.train import Worker

# of each known class, to measure known accuracy on rows that were not trained on
HELD_OUT_EVERY = 5


class Unread(NamedTuple):
    """Images that trials read themselves, and the ids of their rows."""

    images: Images
    ids: Ids


Source = np.ndarray | list[np.ndarray] | str | Unread
"""What stands for the images of N rows: pixels uint8 (N,3,S,S), or a frozen encoder's
features float32 (N,1+V,D), in memory or in a ``.npy`` file; the parts of
:class:`~uno.data.mapped.NeighborViews`; or the images where they are.
"""


class SweepData(NamedTuple):
    """What trials see: ``images``, ``labels`` (N,), known class or -1, and
    ``unlabeled`` (N,) of training rows that can be read as far as that is known; for
    the oracle score alone ``oracle`` (N,), true novel class from 0 or -1.
    """

    images: Source
    labels: np.ndarray
    unlabeled: np.ndarray
    num_known: int
    num_novel: int
    oracle: np.ndarray | None


def sweep_data(task: Task, images: Source, ok: np.ndarray, score: str) -> SweepData:
    """What ``score`` may see of a task's readable rows ``ok`` (N,); true labels for
    the oracle alone.
    """
    usable, oracle = task.is_train & ok, None
    if score == ORACLE:
        oracle = np.where(
            usable, np.maximum(task.eval_labels - len(task.known), -1), -1
        )
        if oracle.max(initial=-1) < 0:
            raise ConfigError(
                "--score oracle needs the true novel classes, and this data set has"
                " none"
            )
    labels, unlabeled = np.where(usable, task.labels, -1), usable & (task.labels < 0)
    return SweepData(images, labels, unlabeled, len(task.known), task.num_novel, oracle)


class FoldRows(NamedTuple):
    """One discovery problem of a trial, as row numbers: ``train`` as
    :func:`~uno.data.splits.train_rows`, ``scored`` as a split of
    :func:`~uno.data.splits.truth_rows`; ``hidden`` are its pseudo-novel classes, none
    in the real problem.
    """

    name: str
    train: dict[str, Any]
    scored: tuple[Tensor, Tensor, Tensor]
    hidden: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of labeled rows and of rows to discover."""
        return len(self.train["labeled"]), len(self.train["unlabeled"])


class Fold(NamedTuple):
    """One discovery problem with its images."""

    name: str
    train: TrainData
    scored: EvalData
    hidden: tuple[int, ...] = ()


def make_folds(
    data: SweepData, score: str, num_folds: int, seed: int, hide: int | None = None
) -> list[FoldRows]:
    """The problems that every trial solves, all of one sweep the same: the real one,
    or folds.
    """
    if score != FOLDS:
        # of the real unlabeled rows -1, unless the oracle knows better
        labels = data.labels
        if data.oracle is not None:
            labels = np.where(
                data.unlabeled & (data.oracle >= 0),
                data.num_known + data.oracle,
                labels,
            )
        return [_fold("real", data, labels, data.unlabeled, data.num_novel)]
    folds: list[FoldRows] = []
    for hidden in hidden_classes(data.num_known, data.num_novel, num_folds, seed, hide):
        visible = [c for c in range(data.num_known) if c not in hidden]
        # the last entry is that of label -1
        renumbered = np.full(data.num_known + 1, -1)
        renumbered[[*visible, *hidden]] = np.arange(data.num_known)
        labels, novel = renumbered[data.labels], np.isin(data.labels, hidden)
        folds.append(
            _fold(f"fold{len(folds)}", data, labels, novel, len(hidden), hidden)
        )
    return folds


def _fold(
    name: str,
    data: SweepData,
    labels: np.ndarray,
    novel: np.ndarray,
    num_novel: int,
    hidden: tuple[int, ...] = (),
) -> FoldRows:
    """``labels`` int64 (N,): class within the fold, known first, or -1; ``novel``
    bool (N,): to discover.
    """
    held_out = np.zeros(len(labels), dtype=bool)  # classes of fewer rows keep them all
    for c in range(data.num_known):
        held_out[
            np.flatnonzero(data.labels == c)[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        ] = True
    labeled, unlabeled = (
        np.flatnonzero((data.labels >= 0) & ~novel & ~held_out),
        np.flatnonzero(novel),
    )
    rows = np.flatnonzero(held_out | novel)
    num_known, classes = data.num_known - len(hidden), torch.from_numpy(labels.copy())
    train = {
        "labeled": labeled,
        "labels": classes[labeled],
        "unlabeled": unlabeled,
        "num_known": num_known,
        "num_novel": num_novel,
    }
    return FoldRows(
        name,
        train,
        (torch.from_numpy(rows), classes[rows], torch.from_numpy(novel[rows])),
        hidden,
    )


def open_folds(
    source: Source, folds: list[FoldRows], config: Config, storage: Storage
) -> list[Fold]:
    """``folds`` with the images of ``source``: none is copied, and those that are where
    they were are read by threads of this process, which lists unreadable ones in
    ``storage``.
    """
    if isinstance(source, Unread):
        images = source.images
        bad = BadRows(source.ids, images, config.data.max_bad_fraction, storage)
        how = images, config.data.stored_size, decode_here(config, images), bad
        return [
            Fold(
                name,
                stream_here(config, bad, images, **train),
                StreamedEvalSet(truth, rows, novel, *how),
                hidden,
            )
            for name, train, (rows, truth, novel), hidden in folds
        ]
    values: Tensor | NeighborViews
    if isinstance(source, list):
        values = NeighborViews(*map(shared_tensor, source))
    else:
        values = shared_tensor(
            np.load(source, mmap_mode="r") if isinstance(source, str) else source
        )
    blocks = HostRows([values]) if isinstance(source, str) else RowBlocks([values])
    # of features the evaluation view
    seen = RowBlocks([values if values.ndim == 4 else values[:, 0]])
    return [
        Fold(
            name,
            train_set(blocks, **train),
            EvalSet(seen.select_rows(rows), truth, rows, novel),
            hidden,
        )
        for name, train, (rows, truth, novel), hidden in folds
    ]


def hidden_classes(
    num_known: int, num_novel: int, folds: int, seed: int, hide: int | None = None
) -> list[tuple[int, ...]]:
    """Which known classes each fold hides: windows of one permutation, so that all are
    hidden about as often; ``hide`` at once, by default the share of classes that is
    novel in the real problem.
    """
    if num_known < 3:
        needs = f"needs at least 3 of them, the data has {num_known}"
        raise ConfigError(
            f"--score folds hides known classes and {needs}; use --score agreement"
        )
    most = num_known - 1
    if hide is None:
        hide = min(
            max(math.floor(num_known * num_novel / (num_known + num_novel) + 0.5), 2),
            most,
        )
    if not 2 <= hide <= most:
        raise ConfigError(
            f"--hide {hide}: must be from 2 to {most}, one less than the known classes"
        )
    order = np.random.default_rng([seed, TUNE_FOLDS]).permutation(num_known).tolist()
    distinct = num_known // math.gcd(hide, num_known)
    if folds > distinct:
        what = (
            f"{plural(num_known, 'known class', 'known classes')}, {hide} hidden at"
            " once"
        )
        raise ConfigError(f"--folds {folds}: {what}, give {distinct}")
    return [
        tuple(sorted(order[(fold * hide + i) % num_known] for i in range(hide)))
        for fold in range(folds)
    ]


def measure(
    config: Config, fold: Fold, state: TrainState, score: str, worker: Worker
) -> dict[str, float]:
    """Score, to be maximized, its parts, and the number of ``rows`` a share of rows
    was measured on.
    """
    model, train, truth = state.model.eval(), fold.train, fold.scored.truth
    num_true = max(train.num_known, int(truth.max()) + 1)
    batches = fold.scored.batches(
        config.train.eval_batch_size, worker.rank, worker.world_size
    )
    metrics = protocol_metrics(
        count(model, config, batches, num_true)[0], state.best_head, "scored"
    )
    keys = {
        f"{group}_{which}": f"scored/{group}/task_agnostic_strict/acc/{which}"
        for group, which in product(("known", "novel"), ("best", "avg"))
    }
    parts = {name: metrics[key] for name, key in keys.items() if key in metrics}
    parts["loss"] = float(state.head_losses.min())
    if score == AGREEMENT:
        outputs = [
            _clusters(model, images, config)
            for images in _unlabeled_images(train, config)
        ]
        found = _agreement(torch.cat(outputs, dim=1).numpy(), train.num_novel)
        parts |= {"agreement": found, "rows": float(train.num_unlabeled)}
    elif score != LOSS:
        parts["rows"] = float((truth >= 0).sum())
    model.train()
    return {"score": combined(parts, score), **parts}


def combined(parts: Mapping[str, float], score: str) -> float:
    """One number of the parts; of accuracies the harmonic mean."""
    if score == LOSS:
        return -parts["loss"]
    if score == AGREEMENT:
        return parts["agreement"]
    accuracies = [parts[name] for name in ("novel_avg", "known_avg") if name in parts]
    return statistics.harmonic_mean(accuracies)


def _unlabeled_images(train: TrainData, config: Config) -> Iterator[Tensor]:
    """Those that can be read, a batch at a time."""
    size = config.train.eval_batch_size
    if not isinstance(train, StreamSet):
        yield from train.unlabeled_images.split(size)
        return
    rows = train.unlabeled
    batches = batches_of(
        train.images, rows, decoded_rows(size, config.data.stored_size)
    )
    for _, images, reasons in train.decode(rows[batch] for batch in batches):
        if (ok := ok_mask(reasons)).any():
            yield images[torch.from_numpy(ok)]


def _clusters(model: UnoModel, images: Tensor, config: Config) -> Tensor:
    """The cluster of each of B ``images`` under every head, int64 (H, B)."""
    novel = forward(model, images, config).novel
    assert novel is not None
    return novel[0].argmax(dim=-1).cpu()


def _agreement(heads: np.ndarray, num_clusters: int) -> float:
    """Mean accuracy of the clusters of one of ``heads`` (H, N) against those of
    another, over pairs.
    """
    tables = [
        confusion(a, b, num_clusters, num_clusters) for a, b in combinations(heads, 2)
    ]
    return float(np.mean([cluster_accuracy(table) for table in tables]))
