"""Score hyperparameter trials on folds: discovery problems that hide known classes.

``folds`` is the default score. A fold hides some known classes and discovers them from
the others. Its score is the harmonic mean (Xian et al., CVPR 2017) of two accuracies:
the ``strict`` clustering accuracy of the hidden rows, and the accuracy of held-out rows
of the classes that stayed known. If classes are too small to hold a row out, only the
first counts. Both accuracies are means over heads. The best head alone gives a noisier
score, and its score saturates on the easier problem of a fold. (This was decided on the
digits with true labels, on 8 configurations.) Unlabeled and test rows take no part.

``agreement`` uses the real problem: it is the agreement of all pairs of heads on the
unlabeled rows, in the GCD setting on those that a head does not assign to a known
class. No score sees a true label of a novel class.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines.ray_data import shared_tensor
from tune import AGREEMENT, FOLDS
from uno.config import Config
from uno.data.files import Storage
from uno.data.images import Images
from uno.data.memory import EvalSet, RowBlocks, train_set
from uno.data.sampling import TUNE_FOLDS
from uno.data.splits import Task
from uno.data.stream import (
    EvalData,
    StreamedEvalSet,
    StreamedImages,
    TrainData,
    stream_here,
)
from uno.data.unreadable import BadRows
from uno.errors import ConfigError
from uno.model import UnoModel, forward
from uno.results.evaluate import count_outputs, protocol_metrics
from uno.results.metrics import cluster_accuracy, confusion
from uno.steps import TrainState
from uno.text import plural

# Every fifth row of a known class is held out, to measure the known accuracy.
HELD_OUT_EVERY = 5


class Unread(NamedTuple):
    """Images that are not in memory, and that each trial reads itself.

    Attributes:
        images: The images of N rows, which can be read by row number.
        ids: The ids of these rows.
    """

    images: Images
    ids: pa.LargeStringArray


Source = np.ndarray | Unread
"""The images of N rows, or what replaces them.

An array holds pixels, uint8 (N,3,S,S), or features of a frozen encoder, float32
(N,1+V,D). :class:`Unread` holds images that are read when they are needed.
"""


class SweepData(NamedTuple):
    """The training data that all trials of a sweep share, N rows.

    Attributes:
        images: Pixels uint8 (N, 3, S, S) with sides of S pixels; or features of a
            frozen encoder, float32 (N, 1 + V, D), D numbers for the evaluation view and
            for each of V random views; or images that are read later, :class:`Unread`.
        labels: int64 (N,): the known class of a labeled training row, or -1.
        unlabeled: bool (N,): whether a row is an unlabeled training row. Rows that are
            known to be unreadable are neither labeled nor unlabeled.
        num_known: The number of known classes.
        num_novel: The number of novel classes.
    """

    images: Source
    labels: np.ndarray
    unlabeled: np.ndarray
    num_known: int
    num_novel: int


def sweep_data(task: Task, images: Source, ok: np.ndarray) -> SweepData:
    """Return the rows, images and labels that trials may see.

    Args:
        task: The N rows of the sweep, labeled and unlabeled.
        images: The images of these N rows: an array of pixels or features, or images
            that are read later, see :data:`Source`.
        ok: bool (N,), whether a row can be read. Test rows and rows that cannot be read
            are neither labeled nor unlabeled in the result.
    """
    usable = task.is_train & ok
    labels, unlabeled = np.where(usable, task.labels, -1), usable & (task.labels < 0)
    return SweepData(images, labels, unlabeled, len(task.known), task.num_novel)


class FoldRows(NamedTuple):
    """One discovery problem that a trial solves, as row numbers.

    Attributes:
        name: ``fold0``, ``fold1`` and so on; or ``real`` for the problem itself, in
            which no known class is hidden.
        train: The training rows, as :func:`~uno.data.splits.train_rows` returns them.
        scored: The R rows on which a trial is scored, as tensors (R,): ``index``, their
            row numbers; ``truth``, their classes in this problem, -1 if unknown; and
            ``unlabeled``, whether a row is to be discovered (True) or is a held-out row
            of a known class (False).
        hidden: The known classes that the fold hides and discovers; empty for ``real``.
    """

    name: str
    train: dict[str, Any]
    scored: dict[str, Tensor]
    hidden: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of labeled training rows, and of rows to discover classes among.

        Rows that are held out of training to measure the known accuracy count in
        neither.
        """
        return len(self.train["labeled"]), len(self.train["unlabeled"])


