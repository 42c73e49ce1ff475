"""A directory on a local disk or any URI pyarrow reads (s3://, gs://): bytes in, bytes out."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import pyarrow
from pyarrow import fs

from uno.errors import StorageError

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
