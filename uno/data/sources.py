"""What the user names -> Rows: ``digits``, ``cifar10:DIR``, ``folder:DIR``, or a path and its content."""

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import resources

import numpy as np
import pyarrow as pa

from uno.config import DataConfig
from uno.data import files as filesystem
from uno.data.cifar import CIFAR10, CIFAR100, read_cifar
from uno.data.files import Found, children, join, shown
from uno.data.rows import SPLITS, Files, Rows
from uno.data.tables import read_parquet, read_table
from uno.errors import ConfigError

Reader = Callable[[str, DataConfig], Rows]

READERS: dict[str, Reader] = {
    "cifar10": lambda path, config: read_cifar(CIFAR10, path, config.download),
    "cifar100": lambda path, config: read_cifar(CIFAR100, path, config.download),
    "imagenet": lambda path, config: read_imagenet(path, config.imagenet_split, config.known_classes is None),
    "folder": lambda path, config: read_folder(path),
    "parquet": lambda path, config: read_parquet(
        path, config.named_columns, lazy=config.ingest == "streaming"
    ),
    "table": lambda path, config: read_table(path, config.named_columns),
}
INPUT_READERS: dict[str, Reader] = READERS | {
    "table": lambda path, config: read_table(path, config.named_columns, images_only=True),
}
"""How to read what is only to be predicted, where it is read whole: labels and splits mean nothing there."""
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def read_rows(config: DataConfig, readers: dict[str, Reader] = READERS) -> Rows:
    """The rows of ``config.source``, or of the folders ``labeled`` and ``unlabeled`` where given."""
    if config.labeled is not None and config.unlabeled is not None:
        return read_two_folders(filesystem.normal(config.labeled), filesystem.normal(config.unlabeled))
    reader, path = locate_source(config)
    return read_digits() if reader == "digits" else readers[reader](path, config)


def locate_source(config: DataConfig) -> tuple[str, str]:
    """The name of the reader of ``config.source``, and the path it reads."""
    source = config.source.strip()
    if source == "digits":
        return source, ""
    prefix, path = "", source
    match = re.match(r"([A-Za-z][\w-]*):(?!//)(.*)", source, re.DOTALL)
    if match and not os.path.exists(source):
        prefix, path = match.groups()
        if prefix not in READERS:
            near = difflib.get_close_matches(prefix.lower(), READERS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}:{path}?" if near else f"known are digits, {':, '.join(READERS)}:"
            raise ConfigError(f"unknown data source {prefix + ':'!r}; {hint}")
    path = filesystem.normal(path)
    if filesystem.kind(path) == "missing" and not (config.download and prefix in ("cifar10", "cifar100")):
        near = difflib.get_close_matches(source.lower(), ["digits", *READERS], n=1, cutoff=0.6)
        hint = f"; did you mean {near[0] + ('' if near[0] == 'digits' else ':DIR')!r}?" if near else ""
        raise ConfigError(f"data source {source!r}: no such file or folder {path!r}{hint}")
    return prefix or recognise(path), path


def recognise(path: str) -> str:
    """Name of the reader for an existing file or folder, by its content."""
    if filesystem.kind(path) == "file":
        suffix = os.path.splitext(filesystem.split(path)[1])[1].lower()
        if suffix not in (".parquet", ".csv", ".jsonl"):
            raise ConfigError(f"{path}: a file source must end in .parquet, .csv or .jsonl")
        return "parquet" if suffix == ".parquet" else "table"
    folders, files = children(path)
    cifar = [c.prefix for c in (CIFAR10, CIFAR100) if c.folder in folders or {c.meta, *c.train} <= set(files)]
    if len(cifar) > 1:
        raise ConfigError(f"{path} holds CIFAR10 and CIFAR100; say which: cifar10:{path} or cifar100:{path}")
    if cifar:
        return cifar[0]
    if any(name.endswith(".parquet") for name in files):
        return "parquet"
    train = children(join(path, "train"))[0] if "train" in folders else []
    if train and all(is_wnid(name) for name in train):
        return "imagenet"
    if not train and any(f.relative.endswith(".parquet") for f in filesystem.files_below(path)):
        return "parquet"
    return "folder"


