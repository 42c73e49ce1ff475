"""Imports follow the table of ARCHITECTURE.md, in no circle, and the method stays
short to read.
"""

import ast
import importlib
import pkgutil
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.forked import forked

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for package in ("uno", "pipelines", "tune")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def name_of(function: ast.expr) -> str:
    """The last word of what is called."""
    return getattr(function, "attr", getattr(function, "id", ""))


@cache
def imported(source: str) -> set[str]:
    """Dotted names that a module imports, anywhere in it: in functions and for type
    checkers too.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and name_of(node.func) in (
            "import_module",
            "__import__",
        ):
            names |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return names


def graph() -> dict[str, set[str]]:
    """Our modules and those of ours that each imports."""
    edges = {}
    for module, path in FILES.items():
        names = ((name, name.rpartition(".")[0]) for name in imported(path.read_text()))
        edges[module] = {
            next((n for n in pair if n in FILES), module) for pair in names
        } - {module}
    return edges


def room(module: str) -> str:
    """The folder a module lies in, as ARCHITECTURE.md names it."""
    return str(FILES[module].parent.relative_to(ROOT)) + "/"


def allowed() -> dict[str, set[str]]:
    """The table of ARCHITECTURE.md: folder -> folders and modules it may import."""
    rows = re.findall(
        r"^\| `([\w/]+/)` \|[^|]*\|([^|]*)\|$",
        (ROOT / "ARCHITECTURE.md").read_text(),
        re.M,
    )
    return {
        folder: {folder, *re.findall(r"`([\w/.]+)`", others)} for folder, others in rows
    }


def test_every_import_is_in_the_table():
    """Kills: an import of a higher room, at the top of a file or inside a function, a
    call of one through the metadata of what is installed; Ray below pipelines.
    """
    rules, wrong = allowed(), []
    assert {room(module) for module in FILES} == rules.keys()
    for module, found in graph().items():
        for other in found:
            if (
                room(other) not in rules[room(module)]
                and other not in rules[room(module)]
            ):
                wrong.append(f"{module} imports {other}")
    for module, path in FILES.items():
        tops = {name.partition(".")[0] for name in imported(path.read_text())}
        if "tests" in tops or (module.startswith("uno") and "ray" in tops):
            wrong.append(f"{module} imports {tops & {'tests', 'ray'}}")
        if module.startswith("uno") and "entry_points" in path.read_text():
            wrong.append(f"{module} looks for what was installed above it")
    assert not wrong


def test_no_module_imports_itself_in_a_circle():
    """At run time, inside functions and for type checkers. Kills: two modules that
    cannot be read alone.
    """
    TopologicalSorter(graph()).prepare()  # raises a CycleError that names the circle


def test_the_scan_sees_imports():
    """Kills: a scan that finds nothing."""
    source = (
        "import ray.train as rt\nfrom tune import a\ndef f():\n    from pipelines.cli"
        " import main\n"
    )
    assert imported(source) == {"ray.train", "tune.a", "pipelines.cli.main"}
    assert imported("importlib.import_module('tests.uno')") == {"tests.uno"}


def test_uno_imports_without_ray():
    """Every module of uno, with ray, pipelines and tune blocked. Kills: an import of
    them, wherever it is.
    """

    def import_again():
        for name in [
            name for name in sys.modules if name.partition(".")[0] in {"uno", *above}
        ]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(above))  # importing them raises
        uno = importlib.import_module("uno")
        for module in pkgutil.walk_packages(uno.__path__, "uno."):
            importlib.import_module(module.name)
            print(module.name, file=sys.stderr)

    above = ("ray", "pipelines", "tune")
    code, said = forked(import_again)
    assert code == 0 and said.count("\n") >= 30, said


def test_private_names_of_ray_are_in_one_module():
    """So that another version of Ray is one file to read. Kills: a private name
    without a fall-back.
    """
    private = re.compile(r"ray(\.\w+)*\.(_\w+|core\.generated|autoscaler)\b")
    found = {
        str(path.relative_to(ROOT))
        for folder in ("pipelines", "tune")
        for path in (ROOT / folder).rglob("*.py")
        if any(
            private.search(line)
            for line in path.read_text().splitlines()
            if "import " in line
        )
    }
    assert found == {"pipelines/ray_private.py"}


@pytest.mark.parametrize("word", ["np.random.seed", "random.seed(", "pickle.load"])
def test_no_global_random_state_and_no_pickles(word):
    """Kills: a resumed run that drifts, code that runs from a file of the user's."""
    for path in FILES.values():
        text = path.read_text()
        assert not re.search(rf"(?<![\w.]){re.escape(word)}", text), path
        for arguments in re.findall(r"(?<![\w.])torch\.load\((.*)", text):
            assert arguments.endswith("weights_only=True)"), path


def test_only_collectives_speaks_torch_distributed():
    """Distributed is the identity on one process. Kills: ranks in the maths."""
    speakers = {
        module
        for module, path in FILES.items()
        if "torch.distributed" in path.read_text()
    }
    assert {module for module in speakers if module.startswith("uno")} == {
        "uno.collectives"
    }
