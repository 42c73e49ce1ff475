"""Files by local path or by any URI that pyarrow knows (s3://, gs://, file://): sources
to read, run directories to write. A local name need not be UTF-8: a ``str`` carries its
bytes, and pyarrow gets bytes.
"""

import errno
import io
import json
import logging
import mmap
import os
import re
import stat
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, wraps
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, ParamSpec, TypeVar
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from uno.errors import ConfigError, StorageError, UnoError, one_line
from uno.limits import MAX_ROWS

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # what a file is called until it is whole

FLAT = ("s3", "gcs", "abfs")  # object stores have no directories to create
LISTERS = 16  # threads that list directories, and directories that are listed ahead
# of an object store that are listed one by one; below them a request lists all
PREFIX_LEVELS = 2
HIDDEN = re.compile(r"(^|/)(\.|__MACOSX(/|$))")  # what file managers leave behind
TRANSIENT = re.compile(
    r"AWS Error"
    r" (SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT)"
    r"|AWS Error NETWORK_CONNECTION|HTTP status (429|5\d\d)|ServerBusy"
    r"|Status\((UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL)"
    r"|connection (timed out|reset|refused|aborted)|stale file handle|transport"
    r" endpoint|remote I/O error",
    re.IGNORECASE,
)
"""Of S3, Google's and Azure's stores as pyarrow words it, and of network disks."""
REMOTE_PIECE_BYTES = 8 * 2**20  # of a remote file that is read like a local one
UPLOAD_BYTES_PER_S = 256 * 2**10  # most of a file that is uploaded as it grows
PAUSES_S = (1, 2, 4, 8, 16)  # pyarrow itself tries for 6 s each time

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)


class FileEntry(NamedTuple):
    """A file below a root: relative path with '/', full path or URI, size in bytes,
    :func:`stat_of` time. While a directory is listed also a folder in it: its relative
    path ends in '/', by which its files come in order, and ``real`` is its real path.
    """

    relative: str
    path: str
    size: int
    time: int
    real: str | None = None


def is_transient(error: object) -> bool:
    """Whether storage that says so may answer a moment later: not what is missing,
    denied or full.
    """
    return TRANSIENT.search(str(error)) is not None


class _RetryState(threading.local):
    """Whether a call of this thread is inside :func:`retry_transient`."""

    is_retrying = False


_retry_state = _RetryState()


def retry_transient(access: Callable[P, R]) -> Callable[P, R]:
    """Return ``access``, which is called again after an error that may pass.

    There are at most ``len(PAUSES_S)`` more calls, with pauses of 31 s in all. Together
    with pyarrow's own attempts on S3 they take about a minute. If decorated functions
    call each other, only the outermost one calls again: pauses never multiply.

    Args:
        access: A function that reads or writes storage.

    Returns:
        A function with the same parameters. It raises the last error of ``access``.
    """

    @wraps(access)
    def retried(*args: P.args, **kwargs: P.kwargs) -> R:
        if _retry_state.is_retrying:
            return access(*args, **kwargs)
        _retry_state.is_retrying = True
        try:
            for pause in PAUSES_S:
                try:
                    return access(*args, **kwargs)
                except (OSError, pa.ArrowException, UnoError) as error:
                    if not is_transient(error):
                        raise
                    log.warning("%s; retrying in %d s", one_line(error), pause)
                    time.sleep(pause)
            return access(*args, **kwargs)
        finally:
            _retry_state.is_retrying = False

    return retried


def is_uri(path: str) -> bool:
    """Whether ``path`` is a URI of a remote file system."""
    return "://" in path


def normalize_path(path: str) -> str:
    """``path`` with ``~`` expanded and ``file://`` removed; other URIs unchanged,
    without a last slash.
    """
    if path.startswith("file://"):
        path = unquote(urlsplit(path).path, errors="surrogateescape")
    return path.rstrip("/") if is_uri(path) else os.path.expanduser(path)


def full_path(path: str) -> str:
    """A local path as every process finds it, whatever directory it runs in; a URI
    unchanged.
    """
    return path if is_uri(path) else os.path.abspath(path)


def valid_text(name: str) -> str:
    """A file name as valid text: bytes that are not UTF-8, and half surrogate pairs,
    become escapes.
    """
    half = re.sub(
        "[\ud800-\udc7f\udd00-\udfff]", lambda found: ascii(found[0])[1:-1], name
    )
    return half.encode(errors="surrogateescape").decode(errors="backslashreplace")


