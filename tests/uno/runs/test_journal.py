"""metrics.jsonl is one line of JSON a step, without repetition."""

import json
import threading
import time
from contextlib import closing, nullcontext

import pytest

from tests.uno.small_run import HERE, small_config, small_sets
from uno.data import files
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
    for phase, first, last in (
        ("pretrain", 1, 9),
        ("discover", 1, 7),
        ("discover", 5, 6),
    ):
        write(storage, phase, first - 1, range(first, last + 1))
    assert steps(storage, "pretrain") == list(range(1, 10)) and steps(storage) == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    with closing(Journal(storage, "discover", 6)) as journal:
        journal.rewind(2)
        journal.write(line(3))
        with pytest.raises(ValueError, match="not JSON compliant"):
            # a journal that only Python reads
            journal.write(line(4, loss=float("nan")))
    assert steps(storage) == [1, 2, 3]


def test_a_line_cut_short_is_left_out_and_overwritten(storage):
    """Kills: a crash on the half line of a killed run, the next line glued to it."""
    write(storage, "discover", 0, [1, 2])
    whole = storage.read(METRICS_FILE)
    for cut in (
        whole[:-1],
        whole[: len(whole) // 2 + 3],
        whole + b"7\n",
        whole + b"\xff\xfe\n",
    ):
        storage.write(METRICS_FILE, cut)
        assert steps(storage)[0] == 1
        write(storage, "discover", 2, [3])
        assert json.loads(storage.read(METRICS_FILE).splitlines()[-1])["step"] == 3
        assert steps(storage) in ([1, 2, 3], [1, 3])


class Requests:
    """A file system that notes who asks it for what; it has no directories, as an
    object store.
    """

    type_name = "s3"

    def __init__(self, inner) -> None:
        self.inner, self.seen = inner, []

    def __getattr__(self, name):
        def ask(path, *more):
            self.seen.append(
                (threading.current_thread() is threading.main_thread(), name, str(path))
            )
            if name == "open_output_stream":
                self.inner.create_dir(path.rpartition("/")[0], recursive=True)
            return getattr(self.inner, name)(path, *more)

        return ask

    def of(self, name: str, main: bool) -> int:
        return sum(entry[:2] == (main, name) for entry in self.seen)


@pytest.fixture
def remote() -> Storage:
    storage = Storage("mock:///run")
    storage._fs = Requests(storage._fs)
    return storage


def test_nobody_waits_for_the_storage_of_a_line(storage, monkeypatch):
    """Kills: lines written by the thread that trains, one request for each that waits,
    lines in another order, a flush that returns before the last, lines that fill the
    memory.
    """
    may_write, calls = threading.Event(), []
    name = "append" if storage.is_local else "write"
    monkeypatch.setattr(
        storage, name, lambda *args: may_write.wait() and calls.append(args)
    )
    journal = Journal(storage, "discover", 0)
    for step in range(1, 10):
        journal.write(line(step))
    threading.Timer(0.05, may_write.set).start()
    journal.flush()
    assert len(calls) <= 2
    text = b"".join(data for _, data in calls) if storage.is_local else calls[-1][1]
    assert [json.loads(entry)["step"] for entry in text.splitlines()] == list(
        range(1, 10)
    )
    may_write.clear()
    monkeypatch.setattr("uno.runs.journal.MAX_LINES", 3)
    threading.Timer(0.05, may_write.set).start()
    for step in range(10, 16):
        journal.write(line(step))
    assert may_write.is_set()
    journal.close()


def test_uploads_of_a_long_journal_are_rare(remote, monkeypatch):
    """A small upload rate stands for a large journal. Kills: an upload of the whole
    journal every two seconds, however long it is; a flush that waits for the pause.
    """
    monkeypatch.setattr("uno.runs.journal.PAUSE_S", 0.0)
    monkeypatch.setattr(files, "UPLOAD_BYTES_PER_S", 1e-3, raising=False)
    with Journal(remote, "discover", 0) as journal:
        journal.write(line(1))
        while not steps(remote):
            time.sleep(0.001)
        for step in range(2, 100):
            journal.write(line(step))
            time.sleep(0.001)
        assert remote._fs.of("open_output_stream", main=False) == 1
        journal.flush()
        assert steps(remote) == [*range(1, 100)]
    assert remote._fs.of("open_output_stream", main=False) == 2


def test_what_the_writing_thread_meets_ends_training(storage, monkeypatch):
    """Kills: a full disk that nobody hears of, a later line that hides the hole, an
    error in the place of the one that ended training.
    """

    def full(*_):
        raise StorageError("no space left")

    for ending in ("write", "flush", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(storage, "append" if storage.is_local else "write", full)
            journal = Journal(storage, "discover", 0)
            journal.write(line(1))
            with pytest.raises(StorageError, match="no space"):
                while ending == "write":
                    journal.write(line(2))
                getattr(journal, ending)()
            with pytest.raises(StorageError) if ending != "close" else nullcontext():
                journal.close()
            with (
                pytest.raises(ZeroDivisionError),
                Journal(storage, "discover", 0) as journal,
            ):
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


def test_requests_of_training_do_not_grow_with_its_lines(remote):
    """A line a step, and one an epoch. Kills: a look, a read or a write of the training
    thread for a line; the whole journal read back for one.
    """
    asked = []
    for every in (1, 100):
        remote._fs.seen.clear()
        config = small_config(
            train__log_every=every, pretrain__epochs=6, train__checkpoint_every_epochs=6
        )
        remote.delete("checkpoints")
        run_phase(config, PRETRAIN, small_sets()[0], HERE, remote)
        looks = ("open_input_file", "get_file_info")
        asked.append(
            [remote._fs.of(name, main) for name in looks for main in (True, False)]
        )
        # the checkpoint, a rewound journal
        assert remote._fs.of("open_output_stream", True) <= 2
    assert asked[0] == asked[1]
