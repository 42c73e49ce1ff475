"""Every table of the paper as data: rows (what is trained), evaluations, data sets, and what the paper says.

``build(name, scale)`` makes a table. ``full`` is the paper's: CIFAR10, CIFAR100 and ImageNet from the user's
disk with the paper's recipe. ``small`` is for two CPU cores: the embedded digits and, where its directory is
given, a subset of CIFAR10-JPEG.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from uno.config import Config, ConfigError, override
from uno.methods import METHODS, settings
from uno.presets import preset
from uno.reproduce import published
from uno.reproduce.published import AGNOSTIC, AWARE, Column

FULL, SMALL = "full", "small"
GROUPS = ("known", "novel", "all")
CHANCE = "{split}/novel/task_aware/chance/acc"


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
    """A way of counting: ``protocol`` of :mod:`uno.evaluate` on ``split``; ``name`` is for people."""

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
    path that is read for the novel group instead of the evaluation's. ``claim``: what the paper says of it
    against the reference row: ``lower`` or ``same``. ``series`` and ``x`` place it in a chart.
    """

    key: str
    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    of: str | None = None
    head: str = "best"
    metric: str | None = None
    claim: str | None = None
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

    def evaluation(self, name: str) -> Evaluation:
        """The evaluation of that name."""
        return next(e for e in self.evaluations if e.name == name)


@dataclass(frozen=True)
class Cell:
    """One run: a row on a data set with a seed."""

    row: Row
    benchmark: Benchmark
    seed: int

    @property
    def slug(self) -> str:
        """Name of its directory."""
        return f"{self.benchmark.key}-{self.row.key}-seed{self.seed}"


def cells(table: Table, seeds: int, first_seed: int = 0) -> list[Cell]:
    """All runs of a table, seed by seed, so that an unfinished table compares complete seeds."""
    trained = [row for row in table.rows if row.of is None]
    return [
        Cell(row, benchmark, seed)
        for seed in range(first_seed, first_seed + seeds)
        for benchmark in table.benchmarks
        for row in trained
    ]


def cell_config(cell: Cell, directories: Mapping[str, str], changes: Mapping[str, Any]) -> Config:
    """The configuration of a run: preset < data set < what the authors of
    the row's method set there < ``changes`` of the command line < row, then the seed.

    Args:
        cell: the run.
        directories: of the data sets, by the benchmark's ``option``.
        changes: dotted keys that hold for every run of the table.

    Raises:
        ConfigError: a key that the schema does not have, or a value out of range.
    """
    benchmark = cell.benchmark
    source = benchmark.source.format(directories.get(benchmark.option or "", ""))
    recipe = str(changes.get("recipe", "paper"))
    config = override(preset(benchmark.preset, recipe), {"data.source": source, **benchmark.overrides})
    method = str(cell.row.overrides.get("method", changes.get("method", config.method)))
    config = override(override(config, settings(method, benchmark.preset)), changes)
    return override(config, {**cell.row.overrides, "seed": cell.seed})


# ----------------------------------------------------------------------------------------------- definitions
UNO = Row("uno", "UNO", series="UNO")
UNO_AVG = Row("uno-avg", "UNO, mean of heads", of="uno", head="avg")
CHANCE_ROW = Row("chance", "chance", of="uno", metric=CHANCE)
KMEANS = Row("kmeans", "k-means on pretrained features", of="uno", metric="baseline/kmeans/novel/acc")
BASELINES = {"kcl": "KCL", "mcl": "MCL", "dtc": "DTC", "rs": "RS", "rs_plus": "RS+"}


PAPER_ONLY = "not trained"


def _baselines(*methods: str, suffix: str = "", changes: Mapping[str, Any] | None = None) -> tuple[Row, ...]:
    return tuple(
        Row(
            method.replace("_", "-") + suffix, BASELINES[method], {"method": method, **(changes or {})},
            of=None if method in METHODS else PAPER_ONLY,
            claim="lower", series=BASELINES[method],
        )
        for method in methods
    )  # fmt: skip


AWARE_TRAIN = Evaluation(AWARE, "task_aware", "train")
AWARE_TEST = Evaluation(AWARE, "task_aware", "test")
OFFICIAL_TEST = Evaluation(AGNOSTIC, "task_agnostic_official", "test")
STRICT_TEST = Evaluation("task-agnostic, strict", "task_agnostic_strict", "test")
STRICT = (
    "official: as the paper's code counts, novel rows may be matched to any output, which forgives a novel "
    "class that is called by a known name. strict: to novel outputs only; not in the paper."
)
PRETRAINED_ALIKE = (
    "All methods start from the same pretraining of the same encoder, supervised only unless rotation epochs "
    "are given for all. In the paper's Tab. 3 and 4 all but UNO start from self-supervision (except on "
    "ImageNet); its appendix, Tab. A, has them without."
)


