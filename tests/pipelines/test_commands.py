"""The commands in this process, without Ray: what they write, what they refuse, how
they resume.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import yaml

from pipelines import cli, ray_env
from tests.pipelines.small import (
    ROOT,
    SMALL,
    assert_same_weights,
    lines_of,
    refused,
    signal_at,
    write_images,
)
from uno.config import field_names
from uno.data import memory
from uno.data.files import Storage
from uno.runs import lock
from uno.runs import run as training
from uno.runs.checkpoint import checkpoint_steps
from uno.session import backend, resources

DISCOVER = ["discover", *SMALL]


@pytest.fixture
def nothing_starts(monkeypatch):
    """Training or connecting to Ray fails the test."""
    for module, name in ((ray_env, "connect"), (training, "run_phase")):
        monkeypatch.setattr(
            module, name, lambda *_, **__: pytest.fail("to be refused earlier")
        )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished small run."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main([*DISCOVER, "--output", str(output)]) == 0
    return output


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--objective.epsilonn", "1"], "did you mean --objective.epsilon?"),
        (["--data", "folder:/no/such/place"], "/no/such/place"),
        (["--known-classes", "0,1,eleven"], "eleven"),
        (["--known-classes", "first:10"], "nothing to discover"),
        (["--num-novel", "1000"], "than classes to discover (1000)"),
        (["--batch-size", "34"], "divide by 2 workers"),
        (["--weights", "/no/such/run"], "model.weights: /no/such/run"),
        (["--weights", "/no/such/encoder.safetensors"], "no such file"),
        (["--workers", "0", "--device", "cuda"], "CUDA"),
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
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    output = tmp_path / "run"
    assert says in refused(
        capsys, 2, *DISCOVER, "--workers", "2", "--output", output, *argv
    )
    assert not output.exists()


@pytest.mark.parametrize(
    ("counts", "argv", "says"),
    [
        ({"cat": 20, "dog": 0, "emu": 20}, ["--known-classes", "cat,dog"], "dog"),
        ({"cat": 40}, ["--known-classes", "first:1"], "nothing to discover"),
        ({"cat": 40}, [], "every training image is labeled"),
        (
            {"cat": 20, "dog": 3, "emu": 2},
            ["--known-classes", "cat", "--num-novel", "9"],
            "than classes to discover (9)",
        ),
    ],
)
def test_bad_folders_are_one_line(tmp_path, capsys, nothing_starts, counts, argv, says):
    data = f"folder:{write_images(tmp_path / 'images', counts)}"
    words = ["--batch-size", "8", "--workers", "2", "--output", tmp_path / "run", *argv]
    words += ["--preset", "scratch", "--data", data]
    assert says in refused(capsys, 2, "discover", *words)
    assert not (tmp_path / "run").exists()


def test_own_images_without_weights_and_network_are_one_line(
    tmp_path, capsys, nothing_starts, monkeypatch
):
    """The line names both ways out: a file of weights, and an encoder of one's own."""

    def no_network(*args, **kwargs):
        raise URLError("Name or service not known")

    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    data = f"folder:{write_images(tmp_path / 'images', {'cat': 20, 'dog': 20})}"
    words = ["--data", data, "--known-classes", "cat", "--output", tmp_path / "run"]
    line = refused(capsys, 2, "discover", *words)
    encoder = "--model.encoder torchvision:efficientnet_b0 --weights FILE"
    assert encoder in line and "--preset scratch" in line
    assert not (tmp_path / "run").exists()


def test_the_run_directory(finished):
    names = {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "metrics.json",
        "checkpoints",
        "model",
    }
    assert {path.name for path in finished.iterdir()} >= {*names, "tensorboard"}
    assert not (finished / "lock.json").exists()
    results = json.loads((finished / "metrics.json").read_text())
    shares = [value for key, value in results.items() if not key.endswith("/rows")]
    assert all(isinstance(value, float) and 0 <= value <= 1 for value in shares)
    assert {
        "train/novel/task_aware/acc/best",
        "test/novel/task_agnostic_strict/acc/avg",
        "baseline/kmeans/novel/acc",
    } <= results.keys()
    assert {line["phase"] for line in lines_of(finished)} == {"pretrain", "discover"}


