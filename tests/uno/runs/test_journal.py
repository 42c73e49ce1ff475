"""metrics.jsonl is one line of JSON a step, without repetition."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from uno.data.files import Storage
from uno.runs import METRICS_FILE
from uno.runs.journal import Journal, JournalTail, read_journal


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
    """Kills: duplicate lines after a resume, the other phase's dropped, or that of the step itself."""
    assert read_journal(storage) == []
    for phase, first, last in (("pretrain", 1, 9), ("discover", 1, 7), ("discover", 5, 6)):
        write(storage, phase, first - 1, range(first, last + 1))
    assert steps(storage, "pretrain") == list(range(1, 10)) and steps(storage) == [1, 2, 3, 4, 5, 6]
    with closing(Journal(storage, "discover", 6)) as journal:
        journal.rewind(2)
        journal.write(line(3))
        with pytest.raises(ValueError, match="not JSON compliant"):
            journal.write(line(4, loss=float("nan")))  # a journal that only Python reads
    assert steps(storage) == [1, 2, 3]


def test_a_line_cut_short_is_left_out_and_overwritten(storage):
    """Kills: a crash on the half line of a killed run, the next line glued to it."""
    write(storage, "discover", 0, [1, 2])
    whole = storage.read(METRICS_FILE)
    for cut in (whole[:-1], whole[: len(whole) // 2 + 3], whole + b"7\n", whole + b"\xff\xfe\n"):
        storage.write(METRICS_FILE, cut)
        assert steps(storage)[0] == 1
        write(storage, "discover", 2, [3])
        assert json.loads(storage.read(METRICS_FILE).splitlines()[-1])["step"] == 3
        assert steps(storage) in ([1, 2, 3], [1, 3])


def events(storage: Storage, phase: str) -> list[Event]:
    found = []
    for path in sorted(Path(storage.path(f"tensorboard/{phase}")).iterdir()):
        data = path.read_bytes()
        while data:  # length (8), checksum (4), event, checksum (4)
            size = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_tensorboard_holds_the_same_numbers(tmp_path):
    """Kills: charts of one phase purged by the next (purging hides later steps of the whole directory)."""
    storage = Storage(str(tmp_path))
    for phase in ("pretrain", "discover"):
        write(storage, phase, 0, [4], head_losses=[2.0, 3.0])
    write(storage, "discover", 4, [8])
    for phase, expected in (("pretrain", [4]), ("discover", [4, 8])):
        found = events(storage, phase)
        scalars = [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value]
        assert [step for step, tag, _ in scalars if tag == "loss"] == expected
        assert (4, "head_loss/1", 3.0) in scalars
        purges = [e.step for e in found if e.session_log.status == 1]
        assert purges == [1] if phase == "pretrain" else [1, 5]


def test_the_tail_shows_each_line_once(storage, monkeypatch):
    """Kills: a line shown in halves or twice, silence after a rewind, a read where all is seen."""
    write(storage, "discover", 0, [1, 2])
    tail = JournalTail(storage)

    def new():
        return [entry["step"] for entry in tail.new_entries()]

    assert new() == []
    write(storage, "discover", 2, [3, 4])
    assert new() == [3, 4]
    write(storage, "discover", 1, [])  # rolled back
    assert new() == []
    write(storage, "discover", 1, [2, 3])
    assert new() == [2, 3]
    write(storage, "discover", 1, [2, 3, 4, 5], images_per_s=7.0)  # rolled back and grown between two looks
    assert new() == [2, 3, 4, 5]
    storage.append(METRICS_FILE, b'{"step": 6, ')
    assert new() == []
    storage.append(METRICS_FILE, b'"phase": "discover"}\n')
    assert new() == [6]
    with monkeypatch.context() as patch:
        patch.setattr(storage, "read", pytest.fail)
        assert new() == []
    storage.delete(METRICS_FILE)
    assert new() == [] and new() == []
