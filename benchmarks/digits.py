"""How accurate is the digits preset, over seeds?

    python -m benchmarks.digits --seeds 5 --output runs/bench-digits

runs ``uno discover --preset digits --workers 0 --seed S`` once per seed (finished runs
are read, not repeated) and prints one JSON row: every accuracy with mean, standard
deviation and raw values; last epoch, best head by training loss, k-means beside it.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import environment, over_seeds

REPORTED = {
    "novel, task-aware, train": "train/novel/task_aware/acc/best",
    "novel, task-aware, train, mean of heads": "train/novel/task_aware/acc/avg",
    "known, task-aware, test": "test/known/task_aware/acc/best",
    "novel, task-aware, test": "test/novel/task_aware/acc/best",
    "novel, task-agnostic strict, train": "train/novel/task_agnostic_strict/acc/best",
    "novel, task-agnostic strict, test": "test/novel/task_agnostic_strict/acc/best",
    "all, task-agnostic strict, test": "test/all/task_agnostic_strict/acc/best",
    "k-means on pretrained features": "baseline/kmeans/novel/acc",
    "k-means on pixels": "baseline/kmeans_pixels/novel/acc",
    "chance": "train/novel/task_aware/chance/acc",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", default="runs/bench-digits")
    parser.add_argument(
        "overrides", nargs="*", help="options of uno discover, after --"
    )
    options = parser.parse_args()
    runs, minutes = [], []
    for seed in range(options.seeds):
        folder = Path(options.output) / f"seed{seed}"
        command = [
            sys.executable,
            "-m",
            "pipelines",
            "discover",
            "--preset",
            "digits",
            "--workers",
            "0",
        ]
        command += ["--seed", str(seed), "--output", str(folder), *options.overrides]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=sys.stderr)
        minutes.append(round((time.perf_counter() - start) / 60, 2))
        runs.append(json.loads((folder / "metrics.json").read_text()))
    row = {
        "question": "accuracy of the digits preset over seeds",
        "command": "python -m benchmarks.digits " + " ".join(sys.argv[1:]),
        "n": options.seeds,
        "overrides": options.overrides,
        "results": over_seeds(runs, REPORTED),
        "minutes": minutes,
        **environment(runs=Path(options.output).glob("seed*")),
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
