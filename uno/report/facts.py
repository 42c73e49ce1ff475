"""What is known of a run: what its directory says, and what its model says of a sample of its rows."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from uno.config import Config, flatten, override, to_dict
from uno.data.decode import BAD_SAMPLES
from uno.data.files import Storage, parse_json
from uno.data.rows import Featured
from uno.data.splits import Task
from uno.errors import ConfigError, StorageError
from uno.methods.registry import settings
from uno.presets import preset
from uno.report.charts import Chart, Series, line_chart
from uno.report.page import duration
from uno.results.classes import OutputClass, alike
from uno.results.infer import Classifier, Decode, align_heads, load_classifier, outcomes, sample_logits
from uno.runs import CONFIG_FILE, ENVIRONMENT_FILE, ESTIMATE_FILE, METRICS_FILE, PHASES, RESULTS_FILE, run
from uno.runs.journal import read_journal

MAX_ROWS, MAX_ROWS_CPU, MAX_ROWS_CPU_LARGE = 20_000, 4_000, 2_500
"""Rows looked at: on a GPU, or with features at hand; on two CPU cores, a minute or two with ResNet18 at 32
px; above 64 px."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Facts:
    """A run directory's contents; ``bad`` are (id, reason) of images, ``unreadable`` names damaged files."""

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

    def head_losses(self) -> list[list[float]]:
        """Per epoch of the discovery phase, the cluster loss of every head."""
        losses = [entry.get("head_losses") for entry in self.entries("discover")]
        rows = [row for row in losses if isinstance(row, list) and all(map(is_number, row))]
        return [row for row in rows if len(row) == len(rows[-1])]


def read_facts(storage: Storage, metrics: Mapping[str, float] | None = None) -> Facts:
    """Read what is there, ``metrics`` unless they are given."""
    unreadable: list[str] = []

    def read(name: str, nothing: Any) -> Any:
        """What a file holds (lines, a mapping or text, as ``nothing``); ``nothing`` where that fails."""
        found: Any = None
        with suppress(StorageError, ValueError):
            if isinstance(nothing, list):
                found = read_journal(storage, name)
            else:
                text = storage.read(name).decode(errors="replace") if storage.exists(name) else ""
                found = parse_json(text or "{}") if isinstance(nothing, dict) else text
        if isinstance(found, type(nothing)):
            return found
        unreadable.append(name)
        return nothing

    results = read(RESULTS_FILE, {}) if metrics is None else metrics
    return Facts(
        {key: float(value) for key, value in results.items() if is_number(value)},
        read(ENVIRONMENT_FILE, {}), read(METRICS_FILE, []),
        [(str(entry.get("id", "")), str(entry.get("reason", ""))) for entry in read(BAD_SAMPLES, [])],
        read(CONFIG_FILE, ""), read(ESTIMATE_FILE, {}), tuple(unreadable),
    )  # fmt: skip


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def curves(facts: Facts) -> list[Chart]:
    """Loss and learning rate of every phase there was, and the loss of every head."""
    drawn = []
    for phase, label in PHASES.items():
        for key, name in (("loss", "loss"), ("lr", "learning rate")):
            pairs = [(entry.get("step"), entry.get(key)) for entry in facts.entries(phase)]
            series = Series(name, [(x, y) for x, y in pairs if is_number(x) and is_number(y)])
            drawn.append(line_chart(f"{label}: {name}", "step", [series]))
    heads = enumerate(zip(*facts.head_losses(), strict=True), 1)
    series_of_heads = [Series(f"head {head}", list(enumerate(losses, 1))) for head, losses in heads]
    drawn.append(line_chart("Cluster loss of each head", "epoch", series_of_heads))
    return [chart for chart in drawn if chart is not None]


def estimate_chart(facts: Facts) -> Chart | None:
    """The curves of ``uno estimate-classes`` over k, where the run has them."""
    ks, stored = facts.estimate.get("ks"), facts.estimate.get("curves")
    if not isinstance(ks, list) or not isinstance(stored, dict):
        return None
    series = [
        Series(label, list(zip(ks, stored[key], strict=False)))
        for key, label in (("f1", "pair F1"), ("acc", "accuracy"), ("cvi", "silhouette"))
        if isinstance(stored.get(key), list) and all(isinstance(v, int | float) for v in [*ks, *stored[key]])
    ]
    return line_chart("How well k clusters find held-out known classes", "k, novel classes", series)


