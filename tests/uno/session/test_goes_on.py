"""A run that is finished or resumes on unchanged data reads no image before."""

import os
import shutil
import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import uno
from pipelines import cli
from tests.uno.session.test_unreadable import settings_of
from uno.data.files import Storage
from uno.data.images import Files
from uno.errors import ConfigError, Interrupted
from uno.session import backend, pipeline
from uno.session.backend import LocalBackend
from uno.training import LocalWorker


@pytest.fixture
def settings(tmp_path):
    """A tiny run that trains from scratch on two folders of images."""
    return settings_of("scratch", tmp_path)


@pytest.fixture
def num_read(monkeypatch):
    """The numbers of images that were asked for, call by call."""
    numbers, read = [], Files.read_images

    def counted(self, rows):
        numbers.append(len(rows))
        return read(self, rows)

    monkeypatch.setattr(Files, "read_images", counted)
    return numbers


class WorkBegins(Exception):
    """Training or an evaluation would begin now."""


@pytest.fixture
def expect_no_work(num_read, monkeypatch):
    """Check that a command reads no image before it trains or evaluates."""

    def check(command, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(LocalBackend, "train", Mock(side_effect=WorkBegins))
            num_read.clear()
            with pytest.raises(WorkBegins):
                command(*args, **kwargs)
        assert sum(num_read) == 0

    return check


def test_a_resumed_run_reads_no_image_before_it_continues(
    settings, num_read, monkeypatch, expect_no_work
):
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(LocalWorker, "should_stop", lambda self, step: True)
        uno.discover(**settings)
    assert sum(num_read) > 0  # a new run looks at its images
    expect_no_work(uno.discover, **settings)


def test_a_run_that_is_stopped_after_its_last_step_is_not_evaluated(
    settings, tmp_path, monkeypatch
):
    """Also where the method has no steps, as with the default for frozen features.
    The same command goes on.
    """

    train_phases = backend.train_phases

    def train_and_stop(*args):
        train = train_phases(*args)
        os.kill(os.getpid(), signal.SIGINT)
        return train

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="resume"):
        patch.setattr("uno.session.backend.train_phases", train_and_stop)
        uno.discover(**settings)
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert uno.discover(**settings).metrics


def test_a_new_name_does_not_open_the_data_for_training(
    settings, tmp_path, monkeypatch
):
    uno.discover(**settings, report=True)
    trained = Mock(side_effect=WorkBegins)
    monkeypatch.setattr(LocalBackend, "train", trained)
    assert cli.main(["classes", str(tmp_path / "run"), "--rename", "novel-1=owl"]) == 0
    assert "owl" in (tmp_path / "run" / "report.html").read_text()


def test_a_finished_run_is_shown_evaluated_and_completed_again(
    settings, num_read, tmp_path, capsys, expect_no_work
):
    """Images are read for the evaluation alone. A model that is missing is saved. A run
    with other images is refused before they are checked.
    """
    first = uno.discover(**settings)
    num_read.clear()
    again = uno.discover(**settings | {"quiet": False})
    assert "is finished" in capsys.readouterr().out
    assert again.model_hash == first.model_hash and sum(num_read) == 0
    expect_no_work(pipeline.evaluate, settings["output"], {})
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "run" / "metrics.json").unlink()
    pipeline.evaluate(settings["output"], {})
    again = uno.load(settings["output"])
    assert again.model_hash == first.model_hash and again.metrics == first.metrics
    (tmp_path / "new" / "03.png").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="other data"):
        uno.discover(**settings)


def test_a_run_keeps_its_estimated_number_of_classes(
    settings, num_read, tmp_path, monkeypatch
):
    """The number is not estimated again, and the estimate is not lost."""
    stored = tmp_path / "run" / "estimate.json"

    def estimate(config, *args, **kwargs):
        Storage(config.output).write("estimate.json", b"{}")
        return SimpleNamespace(suggested=2)

    monkeypatch.setattr("uno.session.prepare.estimate_classes", estimate)
    settings |= {"num_novel": "auto"}
    uno.discover(**settings)
    monkeypatch.delattr("uno.session.prepare.estimate_classes")
    stored.unlink()  # as if the run had been killed before
    (tmp_path / "run" / "metrics.json").unlink()
    uno.discover(**settings)
    assert stored.exists()
    num_read.clear()
    uno.discover(**settings)
    assert sum(num_read) == 0
