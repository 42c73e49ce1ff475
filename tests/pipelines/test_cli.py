"""``uno``: finding commands cheaply, and one line with the right exit code for every
end.
"""

import errno
import io
import subprocess
import sys
from importlib.metadata import EntryPoint
from unittest.mock import Mock

import pytest

from pipelines import cli
from tests.pipelines.small import ROOT
from uno.errors import ConfigError, Interrupted, NumericsError, StorageError
from uno.session import console


def ok(argv):
    print("ran with", *argv)
    return 0


@pytest.fixture
def commands(monkeypatch):
    """Stand-ins for the registered commands: ours, one from elsewhere, one that
    cannot be imported.
    """
    ours, theirs = f"{__name__}:ok", "no_such_package.module:main"
    targets = {"discover": ours, "evaluate": ours, "theirs": theirs}
    entries = [EntryPoint(*item, "uno.commands") for item in targets.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)


@pytest.mark.parametrize(
    ("argv", "code", "printed"),
    [
        ("discover --seed 1", 0, "ran with --seed 1\n"),
        ("--help", 0, f"\n  discover  {cli.SENTENCES['discover']}\n"),
        ("--help", 0, "\n  theirs\n"),
        ("--version", 0, "uno 0."),
        pytest.param("", 2, "usage: uno COMMAND", id="no command is no success"),
    ],
)
def test_dispatch_help_and_version(commands, capsys, argv, code, printed):
    assert cli.main(argv.split()) == code
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "discovr",
            "uno: error: unknown command 'discovr'; did you mean 'discover'?\n",
        ),
        ("zzz", "uno: error: unknown command 'zzz'; see uno --help\n"),
        (
            "theirs",
            (
                "uno: error: this needs the package 'no_such_package': pip install"
                " no_such_package\n"
            ),
        ),
    ],
)
def test_a_wrong_command_is_one_line(commands, capsys, name, line):
    assert cli.main([name]) == 2
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("seed: bad"), 2, "error: seed: bad"),
        (ConfigError("two\n  lines"), 2, "error: two lines"),
        (
            NumericsError("non-finite loss at step 7"),
            3,
            "error: non-finite loss at step 7",
        ),
        (StorageError("cannot write /x"), 4, "error: cannot write /x"),
        (
            OSError(errno.ENOSPC, "No space left", "/x"),
            4,
            "error: [Errno 28] No space left: '/x'",
        ),
        (
            Interrupted("stopped at step 7"),
            75,
            "stopped at step 7; resume with the same command",
        ),
        (
            Interrupted("stopped; resume with the same command"),
            75,
            "stopped; resume with the same command",
        ),
        (SystemExit(2), 2, None),
        (
            KeyboardInterrupt(),
            130,
            (
                "interrupted; the same command resumes from the last checkpoint, if"
                " there is one"
            ),
        ),
        (
            ModuleNotFoundError("x", name="ray.data"),
            2,
            (
                "error: this needs the package 'ray': pip install"
                " 'ray[default,train,tune,data]>=2.60'"
            ),
        ),
    ],
)
def test_every_end_is_one_line_and_its_exit_code(capsys, error, code, line):
    assert cli.run_guarded(Mock(side_effect=error), []) == code
    assert capsys.readouterr() == ("", f"uno: {line}\n" if line else "")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("odd\nthing"),
        OSError(errno.ENOENT, "gone"),
        BrokenPipeError("a socket of Ray"),
        ModuleNotFoundError("No module named 'uno.nope'", name="uno.nope"),
    ],
)
def test_a_defect_is_one_line_and_a_file(capsys, tmp_path, monkeypatch, error):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.run_guarded(Mock(side_effect=error), []) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    (file,) = tmp_path.glob("uno-error-*.txt")
    start = f"uno: error: internal: {type(error).__name__}: "
    assert err.startswith(start) and f"(traceback in {file})" in err
    text = file.read_text()
    assert "Traceback (most recent call last)" in text and type(error).__name__ in text
    # nor can the file be written
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    assert cli.run_guarded(Mock(side_effect=error), []) == 1
    assert capsys.readouterr().err.startswith(start)


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "[cli.main([word]) for word in ('--help', '--version', 'nope')]",
            "torch ray numpy tune pydantic",
        ),
        ("commands.parse([], commands.DEMO).config", "torch ray numpy tune"),
        ("[cli.main([name, '--help']) for name in cli.SENTENCES]", "torch ray"),
    ],
)
def test_nothing_heavy_is_imported_before_there_is_work(code, heavy):
    """Kills: an import of a pipeline or torch at the top of cli.py, which makes
    ``uno --help`` slow.
    """
    imports = "cli" if code.startswith("[cli") else "commands"
    done = python(
        f"import sys; from pipelines import {imports}; {code}\nfound ="
        f" set('{heavy}'.split()) & {{m.split('.')[0] for m in sys.modules}}\nassert"
        " not found, found"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("stream", "ends"),
    [
        ("stdout", "os.pipe()"),
        ("stderr", "os.pipe()"),
        ("stdout", "os.openpty()"),
    ],
)
def test_a_reader_that_left_ends_quietly(stream, ends):
    """``uno ... | head -1``, a closed terminal: no traceback and no 'Exception
    ignored' at shutdown.
    """
    code = (
        f"import os, sys; from pipelines import cli\nstream = sys.{stream}\nread, write"
        f" = {ends}; os.dup2(write, stream.fileno()); os.close(read);"
        " os.close(write)\nsys.exit(cli.run_guarded(lambda argv: print('x' * 100_000,"
        " file=stream), []))"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


def test_no_output_at_all_is_no_defect(monkeypatch):
    """``uno ... >&-``."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.run_guarded(lambda argv: console.print_line("one line") or 0, []) == 0
    sys.stdout.close()


METRICS = {
    "phase": "discover",
    "epoch": 12,
    "epochs": 60,
    "total_steps": 660,
    "loss": 1.2341,
    "lr": 0.0953,
    "images_per_s": 5120.4,
}


def shown_on(out) -> str:
    now = [0.0]
    with console.Progress(out, clock=lambda: now[0]) as progress:
        progress(METRICS | {"step": 66})  # resumed here: no speed known yet
        now[0] = 10.0
        progress(METRICS | {"step": 132})
        if not out.isatty():
            last = {"phase": "pretrain", "step": 660, "images_per_s": None}
            progress(METRICS | last)
    return out.getvalue()


def test_progress_is_plain_lines_or_one_live_bar_on_a_terminal():
    assert shown_on(io.StringIO()).splitlines() == [
        "discover  epoch 12/60  step 66/660  loss 1.234  lr 0.0953  5,120 images/s",
        (
            "discover  epoch 12/60  step 132/660  loss 1.234  lr 0.0953  5,120 images/s"
            "  ETA 01:20"
        ),
        "pretrain  epoch 12/60  step 660/660  loss 1.234  lr 0.0953",
    ]
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    shown = shown_on(terminal)
    assert "\r" in shown and shown.count("\n") == 1 and shown.isascii()
    assert "ETA 01:20" in shown and " 20% |" in shown


def test_a_phase_may_say_how_often_it_wants_a_line():
    """Kills: minutes of silence where no step is a multiple of the interval."""
    out, now = io.StringIO(), [0.0]
    line = {"phase": "features", "total_steps": 1861, "every_s": 10.0}
    steps = ((0.0, 0), (4.0, 128), (11.0, 256), (12.0, 384), (21.0, 512))
    with console.Progress(out, clock=lambda: now[0], interval=50) as progress:
        for now[0], step in steps:
            progress(line | {"step": step})
    shown = [line.split()[2] for line in out.getvalue().splitlines()]
    assert shown == ["256/1861", "512/1861"]


def test_a_notebook_gets_the_bar_and_silence_nothing(capsys):
    """A notebook's streams are no terminals and yet redraw. Kills: hundreds of lines
    below a cell.
    """
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    console.Progress(notebook)(METRICS | {"step": 66})
    assert "\r" in notebook.getvalue()
    with console.suppress_output():
        assert shown_on(io.StringIO()) == ""
        console.print_line("a line")
        console.print_line("warning: look at this")
    assert capsys.readouterr().out == "warning: look at this\n"


def test_say_escapes_what_would_steer_a_terminal_or_cannot_be_encoded():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console.print_line("class \x1b[31mred\u202e Žluť\ttab\nnext", stream)
    assert raw.getvalue() == b"class \\x1b[31mred\\u202e \\u017dlu\\u0165\ttab\nnext\n"
