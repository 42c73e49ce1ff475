"""Measure the estimate of the number of novel classes on small tasks, and calibrate it.

    python -m benchmarks.numbers run FEATURES/*.parquet --output numbers.csv
    python -m benchmarks.numbers table numbers.csv
    python -m benchmarks.numbers fit numbers.csv

The last command writes ``uno/clustering/num_classes.json``.

``run`` takes the embeddings and the tasks of few classes of :mod:`benchmarks.tasks`,
and of sets with at least 20 classes 6 tasks with 10 to 40 novel classes. It writes the
signs of each task (:func:`uno.clustering.num_classes.signs_of`). The embeddings of a
set are reduced to their leading directions first, so that a task takes a second. Tasks
that are in the output already are not computed again.

``table`` prints how often the true number is in the interval, by a model that was
fitted to the tasks of few classes of the other data sets. The width of an interval is
its upper end minus its lower end, divided by the true number: 0 for a single number.
``fit`` takes the tasks of few classes, too. The level of the intervals is the least one
at which they hold 85 % of these tasks in each setting.
"""

import argparse
import csv
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from benchmarks.measure import append_rows
from benchmarks.tasks import draws, make_task, read_features
from uno.clustering.kmeans import FREE
from uno.clustering.num_classes import (
    CALIBRATION_FILE,
    MIN_NOVEL,
    Model,
    NumClasses,
    find_signs,
)

