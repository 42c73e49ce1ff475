"""Predict a sample of the rows of a run, for its report."""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from uno.config import Config
from uno.data.files import Storage
from uno.data.sampling import REPORT_SAMPLE
from uno.data.splits import Task
from uno.errors import StorageError
from uno.results.classes import OutputClass, first_classes, prediction_labels
from uno.results.infer import (
    Classifier,
    Decode,
    align_heads,
    class_probabilities,
    load_classifier,
    sample_logits,
)
from uno.runs import run

# Rows in a sample: on a GPU or with features at hand; on the CPU, where 4,000 images of
# 32 px take a minute or two through ResNet18; and on the CPU above 64 px.
MAX_ROWS, MAX_ROWS_CPU, MAX_ROWS_CPU_LARGE = 20_000, 4_000, 2_500

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Sample:
    """M rows of a run with the predictions of its model.

    An output of the model is a known class or a cluster, and is named by its index,
    known classes first. The clusters of all heads are numbered as the corresponding
    clusters of the best head.

    Attributes:
        index: Row numbers (M,) in the data of the run.
        features: Features of the encoder (M, D).
        votes: The output that each of H cluster heads assigns to each row, (M, H).
        confidence: Probability of the best head's output, (M,).
        best_head: Index of the head with the lowest training loss.
        classes: All outputs of the model, known ones first.
        model_hash: Hash of the model, or an empty string while the run is unfinished.
        num_rows: Number of rows from which the sample was drawn.
        is_whole: Whether the sample holds all rows that can be read.
    """

    index: NDArray[np.int64]
    features: Floats
    votes: NDArray[np.int64]
    confidence: Floats
    best_head: int
    classes: list[OutputClass]
    model_hash: str
    num_rows: int
    is_whole: bool

    @property
    def names(self) -> list[str]:
        """The name of each output class of the model, as predictions show it.

        A discovered class is named like ``novel-1``, or as the user named it. A merged
        class keeps its own name. Classes that the user dropped share the name
        ``rejected``, or ``rejected-1`` and so on if another class has this name.
        """
        return [name for name, _ in prediction_labels(self.classes)]

    @property
    def kept(self) -> list[int]:
        """The indices of the output classes that the user neither merged nor dropped.

        They are ascending, so known classes come first.
        """
        return [c.index for c in self.classes if c.into == c.index]

    @property
    def columns(self) -> tuple[list[str], NDArray[np.int64]]:
        """The columns of a confusion matrix, and the column of each output class.

        The first value has the names of the columns: the classes that the user neither
        merged nor dropped and, if a class was dropped, one last column for the images
        of all dropped classes. The second value has for each output class the index of
        its column, int64. It is -1 for a class that was merged into another one, since
        no row is assigned to it.
        """
        dropped = [c.index for c in self.classes if c.into is None]
        places = np.full(len(self.classes), -1, dtype=np.int64)
        places[self.kept] = np.arange(len(self.kept))
        places[dropped] = len(self.kept)
        return [self.names[k] for k in [*self.kept, *dropped[:1]]], places

    @property
    def output(self) -> NDArray[np.int64]:
        """The output class that the best head assigns to each sampled row, int64 (M,).

        The best head is the one with the lowest training loss. A row is never assigned
        to a class that was merged into another one, but may be to a dropped class.
        """
        return self.votes[:, self.best_head]

    def classes_of_rows(self, task: Task) -> NDArray[np.int64]:
        """Return the class of each sampled row: its label, or else its prediction.

        Args:
            task: The rows of the run, with their labels.

        Returns:
            Indices of output classes, int64 (M,). Labeled rows have their known class.
            All other rows, test rows included, have the class that the head with the
            lowest training loss assigns.
        """
        labels = task.labels[self.index]
        return np.where(labels >= 0, labels, self.output)

    @property
    def num_heads(self) -> int:
        """Number of cluster heads of the model."""
        return self.votes.shape[1]


