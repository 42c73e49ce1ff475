"""What finished runs say about a table: means and spreads over seeds, effects paired by seed, verdicts."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy import stats

from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.reproduce.definitions import Benchmark, Evaluation, Row, Table
from uno.reproduce.published import Column
from uno.reproduce.tables import Cell, cell_config, cells
from uno.runs.run import pretrain_hash

ERRORS = 2.0
"""An effect counts as shown where it is at least so many standard errors from zero: those of its mean over
seeds, and those of counting images."""

SHOWN, SAME = "shown", "no difference shown, as in the paper"
NOT_SHOWN, OPPOSITE = "not shown at this scale", "not shown at this scale: the sign is opposite"
DIFFERENT, FEW = "a difference the paper does not have", "no verdict from one seed"


@dataclass(frozen=True)
class Measured:
    """Accuracies in percent by seed."""

    by_seed: Mapping[int, float]

    @property
    def values(self) -> list[float]:
        """In the order of seeds."""
        return [self.by_seed[seed] for seed in sorted(self.by_seed)]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds (n - 1); None of one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def minus(self, other: Measured) -> Measured:
        """Differences of the seeds that both have."""
        both = self.by_seed.keys() & other.by_seed.keys()
        return Measured({seed: self.by_seed[seed] - other.by_seed[seed] for seed in both})


@dataclass(frozen=True)
class Effect:
    """The difference of a row to the reference row, paired by seed, and the paper's, by column."""

    benchmark: Benchmark
    row: Row
    evaluation: Evaluation
    group: str
    measured: Measured
    verdict: str
    published: Mapping[str, float]


@dataclass(frozen=True)
class Results:
    """A table and what is known of its cells.

    ``values[benchmark key, row key, evaluation name, group]``; ``num_rows[benchmark key, split, group]``;
    ``minutes[benchmark key, row key]`` of each cell, its pretraining left out; ``pretrain_minutes``: of all
    pretrainings together. ``failures`` and ``missing`` name cells. ``hardware`` and ``versions`` are those of
    the runs.
    """

    table: Table
    output: Path
    seeds: int
    values: Mapping[tuple[str, str, str, str], Measured]
    num_rows: Mapping[tuple[str, str, str], int]
    minutes: Mapping[tuple[str, str], list[float]]
    pretrain_minutes: float
    num_pretrainings: int
    failures: Mapping[str, str]
    missing: list[str]
    hardware: list[str]
    versions: Mapping[str, str]
    changes: Mapping[str, Any]
    remarks: list[str] = field(default_factory=list)

    def measured(self, benchmark: Benchmark, row: Row, evaluation: Evaluation, group: str) -> Measured | None:
        """Values of a cell of the table; None where no run has any."""
        return self.values.get((benchmark.key, row.key, evaluation.name, group))

    @property
    def total_minutes(self) -> float:
        """Of all processes, one after the other."""
        return sum(sum(m) for m in self.minutes.values()) + self.pretrain_minutes

    def effects(self) -> list[Effect]:
        """Rows against the row each is compared to, where both have values."""
        table = self.table
        return [
            effect
            for benchmark in table.benchmarks
            for row in table.rows
            if row.claim is not None
            for name, group in table.effects
            if (effect := self._effect(benchmark, row, table.against(row), table.evaluation(name), group))
        ]

    def _effect(
        self, benchmark: Benchmark, row: Row, reference: Row, evaluation: Evaluation, group: str
    ) -> Effect | None:
        pair = [self.measured(benchmark, r, evaluation, group) for r in (row, reference)]
        if pair[0] is None or pair[1] is None:
            return None
        difference = pair[0].minus(pair[1])
        if not difference.by_seed:
            return None
        published = {
            column.title: value
            for column in self.table.published
            if (value := published_effect(column, row, reference, evaluation, self.table.groups.index(group)))
            is not None
        }
        num_rows = self.num_rows[benchmark.key, evaluation.split, group]
        found = verdict(difference.values, str(row.claim), num_rows)
        return Effect(benchmark, row, evaluation, group, difference, found, published)


def published_effect(
    column: Column, row: Row, reference: Row, evaluation: Evaluation, group: int
) -> float | None:
    """The paper's difference between two rows, in points; None where it lacks one."""
    one, other = (column.numbers(r.key, evaluation.name) for r in (row, reference))
    if len(one) <= group or len(other) <= group:
        return None
    return round(one[group][0] - other[group][0], 1)


def verdict(differences: list[float], claim: str, num_rows: int) -> str:
    """What paired differences (row - reference) say of the paper's claim, ``lower``, ``higher`` or ``same``.

    ``shown`` asks for a mean at least :data:`ERRORS` standard errors below (above) zero. All seeds share the
    measured images, so agreement of seeds alone proves little: D images that only one of two models has right
    have a standard error of at least sqrt(D), and a difference of less than 4 images is never shown.

    Args:
        differences: in percent, one for each seed.
        claim: ``lower``, ``higher`` or ``same``.
        num_rows: that each accuracy was measured on.
    """
    if len(differences) < 2:
        return FEW
    mean = statistics.fmean(differences)
    counting = 100 * math.sqrt(abs(mean) / 100 / num_rows)
    error = max(statistics.stdev(differences) / math.sqrt(len(differences)), counting)
    clear = mean != 0 and abs(mean) >= ERRORS * error
    if claim == "same":
        return DIFFERENT if clear else SAME
    if (mean > 0) if claim == "lower" else (mean < 0):
        return OPPOSITE
    return SHOWN if clear else NOT_SHOWN


