"""What a rank says, in its own file of the run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from uno.data.files import Storage
from uno.errors import NumericsError
from uno.session import rank_log
from uno.session.rank_log import RankLog

LINE = {
    "phase": "discover",
    "epoch": 1,
    "epochs": 2,
    "step": 3,
    "total_steps": 6,
    "loss": 0.5,
}


@pytest.fixture(params=["local", "remote"])
def storage(request, tmp_path) -> Storage:
    return Storage(str(tmp_path / "run") if request.param == "local" else "mock:///run")


def lines(storage: Storage, rank: int = 0) -> list[str]:
    return storage.read(f"logs/rank-{rank}.log").decode().splitlines()


def test_prints_of_libraries_and_errors_stand_in_the_log_of_two_groups(storage, capfd):
    """Kills: one of both streams alone, a log that the next group overwrites, output
    that is missed at its old place or that goes to the log for ever.
    """
    before = os.fstat(1).st_ino
    with RankLog(storage, 1, 2) as log:
        os.write(1, b"from a program\n")
        os.write(2, b"from a library\n")
        log.metrics(LINE)
    os.write(1, b"after it\n")
    with pytest.raises(NumericsError), RankLog(storage, 1, 2):
        raise NumericsError("not finite")
    with pytest.raises(KeyError), RankLog(storage, 1, 2):
        raise KeyError("x")
    assert os.fstat(1).st_ino == before
    out, err = capfd.readouterr()
    assert out == "from a program\nafter it\n" and err == "from a library\n"
    found = lines(storage, 1)
    assert sum("rank 1 of 2, process" in line for line in found) == 3
    assert {"from a program", "from a library", "KeyError: 'x'"} <= set(
        found
    ) and "after it" not in found
    assert any(
        line.endswith(" discover  epoch 1/2  step 3/6  loss 0.500") for line in found
    )
    assert any(line.endswith(" NumericsError: not finite") for line in found)
    assert sum("Traceback" in line for line in found) == 1


def test_an_object_store_has_the_lines_of_a_rank_that_lives(monkeypatch, capfd):
    """Before it ends: its node may be lost. Kills: a log that is uploaded at the end
    alone.
    """
    monkeypatch.setattr(rank_log, "UPLOAD_S", 0.02)
    storage, end = Storage("mock:///lives"), time.monotonic() + 60
    with RankLog(storage, 0, 1):
        os.write(1, b"early\n")
        while "early" not in (storage.find("logs/rank-0.log") or b"").decode():
            assert time.monotonic() < end
            time.sleep(0.02)


def test_the_last_words_of_a_killed_rank_are_kept(tmp_path):
    """Kills: a pipe that dies with its reader, a rank that answers Ctrl-C through a
    dead ``tee``.
    """
    script = (
        "import os, signal; from uno.data.files import Storage; from"
        f" uno.session.rank_log import RankLog\nRankLog(Storage({str(tmp_path)!r}), 0,"
        " 1)\nsignal.signal(signal.SIGINT, lambda *_: os.write(2, b'asked to"
        " stop\\n'))\nos.killpg(0, signal.SIGINT); os.write(2, b'last words\\n');"
        " os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        timeout=120,
        process_group=0,
    )
    assert (
        ended.returncode == -signal.SIGKILL
        and ended.stderr == b"asked to stop\nlast words\n"
    )
    assert lines(Storage(str(tmp_path)))[1:] == ["asked to stop", "last words"]
