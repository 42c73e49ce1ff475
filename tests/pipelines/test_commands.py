"""The commands in this process, without Ray: what they write, what they refuse, how
they resume.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import pytest
import torch
import yaml

from pipelines import cli, ray_env
from tests.pipelines.small import (
    ROOT,
    SMALL,
    assert_as_undisturbed,
    lines_of,
    refused,
    signal_at,
    write_images,
)
from uno.config import field_names
from uno.data import memory
from uno.data.files import Storage
from uno.runs import lock
from uno.runs.checkpoint import checkpoint_steps
from uno.session import backend, resources

DISCOVER = ["discover", *SMALL]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished small run."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main([*DISCOVER, "--output", str(output)]) == 0
    return output


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--data", "folder:/no/such/place"], "/no/such/place"),
        (["--known-classes", "0,1,eleven"], "eleven"),
        (["--known-classes", "first:10"], "nothing to discover"),
        (["--num-novel", "1000"], "than classes to discover (1000)"),
        (["--batch-size", "34"], "divide by 2 workers"),
        (["--weights", "/no/such/run"], "model.weights: /no/such/run"),
        (["--weights", "/no/such/encoder.safetensors"], "no such file"),
        (["--compute.threads", "900"], "compute.threads is 900, more than"),
        (
            ["--model.width", "512", "--model.blocks", "18", "--batch-size", "64"],
            "this run needs at least",
        ),
        (
            [
                "--augment.large.size",
                "1024",
                "--data.stored-size",
                "1024",
                "--batch-size",
                "64",
            ],
            "activations",
        ),
    ],
)
def test_bad_options_are_one_line(
    tmp_path, capsys, nothing_starts, argv, says, monkeypatch
):
    monkeypatch.setattr(resources, "free_host_bytes", lambda: 8 * 10**9)
    output = tmp_path / "run"
    assert says in refused(
        capsys, 2, *DISCOVER, "--workers", "2", "--output", output, *argv
    )
    assert not output.exists()


def test_own_images_without_weights_and_network_are_one_line(
    tmp_path, capsys, nothing_starts, monkeypatch
):
    """The line names both ways out: a file of weights, and an encoder of one's own."""
    no_network = Mock(side_effect=URLError("Name or service not known"))
    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    data = f"folder:{write_images(tmp_path / 'images', {'cat': 20, 'dog': 20})}"
    words = ["--data", data, "--known-classes", "cat", "--output", tmp_path / "run"]
    line = refused(capsys, 2, "discover", *words)
    encoder = "--model.encoder torchvision:efficientnet_b0 --weights FILE"
    assert encoder in line and "--preset scratch" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.release)]
)
def test_the_report_is_part_of_a_finished_run(run, capsys, monkeypatch, number):
    """Kills: "done" without a report, a run that the same command takes for
    finished.
    """
    expected = (run / "metrics.json").read_bytes()
    for name in ("metrics.json", "report.html"):
        (run / name).unlink()
    command = [*DISCOVER, "--output", str(run)]
    with monkeypatch.context() as stopped:
        stopped.setattr(
            "uno.session.pipeline.write_report",
            lambda *_, **__: signal.raise_signal(number),
        )
        assert cli.main(command) == 75
    assert "resume with the same command" in capsys.readouterr().err
    assert not (run / "metrics.json").exists() and not (run / "lock.json").exists()
    assert cli.main(command) == 0 and (run / "metrics.json").read_bytes() == expected
    assert "task_aware" in (run / "report.html").read_text()


def test_evaluate_reproduces_the_results_and_so_does_the_run(run, capsys):
    """Kills: a traceback of json for damaged results; training again; a report of
    other results.
    """
    results, page = run / "metrics.json", run / "report.html"
    before = results.read_bytes()
    results.unlink()
    stale = page.read_text().replace("<h1", "<h1 old", 1)
    # the second time nothing has changed
    for text, kept in ((stale, False), ("the user's own", True)):
        page.write_text(text)
        assert cli.main(["evaluate", str(run)]) == 0
        assert results.read_bytes() == before and (page.read_text() == text) == kept
    assert "Task-aware" in capsys.readouterr().out
    results.write_text("{")
    assert cli.main([*DISCOVER, "--output", str(run)]) == 0
    assert results.read_bytes() == before


def stop_and_go_on(*_) -> None:
    """End a command by a signal; fail if it goes on."""
    signal.raise_signal(signal.SIGTERM)
    pytest.fail("went on")


