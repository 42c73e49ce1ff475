"""Folders whose classes are in a table, and folders with other annotations."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from uno.config import DataConfig
from uno.data.sources import read_rows
from uno.data.splits import make_task

from .builders import failure, write_images

NAMES = ["train/a.png", "train/b.png", "train/sub/c.png", "test/d.png"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three training images and a test image."""
    write_images(tmp_path, NAMES)
    return tmp_path


def write_metadata(folder: Path, suffix: str, key: str = "label") -> None:
    """Write the table of each split; ``sub/c.png`` has no label."""
    rows = {
        "train": [("a.png", "cat"), ("b.png", "dog"), ("sub/c.png", None)],
        "test": [("d.png", "cat")],
    }
    for split, pairs in rows.items():
        if suffix == "csv":
            lines = [
                f"file_name,{key}",
                *(f"{name},{label or ''}" for name, label in pairs),
            ]
        else:
            lines = [
                json.dumps({"file_name": name, key: label}) for name, label in pairs
            ]
        (folder / split / f"metadata.{suffix}").write_text("\n".join(lines))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("kind", ["", "imagefolder:"])
def test_metadata_of_an_imagefolder_says_labels_and_splits(folder, suffix, kind):
    write_metadata(folder, suffix)
    rows = read_rows(DataConfig(source=f"{kind}{folder}"))
    label_of = dict(
        zip(
            rows.ids.to_pylist(),
            zip(rows.labels.to_pylist(), rows.split.to_pylist(), strict=True),
            strict=True,
        )
    )
    assert label_of == {
        "train/a.png": ("cat", "train"),
        "train/b.png": ("dog", "train"),
        "train/sub/c.png": (None, "train"),
        "test/d.png": ("cat", "test"),
    }
    paths = dict(
        zip(rows.ids.to_pylist(), rows.images.read_images(np.arange(4)), strict=True)
    )
    assert paths["train/sub/c.png"] == os.path.realpath(folder / "train/sub/c.png")


def test_labels_of_another_name_are_found_with_the_option(folder):
    write_metadata(folder, "csv", key="species")
    rows = read_rows(DataConfig(source=str(folder), columns="label=species"))
    assert set(rows.labels.to_pylist()) == {"cat", "dog", None}
    line = failure(_task_of, f"imagefolder:{folder}")
    assert "--data.columns label=species" in line
    wrong = DataConfig(source=f"imagefolder:{folder}", columns="label=specie")
    line = failure(read_rows, wrong)
    assert "label=specie: no such column; it has file_name, species" in line


def test_the_number_0_is_a_label(folder):
    names = ["train/a.png", "train/b.png"]
    lines = [json.dumps({"file_name": n, "label": 0, "eval_label": 0}) for n in names]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    rows = read_rows(DataConfig(source=f"imagefolder:{folder}"))
    assert rows.labels.to_pylist() == rows.eval_labels.to_pylist() == ["0", "0"]
    assert not any("no column" in note for note in rows.notes)


def _task_of(source: str):
    config = DataConfig(source=source, num_novel=1)
    return make_task(read_rows(config), config)


def test_captions_without_labels_leave_class_folders_as_they_are(tmp_path):
    write_images(tmp_path, ["cat/a.png", "dog/b.png"])
    (tmp_path / "metadata.csv").write_text(
        "file_name,text\ncat/a.png,a cat\ndog/b.png,a dog\n"
    )
    rows = read_rows(DataConfig(source=str(tmp_path)))
    assert rows.source.startswith("folder:") and rows.labels.to_pylist() == [
        "cat",
        "dog",
    ]


def test_images_that_no_table_names_are_counted(folder):
    write_metadata(folder, "csv")
    write_images(folder, ["train/extra.png"])
    rows = read_rows(DataConfig(source=str(folder)))
    (line,) = rows.warnings
    assert "1 image" in line and "train/extra.png" in line


def test_an_image_that_a_table_spells_otherwise_is_not_left_out(tmp_path):
    write_images(tmp_path, ["my cat.png", "dog.png"])
    (tmp_path / "metadata.csv").write_text(
        "file_name,label\nmy%20cat.png,cat\ndog.png,dog\n"
    )
    assert not read_rows(DataConfig(source=str(tmp_path))).warnings


def test_a_metadata_folder_can_be_predicted(folder):
    write_metadata(folder, "csv")
    assert len(read_rows(DataConfig(source=str(folder)), True)) == 4


def test_an_imagefolder_without_a_table_or_its_column_is_refused(folder):
    assert "metadata.csv" in failure(
        read_rows, DataConfig(source=f"imagefolder:{folder}")
    )
    (folder / "metadata.csv").write_text("image,label\ntrain/a.png,cat\n")
    line = failure(read_rows, DataConfig(source=f"imagefolder:{folder}"))
    assert "needs a column file_name" in line and "image, label" in line


def test_one_hot_classes_of_roboflow_are_labels(folder):
    (folder / "train/_classes.csv").write_text(
        "filename, cat, dog\na.png, 1, 0\nb.png, 0, 1\nsub/c.png, 0, 0\n"
    )
    (folder / "test/_classes.csv").write_text("filename, cat, dog\nd.png, 0, 1\n")
    rows = read_rows(DataConfig(source=str(folder)))
    assert dict(zip(rows.ids.to_pylist(), rows.labels.to_pylist(), strict=True)) == {
        "train/a.png": "cat",
        "train/b.png": "dog",
        "train/sub/c.png": None,
        "test/d.png": "dog",
    }
    assert rows.split.to_pylist().count("test") == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("filename, cat, dog\na.png, 1, 1\n", "line 2: the image has the classes"),
        ("name, cat\na.png, 1\n", "needs a column filename"),
    ],
)
def test_a_one_hot_table_with_a_mistake_is_refused(folder, text, part):
    (folder / "train/_classes.csv").write_text(text)
    assert part in failure(read_rows, DataConfig(source=str(folder)))


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
    line = failure(read_rows, DataConfig(source=str(tmp_path)))
    assert kind in line and "ImageClassificationDirectoryTree" in line
