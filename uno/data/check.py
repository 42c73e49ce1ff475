"""What would go wrong with this data, before anything starts (``uno data check``)."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from uno.config import Config
from uno.data.decode import MAX_BYTES, BadImage, read_header
from uno.data.files import is_uri, read_bytes
from uno.data.plan import make_plan, make_pretrain_plan
from uno.data.rows import Files, Image, base
from uno.data.splits import Task
from uno.errors import ConfigError

MIN_ROWS_PER_CLUSTER = 2.6
"""Unlabeled rows per novel class and batch below which pseudo-labels suffer: with good features .90 of their
mass is right at 2.6, .99 at 5, .61 at 1 (METHOD section 4)."""
MAX_HASHED_BYTES = 2 * 2**30
NUM_HEADERS = 64


Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """``error``: the run cannot succeed. ``warning``: it runs, but look at this."""

    level: Level
    message: str


def check(task: Task, config: Config) -> list[Problem]:
    """Everything suspicious about ``task``, errors first; reads at most 2 GiB of images and decodes none."""
    problems = [
        *_class_problems(task),
        *_cluster_problems(task, config),
        *_batch_problems(task, config),
        *_image_problems(task),
        *_duplicate_problems(task),
    ]
    return sorted(problems, key=lambda problem: problem.level)


def format_report(task: Task, problems: list[Problem]) -> str:
    """Plain text: source, image sizes, a table of classes, notes and problems."""
    rows, counts = task.rows, _counts(task)
    headers, _ = _headers(task)
    kinds = Counter(kind for kind, *_ in headers)
    sides = sorted((width * height, f"{width} x {height}") for _, width, height in headers)
    lines = [
        f"source       {rows.source}",
        f"fingerprint  {rows.fingerprint}",
        f"rows         {len(rows)} ({int(task.is_train.sum())} train, {int((~task.is_train).sum())} test)",
        f"classes      {len(task.known)} known, {task.num_novel} to discover",
    ]
    if sides:
        formats = ", ".join(f"{n} {name}" for name, n in kinds.most_common())
        lines.append(
            f"images       {sides[0][1]} to {sides[-1][1]} pixels ({formats}; sample of {len(headers)})"
        )
    names = [_printable(name) for name in task.known + task.novel]
    width = min(max([len(name) for name in names] + [len("(no truth)")]), 40)
    lines += ["", f"{'class':<{width}}  kind   {'labeled':>8} {'unlabeled':>10} {'test':>8}"]
    for i, name in enumerate(names):
        kind = "known" if i < len(task.known) else "novel"
        labeled, unlabeled, test = counts[i]
        lines.append(f"{name[:width]:<{width}}  {kind}  {labeled:>8} {unlabeled:>10} {test:>8}")
    if any(counts[-1]):
        lines.append(
            f"{'(no truth)':<{width}}         {counts[-1][0]:>8} {counts[-1][1]:>10} {counts[-1][2]:>8}"
        )
    lines.append("")
    lines += [f"note: {note}" for note in task.notes]
    lines += [f"{problem.level}: {problem.message}" for problem in problems]
    errors = sum(problem.level == "error" for problem in problems)
    lines.append(f"{errors} errors, {len(problems) - errors} warnings")
    return "\n".join(lines)


def _counts(task: Task) -> np.ndarray:
    """int64 (C + 1, 3): labeled, unlabeled and test rows of every class; the last row has no truth."""
    counts = np.zeros((len(task.known) + len(task.novel) + 1, 3), dtype=np.int64)
    column = np.where(~task.is_train, 2, np.where(task.labels >= 0, 0, 1))
    np.add.at(counts, (task.eval_labels, column), 1)
    return counts


def _class_problems(task: Task) -> Iterator[Problem]:
    names, num_known = task.known + task.novel, len(task.known)
    if task.labels.max(initial=-1) >= num_known or task.eval_labels.max(initial=-1) >= len(names):
        yield Problem(
            "error", f"a label is outside the list of {num_known} known + {len(task.novel)} novel classes"
        )
        return
    both = sorted(set(task.known) & set(task.novel))
    if both:
        yield Problem("error", f"known and novel classes overlap: {_list(both)}")
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            yield Problem("warning", f"classes {other!r} and {name!r} differ only in case or spaces")
    if num_known == 1:
        yield Problem(
            "warning", f"only one known class, {task.known[0]!r}: pretraining has nothing to tell apart"
        )
    if task.num_novel == 1:
        yield Problem("warning", "num_novel is 1: every unlabeled row will fall into the one novel class")
    if task.novel and task.num_novel < len(task.novel):
        yield Problem(
            "warning",
            f"num_novel {task.num_novel} is below the {len(task.novel)} hidden classes: some share a cluster",
        )
    counts = _counts(task)[:-1]
    train = counts[:, 0] + counts[:, 1]
    for kind, members in (("known", range(num_known)), ("novel", range(num_known, len(names)))):
        empty = [names[i] for i in members if train[i] == 0]
        single = [names[i] for i in members if train[i] == 1]
        if empty:
            level: Level = "error" if kind == "known" else "warning"
            yield Problem(level, f"{len(empty)} {kind} classes have no training image: {_list(empty)}")
        if single:
            yield Problem(
                "warning", f"{len(single)} {kind} classes have a single training image: {_list(single)}"
            )


def _cluster_problems(task: Task, config: Config) -> Iterator[Problem]:
    unlabeled = int((task.is_train & (task.labels < 0)).sum())
    factor = max(1, config.model.overcluster_factor)
    if unlabeled < task.num_novel:
        yield Problem(
            "error", f"{unlabeled} unlabeled rows are fewer than the {task.num_novel} classes to discover"
        )
    elif unlabeled < task.num_novel * factor:
        yield Problem(
            "warning",
            f"{unlabeled} unlabeled rows are fewer than the {task.num_novel * factor} clusters of an "
            f"overclustering head; lower --model.overcluster-factor (now {factor})",
        )


def _batch_problems(task: Task, config: Config) -> Iterator[Problem]:
    labeled = int((task.is_train & (task.labels >= 0)).sum())
    unlabeled = int((task.is_train & (task.labels < 0)).sum())
    size, workers = config.train.batch_size, max(1, config.compute.workers)
    try:
        make_pretrain_plan(config.seed, size, labeled, workers)
        plan = make_plan(config.seed, config.data.composition, size, labeled, unlabeled, workers)
    except ConfigError as error:
        yield Problem("error", str(error))
        return
    if labeled < size:
        yield Problem(
            "warning", f"{labeled} labeled rows are fewer than batch_size {size}: pretraining takes them all"
        )
    rows_per_class = plan.unlabeled_size / task.num_novel
    if rows_per_class < MIN_ROWS_PER_CLUSTER:
        yield Problem(
            "warning",
            f"a batch has {plan.unlabeled_size} unlabeled rows for {task.num_novel} classes, "
            f"{rows_per_class:.1f} each; pseudo-labels need {MIN_ROWS_PER_CLUSTER} or more: raise batch_size",
        )


def _headers(task: Task) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Headers of a sample of rows, and the reasons of the unreadable ones with their ids."""
    headers, bad = [], []
    num = min(NUM_HEADERS, len(task.rows))
    for row in np.arange(num) * len(task.rows) // max(num, 1):
        try:
            headers.append(read_header(task.rows.images[int(row)]))
        except BadImage as error:
            bad.append(f"{task.rows.ids[row]}: {error}")
    return headers, bad


