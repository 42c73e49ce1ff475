"""Write and read checkpoints.

The checkpoints of a phase are the files ``checkpoints/PHASE/step_00000110.safetensors``
of the run directory. Each holds tensors, and in its metadata the run's configuration.
Files are written atomically. A file also holds the SHA-256 of its content, and is not
used if its content differs.
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
    """The content of a checkpoint.

    Attributes:
        step: The number of optimizer steps before it, in its phase.
        tensors: Tensors by name, see :func:`uno.steps.state_tensors`.
        config_yaml: The configuration of the run as YAML.
    """

    step: int
    tensors: dict[str, Tensor]
    config_yaml: str


def save_checkpoint(
    storage: Storage,
    phase: str,
    checkpoint: Checkpoint,
    enqueue: Callable[[Callable[[], None]], None] = lambda write: write(),
) -> None:
    """Write a checkpoint, unless a valid one of the same step exists.

    The tensors are copied now, so they may change before the file is written. If
    writing fails, older checkpoints are unchanged.

    Args:
        storage: The run directory.
        phase: The name of the phase.
        checkpoint: The content.
        enqueue: Takes the function that writes the file, and calls it now or later.

    Raises:
        StorageError: The file cannot be written. It is raised where the function is
            called.
    """
    name = file_name(phase, checkpoint.step)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in checkpoint.tensors.items()
    }
    facts = {"format_version": str(FORMAT_VERSION), "config": checkpoint.config_yaml}
    data = seal(name, tensors, facts)

    def write() -> None:
        """Write the file, unless a valid checkpoint of this step exists."""
        if checkpoint.step in checkpoint_steps(storage, phase):
            with suppress(StorageError):
                load_checkpoint(storage, phase, checkpoint.step)
                return
        storage.write(name, data)

    enqueue(write)


def prune(storage: Storage, phase: str, last: int, keep: int) -> None:
    """Delete old checkpoints of a phase.

    Args:
        storage: The run directory.
        phase: The name of the phase.
        last: The step up to which checkpoints are deleted. Later ones may have been
            written since this deletion was queued, and are not touched.
        keep: The number of checkpoints up to ``last`` that are kept, the newest ones.
    """
    steps = [step for step in checkpoint_steps(storage, phase) if step <= last]
    for step in steps[:-keep]:
        storage.delete(file_name(phase, step))


def checkpoint_steps(storage: Storage, phase: str) -> list[int]:
    """Return the steps of a phase that have a checkpoint, in ascending order.

    The files are not read, so a checkpoint may be damaged.
    """
    names = storage.list(f"checkpoints/{phase}")
    matches = (re.fullmatch(r"step_([0-9]{8,18})\.safetensors", name) for name in names)
    return sorted(int(match[1]) for match in matches if match is not None)


def load_newest(storage: Storage, phase: str) -> Checkpoint | None:
    """Read the newest valid checkpoint of a phase, and warn of newer damaged ones.

    Returns:
        The checkpoint, or None if the phase has no checkpoints.

    Raises:
        StorageError: The phase has checkpoints, and all of them are damaged.
    """
    problems: dict[int, str] = {}
    for step in reversed(checkpoint_steps(storage, phase)):
        try:
            return load_checkpoint(storage, phase, step)
        except StorageError as error:
            problems[step] = str(error)
            log.warning("skipping checkpoint %s: %s", file_name(phase, step), error)
    if problems:
        none = (
            f"none of the {len(problems)} checkpoints in"
            f" {storage.path(f'checkpoints/{phase}')} verifies"
        )
        raise StorageError(
            f"{none} ({problems[max(problems)]}); use --overwrite to start over"
        )
    return None


def load_checkpoint(storage: Storage, phase: str, step: int) -> Checkpoint:
    """Read the checkpoint of one step.

    Raises:
        StorageError: The checkpoint is missing or damaged, or has an unknown format.
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
    """Return the name of a checkpoint's file, relative to the run directory."""
    return f"checkpoints/{phase}/step_{step:08d}.safetensors"
