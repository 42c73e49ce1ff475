"""README and the pages of docs/: commands parse, examples and notebooks run, the
reference is that of the code, and the site builds.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

import uno
from pipelines import cli
from pipelines import commands as commands_module
from pipelines.commands import DISCOVER
from pipelines.options import Command, parse, with_dashes
from reproduce import tables
from reproduce.command import REPRODUCE
from tests.pages import (
    FENCE,
    OF_LIBRARIES,
    PAGES,
    ROOT,
    blocks,
    commands,
    page,
    run_examples,
)
from tests.shapes import draw, draw_photos
from tests.uno.small_run import SMALL
from tools import docs
from tune.sweep import TUNE
from uno.method import METHODS

COMMANDS = {
    command.name: command
    for command in (*vars(commands_module).values(), TUNE, REPRODUCE)
    if isinstance(command, Command)
}
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
FEW = {"max_steps": 2, "compute.threads": 1}
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
# flags of other programs, and of examples/my_method.py
FOREIGN = {"--working-dir", "--gpus", "--log-dir", "--tee"}
FOREIGN |= {"--distill.entropy-weight", "--NAME.FIELD", "--version", "--help"}


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_a_page_names_is_there(name):
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)", page(name)):
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


@pytest.mark.parametrize("name", PAGES)
def test_every_command_line_parses(name, tmp_path, monkeypatch):
    """Kills: a flag, command or preset on a page that does not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    best = tmp_path / "runs" / "tune" / "best.yaml"  # what uno tune leaves
    best.parent.mkdir(parents=True)
    best.write_text("objective: {epsilon: 0.05}\n")
    for _, command, *words in commands(page(name)):
        if command == "reproduce":
            tables.read_request(parse(words, REPRODUCE), words)
        elif command != "--version":
            parse(words, COMMANDS[command])
    text = "\n".join(blocks(page(name))).replace("\\\n", " ")
    for words in re.findall(r"-m pipelines discover (.+)", text):
        assert parse(shlex.split(words), DISCOVER).config.output


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_in_a_sentence_exists(name):
    """Kills: a flag that was renamed and is left in the text."""
    known = {flag for each in COMMANDS.values() for flag in each.flags(*METHODS)}
    for text in re.findall(r"`([^`\n]+)`", FENCE.sub("", page(name))):
        flags = set() if text.startswith(("ray ", "pip ")) else {*FLAG.findall(text)}
        assert {with_dashes(flag) for flag in flags - FOREIGN} <= known


def test_the_reference_is_that_of_the_code():
    """Kills: an option, limit or docstring that changed after the last
    `python -m tools.docs`.
    """
    for name, text in docs.pages().items():
        assert (docs.FOLDER / name).read_text() == text, f"{name} is stale"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Kills: a page in no table of contents, a link that only GitHub follows, a
    directive with a mistake.
    """
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    command += ["-d", tmp_path / "trees", ROOT / "docs", tmp_path / "html"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A directory with what the pages begin with: photographs, a run, two images."""
    folder = tmp_path_factory.mktemp("docs")
    draw_photos(folder / "photos")
    draw("cross", 1).save(folder / "a.jpg")
    draw("bolt", 2).save(folder / "b.png")
    weights = folder / "torch/hub/checkpoints/efficientnet_b0_rwightman-7f5810bc.pth"
    weights.parent.mkdir(parents=True)  # as after a download, but untrained
    torch.save(torchvision.models.efficientnet_b0().state_dict(), weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        uno.discover(data="digits", output="runs/demo", quiet=True, **SMALL, **FEW)
    return folder


RUNS = [
    name
    for name in PAGES
    if ("<!-- executed -->" in page(name) or "```python" in page(name))
    and name not in OF_LIBRARIES
]
LANES = {"README.md": pytest.mark.slow}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=LANES.get(name, pytest.mark.release)) for name in RUNS],
)
def test_the_examples_of_a_page_run(name, made, tmp_path, monkeypatch):
    """In order: Python, and the commands that are marked. Kills: an example that
    ends with an error.
    """
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(uno, "discover", partial(uno.discover, quiet=True, **FEW))
    assert run_examples(name)


def test_the_example_of_a_method_is_the_file():
    """Kills: an excerpt that is older than the example that tests run."""
    example = (ROOT / "examples" / "my_method.py").read_text()
    found = blocks(page("docs/contributing/add-a-method.md"), "python")
    assert found and all(block in example for block in found)


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_demo_finds_the_digits(tmp_path):
    """Without Ray, which changes no number (test_golden)."""
    here = ["--workers", "0", "--compute.threads", "1"]
    assert cli.main(["demo", *here, "--output", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert results["train/novel/task_aware/acc/best"] > 0.96
    assert results["train/known/task_aware/acc/best"] > 0.99


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    """As Jupyter does: cells share their names, and the last expression of each shows
    itself. Each phase has three epochs.
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        assert not cell.get("outputs")
        if cell["cell_type"] != "code":
            continue
        text = re.sub(r'(?<="epochs": )\d+', "3", "".join(cell["source"]))
        tree = ast.parse(text)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, notebook.name, "exec"), names)
        if last is not None:
            shown = compile(ast.Expression(last.value), notebook.name, "eval")
            value = eval(shown, names)
            assert value is None or getattr(value, "_repr_html_", value.__repr__)()
    assert len(names["found"])
