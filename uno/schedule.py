"""Learning rate (paper Sec. 4.1: linear warm-up, cosine annealing) and ramps, as
pure functions.
"""

import math


def sigmoid_rampup(progress: float, rampup: float) -> float:
    """``exp(-5 (1 - t)^2)``, t = progress / rampup up to 1, both shares of the phase
    (Laine & Aila 2017).
    """
    t = 1.0 if progress >= rampup else progress / rampup
    return math.exp(-5 * (1 - t) ** 2)


def warmup_cosine(
    step: int, total_steps: int, warmup_steps: int, base_lr: float, min_lr: float
) -> float:
    """Learning rate of optimizer step ``step`` (0-based), for any number of warm-up
    steps.

    Linear from ``min_lr`` at step 0 to ``base_lr`` after ``warmup_steps``, then half a
    cosine to ``min_lr`` at the last step.
    """
    if step < warmup_steps:
        return min_lr + (base_lr - min_lr) * step / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return min_lr + (base_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
