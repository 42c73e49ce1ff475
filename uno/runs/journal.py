"""Write and read ``metrics.jsonl``, the metrics of a run, one JSON object a line."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any

from uno.data.files import Storage, parse_json
from uno.errors import StorageError
from uno.runs import METRICS_FILE


class Journal:
    """Append lines of metrics to the ``metrics.jsonl`` of a run, in a thread.

    The thread writes the lines in order, so training does not wait for storage. It also
    calls functions that are given to :meth:`enqueue`, such as the writing of a
    checkpoint. To an object store, which cannot append, the whole file is uploaded at
    each flush. After a write or function of the thread has failed, nothing more is
    written or called, and every later call of a method raises the error. As a context
    manager, the object is closed at the end of the block.

    Args:
        storage: The run directory. None on all ranks but the first: nothing is written,
            and enqueued functions are called at once.
        phase: The name of the phase that is trained.
        step: The step at which the phase begins or resumes. Lines of this phase with a
            later step are dropped from the file now, see :meth:`rewind`.

    Raises:
        StorageError: The file exists and cannot be read, or cannot be rewritten.
    """

    def __init__(self, storage: Storage | None, phase: str, step: int) -> None:
        self._storage, self._phase = storage, phase
        self._writer = ThreadPoolExecutor(1, "uno-journal")
        self._job_error: Exception | None = None
        self._text = b""  # the whole file, which an object store cannot append to
        self._num_stored = 0  # bytes of the text that are in the object store
        self.rewind(step)

    def __enter__(self) -> "Journal":
        """Return this journal."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None
    ) -> None:
        """Close the journal.

        Args:
            kind: The class of the exception that the block has raised, None if it has
                raised none. A StorageError of the journal does not replace this
                exception. Any other error of the journal does.

        Raises:
            Exception: The error of a write or function that has failed, unless it is a
                StorageError and the block has raised an exception.
        """
        with nullcontext() if kind is None else suppress(StorageError):
            self.close()

    def rewind(self, step: int) -> None:
        """Drop the lines of this phase that belong to steps after ``step``.

        This is done when the phase resumes from the checkpoint of this step, or rolls
        back to it. All lines so far are stored before. Lines that are not JSON objects,
        such as an incomplete last one, are dropped, too. Lines of other phases, and
        lines without a step, stay. The file is rewritten if this changes its content.
        Without a storage nothing is dropped.

        Args:
            step: The number of optimizer steps before the checkpoint.

        Raises:
            StorageError: The file cannot be read or written.
            Exception: The error of an earlier write or function that has failed.
        """
        self.flush()
        if self._storage is None:
            return
        data = self._storage.find(METRICS_FILE) or b""
        kept = [
            entry
            for entry in _parse_entries(data.splitlines())
            if entry.get("phase") != self._phase or entry.get("step", 0) <= step
        ]
        self._text = "".join(json.dumps(entry) + "\n" for entry in kept).encode()
        if self._text != data:
            self._storage.write(METRICS_FILE, self._text)
        self._num_stored = len(self._text)

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line of metrics. The thread writes it to storage later.

        An object store gets the line at the next :meth:`flush`. Without a storage, the
        metrics are checked and nothing is written.

        Args:
            metrics: JSON values by name, such as the phase, the step and the loss.

        Raises:
            ValueError: A number is NaN or infinite, which JSON cannot hold.
            Exception: The error of an earlier write or function that has failed.
        """
        line = json.dumps(metrics, allow_nan=False) + "\n"
        if self._storage is not None:
            self.enqueue(partial(self._append, self._storage, line.encode()))

    def enqueue(self, job: Callable[[], None]) -> None:
        """Call a function in the writing thread, after all lines and functions so far.

        For an object store, these lines may still be in memory when the function is
        called, because :meth:`flush` uploads them. Without a storage, the function is
        called at once in the calling thread, and its error is raised at once.

        Args:
            job: Takes no argument. If it raises an error in the writing thread, the
                next call of a method of this journal raises this error.

        Raises:
            Exception: The error of an earlier write or function that has failed.
        """
        if self._job_error is not None:
            raise self._job_error
        if self._storage is None:
            job()
        else:
            self._writer.submit(self._run_job, job)

    def flush(self) -> None:
        """Wait until all lines are in storage and all enqueued functions were called.

        To an object store the file is uploaded here, if there are new lines. Without a
        storage there is nothing to wait for.

        Raises:
            Exception: The error of a write or function that has failed.
        """
        if self._storage is not None:
            upload = partial(self._upload, self._storage)
            self._writer.submit(self._run_job, upload).result()
        if self._job_error is not None:
            raise self._job_error

    def close(self) -> None:
        """Wait until all lines are stored and all functions called, and end the thread.

        Raises:
            Exception: The error of a write or function that has failed.
        """
        try:
            self.flush()
        finally:
            self._writer.shutdown()

    def _run_job(self, job: Callable[[], None]) -> None:
        """Call a function here, unless an earlier one has failed.

        The writing thread calls this. An error of the function is kept, and the next
        method of the journal that the training thread calls raises it.

        Args:
            job: Takes no argument.
        """
        try:
            if self._job_error is None:
                job()
        except Exception as error:  # raised by the next call in the training thread
            self._job_error = error

    def _append(self, storage: Storage, line: bytes) -> None:
        """Append a line to the local file, or keep it in memory for the next upload.

        Args:
            storage: The run directory. A local one has the file, an object store is
                uploaded to later.
            line: The line with its line end.
        """
        if storage.is_local:
            storage.append(METRICS_FILE, line)
        else:
            self._text += line

    def _upload(self, storage: Storage) -> None:
        """Upload all lines as ``metrics.jsonl``, if there are new ones.

        Args:
            storage: The run directory. Nothing happens if it is local, because
                :meth:`_append` has written the lines.
        """
        if self._num_stored < len(self._text):
            storage.write(METRICS_FILE, self._text)
            self._num_stored = len(self._text)


def read_journal(storage: Storage, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """Return all lines of the ``metrics.jsonl`` of a run as dicts, in order.

    A line that is not a JSON object is left out, such as one that a killed process has
    not completed. If there is no such file, the list is empty.

    Args:
        storage: The run directory.
        name: The name of the file in the run directory, which may be any file with one
            JSON object a line.

    Raises:
        StorageError: The file exists and cannot be read.
    """
    return _parse_entries((storage.find(name) or b"").splitlines())


def _parse_entries(lines: list[bytes]) -> list[dict[str, Any]]:
    """Parse lines to dicts, and leave out lines that are not JSON objects."""
    entries = []
    for line in lines:
        with suppress(ValueError):
            entries.append(parse_json(line))
    return [entry for entry in entries if isinstance(entry, dict)]
