"""Check and clean output directories, and store tensors with a checksum.

A directory that a command writes has a file that marks it, which says what the output
is made from. This module decides whether a command may write to a directory, and it
deletes the temporary files of processes that were killed there.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from uno.data.files import TEMPORARY, Storage, parse_json
from uno.errors import ConfigError, one_line
from uno.limits import MAX_STATE_BYTES

# the lock of a process that works in a directory (uno.runs.lock), no part of an output
LOCK_FILE = "lock.json"
MOST_KEYS = 6  # the largest number of keys that a message names

CHECKSUM = "sha256"  # key of the checksum in the metadata of a file of tensors


def holds_output(
    storage: Storage, mark: str, what: str, also: Collection[str] = ()
) -> bool:
    """Return whether a directory holds an output of a command, such as a run.

    Args:
        storage: The directory, or one above it.
        mark: Path below ``storage`` of the file that every such output has at the top
            of its directory. The folder part of the path is the directory.
        what: What the output is called in messages, such as "run".
        also: Names of files and folders in the directory that a command may write
            before the mark. By default there are none.

    Returns:
        True if the mark is there, whatever else the directory holds; the content of the
        mark is not read. False if the directory is missing, is empty, or holds no more
        than what ``also`` names, a lock, and temporary files of these and of the mark:
        a command was killed before it wrote the mark.

    Raises:
        ConfigError: The mark is missing, and the directory holds anything else, also a
            hidden file.
        StorageError: The mark cannot be looked up, or the directory cannot be listed.
    """
    if storage.exists(mark):
        return True
    folder, _, name = mark.rpartition("/")
    begun = {name, *also}
    for found in storage.list(folder):
        if found not in begun and final_name(found) not in begun and not is_lock(found):
            problem = (
                f"{_place(storage, mark)} is not empty and holds no {what} (no {name})"
            )
            raise ConfigError(
                f"{problem}; nothing was changed; choose another --output"
            )
    return False


def claim_directory(
    storage: Storage, mark: str, identity: Mapping[str, Any], what: str, **more: Any
) -> None:
    """Begin an output in a free directory, or accept the same output to resume it.

    A directory is free if :func:`holds_output` returns False for it: it has no mark,
    and nothing but a lock and temporary files of the lock and the mark. There, this
    writes the file ``mark``, a JSON object of ``identity`` and ``more``. If there is a
    mark, this writes nothing and compares the mark with ``identity``.

    Args:
        storage: The directory, or one above it.
        mark: Path below ``storage`` of the file that describes the output, at the top
            of the directory.
        identity: JSON values that say what the output is made from.
        what: What the output is called in messages, such as "pack".
        **more: Further JSON values of a new mark. They are not compared when the output
            is resumed, and the mark keeps its old ones.

    Raises:
        ConfigError: The directory holds other files and no mark; or its mark has
            another value than ``identity`` for a key. A key that the mark lacks counts
            as null, and a mark that is no JSON object as one without keys. Further keys
            of the mark are not compared. The message lists the keys that differ.
        StorageError: The directory cannot be listed, or the mark cannot be read or
            written, or has more than 64 MiB (``MAX_STATE_BYTES``).
    """
    if not holds_output(storage, mark, what):
        storage.write(mark, json.dumps({**identity, **more}, indent=1).encode())
        return
    found = read_mapping(storage, mark) or {}
    if different := [key for key, value in identity.items() if found.get(key) != value]:
        problem = (
            f"holds another {what} (other data or options: {', '.join(different)})"
        )
        raise ConfigError(f"{_place(storage, mark)} {problem}; choose another --output")


def _place(storage: Storage, mark: str) -> str:
    """Return the path or URI of the directory that holds an output.

    Args:
        storage: The directory, or one above it.
        mark: Path below ``storage`` of the file that marks the output.
    """
    return storage.below(mark.rpartition("/")[0])


def other_settings_error(
    place: str, what: str, keys: Sequence[str], advice: str
) -> ConfigError:
    """Return the error for an output that was made with other settings.

    The caller raises it. The message is ``PLACE holds WHAT with other settings: KEYS;
    ADVICE``.

    Args:
        place: Path or URI of the output.
        what: What it holds, with its article, such as "a run".
        keys: Names of the settings that differ. The message has the first 6 of them
            (:data:`MOST_KEYS`), and dots if there are more.
        advice: What the user can do.
    """
    names = ", ".join(keys[:MOST_KEYS]) + " ..." * (len(keys) > MOST_KEYS)
    return ConfigError(f"{place} holds {what} with other settings: {names}; {advice}")


def list_temporary_files(storage: Storage, below: str = "") -> list[str]:
    """Return the temporary files that killed processes left below a directory.

    They are found by names such as ``.model.pt.0a1b2c3d`` (a dot, the final name, a dot
    and 8 lower-case hex digits), in the directory and all folders below it. So a file
    that another process is writing at the moment is among them. Temporary files of the
    lock are not, because the process that holds the lock may be writing it.

    Args:
        storage: The directory, or one above it.
        below: Path of the directory below ``storage``.

    Returns:
        Paths relative to the root of ``storage``, in no particular order. The list is
        empty for a directory that does not exist, and in remote storage, where a file
        is written by one upload.
    """
    found = Path(storage.path(below)).rglob(".*") if storage.is_local else ()
    return [
        os.path.relpath(path, storage.root)
        for path in found
        if TEMPORARY.fullmatch(path.name) and not is_lock(path.name)
    ]


def delete_temporary_files(storage: Storage, below: str = "") -> None:
    """Delete the temporary files that killed processes left below a directory.

    They are the files that :func:`list_temporary_files` returns: in all folders below
    the directory, and none in remote storage. Temporary files of the lock stay. No
    other process may write to the directory at the same time.

    Args:
        storage: The directory, or one above it.
        below: Path of the directory below ``storage``.

    Raises:
        StorageError: A file cannot be deleted.
    """
    for name in list_temporary_files(storage, below):
        storage.delete(name)


def delete_temporary_files_of(storage: Storage, name: str) -> None:
    """Delete the temporary files that killed writers of one file left.

    They are the files beside it whose :func:`final_name` is the name of the file. No
    other process may write the file at the same time.

    Args:
        storage: The directory.
        name: Name of the file at the top of the directory. The file itself, if there is
            one, stays.

    Raises:
        StorageError: The directory cannot be listed, or a file cannot be deleted.
    """
    for found in storage.list():
        if final_name(found) == name:
            storage.delete(found)


def final_name(name: str) -> str:
    """Return the name that a temporary file gets once it is completely written.

    Args:
        name: Name of a file, without folders, such as ``.model.pt.0a1b2c3d``.

    Returns:
        The final name, such as ``model.pt``; '' if the name is not that of a temporary
        file, which is a dot, the final name, a dot and 8 lower-case hex digits.
    """
    return name[1:].rpartition(".")[0] if TEMPORARY.fullmatch(name) else ""


def is_lock(name: str) -> bool:
    """Return whether a file is the lock of a directory or a temporary file of the lock.

    Args:
        name: Name of the file, without folders. The result is True if it begins with
            ``lock.json`` after any leading dots.
    """
    return name.lstrip(".").startswith(LOCK_FILE)


def read_mapping(storage: Storage, name: str) -> dict[str, Any] | None:
    """Read a JSON object from a file, as a dict.

    Args:
        storage: The directory of the file.
        name: Path of the file below ``storage``.

    Returns:
        The dict, or None if there is no such file or it holds no JSON object.

    Raises:
        StorageError: The file cannot be read, or it has more than 64 MiB
            (``MAX_STATE_BYTES``).
    """
    data = storage.find(name, MAX_STATE_BYTES)
    return None if data is None else parse_mapping(data)


def parse_mapping(data: bytes | str) -> dict[str, Any] | None:
    """Parse a JSON object to a dict.

    Args:
        data: The JSON text, as bytes in UTF-8 or as str.

    Returns:
        The dict, or None if the data cannot be parsed (it is no JSON, is nested too
        deeply, or has an integer of thousands of digits) or is JSON of another type.
    """
    try:
        found = parse_json(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def dump_tensors(
    name: str, tensors: dict[str, Tensor], facts: Mapping[str, str]
) -> bytes:
    """Return the content of a safetensors file with a checksum of what it holds.

    No file is written. The ``__metadata__`` of the content holds the facts, the name
    under the key "name", and under "sha256" a checksum of the tensors and of these
    texts. :func:`load_tensors` reads the content.

    Args:
        name: The name that the file is to have, which ``load_tensors`` compares.
        tensors: The tensors by name, contiguous and in CPU memory. No two of them may
            share memory.
        facts: Further texts for ``__metadata__``, without the key "sha256". The key
            "name" is replaced.
    """
    facts = {**facts, "name": name}
    facts[CHECKSUM] = _checksum(tensors, facts)
    return bytes(safetensors.torch.save(tensors, facts))


def load_tensors(name: str, data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Check and read the content of a file that :func:`dump_tensors` made.

    Args:
        name: The name of the file. It must be the one that was given to
            :func:`dump_tensors`.
        data: The content of the file.

    Returns:
        The tensors by name, on the CPU; and the texts of ``__metadata__`` without the
        checksum, but with "name".

    Raises:
        ValueError: The content is truncated or altered, has no checksum, or is that of
            a file with another name.
    """
    try:
        tensors = safetensors.torch.load(data)
        end = 8 + int.from_bytes(data[:8], "little")
        facts = json.loads(data[8:end]).get("__metadata__", {})
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"it is damaged: {one_line(error)}") from None
    checksum = facts.pop(CHECKSUM, "")
    if checksum != _checksum(tensors, facts):
        raise ValueError(f"it is damaged: its content is not that of its {CHECKSUM}")
    if facts.get("name") != name:
        raise ValueError(f"it is the file {facts.get('name')}")
    return tensors, facts


def _checksum(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    """Return a checksum of tensors and texts, the SHA-256 as 64 hex digits.

    Args:
        tensors: The CPU tensors by name. Names, types and shapes count, too, and the
            order of the tensors does not.
        facts: The texts by key, in any order.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        kind = [name, str(tensor.dtype), list(tensor.shape)]
        digest.update(json.dumps(kind).encode())
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()
