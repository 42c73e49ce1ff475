"""What the page is made of: clusters, warnings, commands, charts, maps, pictures."""

from __future__ import annotations

import base64
import dataclasses
from io import BytesIO

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.uno.report.runs import hostile_task, small_config
from uno.config import flatten, override, to_dict
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.presets import preset
from uno.report import charts, checks, clusters, maps, pictures, text
from uno.report.facts import Facts, training_seconds
from uno.report.predictions import Predictions, sample


def predictions_of(task: Task, outputs: np.ndarray, num_novel: int, num_heads: int = 3) -> Predictions:
    """Every head is sure of ``outputs`` (M,), but numbers its clusters in its own order."""
    num, num_known = len(task.rows), task.num_known
    known = np.where(np.arange(num_known) == outputs[:, None], 0.9, -0.1).astype(np.float32)
    novel = np.full((num, num_heads, num_novel), -0.1, np.float32)
    for head in range(num_heads):
        own = (outputs - num_known + head) % num_novel
        rows = np.flatnonzero(outputs >= num_known)
        novel[rows, head, own[rows]] = 0.9
    features = np.random.default_rng(0).normal(size=(num, 8)).astype(np.float32)
    over = np.zeros((num, 0, 0), np.float32)
    similarity = np.eye(num_novel, dtype=np.float32)
    return Predictions(np.arange(num), features, known, novel, over, similarity, 0, 0.1, num)


@pytest.fixture(scope="module")
def digits() -> Task:
    config = small_config(**{"data.limit": 200})
    return make_task(read_rows(config.data), config.data)


def names_of(task: Task) -> list[str]:
    return [*task.known, *(f"novel-{i + 1}" for i in range(task.num_novel))]


def warned(task: Task, predictions: Predictions, facts: Facts | None = None) -> str:
    found = clusters.find(task, predictions, names_of(task))
    return " | ".join(p.title for p in checks.problems(small_config(), facts or Facts(), predictions, found))


def test_heads_are_compared_after_matching(digits: Task) -> None:
    """Kills: comparing cluster numbers of different heads, which mean nothing."""
    predictions = predictions_of(digits, digits.eval_labels, 5)
    found = clusters.find(digits, predictions, names_of(digits))
    assert np.allclose(found.pairs, 1) and found.agreement is not None and (found.agreement == 1).all()
    unlabeled = (digits.labels < 0) & digits.is_train
    sizes = [int((unlabeled & (digits.eval_labels == 5 + k)).sum()) for k in range(5)]
    assert [c.count for c in found.clusters] == sizes
    assert [c.majority for c in found.clusters] == [(name, 1.0) for name in digits.novel]
    assert (found.confidence > 0.99).all() and found.absorbed == 0


def test_a_good_run_has_no_cluster_warnings(digits: Task) -> None:
    titles = warned(digits, predictions_of(digits, digits.eval_labels, 5))
    assert titles.startswith("Few images per cluster") and titles.count("|") == 1  # 100 rows, no journal


def test_collapse_imbalance_and_absorption(digits: Task) -> None:
    outputs = np.where(digits.eval_labels == 9, 8, digits.eval_labels)
    assert "Collapse: 1 of 5 discovered classes" in warned(digits, predictions_of(digits, outputs, 5))
    few = np.flatnonzero(digits.eval_labels == 9)[4:]
    outputs = digits.eval_labels.copy()
    outputs[few] = 8
    assert "Imbalance: “novel-4”" in warned(digits, predictions_of(digits, outputs, 5))
    outputs = np.where(digits.eval_labels == 7, 1, digits.eval_labels)
    assert "of the unlabeled images are taken for known classes" in warned(
        digits, predictions_of(digits, outputs, 5)
    )


def test_look_alikes_disagreement_and_doubt(digits: Task) -> None:
    sure = predictions_of(digits, digits.eval_labels, 5)
    twins = sure.similarity.copy()
    twins[1, 3] = twins[3, 1] = 0.9
    assert "Look-alikes: 1 pair " in warned(digits, dataclasses.replace(sure, similarity=twins))
    generator = np.random.default_rng(0)
    random = dataclasses.replace(sure, novel=generator.normal(size=sure.novel.shape).astype(np.float32))
    assert "Heads disagree" in warned(digits, random)
    flat = dataclasses.replace(sure, novel=sure.novel * 0.01, known=sure.known * 0.01)
    assert "Low confidence" in warned(digits, flat)


def test_training_warnings(digits: Task) -> None:
    line = {"phase": "discover", "step": 5, "total_steps": 10, "skipped_steps": 2, "epochs": 1}
    facts = Facts({"train/novel/task_aware/acc/avg": 0.4, "baseline/kmeans/novel/acc": 0.5}, journal=[line])
    titles = warned(digits, predictions_of(digits, digits.eval_labels, 5), facts)
    assert "Unfinished: the discover phase stopped at step 5 of 10" in titles
    assert "2 steps of discover skipped" in titles and "No better than k-means: 40.0%" in titles


def test_one_head_has_no_agreement(digits: Task) -> None:
    found = clusters.find(digits, predictions_of(digits, digits.eval_labels, 5, 1), names_of(digits))
    assert found.agreement is None and found.clusters[0].agreement is None


