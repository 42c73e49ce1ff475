"""What assuming the wrong pile costs: digits whose unlabeled rows hold known classes,
or only new ones.

    python -m benchmarks.piles --seeds 0 1 2

prints one JSON row. ``data mixed``: half of each known digit's training rows have no
label; ``data novel``: none. Each is trained as a pile of both kinds, all with the
preset and the same pretraining a seed, and scored by one matching over the unlabeled
training rows and over the test rows: All, Old, New.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from uno.config import Config, override
from uno.data.decode import decode_many, ok_mask
from uno.data.files import Storage
from uno.data.resident import assemble, eval_sets
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.presets import preset
from uno.results.evaluate import evaluate_run
from uno.runs import DISCOVER, PRETRAIN, run
from uno.train import LocalWorker

DATA = {"mixed": 0.5, "novel": 0.0}
ASSUMED: dict[str, dict[str, Any]] = {
    "mixed": {"data.setting": "gcd"},
    "mixed, uniform prior": {"data.setting": "gcd", "objective.class_prior": "uniform"},
    "novel": {"data.setting": "ncd"},
}
KEYS = {
    **{
        f"train {name}": f"train/unlabeled/gcd/{name}/avg"
        for name in ("all", "old", "new")
    },
    **{
        f"test {name}": f"test/unlabeled/gcd/{name}/avg"
        for name in ("all", "old", "new")
    },
    "train all, best head": "train/unlabeled/gcd/all/best",
    "train novel, task-aware": "train/novel/task_aware/acc/avg",
    "k-means all": "baseline/kmeans/gcd/all",
    "k-means, labels fixed, all": "baseline/constrained_kmeans/gcd/all",
}


def runs(
    seed: int, share: float, epochs: int, only: list[str]
) -> dict[str, dict[str, float]]:
    """The scores of what is assumed, on digits of which ``share`` of the known rows
    has lost its label.
    """
    start = {
        "seed": seed,
        "data.unlabeled_known_fraction": share,
        "compute.device": "cpu",
        "data.loading": "memory",
    }
    start["discover.epochs"] = epochs
    config = override(preset("digits"), start)
    task = make_task(read_rows(config.data), config.data)
    images, reasons = decode_many(task.rows.images, config.data.stored_size, 1)
    sets = (
        assemble(task, images, ok_mask(reasons)),
        eval_sets(task, images, ok_mask(reasons)),
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        first = Storage(f"{folder}/pretrained")
        run.run_phase(
            config, PRETRAIN, sets[0], LocalWorker(torch.device("cpu")), first
        )
        for name in only:
            own = override(config, {**ASSUMED[name], "model.weights": first.uri})
            found[name] = scores(
                own,
                Storage(f"{folder}/{name}"),
                *sets,
                len(task.known) + len(task.novel),
            )
            print(seed, share, name, found[name], file=sys.stderr, flush=True)
    return found


def scores(
    config: Config, storage: Storage, train: Any, truth: Any, num_true: int
) -> dict[str, float]:
    """Train discovery, then score it as a mixed pile, whatever it was taken for."""
    worker, start = LocalWorker(torch.device("cpu")), time.perf_counter()
    run.run_phase(config, DISCOVER, train, worker, storage)
    seconds = time.perf_counter() - start
    scored = override(config, {"data.setting": "gcd"})
    values = evaluate_run(scored, storage, train, truth, num_true, worker)
    return {
        name: round(values[key], 4) for name, key in KEYS.items() if key in values
    } | {"s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=60, help="of discovery")
    parser.add_argument(
        "--assumed", nargs="+", default=list(ASSUMED), choices=list(ASSUMED)
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[int, dict[str, dict[str, float]]]] = {
        name: {} for name in DATA
    }
    for seed in options.seeds:
        for name, share in DATA.items():
            found[name][seed] = runs(seed, share, options.epochs, options.assumed)
    means = {
        data: {
            assumed: {
                key: round(
                    float(np.mean([one[assumed][key] for one in by_seed.values()])), 4
                )
                for key in next(iter(by_seed.values()))[assumed]
            }
            for assumed in options.assumed
        }
        for data, by_seed in found.items()
    }
    row = {
        "question": (
            "what does taking a pile for mixed, or for novel, cost where it is the"
            " other?"
        ),
        "command": "python -m benchmarks.piles " + " ".join(sys.argv[1:]),
        "n": len(options.seeds),
        "means": means,
        "runs": found,
        "load_average_1min": round(os.getloadavg()[0], 1),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {
            name: version(name) for name in ("torch", "numpy", "scikit-learn")
        },
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
