"""How well classes are found in vectors that other programs made.

    python -m benchmarks.vectors --data ../shared/data/vectors/pbmc68k.parquet
        --known ../shared/data/vectors/pbmc68k-known.txt --seeds 0 1 2 [--hidden 3] [--set KEY=VALUE ...]

prints one JSON row a task: mean, standard deviation and number of runs. ncd: unlabeled
rows are of new classes; gcd: half of each known class's rows have no label, too.
``--hidden F``: to choose settings, on known classes alone, of which every F-th is
hidden in turn; the others' rows are not there.
"""  # noqa: E501

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch
import yaml

from uno.config import Config, override
from uno.data.decode import ok_mask
from uno.data.files import Storage
from uno.data.resident import assemble, eval_sets
from uno.results.evaluate import evaluate_run
from uno.runs import DISCOVER, run
from uno.session.data import load_features
from uno.session.resolve import resolve
from uno.session.settings import completed
from uno.train import LocalWorker
from uno.weights import PRETRAINED_FILE, fetch_pretrained

TASKS = {"ncd": 0.0, "gcd": 0.5}
KEYS = {
    "ncd": {
        "novel": "train/novel/task_aware/acc/avg",
        "k-means": "baseline/kmeans/novel/acc",
    },
    "gcd": {
        **{name: f"train/unlabeled/gcd/{name}/avg" for name in ("all", "old", "new")},
        "k-means all": "baseline/kmeans/gcd/all",
        "fixed labels all": "baseline/constrained_kmeans/gcd/all",
    },
}


def score(given: dict[str, Any]) -> dict[str, float]:
    """All metrics of a run with ``given`` keys."""
    config, _, task = resolve(
        override(Config(), completed({**given, "compute.device": "cpu"}, None)), given
    )
    assert task is not None
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage(folder)
        storage.write(PRETRAINED_FILE, fetch_pretrained(config.model.encoder))
        features, reasons = load_features(config, task, storage, lambda metrics: None)
        ok = ok_mask(reasons)
        train, truth = assemble(task, features, ok), eval_sets(task, features, ok)
        worker = LocalWorker(torch.device("cpu"))
        run.run_phase(config, DISCOVER, train, worker, storage)
        return evaluate_run(
            config, storage, train, truth, len(task.known) + len(task.novel), worker
        )


def known_alone(
    data: str, known: list[str], hidden: int, folder: str
) -> Iterator[dict[str, str]]:
    """The rows of known classes in ``folder``, and every ``hidden``-th of these
    classes hidden in turn.
    """
    table = pq.read_table(data)
    pq.write_table(
        table.filter(pa.compute.is_in(table["label"], pa.array(known))),
        f"{folder}/rows.parquet",
    )
    for first in range(hidden):
        left = [name for i, name in enumerate(known) if i % hidden != first]
        Path(f"{folder}/{first}.txt").write_text("\n".join(left))
        yield {
            "data.source": f"vectors:{folder}/rows.parquet",
            "data.known_classes": f"{folder}/{first}.txt",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--known", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=[*TASKS])
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--set", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    more = {
        key: yaml.safe_load(value)
        for key, value in (pair.split("=") for pair in args.set)
    }
    known = sorted(filter(None, Path(args.known).read_text().split("\n")))
    with tempfile.TemporaryDirectory() as folder:
        sets = [
            {"data.source": f"vectors:{args.data}", "data.known_classes": args.known}
        ]
        if args.hidden:
            sets = [*known_alone(args.data, known, args.hidden, folder)]
        found: dict[str, list[dict[str, float]]] = {task: [] for task in args.tasks}
        for seed, (task, runs), one in product(args.seeds, found.items(), sets):
            start = time.perf_counter()
            values = score(
                {
                    "data.unlabeled_known_fraction": TASKS[task],
                    **more,
                    **one,
                    "seed": seed,
                }
            )
            own = {
                name: round(100 * values[key], 1) for name, key in KEYS[task].items()
            }
            runs.append(own | {"seconds": round(time.perf_counter() - start)})
            print(seed, task, runs[-1], file=sys.stderr, flush=True)
    for task, runs in found.items():
        row: dict[str, Any] = {
            "data": Path(args.data).stem,
            "task": task,
            "set": more,
            "hidden": args.hidden,
        }
        for name in runs[0]:
            numbers = [one[name] for one in runs]
            row[name] = [
                round(float(np.mean(numbers)), 1),
                round(float(np.std(numbers)), 1),
                len(numbers),
            ]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
