"""Read tar shards in the layout of WebDataset.

The members KEY.jpg (or another image) and KEY.cls or KEY.json of one shard are one row,
in whatever order they are. A shard is scanned once for where its images lie; nothing is
unpacked. What is found in remote shards is kept (:mod:`uno.data.tar_index`).
"""

from __future__ import annotations

import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from uno.data import files as filesystem
from uno.data.columns import Labels, Text, decimal, joined
from uno.data.files import FileEntry, is_uri, valid_text
from uno.data.images import Image, Images, is_image
from uno.data.labels import encode_labels, is_missing
from uno.data.rows import SPLITS, Rows
from uno.data.tar_index import ShardScan, scan_shards
from uno.errors import ConfigError, one_line
from uno.limits import MAX_IMAGE_BYTES, MAX_MEMBER_BYTES, MAX_ROWS
from uno.text import plural

SCANNED = 16  # shards at once
# that a scan reads at once, of a local file and of an object
WINDOW_BYTES = {False: 2**14, True: 2**20}
# between two images that are read in one piece all the same
GAP_BYTES = {False: 2**12, True: 2**20}
SPAN_BYTES = 8 * 2**20  # of a shard: what of an object is read together
MAX_SHARDS = 10**6  # that a pattern names
LABELS = ("label", "cls", "class")  # of a .json, the first that it has
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
# followed by text for the next
TEXTS = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
WITHOUT_DATA = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.DIRTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XGLTYPE,
)
HIDDEN = re.compile(r"(^|/)(\.[^./]|__MACOSX(/|$))")  # what file managers leave behind
PACKED = re.compile(r"\.(tgz|tar\.\w+)$", re.IGNORECASE)
RECORD = re.compile(rb"(\d{1,8}) ([^=]+)=")  # of an extended header: LENGTH NAME=VALUE


