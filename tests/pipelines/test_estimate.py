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

from pipelines import cli, commands
from pipelines.options import parse
from pipelines.tasks import run_tasks
from uno.data.columns import make_labels
from uno.data.files import Storage
from uno.data.sources import read_digits
from uno.data.splits import make_task
from uno.errors import ConfigError, Interrupted
from uno.results.estimate import Settings
from uno.session import backend
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


def _double(shared, item):
    if item == "fail":
        raise ConfigError("as raised there")
    if item == "die":
        os._exit(1)
    time.sleep(0.05)
    return shared + 2 * item


@pytest.mark.ray
@pytest.mark.slow
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
