"""The run's diary: ``metrics.jsonl``, one JSON object a line, and TensorBoard events of the same numbers."""

import json
from typing import Any

from tensorboardX import SummaryWriter

from uno.data.files import Storage
from uno.runs import METRICS_FILE

CHARTED = ("loss", "lr", "images_per_s", "skipped_steps")


class Journal:
    """Appends lines of metrics; TensorBoard events only where the run directory is a local path.

    Args:
        storage: the run directory; None, on all ranks but the first, writes nothing.
        phase: name of the TensorBoard run under which its numbers appear.
        step: last step already trained; later lines of this phase, written by a run that died or that was
            rolled back, are dropped.
    """

    def __init__(self, storage: Storage | None, phase: str, step: int) -> None:
        self._storage, self._phase, self._events = storage, phase, None
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Drop what was written after ``step``."""
        self.close()
        if self._storage is None:
            return
        if self._storage.exists(METRICS_FILE):
            entries = read_journal(self._storage)
            kept = [e for e in entries if e.get("phase") != self._phase or e.get("step", 0) <= step]
            self._storage.write(METRICS_FILE, "".join(json.dumps(e) + "\n" for e in kept).encode())
        if self._storage.is_local:
            # One directory per phase: purging hides every later step of the directory, whatever its name.
            folder = self._storage.path(f"tensorboard/{self._phase}")
            # Without the suffix, two files of one second would have one name.
            self._events = SummaryWriter(folder, purge_step=step + 1, filename_suffix=f".{step}")

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line."""
        if self._storage is not None:
            self._storage.append(METRICS_FILE, (json.dumps(metrics, allow_nan=False) + "\n").encode())
        if self._events is not None:
            for name in CHARTED:
                self._events.add_scalar(name, metrics[name], metrics["step"])
            for head, loss in enumerate(metrics.get("head_losses", ())):
                self._events.add_scalar(f"head_loss/{head}", loss, metrics["step"])

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._events is not None:
            self._events.close()
            self._events = None


class JournalTail:
    """Follows ``metrics.jsonl`` while another process writes it; each look costs one request where nothing is
    new, and reads what was appended otherwise.

    Args:
        storage: the run directory. Lines that are there already are passed over.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._size = storage, 0
        self._lines: list[bytes] = []
        self.new_entries()

    def new_entries(self) -> list[dict[str, Any]]:
        """Entries since the last look. After the file was rewound, those that differ from what was seen."""
        size = self._storage.size(METRICS_FILE)
        if size == self._size:
            return []
        last = self._lines[-1:]
        start = self._size - sum(map(len, last))
        lines = _whole_lines(self._storage.read(METRICS_FILE, start)) if size > self._size else []
        if lines[: len(last)] == last:
            new = lines[len(last) :]
        else:  # rewritten: a worker group started again or rolled back
            lines = _whole_lines(self._storage.read(METRICS_FILE)) if size else []
            pairs = zip(lines, self._lines, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(lines), len(self._lines)))
            self._lines, new = lines[:same], lines[same:]
        self._lines += new
        self._size = sum(map(len, self._lines))
        return _parsed(new)


def read_journal(storage: Storage, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """All lines of ``metrics.jsonl``, or of another such file; a line cut short by a kill is left out."""
    return _parsed(storage.read(name).splitlines()) if storage.exists(name) else []


def _whole_lines(data: bytes) -> list[bytes]:
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries
