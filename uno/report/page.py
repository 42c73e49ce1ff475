"""From what is known of a run to the HTML page. Markup lives in ``templates/``; here is what it shows."""

from __future__ import annotations

import base64
import datetime
import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from uno.data.splits import Task
from uno.report import text
from uno.report.charts import LABEL, Chart, Matrix, line_chart, matrix, payload
from uno.report.clusters import Cluster, Findings
from uno.report.facts import Facts
from uno.report.maps import EXTENT, Map, choose_points, draw_maps
from uno.report.pictures import SHEET_COLUMNS, Album, Strip
from uno.report.predictions import Predictions
from uno.results.metrics import confusion, hungarian

COLOURS = 10
MAX_LABELS = 24  # classes up to which a map carries their names
ESTIMATES = {"f1": "pair F1", "acc": "accuracy", "cvi": "silhouette"}


@dataclass(frozen=True, eq=False)
class Card:
    """A class in the gallery; ``off`` are the positions of rows whose true class is not the majority's."""

    output: int
    name: str
    count: int
    cluster: Cluster | None
    preview: Strip | None
    strips: list[Strip]
    off: frozenset[int]


@dataclass(frozen=True, eq=False)
class Rows:
    """The parts of the page that show images and predictions."""

    task: Task
    predictions: Predictions
    findings: Findings
    names: list[str]
    seed: int
    size: int

    @property
    def true_names(self) -> list[str]:
        """Names of the true classes, known first."""
        return [*self.task.known, *self.task.novel]

    def has_novel_truth(self) -> bool:
        """Whether some row is known to be of a novel class."""
        return bool((self.findings.truth >= self.task.num_known).any())


