"""A directory that commands write: whose it is, what it was made from, what a killed
writer left there; and files that prove their content.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from uno.data.files import TEMPORARY, Storage, parse_json
from uno.errors import ConfigError
from uno.limits import MAX_STATE_BYTES

# of whoever works in a directory (uno.runs.lock); never part of what is made there
LOCK_FILE = "lock.json"
MOST_KEYS = 6  # that a message names

SEAL = "sha256"
BLANK = "0" * 64


def is_ours(storage: Storage, mark: str, what: str, also: Collection[str] = ()) -> bool:
    """Whether a directory has the file ``mark``, as every output called ``what`` has.
    False: the directory is empty, or a command was killed there that had written no
    more than ``also``. ConfigError: it is another's.
    """
    if storage.exists(mark):
        return True
    folder, _, name = mark.rpartition("/")
    begun = {name, *also}
    for found in storage.list(folder):
        if found not in begun and whole_name(found) not in begun and not is_lock(found):
            problem = (
                f"{_place(storage, mark)} is not empty and holds no {what} (no {name})"
            )
            raise ConfigError(
                f"{problem}; nothing was changed; choose another --output"
            )
    return False


def begin(
    storage: Storage, mark: str, identity: Mapping[str, Any], what: str, **more: Any
) -> None:
    """Begin an output called ``what`` in a free directory, or resume there: the file
    ``mark`` says what it is made from, an ``identity`` of JSON values, and ``more``
    that may change. ConfigError: the directory is another's, or of another identity.
    """
    if not is_ours(storage, mark, what):
        storage.write(mark, json.dumps({**identity, **more}, indent=1).encode())
        return
    found = find_mapping(storage, mark) or {}
    if different := [key for key, value in identity.items() if found.get(key) != value]:
        problem = (
            f"holds another {what} (other data or options: {', '.join(different)})"
        )
        raise ConfigError(f"{_place(storage, mark)} {problem}; choose another --output")


def _place(storage: Storage, mark: str) -> str:
    """The directory of a mark."""
    return storage.below(mark.rpartition("/")[0])


def other_settings(
    place: str, what: str, keys: Sequence[str], advice: str
) -> ConfigError:
    """What is said where ``place`` holds an output whose settings differ by
    ``keys``.
    """
    names = ", ".join(keys[:MOST_KEYS]) + " ..." * (len(keys) > MOST_KEYS)
    return ConfigError(f"{place} holds {what} with other settings: {names}; {advice}")


def leftovers(storage: Storage, below: str = "") -> list[str]:
    """What killed writers left below a directory, by name, but for the lock's: its
    holder may be writing.
    """
    return [
        name
        for name in storage.unfinished(below)
        if not is_lock(name.rpartition("/")[2])
    ]


def sweep(storage: Storage, below: str = "") -> None:
    """Delete the :func:`leftovers` below a directory, in which nobody else is
    writing.
    """
    for name in leftovers(storage, below):
        storage.delete(name)


def sweep_file(storage: Storage, name: str) -> None:
    """Delete what killed writers left of one file at the top of a directory."""
    for found in storage.list():
        if whole_name(found) == name:
            storage.delete(found)


def whole_name(name: str) -> str:
    """Of a temporary file the name that it gets once it is whole; of any other file
    ''.
    """
    return name[1:].rpartition(".")[0] if TEMPORARY.fullmatch(name) else ""


def is_lock(name: str) -> bool:
    """Whether a file of an output directory is its lock, or what a killed writer
    left of it.
    """
    return name.lstrip(".").startswith(LOCK_FILE)


def find_mapping(storage: Storage, name: str) -> dict[str, Any] | None:
    """The JSON mapping in a file; None where there is none, or the file is damaged."""
    data = storage.find(name, MAX_STATE_BYTES)
    return None if data is None else mapping(data)


def mapping(data: bytes | str) -> dict[str, Any] | None:
    """A JSON mapping of nobody knows whom; None where it is anything else."""
    try:
        found = parse_json(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def seal(name: str, tensors: dict[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """A safetensors file that proves its content and place: ``__metadata__`` holds
    ``facts``, the ``name`` it is to have and the SHA-256 of the file, computed with
    zeros in the place of this sum. The same content gives the same bytes.
    """
    data = safetensors.torch.save(tensors, {**facts, "name": name, SEAL: BLANK})
    end = 8 + int.from_bytes(data[:8], "little")
    # the library's order is random
    text = json.dumps(json.loads(data[8:end]), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    size, body = len(text).to_bytes(8, "little"), memoryview(data)[end:]
    return b"".join(
        [size, text.replace(_entry(BLANK), _entry(_sum(size, text, body))), body]
    )


def unseal(name: str, data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and facts of the sealed file ``name``. ValueError: it is truncated,
    altered or another file.
    """
    size, length = data[:8], int.from_bytes(data[:8], "little")
    if length > min(MAX_STATE_BYTES, len(data) - 8):
        raise ValueError("it is truncated, or no safetensors file")
    text, body = data[8 : 8 + length], memoryview(data)[8 + length :]
    facts = (mapping(text) or {}).get("__metadata__")
    facts = facts if isinstance(facts, dict) else {}
    found = str(facts.get(SEAL))
    if found != _sum(size, text.replace(_entry(found), _entry(BLANK)), body):
        raise ValueError(f"it is damaged: its content is not that of its {SEAL}")
    if facts.get("name") != name:
        raise ValueError(f"it is the file {facts.get('name')}")
    try:
        return safetensors.torch.load(data), facts
    except (SafetensorError, TypeError, KeyError) as error:
        raise ValueError(f"it is damaged: {error}") from None


def _entry(digest: str) -> bytes:
    """As it stands in a header: quotes that are part of a fact are escaped there."""
    return f'"{SEAL}": "{digest}"'.encode()


def _sum(size: bytes, text: bytes, body: memoryview) -> str:
    digest = hashlib.sha256(size + text)
    digest.update(body)
    return digest.hexdigest()
