"""What the page says and shows: classes, warnings, commands, drawings, pictures."""

from dataclasses import replace
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from tests.uno.report.runs import hostile_task, small_config, write_run
from uno.data.files import Storage
from uno.data.images import InMemory
from uno.data.memory import DecodedImages, RowBlocks
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.report import charts, checks, facts, pictures
from uno.report.findings import class_similarity, nearest, summarize
from uno.report.sample import Sample, choose_rows, open_model, score_sample
from uno.results.classes import first_classes
from uno.results.infer import (
    align_heads,
    decoder,
    load_classifier,
    sample_logits,
    save_model,
    score_rows,
)
from uno.results.show import encode
from uno.runs import PHASES


def sample_of(task: Task, outputs: np.ndarray, num_heads: int = 3) -> Sample:
    """Every head is sure of ``outputs`` (M,)."""
    num, classes = len(task.rows), first_classes(task.known, task.num_novel)
    features = np.eye(len(classes))[outputs] + np.linspace(0, 0.1, num)[:, None]
    return Sample(
        index=np.arange(num),
        features=features.astype(np.float32),
        votes=outputs[:, None].repeat(num_heads, axis=1),
        confidence=np.full(num, 0.99, np.float32),
        best_head=0,
        classes=classes,
        model_hash="",
        num_rows=num,
        is_whole=True,
    )


@pytest.fixture(scope="module")
def digits() -> Task:
    config = small_config(**{"data.limit": 200})
    return make_task(read_rows(config.data), config.data)


def test_classes_are_those_of_the_best_head(digits):
    sample = sample_of(digits, digits.eval_labels)
    sample.votes[:, 1] = 0  # another head's
    found = summarize(digits, sample)
    unlabeled = (digits.labels < 0) & digits.is_train
    sizes = [int((unlabeled & (digits.eval_labels == 5 + k)).sum()) for k in range(5)]
    assert [c.count for c in found.clusters] == sizes
    assert [c.majority for c in found.clusters] == [
        (name, 1.0) for name in digits.novel
    ]
    assert found.absorbed == 0 and found.mean_agreement == pytest.approx(2 / 3)
    assert found.head_agreement == [0.5, 0, 0.5]


def test_likeness_finds_the_nearest():
    """Kills: a class like itself, a scale on which all classes are alike, classes
    without rows.
    """
    rows = torch.tensor(
        [  # what all images have in common says nothing
            [5.0, 1, 0, 0],
            [5.0, 0, 1, 0],
            [5.0, 0, 0, 1],
            [5.0, 1, 0, 0.2],
            [5.0, 1, 0, 0],
            [5.0, -1, 0, 1],
        ]
    )
    outputs = torch.tensor([0, 1, 2, 3, 4, 6])
    likeness = class_similarity(rows, outputs, 7).numpy()
    output, cosine = nearest(likeness[3, :3])
    assert output == 0 and cosine > 0.9 > 0.1 > likeness[3, 1]
    assert nearest(likeness[3, 3:], 3)[0] == 4  # neither itself nor the empty one
    assert nearest(likeness[5, :3]) is None


def test_agreement_is_that_of_the_predictions(tmp_path):
    """Kills: an alignment of heads of the report's own, the best head left out or
    counted by luck.
    """
    config = small_config(**{"data.limit": 120, "model.num_heads": 3})
    task = make_task(read_rows(config.data), config.data)
    storage = write_run(tmp_path, config, task)
    model = open_model(config, storage, task, "cpu")
    decode, unlabeled = (
        decoder(model, task.rows),
        np.flatnonzero(task.is_train & (task.labels < 0)),
    )
    sample = score_sample(task, model, decode)
    save_model(config, storage, model.module, model.best_head, task.known)
    _, logits = sample_logits(model, decode, unlabeled, len(unlabeled))
    aligned = replace(
        load_classifier(storage),
        alignment=align_heads(logits.novel[0], model.best_head),
    )
    again = score_sample(task, open_model(config, storage, task, "cpu"), decode)
    [(_, _, scores)] = score_rows(aligned, decode, [np.arange(len(task.rows))])
    for found in (sample, again):  # an unfinished run and a finished one
        assert (found.output == scores.class_index.numpy()).all()
        assert np.allclose(found.confidence, scores.probability.numpy(), atol=1e-6)
        assert np.allclose(
            summarize(task, found).agreement, scores.head_agreement.numpy()
        )


