"""Write the HTML report of a run: gather its parts, and render them by a template."""

import logging
from collections.abc import Mapping
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
from uno.method import description
from uno.model import num_heads
from uno.report import charts, facts
from uno.report.checks import warnings
from uno.report.findings import Cluster, SampleSummary, summarize
from uno.report.page import render
from uno.report.pictures import SHEET_COLUMNS, Album
from uno.report.sample import Sample, open_model, score_sample
from uno.results.accuracy_table import filled_tables, has_several_heads
from uno.results.classes import edits_of
from uno.results.infer import Classifier, decoder
from uno.results.metrics import confusion, hungarian, joint_matching
from uno.results.trust import verdict
from uno.runs import REPORT_FILE, directory
from uno.text import visible

REJECTED = -1  # key of the images of dropped classes, beside the outputs

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
) -> str:
    """Write ``report.html`` into the directory of a run.

    A sample of the rows is classified for it. Without the data, or if the model cannot
    be loaded or applied, or images cannot be read for their thumbnails, the report
    shows what the directory still holds. Except without the data, the report then names
    the error, and a warning is logged.

    Args:
        config: The configuration of the run.
        storage: The run directory.
        task: The rows of the run, or None if the data is gone or has changed.
        device: The device on which images are classified.
        note: A sentence for the top of the report, such as why there is no ``task``; ""
            for none.
        model: The model of the run; None for the one in its directory, or of its newest
            checkpoint. Its network is moved to ``device``. It is not used without a
            ``task``.
        metrics: The metrics of the run by key; None for those in its directory.

    Returns:
        The path or URI of the report.

    Raises:
        StorageError: The report cannot be written. Damaged files of the run raise no
            error: the report names those that cannot be read as a whole, damaged lines
            of logs are left out, and the newest checkpoint takes the place of a damaged
            ``model/``.
        ConfigError: The discovery method of the run cannot be loaded.
    """
    run_data = facts.read_facts(storage, metrics)
    values = run_data.metrics
    notes = [note] if note else []
    if run_data.unreadable:
        notes.append(f"{', '.join(run_data.unreadable)} could not be read.")
    predicted: dict[str, Any] = {"findings": None}
    if task is not None:
        notes += task.rows.warnings
        try:
            if model is None:
                model = open_model(config, storage, task, device)
            model = model.to(device)
            decode = decoder(model, task.rows, config.compute.threads)
            sample = score_sample(task, model, decode)
            predicted = _predicted_parts(task, sample, summarize(task, sample), config)
        except (StorageError, RuntimeError, ValueError) as error:
            # PyTorch raises RuntimeError for a checkpoint of another shape
            notes.append(f"No predictions: {' '.join(str(error).split())[:300]}.")
            log.warning("report without predictions: %s", error)
    context = {
        **predicted,
        "config": config,
        "uri": storage.uri,
        "task": task,
        "notes": notes,
        "facts": run_data,
        "metrics": values,
        "trust": verdict(values),
        "title": config.data.source if task is None else task.rows.source,
        "tables": filled_tables(values),
        "novel_truth": any("/novel/" in key for key in values),
        "warnings": list(
            warnings(config.data.setting, run_data, predicted["findings"])
        ),
        "curves": facts.curves(run_data),
        "estimate_chart": facts.estimate_chart(run_data),
        "several_heads": has_several_heads(values),
        "num_heads": num_heads(config),
        "image_side": side(config),
        "method": description(config.method),
        "times": facts.times(run_data),
    }
    page = render("report.html", context, script="report.js")
    storage.write(REPORT_FILE, page.encode())
    return storage.below(REPORT_FILE)


def open_task(config: Config, storage: Storage) -> tuple[Task | None, str]:
    """Open the rows of a run for its report, whether or not the run is finished.

    Args:
        config: The configuration of the run, which names the data.
        storage: The run directory.

    Returns:
        The rows with their classes and splits, and an empty string; or None and a
        sentence that says why the data cannot be shown. Either it cannot be read, or
        does not suit the configuration; or it has changed since the run: an image
        was modified, or the fingerprint of the data differs from the recorded one, if
        there is one.

    Raises:
        StorageError: The recorded fingerprint or the stored modification times of the
            images cannot be read, or the disk has no space for large arrays of vectors.
    """
    try:
        task = make_task(read_rows(config.data), config.data)
    except (ConfigError, OSError) as error:
        reason = "The data of the run cannot be read, so this report shows no images"
        return None, f"{reason}: {error}"
    try:
        directory.check_rows(storage, task.rows)
    except ConfigError as error:
        reason = "The data has changed since the run, so this report shows no images"
        return None, f"{reason}: {error}"
    return task, ""


