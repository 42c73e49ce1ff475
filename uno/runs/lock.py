"""One command at a time in a run directory: a claim that its holder renews, and that
every write checks.

It works on any storage and compares no clocks. A newcomer watches a claim that it
finds: if it stays as it is for :data:`WATCH_S`, its holder was killed, and the
newcomer's token replaces it. Whoever writes with the old one is stopped. A write under
way at that time is of one whole file.
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
from uno.data.output import LOCK_FILE, is_lock, mapping
from uno.errors import ConfigError, StorageError
from uno.limits import MAX_STATE_BYTES

RENEW_S = 2.0
WATCH_S = 10.0


class ClaimedStorage(Storage):
    """A run directory that can be written only while ``token`` is the one in its
    lock file.
    """

    def __init__(self, root: str, token: str) -> None:
        super().__init__(root)
        self.token = token

    def check(self) -> None:
        """Raise StorageError, before every write, unless the claim holds."""
        found = _read(self)
        if found is None:
            problem = (
                f"{self.path(LOCK_FILE)} is not visible on {socket.gethostname()}: the"
                " run was deleted"
            )
            raise StorageError(
                f"{problem}, or --output is not on storage that all nodes share"
            )
        if found.get("token") != self.token:
            raise StorageError(
                f"{self.uri} was taken over by {_who(found)}; this run stops writing"
            )


class RunLock:
    """The holder's side: renews the lock file from a thread until it is released.
    ConfigError: ``free`` was the directory, and another command has just taken it.
    """

    def __init__(self, root: str, free: bool = False) -> None:
        self.storage = ClaimedStorage(root, uuid.uuid4().hex)
        self._plain = Storage(root)
        self._mutex = threading.Lock()
        self._released = threading.Event()
        self._renewals = 0
        if not free:
            self._write()
        elif not self._plain.write_first(LOCK_FILE, self._content()):
            raise _in_use(self._plain, _who(_read(self._plain) or {}))
        threading.Thread(target=self._renew, name="uno-lock", daemon=True).start()

    def replace_token(self) -> str:
        """A new token for this claim: workers that hold the old one can write no
        more.
        """
        with self._mutex:
            self.storage.token = uuid.uuid4().hex
            self._write()
            return self.storage.token

    def release(self) -> None:
        """Stop renewing; if the lock file is still ours, remove it and what killed
        holders left of theirs.
        """
        self._released.set()
        with self._mutex:
            if self._holds():
                for name in filter(is_lock, self._plain.list()):
                    if TEMPORARY.fullmatch(name):
                        self._plain.delete(name)
                self._plain.delete(LOCK_FILE)

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            # a full disk: whoever writes results will say so
            with suppress(StorageError), self._mutex:
                if self._released.is_set() or not self._holds():
                    return
                self._write()

    def _holds(self) -> bool:
        return (_read(self._plain) or {}).get("token") == self.storage.token

    def _write(self) -> None:
        self._plain.write(LOCK_FILE, self._content())

    def _content(self) -> bytes:
        self._renewals += 1
        lock = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "token": self.storage.token,
        }
        return json.dumps({**lock, "renewals": self._renewals}).encode()


@contextmanager
def lock_run(storage: Storage, on_wait: Callable[[str], None]) -> Iterator[RunLock]:
    """Hold the run directory ``storage``; ConfigError: another command does.
    ``on_wait`` gets one line where a claim is found whose holder may be dead.
    """
    found = lock_owner(storage, on_wait)
    if found is not None and found[1]:
        raise _in_use(storage, found[0])
    mine = RunLock(storage.uri, free=found is None)
    try:
        yield mine
    finally:
        mine.release()


def lock_owner(
    storage: Storage, on_wait: Callable[[str], None] | None = None
) -> tuple[str, bool] | None:
    """Who holds the directory, if anybody, and whether they live (watched until
    known, at most WATCH_S).
    """
    found = now = _read(storage)
    if found is not None and on_wait is not None:
        why = f"waiting {WATCH_S:g} s to see whether that process is alive"
        on_wait(f"{storage.uri} is locked by {_who(found)}; {why}")
    end = time.monotonic() + WATCH_S
    while now is not None and now == found and time.monotonic() < end:
        time.sleep(RENEW_S / 4)
        now = _read(storage)
    return None if now is None else (_who(now), now != found)


def _in_use(storage: Storage, who: str) -> ConfigError:
    advice = "wait for it, stop it, or choose another --output"
    return ConfigError(f"{storage.uri} is in use by {who}; {advice}")


def _read(storage: Storage) -> dict[str, Any] | None:
    """The lock file; {} where it is damaged, None where there is none."""
    data = storage.find(LOCK_FILE, MAX_STATE_BYTES)
    return None if data is None else mapping(data) or {}


def _who(found: dict[str, Any]) -> str:
    return f"process {found.get('pid', '?')} on {found.get('host', '?')}"
