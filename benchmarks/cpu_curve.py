"""Accuracy on novel classes against minutes, of runs that kept their checkpoints: JSON
and a drawing.

    uno reproduce sota --preset cifar10 --recipe cpu ... --train.keep-checkpoints 100 --output OUT
    python -m benchmarks.cpu_curve OUT/cells/*-seed? --svg curve.svg

Task-aware, the head with the lowest loss, on 5,000 of the unlabeled training images, in
percent; minutes are those of the steps of both phases, as the journal has them. Truth
is for this curve alone, after training.
"""  # noqa: E501

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.held_out import accuracy
from benchmarks.measure import environment
from benchmarks.pairs import read_run
from uno.data.files import Storage
from uno.model import forward
from uno.report.charts import Chart, Series, line_chart
from uno.runs import DISCOVER, PRETRAIN
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.journal import read_journal
from uno.runs.run import load_trained

ROWS = 5_000
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def minutes_of(storage: Storage, phase: str, rows: int) -> dict[int, float]:
    """Minutes that training has taken after each step with a line in the journal."""
    step, minutes, found = 0, 0.0, dict[int, float]()
    for line in read_journal(storage):
        if line["phase"] == phase and "images_per_s" in line:
            minutes += (line["step"] - step) * rows / line["images_per_s"] / 60
            step = line["step"]
            found[step] = minutes
    return found


@torch.no_grad()
def curve_of(run: Path) -> dict[str, Any]:
    """k-means on the pretrained features, and [epoch, minutes since the start,
    accuracy] of a run.
    """
    storage, config, task, sets = read_run(run)
    rows = sets["train"]
    rows = rows.where(rows.truth >= task.num_known)
    few = torch.zeros(len(rows.truth), dtype=torch.bool)
    few[torch.randperm(len(few), generator=torch.Generator().manual_seed(0))[:ROWS]] = (
        True
    )
    rows, size = rows.where(few), config.train.batch_size
    before = max(
        minutes_of(Storage(str(config.model.weights)), PRETRAIN, size).values()
    )
    minutes, points = minutes_of(storage, DISCOVER, size), []
    # ends of epochs
    steps = [step for step in checkpoint_steps(storage, DISCOVER) if step in minutes]
    for step in steps:
        model, best = load_trained(
            config, storage, task.num_known, task.num_novel, step
        )
        novel = forward(model, rows.images[:], config).novel
        assert novel is not None
        found = accuracy(rows.truth - task.num_known, novel[0, best].argmax(dim=-1))
        epoch = config.discover.epochs * step / steps[-1]
        points.append([round(epoch, 1), round(before + minutes[step], 2), found])
    metrics = json.loads(storage.read("metrics.json"))
    kmeans = round(100 * metrics["baseline/kmeans/novel/acc"], 1)
    return {"pretrain_minutes": round(before, 2), "kmeans": kmeans, "curve": points}


def drawing(chart: Chart) -> str:
    """A chart as an SVG file."""
    text = 'font-family="sans-serif" font-size="11" fill="#444"'
    parts = [f'<text x="0" y="-8" {text}>{chart.title}</text>']
    for y, label in chart.y_ticks:
        parts.append(f'<path d="M0 {y}H{chart.width}" stroke="#ddd"/>')
        parts.append(
            f'<text x="-6" y="{y + 4}" text-anchor="end" {text}>{label}</text>'
        )
    below = chart.height + 16
    parts += [
        f'<text x="{x}" y="{below}" text-anchor="middle" {text}>{label}</text>'
        for x, label in chart.x_ticks
    ]
    parts.append(
        f'<text x="{chart.width}" y="{below + 16}" text-anchor="end"'
        f" {text}>{chart.x_label}</text>"
    )
    for i, line in enumerate(chart.lines):
        color = COLORS[i % len(COLORS)]
        parts.append(
            f'<path d="{line.path}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        )
        parts.append(
            f'<text x="{chart.width + 6}" y="{16 * i + 12}"'
            f" {text.replace('#444', color)}>{line.name} {line.last}</text>"
        )
    box = f"-32 -24 {chart.width + 200} {chart.height + 64}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg"'
        f' viewBox="{box}">{"".join(parts)}</svg>\n'
    )


def draw(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a run, from its k-means on."""
    series = [
        Series(
            name,
            [
                (row["pretrain_minutes"], row["kmeans"]),
                *((m, a) for _, m, a in row["curve"]),
            ],
        )
        for name, row in rows.items()
    ]
    title = (
        "Accuracy on novel classes, percent; each line begins with k-means after"
        " pretraining"
    )
    latest = max(m for row in rows.values() for _, m, _ in row["curve"])
    chart = line_chart(title, "minutes", series, x_range=(0, latest), y_range=(0, 100))
    assert chart is not None
    return drawing(chart)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    rows = {run.name: curve_of(run) for run in options.runs}
    if options.svg is not None:
        options.svg.write_text(draw(rows))
    found = {
        "question": "how accurate on novel classes, and after how many minutes?",
        "command": "python -m benchmarks.cpu_curve " + " ".join(sys.argv[1:]),
        "n": len(rows),
        "rows": rows,
        **environment(runs=options.runs),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