def test_a_finished_run_is_shown_not_trained(finished, capsys, nothing_starts):
    before = (finished / "metrics.json").read_bytes()
    assert cli.main([*DISCOVER, "--output", str(finished)]) == 0
    shown = capsys.readouterr().out
    assert "is finished; nothing is trained again" in shown and "Task-aware" in shown
    assert (finished / "metrics.json").read_bytes() == before
    changed = ["--objective.epsilon", "0.1", "--seed", "3"]
    line = refused(capsys, 2, *DISCOVER, "--output", finished, *changed)
    assert "objective.epsilon, seed" in line


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.release)]
)
def test_the_report_is_part_of_a_finished_run(
    finished, tmp_path, capsys, monkeypatch, number
):
    """Kills: "done" without a report, a run that the same command takes for
    finished.
    """
    run = Path(shutil.copytree(finished, tmp_path / "run"))
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


def test_evaluate_reproduces_the_results_and_so_does_the_run(
    finished, tmp_path, capsys
):
    """Kills: a traceback of json for damaged results; training again; a report of
    other results.
    """
    before = (finished / "metrics.json").read_bytes()
    results = Path(shutil.copytree(finished, tmp_path / "run")) / "metrics.json"
    results.unlink()
    page = tmp_path / "run" / "report.html"
    for text, kept in (
        (page.read_text().replace("<h1", "<h1 old", 1), False),
        ("the user's own", True),
    ):
        page.write_text(text)
        assert (
            cli.main(["evaluate", str(tmp_path / "run")]) == 0
            and results.read_bytes() == before
        )
        assert (page.read_text() == text) == kept  # the second time nothing has changed
    assert "Task-aware" in capsys.readouterr().out
    results.write_text("{")
    assert (
        cli.main([*DISCOVER, "--output", str(tmp_path / "run")]) == 0
        and results.read_bytes() == before
    )
    assert "is not a run directory" in refused(capsys, 2, "evaluate", tmp_path)
    assert "RUN comes first" in refused(capsys, 2, "evaluate", "--workers", "0")


def test_evaluate_works_here_and_stops_at_once(finished, tmp_path, capsys, monkeypatch):
    """Kills: Ray for a run of two workers; a checkpoint promised where none is made;
    metrics half written.
    """
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("num_workers: 0", "num_workers: 2"))
    before = (run / "metrics.json").read_bytes()
    monkeypatch.setattr(
        ray_env, "connect", lambda *_, **__: pytest.fail("no Ray for an evaluation")
    )
    assert (
        cli.main(["evaluate", str(run)]) == 0
        and (run / "metrics.json").read_bytes() == before
    )

    def evaluate(*_):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("went on")

    monkeypatch.setattr(backend, "evaluate_run", evaluate)
    capsys.readouterr()
    assert cli.main(["evaluate", str(run)]) == 75
    said = capsys.readouterr()
    assert (
        said.err.splitlines()[-1]
        == "uno: stopped; nothing was changed; resume with the same command"
    )
    assert (
        "checkpoint" not in said.out + said.err
        and (run / "metrics.json").read_bytes() == before
    )
    # a run that is trained, and has no metrics yet
    assert cli.main(["discover", *SMALL, "--output", str(tmp_path / "new")]) == 75
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "uno: stopped before the run was finished; resume with the same command"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_of_gpu_workers_is_evaluated_and_reported_without_a_gpu(
    finished, tmp_path
):
    """Kills: a device of the run's workers that the machine of a later command must
    have, too.
    """
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["compute"] |= {"num_workers": 2, "device": "cuda"}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert cli.main(["evaluate", str(run)]) == 0
    assert cli.main(["report", str(run)]) == 0


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
    assert cli.main(["pretrain", *SMALL, "--output", str(tmp_path / "run")]) == 0
    assert {line["phase"] for line in lines_of(tmp_path / "run")} == {"pretrain"}
    assert cli.main([*DISCOVER, "--output", str(tmp_path / "run")]) == 0
    # nothing was pretrained twice
    assert lines_of(tmp_path / "run") == lines_of(finished)
    assert_same_weights(tmp_path / "run", finished)


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


@pytest.mark.slow
def test_fresh_starts_over(finished, tmp_path):
    output = tmp_path / "run"
    assert cli.main([*DISCOVER, "--output", str(output), "--max-steps", "2"]) == 0
    (output / "old-report.html").write_text("")
    assert cli.main([*DISCOVER, "--output", str(output), "--overwrite"]) == 0
    assert not (output / "old-report.html").exists()
    assert_same_weights(output, finished)


