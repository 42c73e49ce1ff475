"""``uno estimate-classes`` on a few digits: no hidden label matters, nor where the
tasks run.
"""

import json
import os
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch

from pipelines import cli, commands
from pipelines.options import parse
from pipelines.tasks import run_tasks
from uno.clustering import num_classes
from uno.config import override
from uno.data.columns import make_labels
from uno.data.files import Storage
from uno.data.sources import read_digits
from uno.data.splits import make_task
from uno.encoders.build import build_encoder
from uno.errors import ConfigError, Interrupted
from uno.results.estimate import Settings
from uno.session import backend
from uno.session.estimation import estimate_classes
from uno.session.run import Run

SETTINGS = Settings(num_splits=2, max_novel=3, num_restarts=2, num_roles=2)
FLAGS = [
    "--known-classes",
    "first:6",
    "--max-steps",
    "2",
    "--model.width",
    "4",
    "--device",
    "cpu",
    "--num-splits",
    "2",
    "--max-novel",
    "3",
]


def few_digits():
    """Every fourth."""
    rows = read_digits()
    return rows.take(np.arange(0, len(rows), 4))


def run(folder, rows=None, workers=0, **settings):
    words = [*FLAGS, "--num-novel", "1", "--workers", str(workers)]
    config = parse(words, commands.ESTIMATE).config
    task = make_task(rows or few_digits(), config.data)
    where = backend.choose_backend(config)
    opened = Run(config, Storage(str(folder)), where, opened=task)
    return where.estimate(opened, replace(SETTINGS, **settings))


def test_hidden_labels_do_not_matter(tmp_path):
    """Key and curves too. Kills: features, sampling, seeds or cache keys that depend
    on the truth.
    """
    rows = few_digits()
    hidden = np.flatnonzero([label in "6789" for label in rows.labels.to_pylist()])
    permuted = rows.labels.to_pylist()
    for i, j in zip(hidden, np.random.default_rng(0).permutation(hidden), strict=True):
        permuted[i] = rows.labels.to_pylist()[j]
    assert permuted != rows.labels.to_pylist()
    first = run(tmp_path / "a", rows)
    assert run(tmp_path / "b", replace(rows, labels=make_labels(permuted))) == first
    assert 1 <= first.low <= first.num_novel <= first.high <= 3
    assert all(np.isfinite(first.curves[name]).all() for name in first.curves)


@pytest.mark.release
def test_pretraining_is_kept_and_shared(tmp_path, monkeypatch):
    """Other settings of the clustering, and a restart, train nothing again. Kills:
    keys with too much.
    """
    first = run(tmp_path)
    monkeypatch.setattr(
        "uno.runs.run.run_phase", lambda *_: pytest.fail("pretrained again")
    )
    (tmp_path / "estimate.json").unlink()
    assert run(tmp_path) == first
    other = run(tmp_path, max_novel=2)
    assert other.curves["f1"] == first.curves["f1"][:3] and other.key != first.key


