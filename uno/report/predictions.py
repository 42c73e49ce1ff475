"""What the model says about a sample of the run's rows, decoded and predicted chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from uno.augment import eval_view
from uno.config import Config
from uno.data.decode import decode_many, readable
from uno.data.rows import Chosen
from uno.data.splits import Task
from uno.model import UnoModel

MAX_ROWS = 20_000
MAX_ROWS_CPU = 4_000  # ResNet18 at 32 px: about a minute on two cores
MAX_ROWS_CPU_LARGE = 1_500  # images above 64 px
CHUNK = 256

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Predictions:
    """M rows of a task and what every head says of them; ``num_rows`` is the number the task has.

    ``index`` (M,) row numbers. ``features`` (M,D). Cosines: ``known`` (M,C_l), ``novel`` (M,H,K), ``over``
    (M,H,mK) or (M,0,0). ``similarity`` (K,K): cosines between the prototypes of the best head.
    """

    index: NDArray[np.int64]
    features: Floats
    known: Floats
    novel: Floats
    over: Floats
    similarity: Floats
    best_head: int
    temperature: float
    num_rows: int

    @property
    def num_known(self) -> int:
        """C_l."""
        return self.known.shape[1]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.novel.shape[1]

    @property
    def is_sample(self) -> bool:
        """Whether rows were left out."""
        return len(self.index) < self.num_rows

    def outputs(self, head: int) -> NDArray[np.int64]:
        """(M,) argmax over [known, novel of ``head``]; a tie goes to the known output, as in evaluation."""
        return np.concatenate([self.known, self.novel[:, head]], axis=1).argmax(axis=1)

    def confidence(self) -> Floats:
        """(M,) probability of the best head's output: softmax over known and novel cosines / temperature."""
        logits = np.concatenate([self.known, self.novel[:, self.best_head]], axis=1) / self.temperature
        return (1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)).astype(np.float32)


def max_rows(device: torch.device, size: int) -> int:
    """How many rows the report looks at: a bound on its time and memory."""
    if device.type == "cuda":
        return MAX_ROWS
    return MAX_ROWS_CPU if size <= 64 else MAX_ROWS_CPU_LARGE


def sample(task: Task, limit: int, seed: int) -> NDArray[np.int64]:
    """At most ``limit`` row numbers, ascending: a uniform sample within labeled, unlabeled and test rows.

    Each part keeps its share, so shares of classes inside a part are unbiased.
    """
    generator = np.random.default_rng([seed, 5])
    num = len(task.rows)
    if num <= limit:
        return np.arange(num)
    labeled = task.labels >= 0
    parts = [labeled, task.is_train & ~labeled, ~task.is_train]
    chosen = []
    for part in parts:
        rows = np.flatnonzero(part)
        chosen.append(generator.permutation(rows)[: int(limit * len(rows) / num)])
    return np.sort(np.concatenate(chosen))


@torch.inference_mode()
def predict(
    config: Config,
    task: Task,
    model: UnoModel,
    best_head: int,
    device: torch.device,
    limit: int | None = None,
) -> Predictions:
    """Decode a sample of ``task``'s rows and run all heads on it; unreadable images are left out.

    Args:
        config: of the run.
        task: of the run.
        model: in eval mode, prototypes normalised; moved to ``device``.
        best_head: the head that predictions come from.
        device: where the model runs.
        limit: rows at most; default :func:`max_rows`.
    """
    model = model.to(device)
    rows = sample(task, limit or max_rows(device, config.data.store_size), config.seed)
    side = min(config.augment.large.size, config.data.store_size)
    parts: list[tuple[NDArray[np.int64], list[Tensor]]] = []
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        images, reasons = decode_many(Chosen(task.rows.images, part), config.data.store_size)
        ok = readable(reasons)
        if not ok.any():
            continue
        views = eval_view(images[torch.from_numpy(ok)].to(device), side, config.data.mean, config.data.std)
        features = model.features(views).float()
        logits = model.heads(features)
        tensors = [features, logits.known[0]]
        assert logits.novel is not None
        tensors.append(logits.novel[0].transpose(0, 1))
        if logits.over is not None:
            tensors.append(logits.over[0].transpose(0, 1))
        parts.append((part[ok], [tensor.float().cpu() for tensor in tensors]))
    if not parts:
        raise ValueError("no image of the data can be read")
    columns = [torch.cat(column).numpy() for column in zip(*(part[1] for part in parts), strict=True)]
    prototypes = F.normalize(model.novel.weight[best_head].float().cpu(), dim=-1)
    return Predictions(
        np.concatenate([part[0] for part in parts]),
        columns[0],
        columns[1],
        columns[2],
        columns[3] if len(columns) > 3 else np.zeros((len(columns[0]), 0, 0), np.float32),
        (prototypes @ prototypes.T).numpy(),
        best_head,
        config.objective.temperature,
        len(task.rows),
    )
