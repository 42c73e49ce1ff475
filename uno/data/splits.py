"""Make the discovery problem of a data set: known classes, labels and true classes.

The known classes are the classes of the labeled training rows. In a benchmark, the
setting ``known_classes`` or the source declares them instead. Labels of other classes
are then hidden from training: only ``eval_labels``, which evaluation reads, has them.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from uno.config import Config, DataConfig, why_not_gcd
from uno.data.columns import class_codes, class_indices, present_classes
from uno.data.files import read_text
from uno.data.images import evenly_spaced
from uno.data.rows import Rows
from uno.data.sampling import HELD_OUT, UNLABEL
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
    """A discovery problem over N rows.

    Attributes:
        rows: The rows.
        known: Names of the known classes, in the order of their indices.
        novel: Names of the novel classes that evaluation knows, in the order of their
            indices. There can be fewer or more of them than ``num_novel``.
        num_novel: The number of novel classes to discover, C_u.
        labels: Index of the known class, or -1 for an unlabeled row, int64 (N,). It is
            all that training may see. Test rows have -1.
        eval_labels: Index of the true class among known + novel classes, or -1 if it is
            not known, int64 (N,). Only evaluation reads it.
        is_train: Whether each row is a training row, bool (N,). It is False for rows
            that :func:`held_out` has moved to the test split, although ``is_train`` of
            ``rows`` is True for these.
        notes: Lines for the user about how the source was read.
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
    def label_names(self) -> pa.Array:
        """The label that training may see of each row: an Arrow array (N,) of strings.

        It is the name of the known class. The value of a row is null if training sees
        no label of it, as for every test row.
        """
        index = pa.array(self.labels, mask=self.labels < 0)
        return pa.array(self.known, pa.string()).take(index)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of labeled and the number of unlabeled training rows, (N_l, N_u).

        A training row with a hidden label counts as unlabeled.
        """
        labeled = int((self.is_train & (self.labels >= 0)).sum())
        return labeled, int(self.is_train.sum()) - labeled


def train_rows(task: Task, ok: np.ndarray | None = None) -> dict[str, Any]:
    """Return all that training may know of a task, as fields of a training set.

    Args:
        task: A task of N rows.
        ok: Whether each row is readable, bool (N,). Other rows are left out. None
            leaves no row out for this reason.

    Returns:
        A mapping with ``labeled`` and ``unlabeled``, the row numbers of the training
        rows as NumPy arrays int64 (N_l,) and (N_u,), ascending; ``labels``, the index
        of the known class of each labeled row as a tensor int64 (N_l,); ``num_known``
        and ``num_novel``, the numbers of classes.
    """
    usable = task.is_train if ok is None else task.is_train & ok
    labeled = np.flatnonzero(usable & (task.labels >= 0))
    rows = {"labeled": labeled, "unlabeled": np.flatnonzero(usable & (task.labels < 0))}
    counts = {"num_known": task.num_known, "num_novel": task.num_novel}
    return {**rows, "labels": torch.from_numpy(task.labels[labeled]), **counts}


def truth_rows(
    task: Task, ok: np.ndarray | None = None
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return the rows that have a true class, for evaluation.

    Args:
        task: A task of N rows.
        ok: Whether each row is readable, bool (N,). Other rows are left out. None
            leaves no row out for this reason.

    Returns:
        For each split, "train" and "test", three tensors of n rows, with n = 0 if there
        are none: row numbers int64 (n,), ascending; true classes, indices among known +
        novel classes, int64 (n,); and whether training does not see the row's label,
        bool (n,), which is True for all test rows.
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
    """Make the discovery problem of a data set, by the settings of ``data``.

    ``known_classes``, or else the classes that the source declares as known, hide the
    labels of all other classes (a benchmark). If neither declares classes, the known
    classes are those of the labeled training rows. C_u is ``num_novel``; in a benchmark
    its default is the number of the other classes among the labels of all rows.

    Other settings are applied in this order. ``limit`` keeps some rows of each split.
    ``validation_fraction`` moves training rows to the test split if no test row has a
    label of a known class. ``unlabeled_known_fraction`` hides labels of known classes
    of training rows.

    Args:
        rows: The rows of the source.
        config: The section ``data`` of the configuration.

    Returns:
        The task of the rows that are kept: the names of the known and novel classes in
        the order of :func:`order_classes`, C_u, the known class of each labeled
        training row, which training may see, the true class of each row for evaluation,
        and which rows are training rows.

    Raises:
        ConfigError: No row has a label; no training row has one, and no known classes
            are declared; nothing is left to discover, because all rows are labeled with
            declared known classes or, if none are declared, all training rows are
            labeled; the number of novel classes is not known, or is "auto"; there
            are more than ``MAX_CLASSES`` classes; ``unlabeled_known_fraction`` is set
            and no known classes are declared; or ``known_classes`` or ``limit`` does
            not fit the data.
    """
    if config.num_novel == "auto":
        raise ConfigError(
            "num_novel auto must be estimated first: uno estimate-classes"
        )
    source, is_train = rows.source, rows.is_train
    classes = order_classes(present_classes(rows.labels), rows.class_names)
    if not classes:
        raise ConfigError(_describe_no_label(rows, "image"))
    chosen, num_novel = _known_classes(rows, config, classes), config.num_novel
    if chosen is not None:
        if len(chosen) == len(classes) and not rows.labels.null_count:
            what = (
                f"all {len(classes)} classes of {source} are known: nothing to discover"
            )
            raise ConfigError(f"{what}; name fewer with --known-classes")
        novel = [name for name in classes if name not in chosen]
        num_novel = num_novel or len(novel) or None
    else:
        in_training = rows.labels.filter(is_train)
        chosen = present_classes(in_training)
        if not chosen:
            raise ConfigError(_describe_no_label(rows, "training image"))
        if not in_training.null_count:
            what = f"{source}: every training image is labeled: nothing to discover"
            if placeholders := missing_labels(chosen):
                raise ConfigError(
                    f"{what}; class {placeholders[0]!r} seems to stand for a missing"
                    " label: leave such labels empty"
                )
            raise ConfigError(
                f"{what}; add unlabeled images, or pass --known-classes first:N to"
                " hide the other labels (benchmark)"
            )
        novel = [
            name
            for name in order_classes(present_classes(rows.truth), rows.class_names)
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
    test_classes = present_classes(rows.labels.filter(~is_train))
    if config.validation_fraction and not test_classes & chosen:
        is_train = is_train & ~held_out(
            rows, is_train, known, config.validation_fraction
        )
    labels = np.where(is_train, class_indices(rows.labels, known), -1)
    if config.unlabeled_known_fraction:
        if _known_classes(rows, config, classes) is None:
            raise ConfigError(
                "data.unlabeled_known_fraction needs --known-classes: it hides labels"
                " of known classes"
            )
        labels = unlabel(labels, config.unlabeled_known_fraction)
    eval_labels = class_indices(rows.truth, [*known, *novel])
    return Task(
        rows, known, novel, num_novel, labels, eval_labels, is_train, rows.notes
    )


def _describe_no_label(rows: Rows, what: str) -> str:
    """Return the error line for a source without labels.

    Args:
        rows: The rows of the source. Their warnings and notes are added, because what
            was left out may be the labels.
        what: What has no label: "image" or "training image".
    """
    lacks = f"{rows.source}: no {what} has a label; known classes need labeled images"
    return "; ".join([lacks, *rows.warnings, *rows.notes])


MISSING = {
    "na",
    "n/a",
    "nan",
    "none",
    "null",
    "<na>",
    "unannotated",
    "unassigned",
    "unclassified",
    "unknown",
    "unlabeled",
    "unlabelled",
}
"""Class names, in lower case, that other programs write where a label is missing."""


def missing_labels(classes: Iterable[str]) -> list[str]:
    """Return the names of classes that seem to stand for a missing label.

    Args:
        classes: Names of classes.

    Returns:
        The names that are in :data:`MISSING` in lower case and without spaces around
        them, such as ``Unknown``. They are sorted, and spelled as in ``classes``.
    """
    return sorted(name for name in classes if name.strip().lower() in MISSING)


def held_out(
    rows: Rows, is_train: np.ndarray, known: list[str], share: float
) -> np.ndarray:
    """Choose training rows that become test rows, the same ones for runs of all seeds.

    A share of the rows of each known class is drawn at random, and at least one row of
    each class remains for training. Training rows whose label is hidden, because their
    class is not known, are one more group of which the same share is drawn, and at
    least one of these rows remains, too. Test rows are not chosen, and neither are rows
    without a label, even if they have a true class for evaluation. Nothing is changed.

    Args:
        rows: All N rows.
        is_train: Whether each row is a training row, bool (N,).
        known: Names of the known classes.
        share: The share of each group to choose, 0-1. The number of rows is rounded.

    Returns:
        Whether each row is chosen, bool (N,).
    """
    labels = np.where(is_train, class_indices(rows.labels, known), -1)
    hidden = np.flatnonzero(is_train & (labels < 0) & (class_codes(rows.labels) >= 0))
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[
        _draw_share(HELD_OUT, [hidden, *rows_of_classes(labels, len(known))], share)
    ] = True
    return chosen


def unlabel(labels: np.ndarray, share: float) -> np.ndarray:
    """Hide labels at random, the same ones for runs of all seeds.

    Args:
        labels: Index of the known class of each row, or -1, int64 (N,). It is not
            changed.
        share: The share of the rows of each class that lose their label, 0-1. The
            number of rows is rounded. At least one row of each class keeps its label.

    Returns:
        A copy in which -1 replaces the labels that are hidden, int64 (N,).
    """
    left = labels.copy()
    left[_draw_share(UNLABEL, rows_of_classes(labels, labels.max() + 1), share)] = -1
    return left


def _draw_share(stream: int, groups: Sequence[np.ndarray], share: float) -> np.ndarray:
    """Draw a share of each of several groups of rows, the same ones at each call.

    Args:
        stream: The random stream of :mod:`uno.data.sampling`.
        groups: The row numbers of each group, int64 (n,).
        share: The share of each group to draw, 0-1. The number of rows is rounded. At
            least one row of a group is not drawn.

    Returns:
        The row numbers that are drawn, one group after the other, in random order
        within a group, int64.
    """
    drawn = [np.arange(0)]
    for number, group in enumerate(groups):
        rows = np.random.default_rng([stream, number]).permutation(group)
        drawn.append(rows[: min(round(share * len(rows)), max(len(rows) - 1, 0))])
    return np.concatenate(drawn)


def rows_of_classes(labels: np.ndarray, num: int) -> list[np.ndarray]:
    """Return the rows of each class.

    Args:
        labels: The class of each row, int64 (N,). Rows whose class is negative, or is
            ``num`` or more, are not returned.
        num: The number of classes, at most ``MAX_CLASSES``.

    Returns:
        For each of the classes 0 to ``num`` - 1 its row numbers in ascending order,
        int64 (n,).
    """
    # MAX_CLASSES fits into 16 bits, for which NumPy has a faster sort
    small = labels.astype(np.int16)
    order = np.argsort(small, kind="stable")
    return np.split(order, np.searchsorted(small[order], np.arange(num + 1)))[1:-1]


def decide_setting(
    config: Config, declared: Sequence[str], began: bool = False
) -> tuple[Literal["ncd", "gcd"], str]:
    """Decide between the NCD and the GCD setting, without looking at rows.

    A ``data.setting`` other than "auto" is returned as it is. Otherwise the first rule
    that holds decides: GCD if ``data.unlabeled_known_fraction`` hides labels of known
    classes; NCD if ``data.known_classes`` or the source says which classes are known,
    because only labels of the other classes are hidden then; NCD if the method or an
    option of its objective does not go with GCD; GCD for all other data: nobody knows
    the classes of its unlabeled rows, and NCD would force an image of a known class
    into a novel class.

    Args:
        config: The configuration of the run.
        declared: Names of the known classes, if the source declares them, else empty.
        began: Whether ``data.setting`` comes from a stored run, which the sentence then
            says. It has no effect if ``data.setting`` is "auto".

    Returns:
        The setting, and a sentence for the user that names it and says why.

    Raises:
        ConfigError: The method cannot be loaded. It is only loaded for the third rule.
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
    setting: Literal["ncd", "gcd"] = "gcd"
    if data.unlabeled_known_fraction:
        why = "--data.unlabeled-known-fraction"
    elif told:
        setting, why = "ncd", "labels of the other classes are hidden"
    elif no := why_not_gcd(config):
        setting, why = "ncd", no
    else:
        why = "assumed"
    other = (
        "; if all are new, pass --data.setting ncd"
        if setting == "gcd" and not told
        else ""
    )
    return setting, f"setting: {setting.upper()} ({why}): {SETTINGS[setting]}{other}"


