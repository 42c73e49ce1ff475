"""Find the images and labels inside tar shards, and cache the result on disk.

:mod:`tarfile` reads the headers of a shard, which transfers most of a remote shard. The
result is kept in a file in the cache directory of the user. A later start reads this
file, unless the size or the modification time of the shard is another.
"""

import hashlib
import json
import logging
import os
import re
import tarfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from uno.data import files as filesystem
from uno.data.files import FileEntry, Storage, user_cache, valid_text
from uno.data.images import is_image
from uno.data.labels import is_missing
from uno.errors import ConfigError, StorageError, one_line
from uno.limits import MAX_MEMBER_BYTES, MAX_ROWS

VERSION = 3  # version of what a scan finds and how the index stores it
FOLDER = "tar-index"  # folder of the cache directory with the contents of shards
REMARKS = b"uno.remarks"  # key of the metadata with all that is no image
THREADS = 16  # the number of shards that are scanned at the same time
SETTLED_NS = 2 * 10**9  # a shard may change again in the same tick of its clock
# suffixes of members with a label, and what they hold; the first suffix counts
KINDS = {"cls": "UTF-8 text", "json": "JSON"}
LABEL_KEYS = (
    "label",
    "cls",
    "class",
)  # keys of the label in KEY.json; the first counts
HIDDEN = re.compile(r"(^|/)(\.[^./]|__MACOSX(/|$))")  # files that file managers add
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
# errors of tarfile for damaged or hostile headers
BAD_HEADERS = (
    tarfile.TarError,
    ValueError,
    ArithmeticError,
    LookupError,
    RecursionError,
)
IMAGE = pa.struct(
    {
        "key": pa.large_string(),
        "offset": pa.int64(),
        "size": pa.int64(),
        "label": pa.large_string(),
    }
)
"""An image of a shard: its key, the position of its first byte in the shard, its size
in bytes, and its label as JSON or null. The size is 0 for a member that is a link or a
sparse file, which is an unreadable image.
"""

log = logging.getLogger(__name__)


class ShardContent(NamedTuple):
    """The images and labels that were found in a shard.

    Attributes:
        images: The N images, an Arrow array of the type :data:`IMAGE`.
        lost_labels: Labels without an image of the same key: key -> name of the member,
            its suffix in lower case. A member without a label in it, and a JSON file
            that cannot be read as one, are not here. Empty if labels were not read.
        left_out: Images that are no row, because they are a field of another row (such
            as ``3.mask.png`` beside ``3.png``): the name of each, and the name of the
            image of that row.
        ignored: Suffix in lower case, at most 12 characters, or "without a suffix" ->
            the number of members that are neither an image nor a label. Members .cls
            and .json without an image of their key count here, unless ``lost_labels``
            has this key. Folders and hidden files are not counted.
        is_cut: Whether the shard ends inside a member or its header.
    """

    images: Any
    lost_labels: Mapping[str, str]
    left_out: Sequence[Sequence[str]]
    ignored: Mapping[str, int]
    is_cut: bool


class Member(NamedTuple):
    """A file, link or special entry inside a shard.

    Attributes:
        name: Its path in the shard, without a leading ``./``.
        key: The key of its row, which is the name without the suffix. For
            ``a/cam 2.1_003.PNG`` it is ``a/cam 2.1_003``.
        suffix: The text after the last dot of the file name in lower case, such as
            ``png``, or ''.
        offset: Position of its first byte in the shard, 0 if ``is_plain`` is False.
        size: Its size in bytes, or the bytes that are there if the shard is cut off. It
            is 0 if ``is_plain`` is False.
        is_plain: Whether these bytes are its content. False for links, special entries
            such as devices, and sparse files.
    """

    name: str
    key: str
    suffix: str
    offset: int
    size: int
    is_plain: bool


