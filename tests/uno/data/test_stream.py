"""Streaming batches are resident batches, from any step, whatever goes wrong with
single images.
"""

import json
from itertools import chain

import numpy as np
import pytest
import torch

from tests.uno.small_run import (
    HERE,
    StopAt,
    assert_same,
    copied_tensors,
    lines,
    small_config,
    small_sets,
)
from uno.config import DataConfig, override
from uno.data import stream as module
from uno.data.columns import make_ids, make_labels
from uno.data.files import Storage
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError, Interrupted
from uno.runs import run

from .builders import encoded, pixels
from .test_memory import same

CONFIG = small_config(
    train__batch_size=24, data__loading="streaming", compute__threads=2
)


def digits_task():
    return make_task(read_rows(CONFIG.data), CONFIG.data)


def stream(tmp_path, config=CONFIG, task=None):
    return module.streaming_set(config, task or digits_task(), Storage(str(tmp_path)))


def batches(train, config=CONFIG, phase=run.DISCOVER, rank=0, world_size=1, last=10):
    plan = run.plans(config, len(train.labels), train.num_unlabeled, world_size)[phase]
    return train.batches(config, plan, rank, world_size, last)


def pictures(num=40, broken=()):
    """A task of encoded images of different shapes, half of them labeled."""
    images = [
        b"not an image" if i in broken else encoded(pixels(i, 9 + i % 4, 12))
        for i in range(num)
    ]
    labels = [["cat", "dog"][i % 2] if i < num // 2 else None for i in range(num)]
    ids = make_ids(f"row {i}" for i in range(num))
    rows = Rows(ids, images, make_labels(labels), np.full(num, True), "pictures")
    return make_task(rows, DataConfig(num_novel=2))


@pytest.mark.parametrize("phase", [run.PRETRAIN, run.DISCOVER])
@pytest.mark.parametrize("world_size", [1, 3])
def test_streamed_digits_are_the_resident_batches(
    tmp_path, monkeypatch, phase, world_size
):
    """Kills: rows, labels or colors of another step or worker, a part's border that
    loses a row.
    """
    monkeypatch.setattr(module, "CHUNK_ROWS", 7)
    for rank in range(world_size):
        expected = batches(
            small_sets()[0], phase=phase, rank=rank, world_size=world_size
        )
        found = batches(stream(tmp_path), phase=phase, rank=rank, world_size=world_size)
        for step in (0, 1, 2, 6, 7, 3):
            assert same(found(step), expected(step)), step
        found.close()


def test_a_resumed_stream_learns_the_same(tmp_path):
    """Stopped in the middle of an epoch, weights and journal are those of an
    uninterrupted run.
    """
    config = override(CONFIG, {"compute.threads": 1})

    def train(name, worker):
        storage, data = Storage(str(tmp_path / name)), stream(tmp_path / name, config)
        state = run.run_phase(config, run.PRETRAIN, data, worker, storage)
        return copied_tensors(state), lines(storage)[-1]

    whole, last_line = train("whole", HERE)
    with pytest.raises(Interrupted, match="stopped at pretrain step 6"):
        train("parts", StopAt(6))
    resumed, last_line_of_resumed = train("parts", HERE)
    assert_same(resumed, whole)
    assert last_line_of_resumed == last_line


def test_bad_images_are_replaced_and_listed_once(tmp_path):
    """A batch without them is the same, and their places have images and labels."""
    config = override(CONFIG, {"train.batch_size": 12, "data.max_bad_fraction": 0.05})
    train = stream(tmp_path / "run", config, pictures(broken=(3, 30)))
    found = batches(train, config, last=12)
    clean = batches(stream(tmp_path / "other", config, pictures()), config, last=12)
    replaced = 0
    for step in range(12):
        expected, batch = clean(step), found(step)
        ok = ~np.isin(clean._job.rows(step), (3, 30))
        chosen = torch.from_numpy(module.replacement_rows(ok, 6))
        replaced += int((~ok).sum())
        assert torch.equal(batch.labels, expected.labels[chosen[:6]])
        for view, other in zip(batch.views, expected.views, strict=True):
            assert torch.equal(view[ok], other[ok])
            assert (view.flatten(1).std(dim=1) > 0.1).all()
    assert replaced >= 4
    train.sync()
    text = (tmp_path / "run" / "bad_samples.jsonl").read_text().splitlines()
    assert [json.loads(entry)["id"] for entry in text] == ["row 3", "row 30"]
    assert len(stream(tmp_path / "run", config, pictures()).source.bad) == 2


def test_too_many_bad_images_end_the_run(tmp_path):
    config = override(CONFIG, {"train.batch_size": 12})
    train = stream(tmp_path, config, pictures(broken=(1, 2, 3)))
    line = r"of 40 images are unreadable.*bad_samples.jsonl"
    with pytest.raises(ConfigError, match=line):
        run.run_phase(config, run.PRETRAIN, train, HERE, Storage(str(tmp_path)))


def test_stand_ins():
    """Kills: a labeled row that stands in for an unlabeled one, the previous row
    instead of the next.
    """
    ok = np.array([True, False, True, False, True, True, False])
    assert module.replacement_rows(ok, 4).tolist() == [0, 2, 2, 0, 4, 5, 4]
    assert module.replacement_rows(np.array([False, False, True]), 2) is None
    assert module.replacement_rows(np.ones(3, bool), 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_counts_every_row_once(tmp_path, world_size):
    """All workers together have the images and truth of the resident set."""
    expected = small_sets()[1]["test"]
    source = stream(tmp_path).source
    found = module.streaming_eval_sets(digits_task(), source)["test"]
    shares = [found.batches(7, rank, world_size) for rank in range(world_size)]
    images, truth = map(torch.cat, zip(*chain(*shares), strict=True))
    assert torch.equal(images, expected.images[expected.index])
    assert torch.equal(truth, expected.truth)
    chosen = found.where(found.truth >= 5)
    assert torch.equal(chosen.index, expected.index[expected.truth >= 5])


def test_evaluation_leaves_out_and_lists_unreadable_images(tmp_path):
    task = pictures(broken=(4,))
    source = stream(tmp_path, task=task).source
    rows = module.streaming_eval_sets(task, source)["train"]
    assert sum(len(truth) for _, truth in rows.batches(3)) == len(rows.truth) - 1 == 19
    assert source.bad.rows == [4]
