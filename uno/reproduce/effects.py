"""What finished runs say about a table: means and spreads over seeds, effects paired by seed, verdicts."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.special import stdtr

from uno.data.output import mapping
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.reproduce.experiments import REFERENCE, Benchmark, Cell, Evaluation, Row, Table

ERRORS = 2.0  # standard errors from zero, over seeds and of counting images, from which an effect is shown
SHOWN, SAME = "shown", "no difference shown, as in the paper"
NOT_SHOWN, OPPOSITE = "not shown at this scale", "not shown at this scale: the sign is opposite"
DIFFERENT, FEW = "a difference the paper does not have", "no verdict from one seed"

VERSIONS = ("python", "torch", "torchvision", "numpy", "numerics")

Key = tuple[str, str, str, str]  # benchmark, row, evaluation, group
Measured = Mapping[int, float]  # accuracies, or differences of accuracies, in percent by seed


def mean(measured: Measured) -> float:
    """Over seeds."""
    return statistics.fmean(measured.values())


def deviation(measured: Measured) -> float | None:
    """Standard deviation over seeds (n - 1); None of one."""
    return statistics.stdev(measured.values()) if len(measured) > 1 else None


class Effect(NamedTuple):
    """The difference of a row to the one it is compared to, paired by seed, and the paper's, by column."""

    benchmark: Benchmark
    row: Row
    evaluation: Evaluation
    group: str
    measured: Measured
    verdict: str
    published: Mapping[str, float]


class Results(NamedTuple):
    """A table and what is known of its cells: ``minutes`` of each by (benchmark, row), without pretraining,
    and the oldest ``numerics`` of a row's (:data:`uno.runs.NUMERICS`); ``failures`` (with reasons) and
    ``missing`` name cells, ``refused`` what :func:`~uno.reproduce.experiments.cells` refuses, and why;
    ``changes`` are the command line's.
    """

    table: Table
    seeds: int
    values: Mapping[Key, Measured]
    effects: Mapping[Key, Effect]
    minutes: Mapping[tuple[str, str], list[float]]
    numerics: Mapping[tuple[str, str], int]
    pretrain_minutes: float
    num_pretrainings: int
    failures: Mapping[str, str]
    missing: Sequence[str]
    refused: Mapping[str, str]
    hardware: Sequence[str]
    versions: Mapping[str, str]
    changes: Mapping[str, Any]
    remarks: Sequence[str]

    @property
    def total_minutes(self) -> float:
        """Of all processes, one after the other."""
        return sum(map(sum, self.minutes.values())) + self.pretrain_minutes


def read(
    table: Table, cells: Sequence[Cell], output: Path, changes: Mapping[str, Any],
    seconds: Mapping[str, float], failed: Mapping[str, str], refused: Mapping[str, str],
) -> Results:  # fmt: skip
    """What the finished ones of ``cells``, all those of a table but the ``refused``, measured below
    ``output``; ``seconds`` of cells and pretrainings and reasons of ``failed`` ones are by name.
    """
    values: defaultdict[Key, dict[int, float]] = defaultdict(dict)
    minutes: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    missing, environments, remarks, numerics = list[str](), [], [], dict[tuple[str, str], int]()
    for cell in cells:
        run = output / cell.name
        if not (run / "metrics.json").exists():
            missing.append(cell.name)
            continue
        of_row = cell.benchmark.key, cell.row.key
        minutes[of_row].append(seconds.get(cell.name, 0.0) / 60)
        environments.append(_read_json(run / "environment.json"))
        made_with = int(environments[-1].get("numerics", 0))
        numerics[of_row] = min(made_with, numerics.get(of_row, made_with))
        for key, value in _readings(table, cell, _read_json(run / "metrics.json")):
            values[key][cell.seed] = 100 * value
        if cell.config.data.num_novel == "auto":
            estimate = _read_json(run / "estimate.json")
            found, plain = estimate.get("suggested", "?"), estimate.get("dtc", {}).get("num_novel", "?")
            remarks.append(f"{cell.row.name}, seed {cell.seed}: {found} classes; DTC's procedure: {plain}")
    failures = {name: failed[name] for name in missing if name in failed}
    on_gpu, pretrainings = changes.get("compute.device") != "cpu", {cell.pretraining for cell in cells}
    return Results(
        table, max(cell.seed for cell in cells) + 1, values, _effects(table, cells, values), minutes,
        numerics, sum(seconds.get(name, 0.0) for name in pretrainings) / 60, len(pretrainings), failures,
        [name for name in missing if name not in failed], refused,
        sorted({_hardware(environment, on_gpu) for environment in environments}),
        {name: _versions(environments, name) for name in VERSIONS},
        {key: value for key, value in changes.items() if not key.startswith("compute.")}, remarks,
    )  # fmt: skip