class _Shard:
    """A shard that is open to read its headers and labels.

    It serves :mod:`tarfile` as a file. A header announces the length of the text that
    follows it, and a hostile one announces gigabytes, so long reads are refused.

    Args:
        path: Path or URI of the shard.
        file: The shard, open for reads in any order.

    Attributes:
        path: Path or URI of the shard.
        is_cut: Whether the shard ends inside a member or its header. It is known when
            :meth:`members` has been iterated to its end, and False before.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path, self._file, self.is_cut = path, file, False
        self.seek, self.tell = file.seek, file.tell
        self._size = file.seek(0, os.SEEK_END)
        file.seek(0)

    def read(self, num: int) -> bytes:
        """Read the next ``num`` bytes, or fewer at the end of the shard.

        Raises:
            ConfigError: ``num`` is negative or more than 1 MiB (``MAX_MEMBER_BYTES``).
        """
        if not 0 <= num <= MAX_MEMBER_BYTES:
            raise ConfigError(
                f"{self.path}: a header or label has {num:,} bytes, more than"
                f" {MAX_MEMBER_BYTES:,}"
            )
        return self._file.read(num)

    def members(self) -> Iterator[Member]:
        """Yield all members of the shard in order, except folders and hidden files.

        Links, special entries and sparse files are yielded, too, with ``is_plain``
        False. Hidden files are those that file managers add: their name, or that of a
        folder above, begins with a dot or is __MACOSX. The last member may be cut off;
        ``is_cut`` is True then.

        Raises:
            ConfigError: The shard is compressed, is no tar file, or is damaged, which
                may be found after some members. A text of more than 1 MiB that a header
                announces counts as damage, too.
            OSError: The storage cannot be read.
        """
        open_tar: Any = tarfile.open  # its annotations lack `members`
        try:
            with open_tar(fileobj=self, mode="r:", errors="surrogateescape") as archive:
                for info in iter(archive.next, None):
                    archive.members.clear()  # tarfile would keep them all in memory
                    if info.size < 0:
                        raise ConfigError(
                            f"{self.path}: {shown(info.name)} has no size"
                        )
                    self.is_cut = archive.offset > self._size
                    if not (info.isdir() or HIDDEN.search(info.name)):
                        yield self._member(info)
                    if self.is_cut:
                        return
            self.seek(archive.offset)
            rest = self.read(tarfile.BLOCKSIZE)
        except ConfigError:
            raise
        except BAD_HEADERS as error:
            self.seek(0)
            raise self._refusal(self.read(4), one_line(error)) from None
        self.is_cut = any(rest) and len(rest) < tarfile.BLOCKSIZE
        if any(rest) and not self.is_cut:
            raise self._refusal(b"", f"no header at byte {archive.offset:,}")

    def _member(self, info: tarfile.TarInfo) -> Member:
        """Describe a member of the shard by its header.

        Args:
            info: The header, of any entry but a folder. A leading ``./`` of the name is
                removed.

        Returns:
            The name; the key, which is the name without the suffix; the suffix after
            the last dot in lower case, or ''; the position of the first byte in the
            shard; the size in bytes, of a member that is cut off the bytes that are
            there; and ``is_plain``. A link, a sparse file or another special entry is
            described itself, with the position 0, the size 0 and ``is_plain`` False.
            The target of a link is not looked up.
        """
        name = info.name.removeprefix("./")
        folder, slash, base = name.rpartition("/")
        stem, dot, suffix = base.rpartition(".")
        is_sparse = info.issparse() or any(
            "GNU.sparse" in key for key in info.pax_headers
        )
        is_plain = info.isreg() and not is_sparse
        return Member(
            name,
            key=folder + slash + stem if dot else name,
            suffix=suffix.lower() if dot else "",
            offset=info.offset_data if is_plain else 0,
            size=min(info.size, self._size - info.offset_data) if is_plain else 0,
            is_plain=is_plain,
        )

    def _refusal(self, start: bytes, reason: str) -> ConfigError:
        """Return the error for a file that is compressed, damaged or no tar file.

        Args:
            start: The first bytes of the file, by which compression is recognized; b""
                if it is known not to be compressed.
            reason: What is wrong with it.
        """
        kinds = [name for magic, name in COMPRESSED.items() if start.startswith(magic)]
        if kinds:
            return ConfigError(
                f"{self.path} is compressed ({kinds[0]}); images are read at their"
                " places, so unpack it to a plain .tar"
            )
        return ConfigError(
            f"{self.path} is not a tar file, or is damaged: {reason}; write it again"
        )

    def read_label(self, member: Member) -> Any:
        """Read the label in a member KEY.cls or KEY.json.

        Args:
            member: The member, with the suffix "cls" or "json".

        Returns:
            The label: the text of KEY.cls without spaces around it, which may be '', or
            the value of the first of the keys "label", "cls" and "class" that KEY.json
            has, of any JSON type. None if a JSON file has none of them. Or the
            ConfigError that says why the label cannot be read: the member is a link, a
            special entry or a sparse file, has more than 1 MiB, is not UTF-8, or is a
            KEY.json without a JSON object. This error is returned and not raised,
            because most JSON files that are no label have no image either.

        Raises:
            OSError: The storage cannot be read.
        """
        where, kind = f"{self.path}: {shown(member.name)}", KINDS[member.suffix]
        if not member.is_plain:
            return ConfigError(f"{where} is a link or sparse; write it as a file")
        try:
            self.seek(member.offset)
            text = self.read(member.size).decode("utf-8-sig").strip()
            value = filesystem.parse_json(text) if member.suffix == "json" else text
        except ConfigError as error:
            return error
        except ValueError as error:
            return ConfigError(
                f"{where} is not {kind}: {one_line(error)}; write it as {kind}"
            )
        if member.suffix == "json":
            if not isinstance(value, dict):
                name = type(value).__name__
                return ConfigError(f"{where} must be an object, not {name}")
            value = next((value[name] for name in LABEL_KEYS if name in value), None)
        return valid_text(value) if isinstance(value, str) else value


def index_shards(shards: Sequence[FileEntry], images_only: bool) -> list[ShardContent]:
    """Return what shards hold, from the cache directory or by scanning them.

    What is found by scanning is written to the cache directory. It is used again for a
    shard of the same absolute path or URI, size and modification time. The cache is
    neither read nor written for a shard of unknown size or time, or one that was
    written less than 2 s ago. If the cache cannot be read or written, a warning is
    logged, and the shard is scanned. Up to :data:`THREADS` (16) shards are read at the
    same time.

    Args:
        shards: The shards, with their sizes and modification times.
        images_only: Whether labels are not read. The cache has separate entries for
            scans with and without labels.

    Returns:
        The content of each of ``shards``, in their order: the key, place, size and
        label of each image, the labels without an image, the images that are left out,
        the number of ignored members by suffix, and whether the shard is cut off.

    Raises:
        ConfigError: A shard cannot be read or is refused, see :func:`scan_shard`.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(partial(_index_shard, images_only=images_only), shards))


