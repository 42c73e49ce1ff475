"""Measure the default for frozen features on many small tasks, and calibrate it.

    uno embed --data parquet:PILES/flowers12 --model.encoder timm:NAME --weights FILE \\
        --workers 0 --output FEATURES/flowers12.parquet      # once for each data set
    python -m benchmarks.tasks run FEATURES/*.parquet --output tasks.csv
    python -m benchmarks.tasks table tasks.csv
    python -m benchmarks.tasks fit tasks.csv                 # uno/expectation.json
    python -m benchmarks.tasks time FEATURES/cub100.parquet --rows 2000

``run`` draws tasks from each set of embeddings with labels: 20 of few known and few
novel classes, 8 with at most three known classes, and, where NAME-known.txt is given by
``--known DIR``, the task of all classes with five seeds. Each task is solved in both
settings (ncd: all unlabeled rows are of novel classes; gcd: half of the rows of known
classes are unlabeled, too), by the default and by three clusterings of the same
features. Tasks that are in the output already are not computed again.

``fit`` writes the calibration of :mod:`uno.expectation` from the tasks of few classes.
``table`` prints means, and how well accuracies are predicted when the data set of the
task is left out of the fit. True labels are read after everything is decided. ``time``
prints the seconds of the default, with its advice to merge, on randomly drawn rows of
which half of the classes are known.
"""

import argparse
import csv
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.measure import append_rows
from uno.clustering.frozen import (
    SPECTRAL,
    Clustering,
    discover_clusters,
    find_correct_rows,
    fit_principal_space,
)
from uno.clustering.kmeans import FREE, constrained_kmeans, kmeans
from uno.clustering.num_classes import pairs_of_one_class
from uno.expectation import (
    CALIBRATION_FILE,
    COUNTED,
    LEVEL,
    Line,
    logit,
    mean_logit,
)

FEW = ((5, 5), (8, 4), (3, 3), (2, 2), (10, 10))  # known and novel classes
FEW_KNOWN = ((1, 3), (1, 5), (2, 4), (3, 5))
NUM_FEW, NUM_FEW_KNOWN, NUM_SEEDS = 20, 8, 5
NUM_STARTS = 10
LINES = (("ncd", "one_to_one"), ("gcd", "one_to_one"), ("gcd", "strict"))
COLUMNS = (
    "set",
    "encoder",
    "kind",
    "task",
    "setting",
    "num_known",
    "num_novel",
    "num_found",
    "num_unlabeled",
    "one_to_one",
    "strict",
    "novel_one_to_one",
    "novel_strict",
    "kmeans",
    "seeded_kmeans",
    "spectral",
    "agreement",
    "seconds",
)


class Task(NamedTuple):
    """A task and its truth, which only :func:`measure` reads.

    ``features`` (N, D) and ``labels`` (N,), classes or FREE; ``truth`` (N,) classes,
    known ones first.
    """

    features: Tensor
    labels: Tensor
    truth: Tensor
    num_known: int
    num_novel: int
    gcd: bool


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("features", nargs="+", type=Path, help="Parquet of uno embed")
    run.add_argument("--known", type=Path, help="folder of NAME-known.txt")
    run.add_argument("--encoder", default="vectors", help="written to the table")
    run.add_argument("--output", type=Path, required=True)
    for name in ("table", "fit"):
        commands.add_parser(name).add_argument("tasks", nargs="+", type=Path)
    timed = commands.add_parser("time")
    timed.add_argument("features", type=Path, help="Parquet of uno embed")
    timed.add_argument("--rows", type=int, required=True)
    given = parser.parse_args()
    if given.command == "time":
        print(json.dumps(measure_time(given.features, given.rows)))
        return
    if given.command == "run":
        torch.set_num_threads(1)
        for file in given.features:
            run_set(file, given.encoder, given.known, given.output)
        return
    rows = [row for file in given.tasks for row in read_tasks(file)]
    if given.command == "table":
        print("\n".join(table(rows)))
    else:
        path = Path("uno") / CALIBRATION_FILE
        path.write_text(json.dumps(fit(rows), indent=1) + "\n", "utf-8")
        print(f"wrote {path}")


