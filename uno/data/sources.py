"""Read the data source that the user names.

A source is ``digits``, a prefix and a path such as ``cifar10:DIR``, or only a path,
whose content then decides how it is read. Every source is read into
:class:`~uno.data.rows.Rows`.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import chain
from typing import Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa

from uno.config import VECTORS, DataConfig
from uno.data import files as filesystem
from uno.data.annotated_folder import has_labels, read_annotated_folder
from uno.data.cifar import LAYOUTS, read_cifar, recognize_cifar
from uno.data.columns import (
    chunks,
    class_indices,
    has_label,
    join_labels,
    joined,
    make_ids,
    make_labels,
    present_classes,
)
from uno.data.files import FileEntry, children, join, valid_text
from uno.data.image_paths import PathRules
from uno.data.images import EXTENSIONS, Files, InMemory, is_image
from uno.data.other_formats import fix_for, meaning_of
from uno.data.rows import SPLITS, Rows
from uno.data.tables import NO_NAMES, read_parquet, read_table
from uno.data.tar import read_tar
from uno.data.vectors import read_vectors
from uno.errors import ConfigError, did_you_mean, one_line
from uno.text import plural


class Remarks(NamedTuple):
    """Lines for the user about a source, which are collected while it is read.

    Attributes:
        notes: Lines about how the source was read.
        warnings: Lines about images that are left out.
    """

    notes: list[str]
    warnings: list[str]


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
    *(".jpe", ".ppm", ".pgm", ".tga", ".dcm"),
}
"""Suffixes of image formats that are not read. A warning counts such files."""


class UnreadImages:
    """Counts the files of a folder that are images of a format that is not read."""

    def __init__(self) -> None:
        self._suffixes, self._example = Counter[str](), ""

    def count(self, name: str) -> bool:
        """Count a file if it is an image of a format that is not read.

        Args:
            name: Name or relative path of the file.

        Returns:
            Whether it is such an image, by its ending.
        """
        suffix = _suffix(name)
        if suffix not in UNREAD:
            return False
        self._example = self._example or valid_text(name)
        self._suffixes[suffix] += 1
        return True

    def warnings(self, root: str) -> tuple[str, ...]:
        """Return a warning about the counted images, whose formats are not read.

        Args:
            root: The folder that holds them, as the warning names it.

        Returns:
            One line, or nothing if no image was counted.
        """
        if not self._suffixes:
            return ()
        what = f"{plural(self._suffixes.total(), 'image')} left out below {root}"
        formats = ", ".join(sorted(self._suffixes))
        example = one_line(repr(self._example))
        return (
            (
                f"{what}, e.g. {example}: {formats} files are not read; save them as"
                " JPEG or PNG"
            ),
        )


class Source(NamedTuple):
    """A kind of data source: how it is read, and how it is recognized.

    Attributes:
        read: Reads the rows. Its arguments are the path, the section ``data`` of the
            configuration, and whether the rows are only to be predicted, so that labels
            and splits need not be read.
        suffixes: Endings of the files that are of this kind.
        in_folders: Whether a folder with such files is of this kind: "never"; "alone"
            if there are no images in it; or "always".
        may_lack: Returns whether a path is accepted although it is neither a file nor a
            folder, for example because the data is downloaded there. Its arguments are
            the path and the section ``data``.
    """

    read: Callable[[str, DataConfig, bool], Rows]
    suffixes: tuple[str, ...] = ()
    in_folders: Literal["never", "alone", "always"] = "never"
    may_lack: Callable[[str, DataConfig], bool] = lambda path, config: False


def _cifar(name: str) -> Source:
    """Make the kind of source for "cifar10" or "cifar100".

    Its path may be missing if the configuration allows to download the data.
    """
    return Source(
        lambda path, config, _: read_cifar(name, path, config.download),
        may_lack=lambda path, config: config.download,
    )


def _folder(kind: str) -> Source:
    """Make the kind of source for a folder whose subfolders are classes.

    Every image below it is predicted, whatever its subfolders are.

    Args:
        kind: "folder", "classes" or "splits", as :func:`read_folder` takes it.
    """
    return Source(
        lambda path, config, images_only: (
            read_images(path, config.follow_links)
            if images_only
            else read_folder(path, kind, follow_links=config.follow_links)
        )
    )


SOURCES = {
    **{name: _cifar(name) for name in LAYOUTS},
    "imagenet": Source(
        lambda path, config, images_only: (
            read_images(path, config.follow_links)
            if images_only
            else read_imagenet(
                path,
                config.imagenet_split,
                config.known_classes is None,
                config.follow_links,
            )
        )
    ),
    "folder": _folder("folder"),
    "classes": _folder("classes"),
    "splits": _folder("splits"),
    "imagefolder": Source(
        lambda path, config, images_only: read_annotated_folder(
            path, config.named_columns, PathRules.of(config), images_only
        )
    ),
    "parquet": Source(
        lambda path, config, images_only: read_parquet(
            path, config.named_columns, PathRules.of(config), images_only=images_only
        ),
        suffixes=(".parquet",),
        in_folders="always",
    ),
    "table": Source(
        lambda path, config, images_only: read_table(
            path, config.named_columns, PathRules.of(config), images_only=images_only
        ),
        suffixes=(".csv", ".tsv", ".jsonl"),
    ),
    "tar": Source(
        lambda path, config, images_only: read_tar(
            path, images_only, config.follow_links
        ),
        suffixes=(".tar",),
        in_folders="alone",
        may_lack=lambda path, config: not {"*", "{"}.isdisjoint(path),  # a pattern
    ),
    VECTORS: Source(
        lambda path, config, images_only: read_vectors(
            path, config.named_columns, images_only, PathRules.of(config)
        )
    ),
}


def read_rows(config: DataConfig, images_only: bool = False) -> Rows:
    """Read the rows that the configuration names.

    Args:
        config: The section ``data`` of the configuration. The folders ``labeled`` and
            ``unlabeled`` are read if both are given, else ``source``.
        images_only: Whether the rows are only to be predicted, so that labels and
            splits need not be read. It has no effect on the two folders.

    Returns:
        The rows, with class names in one Unicode normalization.

    Raises:
        ConfigError: The source is missing, unknown, damaged, or holds no images.
    """
    if config.labeled is not None and config.unlabeled is not None:
        return read_two_folders(
            config.labeled,
            filesystem.normalize_path(config.unlabeled),
            config.follow_links,
        ).with_composed_names()
    kind, path = locate_source(config)
    rows = (
        read_digits()
        if kind == "digits"
        else SOURCES[kind].read(path, config, images_only)
    )
    return rows.with_composed_names()


def locate_source(config: DataConfig) -> tuple[str, str]:
    """Return the kind of the data source that the user names, and its path.

    Args:
        config: The section ``data`` of the configuration. Its ``source`` is "digits", a
            prefix and a path such as ``tar:DIR``, or only a path.

    Returns:
        "digits" or a key of :data:`SOURCES`; and the path or URI, '' for the digits.

    Raises:
        ConfigError: The prefix is unknown, there is nothing at the path, or the file at
            the path has another format.
    """
    source = config.source.strip()
    if source == "digits":
        return source, ""
    prefix, path = "", source
    match = re.match(r"([A-Za-z][\w-]*):(?!//)(.*)", source, re.DOTALL)
    if match and not os.path.exists(source):
        prefix, path = match.groups()
        if prefix not in SOURCES:
            known = f"choose from digits, {':, '.join(SOURCES)}:"
            hint = did_you_mean(
                prefix.lower(), SOURCES, known, lambda near: f"{near}:{path}"
            )
            raise ConfigError(f"unknown data source {prefix + ':'!r}{hint}")
    path = filesystem.normalize_path(path)
    may_lack = prefix in SOURCES and SOURCES[prefix].may_lack(path, config)
    if filesystem.kind(path) == "missing" and not may_lack:
        names = {name: repr(f"{name}:DIR") for name in SOURCES} | {
            "digits": repr("digits")
        }
        hint = did_you_mean(source.lower(), names, show=names.__getitem__)
        raise ConfigError(
            f"data source {source!r}: no such file or folder {path!r}{hint}"
        )
    return prefix or recognize(path, config.follow_links, config.named_columns), path


def recognize(
    path: str, follow_links: bool = False, names: Mapping[str, str] = NO_NAMES
) -> str:
    """Return the kind of source that an existing file or folder is, by its content.

    Args:
        path: Path or URI of the file or folder.
        follow_links: Whether links may lead out of the folder.
        names: Standard name of a column, such as "label" -> its name in the source.

    Returns:
        A key of :data:`SOURCES`. A folder without any known layout is a "folder".

    Raises:
        ConfigError: The file has an ending of no kind, or the folder holds both CIFAR10
            and CIFAR100.
    """
    if filesystem.kind(path) == "file":
        kind = _kind_of(filesystem.split(path)[1].lower())
        if kind is None:
            *others, last = chain.from_iterable(
                source.suffixes for source in SOURCES.values()
            )
            fix = f"; this is {fix_for(path)}" if fix_for(path) else ""
            raise ConfigError(
                f"{path}: a file source must end in {', '.join(others)} or {last}{fix}"
            )
        return kind
    folders, files = children(path)
    cifar = recognize_cifar(folders, files)
    if len(cifar) > 1:
        raise ConfigError(
            f"{path} holds CIFAR10 and CIFAR100; say which: cifar10:{path} or"
            f" cifar100:{path}"
        )
    if cifar:
        return cifar[0]
    always = next(
        (kind for kind in map(_kind_of, files) if _in_folders(kind) == "always"), None
    )
    if always is not None:
        return always
    if has_labels(path, names):
        return "imagefolder"
    train = children(join(path, "train"))[0] if "train" in folders else []
    if train:
        return "imagenet" if all(is_wnid(name) for name in train) else "folder"
    alone, holds_images = None, False
    for found in filesystem.files_below(path, follow_links):
        kind = _kind_of(found.relative)
        if kind is not None and _in_folders(kind) == "always":
            return kind
        alone = kind if _in_folders(kind) == "alone" else alone
        holds_images = holds_images or is_image(found.relative)
    return "folder" if alone is None or holds_images else alone


def _kind_of(name: str) -> str | None:
    """Return the kind of source that a file is by its ending.

    Args:
        name: Name of the file, in lower case.

    Returns:
        A key of :data:`SOURCES`, such as "table" for ``.csv``; None if there is no kind
        with this ending.
    """
    return next(
        (kind for kind, source in SOURCES.items() if name.endswith(source.suffixes)),
        None,
    )


def _in_folders(kind: str | None) -> str:
    """Return when a folder with files of a kind is of this kind.

    Args:
        kind: A key of :data:`SOURCES`, or None for other files.

    Returns:
        "never", "alone" (if there are no images in the folder) or "always"; "never" for
        None.
    """
    return "never" if kind is None else SOURCES[kind].in_folders


@cache
def read_digits() -> Rows:
    """Return scikit-learn's 1,797 handwritten digits, with pixels uint8 (8, 8, 3).

    In every class each fifth digit is a test row, the others are training rows.
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
    root: str, kind: str = "folder", flag: str = "--data", follow_links: bool = False
) -> Rows:
    """Read a folder whose subfolders are classes.

    The layout is either ``CLASS/...`` with training images only; or, if there is a
    folder ``train`` with subfolders, ``train/CLASS/...`` and the same for the other
    names of splits in :data:`~uno.data.rows.SPLITS`. Images in no class folder are
    unlabeled.

    Args:
        root: Path or URI of the folder.
        kind: "classes" for the first layout, even if a class is called train; "splits"
            for the second one if it is there, where images outside the splits are left
            out; "folder" decides between them and refuses folders that could be either.
        flag: The option that names the folder, for messages.
        follow_links: Whether links may lead out of the folder.

    Raises:
        ConfigError: There are no images, a class folder has none, or the layout is not
            clear. The message then says which ``flag`` to give.
    """
    folders, _ = children(_directory(root))
    splits = {f"{name}/": SPLITS[name] for name in folders if name in SPLITS}
    if kind == "classes" or not (
        "train" in folders and children(join(root, "train"))[0]
    ):
        splits = {"": "train"}
    rows, others = _labeled(root, f"folder:{root}", splits, follow_links)
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
        ConfigError: The only class has several subfolders and no image beside them; or
            there are several classes, all with subfolders only and with names such as
            Training and Testing.
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

    Args:
        root: Path or URI of the folder.
        follow_links: Whether links may lead out of the folder.

    Raises:
        ConfigError: ``root`` is no folder, or there are no images below it.
    """
    remarks = Remarks([], [])
    listed = ((found, None, True) for found in _images(root, remarks, follow_links))
    return _rows(listed, f"folder:{root}", remarks)


def read_two_folders(labeled: str, unlabeled: str, follow_links: bool = False) -> Rows:
    """Read the images of a folder of known classes and of a folder without labels.

    Args:
        labeled: Folder with one subfolder of images for each known class. The prefixes
            ``classes:`` and ``splits:`` force how its subfolders are read, as in
            ``--data``.
        unlabeled: Folder whose images have no label, wherever they are below it.
        follow_links: Whether links out of the folders are followed.

    Returns:
        The rows of both folders, labeled ones first. Their ids are the relative paths
        after ``labeled/`` or ``unlabeled/``.

    Raises:
        ConfigError: A folder is missing or holds no image, one folder is inside the
            other, or an image of the first folder is in no class folder.
    """
    match = re.match(r"(classes|splits):(?!//)(.*)", labeled, re.DOTALL)
    kind, labeled = (
        match.groups() if match and not os.path.exists(labeled) else ("folder", labeled)
    )
    labeled = filesystem.normalize_path(labeled)
    first, second = (
        os.path.realpath(_directory(folder)) + "/" for folder in (labeled, unlabeled)
    )
    if first.startswith(second) or second.startswith(first):
        raise ConfigError(
            f"--labeled {labeled} and --unlabeled {unlabeled} overlap; give separate"
            " folders"
        )
    known = read_folder(labeled, kind, "--labeled", follow_links)
    others = read_images(unlabeled, follow_links)
    loose = np.flatnonzero(~has_label(known.labels))
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


def read_imagenet(
    root: str, split: str, use_split: bool, follow_links: bool = False
) -> Rows:
    """Read ImageNet from folders ``train/WNID`` and, if it is there, ``val/WNID``.

    Args:
        root: Path or URI of the folder with ``train`` and ``val``.
        split: "A", "B" or "C", the 30 novel classes of the benchmark.
        use_split: Whether the split decides the classes. All classes that are not among
            the 118 held-out ones are then known, the 30 classes of ``split`` are novel,
            and the other held-out classes are left out. Otherwise all classes are kept
            and none is declared known.
        follow_links: Whether links may lead out of the folder.

    Raises:
        ConfigError: The layout is another one, or a split is used and the folder has no
            known or no novel class of it.
    """
    folders, _ = children(_directory(root))
    if "train" not in folders:
        raise ConfigError(
            f"imagenet:{root}: no folder train there; expected train/WNID/ and"
            " val/WNID/"
        )
    splits = {f"{name}/": SPLITS[name] for name in ("train", "val") if name in folders}
    rows, _ = _labeled(root, f"imagenet:{root}", splits, follow_links)
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
    if not use_split:
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
    """Return whether a name has the form of a class id of ImageNet, as n01440764."""
    return re.fullmatch(r"n[0-9]{8}", name) is not None


def imagenet_wnids(file: str) -> list[str]:
    """Return the class ids of ImageNet (wnids) in one of the package's lists.

    Args:
        file: Name of the list, such as "held_out_118" or "novel_30_A".
    """
    return (
        (resources.files("uno.data") / "imagenet_splits" / f"{file}.txt")
        .read_text("utf-8")
        .split()
    )


def _labeled(
    root: str, source: str, splits: dict[str, str], follow_links: bool
) -> tuple[Rows, list[str]]:
    """Read the images of class folders that are below some prefixes.

    Args:
        root: Path or URI of the source.
        source: Name of the source in messages.
        splits: Prefix of relative paths -> "train" or "test". The prefix '' is the
            whole source. Images below no prefix are left out with a warning.
        follow_links: Whether links may lead out of ``root``.

    Returns:
        The rows, and the names of other folders of ``root`` that hold images. An image
        that is in no folder below its prefix is unlabeled.

    Raises:
        ConfigError: There are no images, or a class folder has none.
    """
    filled, remarks, others = set[str](), Remarks([], []), dict[str, None]()

    def below() -> Iterator[tuple[FileEntry, str | None, bool]]:
        """Yield each image with its class, or None, and whether it is for training.

        This also fills ``filled`` with the class folders, and ``others`` with folders
        outside the splits. At the end it warns of images that are left out.
        """
        num_outside, example = 0, ""
        for found in _images(root, remarks, follow_links):
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
            remarks.warnings.append(
                f"{plural(num_outside, 'image')} outside {', '.join(splits)} left out,"
                f" e.g. {one_line(repr(valid_text(example)))}: with class folders in"
                " train/ only these folders are read; move the images there or away"
            )

    rows = _rows(below(), source, remarks)
    for prefix in splits:
        for folder in children(join(root, prefix) if prefix else root)[0]:
            if prefix + folder not in filled:
                path = valid_text(join(root, prefix + folder))
                also = "".join(f"; {line}" for line in remarks.warnings)
                raise ConfigError(
                    f"class folder {path} holds no images; fill or remove it{also}"
                )
    loose = rows.labels.null_count
    if 0 < loose < len(rows):
        remarks.notes.append(
            f"{plural(loose, 'image')} outside class subfolders: unlabeled"
        )
    return replace(rows, notes=tuple(remarks.notes)), [*others]


def _rows(
    listed: Iterable[tuple[FileEntry, str | None, bool]], source: str, remarks: Remarks
) -> Rows:
    """Make rows of image files.

    Args:
        listed: For each image its file, its class or None, and whether it is for
            training.
        source: Name of the source in messages: a prefix, a colon and the folder.
        remarks: Lines for the user. They are complete when ``listed`` is exhausted.

    Raises:
        ConfigError: There are no images.
    """
    parts = list[tuple[pa.Array, Files, pa.DictionaryArray, np.ndarray]]()
    for some in chunks(listed):
        found, labels, is_train = zip(*some, strict=True)
        files = Files.of([f.path for f in found], [f[2:4] for f in found])
        ids = make_ids(valid_text(f.relative) for f in found)
        parts.append((ids, files, make_labels(labels), np.array(is_train)))
    if not parts:
        root = source.partition(":")[2]
        also = "".join(f"; {line}" for line in remarks.warnings + remarks.notes)
        raise ConfigError(
            f"no images below {root}; looked for files ending in"
            f" {' '.join(EXTENSIONS)}{also}"
        )
    names, images, classes, train = zip(*parts, strict=True)
    columns = (
        pa.concat_arrays(names),
        Files.join(images),
        join_labels(classes),
        np.concatenate(train),
    )
    return Rows(
        *columns, source, notes=tuple(remarks.notes), warnings=tuple(remarks.warnings)
    )


def _images(root: str, remarks: Remarks, follow_links: bool) -> Iterator[FileEntry]:
    """Yield the images below a folder.

    Args:
        root: Path or URI of the folder.
        remarks: At the end this adds a warning about images of formats that are not
            read, and a note about other files.
        follow_links: Whether links may lead out of ``root``.

    Raises:
        ConfigError: ``root`` is no folder.
    """
    others, unread = Counter[str](), UnreadImages()
    for found in filesystem.walk(_directory(root), follow_links):
        if is_image(found.relative):
            yield found
        elif not unread.count(found.relative):
            others[_suffix(found.relative)] += 1
    remarks.warnings.extend(unread.warnings(root))
    if others:
        most = others.most_common(8)
        named = ", ".join(
            f"{number:,} {suffix}{meaning_of(suffix)}" for suffix, number in most
        )
        more = ", ..." if len(others) > 8 else ""
        remarks.notes.append(
            f"ignored {plural(others.total(), 'file')} below {root}: {named}{more}"
        )


def _suffix(name: str) -> str:
    """Return the ending of a file in lower case, for a message.

    It has at most 12 characters, such as ``.heic`` for ``IMG_1.HEIC``. A file without a
    printable ending gives "without a suffix".
    """
    suffix = os.path.splitext(name)[1].lower()[:12]
    return suffix if suffix.isprintable() and suffix.strip() else "without a suffix"


def _directory(root: str) -> str:
    """Return the path ``root`` itself, if it is a folder.

    Raises:
        ConfigError: ``root`` is a file or missing.
    """
    if filesystem.kind(root) != "directory":
        raise ConfigError(f"{root or '(empty path)'} is not a folder")
    return root
