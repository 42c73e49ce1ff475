"""Read tar shards in the layout of WebDataset.

The members KEY.jpg (or another image) and KEY.cls or KEY.json of one shard are one row,
in whatever order they are. :mod:`uno.data.tar_index` finds them. Nothing is unpacked:
images are read at their places in the shards.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from uno.data import files as filesystem
from uno.data.columns import joined
from uno.data.files import FileEntry, full_path, is_uri, valid_text
from uno.data.images import Image, Images
from uno.data.labels import encode_labels, require_distinct
from uno.data.rows import DEFAULT_OPTIONS, ReadOptions, Rows, split_of
from uno.data.tar_index import ShardContent, index_shards, shown
from uno.errors import ConfigError
from uno.limits import MAX_IMAGE_BYTES
from uno.text import plural

# The largest gap in bytes between two images that are read in one piece; the key says
# whether the shard is remote.
GAP_BYTES = {False: 2**12, True: 2**20}
# The size of the spans that shards are divided into, in bytes. Only images that begin
# in the same span are read in one piece. In remote shards these images form a group.
SPAN_BYTES = 8 * 2**20
MAX_SHARDS = 10**6  # the largest number of shards that a pattern may name
PACKED = re.compile(r"\.(tgz|tar\.\w+)$", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class TarImages(Images):
    """N images inside tar shards.

    Attributes:
        shards: Path or URI of each shard.
        shard_times: When each shard was last changed, ns since 1970, -1 if that is not
            known, int64 (shards,).
        shard: The position in ``shards`` of each image's shard, int32 (N,).
        offset: Position of the first byte of each image in its shard, int64 (N,).
        size: Size of each image in bytes, int64 (N,). If a shard is cut off inside an
            image, it counts the bytes that are there. It is 0 for members that are
            links, special entries or sparse files, which are unreadable.
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

        All are bytes, b"" for a link, special entry or sparse file. Images that lie
        close together are read in one piece, see :func:`_read_images`. An image that is
        larger than ``MAX_IMAGE_BYTES`` (128 MiB) is cut to one byte more than this, so
        that decoding refuses it. One at the end of a truncated shard is incomplete.

        Raises:
            ConfigError: A shard cannot be read.
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
        """Return which images form a group: those that begin in one span of a shard.

        Callers read a group at once, because reads of remote storage are slow.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            The number of the span that each image begins in, int64 (n,). A span has
            :data:`SPAN_BYTES` (8 MiB), and only spans in which an image begins are
            numbered, from 0 over all shards. None if the shards are local, which counts
            as reading each image by itself, or if there are none.
        """
        return self._pieces[rows] if self.shards and is_uri(self.shards[0]) else None

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the size of each image in bytes, int64 (n,).

        It is 0 for a link, special entry or sparse file. If a shard is cut off inside
        an image, it counts the bytes that are there.

        Args:
            rows: Row numbers, int64 (n,).
        """
        return self.size[rows]

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Return when the shard of each image was last changed.

        The times are those of ``shard_times``; nothing is looked up here.

        Args:
            rows: Row numbers, int64 (n,).

        Returns:
            ns since 1970, int64 (n,), -1 if that is not known.
        """
        return self.shard_times[self.shard[rows]]

    def paths(self, rows: np.ndarray) -> list[str | None]:
        """Return None for each of ``rows``, because no image is a file of its own."""
        return [None] * len(rows)

    @property
    def is_remote(self) -> bool:
        """Whether the shards are in remote storage (their paths are URIs)."""
        return any(map(is_uri, self.shards))

    def reader(self) -> TarImages:
        """Return the object with which another process reads these images.

        It is a copy with the absolute paths of the shards (URIs stay as they are), and
        it has no open file. The shards must be at these paths on the node of that
        process, too.
        """
        return replace(self, shards=[full_path(path) for path in self.shards])

    @cached_property
    def _pieces(self) -> np.ndarray:
        """The number of the span that each image begins in, int64 (N,).

        Every shard is divided into spans of :data:`SPAN_BYTES` (8 MiB). The spans in
        which an image begins are numbered over all shards, from 0.
        """
        places = np.stack([self.shard, self.offset // SPAN_BYTES])
        return np.unique(places, axis=1, return_inverse=True)[1].reshape(-1)


def read_tar(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> Rows:
    """Read the *.tar files of a folder, one file, or the files that a pattern names.

    Each image is a row, and its id is SHARD#KEY. SHARD is the path of the shard below
    the source. KEY is the path of the image in the shard without its suffix (and
    without a leading ``./``): ``cam 2.1_003`` of ``cam 2.1_003.png``. The class is the
    text of KEY.cls in the same shard or, if that is missing or blank, the first of the
    keys ``label``, ``cls`` and ``class`` that KEY.json has. It is a name, a whole
    number or a boolean; 0 and 0.0 are both ``0``, and a negative number, null or blank
    text is no label (see :func:`~uno.data.labels.encode_labels`). The split is what the
    name or folder of a shard says (see :func:`~uno.data.rows.split_of`), else train;
    val, valid and validation count as test. An image that is a link, another special
    entry or a sparse file (one that tar stores without its zeros) is an unreadable
    image. Only the headers of the members and the labels are used here, no image is
    decoded. What is found is kept in the cache directory of the user, where a later
    call finds it, see :func:`~uno.data.tar_index.index_shards`.

    WebDataset itself ends a key at the first dot, so that ``3.mask.png`` belongs to the
    row ``3``. Here such an image is left out if ``3.png`` is in the same shard and no
    member ``3.mask.cls`` or ``3.mask.json`` is there. Otherwise it is a row of its own,
    with the key ``3.mask``. Warnings count the images that are left out, and the labels
    that have no image.

    Args:
        path: A path or URI of a folder or a file, or a pattern with ``*``,
            ``{000..009}`` or ``{a,b}``, see :func:`find_shards`.
        options: How the source is read. With ``images_only`` labels are not read, and
            splits are those of the shards all the same.

    Returns:
        The rows, one shard after the other. Notes name the truncated shards, of which
        the members that are there are read, and count members that are ignored. Another
        note says where labels belong, if no image has one and some are in folders of
        the shards (not with ``images_only``).

    Raises:
        ConfigError: There is no such file or no image; a file cannot be read, or is
            compressed, damaged or no tar file; two images of a shard have one key, or
            two label members the same key and suffix; the label of an image cannot be
            read or is another value than those above; two labels differ only in
            spelling, such as in spaces at the end; it is not clear which image a label
            belongs to; a pattern names one shard twice, so that two ids are
            equal; or :func:`find_shards` refuses the path.
    """
    source, shards = f"tar:{path}", find_shards(path, options.follow_links)
    names = [valid_text(shard.relative) for shard in shards]
    contents = index_shards(shards, options.images_only)
    found = dict(zip(names, contents, strict=True))
    warnings, notes = _list_warnings(found), _list_notes(found)
    counts = [len(content.images) for content in contents]
    if not sum(counts):
        lacks = (
            f"{source}: no members KEY.jpg, KEY.png, ... in its {len(shards)} tar files"
        )
        raise ConfigError("; ".join([lacks, *warnings, *notes]))
    images = pa.concat_arrays([content.images for content in contents])
    shard_of_image = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    name_of_image = pa.array(names, pa.large_string()).take(pa.array(shard_of_image))
    ids = joined("#", name_of_image, images.field("key"))
    labels = encode_labels(
        source,
        _decode_labels(images.field("label")),
        name_row=lambda row: str(ids[row]),
    )
    require_distinct(source, labels)
    in_folders = pa.compute.any(pa.compute.match_substring(images.field("key"), "/"))
    has_no_label = not options.images_only and labels.null_count == len(labels)
    if has_no_label and in_folders.as_py():
        notes.append(
            "the label of KEY.jpg is a member KEY.cls or KEY.json of the same shard; if"
            " folders in the tar files are the classes, unpack them and pass --labeled"
            " DIR --unlabeled DIR"
        )
    return Rows(
        ids,
        TarImages(
            [shard.path for shard in shards],
            np.array([shard.time for shard in shards], np.int64),
            shard_of_image,
            images.field("offset").to_numpy(),
            images.field("size").to_numpy(),
        ),
        labels,
        np.array([split_of(s.relative) == "train" for s in shards])[shard_of_image],
        source,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _decode_labels(texts: Any) -> list[Any]:
    """Parse the labels of the images of all shards from JSON, equal texts only once.

    Args:
        texts: The labels as JSON text, an Arrow array (N,). It is null for an image
            without a label.

    Returns:
        The N labels as Python values, None for null.
    """
    coded = texts.dictionary_encode()
    values = [json.loads(text) for text in coded.dictionary.to_pylist()]
    return [
        None if code is None else values[code] for code in coded.indices.to_pylist()
    ]


def _list_warnings(found: Mapping[str, ShardContent]) -> list[str]:
    """Return warnings about labels without an image, and about images left out.

    An image such as ``3.mask.png`` is left out if it has no label of its own and
    ``3.png`` is in the same shard. It is then another field of the row ``3``, because
    WebDataset ends a key at the first dot.

    Args:
        found: The content of each shard by its name.

    Returns:
        Up to two lines: one if there are labels without an image, and one if images are
        left out. Each has the number in all shards and the first example.
    """
    lines = []
    lost = [(s, name) for s in found for name in found[s].lost_labels.values()]
    if lost:
        shard, name = lost[0]
        lines.append(
            f"{plural(len(lost), 'label')} without an image, e.g. {shown(name)} in"
            f" {shard}: a label KEY.cls or KEY.json belongs to KEY.jpg (or another"
            " image) in the same shard; rename or add the image, or remove the label"
        )
    fields = [(s, *names) for s in found for names in found[s].left_out]
    if fields:
        shard, name, row_image = fields[0]
        lines.append(
            f"{plural(len(fields), 'image')} left out, e.g. {shown(name)} in"
            f" {shard}: WebDataset's key ends at the first dot, so it is another"
            f" field of the row of {shown(row_image)}; if it is an image of its own,"
            " replace the dots in its name"
        )
    return lines


def _list_notes(found: Mapping[str, ShardContent]) -> list[str]:
    """Return notes about what the scan of the shards did not read.

    Args:
        found: The content of each shard by its name.

    Returns:
        A line for each shard that is cut off, and one that counts the ignored members
        of all shards, if there are any, and names the 8 most common suffixes. Ignored
        members are neither image nor label, or are a .cls or .json without an image and
        without a label that was read. Folders and hidden files are not counted.
    """
    lines = [
        f"{shard} is truncated: it ends inside a member"
        for shard, content in found.items()
        if content.is_cut
    ]
    ignored = Counter[str]()
    for content in found.values():
        ignored.update(content.ignored)
    if ignored:
        named = ", ".join(f"{num:,} .{name}" for name, num in ignored.most_common(8))
        lines.append(
            f"ignored {plural(ignored.total(), 'member')} of the tar files: {named}"
        )
    return lines


def _read_images(path: str, start: np.ndarray, end: np.ndarray) -> list[bytes]:
    """Read byte ranges of a shard.

    Neighboring ranges are read in one piece if they begin in the same span of 8 MiB
    (:data:`SPAN_BYTES`) and the gap between them is at most 4 KiB in a local shard, or
    1 MiB in a remote one (:data:`GAP_BYTES`).

    Args:
        path: Path or URI of the shard.
        start: Position of the first byte of each range in ascending order, int64 (n,).
        end: Position after the last byte of each range, int64 (n,).

    Returns:
        The bytes of each range, fewer if the shard ends inside it.

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


def find_shards(path: str, follow_links: bool) -> list[FileEntry]:
    """List the tar files that a path or pattern names. No file is opened.

    In a folder these are the files at any depth that end in ``.tar``, in any case of
    letters, except hidden ones, in the order of their paths. A file that is named
    itself or by a pattern may have any ending. The files of a pattern are in the order
    of :func:`expand_braces`, and those of one ``*`` in the order of their names.

    Args:
        path: A path or URI of a file or folder, or a pattern. ``{000..009}`` or
            ``{a,b}`` may be anywhere in it, and ``*`` in the name of the file. A path
            that does not exist counts as a pattern.
        follow_links: Whether links may lead out of the folder.

    Returns:
        The files, each with its path relative to the folder of the source, the path or
        URI to open it with, its size in bytes (-1 if it is not known) and its
        modification time in ns since 1970. The folder of the source is ``path`` if that
        is a folder, the folder of ``path`` if that is a file, and for a pattern the
        folder before its first ``*`` or brace. Size and time of remote files are looked
        up. A file that is named without ``*`` is listed even if it does not exist, with
        the size -1.

    Raises:
        ConfigError: A folder has no tar files; a pattern gives no file, because none
            matches its ``*`` or its braces stand for no name (as ``{9..0}``); it stands
            for more than :data:`MAX_SHARDS` names (a million); a folder cannot be
            listed or the storage cannot be reached; or a link leads out of a folder
            that is listed and ``follow_links`` is False (for a pattern, only links to
            files directly in its folder count).
    """
    kind = filesystem.kind(path)
    if kind == "missing":
        shards = _match_pattern(path, follow_links)
    elif kind == "file":
        name = filesystem.split(path)[1]
        shards = [FileEntry(name, path, *filesystem.stat_of(path))]
    else:
        entries = list(filesystem.walk(path, follow_links))
        shards = [file for file in entries if file.relative.lower().endswith(".tar")]
        packed = [file.relative for file in entries if PACKED.search(file.relative)]
        if not shards:
            example = [
                f"; {valid_text(name)} is compressed, unpack it to a plain .tar"
                for name in packed[:1]
            ]
            raise ConfigError(f"no *.tar files below {path}{''.join(example)}")
    return filesystem.with_remote_facts(shards)


def _match_pattern(pattern: str, follow_links: bool) -> list[FileEntry]:
    """List the tar files that a pattern with ``*`` or braces names, in order.

    A name without ``*`` is listed even if there is no such file, so that a shard that
    is missing is an error when it is read. A ``*`` in the name of a file stands for any
    characters, and matches files directly in the folder, except hidden ones.

    Args:
        pattern: The pattern, see :func:`find_shards`.
        follow_links: Whether links may lead out of the folder.

    Returns:
        The files, with paths relative to the folder before the first ``*`` or brace. A
        local file that is missing has the size -1, and so has a remote one that is
        named without ``*``, because it is not looked up here.

    Raises:
        ConfigError: No name is left, because no file matches a ``*`` or numbers in
            braces descend; the pattern stands for more than :data:`MAX_SHARDS` names;
            or the folder in which files are compared with a ``*`` cannot be listed, or
            a file in it is a link that leads out (without ``follow_links``).
    """
    root_length = re.split(r"[*{]", pattern)[0].rfind("/") + 1
    shards = list[FileEntry]()
    for path in expand_braces(pattern):
        folder, name = filesystem.split(path)
        base = path.partition("?")[0] if is_uri(path) else path
        below_root = base[root_length : base.rfind("/") + 1]
        if "*" in name:
            matching = re.compile(".*".join(map(re.escape, name.split("*"))))
            shards += [
                file._replace(relative=below_root + file.relative)
                for file in filesystem.walk(folder, follow_links, recursive=False)
                if matching.fullmatch(file.relative)
            ]
        else:
            size, time = filesystem.stat_of(path)
            shards.append(FileEntry(below_root + name, path, size, time))
    if not shards:
        raise ConfigError(f"tar:{pattern}: no such file")
    return shards


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern with braces stands for.

    ``{000..009}`` stands for the numbers from 000 to 009, both included, with zeros in
    front up to the width of the first number. ``{a,b}`` stands for a and b.

    Args:
        pattern: A path or URI with any number of braces, which are not nested. A ``*``
            and a brace without its partner are kept as they are.

    Returns:
        The names in order; those of the last braces change first. They need not exist.
        A pattern without braces gives itself, and one with numbers that descend, as
        ``{9..0}``, gives no names.

    Raises:
        ConfigError: The names are more than :data:`MAX_SHARDS` (a million).
    """
    choices = list[list[str]]()
    for number, part in enumerate(re.split(r"\{([^{}]*)\}", pattern)):
        ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", part)
        if number % 2 == 0:  # outside of braces
            choices.append([part])
        elif ends is None:
            choices.append(part.split(","))
        else:
            first, last, width = int(ends[1]), int(ends[2]), len(ends[1])
            numbers = range(first, min(last, first + MAX_SHARDS) + 1)
            choices.append([f"{value:0{width}}" for value in numbers])
    if math.prod(map(len, choices)) > MAX_SHARDS:
        raise ConfigError(f"{pattern} names more than {MAX_SHARDS:,} files")
    return list(map("".join, product(*choices)))
