"""Folders of images: class subfolders, train/ + test/, two folders, and the ImageNet layout."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources

import numpy as np

from uno.data import files as filesystem
from uno.data.files import Found, shown
from uno.data.rows import Files, Rows
from uno.errors import ConfigError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SPLIT_FOLDERS = {"train": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}


def read_folder(root: str) -> Rows:
    """Class subfolders of ``root``, or of its train/ and test/ (or val/); loose images are unlabeled.

    Raises:
        ConfigError: no images, or a class folder without any.
    """
    folders, _ = filesystem.children(_directory(root))
    splits = {"": "train"}
    if "train" in folders and filesystem.children(filesystem.join(root, "train"))[0]:
        splits = {f"{name}/": SPLIT_FOLDERS[name] for name in folders if name in SPLIT_FOLDERS}
    return _read(root, f"folder:{root}", splits)


def read_images(root: str) -> Rows:
    """Every image below ``root``, unlabeled; names of folders mean nothing.

    Raises:
        ConfigError: no images.
    """
    found = _images(root)
    if not found:
        raise _no_images(root)
    files = Files([f.path for f in found], np.array([f.size for f in found], dtype=np.int64))
    ids = [shown(f.relative) for f in found]
    return Rows(ids, files, [None] * len(ids), np.full(len(ids), "train"), f"folder:{root}")


def read_two_folders(labeled: str, unlabeled: str) -> Rows:
    """``labeled`` as :func:`read_folder` without loose images; ``unlabeled``: any images below it.

    Raises:
        ConfigError: as read_folder, loose images in ``labeled``, or one folder inside the other.
    """
    first, second = (os.path.realpath(_directory(folder)) + "/" for folder in (labeled, unlabeled))
    if first.startswith(second) or second.startswith(first):
        raise ConfigError(f"--labeled {labeled} and --unlabeled {unlabeled} overlap; give separate folders")
    known = read_folder(labeled)
    loose = [name for name, label in zip(known.ids, known.labels, strict=True) if label is None]
    if loose:
        raise ConfigError(
            f"--labeled {labeled}: {len(loose)} images are in no class subfolder, e.g. {loose[0]}"
        )
    others = _images(unlabeled)
    if not others:
        raise _no_images(unlabeled)
    source = f"folders:{labeled}+{unlabeled}"
    ids = [f"labeled/{name}" for name in known.ids] + [f"unlabeled/{shown(f.relative)}" for f in others]
    assert isinstance(known.images, Files)
    paths = known.images.paths + [f.path for f in others]
    sizes = np.concatenate([known.images.sizes, [f.size for f in others]])
    split = np.concatenate([known.split, np.full(len(others), "train")])
    labels = known.labels + [None] * len(others)
    return Rows(ids, Files(paths, sizes), labels, split, source, notes=known.notes)


def read_imagenet(root: str, split: str, use_split: bool) -> Rows:
    """train/ and val/ with wnid subfolders. With ``use_split``: known = not held out, novel = a subset.

    Args:
        root: the folder that holds train/.
        split: 'A', 'B' or 'C', the novel subset.
        use_split: False keeps all classes and declares none known (benchmark with known_classes).

    Raises:
        ConfigError: another layout, or no known or no novel wnid present.
    """
    folders, _ = filesystem.children(_directory(root))
    if "train" not in folders:
        raise ConfigError(f"imagenet:{root}: no folder train there; expected train/WNID/ and val/WNID/")
    splits = {f"{name}/": SPLIT_FOLDERS[name] for name in ("train", "val") if name in folders}
    rows = _read(root, f"imagenet:{root}", splits)
    for name, label in zip(rows.ids, rows.labels, strict=True):
        if label is None or not is_wnid(label):
            raise ConfigError(
                f"imagenet:{root}: image {name} is not in a wnid subfolder such as n01440764; "
                f"sort it into one, or use folder:{root}"
            )
    return _imagenet_split(rows, split) if use_split else rows


def is_wnid(name: str) -> bool:
    """Whether ``name`` looks like n01440764."""
    return re.fullmatch(r"n[0-9]{8}", name) is not None


def imagenet_wnids(file: str) -> list[str]:
    """The wnids of one of the package's lists, e.g. 'held_out_118' or 'novel_30_A'."""
    text = resources.files("uno.data").joinpath("imagenet_splits", f"{file}.txt").read_text("utf-8")
    return text.split()


def _imagenet_split(rows: Rows, split: str) -> Rows:
    held_out, novel = set(imagenet_wnids("held_out_118")), set(imagenet_wnids(f"novel_30_{split}"))
    present = {label for label in rows.labels if label is not None}
    known = sorted(present - held_out)
    if not known or not present & novel:
        missing = f"novel wnid of split {split}" if known else "known wnid"
        raise ConfigError(
            f"{rows.source}: none of its {len(present)} classes is a {missing}; choose another "
            "--data.imagenet-split, or name known classes with --known-classes first:N"
        )
    left_out = present & held_out - novel
    kept = np.flatnonzero([label not in left_out for label in rows.labels])
    note = f"{len(left_out)} held-out classes that are not in split {split} are left out"
    notes = (*rows.notes, note) if left_out else rows.notes
    return replace(rows.take(kept), known=tuple(known), notes=notes)


def _read(root: str, source: str, splits: dict[str, str]) -> Rows:
    """Rows below the folders ``splits`` ({prefix: 'train' or 'test'}); the next folder name is the class."""
    images = _images(root)
    ids, labels, split, kept = [], [], [], []
    for found in images:
        prefix = next((p for p in splits if found.relative.startswith(p)), None)
        if prefix is None:
            continue
        folder, slash, _ = found.relative.removeprefix(prefix).partition("/")
        kept.append(found)
        ids.append(shown(found.relative))
        labels.append(shown(folder) if slash else None)
        split.append(splits[prefix])
    if not kept:
        raise _no_images(root)
    _check_empty(root, splits, ids)
    notes = []
    if len(kept) < len(images):
        notes.append(f"{len(images) - len(kept)} images outside {', '.join(splits)} are left out")
    if None in labels and any(labels):
        notes.append(f"{labels.count(None)} images outside class subfolders are unlabeled")
    sizes = np.array([f.size for f in kept], dtype=np.int64)
    files = Files([f.path for f in kept], sizes)
    return Rows(ids, files, labels, np.array(split), source, notes=tuple(notes))


def _check_empty(root: str, splits: dict[str, str], ids: Sequence[str]) -> None:
    for prefix in splits:
        filled = {name.removeprefix(prefix).partition("/")[0] for name in ids if name.startswith(prefix)}
        for folder in filesystem.children(filesystem.join(root, prefix) if prefix else root)[0]:
            if shown(folder) not in filled:
                path = filesystem.join(root, prefix + folder)
                raise ConfigError(f"class folder {path} holds no images; fill or remove it")


def _images(root: str) -> list[Found]:
    return [f for f in filesystem.walk(_directory(root)) if f.relative.lower().endswith(EXTENSIONS)]


def _directory(root: str) -> str:
    if filesystem.kind(root) != "directory":
        raise ConfigError(f"{root or '(empty path)'} is not a folder")
    return root


def _no_images(root: str) -> ConfigError:
    return ConfigError(f"no images below {root}; looked for files ending in {' '.join(EXTENSIONS)}")