def test_a_sample_keeps_the_shares(digits: Task) -> None:
    rows = sample(digits, 100, seed=0)
    assert len(rows) <= 100 and (np.diff(rows) > 0).all() and (sample(digits, 100, 0) == rows).all()
    assert abs(digits.is_train[rows].mean() - digits.is_train.mean()) < 0.03
    assert (sample(digits, 10_000, 0) == np.arange(len(digits.rows))).all()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective.concat": False, "train.max_steps": 3, "data.limit": 7},
        {"data.source": "folder:/a b/'c'", "data.mean": (0.1, 0.2, 0.3), "data.known_classes": "first:2"},
        {"data.labeled": "/x/one", "data.unlabeled": "/x/two", "data.known_classes": None},
        {"preset": "custom", "data.source": "parquet:/d", "data.known_classes": None, "data.num_novel": 4},
    ],
)
def test_the_printed_command_leads_to_the_configuration(changes: dict[str, object]) -> None:
    """Kills: a flag that the command line does not know, a lost quote, a difference left out."""
    import shlex

    from pipelines.options import parse

    config = override(preset("digits"), changes)
    argv = shlex.split(text.command_line(config))
    again = parse(argv[2:], argv[1]).config
    kept = {k: v for k, v in flatten(to_dict(again)).items() if k != "output"}
    want = {k: v for k, v in flatten(to_dict(config)).items() if k != "output"}
    if config.data.labeled is not None:
        kept.pop("data.source"), want.pop("data.source")
    assert kept == want


def test_text() -> None:
    assert text.visible("a\nb\u202ec") == "a\\nb\\u202ec" and text.visible("é א") == "é א"
    assert len(text.visible("x" * 400)) == 300 and text.short("abcdef", 4) == "abc…"
    assert [text.duration(s) for s in (7.4, 700, 11100)] == ["7 s", "12 min", "3 h 05 min"]
    assert text.percent(0.12345) == "12.3"


def test_training_time_counts_each_step_once() -> None:
    entries = [
        {"step": 10, "images_per_s": 100.0},
        {"step": 20, "images_per_s": 50.0},
        {"step": 20, "images_per_s": 1.0},
    ]
    assert training_seconds(entries, 100) == pytest.approx(10 + 20)


def test_line_chart_places_points_and_skips_nan() -> None:
    chart = charts.line_chart("t", "step", [("a", [(0, 0.0), (10, 2.0), (5, float("nan"))])])
    assert chart is not None and chart.lines[0].path == f"M0 {charts.HEIGHT}L{charts.WIDTH} 0"
    assert [label for _, label in chart.y_ticks] == ["0", "0.5", "1", "1.5", "2"]
    assert charts.line_chart("t", "x", [("a", [])]) is None
    many = charts.line_chart("t", "x", [("a", [(i, 1.0) for i in range(9999)])])
    assert many is not None and many.lines[0].path.count("L") < charts.MAX_CURVE_POINTS


def test_matrix_columns_follow_the_matching() -> None:
    counts = np.array([[0, 9, 1], [7, 0, 0]])
    figure = charts.matrix("k", "t", "c", counts, (["a", "b"], ["x", "y", "z"]), np.array([1, 0]), 1)
    assert figure is not None and figure.column_names == ["y", "x", "z"]
    assert (figure.correct, figure.total) == (16, 17)
    assert figure.cells == [[0, 0, 9], [0, 2, 1], [1, 1, 7]]
    assert figure.confusions == [("a", "z", 1, pytest.approx(0.1))]
    assert (
        charts.matrix("k", "t", "c", counts * 0, (["a", "b"], ["x", "y", "z"]), np.array([1, 0]), 1) is None
    )


def test_maps_repeat_and_keep_groups_apart() -> None:
    task = hostile_task(small_config(), rows_per_class=10)
    predictions = predictions_of(task, task.eval_labels, 5)
    points = maps.choose_points(len(task.rows), seed=1)
    first, second = (maps.draw_maps(predictions, points, 1) for _ in range(2))
    assert [m.title for m in first] == ["Shared feature space", "Cluster-head logits"]
    assert all((a.xy == b.xy).all() for a, b in zip(first, second, strict=True))
    assert all(m.xy.min() >= 0 and m.xy.max() <= maps.EXTENT for m in first)
    assert maps.draw_maps(predictions, points[:4], 1) == []


def test_pictures_are_in_order() -> None:
    images = np.zeros((3, 3, 8, 8), np.uint8)
    images[0], images[1], images[2] = 10, 20, 30
    data = pictures.encode(images, 2, 80).partition("base64,")[2]
    picture = np.asarray(Pillow.open(BytesIO(base64.b64decode(data))))
    assert picture.shape == (16, 16) and picture[0, 0] == 10 and picture[0, 8] == 20 and picture[8, 0] == 30


def test_strips_show_each_image_once() -> None:
    task = hostile_task(small_config(), rows_per_class=10)
    predictions = predictions_of(task, task.eval_labels, 5)
    found = clusters.find(task, predictions, names_of(task))
    album = pictures.Album(task, predictions, found, 8, 10, seed=0)
    strips = album.strips(np.arange(25))
    rows = [row for strip in strips for row in strip.rows]
    assert len(strips) == 3 and len(set(rows)) == len(rows)
    assert [s.title for s in album.strips(np.arange(1))] == ["Most confident"]
    album.full = True
    assert album.strips(np.arange(5)) == []
