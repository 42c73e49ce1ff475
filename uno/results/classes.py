"""Names, merges and drops of a model's output classes, which a user can edit.

``model/classes.json`` lists the classes. A person names, merges or drops discovered
classes in ``classes.yaml``. A merged class adds its probability to the class that it is
merged into. A dropped class keeps its probability: a row that most probably belongs to
it is rejected, with that probability, and the class of no other row changes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from typing import Annotated, Literal

import torch
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from torch import Tensor

from uno.config import describe, parse_yaml
from uno.errors import ConfigError, StorageError, did_you_mean
from uno.limits import MAX_CLASSES, MAX_LABEL_LENGTH
from uno.text import composed, folded

YAML_FILE = "classes.yaml"
MERGE = "merge into "
# kind of predictions of a dropped class, and their name unless a class has that name
REJECTED = "rejected"
HEADER = """\
# Names for the discovered classes. Edit this file, then run: uno classes RUN --apply
# name:   what predictions call the class.
# action: keep, drop (its images are "rejected"), or merge into NAME (a known class, or another entry's name).
"""  # noqa: E501
STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=STRICT)
class OutputClass:
    """One of the C output classes of a model.

    Attributes:
        index: The index of the output, from 0; known classes come first.
        name: The name that predictions use.
        kind: "known" or "novel".
        into: The index of the class that gets the probability: ``index`` itself, or the
            class that this one was merged into. None if the class was dropped.
    """

    index: int
    name: str
    kind: Literal["known", "novel"]
    into: int | None


class ModelClasses(BaseModel):
    """The content of ``classes.json``.

    Attributes:
        classes: The output classes by index, known ones first.
        best_head: The index of the head that predicts.
        alignment: Which clusters of different heads are the same class: for each head
            and each cluster of the best head the corresponding cluster, H lists of K;
            None if it is not known.
        encoder_code: If the encoder is the user's callable, the SHA-256 of each of its
            Python modules, by the name of the module. None for other encoders.
        measured: The hash of the merges and drops that the metrics of the run belong
            to; None if the metrics belong to classes of which none was merged or
            dropped.
    """

    model_config = ConfigDict(**STRICT, frozen=True)

    classes: Annotated[list[OutputClass], Field(max_length=MAX_CLASSES)]
    best_head: int = 0
    alignment: list[list[int]] | None = None
    encoder_code: dict[str, str] | None = None
    measured: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelClasses:
        """Check that classes are numbered in order, known first, and that one is left.

        Returns:
            The object itself, as pydantic requires.

        Raises:
            ValueError: The classes are numbered or ordered in another way, a class is
                merged into a class that does not exist, there is no class, or all known
                and novel classes are merged or dropped.
        """
        kinds = [c.kind for c in self.classes]
        targets = (None, *range(len(kinds)))
        is_ordered = [c.index for c in self.classes] == [*range(len(kinds))]
        if kinds != sorted(kinds) or not is_ordered:
            raise ValueError("classes in another order")
        if any(c.into not in targets for c in self.classes):
            raise ValueError("a class is merged into no class")
        if not any(c.into == c.index for c in self.classes):
            raise ValueError("no class is left")
        return self

    @classmethod
    def parse(cls, data: bytes) -> ModelClasses:
        """Parse the content of ``classes.json``.

        Args:
            data: The content of the file.

        Raises:
            StorageError: The content is damaged, or has more than ``MAX_CLASSES``
                classes.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            raise StorageError("classes.json is damaged") from None

    def dump(self) -> bytes:
        """Return the classes as JSON, the content of ``classes.json``."""
        return self.model_dump_json(indent=1).encode()

    def with_classes(self, classes: Sequence[OutputClass]) -> ModelClasses:
        """Return a copy with other output classes, and everything else unchanged.

        Args:
            classes: All output classes, by index. They are not checked.
        """
        return self.model_copy(update={"classes": [*classes]})

    @property
    def is_measured(self) -> bool:
        """Whether the metrics of the run belong to the present merges and drops.

        If ``measured`` is None, they belong to classes without any merge or drop.
        """
        unmerged = [replace(c, into=c.index) for c in self.classes]
        at_first = hashes(unmerged)["routes"]
        return (self.measured or at_first) == hashes(self.classes)["routes"]

    def as_measured(self) -> ModelClasses:
        """Return a copy that notes that the metrics belong to its merges and drops."""
        return self.model_copy(update={"measured": hashes(self.classes)["routes"]})


