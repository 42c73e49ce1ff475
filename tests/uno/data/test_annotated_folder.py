"""Folders whose classes are in a table, and folders with other annotations."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from .builders import failure, read, read_task, write_images

CSV = {
    "train/metadata.csv": "file_name,label\na.png,cat\nb.png,dog\nsub/c.png,\n",
    "test/metadata.csv": "file_name,label\nd.png,cat\n",
}
JSONL = {
    "train/metadata.jsonl": '{"file_name": "a.png", "label": "cat"}\n'
    '{"file_name": "b.png", "label": "dog"}\n{"file_name": "sub/c.png"}',
    "test/metadata.jsonl": '{"file_name": "d.png", "label": "cat"}',
}
ONE_HOT = {
    "train/_classes.csv": "filename, cat, dog\na.png, 1, 0\nb.png, 0, 1\n"
    "sub/c.png, 0, 0\n",
    "test/_classes.csv": "filename, cat, dog\nd.png, 1, 0\n",
}
LABELS = {
    "train/a.png": ("cat", "train"),
    "train/b.png": ("dog", "train"),
    "train/sub/c.png": (None, "train"),
    "test/d.png": ("cat", "test"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three training images and a test image."""
    write_images(tmp_path, LABELS)
    return tmp_path


def write_tables(folder: Path, tables: Mapping[str, str]) -> None:
    for name, text in tables.items():
        (folder / name).write_text(text)


def labels_and_splits(rows):
    pairs = zip(rows.labels.to_pylist(), rows.split.to_pylist(), strict=True)
    return dict(zip(rows.ids.to_pylist(), pairs, strict=True))


@pytest.mark.parametrize("tables", [CSV, JSONL], ids=["csv", "jsonl"])
@pytest.mark.parametrize("kind", ["", "imagefolder:"])
def test_metadata_of_an_imagefolder_says_labels_and_splits(folder, tables, kind):
    write_tables(folder, tables)
    rows = read(f"{kind}{folder}")
    assert labels_and_splits(rows) == LABELS
    paths = rows.images.read_images(np.arange(4))
    assert paths == [f"{folder.resolve()}/{name}" for name in rows.ids.to_pylist()]
    assert len(read(f"{kind}{folder}", images_only=True)) == 4


def test_one_hot_classes_of_roboflow_are_labels(folder):
    write_tables(folder, ONE_HOT)
    assert labels_and_splits(read(folder)) == LABELS


def test_labels_of_another_name_are_found_with_the_option(folder):
    write_tables(folder, {k: t.replace("label", "species") for k, t in CSV.items()})
    rows = read(folder, columns="label=species")
    assert labels_and_splits(rows) == LABELS
    line = failure(read_task, f"imagefolder:{folder}")
    assert "--data.columns label=species" in line
    line = failure(read_task, f"imagefolder:{folder}", columns="label=specie")
    assert "label=specie: no such column; it has file_name, species" in line


def test_the_number_0_is_a_label(folder):
    names = ["train/a.png", "train/b.png"]
    lines = [json.dumps({"file_name": n, "label": 0, "eval_label": 0}) for n in names]
    write_tables(folder, {"metadata.jsonl": "\n".join(lines)})
    rows = read(f"imagefolder:{folder}")
    assert rows.labels.to_pylist() == rows.eval_labels.to_pylist() == ["0", "0"]
    assert not any("no column" in note for note in rows.notes)


def test_captions_without_labels_leave_class_folders_as_they_are(tmp_path):
    write_images(tmp_path, ["cat/a.png", "dog/b.png"])
    text = "file_name,text\ncat/a.png,a cat\ndog/b.png,a dog\n"
    write_tables(tmp_path, {"metadata.csv": text})
    rows = read(tmp_path)
    assert rows.source.startswith("folder:")
    assert rows.labels.to_pylist() == ["cat", "dog"]


def test_images_that_no_table_names_are_counted(folder):
    write_tables(folder, CSV)
    write_images(folder, ["train/extra.png"])
    (line,) = read(folder).warnings
    assert "1 image" in line and "train/extra.png" in line


@pytest.mark.parametrize(
    "spelling", ["{}/train/a.png", "file://{}/train/a.png", "%61.png"]
)
def test_an_image_that_a_table_spells_otherwise_is_read(folder, spelling):
    """In the table of a split. Kills: a warning that the image is left out."""
    write_tables(folder, CSV)
    path, spelled = folder / "train/metadata.csv", spelling.format(folder.resolve())
    path.write_text(path.read_text().replace("a.png", spelled))
    rows = read(folder)
    paths = rows.images.read_images(np.arange(4))
    assert {*paths} == {f"{folder.resolve()}/{name}" for name in LABELS}
    assert not rows.warnings


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        ({}, ["metadata.csv"]),
        (
            {"metadata.csv": "image,label\ntrain/a.png,cat\n"},
            ["needs a column file_name", "image, label"],
        ),
        (
            {"train/_classes.csv": "filename, cat, dog\na.png, 1, 1\n"},
            ["line 2: the image has the classes"],
        ),
        ({"train/_classes.csv": "name, cat\na.png, 1\n"}, ["needs a column filename"]),
    ],
)
def test_a_folder_without_a_table_or_its_column_is_refused(folder, tables, parts):
    write_tables(folder, tables)
    line = failure(read, f"imagefolder:{folder}")
    assert all(part in line for part in parts)


@pytest.mark.parametrize(
    ("kind", "images", "beside"),
    [
        ("COCO", "train/a.png", "train/_annotations.coco.json"),
        ("COCO", "images/a.png", "annotations/instances_train.json"),
        ("YOLO", "images/train/a.png", "labels/train/a.txt"),
        ("YOLO", "train/images/a.png", "train/labels/a.txt"),
        ("Pascal VOC", "JPEGImages/a.png", "Annotations/a.xml"),
    ],
)
def test_boxes_around_objects_are_refused_with_a_tool_that_crops_them(
    tmp_path, kind, images, beside
):
    write_images(tmp_path, [images])
    (tmp_path / beside).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / beside).write_text("")
    line = failure(read, tmp_path)
    assert kind in line and "ImageClassificationDirectoryTree" in line
