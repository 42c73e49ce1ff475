"""Checkpoints: ``checkpoints/<phase>/step_00000110.safetensors``, with the
configuration in the metadata. A file appears whole or not at all, and holds the SHA-256
of its content: one that does not verify is none.
"""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from uno.data.files import Storage
from uno.data.output import seal, unseal
from uno.errors import StorageError

FORMAT_VERSION = 2

log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """What is stored: tensors by name and the run's configuration."""

    step: int
    tensors: dict[str, Tensor]
    config_yaml: str


def save_checkpoint(
    storage: Storage,
    phase: str,
    checkpoint: Checkpoint,
    enqueue: Callable[[Callable[[], None]], None] = lambda write: write(),
) -> None:
    """Write a checkpoint, of the tensors as they are now, unless this step has a valid
    one: now, or when ``enqueue`` calls what it gets. A StorageError leaves older
    checkpoints as they were.
    """
    name = file_name(phase, checkpoint.step)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in checkpoint.tensors.items()
    }
    facts = {"format_version": str(FORMAT_VERSION), "config": checkpoint.config_yaml}
    data = seal(name, tensors, facts)

    def write() -> None:
        if checkpoint.step in checkpoint_steps(storage, phase):
            with suppress(StorageError):
                load_checkpoint(storage, phase, checkpoint.step)
                return
        storage.write(name, data)

    enqueue(write)


def prune(storage: Storage, phase: str, last: int, keep: int) -> None:
    """Delete all checkpoints up to step ``last`` but the newest ``keep``. One of a
    later step may have been written while this waited for its turn.
    """
    steps = [step for step in checkpoint_steps(storage, phase) if step <= last]
    for step in steps[:-keep]:
        storage.delete(file_name(phase, step))


def checkpoint_steps(storage: Storage, phase: str) -> list[int]:
    """Steps that have a checkpoint, valid or not, ascending. StorageError: they have
    another format.
    """
    names = storage.list(f"checkpoints/{phase}")
    if any(re.fullmatch("step_[0-9]{8,18}", name) for name in names):
        problem = (
            f"{storage.path(f'checkpoints/{phase}')} has format version 1, not"
            f" {FORMAT_VERSION}"
        )
        raise StorageError(f"{problem}; use --overwrite, or another directory")
    found = (re.fullmatch(r"step_([0-9]{8,18})\.safetensors", name) for name in names)
    return sorted(int(match[1]) for match in found if match is not None)


def load_newest(storage: Storage, phase: str) -> Checkpoint | None:
    """The newest valid checkpoint, None where the phase has none; StorageError: none
    of those verifies.
    """
    newest, problems = read_checkpoints(storage, phase)
    for step, problem in problems.items():
        log.warning("skipping checkpoint %s: %s", file_name(phase, step), problem)
    return newest


def read_checkpoints(
    storage: Storage, phase: str
) -> tuple[Checkpoint | None, dict[int, str]]:
    """Read the newest valid checkpoint of a phase.

    Returns:
        The checkpoint, None if the phase has none, and what is wrong with each newer
        one, by its step.

    Raises:
        StorageError: The phase has checkpoints, and all of them are damaged.
    """
    problems: dict[int, str] = {}
    for step in reversed(checkpoint_steps(storage, phase)):
        try:
            return load_checkpoint(storage, phase, step), problems
        except StorageError as error:
            problems[step] = str(error)
    if problems:
        none = (
            f"none of the {len(problems)} checkpoints in"
            f" {storage.path(f'checkpoints/{phase}')} verifies"
        )
        raise StorageError(
            f"{none} ({problems[max(problems)]}); use --overwrite to start over"
        )
    return None, problems


def load_checkpoint(storage: Storage, phase: str, step: int) -> Checkpoint:
    """One checkpoint. StorageError: it is missing, truncated or altered, or its
    format is unknown.
    """
    name = file_name(phase, step)
    try:
        tensors, facts = unseal(name, storage.read(name))
    except ValueError as error:
        raise StorageError(str(error)) from None
    if (version := facts.get("format_version")) != str(FORMAT_VERSION):
        raise StorageError(f"format version {version} instead of {FORMAT_VERSION}")
    return Checkpoint(step, tensors, facts.get("config", ""))


def file_name(phase: str, step: int) -> str:
    """Name of a checkpoint in its run."""
    return f"checkpoints/{phase}/step_{step:08d}.safetensors"
