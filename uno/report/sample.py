"""What the model of a run says of a sample of its rows."""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from uno.config import Config
from uno.data.files import Storage
from uno.data.plan import REPORT_SAMPLE
from uno.data.splits import Task
from uno.errors import StorageError
from uno.results.classes import OutputClass, called, first_classes
from uno.results.infer import (
    Classifier,
    Decode,
    align_heads,
    load_classifier,
    outcomes,
    sample_logits,
)
from uno.runs import run

MAX_ROWS, MAX_ROWS_CPU, MAX_ROWS_CPU_LARGE = 20_000, 4_000, 2_500
"""Rows looked at: on a GPU, or with features at hand; on two CPU cores, a minute or two
with ResNet18 at 32 px; above 64 px.
"""

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Sample:
    """M rows, of a task's ``num_rows``, and what the model says of them;
    ``num_unreadable`` more were tried.

    ``index`` (M,); ``features`` (M,D); cosines ``known`` (M,C_l), ``novel`` (M,H,K),
    every head's clusters in the order of the best head's, ``over`` (M,H,mK); ``votes``
    (M,H): every head's output, as in predictions; ``own`` (M,): the best head's, were
    all rows novel; ``confidence`` (M,) of the best head's; ``classes``: all outputs.
    """

    index: NDArray[np.int64]
    features: Floats
    known: Floats
    novel: Floats
    over: Floats | None
    votes: NDArray[np.int64]
    own: NDArray[np.int64]
    confidence: Floats
    best_head: int
    classes: list[OutputClass]
    model_hash: str
    num_rows: int
    num_unreadable: int

    @property
    def names(self) -> list[str]:
        """What predictions call each output."""
        return [name for name, _ in called(self.classes)]

    @property
    def kept(self) -> list[int]:
        """Outputs that are neither merged into another nor dropped, known ones
        first.
        """
        return [c.index for c in self.classes if c.into == c.index]

    @property
    def columns(self) -> tuple[list[str], NDArray[np.int64]]:
        """Names of the kept outputs and, where something was dropped, of "rejected",
        last; which of them each output is, -1 where it was merged.
        """
        dropped = [c.index for c in self.classes if c.into is None]
        places = np.full(len(self.classes), -1, dtype=np.int64)
        places[self.kept] = np.arange(len(self.kept))
        places[dropped] = len(self.kept)
        return [self.names[k] for k in [*self.kept, *dropped[:1]]], places

    @property
    def output(self) -> NDArray[np.int64]:
        """(M,) the best head's votes."""
        return self.votes[:, self.best_head]

    def member(self, task: Task) -> NDArray[np.int64]:
        """(M,) the class that a row is labeled with, else its output."""
        labels = task.labels[self.index]
        return np.where(labels >= 0, labels, self.output)

    @property
    def num_heads(self) -> int:
        """H."""
        return self.votes.shape[1]

    @property
    def is_whole(self) -> bool:
        """Whether no row was left out that can be read."""
        return len(self.index) + self.num_unreadable == self.num_rows


def choose_rows(task: Task, limit: int, seed: int) -> NDArray[np.int64]:
    """At most ``limit`` row numbers, ascending: a uniform sample within labeled,
    unlabeled and test rows.
    """
    num = len(task.rows)
    if num <= limit:
        return np.arange(num)
    generator, labeled = np.random.default_rng([seed, REPORT_SAMPLE]), task.labels >= 0
    groups = map(np.flatnonzero, (labeled, task.is_train & ~labeled, ~task.is_train))
    return np.sort(
        np.concatenate(
            [generator.permutation(g)[: int(limit * len(g) / num)] for g in groups]
        )
    )


def open_model(
    config: Config, storage: Storage, task: Task, device: torch.device | str
) -> Classifier:
    """The model of a run: that in ``model/``, or while there is none that of the
    newest checkpoint.
    """
    with suppress(StorageError):
        model = load_classifier(storage, device)
        if [c.name for c in model.classes if c.kind == "known"] == task.known:
            return model
    module, best_head = run.load_trained(
        config, storage, task.num_known, task.num_novel
    )
    classes = first_classes(task.known, task.num_novel)
    return Classifier(
        module.to(device), config, classes, best_head, None, "", torch.device(device)
    )


def score_sample(task: Task, model: Classifier, decode: Decode) -> Sample:
    """What ``model`` says of as many rows as take a minute, clusters of heads
    renumbered as in ``predictions.parquet``. ValueError: no image can be read.
    """
    config, best, size = model.config, model.best_head, model.size
    num = MAX_ROWS_CPU if size <= 64 else MAX_ROWS_CPU_LARGE
    ready = task.rows.images.prepared(np.arange(0))
    # features are cheap
    if model.device.type == "cuda" or (ready is not None and ready[0].ndim == 2):
        num = MAX_ROWS
    rows = choose_rows(task, num, config.seed)
    sampled = sample_logits(model, decode, rows, len(rows))
    if sampled is None:
        raise ValueError("no image of the data can be read")
    index, logits = sampled
    assert logits.novel is not None and logits.features is not None
    known, novel, alignment = logits.known[0], logits.novel[0], model.alignment
    if alignment is None:
        unlabeled = torch.from_numpy(task.is_train[index] & (task.labels[index] < 0))
        alignment = align_heads(novel[:, unlabeled], best)
    # (H, M, C)
    found = outcomes(
        known, novel, config.objective.temperature, model.classes, alignment
    )
    own = task.num_known + found[best, :, task.num_known :].argmax(dim=1)
    novel = novel.gather(2, alignment.cpu()[:, None].expand(novel.shape))  # (H, M, K)
    over = None if logits.over is None else logits.over[0].transpose(0, 1).numpy()
    return Sample(
        index,
        logits.features[0].numpy(),
        known.numpy(),
        novel.transpose(0, 1).numpy(),
        over,
        found.argmax(dim=2).T.numpy(),
        own.numpy(),
        found[best].amax(dim=1).numpy(),
        best,
        model.classes,
        model.model_hash,
        len(task.rows),
        len(rows) - len(index),
    )
