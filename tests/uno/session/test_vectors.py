"""A run on vectors from the array to the report, and what refuses them."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import uno
from uno.config import Config, override
from uno.data.embeddings import given_vectors
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.results.export import export
from uno.session.api import store_embeddings
from uno.session.configure import from_keywords
from uno.session.prepare import check_data

FEW = {
    "compute.threads": 1,
    "discover.epochs": 20,
    "train.batch_size": 64,
    "data.max_bad_fraction": 0.05,
    "quiet": True,
}


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """40 rows of each of six Gaussian classes far apart, float32 (240, 16); their
    classes; and the labels of four classes, -1 for the others.
    """
    generator, truth = np.random.default_rng(0), np.repeat(np.arange(6), 40)
    centers = 4 * generator.normal(size=(6, 16))
    vectors = centers[truth] + generator.normal(size=(240, 16))
    return vectors.astype(np.float32), truth, np.where(truth < 4, truth, -1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model of six classes, of which four are known, two rows are bad; its vectors
    and their classes.
    """
    vectors, truth, labels = drawn()
    vectors[3], vectors[5] = np.nan, 0
    output = str(tmp_path_factory.mktemp("vectors") / "run")
    settings = FEW | {"num_novel": 2, "output": output, "report": True}
    model = uno.discover(embeddings=vectors, labels=labels, **settings)
    return model, vectors, truth


def test_classes_are_found_and_predicted(run):
    """Kills: vectors that lose their order or label on the way, bad ones that get a
    class.
    """
    model, vectors, truth = run
    found = model.predict(vectors)
    bad = {i: reason for i, reason in enumerate(found.reason) if reason is not None}
    assert bad == {3: "numbers that are not finite", 5: "a vector of zeros"}
    known = (truth < 4) & (found.class_index >= 0)
    assert (found.class_index[known] == truth[known]).all()
    novel = [set(found.class_index[truth == c].tolist()) for c in (4, 5)]
    assert novel in ([{4}, {5}], [{5}, {4}])
    one = model.predict(torch.from_numpy(vectors[:1]).double())
    assert one[0].class_name == "0" and one.embedding.shape == (1, 16)
    assert "vectors of 16" in repr(model) and "uno" in model._repr_html_()


def test_the_run_lists_bad_rows_and_shows_ids(run):
    """Kills: bad vectors that are not listed; a page that shows black squares where
    there are no pictures.
    """
    folder = Path(run[0].run)
    listed = (folder / "bad_samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in listed] == ["row-3", "row-5"]
    page = (folder / "report.html").read_text()
    assert "<bdi>row-17" in page and 'class="tiles-of texts"' in page
    assert "<img src" not in page
    table = pq.read_table(folder / "predictions").to_pylist()
    assert [row["id"] for row in table if row["status"] == "bad"] == ["row-3", "row-5"]


@pytest.mark.slow
def test_the_exported_program_takes_vectors(run):
    """Kills: a program that waits for images."""
    model, vectors, _ = run
    program = torch.export.load(io.BytesIO(export(model._classifier, "pt2"))).module()
    found = program(torch.from_numpy(vectors[6:40])).numpy()
    expected = model.predict(vectors[6:40]).probabilities
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v * 0 + 1, "the features of all images are the same"),
        (lambda v: v * 1e30, "the features are larger than 1e"),
    ],
)
def test_vectors_that_tell_nothing_apart_are_said_before_training(
    tmp_path, capsys, change, says
):
    vectors, _, labels = drawn()
    settings = FEW | {"discover.epochs": 1, "quiet": False, "num_novel": 2}
    output = str(tmp_path / "run")
    uno.discover(embeddings=change(vectors), labels=labels, output=output, **settings)
    told = capsys.readouterr().out
    assert 0 < told.index(f"warning: {says}") < told.index("predicting all images")


def test_embeddings_keep_other_settings_of_the_data(tmp_path):
    vectors, truth, _ = drawn()
    settings = {"data": {"limit": 9}, "num_novel": 2, "output": tmp_path / "run"}
    stored = from_keywords(store_embeddings(settings, vectors, truth, None))
    assert stored["data.limit"] == 9
    assert stored["data.source"].startswith(f"vectors:{tmp_path}/run-vectors-")


@pytest.mark.parametrize("value", [0.0, np.inf])
def test_nothing_but_unusable_vectors(tmp_path, value):
    """Kills: advice on the batch size where no row can be used."""
    vectors, _, labels = drawn()
    settings = {"num_novel": 2, "output": str(tmp_path / "run"), "quiet": True}
    with pytest.raises(ConfigError, match="240 of 240 images are unreadable"):
        uno.discover(embeddings=np.full_like(vectors, value), labels=labels, **settings)


VECTORS = drawn()[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embeddings": VECTORS, "data": "digits"}, "either embeddings or"),
        ({"labels": [1]}, "go with embeddings"),
        ({"embeddings": VECTORS, "labels": None}, "no embedding has a label.*labels=y"),
        ({"embeddings": VECTORS, "labels": [None] * 240}, "no embedding has a label"),
        (
            {"data": "vectors:v.npy", "preset": "scratch"},
            "takes images, the data has vectors of 16 numbers",
        ),
        (
            {"data": "digits", "preset": "vectors", "known_classes": "first:5"},
            "takes vectors of",
        ),
        ({"data": "vectors:v.npy", "model.finetune": "full"}, "no encoder is there"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_do_not_fit_vectors_are_refused(
    tmp_path, monkeypatch, settings, message
):
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", VECTORS)
    (tmp_path / "v.csv").write_text("label\n" + "a\nb\n" * 90 + '""\n' * 60)
    with pytest.raises(ConfigError, match=message):
        uno.discover(**FEW | {"num_novel": 2, "output": "run"} | settings)
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_a_model_of_vectors_is_refused(run):
    model, vectors, _ = run
    for images, message in (
        (vectors[:, :5], "of 16 numbers, the data has vectors of 5 numbers"),
        (["a.jpg"], r"must be numbers \(N, D\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.predict(images)


def test_a_batch_is_checked_with_the_rows_that_can_be_used(tmp_path):
    """A batch of 496 of 497 usable rows divides among two workers; of all 500 rows it
    would have an odd number of labeled ones.
    """
    rows = np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)
    rows[-3:] = np.nan
    labels = [i % 2 if i < 100 else None for i in range(500)]
    settings = {"data.num_novel": 2, "method": "uno", "train.batch_size": 496}
    settings |= {"compute.num_workers": 2, "data.max_bad_fraction": 0.1}
    given_vectors(rows, labels).store(f"{tmp_path}/v.parquet")
    config = override(
        Config(), settings | {"data.source": f"vectors:{tmp_path}/v.parquet"}
    )
    task = make_task(read_rows(config.data), config.data)
    check_data(config, task, batch_is_derived=True)
