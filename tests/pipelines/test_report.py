"""``uno report RUN`` as a command."""

import pytest

from pipelines import commands
from tests.uno.report.runs import small_config, write_run
from uno.data.sources import read_rows
from uno.data.splits import make_task


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = small_config(**{"data.limit": 60})
    task = make_task(read_rows(config.data), config.data)
    return write_run(tmp_path_factory.mktemp("run"), config, task)


def test_report_writes_the_page(run, tmp_path, capsys):
    """Without its data and without a checkpoint too."""
    commands.report([run.uri, "--device", "cpu"])
    assert f"report: {run.path('report.html')}" in capsys.readouterr().out
    assert b"Feature space" in run.read("report.html")
    commands.report([run.uri, "--data", "folder:/nowhere"])
    assert "cannot be read" in capsys.readouterr().out
    assert b"cannot be read" in run.read("report.html")
    (tmp_path / "config.yaml").write_bytes(run.read("config.yaml"))
    commands.report([str(tmp_path)])
    assert "No predictions" in (tmp_path / "report.html").read_text()
