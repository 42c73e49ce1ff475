"""t-SNE maps of checkpoints: Fig. 4 (all classes, UNO beside RS+), the appendix's figure (novel classes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from uno.config import Config, override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.report.maps import EXTENT, MIN_POINTS, choose_points, project
from uno.report.predictions import Predictions, predict
from uno.reproduce.results import Results
from uno.runs.directory import read_config_tree
from uno.runs.run import load_trained

COLOURS = 10


@dataclass(frozen=True)
class Group:
    """The dots of one true class."""

    name: str
    kind: str
    colour: int
    path: str
    middle: tuple[int, int]


@dataclass(frozen=True)
class Panel:
    """One map."""

    title: str
    caption: str
    groups: list[Group]


@dataclass(frozen=True)
class Figure:
    """Maps side by side; coordinates are in [0, extent]."""

    title: str
    caption: str
    panels: list[Panel]
    extent: int = EXTENT


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


def _look(place: str) -> tuple[Task, Predictions, int]:
    """What a run's model says of its training rows; and the seed of the drawing."""
    storage = Storage(place)
    config = override(Config(), read_config_tree(storage))
    task = make_task(read_rows(config.data), config.data)
    model, best_head = load_trained(config, storage, len(task.known), task.num_novel)
    import torch

    predictions = predict(config, task, model.eval(), best_head, torch.device("cpu"))
    return task, predictions, config.seed


def _all_classes(name: str, task: Task, found: Predictions, seed: int) -> list[Panel]:
    rows = np.flatnonzero(task.is_train[found.index])
    rows = rows[choose_points(len(rows), seed)]
    logits = np.concatenate([found.known[rows], found.novel[rows].reshape(len(rows), -1)], axis=1)
    spaces = [(f"{name}: shared feature space", found.features[rows]), (f"{name}: logits", logits)]
    return _panels(spaces, task, found, rows, seed)


def _novel_classes(task: Task, found: Predictions, seed: int) -> list[Panel]:
    rows = np.flatnonzero((task.is_train & (task.labels < 0))[found.index])
    rows = rows[choose_points(len(rows), seed)]
    spaces = [
        ("Shared feature space", found.features[rows]),
        ("Cluster-head logits", found.novel[rows].reshape(len(rows), -1)),
    ]
    if found.over.size:
        spaces.append(("Overclustering-head logits", found.over[rows].reshape(len(rows), -1)))
    return _panels(spaces, task, found, rows, seed)


def _panels(
    spaces: list[tuple[str, NDArray[np.float32]]],
    task: Task,
    found: Predictions,
    rows: NDArray[np.int64],
    seed: int,
) -> list[Panel]:
    """One map for each space; rows are positions among the predicted ones."""
    if len(rows) < MIN_POINTS:
        return []
    truth = task.eval_labels[found.index[rows]]
    names, panels = [*task.known, *task.novel], []
    for title, data in spaces:
        with threadpool_limits(1):  # as in uno.report.maps
            how, xy = project(data, seed)
        groups = []
        for index in np.unique(truth[truth >= 0]):
            mine = xy[truth == index]
            path = "".join(f"M{x} {y}h0" for x, y in mine)
            x, y = np.median(mine, axis=0).astype(int).tolist()
            kind = "known" if index < task.num_known else "novel"
            groups.append(Group(names[index], kind, int(index) % COLOURS, path, (x, y)))
        panels.append(Panel(title, f"{len(rows):,} images; {how}.", groups))
    return panels
