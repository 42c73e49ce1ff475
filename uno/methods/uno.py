"""UNO itself: the step of :func:`uno.steps.discovery_step`, or, where the objective asks for terms of later
work, that of :mod:`uno.methods.extensions`; the heads of :mod:`uno.model`.
"""

from uno.config import EXTENSIONS, Config
from uno.methods import Method, extensions
from uno.steps import Step, discovery_step


def extended(config: Config) -> Step | None:
    """The step with the additions that the objective asks for, if it asks for any."""
    return extensions.step if any(getattr(config.objective, name) for name in EXTENSIONS) else None


def wants_teacher(config: Config) -> bool:
    """Whether rKD is on."""
    return config.objective.rkd_weight > 0


METHOD = Method(
    "uno", discovery_step, start=extensions.start, gcd=True, teacher=wants_teacher, extends=True,
    variant=extended,
)  # fmt: skip
