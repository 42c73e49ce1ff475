"""The report of a run: one HTML file that opens from disk and asks the network for nothing.

``write_report`` is the way in. Below it: ``facts`` (what is known of the run), ``checks`` (what may be
wrong), ``origin`` (where it comes from), ``charts`` and ``pictures`` (what is drawn), ``page`` (what all
pages share).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uno.config import Config
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError, StorageError
from uno.report.charts import (
    COLOURS,
    EXTENT,
    MIN_POINTS,
    Chart,
    Matrix,
    Series,
    choose_points,
    draw_map,
    line_chart,
    map_groups,
    matrix,
)
from uno.report.checks import CHECKED, warnings
from uno.report.facts import (
    Cluster,
    Decode,
    Facts,
    Findings,
    Sample,
    decoder,
    find,
    is_number,
    look,
    open_model,
    output_names,
    read_facts,
)
from uno.report.origin import commands, what_was_run
from uno.report.page import render, short, visible
from uno.report.pictures import SHEET_COLUMNS, Album, Strip
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
    images: tuple[Tensor, NDArray[np.bool_]] | None = None,
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
        images: of all rows, uint8 (N, 3, S, S), and which could be read (N,); None: what is shown is decoded.

    Raises:
        StorageError: the file cannot be written.
    """
    facts = read_facts(storage)
    context: dict[str, Any] = {
        "title": task.rows.source if task is not None else config.data.source,
        "notes": [note] if note else [],
        "facts": facts,
        "metrics": facts.metrics,
        "splits": [s for s in ("train", "test") if any(key.startswith(f"{s}/") for key in facts.metrics)],
        "novel_truth": any("/novel/" in key for key in facts.metrics),
        "task": task,
        "sample": None,
        "findings": None,
        "checked": CHECKED,
        "curves": curves(facts),
        "estimate_chart": estimate_chart(facts),
        "commands": commands(config, storage.uri),
        "cards": [],
        "known_cards": [],
        "matrices": [],
        "maps": [],
        "left_out": [],
        "data": {},
    }
    if task is not None:
        decode = decoder(task, images)
        try:
            model = open_model(config, storage, task, torch.device(device))
            sample = look(config, task, model, decode, max_rows)
        except (StorageError, RuntimeError, ValueError) as error:
            # RuntimeError: the checkpoint is of another shape. The page says what is missing and why.
            context["notes"].append(f"No predictions: {' '.join(str(error).split())[:300]}.")
            log.warning("report without predictions: %s", error)
        else:
            names = output_names(task, facts)
            context |= _looked(config, task, decode, sample, find(task, sample, names), names)
    sample = context["sample"]
    context["warnings"] = warnings(config, facts, sample, context["findings"])
    context["origin"] = what_was_run(config, facts, task, sample and sample.best_head, storage.uri)
    storage.write(REPORT, render("report.html", context, script="report.js").encode())
    return storage.path(REPORT)


def open_task(config: Config, storage: Storage) -> tuple[Task | None, str]:
    """The rows of a finished run, or None and the reason where its data is gone or has changed."""
    recorded = read_facts(storage).environment.get("data_fingerprint")
    try:
        task = make_task(read_rows(config.data), config.data)
    except (ConfigError, OSError) as error:
        return None, f"The data of the run cannot be read, so nothing here shows images: {error}"
    if recorded is not None and task.rows.fingerprint != recorded:
        return (
            None,
            "The data has changed since the run (its fingerprint differs), so nothing here shows images.",
        )
    return task, ""


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
    """A class in the gallery; ``off`` are the positions of rows whose true class is not the expected one."""

    output: int
    name: str
    count: int
    cluster: Cluster | None
    preview: Strip | None
    strips: list[Strip]
    off: set[int]


def _looked(
    config: Config, task: Task, decode: Decode, sample: Sample, findings: Findings, names: list[str]
) -> dict[str, Any]:
    """What the page shows of a sample: galleries, matrices, maps, and the data its script reads."""
    album = Album(decode, sample, config.data.store_size, len(names), config.seed)
    true_names, truth = [*task.known, *task.novel], findings.truth
    cards, known_cards = [], []
    for cluster in sorted(findings.clusters, key=lambda c: (-c.count, c.output)):
        members = np.flatnonzero(findings.unlabeled & (sample.output == cluster.output))
        expected = -1 if cluster.majority is None else true_names.index(cluster.majority[0])
        off = set(members[(truth[members] >= 0) & (truth[members] != expected)].tolist())
        strips, preview = album.strips(members), album.preview(members)
        cards.append(Card(cluster.output, cluster.name, len(members), cluster, preview, strips, off))
    for output in range(task.num_known):
        members = np.flatnonzero(sample.output == output)
        off = set(members[(truth[members] >= 0) & (truth[members] != output)].tolist())
        strips = album.strips(members)
        known_cards.append(Card(output, names[output], len(members), None, None, strips, off))
    matrices = _matrices(task, sample, findings, names)
    data: dict[str, Any] = {
        "matrices": {
            m.key: {
                "rows": [visible(name, 120) for name in m.row_names],
                "columns": [visible(name, 120) for name in m.column_names],
                "cells": m.cells,
            }
            for m in matrices
        }
    }
    context = {
        "sample": sample,
        "findings": findings,
        "names": names,
        "cards": cards,
        "known_cards": known_cards,
        "gallery_full": album.full,
        "side": album.side,
        "matrices": matrices,
        "data": data,
    }
    return context | _maps(config, task, sample, findings, names, album, data)


