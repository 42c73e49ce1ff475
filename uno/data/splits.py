"""Which classes are known and which rows are labeled: Rows -> Task.

The known classes are the distinct labels of the training rows; where ``known_classes``
or the source declares them (benchmark mode), other labels are hidden: they move to
``eval_labels``, which only evaluation reads.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from uno.config import Config, DataConfig, why_not_gcd
from uno.data.files import read_text
from uno.data.images import evenly_spaced
from uno.data.plan import HELD_OUT, UNLABEL
from uno.data.rows import Rows
from uno.errors import ConfigError, did_you_mean
from uno.limits import MAX_CLASSES
from uno.text import composed

MAX_NAMES_BYTES = 1_000_000
SETTINGS = {
    "ncd": "unlabeled images belong to new classes only",
    "gcd": "unlabeled images can belong to known or new classes",
}


@dataclass(frozen=True, eq=False)
class Task:
    """A discovery problem over N rows; ``known`` and ``novel`` are class names in index
    order.

    ``labels`` int64 (N,): known class or -1 = unlabeled, all that training may see.
    ``eval_labels`` int64 (N,): index in known + novel or -1 = no truth, only evaluation
    reads it.
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

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of labeled and of unlabeled training rows."""
        labeled = int((self.is_train & (self.labels >= 0)).sum())
        return labeled, int(self.is_train.sum()) - labeled


def train_rows(task: Task, ok: np.ndarray | None = None) -> dict[str, Any]:
    """What training may know of a task, as fields of its sets; ``ok`` bool (N,):
    which images have pixels.
    """
    usable = task.is_train if ok is None else task.is_train & ok
    labeled = np.flatnonzero(usable & (task.labels >= 0))
    rows = {"labeled": labeled, "unlabeled": np.flatnonzero(usable & (task.labels < 0))}
    counts = {"num_known": task.num_known, "num_novel": task.num_novel}
    return {**rows, "labels": torch.from_numpy(task.labels[labeled]), **counts}


def truth_rows(
    task: Task, ok: np.ndarray | None = None
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """{"train", "test"} -> (rows with a true class, possibly none, that class among
    known + novel, both int64; which of them training sees without a label, if at all,
    bool).
    """
    usable = (task.eval_labels >= 0) & (True if ok is None else ok)
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for split, member in (("train", task.is_train), ("test", ~task.is_train)):
        rows = np.flatnonzero(usable & member)
        truth, unlabeled = task.eval_labels[rows], task.labels[rows] < 0
        found[split] = (
            torch.from_numpy(rows),
            torch.from_numpy(truth),
            torch.from_numpy(unlabeled),
        )
    return found


def make_task(rows: Rows, config: DataConfig) -> Task:
    """Apply ``known_classes``, ``num_novel`` and ``limit``; ConfigError where that
    leaves no task.
    """
    if config.num_novel == "auto":
        raise ConfigError(
            "num_novel auto must be estimated first: uno estimate-classes"
        )
    source, is_train = rows.source, rows.is_train
    classes = order_classes(rows.labels.present, rows.class_names)
    if not classes:
        raise ConfigError(_no_label(rows, "image"))
    chosen, num_novel = _known_classes(rows, config, classes), config.num_novel
    if chosen is not None:
        if len(chosen) == len(classes) and rows.labels.given.all():
            what = (
                f"all {len(classes)} classes of {source} are known: nothing to discover"
            )
            raise ConfigError(f"{what}; name fewer with --known-classes")
        novel = [name for name in classes if name not in chosen]
        num_novel = num_novel or len(novel) or None
    else:
        in_training = rows.labels.pick(is_train)
        chosen = in_training.present
        if not chosen:
            raise ConfigError(_no_label(rows, "training image"))
        if in_training.given.all():
            fix = (
                "--known-classes first:N to hide the other labels (benchmark), or add"
                " unlabeled images"
            )
            empty = "".join(
                f"; class {name!r}: leave a label that is missing empty"
                for name in missing_labels(chosen)
            )
            raise ConfigError(
                f"{source}: every training image is labeled: nothing to discover; pass"
                f" {fix}{empty}"
            )
        novel = [
            name
            for name in order_classes(rows.truth.present, rows.class_names)
            if name not in chosen
        ]
    if num_novel is None:
        raise ConfigError(
            f"{source}: pass --num-novel, the number of classes among the unlabeled"
            " images"
        )
    known = [name for name in classes if name in chosen]
    if (num := len(known) + max(num_novel, len(novel))) > MAX_CLASSES:
        raise ConfigError(f"{source}: {num:,} classes, more than {MAX_CLASSES:,}")
    if config.limit is not None:
        kept = limit_rows(rows, config.limit)
        rows, is_train = rows.take(kept), is_train[kept]
    if config.validation_fraction and not rows.labels.pick(~is_train).present & chosen:
        is_train = is_train & ~held_out(
            rows, is_train, known, config.validation_fraction
        )
    labels = np.where(is_train, rows.labels.places(known), -1)
    if config.unlabeled_known_fraction:
        if _known_classes(rows, config, classes) is None:
            raise ConfigError(
                "data.unlabeled_known_fraction needs --known-classes: it hides labels"
                " of known classes"
            )
        labels = unlabel(labels, config.unlabeled_known_fraction)
    eval_labels = rows.truth.places([*known, *novel])
    return Task(
        rows, known, novel, num_novel, labels, eval_labels, is_train, rows.notes
    )


def _no_label(rows: Rows, what: str) -> str:
    """Return an error line that also says what the source leaves out: maybe labels."""
    lacks = f"{rows.source}: no {what} has a label; known classes need labeled images"
    return "; ".join([lacks, *rows.warnings, *rows.notes])


MISSING = {
    "na",
    "n/a",
    "nan",
    "none",
    "null",
    "<na>",
    "unknown",
    "unlabeled",
    "unlabelled",
}
"""Names of classes, in lower case, that other programs write where a label is
missing.
"""


def missing_labels(classes: Iterable[str]) -> list[str]:
    """Return the names of classes that seem to stand for a missing label, sorted."""
    return sorted(name for name in classes if name.strip().lower() in MISSING)


def held_out(
    rows: Rows, is_train: np.ndarray, known: list[str], share: float
) -> np.ndarray:
    """bool (N,): of the training rows, bool (N,), ``share`` of each class in ``known``,
    chosen at random, always alike, and of those whose labels are hidden, as many of all
    alike: nobody looks at their classes.
    """
    labels, chosen = (
        np.where(is_train, rows.labels.places(known), -1),
        np.zeros(len(rows), dtype=bool),
    )
    hidden = is_train & (labels < 0) & rows.labels.given
    for number, group in enumerate(
        [np.flatnonzero(hidden), *rows_of_classes(labels, len(known))]
    ):
        members = np.random.default_rng([HELD_OUT, number]).permutation(group)
        chosen[
            members[: min(round(share * len(members)), max(len(members) - 1, 0))]
        ] = True
    return chosen


def unlabel(labels: np.ndarray, share: float) -> np.ndarray:
    """``labels`` int64 (N,) with -1 for ``share`` of each class, always the same;
    one label a class stays.
    """
    left = labels.copy()
    for c, group in enumerate(rows_of_classes(labels, labels.max() + 1)):
        rows = np.random.default_rng([UNLABEL, c]).permutation(group)
        left[rows[: min(round(share * len(rows)), len(rows) - 1)]] = -1
    return left


def rows_of_classes(labels: np.ndarray, num: int) -> list[np.ndarray]:
    """Rows int64 (n,) of each of the classes 0 to ``num`` - 1 in ``labels`` (N,), in
    order.
    """
    small = labels.astype(np.int16)  # at most MAX_CLASSES; NumPy sorts it by digits
    order = np.argsort(small, kind="stable")
    return np.split(order, np.searchsorted(small[order], np.arange(num + 1)))[1:-1]


def decide_setting(
    config: Config, declared: Sequence[str], began: bool = False
) -> tuple[Literal["ncd", "gcd"], str]:
    """What ``data.setting`` means, and a sentence that says why. ``declared``: the
    classes that the source says are known; ``began``: it is that of a stored run.

    Of rows that truly lack a label nobody knows the classes, so GCD is the safe answer:
    in the NCD setting a known image is forced into a new class. Methods that know only
    NCD get that.
    """
    data = config.data
    if data.setting != "auto":
        return (
            data.setting,
            (
                f"setting: {data.setting.upper()}"
                f" ({'of the stored run' if began else '--data.setting'}):"
                f" {SETTINGS[data.setting]}"
            ),
        )
    told = data.known_classes is not None or bool(declared)
    if data.unlabeled_known_fraction:
        setting, why = (
            "gcd",
            "--data.unlabeled-known-fraction",
        )  # type: tuple[Literal["ncd", "gcd"], str]
    elif told:
        setting, why = "ncd", "labels of the other classes are hidden"
    elif no := why_not_gcd(config):
        setting, why = "ncd", no
    else:
        setting, why = "gcd", "assumed"
    other = (
        "; if all are new, pass --data.setting ncd"
        if setting == "gcd" and not told
        else ""
    )
    return setting, f"setting: {setting.upper()} ({why}): {SETTINGS[setting]}{other}"


def order_classes(names: Iterable[str], declared: Iterable[str] = ()) -> list[str]:
    """The different names in the declared order, or else sorted with numbers by
    value: 2 before 10.
    """
    rank = {name: i for i, name in enumerate(declared)}

    def key(name: str) -> tuple[object, ...]:
        # numbers by length, then digits: int() refuses very long ones
        words = re.split(r"([0-9]+)", name)
        words[1::2] = [f"{len(d.lstrip('0')):06}{d.lstrip('0')}" for d in words[1::2]]
        return rank.get(name, len(rank)), [*words, "000000", name]

    return sorted(set(names), key=key)


def labeled_rows(rows: Rows, config: DataConfig) -> np.ndarray:
    """bool (N,): rows that count as labeled under ``known_classes``, whatever their
    split.
    """
    classes = order_classes(rows.labels.present, rows.class_names)
    return (
        rows.labels.places([*(_known_classes(rows, config, classes) or classes)]) >= 0
    )


def _known_classes(
    rows: Rows, config: DataConfig, classes: list[str]
) -> set[str] | None:
    """What the user or the source names; None where the labels themselves say it."""
    if config.known_classes is not None:
        return parse_known_classes(config.known_classes, classes)
    return set(rows.known) or None


def parse_known_classes(value: str, classes: list[str]) -> set[str]:
    """``first:N``, comma-separated names, or a text file of names -> names that are
    all in ``classes``.
    """
    first = re.fullmatch(r"first:(.*)", value.strip())
    if first:
        if not re.fullmatch(r"[0-9]{1,9}", first[1]) or not 1 <= int(first[1]) <= len(
            classes
        ):
            raise ConfigError(
                f"known_classes {value!r}: N must be from 1 to {len(classes)}, the"
                " class count"
            )
        return set(classes[: int(first[1])])
    if composed(value) not in classes and ("/" in value or os.path.isfile(value)):
        where = f"known_classes file {value}"
        listed = read_text(
            os.path.expanduser(value), MAX_NAMES_BYTES, where
        ).splitlines()
    else:
        listed, where = value.split(","), "known_classes"
    names = [composed(name.strip()) for name in listed if name.strip()]
    if not names:
        raise ConfigError(f"{where}: no class name given")
    for name in names:
        if name not in classes:
            hint = did_you_mean(
                name, classes, f"classes are {', '.join(classes[:8])}, ..."
            )
            raise ConfigError(f"{where}: no class {name!r} in the data{hint}")
        if names.count(name) > 1:
            raise ConfigError(f"{where}: class {name!r} is listed twice")
    return set(names)


def limit_rows(rows: Rows, limit: int) -> np.ndarray:
    """At most ``limit`` rows of each split: unlabeled ones keep their share, classes
    get the same number.
    """
    kept, given = [], rows.labels.given
    for split, member in (("train", rows.is_train), ("test", ~rows.is_train)):
        members = np.flatnonzero(member)
        members = members[np.argsort(rows.labels.codes[members], kind="stable")]
        groups = np.split(
            members, np.flatnonzero(np.diff(rows.labels.codes[members])) + 1
        )
        if len(groups) > limit:
            raise ConfigError(
                f"--limit {limit} is below the {len(groups)} classes of the {split}"
                " images"
            )
        left, todo = limit, len(groups)
        # Unlabeled rows first, then small classes; ties stay in order of the first row,
        # whatever the names.
        for own in (
            sorted(groups, key=lambda own: (given[own[0]], len(own), own[0]))
            if len(members)
            else ()
        ):
            share = min(len(own), left // todo)
            if not given[own[0]]:
                share = min(
                    len(own),
                    limit - todo + 1,
                    max(1, round(limit * len(own) / len(members))),
                )
            kept.append(own[evenly_spaced(share, len(own))])
            left, todo = left - share, todo - 1
    return np.sort(np.concatenate(kept))
