"""What is known of a run: what its directory says, and what its model says of a sample of its rows."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from uno.config import Config
from uno.data.files import Storage
from uno.data.splits import Task
from uno.errors import StorageError
from uno.results.classes import OutputClass
from uno.results.infer import Classifier, Decode, align_heads, load_classifier, sample_logits
from uno.runs import run
from uno.runs.journal import read_journal

MAX_ROWS, MAX_ROWS_CPU, MAX_ROWS_CPU_LARGE = 20_000, 4_000, 1_500
"""Rows looked at: on a GPU; on two CPU cores, about a minute with ResNet18 at 32 px; above 64 px."""

Floats = NDArray[np.float32]


# ------------------------------------------------------------------------------------------ the run directory
@dataclass(frozen=True)
class Facts:
    """The contents of a run directory; empty where a file is missing or damaged (``unreadable`` names it).

    ``bad`` are (id, reason) of the images that could not be read.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    journal: list[dict[str, Any]] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    config_yaml: str = ""
    estimate: dict[str, Any] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    def entries(self, phase: str) -> list[dict[str, Any]]:
        """The journal's lines of a phase."""
        return [entry for entry in self.journal if entry.get("phase") == phase]

    def last(self, phase: str) -> dict[str, Any]:
        """The newest line of a phase, {} without any."""
        return (self.entries(phase) or [{}])[-1]

    def head_losses(self) -> list[list[float]]:
        """Per epoch of the discovery phase, the cluster loss of every head."""
        losses = [entry.get("head_losses") for entry in self.entries("discover")]
        rows = [row for row in losses if isinstance(row, list) and all(map(is_number, row))]
        return [row for row in rows if len(row) == len(rows[-1])]


def read_facts(storage: Storage) -> Facts:
    """Read what is there."""
    unreadable: list[str] = []

    def read(name: str) -> str:
        try:
            return storage.read(name).decode(errors="replace") if storage.exists(name) else ""
        except StorageError:
            unreadable.append(name)
            return ""

    def mapping(name: str) -> dict[str, Any]:
        value = _mapping(read(name) or "{}")
        if value is None:
            unreadable.append(name)
        return value or {}

    bad = [_mapping(line) for line in read("bad_samples.jsonl").splitlines()]
    return Facts(
        {key: float(value) for key, value in mapping("metrics.json").items() if is_number(value)},
        mapping("environment.json"),
        read_journal(storage),
        [(str(entry.get("id", "")), str(entry.get("reason", ""))) for entry in bad if entry is not None],
        read("config.yaml"),
        mapping("estimate.json"),
        tuple(unreadable),
    )


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# ---------------------------------------------------------------------------------------- what the model says
@dataclass(frozen=True, eq=False)
class Sample:
    """M rows of a task and what the model says of them; ``num_rows`` is the number the task has.

    ``index`` (M,) row numbers. ``features`` (M,D). Cosines: ``known`` (M,C_l), ``novel`` (M,H,K) with every
    head's clusters in the order of the best head's, ``over`` (M,H,mK) where there are such heads. ``votes``
    (M,H): every head's output, before classes are merged or dropped. ``confidence`` (M,): probability of the
    best head's output. ``similarity`` (K,K): cosines of the best head's prototypes. ``names`` of all outputs.
    """

    index: NDArray[np.int64]
    features: Floats
    known: Floats
    novel: Floats
    over: Floats | None
    votes: NDArray[np.int64]
    confidence: Floats
    similarity: Floats
    best_head: int
    names: list[str]
    num_rows: int

    @property
    def output(self) -> NDArray[np.int64]:
        """(M,) the best head's votes."""
        return self.votes[:, self.best_head]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.votes.shape[1]

    @property
    def is_whole(self) -> bool:
        """Whether no row was left out."""
        return len(self.index) == self.num_rows


def choose_rows(task: Task, limit: int, seed: int) -> NDArray[np.int64]:
    """At most ``limit`` row numbers, ascending: a uniform sample within labeled, unlabeled and test rows.

    Each of the three keeps its share, so shares of classes within it are unbiased.
    """
    num = len(task.rows)
    if num <= limit:
        return np.arange(num)
    generator = np.random.default_rng([seed, 5])
    labeled = task.labels >= 0
    chosen = []
    for group in (labeled, task.is_train & ~labeled, ~task.is_train):
        rows = np.flatnonzero(group)
        chosen.append(generator.permutation(rows)[: int(limit * len(rows) / num)])
    return np.sort(np.concatenate(chosen))


def open_model(config: Config, storage: Storage, task: Task, device: torch.device | str) -> Classifier:
    """The model of a run: that in ``model/``, or while there is none that of the newest checkpoint.

    Raises:
        StorageError: there is neither.
        RuntimeError: the checkpoint is of other classes than ``task``.
    """
    with suppress(StorageError):
        model = load_classifier(storage, device)
        if [c.name for c in model.classes if c.kind == "known"] == task.known:
            return model
    module, best_head = run.load_trained(config, storage, task.num_known, task.num_novel)
    novel = [f"novel-{i + 1}" for i in range(task.num_novel)]
    classes = [OutputClass(i, name, "", i) for i, name in enumerate([*task.known, *novel])]
    return Classifier(module.to(device), config, classes, best_head, None, "", torch.device(device))


