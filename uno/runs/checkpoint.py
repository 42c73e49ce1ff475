"""Checkpoints; nothing else knows the names of their files.

``checkpoints/<phase>/step_00000110/`` holds ``tensors.safetensors``, ``state.json``, ``config.yaml`` and
``manifest.json`` (size and SHA-256 of each), which is written last. A directory whose manifest does not
verify is not a checkpoint.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from uno.data.files import Storage
from uno.errors import StorageError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What was stored: tensors by name and a JSON-able state."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    storage: Storage, phase: str, checkpoint: Checkpoint, config_yaml: str, keep: int = 2
) -> None:
    """Write a checkpoint, then delete all but the newest ``keep``, and what stands at later steps.

    Nothing is written where this step has a valid checkpoint already. Later steps are checkpoints that did
    not verify when this run resumed: counting them as the newest would delete the valid ones instead.

    Raises:
        StorageError: the disk is full or read-only; older checkpoints are left as they were.
    """
    directory = _directory(phase, checkpoint.step)
    with suppress(StorageError):
        _verified_files(storage, directory)
        return
    state = {"format_version": FORMAT_VERSION, "step": checkpoint.step, **checkpoint.state}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    files = {
        "tensors.safetensors": safetensors.torch.save(tensors),
        "state.json": json.dumps(state, indent=1).encode(),
        "config.yaml": config_yaml.encode(),
    }
    storage.delete(directory)
    try:
        for name, data in files.items():
            storage.write(f"{directory}/{name}", data)
        manifest = {
            name: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for name, d in files.items()
        }
        storage.write(f"{directory}/{MANIFEST}", json.dumps(manifest, indent=1).encode())
    except StorageError:
        with suppress(StorageError):
            storage.delete(directory)
        raise
    steps = checkpoint_steps(storage, phase)
    finished = [
        s for s in steps if s <= checkpoint.step and storage.exists(f"{_directory(phase, s)}/{MANIFEST}")
    ]
    for step in sorted({*steps} - {*finished[-keep:]}):
        storage.delete(_directory(phase, step))


def checkpoint_steps(storage: Storage, phase: str) -> list[int]:
    """Steps that have a checkpoint directory, valid or not, ascending."""
    names = storage.list(f"checkpoints/{phase}")
    return sorted(int(name.removeprefix("step_")) for name in names if re.fullmatch("step_[0-9]{8,18}", name))


def load_newest(storage: Storage, phase: str) -> Checkpoint | None:
    """The newest checkpoint that verifies; None where the phase has none. Warns about newer ones.

    Raises:
        StorageError: checkpoints exist but none verifies; starting over must be the user's decision.
    """
    newest, problems = read_checkpoints(storage, phase)
    for step, problem in problems.items():
        log.warning("skipping checkpoint %s: %s", _directory(phase, step), problem)
    return newest


def read_checkpoints(
    storage: Storage, phase: str, every: bool = False
) -> tuple[Checkpoint | None, dict[int, str]]:
    """The newest checkpoint that verifies, and step -> what is wrong with those that do not: with newer ones,
    or with ``every`` one.

    Raises:
        StorageError: there are checkpoints and none verifies.
    """
    newest, problems = None, {}
    for step in reversed(checkpoint_steps(storage, phase)):
        try:
            found = load_checkpoint(storage, phase, step)
            newest = newest or found
        except StorageError as error:
            problems[step] = str(error)
        if newest is not None and not every:
            break
    if problems and newest is None:
        raise StorageError(
            f"none of the {len(problems)} checkpoints in {storage.path('checkpoints/' + phase)} verifies "
            f"({problems[max(problems)]}); use --fresh to start over"
        )
    return newest, problems


def delete_checkpoint(storage: Storage, phase: str, step: int) -> None:
    """Remove the checkpoint of one step."""
    storage.delete(_directory(phase, step))


def load_checkpoint(storage: Storage, phase: str, step: int) -> Checkpoint:
    """One checkpoint, verified against its manifest.

    Raises:
        StorageError: a file is missing, truncated or altered, or the format is unknown.
    """
    directory = _directory(phase, step)
    files = _verified_files(storage, directory)
    try:
        state = dict(json.loads(files["state.json"]))
        if state.get("format_version") != FORMAT_VERSION:
            raise StorageError(f"format version {state.get('format_version')} instead of {FORMAT_VERSION}")
        return Checkpoint(step, safetensors.torch.load(files["tensors.safetensors"]), state)
    except (ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise StorageError(f"content is damaged: {error}") from None


def _verified_files(storage: Storage, directory: str) -> Mapping[str, bytes]:
    if not storage.exists(f"{directory}/{MANIFEST}"):
        raise StorageError("no manifest: it was never finished")
    try:
        manifest = json.loads(storage.read(f"{directory}/{MANIFEST}"))
        expected = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise StorageError("manifest is damaged") from None
    files = {}
    for name in ("tensors.safetensors", "state.json", "config.yaml"):
        if name not in expected or not storage.exists(f"{directory}/{name}"):
            raise StorageError(f"{name} is missing")
        data = storage.read(f"{directory}/{name}")
        if (len(data), hashlib.sha256(data).hexdigest()) != expected[name]:
            raise StorageError(f"{name} is damaged")
        files[name] = data
    return files


def _directory(phase: str, step: int) -> str:
    return f"checkpoints/{phase}/step_{step:08d}"
