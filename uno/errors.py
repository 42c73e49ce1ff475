"""The ends of a command besides success (one line for the user and one exit code
each), and their words.
"""

import difflib
import errno
from collections.abc import Callable, Iterable, Sequence

RAY = "'ray[default,train,tune,data]>=2.60'"  # as pyproject.toml has it


class UnoError(Exception):
    """What ends a command in one line for the user; ``exit_code`` is what the
    process returns.
    """

    exit_code = 1


class ConfigError(UnoError, ValueError):
    """A configuration or data problem the user can fix; nothing was started."""

    exit_code = 2


class NumericsError(UnoError):
    """The loss stayed non-finite after a roll-back; the message names the step."""

    exit_code = 3


class StorageError(UnoError):
    """A run directory, checkpoint or table could not be written or read back."""

    exit_code = 4


class Interrupted(UnoError):
    """Stopped from outside after saving; the same command resumes."""

    exit_code = 75


def one_line(error: object) -> str:
    """The text of somebody else's error, at most 300 characters."""
    return " ".join(str(error).split())[:300]


def printable(text: str, kept: str = "") -> str:
    """``text`` with all that would steer a terminal escaped (``\\n``), but the
    characters ``kept``.
    """
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def did_you_mean(
    word: str,
    known: Iterable[str],
    otherwise: str = "",
    show: Callable[[str], str] = repr,
    likely: Sequence[str] = (),
) -> str:
    """The end of an error line: ``; did you mean 'folder'?``, the nearest of ``known``
    as ``show`` has it, or all that are ``likely``; where nothing is near,
    ``; otherwise`` or nothing.
    """
    near = likely or difflib.get_close_matches(word[:100], list(known), n=1)
    hint = f"did you mean {' or '.join(map(show, near))}?" if near else otherwise
    return f"; {hint}" if hint else ""


def as_user_error(error: Exception) -> UnoError | None:
    """What an error from elsewhere means to the user: a package or space is missing;
    None: a defect.
    """
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        if missing not in ("", "uno", "pipelines", "tune"):
            extra = RAY if missing == "ray" else missing
            return ConfigError(
                f"this needs the package {missing!r}: pip install {extra}"
            )
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
    ):
        return StorageError(str(error))
    return None
