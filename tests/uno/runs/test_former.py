"""A run that ``--overwrite`` replaces is lost only when the new run has begun."""

from contextlib import nullcontext, suppress

import pyarrow as pa
import pytest

from uno.data.files import Storage
from uno.errors import StorageError
from uno.runs import CONFIG_FILE, DISCOVER, former
from uno.runs.checkpoint import checkpoint_name

FORMER = {
    CONFIG_FILE: b"former",
    "metrics.json": b"former",
    checkpoint_name(DISCOVER, 7): b"former",
    "model/classes.json": b"former",
}
NEW = {CONFIG_FILE: b"new", "environment.json": b"new", "model/classes.json": b"new"}
CHECKPOINT = {checkpoint_name(DISCOVER, 0): b"new"}


class MortalStorage(Storage):
    """A directory whose writer is killed after a number of changes."""

    changes_left = 10**6

    def check(self):
        """Count the changes, and be killed at the last one and ever after."""
        self.changes_left -= 1
        if self.changes_left < 0:
            raise StorageError("the process is dead")


@pytest.fixture(params=["local", "object store"])
def new_storage(tmp_path, request):
    """Make directories of a former run, on a file system with or without rename."""

    def make(name="run"):
        found = MortalStorage(str(tmp_path / name))
        if request.param == "object store":
            local = pa.fs.LocalFileSystem()
            found._fs = pa.fs.SubTreeFileSystem(str(tmp_path), local)
            found.root, found.is_local = name, False
        write(found, FORMER)
        return found

    return make


@pytest.fixture
def storage(new_storage):
    return new_storage()


def write(storage, files):
    for name, data in files.items():
        storage.write(name, data)


def content(folder):
    """Return all files below a directory by name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def overwrite(storage, files, error=None, begins=False):
    """Write a new run over the former, which ends with an error if one is given."""
    with former.keep_until_replaced(storage, announce=lambda line: None) as begun:
        write(storage, files)
        if begins:
            begun()
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("files", "error", "begins", "kept"),
    [
        (NEW | CHECKPOINT, None, False, NEW | CHECKPOINT),
        (NEW, ValueError(), False, FORMER),
        (NEW, KeyboardInterrupt(), False, FORMER),
        (NEW | CHECKPOINT, ValueError(), False, NEW | CHECKPOINT),
        (NEW, ValueError(), True, NEW),
    ],
)
def test_the_former_run_stays_until_the_new_one_trains(
    storage, tmp_path, files, error, begins, kept
):
    with nullcontext() if error is None else pytest.raises(type(error)):
        overwrite(storage, files, error, begins)
    assert content(tmp_path / "run") == kept


@pytest.mark.parametrize("files", [NEW, NEW | CHECKPOINT], ids=["data", "checkpoint"])
@pytest.mark.parametrize("error", [None, ValueError()], ids=["replaced", "refused"])
def test_after_a_kill_at_any_change_one_of_both_runs_is_whole(
    new_storage, tmp_path, files, error
):
    outcomes = []
    for changes in range(40):
        storage = new_storage(f"killed-{changes}")
        storage.changes_left = changes
        with suppress(StorageError, ValueError):
            overwrite(storage, files, error)
        storage.changes_left = 10**6
        former.complete_overwrite(storage)
        outcomes.append(content(tmp_path / f"killed-{changes}"))
    assert outcomes[0] == FORMER
    assert outcomes[-1] == (FORMER if error and files == NEW else files)
    assert all(outcome in (FORMER, files) for outcome in outcomes)
