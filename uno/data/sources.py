"""Read the data source that the user names.

A source is ``digits``, a prefix and a path such as ``cifar10:DIR``, or only a path,
whose content then decides how it is read. Every source is read into
:class:`~uno.data.rows.Rows`.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from itertools import chain
from typing import cast

import numpy as np
import pyarrow as pa

from uno.config import VECTORS, DataConfig
from uno.data import files as filesystem
from uno.data.annotated_folder import has_labels, read_annotated_folder
from uno.data.cifar import LAYOUTS, read_cifar, recognize_cifar
from uno.data.columns import (
    chunks,
    class_codes,
    class_indices,
    join_labels,
    joined,
    make_ids,
    make_labels,
    present_classes,
)
from uno.data.embeddings import read_vectors
from uno.data.files import FileEntry, children, join, valid_text
from uno.data.images import EXTENSIONS, Files, InMemory, is_image
from uno.data.label_files import with_label_file
from uno.data.other_formats import fix_for, meaning_of, refuse_annotations
from uno.data.rows import DEFAULT_OPTIONS, SPLITS, ReadOptions, Rows
from uno.data.tables import read_parquet, read_table
from uno.data.tar import read_tar
from uno.errors import ConfigError, did_you_mean, one_line
from uno.text import plural

UNREAD = {
    *(
        ".heic",
        ".heif",
        ".avif",
        ".jxl",
        ".jp2",
        ".dng",
        ".cr2",
        ".cr3",
        ".nef",
        ".arw",
        ".raf",
    ),
    *(".jpe", ".ppm", ".pgm", ".tga"),
}
"""Suffixes of image formats that are not read. A warning counts such files."""


class ImageListing:
    """The images below a folder, with counts of the files that are left out.

    Iterating yields each image as a :class:`~uno.data.files.FileEntry`, which is told
    by the ending of its name. No file is opened. The counts, and so the notes and
    warnings, are complete after the last image. Iterate over an object only once,
    because a second time would count the same files again, which is not checked. Hidden
    and special files are neither yielded nor counted.

    Args:
        root: Path or URI of the folder. All folders below it are searched, too.
        follow_links: Whether links may lead out of the folder.

    Raises:
        ConfigError: ``root`` is no folder, or its storage cannot be reached. While
            iterating: a folder cannot be listed, there are more than MAX_ROWS (100
            million) files of any kind, or a link leads out of ``root`` and
            ``follow_links`` is False.
    """

    def __init__(self, root: str, follow_links: bool = False) -> None:
        self._root, self._follow_links = _require_folder(root), follow_links
        self._unread, self._ignored = Counter[str](), Counter[str]()
        self._example = ""

    def __iter__(self) -> Iterator[FileEntry]:
        for file in filesystem.walk(self._root, self._follow_links):
            if is_image(file.relative):
                yield file
            elif (suffix := _suffix(file.relative)) in UNREAD:
                self._example = self._example or valid_text(file.relative)
                self._unread[suffix] += 1
            else:
                self._ignored[suffix] += 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """A tuple of one line that counts images of formats that are not read.

        These formats are told by their endings, which :data:`UNREAD` lists, such as
        ``.heic``. The line has the number of all such files, the path of the first one,
        the endings that were found, and advice to save the files as JPEG or PNG. The
        tuple is empty if there are none among the files that iterating has passed so
        far.
        """
        if not self._unread:
            return ()
        what = f"{plural(self._unread.total(), 'image')} left out below {self._root}"
        formats = ", ".join(sorted(self._unread))
        example = one_line(repr(self._example))
        fix = f"{formats} files are not read; save them as JPEG or PNG"
        return (f"{what}, e.g. {example}: {fix}",)

    @property
    def notes(self) -> tuple[str, ...]:
        """A tuple of one line that counts ignored files that are no images, by ending.

        The line has the number of all such files, and that of each of the eight most
        frequent endings, with advice for some of them. Files that :attr:`warnings`
        counts are not among them. The tuple is empty if there are none among the files
        that iterating has passed so far.
        """
        if not self._ignored:
            return ()
        named = ", ".join(
            f"{number:,} {suffix}{meaning_of(suffix)}"
            for suffix, number in self._ignored.most_common(8)
        )
        more = ", ..." if len(self._ignored) > 8 else ""
        what = f"ignored {plural(self._ignored.total(), 'file')} below {self._root}"
        return (f"{what}: {named}{more}",)


@dataclass(frozen=True)
class Source:
    """A kind of data source: how it is read, and how it is recognized.

    Attributes:
        read: Reads the rows of a path or URI.
        suffixes: Endings, in lower case, by which a single file without a prefix is
            recognized as this kind. Empty if no file is.
        is_downloaded: Whether the path may be missing because the data can be
            downloaded there.
        has_patterns: Whether a path may be a pattern for several files.
        reads_subfolders: Whether every folder or table below the path is read, so that
            a run that is written there would be read as data the next time.
    """

    read: Callable[[str, ReadOptions], Rows]
    suffixes: tuple[str, ...] = ()
    is_downloaded: bool = False
    has_patterns: bool = False
    reads_subfolders: bool = False


def read_rows(config: DataConfig, images_only: bool = False) -> Rows:
    """Read the rows of the data set that the configuration names.

    If ``config.labels`` names a file, its labels replace those of the source in the
    rows to which the file gives one class; other rows keep their labels. CIFAR is
    downloaded first if ``config.download`` allows it and the folder is missing.

    Args:
        config: The section ``data`` of the configuration. The folders ``labeled`` and
            ``unlabeled`` are read if both are given, else ``source``.
        images_only: Whether the rows are only to be predicted. The file
            ``config.labels`` is then not read, nor are the labels of the source or its
            columns of splits. The two folders, the digits and CIFAR keep their labels
            and splits, and splits that are told by the names of tar or Parquet files
            of images stay, too.

    Returns:
        The rows, with class names in one Unicode normalization (NFC).

    Raises:
        ConfigError: The source is missing, unknown, damaged, cannot be read, or holds
            no images or vectors; two rows have the same id; or the file
            ``config.labels`` cannot be used.
        StorageError: The disk has no space for large arrays of vectors.
        ModuleNotFoundError: The source is an .h5ad file, and h5py is not installed.
    """
    options = ReadOptions.of(config, images_only)
    if config.labeled is not None and config.unlabeled is not None:
        unlabeled = filesystem.normalize_path(config.unlabeled)
        rows = read_two_folders(config.labeled, unlabeled, options.follow_links)
    else:
        kind, path = locate_source(config)
        rows = read_digits() if kind == "digits" else SOURCES[kind].read(path, options)
    if config.labels is not None and not images_only:
        rows = with_label_file(rows, filesystem.normalize_path(config.labels))
    return rows.with_composed_names()


def locate_source(config: DataConfig) -> tuple[str, str]:
    """Return the kind of the data source that the user names, and its path.

    Args:
        config: The section ``data`` of the configuration. Its ``source`` is "digits", a
            prefix and a path such as ``tar:DIR``, or only a path. White space around
            it is ignored. Its ``labeled`` and ``unlabeled`` are not used.

    Returns:
        "digits" or a key of :data:`SOURCES`; and the path or URI without the prefix, as
        :func:`~uno.data.files.normalize_path` converts it (``~`` is expanded), '' for
        the digits. A known prefix is the kind, and no file is read. Without a prefix,
        :func:`recognize` decides.

    Raises:
        ConfigError: The prefix is unknown, or has no path. Or there is nothing at the
            path; this is allowed for CIFAR if ``download`` is set, and for a pattern
            (a path with ``*`` or ``{``) after ``tar:``. Or there is no prefix, and
            :func:`recognize` refuses the path. Or the storage of the path cannot be
            reached.
    """
    source = config.source.strip()
    if source == "digits":
        return source, ""
    prefix, path = split_prefix(source)
    if prefix and prefix not in SOURCES:
        known = f"choose from digits, {':, '.join(SOURCES)}:"
        hint = did_you_mean(
            prefix.lower(), SOURCES, known, lambda near: f"{near}:{path}"
        )
        raise ConfigError(f"unknown data source {prefix + ':'!r}{hint}")
    path = filesystem.normalize_path(path)
    if prefix and not path:
        raise ConfigError(f"data source {source!r}: no path; write it after the colon")
    kind = SOURCES.get(prefix)
    may_be_missing = kind is not None and (
        (kind.is_downloaded and config.download)
        or (kind.has_patterns and not {"*", "{"}.isdisjoint(path))
    )
    if filesystem.kind(path) == "missing" and not may_be_missing:
        names = {name: repr(f"{name}:DIR") for name in SOURCES} | {
            "digits": repr("digits")
        }
        hint = did_you_mean(source.lower(), names, show=names.__getitem__)
        raise ConfigError(
            f"data source {source!r}: no such file or folder {path!r}{hint}"
        )
    return prefix or recognize(path, ReadOptions.of(config)), path


def split_prefix(source: str) -> tuple[str, str]:
    """Split a source as a user writes it, such as ``tar:DIR``, at its colon.

    Returns:
        The prefix and the path, without the colon. The prefix is the word before the
        first colon (letters, digits, ``_`` and ``-``, beginning with a letter), whether
        or not a source has this name. It is '' if there is none, if the source is a URI
        such as ``s3://bucket``, or if a local file or directory has this whole name;
        the path is then the whole text.
    """
    match = re.match(r"([A-Za-z][\w-]*):(?!//)(.*)", source, re.DOTALL)
    if match is None or os.path.exists(source):
        return "", source
    return match[1], match[2]


def recognize(path: str, options: ReadOptions = DEFAULT_OPTIONS) -> str:
    """Return the kind of source that an existing file or folder is.

    The ending of a file decides, and the names of the files in a folder. Only the
    tables that :func:`~uno.data.annotated_folder.has_labels` looks for are read, to see
    whether they name classes.

    Args:
        path: Path or URI of the file or folder.
        options: How the source is read. Its ``columns`` may rename the columns of these
            tables, and ``follow_links`` says whether links may lead out of the folder.

    Returns:
        A key of :data:`SOURCES`. For a file it is "parquet", "table" (CSV, TSV and
        JSONL) or "tar". For a folder it is the first that fits: "cifar10" or "cifar100"
        for the files of CIFAR; "parquet" for Parquet files directly in it;
        "imagefolder" for tables that name the classes of images; if ``train`` has
        subfolders, "imagenet" if all of these are wnids, else "folder"; "parquet" for
        Parquet files anywhere below; "tar" if there are tar files and no image files
        anywhere below; "folder" for anything else. The other kinds, such as "vectors",
        need a prefix and are never returned.

    Raises:
        ConfigError: The file has an ending of no kind, the folder holds both CIFAR10
            and CIFAR100, a folder or table cannot be read, or, where all files below
            the folder are listed, there are more than MAX_ROWS (100 million), or a link
            leads out of the folder and the options do not allow it.
    """
    if filesystem.kind(path) == "file":
        name = filesystem.split(path)[1].lower()
        for kind, source in SOURCES.items():
            if name.endswith(source.suffixes):
                return kind
        *others, last = chain.from_iterable(
            source.suffixes for source in SOURCES.values()
        )
        hint = f"; this is {fix}" if (fix := fix_for(path)) else ""
        raise ConfigError(
            f"{path}: a file source must end in {', '.join(others)} or {last}{hint}"
        )
    folders, files = children(path)
    cifar = recognize_cifar(folders, files)
    if len(cifar) > 1:
        raise ConfigError(
            f"{path} holds CIFAR10 and CIFAR100; say which: cifar10:{path} or"
            f" cifar100:{path}"
        )
    if cifar:
        return cifar[0]
    if any(name.endswith(".parquet") for name in files):
        return "parquet"
    if has_labels(path, options):
        return "imagefolder"
    train = children(join(path, "train"))[0] if "train" in folders else []
    if train:
        return "imagenet" if all(is_wnid(name) for name in train) else "folder"
    holds_shards = holds_images = False
    for found in filesystem.walk(path, options.follow_links):
        if found.relative.endswith(".parquet"):
            return "parquet"
        holds_shards = holds_shards or found.relative.lower().endswith(".tar")
        holds_images = holds_images or is_image(found.relative)
    return "tar" if holds_shards and not holds_images else "folder"


@cache
def read_digits() -> Rows:
    """Return scikit-learn's 1,797 handwritten digits, with pixels uint8 (8, 8, 3).

    The three channels are equal, 0 to 255. In every class each fifth digit is a test
    row, the others are training rows. All are labeled, with the classes "0" to "9".
    Every call returns the same object.
    """
    from sklearn.datasets import load_digits  # a slow import, of a second

    digits = load_digits()
    grayscale = np.round(digits.images * 255 / 16).astype(np.uint8)
    is_train = np.full(len(grayscale), True)
    for value in range(10):
        is_train[np.flatnonzero(digits.target == value)[4::5]] = False
    ids, labels = (
        make_ids(f"digits-{i:04d}" for i in range(len(grayscale))),
        make_labels(map(str, digits.target)),
    )
    return Rows(
        ids,
        InMemory(np.repeat(grayscale[..., None], 3, axis=3)),
        labels,
        is_train,
        "digits",
    )


def read_folder(
    root: str, options: ReadOptions, kind: str = "folder", flag: str = "--data"
) -> Rows:
    """Read a folder whose subfolders are classes, or only its images.

    The layout is either ``CLASS/...`` with training images only; or, if there is a
    folder ``train`` with subfolders, ``train/CLASS/...`` and the same for the other
    names of splits in :data:`~uno.data.rows.SPLITS` (test, val, valid and validation,
    which all have test rows). Images in no class folder are unlabeled; those directly
    in ``root`` are so only in the first layout. In the second layout, images outside
    the splits are left out with a warning.

    Args:
        root: Path or URI of the folder.
        options: How the source is read. With ``images_only`` every image below the
            folder is an unlabeled row instead, see :func:`read_images`.
        kind: "classes" for the first layout, even if a class is called train; "splits"
            for the second one if it is there, else the first; "folder" for the same
            choice as "splits", but some folders are refused: in the second layout
            those with images in folders that are no splits; in the first layout those
            without images directly in a class folder (or in ``root``), if there are
            several class folders, all called like splits (Training and Testing), or
            only one, with several subfolders; and those with boxes as annotations
            (COCO, YOLO or Pascal VOC).
        flag: The option that names the folder, such as "--data", for messages.

    Returns:
        The rows. Their ids are the paths relative to ``root``. The class of an image is
        the first folder below ``root``, or below the folder of its split.

    Raises:
        ConfigError: ``root`` is no folder, there are no images, a class folder has none
            (at any depth), or ``kind`` is "folder" and the folder is refused. If the
            layout is not clear, the message says which ``flag`` to give. Also if a
            folder cannot be listed, there are more than MAX_ROWS (100 million) files,
            or a link leads out of ``root`` and the options do not allow it. With
            ``images_only`` only if ``root`` is no folder, there are no images, or for
            the last three reasons.
    """
    if options.images_only:
        return read_images(root, options.follow_links)
    folders, _ = children(_require_folder(root))
    if kind == "folder":
        refuse_annotations(root)
    splits = {f"{name}/": SPLITS[name] for name in folders if name in SPLITS}
    if kind == "classes" or not (
        "train" in folders and children(join(root, "train"))[0]
    ):
        splits = {"": "train"}
    rows, others = _read_below_prefixes(
        root, f"folder:{root}", splits, options.follow_links
    )
    if others and kind == "folder":
        named = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
        ways = (
            f"if train is a class, too, give {flag} classes:{root}; if it is a split"
            " and these are to be "
        )
        ways += f"left out, {flag} splits:{root}"
        if any(name.lower() in SPLIT_WORDS for name in others):
            ways += "; if they are test images, rename their folder to test"
        raise ConfigError(
            f"{root} has train/ with subfolders, and images in {named}: {ways}"
        )
    if kind == "folder" and splits == {"": "train"}:
        _require_classes(rows, root, flag)
    return rows


SPLIT_WORDS = {*SPLITS, "training", "testing", "dev", "eval", "evaluation", "validate"}
"""Names of folders, in lower case, that seldom are classes."""


def _require_classes(rows: Rows, root: str, flag: str) -> None:
    """Refuse class folders that seem to be splits, or one folder around the classes.

    Args:
        rows: The rows of the folder. Their ids are relative paths.
        root: Path or URI of the folder.
        flag: The option that names the folder, for messages.

    Raises:
        ConfigError: All images are in subfolders of class folders, and either there is
            only one class, with images in several subfolders; or there are several
            classes, all with names in :data:`SPLIT_WORDS`, such as Training and
            Testing, in any case of letters.
    """
    classes = rows.labels.dictionary.to_pylist()
    if len(classes) != 1 and not all(name.lower() in SPLIT_WORDS for name in classes):
        return
    folders = sorted({name.rpartition("/")[0] for name in rows.ids.to_pylist()})
    inner: dict[str, list[str]] = {}
    for folder in folders:
        top, slash, rest = folder.partition("/")
        if not slash:  # images in the class folder itself, or in none
            return
        if rest.partition("/")[0] not in inner.setdefault(top, []):
            inner[top].append(rest.partition("/")[0])
    if len(classes) == 1 and len(inner[classes[0]]) > 1:
        (name,) = classes
        some = one_line(", ".join(inner[name][:3]))
        raise ConfigError(
            f"{root} has one folder, {name}, with subfolders {some}: if these are the"
            f" classes, give {flag} {join(root, name)}; if {name} is a class, {flag}"
            f" classes:{root}"
        )
    if len(classes) > 1:
        raise ConfigError(
            f"{root}: its folders {one_line(', '.join(classes))} seem to be splits:"
            f" rename them to train and test; if they are classes, give {flag}"
            f" classes:{root}"
        )


def read_images(root: str, follow_links: bool = False) -> Rows:
    """Read every image below a folder as an unlabeled row, whatever its subfolders are.

    All rows are training rows. Their ids are the paths relative to the folder. No image
    is opened. Warnings of the result count images of formats that are not read, such as
    .heic, and notes count the files that are no images. Hidden and special files are
    neither rows nor counted.

    Args:
        root: Path or URI of the folder.
        follow_links: Whether links may lead out of the folder.

    Raises:
        ConfigError: ``root`` is no folder, there are no images below it, a folder
            cannot be listed, there are more than MAX_ROWS files, or a link leads out of
            ``root`` and ``follow_links`` is False.
    """
    listing = ImageListing(root, follow_links)
    listed = ((file, None, True) for file in listing)
    return _make_rows(listed, f"folder:{root}", listing, [])


def read_two_folders(labeled: str, unlabeled: str, follow_links: bool = False) -> Rows:
    """Read the images of a folder of known classes and of a folder without labels.

    Args:
        labeled: Folder with one subfolder of images for each known class, as the user
            writes it, so it may begin with ``~``. With the prefix ``classes:`` all its
            subfolders are classes, even one called train; with ``splits:`` the
            subfolders of ``train/`` and of other splits are, if ``train/`` has any.
            Without one of these prefixes its content decides, see :func:`read_folder`.
        unlabeled: Folder whose images have no label, wherever they are below it: a path
            without ``~``, or a URI.
        follow_links: Whether links may lead out of the folders.

    Returns:
        The rows of both folders, labeled ones first. Their ids are the relative paths
        after ``labeled/`` or ``unlabeled/``. If the first folder has splits, its images
        in splits other than train are test rows. All other rows are training rows.

    Raises:
        ConfigError: A folder is missing, is a file, holds no image or cannot be listed,
            both are the same folder or one is inside the other, a link leads out of a
            folder and ``follow_links`` is False, :func:`read_folder` refuses the first
            folder, or an image that it reads is in no class folder (in a folder with
            splits it leaves images outside of them out with a warning).
    """
    kind, path = split_prefix(labeled)
    if kind not in ("classes", "splits"):
        kind, path = "folder", labeled
    labeled = filesystem.normalize_path(path)
    first, second = (
        os.path.realpath(_require_folder(folder)) + "/"
        for folder in (labeled, unlabeled)
    )
    if first.startswith(second) or second.startswith(first):
        raise ConfigError(
            f"--labeled {labeled} and --unlabeled {unlabeled} overlap; give separate"
            " folders"
        )
    options = ReadOptions(follow_links=follow_links)
    known = read_folder(labeled, options, kind, "--labeled")
    others = read_images(unlabeled, follow_links)
    loose = np.flatnonzero(class_codes(known.labels) < 0)
    if len(loose):
        found = (
            f"{plural(len(loose), 'image')} in no class subfolder, e.g."
            f" {known.ids[loose[0]].as_py()}"
        )
        raise ConfigError(f"--labeled {labeled}: {found}")
    both = known, others
    ids = pa.concat_arrays(
        [joined("", "labeled/", known.ids), joined("", "unlabeled/", others.ids)]
    )
    labels = join_labels([rows.labels for rows in both])
    images = Files.join([cast(Files, rows.images) for rows in both])
    is_train = np.concatenate([rows.is_train for rows in both])
    return Rows(
        ids,
        images,
        labels,
        is_train,
        f"folders:{labeled}+{unlabeled}",
        notes=known.notes + others.notes,
        warnings=known.warnings + others.warnings,
    )


def read_imagenet(root: str, options: ReadOptions) -> Rows:
    """Read ImageNet from folders ``train/WNID`` and, if it is there, ``val/WNID``.

    The rows of ``val`` are test rows. Images outside both folders are left out with a
    warning.

    Args:
        root: Path or URI of the folder with ``train`` and ``val``.
        options: How the source is read. With ``imagenet_split``, all classes that are
            not among the 118 held-out ones are declared known, the 30 classes of the
            split stay and are not known, and the other held-out classes are left out,
            with a note. Without it all classes are kept and none is declared known.
            With ``images_only``, every image below ``root`` is an unlabeled row
            instead, see :func:`read_images`.

    Returns:
        The rows. Their ids are the paths relative to ``root``, and all have a wnid as
        their class, also those of novel classes.

    Raises:
        ConfigError: ``root`` is no folder, there is no folder ``train``, there are no
            images, an image of ``train`` or ``val`` is in no folder with the name of a
            wnid, a folder directly in them has no images, or a split is used and the
            folder has no known or no novel class of it. Also if a folder cannot be
            listed, there are more than MAX_ROWS (100 million) files, or a link leads
            out of ``root`` and the options do not allow it.
    """
    if options.images_only:
        return read_images(root, options.follow_links)
    folders, _ = children(_require_folder(root))
    if "train" not in folders:
        raise ConfigError(
            f"imagenet:{root}: no folder train there; expected train/WNID/ and"
            " val/WNID/"
        )
    splits = {f"{name}/": SPLITS[name] for name in ("train", "val") if name in folders}
    rows, _ = _read_below_prefixes(
        root, f"imagenet:{root}", splits, options.follow_links
    )
    other = np.flatnonzero(
        class_indices(
            rows.labels, [*filter(is_wnid, rows.labels.dictionary.to_pylist())]
        )
        < 0
    )
    if len(other):
        what = "is not in a wnid subfolder such as n01440764"
        raise ConfigError(
            f"imagenet:{root}: image {rows.ids[other[0]]} {what}; move it into one, or"
            f" use folder:{root}"
        )
    split = options.imagenet_split
    if split is None:
        return rows
    held_out, novel = (
        set(imagenet_wnids("held_out_118")),
        set(imagenet_wnids(f"novel_30_{split}")),
    )
    present = present_classes(rows.labels)
    known = sorted(present - held_out)
    if not known or not present & novel:
        missing = f"novel wnid of split {split}" if known else "known wnid"
        fix = (
            "another --data.imagenet-split, or name known classes with --known-classes"
            " first:N"
        )
        raise ConfigError(
            f"{rows.source}: none of its {len(present)} classes is a {missing}; choose"
            f" {fix}"
        )
    left_out = present & held_out - novel
    kept = np.flatnonzero(class_indices(rows.labels, [*left_out]) < 0)
    note = (
        f"ignored {plural(len(left_out), 'held-out class', 'held-out classes')} not in"
        f" split {split}"
    )
    notes = (*rows.notes, note) if left_out else rows.notes
    return replace(rows.take(kept), known=tuple(known), notes=notes)


def is_wnid(name: str) -> bool:
    """Return whether a name has the form of a class id of ImageNet (n and 8 digits)."""
    return re.fullmatch(r"n[0-9]{8}", name) is not None


def imagenet_wnids(file: str) -> list[str]:
    """Return the class ids of ImageNet (wnids) in one of the package's lists.

    Args:
        file: Name of the list without an ending: "held_out_118", the classes that are
            not known in the benchmark; or "novel_30_A", "novel_30_B" or "novel_30_C",
            the novel classes of its splits.

    Returns:
        Names such as "n01440764", in the order of the list.
    """
    return (
        (resources.files("uno.data") / "imagenet_splits" / f"{file}.txt")
        .read_text("utf-8")
        .split()
    )


def _read_below_prefixes(
    root: str, source: str, splits: dict[str, str], follow_links: bool
) -> tuple[Rows, list[str]]:
    """Read the images below some prefixes, each of the class that its path names.

    Args:
        root: Path or URI of the source.
        source: Name of the source in messages.
        splits: Prefix of relative paths, such as "val/" -> "train" or "test", the split
            of its rows. The prefix '' is the whole source. Images below no prefix are
            left out with a warning.
        follow_links: Whether links may lead out of ``root``.

    Returns:
        The rows, and the names of the folders directly in ``root`` that hold images
        below no prefix. The class of an image is the first folder below its prefix. An
        image that is in no such folder is unlabeled; a note counts these images if
        there are labeled ones, too.

    Raises:
        ConfigError: ``root`` is no folder, there are no images below the prefixes, a
            folder directly below a prefix has none (at any depth), a folder cannot be
            listed, there are more than MAX_ROWS (100 million) files, or a link leads
            out of ``root`` and ``follow_links`` is False.
    """
    filled, others, warnings = set[str](), dict[str, None](), list[str]()
    listing = ImageListing(root, follow_links)

    def below() -> Iterator[tuple[FileEntry, str | None, bool]]:
        """Yield the images below the prefixes.

        This also fills ``filled`` with the paths of the class folders that have images
        (an image in no class folder adds its own path), and ``others`` with the names
        of folders that have images below no prefix. At the end it adds a warning to
        ``warnings`` if images below no prefix are left out.

        Yields:
            The file of an image, its class or None, and whether it is for training.
        """
        num_outside, example = 0, ""
        for found in listing:
            prefix = next(filter(found.relative.startswith, splits), None)
            if prefix is None:
                num_outside, example = num_outside + 1, example or found.relative
                folder, slash, _ = found.relative.partition("/")
                if slash:
                    others[valid_text(folder)] = None
                continue
            folder, slash, _ = found.relative.removeprefix(prefix).partition("/")
            filled.add(prefix + folder)
            yield (
                found,
                valid_text(folder) if slash else None,
                splits[prefix] == "train",
            )
        if num_outside:
            warnings.append(
                f"{plural(num_outside, 'image')} outside {', '.join(splits)} left out,"
                f" e.g. {one_line(repr(valid_text(example)))}: with class folders in"
                " train/ only these folders are read; move the images there or away"
            )

    rows = _make_rows(below(), source, listing, warnings)
    for prefix in splits:
        for folder in children(join(root, prefix) if prefix else root)[0]:
            if prefix + folder not in filled:
                path = valid_text(join(root, prefix + folder))
                also = "".join(f"; {line}" for line in rows.warnings)
                raise ConfigError(
                    f"class folder {path} holds no images; fill or remove it{also}"
                )
    loose, notes = rows.labels.null_count, rows.notes
    if 0 < loose < len(rows):
        notes += (f"{plural(loose, 'image')} outside class subfolders: unlabeled",)
    return replace(rows, notes=notes), [*others]


def _make_rows(
    listed: Iterable[tuple[FileEntry, str | None, bool]],
    source: str,
    listing: ImageListing,
    warnings: Sequence[str],
) -> Rows:
    """Make rows of image files. Their ids are the paths relative to the source.

    Args:
        listed: For each image its file, its class or None, and whether it is for
            training.
        source: Name of the source in messages: a prefix, a colon and the folder.
        listing: The listing that ``listed`` iterates over. Its notes and warnings go
            into the rows, or into the error.
        warnings: More warnings. ``listed`` may add to them while it is read.

    Raises:
        ConfigError: There are no images, or iterating over ``listed`` raises it: a
            folder cannot be listed, there are too many files, or a link leads out of
            the source.
    """
    parts = list[tuple[pa.Array, Files, pa.DictionaryArray, np.ndarray]]()
    for some in chunks(listed):
        found, labels, is_train = zip(*some, strict=True)
        files = Files.of([f.path for f in found], [f[2:4] for f in found])
        ids = make_ids(valid_text(f.relative) for f in found)
        parts.append((ids, files, make_labels(labels), np.array(is_train)))
    if not parts:
        root = source.partition(":")[2]
        lines = (*listing.warnings, *warnings, *listing.notes)
        also = "".join(f"; {line}" for line in lines)
        raise ConfigError(
            f"no images below {root}; looked for files ending in"
            f" {' '.join(EXTENSIONS)}{also}"
        )
    ids, images, labels, is_train = zip(*parts, strict=True)
    return Rows(
        pa.concat_arrays(ids),
        Files.join(images),
        join_labels(labels),
        np.concatenate(is_train),
        source,
        notes=listing.notes,
        warnings=(*listing.warnings, *warnings),
    )


def _suffix(name: str) -> str:
    """Return the ending of a file in lower case, by which files are counted.

    It is ``.heic`` for ``IMG_1.HEIC``, and only its first 12 characters are returned. A
    file without an ending, or with one that is not printable, gives "without a suffix".
    """
    suffix = os.path.splitext(name)[1].lower()[:12]
    return suffix if suffix.isprintable() and suffix.strip() else "without a suffix"


def _require_folder(root: str) -> str:
    """Check that a path is a folder, and return it.

    Raises:
        ConfigError: ``root`` is a file or missing, or its storage cannot be reached.
    """
    if filesystem.kind(root) != "directory":
        raise ConfigError(f"{root or '(empty path)'} is not a folder")
    return root


SOURCES = {
    **{
        name: Source(partial(read_cifar, name=name), is_downloaded=True)
        for name in LAYOUTS
    },
    "imagenet": Source(read_imagenet),
    "folder": Source(read_folder, reads_subfolders=True),
    "classes": Source(partial(read_folder, kind="classes"), reads_subfolders=True),
    "splits": Source(partial(read_folder, kind="splits"), reads_subfolders=True),
    "imagefolder": Source(read_annotated_folder, reads_subfolders=True),
    "parquet": Source(read_parquet, suffixes=(".parquet",), reads_subfolders=True),
    "table": Source(read_table, suffixes=(".csv", ".tsv", ".jsonl")),
    "tar": Source(read_tar, suffixes=(".tar",), has_patterns=True),
    VECTORS: Source(read_vectors, reads_subfolders=True),
}
"""What the user writes before the colon -> the kind of source that it names."""