def environment() -> Environment:
    """The templates, autoescaping everything that is not our own markup."""
    env = Environment(
        loader=PackageLoader("uno.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "visible": text.visible, "short": text.short, "percent": text.percent, "duration": text.duration
    }  # fmt: skip
    return env


def render(context: dict[str, Any]) -> str:
    """The page. Its content security policy forbids every request and every script but our own."""
    assets = resources.files("uno.report") / "templates"
    script = (assets / "report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (
        environment()
        .get_template("report.html")
        .render(
            context
            | {
                "style": Markup((assets / "report.css").read_text("utf-8")),
                "script": Markup(script),
                "script_hash": digest,
                "label_length": LABEL,
                "generated": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
            }
        )
    )
    return page.encode("utf-8", "replace").decode()


def rows_context(rows: Rows) -> dict[str, Any]:
    """Gallery, matrices, maps and the data the script reads."""
    cards, known_cards, album = _galleries(rows)
    matrices = _matrices(rows)
    points = choose_points(len(rows.predictions.index), rows.seed)
    maps = draw_maps(rows.predictions, points, rows.seed)
    data: dict[str, Any] = {"matrices": {m.key: payload(m) for m in matrices}}
    layers: list[dict[str, Any]] = []
    if maps:
        layers, data["maps"] = _map_layers(rows, points, maps, album)
    return {
        "cards": cards,
        "known_cards": known_cards,
        "gallery_full": album.full,
        "tile": album.side,
        "matrices": matrices,
        "maps": maps,
        "layers": layers,
        "extent": EXTENT,
        "num_points": len(points),
        "data": data,
    }


def curves(facts: Facts) -> list[Chart]:
    """Loss and learning rate of every phase there was, and the loss of every head."""
    charts = []
    names = [("pretrain", "Pretraining"), ("discover", "Discovery")]
    if facts.entries("rotation"):
        names.insert(0, ("rotation", "Rotation"))
    for phase, label in names:
        entries = facts.entries(phase)
        for key, name in (("loss", "loss"), ("lr", "learning rate")):
            points = [
                (float(e["step"]), float(e[key]))
                for e in entries
                if isinstance(e.get("step"), int) and isinstance(e.get(key), int | float)
            ]
            charts.append(line_chart(f"{label}: {name}", "step", [(name, points)]))
    losses = facts.head_losses()
    if losses:
        series = [
            (f"head {head + 1}", [(float(epoch + 1), float(row[head])) for epoch, row in enumerate(losses)])
            for head in range(len(losses[-1]))
        ]
        charts.append(line_chart("Cluster loss of each head", "epoch", series))
    return [chart for chart in charts if chart is not None]


def estimate_chart(facts: Facts) -> Chart | None:
    """The curves of ``uno estimate-classes`` over k, where the run has them."""
    ks, stored = facts.estimate.get("ks"), facts.estimate.get("curves")
    if not isinstance(ks, list) or not isinstance(stored, dict):
        return None
    series = [
        (label, [(float(k), float(v)) for k, v in zip(ks, stored[key], strict=False)])
        for key, label in ESTIMATES.items()
        if isinstance(stored.get(key), list) and all(isinstance(v, int | float) for v in [*ks, *stored[key]])
    ]
    return line_chart("How well k clusters find held-out known classes", "k, novel classes", series)


# ------------------------------------------------------------------------------------------------- galleries
def _galleries(rows: Rows) -> tuple[list[Card], list[Card], Album]:
    """Discovered classes by size, then known classes by index; pictures until the budget is spent."""
    album = Album(rows.task, rows.predictions, rows.findings, rows.size, len(rows.names), rows.seed)
    cards, known_cards = [], []
    for cluster in sorted(rows.findings.clusters, key=lambda c: (-c.count, c.output)):
        members = np.flatnonzero(rows.findings.unlabeled & (rows.findings.output == cluster.output))
        strips = album.strips(members)
        cards.append(_card(rows, cluster.output, members, cluster, album.preview(members), strips))
    for output in range(rows.task.num_known):
        members = np.flatnonzero(rows.findings.output == output)
        known_cards.append(_card(rows, output, members, None, None, album.strips(members)))
    return cards, known_cards, album


def _card(
    rows: Rows,
    output: int,
    members: np.ndarray,
    cluster: Cluster | None,
    preview: Strip | None,
    strips: list[Strip],
) -> Card:
    truth = rows.findings.truth
    expected = output
    if cluster is not None:
        expected = -1 if cluster.majority is None else rows.true_names.index(cluster.majority[0])
    shown = [position for strip in strips for position in strip.rows]
    off = frozenset(p for p in shown if expected >= 0 and truth[p] >= 0 and truth[p] != expected)
    return Card(output, rows.names[output], len(members), cluster, preview, strips, off)


# -------------------------------------------------------------------------------------------------- matrices
def _matrices(rows: Rows) -> list[Matrix]:
    """Joint task-agnostic matrix and the task-aware one of novel rows, per split that has truth."""
    findings, task = rows.findings, rows.task
    num_known, num_true = task.num_known, len(rows.true_names)
    num_outputs = len(rows.names)
    figures = []
    for split, member in (("test", findings.test), ("train", ~findings.test)):
        label = "Test images" if split == "test" else "Training images"
        counts = confusion(np.where(member, findings.truth, -1), findings.output, num_true, num_outputs)
        weights = counts * (counts.sum() + 1)  # as metrics.task_agnostic_joint
        weights[:num_known] += counts[:num_known]
        figures.append(
            matrix(
                f"{split}-joint",
                f"{label}, all classes (task-agnostic, joint matching)",
                "Each image may go to any output. Columns stand in the order of their matched classes: the "
                "outlined cells count as right.",
                counts,
                (rows.true_names, rows.names),
                hungarian(weights),
                num_known,
            )
        )
        if rows.has_novel_truth():
            own = rows.predictions.novel[:, rows.predictions.best_head].argmax(axis=1)
            truth = np.where(member & (findings.truth >= num_known), findings.truth - num_known, -1)
            novel = confusion(truth, own, len(task.novel), task.num_novel)
            figures.append(
                matrix(
                    f"{split}-novel",
                    f"{label}, novel classes only (task-aware)",
                    "Only images of novel classes, and only the discovered outputs to choose from.",
                    novel,
                    (task.novel, rows.names[num_known:]),
                    hungarian(novel),
                    0,
                )
            )
    return [figure for figure in figures if figure is not None]


# ------------------------------------------------------------------------------------------------------ maps
def _map_layers(
    rows: Rows, points: np.ndarray, maps: list[Map], album: Album
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Per colouring (true class, predicted class) and class: paths of dots in every map; and script data."""
    findings, num_known = rows.findings, rows.task.num_known
    truth, output = findings.truth[points], findings.output[points]
    colour_of_true = _true_colours(rows)
    layers = []
    if rows.has_novel_truth():
        layers.append(_layer("true", "True class", truth, rows.true_names, num_known, colour_of_true, maps))
    colours = [_colour(o, num_known) for o in range(len(rows.names))]
    layers.append(_layer("predicted", "Predicted class", output, rows.names, num_known, colours, maps))
    sheet, side = album.sheet(points)
    ids = [text.short(rows.task.rows.ids[i], 60) for i in rows.predictions.index[points]]
    data = {
        "xy": [m.xy.ravel().tolist() for m in maps],
        "ids": ids,
        "truth": truth.tolist(),
        "output": output.tolist(),
        "confidence": [round(float(c), 3) for c in findings.confidence[points]],
        "true_names": [text.short(name, 60) for name in rows.true_names],
        "names": [text.short(name, 60) for name in rows.names],
        "known": [int(v) for v in _is_known(rows, points)],
        "sheet": sheet,
        "side": side,
        "columns": SHEET_COLUMNS,
        "extent": EXTENT,
    }
    return layers, data


def _is_known(rows: Rows, points: np.ndarray) -> np.ndarray:
    """Whether a row counts as known for `novel only`: by truth where there is one, else by prediction."""
    truth, num_known = rows.findings.truth[points], rows.task.num_known
    return np.where(truth >= 0, truth < num_known, rows.findings.output[points] < num_known)


def _colour(output: int, num_known: int) -> int:
    """Discovered classes count colours up, known ones down: few of both share none."""
    return (output - num_known) % COLOURS if output >= num_known else COLOURS - 1 - output % COLOURS


def _true_colours(rows: Rows) -> list[int]:
    """A true class has the colour of the output it is matched to, so that both colourings compare."""
    num_known = rows.task.num_known
    counts = confusion(rows.findings.truth, rows.findings.output, len(rows.true_names), len(rows.names))
    found = counts[num_known:, num_known:]
    matching = hungarian(found)
    novel = [num_known + (int(m) if m >= 0 else i) for i, m in enumerate(matching)]
    return [_colour(o, num_known) for o in [*range(num_known), *novel]]


def _layer(
    key: str,
    label: str,
    classes: np.ndarray,
    names: list[str],
    num_known: int,
    colours: list[int],
    maps: list[Map],
) -> dict[str, Any]:
    groups = []
    present = [int(c) for c in np.unique(classes)]
    for index in present:
        mine = classes == index
        paths = ["".join(f"M{x} {y}h0" for x, y in m.xy[mine]) for m in maps]
        middles = [np.median(m.xy[mine], axis=0).astype(int).tolist() for m in maps]
        groups.append(
            {
                "index": index,
                "name": names[index] if index >= 0 else "no truth",
                "kind": "none" if index < 0 else "known" if index < num_known else "novel",
                "colour": colours[index] if index >= 0 else -1,
                "paths": paths,
                "middles": middles,
            }
        )
    groups.sort(key=lambda g: (g["kind"] != "none", g["kind"] != "known", g["index"]))
    return {"key": key, "label": label, "groups": groups, "labelled": len(present) <= MAX_LABELS}