def _predicted_parts(
    task: Task, sample: Sample, findings: SampleSummary, config: Config
) -> dict[str, Any]:
    """Return the values of the report's template that show predictions, by name.

    ``sample``, ``findings`` and ``album`` are the sample, its summary and the drawer of
    its thumbnails. ``true_names`` has the names of the true classes. ``cards`` has
    a card with pictures (texts, for rows without pictures) for each discovered class
    that the user neither merged nor dropped, in descending order of size, and
    ``known_cards`` one for each known class. ``rejected`` is the common card of the
    dropped classes, or None if no sampled row is in one. ``fates`` has for each
    discovered class, merged and dropped ones included, the class and a text that says
    whether the user merged or dropped it, or is empty. ``matrix`` and ``map`` are the
    confusion matrix and the t-SNE map, each None if it cannot be drawn. ``data`` has
    the points of the map and the editable classes, which the JavaScript of the page
    reads.

    Args:
        task: The rows of the run.
        sample: The sampled rows, with their predictions.
        findings: The summary of the sampled rows by class.
        config: The configuration of the run.
    """
    truth = findings.truth
    true_names = [*task.known, *task.novel]
    clusters = sorted(findings.clusters, key=lambda c: (-c.count, c.output))
    members = _members(task, sample, findings, clusters)
    album = Album(
        task.rows,
        sample.index,
        sample.confidence,
        list(members.values()),
        config.data.value_range,
    )

    def card(output: int, cluster: Cluster | None = None) -> dict[str, Any]:
        """Return what the report shows of a class: name, size and pictures.

        Args:
            output: The index of the class among the model's outputs, or ``REJECTED``.
            cluster: The summary of a discovered class; None for other classes.

        Returns:
            Values by name. ``off`` has the indices in the sample of the members that
            seem wrong: the data says their true class, and it is another one than this
            class, or for a discovered class than the true class of its majority. It is
            empty for ``REJECTED``, whose name the caller replaces. ``preview`` shows
            members of a discovered class, labeled rows of a known class, and nothing
            for ``REJECTED``.
        """
        rows, expected = members[output], output
        if cluster is not None:
            majority = cluster.majority
            expected = -1 if majority is None else true_names.index(majority[0])
        is_wrong = (truth[rows] >= 0) & (truth[rows] != expected) & (expected >= 0)
        shown = rows
        if cluster is None:  # unlabeled rows have -1, as rejected ones have
            labels = task.labels[sample.index]
            shown = np.flatnonzero((labels == output) & (labels >= 0))
        return {
            "output": output,
            "name": sample.names[output],
            "count": len(rows),
            "cluster": cluster,
            "gallery": album.gallery(rows),
            "preview": album.preview(shown),
            "off": set(rows[is_wrong].tolist()),
        }

    rejected = None
    if REJECTED in members:
        rejected = card(REJECTED) | {"name": sample.columns[0][-1]}
    feature_map = _map(task, sample, truth, album, config.seed)
    return {
        "sample": sample,
        "findings": findings,
        "true_names": true_names,
        "cards": [card(cluster.output, cluster) for cluster in clusters],
        "rejected": rejected,
        "known_cards": [card(output) for output in range(task.num_known)],
        "album": album,
        "fates": edits_of(sample.classes),
        "matrix": _confusion_matrix(task, sample, truth),
        "map": feature_map,
        "data": {
            "map": feature_map and feature_map["points"],
            "classes": _editable_classes(sample),
        },
    }


def _editable_classes(sample: Sample) -> dict[str, Any] | None:
    """Return the output classes for the editor in the page, where a user renames them.

    Args:
        sample: The sample, which has the classes and the hash of the model.

    Returns:
        ``model``, the hash of the model; and ``entries``, for each known and novel
        class a tuple of its index, name, displayed name (at most 60 printable
        characters), kind ("known" or "novel"), and the index of the class that it is
        merged into (its own if it is not merged, None if it is dropped). A single None
        if the model has no hash, because it is that of an unfinished run.
    """
    if not sample.model_hash:
        return None
    entries = [
        (c.index, c.name, visible(c.name, 60), c.kind, c.into) for c in sample.classes
    ]
    return {"model": sample.model_hash, "entries": entries}


def _members(
    task: Task, sample: Sample, findings: SampleSummary, clusters: list[Cluster]
) -> dict[int, NDArray[np.int64]]:
    """Return the sampled rows that the report shows in each class.

    A discovered class has the unlabeled training rows that are assigned to it. A known
    class has all rows without a label, test rows included, that are assigned to it.

    Args:
        task: The rows of the run.
        sample: The sampled rows, with their predictions.
        findings: The summary of the sampled rows.
        clusters: The discovered classes.

    Returns:
        Indices in the sample, int64 (n,), by the index of the class among the model's
        outputs. The unlabeled training rows of classes that the user dropped are
        together under :data:`REJECTED` (-1). This key is left out if there are none.
    """
    output = sample.output
    masks = {c.output: findings.unlabeled & (output == c.output) for c in clusters}
    dropped_classes = [c.index for c in sample.classes if c.into is None]
    is_rejected = findings.unlabeled & np.isin(output, dropped_classes)
    if is_rejected.any():
        masks[REJECTED] = is_rejected
    is_labeled = task.labels[sample.index] >= 0
    for known in range(task.num_known):
        masks[known] = ~is_labeled & (output == known)
    return {key: np.flatnonzero(mask) for key, mask in masks.items()}


