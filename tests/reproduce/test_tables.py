"""``uno reproduce``: its command line, what it runs and does not run again, and what
it says of failures.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pipelines import cli
from pipelines.options import parse
from reproduce import cells, experiments, tables
from reproduce.command import REPRODUCE, main
from tests.forked import forked
from tests.pipelines.small import SMALL, wait_for, write_images, write_weights
from uno.config import Config, dump_yaml, override
from uno.data import features
from uno.data.embeddings import given_vectors
from uno.errors import ConfigError, Interrupted
from uno.runs import NUMERICS, lock
from uno.session.configure import RAY_JOB
from uno.threads import available_cpus

WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has the device"
)
TINY = [word for word in SMALL if word not in ("--preset", "digits")]


def request(words) -> tables.Request:
    """What a command line asks for."""
    return tables.read_request(parse(words, REPRODUCE), words)


@pytest.fixture
def request_of(tmp_path):
    words = ["ablation", "--seeds", "2", "--output", str(tmp_path / "out"), *TINY]
    return lambda *more: request([*words, *more])


def run(request, codes=None):
    """Run what is missing by processes that end at once, each with its code of
    ``codes``. Cells that succeed leave metrics.

    Returns the names of what was started, and the attempts by name.
    """
    started, codes = [], codes or {}

    def execute(command, log, is_stopping):
        run = log.with_suffix("")
        name = f"{run.parent.name}/{run.name}"
        started.append(name)
        run.mkdir(parents=True, exist_ok=True)
        if code := codes.get(name, 0):
            log.write_text(f"chatter\nuno: error: {name} says why\n")
        elif name.startswith("cells/"):
            (run / "metrics.json").write_text("{}")
        return code

    ended = cells.run_jobs(tables.plan(request), request.output, execute, 2)
    return started, {job.name: attempt for job, attempt in ended}


def names_of(request):
    """The name of the cell of each row and seed."""
    return {(cell.row.key, cell.seed): cell.name for cell in request.cells}


def lose_a_result(request):
    """Remove the metrics of a cell that has ended, and return its name."""
    lost = names_of(request)["uno", 1]
    (request.output / lost / "metrics.json").unlink()
    return lost


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ablaton"], "unknown table 'ablaton'; did you mean 'ablation'"),
        (["ablation", "--seeds", "0"], "--seeds: Input should be greater than 0"),
        (["ablation", "--scale", "full"], "needs --cifar10 DIR .* and --cifar100 DIR"),
        (
            ["ablation", "--scale", "full", "--datasets", "cifar100-50"],
            "needs --cifar100 DIR",
        ),
        (["ablation", "--datasets", "mnist"], "choose from digits, cifar10-jpeg"),
        (["ablation", "--rows", "no"], "choose from uno, no-concat"),
        (["rotation", "--rows", "kcl"], "choose from uno, uno-rotation"),
        (["ablation", "--seed", "3"], "seed is set by the table"),
        (["ablation", "--data", "digits"], "data.source is set by the table"),
        (
            ["ablation", "--weights", "x.safetensors"],
            "model.weights is set by the table",
        ),
        (["ablation", "--model.finetune", "none"], "needs --weights FILE"),
        (
            ["ablation", "--model.finetune", "none", "--weights", "x"],
            "needs --weights FILE",
        ),
        (["ablation", "--model.finetune", "none", "--weights", "x.pt"], "no such file"),
        (
            ["ablation", "--objective.epsilom", "1"],
            "unknown option --objective.epsilom",
        ),
        (["ablation", "--output", "s3://a/b"], "must be a directory"),
        (["ablation", "--cifar10-jpeg", "/nowhere"], "/nowhere"),
        (["ablation", "--cifar10-jpeg", "/nowhere", "--dry-run"], "/nowhere"),
        pytest.param(
            ["ablation", "--device", "cuda"], "no CUDA device", marks=WITHOUT_GPU
        ),
    ],
)
def test_mistakes_are_one_line_and_nothing_starts(
    words, message, capsys, tmp_path, monkeypatch
):
    """Kills: a traceback, and a run that starts before everything is known to be
    there.
    """
    monkeypatch.chdir(tmp_path)
    assert cli.run_guarded(main, words) == 2
    err = capsys.readouterr().err.strip()
    assert "\n" not in err
    assert re.search(message, err), err
    assert not list(tmp_path.iterdir())


def test_what_a_command_line_leads_to(request_of, monkeypatch):
    """Kills: rows without the reference row or the row whose runs they read; as many
    Ray runs at a time as there are cores.
    """
    chosen = request(["rotation", "--rows", "rs-plus-rotation"]).table.rows
    assert {row.key for row in chosen} == {"uno", "rs-plus", "rs-plus-rotation"}
    for words, at_once in (("--workers 2", 1), ("--device cpu", available_cpus())):
        compute = request_of(*words.split()).compute
        assert tables._default_parallel(compute) == at_once
    words = ["ablation", "--seeds", "3", "--recipe", "v2"]
    assert request(words).command == "uno reproduce ablation --seeds 3 --recipe v2"
    monkeypatch.setenv(RAY_JOB, "{}")
    with pytest.raises(ConfigError, match="--output must be an absolute path"):
        request(["ablation"])


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (
            "ablation --seeds 2",
            ["8 cells, 0 of them have a result", "digits no-concat seed 1", "minutes"],
        ),
        (
            "sota --scale full --datasets cifar100-20 --rows uno",
            [
                "3 cells, 0 of them have a result",
                "CIFAR100-20: pretraining 200 epochs, discovery 200 epochs for each",
                "to run it, pass --cifar100 DIR",
                "cost: unknown",
            ],
        ),
    ],
)
def test_a_dry_run_lists_cells_and_cost_and_needs_no_data(
    words, facts, capsys, tmp_path, monkeypatch
):
    """Kills: a dry run that refuses or writes."""
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert [fact for fact in facts if fact not in out] == []
    assert not list(tmp_path.iterdir())


def test_pretrainings_come_first_and_nothing_is_repeated(request_of):
    """Kills: a cell before its pretraining, a pretraining for each cell, weights of
    another seed; a second run of anything, seeds that cannot be added, a lost cell that
    stays lost.
    """
    request = request_of()
    jobs = {job.name: job for job in tables.plan(request)}
    assert len(request.cells) == 8 and len(jobs) == 8 + 4
    order, _ = run(request)
    for cell in request.cells:
        job, shared = jobs[cell.name], jobs[cell.start]
        weights = {"model.weights": str(request.output / cell.start)}
        assert job.config == override(cell.config, weights)
        assert (job.needs, shared.needs) == (cell.start, None)
        assert shared.config.seed == cell.seed
        assert shared.config.augment.weak == cell.config.augment.weak
        assert order.index(cell.start) < order.index(cell.name)
    assert tables.plan(request) == []
    more = tables.plan(request_of("--seeds", "3"))
    assert [job.label.rpartition(" ")[2] for job in more] == ["2"] * 6
    lost = lose_a_result(request)
    assert [job.name for job in tables.plan(request)] == [lost]


def test_failures_are_noted_and_only_divergence_is_final(request_of):
    """Kills: a diverged cell that is run for ever, a full disk that is never tried
    again.
    """
    request = request_of()
    runs = (("uno", 0), ("no-concat", 0), ("uno", 1))
    diverged, full, stopped = (names_of(request)[run] for run in runs)
    _, told = run(request, {diverged: 3, full: 4, stopped: 75})
    assert told[diverged].reason == f"{diverged} says why"
    attempts = cells.read_attempts(request.output)
    failed = {name for name, attempt in attempts.items() if attempt.failed}
    assert failed == {diverged, full} and stopped in attempts
    assert attempts[diverged].seconds == pytest.approx(told[diverged].seconds, abs=0.01)
    with (request.output / cells.ATTEMPTS).open("a") as file:
        file.write('{"job": "cells/cut short", "sec')
    assert cells.read_attempts(request.output) == attempts
    assert {job.name for job in tables.plan(request)} == {full, stopped}


def test_a_failed_pretraining_fails_its_cells(request_of):
    """Kills: a queue that waits for ever, cells that start without weights."""
    request = request_of()
    jobs = tables.plan(request)
    shared = next(job.needs for job in jobs if job.needs and job.config.augment.weak)
    started, told = run(request, {shared: 3})
    lost = {job.name for job in jobs if job.needs == shared}
    assert lost and told.keys() - set(started) == lost
    assert told.keys() == {job.name for job in jobs}
    attempts = cells.read_attempts(request.output)
    reasons = {attempts[name].reason for name in lost}
    assert reasons == {f"pretraining: {shared} says why"}


@pytest.fixture
def frozen_request(request_of, tmp_path, monkeypatch):
    """``frozen_request(...)``: cells on the features of an encoder, its file in the
    working directory.
    """
    monkeypatch.chdir(tmp_path)
    model = request_of().cells[0].config.model
    write_weights(tmp_path / "encoder.safetensors", model)
    words = (
        "--model.finetune none --weights encoder.safetensors --compute.cache cache"
        " --discover.epochs 1"
    )
    return lambda *more: request_of(*words.split(), *more)


def test_features_come_first_and_are_shared(frozen_request, tmp_path):
    """Kills: a pretraining of a frozen encoder, features for each seed, one set for
    different views, features on one core while all cells wait, relative paths in
    processes elsewhere, a cache that was deleted since.
    """
    request = frozen_request()
    jobs = {job.name: job for job in tables.plan(request)}
    # weak augmentation has views of its own
    kinds = [name.partition("/")[0] for name in jobs]
    assert kinds == ["features"] * 2 + ["cells"] * 8
    for cell in request.cells:
        job, shared = jobs[cell.name], jobs[jobs[cell.name].needs]
        assert shared.config.augment.weak == cell.config.augment.weak
        assert job.config.model.weights == str(tmp_path / "encoder.safetensors")
        assert job.config.compute.cache == str(tmp_path / "cache")
        assert (job.config.compute.threads, shared.config.compute.threads) == (1, None)
    run(request)
    assert tables.plan(request) == []
    lost = lose_a_result(request)
    assert [job.name for job in tables.plan(request)] == [jobs[lost].needs, lost]


@pytest.fixture
def own_request(frozen_request, tmp_path):
    """``own_request(TABLE, ...)``: on a folder of the user's, six classes, four of
    them known.
    """
    write_images(tmp_path / "My Photos", dict.fromkeys("abcdef", 12))
    (tmp_path / "known.txt").write_text("a\nb\nc\nd\n")
    words = (
        "--known-classes known.txt --seeds 1 --preset photos --image-size 8"
        " --compute.cache cache --model.encoder resnet_small --model.width 4"
        " --weights encoder.safetensors"
    )
    return lambda name, *more: request(
        [name, "--data", "My Photos", *words.split(), *more]
    )


def test_a_table_on_ones_own_images(own_request, tmp_path):
    """In the words of uno discover; cells know their data wherever they run. Kills: a
    table's own data besides, features for each method, a start or a prior that is UNO's
    for others, two rows of one configuration, data told as if it were a change.
    """
    asked = own_request("sota", "--discover.epochs", "2")
    found = {cell.row.key: cell.config for cell in asked.cells}
    rows = "kcl mcl dtc rs rs-plus jia openmix ncl simgcd pim clustering uno iic rkd"
    assert list(found) == rows.split() and not asked.refused
    assert asked.table.benchmarks[0].name == "My Photos (4 / 2)"
    assert asked.output == Path("runs/reproduce-sota-my-photos").absolute()
    for key, config in found.items():
        expected = {
            "data.source": str(tmp_path / "My Photos"),
            "data.known_classes": str(tmp_path / "known.txt"),
            "data.setting": "ncd",
            "data.validation_fraction": 0.1,
            "discover.epochs": 2,
            "train.batch_size": 66,
            "output": None,
            "model.weights": str(tmp_path / "encoder.safetensors"),
        }
        if config.method == "uno":
            expected |= {
                "model.prototype_init": "kmeans",
                "objective.class_prior": "kmeans",
            }
        else:
            expected |= {
                "model.prototype_init": "random",
                "objective.class_prior": None,
            }
        assert override(config, expected) == config, key
    assert len({cell.start for cell in asked.cells}) == 1
    assert len({dump_yaml(config) for config in found.values()}) == len(found)
    assert not asked.changes.keys() & {"data.source", "data.known_classes", "preset"}
    assert "same cached features" in asked.table.notes[1]
    kinds = [job.name.partition("/")[0] for job in tables.plan(asked)]
    assert kinds == ["features", *["cells"] * 14]


def test_frozen_features_have_a_rate_of_their_own(own_request):
    """Kills: this rate in other tables, or above one that the user gives."""

    def rates(request):
        return {cell.row.key: cell.config.discover.base_lr for cell in request.cells}

    found = rates(own_request("sota"))
    assert found["uno"] == found["iic"] < found["rs"]
    assert set(rates(request(["sota"])).values()) == {0.1}
    words = "--model.prototype_init random --discover.base-lr 0.5 --rows rs"
    given = own_request("sota", *words.split())
    assert set(rates(given).values()) == {0.5}
    assert given.cells[0].config.model.prototype_init == "random"


def test_a_table_on_vectors(tmp_path):
    """Which need no weights. Kills: an encoder's file asked for, a cell that cannot
    find the vectors.
    """
    values = np.random.default_rng(0).normal(size=(60, 4))
    given_vectors(values, np.arange(60) % 6).store(f"{tmp_path}/rows.parquet")
    source = f"vectors:{tmp_path}/rows.parquet"
    words = f"sota --data {source} --known-classes first:4 --seeds 1"
    words += f" --rows clustering kmeans --output {tmp_path}/out"
    asked = request(words.split())
    found = [(cell.row.key, cell.config.data.source) for cell in asked.cells]
    assert found == [("clustering", source), ("uno", source)]
    assert not asked.refused
    assert [job.needs for job in tables.plan(asked)][1:] == [asked.cells[0].start] * 2


def test_rows_that_own_images_refuse_are_told(own_request):
    """Kills: a table that is refused whole, a row that is left out without a word."""
    asked = own_request("rotation")
    assert {cell.row.key for cell in asked.cells} == {"uno", "rs-plus"}
    refused = {"my-photos-uno-rotation", "my-photos-rs-plus-rotation"}
    assert asked.refused.keys() == refused
    assert "pretext.epochs must be 0" in asked.refused["my-photos-uno-rotation"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("unknown-k", "unknown-k chooses classes of the paper's data"),
        ("sota --cifar10 x", "give either --data or --cifar10"),
        ("sota --data digits", "data.source is set by the table"),
        ("sota --objective.epsilon -1", "epsilon"),
        (
            "sota --known-classes None --labeled known --unlabeled new",
            "give either --data or --labeled",
        ),
    ],
)
def test_mistakes_about_own_images_are_refused(own_request, words, message):
    with pytest.raises(ConfigError, match=message):
        own_request(*words.split())


def test_images_without_truth_cannot_be_counted(own_request, tmp_path):
    """Kills: a table of dashes after an hour."""
    write_images(tmp_path / "new", {"": 12})
    words = ["--unlabeled", "new", "--num-novel", "2", "--preset", "scratch"]
    with pytest.raises(ConfigError, match="no unlabeled image has a true class"):
        request(["sota", "--labeled", "My Photos", *words])


def test_a_cell_finds_the_features_of_its_job(frozen_request, monkeypatch):
    """Kills: a job of features whose cells compute them again, under another key or
    in another cache.
    """
    compute = Mock(side_effect=features.encode_chunk)
    monkeypatch.setattr(features, "encode_chunk", compute)
    request = frozen_request("--parallel", "2")
    jobs = {job.name: job for job in tables.plan(request)}
    cell = jobs[names_of(request)["uno", 1]]
    counts = []
    for job in (jobs[cell.needs], cell, jobs[cell.needs]):
        command, _ = cells.cell_command(request.output, job)
        assert cells.main(command[3:]) == 0
        counts.append(compute.call_count)
    assert counts[0] > 0 and counts == counts[:1] * 3
    assert json.loads((request.output / cell.name / "metrics.json").read_text())


def test_a_directory_is_of_one_configuration_and_numerics(request_of, monkeypatch):
    """Kills: a table that mixes settings, or results from before and after a change of
    numbers.
    """

    def directories(*words):
        cell = request_of("--rows", "uno", "--seeds", "1", *words).cells[0]
        return cell.name, cell.start

    first = directories()
    assert first == directories("--device", "cpu")  # which changes no result
    name, start = directories("--objective.epsilon", "0.2")
    assert name != first[0] and start == first[1]
    assert not set(directories("--pretrain.base-lr", "3")) & set(first)
    monkeypatch.setattr(experiments, "NUMERICS", NUMERICS + 1)
    assert not set(directories()) & set(first)


def test_a_pretraining_is_the_same_for_any_method(request_of):
    """So a stopped one goes on for another. Kills: options of a method in its file."""
    requests = request_of(), request_of("--method", "ncl", "--ncl.rampup", "0.5")
    one, other = (tables.plan(request)[0] for request in requests)
    assert one.needs is None and one.config == other.config


def test_a_signal_stops_the_queue(tmp_path):
    """Kills: a driver that starts the next cell after SIGTERM, a running cell that is
    not asked to save, a stopped cell that is taken for a failed one.
    """
    jobs = [cells.CellProcess(f"cells/{i}", Config(), str(i)) for i in range(3)]

    def train(command, log, is_stopping):
        log.write_text("started")
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(is_stopping)
        return Interrupted.exit_code

    with pytest.raises(Interrupted):
        list(cells.run_jobs(jobs, tmp_path, train, 1))
    assert [log.stem for log in tmp_path.glob("cells/*.log")] == ["0"]
    assert not cells.read_attempts(tmp_path)["cells/0"].failed
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_table_is_written_under_a_claim_and_that_of_a_killed_driver_goes(
    tmp_path, monkeypatch
):
    """Kills: a lock file that stays for ever once every cell has a result, two drivers
    that write at once.
    """
    held, lock_file = Mock(), tmp_path / lock.LOCK_FILE
    lock_file.write_text('{"token": "of a killed driver"}')
    monkeypatch.setattr(lock, "WATCH_S", 0.0)
    monkeypatch.setattr(tables, "plan", lambda request: [])
    monkeypatch.setattr(
        tables, "write_tables", lambda request: held(lock_file.read_text())
    )
    assert main(["ablation", "--output", str(tmp_path)]) == 0
    held.assert_called_once()
    assert "killed" not in held.call_args.args[0]
    assert not lock_file.exists()


CHILD = """
import os, threading, time
from reproduce.cells import end_with_parent