def moved(sample: Sample, source: int, target: int, but: int = 0) -> Sample:
    """Rows of output ``source``, all but the first few, go to ``target`` in all
    heads.
    """
    votes = sample.votes.copy()
    votes[np.flatnonzero(sample.output == source)[but:]] = target
    return replace(sample, votes=votes)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda s: s, ""),
        (lambda s: moved(s, 9, 8), "Collapse: 1 of 5 discovered classes"),
        (
            lambda s: replace(s, votes=s.votes * 0),
            "Collapse: 5 of 5 discovered classes",
        ),
        (lambda s: moved(s, 9, 8, but=4), "Imbalance: “novel-4”"),
        (
            lambda s: moved(s, 7, 1),
            "of the unlabeled images are assigned to known classes",
        ),
    ],
)
def test_warnings_about_classes(digits, change, seen):
    trained = facts.RunData(
        journal=[{"phase": "discover", "step": 5, "total_steps": 5}]
    )
    summary = summarize(digits, change(sample_of(digits, digits.eval_labels)))
    found = [title for title, _ in checks.warnings("ncd", trained, summary)]
    assert any(seen in title for title in found) if seen else found == []


@pytest.mark.parametrize("phase", PHASES)
def test_warnings_about_a_phase(phase):
    """Kills: a phase that no check knows, such as rotation."""
    lines = [
        {"phase": phase, "step": s, "total_steps": 10, "skipped_steps": 2, "epochs": 1}
        for s in (1, 5)
    ]
    found = [
        seen for seen, _ in checks.warnings("ncd", facts.RunData(journal=lines), None)
    ]
    assert f"Unfinished: the {phase} phase stopped at step 5 of 10" in found
    assert f"2 steps of {phase} skipped because the loss was not finite" in found


def test_a_sample_keeps_the_shares(digits):
    rows = choose_rows(digits, 100, seed=0)
    assert (
        len(rows) <= 100
        and (np.diff(rows) > 0).all()
        and (choose_rows(digits, 100, 0) == rows).all()
    )
    assert abs(digits.is_train[rows].mean() - digits.is_train.mean()) < 0.03
    assert (choose_rows(digits, 10_000, 0) == np.arange(len(digits.rows))).all()


def test_training_time_is_that_of_the_steps_whatever_the_batch_size():
    """A derived batch size shrinks with unreadable images; no step counts twice."""
    lines = [
        {"phase": "discover", "step": 10, "step_ms": 1000.0, "images_per_s": 100.0},
        {"phase": "discover", "step": 20, "step_ms": 2000.0, "images_per_s": 50.0},
        {"phase": "discover", "step": 20, "step_ms": 9000.0, "images_per_s": 1.0},
    ]
    assert facts.training_seconds(lines) == pytest.approx(10 + 20)


def test_numbers_that_are_none_are_left_out(tmp_path):
    lines = ['"step": 3, "loss": 1e999', '"step": null', '"step": 4, "epoch": "x"']
    text = "\n".join(f'{{"phase": "discover", {line}}}' for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "metrics.json").write_text('{"a": 1' + "0" * 400 + ', "b": 2}')
    found = facts.read_facts(Storage(str(tmp_path)))
    assert found.metrics == {"b": 2}
    assert facts.times(found) == [("Discovery time", "0 s for 3 steps, 0 epochs")]
    assert facts.curves(found) == []


def test_line_chart_places_points_and_skips_nan():
    points = [(0, 0.0), (10, 2.0), (5, float("nan"))]
    chart = charts.line_chart(
        "t", "step", [charts.Series("a", points)], [charts.Dot(5, 1, "best", "words")]
    )
    assert chart.lines[0].path == f"M0 {charts.HEIGHT}L{charts.WIDTH} 0"
    assert chart.dots == [
        charts.Dot(charts.WIDTH / 2, charts.HEIGHT / 2, "best", "words")
    ]
    assert [label for _, label in chart.y_ticks] == ["0", "0.5", "1", "1.5", "2"]
    assert charts.line_chart("t", "x", [charts.Series("a", [])]) is None
    many = charts.line_chart(
        "t", "x", [charts.Series("a", [(i, 1.0) for i in range(9999)])]
    )
    assert many.lines[0].path.count("L") < charts.MAX_CURVE_POINTS


