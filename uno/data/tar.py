"""Read tar shards in the layout of WebDataset.

The members KEY.jpg (or another image) and KEY.cls or KEY.json of one shard are one row,
in whatever order they are. A shard is scanned once for where its images lie, and
nothing is unpacked. What is found in remote shards is kept
(:mod:`uno.data.tar_index`).
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
from uno.data.columns import decimal, has_label, joined, make_ids
from uno.data.files import FileEntry, is_uri, valid_text
from uno.data.images import Image, Images, is_image
from uno.data.labels import encode_labels, is_missing
from uno.data.rows import SPLITS, Rows
from uno.data.tar_index import ShardScan, scan_shards
from uno.errors import ConfigError, one_line
from uno.limits import MAX_IMAGE_BYTES, MAX_MEMBER_BYTES, MAX_ROWS
from uno.text import plural

SCANNED = 16  # the number of shards that are scanned at once
# The bytes that a scan reads at once; the key says whether the shard is remote.
WINDOW_BYTES = {False: 2**14, True: 2**20}
# The largest gap in bytes between two images that are read in one piece; the key says
# whether the shard is remote.
GAP_BYTES = {False: 2**12, True: 2**20}
# The size of the spans that shards are divided into, in bytes. Only images that begin
# in the same span are read in one piece. In remote shards these images form a group.
SPAN_BYTES = 8 * 2**20
MAX_SHARDS = 10**6  # the largest number of shards that a pattern may name
LABELS = ("label", "cls", "class")  # keys of the label in KEY.json; the first counts
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
# Types of headers that are followed by text about the next member.
TEXTS = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
# Types of members that are no files.
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
HIDDEN = re.compile(r"(^|/)(\.[^./]|__MACOSX(/|$))")  # files that file managers add
PACKED = re.compile(r"\.(tgz|tar\.\w+)$", re.IGNORECASE)
RECORD = re.compile(rb"(\d{1,8}) ([^=]+)=")  # in an extended header: LENGTH NAME=VALUE


@dataclass(frozen=True, eq=False)
class TarImages(Images):
    """N images inside tar shards.

    Attributes:
        shards: Path or URI of each shard.
        shard_times: When each shard was last changed, ns since 1970, int64 (shards,).
        shard: The position in ``shards`` of each image's shard, int32 (N,).
        offset: Position of the first byte of each image in its shard, int64 (N,).
        size: Size of each image in bytes, int64 (N,). It is 0 for members that are
            links or sparse files, which are unreadable.
    """

    shards: Sequence[str]
    shard_times: np.ndarray
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.shard)

    def read_images(self, rows: np.ndarray) -> list[Image]:
        """Return the encoded images of ``rows``, int64 (n,), in that order.

        Neighboring images are read in one piece. An image that is larger than
        ``MAX_IMAGE_BYTES`` is cut to one byte more, so that decoding refuses it.
        """
        shard, start = self.shard[rows], self.offset[rows]
        # an image that is too large is refused later, so not all of it is read
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
        """Return which images are read together: those in the same span of a shard.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            The span that each image begins in, numbered over all shards, int64 (n,). A
            span has :data:`SPAN_BYTES`. None if the shards are local, where each image
            is read by itself.
        """
        return self._pieces[rows] if self.shards and is_uri(self.shards[0]) else None

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the size of each image in bytes, int64 (n,).

        Args:
            rows: Row numbers, int64 (n,).
        """
        return self.size[rows]

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Return when the shard of each image was last changed.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            ns since 1970, int64 (n,).
        """
        return self.shard_times[self.shard[rows]]

    def content_keys(self, rows: np.ndarray) -> pa.Array:
        """Return texts for the fingerprint of the data set: the size of each image.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            An Arrow array of decimal numbers as text.
        """
        return decimal(self.size[rows])

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """Return None for each row, because no image is a file of its own."""
        return [None] * len(rows)

    @property
    def is_remote(self) -> bool:
        """Whether the shards are in remote storage."""
        return any(map(is_uri, self.shards))

    def reader(self) -> TarImages:
        """Return this object, because any node can read the shards."""
        return self

    @cached_property
    def _pieces(self) -> np.ndarray:
        """The span that each image begins in, numbered over all shards, int64 (N,)."""
        places = np.stack([self.shard, self.offset // SPAN_BYTES])
        return np.unique(places, axis=1, return_inverse=True)[1].reshape(-1)


def read_tar(path: str, images_only: bool = False, follow_links: bool = False) -> Rows:
    """Read the *.tar files of a folder, one file, or the files that a pattern names.

    The members of one shard that have one key are a row, and its id is SHARD#KEY. The
    key is the name without the suffix of an image or label: ``cam 2.1_003`` of
    ``cam 2.1_003.png``. The class is the text of KEY.cls, else ``label``, ``cls`` or
    ``class`` of KEY.json, by the rule of :func:`~uno.data.labels.encode_labels`. The
    split is what the name or folder of a shard says (train, test, val), else train. A
    member that is a link or sparse is an unreadable image.

    WebDataset itself ends a key at the first dot. So ``3.mask.png`` is another field of
    the row ``3`` and no row of its own if ``3.png`` is there and no label belongs to
    ``3.mask.png``. A warning counts such images, and labels that have no image.

    Args:
        path: A folder, a file, or a pattern with ``*``, ``{000..009}`` or ``{a,b}``.
        images_only: Whether labels are not read, because the rows are to be predicted.
        follow_links: Whether shards may be links out of the folder.

    Raises:
        ConfigError: There is no such file or no image, a file is compressed or no tar
            file, a label is neither a name nor a whole number, or it is not clear which
            image a label belongs to.
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
    ids = pa.concat_arrays([joined("#", scan.name, scan.keys) for scan in scans])
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
    labels = encode_labels(source, values, name_row=lambda row: str(ids[row]))
    _refuse_labels_in_other_shards(source, scans, ids, labels)
    in_folders = any("/" in str(scan.keys[0]) for scan in scans if len(scan.keys))
    if not images_only and labels.null_count == len(labels) and in_folders:
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

    Attributes:
        name: Its path in the shard.
        offset: Position of its first byte in the shard.
        size: Its size in bytes, or the bytes that are there if the shard is cut off.
        is_plain: Whether these bytes are its content. False for links and sparse files.
    """

    name: str
    offset: int
    size: int
    is_plain: bool

    @property
    def suffix(self) -> str:
        """The suffix of the member: the text after the last dot of its base name.

        It is in lower case, and '' if there is no dot. For ``a/cam 2.1_003.PNG`` it is
        ``png``.
        """
        return self._base.rpartition(".")[2].lower() if "." in self._base else ""

    @property
    def key(self) -> str:
        """The key of the row that the member belongs to: its name without the suffix.

        For ``a/cam 2.1_003.png`` it is ``a/cam 2.1_003``.
        """
        return self.name.rpartition(".")[0] if "." in self._base else self.name

    @property
    def _base(self) -> str:
        """The base name of the member, without its folders."""
        return self.name.rpartition("/")[2]


class Told(NamedTuple):
    """What extended headers say about the member that follows them.

    Attributes:
        name: Its path, '' if they do not say it.
        size: Its size in bytes, None if they do not say it.
        is_sparse: Whether it is a sparse file.
    """

    name: str = ""
    size: int | None = None
    is_sparse: bool = False


class Shard:
    """A tar file with headers that are read in order.

    Its methods raise ConfigError, which names the file, if the file cannot be read or
    is damaged.

    Args:
        found: The file.

    Attributes:
        path: Path or URI of the file.
        name: Its path below the source, as text.
        size: Its size in bytes.
        is_cut: Whether the file ends inside a member or header. It is complete when
            :meth:`members` is exhausted.
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
        """Yield the files and links of the shard in order.

        Hidden files, such as file managers add, are left out. Only one header is in
        memory at a time. The last member may be cut off.
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
                if info.type != tarfile.DIRTYPE:  # a link or a device
                    yield Member(
                        (told.name or info.name).removeprefix("./"), at, 0, False
                    )
                size, told = 0, Told()
            at += -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE

    def _header(self, at: int) -> tarfile.TarInfo | None:
        """Read the header at a position in bytes.

        Returns:
            The header, None at the end of the archive.

        Raises:
            ConfigError: The file is compressed, or there is something else at this
                position.
        """
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
        """Read an extended header.

        Args:
            info: The header.
            at: Position in bytes of the text that follows it.

        Raises:
            ConfigError: The text is too long, or no list of names and values.
        """
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
        """Return the size of the blocks that describe the holes of a sparse file.

        Args:
            info: The header of a member. The size is 0 if it is no sparse file of GNU
                tar.
            at: Position in bytes after the header.
        """
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
        """Read some bytes that must not be many.

        Args:
            at: Position of the first byte.
            size: The number of bytes.
            what: What is read, for the error message.

        Raises:
            ConfigError: ``size`` is larger than ``MAX_MEMBER_BYTES``.
        """
        if size > MAX_MEMBER_BYTES:
            raise ConfigError(
                f"{self.path}: {what} has {size:,} bytes, more than"
                f" {MAX_MEMBER_BYTES:,}"
            )
        return self.read(at, size)

    @filesystem.retry_transient
    def read(self, at: int, num: int) -> bytes:
        """Read ``num`` bytes of the file from the position ``at``.

        The result is shorter at the end of the file. The bytes that follow are read
        ahead, so that the next calls need no access.

        Raises:
            ConfigError: The file cannot be read.
        """
        if not self._start <= at <= at + num <= self._start + len(self._data):
            with filesystem.reading(self.path):
                self._start, self._data = (
                    at,
                    self._file.read_at(max(num, self._window), at),
                )
        return bytes(self._data[at - self._start : at - self._start + num])


LabelMembers = dict[str, dict[str, Any]]
"""The labels of a shard: suffix ("cls", then "json") -> key -> label.

