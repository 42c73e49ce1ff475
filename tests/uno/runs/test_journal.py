"""metrics.jsonl is one line of JSON a step, without repetition."""

import json
import threading
import time
from contextlib import closing
from unittest.mock import Mock

import pytest

from tests.uno.small_run import HERE, small_config, small_sets
from uno.data.files import Storage
from uno.errors import StorageError
from uno.runs import METRICS_FILE
from uno.runs.journal import Journal, read_journal
from uno.runs.run import PRETRAIN, run_phase


def line(step: int, phase: str = "discover", **more) -> dict:
    numbers = {"loss": 1 / step, "lr": 0.1, "images_per_s": 5.0, "skipped_steps": 0}
    return {"phase": phase, "step": step} | numbers | more


def steps(storage: Storage, phase: str = "discover") -> list[int]:
    return [entry["step"] for entry in read_journal(storage) if entry["phase"] == phase]


def write(storage: Storage, phase: str, from_step: int, numbers, **more) -> None:
    with closing(Journal(storage, phase, from_step)) as journal:
        for step in numbers:
            journal.write(line(step, phase, **more))


@pytest.fixture(params=["local", "remote"])
def storage(request, tmp_path) -> Storage:
    return Storage(str(tmp_path) if request.param == "local" else "mock:///run")


def test_later_lines_of_the_same_phase_are_dropped(storage):
    """Kills: duplicate lines after a resume, the other phase's dropped, or that of
    the step itself.
    """
    assert read_journal(storage) == []
    write(storage, "pretrain", 0, range(1, 10))
    write(storage, "discover", 0, range(1, 8))
    write(storage, "discover", 4, [5, 6])
    assert steps(storage, "pretrain") == list(range(1, 10))
    assert steps(storage) == [1, 2, 3, 4, 5, 6]
    with closing(Journal(storage, "discover", 6)) as journal:
        journal.rewind(2)
        journal.write(line(3))
        with pytest.raises(ValueError, match="not JSON compliant"):
            # a journal that only Python reads
            journal.write(line(4, loss=float("nan")))
    assert steps(storage) == [1, 2, 3]


@pytest.mark.parametrize(
    ("cut", "more", "kept"),
    [
        (1, b"", [1, 2]),
        (20, b"", [1]),
        (0, b"7\n", [1, 2]),
        (0, b"\xff\xfe\n", [1, 2]),
    ],
)
def test_a_line_cut_short_is_left_out_and_overwritten(storage, cut, more, kept):
    """Kills: a crash on the half line of a killed run, the next line glued to it."""
    write(storage, "discover", 0, [1, 2])
    first, second = storage.read(METRICS_FILE).splitlines(keepends=True)
    storage.write(METRICS_FILE, first + second[: len(second) - cut] + more)
    assert steps(storage) == kept
    write(storage, "discover", 2, [3])
    assert json.loads(storage.read(METRICS_FILE).splitlines()[-1])["step"] == 3
    assert steps(storage) == [*kept, 3]


def test_nobody_waits_for_the_storage_of_a_line(storage, monkeypatch):
    """Training goes on while a line is written, and a flush waits for all of them."""
    may_write, name = threading.Event(), "append" if storage.is_local else "write"
    write_now = getattr(storage, name)
    monkeypatch.setattr(
        storage, name, lambda *args: may_write.wait() and write_now(*args)
    )
    with Journal(storage, "discover", 0) as journal:
        for step in range(1, 10):
            journal.write(line(step))
        threading.Timer(0.05, may_write.set).start()
        journal.flush()
        assert steps(storage) == list(range(1, 10))


@pytest.mark.parametrize("ending", ["flush", "close", "write"])
def test_what_the_writing_thread_meets_ends_training(storage, monkeypatch, ending):
    """Kills: a full disk that nobody hears of, a later line that hides the hole, an
    error in the place of the one that ended training.
    """
    full = Mock(side_effect=StorageError("no space left"))
    monkeypatch.setattr(storage, "append" if storage.is_local else "write", full)
    journal = Journal(storage, "discover", 0)
    journal.write(line(1))
    with pytest.raises(StorageError, match="no space"):
        # an object store is written at a flush alone
        while ending == "write" and storage.is_local:
            journal.write(line(2))
        getattr(journal, "flush" if ending == "write" else ending)()
    with pytest.raises(ZeroDivisionError), Journal(storage, "discover", 0) as journal:
        journal.write(line(3))
        _ = 1 / 0
    assert steps(storage) == []


def test_a_checkpoint_counts_when_its_lines_are_there(storage, monkeypatch):
    """Kills: a run that resumes from a checkpoint whose lines a kill -9 took with
    it.
    """
    seen = []

    def slowly(do):
        def note(name, data):
            if name == METRICS_FILE:
                time.sleep(0.01)
            elif name.startswith("checkpoints/"):
                seen.append((name[-20:-12], steps(storage, PRETRAIN)[-1]))
            do(name, data)

        return note

    for name in ("write", "append"):
        monkeypatch.setattr(storage, name, slowly(getattr(storage, name)))
    config = small_config(train__log_every=1, train__keep_checkpoints=9)
    run_phase(config, PRETRAIN, small_sets()[0], HERE, storage)
    assert seen == [(f"{step:08d}", step) for step in (3, 6, 9)]
