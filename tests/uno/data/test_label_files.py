"""Labels of people: what each file of a tool says, and which rows get them."""

import json
from pathlib import Path
from typing import Any

import pytest

from uno.config import DataConfig
from uno.data.columns import make_ids
from uno.data.label_files import match_images, read_label_file
from uno.data.rows import Rows
from uno.data.sources import read_rows

from .builders import failure, write_images


def write(folder: Path, name: str, content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text)
    return str(folder / name)


def submitted(*names: str, cancelled: bool = False, group: str = "class") -> Any:
    """An annotation of Label Studio."""
    result = {"type": "choices", "from_name": group, "value": {"choices": [*names]}}
    return {"result": [result], "was_cancelled": cancelled}


def task(image: Any, *annotations: Any) -> Any:
    data = image if isinstance(image, dict) else {"image_id": image, "image": "x.png"}
    return {"id": 7, "data": data, "annotations": [*annotations], "predictions": [{}]}


def classified(label: str, tags: Any = (), **more: Any) -> Any:
    return {"_cls": "Classification", "label": label, "tags": [*tags], **more}


def sample(path: str, truth: Any, tags: Any = (), **more: Any) -> Any:
    return {"filepath": path, "tags": [*tags], "ground_truth": truth, **more}


CVAT = """<?xml version="1.0" encoding="utf-8"?><annotations><version>1.1</version>
<image id="0" name="a.png"><tag label="novel-1" source="auto"></tag></image>
<image id="1" name="b.png"><tag label="novel-1" source="auto"></tag>
<tag label="owl" source="manual"></tag></image>
<image id="2" name="c.png"><tag label="jay" source="semi-auto"></tag></image>
</annotations>"""
FILES = {
    "label-studio.json": (
        [
            task("a.png", submitted("owl")),
            task("b.png", submitted("owl", cancelled=True)),
            task("c.png"),
            task("d.png", submitted("owl"), submitted("owl")),
        ],
        {"a.png": "owl", "d.png": "owl"},
    ),
    "json-min.json": (
        [
            {"id": 1, "image_id": "a.png", "image": "x.png", "class": "owl"},
            {"id": 2, "image_id": "b.png", "image": "y.png"},
            {"id": 3, "image": "/data/upload/4/0123abcd-my%20cat.png", "choice": "cat"},
        ],
        {"a.png": "owl", "my cat.png": "cat"},
    ),
    "samples.json": (
        {
            "samples": [
                sample("a.png", classified("novel-1", predicted="novel-1")),
                sample("/x/b.png", classified("owl", image_id="b.png", predicted="n")),
                sample("c.png", classified("jay", predicted="jay"), ["confirmed"]),
                sample("d.png", classified("jay", ["confirmed"], predicted="jay")),
                sample("e.png", classified("jay")),
                sample("f.png", None),
            ]
        },
        {"b.png": "owl", "c.png": "jay", "d.png": "jay", "e.png": "jay"},
    ),
    "cvat.xml": (CVAT, {"b.png": "owl", "c.png": "jay"}),
    "t.csv": ("id,image_id,class\n1,a.png,owl\n2,b.png,\n", {"a.png": "owl"}),
    "t.jsonl": (
        '{"id": "a.png", "label": "h\\u00e9ron"}\n{"id": "b"}',
        {"a.png": "héron"},
    ),
    "lists.jsonl": (
        '{"id": "a.png", "label": ["owl"]}\n{"id": "b.png", "label": []}',
        {"a.png": "owl"},
    ),
    # a text that begins like choices of Label Studio
    "choices.jsonl": (
        json.dumps({"image": "a.png", "choice": '{"choices": 5}'}),
        {"a.png": '{"choices": 5}'},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_each_tool_says_what_people_answered(tmp_path, name):
    content, expected = FILES[name]
    given = read_label_file(write(tmp_path, name, content))
    assert given.classes == expected and not given.warnings


SEVERAL, ONE = ({"choices": names} for names in (["owl", "jay"], ["owl"]))
EXPORTS = {
    "annotations.json": [
        task("a.png", submitted("owl"), submitted("jay")),
        task("b.png", submitted("owl")),
    ],
    "choices.json": [
        task("a.png", submitted("owl", "jay")),
        task("b.png", submitted("owl")),
    ],
    # as JSON-MIN has them, and as text in a table
    "min.json": [
        {"image": "a.png", "choice": SEVERAL},
        {"image": "b.png", "choice": ONE},
    ],
    "min.jsonl": "\n".join(
        json.dumps({"image": name, "choice": json.dumps(chosen)})
        for name, chosen in (("a.png", SEVERAL), ("b.png", ONE))
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_image_in_several_classes_has_no_label_and_is_named(tmp_path, name):
    """Kills: the key of choices as the class."""
    given = read_label_file(write(tmp_path, name, EXPORTS[name]))
    assert given.classes == {"b.png": "owl"}
    assert "1 image" in given.warnings[0] and "a.png: owl, jay" in given.warnings[0]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("x.yaml", "", "labels are read from"),
        ("x.json", "{", "cannot be read"),
        ("x.json", {"labels": {}}, "FiftyOneDataset"),
        ("x.json", [{"annotations": 3, "data": {"image": "a.png"}}], "damaged"),
        ("x.json", [task({"text": "hello"}, submitted("owl"))], "no image"),
        ("x.json", [task("a.png")], "no label of a person"),
        ("x.json", [task("a.png", submitted("owl", "jay"))], "in several classes"),
        (
            "x.json",
            [
                {
                    "data": {"image": "a.png"},
                    "annotations": [
                        {
                            "result": submitted("x", group="color")["result"]
                            + submitted("y", group="size")["result"]
                        }
                    ],
                }
            ],
            "choices color, size",
        ),
        ("x.xml", "<annotations>", "cannot be read"),
        ("x.xml", '<!DOCTYPE x [<!ENTITY e "e">]><annotations/>', "document type"),
        ("x.csv", "id,class_name\na,b\n", "needs the columns id and label"),
        ("x.jsonl", '{"id": "a", "label": {"is": 1}}', "the label of a is no name"),
        ("x.jsonl", '{"id": "a", "label": {"choices": 5}}', "the label of a is no"),
    ],
)
def test_a_file_without_clear_labels_is_refused(tmp_path, name, content, part):
    assert part in failure(read_label_file, write(tmp_path, name, content))


def rows_of(folder: Path, labels: str, images_only: bool = False) -> Rows:
    return read_rows(DataConfig(source=f"folder:{folder}", labels=labels), images_only)


def test_labels_of_a_file_replace_those_of_the_source(tmp_path):
    write_images(tmp_path / "images", ["cat/a.png", "cat/b.png", "c.png"])
    file = write(tmp_path, "l.csv", "id,label\ncat/b.png,owl\nc.png,cat\ngone.png,x\n")
    rows = rows_of(tmp_path / "images", file)
    assert rows.ids.to_pylist() == ["c.png", "cat/a.png", "cat/b.png"]
    assert rows.labels.to_pylist() == ["cat", "cat", "owl"]
    assert "1 label" in rows.warnings[-1] and "gone.png" in rows.warnings[-1]
    assert rows_of(tmp_path / "images", file, images_only=True).labels.null_count == 3


def test_numbers_in_a_file_are_classes_as_in_every_source(tmp_path):
    """pandas writes whole numbers as 0.0 where other rows have none."""
    write_images(tmp_path / "images", ["0/a.png", "1/b.png", "c.png", "d.png"])
    file = write(tmp_path, "l.csv", "id,label\nc.png,0.0\nd.png,1.0\n")
    rows = rows_of(tmp_path / "images", file)
    assert rows.ids.to_pylist() == ["0/a.png", "1/b.png", "c.png", "d.png"]
    assert rows.labels.to_pylist() == ["0", "1", "0", "1"]
    file = write(tmp_path, "l.csv", "id,label\nc.png,0.5\n")
    assert "c.png" in failure(rows_of, tmp_path / "images", file)


def test_a_file_may_correct_the_spelling_of_a_class(tmp_path):
    write_images(tmp_path / "images", ["cat /a.png", "b.png"])
    file = write(tmp_path, "l.csv", "id,label\ncat /a.png,cat\nb.png,cat\n")
    assert rows_of(tmp_path / "images", file).labels.to_pylist() == ["cat", "cat"]


def test_two_spellings_of_a_class_in_file_and_source_are_refused(tmp_path):
    write_images(tmp_path / "images", ["1/a.png", "b.png", "c.png"])
    file = write(tmp_path, "l.csv", "id,label\nb.png,1.0\nc.png,owl\n")
    assert "'1' and '1.0'" in failure(rows_of, tmp_path / "images", file)


@pytest.mark.parametrize(
    "address",
    [
        "{root}/new/b c.png",
        "/data/local-files/?d={root}/new/b%20c.png",
        "https://example.org/photos/new/b%20c.png?token=1",
        "new/b c.png",
        "b c.png",
        "/data/upload/2/a657eb98-b_c.png",
        "http://localhost:8080/data/upload/2/a657eb98-b_c.png",
        "s3://[x/new/b c.png",
    ],
)
def test_images_are_found_by_their_path_where_the_file_has_no_ids(tmp_path, address):
    write_images(tmp_path, ["new/a.png", "new/b c.png", "new/xb c.png"])
    tasks = [task({"image": address.format(root=tmp_path)}, submitted("owl"))]
    rows = rows_of(tmp_path / "new", write(tmp_path, "l.json", tasks))
    assert rows.labels.to_pylist() == [None, "owl", None]


def test_a_file_name_of_two_images_is_not_guessed(tmp_path):
    write_images(tmp_path, ["i/x/a.png", "i/y/a.png", "i/y/b.png"])
    tasks = [task({"image": name}, submitted("owl")) for name in ("a.png", "b.png")]
    rows = rows_of(tmp_path / "i", write(tmp_path, "l.json", tasks))
    assert rows.labels.to_pylist() == ["x", "y", "owl"]
    assert "a.png" in rows.warnings[-1]


def test_labels_of_other_images_are_refused_with_an_example_of_both(tmp_path):
    write_images(tmp_path, ["i/a.png"])
    file = write(tmp_path, "l.csv", "id,label\nb.png,owl\n")
    line = failure(rows_of, tmp_path / "i", file)
    assert "'b.png'" in line and "'a.png'" in line


def test_a_path_of_another_computer_may_have_more_folders_at_its_start():
    """Such as one inside of a container, for rows with absolute paths."""
    ids, paths = make_ids(["a17", "a18"]), ["/mnt/photos/1.jpg", "/mnt/photos/2.jpg"]
    assert match_images(["/host/mnt/photos/2.jpg"], ids, lambda: paths) == {
        "/host/mnt/photos/2.jpg": 1
    }
