"""The expected accuracy: the calibration line, its interval and its range."""

import numpy as np
import pytest

from benchmarks.tasks import fit_line
from uno.expectation import (
    calibration,
    describe_outside,
    expected_accuracy,
    logit,
    mean_logit,
    outside_calibration,
    sigmoid,
)


def test_a_line_and_its_interval_are_found_again():
    """Tasks on a line with known noise: intercept, slope and quantiles are the true
    ones; the interval holds nine tenths of the tasks, and the mean is without bias.
    """
    random = np.random.default_rng(0)
    agreement = random.uniform(-1, 2, 3_000)
    accuracy = sigmoid(0.3 + 1.2 * agreement + random.normal(0, 0.4, 3_000))
    line = fit_line(agreement, accuracy, random.integers(0, 10, 3_000))
    assert (line.intercept, line.slope) == pytest.approx((0.3, 1.2), abs=0.05)
    assert (line.low, line.high) == pytest.approx((-0.66, 0.66), abs=0.05)
    found = [line(value) for value in agreement]
    inside = [e.low <= a <= e.high for e, a in zip(found, accuracy, strict=True)]
    assert 0.87 < np.mean(inside) < 0.93
    assert np.mean([e.mean for e in found]) == pytest.approx(accuracy.mean(), abs=0.01)


def test_residuals_are_those_of_sets_that_were_left_out():
    """One set lies apart: a line fitted with it would make its residuals too small."""
    sets = np.repeat(["a", "b", "c"], 20)
    agreement = np.tile(np.linspace(-1, 1, 20), 3)
    accuracy = sigmoid(agreement - 2.0 * (sets == "c"))
    line = fit_line(agreement, accuracy, sets)
    assert line.low == pytest.approx(-2.0, abs=1e-6)


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
@pytest.mark.parametrize("agreement", [[0.0] * 8, [1.0] * 8, [0.2, 1.0]])
def test_an_interval_is_whole_percents_around_the_mean(setting, agreement):
    expected = expected_accuracy(agreement, setting)
    assert 0 <= expected.low <= expected.high <= 1
    assert expected.low - 0.005 <= expected.mean <= expected.high + 0.005
    for end in (expected.low, expected.high):
        assert 100 * end == pytest.approx(round(100 * end))


def test_no_agreement_is_no_expectation():
    assert expected_accuracy([], "ncd") is None


def test_agreements_of_zero_and_one_are_finite():
    assert mean_logit([0.0, 1.0]) == pytest.approx(0)
    assert np.isfinite(logit(np.array([0.0, 1.0]))).all()


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
