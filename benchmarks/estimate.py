"""Does the interval of ``uno estimate-classes`` contain the true number of novel
classes of the digits?

    python -m benchmarks.estimate --seeds 0 1 2 3 4 --novel 3 --workers 1 2

prints one JSON row. Each seed is a task of its own: it shuffles the ten digits, the
last ``--novel`` of them are unlabeled, the others known; the estimator holds out four
of them as probes, pretrains on the rest (with 7 known classes: on 3; 2 of the 4 probes
are anchors, 2 are validation). Every worker count starts from an empty directory; 0 is
this process without Ray. Truth is looked at only here, after the estimate.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np

from pipelines import ray_env
from uno.config import override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.presets import preset
from uno.results.estimate import Settings
from uno.session.backend import choose_backend
from uno.session.console import suppress_output
from uno.session.run import Run


def classes_of(seed: int, num_novel: int) -> tuple[list[int], list[int]]:
    """(known, novel) digits of a task."""
    order = np.random.default_rng(seed).permutation(10)
    return sorted(order[:-num_novel].tolist()), sorted(order[-num_novel:].tolist())


def run(
    seed: int, num_novel: int, workers: int, settings: Settings
) -> tuple[dict[str, Any], float]:
    """(estimate, seconds) of one task, from an empty directory."""
    known, _ = classes_of(seed, num_novel)
    values = {
        "data.known_classes": ",".join(map(str, known)),
        "data.num_novel": 1,
        "seed": seed,
    }
    config = override(
        preset("digits"),
        {**values, "compute.num_workers": workers, "compute.device": "cpu"},
    )
    task = make_task(read_rows(config.data), config.data)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        opened = Run(config, Storage(folder), choose_backend(config), opened=task)
        with suppress_output():
            found = opened.backend.estimate(opened, settings)
        return asdict(found), time.perf_counter() - start


def summary(seed: int, num_novel: int, found: dict[str, Any]) -> dict[str, Any]:
    """What the record's table shows of one task, with its curves."""
    known, novel = classes_of(seed, num_novel)
    low, high = found["low"], found["high"]
    kept = (
        "num_novel",
        "low",
        "high",
        "suggested",
        "dtc",
        "ks",
        "curves",
        "sizes",
        "splits",
    )
    return {
        "seed": seed,
        "known": known,
        "novel": novel,
        "contains_truth": low <= num_novel <= high,
        "width": high - low,
        **{key: found[key] for key in kept},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--novel", type=int, default=3, help="digits that are unlabeled"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--num-splits", type=int, default=3)
    options = parser.parse_args()
    settings = Settings(num_splits=options.num_splits)

    estimates: dict[int, list[dict[str, Any]]] = {}
    seconds: dict[str, list[float]] = {}
    for workers in options.workers:
        runs = []
        if workers:
            with ray_env.connect():
                for seed in options.seeds:
                    runs.append(run(seed, options.novel, workers, settings))
        else:
            runs = [run(seed, options.novel, 0, settings) for seed in options.seeds]
        estimates[workers] = [found for found, _ in runs]
        seconds[str(workers)] = [round(elapsed, 1) for _, elapsed in runs]
        print(
            f"{workers} workers: {seconds[str(workers)]}", file=sys.stderr, flush=True
        )
    found = estimates[options.workers[0]]
    tasks = [
        summary(seed, options.novel, one)
        for seed, one in zip(options.seeds, found, strict=True)
    ]
    row = {
        "question": "does the interval contain the true number of novel digits?",
        "command": "python -m benchmarks.estimate " + " ".join(sys.argv[1:]),
        "n": len(tasks),
        "truth": options.novel,
        "num_contained": sum(task["contains_truth"] for task in tasks),
        "max_width": max(task["width"] for task in tasks),
        "intervals": [[task["low"], task["high"]] for task in tasks],
        "points": [task["num_novel"] for task in tasks],
        "plain_dtc": [task["dtc"]["num_novel"] for task in tasks],
        "same_for_all_workers": all(other == found for other in estimates.values()),
        "seconds": seconds,
        "total_s": {
            workers: round(sum(times), 1) for workers, times in seconds.items()
        },
        "settings": asdict(settings),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {
            name: version(name) for name in ("torch", "numpy", "scikit-learn", "ray")
        },
        "tasks": tasks,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
