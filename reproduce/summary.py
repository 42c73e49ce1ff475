"""Summarize finished runs of experiments: means over seeds, and paired differences."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reproduce.experiments import Cell, Evaluation, Row, Table
from uno.data.output import parse_mapping
from uno.errors import ConfigError
from uno.runs import ENVIRONMENT_FILE, ESTIMATE_FILE, RESULTS_FILE

VERSIONS = ("python", "torch", "torchvision", "numpy", "numerics")

Line = dict[str, Any]
"""A line of a table's results, see :attr:`Results.lines`."""


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation of values; None if there is only one."""
    return statistics.stdev(values) if len(values) > 1 else None


class Results(NamedTuple):
    """A table of experiments and the results of its finished runs.

    A cell is one run: a row of the table, a data set, and a seed.

    Attributes:
        table: The table with the rows and data sets that were asked for.
        seeds: The number of seeds of each row.
        lines: A mapping for each row, evaluation, group and data set. A line of the
            paper has ``published``, ``published_sd`` and ``source``. A measured line
            has ``mean`` and ``sd`` in percent, ``values`` with their ``seeds``, and
            ``minutes`` of a run without its pretraining. If the row is compared to
            another one, the line also has ``effect``, ``effect_sd`` and ``effect_n``:
            the mean, standard deviation and number of the differences of the same seed,
            in points.
        total_minutes: Minutes of all processes, one after the other.
        pretrain_minutes: Minutes of the pretrainings among them.
        num_pretrainings: The number of pretrainings that cells share.
        failures: Reasons by name of the cells that failed.
        missing: Names of the cells without a result that did not fail.
        refused: Reasons by "DATASET-ROW" of the rows that
            :func:`~reproduce.experiments.cells` leaves out.
        hardware: Names of the devices of all runs.
        versions: Versions of libraries, and the version number of the numerics.
        changes: Settings of the command line that hold for all cells.
        remarks: Sentences about estimated numbers of classes.
    """

    table: Table
    seeds: int
    lines: Sequence[Line]
    total_minutes: float
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
        """Return the lines of results with given values.

        Args:
            **wanted: Values by key of the line, such as ``row="uno"`` or
                ``group="novel"``. A line must have all of them.
        """
        return [
            line
            for line in self.lines
            if all(line.get(k) == v for k, v in wanted.items())
        ]


class Run(NamedTuple):
    """A finished cell with the results of its run.

    Attributes:
        cell: The cell.
        metrics: The metrics of the run, by key.
        environment: The hardware and versions of the run.
        minutes: Minutes of the run, without pretraining.
    """

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
    """Read the metrics of finished runs, and summarize them over seeds.

    Args:
        table: The table of experiments that the runs belong to.
        cells: All runs of the table, one for each row, data set and seed, except for
            those of refused rows.
        output: The directory below which the runs are.
        changes: Settings of the command line that hold for all runs, by dotted key.
        seconds: Seconds that runs and pretrainings took, by their names.
        failed: Error messages of failed runs, by name.
        refused: Reasons by "DATASET-ROW" of rows that are left out because their
            settings conflict with those of the data set or the command line.

    Returns:
        Means, standard deviations and differences to other rows, with everything that
        is said below the table.

    Raises:
        ConfigError: A result file of a run is damaged.
    """
    runs, missing, remarks = list[Run](), list[str](), list[str]()
    for cell in cells:
        directory = output / cell.name
        if not (directory / RESULTS_FILE).exists():
            missing.append(cell.name)
            continue
        metrics = read_json(directory / RESULTS_FILE)
        environment = read_json(directory / ENVIRONMENT_FILE)
        runs.append(Run(cell, metrics, environment, seconds.get(cell.name, 0.0) / 60))
        if cell.config.data.num_novel == "auto":
            estimate = read_json(directory / ESTIMATE_FILE)
            remarks.append(
                f"{cell.row.name}, seed {cell.seed}: estimated novel classes:"
                f" {estimate.get('suggested', '?')}"
            )
    pretrainings = {cell.start for cell in cells}
    pretrain_minutes = sum(seconds.get(name, 0.0) for name in pretrainings) / 60
    environments = [run.environment for run in runs]
    on_gpu = changes.get("compute.device") != "cpu"
    return Results(
        table=table,
        seeds=max(cell.seed for cell in cells) + 1,
        lines=[*_published_lines(table), *_measured_lines(table, runs)],
        total_minutes=sum(run.minutes for run in runs) + pretrain_minutes,
        pretrain_minutes=pretrain_minutes,
        num_pretrainings=len(pretrainings),
        failures={name: failed[name] for name in missing if name in failed},
        missing=[name for name in missing if name not in failed],
        refused=refused,
        hardware=sorted({_hardware(one, on_gpu) for one in environments}),
        versions={name: _versions(environments, name) for name in VERSIONS},
        changes={
            key: value
            for key, value in changes.items()
            if not key.startswith("compute.")
        },
        remarks=remarks,
    )


def _published_lines(table: Table) -> Iterator[Line]:
    """Yield a line of results for each accuracy that the paper publishes.

    A line is a mapping for a row of the table. It has the mean in percent as
    ``published``, the standard deviation or None as ``published_sd``, and the data set,
    the group of images, the source and the row.

    Args:
        table: The table of experiments.
    """
    for row, evaluation in itertools.product(table.rows, table.evaluations):
        for column in table.published:
            numbers = column.read(row.key, evaluation.name)
            for group, (value, sd) in zip(table.groups, numbers, strict=False):
                yield {
                    **_counted(table, row, evaluation),
                    "data": column.data,
                    "group": group,
                    "published": value,
                    "published_sd": sd,
                    "source": column.title,
                }


def _measured_lines(table: Table, runs: Sequence[Run]) -> Iterator[Line]:
    """Yield a line of results for each accuracy that runs measured, over seeds.

    There is a line for each row of the table, evaluation (protocol and split), data set
    and group of images (such as novel), if a run has this accuracy.

    Args:
        table: The table of experiments.
        runs: The finished runs of the table.

    Yields:
        Lines with the mean and standard deviation in percent over seeds. If a row is
        compared to another one, its line also has the mean difference between the runs
        of both rows with the same seed, in points.
    """
    by_row: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        by_row[run.cell.benchmark.key, run.cell.row.key].append(run)
    for row, evaluation, benchmark, group in itertools.product(
        table.rows, table.evaluations, table.benchmarks, table.groups
    ):
        own = by_row[benchmark.key, row.trained]
        values = _percent(own, row, evaluation, group)
        if not values:
            continue
        line: Line = {
            **_counted(table, row, evaluation),
            "benchmark": benchmark.key,
            "data": benchmark.name,
            "group": group,
            "mean": statistics.fmean(values.values()),
            "sd": deviation(list(values.values())),
            "n": len(values),
            "values": list(values.values()),
            "seeds": list(values),
            "minutes": statistics.fmean(run.minutes for run in own),
        }
        if row.versus is not None:
            other_row = table.row(row.versus)
            other = _percent(
                by_row[benchmark.key, other_row.trained], other_row, evaluation, group
            )
            differences = [
                value - other[seed] for seed, value in values.items() if seed in other
            ]
            if differences:
                line |= {
                    "effect": statistics.fmean(differences),
                    "effect_sd": deviation(differences),
                    "effect_n": len(differences),
                }
        yield line


def _counted(table: Table, row: Row, evaluation: Evaluation) -> Line:
    """Return the entries of a line of results that say what was measured.

    These are the table and its scale; the key, name and head of the row; and the name,
    protocol and split of the evaluation. The numbers are added by the caller.

    Args:
        table: The table of experiments.
        row: The row of the table, such as a method.
        evaluation: The protocol and the split.
    """
    return {
        "table": table.name,
        "scale": table.scale,
        "row": row.key,
        "name": row.name,
        "head": row.head,
        "evaluation": evaluation.name,
        "protocol": evaluation.protocol,
        "split": evaluation.split,
    }


def _percent(
    runs: Iterable[Run], row: Row, evaluation: Evaluation, group: str
) -> dict[int, float]:
    """Return the accuracy of each run of a row of a table, in percent by seed.

    If the row names another metric, it is that metric, which only exists for novel
    images under the task-aware protocol.

    Args:
        runs: The runs of the row on one data set, one for each seed.
        row: The row, with its head and maybe a metric other than accuracy.
        evaluation: The protocol and the split.
        group: The group of images, such as "novel".

    Returns:
        Percent by seed; empty if the runs do not have the number.
    """
    key = f"{evaluation.split}/{group}/{evaluation.protocol}/acc/{row.head}"
    if row.metric is not None:  # it only exists for novel rows, task-aware
        fits = group == "novel" and evaluation.protocol == "task_aware"
        key = row.metric.format(split=evaluation.split) if fits else ""
    return {
        run.cell.seed: 100 * float(run.metrics[key])
        for run in runs
        if key in run.metrics
    }


def _versions(environments: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return all versions of a library that runs used, sorted and comma-separated.

    Args:
        environments: The contents of ``environment.json`` of the runs.
        name: The name of the library; or "numerics" for the version number of this
            program, which changes when its numerical results change.
    """
    found = {e.get("versions", {}).get(name) or e.get(name) for e in environments}
    return ", ".join(sorted(str(version) for version in found if version))


def _hardware(environment: Mapping[str, Any], on_gpu: bool) -> str:
    """Return the name of a run's first GPU, or of its processor.

    Args:
        environment: The content of ``environment.json`` of the run.
        on_gpu: Whether the run may have used a GPU.
    """
    gpus = environment.get("gpus") or []
    return str(
        gpus[0] if gpus and on_gpu else environment.get("processor", "unknown hardware")
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON mapping from a file in the directory of a run.

    Args:
        path: The path of the file.

    Returns:
        The mapping; an empty one if there is no file.

    Raises:
        ConfigError: The file is damaged.
    """
    found = parse_mapping(path.read_bytes()) if path.exists() else {}
    if found is None:
        raise ConfigError(f"{path} is damaged; delete its directory to run it again")
    return found