class Fold(NamedTuple):
    """One discovery problem that a trial solves, with its images.

    Attributes:
        rows: The problem as row numbers, with its name and its hidden classes.
        train: The training set.
        scored: The rows on which a trial is scored, with their true classes.
    """

    rows: FoldRows
    train: TrainData
    scored: EvalData


def make_folds(
    data: SweepData, score: str, num_folds: int, seed: int, hide: int | None = None
) -> list[FoldRows]:
    """Return the discovery problems that every trial of a sweep solves, as row numbers.

    Args:
        data: The data of the sweep.
        score: The name of the score by which trials are compared. ``folds`` is the
            accuracy on known classes that are hidden and on the others, and
            ``agreement`` is how well the heads agree, see :data:`tune.SCORES`.
        num_folds: The number of folds. Only the score ``folds`` uses it.
        seed: The seed of the choice of hidden classes.
        hide: The number of known classes that each fold hides; None for the default of
            :func:`hidden_classes`.

    Returns:
        For the score ``folds``, problems that each hide some known classes and discover
        them from the others; unlabeled rows take no part. For every other score only
        the real problem: to discover the classes of the unlabeled rows, without hidden
        classes. Each problem has its training rows, and the rows on which a trial is
        scored. With hidden classes, the classes of a problem are numbered anew: those
        that stay known first, then the hidden ones.

    Raises:
        ConfigError: There are too few known classes for these folds.
    """
    if score != FOLDS:
        real = _make_fold("real", data, data.labels, data.unlabeled, data.num_novel)
        return [real]
    folds: list[FoldRows] = []
    for hidden in hidden_classes(data.num_known, data.num_novel, num_folds, seed, hide):
        visible = [c for c in range(data.num_known) if c not in hidden]
        # The last entry is for label -1.
        renumbered = np.full(data.num_known + 1, -1)
        renumbered[[*visible, *hidden]] = np.arange(data.num_known)
        labels, novel = renumbered[data.labels], np.isin(data.labels, hidden)
        folds.append(
            _make_fold(f"fold{len(folds)}", data, labels, novel, len(hidden), hidden)
        )
    return folds


def _make_fold(
    name: str,
    data: SweepData,
    labels: np.ndarray,
    novel: np.ndarray,
    num_novel: int,
    hidden: tuple[int, ...] = (),
) -> FoldRows:
    """Return one discovery problem of a trial as row numbers.

    Every fifth labeled row of each class that stays known is held out of training, none
    of a class with fewer than five. All rows of hidden classes are trained on, without
    their labels. Held-out rows and the rows to discover are scored.

    Args:
        name: The name of the problem.
        data: The data of the sweep, N rows.
        labels: int64 (N,), the class of each row within the problem, known classes
            first; -1 if it is unknown.
        novel: bool (N,), the rows to discover: those of hidden classes, or in the real
            problem the unlabeled ones.
        num_novel: The number of classes to discover.
        hidden: The known classes, as numbered in ``data.labels``, that the problem
            hides. It has that many fewer known classes. Empty for the real problem.

    Returns:
        The row numbers of the labeled rows to train on, with their labels, of the rows
        to discover, and of the rows to score, with their classes.
    """
    # Of a class with fewer than 5 rows none is held out.
    held_out = np.zeros(len(labels), dtype=bool)
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
    scored = {
        "index": torch.from_numpy(rows),
        "truth": classes[rows],
        "unlabeled": torch.from_numpy(novel[rows]),
    }
    return FoldRows(name, train, scored, hidden)