def order_classes(names: Iterable[str], declared: Iterable[str] = ()) -> list[str]:
    """Return the different names of classes in order.

    Args:
        names: Names of classes, possibly with repetitions.
        declared: Names in the order that a source declares. Those that occur in
            ``names`` come first. Other names follow, sorted with numbers by value:
            ``2`` before ``10``.
    """
    rank = {name: i for i, name in enumerate(declared)}

    def key(name: str) -> tuple[object, ...]:
        """Return the sort key of a class name.

        Returns:
            The rank of the name in ``declared``, which is the same for all names that
            are not declared; and a list of the words and numbers of the name, all as
            text, with the name itself at the end. A number loses its leading zeros, and
            its count of digits stands before it, so that numbers compare by value.
        """
        # numbers are compared by length and digits, because int() refuses long ones
        words = re.split(r"([0-9]+)", name)
        words[1::2] = [f"{len(d.lstrip('0')):06}{d.lstrip('0')}" for d in words[1::2]]
        return rank.get(name, len(rank)), [*words, "000000", name]

    return sorted(set(names), key=key)


def labeled_rows(rows: Rows, config: DataConfig) -> np.ndarray:
    """Return which rows have a label of a known class, training and test rows alike.

    If neither ``known_classes`` nor the source declares known classes, every class
    counts as known.

    Args:
        rows: All N rows.
        config: The section ``data`` of the configuration.

    Returns:
        bool (N,).

    Raises:
        ConfigError: ``known_classes`` does not fit the data, or its file cannot be
            read, see :func:`parse_known_classes`.
    """
    classes = order_classes(present_classes(rows.labels), rows.class_names)
    known = _known_classes(rows, config, classes) or classes
    return class_indices(rows.labels, [*known]) >= 0


