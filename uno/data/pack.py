"""Parquet shards that stream well: a million small files is slow everywhere.

Rows are shuffled, the same way every time; labeled and unlabeled rows never share a row group, so neither
is read for the other's sake. Encoded images keep their bytes, pixels become PNG. A killed pack goes on when
the command is repeated; until ``pack.json`` says that all shards are there, readers refuse the directory.
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

from uno.data.decode import BAD_SAMPLES, BadImage, ahead, decode_rgb, quiet
from uno.data.files import Storage, read_bytes
from uno.data.plan import by_windows
from uno.data.rows import Chosen, Files, Image, Images, Rows, base, fetch
from uno.data.tables import FOOTERS, PACKED, PACKING, ParquetImages, json_at
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
    """The n rows of a shard, in order; ``sizes`` are the rows of its row groups."""

    name: str
    sizes: list[int]
    ids: list[str]
    images: Images
    labels: list[str | None]
    split: list[str]
    eval_labels: list[str | None] | None


class Shard(NamedTuple):
    """A stored shard: its name, its rows, and those that are not in it."""

    name: str
    rows: int
    bad: list[BadRow]


class ShardWriter(NamedTuple):
    """What makes files of shards, in any process: the order of classes, and those that are known."""

    class_names: tuple[str, ...]
    known: tuple[str, ...]

    def write(self, output: Storage, shard: ShardRows, threads: int) -> Shard:
        """Store it. Images are decoded by ``threads``."""
        with ThreadPoolExecutor(threads) as pool:
            data, bad = self._shard(shard, pool)
        output.write(shard.name, data)
        return Shard(shard.name, len(shard.ids), bad)

    def _shard(self, shard: ShardRows, pool: ThreadPoolExecutor) -> tuple[bytes, list[BadRow]]:
        """The content of a file, and the rows that are not in it."""
        with quiet():
            images = fetch(*base(shard.images, np.arange(len(shard.ids))))
            encoded = list(pool.map(_encode, images))
        bad = [
            {"id": i, "reason": one}
            for i, one in zip(shard.ids, encoded, strict=True)
            if isinstance(one, str)
        ]
        schema, sink = self._schema(bad, shard.eval_labels is not None), io.BytesIO()
        options = {
            "write_page_checksum": True,
            "compression": {name: "none" if name == "image" else "zstd" for name in schema.names},
            "use_dictionary": ["label", "split"],
            "write_statistics": ["label", "split"],  # of images they would be whole images
        }
        number: dict[str | None, Any] = {name: i for i, name in enumerate(self.class_names)}
        labels = [number.get(label) for label in shard.labels] if number else shard.labels
        stored: list[Any] = [shard.ids, encoded, labels, shard.split, shard.eval_labels]
        with pa.parquet.ParquetWriter(sink, schema, **options) as writer:
            for end, size in zip(accumulate(shard.sizes), shard.sizes, strict=True):
                kept = [row for row in range(end - size, end) if not isinstance(encoded[row], str)]
                columns = [[column[row] for row in kept] for column in stored if column is not None]
                if kept:
                    writer.write_table(pa.table(columns, schema=schema))
        return sink.getvalue(), bad

    def _schema(self, bad: list[BadRow], truth: bool) -> pa.Schema:
        label = pa.int64() if self.class_names else pa.string()
        fields = [("id", pa.string()), ("image", pa.binary()), ("label", label), ("split", pa.string())]
        if truth:
            fields.append(("eval_label", pa.string()))  # its classes need not be among those of ``label``
        metadata = {PACKED: json.dumps({"known": self.known, "bad": bad})}
        if self.class_names:
            names = {"names": list(self.class_names), "_type": "ClassLabel"}
            metadata["huggingface"] = json.dumps({"info": {"features": {"label": names}}})
        return pa.schema(fields, metadata=metadata)


Store = Callable[[Storage, ShardWriter, Iterator[ShardRows]], Iterator[Shard]]
"""Stores shards, in any order."""


def store_here(threads: int) -> Store:
    """One shard after the other, decoded by ``threads`` of this process."""
    return lambda output, writer, shards: (writer.write(output, shard, threads) for shard in shards)


def pack(
    rows: Rows, labeled: np.ndarray, output: Storage, shard_bytes: int, store: Store,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Packed:  # fmt: skip
    """Write ``rows``, ``labeled`` bool (N,) or not, to ``output``, which is empty or begun by the same call,
    in shards of about ``shard_bytes``. Unreadable images are listed, not written.
    """
    shards = _shards(rows, labeled, shard_bytes)
    digest = hashlib.sha256()  # of the rows of every row group: other options put other rows there
    for group in chain.from_iterable(shards.values()):
        digest.update(len(group).to_bytes(8, "little") + group.astype("<i8").tobytes())
    plan = {"format": FORMAT, "fingerprint": rows.fingerprint, "rows": len(rows), "shards": list(shards)}
    plan["groups_sha256"] = digest.hexdigest()
    _claim(output, plan)
    for name in output.unfinished():
        output.delete(name)
    there = [name for name in output.list() if name in shards]
    bad = {
        name: found
        for name, found in ahead(partial(_bad_of, output), there, FOOTERS, FOOTERS)
        if found is not None
    }
    done = sum(len(group) for name in bad for group in shards[name])
    on_progress(done, len(rows))
    missing = (_rows_of(rows, name, groups) for name, groups in shards.items() if name not in bad)
    for shard in store(output, ShardWriter(rows.class_names, rows.known), missing):
        bad[shard.name] = shard.bad
        done += shard.rows
        on_progress(done, len(rows))
    entries = [entry for name in shards for entry in bad[name]]
    output.write(BAD_SAMPLES, "".join(json.dumps(entry) + "\n" for entry in entries).encode())
    counts = {"packed": len(rows) - len(entries), "bad": len(entries)}
    output.write(PACKING, json.dumps({**plan, **counts, "finished": True}, indent=1).encode())
    return Packed(len(rows), **counts, shards=len(shards))


def _rows_of(rows: Rows, name: str, groups: list[np.ndarray]) -> ShardRows:
    order = np.concatenate(groups)
    given = (rows.ids, rows.labels, rows.split, rows.eval_labels)
    ids, labels, split, truth = (None if c is None else [c[row] for row in order.tolist()] for c in given)
    images = Chosen(rows.images, order)
    return ShardRows(name, [len(g) for g in groups], ids, images, labels, split, truth)  # type: ignore[arg-type]


def _claim(output: Storage, plan: dict[str, Any]) -> None:
    if output.exists(PACKING):
        found = json_at(output.read(PACKING)) or {}
        if {name: found.get(name) for name in plan} != plan:
            fix = "choose another --output"
            raise ConfigError(f"{output.uri} holds another pack (other data or options); {fix}")
    elif any(not name.startswith(f".{PACKING}.") for name in output.list()):
        raise ConfigError(f"{output.uri} is not empty; choose another --output")
    else:
        output.write(PACKING, json.dumps({**plan, "finished": False}, indent=1).encode())


def _bad_of(output: Storage, name: str) -> tuple[str, list[BadRow] | None]:
    """The unreadable rows that a finished shard lists, None where it is not whole."""
    try:
        with output.open(name) as source, pa.parquet.ParquetFile(source) as file:
            found = json_at((file.schema_arrow.metadata or {}).get(PACKED.encode(), ""), "bad")
            return name, cast(list[BadRow] | None, found)
    except (pa.ArrowException, StorageError):
        return name, None


def _shards(rows: Rows, labeled: np.ndarray, shard_bytes: int) -> dict[str, list[np.ndarray]]:
    """File name -> its row groups, each int64 row numbers."""
    sizes, shards = _sizes(rows), {}  # type: np.ndarray, dict[str, list[np.ndarray]]
    for split in ("train", "test"):
        files, filled = [], shard_bytes  # type: list[list[np.ndarray]], int
        for kind in (True, False):
            members = np.flatnonzero((rows.split == split) & (labeled == kind))
            for group in _groups(_order(rows, members, sizes, shard_bytes), sizes):
                if filled >= shard_bytes:
                    files.append([])
                    filled = 0
                files[-1].append(group)
                filled += int(sizes[group].sum())
        shards |= {f"{split}-{i:05d}-of-{len(files):05d}.parquet": groups for i, groups in enumerate(files)}
    return shards


def _sizes(rows: Rows) -> np.ndarray:
    """Bytes of every image, or the mean of their row group; int64 (N,)."""
    images, index = base(rows.images, np.arange(len(rows)))
    if isinstance(images, ParquetImages):
        groups = images.groups(index)
        return images.group_bytes[groups] // np.bincount(groups)[groups]
    if isinstance(images, Files):
        return np.maximum(images.sizes[index], 0)
    found = (images[i] for i in index.tolist())
    return np.array([getattr(image, "nbytes", len(image)) for image in found])


def _order(rows: Rows, members: np.ndarray, sizes: np.ndarray, shard_bytes: int) -> np.ndarray:
    """``members`` shuffled; those of a Parquet source by windows, or each shard would read all row groups."""
    images, index = base(rows.images, members)
    groups, window = np.zeros(len(members), np.int64), 1
    if len(members) and isinstance(images, ParquetImages):
        groups = images.groups(index)
        window = max(1, int(WINDOW_SHARDS * shard_bytes / max(1.0, sizes[members].mean())))
    return members[by_windows(groups, window, np.random.default_rng([0, 0, 0, 0]))]


def _groups(order: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    start = filled = 0
    for i, size in enumerate(sizes[order].tolist()):
        if i > start and (filled + size > GROUP_BYTES or i - start == GROUP_ROWS):
            yield order[start:i]
            start, filled = i, 0
        filled += size
    if len(order):
        yield order[start:]


def _encode(image: Image) -> bytes | str:
    """The bytes to store; as text the reason why they cannot be decoded."""
    try:
        content = image if not isinstance(image, str) else read_bytes(image, MAX_IMAGE_BYTES)
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
