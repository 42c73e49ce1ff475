"""Parquet shards that stream well: a million small files is slow everywhere.

Rows are shuffled, the same way every time; labeled and unlabeled rows never share a row
group, so neither is read for the other's sake. Encoded images keep their bytes, pixels
become PNG. A killed pack resumes when the command is repeated; until ``pack.json`` says
that all shards are there, readers refuse the directory.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image as Pillow

from uno.data.decode import (
    BAD_SAMPLES,
    BadImage,
    check_bad,
    decode_rgb,
    prefetch_map,
)
from uno.data.files import Storage, read_bytes
from uno.data.images import Image
from uno.data.output import begin, sweep
from uno.data.plan import by_windows
from uno.data.rows import Rows
from uno.data.tables import FOOTERS, PACKED, PACKING, json_at
from uno.errors import ConfigError, StorageError, one_line
from uno.limits import MAX_IMAGE_BYTES

GROUP_BYTES = 8 * 2**20
GROUP_ROWS = 500
WINDOW_SHARDS = 4  # of a Parquet source, mixed at once
FORMAT = 1
BadRow = dict[str, str]


class Packed(NamedTuple):
    """What came of it: ``rows`` = ``packed`` + ``bad``."""

    rows: int
    packed: int
    bad: int
    shards: int


class ShardRows(NamedTuple):
    """Which rows make a shard: numbers int64 (n,) in order; ``sizes`` are the rows
    of its row groups.
    """

    name: str
    sizes: np.ndarray
    rows: np.ndarray


class Shard(NamedTuple):
    """A stored shard: its name, its rows, and those that are not in it."""

    name: str
    rows: int
    bad: list[BadRow]


def store_shard(
    output: Storage, rows: Rows, shard: ShardRows, images: list[Image], threads: int = 1
) -> Shard:
    """Store a shard of ``rows`` with its n ``images``, which are decoded by
    ``threads``, in any process.
    """
    with ThreadPoolExecutor(threads) as pool:
        encoded = list(pool.map(_encode, images))
    ids = rows.ids.take(shard.rows)
    bad = [
        {"id": i, "reason": one}
        for i, one in zip(ids, encoded, strict=True)
        if isinstance(one, str)
    ]
    output.write(shard.name, _content(rows, shard, ids, encoded, _schema(rows, bad)))
    return Shard(shard.name, len(ids), bad)


def _content(
    rows: Rows,
    shard: ShardRows,
    ids: list[str],
    encoded: list[bytes | str],
    schema: pa.Schema,
) -> bytes:
    """The file of a shard; rows whose ``encoded`` image is a reason are not in it."""
    sink = io.BytesIO()
    options = {
        "write_page_checksum": True,
        "compression": {
            name: "none" if name == "image" else "zstd" for name in schema.names
        },
        "use_dictionary": ["label", "split"],
        "write_statistics": ["label", "split"],  # of images they would be whole images
    }
    number: dict[str | None, Any] = {name: i for i, name in enumerate(rows.class_names)}
    labels = rows.labels.take(shard.rows)
    stored: list[Any] = [
        ids,
        encoded,
        [number.get(label) for label in labels] if number else labels,
    ]
    stored += [
        c.take(shard.rows) for c in (rows.split, rows.eval_labels) if c is not None
    ]
    with pa.parquet.ParquetWriter(sink, schema, **options) as writer:
        for end, size in zip(accumulate(shard.sizes), shard.sizes, strict=True):
            kept = [
                row
                for row in range(end - size, end)
                if not isinstance(encoded[row], str)
            ]
            if kept:
                columns = [[column[row] for row in kept] for column in stored]
                writer.write_table(pa.table(columns, schema=schema))
    return sink.getvalue()


def _schema(rows: Rows, bad: list[BadRow]) -> pa.Schema:
    label = pa.int64() if rows.class_names else pa.string()
    fields = [
        ("id", pa.string()),
        ("image", pa.binary()),
        ("label", label),
        ("split", pa.string()),
    ]
    if rows.eval_labels is not None:
        # its classes need not be among those of ``label``
        fields.append(("eval_label", pa.string()))
    metadata = {PACKED: json.dumps({"known": rows.known, "bad": bad})}
    if rows.class_names:
        names = {"names": list(rows.class_names), "_type": "ClassLabel"}
        metadata["huggingface"] = json.dumps({"info": {"features": {"label": names}}})
    return pa.schema(fields, metadata=metadata)


Store = Callable[[Storage, Rows, Iterator[ShardRows]], Iterator[Shard]]
"""Stores shards, in any order."""


def store_local(threads: int) -> Store:
    """One shard after the other, decoded by ``threads`` of this process."""

    def store(
        output: Storage, rows: Rows, shards: Iterator[ShardRows]
    ) -> Iterator[Shard]:
        for shard in shards:
            yield store_shard(
                output, rows, shard, rows.images.read_images(shard.rows), threads
            )

    return store


def pack(
    rows: Rows,
    labeled: np.ndarray,
    output: Storage,
    shard_bytes: int,
    store: Store,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Packed:
    """Write ``rows``, ``labeled`` bool (N,) or not, to ``output``, which is empty or
    begun by the same call, in shards of about ``shard_bytes``. Unreadable images are
    listed, not written.
    """
    if rows.images.vectors(np.arange(0)) is not None:
        raise ConfigError(
            f"{rows.source}: vectors are not packed; shards are for images"
        )
    shards = _shards(rows, labeled, shard_bytes)
    # of the rows of every row group: other options put other rows there
    digest = hashlib.sha256()
    for group in chain.from_iterable(shards.values()):
        digest.update(len(group).to_bytes(8, "little") + group.astype("<i8").tobytes())
    plan = {
        "format": FORMAT,
        "fingerprint": rows.fingerprint,
        "rows": len(rows),
        "shards": list(shards),
    }
    plan["groups_sha256"] = digest.hexdigest()
    begin(output, PACKING, plan, "pack", finished=False)
    sweep(output)
    there = [name for name in output.list() if name in shards]
    bad = {
        name: found
        for name, found in prefetch_map(
            partial(_bad_of, output), there, FOOTERS, FOOTERS
        )
        if found is not None
    }
    done = sum(len(group) for name in bad for group in shards[name])
    on_progress(done, len(rows))
    missing = (
        ShardRows(name, np.array([*map(len, groups)]), np.concatenate(groups))
        for name, groups in shards.items()
        if name not in bad
    )
    for shard in store(output, rows, missing):
        bad[shard.name] = shard.bad
        done += shard.rows
        on_progress(done, len(rows))
    reason_of_id = {
        entry["id"]: entry["reason"] for name in shards for entry in bad[name]
    }
    reasons = {
        row: reason_of_id[name] for name, row in rows.ids.find(reason_of_id).items()
    }
    entries = check_bad(rows.ids, reasons, 1, images=rows.images)
    output.write(
        BAD_SAMPLES, "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    )
    counts = {"packed": len(rows) - len(entries), "bad": len(entries)}
    output.write(
        PACKING, json.dumps({**plan, **counts, "finished": True}, indent=1).encode()
    )
    return Packed(len(rows), **counts, shards=len(shards))


def _bad_of(output: Storage, name: str) -> tuple[str, list[BadRow] | None]:
    """The unreadable rows that a finished shard lists, None where it is not whole."""
    try:
        with output.open(name) as source, pa.parquet.ParquetFile(source) as file:
            found = json_at(
                (file.schema_arrow.metadata or {}).get(PACKED.encode(), ""), "bad"
            )
            return name, cast(list[BadRow] | None, found)
    except (pa.ArrowException, StorageError):
        return name, None


def _shards(
    rows: Rows, labeled: np.ndarray, shard_bytes: int
) -> dict[str, list[np.ndarray]]:
    """File name -> its row groups, each int64 row numbers."""
    sizes = np.maximum(rows.images.sizes(np.arange(len(rows))), 0)
    shards: dict[str, list[np.ndarray]] = {}
    for split, member in (("train", rows.is_train), ("test", ~rows.is_train)):
        files, filled = [], shard_bytes  # type: list[list[np.ndarray]], int
        for kind in (True, False):
            members = np.flatnonzero(member & (labeled == kind))
            for group in _groups(_order(rows, members, sizes, shard_bytes), sizes):
                if filled >= shard_bytes:
                    files.append([])
                    filled = 0
                files[-1].append(group)
                filled += int(sizes[group].sum())
        shards |= {
            f"{split}-{i:05d}-of-{len(files):05d}.parquet": groups
            for i, groups in enumerate(files)
        }
    return shards


def _order(
    rows: Rows, members: np.ndarray, sizes: np.ndarray, shard_bytes: int
) -> np.ndarray:
    """``members`` shuffled; what is read together by windows, or each shard would
    read all of it.
    """
    groups, window = rows.images.groups(members), 1
    if groups is None:
        groups = np.zeros(len(members), np.int64)
    elif len(members):
        window = max(
            1, int(WINDOW_SHARDS * shard_bytes / max(1.0, sizes[members].mean()))
        )
    return members[by_windows(groups, window, np.random.default_rng([0, 0, 0, 0]))]


def _groups(order: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    start = 0
    while start < len(order):
        filled = sizes[order[start : start + GROUP_ROWS]].cumsum()
        end = start + max(1, int(np.searchsorted(filled, GROUP_BYTES, side="right")))
        yield order[start:end]
        start = end


def _encode(image: Image) -> bytes | str:
    """The bytes to store; as text the reason why they cannot be decoded."""
    try:
        content = (
            image if not isinstance(image, str) else read_bytes(image, MAX_IMAGE_BYTES)
        )
        decode_rgb(content, MAX_IMAGE_BYTES)  # at full scale
    except BadImage as error:
        return str(error)
    except OSError as error:
        return one_line(error.strerror or error)
    if isinstance(content, np.ndarray):
        file = io.BytesIO()
        Pillow.fromarray(content).save(file, "PNG")
        return file.getvalue()
    return bytes(content)