@dataclass(frozen=True, eq=False)
class TarImages(Images):
    """Images inside ``shards``, last changed at ``shard_times`` int64; of each row its
    shard int32 (N,), and where it is there, int64 (N,) each.
    """

    shards: Sequence[str]
    shard_times: np.ndarray
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.shard)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """The images of ``rows`` int64 (n,), in that order; neighbors are read in
        one piece.
        """
        shard, start = self.shard[rows], self.offset[rows]
        # of one that is refused anyway
        end = start + np.minimum(self.size[rows], MAX_IMAGE_BYTES + 1)
        found: list[Image] = [b""] * len(rows)
        for number in np.unique(shard).tolist():
            own = np.flatnonzero(shard == number)
            own = own[np.argsort(start[own], kind="stable")]
            images = _read_images(self.shards[number], start[own], end[own])
            for row, image in zip(own.tolist(), images, strict=True):
                found[row] = image
        return found

    def groups(self, rows: np.ndarray) -> np.ndarray | None:
        """Of objects their pieces of :data:`SPAN_BYTES`; a local image is read by
        itself.
        """
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

    @property
    def is_remote(self) -> bool:
        """Whether the shards are objects."""
        return any(map(is_uri, self.shards))

    def reader(self) -> TarImages:
        """This: any node reads the shards."""
        return self

    @cached_property
    def _pieces(self) -> np.ndarray:
        places = np.stack([self.shard, self.offset // SPAN_BYTES])
        return np.unique(places, axis=1, return_inverse=True)[1].reshape(-1)


def read_tar(path: str, images_only: bool = False, follow_links: bool = False) -> Rows:
    """Read the *.tar files of a folder, one file, or those that a pattern names.

    The members of one shard that have one key are a row, and its id is SHARD#KEY. The
    key is the name without the suffix of an image or label: ``cam 2.1_003`` of
    ``cam 2.1_003.png``. The class is the text of KEY.cls, else ``label``, ``cls`` or
    ``class`` of KEY.json, by the rule of :func:`~uno.data.labels.encode_labels`. The
    split is what the name or folder of a shard says (train, test, val), else train. A
    member that is a link or sparse is an unreadable image.

    WebDataset itself ends a key at the first dot. So ``3.mask.png`` is another field of
    the row ``3`` and no row of its own where ``3.png`` is there and no label belongs to
    ``3.mask.png``: a warning counts such images, and labels that have no image.

    Args:
        path: A folder, a file, or a pattern with ``*``, ``{000..009}`` or ``{a,b}``.
        images_only: Whether labels are not read, because the rows are to be predicted.
        follow_links: Whether shards may be links out of the folder.

    Raises:
        ConfigError: There is no such file, one is compressed or no tar file, a label is
            none, or it cannot be told which image it belongs to.
    """
    source, shards = f"tar:{path}", _shards(path, follow_links)
    scans = scan_shards(
        filesystem.full_path(path),
        shards,
        lambda shard: _scan(shard, images_only),
        settings="images" if images_only else "images and labels",
        threads=SCANNED,
    )
    warnings, notes = _warnings(scans), _notes(scans)
    counts = [len(scan.keys) for scan in scans]
    if not sum(counts):
        lacks = (
            f"{source}: no members KEY.jpg, KEY.png, ... in its {len(shards)} tar files"
        )
        raise ConfigError("; ".join([lacks, *warnings, *notes]))
    ids = Text.join(
        [
            Text(joined("#", scan.name, scan.keys.array))
            for scan in scans
            if len(scan.keys)
        ]
    )
    images = TarImages(
        [shard.path for shard in shards],
        np.array([shard.time for shard in shards], np.int64),
        np.repeat(np.arange(len(shards), dtype=np.int32), counts),
        np.concatenate([scan.offsets for scan in scans]),
        np.concatenate([scan.sizes for scan in scans]),
    )
    is_train = np.repeat(
        [_split(shard.relative) == "train" for shard in shards], counts
    )
    values = chain.from_iterable(scan.labels for scan in scans)
    labels = encode_labels(source, values, name_row=ids.__getitem__)
    _refuse_labels_in_other_shards(source, scans, ids, labels)
    in_folders = any("/" in scan.keys[0] for scan in scans if len(scan.keys))
    if not images_only and not labels.present and in_folders:
        notes.append(
            "the label of KEY.jpg is a member KEY.cls or KEY.json of the same shard; if"
            " folders in the tar files are the classes, unpack them and pass --labeled"
            " DIR --unlabeled DIR"
        )
    return Rows(
        ids,
        images,
        labels,
        is_train,
        source,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


class Member(NamedTuple):
    """A member of a shard.

    ``offset`` is the number of its first byte, ``size`` its bytes, and ``is_plain``
    says whether these bytes are its content.
    """

    name: str
    offset: int
    size: int
    is_plain: bool

    @property
    def suffix(self) -> str:
        """What follows the last dot of the base name, in lower case; '' without a
        dot.
        """
        return self._base.rpartition(".")[2].lower() if "." in self._base else ""

    @property
    def key(self) -> str:
        """The name without its suffix."""
        return self.name.rpartition(".")[0] if "." in self._base else self.name

    @property
    def _base(self) -> str:
        return self.name.rpartition("/")[2]


class Told(NamedTuple):
    """What extended headers say of the member that follows them."""

    name: str = ""
    size: int | None = None
    is_sparse: bool = False


class Shard:
    """A tar file whose headers are read in order. Errors are ConfigErrors that name
    it.
    """

    def __init__(self, found: FileEntry) -> None:
        self.path, self.name, self.is_cut = (
            found.path,
            valid_text(found.relative),
            False,
        )
        with filesystem.reading(self.path):
            self._file = filesystem.open_file(self.path)
            self.size = self._file.size()
        self._start, self._data, self._window = 0, b"", WINDOW_BYTES[is_uri(self.path)]

    def members(self) -> Iterator[Member]:
        """Those that are not hidden, in order; the last may be cut off. Memory: that
        of one header.
        """
        at, told = 0, Told()
        while (info := self._header(at)) is not None:
            at += tarfile.BLOCKSIZE
            size = info.size
            if info.type in TEXTS:
                told = self._told(info, at)
            elif info.type not in WITHOUT_DATA:
                at += self._map_bytes(info, at)
                size = told.size if told.size is not None else size
                name, left = (
                    (told.name or info.name).removeprefix("./"),
                    max(0, self.size - at),
                )
                self.is_cut = self.is_cut or size > left
                if not HIDDEN.search(name):
                    yield Member(
                        name,
                        at,
                        min(size, left),
                        info.type in FILES and not told.is_sparse,
                    )
                told = Told()
            elif info.type not in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
                if info.type != tarfile.DIRTYPE:  # a link
                    yield Member(
                        (told.name or info.name).removeprefix("./"), at, 0, False
                    )
                size, told = 0, Told()
            at += -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE

    def _header(self, at: int) -> tarfile.TarInfo | None:
        """The header at a byte; None: there is none any more."""
        block = self.read(at, tarfile.BLOCKSIZE) if at < self.size else b""
        packed = next(
            (name for magic, name in COMPRESSED.items() if block.startswith(magic)),
            None,
        )
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
            raise ConfigError(
                f"{self.path} is not a tar file: no header at byte {at:,}"
            )
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
                raise ConfigError(
                    f"{self.path}: a header that is not a list of names and values"
                )
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
        more = info.type == tarfile.GNUTYPE_SPARSE and self.read(at - 30, 1) not in (
            b"",
            b"\0",
        )
        while more:
            num += tarfile.BLOCKSIZE
            more = self.read(at + num - 8, 1) not in (b"", b"\0")
        return num

    def text(self, at: int, size: int, what: str) -> bytes:
        """Some bytes, which must not be many."""
        if size > MAX_MEMBER_BYTES:
            raise ConfigError(
                f"{self.path}: {what} has {size:,} bytes, more than"
                f" {MAX_MEMBER_BYTES:,}"
            )
        return self.read(at, size)

    @filesystem.retry_transient
    def read(self, at: int, num: int) -> bytes:
        """``num`` bytes, fewer at the end."""
        if not self._start <= at <= at + num <= self._start + len(self._data):
            with filesystem.reading(self.path):
                self._start, self._data = (
                    at,
                    self._file.read_at(max(num, self._window), at),
                )
        return bytes(self._data[at - self._start : at - self._start + num])


LabelMembers = dict[str, dict[str, Any]]
"""Suffix ("cls" first, "json") -> key -> label, None for none, a ConfigError: why
not.
"""


def _scan(found: FileEntry, images_only: bool) -> ShardScan:
    """Read the headers and labels of a shard, and join images and labels by key."""
    shard, others = Shard(found), Counter[str]()
    images: dict[str, Member] = {}
    labels: LabelMembers = {"cls": {}, "json": {}}
    for member in shard.members():
        key, suffix = member.key, member.suffix
        if is_image(f".{suffix}"):
            if key in images:
                both = f"{_shown(images[key].name)} and {_shown(member.name)}"
                raise ConfigError(
                    f"{shard.path}: two images of one key, {both}; rename or remove one"
                )
            images[key] = member
            if len(images) > MAX_ROWS:
                raise ConfigError(f"{shard.path} has more than {MAX_ROWS:,} images")
        elif suffix in labels:
            if key in labels[suffix]:
                raise ConfigError(
                    f"{shard.path}: two members are called {_shown(member.name)};"
                    " remove one"
                )
            is_wanted = not images_only and is_missing(labels["cls"].get(key))
            labels[suffix][key] = _read_label(shard, member) if is_wanted else None
        else:
            others[valid_text(suffix)[:12] or "without a suffix"] += 1
    left_out = _fields_of_others(shard, images, labels, images_only)
    for key in left_out:
        del images[key]
    values = [_label_of(labels, key).value for key in images]
    if (
        error := next((v for v in values if isinstance(v, ConfigError)), None)
    ) is not None:
        raise error
    without_image = {
        key: _label_of(labels, key)
        for key in chain.from_iterable(labels.values())
        if key not in images
    }
    lost = {key: label for key, label in without_image.items() if label.is_given}
    others.update(
        label.suffix for key, label in without_image.items() if key not in lost
    )
    offsets = (image.offset * image.is_plain for image in images.values())
    sizes = (image.size * image.is_plain for image in images.values())
    return ShardScan(
        name=shard.name,
        keys=Text.of(map(valid_text, images)),
        offsets=np.fromiter(offsets, np.int64),
        sizes=np.fromiter(sizes, np.int64),
        labels=values,
        lost_labels={key: f"{key}.{label.suffix}" for key, label in lost.items()},
        left_out=left_out,
        others=others,
        is_cut=shard.is_cut,
    )


class _Label(NamedTuple):
    """The label that counts of a key: its suffix, and its value or why it has none."""

    suffix: str
    value: Any

    @property
    def is_given(self) -> bool:
        """Whether somebody wrote a label: JSON that is none may be about anything."""
        is_other_json = self.suffix == "json" and isinstance(self.value, ConfigError)
        return not is_missing(self.value) and not is_other_json


def _label_of(labels: LabelMembers, key: str) -> _Label:
    """Return the label of a key: KEY.cls before KEY.json, suffix '' if it has
    neither.
    """
    present = [
        _Label(suffix, labels[suffix][key])
        for suffix in labels
        if key in labels[suffix]
    ]
    given = (label for label in present if not is_missing(label.value))
    return next(given, present[0] if present else _Label("", None))


def _fields_of_others(
    shard: Shard,
    images: dict[str, Member],
    labels: LabelMembers,
    images_only: bool,
) -> dict[str, tuple[str, str]]:
    """Return the keys of images that are a field of another row: the image, and the
    row's.

    Raises:
        ConfigError: Only such images are there for a label: any could be meant.
    """
    fields = dict[str, tuple[str, str]]()
    for key, image in images.items():
        folder, slash, base = key.rpartition("/")
        first, dot, _ = base.partition(".")
        sample = folder + slash + first  # the key by WebDataset's rule
        if not dot or _label_of(labels, key).suffix:
            continue
        if sample in images:
            fields[key] = image.name, images[sample].name
        elif not images_only:
            label = _label_of(labels, sample)
            if label.is_given:
                raise ConfigError(
                    f"{shard.path}: label {_shown(f'{sample}.{label.suffix}')} has no"
                    f" image of the same name, but {_shown(image.name)} begins so;"
                    " rename one of them, so that the names differ only after the"
                    " last dot"
                )
    return fields


def _warnings(scans: Sequence[ShardScan]) -> list[str]:
    """Return a line about labels without an image and one about images that are
    fields.
    """
    lines = []
    lost = [(scan, name) for scan in scans for name in scan.lost_labels.values()]
    if lost:
        scan, name = lost[0]
        lines.append(
            f"{plural(len(lost), 'label')} without an image, e.g. {_shown(name)} in"
            f" {scan.name}: a label KEY.cls or KEY.json belongs to KEY.jpg (or another"
            " image) in the same shard; rename or add the image, or remove the label"
        )
    fields = [(scan, *pair) for scan in scans for pair in scan.left_out.values()]
    if fields:
        scan, name, row_image = fields[0]
        lines.append(
            f"{plural(len(fields), 'image')} left out, e.g. {_shown(name)} in"
            f" {scan.name}: WebDataset's key ends at the first dot, so it is another"
            f" field of the row of {_shown(row_image)}; if it is an image of its own,"
            " replace the dots in its name"
        )
    return lines


def _notes(scans: Sequence[ShardScan]) -> list[str]:
    """Return a line for each shard that is cut off, and one about members not read."""
    lines = [
        f"{scan.name} is truncated: it ends inside a member"
        for scan in scans
        if scan.is_cut
    ]
    others = sum((scan.others for scan in scans), Counter[str]())
    if others:
        named = ", ".join(f"{num:,} .{name}" for name, num in others.most_common(8))
        lines.append(
            f"ignored {plural(others.total(), 'member')} of the tar files: {named}"
        )
    return lines


def _refuse_labels_in_other_shards(
    source: str, scans: Sequence[ShardScan], ids: Text, labels: Labels
) -> None:
    """Refuse labels whose image is in another shard and would count as unlabeled.

    Raises:
        ConfigError: There is such a label.
    """
    lost = [valid_text(key) for scan in scans for key in scan.lost_labels]
    if not lost:
        return
    keys = Text.join([scan.keys for scan in scans])
    found = pa.compute.is_in(keys.array, pa.array(lost, pa.large_string()))
    rows = np.flatnonzero(found.to_numpy(zero_copy_only=False) & ~labels.given)
    if len(rows):
        row, key = ids[rows[0]], keys[rows[0]]
        name, scan = next(
            (scan.lost_labels[lost_key], scan)
            for scan in scans
            for lost_key in scan.lost_labels
            if valid_text(lost_key) == key
        )
        raise ConfigError(
            f"{source}: {plural(len(rows), 'label')} in another shard than the image,"
            f" e.g. {_shown(name)} in {scan.name} and the image {one_line(repr(row))};"
            " write all members of a key into one shard"
        )


def _shown(name: str) -> str:
    """Return the name of a member for an error line."""
    return one_line(repr(valid_text(name)))


def _read_label(shard: Shard, member: Member) -> Any:
    """Return what KEY.cls or KEY.json says, or the ConfigError why it says nothing.

    The error is returned, because most JSON files that are no label have no image
    either.
    """
    where = f"{shard.path}: {_shown(member.name)}"
    if not member.is_plain:
        return ConfigError(f"{where} is a link or sparse; write it as a file")
    try:
        text = shard.text(member.offset, member.size, where).decode("utf-8-sig").strip()
        value = filesystem.parse_json(text) if member.suffix == "json" else text
    except ConfigError as error:
        return error
    except ValueError as error:
        kind = "JSON" if member.suffix == "json" else "UTF-8 text"
        return ConfigError(
            f"{where} is not {kind}: {one_line(error)}; write it as {kind}"
        )
    if member.suffix == "json":
        if not isinstance(value, dict):
            return ConfigError(f"{where} must be an object, not {type(value).__name__}")
        value = next((value[name] for name in LABELS if name in value), None)
    return sys.intern(valid_text(value)) if isinstance(value, str) else value


@filesystem.retry_transient
def _read_images(path: str, start: np.ndarray, end: np.ndarray) -> list[bytes]:
    """The bytes from ``start`` to ``end``, int64 (n,) each, in order; neighbors in
    one piece.
    """
    far = start[1:] - end[:-1] > GAP_BYTES[is_uri(path)]
    far |= start[1:] // SPAN_BYTES != start[:-1] // SPAN_BYTES
    images = list[bytes]()
    with filesystem.reading(path), filesystem.open_file(path) as file:
        for piece in np.split(np.stack([start, end], axis=1), np.flatnonzero(far) + 1):
            first = int(piece[0, 0])
            data = file.read_at(int(piece[:, 1].max()) - first, first)
            images += [data[a - first : b - first] for a, b in piece.tolist()]
    return images


def _split(name: str) -> str:
    """train or test, by the words of a shard's name or its folder."""
    folder, _, file = f"/{name}".rpartition("/")
    words = [*re.split(r"[-_.]", file.lower()), folder.rpartition("/")[2].lower()]
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _shards(path: str, follow_links: bool) -> list[FileEntry]:
    """Return the tar files that a path or pattern names, in order."""
    return filesystem.with_remote_facts(_named_shards(path, follow_links))


def _named_shards(path: str, follow_links: bool) -> list[FileEntry]:
    kind = filesystem.kind(path)
    if kind == "file":
        return [FileEntry(filesystem.split(path)[1], path, *filesystem.stat_of(path))]
    if kind == "missing":
        return _matching(path, follow_links)
    found = list(filesystem.walk(path, follow_links))
    shards = [file for file in found if file.relative.lower().endswith(".tar")]
    if not shards:
        packed = (file.relative for file in found if PACKED.search(file.relative))
        why = next(
            (
                f"; {valid_text(name)} is compressed, unpack it to a plain .tar"
                for name in packed
            ),
            "",
        )
        raise ConfigError(f"no *.tar files below {path}{why}")
    return shards


def _matching(pattern: str, follow_links: bool) -> list[FileEntry]:
    base, mark, options = (
        pattern.partition("?") if is_uri(pattern) else (pattern, "", "")
    )
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
        words = (
            f"{number:0{len(ends[1])}}"
            for number in range(int(ends[1]), int(ends[2]) + 1)
        )
    for word in words:
        yield from _expanded(before + word + after)
