"""Find the files of the image paths that a table holds.

Tables come from other programs and other computers. A path may have backslashes,
another Unicode form or percent signs, may lack its ending, or may be relative to
another folder.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from uno.data import files as filesystem
from uno.data.columns import chunks
from uno.data.images import Files, is_image
from uno.data.rows import DEFAULT_OPTIONS, ReadOptions
from uno.errors import ConfigError, one_line

LABEL_STUDIO = re.compile(r"/?data/(upload|local-files)/")
WINDOWS_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


class ImagePaths:
    """Find the files of image paths that are relative to one folder.

    Args:
        table_folder: Folder or URI of the table.
        options: How the source is read. Paths are relative to its ``image_folder``, or
            to ``table_folder`` if that is None. Its ``image_suffix`` is added to paths
            that lack it, and its ``follow_links`` allows links that lead out of a local
            folder.

    Attributes:
        root: Folder or URI that the paths are relative to.
    """

    def __init__(
        self, table_folder: str, options: ReadOptions = DEFAULT_OPTIONS
    ) -> None:
        folder = options.image_folder
        self.root = table_folder if folder is None else folder
        self._is_remote = filesystem.is_uri(self.root)
        self._suffix = options.image_suffix
        self._inside = filesystem.resolver(self.root, options.follow_links)
        self._following = filesystem.resolver(self.root, follow_links=True)

    def locate(self, given: str) -> tuple[str | None, tuple[int, int]]:
        """Find an image by its path as it is written, or as other programs write it.

        First ``file://`` or the URI of a remote folder is removed from the path, and a
        missing ``image_suffix`` is added. The result is the first spelling. If there is
        no such file in the local folder, five other spellings are tried, unless the
        path begins with a Windows drive: the first one without white space at its ends;
        the first one with slashes in place of backslashes; and the one with slashes
        percent-decoded, in Unicode form NFC, or in NFD, each of these three alone. In
        remote storage no other spelling is tried, and no file is looked up.

        Args:
            given: The path as the table has it.

        Returns:
            The absolute path or the URI; and the size in bytes and the modification
            time in ns since 1970. They are those of the first spelling that exists
            inside the folder. If none exists there, the path is that of the first
            spelling, with (-1, 0). A path in remote storage is percent-encoded here,
            and is followed by (-1, -1). The path is None, with (-1, 0), if no spelling
            exists inside the folder and the first one is not inside it: it leads out by
            '..', as an absolute path or by a link (without ``follow_links``), it is the
            local folder itself, it is a URI of another place, or it has a NUL
            character. In remote storage any part '..' and any absolute path counts as
            leading out.
        """
        written = self._complete(given)
        path = self._inside(written)
        stat = (-1, 0) if path is None else filesystem.stat_of(path)
        if stat[0] >= 0 or self._is_remote:
            return path, stat
        for spelling in _other_spellings(written):
            other = self._inside(spelling)
            other_stat = (-1, 0) if other is None else filesystem.stat_of(other)
            if other_stat[0] >= 0:
                return other, other_stat
        return path, stat

    def refusal(self, given: str) -> str:
        """Return why :meth:`locate` returns None for a path, and what to do.

        The text is for an error message, and begins with the path in quotes. The first
        reason that applies is given: the path is one on a server of Label Studio (it
        begins with data/upload/ or data/local-files/, also after a slash), is a URL or
        URI, leads out of the local folder by a link, or is outside the folder. The last
        reason stands for all others, too.

        Args:
            given: The path as the table has it.
        """
        if given.startswith("file://"):
            given = filesystem.normalize_path(given)
        shown = one_line(repr(given))
        if LABEL_STUDIO.match(given):
            return (
                f"{shown} is a path on a Label Studio server: download the images and "
                f"write their paths relative to {self.root}"
            )
        if filesystem.is_uri(given):
            folder = given.rpartition("/")[0]
            or_name = (
                ""
                if given.startswith("http")
                else f", or give --data.image-folder {folder}"
            )
            return (
                f"{shown} is a URL: download the images and write their paths relative "
                f"to {self.root}{or_name}"
            )
        outside = f"{shown} is outside the folder {self.root}"
        if self._following(given) is not None:
            return (
                f"{outside}: it is a link; copy the file, or give --data.follow-links"
            )
        return (
            f"{outside}: move it there, or name its folder with --data.image-folder DIR"
        )

    def _complete(self, given: str) -> str:
        """Remove file:// or the folder's own URI from a path, and add a missing ending.

        With file://, a host and all from '?' or '#' on are removed, too. The URI of the
        folder is removed only if the folder is remote. In both cases percent-encoded
        characters are decoded. The ending is the option ``image_suffix``. A path has it
        if it ends so in any case of letters.
        """
        if given.startswith("file://"):
            given = filesystem.normalize_path(given)
        elif self._is_remote:
            folder = unquote(self.root.partition("?")[0].rstrip("/") + "/")
            if unquote(given).startswith(folder):
                given = unquote(given).removeprefix(folder)
        if self._suffix and not given.lower().endswith(self._suffix.lower()):
            given += self._suffix
        return given


def _other_spellings(path: str) -> Iterator[str]:
    """Yield other spellings of a path, by which its file may be found.

    There are five, in this order: the path without white space at its ends; the path
    with slashes in place of backslashes; and three that change the one with slashes:
    its percent-encoded characters are decoded, its Unicode form is NFC, or it is NFD. A
    spelling may equal the path. For a path that begins with a Windows drive, such as
    ``C:`` and a slash or backslash, nothing is yielded.
    """
    slashes = path.replace("\\", "/")
    if not WINDOWS_DRIVE.match(path):
        yield path.strip()
        yield slashes
        yield unquote(slashes, errors="surrogateescape")
        yield unicodedata.normalize("NFC", slashes)
        yield unicodedata.normalize("NFD", slashes)


def find_images(
    source: str,
    table_folder: str,
    given: Iterable[Any],
    options: ReadOptions = DEFAULT_OPTIONS,
    *,
    may_lack: bool = False,
    lines: Sequence[int] | None = None,
    otherwise: str = "",
) -> Files:
    """Find the files of a column of image paths.

    Local files are looked up, but not opened.

    Args:
        source: Name of the source, for errors.
        table_folder: Folder or URI of the table.
        given: The N >= 1 values of the column: texts, and None or '' for a row without
            a path. A path is relative to the folder ``options.image_folder``, or to
            ``table_folder`` if that is None. It may also be absolute, begin with
            ``file://``, or begin with the URI of a remote folder, if it is inside this
            folder. If there is no such local file, other spellings are tried, such as
            slashes in place of backslashes, see :meth:`ImagePaths.locate`.
        options: How the source is read. ``image_suffix`` is added to paths that lack
            it, and ``follow_links`` allows links that lead out of the folder.
        may_lack: Whether a row may have no path. Its path is then '', its size -1 and
            its time 0, which is an unreadable image.
        lines: The line of each of the N rows in the table, which errors name. None if
            the table is no file of text.
        otherwise: Text that is added to the end of error messages about a path that is
            outside the folder or about files that do not exist, with another way to
            correct the table, such as "; or ...". '' for none.

    Returns:
        N files as images: the absolute path or the URI of each, '' for a row without a
        path, and its size in bytes and modification time in ns since 1970. A local
        file that does not exist has the size -1 and the time 0, and its image is
        unreadable. For a path in remote storage both are -1, because no file is looked
        up.

    Raises:
        ConfigError: A value is no text, a row has no path although ``may_lack`` is
            False, :meth:`ImagePaths.locate` returns None for a path, for example
            because it is outside the folder, or rows have paths but none of these files
            exists (which is not checked in remote storage).
    """
    paths_of_table = ImagePaths(table_folder, options)
    parts, row, first = list[Files](), 0, ""

    def place() -> str:
        """Return how errors name the current row: its number from 0, and its line."""
        return f"row {row}" if lines is None else f"row {row} (line {lines[row]})"

    for some in chunks(given):
        paths, stats = list[str](), list[tuple[int, int]]()
        for value in some:
            if not value and may_lack:
                path, stat = "", (-1, 0)
            elif not isinstance(value, str) or not value:
                raise ConfigError(f"{source}: {place()} has no image path")
            else:
                found, stat = paths_of_table.locate(value)
                if found is None:
                    raise ConfigError(
                        f"{source}: {place()}:"
                        f" {paths_of_table.refusal(value)}{otherwise}"
                    )
                path, first = found, first or value
            paths.append(path)
            stats.append(stat)
            row += 1
        parts.append(Files.of(paths, stats))
    files = Files.join(parts)
    root = paths_of_table.root
    if first and not filesystem.is_uri(root) and files.stats[:, 0].max() < 0:
        raise ConfigError(
            f"{source}: none of its {row} images is below {root}, e.g. "
            f"{one_line(repr(first))}{_fix_of_missing(root, first, options)}{otherwise}"
        )
    return files


def _fix_of_missing(root: str, example: str, options: ReadOptions) -> str:
    """Return the end of the error that says that no image was found: what to do.

    The first advice that fits is given. If the folder of the example has a file or
    folder whose name differs only in capitals, it is to correct the names. For a path
    with a Windows drive it is to write relative paths. Otherwise it is to give the
    options that are not set: ``--data.image-folder`` and, if the example does not end
    like an image, ``--data.image-suffix``.

    Args:
        root: Local folder that the paths are relative to.
        example: A path of the table, as the table has it.
        options: How the source is read. Options that are set are not proposed.

    Returns:
        Text that begins with '; ', or '' if there is no advice.
    """
    folder, name = os.path.split(os.path.join(root, example))
    others = list[str]()
    with suppress(OSError):  # there is no such folder, or it cannot be listed
        others = os.listdir(folder)
    # a link to nothing is listed with the very name
    like = (o for o in others if o.lower() == name.lower() and o != name)
    if (similar := next(like, None)) is not None:
        return f"; {similar!r} is there: write names with the same capital letters"
    if WINDOWS_DRIVE.match(example):
        return (
            "; it is a path of a Windows computer: write paths relative to that folder"
        )
    fixes = list[str]()
    if options.image_folder is None:
        fixes.append("name the folder of the images with --data.image-folder DIR")
    if not options.image_suffix and not is_image(example):
        fixes.append("the ending of their names with --data.image-suffix .jpg")
    return "; " + " and ".join(fixes) if fixes else ""
