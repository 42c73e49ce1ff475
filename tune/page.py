"""The sweep's page: drawings as numbers here, markup in ``templates/sweep.html``; no script, no request."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tune import records
from tune.records import FAILED, FINISHED, Trial
from tune.score import SCORES
from tune.spaces import Domain

if TYPE_CHECKING:
    from tune.report import Summary

WIDTH, HEIGHT = 320, 170
WIDE = 680
MAX_CURVES = 200


@dataclass(frozen=True)
class Axis:
    """Ticks of an axis as (position in pixels, label)."""

    label: str
    ticks: list[tuple[float, str]]


@dataclass(frozen=True)
class Dot:
    """A trial in a drawing; ``kind`` is finished, stopped, failed or best, ``text`` its tooltip."""

    x: float
    y: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Dots and lines of one drawing; lines are (kind, SVG path)."""

    title: str
    x: Axis
    y: Axis
    dots: list[Dot]
    lines: list[tuple[str, str]]
    width: int = WIDTH
    height: int = HEIGHT


def render(summary: Summary) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("tune", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["duration"] = duration
    best = records.best_trial(summary.trials)
    ranked = records.ranking(summary.trials)
    others = sorted((t for t in summary.trials if t not in ranked), key=lambda t: t.index)
    context: dict[str, Any] = {
        "summary": summary,
        "best": best,
        "kept": best is not None and best is not ranked[0],
        "default": next((trial for trial in ranked if trial.index == 0), None),
        "ranked": ranked,
        "others": others,
        "sentence": SCORES[summary.settings["score"]],
        "counts": {
            kind: sum(t.status == kind for t in summary.trials) for kind in ("finished", "stopped", "failed")
        },
        "progress": best_so_far(summary.trials),
        "curves": learning_curves(summary, best),
        "scatters": [scatter(domain, summary.trials, best) for domain in summary.space],
        "parallel": parallel(summary.space, ranked, best),
        "generated": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }
    page = environment.get_template("sweep.html").render(context)
    return page.encode("utf-8", "replace").decode()


def duration(seconds: float) -> str:
    """Seconds as ``48 s``, ``12 min`` or ``3.2 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# -------------------------------------------------------------------------------------------------- positions
def position(domain: Domain, value: Any) -> float:
    """Where a value lies in its domain, 0 to 1, the inverse of :meth:`Domain.at`; clipped outside."""
    if domain.choices:
        value = tuple(value) if isinstance(value, list) else value
        last = max(1, len(domain.choices) - 1)
        if value in domain.choices:
            return domain.choices.index(value) / last
        numbers = [c for c in domain.choices if isinstance(c, int | float)]
        below = sum(c < value for c in numbers) if isinstance(value, int | float) else 0
        return min(max((below - 0.5) / last, 0.0), 1.0)  # between its neighbours
    assert domain.low is not None and domain.high is not None
    low, high, at = float(domain.low), float(domain.high), float(value)
    if domain.scale == "log":
        low, high, at = math.log(low), math.log(high), math.log(max(at, 1e-300))
    return min(max((at - low) / (high - low), 0.0), 1.0)


def value_ticks(domain: Domain, length: float) -> list[tuple[float, str]]:
    """Ticks of an axis that shows a domain."""
    last = max(1, len(domain.choices) - 1)
    if domain.choices:
        step = max(1, len(domain.choices) // 6)
        shown = [
            (i, c) for i, c in enumerate(domain.choices) if i % step == 0 or i == len(domain.choices) - 1
        ]
        return [(round(i / last * length, 1), _short(c)) for i, c in shown]
    if domain.scale == "int":
        assert domain.low is not None and domain.high is not None
        values: list[Any] = list(
            range(int(domain.low), int(domain.high) + 1, max(1, int(domain.high - domain.low) // 6))
        )
    else:
        values = [domain.at(share) for share in (0, 0.25, 0.5, 0.75, 1 - 1e-12)]
    return [(round(position(domain, v) * length, 1), _short(v)) for v in values]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2g}"
    if isinstance(value, list | tuple):
        return "-".join(_short(v) for v in value)
    text = str(value)
    return text if len(text) <= 14 else f"{text[:13]}…"


class _Scale:
    """Scores to pixels from the bottom of a drawing, with a little air."""

    def __init__(self, values: Sequence[float], height: float = HEIGHT) -> None:
        finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        air = (high - low) * 0.06 or 0.05
        self._low, self._high, self._height = low - air, high + air, height

    def __call__(self, value: float) -> float:
        return round(self._height * (1 - (value - self._low) / (self._high - self._low)), 1)

    def axis(self) -> Axis:
        raw = (self._high - self._low) / 4
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * min((1, 2, 5, 10), key=lambda m: abs(m * power - raw))
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return Axis("score", [(self(i * step), f"{i * step:.6g}") for i in range(first, last + 1)])


# --------------------------------------------------------------------------------------------------- drawings
def _scored(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if math.isfinite(trial.score)]


def _dot(trial: Trial, best: Trial | None, x: float, y: float) -> Dot:
    kind = "best" if trial is best else trial.status or "unfinished"
    values = ", ".join(f"{key.rpartition('.')[2]} {_short(value)}" for key, value in trial.overrides.items())
    how = f"{trial.status or 'unfinished'}, epoch {trial.last_epoch}"
    return Dot(round(x, 1), y, kind, f"trial {trial.index} ({how}): {trial.score:.4f}; {values}")


def best_so_far(trials: Sequence[Trial]) -> Chart | None:
    """Score of each trial by its number, and the best of the finished ones up to there."""
    shown = _scored(trials)
    if not shown:
        return None
    best = records.best_trial(list(trials))
    scale = _Scale([trial.score for trial in shown])
    last = max(1, max(trial.index for trial in shown))
    path: list[str] = []
    top = -math.inf
    for trial in shown:
        x = trial.index / last * WIDE
        if trial.status == FINISHED and trial.score > top:
            path.append(f"M{x:.1f} {scale(trial.score)}" if not path else f"V{scale(trial.score)}")
            top = trial.score
        if path:
            path.append(f"H{x:.1f}")
    dots = [_dot(trial, best, trial.index / last * WIDE, scale(trial.score)) for trial in shown]
    step = max(1, (last + 1) // 10)
    ticks = [(round(i / last * WIDE, 1), str(i)) for i in range(0, last + 1, step)]
    return Chart("Best so far", Axis("trial", ticks), scale.axis(), dots, [("best", "".join(path))], WIDE)


def learning_curves(summary: Summary, best: Trial | None) -> Chart | None:
    """Score by epoch, a line for each trial: where early stopping cut."""
    shown = [trial for trial in summary.trials if trial.epochs][:MAX_CURVES]
    if not shown:
        return None
    scale = _Scale([line["score"] for trial in shown for line in trial.epochs])
    span = max(1, summary.num_epochs - 1)
    lines, dots = [], []
    for trial in sorted(shown, key=lambda t: t is best):
        points = [((line["epoch"] - 1) / span * WIDE, scale(line["score"])) for line in trial.epochs]
        kind = "best" if trial is best else trial.status or "unfinished"
        lines.append((kind, "M" + "L".join(f"{x:.1f} {y}" for x, y in points)))
        dots.append(_dot(trial, best, *points[-1]))
    step = max(1, summary.num_epochs // 10)
    ticks = [(round((e - 1) / span * WIDE, 1), str(e)) for e in range(step, summary.num_epochs + 1, step)]
    return Chart("Score by epoch", Axis("epoch", ticks), scale.axis(), dots, lines, WIDE)


def scatter(domain: Domain, trials: Sequence[Trial], best: Trial | None) -> Chart:
    """Score over the values of one key."""
    shown = _scored(trials)
    scale = _Scale([trial.score for trial in shown])
    dots = [
        _dot(trial, best, position(domain, trial.overrides[domain.key]) * WIDTH, scale(trial.score))
        for trial in sorted(shown, key=lambda t: t is best)
    ]
    return Chart(domain.key, Axis(domain.key, value_ticks(domain, WIDTH)), scale.axis(), dots, [])


def parallel(space: Sequence[Domain], ranked: Sequence[Trial], best: Trial | None) -> dict[str, Any] | None:
    """Parallel coordinates: a line for each trial through its values to its score; best last, so on top."""
    if len(ranked) < 2:
        return None
    scale = _Scale([trial.score for trial in ranked])
    gap = WIDE / len(space)
    axes = [
        {
            "x": round(i * gap, 1),
            "label": d.key.rpartition(".")[2],
            "ticks": [(HEIGHT - y, t) for y, t in value_ticks(d, HEIGHT)],
        }
        for i, d in enumerate(space)
    ]
    axes.append({"x": float(WIDE), "label": "score", "ticks": scale.axis().ticks})
    lines = []
    for rank, trial in reversed(list(enumerate(ranked))):
        heights = [HEIGHT * (1 - position(domain, trial.overrides[domain.key])) for domain in space]
        points = [(i * gap, y) for i, y in enumerate(heights)] + [(float(WIDE), scale(trial.score))]
        kind = "best" if trial is best else trial.status or FAILED
        weight = round(0.85 - 0.65 * rank / len(ranked), 2)
        lines.append((kind, "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), weight))
    return {"axes": axes, "lines": lines}
