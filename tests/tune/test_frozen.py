"""Sweeps on the features of a frozen encoder: computed once, hidden classes as ever,
nothing pretrained.
"""

import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines import cli
from pipelines.options import parse
from tests.tune.tiny import claimed, folds_of, frozen_options, run_tiny, tiny_options
from tests.uno.data.builders import failure
from tune import AGREEMENT, driver, records, spaces
from tune.driver import HERE, load_data, open_sweep, run_sweep, sweep_options
from tune.sweep import TUNE
from tune.trial import SweepOptions
from uno.config import override
from uno.data import features
from uno.data.embeddings import given_vectors
from uno.data.files import Storage
from uno.encoders.weights import PRETRAINED
from uno.errors import Interrupted
from uno.session import resources
from uno.session.data import compute_local, read_task
from uno.session.prepare import check_data
from uno.session.resources import IMAGE_SHARE

ROWS = [*range(400)]  # half of the training and half of the test


@pytest.fixture
def computed(monkeypatch):
    """Numbers of the rows that are encoded, not read."""
    numbers, encode = [], features.encode_chunk

    def counted(job, encoder, rows):
        numbers.extend(rows.tolist())
        return encode(job, encoder, rows)

    monkeypatch.setattr(features, "encode_chunk", counted)
    return numbers


def vector_options(folder: Path, *more: str) -> SweepOptions:
    """Options of a sweep in ``folder``/s on 240 vectors, of four known and two novel
    classes.
    """
    labels, generator = np.arange(240) % 6, np.random.default_rng(0)
    values = 4 * generator.normal(size=(6, 16))[labels] + generator.normal(
        size=(240, 16)
    )
    given_vectors(values, np.where(labels < 4, labels, -1)).store(f"{folder}/v.parquet")
    words = f"--data vectors:{folder}/v.parquet --output {folder}/s --num-novel 2"
    words += " --folds 1 --batch-size 64 --compute.threads 1"
    return sweep_options(parse([*words.split(), *more], TUNE))


def load(options, own_weights=None):
    config = override(options.config, HERE)
    task = read_task(config.data)
    check_data(config, task)
    return load_data(options, task, own_weights)


def test_trials_and_later_sweeps_share_features_that_are_computed_once(
    tmp_path, computed
):
    """Kills: features for each trial, fold or sweep; a fold that trains on the
    evaluation view, or is scored on another; a pretraining of an encoder that is
    frozen.
    """
    options = frozen_options(tmp_path, "--folds", "1", "--discover.epochs", "1")
    data = load(options)
    assert sorted(computed) == ROWS
    assert data.images.shape[1] == 1 + 3 and data.images.dtype == np.float32
    with claimed(tmp_path / "sweep") as storage:
        lines = run_tiny(options, data, storage, {"objective.epsilon": 0.1})
        assert [0 < line["score"] <= 1 for line in lines] == [True, True]
        assert not storage.exists("pretrain")
    words = ("--seed", "7", "--score", AGREEMENT, "--model.num-heads", "2")
    later = load(frozen_options(tmp_path, *words))
    assert sorted(computed) == ROWS and np.array_equal(later.images, data.images)
    for fold in folds_of(data, options.config):
        rows = fold.scored.index.numpy()
        np.testing.assert_equal(fold.scored.images[rows].numpy(), data.images[rows, 0])
        assert fold.train.unlabeled_images.shape[1:] == data.images.shape[1:]


@pytest.mark.slow
def test_weights_of_a_library_are_those_of_the_sweep(tmp_path, monkeypatch, computed):
    """Kills: an encoder at random in the place of weights that trials find later; a
    file that stays.
    """
    options = frozen_options(tmp_path)
    own_weights = (tmp_path / "encoder.safetensors").read_bytes()
    expected = load(options)
    config = override(options.config, {"model.weights": PRETRAINED})
    pretrained = options._replace(config=config)
    assert np.array_equal(load(pretrained, own_weights).images, expected.images)
    shutil.rmtree(tmp_path / "cache")
    assert np.array_equal(load(pretrained, own_weights).images, expected.images)
    assert sorted(computed) == sorted(2 * ROWS)


def test_the_named_space_leaves_out_what_would_change_the_features(tmp_path):
    """Kills: a trial that trains on the features of other views."""
    frozen, trained = (
        {domain.key for domain in spaces.load_space("full", make(tmp_path).config)}
        for make in (frozen_options, tiny_options)
    )
    assert trained - frozen == {"augment.large.jitter"}


@pytest.mark.parametrize(
    ("key", "choices", "allowed"),
    [
        ("augment.large.jitter", "[0.0, 0.5]", False),
        ("augment.weak", "[false, true]", False),
        ("model.width", "[4, 8]", False),
        ("model.finetune", "[none, full]", False),
        ("model.encoder", "[resnet_small, resnet18]", False),
        ("augment.large.num_views", "[2, 3]", True),
        ("model.hidden_dim", "[8, 16]", True),
    ],
)
def test_what_would_change_the_features_is_not_searched(
    tmp_path, key, choices, allowed
):
    """Kills: a trial that trains on the features of other views, or on those of
    another encoder.
    """
    config, path = frozen_options(tmp_path).config, tmp_path / "mine.yaml"
    path.write_text(f"{key}: {{choices: {choices}}}\n")
    said = failure(spaces.load_space, str(path), config, may_pass=allowed) or "allowed"
    start = f"{key} cannot be searched with model.finetune none"
    assert said.startswith("allowed" if allowed else start)
    # a trained encoder allows all of them
    assert spaces.load_space(str(path), override(config, {"model.finetune": "full"}))


