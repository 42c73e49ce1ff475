"""Which classes are known and which rows are labeled: Rows -> Task.

A row without a label is unlabeled, and the known classes are the distinct labels of the training rows. In
benchmark mode (``known_classes``, or a source that declares its known classes) the other labels are hidden:
they move to ``eval_labels``, which only evaluation reads.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from uno.config import DataConfig
from uno.data.rows import Rows
from uno.errors import ConfigError

MAX_NAMES_BYTES = 1_000_000


@dataclass(frozen=True, eq=False)
class Task:
    """A discovery problem over N rows.

    ``known`` and ``novel`` are class names in index order (``novel``: the hidden ones, [] without truth).
    ``labels`` int64 (N,): known class or -1 = unlabeled, all that training may see.
    ``eval_labels`` int64 (N,): index in known + novel or -1 = no truth, only evaluation reads it.
    ``is_train`` bool (N,). ``notes``: lines for the user.
    """

    rows: Rows
    known: list[str]
    novel: list[str]
    num_novel: int
    labels: np.ndarray
    eval_labels: np.ndarray
    is_train: np.ndarray
    notes: tuple[str, ...] = ()

    @property
    def num_known(self) -> int:
        """C_l, the number of known classes."""
        return len(self.known)


def make_task(rows: Rows, config: DataConfig) -> Task:
    """Apply ``known_classes``, ``num_novel`` and ``limit``.

    Raises:
        ConfigError: no known class, no class to discover, an unknown class, or a limit below the class count.
    """
    if config.num_novel == "auto":
        raise ConfigError("num_novel auto must be estimated first: uno estimate-classes")
    classes = order_classes({label for label in rows.labels if label is not None}, rows.class_names)
    if not classes:
        raise ConfigError(f"{rows.source}: no row has a label; known classes need labeled rows")
    is_train = rows.split == "train"
    if config.known_classes is not None or rows.known:
        known, novel = _benchmark_classes(rows, config, classes)
        num_novel = config.num_novel or len(novel)
        if num_novel == 0:
            raise ConfigError(f"{rows.source}: every class is known; give --num-novel for the unlabeled rows")
    else:
        known, num_novel = _open_classes(rows, config, classes, is_train)
        true_names = order_classes({name for name in rows.truth if name is not None}, rows.class_names)
        novel = [name for name in true_names if name not in known]
    if config.limit is not None:
        kept = limit_rows(rows, config.limit)
        rows, is_train = rows.take(kept), is_train[kept]
    labels = np.where(is_train, _indices(rows.labels, known), -1)
    eval_labels = _indices(rows.truth, [*known, *novel])
    return Task(rows, known, novel, num_novel, labels, eval_labels, is_train, rows.notes)


def _indices(names: list[str | None], classes: list[str]) -> np.ndarray:
    """int64 (N,): position of each name in ``classes``, -1 where there is none."""
    index = {name: i for i, name in enumerate(classes)}
    return np.array([-1 if name is None else index.get(name, -1) for name in names], dtype=np.int64)


def order_classes(names: Iterable[str], declared: Iterable[str] = ()) -> list[str]:
    """Class names in the declared order, or else sorted with numbers by value: 2 before 10."""
    rank = {name: i for i, name in enumerate(declared)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), _natural(name)))


def _natural(name: str) -> tuple[object, ...]:
    # Digits compare by (length, digits) without int(): int() refuses numbers of more than 4300 digits.
    parts = re.split(r"([0-9]+)", name)
    numbers = [(len(d.lstrip("0")), d.lstrip("0")) for d in parts[1::2]]
    return (*(x for pair in zip(parts[::2], [*numbers, (0, "")], strict=True) for x in pair), name)


def labeled_rows(rows: Rows, config: DataConfig) -> np.ndarray:
    """bool (N,): rows that count as labeled under ``known_classes``, whatever their split.

    Raises:
        ConfigError: as :func:`parse_known_classes`.
    """
    classes = order_classes({label for label in rows.labels if label is not None}, rows.class_names)
    chosen = set(rows.known) or set(classes)
    if config.known_classes is not None:
        chosen = parse_known_classes(config.known_classes, classes)
    return np.array([label in chosen for label in rows.labels])


def _benchmark_classes(rows: Rows, config: DataConfig, classes: list[str]) -> tuple[list[str], list[str]]:
    if config.known_classes is None:
        chosen = set(rows.known)
    else:
        chosen = parse_known_classes(config.known_classes, classes)
    if len(chosen) == len(classes) and None not in rows.labels:
        raise ConfigError(
            f"all {len(classes)} classes of {rows.source} are known: none is left to discover; "
            "name fewer with --known-classes"
        )
    return [c for c in classes if c in chosen], [c for c in classes if c not in chosen]


def _open_classes(
    rows: Rows, config: DataConfig, classes: list[str], is_train: np.ndarray
) -> tuple[list[str], int]:
    train_labels = {rows.labels[i] for i in np.flatnonzero(is_train)}
    present = train_labels - {None}
    if not present:
        raise ConfigError(f"{rows.source}: no training row has a label; known classes need labeled rows")
    if None not in train_labels:
        raise ConfigError(
            f"{rows.source}: every training row is labeled, so there is nothing to discover; give "
            "--known-classes first:N to hide the other labels (benchmark), or add rows without a label"
        )
    if not isinstance(config.num_novel, int):
        raise ConfigError(f"{rows.source}: give --num-novel, the number of classes among the unlabeled rows")
    return [c for c in classes if c in present], config.num_novel


def parse_known_classes(value: str, classes: list[str]) -> set[str]:
    """``first:N``, comma-separated names, or a text file of names -> names that are in ``classes``.

    Raises:
        ConfigError: N out of range, an unreadable file, an unknown name (with the nearest), or one twice.
    """
    first = re.fullmatch(r"first:(.*)", value.strip())
    if first:
        if not re.fullmatch(r"[0-9]{1,9}", first[1]) or not 1 <= int(first[1]) <= len(classes):
            raise ConfigError(f"known_classes {value!r}: N must be from 1 to {len(classes)}, the class count")
        return set(classes[: int(first[1])])
    if value not in classes and ("/" in value or os.path.isfile(value)):
        names, where = _read_names(value), f"known_classes file {value}"
    else:
        names, where = [name.strip() for name in value.split(",") if name.strip()], "known_classes"
    if not names:
        raise ConfigError(f"{where}: no class name given")
    for name in names:
        if name not in classes:
            near = difflib.get_close_matches(name, classes, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"classes are {', '.join(classes[:8])}, ..."
            raise ConfigError(f"{where}: no class {name!r} in the data; {hint}")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{where}: class {twice[0]!r} is given twice")
    return set(names)


def _read_names(path: str) -> list[str]:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            text = file.read(MAX_NAMES_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read known_classes file {path}: {error}") from None
    if len(text) > MAX_NAMES_BYTES:
        raise ConfigError(f"known_classes file {path} is larger than {MAX_NAMES_BYTES} bytes")
    return [line.strip() for line in text.splitlines() if line.strip()]


def limit_rows(rows: Rows, limit: int) -> np.ndarray:
    """At most ``limit`` rows of each split, as if the data set were smaller: rows without a label keep their
    share, the others are spread evenly over their classes.
    """
    kept = []
    for split in ("train", "test"):
        groups: dict[str | None, list[int]] = {}
        for i in np.flatnonzero(rows.split == split):
            groups.setdefault(rows.labels[i], []).append(int(i))
        if len(groups) > limit:
            raise ConfigError(f"--limit {limit} is below the {len(groups)} classes of the {split} rows")
        left, todo = limit, len(groups)
        unlabeled = groups.pop(None, [])
        if unlabeled:
            num = sum(map(len, groups.values())) + len(unlabeled)
            share = min(max(1, round(limit * len(unlabeled) / num)), limit - len(groups), len(unlabeled))
            kept += [unlabeled[j] for j in np.arange(share) * len(unlabeled) // share]
            left, todo = left - share, todo - 1
        for members in sorted(
            groups.values(), key=len
        ):  # ties stay in order of the first row, whatever the names
            share = min(len(members), left // todo)
            kept += [members[j] for j in np.arange(share) * len(members) // share]
            left, todo = left - share, todo - 1
    return np.sort(np.array(kept, dtype=np.int64))