@pytest.mark.parametrize(
    ("is_finished", "says"),
    [(True, "stopped; nothing was changed"), (False, "stopped before the run was")],
)
def test_an_evaluation_stops_at_once(run, capsys, monkeypatch, is_finished, says):
    """Kills: a checkpoint promised where none is made; metrics half written."""
    results = (run / "metrics.json").read_bytes()
    command = ["evaluate", str(run)]
    if not is_finished:
        (run / "metrics.json").unlink()
        command = [*DISCOVER, "--output", str(run)]
    monkeypatch.setattr(backend, "evaluate_run", stop_and_go_on)
    assert cli.main(command) == 75
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.startswith(f"uno: {says}")
    assert line.endswith("; resume with the same command")
    assert "checkpoint" not in said.out + said.err
    left = [path.read_bytes() for path in run.glob("metrics.json")]
    assert left == [results] * is_finished


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_of_gpu_workers_is_evaluated_and_reported_without_a_gpu(run, monkeypatch):
    """Kills: a device of the run's workers that the machine of a later command must
    have, too; Ray for an evaluation.
    """
    results, config = run / "metrics.json", run / "config.yaml"
    before, tree = results.read_bytes(), yaml.safe_load(config.read_text())
    tree["compute"] |= {"num_workers": 2, "device": "cuda"}
    config.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(ray_env, "connect", pytest.fail)
    assert cli.main(["evaluate", str(run)]) == 0
    assert results.read_bytes() == before
    assert cli.main(["report", str(run)]) == 0


def test_a_report_needs_neither_data_nor_a_checkpoint(run, tmp_path, capsys):
    page = run / "report.html"
    assert cli.main(["report", str(run), "--data", "folder:/nowhere"]) == 0
    said = capsys.readouterr().out
    assert "cannot be read" in said and f"report: {page}" in said
    assert "cannot be read" in page.read_text()
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "config.yaml", begun)
    assert cli.main(["report", str(begun)]) == 0
    assert "No predictions" in (begun / "report.html").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_or_weights_are_named_before_data_is_read(
    finished, tmp_path, capsys, monkeypatch
):
    """Kills: minutes of a pass over the data, then the line."""
    for module in ("uno.session.data", "uno.report.report"):
        monkeypatch.setattr(
            f"{module}.read_rows", lambda _: pytest.fail("data is read")
        )
    for words in (
        *([name, finished] for name in ("predict", "evaluate", "report")),
        DISCOVER,
    ):
        assert "finds no CUDA device" in refused(capsys, 2, *words, "--device", "cuda")
    for file in (
        "/no/such/encoder.safetensors",
        "/no/such/encoder.pth",
        "/no/such/run",
    ):
        assert "model.weights: " in refused(capsys, 2, *DISCOVER, "--weights", file)


@pytest.mark.slow
def test_pretrain_then_discover_equals_discover(finished, tmp_path):
    """Kills: a second pretraining, discovery from other weights."""
    assert cli.main(["pretrain", *SMALL, "--output", str(tmp_path / "run")]) == 0
    assert {line["phase"] for line in lines_of(tmp_path / "run")} == {"pretrain"}
    assert cli.main([*DISCOVER, "--output", str(tmp_path / "run")]) == 0
    assert_as_undisturbed(tmp_path / "run", finished)


@pytest.mark.parametrize(
    "weights",
    ["", pytest.param("model/encoder.safetensors", marks=pytest.mark.release)],
)
def test_weights_replace_pretraining(finished, tmp_path, weights, monkeypatch):
    """Kills: weights looked up from another directory than the user's."""
    monkeypatch.chdir(finished.parent)
    argv = [*DISCOVER, "--weights", os.path.join("run", weights), "--max-steps", "2"]
    assert cli.main([*argv, "--output", str(tmp_path / "run")]) == 0
    assert {line["phase"] for line in lines_of(tmp_path / "run")} == {"discover"}


