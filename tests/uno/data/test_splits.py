"""Known classes, novel classes, piles and limits."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uno.config import Config, DataConfig
from uno.data.columns import make_ids, make_labels
from uno.data.rows import Rows
from uno.data.sources import read_digits
from uno.data.splits import (
    decide_setting,
    make_task,
    order_classes,
    parse_known_classes,
    rows_of_classes,
    unlabel,
)
from uno.errors import ConfigError

from .builders import failure


def rows_of(labels, split=None, **options):
    num = len(labels)
    is_train = np.array(split or ["train"] * num) == "train"
    images = np.arange(num * 12, dtype=np.uint8).reshape(num, 2, 2, 3)
    ids = make_ids(f"r{i}" for i in range(num))
    return Rows(ids, images, make_labels(labels), is_train, "rows", **options)


def task_of(rows, **config):
    return make_task(rows, DataConfig(**config))


def refused(rows, **config):
    return failure(task_of, rows, **config)


def test_benchmark_hides_the_other_labels():
    task = task_of(read_digits(), known_classes="first:5")
    assert (task.known, task.novel, task.num_novel) == (list("01234"), list("56789"), 5)
    truth = np.array([int(v) for v in task.rows.labels.to_pylist()])
    np.testing.assert_array_equal(task.eval_labels, truth)
    np.testing.assert_array_equal(
        task.labels, np.where(task.is_train & (truth < 5), truth, -1)
    )
    assert task.labels.dtype == task.eval_labels.dtype == np.int64
    for num in (3, 8):
        task = task_of(read_digits(), known_classes="first:5", num_novel=num)
        assert task.num_novel == num and len(task.novel) == 5


def test_rows_without_a_label_are_unlabeled():
    rows = rows_of(["b", None, "a", None, "a", "c", None], ["train"] * 4 + ["test"] * 3)
    task = task_of(rows, num_novel=2)
    assert (task.known, task.novel, task.num_novel) == (["a", "b"], ["c"], 2)
    assert task.labels.tolist() == [1, -1, 0, -1, -1, -1, -1]
    assert task.eval_labels.tolist() == [1, -1, 0, -1, 0, 2, -1]


def test_eval_labels_are_never_labels():
    """Kills: labels made from the truth, so that an unlabeled row of a known class
    would be labeled.
    """
    truth = [None, "c", "a", "b", "d"]
    rows, changed = (
        rows_of(
            ["a"] + [None] * 4, ["train"] * 4 + ["test"], eval_labels=make_labels(t)
        )
        for t in (truth, truth[::-1])
    )
    task = task_of(rows, num_novel=2)
    assert (task.known, task.novel) == (["a"], ["b", "c", "d"])
    assert task.labels.tolist() == [0, -1, -1, -1, -1]
    assert task.eval_labels.tolist() == [0, 2, 0, 1, 3]
    assert task_of(changed, num_novel=2).labels.tolist() == task.labels.tolist()
    assert rows.fingerprint == changed.fingerprint
    task = task_of(
        rows_of(["a", "b", None, "c"], ["train"] * 3 + ["test"]), known_classes="a"
    )
    assert (task.known, task.novel, task.num_novel) == (["a"], ["b", "c"], 2)
    assert task.eval_labels.tolist() == [0, 1, -1, 2] and task.labels.tolist() == [
        0,
        -1,
        -1,
        -1,
    ]


def test_order_of_classes_and_classes_that_a_source_declares_known():
    """Kills: sorting numbers as text (10 before 2), ignoring the source's own order."""
    rows = rows_of(["x", "y", "z"], known=("z",))
    assert task_of(rows).known == ["z"] and task_of(
        rows, known_classes="first:1"
    ).known == ["x"]
    assert order_classes({"10", "9", "2", "1"}) == ["1", "2", "9", "10"]
    assert order_classes({"b10", "b9", "a"}) == ["a", "b9", "b10"]
    assert order_classes({"01", "1", "001"}) == ["001", "01", "1"]
    assert order_classes({"cat", "ant", "zebra"}, ["zebra", "ant", "cat"]) == [
        "zebra",
        "ant",
        "cat",
    ]
    assert order_classes({"9" * 5000, "1" + "0" * 5000})[0] == "9" * 5000
    rows = rows_of(["ant", "zebra"], class_names=("zebra", "ant"))
    assert task_of(rows, known_classes="first:1").known == ["zebra"]


@given(st.lists(st.text(max_size=6), unique=True, max_size=8))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_order_is_total_for_any_names(names):
    assert order_classes(names) == order_classes(reversed(names))