def _confusion_matrix(
    task: Task, sample: Sample, truth: NDArray[np.int64]
) -> charts.Matrix | None:
    """Draw the confusion matrix of all classes, with their joint matching.

    Labeled rows count, too. Columns are the classes that the user neither merged nor
    dropped and, if a class was dropped, a last one for the rows of all dropped classes,
    which are correct for no class.

    Args:
        task: The rows of the run.
        sample: The sampled rows, with their predictions.
        truth: The true class of each sampled row, int64 (M,), an index into the known
            and then the novel classes; -1 if it is not known.

    Returns:
        A drawing of the training rows that have a true class, or of the test rows if no
        training row has one. None if no row has one, or if there are too many classes
        to draw.
    """
    is_train = task.is_train[sample.index]
    title, counted = "Training images", is_train & (truth >= 0)
    if not counted.any():
        title, counted = "Test images", ~is_train & (truth >= 0)
    true_names = [*task.known, *task.novel]
    names, places = sample.columns
    counts = confusion(
        np.where(counted, truth, -1),
        places[sample.output],
        len(true_names),
        len(names),
    )
    # the column of rejected rows, if there is one, is right for no class
    matching = joint_matching(counts[:, : len(sample.kept)], task.num_known)
    title = f"{title}, all classes (task-agnostic, joint matching)"
    return charts.draw_matrix(
        title, counts, (true_names, names), matching, task.num_known
    )


def _map(
    task: Task,
    sample: Sample,
    all_truth: NDArray[np.int64],
    album: Album,
    seed: int,
) -> dict[str, Any] | None:
    """Draw the t-SNE map of the features of some of the sampled rows.

    Args:
        task: The rows of the run.
        sample: The sampled rows, with their features and predictions.
        all_truth: The true class of each sampled row, int64 (M,), an index into the
            known and then the novel classes; -1 if it is not known.
        album: Draws the images of the rows.
        seed: Seed of the choice of rows and of t-SNE.

    Returns:
        Three values by name. ``caption`` says how the map was computed. ``layers`` has
        the points grouped by true class ("true", only if a row of the sample has a
        novel true class) and by predicted class ("predicted", in which dropped classes
        are one). ``points`` has coordinates, classes and pictures for the JavaScript of
        the page. A single None if :func:`uno.report.charts.place_points` cannot place
        the points: there are too few rows or features, or all rows are practically the
        same.
    """
    chosen = charts.choose_points(len(sample.index), seed)
    placed = charts.place_points(sample.features[chosen], seed)
    if placed is None:
        return None
    xy, caption = placed
    num_known, true_names = task.num_known, [*task.known, *task.novel]
    names, places = sample.columns
    truth, output = all_truth[chosen], places[sample.output[chosen]]
    # Discovered classes count colors up, known ones down: few of both share none.
    known_colors = [charts.COLORS - 1 - i % charts.COLORS for i in range(num_known)]

    def layer(
        classes: NDArray[np.int64], names: list[str], novel_colors: list[int]
    ) -> list[charts.Group]:
        """Group the points of the map by class, each class with its color.

        Args:
            classes: The class of each point, int64 (P,); -1 if it is not known.
            names: Names of the classes, known ones first.
            novel_colors: For each novel class a number that decides its color: the
                remainder of its division by the number of colors (10).
        """
        colors = known_colors + [color % charts.COLORS for color in novel_colors]
        return charts.group_points(classes, names, num_known, colors, xy)

    layers = {}
    if (all_truth >= num_known).any():
        outputs = places[sample.output]
        counts = confusion(all_truth, outputs, len(true_names), len(names))
        matching = hungarian(counts[num_known:, num_known:]).tolist()
        # a class has the color of its cluster
        colors = [m if m >= 0 else i for i, m in enumerate(matching)]
        layers["true"] = layer(truth, true_names, colors)
    layers["predicted"] = layer(output, names, list(range(len(names) - num_known)))
    sheet, side = album.sheet(chosen)
    is_known = np.where(truth >= 0, truth < num_known, output < num_known)
    points = {
        "xy": xy.ravel().tolist(),
        "ids": [visible(str(task.rows.ids[i]), 60) for i in sample.index[chosen]],
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
    return {"caption": caption, "layers": layers, "points": points}
