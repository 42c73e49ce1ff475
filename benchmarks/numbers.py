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
fitted without the data set of the task. The width of an interval is its upper end minus
its lower end, divided by the true number: 0 for a single number.
"""

import argparse
import csv
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tasks import draws, make_task, read_features
from uno.clustering.kmeans import FREE
from uno.clustering.num_classes import (
    CALIBRATION_FILE,
    NumClasses,
    find_signs,
    fit_model,
)

NUM_DIRECTIONS = 448  # leading directions of the embeddings of a set
NUM_MANY, MIN_MANY, MAX_MANY = 6, 10, 40  # tasks, and their novel classes
MIN_CLASSES = 20  # classes of a set with tasks of many classes
MAX_KNOWN = 30  # of these tasks
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
            is_new = not output.exists()
            with output.open("a", newline="") as stream:
                writer = csv.writer(stream)
                if is_new:
                    writer.writerow(COLUMNS)
                writer.writerow(row)


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
    return {
        "source": "python -m benchmarks.numbers fit benchmarks/results/numbers.csv",
        "sets": sorted({row["set"] for row in rows}),
        "num_tasks": len(rows),
        "model": asdict(fit_model(*arrays(rows))),
    }


def arrays(rows: list[dict[str, Any]]) -> tuple[list[np.ndarray], list[int]]:
    """Return the signs and the true numbers of tasks."""
    return [row["signs"] for row in rows], [row["num_novel"] for row in rows]


def left_out(rows: list[dict[str, Any]]) -> list[NumClasses]:
    """Estimate the number of each task by a model of the other data sets."""
    models = {
        name: fit_model(*arrays([row for row in rows if row["set"] != name]))
        for name in {row["set"] for row in rows}
    }
    return [models[row["set"]](row["signs"]) for row in rows]


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
