"""The demo, the day after it and the Python example run as the pages say."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

import uno
from pipelines import cli
from tests.pages import PAGES, blocks, commands, page
from tests.uno.small_run import SMALL

README = page("README.md")


def python_block(mark: str) -> str:
    """The Python example that holds ``mark``."""
    return next(
        block
        for name in PAGES
        for block in blocks(page(name), "python")
        if mark in block
    )


@pytest.mark.slow
def test_the_example_in_python_with_a_small_model(tmp_path, monkeypatch, capsys):
    """Kills: a keyword, a key of the metrics or an attribute that does not exist."""
    monkeypatch.chdir(tmp_path)
    small = {key: value for key, value in SMALL.items() if "epochs" not in key} | {
        "max_steps": 1,
        "compute.threads": 1,
    }
    monkeypatch.setattr(
        uno, "discover", partial(uno.discover, quiet=True, **small), raising=False
    )
    run_example()
    assert "novel" in capsys.readouterr().out


def run_example() -> dict:
    """The names after README's example; it predicts the first twenty digits, two of
    each.
    """
    names: dict = {}
    exec(compile(python_block("uno.discover("), "README.md", "exec"), names)
    assert (
        names["model"].run == str(Path.cwd() / "runs" / "python")
        and len(names["table"]) == 20
    )
    assert (
        Path(names["model"].report).exists() and "<img" in names["model"]._repr_html_()
    )
    return names


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_demo_as_a_newcomer_gets_it(tmp_path):
    """Without Ray, which changes no number (test_ray). Kills: a demo that does not find
    the digits.
    """
    here = ["--workers", "0", "--compute.threads", "1"]
    assert cli.main(["demo", *here, "--output", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert results["train/novel/task_aware/acc/best"] > 0.96
    assert results["train/known/task_aware/acc/best"] > 0.99


@pytest.mark.release
@pytest.mark.ray
def test_the_day_after_training(two, tmp_path, monkeypatch):
    """The commands of the page on a demo, in order, as they stand there."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two, "runs/demo")
    for _, *words in commands(
        page("docs/guides/after-training.md"), "uno classes runs/demo --apply"
    ):
        words = ["digits" if word == "folder:DIR" else word for word in words]
        assert cli.main(words) == 0, words
    assert (tmp_path / "predictions" / "predictions").exists()
    assert (tmp_path / "runs" / "demo" / "report.html").exists()
    assert list((tmp_path / "runs" / "demo").rglob("*.pt2"))
    python = python_block("uno.load(")
    images = __import__("numpy").zeros((2, 8, 8, 3), "uint8")
    python = python.replace('["a.jpg", "b.png"]', "images")
    exec(compile(python, "README.md", "exec"), {"images": images})
