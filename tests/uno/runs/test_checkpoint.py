"""A checkpoint is a file that proves its content; everything else is skipped aloud."""

import errno
import os
from unittest.mock import Mock

import pytest
import torch

from uno.data.files import Storage
from uno.data.output import dump_tensors
from uno.errors import StorageError
from uno.runs.checkpoint import (
    Checkpoint,
    checkpoint_name,
    checkpoint_steps,
    load_checkpoint,
    load_newest,
    prune_checkpoints,
    save_checkpoint,
)


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
        save_checkpoint(storage, phase, Checkpoint(step, tensors(step), "seed: 0\n"))
        prune_checkpoints(storage, phase, step, keep)


def path(step: int) -> str:
    return checkpoint_name("discover", step)


@pytest.mark.parametrize("uri", [False, True])
def test_round_trip(storage, uri):
    """Kills: tensors that alias or lose their type, the phases mixed, a
    configuration that is lost.
    """
    storage = Storage("mock:///run") if uri else storage
    for name in ("step_\u00b2", "12", "step_12", "step_0000000x", "step_", "tmp"):
        storage.write(f"checkpoints/discover/{name}/x", b"")
        storage.write(f"checkpoints/discover/{name}.safetensors", b"")
    assert load_newest(storage, "discover") is None
    save(storage, 3, 12)
    assert (
        checkpoint_steps(storage, "discover") == [3, 12]
        and load_newest(storage, "pretrain") is None
    )
    found = load_newest(storage, "discover")
    torch.testing.assert_close(found.tensors, tensors(12), rtol=0, atol=0)
    assert (found.step, found.config_yaml) == (12, "seed: 0\n")


def damage(storage: Storage, step: int) -> None:
    """Change the last bit of a checkpoint."""
    data = storage.read(path(step))
    storage.write(path(step), data[:-1] + bytes([data[-1] ^ 1]))


def test_the_newest_valid_one_is_taken(storage, caplog):
    """Kills: the newest name wins, damage in silence. (What is damage:
    tests/uno/data/test_output.py.)
    """
    save(storage, 3, 12, 20)
    damage(storage, 20)
    found = load_newest(storage, "discover")
    assert found.step == 12 and found.tensors["weight"][0, 0] == 12
    assert "step_00000020" in caplog.text
    for step in (3, 12):
        damage(storage, step)
    with pytest.raises(
        StorageError,
        match=r"^none of the 3 checkpoints .*discover verifies.*--overwrite.*$",
    ):
        load_newest(storage, "discover")


def test_a_file_that_verifies_is_still_checked(storage):
    """A version from the future, or a file of another name. Kills: another step's
    weights, renamed.
    """
    save(storage, 3, 12)
    future = dump_tensors(path(12), {"w": torch.zeros(1)}, {"format_version": "99"})
    for content, says in (
        (future, "format version 99 instead of 3"),
        (storage.read(path(3)), "it is the file checkpoints/.*/step_00000003"),
    ):
        storage.write(path(12), content)
        with pytest.raises(StorageError, match=says):
            load_checkpoint(storage, "discover", 12)
        assert load_newest(storage, "discover").step == 3


def test_the_last_k_are_kept(storage):
    """Kills: keep ignored, the oldest kept, other phases deleted."""
    save(storage, 1, phase="pretrain")
    save(storage, 1, 2, 30, 100, keep=2)
    assert checkpoint_steps(storage, "discover") == [30, 100]
    save(storage, 102, keep=1)
    assert checkpoint_steps(storage, "discover") == [102] and checkpoint_steps(
        storage, "pretrain"
    ) == [1]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_broken_newer_one_never_costs_the_valid_ones(storage, keep):
    """It stays until its step is reached. Kills: the rubbish counted as the newest, so
    that the valid one just written is deleted; a later step deleted, which may have
    been written meanwhile.
    """
    save(storage, 10, 20, 30)
    damage(storage, 30)
    save(storage, 25, keep=keep)
    assert load_newest(storage, "discover").step == 25
    assert checkpoint_steps(storage, "discover") == (
        [25, 30] if keep == 1 else [20, 25, 30]
    )
    save(storage, 30, keep=keep)
    assert load_newest(storage, "discover").step == 30
    assert checkpoint_steps(storage, "discover") == ([30] if keep == 1 else [25, 30])


def test_a_full_disk_keeps_the_older_ones(storage, monkeypatch):
    """Kills: older checkpoints deleted first, the half-written one left, an OSError
    that passes through.
    """
    save(storage, 10)

    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StorageError, match=r"cannot write .*00020.*No space left"):
            save(storage, 20, keep=1)
        save(storage, 10, keep=1)  # a stop right after a save stores the same step
    assert storage.list("checkpoints/discover") == ["step_00000010.safetensors"]
    assert load_newest(storage, "discover").step == 10
    damage(storage, 10)
    save(storage, 10, keep=1)  # one that does not verify is written anew
    assert load_newest(storage, "discover").step == 10
