"""Tar shards in the layout of WebDataset: members KEY.jpg (or another image) and KEY.cls or KEY.json, one
after the other, are one row. A shard is scanned once for where its images lie; nothing is unpacked.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from uno.data import files as filesystem
from uno.data.columns import Labels, Text, chunks, decimal
from uno.data.files import FileEntry, is_uri, valid_text
from uno.data.images import Image, Images, is_image
from uno.data.rows import SPLITS, Rows
from uno.data.tables import class_name
from uno.errors import ConfigError, one_line
from uno.limits import MAX_IMAGE_BYTES, MAX_MEMBER_BYTES, MAX_ROWS
from uno.text import plural

SCANNED = 16  # shards at once
WINDOW_BYTES = {False: 2**14, True: 2**20}  # that a scan reads at once, of a local file and of an object
GAP_BYTES = {False: 2**12, True: 2**20}  # between two images that are read in one piece all the same
SPAN_BYTES = 8 * 2**20  # of a shard: what of an object is read together
MAX_SHARDS = 10**6  # that a pattern names
LABELS = ("label", "cls", "class")  # of a .json, the first that it has
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
TEXTS = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)  # followed by text for the next
WITHOUT_DATA = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
    tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE,
)  # fmt: skip
HIDDEN = re.compile(r"(^|/)(\.[^./]|__MACOSX(/|$))")  # what file managers leave behind
PACKED = re.compile(r"\.(tgz|tar\.\w+)$", re.IGNORECASE)
RECORD = re.compile(rb"(\d{1,8}) ([^=]+)=")  # of an extended header: LENGTH NAME=VALUE


@dataclass(frozen=True, eq=False)
class TarImages(Images):
    """Images inside ``shards``, last changed at ``shard_times`` int64; of each row its shard int32 (N,), and
    where it is there, int64 (N,) each.
    """

    shards: Sequence[str]
    shard_times: np.ndarray
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.shard)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """The images of ``rows`` int64 (n,), in that order; neighbors are read in one piece."""
        shard, start = self.shard[rows], self.offset[rows]
        end = start + np.minimum(self.size[rows], MAX_IMAGE_BYTES + 1)  # of one that is refused anyway
        found: list[Image] = [b""] * len(rows)
        for number in np.unique(shard).tolist():
            own = np.flatnonzero(shard == number)
            own = own[np.argsort(start[own], kind="stable")]
            images = _read_images(self.shards[number], start[own], end[own])
            for row, image in zip(own.tolist(), images, strict=True):
                found[row] = image
        return found

    def groups(self, rows: np.ndarray) -> np.ndarray | None:
        """Of objects their pieces of :data:`SPAN_BYTES`; a local image is read by itself."""
        return self._pieces[rows] if self.shards and is_uri(self.shards[0]) else None

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Those of the members."""
        return self.size[rows]

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Those of the shards."""
        return self.shard_times[self.shard[rows]]

    def content_keys(self, rows: np.ndarray) -> pa.Array:
        """Sizes, as of files."""
        return decimal(self.size[rows])

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """No image is a file of its own."""
        return [None] * len(rows)

    def reader(self) -> TarImages:
        """This: any node reads the shards."""
        return self

    @cached_property
    def _pieces(self) -> np.ndarray:
        places = np.stack([self.shard, self.offset // SPAN_BYTES])
        return np.unique(places, axis=1, return_inverse=True)[1].reshape(-1)


def read_tar(path: str, images_only: bool = False, follow_links: bool = False) -> Rows:
    """The *.tar files of a folder, one file, or those that a pattern with ``*``, ``{000..009}`` or ``{a,b}``
    names. An id is SHARD#KEY. The class is the text of KEY.cls, else ``label``, ``cls`` or ``class`` of
    KEY.json, null or empty for none; with ``images_only`` they are not read. The split is that which the name
    or folder of a shard says (train, test, val), else train. A member that is a link or sparse is an
    unreadable image. ConfigError: there is no such file, one is compressed or no tar file, a label is none.
    """
    source, shards = f"tar:{path}", _shards(path, follow_links)
    with ThreadPoolExecutor(SCANNED) as pool:
        scans = list(pool.map(lambda shard: _scan(shard, images_only), shards))
    parts = [part for scan in scans for part in scan.parts]
    if not parts:
        raise ConfigError(f"{source}: no members KEY.jpg, KEY.png, ... in its {len(shards)} tar files")
    ids, offsets, sizes, labels = zip(*parts, strict=True)
    counts = [sum(len(part[0]) for part in scan.parts) for scan in scans]
    images = TarImages(
        [shard.path for shard in shards], np.array([shard.time for shard in shards], np.int64),
        np.repeat(np.arange(len(shards), dtype=np.int32), counts),
        np.concatenate(offsets), np.concatenate(sizes),
    )  # fmt: skip
    is_train = np.repeat([_split(shard.relative) == "train" for shard in shards], counts)
    others = sum((scan.others for scan in scans), Counter[str]())
    notes = [note for scan in scans for note in scan.notes]
    if others:
        named = ", ".join(f"{num:,} .{name}" for name, num in others.most_common(8))
        notes.append(f"ignored {plural(others.total(), 'member')} of the tar files: {named}")
    classes = Labels.of(chain(*labels))
    return Rows(Text.join(ids), images, classes, is_train, source, notes=tuple(notes))


class Member(NamedTuple):
    """Of a shard: its name, the number of its first byte, its bytes, and whether these are its content."""

    name: str
    offset: int
    size: int
    is_plain: bool

    @property
    def key(self) -> str:
        """The name to the first dot of its last part."""
        folder, slash, name = self.name.rpartition("/")
        return folder + slash + name.partition(".")[0]

    @property
    def suffix(self) -> str:
        """What follows, in lower case."""
        return self.name.rpartition("/")[2].partition(".")[2].lower()


class Told(NamedTuple):
    """What extended headers say of the member that follows them."""

    name: str = ""
    size: int | None = None
    is_sparse: bool = False


class Shard:
    """A tar file whose headers are read in order. Errors are ConfigErrors that name it."""

    def __init__(self, found: FileEntry) -> None:
        self.path, self.name, self.is_cut = found.path, valid_text(found.relative), False
        with filesystem.reading(self.path):
            self._file = _open(self.path)
            self.size = self._file.size()
        self._start, self._data, self._window = 0, b"", WINDOW_BYTES[is_uri(self.path)]

    def members(self) -> Iterator[Member]:
        """Those that are not hidden, in order; the last may be cut off. Memory: that of one header."""
        at, told = 0, Told()
        while (info := self._header(at)) is not None:
            at += tarfile.BLOCKSIZE
            size = info.size
            if info.type in TEXTS:
                told = self._told(info, at)
            elif info.type not in WITHOUT_DATA:
                at += self._map_bytes(info, at)
                size = told.size if told.size is not None else size
                name, left = (told.name or info.name).removeprefix("./"), max(0, self.size - at)
                self.is_cut = self.is_cut or size > left
                if not HIDDEN.search(name):
                    yield Member(name, at, min(size, left), info.type in FILES and not told.is_sparse)
                told = Told()
            elif info.type not in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
                if info.type != tarfile.DIRTYPE:  # a link
                    yield Member((told.name or info.name).removeprefix("./"), at, 0, False)
                size, told = 0, Told()
            at += -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE

    def _header(self, at: int) -> tarfile.TarInfo | None:
        """The header at a byte; None: there is none any more."""
        block = self.read(at, tarfile.BLOCKSIZE) if at < self.size else b""
        packed = next((name for magic, name in COMPRESSED.items() if block.startswith(magic)), None)
        if packed is not None and at == 0:
            fix = "images are read at their places, so unpack it to a plain .tar"
            raise ConfigError(f"{self.path} is compressed ({packed}); {fix}")
        if len(block) < tarfile.BLOCKSIZE:
            self.is_cut = self.is_cut or len(block) > 0
            return None
        if block.count(0) == tarfile.BLOCKSIZE:
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError):
            info = None
        if info is None or info.size < 0:
            raise ConfigError(f"{self.path} is not a tar file: no header at byte {at:,}")
        return info

    def _told(self, info: tarfile.TarInfo, at: int) -> Told:
        """What a header that is followed by text says of the next member."""
        text = self.text(at, info.size, "a header")
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return Told(text.rstrip(b"\0").decode(errors="surrogateescape"))
        fields, start = dict[bytes, bytes](), 0
        while found := RECORD.match(text, start):
            end = start + int(found[1])
            if not found.end() < end <= len(text):
                raise ConfigError(f"{self.path}: a header that is not a list of names and values")
            fields[found[2]], start = text[found.end() : end - 1], end
        size = fields.get(b"size", b"")
        return Told(
            fields.get(b"path", b"").decode(errors="surrogateescape"),
            int(size) if size.isdigit() and len(size) < 19 else None,
            any(name.startswith(b"GNU.sparse.") for name in fields),
        )

    def _map_bytes(self, info: tarfile.TarInfo, at: int) -> int:
        """Bytes of the blocks that say where the holes of a sparse file are."""
        num = 0
        more = info.type == tarfile.GNUTYPE_SPARSE and self.read(at - 30, 1) not in (b"", b"\0")
        while more:
            num += tarfile.BLOCKSIZE
            more = self.read(at + num - 8, 1) not in (b"", b"\0")
        return num

    def text(self, at: int, size: int, what: str) -> bytes:
        """Some bytes, which must not be many."""
        if size > MAX_MEMBER_BYTES:
            raise ConfigError(f"{self.path}: {what} has {size:,} bytes, more than {MAX_MEMBER_BYTES:,}")
        return self.read(at, size)

    @filesystem.retry_transient
    def read(self, at: int, num: int) -> bytes:
        """``num`` bytes, fewer at the end."""
        if not self._start <= at <= at + num <= self._start + len(self._data):
            with filesystem.reading(self.path):
                self._start, self._data = at, self._file.read_at(max(num, self._window), at)
        return bytes(self._data[at - self._start : at - self._start + num])


class _Scan(NamedTuple):
    """What a shard holds: ids, offsets, sizes and classes, some rows each; what is not read; notes."""

    parts: list[tuple[Text, np.ndarray, np.ndarray, Labels]]
    others: Counter[str]
    notes: list[str]


def _scan(found: FileEntry, images_only: bool) -> _Scan:
    shard, scan, num_rows = Shard(found), _Scan([], Counter(), []), 0
    for some in chunks(_rows(shard, scan.others, images_only)):
        names, offsets, sizes, labels = zip(*some, strict=True)
        num_rows += len(some)
        if num_rows > MAX_ROWS:
            raise ConfigError(f"{shard.path} has more than {MAX_ROWS:,} images")
        places = np.array(offsets, np.int64), np.array(sizes, np.int64)
        scan.parts.append((Text.of(names), *places, Labels.of(labels)))
    if shard.is_cut:
        scan.notes.append(f"{shard.name} is truncated: it ends inside a member")
    return scan


def _rows(
    shard: Shard, others: Counter[str], images_only: bool
) -> Iterator[tuple[str, int, int, str | None]]:
    """(id, offset, size, class) of each key that has an image; ``others`` count what is not read."""
    for key, members in groupby(shard.members(), lambda member: member.key):
        image, labels = None, dict[str, Member]()
        for member in members:
            if is_image(f".{member.suffix}") and "." not in member.suffix:
                if image is not None:
                    both = " and ".join(one_line(repr(valid_text(one.name))) for one in (image, member))
                    raise ConfigError(f"{shard.path}: two images of one key, {both}")
                image = member
            elif member.suffix in ("cls", "json"):
                labels[member.suffix] = member
            else:
                others[valid_text(member.suffix)[:12] or "without a suffix"] += 1
        if image is None:
            others.update(labels.keys())
            continue
        place = (image.offset, image.size) if image.is_plain else (0, 0)
        yield f"{shard.name}#{valid_text(key)}", *place, None if images_only else _class(shard, labels)


def _class(shard: Shard, members: dict[str, Member]) -> str | None:
    """The class that KEY.cls says, else KEY.json."""
    suffix = "cls" if "cls" in members else "json"
    if suffix not in members:
        return None
    member = members[suffix]
    where = f"{shard.path}: {one_line(repr(valid_text(member.name)))}"
    if not member.is_plain:
        raise ConfigError(f"{where} is a link or sparse; write it as a file")
    text = shard.text(member.offset, member.size, where)
    try:
        value: Any = text.decode("utf-8-sig").strip()
        value = filesystem.parse_json(value) if suffix == "json" else value
    except ValueError as error:
        kind = "JSON" if suffix == "json" else "text"
        raise ConfigError(f"{where} is not {kind}: {one_line(error)}") from None
    if suffix == "json":
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be an object, not {type(value).__name__}")
        value = next((value[name] for name in LABELS if name in value), None)
    name = class_name(where, value)
    return None if name is None else valid_text(name)


@filesystem.retry_transient
def _read_images(path: str, start: np.ndarray, end: np.ndarray) -> list[bytes]:
    """The bytes from ``start`` to ``end``, int64 (n,) each, in order; neighbors in one piece."""
    far = start[1:] - end[:-1] > GAP_BYTES[is_uri(path)]
    far |= start[1:] // SPAN_BYTES != start[:-1] // SPAN_BYTES
    images = list[bytes]()
    with filesystem.reading(path), _open(path) as file:
        for piece in np.split(np.stack([start, end], axis=1), np.flatnonzero(far) + 1):
            first = int(piece[0, 0])
            data = file.read_at(int(piece[:, 1].max()) - first, first)
            images += [data[a - first : b - first] for a, b in piece.tolist()]
    return images


def _open(path: str) -> Any:
    files, inner = filesystem.locate(path)
    if not is_uri(path):
        filesystem.require_regular(inner)
    return files.open_input_file(inner)


def _split(name: str) -> str:
    """train or test, by the words of a shard's name or its folder."""
    folder, _, file = f"/{name}".rpartition("/")
    words = [*re.split(r"[-_.]", file.lower()), folder.rpartition("/")[2].lower()]
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _shards(path: str, follow_links: bool) -> list[FileEntry]:
    """The tar files that a path or pattern names, in order."""
    kind = filesystem.kind(path)
    if kind == "file":
        return [FileEntry(filesystem.split(path)[1], path, *filesystem.stat_of(path))]
    if kind == "missing":
        return _matching(path, follow_links)
    found = list(filesystem.walk(path, follow_links))
    shards = [file for file in found if file.relative.lower().endswith(".tar")]
    if not shards:
        packed = (file.relative for file in found if PACKED.search(file.relative))
        why = next((f"; {valid_text(name)} is compressed, unpack it to a plain .tar" for name in packed), "")
        raise ConfigError(f"no *.tar files below {path}{why}")
    return shards