def test_data_check_and_dry_run_leave_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "check", *SMALL]) == 0
    assert "5 known, 5 to discover" in capsys.readouterr().out
    assert cli.main(["data", "check", *SMALL, "--num-novel", "1000"]) == 2
    assert "error: fewer unlabeled images (100) than" in capsys.readouterr().out
    assert cli.main([*DISCOVER, "--workers", "2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "pretrain: 3 epochs of 3 steps of 32 labeled + 0 unlabeled images" in shown
    assert "discover: 3 epochs of 6 steps of 16 labeled + 16 unlabeled images" in shown
    assert list(tmp_path.iterdir()) == []


def test_explain_says_where_every_value_comes_from(tmp_path, capsys, monkeypatch):
    """The lines are a file for --config, which gives the same values."""
    monkeypatch.chdir(tmp_path)
    write_images(Path("known"), {"a": 9, "b": 9})
    write_images(Path("new"), {"x": 9})
    Path("mine.yaml").write_text("train: {batch_size: 8}\nseed: 3\n")
    line = (
        "discover --preset scratch --labeled known --unlabeled new --num-novel 2"
        " --config mine.yaml --seed 4 --method rs --data.mean 0.5 0.5 0.5 --recipe v2"
    )
    assert cli.main([*line.split(), "--explain"]) == 0
    shown = capsys.readouterr().out
    values = yaml.safe_load(shown)
    origins = dict(re.findall(r"^(\S+): .*# (.*)$", shown, re.M))
    expected = {
        "train.batch_size": (8, "file"),
        "seed": (4, "command line"),
        "method": ("rs", "command line"),
        "data.mean": ([0.5, 0.5, 0.5], "command line"),
        "discover.base_lr": (0.4, "recipe v2"),
        "data.setting": ("ncd", "data"),
        "augment.large.size": (8, "data"),
        "data.validation_fraction": (0.1, "data"),
        "objective.epsilon": (0.05, "default"),
        "output": ("runs/scratch-seed4", "default"),
    }
    assert {key: (values[key], origins[key]) for key in expected} == expected
    assert values.keys() == origins.keys() == set(field_names("rs"))
    assert not Path("runs").exists()
    Path("explained.yaml").write_text(shown)
    assert cli.main(["discover", "--config", "explained.yaml", "--explain"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == values


def test_a_signal_saves_and_the_same_command_resumes(
    finished, tmp_path, capsys, monkeypatch
):
    batches = memory.MemoryBatches
    monkeypatch.setattr(batches, "__call__", batches.__call__)  # restored at the end
    output = tmp_path / "run"
    argv = [*DISCOVER, "--output", str(output)]
    signal_at(3, signal.SIGTERM)
    assert cli.main(argv) == 75
    out, err = capsys.readouterr()
    last = "uno: stopped at discover step 4 of 18; resume with the same command"
    assert err.splitlines()[-1] == last
    assert "stopping: saving a checkpoint first" in out
    assert checkpoint_steps(Storage(str(output)), "discover") == [4]
    assert not (output / "lock.json").exists()
    assert cli.main(argv) == 0
    assert "resuming at discover step 4\n" in capsys.readouterr().out
    assert_as_undisturbed(output, finished)


@pytest.mark.ray  # several processes
def test_a_killed_run_resumes_bit_for_bit(finished, tmp_path, capsys, monkeypatch):
    """The process dies in the middle of an epoch; its lock file stays, and is found
    to be dead.
    """
    monkeypatch.setattr(lock, "RENEW_S", 0.2)
    monkeypatch.setattr(lock, "WATCH_S", 0.5)
    output = tmp_path / "run"
    argv = [*DISCOVER, "--output", str(output)]
    program = (
        "import sys; from pipelines import cli; from tests.pipelines.small import"
        " signal_at; signal_at(8, 9); sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *argv]
    killed = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert checkpoint_steps(Storage(str(output)), "discover") == [6]
    assert cli.main(argv) == 0
    waited = "waiting 0.5 s to see whether that process is alive"
    assert waited in capsys.readouterr().out
    assert_as_undisturbed(output, finished)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path, capsys):
    storage = Storage(str(tmp_path / "run"))
    pretrain = ["pretrain", *SMALL, "--output", storage.root]
    assert cli.main(pretrain) == 0
    for step in (6, 9):
        storage.write(f"checkpoints/pretrain/step_{step:08d}.safetensors", b"{}")
    assert "use --overwrite" in refused(capsys, 4, *pretrain)
    assert checkpoint_steps(storage, "pretrain") == [6, 9]


def test_two_commands_in_one_directory(tmp_path, capsys, nothing_starts, monkeypatch):
    """The second is refused while the first runs; not even --overwrite touches the
    directory.
    """
    monkeypatch.setattr(lock, "RENEW_S", 0.2)
    output = tmp_path / "run"
    with lock.lock_run(Storage(str(output)), on_wait=print):
        line = refused(capsys, 2, *DISCOVER, "--output", output, "--overwrite")
    assert f"{output} is in use by process {os.getpid()} on" in line
    assert list(output.iterdir()) == []
