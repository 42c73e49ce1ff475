"""What the report of a run shows, gathered for its template."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

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
from uno.text import plural, visible

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
    looked |= {"rejected": None, "matrices": {}, "maps": [], "left_out": [], "data": {}}
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
                config,
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
        "times": facts.times(found),
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

    matrices = _matrices(task, sample, truth)
    read = ("rows", "columns", "cells")
    data: dict[str, Any] = {
        "matrices": {key: {k: m[k] for k in read} for key, m in matrices.items()}
    }
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
        "matrices": matrices,
        "data": data,
        **_maps(task, sample, truth, album, seed, data),
    }


def _matrices(
    task: Task, sample: Sample, all_truth: np.ndarray
) -> dict[str, dict[str, Any]]:
    """Joint task-agnostic matrix and the task-aware one of novel rows, per split
    that has truth.
    """
    num_known, true_names, test = (
        task.num_known,
        [*task.known, *task.novel],
        ~task.is_train[sample.index],
    )
    (names, places), num_kept = sample.columns, len(sample.kept)
    drawn = {}
    for split, label, member in (
        ("test", "Test images", test),
        ("train", "Training images", ~test),
    ):
        truth = np.where(member, all_truth, -1)
        counts = confusion(truth, places[sample.output], len(true_names), len(names))
        # nobody is right to be rejected
        matching = joint_matching(counts[:, :num_kept], num_known)
        title = f"{label}, all classes (task-agnostic, joint matching)"
        drawn[f"{split}-joint"] = charts.matrix(
            title, counts, (true_names, names), matching, num_known
        )
        if (truth >= num_known).any() and num_kept > num_known:
            own, num_novel = places[sample.own] - num_known, num_kept - num_known
            of_novel = np.maximum(truth - num_known, -1)
            counts = confusion(of_novel, own, len(task.novel), len(names) - num_known)
            title, matching = (
                f"{label}, novel classes only (task-aware)",
                hungarian(counts[:, :num_novel]),
            )
            drawn[f"{split}-novel"] = charts.matrix(
                title, counts, (task.novel, names[num_known:]), matching
            )
    return {key: figure for key, figure in drawn.items() if figure is not None}


def _maps(
    task: Task,
    sample: Sample,
    all_truth: np.ndarray,
    album: Album,
    seed: int,
    data: dict[str, Any],
) -> dict[str, Any]:
    """Maps of a few rows, their dots for each coloring, and in ``data`` what the
    script reads.
    """
    points = charts.choose_points(len(sample.index), seed)
    features, novel, over = sample.features[points], sample.novel[points], sample.over
    logits = np.concatenate(
        [sample.known[points], novel.reshape(len(points), -1)], axis=1
    )
    heads = (
        f"Logits of the known head and of {plural(sample.num_heads, 'cluster head')},"
        " side by side."
    )
    spaces = {
        "Shared feature space": (
            f"Encoder output, {features.shape[1]} dimensions.",
            features,
        ),
        "Cluster-head logits": (heads, logits),
    }
    if over is not None:
        caption = (
            f"{plural(over.shape[1], 'overclustering head')},"
            f" {plural(over.shape[2], 'cluster')} each."
        )
        spaces["Overclustering-head logits"] = (
            caption,
            over[points].reshape(len(points), -1),
        )
    drawn = {
        title: charts.draw_map(title, *space, seed) for title, space in spaces.items()
    }
    maps = [m for m in drawn.values() if m is not None]
    left_out = [
        title
        for title, m in drawn.items()
        if m is None and len(points) >= charts.MIN_POINTS
    ]
    if not maps:
        return {"left_out": left_out}
    num_known, (names, places), true_names = (
        task.num_known,
        sample.columns,
        [*task.known, *task.novel],
    )
    truth, output = all_truth[points], places[sample.output[points]]
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
        layers["true"] = charts.map_groups(truth, true_names, num_known, colors, maps)
    colors = known_colors + [i % charts.COLORS for i in range(len(names) - num_known)]
    layers["predicted"] = charts.map_groups(output, names, num_known, colors, maps)
    sheet, side = album.sheet(points)
    ids, known = (
        task.rows.ids,
        np.where(truth >= 0, truth < num_known, output < num_known),
    )
    data["maps"] = {
        "xy": [m.xy.ravel().tolist() for m in maps],
        "ids": [visible(ids[i], 60) for i in sample.index[points]],
        "truth": truth.tolist(),
        "output": output.tolist(),
        "known": known.astype(int).tolist(),
        "confidence": sample.confidence[points].round(3).tolist(),
        "true_names": [visible(name, 60) for name in true_names],
        "names": [visible(name, 60) for name in names],
        "sheet": sheet,
        "side": side,
        "columns": SHEET_COLUMNS,
        "extent": charts.EXTENT,
    }
    return {
        "maps": maps,
        "left_out": left_out,
        "layers": layers,
        "num_points": len(points),
    }
