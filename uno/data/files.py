"""Read and write files by local path or by any URI that pyarrow knows.

Such URIs begin with s3://, gs:// or file://. Functions read sources; :class:`Storage`
also writes, for run directories. A local file name need not be valid UTF-8. In a
``str`` its other bytes are surrogate escapes (``os.fsdecode``), and pyarrow is given
the bytes (``os.fsencode``).
"""

import errno
import io
import json
import mmap
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from uno.errors import ConfigError, StorageError, UnoError, one_line
from uno.limits import MAX_ROWS

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # name of a file that is being written

FLAT = ("s3", "gcs", "abfs")  # object stores have no directories to create
LISTERS = 16  # remote folders that are listed at the same time
REQUESTS = 32  # requests at the same time for the size and time of remote files
# Levels of remote folders that are listed one by one; one request lists all below them.
PREFIX_LEVELS = 2
HIDDEN = re.compile(r"(^|/)(\.|__MACOSX(/|$))")  # files that file managers leave behind
TRANSIENT = re.compile(
    r"AWS Error"
    r" (SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT)"
    r"|AWS Error NETWORK_CONNECTION|HTTP status (429|5\d\d)|ServerBusy"
    r"|Status\((UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL)"
    r"|connection (timed out|reset|refused|aborted)|stale file handle|transport"
    r" endpoint|remote I/O error",
    re.IGNORECASE,
)
"""Matches messages of errors that may pass: those of pyarrow for the stores of Amazon,
Google and Azure, and those of network disks.
"""
REMOTE_PIECE_BYTES = 8 * 2**20  # bytes of a remote file that are read at once
UPLOAD_BYTES_PER_S = 256 * 2**10  # mean rate for a file that is uploaded as it grows
CACHE_VARIABLE = "UNO_CACHE"  # environment variable with the cache directory
# Attempts of a request to S3. Pauses that grow to 20 s make it up to a minute.
S3_ATTEMPTS = 9


class FileEntry(NamedTuple):
    """A file of a data source.

    Attributes:
        relative: Path below the root of the source, with '/' as separator.
        path: Local path or URI with which the file can be opened. A local path may be
            relative to the current directory.
        size: Size in bytes; -1 if not known, or for a missing file.
        time: Modification time in ns since 1970; -1 if not known, 0 for a missing file.
    """

    relative: str
    path: str
    size: int
    time: int


def is_transient(error: object) -> bool:
    """Return whether an error of storage may not occur again a moment later.

    Only the message decides, not the type of the error. It is searched for the texts of
    :data:`TRANSIENT`, in any case of letters. These are the messages of pyarrow about
    timeouts, throttling, internal errors (HTTP status 429 or 5xx) and lost connections
    of the stores of Amazon, Google and Azure; and the messages of the operating system
    about connections that time out, are reset, refused or aborted, and about errors of
    network disks. Missing files, denied access and full disks are not among them.

    Args:
        error: An exception, or its message.
    """
    return TRANSIENT.search(str(error)) is not None


def is_uri(path: str) -> bool:
    """Return whether a path is a URI: whether it contains '://'."""
    return "://" in path


def normalize_path(path: str) -> str:
    """Convert a path as a user writes it to the form that this module takes.

    In a local path a leading ``~`` is expanded; nothing else is changed in it. From a
    URI with ``file://`` this prefix is removed, together with a host and with all from
    '?' or '#' on, and its percent-encoded characters are decoded. Another URI only
    loses slashes at its end.

    Args:
        path: A local path, or a URI such as ``s3://bucket/folder``.

    Returns:
        A local path, which may be relative, or a URI that does not begin with
        ``file://``.
    """
    if path.startswith("file://"):
        path = unquote(
            re.sub("^file://[^/?#]*|[?#].*", "", path), errors="surrogateescape"
        )
    scheme, mark, place = path.partition("://")
    return scheme + mark + place.rstrip("/") if mark else os.path.expanduser(path)


def full_path(path: str) -> str:
    """Return the absolute path of a local path, or a URI unchanged.

    A relative path is taken from the current directory. The parts '.' and '..' are
    resolved in the text alone, and links are kept. The result is valid in processes
    that run in another directory.

    Args:
        path: A local path without ``~``, or a URI.
    """
    return path if is_uri(path) else os.path.abspath(path)


def valid_text(name: str) -> str:
    r"""Return a file name as text that can be encoded as UTF-8.

    Bytes that are not UTF-8 become escapes such as ``\xff``, and other surrogates (the
    halves of surrogate pairs) become escapes such as ``\ud800``. The rest of the text,
    also a backslash, is unchanged.

    Args:
        name: File name, with surrogate escapes for bytes that are not UTF-8.
    """
    with suppress(UnicodeEncodeError):
        name.encode()
        return name
    half = re.sub(
        "[\ud800-\udc7f\udd00-\udfff]", lambda found: ascii(found[0])[1:-1], name
    )
    return half.encode(errors="surrogateescape").decode(errors="backslashreplace")


