"""``uno.discover`` with workers: the Python interface to runs on Ray."""

from typing import Any

from pipelines.jobs import OnRay
from uno.session import api
from uno.session.api import Model


def discover(*, overwrite: bool = False, quiet: bool = False, **settings: Any) -> Model:
    """As :func:`uno.discover`, with the same settings; of these ``workers=N`` trains on
    N workers of Ray, on this machine or on the cluster of ``RAY_ADDRESS``.
    """
    return api.discover_at(OnRay(), settings, overwrite, quiet)