NUM_DIRECTIONS = 448  # leading directions of the embeddings of a set
NUM_MANY, MIN_MANY, MAX_MANY = 6, 10, 40  # tasks, and their novel classes
MIN_CLASSES = 20  # classes of a set with tasks of many classes
MAX_KNOWN = 30  # of these tasks
TARGET = 0.85  # share of the tasks of few classes that the intervals hold
MARGIN = 0.01  # more than that share is asked of the tasks that choose the level
RIDGE = 3.0  # penalty of the squared weights of standardized signs
MAX_SIGNS = 60  # numbers of classes whose signs are written
COLUMNS = (
    "set",
    "kind",
    "task",
    "setting",
    "num_known",
    "num_novel",
    "num_unlabeled",
    "seconds",
    "signs",
)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("features", nargs="+", type=Path, help="Parquet of uno embed")
    run.add_argument("--output", type=Path, required=True)
    for name in ("table", "fit"):
        commands.add_parser(name).add_argument("tasks", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        torch.set_num_threads(1)
        for file in given.features:
            run_set(file, given.output)
    elif given.command == "table":
        print("\n".join(table(read_tasks(given.tasks))))
    else:
        path = Path("uno/clustering") / CALIBRATION_FILE
        found = json.dumps(fit(read_tasks(given.tasks)), indent=1)
        path.write_text(found + "\n", "utf-8")
        print(f"wrote {path}")


def read_tasks(file: Path) -> list[dict[str, Any]]:
    """Read the rows of ``run``: numbers are int, ``signs`` an array (K, S)."""
    if not file.exists():
        return []
    rows: list[dict[str, Any]] = list(csv.DictReader(file.open(newline="")))
    for row in rows:
        row |= {key: int(row[key]) for key in ("task", "num_known", "num_novel")}
        row["signs"] = np.array(json.loads(row["signs"]))
    return rows


def run_set(file: Path, output: Path) -> None:
    """Append the tasks of one set to the table."""
    name = file.stem.removeprefix("lite0-")
    keys = ("set", "kind", "task", "setting")
    done = {tuple(row[key] for key in keys) for row in read_tasks(output)}
    features, names = read_features(file)
    features = leading_directions(features)
    for kind, number, classes, num_known in tasks_of(name, names):
        for setting in ("ncd", "gcd"):
            if (name, kind, number, setting) in done:
                continue
            task = make_task(features, names, classes, num_known, setting, number)
            free, start = task.labels == FREE, time.process_time()
            signs = find_signs(
                task.features[~free],
                task.labels[~free],
                task.features[free],
                task.gcd,
                seed=0,
            )
            seconds = round(time.process_time() - start, 2)
            shown = json.dumps(signs[:MAX_SIGNS].round(3).tolist())
            sizes = (num_known, task.num_novel, int(free.sum()))
            row = (name, kind, number, setting, *sizes, seconds, shown)
            append_rows(output, COLUMNS, [dict(zip(COLUMNS, row, strict=True))])


def leading_directions(features: Tensor) -> Tensor:
    """Project unit features (N, D) on at most ``NUM_DIRECTIONS`` leading directions."""
    if features.shape[1] <= NUM_DIRECTIONS:
        return features
    unit = F.normalize(features, dim=1)
    directions = torch.linalg.eigh(unit.T.double() @ unit.double()).eigenvectors
    return unit @ directions[:, -NUM_DIRECTIONS:].float()


def tasks_of(name: str, names: np.ndarray) -> Iterator[tuple[str, int, list[str], int]]:
    """Yield kind, number, class names (known ones first) and C_l of each task."""
    for kind, number, chosen, num_known, _ in draws(name, names, None):
        if kind == "few":
            yield kind, number, chosen, num_known
    classes = np.unique(names)
    if len(classes) < MIN_CLASSES:
        return
    generator = np.random.default_rng(5)
    largest = min(MAX_MANY, len(classes) * 2 // 3)
    for number in range(NUM_MANY):
        exponent = generator.uniform(np.log(MIN_MANY), np.log(largest))
        num_novel = round(float(np.exp(exponent)))
        most = min(MAX_KNOWN, len(classes) - num_novel)
        num_known = int(generator.integers(4, most + 1))
        chosen = generator.permutation(classes)[: num_known + num_novel].tolist()
        yield "many", number, chosen, num_known


def fit(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the calibration of :mod:`uno.clustering.num_classes`."""
    few = few_classes(rows)
    model = fit_tasks(few)
    return {
        "source": "python -m benchmarks.numbers fit benchmarks/results/numbers.csv",
        "sets": sorted({row["set"] for row in few}),
        "num_tasks": len(few),
        "num_novel": [choose(row["num_novel"] for row in few) for choose in (min, max)],
        "weights": model.weights,
        "intercept": model.intercept,
        "levels": find_levels(few, left_out_models(few)),
    }


def few_classes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tasks of few classes, to which models are fitted."""
    return [row for row in rows if row["kind"] == "few"]


def fit_tasks(rows: list[dict[str, Any]]) -> Model:
    """Fit the model to the signs and the true numbers of tasks."""
    signs, truth = zip(*((row["signs"], row["num_novel"]) for row in rows), strict=True)
    return fit_model(signs, truth, TARGET)


def fit_model(
    signs: Sequence[NDArray[np.float64]], truth: Sequence[int], level: float
) -> Model:
    """Fit the model to tasks whose number of novel classes is known.

    Each number from 2 to the true one is an example: the true number is one of "there
    are no more classes", and the smaller ones are examples of "there are more". The
    squared weights of standardized signs have a penalty of ``RIDGE``.

    Args:
        signs: The signs (K, S) of each task (T,).
        truth: The true numbers (T,) of novel classes, at least 2.
        level: The level of the model's intervals.
    """
    pairs = list(zip(signs, truth, strict=True))
    design = np.concatenate([own[: number - MIN_NOVEL + 1] for own, number in pairs])
    target = np.concatenate(
        [
            np.arange(MIN_NOVEL, number + 1)[: len(own)] == number
            for own, number in pairs
        ]
    ).astype(float)
    mean, scale = design.mean(axis=0), design.std(axis=0) + 1e-9
    standard = np.column_stack([(design - mean) / scale, np.ones(len(design))])

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logits, free = standard @ weights, np.append(weights[:-1], 0.0)
        value = np.logaddexp(0, logits).sum() - target @ logits
        gradient = standard.T @ (1 / (1 + np.exp(-logits)) - target)
        return value + RIDGE * (free @ free) / 2, gradient + RIDGE * free

    found = minimize(loss, np.zeros(standard.shape[1]), jac=True).x
    weights = found[:-1] / scale
    return Model(weights.tolist(), float(found[-1] - weights @ mean), level)


def left_out_models(rows: list[dict[str, Any]]) -> dict[str, Model]:
    """Fit a model for each data set, to the tasks of few classes of the others."""
    few = few_classes(rows)
    names = {row["set"] for row in rows}
    return {
        name: fit_tasks([row for row in few if row["set"] != name]) for name in names
    }


def find_levels(
    rows: list[dict[str, Any]], models: dict[str, Model]
) -> dict[str, float]:
    """Find for each setting the least level of intervals that hold enough tasks.

    Args:
        rows: The tasks of few classes.
        models: The model for each data set.

    Returns:
        "ncd" and "gcd" -> the level, in hundredths, at which at least ``TARGET`` and
        ``MARGIN`` of the tasks have their true number in the interval.
    """
    levels = {}
    for setting in ("ncd", "gcd"):
        own = [row for row in rows if row["setting"] == setting]
        for level in np.arange(0.51, 1, 0.01).round(2).tolist():
            found = [
                replace(models[row["set"]], level=level)(row["signs"]) for row in own
            ]
            inside = [
                one.low <= row["num_novel"] <= one.high
                for one, row in zip(found, own, strict=True)
            ]
            levels[setting] = level
            if np.mean(inside) >= TARGET + MARGIN:
                break
    return levels


def left_out(rows: list[dict[str, Any]]) -> list[NumClasses]:
    """Estimate the number of each task by a model and level of the other data sets."""
    models, few = left_out_models(rows), few_classes(rows)
    levels = {
        name: find_levels([row for row in few if row["set"] != name], models)
        for name in models
    }
    return [
        replace(models[row["set"]], level=levels[row["set"]][row["setting"]])(
            row["signs"]
        )
        for row in rows
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines that ``table`` prints, by kind, setting and set."""
    found = left_out(rows)
    lines = ["| tasks | setting | set | number | inside | width | exact | error |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for kind in ("few", "many"):
        for setting in ("ncd", "gcd"):
            own = [
                (row, one)
                for row, one in zip(rows, found, strict=True)
                if (row["kind"], row["setting"]) == (kind, setting)
            ]
            for name in [*sorted({row["set"] for row, _ in own}), "all"]:
                part = [pair for pair in own if name in (pair[0]["set"], "all")]
                if part:
                    lines.append(f"| {kind} | {setting} | {name} | {figures(part)} |")
    return lines


def figures(pairs: list[tuple[dict[str, Any], NumClasses]]) -> str:
    """Return the figures of tasks: number, inside, width, exact and mean error.

    Shares are in percent. Width and error are divided by the true number.
    """
    truth = np.array([row["num_novel"] for row, _ in pairs])
    low, high, middle = np.array([(e.low, e.high, e.num_novel) for _, e in pairs]).T
    inside = 100 * ((low <= truth) & (truth <= high)).mean()
    exact = 100 * (middle == truth).mean()
    width = ((high - low) / truth).mean()
    error = (abs(middle - truth) / truth).mean()
    return f"{len(pairs)} | {inside:.0f} | {width:.2f} | {exact:.0f} | {error:.2f}"


if __name__ == "__main__":
    main()
