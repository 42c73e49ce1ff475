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
        phase: name under which numbers appear in TensorBoard.
        step: last step already trained; later lines of this phase, written by a run that died, are dropped.
    """

    def __init__(self, storage: Storage, phase: str, step: int) -> None:
        self._storage, self._phase = storage, phase
        _drop_lines_after(storage, phase, step)
        self._events = (
            SummaryWriter(storage.path("tensorboard"), purge_step=step) if storage.is_local else None
        )

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line."""
        self._storage.append(METRICS, (json.dumps(metrics) + "\n").encode())
        if self._events is not None:
            for name in CHARTED:
                self._events.add_scalar(f"{self._phase}/{name}", metrics[name], metrics["step"])
            for head, loss in enumerate(metrics.get("head_losses", ())):
                self._events.add_scalar(f"{self._phase}/head_loss/{head}", loss, metrics["step"])

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._events is not None:
            self._events.close()


def read_journal(storage: Storage) -> list[dict[str, Any]]:
    """All lines of ``metrics.jsonl``; a line cut short by a kill is left out."""
    if not storage.exists(METRICS):
        return []
    entries = []
    for line in storage.read(METRICS).splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def _drop_lines_after(storage: Storage, phase: str, step: int) -> None:
    entries = read_journal(storage)
    kept = [e for e in entries if e.get("phase") != phase or e.get("step", 0) <= step]
    if storage.exists(METRICS):
        storage.write(METRICS, "".join(json.dumps(e) + "\n" for e in kept).encode())
