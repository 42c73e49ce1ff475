"""The preflight report."""

import re
import shutil
import threading

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from uno.config import Config, override
from uno.data import decode
from uno.data.check import check, format_report
from uno.data.columns import make_ids, make_labels
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import make_task

from .builders import write_images


def task_of(labels, config, images=None, split=None):
    num = len(labels)
    images = (
        np.random.default_rng(0).integers(0, 256, (num, 4, 4, 3), np.uint8)
        if images is None
        else images
    )
    is_train = np.array(split or ["train"] * num) == "train"
    rows = Rows(
        make_ids(f"r{i}" for i in range(num)),
        images,
        make_labels(labels),
        is_train,
        "rows",
    )
    return make_task(rows, config.data)


def config_of(known=None, **overrides):
    values = {
        "data.known_classes": known,
        **{k.replace("__", "."): v for k, v in overrides.items()},
    }
    return override(Config(), {"train.batch_size": 16, **values})


def messages(task, config, level):
    return [p.message for p in check(task, config) if p.level == level]


LABELS = ["a", "b", "c", "d"] * 10


def test_good_data_has_no_problems():
    config = config_of(known="first:2", model__overcluster_factor=3)
    assert check(task_of(LABELS, config), config) == []
    config = override(Config(), {"data.known_classes": "first:5"})
    task = make_task(read_rows(config.data), config.data)
    assert check(task, config) == []
    report = format_report(task, [])
    assert (
        task.rows.fingerprint in report
        and "8 x 8" in report
        and "0 errors, 0 warnings" in report
    )
    assert report.count("novel  ") == 5


def test_images_that_are_made_tiny_are_named():
    """Kills: 32 pixels in silence, the stored size where the views are smaller, a
    warning of every size.
    """
    images = [np.zeros((100, 200, 3), np.uint8)] * 40
    small, large = (
        {"augment.large.size": side, "data.stored_size": 256} for side in (33, 34)
    )
    base = config_of(known="first:2")
    task = task_of(LABELS, base, images)
    for values, found in ((small, ["about 100 px are resized to 33 px"]), (large, [])):
        told = [
            m
            for m in messages(task, override(base, values), "warning")
            if "are resized" in m
        ]
        assert len(told) == len(found) and all(text in told[0] for text in found)


@pytest.mark.parametrize(
    ("labels", "overrides", "level", "text"),
    [
        (["a"] * 8 + ["b"] * 8, {"known": "a"}, "warning", "only one known class"),
        (["a"] * 8 + ["b"] * 8, {"known": "a"}, "warning", "num_novel is 1"),
        (
            ["a"] * 9 + ["A "] * 9 + ["c"] * 9,
            {"known": "a"},
            "warning",
            "differ only in case",
        ),
        (
            ["a"] * 9 + ["b"] + ["c"] * 9,
            {"known": "a,b"},
            "warning",
            "1 known class has a",
        ),
        (
            ["a"] * 9 + [None] * 3,
            {"data__num_novel": 4},
            "error",
            "images (3) than classes to discover (4)",
        ),
        (
            ["a"] * 9 + [None] * 7,
            {"data__num_novel": 4},
            "warning",
            "overclustering head (12)",
        ),
        (LABELS, {"known": "a,b", "train__batch_size": 64}, "error", "works: 40"),
        (LABELS, {"known": "a,b", "compute__num_workers": 3}, "error", "3 workers"),
        (LABELS, {"known": "a,b", "data__num_novel": 4}, "warning", "2.0 each"),
        (
            LABELS,
            {"known": "a,b", "data__num_novel": 1},
            "warning",
            "classes share clusters",
        ),
    ],
)
def test_problems_of_classes_and_batches(labels, overrides, level, text):
    config = config_of(**overrides)
    found = messages(task_of(labels, config), config, level)
    assert any(text in message for message in found), found
    assert all("\n" not in message for message in found)


def test_pseudo_labels_are_no_matter_where_nothing_is_trained():
    """Kills: advice on batches for the choice among clusterings."""
    for epochs, count in ((1, 1), (0, 0)):
        config = config_of(
            "a,b", data__num_novel=4, discover__epochs=epochs, discover__warmup_epochs=0
        )
        found = messages(task_of(LABELS, config), config, "warning")
        assert sum("pseudo-labels" in message for message in found) == count


def test_a_small_batch_is_no_news_where_nothing_is_pretrained():
    for weights, count in ((None, 1), ("encoder.safetensors", 0)):
        config = config_of("a,b", train__batch_size=30, model__weights=weights)
        found = messages(task_of(LABELS, config), config, "warning")
        assert (
            sum("pretraining batches hold all" in message for message in found) == count
        )


def test_a_class_without_training_rows():
    for known, kind, level in (("a,b", "novel", "warning"), ("a,aa", "known", "error")):
        config = config_of(known)
        task = task_of([*LABELS, "aa"], config, split=["train"] * 40 + ["test"])
        assert f"1 {kind} class has no training image: aa" in messages(
            task, config, level
        )


