"""The learning rate at its end points, and for every length of warm-up."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from uno.config import PhaseConfig
from uno.training import Phase, warmup_cosine

BASE, MIN = 0.1, 0.001


def curve(total_steps: int, warmup_steps: int) -> list[float]:
    return [
        warmup_cosine(step, total_steps, warmup_steps, BASE, MIN)
        for step in range(total_steps)
    ]


@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 10, 98])
def test_end_points_are_exact(warmup_steps):
    """Kills: division by zero at a warm-up of 0 or 1, a last step above min_lr, a peak
    that is not met, linear decay, a quarter or a whole period.
    """
    rates = curve(100, warmup_steps)
    assert rates[0] == (MIN if warmup_steps else pytest.approx(BASE, rel=1e-15))
    assert rates[warmup_steps] == pytest.approx(BASE, rel=1e-15)
    assert rates[-1] == MIN
    for step in range(warmup_steps):
        assert rates[step] == pytest.approx(
            MIN + (BASE - MIN) * step / warmup_steps, rel=1e-12
        )
    for step in range(warmup_steps, 99):
        cosine = math.cos(math.pi * (step - warmup_steps) / (99 - warmup_steps))
        assert rates[step] == pytest.approx(
            MIN + (BASE - MIN) * (1 + cosine) / 2, rel=1e-12
        )


@settings(max_examples=100, deadline=None, derandomize=True)
@example(total_steps=1, warmup_steps=0)
@example(total_steps=1, warmup_steps=1)
@given(total_steps=st.integers(1, 200), warmup_steps=st.integers(0, 250))
def test_rises_then_falls(total_steps, warmup_steps):
    """Kills: a jump where warm-up ends, a cosine that turns up again, NaN for a
    warm-up longer than all.
    """
    rates = curve(total_steps, warmup_steps)
    assert all(math.isfinite(rate) and MIN <= rate <= BASE for rate in rates)
    top = min(warmup_steps, total_steps - 1)
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a > b for a, b in pairwise(rates[top:]))
    if warmup_steps >= 2:
        steps = [b - a for a, b in pairwise(rates[: top + 1])]
        assert all(step == pytest.approx((BASE - MIN) / warmup_steps) for step in steps)


@pytest.mark.parametrize(
    ("warmup_epochs", "warmup_steps"), [(0, 0), (1, 7), (0.5, 4), (3, 21), (40, 280)]
)
def test_warmup_is_counted_in_epochs(warmup_epochs, warmup_steps):
    """Kills: warm-up in steps, max_steps that squeezes the schedule."""
    config = PhaseConfig(
        epochs=20, warmup_epochs=warmup_epochs, base_lr=BASE, min_lr=MIN
    )
    for max_steps in (None, 5):
        phase = Phase("discover", config, 7, 32, max_steps, lambda *args: None)
        assert (phase.total_steps, phase.last_step) == (140, max_steps or 140)
        assert [phase.lr(step) for step in range(140)] == curve(140, warmup_steps)
