"""What is reported of a data set before a run."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import Config, override
from uno.data.check import check, format_report
from uno.data.columns import make_ids, make_labels
from uno.data.files import Storage
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import make_task

from .builders import encoded, pixels, write_images

LABELS = ["a", "b", "c", "d"] * 10


def config_of(known="first:2", **overrides):
    """Return a configuration; "__" in the name of a setting stands for a dot."""
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    base = {"data.known_classes": known, "train.batch_size": 16}
    return override(Config(), base | values)


def task_of(labels, config, images=None, test=()):
    """Return the task of training rows r0, r1, ... and of test rows with labels
    ``test`` after them; with random images, unless they are given.
    """
    labels = [*labels, *test]
    if images is None:
        images = [pixels(seed, 4, 4) for seed in range(len(labels))]
    is_train = np.arange(len(labels)) < len(labels) - len(test)
    ids = make_ids(f"r{i}" for i in range(len(labels)))
    rows = Rows(ids, images, make_labels(labels), is_train, "rows")
    return make_task(rows, config.data)


def read_task(config):
    return make_task(read_rows(config.data), config.data)


def write_classes(folder, classes, num):
    """Write ``num`` images 000.png, 001.png, ... of each class."""
    write_images(folder, [f"{c}/{i:03}.png" for c in classes for i in range(num)])


def broken_task(folder, classes, num, broken, **overrides):
    """Return the task of a folder and its configuration. Of the images named in
    ``broken`` there is only the beginning.
    """
    write_classes(folder, classes, num)
    for name in broken:
        (folder / name).write_bytes((folder / name).read_bytes()[:60])
    config = config_of(data__source=str(folder), **overrides)
    return read_task(config), config


def messages(task, config, level, seconds=0):
    found = check(task, config, seconds)
    return [problem.message for problem in found if problem.level == level]


def test_good_data_has_no_problems():
    config = config_of("first:5", train__batch_size=64)
    task = read_task(config)
    assert check(task, config) == []
    report = format_report(task, [], 32)
    expected = "8 x 8", "as 32 x 32 pixels", "0 errors, 0 warnings"
    assert all(text in report for text in (task.rows.fingerprint, *expected))
    assert report.count("novel  ") == 5


def test_names_of_classes_cannot_control_the_terminal():
    report = format_report(task_of(["a", "b\x1b[31m", "c\n", "d"], config_of()), [])
    assert "\x1b" not in report and "b\\x1b[31m" in report


@pytest.mark.parametrize(("size", "num_named"), [(33, 1), (34, 0)])
def test_images_that_are_made_tiny_are_named(size, num_named):
    """Views count, not the larger size in which images are stored."""
    config = config_of(augment__large__size=size, data__stored_size=256)
    task = task_of(LABELS, config, [pixels(i, 100, 200) for i in range(40)])
    found = messages(task, config, "warning")
    assert ["resized to 33 px" in message for message in found] == [True] * num_named


@pytest.mark.parametrize(
    ("labels", "test", "overrides", "level", "text"),
    [
        (
            ["a"] * 8 + ["b"] * 8,
            [],
            {"known": "a"},
            "warning",
            "only one known class",
        ),
        (
            ["a"] * 9 + ["A "] * 9 + ["c"] * 9,
            [],
            {"known": "a"},
            "warning",
            "differ only in case",
        ),
        (
            ["a"] * 9 + ["b"] + ["c"] * 9,
            [],
            {"known": "a,b"},
            "warning",
            "1 known class has a single training image: b",
        ),
        (
            LABELS,
            ["aa"],
            {"known": "a,b"},
            "warning",
            "1 novel class has no training image: aa",
        ),
        (
            LABELS,
            ["aa"],
            {"known": "a,aa"},
            "error",
            "1 known class has no training image: aa",
        ),
        (
            ["a"] * 9 + [None] * 3,
            [],
            {"known": None, "data__num_novel": 4},
            "error",
            "images (3) than classes to discover (4)",
        ),
        (LABELS, [], {"train__batch_size": 64}, "error", "works: 40"),
        (LABELS, [], {"compute__num_workers": 3}, "error", "3 workers"),
        (LABELS, [], {"data__num_novel": 4}, "warning", "2.0 each"),
    ],
)
def test_problems_of_classes_and_batches(labels, test, overrides, level, text):
    config = config_of(**overrides)
    found = messages(task_of(labels, config, test=test), config, level)
    assert any(text in message for message in found), found
    assert all("\n" not in message for message in found)


def test_classes_in_a_batch_do_not_matter_where_nothing_is_discovered():
    values = {"discover__epochs": 0, "discover__warmup_epochs": 0}
    config = config_of(data__num_novel=4, **values)
    assert check(task_of(LABELS, config), config) == []


@pytest.mark.parametrize(
    ("is_sorted", "loading", "is_named"),
    [(True, "streaming", True), (True, "memory", False), (False, "streaming", False)],
)
@pytest.mark.parametrize("part", [1, 2])
def test_a_streamed_table_that_is_sorted_by_class_is_named(
    tmp_path, monkeypatch, is_sorted, loading, is_named, part
):
    """Its row groups hold one class each. Of a large table some groups are checked."""
    monkeypatch.setattr("uno.data.stream.MAX_WINDOW_ROWS", 16)
    monkeypatch.setattr("uno.data.check.ORDER_ROWS", 128)
    labels = np.repeat([*"abcdefgh"], 16 * part)
    if not is_sorted:
        labels = np.random.default_rng(1).permutation(labels)
    images = [encoded(pixels(i)) for i in range(128 * part)]
    table = pa.table({"image": images, "label": labels})
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=16)
    source = {"data__source": f"parquet:{tmp_path}", "data__loading": loading}
    config = config_of("first:4", train__batch_size=32, **source)
    found = messages(read_task(config), config, "warning")
    assert any("sorted by class" in message for message in found) == is_named


def test_copies_of_images_are_named():
    """A copy under the same label in the same split is no problem."""
    config = config_of("a,b")
    images = [pixels(seed, 4, 4) for seed in range(41)]
    images[40] = images[3]  # test and train
    images[1] = images[4]  # b and a
    images[5] = images[9]  # b and b
    images[2] = images[7]  # both unlabeled
    found = messages(task_of(LABELS, config, images, test="a"), config, "warning")
    assert sorted(found) == [
        "duplicates in train and test: 1, e.g. r3 = r40",
        "duplicates with different known labels: 1, e.g. r1 = r4",
    ]


def test_a_run_compares_some_images_and_says_so(tmp_path, monkeypatch):
    """Files of equal size are compared together; ``uno data check`` compares all."""
    monkeypatch.setattr("uno.data.check.MAX_HASHED_BYTES_OF_RUN", 12_000)
    write_classes(tmp_path / "test", "c", 6)
    for number in range(6):  # six sizes, each of two copies
        path = tmp_path / f"test/c/00{number}.png"
        path.write_bytes(path.read_bytes() + bytes(200 * number))
    shutil.copytree(tmp_path / "test/c", tmp_path / "train/c")
    write_classes(tmp_path / "train", "ab", 20)
    config = config_of(data__source=str(tmp_path))
    task = read_task(config)
    (note,) = messages(task, config, "note")
    assert "searched for duplicates" in note and "uno data check" in note
    assert messages(task, config, "note", 60) == []
    (some,) = (m for m in messages(task, config, "warning") if "dupl" in m)
    (every,) = (m for m in messages(task, config, "warning", 60) if "dupl" in m)
    assert some.startswith("duplicates in train and test: 3, e.g. test/c/")
    assert every.startswith("duplicates in train and test: 6, e.g. test/c/")


@pytest.mark.parametrize("source", ["folder", "parquet"])
def test_remote_images_are_compared_by_the_check_alone(source):
    """A run does not download images to compare them."""
    images = [encoded(pixels(i % 12)) for i in range(13)]  # the last one is a copy
    labels, remote = "aaaabbbbccccb", Storage("mock:///data")
    if source == "folder":
        for number, (label, image) in enumerate(zip(labels, images, strict=True)):
            remote.write(f"{label}/{number}.png", image)
    else:
        with remote.create("train.parquet") as file:
            pq.write_table(pa.table({"image": images, "label": [*labels]}), file)
    config = config_of(data__source=f"{source}:{remote.uri}")
    task = read_task(config)
    (note,) = messages(task, config, "note")
    assert note.startswith("0 of ") and "uno data check" in note
    assert messages(task, config, "note", 60) == []
    for seconds, is_found in ((0, False), (60, True)):
        found = messages(task, config, "warning", seconds)
        assert any("different known labels" in m for m in found) == is_found


def test_every_image_is_decoded_in_the_time_there_is(tmp_path):
    """Broken images are named; the run stops if they are too many."""
    broken = ["a/001.png", "b/033.png"]
    task, config = broken_task(tmp_path, "abc", 60, broken, data__max_bad_fraction=0.01)
    (message,) = messages(task, config, "error", 60)
    assert message.startswith("2 of 180 images cannot be read: a/001.png: ")
    assert "; b/033.png: " in message and "a run would stop" in message
    *_, message = messages(task, config, "warning", 1e-9)
    assert "images were decoded in 1e-09 s" in message


def test_a_broken_image_of_the_sample_of_a_run_is_named(tmp_path):
    task, config = broken_task(tmp_path, "abc", 5, ["b/002.png"], train__batch_size=8)
    (message,) = messages(task, config, "warning")
    assert "1 of a sample of 15 images are unreadable, e.g. b/002.png" in message
    assert "14 PNG; sample of 14" in format_report(task, [])


@pytest.mark.parametrize(
    ("derived", "level", "text"),
    [(False, "error", "works: 39"), (True, "warning", "1 of 40 images cannot")],
)
def test_the_check_counts_readable_images_only(tmp_path, derived, level, text):
    """A run leaves unreadable images out, and derives a derived batch size again."""
    values = {"train__batch_size": 40, "data__max_bad_fraction": 0.1}
    task, config = broken_task(tmp_path, "abcd", 10, ["c/003.png"], **values)
    problems = check(task, config, seconds=60, batch_is_derived=derived)
    assert any(p.level == level and text in p.message for p in problems)
    assert any(p.level == "error" for p in problems) != derived


@pytest.mark.parametrize(
    ("setting", "unlabeled", "facts"),
    [
        ("gcd", 4, ["(4)", "--setting ncd"]),
        ("gcd", 5, None),
        ("ncd", 2, ["(2)", "; add unlabeled images"]),
        ("ncd", 3, None),
    ],
)
def test_clusters_need_more_unlabeled_images(setting, unlabeled, facts):
    """No batch size matters for a method that trains nothing."""
    values = {"data__num_novel": 2, "data__setting": setting, "method": "clustering"}
    values |= {"model__prototype_init": "random", "train__batch_size": 512}
    values |= {"discover__epochs": 0, "model__weights": "w.safetensors"}
    config = config_of(None, **values)
    task = task_of(["a"] * 5 + ["b"] * 5 + [None] * unlabeled, config)
    errors = messages(task, config, "error")
    assert len(errors) == (facts is not None)
    assert all(fact in errors[0] for fact in facts or ())


def test_remote_images_of_unknown_size_are_said_not_to_be_compared(tmp_path):
    remote = Storage("mock:///data")
    names = [f"{number}.png" for number in range(40)]
    for number, name in enumerate(names):
        remote.write(name, encoded(pixels(number % 39)))
    rows = [f"{name},{label}" for name, label in zip(names, LABELS, strict=True)]
    (tmp_path / "t.csv").write_text("path,label\n" + "\n".join(rows))
    source = f"table:{tmp_path}/t.csv"
    config = config_of(data__source=source, data__image_folder=remote.uri)
    notes = messages(read_task(config), config, "note", 60)
    assert any("0 of 40 images were searched for duplicates" in n for n in notes)
