"""The expected accuracy: the calibration line, its interval and its range."""

import numpy as np
import pytest

from uno.expectation import (
    Line,
    calibration,
    describe_outside,
    expected_accuracy,
    outside_calibration,
    sigmoid,
)


def test_the_mean_and_the_interval_follow_from_the_line_and_its_residuals():
    """The residuals are normal: the interval holds nine tenths of such tasks, and the
    mean is without bias, which the accuracy of the middle is not.
    """
    random = np.random.default_rng(0)
    residuals = np.sort(random.normal(0, 0.8, 5_000))
    low, high = np.quantile(residuals, [0.05, 0.95])
    expected = Line(0.3, 1.2, residuals[50::100], low, high)(1.0)
    accuracy = sigmoid(1.5 + random.normal(0, 0.8, 20_000))
    is_inside = (expected.low <= accuracy) & (accuracy <= expected.high)
    assert is_inside.mean() == pytest.approx(0.9, abs=0.02)
    assert expected.mean == pytest.approx(accuracy.mean(), abs=0.005)
    assert expected.mean < sigmoid(1.5) - 0.015


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
@pytest.mark.parametrize("agreement", [[0.0] * 8, [1.0] * 8, [0.0, 1.0]])
def test_an_interval_is_whole_percents_around_the_mean(setting, agreement):
    """Kills: logits of 0 and 1 that are infinite."""
    expected = expected_accuracy(agreement, setting)
    assert 0 <= expected.low <= expected.high <= 1
    assert expected.low - 0.005 <= expected.mean <= expected.high + 0.005
    for end in (expected.low, expected.high):
        assert 100 * end == pytest.approx(round(100 * end))


def test_what_lies_outside_the_calibration_is_named_with_the_range():
    ranges = calibration()["ranges"]
    (_, labeled), (_, known), (_, novel), *_ = ranges.values()
    encoder = ranges["encoders"][0]
    assert outside_calibration(labeled, known, novel, encoder) == {}
    found = outside_calibration(labeled, known, 5_000, "torchvision:resnet50")
    assert set(found) == {"novel classes", "encoder"}
    few, other = describe_outside(found)
    assert few.startswith("5,000 novel classes (calibrated on ")
    assert encoder in other


def test_one_known_class_is_named_because_its_expectation_is_too_high():
    found = outside_calibration(100, 1, 5, "vectors:x")
    assert set(found) == {"one known class"}
    assert "points too high" in describe_outside(found)[0]