def ablation(scale: str) -> Table:
    """Tab. 2: each component removed alone."""
    rows = (
        UNO,
        Row("no-concat", "without concatenation", {"objective.concat": False}, claim="lower"),
        Row("no-overclustering", "without overclustering", {"model.overcluster_factor": 0}, claim="lower"),
        Row("weak-augmentation", "weak augmentation", {"augment.weak": True}, claim="lower"),
        CHANCE_ROW,
    )
    return Table(
        "ablation", "Ablation (paper, Tab. 2)", "What does each component of UNO contribute?", rows,
        (AWARE_TEST, OFFICIAL_TEST, STRICT_TEST), GROUPS,
        _benchmarks(scale, CIFAR10, CIFAR100_50), published.ABLATION,
        ((AWARE, "novel"), (AWARE, "all"), (AGNOSTIC, "novel"), (AGNOSTIC, "all"),
         ("task-agnostic, strict", "novel"), ("task-agnostic, strict", "all")),
        notes=(
            "Test split, the head with the lowest training loss, as in the paper.", STRICT,
            "Without concatenation: cross-entropy of labeled rows over known outputs, of unlabeled rows over "
            "novel ones. Weak augmentation: no colour operation, neither in pretraining nor in discovery "
            "(the paper does not say which); the other rows share one pretraining per seed. On the digits "
            "the colour operations are brightness and contrast; the affine views stay.",
        ),
    )  # fmt: skip


def sota(scale: str) -> Table:
    """Tab. 3 and the appendix's Tab. A: task-aware accuracy on the unlabeled training rows."""
    rows = (
        CHANCE_ROW, replace(KMEANS, claim="lower"), *_baselines(*BASELINES), UNO_AVG, UNO,
    )  # fmt: skip
    return Table(
        "sota", "Comparison of methods (paper, Tab. 3 and appendix, Tab. A)",
        "Does one objective find novel classes better than the methods before it?", rows, (AWARE_TRAIN,),
        ("novel",), _benchmarks(scale, CIFAR10, CIFAR100_20, CIFAR100_50, IMAGENET), published.SOTA,
        ((AWARE, "novel"),), notes=("Unlabeled training rows.", PRETRAINED_ALIKE),
    )  # fmt: skip


def task_agnostic(scale: str) -> Table:
    """Tab. 4: known and novel test rows, all outputs."""
    return Table(
        "task-agnostic", "All classes at once (paper, Tab. 4)",
        "Does one objective tell known from novel classes better than the methods before it?",
        (*_baselines("kcl", "mcl", "dtc", "rs_plus"), UNO_AVG, UNO), (OFFICIAL_TEST, STRICT_TEST), GROUPS,
        _benchmarks(scale, CIFAR10, CIFAR100_20, CIFAR100_50), published.TASK_AGNOSTIC,
        ((AGNOSTIC, "novel"), (AGNOSTIC, "all"), ("task-agnostic, strict", "all")),
        notes=("Test split.", STRICT, PRETRAINED_ALIKE),
    )  # fmt: skip


def aggregation(scale: str) -> Table:
    """Appendix, Tab. B: how the views' pseudo-labels are combined."""
    rows = (
        replace(UNO, name="swapped prediction (UNO)"),
        Row("pseudo-labels", "averaged pseudo-labels",
            {"objective.aggregation": "average_pseudo_labels"}, claim="same"),
        Row("logits", "averaged logits", {"objective.aggregation": "average_logits"}, claim="lower"),
        CHANCE_ROW,
    )  # fmt: skip
    return Table(
        "aggregation", "Aggregation of views (paper, appendix, Tab. B)",
        "Does it matter how the views' pseudo-labels are combined?", rows, (AWARE_TRAIN,), ("novel",),
        _benchmarks(scale, CIFAR10, CIFAR100_50), published.AGGREGATION, ((AWARE, "novel"),),
        notes=("Unlabeled training rows, the head with the lowest training loss, as in the paper.",),
    )  # fmt: skip