def _matching(pattern: str, follow_links: bool) -> list[FileEntry]:
    base, mark, options = pattern.partition("?") if is_uri(pattern) else (pattern, "", "")
    root = re.split(r"[*{]", base)[0].rpartition("/")[0]
    folder = (root or ("/" if base.startswith("/") else ".")) + mark + options
    names = list(islice(_expanded(base[len(root) :].lstrip("/")), MAX_SHARDS + 1))
    if len(names) > MAX_SHARDS:
        raise ConfigError(f"{pattern} names more than {MAX_SHARDS:,} files")
    found = list[FileEntry]()
    is_walked = any("*" in name for name in names)
    below = list(filesystem.walk(folder, follow_links)) if is_walked else []
    for name in names:
        if "*" in name:
            wanted = re.compile("[^/]*".join(map(re.escape, name.split("*"))))
            found += [file for file in below if wanted.fullmatch(file.relative)]
        else:
            path = filesystem.join(folder, name)
            found.append(FileEntry(name, path, *filesystem.stat_of(path)))
    if not found:
        raise ConfigError(f"tar:{pattern}: no such file")
    return found


def _expanded(pattern: str) -> Iterator[str]:
    """The names that ``{000..009}`` and ``{a,b}`` stand for."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        yield pattern
        return
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", braces[1])
    if ends is None:
        words: Iterator[str] = iter(braces[1].split(","))
    else:
        words = (f"{number:0{len(ends[1])}}" for number in range(int(ends[1]), int(ends[2]) + 1))
    for word in words:
        yield from _expanded(before + word + after)
