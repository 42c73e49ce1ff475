"""The run's diary: ``metrics.jsonl``, one JSON object a line, and TensorBoard events of the same numbers."""

import json
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from queue import Queue
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter

from uno.data.files import Storage, parse_json
from uno.errors import StorageError
from uno.runs import METRICS_FILE

CHARTED = ("loss", "lr", "images_per_s", "skipped_steps")
MAX_JOBS = 1000  # that wait for a storage which is slower than training
PAUSE_S = 2.0  # between two uploads of the journal to an object store, which takes it whole


class Journal:
    """Appends lines of metrics; TensorBoard events only where the run directory is a local path. Without a
    ``storage``, on all ranks but the first, nothing is written. Lines of ``phase`` after ``step``, of a run
    that died or was rolled back, are dropped.

    A thread writes, so that training never waits for storage. :meth:`flush` does; a StorageError of the
    thread is raised by whatever is called next.
    """

    def __init__(self, storage: Storage | None, phase: str, step: int) -> None:
        self._storage, self._phase, self._events = storage, phase, None
        self._lines: deque[tuple[str, dict[str, Any]]] = deque()
        self._writer = Writer()
        self.rewind(step)

    def __enter__(self) -> "Journal":
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        """Close; of two errors the one that ended training is raised."""
        with nullcontext() if kind is None else suppress(StorageError):
            self.close()

    def rewind(self, step: int) -> None:
        """Drop what was written after ``step``."""
        self.close()
        self._text = b""  # all of it, where storage cannot append
        if self._storage is None:
            return
        if (data := self._storage.find(METRICS_FILE)) is not None:
            kept = [e for e in _parsed(data.splitlines()) if not self._is_after(e, step)]
            self._text = "".join(json.dumps(e) + "\n" for e in kept).encode()
            if self._text != data:
                self._storage.write(METRICS_FILE, self._text)
        if self._storage.is_local:
            # One directory per phase: purging hides every later step of the directory, whatever its name.
            # Without the suffix, two files of one second would have one name.
            folder = self._storage.path(f"tensorboard/{self._phase}")
            self._events = SummaryWriter(folder, purge_step=step + 1, filename_suffix=f".{step}")

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line, soon."""
        line = json.dumps(metrics, allow_nan=False) + "\n"
        if self._storage is not None:
            self._lines.append((line, metrics))
            self._writer.do(self._write_lines)

    def later(self, job: Callable[[], None]) -> None:
        """``job`` after the lines so far, in the same thread; at once where nothing is written."""
        job() if self._storage is None else self._writer.do(job)

    def flush(self) -> None:
        """Return when all lines are in storage, and all jobs done."""
        self._writer.flush()

    def close(self) -> None:
        """Flush, TensorBoard too."""
        try:
            self._writer.close()
        finally:
            if self._events is not None:
                self._events.close()
                self._events = None

    def _is_after(self, entry: dict[str, Any], step: int) -> bool:
        return bool(entry.get("phase") == self._phase and entry.get("step", 0) > step)

    def _write_lines(self) -> None:
        """All that wait: the jobs of the later ones find nothing to do."""
        found = [self._lines.popleft() for _ in range(len(self._lines))]
        if not found or self._storage is None:
            return
        new = "".join(line for line, _ in found).encode()
        if self._storage.is_local:
            self._storage.append(METRICS_FILE, new)
        else:
            self._text += new
            self._storage.write(METRICS_FILE, self._text)
            self._writer.pause(PAUSE_S)
        for _, metrics in found:
            self._draw(metrics)

    def _draw(self, metrics: dict[str, Any]) -> None:
        if self._events is not None:
            scalars = {name: metrics[name] for name in CHARTED}
            scalars |= {f"head_loss/{head}": loss for head, loss in enumerate(metrics.get("head_losses", ()))}
            for name, value in scalars.items():
                self._events.add_scalar(name, value, metrics["step"])


class Writer:
    """A thread that does jobs in order, from the first to :meth:`close`. After one has failed none is done,
    and every call raises what it raised.
    """

    def __init__(self) -> None:
        self._jobs: Queue[Callable[[], None] | None] = Queue(MAX_JOBS)
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Have ``job`` done; waits only where :data:`MAX_JOBS` are waiting."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="uno-journal", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def flush(self) -> None:
        """Return when all is done."""
        self._hurry.set()
        self._jobs.join()
        self._hurry.clear()
        self._raise()

    def close(self) -> None:
        """Flush, and end the thread; another job starts one."""
        if (thread := self._thread) is not None:
            self._hurry.set()
            self._jobs.put(None)
            thread.join()
            self._thread = None
            self._hurry.clear()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def pause(self, seconds: float) -> None:
        """For a job: wait, unless somebody waits for the jobs."""
        self._hurry.wait(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except Exception as error:  # whatever it is: the thread that trains raises it
                self._error = error
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class JournalTail:
    """Follows ``metrics.jsonl`` while another process writes it; a look without news costs one request."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._size = storage, 0
        self._lines: list[bytes] = []
        self.new_entries()

    def new_entries(self) -> list[dict[str, Any]]:
        """Entries since the last look; after the file was rewound, those that differ from what was seen."""
        size = self._storage.size(METRICS_FILE)
        if size == self._size:
            return []
        lines = self._storage.read(METRICS_FILE).splitlines(keepends=True) if size else []
        seen, self._lines = self._lines, [line for line in lines if line.endswith(b"\n")]
        self._size = sum(map(len, self._lines))
        return _parsed([line for i, line in enumerate(self._lines) if seen[i : i + 1] != [line]])


def read_journal(storage: Storage, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """All lines of ``metrics.jsonl``, or of another such file; a line cut short by a kill is left out."""
    return _parsed((storage.find(name) or b"").splitlines())


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    entries = []
    for line in lines:
        with suppress(ValueError):
            entries.append(parse_json(line))
    return [entry for entry in entries if isinstance(entry, dict)]
