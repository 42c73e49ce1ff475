"""UNO itself (Fini et al., ICCV 2021), with the heads of :mod:`uno.model`.

The step is :func:`uno.objective.discovery_step`. If the objective asks for terms of
later work, it is that of :mod:`uno.methods.extensions`.
"""

from uno.config import EXTENSIONS
from uno.methods import Method, extensions
from uno.objective import discovery_step

METHOD = Method(
    "uno",
    discovery_step,
    start=extensions.start,
    gcd=True,
    extends=True,
    teacher=lambda config: config.objective.rkd_weight > 0,
    variant=lambda config: (
        extensions.step
        if any(getattr(config.objective, name) for name in EXTENSIONS)
        else None
    ),
)