def look(task: Task, model: Classifier, decode: Decode, max_rows: int | None = None) -> Sample:
    """What ``model`` says of at most ``max_rows`` rows, by default as many as take a minute.

    Unreadable images are left out. Heads vote as in ``predictions.parquet``: their clusters are renumbered as
    the model's files say, in an unfinished run as the unlabeled rows of this sample say.

    Raises:
        ValueError: no image can be read.
    """
    config, best, size = model.config, model.best_head, model.size
    default = MAX_ROWS if model.device.type == "cuda" else MAX_ROWS_CPU if size <= 64 else MAX_ROWS_CPU_LARGE
    rows = choose_rows(task, max_rows or default, config.seed)
    found = sample_logits(model, decode, rows, len(rows))
    if found is None:
        raise ValueError("no image of the data can be read")
    index, logits = found
    assert logits.novel is not None and logits.features is not None and model.module.novel is not None
    known, novel, alignment = logits.known[0], logits.novel[0], model.alignment
    if alignment is None:
        unlabeled = torch.from_numpy(task.is_train[index] & (task.labels[index] < 0))
        alignment = align_heads(novel[:, unlabeled], best)
    novel = novel.gather(2, alignment.cpu()[:, None].expand(novel.shape))  # (H, M, K)
    joint = torch.cat([known.expand(len(novel), *known.shape), novel], dim=2)
    prototypes = F.normalize(model.module.novel.weight[best].detach().float().cpu(), dim=-1)
    return Sample(
        index,
        logits.features[0].numpy(),
        known.numpy(),
        novel.transpose(0, 1).numpy(),
        None if logits.over is None else logits.over[0].transpose(0, 1).numpy(),
        joint.argmax(dim=2).T.numpy(),
        (joint[best] / config.objective.temperature).softmax(dim=1).amax(dim=1).numpy(),
        (prototypes @ prototypes.T).numpy(),
        best,
        [c.name for c in model.classes],
        len(task.rows),
    )


# ----------------------------------------------------------------------------------------- discovered classes
@dataclass(frozen=True, eq=False)
class Cluster:
    """One output of the best head and the unlabeled training rows it takes: ``count`` of them.

    ``confidence`` is their median, ``agreement`` their mean, NaN without rows. ``majority`` is (true class,
    share) where rows have truth; ``closest_known`` the known class with the highest mean cosine; ``twin``
    (output, cosine) the discovered class with the most similar prototype.
    """

    output: int
    name: str
    count: int
    confidence: float
    agreement: float
    majority: tuple[str, float] | None
    closest_known: str | None
    twin: tuple[int, float] | None


@dataclass(frozen=True, eq=False)
class Findings:
    """What a sample says of the discovered classes.

    ``truth`` (M,): index into known + true novel names, -1 unknown. ``unlabeled``, ``test`` (M,) bool.
    ``agreement`` (M,): share of the heads, the best among them, that put a row into its class. ``pairs``
    (H,H): share of the unlabeled rows that two heads put into the same class. Over the unlabeled rows, NaN
    without any: ``mean_agreement``, ``median_confidence``, ``unsure`` (share below one half) and ``absorbed``
    (share taken for known classes).
    """

    truth: NDArray[np.int64]
    unlabeled: NDArray[np.bool_]
    test: NDArray[np.bool_]
    agreement: NDArray[np.float64]
    pairs: NDArray[np.float64]
    clusters: list[Cluster]
    num_unlabeled: int
    mean_agreement: float
    median_confidence: float
    unsure: float
    absorbed: float


def find(task: Task, sample: Sample) -> Findings:
    """Summarise ``sample``."""
    rows, output, num_known = sample.index, sample.output, task.num_known
    unlabeled = task.is_train[rows] & (task.labels[rows] < 0)
    truth, true_names = task.eval_labels[rows], [*task.known, *task.novel]
    agreement = (sample.votes == output[:, None]).mean(axis=1)
    clusters = []
    for k in range(num_known, num_known + task.num_novel):
        mine = unlabeled & (output == k)
        counts = np.bincount(truth[mine & (truth >= 0)], minlength=1)
        others = sample.similarity[k - num_known].copy()
        others[k - num_known] = -np.inf
        clusters.append(
            Cluster(
                k,
                sample.names[k],
                int(mine.sum()),
                _over(np.median, sample.confidence[mine]),
                _over(np.mean, agreement[mine]),
                (true_names[counts.argmax()], float(counts.max() / counts.sum())) if counts.any() else None,
                sample.names[int(sample.known[mine].mean(axis=0).argmax())] if mine.any() else None,
                (num_known + int(others.argmax()), float(others.max())) if len(others) > 1 else None,
            )
        )
    votes = sample.votes[unlabeled]
    return Findings(
        truth=truth,
        unlabeled=unlabeled,
        test=~task.is_train[rows],
        agreement=agreement,
        clusters=clusters,
        pairs=(votes[:, :, None] == votes[:, None, :]).sum(axis=0) / max(1, len(votes)),
        num_unlabeled=len(votes),
        mean_agreement=_over(np.mean, agreement[unlabeled]),
        median_confidence=_over(np.median, sample.confidence[unlabeled]),
        unsure=_over(np.mean, sample.confidence[unlabeled] < 0.5),
        absorbed=_over(np.mean, output[unlabeled] < num_known),
    )


def _over(statistic: Callable[..., Any], values: NDArray[Any]) -> float:
    return float(statistic(values)) if len(values) else math.nan
