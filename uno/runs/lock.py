"""Lock a run directory, so that only one command at a time writes into it.

The lock is a file with a random token. Its holder renews the file every :data:`RENEW_S`
seconds, and checks the token before every write. This works on any storage and compares
no clocks. Another command that finds a lock file watches it for up to :data:`WATCH_S`
seconds. If the file does not change, its holder was killed, and the command replaces
the token by its own. A former holder that is alive after all cannot write any more,
except that a write that had begun completes one whole file.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from uno.data.files import TEMPORARY, Storage
from uno.data.output import LOCK_FILE, is_lock, parse_mapping
from uno.errors import ConfigError, StorageError
from uno.limits import MAX_STATE_BYTES

RENEW_S = 2.0  # seconds between two renewals of a lock
WATCH_S = 10.0  # seconds after which a lock without renewal is that of a killed command


class ClaimedStorage(Storage):
    """A run directory that can be written only while the lock file has a token.

    Args:
        root: The directory, a path or URI.
        token: The token of the lock's holder.
    """

    def __init__(self, root: str, token: str) -> None:
        super().__init__(root)
        self.token = token

    def check(self) -> None:
        """Check before a write that the lock is still held.

        Raises:
            StorageError: The lock file is missing, damaged, has another token or cannot
                be read.
        """
        content = _read_lock(self)
        if content is None:
            problem = (
                f"{self.path(LOCK_FILE)} is not visible on {socket.gethostname()}: the"
                " run was deleted"
            )
            raise StorageError(
                f"{problem}, or --output is not on storage that all nodes share"
            )
        if content.get("token") != self.token:
            raise StorageError(
                f"{self.uri} was taken over by {_describe_holder(content)}; this run"
                " stops writing"
            )


class RunLock:
    """The lock of a run directory, held by this process until :meth:`release`.

    A thread renews the lock file.

    Args:
        root: The run directory, a path or URI.
        free: Whether the directory had no lock file. Otherwise the lock file of a
            killed command is replaced.

    Attributes:
        storage: The run directory, for writing. A write fails if the lock was lost.

    Raises:
        ConfigError: ``free`` is True, and another command has just taken the lock.
        StorageError: The lock file cannot be read or written.
    """

    def __init__(self, root: str, free: bool = False) -> None:
        self.storage = ClaimedStorage(root, uuid.uuid4().hex)
        self._unchecked_storage = Storage(root)
        self._mutex = threading.Lock()
        self._released = threading.Event()
        self._renewals = 0
        if not free:
            self._write_lock()
        elif not self._unchecked_storage.write_if_absent(
            LOCK_FILE, self._next_content()
        ):
            holder = _read_lock(self._unchecked_storage) or {}
            raise _in_use_error(self._unchecked_storage, holder)
        threading.Thread(target=self._renew, name="uno-lock", daemon=True).start()

    def replace_token(self) -> str:
        """Replace the token of the lock by a random one, and return the new token.

        The lock file is rewritten. Workers that still have the old token can write no
        more.

        Raises:
            StorageError: Another command has taken over the lock, or the lock file is
                missing or damaged, or cannot be read or written.
        """
        with self._mutex:
            self.storage.check()
            self.storage.token = uuid.uuid4().hex
            self._write_lock()
            return self.storage.token

    def release(self) -> None:
        """Stop renewing the lock, and delete the lock file if it has this lock's token.

        Temporary files of the lock, which commands left that were killed while they
        held it, are deleted, too. If another command has taken over the lock, nothing
        is deleted.

        Raises:
            StorageError: The lock file cannot be read, the directory cannot be listed,
                or a file cannot be deleted.
        """
        self._released.set()
        with self._mutex:
            if self._holds_lock():
                for name in filter(is_lock, self._unchecked_storage.list()):
                    if TEMPORARY.fullmatch(name):
                        self._unchecked_storage.delete(name)
                self._unchecked_storage.delete(LOCK_FILE)

    def _renew(self) -> None:
        """Rewrite the lock file every :data:`RENEW_S` seconds until the lock ends.

        The lock ends when it is released, or when the lock file is missing or damaged
        or has another token. Errors of storage are ignored, and the next attempt
        follows.
        """
        while not self._released.wait(RENEW_S):
            # if the disk is full, the command itself will report it at its next write
            with suppress(StorageError), self._mutex:
                if self._released.is_set() or not self._holds_lock():
                    return
                self._write_lock()

    def _holds_lock(self) -> bool:
        """Return whether there is a lock file and it has this lock's token."""
        return (_read_lock(self._unchecked_storage) or {}).get(
            "token"
        ) == self.storage.token

    def _write_lock(self) -> None:
        """Write the lock file with the token of this lock, or replace it."""
        self._unchecked_storage.write(LOCK_FILE, self._next_content())

    def _next_content(self) -> bytes:
        """Return the next content of the lock file, for its first and each later write.

        It is JSON with the host, the process, the token that identifies this lock, and
        the number of calls of this method, so that every renewal changes the file.
        """
        self._renewals += 1
        lock = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "token": self.storage.token,
        }
        return json.dumps({**lock, "renewals": self._renewals}).encode()


@contextmanager
def lock_run(storage: Storage, on_wait: Callable[[str], None]) -> Iterator[RunLock]:
    """Hold the lock of a run directory inside the block, and release it at the end.

    If there is a lock file, it is watched until it changes, for up to :data:`WATCH_S`
    seconds. If it does not change, its command was killed, and the file is replaced. If
    it disappears, the lock is free.

    Args:
        storage: The run directory.
        on_wait: Called with a line for the user if the directory has a lock file,
            because it takes up to ten seconds to see whether its holder is alive.

    Yields:
        The lock. Its attribute ``storage`` is the directory for writing: a write raises
        StorageError if another command has taken over the lock.

    Raises:
        ConfigError: Another command holds the lock, or has just taken it.
        StorageError: The lock file cannot be read or written, or, after a block without
            an error, cannot be deleted.
    """
    before = now = _read_lock(storage)
    if before is not None:
        why = f"waiting {WATCH_S:g} s to see whether that process is alive"
        on_wait(f"{storage.uri} is locked by {_describe_holder(before)}; {why}")
    end = time.monotonic() + WATCH_S
    while now is not None and now == before and time.monotonic() < end:
        time.sleep(RENEW_S / 4)
        now = _read_lock(storage)
    if now is not None and now != before:
        raise _in_use_error(storage, now)
    lock = RunLock(storage.uri, free=now is None)
    try:
        yield lock
    except BaseException:
        with suppress(StorageError):  # the first error says more
            lock.release()
        raise
    lock.release()


def _in_use_error(storage: Storage, lock: dict[str, Any]) -> ConfigError:
    """Return the error that another command holds the lock of a directory.

    Args:
        storage: The run directory.
        lock: The content of the lock file, which names the process and the host.
    """
    advice = "wait for it, stop it, or choose another --output"
    return ConfigError(f"{storage.uri} is in use by {_describe_holder(lock)}; {advice}")


def _read_lock(storage: Storage) -> dict[str, Any] | None:
    """Return the content of the lock file as a dict, {} if damaged, None if missing."""
    data = storage.find(LOCK_FILE, MAX_STATE_BYTES)
    return None if data is None else parse_mapping(data) or {}


def _describe_holder(lock: dict[str, Any]) -> str:
    """Describe the process that wrote a lock file as "process 123 on HOST".

    Args:
        lock: The content of the lock file. A ``?`` stands for what it lacks.
    """
    return f"process {lock.get('pid', '?')} on {lock.get('host', '?')}"
