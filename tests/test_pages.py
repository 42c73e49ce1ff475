"""README and the pages below docs/: commands parse or run, Python runs, and their
tables are those of the code.
"""

import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
import yaml

import uno
from pipelines import cli, tables
from pipelines import commands as commands_module
from pipelines.commands import DISCOVER
from pipelines.options import Command, parse, with_dashes
from pipelines.reproduce import REPRODUCE
from tests.pages import (
    FENCE,
    OF_LIBRARIES,
    PAGES,
    ROOT,
    blocks,
    commands,
    page,
    run_examples,
    table,
)
from tests.shapes import draw, draw_photos
from tests.uno.small_run import SMALL
from tune.spaces import load_space
from tune.sweep import TUNE
from uno import errors
from uno.data.sources import SOURCES
from uno.errors import ConfigError
from uno.methods import METHODS
from uno.presets import preset
from uno.results import predictions

README = page("README.md")


def of_discover() -> list[list[str]]:
    """The words after ``-m pipelines`` in all code blocks."""
    text = "\n".join(block for name in PAGES for block in blocks(page(name))).replace(
        "\\\n", " "
    )
    return [shlex.split(words) for words in re.findall(r"-m pipelines (.+)", text)]


@pytest.mark.parametrize("name", PAGES)
def test_every_command_line_parses(name, tmp_path, monkeypatch):
    """Kills: a flag, command or preset on a page that does not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    best = tmp_path / "runs" / "tune" / "best.yaml"  # what uno tune leaves
    best.parent.mkdir(parents=True)
    best.write_text("objective: {epsilon: 0.05}\n")
    declared = {
        c.name: c
        for c in (*vars(commands_module).values(), TUNE)
        if isinstance(c, Command)
    }
    for _, command, *words in commands(page(name)):
        if command == "--version":
            continue
        assert command in cli.SENTENCES
        if command in declared:
            options = parse(words, declared[command])
            assert options.command.takes != "all" or options.config.preset
        else:
            assert command == "reproduce", f"{command} is not parsed"
            assert tables.read_request(parse(words, REPRODUCE), words).table.rows
    with pytest.raises(ConfigError):
        parse(["--no-such-flag", "1"], DISCOVER)


def test_submitted_and_launched_commands_parse():
    found = of_discover()
    assert found
    for command, *words in found:
        assert command == "discover" and parse(words, DISCOVER).config.output


FOREIGN = {
    "--working-dir",
    "--gpus",
    "--log-dir",
    "--tee",
}  # of other programs, named in sentences
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """All flags of all commands."""
    declared = [
        c
        for c in (*vars(commands_module).values(), TUNE, REPRODUCE)
        if isinstance(c, Command)
    ]
    return {
        "--version",
        "--help",
        *(flag for c in declared for flag in c.flags(*METHODS)),
    }


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_in_a_sentence_exists(name, flags):
    """Kills: a flag that was renamed and is left in the text."""
    code = re.findall(r"`([^`\n]+)`", FENCE.sub("", page(name)))
    words = [
        word
        for text in code
        if not text.startswith(("ray ", "pip "))
        for word in FLAG.findall(text)
    ]
    own = {"--distill.entropy-weight", "--NAME.FIELD"}  # of examples/my_method.py
    assert {with_dashes(word) for word in words} - flags - FOREIGN - own == set()


def test_every_make_target_of_a_page_exists():
    """Kills: a target that was renamed and is left on a page."""
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(block for name in PAGES for block in blocks(page(name)))
    used = set(re.findall(r"^make ([\w-]+)", text, re.M))
    assert used >= {"demo", "test"}
    assert [name for name in used if not re.search(rf"^{name}:", makefile, re.M)] == []


FEW = {"max_steps": 2, "compute.threads": 1}


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
    if "<!-- executed -->" in page(name) or "```python" in page(name)
]
RUNS = [name for name in RUNS if name not in ("README.md", *OF_LIBRARIES)]


@pytest.mark.release
@pytest.mark.parametrize("name", RUNS)
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


def test_the_space_of_a_search_is_one(tmp_path):
    (text,) = blocks(page("docs/guides/tune.md"), "yaml")
    (tmp_path / "space.yaml").write_text(text)
    assert {
        d.key for d in load_space(str(tmp_path / "space.yaml"), preset("cifar10"))
    } == yaml.safe_load(text).keys()


def test_promises_name_their_tests():
    """Every row of "Fault tolerance" names a test that is there."""
    _, *rows = table("docs/deploy/fault-tolerance.md", "| what happens |")
    assert rows
    for *_, test in rows:
        path, name = re.search(r"`(tests/[^`]+)::(\w+)`", test).groups()
        assert f"\ndef {name}(" in (ROOT / path).read_text(), test


def test_the_exit_codes_are_the_errors():
    """Kills: an error with a code that the table lacks."""
    _, *rows = table("docs/deploy/fault-tolerance.md", "| exit code |")
    codes = {
        value.exit_code
        for value in vars(errors).values()
        if hasattr(value, "exit_code")
    }
    assert {int(code) for code, _ in rows} == codes | {0, 130, 141}


def test_the_columns_of_predictions_are_those_of_the_code():
    _, *rows = table("docs/reference/predictions.md", "| column |")
    assert [name.strip("`") for name, *_ in rows] == [*predictions.COLUMNS, "embedding"]
    assert [kind for _, kind, _ in rows[:-1]] == [
        str(kind) for kind in predictions.COLUMNS.values()
    ]


def test_the_sources_are_those_of_the_code():
    """Kills: a source that the table of formats lacks, or one that is gone."""
    _, *rows = table("docs/reference/data-formats.md", "| `--data` |")
    found = {
        word for row in rows for word in re.findall(r"`'?(\w+):[A-Z]", " ".join(row))
    }
    assert found == set(SOURCES)
