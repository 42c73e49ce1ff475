"""Runs that train heads on cached features of a frozen encoder, from the command to
what they leave.
"""

import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from pipelines import cli
from pipelines.features import Featurizer, decode_block, make_block, unpack_chunk
from tests.pipelines.small import (
    SMALL,
    lines_of,
    refused,
    signal_at,
)
from tests.uno.small_run import assert_same, frozen_encoder, small_config
from uno.data import features as cached
from uno.data.features import compute_local, feature_job
from uno.data.files import Storage
from uno.data.memory import MemoryBatches
from uno.data.sources import read_digits
from uno.data.splits import make_task
from uno.encoders.build import build_encoder
from uno.errors import ConfigError
from uno.runs import DISCOVER
from uno.runs.checkpoint import checkpoint_steps, load_newest

FROZEN = [
    *["discover", *SMALL, "--preset", "digits", "--model.finetune", "none"],
    *["--augment.small.num-views", "0", "--augment.num-cached-views", "3"],
]
HEADS = [*FROZEN, "--model.prototype_init", "kmeans", "--discover.epochs", "2"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A file of an encoder that has learned nothing, with running statistics of its
    own.
    """
    path = tmp_path_factory.mktemp("weights") / "encoder.safetensors"
    safetensors.torch.save_file(frozen_encoder(small_config()).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, weights) -> Path:
    """A finished run of 200 rows of the digits, beside its cache."""
    run = tmp_path_factory.mktemp("heads") / "run"
    argv = [*HEADS, "--weights", str(weights), "--output", str(run)]
    assert cli.main([*argv, "--compute.cache", str(run.parent / "cache")]) == 0
    return run


def test_clustering_trains_nothing_and_says_what_to_expect(
    finished, weights, tmp_path, capsys
):
    """Kills: a step that is taken, a dry run that takes a step."""
    argv = [*FROZEN, "--method", "clustering", "--discover.epochs", "0"]
    argv += ["--weights", str(weights), "--output", str(tmp_path / "run")]
    argv += ["--compute.cache", str(finished.parent / "cache")]
    # features that are still to come
    few = ["--compute.cache", str(tmp_path / "empty")]
    capsys.readouterr()
    assert cli.main([*argv, *few, "--dry-run"]) == 0
    assert [*tmp_path.iterdir()] == []
    planned = capsys.readouterr().out
    assert planned.endswith("dry run: nothing was trained, and nothing was kept\n")
    assert "epoch" not in planned
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "expected accuracy on " in said and ", if there are 5 new classes" in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Expected accuracy on " in page and "resnet_small, 8 px, 1 head<" in page
    assert "Heads and training" not in page and ">avg<" not in page
    assert checkpoint_steps(Storage(str(tmp_path / "run")), DISCOVER) == [0]
    assert not (tmp_path / "run/checkpoints/pretrain").exists()


@pytest.fixture
def nothing_computed(monkeypatch):
    """Computing a feature fails the test."""
    monkeypatch.setattr(
        cached, "encode_chunk", lambda *_, **__: pytest.fail("features are there")
    )


def assert_encoder_is_kept(run: Path, weights: Path) -> None:
    """The model has the given encoder, bit for bit, and predicts known classes."""
    given = safetensors.torch.load_file(weights)
    assert_same(safetensors.torch.load_file(run / "model/encoder.safetensors"), given)
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["train/known/task_aware/acc/avg"] > 0.3


def test_a_run_on_features_leaves_what_every_run_leaves(finished, weights):
    """Kills: an encoder that is trained or stored otherwise, statistics that move, a
    phase of pretraining.
    """
    assert_encoder_is_kept(finished, weights)
    assert {line["phase"] for line in lines_of(finished)} == {"discover"}
    assert (finished / "report.html").exists()


def test_predictions_equal_those_of_the_encoder(finished, tmp_path):
    """The run predicts from cached features, predict from pixels. Kills: features of
    a random view.
    """
    argv = ["predict", str(finished), "--data", "digits", "--compute.threads", "1"]
    assert cli.main([*argv, "--output", str(tmp_path)]) == 0
    ours, again = (
        pq.read_table(run / "predictions").to_pandas().set_index("id")
        for run in (finished, tmp_path)
    )
    again = again.loc[ours.index]
    assert len(ours) == 400
    assert again.pop("label").isna().all()  # only the run knows its labels
    pd.testing.assert_frame_equal(again, ours[again.columns], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_evaluate_and_another_seed_compute_no_feature(
    finished, weights, tmp_path, monkeypatch, nothing_computed, capsys
):
    """They find the cache where the run was told, and where the variable says.
    Kills: a key with the seed.
    """
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    before = (run / "metrics.json").read_bytes()
    (run / "metrics.json").write_text("{}")
    assert cli.main(["evaluate", str(run)]) == 0
    assert (run / "metrics.json").read_bytes() == before
    capsys.readouterr()
    monkeypatch.setenv("UNO_CACHE", str(finished.parent / "cache"))
    argv = [*HEADS, "--weights", str(weights), "--seed", "1"]
    assert cli.main([*argv, "--output", str(tmp_path / "other")]) == 0
    assert "features:" not in capsys.readouterr().out
    assert lines_of(tmp_path / "other") != lines_of(finished)


@pytest.mark.slow
def test_a_stopped_run_ends_as_the_undisturbed_one(
    finished, weights, tmp_path, monkeypatch, nothing_computed
):
    """At step 7 of 12, after the checkpoint of step 6."""
    argv = [*HEADS, "--weights", str(weights), "--output", str(tmp_path / "run")]
    argv += ["--compute.cache", str(finished.parent / "cache")]
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBatches, "__call__", MemoryBatches.__call__)
        signal_at(7, signal.SIGTERM)
        assert cli.main(argv) == 75
    assert cli.main(argv) == 0
    assert lines_of(tmp_path / "run") == lines_of(finished)
    states = (
        load_newest(Storage(str(run)), DISCOVER) for run in (tmp_path / "run", finished)
    )
    assert_same(*(state.tensors for state in states))


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("UNO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_what_exceeds_the_memory_is_encoded_in_every_epoch(
    weights, tmp_path, empty_cache
):
    """Streaming: no cache, and an encoder that stays as it is, statistics too."""
    argv = [*HEADS, "--weights", str(weights), "--data.loading", "streaming"]
    assert cli.main([*argv, "--output", str(tmp_path / "run")]) == 0
    assert_encoder_is_kept(tmp_path / "run", weights)
    assert not empty_cache.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--weights", "None"], "model.finetune none needs pretrained weights"),
        (
            ["--pretext.epochs", "1"],
            "pretext.epochs must be 0 with model.finetune none",
        ),
        (
            [
                "--method",
                "dtc",
                "--model.prototype-init=random",
                "--data.loading",
                "streaming",
            ],
            "loading memory",
        ),
        (["--augment.small.num-views", "1"], "augment.small.num_views must be 0"),
        (
            ["--augment.num-cached-views", "2", "--augment.large.num-views", "3"],
            "num_cached_views must be 0 or",
        ),
    ],
)
def test_what_means_nothing_with_frozen_features_is_one_line(
    weights, tmp_path, capsys, words, says
):
    run = tmp_path / "run"
    assert says in refused(
        capsys, 2, *HEADS, "--weights", weights, "--output", run, *words
    )
    assert not run.exists()


def test_what_ray_does_with_chunks_gives_the_same_features(tmp_path, monkeypatch):
    """The rows do not follow each other, one image cannot be read, and numbers that are
    not finite are an error.
    """
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda given: given))
    monkeypatch.setattr("pipelines.features.threads_of_actor", lambda *_: 2)
    monkeypatch.setattr(cached, "CHUNK_ROWS", 32)
    config = small_config(
        model__finetune="none", augment__small__num_views=0, augment__num_cached_views=2
    )
    task = make_task(read_digits(), config.data.model_copy(update={"limit": 40}))
    images = [task.rows.images[row] for row in range(80)]
    images[33] = b"no image"
    task = replace(task, rows=replace(task.rows, images=images))
    encoder = build_encoder(config.model).eval()
    job, rows = feature_job(config, task, encoder), np.delete(np.arange(80), [3, 40])

    def encoded_by_an_actor():
        weights = safetensors.torch.save(encoder.state_dict())
        actor = Featurizer(config, {"CPU": 1.0}, weights, None)
        chunks = decode_block(make_block(job, rows, 0, 96), config, None)
        return actor(pa.concat_tables(chunks))  # Ray joins them

    ours, table = list(compute_local(job, encoder, rows, 2)), encoded_by_an_actor()
    for number, chunk in enumerate(ours):
        theirs = unpack_chunk(job, chunk.rows, table.slice(32 * number, 32))
        assert torch.equal(theirs.features, chunk.features)
        assert theirs.reasons == chunk.reasons
    assert sum(reason is not None for chunk in ours for reason in chunk.reasons) == 1
    encoder.conv1.weight.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="non-finite"):
        unpack_chunk(job, ours[0].rows, encoded_by_an_actor().slice(0, 32))


def stored(folder: Path) -> list[dict[str, Any]]:
    """The views of each row in a folder of features."""
    table = pq.read_table(sorted(folder.glob("**/*.parquet")))
    rows = table.select(["id", "view", "embedding"])
    return rows.sort_by([("id", "ascending"), ("view", "ascending")]).to_pylist()


@pytest.mark.ray
@pytest.mark.release
def test_two_ray_workers_compute_the_same_features(
    ray_cluster, finished, weights, tmp_path, empty_cache, capfd
):
    """Bit for bit, the evaluation view first. An encoder's fault is one line. Kills:
    features in the order they come back, a batch that depends on the block, Ray's
    traceback for an error of ours.
    """
    broken = safetensors.torch.load_file(weights)
    broken["conv1.weight"][0] = float("nan")
    safetensors.torch.save_file(broken, tmp_path / "nan.safetensors")
    argv = [*HEADS, "--workers", "2", "--output", str(tmp_path / "run"), "--weights"]
    assert cli.main([*argv, str(tmp_path / "nan.safetensors"), "--overwrite"]) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    last = "uno: error: model.encoder resnet_small returns non-finite numbers"
    assert err.splitlines()[-1] == last
    shutil.rmtree(empty_cache)
    assert cli.main([*argv, str(weights), "--overwrite"]) == 0
    (ours,) = empty_cache.glob("features/*")
    here = finished.parent / "cache" / "features" / ours.name
    assert stored(ours) == stored(here)
