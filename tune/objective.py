"""What a trial is scored by. Nobody has the true labels of the novel classes, so nobody may tune on them.

``folds`` (default). Known classes play novel ones: a fold hides some of the known classes, discovers them
from the other known classes, and is scored by ``strict`` clustering accuracy of the hidden rows together with
plain accuracy of held-out rows of the classes that stayed known. The two are combined by their harmonic mean,
as in generalised zero-shot learning (Xian et al., CVPR 2017): 0 where one is lost, and a gain on the weaker
counts more; the hidden classes alone count where classes are too small to hold a row out. A fold hides the
share of classes that is novel in the real problem, and folds take turns through the known classes, so that
each is hidden about equally often.

Accuracies are means over heads, not the best head's, which is noisier and saturates on the easier problem of
a fold (chosen on the digits, by true labels, on 8 configurations); a run still reports the best head.

The real unlabeled rows take no part in the folds: they have no labels to be scored by, and as training rows
they would be a third kind that the real run does not have. Test rows take no part either; held out is every
fifth labeled row of a class. So a sweep reads ``Task.labels`` and nothing else.

``loss`` and ``agreement`` run the real problem: the cluster loss of the best head (comparable only where
neither temperature nor the number of clusters is searched), and the mean clustering agreement of all pairs of
heads on the unlabeled rows. ``oracle`` scores the real problem by the true labels: for research on benchmarks
only, and everything it writes says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from uno.config import Config
from uno.data.resident import EvalSet, TrainSet
from uno.data.splits import Task
from uno.errors import ConfigError
from uno.model import UnoModel
from uno.results.evaluate import count, protocol_metrics
from uno.results.forward import forward
from uno.results.metrics import cluster_accuracy, confusion
from uno.state import TrainState

FOLDS, LOSS, AGREEMENT, ORACLE = "folds", "loss", "agreement", "oracle"
SCORES = (FOLDS, LOSS, AGREEMENT, ORACLE)
HELD_OUT_EVERY = 5  # of each known class, to measure known accuracy on rows that were not trained on
FOLD_STREAM = 11  # of the seed's randomness: which known classes are hidden

SENTENCES = {
    FOLDS: "known classes hidden in turn and rediscovered: harmonic mean of strict accuracy on the hidden "
    "classes and accuracy on held-out rows of the known ones, each a mean over heads",
    LOSS: "minus the training cluster loss of the best head, no labels",
    AGREEMENT: "mean clustering agreement of all pairs of heads on the unlabeled rows, no labels",
    ORACLE: "ORACLE: true labels of the novel classes; for research on benchmarks, never a result",
}


@dataclass(frozen=True, eq=False)
class SweepData:
    """What trials see of a data set: ``images`` uint8 (N,3,S,S), ``labels`` int64 (N,) known class or -1.

    ``labels`` are of training rows that decoded; ``unlabeled`` bool (N,) marks the training rows to discover.
    ``oracle`` int64 (N,), true novel class from 0 or -1, exists only for the oracle score.
    """

    images: np.ndarray
    labels: np.ndarray
    unlabeled: np.ndarray
    num_known: int
    num_novel: int
    oracle: np.ndarray | None = None


def sweep_data(task: Task, images: Tensor, ok: np.ndarray, score: str) -> SweepData:
    """The part of a task that ``score`` may see; ``Task.eval_labels`` are read for the oracle alone."""
    usable = task.is_train & ok
    labels = np.where(usable, task.labels, -1)
    oracle = None
    if score == ORACLE:
        if not (task.eval_labels[usable] >= len(task.known)).any():
            raise ConfigError("--score oracle needs the true novel classes, and this data set has none")
        oracle = np.where(task.eval_labels >= len(task.known), task.eval_labels - len(task.known), -1)
    unlabeled = usable & (task.labels < 0)
    return SweepData(images.numpy(), labels, unlabeled, len(task.known), task.num_novel, oracle)


@dataclass(frozen=True, eq=False)
class Problem:
    """One discovery problem of a trial: what is trained on, and rows with their class to be scored by.

    ``hidden`` names the pseudo-novel classes; empty for the real problem. ``num_true`` novel classes are
    known to whoever scores: the hidden ones, or the oracle's.
    """

    name: str
    train: TrainSet
    scored: EvalSet
    num_true: int
    hidden: tuple[int, ...] = ()


# --------------------------------------------------------------------------------------------------- problems
def hidden_classes(
    num_known: int, num_novel: int, folds: int, seed: int, hide: int | None = None
) -> list[tuple[int, ...]]:
    """Which known classes each fold hides: windows of one permutation, so that all are hidden about as often.

    ``hide`` classes at once; by default the share of classes that is novel in the real problem, at least two
    and at most all but one.

    Raises:
        ConfigError: too few known classes.
    """
    if num_known < 3:
        raise ConfigError(
            f"--score folds hides known classes and needs at least 3 of them, the data has {num_known}; "
            "use --score agreement"
        )
    if hide is None:
        hide = math.floor(num_known * num_novel / (num_known + num_novel) + 0.5)
        hide = min(max(hide, 2), num_known - 1)
    if not 2 <= hide < num_known:
        raise ConfigError(
            f"--hide {hide}: must be from 2 to {num_known - 1}, one less than the known classes"
        )
    order = np.random.default_rng([seed, FOLD_STREAM]).permutation(num_known)
    distinct = num_known // math.gcd(hide, num_known)
    if folds > distinct:
        raise ConfigError(
            f"--folds {folds}: {num_known} known classes, {hide} hidden at once, give {distinct}"
        )
    return [
        tuple(sorted(int(order[(fold * hide + i) % num_known]) for i in range(hide))) for fold in range(folds)
    ]


def problems(data: SweepData, score: str, folds: int, seed: int, hide: int | None = None) -> list[Problem]:
    """The problems that every trial solves, all of one sweep the same."""
    if score != FOLDS:
        return [_real_problem(data)]
    hidden = hidden_classes(data.num_known, data.num_novel, folds, seed, hide)
    return [_fold(data, f"fold{i}", classes) for i, classes in enumerate(hidden)]


def _fold(data: SweepData, name: str, hidden: tuple[int, ...]) -> Problem:
    visible = [c for c in range(data.num_known) if c not in hidden]
    index = {c: i for i, c in enumerate([*visible, *hidden])}
    is_hidden = np.isin(data.labels, hidden)
    novel = np.flatnonzero(is_hidden)
    held_out = _held_out(data.labels) & ~is_hidden
    labeled = np.flatnonzero((data.labels >= 0) & ~is_hidden & ~held_out)
    train = TrainSet(
        _images(data, labeled),
        _truth(data.labels[labeled], index),
        _images(data, novel),
        len(visible),
        len(hidden),
    )
    rows = np.concatenate([np.flatnonzero(held_out), novel])
    scored = EvalSet(_images(data, rows), _truth(data.labels[rows], index), torch.from_numpy(rows))
    return Problem(name, train, scored, len(hidden), hidden)


def _real_problem(data: SweepData) -> Problem:
    """The real unlabeled rows; their truth is -1 unless the oracle gives it."""
    held_out = _held_out(data.labels)
    labeled, unlabeled = np.flatnonzero((data.labels >= 0) & ~held_out), np.flatnonzero(data.unlabeled)
    train = TrainSet(
        _images(data, labeled), torch.from_numpy(data.labels[labeled]), _images(data, unlabeled),
        data.num_known, data.num_novel,
    )  # fmt: skip
    rows = np.concatenate([np.flatnonzero(held_out), unlabeled])
    truth, num_true = data.labels.copy(), 0
    if data.oracle is not None:
        num_true = int(data.oracle.max()) + 1
        truth = np.where(data.unlabeled & (data.oracle >= 0), data.num_known + data.oracle, truth)
    scored = EvalSet(_images(data, rows), torch.from_numpy(truth[rows]), torch.from_numpy(rows))
    return Problem("real", train, scored, num_true)


def _held_out(labels: np.ndarray) -> np.ndarray:
    """bool (N,): every fifth labeled row of a class; classes of fewer rows keep them all."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in range(int(labels.max(initial=-1)) + 1):
        chosen[np.flatnonzero(labels == label)[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]] = True
    return chosen