def _index_shard(shard: FileEntry, images_only: bool) -> ShardContent:
    """Return what a shard holds, from the cache directory or by scanning it.

    The result of a scan is written to the cache directory. Its entry there is found by
    the absolute path or URI of the shard, its size and time, and ``images_only``. The
    cache is neither read nor written for a shard whose size or time is not known, or
    that was written less than 2 s ago: if such a shard changes again in the same tick
    of the clock, it may keep its size and time.

    Args:
        shard: The shard.
        images_only: Whether labels are not read.

    Raises:
        ConfigError: The shard cannot be read or is refused.
    """
    if shard.size < 0 or not 0 <= shard.time < time.time_ns() - SETTLED_NS:
        return scan_shard(shard, images_only)
    place = filesystem.full_path(shard.path)
    key = json.dumps([VERSION, place, shard.size, shard.time, images_only])
    path = f"{FOLDER}/{hashlib.sha256(key.encode()).hexdigest()[:32]}.parquet"
    content = _read_content(path)
    if content is None:
        content = scan_shard(shard, images_only)
        _write_content(path, content)
    return content


def _read_content(path: str) -> ShardContent | None:
    """Read the content of a shard from the cache directory.

    Args:
        path: Path of the file relative to the cache directory of the user.

    Returns:
        The content. None if there is no such file; or if it is damaged or cannot be
        read, in which case a warning is logged, once in a process for equal texts.
    """
    try:
        data = Storage(user_cache()).find(path)
        if data is None:
            return None
        table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        images = table.cast(pa.schema(IMAGE)).combine_chunks().to_struct_array()
        remarks = json.loads(table.schema.metadata[REMARKS])
        return ShardContent(images.combine_chunks(), **remarks)
    except (StorageError, pa.ArrowException, OSError, *BAD_HEADERS, TypeError) as error:
        _warn_once(f"the index of tar shards cannot be read: {one_line(error)}")
        return None