def _matrices(task: Task, sample: Sample, findings: Findings, names: list[str]) -> list[Matrix]:
    """Joint task-agnostic matrix and the task-aware one of novel rows, per split that has truth."""
    num_known, true_names = task.num_known, [*task.known, *task.novel]
    own = sample.novel[:, sample.best_head].argmax(axis=1)
    drawn = []
    for split, label, member in (
        ("test", "Test images", findings.test),
        ("train", "Training images", ~findings.test),
    ):
        truth = np.where(member, findings.truth, -1)
        counts = confusion(truth, sample.output, len(true_names), len(names))
        weights = counts * (counts.sum() + 1)  # as metrics.task_agnostic_joint
        weights[:num_known] += counts[:num_known]
        drawn.append(
            matrix(
                f"{split}-joint",
                f"{label}, all classes (task-agnostic, joint matching)",
                "Each image may go to any output. Columns stand in the order of their matched classes: the "
                "outlined cells count as right.",
                counts,
                (true_names, names),
                hungarian(weights),
                num_known,
            )
        )
        if (truth >= num_known).any():
            counts = confusion(np.maximum(truth - num_known, -1), own, len(task.novel), task.num_novel)
            drawn.append(
                matrix(
                    f"{split}-novel",
                    f"{label}, novel classes only (task-aware)",
                    "Only images of novel classes, and only the discovered outputs to choose from.",
                    counts,
                    (task.novel, names[num_known:]),
                    hungarian(counts),
                    0,
                )
            )
    return [figure for figure in drawn if figure is not None]


def _maps(
    config: Config,
    task: Task,
    sample: Sample,
    findings: Findings,
    names: list[str],
    album: Album,
    data: dict[str, Any],
) -> dict[str, Any]:
    """Maps of a few rows, their dots for each colouring, and in ``data`` what the script reads."""
    points = choose_points(len(sample.index), config.seed)
    novel = sample.novel[points].reshape(len(points), -1)
    heads = f"all {sample.num_heads} cluster heads"
    spaces = [
        (
            "Shared feature space",
            f"Encoder output, {sample.features.shape[1]} dimensions.",
            sample.features[points],
        ),
        (
            "Cluster-head logits",
            f"Known logits and those of {heads}, side by side.",
            np.concatenate([sample.known[points], novel], axis=1),
        ),
    ]
    if sample.over is not None:
        over = sample.over[points]
        caption = f"All {over.shape[1]} overclustering heads, {over.shape[2]} clusters each."
        spaces.append(("Overclustering-head logits", caption, over.reshape(len(points), -1)))
    drawn = {title: draw_map(title, caption, values, config.seed) for title, caption, values in spaces}
    maps = [m for m in drawn.values() if m is not None]
    left_out = [title for title, m in drawn.items() if m is None]
    if not maps:
        return {"left_out": left_out if len(points) >= MIN_POINTS else []}
    num_known, true_names = task.num_known, [*task.known, *task.novel]
    truth, output = findings.truth[points], sample.output[points]
    colours = [_colour(o, num_known) for o in range(len(names))]
    layers = {}
    if (findings.truth >= num_known).any():
        counts = confusion(findings.truth, sample.output, len(true_names), len(names))
        matching = hungarian(counts[num_known:, num_known:])  # a class has the colour of its cluster
        novel_colours = [_colour(num_known + (m if m >= 0 else i), num_known) for i, m in enumerate(matching)]
        true_colours = [*colours[:num_known], *novel_colours]
        layers["true"] = map_groups(truth, true_names, num_known, true_colours, maps)
    layers["predicted"] = map_groups(output, names, num_known, colours, maps)
    sheet, side = album.sheet(points)
    data["maps"] = {
        "xy": [m.xy.ravel().tolist() for m in maps],
        "ids": [short(task.rows.ids[i], 60) for i in sample.index[points]],
        "truth": truth.tolist(),
        "output": output.tolist(),
        "confidence": [round(float(c), 3) for c in sample.confidence[points]],
        "true_names": [short(name, 60) for name in true_names],
        "names": [short(name, 60) for name in names],
        "known": np.where(truth >= 0, truth < num_known, output < num_known).astype(int).tolist(),
        "sheet": sheet,
        "side": side,
        "columns": SHEET_COLUMNS,
        "extent": EXTENT,
    }
    return {"maps": maps, "left_out": left_out, "layers": layers, "num_points": len(points)}


def _colour(output: int, num_known: int) -> int:
    """Discovered classes count colours up, known ones down: few of both share none."""
    return (output - num_known) % COLOURS if output >= num_known else COLOURS - 1 - output % COLOURS


__all__ = ["REPORT", "open_task", "write_report"]