@pytest.mark.parametrize(
    ("make", "words", "says"),
    [
        (frozen_options, "--weights None", "finetune none needs pretrained weights"),
        (
            frozen_options,
            "--weights /no/such/run",
            "may be trained on the classes that",
        ),
        (vector_options, "--method clustering", "method clustering trains nothing, so"),
        (
            vector_options,
            "--method pim",
            "no setting can be searched; use --method uno",
        ),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    tmp_path, monkeypatch, make, words, says
):
    monkeypatch.setattr(driver, "_run_missing", lambda *args: pytest.fail("started"))
    assert says in failure(run_sweep, make(tmp_path, *words.split()))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("make", "row_bytes", "says"),
    [
        (tiny_options, 3 * 8 * 8, "decoded"),
        (frozen_options, 4 * (1 + 3) * 16, "of features"),
    ],
)
def test_what_does_not_fit_is_streamed(
    tmp_path, monkeypatch, capsys, make, row_bytes, says
):
    """Kills: a sweep of ImageNet that decodes until the machine dies, a copy that is
    forgotten, a choice of the user's that is overruled, a continuation that chooses
    anew.
    """
    monkeypatch.setattr(driver, "check_memory", lambda *_: None)
    needed = 2 * 400 * row_bytes / IMAGE_SHARE  # here, and in Ray's store
    for told, free, loading in (
        ("auto", 1.5 * needed, "memory"),
        ("auto", 0.5 * needed, "streaming"),
        ("memory", 0.5 * needed, "memory"),
        ("streaming", 10**12, "streaming"),
    ):
        monkeypatch.setattr(resources, "free_host_bytes", lambda free=free: int(free))
        found, _ = driver.open_sweep_data(make(tmp_path, "--data.loading", told))
        assert found.config.data.loading == loading
        printed = capsys.readouterr().out
        assert f"memory: {resources.HOW[loading]}" in printed and says in printed
    open_sweep(found, Storage(str(found.config.output)), "0" * 64, 2)
    assert driver.open_sweep_data(make(tmp_path))[0].config.data.loading == "streaming"


def test_trials_share_the_vectors_alone(tmp_path):
    """Kills: views of all rows that are computed before trials start."""
    options, _ = driver.open_sweep_data(
        vector_options(tmp_path, "--discover.epochs", "2")
    )
    data = load(options)
    assert data.images.shape[1:] == (1, 16)


def test_the_workers_of_a_cluster_compute_the_features(tmp_path, monkeypatch):
    """The machine of the command may be a head without a GPU."""
    asked = []

    def compute_on_ray(ray, job, encoder, rows):
        asked.append(job.config.compute.num_workers)
        return compute_local(job, encoder, rows)

    cluster = Mock(cluster_resources=lambda: {"CPU": 3.0})
    monkeypatch.setattr(driver, "compute_on_ray", compute_on_ray)
    monkeypatch.setattr(driver.ray_env, "cluster_address", lambda: "head:6379")
    monkeypatch.setattr(driver.ray_env, "connect", lambda: nullcontext(cluster))
    load(frozen_options(tmp_path, "--folds", "2"))
    assert asked == [3]


def test_trials_find_weights_that_are_given_by_a_relative_path(tmp_path, monkeypatch):
    """They run in other directories."""
    run_missing = Mock(side_effect=Interrupted)
    monkeypatch.setattr(driver, "_run_missing", run_missing)
    options = frozen_options(tmp_path, "--weights", "encoder.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted):
        run_sweep(options)
    found = run_missing.call_args.args[0].config.model.weights
    assert found == str(tmp_path / "encoder.safetensors")


@pytest.mark.release
@pytest.mark.ray
def test_a_sweep_on_vectors(ray_cluster, tmp_path, capsys):
    """Of UNO, whose best run is trained by ``uno discover``. Kills: a best.yaml that
    leads to another method, a method that the user is not shown.
    """
    options = vector_options(
        tmp_path, "--trials", "2", "--max-steps", "3", "--scheduler", "none"
    )
    run_sweep(options)
    assert "method: uno; uno discover takes clustering" in capsys.readouterr().out
    trials = records.read_trials(Storage(str(tmp_path / "s")))
    assert [trial.status for trial in trials] == ["finished"] * 2
    best, run = f"{tmp_path}/s/best.yaml", tmp_path / "run"
    assert cli.main(["discover", "--config", best, "--output", str(run)]) == 0
    metrics = (run / "metrics.json").read_text()
    assert "trust/score" in metrics and "trust/clustering/classes" not in metrics
    assert pq.read_table(run / "predictions").num_rows == 240
