"""Sweeps of images that are not loaded: each trial reads those of its folds."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tune.tiny import claimed, run_tiny, tiny_data, tiny_options
from tests.uno.data.builders import encoded
from tune import AGREEMENT, FOLDS, driver, records
from tune.driver import load_data, run_sweep
from tune.score import SweepData, Unread
from uno.data.files import Storage
from uno.data.unreadable import BAD_SAMPLES
from uno.errors import ConfigError
from uno.session.data import read_task


def streamed(options) -> SweepData:
    """What trials see of a streamed set."""
    data = load_data(options, read_task(options.config.data), None)
    assert isinstance(data.images, Unread)
    return data


def options_of(folder: Path, *words: str):
    return tiny_options(folder, "--data.loading", "streaming", *words)


@pytest.mark.parametrize(
    "score", [FOLDS, pytest.param(AGREEMENT, marks=pytest.mark.slow)]
)
def test_streamed_rows_give_the_numbers_of_rows_in_memory(tmp_path, score):
    """To the bit, where each image is read by itself. Kills: rows or classes of another
    fold, a score of other rows, an epoch that begins at another step.
    """
    options = options_of(tmp_path, "--score", score, "--folds", "2")
    found = []
    for data in (tiny_data(options.config), streamed(options)):
        with claimed(tmp_path / str(len(found))) as storage:
            found.append(run_tiny(options, data, storage))
    assert len(found[0]) == 2 and found[0] == found[1]


def parquet(folder: Path, broken: int = 0) -> Path:
    """200 digits in row groups of 50, the last ones ``broken``."""
    data = tiny_data(tiny_options(folder).config)
    rows = np.flatnonzero((data.labels >= 0) | data.unlabeled)
    images = [encoded(image.transpose(1, 2, 0)) for image in data.images[rows]]
    images[len(images) - broken :] = [b"no image"] * broken
    labels = [str(label) if label >= 0 else None for label in data.labels[rows]]
    table = pa.table({"image": pa.array(images, pa.binary()), "label": labels})
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "rows.parquet", row_group_size=50)
    return folder


def test_unreadable_images_are_listed_by_the_trial_and_not_scored(tmp_path):
    """Kills: a broken image that ends a trial or is scored, one list of all trials,
    any number of them.
    """
    source = parquet(tmp_path / "data", broken=1)
    words = f"--preset digits --data parquet:{source} --num-novel 5 --score agreement"
    words = [*words.split(), "--data.max-bad-fraction"]
    options = options_of(tmp_path / "s", *words, "0.02")
    with claimed(tmp_path / "a") as storage:
        assert len(run_tiny(options, streamed(options), storage)) == 2
        (line,) = storage.read(f"trials/0000/{BAD_SAMPLES}").splitlines()
        assert json.loads(line)["reason"]
    none = options_of(tmp_path / "s", *words, "0")
    refused = pytest.raises(ConfigError, match="unreadable")
    with claimed(tmp_path / "b") as storage, refused:
        run_tiny(none, streamed(none), storage)


@pytest.mark.release
@pytest.mark.ray
def test_trials_of_a_streamed_sweep_read_their_images(
    ray_cluster, tmp_path, monkeypatch
):
    """Kills: a sweep that decodes all images, trials that do not find their images."""
    monkeypatch.setattr(driver, "load_images", lambda *_: pytest.fail("decoded"))
    words = f"--preset digits --data parquet:{parquet(tmp_path / 'data')} --num-novel 5"
    words += " --trials 2 --folds 2 --scheduler none"
    run_sweep(options_of(tmp_path / "s", *words.split()))
    trials = records.read_trials(Storage(str(tmp_path / "s")))
    assert [trial.status for trial in trials] == ["finished"] * 2
    assert all(0 < trial.score <= 1 for trial in trials)