@pytest.mark.slow
def test_command(tmp_path, capsys, monkeypatch):
    """Table, warning, JSON; the default output stands beside the run directory."""
    monkeypatch.chdir(tmp_path)
    assert cli.run_guarded(commands.estimate, [*FLAGS, "--data.limit", "400"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(
        (tmp_path / "runs/digits-seed0-estimate/estimate.json").read_text()
    )
    assert (
        f"new classes: {found['num_novel']} (interval {found['low']} to"
        f" {found['high']})" in shown
    )
    assert (
        "extra classes can be merged later" in shown
        and f"--num-novel {found['suggested']}" in shown
    )
    assert "  <- estimate" in shown and "     F1" in shown
    assert (
        cli.run_guarded(commands.estimate, [*FLAGS, "--dry-run", "--output", "other"])
        == 0
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--known-classes", "first:3"], "at least 4 known classes"),
        (["--max-novel", "0"], "--max-novel: Input should be greater than 0"),
        (["--num-splits", "two"], "--num-splits: Input should be a valid integer"),
    ],
)
def test_refusals_are_one_line(tmp_path, capsys, argv, message):
    code = cli.run_guarded(
        commands.estimate, [*argv, "--output", str(tmp_path / "x"), "--device", "cpu"]
    )
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize("kind", ["ncd", "gcd"])
def test_features_of_a_frozen_encoder_are_clustered_as_they_are(
    tmp_path, monkeypatch, capsys, kind
):
    """Ten blobs, of which two are novel, in the cache's place: nothing is pretrained,
    the evaluation view alone counts, and a finished estimate is returned again.
    """
    words = [
        "--known-classes",
        "first:8",
        "--device",
        "cpu",
        "--model.finetune",
        "none",
        "--data.limit",
    ]
    words += [
        "240",
        "--data.setting",
        kind,
        "--output",
        str(tmp_path),
        "--max-novel",
        "5",
    ]
    words += ["--data.unlabeled-known-fraction", "0.5"] if kind == "gcd" else []
    options = parse(words, commands.ESTIMATE)

    def features(config, task, storage, show, compute):
        truth, generator = task.eval_labels, torch.Generator().manual_seed(0)
        plain = (
            torch.eye(40)[truth] + torch.randn(len(truth), 40, generator=generator) / 12
        )
        return torch.stack([plain, *torch.randn(2, *plain.shape)], dim=1), [None] * len(
            truth
        )

    monkeypatch.setattr(backend, "load_features", features)
    monkeypatch.setattr("uno.runs.run.run_phase", lambda *_: pytest.fail("pretrained"))
    settings = Settings(max_novel=5)
    found = estimate_classes(options.config, (), settings)
    assert found.low <= 2 <= found.high
    assert found.suggested == found.num_novel
    assert len(found.ks) == len(found.curves["probability"]) <= 5
    shown = capsys.readouterr().out
    assert f"estimated new classes: {found.num_novel} (interval" in shown
    monkeypatch.setattr(num_classes, "estimate_num_classes", None)
    assert estimate_classes(options.config, (), settings) == found


def test_weights_of_a_library_are_kept_beside_the_estimate(tmp_path, monkeypatch):
    """Kills: weights that are fetched again, features of an encoder at random; an
    encoder nobody trained.
    """
    words = [
        *FLAGS,
        "--model.finetune",
        "none",
        "--data.limit",
        "120",
        "--compute.cache",
        str(tmp_path),
    ]
    config = parse([*words, "--num-novel", "1"], commands.ESTIMATE).config
    data = safetensors.torch.save(build_encoder(config.model).state_dict())
    (tmp_path / "theirs.safetensors").write_bytes(data)
    monkeypatch.setattr(backend, "fetch_pretrained", lambda name: data)
    found = []
    for i, weights in enumerate(
        ("pretrained", "pretrained", str(tmp_path / "theirs.safetensors"))
    ):
        folder = str(tmp_path / str(i // 2))
        given = {"model.weights": weights, "output": folder, "data.num_novel": None}
        found.append(
            estimate_classes(
                override(config, given),
                (),
                replace(SETTINGS, num_splits=1, max_novel=1),
            )
        )
        monkeypatch.setattr(
            backend, "fetch_pretrained", lambda name: pytest.fail("fetched again")
        )
    assert found[0] == found[1] and found[0].curves == found[2].curves
    with pytest.raises(ConfigError, match="needs --weights"):
        estimate_classes(
            override(config, {"output": str(tmp_path / "x")}), (), SETTINGS
        )


def _double(shared, item):
    if item == "fail":
        raise ConfigError("as raised there")
    if item == "die":
        os._exit(1)
    time.sleep(0.05)
    return shared + 2 * item


@pytest.mark.ray
def test_ray_gives_the_same_estimate(tmp_path, ray_cluster):
    """Kills: results in order of completion, other threads or seeds in workers,
    errors wrapped by Ray.
    """
    assert run(tmp_path / "here") == run(tmp_path / "ray", workers=2)
    tasks = partial(run_tasks, ray_cluster, 2, {"num_cpus": 1})
    assert dict(tasks(_double, (100,), range(7))) == {i: 100 + 2 * i for i in range(7)}
    with pytest.raises(ConfigError, match=r"^as raised there$"):
        list(tasks(_double, (0,), ["fail"]))
    with pytest.raises(Interrupted, match="tasks keep dying"):
        list(tasks(_double, (0,), ["die"]))
