"""Nothing is left of a command; ``python -m tests.leaks`` repeats each 50 times."""

import tempfile
import threading

import pytest

from tests import chaos, leaks
from tests.forked import forked

TIMES = 3


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Where things are made, and the temporary directory of all processes."""
    made = tmp_path_factory.mktemp("leaks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("TMPDIR", str(made))
        yield made, leaks.prepare(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in leaks.COMMANDS if name not in leaks.ON_RAY])
def test_a_process_that_goes_on_keeps_nothing_of_its_commands(places, name):
    """Pools of threads may still grow by one; what a command leaves it leaves each time."""
    first, last = leaks.in_process(name, TIMES, *places)
    assert all(last[what] - number < TIMES for what, number in first.items()), (first, last)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["discover", "predict"])
@pytest.mark.parametrize("end", leaks.ENDS)
def test_a_process_that_ends_leaves_nothing(places, name, end):
    code, left = leaks.on_its_own(name, end, *places)
    codes = {"success": {0}, "error": {2, 4}, "Ctrl-C": {0, 75, 130}}
    assert left == [] and code in codes[end]


@pytest.mark.parametrize("what", ["threads", "files", "processes", "temporary"])
def test_what_is_left_is_counted(tmp_path, monkeypatch, what):
    """Kills: a count that sees nothing; in a process of its own, whose command leaves one thing a time."""
    kept = []

    def leave(*_):
        if what == "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif what == "files":
            kept.append((tmp_path / "file").open("w"))
        elif what == "processes":
            kept.append(chaos.subprocess.Popen(["sleep", "60"]))
        else:
            tempfile.mkdtemp(dir=tmp_path)

    monkeypatch.setattr(leaks, "command", leave)
    (tmp_path / "file").write_text("")

    def lane():
        first, last = leaks.in_process("doctor", 3, tmp_path, tmp_path)
        for process in kept if what == "processes" else ():
            process.kill()
        assert {name for name in first if last[name] != first[name]} == {what}, (first, last)
        assert last[what] - first[what] == 3

    assert forked(lane) == (0, "")
