"""What the outputs of a trained model are called, and what becomes of the discovered ones.

``model/classes.json`` lists them; ``classes.yaml`` is where a person names, merges or drops discovered ones.
A merged class adds its probability to the other's. That of a dropped class is handed to nobody: a row that
looks like one keeps a low ``probability``, and can be told from a row of a real class.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from uno.config import parse_yaml
from uno.errors import ConfigError, StorageError

YAML_FILE = "classes.yaml"
MAX_NAME_LENGTH = 300
MERGE = "merge into "
NUM_NEAREST = 3
HEADER = """\
# Names for the discovered classes. Edit this file, then run: uno classes RUN --apply
# name:   what predictions call the class.
# action: keep, drop (never predicted), or merge into NAME (a known class, or the name of another entry).
"""


@dataclass(frozen=True)
class OutputClass:
    """One of the C outputs of a model."""

    index: int
    name: str
    kind: str  # known | novel
    into: int | None  # the class that gets its probability: itself, or what it was merged into; None: dropped


class Suggestion(NamedTuple):
    """What a discovered class looks like, to somebody who has to name it: ``rows`` of ``total`` sampled
    unlabeled rows were put into it; the most similar classes as (name, cosine), most similar first.
    """

    rows: int
    total: int
    known: tuple[tuple[str, float], ...] = ()
    novel: tuple[tuple[str, float], ...] = ()


def parse_classes(data: bytes) -> list[OutputClass]:
    """The classes in the content of ``classes.json``, by index. StorageError where it is damaged."""
    try:
        classes = []
        for e in json.loads(data)["classes"]:
            into = None if e.get("drop") else e.get("merge_into", e["index"])
            classes.append(OutputClass(e["index"], e["name"], e["kind"], into))
        kinds, targets = [c.kind for c in classes], (None, *range(len(classes)))
        typed = all(isinstance(c.name, str) and isinstance(c.into, int | None) for c in classes)
        placed = all(c.index == i and c.into in targets for i, c in enumerate(classes))
        if not (classes and typed and placed and kinds == sorted(kinds) and {*kinds} <= {"known", "novel"}):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise StorageError("classes.json is damaged") from None
    return classes


def dump_classes(data: bytes, classes: Sequence[OutputClass]) -> bytes:
    """``classes.json`` with the content ``data``, its classes replaced."""
    entries = []
    for c in classes:
        fate = {"drop": True} if c.into is None else {"merge_into": c.into} if c.into != c.index else {}
        entries.append({"index": c.index, "name": c.name, "kind": c.kind, **fate})
    return json.dumps(json.loads(data) | {"classes": entries}, indent=1).encode()


def route(probabilities: Tensor, classes: Sequence[OutputClass]) -> Tensor:
    """(..., C) -> (..., C): merged classes added up, dropped ones zero, and missing from the sum of a row."""
    if all(c.into == c.index for c in classes):
        return probabilities
    device = probabilities.device
    kept = torch.tensor([c.index for c in classes if c.into is not None], device=device)
    into = torch.tensor([c.into for c in classes if c.into is not None], device=device)
    return torch.zeros_like(probabilities).index_add(-1, into, probabilities[..., kept])


def hashes(classes: Sequence[OutputClass]) -> dict[str, str]:
    """What identifies the "names" of classes, and the "routes": what is merged and dropped."""
    values = {"names": [c.name for c in classes], "routes": [c.into for c in classes]}
    return {key: hashlib.sha256(json.dumps(v).encode()).hexdigest()[:12] for key, v in values.items()}


def suggest(
    known: Tensor, novel: Tensor, features: Tensor, classes: Sequence[OutputClass]
) -> dict[int, Suggestion]:
    """What is similar to every discovered class, by N unlabeled rows: known classes by the mean cosine of its
    rows with them, ``known`` (N, C_l), discovered ones by the cosine of their mean ``features`` (N, D).
    ``novel`` (N, K) are cosines of the best head.
    """
    num_known, predicted = known.shape[1], torch.cat([known, novel], dim=-1).argmax(dim=-1)
    members = F.one_hot(predicted, len(classes))[:, num_known:].float()  # (N, C_u)
    counts, names = members.sum(dim=0), [c.name for c in classes]
    to_known = members.T @ known.float() / counts.clamp(min=1)[:, None]  # (C_u, C_l)
    means = F.normalize(members.T @ F.normalize(features.float(), dim=-1), dim=-1)
    to_novel = (means @ means.T).fill_diagonal_(-torch.inf)
    for cosines in (to_known, to_novel, to_novel.T):
        cosines[counts == 0] = -torch.inf

    def nearest(cosines: Tensor, names: Sequence[str]) -> tuple[tuple[str, float], ...]:
        values, order = cosines.sort(descending=True, stable=True)
        pairs = zip(order.tolist(), values.tolist(), strict=True)
        return tuple((names[i], value) for i, value in pairs if value > -torch.inf)[:NUM_NEAREST]

    found = {}
    for i, rows in enumerate(counts.int().tolist()):
        similar = nearest(to_known[i], names), nearest(to_novel[i], names[num_known:])
        found[num_known + i] = Suggestion(rows, len(predicted), *similar)
    return found


def template(classes: Sequence[OutputClass], model_hash: str, suggestions: Mapping[int, Suggestion]) -> str:
    """The text of a fresh ``classes.yaml``: every discovered class as it is, suggestions as comments."""
    lines = [HEADER + f"model: {_scalar(model_hash)}", "classes:"]
    for c in classes:
        if c.kind == "novel":
            merged = "drop" if c.into is None else MERGE + classes[c.into].name
            action = "keep" if c.into == c.index else merged
            lines.append(f"- index: {c.index}{_comment(suggestions.get(c.index))}")
            lines += [f"  name: {_scalar(c.name)}", f"  action: {_scalar(action)}"]
    return "\n".join(lines) + "\n"


def _scalar(value: str) -> str:
    """A string as a YAML scalar on one line."""
    style = None if value.isascii() and value.isprintable() else '"'
    return yaml.safe_dump(value, width=1_000_000, default_style=style).split("\n")[0]


def _comment(suggestion: Suggestion | None) -> str:
    """Names are shown escaped: a line break in one would end the comment."""
    if suggestion is None:
        return ""
    parts = [f"{suggestion.rows} of {suggestion.total} sampled rows"]
    for title, pairs in (("nearest known", suggestion.known), ("nearest discovered", suggestion.novel)):
        if pairs:
            parts.append(f"{title}: " + ", ".join(f"{name[:80]!a} {cosine:.2f}" for name, cosine in pairs))
    return f"  # {'; '.join(parts)}"


def read_edits(data: bytes, where: str, classes: Sequence[OutputClass], model_hash: str) -> list[OutputClass]:
    """All ``classes`` of a model under the names and actions of an edited ``classes.yaml``, ``data`` at
    ``where``. ConfigError: anything wrong with it, in one line that names the class.
    """
    tree = parse_yaml(data, where)
    _check_keys(tree, ("model", "classes"), where)
    if tree.get("model") != model_hash:
        raise ConfigError(f"{where} was written for another model; move it away and run uno classes again")
    if not isinstance(tree.get("classes"), list):
        raise ConfigError(f"{where}: classes must be a list of entries with index, name and action")
    novel, edited = [c.index for c in classes if c.kind == "novel"], list(classes)
    edits: dict[int, tuple[str, str]] = {}
    for number, entry in enumerate(tree["classes"], start=1):
        index, name, action = _entry(entry, f"{where}: entry {number}", novel)
        if index in edits:
            raise ConfigError(f"{where}: class {index} has two entries")
        edits[index] = name, action
    for index in novel:
        if index not in edits:
            raise ConfigError(f"{where}: class {index} ({classes[index].name}) has no entry")
    targets = {c.name: c.index for c in classes if c.kind == "known"}
    for index, (name, action) in edits.items():
        if action == "keep" and targets.setdefault(name, index) != index:
            ways = f"use action: merge into {name}, or another name"
            raise ConfigError(f"{where}: two classes are named {name!r}; {ways}")
    gone = dict(edits.values())
    for index, (name, action) in edits.items():
        into = index if action == "keep" else None
        if action.startswith(MERGE):
            wanted = action.removeprefix(MERGE)
            if wanted not in targets:
                what = "no class" + _did_you_mean(wanted, targets)
                if wanted in gone:
                    what = "dropped" if gone[wanted] == "drop" else "merged itself"
                raise ConfigError(f"{where}: class {index} is merged into {wanted!r}, which is {what}")
            into = targets[wanted]
        edited[index] = replace(classes[index], name=name, into=into)
    return edited


def with_names(
    data: bytes, where: str, classes: Sequence[OutputClass], model_hash: str, words: Sequence[str]
) -> bytes:
    """``data``, a ``classes.yaml``, with the names of ``words`` such as ``5=nine``: a discovered class by its
    index or present name. Whatever else stands there stays. ConfigError: no such class, or not in our form.
    """
    now = {c.name: c.index for c in read_edits(data, where, classes, model_hash) if c.kind == "novel"}
    text = data.decode()
    for word in words:
        old, equals, new = word.partition("=")
        index = int(old) if old.isdecimal() and int(old) in now.values() else now.get(old)
        if not (equals and new):
            raise ConfigError(f"--rename takes INDEX=NAME or NAME=NAME, such as 5=nine, got {word!r}")
        if index is None:
            hint = _did_you_mean(old, now) or f"; those are {min(now.values())} to {max(now.values())}"
            raise ConfigError(f"--rename {word}: there is no discovered class {old!r}{hint}")
        entry = re.search(rf"^- index: {index}(?: .*)?\n  name: (.*)$", text, re.M)
        if entry is None:
            raise ConfigError(f"{where}: class {index} does not stand there as it was written; name it there")
        text = text[: entry.start(1)] + _scalar(new) + text[entry.end(1) :]
    return text.encode()


def _entry(entry: Any, where: str, novel: Sequence[int]) -> tuple[int, str, str]:
    """(index, name, action) of one entry; ``novel`` are the indices there may be."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must have index, name and action, got {str(entry)[:80]!r}")
    _check_keys(entry, ("index", "name", "action"), where)
    index, name, action = entry.get("index"), entry.get("name"), entry.get("action", "keep")
    if type(index) is not int or index not in novel:
        known = f"{min(novel)} to {max(novel)}"
        raise ConfigError(f"{where}: index must be that of a discovered class, {known}, got {index!r}")
    where = f"{where} (class {index})"
    name = str(name) if type(name) is int else name  # `name: 7` means the text
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name must be text, got {name!r}; put it in quotes")
    name = name.strip()
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ConfigError(f"{where}: name must have 1 to {MAX_NAME_LENGTH} printable characters")
    wanted = re.sub(r"\A\s*merge\s+into\s+", MERGE, str(action)).strip()
    if wanted not in ("keep", "drop") and not wanted.startswith(MERGE):
        raise ConfigError(f"{where}: action must be keep, drop or merge into NAME, got {action!r}")
    return index, name, wanted


def _check_keys(tree: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in tree:
        if key not in known:
            hint = _did_you_mean(str(key), known) or f"; known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
