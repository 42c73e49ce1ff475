"""``logs/rank-N.log`` of a run: what each rank of a group says, kept beside the run."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from uno.data.files import Storage, refusing, upload_pause_s
from uno.errors import StorageError, UnoError
from uno.session.console import described, print_line

FOLDER = "logs"
# between two looks for what an object store, which takes a log whole, lacks
UPLOAD_S = 10.0
END_S = 5.0  # for the last lines: a child process of the rank may hold its output open


class RankLog(AbstractContextManager["RankLog"]):
    """What this process and its libraries write from here on also stands in the rank's
    log, behind that of earlier groups, as do :meth:`note` and the error that ends the
    ``with``; what goes to a terminal stays there alone. ``tee`` writes, a process of
    its own: the last words of a rank that is killed are kept.
    """

    def __init__(self, storage: Storage, rank: int, world_size: int) -> None:
        self._storage, self._name, self._over = (
            storage,
            f"{FOLDER}/rank-{rank}.log",
            threading.Event(),
        )
        self._own = None if storage.is_local else tempfile.mkdtemp("-uno")
        self._path = (
            storage.path(self._name)
            if self._own is None
            else os.path.join(self._own, "log")
        )
        # descriptor, where it led, its tee
        self._kept: list[tuple[int, int, subprocess.Popen[bytes]]] = []
        self._uploaded, self._upload_thread = (
            0,
            threading.Thread(target=self._follow, name="uno-rank-log"),
        )
        with refusing(StorageError, f"write {storage.path(self._name)}"):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            if self._own:
                with open(self._path, "wb") as file:
                    file.write(storage.find(self._name) or b"")
        self.note(
            f"rank {rank} of {world_size}, process {os.getpid()} on"
            f" {socket.gethostname()}"
        )
        self._tee()
        if self._own:
            self._upload_thread.daemon = True
            self._upload_thread.start()

    def note(self, text: str) -> None:
        """A line with the time."""
        # a full disk: training says so
        with suppress(OSError), open(self._path, "ab", buffering=0) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics."""
        self.note(described(metrics))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        if error is not None:
            text = (
                f"{kind.__name__}: {error}"
                if isinstance(error, UnoError) and kind
                else None
            )
            self.note(text or "".join(traceback.format_exception(error)).rstrip())
        self._flush()
        for number, before, tee in self._kept:
            os.dup2(before, number)
            os.close(before)
            with suppress(subprocess.TimeoutExpired):
                tee.wait(END_S)
        self._over.set()
        if self._own:
            self._upload_thread.join()
            shutil.rmtree(self._own, ignore_errors=True)

    def _tee(self) -> None:
        self._flush()
        for number in (1, 2):
            if os.isatty(number):
                continue
            before = os.dup(number)
            command = ["tee", "-a", self._path]
            try:  # of its own session: Ctrl-C and a hang-up are the rank's to answer
                tee = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=before,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                os.close(before)
                return print_line(
                    f"warning: {self._name} has no output of libraries: {error}"
                )
            assert tee.stdin is not None
            os.dup2(tee.stdin.fileno(), number)
            tee.stdin.close()
            self._kept.append((number, before, tee))

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    def _follow(self) -> None:
        last = False
        while not last:
            last = self._over.wait(upload_pause_s(self._uploaded, UPLOAD_S))
            with suppress(OSError, UnoError):  # whoever writes checkpoints says it
                if os.path.getsize(self._path) > self._uploaded:
                    with open(self._path, "rb") as file:
                        data = file.read()
                    self._storage.write(self._name, data)
                    self._uploaded = len(data)
