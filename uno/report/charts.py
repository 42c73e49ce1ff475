"""Drawings as numbers: paths and ticks of line charts and heat maps. The templates turn them into SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uno.report.text import short, visible
from uno.results.metrics import Counts

WIDTH, HEIGHT = 360, 150
MAX_CURVE_POINTS = 300
LEVELS = 10
LABEL = 18
"""Characters of a name beside a heat map; the rest is read by pointer or in the tables."""
MAX_MATRIX = 160
"""Classes or outputs up to which a heat map is drawn."""


@dataclass(frozen=True)
class Line:
    """One curve: its name, SVG path, last value as text; ``single``: it is one point."""

    name: str
    path: str
    last: str
    single: bool


@dataclass(frozen=True)
class Chart:
    """A line chart of WIDTH x HEIGHT; ticks are (position, label)."""

    title: str
    x_label: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    width: int = WIDTH
    height: int = HEIGHT


def line_chart(
    title: str, x_label: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> Chart | None:
    """A chart of named (x, y) series from zero upwards, without non-finite points; None if none is left."""
    kept = [(name, [p for p in points if all(map(math.isfinite, p))]) for name, points in series]
    kept = [(name, points) for name, points in kept if points]
    if not kept:
        return None
    xs = [x for _, points in kept for x, _ in points]
    ys = [y for _, points in kept for _, y in points]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    y_low, y_high = min(0.0, min(ys)), max(ys)
    y_high = y_high if y_high > y_low else y_low + 1

    def at_x(x: float) -> float:
        return round((x - x_low) / (x_high - x_low) * WIDTH, 1)

    def at_y(y: float) -> float:
        return round(HEIGHT - (y - y_low) / (y_high - y_low) * HEIGHT, 1)

    lines = []
    for name, points in kept:
        thin = [points[i] for i in _thinned(len(points))]
        path = "L".join(f"{at_x(x):g} {at_y(y):g}" for x, y in thin)
        dot = "h0" if len(thin) == 1 else ""
        lines.append(Line(name, f"M{path}{dot}", f"{points[-1][1]:.3g}", len(thin) == 1))
    x_ticks = [(at_x(x), f"{x:,.0f}") for x in ticks(x_low, x_high) if x == int(x)]
    y_ticks = [(at_y(y), f"{y:g}") for y in ticks(y_low, y_high)]
    return Chart(title, x_label, lines, x_ticks, y_ticks)


def ticks(low: float, high: float, num: int = 4) -> list[float]:
    """About ``num`` round numbers in [low, high]."""
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 5, 10), key=lambda m: abs(m * power - raw))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _thinned(num: int) -> list[int]:
    if num <= MAX_CURVE_POINTS:
        return list(range(num))
    return sorted({round(i * (num - 1) / (MAX_CURVE_POINTS - 1)) for i in range(MAX_CURVE_POINTS)})


@dataclass(frozen=True, eq=False)
class Matrix:
    """A confusion matrix as a heat map.

    ``shades`` are (opacity, path of unit squares), ``outline`` the path of matched cells, ``numbers`` are
    (x, y, count, light text?) where cells are large enough. ``cells`` [row, column, count], for the script.
    ``row_space``, ``column_space``: length of the longest label in characters.
    """

    key: str
    title: str
    caption: str
    row_names: list[str]
    column_names: list[str]
    cell: int
    row_space: int
    column_space: int
    shades: list[tuple[float, str]]
    outline: str
    numbers: list[tuple[int, int, int, bool]]
    cells: list[list[int]]
    correct: int
    total: int
    num_known_rows: int
    num_known_columns: int
    confusions: list[tuple[str, str, int, float]]


def matrix(
    key: str,
    title: str,
    caption: str,
    counts: Counts,
    names: tuple[Sequence[str], Sequence[str]],
    matching: Counts,
    num_known: int,
) -> Matrix | None:
    """Heat map of (R, P) counts, columns in the order of their matched rows; None without rows or too large.

    Args:
        key: id on the page.
        title: of the figure.
        caption: a sentence on how to read it.
        counts: rows are true classes, columns outputs.
        names: of rows and columns.
        matching: (R,) output of each class or -1.
        num_known: rows that are known classes; a rule is drawn after them.
    """
    total = int(counts.sum())
    if not total or max(counts.shape) > MAX_MATRIX:
        return None
    matched = [int(m) for m in matching if m >= 0]
    order = matched + [p for p in range(counts.shape[1]) if p not in set(matched)]
    place = {p: i for i, p in enumerate(order)}
    shown = counts[:, order]
    share = shown / np.maximum(1, shown.sum(axis=1, keepdims=True))
    level = np.ceil(share * LEVELS).astype(int)
    shades = []
    for value in range(1, LEVELS + 1):
        path = "".join(f"M{c} {r}h1v1h-1z" for r, c in np.argwhere(level == value))
        if path:
            shades.append((value / LEVELS, path))
    outline = "".join(f"M{place[int(m)]} {r}h1v1h-1z" for r, m in enumerate(matching) if m >= 0)
    size = max(shown.shape)
    cell = int(min(34, max(9, 620 // size)))
    filled = [(int(r), int(c)) for r, c in np.argwhere(shown > 0)]
    numbers = [(c, r, int(shown[r, c]), share[r, c] > 0.55) for r, c in filled] if cell >= 26 else []
    wrong = sorted(
        ((int(shown[r, c]), r, c) for r, c in filled if matching[r] != order[c]), key=lambda w: (-w[0], w[1:])
    )
    rows, columns = list(names[0]), [names[1][p] for p in order]
    return Matrix(
        key, title, caption, rows, columns, cell, _longest(rows), _longest(columns), shades, outline, numbers,
        [[r, c, int(shown[r, c])] for r, c in filled],
        sum(int(counts[r, m]) for r, m in enumerate(matching) if m >= 0),
        total,
        num_known if 0 < num_known < len(rows) else 0,
        num_known if 0 < num_known < len(rows) else 0,
        [(rows[r], columns[c], n, float(share[r, c])) for n, r, c in wrong[:10]],
    )  # fmt: skip


def _longest(names: Sequence[str]) -> int:
    return max(len(short(name, LABEL)) for name in names)


def payload(figure: Matrix) -> dict[str, Any]:
    """What the script needs of a heat map."""
    rows, columns = ([visible(n, 120) for n in names] for names in (figure.row_names, figure.column_names))
    return {"rows": rows, "columns": columns, "cells": figure.cells}