def test_a_directory_that_is_no_run_is_not_touched(tmp_path, capsys, nothing_starts):
    (tmp_path / "thesis.tex").write_text("years of work")
    for switch in ([], ["--overwrite"]):
        assert "holds no run" in refused(
            capsys, 2, *DISCOVER, "--output", tmp_path, *switch
        )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


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
    argv = [
        "--preset",
        "scratch",
        "--labeled",
        "known",
        "--unlabeled",
        "new",
        "--num-novel",
        "2",
        "--config",
        "mine.yaml",
    ]
    argv += [
        "--seed",
        "4",
        "--method",
        "rs",
        "--data.mean",
        "0.5",
        "0.5",
        "0.5",
        "--recipe",
        "v2",
    ]
    assert cli.main(["discover", *argv, "--explain"]) == 0
    shown = capsys.readouterr().out
    origin = {}
    for line in shown.splitlines():
        key, value = next(iter(yaml.safe_load(line).items()))
        origin[key] = value, line.rpartition("# ")[2]
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
    assert {key: origin[key] for key in expected} == expected
    assert origin.keys() == set(field_names("rs"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "known",
        "mine.yaml",
        "new",
    ]
    Path("explained.yaml").write_text(shown)
    assert cli.main(["discover", "--config", "explained.yaml", "--explain"]) == 0
    again = capsys.readouterr().out
    assert [line.rpartition("# ")[0] for line in again.splitlines()] == [
        line.rpartition("# ")[0] for line in shown.splitlines()
    ]


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
    assert (
        err.splitlines()[-1]
        == "uno: stopped at discover step 4 of 18; resume with the same command"
    )
    assert "stopping: saving a checkpoint first" in out
    assert checkpoint_steps(Storage(str(output)), "discover") == [4]
    assert not (output / "lock.json").exists()
    assert cli.main(argv) == 0
    assert "resuming at discover step 4\n" in capsys.readouterr().out
    assert lines_of(output) == lines_of(finished)
    assert_same_weights(output, finished)


@pytest.mark.ray  # several processes
def test_a_killed_run_resumes_bit_for_bit(finished, tmp_path, capsys, monkeypatch):
    """The process dies in the middle of an epoch; its lock file stays, and is found
    to be dead.
    """
    monkeypatch.setattr(lock, "RENEW_S", 0.2)
    monkeypatch.setattr(lock, "WATCH_S", 0.5)
    output = tmp_path / "run"
    words = [*SMALL, "--output", str(output)]
    program = (
        "import sys; from pipelines import cli; from tests.pipelines.small import"
        " signal_at; signal_at(8, 9); sys.exit(cli.main(sys.argv[1:]))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, "discover", *words],
        cwd=ROOT,
        timeout=120,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL
    assert checkpoint_steps(Storage(str(output)), "discover") == [6]
    assert cli.main(["discover", *words]) == 0
    assert (
        "waiting 0.5 s to see whether that process is alive" in capsys.readouterr().out
    )
    assert lines_of(output) == lines_of(finished)
    assert_same_weights(output, finished)


def test_a_damaged_checkpoint_is_skipped_and_trained_again(tmp_path, capsys, caplog):
    """If all are damaged, nothing starts over by itself: exit code 4."""
    storage = Storage(str(tmp_path / "run"))
    pretrain = ["pretrain", *SMALL, "--output", storage.root]
    assert cli.main(pretrain) == 0
    assert checkpoint_steps(storage, "pretrain") == [6, 9]
    storage.write("checkpoints/pretrain/step_00000009.safetensors", b"{}")
    assert cli.main(pretrain) == 0
    assert "skipping checkpoint checkpoints/pretrain/step_00000009" in caplog.text
    assert checkpoint_steps(storage, "pretrain") == [6, 9]
    for step in (6, 9):
        storage.write(f"checkpoints/pretrain/step_{step:08d}.safetensors", b"{}")
    assert "use --overwrite" in refused(capsys, 4, *pretrain)


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


def test_numbers_out_of_range_stop_with_code_3(tmp_path, capsys, monkeypatch):
    """A loss that is never finite: code 3, one line, and the step."""
    real = memory.MemoryBatches.__call__

    def poisoned(self, step):
        batch = real(self, step)
        for views in batch.views:
            views.mul_(np.nan)
        return batch

    monkeypatch.setattr(memory.MemoryBatches, "__call__", poisoned)
    assert cli.main([*DISCOVER, "--output", str(tmp_path / "run")]) == 3
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("uno: error: non-finite loss at pretrain step")


def test_storage_that_cannot_be_written_is_code_4(tmp_path, capsys):
    argv = ["pretrain", *SMALL, "--max-steps", "1", "--output", str(tmp_path)]
    assert cli.main(argv) == 0
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    capsys.readouterr()
    assert cli.main(argv) == 4
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("uno: error: cannot write ")
    )
