"""Does the label-free objective choose well, and what does early stopping cost and
save?

    python -m benchmarks.tune --trials 16 --record DATE_tune-digits

Four steps, each continued where an interrupted benchmark left it: the sweep as a user
runs it (``uno tune`` with ASHA); the same sweep without stopping; then, for this record
only, a real ``uno discover`` with each trial's values, whose true novel accuracy the
sweep never saw; and rank correlations of the two. Prints a row.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from benchmarks.measure import environment
from tune import records, report
from tune.records import Trial
from uno.data.files import Storage

TRUE = {
    "strict, train": "train/novel/task_agnostic_strict/acc/best",
    "strict, train, mean of heads": "train/novel/task_agnostic_strict/acc/avg",
    "task-aware, train": "train/novel/task_aware/acc/best",
}
JUDGE = "strict, train"
PARTS = ("score", "novel_best", "novel_avg", "known_best", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--output", default="runs/bench-tune")
    parser.add_argument("--record", help="directory for README.md and result.json")
    parser.add_argument(
        "--true-seeds", type=int, default=1, help="real runs of each trial's values"
    )
    parser.add_argument(
        "--parallel", type=int, default=2, help="real runs at a time, one thread each"
    )
    parser.add_argument("overrides", nargs="*", help="options of uno tune, after --")
    options = parser.parse_args()
    folder = Path(options.output)
    given = ["--compute.threads", "1", *options.overrides]
    stopping, minutes = sweep(folder / "sweep", options.trials, given)
    whole, minutes_whole = sweep(
        folder / "whole", options.trials, [*given, "--scheduler", "none"]
    )
    true = true_runs(folder, whole.trials, options.true_seeds, options.parallel)
    row = {
        "question": (
            "does the label-free score rank configurations as true novel accuracy does?"
        ),
        "command": "python -m benchmarks.tune " + " ".join(sys.argv[1:]),
        "trials": options.trials,
        "true_seeds": options.true_seeds,
        "minutes": minutes,
        "minutes_without_stopping": minutes_whole,
        **judged(stopping, whole, true),
        **environment(),
    }
    print(json.dumps(row, indent=1))
    if options.record:
        write_record(Path(options.record), row)


def sweep(folder: Path, trials: int, words: list[str]) -> tuple[report.Summary, float]:
    """Run (or continue) a sweep in a process of its own; wall minutes of all
    attempts.
    """
    command = [sys.executable, "-m", "pipelines", "tune", "--trials", str(trials)]
    command += ["--output", str(folder), *words]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    clock = folder.parent / f"{folder.name}.minutes"
    before = float(clock.read_text()) if clock.exists() else 0.0
    minutes = before + (time.perf_counter() - start) / 60
    clock.write_text(str(minutes))
    return report.read(Storage(str(folder))), round(minutes, 2)


def true_runs(
    folder: Path, trials: list[Trial], seeds: int, parallel: int
) -> dict[int, dict[str, float]]:
    """True novel accuracy of every trial's values by real runs: {trial: {metric:
    mean over seeds}}.
    """
    jobs = [(trial, seed) for trial in trials for seed in range(seeds)]
    with ThreadPoolExecutor(parallel) as pool:
        found = list(pool.map(lambda job: true_run(folder, *job), jobs))
    results: dict[int, dict[str, float]] = {}
    for trial in trials:
        own = [
            metrics
            for (other, _), metrics in zip(jobs, found, strict=True)
            if other.index == trial.index
        ]
        results[trial.index] = {
            name: sum(m[name] for m in own) / len(own) for name in TRUE
        }
    return results


def true_run(folder: Path, trial: Trial, seed: int) -> dict[str, float]:
    """One ``uno discover``, or the results of the finished one. A run that diverged
    scores 0.
    """
    output = folder / "true" / f"{trial.index:04d}-seed{seed}"
    values = folder / "true" / f"{trial.index:04d}.yaml"
    values.parent.mkdir(parents=True, exist_ok=True)
    given = report.read(Storage(str(folder / "whole"))).settings["given"]
    values.write_text(yaml.safe_dump({**given, **trial.overrides}))
    command = [
        sys.executable,
        "-m",
        "pipelines",
        "discover",
        "--config",
        str(values),
        "--seed",
        str(seed),
    ]
    command += ["--workers", "0", "--compute.threads", "1", "--output", str(output)]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL)
    if ended.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}")
    metrics = (
        json.loads((output / "metrics.json").read_text())
        if ended.returncode == 0
        else {}
    )
    return {name: round(metrics.get(key, 0.0), 4) for name, key in TRUE.items()}


def judged(
    stopping: report.Summary, whole: report.Summary, true: dict[int, dict[str, float]]
) -> dict[str, Any]:
    """Rank correlations and the choice, from both sweeps and the true accuracies."""
    judge = {index: values[JUDGE] for index, values in true.items()}
    sound = [t for t in whole.trials if t.status == records.FINISHED]
    spearman = {
        f"{part} ~ {name}": correlation(
            [t.epochs[-1][part] for t in sound], [true[t.index][name] for t in sound]
        )
        for part in PARTS
        for name in TRUE
    }
    ranked = records.ranking(stopping.trials)
    best, best_whole = (
        records.best_trial(stopping.trials),
        records.best_trial(whole.trials),
    )
    chosen = None if best is None else best.index
    scores = {t.index: t for t in whole.trials}
    table = [
        {
            "trial": t.index,
            **{key.rpartition(".")[2]: value for key, value in t.overrides.items()},
            "epochs": t.last_epoch,
            "score": round(t.score, 4) if t.epochs else None,
            "status": t.status,
            "score_without_stopping": (
                round(scores[t.index].score, 4) if scores[t.index].epochs else None
            ),
            **{f"true {name}": value for name, value in true[t.index].items()},
        }
        for t in stopping.trials
    ]
    return {
        "epochs_saved_by_stopping": round(stopping.cost["saved"], 4),
        "cpu_seconds": round(stopping.cost["cpu_seconds"]),
        "cpu_seconds_without_stopping": round(whole.cost["cpu_seconds"]),
        "pretrainings": stopping.cost["pretrainings"],
        "chosen": chosen,
        "chosen_without_stopping": None if best_whole is None else best_whole.index,
        "true_of_chosen": None if chosen is None else judge[chosen],
        "true_of_default": judge[0],
        "true_of_worst": min(judge.values()),
        "true_of_best": max(judge.values()),
        "spearman": spearman,
        "spearman_of_the_ranking_with_stopping": correlation(
            [-rank for rank in range(len(ranked))], [judge[t.index] for t in ranked]
        ),
        "table": table,
    }


def correlation(a: list[float], b: list[float]) -> float | None:
    """Spearman's rank correlation; None where it is undefined."""
    if len(a) < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return round(float(stats.spearmanr(a, b).statistic), 3)


