"""The pages of docs/: the reference is fresh, the site builds, notebooks run."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import docs, pictures

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_the_reference_is_that_of_the_code():
    """Kills: a flag, field, limit or docstring that changed after
    `python -m tools.docs`.
    """
    for name, text in docs.pages().items():
        assert (docs.FOLDER / name).read_text() == text, (
            f"run python -m tools.docs: {name} is stale"
        )


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
    """Kills: a drawing that was changed by hand."""
    for name, picture in pictures.DRAWN.items():
        assert (pictures.FOLDER / name).read_text() == picture(), (
            f"run python -m tools.pictures: {name}"
        )


@pytest.mark.release
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
