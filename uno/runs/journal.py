"""Write and read ``metrics.jsonl``, the metrics of a run, one JSON object a line."""

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

MAX_LINES = 10_000  # lines that may wait for a storage slower than training
PAUSE_S = 2.0  # least seconds between two uploads of the file to an object store


class Journal:
    """Append lines of metrics to the ``metrics.jsonl`` of a run.

    A thread writes the lines in order, so training does not wait for storage. After a
    write or another job has failed, no further job is done, and the next call raises
    its error.

    Args:
        storage: The run directory. None on all ranks but the first: nothing is written.
        phase: The name of the phase that is trained.
        step: The step at which it begins or resumes. Later lines of this phase are
            dropped, see :meth:`rewind`.
    """

    def __init__(self, storage: Storage | None, phase: str, step: int) -> None:
        self._storage, self._phase = storage, phase
        self._lines: deque[str] = deque()
        self._writer = ThreadPoolExecutor(1, "uno-journal")
        # jobs run in order, so all are done once the last one is
        self._last_job: Future[None] | None = None
        self._flush_requested = threading.Event()  # do not pause between uploads
        self._job_error: Exception | None = None
        self.rewind(step)

    def __enter__(self) -> "Journal":
        """Return this journal."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None
    ) -> None:
        """Close the journal.

        If the block has raised an error, a StorageError of the journal does not replace
        it.
        """
        with nullcontext() if kind is None else suppress(StorageError):
            self.close()

    def rewind(self, step: int) -> None:
        """Drop the lines of this phase after ``step``, for a resume or a roll-back."""
        self.close()
        self._writer, self._last_job = ThreadPoolExecutor(1, "uno-journal"), None
        self._text = b""  # the whole file, which an object store cannot append to
        if self._storage is None:
            return
        if (data := self._storage.find(METRICS_FILE)) is not None:
            kept = [
                e
                for e in _parse_entries(data.splitlines())
                if not self._is_after(e, step)
            ]
            self._text = "".join(json.dumps(e) + "\n" for e in kept).encode()
            if self._text != data:
                self._storage.write(METRICS_FILE, self._text)

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line. The thread writes it to storage later.

        This waits for storage if :data:`MAX_LINES` lines are not written yet.
        """
        line = json.dumps(metrics, allow_nan=False) + "\n"
        if self._storage is None:
            return
        if len(self._lines) >= MAX_LINES:
            self.flush()
        self._lines.append(line)
        self.enqueue(self._write_lines)

    def enqueue(self, job: Callable[[], None]) -> None:
        """Call a function in the writing thread, after all lines so far.

        Without a storage, the function is called at once in this thread.
        """
        self._raise_job_error()
        if self._storage is None:
            job()
        else:
            self._last_job = self._writer.submit(self._run_job, job)

    def flush(self) -> None:
        """Wait until all lines are in storage and all jobs are done.

        Raises:
            Exception: The error of a job that has failed.
        """
        self._flush_requested.set()
        if self._last_job is not None:
            self._last_job.result()
        self._flush_requested.clear()
        self._raise_job_error()

    def close(self) -> None:
        """Wait until all jobs are done, and end the thread.

        Raises:
            Exception: The error of a job that has failed.
        """
        self._flush_requested.set()
        self._writer.shutdown()
        self._flush_requested.clear()
        error, self._job_error = self._job_error, None
        if error is not None:
            raise error

    def _raise_job_error(self) -> None:
        """Raise the error of a job that has failed, if any."""
        if self._job_error is not None:
            raise self._job_error

    def _run_job(self, job: Callable[[], None]) -> None:
        """Call a job in the writing thread, unless an earlier job has failed."""
        try:
            if self._job_error is None:
                job()
        except Exception as error:  # raised by the next call in the training thread
            self._job_error = error

    def _is_after(self, entry: dict[str, Any], step: int) -> bool:
        """Return whether an entry belongs to this phase and is later than ``step``."""
        return bool(entry.get("phase") == self._phase and entry.get("step", 0) > step)

    def _write_lines(self) -> None:
        """Write all lines that wait. Jobs of the later lines then do nothing."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if not lines or self._storage is None:
            return
        new = "".join(lines).encode()
        if self._storage.is_local:
            self._storage.append(METRICS_FILE, new)
        else:
            self._text += new
            self._storage.write(METRICS_FILE, self._text)
            self._flush_requested.wait(upload_pause_s(len(self._text), PAUSE_S))


def read_journal(storage: Storage, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """Return all entries of ``metrics.jsonl``, or of another file of this format.

    A line that a killed process has not completed is left out.
    """
    return _parse_entries((storage.find(name) or b"").splitlines())


def _parse_entries(lines: list[bytes]) -> list[dict[str, Any]]:
    """Parse lines to dicts, and leave out lines that are not JSON objects."""
    entries = []
    for line in lines:
        with suppress(ValueError):
            entries.append(parse_json(line))
    return [entry for entry in entries if isinstance(entry, dict)]
