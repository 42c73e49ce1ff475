"""A run whose storage fails, or whose checkpoints are damaged, and how it resumes."""

import errno
import os

import pytest

from tests.uno.small_run import (
    assert_same,
    copied_tensors,
    lines,
    small_config,
    train_both,
)
from uno.data.files import Storage
from uno.errors import StorageError
from uno.runs.checkpoint import checkpoint_steps, load_newest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    storage = Storage(str(tmp_path_factory.mktemp("undisturbed")))
    return copied_tensors(train_both(small_config(), storage)), lines(storage)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.release)]
)
def test_a_disk_that_takes_no_checkpoint(tmp_path, undisturbed, monkeypatch, number):
    """The error names the file, the older checkpoint stays, and the run resumes."""
    storage = Storage(str(tmp_path))
    write = storage.write

    def failing(name: str, data: bytes) -> None:
        if name.endswith("discover/step_00000012.safetensors"):
            raise StorageError(f"cannot write {name}: {os.strerror(number)}")
        write(name, data)

    monkeypatch.setattr(storage, "write", failing)
    with pytest.raises(StorageError, match="step_00000012"):
        train_both(small_config(), storage)
    assert checkpoint_steps(storage, "discover") == [6]
    monkeypatch.undo()
    assert_same(copied_tensors(train_both(small_config(), storage)), undisturbed[0])
    assert load_newest(storage, "discover").step == 18


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "bit flipped": lambda path: path.write_bytes(
        path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])
    ),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("bit flipped", "missing")
        ),
    ],
)
def test_a_damaged_newest_checkpoint_costs_one_interval(tmp_path, undisturbed, damage):
    """The checkpoint before it is taken, and the end is the same."""
    storage = Storage(str(tmp_path))
    train_both(small_config(), storage)
    DAMAGE[damage](tmp_path / "checkpoints/discover/step_00000018.safetensors")
    assert load_newest(storage, "discover").step == 18 - 6
    assert_same(copied_tensors(train_both(small_config(), storage)), undisturbed[0])
    assert lines(storage) == undisturbed[1]