@pytest.mark.parametrize(
    ("how", "kinds"), [("sorted", ["labeled", "unlabeled"]), ("shuffled", [])]
)
@pytest.mark.parametrize("part", [1, 2])
def test_a_table_that_is_sorted_by_class_is_named(
    tmp_path, monkeypatch, how, kinds, part
):
    """Its row groups hold one class each; of large tables every ``part``-th is looked
    at. Kills: shares of one row group for those of a batch, workers whose parts are not
    put together, a warning of a shuffled table, of one in memory, single rows of the
    groups.
    """
    monkeypatch.setattr("uno.data.stream.MAX_WINDOW_ROWS", 16)
    monkeypatch.setattr("uno.data.check.ORDER_ROWS", 128)
    labels = np.repeat(np.arange(8), 16 * part)
    if how == "shuffled":
        labels = np.random.default_rng(1).permutation(labels)
    table = pa.table(
        {"image": [b"x"] * 128 * part, "label": [f"c{label}" for label in labels]}
    )
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=16)
    for loading in ("streaming", "memory"):
        values = {
            "data__source": f"parquet:{tmp_path}",
            "data__loading": loading,
            "compute__num_workers": 2,
        }
        config = config_of("first:4", train__batch_size=32, **values)
        task = make_task(read_rows(config.data), config.data)
        found = [m for m in messages(task, config, "warning") if "sorted by class" in m]
        assert [m.partition("a batch's ")[2].split(" ")[0] for m in found] == (
            kinds if loading == "streaming" else []
        )
        if found:  # 16 rows, eight from each worker's window of one class
            assert (
                re.search(r"has (\d+)%", found[0])
                and int(re.search(r"has (\d+)%", found[0])[1]) >= 50
            )


def test_duplicates():
    """Kills: copies looked for in one split only, or found by name."""
    config = config_of(known="a,b")
    images = np.random.default_rng(0).integers(0, 256, (41, 4, 4, 3), np.uint8)
    images[40] = images[3]  # test = train
    images[6] = images[0]  # c (unlabeled) = a (labeled)
    images[1] = images[4]  # b = a
    images[5] = images[9]  # b = b: no problem
    images[2] = images[7]  # c = d, both unlabeled
    found = messages(
        task_of([*LABELS, "a"], config, images, ["train"] * 40 + ["test"]),
        config,
        "warning",
    )
    for text in (
        "duplicates in train and test: 1, e.g. r3 = r40",
        "duplicates with and without a label: 1",
        "duplicates with different known labels: 1",
        "duplicates among the unlabeled images: 1, e.g. r2 = r7",
    ):
        assert any(text in message for message in found), found
    assert len(found) == 4


def test_duplicate_files_are_found_by_size_and_content(tmp_path):
    write_images(tmp_path, [f"train/{c}/{i}.png" for c in "abc" for i in range(4)])
    (tmp_path / "test" / "a").mkdir(parents=True)
    copy = shutil.copy(tmp_path / "train/a/2.png", tmp_path / "test/a/copy.png")
    config = config_of(data__source=str(tmp_path), known="first:2")
    task = make_task(read_rows(config.data), config.data)
    assert any(
        "e.g. test/a/copy.png = train/a/2.png" in m
        for m in messages(task, config, "warning")
    )
    copy.write_bytes(b"broken")
    task = make_task(read_rows(config.data), config.data)
    report = format_report(task, check(task, config))
    assert "1 of a sample of 13 images are unreadable, e.g. test/a/copy.png" in report
    assert "12 PNG; sample of 12" in report
    task = task_of(["a", "b\x1b[31m", "c\n", "d"] * 10, config)
    report = format_report(task, check(task, config))
    assert "\x1b" not in report and "b\\x1b[31m" in report


def notes_of(task, config, seconds):
    return [p.message for p in check(task, config, seconds) if p.level == "note"]


def test_a_run_searches_a_sample_for_duplicates_and_says_so(tmp_path, monkeypatch):
    """Files of equal size are compared together; ``uno data check`` compares all."""
    monkeypatch.setattr("uno.data.check.MAX_HASHED_BYTES_OF_RUN", 12_000)
    write_images(tmp_path, [f"{c}/{i}.png" for c in "abc" for i in range(20)])
    for number in range(6):  # six sizes, each of two copies
        path = tmp_path / "c" / f"{number}.png"
        data = path.read_bytes() + bytes(200 * number)
        path.write_bytes(data)
        (tmp_path / "c" / f"copy-{number}.png").write_bytes(data)
    config = config_of(data__source=str(tmp_path), known="first:2")
    task = make_task(read_rows(config.data), config.data)
    (note,) = notes_of(task, config, 0)
    assert "sample of" in note and "images" in note and "uno data check" in note
    report = format_report(task, check(task, config))
    assert "0 errors" in report and note in report

    def copies(seconds):
        found = [p.message for p in check(task, config, seconds)]
        (line,) = [m for m in found if "duplicates among the unlabeled" in m]
        return int(line.split(": ")[1].split(",")[0])

    assert notes_of(task, config, 60) == []
    assert 0 < copies(0) < copies(60) == 6


