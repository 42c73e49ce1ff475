"""Whether images are what they were where a fingerprint has their sizes alone: when
each changed, and hashes of a sample's content, kept beside what was made of them.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from uno.data.files import Storage, is_uri, read_bytes
from uno.data.images import Image, Images, content_of, evenly_spaced
from uno.data.output import seal, unseal
from uno.data.rows import Rows
from uno.limits import MAX_IMAGE_BYTES

FILE = "images.safetensors"
LOCAL_ROWS, REMOTE_ROWS, GROUPS = 2_000, 64, 8  # that are hashed; groups are read whole
SAMPLE_BYTES = 64 * 2**20
READERS = 16
# changed rows of equal content, after which the others are believed to be so
ENOUGH = 32
UNREADABLE = 0  # in the place of a hash


class Snapshot(NamedTuple):
    """Of N rows ``times`` int64 (N,), and ``hashes`` int64 (n,) of ``sample`` int64
    (n,), evenly spaced.
    """

    times: np.ndarray
    sample: np.ndarray
    hashes: np.ndarray


class Difference(NamedTuple):
    """``suspects`` int64 (s,): rows that something was written to since, or of which
    that is not known. Of these ``looked`` int64 (l,) were compared, and ``different``
    int64 (d,) have other content.
    """

    suspects: np.ndarray
    looked: np.ndarray
    different: np.ndarray

    @property
    def believed(self) -> bool:
        """Whether rows that were not compared, too, are as those that were."""
        return not len(self.different) and len(self.looked) >= min(
            len(self.suspects), ENOUGH
        )


def compare(rows: Rows, then: Snapshot) -> Difference:
    """``rows``, whose fingerprint is that of those of a snapshot; nothing is read
    where no time differs.
    """
    now = rows.images.times(np.arange(len(rows)))
    suspects = np.flatnonzero((now != then.times) | (now < 0))
    at = np.flatnonzero(np.isin(then.sample, suspects) & (then.hashes != UNREADABLE))
    looked = then.sample[at]
    found = _hashes(rows.images, looked)
    return Difference(
        suspects, looked, looked[(found != then.hashes[at]) & (found != UNREADABLE)]
    )


def write(storage: Storage, name: str, rows: Rows) -> None:
    """Take and keep the snapshot of ``rows`` as the file ``name``."""
    times = rows.images.times(np.arange(len(rows)))
    sample = _sample(rows.images) if times.any() else np.arange(0)
    arrays = Snapshot(times, sample, _hashes(rows.images, sample))._asdict()
    storage.write(
        name,
        seal(name, {key: torch.from_numpy(array) for key, array in arrays.items()}, {}),
    )


def read(storage: Storage, name: str, rows: Rows) -> Snapshot | None:
    """The snapshot in a file; None: there is none of as many rows, or it is damaged."""
    with suppress(ValueError, KeyError):
        data = storage.find(name)
        tensors = {} if data is None else unseal(name, data)[0]
        found = Snapshot(*(tensors[key].numpy() for key in Snapshot._fields))
        return found if len(found.times) == len(rows) else None
    return None


def _sample(images: Images) -> np.ndarray:
    """int64 (n,): rows that take a second to read."""
    rows = evenly_spaced(LOCAL_ROWS, len(images))
    groups = images.groups(rows)
    if groups is not None:
        distinct = np.unique(groups)
        return rows[np.isin(groups, distinct[evenly_spaced(GROUPS, len(distinct))])]
    if is_uri(str(images[0])):
        rows = evenly_spaced(REMOTE_ROWS, len(images))
    share = SAMPLE_BYTES / max(1, np.maximum(images.sizes(rows), 0).sum())
    return rows[evenly_spaced(max(1, int(share * len(rows))), len(rows))]


def _hashes(images: Images, rows: np.ndarray) -> np.ndarray:
    """int64 (n,) of the content of ``rows`` (n,)."""
    with ThreadPoolExecutor(READERS) as pool:
        return np.fromiter(
            pool.map(_hash, images.read_images(rows)), np.int64, len(rows)
        )


def _hash(image: Image) -> int:
    try:
        content = (
            read_bytes(image, MAX_IMAGE_BYTES)
            if isinstance(image, str)
            else content_of(image)
        )
    except OSError:
        return UNREADABLE
    return int.from_bytes(
        hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True
    )
