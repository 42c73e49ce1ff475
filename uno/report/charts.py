"""Compute line charts, confusion matrices and t-SNE maps, to be drawn as SVG."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from uno.data.sampling import REPORT_MAP
from uno.results.metrics import Counts
from uno.text import visible

WIDTH, HEIGHT, WIDE = 360, 150, 720  # pixels of a line chart, and of a wide one
MAX_CURVE_POINTS = 300
COLORS = 10
MIN_NUMBER_SIDE = 26  # pixels of a cell from which its count is written into it
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
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = ""


class Dot(NamedTuple):
    """A mark in a line chart.

    Attributes:
        x: Position on the x axis.
        y: Position on the y axis.
        kind: CSS class of its style.
        text: The text that appears when a pointer is on the mark.
    """

    x: float
    y: float
    kind: str
    text: str


class Line(NamedTuple):
    """A curve of a line chart in the coordinates of the drawing.

    Attributes:
        name: Name for the legend.
        kind: CSS class of its style.
        path: SVG path, in pixels.
        last: The y value of the last point as text.
    """

    name: str
    kind: str
    path: str
    last: str


class Chart(NamedTuple):
    """A line chart, with all positions in pixels.

    Attributes:
        title: Title of the chart.
        x_label: Label of the x axis.
        lines: The curves.
        dots: Further marks.
        x_ticks: Pairs of position and label on the x axis.
        y_ticks: The same on the y axis.
        width: Width in pixels.
        height: Height in pixels.
    """

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
    """Compute the drawing of curves and marks in a line chart.

    Points of curves that are not finite, and curves without any other point, are left
    out. Of a curve with more than 300 points 300 are drawn, evenly spaced in their
    order, with the first and the last one. A curve of one point is drawn as a dot. The
    chart is 150 pixels high, and has ticks at round numbers on the y axis
    (:func:`ticks`).

    Args:
        title: Title of the chart.
        x_label: Label of the x axis.
        series: The curves.
        dots: Further marks, with finite positions in the units of the axes.
        x_range: The lower and upper end of the x axis; None for the smallest and the
            largest x of all points and marks.
        y_range: The lower and upper end of the y axis. None for an axis from zero, or
            from the smallest y of all points and marks if that is negative, to the
            largest y.
        x_ticks: Pairs of an x value and its label on the x axis; None for those numbers
            of :func:`ticks` that are whole.
        width: Width in pixels.

    Returns:
        The chart with all positions in pixels, or None if there is neither a finite
        point nor a mark. An axis whose upper end is not above the lower one is made one
        unit long, from the lower end.
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
        """Return the position of an x value in pixels from the left, to a tenth."""
        return round((x - x_low) / (x_high - x_low) * width, 1)

    def at_y(y: float) -> float:
        """Return the position of a y value in pixels from the top, to a tenth."""
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
        lines.append(Line(s.name, kind, path, f"{s.points[-1][1]:.3g}"))
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
    """Return round numbers for the ticks of an axis: all multiples of a round step.

    The step is 1, 2 or 5 times a power of ten, the one that is nearest to a quarter of
    the range. So there are two to eight numbers, in ascending order. An end of the
    axis is one of them only if it is itself a multiple of the step: 0.3 to 1.9 gives
    0.5, 1 and 1.5.

    Args:
        low: The lower end of the axis.
        high: The upper end, larger than ``low``.
    """
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 5, 10), key=lambda m: abs(m * power - raw))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


class Cell(NamedTuple):
    """A cell of a confusion matrix.

    Attributes:
        row: Number of its row, from 0.
        column: Number of its column, from 0.
        num_images: Number of images.
        share: Share of the images of the row, 0 to 1.
        is_match: Whether images of this cell count as correct.
    """

    row: int
    column: int
    num_images: int
    share: float
    is_match: bool


class Matrix(NamedTuple):
    """A confusion matrix of true classes and outputs of a model, as a heat map.

    Attributes:
        title: Title of the drawing.
        rows: Names of the true classes.
        columns: Names of the outputs, in the order of their matched classes. Outputs
            without a matched class come last.
        cells: The cells that have images or count as correct.
        num_known: Number of known classes, whose rows come first.
        side: Side of a cell in pixels.
        correct: Number of images that count as correct.
        total: Number of all images.
    """

    title: str
    rows: list[str]
    columns: list[str]
    cells: list[Cell]
    num_known: int
    side: int
    correct: int
    total: int

    @property
    def has_numbers(self) -> bool:
        """Whether cells are large enough to show their counts: at least 26 pixels."""
        return self.side >= MIN_NUMBER_SIDE

    @property
    def errors(self) -> list[Cell]:
        """The at most ten cells with the most images that do not count as correct.

        They are in descending order of images, then in ascending order of rows and of
        columns.
        """
        wrong = (cell for cell in self.cells if not cell.is_match)
        return sorted(wrong, key=lambda c: (-c.num_images, c.row, c.column))[:10]


