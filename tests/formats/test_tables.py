"""Hugging Face's datasets, and tables of polars and pandas."""

import importlib
import json

import numpy as np
import pytest

import uno
from tests.uno.data.builders import write_images
from uno.config import DataConfig
from uno.data.sources import read_rows

VALUES = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
ROWS = {"train": [("a.png", "cat"), ("sub/b.png", "dog")], "test": [("c.png", "cat")]}


@pytest.fixture
def folder(tmp_path):
    """An imagefolder, with its metadata as CSV."""
    for split, rows in ROWS.items():
        write_images(tmp_path / "images" / split, [name for name, _ in rows])
        lines = ["file_name,label", *(",".join(row) for row in rows)]
        (tmp_path / "images" / split / "metadata.csv").write_text("\n".join(lines))
    return tmp_path / "images"


def load(folder, tmp_path):
    import datasets

    cache = str(tmp_path / "cache")
    return datasets.load_dataset("imagefolder", data_dir=str(folder), cache_dir=cache)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_an_imagefolder_has_the_labels_that_datasets_reads(folder, tmp_path, suffix):
    if suffix == "jsonl":
        for split, pairs in ROWS.items():
            (folder / split / "metadata.csv").unlink()
            lines = [json.dumps({"file_name": n, "label": c}) for n, c in pairs]
            (folder / split / "metadata.jsonl").write_text("\n".join(lines))
    rows = read_rows(DataConfig(source=str(folder)))
    ours = sorted(
        zip(rows.split.to_pylist(), rows.labels.to_pylist(), strict=True),
    )
    theirs = sorted(
        (split, label)
        for split, table in load(folder, tmp_path).items()
        for label in table["label"]
    )
    assert ours == theirs


def test_a_dataset_in_parquet_is_read(folder, tmp_path):
    import datasets

    table = load(folder, tmp_path)["train"]
    table = table.cast_column("label", datasets.ClassLabel(names=["cat", "dog"]))
    table.to_parquet(str(tmp_path / "train.parquet"))
    rows = read_rows(DataConfig(source=f"parquet:{tmp_path}/train.parquet"))
    assert rows.labels.to_pylist() == ["cat", "dog"]


@pytest.fixture(params=["polars", "pandas"])
def library(request):
    """A library of data frames."""
    return importlib.import_module(request.param)


def test_a_frame_of_embeddings_is_read_from_parquet(tmp_path, library):
    labels = ["a", None, "b", "b", None, "a"]
    frame = library.DataFrame({"embedding": VALUES.tolist(), "label": labels})
    write = getattr(frame, "write_parquet", None) or frame.to_parquet
    write(tmp_path / "v.parquet")
    rows = read_rows(DataConfig(source=f"vectors:{tmp_path}/v.parquet"))
    assert rows.labels.to_pylist() == labels
    assert np.array_equal(rows.images.values[:, 0], VALUES)


def test_the_estimator_takes_a_frame(library):
    generator = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), 30)
    values = generator.normal(size=(4, 8))[truth] * 5 + generator.normal(size=(120, 8))
    labels = np.where(truth < 2, truth, -1)
    expected = uno.NovelClassDiscovery(n_novel=2).fit(values, labels).labels_
    frame = library.DataFrame({f"f{i}": values[:, i] for i in range(8)})
    column = library.DataFrame({"embedding": values.tolist()})["embedding"]
    for features in (frame, column):
        model = uno.NovelClassDiscovery(n_novel=2).fit(features, labels)
        assert np.array_equal(model.labels_, expected)
        assert np.array_equal(model.predict(features[:9]), model.predict(values[:9]))
