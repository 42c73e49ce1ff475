"""Nothing is left of a command; ``python -m tests.leaks`` repeats each 50 times."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests import chaos, leaks
from tests.forked import forked

TIMES = 2


@pytest.fixture(scope="module")
def places():
    """Where things are made, and the temporary directory of all processes, short as
    Ray's sockets need it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="uno-leaks-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        made = Path(folder)
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("TMPDIR", str(made))
        yield made, leaks.prepare(made)


@pytest.mark.release
@pytest.mark.parametrize(
    "name", [name for name in leaks.COMMANDS if name not in leaks.ON_RAY]
)
def test_a_process_that_goes_on_keeps_nothing_of_its_commands(places, name):
    """Pools of threads may still grow by one; what a command leaves it leaves each
    time.
    """
    first, last = leaks.in_process(name, TIMES, *places)
    assert all(last[what] - number < TIMES for what, number in first.items()), (
        first,
        last,
    )


@pytest.mark.release
@pytest.mark.ray
@pytest.mark.parametrize("name", leaks.ON_RAY)
def test_a_ray_that_goes_on_holds_nothing_of_its_commands(places, name):
    """Kills: an actor that outlives its sweep."""
    first, last = leaks.in_process(name, 1, *places)
    assert last["held"] <= first["held"], (first, last)


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["discover", "predict"])
@pytest.mark.parametrize("end", leaks.ENDS)
def test_a_process_that_ends_leaves_nothing(places, name, end):
    code, left = leaks.on_its_own(name, end, *places)
    codes = {"success": {0}, "error": {2, 4}, "Ctrl-C": {0, 75, 130}}
    assert left == [] and code in codes[end]


@pytest.mark.release
@pytest.mark.ray
def test_a_private_cluster_leaves_no_temporary_directories(places):
    """Kills: those of Ray's processes, which are killed before they remove theirs."""
    own = places[0] / "own"
    own.mkdir()
    environment = os.environ | {
        "TMPDIR": str(own),
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(places[0]),
    }
    script = (
        "import time; from pipelines import ray_env as e\nwith e.connect():"
        " time.sleep(1)"
    )
    subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, timeout=800
    )
    assert list(own.iterdir()) == []


@pytest.mark.parametrize("what", ["threads", "descriptors", "processes", "temporary"])
def test_what_is_left_is_counted(tmp_path, monkeypatch, what):
    """Kills: a count that sees nothing; in a process of its own, whose command
    leaves one thing a time.
    """
    kept = []

    def leave(*_):
        if what == "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif what == "descriptors":
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
        assert {name for name in first if last[name] != first[name]} == {what}, (
            first,
            last,
        )
        assert last[what] - first[what] == 3

    assert forked(lane) == (0, "")


@pytest.mark.ray
def test_a_temporary_directory_too_long_for_sockets_is_one_line(tmp_path):
    """In a process that has no Ray yet, nor the folder of this process's cluster. Ray's
    own words are "validate_socket_filename failed".
    """
    long = tmp_path / ("x" * 60)
    long.mkdir()
    environment = os.environ | {"TMPDIR": str(long)}
    environment.pop("RAY_TMPDIR", None)
    script = "import sys\nfrom pipelines import cli, ray_env as e\n"
    script += "sys.exit(cli.run(lambda _: e.connect().__enter__()))"
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert (
        ended.returncode == 2
        and "set TMPDIR to one with a shorter path" in ended.stderr
    ), ended
    assert len(ended.stderr.splitlines()) == 1
