"""The errors that end a command with one line for the user and an exit code."""

import difflib
import errno
from collections.abc import Callable, Iterable, Sequence

RAY = "'ray[default,train,tune,data]>=2.60'"  # the same text as in pyproject.toml


class UnoError(Exception):
    """An error that ends a command with one line for the user.

    Attributes:
        exit_code: The exit code of the process.
    """

    exit_code = 1


class ConfigError(UnoError, ValueError):
    """A problem of the configuration or the data that the user can fix.

    Most such problems are found before any training begins.
    """

    exit_code = 2


class NumericsError(UnoError):
    """The numbers of training or of an exported model are wrong.

    For example the loss was not finite and a roll-back did not help, or every trial of
    a sweep failed, or an exported model differs from the original.
    """

    exit_code = 3


class StorageError(UnoError):
    """A file, such as a checkpoint, could not be read or written, or is damaged."""

    exit_code = 4


class Interrupted(UnoError):
    """A command was stopped from outside, or a process that it needs was lost.

    The same command resumes the work from what was saved.
    """

    exit_code = 75


def one_line(error: object) -> str:
    """Return the text of an error on one line, cut off after 300 characters.

    Line breaks and runs of white space become one space each. White space at the
    beginning and the end is removed.

    Args:
        error: The error of a library, or any object that ``str`` turns into text.
    """
    return " ".join(str(error).split())[:300]


def printable(text: str, kept: str = "") -> str:
    r"""Return a text in which all unprintable characters are escaped.

    A line break, for example, becomes a backslash and an n. So the text cannot send
    control sequences to a terminal.

    Args:
        text: The text.
        kept: The unprintable characters that stay as they are.
    """
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def did_you_mean(
    word: str,
    known: Iterable[str],
    otherwise: str = "",
    show: Callable[[str], str] = repr,
    likely: Sequence[str] = (),
) -> str:
    """Return the end of an error line that suggests a known word.

    Args:
        word: What the user wrote.
        known: The words that are accepted.
        otherwise: The hint if no known word is similar, such as "see uno --help".
        show: Returns the text for a suggested word; by default the word in quotes.
        likely: Words that are all suggested, joined by "or", instead of the known word
            that is most similar to ``word``; ``known`` is not used then.

    Returns:
        For example ``; did you mean 'folder'?``. Without a similar word it is ``; ``
        and ``otherwise``, or "" if ``otherwise`` is empty.
    """
    near = likely or difflib.get_close_matches(word[:100], list(known), n=1)
    hint = f"did you mean {' or '.join(map(show, near))}?" if near else otherwise
    return f"; {hint}" if hint else ""


def as_user_error(error: Exception) -> UnoError | None:
    """Turn an error of a library into an error for the user, if its cause is known.

    Args:
        error: The error that ended the command.

    Returns:
        A ConfigError that says what to install, if a module was not found and its
        top-level package is none of ``uno``, ``pipelines``, ``tune`` and ``reproduce``.
        A StorageError if the disk is full or read-only, or the user's quota is used up.
        None for any other error, which is a defect of the program.
    """
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        if missing not in ("", "uno", "pipelines", "tune", "reproduce"):
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
