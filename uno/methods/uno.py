"""UNO itself: the step is :func:`uno.steps.discovery_step`, the heads are those of :mod:`uno.model`."""

from uno.methods.method import Method
from uno.steps import discovery_step

METHOD = Method(discovery_step)
