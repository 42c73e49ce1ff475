"""The report of a run: one HTML file that opens from disk and asks the network for nothing.

``write_report`` is the way in. Below it: ``facts`` (what is known of the run), ``checks`` (what may be
wrong), ``origin`` (where it comes from), ``charts`` and ``pictures`` (what is drawn), ``page`` (what all
pages share).
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from uno.config import Config
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError, StorageError
from uno.methods import METHODS
from uno.methods.registry import num_heads
from uno.report import charts
from uno.report.charts import Chart, Series, line_chart
from uno.report.checks import CHECKED, warnings
from uno.report.facts import Cluster, Facts, Findings, Sample, find, is_number, look, open_model, read_facts
from uno.report.origin import command_line, times
from uno.report.page import render, short, visible
from uno.report.pictures import SHEET_COLUMNS, Album, Strip
from uno.results.infer import Classifier, decoder
from uno.results.metrics import confusion, hungarian

REPORT = "report.html"

log = logging.getLogger(__name__)


def write_report(
    config: Config,
    storage: Storage,
    task: Task | None,
    *,
    device: torch.device | str = "cpu",
    max_rows: int | None = None,
    note: str = "",
    model: Classifier | None = None,
) -> str:
    """Write ``report.html`` into a run directory and return its path.

    Everything but the configuration may be missing: without a task (unreadable data) or a trained model the
    page shows what is left and says so.

    Args:
        config: of the run.
        storage: the run directory.
        task: the rows of the run; None where its data cannot be read.
        device: where the model runs.
        max_rows: rows looked at; default 20,000 on a GPU, 4,000 on a CPU (1,500 above 64 px).
        note: why something is missing, shown on the page.
        model: of the run; None: it is loaded.

    Raises:
        StorageError: the file cannot be written.
    """
    facts = read_facts(storage)
    metrics = facts.metrics
    context: dict[str, Any] = {
        "config": config,
        "uri": storage.uri,
        "title": config.data.source if task is None else task.rows.source,
        "notes": [note] if note else [],
        "facts": facts,
        "metrics": metrics,
        "splits": [split for split in ("train", "test") if any(key.startswith(split) for key in metrics)],
        "novel_truth": any("/novel/" in key for key in metrics),
        "task": task,
        "sample": None,
        "findings": None,
        "checked": CHECKED,
        "curves": curves(facts),
        "estimate_chart": estimate_chart(facts),
        "num_heads": num_heads(config),
        "method": METHODS[config.method],
        "times": times(config, facts, task),
        "command": command_line(config),
        "cards": [],
        "known_cards": [],
        "matrices": {},
        "maps": [],
        "left_out": [],
        "data": {},
    }
    if task is not None:
        try:
            model = open_model(config, storage, task, device) if model is None else model.to(device)
            decode = decoder(model, task.rows, config.compute.threads)
            sample = look(task, model, decode, max_rows)
        except (StorageError, RuntimeError, ValueError) as error:
            # RuntimeError: the checkpoint is of another shape. The page says what is missing and why.
            context["notes"].append(f"No predictions: {' '.join(str(error).split())[:300]}.")
            log.warning("report without predictions: %s", error)
        else:
            album = Album(task.rows, sample, config.data.store_size, config.seed)
            context |= _looked(task, sample, find(task, sample), album, config.seed)
    context["warnings"] = warnings(config, facts, context["sample"], context["findings"])
    storage.write(REPORT, render("report.html", context, script="report.js").encode())
    return storage.path(REPORT)


def open_task(config: Config, storage: Storage) -> tuple[Task | None, str]:
    """The rows of a finished run, or None and the reason where its data is gone or has changed."""
    recorded = read_facts(storage).environment.get("data_fingerprint")
    try:
        task = make_task(read_rows(config.data), config.data)
    except (ConfigError, OSError) as error:
        return None, f"The data of the run cannot be read, so nothing here shows images: {error}"
    if recorded in (None, task.rows.fingerprint):
        return task, ""
    changed = "The data has changed since the run (its fingerprint differs), so nothing here shows images."
    return None, changed


# ----------------------------------------------------------------------------------------------------- curves
def curves(facts: Facts) -> list[Chart]:
    """Loss and learning rate of every phase there was, and the loss of every head."""
    drawn = []
    for phase, label in (("rotation", "Rotation"), ("pretrain", "Pretraining"), ("discover", "Discovery")):
        for key, name in (("loss", "loss"), ("lr", "learning rate")):
            points = [
                (float(e["step"]), float(e[key]))
                for e in facts.entries(phase)
                if is_number(e.get("step")) and isinstance(e.get(key), int | float)
            ]
            drawn.append(line_chart(f"{label}: {name}", "step", [Series(name, points)]))
    heads = [
        Series(f"head {head}", [(float(epoch), float(loss)) for epoch, loss in enumerate(losses, 1)])
        for head, losses in enumerate(zip(*facts.head_losses(), strict=True), 1)
    ]
    drawn.append(line_chart("Cluster loss of each head", "epoch", heads))
    return [chart for chart in drawn if chart is not None]


def estimate_chart(facts: Facts) -> Chart | None:
    """The curves of ``uno estimate-classes`` over k, where the run has them."""
    ks, stored = facts.estimate.get("ks"), facts.estimate.get("curves")
    if not isinstance(ks, list) or not isinstance(stored, dict):
        return None
    series = [
        Series(label, [(float(k), float(v)) for k, v in zip(ks, stored[key], strict=False)])
        for key, label in (("f1", "pair F1"), ("acc", "accuracy"), ("cvi", "silhouette"))
        if isinstance(stored.get(key), list) and all(isinstance(v, int | float) for v in [*ks, *stored[key]])
    ]
    return line_chart("How well k clusters find held-out known classes", "k, novel classes", series)


# ------------------------------------------------------------------------------------- images and predictions
@dataclass(frozen=True, eq=False)
class Card:
    """A class in the gallery; ``off`` are positions in the sample of other true classes than expected."""

    output: int
    name: str
    count: int
    cluster: Cluster | None
    preview: Strip | None
    strips: list[Strip]
    off: set[int]


def _looked(task: Task, sample: Sample, findings: Findings, album: Album, seed: int) -> dict[str, Any]:
    """What the page shows of a sample: galleries, matrices, maps, and the data its script reads."""
    true_names, truth = [*task.known, *task.novel], findings.truth

    def card(output: int, cluster: Cluster | None = None) -> Card:
        members, expected = np.flatnonzero(sample.output == output), output
        if cluster is not None:
            members = members[findings.unlabeled[members]]
            expected = -1 if cluster.majority is None else true_names.index(cluster.majority[0])
        off = members[(truth[members] >= 0) & (truth[members] != expected)]
        strips, preview = album.strips(members), None if cluster is None else album.preview(members)
        name = sample.names[output]
        return Card(output, name, len(members), cluster, preview, strips, set(off.tolist()))

    by_size = sorted(findings.clusters, key=lambda c: (-c.count, c.output))
    cards = [card(cluster.output, cluster) for cluster in by_size]
    matrices = _matrices(task, sample, findings)
    data: dict[str, Any] = {}
    data["matrices"] = {
        key: {
            "rows": [visible(name, 120) for name in m["rows"]],
            "columns": [visible(name, 120) for name in m["columns"]],
            "cells": m["cells"],
        }
        for key, m in matrices.items()
    }
    context = {
        "sample": sample,
        "findings": findings,
        "true_names": true_names,
        "cards": cards,
        "known_cards": [card(output) for output in range(task.num_known)],
        "gallery_full": album.full,
        "side": album.side,
        "matrices": matrices,
        "data": data,
    }
    return context | _maps(task, sample, findings, album, seed, data)


def _matrices(task: Task, sample: Sample, findings: Findings) -> dict[str, dict[str, Any]]:
    """Joint task-agnostic matrix and the task-aware one of novel rows, per split that has truth."""
    num_known, true_names = task.num_known, [*task.known, *task.novel]
    own = sample.novel[:, sample.best_head].argmax(axis=1)
    drawn = {}
    for split, label, member in (
        ("test", "Test images", findings.test),
        ("train", "Training images", ~findings.test),
    ):
        truth = np.where(member, findings.truth, -1)
        counts = confusion(truth, sample.output, len(true_names), len(sample.names))
        weights = counts * (counts.sum() + 1)  # as metrics.task_agnostic_joint
        weights[:num_known] += counts[:num_known]
        title, names = f"{label}, all classes (task-agnostic, joint matching)", (true_names, sample.names)
        drawn[f"{split}-joint"] = charts.matrix(title, counts, names, hungarian(weights), num_known)
        if (truth >= num_known).any():
            counts = confusion(np.maximum(truth - num_known, -1), own, len(task.novel), task.num_novel)
            title, names = f"{label}, novel classes only (task-aware)", (task.novel, sample.names[num_known:])
            drawn[f"{split}-novel"] = charts.matrix(title, counts, names, hungarian(counts))
    return {key: figure for key, figure in drawn.items() if figure is not None}


def _maps(
    task: Task, sample: Sample, findings: Findings, album: Album, seed: int, data: dict[str, Any]
) -> dict[str, Any]:
    """Maps of a few rows, their dots for each colouring, and in ``data`` what the script reads."""
    points = charts.choose_points(len(sample.index), seed)
    features, novel, over = sample.features[points], sample.novel[points], sample.over
    logits = np.concatenate([sample.known[points], novel.reshape(len(points), -1)], axis=1)
    spaces = {
        "Shared feature space": (f"Encoder output, {features.shape[1]} dimensions.", features),
        "Cluster-head logits": (
            f"Known logits and those of all {sample.num_heads} cluster heads, side by side.", logits
        ),
    }  # fmt: skip
    if over is not None:
        caption = f"All {over.shape[1]} overclustering heads, {over.shape[2]} clusters each."
        spaces["Overclustering-head logits"] = (caption, over[points].reshape(len(points), -1))
    drawn = {title: charts.draw_map(title, *space, seed) for title, space in spaces.items()}
    maps = [m for m in drawn.values() if m is not None]
    left_out = [title for title, m in drawn.items() if m is None and len(points) >= charts.MIN_POINTS]
    if not maps:
        return {"left_out": left_out}
    num_known, names, true_names = task.num_known, sample.names, [*task.known, *task.novel]
    truth, output = findings.truth[points], sample.output[points]
    colours = [_colour(o, num_known) for o in range(len(names))]
    layers = {}
    if (findings.truth >= num_known).any():
        counts = confusion(findings.truth, sample.output, len(true_names), len(names))
        matching = hungarian(counts[num_known:, num_known:])  # a class has the colour of its cluster
        novel_colours = [_colour(num_known + (m if m >= 0 else i), num_known) for i, m in enumerate(matching)]
        true_colours = [*colours[:num_known], *novel_colours]
        layers["true"] = charts.map_groups(truth, true_names, num_known, true_colours, maps)
    layers["predicted"] = charts.map_groups(output, names, num_known, colours, maps)
    sheet, side = album.sheet(points)
    data["maps"] = {
        "xy": [m.xy.ravel().tolist() for m in maps],
        "ids": [short(task.rows.ids[i], 60) for i in sample.index[points]],
        "truth": truth.tolist(),
        "output": output.tolist(),
        "confidence": sample.confidence[points].round(3).tolist(),
        "true_names": [short(name, 60) for name in true_names],
        "names": [short(name, 60) for name in names],
        "known": np.where(truth >= 0, truth < num_known, output < num_known).astype(int).tolist(),
        "sheet": sheet,
        "side": side,
        "columns": SHEET_COLUMNS,
        "extent": charts.EXTENT,
    }
    return {"maps": maps, "left_out": left_out, "layers": layers, "num_points": len(points)}


def _colour(output: int, num_known: int) -> int:
    """Discovered classes count colours up, known ones down: few of both share none."""
    num = charts.COLOURS
    return (output - num_known) % num if output >= num_known else num - 1 - output % num


__all__ = ["REPORT", "open_task", "write_report"]
