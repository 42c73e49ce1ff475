"""Finished runs as the lines of a table: means and spreads over seeds, effects
paired by seed, verdicts.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.special import stdtr

from uno.data.output import mapping
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.reproduce.experiments import REFERENCE, Cell, Evaluation, Row, Table

# standard errors from zero, over seeds and of counting images, from which an effect is
# shown
ERRORS = 2.0
SHOWN, SAME = "shown", "no difference shown, as in the paper"
NOT_SHOWN, OPPOSITE = (
    "not shown at this scale",
    "not shown at this scale: the sign is opposite",
)
DIFFERENT, FEW = "a difference the paper does not have", "no verdict from one seed"

VERSIONS = ("python", "torch", "torchvision", "numpy", "numerics")

Line = dict[str, Any]


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds (n - 1); None of one."""
    return statistics.stdev(values) if len(values) > 1 else None


class Results(NamedTuple):
    """A table and what its cells say.

    ``lines``: a published number of a row, evaluation, group and data set
    (``published``, ``published_sd``, ``source``), or a measured one: in percent
    ``mean``, ``sd``, ``values`` by ``seeds``; ``minutes`` of a run without pretraining;
    the oldest ``numerics`` of its runs (:data:`uno.runs.NUMERICS`); where the row is
    compared to another one the differences of the same seed, ``effect``, ``effect_sd``,
    ``effect_n``, the ``verdict``, and the paper's differences by title of the column,
    ``published_effects``.

    ``failures`` (with reasons) and ``missing`` name cells, ``refused`` what
    :func:`~uno.reproduce.experiments.cells` refuses, and why; ``changes`` are the
      command line's.
    """

    table: Table
    seeds: int
    lines: Sequence[Line]
    total_minutes: float  # of all processes, one after the other
    pretrain_minutes: float
    num_pretrainings: int
    failures: Mapping[str, str]
    missing: Sequence[str]
    refused: Mapping[str, str]
    hardware: Sequence[str]
    versions: Mapping[str, str]
    changes: Mapping[str, Any]
    remarks: Sequence[str]

    def find(self, **wanted: Any) -> list[Line]:
        """The lines with these entries."""
        return [
            line
            for line in self.lines
            if all(line.get(k) == v for k, v in wanted.items())
        ]

    @property
    def effects(self) -> list[Line]:
        """The lines with a verdict, a data set after the other."""
        keys = [benchmark.key for benchmark in self.table.benchmarks]
        return [
            line
            for key in keys
            for line in self.find(benchmark=key)
            if "verdict" in line
        ]


class Run(NamedTuple):
    """A finished cell and what its directory holds."""

    cell: Cell
    metrics: Mapping[str, float]
    environment: Mapping[str, Any]
    minutes: float


def read(
    table: Table,
    cells: Sequence[Cell],
    output: Path,
    changes: Mapping[str, Any],
    seconds: Mapping[str, float],
    failed: Mapping[str, str],
    refused: Mapping[str, str],
) -> Results:
    """Read what the finished ones of ``cells``, all those of a table but the
    ``refused``, measured below ``output``; ``seconds`` of cells and pretrainings and
    reasons of ``failed`` ones are by name.
    """
    runs, missing, remarks = list[Run](), list[str](), list[str]()
    for cell in cells:
        run = output / cell.name
        if not (run / "metrics.json").exists():
            missing.append(cell.name)
            continue
        metrics, environment = (
            read_json(run / f"{name}.json") for name in ("metrics", "environment")
        )
        runs.append(Run(cell, metrics, environment, seconds.get(cell.name, 0.0) / 60))
        if cell.config.data.num_novel == "auto":
            estimate = read_json(run / "estimate.json")
            found, plain = (
                estimate.get("suggested", "?"),
                estimate.get("dtc", {}).get("num_novel", "?"),
            )
            remarks.append(
                f"{cell.row.name}, seed {cell.seed}: classes: {found}; DTC's procedure:"
                f" {plain}"
            )
    pretrainings = {cell.pretraining for cell in cells}
    pretrain_minutes = sum(seconds.get(name, 0.0) for name in pretrainings) / 60
    environments, on_gpu = (
        [run.environment for run in runs],
        changes.get("compute.device") != "cpu",
    )
    hardware = sorted({_hardware(environment, on_gpu) for environment in environments})
    return Results(
        table=table,
        seeds=max(cell.seed for cell in cells) + 1,
        lines=list(
            _lines(
                table,
                runs,
                _row_counts(cells) if table.effects else {},
                "; ".join(hardware),
            )
        ),
        total_minutes=sum(run.minutes for run in runs) + pretrain_minutes,
        pretrain_minutes=pretrain_minutes,
        num_pretrainings=len(pretrainings),
        failures={name: failed[name] for name in missing if name in failed},
        missing=[name for name in missing if name not in failed],
        refused=refused,
        hardware=hardware,
        versions={name: _versions(environments, name) for name in VERSIONS},
        changes={
            key: value
            for key, value in changes.items()
            if not key.startswith("compute.")
        },
        remarks=remarks,
    )