A label is None if it is missing, and a ConfigError if it cannot be read.
"""


def _scan(found: FileEntry, images_only: bool) -> ShardScan:
    """Read the headers and labels of a shard, and join images and labels by key.

    Args:
        found: The shard.
        images_only: Whether labels are not read.

    Raises:
        ConfigError: The shard cannot be read, has too many images, two images or two
            equal labels of one key, or a label of an image cannot be read.
    """
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
        keys=make_ids(map(valid_text, images)),
        offsets=np.fromiter(offsets, np.int64),
        sizes=np.fromiter(sizes, np.int64),
        labels=values,
        lost_labels={key: f"{key}.{label.suffix}" for key, label in lost.items()},
        left_out=left_out,
        others=others,
        is_cut=shard.is_cut,
    )


class _Label(NamedTuple):
    """The label of a key that counts.

    Attributes:
        suffix: Suffix of the member that it is in: "cls", "json", or '' for none.
        value: The label, None if it is missing, or a ConfigError that says why it
            cannot be read.
    """

    suffix: str
    value: Any

    @property
    def is_given(self) -> bool:
        """Whether somebody wrote a label.

        A JSON file that cannot be read as a label does not count, because it may be
        about anything.
        """
        is_other_json = self.suffix == "json" and isinstance(self.value, ConfigError)
        return not is_missing(self.value) and not is_other_json


def _label_of(labels: LabelMembers, key: str) -> _Label:
    """Return the label of a key.

    Args:
        labels: The labels of the shard.
        key: The key of a row.

    Returns:
        The label in KEY.cls, or the one in KEY.json if that is missing. The suffix is
        '' if the key has neither.
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
    """Return the images that are a field of another row, by WebDataset's rule for keys.

    Args:
        shard: The shard, for the error message.
        images: The images of the shard by key.
        labels: The labels of the shard.
        images_only: Whether labels are not read.

    Returns:
        Key of each such image -> its name, and the name of the other row's image.

    Raises:
        ConfigError: A label has no image of its own key, but images that WebDataset
            would give its key. It is then not clear which image is meant.
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
    """Return warnings about labels without an image, and about images left out.

    Args:
        scans: The content of each shard.

    Returns:
        At most one line for each of the two.
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
    """Return notes about what the scan of the shards did not read.

    Args:
        scans: The content of each shard.

    Returns:
        A line for each shard that is cut off, and one about members that are neither
        image nor label.
    """
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
    source: str,
    scans: Sequence[ShardScan],
    ids: pa.LargeStringArray,
    labels: pa.DictionaryArray,
) -> None:
    """Refuse labels with an image in another shard, which would count as unlabeled.

    Args:
        source: Name of the source in messages.
        scans: The content of each shard.
        ids: The ids of all N rows.
        labels: The labels of all N rows.

    Raises:
        ConfigError: There is such a label.
    """
    lost = [valid_text(key) for scan in scans for key in scan.lost_labels]
    if not lost:
        return
    keys = pa.concat_arrays([scan.keys for scan in scans])
    found = pa.compute.is_in(keys, pa.array(lost, pa.large_string()))
    rows = np.flatnonzero(found.to_numpy(zero_copy_only=False) & ~has_label(labels))
    if len(rows):
        row, key = ids[rows[0]].as_py(), keys[rows[0]].as_py()
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
    """Return the name of a member as it stands in an error line."""
    return one_line(repr(valid_text(name)))


