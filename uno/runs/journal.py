"""The run's diary: ``metrics.jsonl``, one JSON object a line."""

import json
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any

from uno.data.files import Storage, parse_json, upload_pause_s
from uno.errors import StorageError
from uno.runs import METRICS_FILE

MAX_LINES = 10_000  # that wait for a storage which is slower than training
PAUSE_S = 2.0  # at least, between two uploads of the journal to an object store


class Journal:
    """Appends lines of metrics. Without a ``storage``, on all ranks but the first,
    nothing is written. Lines of ``phase`` after ``step``, of a run that died or was
    rolled back, are dropped.

    One thread writes, in order, so that training never waits for storage; :meth:`flush`
    does. After a job has failed none is done, and whatever is called next raises what
    it raised.
    """

    def __init__(self, storage: Storage | None, phase: str, step: int) -> None:
        self._storage, self._phase = storage, phase
        self._lines: deque[str] = deque()
        self._writer = ThreadPoolExecutor(1, "uno-journal")
        # of the jobs so far: once it is done, all are
        self._last: Future[None] | None = None
        self._flush_requested = threading.Event()  # somebody waits for the jobs
        self._error: Exception | None = None
        self.rewind(step)

    def __enter__(self) -> "Journal":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None
    ) -> None:
        """Close; of two errors the one that ended training is raised."""
        with nullcontext() if kind is None else suppress(StorageError):
            self.close()

    def rewind(self, step: int) -> None:
        """Drop what was written after ``step``."""
        self.close()
        self._writer, self._last = ThreadPoolExecutor(1, "uno-journal"), None
        self._text = b""  # all of it, where storage cannot append
        if self._storage is None:
            return
        if (data := self._storage.find(METRICS_FILE)) is not None:
            kept = [
                e for e in _parsed(data.splitlines()) if not self._is_after(e, step)
            ]
            self._text = "".join(json.dumps(e) + "\n" for e in kept).encode()
            if self._text != data:
                self._storage.write(METRICS_FILE, self._text)

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line, soon."""
        line = json.dumps(metrics, allow_nan=False) + "\n"
        if self._storage is None:
            return
        if len(self._lines) >= MAX_LINES:
            self.flush()
        self._lines.append(line)
        self.enqueue(self._write_lines)

    def enqueue(self, job: Callable[[], None]) -> None:
        """``job`` after the lines so far, in the same thread; at once where nothing
        is written.
        """
        self._raise()
        if self._storage is None:
            job()
        else:
            self._last = self._writer.submit(self._run_job, job)

    def flush(self) -> None:
        """Return when all lines are in storage, and all jobs done."""
        self._flush_requested.set()
        if self._last is not None:
            self._last.result()
        self._flush_requested.clear()
        self._raise()

    def close(self) -> None:
        """Flush, and end the thread."""
        self._flush_requested.set()
        self._writer.shutdown()
        self._flush_requested.clear()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run_job(self, job: Callable[[], None]) -> None:
        try:
            if self._error is None:
                job()
        except Exception as error:  # whatever it is: the thread that trains raises it
            self._error = error

    def _is_after(self, entry: dict[str, Any], step: int) -> bool:
        return bool(entry.get("phase") == self._phase and entry.get("step", 0) > step)

    def _write_lines(self) -> None:
        """All that wait: the jobs of the later ones find nothing to do."""
        found = [self._lines.popleft() for _ in range(len(self._lines))]
        if not found or self._storage is None:
            return
        new = "".join(found).encode()
        if self._storage.is_local:
            self._storage.append(METRICS_FILE, new)
        else:
            self._text += new
            self._storage.write(METRICS_FILE, self._text)
            self._flush_requested.wait(upload_pause_s(len(self._text), PAUSE_S))


class JournalTail:
    """Follows ``metrics.jsonl`` while another process writes it; a look without news
    costs one request.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._size = storage, 0
        self._lines: list[bytes] = []
        self.new_entries()

    def new_entries(self) -> list[dict[str, Any]]:
        """Entries since the last look; after the file was rewound, those that differ
        from what was seen.
        """
        size = self._storage.size(METRICS_FILE)
        if size == self._size:
            return []
        lines = (
            self._storage.read(METRICS_FILE).splitlines(keepends=True) if size else []
        )
        seen, self._lines = (
            self._lines,
            [line for line in lines if line.endswith(b"\n")],
        )
        self._size = sum(map(len, self._lines))
        return _parsed(
            [line for i, line in enumerate(self._lines) if seen[i : i + 1] != [line]]
        )


def read_journal(storage: Storage, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """All lines of ``metrics.jsonl``, or of another such file; a line cut short by a
    kill is left out.
    """
    return _parsed((storage.find(name) or b"").splitlines())


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    entries = []
    for line in lines:
        with suppress(ValueError):
            entries.append(parse_json(line))
    return [entry for entry in entries if isinstance(entry, dict)]
