"""Estimate the accuracy of clusters without labels, from how far clusterings agree.

A clustering that other clusterings of the same rows reproduce is usually right, and one
that changes with the seed or with the rows is not. The agreement of two clusterings is
the share of the rows on which they agree, under the best one-to-one matching of their
clusters. The mean logit of the agreements is mapped linearly to the logit of the
accuracy. The line and its residuals were fitted on tasks of data sets whose classes are
known, and are stored with their source in ``expectation.json`` (written by ``python -m
benchmarks.tasks fit``).
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
    """The line from agreements of clusterings to accuracies, both as logits.

    Attributes:
        intercept: Logit of the accuracy where the mean logit of the agreements is 0.
        slope: Change of the logit of the accuracy per unit of the mean logit of the
            agreements.
        residuals: Evenly spaced quantiles of the residuals (logit of the accuracy minus
            the line), in ascending order.
        low: The quantile (1 - ``LEVEL``) / 2 of the residuals.
        high: The quantile (1 + ``LEVEL``) / 2 of the residuals.
    """

    intercept: float
    slope: float
    residuals: Sequence[float]
    low: float
    high: float

    def __call__(self, agreement: float) -> Expectation:
        """Return the expected accuracy of a clustering, with its interval.

        The expected accuracy is the mean of the accuracies that the stored residuals
        around the line give, not the accuracy on the line itself.

        Args:
            agreement: The mean logit of the shares of rows on which other clusterings
                agree with it, see :func:`mean_logit`.
        """
        middle = self.intercept + self.slope * agreement
        mean = float(np.mean(sigmoid(middle + np.array(self.residuals))))
        low, high = sigmoid(middle + np.array([self.low, self.high]))
        return Expectation(mean, round(float(low), 2), round(float(high), 2))


def logit(share: Any) -> Any:
    """Return the log-odds of a share or an array of shares, each from 0 to 1.

    A share nearer than ``SMALLEST`` to 0 or 1 counts as that near, so that none of the
    results is infinite.
    """
    share = np.clip(share, SMALLEST, 1 - SMALLEST)
    return np.log(share / (1 - share))


def sigmoid(value: Any) -> Any:
    """Return the share, 0 to 1, whose log-odds are ``value``, a number or an array."""
    return 1 / (1 + np.exp(-value))


def mean_logit(agreement: Sequence[float]) -> float:
    """Return the mean of the log-odds of agreements of clusterings.

    Args:
        agreement: The share of rows, 0 to 1, on which each of A > 0 other clusterings
            agrees with a clustering; (A,). A share nearer than ``SMALLEST`` to 0 or 1
            counts as that near.
    """
    return float(np.mean(logit(np.asarray(agreement))))


def expected_accuracy(
    agreement: Sequence[float], setting: str, matching: Matching = "one_to_one"
) -> Expectation | None:
    """Return the accuracy to expect of clusters of a frozen encoder's features.

    Args:
        agreement: The shares of unlabeled rows, 0 to 1, on which A other clusterings
            agree with these clusters, (A,), as
            :func:`uno.clustering.frozen.measure_agreement` returns them.
        setting: ``"ncd"``: accuracy on the images of novel classes. ``"gcd"``: accuracy
            on all unlabeled images.
        matching: How clusters are matched with classes before correct images are
            counted. ``"one_to_one"``: all clusters with all classes. ``"strict"``:
            clusters of known classes stand for these, and only novel clusters are
            matched; only ``gcd`` has it. In ``ncd`` both would be the same.

    Returns:
        The expected accuracy, 0 to 1, and its interval, by the stored line of the
        setting and matching; or None if ``agreement`` is empty.

    Raises:
        KeyError: There is no stored line for the setting and matching, as for ``"ncd"``
            with ``"strict"``.
    """
    if not len(agreement):
        return None
    line = Line(**calibration()["lines"][setting][matching])
    return line(mean_logit(agreement))


def outside_calibration(
    num_rows: int, num_known: int, num_novel: int, encoder: str
) -> dict[str, float]:
    """Return the properties of a task for which its expected accuracy is less certain.

    The interval of an expected accuracy holds for tasks like those that it was
    calibrated on. The properties are numbers outside the range of these tasks, another
    encoder than theirs, and a single known class: there are calibration tasks with one
    known class, but the expectations of such tasks were too high.

    Args:
        num_rows: Number of unlabeled rows, which are images or vectors.
        num_known: Number of known classes.
        num_novel: Number of novel classes.
        encoder: Name of the encoder, ``config.model.encoder``. All names that begin
            with ``vectors:`` count as one encoder.

    Returns:
        Numbers by property. ``"unlabeled images"``, ``"known classes"`` and ``"novel
        classes"`` have the number of the task, if it is outside the range of the
        calibration tasks. ``"encoder"`` has 1.0 if no calibration task has this
        encoder. ``"one known class"`` has 1.0 if there is only one. Other properties
        are left out.
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
    """Describe in words why the expected accuracy of a task is less certain.

    Its numbers or its encoder are outside the calibration tasks, or it has a single
    known class: the expectations of such tasks in the calibration were too high.

    Args:
        values: The numbers by property that :func:`outside_calibration` returns.

    Returns:
        One phrase for each property, such as ``"40 novel classes (calibrated on 2 to
        10)"``. The numbers come first, then another encoder, then one known class.
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
    """Read the stored calibration of expected accuracies from ``expectation.json``.

    The file is read once in a process.

    Returns:
        A mapping. ``source`` is a text that names the command that wrote it and the
        table of tasks that the command read. ``sets`` and ``num_tasks`` are the names
        of the data sets and the number of tasks that it was fitted to. ``ranges`` has
        the smallest and largest number of unlabeled images, known classes and novel
        classes of these tasks, and the list of their encoders. ``lines`` has the fields
        of a :class:`Line` for each setting (``ncd``, ``gcd``) and, below it, each
        matching: ``one_to_one``, and for ``gcd`` also ``strict``.
    """
    text = files("uno").joinpath(CALIBRATION_FILE).read_text("utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found
