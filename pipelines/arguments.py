"""argparse for commands with a few options of their own: its errors are one line, as all of ours."""

from __future__ import annotations

import argparse
from typing import NoReturn

from uno.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """A parser whose mistakes are :class:`ConfigError`.

    Args:
        prog: the command, for the usage line.
        description: one sentence.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise ConfigError(f"{message}; see {self.prog} --help")
