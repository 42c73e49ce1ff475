"""The run's diary: ``metrics.jsonl``, one JSON object a line, and TensorBoard events of the same numbers."""

import json
from contextlib import suppress
from typing import Any

from tensorboardX import SummaryWriter

from uno.data.files import Storage, parse_json
from uno.runs import METRICS_FILE

CHARTED = ("loss", "lr", "images_per_s", "skipped_steps")


class Journal:
    """Appends lines of metrics; TensorBoard events only where the run directory is a local path. Without a
    ``storage``, on all ranks but the first, nothing is written. Lines of ``phase`` after ``step``, of a run
    that died or was rolled back, are dropped.
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
            # Without the suffix, two files of one second would have one name.
            folder = self._storage.path(f"tensorboard/{self._phase}")
            self._events = SummaryWriter(folder, purge_step=step + 1, filename_suffix=f".{step}")

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line."""
        if self._storage is not None:
            self._storage.append(METRICS_FILE, (json.dumps(metrics, allow_nan=False) + "\n").encode())
        if self._events is not None:
            scalars = {name: metrics[name] for name in CHARTED}
            scalars |= {f"head_loss/{head}": loss for head, loss in enumerate(metrics.get("head_losses", ()))}
            for name, value in scalars.items():
                self._events.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._events is not None:
            self._events.close()
            self._events = None


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
    return _parsed(storage.read(name).splitlines()) if storage.exists(name) else []


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    entries = []
    for line in lines:
        with suppress(ValueError):
            entries.append(parse_json(line))
    return [entry for entry in entries if isinstance(entry, dict)]