def first_classes(known: Sequence[str], num_novel: int) -> list[OutputClass]:
    """Return the output classes of a model that was just trained.

    Discovered classes are named ``novel-1``, ``novel-2`` and so on. A name that a known
    class already has, also in another case or Unicode form, is skipped, and the next
    number is taken. No class is merged or dropped.

    Args:
        known: The names of the known classes, by index.
        num_novel: The number of discovered classes.
    """
    novel = islice(_untaken_names((f"novel-{i}" for i in count(1)), known), num_novel)
    return [
        OutputClass(index, name, "known" if index < len(known) else "novel", index)
        for index, name in enumerate([*known, *novel])
    ]


def prediction_labels(classes: Sequence[OutputClass]) -> list[tuple[str, str]]:
    """Return the name and the kind that predictions give to the rows of each class.

    Rows of all dropped classes have the kind "rejected" and the name "rejected". If a
    class that was not dropped has this name, also in another case or Unicode form, the
    name is the first free one of "rejected-1", "rejected-2" and so on. A merged class
    has its own name and kind here, but no row is predicted as it.

    Args:
        classes: All output classes of the model, by index.

    Returns:
        For each class its name, and "known", "novel" or "rejected".
    """
    names = chain([REJECTED], (f"{REJECTED}-{i}" for i in count(1)))
    rejected = next(
        _untaken_names(names, [c.name for c in classes if c.into is not None])
    )
    return [
        (rejected, REJECTED) if c.into is None else (c.name, c.kind) for c in classes
    ]


def _untaken_names(names: Iterable[str], taken: Iterable[str]) -> Iterator[str]:
    """Yield the names that are not taken, in their order.

    Names that differ only in case or Unicode form count as equal.

    Args:
        names: The candidate names.
        taken: The names that are in use.
    """
    others = {*map(folded, taken)}
    return (name for name in names if folded(name) not in others)


def merge_outputs(probabilities: Tensor, classes: Sequence[OutputClass]) -> Tensor:
    """Return probabilities in which those of merged classes are added to their targets.

    A dropped class keeps its probability. A merged class gets the probability 0. The
    input is not changed.

    Args:
        probabilities: Probabilities of all outputs, (..., C).
        classes: The C classes.

    Returns:
        Probabilities (..., C); the same tensor if no class was merged.
    """
    into = [c.index if c.into is None else c.into for c in classes]
    if into == [*range(len(classes))]:
        return probabilities
    targets = torch.tensor(into).to(probabilities.device, non_blocking=True)
    return torch.zeros_like(probabilities).index_add(-1, targets, probabilities)


def edits_of(classes: Sequence[OutputClass]) -> list[tuple[OutputClass, str]]:
    """Describe whether the user has merged or dropped each discovered class.

    Args:
        classes: All output classes of the model, by index.

    Returns:
        A pair for each discovered class, in their order: the class itself; and "" if it
        is kept, "merged into NAME", or "dropped".
    """
    found = []
    for c in classes:
        if c.kind == "novel":
            merged = (
                "dropped" if c.into is None else f"merged into {classes[c.into].name}"
            )
            found.append((c, "" if c.into == c.index else merged))
    return found