def parse_json(data: str | bytes) -> Any:
    """Parse JSON from an origin that is not trusted.

    The result is that of ``json.loads``, which also accepts NaN and Infinity. The only
    difference is that a text that is nested too deeply is a ValueError.

    Args:
        data: The JSON text.

    Raises:
        ValueError: The text is not JSON or not valid in its encoding, is nested too
            deeply, or has an integer of thousands of digits.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def require_regular(path: str | bytes) -> None:
    """Check that a local path is a regular file or a directory, not a special file.

    The check exists because opening a FIFO, a device or a socket may block forever.

    Args:
        path: The local path. A link counts as what it leads to.

    Raises:
        OSError: It is neither of the two, does not exist or cannot be looked up.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError("not a regular file")


def kind(path: str) -> str:
    """Return whether a path or URI is a 'file', a 'directory' or 'missing'.

    Args:
        path: Local path or URI. A link counts as what it leads to. A special file, such
            as a device, is 'missing'.

    Raises:
        ConfigError: The storage cannot be reached or refuses to answer, a local path
            cannot be looked up, for example because access is denied, or
            :func:`locate` refuses the URI.
    """
    with reading(path):
        files, inner = locate(path)
        found = files.get_file_info(inner).type
        return {pa.fs.FileType.File: "file", pa.fs.FileType.Directory: "directory"}.get(
            found, "missing"
        )


def walk(
    root: str, follow_links: bool = False, recursive: bool = True
) -> Iterator[FileEntry]:
    """Yield the files below ``root`` in the order of their relative paths.

    All folders below ``root`` are searched, unless ``recursive`` is False. Hidden files
    and folders are left out: their names begin with '.', or are __MACOSX. In a local
    folder, links to files and folders inside ``root`` are followed in any case, except
    that a link to a folder that is being listed at that moment, such as ``root``
    itself, is left out, so that loops end. A link whose target does not exist is a file
    of size -1 and time 0, if the target would be inside ``root`` or ``follow_links`` is
    True. Devices, sockets and the like are left out.

    Args:
        root: Local folder or URI.
        follow_links: Whether a link may also lead out of a local ``root``.
        recursive: False to yield only the files directly in ``root``.

    Raises:
        ConfigError: There are more than MAX_ROWS (100 million) files, a folder cannot
            be listed, ``root`` is missing or is no folder, or a link leads out of a
            local ``root`` and ``follow_links`` is False. It is raised during the
            iteration: for a local folder after the files that come before the fault,
            for a URI before the first file, and for too many files after MAX_ROWS of
            them.
    """
    files = (
        _walk_remote(root, recursive)
        if is_uri(root)
        else _walk_local(root, follow_links, recursive)
    )
    for number, file in enumerate(files):
        if number == MAX_ROWS:
            raise ConfigError(f"more than {MAX_ROWS:,} files below {root}")
        yield file


