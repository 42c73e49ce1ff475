"""The words and tables of the page: headline, tiles, results, what was run."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from uno.config import Config
from uno.data.splits import Task
from uno.errors import ConfigError
from uno.methods import METHODS, num_heads
from uno.report.clusters import Findings
from uno.report.facts import Facts, training_seconds
from uno.report.predictions import Predictions
from uno.report.text import command_line, duration, percent
from uno.results.evaluate import PROTOCOLS
from uno.runs import PHASES, run

EXPLAINED = {
    "task_aware": (
        "Task-aware",
        "It is given whether an image is known or novel: known images choose among the known outputs, novel "
        "ones among the discovered classes, which are then matched to the true ones.",
    ),
    "task_agnostic_official": (
        "Task-agnostic, official",
        "Every image chooses among all outputs; a novel class may be matched to any, even a known one. "
        "Lenient, and what the paper's code computes.",
    ),
    "task_agnostic_joint": (
        "Task-agnostic, joint",
        "Every image chooses among all outputs; one matching of all true classes to all outputs.",
    ),
    "task_agnostic_strict": (
        "Task-agnostic, strict",
        "Every image chooses among all outputs; a novel image that is taken for a known class is an error.",
    ),
}
BASELINES = {
    "kmeans": ("k-means on features", "Clusters of the pretrained encoder's frozen features, no discovery."),
    "kmeans_pixels": ("k-means on pixels", "Clusters of the raw images, no learning at all."),
}
CHANCE = ("Chance", "Random choice among the discovered classes, matched in the best way.")
SPLITS = {"train": "Training images", "test": "Test images"}
GROUPS = ("known", "novel", "all")

Cell = tuple[str, float | None]


def results(metrics: dict[str, float]) -> dict[str, Any]:
    """The table of accuracies: ``splits``, and ``rows`` of (name, explanation, cells, is it a baseline).

    A cell is (metric key, value), six per split: known, novel, all, each avg and best; ("", None) is blank.
    """
    splits = [split for split in SPLITS if any(key.startswith(f"{split}/") for key in metrics)]
    table: list[tuple[str, str, list[Cell], bool]] = []

    def add(words: tuple[str, str], keys: list[str], baseline: bool) -> None:
        cells: list[Cell] = [(key, metrics[key]) if key in metrics else ("", None) for key in keys]
        if any(key for key, _ in cells):
            table.append((*words, cells, baseline))

    for protocol in PROTOCOLS:
        groups = [f"{split}/{group}/{protocol}/acc" for split in splits for group in GROUPS]
        add(EXPLAINED[protocol], [f"{group}/{which}" for group in groups for which in ("avg", "best")], False)
    if splits:
        blank = ["", ""]
        chance = [["", "", f"{split}/novel/task_aware/chance/acc", "", "", ""] for split in splits]
        add(CHANCE, [key for keys in chance for key in keys], True)
        for name, words in BASELINES.items():
            own = [*blank, f"baseline/{name}/novel/acc", "", *blank]
            add(words, own if splits[0] == "train" else [], True)
    return {"splits": [(split, SPLITS[split]) for split in splits], "rows": table}


def headline(config: Config, facts: Facts, task: Task | None, findings: Findings | None) -> str:
    """What the run found, in one sentence."""
    if task is None:
        return "The data of this run could not be read, so this page shows what the run directory holds."
    if findings is None:
        return f"{task.num_novel} classes were to be discovered; no trained discovery model is here yet."
    labeled, unlabeled = int((task.labels >= 0).sum()), int(findings.unlabeled.sum())
    counts = [cluster.count for cluster in findings.clusters]
    used = [count for count in counts if count]
    if not used:
        found = f"None of the {len(counts)} discovered classes holds an unlabeled image."
    else:
        which = f"All {len(counts)}" if len(used) == len(counts) else f"{len(used)} of {len(counts)}"
        span = f"{min(used):,} to {max(used):,}" if min(used) < max(used) else f"{min(used):,}"
        found = f"{which} discovered classes are in use, with {span} of {unlabeled:,} unlabeled images each."
    return f"{found} Trained with {labeled:,} labeled images of {task.num_known} known classes."


def tiles(facts: Facts, findings: Findings | None) -> list[dict[str, str]]:
    """The few numbers that say how good and how sure: label, value, unit, note, metric key or ''."""
    shown = []
    metrics = facts.metrics
    key = "train/novel/task_aware/acc/avg"
    if key in metrics:
        against = [
            f"{name} {percent(metrics[other])} %"
            for name, other in (
                ("chance", "train/novel/task_aware/chance/acc"),
                ("k-means on features", "baseline/kmeans/novel/acc"),
            )
            if other in metrics
        ]
        shown.append(_tile("Novel training images", metrics[key], ", ".join(against), key))
    strict = "test/novel/task_agnostic_strict/acc/avg"
    if strict in metrics:
        note = "not told which images are novel; strict protocol"
        shown.append(_tile("Novel test images", metrics[strict], note, strict))
    known = "test/known/task_agnostic_strict/acc/avg"
    if known in metrics:
        shown.append(_tile("Known test images", metrics[known], "all outputs to choose from", known))
    if findings is not None and findings.unlabeled.any():
        mine = findings.unlabeled
        if findings.agreement is not None:
            note = "other heads that give an unlabeled image the same class"
            shown.append(_tile("Heads agree", float(findings.agreement[mine].mean()), note))
        confidence = findings.confidence[mine]
        note = f"median; {percent(float((confidence < 0.5).mean()))} % of unlabeled images are below 50 %"
        shown.append(_tile("Confidence", float(np.median(confidence)), note))
    return shown


def _tile(label: str, value: float, note: str, key: str = "") -> dict[str, str]:
    return {
        "label": label,
        "value": percent(value),
        "unit": "% right" if key else "%",
        "note": note,
        "key": key,
    }


def heads(facts: Facts, predictions: Predictions | None, findings: Findings | None) -> list[dict[str, Any]]:
    """Per head: number, last training cluster loss, mean agreement with the others, and which is the best."""
    losses = (facts.head_losses() or [[]])[-1]
    num = predictions.num_heads if predictions is not None else len(losses)
    table = []
    for head in range(num):
        agreement = None
        if findings is not None and num > 1:
            others = np.delete(findings.pairs[head], head)
            agreement = None if np.isnan(others).any() else float(others.mean())
        table.append(
            {
                "number": head + 1,
                "loss": losses[head] if head < len(losses) == num else None,
                "agreement": agreement,
                "best": predictions is not None and head == predictions.best_head,
            }
        )
    return table


def what_was_run(
    config: Config, facts: Facts, task: Task | None, predictions: Predictions | None, uri: str
) -> list[tuple[str, str]]:
    """Label and value pairs: where, data, versions, hardware, time."""
    env = facts.environment
    lines = [("Run directory", uri)]
    if isinstance(env.get("command"), str):
        lines.append(("Command", env["command"]))
    lines.append(("Preset, recipe, seed", f"{config.preset}, {config.recipe}, {config.seed}"))
    folders = f"{config.data.labeled} + {config.data.unlabeled}"
    lines.append(("Data", config.data.source if config.data.labeled is None else folders))
    if task is not None:
        labeled, train = int((task.labels >= 0).sum()), int(task.is_train.sum())
        lines += [
            (
                "Rows",
                f"{labeled:,} labeled, {train - labeled:,} unlabeled, {len(task.rows) - train:,} test",
            ),
            ("Classes", f"{task.num_known} known, {task.num_novel} to discover"),
        ]
    lines.append(("Data fingerprint", str(env.get("data_fingerprint", "not recorded"))))
    side = config.data.store_size
    lines.append(("Model", f"{config.model.encoder}, {side} px, {num_heads(config)} heads"))
    lines.append(("Method", f"{config.method}: {METHODS[config.method]}"))
    if predictions is not None:
        lines.append(("Best head", f"{predictions.best_head + 1} (lowest training cluster loss)"))
    versions = env.get("versions")
    if isinstance(versions, dict):
        known = [("Python", env.get("python", "?")), *versions.items()]
        lines.append(("Versions", ", ".join(f"{name} {value}" for name, value in known)))
    if env:
        gpus = env.get("gpus") or ["no GPU"]
        lines.append(("Hardware", f"{', '.join(map(str, gpus))}; {env.get('platform', '?')}"))
    workers = config.compute.workers
    lines.append(("Workers", f"{workers} with Ray" if workers else "this process, without Ray"))
    lines += _times(config, facts, task)
    return lines


def _times(config: Config, facts: Facts, task: Task | None) -> list[tuple[str, str]]:
    lines = []
    sizes = dict.fromkeys(PHASES, config.train.batch_size)
    if task is not None:
        labeled = int((task.labels >= 0).sum())
        unlabeled = int((task.is_train & (task.labels < 0)).sum())
        try:
            plans = run.plans(config, labeled, unlabeled, config.compute.workers)
            sizes = {name: plan.labeled_size + plan.unlabeled_size for name, plan in plans.items()}
        except ConfigError:  # another number of workers trained it
            pass
    for phase, name in zip(PHASES, ("Rotation", "Pretraining", "Discovery"), strict=True):
        entries, last = facts.entries(phase), facts.last(phase)
        if entries:
            seconds = training_seconds(entries, sizes[phase])
            lines.append(
                (
                    f"{name} time",
                    f"{duration(seconds)} for {last.get('step', 0):,} steps, {last.get('epoch', 0):,} epochs",
                )
            )
    return lines


def commands(config: Config, uri: str) -> dict[str, str]:
    """How to run it again: from the stored settings, and from a preset and what differs."""
    return {
        "exact": f"uno discover --config {shlex.quote(uri + '/config.yaml')} --output NEW_DIRECTORY",
        "flags": f"{command_line(config)} --output NEW_DIRECTORY",
        "report": f"uno report {shlex.quote(uri)}",
    }
