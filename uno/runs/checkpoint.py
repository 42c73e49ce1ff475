"""Checkpoints: ``checkpoints/<phase>/step_00000110/`` with tensors, state, configuration and, written last, a
manifest of their sizes and SHA-256. A directory whose manifest does not verify is not a checkpoint.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from uno.data.files import Storage, parse_json
from uno.errors import StorageError
from uno.limits import MAX_STATE_BYTES

FORMAT_VERSION = 1
TENSORS, STATE, CONFIG, MANIFEST = "tensors.safetensors", "state.json", "config.yaml", "manifest.json"

log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """What was stored: tensors by name and a JSON-able state."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    storage: Storage, phase: str, checkpoint: Checkpoint, config_yaml: str,
    before: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Write a checkpoint unless this step has a valid one. What ``before`` does is done by the time that it
    counts. A StorageError leaves older checkpoints as they were.
    """
    directory = folder(phase, checkpoint.step)
    if found := storage.walk(directory):
        with suppress(StorageError):
            _verified_files(storage, directory)
            return
    state = {"format_version": FORMAT_VERSION, "step": checkpoint.step, **checkpoint.state}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    texts = {STATE: json.dumps(state, indent=1).encode(), CONFIG: config_yaml.encode()}
    files = {TENSORS: safetensors.torch.save(tensors), **texts}
    manifest = json.dumps({name: _entry(data) for name, data in files.items()}, indent=1).encode()
    if found:
        storage.delete(directory)
    try:
        with ThreadPoolExecutor(len(files)) as pool:  # for object stores: their requests take long
            each = map if storage.is_local else pool.map
            list(each(lambda name: storage.write(f"{directory}/{name}", files[name]), files))
        before()
        storage.write(f"{directory}/{MANIFEST}", manifest)
    except StorageError:
        with suppress(StorageError):
            storage.delete(directory)
        raise


def prune(storage: Storage, phase: str, last: int, keep: int) -> None:
    """Delete all checkpoints up to step ``last`` but the newest ``keep``. One of a later step may be in the
    middle of being written, while this waits for its turn.
    """
    found = storage.walk(f"checkpoints/{phase}")
    steps = [step for step in checkpoint_steps(storage, phase) if step <= last]
    finished = [s for s in steps if f"{_base(s)}/{MANIFEST}" in found]
    for step in sorted({*steps} - {*finished[-keep:]}):
        storage.delete(folder(phase, step))


def checkpoint_steps(storage: Storage, phase: str) -> list[int]:
    """Steps that have a checkpoint directory, valid or not, ascending."""
    names = storage.list(f"checkpoints/{phase}")
    return sorted(int(name.removeprefix("step_")) for name in names if re.fullmatch("step_[0-9]{8,18}", name))


def load_newest(storage: Storage, phase: str) -> Checkpoint | None:
    """The newest valid checkpoint, None where the phase has none; StorageError: none of those verifies."""
    newest, problems = read_checkpoints(storage, phase)
    for step, problem in problems.items():
        log.warning("skipping checkpoint %s: %s", folder(phase, step), problem)
    return newest


def read_checkpoints(
    storage: Storage, phase: str, every: bool = False
) -> tuple[Checkpoint | None, dict[int, str]]:
    """As :func:`load_newest`, with what is wrong with newer ones (with ``every`` one) by step."""
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
        none = f"none of the {len(problems)} checkpoints in {storage.path(f'checkpoints/{phase}')} verifies"
        raise StorageError(f"{none} ({problems[max(problems)]}); use --fresh to start over")
    return newest, problems


def load_checkpoint(storage: Storage, phase: str, step: int) -> Checkpoint:
    """One checkpoint. StorageError: a file is missing, truncated or altered, or the format is unknown."""
    files = _verified_files(storage, folder(phase, step))
    try:
        state = dict(parse_json(files[STATE]))
        if state.get("format_version") != FORMAT_VERSION:
            raise StorageError(f"format version {state.get('format_version')} instead of {FORMAT_VERSION}")
        return Checkpoint(step, safetensors.torch.load(files[TENSORS]), state)
    except (ValueError, TypeError, SafetensorError) as error:
        raise StorageError(f"content is damaged: {error}") from None


def folder(phase: str, step: int) -> str:
    """Directory of a checkpoint in its run."""
    return f"checkpoints/{phase}/{_base(step)}"


def _base(step: int) -> str:
    return f"step_{step:08d}"


def _verified_files(storage: Storage, directory: str) -> dict[str, bytes]:
    found = storage.find(f"{directory}/{MANIFEST}", MAX_STATE_BYTES)
    if found is None:
        raise StorageError("no manifest: it was never finished")
    try:
        manifest = dict(parse_json(found))
    except (ValueError, TypeError):
        raise StorageError("manifest is damaged") from None
    files = {}
    for name in (TENSORS, STATE, CONFIG):
        data = storage.find(f"{directory}/{name}") if name in manifest else None
        if data is None:
            raise StorageError(f"{name} is missing")
        if manifest[name] != _entry(data):
            raise StorageError(f"{name} is damaged")
        files[name] = data
    return files


def _entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