def read_digits() -> Rows:
    """scikit-learn's 1,797 handwritten digits as uint8 (8,8,3); every fifth of a class is a test row."""
    from sklearn.datasets import load_digits  # imported here: it takes a second

    digits = load_digits()
    grey = np.round(digits.images * 255 / 16).astype(np.uint8)
    split = np.full(len(grey), "train")
    for value in range(10):
        split[np.flatnonzero(digits.target == value)[4::5]] = "test"
    ids, images = [f"digits-{i:04d}" for i in range(len(grey))], np.repeat(grey[..., None], 3, axis=3)
    return Rows(ids, images, [str(value) for value in digits.target], split, "digits")


def read_folder(root: str) -> Rows:
    """Class subfolders of ``root``, or of its train/ and test/ (or val/); loose images are unlabeled."""
    folders, _ = children(_directory(root))
    splits = {"": "train"}
    if "train" in folders and children(join(root, "train"))[0]:
        splits = {f"{name}/": SPLITS[name] for name in folders if name in SPLITS}
    return _labeled(root, f"folder:{root}", splits)


def read_images(root: str) -> Rows:
    """Every image below ``root``, unlabeled; names of folders mean nothing."""
    images, notes = _images(root)
    return _rows([(found, None, "train") for found in images], f"folder:{root}", *notes)


def read_two_folders(labeled: str, unlabeled: str) -> Rows:
    """``labeled`` as :func:`read_folder` without loose images; ``unlabeled``: any images below it."""
    first, second = (os.path.realpath(_directory(folder)) + "/" for folder in (labeled, unlabeled))
    if first.startswith(second) or second.startswith(first):
        raise ConfigError(f"--labeled {labeled} and --unlabeled {unlabeled} overlap; give separate folders")
    known, others = read_folder(labeled), read_images(unlabeled)
    loose = [name for name, label in zip(known.ids, known.labels, strict=True) if label is None]
    if loose:
        found = f"{len(loose)} images are in no class subfolder, e.g. {loose[0]}"
        raise ConfigError(f"--labeled {labeled}: {found}")
    files = [rows.images for rows in (known, others) if isinstance(rows.images, Files)]
    images = Files(pa.concat_arrays([f.column for f in files]), np.concatenate([f.sizes for f in files]))
    ids = [f"labeled/{name}" for name in known.ids] + [f"unlabeled/{name}" for name in others.ids]
    labels, split = known.labels + others.labels, np.concatenate([known.split, others.split])
    notes = known.notes + others.notes
    return Rows(ids, images, labels, split, f"folders:{labeled}+{unlabeled}", notes=notes)


def read_imagenet(root: str, split: str, use_split: bool) -> Rows:
    """train/ and val/ with wnid subfolders. ``use_split``: the novel classes are those of ``split`` 'A', 'B'
    or 'C', the known ones all that are not held out; else all are kept and none is declared known.
    """
    folders, _ = children(_directory(root))
    if "train" not in folders:
        raise ConfigError(f"imagenet:{root}: no folder train there; expected train/WNID/ and val/WNID/")
    splits = {f"{name}/": SPLITS[name] for name in ("train", "val") if name in folders}
    rows = _labeled(root, f"imagenet:{root}", splits)
    for name, label in zip(rows.ids, rows.labels, strict=True):
        if label is None or not is_wnid(label):
            what = f"image {name} is not in a wnid subfolder such as n01440764"
            raise ConfigError(f"imagenet:{root}: {what}; sort it into one, or use folder:{root}")
    if not use_split:
        return rows
    held_out, novel = set(imagenet_wnids("held_out_118")), set(imagenet_wnids(f"novel_30_{split}"))
    present = set(rows.labels)
    known = sorted(label for label in present - held_out if label is not None)
    if not known or not present & novel:
        missing = f"novel wnid of split {split}" if known else "known wnid"
        fix = "another --data.imagenet-split, or name known classes with --known-classes first:N"
        raise ConfigError(f"{rows.source}: none of its {len(present)} classes is a {missing}; choose {fix}")
    left_out = present & held_out - novel
    kept = np.flatnonzero([label not in left_out for label in rows.labels])
    note = f"{len(left_out)} held-out classes that are not in split {split} are left out"
    notes = (*rows.notes, note) if left_out else rows.notes
    return replace(rows.take(kept), known=tuple(known), notes=notes)