def times(config: Config, facts: Facts, task: Task | None) -> list[tuple[str, str]]:
    """What each phase took, as label and text."""
    found = []
    for phase, name in PHASES.items():
        if entries := facts.entries(phase):
            size = config.train.batch_size
            if phase == "pretrain" and task is not None:  # a set smaller than a batch is one batch
                size = min(size, int((task.labels >= 0).sum()))
            took, last = duration(training_seconds(entries, size)), entries[-1]
            how_far = f"{last.get('step', 0):,} steps, {last.get('epoch', 0):,} epochs"
            found.append((f"{name} time", f"{took} for {how_far}"))
    return found


def training_seconds(entries: Sequence[dict[str, Any]], images_per_step: int) -> float:
    """Wall time that the lines of a phase account for, from their images/s; evaluation is not in it."""
    seconds, before = 0.0, 0.0
    for entry in entries:
        step, speed = entry.get("step", 0), entry.get("images_per_s", 0)
        if is_number(step) and is_number(speed) and speed and step > before:
            seconds += (step - before) * images_per_step / speed
            before = step
    return seconds


def command_line(config: Config) -> str:
    """A short ``uno discover`` that leads to ``config``: its preset and every field that differs from it."""
    words = ["uno", "discover", "--preset", config.preset, "--recipe", config.recipe]
    base: Mapping[str, Any] = {}
    with suppress(ConfigError):  # a preset of another version
        start = preset(config.preset, config.recipe)
        base = flatten(to_dict(override(start, settings(config.method, config.preset))))
        base["method"] = start.method
    folders = config.data.labeled is not None  # then there is no source to name; else it always is
    for key, value in flatten(to_dict(config)).items():
        if key in ("preset", "recipe", "output") or (key == "data.source" and folders):
            continue
        if base.get(key, ...) != value or key in ("data.source", "data.hold_out"):
            section, dot, leaf = key.replace("_", "-").rpartition(".")
            if isinstance(value, bool):
                words.append(f"--{section}.{leaf}" if value else f"--{section}.no-{leaf}")
            else:
                words += [f"--{section}{dot}{leaf}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


@dataclass(frozen=True, eq=False)
class Sample:
    """M rows, of a task's ``num_rows``, and what the model says of them; ``num_unreadable`` more were tried.

    ``index`` (M,); ``features`` (M,D); cosines ``known`` (M,C_l), ``novel`` (M,H,K), every head's clusters
    in the order of the best head's, ``over`` (M,H,mK); ``votes`` (M,H): every head's output, as in
    predictions; ``own`` (M,): the best head's, were all rows novel; ``confidence`` (M,) of the best head's;
    ``classes``: all outputs.
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
        return [c.called[0] for c in self.classes]

    @property
    def kept(self) -> list[int]:
        """Outputs that are neither merged into another nor dropped, known ones first."""
        return [c.index for c in self.classes if c.into == c.index]

    @property
    def columns(self) -> tuple[list[str], NDArray[np.int64]]:
        """Names of the kept outputs and, where something was dropped, of "rejected", last; which of them each
        output is, -1 where it was merged.
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
    """At most ``limit`` row numbers, ascending: a uniform sample within labeled, unlabeled and test rows."""
    num = len(task.rows)
    if num <= limit:
        return np.arange(num)
    generator, labeled = np.random.default_rng([seed, 5]), task.labels >= 0
    groups = map(np.flatnonzero, (labeled, task.is_train & ~labeled, ~task.is_train))
    return np.sort(np.concatenate([generator.permutation(g)[: int(limit * len(g) / num)] for g in groups]))


def open_model(config: Config, storage: Storage, task: Task, device: torch.device | str) -> Classifier:
    """The model of a run: that in ``model/``, or while there is none that of the newest checkpoint."""
    with suppress(StorageError):
        model = load_classifier(storage, device)
        if [c.name for c in model.classes if c.kind == "known"] == task.known:
            return model
    module, best_head = run.load_trained(config, storage, task.num_known, task.num_novel)
    named = [(name, "known") for name in task.known]
    named += [(f"novel-{i + 1}", "novel") for i in range(task.num_novel)]
    classes = [OutputClass(i, *what, i) for i, what in enumerate(named)]
    return Classifier(module.to(device), config, classes, best_head, None, "", torch.device(device))


def look(task: Task, model: Classifier, decode: Decode, max_rows: int | None = None) -> Sample:
    """What ``model`` says of at most ``max_rows`` rows, by default as many as take a minute; ValueError if no
    image can be read. Clusters of heads are renumbered as in ``predictions.parquet``.
    """
    config, best, size = model.config, model.best_head, model.size
    default = MAX_ROWS_CPU if size <= 64 else MAX_ROWS_CPU_LARGE
    if model.device.type == "cuda" or isinstance(task.rows.images, Featured):
        default = MAX_ROWS
    rows = choose_rows(task, max_rows or default, config.seed)
    sampled = sample_logits(model, decode, rows, len(rows))
    if sampled is None:
        raise ValueError("no image of the data can be read")
    index, logits = sampled
    assert logits.novel is not None and logits.features is not None
    known, novel, alignment = logits.known[0], logits.novel[0], model.alignment
    if alignment is None:
        unlabeled = torch.from_numpy(task.is_train[index] & (task.labels[index] < 0))
        alignment = align_heads(novel[:, unlabeled], best)
    found = outcomes(known, novel, config.objective.temperature, model.classes, alignment)  # (H, M, C)
    own = task.num_known + found[best, :, task.num_known :].argmax(dim=1)
    novel = novel.gather(2, alignment.cpu()[:, None].expand(novel.shape))  # (H, M, K)
    over = None if logits.over is None else logits.over[0].transpose(0, 1).numpy()
    return Sample(
        index, logits.features[0].numpy(), known.numpy(), novel.transpose(0, 1).numpy(), over,
        found.argmax(dim=2).T.numpy(), own.numpy(), found[best].amax(dim=1).numpy(), best, model.classes,
        model.model_hash, len(task.rows), len(rows) - len(index),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Cluster:
    """One output of the best head and the unlabeled training rows it takes: median ``confidence``, mean
    ``agreement``, ``majority`` (true class, share), and the known and the discovered class that it is most
    like, as (output, likeness).
    """

    output: int
    name: str
    count: int
    confidence: float
    agreement: float
    majority: tuple[str, float] | None
    like_known: tuple[int, float] | None
    like_novel: tuple[int, float] | None


@dataclass(frozen=True, eq=False)
class Findings:
    """What a sample says of the discovered classes; numbers over the unlabeled rows, NaN without any.

    ``truth`` (M,): index into known + true novel names or -1; ``agreement`` (M,): share of heads that put a
    row into its class; ``pairs`` (H,H): share of rows that two heads put into the same; ``unsure``: below one
    half; ``absorbed``: taken for known classes; ``likeness`` (C,C) of all outputs, as :func:`alike` has it.
    """

    truth: NDArray[np.int64]
    unlabeled: NDArray[np.bool_]
    agreement: NDArray[np.float64]
    pairs: NDArray[np.float64]
    clusters: list[Cluster]
    num_unlabeled: int
    mean_agreement: float
    median_confidence: float
    unsure: float
    absorbed: float
    likeness: NDArray[np.float32]


def find(task: Task, sample: Sample) -> Findings:
    """Summarise ``sample``."""
    rows, output, num_known = sample.index, sample.output, task.num_known
    unlabeled = task.is_train[rows] & (task.labels[rows] < 0)
    truth, true_names = task.eval_labels[rows], [*task.known, *task.novel]
    agreement = (sample.votes == output[:, None]).mean(axis=1)
    features, member = torch.from_numpy(sample.features), torch.from_numpy(sample.member(task))
    likeness = alike(features, member, len(sample.classes)).numpy()
    clusters = []
    for k in (k for k in sample.kept if k >= num_known):
        mine = unlabeled & (output == k)
        counts = np.bincount(truth[mine & (truth >= 0)], minlength=1)
        majority = (true_names[counts.argmax()], float(counts.max() / counts.sum())) if counts.any() else None
        like_known = _most_like(likeness[k, :num_known], 0)
        like_novel = _most_like(likeness[k, num_known:], num_known)
        sure, agreed = _over(np.median, sample.confidence[mine]), _over(np.mean, agreement[mine])
        name, count = sample.names[k], int(mine.sum())
        clusters.append(Cluster(k, name, count, sure, agreed, majority, like_known, like_novel))
    votes, confidence = sample.votes[unlabeled], sample.confidence[unlabeled]
    pairs = (votes[:, :, None] == votes[:, None, :]).sum(axis=0) / max(1, len(votes))
    return Findings(
        truth, unlabeled, agreement, pairs, clusters, len(votes), _over(np.mean, agreement[unlabeled]),
        _over(np.median, confidence), _over(np.mean, confidence < 0.5),
        _over(np.mean, output[unlabeled] < num_known), likeness,
    )  # fmt: skip


def _most_like(likeness: NDArray[np.float32], start: int) -> tuple[int, float] | None:
    best = int(likeness.argmax())
    return (start + best, float(likeness[best])) if np.isfinite(likeness[best]) else None


def _over(statistic: Callable[..., Any], values: NDArray[Any]) -> float:
    return float(statistic(values)) if len(values) else math.nan