def _known_classes(
    rows: Rows, config: DataConfig, classes: list[str]
) -> set[str] | None:
    """Return the known classes that the user, or else the source, declares.

    Args:
        rows: The rows of the source.
        config: The section ``data`` of the configuration.
        classes: The classes of the labels, in order.

    Returns:
        Names of classes, or None if nobody declares them.

    Raises:
        ConfigError: ``known_classes`` does not fit the data, or its file cannot be
            read, see :func:`parse_known_classes`.
    """
    if config.known_classes is not None:
        return parse_known_classes(config.known_classes, classes)
    return set(rows.known) or None


def parse_known_classes(value: str, classes: list[str]) -> set[str]:
    """Parse the setting ``known_classes``.

    Args:
        value: ``first:N`` for the first N classes, names separated by commas, or the
            path or URI of a text file with one name on each line. A value that contains
            a slash, or is the path of an existing file, is read as a file, unless a
            class has this name. A leading ``~`` is expanded if there is a slash. Spaces
            around names, and empty names, are ignored. Names are compared in NFC.
        classes: The classes of the labels, in order, in Unicode normalization NFC.

    Returns:
        Names of classes, which are all in ``classes``.

    Raises:
        ConfigError: N is no whole number from 1 to the number of classes; a name is not
            in ``classes`` or is repeated; there is no name; or the file cannot be read,
            is not UTF-8 or has more than 1,000,000 bytes.
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
    """Choose at most ``limit`` rows of the training rows, and of the test rows.

    In each split, rows without a label in the source keep their share of the rows: at
    least one row, and at least one row is left for each class. The classes get the same
    number of rows, or one more, except that a class with fewer rows leaves its part to
    the others. The rows of a class, and those without a label, are evenly spaced, so
    nothing is random.

    Args:
        rows: All N rows.
        limit: The largest number of rows of each split.

    Returns:
        Row numbers in ascending order, int64 (n,).

    Raises:
        ConfigError: ``limit`` is smaller than the number of classes of a split, where
            unlabeled rows count as a class.
    """
    kept, codes = [], class_codes(rows.labels)
    given = codes >= 0
    for split, member in (("train", rows.is_train), ("test", ~rows.is_train)):
        members = np.flatnonzero(member)
        members = members[np.argsort(codes[members], kind="stable")]
        groups = np.split(members, np.flatnonzero(np.diff(codes[members])) + 1)
        if len(groups) > limit:
            raise ConfigError(
                f"--limit {limit} is below the {len(groups)} classes of the {split}"
                " images"
            )
        left, todo = limit, len(groups)
        # Unlabeled rows come first, then small classes. Ties are in the order of their
        # first rows, so that the names of classes do not matter.
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