def _walk_local(root: str, follow_links: bool, recursive: bool) -> Iterator[FileEntry]:
    """Yield the files below a local folder in the order of their relative paths.

    Hidden files and folders are left out, and so are devices, sockets and the like. A
    link to a folder that is being listed, such as the root itself, is left out, so
    loops of links end. A link whose target does not exist is a file of size -1 and
    time 0.

    Args:
        root: The local folder.
        follow_links: Whether a link may lead out of ``root``.
        recursive: False to leave out all folders.

    Raises:
        ConfigError: A folder cannot be listed, ``root`` is missing, or a link leads out
            of ``root`` and ``follow_links`` is False, also if its target does not
            exist. It is raised when the iteration comes to the folder or link.
    """
    base = os.path.realpath(root).rstrip("/") + "/"

    def walk_folder(
        folder: str, relative: str, above: frozenset[str]
    ) -> Iterator[FileEntry]:
        """Yield the files below a folder, none if it is among ``above`` (a loop).

        Args:
            folder: Path of the folder.
            relative: Its path below the root, '' or with '/' at the end.
            above: Paths, without links, of the folders that lead to it.

        Raises:
            ConfigError: The folder cannot be listed, or a link leads out of the root
                and ``follow_links`` is False.
        """
        real = os.path.realpath(folder)
        if real in above:
            return
        with reading(folder), os.scandir(folder) as entries:
            # with '/' at its end, a folder is sorted as the files in it
            found = sorted((e.name + "/" * _is_folder(e), e) for e in entries)
        for name, entry in found:
            if HIDDEN.search(name) or (name.endswith("/") and not recursive):
                continue
            path = entry.path
            real_path = f"{os.path.realpath(path)}/"
            is_left = entry.is_symlink() and not real_path.startswith(base)
            if is_left and not follow_links:
                raise ConfigError(
                    f"link {path} points outside the data folder {root}; copy the file,"
                    " or follow links with --data.follow-links"
                )
            if name.endswith("/"):
                yield from walk_folder(path, relative + name, above | {real})
            elif (
                entry.is_file(follow_symlinks=False)
                or os.path.isfile(path)
                or not os.path.exists(path)
            ):
                yield FileEntry(relative + name, path, *stat_of(path))

    return walk_folder(root, "", frozenset())


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry of a directory is a folder or a link to a folder.

    A link that leads to itself is neither.
    """
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _walk_remote(root: str, recursive: bool) -> Iterator[FileEntry]:
    """Yield the files below a URI in the order of their relative paths.

    Hidden files and folders are left out. First the root is listed, then the folders in
    it, up to 16 at the same time. Then, also up to 16 at the same time, one call for
    each folder two levels below the root lists all that is below this folder. All calls
    are made before the first file is yielded.

    Args:
        root: The URI of the folder.
        recursive: False to yield only the files directly in it.

    Raises:
        ConfigError: A folder cannot be listed, ``root`` does not exist, or
            :func:`locate` refuses the URI.
    """
    with reading(root):
        files, inner = locate(root)
    top = inner.strip("/")

    def list_folder(folder: str, is_deep: bool) -> list[Any]:
        """Return pyarrow's ``FileInfo`` of the files and folders in a folder.

        Args:
            folder: Path inside the file system.
            is_deep: Whether all folders below it are listed, too.

        Raises:
            ConfigError: The folder cannot be listed.
        """
        with reading(root):
            return list(
                files.get_file_info(pa.fs.FileSelector(folder, recursive=is_deep))
            )

    found, folders = list[FileEntry](), [inner.rstrip("/")]
    with ThreadPoolExecutor(LISTERS, thread_name_prefix="uno-list") as pool:
        for level in range(PREFIX_LEVELS + 1):
            is_deep = level == PREFIX_LEVELS
            infos = chain.from_iterable(
                pool.map(partial(list_folder, is_deep=is_deep), folders)
            )
            folders = []
            for info in infos:
                relative = info.path.strip("/").removeprefix(top).strip("/")
                if info.is_file and not HIDDEN.search(relative):
                    time = -1 if info.mtime_ns is None else info.mtime_ns
                    path = join(root, relative)
                    found.append(FileEntry(relative, path, info.size, time))
                elif recursive and not info.is_file and not HIDDEN.search(relative):
                    folders.append(info.path)
    yield from sorted(found)


def children(root: str) -> tuple[list[str], list[str]]:
    """Return the names of the folders and files directly in a folder.

    Args:
        root: Local folder or URI.

    Returns:
        Names of the folders and names of the files, each sorted, without hidden ones
        (their names begin with '.', or are __MACOSX). A link to a folder is a folder,
        and all that is no folder counts as a file. A remote folder that does not exist
        counts as empty.

    Raises:
        ConfigError: The folder cannot be listed, or is local and does not exist.
    """
    with reading(root):
        entries = _entries(*locate(root))
    shown = [(name, is_dir) for name, is_dir in entries if not HIDDEN.search(name)]
    folders = [name for name, is_dir in shown if is_dir]
    return folders, [name for name, is_dir in shown if not is_dir]


def _entries(files: Any, inner: str | bytes) -> list[tuple[str, bool]]:
    """Return the sorted names in a folder, each with whether it names a folder.

    Hidden files are included, and a link to a folder counts as a folder. In remote
    storage a folder that does not exist counts as empty.

    Args:
        files: A ``pyarrow.fs.FileSystem``, the first result of :func:`locate`.
        inner: Path inside the file system, ``bytes`` for a local folder.

    Raises:
        OSError: The folder cannot be listed, or is local and does not exist.
    """
    if isinstance(inner, bytes):  # local: names need not be text
        with os.scandir(os.fsdecode(inner)) as entries:
            return sorted((entry.name, _is_folder(entry)) for entry in entries)
    found = files.get_file_info(pa.fs.FileSelector(inner, allow_not_found=True))
    return sorted(
        (info.base_name, info.type == pa.fs.FileType.Directory) for info in found
    )


def join(root: str, *parts: str) -> str:
    """Append parts to a path or URI.

    Args:
        root: Local folder or URI. Options of a URI, from '?' on, stay at its end.
        *parts: Names, or relative paths with '/', which are not encoded. In a URI they
            are percent-encoded here, except for '/'.
    """
    if not is_uri(root):
        return os.path.join(root, *parts)
    base, mark, options = root.partition("?")
    return "/".join([base.rstrip("/"), *map(quote, parts)]) + mark + options


def split(path: str) -> tuple[str, str]:
    """Split the path or URI of a file into its folder and its name.

    Args:
        path: Local path or URI. A URI may have options, from '?' on.

    Returns:
        The folder with the options of a URI, '.' for a local name without a folder; and
        the name, percent-decoded if it is of a URI. :func:`join` makes an equivalent
        path of them.
    """
    if not is_uri(path):
        return os.path.dirname(path) or ".", os.path.basename(path)
    base, mark, options = path.partition("?")
    folder, _, name = base.rpartition("/")
    return folder + mark + options, unquote(name)


def read_bytes(path: str, max_bytes: int) -> bytes:
    """Read a file, or its first bytes if it is too large.

    Args:
        path: Local path or URI.
        max_bytes: Largest size in bytes that is allowed.

    Returns:
        The content, or the first ``max_bytes`` + 1 bytes of a larger file, by which the
        caller knows that it is too large.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    if not is_uri(path):
        require_regular(path)
        # read(n) allocates n bytes of memory, however small the file is
        with open(path, "rb") as file:
            fits = os.fstat(file.fileno()).st_size <= max_bytes
            return file.read() if fits else file.read(max_bytes + 1)
    files, inner = locate(path)
    with files.open_input_file(inner) as file:
        return bytes(file.read(min(file.size(), max_bytes + 1)))


