"""Names for discovered classes: what a person may write, what it does, and one line
for every mistake.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
import yaml

from uno.errors import ConfigError, StorageError
from uno.results.classes import (
    ModelClasses,
    OutputClass,
    apply_edits,
    first_classes,
    merge_outputs,
    name_classes,
    prediction_labels,
    rename_classes,
    template,
)

HASH = "0123456789abcdef"
CLASSES = first_classes(["cat", "dog", "007"], 4)
HOSTILE = [
    "</script>",
    "a: b # c",
    "'\"",
    "- x",
    "yes",
    "1e3",
    "é",
    "😀",
    "x" * 300,
    "{a}",
    "&a *a",
]


def edits(*entries, **keys) -> bytes:
    full = [
        {"index": i, "name": f"novel-{i - 2}", "action": "keep"} for i in range(3, 7)
    ]
    for entry in entries:
        full[entry["index"] - 3] |= entry
    return yaml.safe_dump({"model": HASH, "classes": full, **keys}).encode()


def read(data: bytes) -> list[OutputClass]:
    return apply_edits(data, "classes.yaml", CLASSES, HASH)


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_survives_the_file(name):
    named = replace(CLASSES[3], name=name)
    classes = [*CLASSES[:3], named, *CLASSES[4:6], replace(CLASSES[6], into=3)]
    assert read(template(classes, HASH).encode()) == classes
    stored = ModelClasses(classes=classes)
    assert ModelClasses.parse(stored.dump()) == stored


ENTRY = {"index": 0, "name": "a", "kind": "known", "into": 0}


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        '{"classes": []}',
        *(
            json.dumps({"classes": [ENTRY | change]})
            for change in (
                {"index": 1},
                {"into": 5},
                {"into": math.inf},
                {"into": None},
                {"kind": "new"},
                {"name": 3},
                {"more": 1},
            )
        ),
    ],
)
def test_damaged_class_lists_are_refused(damaged):
    assert ModelClasses.parse(json.dumps({"classes": [ENTRY]}).encode())
    with pytest.raises(StorageError, match=r"classes.json is damaged"):
        ModelClasses.parse(damaged.encode())


def test_names_merges_and_drops():
    seven, merged = {"index": 3, "name": 7}, {"index": 4, "action": " merge  into 7 "}
    like_cats = {"index": 6, "name": "like cats", "action": "merge into cat"}
    found = read(edits(seven, merged, {"index": 5, "action": "drop"}, like_cats))
    expected = [("7", 3), ("novel-2", 3), ("novel-3", None), ("like cats", 0)]
    assert (
        found[:3] == CLASSES[:3] and [(c.name, c.into) for c in found[3:]] == expected
    )
    before = ModelClasses(classes=CLASSES, best_head=2, alignment=[[0]])
    stored = ModelClasses.parse(before.with_classes(found).dump())
    assert (stored.classes, stored.best_head, stored.alignment) == (found, 2, [[0]])


def test_a_second_edit_can_take_the_first_one_back():
    merged = read(edits({"index": 4, "action": "merge into novel-1"}))
    assert apply_edits(edits(), "classes.yaml", merged, HASH) == CLASSES


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"classes: [", "while parsing"),
        (b"\xff\xfe", "'utf-8' codec"),
        (b"a: &x [1]\nb: *x", "aliases"),
        (b"[" * 100, "nested deeper"),
        (b"# " + b"x" * 2_000_000, "larger than"),
        (b"", "written for another model"),
        (b"[1]", "must hold a mapping of keys"),
        (edits(classe=1), "classe: Extra inputs are not permitted"),
        (edits(model="ffff"), "written for another model"),
        (edits(classes={}), "classes: Input should be a valid list"),
        (edits(classes=[1]), r"classes\.0: Input should be a valid dictionary"),
        (edits(classes=[]), r"class 3 \(novel-1\) has no entry"),
        (
            edits(classes=[{"index": 3, "name": name} for name in "ab"]),
            "class 3 has two entries",
        ),
        (edits(classes=[{"index": 0, "name": "a"}]), "3 to 6, got 0"),
        (
            edits(classes=[{"index": "3", "name": "a"}]),
            "index: Input should be a valid integer",
        ),
        (edits({"index": 3, "nam": "a"}), "nam: Extra inputs are not permitted"),
        (edits({"index": 3, "name": ""}), "1 to 300 printable"),
        (edits({"index": 3, "name": "a\nb"}), "1 to 300 printable"),
        (edits({"index": 3, "name": "\u202ertl"}), "1 to 300 printable"),
        (edits({"index": 3, "name": None}), "must be text"),
        (edits({"index": 3, "name": True}), "in quotes"),
        (
            edits({"index": 3, "action": "delete"}),
            "keep, drop or merge into NAME",
        ),
        (edits({"index": 3, "action": 5}), "keep, drop or merge"),
        (edits({"index": 3, "action": "merge into"}), "keep, drop or merge"),
        (
            edits({"index": 3, "action": "merge into catt"}),
            "no class; did you mean 'cat'",
        ),
        (edits({"index": 3, "action": "merge into novel-1"}), "which is merged itself"),
        (
            edits(
                {"index": 3, "action": "merge into novel-2"},
                {"index": 4, "action": "drop"},
            ),
            "is dropped",
        ),
        (edits({"index": 3, "name": "novel-2"}), "two classes are named 'novel-2'"),
        (edits({"index": 3, "name": "cat"}), "use action: merge into cat"),
        (edits({"index": 3, "name": "Cat"}), "two classes are named 'cat' and 'Cat'"),
        (
            edits(*({"index": i, "action": "drop"} for i in range(3, 7))),
            "all discovered classes are dropped",
        ),
    ],
)
def test_mistakes_are_one_line(data, words):
    with pytest.raises(ConfigError, match=words) as error:
        read(data)
    assert "\n" not in str(error.value) and str(error.value).startswith("classes.yaml")


def test_route_adds_merged_and_keeps_dropped():
    """Kills: a merge that overwrites, a dropped class whose mass goes to the others
    or nowhere.
    """
    into = [0, 1, 2, 0, 0, None, 6]
    classes = [OutputClass(i, str(i), "novel", t) for i, t in enumerate(into)]
    probabilities = torch.rand(5, 7).softmax(dim=-1)
    expected = probabilities.clone()
    expected[:, 0] += probabilities[:, [3, 4]].sum(dim=-1)
    expected[:, [3, 4]] = 0
    torch.testing.assert_close(merge_outputs(probabilities, classes), expected)
    assert merge_outputs(probabilities, CLASSES) is probabilities
    assert prediction_labels(classes)[4:6] == [("4", "novel"), ("rejected", "rejected")]


def test_metrics_know_the_classes_they_are_of():
    first = ModelClasses(classes=CLASSES)
    edited = first.with_classes(read(edits({"index": 4, "action": "drop"})))
    assert first.is_measured and not edited.is_measured
    measured = ModelClasses.parse(edited.as_measured().dump())
    assert measured.is_measured and measured.classes == edited.classes
    assert not measured.with_classes(CLASSES).is_measured  # taken back


def renamed(classes: list[OutputClass], *words: str) -> list[OutputClass]:
    """The classes after ``--rename``, as the file of edits says them."""
    return read(template(rename_classes(classes, words), HASH).encode())


def test_rename_changes_names_and_nothing_else():
    """Kills: class 1 taken for class 13, a name that YAML reads as something else."""
    before = read(edits({"index": 3, "action": "drop"}))
    after = renamed(before, "4=yes", "novel-4=big # cat: é")
    assert [c.name for c in after[3:]] == ["novel-1", "yes", "novel-3", "big # cat: é"]
    assert [c.into for c in after] == [c.into for c in before]
    merged = read(edits({"index": 3, "action": "merge into novel-2"}))
    assert [c.into for c in renamed(merged, "4=yes: no")][3:5] == [4, 4]
    swapped = renamed(merged, "novel-2=novel-3", "novel-3=novel-2")
    assert [c.into for c in swapped][3:6] == [4, 4, 5]
    with pytest.raises(ConfigError, match="two classes are named"):
        renamed(before, "5=cat")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("4", "such as 5=nine"),
        ("4=", "such as 5=nine"),
        ("0=x", "class '0'; they are 3 to 6"),
        ("novel=x", "did you mean 'novel-"),
        ("44=x", "they are 3 to 6"),
        ("cat=x", "'cat'"),
    ],
)
def test_mistakes_in_a_rename_are_told(word, says):
    with pytest.raises(ConfigError, match=says):
        rename_classes(CLASSES, [word])


def test_discovered_classes_take_free_names():
    """Kills: a name that predictions hold twice, a file of our own that is refused."""
    known = ["novel-1", "NOVEL-3", "rejected"]
    classes = first_classes(known, 3)
    assert [c.name for c in classes] == [*known, "novel-2", "novel-4", "novel-5"]
    text = template(classes, HASH)
    assert apply_edits(text.encode(), "classes.yaml", classes, HASH) == classes
    dropped = text.replace("  action: keep", "  action: drop", 1).encode()
    edited = apply_edits(dropped, "classes.yaml", classes, HASH)
    assert prediction_labels(edited)[2:] == [
        ("rejected", "known"),
        ("rejected-1", "rejected"),
        ("novel-4", "novel"),
        ("novel-5", "novel"),
    ]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({3: {"owl": 2, "jay": 1}}, [("owl", 3)]),
        ({3: {"owl": 2, "jay": 2}}, [("novel-1", 3)]),
        ({3: {"novel-1": 2}}, [("novel-1", 3)]),
        ({3: {CLASSES[1].name: 2}}, [("novel-1", 1)]),
        ({3: {"novel-2": 2}}, [("novel-1", 4)]),
        ({3: {"owl": 2}, 4: {"owl": 3}}, [("novel-1", 4)]),
        ({3: {"owl": 3}, 4: {"owl": 3}}, [("owl", 3)]),
        # names that are swapped are not merged
        ({3: {"novel-2": 1}, 4: {"novel-1": 1}}, [("novel-2", 3), ("novel-1", 4)]),
    ],
)
def test_a_class_gets_the_label_of_most_of_its_labeled_images(labels, expected):
    classes, lines = name_classes(CLASSES, labels)
    assert len(lines) == len(labels)
    found = read(template(classes, HASH).encode())[3:]
    assert [(c.name, c.into) for c in found[: len(expected)]] == expected
