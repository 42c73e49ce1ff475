"""Files by local path or by any URI that pyarrow's file systems read (s3://, gs://, file://)."""

from __future__ import annotations

import os
import shutil
import uuid
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import pyarrow
import pyarrow as pa
import pyarrow.fs
from pyarrow import fs

from uno.errors import ConfigError, StorageError


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


FLAT = ("s3", "gcs", "abfs")  # object stores have no directories to create


class Storage:
    """Files below one root. Local writes are atomic (temporary file, fsync, rename); object stores are by
    nature.

    Args:
        root: local path (made absolute) or URI; ``file://`` is a local path.

    Raises:
        StorageError: from every method, one line naming the path, when the file system refuses.
    """

    def __init__(self, root: str) -> None:
        try:
            if "://" in root:
                self._fs, self.root = fs.FileSystem.from_uri(root)
            else:
                self._fs, self.root = fs.LocalFileSystem(), str(Path(root).absolute())
        except (OSError, pyarrow.ArrowException) as error:
            raise StorageError(f"cannot open {root}: {error}") from None
        self.is_local = isinstance(self._fs, fs.LocalFileSystem)
        self.uri = self.root if self.is_local else root.rstrip("/")

    def path(self, name: str) -> str:
        """Full path of ``name`` inside the file system."""
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str = "") -> bool:
        """Whether a file or directory of that name is there."""
        try:
            return self._fs.get_file_info(self.path(name)).type != fs.FileType.NotFound
        except OSError as error:
            raise StorageError(f"cannot look up {self.path(name)}: {error}") from None

    def list(self, name: str = "") -> list[str]:
        """Sorted base names in a directory; empty where there is none."""
        try:
            selector = fs.FileSelector(self.path(name), allow_not_found=True)
            return sorted(info.base_name for info in self._fs.get_file_info(selector))
        except OSError as error:
            raise StorageError(f"cannot list {self.path(name)}: {error}") from None

    def size(self, name: str) -> int:
        """Bytes in a file; 0 where there is none."""
        try:
            return self._fs.get_file_info(self.path(name)).size or 0
        except OSError as error:
            raise StorageError(f"cannot look up {self.path(name)}: {error}") from None

    def read(self, name: str, start: int = 0) -> bytes:
        """Content of a file from byte ``start`` on."""
        try:
            with self._fs.open_input_file(self.path(name)) as file:
                file.seek(start)
                return file.read()
        except OSError as error:
            raise StorageError(f"cannot read {self.path(name)}: {error}") from None

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file; after return it is on the disk, whole."""
        try:
            if self.is_local:
                _write_local(Path(self.path(name)), data)
            else:
                if not self._fs.type_name.startswith(FLAT):
                    self._fs.create_dir(self.path(name).rpartition("/")[0], recursive=True)
                with self._fs.open_output_stream(self.path(name)) as file:
                    file.write(data)
        except OSError as error:
            raise StorageError(f"cannot write {self.path(name)}: {error}") from None

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file; object stores rewrite it."""
        try:
            if self.is_local:
                path = Path(self.path(name))
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(data)
            else:
                self.write(name, (self.read(name) if self.exists(name) else b"") + data)
        except OSError as error:
            raise StorageError(f"cannot write {self.path(name)}: {error}") from None

    def delete(self, name: str) -> None:
        """Remove a file or a directory with all in it; nothing happens where there is none."""
        try:
            info = self._fs.get_file_info(self.path(name))
            if info.type == fs.FileType.Directory:
                if self.is_local:
                    shutil.rmtree(self.path(name))
                else:
                    self._fs.delete_dir(self.path(name))
            elif info.type == fs.FileType.File:
                self._fs.delete_file(self.path(name))
        except OSError as error:
            raise StorageError(f"cannot delete {self.path(name)}: {error}") from None


def _write_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