def _lines(
    table: Table,
    runs: Sequence[Run],
    num_rows: Mapping[tuple[str, str, str], int],
    hardware: str,
) -> Iterator[Line]:
    """One line for each row, evaluation, group and data set, the paper's first."""
    by_row: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        by_row[run.cell.benchmark.key, run.cell.row.key].append(run)
    for row, evaluation in itertools.product(table.rows, table.evaluations):
        counted = {
            "table": table.name,
            "scale": table.scale,
            "row": row.key,
            "name": row.name,
            "head": row.head,
            "evaluation": evaluation.name,
            "protocol": evaluation.protocol,
            "split": evaluation.split,
        }
        for column in table.published:
            for group, (value, sd) in zip(
                table.groups, column.read(row.key, evaluation.name), strict=False
            ):
                paper = {"published": value, "published_sd": sd, "source": column.title}
                yield {**counted, "data": column.data, "group": group, **paper}
        for benchmark, group in itertools.product(table.benchmarks, table.groups):
            own = by_row[benchmark.key, row.trained]
            values = _percent(own, row, evaluation, group)
            if not values:
                continue
            line: Line = {
                **counted,
                "benchmark": benchmark.key,
                "data": benchmark.name,
                "group": group,
                "mean": statistics.fmean(values.values()),
                "sd": deviation(list(values.values())),
                "n": len(values),
                "values": list(values.values()),
                "seeds": list(values),
                "minutes": statistics.fmean(run.minutes for run in own),
                "hardware": hardware,
                "numerics": min(int(run.environment.get("numerics", 0)) for run in own),
            }
            if row.claim and group in table.effects.get(evaluation.name, ()):
                versus = table.row(row.versus)
                other = _percent(
                    by_row[benchmark.key, versus.trained], versus, evaluation, group
                )
                differences = [
                    value - other[seed]
                    for seed, value in values.items()
                    if seed in other
                ]
                if differences:
                    count = num_rows[benchmark.key, evaluation.split, group]
                    line |= {
                        "effect": statistics.fmean(differences),
                        "effect_sd": deviation(differences),
                        "effect_n": len(differences),
                        "verdict": verdict(differences, row.claim, count),
                        "published_effects": published_effects(
                            table, row, evaluation, group
                        ),
                    }
            yield line


def _percent(
    runs: Iterable[Run], row: Row, evaluation: Evaluation, group: str
) -> dict[int, float]:
    """A row's number by seed, in percent; empty where its runs have none."""
    key = f"{evaluation.split}/{group}/{evaluation.protocol}/acc/{row.head}"
    if row.metric is not None:  # a number of novel rows, task-aware
        fits = group == "novel" and evaluation.protocol == "task_aware"
        key = row.metric.format(split=evaluation.split) if fits else ""
    return {
        run.cell.seed: 100 * float(run.metrics[key])
        for run in runs
        if key in run.metrics
    }


def published_effects(
    table: Table, row: Row, evaluation: Evaluation, group: str
) -> dict[str, float]:
    """The paper's differences of ``row`` to the one it is compared to, in points, by
    title of the column.
    """
    found, index = {}, table.groups.index(group)
    for column in table.published:
        one, other = (
            column.read(key, evaluation.name) for key in (row.key, row.versus)
        )
        if one and other:
            found[column.title] = round(one[index][0] - other[index][0], 1)
    return found


def verdict(differences: Sequence[float], claim: str, num_rows: int) -> str:
    """Judge a claim by paired differences (in percent, one a seed) of accuracies on
    ``num_rows`` rows.

    ``shown`` asks for a mean at least ERRORS standard errors from zero. All seeds share
    the measured images: D images that only one of two models has right have a standard
    error of at least sqrt(D), so a difference of less than 4 images is never shown.
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
    """Two-sided probability that no effect at all looks as clear as :data:`ERRORS`
    errors (Student's t).
    """
    return None if seeds < 2 else float(2 * stdtr(seeds - 1, -ERRORS))


def _row_counts(cells: Sequence[Cell]) -> dict[tuple[str, str, str], int]:
    """Rows with truth that accuracies are measured on, by (benchmark, split, group)."""
    counts = {}
    for cell in cells:
        if (cell.row.key, cell.seed) == (REFERENCE, 0):
            task = make_task(read_rows(cell.config.data), cell.config.data)
            for split, member in (("train", task.is_train), ("test", ~task.is_train)):
                truth = task.eval_labels[member]
                every, novel = (
                    int((truth >= 0).sum()),
                    int((truth >= task.num_known).sum()),
                )
                for group, number in (
                    ("all", every),
                    ("known", every - novel),
                    ("novel", novel),
                ):
                    counts[cell.benchmark.key, split, group] = number
    return counts


def _versions(environments: Sequence[Mapping[str, Any]], name: str) -> str:
    found = {e.get("versions", {}).get(name) or e.get(name) for e in environments}
    return ", ".join(sorted(str(version) for version in found if version))


def _hardware(environment: Mapping[str, Any], on_gpu: bool) -> str:
    gpus = environment.get("gpus") or []
    return str(
        gpus[0] if gpus and on_gpu else environment.get("processor", "unknown hardware")
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON mapping, {} where there is no file. ConfigError: it is damaged."""
    found = mapping(path.read_bytes()) if path.exists() else {}
    if found is None:
        raise ConfigError(f"{path} is damaged; delete its directory to run it again")
    return found
