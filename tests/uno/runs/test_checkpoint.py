"""A checkpoint is a directory whose manifest verifies; everything else is skipped aloud."""

import errno
import hashlib
import json
import logging
import os

import pytest
import torch

from uno.data.files import Storage
from uno.errors import StorageError
from uno.runs.checkpoint import Checkpoint, checkpoint_steps, load_checkpoint, load_newest, save_checkpoint

FILES = ("tensors.safetensors", "state.json", "config.yaml", "manifest.json")


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((3, 2), float(step)),
        "strided": torch.arange(6.0).view(2, 3).T,
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "count": torch.tensor(step),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
    }


def save(storage: Storage, *steps: int, keep: int = 9) -> None:
    for step in steps:
        save_checkpoint(
            storage, "discover", Checkpoint(step, tensors(step), {"phase": "discover"}), "seed: 0\n", keep
        )


def folder(step: int) -> str:
    return f"checkpoints/discover/step_{step:08d}"


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(str(tmp_path / "run"))


@pytest.mark.parametrize("uri", [False, True])
def test_round_trip(storage, uri):
    """Kills: tensors that alias or lose their type, the phases mixed, a name missing from the manifest."""
    storage = Storage("mock:///run") if uri else storage
    assert load_newest(storage, "discover") is None
    save(storage, 3, 12)
    assert checkpoint_steps(storage, "discover") == [3, 12]
    assert load_newest(storage, "pretrain") is None
    found = load_newest(storage, "discover")
    assert (found.step, found.state["phase"], found.state["format_version"]) == (12, "discover", 1)
    for name, tensor in tensors(12).items():
        assert torch.equal(found.tensors[name], tensor) and found.tensors[name].dtype == tensor.dtype
    assert set(storage.list(folder(12))) == set(FILES)
    assert storage.read(f"{folder(12)}/config.yaml") == b"seed: 0\n"


def truncate(storage, name):
    storage.write(name, storage.read(name)[:-1])


def flip(storage, name):
    data = bytearray(storage.read(name))
    data[len(data) // 2] ^= 1
    storage.write(name, bytes(data))


def remove(storage, name):
    storage.delete(name)


def foreign(storage, name):
    """Valid JSON of another shape; content of another kind."""
    storage.write(name, b"[1, 2]")


def extreme(storage, name):
    storage.write(name, b'{"tensors.safetensors": {"size": Infinity, "sha256": "x"}}')


@pytest.mark.parametrize("damage", [truncate, flip, remove, foreign, extreme])
@pytest.mark.parametrize("name", FILES)
def test_the_newest_valid_one_is_taken(storage, caplog, name, damage):
    """Kills: the newest name wins, size checked without content, a file the manifest does not cover, silence
    about what was skipped.
    """
    save(storage, 3, 12, 20)
    damage(storage, f"{folder(20)}/{name}")
    with caplog.at_level(logging.WARNING):
        found = load_newest(storage, "discover")
    assert found.step == 12 and found.tensors["weight"][0, 0] == 12
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step_00000020" in caplog.text and "step_00000012" not in caplog.text
    for step in (3, 12):
        damage(storage, f"{folder(step)}/{name}")
    with pytest.raises(
        StorageError, match=r"none of the 3 checkpoints .*discover verifies.*--fresh"
    ) as caught:
        load_newest(storage, "discover")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("state.json", b"[1, 2]", "damaged"),
        ("state.json", b"not json", "damaged"),
        ("state.json", b"[" * 100_000, "damaged"),
        ("state.json", b'{"format_version": 99}', "format version 99 instead of 1"),
        ("tensors.safetensors", b"not safetensors", "damaged"),
        ("tensors.safetensors", b"", "damaged"),
    ],
)
def test_content_that_a_matching_manifest_vouches_for_is_still_checked(storage, name, content, says):
    """A version from the future, or a file made by hand. Kills: a traceback of json or safetensors."""
    save(storage, 3, 12)
    storage.write(f"{folder(12)}/{name}", content)
    manifest = json.loads(storage.read(f"{folder(12)}/manifest.json"))
    manifest[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    storage.write(f"{folder(12)}/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(StorageError, match=says):
        load_checkpoint(storage, "discover", 12)
    assert load_newest(storage, "discover").step == 3


def test_the_last_k_are_kept(storage):
    """Kills: keep ignored, the oldest kept, other phases deleted."""
    save_checkpoint(storage, "pretrain", Checkpoint(1, tensors(1), {}), "", 1)
    save(storage, 1, 2, 30, 100, keep=2)
    assert checkpoint_steps(storage, "discover") == [30, 100]
    save(storage, 101, keep=1)
    assert checkpoint_steps(storage, "discover") == [101]
    assert checkpoint_steps(storage, "pretrain") == [1]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("damage", ["unfinished", "flipped"])
def test_a_broken_newer_one_never_costs_the_valid_ones(storage, keep, damage):
    """A kill while saving step 30 leaves rubbish; the run resumes from 20 and is stopped at 25. Kills: the
    rubbish counted as the newest, so that the valid one just written is deleted.
    """
    save(storage, 10, 20, 30)
    if damage == "flipped":
        flip(storage, f"{folder(30)}/state.json")
    else:
        storage.delete(f"{folder(30)}/manifest.json")
    save(storage, 25, keep=keep)
    assert load_newest(storage, "discover").step == 25
    assert checkpoint_steps(storage, "discover") == ([25] if keep == 1 else [20, 25])


def test_unfinished_ones_do_not_count_among_the_kept(storage):
    save(storage, 10, 20, 30)
    storage.delete(f"{folder(20)}/manifest.json")
    save(storage, 40, keep=3)
    assert checkpoint_steps(storage, "discover") == [10, 30, 40]


@pytest.mark.parametrize("failing_write", range(4))
def test_a_full_disk_keeps_the_older_ones(storage, monkeypatch, failing_write):
    """Kills: older checkpoints deleted first, the half-written one left, an OSError that passes through."""
    save(storage, 10)
    replace, count = os.replace, iter(range(9))

    def full(*args):
        if next(count) == failing_write:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*args)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match=r"cannot write .*step_00000020.*No space left"):
        save(storage, 20, keep=1)
    monkeypatch.undo()
    assert checkpoint_steps(storage, "discover") == [10]
    assert load_newest(storage, "discover").step == 10


def test_saving_a_step_again_never_removes_it(storage, monkeypatch):
    """A stop right after a save stores the same step. Kills: delete, then a write that fails."""
    save(storage, 10)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    save(storage, 10, keep=1)
    monkeypatch.undo()
    assert load_newest(storage, "discover").step == 10
    flip(storage, f"{folder(10)}/state.json")
    save(storage, 10, keep=1)  # one that does not verify is written anew
    assert load_newest(storage, "discover").step == 10


def test_the_manifest_is_written_last(storage, monkeypatch):
    """Kills: a manifest for files that are not there yet."""
    order = []
    write = Storage.write
    monkeypatch.setattr(
        Storage, "write", lambda self, name, data: (order.append(name), write(self, name, data))
    )
    save(storage, 10)
    assert [name.rpartition("/")[2] for name in order] == list(FILES)


def test_other_names_are_not_checkpoints(storage):
    """Kills: int() of a foreign directory's name."""
    for name in ("step_\u00b2", "12", "step_12", "step_0000000x", "step_", "tmp"):
        storage.write(f"checkpoints/discover/{name}/x", b"")
    assert checkpoint_steps(storage, "discover") == []
    assert load_newest(storage, "discover") is None
