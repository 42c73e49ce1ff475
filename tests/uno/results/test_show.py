"""How models and predictions show themselves in a notebook: tables with pictures,
small and inert.
"""

import base64
import json
import re
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import uno
from tests.uno.data.builders import pixels
from tests.uno.models import write_digits, write_model
from tests.uno.report.reading import Page, requests
from uno.config import override
from uno.data.files import Storage
from uno.data.sources import read_digits, read_rows
from uno.data.splits import make_task
from uno.results import predictions, show
from uno.results.classes import ModelClasses, OutputClass, first_classes
from uno.results.infer import load_classifier

HOSTILE = "</td><script>alert(1)</script>\x1b\u202e"


def predicted(folder: Path, images: int = 60, **data: str) -> Storage:
    """A run with random weights and the predictions of its own rows."""
    changes = {f"data__{key}": value for key, value in data.items()}
    config = write_model(folder, data__limit=images, **changes)
    storage, model = Storage(str(folder)), load_classifier(Storage(str(folder)))
    rows = make_task(read_rows(config.data), config.data).rows
    predictions.predict_rows(
        model, predictions.PredictionWriter(storage, rows, model, False, replace=True)
    )
    return storage


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Storage:
    return predicted(tmp_path_factory.mktemp("digits") / "run")


def pictures(text: str) -> list[np.ndarray]:
    """The pixels of every <img>."""
    found = re.findall(r'<img src="data:image/\w+;base64,([^"]+)"', text)
    return [np.asarray(Image.open(BytesIO(base64.b64decode(data)))) for data in found]


def test_a_model_shows_its_classes_with_pictures(digits):
    model = uno.load(digits.uri)
    text, page = model._repr_html_(), Page(model._repr_html_())
    assert page.unclosed == [] and requests(page) == [] and len(text) < 50_000
    says = "5 known and 5 novel classes, images of 8 px"
    assert repr(model) == f"<Model {digits.uri!r}: {says}>"
    table = predictions.read_columns(digits, ("class_index", "probability")).to_pandas()
    groups, strips = dict(list(table.groupby("class_index"))), pictures(text)
    assert len(strips) == len(groups) >= 5
    config = load_classifier(digits).config
    images = make_task(read_rows(config.data), config.data).rows.images
    for strip, index in zip(strips, sorted(groups), strict=True):
        best = groups[index]["probability"].idxmax()
        # the most probable comes first
        np.testing.assert_array_equal(strip[:, :8], images[best][..., 0])
        assert (
            strip.shape == (8, 8 * min(5, len(groups[index])))
            and f">{len(groups[index])}</td>" in text
        )


def test_images_in_folders_are_shown_until_they_are_gone(tmp_path):
    images, run = read_digits().images.items, tmp_path / "run"
    for name in "abcde":
        write_digits(tmp_path / "known" / name, images[:8])
    write_digits(tmp_path / "new", images[50:80])
    folders = {name: str(tmp_path / name) for name in ("known", "new")}
    predicted(run, labeled=folders["known"], unlabeled=folders["new"], num_novel=5)
    assert pictures(uno.load(run)._repr_html_())
    shutil.rmtree(tmp_path / "new")
    assert "<table" in uno.load(run)._repr_html_()
    (run / "predictions" / "part-000000.parquet").write_bytes(b"damaged")
    assert "novel-5" in uno.load(run)._repr_html_()


def test_other_data_under_the_same_name_is_not_shown(digits, monkeypatch):
    """Kills: pictures by row number alone."""
    other = override(load_classifier(digits).config, {"data.limit": 61})
    assert not any(any(m.images) for m in show.read_members(digits, other).values())


def test_a_copy_of_the_model_shows_names_alone(digits, tmp_path):
    for name in digits.list("model"):
        Storage(str(tmp_path)).write(name, digits.read(f"model/{name}"))
    model = uno.load(tmp_path)
    assert model.metrics == {} and model.report is None
    assert "novel-5" in model._repr_html_() and pictures(model._repr_html_()) == []


def test_names_are_inert(tmp_path):
    write_model(tmp_path, aligned=False)
    path = tmp_path / "model" / "classes.json"
    classes = first_classes([f"{HOSTILE}{i}" for i in range(5)], 3)
    classes += [
        OutputClass(8, f"{HOSTILE}8", "novel", None),
        OutputClass(9, f"{HOSTILE}9", "novel", 2),
    ]
    path.write_bytes(ModelClasses(classes=classes).dump())
    text = uno.load(tmp_path)._repr_html_()
    page = Page(text)
    assert page.scripts == [] and page.unclosed == [] and "<script" not in text
    assert not any(char in text for char in "\x1b\u202e") and "alert(1)" in page.text
    assert "merged into" in text and "dropped" in text


@pytest.mark.parametrize("num_classes", [3, 24, 200])
def test_it_stays_small_whatever_the_pictures(num_classes):
    """Noise is what compresses worst. Kills: a notebook of megabytes."""
    images = [pixels(i, 64, 64) for i in range(5)]
    classes = [OutputClass(i, "x" * 300, "novel", i) for i in range(num_classes)]
    found = {i: show.Members(9, images) for i in range(num_classes)}
    text = show.model_html("t", [], classes, found, 64)
    assert len(text) < 500_000
    assert len(pictures(text)) == min(num_classes, show.MAX_CLASSES)
    assert ("160 more classes" in text) == (num_classes == 200)


def test_predictions_are_a_table(digits):
    model, images = uno.load(digits.uri), read_digits().images.items[:30]
    found = model.predict([*images, "/no/such/file.png"])
    assert repr(found).startswith(
        "<Predictions of 31 images: "
    ) and "unreadable (1)" in repr(found)
    table = found.to_pandas()
    assert table["class_name"][0] == found[0].class_name and len(table) == 31
    assert (
        table["reason"][30] == "No such file or directory"
        and table["path"][30] == "/no/such/file.png"
    )
    assert json.loads(table.to_json(orient="records"))[30]["probability"] is None
