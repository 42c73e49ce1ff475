"""Predictions for annotation tools, from the command to the files."""

import json
from collections import Counter
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest

from tests.pipelines.small import refused, uno
from tests.uno.data.builders import write_images
from tests.uno.models import write_model
from uno.config import DataConfig
from uno.data.sources import read_rows


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """The output of ``uno predict`` for four readable images and a broken one."""
    root = tmp_path_factory.mktemp("predicted")
    write_model(root / "run")
    names = ["a b.png", "c&d.png", "sub/é.png", "z.png"]
    write_images(root / "images", names)
    (root / "images" / "broken.png").write_bytes(b"no image")
    uno(
        *("predict", root / "run", "--data", f"folder:{root / 'images'}"),
        *("--output", root / "out"),
    )
    return root


def export(predicted, target, format, *more):
    uno("export", predicted / "out", "--format", format, "--output", target, *more)


@pytest.mark.parametrize("url", [None, "https://example.org/photos/"])
def test_label_studio_gets_tasks_with_predictions_and_a_configuration(
    predicted, tmp_path, url
):
    """Images are named by their path below Label Studio's root, or by a URL."""
    export(predicted, tmp_path, "label-studio", *(["--images", url] if url else []))
    tasks = json.loads((tmp_path / "label-studio.json").read_text())
    assert [task["data"]["image_id"] for task in tasks] == [
        *("a b.png", "c&d.png", "sub/é.png", "z.png")
    ]
    place = url or f"/data/local-files/?d={str(predicted / 'images')[1:]}/"
    assert tasks[0]["data"]["image"] == f"{place}a%20b.png"
    root = ElementTree.parse(tmp_path / "label-studio.xml").getroot()
    choices = {choice.get("value") for choice in root.iter("Choice")}
    for task in tasks:
        (prediction,) = task["predictions"]
        (result,) = prediction["result"]
        assert 0 < prediction["score"] <= 1
        assert set(result["value"]["choices"]) <= choices
        assert root.find(f".//*[@name='{result['from_name']}']").tag == "Choices"
        assert root.find(f".//*[@name='{result['to_name']}']").tag == "Image"


def test_fiftyone_gets_a_class_and_the_path_of_each_image(predicted, tmp_path):
    export(predicted, tmp_path, "fiftyone")
    paths = json.loads((tmp_path / "fiftyone" / "data.json").read_text())
    labels = json.loads((tmp_path / "fiftyone" / "labels.json").read_text())["labels"]
    assert paths.keys() == labels.keys() and len(paths) == 4
    assert sorted(paths.values())[0] == str(predicted / "images" / "a b.png")
    assert all(0 < label["confidence"] <= 1 for label in labels.values())
    kinds = {label["attributes"]["kind"] for label in labels.values()}
    assert kinds <= {"known", "novel"}


def test_cvat_gets_a_tag_of_each_image(predicted, tmp_path):
    export(predicted, tmp_path, "cvat")
    root = ElementTree.parse(tmp_path / "cvat.xml").getroot()
    labels = {label.findtext("name") for label in root.find("meta/task/labels")}
    images = root.findall("image")
    assert [image.get("name") for image in images] == [
        *("a b.png", "c&d.png", "sub/é.png", "z.png")
    ]
    for image in images:
        assert int(image.get("width")) > 0 and int(image.get("height")) > 0
        assert image.find("tag").get("label") in labels


@pytest.fixture
def digits(tmp_path):
    """A run with predictions of its own data, the digits."""
    write_model(tmp_path / "run")
    uno("predict", tmp_path / "run")
    return tmp_path / "run"


def test_answers_of_people_name_classes_and_are_labels(digits, tmp_path, capsys):
    """The file that Label Studio exports holds the tasks with annotations."""
    uno("export", digits, "--format", "label-studio", "--images", "/images")
    tasks = json.loads((digits / "label-studio.json").read_text())
    results = [task["predictions"][0]["result"][0] for task in tasks]
    predicted = Counter(result["value"]["choices"][0] for result in results)
    name = max(predicted.keys() - {*"01234"}, key=predicted.get)
    before = pq.read_table(digits / "predictions").to_pylist()
    asked = [row["label"] for row in before if row["class_name"] == name].count(None)
    assert 0 < asked < predicted[name]  # the labels of training name no class
    for task, result in zip(tasks, results, strict=True):
        if result["value"]["choices"] == [name]:
            result["value"]["choices"] = ["owl"]
        task["annotations"] = [{"result": [result], "was_cancelled": False}]
    file = tmp_path / "project.json"
    file.write_text(json.dumps(tasks))
    uno("classes", digits, "--from", file)
    assert f"{name}: {asked} of {asked} labels are 'owl'" in capsys.readouterr().out
    assert not (digits / "classes.yaml").exists()
    uno("classes", digits, "--from", file, "--apply")
    table = pq.read_table(digits / "predictions").to_pylist()
    assert [row["class_name"] for row in table].count("owl") == predicted[name]
    rows = read_rows(DataConfig(source="digits", labels=str(file)))
    assert rows.labels.to_pylist().count("owl") == predicted[name]


def test_labels_of_other_images_name_no_class(digits, tmp_path, capsys):
    (tmp_path / "labels.csv").write_text("id,label\nother.png,owl\n")
    argv = ["classes", digits, "--from", tmp_path / "labels.csv"]
    assert "'other.png'" in refused(capsys, 2, *argv)


def test_a_run_without_predictions_is_refused(predicted, capsys):
    argv = ["export", predicted / "run", "--format", "cvat"]
    assert "no complete predictions" in refused(capsys, 4, *argv)