def write_record(folder: Path, row: dict[str, Any]) -> None:
    """``result.json`` and its table as ``README.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(row, indent=1) + "\n")
    heads = list(row["table"][0])
    ordered = sorted(row["table"], key=lambda r: -(r["score_without_stopping"] or -1))
    lines = [
        f"# Sweep of {row['trials']} trials on the digits",
        "",
        row["question"].capitalize(),
        "",
        f"    {row['command']}",
        "",
        (
            f"- {row['hardware']}, torch {row['torch']}; {row['minutes']} minutes with"
            f" stopping, {row['minutes_without_stopping']} without."
        ),
        (
            f"- Stopping saved {100 * row['epochs_saved_by_stopping']:.0f}% of the"
            f" epochs; it chose trial {row['chosen']}, without stopping"
            f" {row['chosen_without_stopping']}."
        ),
        (
            f"- True novel accuracy ({JUDGE}): chosen {row['true_of_chosen']}, default"
            f" {row['true_of_default']}, worst {row['true_of_worst']}, best"
            f" {row['true_of_best']}; n = {row['true_seeds']} run each."
        ),
        (
            "- Spearman of the label-free score with it:"
            f" {row['spearman'][f'score ~ {JUDGE}']}; of the ranking with stopping:"
            f" {row['spearman_of_the_ranking_with_stopping']}."
        ),
        f"- {row['pretrainings']} pretrainings for all trials.",
        "",
        "The sweep never saw the columns that begin with `true`.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *(
            "| " + " | ".join(str(entry[head]) for head in heads) + " |"
            for entry in ordered
        ),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
