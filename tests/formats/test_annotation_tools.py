"""Annotation tools: their libraries read our exports, and we read what they export."""

import json
from pathlib import Path

import pytest

from pipelines import cli
from tests.uno.data.builders import write_images
from tests.uno.models import write_model
from uno.data.label_files import read_label_file

NAMES = ["a b.png", "c&d.png", "sub/é.png", "z.png"]


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of ``uno predict`` for the images NAMES."""
    root = tmp_path_factory.mktemp("predicted")
    write_model(root / "run")
    write_images(root / "images", NAMES)
    data = ["--data", f"folder:{root / 'images'}", "--output", str(root / "out")]
    assert cli.main(["predict", str(root / "run"), *data]) == 0
    return root


def export(predicted: Path, format: str) -> Path:
    argv = ["export", str(predicted / "out"), "--format", format]
    assert cli.main(argv) == 0
    return predicted / "out"


def test_label_studio_accepts_our_project_and_we_read_its_exports(predicted, tmp_path):
    from label_studio_sdk.converter import Converter
    from label_studio_sdk.label_interface import LabelInterface

    folder = export(predicted, "label-studio")
    config = (folder / "label-studio.xml").read_text()
    tasks = json.loads((folder / "label-studio.json").read_text())
    interface = LabelInterface(config)
    interface.validate()
    for number, (task, name) in enumerate(zip(tasks, NAMES, strict=True)):
        (prediction,) = task["predictions"]
        assert interface.validate_prediction(prediction, return_errors=True) == []
        # what the server stores when a person submits another choice
        (result,) = prediction["result"]
        answer = result | {"value": {"choices": ["owl"]}, "id": "r1"}
        times = {"created_at": "2026-01-01T00:00:00Z", "lead_time": 3.5}
        annotation = {"id": number, "completed_by": 1, "result": [answer], **times}
        task |= {"id": 100 + number, "annotations": [annotation]}
        task["annotations"] *= name != "z.png"
    source = tmp_path / "project.json"
    source.write_text(json.dumps(tasks))
    expected = dict.fromkeys(NAMES[:3], "owl")
    assert read_label_file(str(source)).classes == expected
    converter = Converter(config, project_dir=None)
    for kind, name in (("JSON_MIN", "result.json"), ("CSV", "result.csv")):
        out = tmp_path / kind if kind == "JSON_MIN" else tmp_path / name
        converter.convert(str(source), str(out), kind, is_dir=False)
        found = out / name if out.is_dir() else out
        assert read_label_file(str(found)).classes == expected, kind


def test_a_dataset_of_fiftyone_holds_our_predictions_and_we_read_its_corrections(
    predicted, tmp_path
):
    import fiftyone as fo

    dataset = fo.Dataset.from_dir(
        str(export(predicted, "fiftyone") / "fiftyone"),
        dataset_type=fo.types.FiftyOneImageClassificationDataset,
        data_path="data.json",
    )
    samples = list(dataset)
    paths = [str(predicted / "images" / name) for name in NAMES]
    assert [sample.filepath for sample in samples] == paths
    labels = [sample.ground_truth for sample in samples]
    assert all(0 < label.confidence <= 1 for label in labels)
    assert [label.image_id for label in labels] == NAMES
    confirmed = labels[1].label
    labels[0].label = "owl"
    samples[1].tags.append("confirmed")
    samples[2].ground_truth = fo.Classification(label="jay")
    for sample in samples:
        sample.save()
    dataset.export(
        str(tmp_path / "out"),
        dataset_type=fo.types.FiftyOneDataset,
        export_media=False,
    )
    given = read_label_file(str(tmp_path / "out" / "samples.json"))
    assert given.classes == {NAMES[0]: "owl", NAMES[1]: confirmed, paths[2]: "jay"}


def test_the_parser_of_cvat_in_fiftyone_reads_our_tags(predicted):
    from fiftyone.utils import cvat

    file = export(predicted, "cvat") / "cvat.xml"
    _, _, images = cvat.load_cvat_image_annotations(str(file))
    assert [image.name for image in images] == NAMES
    assert all(len(image.tags) == 1 for image in images)
