"""The console script ``uno``: find the command, run it, and return its exit code.

Commands are entry points of the group ``uno.commands``: callables that take the
arguments after their name, and return an exit code or None for 0. No large package is
imported before a command is chosen. Every error becomes one line. Exit codes besides
those of :mod:`uno.errors` are 130 (interrupted before anything was saved), 141 (the
reader of the output is gone) and 1 (a defect of this program).
"""

import errno
import io
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint, entry_points, version

from uno.errors import Interrupted, UnoError, as_user_error, did_you_mean

Command = Callable[[Sequence[str]], int | None]
"""Takes the arguments, and returns an exit code, or None for 0."""

SENTENCES = {  # a command of another package is listed without one
    "demo": (
        "Pretrain, discover, evaluate, predict and report on the embedded digits; needs"
        " no arguments."
    ),
    "data": (
        "Check a data set before a run, or pack it into shards: `uno data check --data"
        " SOURCE`."
    ),
    "embed": "Write the vectors that a frozen encoder makes of a source, as Parquet.",
    "pretrain": "Train the encoder and the known head on the labeled images.",
    "discover": (
        "Find the new classes among the unlabeled images; pretrains first without"
        " --weights."
    ),
    "evaluate": "Compute the metrics of a finished run.",
    "predict": "Predict a class for every image of a source.",
    "classes": "Name, merge or drop the discovered classes of a run.",
    "report": "Write the HTML report of a run.",
    "estimate-classes": (
        "Estimate the number of novel classes among the unlabeled images."
    ),
    "reproduce": "Reproduce a table of the paper and compare the numbers.",
    "tune": "Search hyper-parameters with Ray Tune.",
    "export": "Export the model or its predictions for other tools.",
    "doctor": "Check this machine, or every node of a Ray cluster.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``uno ARGV...`` and return its exit code.

    Args:
        argv: The name of a command and its arguments, or ``--help`` or ``--version``.
            None means the arguments of this process; the process is then expected to
            end afterwards, because Ctrl-C is ignored from then on.

    Returns:
        The exit code, see :func:`run_guarded`.
    """
    return run_guarded(_dispatch, argv) if argv is not None else run(_dispatch)


def run(command: Command) -> int:
    """Run a command with the arguments of this process, and return its exit code.

    Errors are handled as by :func:`run_guarded`. The process is expected to end
    afterwards: Ctrl-C is ignored from then on.

    Args:
        command: Takes the arguments (``sys.argv`` without the program) and returns an
            exit code, or None for 0.
    """
    code = run_guarded(command, sys.argv[1:])
    # At its exit Python would answer Ctrl-C with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def run_guarded(command: Command, argv: Sequence[str]) -> int:
    """Run a command and return its exit code, also if it raises an error.

    An error or Ctrl-C becomes one line on stderr, and never a traceback. Characters
    that stdout or stderr cannot encode are printed as escapes. A stdout or stderr that
    the shell has closed is replaced by the null device, for the rest of the process.

    Args:
        command: Takes the arguments and returns an exit code, or None for 0.
        argv: The arguments.

    Returns:
        The exit code of the command, 0 if it returns None, or the code with which it
        calls ``sys.exit``. After a :class:`~uno.errors.UnoError` its ``exit_code``,
        such as 2 for a ConfigError and 75 for Interrupted; a missing package counts as
        a ConfigError, and a full disk as a StorageError (4). 130 after Ctrl-C; 141
        without a line if the reader of the output is gone; 1 after an unexpected error,
        a defect of this program, whose traceback is then in a temporary file.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `uno ... >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    # Requests ignores this, too, but where threads import other packages its filter may
    # be gone by then.
    warnings.filterwarnings("ignore", "SOCKS support in urllib3")
    with _escaped_output():
        try:
            try:
                code = command(argv) or 0
            except SystemExit as end:  # after --help
                code = (
                    end.code if isinstance(end.code, int) else int(end.code is not None)
                )
            sys.stdout.flush()
            return code
        except Interrupted as error:
            hint = "" if "resume" in str(error) else "; resume with the same command"
            return _print_message(f"{error}{hint}", error.exit_code)
        except UnoError as error:
            return _print_message(f"error: {error}", error.exit_code)
        except KeyboardInterrupt:
            return _print_message(
                "interrupted; the same command resumes from the last checkpoint, if"
                " there is one",
                130,
            )
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
                from uno.session.console import output_closed

                if output_closed():
                    return 141  # the code after SIGPIPE: `uno ... | head`
            meant = as_user_error(error)
            return (
                _report_defect(error)
                if meant is None
                else _print_message(f"error: {meant}", meant.exit_code)
            )


@contextmanager
def _escaped_output() -> Iterator[None]:
    """Show characters that stdout or stderr cannot encode as escapes, inside the block.

    Afterwards the streams handle such characters as before. Names of classes and files
    come from the user's data, and a terminal may be unable to show them. Without this,
    printing such a name would raise UnicodeEncodeError.
    """
    changed = list[tuple[io.TextIOWrapper, str]]()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors is not None:
            changed.append((stream, stream.errors))
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in changed:
            with suppress(ValueError, OSError):  # it was closed, or has no reader
                stream.reconfigure(errors=errors)


def _dispatch(argv: Sequence[str]) -> int | None:
    """Run the command that the first argument names, or print the help or the version.

    Args:
        argv: The arguments of ``uno``: the name of a command and the arguments for it,
            ``--help``, ``-h`` or ``--version``.

    Returns:
        The exit code of the command, None for 0, as after ``--version``; 2 for an
        unknown command, with an error line, and without arguments, with the help.
    """
    commands = {entry.name: entry for entry in entry_points(group="uno.commands")}
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(_help_text(commands))
        return 0 if argv else 2
    if name == "--version":
        print(f"uno {version('uno-discovery')}")
        return None
    if name in commands:
        return commands[name].load()(rest)
    return _print_message(
        "error: unknown command"
        f" {name!r}{did_you_mean(name, commands, 'see uno --help')}",
        2,
    )


def _help_text(commands: dict[str, EntryPoint]) -> str:
    """Return the text of ``uno --help``, which has a line for each installed command.

    The commands of this package come first, then others in alphabetical order.

    Args:
        commands: The entry points of the installed commands, by the name of the
            command. Commands of other packages have a line without a sentence.
    """
    names = [
        *(n for n in SENTENCES if n in commands),
        *sorted(commands.keys() - SENTENCES.keys()),
    ]
    width = max(map(len, names), default=0)
    rows = "\n".join(
        f"  {name:{width}}  {SENTENCES.get(name, '')}".rstrip() for name in names
    )
    return f"""usage: uno COMMAND [OPTIONS]

Novel class discovery: find new classes among unlabeled images.

{rows}

uno COMMAND --help lists a command's options; uno --version prints the version."""


def _print_message(line: str, code: int) -> int:
    """Print a message as one line on stderr, and return the given exit code.

    The line begins with ``uno:``. Line breaks in the message become blanks. Nothing is
    raised if stderr has no reader.

    Args:
        line: The message.
        code: The exit code.
    """
    with suppress(OSError):  # the reader is gone
        print("uno:", " ".join(line.split()), file=sys.stderr)
    return code


def _report_defect(error: Exception) -> int:
    """Report an unexpected error, a defect of this program, and return the exit code 1.

    The command line and the traceback are written to a temporary file, which stays. One
    line on stderr names the error and the file, or why the file cannot be written.

    Args:
        error: The error.
    """
    try:
        text = f"{' '.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"
        with tempfile.NamedTemporaryFile(
            prefix="uno-error-", suffix=".txt", delete=False
        ) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
        where = f"traceback in {file.name}"
    except OSError as problem:
        where = f"no traceback: {problem}"
    return _print_message(
        f"error: internal: {type(error).__name__}: {error} ({where})", 1
    )
