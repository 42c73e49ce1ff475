"""Ray Data decodes what the local path decodes, in the same order, and carries no hidden label."""

from __future__ import annotations

import os
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines import datasets
from tests.pipelines.small import write_images
from uno.config import Config, override
from uno.data.decode import decode_many, readable
from uno.data.resident import assemble, eval_sets
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.presets import preset

pytestmark = pytest.mark.ray
SIZE = 8


def digits_task(limit=300):
    config = override(preset("digits"), {"data.limit": limit}).data
    return make_task(read_rows(config), config)


def folder_task(folder):
    """Images as relative paths, one of them no image."""
    write_images(folder / "images", {"cat": 12, "dog": 9, "emu": 10}, size=11)
    (folder / "images" / "dog" / "3.png").write_text("not an image")
    os.chdir(folder)
    config = override(Config(), {"data.source": "folder:images", "data.known_classes": "cat,dog"}).data
    return make_task(read_rows(config), config)


def bytes_task(folder):
    """The same images as bytes, one truncated and one empty."""
    task = folder_task(folder)
    images = [Path(task.rows.images[i]).read_bytes() for i in range(len(task.rows))]
    images[2], images[20] = images[2][:60], b""
    return replace(task, rows=replace(task.rows, images=images))


def arrays_task(folder):
    """Pixels of different sizes, with rows of every kind."""
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (6 + i % 5, 8, 3), dtype=np.uint8) for i in range(30)]
    labels = [["cat", "dog", None][i % 3] for i in range(30)]
    rows = Rows([f"row {i}" for i in range(30)], images, labels, np.full(30, "train"), "arrays")
    return make_task(rows, override(Config(), {"data.num_novel": 2}).data)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, ray_cluster):
    """Several tasks and several batches for each, so that order could go wrong."""
    monkeypatch.setattr(datasets, "ROWS_PER_TASK", 8)
    monkeypatch.setattr(datasets, "ROWS_PER_DECODE", 3)
    monkeypatch.setattr(datasets, "ROWS_PER_BATCH", 7)


@pytest.mark.parametrize("make", [folder_task, bytes_task, arrays_task, lambda _: digits_task()])
def test_ray_data_equals_the_local_path(ray_cluster, tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    task = make(tmp_path)
    images, reasons = decode_many(task.rows.images, SIZE)
    ok = readable(reasons)
    dataset = datasets.decode_task(ray_cluster, task, SIZE)
    assert datasets.reasons_of(dataset, len(task.rows)) == reasons

    train, stored = datasets.train_set(dataset, SIZE, len(task.known), task.num_novel)
    expected = assemble(task, images, ok)
    for name in ("labeled_images", "labels", "unlabeled_images"):
        assert torch.equal(getattr(train, name), getattr(expected, name)), name
    assert (train.num_known, train.num_novel) == (expected.num_known, expected.num_novel)

    sets = datasets.eval_sets(datasets.truth_of(ray_cluster, task), stored, torch.from_numpy(ok))
    for split, rows in eval_sets(task, images, ok).items():
        for name in ("images", "truth", "index"):
            assert torch.equal(getattr(sets[split], name), getattr(rows, name)), (split, name)


def test_training_workers_never_receive_hidden_labels(ray_cluster):
    """The data set of the workers is bit-identical whatever the hidden labels are."""
    task = digits_task()
    hidden = (task.labels < 0) & task.is_train
    assert hidden.sum() > 50 and (task.eval_labels[hidden] >= len(task.known)).all()
    shuffled = task.eval_labels.copy()
    shuffled[hidden] = np.random.default_rng(0).permutation(shuffled[hidden])
    tables = []
    for truth in (task.eval_labels, shuffled):
        dataset = datasets.decode_task(ray_cluster, replace(task, eval_labels=truth), SIZE)
        assert set(dataset.schema().names) == {"index", "label", "is_train", "image", "reason"}
        rows = sorted(dataset.take_all(), key=lambda row: row["index"])
        assert all(row["label"] == -1 for row in rows if hidden[row["index"]] or not row["is_train"])
        tables.append(rows)
    assert tables[0] == tables[1]


def test_a_jpeg_as_bytes_is_what_it_is_as_a_file(ray_cluster, tmp_path):
    """Kills: a detour that encodes or decodes twice."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    (tmp_path / "a.jpg").write_bytes(file.getvalue())
    images = [file.getvalue(), str(tmp_path / "a.jpg"), file.getvalue()]
    rows = Rows(["a", "b", "c"], images, ["x", "y", None], np.full(3, "train"), "three")
    task = make_task(rows, override(Config(), {"data.num_novel": 1}).data)
    train, stored = datasets.train_set(datasets.decode_task(ray_cluster, task, 16), 16, 2, 1)
    assert torch.equal(stored[0], stored[1]) and torch.equal(stored[0], stored[2])
    assert len(train.labels) == 2
