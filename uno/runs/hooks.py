"""The one hook of test equipment: where ``UNO_FAULTS`` asks for faults,
``tests.faults`` of the repository gets at a run's batches, its console and its storage.
Without the variable nothing is imported or wrapped.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any, TypeVar

from uno.errors import ConfigError

VARIABLE = "UNO_FAULTS"
INJECTOR = "tests.faults"
# site-packages where the package is installed without its tests
CHECKOUT = Path(__file__).parents[2]

T = TypeVar("T")


def hooked(name: str, what: T, *facts: Any) -> T:
    """``what``, or what the injector's function ``name`` makes of it and of ``facts``,
    where faults are asked for. ConfigError: they are, and the injector is not there.
    """
    if not os.environ.get(VARIABLE):
        return what
    if str(CHECKOUT) not in sys.path:  # the console script has another first folder
        sys.path.append(str(CHECKOUT))
    try:
        injector = importlib.import_module(INJECTOR)
    except ModuleNotFoundError:
        problem = (
            f"{VARIABLE} is set, but {INJECTOR}, which injects the faults, is not"
            " installed"
        )
        raise ConfigError(
            f"{problem}; unset it, or run in a checkout of the repository"
        ) from None
    found: T = getattr(injector, name)(what, *facts)
    return found