def _images(data: SweepData, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(data.images[rows])


def _truth(labels: np.ndarray, index: Mapping[int, int]) -> Tensor:
    return torch.tensor([index[int(label)] for label in labels], dtype=torch.int64)


# ----------------------------------------------------------------------------------------------------- scores
def measure(
    config: Config, problem: Problem, state: TrainState, score: str, rank: int, world: int
) -> dict[str, float]:
    """Score and its parts after an epoch, the same on every worker; ``score`` is to be maximised.

    ``rows`` are those that a score which is a share of rows was measured on.
    """
    model = state.model.eval()
    best_head = state.best_head
    rows = problem.scored.batches(config.train.eval_batch_size, rank, world)
    counts = count(model, config, rows, problem.train.num_known + problem.num_true)
    metrics = protocol_metrics(counts, best_head, "scored")
    parts = {"loss": float(state.head_losses.min())}
    names = {"known": "known", "novel": "novel"}
    for name, group in names.items():
        for which in ("best", "avg"):
            key = f"scored/{group}/task_agnostic_strict/acc/{which}"
            if key in metrics:
                parts[f"{name}_{which}"] = metrics[key]
    if score == AGREEMENT:
        parts["agreement"] = _agreement(model, config, problem)
    model.train()
    if score != LOSS:
        truth, hidden = problem.scored.truth, problem.train.unlabeled_images
        parts["rows"] = float(len(hidden) if score == AGREEMENT else (truth >= 0).sum())
    return {"score": _score(parts, score), **parts}


def _score(parts: Mapping[str, float], score: str) -> float:
    if score == LOSS:
        return -parts["loss"]
    if score == AGREEMENT:
        return parts["agreement"]
    return (
        harmonic_mean(parts["known_avg"], parts["novel_avg"]) if "known_avg" in parts else parts["novel_avg"]
    )


def harmonic_mean(a: float, b: float) -> float:
    """2ab / (a + b); 0 where one is 0."""
    return 2 * a * b / (a + b) if a + b > 0 else 0.0


def _agreement(model: UnoModel, config: Config, problem: Problem) -> float:
    """Mean over pairs of heads of the clustering accuracy of one head's clusters against the other's."""
    outputs = []
    for part in problem.train.unlabeled_images.split(config.train.eval_batch_size):
        novel = forward(model, part, config).novel
        assert novel is not None
        outputs.append(novel[0].argmax(dim=-1).cpu())
    heads = torch.cat(outputs, dim=1).numpy()
    clusters = problem.train.num_novel
    pairs = combinations(range(len(heads)), 2)
    return float(
        np.mean([cluster_accuracy(confusion(heads[a], heads[b], clusters, clusters)) for a, b in pairs])
    )


def check_score(score: str, values_of_num_heads: Sequence[int]) -> None:
    """Raise ConfigError where a score is undefined for a value that the space allows."""
    if score not in SCORES:
        raise ConfigError(f"unknown score {score!r}; choose {', '.join(SCORES)}")
    if score == AGREEMENT and min(values_of_num_heads) < 2:
        raise ConfigError(
            "--score agreement compares heads: every trial needs two or more, and baselines have one "
            "(model.num_heads)"
        )
