"""How accurate and how quick is the preset ``photos`` on photographs, over seeds?

    python -m benchmarks.photos --seeds 5 --output runs/bench-photos -- --data DIR --known-classes FILE \
        --model.encoder timm:NAME --weights FILE

runs ``uno discover --preset photos --method uno --seed S OPTIONS`` once per seed, with
features that the first run caches, and prints one JSON row: every accuracy with mean,
standard deviation and raw values (last epoch, nothing chosen by accuracy, k-means on
the same features beside it), minutes from the command to report.html, CPU minutes, and
the largest resident memory.
"""  # noqa: E501

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import environment, over_seeds

REPORTED = {
    "novel, task-aware, train": "train/novel/task_aware/acc/best",
    "novel, task-aware, train, mean of heads": "train/novel/task_aware/acc/avg",
    "novel, strict, train": "train/novel/task_agnostic_strict/acc/best",
    "novel, strict, train, mean of heads": "train/novel/task_agnostic_strict/acc/avg",
    "known, task-aware, test": "test/known/task_aware/acc/best",
    "known, among all classes, test": "test/known/task_agnostic_strict/acc/best",
    "novel, task-aware, test": "test/novel/task_aware/acc/best",
    "k-means on the same features": "baseline/kmeans/novel/acc",
    **{
        f"{name}, unlabeled rows": f"train/unlabeled/gcd/{name.lower()}/best"
        for name in ("All", "Old", "New")
    },
    **{
        f"{name}, unlabeled rows, mean of heads": (
            f"train/unlabeled/gcd/{name.lower()}/avg"
        )
        for name in ("All", "Old", "New")
    },
    **{
        f"{name}, test rows": f"test/unlabeled/gcd/{name.lower()}/best"
        for name in ("All", "Old", "New")
    },
    **{
        f"k-means, {name}": f"baseline/kmeans/gcd/{name.lower()}"
        for name in ("All", "Old", "New")
    },
    **{
        f"k-means with labeled rows fixed, {name}": (
            f"baseline/constrained_kmeans/gcd/{name.lower()}"
        )
        for name in ("All", "Old", "New")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", default="runs/bench-photos")
    parser.add_argument("options", nargs="*", help="options of uno discover, after --")
    given = parser.parse_args()
    runs, minutes, cpu_minutes = [], [], []
    cache = {**os.environ, "UNO_CACHE": str(Path(given.output).absolute() / "cache")}
    for seed in range(given.seeds):
        folder = Path(given.output) / f"seed{seed}"
        command = [
            sys.executable,
            "-m",
            "pipelines",
            "discover",
            "--preset",
            "photos",
            "--seed",
            str(seed),
        ]
        command += ["--method", "uno"]
        before, start = (
            resource.getrusage(resource.RUSAGE_CHILDREN),
            time.perf_counter(),
        )
        subprocess.run(
            [*command, "--output", str(folder), *given.options],
            check=True,
            stdout=sys.stderr,
            env=cache,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        minutes.append(round((time.perf_counter() - start) / 60, 2))
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cpu_minutes.append(round(spent / 60, 2))
        runs.append(json.loads((folder / "metrics.json").read_text()))
    row = {
        "question": "accuracy and time of the preset photos over seeds",
        "command": "python -m benchmarks.photos " + " ".join(sys.argv[1:]),
        "n": given.seeds,
        "results": over_seeds(runs, REPORTED),
        "minutes": minutes,
        "cpu_minutes": cpu_minutes,
        "max_resident_gb": round(
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, 2
        ),
        **environment(runs=Path(given.output).glob("seed*")),
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