def open_binary(path: str) -> BinaryIO:
    """Open a file to read some of its bytes, a remote one through a buffer of 8 MiB.

    Args:
        path: Local path or URI.

    Returns:
        A binary stream for reads in any order, which the caller closes.

    Raises:
        OSError: There is no such file, it cannot be read, or it is not a regular file.
    """
    if not is_uri(path):
        require_regular(path)
        return open(path, "rb")
    return io.BufferedReader(open_file(path), REMOTE_PIECE_BYTES)


def open_file(path: str) -> Any:
    """Open a file for reads in any order.

    Args:
        path: Local path or URI.

    Returns:
        A ``pyarrow.NativeFile``, which the caller closes.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    if not is_uri(path):
        require_regular(path)
    files, inner = locate(path)
    return files.open_input_file(inner)


def read_whole(path: str, max_bytes: int, what: str = "") -> bytes:
    """Read a file of a limited size.

    Args:
        path: Local path or URI.
        max_bytes: Largest size in bytes.
        what: What error messages call the file; '' for its path.

    Raises:
        ConfigError: The file cannot be read, or is larger than ``max_bytes``.
    """
    with reading(what or path):
        data = read_bytes(path, max_bytes)
    if len(data) > max_bytes:
        raise ConfigError(f"{what or path} is larger than {max_bytes} bytes")
    return data


def read_text(path: str, max_bytes: int, what: str = "") -> str:
    """Read a text file in UTF-8. A byte order mark is removed, and line ends are kept.

    Args:
        path: Local path or URI.
        max_bytes: Largest size in bytes.
        what: What error messages call the file; '' for its path.

    Raises:
        ConfigError: The file cannot be read, is larger than ``max_bytes``, or is not
            UTF-8.
    """
    with reading(what or path):
        return read_whole(path, max_bytes, what).decode("utf-8-sig")


def resolver(root: str, follow_links: bool = False) -> Callable[[str], str | None]:
    """Return a function that gives the full path of a path relative to ``root``.

    Args:
        root: Local folder or URI.
        follow_links: Whether a link inside ``root`` may lead to a file outside it.

    Returns:
        A function from a relative path to the full path: an absolute local path, or a
        percent-encoded URI. Its file need not exist. Without ``follow_links`` the links
        in a local path are replaced by what they lead to; with it they are kept, and
        '..' is resolved in the text alone.
        The function returns None for a URI, for a path with a NUL character, for the
        path of a local ``root`` itself, and for a path that leaves ``root`` by '..' or
        (without ``follow_links``) by a link. An absolute path is accepted if ``root``
        is local and it is inside ``root``. If ``root`` is a URI, any path that is
        absolute or has the part '..' gives None.
        Without ``follow_links`` the function remembers for each folder part of a path
        where its links lead, and does not notice if these change later. Whether the
        last part is a link is looked up in each call.
    """
    base = "" if is_uri(root) else os.path.realpath(root).rstrip("/") + "/"
    named = os.path.abspath(root).rstrip("/") + "/"
    folders: dict[str, str] = {}

    def find(relative: str) -> str | None:
        """Return the full path of ``relative``, which need not exist.

        None if it is outside the root or is a local root itself, is a URI or has a NUL
        character. The rules are those of :func:`resolver`.
        """
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
    """Return the size of a file, and when it was last changed.

    Args:
        path: Local path or URI. A local path may also be that of a directory.

    Returns:
        Size in bytes and modification time in ns since 1970. A link counts as what it
        leads to. (-1, 0) for a local file that is missing or cannot be looked up;
        (-1, -1) for any URI, since a request for each file takes too long.
    """
    try:
        found = None if is_uri(path) else os.stat(path)
    except OSError:
        return -1, 0
    return (-1, -1) if found is None else (found.st_size, found.st_mtime_ns)


def with_remote_facts(files: Sequence[FileEntry]) -> list[FileEntry]:
    """Look up the size and the modification time of remote files without a time.

    A listing of a folder gives both. Files that were named one by one are looked up
    here, with one request each, and up to 32 requests at the same time.

    Args:
        files: Files, of which the remote ones without a time are all in the file system
            of the first one.

    Returns:
        The files in the same order, those that were looked up with their size and time.
        A file stays as it is if it is local, has a time (not -1), is missing or is a
        directory, or if the storage gives no time for it.

    Raises:
        ConfigError: The storage refuses a request or cannot be reached, or
            :func:`locate` refuses a URI.
    """
    wanted = [file for file in files if is_uri(file.path) and file.time < 0]
    infos = []
    if wanted:
        with reading(wanted[0].path), ThreadPoolExecutor(REQUESTS) as pool:
            # a list of paths would be asked for one after the other
            places = [locate(file.path) for file in wanted]
            ask = places[0][0].get_file_info
            infos = list(pool.map(ask, [inner for _, inner in places]))
    known = {
        file: file._replace(size=info.size, time=info.mtime_ns)
        for file, info in zip(wanted, infos, strict=True)
        if info.is_file and info.mtime_ns is not None
    }
    return [known.get(file, file) for file in files]


def locate(path: str) -> tuple[Any, Any]:
    """Return the file system of a path or URI, and the path inside it.

    URIs of the same scheme, host and options share one connection. The 16 connections
    that were used last are kept. The path is not looked up.

    Args:
        path: Local path or URI. A URI may have options, from '?' on.

    Returns:
        A ``pyarrow.fs.FileSystem``; and the path inside it: ``bytes`` for a local path
        as it was given; ``str`` for a URI, percent-decoded and without a slash at the
        end, such as 'bucket/folder/name'.

    Raises:
        OSError: The URI is not valid, pyarrow does not know its scheme or options, or
            pyarrow cannot connect, for example because it looks up the region of a
            bucket of S3 that does not exist.
    """
    if not is_uri(path):
        return pa.fs.LocalFileSystem(), os.fsencode(path)
    try:
        parts = urlsplit(path, allow_fragments=False)
    except ValueError as error:  # such as a host that begins with '['
        raise OSError(str(error)) from None
    files, root = _connect(
        f"{parts.scheme}://{parts.netloc}", f"?{parts.query}" if parts.query else ""
    )
    return files, (root.rstrip("/") + unquote(parts.path)).rstrip("/")


@lru_cache(maxsize=16)
def _connect(host: str, options: str) -> tuple[Any, str]:
    """Connect to the file system of a URI. The 16 used last are kept.

    The file system repeats requests that fail: to S3 up to nine attempts within about a
    minute, to other storage as pyarrow decides.

    Args:
        host: Scheme and host, such as 's3://bucket'.
        options: Options of the URI with the leading '?', or ''.

    Returns:
        The file system, and the path of the host inside it, such as 'bucket'.

    Raises:
        OSError: pyarrow does not know the scheme or the options, or cannot connect, for
            example because it looks up the region of a bucket of S3 that does not
            exist.
    """
    try:
        files, root = pa.fs.FileSystem.from_uri(host + options)
    except pa.ArrowException as error:
        raise OSError(one_line(error)) from None
    if files.type_name == "s3":
        # A URI has no option for retries. A pickle holds all arguments of the class.
        _, (settings,) = files.__reduce__()
        settings["allow_delayed_open"] = True  # small uploads take one request, not 3
        settings["retry_strategy"] = pa.fs.AwsStandardS3RetryStrategy(S3_ATTEMPTS)
        files = pa.fs.S3FileSystem(**settings)
    return files, root


def upload_pause_s(num_bytes: int, least_s: float) -> float:
    """Return the pause between two uploads of files that grow, in seconds.

    The function does not wait. The pause is the time for ``num_bytes`` at 256 KiB per
    second, and at least ``least_s``.

    An object store cannot append, so each upload has the whole files. With a pause that
    grows with the files, the number of uploaded bytes is at most proportional to the
    time, and not to the square of the number of lines.

    Args:
        num_bytes: Number of bytes of the last upload, of all files together.
        least_s: Shortest pause, in seconds.
    """
    return max(least_s, num_bytes / UPLOAD_BYTES_PER_S)


@contextmanager
def wrap_errors(kind: type[UnoError], what: str) -> Iterator[None]:
    """Turn errors of storage inside the ``with`` block into an error of the project.

    Args:
        kind: The class of the error to raise.
        what: What was tried, for a message 'cannot WHAT: REASON'.

    Raises:
        UnoError: An error of class ``kind``, if the block raises an OSError,
            UnicodeError or ArrowException.
    """
    try:
        yield
    except (OSError, UnicodeError, pa.ArrowException) as error:
        raise kind(f"cannot {what}: {one_line(error)}") from None


def reading(path: str) -> AbstractContextManager[None]:
    """Turn errors of reading inside the ``with`` block into a ConfigError.

    The message is 'cannot read PATH: REASON'. Only an OSError, UnicodeError or
    ArrowException is turned into it.

    Args:
        path: What is read, for the message.

    Raises:
        ConfigError: On leaving the block, if it raises one of these errors.
    """
    return wrap_errors(ConfigError, f"read {path}")


class Storage:
    """Files below a root directory, in a local file system or in remote storage.

    On a local file system and in an object store, a file that is written appears whole
    or not at all. Only :meth:`append` and :meth:`write_if_absent` may leave a part of a
    local file, if the process is killed or the disk is full.
    Names of files are paths below the root; '' is the root itself. If the file system
    refuses something, methods raise a StorageError with the path.

    Args:
        root: Local path or URI. It is converted by :func:`normalize_path`, and a local
            path is made absolute. The directory need not exist.

    Raises:
        StorageError: :func:`locate` refuses the URI: it is not valid, pyarrow does not
            know its scheme or options, or pyarrow cannot connect.

    Attributes:
        root: The path of the root inside its file system.
        uri: The path of a local root, or the URI of a remote one.
        is_local: Whether the root is on a local file system.
    """

    def __init__(self, root: str) -> None:
        self.uri = full_path(normalize_path(root))
        self.is_local = not is_uri(self.uri)
        with wrap_errors(StorageError, f"open {valid_text(root)}"):
            self._fs, inner = locate(self.uri)
        self.root = os.fsdecode(inner)

    def check(self) -> None:
        """Do nothing, because this class allows every change.

        Other methods call it before they change a file, except for
        :meth:`write_if_absent` on a local file system. A subclass overrides it to
        refuse changes.

        Raises:
            StorageError: A subclass does not allow changes any more.
        """

    def path(self, name: str) -> str:
        """Return the full path of a file below the root, inside the file system.

        For a remote root it has no scheme, such as 'bucket/folder/name'.

        Args:
            name: The path of the file below the root; '' for the root itself.
        """
        return f"{self.root}/{name}" if name else self.root

    def below(self, name: str) -> str:
        """Return the full path or URI of a file below the root.

        For a remote root it is a URI with the scheme and the options of the root's URI.
        Here the name is percent-encoded, except for '/'. In a local path it is not
        changed.

        Args:
            name: The path of the file below the root, not encoded; '' for the root
                itself.
        """
        return join(self.uri, name) if name else self.uri

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file, a directory or a special file of a name.

        Args:
            name: Its path below the root; '' for the root itself. A link counts as what
                it leads to.

        Raises:
            StorageError: The storage cannot be reached or refuses to answer.
        """
        return bool(self._info(name).type != pa.fs.FileType.NotFound)

    def list(self, name: str = "") -> list[str]:
        """Return the names of the files and directories in a directory, sorted.

        Hidden ones are included. Directories in it are not searched.

        Args:
            name: The path of the directory below the root; '' for the root itself. A
                directory that does not exist counts as empty.

        Raises:
            StorageError: The directory cannot be listed, or is a local file.
        """
        if self.is_local and not self.exists(name):
            return []
        with self._errors("list", name):
            return [entry for entry, _ in _entries(self._fs, self._inner(name))]

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return the content of a file.

        Args:
            name: Name of the file.
            max_bytes: Largest size in bytes; None for any size.

        Raises:
            StorageError: The file does not exist, cannot be read, or is larger than
                ``max_bytes``.
        """
        data = self.find(name, max_bytes)
        if data is None:
            raise StorageError(f"cannot read {self.path(name)}: no such file")
        return data

    def find(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Return the content of a file, or None if it does not exist.

        The file is opened at once: there is no separate request for its existence.

        Args:
            name: Name of the file.
            max_bytes: Largest size in bytes; None for any size.

        Raises:
            StorageError: The name exists but cannot be read, is that of a local
                directory or a special file, or is a file larger than ``max_bytes``; or
                the storage cannot be reached. In an object store a directory counts as
                a file that does not exist.
        """
        with (
            self._errors("read", name),
            suppress(FileNotFoundError),
            self._open(name) as file,
        ):
            if max_bytes is not None and file.size() > max_bytes:
                raise StorageError(
                    f"{self.path(name)} is larger than {max_bytes} bytes"
                )
            return bytes(file.read())
        return None

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """Open a file for reads in any order, until the ``with`` block ends.

        Args:
            name: Name of the file.

        Yields:
            A ``pyarrow.NativeFile``.

        Raises:
            StorageError: The file does not exist or cannot be read. An OSError,
                UnicodeError or ArrowException that is raised inside the block becomes a
                StorageError, too.
        """
        with self._errors("read", name), self._open(name) as file:
            yield file

    def _open(self, name: str) -> Any:
        """Return a file as a ``pyarrow.NativeFile``.

        Raises:
            OSError: The file cannot be opened, or is not a regular file.
        """
        inner = self._inner(name)
        if self.is_local:
            require_regular(inner)
        return self._fs.open_input_file(inner)

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file. After the call the whole file is stored.

        A local file is written under a temporary name and then renamed, and is on the
        disk after the call (fsync). If the call fails, a file that was there before
        stays as it was.

        Args:
            name: Name of the file. Missing directories are created.
            data: The content.

        Raises:
            StorageError: The file cannot be written.
        """
        if not self.is_local:
            return self._upload(name, data)
        with self.create(name) as file:
            file.write(data)

    def write_if_absent(self, name: str, data: bytes) -> bool:
        """Create a file unless there is a file or directory of that name.

        Of several writers at the same moment only one gets True on a local file system.
        In remote storage several may get True, and the last one wins. A process that is
        killed during the call, or a full disk, may leave a part of a local file.

        Args:
            name: Name of the file. Missing directories are created.
            data: The content.

        Returns:
            Whether the file was created. Otherwise nothing was changed.

        Raises:
            StorageError: The file cannot be written.
        """
        if not self.is_local:
            is_new = not self.exists(name)
            if is_new:
                self.write(name, data)
            return is_new
        with self._errors("write", name), suppress(FileExistsError):
            self._make_folder(name)
            with Path(self.path(name)).open("xb") as file:
                file.write(data)
            return True
        return False

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Open a stream that creates or replaces a file when the ``with`` block ends.

        The file appears whole. If the block raises an error, or the upload fails, a
        file that was there before stays as it was. The bytes for a local file are
        written to a temporary file beside it, which is renamed at the end when they are
        on the disk (fsync). Bytes for a remote file system are
        collected in a temporary file on this machine and uploaded at once at the end.

        Args:
            name: Name of the file. Missing directories are created.

        Yields:
            A writable binary stream.

        Raises:
            StorageError: The file cannot be written, or the temporary folder is full.
                An OSError, UnicodeError or ArrowException that is raised inside the
                block becomes a StorageError, too.
        """
        self.check()
        if self.is_local:
            with (
                self._errors("write", name),
                create_local(Path(self.path(name))) as file,
            ):
                yield file
            return
        way = f"{self.path(name)} by way of {tempfile.gettempdir()} (TMPDIR)"
        with (
            wrap_errors(StorageError, f"write {way}"),
            tempfile.TemporaryFile() as file,
        ):
            yield file
            file.flush()
            is_empty = not os.fstat(file.fileno()).st_size  # which cannot be mapped
            data = b"" if is_empty else mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self._upload(name, data)

    def _upload(self, name: str, data: Any) -> None:
        """Create or replace a remote file, by one ``write`` of all its bytes.

        Closing an upload publishes the bytes that were written so far. With a single
        ``write`` there is no moment at which an error of this process can publish half
        a file.

        Args:
            name: Name of the file.
            data: The content, as bytes or another buffer.

        Raises:
            StorageError: The file cannot be written.
        """
        self.check()
        with self._errors("write", name):
            self._make_folder(name)
            with self._fs.open_output_stream(self.path(name)) as stream:
                stream.write(data)

    def append(self, name: str, data: bytes) -> None:
        """Add lines to the end of a file, which is created if it does not exist.

        An object store cannot append, so in remote storage the whole file is read and
        written again, and nothing is added between its end and the new lines. Use this
        method there for small files only. A local file is appended to in place, and a
        process that is killed, or a full disk, may leave a part of the new lines in it.
        If a local file has content that does not end with a line end, one is added
        before the new lines.

        Args:
            name: Name of the file. Missing directories are created.
            data: The lines to add, each with its line end.

        Raises:
            StorageError: The file cannot be written, or read again, or is not a regular
                file.
        """
        if not self.is_local:
            return self.write(name, (self.find(name) or b"") + data)
        self.check()
        with self._errors("write", name):
            self._make_folder(name)
            if self.exists(name):
                require_regular(self._inner(name))
            with Path(self.path(name)).open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    data = data if file.read() == b"\n" else b"\n" + data
                file.write(data)

    def delete(self, name: str) -> None:
        """Delete a file, or a directory with all that is in it.

        Nothing happens if there is none of that name, or if it is a special file, such
        as a device, or a link to something that does not exist.

        Args:
            name: The path of the file or directory below the root.

        Raises:
            StorageError: The file or directory cannot be deleted.
        """
        self.check()
        found = self._info(name).type
        with self._errors("delete", name):
            if found == pa.fs.FileType.Directory:
                self._fs.delete_dir(self._inner(name))
            elif found == pa.fs.FileType.File:
                self._fs.delete_file(self._inner(name))

    def move(self, name: str, target: str) -> None:
        """Move a file, or a directory with all that is in it, and replace ``target``.

        Local files and directories are renamed. Before a local directory is moved, the
        file or directory at ``target`` is deleted. A local file replaces a file at
        ``target``; a directory there is an error. Object stores have no rename: in
        remote storage all files are first copied, and then deleted in their old place.
        Files of a remote directory ``target`` that are not overwritten stay there.

        Args:
            name: Name of the file or directory. A name that does not exist is an error
                on a local file system. In remote storage no file is changed then.
            target: The new name, also a path below the root. Missing directories above
                it are created.

        Raises:
            StorageError: The file or directory cannot be moved.
        """
        self.check()
        infos = [self._info(name)]
        is_folder = infos[0].type == pa.fs.FileType.Directory
        if is_folder and self.is_local:
            self.delete(target)
        with self._errors("move", name):
            self._make_folder(target)
            if self.is_local:
                return self._fs.move(self._inner(name), self._inner(target))
            if is_folder:
                selector = pa.fs.FileSelector(self.path(name), recursive=True)
                infos = self._fs.get_file_info(selector)
            for info in infos:
                copy = target + info.path.removeprefix(self.path(name))
                if info.is_file:
                    self._make_folder(copy)
                    self._fs.copy_file(info.path, self.path(copy))
        self.delete(name)

    def _make_folder(self, name: str) -> None:
        """Create the directory that a file is in.

        Nothing is done for object stores, which have no directories.

        Args:
            name: Name of the file.

        Raises:
            OSError: The directory cannot be created.
        """
        if not self._fs.type_name.startswith(FLAT):
            self._fs.create_dir(os.path.dirname(self._inner(name)), recursive=True)

    def _inner(self, name: str) -> str | bytes:
        """Return the full path of a file below the root, as pyarrow takes it.

        It is bytes for a local file, whose name need not be text, and ``str``
        otherwise.
        """
        return os.fsencode(self.path(name)) if self.is_local else self.path(name)

    def _info(self, name: str) -> Any:
        """Return pyarrow's ``FileInfo`` of ``name``, whether it exists or not.

        Raises:
            StorageError: The storage cannot be reached or refuses to answer.
        """
        with self._errors("look up", name):
            return self._fs.get_file_info(self._inner(name))

    def _errors(self, what: str, name: str) -> AbstractContextManager[None]:
        """Turn errors of storage inside the ``with`` block into StorageErrors.

        The message is 'cannot WHAT PATH: REASON'. Only an OSError, UnicodeError or
        ArrowException is turned into one.

        Args:
            what: What is tried, such as 'read'.
            name: Name of the file or directory.
        """
        return wrap_errors(StorageError, f"{what} {self.path(name)}")


