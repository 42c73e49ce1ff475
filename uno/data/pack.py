"""Writing a data set as Parquet shards that stream well: a million small files is slow everywhere.

Rows are shuffled, the same way every time; labeled and unlabeled rows never share a row group, so neither
is read for the other's sake. Every page has a checksum. Encoded images keep their bytes, pixels become PNG.
A shard appears whole or not at all, and the same command goes on after a kill; until ``pack.json`` says that
all are there, readers refuse the directory.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image as Pillow

from uno.data.decode import BAD_SAMPLES, MAX_BYTES, BadImage, decode_rgb, quiet
from uno.data.files import Storage, read_bytes
from uno.data.plan import window_indices
from uno.data.rows import Files, Image, Rows, base
from uno.data.tables import PACKED, PACKING, ParquetImages
from uno.errors import ConfigError

GROUP_BYTES = 8 * 2**20
GROUP_ROWS = 500
WINDOW_SHARDS = 4  # of a Parquet source, mixed at once
FORMAT = 1


@dataclass(frozen=True)
class Packed:
    """What came of it: ``rows`` = ``packed`` + ``bad``."""

    rows: int
    packed: int
    bad: int
    shards: int


def pack(
    rows: Rows,
    labeled: np.ndarray,
    output: Storage,
    shard_bytes: int,
    threads: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Packed:
    """Write ``rows`` to ``output``; every image is decoded once, unreadable ones are listed, not written.

    Args:
        rows: N rows.
        labeled: bool (N,), rows that training will see as labeled.
        output: an empty place, or one that the same call has begun to fill.
        shard_bytes: of images in a shard, about.
        threads: that read and decode.
        on_progress: called with (rows done, N) after every shard.

    Raises:
        ConfigError: ``output`` holds something else.
        StorageError: it cannot be written.
    """
    shards = _shards(rows, labeled, shard_bytes)
    plan = {
        "format": FORMAT, "fingerprint": rows.fingerprint, "rows": len(rows), "shards": list(shards),
        "groups_sha256": _digest(shards),
    }  # fmt: skip
    _claim(output, plan)
    bad: list[dict[str, str]] = []
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        for name, groups in shards.items():
            found = _bad_of(output, name)
            if found is None:
                data, found = _shard(rows, groups, pool)
                output.write(name, data)
            bad += found
            done += sum(map(len, groups))
            on_progress(done, len(rows))
    output.write(BAD_SAMPLES, "".join(json.dumps(entry) + "\n" for entry in bad).encode())
    counts = {"packed": len(rows) - len(bad), "bad": len(bad)}
    output.write(PACKING, json.dumps({**plan, **counts, "finished": True}, indent=1).encode())
    return Packed(len(rows), counts["packed"], counts["bad"], len(shards))


def _claim(output: Storage, plan: dict[str, Any]) -> None:
    if output.exists(PACKING):
        try:
            found = json.loads(output.read(PACKING))
        except ValueError:
            found = {}
        if {name: found.get(name) for name in plan} != plan:
            raise ConfigError(
                f"{output.uri} holds another pack (other data or options); choose another --output"
            )
    elif output.list():
        raise ConfigError(f"{output.uri} is not empty; choose another --output")
    else:
        output.write(PACKING, json.dumps({**plan, "finished": False}, indent=1).encode())


def _bad_of(output: Storage, name: str) -> list[dict[str, str]] | None:
    """The unreadable rows that a finished shard lists, None where there is no whole shard."""
    if not output.exists(name):
        return None
    try:
        found = json.loads(_metadata(output.read(name))[PACKED])["bad"]
    except (pa.ArrowException, KeyError, ValueError, TypeError):
        return None
    return list(found)


# ------------------------------------------------------------------------------------------- what goes where
def _digest(shards: Mapping[str, list[np.ndarray]]) -> str:
    """Of the rows of every row group: other options put other rows there."""
    digest = hashlib.sha256()
    for group in chain.from_iterable(shards.values()):
        digest.update(len(group).to_bytes(8, "little") + group.astype("<i8").tobytes())
    return digest.hexdigest()


def _shards(rows: Rows, labeled: np.ndarray, shard_bytes: int) -> dict[str, list[np.ndarray]]:
    """File name -> its row groups, each int64 row numbers."""
    sizes = _sizes(rows)
    files: list[tuple[str, list[np.ndarray]]] = []
    for split in ("train", "test"):
        parts: list[list[np.ndarray]] = [[]]
        filled = 0
        for kind in (True, False):
            members = np.flatnonzero((rows.split == split) & (labeled == kind))
            for group in _groups(_order(rows, members, sizes, shard_bytes), sizes):
                parts[-1].append(group)
                filled += int(sizes[group].sum())
                if filled >= shard_bytes:
                    parts.append([])
                    filled = 0
        files += [(split, part) for part in parts if part]
    totals = {split: sum(name == split for name, _ in files) for split in ("train", "test")}
    numbers = {"train": iter(range(len(files))), "test": iter(range(len(files)))}
    return {f"{s}-{next(numbers[s]):05d}-of-{totals[s]:05d}.parquet": groups for s, groups in files}


def _order(rows: Rows, members: np.ndarray, sizes: np.ndarray, shard_bytes: int) -> np.ndarray:
    """``members`` shuffled; those of a Parquet source window by window, or every row group would be read for
    every shard.
    """
    if not len(members):
        return members
    images, index = base(rows.images, members)
    groups, window = np.zeros(len(members), np.int64), len(members)
    if isinstance(images, ParquetImages):
        groups = images.groups(index)
        window = max(1, int(WINDOW_SHARDS * shard_bytes / max(1.0, sizes[members].mean())))
    return members[window_indices(0, 0, groups, len(members), 0, window)]


def _groups(order: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    start = filled = 0
    for i, size in enumerate(sizes[order].tolist()):
        if i > start and (filled + size > GROUP_BYTES or i - start == GROUP_ROWS):
            yield order[start:i]
            start, filled = i, 0
        filled += size
    if len(order):
        yield order[start:]


def _sizes(rows: Rows) -> np.ndarray:
    """Bytes of every image, or the mean of their row group; int64 (N,)."""
    images, index = base(rows.images, np.arange(len(rows)))
    if isinstance(images, ParquetImages):
        groups = images.groups(index)
        return images.group_bytes[groups] // np.bincount(groups)[groups]
    if isinstance(images, Files):
        return np.maximum(images.sizes[index], 0)
    found = (images[i] for i in index.tolist())
    return np.array([image.nbytes if isinstance(image, np.ndarray) else len(image) for image in found])


# --------------------------------------------------------------------------------------------------- a shard
def _shard(
    rows: Rows, groups: list[np.ndarray], pool: ThreadPoolExecutor
) -> tuple[bytes, list[dict[str, str]]]:
    """The content of a file, and the rows that are not in it."""
    order = np.concatenate(groups)
    images, index = base(rows.images, order)
    found: list[Any] = (
        images.fetch(index) if isinstance(images, ParquetImages) else [images[i] for i in index]
    )
    with quiet():
        encoded = list(pool.map(_encode, found))
    bad = [
        {"id": rows.ids[row], "reason": str(one)}
        for row, one in zip(order.tolist(), encoded, strict=True)
        if isinstance(one, BadImage)
    ]
    schema = _schema(rows, bad)
    sink, start = io.BytesIO(), 0
    options = {
        "write_page_checksum": True,
        "compression": {name: "none" if name == "image" else "zstd" for name in schema.names},
        "use_dictionary": ["label", "split"],
        "write_statistics": ["label", "split"],  # of images they would be whole images
    }
    with pa.parquet.ParquetWriter(sink, schema, **options) as writer:
        for group in groups:
            content = encoded[start : start + len(group)]
            start += len(group)
            kept = [i for i, one in enumerate(content) if isinstance(one, bytes)]
            if kept:
                good = [one for one in content if isinstance(one, bytes)]
                writer.write_table(_table(rows, group[kept], good, schema))
    return sink.getvalue(), bad


def _encode(image: Image) -> bytes | BadImage:
    """The bytes to store; the reason where they cannot be decoded."""
    try:
        content = image if not isinstance(image, str) else read_bytes(image, MAX_BYTES)
        decode_rgb(content, MAX_BYTES)  # at full scale
    except BadImage as error:
        return error
    except OSError as error:
        return BadImage(" ".join(str(error.strerror or error).split()))
    if isinstance(content, np.ndarray):
        file = io.BytesIO()
        Pillow.fromarray(content).save(file, "PNG")
        return file.getvalue()
    return bytes(content)


def _schema(rows: Rows, bad: list[dict[str, str]]) -> pa.Schema:
    label = pa.int64() if rows.class_names else pa.string()
    fields = [("id", pa.string()), ("image", pa.binary()), ("label", label), ("split", pa.string())]
    if rows.eval_labels is not None:
        fields.append(("eval_label", pa.string()))  # its classes need not be among those of ``label``
    metadata = {PACKED: json.dumps({"known": rows.known, "bad": bad})}
    if rows.class_names:
        names = {"names": list(rows.class_names), "_type": "ClassLabel"}
        metadata["huggingface"] = json.dumps({"info": {"features": {"label": names}}})
    return pa.schema(fields, metadata=metadata)


def _table(rows: Rows, index: np.ndarray, images: list[bytes], schema: pa.Schema) -> pa.Table:
    labels: list[Any] = [rows.labels[i] for i in index]
    if rows.class_names:
        number = {name: i for i, name in enumerate(rows.class_names)}
        labels = [None if label is None else number[label] for label in labels]

    columns: dict[str, Any] = {
        "id": [rows.ids[i] for i in index],
        "image": images,
        "label": labels,
        "split": rows.split[index].tolist(),
    }
    if rows.eval_labels is not None:
        columns["eval_label"] = [rows.eval_labels[i] for i in index]
    return pa.table(columns, schema=schema)


def _metadata(data: bytes) -> dict[str, str]:
    metadata = pa.parquet.read_schema(io.BytesIO(data)).metadata
    return {key.decode(): value.decode() for key, value in metadata.items()}
