"""The run's diary: ``metrics.jsonl``, one JSON object a line, and TensorBoard events of the same numbers."""

from __future__ import annotations

import json
from typing import Any

from tensorboardX import SummaryWriter

from uno.storage import Storage

METRICS = "metrics.jsonl"
CHARTED = ("loss", "lr", "images_per_s", "skipped_steps")


class Journal:
    """Appends lines of metrics; TensorBoard events only where the run directory is a local path.

    Args:
        storage: the run directory.
        phase: name of the TensorBoard run under which its numbers appear.
        step: last step already trained; later lines of this phase, written by a run that died or that was
            rolled back, are dropped.
    """

    def __init__(self, storage: Storage, phase: str, step: int) -> None:
        self._storage, self._phase, self._events = storage, phase, None
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Drop what was written after ``step``."""
        self.close()
        _drop_lines_after(self._storage, self._phase, step)
        if self._storage.is_local:
            # One directory per phase: purging hides every later step of the directory, whatever its name.
            folder = self._storage.path(f"tensorboard/{self._phase}")
            # Without the suffix, two files of one second would have one name.
            self._events = SummaryWriter(folder, purge_step=step + 1, filename_suffix=f".{step}")

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line."""
        self._storage.append(METRICS, (json.dumps(metrics, allow_nan=False) + "\n").encode())
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


def read_journal(storage: Storage) -> list[dict[str, Any]]:
    """All lines of ``metrics.jsonl``; a line cut short by a kill is left out."""
    if not storage.exists(METRICS):
        return []
    entries = []
    for line in storage.read(METRICS).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _drop_lines_after(storage: Storage, phase: str, step: int) -> None:
    entries = read_journal(storage)
    kept = [e for e in entries if e.get("phase") != phase or e.get("step", 0) <= step]
    if storage.exists(METRICS):
        storage.write(METRICS, "".join(json.dumps(e) + "\n" for e in kept).encode())