def measure_time(file: Path, num_rows: int) -> dict[str, float]:
    """Return the seconds of the default in each setting, on at most ``num_rows``."""
    features, names = read_features(file)
    rows = np.random.default_rng(0).permutation(len(names))[:num_rows]
    features, names = features[torch.from_numpy(rows)], names[rows]
    classes = np.unique(names).tolist()
    seconds = {}
    for setting in ("ncd", "gcd"):
        task = make_task(features, names, classes, len(classes) // 2, setting, 0)
        free, gcd = task.labels == FREE, task.gcd
        rows_of = task.features[~free], task.labels[~free], task.features[free]
        start = time.perf_counter()
        result = discover_clusters(*rows_of, task.num_novel, gcd, 0)
        pairs_of_one_class(result, *rows_of, gcd, 0)
        seconds[setting] = round(time.perf_counter() - start, 2)
    return {"rows": len(names), **seconds}


def read_tasks(file: Path) -> list[dict[str, Any]]:
    """Read the rows of ``run``, with numbers as numbers."""
    if not file.exists():
        return []
    rows = list(csv.DictReader(file.open(newline="")))
    for row in rows:
        for key, value in row.items():
            if key == "agreement":
                row[key] = json.loads(value)
            elif key not in ("set", "encoder", "kind", "setting"):
                row[key] = float(value) if value else None
    return rows


def run_set(file: Path, encoder: str, known: Path | None, output: Path) -> None:
    """Append the tasks of one set to the table."""
    name = file.stem.removeprefix(f"{encoder}-")
    keys = ("set", "encoder", "kind", "task", "setting")
    done = [{key: row[key] for key in keys} for row in read_tasks(output)]
    features, names = read_features(file)
    start = time.perf_counter()
    for kind, number, classes, num_known, seed in draws(name, names, known):
        for setting in ("ncd", "gcd"):
            key = dict(zip(keys, (name, encoder, kind, number, setting), strict=True))
            if key in done:
                continue
            task = make_task(features, names, classes, num_known, setting, number)
            append_rows(output, COLUMNS, [key | measure(task, seed)])
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def read_features(file: Path) -> tuple[Tensor, np.ndarray]:
    """Read embeddings (N, D) and class names (N,) of ``uno embed``."""
    table = pq.read_table(file, columns=["embedding", "label"])
    column = table["embedding"].combine_chunks()
    rows = column.flatten().to_numpy().reshape(len(column), -1).astype(np.float32)
    return torch.from_numpy(rows), np.array(table["label"].to_pylist())


def draws(
    name: str, names: np.ndarray, known: Path | None
) -> Iterator[tuple[str, int, list[str], int, int]]:
    """Yield kind, number, class names (known ones first), C_l and seed of each task."""
    classes = np.unique(names)
    for kind, sizes, count in (
        ("few", FEW, NUM_FEW),
        ("few known", FEW_KNOWN, NUM_FEW_KNOWN),
    ):
        fitting = [size for size in sizes if sum(size) <= len(classes)]
        for number in range(count):
            num_known, num_novel = fitting[number % len(fitting)]
            generator = np.random.default_rng([kind == "few known", number])
            chosen = generator.permutation(classes)[: num_known + num_novel]
            yield kind, number, chosen.tolist(), num_known, 0
    file = known and known / f"{name}-known.txt"
    if file and file.exists():
        own = [line for line in file.read_text().splitlines() if line]
        rest = [c for c in classes.tolist() if c not in own]
        for seed in range(NUM_SEEDS):
            yield "all", seed, [*own, *rest], len(own), seed


def make_task(
    features: Tensor,
    names: np.ndarray,
    classes: list[str],
    num_known: int,
    setting: str,
    seed: int,
) -> Task:
    """Take the rows of ``classes``; half of each known class is unlabeled in gcd."""
    index = {name: i for i, name in enumerate(classes)}
    taken = np.array([name in index for name in names])
    truth = np.array([index[name] for name in names[taken]])
    labels = np.where(truth < num_known, truth, FREE)
    if setting == "gcd":
        generator = np.random.default_rng([seed, 7])
        for label in range(num_known):
            members = generator.permutation(np.flatnonzero(truth == label))
            labels[members[: len(members) // 2]] = FREE
    return Task(
        features[torch.from_numpy(taken)],
        torch.from_numpy(labels),
        torch.from_numpy(truth),
        num_known,
        len(classes) - num_known,
        setting == "gcd",
    )


def measure(task: Task, seed: int) -> dict[str, Any]:
    """Solve a task by the default and by clusterings, and read its truth."""
    features, labels, truth, num_known, num_novel, gcd = task
    free = labels == FREE
    start = time.perf_counter()
    result = discover_clusters(
        features[~free], labels[~free], features[free], num_novel, gcd, seed
    )
    cosines = result.space(features[free]) @ result.prototypes.T
    if not gcd:
        cosines[:, :num_known] = -torch.inf
    outputs = cosines.argmax(dim=1)
    seconds = time.perf_counter() - start
    others = clusterings(task, seed)
    num, truth = num_known + num_novel, truth[free]
    one_to_one = find_correct_rows(truth, outputs, num).double()
    strict = strictly_matched(truth, outputs, num_known).double()
    is_novel = truth >= num_known
    found: dict[str, Any] = {
        "num_known": num_known,
        "num_novel": num_novel,
        "num_found": len(outputs[outputs >= num_known].unique()),
        "num_unlabeled": int(free.sum()),
        "one_to_one": float(one_to_one.mean()),
        "strict": float(strict.mean()),
        "novel_one_to_one": float(one_to_one[is_novel].mean()),
        "novel_strict": float(strict[is_novel].mean()),
    }
    found |= {
        name: float(find_correct_rows(truth, clusters, num).double().mean())
        for name, clusters in others.items()
    }
    found = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
    agreement = json.dumps([round(share, 4) for share in result.agreement.tolist()])
    return found | {"agreement": agreement, "seconds": round(seconds, 2)}


def clusterings(task: Task, seed: int) -> dict[str, Tensor]:
    """Cluster the features as they are, in ways that the default must beat.

    k-means of the unit features; spectral clustering of the neighbor graph; and, in gcd
    only, k-means with the labeled rows fixed to their classes.
    """
    features, labels, _, num_known, num_novel, gcd = task
    free, unit = labels == FREE, F.normalize(features, dim=1)
    num_clusters = num_novel + num_known * gcd
    points = F.normalize(fit_principal_space(features)(features), dim=1)
    graph = Clustering.of(points, labels, num_novel, gcd)
    found = {
        "kmeans": kmeans(unit[free], num_clusters, NUM_STARTS, seed).assignment,
        "spectral": graph.partition(SPECTRAL, num_novel, NUM_STARTS, seed)[free],
    }
    if gcd:
        seeded = constrained_kmeans(unit, labels, num_clusters, NUM_STARTS, seed)
        found["seeded_kmeans"] = seeded.assignment[free]
    return found


def strictly_matched(truth: Tensor, outputs: Tensor, num_known: int) -> Tensor:
    """Tell which rows are right if known clusters stand for the known classes."""
    right = (truth == outputs) & (truth < num_known)
    novel = (truth >= num_known) & (outputs >= num_known)
    if novel.any():
        truth, outputs = truth[novel] - num_known, outputs[novel] - num_known
        right[novel] = find_correct_rows(
            truth, outputs, 1 + int(max(truth.max(), outputs.max()))
        )
    return right


def fit(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the calibration of :mod:`uno.expectation`: lines, ranges and figures."""
    used = [row for row in rows if row["kind"] != "all" and row["agreement"]]
    keys = ("num_unlabeled", "num_known", "num_novel")
    names = {row["encoder"] for row in used}
    lines: dict[str, dict[str, Any]] = {"ncd": {}, "gcd": {}}
    for setting, matching in LINES:
        line = fit_line(*arrays(used, setting, matching))
        lines[setting][matching] = asdict(line)
    return {
        "source": "python -m benchmarks.tasks fit, on benchmarks/results/tasks.csv",
        "sets": sorted({row["set"] for row in used}),
        "num_tasks": len(used),
        "ranges": {
            **{
                name: [int(min(r[key] for r in used)), int(max(r[key] for r in used))]
                for name, key in zip(COUNTED, keys, strict=True)
            },
            "encoders": sorted(
                name if name == "vectors" else f"timm:tf_efficientnet_{name}"
                for name in names
            ),
        },
        "lines": lines,
    }


def fit_line(agreement: np.ndarray, accuracy: np.ndarray, groups: np.ndarray) -> Line:
    """Fit the line from agreements of clusterings to accuracies, by least squares.

    The line maps the mean logit of the agreements to the logit of the accuracy. It is
    fitted on T clustering tasks whose classes are known. Accuracies are kept
    ``SMALLEST`` away from 0 and 1.

    Args:
        agreement: For each task the mean logit of the shares of rows on which other
            clusterings agree with its clusters, of :func:`mean_logit`; (T,).
        accuracy: The true accuracy of each task's clusters, 0 to 1; (T,).
        groups: The name of the data set of each task, (T,). There are at least three
            data sets.

    Returns:
        The line of all tasks. The residual of a task is its difference of logits from a
        line that was fitted without the task's data set, so that the residuals show how
        far a new data set may be off.
    """
    target = logit(accuracy)

    def fit(rows: np.ndarray) -> np.ndarray:
        """Return intercept and slope of the line through the tasks of a mask (T,)."""
        design = np.stack([np.ones(rows.sum()), agreement[rows]], axis=1)
        return np.linalg.lstsq(design, target[rows], rcond=None)[0]

    residuals = np.empty(len(target))
    for name in np.unique(groups):
        own = groups == name
        intercept, slope = fit(~own)
        residuals[own] = target[own] - intercept - slope * agreement[own]
    intercept, slope = fit(np.ones(len(target), dtype=bool))
    low, high = np.quantile(residuals, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    quantiles = np.quantile(residuals, (np.arange(20) + 0.5) / 20)
    return Line(
        float(intercept), float(slope), quantiles.tolist(), float(low), float(high)
    )


def arrays(
    rows: list[dict[str, Any]], setting: str, matching: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean logits of agreement, accuracies and sets of the tasks."""
    own = [row for row in rows if row["setting"] == setting]
    return (
        np.array([mean_logit(row["agreement"]) for row in own]),
        np.array([row[matching] for row in own]),
        np.array([row["set"] for row in own]),
    )


def left_out(
    rows: list[dict[str, Any]], setting: str, matching: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predict each task by a line of the other sets.

    Returns:
        Predictions (T, 3): mean, low and high; the true accuracies (T,) and sets (T,).
    """
    agreement, accuracy, sets = arrays(rows, setting, matching)
    found = np.empty((len(accuracy), 3))
    for name in np.unique(sets):
        own = sets == name
        line: Line = fit_line(agreement[~own], accuracy[~own], sets[~own])
        for i in np.flatnonzero(own):
            expected = line(float(agreement[i]))
            found[i] = expected.mean, expected.low, expected.high
    return found, accuracy, sets


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines that ``table`` prints: accuracies, then predictions."""
    lines = []
    for kind in ("few", "few known", "all"):
        for setting in ("ncd", "gcd"):
            own = [r for r in rows if r["kind"] == kind and r["setting"] == setting]
            lines += [f"\n{kind}, {setting}: accuracy in percent", heading()]
            for encoder, name in sorted({(r["encoder"], r["set"]) for r in own}):
                part = [r for r in own if (r["encoder"], r["set"]) == (encoder, name)]
                lines.append(accuracy_line(f"{encoder} {name}", part))
            names = {(r["encoder"], r["set"]) for r in own}
            if len(names) > 1:
                lines.append(mean_line(own))
    for setting, matching in LINES:
        used = [r for r in rows if r["kind"] != "all" and r["agreement"]]
        own = [r for r in used if r["setting"] == setting]
        found, truth, sets = left_out(used, setting, matching)
        lines.append(f"\nexpected accuracy, {setting}, {matching}, set left out")
        for label, chosen in (
            ("few classes", [r["kind"] == "few" for r in own]),
            *((f"{k} known", [r["num_known"] == k for r in own]) for k in (1, 2, 3)),
        ):
            mask = np.array(chosen)
            lines.append(prediction_line(label, found[mask], truth[mask], sets[mask]))
    return lines


def heading() -> str:
    """Return the head of the table of accuracies."""
    names = ("default", "k-means", "seeded", "spectral", "against best", "found")
    return f"{'':32}" + "".join(f"{name:>13}" for name in names) + f"{'tasks':>7}"


def accuracy_line(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the means of one set."""
    keys = ("one_to_one", "kmeans", "seeded_kmeans", "spectral")
    means = [
        100 * np.mean([r[key] for r in rows]) if rows[0][key] is not None else np.nan
        for key in keys
    ]
    right = sum(r["num_found"] == r["num_novel"] for r in rows)
    cells = "".join(f"{value:13.1f}" for value in means)
    gain = means[0] - np.nanmax(means[1:])
    return f"{name:32}{cells}{gain:+13.1f}{right:>10} of{len(rows):>7}"


def mean_line(rows: list[dict[str, Any]]) -> str:
    """Return the means of all sets, each of the same weight."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["encoder"], row["set"]), []).append(row)
    cells = []
    for key in ("one_to_one", "kmeans", "seeded_kmeans", "spectral"):
        values = [
            np.mean([r[key] for r in own])
            for own in groups.values()
            if own[0][key] is not None
        ]
        cells.append(f"{100 * np.mean(values) if values else np.nan:13.1f}")
    return f"{'mean of sets':32}{''.join(cells)}"


def prediction_line(
    name: str, found: np.ndarray, truth: np.ndarray, sets: np.ndarray
) -> str:
    """Return how well accuracies were predicted."""
    mean, low, high = found.T
    inside = (low - 1e-9 <= truth) & (truth <= high + 1e-9)
    shares = {str(s): inside[sets == s].mean() for s in np.unique(sets)}
    worst = min(shares, key=lambda s: shares[s])
    return (
        f"{name:14} {len(truth):4} tasks: inside {inside.mean():.1%} (least"
        f" {shares[worst]:.0%}, {worst}), rank correlation"
        f" {spearmanr(mean, truth)[0]:.3f}, median error"
        f" {100 * np.median(abs(mean - truth)):.1f}, mean signed error"
        f" {100 * (mean - truth).mean():+.1f}, mean width"
        f" {100 * (high - low).mean():.0f}"
    )


if __name__ == "__main__":
    main()
