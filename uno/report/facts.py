"""What is known of a run: what its directory says, and what its model says of a sample of its rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from uno.config import Config
from uno.data.decode import decode_many
from uno.data.files import Storage
from uno.data.rows import Chosen
from uno.data.splits import Task
from uno.errors import StorageError
from uno.results.forward import forward
from uno.results.infer import Classifier, align_heads, load_classifier
from uno.runs import run
from uno.runs.journal import read_journal

MAX_ROWS, MAX_ROWS_CPU, MAX_ROWS_CPU_LARGE = 20_000, 4_000, 1_500
"""Rows looked at: on a GPU; on two CPU cores, about a minute with ResNet18 at 32 px; above 64 px."""

Floats = NDArray[np.float32]
Decode = Callable[[NDArray[np.int64], int], tuple[Tensor, NDArray[np.bool_]]]
"""(row numbers (n,), side S) -> (uint8 (n, 3, S, S), which of them can be read (n,) bool)."""


# ------------------------------------------------------------------------------------------ the run directory
@dataclass(frozen=True)
class Facts:
    """The contents of a run directory; empty where a file is missing or damaged (``unreadable`` names it).

    ``names`` are those of outputs, by index; ``bad`` (id, reason) of the images that could not be read.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    journal: list[dict[str, Any]] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
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

    def parse(name: str) -> dict[str, Any]:
        try:
            value = json.loads(read(name) or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            unreadable.append(name)
            return {}
        return value

    def parse_bad(line: str) -> tuple[str, str] | None:
        try:
            entry = json.loads(line)
        except ValueError:
            return None
        return (str(entry.get("id", "")), str(entry.get("reason", ""))) if isinstance(entry, dict) else None

    names = {}
    for entry in parse("model/classes.json").get("classes", []):
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            names[entry.get("index", -1)] = entry["name"]
    return Facts(
        {key: float(value) for key, value in parse("metrics.json").items() if is_number(value)},
        parse("environment.json"),
        read_journal(storage),
        [entry for entry in map(parse_bad, read("bad_samples.jsonl").splitlines()) if entry is not None],
        names,
        read("config.yaml"),
        parse("estimate.json"),
        tuple(unreadable),
    )


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def output_names(task: Task, facts: Facts) -> list[str]:
    """Names of all outputs, known first; discovered ones from ``model/classes.json``, or ``novel-1``."""
    novel = range(task.num_novel)
    return [*task.known, *(facts.names.get(task.num_known + i, f"novel-{i + 1}") for i in novel)]


# ---------------------------------------------------------------------------------------- what the model says
@dataclass(frozen=True, eq=False)
class Sample:
    """M rows of a task and what the model says of them; ``num_rows`` is the number the task has.

    ``index`` (M,) row numbers. ``features`` (M,D). Cosines: ``known`` (M,C_l), ``novel`` (M,H,K) with every
    head's clusters in the order of the best head's, ``over`` (M,H,mK) where there are such heads. ``votes``
    (M,H): every head's output, before classes are merged or dropped. ``confidence`` (M,): probability of the
    best head's output. ``similarity`` (K,K): cosines of the best head's prototypes.
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


def open_model(config: Config, storage: Storage, task: Task, device: torch.device) -> Classifier:
    """The model of a run: that in ``model/``, or while there is none that of the newest checkpoint.

    Raises:
        StorageError: there is neither, or it is of other classes than ``task``.
    """
    with suppress(StorageError):
        model = load_classifier(storage, device)
        if [c.name for c in model.classes if c.kind == "known"] == task.known:
            return model
    module, best_head = run.load_trained(config, storage, task.num_known, task.num_novel)
    return Classifier(module.to(device), config, [], best_head, None, "", device)


def decoder(task: Task, images: tuple[Tensor, NDArray[np.bool_]] | None = None) -> Decode:
    """The pixels of rows, from ``images`` of all rows where the run holds them, else from their files."""

    def decode(index: NDArray[np.int64], side: int) -> tuple[Tensor, NDArray[np.bool_]]:
        if images is None:
            pixels, reasons = decode_many(Chosen(task.rows.images, index), side)
            return pixels, np.array([reason is None for reason in reasons])
        pixels = images[0][torch.from_numpy(index)].cpu()
        if side < pixels.shape[-1]:
            pixels = F.interpolate(pixels.float(), (side, side), mode="area").round().to(torch.uint8)
        return pixels, images[1][index]

    return decode


def look(
    config: Config, task: Task, model: Classifier, decode: Decode, max_rows: int | None = None
) -> Sample:
    """What ``model`` says of at most ``max_rows`` rows, by default as many as take a minute.

    Unreadable images are left out. Heads vote as in ``predictions.parquet``: their clusters are renumbered as
    the model's files say, in an unfinished run as the unlabeled rows of this sample say.

    Raises:
        ValueError: no image can be read.
    """
    size = config.data.store_size
    default = MAX_ROWS if model.device.type == "cuda" else MAX_ROWS_CPU if size <= 64 else MAX_ROWS_CPU_LARGE
    rows = choose_rows(task, max_rows or default, config.seed)
    indices: list[NDArray[np.int64]] = []
    parts: list[list[Tensor]] = []  # features, known, novel, over where there are such heads
    for start in range(0, len(rows), model.batch_rows):
        index = rows[start : start + model.batch_rows]
        pixels, ok = decode(index, size)
        if ok.any():
            said = forward(model.module, pixels[torch.from_numpy(ok)], config)
            tensors = (said.features, said.known, said.novel, said.over)
            indices.append(index[ok])
            parts.append([t[0].float().cpu() for t in tensors if t is not None])
    if not parts:
        raise ValueError("no image of the data can be read")
    features, known, *heads = (
        torch.cat(column, dim=column[0].ndim - 2) for column in zip(*parts, strict=True)
    )
    index, best = np.concatenate(indices), model.best_head
    alignment = model.alignment
    if alignment is None:
        unlabeled = task.is_train[index] & (task.labels[index] < 0)
        alignment = align_heads(heads[0][:, torch.from_numpy(unlabeled)], best)
    novel = heads[0].gather(2, alignment[:, None].expand(heads[0].shape).cpu())  # (H, M, K)
    joint = torch.cat([known.expand(len(novel), *known.shape), novel], dim=2)
    votes = joint.argmax(dim=2)  # (H, M)
    prototypes = F.normalize(model.module.novel.weight[best].detach().float().cpu(), dim=-1)
    return Sample(
        index,
        features.numpy(),
        known.numpy(),
        novel.transpose(0, 1).numpy(),
        heads[1].transpose(0, 1).numpy() if len(heads) > 1 else None,
        votes.T.numpy(),
        (joint[best] / config.objective.temperature).softmax(dim=1).amax(dim=1).numpy(),
        (prototypes @ prototypes.T).numpy(),
        best,
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
    (H,H): share of the unlabeled rows that two heads put into the same class. Over the unlabeled rows:
    ``mean_agreement``, ``median_confidence``, ``unsure`` (share below one half) and ``absorbed`` (share taken
    for known classes), NaN without rows.
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


def find(task: Task, sample: Sample, names: Sequence[str]) -> Findings:
    """Summarise ``sample``; ``names`` are those of all outputs, known first."""
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
                names[k],
                int(mine.sum()),
                _over(np.median, sample.confidence[mine]),
                _over(np.mean, agreement[mine]),
                (true_names[counts.argmax()], float(counts.max() / counts.sum())) if counts.any() else None,
                names[int(sample.known[mine].mean(axis=0).argmax())] if mine.any() else None,
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