def _image_problems(task: Task) -> Iterator[Problem]:
    headers, bad = _headers(task)
    if bad:
        level: Level = "warning" if headers else "error"
        yield Problem(
            level, f"{len(bad)} of a sample of {len(headers) + len(bad)} images are unreadable, e.g. {bad[0]}"
        )


def _duplicate_problems(task: Task) -> Iterator[Problem]:
    """Exact copies (same bytes or pixels) in both splits, both labeled and unlabeled, or under two labels."""
    groups, complete = _copies(task)
    splits, sides, classes = [], [], []
    for group in groups:
        if len({bool(task.is_train[i]) for i in group}) == 2:
            splits.append(group)
        train = [i for i in group if task.is_train[i]]
        if len({bool(task.labels[i] >= 0) for i in train}) == 2:
            sides.append(group)
        if len({int(task.labels[i]) for i in train if task.labels[i] >= 0}) > 1:
            classes.append(group)
    for found, text in (
        (splits, "images are in train and in test"),
        (sides, "images are labeled and unlabeled at once"),
        (classes, "images have two different known labels"),
    ):
        if found:
            example = " = ".join(task.rows.ids[i] for i in found[0][:3])
            yield Problem("warning", f"{len(found)} {text}, e.g. {example}")
    if not complete:
        yield Problem(
            "warning", f"the search for duplicates stopped after {MAX_HASHED_BYTES >> 30} GiB of images"
        )


def _copies(task: Task) -> tuple[list[list[int]], bool]:
    """Groups of rows with equal content, and whether all were compared. Only files of equal size are read."""
    images, index = base(task.rows.images, np.arange(len(task.rows)))
    candidates = np.ones(len(index), dtype=bool)
    if isinstance(images, Files):
        sizes = images.sizes[index]
        _, same, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        candidates = (sizes >= 0) & (sizes <= MAX_BYTES) & (counts[same] > 1)
    groups: dict[bytes, list[int]] = defaultdict(list)
    left = MAX_HASHED_BYTES
    for row in np.flatnonzero(candidates).tolist():
        content = _content(images[int(index[row])])
        left -= len(content)
        if left < 0:
            break
        if content:
            groups[hashlib.blake2b(content, digest_size=16).digest()].append(row)
    return [group for group in groups.values() if len(group) > 1], left >= 0


def _content(image: Image) -> bytes:
    if isinstance(image, np.ndarray):
        return str(image.shape).encode() + image.tobytes()
    if isinstance(image, bytes):
        return image
    try:
        return b"" if is_uri(image) else read_bytes(image, MAX_BYTES)
    except OSError:
        return b""  # decoding reports it


def _list(names: list[str]) -> str:
    return ", ".join(_printable(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")


def _printable(name: str) -> str:
    """A class name fit for a terminal: no line breaks, no escape sequences."""
    return "".join(c if c.isprintable() else "?" for c in name)