def test_known_classes_as_names_and_file(tmp_path, monkeypatch):
    classes = ["cat", "dog", "a,b", "x"]
    assert parse_known_classes(" dog , cat ", classes) == {"cat", "dog"}
    (tmp_path / "names.txt").write_text("a,b\n\n x \n")
    assert parse_known_classes(str(tmp_path / "names.txt"), classes) == {"a,b", "x"}
    monkeypatch.chdir(tmp_path)
    assert parse_known_classes("names.txt", classes) == {"a,b", "x"}
    (tmp_path / "dog").write_text("cat")
    assert parse_known_classes("dog", classes) == {"dog"}
    # the order of indices does not depend on how they were listed
    assert task_of(rows_of(["cat", "dog", "x"]), known_classes="x,cat").known == [
        "cat",
        "x",
    ]


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
    assert text in refused(rows_of(["cat", "dog", "cow"]), known_classes=value)


def test_a_class_has_a_name_of_some_size_and_classes_a_number(monkeypatch):
    """Kills: matrices of a million classes, a label that is a whole file."""
    rows = rows_of(["a", "b", None, None])
    monkeypatch.setattr("uno.data.splits.MAX_CLASSES", 4)
    assert task_of(rows, num_novel=2).num_novel == 2
    assert "5 classes, more than 4" in refused(rows, num_novel=3)
    assert "has 301 characters, more than 300: 'xxx" in failure(rows_of, ["x" * 301])
    monkeypatch.setattr("uno.data.rows.MAX_ROWS", 3)
    assert "4 rows, more than 3" in failure(rows_of, ["a"] * 4)


def test_what_cannot_be_a_task():
    assert "no image has a label" in refused(rows_of([None, None]), num_novel=2)
    assert "no training image has a label" in refused(
        rows_of([None, "a"], ["train", "test"]), num_novel=2
    )
    assert "--known-classes first:N" in refused(rows_of(["a", "b"]), num_novel=2)
    assert "--num-novel" in refused(rows_of(["a", None]))
    assert "--num-novel" in refused(rows_of(["a", None]), known_classes="first:1")


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
    for train in (True, False):
        kept = [
            label
            for label, t in zip(
                task.rows.labels.to_pylist(), task.is_train, strict=True
            )
            if t == train
        ]
        assert len(kept) == min(limit, len(labels)) and set(kept) == set(labels)
        named = set(labels) - {None}
        unfilled = [kept.count(c) for c in named if kept.count(c) < labels.count(c)]
        assert all(kept.count(c) <= min(unfilled) + 1 for c in named if unfilled)
        share = len(kept) * labels.count(None) / len(labels)
        assert abs(kept.count(None) - min(share, len(kept) - len(named))) <= 1
    assert task.rows.images[0].shape == (2, 2, 3)
    assert [int(name[1:]) for name in task.rows.ids.to_pylist()] == sorted(
        int(name[1:]) for name in task.rows.ids.to_pylist()
    )


def test_limit_takes_rows_from_all_over_a_class_and_of_every_class():
    """Kills: the first rows of each class, which in a sorted folder may all show the
    same thing.
    """
    task = task_of(rows_of(["a"] * 10 + [None] * 4), num_novel=2, limit=7)
    assert task.rows.ids.to_pylist() == ["r0", "r2", "r4", "r6", "r8", "r10", "r12"]
    assert "below the 10 classes" in refused(
        read_digits(), known_classes="first:5", limit=9
    )
    task = task_of(read_digits(), known_classes="first:5", limit=100)
    assert (
        np.bincount(task.eval_labels[task.is_train]).tolist() == [10] * 10
        and len(task.rows) == 200
    )


def test_a_share_of_each_known_class_loses_its_label():
    """Truth stays with evaluation, test rows as they are. Kills: rows of novel classes
    or of the test split taken, a share of the whole instead of each class, another
    choice for another seed.
    """
    plain = task_of(read_digits(), known_classes="first:5")
    mixed = task_of(
        read_digits(), known_classes="first:5", unlabeled_known_fraction=0.25
    )
    lost = (plain.labels >= 0) & (mixed.labels < 0)
    for c in range(5):
        had = int((plain.labels == c).sum())
        assert int((lost & (plain.labels == c)).sum()) == round(0.25 * had)
    assert np.array_equal(mixed.labels[~lost], plain.labels[~lost])
    assert (
        np.array_equal(mixed.eval_labels, plain.eval_labels)
        and mixed.known == plain.known
    )
    assert np.array_equal(
        task_of(
            read_digits(), known_classes="first:5", unlabeled_known_fraction=0.25
        ).labels,
        mixed.labels,
    )
    # one label a class stays
    assert unlabel(np.array([0, 0, 1]), 0.99).tolist().count(-1) == 1
    rows = replace(read_digits(), labels=make_labels(["0", "1", None] * 599))
    with pytest.raises(
        ConfigError, match="unlabeled_known_fraction needs --known-classes"
    ):
        task_of(rows, num_novel=2, unlabeled_known_fraction=0.5)


