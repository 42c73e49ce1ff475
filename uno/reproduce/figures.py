"""t-SNE maps of checkpoints: Fig. 4 (all classes, UNO beside RS+), the appendix's figure (novel classes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from uno.config import Config, override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.report.charts import COLOURS, Map, choose_points, draw_map, map_groups
from uno.report.facts import Sample, decoder, look, open_model
from uno.reproduce.results import Results
from uno.runs.directory import read_config_tree


class Panel(NamedTuple):
    """A map and its dots, see :func:`uno.report.charts.map_groups`."""

    map: Map
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """Maps side by side."""

    title: str
    caption: str
    panels: list[Panel]


def draw(found: Results, say: Callable[[str], None]) -> list[Figure]:
    """Both figures from the runs of seed 0, for each data set; a run that is missing leaves its maps out."""
    figures = []
    for benchmark in found.table.benchmarks:
        runs = {}
        for row in found.table.rows:
            place = found.output / "cells" / f"{benchmark.key}-{row.key}-seed0"
            if (place / "metrics.json").exists():
                say(f"drawing the maps of {row.name} on {benchmark.name}")
                runs[row.key, row.name] = _look(str(place))
        panels = [panel for (_, name), run in runs.items() for panel in _all_classes(name, *run)]
        figures.append(
            Figure(
                f"All classes, {benchmark.name} (paper, Fig. 4)",
                "Training images, labeled and unlabeled, coloured by their true class; PCA, then t-SNE. "
                "Squares are known classes, dots novel ones. Logits: those of the known head and of all "
                "novel heads.",
                panels,
            )
        )
        ours = [run for (key, _), run in runs.items() if key == found.table.reference]
        if ours:
            caption = "Unlabeled training images, coloured by their true class, in the spaces of UNO."
            title = f"Novel classes, {benchmark.name} (paper, appendix's figure)"
            figures.append(Figure(title, caption, _novel_classes(*ours[0])))
    return figures


def _look(place: str) -> tuple[Task, Sample, int]:
    """What a run's model says of its rows; and the seed of the drawing."""
    storage = Storage(place)
    config = override(Config(), read_config_tree(storage))
    task = make_task(read_rows(config.data), config.data)
    model = open_model(config, storage, task, torch.device("cpu"))
    return task, look(config, task, model, decoder(task)), config.seed


def _all_classes(name: str, task: Task, found: Sample, seed: int) -> list[Panel]:
    rows = np.flatnonzero(task.is_train[found.index])
    rows = rows[choose_points(len(rows), seed)]
    logits = np.concatenate([found.known[rows], found.novel[rows].reshape(len(rows), -1)], axis=1)
    spaces = [(f"{name}: shared feature space", found.features[rows]), (f"{name}: logits", logits)]
    return _panels(spaces, task, found, rows, seed)


def _novel_classes(task: Task, found: Sample, seed: int) -> list[Panel]:
    rows = np.flatnonzero((task.is_train & (task.labels < 0))[found.index])
    rows = rows[choose_points(len(rows), seed)]
    spaces = [
        ("Shared feature space", found.features[rows]),
        ("Cluster-head logits", found.novel[rows].reshape(len(rows), -1)),
    ]
    if found.over is not None:
        spaces.append(("Overclustering-head logits", found.over[rows].reshape(len(rows), -1)))
    return _panels(spaces, task, found, rows, seed)


def _panels(
    spaces: list[tuple[str, NDArray[np.float32]]],
    task: Task,
    found: Sample,
    rows: NDArray[np.int64],
    seed: int,
) -> list[Panel]:
    """One map for each space; rows are positions in the sample."""
    truth, names = task.eval_labels[found.index[rows]], [*task.known, *task.novel]
    colours = [i % COLOURS for i in range(len(names))]
    drawn = [draw_map(title, f"{len(rows):,} images.", data, seed) for title, data in spaces]
    return [Panel(m, map_groups(truth, names, task.num_known, colours, [m])) for m in drawn if m is not None]
