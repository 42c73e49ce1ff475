"""A run on vectors from the array to the report, and what refuses them."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import uno
from uno.errors import ConfigError
from uno.results.export import export
from uno.session.api import store_embeddings
from uno.session.configure import configure, from_keywords
from uno.session.predict import predict

FEW = {
    "compute.threads": 1,
    "discover.epochs": 20,
    "train.batch_size": 64,
    "data.max_bad_fraction": 0.05,
    "quiet": True,
}


def drawn(num: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """``num`` rows of each of six Gaussian classes far apart, float32 (6 num, 16),
    and their classes.
    """
    generator, truth = np.random.default_rng(0), np.repeat(np.arange(6), num)
    centers = 4 * generator.normal(size=(6, 16))
    return (centers[truth] + generator.normal(size=(6 * num, 16))).astype(
        np.float32
    ), truth


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model of six classes, of which four are known, two rows are bad; its vectors
    and their classes.
    """
    vectors, truth = drawn()
    vectors[3], vectors[5] = np.nan, 0
    labels = np.where(truth < 4, truth, -1)
    output = str(tmp_path_factory.mktemp("vectors") / "run")
    model = uno.discover(
        embeddings=vectors,
        labels=labels,
        num_novel=2,
        output=output,
        report=True,
        **FEW,
    )
    return model, vectors, truth


def test_classes_are_found_and_predicted(run):
    """Kills: vectors that lose their order or label on the way, bad ones that get a
    class.
    """
    model, vectors, truth = run
    found = model.predict(vectors)
    assert (
        found.reason[3] == "numbers that are not finite"
        and found.reason[5] == "a vector of zeros"
    )
    ok = found.class_index >= 0
    assert (
        ok.sum() == 238
        and (found.class_index[truth < 4] == truth[truth < 4])[ok[truth < 4]].all()
    )
    novel = [set(found.class_index[truth == c].tolist()) for c in (4, 5)]
    assert novel in ([{4}, {5}], [{5}, {4}])
    one = model.predict(torch.from_numpy(vectors[:1]).double())
    assert (
        one[0].class_name == "0"
        and one.embedding.shape == (1, 16)
        and "vectors of 16" in repr(model)
    )
    assert "uno" in model._repr_html_()


def test_the_run_lists_bad_rows_and_shows_ids(run):
    """Kills: bad vectors that are not listed; a page that shows black squares where
    there are no pictures.
    """
    model, *_ = run
    with open(f"{model.run}/bad_samples.jsonl") as file:
        assert "row-3" in file.readline() and "row-5" in file.readline()
    with open(str(model.report)) as file:
        page = file.read()
    assert (
        "<bdi>row-17" in page
        and 'class="tiles-of texts"' in page
        and "<img src" not in page
    )
    table = pq.read_table(f"{model.run}/predictions").to_pylist()
    assert [row["id"] for row in table if row["status"] == "bad"] == ["row-3", "row-5"]


def test_the_same_call_goes_on_and_another_array_does_not(run):
    model, vectors, truth = run
    labels = np.where(truth < 4, truth, -1)
    again = uno.discover(
        embeddings=vectors, labels=labels, num_novel=2, output=model.run, **FEW
    )
    assert again.model_hash == model.model_hash
    with pytest.raises(ConfigError, match=r"data\.source"):
        uno.discover(
            embeddings=vectors + 1, labels=labels, num_novel=2, output=model.run, **FEW
        )


@pytest.mark.slow
def test_the_exported_program_takes_vectors(run):
    """Kills: a program that waits for images; an encoder that is nothing."""
    import io

    model, vectors, _ = run
    program = torch.export.load(io.BytesIO(export(model._classifier, "pt2"))).module()
    expected = model.predict(vectors[6:40]).probabilities
    assert np.allclose(
        program(torch.from_numpy(vectors[6:40])).numpy(), expected, atol=1e-5
    )
    with pytest.raises(ConfigError, match="no encoder"):
        export(model._classifier, "encoder")


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
    vectors, truth = drawn()
    labels = np.where(truth < 4, truth, -1)
    settings = FEW | {
        "discover.epochs": 1,
        "quiet": False,
        "output": str(tmp_path / "run"),
    }
    uno.discover(embeddings=change(vectors), labels=labels, num_novel=2, **settings)
    told = capsys.readouterr()
    assert f"warning: {says}" in told.out and told.out.index(says) < told.out.index(
        "predicting all images"
    )


def test_embeddings_keep_other_settings_of_the_data(tmp_path):
    vectors, truth = drawn()
    settings = {"data": {"limit": 9}, "num_novel": 2, "output": tmp_path / "run"}
    stored = from_keywords(store_embeddings(settings, vectors, truth, None))
    assert stored["data.limit"] == 9
    assert stored["data.source"].startswith(f"vectors:{tmp_path}/run-vectors-")


@pytest.mark.parametrize("value", [0.0, np.inf])
def test_nothing_but_unusable_vectors(tmp_path, value):
    """Kills: advice on the batch size where no row can be used."""
    vectors, truth = drawn()
    with pytest.raises(ConfigError, match="240 of 240 images are unreadable"):
        uno.discover(
            embeddings=np.full_like(vectors, value),
            labels=np.where(truth < 4, truth, -1),
            num_novel=2,
            output=str(tmp_path / "run"),
            quiet=True,
        )


def test_what_does_not_fit_is_refused(run, tmp_path):
    model, vectors, _ = run
    with pytest.raises(ConfigError, match="the data has only vectors"):
        predict(model.run, {"output": f"{tmp_path}/out"}, embedding=False, folders=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        ConfigError,
        match="takes vectors of 16 numbers, the data has vectors of 5 numbers",
    ):
        model.predict(vectors[:, :5])
    with pytest.raises(ConfigError, match=r"must be numbers \(N, D\)"):
        model.predict(["a.jpg"])
    with pytest.raises(ConfigError, match="either embeddings or"):
        uno.discover(embeddings=vectors, data="digits")
    with pytest.raises(ConfigError, match="go with embeddings"):
        uno.discover(labels=[1])
    for labels in (None, [None] * len(vectors)):
        with pytest.raises(ConfigError, match=r"no embedding has a label.*labels=y"):
            uno.discover(
                embeddings=vectors,
                labels=labels,
                num_novel=2,
                output=tmp_path / "unlabeled",
            )
    assert not list(tmp_path.glob("unlabeled*"))
    np.save(tmp_path / "v.npy", vectors)
    (tmp_path / "v.csv").write_text("label\n" + "a\nb\n" * 90 + '""\n' * 60)
    source = f"vectors:{tmp_path}/v.npy"
    with pytest.raises(
        ConfigError, match="takes images, the data has vectors of 16 numbers"
    ):
        encoder = {"preset": "scratch", "model.encoder": "resnet_small"}
        uno.discover(
            data=source, num_novel=2, output=f"{tmp_path}/run", **encoder, **FEW
        )
    with pytest.raises(ConfigError, match="takes vectors of"):
        uno.discover(
            data="digits",
            preset="vectors",
            known_classes="first:5",
            output=f"{tmp_path}/run",
            **FEW,
        )
    with pytest.raises(ConfigError, match="no encoder is there"):
        configure({"data.source": source, "model.finetune": "full"})