def open_folds(
    source: Source, folds: list[FoldRows], config: Config, storage: Storage
) -> list[Fold]:
    """Return discovery problems with their images, from problems as row numbers.

    No image is copied. Images that are not in memory are read by threads of this
    process when they are needed.

    Args:
        source: The images of all rows of the sweep: an array of pixels or features, or
            images that are read later, see :data:`Source`.
        folds: The problems as row numbers.
        config: The configuration of the trial.
        storage: The directory of the trial, in which images are listed that prove
            unreadable.

    Returns:
        Each problem with its training set, and with the rows on which a trial is
        scored.
    """
    if isinstance(source, Unread):
        images = source.images
        bad = BadRows(source.ids, images, config.data.max_bad_fraction, storage)
        streamed = StreamedImages.of(config, images, bad)
        return [
            Fold(
                rows,
                stream_here(config, streamed, **rows.train),
                StreamedEvalSet(**rows.scored, source=streamed),
            )
            for rows in folds
        ]
    values = shared_tensor(source)
    blocks = RowBlocks([values])
    # For features this is the evaluation view.
    seen = RowBlocks([values if values.ndim == 4 else values[:, 0]])
    return [
        Fold(rows, train_set(blocks, **rows.train), EvalSet(**rows.scored, images=seen))
        for rows in folds
    ]


