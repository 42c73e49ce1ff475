"""UNO itself: the step is :func:`uno.steps.discovery_step`, the heads are those of :mod:`uno.model`."""

from __future__ import annotations

from uno.methods.method import Method
from uno.steps import discovery_step

METHOD = Method(discovery_step)
