"""Known classes, novel classes, piles and limits."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uno.config import Config, DataConfig, override
from uno.data.columns import make_ids, make_labels
from uno.data.rows import Rows
from uno.data.sources import read_digits
from uno.data.splits import (
    decide_setting,
    make_task,
    order_classes,
    parse_known_classes,
    unlabel,
)

from .builders import failure


def rows_of(labels, split=None, **options):
    num = len(labels)
    is_train = np.array(split or ["train"] * num) == "train"
    images = np.arange(num * 12, dtype=np.uint8).reshape(num, 2, 2, 3)
    ids = make_ids(f"r{i}" for i in range(num))
    return Rows(ids, images, make_labels(labels), is_train, "rows", **options)


def task_of(rows, **config):
    return make_task(rows, DataConfig(**config))


@pytest.mark.parametrize(("config", "num_novel"), [({}, 5), ({"num_novel": 3}, 3)])
def test_benchmark_hides_the_other_labels(config, num_novel):
    task = task_of(read_digits(), known_classes="first:5", **config)
    assert (task.known, task.novel) == (list("01234"), list("56789"))
    assert task.num_novel == num_novel
    truth = np.array(task.rows.labels.to_pylist(), dtype=int)
    assert np.array_equal(task.eval_labels, truth)
    assert np.array_equal(task.labels, np.where(task.is_train & (truth < 5), truth, -1))


def test_eval_labels_are_never_labels():
    """An unlabeled row of a known class stays unlabeled, whatever its truth is."""
    split, truth = ["train"] * 4 + ["test"] * 2, [None, "c", "a", "b", "d", None]
    labels = ["a", None, None, None, None, "c"]
    rows = rows_of(labels, split, eval_labels=make_labels(truth))
    task = task_of(rows, num_novel=2)
    assert (task.known, task.novel) == (["a"], ["b", "c", "d"])
    assert task.labels.tolist() == [0, -1, -1, -1, -1, -1]
    assert task.eval_labels.tolist() == [0, 2, 0, 1, 3, 2]
    changed = replace(rows, eval_labels=make_labels(truth[::-1]))
    assert task_of(changed, num_novel=2).labels.tolist() == task.labels.tolist()
    assert rows.fingerprint == changed.fingerprint


@pytest.mark.parametrize(
    ("names", "declared", "expected"),
    [
        (["10", "9", "2", "1"], [], ["1", "2", "9", "10"]),
        (["b10", "b9", "a"], [], ["a", "b9", "b10"]),
        (["01", "1", "001"], [], ["001", "01", "1"]),
        (["cat", "ant", "zebra"], ["zebra", "ant"], ["zebra", "ant", "cat"]),
        (["1" + "0" * 5000, "9" * 5000], [], ["9" * 5000, "1" + "0" * 5000]),
    ],
)
def test_classes_are_in_the_order_of_the_source_then_of_numbers(
    names, declared, expected
):
    assert order_classes(names, declared) == expected


@pytest.mark.parametrize(
    ("declared", "config", "known"),
    [
        ({"known": ("z",)}, {}, ["z"]),
        ({"known": ("z",)}, {"known_classes": "first:1"}, ["x"]),
        ({"class_names": ("z", "x")}, {"known_classes": "first:1"}, ["z"]),
        # the order of indices does not depend on how they were listed
        ({}, {"known_classes": "y,x"}, ["x", "y"]),
    ],
)
def test_known_classes_are_those_of_the_option_or_else_of_the_source(
    declared, config, known
):
    assert task_of(rows_of(["x", "y", "z"], **declared), **config).known == known


@given(st.lists(st.text(max_size=6), unique=True, max_size=8))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_order_is_total_for_any_names(names):
    assert order_classes(names) == order_classes(reversed(names))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (" dog , cat ", {"cat", "dog"}),
        ("{folder}/names.txt", {"a,b", "x"}),
        ("names.txt", {"a,b", "x"}),
        ("dog", {"dog"}),  # a class, although a file has its name
    ],
)
def test_known_classes_as_names_and_file(tmp_path, monkeypatch, value, expected):
    (tmp_path / "names.txt").write_text("a,b\n\n x \n")
    (tmp_path / "dog").write_text("cat")
    monkeypatch.chdir(tmp_path)
    classes = ["cat", "dog", "a,b", "x"]
    assert parse_known_classes(value.format(folder=tmp_path), classes) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("first:0", "from 1 to 3"),
        ("first:4", "from 1 to 3"),
        ("first:x", "from 1 to 3"),
        ("first:3", "nothing to discover"),
        ("ct", "did you mean 'cat'?"),
        ("qqqq", "classes are cat, cow, dog"),
        ("cat,cat", "listed twice"),
        ("", "no class name given"),
        ("/nowhere/names.txt", "cannot read known_classes file"),
    ],
)
def test_known_class_errors(value, text):
    assert text in failure(task_of, rows_of(["cat", "dog", "cow"]), known_classes=value)


def test_a_class_has_a_name_of_some_size_and_classes_a_number(monkeypatch):
    """Kills: matrices of a million classes, a label that is a whole file."""
    rows = rows_of(["a", "b", None, None])
    monkeypatch.setattr("uno.data.splits.MAX_CLASSES", 4)
    assert task_of(rows, num_novel=2).num_novel == 2
    assert "5 classes, more than 4" in failure(task_of, rows, num_novel=3)
    assert "has 301 characters, more than 300: 'xxx" in failure(rows_of, ["x" * 301])
    monkeypatch.setattr("uno.data.rows.MAX_ROWS", 3)
    assert "4 rows, more than 3" in failure(rows_of, ["a"] * 4)


@pytest.mark.parametrize(
    ("labels", "split", "config", "text"),
    [
        ([None, None], None, {"num_novel": 2}, "no image has a label"),
        (
            [None, "a"],
            ["train", "test"],
            {"num_novel": 2},
            "no training image has a label",
        ),
        (["a", "b"], None, {"num_novel": 2}, "--known-classes first:N"),
        (["a", None], None, {}, "--num-novel"),
        (["a", None], None, {"known_classes": "first:1"}, "--num-novel"),
        (
            ["a", "b", "c"],
            None,
            {"known_classes": "first:1", "limit": 2},
            "below the 3 classes",
        ),
        (
            ["a", None],
            None,
            {"num_novel": 2, "unlabeled_known_fraction": 0.5},
            "unlabeled_known_fraction needs --known-classes",
        ),
    ],
)
def test_what_cannot_be_a_task(labels, split, config, text):
    assert text in failure(task_of, rows_of(labels, split), **config)


@given(
    st.lists(st.sampled_from(["a", "b", "c", None]), min_size=8, max_size=80),
    st.integers(4, 90),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_limit_is_even_and_keeps_every_class(labels, limit):
    """Kills: the first rows only, shares by class size, the limit applied to the sum
    of splits.
    """
    labels = ["a", None, *labels]
    rows = rows_of(labels + labels, ["train"] * len(labels) + ["test"] * len(labels))
    task = task_of(rows, num_novel=2, limit=limit)
    named = set(labels) - {None}
    for train in (True, False):
        kept = task.rows.labels.filter(task.is_train == train).to_pylist()
        assert len(kept) == min(limit, len(labels)) and set(kept) == set(labels)
        unfilled = [kept.count(c) for c in named if kept.count(c) < labels.count(c)]
        assert all(kept.count(c) <= min(unfilled) + 1 for c in named if unfilled)
        share = len(kept) * labels.count(None) / len(labels)
        assert abs(kept.count(None) - min(share, len(kept) - len(named))) <= 1
    numbers = [int(name[1:]) for name in task.rows.ids.to_pylist()]
    assert numbers == sorted(numbers)


def test_limit_takes_rows_from_all_over_a_class():
    task = task_of(rows_of(["a"] * 10 + [None] * 4), num_novel=2, limit=7)
    assert task.rows.ids.to_pylist() == ["r0", "r2", "r4", "r6", "r8", "r10", "r12"]


def test_a_share_of_each_known_class_loses_its_label():
    """The truth stays with evaluation."""
    options = {"known_classes": "first:5"}
    plain = task_of(read_digits(), **options)
    mixed = task_of(read_digits(), **options, unlabeled_known_fraction=0.25)
    lost = (plain.labels >= 0) & (mixed.labels < 0)
    had, lacks = (np.bincount(plain.labels[rows]) for rows in (plain.labels >= 0, lost))
    assert lacks.tolist() == np.round(0.25 * had).tolist()
    assert np.array_equal(mixed.labels[~lost], plain.labels[~lost])
    assert np.array_equal(mixed.eval_labels, plain.eval_labels)
    # always the same rows, and one label of each class stays
    assert unlabel(np.array([0, 0, 1]), 0.99).tolist().count(-1) == 1


@pytest.mark.parametrize(
    ("config", "declared", "setting", "why"),
    [
        (
            {"data.num_novel": 2, "method": "rs"},
            (),
            "ncd",
            "does not go with method rs",
        ),
        (
            {"data.known_classes": "first:5"},
            (),
            "ncd",
            "labels of the other classes are hidden",
        ),
        ({}, ("0", "1"), "ncd", "labels of the other"),
        (
            {"data.known_classes": "first:5", "data.unlabeled_known_fraction": 0.5},
            (),
            "gcd",
            "--data.unlabeled-known-fraction",
        ),
        (
            {"data.num_novel": 2},
            (),
            "gcd",
            r"GCD \(assumed\): .*pass --data.setting ncd",
        ),
        (
            {"data.num_novel": 2, "data.setting": "ncd"},
            (),
            "ncd",
            r"NCD \(--data.setting\): unlabeled images belong to new",
        ),
        (
            {"data.known_classes": "first:5", "data.setting": "gcd"},
            (),
            "gcd",
            r"GCD \(--data.setting\): unlabeled images can",
        ),
    ],
)
def test_the_pile_is_decided_by_where_the_labels_went(config, declared, setting, why):
    found, reason = decide_setting(override(Config(), config), declared)
    assert found == setting and re.search(why, reason) and "\n" not in reason


def test_rows_of_each_known_class_and_hidden_ones_are_held_out():
    """Hidden rows are one group: their classes do not matter for the choice."""
    rows = replace(read_digits(), is_train=np.full(1797, True))
    options = {"known_classes": "first:5", "validation_fraction": 0.1}
    task = task_of(rows, **options)
    truth, chosen = task.eval_labels, ~task.is_train
    group = np.minimum(truth, 5)
    expected = np.round(0.1 * np.bincount(group))
    assert np.bincount(group[chosen]).tolist() == expected.tolist()
    assert np.array_equal(task.labels >= 0, task.is_train & (truth < 5))
    labels, hidden = np.array(rows.labels.to_pylist()), np.flatnonzero(truth >= 5)
    labels[hidden] = np.random.default_rng(0).permutation(labels[hidden])
    other = task_of(replace(rows, labels=make_labels(labels)), **options)
    assert not np.array_equal(other.eval_labels, truth)
    assert np.array_equal(other.is_train, task.is_train)


def test_no_row_without_a_label_and_no_last_row_of_a_class_is_held_out():
    rows = rows_of(["a"] * 10 + ["b"] + [None] * 10)
    held = ~task_of(rows, num_novel=2, validation_fraction=0.6).is_train
    assert held[:10].sum() == 6 and not held[10:].any()


def test_rows_are_held_out_where_no_test_row_is_of_a_known_class():
    labels = ["a"] * 10 + [None] * 4 + ["b", "b"]
    rows = rows_of(labels, ["train"] * 14 + ["test"] * 2)
    options = {"num_novel": 1, "validation_fraction": 0.2}
    held = ~task_of(rows, known_classes="a", **options).is_train
    assert held[:10].sum() == 2
    assert np.flatnonzero(held[10:]).tolist() == [4, 5]
    kept = task_of(rows, known_classes="a,b", **options)
    assert np.flatnonzero(~kept.is_train).tolist() == [14, 15]