@pytest.mark.parametrize(
    ("config", "declared", "setting", "why"),
    [
        ({"num_novel": 2, "method": "rs"}, (), "ncd", "does not go with method rs"),
        (
            {"known_classes": "first:5"},
            (),
            "ncd",
            "labels of the other classes are hidden",
        ),
        ({}, ("0", "1"), "ncd", "labels of the other"),
        (
            {"known_classes": "first:5", "unlabeled_known_fraction": 0.5},
            (),
            "gcd",
            "--data.unlabeled-known-fraction",
        ),
        ({"num_novel": 2}, (), "gcd", r"GCD \(assumed\): .*pass --data.setting ncd"),
        (
            {"num_novel": 2, "setting": "ncd"},
            (),
            "ncd",
            r"NCD \(--data.setting\): unlabeled images belong to new",
        ),
        (
            {"known_classes": "first:5", "setting": "gcd"},
            (),
            "gcd",
            r"GCD \(--data.setting\): unlabeled images can",
        ),
    ],
)
def test_the_pile_is_decided_by_where_the_labels_went(config, declared, setting, why):
    method = {"method": config["method"]} if "method" in config else {}
    data = DataConfig(
        **{key: value for key, value in config.items() if key != "method"}
    )
    found, reason = decide_setting(Config(data=data, **method), declared)
    assert found == setting and re.search(why, reason) and "\n" not in reason


def test_rows_of_each_known_class_and_hidden_ones_are_held_out():
    """Kills: a share of all instead of each class, a stratified choice of hidden rows,
    another choice for a permutation of hidden labels, a source with a test split that
    loses rows, unlabeled rows held out.
    """
    rows = replace(read_digits(), is_train=np.full(1797, True))
    labels = np.array(rows.labels.to_pylist())
    hidden = np.flatnonzero(labels >= "5")
    labels[hidden] = np.random.default_rng(0).permutation(labels[hidden])
    for share in (0.1, 0.5):
        task = task_of(rows, known_classes="first:5", validation_fraction=share)
        truth, chosen = task.eval_labels, ~task.is_train
        for c in range(5):
            assert int(chosen[truth == c].sum()) == round(
                share * int((truth == c).sum())
            )
        assert int(chosen[hidden].sum()) == round(share * len(hidden))
        assert (task.labels[chosen] == -1).all() and (
            task.labels[task.is_train & (truth < 5)] >= 0
        ).all()
        other = task_of(
            replace(rows, labels=make_labels(labels)),
            known_classes="first:5",
            validation_fraction=share,
        )
        assert not np.array_equal(other.eval_labels, truth)
        assert np.array_equal(other.is_train, task.is_train) and np.array_equal(
            other.labels, task.labels
        )
    assert not all(np.diff(np.flatnonzero(chosen)) == 2)  # at random
    split = task_of(read_digits(), known_classes="first:5")
    assert np.array_equal(
        task_of(
            read_digits(), known_classes="first:5", validation_fraction=0.5
        ).is_train,
        split.is_train,
    )
    own = task_of(
        rows_of(["a"] * 10 + ["b"] + [None] * 10), num_novel=2, validation_fraction=0.6
    )
    assert [
        int((~own.is_train)[part].sum())
        for part in (slice(10), slice(10, 11), slice(11, 21))
    ] == [
        6,
        0,
        0,
    ]
    assert own.labels[10] == 1  # the only row of its class stays


def test_rows_are_held_out_where_no_test_row_is_of_a_known_class():
    """Kills: test rows of other classes that keep known ones from being held out, or
    are made training rows; a pile's row held out.
    """
    labels, split = (
        ["a"] * 10 + ["b", "b"] + [None] * 4,
        ["train"] * 10 + ["test"] * 2 + ["train"] * 4,
    )
    task = task_of(rows_of(labels, split), known_classes="a", validation_fraction=0.2)
    held = ~task.is_train
    assert [
        int(held[part].sum()) for part in (slice(10), slice(10, 12), slice(12, 16))
    ] == [2, 2, 0]
    kept = task_of(
        rows_of(labels, split),
        known_classes="a,b",
        num_novel=1,
        validation_fraction=0.2,
    )
    assert np.flatnonzero(~kept.is_train).tolist() == [10, 11]


@pytest.mark.parametrize("num", [0, 1, 5, 7])
def test_rows_of_classes(num):
    """As a search for each class by itself. Kills: rows without a class taken for one,
    rows out of order, a class that has none left out.
    """
    labels = np.random.default_rng(0).integers(-1, 6, 200)
    found = rows_of_classes(labels, num)
    assert [rows.tolist() for rows in found] == [
        np.flatnonzero(labels == c).tolist() for c in range(num)
    ]
