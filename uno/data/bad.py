"""Unreadable images met while training: counted over all workers, listed, and limited."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import numpy as np
import torch

from uno import collectives
from uno.data.decode import BadImage, check_bad, decode_rgb, quiet
from uno.data.files import Storage
from uno.data.rows import Images
from uno.errors import ConfigError

BAD_SAMPLES = "bad_samples.jsonl"

log = logging.getLogger(__name__)


class BadRows:
    """The rows that this worker, and after :meth:`sync` all workers, could not read.

    Args:
        ids: of all N rows of the task.
        images: of all N rows.
        max_fraction: of N that may be unreadable.
        storage: of the run; keeps the list.
    """

    def __init__(self, ids: Sequence[str], images: Images, max_fraction: float, storage: Storage) -> None:
        self._ids, self._images, self._storage = ids, images, storage
        self._max_fraction = max_fraction
        self._reasons = self._read()
        self._synced = len(self._reasons)

    def add(self, row: int, reason: str) -> None:
        """Note that row ``row`` of the task cannot be read."""
        self._reasons.setdefault(int(row), reason)

    def __len__(self) -> int:
        """How many are known here."""
        return len(self._reasons)

    def sync(self, device: torch.device) -> None:
        """Tell each other; to be called by all workers at the same time. Rank 0 writes the list.

        Raises:
            ConfigError: there are more than ``max_fraction`` allows.
        """
        new = torch.tensor([float(len(self._reasons) > self._synced)], device=device)
        if not collectives.sum_(new):
            return
        flags = torch.zeros(len(self._ids), device=device)
        flags[torch.tensor(sorted(self._reasons), dtype=torch.int64, device=device)] = 1
        rows = collectives.sum_(flags).nonzero()[:, 0].tolist()
        for row in rows:
            if row not in self._reasons:  # another worker's: no need to send text around
                self._reasons[row] = _reason(self._images, row)
        self._synced = len(rows)
        bad = [{"id": str(self._ids[row]), "reason": self._reasons[row]} for row in rows]
        if collectives.world()[0] == 0:
            self._storage.write(BAD_SAMPLES, "".join(json.dumps(entry) + "\n" for entry in bad).encode())
        try:
            check_bad(bad, len(self._ids), self._max_fraction)
        except ConfigError as error:
            raise ConfigError(f"{error}; all are in {self._storage.path(BAD_SAMPLES)}") from None

    def _read(self) -> dict[int, str]:
        """What an earlier part of the run has listed."""
        if not self._storage.exists(BAD_SAMPLES):
            return {}
        try:
            entries = [json.loads(line) for line in self._storage.read(BAD_SAMPLES).splitlines()]
            reasons = {str(entry["id"]): str(entry["reason"]) for entry in entries}
        except (ValueError, TypeError, KeyError):
            log.warning("%s is damaged; it is written anew", self._storage.path(BAD_SAMPLES))
            return {}
        return {row: reasons[name] for row, name in enumerate(map(str, self._ids)) if name in reasons}


def _reason(images: Images, row: int) -> str:
    try:
        with quiet():
            decode_rgb(images[row], 1)
    except BadImage as error:
        return str(error)
    return "read once, not another time"


def stand_ins(ok: np.ndarray, num_labeled: int) -> np.ndarray | None:
    """Which row takes each place of a batch: itself, or the next readable one of its kind, going round.

    Args:
        ok: bool (B,), labeled rows first.
        num_labeled: B_l.

    Returns:
        int64 (B,), or None where a kind has no readable row at all.
    """
    chosen = np.arange(len(ok))
    for start, stop in ((0, num_labeled), (num_labeled, len(ok))):
        good = np.flatnonzero(ok[start:stop]) + start
        bad = np.flatnonzero(~ok[start:stop]) + start
        if len(bad) and not len(good):
            return None
        if len(bad):
            chosen[bad] = good[np.searchsorted(good, bad) % len(good)]
    return chosen
