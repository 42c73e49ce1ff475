"""Names and merges of a model's output classes.

``model/classes.json`` lists the classes. A person names, merges or drops discovered
classes in ``classes.yaml``. A merged class adds its probability to the class that it is
merged into. A dropped class keeps its probability: a row that most probably belongs to
it is rejected, with that probability, and the class of no other row changes.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from uno.config import parse_yaml
from uno.data.files import parse_json
from uno.errors import ConfigError, StorageError, did_you_mean, one_line
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


@dataclass(frozen=True)
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
    kind: str
    into: int | None


class Suggestion(NamedTuple):
    """Facts about a discovered class, for a person who has to name it.

    Attributes:
        rows: The number of sampled unlabeled rows that the model put into the class.
        total: The number of all sampled unlabeled rows.
        known: The most similar known classes as (name, cosine), most similar first.
        novel: The most similar other discovered classes, in the same form.
    """

    rows: int
    total: int
    known: tuple[tuple[str, float], ...] = ()
    novel: tuple[tuple[str, float], ...] = ()


def first_classes(known: Sequence[str], num_novel: int) -> list[OutputClass]:
    """Return the output classes of a model that was just trained.

    Discovered classes are named ``novel-1``, ``novel-2`` and so on. A name that a known
    class already has is skipped.

    Args:
        known: The names of the known classes, by index.
        num_novel: The number of discovered classes.
    """
    novel = islice(_free((f"novel-{i}" for i in count(1)), known), num_novel)
    named = [(name, "known") for name in known] + [(name, "novel") for name in novel]
    return [
        OutputClass(index, name, kind, index)
        for index, (name, kind) in enumerate(named)
    ]


def called(classes: Sequence[OutputClass]) -> list[tuple[str, str]]:
    """Return the name and the kind that predictions give to the rows of each class.

    Rows of a dropped class have the kind "rejected" and the name "rejected". If a class
    that was not dropped has this name, the name is "rejected-1" and so on.

    Returns:
        For each class its name, and "known", "novel" or "rejected".
    """
    names = chain([REJECTED], (f"{REJECTED}-{i}" for i in count(1)))
    rejected = next(_free(names, [c.name for c in classes if c.into is not None]))
    return [
        (rejected, REJECTED) if c.into is None else (c.name, c.kind) for c in classes
    ]


def _free(names: Iterable[str], taken: Iterable[str]) -> Iterator[str]:
    """Yield the names that are not taken.

    Names that differ only in case or Unicode form count as equal.

    Args:
        names: The candidate names.
        taken: The names that are in use.
    """
    others = {*map(folded, taken)}
    return (name for name in names if folded(name) not in others)


def parse_classes(data: bytes) -> list[OutputClass]:
    """Parse the output classes in the content of ``classes.json``.

    Args:
        data: The content of the file.

    Returns:
        The classes by index, known ones first, with the class that each is merged into.

    Raises:
        StorageError: The content is damaged.
    """
    try:
        classes = []
        for e in parse_json(data)["classes"]:
            into = None if e.get("drop") else e.get("merge_into", e["index"])
            classes.append(OutputClass(e["index"], e["name"], e["kind"], into))
        kinds, targets = [c.kind for c in classes], (None, *range(len(classes)))
        typed = all(
            isinstance(c.name, str) and isinstance(c.into, int | None) for c in classes
        )
        placed = all(c.index == i and c.into in targets for i, c in enumerate(classes))
        left = any(c.into == c.index for c in classes) and len(classes) <= MAX_CLASSES
        if not (
            left
            and typed
            and placed
            and kinds == sorted(kinds)
            and {*kinds} <= {"known", "novel"}
        ):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise StorageError("classes.json is damaged") from None
    return classes


def dump_classes(data: bytes, classes: Sequence[OutputClass]) -> bytes:
    """Return the content of ``classes.json`` with its classes replaced.

    Args:
        data: The present content, a JSON mapping. Its other entries stay.
        classes: The classes to write.
    """
    entries = []
    for c in classes:
        fate = (
            {"drop": True}
            if c.into is None
            else {"merge_into": c.into}
            if c.into != c.index
            else {}
        )
        entries.append({"index": c.index, "name": c.name, "kind": c.kind, **fate})
    return json.dumps(parse_json(data) | {"classes": entries}, indent=1).encode()


def merge_outputs(probabilities: Tensor, classes: Sequence[OutputClass]) -> Tensor:
    """Add the probabilities of merged classes to those of their targets.

    A dropped class keeps its probability. A merged class gets the probability 0.

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


def unedited(classes: Sequence[OutputClass]) -> list[OutputClass]:
    """Return the classes as if none had been merged or dropped.

    Their names stay as they are.
    """
    return [replace(c, into=c.index) for c in classes]