def hashes(classes: Sequence[OutputClass]) -> dict[str, str]:
    """Return hashes of the names and of the merges and drops of a model's classes.

    Args:
        classes: All output classes of the model, by index.

    Returns:
        "names": a hash of all names. "routes": a hash of what happens to each class,
        which is kept, merged into another class, or dropped. Both have 12 hexadecimal
        digits.
    """
    routes = ["rejected" if c.into is None else c.into for c in classes]
    values = {"names": [c.name for c in classes], "routes": routes}
    return {
        key: hashlib.sha256(json.dumps(v).encode()).hexdigest()[:12]
        for key, v in values.items()
    }


def template(classes: Sequence[OutputClass], model_hash: str) -> str:
    """Return the text of a new ``classes.yaml`` for the user to edit.

    It has comments that explain it, the hash of the model, and an entry with the index,
    name and action of every discovered class. No file is written.

    Args:
        classes: The classes of the model. Their present names and actions are written.
        model_hash: The hash of the model, which :func:`apply_edits` compares.
    """
    lines = [HEADER + f"model: {_format_scalar(model_hash)}", "classes:"]
    for c in classes:
        if c.kind == "novel":
            merged = "drop" if c.into is None else MERGE + classes[c.into].name
            action = "keep" if c.into == c.index else merged
            lines += [
                f"- index: {c.index}",
                f"  name: {_format_scalar(c.name)}",
                f"  action: {_format_scalar(action)}",
            ]
    return "\n".join(lines) + "\n"


def _format_scalar(value: str) -> str:
    """Format a string as a YAML scalar on one line, quoted if necessary.

    Text with characters that are unprintable or not ASCII is in double quotes, with
    these characters escaped.
    """
    style = None if value.isascii() and value.isprintable() else '"'
    return yaml.safe_dump(value, width=1_000_000, default_style=style).split("\n")[0]


class ClassEdit(BaseModel):
    """The entry of one discovered class in ``classes.yaml``.

    Attributes:
        index: The index of the class.
        name: The name that predictions use. A whole number means its text.
        action: "keep", "drop" or "merge into NAME".
    """

    model_config = STRICT

    index: int
    name: str
    action: str = "keep"

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, name: object) -> str:
        """Return the name without surrounding blanks, in Unicode's composed form.

        A whole number is converted to text, and not checked further.

        Raises:
            ValueError: The name is neither text nor a whole number, is empty, is longer
                than ``MAX_LABEL_LENGTH``, or has characters that cannot be printed.
        """
        if type(name) is int:
            return str(name)
        if not isinstance(name, str):
            raise ValueError("must be text; put it in quotes")
        name = composed(name.strip())
        if not 1 <= len(name) <= MAX_LABEL_LENGTH or not name.isprintable():
            raise ValueError(f"must have 1 to {MAX_LABEL_LENGTH} printable characters")
        return name

    @field_validator("action", mode="before")
    @classmethod
    def _check_action(cls, action: object) -> str:
        """Return the action in its usual form: "keep", "drop" or "merge into NAME".

        Blanks around it are removed, blanks before NAME become single ones, and NAME
        gets Unicode's composed form. Whether the class NAME exists is not checked.

        Raises:
            ValueError: It is another action. The words "keep", "drop" and "merge into"
                must be in lower case.
        """
        pattern = r"\A\s*merge\s+into\s+"
        wanted = re.sub(pattern, MERGE, composed(str(action))).strip()
        if wanted not in ("keep", "drop") and not wanted.startswith(MERGE):
            raise ValueError("must be keep, drop or merge into NAME")
        return wanted


class ClassEdits(BaseModel):
    """The content of ``classes.yaml``: the hash of the model, and the entries."""

    model_config = STRICT

    model: str
    classes: list[ClassEdit]