def test_matrix_columns_follow_the_matching():
    counts, names = np.array([[0, 9, 1], [7, 0, 0]]), (["a", "b"], ["x", "y", "z"])
    figure = charts.draw_matrix("t", counts, names, np.array([1, 0]), 1)
    assert (figure.columns, figure.correct, figure.total) == (["y", "x", "z"], 16, 17)
    cells = [(cell.row, cell.column, cell.num_images) for cell in figure.cells]
    assert cells == [(0, 0, 9), (0, 2, 1), (1, 1, 7)]
    (error,) = figure.errors
    assert (error.row, error.column, error.share) == (0, 2, pytest.approx(0.1))
    assert charts.draw_matrix("t", counts * 0, names, np.array([1, 0])) is None


@pytest.mark.usefixtures("real_maps")
def test_maps_repeat_keep_groups_apart_and_need_differences():
    data = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    (xy, _), (again, _) = (charts.place_points(data, 1) for _ in range(2))
    assert (xy == again).all() and xy.min() >= 0 and xy.max() <= charts.EXTENT
    classes = np.arange(60) % 3 - 1
    groups = charts.group_points(classes, ["a", "b"], 1, [4, 5], xy)
    assert [group.kind for group in groups] == ["none", "known", "novel"]
    assert all(group.path.count("M") == 20 for group in groups)
    for noise in (0, 1e-8):  # t-SNE would divide by zero, then crash
        same = np.ones((50, 8), np.float32) + noise * data[:50]
        assert charts.place_points(same, 0) is None
    assert charts.place_points(np.eye(4, dtype=np.float32), 0) is None  # too few


def read_picture(uri: str) -> np.ndarray:
    """The pixels of a data URI."""
    with urlopen(uri) as stream:
        return np.asarray(Pillow.open(stream))


def test_galleries(monkeypatch):
    images = np.array([10, 20, 30], np.uint8).repeat(3 * 8 * 8).reshape(3, 3, 8, 8)
    picture = read_picture(encode(images, 2, 80))
    assert picture[::8, ::8].ravel()[:3].tolist() == [10, 20, 30]
    # every member is there once; where there is no room, as many of each class
    task = hostile_task(small_config(), rows_per_class=10)
    sample = sample_of(task, task.eval_labels)
    sample.confidence[:] = np.linspace(0, 1, len(sample.index))
    groups = [np.arange(40), np.arange(40, 45), np.arange(0)]
    album = pictures.Album(task.rows, sample.index, sample.confidence, groups)
    tiles = album.gallery(groups[0])
    assert [tile.row for tile in tiles] == [*range(39, -1, -1)]
    assert album.is_whole and album.side == 8
    assert (read_picture(tiles[0].uri) == task.rows.images[39]).all()
    assert album.gallery(groups[2]) == [] and album.preview(groups[2]).uri == ""
    monkeypatch.setattr(pictures, "MAX_TILES", 3 * 15)
    small = pictures.Album(task.rows, sample.index, sample.confidence, groups)
    rows = [tile.row for tile in small.gallery(groups[0])]
    assert not small.is_whole and len(set(rows)) == 15
    assert rows[0] == 39 and rows[-1] == 0 and len(small.gallery(groups[1])) == 5


def test_pictures_are_those_of_the_source(tmp_path):
    """Kills: tiles of the pixels that a small run keeps, where the files hold more."""
    large = np.random.default_rng(0).integers(0, 255, (2, 300, 200, 3), dtype=np.uint8)
    chosen = InMemory(large).take(np.array([1, 0]))
    images = DecodedImages.of(
        chosen, RowBlocks([torch.zeros(2, 3, 8, 8)]), [None, None]
    ).take(np.array([1]))
    assert (
        len(images) == 1
        and images[0].shape == (300, 200, 3)
        and (images[0] == large[0]).all()
    )