def choose_rows(task: Task, limit: int, seed: int) -> NDArray[np.int64]:
    """Choose at most ``limit`` rows of a run at random.

    Labeled rows, unlabeled training rows and test rows keep their shares. Their numbers
    are rounded down, so that a few less than ``limit`` may be chosen.

    Args:
        task: The rows of the run.
        limit: The largest number of rows. If the run has no more, all are chosen.
        seed: Seed of the random choice.

    Returns:
        Row numbers int64, in ascending order.
    """
    num_rows = len(task.rows)
    if num_rows <= limit:
        return np.arange(num_rows)
    generator = np.random.default_rng([seed, REPORT_SAMPLE])
    is_labeled = task.labels >= 0
    drawn = []
    for mask in (is_labeled, task.is_train & ~is_labeled, ~task.is_train):
        rows = np.flatnonzero(mask)
        num_drawn = int(limit * len(rows) / num_rows)
        drawn.append(generator.permutation(rows)[:num_drawn])
    return np.sort(np.concatenate(drawn))


def open_model(
    config: Config, storage: Storage, task: Task, device: torch.device | str
) -> Classifier:
    """Load the model of a run: the finished model, or else the newest checkpoint.

    The newest checkpoint of discovery is loaded if there is no finished model, if its
    files are damaged, or if the names of its known classes are not those of ``task``. A
    model from a checkpoint has no hash and no alignment of its heads. Its discovered
    classes have their first names, such as ``novel-1``, and none is merged or dropped.

    Args:
        config: The configuration of the run.
        storage: The run directory.
        task: The rows of the run, which tell the known classes and, for a checkpoint,
            the number of novel ones.
        device: The device for the model.

    Returns:
        The model, with its network in eval mode on the device, its output classes and
        its best head.

    Raises:
        StorageError: The directory has no valid checkpoint of discovery either.
        ConfigError: The library or the callable of the encoder or the method is
            missing, or its code lies in the run directory.
        RuntimeError: The checkpoint does not fit the network, as with other numbers of
            classes.
    """
    with suppress(StorageError):
        model = load_classifier(storage, device)
        if [c.name for c in model.classes if c.kind == "known"] == task.known:
            return model
    module, best_head = run.load_trained(
        config, storage, task.num_known, task.num_novel
    )
    classes = first_classes(task.known, task.num_novel)
    return Classifier(module.to(device), config, classes, best_head, None, "")


def score_sample(task: Task, model: Classifier, decode: Decode) -> Sample:
    """Predict a random sample of the rows of a run.

    The sample has at most 20,000 rows on a GPU or if features are in memory, else
    4,000, or 2,500 if images have sides of more than 64 pixels. If the model does not
    know which clusters of its heads are the same class, they are matched by the
    unlabeled training rows of the sample.

    Args:
        task: The rows of the run.
        model: The model of the run. Its configuration has the seed of the sample.
        decode: Decodes batches of row numbers for the model, as
            :func:`uno.results.infer.decoder` returns it.

    Returns:
        The rows that can be read, with features and predictions.

    Raises:
        ValueError: None of the drawn images can be read.
        StorageError: An image's file cannot be read now, but perhaps later.
        ConfigError: A file that holds many images, such as a tar shard, cannot be read.
    """
    best_head = model.best_head
    limit = MAX_ROWS_CPU if model.size <= 64 else MAX_ROWS_CPU_LARGE
    prepared = task.rows.images.prepared(np.arange(0))
    has_features = prepared is not None and prepared[0].ndim == 2
    if model.device.type == "cuda" or has_features:
        limit = MAX_ROWS
    rows = choose_rows(task, limit, model.config.seed)
    sampled = sample_logits(model, decode, rows, len(rows))
    if sampled is None:
        raise ValueError("no image of the data can be read")
    index, logits = sampled
    assert logits.novel is not None
    known, novel, alignment = logits.known[0], logits.novel[0], model.alignment
    if alignment is None:
        unlabeled = torch.from_numpy(task.is_train[index] & (task.labels[index] < 0))
        alignment = align_heads(novel[:, unlabeled], best_head)
    temperature = model.config.objective.temperature
    # (H, M, outputs)
    probabilities = class_probabilities(
        known, novel, temperature, model.classes, alignment
    )
    return Sample(
        index=index,
        features=logits.features[0].numpy(),
        votes=probabilities.argmax(dim=2).T.numpy(),
        confidence=probabilities[best_head].amax(dim=1).numpy(),
        best_head=best_head,
        classes=model.classes,
        model_hash=model.model_hash,
        num_rows=len(task.rows),
        is_whole=len(rows) == len(task.rows),
    )
