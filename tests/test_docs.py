"""The pages of docs/: the reference is fresh, the site builds, notebooks run."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import docs, pictures
from pipelines import cli
from tests.pages import REPOSITORY

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_the_reference_is_that_of_the_code():
    """Kills: a flag, field, limit or docstring that changed after
    `python -m benchmarks.docs`.
    """
    for name, text in docs.pages().items():
        assert (docs.FOLDER / name).read_text() == text, (
            f"run python -m benchmarks.docs: {name} is stale"
        )


def test_the_reference_holds_every_flag():
    """Kills: a field without a row or without a sentence, a command left out."""
    config, cli = (
        (docs.FOLDER / f"{name}.md").read_text() for name in ("config", "cli")
    )
    rows = dict(re.findall(r"^\| `([\w.]+)`.*\| ([^|]+) \|$", config, re.M))
    assert {*docs.flatten(docs.to_dict(docs.Config()))} == rows.keys() and all(
        rows.values()
    )
    assert re.findall(r"^## `uno ([\w-]+)`$", cli, re.M) == [*docs.cli.SENTENCES]
    assert all(
        f"| `{flag}` |" in cli for c in docs.COMMANDS.values() for flag in c.arguments
    )


def test_links_of_pages_outside_the_site_lead_somewhere():
    """Sphinx checks the pages of docs/. Kills: a link of README or of another page
    beside it to a file that is gone.
    """
    found = [
        (page, target.removeprefix(REPOSITORY))
        for page in ROOT.glob("*.md")
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text())
    ]
    files = [
        (page.name, path)
        for page, target in found
        if not re.match(r"\w+:", path := re.sub(r"^/(blob|tree)/main/", "", target))
    ]
    assert files
    missing = [(page, path) for page, path in files if not (ROOT / path).exists()]
    assert missing in ([], [("README.md", "/issues")])


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Kills: a page in no table of contents, a link that only GitHub follows, a
    directive with a mistake.
    """
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        tmp_path / "trees",
    ]
    done = subprocess.run(
        [*command, ROOT / "docs", tmp_path / "html"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (
        "--objective.no-concat"
        in (tmp_path / "html" / "reference" / "config.html").read_text()
    )


def test_pictures_are_those_of_the_script():
    """Kills: a drawing changed by hand, a console's picture whose text is no
    console's, a large file.
    """
    for name, picture in pictures.DRAWN.items():
        assert (pictures.FOLDER / name).read_text() == picture(), (
            f"run python -m benchmarks.pictures: {name}"
        )
    console = (pictures.FOLDER / "terminal.svg").read_text()
    text = pictures.console_text(console)
    assert (
        pictures.terminal(text) == console
        and max(map(len, text.splitlines())) <= pictures.COLUMNS
    )
    assert max(path.stat().st_size for path in pictures.FOLDER.iterdir()) <= 300_000


@pytest.mark.slow
def test_the_demo_still_looks_like_its_pictures(tmp_path, capsys):
    """A short demo has the picture's lines before training and below its table, and the
    report's columns. Kills: a picture of an earlier console or report.
    """
    short = [
        word for key in ("pretrain", "discover") for word in (f"--{key}.epochs", "2")
    ]
    where = [
        "--workers",
        "0",
        "--compute.threads",
        "1",
        "--output",
        str(tmp_path / "run"),
    ]
    assert cli.main(["demo", *short, *where, "--train.max-steps", "4"]) == 0
    shown = pictures.shortened(capsys.readouterr().out)
    text = pictures.console_text((pictures.FOLDER / "terminal.svg").read_text())
    lines = [
        [words(line) for line in console.splitlines()] for console in (text, shown)
    ]
    begin = [[line for line in some if line[:1] and line[0] in FIRST] for some in lines]
    assert begin[0] == begin[1] and len(begin[0]) >= 7
    report = pictures.heads((tmp_path / "run" / "report.html").read_text())
    assert report == (pictures.FOLDER / "report.txt").read_text()


FIRST = ("setting", "memory", "data", "model", "training", "accuracy", "Task")


def words(line: str) -> list[str]:
    """The words of a line without its numbers and their units."""
    return re.findall(r"[A-Za-z-]{4,}", line)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    """As Jupyter does: cells share their names, the last expression of each shows
    itself; at three epochs of each phase. Kills: a name that does not exist, a model
    without discovered classes.
    """
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")
        if cell["cell_type"] == "code":
            tree = ast.parse(
                re.sub(r'(?<="epochs": )\d+', "3", "".join(cell["source"]))
            )
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, notebook.name, "exec"), names)
            if last is not None:
                value = eval(
                    compile(ast.Expression(last.value), notebook.name, "eval"), names
                )
                assert value is None or getattr(value, "_repr_html_", value.__repr__)()
    assert {output.kind for output in names["model"].classes} == {
        "known",
        "novel",
    } and len(names["found"])
