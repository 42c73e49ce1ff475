"""Code of the user's own, which an option names as ``package.module:NAME``."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from uno.errors import ConfigError, one_line

log = logging.getLogger(__name__)
OBJECT_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"


def is_object_name(name: str) -> bool:
    """Whether ``name`` has the form ``package.module:NAME``."""
    return re.fullmatch(OBJECT_NAME, name) is not None


def import_object(key: str, name: str) -> Any:
    """The object that ``package.module:NAME`` names. ConfigError: it cannot be
    imported; ``key`` is the field of the configuration that names it.
    """
    module, _, attribute = name.partition(":")
    with working_directory():
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError, SyntaxError) as error:
            raise ConfigError(
                f"{key} {name} cannot be imported: {one_line(error)[:160]}"
            ) from None


def check_origin(key: str, name: str, foreign: str) -> None:
    """Warn that a model of unknown origin, in the directory ``foreign``, has code of
    this machine imported: ``package.module:NAME``. ConfigError: the code would come
    from that directory. Nothing is imported here.
    """
    with working_directory():
        found = find_spec(name.partition(":")[0].partition(".")[0])
    if found is None:
        return
    folder = next(
        iter(found.submodule_search_locations or ()),
        os.path.dirname(found.origin or ""),
    )
    if f"{os.path.realpath(folder)}/".startswith(f"{os.path.realpath(foreign)}/"):
        why = (
            "its code lies in the model's own directory; import it from elsewhere if"
            " you trust it"
        )
        raise ConfigError(f"{key} {name} is not run: {why}")
    what = key.rpartition(".")[2]
    log.warning(
        "the %s of %s is code: %s is imported from %s and called",
        what,
        foreign,
        name,
        folder,
    )


@contextmanager
def working_directory() -> Iterator[None]:
    """Search the working directory for modules, last: a file there hides nothing
    that is installed.
    """
    here = os.getcwd()
    if added := here not in sys.path:
        sys.path.append(here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)
