"""Directories as finished cells leave them, with made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path

from uno.reproduce.definitions import Table
from uno.reproduce.results import Results, read
from uno.reproduce.tables import build, cells

ENVIRONMENT = {
    "python": "3.11", "versions": {"torch": "2.11"}, "gpus": [], "processor": "Testium, 2 cores"
}  # fmt: skip


def small(name: str) -> Table:
    """A table on the digits only."""
    from dataclasses import replace

    table = build(name, "small")
    return replace(table, benchmarks=table.benchmarks[:1])


def finish(output: Path, table: Table, seeds: int, accuracy, skip: tuple[str, ...] = ()) -> None:
    """Write the metrics of every cell: ``accuracy(row key, evaluation, group, seed)`` is a fraction."""
    for cell in cells(table, seeds):
        if cell.slug in skip:
            continue
        metrics = {
            evaluation.key(group, head): accuracy(cell.row.key, evaluation, group, cell.seed)
            for evaluation in table.evaluations
            for group in table.groups
            for head in ("avg", "best")
        }
        for evaluation in table.evaluations:
            metrics[f"{evaluation.split}/novel/task_aware/chance/acc"] = 0.25
        place = output / "cells" / cell.slug
        place.mkdir(parents=True)
        (place / "metrics.json").write_text(json.dumps(metrics))
        (place / "environment.json").write_text(json.dumps(ENVIRONMENT))


def found(output: Path, table: Table, seeds: int, failed: dict[str, str] | None = None) -> Results:
    """Results of finished cells that took a minute each."""
    seconds = {f"cells/{cell.slug}": 60.0 for cell in cells(table, seeds)}
    return read(table, output, {}, {}, seeds, seconds, failed or {})
