"""Write a data set as Parquet shards, which stream faster than many small files.

Rows are shuffled, the same way every time. Labeled and unlabeled rows never share a row
group, so that reading one kind does not read the other. Encoded images keep their
bytes, and pixels become PNG. A pack that was interrupted resumes when the command is
repeated. Readers refuse the directory until ``pack.json`` says that all shards are
there.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image as Pillow

from uno.data.columns import find_rows, present_classes
from uno.data.decode import BadImage, decode_rgb, prefetch_map, read_encoded
from uno.data.files import Storage
from uno.data.images import Image
from uno.data.output import claim_directory, delete_temporary_files
from uno.data.parquet import FOOTERS, PACKED, PACKING, json_at
from uno.data.rows import Rows
from uno.data.sampling import by_windows
from uno.data.splits import order_classes
from uno.data.unreadable import check_bad
from uno.errors import ConfigError, StorageError
from uno.limits import MAX_IMAGE_BYTES

GROUP_BYTES = 8 * 2**20  # largest size of a row group, unless one image is larger
GROUP_ROWS = 500  # largest number of rows of a row group
WINDOW_SHARDS = 4  # shards among which rows are mixed if a source has stored groups
FORMAT = 1  # version of the layout
BadRow = dict[str, str]  # the id of an unreadable row, and the reason


class Packed(NamedTuple):
    """The numbers of rows and files of a finished pack.

    Attributes:
        rows: The number of rows of the source, which is ``packed + bad``.
        packed: The number of rows that are in the shards.
        bad: The number of rows left out because their images are unreadable.
        shards: The number of shards.
    """

    rows: int
    packed: int
    bad: int
    shards: int


class ShardRows(NamedTuple):
    """The rows that a shard is to hold.

    Attributes:
        name: File name of the shard.
        sizes: The number of rows of each of its row groups, int64 (groups,).
        rows: Row numbers of the source in the order of the shard, int64 (n,).
    """

    name: str
    sizes: np.ndarray
    rows: np.ndarray


class Shard(NamedTuple):
    """A shard that was written.

    Attributes:
        name: File name of the shard.
        rows: The number of rows that it was to hold, with those that are left out.
        bad: The rows that are left out because their images are unreadable, in order:
            a dict for each row, with its id under "id" and the reason under "reason".
    """

    name: str
    rows: int
    bad: list[BadRow]


def store_shard(
    output: Storage, rows: Rows, shard: ShardRows, images: list[Image], threads: int = 1
) -> Shard:
    """Write one Parquet shard of a pack to the file ``shard.name`` in ``output``.

    A file of that name is replaced. Every image is decoded to check it, and the rows of
    unreadable images are left out of the file, which is also written if no row is left.
    Encoded images keep their bytes, and pixels become PNG.

    Args:
        output: The directory of the pack.
        rows: All rows of the source. Their images are not used.
        shard: The n rows that the shard is to hold.
        images: The n images of these rows, in the same order. Images that are given as
            a path are read here.
        threads: The number of threads that decode and encode images.

    Returns:
        The shard: its name, the number n of its rows (those left out are counted), and
        for each row that is left out a dict with the keys "id" and "reason".

    Raises:
        StorageError: The file cannot be written; or an image's file cannot be read now,
            but perhaps later, and no file is written.
    """
    with ThreadPoolExecutor(threads) as pool:
        encoded = list(pool.map(_encode, images))
    ids = rows.ids.take(shard.rows).to_pylist()
    bad = [
        {"id": i, "reason": one}
        for i, one in zip(ids, encoded, strict=True)
        if isinstance(one, str)
    ]
    output.write(
        shard.name, _format_shard(rows, shard, ids, encoded, _make_schema(rows, bad))
    )
    return Shard(shard.name, len(ids), bad)


def _format_shard(
    rows: Rows,
    shard: ShardRows,
    ids: list[str],
    encoded: list[bytes | str],
    schema: pa.Schema,
) -> bytes:
    """Return the content of a shard's Parquet file. No file is written.

    Images are stored without further compression, and other columns with zstd. Pages
    have checksums.

    Args:
        rows: All rows of the source, from which labels, splits and true classes are
            taken. If ``rows.class_names`` is not empty, it has every class of
            ``rows.labels``, and labels are stored as positions in it. Otherwise they
            are stored as text. A row without a label has null.
        shard: The n rows that the shard is to hold.
        ids: Their n ids.
        encoded: The bytes of each of the n images; or as text the reason why it is
            unreadable. Such rows are left out of their row group, and a row group
            without other rows is left out.
        schema: The columns of the file, by :func:`_make_schema`.
    """
    sink = io.BytesIO()
    options = {
        "write_page_checksum": True,
        "compression": {
            name: "none" if name == "image" else "zstd" for name in schema.names
        },
        "use_dictionary": ["label", "split"],
        "write_statistics": ["label", "split"],  # those of images would hold images
    }
    number = {name: i for i, name in enumerate(rows.class_names)}
    labels = rows.labels.take(shard.rows).to_pylist()
    if number:
        labels = [None if label is None else number[label] for label in labels]
    stored: list[Any] = [ids, encoded, labels]
    stored += [
        c.take(shard.rows).to_pylist()
        for c in (rows.split, rows.eval_labels)
        if c is not None
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


def _make_schema(rows: Rows, bad: list[BadRow]) -> pa.Schema:
    """Return the Arrow schema of a shard, with its metadata.

    The columns are id, image (bytes), label and split, and eval_label (text) if the
    source has true classes for evaluation. All but the image and the label are text.
    The metadata holds under the key ``uno`` a JSON object: "known" is the list of the
    known classes that the source declares, which may be empty, and "bad" the list of
    the rows that are left out, each with "id" and "reason". If the source declares an
    order of classes, labels are int64, positions in ``rows.class_names``, and the
    metadata holds these names under the key ``huggingface``, in the format of Hugging
    Face's datasets. Otherwise labels are text.

    Args:
        rows: All rows of the source.
        bad: The unreadable rows of this shard, which are left out.
    """
    label = pa.int64() if rows.class_names else pa.string()
    fields = [
        ("id", pa.string()),
        ("image", pa.binary()),
        ("label", label),
        ("split", pa.string()),
    ]
    if rows.eval_labels is not None:
        # true classes need not be among the classes of ``label``
        fields.append(("eval_label", pa.string()))
    metadata = {PACKED: json.dumps({"known": rows.known, "bad": bad})}
    if rows.class_names:
        names = {"names": list(rows.class_names), "_type": "ClassLabel"}
        metadata["huggingface"] = json.dumps({"info": {"features": {"label": names}}})
    return pa.schema(fields, metadata=metadata)


Store = Callable[[Storage, Rows, Iterator[ShardRows]], Iterator[Shard]]
"""Writes shards to a directory and yields them, in any order.

