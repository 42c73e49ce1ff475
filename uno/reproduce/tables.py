"""Every table of the paper, and two of ours, as data: rows, evaluations, data sets, what the paper says.

``build(name, scale)`` makes a table. ``full`` is the paper's: CIFAR10, CIFAR100 and ImageNet from the user's
disk with the paper's recipe. ``small`` is for two CPU cores: the embedded digits and, where its directory is
given, a subset of CIFAR10-JPEG.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from uno.config import Config, override
from uno.errors import ConfigError
from uno.methods import METHODS, settings
from uno.presets import preset
from uno.reproduce import published
from uno.reproduce.definitions import (
    CIFAR10,
    CIFAR10_JPEG,
    CIFAR100_20,
    CIFAR100_50,
    DIGITS,
    DIGITS_HARD,
    IMAGENET,
    Benchmark,
    Evaluation,
    Row,
    Table,
)
from uno.reproduce.published import AGNOSTIC, AWARE

FULL, SMALL = "full", "small"
GROUPS = ("known", "novel", "all")
CHANCE = "{split}/novel/task_aware/chance/acc"


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
            Row(f"uno-k{k}", f"UNO, {k} classes given", {"data.num_novel": k}, claim="lower",
                series="UNO", x=k)
            for k in (3, 4, 8, 10)
        )  # fmt: skip
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


def extensions(scale: str) -> Table:
    """Not of the paper: UNO's options from later work."""
    queue = 3840 if scale == FULL else 512
    rows = (
        UNO,
        Row("iic", "UNO + IIC", {"objective.iic_weight": 0.05, "objective.iic_view_weight": 0.01},
            claim="higher"),
        Row("rkd", "UNO + rKD", {"objective.rkd_weight": 0.1}, claim="higher"),
        Row("queue", f"UNO + queue of {queue} rows", {"objective.queue_size": queue}, claim="higher"),
        CHANCE_ROW,
    )  # fmt: skip
    return Table(
        "extensions", "Options of UNO from later work (not in the paper)",
        "Do IIC, rKD and a queue for Sinkhorn improve on plain UNO?", rows,
        (AWARE_TRAIN, STRICT_TEST), GROUPS,
        (CIFAR10, CIFAR100_50) if scale == FULL else (DIGITS, DIGITS_HARD),
        effects=((AWARE, "novel"), (STRICT_TEST.name, "known"), (STRICT_TEST.name, "all")),
        notes=(
            "This table is ours. IIC: Li et al., CVPR 2023, their weights 0.05 and 0.01. rKD: Gu et al., "
            "ICCV 2023, their weight 0.1. The queue is that of Caron et al. 2020, past "
            "projections under today's prototypes, from the end of the warm-up on: "
            + ("3840 rows, as theirs." if scale == FULL else "15 batches there; 512 rows are 8 batches of "
               "the digits and 20 of the hard ones, less than an epoch."),
            "Strict: all outputs; a novel row counts as right only at a novel output.",
        ),
        seeds=8,
    )  # fmt: skip


def rotation(scale: str) -> Table:
    """Not of the paper: self-supervised pretraining before the supervised one."""
    turned = {"rotation.epochs": 200 if scale == FULL else 30}
    (rs_plus,) = _baselines("rs_plus")
    rows = (
        UNO,
        Row("uno-rotation", "UNO after rotation pretraining", turned, claim="higher"),
        replace(rs_plus, claim=None),
        Row("rs-plus-rotation", "RS+ after rotation pretraining, against RS+",
            {**rs_plus.overrides, **turned}, claim="higher", versus="rs-plus"),
        CHANCE_ROW,
    )  # fmt: skip
    return Table(
        "rotation", "Rotation pretraining (not in the paper)",
        "Do UNO and RS+ gain from self-supervised pretraining before the supervised one?", rows,
        (AWARE_TRAIN,), ("novel",), (CIFAR10, CIFAR100_50) if scale == FULL else (DIGITS,),
        effects=((AWARE, "novel"),),
        notes=(
            "This table is ours. Rotation: Gidaris et al. 2018, as many epochs as the supervised pretraining "
            "after it. Quarter turns take a 6 for a 9." if scale == SMALL else "This table is ours.",
        ),
        seeds=5,
    )  # fmt: skip


TABLES: dict[str, Callable[[str], Table]] = {
    "ablation": ablation,
    "sota": sota,
    "task-agnostic": task_agnostic,
    "aggregation": aggregation,
    "unknown-k": unknown_k,
    "num-novel": num_novel,
    "tsne": tsne,
    "extensions": extensions,
    "rotation": rotation,
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
