"""Write and read the checkpoints of the training phases of a run.

The phases are "pretext", "pretrain" and "discover". The checkpoints of a phase are the
files ``checkpoints/PHASE/step_00000110.safetensors`` of the run directory. Each holds
tensors, and in its metadata the run's configuration. Files are written atomically. A
file also holds the SHA-256 of its content, and is not used if its content differs.
"""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from uno.data.files import Storage
from uno.data.output import dump_tensors, load_tensors
from uno.errors import StorageError

FORMAT_VERSION = 3

log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """The content of a checkpoint: the state of one training phase after some step.

    Attributes:
        step: The number of optimizer steps that the phase had taken.
        tensors: The state of training by name: weights, optimizer state and the like,
            see :func:`uno.steps.state_tensors`.
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
    """Write a checkpoint, unless a valid one of the same phase and step exists.

    A checkpoint is valid if :func:`load_checkpoint` accepts it: it can be read, and its
    checksum, format version, phase and step are right. Any other file of the same step
    is replaced. The tensors are copied now, so they may change before the file is
    written. If writing fails, older checkpoints are unchanged.

    Args:
        storage: The run directory.
        phase: The phase, "pretext", "pretrain" or "discover".
        checkpoint: The content.
        enqueue: Receives a function without arguments that writes the file. It calls
            this function now, or later in a thread, such as
            :meth:`uno.runs.journal.Journal.enqueue`. By default the file is written
            now, before this call returns.

    Raises:
        StorageError: The file cannot be written. The function that ``enqueue`` receives
            raises it, so it appears here only if ``enqueue`` calls it now.
    """
    name = checkpoint_name(phase, checkpoint.step)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in checkpoint.tensors.items()
    }
    facts = {"format_version": str(FORMAT_VERSION), "config": checkpoint.config_yaml}
    data = dump_tensors(name, tensors, facts)

    def write() -> None:
        """Write the file, unless a valid checkpoint of this step exists."""
        if checkpoint.step in checkpoint_steps(storage, phase):
            with suppress(StorageError):
                load_checkpoint(storage, phase, checkpoint.step)
                return
        storage.write(name, data)

    enqueue(write)


def prune_checkpoints(storage: Storage, phase: str, last: int, keep: int) -> None:
    """Delete old checkpoints of a phase, whether they are valid or damaged.

    Args:
        storage: The run directory.
        phase: The phase, "pretext", "pretrain" or "discover".
        last: The step up to which checkpoints are deleted. Later ones may have been
            written since this deletion was queued, and are not touched.
        keep: The number of checkpoints up to ``last`` that are kept, the newest ones;
            at least 1. Damaged ones count, too.

    Raises:
        StorageError: A file cannot be deleted.
    """
    steps = [step for step in checkpoint_steps(storage, phase) if step <= last]
    for step in steps[:-keep]:
        storage.delete(checkpoint_name(phase, step))


def checkpoint_steps(storage: Storage, phase: str) -> list[int]:
    """Return the steps at which a phase has a checkpoint, in ascending order.

    A step is the number of optimizer steps before the checkpoint. Only the names of
    files are read, so a checkpoint may be damaged. The list is empty if there are none.

    Args:
        storage: The run directory.
        phase: The phase, "pretext", "pretrain" or "discover".

    Raises:
        StorageError: The files of the phase cannot be listed.
    """
    names = storage.list(f"checkpoints/{phase}")
    matches = (re.fullmatch(r"step_([0-9]{8,18})\.safetensors", name) for name in names)
    return sorted(int(match[1]) for match in matches if match is not None)


def load_newest(storage: Storage, phase: str) -> Checkpoint | None:
    """Read the newest valid checkpoint of a phase, and warn of newer damaged ones.

    Args:
        storage: The run directory.
        phase: The phase, "pretext", "pretrain" or "discover".

    Returns:
        The checkpoint with the highest step that :func:`load_checkpoint` accepts: its
        step, its tensors by name on the CPU, and its configuration as YAML. None if the
        phase has no checkpoints.

    Raises:
        StorageError: The phase has checkpoints, and all of them are damaged, have
            another format version or cannot be read; or they cannot be listed.
    """
    problems: dict[int, str] = {}
    for step in reversed(checkpoint_steps(storage, phase)):
        try:
            return load_checkpoint(storage, phase, step)
        except StorageError as error:
            problems[step] = str(error)
            log.warning(
                "skipping checkpoint %s: %s", checkpoint_name(phase, step), error
            )
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
    """Read the checkpoint that a phase wrote at one step.

    Args:
        storage: The run directory.
        phase: The phase, "pretext", "pretrain" or "discover".
        step: The number of optimizer steps before the checkpoint.

    Returns:
        The checkpoint: its step, its tensors by name on the CPU, and the configuration
        of its run as YAML.

    Raises:
        StorageError: The checkpoint is missing, damaged or a copy of that of another
            phase or step, has another format version, or cannot be read.
    """
    name = checkpoint_name(phase, step)
    try:
        tensors, facts = load_tensors(name, storage.read(name))
    except ValueError as error:
        raise StorageError(str(error)) from None
    if (version := facts.get("format_version")) != str(FORMAT_VERSION):
        raise StorageError(f"format version {version} instead of {FORMAT_VERSION}")
    return Checkpoint(step, tensors, facts.get("config", ""))


def checkpoint_name(phase: str, step: int) -> str:
    """Return the name of a checkpoint's file, relative to the run directory.

    An example is ``checkpoints/discover/step_00000110.safetensors``. A step with more
    than eight digits makes the name longer.

    Args:
        phase: The phase, "pretext", "pretrain" or "discover".
        step: The number of optimizer steps before the checkpoint.
    """
    return f"checkpoints/{phase}/step_{step:08d}.safetensors"