def apply_edits(
    data: bytes, where: str, classes: Sequence[OutputClass], model_hash: str
) -> list[OutputClass]:
    """Apply the names and actions of an edited ``classes.yaml`` to the classes.

    The actions replace former merges and drops of discovered classes. The NAME in
    "merge into NAME" is that of a known class, or the name that the file gives to a
    kept class. ``classes`` are not changed.

    Args:
        data: The content of ``classes.yaml``.
        where: The path of the file, for messages.
        classes: The present classes of the model.
        model_hash: The hash of the model.

    Returns:
        All classes of the model, known ones too, with the new names, merges and drops.

    Raises:
        ConfigError: The file is no such YAML file or belongs to another model; a
            discovered class has no entry, or two; an entry is of no discovered class; a
            name or an action is invalid; a kept class has the name of another kept or
            known class, also in another case or Unicode form; NAME is no known and no
            kept class; or all discovered classes are dropped. The message has one line.
    """
    tree = parse_yaml(data, where)
    if tree.get("model") != model_hash:
        raise ConfigError(
            f"{where} was written for another model; move it away and run uno classes"
            " again"
        )
    try:
        entries = ClassEdits.model_validate(tree).classes
        edits = _edits_by_index(entries, classes)
        targets = _index_kept_names(edits, classes)
        edited = list(classes)
        for index, edit in edits.items():
            into = index if edit.action == "keep" else None
            if edit.action.startswith(MERGE):
                into = _find_target(edit, targets, edits)
            edited[index] = replace(classes[index], name=edit.name, into=into)
        if all(edited[index].into is None for index in edits):
            raise ValueError(
                "all discovered classes are dropped: keep one, or merge one into"
                " another"
            )
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return edited


def _edits_by_index(
    entries: Sequence[ClassEdit], classes: Sequence[OutputClass]
) -> dict[int, ClassEdit]:
    """Return the entries of ``classes.yaml`` by the index of the discovered class.

    Args:
        entries: All entries of the file.
        classes: All classes of the model.

    Returns:
        Index of a discovered class -> its entry, for all discovered classes.

    Raises:
        ValueError: A discovered class has no entry, or two; or the index of an entry is
            not that of a discovered class.
    """
    novel = {c.index: c.name for c in classes if c.kind == "novel"}
    edits: dict[int, ClassEdit] = {}
    for edit in entries:
        if edit.index not in novel:
            known = f"{min(novel)} to {max(novel)}"
            raise ValueError(
                f"index must be that of a discovered class, {known}, got {edit.index}"
            )
        if edit.index in edits:
            raise ValueError(f"class {edit.index} has two entries")
        edits[edit.index] = edit
    for index, name in novel.items():
        if index not in edits:
            raise ValueError(f"class {index} ({name}) has no entry")
    return edits


def _index_kept_names(
    edits: Mapping[int, ClassEdit], classes: Sequence[OutputClass]
) -> dict[str, int]:
    """Return the index of every known and every kept class by its name.

    A kept class is a discovered class with the action "keep". It has its new name.

    Args:
        edits: The entry of each discovered class in ``classes.yaml``, by index.
        classes: All classes of the model.

    Raises:
        ValueError: A kept class has the same name as a known or another kept class, or
            a name that differs from it only in case or Unicode form.
    """
    targets = {c.name: c.index for c in classes if c.kind == "known"}
    alike = {folded(name): name for name in targets}
    for index, edit in edits.items():
        if edit.action == "keep":
            other = alike.get(folded(edit.name))
            if other is not None:
                both = " and ".join(map(repr, dict.fromkeys([other, edit.name])))
                raise ValueError(
                    f"two classes are named {both}; use action: merge into {other}, or"
                    " another name"
                )
            alike[folded(edit.name)] = edit.name
            targets[edit.name] = index
    return targets


def _find_target(
    edit: ClassEdit, targets: Mapping[str, int], edits: Mapping[int, ClassEdit]
) -> int:
    """Return the index of the class that an entry's action merges its class into.

    Args:
        edit: The entry in ``classes.yaml``, with the action "merge into NAME".
        targets: The index of every known and every kept class, by name.
        edits: The entry of each discovered class, by index.

    Raises:
        ValueError: There is no known or kept class of exactly this NAME.
    """
    wanted = edit.action.removeprefix(MERGE)
    if wanted in targets:
        return targets[wanted]
    what = f"no class{did_you_mean(wanted, targets)}"
    for other in edits.values():
        if other.name == wanted:
            what = "dropped" if other.action == "drop" else "merged itself"
    raise ValueError(f"class {edit.index} is merged into {wanted!r}, which is {what}")