def chance_of_no_effect(seeds: int) -> float | None:
    """Two-sided probability that no effect at all looks as clear as :data:`ERRORS` errors (Student's t)."""
    return None if seeds < 2 else float(2 * stats.t.sf(ERRORS, seeds - 1))


def read(
    table: Table,
    output: Path,
    directories: Mapping[str, str],
    changes: Mapping[str, Any],
    seeds: int,
    seconds: Mapping[str, float],
    failed: Mapping[str, str],
) -> Results:
    """Collect what the finished cells of a table measured.

    Args:
        table: whose cells.
        output: directory with ``cells/SLUG/metrics.json``.
        directories: of the data sets, by option.
        changes: dotted keys that hold for every cell.
        seeds: of each row.
        seconds: that each job took, by its name (``cells/SLUG``).
        failed: reasons of failed jobs, by name.

    Raises:
        ConfigError: a result that cannot be read.
    """
    values: dict[tuple[str, str, str, str], dict[int, float]] = {}
    minutes: dict[tuple[str, str], list[float]] = {}
    failures, missing, environments, pretrained = {}, [], [], set()
    remarks = []
    for cell in cells(table, seeds):
        name = f"cells/{cell.slug}"
        config = cell_config(cell, directories, changes)
        pretrained.add(f"pretrain/{pretrain_hash(config)}")
        metrics = read_json(output / name / "metrics.json")
        if metrics is None:
            if name in failed:
                failures[name] = failed[name]
            else:
                missing.append(name)
            continue
        minutes.setdefault((cell.benchmark.key, cell.row.key), []).append(seconds.get(name, 0.0) / 60)
        environments.append(read_json(output / name / "environment.json") or {})
        for key, value in _readings(table, cell, metrics).items():
            values.setdefault(key, {})[cell.seed] = 100 * value
        if config.data.num_novel == "auto":
            estimate = read_json(output / name / "estimate.json") or {}
            remarks.append(f"{cell.row.name}, seed {cell.seed}: {estimate.get('suggested', '?')} classes")
    on_gpu = changes.get("compute.device") != "cpu"
    return Results(
        table, output, seeds, {key: Measured(value) for key, value in values.items()},
        _row_counts(table, directories, changes), minutes,
        sum(seconds.get(name, 0.0) for name in pretrained) / 60, len(pretrained), failures, missing,
        sorted({_hardware(e, on_gpu) for e in environments}),
        {name: _versions(environments, name) for name in ("python", "torch", "torchvision", "numpy")},
        {key: value for key, value in changes.items() if not key.startswith("compute.")},
        remarks,
    )  # fmt: skip


def _readings(table: Table, cell: Cell, metrics: Mapping[str, Any]) -> dict[tuple[str, str, str, str], float]:
    """Every number of a table that one cell's metrics hold, fractions."""
    found = {}
    for row in table.rows:
        if row.trained != cell.row.key:
            continue
        for evaluation in table.evaluations:
            for group in table.groups:
                key = evaluation.key(group, row.head)
                if row.metric is not None:  # a number of novel rows, task-aware
                    fits = group == "novel" and evaluation.protocol == "task_aware"
                    key = row.metric.format(split=evaluation.split) if fits else ""
                if key in metrics:
                    found[cell.benchmark.key, row.key, evaluation.name, group] = float(metrics[key])
    return found


def _row_counts(
    table: Table, directories: Mapping[str, str], changes: Mapping[str, Any]
) -> dict[tuple[str, str, str], int]:
    """Rows with truth that accuracies are measured on, by (benchmark, split, group); {} without effects."""
    counts = {}
    for benchmark in table.benchmarks if table.effects else ():
        reference = Cell(table.row(table.reference), benchmark, 0)
        config = cell_config(reference, directories, changes)
        task = make_task(read_rows(config.data), config.data)
        for split, member in (("train", task.is_train), ("test", ~task.is_train)):
            known = int((member & (task.eval_labels >= 0) & (task.eval_labels < task.num_known)).sum())
            novel = int((member & (task.eval_labels >= task.num_known)).sum())
            for group, number in (("known", known), ("novel", novel), ("all", known + novel)):
                counts[benchmark.key, split, group] = number
    return counts


def _versions(environments: list[dict[str, Any]], name: str) -> str:
    found = {e.get("versions", {}).get(name) or e.get(name) for e in environments}
    return ", ".join(sorted(str(version) for version in found if version))


def _hardware(environment: Mapping[str, Any], on_gpu: bool) -> str:
    gpus = environment.get("gpus") or []
    return str(gpus[0] if gpus and on_gpu else environment.get("processor", "unknown hardware"))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON mapping; None where there is no file.

    Raises:
        ConfigError: it is damaged.
    """
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ConfigError(f"{path} is damaged; delete its directory to run it again") from None
