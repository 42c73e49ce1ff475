"""What accuracy to expect of clusters, from how far clusterings agree.

A clustering that other clusterings of the same rows reproduce is usually right, and one
that changes with the seed or with the rows is not. The logit of the mean agreement is
mapped linearly to the logit of the accuracy. The line and its residuals were fitted on
tasks of data sets whose classes are known, and are stored with their source in
``expectation.json`` (written by ``python -m benchmarks.tasks fit``).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

CALIBRATION_FILE = "expectation.json"
SMALLEST = 0.005  # agreements and accuracies nearer to 0 or 1 count as this near
COUNTED = ("unlabeled images", "known classes", "novel classes")
# Expectations of tasks with one known class were too high by this many points, on
# average of tasks whose data set was left out of the fit (docs/results/clustering.md).
TOO_HIGH_WITH_ONE_CLASS = "6 to 8"
LEVEL = 0.9  # share of the tasks whose accuracy the interval holds

Matching = Literal["one_to_one", "strict"]


@dataclass(frozen=True)
class Expectation:
    """An expected accuracy with its interval, as fractions 0 to 1.

    Attributes:
        mean: The expected accuracy.
        low: The lower end of the interval that holds nine tenths of such tasks, rounded
            to whole percent.
        high: Its upper end, rounded alike.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """A calibration line on the logit scale, with the quantiles of its residuals.

    Attributes:
        intercept: Logit of the accuracy where the logit of the agreement is 0.
        slope: Change of the one with the other.
        residuals: Evenly spaced quantiles of the residuals, in ascending order.
        low: The residual's quantile (1 - ``LEVEL``) / 2.
        high: Its quantile (1 + ``LEVEL``) / 2.
    """

    intercept: float
    slope: float
    residuals: Sequence[float]
    low: float
    high: float

    def __call__(self, agreement: float) -> Expectation:
        """Return the accuracy to expect for a mean logit of agreements."""
        middle = self.intercept + self.slope * agreement
        mean = float(np.mean(sigmoid(middle + np.array(self.residuals))))
        low, high = sigmoid(middle + np.array([self.low, self.high]))
        return Expectation(mean, round(float(low), 2), round(float(high), 2))


def fit_line(agreement: np.ndarray, accuracy: np.ndarray, groups: np.ndarray) -> Line:
    """Fit the line from agreements to logits of accuracies by least squares.

    Accuracies are kept ``SMALLEST`` away from 0 and 1. Residuals are differences of
    logits, each from a line that was fitted without the data set of its task.

    Args:
        agreement: Mean logits of agreements (T,), of :func:`mean_logit`, one a task.
        accuracy: True accuracies (T,), 0 to 1.
        groups: Names (T,) of the data sets that the tasks are from, at least three.

    Returns:
        The line of all tasks. Its residuals are those of lines that were fitted without
        the task's data set, so that they show how far a new data set may be off.
    """
    target = logit(accuracy)

    def fit(rows: np.ndarray) -> np.ndarray:
        design = np.stack([np.ones(rows.sum()), agreement[rows]], axis=1)
        return np.linalg.lstsq(design, target[rows], rcond=None)[0]

    residuals = np.empty(len(target))
    for name in np.unique(groups):
        own = groups == name
        intercept, slope = fit(~own)
        residuals[own] = target[own] - intercept - slope * agreement[own]
    intercept, slope = fit(np.ones(len(target), dtype=bool))
    low, high = np.quantile(residuals, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    quantiles = np.quantile(residuals, (np.arange(20) + 0.5) / 20)
    return Line(
        float(intercept), float(slope), quantiles.tolist(), float(low), float(high)
    )


def logit(share: Any) -> Any:
    """Return the log-odds of shares, which are kept ``SMALLEST`` away from 0 and 1."""
    share = np.clip(share, SMALLEST, 1 - SMALLEST)
    return np.log(share / (1 - share))


def sigmoid(value: Any) -> Any:
    """Return the share 0 to 1 whose log-odds are ``value``."""
    return 1 / (1 + np.exp(-value))


def mean_logit(agreement: Sequence[float]) -> float:
    """Return the mean log-odds of agreements (A,), A > 0, of which none is infinite.

    Agreements are kept ``SMALLEST`` away from 0 and 1.
    """
    return float(np.mean(logit(np.asarray(agreement))))


def expected_accuracy(
    agreement: Sequence[float], setting: str, matching: Matching = "one_to_one"
) -> Expectation | None:
    """Return the accuracy to expect of clusters of frozen features.

    Args:
        agreement: Shares (A,) of :func:`uno.clustering.frozen.measure_agreement`.
        setting: ``"ncd"``: accuracy on the images of novel classes. ``"gcd"``: accuracy
            on all unlabeled images.
        matching: ``"one_to_one"``: all clusters are matched with all classes.
            ``"strict"``: clusters of known classes stand for these, and only novel
            clusters are matched. Both are the same in ``ncd``.

    Returns:
        The expectation, or None if there are no agreements.
    """
    if not len(agreement):
        return None
    line = Line(**calibration()["lines"][setting][matching])
    return line(mean_logit(agreement))


def outside_calibration(
    num_rows: int, num_known: int, num_novel: int, encoder: str
) -> dict[str, float]:
    """Tell why the expectation of a task is less certain than its interval says.

    Args:
        num_rows: Number of unlabeled rows.
        num_known: Number of known classes.
        num_novel: Number of novel classes.
        encoder: ``config.model.encoder``.

    Returns:
        The values outside the range of the tasks that the expectation was fitted to, by
        ``"unlabeled images"``, ``"known classes"`` and ``"novel classes"``;
        ``"encoder"``: 1.0 if the encoder is none of those of these tasks, where all
        stored vectors count as one; and ``"one known class"``: 1.0 if there is only
        one.
    """
    values = dict(zip(COUNTED, (num_rows, num_known, num_novel), strict=True))
    ranges = calibration()["ranges"]
    found = {
        name: float(value)
        for name, value in values.items()
        if not ranges[name][0] <= value <= ranges[name][1]
    }
    kind = "vectors" if encoder.startswith("vectors:") else encoder
    if kind not in ranges["encoders"]:
        found["encoder"] = 1.0
    if num_known == 1:
        found["one known class"] = 1.0
    return found


def describe_outside(values: Mapping[str, float]) -> list[str]:
    """Describe what :func:`outside_calibration` has returned, one phrase a value.

    An example is ``"40 novel classes (calibrated on 2 to 10)"``.
    """
    ranges = calibration()["ranges"]
    found = [
        f"{values[name]:,.0f} {name} (calibrated on {ranges[name][0]:,} to"
        f" {ranges[name][1]:,})"
        for name in COUNTED
        if name in values
    ]
    if "encoder" in values:
        names = ", ".join(ranges["encoders"])
        found.append(f"another encoder (calibrated on {names})")
    if "one known class" in values:
        found.append(
            "one known class (expectations of such tasks were"
            f" {TOO_HIGH_WITH_ONE_CLASS} points too high)"
        )
    return found


@cache
def calibration() -> Mapping[str, Any]:
    """Read the stored calibration.

    Returns:
        ``source``: the command that wrote it; ``sets`` and ``num_tasks``: its data;
        ``ranges``: smallest and largest number of images and classes, and the encoders;
        ``lines``: setting -> matching -> the fields of a :class:`Line`.
    """
    text = files("uno").joinpath(CALIBRATION_FILE).read_text("utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found
