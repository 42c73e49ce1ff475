"""An index of remote tar shards: where their images lie, and their labels.

To find the images of a shard its headers are scanned, for which most of the shard is
transferred from an object store. The index keeps the result in the cache directory of
the user. A later start reads the index and scans only new shards, and shards with
another size or time of the last change.
"""

import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from uno.data.files import FileEntry, Storage, is_uri
from uno.data.mapped import user_cache
from uno.errors import StorageError, one_line

VERSION = 1  # version of what a scan finds and how it is stored
FOLDER = "tar-index"
FACTS = b"uno"  # key under which the metadata of the file describes the shards
# errors that a damaged index can lead to while it is parsed
DAMAGED = (ValueError, KeyError, TypeError)
SETTLED_NS = 2 * 10**9  # a shard may change again in the same tick of its clock

log = logging.getLogger(__name__)


class ShardScan(NamedTuple):
    """The content of a shard, as its scan found it.

    Attributes:
        name: The path of the shard below the source, as text.
        keys: The keys of its N images.
        offsets: Position of the first byte of each image in the shard, int64 (N,).
        sizes: Size of each image in bytes, int64 (N,).
        labels: The label of each image as it is in the shard, None for none.
        lost_labels: Labels without an image of the same key: key -> name of the member.
        left_out: Images that are a field of another row: key -> names of this image and
            of the image of that row.
        others: The number of members that are neither image nor label, by their suffix.
        is_cut: Whether the shard ends inside a member.
    """

    name: str
    keys: pa.LargeStringArray
    offsets: np.ndarray
    sizes: np.ndarray
    labels: list[Any]
    lost_labels: dict[str, str]
    left_out: dict[str, tuple[str, str]]
    others: Counter[str]
    is_cut: bool


Identity = tuple[str, int, int]
"""A shard's path below the source, its size in bytes and the time of its change."""


def scan_shards(
    root: str,
    shards: Sequence[FileEntry],
    scan: Callable[[FileEntry], ShardScan],
    settings: str,
    threads: int,
) -> list[ShardScan]:
    """Scan shards, or read from the index what an earlier scan has found.

    The index is a Parquet file in the user's cache directory. It serves a shard if its
    path, its size and the time of its last change are those of the scan. Other shards
    are scanned again, and the index is written anew. Local shards are always scanned.

    Args:
        root: The folder, file or pattern that names the shards.
        shards: The shards.
        scan: Scans one shard.
        settings: Text that names what the result of ``scan`` depends on besides the
            shard. Other settings have an index of their own.
        threads: The number of shards that are scanned at once.

    Returns:
        What each of ``shards`` holds, in their order.
    """
    started = time.time_ns()
    remote = [shard for shard in shards if is_uri(shard.path)]
    name = hashlib.sha256(json.dumps([VERSION, root, settings]).encode()).hexdigest()
    place = f"{FOLDER}/{name[:32]}.parquet"
    found = _read(place) if remote else {}
    missing = [shard for shard in shards if _identity(shard) not in found]
    with ThreadPoolExecutor(threads) as pool:
        scanned = dict(zip(missing, pool.map(scan, missing), strict=True))
    scans = [scanned.get(shard) or found[_identity(shard)] for shard in shards]
    settled = {
        _identity(shard): one
        for shard, one in zip(shards, scans, strict=True)
        if is_uri(shard.path)
        and shard.size >= 0
        and 0 <= shard.time < started - SETTLED_NS
    }
    if settled.keys() != found.keys():
        _write(place, settled)
    return scans


def _identity(shard: FileEntry) -> Identity:
    """Return the path, the size and the time of the last change of a shard."""
    return shard.relative, shard.size, shard.time


def _read(place: str) -> dict[Identity, ShardScan]:
    """Read an index of tar shards.

    Args:
        place: Path of the index below the cache directory.

    Returns:
        The content of each shard in the index. Empty if there is no index, or if it is
        damaged. A warning is then logged.
    """
    try:
        data = Storage(os.path.expanduser(user_cache())).find(place)
        if data is None:
            return {}
        reader = pa.BufferReader(data)
        table = pq.read_table(reader, page_checksum_verification=True)
        facts = json.loads(table.schema.metadata[FACTS])
        shard_of_row = table["shard"].to_numpy()
        ends = np.searchsorted(shard_of_row, np.arange(len(facts)), side="right")
        columns = table.unify_dictionaries().combine_chunks()
        labels = _labels(columns["label"])
        keys = columns["key"].cast(pa.large_string()).combine_chunks()
        offsets, sizes = columns["offset"].to_numpy(), columns["size"].to_numpy()
        found, start = dict[Identity, ShardScan](), 0
        for fact, end in zip(facts, ends.tolist(), strict=True):
            path, size, changed = fact["identity"]
            found[path, size, changed] = ShardScan(
                name=fact["name"],
                keys=keys[start:end],
                offsets=offsets[start:end],
                sizes=sizes[start:end],
                labels=labels[start:end],
                lost_labels=fact["lost_labels"],
                left_out={key: (a, b) for key, (a, b) in fact["left_out"].items()},
                others=Counter(fact["others"]),
                is_cut=fact["is_cut"],
            )
            start = end
        return found
    except (StorageError, pa.ArrowException, OSError, *DAMAGED) as error:
        log.warning("the index of tar shards cannot be read: %s", one_line(error))
        return {}


def _labels(column: Any) -> list[Any]:
    """Decode the labels of an index.

    Equal labels are one object, which saves memory.

    Args:
        column: A dictionary-encoded Arrow column of JSON texts.

    Returns:
        The label of each row, None for null.
    """
    texts = column.combine_chunks()
    values = [json.loads(text) for text in texts.dictionary.to_pylist()]
    values = [sys.intern(v) if isinstance(v, str) else v for v in values]
    return [None if i is None else values[i] for i in texts.indices.to_pylist()]


def _write(place: str, scans: dict[Identity, ShardScan]) -> None:
    """Write an index of tar shards.

    If the cache directory cannot be written, a warning is logged.

    Args:
        place: Path of the index below the cache directory.
        scans: The content of each shard.
    """
    facts = [
        {
            "identity": identity,
            "name": scan.name,
            "lost_labels": scan.lost_labels,
            "left_out": scan.left_out,
            "others": scan.others,
            "is_cut": scan.is_cut,
        }
        for identity, scan in scans.items()
    ]
    found = list(scans.values())
    counts = [len(scan.keys) for scan in found]
    labels = [
        None if label is None else json.dumps(label)
        for scan in found
        for label in scan.labels
    ]
    columns = {
        "shard": np.repeat(np.arange(len(found), dtype=np.int32), counts),
        "key": pa.chunked_array([scan.keys for scan in found], type=pa.large_string()),
        "offset": _joined([scan.offsets for scan in found]),
        "size": _joined([scan.sizes for scan in found]),
        "label": pa.array(labels, pa.string()).dictionary_encode(),
    }
    table = pa.table(columns).replace_schema_metadata({FACTS: json.dumps(facts)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    try:
        storage = Storage(os.path.expanduser(user_cache()))
        storage.write(place, sink.getvalue().to_pybytes())
    except (StorageError, OSError) as error:
        log.warning(
            "the index of tar shards cannot be kept, so that the next start scans them"
            " again: %s",
            one_line(error),
        )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate arrays int64 (n,). The result is empty if there are none."""
    return np.concatenate([np.zeros(0, np.int64), *arrays])
