"""Predictions for annotation tools, from the command to the files."""

import json
from collections import Counter
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest

from pipelines import cli
from tests.uno.data.builders import write_images
from tests.uno.models import write_model
from uno.config import DataConfig
from uno.data.sources import read_rows
from uno.errors import ConfigError


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """The output of ``uno predict`` for four readable images and a broken one."""
    root = tmp_path_factory.mktemp("predicted")
    write_model(root / "run")
    names = ["a b.png", "c&d.png", "sub/é.png", "z.png"]
    write_images(root / "images", names)
    (root / "images" / "broken.png").write_bytes(b"no image")
    run(
        *("predict", root / "run", "--data", f"folder:{root / 'images'}"),
        *("--output", root / "out"),
    )
    return root


def run(*argv):
    assert cli.main([str(word) for word in argv]) == 0


def export(predicted, target, format, *more):
    run("export", predicted / "out", "--format", format, "--output", target, *more)


def test_label_studio_gets_tasks_with_predictions_and_a_configuration(
    predicted, tmp_path
):
    export(predicted, tmp_path, "label-studio")
    tasks = json.loads((tmp_path / "label-studio.json").read_text())
    assert [task["data"]["image_id"] for task in tasks] == [
        *("a b.png", "c&d.png", "sub/é.png", "z.png")
    ]
    place = "/data/local-files/?d=" + str(predicted / "images")[1:]
    assert tasks[0]["data"]["image"] == f"{place}/a%20b.png"
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
    for label in labels.values():
        assert 0 < label["confidence"] <= 1
        assert label["attributes"]["kind"] in ("known", "novel")


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


def test_images_can_be_named_by_a_url(predicted, tmp_path):
    url = "https://example.org/photos/"
    export(predicted, tmp_path, "label-studio", "--images", url)
    tasks = json.loads((tmp_path / "label-studio.json").read_text())
    assert tasks[0]["data"]["image"] == "https://example.org/photos/a%20b.png"


@pytest.fixture
def digits(tmp_path):
    """A run with predictions of its own data, the digits."""
    write_model(tmp_path / "run")
    run("predict", tmp_path / "run")
    return tmp_path / "run"


def test_answers_of_people_name_classes_and_are_labels(digits, tmp_path, capsys):
    """The file that Label Studio exports holds the tasks with annotations."""
    run("export", digits, "--format", "label-studio", "--images", "/images")
    tasks = json.loads((digits / "label-studio.json").read_text())
    results = [task["predictions"][0]["result"][0] for task in tasks]
    old = [result["value"]["choices"][0] for result in results]
    ((name, num),) = Counter(n for n in old if n.startswith("novel")).most_common(1)
    before = pq.read_table(digits / "predictions").to_pylist()
    asked = [row["label"] for row in before if row["class_name"] == name].count(None)
    for task, result, predicted in zip(tasks, results, old, strict=True):
        answer = "owl" if predicted == name else predicted
        result = result | {"value": {"choices": [answer]}}
        task["annotations"] = [{"result": [result], "was_cancelled": False}]
    file = tmp_path / "project.json"
    file.write_text(json.dumps(tasks))
    run("classes", digits, "--from", file)
    # the labels of training name no class
    assert f"{name}: {asked} of {asked} labels are 'owl'" in capsys.readouterr().out
    assert 0 < asked < num
    assert not (digits / "classes.yaml").exists()
    run("classes", digits, "--from", file, "--apply")
    table = pq.read_table(digits / "predictions").to_pylist()
    assert [row["class_name"] for row in table].count("owl") == num
    rows = read_rows(DataConfig(source="digits", labels=str(file)))
    assert rows.labels.to_pylist().count("owl") == num


def test_labels_of_other_images_name_no_class(digits, tmp_path, capsys):
    (tmp_path / "labels.csv").write_text("id,label\nother.png,owl\n")
    argv = ["classes", str(digits), "--from", str(tmp_path / "labels.csv")]
    assert cli.main(argv) == ConfigError.exit_code
    assert "'other.png'" in capsys.readouterr().err


def test_a_run_without_predictions_is_refused(predicted, tmp_path, caplog, capsys):
    argv = ["export", str(predicted / "run"), "--format", "cvat"]
    assert cli.main(argv) != 0
    assert "no complete predictions" in capsys.readouterr().err + caplog.text
