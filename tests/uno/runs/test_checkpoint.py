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
from uno.runs.checkpoint import (
    Checkpoint,
    checkpoint_steps,
    load_checkpoint,
    load_newest,
    prune,
    save_checkpoint,
)

FILES = ("tensors.safetensors", "state.json", "config.yaml", "manifest.json")


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((3, 2), float(step)),
        "strided": torch.arange(6.0).view(2, 3).T,
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "count": torch.tensor(step),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
    }


def save(storage: Storage, *steps: int, keep: int = 9, phase: str = "discover") -> None:
    for step in steps:
        save_checkpoint(storage, phase, Checkpoint(step, tensors(step), {"phase": phase}), "seed: 0\n")
        prune(storage, phase, step, keep)


def folder(step: int) -> str:
    return f"checkpoints/discover/step_{step:08d}"


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(str(tmp_path / "run"))


@pytest.mark.parametrize("uri", [False, True])
def test_round_trip(storage, uri):
    """Kills: tensors that alias or lose their type, the phases mixed, a name missing from the manifest."""
    storage = Storage("mock:///run") if uri else storage
    for name in ("step_\u00b2", "12", "step_12", "step_0000000x", "step_", "tmp"):
        storage.write(f"checkpoints/discover/{name}/x", b"")
    assert load_newest(storage, "discover") is None
    save(storage, 3, 12)
    assert checkpoint_steps(storage, "discover") == [3, 12] and load_newest(storage, "pretrain") is None
    found = load_newest(storage, "discover")
    assert (found.step, found.state["phase"], found.state["format_version"]) == (12, "discover", 1)
    for name, tensor in tensors(12).items():
        assert torch.equal(found.tensors[name], tensor) and found.tensors[name].dtype == tensor.dtype
    assert set(storage.list(folder(12))) == set(FILES)
    assert storage.read(f"{folder(12)}/config.yaml") == b"seed: 0\n"


DAMAGE = {
    "truncated": lambda data: data[:-1],
    "flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "missing": None,
    "of another shape": lambda data: b"[1, 2]",
    "extreme": lambda data: b'{"tensors.safetensors": {"size": Infinity, "sha256": "x"}}',
}


def damage(storage: Storage, name: str, how: str) -> None:
    if DAMAGE[how] is None:
        storage.delete(name)
    else:
        storage.write(name, DAMAGE[how](storage.read(name)))


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_the_newest_valid_one_is_taken(storage, caplog, name, how):
    """Kills: the newest name wins, size checked without content, a file the manifest does not cover."""
    save(storage, 3, 12, 20)
    damage(storage, f"{folder(20)}/{name}", how)
    with caplog.at_level(logging.WARNING):
        found = load_newest(storage, "discover")
    assert found.step == 12 and found.tensors["weight"][0, 0] == 12
    (record,) = caplog.records
    assert "step_00000020" in record.getMessage()
    for step in (3, 12):
        damage(storage, f"{folder(step)}/{name}", how)
    with pytest.raises(StorageError, match=r"^none of the 3 checkpoints .*discover verifies.*--fresh.*$"):
        load_newest(storage, "discover")


@pytest.mark.parametrize(("name", "content", "says"), [
    ("state.json", b"[1, 2]", "damaged"), ("state.json", b"not json", "damaged"),
    ("state.json", b"[" * 100_000, "damaged"), ("tensors.safetensors", b"", "damaged"),
    ("state.json", b'{"format_version": 99}', "format version 99 instead of 1"),
    ("tensors.safetensors", b"not safetensors", "damaged"),
])  # fmt: skip
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
    """Kills: keep ignored, the oldest kept, other phases deleted, unfinished ones counted among the kept."""
    save(storage, 1, phase="pretrain")
    save(storage, 1, 2, 30, 100, keep=2)
    assert checkpoint_steps(storage, "discover") == [30, 100]
    storage.delete(f"{folder(100)}/manifest.json")
    save(storage, 101, keep=2)
    assert checkpoint_steps(storage, "discover") == [30, 101]
    save(storage, 102, keep=1)
    assert checkpoint_steps(storage, "discover") == [102] and checkpoint_steps(storage, "pretrain") == [1]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize(("name", "how"), [("state.json", "flipped"), ("manifest.json", "missing")])
def test_a_broken_newer_one_never_costs_the_valid_ones(storage, keep, name, how):
    """It stays until its step is reached. Kills: the rubbish counted as the newest, so that the valid one
    just written is deleted; a later step deleted, which may be one in the middle of being written.
    """
    save(storage, 10, 20, 30)
    damage(storage, f"{folder(30)}/{name}", how)
    save(storage, 25, keep=keep)
    assert load_newest(storage, "discover").step == 25
    assert checkpoint_steps(storage, "discover") == ([25, 30] if keep == 1 else [20, 25, 30])
    save(storage, 30, keep=keep)
    assert load_newest(storage, "discover").step == 30
    assert checkpoint_steps(storage, "discover") == ([30] if keep == 1 else [25, 30])


@pytest.mark.parametrize("failing_write", range(4))
def test_a_full_disk_keeps_the_older_ones(storage, monkeypatch, failing_write):
    """Kills: older checkpoints deleted first, the half-written one left, an OSError that passes through."""
    save(storage, 10)
    replace, written = os.replace, []

    def full(source, target):
        if len(written) == failing_write:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match=r"cannot write .*step_00000020.*No space left"):
        save(storage, 20, keep=1)
    assert tuple(written) == FILES[:failing_write]
    save(storage, 10, keep=1)  # a stop right after a save stores the same step
    monkeypatch.undo()
    assert checkpoint_steps(storage, "discover") == [10] and load_newest(storage, "discover").step == 10
    damage(storage, f"{folder(10)}/state.json", "flipped")
    save(storage, 10, keep=1)  # one that does not verify is written anew
    assert load_newest(storage, "discover").step == 10