def hidden_classes(
    num_known: int, num_novel: int, folds: int, seed: int, hide: int | None = None
) -> list[tuple[int, ...]]:
    """Choose the known classes that each fold hides.

    The folds take consecutive windows of one random permutation of the classes, so that
    all classes are hidden about equally often.

    Args:
        num_known: The number of known classes.
        num_novel: The number of novel classes.
        folds: The number of folds.
        seed: The seed of the permutation.
        hide: The number of classes that each fold hides. None for the default: the same
            share of the known classes as the novel classes are of all classes, rounded,
            but at least 2 classes, and at most all but one.

    Returns:
        For each fold the sorted indices of its hidden classes, ``hide`` of the known
        ones.

    Raises:
        ConfigError: There are fewer than 3 known classes; ``hide`` is less than 2 or
            leaves no known class; or there are fewer different folds than ``folds``.
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
    config: Config, fold: Fold, state: TrainState, score: str
) -> dict[str, float]:
    """Compute the score of a trained model on one discovery problem.

    The model computes in evaluation mode, and is in training mode afterwards.

    Args:
        config: The configuration of the trial.
        fold: The problem, with the rows to score.
        state: The state of training, with the model.
        score: The name of the score. ``folds`` is the harmonic mean of the
            accuracies on classes to discover and on held-out rows of known classes,
            and ``agreement`` is how well the heads agree on the rows to discover.

    Returns:
        ``score``, which is to be maximized, and more values by name. ``known_best`` and
        ``novel_best`` are the accuracies 0-1 of the best head, that with the lowest
        cluster loss, and ``known_avg`` and ``novel_avg`` are means over heads; an
        accuracy is left out if no scored row has such a class. ``loss`` is the cluster
        loss of the best head. The score ``agreement`` adds ``agreement`` 0-1. ``rows``
        is the number of rows of which the score is a share: the scored rows with a
        class for ``folds``, and the unlabeled rows for ``agreement``, although in the
        GCD setting the score leaves some of these out.
    """
    model, train, truth = state.model.eval(), fold.train, fold.scored.truth
    num_true = max(train.num_known, int(truth.max()) + 1)
    batches = fold.scored.batches(config.train.eval_batch_size)
    metrics = protocol_metrics(
        count_outputs(model, config, batches, num_true)[0], state.best_head, "scored"
    )
    keys = {
        f"{group}_{which}": f"scored/{group}/task_agnostic_strict/acc/{which}"
        for group, which in product(("known", "novel"), ("best", "avg"))
    }
    parts = {name: metrics[key] for name, key in keys.items() if key in metrics}
    parts["loss"] = float(state.head_losses.min())
    if score == AGREEMENT:
        outputs = [
            _assign_clusters(model, images, config)
            for images in _unlabeled_images(train, config)
        ]
        found = _head_agreement(torch.cat(outputs, dim=1).numpy(), train.num_novel)
        parts |= {"agreement": found, "rows": float(train.num_unlabeled)}
    else:
        parts["rows"] = float((truth >= 0).sum())
    model.train()
    return {"score": combined(parts, score), **parts}


def combined(parts: Mapping[str, float], score: str) -> float:
    """Return the score of a trial from the accuracies or the agreement of its model.

    Args:
        parts: The results of :func:`measure` by name, except for ``score``.
        score: The name of the score. ``agreement`` is ``parts["agreement"]``, and
            ``folds`` is the harmonic mean of ``novel_avg`` and, if it is there,
            ``known_avg``, which are accuracies 0-1.

    Returns:
        The score, which is to be maximized.
    """
    if score == AGREEMENT:
        return parts["agreement"]
    accuracies = [parts[name] for name in ("novel_avg", "known_avg") if name in parts]
    return statistics.harmonic_mean(accuracies)


def _unlabeled_images(train: TrainData, config: Config) -> Iterator[Tensor]:
    """Yield the images to discover of a training set, or their features, in batches.

    Images that cannot be read are left out.

    Args:
        train: The training set, whose unlabeled rows are those to discover.
        config: The configuration of the trial, with the batch size of evaluation.

    Yields:
        Pixels uint8 (B, 3, S, S), or cached features of a frozen encoder.
    """
    rows = [np.arange(0), np.arange(train.num_unlabeled)]
    batches, read = train.plan_reading(rows, config.train.eval_batch_size)
    for images, ok in read(batches):
        if ok.any():
            yield images if ok.all() else images[torch.from_numpy(ok)]


def _assign_clusters(model: UnoModel, images: Tensor, config: Config) -> Tensor:
    """Return the most likely novel cluster of each image under every cluster head.

    Args:
        model: The model, in eval mode.
        images: B images, or their features, as :func:`uno.model.forward` takes them.
        config: The configuration of the trial. In the GCD setting known classes compete
            with the clusters.

    Returns:
        Cluster indices, int64 (H, B) for H heads, on the CPU. In the GCD setting it is
        -1 where a known class is more likely than every cluster of the head.
    """
    logits = forward(model, images, config)
    assert logits.novel is not None
    highest, clusters = logits.novel[0].max(dim=-1)
    if config.data.setting == "gcd":
        clusters[logits.known[0].amax(dim=-1) > highest] = -1
    return clusters.cpu()


def _head_agreement(heads: np.ndarray, num_clusters: int) -> float:
    """Return how well the cluster assignments of different heads agree.

    For each pair of heads it is the clustering accuracy (after the best one-to-one
    matching of clusters) of one head's clusters with the other head's as labels. A row
    that only one of the two heads puts into a cluster counts as wrong, and a row that
    neither does is left out: else heads that find only known classes would agree best.

    Args:
        heads: int64 (H, N), the cluster of each row under every head, or -1 for a known
            class.
        num_clusters: The number of clusters of a head.

    Returns:
        The mean over all pairs of heads, 0-1. A pair without a row in a cluster counts
        as 0.
    """
    agreements = []
    for a, b in combinations(heads, 2):
        in_both = (a >= 0) & (b >= 0)
        in_any = (a >= 0) | (b >= 0)
        agreement = 0.0
        if in_both.any():
            table = confusion(a[in_both], b[in_both], num_clusters, num_clusters)
            agreement = cluster_accuracy(table) * in_both.sum() / in_any.sum()
        agreements.append(agreement)
    return float(np.mean(agreements))
