"""Line charts, heat maps and t-SNE maps as numbers; the templates draw them as SVG."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from uno.data.plan import REPORT_MAP
from uno.results.metrics import Counts
from uno.text import visible

WIDTH, HEIGHT, WIDE = 360, 150, 720  # pixels of a line chart, and of a wide one
MAX_CURVE_POINTS = 300
COLORS = 10
LEVELS = 10  # shades of a heat map
MAX_MATRIX = 160  # classes or outputs up to which one is drawn
MAX_POINTS = 1_500  # of a map
# Half of scikit-learn's default, in half of its time. The trustworthiness of a map of
# the digits is .9924, and .9927 with 1,000 steps.
TSNE_STEPS = 500
MIN_POINTS = 10
PCA_DIMENSIONS = 50
EXTENT = 1000  # coordinates of a map are integers in [0, EXTENT]


class Series(NamedTuple):
    """A curve to draw.

    Attributes:
        name: Name for the legend.
        points: Pairs (x, y), in the order in which they are connected.
        kind: CSS class of its style, by default one of the colors.
        opacity: 0 to 1.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = ""
    opacity: float = 1


class Dot(NamedTuple):
    """A mark in a line chart, with the text that a pointer shows."""

    x: float
    y: float
    kind: str
    text: str


class Line(NamedTuple):
    """A curve in the coordinates of a drawing.

    Attributes:
        name: Name for the legend.
        kind: CSS class of its style.
        path: SVG path.
        last: The last value as text.
        opacity: 0 to 1.
    """

    name: str
    kind: str
    path: str
    last: str
    opacity: float


class Chart(NamedTuple):
    """A line chart in pixels; ticks are pairs of position and label."""

    title: str
    x_label: str
    lines: list[Line]
    dots: list[Dot]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    width: int
    height: int = HEIGHT


def line_chart(
    title: str,
    x_label: str,
    series: Sequence[Series],
    dots: Sequence[Dot] = (),
    *,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    width: int = WIDTH,
) -> Chart | None:
    """Draw the finite points of some series.

    Args:
        title: Title of the chart.
        x_label: Label of the x axis.
        series: The curves.
        dots: Further marks.
        x_range: Ends of the x axis, by default those of the points.
        y_range: Ends of the y axis, by default those of the points and zero.
        x_ticks: Positions and labels on the x axis, by default round numbers.
        width: Width in pixels.

    Returns:
        The chart, or None if there are no finite points.
    """
    kept = [
        s._replace(points=[p for p in s.points if all(map(math.isfinite, p))])
        for s in series
    ]
    kept = [s for s in kept if s.points]
    points = [*(p for s in kept for p in s.points), *((d.x, d.y) for d in dots)]
    if not points:
        return None
    xs, ys = zip(*points, strict=True)
    x_low, x_high = x_range or (min(xs), max(xs))
    y_low, y_high = y_range or (min(0.0, *ys), max(ys))
    x_high, y_high = (
        high if high > low else low + 1
        for low, high in ((x_low, x_high), (y_low, y_high))
    )

    def at_x(x: float) -> float:
        return round((x - x_low) / (x_high - x_low) * width, 1)

    def at_y(y: float) -> float:
        return round(HEIGHT - (y - y_low) / (y_high - y_low) * HEIGHT, 1)

    lines = []
    for i, s in enumerate(kept):
        chosen = (
            np.linspace(0, len(s.points) - 1, min(len(s.points), MAX_CURVE_POINTS))
            .round()
            .astype(int)
        )
        path = "M" + "L".join(
            f"{at_x(s.points[j][0]):g} {at_y(s.points[j][1]):g}" for j in chosen
        )
        kind = s.kind or f"k{i % COLORS}"
        if len(chosen) == 1:
            path, kind = f"{path}h0", f"{kind} point"
        lines.append(Line(s.name, kind, path, f"{s.points[-1][1]:.3g}", s.opacity))
    if x_ticks is None:
        x_ticks = [(x, f"{x:,.0f}") for x in ticks(x_low, x_high) if x == int(x)]
    return Chart(
        title,
        x_label,
        lines,
        [dot._replace(x=at_x(dot.x), y=at_y(dot.y)) for dot in dots],
        [(at_x(x), label) for x, label in x_ticks],
        [(at_y(y), f"{y:g}") for y in ticks(y_low, y_high)],
        width,
    )


def ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers in [low, high]."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 5, 10), key=lambda m: abs(m * power - raw))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def matrix(
    title: str,
    counts: Counts,
    names: tuple[Sequence[str], Sequence[str]],
    matching: Counts,
    num_known: int = 0,
) -> dict[str, Any] | None:
    """Draw a confusion matrix as a heat map.

    Args:
        title: Title of the drawing.
        counts: Counts (R, P) of true classes and outputs.
        names: Names of the true classes, and of the outputs.
        matching: Output (R,) that is matched with each true class, or -1.
        num_known: Number of known classes, which come first in both.

    Returns:
        The drawing with its columns in the order of the matching, or None if all counts
        are 0 or there are more than ``MAX_MATRIX`` classes. ``shades`` are pairs of
        opacity and a path of unit squares; ``numbers`` are x, y, count and whether the
        text is light; ``cells`` are row, column and count; ``confusions`` are the true
        class, output, count and share of the ten largest errors.
    """
    total = int(counts.sum())
    if not total or max(counts.shape) > MAX_MATRIX:
        return None
    order = list(
        dict.fromkeys(
            [*(m for m in matching.tolist() if m >= 0), *range(counts.shape[1])]
        )
    )
    shown = counts[:, order]
    share = shown / np.maximum(1, shown.sum(axis=1, keepdims=True))
    level = np.ceil(share * LEVELS).astype(int)
    is_match = np.array(order) == matching[:, None]  # (R, P)

    def squares(where: NDArray[np.bool_]) -> str:
        return "".join(f"M{c} {r}h1v1h-1z" for r, c in np.argwhere(where))

    cell = int(min(34, max(9, 620 // max(shown.shape))))
    cells = [[r, c, int(shown[r, c])] for r, c in np.argwhere(shown > 0).tolist()]
    wrong = sorted((-n, r, c) for r, c, n in cells if not is_match[r, c])
    rows, columns = names[0], [names[1][p] for p in order]
    return {
        "title": title,
        "num_known": num_known,
        "cell": cell,
        "rows": [visible(name, 120) for name in rows],
        "columns": [visible(name, 120) for name in columns],
        "shades": [
            (v / LEVELS, squares(level == v))
            for v in range(1, LEVELS + 1)
            if (level == v).any()
        ],
        "outline": squares(is_match),
        "numbers": [(c, r, n, share[r, c] > 0.55) for r, c, n in cells]
        if cell >= 26
        else [],
        "cells": cells,
        "correct": int(shown[is_match].sum()),
        "total": total,
        "confusions": [
            (rows[r], columns[c], -n, float(share[r, c])) for n, r, c in wrong[:10]
        ],
    }


class Map(NamedTuple):
    """A map of P points.

    Attributes:
        title: Title of the map.
        caption: How the points were placed.
        xy: Coordinates (P, 2) in [0, extent].
        extent: Side of the map.
    """

    title: str
    caption: str
    xy: NDArray[np.int64]
    extent: int = EXTENT


def choose_points(num_rows: int, seed: int) -> NDArray[np.int64]:
    """Draw at most MAX_POINTS of ``num_rows`` positions, in ascending order."""
    return np.sort(
        np.random.default_rng([seed, REPORT_MAP]).permutation(num_rows)[:MAX_POINTS]
    )


def draw_map(
    title: str, caption: str, data: NDArray[np.float32], seed: int
) -> Map | None:
    """Place the rows of data (P, D) in the plane, by PCA and then t-SNE.

    Returns:
        The map, or None for fewer than MIN_POINTS rows or rows that are all the same.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    data = np.nan_to_num(data.astype(np.float64))
    spread = data.std(axis=0).max(initial=0)
    if (
        len(data) < MIN_POINTS
        or data.shape[1] < 2
        or spread <= 1e-6 * np.abs(data).max()
    ):
        return None
    dimensions, perplexity = (
        min(PCA_DIMENSIONS, *data.shape),
        min(30.0, (len(data) - 1) / 3),
    )
    # more threads spin: 4-10 times slower where the cores are shared
    with threadpool_limits(1):
        reduced = PCA(dimensions, svd_solver="full", random_state=seed).fit_transform(
            data / data.std()
        )
        tsne = TSNE(
            perplexity=perplexity, init="pca", max_iter=TSNE_STEPS, random_state=seed
        )
        xy = tsne.fit_transform(reduced.astype(np.float32))
    low, high = xy.min(axis=0), xy.max(axis=0)
    scale = (EXTENT - 40) / max(1e-9, float((high - low).max()))
    placed = np.rint((xy - (low + high) / 2) * scale + EXTENT / 2).astype(np.int64)
    how = f"PCA to {dimensions} dimensions, then t-SNE (perplexity {perplexity:.0f})."
    return Map(title, f"{caption} {how}", placed)


def map_groups(
    classes: NDArray[np.int64],
    names: Sequence[str],
    num_known: int,
    colors: Sequence[int],
    xy: NDArray[np.int64],
) -> list[dict[str, Any]]:
    """Group the points of a map by class.

    Args:
        classes: Class of each point int64 (P,), or -1 if it is unknown.
        names: Names of the classes, known ones first.
        num_known: Number of known classes.
        colors: Number of the color of each class.
        xy: Coordinates int64 (P, 2).

    Returns:
        For each class that has a point its index, name, kind (known, novel or none) and
        color, the SVG path of its points and their median.
    """
    groups = []
    for index in np.unique(classes).tolist():
        mine = xy[classes == index]
        group = {"index": index, "name": "no truth", "kind": "none", "color": "k-none"}
        if index >= 0:
            kind = "known" if index < num_known else "novel"
            group |= {"name": names[index], "kind": kind, "color": f"k{colors[index]}"}
        group["path"] = "".join(f"M{x} {y}h0" for x, y in mine)
        group["middle"] = np.median(mine, axis=0).astype(int).tolist()
        groups.append(group)
    return groups
