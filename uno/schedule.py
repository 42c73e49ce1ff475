"""Schedules of the learning rate and of loss weights, as pure functions.

The learning rate follows the paper's Sec. 4.1: linear warm-up, cosine annealing.
"""

import math


def sigmoid_rampup(progress: float, rampup: float) -> float:
    """Return the weight of a loss during a sigmoid ramp-up (Laine & Aila, 2017).

    Args:
        progress: The share of the phase that is done, 0-1.
        rampup: The share of the phase that the ramp takes.

    Returns:
        ``exp(-5 (1 - t)^2)`` with t = ``progress / rampup``, at most 1. That is from
        0.0067 to 1.
    """
    t = 1.0 if progress >= rampup else progress / rampup
    return math.exp(-5 * (1 - t) ** 2)


def warmup_cosine(
    step: int, total_steps: int, warmup_steps: int, base_lr: float, min_lr: float
) -> float:
    """Return the learning rate of an optimizer step.

    It rises linearly from ``min_lr`` at step 0 to ``base_lr`` after ``warmup_steps``,
    then falls along half a cosine to ``min_lr`` at the last step.

    Args:
        step: The number of the step, from 0.
        total_steps: The number of steps of the phase.
        warmup_steps: The number of warm-up steps, which may be any.
        base_lr: The highest learning rate.
        min_lr: The learning rate at the start and at the end.
    """
    if step < warmup_steps:
        return min_lr + (base_lr - min_lr) * step / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return min_lr + (base_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