threading.Thread(target=end_with_parent, daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(200)
"""


@pytest.mark.slow
def test_a_process_ends_with_its_driver(tmp_path):
    """Kills: cells that go on training for a driver that was killed."""
    log = tmp_path / "log"

    def driver():
        work = ([sys.executable, "-c", CHILD], log, lambda: False)
        Thread(target=cells.run_local, args=work, daemon=True).start()
        wait_for(lambda: log.exists() and log.read_text())

    def has_ended():
        path = Path(f"/proc/{log.read_text().strip()}/status")
        return not path.exists() or "zombie" in path.read_text()

    assert forked(driver)[0] == 0
    wait_for(has_ended)


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_tiny_ablation_end_to_end(tmp_path, capsys):
    """Stopped by SIGTERM after a cell, continued, repeated: the table is whole and
    nothing runs twice.
    """
    out = tmp_path / "out"
    words = f"ablation --rows no-overclustering --seeds 1 --parallel 1 --output {out}"
    words = [*words.split(), *TINY]
    command = [sys.executable, "-m", "pipelines", "reproduce", *words]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_for(lambda: any(out.glob("cells/*/metrics.json")), 600)
    driver.terminate()
    _, said = driver.communicate(timeout=600)
    assert driver.returncode == 75 and b"resume with the same command" in said
    (first,) = out.glob("cells/*/metrics.json")
    written_at = first.stat().st_mtime
    assert cli.run_guarded(main, words) == 0
    assert first.stat().st_mtime == written_at
    assert len(list(out.glob("cells/*/metrics.json"))) == 2
    assert "not finished" not in (out / "ablation.md").read_text()
    written = json.loads((out / "ablation.json").read_text())
    measured = [line for line in written["lines"] if "mean" in line]
    assert {line["row"] for line in measured} == {"uno", "no-overclustering"}
    assert {line["n"] for line in measured} == {1} and written["missing"] == []
    capsys.readouterr()
    assert main(words) == 0
    assert "nothing is run again" in capsys.readouterr().out


SAVES = """
import signal, sys, time

def save(*_):
    print('saved', flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
time.sleep(60)
"""


def test_a_command_runs_to_its_end_or_until_it_is_told_to_stop(tmp_path):
    """Kills: a code that is lost, a process that is killed before it has saved."""
    log = tmp_path / "log"
    fails = [sys.executable, "-c", "raise SystemExit(3)"]
    assert cells.run_local(fails, log, lambda: False) == 3
    saves = [sys.executable, "-c", SAVES]
    code = cells.run_local(saves, log, lambda: "ready" in log.read_text())
    assert (code, log.read_text()) == (Interrupted.exit_code, "ready\nsaved\n")


@pytest.mark.ray
@pytest.mark.release
def test_cells_on_ray(ray_cluster, tmp_path):
    """Exit codes come back, a process whose node is lost is started again, and a
    process saves when it is told to stop.
    """

    def run(name, script, is_stopping=lambda: False):
        command = [sys.executable, "-c", script]
        return cells.run_on_ray(
            ray_cluster, {"num_cpus": 1}, command, tmp_path / name, is_stopping
        )

    assert run("done", "print('said')") == 0
    assert (tmp_path / "done").read_text() == "said\n"
    assert run("failed", "raise SystemExit(3)") == 3
    first = tmp_path / "first"
    lose_the_node = (
        f"import os, pathlib; path = pathlib.Path({str(first)!r})\n"
        "if not path.exists(): path.touch(); os.kill(os.getppid(), 9)"
    )
    assert run("lost", lose_the_node) == 0 and first.exists()
    log = tmp_path / "saving"
    code = run("saving", SAVES, lambda: log.exists() and "ready" in log.read_text())
    assert code == Interrupted.exit_code and "saved" in log.read_text()
