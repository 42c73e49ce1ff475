"""Learning rate as a pure function of the step (paper Sec. 4.1: linear warm-up, cosine annealing)."""

from __future__ import annotations

import math


def warmup_cosine(step: int, total_steps: int, warmup_steps: int, base_lr: float, min_lr: float) -> float:
    """Learning rate of optimizer step ``step`` (0-based).

    Rises linearly from ``min_lr`` at step 0 to ``base_lr`` at step ``warmup_steps``, then follows half a
    cosine to ``min_lr`` at the last step. Any ``warmup_steps`` is valid, 0 and ``total_steps`` included.
    """
    if step < warmup_steps:
        return min_lr + (base_lr - min_lr) * step / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return min_lr + (base_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