def is_wnid(name: str) -> bool:
    """Whether ``name`` looks like n01440764."""
    return re.fullmatch(r"n[0-9]{8}", name) is not None


def imagenet_wnids(file: str) -> list[str]:
    """The wnids of one of the package's lists, e.g. 'held_out_118' or 'novel_30_A'."""
    return (resources.files("uno.data") / "imagenet_splits" / f"{file}.txt").read_text("utf-8").split()


def _labeled(root: str, source: str, splits: dict[str, str]) -> Rows:
    """Rows below the folders ``splits`` ({prefix: 'train' or 'test'}); the next folder name is the class."""
    (images, notes), filled = _images(root), set()
    kept: list[tuple[Found, str | None, str]] = []
    for found in images:
        for prefix, split in splits.items():
            if found.relative.startswith(prefix):
                folder, slash, _ = found.relative.removeprefix(prefix).partition("/")
                filled.add(prefix + folder)
                kept.append((found, shown(folder) if slash else None, split))
    for prefix in splits if kept else ():
        for folder in children(join(root, prefix) if prefix else root)[0]:
            if prefix + folder not in filled:
                path = shown(join(root, prefix + folder))
                raise ConfigError(f"class folder {path} holds no images; fill or remove it")
    if len(kept) < len(images):
        notes.append(f"{len(images) - len(kept)} images outside {', '.join(splits)} are left out")
    loose = sum(label is None for _, label, _ in kept)
    if 0 < loose < len(kept):
        notes.append(f"{loose} images outside class subfolders are unlabeled")
    return _rows(kept, source, *notes)


def _rows(kept: list[tuple[Found, str | None, str]], source: str, *notes: str) -> Rows:
    """Rows of (file, label, split) each."""
    if not kept:
        root = source.partition(":")[2]
        also = "".join(f"; {note}" for note in notes)
        raise ConfigError(f"no images below {root}; looked for files ending in {' '.join(EXTENSIONS)}{also}")
    found, labels, split = zip(*kept, strict=True)
    ids = [shown(f.relative) for f in found]
    images = Files.of([f.path for f in found], [f.size for f in found])
    return Rows(ids, images, list(labels), np.array(split), source, notes=notes)


def is_image(name: str) -> bool:
    """Whether a file's name ends as that of an image."""
    return name.lower().endswith(EXTENSIONS)


def _images(root: str) -> tuple[list[Found], list[str]]:
    """Images below ``root``, and a note on what else is there."""
    files = filesystem.walk(_directory(root))
    images = [f for f in files if is_image(f.relative)]
    others = Counter(_suffix(f.relative) for f in files if not is_image(f.relative))
    if not others:
        return images, []
    most = others.most_common(8)
    named = ", ".join(f"{number:,} {suffix}{OTHERS.get(suffix, '')}" for suffix, number in most)
    more = ", ..." if len(others) > 8 else ""
    return images, [f"{others.total():,} files below {root} are left out: {named}{more}"]


PHOTOGRAPHS, VIDEO = " (photographs; save them as JPEG)", " (video; take still images)"
OTHERS = {
    **dict.fromkeys((".heic", ".heif", ".avif", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf"), PHOTOGRAPHS),
    **dict.fromkeys((".mov", ".mp4", ".m4v", ".avi", ".mkv", ".webm", ".3gp"), VIDEO),
}
"""What to do with files that hold pictures and that nothing here decodes."""


def _suffix(name: str) -> str:
    """``.heic`` of ``IMG_1.HEIC``, fit for a terminal."""
    suffix = os.path.splitext(name)[1].lower()[:12]
    return suffix if suffix.isprintable() and suffix.strip() else "without a suffix"


def _directory(root: str) -> str:
    if filesystem.kind(root) != "directory":
        raise ConfigError(f"{root or '(empty path)'} is not a folder")
    return root
