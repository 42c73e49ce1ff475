"""Import code of the user's own, which an option names as ``package.module:NAME``."""

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
    """Return whether a text has the form ``package.module:NAME`` of an import path.

    There may be any number of packages, also none, and ``NAME`` has no dot. Nothing is
    imported, so the object need not exist.

    Args:
        name: The text.
    """
    return re.fullmatch(OBJECT_NAME, name) is not None


def import_object(key: str, name: str) -> Any:
    """Import the object that ``package.module:NAME`` names, and return it.

    Importing runs the code of the module.

    Args:
        key: The key of the configuration that holds the name, for the error message.
        name: The name, ``package.module:NAME``. Modules in the working directory are
            found, too.

    Raises:
        ConfigError: The module is not found, has a syntax error or raises an
            ImportError or AttributeError, or does not have the name. Any other error of
            the module's code is raised as it is.
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
    """Check that code that a downloaded model names does not come with the model.

    A model's configuration can name code that is imported when the model is loaded. In
    a model of unknown origin this must be code that the user has installed elsewhere.
    If it lies elsewhere, a warning is logged that says which code the model calls. If
    its top-level package is not found on this machine, nothing happens. This function
    imports nothing.

    Args:
        key: The key of the model's configuration that holds the name.
        name: The code, ``package.module:NAME``.
        foreign: The directory of the model of unknown origin.

    Raises:
        ConfigError: The top-level package or module of the code, or one of several
            folders of a namespace package, lies in the directory of the model or in a
            folder below it.
    """
    with working_directory():
        found = find_spec(name.partition(":")[0].partition(".")[0])
        if found is None:
            return
        # A namespace package has several folders, and a module may lie in any of them.
        # They depend on sys.path as it is now.
        folders = list(found.submodule_search_locations or ())
    folders = folders or [os.path.dirname(found.origin or "")]
    inside = f"{os.path.realpath(foreign)}/"
    if any(f"{os.path.realpath(folder)}/".startswith(inside) for folder in folders):
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
        " or ".join(folders),
    )


@contextmanager
def working_directory() -> Iterator[None]:
    """Let imports also find modules in the working directory, in a ``with`` block.

    The directory becomes the last entry of ``sys.path``, so that a file there hides no
    installed module, and is removed at the end of the block. Nothing happens if it is
    an entry already.
    """
    here = os.getcwd()
    if added := here not in sys.path:
        sys.path.append(here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)
