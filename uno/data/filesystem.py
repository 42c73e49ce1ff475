"""Files by local path or by any URI that pyarrow's file systems read (s3://, gs://, file://)."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from uno.config import ConfigError


class Found(NamedTuple):
    """A file below a root: relative path with '/', full path or URI, size in bytes."""

    relative: str
    path: str
    size: int


def normal(path: str) -> str:
    """``path`` with ``~`` expanded and ``file://`` removed; other URIs unchanged, without a last slash."""
    if path.startswith("file://"):
        path = unquote(urlsplit(path).path)
    return path.rstrip("/") if is_uri(path) else os.path.expanduser(path)


def is_uri(path: str) -> bool:
    """Whether ``path`` is a URI of a remote file system."""
    return "://" in path


def kind(path: str) -> str:
    """'file', 'directory' or 'missing'.

    Raises:
        ConfigError: a URI that cannot be reached.
    """
    if not is_uri(path):
        return "directory" if os.path.isdir(path) else "file" if os.path.isfile(path) else "missing"
    try:
        files, inner = _remote(path)
        info = files.get_file_info(inner)
    except (OSError, pa.ArrowException) as error:
        raise _unreachable(path, error) from None
    names = {pa.fs.FileType.File: "file", pa.fs.FileType.Directory: "directory"}
    return names.get(info.type, "missing")


def walk(root: str) -> list[Found]:
    """All files below ``root``, sorted by relative path, without :func:`hidden` ones.

    Local symbolic links are followed only while they stay below ``root``.

    Raises:
        ConfigError: an unreadable folder, or a link that leaves ``root``.
    """
    found = _walk_remote(root) if is_uri(root) else _walk_local(root)
    return sorted(f for f in found if not any(hidden(part) for part in PurePosixPath(f.relative).parts))


def hidden(name: str) -> bool:
    """Names that file managers leave behind."""
    return name.startswith(".") or name == "__MACOSX"


def children(root: str) -> tuple[list[str], list[str]]:
    """Names directly below a directory, sorted: (folders, files). Raises as :func:`walk`."""
    try:
        if is_uri(root):
            files, inner = _remote(root)
            infos = files.get_file_info(pa.fs.FileSelector(inner))
            entries = [(i.base_name, i.type == pa.fs.FileType.Directory) for i in infos]
        else:
            with os.scandir(root) as scan:
                entries = [(e.name, e.is_dir()) for e in scan]
    except (OSError, pa.ArrowException) as error:
        raise _unreachable(root, error) from None
    entries = sorted(e for e in entries if not hidden(e[0]))
    return [name for name, is_dir in entries if is_dir], [name for name, is_dir in entries if not is_dir]


def join(root: str, *parts: str) -> str:
    """``root`` with path parts appended; in a URI they are quoted and go before its ``?options``."""
    if not is_uri(root):
        return os.path.join(root, *parts)
    base, mark, options = root.partition("?")
    return "/".join([base.rstrip("/"), *map(quote, parts)]) + mark + options


def split(path: str) -> tuple[str, str]:
    """(folder, name) of a file; joining them gives ``path`` again."""
    if not is_uri(path):
        return os.path.dirname(path) or ".", os.path.basename(path)
    base, mark, options = path.partition("?")
    folder, _, name = base.rpartition("/")
    return folder + mark + options, unquote(name)


def read_bytes(path: str, max_bytes: int) -> bytes:
    """Content of a file, at most ``max_bytes`` + 1 bytes of it.

    Raises:
        OSError: missing or unreadable.
    """
    if not is_uri(path):
        with open(path, "rb") as file:
            return file.read(max_bytes + 1)
    files, inner = _remote(path)
    with files.open_input_stream(inner) as stream:
        return bytes(stream.read(max_bytes + 1))


def open_input(path: str) -> Any:
    """A random-access file for pyarrow readers; use it in a ``with``. Raises OSError."""
    files, inner = _remote(path) if is_uri(path) else (pa.fs.LocalFileSystem(), path)
    return files.open_input_file(inner)


def inside(root: str, relative: str) -> str | None:
    """Full path of ``relative`` below ``root``, or None where '..', a link or a full path leaves it."""
    if is_uri(relative) or "\0" in relative:
        return None
    if is_uri(root):
        parts = PurePosixPath(relative)
        return None if parts.is_absolute() or ".." in parts.parts else join(root, relative)
    base = os.path.realpath(root)
    path = os.path.realpath(os.path.join(base, relative))
    return path if path.startswith(base.rstrip("/") + "/") else None


def size_of(path: str) -> int:
    """Size in bytes, -1 for a missing local file and any remote one (one request each is too slow)."""
    try:
        return -1 if is_uri(path) else os.stat(path).st_size
    except OSError:
        return -1


def _walk_local(root: str) -> list[Found]:
    base = os.path.realpath(root)
    found: list[Found] = []
    seen = {base}
    pending = [("", root)]
    while pending:
        prefix, folder = pending.pop()
        try:
            with os.scandir(folder) as scan:
                entries = list(scan)
            for entry in entries:
                if entry.is_symlink() and not _below(entry.path, base):
                    raise ConfigError(
                        f"link {entry.path} leads outside the data folder {root}; copy the files"
                    )
                if entry.is_dir():
                    real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                    if real not in seen:
                        seen.add(real)
                        pending.append((f"{prefix}{entry.name}/", entry.path))
                elif entry.is_file():
                    found.append(Found(prefix + entry.name, entry.path, entry.stat().st_size))
        except OSError as error:
            raise _unreachable(folder, error) from None
    return found


def _below(path: str, base: str) -> bool:
    return os.path.realpath(path).startswith(base.rstrip("/") + "/")


def _walk_remote(root: str) -> list[Found]:
    try:
        files, inner = _remote(root)
        infos = files.get_file_info(pa.fs.FileSelector(inner, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise _unreachable(root, error) from None
    prefix = inner.strip("/")
    relatives = [
        (info.path.strip("/").removeprefix(prefix).strip("/"), info) for info in infos if info.is_file
    ]
    return [Found(relative, join(root, relative), info.size) for relative, info in relatives]


def _remote(uri: str) -> tuple[Any, str]:
    """File system and the path inside it; one connection per scheme, host and options."""
    parts = urlsplit(uri, allow_fragments=False)
    options = f"?{parts.query}" if parts.query else ""
    files, root = _connect(f"{parts.scheme}://{parts.netloc}", options)
    return files, root.rstrip("/") + unquote(parts.path)


@lru_cache(maxsize=16)
def _connect(host: str, options: str) -> tuple[Any, str]:
    files, root = pa.fs.FileSystem.from_uri(host + options)
    return files, root


def _unreachable(path: str, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read {path}: {' '.join(str(error).split())[:300]}")