def unknown_k(scale: str) -> Table:
    """Appendix, Tab. C: the methods with an estimated number of novel classes."""
    true, given = (20, 23) if scale == FULL else (5, 6)
    count = {"data.num_novel": given}
    rows = (
        Row("uno", f"UNO, {true} classes given (the truth)", series="UNO", x=true),
        *(
            replace(row, name=f"{row.name}, {given} classes given", x=given)
            for row in _baselines("dtc", "rs", "rs_plus", suffix="-k", changes=count)
        ),
        Row("uno-k-avg", f"UNO, {given} classes given, mean of heads", of="uno-k", head="avg", claim="lower"),
        Row("uno-k", f"UNO, {given} classes given", count, claim="lower", series="UNO", x=given),
    )
    notes = ["Unlabeled training rows.", "23 classes are what the paper estimated for 20."]
    if scale == SMALL:
        rows += tuple(
            Row(
                f"uno-k{k}",
                f"UNO, {k} classes given",
                {"data.num_novel": k},
                claim="lower",
                series="UNO",
                x=k,
            )
            for k in (3, 4, 8, 10)
        )
        rows += (
            Row("uno-auto", "UNO, the number uno estimate-classes suggests", {"data.num_novel": "auto"}),
            replace(CHANCE_ROW, name="chance, 5 classes given"),
        )
        notes[1] += (
            " That is 15 % too many; so are 6 for 5. Too few classes merge some, too many split some, the "
            "matching forgives neither: with 3 or 4 classes given at most 3 or 4 of 5 can be right."
        )
    return Table(
        "unknown-k", "Unknown number of novel classes (paper, appendix, Tab. C)",
        "How accurate are the methods when the number of novel classes is not the true one?", rows,
        (AWARE_TRAIN,), ("novel",), (CIFAR100_20,) if scale == FULL else (DIGITS,), published.UNKNOWN_K,
        ((AWARE, "novel"),), notes=(*notes, PRETRAINED_ALIKE),
        x_label=f"novel classes given (truth: {true})",
    )  # fmt: skip


def num_novel(scale: str) -> Table:
    """Fig. 3: more and more of the classes are novel, fewer and fewer are known."""
    total, counts = (100, (20, 30, 40, 50, 60, 70, 80)) if scale == FULL else (10, (2, 4, 5, 6, 8))
    rows = []
    for count in counts:
        known = {"data.known_classes": f"first:{total - count}"}
        suffix = "" if scale == SMALL and count == 5 else f"-{count}"  # 5 of 10: the digits' own split
        rows.append(Row(f"uno{suffix}", f"UNO, {count} novel", known, series="UNO", x=count))
        for row in _baselines("rs", "rs_plus", suffix=suffix, changes=known):
            rows.append(replace(row, name=f"{row.name}, {count} novel", x=count, claim=None))
        rows.append(
            Row(f"chance-{count}", f"chance, {count} novel", of=f"uno{suffix}", metric=CHANCE,
                series="chance", x=count)
        )  # fmt: skip
    cifar100 = replace(CIFAR100_50, key="cifar100", name="CIFAR100")
    return Table(
        "num-novel", "A growing number of novel classes (paper, Fig. 3)",
        "How does accuracy fall as more classes are novel and fewer are known?", tuple(rows),
        (AWARE_TRAIN,), ("novel",), (cifar100 if scale == FULL else replace(DIGITS, name="digits"),),
        published.NUM_NOVEL,
        notes=(
            "Unlabeled training rows, the head with the lowest training loss. All classes that are not "
            "novel are known, so each step takes a class from one side to the other, as in the paper; which "
            "classes are novel changes with their number.", PRETRAINED_ALIKE,
        ),
        x_label="novel classes",
    )  # fmt: skip


def tsne(scale: str) -> Table:
    """Fig. 4 and the appendix's figure: maps of features and logits."""
    rows = (UNO, *(replace(row, claim=None) for row in _baselines("rs_plus")))
    return Table(
        "tsne", "t-SNE maps (paper, Fig. 4 and the appendix's figure)",
        "How do the spaces of UNO and RS+ arrange known and novel classes?", rows, (AWARE_TRAIN,),
        ("novel",), _benchmarks(scale, CIFAR10)[:1], (), notes=(PRETRAINED_ALIKE,), seeds=1, figures=True,
    )  # fmt: skip


TABLES: dict[str, Callable[[str], Table]] = {
    "ablation": ablation,
    "sota": sota,
    "task-agnostic": task_agnostic,
    "aggregation": aggregation,
    "unknown-k": unknown_k,
    "num-novel": num_novel,
    "tsne": tsne,
}


def build(name: str, scale: str) -> Table:
    """A table of :data:`TABLES` at ``full`` or ``small`` scale.

    Raises:
        ConfigError: no table of that name.
    """
    if name not in TABLES:
        near = difflib.get_close_matches(name, TABLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose from " + ", ".join(TABLES)
        raise ConfigError(f"unknown table {name!r}; {hint}")
    return TABLES[name](scale)


def _benchmarks(scale: str, *full: Benchmark) -> tuple[Benchmark, ...]:
    return full if scale == FULL else (DIGITS, CIFAR10_JPEG)
