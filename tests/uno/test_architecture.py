"""What import-linter cannot express. The packages' order is its contract, in
pyproject.toml.
"""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for package in ("uno", "pipelines", "tune", "reproduce")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def test_no_module_imports_itself_in_a_circle():
    """Not even inside functions. Imports for type checkers do not count: a method is
    typed by the configuration, which has a section for it. The linter compares only
    packages that lie beside each other.
    """
    graph = grimp.build_graph(
        "uno",
        "pipelines",
        "tune",
        "reproduce",
        cache_dir=None,
        exclude_type_checking_imports=True,
    )
    imports = {
        module: graph.find_modules_directly_imported_by(module)
        for module in graph.modules
    }
    assert imports.keys() >= FILES.keys() and any(imports.values())
    TopologicalSorter(imports).prepare()  # raises a CycleError that names the circle


@pytest.mark.parametrize("word", ["np.random.seed", "random.seed(", "pickle.load"])
def test_no_global_random_state_and_no_pickles(word):
    """Kills: a resumed run that drifts, code that runs from a file of the user's."""
    for path in FILES.values():
        text = path.read_text()
        assert not re.search(rf"(?<![\w.]){re.escape(word)}", text), path
        for arguments in re.findall(r"(?<![\w.])torch\.load\((.*)", text):
            assert arguments.endswith("weights_only=True)"), path
