"""Measure the accuracy of ``uno discover`` over seeds, as rows of a table.

    python -m benchmarks.accuracy --name "digits (5 / 5)" --output runs/digits -- --preset digits
    python -m benchmarks.accuracy --name Caltech-24 --output runs/photos -- --data folder:DIR \\
        --known-classes FILE --model.encoder timm:NAME --weights FILE [--method uno]
    python -m benchmarks.accuracy --name pbmc68k --output runs/cells -- --data vectors:FILE --known-classes FILE

runs ``uno discover`` with the options after ``--`` once for each seed, without Ray, and
adds the means to ``--table``, a file with the columns of
``docs/results/data/accuracy.csv``. Finished runs are read, not repeated: the same
command continues. Accuracies are those of the last epoch in percent, on average over
the heads (``avg``) and for the head with the lowest training loss (``best``).
"""  # noqa: E501

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import append_rows
from uno.runs.hardware import describe_hardware

COLUMNS = (
    "dataset",
    "setting",
    "method",
    "metric",
    "mean",
    "sd",
    "n",
    "minutes",
    "hardware",
    "commit",
    "date",
    "command",
)
MEASURED = (
    *(
        f"{split}/{group}/{protocol}/acc/{heads}"
        for split in ("train", "test")
        for group in ("known", "novel", "all")
        for protocol in ("task_aware", "task_agnostic_strict")
        for heads in ("avg", "best")
    ),
    *(
        f"{split}/unlabeled/gcd/{group}/{heads}"
        for split in ("train", "test")
        for group in ("all", "old", "new")
        for heads in ("avg", "best")
    ),
    "train/novel/task_aware/chance/acc",
    "baseline/kmeans/novel/acc",
    "baseline/kmeans/gcd/all",
    "baseline/constrained_kmeans/gcd/all",
    "baseline/spectral/novel/acc",
    "baseline/spectral/gcd/all",
)
"""Keys of metrics.json; a run has those that fit its setting and its method."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="of the data set, in the table")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--table", type=Path, help="default: accuracy.csv in --output")
    parser.add_argument("options", nargs="*", help="options of uno discover, after --")
    given = parser.parse_args()
    minutes = [
        discover(given.output / f"seed{seed}", seed, given.options)
        for seed in range(given.seeds)
    ]
    runs = [given.output / f"seed{seed}" for seed in range(given.seeds)]
    config = yaml.safe_load((runs[0] / "config.yaml").read_text())
    measured = [value for value in minutes if value is not None]
    common = {
        "dataset": given.name,
        "setting": config["data"]["setting"],
        "method": config["method"],
        "minutes": round(statistics.mean(measured), 1) if measured else "",
        "hardware": describe_hardware(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": "python -m benchmarks.accuracy " + " ".join(sys.argv[1:]),
    }
    rows = means([json.loads((run / "metrics.json").read_text()) for run in runs])
    table = given.table or given.output / "accuracy.csv"
    append_rows(table, COLUMNS, [common | row for row in rows])
    print(f"added {len(rows)} rows to {table}")


def discover(folder: Path, seed: int, options: list[str]) -> float | None:
    """Run ``uno discover`` with a seed.

    Returns:
        The minutes that it took; None if the run was finished before.
    """
    if (folder / "metrics.json").exists():
        return None
    command = [sys.executable, "-m", "pipelines", "discover", "--workers", "0"]
    command += ["--seed", str(seed), "--output", str(folder), *options]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    return (time.perf_counter() - start) / 60


def means(runs: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return mean, standard deviation (n - 1) and n of each metric, in percent."""
    rows = []
    for key in MEASURED:
        values = [100 * run[key] for run in runs if key in run]
        if values:
            sd = round(statistics.stdev(values), 1) if len(values) > 1 else ""
            mean = round(statistics.mean(values), 1)
            rows.append({"metric": key, "mean": mean, "sd": sd, "n": len(values)})
    return rows


def commit() -> str:
    """Return the short name of the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