def _readings(table: Table, cell: Cell, metrics: Mapping[str, Any]) -> Iterator[tuple[Key, float]]:
    """Every number of a table that one cell's metrics hold, as fractions."""
    for row in table.rows:
        for evaluation in table.evaluations if row.trained == cell.row.key else ():
            for group in table.groups:
                path = f"{evaluation.split}/{group}/{evaluation.protocol}/acc/{row.head}"
                if row.metric is not None:  # a number of novel rows, task-aware
                    fits = group == "novel" and evaluation.protocol == "task_aware"
                    path = row.metric.format(split=evaluation.split) if fits else ""
                if path in metrics:
                    yield (cell.benchmark.key, row.key, evaluation.name, group), float(metrics[path])


def _effects(table: Table, cells: Sequence[Cell], values: Mapping[Key, Measured]) -> dict[Key, Effect]:
    """Rows against the row each is compared to, where both have values of the same seeds."""
    num_rows, effects = _row_counts(cells) if table.effects else {}, {}
    for benchmark, row, evaluation in itertools.product(table.benchmarks, table.rows, table.evaluations):
        for group in table.effects.get(evaluation.name, ()) if row.claim else ():
            key, other = ((benchmark.key, k, evaluation.name, group) for k in (row.key, row.versus))
            one, two = values.get(key, {}), values.get(other, {})
            difference = {seed: one[seed] - two[seed] for seed in one if seed in two}
            if difference:
                count = num_rows[benchmark.key, evaluation.split, group]
                found = verdict(list(difference.values()), str(row.claim), count)
                published = published_effects(table, row, evaluation, group)
                effects[key] = Effect(benchmark, row, evaluation, group, difference, found, published)
    return effects


def published_effects(table: Table, row: Row, evaluation: Evaluation, group: str) -> dict[str, float]:
    """The paper's differences of ``row`` to the one it is compared to, in points, by title of the column."""
    found, index = {}, table.groups.index(group)
    for column in table.published:
        one, other = (column.read(key, evaluation.name) for key in (row.key, row.versus))
        if one and other:
            found[column.title] = round(one[index][0] - other[index][0], 1)
    return found


def verdict(differences: Sequence[float], claim: str, num_rows: int) -> str:
    """What paired differences (in percent, one a seed) of accuracies on ``num_rows`` rows say of a claim.

    ``shown`` asks for a mean at least ERRORS standard errors from zero. All seeds share the measured images:
    D images that only one of two models has right have a standard error of at least sqrt(D), so a difference
    of less than 4 images is never shown.
    """
    if len(differences) < 2:
        return FEW
    middle = statistics.fmean(differences)
    counting = 100 * math.sqrt(abs(middle) / 100 / num_rows)
    error = max(statistics.stdev(differences) / math.sqrt(len(differences)), counting)
    clear = middle != 0 and abs(middle) >= ERRORS * error
    if claim == "same":
        return DIFFERENT if clear else SAME
    if (middle > 0) if claim == "lower" else (middle < 0):
        return OPPOSITE
    return SHOWN if clear else NOT_SHOWN


def chance_of_no_effect(seeds: int) -> float | None:
    """Two-sided probability that no effect at all looks as clear as :data:`ERRORS` errors (Student's t)."""
    return None if seeds < 2 else float(2 * stdtr(seeds - 1, -ERRORS))


def _row_counts(cells: Sequence[Cell]) -> dict[tuple[str, str, str], int]:
    """Rows with truth that accuracies are measured on, by (benchmark, split, group)."""
    counts = {}
    for cell in cells:
        if (cell.row.key, cell.seed) == (REFERENCE, 0):
            task = make_task(read_rows(cell.config.data), cell.config.data)
            for split, member in (("train", task.is_train), ("test", ~task.is_train)):
                truth = task.eval_labels[member]
                every, novel = int((truth >= 0).sum()), int((truth >= task.num_known).sum())
                for group, number in (("all", every), ("known", every - novel), ("novel", novel)):
                    counts[cell.benchmark.key, split, group] = number
    return counts


def _versions(environments: Sequence[Mapping[str, Any]], name: str) -> str:
    found = {e.get("versions", {}).get(name) or e.get(name) for e in environments}
    return ", ".join(sorted(str(version) for version in found if version))


def _hardware(environment: Mapping[str, Any], on_gpu: bool) -> str:
    gpus = environment.get("gpus") or []
    return str(gpus[0] if gpus and on_gpu else environment.get("processor", "unknown hardware"))


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON mapping, {} where there is no file. ConfigError: it is damaged."""
    found = mapping(path.read_bytes()) if path.exists() else {}
    if found is None:
        raise ConfigError(f"{path} is damaged; delete its directory to run it again")
    return found
