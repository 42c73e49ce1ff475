"""What tables are made of: data sets, rows, ways of counting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from uno.reproduce.published import Column


@dataclass(frozen=True)
class Benchmark:
    """A data set with its split into known and novel classes.

    ``source`` has a place for the directory of the command line's ``option``; the digits need none.
    ``minutes`` are one cell's on one core (measured), None where nobody has measured them.
    """

    key: str
    name: str
    preset: str
    option: str | None = None
    source: str = "digits"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    minutes: float | None = None


DIGITS = Benchmark("digits", "digits (5 / 5)", "digits", minutes=0.8)
DIGITS_HARD = Benchmark(
    "digits-hard", "digits (2 / 8), batches of 32, 30 epochs", "digits",
    overrides={"data.known_classes": "first:2", "train.batch_size": 32, "discover.epochs": 30}, minutes=0.8,
)  # fmt: skip
"""Room above UNO: little is known, a batch holds 3 unlabeled rows for each class, half as many epochs."""
CIFAR10 = Benchmark("cifar10", "CIFAR10", "cifar10", "cifar10", "cifar10:{}")
CIFAR100_20 = Benchmark("cifar100-20", "CIFAR100-20", "cifar100_20", "cifar100", "cifar100:{}")
CIFAR100_50 = Benchmark("cifar100-50", "CIFAR100-50", "cifar100_50", "cifar100", "cifar100:{}")
IMAGENET = Benchmark("imagenet", "ImageNet", "imagenet", "imagenet", "imagenet:{}")
CIFAR10_JPEG = Benchmark(
    "cifar10-jpeg", "CIFAR10-JPEG, 2,000 + 1,000 images at 16 px (5 / 5)", "cifar10", "cifar10-jpeg",
    "parquet:{}", {
        "data.limit": 2000, "data.store_size": 16, "augment.large.size": 16, "augment.large.crop_padding": 2,
        "model.encoder": "resnet_small", "model.width": 16, "model.blocks": 1, "model.hidden_dim": 512,
        "model.projection_dim": 128, "train.batch_size": 128, "pretrain.epochs": 30,
        "pretrain.warmup_epochs": 3, "discover.epochs": 40, "discover.warmup_epochs": 5,
    },
)  # fmt: skip
"""CIFAR10 re-encoded as JPEG, cut down to what a CPU can train; nothing of it compares with CIFAR10."""


@dataclass(frozen=True)
class Evaluation:
    """A way of counting: ``protocol`` of :mod:`uno.results.evaluate` on ``split``; ``name`` is for people."""

    name: str
    protocol: str
    split: str

    def key(self, group: str, head: str) -> str:
        """Path of a metric, such as ``test/novel/task_aware/acc/best``."""
        return f"{self.split}/{group}/{self.protocol}/acc/{head}"


@dataclass(frozen=True)
class Row:
    """What is trained, or another reading of what another row trained, or the paper's numbers alone.

    ``of``: the row whose runs are read (default: its own), or PAPER_ONLY. ``head``: avg or best. ``metric``:
    path that is read for the novel group instead of the evaluation's. ``claim``: what its paper says of it
    against the row ``versus`` (default: the reference row): ``lower``, ``higher`` or ``same``. ``series`` and
    ``x`` place it in a chart.
    """

    key: str
    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    of: str | None = None
    head: str = "best"
    metric: str | None = None
    claim: str | None = None
    versus: str | None = None
    series: str | None = None
    x: int | None = None

    @property
    def trained(self) -> str:
        """Key of the row whose runs hold the numbers."""
        return self.of or self.key


@dataclass(frozen=True)
class Table:
    """A table or figure; ``effects`` are the (evaluation, group) where rows are compared to ``reference``."""

    name: str
    title: str
    question: str
    rows: tuple[Row, ...]
    evaluations: tuple[Evaluation, ...]
    groups: tuple[str, ...]
    benchmarks: tuple[Benchmark, ...]
    published: tuple[Column, ...] = ()
    effects: tuple[tuple[str, str], ...] = ()
    reference: str = "uno"
    notes: tuple[str, ...] = ()
    x_label: str = ""
    seeds: int = 3
    figures: bool = False

    def row(self, key: str) -> Row:
        """The row of that key."""
        return next(row for row in self.rows if row.key == key)

    def against(self, row: Row) -> Row:
        """The row that ``row`` is compared to."""
        return self.row(row.versus or self.reference)

    def evaluation(self, name: str) -> Evaluation:
        """The evaluation of that name."""
        return next(e for e in self.evaluations if e.name == name)