def draw_matrix(
    title: str,
    counts: Counts,
    names: tuple[Sequence[str], Sequence[str]],
    matching: Counts,
    num_known: int = 0,
) -> Matrix | None:
    """Compute the drawing of a confusion matrix as a heat map.

    Rows are the true classes in the given order. Columns are the outputs, first those
    that are matched with a class, in the order of the classes, then all others in the
    given order. Names are made printable and cut off after 120 characters. Each cell
    has its number of images, and its share of the images of its row.

    Args:
        title: Title of the drawing.
        counts: Numbers of images for each of R true classes and P outputs, (R, P).
        names: Two lists: the names of the true classes, and those of the outputs.
        matching: The output that is matched with each true class, int64 (R,); -1 if
            there is none. Images with this output count as correct.
        num_known: Number of known classes, which come first in both lists. It is kept
            in the drawing, for lines between known and novel classes.

    Returns:
        The drawing, or None if all counts are 0 or there are more than ``MAX_MATRIX``
        (160) classes or outputs.
    """
    total = int(counts.sum())
    if not total or max(counts.shape) > MAX_MATRIX:
        return None
    matched = [output for output in matching.tolist() if output >= 0]
    order = list(dict.fromkeys([*matched, *range(counts.shape[1])]))
    shown = counts[:, order]
    share = shown / np.maximum(1, shown.sum(axis=1, keepdims=True))
    is_match = np.array(order) == matching[:, None]  # (R, P)
    return Matrix(
        title=title,
        rows=[visible(name, 120) for name in names[0]],
        columns=[visible(names[1][output], 120) for output in order],
        cells=[
            Cell(r, c, int(shown[r, c]), float(share[r, c]), bool(is_match[r, c]))
            for r, c in np.argwhere((shown > 0) | is_match).tolist()
        ],
        num_known=num_known,
        side=int(min(34, max(9, 620 // max(shown.shape)))),
        correct=int(shown[is_match].sum()),
        total=total,
    )


def choose_points(num_rows: int, seed: int) -> NDArray[np.int64]:
    """Choose the rows of a sample that the t-SNE map shows, at random.

    Args:
        num_rows: Number of rows in the sample.
        seed: Seed of the random choice.

    Returns:
        Indices int64 in ascending order: of ``MAX_POINTS`` (1,500) rows, or of all if
        there are no more.
    """
    return np.sort(
        np.random.default_rng([seed, REPORT_MAP]).permutation(num_rows)[:MAX_POINTS]
    )


def place_points(
    features: NDArray[np.float32], seed: int
) -> tuple[NDArray[np.int64], str] | None:
    """Compute a two-dimensional map of features, by PCA and then t-SNE.

    PCA keeps at most 50 dimensions. The perplexity of t-SNE is 30, or less for fewer
    than 91 rows. The map is centered, and scaled alike in both directions. This uses
    one thread. Features that are NaN count as 0.

    Args:
        features: Features (P, D).
        seed: Seed of PCA and t-SNE.

    Returns:
        Coordinates (x, y) of the rows, int64 (P, 2), from 20 to 980, in a drawing with
        sides of ``EXTENT`` (1,000); and a text for people that says how they were
        computed. A single None if there are fewer than ``MIN_POINTS`` (10) rows, fewer
        than two features, or all rows are practically the same.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    data = np.nan_to_num(features.astype(np.float64))
    num, width = data.shape
    spread = data.std(axis=0).max(initial=0)
    if num < MIN_POINTS or width < 2 or spread <= 1e-6 * np.abs(data).max():
        return None
    dimensions = min(PCA_DIMENSIONS, num, width)
    perplexity = min(30.0, (num - 1) / 3)
    # more threads spin: 4-10 times slower where the cores are shared
    with threadpool_limits(1):
        pca = PCA(dimensions, svd_solver="full", random_state=seed)
        reduced = pca.fit_transform(data / data.std()).astype(np.float32)
        tsne = TSNE(
            perplexity=perplexity, init="pca", max_iter=TSNE_STEPS, random_state=seed
        )
        xy = tsne.fit_transform(reduced)
    low, high = xy.min(axis=0), xy.max(axis=0)
    scale = (EXTENT - 40) / max(1e-9, float((high - low).max()))
    placed = np.rint((xy - (low + high) / 2) * scale + EXTENT / 2).astype(np.int64)
    return placed, (
        f"Encoder output, {width} dimensions. PCA to {dimensions} dimensions, then"
        f" t-SNE (perplexity {perplexity:.0f})."
    )


class Group(NamedTuple):
    """The points of one class in a map.

    Attributes:
        class_index: The class, or -1 for rows without a true class.
        name: Its name.
        kind: "known", "novel", or "none" for rows without a true class.
        color: CSS class of its color.
        path: SVG path of the points.
        middle: Median (x, y) of the points.
    """

    class_index: int
    name: str
    kind: str
    color: str
    path: str
    middle: list[int]


def group_points(
    classes: NDArray[np.int64],
    names: Sequence[str],
    num_known: int,
    colors: Sequence[int],
    xy: NDArray[np.int64],
) -> list[Group]:
    """Group the points of a t-SNE map by class, to draw each class in its color.

    Args:
        classes: The class of each point, int64 (P,); -1 if it is unknown.
        names: Names of the classes, known ones first.
        num_known: Number of known classes.
        colors: For each class the number of its color in the style sheet.
        xy: Coordinates of the points, int64 (P, 2).

    Returns:
        A group for each class that has a point, in the order of classes. Points without
        a class, if any, are a first group with the name "no truth" and the kind "none".
    """
    groups = []
    for index in np.unique(classes).tolist():
        points = xy[classes == index]
        name, kind, color = "no truth", "none", "k-none"
        if index >= 0:
            name, color = names[index], f"k{colors[index]}"
            kind = "known" if index < num_known else "novel"
        path = "".join(f"M{x} {y}h0" for x, y in points)
        middle = np.median(points, axis=0).astype(int).tolist()
        groups.append(Group(index, name, kind, color, path, middle))
    return groups
