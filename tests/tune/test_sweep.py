"""Sweeps through Ray Tune: shared pretraining, failures, a killed driver, workers,
more trials than fit.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipelines import cli
from tests.pipelines.raylets import Command, head
from tests.pipelines.small import ray_process_killed, wait_for
from tests.tune.tiny import TINY, fake_sweep, folds_of, tiny_data, tiny_options
from tune import records
from tune.driver import run_sweep
from tune.trial import pretrain_path
from uno.config import override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.runs.journal import read_journal

pytestmark = pytest.mark.ray

SPACE = """\
objective.temperature: {choices: [0.1, 0.2, 1.0e-40]}
model.num_heads: {low: 2, high: 4, scale: int}
train.batch_size: {choices: [32, 5000]}
"""


def values(
    temperature: float = 0.1, heads: int = 2, batch_size: int = 32
) -> dict[str, float]:
    return {
        "objective.temperature": temperature,
        "model.num_heads": heads,
        "train.batch_size": batch_size,
    }


def planned(folder: Path, trials: list[dict[str, float]], *words: str):
    """Options of a sweep whose trials are already drawn, and its directory."""
    folder.mkdir(exist_ok=True)
    space, drawn = folder / "space.yaml", [{"overrides": t} for t in trials]
    space.write_text(SPACE)
    options = tiny_options(
        folder / "s", "--space", str(space), "--trials", str(len(trials)), *words
    )
    data, epochs = options.config.data, options.config.discover.epochs
    fingerprint = make_task(read_rows(data), data).rows.fingerprint
    return options, fake_sweep(folder / "s", options, drawn, epochs, fingerprint)


def statuses(storage: Storage) -> list[str | None]:
    return [trial.status for trial in records.read_trials(storage)]


def pretrainings(storage: Storage) -> dict[str, bytes]:
    paths = [f"pretrain/{name}" for name in storage.list("pretrain")]
    return {
        path: storage.read(f"{path}/done.json")
        for path in paths
        if storage.exists(f"{path}/done.json")
    }


def test_pretrainings_are_shared_and_failures_never_win(ray_cluster, tmp_path):
    """Five trials at once: one raises, one goes NaN, three share two pretrainings of
    each fold.
    """
    trials = [
        values(),
        values(0.2, 3),
        values(0.1, 4),
        values(1e-40),
        values(batch_size=5000),
    ]
    options, storage = planned(
        tmp_path, trials, "--scheduler", "none", "--data.loading", "memory"
    )
    run_sweep(options)
    found = records.read_trials(storage)
    assert statuses(storage) == ["finished"] * 3 + ["failed"] * 2
    assert "finite" in found[3].reason and "batch_size 5000" in found[4].reason
    assert records.best_trial(found).index in (0, 1, 2)

    folds = folds_of(tiny_data(options.config), options.config)
    # temperatures .1, .2 and 1e-40, 2 folds; trial 4 raised before it pretrained
    expected = {
        pretrain_path(override(options.config, overrides), fold.rows)
        for overrides in trials[:4]
        for fold in folds
    }
    assert len(expected) == 6 and pretrainings(storage).keys() == expected
    assert not storage.exists("ray")
    files = {name for name in storage.list("trials/0000") if name != "tensorboard"}
    assert all(name.endswith((".json", ".jsonl")) for name in files)
    assert {"best.yaml", "sweep.html", "sweep.jsonl"} <= set(storage.list())


@pytest.mark.slow
def test_a_trial_outlives_its_process(ray_cluster, tmp_path):
    """SIGKILL to the process of a trial once it has an epoch. Kills: a trial that is
    failed for good, one that begins anew.
    """
    words = ("--scheduler", "none", "--discover.epochs", "8")
    options, storage = planned(tmp_path, [values()], *words)
    epochs = "trials/0000/epochs.jsonl"
    with ray_process_killed("ray::ImplicitFunc", lambda: storage.exists(epochs)):
        run_sweep(options)
    assert statuses(storage) == ["finished"]
    lines = read_journal(storage, epochs)
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    first, second = read_journal(storage, "trials/0000/starts.jsonl")
    assert first["epochs"] == 0 < second["epochs"]


@pytest.mark.release
def test_more_trials_than_fit_and_stopping(ray_cluster, tmp_path):
    """Kills: a deadlock of trials that hold all CPUs, ASHA that stops nobody."""
    trials = [values(heads=2 + i % 3) for i in range(6)]
    words = ("--compute.cpus-per-worker", "2", "--discover.epochs", "3")
    options, storage = planned(tmp_path, trials, *words)
    run_sweep(options)
    assert set(statuses(storage)) <= {"finished", "stopped"}


@pytest.mark.slow
def test_the_same_command_finishes_a_killed_and_a_stopped_sweep(
    ray_cluster, tmp_path, capsys
):
    """SIGKILL to the driver once the first of two trials is done, then SIGTERM in the
    second trial: nothing finished is run again, and what was stopped has no result
    until it has one.
    """
    options = "--trials 2 --folds 1 --scheduler none --workers 1 --discover.epochs 60"
    words = ["tune", *TINY, *options.split(), "--output", str(tmp_path / "s")]
    storage, null = Storage(str(tmp_path / "s")), subprocess.DEVNULL
    driver = subprocess.Popen(
        [sys.executable, "-m", "pipelines", *words],
        stdout=null,
        stderr=null,
        start_new_session=True,
    )
    wait_for(
        lambda: storage.exists("trials/0000/result.json") or driver.poll() is not None
    )
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    assert not storage.exists("trials/0001/result.json")
    before, pretrained = storage.read("trials/0000/epochs.jsonl"), pretrainings(storage)
    # of a write that the kill cut off
    half = f"{records.trial_name(1)}/.trial.json.0123abcd"
    storage.write(half, b"{")

    def stop() -> None:
        # a process of the killed sweep may write until then
        wait_for(lambda: len(storage.list("ray")) == 2)
        begun = len(records.read_epochs(storage, 1))
        wait_for(lambda: len(records.read_epochs(storage, 1)) > begun)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert cli.main(words) == 75
    stopping.join()
    said = capsys.readouterr()
    printed = " ".join(said.out.split())
    assert "1 result already" in printed and "same command" in said.err
    assert not storage.exists("trials/0001/result.json")
    assert json.loads(storage.read("trials/0001/trial.json"))["overrides"]

    assert cli.main(words) == 0
    assert statuses(storage) == ["finished"] * 2
    assert storage.read("trials/0000/epochs.jsonl") == before
    assert pretrained.items() <= pretrainings(storage).items()
    assert not storage.exists(half)


@pytest.mark.release
def test_a_sweep_uses_a_node_that_joins_and_outlives_its_loss(tmp_path):
    """One CPU for a trial, then another one on a second node, whose raylet is killed
    while its trial trains, which then waits for the place of the first. Kills: a number
    of trials that is fixed at the start, a trial that ends with its node, or begins
    anew.
    """
    words = [
        *TINY,
        "--folds",
        "1",
        "--trials",
        "2",
        "--scheduler",
        "none",
        "--discover.epochs",
        "150",
    ]
    storage, epochs = Storage(str(tmp_path / "s")), "trials/0001/epochs.jsonl"
    with head(1) as raylets:
        sweep = Command(
            ["pipelines", "tune", *words, "--output", storage.root],
            raylets.env,
            tmp_path / "log",
        )
        wait_for(
            lambda: (
                sweep.says("1 trial at a time")
                and storage.exists("trials/0000/epochs.jsonl")
            )
        )
        (first,) = raylets.processes_of("ray::ImplicitFunc")
        os.kill(first, signal.SIGSTOP)  # it ends after the node that it does not need
        assert not storage.exists("trials/0000/result.json")
        raylets.join(1)
        wait_for(lambda: storage.exists(epochs))
        raylets.lose()
        before = storage.read(epochs)
        os.kill(first, signal.SIGCONT)
        assert sweep.end(500) == 0, sweep.lines
    assert statuses(storage) == ["finished"] * 2
    lines = storage.read(epochs)
    assert lines.startswith(before) and before.count(b"\n") < 150
    assert [json.loads(line)["epoch"] for line in lines.splitlines()] == list(
        range(1, 151)
    )


@pytest.mark.release
def test_a_sweep_by_optuna(ray_cluster, tmp_path):
    """Kills: values that Optuna draws twice."""
    words = "--search optuna --trials 4 --scheduler none --folds 1 --workers 1"
    run_sweep(tiny_options(tmp_path / "s", *words.split()))
    trials = records.read_trials(Storage(str(tmp_path / "s")))
    assert [trial.status for trial in trials] == ["finished"] * 4
    assert len({tuple(trial.overrides.values()) for trial in trials}) == 4