Its arguments are the directory of the pack, all rows of the source, and the shards to
write.
"""


def store_local(threads: int) -> Store:
    """Return a function that writes shards one after the other in this process.

    Args:
        threads: The number of threads that decode and encode images.

    Returns:
        A generator function, which is a :data:`Store`. Its arguments are the directory
        of the pack, all rows of the source, and an iterator of the :class:`ShardRows`
        to write. It yields a :class:`Shard` for each. It reads the images of a shard,
        and writes the shard, when the next result is asked for.
    """

    def store(
        output: Storage, rows: Rows, shards: Iterator[ShardRows]
    ) -> Iterator[Shard]:
        """Write shards one after the other, and yield each one after it is written.

        Args:
            output: The directory of the pack.
            rows: All rows of the source, with their images.
            shards: The shards to write, taken one at a time.

        Yields:
            The name of each shard, the number of its rows, and the rows that are left
            out because their images are unreadable, in the order of ``shards``.

        Raises:
            ConfigError: A source file that holds many images cannot be read.
            StorageError: A shard cannot be written, or an image's file cannot be read
                now, but perhaps later.
        """
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
    """Write a data set as Parquet shards, or complete a pack that was interrupted.

    Rows are shuffled, the same way at every call. Shards that an earlier call wrote are
    kept. Missing ones, and those whose footer cannot be read, are written; if there are
    any, ``pack.json`` is first written with ``finished`` false. At the end it is
    written with ``finished`` true in any case. It says what the pack is made from (the
    fingerprint and the number of rows, ``shard_bytes``, a hash of the labels and the
    names of all shards), and at the end how many rows are packed and left out.
    Temporary files of killed processes in a local directory are deleted. Unreadable
    images are left out of the shards, however many they are. If there are any, they are
    listed in ``bad_samples.jsonl`` in the directory, those of kept shards included.

    Args:
        rows: The N rows to write.
        labeled: Whether each row counts as labeled, bool (N,). Labeled and unlabeled
            rows are stored in different row groups.
        output: A directory that is missing or empty, or that an earlier call with the
            same rows, ``labeled`` and ``shard_bytes`` has begun or finished.
        shard_bytes: The size of a shard in bytes, measured by the stored sizes of the
            images in the source. A shard ends with the row group that reaches it, so it
            may be larger.
        store: Writes the shards that are missing, for example what
            :func:`store_local` returns. It is called with the directory, all rows (with
            all their classes as ``class_names``, if the source declares some) and the
            shards to write, and yields a :class:`Shard` for each.
        on_progress: Is called with the number of rows that are done (those left out
            included), and with N: once before the first shard is written, with the rows
            of kept shards, and after each shard. By default nothing is called.

    Returns:
        The number of rows N, of rows in the shards, of rows left out, and of shards,
        those of earlier calls included.

    Raises:
        ConfigError: The rows are vectors and not images, or the directory holds other
            files or a pack of other rows or options, or a source file that holds many
            images cannot be read.
        StorageError: The directory cannot be read or written, or an image's file cannot
            be read now, but perhaps later.
    """
    if rows.vectors is not None:
        raise ConfigError(
            f"{rows.source}: vectors are not packed; shards are for images"
        )
    if rows.class_names:  # labels are stored as numbers of classes
        present = order_classes(present_classes(rows.labels), rows.class_names)
        names = dict.fromkeys([*rows.class_names, *present])
        rows = replace(rows, class_names=tuple(names))
    shards = _distribute_rows(rows, labeled, shard_bytes)
    plan = {
        "format": FORMAT,
        "fingerprint": rows.fingerprint,
        "rows": len(rows),
        "shard_bytes": shard_bytes,
        "labels_sha256": _hash_labels(rows, labeled),
        "shards": list(shards),
    }
    claim_directory(output, PACKING, plan, "pack", finished=False)
    delete_temporary_files(output)
    there = [name for name in output.list() if name in shards]
    read_bad = partial(_read_bad_rows, output)
    found = zip(there, prefetch_map(read_bad, there, FOOTERS, FOOTERS), strict=True)
    bad = {name: entries for name, entries in found if entries is not None}
    done = sum(len(group) for name in bad for group in shards[name])
    on_progress(done, len(rows))
    if len(bad) < len(shards):  # readers refuse the directory until all are there
        output.write(PACKING, json.dumps({**plan, "finished": False}).encode())
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
        row: reason_of_id[name]
        for name, row in find_rows(rows.ids, reason_of_id).items()
    }
    entries = check_bad(rows.ids, reasons, 1, output, rows.images)
    counts = {"packed": len(rows) - len(entries), "bad": len(entries)}
    output.write(
        PACKING, json.dumps({**plan, **counts, "finished": True}, indent=1).encode()
    )
    return Packed(len(rows), **counts, shards=len(shards))


def _hash_labels(rows: Rows, labeled: np.ndarray) -> str:
    """Return a SHA-256 of what shards hold beside ids, images, labels and splits.

    It has 64 hex digits. It covers the order of classes and the known classes, if the
    source declares them, the true classes for evaluation, and which rows count as
    labeled. Ids, images, labels and splits are in ``rows.fingerprint``.

    Args:
        rows: The N rows to write.
        labeled: Whether each row counts as labeled, bool (N,).
    """
    truth = None if rows.eval_labels is None else rows.eval_labels.to_pylist()
    facts = json.dumps([rows.class_names, rows.known, truth])
    return hashlib.sha256(facts.encode() + np.packbits(labeled).tobytes()).hexdigest()


def _read_bad_rows(output: Storage, name: str) -> list[BadRow] | None:
    """Read which rows a stored shard leaves out because they are unreadable.

    They are in the metadata of the file's footer. The rest of the file is not checked.

    Args:
        output: The directory of the pack.
        name: File name of the shard.

    Returns:
        A dict with the keys "id" and "reason" for each such row, an empty list if there
        is none. None if the footer cannot be read or has no such list: the file is
        missing, damaged or not from a pack, or the storage does not give it.
    """
    try:
        with output.open(name) as source, pa.parquet.ParquetFile(source) as file:
            metadata = file.schema_arrow.metadata or {}
            return cast(
                list[BadRow] | None, json_at(metadata.get(PACKED.encode(), ""), "bad")
            )
    except (pa.ArrowException, StorageError):
        return None


def _distribute_rows(
    rows: Rows, labeled: np.ndarray, shard_bytes: int
) -> dict[str, list[np.ndarray]]:
    """Distribute the shuffled rows among shards and row groups.

    The result is the same at every call. Nothing is written.

    Args:
        rows: All N rows of the source.
        labeled: Whether each row counts as labeled, bool (N,).
        shard_bytes: The size in bytes of a shard, measured by the stored sizes of the
            images in the source. A shard ends with the row group that reaches it. An
            image of unknown size counts as 0 bytes.

    Returns:
        File name of each shard, such as ``train-00000-of-00004.parquet`` -> its row
        groups, each with row numbers int64 (n,). A shard holds rows of one split, and a
        row group either labeled or unlabeled rows. In each split the labeled row groups
        come first, and one shard may have both kinds. A split without rows has no
        shard.
    """
    sizes = np.maximum(rows.images.sizes(np.arange(len(rows))), 0)
    shards: dict[str, list[np.ndarray]] = {}
    for split, member in (("train", rows.is_train), ("test", ~rows.is_train)):
        files, filled = [], shard_bytes  # type: list[list[np.ndarray]], int
        for kind in (True, False):
            members = np.flatnonzero(member & (labeled == kind))
            for group in _divide_into_groups(
                _shuffle_rows(rows, members, sizes, shard_bytes), sizes
            ):
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


def _shuffle_rows(
    rows: Rows, members: np.ndarray, sizes: np.ndarray, shard_bytes: int
) -> np.ndarray:
    """Shuffle some rows, always in the same way.

    If the source stores rows in groups that are read as a whole, these groups are put
    into a random order, and rows are mixed only inside windows of about 4
    (:data:`WINDOW_SHARDS`) shards. Without windows every shard would need data of
    nearly every group. In other sources all given rows are mixed.

    Args:
        rows: All N rows of the source.
        members: Row numbers to shuffle, int64 (n,).
        sizes: The size of every image in bytes, (N,).
        shard_bytes: The size of a shard in bytes, from which the size of a window
            follows.

    Returns:
        ``members`` in their new order, int64 (n,).
    """
    groups, window = rows.images.groups(members), 1
    if groups is None:
        groups = np.zeros(len(members), np.int64)
    elif len(members):
        window = max(
            1, int(WINDOW_SHARDS * shard_bytes / max(1.0, sizes[members].mean()))
        )
    return members[by_windows(groups, window, np.random.default_rng([0, 0, 0, 0]))]


def _divide_into_groups(order: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Divide rows into consecutive row groups of a Parquet file.

    A group has as many rows as fit: at most 500 (:data:`GROUP_ROWS`), and at most 8 MiB
    (:data:`GROUP_BYTES`) by ``sizes``, but at least one row, whatever its size.

    Args:
        order: Row numbers in the order in which they are stored, int64 (n,).
        sizes: The size of every image in bytes, (N,).

    Yields:
        The row numbers of each group, int64, which together are ``order``.
    """
    start = 0
    while start < len(order):
        filled = sizes[order[start : start + GROUP_ROWS]].cumsum()
        end = start + max(1, int(np.searchsorted(filled, GROUP_BYTES, side="right")))
        yield order[start:end]
        start = end


def _encode(image: Image) -> bytes | str:
    """Return the bytes to store for an image, or as ``str`` why it is unreadable.

    The whole image is decoded to check it. A gray image of more than 8 bits is not
    refused for its range of values. Encoded images keep their bytes, and pixels become
    PNG.

    Args:
        image: Encoded bytes, the path or URI of a file, which is read, or pixels uint8
            (H, W, 3).

    Raises:
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    try:
        content = image if isinstance(image, np.ndarray) else read_encoded(image)
        # checks the image at its full size, whatever its range of values
        decode_rgb(content, MAX_IMAGE_BYTES, (0, 1))
    except BadImage as error:
        return str(error)
    if isinstance(content, np.ndarray):
        file = io.BytesIO()
        Pillow.fromarray(content).save(file, "PNG")
        return file.getvalue()
    return bytes(content)
