"""List the images that cannot be read, and raise an error if there are too many.

Each entry of the list has the id of a row, the reason, and the path of the image if it
is in a file of its own. The list is a file of the run directory.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from uno import distributed
from uno.data.columns import find_rows
from uno.data.files import Storage, parse_json
from uno.data.images import Images, name_row
from uno.errors import ConfigError

BAD_SAMPLES = "bad_samples.jsonl"

BadSample = dict[str, Any]
"""An entry of :data:`BAD_SAMPLES`: id, reason and, for an image in a file, uri."""

log = logging.getLogger(__name__)


def check_bad(
    ids: pa.LargeStringArray,
    reasons: Sequence[str | None] | Mapping[int, str],
    max_fraction: float,
    storage: Storage | None = None,
    images: Images | None = None,
) -> list[BadSample]:
    """List the unreadable images of a data set, and refuse it if there are too many.

    If ``storage`` is given and the list is not empty, rank 0 writes the list to a file,
    which replaces an older one. The file has one JSON object on each line. No image is
    decoded, and nothing is exchanged between ranks.

    Args:
        ids: The ids of N rows, an Arrow array.
        reasons: The reasons of the images that cannot be read, by row number; or one
            entry for each of the N rows, which is None if the image can be read.
        max_fraction: The largest share of the N rows that may be unreadable, 0 to 1.
        storage: The directory to which rank 0 writes the list as :data:`BAD_SAMPLES`,
            if the list is not empty; None to write no file.
        images: The images of the N rows, from which their paths are taken; None to list
            no paths.

    Returns:
        One entry for each unreadable image, in the order of rows: id, reason and, if it
        is in a file of its own and ``images`` is given, uri (the absolute path or URI
        of this file).

    Raises:
        ConfigError: More than ``max_fraction`` of the rows are unreadable. The list is
            written before, if ``storage`` is given. The message names the first
            unreadable image.
        StorageError: The list cannot be written.
    """
    if not isinstance(reasons, Mapping):
        reasons = {row: why for row, why in enumerate(reasons) if why is not None}
    rows = sorted(reasons)
    bad = list[BadSample]()
    numbers = np.array(rows, np.int64)
    paths = [None] * len(rows) if images is None else images.paths(numbers)
    for row, path in zip(rows, paths, strict=True):
        entry = {"id": str(ids[row]), "reason": reasons[row]}
        bad.append(entry if path is None else entry | {"uri": path})
    if bad and storage is not None and distributed.rank_and_world()[0] == 0:
        text = "".join(json.dumps(entry) + "\n" for entry in bad)
        storage.write(BAD_SAMPLES, text.encode())
    if len(bad) > max_fraction * len(ids):
        place = f"; all are in {storage.below(BAD_SAMPLES)}" if storage else ""
        raise ConfigError(
            f"{len(bad)} of {len(ids)} images are unreadable, more than"
            f" data.max_bad_fraction {max_fraction:g} allows; the first is"
            f" {name_bad(bad[0])}: {bad[0]['reason']}{place}"
        )
    return bad


def name_bad(entry: Mapping[str, Any]) -> str:
    """Return the text by which messages name an unreadable image.

    Args:
        entry: The entry of the image in :data:`BAD_SAMPLES`. Only "id" and "uri", the
            path of the image, are used.

    Returns:
        The id of its row, '' if the entry has none, followed by its path in
        parentheses. The path is left out if it is missing or no text, or ends with the
        id or with the id without its first folder, see
        :func:`~uno.data.images.name_row`.
    """
    path = entry.get("uri")
    return name_row(str(entry.get("id", "")), path if isinstance(path, str) else None)


class BadRows:
    """The rows of a task whose images could not be read in training or evaluation.

    On each worker, callers add the rows that it could not read. After :meth:`sync`
    every worker has those of all workers. When an object is made, it reads the file
    :data:`BAD_SAMPLES` of the run directory, if there is one. So the rows that the run
    had listed before it was resumed are included.

    Args:
        ids: The ids of the N rows of the task, an Arrow array.
        images: The images of the N rows.
        max_fraction: The largest share of the N rows that may be unreadable, 0 to 1.
        storage: The run directory, in which the rows are listed.

    Raises:
        StorageError: A list of the run exists and cannot be read.
    """

    def __init__(
        self,
        ids: pa.LargeStringArray,
        images: Images,
        max_fraction: float,
        storage: Storage,
    ) -> None:
        self._ids, self._images = ids, images
        self._max_fraction, self._storage = max_fraction, storage
        self._reasons = self._read_list()
        self._num_synced = len(self._reasons)

    def add(self, row: int, reason: str) -> None:
        """Record in memory that a row cannot be read. No file is written.

        Args:
            row: The number of the row in the task.
            reason: Why the row cannot be read. If a reason of this row was recorded
                before, that one is kept.
        """
        self._reasons.setdefault(row, reason)

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that are recorded on this worker, ascending.

        Rows of other workers are among them after :meth:`sync`, and rows that the run
        had listed before it was resumed always.
        """
        return sorted(self._reasons)

    def sync(self) -> None:
        """Exchange the recorded rows among all workers, and list them in a file.

        All workers must call this at the same time. Rank 0 writes :data:`BAD_SAMPLES`
        with all rows. Nothing is written or checked if no worker has recorded a new row
        since the last call, or since the object was made. Rows of the list that was
        read then are not new.

        Raises:
            ConfigError: There is a new row, and more rows are unreadable than
                ``max_fraction`` allows. It is raised on every worker. Rank 0 writes the
                list before.
            StorageError: Rank 0 cannot write the list.
        """
        new = dict(list(self._reasons.items())[self._num_synced :])
        new_of_rank = distributed.gather_objects(new)
        for found in new_of_rank:
            self._reasons = found | self._reasons
        self._num_synced = len(self._reasons)
        if any(new_of_rank):
            check_bad(
                self._ids,
                self._reasons,
                self._max_fraction,
                self._storage,
                self._images,
            )

    def _read_list(self) -> dict[int, str]:
        """Read the rows and reasons that the run had listed before it was resumed.

        A missing list counts as empty. So does a damaged one (a line is not JSON, or
        lacks the id or the reason), and a warning is logged. Entries whose id is no row
        of the task are left out.

        Returns:
            Reasons by row number.

        Raises:
            StorageError: The file exists and cannot be read.
        """
        try:
            entries = (self._storage.find(BAD_SAMPLES) or b"").splitlines()
            reasons = {
                str(entry["id"]): str(entry["reason"])
                for entry in map(parse_json, entries)
            }
        except (ValueError, TypeError, KeyError):
            path = self._storage.below(BAD_SAMPLES)
            log.warning("%s is damaged and is rewritten", path)
            return {}
        rows = find_rows(self._ids, reasons) if reasons else {}
        return {row: reasons[name] for name, row in rows.items()}
