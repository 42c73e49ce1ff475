"""UNO itself: the step of :func:`uno.steps.discovery_step`, or, where the objective asks for terms of later
work, that of :mod:`uno.methods.extensions`; the heads of :mod:`uno.model`.
"""

from torch import Tensor

from uno.config import EXTENSIONS, Config
from uno.methods import Method, extensions
from uno.state import TrainState
from uno.steps import Batch, discovery_step


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """The paper's step, or the one with the additions that the objective asks for. Returns (1,)."""
    extended = any(getattr(config.objective, name) for name in EXTENSIONS)
    return (extensions.step if extended else discovery_step)(state, batch, config, lr)


def wants_teacher(config: Config) -> bool:
    """Whether rKD is on."""
    return config.objective.rkd_weight > 0


METHOD = Method("uno", step, start=extensions.start, gcd=True, teacher=wants_teacher, extends=True)