def rename_classes(
    classes: Sequence[OutputClass], words: Sequence[str]
) -> list[OutputClass]:
    """Return the classes with new names for some discovered classes.

    Args:
        classes: All classes of the model. They are not changed.
        words: Names to set, such as ``5=nine`` or ``novel-1=nine``: the index or the
            present name of a discovered class, and its new name, after the first "=".
            A number that is such an index counts as the index, even if a class has it
            as its name.

    Returns:
        All classes. Whether the new names are valid or unique is not checked.

    Raises:
        ConfigError: A word has no new name, or names no discovered class.
    """
    novel = {c.name: c.index for c in classes if c.kind == "novel"}
    renamed = list(classes)
    for word in words:
        old, _, new = word.partition("=")
        if not new:
            raise ConfigError(
                "--rename expects INDEX=NAME or NAME=NAME, such as 5=nine, got"
                f" {word!r}"
            )
        index = novel.get(old)
        if old.isdecimal() and int(old) in novel.values():
            index = int(old)
        if index is None:
            known = f"they are {min(novel.values())} to {max(novel.values())}"
            hint = did_you_mean(old, novel, known)
            raise ConfigError(
                f"--rename {word}: there is no discovered class {old!r}{hint}"
            )
        renamed[index] = replace(classes[index], name=new)
    return renamed


def name_classes(
    classes: Sequence[OutputClass], labels: Mapping[int, Mapping[str, int]]
) -> tuple[list[OutputClass], list[str]]:
    """Name discovered classes by the labels that people gave to their images.

    A class gets the label of more than half of its labeled images. If that is the name
    of a known class, or of a discovered class that is kept and gets no label itself,
    the class is merged into that one and keeps its own name. Of several discovered
    classes with another label in common, the one with the most such images is kept (of
    equal ones the one with the lowest index), and the others are merged into it. A
    class without a label of more than half of its images, and a class that is merged or
    dropped already, gets no name. Classes that were merged into a class follow it if it
    is merged now.

    Args:
        classes: All classes of the model. They are not changed.
        labels: Index of a predicted class -> label -> the number of images, as
            :func:`~uno.results.annotations.count_labels` returns them.

    Returns:
        All classes with their new names and targets, which are not checked; and a line
        of text for each discovered class with labeled images that is neither merged nor
        dropped already, in the order of ``labels``. The line has the present name of
        the class, its most frequent label with the number of these and of all labels,
        and says so if they are not more than half.
    """
    named, lines = list(classes), list[str]()
    majority = dict[int, tuple[str, int]]()
    for index, counts in labels.items():
        if classes[index].kind == "novel" and classes[index].into == index:
            name, num = Counter(counts).most_common(1)[0]
            total = sum(counts.values())
            share = f"{classes[index].name}: {num} of {total} labels are {name!r}"
            if 2 * num > total:
                majority[index] = composed(name), num
                lines.append(share)
            else:
                lines.append(f"{share}, not more than half: unchanged")
    kept = [c for c in classes if c.into == c.index and c.index not in majority]
    target_of_name = {c.name: c.index for c in kept}
    for index, (name, _) in sorted(
        majority.items(), key=lambda item: (-item[1][1], item[0])
    ):
        target = target_of_name.setdefault(name, index)
        # the name of a merged class is of no use, and may not be that of another one
        new_name = name if target == index else classes[index].name
        named[index] = replace(classes[index], name=new_name, into=target)
    for c in classes:  # what was merged into a class follows it
        if c.into in majority and c.into != c.index:
            named[c.index] = replace(c, into=named[c.into].into)
    return named, lines