def edits_of(classes: Sequence[OutputClass]) -> list[tuple[OutputClass, str]]:
    """Describe what the user has decided about each discovered class.

    Returns:
        For each discovered class the class itself, and "" if it is kept, "merged into
        NAME", or "dropped".
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
    """Return hashes that identify the user's decisions on the classes.

    Returns:
        "names": a hash of all names. "routes": a hash of the class that each class is
        merged into, or that it was dropped. Both have 12 hexadecimal digits.
    """
    routes = ["rejected" if c.into is None else c.into for c in classes]
    values = {"names": [c.name for c in classes], "routes": routes}
    return {
        key: hashlib.sha256(json.dumps(v).encode()).hexdigest()[:12]
        for key, v in values.items()
    }


def is_measured(data: bytes) -> bool:
    """Return whether a run's metrics belong to the present merges and drops.

    Args:
        data: The content of ``classes.json``. Without the entry "measured" the metrics
            belong to classes of which none was merged or dropped.
    """
    classes = parse_classes(data)
    at_first = hashes(unedited(classes))["routes"]
    return parse_json(data).get("measured", at_first) == hashes(classes)["routes"]


def with_measured(data: bytes) -> bytes:
    """Note in ``classes.json`` that the metrics belong to the present merges and drops.

    Args:
        data: The content of ``classes.json``.

    Returns:
        The content with the entry "measured".
    """
    return json.dumps(
        parse_json(data) | {"measured": hashes(parse_classes(data))["routes"]}, indent=1
    ).encode()


def template(
    classes: Sequence[OutputClass],
    model_hash: str,
    suggestions: Mapping[int, Suggestion],
) -> str:
    """Return the text of a fresh ``classes.yaml`` with every discovered class.

    Args:
        classes: The classes of the model. Their present names and actions are written.
        model_hash: The hash of the model, which :func:`read_edits` compares.
        suggestions: Facts about discovered classes, by index. They become comments.
    """
    lines = [HEADER + f"model: {_scalar(model_hash)}", "classes:"]
    for c in classes:
        if c.kind == "novel":
            merged = "drop" if c.into is None else MERGE + classes[c.into].name
            action = "keep" if c.into == c.index else merged
            lines.append(f"- index: {c.index}{_comment(suggestions.get(c.index))}")
            lines += [f"  name: {_scalar(c.name)}", f"  action: {_scalar(action)}"]
    return "\n".join(lines) + "\n"


def _scalar(value: str) -> str:
    """Format a string as a YAML scalar on one line, quoted if necessary."""
    style = None if value.isascii() and value.isprintable() else '"'
    return yaml.safe_dump(value, width=1_000_000, default_style=style).split("\n")[0]


def _comment(suggestion: Suggestion | None) -> str:
    """Format a suggestion as a YAML comment; "" if there is none.

    Names are escaped and cut to 80 characters, because a line break in one would end
    the comment.
    """
    if suggestion is None:
        return ""
    parts = [f"{suggestion.rows} of {suggestion.total} sampled images"]
    for title, pairs in (
        ("nearest known", suggestion.known),
        ("nearest discovered", suggestion.novel),
    ):
        if pairs:
            parts.append(
                f"{title}: "
                + ", ".join(f"{name[:80]!a} {cosine:.2f}" for name, cosine in pairs)
            )
    return f"  # {'; '.join(parts)}"


def read_edits(
    data: bytes, where: str, classes: Sequence[OutputClass], model_hash: str
) -> list[OutputClass]:
    """Read the names and actions of an edited ``classes.yaml``.

    Args:
        data: The content of ``classes.yaml``.
        where: The path of the file, for messages.
        classes: The present classes of the model.
        model_hash: The hash of the model.

    Returns:
        All classes of the model, with the names and targets of the file.

    Raises:
        ConfigError: The file is invalid or belongs to another model. The message has
            one line and names the class.
    """
    tree = parse_yaml(data, where)
    _check_keys(tree, ("model", "classes"), where)
    if tree.get("model") != model_hash:
        raise ConfigError(
            f"{where} was written for another model; move it away and run uno classes"
            " again"
        )
    if not isinstance(tree.get("classes"), list):
        raise ConfigError(
            f"{where}: classes must be a list of entries with index, name and action"
        )
    novel, edited = [c.index for c in classes if c.kind == "novel"], list(classes)
    edits: dict[int, tuple[str, str]] = {}
    for number, entry in enumerate(tree["classes"], start=1):
        index, name, action = _entry(entry, f"{where}: entry {number}", novel)
        if index in edits:
            raise ConfigError(f"{where}: class {index} has two entries")
        edits[index] = name, action
    for index in novel:
        if index not in edits:
            raise ConfigError(
                f"{where}: class {index} ({classes[index].name}) has no entry"
            )
    targets = {c.name: c.index for c in classes if c.kind == "known"}
    alike = {folded(name): name for name in targets}
    for index, (name, action) in edits.items():
        other = alike.setdefault(folded(name), name) if action == "keep" else name
        if action == "keep" and (
            other != name or targets.setdefault(name, index) != index
        ):
            both = repr(name) if other == name else f"{other!r} and {name!r}"
            ways = f"use action: merge into {other}, or another name"
            raise ConfigError(f"{where}: two classes are named {both}; {ways}")
    gone = dict(edits.values())
    for index, (name, action) in edits.items():
        into = index if action == "keep" else None
        if action.startswith(MERGE):
            wanted = action.removeprefix(MERGE)
            if wanted not in targets:
                what = "no class" + did_you_mean(wanted, targets)
                if wanted in gone:
                    what = "dropped" if gone[wanted] == "drop" else "merged itself"
                raise ConfigError(
                    f"{where}: class {index} is merged into {wanted!r}, which is {what}"
                )
            into = targets[wanted]
        edited[index] = replace(classes[index], name=name, into=into)
    if all(edited[index].into is None for index in novel):
        raise ConfigError(
            f"{where}: all discovered classes are dropped: keep one, or merge one into"
            " another"
        )
    return edited


def with_names(
    data: bytes,
    where: str,
    classes: Sequence[OutputClass],
    model_hash: str,
    words: Sequence[str],
) -> bytes:
    """Change the names of discovered classes in the text of ``classes.yaml``.

    Actions that merge into a renamed class follow. All other text stays.

    Args:
        data: The content of ``classes.yaml``.
        where: The path of the file, for messages.
        classes: The present classes of the model.
        model_hash: The hash of the model.
        words: Names to set, such as ``5=nine``: the index or the present name of a
            discovered class, and its new name.

    Returns:
        The changed content.

    Raises:
        ConfigError: A word has another form or names no discovered class, or the file
            is invalid, or an entry was changed by hand so that it cannot be edited.
    """
    now = {
        c.name: c.index
        for c in read_edits(data, where, classes, model_hash)
        if c.kind == "novel"
    }
    text, merges = data.decode(), dict[str, str]()
    for word in words:
        old, equals, new = word.partition("=")
        index = (
            int(old) if old.isdecimal() and int(old) in now.values() else now.get(old)
        )
        if not (equals and new):
            raise ConfigError(
                "--rename expects INDEX=NAME or NAME=NAME, such as 5=nine, got"
                f" {word!r}"
            )
        if index is None:
            hint = did_you_mean(
                old, now, f"they are {min(now.values())} to {max(now.values())}"
            )
            raise ConfigError(
                f"--rename {word}: there is no discovered class {old!r}{hint}"
            )
        entry = re.search(rf"^- index: {index}(?: .*)?\n  name: (.*)$", text, re.M)
        if entry is None:
            why = "its entry was changed by hand; edit the name in the file"
            raise ConfigError(
                f"{where}: cannot edit class {index} automatically: {why}"
            )
        text = text[: entry.start(1)] + _scalar(new) + text[entry.end(1) :]
        before = next(name for name, own in now.items() if own == index)
        merges[_scalar(MERGE + before)] = _scalar(MERGE + new)

    def followed(action: re.Match[str]) -> str:
        return action[1] + merges.get(action[2], action[2])

    return re.sub(r"^(  action: )(.*)$", followed, text, flags=re.M).encode()


def _entry(entry: Any, where: str, novel: Sequence[int]) -> tuple[int, str, str]:
    """Check the entry of one discovered class in ``classes.yaml``.

    Args:
        entry: The parsed entry, a mapping with index, name and action.
        where: The place of the entry, for messages.
        novel: The indices of the discovered classes.

    Returns:
        The index, the name, and the action: "keep", "drop" or "merge into NAME".

    Raises:
        ConfigError: The entry is no such mapping, its index is that of no discovered
            class, or its name or action is invalid.
    """
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{where} must have index, name and action, got {str(entry)[:80]!r}"
        )
    _check_keys(entry, ("index", "name", "action"), where)
    index, name, action = (
        entry.get("index"),
        entry.get("name"),
        entry.get("action", "keep"),
    )
    if type(index) is not int or index not in novel:
        known = f"{min(novel)} to {max(novel)}"
        raise ConfigError(
            f"{where}: index must be that of a discovered class, {known}, got"
            f" {one_line(repr(index))}"
        )
    where = f"{where} (class {index})"
    name = str(name) if type(name) is int else name  # `name: 7` means the text
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name must be text, got {name!r}; put it in quotes")
    name = composed(name.strip())
    if not 1 <= len(name) <= MAX_LABEL_LENGTH or not name.isprintable():
        raise ConfigError(
            f"{where}: name must have 1 to {MAX_LABEL_LENGTH} printable characters"
        )
    wanted = re.sub(r"\A\s*merge\s+into\s+", MERGE, composed(str(action))).strip()
    if wanted not in ("keep", "drop") and not wanted.startswith(MERGE):
        raise ConfigError(
            f"{where}: action must be keep, drop or merge into NAME, got {action!r}"
        )
    if name == REJECTED and wanted != "drop":
        raise ConfigError(
            f"{where}: {name!r} is reserved for images of dropped classes"
        )
    return index, name, wanted


def _check_keys(tree: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    """Raise ConfigError if a mapping has a key that is not one of ``known``.

    Args:
        tree: The mapping.
        known: The allowed keys.
        where: The place of the mapping, for the message.
    """
    for key in tree:
        if key not in known:
            hint = did_you_mean(str(key), known, f"keys are {', '.join(known)}")
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