def _write_content(path: str, content: ShardContent) -> None:
    """Write the content of a shard to the cache directory.

    If the directory cannot be written, a warning is logged, once in a process, and no
    error is raised.

    Args:
        path: Path below the cache directory.
        content: The content of the shard.
    """
    remarks = content._asdict()
    table = pa.Table.from_struct_array(remarks.pop("images"))
    table = table.replace_schema_metadata({REMARKS: json.dumps(remarks)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    try:
        Storage(user_cache()).write(path, sink.getvalue().to_pybytes())
    except StorageError:
        _warn_once(
            f"the index of tar shards cannot be kept in {user_cache()}, so that the"
            " next start scans them again"
        )


@cache
def _warn_once(text: str) -> None:
    """Log a warning, unless this process has logged the same one before."""
    log.warning("%s", text)


def scan_shard(entry: FileEntry, images_only: bool) -> ShardContent:
    """Read the headers and labels of a shard, and join images and labels by key.

    The cache directory is neither read nor written. If an image has both KEY.cls and
    KEY.json, KEY.cls counts unless it is blank.

    Args:
        entry: The shard. Only its path is used.
        images_only: Whether labels are not read. All labels are then null and there are
            no lost labels, but the names of label members still tell which images are
            rows.

    Returns:
        The images that are rows, in the order of the shard; the labels without an
        image; the images that are left out; the number of ignored members by suffix;
        and whether the shard is cut off.

    Raises:
        ConfigError: The shard cannot be read, is compressed, damaged or no tar file, or
            has more than MAX_ROWS images; two label members have the same key and
            suffix, or two images the same key; the label that counts for an image
            cannot be read; or it is not clear which image a label belongs to, see
            :func:`_find_fields`.
    """
    images: dict[str, Member] = {}
    labels: dict[tuple[str, str], Any] = {}  # by key and suffix
    ignored = Counter[str]()
    with filesystem.reading(entry.path), filesystem.open_binary(entry.path) as file:
        shard = _Shard(entry.path, file)
        for member in shard.members():
            key, suffix = member.key, member.suffix
            if is_image(f".{suffix}"):
                if key in images:
                    pair = f"{shown(images[key].name)} and {shown(member.name)}"
                    raise ConfigError(
                        f"{shard.path}: two images of one key, {pair}; rename or remove"
                        " one"
                    )
                images[key] = member
                if len(images) > MAX_ROWS:
                    raise ConfigError(f"{shard.path} has more than {MAX_ROWS:,} images")
            elif suffix in KINDS:
                if (key, suffix) in labels:
                    raise ConfigError(
                        f"{shard.path}: two members are called {shown(member.name)};"
                        " remove one"
                    )
                is_wanted = not images_only and is_missing(labels.get((key, "cls")))
                labels[key, suffix] = shard.read_label(member) if is_wanted else None
            else:
                ignored[valid_text(suffix)[:12] or "without a suffix"] += 1
    label_of = dict[str, Any]()
    names = dict[str, str]()  # of the members whose label counts, by key
    for (key, suffix), label in labels.items():
        if not is_missing(label) and (suffix == "cls" or key not in label_of):
            label_of[key] = label
            # a JSON file that cannot be read as a label may be about anything
            if suffix == "cls" or not isinstance(label, ConfigError):
                names[key] = f"{key}.{suffix}"
    left_out = _find_fields(shard.path, images, {key for key, _ in labels}, names)
    for key in left_out:
        del images[key]
    found = [label_of.get(key) for key in images]
    for label in found:
        if isinstance(label, ConfigError):
            raise label
    lost = {key: name for key, name in names.items() if key not in images}
    for key, suffix in labels:
        ignored[suffix] += key not in images and key not in lost
    columns = [
        pa.array(map(valid_text, images), pa.large_string()),
        pa.array([image.offset for image in images.values()], pa.int64()),
        pa.array([image.size for image in images.values()], pa.int64()),
        pa.array(
            [None if x is None else json.dumps(x) for x in found], pa.large_string()
        ),
    ]
    return ShardContent(
        pa.StructArray.from_arrays(columns, fields=list(IMAGE)),
        lost,
        list(left_out.values()),
        +ignored,
        shard.is_cut,
    )


def _find_fields(
    path: str,
    images: Mapping[str, Member],
    labeled: Collection[str],
    names: Mapping[str, str],
) -> dict[str, tuple[str, str]]:
    """Find the images that are no row but another field of a row, such as a mask.

    Here the key of an image is its name up to the last dot. WebDataset ends a key at
    the first dot of the base name. An image is a field of another row if the two keys
    differ, no member KEY.cls or KEY.json has its own key, with or without a label in
    it, and another image has WebDataset's key as its key: ``3.mask.png`` beside
    ``3.png``. An image with such a member stays a row.

    Args:
        path: Path or URI of the shard, for the error message.
        images: The images of the shard by key, the name up to the last dot.
        labeled: The keys KEY for which there is a member KEY.cls or KEY.json, even if
            that member holds no label.
        names: The key of each label -> the name of the member that holds it. Of KEY.cls
            and KEY.json it is the one whose label is used; members without a label are
            left out. Empty if labels are not read, and nothing is refused then.

    Returns:
        The key of each such image -> two names: its own, and that of the image of the
        row to which it belongs.

    Raises:
        ConfigError: A label has no image of its own key, but WebDataset would give its
            key to an image without KEY.cls or KEY.json of its own. It is then not clear
            which image is meant.
    """
    fields = dict[str, tuple[str, str]]()
    for key, image in images.items():
        folder, slash, base = key.rpartition("/")
        sample = folder + slash + base.partition(".")[0]  # the key by WebDataset's rule
        if sample == key or key in labeled:
            continue
        if sample in images:
            fields[key] = image.name, images[sample].name
        elif sample in names:
            raise ConfigError(
                f"{path}: label {shown(names[sample])} has no image of the same name,"
                f" but {shown(image.name)} begins so; rename one of them, so that the"
                " names differ only after the last dot"
            )
    return fields


def shown(name: str) -> str:
    """Return the name of a member of a shard in quotes, as error messages show it.

    Bytes that are not UTF-8 and control characters are escaped, and runs of spaces
    become one space. The text is cut off after 300 characters, and then lacks the quote
    at its end.
    """
    return one_line(repr(valid_text(name)))