def parse_json(
    data: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """JSON of nobody knows whom, objects made by ``pairs``; ValueError also where it
    is nested too deeply.
    """
    try:
        return json.loads(data, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def require_regular(path: str | bytes) -> None:
    """OSError where a local file is a FIFO, a device or a socket: to open one may
    last for ever.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError("not a regular file")


@retry_transient
def kind(path: str) -> str:
    """'file', 'directory' or 'missing'; ConfigError where it cannot be reached."""
    with reading(path):
        files, inner = locate(path)
        found = files.get_file_info(inner).type
        return {pa.fs.FileType.File: "file", pa.fs.FileType.Directory: "directory"}.get(
            found, "missing"
        )


def walk(root: str, follow_links: bool = False) -> Iterator[FileEntry]:
    """Yield all of :func:`files_below`, with the same arguments.

    Raises:
        ConfigError: A local folder holds more than MAX_ROWS files.
    """
    for number, found in enumerate(files_below(root, follow_links)):
        if number == MAX_ROWS and not is_uri(root):
            raise ConfigError(f"more than {MAX_ROWS:,} files below {root}")
        yield found


def files_below(root: str, follow_links: bool = False) -> Iterator[FileEntry]:
    """Yield the files below ``root`` in the order of their relative paths.

    Hidden files are left out. Threads list the next :data:`LISTERS` directories (or
    prefixes, whole from the third level on), which is all that is kept in memory. A
    directory is walked once, so that loops of links end. A link to nothing is a file of
    size -1.

    Args:
        root: Local folder or URI.
        follow_links: Whether a link may lead out of a local ``root``.

    Raises:
        ConfigError: A directory cannot be listed, or a link leads out of ``root`` and
            ``follow_links`` is False.
    """
    scan = _remote_scan(root) if is_uri(root) else _local_scan(root, follow_links)
    seen, pool = set[str](), ThreadPoolExecutor(LISTERS, thread_name_prefix="uno-list")

    def walk_one(entries: list[FileEntry]) -> Iterator[FileEntry]:
        folders = (entry for entry in entries if entry.real is not None)
        waiting = deque(pool.submit(scan, entry) for entry in islice(folders, LISTERS))
        for entry in entries:
            if entry.real is None:
                yield entry
                continue
            inside = waiting.popleft()
            waiting += [
                pool.submit(scan, following) for following in islice(folders, 1)
            ]
            if entry.real not in seen:
                seen.add(entry.real)
                yield from walk_one(inside.result())

    top = FileEntry("", root, -1, -1, root if is_uri(root) else os.path.realpath(root))
    seen.add(str(top.real))
    try:
        yield from walk_one(scan(top))
    finally:
        pool.shutdown(cancel_futures=True)


@retry_transient
def children(root: str) -> tuple[list[str], list[str]]:
    """Names directly below a directory, sorted: (folders, files). Raises as
    :func:`walk`.
    """
    with reading(root):
        entries = [
            entry for entry in _entries(*locate(root)) if not HIDDEN.search(entry[0])
        ]
    return [name for name, is_dir in entries if is_dir], [
        name for name, is_dir in entries if not is_dir
    ]


def _entries(files: Any, inner: str | bytes) -> list[tuple[str, bool]]:
    """Names directly below a directory, sorted, and whether they are directories."""
    if isinstance(inner, bytes):  # local: names need not be text
        with os.scandir(os.fsdecode(inner)) as entries:
            return sorted((entry.name, _is_folder(entry)) for entry in entries)
    found = files.get_file_info(pa.fs.FileSelector(inner, allow_not_found=True))
    return sorted(
        (info.base_name, info.type == pa.fs.FileType.Directory) for info in found
    )


def join(root: str, *parts: str) -> str:
    """``root`` with path parts appended; in a URI they are quoted and go before its
    ``?options``.
    """
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


@retry_transient
def read_bytes(path: str, max_bytes: int) -> bytes:
    """At most ``max_bytes`` + 1 bytes of a file. Raises OSError."""
    if not is_uri(path):
        require_regular(path)
        # read(n) takes n bytes of memory, whatever there is to read
        with open(path, "rb") as file:
            fits = os.fstat(file.fileno()).st_size <= max_bytes
            return file.read() if fits else file.read(max_bytes + 1)
    files, inner = locate(path)
    with files.open_input_file(inner) as file:
        return bytes(file.read(min(file.size(), max_bytes + 1)))


def open_binary(path: str) -> BinaryIO:
    """Open a file to read some of its bytes. Failed reads of a remote file are retried.

    Raises:
        OSError: There is no such file, it cannot be read, or it is not a regular file.
    """
    if not is_uri(path):
        require_regular(path)
        return open(path, "rb")
    return io.BufferedReader(RetryingFile(*locate(path)), REMOTE_PIECE_BYTES)


def open_file(path: str) -> Any:
    """Open a local file or an object for reads in any order. Raises OSError."""
    files, inner = locate(path)
    if not is_uri(path):
        require_regular(inner)
    return open_located(files, inner)


def read_whole(path: str, max_bytes: int, what: str = "") -> bytes:
    """A file; ConfigError, where it is called ``what``, if it is unreadable or
    larger than ``max_bytes``.
    """
    with reading(what or path):
        data = read_bytes(path, max_bytes)
    if len(data) > max_bytes:
        raise ConfigError(f"{what or path} is larger than {max_bytes} bytes")
    return data


def read_text(path: str, max_bytes: int, what: str = "") -> str:
    """As :func:`read_whole`, of UTF-8."""
    with reading(what or path):
        return read_whole(path, max_bytes, what).decode("utf-8-sig")


def resolver(root: str, follow_links: bool = False) -> Callable[[str], str | None]:
    """Return a function that gives the full path of a path relative to ``root``.

    Args:
        root: Local folder or URI.
        follow_links: Whether a link inside ``root`` may lead to a file outside it.

    Returns:
        A function from a relative path to the full path. It returns None if '..', an
        absolute path or (without ``follow_links``) a link leaves ``root``. The links of
        a folder are followed once.
    """
    base = "" if is_uri(root) else os.path.realpath(root).rstrip("/") + "/"
    named = os.path.abspath(root).rstrip("/") + "/"
    folders: dict[str, str] = {}

    def find(relative: str) -> str | None:
        if is_uri(relative) or "\0" in relative:
            return None
        if not base:
            parts = PurePosixPath(relative)
            return (
                None
                if parts.is_absolute() or ".." in parts.parts
                else join(root, relative)
            )
        if follow_links:
            path = os.path.normpath(os.path.join(named, relative))
            return path if path.startswith((named, base)) else None
        folder, name = os.path.split(relative)
        if folder not in folders:
            folders[folder] = os.path.realpath(os.path.join(root, folder))
        path = os.path.join(folders[folder], name)
        if name in ("", ".", "..") or os.path.islink(path):
            path = os.path.realpath(path)
        return path if path.startswith(base) else None

    return find


def stat_of(path: str) -> tuple[int, int]:
    """Size in bytes and modification time in ns; -1 and 0 for a missing local file,
    -1 and -1 for any remote one (one request each is too slow).
    """
    try:
        found = None if is_uri(path) else os.stat(path)
    except OSError:
        return -1, 0
    return (-1, -1) if found is None else (found.st_size, found.st_mtime_ns)


def with_remote_facts(files: Sequence[FileEntry]) -> list[FileEntry]:
    """Look up the size and the time of the last change of remote files without them.

    A listing gives both. Files that are named one by one are looked up here, with one
    request each, many at the same time. A file that is missing stays as it is.

    Args:
        files: Files of one storage, or local ones.

    Raises:
        ConfigError: The storage refuses a request.
    """
    wanted = [file for file in files if is_uri(file.path) and file.time < 0]
    if not wanted:
        return list(files)
    with reading(wanted[0].path):
        storage = locate(wanted[0].path)[0]
        paths = [locate(file.path)[1] for file in wanted]
        infos = retry_transient(storage.get_file_info)(paths)
    known = {
        file: file._replace(size=info.size, time=info.mtime_ns)
        for file, info in zip(wanted, infos, strict=True)
        if info.is_file and info.mtime_ns is not None
    }
    return [known.get(file, file) for file in files]


def _local_scan(
    root: str, follow_links: bool
) -> Callable[[FileEntry], list[FileEntry]]:
    base = os.path.realpath(root).rstrip("/") + "/"

    def scan(folder: FileEntry) -> list[FileEntry]:
        found = []
        with reading(folder.path), os.scandir(folder.path) as entries:
            for entry in entries:
                if HIDDEN.search(entry.name):
                    continue
                real = (
                    os.path.join(str(folder.real), entry.name)
                    if follow_links
                    else entry.path
                )
                if entry.is_symlink():
                    real = os.path.realpath(entry.path)
                    if not real.startswith(base) and not follow_links:
                        raise ConfigError(
                            f"link {entry.path} points outside the data folder {root}; "
                            "copy the file, or follow links with --data.follow-links"
                        )
                relative = folder.relative + entry.name
                if _is_folder(entry):
                    found.append(FileEntry(f"{relative}/", entry.path, -1, -1, real))
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    found.append(FileEntry(relative, entry.path, -1, 0))
                elif entry.is_file():
                    stat = entry.stat()
                    found.append(
                        FileEntry(relative, entry.path, stat.st_size, stat.st_mtime_ns)
                    )
        return sorted(found)

    return scan


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a directory or a link to one; a link to itself is none."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _remote_scan(root: str) -> Callable[[FileEntry], list[FileEntry]]:
    def scan(folder: FileEntry) -> list[FileEntry]:
        with reading(root):
            files, inner = locate(root)
            top, deep = inner.strip("/"), folder.relative.count("/") >= PREFIX_LEVELS
            infos = retry_transient(files.get_file_info)(
                pa.fs.FileSelector(
                    f"{inner}/{folder.relative}".rstrip("/"), recursive=deep
                )
            )
        found = []
        for info in infos:
            relative = info.path.strip("/").removeprefix(top).strip("/")
            if not HIDDEN.search(relative):
                if info.is_file:
                    time = -1 if info.mtime_ns is None else info.mtime_ns
                    found.append(
                        FileEntry(relative, join(root, relative), info.size, time)
                    )
                elif not deep:
                    found.append(FileEntry(f"{relative}/", "", -1, -1, relative))
        return sorted(found)

    return scan


def locate(path: str) -> tuple[Any, Any]:
    """File system and the path inside it; one connection per scheme, host and
    options.
    """
    if not is_uri(path):
        return pa.fs.LocalFileSystem(), os.fsencode(path)
    parts = urlsplit(path, allow_fragments=False)
    files, root = _connect(
        f"{parts.scheme}://{parts.netloc}", f"?{parts.query}" if parts.query else ""
    )
    return files, root.rstrip("/") + unquote(parts.path)


@lru_cache(maxsize=16)
def _connect(host: str, options: str) -> tuple[Any, str]:
    try:
        files, root = pa.fs.FileSystem.from_uri(host + options)
    except pa.ArrowException as error:
        raise OSError(one_line(error)) from None
    return files, root


def upload_pause_s(num_bytes: int, least_s: float) -> float:
    """Return the pause between two uploads of a file that grows, in seconds.

    An object store cannot append: each upload has the whole file. With a pause that
    grows with the file, the uploaded bytes grow with the time, and not with the square
    of the number of lines.

    Args:
        num_bytes: Bytes of the last upload.
        least_s: Pause after a small upload, in seconds.
    """
    return max(least_s, num_bytes / UPLOAD_BYTES_PER_S)


class RetryingFile(io.RawIOBase):
    """A remote file that is open for random reads. A failed read is retried."""

    def __init__(self, files: Any, inner: str) -> None:
        super().__init__()
        self._file = retry_transient(files.open_input_file)(inner)
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it."""
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}
        start = self._file.size() if whence == io.SEEK_END else starts[whence]
        self._position = start + offset
        return self._position

    @retry_transient
    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` from the position on; return the number of bytes."""
        data = self._file.read_at(len(buffer), self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def open_located(files: Any, inner: str | bytes) -> Any:
    """Open a file of a file system for reads in any order.

    Failed reads of a remote file are retried.

    Args:
        files: File system, as :func:`locate` returns it.
        inner: Path inside the file system.

    Returns:
        A ``pyarrow.NativeFile``.
    """
    if isinstance(inner, bytes):
        return files.open_input_file(inner)
    return pa.PythonFile(RetryingFile(files, inner), mode="r")


@contextmanager
def refusing(kind: type[UnoError], what: str) -> Iterator[None]:
    """What storage refuses inside the ``with`` is an error of that kind: cannot
    ``what``.
    """
    try:
        yield
    except (OSError, UnicodeError, pa.ArrowException) as error:
        raise kind(f"cannot {what}: {one_line(error)}") from None


def reading(path: str) -> AbstractContextManager[None]:
    """As :func:`refusing`, of a source, as ConfigErrors."""
    return refusing(ConfigError, f"read {path}")


class Storage:
    """Files below ``root``, a local path (made absolute) or URI. A file appears whole
    or not at all; what the file system refuses is a StorageError with the path.
    """

    def __init__(self, root: str) -> None:
        with refusing(StorageError, f"open {valid_text(root)}"):
            os.fsencode(root)
            if is_uri(root):
                # till its bytes come: one request, not three
                uri, option = root, "allow_delayed_open"
                if uri.startswith("s3://") and option not in uri:
                    uri += f"{'&' if '?' in uri else '?'}{option}=true"
                self._fs, self.root = pa.fs.FileSystem.from_uri(uri)
            else:
                self._fs, self.root = (
                    pa.fs.LocalFileSystem(),
                    str(Path(root).absolute()),
                )
        self.is_local = isinstance(self._fs, pa.fs.LocalFileSystem)
        self.uri = self.root if self.is_local else root.rstrip("/")

    def check(self) -> None:
        """What comes before every change of a file; raises StorageError where none
        is allowed any more.
        """

    def path(self, name: str) -> str:
        """Full path of ``name`` inside the file system."""
        return f"{self.root}/{name}" if name else self.root

    def below(self, name: str) -> str:
        """``uri`` of a file or directory in it: the options of a URI stay at its
        end.
        """
        return join(self.uri, name) if name else self.uri

    def exists(self, name: str = "") -> bool:
        """Whether a file or directory of that name is there."""
        return bool(self._info(name).type != pa.fs.FileType.NotFound)

    def size(self, name: str) -> int:
        """Bytes in a file; 0 where there is none."""
        return self._info(name).size or 0

    def unfinished(self, name: str = "") -> list[str]:
        """What killed writers left below a directory, by name; on other than local
        disks there is none.
        """
        found = list[str]()
        for where, _, files in os.walk(self.path(name)) if self.is_local else ():
            below = os.path.relpath(where, self.root)
            found += [
                os.path.normpath(f"{below}/{file}")
                for file in files
                if TEMPORARY.fullmatch(file)
            ]
        return found

    @retry_transient
    def list(self, name: str = "") -> list[str]:
        """Sorted base names in a directory; empty where there is none."""
        if self.is_local and not self.exists(name):
            return []
        with self._errors("list", name):
            return [entry for entry, _ in _entries(self._fs, self._inner(name))]

    @retry_transient
    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Content of a file; StorageError where it has more than ``max_bytes``."""
        with self._errors("read", name), self._opened(name) as file:
            return self._content(file, name, max_bytes)

    @retry_transient
    def find(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """As :meth:`read`; None where there is no such file, which takes no look of
        its own.
        """
        with (
            self._errors("read", name),
            suppress(FileNotFoundError),
            self._opened(name) as file,
        ):
            return self._content(file, name, max_bytes)
        return None

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """A file for random reads; errors inside the ``with`` are StorageErrors too."""
        with self._errors("read", name):
            if self.is_local:
                require_regular(self._inner(name))
            with open_located(self._fs, self._inner(name)) as file:
                yield file

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file; after return it is on the disk, whole."""
        if self.is_local:
            self._write_local(name, data)
        else:
            self._upload(name, data)

    def write_first(self, name: str, data: bytes) -> bool:
        """As :meth:`write`, where no file of that name is there; False: there is one.
        Two writers at the same moment may both get True where the file system has no
        hard links.
        """
        if self.exists(name):
            return False
        if not self.is_local:
            self.write(name, data)
            return True
        mine = f".{name}.{uuid.uuid4().hex[:8]}"
        self.write(mine, data)
        try:
            os.link(self.path(mine), self.path(name))
        except FileExistsError:
            return False
        except OSError:
            self.write(name, data)
        finally:
            self.delete(mine)
        return True

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Open a stream that creates or replaces a file when the ``with`` block ends.

        The file appears whole. If the block raises an error, or the upload fails, a
        file that was there before stays as it was. Bytes for a remote file system are
        collected in a temporary file on this machine and uploaded once.

        Args:
            name: Path of the file below the root.

        Yields:
            A writable binary stream.

        Raises:
            StorageError: The file cannot be written, or the temporary folder is full.
        """
        self.check()
        with self._errors("write", name):
            if self.is_local:
                with create_local(Path(self.path(name))) as file:
                    yield file
                return
            with tempfile.TemporaryFile() as file:
                try:
                    yield file
                    file.flush()
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    raise StorageError(
                        f"cannot write {self.path(name)}: no space left in"
                        f" {tempfile.gettempdir()}, where files are collected before"
                        " their upload; set TMPDIR to a folder with more space"
                    ) from None
                self._upload(name, _mapped_content(file))

    @retry_transient
    def _write_local(self, name: str, data: bytes) -> None:
        """Create or replace a file on a local disk."""
        with self.create(name) as file:
            file.write(data)

    @retry_transient
    def _upload(self, name: str, data: Any) -> None:
        """Create or replace a remote file, by one ``write`` of all its bytes.

        Closing an upload publishes the bytes written so far. A single ``write`` leaves
        no moment in between at which an error of this process can close half a file.
        """
        self.check()
        with self._errors("write", name):
            if not self._fs.type_name.startswith(FLAT):
                self._fs.create_dir(self.path(name).rpartition("/")[0], recursive=True)
            with self._fs.open_output_stream(self.path(name)) as stream:
                stream.write(data)

    def append(self, name: str, data: bytes) -> None:
        """Add ``data`` to the end of a file.

        An object store cannot append: the whole file is read and written again. Use it
        there for files of few lines. Files that grow during training are uploaded with
        pauses of :func:`upload_pause_s`.
        """
        if not self.is_local:
            return self.write(name, (self.find(name) or b"") + data)
        self.check()
        with self._errors("write", name):
            path = Path(self.path(name))
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                require_regular(self._inner(name))
            with path.open("ab") as file:
                file.write(data)

    @retry_transient
    def delete(self, name: str) -> None:
        """Remove a file or a directory with all in it; nothing happens where there
        is none.
        """
        self.check()
        found = self._info(name).type
        with self._errors("delete", name):
            if found == pa.fs.FileType.Directory:
                self._fs.delete_dir(self._inner(name))
            elif found == pa.fs.FileType.File:
                self._fs.delete_file(self._inner(name))

    @retry_transient
    def move(self, name: str, target: str) -> None:
        """Move a file, or a directory with all in it, and replace ``target``.

        Local files are renamed. Object stores have no rename: each file is copied, then
        deleted.
        """
        self.check()
        is_folder = self._info(name).type == pa.fs.FileType.Directory
        if is_folder and not self.is_local:
            for entry in self.list(name):
                self.move(f"{name}/{entry}", f"{target}/{entry}")
            return self.delete(name)
        if is_folder:
            self.delete(target)
        with self._errors("move", name):
            if not self._fs.type_name.startswith(FLAT):
                folder = os.path.dirname(self._inner(target))
                self._fs.create_dir(folder, recursive=True)
            if self.is_local:
                self._fs.move(self._inner(name), self._inner(target))
            else:
                self._fs.copy_file(self._inner(name), self._inner(target))
                self._fs.delete_file(self._inner(name))

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        if self.is_local:
            require_regular(self._inner(name))
        with self._fs.open_input_file(self._inner(name)) as file:
            yield file

    def _content(self, file: Any, name: str, max_bytes: int | None) -> bytes:
        if max_bytes is not None and file.size() > max_bytes:
            raise StorageError(f"{self.path(name)} is larger than {max_bytes} bytes")
        return bytes(file.read())

    def _inner(self, name: str) -> str | bytes:
        return os.fsencode(self.path(name)) if self.is_local else self.path(name)

    @retry_transient
    def _info(self, name: str) -> Any:
        with self._errors("look up", name):
            return self._fs.get_file_info(self._inner(name))

    def _errors(self, what: str, name: str) -> AbstractContextManager[None]:
        return refusing(StorageError, f"{what} {self.path(name)}")


def reserve_space(file: Any, size: int) -> None:
    """Extend an open file to ``size`` bytes that have space on the disk.

    A process that writes to a memory map of a file is killed when the disk is full, so
    a lack of space must be found before. Where the system cannot reserve space, as
    macOS, the free space is compared.

    Args:
        file: Local file that is open for writing.
        size: Bytes that the file shall have.

    Raises:
        OSError: The disk has no space for them.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    disk = os.fstatvfs(file.fileno())
    if size > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.truncate(size)


def _mapped_content(file: Any) -> Any:
    """Return the bytes of an open file as a buffer that takes no memory."""
    if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
        return b""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def create_local(path: Path) -> Iterator[Any]:
    """A stream into a temporary file that takes the place of ``path`` once its bytes
    are on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