def _read_label(shard: Shard, member: Member) -> Any:
    """Read the label in a member KEY.cls or KEY.json.

    Returns:
        The label, None if a JSON file has none, or the ConfigError that says why it
        cannot be read. The error is not raised here, because most JSON files that are
        no label have no image either.
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
    """Read byte ranges of a shard.

    Neighboring ranges are read in one piece, see :data:`GAP_BYTES` and
    :data:`SPAN_BYTES`.

    Args:
        path: Path or URI of the shard.
        start: Position of the first byte of each range in ascending order, int64 (n,).
        end: Position after the last byte of each range, int64 (n,).

    Returns:
        The bytes of each range.

    Raises:
        ConfigError: The shard cannot be read.
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
    """Return the split of a shard, "train" or "test".

    It follows from the first word in the name of the file that names a split, else from
    the name of its folder; "train" if neither says anything.
    """
    folder, _, file = f"/{name}".rpartition("/")
    words = [*re.split(r"[-_.]", file.lower()), folder.rpartition("/")[2].lower()]
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _shards(path: str, follow_links: bool) -> list[FileEntry]:
    """Return the tar files that a path or pattern names, in order.

    The size and the time of remote files are looked up.

    Args:
        path: A path or URI of a file or folder, or a pattern.
        follow_links: Whether links may lead out of the folder.

    Raises:
        ConfigError: There are none, or too many.
    """
    return filesystem.with_remote_facts(_named_shards(path, follow_links))


def _named_shards(path: str, follow_links: bool) -> list[FileEntry]:
    """List the tar files that a path or pattern names.

    The size and the time of remote files are -1 if no listing gave them.

    Args:
        path: A path or URI of a file or folder, or a pattern.
        follow_links: Whether links may lead out of the folder.

    Raises:
        ConfigError: There are none, or too many.
    """
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
    """Return the files that a pattern names.

    Args:
        pattern: A path or URI with ``*``, which stands for any characters but "/", and
            with ``{000..009}`` or ``{a,b}``.
        follow_links: Whether links may lead out of the folder before the first ``*`` or
            ``{``.

    Raises:
        ConfigError: There is no such file, or the pattern names more than
            :data:`MAX_SHARDS`.
    """
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
    """Yield the names that a pattern with braces stands for.

    ``{000..009}`` stands for the numbers from 000 to 009, and ``{a,b}`` for a and b.
    ``*`` stays.
    """
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
