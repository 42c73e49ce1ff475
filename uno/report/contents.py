"""What the report of a run shows, gathered for its template."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from uno.config import Config
from uno.data.features import side
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError, StorageError
from uno.methods import description
from uno.methods.registry import num_heads
from uno.report import charts, facts
from uno.report.checks import CHECKED, warnings
from uno.report.findings import Cluster, SampleSummary, summarize
from uno.report.page import render
from uno.report.pictures import SHEET_COLUMNS, Album
from uno.report.sample import Sample, open_model, score_sample
from uno.results.accuracy_table import filled_tables, has_several_heads
from uno.results.classes import edits_of
from uno.results.infer import Classifier, Decode, decoder
from uno.results.metrics import confusion, hungarian, joint_matching
from uno.results.trust import verdict
from uno.runs import REPORT_FILE, directory
from uno.text import visible

log = logging.getLogger(__name__)


def write_report(
    config: Config,
    storage: Storage,
    task: Task | None,
    *,
    device: torch.device | str = "cpu",
    note: str = "",
    model: Classifier | None = None,
    metrics: Mapping[str, float] | None = None,
    look: Callable[[Classifier], Decode] | None = None,
) -> str:
    """Write ``report.html`` into a run directory and return its path; without a
    ``task`` or a trained model it shows what is left. ``metrics``: those of a run that
    has not written them yet; ``look``: what shows rows to the model, by default this
    process.
    """
    found, notes = facts.read_facts(storage, metrics), [note] if note else []
    looked: dict[str, Any] = {
        "sample": None,
        "findings": None,
        "cards": [],
        "known_cards": [],
    }
    looked |= {"rejected": None, "matrix": None, "map": None, "data": {}}
    if task is not None:
        try:
            model = (
                open_model(config, storage, task, device)
                if model is None
                else model.to(device)
            )
            decode = (
                look(model)
                if look
                else decoder(model, task.rows, config.compute.threads)
            )
            sample = score_sample(task, model, decode)
        # RuntimeError: of another shape
        except (StorageError, RuntimeError, ValueError) as error:
            notes.append(f"No predictions: {' '.join(str(error).split())[:300]}.")
            log.warning("report without predictions: %s", error)
        else:
            looked |= _looked(task, sample, summarize(task, sample), config.seed)
    metrics = found.metrics
    context = looked | {
        "config": config,
        "uri": storage.uri,
        "task": task,
        "notes": notes,
        "facts": found,
        "metrics": metrics,
        "checked": CHECKED,
        "trust": verdict(metrics),
        "title": config.data.source if task is None else task.rows.source,
        "tables": filled_tables(metrics),
        "novel_truth": any("/novel/" in key for key in metrics),
        "warnings": list(
            warnings(
                config.data.setting,
                found,
                looked["sample"],
                looked["findings"],
                () if task is None else task.rows.warnings,
            )
        ),
        "curves": facts.curves(found),
        "estimate_chart": facts.estimate_chart(found),
        "several_heads": has_several_heads(metrics),
        "num_heads": num_heads(config),
        "side": side(config),
        "method": description(config.method),
        "times": facts.times(config, found, task),
        "command": facts.command_line(config),
    }
    storage.write(
        REPORT_FILE, render("report.html", context, script="report.js").encode()
    )
    return storage.below(REPORT_FILE)


def open_task(config: Config, storage: Storage) -> tuple[Task | None, str]:
    """The rows of a finished run, or None and the reason where its data is gone or
    has changed.
    """
    recorded = facts.read_facts(storage).environment.get("data_fingerprint")
    try:
        task = make_task(read_rows(config.data), config.data)
    except (ConfigError, OSError) as error:
        return (
            None,
            (
                "The data of the run cannot be read, so this report shows no images:"
                f" {error}"
            ),
        )
    changed = (
        "" if recorded in (None, task.rows.fingerprint) else "its fingerprint differs"
    )
    try:
        directory.check_images(storage, task.rows)
    except ConfigError:
        changed = changed or "the content of images differs"
    if not changed:
        return task, ""
    return (
        None,
        (
            f"The data has changed since the run ({changed}), so this report shows no"
            " images."
        ),
    )


def _looked(
    task: Task, sample: Sample, findings: SampleSummary, seed: int
) -> dict[str, Any]:
    """What the page shows of a sample, and the ``data`` that its script reads."""
    true_names, truth, unlabeled = (
        [*task.known, *task.novel],
        findings.truth,
        findings.unlabeled,
    )
    labeled = task.labels[sample.index] >= 0
    dropped = np.isin(
        sample.output, [c.index for c in sample.classes if c.into is None]
    )
    by_size = sorted(findings.clusters, key=lambda c: (-c.count, c.output))
    rows_of = {c.output: unlabeled & (sample.output == c.output) for c in by_size}
    if dropped.any():
        rows_of[-1] = unlabeled & dropped
    rows_of |= {k: ~labeled & (sample.output == k) for k in range(task.num_known)}
    album = Album(
        task.rows,
        sample.index,
        sample.confidence,
        list(map(np.flatnonzero, rows_of.values())),
    )

    def card(output: int, cluster: Cluster | None = None) -> dict[str, Any]:
        members, expected = np.flatnonzero(rows_of[output]), output
        if cluster is not None:
            expected = (
                -1
                if cluster.majority is None
                else true_names.index(cluster.majority[0])
            )
        off = (
            members[(truth[members] >= 0) & (truth[members] != expected)]
            if expected >= 0
            else members[:0]
        )
        examples = (
            members if cluster else np.flatnonzero(task.labels[sample.index] == output)
        )
        return {
            "output": output,
            "name": sample.names[output],
            "count": len(members),
            "cluster": cluster,
            "gallery": album.gallery(members),
            "preview": album.preview(examples),
            "off": set(off.tolist()),
        }

    data: dict[str, Any] = {}
    matrix = _confusion_matrix(task, sample, truth)
    if matrix is not None:
        data["matrix"] = {key: matrix[key] for key in ("rows", "columns", "cells")}
    drawn = _map(task, sample, truth, album, seed)
    data["map"] = drawn.pop("points", None)
    shown = [
        (c.index, c.name, visible(c.name, 60), c.kind, c.into) for c in sample.classes
    ]
    if sample.model_hash:  # of a run that has ended
        data["classes"] = {"model": sample.model_hash, "entries": shown}
    return {
        "sample": sample,
        "findings": findings,
        "true_names": true_names,
        "cards": [card(c.output, c) for c in by_size],
        "rejected": (
            card(-1) | {"name": sample.columns[0][-1]} if -1 in rows_of else None
        ),
        "known_cards": [card(k) for k in range(task.num_known)],
        "album": album,
        "side": album.side,
        "fates": edits_of(sample.classes),
        "matrix": matrix,
        "data": data,
        **drawn,
    }


def _confusion_matrix(
    task: Task, sample: Sample, truth: NDArray[np.int64]
) -> dict[str, Any] | None:
    """Draw the confusion matrix of all classes, with their joint matching.

    Args:
        task: The rows of the run.
        sample: The rows that were predicted.
        truth: Their true classes int64 (M,), known ones first, or -1.

    Returns:
        A drawing of :func:`uno.report.charts.matrix` of the training rows whose true
        class is known, of the test rows if there are none, or None.
    """
    is_train = task.is_train[sample.index]
    has_truth = truth >= 0
    label, member = "Training images", is_train & has_truth
    if not member.any():
        label, member = "Test images", ~is_train & has_truth
    true_names = [*task.known, *task.novel]
    names, places = sample.columns
    counts = confusion(
        np.where(member, truth, -1),
        places[sample.output],
        len(true_names),
        len(names),
    )
    # the column of rejected rows, if there is one, is right for no class
    matching = joint_matching(counts[:, : len(sample.kept)], task.num_known)
    title = f"{label}, all classes (task-agnostic, joint matching)"
    return charts.matrix(title, counts, (true_names, names), matching, task.num_known)


def _map(
    task: Task,
    sample: Sample,
    all_truth: NDArray[np.int64],
    album: Album,
    seed: int,
) -> dict[str, Any]:
    """Draw the t-SNE map of the features of a few rows.

    Returns:
        ``map``, None where there are too few rows or all features are the same;
        ``layers``, the dots for each coloring; and ``points``, what the script of the
        page reads.
    """
    chosen = charts.choose_points(len(sample.index), seed)
    features = sample.features[chosen]
    caption = f"Encoder output, {features.shape[1]} dimensions."
    drawn = charts.draw_map("Feature space", caption, features, seed)
    if drawn is None:
        return {"map": None}
    num_known, true_names = task.num_known, [*task.known, *task.novel]
    names, places = sample.columns
    truth, output = all_truth[chosen], places[sample.output[chosen]]
    # Discovered classes count colors up, known ones down: few of both share none.
    known_colors = [charts.COLORS - 1 - i % charts.COLORS for i in range(num_known)]
    layers = {}
    if (all_truth >= num_known).any():
        counts = confusion(
            all_truth, places[sample.output], len(true_names), len(names)
        )
        # a class has the color of its cluster
        matching = hungarian(counts[num_known:, num_known:])
        colors = known_colors + [
            (m if m >= 0 else i) % charts.COLORS for i, m in enumerate(matching)
        ]
        layers["true"] = charts.map_groups(
            truth, true_names, num_known, colors, drawn.xy
        )
    colors = known_colors + [i % charts.COLORS for i in range(len(names) - num_known)]
    layers["predicted"] = charts.map_groups(output, names, num_known, colors, drawn.xy)
    sheet, side = album.sheet(chosen)
    is_known = np.where(truth >= 0, truth < num_known, output < num_known)
    points = {
        "xy": drawn.xy.ravel().tolist(),
        "ids": [visible(task.rows.ids[i], 60) for i in sample.index[chosen]],
        "truth": truth.tolist(),
        "output": output.tolist(),
        "known": is_known.astype(int).tolist(),
        "confidence": sample.confidence[chosen].round(3).tolist(),
        "true_names": [visible(name, 60) for name in true_names],
        "names": [visible(name, 60) for name in names],
        "sheet": sheet,
        "side": side,
        "columns": SHEET_COLUMNS,
        "extent": charts.EXTENT,
    }
    return {"map": drawn, "layers": layers, "points": points}