@pytest.mark.parametrize("source", ["folder", "parquet"])
def test_the_images_of_a_remote_source_are_compared_by_the_check_alone(
    source, tmp_path, monkeypatch
):
    """One rule for all kinds of sources: a run does not download images for it."""
    remote = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    monkeypatch.setattr("uno.data.files._connect", lambda host, options: (remote, ""))
    names = [f"train/{c}/{i}.png" for c in "abc" for i in range(4)]
    write_images(tmp_path / "folder", names)
    (tmp_path / "parquet").mkdir()
    copy = (tmp_path / "folder/train/c/0.png").read_bytes()
    (tmp_path / "folder/train/c/9.png").write_bytes(copy)
    files = [(name, (tmp_path / "folder" / name).read_bytes()) for name in names]
    files.append(("train/c/9.png", copy))
    columns = {"image": [data for _, data in files]}
    columns["label"] = [name.split("/")[1] for name, _ in files]
    pq.write_table(pa.table(columns), tmp_path / "parquet" / "train.parquet")
    uri = f"{source}:s3://bucket/{source}"
    config = config_of(data__source=uri, known="first:2")
    task = make_task(read_rows(config.data), config.data)
    (note,) = notes_of(task, config, 0)
    assert "remote" in note and "uno data check" in note
    assert not any("duplicates among" in p.message for p in check(task, config))
    assert notes_of(task, config, 60) == []
    assert any("duplicates among" in p.message for p in check(task, config, 60))


def test_a_sample_of_images_is_looked_at_in_threads(tmp_path, monkeypatch):
    """Many small requests to storage are slow one after the other."""
    threads, read = set(), decode.read_header

    def noted(image):
        threads.add(threading.get_ident())
        barrier.wait()
        return read(image)

    barrier = threading.Barrier(4, timeout=60)  # which one thread would not pass
    monkeypatch.setattr("uno.data.rows.read_header", noted)
    write_images(tmp_path, [f"{c}/{i}.png" for c in "abcd" for i in range(4)])
    config = config_of(data__source=str(tmp_path), known="first:2")
    check(make_task(read_rows(config.data), config.data), config)
    assert len(threads) >= 4


def test_every_image_is_decoded_in_the_time_there_is(tmp_path):
    """Kills: a sample that misses the broken ones, a check without an end."""
    write_images(tmp_path, [f"{c}/{i:03}.png" for c in "abc" for i in range(60)])
    broken = ("a/001.png", "b/033.png")
    for name in broken:
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])  # the header is fine
    config = config_of(data__source=str(tmp_path), known="first:2")
    task = make_task(read_rows(config.data), config.data)

    def found(seconds: float, fraction: float = 0.5) -> list[tuple[str, str]]:
        problems = check(
            task, override(config, {"data.max_bad_fraction": fraction}), seconds
        )
        return [(p.level, p.message) for p in problems if "images" in p.message]

    assert found(0) == []
    ((level, message),) = found(60)
    assert level == "warning" and message.startswith(
        "2 of 180 images cannot be read: a/001.png: "
    )
    assert "; b/033.png: " in message
    assert [(level, "would stop" in text) for level, text in found(60, 0.01)] == [
        ("error", True)
    ]
    assert "of 180 images were decoded in 1e-09 s" in found(1e-9)[-1][1]
    assert "as 32 x 32 pixels" in format_report(task, [], 32)


@pytest.mark.parametrize(
    ("derived", "level", "text"),
    [(False, "error", "works: 39"), (True, "warning", "1 of 40 images cannot")],
)
def test_the_check_counts_readable_images_only(tmp_path, derived, level, text):
    """A run leaves unreadable images out, and derives a derived batch size again."""
    write_images(tmp_path, [f"{c}/{i}.png" for c in "abcd" for i in range(10)])
    path = tmp_path / "c" / "3.png"
    path.write_bytes(path.read_bytes()[:60])
    values = {"data__source": str(tmp_path), "data__max_bad_fraction": 0.1}
    config = config_of("first:2", train__batch_size=40, **values)
    task = make_task(read_rows(config.data), config.data)
    problems = check(task, config, seconds=60, batch_is_derived=derived)
    assert any(p.level == level and text in p.message for p in problems)
    assert any(p.level == "error" for p in problems) != derived


@pytest.mark.parametrize(
    ("setting", "unlabeled", "fix"),
    [
        ("gcd", 4, "--setting ncd"),
        ("gcd", 5, None),
        ("ncd", 2, "add unlabeled"),
        ("ncd", 3, None),
    ],
)
def test_clusters_need_more_unlabeled_images(setting, unlabeled, fix):
    """No batch size matters for a method that trains nothing."""
    values = {"data__num_novel": 2, "data__setting": setting, "method": "clustering"}
    values |= {"model__prototype_init": "random", "train__batch_size": 512}
    values |= {"discover__epochs": 0, "model__weights": "w.safetensors"}
    config = config_of(**values)
    task = task_of(["a"] * 5 + ["b"] * 5 + [None] * unlabeled, config)
    errors = messages(task, config, "error")
    assert len(errors) == (fix is not None)
    if fix is not None:
        assert fix in errors[0] and f"({unlabeled})" in errors[0]
        assert ("--setting" in errors[0]) == (setting == "gcd")