def user_cache() -> str:
    """Return the directory in which this program keeps its cache, a path or URI.

    It is the environment variable ``UNO_CACHE`` if that is set, else the folder ``uno``
    in ``XDG_CACHE_HOME``, or in ``~/.cache`` if that is not set either. A variable that
    is empty counts as not set. :func:`normalize_path` is applied, and a relative path
    stays relative. The directory is not created.
    """
    user = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "uno")
    return normalize_path(os.environ.get(CACHE_VARIABLE) or user)


def reserve_space(file: Any, size: int) -> None:
    """Extend an open file to ``size`` bytes and reserve space for them on the disk.

    A process that writes to a memory map of a file is ended by the system when the disk
    is full, so a lack of space must be found before. On systems that cannot reserve
    space, such as macOS, ``size`` is only compared with the free space, and the file is
    extended without reserved space.

    Args:
        file: Local file that is open for writing and is smaller than ``size``.
        size: Size that the file shall have, in bytes, above 0.

    Raises:
        OSError: The disk has not enough space, or the file system refuses the size.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    disk = os.fstatvfs(file.fileno())
    if size > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.truncate(size)


@contextmanager
def create_local(path: Path) -> Iterator[Any]:
    """Open a stream that creates or replaces a local file when the ``with`` block ends.

    The bytes are written to a temporary file beside it. When they are on the disk
    (fsync), this file is renamed to ``path``, and the directory is synchronized, too.
    If the block raises an error, the temporary file is deleted and a file at ``path``
    stays as it was. A process that is killed leaves the temporary file. Its name is
    ``.NAME.`` and eight hexadecimal digits.

    Args:
        path: Path of the file. Missing directories are created.

    Yields:
        A writable binary stream.

    Raises:
        OSError: The file cannot be written. Errors of the block are passed on.
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
